#!/usr/bin/env python3
"""Office documents, books and files of strings: read again by libraries that the package does not use.

Usage: tests/python tests/package/test_formats.py
"""

import csv
import io
import json
import re
import sys
import zipfile

import docx
import javaproperties
import yaml
from ebooklib import epub
from moe_translate.documents import translate_document
from odf import teletype
from odf.opendocument import OpenDocumentText, load
from odf.text import H, P, Span
from suite import Suite
from translate.storage import factory

test = Suite()
KEPT = re.compile(r"(<[^<>]*>|\{\w*\}|%\d+\$\w|%\w)")


def same(texts):
    return list(texts)


def louder(texts):
    """Capitals; tags and conversions stay."""
    return ["".join(part if KEPT.fullmatch(part) else part.upper() for part in KEPT.split(text)) for text in texts]


def nothing(texts):
    return [""] * len(texts)


def saved(document):
    out = io.BytesIO()
    (document.save if hasattr(document, "tables") else document.write)(out)
    return out.getvalue()


def members(data):
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {info.filename: file.read(info) for info in file.infolist()}


def zipped(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return out.getvalue()


def refused(data, kind, word):
    try:
        translate_document(data, kind, louder)
    except ValueError as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"{kind} is not refused")


# ---- Office ------------------------------------------------------------


def a_letter():
    letter = docx.Document()
    letter.add_heading("A heading", 1)
    paragraph = letter.add_paragraph("Some text with ")
    paragraph.add_run("bold words").bold = True
    paragraph.add_run(" and the rest.")
    letter.add_paragraph("Left\tright\nbelow")
    letter.add_table(1, 2).cell(0, 1).text = "In a cell"
    letter.sections[0].header.paragraphs[0].text = "Above"
    letter.sections[0].footer.paragraphs[0].text = "Page"
    return letter


@test
def a_letter_keeps_its_look():
    before = saved(a_letter())
    after = translate_document(before, "docx", louder)
    letter = docx.Document(io.BytesIO(after))
    assert [[(run.text, run.bold) for run in p.runs if run.text] for p in letter.paragraphs[:3]] == [
        [("A HEADING", None)],
        [("SOME TEXT WITH ", None), ("BOLD WORDS", True), (" AND THE REST.", None)],
        [("LEFT", None), ("\t", None), ("RIGHT", None), ("\n", None), ("BELOW", None)],
    ]
    assert letter.tables[0].cell(0, 1).text == "IN A CELL"
    assert letter.sections[0].header.paragraphs[0].text == "ABOVE"
    assert letter.sections[0].footer.paragraphs[0].text == "PAGE"
    text = re.compile(r"word/(document|header\d|footer\d)\.xml")
    old, new = members(before), members(after)
    assert list(old) == list(new) and all(old[name] == new[name] for name in old if not text.fullmatch(name))


@test
def what_stands_in_a_paragraph_stays():
    def run(text):
        return f"<w:r><w:t xml:space='preserve'>{text}</w:t></w:r>"

    def field(kind):
        return f"<w:r><w:fldChar w:fldCharType='{kind}'/></w:r>"

    inside = (
        f"{run('I have ')}<w:del w:id='1'><w:r><w:delText>old</w:delText></w:r></w:del><w:ins w:id='2'>{run('new ')}"
        f"</w:ins><w:hyperlink w:anchor='x'>{run('houses')}</w:hyperlink><w:r><w:rPr><w:rStyle w:val='VerbatimChar'/>"
        f"</w:rPr><w:t>code</w:t></w:r>{field('begin')}<w:r><w:instrText> MERGEFIELD Name </w:instrText></w:r>"
        f"{field('separate')}{run('Name')}{field('end')}"
        f"<w:r><w:pict><w:txbxContent><w:p>{run('In a box')}</w:p></w:txbxContent></w:pict></w:r>"
    )
    files = members(saved(a_letter()))
    body = b"<w:body>"
    files["word/document.xml"] = files["word/document.xml"].replace(body, body + f"<w:p>{inside}</w:p>".encode(), 1)
    for translate in (louder, lambda texts: [re.sub(r"<[^<>]*>", "", text).upper() for text in texts]):
        got = members(translate_document(zipped(files), "docx", translate))["word/document.xml"].decode()
        for kept in ("<w:delText>old</w:delText>", ">code<", " MERGEFIELD Name ", ">Name<", "IN A BOX", "w:anchor"):
            assert got.count(kept) == 1, (kept, got)
        assert re.search(r"<w:ins w:id=.2.>.{0,80}NEW", got) and re.search(r"<w:hyperlink.{0,80}HOUSES", got), got


@test
def right_to_left_is_said():
    got = translate_document(saved(a_letter()), "docx", louder, target="arb_Arab")
    text = members(got)["word/document.xml"]
    assert text.count(b"<w:bidi/>") == 4 and b"<w:rtl/>" in text, text.count(b"<w:bidi/>")
    assert docx.Document(io.BytesIO(got)).paragraphs[0].text == "A HEADING"


@test
def a_text_document_keeps_its_look():
    document = OpenDocumentText()
    document.text.addElement(H(outlinelevel=1, text="A heading"))
    paragraph = P(text="Hello ")
    paragraph.addElement(Span(stylename="B", text="bold"))
    paragraph.addText(" there & you")
    document.text.addElement(paragraph)
    before = saved(document)
    after = translate_document(before, "odt", louder)
    again = load(io.BytesIO(after))
    assert [teletype.extractText(p) for p in again.getElementsByType(P)] == ["HELLO BOLD THERE & YOU"]
    assert [teletype.extractText(p) for p in again.getElementsByType(H)] == ["A HEADING"]
    assert [teletype.extractText(p) for p in again.getElementsByType(Span)] == ["BOLD"]
    old, new = members(before), members(after)
    assert list(new)[0] == "mimetype" and all(old[name] == new[name] for name in old if name != "content.xml")


@test
def a_book_is_translated():
    book = epub.EpubBook()
    book.set_title("T")
    book.set_language("en")
    chapter = epub.EpubHtml(title="Chapter one", file_name="c1.xhtml")
    chapter.content = "<h1>Chapter one</h1><p>Hello <b>you</b> &amp; me.</p>"
    book.add_item(chapter)
    book.toc = (chapter,)
    book.add_item(epub.EpubNcx())
    book.add_item(epub.EpubNav())
    book.spine = ["nav", chapter]
    out = io.BytesIO()
    epub.write_epub(out, book)
    after = members(translate_document(out.getvalue(), "epub", louder, target="de"))
    assert b"<p>HELLO <b>YOU</b> &amp; ME.</p>" in after["EPUB/c1.xhtml"]
    assert b"CHAPTER ONE" in after["EPUB/toc.ncx"] and b">de</dc:language>" in after["EPUB/content.opf"]


@test
def bombs_and_entities_are_refused():
    refused(zipped({"content.xml": b"<a>" + b" " * (32 << 20) + b"</a>"}), "odt", "bomb")
    bomb = (
        '<!DOCTYPE r [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><resources><string name="x">A &b; b</string></resources>'
    )
    refused(bomb, "android", "entity")
    refused(bomb.replace('"&a;&a;"', 'SYSTEM "file:///etc/passwd"'), "android", "entity")
    refused(zipped({"content.xml": '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'}), "odt", "entity")
    refused(b"PK no", "docx", "zip")
    refused("<resources>" + "<b>" * 5000 + "</b>" * 5000 + "</resources>", "android", "deep")
    refused("[" * 200000 + "]" * 200000, "json", "deep")


# ---- Strings -----------------------------------------------------------


def stored(data, name):
    """{source: target} as the translate-toolkit reads it."""
    file = io.BytesIO(data.encode())
    file.name = name
    return {str(unit.source): str(unit.target) for unit in factory.getobject(file).units if unit.istranslatable()}


@test
def strings_come_out_for_other_readers():
    xliff = (
        '<?xml version="1.0"?>\n<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2"><file original="a" '
        'source-language="en" datatype="plaintext"><body><trans-unit id="1"><source>Hello %s</source></trans-unit>'
        '<trans-unit id="2"><source>Done</source><target>Fertig</target></trans-unit><trans-unit id="3" translate="no">'
        "<source>Not this</source></trans-unit></body></file></xliff>"
    )
    got = translate_document(xliff, "xliff", louder, target="de")
    found = stored(got, "a.xlf")
    assert found["Hello %s"] == "HELLO %s" and found["Done"] == "Fertig" and "NOT THIS" not in got
    assert 'target-language="de"' in got
    assert translate_document(xliff, "xliff", louder, overwrite=True).count("<target") == 2
    ts = (
        '<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE TS>\n<TS version="2.1"><context><name>M</name><message>'
        '<source>&amp;Open %1</source><translation type="unfinished">'
        '</translation></message><message numerus="yes"><source>'
        '%n file(s)</source><translation type="unfinished"><numerusform></numerusform></translation></message><message>'
        "<source>x y</source><translation>done</translation></message></context></TS>"
    )
    got = translate_document(ts, "qt", louder, target="pl")
    assert stored(got, "a.ts")["&Open %1"] == "&OPEN %1" and "done" in got and got.count("<numerusform>") == 3
    assert 'language="pl"' in got


@test
def android_keeps_its_escapes_and_markup():
    data = (
        "<resources>\n<!-- a -->\n<string name='a'>Don\\'t go,\\nhe &amp; %1$s</string>\n<string name='b' "
        "translatable='false'>no no</string><string name='c'>A <b>bold</b> <xliff:g id='x'>%s</xliff:g> word</string>"
        "<string name='d'><![CDATA[Hi <b>there</b>]]></string><plurals name='p'><item quantity='one'>One day</item>"
        "</plurals><string name='e'>@string/x</string></resources>"
    )
    got = translate_document(data, "android", louder)
    wanted = (("Don\\'t go", "DON\\'T GO"), ("\\nhe", "\\nHE"), ("A <b>bold</b>", "A <b>BOLD</b>"), (" word", " WORD"))
    for old, new in (*wanted, ("Hi <b>there", "HI <b>THERE"), ("One day", "ONE DAY")):
        data = data.replace(old, new)
    assert got == data, got


@test
def values_of_json_are_translated_and_keys_are_not():
    data = (
        '{"a": "Hello {name}",\n "b": {"c": ["One \\u00e4 two", "user_id", 3, null]}, "@a": {"d": "not this"}, '
        '"e": "a b\\nc d"}'
    )
    assert json.loads(translate_document(data, "json", louder)) == {
        "a": "HELLO {name}",
        "b": {"c": ["ONE Ä TWO", "user_id", 3, None]},
        "@a": {"d": "not this"},
        "e": "A B\nC D",
    }
    assert translate_document(data, "json", same) == data
    refused('{"a": ', "json", "JSON")


@test
def cells_stay_cells():
    data = 'id,text,"long ""t"""\r\n1,Hello there,"a, b"\r\nuser_id,Bye,3\r\n'
    got = translate_document(data, "table", lambda texts: [text.upper() + ', "x"' for text in texts], columns="text")
    assert list(csv.reader(io.StringIO(got, newline=""))) == [
        ["id", "text", 'long "t"'],
        ["1", 'HELLO THERE, "x"', "a, b"],
        ["user_id", 'BYE, "x"', "3"],
    ]
    assert translate_document(data, "table", same) == data
    assert translate_document("a b\tc\n", "table", louder) == "A B\tC\n"
    assert translate_document("a,b\nc d,e f\n", "table", louder, columns="2") == "a,B\nc d,E F\n"
    try:
        translate_document(data, "table", same, columns="name")
    except ValueError as error:
        assert "'text'" in str(error)
    else:
        raise AssertionError("a column that is not there")


@test
def properties_keep_keys_and_comments():
    data = (
        "# c\nkey = Hello {0}, it''s me\\n  next\nlong = one \\\n   two three\nempty=\npath=/a/b\nu=\\u00e4 word here\n"
    )
    got = translate_document(data, "properties", louder)
    assert javaproperties.loads(got) == {
        "key": "HELLO {0}, IT''S ME\n  NEXT",
        "long": "ONE TWO THREE",
        "empty": "",
        "path": "/a/b",
        "u": "Ä WORD HERE",
    }
    assert got.startswith("# c\nkey = ") and got.isascii()


@test
def yaml_keeps_comments_and_gets_the_locale():
    data = (
        "en:\n  hello: Hello there # c\n  n: 3\n  yes: \"Quoted: \\n text\"\n  s: 'it''s'\n  b: |\n    Line one\n"
        "    line two\n\n  f: >-\n    folded text that\n    goes on\n  list: [one, two words]\n"
    )
    got = translate_document(data, "yaml", louder, target="de")
    read = yaml.safe_load(data)["en"]
    upper = {key: value.upper() if isinstance(value, str) else value for key, value in read.items()}
    assert yaml.safe_load(got) == {"de": upper | {"list": ["ONE", "TWO WORDS"]}}, got
    assert "hello: HELLO THERE # c\n" in got
    odd = translate_document("a: some text\n", "yaml", lambda texts: ["x: #y"])
    assert yaml.safe_load(odd) == {"a": "x: #y"}


@test
def other_conversions_are_not_taken():
    said = []
    for kind, data in (
        ("android", "<resources><string name='a'>Hi %s there</string></resources>"),
        ("json", '{"a": "Hi %s there"}'),
        ("properties", "a=Hi %s there\n"),
        ("yaml", "a: Hi %s there\n"),
        ("xliff", "<xliff version='2.0'><segment><source>Hi %s there</source></segment></xliff>"),
    ):
        got = translate_document(data, kind, lambda texts: ["Da"] * len(texts), lambda *what: said.append(what))
        assert got.count("Hi %s there") == 1 + (kind == "xliff"), (kind, got)
    assert len(said) == 5, said


@test
def what_cannot_be_translated_stays():
    letter, said = saved(a_letter()), []
    got = docx.Document(io.BytesIO(translate_document(letter, "docx", nothing, lambda *what: said.append(what))))
    assert [p.text for p in got.paragraphs] == [p.text for p in docx.Document(io.BytesIO(letter)).paragraphs]
    assert len(said) == 8 and said[0][0] == "word/document.xml, text 1", said


if __name__ == "__main__":
    sys.exit(test.run())
