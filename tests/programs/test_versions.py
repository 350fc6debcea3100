#!/usr/bin/env python3
"""Model files of every published file version can still be opened and produce the recorded output.

    tests/programs/test_versions.py            prints `ok NAME` and `FAIL NAME`
    tests/programs/test_versions.py --write    adds new files to tests/golden/versions.json, with the programs' output

The files are the models in tests/golden. They never change, and their checksums are recorded. `moe-quantize` and
small_models.py wrote the files version-2*, one for each kind of model. Add such files for every new file version.
"""
import glob
import hashlib
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
FOLDER = os.path.join(ROOT, "tests", "golden")
GOLDEN = os.path.join(FOLDER, "versions.json")
KINDS = {"translation", "language", "classifier"}


def run(program, *arguments, text=""):
    done = subprocess.run([os.path.join(BIN, program), *arguments], input=text, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise AssertionError(f"{program} {' '.join(arguments)}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def models():
    """Return the names of the models in tests/golden."""
    for path in sorted(glob.glob(os.path.join(FOLDER, "*.bin"))):
        with open(path, "rb") as file:
            start = file.read(1 << 20)
        if start[:8] == b"MOEMODEL" and b"general.architecture" in start:
            yield os.path.basename(path)


def numbers(count, low, high):
    """Yield pseudo-random integers, which are the same on every machine."""
    state = 12345
    for _ in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        yield low + (state >> 8) % (high - low)


def ids(vocabulary):
    values = iter(numbers(60, 6, vocabulary))
    return "".join(" ".join(str(next(values)) for _ in range(length)) + "\n" for length in (1, 2, 3, 5, 8, 11))


def outputs(name, *options):
    """Run the program for a model's kind; return its output."""
    path = os.path.join(FOLDER, name)
    info = json.loads("\n".join(run("moe-info", "--check", "--json", path)))
    if info["kind"] == "classifier":
        values = iter(numbers(5 * info["inputs"], -100, 100))
        rows = "".join(" ".join(str(next(values) / 64) for _ in range(info["inputs"])) + "\n" for _ in range(5))
        lines = run("moe-classify", "-m", path, "-q", "--top", "2", *options, text=rows)
    elif info["kind"] == "language":
        lines = run("moe-score", "-m", path, "-q", "--ids", "--json", *options, text=ids(info["vocabulary"]))
        lines = [" ".join(map(str, json.loads(line)["token_logprobs"])) for line in lines]
    else:
        to = ["-t", info["languages"][-1]] if info["languages"] else []
        lines = run("moe-translate", "-m", path, "-q", "--ids", "--json", "--nbest", "2", "--beam", "3", *to, *options,
                    text=ids(info["vocabulary"]))
        lines = ["; ".join(f"{' '.join(map(str, best['ids']))}: {best['logprob']}"
                           for best in json.loads(line)["nbest"])
                 for line in lines]
    return info, lines


def record(name):
    with open(os.path.join(FOLDER, name), "rb") as file:
        checksum = hashlib.sha256(file.read()).hexdigest()
    info, lines = outputs(name)
    return {"sha256": checksum, "version": info["file_version"], "kind": info["kind"], "lines": lines}


def problem(name, wanted):
    """Describe what is wrong with a model in tests/golden; return None for a correct model."""
    if wanted is None:
        return "missing in versions.json: --write adds it"
    with open(os.path.join(FOLDER, name), "rb") as file:
        if hashlib.sha256(file.read()).hexdigest() != wanted["sha256"]:
            return "the file has changed: published files must not"
    for options in ([], ["--no-mmap", "--threads", "3"], ["--no-verify", "--isa", "portable", "--batch", "1"]):
        info, lines = outputs(name, *options)
        if info["file_version"] != wanted["version"] or lines != wanted["lines"]:
            return f"other output with {' '.join(options) or 'no options'}"
    return None


def main():
    known = {}
    if os.path.exists(GOLDEN):
        with open(GOLDEN, encoding="utf-8") as file:
            known = json.load(file)
    if sys.argv[1:] == ["--write"]:
        known.update({name: record(name) for name in models() if name not in known})
        with open(GOLDEN, "w", encoding="utf-8") as file:
            json.dump(dict(sorted(known.items())), file, indent=1)
            file.write("\n")
        return
    failures = [f"{name}: the file is gone" for name in sorted(known.keys() - set(models()))]
    newest = max((entry["version"] for entry in known.values()), default=0)
    failures += [f"version {version}: missing {kind} model" for version in range(1, newest + 1)
                 for kind in sorted(KINDS - {e["kind"] for e in known.values() if e["version"] == version})]
    for failure in failures:
        print("FAIL " + failure)
    passed = 0
    for name in models():
        try:
            why = problem(name, known.get(name))
        except AssertionError as broken:
            why = str(broken)
        print(f"FAIL {name}: {why}" if why else f"ok {name} (version {known[name]['version']})")
        failures += [why] if why else []
        passed += not why
    print(f"{passed} passed, {len(failures)} failed")
    sys.exit(len(failures) > 0)


if __name__ == "__main__":
    main()
