#!/usr/bin/env python3
"""Test tools/train/everyday.py: it writes inflected forms, numbers and times in each language; equal seeds give equal
tables, which exclude test phrases.

Usage: tests/python tests/train/test_everyday.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""
import pathlib
import random
import re
import sys
import tempfile

import everyday
from suite import Suite

test = Suite()
LANGUAGES = everyday.LANGUAGES
TABLE = everyday.everyday_table(seed=1)
ROWS = list(zip(*(TABLE[language] for language in LANGUAGES)))

WORDS = """=\tplace
\tstation\tBahnhof m\tgare f\testación f
=\tother
\thotel\tHotel n\thôtel m\thotel m
=\tfluid
\twater\tWasser n\teau f\tagua f'
=\tWORD job
\tengineer\tIngenieur\tingénieur\tingeniero
=\tSAY
"""


def made(*patterns, seed=1):
    """Return the sentences that patterns produce from WORDS. A pattern has one cell per language."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "words.tsv"
        path.write_text(WORDS + "".join("\t" + "\t".join(row) + "\n" for row in patterns), encoding="utf-8")
        slots, read = everyday.read(path)
    return [tuple(everyday.fill(random.Random(seed), slots, pattern).values()) for pattern in read]


@test
def articles_follow_gender_and_case():
    assert made(("the {place}", "{der place}, {den place}, zu {dem place}, {im place}, {meinem place}, {keinen place}",
                 "{le place}, {un place}, {mon place}, {du place}, à {le place}, {le plus proche place}",
                 "{el place}, {un place}, a {el place}, {cercano place}, {el próximo place}")) == [(
        "The station", "Der Bahnhof, den Bahnhof, zum Bahnhof, im Bahnhof, meinem Bahnhof, keinen Bahnhof",
        "La gare, une gare, ma gare, de la gare, à la gare, la plus proche",
        "La estación, una estación, a la estación, cercana, la próxima estación")]
    assert made(("{a other}", "{der next other}, in {dem other}, {mein other}",
                 "à {le other}, de {le other}, {mon other}", "de {el other}, a {el other}, {cerrado other}")) == [
        ("A hotel", "Das nächste Hotel, im Hotel, mein Hotel", "À l'hôtel, de l'hôtel, mon hôtel",
         "Del hotel, al hotel, cerrado")]


@test
def vowels_take_their_own_articles():
    assert made(("{the fluid}", "{kein fluid}", "{de fluid}, {du fluid}, {mon fluid}",
                 "{el fluid}, {un fluid}, {frío fluid}"),
                ("{a job}", "{job}", "{job}", "{job}")) == [
        ("The water", "Kein Wasser", "D'eau, de l'eau, mon eau", "El agua, un agua, fría"),
        ("An engineer", "Ingenieur", "Ingénieur", "Ingeniero")]


@test
def numbers_are_spelled():
    wanted = {"en": {0: "zero", 13: "thirteen", 20: "twenty", 42: "forty-two", 99: "ninety-nine"},
              "de": {0: "null", 16: "sechzehn", 21: "einundzwanzig", 30: "dreißig", 76: "sechsundsiebzig"},
              "fr": {21: "vingt et un", 45: "quarante-cinq", 71: "soixante et onze", 77: "soixante-dix-sept",
                     80: "quatre-vingts", 81: "quatre-vingt-un", 91: "quatre-vingt-onze", 99: "quatre-vingt-dix-neuf"},
              "es": {16: "dieciséis", 22: "veintidós", 31: "treinta y uno", 85: "ochenta y cinco"}}
    for language, words in wanted.items():
        assert {n: everyday.spelled(language, n) for n in words} == words, language


@test
def times_follow_each_languages_conventions():
    seen = {tuple(everyday.a_time(random.Random(seed))[language] for language in LANGUAGES) for seed in range(3000)}
    assert ("half past seven", "halb acht", "sept heures et demie", "las siete y media") in seen
    assert ("a quarter to one", "Viertel vor eins", "une heure moins le quart", "la una menos cuarto") in seen
    assert ("one o'clock", "ein Uhr", "une heure", "la una") in seen
    assert ("ten past twelve", "zehn nach zwölf", "midi dix", "las doce y diez") in seen
    assert len(seen) == 12 * 10


@test
def spanish_uses_the_singular_for_one_oclock():
    assert {row[3] for row in ROWS if row[0] == "It's one o'clock."} == {"Es la una."}
    assert not [row for row in ROWS if "Son la una" in row[3]]


@test
def rows_are_whole():
    assert len(ROWS) > 5000 and len({len(column) for column in TABLE.values()}) == 1
    for row in ROWS:
        for text in row:
            assert text and not re.search(r"[{}\t|]|  | (?:None)\b", text), text
            first = re.search(r"\w", text)[0]
            assert first == first.upper(), text
    assert not [row for row in ROWS if re.search(r"\b(?:à le|de le|à les|de les)\b", row[2])], "French contracts"
    assert not [row for row in ROWS if re.search(r"\b(?:a|de) el\b", row[3])], "Spanish contracts"
    assert not [row for row in ROWS if re.search(r"\b[Zz]u de[mr]\b", row[1])], "German contracts"


@test
def numbers_agree_in_a_row():
    for row in ROWS:
        assert len({tuple(re.findall(r"\d+", text)) for text in row}) == 1, row


@test
def the_same_seed_gives_the_same_table():
    assert everyday.everyday_table(seed=1) == TABLE
    assert everyday.everyday_table(seed=2) != TABLE


@test
def the_phrasebook_is_excluded():
    tested = everyday.phrasebook()
    assert len(tested) == 600
    apart = everyday.everyday_table(seed=1, excluded=tested)
    bare = {everyday.plain(text) for text in tested}
    assert not [text for column in apart.values() for text in column if everyday.plain(text) in bare]
    dropped = len(TABLE["en"]) - len(apart["en"])
    assert 0 < dropped < len(TABLE["en"]) // 10, dropped


if __name__ == "__main__":
    sys.exit(test.run())
