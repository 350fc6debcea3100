#!/usr/bin/env python3
"""Check that more memory for experts never reduces the speed.

    make all bench && ./moe-make-random --preset paper-2048 --type q4 -o big.bin
    tests/bench/budgets.py -m big.bin 1G 2G 4G

Each budget takes --rounds turns. A turn warms up, translates --batch sentences
three times, and prints a line of JSON. A table of medians follows. The exit
status is 1 if a budget reaches less than 0.97 of a smaller budget's speed. The
bound in the table is the disk's speed for the bytes read, or the speed of the
budget that reads least, whichever is lower.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LEAST = 0.97


def turn(o, budget):
    lines = subprocess.run([os.path.join(ROOT, "moe-bench"), "-m", o.model, "--expert-memory", budget, "--batch",
                            str(o.batch), "--beam", str(o.beam), "--threads", str(o.threads), "--reps", "3"],
                           capture_output=True, text=True, check=True).stdout.splitlines()
    found = next(x for x in map(json.loads, lines) if x["what"] == "model")
    return {"budget": budget, **{key: found[key] for key in ("tok_s", "hit_rate", "bytes_token", "disk_gb_s",
                                                             "disk_cpu_s_gb")}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("budgets", nargs="+", help="ascending, e.g. 1G 2G 4G")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    o = parser.parse_args()
    turns = {budget: [] for budget in o.budgets}
    for _ in range(o.rounds):
        for budget, of in turns.items():
            of.append(turn(o, budget))
            print(json.dumps(of[-1]), flush=True)
    keys = [key for key in turns[o.budgets[0]][0] if key != "budget"]
    heads = ["budget", *keys, "of the bound", "to the best smaller one"]
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    best, slower = 0.0, False
    medians = {budget: {key: statistics.median(x[key] for x in of) for key in keys} for budget, of in turns.items()}
    computed = min(medians.values(), key=lambda x: x["bytes_token"])["tok_s"]
    for budget, median in medians.items():
        ratio = median["tok_s"] / best if best else None
        slower |= ratio is not None and ratio < LEAST
        read = median["disk_gb_s"] * 1e9 / median["bytes_token"] if median["bytes_token"] else computed
        print(f"| {budget} | {' | '.join(f'{median[key]:.4g}' for key in keys)} | "
              f"{median['tok_s'] / min(computed, read):.2f} | {f'{ratio:.2f}' if ratio else ''} |")
        best = max(best, median["tok_s"])
    return slower


if __name__ == "__main__":
    sys.exit(main())
