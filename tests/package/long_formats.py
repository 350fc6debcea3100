#!/usr/bin/env python3
"""Real files of every format but HTML and Markdown (real_files.tsv; long_documents.py has those), translated by the
shipped model.

Usage: tests/python tests/package/long_formats.py

What is compared shares no code with the package: msgfmt -c reads PO files, survey.py counts what the others are made
of. A file with text comes out translated, and at most one text in twenty stays as it was.
"""

import os
import pathlib
import re
import subprocess
import sys

from moe_translate import Translator
from moe_translate.documents import Watched, translate_document
from real_files import files
from suite import Suite
from survey import survey

test = Suite()
ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = os.environ.get("MOE_MODEL", str(ROOT / "models/en-de-fr-es.bin"))


def translated(kind, least=5, **options):
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
    assert found >= least, f"{found} files of {kind}"


@test
def msgfmt_finds_nothing_fatal():
    for name, before, after, said in translated("po"):
        done = subprocess.run(["msgfmt", "-c", "--use-fuzzy", "-o", "/dev/null", "-"], input=after, capture_output=True)
        assert done.returncode == 0, (name, done.stderr.decode())
        ids = re.compile(rb"^(?:msgid|msgid_plural|msgctxt|#[^,]?.*) .*$", re.M)
        comments = [line for line in ids.findall(before) if not line.startswith(b"#, ")]
        assert comments == [line for line in ids.findall(after) if not line.startswith(b"#, ")], name
        assert len(said) < 0.2 * before.count(b"\nmsgid "), (name, said)


def nothing_is_lost(kind, least=5, **options):
    stayed = 0
    for name, before, after, said in translated(kind, least, **options):
        old, new = survey(kind, before), survey(kind, after)
        assert old == new, (name, "lost", list(old - new)[:5], "new", list(new - old)[:5])
        nothing = any("no text to translate" in why for _, why in said)
        english = before[:2] == b"PK" or re.search(rb"\b[a-z]{2,} [a-z]{2,} [a-z]{2,}", before)
        assert nothing or not english or after != before, (name, "is not translated", said)
        stayed += len(said) - nothing
    return stayed


@test
def subtitles_keep_all_but_words():
    nothing_is_lost("subtitles", 41)


@test
def letters_keep_their_structure():
    nothing_is_lost("docx")


@test
def text_documents_keep_their_structure():
    nothing_is_lost("odt")


@test
def books_keep_their_structure():
    nothing_is_lost("epub")


@test
def strings_keep_their_placeholders():
    """Of some 1,900 texts at most 40 stay because the translation would not have them all."""
    stayed = {}
    for kind in ("xliff", "json", "table", "android", "qt", "properties", "yaml"):
        stayed[kind] = nothing_is_lost(kind, overwrite=True if kind in ("xliff", "qt") else None)
        print(f"    {kind}: {stayed[kind]} texts stayed", flush=True)
    assert sum(stayed.values()) <= 40, stayed


if __name__ == "__main__":
    sys.exit(test.run())
