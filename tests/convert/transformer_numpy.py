"""Transformers in Hugging Face's layout in plain NumPy float64: an independent implementation of
../shared/docs/transformer.md, sections 1 to 6, which shares no code with tools/. It supports three families: M2M-100
with dense NLLB, NLLB-MoE, and Marian.

    model = Transformer("folder")                      config.json, generation_config.json, *.safetensors
    model.score(source, target)                        log-probabilities [n, V] after the start token and target[:n-1]
    model.experts                                      [("encoder.3", [T, 2]), ...] as chosen by the last score(), with
                                                       the checkpoint's numbers
    model.greedy(source, max_new=20, force=7)          Hypothesis
    model.beam(source, 4, early_stopping=True, ...)    [Hypothesis], best first

Sources and targets are token ids, including language tokens and end, but not the start token. A hypothesis has ids, the
sum of its log-probabilities, its score, and the smallest margin of any decision in its search.
"""
import collections
import glob
import json
import math
import os
import struct

import numpy as np

Hypothesis = collections.namedtuple("Hypothesis", "ids logprob score margin")


def read_safetensors(path):
    """Read a safetensors file; return its arrays by name, in float64."""
    with open(path, "rb") as file:
        data = file.read()
    length = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, about in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = about["data_offsets"]
        raw = data[8 + length + begin:8 + length + end]
        if about["dtype"] == "BF16":
            array = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(raw, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[about["dtype"]])
        out[name] = array.astype(np.float64).reshape(about["shape"])
    return out


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def layer_norm(x, w):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def linear(x, w):
    return x @ w["weight"].T + w["bias"]


ACTIVATIONS = {"relu": lambda x: np.maximum(x, 0), "swish": lambda x: x / (1 + np.exp(-x)),
               "silu": lambda x: x / (1 + np.exp(-x)),
               "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))}


def m2m_positions(count, width):
    """Return rows 2, 3, ... of M2M-100's table of positions: sines, then cosines, of p exp(-i ln(10000) / (width/2 -
    1)). Each operation is rounded from float64 to float32. torch's exp is off by one ulp for a few frequencies, so its
    table differs by up to 1.5e-5."""
    half = width // 2
    step = np.float32(math.log(10000) / (half - 1))
    frequency = np.exp((np.arange(half, dtype=np.float32) * -step).astype(np.float64)).astype(np.float32)
    angle = (np.arange(2, 2 + count, dtype=np.float32)[:, None] * frequency).astype(np.float64)
    table = np.concatenate([np.sin(angle), np.cos(angle)], 1).astype(np.float32)
    return np.pad(table, ((0, 0), (0, width % 2))).astype(np.float64)


def marian_positions(count, width):
    """Return Marian's table of positions: sines, then cosines, of p / 10000^(2i / width), rounded to float32."""
    angle = np.arange(count)[:, None] / np.power(10000, 2 * np.arange((width + 1) // 2) / width)
    return np.concatenate([np.sin(angle), np.cos(angle[:, :width // 2])], 1).astype(np.float32).astype(np.float64)


def tree(weights):
    """Nest arrays by the parts of their names: {"a.b.weight": x} becomes {"a": {"b": {"weight": x}}}."""
    out = {}
    for name, array in weights.items():
        *path, last = name.split(".")
        at = out
        for part in path:
            at = at.setdefault(part, {})
        at[last] = array
    return out


def sorted_margin(values, chosen):
    """Return the smallest difference between neighbours among the first `chosen` + 1 of the sorted values."""
    values = values[:chosen + 1]
    values = values[np.isfinite(values)]
    return np.inf if len(values) < 2 else float(np.min(values[:-1] - values[1:]))


class Transformer:
    def __init__(self, folder):
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            self.config = c = json.load(file)
        path = os.path.join(folder, "generation_config.json")
        self.generation = {}
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                self.generation = json.load(file)
        weights = {}
        for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
            weights.update(read_safetensors(path))
        self.w = tree({name[6:] if name.startswith("model.") else name: x for name, x in weights.items()})
        self.marian, self.mixture = c["model_type"] == "marian", c["model_type"].startswith("nllb")
        self.width, self.vocabulary = c["d_model"], c.get("decoder_vocab_size") or c["vocab_size"]
        self.act = ACTIVATIONS[c["activation_function"]]
        self.scale = math.sqrt(self.width) if c["scale_embedding"] else 1.0
        self.start = c["decoder_start_token_id"]
        self.eos, self.pad = c["eos_token_id"], c["pad_token_id"]
        self.positions = (marian_positions if self.marian else m2m_positions)(c["max_position_embeddings"], self.width)
        shared = self.w["shared"]["weight"] if "shared" in self.w else None
        self.embeddings = {}
        for side in ("encoder", "decoder"):
            own = self.w[side].get("embed_tokens")
            self.embeddings[side] = own["weight"] if own else shared
        self.output = self.embeddings["decoder"]
        if not c.get("tie_word_embeddings", True):
            self.output = self.w["lm_head"]["weight"]
        self.bias = self.w["final_logits_bias"][0] if "final_logits_bias" in self.w else 0.0
        self.experts = []

    # ---- Layers. Sequences are [B, T, width]; B is the number of hypotheses of a sentence. ----

    def embed(self, side, ids, first):
        ids = np.asarray(ids)
        return self.embeddings[side][ids] * self.scale + self.positions[first:first + ids.shape[1]]

    def attend(self, w, side, x, keys, values, causal_from=None):
        """Attend to keys and values [B, S, width]; with `causal_from`, row t sees the first causal_from + t + 1."""
        heads = self.config[side + "_attention_heads"]
        h = self.width // heads

        def split(y):
            return y.reshape(*y.shape[:2], heads, h).transpose(0, 2, 1, 3)
        scores = split(linear(x, w["q_proj"]) * h ** -0.5) @ split(keys).transpose(0, 1, 3, 2)
        if causal_from is not None:
            t, s = scores.shape[-2:]
            scores = np.where(np.arange(s)[None, :] > causal_from + np.arange(t)[:, None], -np.inf, scores)
        out = softmax(scores) @ split(values)
        return linear(out.transpose(0, 2, 1, 3).reshape(x.shape), w["out_proj"])

    def sublayer(self, x, norm, function):
        return layer_norm(x + function(x), norm) if self.marian else x + function(layer_norm(x, norm))

    def route(self, name, w, x):
        """Apply NLLB-MoE's mixture: the two best experts, weighted by renormalised probabilities times 0.8."""
        c, rows = self.config, x.reshape(-1, self.width)
        p = softmax(rows @ w["router"]["classifier"]["weight"].T)
        best = np.argsort(-p, axis=1, kind="stable")[:, :2]
        g = np.take_along_axis(p, best, 1)
        g = g / g.sum(1, keepdims=True) * (1 - c["moe_token_dropout"])
        out = np.zeros_like(rows)
        for e in range(c["num_experts"]):
            expert = w["experts"]["expert_%d" % e]
            for place in (0, 1):
                chosen = best[:, place] == e
                if chosen.any():
                    y = linear(self.act(linear(rows[chosen], expert["fc1"])), expert["fc2"])
                    out[chosen] += g[chosen, place][:, None] * y
        self.experts.append((name, best))
        return out.reshape(x.shape)

    def feed_forward(self, x, side, i, w):
        if not self.mixture:
            return self.sublayer(x, w["final_layer_norm"], lambda y: linear(self.act(linear(y, w["fc1"])), w["fc2"]))
        step = self.config[side + "_sparse_step"]
        if step > 0 and (i + 1) % step == 0:
            return self.sublayer(x, w["ff_layer_norm"], lambda y: self.route("%s.%d" % (side, i), w["ffn"], y))
        return self.sublayer(x, w["ff_layer_norm"], lambda y: linear(self.act(linear(y, w["ffn"]["fc1"])),
                                                                     w["ffn"]["fc2"]))

    def layers(self, side):
        return [self.w[side]["layers"][str(i)] for i in range(self.config[side + "_layers"])]

    def last_norm(self, side, x):
        return x if self.marian else layer_norm(x, self.w[side]["layer_norm"])

    def encode(self, source):
        """Encode a source; return (memory [T, width], the cross-attention keys and values of each layer)."""
        x = self.embed("encoder", [source], 0)
        for i, w in enumerate(self.layers("encoder")):
            a = w["self_attn"]
            x = self.sublayer(x, w["self_attn_layer_norm"],
                              lambda y, a=a: self.attend(a, "encoder", y, linear(y, a["k_proj"]),
                                                         linear(y, a["v_proj"])))
            x = self.feed_forward(x, "encoder", i, w)
        x = self.last_norm("encoder", x)
        cross = [w["cross_attention" if self.mixture else "encoder_attn"] for w in self.layers("decoder")]
        return x[0], [(linear(x, a["k_proj"]), linear(x, a["v_proj"])) for a in cross]

    def decode(self, memory, ids, cache=None):
        """Decode ids [B, T] that follow the ids in the cache; return (logits [B, T, V], the extended cache of keys and
        values in each layer)."""
        name = "cross_attention" if self.mixture else "encoder_attn"
        before = cache[0][0].shape[1] if cache else 0
        x, after = self.embed("decoder", ids, before), []
        for i, w in enumerate(self.layers("decoder")):
            a, c = w["self_attn"], w[name]

            def own(y):
                keys, values = linear(y, a["k_proj"]), linear(y, a["v_proj"])
                if cache:
                    keys, values = (np.concatenate(z, 1) for z in ((cache[i][0], keys), (cache[i][1], values)))
                after.append((keys, values))
                return self.attend(a, "decoder", y, keys, values, before)
            x = self.sublayer(x, w["self_attn_layer_norm"], own)
            keys, values = (np.broadcast_to(z, (len(x), *z.shape[1:])) for z in memory[i])
            x = self.sublayer(x, w[name + "_layer_norm"], lambda y: self.attend(c, "decoder", y, keys, values))
            x = self.feed_forward(x, "decoder", i, w)
        return self.last_norm("decoder", x) @ self.output.T + self.bias, after

    # ---- Scoring and searching ----

    def score(self, source, target, never=()):
        """Return log-probabilities [n, V]: row t predicts target[t] from its prefix. `never` lists excluded ids."""
        self.experts = []
        logits = self.decode(self.encode(source)[1], [[self.start, *target[:-1]]])[0][0]
        logits[:, list(never)] = -np.inf
        return log_softmax(logits)

    def process(self, logits, step, o):
        """Return log-probabilities [B, V] after Hugging Face's logits processors."""
        logp = log_softmax(logits)
        logp[:, o["bad_words"]] = -np.inf
        force = o["force"] if step == 0 else -1
        if o["force_end"] >= 0 and step == o["max_new"] - 1:
            force = o["force_end"]
        if force >= 0:
            logp[:] = -np.inf
            logp[:, force] = 0
        return log_softmax(logp) if o["renormalize"] else logp

    def options(self, given):
        """Return the search options of generation_config.json with the overrides in `given`."""
        g = {**self.config, **self.generation}
        most = g.get("max_new_tokens") or g.get("max_length", 20) - 1
        o = {"max_new": most, "force": -1, "length_penalty": g.get("length_penalty", 1.0),
             "early_stopping": bool(g.get("early_stopping", False)), "renormalize": bool(g.get("renormalize_logits")),
             "bad_words": [x for [x] in g.get("bad_words_ids") or []],
             "force_end": -1 if g.get("forced_eos_token_id") is None else g["forced_eos_token_id"]}
        assert set(given) <= set(o), given
        return {**o, **given}

    def greedy(self, source, **given):
        o = self.options(given)
        memory, cache, ids, total, margin = self.encode(source)[1], None, [], 0.0, np.inf
        while len(ids) < o["max_new"] and ids[-1:] != [self.eos]:
            logits, cache = self.decode(memory, [ids[-1:] or [self.start]], cache)
            logp = self.process(logits[:, -1], len(ids), o)[0]
            order = np.argsort(-logp, kind="stable")
            margin = min(margin, sorted_margin(logp[order[:2]], 1))
            ids.append(int(order[0]))
            total += logp[order[0]]
        return Hypothesis(ids, float(total), float(total) / len(ids) ** o["length_penalty"], margin)

    def beam(self, source, n, **given):
        """Run Hugging Face's beam search for one sentence. Of the 2n best continuations, those that end are finished
        if among the first n, and the n best that do not end continue. Keep the n best finished hypotheses."""
        o = self.options(given)
        memory = self.encode(source)[1]
        running, cache = [(0.0, [])], None  # [(sum of log-probabilities, ids)], best first
        finished, margin, penalty = [], np.inf, o["length_penalty"]
        for step in range(o["max_new"]):
            logits, cache = self.decode(memory, [ids[-1:] or [self.start] for _, ids in running], cache)
            logp = self.process(logits[:, -1], step, o) + np.array([total for total, _ in running])[:, None]
            order = np.argsort(-logp, axis=None, kind="stable")[:2 * n + 1]
            values = logp.reshape(-1)[order]
            margin = min(margin, sorted_margin(values, 2 * n))
            candidates = [(v, divmod(int(at), self.vocabulary)) for v, at in zip(values[:2 * n], order)
                          if np.isfinite(v)]
            ends = [word == self.eos or step + 1 == o["max_new"] for _, (_, word) in candidates]
            for (value, (row, word)), end in list(zip(candidates, ends))[:n]:
                if end:
                    finished.append((value / (step + 1) ** penalty, value, running[row][1] + [word]))
            finished.sort(key=lambda f: -f[0])
            scores = np.array([f[0] for f in finished])
            margin = min(margin, sorted_margin(scores, n))
            finished = finished[:n]
            alive = [c for c, end in zip(candidates, ends) if not end][:n]
            if not alive:
                break
            running = [(value, running[row][1] + [word]) for value, (row, word) in alive]
            cache = [(k[[row for _, (row, _) in alive]], v[[row for _, (row, _) in alive]]) for k, v in cache]
            if len(finished) == n:
                if o["early_stopping"]:
                    break
                best = running[0][0] / (step + 1) ** penalty
                margin = min(margin, abs(best - finished[-1][0]))
                if best <= finished[-1][0]:
                    break
        return [Hypothesis(ids, float(value), float(score), margin) for score, value, ids in finished]
