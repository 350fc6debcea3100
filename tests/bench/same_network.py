#!/usr/bin/env python3
"""Compare moe and CTranslate2 on one network, with equal random weights in 8 bits.

    same_network.py check
        compare log-probabilities of random targets: small networks of both
        families in float32, then --network in 8 bits
    same_network.py run --batch 32 >> results
        measure a row of the table: both engines alternate --rounds times
    same_network.py cold
        time processes that translate one sentence, alternating --rounds times
    same_network.py table results
        print a Markdown table of medians over the rounds

tests/convert/make_transformers.py creates a checkpoint in Hugging Face's
layout, which tools/convert/convert.py and, for CTranslate2, peer_ctranslate2.py
convert. With --lengths forced, --batch sentences of 25 ids have targets of 25
tokens. With --lengths real, the sources are every n-th sentence of newstest2014
(--corpus) in pieces of the shipped model, and targets have the lengths of the
references. moe decodes each sentence to its own length, in input order.
CTranslate2 has one length per call, so its sentences are sorted by target
length, and each batch uses their mean, so no sentence waits for a longer one.
In real use the target lengths would be unknown.

Run it with a Python that has the packages (numpy, ctranslate2, intel-openmp,
sentencepiece), while nothing else runs:

    python3 -m venv venv
    venv/bin/pip install numpy ctranslate2==4.8.5 intel-openmp sentencepiece
    venv/bin/python tests/bench/same_network.py run --network opus-base
"""
import argparse
import collections
import datetime
import json
import lzma
import os
import random
import statistics
import subprocess
import sys
import tempfile

from compare import HERE, ROOT, Peer, program
from marian import timed

sys.path += [os.path.join(ROOT, "tools", "convert"), os.path.join(ROOT, "tests", "convert")]
NETWORKS = ("opus-base", "m2m-418m", "nllb-600m")
SENTENCES = {"opus-base": 512, "m2m-418m": 160, "nllb-600m": 160}  # enough sentences for about a minute
# Limits for the int8 results, as the engines round activations differently. The log-probabilities are -30 to -4.
MEAN, MOST = 0.25, 1.5


# ---- Networks and sentences ------------------------------------------------------------------------------------------

def checkpoint_of(o, name):
    """Create the checkpoint of a published shape, or the small one of a family; return its folder."""
    import make_transformers as checkpoints
    folder = os.path.join(o.folder, name + "-hf")
    if not os.path.exists(os.path.join(folder, "config.json")):
        small = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}  # CTranslate2 needs equal head counts
        family, changes = checkpoints.SHAPES.get(name, (name, small))
        checkpoints.make(folder + ".new", family, seed=1, **changes)
        os.rename(folder + ".new", folder)
    return folder


def converted(o, name, kind):
    path = os.path.join(o.folder, "%s-%s.bin" % (name, kind))
    if not os.path.exists(path):
        subprocess.run([sys.executable, os.path.join(ROOT, "tools", "convert", "convert.py"), "--from", "hf",
                        checkpoint_of(o, name), "-o", path, "--type", kind, "--ids-only"],
                       check=True, stdout=sys.stderr)  # standard output is for results
    return path


def special(o, name):
    """Return (whether the network is an M2M-100, end token, vocabulary size, number of final ids to avoid)."""
    with open(os.path.join(checkpoint_of(o, name), "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    size = config["vocab_size"]
    return config["model_type"] != "marian", config["eos_token_id"], size, min(300, size // 10)


def line_of(m2m, end, size, tail, target, pieces):
    """Return a line for moe-bench's --sentences. Sources end with the end token. M2M-100's last ids are languages,
    which precede the source and start the target."""
    ids = [4 + x % (size - tail - 4) for x in pieces]
    source, target_language = ([size - tail + 1] + ids, size - tail + 2) if m2m else (ids, -1)
    return " ".join(map(str, [target, target_language, *source, end]))


def forced_sentences(o, name, count, length):
    about, choose = special(o, name), random.Random(7)
    extra = 2 if about[0] else 1
    return [line_of(*about, length, [choose.randrange(1 << 30) for _ in range(length - extra)]) for _ in range(count)]


def real_sentences(o):
    """Return lines for sentences of newstest2014; lengths include M2M-100's languages and the end token."""
    import moefile
    import sentencepiece
    about = special(o, o.network)
    model = moefile.read_meta(os.path.join(ROOT, "models", "en-de-fr-es.bin"))["tokenizer.model"]
    cut = sentencepiece.SentencePieceProcessor(model_proto=bytes(model))
    with lzma.open(os.path.join(o.corpus, "test", "wmt_newstest2014.de-en.tsv.xz"), "rt", encoding="utf-8") as file:
        pairs = [line.rstrip("\n").split("\t") for line in file][1:]
    count = min(o.count or SENTENCES[o.network], len(pairs))
    chosen = [pairs[i * len(pairs) // count] for i in range(count)]
    return [line_of(*about, max(2, len(cut.encode(target)) + 1 + about[0]), cut.encode(source))
            for source, target in chosen]


def write_lines(o, name, lines):
    path = os.path.join(o.folder, name)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    return path


def peer_options(o, name):
    return ["--checkpoint", checkpoint_of(o, name), "--folder", os.path.join(o.folder, name + "-ctranslate2")]


# ---- check -----------------------------------------------------------------------------------------------------------

def differences(o, name, kind, compute, saved):
    """Return the absolute differences between the log-probabilities of moe and CTranslate2."""
    path = write_lines(o, name + "-check.txt", forced_sentences(o, name, 20, 25))
    with open(path, encoding="utf-8") as file:
        rows = [[int(x) for x in line.split()] for line in file]
    targets = [([force] if force >= 0 else []) + ids[1:n] for n, force, *ids in rows]
    pairs = "".join("%s\t%s\n" % (" ".join(map(str, row[2:])), " ".join(map(str, t))) for row, t in zip(rows, targets))
    ours = subprocess.run([program("moe-translate"), "-m", converted(o, name, kind), "--raw-ids", "--score", "--json"],
                          input=pairs, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    theirs = subprocess.run([sys.executable, os.path.join(HERE, "peer_ctranslate2.py"), *peer_options(o, name),
                             "--save", saved, "--compute", compute, "--score", path],
                            stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    assert len(ours) == len(theirs) == len(rows), (len(ours), len(theirs))
    found = []
    for mine, other, target in zip(map(json.loads, ours), map(json.loads, theirs), targets):
        words = len(target) - (target[-1] == rows[0][-1])  # drop the end token, which CTranslate2 adds
        found += [abs(a - b) for a, b in list(zip(mine["token_logprobs"], other))[:words]]
    return found


def check(o):
    failed = 0
    for name, kind, compute, saved, mean, most in (("marian", "f32", "float32", "float32", 1e-5, 1e-4),
                                                   ("nllb", "f32", "float32", "float32", 1e-5, 1e-4),
                                                   (o.network, "q8", "int8", "int8", MEAN, MOST)):
        found = differences(o, name, kind, compute, saved)
        good = statistics.mean(found) < mean and max(found) < most
        failed |= not good
        print("%s %s: %d log-probabilities of %s and %s differ by %.2g on average, %.2g at most"
              % ("ok" if good else "FAIL", name, len(found), kind, compute, statistics.mean(found), max(found)))
    return failed


# ---- run -------------------------------------------------------------------------------------------------------------

def run_moe(o, path):
    command = [program("moe-bench"), "-m", converted(o, o.network, "q8"), "--no-mmap", "--sentences", path, "--batch",
               o.batch, "--beam", o.beam, "--threads", o.threads, "--reps", o.reps]
    lines = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()
    return json.loads(lines[0]), json.loads(lines[1])


def run(o):
    forced = o.lengths == "forced"
    lines = forced_sentences(o, o.network, o.batch, 25) if forced else real_sentences(o)
    path = write_lines(o, "%s-%s-%d.txt" % (o.network, o.lengths, o.batch if forced else len(lines)), lines)
    tokens = sum(int(line.split()[0]) for line in lines)
    o.src_len = o.tgt_len = 25
    o.python = sys.executable
    peer = Peer(o, "peer_ctranslate2.py", *peer_options(o, o.network), "--sentences", path, "--workers", o.workers)
    rounds = []
    for _ in range(o.rounds):
        machine, moe = run_moe(o, path)
        other = peer.measure(o.reps)
        rounds.append({"moe": moe["tok_s"], "peer": peer.tokens / statistics.median(other["seconds"]),
                       "moe_cpus": moe["cpu_share"] * o.threads, "peer_cpus": statistics.median(other["cpus"])})
    peer.close()
    print(json.dumps({"network": o.network, "lengths": o.lengths, "batch": o.batch, "beam": o.beam,
                      "sentences": len(lines), "tokens": tokens, "peer": peer.name, "workers": o.workers,
                      "moe_mb": moe["rss_mb"], "peer_mb": other["rss_mb"], "share": moe["roofline_share"],
                      "date": str(datetime.date.today()), "threads": o.threads,
                      "machine": {k: machine[k] for k in ("cpu", "isa", "dram_gbytes_s", "integer_gops")},
                      "rounds": rounds}), flush=True)


# ---- cold ------------------------------------------------------------------------------------------------------------

def cold(o):
    """Time processes that translate one sentence of 25 tokens. CTranslate2 uses the OpenMP of its wheel."""
    lines = forced_sentences(o, o.network, 1, 25)
    path = write_lines(o, o.network + "-cold.txt", lines)
    target, language, *source = lines[0].split()
    common = ["--beam", o.beam, "--threads", o.threads]
    sides = {
        "moe": ([program("moe-translate"), "-q", "-m", converted(o, o.network, "q8"), "--raw-ids", *common,
                 "--min-target", target, "--max-len", target] + ["--force", language] * (int(language) >= 0),
                " ".join(source) + "\n"),
        "CTranslate2": ([sys.executable, os.path.join(HERE, "peer_ctranslate2.py"), *peer_options(o, o.network),
                         "--sentences", path, "--batch", 1, *common, "--plain", "--once"], ""),
    }
    found = {name: [] for name in sides}
    for turn in range(o.rounds + 1):
        for name, (command, text) in sides.items():
            run = timed(list(map(str, command)), text)
            if turn:  # the first run only fills the page cache
                found[name].append(run)
    print("| network | threads | side | wall s | processor s | MB |\n" + "|---" * 6 + "|")
    for name, runs in found.items():
        wall, cpu, rss = (statistics.median(x[i] for x in runs) for i in range(3))
        print(f"| {o.network} | {o.threads} | {name} | {wall:.3f} | {cpu:.3f} | {rss / 1e6:.0f} |")


# ---- table -----------------------------------------------------------------------------------------------------------

def table(o):
    """Print a row for each setting; skip rounds in which an engine did not get its processors."""
    groups = collections.OrderedDict()
    for path in o.results:
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = json.loads(text)
                except ValueError:
                    sys.exit("%s: line %d was not printed by `run`: %s" % (path, number, text[:60].strip()))
                kind = tuple(line[x] for x in ("network", "lengths", "threads", "beam", "batch"))
                groups.setdefault(kind, []).append(line)
    print("| network | sentences | threads | beam | batch | moe tokens/s | CTranslate2 | moe : CTranslate2 "
          "| per processor second | rounds | of the bound | moe MB | CTranslate2 MB |\n" + "|---" * 13 + "|")
    for (network, lengths, threads, beam, batch), lines in groups.items():
        rounds = [r for line in lines for r in line["rounds"]
                  if min(r["moe_cpus"], r["peer_cpus"]) >= o.min_cpus * line["threads"]]
        if not rounds:
            continue
        middle = {side: statistics.median(r[side] for r in rounds) for side in ("moe", "peer")}
        ratio = statistics.median(r["moe"] / r["peer"] for r in rounds)
        busy = statistics.median(r["moe"] / r["moe_cpus"] / (r["peer"] / r["peer_cpus"]) for r in rounds)
        what = "25 + 25 tokens" if lengths == "forced" else "%d of newstest2014" % lines[0]["sentences"]
        print("| %s | %s | %d | %d | %d | %.0f | %.0f | %.2f | %.2f | %d | %.2f | %.0f | %.0f |"
              % (network, what, threads, beam, batch, middle["moe"], middle["peer"], ratio, busy, len(rounds),
                 statistics.median(line["share"] for line in lines), max(line["moe_mb"] for line in lines),
                 max(line["peer_mb"] for line in lines)))
    for about in sorted({"%s, %d threads, %s kernels, %s; %s; memory read at %.0f GB/s, integer peak %.0f Gop/s"
                         % (line["machine"]["cpu"], line["threads"], line["machine"]["isa"], line["peer"], line["date"],
                            line["machine"]["dram_gbytes_s"], line["machine"]["integer_gops"])
                         for lines in groups.values() for line in lines[:1]}):
        print("\n" + about, file=sys.stderr)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    for name, words in (("check", "both compute the same"), ("run", "one line of the table"),
                        ("cold", "the start of a process")):
        c = commands.add_parser(name, help=words)
        c.add_argument("--network", default="opus-base", choices=NETWORKS)
        c.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "moe-bench"),
                       help="for checkpoints and models, which are reused: 0.5 to 4 GB (default %(default)s)")
        if name == "check":
            continue
        c.add_argument("--lengths", default="forced", choices=("forced", "real"))
        c.add_argument("--batch", type=int, default=32)
        c.add_argument("--beam", type=int, default=4)
        c.add_argument("--rounds", type=int, default=3, help="turns of either side (default %(default)s)")
        c.add_argument("--reps", type=int, default=3, help="repetitions in a turn (default %(default)s)")
        c.add_argument("--threads", type=int, default=os.cpu_count())
        c.add_argument("--workers", type=int, default=1, help="CTranslate2's: batches at a time")
        c.add_argument("--count", type=int, help="sentences of --lengths real")
        c.add_argument("--corpus", default=os.path.join(ROOT, "..", "shared", "corpus"))
    c = commands.add_parser("table", help="Markdown of the output of run")
    c.add_argument("results", nargs="+")
    c.add_argument("--min-cpus", type=float, default=0.9, help="minimum share of the threads for a valid round")
    o = p.parse_args()
    if o.command != "table":
        os.makedirs(o.folder, exist_ok=True)
    sys.exit({"check": check, "run": run, "cold": cold, "table": table}[o.command](o))


if __name__ == "__main__":
    main()
