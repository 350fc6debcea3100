#!/usr/bin/env python3
"""Test that moe.c gives the same results on other targets as on this machine.

Usage: .venv/bin/python tests/cross/targets.py BUILD [TARGET]...

Compiles README's example with ids and tests/cross/translate_ids.c for 32-bit x86 and ARM, RISC-V, AArch64 and x86-64
with musl, Windows and WebAssembly (WASI), and runs them with qemu, wine and node. BUILD is the folder of translate_ids
for this machine. Requires `tools/install-deps --targets`.
"""
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ZIG = [sys.executable, "-m", "ziglang", "cc", "-target"]
MINGW = ["x86_64-w64-mingw32-gcc-posix", "-static"]
PORTABLE = ["-DMOE_PORTABLE"]
TARGETS = {  # compiler, flags, emulator
    "i386": ([*ZIG, "x86-linux-musl"], PORTABLE, ["qemu-i386"]),
    "armhf": ([*ZIG, "arm-linux-musleabihf"], PORTABLE, ["qemu-arm"]),
    "riscv64": ([*ZIG, "riscv64-linux-musl"], PORTABLE, ["qemu-riscv64"]),
    "aarch64-musl": ([*ZIG, "aarch64-linux-musl"], ["-DMOE_ONLY_ISA=neon"], ["qemu-aarch64"]),
    "x86_64-musl": (["musl-gcc", "-static"], ["-DMOE_ONLY_ISA=avx2"], []),
    "windows": (MINGW, PORTABLE, ["wine64"]),
    "wasi": ([*ZIG, "wasm32-wasi"], PORTABLE, ["node", "--no-warnings", "tests/cross/wasi.mjs"]),
}
SHIPPED = "models/en-de-fr-es.bin"
SMALL = ["tests/golden/model-base.bin" + form for form in ("", "=q8", "=q4", "=bf16")]
BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
test = Suite()


def output(command, **more):
    """Run a command; return the lines of its output without the line that names the kernels."""
    environment = {**os.environ, "WINEDEBUG": "-all", "PATH": os.environ["PATH"] + ":/usr/lib/wine"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, env=environment, **more)
    assert run.returncode == 0, (command, run.stdout[-500:], run.stderr[-500:])
    return [line.rstrip() for line in run.stdout.splitlines() if not line.startswith("kernels: ")]


def same_on(name):
    compiler, flags, emulator = TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        for source, arguments in (("tools/text/examples/ids.c", [SHIPPED, "de"]),
                                  ("tests/cross/translate_ids.c", ["auto", "7", "1", *SMALL])):
            program = os.path.join(folder, "program.exe" if name == "windows" else "program")
            output([*compiler, "-std=c11", "-O2", *flags, "-I.", source, "moe.c", "-lm", "-pthread", "-o", program])
            if source.startswith("tools"):
                wanted = [line.strip() for line in open(os.path.join(ROOT, "README.md"), encoding="utf-8")
                          if line.startswith("1747 392 ")]
            else:
                wanted = output([os.path.join(BUILD, "translate_ids"), "portable", "7", "1", *SMALL])
                assert len(wanted) == 48 * len(SMALL), len(wanted)
            got = output([*emulator, program, *arguments])
            assert got == wanted, (source, got[:3], wanted[:3])


def add(name):
    def function():
        same_on(name)
    function.__name__ = "same_results_on_" + name.replace("-", "_")
    test(function)


for target in TARGETS:
    if not sys.argv[2:] or target in sys.argv[2:]:
        add(target)
if __name__ == "__main__":
    sys.exit(test.run())
