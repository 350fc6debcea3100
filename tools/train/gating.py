"""Differentiable gates of mixtures of experts and their balancing losses, in PyTorch, shared by the trainers.

Shapes are written [rows, n]: a row is a token (or an example), n the number of experts of one level of gates. "eq N"
and "App. X" refer to Shazeer et al. 2017 (arXiv 1701.06538), "Bengio" to Bengio et al. 2015 (arXiv 1511.06297), "Deep
MoE" to Eigen et al. 2013 (arXiv 1312.4314). reference.py implements inference, with a plain function per equation;
tests/train/test_gating.py compares both modules.

A gate returns a Gate. With two levels (App. B: a groups of b experts, expert i * b + j is E_ij) the parent's gate
selects the pairs (row, group), a child's gate is computed for every pair [pairs, b], and `two_level` combines them:

    parent = noisy_topk(...)                     # [rows, a]
    row, group = pairs(parent)                   # sorted by group
    child = noisy_topk(..., of row and group)    # [pairs, b]
    gate = two_level(parent, child, row, group)  # [rows, a * b]
"""
import math
import typing

import torch
import torch.nn.functional as F

import common  # must be imported first to extend sys.path
import moefile


class Gate(typing.NamedTuple):
    weights: torch.Tensor  # [rows, n] G(x), zero for experts that are not selected
    mask: torch.Tensor     # [rows, n] booleans: the selected experts
    empty: torch.Tensor    # [rows] booleans: the mask was empty, and the policy for empty masks applied


# ---- Gates -----------------------------------------------------------------------------------------------------------

def mlp_features(x, weight, bias=None):
    """Return relu(W x + b), the input of an MLP gate's last layer (Deep MoE, section 3). x [rows, d], weight [units,
    d]."""
    return F.linear(x, weight, bias).relu()


def dense(logits):
    """eq 2: select every expert, weighted by the softmax. logits [rows, n]."""
    weights = logits.softmax(1)
    return Gate(weights, torch.ones_like(weights, dtype=torch.bool), torch.zeros_like(weights[:, 0], dtype=torch.bool))


def sigmoid(logits):
    """Bengio: weight every expert by its sigmoid, the mean of the paper's Bernoulli units. logits [rows, n]."""
    return dense(logits)._replace(weights=logits.sigmoid())


def topk_mask(values, k):
    """eq 5 and 17: select the k largest values of each row. values [rows, n] -> booleans [rows, n]."""
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, values.topk(k, sorted=False).indices, True)


def topk(logits, k):
    """eq 3 without noise, as at inference: return the Gate with the softmax over the k largest logits [rows, n]."""
    mask = topk_mask(logits.detach(), k)
    return Gate(logits.masked_fill(~mask, -math.inf).softmax(1), mask, torch.zeros_like(mask[:, 0]))


def noisy_topk(clean, deviation, k, normal):
    """eq 3 to 5 and App. A: return (Gate, chance) for clean logits x W_g [rows, n], deviations softplus(x W_noise)
    [rows, n] and standard normal numbers [rows, n]. chance [rows, n] is P(x, i) of eq 8 and 9, the probability that
    expert i is selected if only its noise is sampled again. chance has a gradient, unlike the selection."""
    noisy = clean + normal * deviation
    n = noisy.shape[1]
    top = noisy.topk(min(k + 1, n))
    mask = torch.zeros_like(clean, dtype=torch.bool).scatter_(1, top.indices[:, :k], True)
    gate = Gate(noisy.masked_fill(~mask, -math.inf).softmax(1), mask, torch.zeros_like(mask[:, 0]))
    if k == n:
        return gate, torch.ones_like(clean)
    return gate, torch.special.ndtr((clean - kth_excluding(top.values, mask, k)) / deviation)


def kth_excluding(top, mask, k):
    """App. A: return kth_excluding(H(x), k, i), the k-th largest element other than i. top [rows, k + 1]: the largest
    elements, descending; mask [rows, n]: the k largest elements -> [rows, n]."""
    return torch.where(mask, top[:, k:], top[:, k - 1:k])


def batchwise_mask(p, k):
    """eq 18: return (mask, m), a mask of the m = k |X| / n largest p (at least one) of every column. p [rows, n]."""
    m = max(1, k * len(p) // p.shape[1])
    return topk_mask(p.detach().t(), m).t().contiguous(), m


def threshold_mask(p, threshold):
    """eq 19: select the p [rows, n] above the thresholds [n] or [rows, n]."""
    return p > threshold


def masked(p, mask, policy="top1"):
    """eq 16: return the Gate of softmax values p [rows, n] restricted to a mask. Rows with an empty mask select the
    best expert ("top1") or none ("zero")."""
    with torch.no_grad():
        empty = ~mask.any(1)
        if policy == "top1":
            mask = mask.clone()
            mask[empty, p.detach()[empty].argmax(1)] = True
    g = p * mask
    total = g.sum(1, keepdim=True)
    return Gate(g / (total if policy == "top1" else total + empty[:, None]), mask, empty)


# ---- Two levels of gates ---------------------------------------------------------------------------------------------

def pairs(parent):
    """Return (row, group) of all pairs that a parent's Gate selects, sorted by group."""
    group, row = parent.mask.t().nonzero(as_tuple=True)
    return row, group


def of_pairs(values, row, group, groups):
    """Return the values [pairs, b] of the pairs, given values [rows, groups * b]."""
    return values.view(len(values), groups, -1)[row, group]


def batchwise_groups(p, threshold, group, groups, k):
    """Apply eq 18 within each group i over its rows X(i). Return (mask [pairs, b], gradient [groups * b] of eq 20 with
    respect to the thresholds, divided by |X(i)|). p [pairs, b], group [pairs], threshold [groups * b]."""
    masks, gradient = torch.zeros_like(p, dtype=torch.bool), torch.zeros_like(threshold).view(groups, -1)
    for i in group.unique().tolist():
        own = group == i
        masks[own], m = batchwise_mask(p[own], k)
        gradient[i] = threshold_gradient(p[own], threshold.view(groups, -1)[i], m) / int(own.sum())
    return masks, gradient.flatten()


def two_level(parent, child, row, group):
    """eq 12: return the Gate [rows, a * b] with weights Gp_i * G_ij; `empty` if the mask of either level was empty."""
    (rows, groups), b = parent.mask.shape, child.mask.shape[1]
    weights = parent.weights.new_zeros(rows, groups, b).index_put(
        (row, group), parent.weights[row, group][:, None] * child.weights)
    mask = parent.mask.new_zeros(rows, groups, b).index_put((row, group), child.mask)
    empty = parent.empty.index_put((row,), child.empty, accumulate=True)
    return Gate(weights.view(rows, -1), mask.view(rows, -1), empty)


# ---- Losses ----------------------------------------------------------------------------------------------------------

def cv_squared(values):
    """Return the squared coefficient of variation of eq 7 and 11: variance / mean^2 of values [n]."""
    return values.var(correction=0) / (values.mean() ** 2 + 1e-10)


def importance(weights):
    """eq 6, and eq 13 for two-level weights: return the sum of each expert's weights. weights [rows, n] -> [n]."""
    return weights.sum(0)


def importance_loss(importances):
    """eq 7 with w_importance = 1: return CV(Importance)^2. importances [n] from eq 6 or 13."""
    return cv_squared(importances)


def load(chance):
    """eq 10: return the smooth estimate of the number of rows per expert. chance [rows, n] -> [n]."""
    return chance.sum(0)


def load_inside(chance, group, groups):
    """Apply eq 10 in each group i over its rows X(i); return [groups, b]. chance [pairs, b], group [pairs]."""
    return chance.new_zeros(groups, chance.shape[1]).index_add(0, group, chance)


def load_two_level(primary, inside, size):
    """eq 14: return Load_primary,i * Load_i(X(i))_j / |X(i)|. primary [a], inside [a, b], size [a] -> [a * b]."""
    return ((primary / size.clamp(min=1))[:, None] * inside).flatten()


def load_loss(loads):
    """eq 11 with w_load = 1: return CV(Load)^2. loads [n] from eq 10 or 14."""
    return cv_squared(loads)


def threshold_loss(p, threshold, mask):
    """Return the loss of eq 20, minimal if the thresholds yield the batchwise mask. p, mask [rows, n], threshold [n].
    Masks are treated as constants, so the gradient with respect to T_i is m - #{p_i > T_i}: see threshold_gradient."""
    difference = threshold_mask(p, threshold).to(p.dtype) - mask.to(p.dtype)
    return (difference.detach() * (p - threshold)).sum()


def threshold_gradient(p, threshold, m):
    """Return the gradient of eq 20 with respect to the thresholds [n]; m: rows per expert."""
    return m - threshold_mask(p, threshold).sum(0)


def mean_activation_loss(p, target):
    """Bengio, L_b: keep units' mean activations near the target. p [rows, n] -> sum_j | mean_i p_ij - target |."""
    return (p.mean(0) - target).abs().sum()


def example_activation_loss(p, target):
    """Bengio, L_e: keep examples' mean activations near the target. p [rows, n] -> mean_i | mean_j p_ij - target |."""
    return (p.mean(1) - target).abs().mean()


def variance_loss(p):
    """Bengio, L_v: reward activations that vary between examples. p [rows, n] -> - sum_j var_i p_ij."""
    return -p.var(0, correction=0).sum()


class RunningTotals:
    """The balancing constraint of Deep MoE, section 3: while an expert's running total of assignments exceeds the mean
    by more than a margin, its gate is zero and the other experts take its share. Fine-tuning omits the constraint. Here
    a step is a batch: totals are the constrained gates of previous batches plus the unconstrained gates of this one."""

    def __init__(self, n, margin, device="cpu"):
        self.total, self.margin = torch.zeros(n, dtype=torch.float64, device=device), margin

    def __call__(self, gate):
        """Return a dense Gate with the constraint applied."""
        total = self.total + importance(gate.weights.detach())
        mask = gate.mask & (total - total.mean() <= self.margin)
        constrained = masked(gate.weights, mask)
        self.total += importance(constrained.weights.detach())
        return constrained


# ---- Configs ---------------------------------------------------------------------------------------------------------

GATES = {"balanced": ("batchwise/threshold", "threshold"), "noisy": ("noisy top-k", "topk"),
         "dense": ("softmax", "softmax"),
         "sigmoid": ("sigmoid", "sigmoid")}  # names in the config of a checkpoint, and in a model file
WRITTEN = "empty", "activation", "output", "residual"  # always written to configs


def allowed(kind, /, **settings):
    """Check the settings of a layer against the limits of model files; exit with a message if one is invalid."""
    keys = {row.field: row.key for row in moefile.LAYERS[kind]}
    e = moefile.Entries({keys[field]: value for field, value in settings.items()})
    try:
        moefile.describe_mixture(e) if kind == "moe" else moefile.read_layer(e, kind)
    except moefile.FormatError as error:
        raise SystemExit(f"invalid {kind} layer: {error}") from None
    return settings


def lstm_config(type, **settings):
    """Return the settings of an LSTM layer for the config of a checkpoint."""
    return {"type": type, **allowed("lstm", **settings)}


def mixture_config(gate, **settings):
    """Return the settings of a mixture for the config of a checkpoint; missing settings get the defaults."""
    said, meant = GATES[gate]
    rows = {row.field: row for row in moefile.LAYERS["moe"]}
    defaults = {field: (bool if rows[field].kind == "flag" else str)(rows[field].default) for field in WRITTEN}
    return {"type": "moe", **defaults, **allowed("moe", gate=meant, **settings), "gate": said}


# ---- Statistics ------------------------------------------------------------------------------------------------------

def cv(values):
    """Return the coefficient of variation of values [n], as in Shazeer's Table 6."""
    return float(values.float().std(correction=0) / values.float().mean())


def statistics(importances, loads):
    """Return the balance of sums [n] as in Shazeer's Table 6: CV(Importance), CV(Load), max / mean Load."""
    return {"cv_importance": cv(importances), "cv_load": cv(loads),
            "max_load": float(loads.max() / loads.float().mean())}
