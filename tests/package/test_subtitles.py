#!/usr/bin/env python3
"""Test that subtitles keep times, numbers, line ends, dashes, names, positions, song marks and separate cues.

Usage: tests/python tests/package/test_subtitles.py
"""

import re
import sys

from moe_translate.documents import translate_document
from suite import Suite

test = Suite()
TIME = re.compile(r"[\d:.,]+ --> [\d:.,]+[^\r\n]*")


def louder(texts):
    return [
        "".join(part if part.startswith("<") else part.upper() for part in re.split(r"(<[^<>]*>)", t)) for t in texts
    ]


def seen(film):
    """Return the texts that the translator receives."""
    texts = []
    translate_document(film, "subtitles", lambda given: texts.extend(given) or given)
    return texts


def cue(number, begin, end, text):
    return f"{number}\n00:00:{begin:02},000 --> 00:00:{end:02},000\n{text}\n\n"


@test
def missing_blank_lines_do_not_affect_times():
    film = "1\n00:00:01,000 --> 00:00:02,000\nGood\nmorning.\n2\n00:00:03,000 --> 00:00:04,000\nBye.\n"
    assert translate_document(film, "subtitles", louder) == film.replace("Good\nmorning.", "GOOD\nMORNING.").replace(
        "Bye.", "BYE."
    )
    lost = film + "\n3\nNo times\nhere.\n"
    assert "\n3\nNO TIMES\nHERE.\n" in translate_document(lost, "subtitles", louder)
    bare = film.replace("\n2\n", "\n")  # the second cue has no number
    assert TIME.findall(translate_document(bare, "subtitles", louder)) == TIME.findall(film)


@test
def separate_cues_are_not_joined():
    for first, second in (
        ("{\\an8}Open from nine to the", "{\\an8}big house"),
        ("(laughs)", "and now"),
        ("[music]", "and now"),
        ("<v Ann>I think", "<v Bob>you are"),
        ("I think", "JOHN: you are"),
        ("# la la la #", "and now"),
        ("I think", "♪ la la la ♪"),
        ("I think", "- you are"),
        ("I think", "<i>- you are</i>"),
        ("I love my dog", "The house is red"),
    ):
        film = cue(1, 1, 2, first) + cue(2, 3, 4, second)
        assert len(seen(film)) == 2, (first, second, seen(film))
        got = translate_document(film, "subtitles", louder)
        assert len(got) == len(film) and TIME.findall(got) == TIME.findall(film), got
        for sign in re.findall(r"\{[^}]*\}|<v \w+>|[-♪#()\[\]]|JOHN:", film):
            assert got.count(sign) == film.count(sign), (sign, got)
    assert len(seen(cue(1, 1, 2, "I love the") + cue(2, 50, 51, "old house"))) == 2, "far apart"
    assert len(seen(cue(1, 1, 2, "I love the") + cue(2, 3, 4, "old house"))) == 1


@test
def dashes_of_speakers_are_kept():
    for text in (
        "- Yes.\n- No.",
        "<i>- Yes.\n- No.</i>",
        "<i>- Yes.</i>\n<i>- No.</i>",
        "–Yes.\n–No.",
        ">> Yes.\n>> No.",
    ):
        got = translate_document(cue(1, 1, 2, text), "subtitles", lambda texts: [t.strip(" -").upper() for t in texts])
        assert got == cue(1, 1, 2, text.replace("Yes", "YES").replace("No", "NO")), got


@test
def names_and_sounds_are_separated_from_speech():
    assert seen(cue(1, 1, 2, "JOHN: Come here!\nMARY: No.")) == ["Come here!", "No."]
    assert seen(cue(1, 1, 2, "(laughs) I know.\n[door slams]")) == ["laughs", "I know.", "door slams"]
    text = cue(1, 1, 2, "(laughs) <i>I know.</i>")
    assert translate_document(text, "subtitles", louder) == text.replace("laughs", "LAUGHS").replace("I know", "I KNOW")


@test
def short_times_and_other_formats_are_read():
    teams = "WEBVTT\n\n0:0:1.0 --> 0:0:3.540\n<v Jane Doe>Good morning.</v>\n"
    assert translate_document(teams, "subtitles", louder) == teams.replace("Good morning", "GOOD MORNING")
    sbv = "0:00:01.000,0:00:03.000\nGood morning.\n\n"
    assert translate_document(sbv, "subtitles", louder) == sbv.replace("Good morning", "GOOD MORNING")
    script = (
        "[Script Info]\nTitle: A film\n\n[Events]\nFormat: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, "
        "Effect, Text\nComment: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,no text\nDialogue: 0,0:00:01.00,0:00:02.00,"
        "Default,,0,0,0,,{\\an8}Hello there,\\Nmy friend.\n"
    )
    assert translate_document(script, "subtitles", louder) == script.replace("Hello there,", "HELLO THERE,").replace(
        "my friend", "MY FRIEND"
    )


@test
def line_ends_and_text_after_blank_lines_are_kept():
    film = "1\r\n00:00:01,000 --> 00:00:02,000\r\n"
    film += "Good\nmorning.\n\r\nStill text.\r\n\r\n2\n00:00:03,000 --> 00:00:04,000\nBye."
    assert translate_document(film, "subtitles", louder) == film.replace("Good\nmorning", "GOOD\nMORNING").replace(
        "Still text", "STILL TEXT"
    ).replace("Bye", "BYE")


@test
def files_without_cues_are_reported():
    reports = []
    got = translate_document("Good morning.\n", "subtitles", louder, lambda *what: reports.append(what))
    assert got == "Good morning.\n"
    assert reports == [("", "no text to translate")]


if __name__ == "__main__":
    sys.exit(test.run())
