#!/usr/bin/env python3
"""tools/dictionaries.py: what it reads in the formats of Ding and dictd, what it puts around German nouns, which rows it leaves
out, and sentences whose nouns change alike in both languages.

Usage: tests/test_dictionaries.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""
import gzip
import os
import random
import sys
import tempfile

from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import dictionaries  # noqa: E402

test = Suite()
DING = """# Version :: devel
Bahnhof {m}; Station {f} (Eisenbahn) [transp.] | Bahnhöfe {pl} :: station; stop [Am.]; halt /hlt/; depot | stations
Licht {n} <Lichter> :: light
Auge {n} | Augen {pl} | ein blaues Auge (haben) :: eye | eyes | (to have a) black eye
etw. finden {vt} | findend | gefunden :: to find sth. | finding | found
jdm. helfen; beistehen {vi} :: to help sb.
Maus {f}; Nager {m} [zool.] :: mouse
eins | zwei :: one
Student {m} :: student
Band {n} | Bänder {pl} :: ribbon | ribbons
Band {m} :: volume
a\u200bb :: not plain
was ... auch :: whatever
"""
FRENCH = {"00-database-short": "German-French", "Licht": "Licht /lɪçt/ <n, neut>\n1. lumière, éclairage\n   Wellen\n2. feu",
          "Paris": "Paris /paˈʁiːs/ <pn>\nParis", "Auge": "Auge <n, neut>\nœil", "leer": "leer"}
SPANISH = {"Licht": "Licht\nluz", "finden": "finden\nencontrar 2"}


def installed(root, name=None, dictionary=()):
    """Writes Ding's file, or a dictionary in dictd's format."""
    if not name:
        os.makedirs(os.path.join(root, "usr/share/trans"))
        with open(os.path.join(root, dictionaries.DING), "w", encoding="utf-8") as file:
            file.write(DING)
        return
    digits, text, lines = list(dictionaries.DIGITS), b"", ""

    def base64(number):
        return (base64(number // 64) if number > 63 else "") + digits[number % 64]
    for word, article in dictionary.items():
        bytes_ = article.encode() + b"\n"
        lines += f"{word}\t{base64(len(text))}\t{base64(len(bytes_))}\n"
        text += bytes_
    path = os.path.join(root, "usr/share/dictd", f"freedict-{name}.")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with gzip.open(path + "dict.dz", "wb") as file:
        file.write(text)
    with open(path + "index", "w", encoding="utf-8") as file:
        file.write(lines)


def corpus():
    """Enough of all the words."""
    english = "station stop halt light eye eyes black found to find something help somebody student ribbon volume stations ribbons"
    return {"tatoeba.en-de": {"en": ["The light of my eye is a light thing.", "An eye sees."] + [english] * 12,
                              "de": ["Das Licht in meinem Auge ist ein leichtes Ding.", "Ein Auge sieht."] + ["Bahnhof Auge"] * 12},
            "apps": {"fr": ["lumière éclairage œil"] * 12, "es": ["luz"] * 12}}


@test
def entries_are_read_as_ding_writes_them():
    with tempfile.TemporaryDirectory() as root:
        installed(root)
        entries = list(dictionaries.ding_entries(os.path.join(root, dictionaries.DING)))
    assert entries == [
        ("Bahnhof", "station", "m", True), ("Station", "station", "f", True), ("Bahnhof", "stop", "m", True), ("Bahnhof", "halt", "m", True),
        ("Bahnhöfe", "stations", "pl", True), ("Licht", "light", "n", False), ("Auge", "eye", "n", True), ("Augen", "eyes", "pl", True),
        ("ein blaues Auge", "black eye", None, True), ("etwas finden", "to find something", None, False),
        ("gefunden", "found", None, False), ("jemandem helfen", "to help somebody", None, False),
        ("beistehen", "to help somebody", None, False), ("Student", "student", "m", False), ("Band", "ribbon", "n", True),
        ("Bänder", "ribbons", "pl", True), ("Band", "volume", "m", False)], entries


@test
def articles_are_read_as_dictd_does():
    with tempfile.TemporaryDirectory() as root:
        long = {f"Wort{i}": f"Wort{i}\nmot{'x' * i}" for i in range(200)}  # offsets of three digits
        installed(root, "deu-fra", {**FRENCH, **long})
        rows = list(dictionaries.dictd_rows(os.path.join(root, "usr/share/dictd/freedict-deu-fra.index")))
    assert rows[:3] == [{"de": "Licht", "fr": "lumière"}, {"de": "Licht", "fr": "éclairage"}, {"de": "Auge", "fr": "œil"}], rows[:3]
    assert rows[3:] == [dict(zip(("de", "fr"), article.split("\n"))) for article in long.values()]


@test
def what_means_one_thing_in_each_language_is_joined():
    rows = [{"de": "Licht", "en": "light"}, {"de": "Licht", "fr": "lumière"}, {"de": "Licht", "es": "luz"}, {"de": "Licht", "es": "luz"},
            {"de": "Auge", "en": "eye"}, {"de": "Auge", "fr": "œil"}, {"de": "Auge", "fr": "vue"}, {"fr": "main", "es": "mano"}]
    assert list(dictionaries.joined(rows)) == [{"de": "Licht", "en": "light", "fr": "lumière", "es": "luz"}]


@test
def articles_agree_with_the_noun():
    r, seen = random.Random(1), set()
    for german, english, gender, countable in (("Auge", "eye", "n", True), ("Licht", "light", "n", False), ("Bahnhof", "station", "m", True),
                                               ("Augen", "eyes", "pl", True)):
        for _ in range(300):
            a, b = dictionaries.in_use(r, german, english, gender, countable)
            assert a.endswith(german) and b.endswith(english) and (a == german) == (b == english)
            seen.add((a, b))
    assert {("ein Auge", "an eye"), ("Auge", "eye"), ("der Bahnhof", "the station"), ("ein Bahnhof", "a station"), ("viele Augen", "many eyes"),
            ("für ein Auge", "for an eye"), ("im Licht", "in the light")} <= seen
    assert not {("ein Licht", "a light"), ("die Auge", "the eye"), ("im Bahnhof", "in the station")} & seen
    assert dictionaries.in_use(r, "Mond", "the moon", "m", False) == ("Mond", "the moon")


@test
def rows_are_distinct_and_of_common_words_and_not_for_testing():
    with tempfile.TemporaryDirectory() as root:
        installed(root)
        installed(root, "deu-fra", FRENCH)
        installed(root, "deu-spa", SPANISH)
        installed(root, "deu-ita", {"Licht": "Licht\nluce"})  # no language of the corpus
        said = []
        made = dictionaries.dictionary_tables(corpus(), {"to find something", "luz"}, 50, 3, root, said.append)
        again = dictionaries.dictionary_tables(corpus(), {"to find something", "luz"}, 50, 3, root, said.append)
        other = dictionaries.dictionary_tables(corpus(), {"to find something", "luz"}, 50, 4, root, said.append)
    assert made == again and made["nouns"] != other["nouns"] and list(made) == ["dictionaries", "nouns"]
    assert said[:2] == ["dictionaries: 17 entries of trans-de-en, 5 of 2 other dictionaries",
                        f"dictionaries: {len(made['dictionaries']['en'])} rows of dictionaries, 50 rows of nouns"], said
    table = made["dictionaries"]
    rows = [{language: cells[at] for language, cells in table.items() if cells[at]} for at in range(len(table["en"]))]
    assert sorted(table) == ["de", "en", "es", "fr"] and len({len(x) for x in table.values()}) == 1
    assert all(len(row) > 1 for row in rows) and len({tuple(row.items()) for row in rows}) == len(rows)
    assert {"de": "Auge", "fr": "œil"} in rows and {"de": "Auge", "en": "eye", "fr": "œil"} in rows and {"de": "gefunden", "en": "found"} in rows
    words = {cell for row in rows for cell in row.values()}
    assert not words & {"luz", "to find something", "encontrar"}, words  # for testing; `encontrar` and `finden` are not common


@test
def nouns_change_alike_in_both_languages():
    with tempfile.TemporaryDirectory() as root:
        installed(root)
        entries = list(dictionaries.ding_entries(os.path.join(root, dictionaries.DING)))
    nouns = dictionaries.Nouns(entries, dictionaries.occurrences(corpus()))
    assert "Student" not in nouns.meanings and "Band" not in nouns.meanings  # weak; of two genders
    assert nouns.meanings["Bahnhof"] == ("m", ["station", "stop", "halt"]) and nouns.meanings["Augen"] == ("pln", ["eyes"])
    assert nouns.attested == {"n": [("Auge", "eye"), ("Licht", "light")], "m": [("Bahnhof", "station")]}, nouns.attested
    german, english = "Das Licht sieht ein Auge.", "A light sees an eye, not the eye-light."
    places = nouns.places(german, english)
    assert places == [("n", "Licht", "light"), ("n", "Auge", "eye")], places
    assert nouns.places("Ein Licht und noch ein Licht", "a light") == [] == nouns.places("Ein Licht", "light, light")
    assert nouns.places("Der Bahnhof", "the stop or station") == []  # which?
    r = random.Random(2)
    seen = {nouns.replaced(r, german, english, [place]) for place in places for _ in range(50)}
    assert seen == {(german, english), ("Das Auge sieht ein Auge.", "An eye sees an eye, not the eye-light."),
                    ("Das Licht sieht ein Licht.", "A light sees a light, not the eye-light.")}, seen


@test
def without_dictionaries_there_is_nothing():
    said = []
    with tempfile.TemporaryDirectory() as root:
        assert dictionaries.dictionary_tables(corpus(), set(), 10, 1, root, said.append) == {}
    assert said == ["dictionaries: 0 entries of trans-de-en, 0 of 0 other dictionaries; tools/install-deps --train installs what is missing"], said


if __name__ == "__main__":
    sys.exit(test.run())
