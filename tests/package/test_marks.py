#!/usr/bin/env python3
"""Test marks inside sentences: whatever a translator does, pairs nest as in the source, begin before they end, and have
words if they do in the source; markup that represents words remains in its pair.

Usage: tests/python tests/package/test_marks.py
"""

import io
import random
import re
import sys
import zipfile
from xml.etree import ElementTree

from moe_translate.documents import translate_document
from suite import Suite

test = Suite()
MARK = re.compile(r"(</?x\d+/?>|\{\d+\})")


# ---- Translators -------------------------------------------------------


def parts_of(text):
    return [part for part in MARK.split(text) if part]


def is_mark(part):
    return bool(MARK.fullmatch(part))


def louder(text):
    return "".join(part if is_mark(part) else part.upper() for part in parts_of(text))


def careless(text):
    return MARK.sub("", text).upper()


def backward(text):
    return "".join(reversed(parts_of(text.upper()))).replace("X", "x")


def at_the_end(text):
    return careless(text) + "".join(filter(is_mark, parts_of(text)))


def emptied(text):
    """Move the words of each pair after it."""
    return re.sub(r"(<x\d+>)([^<]+)(</x\d+>)", r"\1\3\2", louder(text))


def nested(text):
    """Put the second of two pairs into the first."""
    return re.sub(r"(</x\d+>)([^<]*)(<x\d+>[^<]*</x\d+>)", r"\2\3\1", louder(text))


def swapped(text):
    """Swap the first two marks."""
    marks = [part for part in parts_of(text) if is_mark(part)]
    marks[:2] = marks[:2][::-1]
    return "".join(marks.pop(0) if is_mark(part) else part.upper() for part in parts_of(text))


def shuffled(seed):
    def translate(text):
        parts = parts_of(louder(text))
        random.Random(seed).shuffle(parts)
        return "".join(parts)

    return translate


TRANSLATORS = (louder, careless, backward, at_the_end, emptied, nested, swapped, *map(shuffled, range(20)))


# ---- Structure ---------------------------------------------------------


def structure(events):
    """Return the relations of marks. An event is (+ or - or w, name), or a text."""
    at, count, found, word = {}, {}, {}, []
    for event in events:
        word.append(isinstance(event, str) and any(map(str.isalpha, event)))
        if not isinstance(event, str):
            count[event] = count.get(event, 0) + 1
            at[(*event, count[event])] = len(word)
            word[-1] = event[0] == "w"
    begins = {key[1:]: place for key, place in at.items() if key[0] == "+"}
    ends = {key[1:]: place for key, place in at.items() if key[0] == "-"}
    for name in begins.keys() | ends.keys():
        begin, end = begins.get(name, 0), ends.get(name, len(word))
        found[name] = begin < end and any(word[begin:end])
        for key, place in at.items():
            other = key[1:]
            if key[0] == "w":
                found[name, key] = begin < place < end
            elif other != name and other in begins and other in ends and name in begins and name in ends:
                found[name, other] = (
                    "overlap"
                    if begin < begins[other] < end < ends[other]
                    else begin < begins[other] and ends[other] < end
                )
    return found, sorted(at)


def same_structure(before, after):
    overlapping = {frozenset(key) for key, what in before[0].items() if what == "overlap"}
    found = [{k: v for k, v in one.items() if frozenset(k) not in overlapping} for one, _ in (before, after)]
    return found[0] == found[1] and before[1] == after[1]


def xliff_events(node):
    names = {"bpt": "+", "bx": "+", "sc": "+", "sm": "+", "ept": "-", "ex": "-", "ec": "-", "em": "-", "it": "w"}
    yield node.text or ""
    for child in node:
        name, at = child.tag.split("}")[-1], child.attrib
        key = at.get("rid") or at.get("startRef") or at.get("id")
        angular = re.match(r"(START|CLOSE)_(.*)", key)
        if angular:
            yield "+" if angular[1] == "START" else "-", angular[2]
        elif name == "it":
            yield "+" if at["pos"] == "open" else "-", key
        elif name in ("g", "pc", "mrk") and at.get("mtype") != "protected":
            yield "+", name + key
            yield from xliff_events(child)
            yield "-", name + key
        elif child.text and re.fullmatch(r"</?b>", child.text):
            yield "-" if "/" in child.text else "+", "b"
        else:
            yield names.get(name, "w"), key
        yield child.tail or ""


XLIFF = '<xliff version="%s"><file><body><trans-unit>%s</trans-unit></body></file></xliff>'
XLIFF2 = '<xliff version="%s"><file><unit><segment>%s</segment></unit></file></xliff>'
XLIFF_CASES = (
    # two pairs
    ('Please <x id="START_A_0"/>sign in<x id="CLOSE_A_0"/> or <x id="START_A_1"/>register<x id="CLOSE_A_1"/>.',
     "Please <x1>sign in</x1> or <x2>register</x2>."),
    # nested, the inner one at an end of the outer one
    ('Go <bpt id="1">[</bpt>to the <bpt id="2">[</bpt>house<ept id="2">]</ept><ept id="1">]</ept> now.',
     "Go <x1>to the <x2>house</x2></x1> now."),
    # adjacent, three levels, tag of an element among them
    ('See <g id="1">the <bx id="2"/>red <bx id="3"/>dog<ex id="3"/><ex id="2"/></g><bx id="4"/>cat<ex id="4"/> here.',
     "See <x1>the <x2>red <x3>dog</x3></x2></x1><x4>cat</x4> here."),
    # overlapping
    ('The <sc id="1"/>red <sc id="2"/>dog<ec startRef="1"/> sleeps<ec startRef="2"/> here.',
     "The <x1>red <x2/>dog</x1> sleeps<x3/> here."),
    # overlapping an element
    ('A <g id="1">b <bpt id="2" rid="7">[</bpt>c</g> d<ept id="3" rid="7">]</ept> e.',
     "A <x1>b <x2/>c</x1> d<x3/> e."),
    # empty, and with only white space and symbols
    ('Some <bx id="1"/><ex id="1"/> text <bx id="2"/> - <ex id="2"/> here.', "Some <x1/> text <x2/> here."),
    # incomplete: begins, ends
    ('Click <it id="1" pos="open">[</it>here to go home.', "Click <x1/>here to go home."),
    ('One two<ept id="9">]</ept> three.', "One two<x1/> three."),
    # around everything, at both ends
    ('<bpt id="1">[</bpt>All of it<ept id="1">]</ept>', "All of it"),
    ('<bpt id="1">[</bpt>All<ept id="1">]</ept> of <bpt id="2">[</bpt>it<ept id="2">]</ept>',
     "<x1>All</x1> of <x2>it</x2>"),
    # the same id twice
    ('A <bpt id="1">[</bpt>b<ept id="1">]</ept> and <bpt id="1">[</bpt>c<ept id="1">]</ept> d.',
     "A <x1>b</x1> and <x2>c</x2> d."),
    # closing codes without a number
    ('A <x id="START_SPAN"/>b <x id="START_SPAN"/>c<x id="CLOSE_SPAN"/> d<x id="CLOSE_SPAN"/> e.',
     "A <x1>b <x2>c</x2> d</x1> e."),
    # words: alone, in a pair, at both ends
    ('You have <x id="ICU" equiv-text="{n, plural, ...}"/> here.', "You have {1} here."),
    ('Hi <g id="1"><x id="NAME"/></g>, good <g id="2">morning <ph id="3">%s</ph></g>!',
     "Hi {1}, good <x2>morning {3}</x2>!"),
    ('<x id="NAME"/> likes <x id="OTHER"/>', "{1} likes {2}"),
    # line break, image, protected words, empty element
    ('One<x id="LINE_BREAK" ctype="lb"/>two <ph id="2" ctype="image"/> three <g id="3"/>four.',
     "One<x1/>two <x2/> three <x3/>four."),
    ('Use <mrk id="1" mtype="protected">Moe</mrk> now.', "Use {1} now."),
    # tags as the content of placeholders
    ('Press <ph id="1">&lt;b&gt;</ph>Enter<ph id="2">&lt;/b&gt;</ph> or <ph id="3">%d</ph> keys.',
     "Press <x1>Enter</x1> or {2} keys."),
    # the text has numbers in braces
    ('Give {1} to <x id="NAME"/> and <g id="2">him</g>.', "Give {1} to {2} and <x3>him</x3>."),
    # annotations
    ('A <sm id="m1"/>term<em startRef="m1"/> is <mrk id="2" type="comment">this</mrk>.',
     "A <x1>term</x1> is <x2>this</x2>."),
    # numbers in a pair
    ('Page <bx id="1"/>5<ex id="1"/> of the <bx id="2"/>book<ex id="2"/>.', "Page <x1>5</x1> of the <x2>book</x2>."),
)  # fmt: skip


def run(text, properties=""):
    return f'<w:r>{properties}<w:t xml:space="preserve">{text}</w:t></w:r>'


def code(kind):
    return f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>'


def begin(instruction):
    return code("begin") + f"<w:r><w:instrText> {instruction} </w:instrText></w:r>" + code("separate")


def field(instruction, result):
    return begin(instruction) + result + code("end")


def mark(name, number):
    return f'<w:{name} w:id="{number}"/>'


END, BOLD = code("end"), "<w:rPr><w:b/></w:rPr>"
DOCX_CASES = (
    (run("Please ") + field("HYPERLINK a", run("sign in")) + run(" or ") + field("HYPERLINK b", run("register")),
     ["Please <x1>sign in</x1> or <x2>register</x2>"]),
    (run("Dear ") + field("MERGEFIELD Name", run("Name")) + run(", hello."), ["Dear {1}, hello."]),
    (field("MERGEFIELD A", run("Ann")) + run(" likes ") + field("MERGEFIELD B", run("Bob")), ["{1} likes {2}"]),
    (run("Figure ") + field("SEQ Figure", run("3")) + run(": a house"), ["Figure {1}: a house"]),
    (run("Look at ") + field("HYPERLINK a", run("page ") + field("PAGEREF b", run("7")) + run(" there")) + run(" now"),
     ["Look at <x1>page {2} there</x1> now"]),
    (run("He has ") + field("IF " + END[:0] + "1", field("MERGEFIELD X", run("x")) + run("one")) + run(" dog"),
     ["He has <x1>{2}one</x1> dog"]),
    (run("An index") + field("XE word", "") + run(" entry here"), ["An index<x1/> entry here"]),
    # across paragraphs: begins here, ends here
    (run("The contents ") + begin("TOC") + run("follow here"), ["The contents <x1/>follow here"]),
    (run("The last line") + END + run(" is here"), ["The last line<x1/> is here"]),
    (begin("TOC") + field("HYPERLINK c", run("Chapter one") + field("PAGEREF d", run("5"))),
     ["Chapter one{1}"]),
    # formats inside and around fields
    (run("See ") + field("HYPERLINK a", run("the ") + run("red", BOLD) + run(" house")) + run(" today"),
     ["See <x1>the <x2>red</x2> house</x1> today"]),
    (run("A ") + run("bold ", BOLD) + field("MERGEFIELD N", run("N", BOLD)) + run(" thing", BOLD) + run(" is good here"),
     ["A <x1>bold</x1> {2} <x3>thing</x3> is good here"]),
    # bookmarks and comments: around a word, around a field, empty, overlapping, incomplete
    (run("See ") + mark("bookmarkStart", 1) + run("this") + mark("bookmarkEnd", 1) + run(" page"),
     ["See <x1>this</x1> page"]),
    (run("See ") + mark("bookmarkStart", 1) + field("PAGE", run("2")) + mark("bookmarkEnd", 1) + run(" there"),
     ["See {1} there"]),
    (run("The house") + mark("bookmarkStart", 1) + mark("bookmarkEnd", 1) + run(" is red"), ["The house<x1/> is red"]),
    (run("A ") + mark("commentRangeStart", 1) + run("b ") + mark("bookmarkStart", 1) + run("c") +
     mark("commentRangeEnd", 1) + run(" d") + mark("bookmarkEnd", 1) + run(" e"),
     ["A <x1>b <x2/>c</x1> d<x3/> e"]),
    (run("A ") + mark("commentRangeStart", 1) + run("word here"), ["A <x1/>word here"]),
    # a link in a simple field; a simple field without words to translate
    (run("Go to ") + f'<w:fldSimple w:instr="REF x">{run("the end")}</w:fldSimple>' + run(" now"),
     ["Go to <x1>the end</x1> now"]),
    (run("It is ") + f'<w:fldSimple w:instr="DATE">{run("1 May")}</w:fldSimple>' + run(" today"),
     ["It is {1} today"]),
    # a link whose text is its address
    (run("Read ") + field("HYPERLINK a", run("https://example.org/a")) + run(" today"), ["Read {1} today"]),
    # a TAB in a field of two sentences
    (run("See ") + field("HYPERLINK a", run("one") + "<w:r><w:tab/></w:r>" + run("two")) + run(" now"),
     ["See <x1>one<x2/>two</x1> now"]),
)  # fmt: skip
DOCX = '<w:document xmlns:w="w"><w:body><w:p>%s</w:p></w:body></w:document>'
CONTENT_TYPES = (
    '<Types><Override PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-officedocument.'
    'wordprocessingml.document.main+xml"/></Types>'
)


def docx_events(xml):
    """Yield the events of a paragraph; fields are named by their instructions."""
    fields = []
    for child in ElementTree.fromstring(xml).iter():
        name, at = child.tag.split("}")[-1], {key.split("}")[-1]: value for key, value in child.attrib.items()}
        kind = at.get("fldCharType")
        if kind == "begin":
            fields.append("?")
        elif name == "instrText":
            fields[-1] = child.text
            yield "+", child.text
        elif kind == "end":
            yield "-", fields.pop() if fields else "?"
        elif kind == "separate":
            assert fields[-1] != "?", xml
        elif name == "t":
            yield child.text or ""
        elif match := re.fullmatch(r"(\w+)(Start|End)", name):
            yield "+" if match[2] == "Start" else "-", match[1] + at["id"]


def zipped(name, xml):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("[Content_Types].xml", CONTENT_TYPES)
        file.writestr(name, xml)
    return out.getvalue()


def member(data, name):
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return file.read(name).decode()


ODT = '<office:document-content xmlns:office="o" xmlns:text="t" xmlns:draw="d"><text:p>%s</text:p></office:document-content>'
ODT_CASES = (
    ('Figure <text:sequence text:name="F">1</text:sequence>: The house is big.', ["Figure {1}: The house is big."]),
    ('See <text:bookmark-ref text:ref-name="a">Table 3</text:bookmark-ref> on page <text:page-number>4'
     "</text:page-number>.", ["See {1} on page {2}."]),
    ("Page <text:page-number/> of <text:page-count>9</text:page-count> pages.", ["Page {1} of {2} pages."]),
    ('The <text:bookmark-start text:name="a"/>red<text:bookmark-end text:name="a"/> house.', ["The <x1>red</x1> house."]),
    ('A <text:reference-mark-start text:name="a"/>b <text:bookmark-start text:name="a"/>c'
     '<text:reference-mark-end text:name="a"/> d<text:bookmark-end text:name="a"/> e.',
     ["A <x1>b <x2/>c</x1> d<x3/> e."]),
    ('A <text:span><text:bookmark-start text:name="a"/>b</text:span> c<text:bookmark-end text:name="a"/> d.',
     ["A <x1><x2/>b</x1> c<x3/> d."]),
    ('See <text:span>1.</text:span> <text:span>2.</text:span> and <text:a>the house</text:a>.',
     ["See <x1>1.</x1> <x2>2.</x2> and <x3>the house</x3>."]),
    ('Here <text:change-start text:change-id="c"/>is new<text:change-end text:change-id="c"/> text.',
     ["Here <x1>is new</x1> text."]),
    ('A note<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>More.</text:p></text:note-body>'
     "</text:note> here.", ["A note<x1/> here.", "More."]),
    ('Read <text:a>https://example.org/b</text:a> or <text:bookmark text:name="x"/>this.', ["Read {1} or <x2/>this."]),
    ('A <office:annotation office:name="n"/>word<office:annotation-end office:name="n"/> here.',
     ["A <x1>word</x1> here."]),
)  # fmt: skip


def odt_events(node):
    pairs = r"(?:(.*mark|change)-(start|end)|(annotation)(-end)?)"
    yield node.text or ""
    for child in node:
        name, values = child.tag.split("}")[-1], list(child.attrib.values())
        if match := re.fullmatch(pairs, name):
            yield "-" if name.endswith("end") else "+", f"{match[1] or match[3]} {values[0]}"
        elif name in ("span", "a"):
            yield "+", name
            yield from odt_events(child)
            yield "-", name
        else:
            yield "w" if child.text else "o", name
        yield child.tail or ""


HTML_CASES = (
    ("Please <a>sign in</a> or <a>register</a> now.", "Please <x1>sign in</x1> or <x2>register</x2> now."),
    ("Go <a>to the <b>red</b> house</a> now.", "Go <x1>to the <x2>red</x2> house</x1> now."),
    ("See <i>one</i><b>two</b><u>three</u> here.", "See <x1>one</x1><x2>two</x2><x3>three</x3> here."),
    ("The <i>first</i>, <b>second</b>; <u>third</u>.", "The <x1>first</x1>, <x2>second</x2>; <x3>third</x3>."),
    ("Run <code>ls</code> or <a>the <code>rm</code> command</a>.", "Run {1} or <x2>the {3} command</x2>."),
    ("See <a>the list</a><span> [https://example.org/a]</span> now.",
     "See <x1>the list</x1><x2> [https://example.org/a]</x2> now."),
    ("See <a>https://example.org/a</a> for <b>more</b>.", "See {1} for <x2>more</x2>."),
    ("A <b></b>word<i> </i>here <u>,</u> and there.", "A <x1/>word<x2/>here <x3/> and there."),
    ("It <b>begins here.", "It <x1/>begins here."),
    ("It ends</b> here.", "It ends<x1/> here."),
    ("One<wbr>two <img src=a> three <b>four</b>.", "One<x1/>two <x2/> three <x3>four</x3>."),
    ("<b>All</b> of <i>it</i>", "<x1>All</x1> of <x2>it</x2>"),
    ("E = mc<sup>2</sup> is <a>his formula</a>.", "E = {1} is <x2>his formula</x2>."),
    ("<b><i><u>Deep</u> words</i> are</b> here.", "<x1><x2><x3>Deep</x3> words</x2> are</x1> here."),
    ("He <a>sees <kbd>A</kbd></a> and <a><kbd>B</kbd> there</a>.", "He <x1>sees {2}</x1> and <x3>{4} there</x3>."),
    ("Page <b>5</b> of <i>the book</i>.", "Page <x1>5</x1> of <x2>the book</x2>."),
)  # fmt: skip


def html_events(text):
    """Yield the events of HTML; elements are named by their order."""
    stack = []
    for part in re.split(r"(<(?:code|kbd)>.*?</(?:code|kbd)>|<[^<>]*>)", text):
        name = part.strip("</>").split(" ")[0]
        if part.startswith(("<code", "<kbd", "<img", "<wbr")):
            yield "w" if part.startswith(("<code", "<kbd")) else "o", part
        elif part.startswith("</"):
            yield "-", stack.pop() if stack else part
        elif part.startswith("<"):
            stack.append(name)
            yield "+", name
        else:
            yield part


def check(cases, translate, events):
    """translate(source, translate) returns a document."""
    for source, wanted in cases:
        seen = []
        translate(source, lambda texts: seen.extend(texts) or texts)  # noqa: B023
        assert seen == ([wanted] if isinstance(wanted, str) else wanted), (source, seen)
        before = structure(events(translate(source, lambda texts: texts)))
        for translator in TRANSLATORS:
            got = translate(source, lambda texts: [translator(text) for text in texts])  # noqa: B023
            assert same_structure(before, structure(events(got))), (source, translator.__name__, got)


@test
def xliff_keeps_the_structure_of_its_codes():
    for version, frame in (("1.2", XLIFF), ("2.0", XLIFF2)):
        check(XLIFF_CASES,
              lambda source, translate: translate_document(frame % (version, f"<source>{source}</source>"),  # noqa: B023
                                                           "xliff", translate),
              lambda data: xliff_events(next(ElementTree.fromstring(data).iter("target"))))  # fmt: skip


@test
def docx_keeps_the_structure_of_fields_and_bookmarks():
    name = "word/document.xml"
    check(DOCX_CASES,
          lambda source, translate: member(translate_document(zipped(name, DOCX % source), "docx", translate), name),
          docx_events)  # fmt: skip


@test
def odt_keeps_the_structure_of_fields_and_bookmarks():
    name = "content.xml"
    check(ODT_CASES,
          lambda source, translate: member(translate_document(zipped(name, ODT % source), "odt", translate), name),
          lambda xml: odt_events(next(ElementTree.fromstring(xml).iter("{t}p"))))  # fmt: skip


@test
def html_keeps_the_structure_of_its_tags():
    check(HTML_CASES, lambda source, translate: translate_document(f"<p>{source}</p>", "html", translate), html_events)


if __name__ == "__main__":
    sys.exit(test.run())
