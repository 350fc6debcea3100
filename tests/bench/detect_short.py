#!/usr/bin/env python3
"""Measure how accurately moe detects which of the corpus's four languages a few
words are in.

Cuts --per-language sentences of each test set (FLORES-200 and Tatoeba) to
windows of 1, 2, 3 and 10 words without punctuation; a seed selects the window.

    tests/python tests/bench/detect_short.py ../shared/corpus/test
"""

import argparse
import lzma
import random
import re
from pathlib import Path

from moe_translate import Model

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ["en", "de", "fr", "es"]
LENGTHS = [1, 2, 3, 10]


def columns(path):
    """Read a table; return {language: sentences}."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return {code: [row[i] for row in rows[1:]] for i, code in enumerate(rows[0]) if code in LANGUAGES}


def sentences(folder):
    """Return {test set: {language: sentences}}."""
    flores = columns(folder / "flores200-devtest.tsv.xz")
    tatoeba = {}
    for path in sorted(folder.glob("tatoeba-2k.*.tsv.xz")):
        for code, texts in columns(path).items():
            tatoeba.setdefault(code, set()).update(texts)
    return {"flores": flores, "tatoeba": {code: sorted(texts) for code, texts in tatoeba.items()}}


def windows(texts, length, count, seed):
    """Return up to `count` windows of `length` words, each from a different random sentence."""
    chance = random.Random(f"{seed} {length}")
    found = []
    for text in chance.sample(texts, len(texts)):
        words = [word.strip("'’") for word in re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", text)]
        if len(words) >= length and len(found) < count:
            begin = chance.randrange(len(words) - length + 1)
            found.append(" ".join(words[begin : begin + length]))
    return found


def samples(folder, count, seed):
    """Return {(test set, length): [(text, language)]}."""
    return {
        (name, length): [(w, code) for code in LANGUAGES for w in windows(texts[code], length, count, f"{seed} {code}")]
        for name, texts in sentences(folder).items()
        for length in LENGTHS
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with flores200-devtest.tsv.xz and tatoeba-2k.*.tsv.xz")
    parser.add_argument("-m", "--model", default=str(ROOT / "models/en-de-fr-es.bin"))
    parser.add_argument("--per-language", type=int, default=500, help="texts per set, length and language")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print("set      words  texts  right %  confidence")
    model = Model(options.model)
    for (name, length), texts in samples(options.folder, options.per_language, options.seed).items():
        found = [model.detect(text)[0] for text, _ in texts]
        right = sum(code == wanted for (code, _), (_, wanted) in zip(found, texts))
        sure = sum(confidence for _, confidence in found)
        print(f"{name:8} {length:5} {len(texts):6} {100 * right / len(texts):8.1f} {100 * sure / len(texts):11.1f}")


if __name__ == "__main__":
    main()
