"""Write the files in tests/golden: inputs, weights, and outputs that tools/convert/reference.py computes in float64.

    ops.bin                 test cases of ops, listed in the TEXTS `cases` and `gating.cases`. CASE.op is the op, f32
                            tensors are CASE.NAME, integers and constants are metadata CASE.NAME (see below).
    model-NAME.bin          small random models with different architectures
    model-NAME.expect.bin   results of these models, see `expect` (translation), `expect_language`, `expect_classes`

All are model files (tools/convert/moefile.py). Fixed seeds make the files reproducible. The script tries seeds until
the output of a model is worth testing (varied tokens, most sentences end) and safe to compare (small numerical errors
change no decision). Odd sizes (41, 20, 13, ...) detect kernels that need multiples of 16.
"""
import argparse
import os

import numpy as np
import torch

import moefile
import reference as ref
from moefile import Tensor

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# ---- Ops -------------------------------------------------------------------------------------------------------------


class Cases:
    """The entries of ops.bin: inputs in float32, and expected outputs computed from these inputs in float64."""

    def __init__(self):
        self.random = np.random.default_rng(1)
        self.meta, self.tensors = {"cases": [], "gating.cases": []}, {}

    def normal(self, *shape, scale=1.0):
        """Return normally distributed numbers, rounded to float32, as a float64 tensor."""
        return torch.from_numpy((self.random.standard_normal(shape) * scale).astype(np.float32)).double()

    def add(self, case, op, group="cases", settings={}, **values):
        self.meta[group].append(case)
        self.meta.update({f"{case}.{key}": value for key, value in settings.items()})
        self.meta[f"{case}.op"] = op
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                value = value.numpy()
            if isinstance(value, np.ndarray) and value.dtype.kind == "f":
                self.tensors[f"{case}.{name}"] = Tensor.encode(value)
            elif isinstance(value, tuple):
                self.tensors[f"{case}.{name}"] = Tensor.encode(tuple(x.numpy() for x in value))
            elif isinstance(value, list):
                self.meta[f"{case}.{name}"] = np.array(value)
            else:
                self.meta[f"{case}.{name}"] = value

    def lstm(self, hidden, proj, width):
        state = proj or hidden
        w = {"w_x": self.normal(4 * hidden, width, scale=width ** -0.5), "bias": self.normal(4 * hidden, scale=0.5),
             "w_r": self.normal(4 * hidden, state, scale=state ** -0.5)}
        if proj:
            w["w_proj"] = self.normal(proj, hidden, scale=1.5 * hidden ** -0.5)
        return w


def packed(x, lengths):
    """Split a packed matrix into the matrices of sentences."""
    return torch.split(x, lengths)


def linear_cases(c):
    """Add cases. linear: x [rows, k], w [n, k], optional bias [n] -> y. embedding: w, ids, scale -> y."""
    for case, rows, n, k, with_bias in (("linear", 5, 19, 37, True), ("linear.row", 1, 64, 128, False),
                                        ("linear.wide", 3, 66, 200, True)):
        x, w = c.normal(rows, k), c.normal(n, k, scale=k ** -0.5)
        bias = {"bias": c.normal(n)} if with_bias else {}
        c.add(case, "linear", x=x, w=w, **bias, y=ref.linear(x, w, bias.get("bias")))
    w, ids = c.normal(23, 20), [0, 22, 7, 7, 1]
    c.add("embedding", "embedding", w=w, ids=ids, scale=4.5, y=ref.embed(ids, w, 4.5))


def lstm_cases(c):
    """Add cases. lstm-step: x, r, c, w_x, w_r, bias, optional w_proj, forget_bias -> r_out, c_out.
    lstm-layer: x packed, lengths, weights -> forward, backward. bidirectional: fwd.*, bwd.*, merge -> y."""
    for case, hidden, proj, forget in (("lstm-step.proj", 22, 13, 0.0), ("lstm-step.plain", 21, 0, 0.0),
                                       ("lstm-step.forget", 16, 16, 1.0)):
        w, rows = c.lstm(hidden, proj, 20), 5
        x, r, state = c.normal(rows, 20), c.normal(rows, proj or hidden), c.normal(rows, hidden)
        r_out, c_out = ref.lstm_step(ref.linear(x, w["w_x"], w["bias"]), r, state, w, forget)
        c.add(case, "lstm-step", x=x, r=r, c=state, **w, forget_bias=forget, r_out=r_out, c_out=c_out)
    lengths = [4, 1, 9, 6]
    for case, hidden, proj, forget in (("lstm-layer.proj", 22, 13, 0.0), ("lstm-layer.plain", 17, 0, 1.0)):
        x, w = c.normal(sum(lengths), 20), c.lstm(hidden, proj, 20)
        forward, backward = (torch.cat([ref.lstm_layer(s, w, forget, back) for s in packed(x, lengths)])
                             for back in (False, True))
        c.add(case, "lstm-layer", x=x, lengths=lengths, **w, forget_bias=forget, forward=forward, backward=backward)
    for merge in ("concat", "sum"):
        x, fwd, bwd = c.normal(sum(lengths), 20), c.lstm(18, 10, 20), c.lstm(18, 10, 20)
        y = torch.cat([ref.bidirectional(s, fwd, bwd, merge) for s in packed(x, lengths)])
        weights = {f"{side}.{k}": v for side, w in (("fwd", fwd), ("bwd", bwd)) for k, v in w.items()}
        c.add("bidirectional." + merge, "bidirectional", x=x, lengths=lengths, **weights, merge=merge, y=y)


def attention_cases(c):
    """Add cases. attention: memory packed, lengths, query [B, P], sentence [B] (the sentence of each query), w_key,
    w_query, v, optional bias, kind -> context [B, d], weights of all queries."""
    lengths, sentence = [7, 1, 12], [0, 0, 1, 2, 2, 2, 0]
    for case, kind, with_bias in (("attention.additive", "additive", False), ("attention.bias", "additive", True),
                                  ("attention.product", "product", False)):
        memory, query = c.normal(sum(lengths), 20), c.normal(len(sentence), 14)
        w = {"w_key": c.normal(13, 20, scale=0.3), "w_query": c.normal(13, 14, scale=0.3), "v": c.normal(13)}
        if with_bias:
            w["bias"] = c.normal(13)
        sentences, contexts, weights = packed(memory, lengths), [], []
        for b, s in enumerate(sentence):
            context, p = ref.attention(sentences[s], sentences[s] @ w["w_key"].T, query[b:b + 1], w, kind)
            contexts.append(context)
            weights.append(p[0])
        c.add(case, "attention", memory=memory, lengths=lengths, query=query, sentence=sentence, **w, kind=kind,
              context=torch.cat(contexts), weights=torch.cat(weights))


def threshold_between(p, share):
    """Return a threshold per expert that a fraction `share` of rows exceed, halfway between two probabilities."""
    ordered = torch.sort(p, dim=0, descending=True).values
    m = max(1, round(share * len(p)))
    return ((ordered[m - 1] + ordered[m]) / 2).float().double()


def gate_cases(c):
    """Add cases. gate: x [rows, d], weight [n, d], gate, k, threshold [n], empty -> g [rows, n], zero where not
    selected. Gate "noisy" also has noise [n, d] and normal [rows, n]; gate "batchwise" has m, the rows per expert."""
    x, w = c.normal(9, 20), c.normal(11, 20, scale=0.4)
    logits = x @ w.T
    p = ref.softmax_gate(logits)
    c.add("gate.softmax", "gate", x=x, weight=w, gate="softmax", g=p)
    c.add("gate.sigmoid", "gate", x=x, weight=w, gate="sigmoid", g=ref.sigmoid_gate(logits))
    for k in (1, 3, 11):
        c.add(f"gate.topk-{k}", "gate", x=x, weight=w, gate="topk", k=k, g=ref.topk_gate(logits, k))
    same = [0, 1, 0, 3, 1, 5, 0, 1, 5, 3, 0]  # of equal logits, those with the lowest indices are selected
    c.add("gate.topk-ties", "gate", x=x, weight=w[same], gate="topk", k=4, g=ref.topk_gate(logits[:, same], 4))
    threshold = threshold_between(p, 0.1)
    assert not (p > threshold).any(dim=1).all(), "no row without experts"
    for empty in ("top1", "zero"):
        c.add("gate.threshold-" + empty, "gate", x=x, weight=w, gate="threshold", threshold=threshold, empty=empty,
              g=ref.threshold_gate(logits, threshold, empty))
    none = torch.zeros(11).double()  # zero thresholds select all experts
    c.add("gate.threshold-all", "gate", x=x, weight=w, gate="threshold", threshold=none, empty="top1",
          g=ref.threshold_gate(logits, none))
    c.add("gate.batchwise", "gate", x=x, weight=w, gate="batchwise", m=3, empty="top1", g=ref.batchwise_gate(logits, 3))
    noise, normal = c.normal(11, 20, scale=0.2), c.normal(9, 11)
    c.add("gate.noisy", "gate", x=x, weight=w, gate="noisy", k=3, noise=noise, normal=normal,
          g=ref.noisy_topk_gate(x, w, noise, 3, normal))


def expert_cases(c):
    """Add cases. experts: x, g [rows, n], experts, scale -> y.
    moe: x, gate.weight, gate.threshold, experts, settings of the layer -> g, y."""
    x, w = c.normal(9, 20), c.normal(4, 20, scale=0.4)
    both = c.normal(4, 23, 20, scale=0.3), c.normal(4, 20, 23, scale=0.3)
    g = ref.topk_gate(x @ w.T, 2)
    g[4] = 0  # make a row without experts
    four = [lambda x, i=i: ref.mlp_expert(x, both[0][i], both[1][i]) for i in range(4)]
    mlp = lambda x, g, scale=1.0: ref.mixture(x, g, four, 20, scale)
    c.add("experts", "experts", x=x, g=g, experts=both, scale=1.0, y=mlp(x, g))
    c.add("experts.scale", "experts", x=x, g=g, experts=both, scale=0.5, y=mlp(x, g, 0.5))
    threshold = threshold_between(ref.softmax_gate(x @ w.T), 0.3)
    weights = {"gate.weight": w, "gate.threshold": threshold, "experts": both}
    for name, gate, empty, output, residual in (
            ("softmax", "softmax", "top1", "sigmoid", 1), ("topk", "topk", "top1", "sigmoid", 1),
            ("threshold", "threshold", "top1", "sigmoid", 1), ("zero", "threshold", "zero", "sigmoid", 1),
            ("plain", "topk", "top1", "none", 0), ("residual", "threshold", "zero", "none", 1)):
        settings = dict(gate=gate, k=2, empty=empty, output=output, residual=residual, scale=1.0)
        y, gates = ref.moe_layer(x, moe_settings(experts=4, hidden=23, **settings), weights)
        c.add("moe." + name, "moe", x=x, **weights, **settings, g=gates["gate"], y=y)


def moe_settings(**settings):
    """Return the description of a mixture layer with these settings."""
    return moefile.describe_mixture(moefile.Entries(settings))


def gate_weights(c, layer, width, bias=False, noise=False, seen=None):
    """Return random weights for the gates of a layer. A quarter of the rows in `seen` exceed each threshold, so some
    rows have no experts and some have several."""
    features, w = layer.gate_hidden or width, {}
    if layer.gate_hidden:
        w["gate.hidden.weight"], w["gate.hidden.bias"] = c.normal(features, width, scale=0.3), c.normal(features)
    for name, level, n in (("parent", layer.parent, layer.groups), ("gate", layer, layer.experts)):
        if not level:
            continue
        w[name + ".weight"] = c.normal(n, features, scale=0.4)
        if bias:
            w[name + ".bias"] = c.normal(n, scale=0.5)
        if noise:
            w[name + ".noise"] = c.normal(n, features, scale=0.2)
        if level.gate == "threshold":
            logits = ref.gate_logits(ref.gate_features(seen, layer, w), layer, w, name)
            inside = logits.reshape(-1, n // layer.groups) if name == "gate" and layer.groups else logits
            p = ref.softmax_gate(inside).reshape(len(seen), n)
            w[name + ".threshold"] = threshold_between(p, 0.25)
    return w


def gating_cases(c):
    """Add cases for gates and experts of mixture layers (`gating.cases`). Settings are metadata CASE.KEY, weights are
    tensors CASE.NAME; KEY and NAME are those of a layer in a model file.
    routing: x [rows, D] -> wanted.gate, wanted.gate.probabilities [rows, E] and, with groups, wanted.parent,
    wanted.parent.probabilities [rows, a], with the names of the engine's trace. If batchwise is 1, equation 18 over all
    rows replaces the gates. Optional normal.gate [rows, E] and normal.parent [rows, a] are the random numbers of
    equation 4, for gate.noise and parent.noise.
    layer (a complete layer): x -> wanted.gate [rows, E], y [rows, columns]."""
    rows, width = 13, 20
    x = c.normal(rows, width)

    def routing(case, batchwise=0, bias=False, noise=False, has_empty=False, **settings):
        settings = dict(kind="moe", experts=12, hidden=1, **settings)
        layer = moe_settings(**settings)
        w = gate_weights(c, layer, width, bias, noise, x)
        normal = None
        if noise:
            normal = {"gate": c.normal(rows, 12), **({"parent": c.normal(rows, layer.groups)} if layer.groups else {})}
        gates = ref.moe_gate(x, layer, w, normal, bool(batchwise))
        near = ref.moe_gate(x + 1e-4 * c.normal(rows, width), layer, w, normal, bool(batchwise))
        assert all(torch.equal(gates[k] != 0, near[k] != 0)
                   for k in gates), f"{case}: a choice depends on the fourth digit"
        c.add("routing." + case, "routing", "gating.cases", settings, x=x, batchwise=batchwise, **w,
              **{"normal." + k: v for k, v in (normal or {}).items()}, **{"wanted." + k: v for k, v in gates.items()})
        if has_empty:  # require rows without experts on all levels
            layer = moe_settings(**{**settings, "empty": "zero", "parent.empty": "zero"})
            zero = ref.moe_gate(x, layer, w, normal, bool(batchwise))
            assert not zero["gate"].any(dim=1).all(), f"routing.{case}: no row without experts"
            if layer.groups:
                groups = zero["gate"].reshape(rows, layer.groups, -1).any(dim=2)
                assert not zero["parent"].any(dim=1).all(), f"routing.{case}: no row without groups"
                assert (zero["parent"].bool() & ~groups).any(), f"routing.{case}: no group without experts"

    two = dict(groups=3, k=2)
    routing("bias", gate="topk", k=3, bias=True)
    routing("relu", gate="softmax", k=0, bias=True, **{"gate.relu": 1})
    routing("mlp", gate="topk", k=3, bias=True, **{"gate.hidden": 7})
    routing("mlp-relu", gate="softmax", bias=True, **{"gate.hidden": 7, "gate.relu": 1})
    routing("noisy", gate="topk", k=2, noise=True)
    routing("noisy-threshold", gate="threshold", k=3, noise=True)
    for empty in ("top1", "zero"):
        routing("batchwise-" + empty, 1, gate="topk", k=1, empty=empty, has_empty=True)
    routing("batchwise-softmax", 1, gate="softmax", k=0)  # m must be at least 1 even for k = 0
    routing("two.softmax", gate="softmax", groups=3)
    routing("two.topk", gate="topk", **two)
    routing("two.topk-one-group", gate="topk", groups=1, k=2, **{"parent.k": 1})
    routing("two.topk-groups-of-one", gate="topk", groups=12, k=1, **{"parent.k": 4})
    routing("two.softmax-topk", gate="topk", **two, **{"parent.gate": "softmax", "parent.k": 0})
    routing("two.topk-softmax", gate="softmax", groups=4, **{"parent.gate": "topk", "parent.k": 2})
    routing("two.topk-threshold", gate="threshold", **two, **{"parent.gate": "topk", "parent.k": 1})
    routing("two.threshold-topk", gate="topk", **two,
            **{"parent.gate": "threshold", "parent.k": 1, "parent.empty": "zero"})
    for above in ("top1", "zero"):
        for empty in ("top1", "zero"):
            routing(f"two.threshold-{above}-{empty}", gate="threshold", empty=empty, groups=3, k=1, has_empty=True,
                    **{"parent.empty": above})
    routing("two.bias-mlp-relu", gate="topk", groups=4, k=2, bias=True, **{"gate.hidden": 9, "gate.relu": 1})
    routing("two.noisy", gate="topk", **two, noise=True)
    for empty in ("top1", "zero"):
        routing(f"two.batchwise-{empty}", 1, gate="threshold", empty=empty, groups=3, k=1, has_empty=True)

    routing("two.sigmoid", gate="sigmoid", groups=3, bias=True, **{"gate.hidden": 9})

    def layer(case, bias=False, **settings):
        settings = dict(kind="moe", **settings)
        described = moe_settings(**settings)
        n, h = described.experts, described.hidden
        w = gate_weights(c, described, width, bias, seen=x)
        if described.expert == "mlp":
            w["experts"] = c.normal(n, h, width, scale=0.3), c.normal(n, width, h, scale=0.3)
        else:
            w["experts.weight"] = c.normal(n * h, width, scale=0.3)
            if bias:
                w["experts.bias"] = c.normal(n * h)
        y, gates = ref.moe_layer(x, described, w)
        c.add("layer." + case, "layer", "gating.cases", settings, x=x, **w, **{"wanted.gate": gates["gate"]}, y=y)

    layer("linear", bias=True, experts=4, hidden=23, expert="linear", gate="softmax", output="none", residual=0,
          **{"gate.hidden": 7, "gate.relu": 1})  # the layer of Deep MoE
    layer("linear-none", experts=6, hidden=20, expert="linear", activation="none", gate="topk", k=2, residual=1,
          scale=0.5)
    layer("linear-one", bias=True, experts=5, hidden=1, expert="linear", gate="topk", k=1, output="none", residual=0)
    layer("linear-two", bias=True, experts=6, hidden=33, expert="linear", gate="topk", k=1, groups=2, residual=0)
    layer("two", experts=6, hidden=23, gate="topk", k=2, groups=2)
    layer("two-zero", experts=6, hidden=23, gate="threshold", k=1, groups=3, empty="zero", output="none")


def output_cases(c):
    """Add cases. log-softmax: logits [rows, V], never -> logp (-inf at never). top: logp, k -> ids [rows * k], values
    (the k best of each row). score: logprob, length, alpha, constant, beta, coverage [positions] -> penalty, score
    (equation 14 of the GNMT paper)."""
    logits, never = c.normal(4, 333, scale=3), [0, 5, 332]
    logp = ref.log_softmax(logits, never)
    c.add("log-softmax", "log-softmax", logits=logits, never=never, logp=logp)
    tied = logits.clone()
    tied[:, 100:200] = tied[:, 200:300]  # ids with equal logits must be in ascending order
    tied = ref.log_softmax(tied, never)
    best = [list(ref.candidates(row[None], 8, 0.0)) for row in tied]
    c.add("top", "top", logp=tied, k=8, ids=[x[1] for row in best for x in row],
          values=torch.tensor([[x[2] for x in row] for row in best], dtype=torch.float64))
    coverage = torch.tensor([0.2, 1.0, 1.7, 0.0, 1e-12, 0.9], dtype=torch.float64).float().double()
    for case, alpha, constant, beta, length in (("score.none", 0.0, 5.0, 0.0, 7), ("score.length", 0.6, 5.0, 0.0, 7),
                                                ("score.negative", -0.5, 5.0, 0.0, 3),
                                                ("score.constant", 1.0, 0.0, 0.0, 9),
                                                ("score.coverage", 0.2, 5.0, 0.2, 12)):
        h, penalty = ref.Hypothesis([], [], -8.25, coverage), ref.length_penalty_of(length, alpha, constant)
        h.finish(penalty, beta, False)
        c.add(case, "score", logprob=-8.25, length=length, alpha=alpha, constant=constant, beta=beta, coverage=coverage,
              penalty=penalty, score=h.score)


def layer_cases(c):
    """Add cases. any-layer (a layer of any kind except mixture): x [rows, D] packed, lengths, settings and weights as
    in gating_cases -> y, including norm and residual."""
    def layer(case, columns=20, tensors=(), **settings):
        meta = {"general.architecture": "transformer", "model.width": columns}
        x = moefile.describe_layer({**meta, **{"decoder.0." + k: v for k, v in settings.items()}}, "decoder", 0)
        w = {name: c.normal(*dims, scale=dims[-1] ** -0.5 if len(dims) > 1 else 1.0) for name, dims in tensors}
        lengths = [4, 1, 4]
        rows = c.normal(sum(lengths), columns)
        y = torch.cat([ref.any_layer(sentence, x, w) for sentence in packed(rows, lengths)])
        c.add(case, "any-layer", "cases", settings, x=rows, lengths=lengths, **w, y=y)

    norm = [("norm.weight", (20,))]
    layer("norm.0", tensors=[*norm, ("norm.bias", (20,))], kind="norm", epsilon=0.01)
    layer("norm.1", tensors=norm, kind="norm", epsilon=0.01, **{"norm.kind": "rms"})
    hidden = 33
    up, gate, down = (f"{x}.weight" for x in ("up", "gate", "down"))
    biases = [(f"{x}.bias", (n,)) for x, n in (("up", hidden), ("gate", hidden), ("down", 20))]
    layer("ffn.0", tensors=[(up, (hidden, 20)), (down, (20, hidden)), *biases[::2]], kind="ffn", hidden=hidden,
          activation="relu")
    three = [(up, (hidden, 20)), (gate, (hidden, 20)), (down, (20, hidden))]
    layer("ffn.1", tensors=[*three, *norm], kind="ffn", hidden=hidden, activation="swish", gated=1, norm="before",
          **{"norm.kind": "rms"})
    layer("ffn.2", tensors=[*three, *biases, *norm, ("norm.bias", (20,))], kind="ffn", hidden=hidden, activation="gelu",
          gated=1, norm="after")
    layer("ffn.3", tensors=three, kind="ffn", hidden=hidden, activation="relu", gated=1, residual=0)
    cell = [("input.weight", (20, 20)), ("forget.weight", (20, 20)), ("forget.bias", (20,))]
    layer("ssru.0", tensors=[*cell, *norm, ("norm.bias", (20,))], kind="ssru", norm="after")
    layer("ssru.1", tensors=cell, kind="ssru", residual=0)
    gates = [*cell, ("input.bias", (20,))]
    layer("average.0", tensors=[("up.0.weight", (33, 20)), ("up.0.bias", (33,)), ("down.weight", (20, 33)), *gates,
                                *norm, ("norm.bias", (20,))],
          kind="average", hidden=33, depth=2, activation="swish", norm="before")
    layer("average.1", tensors=[("up.0.weight", (20, 20)), ("up.1.weight", (20, 20)), *norm], kind="average", hidden=20,
          depth=3, activation="relu", gated=0, norm="after", **{"norm.kind": "rms"})
    layer("average.2", tensors=gates, kind="average", hidden=7, depth=1, activation="gelu", residual=0)


OPS = linear_cases, lstm_cases, attention_cases, gate_cases, expert_cases, output_cases, gating_cases, layer_cases


# ---- Models ----------------------------------------------------------------------------------------------------------

V, D, A = 41, 20, 13  # vocabulary, width, attention size
LANGUAGES = {"languages.codes": ["xa", "xb"], "languages.tags": np.array([4, 5])}


def lstm(hidden, proj=0, residual=1, **more):
    return {"kind": "lstm", "hidden": hidden, "proj": proj, "residual": residual, **more}


def moe(experts, k, hidden, gate, **more):
    return {"kind": "moe", "experts": experts, "k": k, "hidden": hidden, "gate": gate, **more}


def two_level(experts, groups, k, hidden, gate, **more):
    return moe(experts, k, hidden, gate, groups=groups, **more)


# name -> (encoder, decoder, other metadata, optional tensors)
MODELS = {
    # Resembles the trainer's models: bidirectional, projections, strictly balanced gates, shared embeddings.
    "base": ([lstm(14, 10, bidirectional=1), lstm(24, 20), moe(6, 2, 12, "threshold"), lstm(24, 20)],
             [lstm(24, 20, context="previous"), moe(6, 2, 12, "threshold"), lstm(24, 20)],
             {**LANGUAGES, "attention.query": "state"}, ()),
    # The paper's layers without projection, top-k gates; separate embeddings, a start token instead of languages.
    "untied": ([lstm(20), moe(5, 3, 9, "topk"), lstm(20)],
               [lstm(20, context="previous"), moe(5, 3, 9, "topk", activation="relu"), lstm(20)],
               {"source.bos": 1, "attention.query": "output", "attention.start": "zero"},
               ("source.embedding.weight", "target.embedding.weight", "output.weight", "output.bias")),
    # Sum of both directions, attention of appendix G, current context in the last layer, dense gates, scaled experts.
    "product": ([lstm(16, 20, bidirectional=1, merge="sum", forget_bias=1.0), moe(4, 0, 8, "softmax", scale=0.5)],
                [lstm(22, 20, forget_bias=1.0), moe(4, 0, 8, "softmax", scale=0.5), lstm(22, 20, context="current")],
                {**LANGUAGES, "attention.kind": "product", "attention.query": "output"}, ("output.bias",)),
    # Gates that may select no expert, experts without sigmoid and residual, both contexts in one decoder.
    "zero": ([lstm(20), moe(6, 1, 12, "threshold", empty="zero", output="none")],
             [lstm(20, context="previous"), moe(6, 1, 12, "threshold", empty="zero"), lstm(20, context="current")],
             {**LANGUAGES, "attention.query": "state", "attention.start": "zero"}, ()),
    # Both contexts (the query of the initial context is only the bias); the encoder's last layer is bidirectional.
    "both": ([lstm(20), moe(6, 2, 12, "threshold"), lstm(20, bidirectional=1, merge="sum")],
             [lstm(20, context="previous"), moe(6, 2, 12, "threshold"), lstm(20, context="current")],
             {**LANGUAGES, "attention.query": "output", "decoder.init": "encoder"}, ("attention.bias",)),
    # The encoder's final state gives the initial context.
    "begun": ([lstm(24, 20), lstm(20)], [lstm(24, 20, context="previous"), lstm(20, context="current")],
              {**LANGUAGES, "attention.kind": "product", "attention.query": "state", "decoder.init": "encoder"}, ()),
    # GNMT without experts: bidirectional first layer, no residual or context in the first layers, attention with bias.
    "gnmt": ([lstm(17, residual=0, bidirectional=1), lstm(20, residual=0), lstm(20)],
             [lstm(20, residual=0), lstm(20, residual=0, context="current"), lstm(20, context="current")],
             {"source.bos": 1, "attention.query": "state"}, ("attention.bias", "output.weight", "output.bias")),
    # GNMT by Wu et al.: eight layers on each side, bidirectional first layer, previous context in all decoder layers,
    # residuals from the third layer on, separate embeddings.
    "gnmt-8": ([lstm(20, residual=0, bidirectional=1), lstm(20, residual=0)] + [lstm(20)] * 6,
               [lstm(20, residual=0, context="previous")] * 2 + [lstm(20, context="previous")] * 6,
               {"source.bos": 1, "attention.query": "state"},
               ("source.embedding.weight", "target.embedding.weight", "output.weight")),
    # The first layer has experts, the second LSTM computes the attention; one expert per token, no source end token.
    "second": ([moe(4, 1, 10, "topk"), lstm(15, 9, residual=0), lstm(23, 20, residual=0)],
               [lstm(20, context="previous"), moe(4, 1, 10, "topk", output="none", residual=0, scale=2.0),
                lstm(20, 0, context="previous", forget_bias=0.5)],
               {**LANGUAGES, "source.eos": 0, "attention.layer": 2, "attention.query": "output"}, ()),
    # Two levels of gates as in the paper's large models, k = 2 x 2.
    "hierarchy-topk": ([lstm(20), two_level(12, 3, 2, 9, "topk"), lstm(20)],
                       [lstm(20, context="previous"), two_level(12, 4, 2, 9, "topk"), lstm(20)],
                       {**LANGUAGES, "attention.query": "state"}, ("decoder.1.gate.noise", "decoder.1.parent.noise")),
    # Two levels with thresholds; each level has its own policy for empty selections and its own k; biases.
    "hierarchy-threshold": ([lstm(20), two_level(8, 2, 1, 9, "threshold", **{"parent.empty": "zero"}), lstm(20)],
                            [lstm(20, context="previous"),
                             two_level(12, 3, 2, 9, "threshold", empty="zero", **{"parent.k": 1,
                             "parent.empty": "top1"}), lstm(20)],
                            {**LANGUAGES, "attention.query": "state"},
                            ("decoder.1.gate.bias", "decoder.1.parent.bias")),
}

# name -> (decoder, optional tensors)
LANGUAGE_MODELS = {
    # Appendix C: LSTM, MoE, LSTM; tied embeddings.
    "language": ([lstm(24, 20), moe(7, 2, 12, "topk"), lstm(24, 20)], ("decoder.1.gate.noise",)),
    "language-hierarchy": ([lstm(20, forget_bias=1.0), two_level(12, 3, 2, 9, "topk", **{"parent.k": 1}),
                            two_level(12, 4, 1, 9, "threshold", **{"gate.hidden": 6}), lstm(20)],
                           ("output.weight", "output.bias", "decoder.2.gate.hidden.bias")),
}


def deep(experts, hidden, **more):
    """Return a layer of Eigen et al.: linear experts with ReLU, and dense gates of two linear maps with ReLU."""
    return moe(experts, 0, hidden, "softmax", expert="linear", output="none", residual=0,
               **{"gate.hidden": 6, "gate.relu": 1},
               **more)


# name -> (network, optional tensors)
CLASSIFIERS = {
    "deep": ([deep(4, 23), deep(3, 17)],
             tuple(f"network.{i}.{x}.bias" for i in (0, 1) for x in ("gate.hidden", "gate", "experts"))
             + ("output.bias",)),
    # Sparse mixtures without biases and with increasing and decreasing widths; one has a scale, the last one a residual
    # and sigmoid.
    "deep-sparse": ([moe(6, 2, 31, "topk", expert="linear", output="none", residual=0, groups=3, **{"parent.k": 1}),
                     moe(5, 1, 20, "threshold", expert="linear", activation="none", output="none", residual=0,
                         scale=0.5),
                     moe(4, 2, 9, "topk")], ()),
}
INPUTS, CLASSES = 33, 7

# name -> translation settings other than DEFAULTS
RUNS = {
    "greedy": dict(beam=1), "beam": dict(beam=4, nbest=4), "plain": dict(beam=4, nbest=2, length_penalty=0.0),
    "coverage": dict(beam=5, nbest=5, length_penalty=0.2, coverage_penalty=0.2, prune=3.0),
    "constant": dict(beam=3, nbest=3, length_penalty=1.0, length_constant=0.0),
    "short": dict(beam=4, nbest=4, max_len_factor=0.5, max_len_offset=2), "wide": dict(beam=12, nbest=3),
}
RERANKED = {"reranked": dict(beam=4, nbest=4, rerank=0.6)}  # reranking requires a model with languages
DEFAULTS = dict(beam=4, nbest=1, length_penalty=0.6, length_constant=5.0, coverage_penalty=0.0, prune=0.0,
                max_len_factor=2.0,
                max_len_offset=10, rerank=0.0)
LENGTHS = (1, 2, 5, 5, 9, 17)


def general_meta(architecture, name):
    return {"general.architecture": architecture, "general.name": "test-" + name,
            "general.description": "random weights",
            "general.licence": "", "general.attribution": ""}


def token_meta(never):
    return {"vocab.size": V, "model.width": D, "embedding.scale": -2.0, "token.pad": 0, "token.unk": 1, "token.bos": 2,
            "token.eos": 3, "token.never": np.array(never)}


def side_meta(side, layers):
    return {side + ".layers": len(layers),
            **{f"{side}.{i}.{k}": v for i, layer in enumerate(layers) for k, v in layer.items()}}


def model_meta(name):
    """Return a model's metadata and the names of its optional tensors."""
    if name in LANGUAGE_MODELS:
        decoder, optional = LANGUAGE_MODELS[name]
        return {**general_meta("moe-lm", name), **token_meta([0, 2]), "tokenizer.kind": "none",
                **side_meta("decoder", decoder)}, optional
    if name in CLASSIFIERS:
        network, optional = CLASSIFIERS[name]
        return {**general_meta("deep-moe", name), "vocab.size": CLASSES, "model.width": INPUTS,
                **side_meta("network", network),
                "classes.names": [f"class {i}" for i in range(CLASSES)]}, optional
    encoder, decoder, more, optional = MODELS[name]
    meta = {**general_meta("gnmt-moe", name), **token_meta([0, 1, 2, 4, 5]), "attention.kind": "additive",
            "attention.size": A, "tokenizer.kind": "none"}
    return {**meta, **side_meta("encoder", encoder), **side_meta("decoder", decoder), **more}, optional


def random_model(name, seed):
    """Return metadata and weights of a model with varied output.

    The scale of embeddings is -2: residuals would make a random model with a positive scale repeat its input token.
    """
    meta, optional = model_meta(name)
    m, weights = moefile.describe(meta), {}
    random = np.random.default_rng([seed, *name.encode()])
    for tensor, (layout, dims, _) in moefile.shapes(m, optional).items():
        kind = tensor.rsplit(".", 1)[-1]
        if layout == moefile.EXPERTS:
            n, h, d = dims
            weights[tensor] = (random.standard_normal((n, h, d)) * (2 / d) ** 0.5,
                               random.standard_normal((n, d, h)) * 1.5 * h ** -0.5)
            continue
        scale = {"bias": 0.3, "v": 1.5, "threshold": 0.05}.get(kind) or {"w_x": 3.0, "w_r": 1.5, "w_proj": 2.5}.get(
            kind, 1.5) * dims[-1] ** -0.5
        w = random.standard_normal(dims) * scale
        if kind == "threshold":  # make thresholds so high that some rows have no experts
            groups = meta.get(".".join(tensor.split(".")[:2]) + ".groups", 0)
            over = dims[0] // groups if groups and tensor.endswith("gate.threshold") else dims[0]
            w = (1.1 if groups else 1.6) / over + w
        if tensor == "output.weight":
            w = 2 * w + weights.get("target.embedding.weight", 0)
        if dims[0] == V and len(dims) == 2 and m.architecture == "gnmt-moe":
            w[m.eos] *= 1.5  # make sentences end
        weights[tensor] = w
    return meta, {k: tuple(x.astype(np.float32) for x in w) if isinstance(w, tuple) else w.astype(np.float32)
                  for k, w in weights.items()}


def sentences(meta, seed):
    """Return (random sources, random targets, a tag for each source)."""
    random = np.random.default_rng([7, seed])
    sources = [random.integers(6, V, n).tolist() for n in LENGTHS]
    targets = [random.integers(6, V, n).tolist() for n in (3, 0, 6, 4, 1, 12)]
    tags = [int(meta["languages.tags"][i % 2]) if "languages.tags" in meta else -1 for i in range(len(sources))]
    return sources, targets, tags


def runs_of(meta):
    return {**RUNS, **RERANKED} if "languages.tags" in meta else RUNS


def translate_all(model, sources, tags, run):
    return [model.translate(s, None if tag < 0 else tag, **{**DEFAULTS, **runs_of(model.meta)[run]})
            for s, tag in zip(sources, tags)]


def perturbed(weights, seed):
    """Return the weights with random relative errors of 1e-5, to find results that are safe to compare."""
    random = np.random.default_rng(seed)
    change = lambda w: (w * (1 + 1e-5 * random.standard_normal(w.shape))).astype(np.float32)
    return {k: tuple(map(change, w)) if isinstance(w, tuple) else change(w) for k, w in weights.items()}


def worth_testing(found):
    """Return whether the translations vary and at least two of them end after two or more tokens."""
    best = [hypotheses[0] for hypotheses in found]
    tokens = {x for h in best for x in h.ids}
    ended = [h for h in best if h.finished and len(h.ids) >= 2]
    return len(tokens) >= 12 and len(ended) >= 2 and len({tuple(h.ids) for h in best}) == len(best)


def draw(name):
    """Return (seed, metadata, weights, results by run) for the first seed worth testing and safe to compare."""
    for seed in range(1, 1000):
        meta, weights = random_model(name, seed)
        m = moefile.describe(meta)
        sources, _, tags = sentences(meta, seed)
        model = ref.Model(m, meta, weights, torch.float64)
        if not worth_testing(translate_all(model, sources, tags, "beam")):
            continue
        results = {run: translate_all(model, sources, tags, run) for run in runs_of(meta)}
        ids = lambda all_runs: [[h.ids for h in hs] for found in all_runs.values() for hs in found]
        others = [ref.Model(m, meta, perturbed(weights, i), torch.float64) for i in (1, 2)]
        if not all(same_choices(traces(model, seed), traces(other, seed)) for other in others):
            continue
        if all(ids({run: translate_all(other, sources, tags, run) for run in results}) == ids(results)
               for other in others):
            return seed, meta, weights, results
    raise RuntimeError(f"no suitable seed found for model {name}")


def two_levels(m):
    return any(x.kind == "moe" and x.groups for x in m.encoder + m.decoder)


def traces(model, seed):
    """Return the gates of a model with two levels for each sentence and target, {"I.LAYER.gate": tensor, ...}."""
    if not two_levels(model.m):
        return {}
    out = {}
    for i, (source, target, tag) in enumerate(zip(*sentences(model.meta, seed))):
        ref.dump_forced(model, out, str(i), model.source_ids(source, tag), target)
    return gates_of(out)


def gates_of(trace):
    return {key: value for key, value in trace.items() if ".gate" in key or ".parent" in key}


def same_choices(a, b):
    return all(np.array_equal(a[key] != 0, b[key] != 0) for key in a)


def traced(model, compute):
    """Run compute(model); return (its result, the model's gates by name)."""
    model.trace = {}
    result = compute(model)
    trace, model.trace = {key: torch.cat(values).numpy() for key, values in model.trace.items()}, None
    return result, gates_of(trace)


def draw_safe(name, compute):
    """Return (seed, metadata, weights, model) for the first seed whose gates are stable if weights change slightly, and
    sometimes select several experts."""
    for seed in range(1, 1000):
        meta, weights = random_model(name, seed)
        m = moefile.describe(meta)
        model, other = (ref.Model(m, meta, w, torch.float64) for w in (weights, perturbed(weights, 1)))
        found, near = traced(model, lambda x: compute(x, seed))[1], traced(other, lambda x: compute(x, seed))[1]
        many = [(value != 0).sum(axis=1) for key, value in found.items() if key.endswith(".gate")]
        if same_choices(found, near) and all(x.max() > 1 for x in many):
            return seed, meta, weights, model
    raise RuntimeError(f"no suitable seed found for model {name}")


def language_sentences(seed):
    """Return random texts for a language model."""
    random = np.random.default_rng([8, seed])
    return [random.integers(4, V, n).tolist() for n in (1, 5, 0, 12, 20)]


def expect_language(seed, model):
    """Return metadata and tensors with the expected results of a language model.

    texts: TEXTS, the ids of each text I
    forced.I [len(text) + 1, V]: logits
    logprobs: REALS, for all tokens (including ends) of all texts
    trace.I.LAYER.gate [tokens, E] etc.: gates, as for translation models
    """
    tensors, logprobs, texts = {}, [], language_sentences(seed)
    for i, text in enumerate(texts):
        logits, trace = traced(model, lambda x: x.language_logits(text))
        tensors[f"forced.{i}"] = Tensor.encode(logits.numpy())
        tensors.update({f"trace.{i}.{key}": Tensor.encode(value) for key, value in trace.items()})
        logprobs += model.language_score(text).tolist()
    return {"seed": seed, "texts": list(map(joined, texts)), "logprobs": np.round(np.array(logprobs), 9)}, tensors


def class_inputs(seed):
    """Return random inputs [rows, INPUTS] of a classifier, rounded to float32."""
    random = np.random.default_rng([9, seed])
    return torch.from_numpy(random.standard_normal((11, INPUTS)).astype(np.float32)).double()


def expect_classes(seed, model):
    """Return metadata and tensors with the expected results of a classifier.

    x [rows, inputs]; logits, logprobs [rows, classes]; trace.LAYER.gate [rows, E] etc.
    """
    x = class_inputs(seed)
    logprobs, trace = traced(model, lambda m: m.classify(x))
    model.trace = {}
    model.classify(x)
    logits, model.trace = model.trace["network.logits"][0], None
    tensors = {"x": x, "logits": logits, "logprobs": logprobs,
               **{"trace." + key: value for key, value in trace.items()}}
    return {"seed": seed}, {key: Tensor.encode(np.asarray(value)) for key, value in tensors.items()}


def joined(ids):
    return " ".join(map(str, ids))


def expect(seed, meta, weights, results):
    """Return metadata and tensors with the expected results of a translation model.

    sources, targets: TEXTS of ids; tags: INTS, -1 if absent; each has an entry for every sentence I
    encoder.I [tokens, d]; forced.I [len(target) + 1, V]: logits for target I; forced.logprob: REALS, scores of targets
    runs: TEXTS, names of runs. RUN.beam, RUN.nbest, RUN.length_penalty, ... are settings. Hypotheses, by sentence:
    RUN.sentence, RUN.finished INTS; RUN.ids TEXTS; RUN.score, RUN.logprob, RUN.reverse REALS; RUN.token_logprobs REALS
    of all tokens, including ends of finished hypotheses
    With two levels of gates: trace.I.LAYER.gate, .gate.probabilities [tokens, E], .parent, .parent.probabilities
    [tokens, a], for source and target I
    """
    model = ref.Model(moefile.describe(meta), meta, weights, torch.float64)
    sources, targets, tags = sentences(meta, seed)
    out, tensors, scores = {}, {}, []
    for i, (source, target, tag) in enumerate(zip(sources, targets, tags)):
        ids = model.source_ids(source, tag)
        tensors[f"encoder.{i}"] = Tensor.encode(model.encode(ids).numpy())
        tensors[f"forced.{i}"] = Tensor.encode(model.forced_logits(ids, target).numpy())
        scores.append(model.score(source, target, tag).sum().item())
    tensors.update({"trace." + key: Tensor.encode(value) for key, value in traces(model, seed).items()})
    rounded = lambda values: np.round(np.array(values, np.float64), 9)
    out.update({"seed": seed, "sources": list(map(joined, sources)), "targets": list(map(joined, targets)),
                "tags": np.array(tags), "forced.logprob": rounded(scores), "runs": list(results)})
    for run, found in results.items():
        out.update({f"{run}.{key}": value for key, value in {**DEFAULTS, **runs_of(meta)[run]}.items()})
        every = [(i, h) for i, hypotheses in enumerate(found) for h in hypotheses]
        out.update({f"{run}.sentence": np.array([i for i, _ in every]),
                    f"{run}.finished": np.array([int(h.finished) for _, h in every]),
                    f"{run}.ids": [joined(h.ids) for _, h in every],
                    f"{run}.score": rounded([h.score for _, h in every]),
                    f"{run}.logprob": rounded([h.logprob for _, h in every]),
                    f"{run}.reverse": rounded([h.reverse for _, h in every]),
                    f"{run}.token_logprobs": rounded([x for _, h in every for x in h.logprobs])})
    return out, tensors


# ---- Command line ----------------------------------------------------------------------------------------------------


def write_pair(folder, name, meta, weights, expected):
    tensors = {k: Tensor.encode(w) for k, w in weights.items()}
    moefile.check_model(meta, tensors)
    moefile.write_model(os.path.join(folder, f"model-{name}.bin"), meta, tensors)
    moefile.write_model(os.path.join(folder, f"model-{name}.expect.bin"), *expected)


def main():
    parser = argparse.ArgumentParser(description="Write the reference data for tests of the engine.")
    parser.add_argument("-o", dest="folder", default=os.path.join(ROOT, "tests", "golden"), metavar="FOLDER",
                        help="output folder (default: tests/golden)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    os.makedirs(args.folder, exist_ok=True)
    cases = Cases()
    for add in OPS:
        add(cases)
    moefile.write_model(os.path.join(args.folder, "ops.bin"), cases.meta, cases.tensors)
    print(f"ops.bin: {len(cases.meta['cases'])} cases")
    for name in MODELS:
        seed, meta, weights, results = draw(name)
        write_pair(args.folder, name, meta, weights, expect(seed, meta, weights, results))
        best = [hypotheses[0] for hypotheses in results["beam"]]
        ended = sum(h.finished for h in best)
        print(f"model-{name}.bin: seed {seed}, {ended} of {len(best)} sentences end; {joined(best[3].ids)}", flush=True)
    for name in LANGUAGE_MODELS:
        seed, meta, weights, model = draw_safe(name, lambda m, seed: [m.language_logits(x)
                                                                      for x in language_sentences(seed)])
        write_pair(args.folder, name, meta, weights, expect_language(seed, model))
        print(f"model-{name}.bin: seed {seed}", flush=True)
    for name in CLASSIFIERS:
        seed, meta, weights, model = draw_safe(name, lambda m, seed: m.classify(class_inputs(seed)))
        write_pair(args.folder, name, meta, weights, expect_classes(seed, model))
        print(f"model-{name}.bin: seed {seed}", flush=True)


if __name__ == "__main__":
    main()
