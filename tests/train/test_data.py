#!/usr/bin/env python3
"""Test how tools/train/data.py treats everyday sentences.

Usage: tests/python tests/train/test_data.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`. Requires NumPy and SentencePiece,
which tools/install-deps --test installs into .venv.
"""
import random
import sys

import data
from suite import Suite

test = Suite()


@test
def everyday_sentences_are_typed_in_three_ways_alike_in_all_languages():
    cells, seen = ["How are you, Tom?", "Comment vas-tu, Tom ?", "¿Cómo estás, Tom?"], set()
    for seed in range(30):
        seen.add(tuple(data.as_typed(random.Random(seed), cells)))
    assert seen == {("how are you, tom?", "comment vas-tu, tom ?", "¿cómo estás, tom?"),
                    ("How are you, Tom", "Comment vas-tu, Tom", "Cómo estás, Tom"),
                    ("how are you, tom", "comment vas-tu, tom", "cómo estás, tom")}, seen


@test
def the_typed_table_has_a_row_for_every_row():
    tables = {
    "everyday.en-de": {
        "en": [
            "Stop!", "I ran."], "de": [
                "Halt!", "Ich rannte."]}, "books": {
                    "en": ["No."], "de": ["Nein."]}, "phrases": {
                        "en": ["Hi!"], "de": ["Hallo!"], "fr": ["Salut !"], "es": ["¡Hola!"]}}
    typed = data.typed_table(tables, 1)
    assert [x.lower().rstrip(".! ") for x in typed["de"]] == ["halt", "ich rannte", "hallo"]
    assert typed["fr"][:2] == ["", ""] and typed["fr"][2].lower().rstrip("! ") == "salut"
    assert {len(cells) for cells in typed.values()} == {3}


@test
def all_generated_tables_have_a_share():
    assert {
    "noise",
    "same",
    "typed",
    "aligned",
    "names",
    "dictionaries",
    "bridged",
    "nouns",
    "verbs",
    "pivot",
    *data.MADE} <= set(
        data.SHARES)
    assert all(len(x) == 2 and min(x) >= 0 < sum(x) for x in data.SHARES.values())


if __name__ == "__main__":
    sys.exit(test.run())
