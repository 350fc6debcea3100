#!/usr/bin/env python3
"""Train a mixture-of-experts language model with PyTorch, on the CPU or on one
CUDA device, using the fast layers of train.py.

    train-lm.py train --corpus DIR --out DIR ...
        train, or continue from the checkpoint in --out
    train-lm.py evaluate --corpus DIR --out DIR
        report perplexity and balance of model.pt on the dev texts
    train-lm.py curve --corpus DIR --out DIR ...
        train networks with equal operations per token and different numbers of
        experts, and report the perplexity of each in a table and a plot

The model is a small version of the one in "Outrageously Large Neural Networks"
(Shazeer et al. 2017, appendix C): embedding, LSTM with projection, MoE with a
sigmoid over its output, LSTM. All layers have residual connections; the output
matrix is the embedding. Gates are noisy top-k with importance and load losses
(section 2.1, appendix A), or strictly balanced (appendix F), with --groups in
two levels (appendix B). Training text is the English of the corpus, one
sentence at a time, as SentencePiece pieces.

Files in --out
    lines.npz        the corpus as pieces; created together with the vocabulary
    model-spm.model  the SentencePiece vocabulary
    resume.pt        training state
    model.pt         inference checkpoint ("moe-checkpoint-1") for convert.py
    curve.csv        one row per evaluation; report.py plots it

The networks of `curve` share the vocabulary and lines. Each has a folder
NETWORK-seed-N in --out with the other files, the trainer's output (log) and
finally the result on text not used for training or model selection (test.json).
The same command continues after an interruption.

The learning rate depends on the number of tokens, not on time: warm-up,
constant, then linear to zero at --tokens. Runs are therefore comparable,
whatever the machine's load. SIGTERM or SIGINT makes the trainer save and stop.
"""
import common  # must be imported first to extend sys.path and report missing modules
import argparse
import csv
import functools
import math
import os
import pathlib
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import train
from data import BOS, EOS, PAD, SHARES, UNK, read_table, train_pieces
from train import log, progress
from networks import Networks
import gating
import report
import torch


# ---- Data ------------------------------------------------------------------------------------------------------------

def english(path, limit):
    """Return the first `limit` English cells of a corpus file."""
    return [cell for cell in read_table(path).get("en", ()) if cell][:limit]


def prepare(corpus, folder, vocabulary_size, limit):
    """Return (vocabulary, pieces of all training lines as one array, offsets); create the files if missing."""
    import sentencepiece
    cache, model = os.path.join(folder, "lines.npz"), os.path.join(folder, "model-spm.model")
    if not os.path.exists(cache):
        os.makedirs(folder, exist_ok=True)
        lines = []
        for name in SHARES:
            path = os.path.join(corpus, "train", name + ".tsv.xz")
            if os.path.exists(path):
                lines += english(path, limit)
                log(f"{name}: {len(lines)} lines so far")
        lines = list(dict.fromkeys(lines))
        np.random.default_rng(1).shuffle(lines)
        log("training the vocabulary")
        train_pieces(lines[:100_000], model, vocabulary_size, num_threads=1)
        ids = sentencepiece.SentencePieceProcessor(model_file=model).encode(lines)
        np.savez(cache + ".part.npz", offsets=np.cumsum([0] + [len(x) for x in ids]),
                 pieces=np.concatenate([np.asarray(x, np.uint16) for x in ids]))
        os.replace(cache + ".part.npz", cache)
    with np.load(cache) as file:
        return sentencepiece.SentencePieceProcessor(model_file=model), file["pieces"], file["offsets"]


class Lines:
    """Batches of lines of similar length with about `tokens` tokens, reshuffled in every epoch. The last `held_out`
    lines are excluded."""

    def __init__(self, pieces, offsets, tokens, longest, seed, held_out=0):
        self.pieces, self.offsets, self.tokens, self.seed = pieces, offsets, tokens, seed
        length, end = np.diff(offsets), len(offsets) - 1 - held_out
        self.usable = np.nonzero((length[:end] > 0) & (length[:end] <= longest))[0]
        self.held_out = [pieces[offsets[i]:offsets[i + 1]] for i in range(end, len(offsets) - 1)]
        self.length = length + 1
        self.epoch, self.used = 0, 0
        self.shuffle()

    def shuffle(self):
        random = np.random.default_rng([self.seed, self.epoch])
        order = random.permutation(self.usable)
        self.batches = []
        for pool in np.split(order, range(20_000, len(order), 20_000)):  # sort in parts to keep batches diverse
            pool = pool[np.argsort(self.length[pool], kind="stable")]
            total = np.cumsum(self.length[pool])
            self.batches += np.split(pool, np.searchsorted(total, np.arange(self.tokens, total[-1], self.tokens)))
        self.batches = [x for x in self.batches if len(x)]
        random.shuffle(self.batches)

    def next(self):
        if self.used == len(self.batches):
            self.epoch, self.used = self.epoch + 1, 0
            self.shuffle()
        self.used += 1
        return [self.pieces[self.offsets[i]:self.offsets[i + 1]] for i in self.batches[self.used - 1]]


class Batch:
    """The packed inputs (BOS, pieces) and outputs (pieces, EOS) of a list of lines."""

    def __init__(self, lines, device):
        lines = sorted(lines, key=len, reverse=True)
        self.packed = train.Packed([len(x) + 1 for x in lines])
        into = self.packed.pack([np.concatenate([[BOS], x]) for x in lines]).astype(np.int64)
        out = self.packed.pack([np.concatenate([x, [EOS]]) for x in lines]).astype(np.int64)
        self.into, self.out = torch.as_tensor(into, device=device), torch.as_tensor(out, device=device)


# ---- Model -----------------------------------------------------------------------------------------------------------

def make_config(o, vocabulary):
    lstm = gating.lstm_config("lstmp", hidden=o.hidden, proj=o.width, residual=True)
    if o.gate == "dense":  # one expert as wide as k of them (the paper's MoE-1-Wide)
        moe = gating.mixture_config(o.gate, experts=1, k=1, hidden=o.k * o.expert_hidden)
    else:
        moe = gating.mixture_config(o.gate, experts=o.experts, k=o.k, hidden=o.expert_hidden,
                                    **({"groups": o.groups} if o.groups else {}))
    return {"arch": "moe-lm", "vocab_size": vocabulary, "d_model": o.width, "embed_scale": float(math.isqrt(o.width)),
            "pad": PAD, "unk": UNK, "bos": BOS, "eos": EOS, "never_generated": [PAD, BOS], "decoder": [lstm, moe, lstm],
            "gate_order": "i f g o"}


def operations(config):
    """Return the multiply-adds per token at inference: the paper's ops/timestep (App. C), and the softmax."""
    d, count = config["d_model"], dict.fromkeys(("LSTM", "experts", "gate"), 0)
    for layer in config["decoder"]:
        hidden = layer["hidden"]
        if layer["type"] == "moe":
            n, k, groups = layer["experts"], layer["k"], layer.get("groups")
            count["experts"] += (k * k if groups else k) * 2 * d * hidden
            count["gate"] += d * (groups + k * n // groups if groups else n)
        else:
            count["LSTM"] += 4 * hidden * (d + layer["proj"]) + hidden * layer["proj"]
    return {**count, "softmax": d * config["vocab_size"]}


class LanguageModel(train.Model):
    """A model with a decoder only."""

    w_importance = w_load = 0.1

    def loss(self, batch, smoothing=0.0):
        """Return the mean loss per token in nats, including the balance losses in training."""
        self.balance_loss = torch.zeros((), device=self.device)
        x = self.embed(batch.into)
        for i, layer in enumerate(self.config["decoder"]):
            name = f"decoder.{i}"
            y = self._moe(name, layer, x) if layer["type"] == "moe" else self._lstm(name, x, batch.packed)
            x = self._drop(x, y)
        return train.CrossEntropy.apply(x, self.weights["embedding.weight"], batch.out, smoothing) + self.balance_loss


# ---- Evaluation ------------------------------------------------------------------------------------------------------

class Evaluation:
    """Measure perplexity and expert balance as at inference: without noise, and with thresholds in balanced gates."""

    DEV = (("tatoeba", "dev/tatoeba.en-de", 1000), ("europarl", "dev/europarl.en-fr", 300),
           ("news", "dev/wmt_newstest2012", 300))
    TEST = (("tatoeba", "test/tatoeba-2k.en-fr", 2000), ("news", "test/wmt_newstest2014.de-en", 1000),
            ("flores", "test/flores200-devtest", 1000))

    def __init__(self, corpus, pieces, sets=DEV, **more):
        """more: additional texts, {domain: lines of pieces}."""
        self.sets = [(name, pieces.encode(english(os.path.join(corpus, file + ".tsv.xz"), limit)))
                     for name, file, limit in sets] + list(more.items())

    @torch.no_grad()
    def run(self, model):
        model.training, model.gate_statistics, row, totals = False, {}, {}, [0.0, 0]
        for name, lines in self.sets:
            lines, loss, tokens = sorted(lines, key=len), 0.0, 0
            for at in range(0, len(lines), 500):
                batch = Batch([np.array(x) for x in lines[at:at + 500]], model.device)
                loss += float(model.loss(batch)) * len(batch.out)
                tokens += len(batch.out)
            row["ppl." + name] = round(math.exp(loss / tokens), 2)
            totals = [totals[0] + loss, totals[1] + tokens]
        row["ppl"] = round(math.exp(totals[0] / totals[1]), 2)
        for name, entries in model.gate_statistics.items():
            load, empty, rows, importance = (sum(x[i] for x in entries) for i in range(4))
            values = {**gating.statistics(importance, load), "empty": float(empty) / rows,
                      "experts": float(load.sum()) / rows, "unused": int((load == 0).sum())}
            row.update({f"{name}.{key}": round(value, 4) for key, value in values.items()})
        model.gate_statistics = None
        return row


# ---- Training --------------------------------------------------------------------------------------------------------

class Trainer:
    def __init__(self, o):
        self.o, self.stopped = o, False
        self.pieces, *lines = prepare(o.corpus, o.data or o.out, o.vocabulary, o.limit)
        os.makedirs(o.out, exist_ok=True)
        if o.data and not os.path.samefile(o.data, o.out):
            shutil.copyfile(os.path.join(o.data, "model-spm.model"), os.path.join(o.out, "model-spm.model"))
        self.lines = Lines(*lines, o.batch_tokens, o.longest, o.seed, o.held_out)
        self.resume_path = os.path.join(o.out, "resume.pt")
        resume = torch.load(self.resume_path, weights_only=True) if os.path.exists(self.resume_path) else None
        config = resume["config"] if resume else make_config(o, self.pieces.vocab_size())
        self.model = LanguageModel(config, o.device, o.seed)
        self.model.w_importance, self.model.w_load = o.w_importance, o.w_load
        self.optimizer = train.Optimizer(self.model, o.optimizer)
        self.pool = ThreadPoolExecutor(1)  # for Muon; matrix products use all threads
        self.evaluation = Evaluation(o.corpus, self.pieces)
        self.tokens, self.step, self.elapsed = 0, 0, 0.0
        if resume:
            self.model.flat.copy_(resume["weights"])
            self.optimizer.restore(resume["optimizer"])
            self.lines.epoch, self.lines.used = resume["epoch"], resume["used"]
            self.lines.shuffle()
            self.tokens, self.step, self.elapsed = resume["tokens"], resume["step"], resume["elapsed"]

    def save(self):
        train.write_atomically({"config": self.model.config, "weights": self.model.flat,
                                "optimizer": self.optimizer.state(), "epoch": self.lines.epoch, "used": self.lines.used,
                                "tokens": self.tokens, "step": self.step, "elapsed": self.elapsed}, self.resume_path)
        checkpoint = train.inference_checkpoint(self.model.config, self.model.weights, tokens_seen=self.tokens)
        train.write_atomically(checkpoint, os.path.join(self.o.out, "model.pt"))

    def evaluate(self, train_loss):
        row = {"tokens": self.tokens, "step": self.step, "minutes": round(self.elapsed / 60, 2),
               "train_loss": round(train_loss, 4), **self.evaluation.run(self.model)}
        with open(os.path.join(self.o.out, "curve.csv"), "a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)
        log("evaluation: " + ", ".join(f"{key} {value}" for key, value in row.items()))

    def stop(self, *_):
        self.stopped = True

    def run(self):
        o, model, end = self.o, self.model, self.o.tokens * 1e6
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        log(f"{model.flat.numel() / 1e6:.2f} M weights, {len(self.lines.usable)} lines, from {self.tokens / 1e6:.2f} "
            f"of {o.tokens} M tokens")
        losses, before, shown, saved = [], time.time(), time.time(), time.time()
        evaluated, every = self.tokens, getattr(o, "evaluate_every", min(5, o.tokens / 4))
        while not self.stopped and self.tokens < end:
            factor = train.schedule(self.step, self.tokens / end, o.warmup, o.decay_from)
            batch = Batch(self.lines.next(), o.device)
            model.training, model.dropout, model.seed = True, o.dropout, hash((self.step, 0)) & 0xffffffff
            torch.manual_seed(o.seed * 1_000_003 + self.step)  # resumed runs sample the same noise
            loss = model.loss(batch)
            loss.backward()
            self.optimizer.step(o.rate * factor, o.muon_rate * factor, o.threshold_rate * max(0.1, factor), o.clip,
                                self.pool)
            self.step, self.tokens = self.step + 1, self.tokens + len(batch.out)
            losses = losses[-99:] + [float(loss.detach())]
            if not math.isfinite(losses[-1]):
                raise SystemExit(f"loss is {losses[-1]} at step {self.step}; not saved")
            now = time.time()
            self.elapsed, before = self.elapsed + now - before, now
            if now - shown > (1 if sys.stderr.isatty() else 30):
                shown = now
                progress(f"{self.tokens / 1e6:.2f}/{o.tokens} M tokens  step {self.step}  "
                         f"loss {sum(losses) / len(losses):.3f}  rate {o.rate * factor:.2e}  {self.elapsed / 60:.1f} "
                         f"min")
            if self.tokens - evaluated > every * 1e6 and self.tokens < end:
                evaluated = self.tokens
                self.evaluate(sum(losses) / len(losses))
            if now - saved > o.save_every * 60:
                saved = now
                self.save()
        self.save()
        if not self.stopped:
            self.evaluate(sum(losses) / max(1, len(losses)))
        log("stopped; state saved: run the same command to continue" if self.stopped else "finished")


# ---- Perplexity by the number of experts -----------------------------------------------------------------------------

K, GROUPS = 4, 16  # App. C: experts per token (two in each of two groups), maximum number of groups


def network_options(o, name, seed, folder):
    """Return the options of a network named `dense`, a number of experts, or e.g. `256-h` for two levels of gates."""
    experts, groups = 1 if name == "dense" else int(name.removesuffix("-h")), 0
    if name.endswith("-h"):
        groups = min(GROUPS, math.isqrt(experts))
    options = argparse.Namespace(**{
        **vars(o), "seed": seed, "out": folder, "data": o.out, "threads": 1,
        "gate": "dense" if name == "dense" else "noisy", "experts": experts, "groups": groups,
        "k": math.isqrt(K) if groups else K})
    make_config(options, o.vocabulary)  # exit now if the options are invalid
    return options


def measure(o):
    """Train one network of the curve; return its result on text not used for training or model selection."""
    torch.set_num_threads(o.threads)
    train.use(train.CpuKernels if o.device == "cpu" else train.TorchKernels, o.precision)
    trainer = Trainer(o)
    trainer.run()
    if trainer.stopped:
        return None
    model = trainer.model
    test = Evaluation(o.corpus, trainer.pieces, Evaluation.TEST, mix=trainer.lines.held_out).run(model)
    return {"tokens": trainer.tokens, "minutes": round(trainer.elapsed / 60, 1), "weights": model.flat.numel(),
            "operations": operations(model.config), **test}


def curve_table(results):
    """Return (lines of the table, with a row per network; points of the plot)."""
    points, rows = {}, []
    for name, (options, found) in results.items():
        def mean(key, digits=1, found=found):
            return f"{sum(x[key] for x in found) / len(found):.{digits}f}" if key in found[0] else "-"
        each = [x["ppl"] for x in found]
        rows.append({
            "network": name, "weights, M": f"{found[0]['weights'] / 1e6:.2f}",
            **{f"{part}, k": f"{count / 1e3:.0f}" for part, count in found[0]["operations"].items()},
            "perplexity": f"{mean('ppl')} ({', '.join(f'{x:.1f}' for x in each)})",
            **{key.removeprefix("ppl."): mean(key) for key in found[0] if key.startswith("ppl.")},
            "CV(load)": mean("decoder.1.gate.cv_load", 2),
            "largest / mean load": mean("decoder.1.gate.max_load", 2), "unused": mean("decoder.1.gate.unused")})
        line = "dense" if name == "dense" else "two levels" if name.endswith("-h") else "one level of gates"
        points.setdefault(line, []).append((options.experts, each))
    return report.table(rows), points


def curve(o):
    networks = Networks(o, functools.partial(network_options, o), measure, "ppl")
    os.makedirs(o.out, exist_ok=True)
    networks.same_as_before()
    prepare(o.corpus, o.out, o.vocabulary, o.limit)
    networks.train()
    lines, points = curve_table(networks.results())
    print("\n".join(lines))
    folder = pathlib.Path(o.card).parent if o.card else pathlib.Path(o.out)
    picture = folder / f"{o.part}.svg"
    picture.write_text(report.plot(points, "experts", "test perplexity"), encoding="utf-8")
    if o.card:
        text = "\n".join(["", *lines, "", f"![Test perplexity by the number of experts]({picture.name})", ""])
        report.write_card(pathlib.Path(o.card), o.part, text)


# ---- Command line ----------------------------------------------------------------------------------------------------

def training(p):
    """Add the options that all networks of a curve share."""
    p.add_argument("--vocabulary", type=int, default=4000, help="size of the vocabulary")
    p.add_argument("--limit", type=int, default=60_000, help="maximum number of lines per corpus file")
    p.add_argument("--width", type=int, default=128, help="width of embedding and layers")
    p.add_argument("--hidden", type=int, default=256, help="cells per LSTM")
    p.add_argument("--expert-hidden", type=int, default=128, help="hidden units per expert")
    p.add_argument("--w-importance", type=float, default=0.1, help="weight of the importance loss")
    p.add_argument("--w-load", type=float, default=0.1, help="weight of the load loss (noisy)")
    p.add_argument("--tokens", type=float, default=20,
                   help="total million tokens, including resumed runs: end of the schedule")
    p.add_argument("--batch-tokens", type=int, default=2000, help="tokens per batch")
    p.add_argument("--longest", type=int, default=60, help="drop lines with more pieces")
    p.add_argument("--optimizer", choices=("adam", "muon"), default="muon", help="muon: for the matrices of the LSTMs")
    p.add_argument("--rate", type=float, default=2e-3, help="learning rate of Adam")
    p.add_argument("--muon-rate", type=float, default=0.01, help="learning rate of Muon")
    p.add_argument("--threshold-rate", type=float, default=0.05, help="learning rate of the gate thresholds (balanced)")
    p.add_argument("--warmup", type=int, default=100, help="steps of linear warm-up")
    p.add_argument("--decay-from", type=float, default=0.3, help="share of the tokens after which the rate falls to 0")
    p.add_argument("--clip", type=float, default=1.0, help="maximum gradient norm")
    p.add_argument("--dropout", type=float, default=0.05, help="dropout after embedding and layers")
    p.add_argument("--evaluate-every", type=float, default=argparse.SUPPRESS,
                   help="million tokens between evaluations (default: 5, or a quarter of a shorter run)")
    p.add_argument("--save-every", type=float, default=5, help="minutes between saves")


def network(name):
    """Parse the name of a network of the curve."""
    if name != "dense" and not 1 < int(name.removesuffix("-h")):
        raise ValueError(name)
    return name


CURVE = {"precision": "bf16", "width": 64, "hidden": 64, "expert_hidden": 256, "batch_tokens": 4096, "tokens": 12,
         "rate": 3e-3, "evaluate_every": 2}  # experts account for most operations of these networks


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, text):
        p = commands.add_parser(name, help=text, description=text,
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        p.add_argument("--corpus", required=True, help="folder with train/ and dev/")
        p.add_argument("--out", required=True, help="folder of the files listed above")
        p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute")
        p.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="precision of matrix products")
        p.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (curve: one network each)")
        return p

    p = command("train", "train, or continue from resume.pt in --out")
    training(p)
    p.add_argument("--data", help="folder of shared lines.npz and vocabulary (default: --out)")
    p.add_argument("--experts", type=int, default=32, help="number of experts")
    p.add_argument("--gate", choices=("noisy", "balanced", "dense"), default="noisy",
                   help="noisy top-k, strictly balanced, or one expert as wide as k of them")
    p.add_argument("--groups", type=int, default=0, help="groups of experts, for two levels of gates; 0: one level")
    p.add_argument("--k", type=int, default=4, help="experts per token; with --groups, per level")
    p.add_argument("--seed", type=int, default=1, help="random seed of weights, data order, dropout and noise")
    p.add_argument("--held-out", type=int, default=0, help="number of lines to exclude")

    p = command("curve", "train networks with equal operations and different numbers of experts; report perplexity")
    training(p)
    p.set_defaults(**CURVE)
    p.add_argument("--networks", nargs="+", default=["dense", "4", "32", "256", "256-h", "1024-h"],
                   type=network, metavar="NETWORK", help="dense, or a number of experts; -h: two levels of gates")
    p.add_argument("--seeds", nargs="+", type=int, default=[1, 2], help="random seeds, one network each")
    p.add_argument("--held-out", type=int, default=4000, help="number of lines to hold out for testing")
    p.add_argument("--card", help="file to write the table into, with the plot next to it (default: plot in --out)")
    p.add_argument("--part", default="equal-operations", help="section of the card, and name of the plot")

    command("evaluate", "report perplexity and balance of model.pt in --out")
    return parser.parse_args()


def main():
    o = arguments()
    torch.set_num_threads(o.threads)
    train.use(train.CpuKernels if o.device == "cpu" else train.TorchKernels, o.precision)
    if o.command == "curve":
        curve(o)
        return
    if o.command == "train":
        Trainer(o).run()
        return
    import sentencepiece
    file = train.read_inference(os.path.join(o.out, "model.pt"))
    model = LanguageModel(file["config"], o.device)
    model.load(file["weights"])
    pieces = sentencepiece.SentencePieceProcessor(model_file=os.path.join(o.out, "model-spm.model"))
    for key, value in Evaluation(o.corpus, pieces).run(model).items():
        print(f"{key}\t{value}")


if __name__ == "__main__":
    main()
