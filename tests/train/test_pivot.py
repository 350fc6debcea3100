#!/usr/bin/env python3
"""Test tools/train/pivot.py with a fake Apertium: which translations it keeps, and that machine-translated text becomes
a source but never a target.

Usage: tests/python tests/train/test_pivot.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""
import os
import sys
import tempfile

import pivot
from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
try:
    import numpy as np
    import data
except ImportError:
    np = data = None

test = Suite()
data_test = test.needs(data, "NumPy and SentencePiece")
WORDS = {"Le": "El", "chat": "gato", "de": "de", "dort": "duerme", "dans": "en", "la": "la", "grande": "gran",
         "maison": "casa",
         "Tom": "*Tom", "vert": "*vert", "vieux": " viejo ", "bas": "bajo"}
FRENCH = "Le chat de Tom dort dans la grande maison."


def apertium(folder, more=""):
    """Write a fake Apertium that translates word by word according to WORDS."""
    path, words = os.path.join(folder, "apertium"), os.path.join(folder, "words.py")
    with open(words, "w", encoding="utf-8") as file:
        file.write("import re, sys\nsys.stdin.reconfigure(encoding='utf-8'), sys.stdout.reconfigure(encoding='utf-8')\n"
                   f"print(re.sub(r'\\w+', lambda m: {WORDS!r}.get(m[0], m[0]), sys.stdin.read()), end='')\n")
    with open(path, "w", encoding="utf-8") as file:
        file.write("#!/bin/sh\nif [ \"$1\" = -l ]; then echo '  es-fr'; echo '  fr-es'; exit; fi\n[ \"$1\" = fr-es ] "
                   "|| exit 1\n"
                   f"'{sys.executable}' '{words}'{more}\n")
    os.chmod(path, 0o755)
    return path


def made(sentences, likely=1.0, more="", spanish=()):
    """Return the table that pivot.py makes from French sentences, as {English: (French, Spanish)}."""
    tables = {pivot.SOURCES[0]: {"en": [f"English {i}" if x else "" for i, x in enumerate(sentences)],
                                 "fr": list(sentences)},
              "books": {"es": list(spanish)}}
    before, pivot.LIKELY = pivot.LIKELY, likely
    try:
        with tempfile.TemporaryDirectory() as folder:
            table = pivot.pivot_table(tables, 1000, 1, apertium(folder, more), log=lambda _: None)
    finally:
        pivot.LIKELY = before
    return {en: rest for en, *rest in zip(*(table["pivot"][x] for x in ("en", "fr", "es")))} if table else {}


@test
def rows_are_tidied_and_belong_together():
    found = made([FRENCH, FRENCH.replace("chat", "vieux chat"), "le" + FRENCH[2:], "", "Le chat dort.",
                  "x" * 250 + " dort.", FRENCH[:-1]])
    assert found == {"English 0": [FRENCH, "El gato de Tom duerme en la gran casa."],
                     "English 1": [FRENCH.replace("chat", "vieux chat"),
                                   "El viejo gato de Tom duerme en la gran casa."],
                     "English 2": ["le" + FRENCH[2:], "le gato de Tom duerme en la gran casa."]}, found


@test
def translations_with_unknown_words_or_missing_halves_are_dropped():
    assert not made([FRENCH.replace("grande", "vert")])
    assert not made([FRENCH], more=" | sed 's/ .*//'")
    assert not made([FRENCH, FRENCH], more=" | head -n 1")  # with a line missing, outputs cannot be matched to inputs
    assert not made([FRENCH], more="; exit 1")


@test
def the_likelier_spanish_is_kept():
    other = FRENCH.replace("dort", "bas")
    for spanish, kept in ("El gato de Tom duerme.", "English 1"), ("Tom bajo en la casa.", "English 0"):
        assert list(made([other, FRENCH], 0.5, spanish=[spanish])) == [kept], spanish


@test
def the_table_requires_the_program_and_the_text():
    told = []
    tables = {pivot.SOURCES[0]: {"en": ["English"], "fr": [FRENCH]}}
    assert pivot.pivot_table(tables, 10, 1, "/nowhere/apertium", told.append) == {} and "install-deps" in told[0]
    with tempfile.TemporaryDirectory() as folder:
        assert pivot.pivot_table({}, 10, 1, apertium(folder), told.append) == {} and "install-deps" not in told[1]


@data_test
def machine_translated_text_is_used_as_source_only():
    arrays = {x: y for language in ("en", "fr", "es") for x, y in ((language, np.arange(6, dtype=np.uint16)),
                                                                    (language + "_offsets", np.array([0, 3, 6])))}
    for english in True, False:
        def targets(name):
            pairs = data.Source(name, arrays, english, 60, 2.5, 1).pairs
            return {(data.LANGUAGES[a], data.LANGUAGES[b]) for _, a, b in pairs}
        wanted = {(a, b) for a in ("en", "fr", "es") for b in ("en", "fr", "es") if a != b
                  and ("en" in (a, b)) == english}
        assert targets("books") == wanted
        assert targets("pivot") == {pair for pair in wanted if pair[0] == "es"}, targets("pivot")
        assert targets("back.fr") == {pair for pair in wanted if pair[0] == "fr"}, targets("back.fr")


if __name__ == "__main__":
    sys.exit(test.run())
