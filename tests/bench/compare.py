#!/usr/bin/env python3
"""Measure moe's speed relative to its peers, its cold start, and its endurance.

    compare.py speed     target tokens per second of moe with the paper's
                         32-expert network, PyTorch with the same network, and
                         CTranslate2 (the usual engine for the same task) with a
                         Transformer-base, alternating in one run. Prints the
                         Markdown table of tests/bench/README.md in about 20
                         minutes (--quick: a small part in 3 minutes). With
                         --network opus-base (or another Transformer of
                         moe-make-random), moe and CTranslate2 run equal shapes
    compare.py cold      time from process start to the first translation, and
                         memory excluding the mapped file
    compare.py lines     memory and speed at the beginning and the end of a
                         process that translates 100,000 lines
    compare.py tokens    process 24 million tokens with a very small model. Fail
                         if memory grows or a byte differs

Requires moe-bench, moe-make-random and moe-translate, built by `make all
bench`, in the folder BIN (default: this repository). `speed` needs a Python
with the packages of the peers (--python, default: the running one):

    python3 -m venv .venv
    .venv/bin/pip install torch ctranslate2 intel-openmp numpy
    .venv/bin/python tests/bench/compare.py speed

It stores 500 MB of models with random weights in --folder, for later runs too.
Nothing else should run meanwhile: a * marks a program that got less than
--min-cpus of its processors.
"""
import argparse
import datetime
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))


def program(name):
    path = os.path.join(BIN, name)
    if not os.path.exists(path):
        sys.exit("%s is missing: run make all bench, or set BIN=FOLDER" % path)
    return path


# ---- Speed -----------------------------------------------------------------------------------------------------

MIXTURE = "paper-32"  # the only network that PyTorch runs


class Peer:
    """A running peer_*.py program, which measures on request without reloading its model."""

    def __init__(self, o, script, *options):
        command = [o.python, os.path.join(HERE, script), "--batch", o.batch, "--beam", o.beam, "--src-len", o.src_len,
                   "--tgt-len", o.tgt_len, "--threads", o.threads, *options]
        self.process = subprocess.Popen([str(c) for c in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)
        about = self.read()
        self.name, self.tokens = about["name"], about["tokens"]

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("%s ended with status %d" % (self.process.args[1], self.process.wait()))
        return json.loads(line)

    def measure(self, reps):
        self.process.stdin.write("%d\n" % reps)
        self.process.stdin.flush()
        return self.read()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Moe:
    """A moe-bench process per turn, which repeats the work at least five times."""

    def __init__(self, o, path):
        self.o, self.path = o, path
        self.name = "moe " + path[path.rindex("-") + 1:-len(".bin")]
        self.machine = None

    def measure(self, reps):
        o = self.o
        command = [program("moe-bench"), "-m", self.path, "--batch", o.batch, "--beam", o.beam, "--src-len", o.src_len,
                   "--tgt-len", o.tgt_len, "--threads", o.threads, "--reps", max(5, reps)] + (["--isa", o.isa] if o.isa
                                                                                              else [])
        lines = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, check=True,
                               text=True).stdout.splitlines()
        self.machine, model = json.loads(lines[0]), json.loads(lines[1])
        return {"seconds": [model["ms_median"] / 1000] * reps, "cpus": [model["cpu_share"] * o.threads] * reps,
                "rss_mb": model["rss_mb"]}

    def close(self):
        pass


def make_models(o):
    """Create moe's models if missing; return their paths: one entirely in Q8, one with Q4 experts."""
    os.makedirs(o.folder, exist_ok=True)
    paths = []
    kinds = (("q8", []), ("q8+q4", ["--experts", "q4"])) if o.network == MIXTURE else (("q8", []),)
    for name, options in kinds:
        path = os.path.join(o.folder, "%s-%s.bin" % (o.network, name))
        if not os.path.exists(path):
            command = [program("moe-make-random"), "--preset", o.network, "--type", "q8", "-o", path]
            subprocess.run(command + options, check=True)
        paths.append(path)
    return paths


def measure_configuration(o, paths):
    """Measure all contestants; return [(name, tokens per second, processors, MB)], moe first, and the machine."""
    contestants = [Moe(o, path) for path in paths]
    if not o.only_moe:
        shape = "transformer-base" if o.network == MIXTURE else o.network
        contestants.append(Peer(o, "peer_ctranslate2.py", "--shape", shape,
                                "--folder", os.path.join(o.folder, "ctranslate2-" + shape)))
        contestants += [Peer(o, "peer_torch.py", "--type", t) for t in o.torch]
    seconds, cpus, rss = ([[] for _ in contestants] for _ in range(3))
    for _ in range(o.rounds):
        for i, c in enumerate(contestants):
            result = c.measure(o.reps)
            seconds[i] += result["seconds"]
            cpus[i] += result["cpus"]
            rss[i].append(result["rss_mb"])
    for c in contestants:
        c.close()
    return [(c.name, o.batch * o.tgt_len / statistics.median(seconds[i]), statistics.median(cpus[i]), max(rss[i]))
            for i, c in enumerate(contestants)], contestants[0].machine


def speed(o):
    paths, rows, machine = make_models(o), [], None
    for o.beam in o.beams:
        for o.batch in o.batches:
            results, machine = measure_configuration(o, paths)
            rows.append((o.beam, o.batch, results))
            for name, tokens, busy, rss in results:
                print("beam %d, batch %3d  %-36s %8.1f tokens/s %5.2f processors %7.1f MB"
                      % (o.beam, o.batch, name, tokens, busy, rss), file=sys.stderr, flush=True)
    names = [r[0] for r in rows[0][2]]
    peers = [("moe : " + p, [i for i, n in enumerate(names) if n.startswith(p)]) for p in ("CTranslate2", "PyTorch")]
    peers = [(title, where) for title, where in peers if where]
    starved = False
    print("%s, %d threads, %s kernels; %d tokens in, %d out; %s. Memory read at %.0f GB/s, integer peak %.0f Gop/s.\n"
          % (
        machine["cpu"], o.threads, machine["isa"], o.src_len, o.tgt_len, datetime.date.today(),
        machine["dram_gbytes_s"],
        machine["integer_gops"]))
    print("| " + " | ".join(["beam", "batch"] + names + [title for title, _ in peers]) + " |")
    print("|---" * (2 + len(names) + len(peers)) + "|")
    for beam, batch, results in rows:
        best = max(r[1] for r in results[: len(paths)])
        cells = []
        for _, tokens, busy, _ in results:
            starved |= busy < o.min_cpus * o.threads
            cells.append("%d%s" % (round(tokens), "*" if busy < o.min_cpus * o.threads else ""))
        ratios = ["%.2f" % (best / max(results[i][1] for i in where)) for _, where in peers]
        print("| " + " | ".join([str(beam), str(batch)] + cells + ratios) + " |")
    memory = ["%s %.0f MB" % (name, max(results[i][3] for _, _, results in rows)) for i, name in enumerate(names)]
    if o.network == MIXTURE:
        print("\nTarget tokens per second. moe and PyTorch run the paper's network with 32 experts (203 million "
              "parameters, 85")
        print("million used per token); CTranslate2 a Transformer-base (60 million). Ratios are of the fastest of "
              "either side.")
    else:
        print("\nTarget tokens per second of two networks of the same shape, %s, random weights." % o.network)
    print("Resident memory at most: %s." % ", ".join(memory))
    if starved:
        print("\\* got less than %d %% of its processors: this machine was shared, measure again."
              % round(100 * o.min_cpus))


# ---- Cold start --------------------------------------------------------------------------------------------------


def status_mb(pid, key):
    """Return a value of /proc/PID/status in MB, or None if the process has ended. (wait() reports a peak that includes
    the parent's memory before exec.)"""
    with open("/proc/%d/status" % pid) as f:
        return next((int(line.split()[1]) / 1024 for line in f if line.startswith(key + ":")), None)


def translator(o, **keywords):
    command = [program("moe-translate"), "-m", o.model, "-q"] + (["-t", o.to] if o.to else []) + o.option
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, **keywords)


def cold(o):
    size = os.path.getsize(o.model) / 1048576
    times, peaks = [], []
    for i in range(o.runs + 1):
        begin = time.perf_counter()
        process = translator(o)
        process.stdin.write(b"Where is the station?\n")
        answer = process.stdout.readline()
        took = time.perf_counter() - begin
        assert answer.strip(), "no translation"
        peak = status_mb(process.pid, "VmHWM")
        process.stdin.close()
        process.stdout.read()
        assert process.wait() == 0
        if i:  # the first run, which fills the page cache, does not count
            times.append(took)
            peaks.append(peak)
    print(json.dumps({"what": "cold", "model": os.path.basename(o.model), "runs": o.runs,
                      "first_translation_ms": round(statistics.median(times) * 1000, 1),
                      "ms_min": round(min(times) * 1000, 1), "file_mb": round(size, 1),
                      "rss_peak_mb": round(max(peaks), 1),
                      "rss_above_file_mb": round(max(peaks) - size, 1)}))


# ---- Endurance ---------------------------------------------------------------------------------------------------


def block_of_lines(count):
    choose = random.Random(4)
    words = ("the a my your house dog child teacher river city is was has been sees reads likes to in on under and but "
             "not very old new green today tomorrow always never quickly 12 1984 Berlin Anna with without when "
             "who").split()
    lengths = (1, 2, 3, 5, 8, 8, 13, 21)
    return [" ".join(choose.choice(words) for _ in range(choose.choice(lengths))) + "." for _ in range(count)]


def tokens(o):
    """Translate token ids with a very small model, which is fast enough for rare faults to occur soon."""
    sys.path.insert(0, os.path.join(ROOT, "tests", "programs"))
    import small_models
    choose = random.Random(4)
    block = [" ".join(str(choose.randrange(4, small_models.VOCABULARY)) for _ in range(choose.choice((3, 8, 20))))
             for _ in range(1000)]
    with tempfile.TemporaryDirectory() as folder:
        o.model, o.to = folder + "/small.bin", None
        small_models.write(o.model, *small_models.translation())
        o.option = ["--ids", "--beam", "2", "--threads", "1", *o.option]
        data = ("\n".join(block) + "\n").encode()
        process = translator(o)
        answers = process.communicate(data)[0]
        each = len(data.split()) + len(answers.split()) + 2 * len(block)  # source and target, including end tokens
        o.count = -(-o.count // each) * len(block)
        lines(o, block, tokens=o.count // len(block) * each)


def lines(o, block=None, **more):
    """Translate the same 1,000 lines repeatedly, so that the beginning and the end have equal work."""
    block = block or block_of_lines(1000)
    data = ("\n".join(block) + "\n").encode()
    repeats = -(-o.count // len(block))
    window = max(1, repeats // 10)
    process = translator(o)
    clock, memory, first, differing = [time.perf_counter()], [], None, 0

    def write():
        with io.BufferedWriter(process.stdin) as whole:  # a raw write may be short, for instance after SIGSTOP
            for _ in range(repeats):
                whole.write(data)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    out = os.fdopen(os.dup(process.stdout.fileno()), "rb", 1 << 16)
    for i in range(repeats):
        answers = [out.readline() for _ in block]
        assert all(a.endswith(b"\n") for a in answers), "the program ended early"
        first = first or answers
        differing += answers != first
        clock.append(time.perf_counter())
        memory.append(status_mb(process.pid, "VmRSS") or memory[-1])
        if sys.stderr.isatty():
            print("\r%d of %d lines " % ((i + 1) * len(block), repeats * len(block)), end="", file=sys.stderr)
    writer.join()
    assert not out.read() and process.wait() == 0
    rate = lambda a, b: round((b - a) * len(block) / (clock[b] - clock[a]), 1)  # noqa: E731
    grown = memory[-1] - memory[window] if repeats > window else 0
    print(json.dumps({"what": o.command, "model": os.path.basename(o.model), "lines": repeats * len(block), **more,
                      "seconds": round(clock[-1] - clock[0], 1),
                      "lines_s_begin": rate(0, window), "lines_s_end": rate(repeats - window, repeats),
                      "lines_s": rate(0, repeats), "rss_begin_mb": round(memory[0], 1),
                      "rss_end_mb": round(memory[-1], 1),
                      "rss_peak_mb": round(max(memory), 1), "blocks_that_differ": differing}))
    sys.exit(differing > 0 or grown > 1 + 0.01 * memory[-1])


def main():
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    s = commands.add_parser("speed", help="moe, CTranslate2 and PyTorch")
    s.add_argument("--python", default=sys.executable, help="a Python with torch, ctranslate2, intel-openmp and numpy")
    s.add_argument("--network", default=MIXTURE, choices=[MIXTURE, "opus-base", "m2m-418m", "nllb-600m"])
    s.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "moe-bench"),
                   help="for models of random weights (default %(default)s)")
    s.add_argument("--batches", type=numbers, default=[1, 8, 32, 128], metavar="LIST")
    s.add_argument("--beams", type=numbers, default=[4, 1], metavar="LIST")
    s.add_argument("--torch", type=lambda text: [t for t in text.split(",") if t], default=["int8", "bf16", "f32"],
                   metavar="LIST", help="PyTorch's types: int8,bf16,f32; '' for none")
    s.add_argument("--isa", help="moe's kernels (default: the best)")
    s.add_argument("--src-len", type=int, default=25)
    s.add_argument("--tgt-len", type=int, default=25)
    s.add_argument("--threads", type=int, default=os.cpu_count())
    s.add_argument("--rounds", type=int, default=2, help="turns (default %(default)s)")
    s.add_argument("--reps", type=int, default=3,
                   help="repetitions in a peer's turn (default %(default)s; moe's turn has at least 5)")
    s.add_argument("--min-cpus", type=float, default=0.9)
    s.add_argument("--only-moe", action="store_true", help="no peers")
    s.add_argument("--quick", action="store_true", help="beam 4, batch 1 and 32, one turn, PyTorch int8 only")
    for name, words in (("cold", "process start to first translation"), ("lines", "100,000 lines through one process"),
                        ("tokens", "24 million tokens through one process, of a very small model")):
        c = commands.add_parser(name, help=words)
        c.add_argument("-m", "--model", default=os.path.join(ROOT, "models/en-de-fr-es.bin"))
        c.add_argument("-t", "--to", default="de", help="target language")
        c.add_argument("--option", action="append", default=[], metavar="OPTION",
                       help="passed to moe-translate, e.g. --option=--threads=1")
        if name == "cold":
            c.add_argument("--runs", type=int, default=20)
        else:
            c.add_argument("--count", type=int, default=24000000 if name == "tokens" else 100000)
    o = p.parse_args()
    if o.command == "speed" and o.network != MIXTURE:
        o.torch = []
    if o.command == "speed" and o.quick:
        o.beams, o.batches, o.rounds, o.torch = [4], [1, 32], 1, o.torch[:1]
    {"speed": speed, "cold": cold, "lines": lines, "tokens": tokens}[o.command](o)


if __name__ == "__main__":
    main()
