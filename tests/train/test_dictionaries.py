#!/usr/bin/env python3
"""Test tools/train/dictionaries.py: how it reads the formats of Ding and dictd, finds contexts of German nouns, skips
rows, and replaces words in both languages of a sentence.

Usage: tests/python tests/train/test_dictionaries.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""
import gzip
import os
import random
import sys
import tempfile

import dictionaries
from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

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
FORMS = """kaufen; erwerben {vt} | kaufend; erwerbend | gekauft; erworben | kauft ein; kauft | kaufte :: to buy | \
buying; getting | bought; got | buys | bought
leiten {vt} | leitend | leitet | leite | leitete :: to lead | leading | leads | lead | led
eilen {vi} | eilend | geeilt :: to hurry | hurrying | hurried
sehen {vt} | sieht :: to see | sees
wollen {vt} | wollend | gewollt :: to want | wanting | wanted
neu {adj} | neuer :: new | newer
heiter; froh {adj} (Laune) :: cheerful; full of joy
eindringlich {adv} {adj} :: forcefully
teuer {adj} :: dear
ganz {adj} :: whole
edel {adj} :: noble
Licht {n} :: light
"""
FRENCH = {"00-database-short": "German-French",
          "Licht": "Licht /lɪçt/ <n, neut>\n1. lumière, éclairage\n   Wellen\n2. feu",
          "Paris": "Paris /paˈʁiːs/ <pn>\nParis", "Auge": "Auge <n, neut>\nœil", "leer": "leer", "nichts": "",
          "Bahnhof": "Bahnhof\ngare <n, fem>"}
GENDERS = {"gare": "gare <n, fem>\nBahnhof <n, masc>", "lumière": "lumière, clarté /y/ <n, fem>\nLicht"}
SPANISH = {"Licht": "Licht\nluz", "finden": "finden\nencontrar 2"}


def installed(root, name=None, dictionary=()):
    """Write Ding's file or, if `name` is given, a dictionary in dictd's format."""
    if not name:
        os.makedirs(os.path.join(root, "usr/share/trans"))
        with open(os.path.join(root, dictionaries.DING), "w", encoding="utf-8") as file:
            file.write(DING)
        return
    digits, text, lines = list(dictionaries.DIGITS), b"", ""

    def base64(number):
        return (base64(number // 64) if number > 63 else "") + digits[number % 64]
    for word, article in dictionary.items():
        bytes_ = article.encode() + b"\n" * bool(article)
        lines += f"{word}\t{base64(len(text))}\t{base64(len(bytes_))}\n"
        text += bytes_
    path = os.path.join(root, "usr/share/dictd", f"freedict-{name}.")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with gzip.open(path + "dict.dz", "wb") as file:
        file.write(text)
    with open(path + "index", "w", encoding="utf-8") as file:
        file.write(lines)


def corpus():
    """Return a corpus in which all words occur often enough."""
    english = ("station stop halt light eye eyes black found to find something help somebody student ribbon volume "
               "stations ribbons")
    return {"tatoeba.en-de": {"en": ["The light of my eye is a light thing.", "An eye sees."] + [english] * 12,
                              "de": ["Das Licht in meinem Auge ist ein leichtes Ding.", "Ein Auge sieht."]
                              + ["Bahnhof Auge"] * 12},
            "tatoeba.en-fr": {"en": ["The station is here."], "fr": ["La gare est ici."]},
            "apps": {"fr": ["lumière éclairage œil gare"] * 12, "es": ["luz"] * 12}}


@test
def ding_entries_are_parsed():
    with tempfile.TemporaryDirectory() as root:
        installed(root)
        entries = list(dictionaries.ding_entries(os.path.join(root, dictionaries.DING)))
    assert entries == [
        ("Bahnhof", "station", "m", True), ("Station", "station", "f", True), ("Bahnhof", "stop", "m", True),
        ("Bahnhof", "halt", "m", True),
        ("Bahnhöfe", "stations", "pl", True), ("Licht", "light", "n", False), ("Auge", "eye", "n", True),
        ("Augen", "eyes", "pl", True),
        ("ein blaues Auge", "black eye", None, True), ("etwas finden", "to find something", None, False),
        ("gefunden", "found", None, False), ("jemandem helfen", "to help somebody", None, False),
        ("beistehen", "to help somebody", None, False), ("Student", "student", "m", False),
        ("Band", "ribbon", "n", True),
        ("Bänder", "ribbons", "pl", True), ("Band", "volume", "m", False)], entries


@test
def dictd_articles_are_parsed():
    with tempfile.TemporaryDirectory() as root:
        long = {f"Wort{i}": f"Wort{i}\nmot{'x' * i}" for i in range(200)}  # long enough for offsets of three digits
        installed(root, "deu-fra", {**FRENCH, **long})
        rows = list(dictionaries.dictd_rows(os.path.join(root, "usr/share/dictd/freedict-deu-fra.index")))
        installed(root, "fra-deu", GENDERS)
        french = list(dictionaries.dictd_rows(os.path.join(root, "usr/share/dictd/freedict-fra-deu.index")))
    assert rows[:4] == [({"de": "Licht", "fr": "lumière"}, None), ({"de": "Licht", "fr": "éclairage"}, None),
                        ({"de": "Auge", "fr": "œil"}, None),
                        ({"de": "Bahnhof", "fr": "gare"}, None)], rows[:4]
    assert rows[4:] == [(dict(zip(("de", "fr"), article.split("\n"))), None) for article in long.values()]
    assert french == [({"fr": "gare", "de": "Bahnhof"}, "f"), ({"fr": "lumière", "de": "Licht"}, "f")], french


@test
def words_with_common_translations_are_bridged():
    count = dictionaries.Counter({"light": 50, "lumière": 50})
    english = dictionaries.likely({"Licht": {"light", "luminary"}, "leicht": {"light", "easily"}, "Auge": {"eye"},
                                   "Band": {"ribbon", "volume"}}, count)
    french = dictionaries.likely({"Licht": {"lumière"}, "leicht": {"facile", "facilement"}, "Auge": {"œil"},
                                  "Band": {"ruban"}}, count)
    assert (english["Licht"]["light"] > 0.9 and abs(sum(english["Licht"].values()) - 1) < 1e-9
            and english["Auge"] == {"eye": 1})
    pairs = dictionaries.bridged(english, french, "ment")
    # "light" becomes "lumière" rather than "facile"; "ruban" pairs with "ribbon", not "volume"; the other pairs
    # are too improbable
    assert pairs == [("eye", "œil"), ("light", "lumière"), ("ribbon", "ruban")], pairs
    assert dictionaries.bridged({"x": {"easily": 1}}, {"x": {"facile": 1}}, "ment") == []  # adverb and adjective
    assert dictionaries.bridged({"x": {"easily": 1}}, {"x": {"facilement": 1}}, "ment") == [("easily", "facilement")]
    assert dictionaries.bridged({"x": {"a": 0.1, "b": 0.9}}, {"x": {"c": 0.1, "d": 0.9}}, "ment") == [("b", "d")]


@test
def french_and_spanish_nouns_have_regular_plurals():
    genders = {"gare": {"f"}, "roi": {"m"}, "livre": {"m", "f"}, "œil": {"m"}, "nez": {"m"}, "clair": {"m"},
               "Paris": {"m"},
               "luz": {"f"}, "color": {"m"}, "mesa": {"f"}}
    pairs = [("station", "gare"), ("king", "roi"), ("book", "livre"), ("eye", "œil"), ("noses", "nez"),
             ("light", "clair"), ("to clear", "roi"),
             ("church", "gare"), ("big station", "grande gare"), ("paris", "Paris"), ("Roy", "roi")]
    assert list(dictionaries.romance_nouns(pairs, genders, {"light"}, "fr")) == [
        ("gare", "station", "f"), ("gares", "stations", "fpl"), ("roi", "king", "m"), ("rois", "kings", "mpl"),
        ("œil", "eye", None),
        ("gare", "church", "f"), ("gares", "churches", "fpl")]
    pairs = [("light", "luz"), ("colour", "color"), ("table", "mesa")]
    assert list(dictionaries.romance_nouns(pairs, genders, set(), "es")) == [
        ("luz", "light", "f"), ("color", "colour", "m"), ("colores", "colours", "mpl"), ("mesa", "table", "f"),
        ("mesas", "tables", "fpl")]


@test
def articles_agree_with_the_noun():
    r, seen = random.Random(1), set()
    for german, english, gender, countable in (("Auge", "eye", "n", True), ("Licht", "light", "n", False),
                                               ("Bahnhof", "station", "m", True),
                                               ("Augen", "eyes", "pl", True)):
        for _ in range(300):
            a, b = dictionaries.in_use(r, german, english, gender, countable)
            assert a.endswith(german) and b.endswith(english) and (a == german) == (b == english)
            seen.add((a, b))
    assert {("ein Auge", "an eye"), ("Auge", "eye"), ("der Bahnhof", "the station"), ("ein Bahnhof", "a station"),
            ("viele Augen", "many eyes"),
            ("für ein Auge", "for an eye"), ("im Licht", "in the light")} <= seen
    assert not {("ein Licht", "a light"), ("die Auge", "the eye"), ("im Bahnhof", "in the station")} & seen
    assert dictionaries.in_use(r, "Mond", "the moon", "m", False) == ("Mond", "the moon")


@test
def rows_are_distinct_and_common_and_not_in_the_test_set():
    with tempfile.TemporaryDirectory() as root:
        installed(root)
        installed(root, "deu-fra", FRENCH)
        installed(root, "deu-spa", SPANISH)
        installed(root, "deu-ita", {"Licht": "Licht\nluce"})  # the corpus has no Italian
        installed(root, "fra-deu", GENDERS)
        log = []
        made, again, other = (dictionaries.dictionary_tables(corpus(), {"to find something", "luz"}, 50, seed, root,
                                                             log.append)
                              for seed in (3, 3, 4))
    assert made == again and made["nouns"] != other["nouns"] and list(made) == ["dictionaries", "bridged", "nouns"]
    rows = {name: [{language: cells[at] for language, cells in table.items() if cells[at]}
                   for at in range(len(table["en"]))]
            for name, table in made.items()}
    assert log[:2] == ["dictionaries: 17 entries of trans-de-en, 8 of 3 other dictionaries",
                       f"dictionaries: {len(rows['dictionaries'])} rows of dictionaries, 3 rows of bridged, 75 rows "
                       f"of nouns"], log
    for name, table in made.items():
        assert sorted(table) == ["de", "en", "es", "fr"] and len({len(x) for x in table.values()}) == 1
        assert all(len(row) == 2 for row in rows[name])
        assert name == "nouns" or len({tuple(row.items()) for row in rows[name]}) == len(rows[name])
    assert ({"de": "Auge", "fr": "œil"} in rows["dictionaries"]
            and {"de": "gefunden", "en": "found"} in rows["dictionaries"])
    assert rows["bridged"] == [{"en": "eye", "fr": "œil"}, {"en": "light", "fr": "lumière"},
                               {"en": "station", "fr": "gare"}], rows["bridged"]
    words = {cell for x in rows.values() for row in x for cell in row.values()}
    # "luz" and "to find something" are in test sentences, "encontrar" and "finden" are rare
    assert not words & {"luz", "to find something", "encontrar"}, words
    assert {row["fr"] for row in rows["nouns"] if "fr" in row} == {"La gare est ici.", "La lumière est ici."}


@test
def a_corpus_may_lack_languages():
    with tempfile.TemporaryDirectory() as root:
        installed(root)
        installed(root, "deu-fra", FRENCH)
        made = dictionaries.dictionary_tables({"tatoeba.en-fr": {"en": ["light station"] * 12,
                                                                 "fr": ["lumière gare"] * 12}}, set(), 10, 1, root, len)
    assert list(made) == ["dictionaries", "bridged"] and made["bridged"]["en"] == ["light", "station"], made["bridged"]


@test
def nouns_change_alike_in_both_languages():
    with tempfile.TemporaryDirectory() as root:
        installed(root)
        entries = list(dictionaries.ding_entries(os.path.join(root, dictionaries.DING)))
    count = dictionaries.occurrences(corpus())
    nouns = dictionaries.Words(dictionaries.german_nouns(entries), count["de"], count["en"], {"halt"})
    assert "Student" not in nouns.meanings and "Band" not in nouns.meanings  # a weak noun, and a noun with two genders
    assert (nouns.meanings["Bahnhof"] == ("m", ["station", "stop", "halt"])
            and nouns.meanings["Augen"] == ("pln", ["eyes"]))
    assert nouns.attested == {"n": [("Auge", "eye"), ("Licht", "light")], "m": [("Bahnhof", "station")]}, nouns.attested
    german, english = "Das Licht sieht ein Auge.", "A light sees an eye, not the eye-light."
    places = nouns.places(german, english)
    assert places == [("n", "Licht", "light"), ("n", "Auge", "eye")], places
    assert nouns.places("Ein Licht und noch ein Licht", "a light") == [] == nouns.places("Ein Licht", "light, light")
    assert nouns.places("Der Bahnhof", "the stop or station") == []  # two words match the noun
    # "halt" may be a verb
    assert nouns.places("Der Bahnhof", "the station") and nouns.places("Der Bahnhof", "we halt") == []
    r = random.Random(2)
    seen = {nouns.replaced(r, german, english, [place]) for place in places for _ in range(50)}
    assert seen == {(german, english), ("Das Auge sieht ein Auge.", "An eye sees an eye, not the eye-light."),
                    ("Das Licht sieht ein Licht.", "A light sees a light, not the eye-light.")}, seen


@test
def inflected_forms_are_labelled():
    with tempfile.TemporaryDirectory() as root:
        path = os.path.join(root, "de-en")
        with open(path, "w", encoding="utf-8") as file:
            file.write(FORMS)
        forms = list(dictionaries.ding_forms(path))

    def declined(word, english):
        return [(word + x, english, "adjective " + x) for x in ("e", "em", "en", "er", "es")]
    assert forms == [
        ("kaufen", "buy", "vt 0"), ("erwerben", "buy", "vt 0"), ("gekauft", "bought", "vt 2"),
        ("erworben", "bought", "vt 2"), ("gekauft", "got", "vt 2"), ("kauft", "buys", "vt 3"),
        ("kaufte", "bought", "vt 4"), ("leiten", "lead", "vt 0"),
        ("leitete", "led", "vt 4"), ("eilen", "hurry", "vi 0"), ("geeilt", "hurried", "vi 2"),
        *declined("neu", "new"), *declined("froh", "cheerful"),
        ("eindringlich", "forcefully", "adverb"), *declined("eindringlich", "forcefully")], forms


@test
def verbs_change_alike_in_both_languages():
    forms = [("kaufen", "buy", "vt 0"), ("finden", "find", "vt 0"), ("eilen", "hurry", "vi 0"),
             ("frohe", "cheerful", "adjective e"), ("alte", "old", "adjective e"), ("blind", "blind", "vt 0"),
             ("blind", "blind", "adjective")]
    english = "buy find hurry cheerful old blind"
    tables = {"tatoeba.en-de": {"en": ["They buy a cheerful dog."] + [english] * 12,
                                "de": ["Sie kaufen eine frohe Hündin."] + ["kaufen finden eilen frohe alte"] * 12}}
    count = dictionaries.occurrences(tables)
    words = dictionaries.Words(forms, count["de"], count["en"])
    assert words.attested == {"vt 0": [("finden", "find"), ("kaufen", "buy")], "vi 0": [("eilen", "hurry")],
                              "adjective e": [("alte", "old"), ("frohe", "cheerful")]}, words.attested
    pair = tables["tatoeba.en-de"]["de"][0], tables["tatoeba.en-de"]["en"][0]
    places = words.places(*pair)
    assert places == [("vt 0", "kaufen", "buy"), ("adjective e", "frohe", "cheerful")], places
    assert words.replaced(random.Random(1), *pair, places[1:]) in (
        pair, ("Sie kaufen eine alte Hündin.", "They buy an old dog."))
    r = random.Random(1)
    assert {words.replaced(r, *pair, places[:1]) for _ in range(50)} == {
        pair, ("Sie finden eine frohe Hündin.", "They find a cheerful dog.")}


@test
def tables_include_verbs_and_english_french_dictionaries():
    with tempfile.TemporaryDirectory() as root:
        installed(root)
        with open(os.path.join(root, dictionaries.DING), "a", encoding="utf-8") as file:
            file.write(FORMS)
        installed(root, "eng-fra", {"light": "light /laɪt/\nlumière"})
        installed(root, "eng-spa", {"light": "light\nluz"})
        tables = corpus()
        tables["books"] = {"en": ["They buy and buy."] * 12, "de": ["Sie kaufen und kaufen."] * 12}  # ambiguous words
        tables["wikipedia"] = {"en": ["We buy it, see."] * 12, "de": ["Wir kaufen es."] * 12}
        made = dictionaries.dictionary_tables(tables, set(), 10, 1, root, len)
    rows = set(zip(made["verbs"]["de"], made["verbs"]["en"]))
    assert rows == {("Wir kaufen es.", "We buy it, see."), ("Wir erwerben es.", "We buy it, see.")}, rows
    assert ("light", "lumière") in zip(made["dictionaries"]["en"], made["dictionaries"]["fr"])
    assert not any(made["dictionaries"]["es"])


@test
def the_result_is_empty_without_dictionaries():
    log = []
    with tempfile.TemporaryDirectory() as root:
        assert dictionaries.dictionary_tables(corpus(), set(), 10, 1, root, log.append) == {}
    assert log == ["dictionaries: 0 entries of trans-de-en, 0 of 0 other dictionaries; tools/install-deps --train "
                   "installs missing ones"], log


if __name__ == "__main__":
    sys.exit(test.run())
