"""Marian's models and beam search in plain NumPy float64, the reference for engine tests.

The formulas are those of marian.md (sections 3, 4, 6 and 7) with Marian's own names and matrix orders. This module
shares no code with tools/convert/marian.py: it takes models as {name: array}, see `read_bin`.
"""
import math
import struct

import numpy as np


def read_bin(path):
    """Read a .bin file; return {name: float64 array [in, out]} and its settings."""
    with open(path, "rb") as file:
        data = file.read()
    count = struct.unpack_from("<Q", data, 8)[0]
    heads = np.frombuffer(data, "<u8", 4 * count, 16).reshape(count, 4)
    at, names, shapes, out = 16 + 32 * count, [], [], {}
    for length, *_ in heads:
        names.append(data[at:at + int(length) - 1].decode())
        at += int(length)
    for _, _, rank, _ in heads:
        shapes.append(np.frombuffer(data, "<i4", int(rank), at))
        at += 4 * int(rank)
    at += 8 + struct.unpack_from("<Q", data, at)[0]
    for name, (_, kind, _, size), shape in zip(names, heads, shapes):
        n = int(np.prod(shape))
        if kind == 0x404:
            out[name] = np.frombuffer(data, "<f4", n, at).reshape(shape).astype(np.float64)
        elif kind in (0x4101, 0x4102):
            codes = np.frombuffer(data, "i1" if kind == 0x4101 else "<i2", n, at)
            multiplier = struct.unpack_from("<f", data, at + codes.nbytes)[0]
            turned = codes.reshape(shape) if "Wemb" in name else codes.reshape(shape[::-1]).T
            out[name] = turned / np.float64(multiplier)
        else:
            out[name] = data[at:at + int(size)]
        at += int(size)
    return out


def read_lists(path):
    """Read a lex.*.s2t.bin file (marian.md section 6); return (number of frequent tokens, ids of each source token)."""
    with open(path, "rb") as file:
        data = file.read()
    _, _, first, _, n, count = struct.unpack_from("<6Q", data)
    offsets = np.frombuffer(data, "<u8", n, 48).tolist()
    ids = np.frombuffer(data, "<u4", count, 48 + 8 * n).tolist()
    return first, [ids[a:b] for a, b in zip(offsets, offsets[1:])]


def listed(first, rows, source, size):
    """Return in ascending order the tokens that a translation of `source` may use; both sides share a vocabulary."""
    found, more = {*range(first), *source, *(i for t in source for i in rows[t])}, first
    while len(found) % 8 and more < size:
        found.add(more)
        more += 1
    return sorted(found)


def settings_of(weights):
    """Return the settings that this reference needs, read from special:model.yml."""
    text = weights["special:model.yml"].rstrip(b"\0").decode()
    out, key = {}, None
    for line in text.splitlines():
        if line.startswith("  - "):
            out[key] = [*(out[key] or []), line[4:]]
        else:
            key, _, value = line.partition(":")
            out[key] = value.strip().strip('"')
    return out


def norm(x, scale, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale[0] + bias[0]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {"relu": lambda x: np.maximum(x, 0), "swish": lambda x: x * sigmoid(x),
               "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2}


class Marian:
    used = None  # tokens that a translation may use, or None if all are allowed

    def __init__(self, weights):
        self.w, s = weights, settings_of(weights)
        self.width, self.heads = int(s["dim-emb"]), int(s["transformer-heads"])
        self.layers = int(s["enc-depth"])
        tied = s["transformer-tied-layers"]
        self.decoder = [int(x) for x in tied] if isinstance(tied, list) else list(range(1, int(s["dec-depth"]) + 1))
        self.autoreg = s["transformer-decoder-autoreg"]
        self.before, self.first, self.last = (s["transformer-" + x].replace("d", "") == "n" for x in (
            "preprocess", "postprocess-emb", "postprocess-top"))
        version = [int(x) for x in s["version"].split()[0].lstrip("v").split(".")]
        self.raw = self.before and version < [1, 10, 28]  # these versions normalise only the queries of self-attention
        self.activation, self.average_activation = (ACTIVATIONS[s[f"transformer-{x}-activation"]] for x in (
            "ffn", "aan"))
        self.depth, self.gated = int(s["transformer-aan-depth"]), s["transformer-aan-nogate"] != "true"
        shared = "Wemb" in weights
        self.sources = weights["Wemb" if shared else "encoder_Wemb"]
        self.targets = weights["Wemb" if shared else "decoder_Wemb"]
        if s["tied-embeddings-all"] == "true" or s["tied-embeddings"] == "true":
            self.output = self.targets.T
        else:
            self.output = weights["decoder_ff_logit_out_W"]
        self.bias = weights["decoder_ff_logit_out_b"][0] if "decoder_ff_logit_out_b" in weights else 0.0

    def embed(self, rows, first=0):
        """Return the sum of scaled embeddings and positions, starting at position `first`."""
        if "Wpos" in self.w:
            return rows + self.w["Wpos"][np.minimum(np.arange(first, first + len(rows)), len(self.w["Wpos"]) - 1)]
        k = self.width // 2
        step = np.float32(math.log(10000) / (k - 1))
        frequency = np.exp(np.arange(k, dtype=np.float32) * -step)
        angle = np.arange(first, first + len(rows), dtype=np.float32)[:, None] * frequency
        return math.sqrt(self.width) * rows + np.concatenate([np.sin(angle), np.cos(angle)], 1)

    def linear(self, x, weight, bias):
        return x @ self.w[weight] + self.w[bias][0]

    def normed(self, x, prefix, suffix=""):
        return norm(x, *(self.w[f"{prefix}_ln_{word}{suffix}"] for word in ("scale", "bias")))

    def sublayer(self, x, prefix, f):
        """Apply a sublayer f with its norm and residual connection."""
        return x + f(self.normed(x, prefix, "_pre")) if self.before else self.normed(x + f(x), prefix)

    def self_attend(self, prefix, x, causal=False):
        return self.sublayer(x, prefix + "_Wo", lambda y: self.attend(prefix, y, x if self.raw else y, causal))

    def average(self, prefix, x):
        """Apply average attention. The norm applies to the mean of the rows so far; the gate also reads x."""
        y = np.cumsum(x, 0) / np.arange(1, len(x) + 1)[:, None]
        if self.before:
            y = self.normed(y, prefix + "_ffn", "_pre")
        for i in range(1, self.depth):
            y = self.average_activation(self.linear(y, f"{prefix}_W{i}", f"{prefix}_b{i}"))
        if y.shape[1] != self.width:
            y = self.linear(y, f"{prefix}_W{self.depth}", f"{prefix}_b{self.depth}")
        if self.gated:
            y = (sigmoid(self.linear(x, prefix + "_Wi", prefix + "_bi")) * x
                 + sigmoid(self.linear(y, prefix + "_Wf", prefix + "_bf")) * y)
        return x + y if self.before else self.normed(x + y, prefix + "_ffn")

    def attend(self, prefix, x, memory, causal=False):
        q = self.linear(x, prefix + "_Wq", prefix + "_bq")
        k, v = (self.linear(memory, f"{prefix}_W{n}", f"{prefix}_b{n}") for n in "kv")
        size, parts = self.width // self.heads, []
        for h in range(self.heads):
            at = slice(h * size, (h + 1) * size)
            scores = q[:, at] @ k[:, at].T / math.sqrt(size)
            if causal:
                scores[np.triu_indices(len(x), 1)] = -np.inf
            parts.append(softmax(scores) @ v[:, at])
        return self.linear(np.concatenate(parts, 1), prefix + "_Wo", prefix + "_bo")

    def ffn(self, prefix, x):
        return self.linear(self.activation(self.linear(x, prefix + "W1", prefix + "b1")), prefix + "W2", prefix + "b2")

    def ssru(self, prefix, x):
        c, out = np.zeros(self.width), []
        for gate, u in zip(sigmoid(self.linear(x, prefix + "_Wf", prefix + "_bf")), x @ self.w[prefix + "_W"]):
            c = gate * c + (1 - gate) * u
            out.append(np.maximum(c, 0))
        return np.array(out)

    def bottom(self, side, x):
        return self.normed(x, side + "_emb", "_pre") if self.first else x

    def top(self, side, x):
        return self.normed(x, side + "_top") if self.last else x

    def encode(self, source):
        x = self.bottom("encoder", self.embed(self.sources[source]))
        for i in range(1, self.layers + 1):
            p = f"encoder_l{i}_"
            x = self.self_attend(p + "self", x)
            x = self.sublayer(x, p + "ffn_ffn", lambda y, p=p: self.ffn(p + "ffn_", y))
        return self.top("encoder", x)

    def logprobs(self, memory, target):
        """Return log-probabilities [len(target) + 1, V] of the token that follows each prefix of a target."""
        x = self.embed(np.concatenate([np.zeros((1, self.width)), self.targets[np.array(target, int)]]))
        x = self.bottom("decoder", x)
        for i in self.decoder:
            p = f"decoder_l{i}_"
            if self.autoreg == "rnn":
                prefix = p + ("rnn" if self.before else "rnn_ffn")
                x = self.sublayer(x, prefix, lambda y, p=p: self.ssru(p + "rnn", y))
            elif self.autoreg == "average-attention":
                x = self.average(p + "aan", x)
            else:
                x = self.self_attend(p + "self", x, True)
            x = self.sublayer(x, p + "context_Wo", lambda y, p=p: self.attend(p + "context", y, memory))
            x = self.sublayer(x, p + "ffn_ffn", lambda y, p=p: self.ffn(p + "ffn_", y))
        logits = self.top("decoder", x) @ self.output + self.bias
        if self.used is not None:
            outside = np.ones(logits.shape[-1], bool)
            outside[self.used] = False
            logits[..., outside] = -np.inf
        return logits - logits.max(-1, keepdims=True) - np.log(
            np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))

    def score(self, source, target):
        """Return the log-probabilities of a target's tokens."""
        logp = self.logprobs(self.encode(source), target[:-1])
        return [logp[t, x] for t, x in enumerate(target)]

    def search(self, source, beam, normalize, factor, eos=0, unk=1, penalty=0.0):
        """Run Marian's beam search; return [(ids, score)], best first. `source` includes </s>."""
        memory, live, done, t = self.encode(source), [((), 0.0)], [], 0
        while live:
            t += 1
            rows = [self.logprobs(memory, ids)[-1] for ids, _ in live]
            places = beam - len(done)
            candidates = []
            for (ids, total), row in zip(live, rows):
                row = row.copy()
                row[unk] = -np.inf
                candidates += [(total + row[i], ids + (int(i),)) for i in np.argsort(-row, kind="stable")[:places]]
            best = sorted(candidates, key=lambda x: -x[0])[:places]
            cut = t >= factor * len(source)
            done += [(ids, (total - penalty * t) / t**normalize) for total, ids in best if ids[-1] == eos or cut]
            live = [(ids, total) for total, ids in best if ids[-1] != eos and not cut]
        return sorted(done, key=lambda x: -x[1])

    def greedy(self, source, factor, eos=0, unk=1):
        return list(self.search(source, 1, 1.0, factor, eos, unk)[0][0])
