#!/usr/bin/env python3
"""Test tools/train/train.py on a user's text: it trains a small model from scratch on some phrases, writes the model
file, and fine-tunes the model from this file.

Usage: tests/python tests/train/test_finetune.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`. Requires PyTorch, which
tools/install-deps --test-long installs into .venv.
"""
import collections
import csv
import os
import pathlib
import re
import subprocess
import sys
import tempfile

try:
    import torch
except ImportError:
    torch = None

from suite import Suite

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("BIN") or ROOT).resolve()
OPTIONS = "--recipe mixture --batch-tokens 400 --rate 2e-3 --muon-rate 0.01 --threads 2 --tokens".split()
test = Suite()
torch_test = test.needs(torch, "PyTorch")


def ran(*command, text=None):
    done = subprocess.run([str(x) for x in command], input=text, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, (command[:3], done.stderr[-800:])
    return done.stdout


def tool(path, *command):
    return ran(sys.executable, ROOT / "tools" / path, *command)


def write_phrases(path):
    """Write the English and German phrases of the phrasebook."""
    rows = collections.defaultdict(dict)
    with open(ROOT / "tests" / "train" / "phrasebook.tsv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            rows[row["phrase"]][row["language"]] = row["text"]
    path.write_text("en\tde\n" + "".join(f"{x['en']}\t{x['de']}\n" for x in rows.values()), encoding="utf-8")


def losses(folder):
    with open(folder / "curve.csv", newline="") as file:
        return [float(row["dev_loss"]) for row in csv.DictReader(file)]


@torch_test
def finetuning_improves_a_model_file():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        corpus, run, model, mine = folder / "mine.tsv", folder / "run", folder / "model.bin", folder / "mine.bin"
        write_phrases(corpus)
        (folder / "licence.txt").write_text("Of the phrases' author.\n")
        tool("train/train.py", "train", "--corpus", corpus, "--out", run, *OPTIONS, "0.02")
        tool("convert/convert.py", run / "model.pt", "--spm", run / "model-spm.model", "--licence",
             folder / "licence.txt", "--type", "f32", "-o", model)
        log = tool("train/train.py", "finetune", "-m", model, "--corpus", corpus, "-o", mine, *OPTIONS, "0.02")
        trained, (before, *between, after) = losses(run)[-1], losses(folder / "mine.bin.training")
        assert len(losses(run)) >= 3 and between  # a short run is evaluated several times
        assert abs(before - trained) < 0.02, (trained, before)  # the model file preserves the weights
        assert after < before - 0.1, (before, after)
        for pair in "en-de", "de-en":
            assert re.search(rf"^{pair}: held-out BLEU [\d.]+ before, [\d.]+ after$", log, re.MULTILINE), log
        about = ran(BIN / "moe-info", mine)
        assert "Of the phrases' author." in about and re.search(r"languages +(de en|en de)\n", about), about
        assert ran(BIN / "moe-translate", "-m", mine, "-s", "en", "-t", "de", text="Good morning.\nThank you.\n"
                   ).count("\n") == 2


@torch_test
def short_runs_finish_their_warm_up():
    import train
    assert train.schedule(0, 0.0, 150, 0.2) == 1 / 150
    assert train.schedule(149, 0.01, 150, 0.2) == 1.0
    assert train.schedule(5, 0.1, 150, 0.2) == 1.0, "60 steps in total: warm after a tenth"
    assert 0.49 < train.schedule(5, 0.05, 150, 0.2) < 0.51


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
