#!/usr/bin/env python3
"""How many instructions the scanners of text and HTML take for 256 KB, 512 KB
and 1 MB of what costs each of them most, counted by callgrind.

    make build/test_linear && tests/bench/growth.py

build/test_linear says by its own steps which of its triggers that is, and says
for all of them that twice the text takes at most 2.3 times the steps; here
instructions are counted, those of libraries too. Needs valgrind; some minutes.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile

SCANNERS = ("sentences clauses halves messages messages_shown loops languages json_strings html_of_texts "
            "html_of_markup html_of_numbers xml_of_markup guards spans").split()
MOST = 2.3


def worst(program, scanner):
    """(steps a byte, "TRIGGER BEGINNING")"""
    said = subprocess.run([program, scanner], capture_output=True, text=True, check=True)
    size, steps, trigger = re.search(r"most steps for (\d+) bytes: (\d+), by trigger (.+)",
                                     said.stdout + said.stderr).groups()
    return int(steps) / int(size), trigger


def instructions(program, scanner, trigger, size):
    with tempfile.NamedTemporaryFile() as file:
        done = subprocess.run(["valgrind", "--tool=callgrind", "--callgrind-out-file=" + file.name,
                               "--toggle-collect=grow*", program, scanner], capture_output=True, text=True, check=True,
                              env=dict(os.environ, MOE_TEST_LINEAR=str(size), MOE_TEST_TRIGGER=trigger))
    return int(re.search(r"Collected : (\d+)", done.stderr).group(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scanners", nargs="*", metavar="SCANNER", help="(all: %s)" % " ".join(SCANNERS))
    parser.add_argument("--size", type=int, default=256, metavar="KB", help="the first size (%(default)s)")
    parser.add_argument("--program", default="build/test_linear")
    args = parser.parse_args()
    steep = 0
    print("| scanner | trigger | steps a byte |" + "".join(f" {args.size << i} KB |" for i in range(3)) + " growth |")
    print("|---|---|---|---|---|---|---|")
    for scanner in args.scanners or SCANNERS:
        steps, trigger = worst(args.program, scanner)
        counts = [instructions(args.program, scanner, trigger, args.size << 10 + i) for i in range(3)]
        growth = max(b / a for a, b in zip(counts, counts[1:]))
        steep += growth > MOST
        print(f"| {scanner} | {trigger} | {steps:.0f} | " + " | ".join(f"{x / 1e6:,.0f} M" for x in counts) +
              f" | {growth:.2f} |", flush=True)
    return 1 if steep else 0


if __name__ == "__main__":
    sys.exit(main())
