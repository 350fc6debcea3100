#!/usr/bin/env python3
"""--help of every program and script succeeds and fits within 80 columns. test_options.c tests how it is printed.

Usage: tests/python tests/programs/test_help.py
Prints `ok NAME` or `FAIL NAME` per test; standard library only. BIN is the folder of the programs.
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

from suite import Skip, Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
COLUMNS = 80
test = Suite()


def text_of(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def sources(pattern):
    return sorted(glob.glob(pattern, root_dir=ROOT, recursive=True))


def help_of(*command):
    done = subprocess.run([*command, "--help"], cwd=ROOT, env=dict(os.environ, COLUMNS=str(COLUMNS)), encoding="utf-8",
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)
    missing = re.search(r"(?:No module named '|Python module )(numpy|torch|sentencepiece|sacrebleu)\b", done.stderr)
    if missing:
        raise Skip(f"no {missing[1]} here")
    assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr[-500:])
    assert re.match("usage: ", done.stdout, re.I), done.stdout[:100]
    long = [line for line in done.stdout.splitlines() if len(line) > COLUMNS]
    assert not long, long
    return done.stdout


def of_program(source):
    def names_every_option():
        name = os.path.basename(source)[:-2]
        text = help_of(os.path.join(BIN, name))
        assert "\n  -h, --help" in text and "\n  -V, --version" in text, text
        assert "Exit status" in text, text[-300:]
    return names_every_option


def of_script(path):
    return lambda: help_of(*(["tests/python"] if path.endswith(".py") else []), path)


def add(path, function):
    function.__name__ = os.path.basename(path).replace(".c", "")
    test(function)


programs = sources("tools/*/moe-*.c")
scripts = [x for folder in ("tools", "tests") for x in sources(folder + "/**/*.py")
           if "ArgumentParser(" in text_of(x) and not x.endswith("/test_help.py")
           and not x.startswith("tools/python/")]  # part of the Python package
for one in [*programs, "moe-documents.c", "moe-evaluate.c"]:
    add(one, of_program(one))
for one in [*scripts, "tools/install-deps", "tools/demo"]:
    add(one, of_script(one))


@test
def moe_documents_describes_options_like_moe_translate():
    def rows(program):
        text = re.sub(r"\n {20,}", " ", help_of(os.path.join(BIN, program)))
        return dict(re.findall(r"^ +((?:-\w, )?--[\w-]+(?: [A-Z]+)?)  +(.*)", text, re.M))

    theirs, ours = rows("moe-translate"), rows("moe-documents")
    same = {name for name in theirs if name in ours and theirs[name].startswith(ours[name])}
    assert {name.split("--")[1].split()[0] for name in same} >= {
        "model", "models", "target", "source", "beam", "rerank", "glossary", "threads", "version", "help"}, same


@test
def missing_modules_are_reported_or_loaded_from_the_environment():
    for script, option in ("tools/convert/convert.py", "--convert"), ("tools/train/train.py", "--train"):
        with tempfile.TemporaryDirectory() as at:
            at = os.path.realpath(at)
            for folder in "convert", "train":
                shutil.copytree(os.path.join(ROOT, "tools", folder), os.path.join(at, "tools", folder))
            run = lambda script=script, at=at: subprocess.run(
                [sys.executable, "-S", script, "--help"], cwd=at, capture_output=True, encoding="utf-8",
                env={x: y for x, y in os.environ.items() if x != "PYTHONPATH"})
            done = run()
            assert done.returncode == 1 and f"install-deps {option}\n" in done.stderr, done.stderr
            assert done.stderr.count("\n") == 1, done.stderr
            os.makedirs(os.path.join(at, ".venv", "bin"))
            python = os.path.join(at, ".venv", "bin", "python")
            with open(python, "w", encoding="utf-8") as file:
                file.write('#!/bin/sh\necho "$@"\n')
            os.chmod(python, 0o755)
            done = run()
            assert (done.returncode, done.stdout, done.stderr) == (0, f"{script} --help\n", ""), done


@test
def there_are_programs_and_scripts():
    assert len(programs) >= 10 and len(scripts) >= 7, (programs, scripts)


if __name__ == "__main__":
    sys.exit(test.run())
