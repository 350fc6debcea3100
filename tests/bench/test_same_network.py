#!/usr/bin/env python3
"""Test that same_network.py prints nothing except input for its table. Prints `ok NAME` or `FAIL NAME` per test."""
import json
import os
import subprocess
import sys
import tempfile

from suite import Suite

try:
    import numpy
except ImportError:
    numpy = None
HERE = os.path.dirname(os.path.abspath(__file__))
test = Suite()


def run(*command, folder=HERE):
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)


@test.needs(numpy, "NumPy")
def converting_a_network_prints_no_results():
    with tempfile.TemporaryDirectory() as folder:
        done = run("-c", "import argparse, sys, same_network as s; "
                   "s.converted(argparse.Namespace(folder=sys.argv[1]), 'marian', 'q8')", folder)
        assert done.returncode == 0 and os.path.exists(folder + "/marian-q8.bin"), done.stderr[-500:]
        assert done.stdout == "" and "marian-q8.bin" in done.stderr, (done.stdout, done.stderr)


@test
def invalid_lines_are_reported():
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/results", "w", encoding="utf-8") as file:
            file.write("written: opus.bin\n")
        done = run("same_network.py", "table", folder + "/results")
        assert done.returncode == 1 and "line 1 was not printed" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr, done.stderr


@test
def results_with_other_numbers_of_threads_are_separate_rows():
    """An engine that got only half of its processors must not seem slower per second of processor time."""
    def line(threads, moe, peer, cpus):
        round_ = {"moe": moe, "peer": peer, "moe_cpus": threads, "peer_cpus": cpus}
        machine = {"cpu": "x", "isa": "avx2", "dram_gbytes_s": 1, "integer_gops": 1}
        return json.dumps({"network": "opus-base", "lengths": "forced", "batch": 32, "beam": 4, "sentences": 32,
                           "peer": "p", "moe_mb": 1, "peer_mb": 2, "share": 0.5, "date": "d", "threads": threads,
                           "machine": machine, "rounds": [round_]})
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/results", "w", encoding="utf-8") as file:
            file.write(line(1, 100, 50, 1) + "\n" + line(2, 200, 50, 1) + "\n")
        rows = run("same_network.py", "table", "--min-cpus", "0.4", folder + "/results").stdout.splitlines()[2:]
        cells = [[x.strip() for x in row.split("|")[3:10]] for row in rows]
        assert cells == [["1", "4", "32", "100", "50", "2.00", "2.00"], ["2", "4", "32", "200", "50", "4.00", "2.00"]]


if __name__ == "__main__":
    sys.exit(test.run())
