#!/usr/bin/env python3
"""Benchmark a full-size NVIDIA GNMT checkpoint (1024 units, 4 + 4 layers, 32,320
tokens, 160,671,297 parameters) with random weights: time and memory of the
conversion, effect of quantisation, and speed compared with PyTorch.

    tests/convert/gnmt_full.py [--folder DIR]

Requires NumPy and PyTorch (tools/install-deps --train), 3 GB of disk and ten
minutes.

PyTorch runs the same network and search (beam 5, coverage penalty) with nn.LSTM
in float32 and cached attention keys; sources have equal length to avoid
padding. Each translation has 25 tokens, like its source, because the end
token's bias prevents earlier ends. Tokens per second are those of the fastest
run; on a shared machine, compare `--threads 1` and the tokens per second of
processor time. Not part of `make test`. Prints one JSON line per measurement.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

import gnmt_checkpoints as make

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

HIDDEN, LAYERS, VOCABULARY, LENGTH, BEAM = 1024, 4, 32320, 25, 5
TRANSLATE, QUANTIZE = os.path.join(ROOT, "moe-translate"), os.path.join(ROOT, "moe-quantize")


def say(**values):
    print(json.dumps(values), flush=True)


def checkpoint(path, random):
    weights = make.random_nvidia(random, HIDDEN, VOCABULARY, LAYERS)
    weights["decoder.classifier.classifier.bias"][3] = -100  # so that no translation ends early
    pieces = ["<pad>", "<unk>", "<s>", "<\\s>"] + [f"piece{i}" for i in range(VOCABULARY - 4)]
    make.write_torch(path,
                     make.nvidia_checkpoint(weights, HIDDEN, LAYERS, pieces, [f"a{i} b{i}" for i in range(32000)]))
    return weights


def convert(source, target):
    """Convert in a child process; print its time and peak memory, which is the maximum over all children so far."""
    begin = time.monotonic()
    subprocess.run([sys.executable, os.path.join(ROOT, "tools", "convert", "convert.py"), source, "--from",
                    "nvidia-gnmt", "-o", target,
                    "--meta", f"decode.max_len_offset={LENGTH}"], check=True, stdout=subprocess.DEVNULL)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    say(what="convert", seconds=round(time.monotonic() - begin, 1), peak_GB=round(peak, 2),
        checkpoint_MB=os.path.getsize(source) >> 20, model_MB=os.path.getsize(target) >> 20)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

class Peer(torch.nn.Module):
    """NVIDIA's network with nn.LSTM; the batch is the second dimension of every tensor."""

    def __init__(self, weights):
        super().__init__()
        def tensor(name):
            return torch.from_numpy(weights[name])

        def lstm(prefix, width, two=False):
            layer = torch.nn.LSTM(width, HIDDEN, bidirectional=two)
            layer.load_state_dict({k: tensor(prefix + k) for k in layer.state_dict()})
            return layer

        h, attn = HIDDEN, "decoder.att_rnn.attn."
        self.embedding = torch.nn.Embedding.from_pretrained(tensor("encoder.embedder.weight"))
        self.encoder = torch.nn.ModuleList(
            lstm(f"encoder.rnn_layers.{i}.", 2 * h if i == 1 else h, i == 0) for i in range(LAYERS))
        self.bottom = lstm("decoder.att_rnn.rnn.", h)
        self.upper = torch.nn.ModuleList(lstm(f"decoder.rnn_layers.{i}.", 2 * h) for i in range(LAYERS - 1))
        self.query, self.key = tensor(attn + "linear_q.weight"), tensor(attn + "linear_k.weight")
        self.bias, v = tensor(attn + "normalize_bias"), tensor(attn + "linear_att")
        self.v = v / v.norm() * tensor(attn + "normalize_scalar")
        self.output = torch.nn.Linear(h, VOCABULARY)
        self.output.load_state_dict({k: tensor("decoder.classifier.classifier." + k) for k in ("weight", "bias")})

    def encode(self, ids):
        x = self.embedding(ids)
        for i, layer in enumerate(self.encoder):
            y = layer(x)[0]
            x = x + y if i >= 2 else y
        memory = x.transpose(0, 1)  # [batch, T, h]
        return memory, memory @ self.key.T

    def step(self, tokens, memory, keys, state):
        x = self.embedding(tokens)[None]
        x, first = self.bottom(x, state[0])
        scores = torch.tanh(keys + (x[0] @ self.query.T + self.bias)[:, None]) @ self.v
        p = torch.softmax(scores, 1)
        context, new = torch.bmm(p[:, None], memory).transpose(0, 1), [first]
        for i, layer in enumerate(self.upper):
            y, s = layer(torch.cat([x, context], 2), state[i + 1])
            new.append(s)
            x = x + y if i >= 1 else y
        return torch.log_softmax(self.output(x[0]), 1), p, new

    def search(self, ids):
        """Return the best ids [batch, LENGTH] of sources [T, batch]."""
        batch = ids.shape[1]
        memory, keys = (x.repeat_interleave(BEAM, 0) for x in self.encode(ids))
        rows = batch * BEAM
        state = [(torch.zeros(1, rows, HIDDEN),) * 2] * LAYERS
        tokens, coverage = torch.full((rows,), 2), torch.zeros(rows, ids.shape[0])
        scores = torch.full((batch, BEAM), -torch.inf)
        scores[:, 0] = 0
        out, first = torch.zeros(rows, 0, dtype=torch.long), torch.arange(batch)[:, None] * BEAM
        for _ in range(LENGTH):
            logp, p, state = self.step(tokens, memory, keys, state)
            coverage += p
            best, words = logp.topk(BEAM, 1)
            scores, at = (scores[:, :, None] + best.view(batch, BEAM, BEAM)).view(batch, -1).topk(BEAM, 1)
            parents = (at // BEAM + first).view(-1)
            tokens = words.view(batch, -1).gather(1, at).view(-1)
            out = torch.cat([out[parents], tokens[:, None]], 1)
            state = [tuple(x[:, parents] for x in s) for s in state]
        return out.view(batch, BEAM, LENGTH)[:, 0]


# ---- Measuring -------------------------------------------------------------------------------------------------------

def lines(sources):
    return "".join(" ".join(map(str, s)) + "\n" for s in sources)


def processor_time():
    """Return the processor time of this process and its finished children."""
    return sum(u.ru_utime + u.ru_stime
               for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def measure(work, tokens, repeats):
    """Return (tokens per second, tokens per second of processor time, result) of the best run of `work`, which may
    measure the seconds itself."""
    best = best_processor = 0
    for _ in range(repeats):
        begin, processor = time.monotonic(), processor_time()
        out, seconds = work()
        best_processor = max(best_processor, tokens / (processor_time() - processor))
        best = max(best, tokens / (seconds or time.monotonic() - begin))
    return best, best_processor, out


def engine(model, sources, batch, threads):
    """Return the translations and the seconds they took, excluding the time to open the model."""
    command = [TRANSLATE, "-m", model, "--ids", "--beam", str(BEAM), "--batch", str(batch), "--threads", str(threads),
               "--stats"]
    done = subprocess.run(command, text=True, input=lines(sources), capture_output=True, check=True)
    seconds = next(float(x.split()[1]) for x in done.stderr.splitlines() if x.startswith("seconds "))
    return [list(map(int, x.split())) for x in done.stdout.splitlines()], seconds


def peer(model, sources, batch):
    out = []
    for i in range(0, len(sources), batch):
        out += model.search(torch.tensor([[2, *s, 3] for s in sources[i:i + batch]]).T).tolist()
    return out, None


def drift(models, random):
    """Print how much each model's log-probabilities of random targets differ from the first model's."""
    pairs = "".join(f"{lines([s])[:-1]}\t{lines([t])}"
                    for s, t in zip(random.integers(4, VOCABULARY, (16, 2, LENGTH))[:, 0],
                                                                         random.integers(4, VOCABULARY, (16, LENGTH))))
    found = {}
    for name, path in models.items():
        command = [TRANSLATE, "-m", path, "--ids", "--score", "--json"]
        done = subprocess.run(command, input=pairs, text=True, capture_output=True, check=True)
        scores = [json.loads(x)["token_logprobs"][:-1] for x in done.stdout.splitlines()]  # drop the end token
        found[name] = np.concatenate(scores)
    base = next(iter(found.values()))
    for name, x in list(found.items())[1:]:
        d = x - base
        say(what="drift", type=name, tokens=len(d), mean=round(float(d.mean()), 5),
            mean_absolute=round(float(np.abs(d).mean()), 5),
            largest=round(float(np.abs(d).max()), 4), spread_of_logprobs=round(float(base.std()), 3))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder for the files, which are reused")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32],
                        help="batch sizes to measure (default: 1 32)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)),
                        help="number of threads of both programs (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="number of runs; the fastest counts (default: 3)")
    parser.add_argument("--types", nargs="*", default=["f32", "q8"],
                        help="number formats to measure (f32 f16 bf16 q8 q4)")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or temporary
        source, models = os.path.join(folder, "gnmt.pt"), {"f32": os.path.join(folder, "f32.bin")}
        weights = checkpoint(source, np.random.default_rng(1))
        say(what="model", parameters=sum(w.size for n, w in weights.items() if n != "decoder.embedder.weight"))
        convert(source, models["f32"])
        for kind in args.types:
            if kind != "f32":
                models[kind] = os.path.join(folder, kind + ".bin")
                subprocess.run([QUANTIZE, models["f32"], models[kind], kind], check=True, stderr=subprocess.DEVNULL)
        drift(models, np.random.default_rng(3))
        model = Peer(weights)
        random = np.random.default_rng(2)
        for batch in args.batches:
            count = batch + 3 * (batch == 1)
            sources, tokens = random.integers(4, VOCABULARY, (count, LENGTH)).tolist(), count * LENGTH
            base, base_processor, wanted = measure(lambda: peer(model, sources, batch), tokens, args.repeats)
            common = {"what": "speed", "batch": batch, "threads": args.threads}
            say(**common, program="PyTorch " + torch.__version__, type="fp32", tokens_per_second=round(base, 1),
                per_processor_second=round(base_processor, 1))
            for kind, path in models.items():
                speed, processor, found = measure(lambda: engine(path, sources, batch, args.threads), tokens,
                                                  args.repeats)
                say(**common, program="moe", type=kind, tokens_per_second=round(speed, 1),
                    per_processor_second=round(processor, 1),
                    times_pytorch=round(speed / base, 2), times_by_processor_time=round(processor / base_processor, 2),
                    same_translations=sum(a == b for a, b in zip(found, wanted)), of=count)


if __name__ == "__main__":
    main()
