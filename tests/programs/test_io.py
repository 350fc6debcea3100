#!/usr/bin/env python3
"""Short and interrupted reads and writes, and full disks.

Usage: tests/python tests/programs/test_io.py
Prints `ok NAME` or `FAIL NAME` per test; standard library only. BIN is the folder of the programs, BUILD
the folder of short_io.so and the C suites.
"""
import os
import subprocess
import sys
import tempfile

from small_models import classifier, language, translation, write
from suite import Skip, Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
SHORT = os.path.join(BUILD, "short_io.so")
test = Suite()


def path(program):
    return os.path.join(BIN, program)


def run(command, data=b"", prefix=(), **keywords):
    environment = dict(os.environ, **keywords.pop("env", {}))
    return subprocess.run([*prefix, *command], input=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300,
                          cwd=ROOT, env=environment, **keywords)


def models(folder):
    """Write a model of each kind to a folder."""
    for name, (meta, tensors) in {"translation": translation(), "language": language(),
                                  "classifier": classifier()}.items():
        write(f"{folder}/{name}.bin", meta, tensors)


IDS = "".join(" ".join(str(6 + (7 * i + 5 * k) % 30) for k in range(1 + i % 9)) + "\n" for i in range(60)).encode()
ROWS = "".join(" ".join(str((i * k) % 7 / 4 - 1) for k in range(6)) + "\n" for i in range(60)).encode()
TEXT = "".join(f"Where is my book?\nIt rains {'very ' * (i % 4)}much today.\n\n" for i in range(8)).encode()

# Arguments and input of each program. FOLDER contains the models; OUT is the output file.
COMMANDS = {
    "moe-translate": ("-m FOLDER/translation.bin --ids -q", IDS),
    "moe-translate, copied, into a file": ("-m FOLDER/translation.bin --ids -q --json --no-mmap -o OUT", IDS),
    "moe-translate, from a file, with routing": ("-m FOLDER/translation.bin --ids -q -i FOLDER/ids --routing OUT", b""),
    "moe-translate, text": ("-m models/en-de-fr-es.bin -q -t de --beam 1 --rerank 0 --threads 2 --no-mmap", TEXT),
    "moe-score": ("-m FOLDER/language.bin --ids -q --no-mmap", IDS),
    "moe-classify": ("-m FOLDER/classifier.bin -q --no-mmap -o OUT", ROWS),
    "moe-align": ("-m models/en-de-fr-es.bin -q -s en -t de", b"Where is my book?\tWo ist mein Buch?\n" * 5),
    "moe-align, a lexicon": ("-m models/en-de-fr-es.bin -q -s en -t de --ids --lexicon -o OUT",
                             b"".join(b"%d\t%d\n" % (i, i) for i in range(300, 800))),  # output of more than 4096 bytes
    "moe-info": ("--check FOLDER/translation.bin", b""),
    "moe-quantize": ("FOLDER/translation.bin OUT q8", b""),
    "moe-routing": ("FOLDER/routing.jsonl -o OUT", b""),
    "moe-make-random": ("--preset lm-32 -o OUT", b""),  # a large output file
}
WRITERS = [name for name, (words, _) in COMMANDS.items() if "OUT" in words]
LINE_BY_LINE = "moe-classify", "moe-translate, copied"  # the other programs write complete files or none


def prepare(folder):
    models(folder)
    with open(f"{folder}/ids", "wb") as file:
        file.write(IDS)
    done = run([path("moe-translate"), "-m", f"{folder}/translation.bin", "--ids", "-q", "--routing",
                f"{folder}/routing.jsonl"], IDS)
    assert done.returncode == 0, done.stderr.decode()


def command(name, folder, out):
    words = COMMANDS[name][0].replace("FOLDER", folder).replace("OUT", out).split()
    return [path(name.split(",")[0]), *words]


def result(name, folder, **keywords):
    """Run a command; return its status, standard output and output file."""
    out = f"{folder}/out"
    if os.path.exists(out):
        os.remove(out)
    done = run(command(name, folder, out), COMMANDS[name][1], **keywords)
    content = None
    if os.path.exists(out):
        with open(out, "rb") as file:
            content = file.read()
    return done.returncode, done.stdout, content, done.stderr.decode()


# ---- Short and interrupted reads and writes ----

@test
def short_and_interrupted_calls_do_not_change_results():
    calls = 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        count = f"{folder}/count"
        for name in COMMANDS.keys() - {"moe-make-random"}:
            wanted = result(name, folder)
            assert wanted[0] == 0, f"{name}: {wanted}"
            found = result(name, folder, env={"LD_PRELOAD": SHORT, "MOE_SHORT_IO_COUNT": count})
            assert found[:3] == wanted[:3], f"{name}: status {found[0]}, {found[3]}"
            with open(count, encoding="ascii") as file:
                calls += int(file.read())
    assert calls > 1000, f"only {calls} calls used short_io.so"


@test
def suites_pass_with_short_and_interrupted_calls():
    for name in "test_file", "test_damage", "test_output":
        done = run([os.path.join(BUILD, name)], env={"LD_PRELOAD": SHORT, "CMOCKA_MESSAGE_OUTPUT": "TAP"})
        wrong = [x for x in (done.stdout + done.stderr).decode().splitlines() if x.startswith("not ok")]
        assert done.returncode == 0, f"{name}: status {done.returncode}: {wrong[:3]}"


# ---- A full disk ----

def large_input(name):
    """Return input that makes a program write more than 4096 bytes."""
    return COMMANDS[name][1] * (100 if name.startswith(LINE_BY_LINE) else 1)


def inside(folder, size, script):
    """Run a shell script in a mount namespace in which FOLDER is a file system of SIZE bytes."""
    return run(["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else []), "sh", "-c",
                f"mount -t tmpfs -o size={size} tmpfs '{folder}' && {script}"])


@test
def a_full_disk_is_reported_and_leaves_no_file():
    """Even a full disk leaves an existing output file unchanged."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as disk:
        prepare(folder)
        if inside(disk, 4096, "true").returncode:
            raise Skip("no file system can be mounted")
        for name in WRITERS:
            with open(f"{folder}/in", "wb") as file:
                file.write(large_input(name))
            words = " ".join(command(name, folder, f"{disk}/out"))
            for before in ("", "old"):
                keep = f"printf {before} > '{disk}/out'; " if before else ""
                done = inside(disk, 4096, f"{keep}{words} < '{folder}/in' > /dev/null 2> '{folder}/log'; echo $?; "
                                          f"ls -A '{disk}'; cat '{disk}/out'")
                status, *rest = done.stdout.decode(errors="replace").splitlines()
                with open(f"{folder}/log", encoding="utf-8") as file:
                    log = file.read()
                assert (status, "No space left" in log) == ("4", True), f"{name}: status {status}: {log} {done}"
                assert len(log.splitlines()) == 1, f"{name}: {log}"
                if name.startswith(LINE_BY_LINE):
                    assert rest[:1] == ["out"], f"{name}: {rest[:3]}"
                else:
                    assert rest == (["out", "old"] if before else []), f"{name}: {rest[:3]}"


@test
def a_file_size_limit_is_reported():
    """A write beyond `ulimit -f` raises SIGXFSZ, which must not end a program silently."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for name in WRITERS:
            out = f"{folder}/out"
            if os.path.exists(out):
                os.remove(out)
            done = run(command(name, folder, out), large_input(name),
                       prefix=["sh", "-c", "ulimit -f 1; exec \"$0\" \"$@\""])
            log = done.stderr.decode()
            assert (done.returncode, len(log.splitlines())) == (4, 1) and "File too large" in log, \
                f"{name}: status {done.returncode}: {log}"


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
