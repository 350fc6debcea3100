#!/usr/bin/env python3
"""Test that the checks of real_check.py find faults and accept good translations.

Usage: tests/python tests/package/test_real_faults.py
"""

import sys

from real_faults import faults, words
from real_pairs import Damaged, items, pairs
from suite import Suite

test = Suite()

# source, translation, kinds of faults
TEXTS = [
    ("Save <b>all</b> files.", "Alle Dateien <b>sichern</b>.", ""),
    ("Save <b>all</b> files.", "Alle Dateien sichern.", "tags"),
    ("Save <b>all</b> files.", "Alle <b></b> Dateien sichern.", "emptied"),
    ("Save <b>all</b> files.", "Alle </b>Dateien<b> sichern.", "order"),
    ("<i>One</i> and <b>two</b>", "<i>Eins und <b>zwei</b></i>", "nesting"),
    ("Copy %d files to {place}", "%d Dateien nach {place} kopieren", ""),
    ("Copy %d files to {place}", "%s Dateien nach place kopieren", "placeholders"),
    ("50% of users", "50 % der Nutzer", ""),
    ("Use --full or -v.", "Nimm --voll oder -v.", "options"),
    ("See /etc/fstab at https://a.org/b.", "Siehe /etc/fstab auf https://a.org/c.", "addresses"),
    ("1,234.5 of 1990s", "1.234,5 der 1990er", ""),
    ("at 3 pm", "um 15 Uhr", ""),
    ("2 of 3 lines", "2 Zeilen", "numbers"),
    ("2 lines", "2 2 Zeilen", "numbers added"),
    ("two lines", "2 Zeilen", ""),
    ("type [{0}] (old)", "Typ [{0} (alt)", "brackets"),
    ("a) no", "a) nein", ""),
    ("No <x/>", "Nein <x1/>", "tags"),
    ("the type", "der Typ [P1]", "residue numbers_added"),
    ("very good", "gut gut gut gut gut", "loop"),
]
PO = b'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\nmsgid "Two\\n"\n"lines"\nmsgstr "%s"\n'
SRT = b"1\n00:00:01,000 --> 00:00:02,000\n%s\n"
# format, source, translation, texts or None if damaged
FILES = [
    ("po", PO % b"", PO % b"Zwei\\nZeilen", 1),
    ("po", PO % b"", PO % b"" + PO % b"", None),
    ("html", b"<p>One <b>two</b><p>three", b"<p>Eins <b>zwei</b><p>drei", 2),
    ("html", b"<p>One<p>three", b"<p>Eins drei", None),
    ("subtitles", SRT % b"Yes", SRT % b"Ja", 1),
    ("subtitles", SRT % b"Yes", (SRT % b"Ja").replace(b",000", b",001"), None),
    ("json", b'{"a": "One", "b": 1}', b'{"a": "Eins", "b": 1}', 1),
    ("json", b'{"a": "One", "b": 1}', b'{"a": "Eins", "b": 2}', None),
    ("yaml", b"en:\n  a: One\n", b"de:\n  a: Eins\n", 1),
    ("properties", b"a = One\\\n  two\nb=\n", b"a = Eins\\\n  zwei\nb=\n", 1),
    ("table", b"a,b\nOne,2\n", b"a,b\nEins\n", None),
]


@test
def texts_have_the_expected_faults():
    for source, translation, kinds in TEXTS:
        found = {name.replace(" ", "_") for name, _ in faults(items(source), items(translation)) if name[0] != "?"}
        assert found == {name for name in kinds.replace("numbers added", "numbers_added").split()}, (source, found)


@test
def words_are_counted_without_names_for_programs():
    for text, number in [("Two words", 2), ("5.14. {package.,source/}lintian-overrides", 1), ("CC=cc ./configure", 2),
                         ("Use --full in /etc/fstab: %s", 2), ("lite_testing_nil", 0)]:  # fmt: skip
        assert len(words([text])) == number, (text, words([text]))


@test
def files_are_compared_text_by_text():
    for kind, source, translation, texts in FILES:
        try:
            found = sum(any(isinstance(at, str) for at in one) for _, one, _ in pairs(kind, source, translation))
        except Damaged:
            found = None
        assert found == texts, (kind, translation, found)


if __name__ == "__main__":
    sys.exit(test.run())
