#!/usr/bin/env python3
"""The shipped small models give the output that was recorded at their release, with every instruction set of this
machine.

    tests/programs/test_models.py            prints `ok NAME` and `FAIL NAME`
    tests/programs/test_models.py --write    writes tests/golden/models.json with the current output

The inputs are token ids for the language model and rows of numbers for the classifier. The translation model contains
its own golden sentences, which test_cli.py tests with `moe-translate --self-test`.
"""
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
GOLDEN = os.path.join(ROOT, "tests", "golden", "models.json")


def numbers(seed):
    """Yield pseudo-random integers, which are the same on every machine."""
    while True:
        seed = (seed * 1103515245 + 12345) % (1 << 31)
        yield seed >> 8


def sentences():
    random = numbers(1)
    return "".join(" ".join(str(4 + next(random) % 3900) for _ in range(length)) + "\n"
                   for length in (1, 2, 5, 9, 14, 25))


def images():
    """Return rows of 36 x 36 pixels with two strokes at random positions."""
    random, rows = numbers(2), []
    for _ in range(12):
        ink = [0.0] * (36 * 36)
        for _ in range(2):
            x, y, dx, dy = next(random) % 30, next(random) % 30, next(random) % 3 - 1, next(random) % 2
            for step in range(12):
                for wide in (0, 1):
                    at = min(max(y + dy * step, 0), 35) * 36 + min(max(x + dx * step + wide, 0), 35)
                    ink[at] = 1 - step / 16
        rows.append(" ".join("%g" % v for v in ink))
    return "\n".join(rows) + "\n"


def run(isa, program, *arguments, text):
    command = [os.path.join(BIN, program), *arguments, "--isa", isa, "-q"]
    return subprocess.run(command, input=text, stdout=subprocess.PIPE, cwd=ROOT, text=True,
                          check=True).stdout.splitlines()


CASES = {
    "the language model gives the recorded scores": lambda isa: run(
        isa, "moe-score", "-m", "models/lm-en.bin", "--ids", text=sentences()),
    "the classifier of digits gives the recorded classes": lambda isa: run(
        isa, "moe-classify", "-m", "models/digits.bin", "--top", "3", text=images()),
}


def instruction_sets():
    """Return the instruction sets that --version lists for the build and that this machine supports."""
    words = subprocess.run([os.path.join(BIN, "moe-score"), "--version"], stdout=subprocess.PIPE, text=True,
                           check=True).stdout.split()
    names = [x.strip(",;()") for x in words]
    out = []
    for name in dict.fromkeys(["portable"] + names):
        if name.isalnum() and not name.isdigit():
            found = subprocess.run([os.path.join(BIN, "moe-score"), "-m", os.path.join(ROOT, "models", "lm-en.bin"),
                                    "--isa", name, "-q"],
                                   input="", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
            if found.returncode == 0:
                out.append(name)
    return out


def main():
    if sys.argv[1:] == ["--write"]:
        with open(GOLDEN, "w", encoding="utf-8") as file:
            json.dump({name: case("portable") for name, case in CASES.items()}, file, indent=1)
            file.write("\n")
        return
    with open(GOLDEN, encoding="utf-8") as file:
        golden = json.load(file)
    sets, failed = instruction_sets(), 0
    for name, case in CASES.items():
        wrong = [isa for isa in sets if case(isa) != golden[name]]
        print(f"FAIL {name}: other bytes with {', '.join(wrong)}" if wrong else f"ok {name} ({', '.join(sets)})")
        failed += bool(wrong)
    print(f"{len(CASES) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
