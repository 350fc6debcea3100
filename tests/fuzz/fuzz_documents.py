#!/usr/bin/env python3
"""Translate damaged documents of every format with fake translators.

Usage: tests/python tests/fuzz/fuzz_documents.py SECONDS [SEED]
       tests/python tests/fuzz/fuzz_documents.py --count N [SEED]

Damages the bytes, lines and structure of small documents. A reader must either refuse a document with a ValueError
that a user understands, or translate it: no word of the source may be lost, formats that have one text per language
keep their bytes if nothing is translated, failures are reported, and the result can be read again.

Prints one finding for each kind and keeps its document in build/fuzz/crashes/documents-SEED-N.
"""
import glob
import io
import os
import random
import re
import sys
import time
import traceback
import zipfile
from collections import Counter

import yaml

from moe_translate.documents import FORMATS, translate_document

from moe_translate.strings_yaml import Loader

FOUND = "build/fuzz/crashes"
SLOW = 5.0


def office(kind, name, body):
    """Return the members of an office document: the list of types, and one with text."""
    types = f'<Types><Override PartName="/{name}" ContentType="application/x.{kind}+xml"/></Types>'
    return {"[Content_Types].xml": types, name: body}


ARCHIVES = {
    "docx": office(
        "wordprocessingml.document.main", "word/document.xml",
        '<w:document xmlns:w="w"><w:body><w:p><w:r><w:t>One </w:t></w:r><w:r><w:rPr><w:b/></w:rPr><w:t>two</w:t></w:r>'
        "</w:p><w:tbl><w:tr><w:tc><w:p><w:r><w:t>In a cell</w:t></w:r></w:p></w:tc></w:tr></w:tbl></w:body>"
        "</w:document>"),
    "pptx": office(
        "presentationml.slide", "ppt/slides/slide1.xml",
        '<p:sld xmlns:a="a" xmlns:p="p"><p:txBody><a:p><a:r><a:t>One </a:t></a:r><a:br/><a:r><a:rPr b="1"/><a:t>two'
        "</a:t></a:r></a:p></p:txBody></p:sld>"),
    "xlsx": office(
        "spreadsheetml.sharedStrings", "xl/sharedStrings.xml",
        "<sst><si><t>One two</t></si><si><r><t>In </t></r><r><rPr><b/></rPr><t>bold</t></r></si></sst>"),
    "odt": {
        "mimetype": "application/vnd.oasis.opendocument.text",
        "content.xml": '<office:document-content xmlns:office="o" xmlns:text="t"><text:h>Head here</text:h><text:p>One '
        "<text:span>two</text:span> three<text:s/></text:p></office:document-content>",
    },
    "epub": {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<container><rootfile full-path="b.opf"/></container>',
        "b.opf": '<package><metadata><dc:language>en</dc:language></metadata><item href="c.xhtml" '
        'media-type="application/xhtml+xml"/><spine></spine></package>',
        "c.xhtml": "<html><body><p>One <b>two</b></p></body></html>",
    },
}
TOKENS = (
    '"', "'", "\\", "\\\\", "{", "}", "[", "]", "<", ">", "</", "/>", "&", "&amp;", "&x;", "&#xD800;", "&#0;",
    "&#10;", "<!--", "-->", "<![CDATA[", "]]>", "<b>", "</b>", "\r", "\n", "\r\n", "\x00", "\x01", "\x02", "\x0b",
    "\x0c", "\x1c", "\x85", "\xa0", "\u2028", "\ufeff", "\ud800", "\\u", "\\uD800", "\\x", "\\N", "%", "%s", "%(a)s",
    "{0}", "{{", "$", "#", "#~ ", "#| ", "#, ", ":", ": ", "::", "- ", "* ", "> ", "| ", "\t", "  ", "    ", "!",
    "!!binary ", "&a ", "*a", "<<: ", "? ", "---\n", "...\n", "msgid ", "msgstr ", "msgstr[9] ", "msgid_plural ",
    "msgctxt ", "WEBVTT", "NOTE ", "00:00:09,000 --> 00:00:01,000", "{\\k1}", "{\\p1}", "<00:00:01.000>",
    "charset=CHARSET", "charset=utf-16", "encoding='x'", "nplurals=0;", "nplurals=999999;", "9" * 5000, "[" * 120,
    "(" * 50, "`", "``", "$$", "1e999", "null", "true", "mid='0'", "mtype='seg'", "xml:space='preserve'",
    "state='new'", "<source>", "</source>", "<target>", "[^1]", "](", "![",
)  # fmt: skip
PYTHON = re.compile(
    r"[A-Z]\w+Error|Exception|Traceback|NoneType|\bobject\b|index out|to unpack|\bargument|invalid literal|<class"
    r"|'utf-8' codec|not subscriptable|\bint\(\)|substring not found"
)
KEPT = re.compile(r"(<[^<>]*>|\{\w*\}|%\d+\$\w|%\(\w+\)s|%\w|\\\w)")
ADDED = ("po", "xliff", "qt")  # formats that contain both languages
REWRITTEN = ("html", "markdown", *ARCHIVES, *ADDED)  # spaces, character references or line breaks change


def same(texts):
    return list(texts)


def louder(texts):
    return ["".join(part if KEPT.fullmatch(part) else part.upper() for part in KEPT.split(text)) for text in texts]


def nothing(texts):
    return ["" for _ in texts]


def wild(texts):
    r = random.Random(len(texts))
    more = ("", "<x1>", "</x9>", " & <b> \" ' > # * _ ` | [x](y) {0}", "\\", "--", "\n", "]]>", "%s")
    return [text.upper() + r.choice(more) for text in texts]


def zipped(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in files.items():
            file.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def damaged(r, data, other):
    for _ in range(r.choice((0, 1, 1, 1, 2, 3, 6))):
        at = r.randrange(len(data) + 1)
        end = min(len(data), at + r.choice((1, 1, 2, 5, 20, 80)))
        lines = data.splitlines(keepends=True)
        kind = r.randrange(9)
        if kind == 0:
            data = data[:at] + data[end:]
        elif kind == 1:
            data = data[:at] + data[at:end] * r.choice((2, 3, 30)) + data[end:]
        elif kind in (2, 3):
            data = data[:at] + r.choice(TOKENS).encode("utf-8", "surrogatepass") + data[at:]
        elif kind == 4:
            data = data[:at] + bytes([r.randrange(256)]) + data[at + 1 :]
        elif kind == 5 and lines:
            r.shuffle(lines)
            data = b"".join(lines)
        elif kind == 6 and lines:
            del lines[r.randrange(len(lines))]
            data = b"".join(lines)
        elif kind == 7:
            cut = r.randrange(len(other) + 1)
            data = data[:at] + other[cut:]
        else:
            data = data[:at]
    return data


def document(r, kind, seeds):
    """Return the bytes of a damaged document."""
    if kind not in ARCHIVES:
        return damaged(r, r.choice(seeds[kind]), r.choice(seeds[kind]))
    files = {name: text.encode("utf-8") for name, text in ARCHIVES[kind].items()}
    name = r.choice(list(files))
    files[name] = damaged(r, files[name], files[name])
    data = zipped(files)
    return damaged(r, data, data) if r.random() < 0.1 else data


def letters(kind, data):
    """Count the letters of a document without its escapes."""
    if FORMATS[kind].binary:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            data = b"\n".join(file.read(name) for name in sorted(file.namelist()) if name[-4:] != ".opf")
        if "[Content_Types].xml" in ARCHIVES[kind]:
            data = b"\n".join(re.findall(rb"<(?:[aw]:)?t(?: [^<>]*)?>([^<]*)<", data))
    if kind in ADDED or FORMATS[kind].binary:
        data = re.sub(rb"<(?:\"[^\"]*\"|'[^']*'|[^<>\"'])*>", b"", data)
    if kind == "po":
        data = re.sub(rb"charset=[^\\\"]*|Language:[^\\\"]*|msgstr(\[\d*\])?", b"", data)
    if kind == "html":
        data = re.sub(rb"charset=[^ >&]*", b"", data)
    backslashes, references = r"\\u[0-9a-fA-F]{4}|\\[\\\w]", r"&#?\w+;?"
    escapes = {"subtitles": r"&\w+;", "properties": backslashes}.get(kind, f"{backslashes}|{references}")
    text = re.sub(escapes, "", data.decode("latin-1"))
    return Counter(re.findall("[a-z]", text.lower()))


def values(kind, data):
    """Return what must not change if nothing is translated: the bytes, or the values in YAML."""
    if kind != "yaml":
        return data
    return [getattr(event, "value", type(event)) for event in yaml.parse(data.decode(), Loader=Loader)]


def problem(kind, data, target):
    """Return (description of a bug or None, error message if the document is rejected or None)."""
    languages = {"source": "en", "target": target}
    for translate in (nothing, same, louder, wild):
        reports, asked = [], []

        def watched(texts, translate=translate, asked=asked):
            asked += texts
            return translate(texts)

        begin = time.process_time()
        try:
            done = translate_document(data, kind, watched, lambda *what: reports.append(what), **languages)
        except ValueError as error:
            text = str(error)
            if PYTHON.search(text) or not text:
                last = traceback.extract_tb(error.__traceback__)[-1]
                return f"message {re.sub(r'[0-9]+', 'N', text)[:80]!r} ({os.path.basename(last.filename)})", None
            return None, text
        except Exception as error:  # noqa: BLE001 - any other exception is a finding
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} at {os.path.basename(last.filename)}:{last.lineno}", None
        name = translate.__name__
        if time.process_time() - begin > SLOW:
            return f"{name}: slow", None
        copied = translate in (nothing, same) and kind not in REWRITTEN and target == "en"
        if copied and values(kind, done) != values(kind, data):
            return f"{name}: bytes changed", None
        lost = letters(kind, data) - letters(kind, done)
        if translate is not wild and target == "en" and lost:  # otherwise names of languages change
            return f"{name}: lost letters", None
        if translate is nothing and asked and not reports:
            return "nothing: no report", None
        try:
            translate_document(done, kind, same, **languages)
        except Exception as error:  # noqa: BLE001
            return f"{name}: result unreadable: {re.sub(r'[0-9]+', 'N', str(error))[:60]}", None
    return None, None


def main():
    count, seconds = 0, 0.0
    if sys.argv[1:2] == ["--count"] and len(sys.argv) in (3, 4):
        count, seed = int(sys.argv[2]), int((sys.argv[3:] or [1])[0])
    elif len(sys.argv) in (2, 3) and sys.argv[1].replace(".", "").isdigit():
        seconds, seed = float(sys.argv[1]), int((sys.argv[2:] or [1])[0])
    else:
        print(__doc__, file=sys.stderr)
        return 2
    seeds = {}
    for path in sorted(glob.glob("tests/fuzz/seeds/documents/*")):
        with open(path, "rb") as file:
            seeds.setdefault(os.path.basename(path).split("-")[0], []).append(file.read())
    kinds, begin, done, found, refused = [*seeds, *ARCHIVES], time.monotonic(), 0, {}, Counter()
    while done < count if count else time.monotonic() - begin < seconds:
        kind = kinds[done % len(kinds)]
        data = document(random.Random(f"{seed} {done}"), kind, seeds)
        what, message = problem(kind, data, "de" if done % 8 == 0 else "en")
        if message:
            refused[re.sub(r"[0-9]+", "N", f"{kind}: {message}")[:70]] += 1
        if what and (kind, what) not in found:
            found[kind, what] = f"{FOUND}/documents-{seed}-{done}"
            os.makedirs(FOUND, exist_ok=True)
            with open(found[kind, what], "wb") as file:
                file.write(data)
        done += 1
    numbers = "documents", time.monotonic() - begin, done, refused.total(), len(refused)
    print("fuzz-%-17s %6.0f s %10d documents, %d refused with %d messages: " % numbers, end="")
    print("FINDING" if found else "nothing found")
    for (kind, what), path in found.items():
        print(f"    {kind}: {what}: {path}")
    if os.environ.get("MESSAGES"):
        print(*(f"    {number:6} {text}" for text, number in refused.most_common()), sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
