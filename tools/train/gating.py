"""Gates of mixtures of experts and what keeps them balanced, for training: PyTorch, differentiable, shared by the
trainers.

Shapes are written [rows, n]: a row is a token (or an example), n the experts of one level of gates. Equations "eq N"
and "App. X" are those of Shazeer et al. 2017 (arXiv 1701.06538), "Bengio" is Bengio et al. 2015 (arXiv 1511.06297),
"Deep MoE" is Eigen et al. 2013 (arXiv 1312.4314). reference.py computes the same for inference, one plain function per
equation, and tests/train/test_gating.py compares the two.

A gate gives a Gate. With two levels (App. B: a groups of b experts, expert i * b + j is E_ij) the parent's gate decides
the pairs (row, group), a child's gate is computed for every pair [pairs, b], and `two_level` puts them together:

    parent = noisy_topk(...)                     # [rows, a]
    row, group = pairs(parent)                   # sorted by group
    child = noisy_topk(..., of row and group)    # [pairs, b]
    gate = two_level(parent, child, row, group)  # [rows, a * b]
"""
import math
import typing

import torch
import torch.nn.functional as F

import common  # first: it finds tools/convert's modules
import moefile


class Gate(typing.NamedTuple):
    weights: torch.Tensor  # [rows, n] G(x), zero where not selected
    mask: torch.Tensor     # [rows, n] booleans: the selected experts
    empty: torch.Tensor    # [rows] booleans: the mask selected nobody, and the policy for that stepped in


# ---- Gates -----------------------------------------------------------------------------------------------------------

def mlp_features(x, weight, bias=None):
    """What an MLP gate's last layer reads (Deep MoE, section 3): relu(W x + b). x [rows, d], weight [units, d] ->
    [rows, units]."""
    return F.linear(x, weight, bias).relu()


def dense(logits):
    """eq 2: every expert, weighted by the softmax. logits [rows, n]."""
    weights = logits.softmax(1)
    return Gate(weights, torch.ones_like(weights, dtype=torch.bool), torch.zeros_like(weights[:, 0], dtype=torch.bool))


def sigmoid(logits):
    """Bengio: every expert, weighted by its sigmoid, the mean of the paper's Bernoulli units. logits [rows, n]."""
    return dense(logits)._replace(weights=logits.sigmoid())


def topk_mask(values, k):
    """eq 5 and 17: the k largest of each row. values [rows, n] -> booleans [rows, n]."""
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, values.topk(k, sorted=False).indices, True)


def topk(logits, k):
    """eq 3 without noise, as at inference: softmax over the k largest logits [rows, n]."""
    mask = topk_mask(logits.detach(), k)
    return Gate(logits.masked_fill(~mask, -math.inf).softmax(1), mask, torch.zeros_like(mask[:, 0]))


def noisy_topk(clean, deviation, k, normal):
    """eq 3 to 5 and App. A: (Gate, chance) of clean logits x W_g [rows, n], deviation softplus(x W_noise) [rows, n] and
    standard normal numbers [rows, n]. chance [rows, n] is P(x, i) of eq 8 and 9, the probability that expert i is
    selected given new noise on i alone; it has the gradient that the choice has not."""
    noisy = clean + normal * deviation
    n = noisy.shape[1]
    top = noisy.topk(min(k + 1, n))
    mask = torch.zeros_like(clean, dtype=torch.bool).scatter_(1, top.indices[:, :k], True)
    gate = Gate(noisy.masked_fill(~mask, -math.inf).softmax(1), mask, torch.zeros_like(mask[:, 0]))
    if k == n:
        return gate, torch.ones_like(clean)
    return gate, torch.special.ndtr((clean - kth_excluding(top.values, mask, k)) / deviation)


def kth_excluding(top, mask, k):
    """App. A: kth_excluding(H(x), k, i), the k-th largest of the other elements. top [rows, k + 1]: the largest ones,
    falling; mask [rows, n]: which are the k largest -> [rows, n]."""
    return torch.where(mask, top[:, k:], top[:, k - 1:k])


def batchwise_mask(p, k):
    """eq 18: (mask, m), the m = k |X| / n largest of every column (at least one). p [rows, n]."""
    m = max(1, k * len(p) // p.shape[1])
    return topk_mask(p.detach().t(), m).t().contiguous(), m


def threshold_mask(p, threshold):
    """eq 19: p [rows, n] over the thresholds [n], or [rows, n]."""
    return p > threshold


def masked(p, mask, policy="top1"):
    """eq 16: the Gate of softmax values p [rows, n] restricted to a mask. Rows whose mask is empty get the best expert
    alone ("top1") or nobody ("zero")."""
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
    """(row, group) of all pairs that a parent's Gate selects, sorted by group: the rows X(i) of every group i."""
    group, row = parent.mask.t().nonzero(as_tuple=True)
    return row, group


def of_pairs(values, row, group, groups):
    """Of values [rows, groups * b] what belongs to the pairs: [pairs, b]."""
    return values.view(len(values), groups, -1)[row, group]


def batchwise_groups(p, threshold, group, groups, k):
    """eq 18 inside each group over its own rows X(i), and the gradient of eq 20 with respect to the thresholds, divided
    by |X(i)|: (mask [pairs, b], gradient [groups * b]). p [pairs, b], group [pairs], threshold [groups * b]."""
    masks, gradient = torch.zeros_like(p, dtype=torch.bool), torch.zeros_like(threshold).view(groups, -1)
    for i in group.unique().tolist():
        own = group == i
        masks[own], m = batchwise_mask(p[own], k)
        gradient[i] = threshold_gradient(p[own], threshold.view(groups, -1)[i], m) / int(own.sum())
    return masks, gradient.flatten()


def two_level(parent, child, row, group):
    """eq 12: the Gate [rows, a * b] whose weights are Gp_i * G_ij; empty: nobody was selected by the choice of either
    level."""
    (rows, groups), b = parent.mask.shape, child.mask.shape[1]
    weights = parent.weights.new_zeros(rows, groups, b).index_put(
        (row, group), parent.weights[row, group][:, None] * child.weights)
    mask = parent.mask.new_zeros(rows, groups, b).index_put((row, group), child.mask)
    empty = parent.empty.index_put((row,), child.empty, accumulate=True)
    return Gate(weights.view(rows, -1), mask.view(rows, -1), empty)


# ---- Losses ----------------------------------------------------------------------------------------------------------

def cv_squared(values):
    """The squared coefficient of variation of eq 7 and 11: variance / mean^2 of values [n]."""
    return values.var(correction=0) / (values.mean() ** 2 + 1e-10)


def importance(weights):
    """eq 6, and eq 13 for the weights of two levels: the sum of every expert's gate. weights [rows, n] -> [n]."""
    return weights.sum(0)


def importance_loss(importances):
    """eq 7 with w_importance 1: CV(Importance)^2. importances [n], of eq 6 or 13."""
    return cv_squared(importances)


def load(chance):
    """eq 10: the smooth estimate of how many rows every expert gets. chance [rows, n] -> [n]."""
    return chance.sum(0)


def load_inside(chance, group, groups):
    """eq 10 in each group i over its own rows X(i): [groups, b]. chance [pairs, b], group [pairs]."""
    return chance.new_zeros(groups, chance.shape[1]).index_add(0, group, chance)


def load_two_level(primary, inside, size):
    """eq 14: Load_H,ij = Load_primary,i * Load_i(X(i))_j / |X(i)|. primary [a], inside [a, b], size [a]: |X(i)| -> [a *
    b]."""
    return ((primary / size.clamp(min=1))[:, None] * inside).flatten()


def load_loss(loads):
    """eq 11 with w_load 1: CV(Load)^2. loads [n], of eq 10 or 14."""
    return cv_squared(loads)


def threshold_loss(p, threshold, mask):
    """eq 20, smallest where the thresholds' mask is the batchwise one (mask). p, mask [rows, n], threshold [n].

    The masks are constants to it, so its gradient with respect to T_i is m - #{p_i > T_i}: see threshold_gradient."""
    difference = threshold_mask(p, threshold).to(p.dtype) - mask.to(p.dtype)
    return (difference.detach() * (p - threshold)).sum()


def threshold_gradient(p, threshold, m):
    """The gradient of eq 20 with respect to the thresholds [n]; m: rows per expert."""
    return m - threshold_mask(p, threshold).sum(0)


def mean_activation_loss(p, target):
    """Bengio, L_b: every unit's mean activation near the target. p [rows, n] -> sum_j | mean_i p_ij - target |."""
    return (p.mean(0) - target).abs().sum()


def example_activation_loss(p, target):
    """Bengio, L_e: every example's mean activation near the target. p [rows, n] -> mean_i | mean_j p_ij - target |."""
    return (p.mean(1) - target).abs().mean()


def variance_loss(p):
    """Bengio, L_v: activations that vary, not all the same. p [rows, n] -> - sum_j var_i p_ij."""
    return -p.var(0, correction=0).sum()


class RunningTotals:
    """The balancing constraint of Deep MoE, section 3: while an expert's total of assignments exceeds the mean by more
    than a margin, its gate is zero and the others share its part. In a second phase of training, fine-tuning, it is
    left out.

    The totals are of the gates so constrained, up to the batch before, and of the batch at hand as its gate would have
    it: a batch is one step."""

    def __init__(self, n, margin, device="cpu"):
        self.total, self.margin = torch.zeros(n, dtype=torch.float64, device=device), margin

    def __call__(self, gate):
        """The constrained Gate of a dense one."""
        total = self.total + importance(gate.weights.detach())
        mask = gate.mask & (total - total.mean() <= self.margin)
        constrained = masked(gate.weights, mask)
        self.total += importance(constrained.weights.detach())
        return constrained


# ---- Configs ---------------------------------------------------------------------------------------------------------

GATES = {"balanced": ("batchwise/threshold", "threshold"), "noisy": ("noisy top-k", "topk"),
         "dense": ("softmax", "softmax"),
         "sigmoid": ("sigmoid", "sigmoid")}  # what a gate is called in the config of a checkpoint, and in a model file
WRITTEN = "empty", "activation", "output", "residual"  # what a config says of a mixture even where it is the default


def allowed(kind, /, **settings):
    """The settings of a layer, once they are such as a model file may have; else the program ends and says why."""
    keys = {row.field: row.key for row in moefile.LAYERS[kind]}
    e = moefile.Entries({keys[field]: value for field, value in settings.items()})
    try:
        moefile.describe_mixture(e) if kind == "moe" else moefile.read_layer(e, kind)
    except moefile.FormatError as error:
        raise SystemExit(f"there can be no such {kind} layer: {error}") from None
    return settings


def lstm_config(type, **settings):
    """An LSTM layer for the config of a checkpoint."""
    return {"type": type, **allowed("lstm", **settings)}


def mixture_config(gate, **settings):
    """A mixture for the config of a checkpoint; what is not said is as in a model file that does not say it."""
    said, meant = GATES[gate]
    rows = {row.field: row for row in moefile.LAYERS["moe"]}
    defaults = {field: (bool if rows[field].kind == "flag" else str)(rows[field].default) for field in WRITTEN}
    return {"type": "moe", **defaults, **allowed("moe", gate=meant, **settings), "gate": said}


# ---- Statistics ------------------------------------------------------------------------------------------------------

def cv(values):
    """Coefficient of variation of values [n], as the paper's Table 6 reports it."""
    return float(values.float().std(correction=0) / values.float().mean())


def statistics(importances, loads):
    """Balance as in the paper's Table 6, of sums [n] over many rows: CV(Importance), CV(Load), max / mean Load."""
    return {"cv_importance": cv(importances), "cv_load": cv(loads),
            "max_load": float(loads.max() / loads.float().mean())}
