#!/usr/bin/env python3
"""Test that real documents (real_files.tsv) keep their structure when the shipped model translates them.

Usage: tests/python tests/package/long_documents.py

The check shares no code with the package. mistune renders Markdown. The tags, untranslated attributes, addresses and
code of a page must be the same in its translation, and a paragraph, heading, cell or item with words must still have
words. Prints a line per file. The exit status is the number of files whose structure changed.
"""

import html
import os
import pathlib
import re
import sys

import mistune
from moe_translate import Translator
from moe_translate.documents import translate_document
from real_files import files
from survey import Census

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLUGINS = ["table", "strikethrough", "footnotes", "task_lists", "def_list"]
render = mistune.create_markdown(escape=False, plugins=PLUGINS)


def words(text):
    return len(re.findall(r"[^\W\d_]{2,}", re.sub(r"<[^>]*>", " ", text)))


def main():
    failed = 0
    with Translator(os.environ.get("MOE_MODEL", str(ROOT / "models/en-de-fr-es.bin")), target="de") as translator:
        for kind in ("markdown", "html"):
            for name, data in files(kind):
                text = data.decode("utf-8")
                got = translate_document(text, kind, translator.translate)
                before, after = (Census(render(x) if kind == "markdown" else x) for x in (text, got))
                lost = (before.found - after.found) + (before.spoken - after.spoken)
                new = (after.found - before.found) + (after.spoken - before.spoken)
                short = words(got) < 0.7 * words(text) and "too few words"
                plain = re.sub(r"\{[%{#].*?[%}#]\}", "", text, flags=re.S)  # drop template code
                same = got == text and words(html.unescape(plain)) and "nothing is translated"
                failed += bool(lost or new or short or same)
                print("FAIL" if lost or new or short or same else "ok", kind, name, flush=True)
                if lost or new or short or same:
                    print("   ", short or "", same or "", "lost", dict(lost), "new", dict(new))
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
