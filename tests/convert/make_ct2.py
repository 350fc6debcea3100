"""Write random models in CTranslate2's layout without CTranslate2, and compute what they must give.

    arrays, about = make(KIND)              variables by name, settings of config.json; KINDS lists the kinds
    write(folder, arrays, about, ...)       a folder with model.bin, config.json, vocabularies and sentencepiece.model
    Reference(arrays, about).score(...)     transformer_numpy.Transformer's scoring and searching, in float64

The reader follows ct2.c's sources, CTranslate2's src/models/model.cc, src/layers/{attention,transformer,common}.cc.
"""
import json
import math
import os
import struct

import numpy as np

import test_hf_tokens
import transformer_numpy
from transformer_numpy import ACTIVATIONS, softmax

WIDTH, HEADS, HIDDEN, PIECES, POSITIONS, REACH = 32, 4, 48, 60, 90, 5
SPECIAL = ("<unk>", "<s>", "</s>")
ENCODED = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}
ACTIVATION = {"relu": 0, "gelu_tanh": 1, "swish": 2, "gelu": 3}
KINDS = {  # activation, norm before, RMS norm, kind of positions, more
    "opennmt": ("relu", 1, 0, "table", {"separate": True}), "sinusoids": ("relu", 1, 0, "computed", {}),
    "argos": ("gelu", 1, 0, "relative", {"gated": True, "scaled": False}),
    "post": ("gelu", 0, 0, "table", {"first": True}), "one-key": ("swish", 1, 0, "table", {"keys": 1}),
    "marian": ("swish", 0, 0, "table", {"zero": True, "tied": True}),
    "t5": ("gelu_tanh", 1, 1, "bias", {"gated": True, "head": 12, "scaled": False, "plain": True}),
    "t5-tied": ("relu", 1, 1, "bias", {"tied": True, "scaled": False, "plain": True})}


def tokens():
    return [*SPECIAL, *("\u2581" + chr(97 + i) if i % 2 else chr(97 + i // 2) for i in range(PIECES - 3))]


def spm(texts=None):
    """Return a SentencePiece model with these pieces."""
    proto, pieces = test_hf_tokens.proto, b""
    for i, text in enumerate(texts or tokens()):
        kind = {"<unk>": 2, "<s>": 3, "</s>": 3, "<pad>": 3}.get(text, 1)
        pieces += proto((1, proto((1, text.encode()), (2, struct.pack("<f", -i)), (3, kind))))
    return pieces + proto((2, proto((3, 1)))) + proto((3, proto((1, b"identity"), (3, 1), (4, 1), (5, 1))))


def make(kind, seed=1):
    """Return ({variable: array}, config.json) of a kind."""
    activation, before, rms, positions, o = KINDS[kind]
    r = np.random.default_rng(seed)
    head, keys, out = o.get("head", WIDTH // HEADS), o.get("keys", HEADS), {}

    def rows(*shape, spread=1.4 if rms else 2.0):
        return (r.standard_normal(shape) * spread / math.sqrt(shape[-1])).astype(np.float32)

    def norm(name):
        out[name + "/gamma"] = (1 + 0.2 * r.standard_normal(WIDTH)).astype(np.float32)
        if not rms:
            out[name + "/beta"] = (0.2 * r.standard_normal(WIDTH)).astype(np.float32)

    def linear(name, n, k):
        out[name + "/weight"] = rows(n, k)
        if not o.get("plain"):
            out[name + "/bias"] = (0.2 * r.standard_normal(n)).astype(np.float32)

    def attention(name, cross, first):
        norm(name + "/layer_norm")
        parts = [HEADS * head, 2 * keys * head] if cross else [(HEADS + 2 * keys) * head]
        for i, n in enumerate(parts):
            linear(f"{name}/linear_{i}", n, WIDTH)
        if rms:  # scores are not scaled
            out[name + "/linear_0/weight"][:HEADS * head] *= head ** -0.5
        linear(f"{name}/linear_{len(parts)}", WIDTH, HEADS * head)
        if keys != HEADS:
            out[name + "/num_heads_kv"] = np.int32(keys)
        if rms:
            out[name + "/queries_scale"] = np.float32(1)
        if positions == "relative" and not cross:
            out[name + "/relative_position_keys"] = rows(2 * REACH + 1, head)
            out[name + "/relative_position_values"] = rows(2 * REACH + 1, head)
        if positions == "bias" and not cross:
            bias = name + "/relative_attention_bias"
            out[bias] = out[first + "/relative_attention_bias"] if first else rows(32, HEADS)
            out[name + "/relative_attention_max_distance"] = np.int32(20)

    for side in "encoder", "decoder":
        embedding = f"{side}/embeddings" + "_0" * (side == "encoder") + "/weight"
        out[embedding] = rows(PIECES, WIDTH, spread=3.0) if side == "encoder" or o.get("separate") else \
            out["encoder/embeddings_0/weight"]
        out.update({f"{side}/num_heads": np.int16(HEADS), f"{side}/pre_norm": np.int8(before),
                    f"{side}/activation": np.int8(ACTIVATION[activation]),
                    f"{side}/scale_embeddings": np.int8(o.get("scaled", True))})
        if positions == "table":
            out[side + "/position_encodings/encodings"] = rows(POSITIONS, WIDTH) if side == "encoder" else \
                out["encoder/position_encodings/encodings"]
        for name in ["layer_norm"] * before + ["layernorm_embedding"] * o.get("first", False):
            norm(f"{side}/{name}")
        for i in range(2):
            layer, first = f"{side}/layer_{i}", f"{side}/layer_0/self_attention" if i else None
            attention(layer + "/self_attention", False, first)
            if side == "decoder":
                attention(layer + "/attention", True, None)
            norm(layer + "/ffn/layer_norm")
            for name in ["linear_0"] + ["linear_0_noact"] * o.get("gated", False):
                linear(f"{layer}/ffn/{name}", HIDDEN, WIDTH)
            linear(layer + "/ffn/linear_1", WIDTH, HIDDEN)
    out["decoder/alignment_layer"], out["decoder/alignment_heads"] = np.int16(-1), np.int16(1)
    out["decoder/start_from_zero_embedding"] = np.int8(o.get("zero", False))
    out["decoder/projection/weight"] = out["decoder/embeddings/weight"] if o.get("tied") else rows(PIECES, WIDTH)
    if not rms:
        out["decoder/projection/bias"] = (0.3 * r.standard_normal(PIECES)).astype(np.float32)
    if kind == "t5-tied":
        out["decoder/scale_outputs"] = np.float32(WIDTH ** -0.5)
    return out, {"add_source_bos": False, "add_source_eos": kind == "opennmt", "bos_token": "<s>", "eos_token": "</s>",
                 "unk_token": "<unk>", "decoder_start_token": "<s>", "layer_norm_epsilon": None}


def encoded(text):
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def old_name(name):
    """Return the name of a variable in version 1, that of OpenNMT-tf."""
    cross = "multi_head" if name.startswith("encoder") else "masked_multi_head"
    for new, old in (("embeddings/weight", "w_embs"), ("embeddings_0/weight", "w_embs"), ("weight", "kernel"),
                     ("layer_norm", "LayerNorm"), ("projection", "dense"), ("linear_0", "conv1d"),
                     ("linear_", "conv1d_"), ("self_attention", cross), ("/attention", "/multi_head")):
        name = name.replace(new, old)
    return f"transformer/{name}:0" if "/" in name and not name.endswith(("num_heads", "scale_embeddings")) else name


def model_bin(arrays, version=6, spec="TransformerSpec"):
    """Return the bytes of model.bin. Equal arrays of several names become aliases, except before version 3."""
    variables, aliases, seen = b"", b"", {}
    n = [0, 0]
    for name in sorted(arrays):
        x = np.asarray(arrays[name])
        matrix = name.removesuffix("_scale")
        if name.endswith("/weight_scale") and seen.get(id(arrays[matrix]), matrix) != matrix:
            continue  # the matrix is an alias
        if x.ndim and version >= 3 and id(arrays[name]) in seen:
            aliases += encoded(name) + encoded(seen[id(arrays[name])])
            n[1] += 1
            continue
        seen[id(arrays[name])] = name
        about = struct.pack("<BI", ENCODED[x.dtype.name], x.nbytes) if version >= 4 else \
            struct.pack("<BI", x.itemsize, x.size)
        variables += encoded(name if version > 1 else old_name(name))
        variables += struct.pack(f"<B{x.ndim}I", x.ndim, *x.shape) + about + x.tobytes()
        n[0] += 1
    head = encoded(spec) + struct.pack("<I", 7) if version > 1 else b""
    return struct.pack("<I", version) + head + struct.pack("<I", n[0]) + variables + (
        struct.pack("<I", n[1]) + aliases if version >= 3 else b"")


def decoder(config, arrays):
    """Return the variables of a decoder-only model of make_decoder's."""
    gemma, at = config["model_type"].startswith("gemma3"), "decoder/layer_{}/"
    names = {"input_layernorm.weight": "self_attention/layer_norm/gamma",
             "post_attention_layernorm.weight": "ffn/layer_norm/gamma",
             "self_attn.o_proj.weight": "self_attention/linear_1/weight",
             "self_attn.q_norm.weight": "self_attention/q_norm/gamma",
             "self_attn.k_norm.weight": "self_attention/k_norm/gamma", "mlp.gate_proj.weight": "ffn/linear_0/weight",
             "mlp.up_proj.weight": "ffn/linear_0_noact/weight", "mlp.down_proj.weight": "ffn/linear_1/weight"}
    if gemma:
        names.update({f"{x}layernorm.weight": f"{x}layer_norm/gamma" for x in (
            "input_", "post_attention_", "pre_feedforward_", "post_feedforward_")})
    embedding = np.float32(arrays["model.embed_tokens.weight"])
    head = np.float32(arrays["lm_head.weight"]) if "lm_head.weight" in arrays else embedding
    out = {"decoder/embeddings/weight": embedding, "decoder/projection/weight": head,
           "decoder/layer_norm/gamma": np.float32(arrays["model.norm.weight"]),
           "decoder/num_heads": np.int16(config["num_attention_heads"]), "decoder/pre_norm": np.int8(1),
           "decoder/activation": np.int8(1 if gemma else 2), "decoder/scale_embeddings": np.int8(gemma),
           "decoder/alibi": np.int8(0), "decoder/start_from_zero_embedding": np.int8(0)}
    for i in range(config["num_hidden_layers"]):
        layer, attention = f"model.layers.{i}.", at.format(i) + "self_attention/"
        for theirs, own in names.items():
            if layer + theirs in arrays:
                out[at.format(i) + own] = np.float32(arrays[layer + theirs])
        for part in "weight", "bias":
            parts = [arrays.get(f"{layer}self_attn.{x}_proj.{part}") for x in "qkv"]
            if parts[0] is not None:
                out[f"{attention}linear_0/{part}"] = np.float32(np.concatenate(parts))
        kind = config["layer_types"][i] if gemma else ""
        out.update({attention + "rotary_dim": np.int32(0), attention + "rotary_interleave": np.int8(0),
                    attention + "num_heads_kv": np.int32(config["num_key_value_heads"])})
        base, scaling = config.get("rope_theta", 1e4), config.get("rope_scaling") or {}
        if kind == "sliding_attention":
            base, scaling = config["rope_local_base_freq"], {}
        if kind or config.get("sliding_window") and config["model_type"] == "mistral":
            out[attention + "sliding_window"] = np.int32(0 if kind == "full_attention" else config["sliding_window"])
        if scaling:
            llama = scaling["rope_type"] == "llama3"
            out.update({attention + "rotary_scaling_type": np.int8(2 * llama),
                        attention + "rotary_scaling_factor": np.float32(scaling["factor"])})
            if llama:
                base = scaling["rope_theta"]
                out.update({attention + "rotary_low_freq_factor": np.float32(scaling["low_freq_factor"]),
                            attention + "rotary_high_freq_factor": np.float32(scaling["high_freq_factor"]),
                            attention + "original_max_position_embeddings": np.int32(
                                scaling["original_max_position_embeddings"])})
        out[attention + "rotary_base"] = np.float32(base)
    if gemma:
        for name in [name for name in out if name.endswith("norm/gamma")]:
            out[name.replace("gamma", "layer_norm_use_residual")] = np.int8(1)
    return out


def quantised(arrays, kind):
    """Return arrays with int8 or int16 matrices and their scales, or with float16."""
    out, done = {}, {}
    for name, x in arrays.items():
        if not name.endswith("/weight"):
            half = kind == "float16" and getattr(x, "dtype", None) == np.float32 and x.ndim
            out[name] = done.setdefault(id(x), x.astype(np.float16)) if half else x
            continue
        if id(x) not in done:
            scale = (1024 / np.abs(x).max()).astype(np.float32) if kind == "int16" else \
                (127 / np.abs(x).max(1)).astype(np.float32)
            codes = np.rint(x * (scale if kind == "int16" else scale[:, None]))
            done[id(x)] = (x.astype(np.float16), None) if kind == "float16" else (codes.astype(kind), scale)
        out[name], scale = done[id(x)]
        if scale is not None:
            out[name + "_scale"] = scale
    return out


def dequantised(arrays):
    """Return the numbers that quantised arrays stand for, in float64."""
    out = {}
    for name, x in arrays.items():
        scale = arrays.get(name + "_scale")
        if not name.endswith("/weight_scale"):
            out[name] = x.astype(np.float64) / (1 if scale is None else scale.reshape(-1, 1).astype(np.float64)
                                                if scale.ndim else np.float64(scale))
    return out


def write(folder, arrays, about, version=6, vocabulary="json", tokeniser="sentencepiece.model", separate=False):
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/model.bin", "wb") as file:
        file.write(model_bin(arrays, version))
    if about is not None:
        with open(folder + "/config.json", "w", encoding="utf-8") as file:
            json.dump(about, file)
    for name in ("source", "target") if separate else ("shared",):
        with open(f"{folder}/{name}_vocabulary.{vocabulary}", "w", encoding="utf-8", newline="") as file:
            file.write(json.dumps(tokens()) if vocabulary == "json" else "".join(x + "\n" for x in tokens()))
    if tokeniser:
        with open(f"{folder}/{tokeniser}", "wb") as file:
            file.write(spm())


class Reference(transformer_numpy.Transformer):
    """A model by the names of its variables. Caches hold the ids so far."""

    def __init__(self, arrays, kind, **generation):
        self.w = {name: np.asarray(x, np.float64) for name, x in dequantised(arrays).items()}
        self.activation, self.before, self.rms, self.positions, self.o = KINDS[kind]
        self.config, self.generation = {}, {"max_new_tokens": 20, "early_stopping": True, **generation}
        self.vocabulary, self.eos, self.experts = PIECES, 2, []
        self.start = PIECES if self.o.get("zero") else 1

    def norm(self, name, x):
        gamma, beta = self.w[name + "/gamma"], self.w.get(name + "/beta")
        if beta is None:
            return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-6) * gamma
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-5) * gamma + beta

    def linear(self, name, x):
        return x @ self.w[name + "/weight"].T + self.w.get(name + "/bias", 0)

    def distances(self, name, rows, cols):
        """Return the distances of keys from queries."""
        return np.arange(cols)[None] - np.arange(rows)[:, None]

    def bias(self, name, rows, cols, both):
        """Return T5's bias [heads, rows, cols]."""
        table, most = self.w[name + "/relative_attention_bias"], int(self.w[name + "/relative_attention_max_distance"])
        n = len(table) // 2 if both else len(table)
        out = np.zeros((rows, cols), int)
        for i in range(rows):
            for j in range(cols):
                d, first = (abs(j - i), n if j > i else 0) if both else (max(i - j, 0), 0)
                if d >= n // 2:
                    d = min(n // 2 + int(math.log(d / (n // 2)) / math.log(most / (n // 2)) * (n - n // 2)), n - 1)
                out[i, j] = first + d
        return table[out].transpose(2, 0, 1)

    def attend(self, name, x, memory, causal):
        own = memory is None
        q = self.linear(name + "/linear_0", x)
        head = self.w[f"{name}/linear_{1 + (not own)}/weight"].shape[1] // HEADS
        kv = q[..., HEADS * head:] if own else self.linear(name + "/linear_1", memory)
        keys = kv.shape[-1] // 2 // head

        def split(y, n):
            y = y.reshape(*y.shape[:-1], n, head).swapaxes(-3, -2)
            return np.repeat(y, HEADS // n, axis=-3)
        q, k, v = split(q[..., :HEADS * head], HEADS), *(split(y, keys) for y in np.split(kv, 2, -1))
        scale = float(self.w.get(name + "/queries_scale", head ** -0.5))
        scores = q @ k.swapaxes(-1, -2) * scale
        near = np.clip(self.distances(name, *scores.shape[-2:]), -REACH, REACH) + REACH
        relative = self.w.get(name + "/relative_position_keys")
        if relative is not None:
            scores = scores + np.einsum("...hid,ijd->...hij", q, relative[near]) * scale
        if name + "/relative_attention_bias" in self.w:
            scores = scores + self.bias(name, *scores.shape[-2:], not causal)
        if causal:
            scores = np.where(self.distances(name, *scores.shape[-2:]) > 0, -np.inf, scores)
        p = softmax(scores)
        y = p @ v
        if relative is not None:
            y = y + np.einsum("...hij,ijd->...hid", p, self.w[name + "/relative_position_values"][near])
        y = y.swapaxes(-3, -2)
        return self.linear(f"{name}/linear_{1 + (not own)}", y.reshape(*y.shape[:-2], HEADS * head))

    def sublayer(self, name, x, function):
        norm = name + "/layer_norm"
        return x + function(self.norm(norm, x)) if self.before else self.norm(norm, x + function(x))

    def feed(self, name, x):
        act = ACTIVATIONS.get(self.activation, lambda x: 0.5 * x * (1 + np.tanh(
            math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))))
        y = act(self.linear(name + "/linear_0", x))
        if self.o.get("gated"):
            y = y * self.linear(name + "/linear_0_noact", x)
        return self.linear(name + "/linear_1", y)

    def side(self, side, ids, memory=None):
        table = self.w[f"{side}/embeddings" + "_0" * (side == "encoder") + "/weight"]
        table = np.concatenate([table, np.zeros((1, WIDTH))])
        x = table[np.asarray(ids)] * (math.sqrt(WIDTH) if self.o.get("scaled", True) else 1)
        n = x.shape[-2]
        if self.positions == "table":
            x = x + self.w[side + "/position_encodings/encodings"][:n]
        if self.positions == "computed":
            rate = np.exp(-math.log(10000) / (WIDTH // 2 - 1) * np.arange(WIDTH // 2))
            angle = np.arange(1, n + 1)[:, None] * rate
            x = x + np.concatenate([np.sin(angle), np.cos(angle)], 1)
        if self.o.get("first"):
            x = self.norm(side + "/layernorm_embedding", x)
        for i in range(2):
            at = f"{side}/layer_{i}/"
            x = self.sublayer(at + "self_attention", x,
                              lambda y, a=at: self.attend(a + "self_attention", y, None, memory is not None))
            if memory is not None:
                x = self.sublayer(at + "attention", x, lambda y, a=at: self.attend(a + "attention", y, memory, False))
            x = self.sublayer(at + "ffn", x, lambda y, a=at: self.feed(a + "ffn", y))
        return self.norm(side + "/layer_norm", x) if self.before else x

    def encode(self, source):
        return None, self.side("encoder", source)

    def decode(self, memory, ids, cache=None):
        ids = np.asarray(ids)
        whole = np.concatenate([cache[0][0], ids], 1) if cache else ids
        x = self.side("decoder", whole, memory) * float(self.w.get("decoder/scale_outputs", 1))
        return self.linear("decoder/projection", x)[:, -ids.shape[1]:], [(whole, whole)]
