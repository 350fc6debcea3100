#!/usr/bin/env python3
"""Hardening of the programs by the Makefile's HARDEN: position-independent code, tables that are read-only before main,
functions bound at startup, a stack protector and checked copies."""
import os
import re
import shutil
import subprocess
import sys

from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
PROGRAMS = ("translate", "score", "classify", "info", "quantize", "calibrate", "prune", "routing", "align")
test = Suite()
elf_test = test.needs(shutil.which("readelf") and sys.platform == "linux" or None, "readelf")


def read(program, *options):
    """Return readelf's output, or None for a build with sanitizers, which is not hardened."""
    path = os.path.join(BIN, "moe-" + program)
    listing = subprocess.run(["readelf", "-W", *options, path], capture_output=True, text=True, check=True).stdout
    return None if "__asan_init" in listing or "__tsan_init" in listing else listing


@elf_test
def programs_are_position_independent():
    for program in PROGRAMS:
        assert re.search(r"Type:\s+DYN", read(program, "-h")), program


@elf_test
def linker_tables_are_read_only_and_bound_at_startup():
    for program in PROGRAMS:
        listing = read(program, "-l", "-d", "--dyn-syms")
        assert listing is None or "GNU_RELRO" in listing, program
        assert listing is None or re.search(r"\(FLAGS_1\).*NOW", listing) or "BIND_NOW" in listing, program


@elf_test
def stacks_are_protected_and_copies_checked():
    for program in PROGRAMS:
        listing = read(program, "--dyn-syms")
        if listing is None:
            continue
        assert "__stack_chk_fail" in listing, program
        checked = set(re.findall(r"\b__\w+_chk\b", listing)) - {"__stack_chk_fail"}
        assert "__snprintf_chk" in checked or "__vsnprintf_chk" in checked, (program, checked)


@elf_test
def no_stack_is_executable():
    for program in PROGRAMS:
        stack = re.search(r"GNU_STACK.*", read(program, "-l"))
        assert stack and "E" not in stack[0].split()[-2], (program, stack)


if __name__ == "__main__":
    sys.exit(test.run())
