#!/usr/bin/env python3
"""Test tools/train/train-mixtures.py on a generated corpus: it trains, measures and compares networks with the same
number of operations and the same seeds. Also test train.py, which trains each network.

Usage: tests/python tests/train/test_mixtures.py [WORD]      WORD: run tests with matching names

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`. Requires PyTorch, NumPy and
SentencePiece, which tools/install-deps --test installs into .venv.
"""
import importlib.util
import json
import lzma
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy as np
import sentencepiece
import torch

import data
import networks
import train
from suite import Suite

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAINER = ROOT / "tools" / "train" / "train-mixtures.py"
test = Suite()


def module():
    spec = importlib.util.spec_from_file_location("train_mixtures", TRAINER)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def sentences(chance, words, count):
    return [" ".join(chance.choices(words, k=chance.randint(3, 9))) for _ in range(count)]


def write_corpus(folder):
    """Write dev files and a cache of sentences whose translations are the same words in capitals or reversed."""
    chance = random.Random(1)
    words = ["".join(chance.choice("abcdefgh") for _ in range(chance.randint(2, 6))) for _ in range(100)]

    def translated(lines):
        return {"en": lines, "de": [x.upper() for x in lines], "fr": [x[::-1] for x in lines],
                "es": [x.title() for x in lines]}
    tables = {"tatoeba.en-de": translated(sentences(chance, words, 400)),
              "tatoeba_pivot.de-fr": translated(sentences(chance, words, 200))}
    (folder / "cache").mkdir()
    (folder / "dev").mkdir()
    spm = folder / "cache" / "spm.model"
    data.train_vocabulary(tables, str(spm), 300, 300, seed=1)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    data.write_cache(str(folder / "cache"), tables, pieces, "made up", log=lambda line: None)
    for name in ("tatoeba.en-de", "tatoeba.en-fr", "tatoeba.en-es", "wmt_newstest2012"):
        table = translated(sentences(chance, words, 10))
        with lzma.open(folder / "dev" / (name + ".tsv.xz"), "wt", encoding="utf-8", newline="\n") as file:
            file.write("\t".join(table) + "\n")
            file.writelines("\t".join(row) + "\n" for row in zip(*table.values(), strict=True))


def compared(folder, *more):
    return subprocess.run([sys.executable, TRAINER, "--corpus", folder, "--cache", folder / "cache", "--out",
                           folder / "out", "--tokens", "0.004", "--batch-tokens", "300", "--precision", "fp32",
                           "--seeds", "1", "2", *more], capture_output=True, encoding="utf-8", timeout=600)


@test
def networks_are_trained_measured_and_compared():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_corpus(folder)
        card = folder / "card.md"
        card.write_text("before\n<!-- mixtures -->\nold\n<!-- end of mixtures -->\nafter\n", encoding="utf-8")
        result = compared(folder, "--threads", "2", "--card", card)
        assert result.returncode == 0, result.stderr
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.strip().split("\n")]
        rows = {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[2:]}
        assert list(rows) == ["dense", "noisy", "balanced"]
        # 4 experts of 1,024 units need the operations of 4,096 units; both matrices have width 128
        assert {row["experts, k"] for row in rows.values()} == {f"{2 * 4 * 2 * 128 * 1024 / 1e3:.0f}"}, rows
        assert len({row["LSTM, k"] for row in rows.values()}) == 1
        found = {x: [json.loads((folder / "out" / f"{x}-seed-{seed}" / "test.json").read_text(encoding="utf-8"))
                     for seed in (1, 2)] for x in rows}
        for x, results in found.items():
            losses = [y["dev_loss"] for y in results]
            assert losses[0] != losses[1] and all(y["tokens"] >= 4000 for y in results)
            mean, half = networks.interval(losses)
            assert rows[x]["dev loss"] == f"{mean:.3f} ± {half:.3f}"
            gaps = [a["dev_loss"] - b["dev_loss"] for a, b in zip(results, found["dense"], strict=True)]
            mean, half = networks.interval(gaps)
            assert rows[x]["loss, compared"] == ("" if x == "dense" else f"{mean:.3f} ± {half:.3f}"), rows[x]
        assert result.stdout.strip() in card.read_text(encoding="utf-8")
        before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("test.json")}
        again = compared(folder)
        assert again.returncode == 0 and again.stdout == result.stdout and len(before) == 6
        assert before == {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("test.json")}
        other = compared(folder, "--rate", "0.001")
        assert other.returncode == 1 and "was created with" in other.stderr, other


@test
def operations_match_the_layers():
    trainer = module()
    for gate, k in (("dense", 1), ("noisy", 4)):
        config = train.make_config("mixture", 500, gate)
        count = trainer.operations(config)
        weights = {name: shape for name, (shape, _) in train.weight_shapes(config).items()}
        lstm = sum(np.prod(shape) for name, shape in weights.items() if name.split(".")[-1] in ("w_x", "w_r", "w_proj"))
        experts = sum(np.prod(shape[1:]) * k for name, shape in weights.items() if ".experts." in name)
        assert count == {"LSTM": lstm, "experts": experts, "softmax": 128 * 500}, (gate, count, lstm, experts)


@test
def intervals_are_students():
    mean, half = networks.interval([1.0, 2.0, 4.0])
    assert abs(mean - 7 / 3) < 1e-12 and abs(half - 4.303 * (7 / 3) ** 0.5 / 3 ** 0.5) < 1e-9, half
    assert np.isnan(networks.interval([1.0])[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(test.run())
