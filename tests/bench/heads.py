#!/usr/bin/env python3
"""Find the attention heads of a Transformer that align words. Unless training
selected a head, moe-align, tags and glossaries need heads named in the model.

The statistical aligner of tools/train/phrases.py learns from the text; its
links count as sure if the product of both directions' probabilities is at least
0.5. moe-align links the first lines with each head of each decoder layer. The
score of a head is the harmonic mean of the share of sure links that it finds
and the share of sure links among its links at words with a sure link. Another
head joins the best one if their mean scores at least 0.01 more. Use several
thousand lines; translations by the model itself are good enough.

    tests/python tests/bench/heads.py -m opus.bin pairs.tsv
    tools/convert/convert.py opus.bin -o opus-aligned.bin --align LAYER:HEADS
"""
import argparse
import os
import struct
import subprocess
import sys
import tempfile
import zlib

import align
import moefile

GAIN = 0.01  # smallest growth of the score for which a head joins


class Trial:
    """A copy of a model file; set() selects other heads by rewriting only the header."""

    def __init__(self, model, path):
        meta, tensors = moefile.read(model)
        self.model, self.path = moefile.check_model(meta, tensors), path
        self.layers = [i for i, layer in enumerate(self.model.decoder) if layer.kind == "cross"]
        if self.model.attention or not self.layers:
            sys.exit(f"heads.py: {model} is not a Transformer: its only attention aligns")
        self.meta = {**meta, "align.layer": self.layers[0], "align.heads": 1}
        moefile.write_model(path, self.meta, tensors)

    def set(self, layer, heads):
        self.meta.update({"align.layer": layer, "align.heads": sum(1 << head for head in heads)})
        with open(self.path, "r+b") as file:
            head = bytearray(file.read(len(moefile.MAGIC) + 16))
            (size,) = struct.unpack_from("<Q", head, 16)
            head += file.read(size - len(head))
            for key in "align.layer", "align.heads":
                name = moefile.pad8(struct.pack("<II", moefile.INT, len(key)) + key.encode())
                assert head.count(name) == 1, key
                struct.pack_into("<q", head, head.index(name) + len(name), self.meta[key])
            struct.pack_into("<I", head, 12, zlib.crc32(head[16:]))
            file.seek(0)
            file.write(head)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", help="per line: source TAB translation")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-s", "--source", help="language of the source, where the model has tags")
    parser.add_argument("-t", "--target", help="language of the translation")
    parser.add_argument("--ids", action="store_true", help="lines are token ids with spaces between them")
    parser.add_argument("--lines", type=int, default=300, help="that every head aligns (default: %(default)s)")
    parser.add_argument("--show", type=int, default=10, help="heads in the table (default: %(default)s)")
    parser.add_argument("--align", default="./moe-align", help="program to run (default: %(default)s)")
    o = parser.parse_args()
    with open(o.pairs, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    rows = [row for row in rows if len(row) == 2 and all(row)]
    dev, train = list(zip(*rows[:o.lines])), list(zip(*rows[o.lines:])) or [(), ()]
    sure = align.sure_links(train, dev)
    text = "".join(f"{a}\t{b}\n" for a, b in zip(*dev))
    print(f"{len(rows)} lines; {sum(map(len, sure.values()))} sure links in the first {len(dev[0])}", flush=True)
    command = [o.align, "-q", *(["-s", o.source] if o.source else []), *(["-t", o.target] if o.target else []),
               *(["--ids"] if o.ids else [])]
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(o.pairs))) as folder:
        trial = Trial(o.model, os.path.join(folder, "trial.bin"))

        def mark(layer, heads):
            trial.set(layer, heads)
            out = subprocess.run([*command, "-m", trial.path], input=text, stdout=subprocess.PIPE, text=True)
            if out.returncode > 1:
                sys.exit(out.returncode)
            _, found, true = align.agree(out.stdout.split("\n"), sure)
            return 2 * found * true / max(found + true, 1e-9), found, true
        marks = {(layer, head): mark(layer, [head]) for layer in trial.layers
                 for head in range(min(trial.model.decoder[layer].heads, 62))}
        order = sorted(marks, key=lambda x: (-marks[x][0], x))
        print("| layer:heads | mark | of the sure links | sure of its links |\n|---|---|---|---|")

        def row(layer, heads, all_three):
            print(f"| {layer}:{','.join(map(str, heads))} | "
                  + " | ".join(f"{100 * x:.1f}" for x in all_three) + " |", flush=True)
        for layer, head in order[:o.show]:
            row(layer, [head], marks[layer, head])
        layer, heads, best = order[0][0], [order[0][1]], marks[order[0]]
        for other, head in order[1:]:
            if other == layer and marks[other, head][0] > best[0] / 2:
                joined = mark(layer, sorted(heads + [head]))
                if joined[0] > best[0] + GAIN:
                    heads, best = sorted(heads + [head]), joined
                    row(layer, heads, best)
    print(f"--align {layer}:{','.join(map(str, heads))}")


if __name__ == "__main__":
    main()
