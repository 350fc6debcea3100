#!/usr/bin/env python3
"""moe-translate as several mpirun processes that share a model's experts: the same output as from one process,
lines that fail, the distribution of busy experts, rejected options, different builds, a killed process.

Usage: tests/python tests/programs/test_ranks.py     (`make test-mpi` installs and builds what it needs)
Prints `ok NAME`, `skip NAME: why` or `FAIL NAME` per test; standard library only. MPI_BIN is the folder of the build
with MPI=1. tests/engine/test_ranks.c tests the engine's part without MPI.
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import several_models
import small_models
from suite import Suite

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("MPI_BIN", "build/mpi") / "moe-translate"
MODEL = ROOT / "models/en-de-fr-es.bin"
MPIRUN = ("mpirun --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 "
          "--mca btl_vader_single_copy_mechanism none").split()
COMMON = ["--threads", "1", "--batch", "4"]
suite = Suite()
test = suite.needs(shutil.which("mpirun") and PROGRAM.exists(), "mpirun, or no build with MPI=1,")
folder = pathlib.Path(tempfile.mkdtemp())

LINES = ["Where is the train station?", "I would like a cup of coffee.", "Hello", "", "The <b>old</b> house, {name}!",
         "We went to the market, but it was closed; so we went there once more and bought three apples."]
MESSAGE = ["{n, plural,", " one {a letter}", " other {# letters}", "}"]


def text(count):
    """Return a byte order mark and different lines of all lengths, including messages that span several lines."""
    lines = []
    for i in range(count):
        lines += MESSAGE if i % 17 == 8 else [f"{LINES[i % 6]} {i // 6}" if i > 11 else LINES[i % 6]]
    return "\ufeff" + "\n".join(lines)


def one(*options, given="", program=None):
    done = subprocess.run([program or PROGRAM, *COMMON, *options], input=given.encode(), capture_output=True,
                          timeout=120)
    return done.returncode, done.stdout, done.stderr.decode()


def ranks(n, *options, given=""):
    done = subprocess.run([*MPIRUN, "-n", str(n), str(PROGRAM), *COMMON, *options], input=given.encode(),
                          capture_output=True, timeout=240)
    return done.returncode, done.stdout, done.stderr.decode()


@test
def ranks_give_the_bytes_of_one_process():
    given = text(90)
    expected = one("-m", MODEL, "-t", "de", given=given)
    assert expected[0] == 0 and expected[1].count(b"\n") == given.count("\n") + 1, expected
    for n in 2, 3, 4:
        assert ranks(n, "-m", MODEL, "-t", "de", given=given)[:2] == expected[:2], n


@test
def ranks_support_all_output_formats():
    given = "\n".join(LINES * 3)
    for options in ["--json", "--nbest", "3", "--beam", "3"], ["--rerank", "0.5", "-s", "auto"], \
            ["--gating", "sigmoid"]:
        options = ["-m", MODEL, "-t", "fr", *options]
        expected = one(*options, given=given)
        assert expected[0] == 0 and ranks(2, *options, given=given)[:2] == expected[:2], options


@test
def there_can_be_fewer_lines_than_ranks():
    for given, words in ("", []), ("Hello.\n", []), ("", ["Good morning!"]):
        options = ["-m", MODEL, "-t", "es", *words]
        assert ranks(3, *options, given=given)[:2] == one(*options, given=given)[:2], (given, words)


@test
def failing_lines_are_reported_like_by_one_process():
    lines = text(60).split("\n")
    lines[50] = "a\0b"
    given, out = "\n".join(lines), folder / "out.txt"
    status, expected, log = one("-m", MODEL, "-t", "de", given=given)
    assert status == 1 and "line 51: " in log, log
    status, _, complaint = ranks(2, "-m", MODEL, "-t", "de", "-o", out, given=given)
    assert status == 1 and out.read_bytes() == expected, complaint
    for line in log.splitlines():
        assert line in complaint.splitlines(), (line, complaint)


@test
def paragraphs_routing_and_memory_limits_equal_one_process():
    given = text(40)
    for options in ["--paragraphs"], ["--routing", "FILE"], ["--routing", "FILE", "--json"], ["--max-memory", "4G"]:
        found = []
        for n in 1, 2, 3:
            file = folder / f"routing-{n}"
            words = ["-m", MODEL, "-t", "de", *[file if x == "FILE" else x for x in options]]
            done = one(*words, given=given) if n == 1 else ranks(n, *words, given=given)
            assert done[0] == 0, (options, n, done[2])
            found.append((done[1], file.read_bytes() if "FILE" in options else b""))
            file.unlink(missing_ok=True)
        assert found[0] == found[1] == found[2], options


@test
def reports_are_printed_once():
    counted = re.compile(r"lines +(\d+), (\d+)|(?:source|target) tokens +(\d+)")
    stats = [counted.findall(x[2]) for x in (one("-m", MODEL, "-t", "de", "--stats", given=text(40)),
                                             ranks(2, "-m", MODEL, "-t", "de", "--stats", given=text(40)))]
    assert stats[0] == stats[1] and len(stats[0]) == 3, stats
    for options in ["--self-test"], ["-t", "de", "--dry-run"]:
        expected, found = one("-m", MODEL, *options), ranks(2, "-m", MODEL, *options)
        assert found[0] == expected[0] == 0 and found[1].count(b"\n") == expected[1].count(b"\n"), (options, found)


@test
def ranks_support_several_models():
    models = several_models.one_way(folder / "models", "en-de", "de-fr")
    for options in ["-s", "en"], ["-s", "auto"], ["-s", "en", "--paragraphs"]:
        options = ["--models", models, "-t", "fr", "--beam", "2", "--rerank", "0", *options]
        expected = one(*options, given=text(20))
        assert expected[0] == 0 and ranks(2, *options, given=text(20))[:2] == expected[:2], options


@test
def unsupported_options_are_refused():
    for options in ["--expert-memory", "1G"], ["--device", "cuda"], ["--gating", "batchwise"]:
        status, out, log = ranks(2, "-m", MODEL, "-t", "de", *options, given="Hello.")
        assert status == 2 and not out and log.count(f"{options[0]}") == 2, (options, log)
        assert log.count("several processes (mpirun)") == 2, log


@test
def different_files_are_refused_on_all_ranks():
    for seed in 1, 2:
        small_models.write(folder / f"{seed}.bin", *small_models.translation(seed=seed))
    parts = []
    for model in folder / "1.bin", folder / "1.bin", folder / "2.bin":
        parts += [":", "-n", "1", str(PROGRAM), *COMMON, "--ids", "-m", str(model)]
    done = subprocess.run([*MPIRUN, *parts[1:]], input=b"5 6\n", capture_output=True, timeout=120)
    log = done.stderr.decode()
    assert done.returncode == 3 - 1 and not done.stdout, (done.returncode, log)
    assert log.count("the ranks have different model files") == 3, log
    missing = [*parts[1:-1], str(folder / "none.bin")]
    done = subprocess.run([*MPIRUN, *missing], input=b"5 6\n", capture_output=True, timeout=120)
    assert done.returncode in (3, 4) and not done.stdout and "none.bin" in done.stderr.decode(), done


def mixed(*parts, given):
    """Run ranks of different programs. Each part is (number of ranks, mpirun options, program, program options)."""
    command = []
    for n, before, program, options in parts:
        command += [":", "-n", str(n), *before, f"{PROGRAM}{program}", *COMMON, *map(str, options)]
    done = subprocess.run([*MPIRUN, *command[1:]], input=given.encode(), capture_output=True, timeout=120)
    return done.returncode, done.stdout, done.stderr.decode()


@test
def different_builds_are_refused_on_all_ranks():
    """All ranks fail if rank 0 or the last rank runs a build with a different engine or text code."""
    small_models.write(folder / "small.bin", *small_models.translation(seed=1))
    out = folder / "refused.txt"
    options = ["--ids", "-m", folder / "small.bin", "-o", out]
    for other, words in ("-engine", "different builds of moe:"), ("-program", "different builds of moe-translate:"):
        for programs in ("", other), (other, ""):
            status, written, log = mixed((2, [], programs[0], options), (1, [], programs[1], options), given="5 6\n")
            assert status == 2 and not written and not out.exists(), (status, written, log)
            assert log.count(words) == 3, log


@test
def compilers_and_instruction_sets_can_differ():
    given, options = text(40), ["-m", MODEL, "-t", "de"]
    expected = one(*options, given=given)
    parts = (1, [], "", options), (1, ["-x", "MOE_ISA=portable"], "-plain", options)
    assert mixed(*parts, given=given)[:2] == expected[:2]


@test
def different_options_end_all_ranks():
    options = ["-m", MODEL, "-t", "de"]
    status, out, log = mixed((1, [], "", options), (1, [], "", [*options, "--stats"]), given="Hello.\n")
    assert status == 2 and not out and log.count("all mpirun processes must have the same options") == 2, \
        (status, out, log)


@test
def busy_experts_are_distributed():
    sample, loads, given = folder / "sample.tsv", folder / "loads.bin", text(60)
    sample.write_text("".join(f"en\tde\t{line}\n" for line in LINES if line))
    done = subprocess.run([PROGRAM.with_name("moe-calibrate"), "--loads", "-m", MODEL, "-o", loads, "--text", sample],
                          capture_output=True, timeout=120)
    assert done.returncode == 0 and loads.read_bytes().count(b".experts.load") == 2, done
    expected = one("-m", MODEL, "-t", "de", given=given)
    assert ranks(3, "-m", loads, "-t", "de", given=given)[:2] == expected[:2]
    # Loads change only the distribution of experts, but ranks must still open identical files.
    parts = [(1, [], "", ["-m", model, "-t", "de"]) for model in (MODEL, loads)]
    status, out, log = mixed(*parts, given=given)
    assert status == 2 and not out and log.count("the ranks have different model files") == 2, (status, log)


def process_of(rank, parent):
    """Return the process id of a rank that the mpirun process `parent` has started."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) != parent:
                continue
            if f"OMPI_COMM_WORLD_RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        except OSError:
            pass
    return None


def runs(process):
    """Return whether a process is running, i.e. exists and is not a zombie."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@test
def a_killed_rank_ends_the_job_after_whole_lines():
    out = folder / "killed.txt"
    lines = [f"The number of this house is {i}." for i in range(20000)]
    (folder / "in.txt").write_text("".join(line + "\n" for line in lines))
    options = ["-m", str(MODEL), "-t", "de", "--beam", "1", "-i", str(folder / "in.txt"), "-o", str(out)]
    job = subprocess.Popen([*MPIRUN, "-n", "2", str(PROGRAM), *COMMON, *options], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while time.monotonic() < end and (not out.exists() or not out.stat().st_size):
        time.sleep(0.05)
    others = [process_of(rank, job.pid) for rank in (0, 1)]
    assert all(others), others
    os.kill(others[1], signal.SIGKILL)
    _, log = job.communicate(timeout=60)
    assert job.returncode, log
    end = time.monotonic() + 60
    while runs(others[0]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not runs(others[0])
    written = out.read_bytes()
    assert written.endswith(b"\n"), written[-100:]
    count = written.count(b"\n")
    expected = one("-m", MODEL, "-t", "de", "--beam", "1", given="".join(line + "\n" for line in lines[:count]))
    assert 0 < count < len(lines) and written == expected[1], count


if __name__ == "__main__":
    failed = suite.run(*sys.argv[1:])
    shutil.rmtree(folder)
    sys.exit(failed)
