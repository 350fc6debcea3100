#!/usr/bin/env python3
"""Test tools/train/phrases.py: it recovers the dictionary of a generated language with reordered words, links no word
of a phrase to a word outside, and gives equal tables for equal seeds.

Usage: tests/python tests/train/test_phrases.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`. Without NumPy, which is optional, most
tests are skipped.
"""
import ast
import os
import random
import sys

from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
try:
    import numpy as np

    import phrases
except ImportError:
    np = None
test = Suite()
numpy_test = test.needs(np, "NumPy")


def made_up(sentences, words, seed):
    """Return parallel sentences in which word w12 becomes v12, neighbours swap, and some words have no translation."""
    r = random.Random(seed)
    lefts, rights = [], []
    for _ in range(sentences):
        numbers = [min(int(r.paretovariate(0.7)), words) for _ in range(r.randint(3, 14))]
        there = [n for n in numbers if r.random() > 0.05] or numbers
        for at in range(0, len(there) - 1, 2):
            if r.random() < 0.5:
                there[at], there[at + 1] = there[at + 1], there[at]
        lefts.append(" ".join(f"w{n}" for n in numbers).capitalize() + ".")
        rights.append("¿" + ", ".join(f"v{n}" for n in there) + "?")
    return lefts, rights


def numbers(text):
    return sorted(int(word[1:]) for word in phrases.WORD.findall(text))


def constant(file, name):
    """Return the value of a constant in a module of tools/train without importing it."""
    with open(os.path.join(ROOT, "tools", "train", file), encoding="utf-8") as text:
        tree = ast.parse(text.read())
    return next(ast.literal_eval(node.value) for node in tree.body
                if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name)


@test
def sources_are_files_of_the_mix():
    shares = constant("data.py", "SHARES")
    assert all(shares[x][0] > 0 for x in ("phrases", "names", "noise", "dictionaries", "bridged", "nouns", "pivot"))
    for prefix in sum((constant(x, "SOURCES") for x in ("phrases.py", "names.py", "dictionaries.py", "pivot.py")), ()):
        assert any(name.startswith(prefix) for name in shares), prefix


@numpy_test
def the_alignment_finds_the_dictionary():
    lefts, rights = made_up(3000, 300, 1)
    right = wrong = pairs = 0
    for rows, a, b, both in phrases.agreement(phrases.Side(lefts), phrases.Side(rights)):
        for at, i, j in zip(*np.nonzero(both > phrases.LINK)):
            words = [phrases.WORD.findall(x[rows[at]].lower()) for x in (lefts, rights)]
            same = words[0][i][1:] == words[1][j][1:]
            right, wrong = right + same, wrong + (not same)
        pairs += a.size
    assert right > 0.75 * pairs and wrong < 0.02 * right, (right, wrong, pairs)


@numpy_test
def phrases_are_parallel_and_distinct():
    lefts, rights = made_up(3000, 300, 2)
    found = phrases.phrase_pairs(lefts, rights, 5)
    assert len(found) > 1000 and len(set(found)) == len(found)
    # Few pairs have a word without its translation: made_up() dropped the translation, or a link is wrong.
    same = sum(set(numbers(a)) >= set(numbers(b)) for a, b in found)
    assert same > 0.97 * len(found), (same, len(found))
    assert all(any(a in x and b in y for x, y in zip(lefts, rights)) for a, b in found[:100])
    assert all(len(numbers(a)) <= 7 and a[0] in "wW" and b[0] == "v" and b[-1].isdigit() for a, b in found)
    lengths = {len(numbers(a)) for a, _ in found}
    assert lengths >= {2, 3, 4, 5, 6, 7}, lengths
    assert phrases.phrase_pairs(lefts, rights, 5) == found


@numpy_test
def no_word_of_a_phrase_is_linked_to_one_outside():
    generator = np.random.default_rng(1)
    links = np.zeros((6, 6), bool)
    links[[0, 1, 2, 3, 4, 5], [1, 0, 2, 5, 4, 3]] = True
    for _ in range(200):
        for i, j in zip(*np.nonzero(links)):
            a, b, c, d = phrases.cut(links, i, j, generator)
            assert a <= i <= b and c <= j <= d
            assert links[a:b + 1].sum() == links[:, c:d + 1].sum() == links[a:b + 1, c:d + 1].sum()
    many = np.zeros((2, 2), bool)
    many[0] = True  # the first word has two translations, the second has none
    assert phrases.cut(many, 0, 0, generator) is None


@numpy_test
def all_pairs_with_the_pivot_make_one_table():
    lefts, rights = made_up(800, 60, 3)
    nothing = [""] * len(lefts)
    tables = {"books": {"en": lefts, "de": rights, "fr": nothing}, "interface": {"en": rights, "es": lefts}}
    log = []
    table = phrases.phrase_table(tables, "en", 1, log.append)
    assert sorted(table) == ["de", "en", "es", "fr"] and len({len(cells) for cells in table.values()}) == 1
    assert len(table["en"]) > 100 and all(table["en"]) and all(table["de"])
    assert not any(table["fr"]) and not any(table["es"])  # "fr" has no text; "interface" is not a source
    assert [line.split()[:2] for line in log] == [["phrases:", "aligning"], ["phrases:", str(len(table["en"]))]], log
    assert phrases.phrase_table({}, "en", 1, log.append) == {}


@numpy_test
def no_more_pairs_than_the_limit_are_aligned():
    lefts, rights = made_up(600, 60, 4)
    most, phrases.MAX_PAIRS = phrases.MAX_PAIRS, 200
    try:
        log = []
        table = phrases.phrase_table({"books": {"en": lefts, "de": rights}}, "en", 1, log.append)
    finally:
        phrases.MAX_PAIRS = most
    assert log[0] == "phrases: aligning 200 of 600 pairs of en and de" and table["en"], log


if __name__ == "__main__":
    sys.exit(test.run())
