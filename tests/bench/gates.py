#!/usr/bin/env python3
"""Compare the masks of inference, which use learned (eq 20) or calibrated
thresholds (eq 19), with the batchwise mask of training (eq 18).

    tests/python tests/bench/gates.py -m models/en-de-fr-es.bin \\
        --corpus ../shared/corpus [--limit N] [--calibrate FILE]

For each test set, measures the BLEU of ./moe-translate with the file's gates,
with `--gating batchwise` and, given --calibrate, with calibrated thresholds.
With forced reference translations, measures the share of all (token, expert)
pairs on which two masks agree, and the share of pairs selected by any mask that
both select. Batchwise results depend on the batch of 128 sentences. Prints a
Markdown table. Requires sacreBLEU (tools/install-deps --train).
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import sacrebleu

import evaluate

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

BATCH = ["--batch", "128"]


def program(name, *arguments, text=None):
    result = subprocess.run([os.path.join(ROOT, name), *map(str, arguments)], input=text, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, encoding="utf-8")
    if result.returncode > 1:
        sys.exit(f"gates.py: {name} {' '.join(map(str, arguments))}: {result.stderr}")
    return result.stdout


def selections(model, source, target, pairs, options, folder):
    """Force targets; return ({layer: experts} from the header, {(line, layer, position): set of experts})."""
    path = os.path.join(folder, "routing")
    program("moe-translate", "-m", model, "-s", source, "-t", target, "--score", "--truncate", *BATCH, "--routing",
            path, *options,
            text="".join(f"{s}\t{t}\n" for s, t in pairs))
    with open(path, encoding="utf-8") as file:
        layers = {x["layer"]: x["experts"] for x in json.loads(next(file))["layers"]}
        rows = map(json.loads, file)
        return layers, {(x["line"], x["layer"], x["position"]): set(x["experts"]) for x in rows}


class Agreement:
    """Counts of (token, expert) pairs on which two masks agree or differ."""

    def __init__(self):
        self.pairs = self.differ = self.both = self.either = 0

    def add(self, layers, a, b):
        for key in a.keys() & b.keys():
            self.pairs += layers[key[1]]
            self.differ += len(a[key] ^ b[key])
            self.both += len(a[key] & b[key])
            self.either += len(a[key] | b[key])

    def __str__(self):
        return f"{1 - self.differ / self.pairs:.4f} | {self.both / self.either:.3f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--corpus", type=pathlib.Path, default=pathlib.Path("../shared/corpus"))
    parser.add_argument("--sets", default="tatoeba,newstest2014")
    parser.add_argument("--limit", type=int, help="use the first N sentences of each direction")
    parser.add_argument("--calibrate", help="text for moe-calibrate (lines: source language, target language, source, "
                                            "target)")
    o = parser.parse_args()
    bleu = sacrebleu.BLEU()
    with tempfile.TemporaryDirectory() as folder:
        variants = {"thresholds": (o.model, []), "batchwise": (o.model, ["--gating", "batchwise"])}
        if o.calibrate:
            calibrated = os.path.join(folder, "calibrated.bin")
            print(program("moe-calibrate", "-m", o.model, "-o", calibrated, "--text", o.calibrate))
            variants["calibrated"] = calibrated, []
        others = list(variants)[1:]
        print("| | " + " | ".join(f"BLEU, {v}" for v in variants) + " | " +
              " | ".join(f"{v}: pairs that agree | of those selected" for v in others) + " |")
        print("|---|" + "---|" * (len(variants) + 2 * len(others)))
        for name in o.sets.split(","):
            scores, agreement = {v: [] for v in variants}, {v: Agreement() for v in others}
            for source, target, sources, references in evaluate.directions(o.corpus, name):
                sources, references = sources[:o.limit], references[:o.limit]
                chosen = {}
                for v, (model, options) in variants.items():
                    lines = program("moe-translate", "-m", model, "-s", source, "-t", target, "--truncate", *BATCH,
                                    *options,
                                    text="\n".join(sources) + "\n").split("\n")[:-1]
                    scores[v].append(bleu.corpus_score(lines, [references]).score)
                    layers, chosen[v] = selections(model, source, target, list(zip(sources, references)), options,
                                                   folder)
                for v in others:
                    agreement[v].add(layers, chosen["thresholds"], chosen[v])
                print(f"{name} {source}-{target} done", file=sys.stderr)
            print(f"| {name}, mean of {len(scores[v])} directions | " +
                  " | ".join(f"{evaluate.mean(x):.2f}" for x in scores.values()) + " | "
                  + " | ".join(map(str, agreement.values())) +
                  " |", flush=True)
    print(f"\nBLEU: `{bleu.get_signature()}`; batches of 128 sentences")


if __name__ == "__main__":
    main()
