#!/usr/bin/env python3
"""Test that documents with repeated texts are translated in linear time.

Usage: tests/python tests/package/test_linear.py              chooses sizes according to the speed of each format
       tests/python tests/package/test_linear.py 1048576      tests a quarter, a half and all of this size (30 minutes)
       tests/python tests/package/test_linear.py 1048576 po   tests only one format
"""

import gc
import io
import resource
import subprocess
import sys
import time
import zipfile

from moe_translate.documents import translate_document
from suite import Suite

test = Suite()
GROWTH = 2.3  # allowed growth of the time when the size doubles
ROUGHLY = 2.8  # allowed growth of times that are too short to measure exactly; quadratic growth is 4
ENOUGH = 0.02  # shortest CPU time in seconds that can be measured accurately
SIZES = 1 << 12, 1 << 20  # smallest and largest size in characters
MOST = 300  # maximum CPU time per format in seconds
SCRIPT = (
    "[Script Info]\n\n[Events]\n"
    "Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text\n"
)
XLIFF = "<xliff version='1.2'><file><trans-unit>UNIT</trans-unit></file></xliff>"
def archive(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in files.items():
            file.writestr(name, data)
    return out.getvalue()


OVERRIDE = '<Override PartName="/a.xml" ContentType="application/x.wordprocessingml.document.main+xml"/>'


def letter(paragraph, overrides=1):
    return archive(
        {
            "[Content_Types].xml": "<Types>" + OVERRIDE * overrides + "</Types>",
            "a.xml": f'<w:document xmlns:w="w"><w:body><w:p>{paragraph}</w:p></w:body></w:document>',
        }
    )


def book(chapters, rootfiles=1):
    names = [f"c{i}.xhtml" for i in range(chapters)]
    items = "".join(f'<item href="{name}" media-type="application/xhtml+xml"/>' for name in names)
    return archive(
        {
            "META-INF/container.xml": "<container>" + '<rootfile full-path="a.opf"/>' * rootfiles + "</container>",
            "a.opf": f"<package>{items}</package>",
            **dict.fromkeys(names, "<p>a b"),
        }
    )


RUN = '<w:r><w:rPr><w:sz w:val="{}"/></w:rPr><w:t>a </w:t></w:r>'
OFFICE = {  # functions that return (format, document of n parts)
    "docx: formats in a paragraph": lambda n: ("docx", letter("".join(map(RUN.format, range(n))))),
    "docx: pictures in a paragraph": lambda n: ("docx", letter("<w:r><w:t>a b</w:t></w:r>" + "<w:drawing/>" * 4 * n)),
    "docx: one part, named again": lambda n: ("docx", letter(RUN * (n // 4), n // 4)),
    "epub: chapters": lambda n: ("epub", book(n // 2)),
    "epub: one book, named again": lambda n: ("epub", book(n // 8, n // 8)),
}


# Each row has a format, a template, and texts that are repeated in the template.
REPEATED = (  # fmt: skip
    ("text", "%s", [
        "\n", "a\n", "\r", "Hello world. ", " ",
    ]),
    ("html", "%s", [
        "<", "<!", "<!--", "<!-- -->", "<!-->", "<code>a</code>", "<code>", "</code>", "<a ", "<a b", "<a b=",
        "<a b='", '<a b="x" ', "<b>", "</b>", "<b>x", "<i><b>x</b></i>", "<p>", "<p>x", "</p>", "<div>", "<div>x",
        "<li>a", "<table><tr><td>", "<td>", "<?", "<?php", "<%", "<?=", "<title>", "<script>", "<style>",
        "<textarea>", "<svg>", "<svg/>", "<math>", "<pre>", "<plaintext>", "&", "&amp;", "&#", "&#1", "&a", "&lt;a",
        "x &amp; ", "[", "`", "*", "_", "{", "{{x}} ", "\\", '"', "'", "a ", "\n", "a\n", " ", "<sup>2</sup>",
        "x<sup>2</sup>", "<a href=x>y</a>", "<a href=x>y</a> z ", "<p translate=no>", "<span translate=no>",
        "<span translate=no>x</span>", "<p translate=no>x", "<li translate=no>a", "<td translate=no>",
        "<code translate=no>", "<img alt='a b'>", '<img alt="x {{y}} z">', "<input value='a' type=submit>",
        "<b>a</b>", "a<b>", "a<!-- x -->", "<noscript>", "<noscript translate=no>", "</", "</ ",
        "<script translate=no></script>", "<em>@x</em>", "x<sup>a</sup> ", "<a>.", "&nbsp;", "<br>", "a<br>",
        "<x-y>", "<textarea title='a b'>", "<tr translate=no><table>", "{1} <b>x</b> ", "<b>x{1}</b> ", "\x00",
        "<html lang=en>",
    ]),
    ("html", "<p>%s", [
        "<i>x ",
    ]),
    ("markdown", "%s", [
        "\\(", "\\(x\\) ", "{{", "{{x}}", "{%", "<code>", "<code>a</code>", "[^", "[^a]", "[^a]: x\n\n", "<", "<!",
        "<!--", "<!-- ", "[", "]", "[a](", "[a]", "[a]: b\n", "[a][b]", "![", "![a](b)", "(", "`", "``", "` `",
        "`a``", "*", "**", "a**", "*a ", "**a ", "_", "__", "_a ", "a_b", "a\\_b", "~", "~~", "~~a ", "{", "}", "{.",
        "{: .", "\\", '"', "'", "&", "&amp;", "&amp", "&#1;", "<b>", "<a ", '<a b="', "<b>x</b>", "<a@b.c>",
        "<http:a>", "<http:", ":a:", ":a", "$", "$$", "$x$", "$x$ ", "$ x", "$$\n", "$$x$$\n", "$$\nx\n", "> ",
        "> a\n", ">", "- ", "- a\n", "- a\n\n", "1. a\n", "# a\n", "#", "|", "|a", "|a|b|\n|-|-|\n", "| a | b |\n",
        "a|b\n", "\n", "a\n", "a\n\n", "a  \n", "a\\\n", " ", "\t", "    a\n", "```\n", "```\na\n", "~~~\n", "---\n",
        "---\na: b\n", "+++\n", "===\n", "a\n===\n", ": a\n", "a\n: b\n", "[!NOTE]\n", "> [!NOTE]\n> a\n", "[ ] a\n",
        "- [ ] a\n", "<div>\n", "<div>\n\n", "</div>", "<math>", "a b. ", "http://a.b ", "\\[", "\\\\", "<![CDATA[",
        "<?", "<?x ", "\x00", "[a\\", "[[", "[[]]", "[]", "[](", "[](<", '[](a "', '[a](b "c")', " * a\n", "*a*",
        "**a**", "*a*b", "_a_", "***a", "***a***", "a*b*c", "* * ", "&a", "<a href='", "{ a", "{% a %}", "<code>\n",
        '[a](b "c d") ', "[^a]: x\n", "[^a]: x\n\n    a b\n\n", "> <div>\n> a\n", "> [^", "- [^a]: x",
    ]),
    ("markdown", "> <div>\n%s", [
        "> a\n", "> <b\n> x>a</b>\n",
    ]),
    ("markdown", "|a|\n|-|\n|%s|\n", [
        "a\\|b ",
    ]),
    ("po", "%s", [
        'msgid "a b"\nmsgstr ""\n\n', 'msgid "a b"\nmsgstr ""\n', '"a b"\n', '"\\n"\n', 'msgstr ""\n', "#\n",
        "# a\n", "#, fuzzy\n", "#| a\n", '#~ msgid "a"\n', "\n", " \n", "\\", '"', 'msgid "', 'msgid ""\n',
        'msgid ""\nmsgstr ""\n\n', 'msgctxt "a"\nmsgid "a b"\nmsgstr ""\n\n',
        'msgid "a"\nmsgid_plural "b"\nmsgstr[0] ""\nmsgstr[1] ""\n\n', 'msgid "a b"\nmsgstr "c"\n\n', "#: a:1\n",
        "#: a:1 b:2 ", "%s ", "{", "\x0b", "\u2028", "a", "## a\n", " # a\n", "#~ # a\n",
    ]),
    ("po", 'msgctxt ""\n%smsgid "a b"\nmsgstr ""\n', [
        '"a "\n',
    ]),
    ("po", 'msgid "a"\nmsgid_plural ""\n%smsgstr[0] ""\nmsgstr[1] ""\n', [
        '"a "\n',
    ]),
    ("po", 'msgid "a b"\nmsgstr ""\n%s', [
        '"a "\n',
    ]),
    ("po", '#| msgid ""\n%smsgid "a b"\nmsgstr ""\n', [
        '#| "a "\n',
    ]),
    ("po", '#~ msgid ""\n%s', [
        '#~ "a "\n',
    ]),
    ("po", 'msgid ""\nmsgstr "A: b\\n"\n%s', [
        '"a\\n"\n',
    ]),
    ("po", 'msgid ""\n%s\nmsgstr ""\n', [
        '"a "\n', '"a\\n"\n', '"a. "\n', '"\\\\"\n', '"%s {x} "\n', '"<b>"\n', '"&lt;a"\n', '"<b "\n', '"_a "\n',
        '"Hello there my friend and so\\n"\n',
    ]),
    ("po", '#, c-format\nmsgid "a b %%s"\nmsgstr ""\n', [
        "0", "%0", "%(a)", "%00d ", "'", "I", "%-", "#",
    ]),
    ("po", 'msgid "[a%s"\nmsgstr ""\n', [
        ",_1", ",a", "[a,", "[_1 ",
    ]),
    ("subtitles", "%s", [
        "1\n00:00:01,000 --> 00:00:02,000\na b\n\n", "00:00:01,000 --> 00:00:02,000\n", "00:00:01,000\n", "0:", "1",
        "1\n", "\n", "a\n", "a,\n", " ", "-", "- a\n", "<", "<i>", "<i>a</i> ", "<i", "{", "{\\", "{\\an8}", "{\\a",
        "(", "(a)", "(a) ", "[", "[a]", "[a] ", "[A]: ", "A: ", "A", "AB ", "♪", "♪ a\n", "#", '"', "&", "--", "-->",
        "->", ">>", "WEBVTT\n\n", "NOTE\n", "a b ", "<v a>", "\\N", ".", "<00:01>", "<c.a>", "a ",
    ]),
    ("subtitles", "1\n00:00:01,000 --> 00:00:02,000\n%s\n\n", [
        "a\n", "a b ", "<i>", "<i>a</i> ", "<", "{\\", "{\\an8}", "(", "(a) ", "[a] ", "[", "A", "A B", "- a\n", "-",
        "♪", "#", "*", "♪ a\n", "a,\n", "<v ", "{", " ", "\t", "{\\a", "(a)", "(a)<i> ", "<i> ", "(<i>", "0", "<b",
        ">>", "a. ",
    ]),
    ("subtitles", "1\n00:00:01,000 --> 00:00:02,000\n♪ a%sb\n\n", [
        "(a) ", "(a)", "♪", "♪ ", "# ", "<i>♪", " ",
    ]),
    ("subtitles", SCRIPT + "%s", [
        "Dialogue: 0,0:00:01.00,0:00:02.00,D,,0,0,0,,a b\n", "Dialogue: ", "Dialogue: 0,", "[Events]\n",
        "Format: a,b\n", "[", "\n", "a\n", ",", "\\N",
    ]),
    ("subtitles", SCRIPT + "Dialogue: 0,0:00:01.00,0:00:02.00,D,,0,0,0,,%s", [
        "\\N", "a\\N", "{\\", "{\\an8}", "{", "(a) ", ",", "\\p", "<i>", " ",
    ]),
    ("properties", "%s", [
        "a=b c\n", "a=b c\\\n", "\\", "\\\n", " \\\n", "a", "a:", "=", "#\n", "!a\n", "\n", " ", "\\u0041", "{0} ",
        "'", "''", "a=\\ ", "a=b\\n", "\t", "a=a b\\nc", "k\\\n",
    ]),
    ("properties", "k={0,choice,%s}\n", [
        "0#a b|", "1", "{0,choice,", "{",
    ]),
    ("properties", "k=a b %s\n", [
        "\\\n", "\\n", "\\u0041", "a b ", "a\\n", "'", "{0}'", "\\ ", "\\\\", "a\\\n  ", "&lt;a ", "<a ", "%( ", "{",
        "%", "$a", " ", "\\t", "http://a", "&lt;",
    ]),
    ("json", "%s", [
        "[", "{", '"', '"a b",', "\\", '\\"', '{"a":', '{"a":"b c"},', "//", "/*", "// a\n", "/**", "*", " ", "\n",
        '{"a": "b c"}\n', "]", "1,", '"a b"\n',
    ]),
    ("json", '[%s "x y"]', [
        '"a b",', "[[],", '"a\\nb c",', '{"a":"b c"},', '{"@a":{"b":"c d"}},', "1,", " ", "/* a */", "// a\n",
    ]),
    ("json", '["a b %s"]', [
        "a b ", "\\n", "a\\n", "\\\\", "\\u0041", "&lt;a ", "<a ", "%(", "{", "{{", "$a", "<", "%0", "http://a",
        "&lt;", "%1", "%<", "{a} ", "a_", "&", "_a ",
    ]),
    ("yaml", "%s", [
        "[", "{", "- a b\n", "a: b c\n", "- ", "? ", "- - ", '"', "'", "'a' ", "# a\n", "&", "*", "&a ", "!", "!!",
        "|", "|\n", "- |\n  a b\n", "- >\n  a b\n", "---\n", "--- a\n", "...\n", "%", "%YAML 1.1\n", "\n", " ", "\t",
        "a", "a b ", "a b\n", "a: ", "- a: b c\n", "[],", "[a b],", "[a b, ", "{a: b c},", "\\", "@", "`", ">\n",
        "-\n", "? a\n: b c\n", "\ufeff", '- "a b"\n', "- 'a b'\n", "- 'a\n  b'\n", '- "a\n  b"\n', "- &a b c\n",
        "- *a\n", "- a\n  b\n", "- a # b\n", "'a\n", '"\\', '"\\n',
    ]),
    ("yaml", "a: >\n%s", [
        " a b\n", " a\n\n", "  a b\n\n", "\n", "   a\n",
    ]),
    ("table", "%s", [
        "a b,", '"', '""', '"a b",', '"a b"\n', "a b\n", "\n", ",", ";", "\t", "\r", "a b|", '"a\nb",', '"a ', "'",
        "\\", " ", '"a b', '"a" b,', '"",',
    ]),
    ("xliff", "<xliff version='1.2'>%s</xliff>", [
        "<trans-unit><source>a b</source></trans-unit>", "<trans-unit><source>a b</source><target/></trans-unit>",
        "<file>", "<g>", "<!-- -->", " ", "<x/>", "<group translate='no'>",
    ]),
    ("xliff", XLIFF.replace("UNIT", "<source>a b %s</source>"), [
        "<g>a</g> ", "a b ", "<x/>", "&amp;", "&lt;a ", "%( ", "{", "<mrk mtype='protected'>a</mrk>", "<!-- -->a",
        "<![CDATA[a]]>", "\n", "&lt;", " ", "<g/>a ",
    ]),
    ("xliff", XLIFF.replace("UNIT", "<source>a b</source><target%s/>"), [
        " ",
    ]),
    ("xliff", XLIFF.replace("UNIT", "%s<note/><source>a b</source>"), [
        " ",
    ]),
    ("xliff", XLIFF.replace("UNIT", "<source>a b</source><target%sid='x'/>"), [
        " ",
    ]),
    ("android", "<resources><string name='a'>a b %s</string></resources>", [
        "a\n", "a ", "&lt;a ", "\\n", "\\", "'", "<b>a</b> ", "%", "{", "\\u0041", "<b/>", " ", "&amp;", "<!-- -->",
        "\\n\\n", "a\\n", "<![CDATA[a]]>", "&lt;", "<xliff:g xmlns:xliff='a'>b</xliff:g> ",
    ]),
    ("android", "<resources>%s</resources>", [
        "<string name='a'>a b</string>", "<string-array><item>a b</item></string-array>", "<!-- a -->", "<a/>", "\n",
        "<plurals><item>a b</item></plurals>", "<string name='a'><![CDATA[a b]]></string>",
    ]),
    ("qt", "<TS>%s</TS>", [
        "<message><source>a b</source></message>",
        "<message><source>a b</source><translation type='unfinished'></translation></message>",
        "<context>", " ",
        "<message numerus='yes'><source>a b</source><translation type='unfinished'/></message>",
    ]),
    ("qt", "<TS><context><message><source>a b %s</source></message></context></TS>", [
        "a\n", "a ", "&amp;a ", "&lt;a ", "%1 ", "{", "_a ",
    ]),
    ("qt", "<TS><message><source>a b</source><translation%sid='x'/></message></TS>", [
        " ",
    ]),
    ("office", "%s", OFFICE),
)


def measured(kind, around, unit, size, times=1):
    """Translate a document of this size `times` times; return the shortest CPU time."""
    if kind == "office":
        kind, text = OFFICE[unit](size // 16)
    else:
        text = around.replace("%s", unit * (size // len(unit)))
    found = []
    for _ in range(times):
        gc.collect()  # collect garbage before the measurement
        begin = time.process_time()
        try:
            translate_document(text, kind, lambda texts: [text + " z" for text in texts], lambda *_: None)
        except ValueError:  # the document was refused
            pass
        found.append(time.process_time() - begin)
    return min(found)


def grows(kind, around, unit, sizes, limit):
    """Measure documents of these sizes; return the times and the largest growth from one size to the next."""
    for tries in 1, 3, 5:  # other processes can disturb short measurements
        found = [measured(kind, around, unit, size, tries) for size in sizes]
        growth = max(after / max(before, 1e-4) for before, after in zip(found, found[1:]))
        if found[-1] < ENOUGH or growth <= limit:
            break
    return found, growth


def sizes_for(kind, around, unit):
    """Return (size / 4, size) for the smallest size that takes long enough to be measured."""
    size = SIZES[0]
    while size < SIZES[1] and measured(kind, around, unit, size) < ENOUGH:
        size *= 2
    return size // 4, size


def read(kind, largest):
    gc.disable()
    resource.setrlimit(resource.RLIMIT_CPU, (MOST * 10 if largest else MOST,) * 2)
    bad = 0
    for kinds, around, units in REPEATED:
        for unit in units if kinds == kind else ():
            sizes = (largest // 4, largest // 2, largest) if largest else sizes_for(kind, around, unit)
            limit = GROWTH if largest else ROUGHLY**2
            found, growth = grows(kind, around, unit, sizes, limit)
            good = found[-1] < ENOUGH or growth <= limit
            if not good:  # growth caused by the allocator stops at larger sizes, quadratic growth does not
                sizes, limit = [sizes[1] << i for i in range(3)], GROWTH if largest else ROUGHLY
                found, _ = grows(kind, around, unit, sizes, limit)
                good = min(after / before for before, after in zip(found, found[1:])) <= limit
            bad += not good
            if largest or not good:
                times = " ".join(f"{seconds:.3f}" for seconds in found)
                where = f" in {around[:60]!r}" if around != "%s" else ""
                print(f"{'' if good else 'TOO SLOW '}{kind} {unit!r}{where}: {times} s for {sizes}", flush=True)
    return bad > 0


@test
def repeated_text_is_read_in_linear_time():
    for kind in dict.fromkeys(kind for kind, _, _ in REPEATED):
        run = subprocess.run([sys.executable, __file__, "0", kind], capture_output=True, text=True)
        assert run.returncode == 0, (kind, run.returncode, run.stdout, run.stderr[-500:])


def main(largest="", kind=None):
    if not largest:
        return test.run()
    return max(read(one, int(largest)) for one in dict.fromkeys(k for k, _, _ in REPEATED if kind in (None, k)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
