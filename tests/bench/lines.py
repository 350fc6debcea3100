#!/usr/bin/env python3
"""Measure lines translated one at a time, and the start of a program.

    make
    tests/python tests/bench/lines.py MODEL NEWS      # NEWS: a file of lines
    tests/python tests/bench/lines.py MODEL NEWS --seconds 60

Lines of 15 to 30 words are translated one by one through Python with one
thread, with beams 1, 2 and 4 in turn. Printed are milliseconds from call to
result: the median, the 90th and the 99th percentile. Then moe-translate is
started for one word, 30 times: the median, the fastest and the slowest start.
"""
import argparse
import os
import statistics
import subprocess
import time

import moe_translate

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def one_by_one(model, lines, beams, seconds):
    """Print the milliseconds of each beam; all take turns, so that a slow phase of the machine meets all of them."""
    times = {beam: [] for beam in beams}
    translators = {beam: moe_translate.Translator(model, beam=beam, threads=1) for beam in beams}
    end, i = time.monotonic() + seconds, 0
    for translator in translators.values():
        translator.translate(lines[0])
    while time.monotonic() < end:
        for beam, translator in translators.items():
            begin = time.perf_counter()
            translator.translate(lines[i % len(lines)])
            times[beam].append(1000 * (time.perf_counter() - begin))
        i += 1
    for beam, found in times.items():
        cuts = statistics.quantiles(found, n=100)
        print(f"beam {beam}: {len(found)} lines, p50 {cuts[49]:.2f} ms, p90 {cuts[89]:.2f} ms, p99 {cuts[98]:.2f} ms")


def start(model, rounds):
    """Print the milliseconds from start to exit for one word."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        subprocess.run([os.path.join(ROOT, "moe-translate"), "-q", "-m", model, "Hello."], check=True,
                       stdout=subprocess.DEVNULL)
        found.append(1000 * (time.perf_counter() - begin))
    print(f"start: median {statistics.median(found):.1f} ms, {min(found):.1f} to {max(found):.1f} ms")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("news")
    p.add_argument("--seconds", type=float, default=20)
    p.add_argument("--beams", default="1,2,4")
    o = p.parse_args()
    with open(o.news, encoding="utf-8") as file:
        lines = [line.strip() for line in file if 15 <= len(line.split()) <= 30]
    one_by_one(o.model, lines, [int(beam) for beam in o.beams.split(",")], o.seconds)
    start(o.model, 30)


if __name__ == "__main__":
    main()
