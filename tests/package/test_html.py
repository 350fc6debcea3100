#!/usr/bin/env python3
"""Test HTML in the Python package: rows of links, names, references, optional end tags, attributes, depth.

Usage: tests/python tests/package/test_html.py
"""

import json
import pathlib
import re
import sys
import time

from moe_translate import TextError, Translator, pages
from moe_translate.documents import translate_document
from moe_translate.segments import translate_parts
from suite import Suite

test = Suite()
CASES = json.loads((pathlib.Path(__file__).parent / "html_cases.json").read_text(encoding="utf-8"))
SEEN = re.compile(r"(<[^<>]*>|\{\d+\}|&\w+;)")


def louder(texts):
    return ["".join(p if SEEN.fullmatch(p) else p.upper() for p in SEEN.split(text)) for text in texts]


def translate(page, translator=louder, **languages):
    return translate_parts(pages.parts(page, **languages), translator)


@test
def cases_of_the_server_hold():
    for given, wanted, *_ in CASES:
        assert translate(given) == wanted, (given, translate(given), wanted)
        assert translate(given, lambda texts: [""] * len(texts)) == given, given


@test
def tag_pairs_that_lose_their_words_are_translated_separately():
    page = "<p>See <a href=u>the house</a> and <b>a dog</b>.</p>"
    empty = lambda texts: [text.replace("<x1>the house</x1>", "the house<x1></x1>") for text in texts]  # noqa: E731
    assert translate(page, empty) == page
    assert translate(page, lambda t: [re.sub(r"</?x\d+>", "", x).upper() for x in t]) == (
        "<p>SEE <a href=u>THE HOUSE</a> AND <b>A DOG</b>.</p>"
    )
    code = "<p>Run <code>ls -l</code> now.</p>"
    assert translate(code, lambda texts: [text.replace("{1}", "") for text in texts]) == code


@test
def visible_attributes_are_translated():
    for given, wanted in (
        ('<input type="submit" value="send it">', '<input type="submit" value="SEND IT">'),
        ('<input type=text value="send it" placeholder="it">', '<input type=text value="send it" placeholder="IT">'),
        ('<meta name="description" content="my house">', '<meta name="description" content="MY HOUSE">'),
        ('<meta property="og:title" content="my house">', '<meta property="og:title" content="MY HOUSE">'),
        ('<meta name="generator" content="my house">', '<meta name="generator" content="my house">'),
        ("<p title='&#123; 5'>a</p>", "<p title='&#123; 5'>A</p>"),
        ("<nav aria-label=\"{% translate 'b' %}\">a</nav>", "<nav aria-label=\"{% translate 'b' %}\">A</nav>"),
        ('<p>See <a title="my dog">it</a> now</p>', '<p>SEE <a title="MY DOG">IT</a> NOW</p>'),
    ):
        assert translate(given) == wanted, (given, translate(given))


@test
def the_language_of_a_page_is_replaced():
    for page, wanted in (
        ('<html lang="en-GB"><p lang="en">A</p></html>', '<html lang="de"><p lang="de">A</p></html>'),
        ("<html xml:lang='en' lang='en'>A", "<html xml:lang='de' lang='de'>A"),
        ("<html lang=en><p>A <i lang='en_US' title='b c'>d</i>", "<html lang=de><p>A <i lang='de' title='B C'>D</i>"),
        ('<html lang="en"><p lang="fr">A <b lang="">b</b></p>', '<html lang="de"><p lang="fr">A <b lang="">B</b></p>'),
        ('<html lang="en"><p translate="no" lang="en">A</p>', '<html lang="de"><p translate="no" lang="en">A</p>'),
        ('<html lang="en"><meta http-equiv="Content-Language" content="en">A',
         '<html lang="de"><meta http-equiv="Content-Language" content="de">A'),
        ('<p lang="en">A', '<p lang="en">A'),
    ):  # fmt: skip
        assert translate(page, target="deu_Latn") == wanted, (page, translate(page, target="de"))
    page = '<html lang="en-GB"><p lang="en">A</p></html>'
    assert translate(page, source="en", target="de") == '<html lang="de"><p lang="de">A</p></html>'
    assert translate(page, source="fr", target="de") == page == translate(page)


@test
def deep_and_long_pages_take_little_time():
    for page in (
        "<b>" * 100000,
        "<div>" * 100000 + "A",
        "<b><i>A</i>" * 10000,
        "<i>A " * 1000 + "</i>" * 1000,
        " " * 400000 + "X" + "<wbr>" * 100000,
        "<p class=notranslate>" * 20000,
        '<a x="' * 50000,
        "X<sup>" * 10000,
        "1" * 100000 + "<sup>2</sup>" * 1000,
    ):
        begin = time.process_time()
        assert translate(page) == page, page[:30]
        assert time.process_time() - begin < 10, (page[:30], time.process_time() - begin)


@test
def a_translator_accepts_pages():
    with Translator(target="de", source="en") as translator:
        page = '<html lang="en"><p title="Good morning">Where is <b>my book</b>?</p>'
        wanted = '<html lang="de"><p title="Guten Morgen">Wo ist <b>mein Buch</b>?</p>'
        assert translator.translate(page, format="html") == wanted
        assert translator.translate([page, "<hr>"], format="html") == [wanted, "<hr>"]
        for wrong in {"format": "rtf"}, {"format": "html", "errors": "ignore"}:
            try:
                translator.translate(page, **wrong)
            except ValueError:
                continue
            raise AssertionError(f"{wrong} was accepted")


@test
def errors_of_pages_name_the_page_or_leave_its_text():
    with Translator(target="de", source="en", max_len=8) as translator:
        page = "<p>I have never seen this man before and he came to my house yesterday</p>"
        pages = ["<p>Good <b>morning</b></p><p>house</p>", page]
        good, kept = translator.translate(pages, format="html", errors="empty")
        assert "Morgen" in good and kept == page, (good, kept)
        for number in 0, 1:
            try:
                translator.translate(pages[number:] + ["<hr>"], format="html")
            except TextError as error:
                assert error.index == 1 - number and "tokens" in str(error), (error.index, error)
                continue
            raise AssertionError("a page with untranslated text was accepted")
        try:
            translator.translate("<hr>", format="html", errors="ignore")
        except ValueError:
            return
        raise AssertionError("an unknown value of errors was accepted")


@test
def code_of_templates_is_kept():
    page = "<p>Your name is <%= name %> here.</p>\n<% if (x > 1) { %>\n<p>It is <?= $a ?> <%# note %>good.</p>\n<% } %>\n<p>5 dogs <% 6</p>"
    seen = []
    got = translate_document(page, "html", lambda texts: seen.extend(texts) or [text.upper() for text in texts])
    assert got == page.replace("Your name is", "YOUR NAME IS").replace("here", "HERE").replace(
        "It is", "IT IS").replace("good", "GOOD").replace("5 dogs <% 6", "5 DOGS &lt;% 6"), (seen, got)


if __name__ == "__main__":
    sys.exit(test.run())
