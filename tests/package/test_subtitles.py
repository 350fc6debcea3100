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


HEAD, CUE = "WEBVTT\n\n", "00:00:01.000 --> 00:00:02.000\n"
SCRIPT = (
    "[Script Info]\nTitle: x y\n\n[Events]\nFormat: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, "
    "Text\nComment: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,no text\nDialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,"
)
CAPTIONS = (  # (before the text, text, its translation)
    (HEAD + CUE, " \nWhere is it?\n", " \nWHERE IS IT?\n"),
    (HEAD + CUE, "Where is it?\n \n\n", "WHERE IS IT?\n \n\n"),
    (HEAD + CUE, "&nbsp;\nWhere is it?\n\u200b\n", "&nbsp;\nWHERE IS IT?\n\u200b\n"),
    (HEAD + CUE, "Where\n\t\nis it?\n", "WHERE\n\t\nIS IT?\n"),
    (HEAD + CUE, "Where is it?\n\nNOTE\nnot this\n", "WHERE IS IT?\n\nNOTE\nnot this\n"),
    (HEAD + "STYLE\n::cue { color: red }\n\nREGION\nid:fred\n\nintro\n" + CUE, "It is.\n", "IT IS.\n"),
    (HEAD + CUE.replace("\n", " position:10%,line-left align:left\n"), "It is.\n", "IT IS.\n"),
    (HEAD + CUE, "<v.loud Ann>Tom &amp; Jerry &lt;3</v>\n", "<v.loud Ann>TOM &amp; JERRY &lt;3</v>\n"),
    (HEAD + CUE, "<v Ann>Hi.</v>\n<v Bob>Yes.</v>\n", "<v Ann>HI.</v>\n<v Bob>YES.</v>\n"),
    (HEAD + CUE, "Tom & Jerry\n", "TOM & JERRY\n"),
    (HEAD + CUE, "Tom &lrm;and me\n", "TOM &lrm;AND ME\n"),
    (HEAD + CUE, "Where<00:00:01.240><c> is</c><00:00:01.480><c> my</c><c> book?</c>\n",
     "WHERE<00:00:01.240><c> IS</c><00:00:01.480><c> MY</c><c> BOOK?</c>\n"),
    (HEAD + CUE, "<c.yellow>I am</c><00:00:01.240> here\nand<00:00:01.500> there\n",
     "<c.yellow>I AM</c><00:00:01.240> HERE\nAND<00:00:01.500> THERE\n"),
    (HEAD + CUE, "One more\n \n\n" + CUE + "One more\nand another\n",
     "ONE MORE\n \n\n" + CUE + "ONE MORE\nAND ANOTHER\n"),
    (SCRIPT, "{TL note: a dog}The dog is big.\n", "{TL note: a dog}THE DOG IS BIG.\n"),
    (SCRIPT, "The dog{a note} is big.\n", "THE DOG{a note} IS BIG.\n"),
    (SCRIPT, "{\\an8}{note}It is\\hmine {\\i1}now{\\i0}.\n", "{\\an8}{note}IT IS\\hMINE {\\i1}NOW{\\i0}.\n"),
    (SCRIPT, "- {x}Yes.\\N- No.\n", "- {x}YES.\\N- NO.\n"),
    (SCRIPT, "{\\k20}Oh {\\kf30}my {\\k10}dog\n", "{\\k20}OH {\\kf30}MY {\\k10}DOG\n"),
    (SCRIPT, "{\\pos(1,2)\\fad(3,4)}Yes, {\\b1}it{\\b0} is.\n", "{\\pos(1,2)\\fad(3,4)}YES, {\\b1}IT{\\b0} IS.\n"),
    (SCRIPT, "{\\p1}m 0 0 l 1 1{\\p0}\n", "{\\p1}m 0 0 l 1 1{\\p0}\n"),
    (SCRIPT, "{\\an8}\\NYes, it is.\n", "{\\an8}\\NYES, IT IS.\n"),
    (SCRIPT, "\\N\\NIt is mine.\\N\\N\n", "\\N\\NIT IS MINE.\\N\\N\n"),
    (SCRIPT, "It is\\N \\Nmine.\n", "IT IS\\N \\NMINE.\n"),
    (SCRIPT, "♪\\NMy song ♪\n", "♪\\NMY SONG ♪\n"),
    (SCRIPT, "\\N\n", "\\N\n"),
    (SCRIPT, "{a note alone}\n", "{a note alone}\n"),
    ("1\n00:00:01,000 --> 00:00:02,000\n", "{\\an8}Hi & {bye} <i>it</i>\n", "{\\an8}HI & {BYE} <i>IT</i>\n"),
    ("0:00:01.000,0:00:02.000\n", "Hi.[br]Bye.\n", "HI.[br]BYE.\n"),
)  # fmt: skip


@test
def codes_notes_and_padding_of_captions_are_kept():
    for before, text, wanted in CAPTIONS:
        assert translate_document(before + text, "subtitles", louder) == before + wanted, text
        for translate in (list, lambda texts: ["" for _ in texts]):
            assert translate_document(before + text, "subtitles", translate) == before + text, text


@test
def words_are_distributed_over_times():
    text = "WEBVTT\n\n" + CUE + "Where<00:00:01.240><c> is</c><00:00:01.480><c> it?</c>\n"
    for answer, wanted in (("A", ["A"]), ("A longword b c d e", "A longword b c d e".split())):
        got = translate_document(text, "subtitles", lambda texts: [answer for _ in texts])
        assert re.findall(r"<[^<>]*>", got) == re.findall(r"<[^<>]*>", text), got
        assert re.findall(r"\w+", re.sub(r"<[^<>]*>", "", got.split("\n", 3)[3])) == wanted, got
    evil = translate_document(text, "subtitles", lambda texts: ["a --> b\n\nc" for _ in texts])
    assert evil.count("-->") == 1 and "\n\n" not in evil[len(HEAD) :], evil


@test
def codes_numbers_and_brackets_stay_in_their_cues():
    cue = "1\n00:00:0%d,000 --> 00:00:0%d,000\n%s\n\n"

    def texts(got):
        return re.findall(r",000\n(.*?)\n\n", got, re.S)

    for one, two, answer, wanted in (
        ("<i>We were the</i>\n<i>ornaments of</i>", "<i>men at parties.</i>", "a b c d e f g h.",
         ["<i>a b c</i>\n<i>d e f</i>", "<i>g h.</i>"]),
        ("<i>We were</i>\n<i>ornaments of</i>", "men at parties.", "a b c d.", ["<i>a</i>\n<i>b c</i>", "d."]),
        ("light 2 100 0 0", "and 0 200 0", None, ["LIGHT 2 100 0 0", "AND 0 200 0"]),
        ("(so we said", "yes) then", None, ["(SO WE SAID", "YES) THEN"]),
        ("it is here (and not there or there)", "we say", "a (b c d e f g h i j k)", ["A", "B"]),
        ("one of the 5", "old dogs and 7 cats", "5 a 7 b c d e f g h i", ["A 5", "B 7"]),
        ("a <b>good</b> dog of", "the house", None, ["A <b>GOOD</b> DOG OF", "THE HOUSE"]),
        ("a <b>good</b> dog of", "the house", "a b c d <x1>e</x1>", ["A <b>C</b> D", "B"]),
    ):  # fmt: skip
        asked = []

        def translate(texts, answer=answer, wanted=wanted, asked=asked):
            asked.append(list(texts))
            apart = [re.sub("<[^<>]*>", "", text) for text in wanted]
            return apart if answer and len(asked) == 2 else [answer] if answer else louder(texts)

        got = translate_document(cue % (1, 2, one) + cue % (2, 3, two), "subtitles", translate)
        assert texts(got) == wanted, (texts(got), wanted, asked)


if __name__ == "__main__":
    sys.exit(test.run())
