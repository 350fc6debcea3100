#!/usr/bin/env python3
"""Compare the gates and losses of tools/train/gating.py with element-wise definitions and, within 1e-5, with
tools/convert/reference.py. Compare the gradient of each loss with finite differences in float64.

Usage: tests/python tests/train/test_gating.py [WORD]      WORD: run tests with matching names

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`. Requires PyTorch, NumPy and
SentencePiece, which tools/install-deps --test installs into .venv. Finite differences keep discrete choices (masks)
fixed.
"""
import ast
import contextlib
import gzip
import importlib.util
import io
import math
import os
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import convert
import gating
import moefile
import reference as ref
import train
from suite import Skip, Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
torch.set_num_threads(1)
test = Suite()
ROWS, N, K = 24, 8, 3


def normal(*shape, seed=1, dtype=None):
    random = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return torch.randn(*shape, generator=random, dtype=dtype or torch.float64)


def close(a, b, tolerance=1e-12):
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    difference = float((a - b).abs().max())
    assert difference <= tolerance, f"differ by {difference:g}"


def logits(seed=1):
    return normal(ROWS, N, seed=seed)


def probabilities(seed=1):
    return logits(seed).softmax(1)


def variance(values):
    mean = sum(values) / len(values)
    return sum((x - mean) ** 2 for x in values) / len(values)


def differentiable(function, *inputs):
    """Check all partial derivatives by central differences (torch.autograd.gradcheck)."""
    assert torch.autograd.gradcheck(function, [x.detach().clone().requires_grad_() for x in inputs], atol=1e-7)


# ---- Gates -----------------------------------------------------------------------------------------------------------

@test
def dense_gates_are_softmax():
    x = logits()
    gate = gating.dense(x)
    close(gate.weights, x.exp() / x.exp().sum(1, keepdim=True))
    close(gate.weights, ref.softmax_gate(x))
    assert gate.mask.all() and not gate.empty.any()


@test
def gates_of_bengio_are_sigmoids():
    gate = gating.sigmoid(logits())
    close(gate.weights, [[1 / (1 + math.exp(-x)) for x in row] for row in logits().tolist()])
    close(gate.weights, ref.level_gate(logits(), types.SimpleNamespace(gate="sigmoid")))
    assert gate.mask.all() and not gate.empty.any()


@test
def topk_gates_keep_the_k_largest():
    x = logits()
    gate = gating.topk(x, K)
    for row, weights in zip(x.tolist(), gate.weights.tolist()):
        best = sorted(range(N), key=lambda i: -row[i])[:K]
        total = sum(math.exp(row[i]) for i in best)
        close(weights, [math.exp(row[i]) / total if i in best else 0.0 for i in range(N)])
    close(gate.weights, ref.topk_gate(x, K))


@test
def noisy_topk_gates_add_noise_of_learned_size_before_the_choice():
    x, w, w_noise, z = normal(ROWS, 10), normal(N, 10), normal(N, 10, seed=2), normal(ROWS, N, seed=3)
    deviation = torch.nn.functional.softplus(x @ w_noise.t())
    gate, _ = gating.noisy_topk(x @ w.t(), deviation, K, z)
    close(gate.weights, ref.noisy_topk_gate(x, w, w_noise, K, z))
    assert torch.equal(gate.mask, gate.weights > 0)
    single, _ = gating.noisy_topk((x @ w.t()).float(), deviation.float(), K, z.float())
    close(single.weights, ref.noisy_topk_gate(x, w, w_noise, K, z), 1e-5)


@test
def chance_is_the_probability_of_selection_with_new_noise():
    clean, deviation, z = logits(), normal(ROWS, N, seed=2).exp(), normal(ROWS, N, seed=3)
    _, chance = gating.noisy_topk(clean, deviation, K, z)
    noisy = clean + z * deviation
    for r in range(4):
        for i in range(N):
            kth = sorted((noisy[r, j].item() for j in range(N) if j != i), reverse=True)[K - 1]  # kth_excluding, App. A
            value = 0.5 * (1 + math.erf((clean[r, i].item() - kth) / deviation[r, i].item() / math.sqrt(2)))  # eq 9
            close(chance[r, i], value)
            draws = clean[r, i] + deviation[r, i] * normal(20_000, seed=r * N + i)  # eq 8
            close(chance[r, i], (draws > kth).double().mean(), 0.02)
    assert gating.noisy_topk(clean, deviation, N, z)[1].eq(1).all()  # k = N selects every expert


@test
def batchwise_masks_take_the_m_largest_of_every_column():
    p = probabilities()
    for k in (1, 3, N):
        mask, m = gating.batchwise_mask(p, k)
        assert m == k * ROWS // N == ref.batchwise_count(k, ROWS, N)
        for i in range(N):
            best = sorted(range(ROWS), key=lambda r: -p[r, i].item())[:m]
            assert mask[:, i].nonzero().flatten().tolist() == sorted(best)
        assert torch.equal(mask, ref.batchwise_mask(p, m))
    assert gating.batchwise_mask(p[:4], 1)[1] == 1  # m is at least 1


@test
def balanced_gates_match_the_reference():
    for policy in ("top1", "zero"):
        for k in (1, 2):
            mask, m = gating.batchwise_mask(probabilities(), k)
            gate = gating.masked(probabilities(), mask, policy)
            assert k == 2 or gate.empty.any(), "no empty mask"
            close(gate.weights, ref.batchwise_gate(logits(), m, policy))
            assert torch.equal(gate.mask, gate.weights > 0)
            single = gating.masked(probabilities().float(), mask, policy)
            close(single.weights, ref.batchwise_gate(logits(), m, policy), 1e-5)


@test
def thresholds_at_the_value_after_the_last_chosen_give_the_batchwise_mask():
    p = probabilities()
    mask, m = gating.batchwise_mask(p, 2)
    threshold = p.sort(0, descending=True).values[m]  # the largest value that the mask does not select
    assert torch.equal(gating.threshold_mask(p, threshold), mask)
    close(gating.threshold_gradient(p, threshold, m), torch.zeros(N))
    for policy in ("top1", "zero"):
        close(gating.masked(p, mask, policy).weights, ref.threshold_gate(logits(), threshold, policy))


@test
def mlp_features_are_rectified_maps():
    x, w, b = normal(ROWS, 10), normal(6, 10), normal(6)
    layer = types.SimpleNamespace(gate_hidden=6)
    close(gating.mlp_features(x, w, b), ref.gate_features(x, layer, {"gate.hidden.weight": w, "gate.hidden.bias": b}))
    close(gating.mlp_features(x, w)[3, 2], max(0.0, float(x[3] @ w[2])))


# ---- Two levels ------------------------------------------------------------------------------------------------------

GROUPS, INSIDE = 4, 3


def layer_of(**settings):
    shape = {"experts": GROUPS * INSIDE, "groups": GROUPS, "hidden": 1}
    return moefile.describe_mixture(moefile.Entries({**shape, **settings}))


def weights_of(seed=1):
    return {"gate.weight": normal(GROUPS * INSIDE, 10, seed=seed), "parent.weight": normal(GROUPS, 10, seed=seed + 1),
            "gate.noise": normal(GROUPS * INSIDE, 10, seed=seed + 2), "parent.noise": normal(GROUPS, 10, seed=seed + 3)}


def levels(x, w):
    return x @ w["parent.weight"].t(), x @ w["gate.weight"].t()


@test
def two_levels_of_topk_match_the_reference():
    x, w = normal(ROWS, 10), weights_of()
    above, below = levels(x, w)
    parent = gating.topk(above, 2)
    row, group = gating.pairs(parent)
    assert group.tolist() == sorted(group.tolist()) and len(row) == 2 * ROWS
    gate = gating.two_level(parent, gating.topk(gating.of_pairs(below, row, group, GROUPS), 2), row, group)
    wanted = ref.moe_gate(x, layer_of(gate="topk", k=2), w)
    close(gate.weights, wanted["gate"])
    assert torch.equal(gate.mask, wanted["gate"] != 0) and not gate.empty.any()


@test
def two_levels_of_noisy_topk_match_the_reference():
    x, w = normal(ROWS, 10), weights_of()
    above, below = levels(x, w)
    z = {"gate": normal(ROWS, GROUPS * INSIDE, seed=7), "parent": normal(ROWS, GROUPS, seed=8)}
    size = {name: torch.nn.functional.softplus(x @ w[name + ".noise"].t()) for name in z}
    parent, _ = gating.noisy_topk(above, size["parent"], 2, z["parent"])
    row, group = gating.pairs(parent)
    of = lambda values: gating.of_pairs(values, row, group, GROUPS)
    child, _ = gating.noisy_topk(of(below), of(size["gate"]), 1, of(z["gate"]))
    close(gating.two_level(parent, child, row, group).weights,
          ref.moe_gate(x, layer_of(gate="topk", k=1, **{"parent.k": 2}), w, z)["gate"])


@test
def two_levels_of_balanced_gates_match_the_reference():
    x, w = normal(ROWS, 10), weights_of()
    above, below = levels(x, w)
    threshold = torch.full((GROUPS * INSIDE,), 0.3, dtype=torch.float64)
    for policy in ("top1", "zero"):
        parent = gating.masked(above.softmax(1), gating.batchwise_mask(above.softmax(1), 2)[0], policy)
        row, group = gating.pairs(parent)
        p = gating.of_pairs(below, row, group, GROUPS).softmax(1)
        mask, gradient = gating.batchwise_groups(p, threshold, group, GROUPS, 1)
        gate = gating.two_level(parent, gating.masked(p, mask, policy), row, group)
        wanted = ref.moe_gate(x, layer_of(gate="threshold", k=1, empty=policy, **{"parent.k": 2}), w, batchwise=True)
        close(gate.weights, wanted["gate"])
        assert gate.empty.any(), "no empty mask"
        for i in range(GROUPS):  # eq 20 applied to the rows X(i) of group i
            own = p[group == i]
            m = max(1, len(own) // INSIDE)
            close(gradient.view(GROUPS, -1)[i], (m - (own > 0.3).sum(0)) / len(own))


@test
def groups_without_rows_are_supported():
    mask, gradient = gating.batchwise_groups(torch.zeros(0, 3), torch.zeros(6), torch.zeros(0, dtype=torch.long), 2, 1)
    assert mask.shape == (0, 3) and not gradient.any()
    p = probabilities()[:5, :3]
    mask, gradient = gating.batchwise_groups(p, torch.zeros(9).double(), torch.full((5,), 1), 3, 1)
    assert mask.sum().item() == 3 and not gradient.view(3, 3)[[0, 2]].any()


# ---- Losses ----------------------------------------------------------------------------------------------------------

@test
def importance_loss_matches_its_definition():
    weights = gating.topk(logits(), K).weights
    sums = [sum(weights[r, i].item() for r in range(ROWS)) for i in range(N)]
    close(gating.importance(weights), sums)
    close(gating.importance_loss(gating.importance(weights)), variance(sums) / (sum(sums) / N) ** 2, 1e-9)
    close(gating.cv(gating.importance(weights)) ** 2, gating.importance_loss(gating.importance(weights)), 1e-6)


@test
def load_loss_matches_its_definition():
    _, chance = gating.noisy_topk(logits(), normal(ROWS, N, seed=2).exp(), K, normal(ROWS, N, seed=3))
    sums = [sum(chance[r, i].item() for r in range(ROWS)) for i in range(N)]
    close(gating.load(chance), sums)
    close(gating.load_loss(gating.load(chance)), variance(sums) / (sum(sums) / N) ** 2, 1e-9)


def two_noisy_levels(above, below, k=2):
    parent, above_chance = gating.noisy_topk(above, torch.ones_like(above), k, normal(ROWS, GROUPS, seed=5))
    row, group = gating.pairs(parent)
    inside = gating.of_pairs(below, row, group, GROUPS)
    child, chance = gating.noisy_topk(inside, torch.ones_like(inside), 1, normal(ROWS * k, INSIDE, seed=6))
    return gating.two_level(parent, child, row, group), above_chance, chance, row, group


def load_of_two_levels(above_chance, chance, group):
    return gating.load_two_level(gating.load(above_chance), gating.load_inside(chance, group, GROUPS),
                                 group.bincount(minlength=GROUPS))


@test
def load_of_two_levels_matches_its_definition():
    above, below = levels(normal(ROWS, 10), weights_of())
    gate, above_chance, chance, row, group = two_noisy_levels(above, below)
    got = load_of_two_levels(above_chance, chance, group).view(GROUPS, INSIDE)
    for i in range(GROUPS):  # eq 14 gives the load of each group
        rows = [n for n in range(len(row)) if group[n] == i]
        for j in range(INSIDE):
            close(got[i, j], above_chance[:, i].sum() * sum(chance[n, j] for n in rows) / len(rows))
    sums = [sum(gate.weights[r, e] for r in range(ROWS)) for e in range(GROUPS * INSIDE)]
    close(gating.importance(gate.weights), sums)


def importance_loss_of(weights):
    return lambda *inputs: gating.importance_loss(gating.importance(weights(*inputs)))


@test
def gradients_of_importance_and_load_losses():
    deviation, z = normal(ROWS, N, seed=2).exp(), normal(ROWS, N, seed=3)
    differentiable(importance_loss_of(lambda x, s: gating.noisy_topk(x, s, K, z)[0].weights), logits(), deviation)
    differentiable(lambda x, s: gating.load_loss(gating.load(gating.noisy_topk(x, s, K, z)[1])), logits(), deviation)
    differentiable(importance_loss_of(lambda x: gating.dense(x).weights), logits())


@test
def gradients_of_the_losses_of_two_levels():
    above, below = levels(normal(ROWS, 10), weights_of())
    differentiable(importance_loss_of(lambda a, b: two_noisy_levels(a, b)[0].weights), above, below)

    def load(a, b):
        _, above_chance, chance, _, group = two_noisy_levels(a, b)
        return gating.load_loss(load_of_two_levels(above_chance, chance, group))
    differentiable(load, above, below)


@test
def threshold_loss_matches_its_definition_and_is_minimal_if_masks_agree():
    p = probabilities()
    mask, m = gating.batchwise_mask(p, 2)
    threshold = normal(N, seed=4).mul(0.02).add(1 / N)
    wanted = sum((float(p[r, i] > threshold[i]) - float(mask[r, i])) * (p[r, i] - threshold[i]).item()
                 for r in range(ROWS) for i in range(N))
    close(gating.threshold_loss(p, threshold, mask), wanted)
    assert wanted > 0
    closed = p.sort(0, descending=True).values[m]
    close(gating.threshold_loss(p, closed, mask), 0.0)


@test
def gradient_of_the_threshold_loss():
    p = probabilities()
    mask, m = gating.batchwise_mask(p, 2)
    threshold = normal(N, seed=4).mul(0.02).add(1 / N)
    differentiable(lambda t: gating.threshold_loss(p, t, mask), threshold)
    differentiable(lambda x: gating.threshold_loss(x, threshold, mask), p)
    t = threshold.clone().requires_grad_()
    gating.threshold_loss(p, t, mask).backward()
    close(t.grad, gating.threshold_gradient(p, threshold, m))
    close(t.grad, [m - sum(float(p[r, i] > threshold[i]) for r in range(ROWS)) for i in range(N)])


@test
def losses_of_bengio_match_their_definitions():
    p, target = probabilities(), 0.2
    column = [[p[r, i].item() for r in range(ROWS)] for i in range(N)]
    close(gating.mean_activation_loss(p, target), sum(abs(sum(c) / ROWS - target) for c in column))
    activations = logits().sigmoid()  # the target is between the means of rows
    wanted = sum(abs(sum(row) / N - 0.5) for row in activations.tolist()) / ROWS
    close(gating.example_activation_loss(activations, 0.5), wanted)
    close(gating.variance_loss(p), -sum(variance(c) for c in column))


@test
def gradients_of_the_losses_of_bengio():
    for loss in (lambda p: gating.mean_activation_loss(p, 0.2), lambda p: gating.example_activation_loss(p, 0.2),
                 gating.variance_loss):
        differentiable(lambda x, loss=loss: loss(x.sigmoid()), logits())


@test
def running_totals_limit_busy_experts():
    constraint, total = gating.RunningTotals(3, margin=2.0), [0.0] * 3
    held_back = 0
    for step in range(20):
        p = (normal(4, 3, seed=step) + torch.tensor([2.0, 0.0, 0.0])).softmax(1)
        gate = constraint(gating.dense(p.log()))
        wanted = [t + w for t, w in zip(total, p.sum(0).tolist())]
        allowed = [x - sum(wanted) / 3 <= 2.0 for x in wanted]
        held_back += not all(allowed)
        for r in range(4):
            rest = sum(p[r, i].item() for i in range(3) if allowed[i])
            close(gate.weights[r], [p[r, i].item() / rest if allowed[i] else 0.0 for i in range(3)])
        total = [t + w for t, w in zip(total, gate.weights.sum(0).tolist())]
    assert held_back > 5
    assert max(total) - sum(total) / 3 <= 2.0 + 4, "the bound for a batch of 4"


@test
def statistics_of_balance():
    found = gating.statistics(torch.tensor([1.0, 1.0, 4.0]), torch.tensor([2, 2, 5]))
    assert abs(found["cv_importance"] - math.sqrt(2) / 2) < 1e-6 and abs(found["max_load"] - 5 / 3) < 1e-6
    assert abs(found["cv_load"] - math.sqrt(2) / 3) < 1e-6


# ---- Trainers --------------------------------------------------------------------------------------------------------

def program(name):
    """Import a trainer whose file name is not a valid module name; return the module."""
    path = os.path.join(ROOT, "tools", "train", name + ".py")
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lm = program("train-lm")
TEXTS = [[9, 20, 31], [8], [30, 12, 33, 25, 6]]


def lm_batch():
    return lm.Batch([np.array(x) for x in TEXTS], "cpu")


def lm_options(**more):
    return types.SimpleNamespace(**{"width": 12, "hidden": 10, "experts": 6, "expert_hidden": 9, "k": 2, **more})


def every_language_model():
    """Yield (kind of gate, groups, a small model) for gates with one and two levels."""
    for gate in ("noisy", "balanced"):
        for groups in (0, 2):
            yield gate, groups, filled(lm.LanguageModel(lm.make_config(lm_options(gate=gate, groups=groups), 40)))


def converted(checkpoint, folder):
    """Convert a checkpoint to a model file and back, which must not change it; return the reference model of the
    file."""
    path = lambda name: os.path.join(folder, name)
    torch.save(checkpoint, path("model.pt"))
    settings = {"licence": "", "attribution": "", "spm": "", "preset": None, "type": "f32", "meta": [],
                "description": "", "layout": "moe", "name": "x", "like": None, "experts": None, "shortlist": None,
                "ids_only": True, "vocab": None, "bpe": None}
    convert.convert(types.SimpleNamespace(input=path("model.pt"), output=path("model.bin"), **settings))
    convert.back(types.SimpleNamespace(input=path("model.bin"), output=path("back.pt"), spm=""))
    back = torch.load(path("back.pt"), weights_only=True)
    assert back["config"] == checkpoint["config"] and back["weights"].keys() == checkpoint["weights"].keys()
    assert all(torch.equal(back["weights"][key], value.float()) for key, value in checkpoint["weights"].items())
    return ref.load(path("model.bin"), torch.float64)


def small(config):
    """Make a config of the trainer small, with different gates in its layers; return it."""
    config["d_model"], config["vocab_size"] = 12, 40
    config["attention"]["size"] = 12
    for layer in config["encoder"] + config["decoder"]:
        if layer["type"] == "moe":
            layer.update(experts=6, hidden=9)
        else:
            layer.update(hidden=10, proj=6 if layer["type"] == "bi-lstmp" else 12)
    return config


def filled(model):
    """Randomise the gates of a model, which some trainers initialise with zeros; return the model."""
    with torch.no_grad():
        for name, weight in model.weights.items():
            if name.endswith(".threshold"):
                weight.mul_(0.9)
            elif ".gate." in name or ".parent." in name:
                weight.copy_(normal(*weight.shape, seed=len(name)) * 0.5)
    return model


def checkpoint_of(model):
    return {"format": "moe-checkpoint-1", "config": model.config,
            "weights": {name: weight.detach().clone() for name, weight in model.weights.items()}}


def logprobs_of(oracle, source, target):
    """Return the reference's log-probability for each token of a target, including the end token."""
    return torch.log_softmax(oracle.forced_logits(source, target[:-1]), 1)[torch.arange(len(target)), target]


@test
def translation_models_of_one_and_two_levels_convert_as_trained():
    for gate in ("noisy", "balanced"):
        for groups in (0, 2):
            model = filled(train.Model(small(train.make_config("cpu", 40, gate, 2, groups))))
            ids = [([4, 9, 20, 31, 3], [8, 12, 33, 3]), ([5, 30, 3], [22, 3])]
            batch = train.Batch([tuple(map(np.array, pair)) for pair in ids], "cpu")
            loss = float(model.loss(batch, 0.0).detach())
            with tempfile.TemporaryDirectory() as folder:
                oracle = converted(checkpoint_of(model), folder)
            close(loss, -torch.cat([logprobs_of(oracle, *pair) for pair in ids]).mean(), 1e-5)
            model.training = True
            model.loss(batch, 0.1).backward()  # all weights except some thresholds must have a gradient
            for name, weight in model.weights.items():
                assert weight.grad.any() or name.endswith(".threshold"), f"{gate}, {groups}: no gradient of {name}"


IDS = [([4, 9, 20, 31, 3], [8, 12, 33, 3]), ([5, 30, 3], [22, 3]), ([6, 11, 13, 14, 15, 3], [17, 18, 3]),
       ([7, 21, 3], [9, 10, 11, 12, 13, 14, 3]), ([4, 35, 36, 3], [37, 38, 39, 3])]


def gradients(config, replicas, pairs=IDS):
    """Compute a batch split among replicas; return (loss, gradient)."""
    model = filled(train.Model(config))
    model.w_importance = model.w_load = 3.0  # make differences between replicas visible
    others = [train.Model(config, share=model) for _ in range(replicas - 1)]
    for other in others:
        other.w_importance, other.w_load = model.w_importance, model.w_load
    trainer = types.SimpleNamespace(replicas=[model, *others], model=model, step=0, pool=ThreadPoolExecutor(replicas),
                                    o=types.SimpleNamespace(device="cpu", dropout=0.0, smoothing=0.1))
    loss, _ = train.Trainer.gradients(trainer, [tuple(map(np.array, pair)) for pair in pairs])
    return loss, {name: weight.grad.clone() for name, weight in model.weights.items()}


class FixedNoise:
    """A noise source that computes noise from the logits, so that each row has equal noise in all replicas."""

    def __enter__(self):
        self.before, torch.randn_like = torch.randn_like, lambda x: (37 * x).sin()

    def __exit__(self, *_):
        torch.randn_like = self.before


@test
def replicas_give_the_gradient_of_the_whole_batch():
    for gate in ("noisy", "balanced"):
        for groups in (0, 2):
            config = small(train.make_config("cpu", 40, gate, 2, groups))
            with FixedNoise():
                loss, whole = gradients(config, 1)
                for replicas in (2, 3, 7):  # with 7 replicas, some have no pairs
                    other, parts = gradients(config, replicas)
                    close(loss, other, 1e-5)
                    for name, weight in whole.items():
                        assert weight.any() or "threshold" in name, f"{gate}, {groups} groups: no gradient of {name}"
                        scale = max(1e-3, float(weight.abs().max()))
                        close(parts[name] / scale, weight / scale, 1e-4)


@test
def an_expert_sees_the_rows_of_all_replicas():
    config, mine = small(train.make_config("cpu", 40, "balanced", 2)), []
    collect = train.kernels.collect
    train.kernels.collect = lambda g, other: mine.append(other.clone()) or collect(g, other)
    try:
        whole = gradients(config, 3)[1]
    finally:
        train.kernels.collect = collect
    model = train.Model(config)
    for name in ("encoder.2.experts.w_up", "decoder.1.experts.w_down"):
        begin, end = model.span[name]
        found = [part[begin:end].view(6, -1).any(1).nonzero()[:, 0].tolist() for part in mine]
        assert found == [[2, 3], [4, 5]], found
        for part, experts in zip(mine, found):
            close(part[begin:end].view_as(whole[name])[experts], whole[name][experts], 1e-6)


@test
def errors_in_one_replica_abort_the_step():
    config = small(train.make_config("cpu", 40, "balanced", 2))
    try:
        gradients(config, 3, [*IDS[:2], ([4, 99, 3], [8, 3])])  # id 99 is not in the vocabulary
    except IndexError as error:
        assert "out of bounds" in str(error), error
        return
    raise AssertionError("no error")


def batch_of(pairs=IDS):
    return train.Batch([tuple(map(np.array, pair)) for pair in pairs], "cpu")


def every_gate():
    """Yield (kind of gate, groups, a small model) for gates with one and two levels."""
    for gate in ("noisy", "balanced"):
        for groups in (0, 2):
            yield gate, groups, filled(train.Model(small(train.make_config("cpu", 40, gate, 2, groups))))


def balanced_levels(model, x):
    """Yield (weight name, Gate, softmax, groups of rows or None) for each level of the trainer's balanced gates,
    applied to rows x."""
    k = model.config["encoder"][2]["k"]
    if not model.config["encoder"][2].get("groups"):
        yield ("encoder.2.gate", *model._balanced("encoder.2.gate", x, k), None)
        return
    parent, p = model._balanced("encoder.2.parent", x, k)
    yield "encoder.2.parent", parent, p, None
    row, group = gating.pairs(parent)
    yield ("encoder.2.gate", *model._balanced("encoder.2.gate", x, k, row, group, 2), group)


@test
def masks_of_training_have_m_rows_in_every_column():
    x = normal(31, 12, dtype=torch.float32)
    for gate, _, model in every_gate():
        if gate == "balanced":
            model.training = True
            for _, gates, p, group in balanced_levels(model, x):
                for i in range(1 if group is None else 2):
                    own = slice(None) if group is None else group == i
                    chosen = gates.mask[own] & ~gates.empty[own][:, None]  # ignore masks that replace empty ones
                    m = max(1, 2 * len(chosen) // p.shape[1])
                    assert chosen.sum(0).tolist() == [m] * p.shape[1], f"{chosen.sum(0).tolist()}, expected {m} each"


@test
def thresholds_follow_the_count_minus_m_and_are_learned():
    x = normal(90, 12, dtype=torch.float32)
    for gate, groups, model in every_gate():
        if gate == "noisy":
            continue
        model.training, optimizer = True, train.Optimizer(model, "adam")
        for step in range(400):
            for name, _, p, group in balanced_levels(model, x):
                threshold, found = model.weights[name + ".threshold"], []
                for i in range(1 if group is None else 2):
                    own = p if group is None else p[group == i]
                    t = threshold.view(-1, p.shape[1])[i]
                    m = max(1, 2 * len(own) // p.shape[1])
                    found += [(m - sum(float(v > t[j]) for v in own[:, j])) / len(own) for j in range(p.shape[1])]
                close(threshold.grad, found, 1e-6)
                if step == 399:
                    assert max(map(abs, found)) < 0.05, f"{name} of {groups} groups is not learned: {found}"
                    continue
                if step == 0:
                    assert max(map(abs, found)) > 0.1, f"{name}: no difference to learn"
            before = model.flat.clone()
            optimizer.step(0.0, 0.0, 0.02, 1.0, ThreadPoolExecutor(1))
            moved = (model.flat - before)[optimizer.end:]  # thresholds must rise if too many rows pass
            found = torch.cat([model.weights[name].grad for name in model.weights if name.endswith(".threshold")])
            assert not found.any() and (step or moved.any())
            if step == 0:
                with torch.no_grad():
                    for name, _, p, group in balanced_levels(model, x):
                        a, b = model.span[name + ".threshold"]
                        now = model.weights[name + ".threshold"].grad
                        change = moved[a - optimizer.end:b - optimizer.end]
                        assert change.any() and not (now * change > 0).any()
                        now.zero_()


class Watched:
    """A recorder of the inputs and outputs of a model's gates, in a list of (name, x, Gate)."""

    def __init__(self, model):
        self.gates, gate = [], model._gate

        def watched(name, layer, x):
            found = gate(name, layer, x)
            self.gates.append((name, x.detach(), found))
            return found
        model._gate = watched


def cv_squared(sums):
    return variance(sums) / (sum(sums) / len(sums)) ** 2


def balance_of(model, name, x, gate):
    """Compute eq 6-11, 13 and 14 for a mixture element by element; return (importance loss, load loss)."""
    w, groups, k = {key: value.detach() for key, value in model.weights.items()}, 2, 2
    column = lambda values: [sum(row[i] for row in values.tolist()) for i in range(values.shape[1])]
    two = name + ".parent.weight" in w
    if name + ".gate.noise" not in w:  # balanced gates apply the softmax before the mask
        if not two:
            return cv_squared(column((x @ w[name + ".gate.weight"]).softmax(1))), 0.0
        above = (x @ w[name + ".parent.weight"]).softmax(1)
        parent = gating.masked(above, gating.batchwise_mask(above, k)[0]).weights
        inside = (x @ w[name + ".gate.weight"]).view(len(x), groups, -1).softmax(2)
        return cv_squared(column(above)) + cv_squared(column((parent[:, :, None] * inside).flatten(1))), 0.0
    chances = {}
    for part in ("parent", "gate") if two else ("gate",):
        clean, size = x @ w[f"{name}.{part}.weight"], torch.nn.functional.softplus(x @ w[f"{name}.{part}.noise"])
        chances[part] = clean, size
    if not two:
        loads = column(gating.noisy_topk(*chances["gate"], k, torch.randn_like(chances["gate"][0]))[1])
    else:
        parent, above = gating.noisy_topk(*chances["parent"], k, torch.randn_like(chances["parent"][0]))
        row, group = gating.pairs(parent)
        clean, size = (gating.of_pairs(value, row, group, groups) for value in chances["gate"])
        inside = gating.noisy_topk(clean, size, k, torch.randn_like(clean))[1]
        loads = [float(above[:, i].sum() * inside[group == i, j].sum() / (group == i).sum())
                 for i in range(groups) for j in range(inside.shape[1])]
    return cv_squared(column(gate.weights.detach())), cv_squared(loads)


@test
def loss_less_cross_entropy_is_the_weighted_squares_of_variation():
    translators = [(*found, batch_of()) for found in every_gate()]
    for gate, groups, model, batch in translators + [(*found, lm_batch()) for found in every_language_model()]:
        with FixedNoise():
            model.training, watched = True, Watched(model)
            loss = {}
            for weights in ((0.0, 0.0), (0.7, 0.0), (0.3, 0.5)):
                model.w_importance, model.w_load = weights
                watched.gates.clear()
                loss[weights] = float(model.loss(batch, 0.0).detach())
            importance, load = (sum(x) for x in zip(*(balance_of(model, *entry) for entry in watched.gates)))
        about = f"{gate}, {groups} groups: {importance}, {load}"
        assert importance > 0.01 and (load > 0.001) == (gate == "noisy"), about
        plain = loss[0.0, 0.0]
        close(loss[0.7, 0.0] - plain, 0.7 * importance, 2e-5)
        close(loss[0.3, 0.5] - plain, 0.3 * importance + 0.5 * load, 2e-5)
        model.training = False
        model.w_importance = 0.0
        plain = float(model.loss(batch, 0.0).detach())
        model.w_importance = 9.0
        close(float(model.loss(batch, 0.0).detach()), plain)  # losses in evaluation exclude balance losses


@test
def noisy_gates_start_at_zero_and_balanced_ones_at_random():
    for groups in (0, 2):
        noisy, balanced = (train.Model(small(train.make_config("cpu", 40, gate, 2, groups)))
                           for gate in ("noisy", "balanced"))
        for model in (noisy, balanced):
            for name, weight in model.weights.items():
                if name.endswith(".bias"):  # initial biases open an LSTM's forget gates
                    h = len(weight) // 4
                    assert (weight[h:2 * h] == 1).all() and not weight[:h].any() and not weight[2 * h:].any()
                elif name.endswith(".threshold"):
                    inside = len(weight) // (groups or 1) if ".gate." in name else len(weight)
                    close(weight.detach(), torch.full_like(weight, 1 / inside), 1e-7)
                elif train.of_gate(name):
                    assert weight.any() == (model is balanced), name
        gates = {name for name in noisy.weights if train.of_gate(name)}
        assert {name.rsplit(".", 1)[1] for name in gates} == {"weight", "noise"}


@test
def dropout_is_on_the_output_of_embedding_and_every_layer():
    model = filled(train.Model(small(train.make_config("cpu", 40, "balanced", 2))))
    before, calls = train.DropoutAdd.apply, []

    def watched(x, u, seed, rate):
        y = before(x, u, seed, rate)
        calls.append((x is not None, seed, rate))
        kept = (y if x is None else y - x).detach()
        u = u.detach() / (1 - rate)
        dropped = kept.abs() <= 1e-6
        assert 0.05 < float(dropped.float().mean()) < 0.6, f"{float(dropped.float().mean())} dropped at {rate}"
        close(kept[~dropped], u[~dropped], 1e-5)
        return y
    train.DropoutAdd.apply = watched
    try:
        model.dropout = 0.25
        model.loss(batch_of(), 0.0)
        assert not calls  # evaluation does not use dropout
        model.training = True
        model.loss(batch_of(), 0.0)
        layers = len(model.config["encoder"]) + len(model.config["decoder"])
        # the first call processes both embeddings, each later call a residual
        assert [x for x, _, _ in calls] == [False] + [True] * layers
        assert len({seed for _, seed, _ in calls}) == 1 + layers and {rate for _, _, rate in calls} == {0.25}
    finally:
        train.DropoutAdd.apply = before


def compared_with_the_reference(model):
    """Compare loss and gradients of a trainer's model with the reference; return the reference model."""
    with tempfile.TemporaryDirectory() as folder:
        oracle = converted(checkpoint_of(model), folder)
    for value in oracle.w.values():
        for part in value if isinstance(value, tuple) else (value,):
            part.requires_grad_()
    wanted, loss = -torch.cat([logprobs_of(oracle, s, t) for s, t in IDS]).mean(), model.loss(batch_of(), 0.0)
    close(loss.detach(), wanted.detach(), 1e-5)
    wanted.backward()
    loss.backward()
    seen = set()
    for name, weight in model.weights.items():
        if name.endswith(".threshold") or name.endswith(".noise"):
            continue
        if ".experts." in name:
            up, down = oracle.w[name.rsplit(".", 1)[0]]
            wanted = (up if name.endswith("w_up") else down).grad.transpose(1, 2)
        else:
            wanted = oracle.w[name].grad
            wanted = wanted.t() if train.of_gate(name) else wanted
        close(weight.grad / wanted.abs().max(), wanted / wanted.abs().max(), 2e-4)
        seen.add(name.split(".")[-2])
    groups = any(layer.get("groups") for layer in model.config["encoder"])
    assert {"gate", "experts", "embedding", "attention"} | ({"parent"} if groups else set()) <= seen
    return oracle


@test
def gradients_match_the_reference():
    for _, _, model in every_gate():
        compared_with_the_reference(model)


def attentive(model):
    """Enlarge a model's attention weights so that attention is not uniform; return the model."""
    with torch.no_grad():
        model.weights["attention.w_key"].mul_(2)
        model.weights["attention.v"].mul_(5)
    return model


def greedy_as(oracle, model):
    for source, _ in IDS:
        wanted = oracle.translate(source[1:-1], source[0], beam=1, length_penalty=0.0)[0].ids
        got = model.greedy([source])[0]
        n = min(len(got), len(wanted))
        assert n > 1 and got[:n] == wanted[:n], (got, wanted)


@test
def contexts_of_upper_layers_match_the_reference():
    config, losses = small(train.make_config("cpu", 40, "balanced", 2)), []
    for start in "query", "zero":
        config["attention"]["start"] = start
        model = attentive(filled(train.Model(config, seed=5)))
        oracle = compared_with_the_reference(model)
        assert oracle.current and model.weights["decoder.2.w_x"].shape == (40, 24)
        greedy_as(oracle, model)
        losses.append(float(model.loss(batch_of(), 0.0).detach()))
    assert abs(losses[0] - losses[1]) > 1e-3


@test
def product_attention_matches_the_reference():
    model = attentive(filled(train.Model(small(train.make_config("cpu", 40, "balanced", 2, attention="product")))))
    oracle = compared_with_the_reference(model)
    assert oracle.meta["attention.kind"] == "product"
    greedy_as(oracle, model)
    refused(lambda: train.make_config("cpu", 40, "balanced", 2, attention="dot"), "kind: unknown value 'dot'")


@test
def hand_written_backward_passes_are_correct():
    if sys.platform == "darwin":
        raise Skip("the C kernels require gcc with OpenMP")
    try:
        for kind in (train.CpuKernels, train.TorchKernels):
            for precision in ("fp32", "bf16"):
                train.use(kind, precision)
                with contextlib.redirect_stdout(io.StringIO()):
                    train.check()
    finally:
        train.use(train.TorchKernels, "fp32")


@test
def unused_experts_take_over_half_of_the_work_of_busy_ones():
    random = np.random.default_rng(3)
    pairs = [([4, *random.integers(8, 40, 9).tolist(), 3], [*random.integers(8, 40, 7).tolist(), 3]) for _ in range(40)]
    model = filled(train.Model(small(train.make_config("cpu", 40, "balanced", 2))))
    name, idle = "encoder.2.gate", 4
    x = train.gate_inputs(model, types.SimpleNamespace(next=lambda *_: pairs), 1)[name][0]
    with torch.no_grad():  # make the logits of expert `idle` about -80 for all rows
        model.weights[name + ".weight"][:, idle] = torch.linalg.lstsq(x, torch.full((len(x), 1), -80.0)).solution[:, 0]
        model.weights[name + ".threshold"].fill_(0.05)
    before, mixture = model.flat.clone(), train.data.Mixture
    train.data.Mixture = lambda *_, **__: types.SimpleNamespace(next=lambda *_: pairs)
    optimizer = train.Optimizer(model, "adam")
    optimizer.v.copy_(torch.arange(len(optimizer.v)))
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            path = os.path.join(folder, "resume.pt")
            train.write_atomically({"config": model.config, "weights": model.flat, "average": model.flat + 1,
                                    "optimizer": optimizer.state()}, path)
            train.revive(folder, "", 1)
            resume = torch.load(path, weights_only=True)
    finally:
        train.data.Mixture = mixture
    share = lambda: train.gate_inputs(model, types.SimpleNamespace(next=lambda *_: pairs), 1)[name][1].mean(0) * 6
    losses = []
    for flat in before, resume["weights"]:
        model.flat.copy_(flat)
        losses.append((share(), float(model.loss(batch_of(pairs), 0.0).detach())))
    busy = int(losses[0][0].argmax())
    assert losses[0][0][idle] < train.REVIVED and losses[1][0][[idle, busy]].min() > 0.25 * losses[0][0][busy], losses
    assert abs(losses[1][1] - losses[0][1]) < 0.02, losses
    assert torch.equal(model.weights["encoder.2.experts.w_up"][idle], model.weights["encoder.2.experts.w_up"][busy])
    changed = {key for key, (a, b) in model.span.items() if not torch.equal(before[a:b], resume["weights"][a:b])}
    assert {key for key in changed if key.startswith("encoder.2.")} == {
        name + ".weight", name + ".threshold", "encoder.2.experts.w_up", "encoder.2.experts.w_down"}
    a, b = model.span["encoder.2.experts.w_up"]
    v = resume["optimizer"]["v"][a:b].view(model.weights["encoder.2.experts.w_up"].shape)
    assert torch.equal(v[idle], v[busy]) and len({float(x.sum()) for x in v}) == 5  # the values of other experts differ


@test
def checkpoints_of_one_model_are_averaged():
    config = small(train.make_config("cpu", 64, "balanced"))
    files = [checkpoint_of(filled(train.Model(config, seed=seed))) for seed in (1, 2)]
    files[1]["config"] = {**files[1]["config"], "target_tokens_seen": 7}
    mean = train.average(files, (1.0, 3.0))
    assert mean["config"] == {**files[1]["config"], "training_minutes": 0}
    for name, weight in mean["weights"].items():
        a, b = (file["weights"][name].float() for file in files)
        close(weight.float(), (0.25 * a + 0.75 * b).to(weight.dtype).float(), 1e-6)
    first = train.average(files, (1.0, 3.0), ["encoder.2.", "attention"])["weights"]
    for name, weight in first.items():
        alone = name.startswith(("encoder.2.", "attention"))
        close(weight.float(), (files[0]["weights"][name].to(weight.dtype) if alone else mean["weights"][name]).float())
    for shares in (0.0, 0.0), (1.0, -1.0), (float("nan"), 1.0):
        refused(lambda: train.average(files, shares), "more than 0")
    files[1]["config"] = {**files[1]["config"], "d_model": 48}
    refused(lambda: train.average(files, (1.0, 1.0)), "configurations differ")


def losses_of(*files):
    """Load inference checkpoints; return (models, their losses on the same batch)."""
    models = []
    for x in files:
        models.append(train.Model(x["config"]))
        models[-1].load(x["weights"])
    return models, [model.loss(batch_of(), 0.0) for model in models]


@test
def wider_experts_compute_the_same_and_learn():
    trained = filled(train.Model(small(train.make_config("cpu", 40, "balanced")), seed=1))
    file = train.inference_checkpoint(trained.config, trained.weights)
    wide = train.widen(file, 40)
    assert file["config"] == trained.config != wide["config"]
    models, (narrow_loss, loss) = losses_of(file, wide)
    close(float(loss.detach()), float(narrow_loss.detach()), 1e-6)
    loss.backward()
    for mixture in "encoder.2", "decoder.1":
        up, down = (models[1].weights[f"{mixture}.experts.w_{x}"] for x in ("up", "down"))
        assert up.shape == (6, 12, 40) and down.shape == (6, 40, 12)
        assert not down[:, 9:].any() and down.grad[:, 9:].any(), mixture
        close(float((up[:, :, 9:].std() / up[:, :, :9].std()).detach()), 1, 0.1)
    refused(lambda: train.widen(wide, 40), "greater than the current 40")
    refused(lambda: train.widen({"config": {"layers": []}, "weights": {}}, 40), "no mixture")


@test
def added_contexts_compute_the_same_and_learn():
    config = small(train.make_config("cpu", 40, "balanced"))
    del config["decoder"][2]["context"]
    config["decoder"][0].update(context="none", input="embedding, context")  # the notation of old configs
    trained = filled(train.Model(config, seed=1))
    file = train.inference_checkpoint(trained.config, trained.weights)
    reading = train.attend(file)
    assert file["config"] == trained.config != reading["config"]
    models, (before, loss) = losses_of(file, reading)
    close(float(loss.detach()), float(before.detach()), 1e-6)
    loss.backward()
    columns = models[1].weights["decoder.2.w_x"]
    assert not columns[:, 12:].any() and columns.grad[:, 12:].any()
    assert torch.equal(columns[:, :12], models[0].weights["decoder.2.w_x"])
    again = train.attend(reading)
    assert all(torch.equal(weight, reading["weights"][name]) for name, weight in again["weights"].items())
    for i, context in (0, "current"), (0, "none"), (2, "previous"):
        other = [{**layer, "context": context, "input": ""} if at == i else layer
                 for at, layer in enumerate(reading["config"]["decoder"])]
        refused(lambda other=other: train.Model({**reading["config"], "decoder": other}),
                f"decoder.{i} reads the context '{context}'")
    deeper = train.deepen(reading, decoder=1)["weights"]
    assert deeper["decoder.3.w_x"].shape == (40, 24) and not deeper["decoder.3.w_proj"].any()
    for config in {**file["config"], "decoder": file["config"]["decoder"][:2]}, {"decoder": []}:
        refused(lambda config=config: train.attend({**file, "config": config}), "requires an LSTM layer above")


@test
def more_layers_compute_the_same_and_learn():
    trained = filled(train.Model(small(train.make_config("cpu", 40, "balanced")), seed=1))
    file = train.inference_checkpoint(trained.config, trained.weights)
    deep = train.deepen(file, encoder=1, decoder=2)
    assert file["config"] == trained.config and len(deep["config"]["decoder"]) == len(trained.config["decoder"]) + 2
    assert deep["config"]["encoder"][4]["type"] == "bi-lstmp" and deep["config"]["decoder"][4]["type"] == "lstmp"
    models, (shallow_loss, loss) = losses_of(file, deep)
    assert float(loss.detach()) == float(shallow_loss.detach())
    loss.backward()
    for name, weight in models[1].weights.items():
        new = name.startswith(("encoder.4", "decoder.3", "decoder.4"))
        assert new == (name not in file["weights"]), name
        if new and name.endswith("w_proj"):
            assert not weight.any() and weight.grad.any(), name
        elif new and name.endswith("w_x"):
            assert weight.any()
    refused(lambda: train.deepen(file, encoder=-1), "is negative")
    for layers in [], file["config"]["decoder"][:2], file["config"]["decoder"][:1]:
        config = {**file["config"], "decoder": layers}
        refused(lambda: train.deepen({**file, "config": config}, decoder=1), "last layer is not an LSTM")
    config = {**file["config"], "encoder": file["config"]["encoder"][1:]}
    refused(lambda: train.deepen({**file, "config": config}, encoder=1), "first layer is not a bidirectional LSTM")


@test
def language_models_convert_as_trained():
    for _, _, model in every_language_model():
        loss = float(model.loss(lm_batch()).detach())
        with tempfile.TemporaryDirectory() as folder:
            oracle = converted(checkpoint_of(model), folder)
        oracle.m.never = []  # the training loss includes all tokens
        close(loss, -torch.cat([oracle.language_score(x) for x in TEXTS]).mean(), 1e-5)


@test
def deep_moe_converts_as_trained():
    digits = program("train-digits")
    for kind, gate in [(x, "softmax") for x in digits.NETWORKS] + [("mixture", "sigmoid"), ("single", "sigmoid")]:
        options = types.SimpleNamespace(experts=[3, 2], hidden=[5, 4], gate_hidden=[6, 7], network=kind, gate=gate)
        network = digits.Network(digits.make_config(options), 1)
        x = normal(7, digits.IMAGE ** 2, dtype=torch.float32)
        with tempfile.TemporaryDirectory() as folder:
            oracle = converted(network.checkpoint(), folder)
        close(network.forward(x)[0].log_softmax(1).detach(), oracle.classify(x.double()), 1e-5)


def digits_in(folder, count):
    """Write `count` generated digits in MNIST's format to a folder."""
    random = np.random.default_rng(1)
    for name, array in (("t10k-images-idx3-ubyte", random.integers(0, 256, (count, 28, 28), np.uint8)),
                        ("t10k-labels-idx1-ubyte", random.integers(0, 10, count, np.uint8))):
        with gzip.open(os.path.join(folder, name + ".gz"), "wb") as file:
            sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
            file.write(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


@test
def deep_moe_is_constrained_at_first_only():
    digits = program("train-digits")
    digits.TRAIN = 30
    forward, phases = digits.Network.forward, []

    def watched(network, x):
        if torch.is_grad_enabled():
            phases.append(network.totals and [(id(x), x.margin, float(x.total.sum())) for x in network.totals])
        return forward(network, x)
    digits.Network.forward = watched
    options = dict(experts=[3, 2], hidden=[5, 4], gate_hidden=[6, 7], network="mixture", gate="softmax", seed=1,
                   epochs=2, fine_tune=1, margin=4.0, batch=10, rate=0.01, momentum=0.9, weight_decay=0.0)
    with tempfile.TemporaryDirectory() as folder:
        digits_in(folder, 40)
        digits.train(types.SimpleNamespace(data=folder, losses=None, **options), lambda text: None)
        assert [bool(x) for x in phases] == [True] * 6 + [False] * 3  # 2 epochs and fine-tuning of 3 batches each
        assert len({x[0][0] for x in phases[:6]}) == 1 and {x[0][1] for x in phases[:6]} == {4.0}  # one set of totals
        close([x[1][2] for x in phases[:6]], [0, 10, 20, 30, 40, 50], 1e-4)  # totals include all examples so far
        phases.clear()
        digits.train(types.SimpleNamespace(data=folder, losses=[0.1, 0.2, 0.3], **options), lambda text: None)
        assert phases == [None] * 9  # Bengio's losses replace balancing
    g = [probabilities(), torch.ones(ROWS, 1)]  # balance_loss ignores layers of one expert
    close(digits.balance_loss(g, (0.1, 0.2, 0.3)), 0.1 * gating.mean_activation_loss(g[0], 1 / N) +
          0.2 * gating.example_activation_loss(g[0], 1 / N) + 0.3 * gating.variance_loss(g[0]))


@test
def activation_per_example_moves_sigmoid_gates_and_not_softmax_gates():
    digits = program("train-digits")
    for gate in ("softmax", "sigmoid"):
        options = types.SimpleNamespace(experts=[3, 2], hidden=[5, 4], gate_hidden=[6, 7], network="mixture", gate=gate)
        network = digits.Network(digits.make_config(options), 1)
        network.weights = {name: w.detach().double().requires_grad_() for name, w in network.weights.items()}
        x, bias = normal(7, digits.IMAGE ** 2), network.weights["network.0.gate.bias"]
        loss = lambda: digits.balance_loss(network.forward(x)[1], (0, 1, 0))
        loss().backward()
        for i in range(3):
            with torch.no_grad():
                bias[i] += 1e-6
                above = loss()
                bias[i] -= 2e-6
                below = loss()
                bias[i] += 1e-6
            close(bias.grad[i], (above - below) / 2e-6, 1e-7)
        size = bias.grad.abs()
        assert (size > 1e-3).all() if gate == "sigmoid" else (size < 1e-9).all(), (gate, size)


@test
def combinations_count_pairs_of_experts():
    first, second = torch.eye(2)[[0, 0, 1, 1]], torch.eye(3)[[0, 2, 2, 1]]
    close(program("train-digits").combinations(first, second), [[0.25, 0, 0.25], [0, 0.25, 0.25]])


@test
def mutual_information_matches_its_definition():
    information = program("train-digits").mutual_information
    labels = torch.tensor([0, 1, 2, 3] * 5)
    close(information(torch.eye(4)[labels], labels), 2.0)  # each label has its own expert
    close(information(torch.full((20, 4), 0.25), labels), 0.0)
    halves = torch.eye(2)[labels // 2] * 0.8 + 0.1  # this equals a binary channel with error rate 0.1
    close(information(halves, labels), 1 + 0.9 * math.log2(0.9) + 0.1 * math.log2(0.1), 1e-6)


# ---- Files -----------------------------------------------------------------------------------------------------------

@test
def files_are_read_and_written_without_pytorch():
    for name in ("moefile", "torchfile", "tfbundle", "gnmt", "convert"):
        with open(os.path.join(ROOT, "tools", "convert", name + ".py"), encoding="utf-8") as file:
            tree = ast.parse(file.read())
        imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        assert not imported & {"torch", "gating", "reference"}, f"{name}.py imports {imported}"


@test
def invalid_layers_are_rejected_by_field_name():
    def described(**settings):
        given = {"kind": "moe", "experts": 12, "hidden": 4, "gate": "topk", "k": 2, **settings}
        meta = {f"encoder.2.{key}": value for key, value in given.items()}
        return moefile.describe_layer({"general.architecture": "gnmt-moe", **meta}, "encoder", 2)

    layer = described(groups=3, **{"parent.k": 3})
    assert (layer.parent.gate, layer.parent.k, layer.parent.empty, layer.k) == ("topk", 3, "top1", 2)
    assert described(groups=4).parent.k == 2 and described().parent is None
    assert described(groups=3, gate="softmax", k=0).parent.gate == "softmax"
    for key, settings in {
            "groups": {"groups": 5}, "k": {"k": 0}, "parent.k": {"groups": 3, "parent.k": 4},
            "gate": {"gate": "batchwise"}, "parent.gate": {"groups": 3, "parent.gate": "noisy"},
            "empty": {"empty": "all"}, "gate.relu": {"gate.relu": 2}, "parent.empty": {"groups": 3, "parent.empty": 0},
            "gate.hidden": {"gate.hidden": -1}, "expert": {"expert": "conv"},
            "activation": {"activation": "none"}, "experts": {"experts": 0}, "output": {"output": "tanh"}}.items():
        refused(lambda settings=settings: described(**settings), f"encoder.2.{key}:")
    refused(lambda: described(k=13), "encoder.2.k: 13 is out of range (1 to 12)")
    refused(lambda: described(groups=3, k=5), "encoder.2.k: 5 is out of range (1 to 4)")
    refused(lambda: described(groups=2, k=3, experts=6), "encoder.2.parent.k: 3 is out of range (1 to 2)")


@test
def trainers_reject_layers_unsupported_by_model_files():
    for change, words in (({"groups": 4}, "groups: 6 experts are not a multiple of 4"),
                          ({"k": 0}, "k: 0 is out of range (1 to 6)"),
                          ({"groups": 2, "k": 4}, "k: 4 is out of range (1 to 3)"),
                          ({"groups": 2, "k": 3}, "parent.k: 3 is out of range (1 to 2)"),
                          ({"expert_hidden": 0}, "hidden: 0 is out of range (1"),
                          ({"hidden": 1 << 21}, "hidden: 2097152 is out of range")):
        options = lm_options(**{"gate": "noisy", "groups": 0, **change})
        refused(lambda options=options: lm.make_config(options, 40), words)
    refused(lambda: train.make_config("cpu", 40, "balanced", 2, 5), "groups: 32 experts are not a multiple of 5")
    assert {gate: meant for gate, meant in gating.GATES.values()}.items() <= convert.GATE.items()
    mixture = gating.mixture_config("noisy", experts=6, hidden=9, k=2)
    for key in gating.WRITTEN:
        assert mixture[key] == moefile.key_of("moe", key).default


@test
def missing_or_invalid_thresholds_are_rejected():
    meta, tensors = moefile.read(os.path.join(ROOT, "tests", "golden", "model-hierarchy-threshold.bin"))
    for name in ("encoder.1.gate.threshold", "decoder.1.parent.threshold"):
        refused(lambda name=name: moefile.check_model(meta, {k: v for k, v in tensors.items() if k != name}), name)
        value = tensors[name].array()
        value[1] = np.nan
        changed = {**tensors, name: moefile.Tensor.encode(value)}
        refused(lambda changed=changed: moefile.check_model(meta, changed), name)
    moefile.check_model(meta, tensors)


def refused(function, words):
    try:
        function()
    except (moefile.FormatError, SystemExit) as error:
        assert words in str(error), f"{error}: expected {words}"
        return
    raise AssertionError(f"not rejected: {words}")


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
