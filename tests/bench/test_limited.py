#!/usr/bin/env python3
"""Test predictions of memory use. Prints `ok NAME` or `FAIL NAME`; requires root on Linux.

A mixture of 650 MB with random weights, evicted from the page cache, must translate in a memory group that is 64 MiB
larger than --dry-run's figure. A session of Hy-MT2-30B-A3B for 32 requests must need less than 1.8 GB, of which 80 MB
are reserved for prompts as long as the positions of the model.
"""
import json
import os
import re
import subprocess
import sys
import tempfile

from suite import Skip, Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
TRANSLATE, MAKE = (os.path.join(BIN, "moe-" + x) for x in ("translate", "make-random"))
IDS = "\n".join(" ".join(str(7 * i * i + 100 * line) for i in range(5, 25)) for line in range(8)) + "\n"
MORE = 64  # allowance in MiB
test = Suite()


def limited(folder, memory, model, *options):
    """Translate in a memory group of `memory` MiB; return (limited.py's result, the translations)."""
    with open(folder + "/ids", "w", encoding="ascii") as file:
        file.write(IDS)
    shell = f'"$0" "$@" < {folder}/ids > {folder}/out'
    done = subprocess.run(
        [sys.executable, os.path.join(ROOT, "tests", "bench", "limited.py"), "--memory", f"{memory}M", "--drop", model,
         "--", "sh", "-c", shell, TRANSLATE, "-m", model, "--ids", "--max-len", "24", "--batch", "4", *options],
        capture_output=True, text=True, timeout=600, check=False)
    if "memory.max" in done.stderr or "/sys/fs/cgroup" in done.stderr:
        raise Skip("cannot create memory groups: " + done.stderr.strip().splitlines()[-1])
    with open(folder + "/out", "rb") as file:
        return json.loads(done.stdout), file.read()


@test
def memory_including_file_pages_matches_the_dry_run():
    with tempfile.TemporaryDirectory() as folder:
        model = folder + "/model.bin"
        subprocess.run([MAKE, "--preset", "nllb-moe-1b", "--experts", "q4", "-o", model], check=True,
                       capture_output=True, timeout=600)
        budget = "--expert-memory", "64M"
        log = subprocess.run([TRANSLATE, "-m", model, "--ids", "--max-len", "24", "--batch", "4", *budget,
                              "--dry-run"], capture_output=True, text=True, check=True, timeout=60).stdout
        most = int(float(re.search(r"^peak +([0-9.]+) MiB$", log, re.M)[1])) + MORE
        whole, wanted = limited(folder, 4096, model, "--no-mmap")
        assert whole["status"] == 0 and whole["peak_group_mb"] > most + 100, (whole, most)
        free, out = limited(folder, 4096, model, *budget)  # the page cache could grow here, but must not
        assert free["status"] == 0 and free["peak_group_mb"] <= most and out == wanted, (free, log)
        tight, out = limited(folder, most, model, *budget)
        assert tight["status"] == 0 and out == wanted, (tight, log)


def session_mb(model, pool):
    """Return the memory of a session for 32 requests in MiB, excluding its pool of keys and values."""
    log = subprocess.run([TRANSLATE, "-m", model, "--ids", "--batch", "32", "--max-len", "256", "--context-memory",
                          str(pool), "--dry-run"], capture_output=True, text=True, check=True, timeout=60).stdout
    return float(re.search(r"^session +([0-9.]+) MiB$", log, re.M)[1]) - pool


@test
def hy_mt2_30b_serves_32_requests_in_less_than_1_8_gb():
    token = 2 * 4 * 128 * 2 / 2**20  # MiB per token and layer: keys and values of 4 heads of 128, F16
    with tempfile.TemporaryDirectory() as folder:
        def beside_pool(preset, layers, pool):
            subprocess.run([MAKE, "--preset", preset, "--experts", "q4", "--layers", str(layers), "-o", folder + "/m"],
                           check=True, capture_output=True, timeout=600)
            return session_mb(folder + "/m", pool)

        # Layers share all session memory except keys and values, so 2 of the 48 layers suffice.
        assert abs(beside_pool("hy-mt2-narrow", 2, 1) - beside_pool("hy-mt2-narrow", 8, 1)) < 0.5
        rest = beside_pool("hy-mt2-30b-a3b", 2, round(32 * 512 * 2 * token))
        whole = (rest + 32 * 512 * 48 * token) * 2**20 / 1e6
        assert 1610 < whole < 1800, whole


if __name__ == "__main__":
    sys.exit(test.run())
