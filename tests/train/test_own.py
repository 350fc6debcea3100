#!/usr/bin/env python3
"""Test tools/train/own.py: it reads a user's corpus regardless of file names, and reports the files that it ignores.

Usage: tests/python tests/train/test_own.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`. Requires NumPy and SentencePiece,
which tools/install-deps --test installs into .venv.
"""
import os
import sys
import tempfile

import data
import own
from suite import Suite

test = Suite()
PO = 'msgid ""\nmsgstr "Language: it\\nContent-Type: text/plain; charset=UTF-8\\n"\n\n' \
     'msgid "House"\nmsgstr "Casa"\n\nmsgid "Open"\nmsgstr ""\n\n#, fuzzy\nmsgid "Key"\nmsgstr "Porta"\n'
TMX = '<tmx><body><tu><tuv xml:lang="en-US"><seg>The <b>red</b> house</seg></tuv><tuv xml:lang="nl">' \
      '<seg>Het rode huis</seg></tuv></tu></body></tmx>'


def folder_of(files):
    folder = tempfile.TemporaryDirectory()
    for name, text in files.items():
        with open(os.path.join(folder.name, name), "w", encoding="utf-8") as file:
            file.write(text)
    return folder


@test
def all_file_types_are_supported():
    files = {"some.tsv": "en\tnl\nhouse\thuis\nkey\t\n", "mine.en-it.tsv": "house\tcasa\n", "app.po": PO, "a.tmx": TMX,
             "book.en": "one\ntwo\n", "book.pt": "um\ndois\n"}
    with folder_of(files) as folder:
        rows, ignored = own.read_corpus(folder)
    assert not ignored, ignored
    assert rows == {"some.tsv": [{"en": "house", "nl": "huis"}], "mine.en-it.tsv": [{"en": "house", "it": "casa"}],
                    "app.po": [{"en": "House", "it": "Casa"}],
                    "a.tmx": [{"en": "The red house", "nl": "Het rode huis"}],
                    "book": [{"en": "one", "pt": "um"}, {"en": "two", "pt": "dois"}]}, rows


@test
def ignored_files_are_reported_with_the_reason():
    files = {"notes.txt": "x\n", "pairs.tsv": "House and home\tCasa\n", "a.en": "1\n2\n", "a.de": "1\n", "b.fr": "1\n",
             "broken.tmx": "<tmx>", "good.tsv": "en\tnl\n" + "".join(f"word {i}\twoord {i}\n" for i in range(40))}
    part = []
    with folder_of(files) as folder:
        corpus = own.Corpus(folder, log=part.append)
    for name, why in (("notes.txt", "not .tsv"), ("pairs.tsv", "no languages"), ("a.en", "numbers of lines differ"),
                      ("b.fr", "no matching file"), ("broken.tmx", "not XML")):
        assert any(x.startswith(f"ignoring {name}: ") and why in x for x in part), (name, part)
    held = {x["en"] for x in corpus.dev}
    assert len(held) == 4 and len(corpus.rows["good.tsv"]) == 36
    assert not held & {row["en"] for row in corpus.rows["good.tsv"]}


@test
def languages_can_be_given_and_small_corpora_are_rejected():
    with folder_of({"pairs.tsv": "house\thuis\n"}) as folder:
        assert own.read_corpus(folder, ["en", "nl"])[0] == {"pairs.tsv": [{"en": "house", "nl": "huis"}]}
        for path, part in ((folder, "at least 20 are required"), (folder + "/none", "no such file")):
            try:
                own.Corpus(path, ["en", "nl"], log=lambda text: None)
                raise AssertionError(path)
            except SystemExit as stop:
                assert part in str(stop) and "\n" not in str(stop), stop


@test
def the_vocabulary_is_as_large_as_the_text_supports():
    before = data.LANGUAGES, dict(data.TAG)
    rows = "en\tit\n" + "".join(f"the house number {i}\tla casa numero {i}\n" for i in range(60))
    try:
        with folder_of({"small.tsv": rows}) as folder:
            corpus = own.Corpus(folder, log=lambda text: None)
            corpus.use()
            assert data.LANGUAGES == ("en", "it") and data.TAG == {"en": 4, "it": 5}
            own.prepare(corpus, os.path.join(folder, "cache"), 8000, None)
            mixture = data.Mixture(os.path.join(folder, "cache"))
            source, target = mixture.next(200, 60)[0]
            assert source[0] in (4, 5) and source[-1] == target[-1] == data.EOS
            try:
                corpus.use({"de": 4, "fr": 5})
                raise AssertionError("accepted a model without these languages")
            except SystemExit as stop:
                assert "the corpus has en, but the model only has de, fr" in str(stop), stop
    finally:
        data.LANGUAGES = before[0]
        data.TAG.clear()
        data.TAG.update(before[1])


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
