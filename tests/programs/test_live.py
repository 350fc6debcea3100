#!/usr/bin/env python3
"""moe-translate --live: lines that grow on standard input.

Usage: tests/python tests/programs/test_live.py
Prints `ok NAME` or `FAIL NAME` per test; standard library only. BIN is the folder of the programs.
"""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading

from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.path.join(ROOT, os.environ.get("BIN", "."), "moe-translate")
COMMAND = [PROGRAM, "-m", os.path.join(ROOT, "models/en-de-fr-es.bin"), "-t", "de", "--beam", "2"]
test = Suite()


def run(words, data):
    return subprocess.run([*COMMAND, *words], input=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)


class Live:
    """A running moe-translate --live."""

    def __init__(self, *words):
        self.process = subprocess.Popen([*COMMAND, "--live", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, bufsize=0)
        self.timer = threading.Timer(300, self.process.kill)
        self.timer.start()

    def write(self, data):
        self.process.stdin.write(data)

    def until(self, pattern):
        """Read until the output ends with a pattern."""
        out = b""
        while not re.search(pattern + rb"\Z", out):
            byte = self.process.stdout.read(1)
            assert byte, out
            out += byte
        return out

    def end(self):
        out, err = self.process.communicate(timeout=300)
        self.timer.cancel()
        return self.process.returncode, out, err


def written(out):
    """Return the lines of an output as a terminal shows them."""
    return [line.split(b"\r")[-1] for line in out.split(b"\n")]


@test
def final_lines_are_those_of_moe_translate():
    lines = ["Where is my book?", "", "  Two sentences. They are short.  ", "The price is 3.50 {unit} at <b>most</b>.",
             "I WOULD LIKE TO GO HOME NOW", "no end", "a\tcell", "The weather is beautiful today. " * 3 + "Yes."]
    data = "\n".join(lines).encode()
    plain = run([], data)
    once = run(["--live"], data)
    assert (once.returncode, once.stdout) == (0, plain.stdout), once
    live = Live()
    for word in re.findall(rb"[ \t\n]*[^ \t\n]+", data):
        live.write(word)
    status, out, err = live.end()
    assert (status, written(out), err) == (0, plain.stdout.split(b"\n"), b""), (status, out, err)


@test
def output_grows_with_the_line():
    live = Live()
    live.write(b"The contract was")
    first = live.until(rb"\w \w+")
    assert b"\r" not in first and b"\n" not in first, first
    live.write(b" signed yesterday.\n")
    status, rest, err = live.end()
    whole = run([], b"The contract was signed yesterday.\n").stdout
    assert (status, written(first + rest), err) == (0, written(whole), b""), (first, rest, err)


@test
def a_line_can_begin_again():
    """A carriage return starts the line again, a backspace deletes a character, escape sequences are ignored."""
    expected = run([], b"Where is my book?\n" * 4).stdout.split(b"\n")
    out = run(["--live"], b"\rWe are\rWhere is my book?\r\n" b"Whexx\b\bre is my book?\n"
              b"\x1b[2K\r  noise \x1b[2K\rWhere is my \x1b[31mbook?\n" b"\bWhere is my book?\r")
    assert (out.returncode, written(out.stdout)) == (0, expected), out


@test
def bad_lines_have_messages():
    data = b"\xef\xbb\xbfGood morning!\nbad \xff byte\nGood\0day\n" + b"a" * (1 << 20) + b"bc\nGood morning!\n"
    plain, live = run([], data), run(["--live"], data)
    assert plain.returncode == live.returncode == 1
    assert written(live.stdout) == written(plain.stdout), live.stdout
    assert live.stderr == plain.stderr, (live.stderr, plain.stderr)


@test
def objects_of_each_change():
    live = Live("--json")
    live.write(b"It rains. The contract was")
    out = live.until(rb"stable\":\"Es[^\n]*\n")
    live.write(b" signed.\nbad \xff\n")
    status, rest, _ = live.end()
    all = [json.loads(line) for line in (out + rest).splitlines()]
    assert status == 1 and all[-1]["error"].startswith("invalid UTF-8 at byte 5"), all[-1]
    finals = [x for x in all if x["final"]]
    assert [x["line"] for x in finals] == [1, 2], finals
    assert finals[0]["translation"].encode() == run([], b"It rains. The contract was signed.").stdout[:-1], finals
    assert all[0]["line"] == 1 and not all[0]["final"], all[0]
    for x in all:
        assert x["translation"].startswith(x["stable"]), x


@test
def a_file_gets_final_lines_only():
    with tempfile.TemporaryDirectory() as folder:
        live = Live("-o", folder + "/out")
        live.write(b"The contract was ")
        live.write(b"signed.\n")
        assert live.end() == (0, b"", b"")
        with open(folder + "/out", "rb") as file:
            assert file.read() == run([], b"The contract was signed.").stdout


@test
def a_signal_stops_it():
    live = Live()
    live.write(b"It rains.\nThe contract was")
    live.until(rb"\w \w+")
    live.process.send_signal(signal.SIGTERM)
    status, _, err = live.end()
    assert (status, err) == (128 + signal.SIGTERM, b"moe-translate: stopped by signal 15; 1 complete lines were written\n")


@test
def options_that_exclude_it():
    for words in (["--nbest", "2"], ["--score"], ["--prefix"], ["--paragraphs"], ["--ids"], ["--context", "2"], ["text"]):
        done = run(["--live", *words], b"")
        assert done.returncode == 2 and b"--live" in done.stderr, (words, done)


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
