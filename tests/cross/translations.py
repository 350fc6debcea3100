#!/usr/bin/env python3
"""Test that all AArch64 kernels give the same translations as this machine.

Usage: tests/cross/translations.py HOST ARM

HOST and ARM are tests/cross/translate_ids.c, compiled for this machine and for AArch64. Runs also differ in batch size
and number of threads.
"""
import concurrent.futures
import os
import subprocess
import sys

SHIPPED = "models/en-de-fr-es.bin"  # Q8 with experts in Q4
SMALL = ["tests/golden/model-base.bin=" + t for t in ("q8", "q4", "f32", "f16", "bf16")]
# (emulated processor, requested kernels, expected kernels, batch, threads, models)
RUNS = [
    ("max", "portable", "portable", 7, 1, SMALL),
    ("max", "neon", "neon", 64, 4, SMALL + [SHIPPED]),
    ("max", "dotprod", "dotprod", 5, 3, SMALL + [SHIPPED]),
    ("max", "auto", "i8mm", 33, 2, SMALL + [SHIPPED]),
    ("max", "i8mm", "i8mm", 1, 1, SMALL[:2]),
    ("neoverse-n1", "auto", "dotprod", 16, 1, SMALL[:2]),
    ("cortex-a53", "auto", "neon", 2, 2, SMALL[:2]),
]
failed = 0


def verdict(name, problem):
    global failed
    print(("FAIL " if problem else "ok ") + name)
    if problem:
        print("    " + problem)
    failed += bool(problem)


def translate(command, isa, batch, threads, models):
    """Translate with each model; return (kernels used, lines by model, error message)."""
    run = subprocess.run(command + [isa, str(batch), str(threads)] + models, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    kernels = lines.pop(0).replace("kernels: ", "") if lines else ""
    each = {m: [line for line in lines if line.startswith(m.replace("=", " ") + " ")] for m in models}
    return kernels, each, "status %d: %s" % (run.returncode, (lines + [run.stderr])[-1]) if run.returncode else ""


host, arm = sys.argv[1:]
_, reference, broken = translate([host], "portable", 1, 1, SMALL + [SHIPPED])
verdict("portable kernels translate here",
        broken or next((m + ": no output" for m in reference if len(reference[m]) < 48), ""))
_, others, broken = translate([host], "auto", 64, 4, SMALL + [SHIPPED])
verdict("the default kernels here give the same output", broken or ("output differs" if others != reference else ""))
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    emulated = list(pool.map(lambda x: translate(["qemu-aarch64", "-cpu", x[0], arm], x[1], *x[3:]), RUNS))
for (cpu, isa, expected, batch, threads, models), (kernels, got, broken) in zip(RUNS, emulated):
    name = "%s, %s kernels, batch %d, %d threads" % (cpu, expected, batch, threads)
    verdict(name + ": selected", broken or ("got '%s'" % kernels if kernels != expected else ""))
    for m in models:
        wrong = sum(a != b for a, b in zip(got[m], reference[m])) + abs(len(got[m]) - len(reference[m]))
        verdict("%s: %s" % (name, m), "%d lines differ" % wrong if wrong else "")
sys.exit(failed > 0)
