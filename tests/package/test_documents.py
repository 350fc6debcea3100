#!/usr/bin/env python3
"""Test that moe_translate.documents keeps every byte of a document's structure, whatever the translator does.

Usage: tests/python tests/package/test_documents.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import contextlib
import html
import io
import os
import pathlib
import pty
import random
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser

import polib
from markdown_it import MarkdownIt
from moe_translate import Result, translator
from moe_translate import program as moe_program
from moe_translate.documents import FORMATS, format_of, translate_document
from moe_translate.segments import Mark, Segment
from suite import Suite

test = Suite()
ROOT = pathlib.Path(__file__).resolve().parents[2]
TAG = re.compile(r"(<[^<>]*>)")


# ---- Translators -------------------------------------------------------


def same(texts):
    return list(texts)


def louder(texts):
    """An ideal translator, which returns texts in capitals with the same tags."""
    return ["".join(part if part.startswith("<") else part.upper() for part in TAG.split(text)) for text in texts]


def careless(texts):
    """A careless translator, which returns texts in capitals without tags."""
    return [TAG.sub("", text).upper() for text in texts]


def wild(texts):
    """A wild translator, which reorders text and tags, invents tags and adds reserved characters."""
    r, out = random.Random(len(texts)), []
    for text in texts:
        parts = TAG.split(text.upper())
        r.shuffle(parts)
        out.append("".join(parts) + r.choice(("", "<x1>", "</x9>", " & <b> \" ' > # * _ ` | [x](y) {0}", "\\", "--")))
    return out


TRANSLATORS = (same, louder, careless, wild)


# ---- HTML --------------------------------------------------------------


class Shape(HTMLParser):
    """Collect a page's tags with their untranslated attributes, comments, and the text of untranslated elements."""

    def __init__(self, data):
        super().__init__(convert_charrefs=False)
        self.found, self.text, self.kept = [], [], 0
        self.feed(data)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append(
            (tag, [(k, None if k in ("alt", "title", "placeholder", "aria-label") else v) for k, v in attrs])
        )
        self.kept += tag in ("script", "style", "pre", "code")

    def handle_endtag(self, tag):
        self.found.append("/" + tag)
        self.kept -= tag in ("script", "style", "pre", "code") and self.kept > 0

    def handle_data(self, data):
        (self.found if self.kept else self.text).append(data)

    def handle_comment(self, data):
        self.found.append("!" + data)

    handle_decl = handle_pi = unknown_decl = handle_comment

    def handle_entityref(self, name):
        self.text.append(html.unescape(f"&{name};"))

    def handle_charref(self, name):
        self.text.append(html.unescape(f"&#{name};"))


WORDS = "the old house stands near a river where people sell fresh fish every morning".split()


def sentence(r):
    return " ".join(r.choice(WORDS) for _ in range(r.randint(1, 9))).capitalize() + r.choice(".!?")


def inline_html(r, depth=0):
    kind = r.randrange(9 if depth < 3 else 3)
    if kind < 3:
        return sentence(r)
    if kind == 3:
        return r.choice(
            ("&amp;", "&lt;x&gt;", "&#233;", "&nbsp;", "&copy;", "<br>", "<br/>", "<img src=a.png alt='A cat'>")
        )
    if kind == 4:
        return f"<code>{r.choice(('a &lt; b', 'x = <b>1</b>', 'ls'))}</code>"
    if kind == 5:
        return f'<span translate="no">{sentence(r)} <i>kept</i></span>'
    name = r.choice(("b", "i", "em", "a href='x?a=1&b=2' title=\"The link\"", "span class=y", "strong", "sub"))
    return f"<{name}>" + " ".join(inline_html(r, depth + 1) for _ in range(r.randint(0, 3))) + f"</{name.split()[0]}>"


def a_page(seed):
    r = random.Random(seed)
    out = [
        "<!DOCTYPE html>\n<html><head><title>",
        sentence(r),
        "</title><style>p { color: red }</style></head>\n<body class=x>\n",
    ]
    for _ in range(r.randint(1, 8)):
        block = r.choice(("p", "h1", "li", "td", "div", "blockquote"))
        text = r.choice((" ", "\n  ")).join(inline_html(r) for _ in range(r.randint(1, 5)))
        out.append(
            r.choice((f"<{block}>{text}</{block}>\n", f"<{block}>{text}\n", f"<{block}><b>{text}</b></{block}>"))
        )
        if r.random() < 0.3:
            out.append(
                r.choice(
                    (
                        "<!-- a comment <p> -->",
                        '<script>if (a < b) "x"</script>',
                        "<pre>  keep\n  this</pre>",
                        "<hr/>",
                        "<input placeholder='Your name' value=v>",
                        "</div>",
                        "<?php echo ?>",
                    )
                )
            )
    return "".join(out) + "</body></html>\n"


@test
def pages_keep_their_structure():
    for seed in range(200):
        page = a_page(seed)
        wanted = Shape(page)
        for translator in TRANSLATORS:
            found = Shape(translate_document(page, "html", translator)).found
            assert sorted(map(str, found)) == sorted(map(str, wanted.found)), (seed, translator.__name__, page)
            assert translator is not same or found == wanted.found, (seed, page)
        plain = " ".join("".join(Shape(translate_document(page, "html", same)).text).split())
        assert plain == " ".join("".join(wanted.text).split()), (seed, page)


@test
def a_page_is_translated():
    page = (
        '<p>Click <b>Save</b> to keep <a href="x?a=1&b=2">this</a>&nbsp;file.\n <code>a < b</code> ends.</p>'
        '<img alt="A &quot;cat&quot;" src=x.png><p class="notranslate">Name</p>'
    )
    assert translate_document(page, "html", louder) == (
        '<p>CLICK <b>SAVE</b> TO KEEP <a href="x?a=1&b=2">THIS</a>\u00a0FILE. <code>a < b</code> ENDS.</p>'
        '<img alt="A &quot;CAT&quot;" src=x.png><p class="notranslate">Name</p>'
    )
    assert translate_document("<p>Click <b>Save</b> now.</p>", "html", careless) == "<p>CLICK <b>SAVE</b> NOW.</p>"
    assert translate_document("<p>One</p>", "html", lambda texts: ["a < b & c"]) == "<p>a &lt; b &amp; c</p>"


@test
def links_of_words_keep_words():
    page = "<p>It was <a href='u'>released</a> on 09 March.</p>"
    for kind, text, link in (
        ("html", page, "<a href='u'>RELEASED</a>"),
        ("markdown", "It [came](u) in 1999.\n", "[CAME](u)"),
    ):
        got = translate_document(
            text, kind, lambda texts: ["Am <x1>09</x1>. erschienen" if "<x1>" in t else t.upper() for t in texts]
        )
        assert link in got, got


@test
def the_translator_sees_sentences_with_tags():
    seen = []
    translate_document(
        "<p>Click <b>Save</b> or <img src=a>!</p><p>\n 12 </p><p><i>All</i></p>",
        "html",
        lambda texts: seen.extend(texts) or texts,
    )
    assert seen == ["Click <x1>Save</x1> or <x2/>!", "All"]


# ---- Markdown ----------------------------------------------------------


def inline_markdown(r, depth=0):
    kind = r.randrange(9 if depth < 2 else 3)
    if kind < 3:
        return sentence(r)
    inner = inline_markdown(r, depth + 1) if kind > 5 else ""
    return {
        3: "`a * b`",
        4: "<https://x.org/a_b>",
        5: r.choice(("\\*", "&amp;", "snake_case_word", "3 * 4", "![A cat](c.png)")),
        6: f"**{inner}**",
        7: f"*{inner}*",
        8: f'[{inner}](http://x.org/y_z "T")',
    }[kind]


def a_text(seed):
    r = random.Random(seed)
    out = [r.choice(("", "---\ntitle: x\n---\n"))]
    for _ in range(r.randint(1, 7)):
        line = " ".join(inline_markdown(r) for _ in range(r.randint(1, 3)))
        more = " ".join(inline_markdown(r) for _ in range(r.randint(1, 3)))
        out.append(
            r.choice(
                (
                    f"# {line}\n\n",
                    f"{line}\n{more}\n\n",
                    f"{line}  \n{more}\n\n",
                    f"{line}\\\n{more}\n\n",
                    f"> {line}\n> {more}\n\n",
                    f"1. {line}\n2. {more}\n   wrapped\n\n",
                    f"- {line}\n  - {more}\n\n",
                    f"| {line.replace('|', '')} | B |\n|---|:-:|\n| c | *d* |\n\n",
                    "```py\nx = 1 # no\n```\n\n",
                    f"Title\n=====\n\n{line}\n\n",
                    "<div>\nraw\n</div>\n\n",
                    "    indented code\n\n",
                    "* * *\n\n",
                )
            )
        )
    return "".join(out)


def markdown_shape(text):
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])

    def walk(tokens):
        for token in tokens:
            if token.type in ("text", "softbreak", "text_special"):
                continue
            yield (
                token.type,
                token.tag,
                token.markup,
                token.info,
                token.attrs.get("href") or token.attrs.get("src"),
                token.content if token.type in ("fence", "code_block", "code_inline") else "",
                re.findall("<[^<>]*>", token.content) if token.type == "html_block" else [],
            )
            if token.type == "inline":  # sort, because a translation may reorder emphasis
                yield tuple(sorted(map(str, walk(token.children))))

    return list(walk(parser.parse(text)))


@test
def markdown_keeps_its_structure():
    for seed in range(300):
        text = a_text(seed)
        wanted = markdown_shape(text)
        for translator in TRANSLATORS:
            got = translate_document(text, "markdown", translator)
            assert markdown_shape(got) == wanted, (seed, translator.__name__, text, got)


@test
def markdown_is_translated():
    text = (
        '---\ntitle: x\n---\n# A *long* title\n\nA [link](http://x.y/z "T") and `code`,\nwrapped with **bold**.  \n'
        "Behind a break.\n\n| A b | c |\n|---|---|\n| d | *e* |\n"
    )
    assert translate_document(text, "markdown", louder) == (
        '---\ntitle: x\n---\n# A *LONG* TITLE\n\nA [LINK](http://x.y/z "T") AND `code`, WRAPPED WITH **BOLD**.  \n'
        "BEHIND A BREAK.\n\n| A B | c |\n|---|---|\n| d | *e* |\n"
    )
    assert translate_document("A [link](u) *and*.\n", "markdown", careless) == "A [LINK](u) *AND*.\n"
    assert translate_document("Text\n", "markdown", lambda texts: ["# Text"]) == "Text\n"  # "#" must not make a heading


# ---- Subtitles ---------------------------------------------------------


def a_film(seed, newline="\n"):
    r = random.Random(seed)
    out, number, clock = [], 0, 1000
    for _ in range(r.randint(1, 12)):
        words = sentence(r).split()
        if r.random() < 0.3:
            at = r.randrange(len(words))
            words[at] = f"<i>{words[at]}</i>"
        cuts = sorted(r.sample(range(1, len(words)), min(len(words) - 1, r.randint(0, 2))))
        for begin, end in zip([0, *cuts], [*cuts, len(words)]):
            number, clock = number + 1, clock + 2345
            text = " ".join(words[begin:end])
            if r.random() < 0.3:
                text = text.replace(" ", "\n", 1)
            if r.random() < 0.1:
                text = "- Yes.\n- No, " + text
            out.append(
                f"{number}\n00:00:{clock // 1000:02},{clock % 1000:03} --> 00:01:{clock // 1000 % 60:02},000\n"
                f"{text}\n\n"
            )
    return "".join(out).replace("\n", newline)


@test
def films_keep_their_structure():
    for seed in range(200):
        newline = ("\n", "\r\n")[seed % 2]
        film = a_film(seed, newline)
        for translator in TRANSLATORS:
            got = translate_document(film, "subtitles", translator)
            assert got.count("\r\n") == got.count("\n") * (newline == "\r\n"), (seed, translator.__name__)
            cues, wanted = got.split(newline * 2), film.split(newline * 2)
            assert [cue.split(newline)[:2] for cue in cues] == [cue.split(newline)[:2] for cue in wanted], (
                seed,
                film,
                got,
            )
            assert all(
                len(cue.split(newline)) >= min(3, len(other.split(newline))) for cue, other in zip(cues, wanted)
            ), (seed, film, got)
        words = [word for cue in cues for word in cue.split(newline)[2:]]
        assert words or not film


@test
def a_sentence_is_translated_whole_across_cues():
    film = (
        "1\n00:00:01,000 --> 00:00:03,000\nI think that we should\ngo home now,\n\n"
        "2\n00:00:03,500 --> 00:00:05,000\nbecause it is <i>late</i>.\n\n"
        "3\n00:00:06,000 --> 00:00:07,000\n- Yes.\n- No.\n"
    )
    seen = []
    got = translate_document(film, "subtitles", lambda texts: seen.extend(texts) or louder(texts))
    assert seen == ["I think that we should go home now, because it is <x1>late</x1>.", "Yes.", "No."]
    assert got == (
        "1\n00:00:01,000 --> 00:00:03,000\nI THINK THAT WE\nSHOULD GO HOME NOW,\n\n"
        "2\n00:00:03,500 --> 00:00:05,000\nBECAUSE IT IS <i>LATE</i>.\n\n"
        "3\n00:00:06,000 --> 00:00:07,000\n- YES.\n- NO.\n"
    )
    vtt = "WEBVTT\n\nNOTE hello there\n\nintro\n00:01.000 --> 00:02.000 align:start\nGood day.\n"
    assert translate_document(vtt, "subtitles", louder) == vtt.replace("Good day.", "GOOD DAY.")


# ---- PO ----------------------------------------------------------------

PO = """msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Plural-Forms: nplurals=2; plural=(n != 1);\\n"

#. A comment
#: a.c:1
#, c-format
msgid "Hello \\"%s\\"\\n"
msgstr ""

msgid "Done"
msgstr "Fertig"

msgctxt "verb"
msgid ""
"Open "
"it"
msgstr ""

#: b.c
msgid "One file"
msgid_plural "Many files"
msgstr[0] ""
msgstr[1] ""

#~ msgid "Old"
#~ msgstr ""
"""


@test
def untranslated_messages_are_translated():
    def careful(texts):
        return [text.replace("%S", "%s") for text in louder(texts)]

    got = translate_document(PO, "po", careful)
    file = polib.pofile(got)
    entries = {entry.msgid: entry for entry in file}
    assert entries['Hello "%s"\n'].msgstr == 'HELLO "%s"\n' and entries['Hello "%s"\n'].flags == ["fuzzy", "c-format"]
    assert entries["Done"].msgstr == "Fertig" and not entries["Done"].flags
    assert entries["Open it"].msgstr == "OPEN IT" and entries["Open it"].msgctxt == "verb"
    assert entries["One file"].msgstr_plural == {0: "ONE FILE", 1: "MANY FILES"} and entries["One file"].fuzzy
    assert [line for line in got.splitlines() if not line.startswith(("msgstr", "#, "))] == [
        line for line in PO.splitlines() if not line.startswith(("msgstr", "#, "))
    ]
    assert translate_document(got, "po", careless) == got, "existing translations are kept, fuzzy or not"


@test
def overwriting_requires_an_option():
    assert 'msgstr "DONE"' in translate_document(PO, "po", louder, overwrite=True)


# ---- Text and the rest -------------------------------------------------


@test
def line_breaks_are_preserved():
    assert translate_document("One.\r\n\n  Two.  \n...\nThree", "text", louder) == "ONE.\r\n\n  TWO.  \n...\nTHREE"


@test
def tags_must_match_the_source():
    segment = Segment(["Click ", Mark("<b>", "open"), "Save", Mark("</b>", "close"), " now"])
    assert segment.source() == "Click <x1>Save</x1> now"
    assert segment.accept("Jetzt <x1>Sichern</x1>!") == "Jetzt <b>Sichern</b>!"
    for bad in ("Jetzt", "<x1>Jetzt", "</x1>Jetzt<x1>", "<x1>a</x1><x1>b</x1>", "<x2>a</x2>", "<x1/>a</x1>"):
        assert segment.accept(bad) is None, bad


PLACES = {  # documents whose translations have other numbers of lines; "Zebra here" is left untranslated
    "text": "one\n\ntwo\nZebra here\n",
    "html": "<p>one\ntwo\n\nfive\n<p>six <b>seven\neight</b> nine\n<p title='a\nb'>Zebra here\n",
    "markdown": "+++\na = 1\n+++\none\ntwo\nfive\n\n- six\n  seven\n\n> a b\n> c d\n\n| a |\n|---|\n| c |\n\na  \n"
    "b\nc\n\nZebra here\n",
    "po": 'msgid ""\nmsgstr ""\n"Language: \\n"\n\n#: a\nmsgid ""\n"one two\\n"\n"three"\nmsgstr ""\n\n'
    'msgid "x y"\nmsgstr ""\n\nmsgid "a cat"\nmsgid_plural "cats"\nmsgstr[0] ""\n\n'
    'msgid "Zebra here"\nmsgstr ""\n',
    "subtitles": "1\n00:00:01,000 --> 00:00:02,000\none two\nthree\n\n2\n00:00:03,000 --> 00:00:04,000\n(Door)\n"
    "- four\n\n3\n00:00:05,000 --> 00:00:06,000\nZebra here\n",
    "json": '{\n"a": "one two\\nthree",\n"b": "Zebra here"}\n',
    "yaml": "a: >\n  one two\n  three\n\n  four\nb: |\n  five\n  six\nc: one\n  two\nd: 'x\n\n  y'\ne: Zebra here\n",
    "properties": "a=one\\\n  two\\\n three\nb=x y\nc=Zebra here\n",
    "table": 'a b,"c\nd",e\n"x\ny",z\nZebra here\n',
    "xliff": "<xliff version='1.2'>\n<file>\n<trans-unit>\n<source>one\ntwo</source>\n</trans-unit>\n"
    "<trans-unit><source>Zebra here</source>\n</trans-unit></file></xliff>",
    "qt": "<TS>\n<context>\n<message>\n<source>one\ntwo</source>\n</message>\n<message numerus='yes'>"
    "<source>x y</source>\n"
    "<translation type='unfinished'></translation></message>\n<message><source>Zebra here</source>"
    "</message></context></TS>",
    "android": "<resources>\n<string name='a'>one\ntwo</string>\n<string name='b'>x <b>y\nz</b> a</string>\n"
    "<string name='c'>Zebra here</string>\n</resources>",
}


@test
def untranslated_texts_are_reported_with_their_line():
    assert set(PLACES) == {name for name, form in FORMATS.items() if not form.binary}
    for kind, text in PLACES.items():
        reports = []
        translate_document(
            text,
            kind,
            lambda texts: ["" if "ZEBRA" in text else text for text in louder(texts)],
            lambda place, why, reports=reports: reports.append((place, why)),
            target="de",
        )
        line = text[: text.index("Zebra")].count("\n") + 1
        found = kind, line, reports
        assert len(reports) == 1 and reports[0][0] == f"line {line}" and "Zebra here" in reports[0][1], found


@test
def repeated_texts_are_translated_once():
    asked = []

    def counting(texts):
        asked.extend(texts)
        return louder(texts)

    assert translate_document("<p>Good day<p>Yes<p>Good day", "html", counting) == "<p>GOOD DAY<p>YES<p>GOOD DAY"
    assert asked == ["Good day", "Yes"]


@test
def tags_can_be_nested_deeply():
    film = "1\n00:00:01,000 --> 00:00:02,000\n" + "<i>" * 2000 + "Good day" + "</i>" * 2000 + "\n"
    assert translate_document(film, "subtitles", louder) == film.replace("Good day", "GOOD DAY")


@test
def reserved_control_characters_are_refused():
    for kind, text in ("po", 'msgid "a b\x01"\nmsgstr ""\n'), ("table", "a b,\x01\n"):
        try:
            translate_document(text, kind, louder)
        except ValueError as error:
            assert "control character" in str(error), error
        else:
            raise AssertionError(kind)


@test
def formats_are_recognised_by_file_name():
    assert [format_of("a/b" + form.endings[0].upper()) for form in FORMATS.values()] == list(FORMATS)
    assert format_of("a.xyz") is None
    try:
        translate_document("", "xyz", same)
    except ValueError as error:
        assert "xyz" in str(error) and "markdown" in str(error)
    else:
        raise AssertionError("an unknown format")


# ---- The program -------------------------------------------------------


class Fake:
    """A replacement for Translator that returns texts in capitals and fails for texts that contain "bad"."""

    def __init__(self, model, **parameters):
        pass

    glossary_heading = ""
    meanwhile = staticmethod(lambda: None)  # called before texts are translated

    def check_languages(self):
        pass

    def terms(self):
        return []

    def results(self, texts):
        self.meanwhile()
        for text in texts:
            error = "too long" if "bad" in text else ""
            note = next((words for words in ("doubtful: short", "glossary: lost") if words[:5] in text), "")
            yield Result("" if error else louder([text])[0], (), error, "", "cut" in text, False, False, note=note)


def program(folder, *arguments, data=None, name="a.txt"):
    """Run moe-documents on a file; return (status, stderr, output)."""
    path = os.path.join(folder, name)
    if data is not None:
        with open(path, "wb") as file:
            file.write(data)
    real, translator.Translator = translator.Translator, Fake
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            try:
                status = moe_program.main(["-m", "model", path, *arguments])
            except SystemExit as end:
                status = end.code
    finally:
        translator.Translator = real
    out = os.path.join(folder, "out")
    return status, stderr.getvalue(), open(out, "rb").read() if os.path.isfile(out) else None


@test
def untranslated_texts_give_status_1_and_are_counted():
    total = "moe-documents: {} segment{}: {} translated, {} kept, {} doubtful\n"
    cases = [  # document, status, its translation, places and reasons, counts
        (b"One.\nTwo.\n", 0, b"ONE.\nTWO.\n", [], (2, 2, 0, 0)),
        (b"One.\na bad one\nTwo.\n", 1, b"ONE.\na bad one\nTWO.\n", ["a.txt: line 2: too long"], (3, 2, 1, 0)),
        (b"to cut\n", 1, b"TO CUT\n", ["a.txt: line 1: translation was cut"], (1, 0, 1, 0)),
        (b"One.\n\na doubt\n", 0, b"ONE.\n\nA DOUBT\n", ["a.txt: line 3: doubtful: short"], (2, 2, 0, 1)),
        (b"a gloss\na bad\n", 1, b"A GLOSS\na bad\n", ["line 1: glossary: lost", "line 2: too long"], (2, 1, 1, 1)),
        (b"A DOG IN\nTO GO\n", 0, b"A DOG IN\nTO GO\n", [], (2, 2, 0, 0)),
        (b"THE DOG 7 IN\n", 0, b"THE DOG 7 IN\n", ["a.txt: line 1: doubtful: equal to the source"], (1, 1, 0, 1)),
        (b"12\n", 0, b"12\n", ["a.txt: no text to translate"], (0, 0, 0, 0)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for data, status, wanted, reasons, counts in cases:
            for quiet in [], ["-q"]:
                code, log, got = program(folder, "-o", os.path.join(folder, "out"), *quiet, data=data)
                assert (code, got) == (status, wanted), (data, code, got)
                assert len(reasons) == len(log.splitlines()) - (not quiet), log
                assert all(reason in line for reason, line in zip(reasons, log.splitlines())), log
                many = "s" * (counts[0] != 1)
                assert log.endswith(total.format(counts[0], many, *counts[1:])) != bool(quiet), log


@test
def usage_errors_give_status_2():
    cases = [  # arguments after the document's name, part of the message
        (["--no-such"], "unrecognized arguments: --no-such"), (["--beam"], "--beam"), (["--set", "beam"], "NAME=VALUE"),
        (["--beam", "2", "--set", "beam=3"], "beam is given twice"), (["--context", "17"], "--context"),
        (["-f", "none"], "--format"), (["--models", "x"], "mutually exclusive"), (["b.txt"], "several documents"),
        (["--in-place", "-o", "x"], "mutually exclusive"), (["--encoding", "bogus"], "bogus"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for arguments, message in cases:
            status, log, _ = program(folder, *arguments, data=b"One.\n")
            assert (status, log.count("\n")) == (2, 1) and message in log and "; see moe-documents --help" in log, log
        status, log, _ = program(folder, name="a.none", data=b"One.\n")
        assert status == 2 and "unknown suffix: pass --format NAME; see moe-documents --help" in log, log
        no = os.path.join(folder, "no folder")
        assert f"(create it: mkdir -p '{no}')" in program(folder, "b.txt", "-o", no)[1]


PROGRAM = ROOT / os.environ.get("BIN", ".") / "moe-documents"


def launched(*arguments, out=subprocess.PIPE, **more):
    """Run the built moe-documents."""
    return subprocess.run([PROGRAM, *arguments], stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, **more)


@test
def the_built_program_uses_the_options_of_moe_translate():
    model = ["-m", str(ROOT / "models/en-de-fr-es.bin")]
    text = launched("-f", "text", *model, "-t", "de", "--beam", "1", "--rerank", "0", "--set", "batch=2", "-", input="Hi!\n")
    assert text.returncode == 0 and text.stdout.strip() and "1 segment: 1 translated, 0 kept" in text.stderr, text
    for arguments, message in (
        ([], "missing -t LANG (target language); languages of this model: en de fr es"), (["-t", "xx"], "-t: "),
        (["-t", "de", "--beam", "99"], "beam"), (["-t", "de", "--set", "no-such=1"], "no-such"),
    ):
        done = launched(*model, *arguments, "-f", "text", "-", input="Hi!\n")
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done
    for redirected, said in ((">&-", "standard output: closed, nothing written"), ("<&-", "standard input: closed"), ("2>&-", "")):
        command = f"{PROGRAM} {' '.join(model)} -q -t de -f text - {redirected}"
        done = subprocess.run(["sh", "-c", command], input="", capture_output=True, text=True, timeout=60)
        assert done.returncode == (4 if said else 0) and said in done.stderr, (redirected, done)
    terminal, end = pty.openpty()
    done = launched(*model, "-t", "de", str(ROOT / "none.docx"), out=end)
    assert done.returncode == 2 and "-o FILE" in done.stderr, done
    os.close(terminal), os.close(end)


@test
def moe_translate_refuses_the_endings_of_documents():
    plain = {*FORMATS["text"].endings, ".tsv"}  # their lines are texts
    for ending in sorted({ending for form in FORMATS.values() for ending in form.endings}):
        done = subprocess.run([ROOT / os.environ.get("BIN", ".") / "moe-translate", "-t", "de", "-i", f"/none/a{ending}"],
                              capture_output=True, text=True, timeout=60)
        refused = "a document: translate it with moe-documents" in done.stderr
        assert (done.returncode, refused) == ((4, False) if ending in plain else (2, True)), (ending, done)


@test
def progress_has_a_total():
    log = io.StringIO()
    with contextlib.redirect_stderr(log):
        moe_program.Watched(Fake(""), True)([f"text {i}" for i in range(45)])
    assert re.findall(r"\r(\d+ of \d+) segments", log.getvalue()) == ["20 of 45", "40 of 45", "45 of 45"], log


@test
def the_glossary_is_used_and_lost_terms_are_reported():
    fast = ["-m", str(ROOT / "models/en-de-fr-es.bin"), "--beam", "4", "--rerank", "0"]
    page = "<p>The <b>dog</b> sleeps.</p>\n<p>Two dogs bark.</p>"
    german = "Guten Morgen.\nEr sagte mir, er esse zu viel.\n"  # the model writes trop besides beaucoup
    cases = [  # name, text, target, glossary, status, part of the output, parts of the log
        ("a.html", page, "de", "dog,Gugelhupf\n", 0, "<b>Gugelhupf</b>", ["1 term: 2 of 2 kept"]),
        ("a.html", page, "de", "English,German\ndog,Gugelhupf\n", 0, "Gugelhupf", ["was ignored: English, German", "2 of 2"]),
        ("a.html", page, "de", "cat,Katze\n", 0, "Hund",
         ["term 'cat' = 'Katze': does not occur\n", "2 segments: 2 translated, 0 kept, 0 doubtful"]),
        ("a.html", page, "de", "dog,a,b\n", 2, "", ["line 1"]), ("a.html", page, "de", None, 4, "", ["cannot read"]),
        ("a.txt", german, "fr", "viel,beaucoup\n", 1, "trop beaucoup",
         ["a.txt: line 2: glossary: 'beaucoup' for 'viel' replaces no word", "0 of 1 kept", "0 kept, 1 doubtful"]),
        ("a.md", german.replace("\n", "\n\n"), "fr", "viel,beaucoup\nMorgen,Matin\n", 1, "Matin",
         ["a.md: line 3: glossary", "2 terms: 1 of 2 kept"]),
        ("a.html", "<p>Open the <b>customer <i>portal</i></b>.</p>", "de", "customer portal,Kundenportal\n", 0,
         "<b><i>Kundenportal</i></b>", ["1 of 1 kept"]),
        ("a.html", "<p>Open the <b>customer</b> <i>portal</i>.</p>", "de", "customer portal,Kundenportal\n", 1, "<b>",
         ["line 1: glossary: 'Kundenportal' for 'customer portal' is missing"]),
    ]
    with tempfile.TemporaryDirectory() as folder:
        terms = os.path.join(folder, "terms.csv")
        for name, text, target, glossary, status, out, log in cases:
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
            with open(terms, "w", encoding="utf-8") as known:
                known.write(glossary or "")
            done = launched(*fast, "-v", "-t", target, "--glossary", terms if glossary else folder, file.name)
            assert done.returncode == status and out in done.stdout and bool(done.stdout) == bool(out), done
            assert all(part in done.stderr for part in log), (glossary, done.stderr)


@test
def a_translation_memory_is_used():
    fast = ["-m", str(ROOT / "models/en-de-fr-es.bin"), "--beam", "4", "--rerank", "0", "-t", "de"]
    tmx = ('<?xml version="1.0"?><tmx version="1.4"><header srclang="en"/><body>{}</body></tmx>').format("".join(
        f'<tu><tuv xml:lang="en"><seg>{source}</seg></tuv><tuv xml:lang="de"><seg>{target}</seg></tuv></tu>'
        for source, target in (("Press the key.", "Hau auf die Taste."), ("It has 3.5 GB of disk.", "Platte: 3.5 GB."),
                               ("Click &lt;b&gt;Save&lt;/b&gt; now.", "&lt;b&gt;Sichern&lt;/b&gt; anklicken."))))
    with tempfile.TemporaryDirectory() as folder:
        page, memory = os.path.join(folder, "a.html"), os.path.join(folder, "a.tmx")
        with open(page, "w", encoding="utf-8") as file:
            file.write("<p>Press the key.</p><p>Click <i>Save</i> now. It has 4.5 GB of disk.</p>")
        assert launched(*fast, "--memory", memory, page).returncode == 4
        for text, status, out in (("no tab\n", 2, ""), (tmx, 0, "<p>Hau auf die Taste.</p><p><i>Sichern</i> anklicken. "
                                                               "Platte: 4.5 GB.</p>")):  # fmt: skip
            with open(memory, "w", encoding="utf-8") as file:
                file.write(text)
            done = launched(*fast, "--memory", memory, page)
            assert (done.returncode, done.stdout) == (status, out), done


@test
def documents_are_complete_or_absent():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a.txt")
        status, log, _ = program(folder, "-o", path, data=b"One.\n")
        assert status == 2 and "--in-place" in log and open(path).read() == "One.\n"
        os.symlink(path, os.path.join(folder, "link"))
        assert program(folder, "-o", os.path.join(folder, "link"))[0] == 2 and open(path).read() == "One.\n"
        assert program(folder, "--in-place")[0] == 0 and open(path).read() == "ONE.\n"
        status, log, _ = program(folder, "-o", "/dev/full", data=b"One.\n")
        assert status == 4 and "No space left" in log and log.count("\n") == 1, log
        status, log, _ = program(folder, "-o", os.path.join(folder, "no", "out"))
        assert status == 4 and log.count("\n") == 1
        assert sorted(os.listdir(folder)) == ["a.txt", "link"], "no partial files"


@test
def outputs_are_checked_before_translating():
    def late():
        raise AssertionError("translated")

    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(os.path.join(folder, "full", "a.txt"))
        os.symlink("gone/out", os.path.join(folder, "link"))
        Fake.meanwhile = staticmethod(late)
        try:
            for output, message in (
                ("no/out", f"missing folder (create it: mkdir -p {folder}/no)"), ("no/", f"mkdir -p {folder}/no)"),
                ("link", f"mkdir -p {os.path.realpath(folder)}/gone)"), ("x" * 256, "x: File name too long"),
                ("full", "full/a.txt: Is a directory"), ("a.txt/x", "a.txt/x: Not a directory"),
            ):
                status, log, _ = program(folder, "-o", os.path.join(folder, output), data=b"One.\n")
                assert status == 4 and log.count("\n") == 1 and message in log, (output, log)
        finally:
            Fake.meanwhile = staticmethod(lambda: None)
        name = "x" * 250 + ".txt"
        assert program(folder, "-o", os.path.join(folder, name))[0] == 0 and name in os.listdir(folder)


@test
def documents_are_replaced_only_if_unchanged():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "a.txt")
        for meanwhile, left in (
            (lambda: path.write_bytes(b""), b""), (lambda: path.write_bytes(b"One.\nTwo.\n"), b"One.\nTwo.\n"),
            (path.unlink, None), (lambda: path.chmod(0o604), b"ONE.\n"),
        ):
            Fake.meanwhile = staticmethod(meanwhile)
            try:
                status, log, _ = program(folder, "--in-place", data=b"One.\n")
            finally:
                Fake.meanwhile = staticmethod(lambda: None)
            assert (status, log.count("\n")) == (0 if left == b"ONE.\n" else 4, 1), log
            assert os.listdir(folder) == ["a.txt"] * (left is not None) and (left is None or path.read_bytes() == left)
        assert path.stat().st_mode & 0o7777 == 0o604
        if not os.getuid():
            os.chown(path, 1234, 1234)
            assert program(folder, "--in-place")[0] == 0 and path.stat().st_uid == path.stat().st_gid == 1234


@test
def encodings_of_documents_are_respected():
    with tempfile.TemporaryDirectory() as folder:
        out = ("-o", os.path.join(folder, "out"))
        assert program(folder, *out, data=b"\xef\xbb\xbfOne.\n")[2] == b"\xef\xbb\xbfONE.\n"
        assert program(folder, *out, data="\ufeffOne ä.\n".encode("utf-16-le"))[2] == "\ufeffONE Ä.\n".encode(
            "utf-16-le"
        )
        status, log, _ = program(folder, "-o", os.path.join(folder, "no"), data=b"On\xe4.\n")
        assert status == 4 and "byte 2" in log and "--encoding" in log, log
        assert program(folder, *out, "--encoding", "latin-1", data=b"On\xe4.\n")[2] == b"ON\xc4.\n"
        page = b'<meta charset="iso-8859-1"><p>On\xe4</p>'
        assert b"<p>ON\xc4</p>" in program(folder, *out, data=page, name="a.html")[2]
        messages = b'msgid ""\nmsgstr "Content-Type: text/plain; charset=iso-8859-1\\n"\n\nmsgid "On\xe4"\nmsgstr ""\n'
        assert b'msgstr "ON\xc4"' in program(folder, *out, data=messages, name="a.po")[2]


@test
def several_documents_are_written_to_a_directory():
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as there:
        other = os.path.join(folder, "b.txt")
        with open(other, "w") as file:
            file.write("Two.\n")
        assert program(folder, other, "-o", there, data=b"One.\n")[0] == 0
        assert [open(os.path.join(there, name)).read() for name in ("a.txt", "b.txt")] == ["ONE.\n", "TWO.\n"]
        assert program(folder, other)[0] == 2


INTERRUPTED = """
import os, signal, sys, threading, time
from moe_translate import engine, program
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it

def interrupt():
    while not any(getattr(one, 'under_way', None) for one in list(engine._locking)):
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
sys.exit(program.main())
"""


@test
def ctrl_c_interrupts_long_documents_and_leaves_no_file():
    lines = [f"I have {i} dogs and a very big house near the sea." for i in range(50000)]
    libraries = ROOT / os.environ.get("BIN", "."), ("libmoetext.dylib" if sys.platform == "darwin" else "libmoetext.so")
    model = ["-m", str(ROOT / "models/en-de-fr-es.bin"), "-t", "de"]
    for name, text in (
        ("a.txt", "\n".join(lines)),
        ("a.md", "\n\n".join(lines)),
        ("a.html", "".join(f"<p>{line}</p>\n" for line in lines)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, name)
            path.write_text(text, encoding="utf-8")
            for where in ["-o", os.path.join(folder, "out")], ["--in-place"]:
                done = subprocess.run(
                    [sys.executable, "-c", INTERRUPTED, *model, str(path), *where],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    env={**os.environ, "MOE_LIBRARY": os.path.join(*libraries)},
                )
                assert done.returncode == 130, (name, done.returncode, done.stderr)
                assert done.stderr == "moe-documents: interrupted, nothing written\n", done.stderr
                assert os.listdir(folder) == [name] and path.read_text(encoding="utf-8") == text


@test
def both_modules_are_the_program():
    for module in "moe_translate.documents", "moe_translate.program":
        done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith("moe-documents "), (module, done)


if __name__ == "__main__":
    sys.exit(test.run())
