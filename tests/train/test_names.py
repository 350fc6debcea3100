#!/usr/bin/env python3
"""Test tools/train/names.py: it replaces names and numbers that all cells of a row share, and nothing else; equal seeds
give equal tables.

Usage: tests/python tests/train/test_names.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""
import os
import random
import re
import sys

import names
from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

test = Suite()
KNOWN = sorted({"".join(random.Random(at).choices("ban rel mon tav kri sel dor ami".split(), k=3)).capitalize()
                for at in range(60)})


def made_up(rows, seed):
    """Return parallel rows that contain names, a number or year, an abbreviation, and a word that both languages
    capitalise although it is not a name."""
    r = random.Random(seed)
    columns = {"en": [], "de": []}
    for _ in range(rows):
        a, b, year, number = r.choice(KNOWN), r.choice(KNOWN), r.randint(1900, 1999), r.randint(2, 99)
        columns["en"].append(f"In {year} {a} met {b} and {number} others, 3.5 times, at the NATO Convention; the "
                             f"convention was long.")
        columns["de"].append(f"{a} traf {b} und {number} andere {year} auf der NATO-Tagung Convention 3.5 Mal; die "
                             f"convention war lang.")
    return columns


@test
def names_and_numbers_change_alike_in_all_cells():
    columns = made_up(3000, 1)
    table = names.name_table({"books": columns, "interface": {"en": ["Boston"], "fr": ["Boston"]}}, 2000, 7)
    assert sorted(table) == ["de", "en", "fr"] and {len(cells) for cells in table.values()} == {2000}
    assert not any(table["fr"])  # names are not collected from "interface"
    english = re.compile(r"In (\d+) ([\w ]+) met ([\w ]+) and (\d+) others, 3\.5 times, at the ([A-Z]{2,5}) "
                         r"Convention; "
                         r"the convention was long\.")
    german = re.compile(r"([\w ]+) traf ([\w ]+) und (\d+) andere (\d+) auf der ([A-Z]{2,5})-Tagung Convention 3\.5 "
                        r"Mal; "
                        r"die convention war lang\.")
    seen, two = set(), 0
    for a, b in zip(table["en"], table["de"]):
        left, right = english.fullmatch(a), german.fullmatch(b)
        assert left and right, (a, b)
        year, one, other, number, letters = left.groups()
        assert (one, other, number, year, letters) == right.groups(), (a, b)
        assert 1800 <= int(year) <= 2030 and 2 <= int(number) <= 100, a
        assert all(3 <= len(word) <= 15 for word in f"{one} {other}".split()), a
        two += " " in one
        seen |= set(f"{one} {other}".split())
    assert abs(two / 2000 - names.TWO) < 0.05, two
    assert len(seen & set(KNOWN)) == len(KNOWN) and len(seen - set(KNOWN)) > 30, len(seen)
    assert names.name_table({"books": columns}, 2000, 7)["en"] == table["en"]
    assert names.name_table({"books": columns}, 2000, 8)["en"] != table["en"]


@test
def other_words_are_kept():
    small = names.Counter()
    usable = dict(en="Anna has 1 dog and 2,500 cats at www.Anna.org.",
                  de="Anna hat 1 Hund und 2.500 Katzen auf www.Anna.org.")
    assert list(names.named_rows({k: [v] for k, v in usable.items()}, small)) == [(usable, ["Anna"])]
    for en, de in (("Tom's dog", "Toms Hund"), ("Munich", "München"), ("Anna", ""), ("1 dog", "1 Hund"),
                   ("x" * 251 + " Tom", "Tom")):
        assert not list(names.named_rows({"en": [en], "de": [de]}, small)), (en, de)
    small["union"] = names.COMMON
    assert not list(names.named_rows({"en": ["the Union"], "fr": ["l' Union"]}, small))


@test
def the_table_is_empty_without_names():
    assert names.name_table({}, 100, 1) == {}
    assert names.name_table({"books": {"en": ["one"], "de": ["eins"]}}, 100, 1) == {"en": [], "de": []}
    assert names.Names(["Ab"]).draw(random.Random(1)) == "Ab"  # with a single name, draw() must return it again


if __name__ == "__main__":
    sys.exit(test.run())
