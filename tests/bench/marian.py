#!/usr/bin/env python3
"""Compare the speed of moe and Bergamot with the same Marian student.

    P=~/.pyenv/versions/3.10.13/bin/python
    $P -m venv /tmp/bergamot && /tmp/bergamot/bin/pip install bergamot==0.4.5
    .venv/bin/python tests/bench/marian.py -m en-pt.bin --lines news500.en \\
        --peer /tmp/bergamot/bin/python --config DIR/config.intgemm8bitalpha.yml

In each round, the programs take turns to translate all lines, both in batches
and one at a time. A line of the table has medians of the rounds: processor and
wall seconds for the lines alone (Bergamot measures these itself; for moe, a
process with one line is subtracted), sentences per second, peak resident
memory, and the start-up time (a process with one line).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def timed(command, text):
    """Run a process; return (wall seconds, processor seconds, peak resident bytes, standard error)."""
    with tempfile.TemporaryFile() as into, tempfile.TemporaryFile() as log:
        into.write(text.encode())
        into.seek(0)
        begin = time.monotonic()
        process = subprocess.Popen(command, stdin=into, stdout=subprocess.DEVNULL, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.monotonic() - begin
        log.seek(0)
        stderr = log.read().decode()
    if status:
        sys.exit(f"{' '.join(command)}: {stderr}")
    rss = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return wall, used.ru_utime + used.ru_stime, rss, stderr


def moe(options, text, threads, one, more):
    command = [options.moe, "-q", "-m", options.model, "--threads", str(threads), *options.options.split(), *more]
    if one:
        command += ["--batch", "1"]
    start = timed(command, "Hello.\n")
    wall, cpu, rss, _ = timed(command, text)
    return wall - start[0], cpu - start[1], rss, start[0]


def bergamot(options, text, threads, one, more):
    command = [options.peer, os.path.join(HERE, "peer_bergamot.py"), options.config, "--threads", str(threads), *more]
    found = json.loads(timed(command + ["--one"] * one, text)[3].splitlines()[-1])
    return found["wall"][0], found["cpu"][0], found["rss"], found["start"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--config", required=True, help="Bergamot's, in the folder of the same model")
    parser.add_argument("--peer", required=True, help="Python 3.10 with bergamot==0.4.5")
    parser.add_argument("--lines", required=True, help="text to translate")
    parser.add_argument("--moe", default="./moe-translate")
    parser.add_argument("--options", default="-t pt", help="of moe-translate (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with open(options.lines) as file:
        text = file.read()
    count = len(text.splitlines())
    sides = {
        "moe": (moe, []),
        "moe, all tokens": (moe, ["--shortlist=0"]),
        "Bergamot": (bergamot, []),
        "Bergamot, all tokens": (bergamot, ["--full"]),
    }
    found = {}
    for turn in range(options.rounds):
        for threads in options.threads:
            for one in False, True:
                if one and threads > 1:
                    continue  # threads do not speed up translating one sentence at a time
                names = list(sides) if turn % 2 == 0 else list(sides)[::-1]
                for name in names:
                    run, more = sides[name]
                    found.setdefault((threads, one, name), []).append(run(options, text, threads, one, more))
    print("| threads | at a time | side | processor s | wall s | sentences/s | : Bergamot | MB | start s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (threads, one, name), runs in found.items():
        wall, cpu, rss, start = (statistics.median(x[i] for x in runs) for i in range(4))
        pairs = zip(runs, found[threads, one, "Bergamot"])
        ratio = statistics.median(theirs[0] / ours[0] for ours, theirs in pairs)
        print(f"| {threads} | {'one' if one else 'many'} | {name} | {cpu:.2f} | {wall:.2f} | {count / wall:.0f} | "
              f"{ratio:.2f} | {rss / 1e6:.0f} | {start:.3f} |")


if __name__ == "__main__":
    main()
