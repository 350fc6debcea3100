#!/usr/bin/env python3
"""A signal ends a working program, which writes only complete output lines.

Usage: tests/python tests/programs/test_stopping.py
Prints `ok NAME` or `FAIL NAME` per test; standard library only. BIN is the folder of the programs. tests/bench/stop.py
measures how long stopping takes.
"""
import array
import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time

from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
MODEL, DIGITS, LM = (f"{ROOT}/models/{x}.bin" for x in ("en-de-fr-es", "digits", "lm-en"))
TRANSLATE, ALIGN, SCORE, CLASSIFY, CALIBRATE = (f"{BIN}/moe-{x}" for x in
                                                ("translate", "align", "score", "classify", "calibrate"))
SIGNALS = signal.SIGHUP, signal.SIGINT, signal.SIGTERM
test = Suite()

for number in SIGNALS:  # children of nohup or a background shell inherit SIG_IGN
    signal.signal(number, signal.SIG_DFL)


def sentences(count, words=60):
    """Return long lines that are all different."""
    r = random.Random(5)
    known = ("the house of my old teacher stands near a river and nobody in this city knows why it was never sold to "
             "the man who wanted to buy it when he was young").split()
    return ["The " + " ".join(r.choice(known) for _ in range(words)) + "." for _ in range(count)]


def start(command, lines, endless=False):
    """Start a program. With `endless`, its input repeats the lines, so that it cannot finish before the signal."""
    text = "".join(line + "\n" for line in lines).encode()
    source, sink = os.pipe()

    def feed():
        with open(sink, "wb") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(text)
            while endless:
                pipe.write(text)

    process = subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    os.close(source)
    threading.Thread(target=feed, daemon=True).start()
    return process


def stopped(process, number, out=b""):
    """Send a signal to the program; return (exit status, output, messages)."""
    process.send_signal(number)
    rest, complaint = process.communicate(timeout=60)
    return process.returncode, out + rest, complaint.decode()


def still_runs_after(process, seconds):
    time.sleep(seconds)
    assert process.poll() is None, f"ended without a signal: {process.communicate()[1].decode()[-300:]}"


@test
def long_lines_are_interrupted():
    """The program has read all input, so the signal does not interrupt reading."""
    command = [TRANSLATE, "-m", MODEL, "-t", "de", "--split", "0", "--beam", "32"]
    for delay, number in zip((0.3, 1.0, 2.0), SIGNALS):
        process = start(command, sentences(32))
        still_runs_after(process, delay)
        status, out, complaint = stopped(process, number)
        assert status == 128 + number, status
        assert f"stopped by signal {int(number)}; {out.count(10)} complete lines" in complaint, complaint
        assert out.count(b"\n") < 32 and (not out or out.endswith(b"\n"))


@test
def one_long_line_is_interrupted():
    process = start([TRANSLATE, "-m", MODEL, "-t", "de", "--split", "0", "--beam", "64", "--max-len", "2000"],
                    sentences(1, 1000))
    still_runs_after(process, 1.0)
    status, out, _ = stopped(process, signal.SIGTERM)
    assert (status, out) == (128 + signal.SIGTERM, b""), (status, out)


@test
def finished_lines_are_written_completely_and_in_order():
    lines = sentences(6, 5) + sentences(200, 60)
    begun = [TRANSLATE, "-m", MODEL, "-t", "de", "--split", "0", "--batch", "2"]
    data = ("\n".join(lines[:12]) + "\n").encode()
    full = subprocess.run(begun + ["-q"], input=data, stdout=subprocess.PIPE, check=True)
    process = start(begun, lines)
    first = b""
    while first.count(b"\n") < 6:
        first += os.read(process.stdout.fileno(), 65536)
    status, out, _ = stopped(process, signal.SIGINT, first)
    assert status == 128 + signal.SIGINT and out.endswith(b"\n") and out.count(b"\n") >= 6
    whole = full.stdout.splitlines()
    assert out.splitlines()[:12] == whole[:out.count(b"\n")], "wrong lines"


@test
def scoring_aligning_and_routing_are_interrupted():
    lines = sentences(400)
    pairs = [f"{x}\t{y}" for x, y in zip(lines, lines[::-1])]
    with tempfile.TemporaryDirectory() as folder:
        for command, text in (([TRANSLATE, "-m", MODEL, "-t", "de", "--score"], pairs),
                              ([ALIGN, "-m", MODEL, "-s", "en", "-t", "de"], pairs),
                              ([ALIGN, "-m", MODEL, "-s", "en", "-t", "de", "--lexicon", "-o", folder + "/l"], pairs),
                              ([SCORE, "-m", LM], lines),
                              ([TRANSLATE, "-m", MODEL, "-t", "de", "--beam", "1", "--routing", folder + "/r"], lines)):
            process = start(command, text, endless=True)
            still_runs_after(process, 0.5)
            status, out, complaint = stopped(process, signal.SIGTERM)
            assert status == 128 + signal.SIGTERM, (command, status, complaint)
            assert not out or out.endswith(b"\n"), command
            assert "complete lines were written" in complaint, complaint
        assert os.listdir(folder) == [], os.listdir(folder)


@test
def waiting_for_input_uses_no_cpu_time():
    """A program without input sleeps until input or a signal arrives."""
    switches = "/proc/%d/task/%d/status"
    if not os.path.exists(switches % (os.getpid(), os.getpid())):
        return
    process = subprocess.Popen([TRANSLATE, "-m", MODEL, "-t", "de"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, bufsize=0)

    def switches_of():
        with open(switches % (process.pid, process.pid), encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("voluntary"))

    process.stdin.write(b"Good morning.\n")
    assert process.stdout.readline() == b"Guten Morgen.\n"
    still_runs_after(process, 0.5)
    before = switches_of()
    still_runs_after(process, 2)
    assert switches_of() <= before + 1, switches_of() - before
    process.stdin.write(b"Good morning.\n")
    assert process.stdout.readline() == b"Guten Morgen.\n"
    assert stopped(process, signal.SIGTERM)[0] == 128 + signal.SIGTERM


@test
def classifying_is_interrupted():
    r = random.Random(3)
    rows = [" ".join(str(r.random()) for _ in range(1296)) for _ in range(50)]
    process = start([CLASSIFY, "-m", DIGITS, "--threads", "1"], rows, endless=True)
    still_runs_after(process, 0.3)
    status, out, complaint = stopped(process, signal.SIGINT)
    assert status == 128 + signal.SIGINT and (not out or out.endswith(b"\n")), (status, complaint)
    assert f"{out.count(10)} complete lines were written" in complaint, complaint


@test
def interrupted_programs_leave_no_files():
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/pairs", "w", encoding="utf-8") as file:
            file.writelines(f"en\tde\t{x}\t{x}\n" for x in sentences(2000))
        process = start([CALIBRATE, "-m", MODEL, "-o", folder + "/out", "--text", folder + "/pairs"], [])
        still_runs_after(process, 1.0)
        status = stopped(process, signal.SIGTERM)[0]
        assert status in (128 + signal.SIGTERM, -signal.SIGTERM), status
        assert os.listdir(folder) == ["pairs"], os.listdir(folder)


@test
def a_second_signal_ends_a_blocked_program():
    """A program that writes to a full pipe is still blocked after the first signal; the second signal ends it."""
    process = start([TRANSLATE, "-m", MODEL, "-t", "de", "--beam", "1", "--json"], sentences(40, 8) * 20)
    waiting, before, same = array.array("i", [0]), 0, 0
    while same < 10:  # until the pipe is full and receives nothing for a second
        time.sleep(0.1)
        fcntl.ioctl(process.stdout.fileno(), termios.FIONREAD, waiting)
        same = same + 1 if waiting[0] == before > 16384 else 0
        before = waiting[0]
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    process.communicate()


@test
def a_signal_interrupts_opening_a_model():
    process = start([TRANSLATE, "-m", MODEL, "-t", "de"], [])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM), process.returncode


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:]))
