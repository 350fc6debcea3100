#!/usr/bin/env python3
"""Real documents (real_files.tsv) translated by the shipped model: nothing is lost.

Usage: tests/python tests/package/long_documents.py

The check shares no code with the cutting: mistune renders the Markdown; of the rendered page, as of an HTML document,
tags, attributes that are no text, addresses and code are counted before and after. A paragraph, heading, cell or item
that had words has words. Prints a line per file; exit status: the number of files that lost something.
"""

import html.parser
import os
import pathlib
import re
import sys
from collections import Counter

import mistune
from moe_translate import Translator
from moe_translate.documents import translate_document
from real_files import files

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXTS = {"alt", "title", "placeholder", "aria-label", "content", "value", "id"}  # an id is made of a heading's words
BLOCKS = {"p", "li", "td", "th", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "title", "a"}
KEPT = {"code", "pre", "script", "style", "kbd"}
PLUGINS = ["table", "strikethrough", "footnotes", "task_lists", "def_list"]
render = mistune.create_markdown(escape=False, plugins=PLUGINS)


class Census(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.found, self.open, self.spoken = Counter(), [], Counter()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found[tag, tuple((k, None if k in TEXTS else v) for k, v in attrs)] += 1
        if tag in BLOCKS | KEPT:
            self.open.append([tag, ""])

    def handle_endtag(self, tag):
        self.found["/" + tag] += 1
        if tag in [name for name, _ in self.open]:
            while self.open:
                name, text = self.open.pop()
                if name in KEPT:
                    self.found[name, " ".join(text.split())] += 1
                elif re.search(r"\w", text):
                    self.spoken[name] += 1
                if name == tag:
                    break

    def handle_data(self, data):
        for block in self.open:
            block[1] += data

    def handle_comment(self, data):
        self.found["!", data] += 1


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
                same = got == text and "nothing is translated"
                failed += bool(lost or new or short or same)
                print("FAIL" if lost or new or short or same else "ok", kind, name, flush=True)
                if lost or new or short or same:
                    print("   ", short or "", same or "", "lost", dict(lost), "new", dict(new))
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
