#!/usr/bin/env python3
"""Compare how often moe and other cache policies find an expert in memory.

    make build/bank_reads
    tests/python tests/bench/belady.py [--steps N] [--text FILE] [--target de]

The policies are moe's (`bank_reads` drives the sections Expert cache and Expert
bank of moe.c, including transit slots and prefetching), an LRU that processes
hits first, the fixed set of the most frequent experts, and Belady's optimum,
which knows the future. All policies process the same runs: sentences of 25
tokens, translations of 28, a beam of 4, and batches refilled by halves.
Prefetches count as reads. NLLB-MoE-54B and paper-2048 route uniformly.
NLLB-MoE-54B is also simulated with the expert frequencies of one direction of
the shipped model, each of whose 32 experts stands for 4 of 128; moe-translate
--routing measures them on tests/train/phrasebook.tsv or the lines of --text.

If rows are independent, no algorithm without knowledge of the future beats the
fixed set. Belady's hit rate is far higher if experts are needed rarely.

Prints a Markdown table. The exit status is 1 if moe is too many percentage
points below the fixed set or Belady's optimum. Standard library only.
"""
import argparse
import csv
import heapq
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, OrderedDict

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN, BUILD = (os.path.join(ROOT, os.environ.get(name, default)) for name, default in (("BIN", "."), ("BUILD", "build")))
MODEL = os.path.join(ROOT, "models", "en-de-fr-es.bin")
GIB = 1 << 30
BEAM, SOURCE, TARGET = 4, 25, 28
BELOW_FIXED = 4  # maximum lead of the fixed set over moe in percentage points


def rows_over(weights, k):
    """Return (number of experts, function that samples k experts per row according to the weights)."""
    n, sums = len(weights), list(itertools.accumulate(weights))

    def draw(r, rows):
        found = Counter()
        drawn = r.choices(range(n), cum_weights=sums, k=k * rows)
        for i in range(0, k * rows, k):
            own = set(drawn[i:i + k])
            while len(own) < k:
                own.update(r.choices(range(n), cum_weights=sums))
            found.update(own)
        return found
    return n, draw


def rows_over_groups(groups, each, k):
    """Return (number of experts, function that samples k groups per row and k experts in each group)."""
    def draw(r, rows):
        return Counter(group * each + expert for _ in range(rows) for group in r.sample(range(groups), k)
                       for expert in r.sample(range(each), k))
    return groups * each, draw


class Network:
    def __init__(self, name, slab, encoder, decoder, budgets, below):
        self.name, self.slab, self.budgets, self.below = name, slab, budgets, below  # Belady's maximum lead in points
        self.mixtures, self.encoders = encoder + decoder, len(encoder)
        self.experts = sum(n for n, _ in self.mixtures)

    def runs(self, batch, steps, r):
        """Yield (mixture, {expert: rows}) for each run of a mixture; yield None when a third of the steps is done."""
        for step in range(steps):
            if step == steps // 3:
                yield None
            new = batch // 2 if step % (TARGET // 2) == 0 else 0  # sentences that replace half of the batch
            for m in range(self.encoders if new else 0):
                yield m, self.mixtures[m][1](r, new * SOURCE)
            for m in range(self.encoders, len(self.mixtures)):
                yield m, self.mixtures[m][1](r, new + BEAM * (batch - new))


def bank(network, runs, slots, threads=2):
    """Run moe's policy (bank_reads); return the share of visits without a read."""
    numbers = [slots, threads, len(network.mixtures), network.encoders, *(n for n, _ in network.mixtures)]
    text = [" ".join(map(str, numbers))]
    for run in runs:
        text.append("-1" if run is None else f"{run[0]} {len(run[1])} " + " ".join(
            f"{expert} {rows}" for expert, rows in run[1].items()))
    done = subprocess.run([os.path.join(BUILD, "bank_reads")], input="\n".join(text), capture_output=True, text=True,
                          check=True)
    visits, reads = map(int, done.stdout.split()[:2])
    return 1 - reads / visits


def lru(runs, slots):
    held, hits, visits = OrderedDict(), 0, 0
    for run in runs:
        if run is None:
            hits = visits = 0
            continue
        wanted = [(run[0], expert) for expert in run[1]]
        here = [x for x in wanted if x in held]
        hits, visits = hits + len(here), visits + len(wanted)
        for x in here:
            held.move_to_end(x)
        for x in wanted:
            if x not in held:
                held[x] = True
                if len(held) > slots:
                    held.popitem(last=False)
    return hits / visits


def fixed(runs, slots):
    counted = [run for run in itertools.dropwhile(lambda run: run is not None, runs) if run]
    needed = Counter((mixture, expert) for mixture, experts in counted for expert in experts)
    return sum(n for _, n in needed.most_common(slots)) / sum(needed.values())


def belady(runs, slots):
    """After each run, keep the experts that are needed soonest; return the share of hits."""
    after, following = [], {}
    for i in range(len(runs) - 1, -1, -1):  # find when each expert is needed next
        wanted = [(runs[i][0], expert) for expert in runs[i][1]] if runs[i] else []
        after.append([(x, following.get(x, len(runs))) for x in wanted])
        following.update((x, i) for x in wanted)
    held, farthest, hits, visits = {}, [], 0, 0
    for run, needed in zip(runs, reversed(after)):
        if run is None:
            hits = visits = 0
            continue
        hits, visits = hits + sum(x in held for x, _ in needed), visits + len(needed)
        for x, when in needed:
            held[x] = when
            heapq.heappush(farthest, (-when, x))
        while len(held) > slots:
            when, x = heapq.heappop(farthest)
            if held.get(x) == -when:
                del held[x]
    return hits / visits


def phrases(language):
    with open(os.path.join(ROOT, "tests", "train", "phrasebook.tsv"), encoding="utf-8", newline="") as file:
        return [line["text"] for line in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
                if line["language"] == language]


def popularity(lines, target):
    """Return the frequency of each expert in the shipped model's encoder mixture and decoder mixture."""
    with tempfile.TemporaryDirectory() as folder:
        routing = os.path.join(folder, "routing.jsonl")
        subprocess.run([os.path.join(BIN, "moe-translate"), "-m", MODEL, "-s", "en", "-t", target, "-q", "--beam",
                        str(BEAM), "--rerank", "0", "--routing", routing], input="\n".join(lines) + "\n", text=True,
                       check=True, stdout=subprocess.DEVNULL)
        found = subprocess.run([os.path.join(BIN, "moe-routing"), "--json", routing], capture_output=True, check=True)
    return [layer["load"] for layer in json.loads(found.stdout)["layers"]]


def networks(lines, target):
    def nllb(name, weights, below):
        return Network(name, 17_907_712, *([rows_over(w, 2)] * 6 for w in weights), (4, 8, 16), below)
    shipped = [[x for x in weights for _ in range(4)] for weights in popularity(lines, target)]
    yield nllb("NLLB-MoE-54B, one direction", shipped, 4.5)
    yield nllb("NLLB-MoE-54B, uniform", [[1] * 128] * 2, 11)
    yield Network("paper-2048, uniform", 1_146_880, [rows_over_groups(32, 64, 2)], [rows_over_groups(32, 64, 2)],
                  (1, 2, 3), 26.5)


def compare(network, batch, steps):
    """Yield (budget in GiB, hit rates of LRU, moe, the fixed set and Belady in %) for each budget."""
    runs = list(network.runs(batch, steps, random.Random(batch)))
    for budget in network.budgets:
        slots = min(network.experts, budget * GIB // network.slab)
        yield budget, *(100 * by(runs, slots) for by in (lru, lambda *x: bank(network, *x), fixed, belady))


def too_low(network, found, best_fixed, best):
    return best - found > network.below or best_fixed - found > BELOW_FIXED


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=900, help="decoder steps; the first third is warm-up (900)")
    parser.add_argument("--batch", default="32,128", help="sentences at once (32,128)")
    parser.add_argument("--text", help="English lines (the phrases of the phrasebook)")
    parser.add_argument("--target", default="de")
    o = parser.parse_args()
    lines = phrases("en")
    if o.text:
        with open(o.text, encoding="utf-8") as file:
            lines = file.read().splitlines()
    print("| experts, and rows | batch | `--expert-memory` | LRU, % | moe, % | fixed set, % | Belady, % |")
    print("|---|---|---|---|---|---|---|")
    broken = 0
    for network in networks(lines, o.target):
        for batch in map(int, o.batch.split(",")):
            for budget, *shares in compare(network, batch, o.steps):
                broken += too_low(network, *shares[1:])
                print(f"| {network.name} | {batch} | {budget}G |", *(f"{x:.1f} |" for x in shares),
                      "too low" * too_low(network, *shares[1:]), flush=True)
    return broken > 0


if __name__ == "__main__":
    sys.exit(main())
