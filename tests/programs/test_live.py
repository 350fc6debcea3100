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
    text = b"The contract was signed yesterday in Lisbon by both ministers. When does the next train to Berlin leave?\n"
    last = json.loads(run(["--live", "--json"], text).stdout.splitlines()[-1])  # split into sentences, unlike --json
    assert last["translation"].encode() == run([], text).stdout[:-1], last
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


SUBRIP = """1
00:00:01,000 --> 00:00:02,500
Where is my book?

2
00:00:02,600 --> 00:00:04,000
The weather is beautiful today,
and I would like

3
00:00:04,100 --> 00:00:06,000
to go home.

4
00:00:08,100 --> 00:00:09,000
- Hello!
- Good <i>morning</i>.

5
00:00:10,100 --> 00:00:12,000
It rains

6
00:00:19,100 --> 00:00:20,000
in the house
"""
WEBVTT = """\ufeffWEBVTT Kind: captions

NOTE It rains.
It rains.

intro
00:01.000 --> 00:02.500 align:start position:0%
It rains.


00:00:02.500 --> 00:00:03.000
It rains.

STYLE
::cue { color: red }
"""


def texts_of(subtitles):
    """Return the times and texts of the cues."""
    return [(block.split("\n")[1], block.split("\n")[2:]) for block in subtitles.strip().split("\n\n")]


@test
def subtitles_keep_their_times():
    def translated(text):
        return run([], text.encode()).stdout.decode()[:-1]

    live = Live()
    first, rest = SUBRIP.encode().split(b"\n\n", 1)
    live.write(first + b"\n\n")
    out = live.until(rb"\n\n")  # before the next cue
    live.write(rest)
    status, more, err = live.end()
    found, given = texts_of((out + more).decode()), texts_of(SUBRIP)
    assert (status, err) == (0, b"") and (out + more).count(b"\n") == SUBRIP.count("\n"), out + more
    assert [x[0] for x in found] == [x[0] for x in given] and [len(x[1]) for x in found] == [len(x[1]) for x in given]
    joined = " ".join(word for _, lines in found[1:3] for word in lines)
    assert joined == translated("The weather is beautiful today, and I would like to go home."), joined
    assert all(line for _, lines in found for line in lines), found
    assert found[3][1] == [translated("- Hello!"), translated("- Good <i>morning</i>.")], found[3]
    assert [found[4][1], found[5][1]] == [[translated("It rains")], [translated("in the house")]], found[4:]
    wanted = WEBVTT.replace("%\nIt rains.", "%\nEs regnet.").replace("000\nIt rains.", "000\nEs regnet.")[1:]
    done = run(["--live"], WEBVTT.replace("\n", "\r\n").encode())
    assert (done.returncode, done.stdout.decode()) == (0, wanted), done
    for text in "1\n\n2\nIt rains.\n", "12", "\n", "00:01 and later\n":  # other texts
        done = run(["--live"], text.encode())
        assert written(done.stdout) == written(run([], text.encode()).stdout) or text == "12", done


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
