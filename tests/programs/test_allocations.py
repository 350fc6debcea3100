#!/usr/bin/env python3
"""Each of the first 500 allocations of eight programs fails in turn; then total memory is limited to several sizes.
A program must exit with an error status and a message, or with its usual output. It must not be killed by a signal.

Usage: tests/python tests/programs/test_allocations.py [NAME] [--allocations N]
Prints `ok NAME` or `FAIL NAME` per test; standard library only. BIN is the folder of the programs.
fail_allocation.c makes allocations fail, including C++'s operator new.
"""
import concurrent.futures
import os
import struct
import subprocess
import sys
import tempfile

import small_models
from suite import Skip, Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
FIRST, LIMITS, TOGETHER = 500, 40, os.cpu_count() or 1
test = Suite()


def field(number, data):
    """Return a field of a protocol buffer: bytes or a small integer."""
    if isinstance(data, int):
        return bytes([number << 3, data])
    return bytes([number << 3 | 2, len(data)]) + data


def tokeniser():
    """Return a minimal SentencePiece model with the ids of small_models."""
    pieces = [("<pad>", 3), ("<unk>", 2), ("<s>", 3), ("</s>", 3), ("\u2581", 1)]
    pieces += [(c, 1) for c in "abcdefghijklmnopqrstuvwxyz.,'!?-123"]
    assert len(pieces) == small_models.VOCABULARY
    out = b"".join(field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", -i) + field(3, kind))
                   for i, (text, kind) in enumerate(pieces))
    ids = b"".join(bytes([(n << 3 & 0x7f) | 0x80, n >> 4, i]) for n, i in ((40, 1), (41, 2), (42, 3)))
    return out + field(2, field(3, 1) + ids)


def with_tokeniser(made):
    meta, tensors = made
    meta.pop("vocabulary.pieces", None)
    meta.update({"tokenizer.kind": "sentencepiece", "tokenizer.model": tokeniser()})
    return meta, tensors


ROUTING = ('{"model":"m","layers":[{"layer":"a","experts":2,"groups":0,"k":1,"gate":"softmax"}]}\n'
           + "".join('{"line":1,"layer":"a","position":%d,"id":5,"token":"x","experts":[%d],"weights":[1],'
                     '"empty":false}\n' % (i, i % 2) for i in range(20)))
# Options and input of each run. "{0}" is the folder of the models, "{1}" the output file.
RUNS = {
    "translate": (["-m", "{0}/translation", "--batch", "2", "--threads", "2"], "ab cd\nx y z\n\na b!\n"),
    "translate-json": (["-m", "{0}/translation", "--json", "--nbest", "2", "--beam", "2", "--no-mmap"], "ab cd\nx!\n"),
    "translate-routing": (["-m", "{0}/translation", "--routing", "/dev/stdout", "--split", "0"], "ab cd\n"),
    "translate-memory": (["-m", "{0}/translation", "--memory", "{0}/memory", "--beam", "2"], "ab cd x y z b\nab cd\n"),
    "align": (["-m", "{0}/translation"], "ab cd\tx y\n"),
    "align-lexicon": (["-m", "{0}/translation", "--lexicon", "-o", "{1}"], "ab cd\tx y\n"),
    "score": (["-m", "{0}/language", "--threads", "1"], "ab cd\nx y z\n"),
    "classify": (["-m", "{0}/classifier", "--json", "--top", "2"], "1 2 3 4 5 6\n6 5 4 3 2 1\n"),
    "info": (["--tensors", "{0}/translation"], ""),
    "info-json": (["--json", "--check", "{0}/language"], ""),
    "info-attribution": (["--attribution", "{0}/translation"], ""),
    "quantize": (["{0}/translation", "{1}", "q8"], ""),
    "quantize-measure": (["{0}/language", "{1}", "q8", "--measure", "{0}/sample"], ""),
    "calibrate": (["-m", "{0}/translation", "-o", "{1}", "--text", "{0}/pairs", "--threads", "1"], ""),
    "prune": (["-m", "{0}/translation", "-o", "{1}", "--experts", "{0}/list"], ""),
    "routing": (["-", "-o", "-"], ROUTING),
}


class Runs:
    """Run programs with the preloaded library on small models in a folder."""

    def __init__(self, folder):
        self.folder, self.library = folder, folder + "/fail.so"
        cc = os.environ.get("CC", "cc").split()[-1]
        subprocess.run([cc, "-O1", "-shared", "-fPIC", "-o", self.library,
                        os.path.join(ROOT, "tests/programs/fail_allocation.c"), "-ldl"], check=True)
        meta, tensors = with_tokeniser(small_models.translation())
        meta.update({"general.licence": "free", "general.attribution": "nobody\nelse", "general.description": "d"})
        small_models.write(folder + "/translation", meta, tensors)
        small_models.write(folder + "/language", *with_tokeniser(small_models.language()))
        small_models.write(folder + "/classifier", *small_models.classifier())
        with open(folder + "/sample", "w") as file:
            file.write("ab cd\nx y\n")
        with open(folder + "/list", "w") as file:
            file.write("[0, 5, 9, 14, 20]")
        with open(folder + "/memory", "w") as file:
            file.write("ab cd x y z a\tc d e f g h i\n")
        with open(folder + "/pairs", "w") as file:
            file.write("\t\tab cd\tx y\n\t\ta\tb\n")

    def run(self, name, **failing):
        """Run a program; return (status, output, messages, number of failed allocations)."""
        options, data = RUNS[name]
        out = f"{self.folder}/out-{name}-{'-'.join(f'{x}{y}' for x, y in failing.items())}"
        options = [x.format(self.folder, out) for x in options]
        reader, writer = os.pipe()
        try:
            done = subprocess.run([f"{BIN}/moe-{name.split('-')[0]}", *options], input=data.encode(), timeout=120,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[writer],
                                  env=dict(os.environ, LD_PRELOAD=self.library, FAIL_FD=str(writer),
                                           **{k: str(v) for k, v in failing.items()}))
        finally:
            os.close(writer)
        failed = os.read(reader, 4096)
        os.close(reader)
        output = done.stdout
        if os.path.exists(out):
            with open(out, "rb") as file:
                output += file.read()
            os.remove(out)
        return done.returncode, output, done.stderr.decode(), len(failed)


def verdict(name, how, clean, got):
    """Describe what went wrong in a run with failed allocations; return None for a correct run."""
    status, output, complaint, _ = got
    if got[:2] == clean[:2]:
        return None
    if status == 0:
        return f"{name} {how}: status 0 with other output: {output[:200]!r}"
    if status in (1, 3, 4) and f"moe-{name.split('-')[0]}: " in complaint:
        return None
    return f"{name} {how}: status {status}: {complaint[-200:]!r}"


def every_failure(name):
    def survives():
        runs, problems = shared(), []
        clean = runs.run(name)
        assert clean[0] in (0, 1), clean  # 1: texts of a random model may stay untranslated
        with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
            for begin in range(1, FIRST + 1, 100):
                numbers = range(begin, min(begin + 100, FIRST + 1))
                got = list(pool.map(lambda n: runs.run(name, FAIL_AT=n), numbers))
                problems += [verdict(name, f"allocation {n}", clean, x) for n, x in zip(numbers, got)]
                if not got[-1][3]:
                    break
            limits = [int(2 ** (10 + i * 16 / LIMITS)) for i in range(LIMITS)]  # 1 KiB to 64 MiB
            got = list(pool.map(lambda n: runs.run(name, FAIL_ABOVE=n), limits))
            problems += [verdict(name, f"limit {n}", clean, x) for n, x in zip(limits, got)]
            assert got[0][0] and got[-1][0] == clean[0], "limits that say nothing"
        problems = [x for x in problems if x]
        assert not problems, f"{len(problems)}: " + "; ".join(problems[:6])
    survives.__name__ = name.replace("-", "_")
    return survives


for one in RUNS:
    test(every_failure(one))

made = []


def shared():
    if sys.platform != "linux" or "asan" in BIN or "tsan" in BIN:
        raise Skip("sanitizers replace malloc, and other systems lack LD_PRELOAD")
    if not made:
        made.append(Runs(folder.name))
    return made[0]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--allocations" in arguments:
        where = arguments.index("--allocations")
        FIRST = int(arguments[where + 1])
        del arguments[where:where + 2]
    with tempfile.TemporaryDirectory() as name_of_it:
        folder = type("", (), {"name": name_of_it})
        sys.exit(test.run(*arguments))
