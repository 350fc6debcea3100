#!/usr/bin/env python3
"""Test that other targets give the results that tests/golden/hashes.txt records.

Usage: tests/python tests/cross/targets.py TARGET...    (make test-hashes, make test-targets)
       tests/python tests/cross/targets.py --write
       tests/python tests/cross/targets.py --model

Compiles tests/cross/translate_ids.c and README's example with ids for each TARGET and runs them with qemu, wine or
node. `here` is this machine's build, in the folders BUILD and BIN. Targets with the text library also translate the
texts. Target `fuzz-i386` runs the seeds of fuzz_model on 32-bit x86; `fuzz-text-i386` and `fuzz-text-wasm` run those of
the other targets of tests/fuzz, with the libraries of tools/dist; `kernels-wasi` runs test_kernels in WebAssembly.
--model converts en-pt, a published model from PyPI. --write records the results of this machine, and the
ids of tests/golden/sentences.tsv.
"""
import contextlib
import functools
import glob
import hashlib
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, folder) for folder in ("tests", "tests/convert", "tests/fuzz", "tools/python")]
import converting  # noqa: E402
import inputs  # noqa: E402
import wine  # noqa: E402
from suite import Suite  # noqa: E402

ZIG = [sys.executable, "-m", "ziglang", "cc", "-target"]
MINGW = ["x86_64-w64-mingw32-gcc-posix", "-static"]
PORTABLE = ["-DMOE_PORTABLE"]
# node 20's incremental garbage collection sometimes crashes after WebAssembly memory has grown
WASI = ["node", "--no-warnings", "--no-incremental-marking", "tests/cross/wasi.mjs"]
TARGETS = {  # compiler, flags, emulator
    "i386": ([*ZIG, "x86-linux-musl"], PORTABLE, ["qemu-i386"]),
    "armhf": ([*ZIG, "arm-linux-musleabihf"], PORTABLE, ["qemu-arm"]),
    "riscv64": ([*ZIG, "riscv64-linux-musl"], PORTABLE, ["qemu-riscv64"]),
    "aarch64-musl": ([*ZIG, "aarch64-linux-musl"], ["-DMOE_ONLY_ISA=neon"], ["qemu-aarch64"]),
    "x86_64-musl": (["musl-gcc", "-static"], ["-DMOE_ONLY_ISA=avx2"], []),
    "windows": (MINGW, PORTABLE, ["wine64"]),
    "windows-avx2": ([*MINGW, "-Wa,-muse-unaligned-vector-move"], ["-DMOE_ONLY_ISA=avx2"], ["wine64"]),
    "wasi": ([*ZIG, "wasm32-wasi"], PORTABLE, WASI),
    "wasi-simd128": ([*ZIG, "wasm32-wasi"], ["-msimd128", "-DMOE_ONLY_ISA=simd128"], WASI),
}
HASHES, SENTENCES = "tests/golden/hashes.txt", "tests/golden/sentences.tsv"
SHIPPED, EN_PT = "models/en-de-fr-es.bin", "build/cross/en-pt.bin"
FUZZ = "build/cross/fuzz-seeds"
BUILD, BIN = os.environ.get("BUILD", "build"), os.environ.get("BIN", ".")
test = Suite()


def output(command, text=None, **more):
    """Run a command; return the lines of its output without the line that names the kernels."""
    run = subprocess.run(command, input=text, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=1200, **more)
    assert run.returncode == 0, (command, run.returncode, run.stdout[-500:], run.stderr[-500:])
    return [line.rstrip() for line in run.stdout.splitlines() if not line.startswith("kernels: ")]


# ---- Cases ----

@functools.cache
def sentences(model):
    """Return the lines of SENTENCES of a model: [(target, ids, text)]."""
    with open(os.path.join(ROOT, SENTENCES), encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [row[1:] for row in rows if row[0] == os.path.basename(model).removesuffix(".bin")]


@functools.cache
def cases():
    """Return {name: models} for translate_ids."""
    golden = sorted(path.removeprefix(ROOT + "/") for path in glob.glob(ROOT + "/tests/golden/*.bin")
                    if not path.endswith((".expect.bin", "/ops.bin")))
    golden += ["tests/golden/model-base.bin=" + form for form in ("q8", "q4", "bf16")]
    return {"golden ids": [*golden, "models/lm-en.bin", "models/digits.bin"],
            "README ids": [f"{SHIPPED}@{SENTENCES}"], "en-pt ids": [f"{EN_PT}@{SENTENCES}"]}


def ids(command, case, **more):
    return output([*command, "auto", "7", "1", *cases()[case]], **more)


def texts(command, model):
    """Return the translations that a moe-translate writes for a model's sentences."""
    translated = []
    for target in dict.fromkeys(row[0] for row in sentences(model)):
        lines = [row[2] + "\n" for row in sentences(model) if row[0] == target]
        got = output([*command, "-q", "-m", model, *(["-t", target] if target != "-" else [])], "".join(lines))
        assert len(got) == len(lines), (len(got), len(lines))
        translated += got
    return translated


def hashed(case, lines):
    if case == "en-pt file":
        return lines[0]
    return hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()


@functools.cache
def here(case):
    """Return this machine's results, to show the differences."""
    if case == "en-pt file":
        with open(os.path.join(ROOT, EN_PT), "rb") as file:
            return [hashlib.file_digest(file, "sha256").hexdigest()]
    if case.endswith(" text"):
        return texts([os.path.join(BIN, "moe-translate")], SHIPPED if case.startswith("README") else EN_PT)
    return ids([os.path.join(BUILD, "translate_ids")], case)


@functools.cache
def recorded():
    with open(os.path.join(ROOT, HASHES), encoding="utf-8") as file:
        return {name: value for value, name in (line.rstrip("\n").split("  ") for line in file)}


def check(case, lines):
    if hashed(case, lines) != recorded()[case]:
        other = here(case) if hashed(case, here(case)) == recorded()[case] else []
        raise AssertionError((case, len(lines), next(((a, b) for a, b in zip(lines, other) if a != b), lines[:3])))


def make_model():
    os.makedirs(os.path.join(ROOT, os.path.dirname(EN_PT)), exist_ok=True)
    converted = output([os.path.join(BUILD, "convert_here"), "q8", "-", converting.student("enpt"), EN_PT])
    return 0 if converted[-1] == "ok" else converted


def write():
    from moe_translate import Translator
    with open(os.path.join(ROOT, SENTENCES), encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    for name, model in ("en-de-fr-es", SHIPPED), ("en-pt", EN_PT):
        with Translator(os.path.join(ROOT, model), target=next(x[1] for x in rows if x[0] == name)) as translator:
            for row in (x for x in rows if x[0] == name):
                row[2] = " ".join(map(str, translator.model.encode(row[3])))
    with open(os.path.join(ROOT, SENTENCES), "w", encoding="utf-8") as file:
        file.writelines("\t".join(row) + "\n" for row in rows)
    with open(os.path.join(ROOT, HASHES), "w", encoding="utf-8") as file:
        file.writelines(f"{hashed(case, here(case))}  {case}\n" for case in
                        ("en-pt file", *cases(), "README text", "en-pt text"))


# ---- Targets ----

def same_here():
    for case in recorded():
        check(case, here(case))


def runs_here(program):
    """Return whether the kernel runs a program without an emulator. x86-64 usually runs 32-bit x86."""
    try:
        return subprocess.run([program], capture_output=True).returncode >= 0
    except OSError:
        return False


def build(name, folder, *programs, engine=None):
    """Compile programs for a target with moe.c, or a source that includes it; return the commands that run them."""
    compiler, flags, emulator = TARGETS[name]
    compiler = [*compiler, "-std=c11", "-O2", *flags, "-I."]
    compiled, commands = os.path.join(folder, "engine.o"), []
    output([*compiler, "-c", engine or "moe.c", "-o", compiled])
    for source in programs:
        program = os.path.join(folder, os.path.basename(source) + (".exe" if name.startswith("windows") else ".program"))
        output([*compiler, source, compiled, "-lm", "-pthread", "-o", program])
        commands.append([program] if name == "i386" and runs_here(program) else [*emulator, program])
    return commands


def same_on(name):
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as kept:
        more = {"env": kept.enter_context(wine.started(folder + "/wine"))} if name.startswith("windows") else {}
        example, translate = build(name, folder, "tools/text/examples/ids.c", "tests/cross/translate_ids.c")
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            wanted = [line.strip() for line in file if line.startswith("1747 392 ")]
        assert output([*example, SHIPPED, "de"], **more) == wanted != []
        for case in cases():
            check(case, ids(translate, case, **more))


def fuzz_seeds_on_i386():
    os.makedirs(os.path.join(ROOT, FUZZ), exist_ok=True)
    output([os.path.join(BUILD, "seeds"), FUZZ])
    with tempfile.TemporaryDirectory() as folder:
        replay, = build("i386", folder, "tests/fuzz/replay.c", engine="tests/fuzz/fuzz_model.c")
        print(*output([*replay, "-mutations=20", FUZZ]), sep="\n")


def fuzz_text(platform, emulator, targets, *options):
    """Run the seeds and kept inputs of fuzz targets with the libraries of a platform of tools/dist."""
    objects = f"build/dist/{platform}/objects"
    programs = [f"{objects}/replay-{target}" for target in targets]
    output(["sh", "-c", f"variables=$(tools/dist/libraries --variables {platform}) && eval env -u MAKEFLAGS "
            f'-u MAKELEVEL make -j{os.cpu_count()} "$variables" BUILD={objects} BIN={objects} "$@"', "sh", *options,
            *programs])
    for target, program in zip(targets, programs):
        folders = [folder for folder in [*inputs.write_seeds(target), f"{inputs.FUZZ}/corpus/{target}"]
                   if os.path.isdir(os.path.join(ROOT, folder)) and os.listdir(os.path.join(ROOT, folder))]
        said = output([*emulator, program, "-mutations=20", *folders])
        print(f"    {target}: {said[-1]}")
        assert re.fullmatch(r"ok [1-9]\d* inputs", said[-1]), (target, said[-5:])


def fuzz_text_on_i386():
    fuzz_text("linux-i386", [], ["text", "bpe", "lines", "routing", "idx", "marian", "checkpoint", "get", "server"])


def fuzz_text_on_wasm():
    """Run the targets whose code is in moe.wasm, except `lines`, which needs pipes."""
    fuzz_text("wasm", ["node", "--no-warnings", "--no-experimental-fetch"], ["text", "bpe", "marian", "checkpoint"],
              "REPLAY=wasm")


def kernels_on_wasi():
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "program")
        output([*TARGETS["wasi-simd128"][0], "-std=c11", "-O2", "-msimd128", "-Itests/cross", "-I.",
                "tests/engine/test_kernels.c", "-o", program])
        assert output([*WASI, program])[-1].endswith("all_checksum_implementations_agree")  # the last test


def add(name):
    def function():
        same_on(name)
    function.__name__ = "same_results_on_" + name.replace("-", "_")
    test(function)


if __name__ == "__main__":
    if sys.argv[1:] == ["--model"]:
        sys.exit(make_model())
    if sys.argv[1:] == ["--write"]:
        sys.exit(write())
    for target in sys.argv[1:]:
        if target in TARGETS:
            add(target)
        else:
            test({"here": same_here, "fuzz-i386": fuzz_seeds_on_i386, "fuzz-text-i386": fuzz_text_on_i386,
                  "fuzz-text-wasm": fuzz_text_on_wasm, "kernels-wasi": kernels_on_wasi}[target])
    sys.exit(test.run())
