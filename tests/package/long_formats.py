#!/usr/bin/env python3
"""Test that the files of real_files.tsv keep their structure when the shipped model translates them, in all formats
except HTML and Markdown, which long_documents.py tests.

Usage: tests/python tests/package/long_formats.py

The checks share no code with the package: msgfmt -c reads PO files, and survey.py counts the elements of other files.
Files with English text must change.
"""

import os
import pathlib
import re
import subprocess
import sys

from moe_translate import Translator
from moe_translate.documents import translate_document
from moe_translate.program import Watched
from real_files import files
from suite import Suite
from survey import survey

test = Suite()
ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = os.environ.get("MOE_MODEL", str(ROOT / "models/en-de-fr-es.bin"))


def translated(kind, least=5, **options):
    """Translate each file of a kind; yield (name, source, translation, reports)."""
    found, options = 0, {"source": "en", "target": "de"} | options
    with Translator(MODEL, target="de", beam=1) as translator:
        for name, data in files(kind):
            reports = []
            watched = Watched(translator)
            after = translate_document(
                data, kind, watched, lambda *what: reports.append(what), **options
            )
            found += 1
            yield name, data, after, reports
    assert found >= least, f"{found} files of {kind}"


@test
def msgfmt_accepts_the_files():
    for name, before, after, reports in translated("po"):
        done = subprocess.run(["msgfmt", "-c", "--use-fuzzy", "-o", "/dev/null", "-"], input=after, capture_output=True)
        assert done.returncode == 0, (name, done.stderr.decode())
        ids = re.compile(rb"^(?:msgid|msgid_plural|msgctxt|#[^,]?.*) .*$", re.M)
        comments = [line for line in ids.findall(before) if not line.startswith(b"#, ")]
        assert comments == [line for line in ids.findall(after) if not line.startswith(b"#, ")], name
        assert len(reports) < 0.2 * before.count(b"\nmsgid "), (name, reports)


def assert_complete(kind, least=5, **options):
    kept = 0
    for name, before, after, reports in translated(kind, least, **options):
        old, new = survey(kind, before), survey(kind, after)
        assert old == new, (name, "lost", list(old - new)[:5], "new", list(new - old)[:5])
        nothing = any("no text to translate" in why for _, why in reports)
        english = before[:2] == b"PK" or re.search(rb"\b[a-z]{2,} [a-z]{2,} [a-z]{2,}", before)
        assert nothing or not english or after != before, (name, "is not translated", reports)
        kept += len(reports) - nothing
    return kept


@test
def subtitles_keep_everything_except_words():
    assert_complete("subtitles", 41)


@test
def letters_keep_their_structure():
    assert_complete("docx", target=None)  # the language of the document does not change


@test
def text_documents_keep_their_structure():
    assert_complete("odt", target=None)


@test
def books_keep_their_structure():
    assert_complete("epub", target=None)


@test
def strings_keep_their_placeholders():
    """At most 40 of about 1,900 texts may be left untranslated because the model lost their placeholders."""
    kept = {}
    for kind in ("xliff", "json", "table", "android", "qt", "properties", "yaml"):
        kept[kind] = assert_complete(kind, overwrite=True if kind in ("xliff", "qt") else None)
        print(f"    {kind}: {kept[kind]} untranslated texts", flush=True)
    assert sum(kept.values()) <= 40, kept


if __name__ == "__main__":
    sys.exit(test.run())
