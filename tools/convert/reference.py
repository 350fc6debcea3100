#!/usr/bin/env python3
"""The model in plain PyTorch: a readable reference for testing the C engine.

Shapes are written [rows, columns]; weights are [out, in], so a linear layer is y = x W^T. Sentences are decoded one at
a time, with T source tokens, B hypotheses in the beam, model width d and n experts. Arithmetic is float32, or float64
with --float64. Quantised weights are dequantised on reading; activations are never quantised.

"eq N" and "App. X" refer to Shazeer et al. 2017 (arXiv 1701.06538), "GNMT" to Wu et al. 2016 (arXiv 1609.08144), "Deep
MoE" to Eigen et al. 2013 (arXiv 1312.4314). Settings in the model file (moefile.describe) select between variants in
these papers.

    import reference
    model = reference.load("model.bin")
    best = model.translate(ids, model.languages["de"])[0]
"""
import argparse
import json
import math
import signal
import sys
import types

import numpy as np
import torch

import moefile

# ---- Ops: linear, embedding, LSTM ------------------------------------------------------------------------------------


def linear(x, w, bias=None):
    """Return y = x W^T + b. x [rows, in], w [out, in], bias [out] -> [rows, out]."""
    y = x @ w.T
    return y if bias is None else y + bias


def embed(ids, w, scale):
    """Return scaled rows of the embedding matrix. ids: integers, w [V, d] -> [len(ids), d]."""
    return w[torch.as_tensor(ids, dtype=torch.long)] * scale


def lstm_step(zx, r, c, w, forget_bias=0.0):
    """Run one step of an LSTM, with projection if w has one (App. E: 2048 hidden units projected to 512).

        i, f, g, o = zx + r W_r^T            zx = x W_x^T + bias, computed by the caller for all steps at once
        c' = sigmoid(f + forget_bias) * c + sigmoid(i) * tanh(g)
        r' = (sigmoid(o) * tanh(c')) W_proj^T
    zx [rows, 4H], r [rows, P], c [rows, H]; w has w_r [4H, P] and optionally w_proj [P, H] -> r', c'.
    """
    i, f, g, o = (zx + r @ w["w_r"].T).chunk(4, dim=1)
    c = torch.sigmoid(f + forget_bias) * c + torch.sigmoid(i) * torch.tanh(g)
    r = torch.sigmoid(o) * torch.tanh(c)
    return (r @ w["w_proj"].T if "w_proj" in w else r), c


def lstm_start(w, rows):
    """Return the zero state (r, c) of an LSTM."""
    like = w["w_r"]
    proj = like.shape[1]
    return like.new_zeros(rows, proj), like.new_zeros(rows, like.shape[0] // 4)


def lstm_layer(x, w, forget_bias=0.0, backward=False, ends=None):
    """Run an LSTM over x [T, in], forward or backward; return [T, P]. Append the final state (r, c) to `ends`."""
    zx = linear(x, w["w_x"], w["bias"])
    r, c = lstm_start(w, 1)
    out = [None] * len(x)
    for t in reversed(range(len(x))) if backward else range(len(x)):
        r, c = lstm_step(zx[t:t + 1], r, c, w, forget_bias)
        out[t] = r
    if ends is not None:
        ends.append((r, c))
    return torch.cat(out)


def bidirectional(x, forward, backward, merge, forget_bias=0.0, ends=None):
    """Run both directions over a sentence and concatenate (forward first) or sum their outputs. Append the final state
    of the backward direction to `ends`. x [T, in] -> [T, 2P] or [T, P]."""
    a = lstm_layer(x, forward, forget_bias)
    b = lstm_layer(x, backward, forget_bias, backward=True, ends=ends)
    return torch.cat([a, b], dim=1) if merge == "concat" else a + b


# ---- Ops: gates ------------------------------------------------------------------------------------------------------
# A gate returns a dense matrix [rows, n] of weights, zero for unselected experts. A mask is a boolean [rows, n].


def sigmoid_gate(logits):
    """Bengio et al. 2015: select every expert, weighted by its sigmoid."""
    return torch.sigmoid(logits)


def softmax_gate(logits):
    """eq 2 and 15: select every expert, weighted by the softmax."""
    return torch.softmax(logits, dim=1)


def topk_mask(logits, k):
    """eq 5 and 17: select the k largest logits of each row; the lower index wins ties."""
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, True)


def batchwise_mask(p, m):
    """eq 18 (App. F): select for each expert the m rows of the batch with the largest p; the lower row wins ties."""
    return topk_mask(p.T.contiguous(), m).T


def batchwise_count(k, rows, n):
    """Return m = k |X| / n of App. F, rounded down, at least 1."""
    return max(1, k * rows // n)


def threshold_mask(p, threshold):
    """eq 19: select the experts whose probability exceeds their threshold; a row may select none."""
    return p > threshold


def masked_gate(logits, mask, empty="top1"):
    """eq 16: return the softmax restricted to the mask (equal to p_i / sum of the selected p). In rows without a
    selected expert, "top1" gives weight 1 to the largest logit, "zero" leaves all weights 0."""
    none = ~mask.any(dim=1)
    if empty == "top1":
        mask = mask | (topk_mask(logits, 1) & none[:, None])
        none = torch.zeros_like(none)
    g = torch.softmax(logits.masked_fill(~mask, -math.inf).masked_fill(none[:, None], 0), dim=1)
    return g.masked_fill(none[:, None], 0)


def topk_gate(logits, k):
    """eq 3 without noise: return the softmax over the k largest logits."""
    return masked_gate(logits, topk_mask(logits, k))


def noisy_logits(logits, f, w_noise, normal):
    """eq 4: return H(x) = logits + normal * softplus(f W_noise^T). f [rows, F], w_noise [n, F], normal [rows, n]."""
    return logits + normal * torch.nn.functional.softplus(f @ w_noise.T)


def noisy_topk_gate(x, w_gate, w_noise, k, normal):
    """eq 3 to 5: add noise of learned size before the selection. normal [rows, n]: standard normal numbers."""
    return topk_gate(noisy_logits(x @ w_gate.T, x, w_noise, normal), k)


def batchwise_gate(logits, m, empty="top1"):
    """eq 15, 16 and 18: apply the strictly balanced gate used in training."""
    return masked_gate(logits, batchwise_mask(softmax_gate(logits), m), empty)


def threshold_gate(logits, threshold, empty="top1"):
    """eq 15, 16 and 19: apply the gate used at inference, with thresholds instead of the batchwise mask."""
    return masked_gate(logits, threshold_mask(softmax_gate(logits), threshold), empty)


def level_gate(logits, level, threshold=None, batchwise=False):
    """Apply the gate of one level to n logits as the model file specifies; batchwise: select by eq 18 over the rows."""
    if batchwise:
        return batchwise_gate(logits, batchwise_count(level.k, *logits.shape), level.empty)
    if level.gate == "softmax":
        return softmax_gate(logits)
    if level.gate == "sigmoid":
        return sigmoid_gate(logits)
    if level.gate == "topk":
        return topk_gate(logits, level.k)
    return threshold_gate(logits, threshold, level.empty)


def two_level_gate(parent, logits, level, threshold=None, batchwise=False):
    """eq 12: the weight of expert j in group i is Gp_i * G_ij. parent: weights Gp [rows, a]; logits [rows, a b], b per
    group -> (weights, probabilities) [rows, a b], both zero in groups that the parent did not select for a row.

    The gate and the batchwise mask of group i only cover the rows X(i) that the parent sends to the group.
    """
    g, p = torch.zeros_like(logits), torch.zeros_like(logits)
    b = logits.shape[1] // parent.shape[1]
    for i in parent.any(dim=0).nonzero().flatten().tolist():
        rows, own = parent[:, i].nonzero().flatten(), slice(i * b, (i + 1) * b)
        inside = logits[rows, own]
        t = None if threshold is None else threshold[own]
        p[rows, own] = softmax_gate(inside)
        g[rows, own] = parent[rows, i:i + 1] * level_gate(inside, level, t, batchwise)
    return g, p


def gate_features(x, layer, w):
    """Return the gates' input: x, or relu(W_h x + b_h) for MLP gates (Deep MoE, section 3). [rows, D] -> [rows, F]."""
    if not layer.gate_hidden:
        return x
    return torch.relu(linear(x, w["gate.hidden.weight"], w.get("gate.hidden.bias")))


def gate_logits(f, layer, w, name, normal=None):
    """Return the logits of "gate" or "parent": a linear map, optionally rectified, then eq 4."""
    logits = linear(f, w[name + ".weight"], w.get(name + ".bias"))
    if layer.gate_relu:
        logits = torch.relu(logits)
    return logits if normal is None else noisy_logits(logits, f, w[name + ".noise"], normal[name])


def moe_gate(x, layer, w, normal=None, batchwise=False):
    """Apply the gate of a MoE layer with one or two levels. Return a dict: "gate" [rows, E], the weights;
    "gate.probabilities" [rows, E], the softmax before the mask; for two levels also "parent" and
    "parent.probabilities" [rows, a]. normal: dict of standard normal numbers "gate" [rows, E] and "parent" [rows, a]
    for the noise of eq 4, or None to disable noise."""
    f = gate_features(x, layer, w)
    logits = gate_logits(f, layer, w, "gate", normal)
    if not layer.groups:
        return {"gate": level_gate(logits, layer, w.get("gate.threshold"), batchwise),
                "gate.probabilities": softmax_gate(logits)}
    above = gate_logits(f, layer, w, "parent", normal)
    parent = level_gate(above, layer.parent, w.get("parent.threshold"), batchwise)
    g, p = two_level_gate(parent, logits, layer, w.get("gate.threshold"), batchwise)
    return {"gate": g, "gate.probabilities": p, "parent": parent, "parent.probabilities": softmax_gate(above)}


# ---- Ops: experts, the MoE layer -------------------------------------------------------------------------------------


def mlp_expert(x, up, down):
    """App. E: apply one hidden layer with ReLU and no biases. x [rows, d], up [h, d], down [d, h] -> [rows, d]."""
    return torch.relu(x @ up.T) @ down.T


def linear_expert(x, w, bias=None, activation="relu"):
    """Deep MoE, section 3: apply a linear map, optionally rectified. x [rows, d], w [h, d] -> [rows, h]."""
    y = linear(x, w, bias)
    return torch.relu(y) if activation == "relu" else y


def expert_functions(layer, w):
    """Return (experts as functions of rows, output width of each)."""
    if layer.expert == "mlp":
        up, down = w["experts"]
        return [lambda x, i=i: mlp_expert(x, up[i], down[i]) for i in range(layer.experts)], up.shape[2]
    n, h = layer.experts, layer.hidden
    weights, biases = w["experts.weight"].split(h), w["experts.bias"].split(h) if "experts.bias" in w else [None] * n
    return [lambda x, i=i: linear_expert(x, weights[i], biases[i], layer.activation) for i in range(n)], h


def mixture(x, g, experts, columns, scale=1.0):
    """eq 1: return y = sum_i g_i scale E_i(x) over the i with g_i > 0, in order. g [rows, n] -> [rows, columns]."""
    y = x.new_zeros(len(x), columns)
    for i in g.any(dim=0).nonzero().flatten().tolist():
        rows = g[:, i].nonzero().flatten()
        y[rows] += g[rows, i:i + 1] * (experts[i](x[rows]) * scale)
    return y


def layer_norm(x, layer, w, name="norm"):
    """Normalise rows: Ba et al. 2016 (arXiv 1607.06450), or for "rms" Zhang and Sennrich 2019 (arXiv 1910.07467)."""
    if layer.norm_kind == "rms":
        return x / (x.square().mean(1, keepdim=True) + layer.epsilon).sqrt() * w[name + ".weight"]
    return torch.nn.functional.layer_norm(x, x.shape[1:], w[name + ".weight"], w[name + ".bias"], layer.epsilon)


def moe_layer(x, layer, w, normal=None, batchwise=False):
    """Apply a MoE layer: gate, experts, and optionally a sigmoid of their sum, residual and norm. Return (y, result of
    moe_gate)."""
    inputs = layer_norm(x, layer, w) if layer.norm in ("before", "both") else x
    gates = moe_gate(inputs, layer, w, normal, batchwise)
    y = mixture(inputs, gates["gate"], *expert_functions(layer, w), layer.scale)
    if layer.output == "sigmoid":
        y = torch.sigmoid(y)
    y = layer_norm(y, layer, w, "post_norm") if layer.norm == "both" else y
    y = x + y if layer.residual else y
    return (layer_norm(y, layer, w) if layer.norm == "after" else y), gates


def any_layer(x, layer, w):
    """Apply a layer other than a mixture or cross-attention to the rows of a sentence, with norm and residual. SSRU:
    Kim et al. 2019 (D19-5632); average attention: Zhang et al. 2018 (arXiv 1805.00631), as in Marian."""
    def product(y, part):
        return linear(y, w[part + ".weight"], w.get(part + ".bias"))

    y = x
    if layer.kind == "average":
        y = torch.stack([x[:n + 1].mean(0) for n in range(len(x))])
    if layer.norm in ("before", "both"):
        y = layer_norm(y, layer, w)
    active = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "swish": torch.nn.functional.silu,
              "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}
    if layer.kind == "ffn":
        units = product(y, "up")
        gate = product(y, "gate") if layer.gated else units
        y = active[layer.activation](gate) * (units if layer.gated else 1)
        y = product(y, "down")
    if layer.kind == "average":
        for i in range(layer.depth - 1):
            y = active[layer.activation](product(y, f"up.{i}"))
        if "down.weight" in w:
            y = product(y, "down")
        if layer.gated:
            y = torch.sigmoid(product(x, "input")) * x + torch.sigmoid(product(y, "forget")) * y
    if layer.kind == "ssru":
        u, f = product(y, "input"), product(y, "forget")
        c, rows = torch.zeros_like(u[0]), []
        for now, gate in zip(u, torch.sigmoid(f)):
            c = gate * c + (1 - gate) * now
            rows.append(torch.relu(c))
        y = torch.stack(rows)
    y = layer_norm(y, layer, w, "post_norm") if layer.norm == "both" else y
    y = x + y if layer.residual else y
    return layer_norm(y, layer, w) if layer.norm == "after" else y


# ---- Ops: attention, output ------------------------------------------------------------------------------------------


def attention(memory, keys, query, w, kind):
    """Return (context [B, d], weights [B, T]) of queries [B, P] that attend to a sentence's memory [T, d].

    keys [T, a]: memory W_key^T
    additive: score_t = v . tanh(key_t + q W_query^T + bias)
    product (App. G): score_t = sum_d v_d tanh(key_t)_d tanh(q W_query^T)_d
    """
    q = query @ w["w_query"].T
    if kind == "additive":
        if "bias" in w:
            q = q + w["bias"]
        scores = torch.tanh(keys[None] + q[:, None]) @ w["v"]
    else:
        scores = (torch.tanh(q) * w["v"]) @ torch.tanh(keys).T
    p = torch.softmax(scores, dim=1)
    return p @ memory, p


def log_softmax(logits, never=()):
    """Return log-probabilities over the vocabulary or classes; the ids in `never` are masked. [B, V] -> [B, V]."""
    logits = logits.clone()
    logits[:, list(never)] = -math.inf
    return torch.log_softmax(logits, dim=1)


# ---- The model -------------------------------------------------------------------------------------------------------


class Model:
    """A model: the description from moefile.describe, and weights."""

    def __init__(self, description, meta, weights, dtype=torch.float32):
        def tensor(value):
            if isinstance(value, tuple):
                return tuple(torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for x in value)
            return torch.from_numpy(np.ascontiguousarray(value)).to(dtype)

        self.m, self.meta, self.dtype = description, meta, dtype
        self.w = {name: tensor(value) for name, value in weights.items()}
        self.languages = description.languages
        self.current = self.m.architecture == "gnmt-moe" and any(
            x.kind == "lstm" and x.context == "current" for x in self.m.decoder)
        self.batchwise = False  # if True, gates select by eq 18 over the rows of a batch
        self.ends = []  # final states of the encoder's LSTM layers
        self.trace = None  # dict in which to record name -> list of tensors, or None

    def part(self, prefix):
        """Return {rest of the name: weight} for the names with a prefix."""
        return {k[len(prefix) + 1:]: v for k, v in self.w.items() if k.startswith(prefix + ".")}

    def note(self, name, value):
        if self.trace is not None:
            self.trace.setdefault(name, []).append(value)

    def moe(self, name, x, layer, part):
        """Apply a MoE layer; record the gates in the trace as NAME.gate, NAME.parent, ..."""
        x, gates = moe_layer(x, layer, part, batchwise=self.batchwise)
        for key, value in gates.items():
            self.note(f"{name}.{key}", value)
        return x

    # -- Encoder

    def source_ids(self, pieces, tag=None):
        """Return the encoder's input tokens: tag, begin, pieces and end, where the model uses them."""
        m = self.m
        if m.source_tag and tag is None:
            raise ValueError("the model requires a target language")
        return [tag] * m.source_tag + [m.bos] * m.source_bos + list(pieces) + [m.source_end] * m.source_eos

    def encode(self, ids):
        """Encode the tokens of a sentence: ids [T] -> memory [T, d]."""
        w = self.w.get("embedding.weight", self.w.get("source.embedding.weight"))
        x = embed(ids, w, self.m.scale)
        self.ends = []
        for i, layer in enumerate(self.m.encoder):
            name = f"encoder.{i}"
            if layer.kind == "moe":
                x = self.moe(name, x, layer, self.part(name))
                continue
            if layer.bidirectional:
                y = bidirectional(x, self.part(name + ".fwd"), self.part(name + ".bwd"), layer.merge, layer.forget_bias,
                                  self.ends)
            else:
                y = lstm_layer(x, self.part(name), layer.forget_bias, ends=self.ends)
            x = x + y if layer.residual else y
        self.note("encoder.output", x)
        return x

    # -- Decoder

    def start(self, memory):
        """Return the decoder's initial state for one hypothesis; memory: the result of the preceding `encode`."""
        m, s = self.m, types.SimpleNamespace()
        s.memory, s.keys, s.attention = memory, memory @ self.w["attention.w_key"].T, self.part("attention")
        s.first = True
        s.parts = [self.part(f"decoder.{i}") for i in range(len(m.decoder))]
        s.lstm = [lstm_start(p, 1) if x.kind == "lstm" else None for x, p in zip(m.decoder, s.parts)]
        s.query = memory.new_zeros(1, self.w["attention.w_query"].shape[1])
        if m.init == "encoder":
            ends = iter(self.ends)
            s.lstm = [x and next(ends) for x in s.lstm]
            if m.attention.query == "state":
                s.query = s.lstm[m.attention.layer][0]
        s.context, s.weights = memory.new_zeros(1, m.width), memory.new_zeros(1, len(memory))
        if self.current and m.attention.start == "query":
            self.attend(s)
        return s

    def attend(self, s):
        """Return the context and attention weights of the state's query."""
        s.context, s.weights = attention(s.memory, s.keys, s.query, s.attention, self.m.attention.kind)

    def step(self, s, tokens):
        """Return logits [B, V] after the previous tokens [B], and advance the state, which has a row per hypothesis.

        If no layer has context "current", the context is computed first, from the previous step's query. Otherwise the
        context is computed after the attention's layer, and layers with context "previous" use the last step's context.
        """
        m = self.m
        if not self.current and not (s.first and m.attention.start == "zero"):
            self.attend(s)
        s.first, previous = False, s.context
        w = self.w.get("embedding.weight", self.w.get("target.embedding.weight"))
        x = embed(tokens, w, m.scale)
        for i, (layer, part) in enumerate(zip(m.decoder, s.parts)):
            if layer.kind == "moe":
                x = self.moe(f"decoder.{i}", x, layer, part)
                continue
            wide = x
            if layer.context != "none":
                wide = torch.cat([x, s.context if layer.context == "current" else previous], dim=1)
            r, c = s.lstm[i]
            r, c = lstm_step(linear(wide, part["w_x"], part["bias"]), r, c, part, layer.forget_bias)
            s.lstm[i] = r, c
            x = x + r if layer.residual else r
            if i == m.attention.layer:
                s.query = r if m.attention.query == "state" else x
                if self.current:
                    self.attend(s)
        logits = linear(x, self.w.get("output.weight", w), self.w.get("output.bias"))
        self.note("decoder.attention", s.weights)
        self.note("decoder.logits", logits)
        return logits

    def select(self, s, rows):
        """Keep the given rows of the state, in the given order; rows may repeat."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        s.lstm = [x and (x[0][rows], x[1][rows]) for x in s.lstm]
        s.query, s.context, s.weights = s.query[rows], s.context[rows], s.weights[rows]

    # -- Scoring

    def forced_logits(self, source, target):
        """Return logits [len(target) + 1, V] for source tokens and target pieces: row t predicts target[t], and the
        last row predicts the end."""
        s = self.start(self.encode(source))
        return torch.cat([self.step(s, [token]) for token in [self.m.bos, *target]])

    def score(self, pieces, target, tag=None):
        """Return the log-probabilities [len(target) + 1] of the target's pieces and the end token."""
        logp = log_softmax(self.forced_logits(self.source_ids(pieces, tag), target), self.m.never)
        return logp[torch.arange(len(target) + 1), torch.tensor([*target, self.m.eos])]

    # -- Language model, classifier

    def language_logits(self, pieces):
        """Return logits [len(pieces) + 1, V] of a "moe-lm": row t predicts the token after BOS and t pieces."""
        x = embed([self.m.bos, *pieces], self.w["embedding.weight"], self.m.scale)
        for i, layer in enumerate(self.m.decoder):
            name = f"decoder.{i}"
            if layer.kind == "moe":
                x = self.moe(name, x, layer, self.part(name))
                continue
            y = lstm_layer(x, self.part(name), layer.forget_bias)
            x = x + y if layer.residual else y
        logits = linear(x, self.w.get("output.weight", self.w["embedding.weight"]), self.w.get("output.bias"))
        self.note("decoder.logits", logits)
        return logits

    def language_score(self, pieces):
        """Return the log-probabilities [len(pieces) + 1] of a text's pieces and the end token, given their prefixes."""
        logp = log_softmax(self.language_logits(pieces), self.m.never)
        return logp[torch.arange(len(pieces) + 1), torch.tensor([*pieces, self.m.eos])]

    def classify(self, x):
        """Return log-probabilities [rows, classes] of a "deep-moe" for x [rows, inputs]."""
        for i, layer in enumerate(self.m.network):
            name = f"network.{i}"
            x = self.moe(name, x, layer, self.part(name))
        logits = linear(x, self.w["output.weight"], self.w.get("output.bias"))
        self.note("network.logits", logits)
        return log_softmax(logits)

    # -- Beam search

    def translate(self, pieces, tag=None, beam=None, nbest=1, length_penalty=None, length_constant=None,
                  coverage_penalty=None, prune=None, max_len_factor=None, max_len_offset=None, rerank=None,
                  source_tag=None):
        """Return up to `nbest` hypotheses, best first. Options default to the model's settings; if source_tag is
        missing, reranking chooses one."""
        m = self.m
        if m.architecture != "gnmt-moe":
            raise ValueError(f"models of architecture {m.architecture} cannot translate: use --score")
        if m.rules != "paper":
            raise ValueError(f"decoding rules {m.rules} are not supported: use tests/convert/gnmt_numpy.py")
        beam, alpha, constant, beta, prune, factor, offset, rerank = (
            default if given is None else given for given, default in (
                (beam, m.beam), (length_penalty, m.length_penalty), (length_constant, m.length_constant),
                (coverage_penalty, m.coverage_penalty), (prune, m.prune), (max_len_factor, m.max_len_factor),
                (max_len_offset, m.max_len_offset), (rerank, m.rerank)))
        if rerank and beam > 1:
            found = self.translate(pieces, tag, beam, beam, alpha, constant, beta, prune, factor, offset, rerank=0.0)
            return self.reranked(pieces, found, rerank, source_tag, alpha, constant)[:nbest]
        source = self.source_ids(pieces, tag)
        if len(source) > m.limit_source:
            raise ValueError(f"the source has {len(source)} tokens; the model's limit is {m.limit_source}")
        limit = min(m.limit_target, math.floor(factor * len(pieces)) + offset)
        s = self.start(self.encode(source))
        live = [Hypothesis([], [], 0.0, torch.zeros(len(source), dtype=self.dtype))]
        done = []
        for length in range(1, limit + 1):
            last = [h.ids[-1] if h.ids else m.bos for h in live]
            logp = log_softmax(self.step(s, last), m.never)
            total = torch.tensor([h.logprob for h in live], dtype=self.dtype)[:, None] + logp
            parents, grown = [], []
            for rank, (row, token, logprob) in enumerate(candidates(total, 2 * beam, prune)):
                h = live[row]
                new = Hypothesis(h.ids + [token], h.logprobs + [logp[row, token].item()], logprob,
                                 h.coverage + s.weights[row])
                if token != m.eos:
                    grown.append(new)
                    parents.append(row)
                elif rank < beam:
                    new.finish(length_penalty_of(length, alpha, constant), beta, True)
                    done.append(new)
                if len(grown) == beam:
                    break
            live, done = grown, ranked(done, prune)
            if len(done) >= beam or not live:
                break
            if length == limit:
                for h in live:
                    h.finish(length_penalty_of(limit, alpha, constant), beta, False)
                done += ranked(live)
            elif alpha >= 0 and len(done) >= nbest:
                if done[0].score >= live[0].logprob / length_penalty_of(limit, alpha, constant):
                    break  # no live hypothesis can exceed this score
            self.select(s, parents)
        return done[:nbest]

    def reranked(self, pieces, hypotheses, weight, tag, alpha, constant):
        """Rerank by score + weight * log P(source | hypothesis) / length penalty of the source (noisy channel). `tag`
        is the source language, or None for the language in which the best hypothesis makes the source most probable."""
        m = self.m
        longest = max(len(self.source_ids(h.ids, 0)) for h in hypotheses)
        if len(pieces) + 1 > m.limit_target or longest > m.limit_source or {m.eos, *m.never} & set(pieces):
            return hypotheses
        back = lambda h, t: self.score(h.ids, pieces, t).sum().item()
        if tag is None:
            tag = max(m.languages.values(), key=lambda t: back(hypotheses[0], t))
        for h in hypotheses:
            h.reverse = back(h, tag)
            h.score += weight * h.reverse / length_penalty_of(len(pieces) + 1, alpha, constant)
        return [h for finished in (True, False) for h in ranked([h for h in hypotheses if h.finished == finished])]


class Hypothesis:
    """A partial or finished target. ids: tokens without the end; logprobs: one per token, including the end."""

    def __init__(self, ids, logprobs, logprob, coverage):
        self.ids, self.logprobs, self.logprob, self.coverage = ids, logprobs, logprob, coverage
        self.score, self.finished, self.reverse = None, False, 0.0

    def finish(self, penalty, beta, finished):
        """Compute the score, GNMT eq 14: s = log P / lp + cp, where cp = beta sum_i log min(sum_j p_ij, 1)."""
        self.finished = finished
        if finished:
            self.ids = self.ids[:-1]
        self.score = self.logprob / penalty
        if beta:
            self.score += beta * self.coverage.clamp(1e-10, 1).log().sum().item()


def length_penalty_of(length, alpha, constant=5.0):
    """Return GNMT's length penalty, eq 14: lp = ((c + length) / (c + 1))^alpha, c = 5. The length includes the end."""
    return ((constant + length) / (constant + 1)) ** alpha


def candidates(total, count, prune):
    """Yield the `count` best (row, token, log-probability) of [B, V], best first (ties by row, then token), at most
    `prune` (if not 0) below the best. A count of 2 * beam suffices: each of the `beam` rows has one end token."""
    flat, width = total.flatten(), total.shape[1]
    if torch.isnan(flat).any():
        raise ValueError("NaN in log-probabilities: damaged weights")
    count = min(count, len(flat))
    least = torch.topk(flat, count).values[-1]
    where = (flat >= least).nonzero().flatten()
    values = flat[where]
    order = torch.sort(values, descending=True, stable=True).indices[:count]
    best = values[order[0]].item()
    for value, at in zip(values[order].tolist(), where[order].tolist()):
        if value == -math.inf or prune > 0 and value < best - prune:
            return
        yield at // width, at % width, value


def ranked(hypotheses, prune=0.0):
    """Sort hypotheses by score, stably; drop those more than `prune` (if not 0) below the best."""
    ordered = sorted(hypotheses, key=lambda h: -h.score)
    return [h for h in ordered if prune <= 0 or h.score >= ordered[0].score - prune]


def load(path, dtype=torch.float32):
    """Return the Model of a model file or a checkpoint."""
    with open(path, "rb") as file:
        is_model = file.read(8) == moefile.MAGIC
    if is_model:
        return Model(*moefile.read_model(path), dtype)
    import convert
    return Model(*convert.read_checkpoint(path), dtype)


# ---- Command line ----------------------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Translate or score the lines of standard input with the reference model, slowly and exactly. "
                    "Language models score lines of text, classifiers lines of numbers.",
        epilog="Output: a translation per line, blank for blank lines; with --nbest N up to N translations, separated "
               "by TABs; with --json an object per line: translation, score, ids, token_logprobs, nbest; with --score, "
               "and from language models, log-probability TAB number of tokens including the end; from classifiers the "
               "log-probabilities of the classes.")
    parser.add_argument("-m", dest="model", metavar="FILE", required=True, help="model file or training checkpoint")
    parser.add_argument("-t", dest="language", metavar="LANG", help="target language, if the model has languages")
    parser.add_argument("--ids", action="store_true", help="read and write token ids (pieces only)")
    parser.add_argument("--score", action="store_true",
                        help="read lines of source TAB target; print the target's log-probability")
    parser.add_argument("--spm", metavar="FILE", help="SentencePiece model (default: from the model file)")
    parser.add_argument("--beam", type=int, metavar="N", help="beam size; 1 means greedy search (default: the model's)")
    parser.add_argument("--nbest", type=int, metavar="N", help="print the N best hypotheses (N <= beam size)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line, with scores")
    for name, text in (("length-penalty", "alpha of GNMT eq 14"), ("length-constant", "the constant 5 of GNMT eq 14"),
                       ("coverage-penalty", "beta of GNMT eq 14"), ("prune", "log-probability margin; 0: no pruning"),
                       ("rerank", "weight of log P(source | translation) in the score"),
                       ("max-len-factor", "maximum number of target tokens per source piece")):
        parser.add_argument("--" + name, type=float, metavar="X", help=text + " (default: the model's)")
    parser.add_argument("--max-len-offset", type=int, metavar="N", help="added to the limit (default: the model's)")
    parser.add_argument("--dump", metavar="FILE.npz",
                        help="write, for line I, LINE-I.NAME: encoder.output [T, d]; encoder.N.gate and decoder.N.gate "
                             "[tokens, n], zero if not selected; decoder.attention [tokens, T]; decoder.logits "
                             "[tokens, V]; source, target: the ids. Decoder values are those of the best "
                             "translation, or of the given target")
    parser.add_argument("--float64", action="store_true", help="compute in float64 instead of float32")
    parser.add_argument("--threads", type=int, metavar="N", default=1,
                        help="number of threads (default: 1; more rarely help)")
    return parser.parse_args()


def dump_forced(model, out, prefix, source, target):
    """Add all recorded values of a sentence with a given target to the dict `out`."""
    model.trace = {}
    model.forced_logits(source, target)
    for name, values in model.trace.items():
        out[f"{prefix}.{name}"] = torch.cat(values).numpy()
    out[prefix + ".source"], out[prefix + ".target"] = np.array(source), np.array(target)
    model.trace = None


def score_lines(model, encode):
    """Print log-probability TAB number of tokens (including the end) for every line of standard input."""
    for number, line in enumerate(sys.stdin, 1):
        pieces = encode(line.rstrip("\r\n"))
        try:
            logprobs = model.language_score(pieces) if pieces else None
        except IndexError as error:
            sys.exit(f"reference.py: line {number}: {error}")
        print("" if logprobs is None else f"{logprobs.sum().item():.7g}\t{len(logprobs)}", flush=True)


def classify_lines(model):
    """Print the log-probabilities of the classes for every line of standard input, which has space-separated inputs."""
    for number, line in enumerate(sys.stdin, 1):
        x = [float(value) for value in line.split()]
        if len(x) != model.m.width:
            sys.exit(f"reference.py: line {number}: {len(x)} numbers, but the model has {model.m.width} inputs")
        logprobs = model.classify(torch.tensor([x], dtype=model.dtype))[0]
        print(" ".join(f"{value:.7g}" for value in logprobs.tolist()), flush=True)


def main():
    args = parse_arguments()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit quietly if the output is closed, like other filters
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    try:
        model = load(args.model, torch.float64 if args.float64 else torch.float32)
    except (ValueError, OSError) as error:
        sys.exit(f"reference.py: {error}")
    if args.language and args.language not in model.languages:
        sys.exit(f"reference.py: model has no language '{args.language}'; available: "
                 f"{', '.join(model.languages) or 'none'}")
    if model.m.architecture == "deep-moe":
        return classify_lines(model)
    tag = model.languages.get(args.language)
    if model.m.architecture == "gnmt-moe" and model.m.source_tag and tag is None:
        sys.exit(f"reference.py: -t must be one of {', '.join(model.languages)}")
    if args.ids:
        encode = lambda text: [int(x) for x in text.split()]
        decode = lambda ids: " ".join(map(str, ids))
    else:
        import sentencepiece
        if args.spm:
            pieces = sentencepiece.SentencePieceProcessor(model_file=args.spm)
        elif "tokenizer.model" in model.meta:
            pieces = sentencepiece.SentencePieceProcessor(model_proto=model.meta["tokenizer.model"])
        else:
            sys.exit("reference.py: the model has no tokeniser: use --ids or --spm")
        encode, decode = pieces.encode, pieces.decode
    if model.m.architecture == "moe-lm":
        return score_lines(model, encode)
    beam = args.beam or model.m.beam
    if args.nbest is not None and not 1 <= args.nbest <= beam:
        sys.exit(f"reference.py: --nbest must be 1 to {beam}, the beam size")
    options = dict(beam=beam, nbest=args.nbest or 1, length_penalty=args.length_penalty, prune=args.prune,
                   length_constant=args.length_constant, coverage_penalty=args.coverage_penalty,
                   max_len_factor=args.max_len_factor, max_len_offset=args.max_len_offset, rerank=args.rerank)
    dumped = {}
    for number, line in enumerate(sys.stdin, 1):
        source, _, target = line.rstrip("\r\n").partition("\t" if args.score else "\n")
        source, target = encode(source), encode(target)
        if not source:  # blank lines remain blank, as in moe-translate
            print(flush=True)
            continue
        try:
            if args.score:
                logprobs = model.score(source, target, tag)
                print(f"{logprobs.sum().item():.7g}\t{len(logprobs)}", flush=True)
            else:
                found = model.translate(source, tag, **options)
                target = found[0].ids if found else []
                if args.json:
                    objects = [{"translation": decode(h.ids), "score": h.score, "logprob": h.logprob,
                                "finished": h.finished, "ids": h.ids, "token_logprobs": h.logprobs} for h in found]
                    print(json.dumps({"line": number, **objects[0], "nbest": objects}, ensure_ascii=False), flush=True)
                else:
                    print("\t".join(decode(h.ids) for h in found), flush=True)
        except (ValueError, IndexError) as error:
            sys.exit(f"reference.py: line {number}: {error}")
        if args.dump:
            dump_forced(model, dumped, f"line-{number}", model.source_ids(source, tag), target)
    if args.dump:
        np.savez(args.dump, **dumped)


if __name__ == "__main__":
    main()
