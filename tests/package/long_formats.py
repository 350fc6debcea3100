#!/usr/bin/env python3
"""Real PO files, subtitles, office documents and Qt strings (real_files.tsv), translated by the shipped model.

Usage: tests/python tests/package/long_formats.py

What is compared shares no code with the package: msgfmt -c reads PO files, lxml counts the elements of office
documents, the translate-toolkit reads Qt's, and of subtitles lines with times, numbers, tags and dashes are counted.
"""

import io
import os
import pathlib
import re
import subprocess
import sys
import zipfile
from collections import Counter

from lxml import etree
from moe_translate import Translator
from moe_translate.documents import Watched, translate_document
from real_files import files
from suite import Suite
from translate.storage import factory

test = Suite()
SIGNS = (
    r"^[^\n]*(?:-->|\d\.\d\d\d,\d)[^\n]*$",
    r"^\s*\d+\s*$",
    r"<[^<>\n]*>",
    r"^(?:<\w>)*[-–—]",
    r"\{[^}\n]*\}",
)
ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = os.environ.get("MOE_MODEL", str(ROOT / "models/en-de-fr-es.bin"))
# Runs are joined and divided, and what Word noted of its last look at a text goes
RUNS = set(
    "r t rPr proofErr lastRenderedPageBreak lang noProof soft-page-break s b i sz szCs rFonts color rStyle".split()
)
RUNS |= set("bCs iCs u rtl strike caps smallCaps highlight vertAlign".split())


def translated(kind, **options):
    """(name, before, after, what was said) of each file of a kind."""
    found = 0
    with Translator(MODEL, target="de", beam=1) as translator:
        for name, data in files(kind):
            said = []
            watched = Watched(translator)
            after = translate_document(
                data, kind, watched, lambda *what: said.append(what), target="de", source="en", **options
            )
            found += 1
            yield name, data, after, said
    assert found >= 5, f"{found} files of {kind}"


@test
def msgfmt_finds_nothing_fatal():
    for name, before, after, said in translated("po"):
        done = subprocess.run(["msgfmt", "-c", "--use-fuzzy", "-o", "/dev/null", "-"], input=after, capture_output=True)
        assert done.returncode == 0, (name, done.stderr.decode())
        ids = re.compile(rb"^(?:msgid|msgid_plural|msgctxt|#[^,]?.*) .*$", re.M)
        comments = [line for line in ids.findall(before) if not line.startswith(b"#, ")]
        assert comments == [line for line in ids.findall(after) if not line.startswith(b"#, ")], name
        assert len(said) < 0.2 * before.count(b"\nmsgid "), (name, said)


@test
def subtitles_keep_all_but_words():
    count = 0
    for name, before, after, _ in translated("subtitles"):
        old, new = before.decode("utf-8-sig"), after.decode("utf-8-sig")
        for what in (
            r"^[^\n]*(?:-->|\d\.\d\d\d,\d)[^\n]*$",
            r"^\s*\d+\s*$",
            r"<[^<>\n]*>",
            r"^(?:<\w>)*[-–—]",
            r"\{[^}\n]*\}",
        ):
            found = [Counter(re.findall(what, text, re.M)) for text in (old, new)]
            assert found[0] == found[1], (name, what, found[0] - found[1], found[1] - found[0])
        assert old.startswith("WEBVTT") == new.startswith("WEBVTT") and ("\r\n" in old) == ("\r\n" in new), name
        blocks = [[bool(re.search(r"[^\W\d_]", b)) for b in re.split(r"\n\s*\n", text)] for text in (old, new)]
        assert blocks[0] == blocks[1], (name, "a cue lost its words")
        count += 1
    assert count >= 41, count


def census(data, names):
    """Elements of the members with text, and the bytes of the others."""
    found, words = Counter(), 0
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        for name in file.namelist():
            if not re.fullmatch(names, name):
                found[name, file.read(name)] += 1
                continue
            root = etree.fromstring(file.read(name))
            for element in root.iter():
                if isinstance(element.tag, str) and etree.QName(element).localname not in RUNS:
                    found[name, element.tag] += 1
            words += len(re.findall(r"[^\W\d_]{2,}", " ".join(root.itertext())))
    return found, words


def office(kind, names):
    for name, before, after, _ in translated(kind):
        (old, words), (new, left) = census(before, names), census(after, names)
        assert old == new, (name, [x[:2] for x in (old - new)][:5], [x[:2] for x in (new - old)][:5])
        assert left >= 0.6 * words, (name, words, left)


@test
def letters_keep_their_structure():
    office("docx", r"word/(document|header\d*|footer\d*|footnotes|endnotes)\.xml")


@test
def text_documents_keep_their_structure():
    office("odt", r"(content|styles)\.xml")


@test
def strings_of_qt_are_read_again():
    for name, before, after, said in translated("qt", overwrite=True):
        stores = []
        for data in (before, after):
            file = io.BytesIO(data)
            file.name = "a.ts"
            stores.append(factory.getobject(file).units)
        old, new = ([(str(unit.source), unit.getcontext()) for unit in units] for units in stores)
        assert old == new, name
        kept = {text for _, text in said}
        assert sum(not str(unit.target).strip() for unit in stores[1]) == 0, (name, kept)


if __name__ == "__main__":
    sys.exit(test.run())
