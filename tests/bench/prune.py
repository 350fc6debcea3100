#!/usr/bin/env python3
"""Measure how much a model loses if moe-prune reduces it to one direction, keeping
experts by importance or at random.

    tests/python tests/bench/prune.py -m models/en-de-fr-es.bin \\
        --corpus ../shared/corpus [--direction en-de] [--limit N] [--lines N]

Keeps the experts that a sample of --lines sentences uses most, or the same
number per mixture at random (--draws times, with different seeds), and
recalibrates the thresholds on the sample. Prints a Markdown table with the BLEU
of the first --limit sentences of the test set and the loss of their references
in nats per token. The sample consists of the next sentences. Requires sacreBLEU
(tools/install-deps --train).
"""
import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import sacrebleu

import evaluate

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def program(name, *arguments, text=None):
    result = subprocess.run([os.path.join(ROOT, name), *map(str, arguments)], input=text, capture_output=True,
                            encoding="utf-8")
    if result.returncode > 1:
        sys.exit(f"prune.py: {name} {' '.join(map(str, arguments))}: {result.stderr}")
    return result.stdout


def about(path):
    return json.loads(program("moe-info", "--json", path))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--corpus", type=pathlib.Path, default=pathlib.Path("../shared/corpus"))
    parser.add_argument("--direction", default="en-de")
    parser.add_argument("--set", default="tatoeba", help="the test set (tatoeba)")
    parser.add_argument("--limit", type=int, default=500, help="sentences of the test set (500)")
    parser.add_argument("--lines", type=int, default=500, help="sentences of the sample (500)")
    parser.add_argument("--keep", default="75,50,25", help="percentages (75,50,25)")
    parser.add_argument("--draws", type=int, default=3, help="random prunings of each (3)")
    o = parser.parse_args()
    source, target = o.direction.split("-")
    found = {(s, t): pairs for s, t, *pairs in evaluate.directions(o.corpus, o.set)}[source, target]
    sentences, references = found[0][:o.limit], found[1][:o.limit]
    # the sample must not include translated sentences
    sample = list(zip(*(x[o.limit:o.limit + o.lines] for x in found)))
    if len(sentences) < o.limit or len(sample) < o.lines:
        sys.exit(f"prune.py: {o.set} has only {len(found[0])} sentences of {o.direction}")
    bleu = sacrebleu.BLEU()

    def score(path):
        lines = program("moe-translate", "-m", path, "-s", source, "-t", target, "--rerank", "0", "--truncate",
                        text="\n".join(sentences) + "\n").split("\n")[:-1]
        return bleu.corpus_score(lines, [references]).score

    def tsv(folder, name, pairs):
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{source}\t{target}\t{s}\t{t}\n" for s, t in pairs)
        return path

    with tempfile.TemporaryDirectory() as folder:
        text, test = tsv(folder, "sample.tsv", sample), tsv(folder, "test.tsv", zip(sentences, references))
        out, sizes = os.path.join(folder, "cut.bin"), [x["experts"] for x in about(o.model)["mixtures"]]

        def cut(*how):
            """Prune; return (BLEU, nats per token after, nats per token before, share of equal translations)."""
            program("moe-prune", "-q", "-m", o.model, "-o", out, "--pair", o.direction, "--sample", text, "--measure",
                    test, *how)
            meta = about(out)["metadata"]
            return (score(out), meta["quality.nats_per_token"], meta["quality.nats_per_token_before"],
                    meta["quality.same_translations"])

        print("| experts kept | file | BLEU, by importance | BLEU, at random | their mean | nats per token, by "
              "importance | at random, mean | same translations, by importance |\n|---|---|---|---|---|---|---|---|")
        whole = score(o.model)
        for percent in map(int, o.keep.split(",")):
            best = cut("--keep", percent)
            size = os.path.getsize(out)
            if percent == int(o.keep.split(",")[0]):
                print(f"| 100 % | {os.path.getsize(o.model) / 1e6:.1f} MB | {whole:.2f} | | | {best[2]:.3f} | | |")
            drawn = []
            for seed in range(o.draws):
                r, ids, at = random.Random(seed), [], 0
                for n in sizes:
                    ids += [at + e for e in r.sample(range(n), round(n * percent / 100))]
                    at += n
                listed = os.path.join(folder, "random.json")
                with open(listed, "w", encoding="utf-8") as file:
                    json.dump(ids, file)
                drawn.append(cut("--experts", listed))
            mean = [sum(x) / len(drawn) for x in zip(*drawn)]
            print(f"| {percent} % | {size / 1e6:.1f} MB | {best[0]:.2f} | {', '.join(f'{x[0]:.2f}' for x in drawn)} | "
                  f"{mean[0]:.2f} | {best[1]:.3f} | {mean[1]:.3f} | {100 * best[3]:.0f} % |", flush=True)
    print(f"\nBLEU: `{bleu.get_signature()}`")


if __name__ == "__main__":
    main()
