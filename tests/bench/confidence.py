#!/usr/bin/env python3
"""Measure how reliable a model's confidences are on the test sets of
../shared/corpus. moe-calibrate --confidence adds them to a model.

Usage: tests/python tests/bench/confidence.py MODEL [--lines N]
       tests/python tests/bench/confidence.py --pairs N > pairs.tsv

A translation is right if sacreBLEU's chrF is at least 60. Prints for each
direction of tatoeba-2k and newstest2014: lines, share of right ones, mean
confidence, expected calibration error (ten bins) and the error that chance
alone would give, AUC. --pairs writes pairs for moe-calibrate: per direction N
lines of news and 3 N of Tatoeba, or 4 N with English. Tatoeba's dev sets all
include English and are easier than tatoeba-2k; therefore half of tatoeba-2k is
used for calibration and only the other half for tests.
"""
import argparse
import json
import lzma
import os
import random
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CORPUS = os.path.join(ROOT, "../shared/corpus")
LANGUAGES = "en", "de", "fr", "es"
HALVED = [f"test/tatoeba-2k.{x}" for x in ("de-en", "de-es", "de-fr", "en-es", "en-fr", "fr-es")]
DEV = {**dict.fromkeys(HALVED, 3), **{f"dev/tatoeba.en-{x}": 1 for x in LANGUAGES[1:]}, "dev/wmt_newstest2012": 1}
TEST = HALVED + [f"test/wmt_newstest2014.{x}" for x in ("de-en", "fr-en")]
BINS = 10


def directions(name, number, part):
    """Yield (source language, target language, [(source, reference)]) of a set, or of half `part` of a set in HALVED."""
    with lzma.open(os.path.join(CORPUS, name + ".tsv.xz"), "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    places = [i for i, code in enumerate(rows[0]) if code in LANGUAGES]
    for a in places:
        for b in places:
            pairs = [(row[a], row[b]) for row in rows[1:] if a != b and row[a] and row[b]]
            random.Random(1).shuffle(pairs)
            if name in HALVED:
                pairs = pairs[part::2]
            if pairs:
                yield rows[0][a], rows[0][b], pairs[:number]


def error(found):
    """Return the expected calibration error of [(confidence, right)]."""
    bins = [[0, 0] for _ in range(BINS)]
    for p, right in found:
        place = bins[min(int(p * BINS), BINS - 1)]
        place[0] += p
        place[1] += right
    return sum(abs(a - b) for a, b in bins) / len(found)


def area(found):
    """Return the probability that a right translation has a higher confidence than a wrong one."""
    right, wrong = ([p for p, is_right in found if is_right == side] for side in (True, False))
    won = sum((a > b) + (a == b) / 2 for a in right for b in wrong)
    return won / (len(right) * len(wrong)) if right and wrong else float("nan")


def chance(found):
    r = random.Random(1)
    return sum(error([(p, r.random() < p) for p, _ in found]) for _ in range(20)) / 20


def show(name, found):
    print(f"{name:<24} {len(found):6} {100 * sum(x for _, x in found) / len(found):6.1f} % "
          f"{100 * sum(p for p, _ in found) / len(found):6.1f} % {error(found):7.3f} ({chance(found):.3f}) "
          f"{area(found):6.3f}", flush=True)


def measure(model, number):
    from sacrebleu import sentence_chrf
    print(f"{'set':<24} {'lines':>6} {'right':>8} {'mean':>8} {'ECE (chance)':>15} {'AUC':>6}")
    sums = {}
    for name in TEST:
        for source, target, pairs in directions(name, number, 1):
            command = [os.path.join(ROOT, "moe-translate"), "-m", model, "-s", source, "-t", target, "--json"]
            done = subprocess.run(command, input="\n".join(x for x, _ in pairs) + "\n", stdout=subprocess.PIPE,
                                  text=True)
            if done.returncode not in (0, 1):  # 1: some lines have no translation
                raise SystemExit(done.returncode)
            lines = [json.loads(line) for line in done.stdout.splitlines()]
            found = [(x["confidence"], sentence_chrf(x["translation"], [reference]).score >= 60)
                     for x, (_, reference) in zip(lines, pairs) if "confidence" in x]
            show(f"{name.split('/')[1].split('.')[0]} {source}-{target}", found)
            sums.setdefault(name.split(".")[0], []).extend(found)
    for name, found in sums.items():
        show(name.split("/")[1], found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--pairs", type=int)
    given = parser.parse_args()
    if given.model:
        measure(given.model, given.lines)
        return
    rows = [(source, target, *pair) for name, times in DEV.items()
            for source, target, pairs in directions(name, times * given.pairs, 0) for pair in pairs]
    random.Random(1).shuffle(rows)
    sys.stdout.writelines("\t".join(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
