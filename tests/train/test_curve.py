#!/usr/bin/env python3
"""Test `tools/train/train-lm.py curve` on a generated corpus: it trains each network with the same operations per token
once, even if interrupted. Also test tools/train/report.py, which plots the results.

Usage: tests/python tests/train/test_curve.py [WORD]      WORD: run tests with matching names

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`. Requires PyTorch, NumPy and
SentencePiece, which tools/install-deps --test installs into .venv.
"""
import importlib.util
import json
import lzma
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

import numpy as np
import torch

import report
from suite import Suite

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAINER = ROOT / "tools" / "train" / "train-lm.py"
OPTIONS = ("--vocabulary 300 --width 32 --hidden 32 --expert-hidden 16 --precision fp32 --batch-tokens 300 "
           "--longest 30 --held-out 40 --warmup 5 --tokens 0.05").split()
TOKENS = 50_000
test = Suite()


def write_corpus(folder):
    """Write generated lines to the files that the trainer reads."""
    chance = random.Random(1)
    words = ["".join(chance.choice("abcdefgh") for _ in range(chance.randint(2, 6))) for _ in range(200)]
    for name in ("train/wikipedia", "dev/tatoeba.en-de", "dev/europarl.en-fr", "dev/wmt_newstest2012",
                 "test/tatoeba-2k.en-fr", "test/wmt_newstest2014.de-en", "test/flores200-devtest"):
        lines = 3000 if name.startswith("train") else 30
        path = folder / (name + ".tsv.xz")
        path.parent.mkdir(parents=True, exist_ok=True)
        with lzma.open(path, "wt", encoding="utf-8", newline="\n") as file:
            file.write("en\n")
            file.writelines(" ".join(chance.choices(words, k=chance.randint(3, 12))) + "\n" for _ in range(lines))


def curve(folder, out, *more, **settings):
    command = [sys.executable, TRAINER, "curve", "--corpus", folder / "corpus", "--out", folder / out, *OPTIONS, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", **settings)


def ended(process):
    """Wait for a process; return (exit status, standard output, standard error)."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def rows(table):
    """Parse a Markdown table; return {network: {column: cell}}."""
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().split("\n")]
    return {row[0]: dict(zip(head, row, strict=True)) for row in body}


def written(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def stopped_while_training(process, log):
    """Terminate the process once it trains a network; return ended()'s result."""
    until = time.monotonic() + 300
    while not (log.exists() and "M weights" in written(log)):
        assert process.poll() is None and time.monotonic() < until, ended(process)
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    return ended(process)


@test
def networks_are_trained_once_and_to_the_same_end_when_stopped_in_between():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_corpus(folder / "corpus")
        card = folder / "card.md"
        card.write_text("before\n<!-- x -->\nold\n<!-- end of x -->\nafter\n", encoding="utf-8")
        begin = [folder, "run", "--networks", "dense", "4", "16-h", "--seeds", "1", "--threads", "1"]
        networks = {x: folder / "run" / f"{x}-seed-1" for x in ("dense", "4", "16-h")}

        status, out, err = stopped_while_training(curve(*begin), networks["4"] / "log")
        assert status == 1 and not out and "stopped; state saved" in err, (status, out, err)
        seen = torch.load(networks["4"] / "resume.pt", weights_only=True)["tokens"]
        assert 0 < seen < TOKENS and not (networks["4"] / "test.json").exists(), seen
        assert not networks["16-h"].exists(), "another network was started"
        first = written(networks["dense"] / "log")

        status, out, err = ended(curve(*begin, "--card", card, "--part", "x"))
        assert status == 0, err
        assert written(networks["dense"] / "log") == first, "a finished network was trained again"
        assert f"from {seen / 1e6:.2f} of" in written(networks["4"] / "log")
        table, results = rows(out), {x: json.loads(written(path / "test.json")) for x, path in networks.items()}
        assert table.keys() == networks.keys()
        for x, row in table.items():
            assert row["perplexity"] == f"{results[x]['ppl']:.1f} ({results[x]['ppl']:.1f})", row
            assert all(results[x][f"ppl.{domain}"] > 1 for domain in ("tatoeba", "news", "flores", "mix")), results[x]
            for part in "LSTM", "experts", "softmax":
                assert results[x]["operations"][part] == results["4"]["operations"][part], f"{part} of {x}"
        assert results["4"]["operations"] == {"LSTM": 2 * (4 * 32 * 64 + 32 * 32), "experts": 4 * 2 * 32 * 16,
                                              "gate": 4 * 32, "softmax": 32 * 300}, results["4"]["operations"]
        assert results["16-h"]["operations"]["gate"] == 32 * (4 + 2 * 4)
        assert results["16-h"]["weights"] - results["4"]["weights"] == 12 * 2 * 32 * 16 + 2 * 32 * (4 + 16 - 4)
        assert out in written(card) and written(card).startswith("before\n<!-- x -->\n") and "old" not in written(card)
        assert written(folder / "x.svg").count("<circle") == 3

        logs = {x: written(path / "log") for x, path in networks.items()}
        status, again, err = ended(curve(*begin))
        assert status == 0 and again == out and logs == {x: written(path / "log") for x, path in networks.items()}, err
        status, _, err = ended(curve(*begin, "--rate", "0.5"))
        assert status == 1 and "was created with --rate 0.003" in err, err

        status, out, err = ended(curve(folder, "whole", "--networks", "4", "--seeds", "1"))
        assert status == 0, err
        for column in ("perplexity", "CV(load)", "mix"):
            assert rows(out)["4"][column] == table["4"][column], f"{column} depends on the interruption"


@test
def lines_that_are_held_out_are_in_no_batch():
    spec = importlib.util.spec_from_file_location("train_lm", TRAINER)
    trainer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trainer)
    lines = trainer.Lines(np.repeat(np.arange(30), 2), np.arange(0, 62, 2), 12, 20, 1, held_out=5)
    seen = [int(line[0]) for _ in lines.batches for line in lines.next()]
    assert sorted(seen) == list(range(25)), seen
    assert [int(line[0]) for line in lines.held_out] == list(range(25, 30))


@test
def networks_that_cannot_be_trained_are_reported():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_corpus(folder / "corpus")
        status, _, err = ended(curve(folder, "run", "--networks", "4", "2"))
        assert status == 1 and "invalid moe layer" in err and not (folder / "run").exists(), err
        (folder / "corpus" / "dev" / "tatoeba.en-de.tsv.xz").unlink()
        status, _, err = ended(curve(folder, "run", "--networks", "4", "16", "--seeds", "1", "--threads", "1"))
        assert status == 1 and "4-seed-1/log" in err and not (folder / "run" / "16-seed-1").exists(), err
        assert "tatoeba.en-de" in written(folder / "run" / "4-seed-1" / "log")


@test
def plots_show_every_value_where_it_belongs():
    svg = xml.etree.ElementTree.fromstring(report.plot({"a": [(4, [50.0, 52.0]), (256, [40.0])], "b": [(1, [60.0])]},
                                                       "experts", "perplexity"))
    space = "{http://www.w3.org/2000/svg}"
    x, y = zip(*((float(c.get("cx")), float(c.get("cy"))) for c in svg.iter(space + "circle")))
    assert x[0] == x[1] < x[2] and abs((x[0] - x[3]) / (x[2] - x[3]) - 2 / 8) < 0.01, x  # the x axis has log2 scale
    assert abs((y[1] - y[0]) / (y[2] - y[0]) + 2 / 10) < 0.01 and y[3] < y[1], y  # the y axis points upwards
    words = [text.text for text in svg.iter(space + "text")]
    assert {"a", "b", "experts", "perplexity", "1", "4", "256", "40", "60"} <= set(words), words


@test
def curves_are_plotted():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "curve.csv").write_text("minutes,tokens,train_loss,dev_loss,bleu\n10,5,4,3.5,\n20,9,2,3.1,7\n5,14,1,3,8\n")

        def plotted(*options):
            command = [sys.executable, TRAINER.parent / "report.py", folder, "-o", folder / "x.svg", *options]
            done = subprocess.run(command, capture_output=True, text=True)
            assert not done.returncode, done.stderr
            svg, space = xml.etree.ElementTree.parse(folder / "x.svg"), "{http://www.w3.org/2000/svg}"
            return ([float(c.get("cx")) for c in svg.iter(space + "circle")], [t.text for t in svg.iter(space + "text")])

        x, words = plotted()
        assert len(x) == 6 and abs((x[2] - x[1]) / (x[1] - x[0]) - 5 / 10) < 0.01, x  # the second run continues
        assert {"train_loss", "dev_loss", "minutes", "10", "26"} <= set(words) and "bleu" not in words, words
        x, words = plotted("-y", "bleu", "-x", "tokens")
        assert len(x) == 2 and {"bleu", "tokens"} <= set(words), (x, words)
        for text, options, said in (
            (None, ["-y", "z"], "no column z; available: minutes"),
            ("minutes,loss\n1,2\n2,x\n", [], "line 3: loss is 'x', not a number"),
            ("minutes,loss\n1,2\nx,2\n", [], "line 3: minutes is 'x', not a number"),
            ('{"layers": []}\n{"line": 1, "experts": [3, 4]}\n', [], "no column minutes"), ("", [], "no rows"),
            ("minutes,loss\n1,2\n", ["-o", "/none/x.svg"], "/none/x.svg: No such file or directory"),
        ):
            if text is not None:
                (folder / "curve.csv").write_text(text)
            wrong = subprocess.run([sys.executable, TRAINER.parent / "report.py", folder, "-o", folder / "y.svg", *options],
                                   capture_output=True, text=True)
            assert wrong.returncode == 1 and said in wrong.stderr and wrong.stderr.count("\n") == 1, (text, wrong.stderr)
        (folder / "curve.csv").write_text("minutes,loss\n1,2\n2,nan\n3,1\n")
        assert len(plotted()[0]) == 2


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
