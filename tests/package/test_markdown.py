#!/usr/bin/env python3
"""Test tools/python/moe_translate/markdown.py: extensions of CommonMark in READMEs, and rows of links.

Usage: tests/python tests/package/test_markdown.py
"""

import re
import sys

from moe_translate.documents import translate_document
from suite import Suite

test = Suite()
SEEN = re.compile(r"(<[^<>]*>|\{\d+\}|&\w+;)")


def louder(texts):
    return ["".join(p if SEEN.fullmatch(p) else p.upper() for p in SEEN.split(text)) for text in texts]


CASES = (
    ("![](a.png) Good morning.\n", "![](a.png) GOOD MORNING.\n"),
    ("[![be](i)](l) [![see](j)](m)\n", "[![BE](i)](l) [![SEE](j)](m)\n"),
    ("[![](i)](l) ![](j)\n\nHi\n", "[![](i)](l) ![](j)\n\nHI\n"),
    ("[Home](a.md) [About us](b.md) | [*Help*](c.md)\n", "[HOME](a.md) [ABOUT US](b.md) | [*HELP*](c.md)\n"),
    (
        "See [The Book], [The *House*][] and [it][the book] [x].\n\n[the book]: a\n[the *house*]: b\n",
        "SEE [THE BOOK][The Book], [THE *HOUSE*][The *House*] AND [IT][the book] [X].\n\n"
        "[the book]: a\n[the *house*]: b\n",
    ),
    ("> [!NOTE]\n> Good day.\n> Bye.\n", "> [!NOTE]\n> GOOD DAY. BYE.\n"),
    ('+++\ntitle = "My"\n+++\n\nGood.\n', '+++\ntitle = "My"\n+++\n\nGOOD.\n'),
    ("# Title {#my-id}\n", "# TITLE {#my-id}\n"),
    ("Use <code>while a</code> and <kbd>Esc</kbd> now.\n", "USE <code>while a</code> AND <kbd>Esc</kbd> NOW.\n"),
    ("Let $x_{i+1} = \\frac{a}{b}$ be 5$ or $100\\%$.\n", "LET $x_{i+1} = \\frac{a}{b}$ BE 5$ OR $100\\%$.\n"),
    ("Good\n\n$$\nx = y\n+ z\n$$\n", "GOOD\n\n$$\nx = y\n+ z\n$$\n"),
    ("Term\n: What it\n  is\n", "TERM\n: WHAT IT IS\n"),
    ("- [ ] Do it[^1] now\n\n[^1]: A note\n", "- [ ] DO IT[^1] NOW\n\n[^1]: A NOTE\n"),
    ("A :dog: and {{< x y >}} here at 10:30:15.\n", "A :dog: AND {{< x y >}} HERE AT 10:30:15.\n"),
    ("We have 10<sup>2</sup> dogs.\n", "WE HAVE 10<sup>2</sup> DOGS.\n"),
    ("| A b | c | do `d` |\n|---|---|---|\n| e | [f](g) | [do](g) |\n",
     "| A B | c | DO `d` |\n|---|---|---|\n| e | [f](g) | [DO](g) |\n"),
    (":::note\nUse it now.\n:::\n", ":::note\nUSE IT NOW.\n:::\n"),
    ('!!! note "A title"\n    The dog.\n\n    - It is\n      red.\n\nThe end.\n',
     '!!! note "A TITLE"\n    THE DOG.\n\n    - IT IS RED.\n\nTHE END.\n'),
    ("??? warning\n    The cat.\n", "??? warning\n    THE CAT.\n"),
    ("One:\n\n    some code\n", "ONE:\n\n    some code\n"),
    ("- <div>The house.</div>\n- Two\n", "- <div>THE HOUSE.</div>\n- TWO\n"),
    ('<p align="a">\nMy friend.\n</p>\n\nGood.\n', '<p align="a">\nMY FRIEND.\n</p>\n\nGOOD.\n'),
    ("<details>\n<summary>Open it</summary>\n\nThe dog.\n\n</details>\n",
     "<details>\n<summary>OPEN IT</summary>\n\nTHE DOG.\n\n</details>\n"),
    ("- An item\n\n  <table><td>The cat.</table>\n", "- AN ITEM\n\n  <table><td>THE CAT.</table>\n"),
    ("<!-- a note -->\n\n<script>\nvar x\n\n</script>\n", "<!-- a note -->\n\n<script>\nvar x\n\n</script>\n"),
    ('A <img alt="big &amp; red" src="x y"> dog.\n', 'A <img alt="BIG &amp; RED" src="x y"> DOG.\n'),
    ("\f\nThe second\npage.\n", "\f\nTHE SECOND PAGE.\n"),
    ("One page.\n\fNext \f page.\n", "ONE PAGE.\n\fNEXT \f PAGE.\n"),
    ("> \fA line.\n> \f\n> More.\n", "> \fA LINE.\n> \f\n> MORE.\n"),
    ("A line.\n\x1c\nMore.\n", "A LINE.\n\x1c\nMORE.\n"),
    ("> <div>\n> The\n>house\n> </div>\n>\n> Good.\n", "> <div>\n> THE HOUSE\n> </div>\n>\n> GOOD.\n"),
    ('1. > <p\n   >  title="My\n   >\tdog">The <b\n   > id=x>red</b> house.\n',
     '1. > <p\n   >  title="MY DOG">THE <b\n   > id=x>RED</b> HOUSE.\n'),
    ('[It](u "My \\"dog\\"") ![is](<v w> \'A cat\') [so](x (Red)).\n',
     '[IT](u "MY \\"DOG\\"") ![IS](<v w> \'A CAT\') [SO](x (RED)).\n'),
    ("[It] is.\n\n[it]: u\n  'My dog'\n> [no]: <v> (The cat)\n", "[IT][It] IS.\n\n[it]: u\n  'MY DOG'\n> [no]: <v> (THE CAT)\n"),
    ("[^1]: My\n  dog.\n[^2]: The cat.\n[^3]: Good\n\n> [^x]: Red\n> [^y]: House\n",
     "[^1]: MY DOG.\n[^2]: THE CAT.\n[^3]: GOOD\n\n> [^x]: RED\n> [^y]: HOUSE\n"),
    ("It is[^1].\n\n[^1]: One\n    note.\n\n    The\n    dog.\n\n        code a\n\n    The cat.\n",
     "IT IS[^1].\n\n[^1]: ONE NOTE.\n\n    THE DOG.\n\n        code a\n\n    THE CAT.\n"),
    ("[^1]: One.\r\n\r\n    The dog.\r\n", "[^1]: ONE.\r\n\r\n    THE DOG.\r\n"),
    ("!!! note\r\n\r\n    The dog.\r\n\r\n    The cat.\r\n",
     "!!! note\r\n\r\n    THE DOG.\r\n\r\n    THE CAT.\r\n"),
    ('a | b c\n--|--\nor `a\\|b` it | the \\| [dog](u "my \\| cat")\n',
     'a | B C\n--|--\nOR `a\\|b` IT | THE \\| [DOG](u "MY \\| CAT")\n'),
)


@test
def extensions_of_readmes_are_supported():
    for given, wanted in CASES:
        got = translate_document(given, "markdown", louder)
        assert got == wanted, (given, got, wanted)


@test
def translations_that_break_a_link_are_refused():
    text = "[See it](u) [The dog](v)\n"
    assert translate_document(text, "markdown", lambda texts: [t + "]" for t in texts]) == text
    text = '[See it](u "My title") and ![the dog](v (The \\| cat)).\n\n[z]: w \'My house\'\n'
    for sign in '"', "'", "(", ")":
        got = translate_document(text, "markdown", lambda texts: [t + sign + " x" for t in texts])  # noqa: B023
        assert re.sub(r"\\?" + re.escape(sign) + " x", "", got) == text != got, got
    for sign in "\\", "\n\nA", "[", "|":
        got = translate_document(text, "markdown", lambda texts: [t + sign if "<x" not in t else t for t in texts])  # noqa: B023
        assert got == text, got
    nothing = lambda texts: [re.sub(r"\{\d+\}", "", t) for t in texts]  # noqa: E731
    assert translate_document("Run `ls -l` now.\n", "markdown", nothing) == "Run `ls -l` now.\n"


if __name__ == "__main__":
    sys.exit(test.run())
