#!/usr/bin/env python3
"""Measure the cost and benefit of lexical shortlists.

    tests/python tests/bench/lists.py random opus-base.bin listed.bin
        put random lists of 50 tokens into a model with random weights
    ./moe-bench -m opus-base.bin -m listed.bin --batch 1,32 --beam 4 --threads 1
    tests/python tests/bench/lists.py bleu text.tsv.xz en-pt.bin other.bin ...
        print each model's BLEU, chrF and mean number of tokens that a sentence
        may use. The text has a header, then lines SOURCE TAB REFERENCE
"""
import json
import lzma
import subprocess
import sys

import numpy as np

import moefile
import shortlist

EACH, FIRST = 50, 50


def put_random(source, out):
    """Write a copy of a model with random lists of distinct targets across the vocabulary."""
    meta, tensors = moefile.read(source)
    size, part = meta.get("source.vocab.size", meta["vocab.size"]), meta["vocab.size"] // EACH
    ids = np.random.default_rng(1).integers(0, part, (size, EACH)) + np.arange(EACH) * part
    lists = shortlist.Lists(FIRST, np.arange(size + 1) * EACH, ids.ravel())
    shortlist.check(lists, meta, source)
    shortlist.put(meta, tensors, lists)
    moefile.write_model(out, meta, tensors)


def sets(model, sources):
    """Return the mean number of tokens that translations of sources (ids) may use, without padding."""
    meta, tensors = moefile.read(model)
    offsets, ids = (tensors[f"shortlist.{x}"].array().astype(int) for x in ("offsets", "ids"))
    first = set(range(meta["shortlist.first"]))
    of = [first.union(source if meta["shortlist.shared"] else (), *(ids[offsets[s]:offsets[s + 1]].tolist()
                                                                    for s in source)) for source in sources]
    return sum(map(len, of)) / len(of)


def bleu(text, models):
    import sacrebleu
    with lzma.open(text, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t")[:2] for line in file][1:]
    print("| model | tokens in a set | BLEU | chrF |\n|---|---|---|---|")
    for model in models:
        for option in "--shortlist=0", "--shortlist=1":
            command = ["./moe-translate", "-q", "--json", "-m", model, "--split", "0", "--no-protect", option]
            done = subprocess.run(command, input="".join(a + "\n" for a, _ in rows), check=True, encoding="utf-8",
                                  stdout=subprocess.PIPE)
            found = [json.loads(line) for line in done.stdout.splitlines()]
            out, reference = [x["translation"] for x in found], [[b for _, b in rows]]
            size = f"{sets(model, [x['source_ids'] for x in found]):.0f}" if option.endswith("1") else "all"
            print(f"| {model} | {size} | {sacrebleu.corpus_bleu(out, reference).score:.2f} | "
                  f"{sacrebleu.corpus_chrf(out, reference).score:.2f} |", flush=True)


def main():
    if len(sys.argv) == 4 and sys.argv[1] == "random":
        put_random(*sys.argv[2:])
    elif len(sys.argv) > 3 and sys.argv[1] == "bleu":
        bleu(sys.argv[2], sys.argv[3:])
    else:
        print("usage: " + __doc__)
        sys.exit(0 if sys.argv[1:] == ["--help"] else 2)


if __name__ == "__main__":
    main()
