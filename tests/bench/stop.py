#!/usr/bin/env python3
"""Measure the time from a signal to a program's exit, with long lines in flight.

    tests/python tests/bench/stop.py -- ./moe-translate -t de --split 0

Sends the signal at moments spread over the program's run time, one per round.
Prints the median and the longest time. Fails if an output line is incomplete.
"""
import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time

SENTENCE = ("The committee that was elected in spring discussed for several hours whether the old railway station near "
            "the river should be sold, rebuilt or kept as it is")


def lines(count):
    return "".join(f"{SENTENCE} by the year {2000 + i}, and nobody could agree on that, because {SENTENCE.lower()}.\n"
                   for i in range(count)).encode()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--signal", default="SIGTERM")
    parser.add_argument("--lines", type=int, default=32)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    number, took = getattr(signal, args.signal), []
    with tempfile.TemporaryFile() as text:
        text.write(lines(args.lines))

        def start():
            text.seek(0)
            return subprocess.Popen(args.command, stdin=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

        whole, full = b"", 0.0
        for _ in range(2):  # the first run warms up
            begin = time.monotonic()
            whole = start().communicate()[0]
            full = time.monotonic() - begin
        for i in range(args.rounds):
            process = start()
            time.sleep(0.1 + (full - 0.1) * 0.8 * i / args.rounds)
            begin = time.monotonic()
            process.send_signal(number)
            out, complaint = process.communicate()
            end = time.monotonic()
            if process.returncode == 0 and out == whole:
                continue  # the program ended before the signal
            took.append(end - begin)
            if process.returncode not in (128 + number, -number):
                sys.exit(f"exit status {process.returncode}: {complaint.decode()}")
            if not whole.startswith(out) or (out and not out.endswith(b"\n")):
                sys.exit("incomplete output line")
    print(f"{args.lines} lines take {full:.2f} s; from {args.signal} to the exit "
          f"{1000 * statistics.median(took):.0f} ms (median), {1000 * max(took):.0f} ms (longest of {len(took)})")


main()
