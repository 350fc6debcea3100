#!/usr/bin/env python3
"""moe-calibrate --confidence: the probability that a translation is right, in JSON and Python.

Usage: tests/python tests/programs/test_confidence.py

The references of half of the sentences are what the model writes, so these translations are right; the others are
unrelated.
"""
import contextlib
import json
import os
import random
import re
import sys
import tempfile

from suite import Suite
from test_cli import BIN, INFO, MODEL, ROOT, TRANSLATE, run

sys.path[:0] = [os.path.join(ROOT, "tools", x) for x in ("python", "convert")]
import moefile  # noqa: E402

CALIBRATE = os.path.join(BIN, "moe-calibrate")
PEOPLE, VERBS = "I You We They Tom Mary".split(), "see like want need have know sell buy".split()
THINGS = "house car book dog letter garden table bread".split()
test = Suite()


def translated(model, lines, *options):
    result = run([TRANSLATE, "-m", model, "--json", "--beam", "2", *options], "\n".join(lines) + "\n")
    return [json.loads(line) for line in result.text.splitlines()]


def sentences(number):
    """Return short sentences, and long ones without sense, in random order."""
    r = random.Random(1)
    words = lambda: f"{r.choice(PEOPLE)} {r.choice(VERBS)} the {r.choice(THINGS)}"  # noqa: E731
    return [words() + "." if r.random() < 0.5 else " that ".join(words() for _ in range(3)) for _ in range(number)]


@contextlib.contextmanager
def calibrated(number=440):
    """Yield the paths of a model with a table and of its input, and what moe-calibrate printed."""
    with tempfile.TemporaryDirectory() as folder:
        lines = sentences(number)
        rows = [["en", "de", line, x["translation"] if "that" not in line else "Unsinn"]
                for line, x in zip(lines, translated(MODEL, lines, "-t", "de"))]
        with open(folder + "/pairs.tsv", "w", encoding="utf-8") as file:
            file.writelines("\t".join(row) + "\n" for row in rows)
        found = run([CALIBRATE, "-m", MODEL, "-o", folder + "/sure.bin", "--confidence", folder + "/pairs.tsv"])
        assert found.returncode == 0, found.complaint
        yield folder + "/sure.bin", found.text


def probability(model, line, direction):
    """Compute the confidence of a line of JSON from the table, as confidence.h describes it."""
    meta = moefile.read_meta(model)
    table, directions = list(meta["confidence.table"]), meta["confidence.directions"]
    n, d = table[1], len(directions)
    row = table[2 if "reverse" in line else 2 + 9 + 2 * n + d:][:9 + 2 * n + d]
    logprobs, source, target = line["token_logprobs"], len(line["source_ids"]), len(line["token_logprobs"])
    reverse = line.get("reverse", 0)
    features = [1, line["logprob"] / target, reverse / source, line["logprob"] / 8, reverse / 8, min(logprobs),
                source ** 0.5, 4 * target / (source + target), "note" in line or "cut" in line]
    value = sum(w * int(1e6 * max(-8, min(8, x))) / 1e6 for w, x in zip(row, features))
    value += row[9 + 2 * n + directions.index(direction)]
    xs, ys = row[9:9 + n], row[9 + n:9 + 2 * n]
    for i in range(1, n):
        if xs[i] > value >= xs[i - 1]:
            return (ys[i - 1] + (ys[i] - ys[i - 1]) * (value - xs[i - 1]) / (xs[i] - xs[i - 1])) / 1e6
    return ys[0 if value < xs[0] else -1] / 1e6


@test
def the_table_tells_right_translations_from_wrong_ones():
    texts = ["Tom likes the dog.", "I need the car that you want the letter that we sell the garden"]
    with calibrated() as (model, printed):
        lines, right, _, error, auc = re.search(r"(?m)^all +(\d+) +([\d.]+) % +([\d.]+) % +([\d.]+) +([\d.]+)$",
                                                printed).groups()
        assert lines == "220" and 30 < float(right) < 70 and float(error) < 0.1 and float(auc) > 0.9, printed
        plain, sure = (translated(x, texts, "-s", "en", "-t", "de") for x in (MODEL, model))
        for x, y in zip(plain, sure):
            x.pop("confidence")  # of the shipped table
            p = y.pop("confidence")
            assert abs(p - probability(model, y, "en-de")) <= 0.0011, (p, y)
            assert p == round(p, 3) and {**x, "model": ""} == {**y, "model": ""}, (x, y)
        assert translated(model, texts[:1], "-t", "de")[0]["confidence"] > 0.7
        assert translated(model, texts[1:], "-t", "de")[0]["confidence"] < 0.3
        without = translated(model, texts, "-s", "en", "-t", "de", "--rerank", "0")
        assert all(abs(x["confidence"] - probability(model, x, "en-de")) <= 0.0011 for x in without), without
        assert "confidence" not in translated(model, [""], "-t", "de")[0]
        assert json.loads(run([INFO, "--json", "--check", model]).text)

        from moe_translate import Translator
        for path in model, MODEL:
            with Translator(path, source="en", target="de", beam=2) as translator:
                found = [x.confidence for x in translator.results(texts)]
            assert found == [x["confidence"] for x in translated(path, texts, "-s", "en", "-t", "de")], found


@test
def pairs_that_cannot_be_used_are_refused():
    with tempfile.TemporaryDirectory() as folder:
        for text, words in ("en\tde\tA\n", "line 1: expected source language TAB"), ("", "0 translations"), (
                "en\tde\tHello.\tHallo.\n", "too few"), ("en\txx\tA\tB\n", "xx"), ("\n\nen\tde\tA\t\n", "line 3"), (
                "en\tde\tA\tB\tC\n", "line 1"):
            with open(folder + "/pairs.tsv", "w", encoding="utf-8") as file:
                file.write(text)
            found = run([CALIBRATE, "-m", MODEL, "-o", folder + "/x.bin", "--confidence", folder + "/pairs.tsv"])
            assert found.returncode and words in found.complaint and len(found.complaint.splitlines()) == 1, (
                text, found.complaint)
            assert os.listdir(folder) == ["pairs.tsv"]
        for options in (), ("--confidence", "x", "--text", "y"), ("--confidence", "x", "--loads"):
            assert run([CALIBRATE, "-m", MODEL, "-o", folder + "/x.bin", *options]).returncode == 2


if __name__ == "__main__":
    sys.exit(test.run())
