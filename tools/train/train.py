#!/usr/bin/env python3
"""Train a GNMT-MoE translation model with PyTorch, on the CPU or on one CUDA
device.

    train.py prepare --corpus DIR --cache DIR
        create the vocabulary and the tokenised corpus; train does so if needed
    train.py train --corpus DIR --out DIR ...
        train, or continue from the checkpoint in --out
    train.py finetune -m MODEL.bin --corpus MY -o MINE.bin
        train a model file further on your own text (own.py) for 3 minutes
    train.py check
        compare all hand-written backward passes with autograd
    train.py evaluate --corpus DIR --model FILE ...
        report dev loss, greedy BLEU and gate statistics of a checkpoint
    train.py average FILE=WEIGHT ... -o FILE
        average the checkpoints of several runs of one model
    train.py grow FILE [--hidden N] [--context] [--encoder N] [--decoder N]
        -o FILE
        add hidden units, context inputs or layers without changing the output
    train.py revive --out DIR --cache DIR
        give unused experts half of the work of busy experts (in a stopped run)

The model is the one in "Outrageously Large Neural Networks" (Shazeer et al.
2017, appendix E), sized by a recipe: LSTM layers with projection, a
bidirectional bottom layer, one MoE layer in the encoder and one in the decoder,
and attention (additive or as in appendix G) from the first decoder layer; the
upper layers also read the context, as in GNMT. Embeddings are tied. Gates are
strictly balanced (appendix F: batchwise mask in training, learned thresholds at
inference) or noisy top-k (section 2.1) with importance and load losses. Gates
have one level, or two with --groups (appendix B); see gating.py.

Files in --out
    resume.pt        training state: weights, optimizer, average, position
                     in the data, elapsed time
    model.pt         inference checkpoint ("moe-checkpoint-1", averaged weights)
                     for convert.py
    model-spm.model  the model's SentencePiece vocabulary
    curve.csv        one row per evaluation; report.py plots it
    minutes          overrides --minutes while training runs (optional)
    pid              process id of the running trainer; SIGTERM or SIGINT makes
                     it save and stop, SIGSTOP and SIGCONT pause it

The learning rate depends on the elapsed training time: warm-up, constant, then
linear to zero at the end of --minutes. A step counts as at most 10 s, so that
pauses do not use up the schedule. With --tokens the rate depends on the number
of tokens instead, so that models trained on the same batches are comparable.

Speed on a CPU: sequences are packed without padding; each LSTM layer computes
its input product for all steps at once and only the recurrent product per step;
tokens are sorted by expert, so that each expert needs one dense product; the
rest is fused in train-kernels.c. Every thread has a replica of the model and a
part of the batch. In mixtures the threads exchange rows, and each computes some
of the experts for all rows. Products use torch.mm, except bf16 on CPUs with
AVX-512 BF16 or AMX, where train-kernels.c runs whole layers. CUDA uses plain
torch operations. glibc's malloc takes 6% of the time:
LD_PRELOAD=libtcmalloc_minimal.so.4 (Debian: libtcmalloc-minimal4) saves this
time and halves the memory.
"""
import common  # must be imported first to extend sys.path and report missing modules
import argparse
import copy
import csv
import ctypes
import filecmp
import gc
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier, BrokenBarrierError

import numpy as np
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20000")  # large, because every batch has new matrix shapes
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import data  # noqa: E402
import gating  # noqa: E402
import moefile  # noqa: E402
import own  # noqa: E402
from data import BOS, EOS, PAD, TAG, UNK  # noqa: E402


# ---- Kernels ---------------------------------------------------------------------------------------------------------

class CpuKernels:
    """The fused C kernels, called on dense float32 tensors."""

    def __init__(self):
        source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train-kernels.c")
        with open(source, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()[:16]
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "moe")
        library = os.path.join(folder, f"train-kernels-{digest}.so")
        if not os.path.exists(library):
            os.makedirs(folder, exist_ok=True)
            part = f"{library}.{os.getpid()}"
            subprocess.run(["gcc", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC", source,
                            "-o", part, "-lm"], check=True)
            os.replace(part, library)
        self.c = ctypes.CDLL(library)
        self.c.sum_of_squares.restype = ctypes.c_double
        self.has_products = bool(self.c.has_products())
        if self.has_products:
            self.c.factor_words.restype = ctypes.c_int64

    @staticmethod
    def _args(*values):
        return [ctypes.c_void_p(v.data_ptr()) if isinstance(v, torch.Tensor) else ctypes.c_float(v)
                if isinstance(v, float) else ctypes.c_int64(v) if isinstance(v, int) else v for v in values]

    def cell_forward(self, z, bias, before, c, h, p):
        self.c.cell_forward(*self._args(z, bias, before, c, h, len(z), p, h.shape[1]))

    def cell_backward(self, z, before, c, dh, carry, p):
        self.c.cell_backward(*self._args(z, before, c, dh, carry, len(z), p, c.shape[1]))

    def attention_forward(self, q, key, memory, v, place, p, context, product):
        self.c.attention_forward(*self._args(q, key, memory, v, place.column, place.length, place.offset, p, context,
                                             len(q), p.shape[1], key.shape[1], memory.shape[1], context.stride(0),
                                             int(product)))

    def attention_backward(self, dcontext, q, key, memory, v, place, p, dq, dkey, dmemory, dv, product):
        self.c.attention_backward(*self._args(dcontext, q, key, memory, v, place.column, place.length, place.offset, p,
                                              dq, dkey, dmemory, dv, len(q), p.shape[1], key.shape[1],
                                              memory.shape[1], dcontext.stride(0), int(product)))

    def cross_entropy(self, logits, target, loss, smoothing, scale):
        self.c.cross_entropy(*self._args(logits, target, loss, *logits.shape, float(smoothing), float(scale)))

    def dropout_add(self, x, u, seed, rate):
        y = torch.empty_like(u)
        self.c.dropout_add(*self._args(ctypes.c_void_p(0) if x is None else x, u, y, u.numel(), ctypes.c_uint32(seed),
                                       ctypes.c_uint32(int(rate * 2**32)), 1.0 / (1.0 - rate)))
        return y

    # Matrix products in bfloat16 and the layers that use them; both require has_products.

    @staticmethod
    def _strided(x):
        """Return x, or a copy of x, with strides that the kernels support: one is 1 and none is 0."""
        return x if 1 in x.stride() and 0 not in x.stride() else x.contiguous()

    def factor(self, x, right):
        """Pack x as the left or right factor of products."""
        x = self._strided(x)
        row, column, rows, K = (*x.stride()[::-1], *x.shape[::-1]) if right else (*x.stride(), *x.shape)
        words = torch.empty(self.c.factor_words(*self._args(rows, K)) + 16, dtype=torch.int32)
        words = words[-words.data_ptr() // 4 % 16:]  # align to 64 bytes
        self.c.factor(*self._args(words, x, row, column, rows, K, int(right)))
        return Factor(words, x.shape)

    def product(self, a, b, out, add):
        K = a.shape[1]
        (a, *a_strides), (b, *b_strides) = ((x.words, 0, 0) if isinstance(x, Factor) else (x, *x.stride())
                                            for x in (y if isinstance(y, Factor) else self._strided(y) for y in (a, b)))
        self.c.product(*self._args(a, b, out, *a_strides, *b_strides, out.stride(0), *out.shape, K, int(add)))
        return out

    def symmetric(self, a, b):
        """Return a^T b, which must be symmetric, in float32."""
        c = torch.empty(a.shape[1], a.shape[1])
        self.c.symmetric(*self._args(a, b, c, a.shape[1], len(a)))
        return c

    def lstm_forward(self, z, bias, w_r, w_proj, c, h, y, steps):
        self.c.lstm_forward(*self._args(z, bias, w_r, w_proj, c, h, y, steps, len(steps), c.shape[1], y.shape[1]))

    def lstm_backward(self, z, w_r, w_proj, c, dy, steps):
        self.c.lstm_backward(*self._args(z, w_r, w_proj, c, dy, steps, len(steps), c.shape[1], dy.shape[1]))

    def attentive_forward(self, z, bias, w, w_proj, w_query, c, h, y, s, q, context, key, memory, v, place, p, steps,
                          product):
        self.c.attentive_forward(*self._args(z, bias, w, w_proj, w_query, c, h, y, s, q, context, key, memory, v,
                                             place.column, place.length, place.offset, p, steps, len(steps), c.shape[1],
                                             y.shape[1], memory.shape[1], key.shape[1], p.shape[1], int(product)))

    def attentive_backward(self, z, w, w_proj, w_query, c, dy, dcontext, dfirst, q, dq, key, dkey, memory, dmemory, v,
                           dv, place, p, steps, product):
        self.c.attentive_backward(*self._args(z, w, w_proj, w_query, c, dy, dcontext, dfirst, q, dq, key, dkey, memory,
                                              dmemory, v, dv, place.column, place.length, place.offset, p, steps,
                                              len(steps), c.shape[1], dy.shape[1], memory.shape[1], key.shape[1],
                                              p.shape[1], int(product)))

    def experts_forward(self, taken, w_up, w_down, u, v, counts):
        self.c.experts_forward(*self._args(taken, w_up, w_down, u, v, counts, *w_up.shape))

    def experts_backward(self, taken, w_up, w_down, u, dv, dtaken, dw_up, dw_down, counts):
        self.c.experts_backward(*self._args(taken, w_up, w_down, u, dv, dtaken, dw_up, dw_down, counts, *w_up.shape))

    def gather(self, x, index, factor):
        y = torch.empty(len(index), x.shape[1])
        self.c.gather(*self._args(x, index, y, len(index), x.shape[1], float(factor)))
        return y

    def scatter_add(self, x, index, weight, y, factor=1.0):
        self.c.scatter_add(*self._args(x, index, ctypes.c_void_p(0) if weight is None else weight, y, len(index),
                                       x.shape[1], float(factor)))

    def scatter_backward(self, dy, x, index, weight):
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        self.c.scatter_backward(*self._args(dy, x, index, weight, dx, dweight, len(index), x.shape[1]))
        return dx, dweight

    def relu_backward(self, y, dx):
        self.c.relu_backward(*self._args(y, dx, y.numel()))

    def norm(self, x):
        return math.sqrt(self.c.sum_of_squares(*self._args(x, x.numel())))

    def adam(self, w, g, m, v, rate, b1, b2, eps, c1, c2, clip):
        self.c.adam(*self._args(w, g, m, v, w.numel(), rate, b1, b2, eps, c1, c2, clip))

    def collect(self, g, other):
        self.c.collect(*self._args(g, other, g.numel()))

    def average(self, average, w, rate):
        self.c.average(*self._args(average, w, w.numel(), rate))


class TorchKernels:
    """The operations of CpuKernels in plain torch, for CUDA and as a reference for `check`."""

    has_products = False

    def cell_forward(self, z, bias, before, c, h, p):
        i, f, g, o = (z + bias).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        torch.mul(i, g, out=c)
        c[:p] += f[:p] * before[:p]
        torch.mul(o, c.tanh(), out=h)
        torch.cat((i, f, g, o), 1, out=z)

    def cell_backward(self, z, before, c, dh, carry, p):
        i, f, g, o = z.chunk(4, 1)
        n, t = len(z), c.tanh()
        dc = carry[:n] + dh * o * (1 - t * t)
        df = torch.zeros_like(dc)
        df[:p] = dc[:p] * before[:p]
        carry[:n] = dc * f
        z.copy_(torch.cat((dc * g * i * (1 - i), df * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)), 1))

    @staticmethod
    def _rows(place, n, S):
        position = torch.arange(S, device=place.column.device)
        inside = position[None] < place.length[:n, None]
        return torch.where(inside, place.offset[:S][None] + place.column[:n, None], 0).long(), inside

    def attention_forward(self, q, key, memory, v, place, p, context, product):
        rows, inside = self._rows(place, len(q), p.shape[1])
        q = q[:, None]
        score = (key[rows] * q.tanh() if product else (key[rows] + q).tanh()) @ v
        p.copy_(score.masked_fill(~inside, -math.inf).softmax(1))
        context.copy_((p[:, None] @ memory[rows])[:, 0])

    def attention_backward(self, dcontext, q, key, memory, v, place, p, dq, dkey, dmemory, dv, product):
        rows, inside = self._rows(place, len(q), p.shape[1])
        dp = (memory[rows] @ dcontext[:, :, None])[:, :, 0]
        ds = (p * (dp - (p * dp).sum(1, keepdim=True)))[:, :, None] * inside[:, :, None]
        if product:
            t, k = q[:, None].tanh(), key[rows]
            dq.copy_((ds * v * k * (1 - t * t)).sum(1))
            dv[0] += (ds * k * t).sum((0, 1))
            g = ds * v * t
        else:
            t = (key[rows] + q[:, None]).tanh()
            g = ds * v * (1 - t * t)
            dq.copy_(g.sum(1))
            dv[0] += (ds * t).sum((0, 1))
        dkey.index_add_(0, rows.flatten(), g.flatten(0, 1))
        dmemory.index_add_(0, rows.flatten(), (p[:, :, None] * dcontext[:, None]).flatten(0, 1))

    def cross_entropy(self, logits, target, loss, smoothing, scale):
        log_p = logits.log_softmax(1)
        loss.copy_(-log_p.gather(1, target[:, None])[:, 0])
        logits.copy_((log_p.exp() - smoothing / logits.shape[1]) * scale)
        logits.scatter_add_(1, target[:, None], torch.full_like(loss, -scale * (1 - smoothing))[:, None])

    def dropout_add(self, x, u, seed, rate):
        random = torch.Generator(u.device).manual_seed(seed)
        u = u * (torch.rand(u.shape, generator=random, device=u.device) >= rate) / (1 - rate)
        return u if x is None else x + u

    def gather(self, x, index, factor):
        return x[index] * factor

    def scatter_add(self, x, index, weight, y, factor=1.0):
        y.index_add_(0, index, x if weight is None else x * weight[:, None], alpha=factor)

    def scatter_backward(self, dy, x, index, weight):
        dy = dy[index]
        return dy * weight[:, None], (dy * x).sum(1)

    def relu_backward(self, y, dx):
        dx.mul_(y > 0)

    def norm(self, x):
        return float(x.norm())

    def adam(self, w, g, m, v, rate, b1, b2, eps, c1, c2, clip):
        g.mul_(clip)
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        w.addcdiv_(m, v.sqrt().div_(math.sqrt(c2)).add_(eps), value=-rate / c1)
        g.zero_()

    def collect(self, g, other):
        g += other
        other.zero_()

    def average(self, average, w, rate):
        average.lerp_(w, rate)


kernels = TorchKernels()
half = False  # products in bfloat16
fused = False  # whole layers run in the C kernels


def use(kind, precision):
    global kernels, half, fused
    kernels = kind()
    half = precision == "bf16"
    fused = half and kernels.has_products


class Factor:
    """A packed factor for the C kernels."""

    def __init__(self, words, shape):
        self.words, self.shape = words, shape


def left(a):
    """Prepare a left factor for many products."""
    return kernels.factor(a, False) if fused else a.bfloat16() if half else a


def right(b):
    """Prepare a right factor for many products."""
    return kernels.factor(b, True) if fused else b.bfloat16() if half else b


def mm(a, b, out=None):
    """Return a @ b, computed in the product precision, as float32."""
    if fused:
        return kernels.product(a, b, torch.empty(a.shape[0], b.shape[1]) if out is None else out, False)
    if half:
        product = (a.bfloat16() @ b.bfloat16()).float()
        return product if out is None else out.copy_(product)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


def mm_add(a, b, out):
    """Add a @ b to out."""
    if fused:
        return kernels.product(a, b, out, True)
    return out.add_(mm(a, b)) if half else out.addmm_(a, b)


# ---- Packed sequences ------------------------------------------------------------------------------------------------

class Packed:
    """The layout of packed sequences: step t has rows offset[t] .. offset[t] + count[t], one per remaining sentence."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths)  # descending
        self.count = [int(x) for x in (self.lengths[:, None] > np.arange(self.lengths[0])).sum(0)]
        self.offset = [0, *np.cumsum(self.count)[:-1].tolist()]
        self.rows = int(self.lengths.sum())

    def steps(self, reverse=False):
        """Return for each step (first row, rows, first row of the previous step, rows continued from that step)."""
        order = range(len(self.count))[::-1] if reverse else range(len(self.count))
        last, result = None, []
        for t in order:
            n = self.count[t]
            result.append((self.offset[t], n, 0 if last is None else self.offset[last],
                           0 if last is None else min(n, self.count[last])))
            last = t
        return result

    def pack(self, sequences):
        """Pack sequences, given in order of descending length, into one array."""
        flat = np.concatenate(sequences)
        start = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        return flat[np.concatenate([start[:n] + t for t, n in enumerate(self.count)])]


class Place:
    """Map target rows to source sentences: column and length of each, and the first packed row of each source step."""

    def __init__(self, column, source, device):
        self.column = torch.as_tensor(np.asarray(column, np.int32), device=device)
        self.length = torch.as_tensor(source.lengths[column].astype(np.int32), device=device)
        self.offset = torch.as_tensor(np.asarray(source.offset, np.int32), device=device)
        self.positions = len(source.offset)


class Batch:
    """The packed sources and targets of (source ids, target ids) pairs."""

    def __init__(self, pairs, device):
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]))
        self.source = Packed([len(pairs[i][0]) for i in order])
        ids = self.source.pack([pairs[i][0] for i in order]).astype(np.int64)
        self.source_ids = torch.as_tensor(ids, device=device)
        column = np.empty(len(pairs), np.int64)
        column[order] = np.arange(len(pairs))
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][1]))
        self.target = Packed([len(pairs[i][1]) for i in order])
        out = self.target.pack([pairs[i][1] for i in order]).astype(np.int64)
        into = self.target.pack([np.concatenate([[BOS], pairs[i][1][:-1]]) for i in order]).astype(np.int64)
        self.target_in = torch.as_tensor(into, device=device)
        self.target_out = torch.as_tensor(out, device=device)
        self.place = Place(column[order], self.source, device)


# ---- Replicas --------------------------------------------------------------------------------------------------------

class Meeting:
    """A point where the replicas of a model, each in a thread with a part of the batch, exchange values."""

    def __init__(self, members):
        self.members, self.given, self.barrier = members, [None] * members, Barrier(members)

    def exchange(self, number, value):
        """Contribute one replica's value; return the values of all replicas. Every replica must call this."""
        if self.members == 1:
            return [value]
        self.given[number] = value
        self.barrier.wait()  # all replicas have given a value
        given = list(self.given)
        self.barrier.wait()  # all replicas have copied the values
        return given


class Owners:
    """Assign experts to replicas, each of which processes the rows of all replicas (section 3.1). Products are larger,
    and an expert's weights are read and its gradient computed once. counts[e]: this replica's number of rows for e."""

    def __init__(self, meeting, number, counts):
        self.meeting, self.number, n = meeting, number, len(counts)
        self.counts = meeting.exchange(number, counts)
        self.own = slice(n * number // meeting.members, n * (number + 1) // meeting.members)
        self.experts = range(self.own.start, self.own.stop)
        self.taken = [sum(counts[e] for counts in self.counts) for e in self.experts]  # rows for each owned expert

    def gather(self, rows):
        """Collect all replicas' rows for this replica's experts, sorted by expert; `rows`: this replica's rows."""
        if self.meeting.members == 1:
            return rows
        given = self.meeting.exchange(self.number, rows.split(self.counts[self.number]))
        return torch.cat([parts[e] for e in self.experts for parts in given])

    def scatter(self, rows):
        """Undo gather: return all experts' results for this replica's rows. `rows`: results of its own experts."""
        if self.meeting.members == 1:
            return rows
        parts = rows.split([counts[e] for e in self.experts for counts in self.counts])
        given = self.meeting.exchange(self.number, parts)
        return torch.cat([x for parts in given for x in parts[self.number::self.meeting.members]])


# ---- Layers with hand-written backward passes ------------------------------------------------------------------------

# Weight gradients are added to .grad directly, because autograd would take another pass over memory.

class Lstm(torch.autograd.Function):
    """LSTM layer with projection over packed rows."""

    @staticmethod
    def forward(ctx, x, w_x, w_r, bias, w_proj, packed, reverse):
        H, steps = w_proj.shape[1], packed.steps(reverse)
        z = mm(x, w_x.t())
        c, h, y = x.new_empty(len(x), H), x.new_empty(len(x), H), x.new_empty(len(x), len(w_proj))
        if fused:
            kernels.lstm_forward(z, bias, w_r, w_proj, c, h, y, torch.tensor(steps))
        else:
            recurrent, project = right(w_r.t()), right(w_proj.t())
            for at, n, last, p in steps:
                now = slice(at, at + n)
                if p:
                    mm_add(y[last:last + p], recurrent, z[at:at + p])
                kernels.cell_forward(z[now], bias, c[last:last + p], c[now], h[now], p)
                mm(h[now], project, y[now])
        ctx.save_for_backward(x, w_x, w_r, bias, w_proj, z, c, h, y)
        ctx.steps = steps
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w_x, w_r, bias, w_proj, z, c, h, y = ctx.saved_tensors
        dy = dy.clone(memory_format=torch.contiguous_format)
        if fused:
            kernels.lstm_backward(z, w_r, w_proj, c, dy, torch.tensor(ctx.steps))
        else:
            widest = max(n for _, n, _, _ in ctx.steps)
            carry, dh = torch.zeros_like(c[:widest]), torch.empty_like(c[:widest])
            recurrent, project = right(w_r), right(w_proj)
            for at, n, last, p in reversed(ctx.steps):
                now = slice(at, at + n)
                mm(dy[now], project, dh[:n])
                kernels.cell_backward(z[now], c[last:last + p], c[now], dh[:n], carry, p)
                if p:
                    mm_add(z[at:at + p], recurrent, dy[last:last + p])
        before = torch.zeros_like(y)
        for at, _, last, p in ctx.steps:
            before[at:at + p] = y[last:last + p]
        dz = left(z.t())
        mm_add(dz, x, w_x.grad)
        mm_add(dz, before, w_r.grad)
        mm_add(dy.t(), h, w_proj.grad)
        bias.grad += z.sum(0)
        return (mm(z, w_x) if ctx.needs_input_grad[0] else None, *[None] * 6)


class FirstContext(torch.autograd.Function):
    """The context [sentences, d] of every target sentence before the first output: attention with a zero query."""

    @staticmethod
    def forward(ctx, memory, key, v, place, product):
        q = key.new_zeros(len(place.column), len(v))
        context, p = memory.new_empty(len(q), memory.shape[1]), memory.new_empty(len(q), place.positions)
        kernels.attention_forward(q, key, memory, v, place, p, context, product)
        ctx.save_for_backward(memory, key, v, q, p)
        ctx.place, ctx.product = place, product
        return context

    @staticmethod
    def backward(ctx, dcontext):
        memory, key, v, q, p = ctx.saved_tensors
        dkey, dmemory = torch.zeros_like(key), torch.zeros_like(memory)
        dv = v.new_zeros(torch.get_num_threads(), len(v))
        kernels.attention_backward(dcontext.contiguous(), q, key, memory, v, ctx.place, p, torch.empty_like(q), dkey,
                                   dmemory, dv, ctx.product)
        v.grad += dv.sum(0)
        return dmemory, dkey, None, None, None


class AttentiveLstm(torch.autograd.Function):
    """The bottom decoder layer: an LSTM over [embedding, context]. A row's output is the query with which the row's
    context is computed from memory; attention is additive, or as in App. G if `product`. The layer reads the context of
    the previous step, initially `first` [sentences, d]. Returns outputs and contexts of all rows."""

    @staticmethod
    def forward(ctx, x, first, memory, key, w_x, w_r, bias, w_proj, w_query, v, packed, place, product):
        d, m, P, H, steps = x.shape[1], memory.shape[1], len(w_proj), w_proj.shape[1], packed.steps()
        z = mm(x, w_x[:, :d].t())
        w = torch.cat((w_x[:, d:], w_r), 1)
        c, h, y = x.new_empty(len(x), H), x.new_empty(len(x), H), x.new_empty(len(x), P)
        s = x.new_empty(len(x), m + P)  # context and output of the previous step
        s[:len(first), :m], s[:len(first), m:] = first, 0.0
        q, context = x.new_empty(len(x), len(w_query)), x.new_empty(len(x), m)
        p = x.new_empty(len(x), place.positions)
        if fused:
            kernels.attentive_forward(z, bias, w, w_proj, w_query, c, h, y, s, q, context, key, memory, v, place, p,
                                      torch.tensor(steps), product)
        else:
            both, project, ask = right(w.t()), right(w_proj.t()), right(w_query.t())
            for at, n, last, rows in steps:
                now = slice(at, at + n)
                if rows:
                    s[now, :m], s[now, m:] = context[last:last + n], y[last:last + n]
                mm_add(s[now], both, z[now])
                kernels.cell_forward(z[now], bias, c[last:last + rows], c[now], h[now], rows)
                mm(h[now], project, y[now])
                mm(y[now], ask, q[now])
                kernels.attention_forward(q[now], key, memory, v, place, p[now], context[now], product)
        ctx.save_for_backward(x, memory, key, w_x, w_r, bias, w_proj, w_query, v, w, z, c, h, y, s, q, p)
        ctx.steps, ctx.place, ctx.product = steps, place, product
        return y, context

    @staticmethod
    def backward(ctx, dy, dcontext):
        x, memory, key, w_x, w_r, bias, w_proj, w_query, v, w, z, c, h, y, s, q, p = ctx.saved_tensors
        d, m, widest = x.shape[1], memory.shape[1], ctx.steps[0][1]
        dy, dcontext = (g.clone(memory_format=torch.contiguous_format) for g in (dy, dcontext))
        dq, dkey, dmemory = torch.empty_like(q), torch.zeros_like(key), torch.zeros_like(memory)
        dv, dfirst = v.new_zeros(torch.get_num_threads(), len(v)), memory.new_empty(widest, m)
        if fused:
            kernels.attentive_backward(z, w, w_proj, w_query, c, dy, dcontext, dfirst, q, dq, key, dkey, memory,
                                       dmemory, v, dv, ctx.place, p, torch.tensor(ctx.steps), ctx.product)
        else:
            carry, dh = torch.zeros_like(c[:widest]), torch.empty_like(c[:widest])
            ds = torch.empty_like(s[:widest])
            both, project, ask = right(w), right(w_proj), right(w_query)
            for at, n, last, rows in reversed(ctx.steps):
                now = slice(at, at + n)
                kernels.attention_backward(dcontext[now], q[now], key, memory, v, ctx.place, p[now], dq[now], dkey,
                                           dmemory, dv, ctx.product)
                mm_add(dq[now], ask, dy[now])
                mm(dy[now], project, dh[:n])
                kernels.cell_backward(z[now], c[last:last + rows], c[now], dh[:n], carry, rows)
                mm(z[now], both, ds[:n])
                if rows:
                    dcontext[last:last + n] += ds[:n, :m]
                    dy[last:last + n] += ds[:n, m:]
            dfirst.copy_(ds[:, :m])
        dz = left(z.t())
        mm_add(dz, x, w_x.grad[:, :d])
        mm_add(dz, s[:, :m], w_x.grad[:, d:])
        mm_add(dz, s[:, m:], w_r.grad)
        mm_add(dy.t(), h, w_proj.grad)
        mm_add(dq.t(), y, w_query.grad)
        bias.grad += z.sum(0)
        v.grad += dv.sum(0)
        return (mm(z, w_x[:, :d]), dfirst, dmemory, dkey, *[None] * 9)


class Experts(torch.autograd.Function):
    """Sum of weight * w_down(relu(w_up(x[row]))) over (row, expert) pairs sorted by expert; expert e has counts[e]."""

    @staticmethod
    def forward(ctx, x, weight, row, counts, w_up, w_down, meeting, number):
        owners = Owners(meeting, number, counts)
        own = owners.own
        taken = owners.gather(kernels.gather(x, row, 1.0))
        u, v, at = x.new_empty(len(taken), w_up.shape[2]), torch.empty_like(taken), 0
        if fused:
            kernels.experts_forward(taken, w_up[own], w_down[own], u, v, torch.tensor(owners.taken))
        else:
            for e, n in zip(owners.experts, owners.taken):
                now, at = slice(at, at + n), at + n
                mm(taken[now], w_up[e], u[now]).relu_()
                mm(u[now], w_down[e], v[now])
        v = owners.scatter(v)
        y = torch.zeros_like(x)
        kernels.scatter_add(v, row, weight, y)
        ctx.save_for_backward(taken, weight, row, w_up, w_down, u, v)
        ctx.owners, ctx.rows = owners, len(x)
        return y

    @staticmethod
    def backward(ctx, dy):
        taken, weight, row, w_up, w_down, u, v = ctx.saved_tensors
        owners, own = ctx.owners, ctx.owners.own
        dv, dweight = kernels.scatter_backward(dy.contiguous(), v, row, weight)
        dv, dtaken, at = owners.gather(dv), torch.empty_like(taken), 0
        if fused:
            kernels.experts_backward(taken, w_up[own], w_down[own], u, dv, dtaken, w_up.grad[own], w_down.grad[own],
                                     torch.tensor(owners.taken))
        else:
            for e, n in zip(owners.experts, owners.taken):
                now, at = slice(at, at + n), at + n
                du = mm(dv[now], w_down[e].t())
                kernels.relu_backward(u[now], du)
                mm_add(u[now].t(), dv[now], w_down.grad[e])
                mm_add(taken[now].t(), du, w_up.grad[e])
                mm(du, w_up[e].t(), dtaken[now])
        dtaken = owners.scatter(dtaken)
        dx = taken.new_zeros(ctx.rows, taken.shape[1])
        kernels.scatter_add(dtaken, row, None, dx)
        return dx, dweight, *[None] * 6


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of x @ weight^T without label smoothing, but with the gradient of the smoothed loss. The
    forward pass computes gradients in chunks of rows, so that no [rows, vocabulary] matrix is stored as a whole."""

    @staticmethod
    def forward(ctx, x, weight, target, smoothing):
        n, chunk = len(x), 512 if x.device.type == "cpu" else 8192
        scale = 1.0 / n
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        loss, into, back = x.new_empty(n), right(weight.t()), right(weight)
        for at in range(0, n, chunk):
            now = slice(at, at + chunk)
            logits = mm(x[now], into)
            kernels.cross_entropy(logits, target[now], loss[now], smoothing, scale)
            mm(logits, back, dx[now])
            mm_add(logits.t(), x[now], dweight)
        ctx.save_for_backward(dx, dweight, weight)
        return loss.mean()

    @staticmethod
    def backward(ctx, d):
        dx, dweight, weight = ctx.saved_tensors
        weight.grad.add_(dweight, alpha=float(d))
        return dx * d, None, None, None


class Embed(torch.autograd.Function):
    """Embedding: factor * weight[ids]"""

    @staticmethod
    def forward(ctx, weight, ids, factor):
        ctx.save_for_backward(weight, ids)
        ctx.factor = factor
        return kernels.gather(weight, ids, factor)

    @staticmethod
    def backward(ctx, dy):
        weight, ids = ctx.saved_tensors
        kernels.scatter_add(dy.contiguous(), ids, None, weight.grad, ctx.factor)
        return None, None, None


class DropoutAdd(torch.autograd.Function):
    """x + dropout(u); x may be None."""

    @staticmethod
    def forward(ctx, x, u, seed, rate):
        ctx.seed, ctx.rate, ctx.both = seed, rate, x is not None
        return kernels.dropout_add(x, u.contiguous(), seed, rate)

    @staticmethod
    def backward(ctx, dy):
        return dy if ctx.both else None, kernels.dropout_add(None, dy.contiguous(), ctx.seed, ctx.rate), None, None


# ---- Model -----------------------------------------------------------------------------------------------------------

# name: (vocabulary, width, LSTM cells per layer, experts, experts per token, hidden units per expert)
RECIPES = {"cpu": (8000, 256, 512, 32, 2, 512), "gpu": (16000, 512, 1024, 32, 4, 1024),
           "mixture": (8000, 128, 128, 32, 4, 1024)}


def make_config(recipe, vocabulary, gate, k=None, groups=0, attention="additive"):
    """Return the config of a recipe, which describes the model and is stored in the checkpoint."""
    _, d, H, experts, default_k, units = RECIPES[recipe]
    k = (2 if groups else default_k) if k is None else k
    if gate == "dense" and groups:
        raise SystemExit("--gate dense has a single expert: --groups is not supported")
    if gate == "dense":  # one expert as wide as k of them (the paper's MoE-1-Wide)
        moe = gating.mixture_config(gate, experts=1, k=1, hidden=k * units)
    else:
        moe = gating.mixture_config(gate, experts=experts, k=k, hidden=units, **({"groups": groups} if groups else {}))
    lstm = gating.lstm_config("lstmp", hidden=H, proj=d, residual=True)
    gating.allowed("gnmt-attention", kind=attention, size=d, query="state")
    return {"arch": "gnmt-moe", "vocab_size": vocabulary, "d_model": d, "embed_scale": float(math.isqrt(d)),
            "shared_embedding": True, "pad": PAD, "unk": UNK, "bos": BOS, "eos": EOS, "languages": dict(TAG),
            "never_generated": [PAD, UNK, BOS, *TAG.values()],
            "encoder": [gating.lstm_config("bi-lstmp", hidden=H // 2, proj=d // 2, residual=True), lstm, moe, lstm],
            "decoder": [{**lstm, "context": "previous"}, moe, {**lstm, "context": "current"}],
            "attention": {"type": attention, "size": d, "query": "state"}, "gate_order": "i f g o"}


def context_of(layer):
    """Return the context that a layer reads in addition to its input. Old configs store it as "input"."""
    return "previous" if layer.get("input") == "embedding, context" else layer.get("context", "none")


def reads_context(layer):
    return context_of(layer) != "none"


def weight_shapes(config):
    """Return name -> (shape, initial standard deviation), in the order of the checkpoint."""
    d, shapes = config["d_model"], {}

    def lstm(name, inputs, hidden, proj):
        shapes[name + ".w_x"] = (4 * hidden, inputs), inputs ** -0.5
        shapes[name + ".w_r"] = (4 * hidden, proj), proj ** -0.5
        shapes[name + ".bias"] = (4 * hidden,), 0.0
        shapes[name + ".w_proj"] = (proj, hidden), hidden ** -0.5

    def moe(name, layer):
        n, h = layer["experts"], layer["hidden"]
        for gate, width in (("parent", layer.get("groups", 0)), ("gate", n)):
            if not width:
                continue
            if layer["gate"] == "noisy top-k":
                shapes[f"{name}.{gate}.weight"] = (d, width), 0.0
                shapes[f"{name}.{gate}.noise"] = (d, width), 0.0
                continue
            # random, since equal columns would send every expert the same tokens
            shapes[f"{name}.{gate}.weight"] = (d, width), 0.5 * d ** -0.5
            if layer["gate"] != "softmax":
                shapes[f"{name}.{gate}.threshold"] = (width,), 0.0
        shapes[name + ".experts.w_up"] = (n, d, h), (2 / d) ** 0.5
        shapes[name + ".experts.w_down"] = (n, h, d), h ** -0.5

    shapes["embedding.weight"] = (config["vocab_size"], d), 0.5 / config["embed_scale"]
    for side in "encoder", "decoder":
        for i, layer in enumerate(config.get(side, [])):  # language models have no encoder or attention
            name, inputs = f"{side}.{i}", 2 * d if reads_context(layer) else d
            if layer["type"] == "moe":
                moe(name, layer)
            elif layer["type"] == "lstmp":
                lstm(name, inputs, layer["hidden"], layer["proj"])
            elif layer["type"] == "bi-lstmp":
                lstm(name + ".fwd", inputs, layer["hidden"], layer["proj"])
                lstm(name + ".bwd", inputs, layer["hidden"], layer["proj"])
            else:
                raise ValueError(f"unknown layer type {layer['type']}")
    if "attention" in config:
        a = config["attention"]["size"]
        shapes["attention.w_key"] = (a, d), d ** -0.5
        shapes["attention.w_query"] = (a, config["decoder"][0]["proj"]), d ** -0.5
        shapes["attention.v"] = (a,), a ** -0.5
    return shapes


def orthogonalised(name, shape):
    """Return True if Muon optimises this weight, a matrix of an LSTM or of attention. Adam optimises the rest."""
    return len(shape) == 2 and not name.startswith("embedding") and not of_gate(name)


def of_gate(name):
    return ".gate." in name or ".parent." in name


ALONE = Meeting(1), 0


class Model:
    """A model whose weights are in one flat tensor: Adam's part, Muon's part, thresholds. `weights`: views by name."""

    w_importance = w_load = 0.01  # weights of the losses of eq 7 and 11, from appendix E

    def __init__(self, config, device="cpu", seed=1, share=None):
        """Create a model. share: model to share weights with, but not gradients (for another thread)."""
        self.config, self.device = config, device
        self.product = config.get("attention", {}).get("type") == "product"
        for i, layer in enumerate(config["decoder"] if "attention" in config else []):
            if context_of(layer) not in (("none", "current") if i else ("previous",)):
                raise SystemExit(f"decoder.{i} reads the context {context_of(layer)!r}: the first layer must read the "
                                 "previous one, upper layers the current one or none")
        shapes = weight_shapes(config)
        names = sorted(shapes, key=lambda x: (x.endswith(".threshold"), orthogonalised(x, shapes[x][0])))  # stable sort
        size = {x: math.prod(shapes[x][0]) for x in names}
        self.flat = share.flat if share else torch.empty(sum(size.values()), device=device)
        self.grad = torch.zeros_like(self.flat)
        self.weights, self.span, at = {}, {}, 0
        random = torch.Generator().manual_seed(seed)
        for name in names:
            shape, deviation = shapes[name]
            self.span[name] = at, at + size[name]
            view = self.flat[at:at + size[name]].view(shape)
            if not share:
                view.copy_(torch.randn(shape, generator=random) * deviation)
                if name.endswith(".bias"):
                    view[shape[0] // 4:shape[0] // 2] = 1.0  # forget gates
                if name.endswith(".threshold"):
                    parent = name.replace(".gate.", ".parent.")
                    inside = shape[0] // shapes[parent][0][0] if parent != name and parent in shapes else shape[0]
                    view.fill_(1.0 / inside)
            weight = view.data
            weight.grad = self.grad[at:at + size[name]].view(shape)
            weight.requires_grad_(not name.endswith(".threshold"))
            self.weights[name] = weight
            at += size[name]
        self.seed = 0
        self.dropout = 0.0
        self.training, self.gate_statistics, self.balance_loss = False, None, None
        self.meeting, self.number = ALONE  # Meeting of the replicas in training, and number of this replica

    def load(self, weights):
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(weights[name])

    # -- layers

    def _drop(self, x, u):
        if not self.training or not self.dropout:
            return u if x is None else x + u
        self.seed = (self.seed + 1) & 0xffffffff
        return DropoutAdd.apply(x, u, self.seed, self.dropout)

    def _lstm(self, name, x, packed, reverse=False):
        w = self.weights
        return Lstm.apply(x, *(w[name + part] for part in (".w_x", ".w_r", ".bias", ".w_proj")), packed, reverse)

    def _all_rows(self, own):
        """Return (the rows of all replicas, this replica's slice of them)."""
        given = self.meeting.exchange(self.number, own.detach())
        before = sum(len(x) for x in given[:self.number])
        return torch.cat(given), slice(before, before + len(own))

    def _total(self, own):
        """Return the sum over all replicas. Other replicas' parts are constants; gradients are summed over replicas."""
        given = self.meeting.exchange(self.number, own.detach())
        return sum(given[:self.number] + given[self.number + 1:], own)

    def _balanced(self, name, x, k, *pairs):
        """Appendix F: return (Gate, softmax) of one level. pairs: row, group, number of groups, for the inner level."""
        p, threshold = x @ self.weights[name + ".weight"], self.weights[name + ".threshold"]
        p = (gating.of_pairs(p, *pairs) if pairs else p).softmax(1)
        with torch.no_grad():
            if self.training:
                rows, own = self._all_rows(p)
                if pairs:
                    mask, gradient = gating.batchwise_groups(rows, threshold, self._all_rows(pairs[1])[0], pairs[2], k)
                else:
                    mask, m = gating.batchwise_mask(rows, k)
                    gradient = gating.threshold_gradient(rows, threshold, m) / len(rows)
                mask = mask[own]
                threshold.grad += gradient / self.meeting.members  # gradient of eq 20, which the loss does not include
            else:
                mask = gating.threshold_mask(p, threshold.view(pairs[2], -1)[pairs[1]] if pairs else threshold)
        return gating.masked(p, mask), p

    def _noisy(self, name, x, k, *pairs):
        """Section 2.1, eq 3-5: return (Gate, probability that each expert is selected) of one level."""
        def logits(part):
            values = x @ self.weights[name + part]
            return gating.of_pairs(values, *pairs) if pairs else values
        clean = logits(".weight")
        if not self.training:
            return gating.topk(clean, k), None
        return gating.noisy_topk(clean, F.softplus(logits(".noise")), k, torch.randn_like(clean))

    def _gate(self, name, layer, x):
        """Return the Gate of a MoE layer with one or two levels (appendix B); in training, add the balance losses."""
        if layer["gate"] == "softmax":
            return gating.dense(x @ self.weights[name + ".gate.weight"])
        noisy, groups, k = layer["gate"] == "noisy top-k", layer.get("groups"), layer["k"]
        level, loss = self._noisy if noisy else self._balanced, 0.0
        if not groups:
            gate, found = level(name + ".gate", x, k)
            shares = gate.weights if noisy else found
            if noisy and self.training:
                loads = self._total(gating.load(found))
        else:
            parent, above = level(name + ".parent", x, k)
            row, group = gating.pairs(parent)
            child, found = level(name + ".gate", x, k, row, group, groups)
            gate = gating.two_level(parent, child, row, group)
            shares = gate.weights
            if not noisy:
                shares = gating.two_level(parent, child._replace(weights=found), row, group).weights
            if noisy and self.training:
                loads = gating.load_two_level(*map(self._total, (
                    gating.load(above), gating.load_inside(found, group, groups), group.bincount(minlength=groups))))
            above = self._importance(name + ".parent", parent, parent.weights if noisy else above)
            if not noisy and self.training:
                loss = self.w_importance * gating.importance_loss(self._total(above))
        # Balanced gates select experts equally often. Their loss balances the softmax before the mask (as in eq 6 and
        # 13): if few experts dominate the softmax, the others receive tokens with low probability.
        importance = self._importance(name + ".gate", gate, shares)
        if self.training:
            loss = loss + self.w_importance * gating.importance_loss(self._total(importance))
            self.balance_loss = self.balance_loss + (loss + self.w_load * gating.load_loss(loads) if noisy else loss)
        return gate

    def _importance(self, name, gate, shares):
        """Return a gate's importances (eq 6); record these and other statistics if requested."""
        importance = gating.importance(shares)
        if self.gate_statistics is not None:
            found = gate.mask.sum(0), gate.empty.sum(), len(shares), importance
            self.gate_statistics.setdefault(name, []).append(found)
        return importance

    def _moe(self, name, layer, x):
        g, mask, _ = self._gate(name, layer, x)
        row, expert = mask.nonzero(as_tuple=True)
        expert, order = expert.sort(stable=True)  # faster than mask.t() with many experts
        row, counts = row[order], expert.bincount(minlength=mask.shape[1]).tolist()
        # Replicas do not exchange rows if there are fewer experts than replicas, as in a dense layer.
        meets = self.training and len(counts) >= self.meeting.members
        y = Experts.apply(x, g[row, expert], row, counts, self.weights[name + ".experts.w_up"],
                          self.weights[name + ".experts.w_down"], *((self.meeting, self.number) if meets else ALONE))
        return y.sigmoid()

    def embed(self, ids):
        return self._drop(None, Embed.apply(self.weights["embedding.weight"], ids, self.config["embed_scale"]))

    def encode(self, x, packed):
        for i, layer in enumerate(self.config["encoder"]):
            name = f"encoder.{i}"
            if layer["type"] == "bi-lstmp":
                y = torch.cat((self._lstm(name + ".fwd", x, packed), self._lstm(name + ".bwd", x, packed, True)), 1)
            else:
                y = self._moe(name, layer, x) if layer["type"] == "moe" else self._lstm(name, x, packed)
            x = self._drop(x, y)
        return x, self.keys(x)

    def keys(self, memory):
        """Return the attention keys of a sentence: memory W^T, or its tanh (App. G)."""
        w = self.weights["attention.w_key"]
        key = F.linear(memory.bfloat16(), w.bfloat16()).float() if half else F.linear(memory, w)
        return key.tanh() if self.product else key

    def first_context(self, memory, key, place):
        """Return the context before the first output: zeros, or the attention with a zero query."""
        if self.config["attention"].get("start") == "zero":
            return memory.new_zeros(len(place.column), memory.shape[1])
        return FirstContext.apply(memory, key, self.weights["attention.v"], place, self.product)

    def decode(self, x, memory, key, packed, place):
        w = self.weights
        for i, layer in enumerate(self.config["decoder"]):
            name = f"decoder.{i}"
            if i == 0:
                y, context = AttentiveLstm.apply(x, self.first_context(memory, key, place), memory, key,
                                                 w[name + ".w_x"], w[name + ".w_r"], w[name + ".bias"],
                                                 w[name + ".w_proj"], w["attention.w_query"], w["attention.v"], packed,
                                                 place, self.product)
            elif layer["type"] == "moe":
                y = self._moe(name, layer, x)
            else:
                y = self._lstm(name, torch.cat((x, context), 1) if reads_context(layer) else x, packed)
            x = self._drop(x, y)
        return x

    def loss(self, batch, smoothing, share=1.0):
        """Return the mean loss per target token in nats; training adds label smoothing and balance losses. `share`:
        this replica's fraction of the batch. The loss and the value of the balance losses (computed over the batch) are
        scaled by `share`; the gradient of the balance losses only covers this replica's part and is not scaled."""
        self.balance_loss = torch.zeros((), device=self.device)
        ids = torch.cat((batch.source_ids, batch.target_in))
        source, target = self.embed(ids).split((batch.source.rows, batch.target.rows))
        memory, key = self.encode(source, batch.source)
        y = self.decode(target, memory, key, batch.target, batch.place)
        loss = CrossEntropy.apply(y, self.weights["embedding.weight"], batch.target_out, smoothing)
        return loss * share + self.balance_loss - (1 - share) * self.balance_loss.detach()

    # -- greedy translation, for evaluation during training

    @torch.no_grad()
    def greedy(self, sources, limit=80):
        """Return greedy translations (lists of ids, without eos) of lists of source ids, all in parallel."""
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        packed = Packed([len(sources[i]) for i in order])
        ids = torch.as_tensor(packed.pack([np.asarray(sources[i]) for i in order]).astype(np.int64), device=self.device)
        memory, key = self.encode(self.embed(ids), packed)
        n, w, decoder = len(sources), self.weights, self.config["decoder"]
        place = Place(np.arange(n), packed, self.device)
        p = torch.empty(n, place.positions, device=self.device)
        never = torch.as_tensor(self.config["never_generated"], device=self.device)
        state = {i: (torch.zeros(n, x["proj"], device=self.device), torch.zeros(n, x["hidden"], device=self.device))
                 for i, x in enumerate(decoder) if x["type"] == "lstmp"}
        context = self.first_context(memory, key, place)
        word, live, result = torch.full((n,), BOS, device=self.device), torch.ones(n, dtype=torch.bool), []
        limits = torch.as_tensor(2 * packed.lengths + 5)
        while live.any() and len(result) < limit:
            x = self.embed(word)
            for i, layer in enumerate(decoder):
                name = f"decoder.{i}"
                if layer["type"] == "moe":
                    x = x + self._moe(name, layer, x)
                    continue
                r, c = state[i]
                inputs = torch.cat((x, context), 1) if reads_context(layer) else x
                z = mm_add(r, w[name + ".w_r"].t(), mm(inputs, w[name + ".w_x"].t()))
                now, h = torch.empty_like(c), torch.empty_like(c)
                kernels.cell_forward(z, w[name + ".bias"], c, now, h, n)
                r = mm(h, w[name + ".w_proj"].t())
                state[i] = r, now
                x = x + r
                if i == 0:
                    query, context = mm(r, w["attention.w_query"].t()), torch.empty_like(context)
                    kernels.attention_forward(query, key, memory, w["attention.v"], place, p, context, self.product)
            logits = mm(x, w["embedding.weight"].t())
            logits[:, never] = -math.inf
            word = logits.argmax(1)
            result.append(word.cpu())
            live &= (result[-1] != EOS) & (len(result) < limits)
        words = torch.stack(result, 1).tolist()
        translations = [None] * n
        for at, i in enumerate(order):
            line = words[at][:int(limits[at])]
            translations[i] = line[:line.index(EOS)] if EOS in line else line
        return translations


# ---- Checkpoints -----------------------------------------------------------------------------------------------------

def write_atomically(value, path):
    torch.save(value, path + ".part")
    os.replace(path + ".part", path)


def inference_checkpoint(config, weights, **more):
    """Return a "moe-checkpoint-1" in bfloat16, with gates, thresholds and attention.v in float32."""
    def stored(name, weight):
        exact = of_gate(name) or name == "attention.v"
        return weight.detach().to("cpu", torch.float32 if exact else torch.bfloat16).clone()
    return {"format": "moe-checkpoint-1", "config": {**config, **more},
            "weights": {name: stored(name, weight) for name, weight in weights.items()}}


def read_inference(path):
    file = torch.load(path, weights_only=True)
    if file.get("format") != "moe-checkpoint-1":
        raise SystemExit(f"{path}: not a moe-checkpoint-1 file")
    return file


def average(files, shares, first=()):
    """Return the weighted mean of inference checkpoints (Wortsman et al. 2022, "Model soups"): the errors of different
    runs average out. Training statistics are maxima over the checkpoints; other metadata must be equal. `first`:
    prefixes of weights to take from the first checkpoint only, e.g. of a mixture with revived experts."""
    about = ("target_tokens_seen", "training_minutes")
    configs = [file["config"] for file in files]
    if any({**x, **dict.fromkeys(about)} != {**configs[0], **dict.fromkeys(about)} for x in configs):
        raise SystemExit("cannot average: the configurations differ")
    if not sum(shares) > 0:
        raise SystemExit("the weights must add up to more than 0")
    weights = {name: weight if name.startswith(tuple(first)) else
               sum(share / sum(shares) * file["weights"][name].float() for file, share in zip(files, shares))
               for name, weight in files[0]["weights"].items()}
    return inference_checkpoint(configs[0], weights, **{x: max(c.get(x, 0) for c in configs) for x in about})


def widen(file, hidden, seed=1):
    """Widen the experts of a checkpoint to `hidden` units without changing the output: new rows of w_down are 0, new
    columns of w_up are random, so that new units learn different functions."""
    generator = torch.Generator().manual_seed(seed)
    config, weights = copy.deepcopy(file["config"]), dict(file["weights"])
    mixtures = [(f"{side}.{i}.experts.", layer) for side in ("encoder", "decoder")
                for i, layer in enumerate(config.get(side, [])) if layer["type"] == "moe"]
    if not mixtures:
        raise SystemExit("the model has no mixtures")
    for name, layer in mixtures:
        up, down = weights[name + "w_up"].float(), weights[name + "w_down"].float()
        n, d, old = up.shape
        if hidden <= old:
            raise SystemExit(f"--hidden must be greater than the current {old} units")
        weights[name + "w_up"] = torch.cat([up, torch.randn(n, d, hidden - old, generator=generator) * up.std()], 2)
        weights[name + "w_down"] = torch.cat([down, torch.zeros(n, hidden - old, down.shape[2])], 1)
        layer["hidden"] = hidden
    return inference_checkpoint(config, weights)


def deepen(file, seed=1, **more):
    """Return a checkpoint with N more LSTM layers on top (`encoder=N`, `decoder=N`): bidirectional ones in the
    encoder (as in RNMT+, Chen et al. 2018), layers like the last one in the decoder. With residual connections and
    w_proj = 0, new layers do not change the output; their other weights are random."""
    config = copy.deepcopy(file["config"])
    for side, count in more.items():
        which, kind, words = {"encoder": (0, "bi-lstmp", "first layer is not a bidirectional"),
                              "decoder": (-1, "lstmp", "last layer is not an")}[side]
        layers = config.get(side, [])
        if count < 0:
            raise SystemExit(f"--{side} {count} is negative: expected a number of layers to add")
        if count and not (layers and layers[which]["type"] == kind and layers[which]["residual"] is True
                          and context_of(layers[which]) != "previous"):
            raise SystemExit(f"the {side}'s {words} LSTM with a residual connection, as required by --{side}")
        layers += [dict(layers[which]) for _ in range(count)]
    weights = {name: torch.zeros_like(weight) if name.endswith(".w_proj") else weight
               for name, weight in Model(config, seed=seed).weights.items()}
    return inference_checkpoint(config, {**weights, **file["weights"]})


def attend(file):
    """Return a checkpoint in which upper LSTM layers of the decoder read the current context (Wu et al. 2016, section
    3; "gnmt_v2" of tensorflow/nmt). In `file` only the first layer reads the context, one step later.
    The output does not change, because the new columns of w_x are 0."""
    config, weights = copy.deepcopy(file["config"]), dict(file["weights"])
    above = [(i, layer) for i, layer in enumerate(config.get("decoder", [])) if i and layer["type"] == "lstmp"]
    if "attention" not in config or not above:
        raise SystemExit("--context requires an LSTM layer above that of the attention")
    for i, layer in above:
        name = f"decoder.{i}.w_x"
        if not reads_context(layer):
            weights[name] = F.pad(weights[name], (0, config["d_model"]))
        config["decoder"][i] = {**layer, "context": "current"}  # several layers of a config may be the same object
    return inference_checkpoint(config, weights)


def load_inference(path, device="cpu"):
    file = read_inference(path)
    model = Model(file["config"], device)
    model.load(file["weights"])
    return model


# ---- Evaluation ------------------------------------------------------------------------------------------------------

@torch.no_grad()
def summed_loss(model, batches):
    """Return (summed loss without label smoothing, number of target tokens) of batches of (source, target) ids."""
    loss, tokens = 0.0, 0
    for pairs in batches:
        batch = Batch(pairs, model.device)
        loss += float(model.loss(batch, 0.0)) * batch.target.rows
        tokens += batch.target.rows
    return loss, tokens


def mix_loss(model, cache, longest=80):
    """Return the inference loss on a fixed sample of the training mix."""
    mixture = data.Mixture(cache, longest, seed=99)
    loss, tokens = summed_loss(model, (mixture.next(2500, longest) for _ in range(16)))
    return round(loss / tokens, 4)


class Evaluation:
    """Measure dev loss, greedy BLEU and gate statistics, with inference thresholds and without label smoothing."""

    SETS = [("tatoeba.en-" + x, *pair) for x in ("de", "fr", "es") for pair in (("en", x), (x, "en"))]
    NEWS = [("wmt_newstest2012", *pair) for pair in (("fr", "en"), ("de", "fr"), ("es", "de"))]

    def __init__(self, corpus, pieces, sentences, news):
        self.pieces, self.sets = pieces, []
        if isinstance(corpus, own.Corpus):
            self.sets = [(name, target, *texts) for name, _, target, *texts in corpus.sets()]
        for name, source, target in [] if self.sets else self.SETS + self.NEWS:
            texts = data.read_dev(corpus, name, source, target, sentences if name.startswith("tatoeba") else news)
            self.sets.append((("news." if name.startswith("wmt") else "") + f"{source}-{target}", target, *texts))
        self.columns = (["minutes", "step", "tokens", "rate", "train_loss", "dev_loss", "news_loss"] +
                        ["bleu." + x[0] for x in self.sets])

    def run(self, replicas, pool):
        """Measure all sets and return a row of curve.csv; the sets are distributed over the replicas."""
        row, sums, gates = {}, {}, {}

        def part(i):
            return [self._one(replicas[i], *entry) for entry in self.sets[i::len(replicas)]]
        for name, kind, loss, tokens, bleu, statistics in sum(pool.map(part, range(len(replicas))), []):
            row["bleu." + name] = bleu
            total, count = sums.get(kind, (0.0, 0))
            sums[kind] = total + loss, count + tokens
            for gate, entries in statistics.items():
                gates.setdefault(gate, []).extend(entries)
        row.update({kind: round(total / count, 4) for kind, (total, count) in sums.items()})
        for name, entries in sorted(gates.items()):
            load = sum(x[0] for x in entries).float()
            rows = sum(x[2] for x in entries)
            row.update({f"{name}.empty": round(float(sum(x[1] for x in entries)) / rows, 4),
                        f"{name}.experts": round(float(load.sum()) / rows, 3),
                        f"{name}.cv_importance": round(gating.cv(sum(x[3] for x in entries)), 3),
                        f"{name}.cv": round(gating.cv(load), 3),
                        f"{name}.max": round(float(load.max() / load.mean()), 2),
                        f"{name}.dead": int((load == 0).sum())})
        return row

    def _one(self, model, name, target, sources, references):
        """Measure one set; return (name, loss column, summed loss, tokens, BLEU, gate statistics)."""
        from sacrebleu.metrics import BLEU
        a = [[TAG[target], *x, EOS] for x in self.pieces.encode(sources)]
        b = [[*x, EOS] for x in self.pieces.encode(references)]
        order = sorted(range(len(a)), key=lambda i: len(b[i]))
        model.training, model.gate_statistics = False, {}
        loss, tokens = summed_loss(model, ([(np.array(a[i]), np.array(b[i])) for i in order[at:at + 100]]
                                           for at in range(0, len(order), 100)))
        # take the statistics before greedy decoding, which continues finished sentences
        statistics, model.gate_statistics = model.gate_statistics, None
        texts = self.pieces.decode(model.greedy(a))
        return (name, "news_loss" if name.startswith("news") else "dev_loss", loss, tokens,
                round(BLEU().corpus_score(texts, [references]).score, 2), statistics)


# ---- Training --------------------------------------------------------------------------------------------------------

class Optimizer:
    """Adam, or Adam with Muon (momentum, orthogonalised by Newton-Schulz) for the matrices of LSTM and attention."""

    def __init__(self, model, kind, betas=(0.9, 0.98)):
        self.model, self.kind, self.betas, self.steps = model, kind, betas, 0
        spans = {name: model.span[name] for name in model.weights if not name.endswith(".threshold")}
        matrices = {name: span for name, span in spans.items() if orthogonalised(name, model.weights[name].shape)}
        first = min((a for a, _ in matrices.values()), default=0)
        last = max(b for _, b in spans.values())
        self.matrices = list(matrices) if kind == "muon" else []
        self.adam_end = first if kind == "muon" else last
        self.end = last
        self.m = torch.zeros_like(model.flat[:last])
        self.v = torch.zeros_like(model.flat[:self.adam_end])

    def step(self, rate, muon_rate, threshold_rate, clip, pool):
        """Apply one update and zero the gradients; return the gradient norm before clipping."""
        self.steps += 1
        b1, b2 = self.betas
        w, g, end = self.model.flat, self.model.grad, self.adam_end
        norm = kernels.norm(g[:self.end])
        scale = min(1.0, clip / (norm + 1e-6))
        kernels.adam(w[:end], g[:end], self.m[:end], self.v, rate, b1, b2, 1e-9, 1 - b1 ** self.steps,
                     1 - b2 ** self.steps, scale)
        for _ in pool.map(lambda name: self._muon(name, muon_rate, scale), self.matrices):
            pass
        w[self.end:] -= threshold_rate * g[self.end:]
        g[self.end:] = 0.0
        return norm

    @torch.no_grad()
    def _muon(self, name, rate, scale, momentum=0.95):
        a, b = self.model.span[name]
        weight, g, m = self.model.weights[name], self.model.grad[a:b], self.m[a:b]
        m.mul_(momentum).add_(g, alpha=scale)
        update = g.mul_(scale).add_(m, alpha=momentum).view_as(weight)
        # orthogonalise the attentive layer's input matrix in two parts: embedding and context
        parts = max(1, weight.shape[1] // self.model.config["d_model"])
        for block, u in zip(weight.detach().chunk(parts, 1), update.chunk(parts, 1)):
            block.add_(orthogonal(u), alpha=-rate * max(1.0, u.shape[0] / u.shape[1]) ** 0.5)
        g.zero_()

    def state(self):
        return {"kind": self.kind, "steps": self.steps, "m": self.m, "v": self.v}

    def restore(self, state):
        if state["kind"] != self.kind:
            raise SystemExit(f"the checkpoint was made with --optimizer {state['kind']}")
        self.steps = state["steps"]
        self.m.copy_(state["m"])
        self.v.copy_(state["v"])


def orthogonal(g, steps=5):
    """Approximate the nearest orthogonal matrix by Newton-Schulz iteration with Muon's quintic. Every iterate is a
    polynomial of the small Gram matrix times g, so the iteration computes the polynomial and multiplies by g last.
    Powers of the Gram matrix are computed in float32 for any product precision."""
    tall = g.shape[0] > g.shape[1]
    g = g / (g.norm() + 1e-7)
    product = kernels.symmetric if kernels.has_products and min(g.shape) % 32 == 0 else lambda a, b: a.t() @ b
    thin = (g if tall else g.t()).contiguous()
    gram, total = product(thin, thin), None
    for step in range(steps):
        q = product(gram, gram).mul_(2.0315).add_(gram, alpha=-4.7750)
        q.diagonal().add_(3.4445)
        total = q if total is None else product(q, total)
        if step < steps - 1:
            gram = product(product(q, gram), q)
    return g @ total if tall else total @ g


def schedule(step, fraction, warmup, decay_from):
    """Return the learning-rate factor: warm-up over `warmup` steps, but at most a tenth of the time; then constant;
    then linear decay to 0 from decay_from."""
    warm = max((step + 1) / warmup, fraction / 0.1)  # shorten the warm-up of short runs
    return min(1.0, warm) * max(0.0, min(1.0, (1.0 - fraction) / (1.0 - decay_from)))


def own_corpus(options):
    """Return the user's own corpus in the languages in use, or None if the folder has files known to data.py."""
    done = os.path.join(options.cache or os.path.join(options.out, "data"), "done.json")
    if os.path.exists(done):
        with open(done, encoding="utf-8") as file:
            if json.load(file)["corpus"] != "own":
                return None
    folder = os.path.join(options.corpus, "train")
    names = [x[:-len(".tsv.xz")] for x in os.listdir(folder) if x.endswith(".tsv.xz")] if os.path.isdir(folder) else []
    if set(names) & set(data.SHARES):
        for name in sorted(set(names) - set(data.SHARES)):
            log(f"ignoring train/{name}.tsv.xz, which has no share in data.py")
        return None
    if not os.path.exists(options.corpus):
        raise SystemExit(f"{options.corpus}: no such file or directory")
    corpus = own.Corpus(options.corpus, options.languages.split(",") if options.languages else None, options.dev, log)
    corpus.use(read_inference(options.init)["config"]["languages"] if options.init else None)
    options.short_minutes = 0
    return corpus


def converter(*command):
    """Run convert.py; exit with the program's message on failure."""
    path = os.path.join(os.path.dirname(os.path.realpath(moefile.__file__)), "convert.py")
    done = subprocess.run([sys.executable, path, *command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                          text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip())


def finetune(o):
    """Train a model file further, with its vocabulary, languages and dequantised weights."""
    started = f"{o.output}.training"
    os.makedirs(started, exist_ok=True)
    o.init, o.spm, o.out = os.path.join(started, "start.pt"), os.path.join(started, "spm.model"), started
    o.cache = None
    converter(o.model, "--back", "--spm", o.spm, "-o", o.init)
    trainer = Trainer(o)
    before = trainer.evaluate(0.0) if not trainer.step else None
    trainer.run()
    if trainer.stopped:
        raise SystemExit(f"stopped: the same command continues from {started}")
    licence = ["--licence", o.licence] if o.licence else []
    converter(trainer.model_path, "--like", o.model, "--spm", o.spm, *licence, "--type", "q8", "--experts", "q4",
              "-o", o.output)
    for key, value in (before or {}).items():
        if key.startswith("bleu."):
            print(f"{key[5:]}: held-out BLEU {value} before, {trainer.measured[key]} after")
    print(f"wrote {o.output}")


class Trainer:
    def __init__(self, options):
        self.o, self.stopped = options, False
        self.out = options.out
        os.makedirs(self.out, exist_ok=True)
        self.resume_path, self.model_path = os.path.join(self.out, "resume.pt"), os.path.join(self.out, "model.pt")
        resume = torch.load(self.resume_path, weights_only=True) if os.path.exists(self.resume_path) else None
        cache = options.cache or os.path.join(self.out, "data")
        corpus = own_corpus(options)
        vocabulary = (own if corpus else data).prepare(corpus or options.corpus, cache, RECIPES[options.recipe][0],
                                                       options.spm, log)
        shutil.copyfile(vocabulary, os.path.join(self.out, "model-spm.model"))
        if options.spm and not filecmp.cmp(options.spm, vocabulary, shallow=False):
            raise SystemExit(f"{cache} was created with a different vocabulary than {options.spm}")
        import sentencepiece
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
        size = self.pieces.vocab_size()
        start = None
        if resume:
            config = resume["config"]
        elif options.init:
            start = read_inference(options.init)
            config = start["config"]  # includes training statistics, to which this run adds
        else:
            config = make_config(options.recipe, size, options.gate, options.k, options.groups, options.attention)
        if config["vocab_size"] != size:
            raise SystemExit(f"the vocabulary has {size} pieces, but the model has {config['vocab_size']}")
        self.model = Model(config, options.device, options.seed)
        if start:
            self.model.load(start["weights"])
        self.average = self.model.flat.clone()
        self.optimizer = Optimizer(self.model, options.optimizer)
        self.mixture = data.Mixture(cache, options.longest, seed=options.seed)
        self.elapsed, self.tokens, self.step, self.since_evaluation = 0.0, 0, 0, 0.0
        if resume:
            self.model.flat.copy_(resume["weights"])
            self.average.copy_(resume["average"])
            self.optimizer.restore(resume["optimizer"])
            self.mixture.restore(resume["mixture"])
            self.elapsed, self.tokens, self.step = resume["elapsed"], resume["tokens"], resume["step"]
            self.since_evaluation = resume["since_evaluation"]
        # One replica and thread per core, each with part of the batch and single-threaded products. Threads synchronise
        # once per step instead of in every product, which also makes training less sensitive to other programs.
        workers = options.threads if options.device == "cpu" else 1
        self.replicas = [self.model] + [Model(config, options.device, share=self.model) for _ in range(workers - 1)]
        balanced = any(x.get("gate") == "batchwise/threshold" for x in config["encoder"])
        for model in self.replicas:
            model.w_importance = (0.1 if balanced else 0.01) if options.importance is None else options.importance
        self.pool = ThreadPoolExecutor(workers)
        self._one_thread_products()
        self.evaluation = Evaluation(corpus or options.corpus, self.pieces, options.dev_sentences,
                                     options.news_sentences)
        self.losses = []
        gc.freeze()  # make garbage collections skip long-lived objects

    def _one_thread_products(self):
        together = Barrier(len(self.replicas))  # ensure that every worker runs one task

        def limit(_):
            together.wait()
            torch.set_num_threads(1)
        list(self.pool.map(limit, self.replicas))

    # -- saving

    def save(self):
        write_atomically({"config": self.model.config, "weights": self.model.flat, "average": self.average,
                          "optimizer": self.optimizer.state(), "mixture": self.mixture.state(), "elapsed": self.elapsed,
                          "tokens": self.tokens, "step": self.step, "since_evaluation": self.since_evaluation},
                         self.resume_path)
        before, averaged = self.model.config, {}
        for name, (a, b) in self.model.span.items():
            averaged[name] = self.average[a:b].view_as(self.model.weights[name])
        about = {"target_tokens_seen": before.get("target_tokens_seen", 0) + self.tokens,
                 "training_minutes": round(before.get("training_minutes", 0) + self.elapsed / 60, 1)}
        write_atomically(inference_checkpoint(before, averaged, **about), self.model_path)

    def evaluate(self, rate):
        """Measure the averaged weights; append a row to curve.csv and return it."""
        weights = self.model.flat.clone()
        self.model.flat.copy_(self.average)
        row = self.evaluation.run(self.replicas, self.pool)
        self.model.flat.copy_(weights)
        loss = sum(self.losses) / max(1, len(self.losses))
        row = {"minutes": round(self.elapsed / 60, 2), "step": self.step, "tokens": self.tokens, "rate": round(rate, 6),
               "train_loss": round(loss, 4), **row}
        path = os.path.join(self.out, "curve.csv")
        columns = self.evaluation.columns + [x for x in row if x not in self.evaluation.columns]
        if os.path.exists(path):
            with open(path, newline="") as file:
                columns = next(csv.reader(file))
        with open(path, "a", newline="") as file:
            # files from older versions have fewer columns
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)
        bleu = [row[x] for x in self.evaluation.columns if x.startswith("bleu.") and "news" not in x]
        log(f"evaluation at {row['minutes']} min: dev loss {row['dev_loss']}, news {row.get('news_loss', '-')}, "
            f"mean BLEU {sum(bleu) / len(bleu):.2f}, " + ", ".join(f"{k} {v}" for k, v in row.items() if "." in k))
        return row

    # -- running

    def minutes(self):
        try:
            with open(os.path.join(self.out, "minutes")) as file:
                return float(file.read())
        except (OSError, ValueError):
            return self.o.minutes

    def stop(self, *_):
        self.stopped = True

    def gradients(self, pairs):
        """Compute the gradients of a batch, split among replicas, in self.model.grad; return mean loss and tokens."""
        tokens = sum(len(target) for _, target in pairs)
        meeting = Meeting(min(len(self.replicas), len(pairs)))

        def part(i):
            model, batch = self.replicas[i], Batch(pairs[i::meeting.members], self.o.device)
            model.training, model.dropout = True, self.o.dropout
            model.seed = hash((self.step, i)) & 0xffffffff
            model.meeting, model.number = meeting, i
            try:
                loss = model.loss(batch, self.o.smoothing, batch.target.rows / tokens)
                loss.backward()
            except BaseException:
                meeting.barrier.abort()  # so that other replicas do not wait for this one
                raise
            return float(loss.detach())
        parts = [self.pool.submit(part, i) for i in range(meeting.members)]
        wait(parts)
        errors = [x.exception() for x in parts if x.exception()]
        if errors:  # raise the error that aborted the barrier
            raise min(errors, key=lambda error: isinstance(error, BrokenBarrierError))
        loss = sum(x.result() for x in parts)
        for other in self.replicas[1:]:
            kernels.collect(self.model.grad, other.grad)
        return loss, tokens

    def run(self):
        o, model = self.o, self.model
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        with open(os.path.join(self.out, "pid"), "w") as file:
            file.write(f"{os.getpid()}\n")
        log(f"{sum(x.numel() for x in model.weights.values()) / 1e6:.1f} M weights, {o.optimizer}, from "
            f"{self.elapsed / 60:.1f} of {self.minutes():.1f} minutes")
        for line in self.mixture.report() if not self.step else []:
            log(line)
        end, saved, shown = self.minutes() * 60, self.elapsed, time.time()
        window, before = [], time.time()
        while not self.stopped:
            fraction = self.tokens / (o.tokens * 1e6) if o.tokens else self.elapsed / end
            if fraction >= 1:
                break
            factor = schedule(self.step, fraction, o.warmup, o.decay_from)
            growth = min(1.0, fraction / 0.5)
            batch_tokens = round(o.batch_tokens * (1 + (o.batch_growth - 1) * growth), -2)
            longest = o.longest if self.elapsed > o.short_minutes * 60 else o.short_pieces
            loss, tokens = self.gradients(self.mixture.next(batch_tokens, longest))
            norm = self.optimizer.step(o.rate * factor, o.muon_rate * factor, o.threshold_rate * max(0.1, factor),
                                       o.clip, self.pool)
            self.step += 1
            self.tokens += tokens
            if self.step % 4 == 0:
                # a decay that averages about the last tenth of the steps, at most `ema`
                kernels.average(self.average, model.flat, min(1.0, 4 * max(1 / o.ema, 10 / self.step)))
            if not math.isfinite(loss):
                raise SystemExit(f"loss is {loss} at step {self.step}; not saved")
            self.losses = self.losses[-49:] + [loss]
            now = time.time()
            self.elapsed += min(now - before, 10.0)
            self.since_evaluation += min(now - before, 10.0)
            window = window[-49:] + [(now - before, tokens)]
            before = now
            if now - shown > (1 if sys.stderr.isatty() else 30):
                shown = now
                speed = sum(x[1] for x in window) / sum(x[0] for x in window)
                ahead = self.elapsed / 60 * (1 / fraction - 1) if fraction else self.minutes()
                progress(f"{self.elapsed / 60:6.1f} min, {100 * fraction:.0f} %  step {self.step}  "
                         f"{self.tokens / 1e6:.2f} M tokens  {speed:.0f} tokens/s  "
                         f"loss {sum(self.losses) / len(self.losses):.3f}  gradient {norm:.2f}  "
                         f"rate {o.rate * factor:.2e}  batch {batch_tokens:.0f}  ETA {ahead:.0f} min")
            end = self.minutes() * 60 if self.step % 20 == 0 else end
            every = getattr(o, "evaluate_every", min(15, self.elapsed / 60 / fraction / 4) if fraction else 15)
            if self.since_evaluation > every * 60:
                self.since_evaluation = 0.0
                self.evaluate(o.rate * factor)
                before = time.time()
            if self.elapsed - saved > o.save_every * 60:
                saved = self.elapsed
                self.save()
        self.save()
        if not self.stopped:
            self.measured = self.evaluate(0.0)
        log("stopped; state saved: run the same command to continue" if self.stopped else "finished")


# ---- Unused experts --------------------------------------------------------------------------------------------------

REVIVED = 0.3  # experts below this share of the mean importance are revived
APART = 0.7    # standard deviation of the logit offsets that split an expert's work


@torch.no_grad()
def gate_inputs(model, mixture, batches):
    """Return {name: (x, softmax)} of the balanced single-level gates, for all rows of some batches."""
    found, level = {}, model._balanced

    def watched(name, x, k, *pairs):
        gate, p = level(name, x, k, *pairs)
        if not pairs and name.endswith(".gate"):
            found.setdefault(name, []).append((x, p))
        return gate, p
    model._balanced = watched
    for _ in range(batches):
        model.loss(Batch(mixture.next(2500, 80), model.device), 0.0)
    model._balanced = level
    return {name: [torch.cat(part) for part in zip(*parts)] for name, parts in found.items()}


def halves(x, p, expert):
    """Return a vector that splits an expert's work: the direction in x [rows, d] in which the expert's most probable
    rows (p [rows, n]) vary most. One half adds the vector to its gate column, the other subtracts it."""
    rows = x[p[:, expert].topk(max(2, len(x) // p.shape[1])).indices]
    mean = F.normalize(rows.mean(0), dim=0)
    rows = rows - (rows @ mean)[:, None] * mean  # directions orthogonal to the mean row
    direction = torch.linalg.svd(rows, full_matrices=False).Vh[0]
    return APART * direction / (rows @ direction).std()


@torch.no_grad()
def revive(out, cache, batches=16):
    """Replace almost unused experts with copies of the busiest experts; each copy shares the work with its original.
    Losses cannot revive such experts, because gradients are proportional to the softmax. The run must be stopped."""
    path = os.path.join(out, "resume.pt")
    resume = torch.load(path, weights_only=True)
    model = Model(resume["config"])
    model.flat.copy_(resume["weights"])
    for name, (x, p) in gate_inputs(model, data.Mixture(cache, 80, seed=99), batches).items():
        share = p.mean(0) * p.shape[1]
        idle = [i for i in share.argsort().tolist() if share[i] < REVIVED]
        layer = name.rsplit(".", 1)[0]
        for expert, busy in zip(idle, share.argsort(descending=True).tolist()):
            apart = halves(x, p, busy)
            for flat in resume["weights"], resume["average"]:
                w = {key: flat[a:b].view(model.weights[key].shape) for key, (a, b) in model.span.items()
                     if key.startswith(layer + ".")}
                w[name + ".weight"][:, expert] = w[name + ".weight"][:, busy] - apart
                w[name + ".weight"][:, busy] += apart
                threshold = w[name + ".threshold"]
                # the softmax now contains this logit twice
                threshold[[expert, busy]] = threshold[busy] / (1 + threshold[busy])
                for key in layer + ".experts.w_up", layer + ".experts.w_down":
                    w[key][expert] = w[key][busy]
            for key in name + ".weight", layer + ".experts.w_up", layer + ".experts.w_down":
                for state in resume["optimizer"]["m"], resume["optimizer"]["v"]:
                    part = state[slice(*model.span[key])].view(model.weights[key].shape)
                    part = part.t() if key == name + ".weight" else part
                    part[expert] = part[busy]
            log(f"{name}: expert {expert} with {share[expert]:.3f} of the mean importance takes over half of the work "
                f"of expert {busy} with {share[busy]:.2f}")
    write_atomically(resume, path)


# ---- Self-check ------------------------------------------------------------------------------------------------------

def check():
    """Compare all hand-written backward passes and C kernels with autograd on plain torch code; raise if any differ."""
    torch.manual_seed(0)

    def close(what, got, want, tolerance=3e-2 if half else 2e-4):
        got, want = got.detach(), want.detach()
        error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-2))  # clamp, since gradients may be 0
        print(f"{what:40s} relative error {error:.1e}")
        assert error < tolerance, what

    def compare(name, function, reference, inputs):
        inputs = [x.requires_grad_(True) for x in inputs]
        got, want = function(*inputs), reference(*inputs)
        close(name, got, want)
        d = torch.randn_like(want)
        for x in inputs:
            x.grad = torch.ones_like(x)  # checks that gradients are added to .grad
        got.backward(d)
        for i, (x, b) in enumerate(zip(inputs, torch.autograd.grad(want, inputs, d))):
            close(f"{name} gradient {i}", x.grad - 1, b)

    def random(*shape):  # sums over the last dimension have variance 1
        return torch.randn(shape) / shape[-1] ** 0.5

    def cell(z, c):
        i, f, g, o = z.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return c, o.sigmoid() * c.tanh()

    def by_sentence(packed, x):
        return [torch.stack([x[packed.offset[t] + b] for t in range(n)]) for b, n in enumerate(packed.lengths)]

    def repacked(packed, rows):
        return torch.stack([rows[b][t] for t, n in enumerate(packed.count) for b in range(n)])

    def lstm_reference(packed, reverse):
        def run(x, w_x, w_r, bias, w_proj):
            result = []
            for sentence in by_sentence(packed, x):
                r, c, out = x.new_zeros(1, len(w_proj)), x.new_zeros(1, w_proj.shape[1]), []
                for row in (sentence.flip(0) if reverse else sentence):
                    c, h = cell(row[None] @ w_x.t() + r @ w_r.t() + bias, c)
                    r = h @ w_proj.t()
                    out.append(r[0])
                result.append(out[::-1] if reverse else out)
            return repacked(packed, result)
        return run

    for M, N, K in (1, 1, 1), (3, 40, 65), (70, 33, 34), (45, 64, 200):
        for a, b in itertools.product((torch.randn(M, K), torch.randn(K, M).t()),
                                      (torch.randn(K, N), torch.randn(N, K).t())):
            start = torch.randn(M, N + 3)
            got = mm_add(a, b, start.clone()[:, 1:N + 1])
            if half:
                a, b = a.bfloat16().float(), b.bfloat16().float()
            close(f"product {M} {N} {K}", got, start[:, 1:N + 1] + a @ b, 1e-5 if fused else 1e-2)
            close(f"product {M} {N} {K}", mm(a, b), a @ b, 1e-5 if fused else 1e-2)

    for shape in (96, 64), (32, 70):
        matrix = torch.randn(shape) @ torch.diag(torch.linspace(0.5, 1, shape[1]))
        singular = torch.linalg.svdvals(orthogonal(matrix))
        print(f"orthogonal {shape}: singular values {float(singular.min()):.2f} .. {float(singular.max()):.2f}")
        assert 0.6 < singular.min() and singular.max() < 1.3
        if kernels.has_products:
            thin = matrix if shape[0] > shape[1] else matrix.t().contiguous()
            close("symmetric product", kernels.symmetric(thin, thin), thin.t() @ thin, 1e-5)

    d, P, H, a = 38, 35, 41, 36
    target, source = Packed([5, 5, 3, 1]), Packed([6, 4, 4, 2])
    weights = [random(4 * H, d), random(4 * H, P), random(4 * H), random(P, H)]
    for reverse in False, True:
        compare("lstm" + " reversed" * reverse, lambda *x: Lstm.apply(*x, target, reverse),
                lstm_reference(target, reverse), [torch.randn(target.rows, d), *weights])

    column = np.array([2, 0, 3, 1])
    place = Place(column, source, "cpu")

    def attention(product, memory, k, q, v):
        return ((k * q.tanh() if product else (k + q).tanh()) @ v).softmax(0) @ memory

    def first_reference(product, memory, key, v):
        found = [attention(product, m, k, torch.zeros_like(v), v)
                 for m, k in zip(by_sentence(source, memory), by_sentence(source, key))]
        return torch.stack([found[i] for i in column])

    def attentive_reference(product, x, first, memory, key, w_x, w_r, bias, w_proj, w_query, v):
        memories, keys, result = by_sentence(source, memory), by_sentence(source, key), []
        for b, sentence in enumerate(by_sentence(target, x)):
            r, c, context, out = x.new_zeros(1, P), x.new_zeros(1, H), first[b], []
            for row in sentence:
                c, h = cell(torch.cat((row, context))[None] @ w_x.t() + r @ w_r.t() + bias, c)
                r = h @ w_proj.t()
                context = attention(product, memories[column[b]], keys[column[b]], r @ w_query.t(), v)
                out.append(torch.cat((r[0], context)))
            result.append(out)
        return repacked(target, result)

    for product in False, True:
        name, memory, key = ", product" * product, torch.randn(source.rows, P), torch.randn(source.rows, a)
        compare("first context" + name, lambda *x: FirstContext.apply(*x, place, product),
                lambda *x: first_reference(product, *x), [memory, key, random(a)])
        compare("attentive lstm" + name, lambda *x: torch.cat(AttentiveLstm.apply(*x, target, place, product), 1),
                lambda *x: attentive_reference(product, *x),
                [torch.randn(target.rows, d), torch.randn(len(column), P), memory.detach(), key.detach(),
                 random(4 * H, d + P), *weights[1:], random(a, P), random(a)])

    row, counts = torch.tensor([0, 3, 1, 2, 0, 3]), [2, 0, 4]

    def experts_reference(x, weight, w_up, w_down):
        y, e = torch.zeros_like(x), [0, 0, 2, 2, 2, 2]
        for j in range(6):
            y = y.index_add(0, row[j:j + 1], weight[j] * ((x[row[j]] @ w_up[e[j]]).relu() @ w_down[e[j]])[None])
        return y

    compare("experts", lambda x, g, up, down: Experts.apply(x, g, row, counts, up, down, *ALONE), experts_reference,
            [torch.randn(4, d), torch.rand(6), random(3, d, H), random(3, H, d)])

    ids = torch.tensor([3, 1, 3, 0])
    compare("embedding", lambda w: Embed.apply(w, ids, 2.0), lambda w: 2.0 * w[ids], [torch.randn(5, d)])

    wanted = torch.tensor([0, 8, 3, 3])
    for smoothing in 0.0, 0.1:
        x, w = torch.randn(4, d, requires_grad=True), random(9, d).requires_grad_(True)
        w.grad = torch.ones_like(w)
        loss = CrossEntropy.apply(x, w, wanted, smoothing)
        loss.backward()
        close("cross-entropy loss", loss, F.cross_entropy(x @ w.t(), wanted))
        want = torch.autograd.grad(F.cross_entropy(x @ w.t(), wanted, label_smoothing=smoothing), (x, w))
        close(f"cross-entropy {smoothing} gradient 0", x.grad, want[0])
        close(f"cross-entropy {smoothing} gradient 1", w.grad - 1, want[1])

    u = torch.ones(400, 50, requires_grad=True)
    y = DropoutAdd.apply(torch.zeros_like(u), u, 5, 0.25)
    close("dropout backward", torch.autograd.grad(y.sum(), u)[0], y)
    y = y.detach()
    assert abs(float((y == 0).float().mean()) - 0.25) < 0.02 and abs(float(y.max()) - 4 / 3) < 1e-5

    w, g = torch.randn(10_000), torch.randn(10_000)
    other = torch.nn.Parameter(w.clone())
    adam = torch.optim.Adam([other], 0.01, (0.9, 0.98), 1e-9)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step in 1, 2, 3:
        other.grad = g * 0.5 * step
        adam.step()
        kernels.adam(w, g * step, m, v, 0.01, 0.9, 0.98, 1e-9, 1 - 0.9 ** step, 1 - 0.98 ** step, 0.5)
    close("adam", w, other.detach())
    close("norm", torch.tensor(kernels.norm(g)), g.norm())


# ---- Command line ----------------------------------------------------------------------------------------------------

def log(text):
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def progress(text):
    if sys.stderr.isatty():
        print("\r\033[K" + text, end="", file=sys.stderr, flush=True)
    else:
        log(text)


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, text):
        return commands.add_parser(name, help=text, description=text,
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    def place(p):
        p.add_argument("--corpus", required=True, help="folder with train/ and dev/")
        p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute")
        p.add_argument("--precision", choices=("fp32", "bf16"), default="fp32",
                       help="precision of matrix products; weights, cell states, gates, softmax and losses are float32")
        p.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
        p.add_argument("--dev-sentences", type=int, default=150, help="Tatoeba dev sentences per direction")
        p.add_argument("--news-sentences", type=int, default=30, help="newstest2012 sentences per direction")

    def training(p, minutes, muon_rate, rate, dropout):
        place(p)
        p.add_argument("--languages", metavar="A,B", help="codes of the columns, if files have no header")
        p.add_argument("--dev", help="file or folder with dev data (own corpora; default: held-out rows)")
        options(p, minutes, muon_rate, rate, dropout)

    def train_only(p):
        p.add_argument("--out", required=True, help="folder for resume.pt, model.pt, curve.csv")
        p.add_argument("--cache", help="folder of the tokenised corpus, created if missing (default: data in --out)")
        p.add_argument("--spm", help="existing SentencePiece model to use instead of training one for the cache")
        p.add_argument("--init", help="start from the weights of this moe-checkpoint-1 file (requires its vocabulary)")

    def options(p, minutes, muon_rate, rate, dropout):
        p.add_argument("--recipe", choices=tuple(RECIPES), default="cpu",
                       help="cpu: d 256, LSTM 512, 32 experts of 512, k 2, 8,000 pieces; "
                            "gpu: d 512, LSTM 1024, 32 experts of 1024, k 4, 16,000 pieces; "
                            "mixture: d 128, LSTM 128, 32 experts of 1024, k 4, 8,000 pieces, mostly experts")
        p.add_argument("--gate", choices=("balanced", "noisy", "dense"), default="balanced",
                       help="strictly balanced with thresholds, noisy top-k, or for comparison a single expert with as "
                            "many multiply-adds as k")
        p.add_argument("--k", type=int,
                       help="experts per token (default: from the recipe); with --groups, per level (default: 2)")
        p.add_argument("--groups", type=int, default=0,
                       help="groups of experts, for two levels of gates (appendix B); 0: one level")
        p.add_argument("--attention", choices=moefile.key_of("gnmt-attention", "kind").names, default="additive",
                       help="additive as in GNMT, or appendix G's, which is one matrix product")
        p.add_argument("--minutes", type=float, default=minutes,
                       help="total training time, including resumed runs: end of the schedule")
        p.add_argument("--tokens", type=float, help="train for this many million target tokens instead of --minutes")
        p.add_argument("--batch-tokens", type=float, default=2000,
                       help="initial tokens per batch, mean of source and target")
        p.add_argument("--batch-growth", type=float, default=1.4, help="growth factor of batches until half time")
        p.add_argument("--importance", type=float,
                       help="weight of the importance loss (default: 0.1 for balanced gates, 0.01 for noisy ones)")
        p.add_argument("--optimizer", choices=("adam", "muon"), default="muon",
                       help="muon: orthogonalised momentum for the matrices of LSTM and attention, Adam for the rest")
        p.add_argument("--rate", type=float, default=rate, help="learning rate of Adam")
        p.add_argument("--muon-rate", type=float, default=muon_rate, help="learning rate of Muon")
        p.add_argument("--threshold-rate", type=float, default=0.05, help="learning rate of the gate thresholds")
        p.add_argument("--warmup", type=int, default=150, help="steps of linear warm-up")
        p.add_argument("--decay-from", type=float, default=0.2, help="share of the time after which the rate falls")
        p.add_argument("--clip", type=float, default=1.0, help="maximum gradient norm")
        p.add_argument("--dropout", type=float, default=dropout, help="dropout after embedding, LSTM and MoE layers")
        p.add_argument("--smoothing", type=float, default=0.1, help="label smoothing")
        p.add_argument("--ema", type=float, default=500, help="steps over which the saved weights are averaged")
        p.add_argument("--longest", type=int, default=60, help="drop pairs with more pieces on a side")
        p.add_argument("--short-minutes", type=float, default=5, help="initial minutes with short sentences only")
        p.add_argument("--short-pieces", type=int, default=20, help="limit of pieces in those minutes")
        p.add_argument("--evaluate-every", type=float, default=argparse.SUPPRESS,
                       help="minutes between evaluations (default: 15, or a quarter of a shorter run)")
        p.add_argument("--save-every", type=float, default=5, help="minutes between saves")
        p.add_argument("--seed", type=int, default=1, help="random seed of weights, data order and dropout")

    p = command("train", "train, or continue from resume.pt in --out")
    train_only(p)
    training(p, 145, 0.01, 2e-3, 0.05)

    p = command("finetune", "train a model file further on your own text")
    p.add_argument("-m", "--model", required=True, metavar="FILE", help="model file to start from")
    p.add_argument("-o", "--output", required=True, metavar="FILE",
                   help="model file to write; a stopped command continues from FILE.training next to it")
    p.add_argument("--licence", metavar="FILE", help="licence to store (default: the model's)")
    training(p, 3, 0.002, 5e-4, 0.1)
    p.set_defaults(warmup=20, batch_tokens=1000)  # for a short run

    p = command("evaluate", "dev loss, BLEU and gate statistics of an inference checkpoint")
    place(p)
    p.add_argument("--model", required=True, help="moe-checkpoint-1 file")
    p.add_argument("--spm", required=True, help="its SentencePiece model")
    p.add_argument("--cache", help="folder of the tokenised corpus; adds the loss on 40,000 tokens of the training mix")

    p = command("average", "weighted mean of inference checkpoints")
    p.add_argument("models", nargs="+", metavar="FILE=WEIGHT",
                   help="moe-checkpoint-1 files; weights are divided by their sum")
    p.add_argument("--first", nargs="+", default=[], metavar="PREFIX",
                   help="take weights with these prefixes from the first model")
    p.add_argument("-o", "--out", required=True, help="moe-checkpoint-1 file to write")

    p = command("grow", "add hidden units, context inputs or layers without changing the output")
    p.add_argument("model", metavar="FILE", help="moe-checkpoint-1 file")
    p.add_argument("--hidden", type=int, help="hidden units per expert")
    p.add_argument("--context", action="store_true", help="let upper LSTM layers of the decoder read the context")
    p.add_argument("--encoder", type=int, default=0, metavar="N", help="bidirectional LSTM layers to add at the top")
    p.add_argument("--decoder", type=int, default=0, metavar="N", help="LSTM layers to add on top of the decoder")
    p.add_argument("-o", "--out", required=True, help="moe-checkpoint-1 file to write")

    p = command("revive", "give unused experts half of the work of busy ones, in a stopped run")
    p.add_argument("--out", required=True, help="folder of the run's resume.pt")
    p.add_argument("--cache", required=True, help="folder of the tokenised corpus")

    p = command("prepare", "create the vocabulary and the tokenised corpus")
    p.add_argument("--corpus", required=True, help="folder with train/")
    p.add_argument("--cache", required=True, help="folder to create")
    p.add_argument("--pieces", type=int, default=8000, help="size of the vocabulary")
    p.add_argument("--spm", help="existing SentencePiece model to use instead of training one")
    p.add_argument("--back", metavar="FILE", help="model file that translates English to German, French and Spanish "
                   "where the corpus lacks them (half an hour on two cores)")

    command("check", "compare all hand-written backward passes with autograd")
    return parser.parse_args(argv)


def keep_memory():
    """Make glibc keep freed memory."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: allocate large tensors from the heap
    libc.mallopt(-8, 1)  # M_ARENA_MAX: one arena for all threads
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never return memory, so that pages fault once


def main():
    o = arguments()
    if o.command == "prepare":
        data.prepare(o.corpus, o.cache, o.pieces, o.spm, log, o.back)
        return
    if o.command == "revive":
        revive(o.out, o.cache)
        return
    if o.command == "grow":
        if o.hidden is None and not o.encoder and not o.decoder and not o.context:
            raise SystemExit("missing option: --hidden, --context, --encoder or --decoder")
        file = read_inference(o.model)
        if o.hidden is not None:
            file = widen(file, o.hidden)
        if o.context:
            file = attend(file)
        if o.encoder or o.decoder:
            file = deepen(file, encoder=o.encoder, decoder=o.decoder)
        write_atomically(file, o.out)
        return
    if o.command == "average":
        try:
            files, shares = zip(*((x, float(share)) for x, _, share in (x.rpartition("=") for x in o.models)))
        except ValueError:
            raise SystemExit("models must be given as FILE=WEIGHT, e.g. run1/model.pt=0.7") from None
        write_atomically(average([read_inference(x) for x in files], shares, o.first), o.out)
        return
    keep_memory()
    if o.command == "check":
        for name, kind in ("C kernels", CpuKernels), ("plain torch", TorchKernels):
            for precision in "fp32", "bf16":
                print(f"{name}, {precision}")
                use(kind, precision)
                check()
        print("no errors")
        return
    torch.set_num_threads(o.threads)
    use(CpuKernels if o.device == "cpu" else TorchKernels, o.precision)
    if o.command == "evaluate":
        import sentencepiece
        model = load_inference(o.model, o.device)
        pieces = sentencepiece.SentencePieceProcessor(model_file=o.spm)
        evaluation = Evaluation(o.corpus, pieces, o.dev_sentences, o.news_sentences)
        row = evaluation.run([model], ThreadPoolExecutor(1))
        if o.cache:
            row["mix_loss"] = mix_loss(model, o.cache)
        print(json.dumps(row, indent=1))
        return
    if o.command == "finetune":
        finetune(o)
        return
    Trainer(o).run()


if __name__ == "__main__":
    main()
