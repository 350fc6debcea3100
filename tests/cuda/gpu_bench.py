#!/usr/bin/env python3
"""Time a decoder step of a paper-sized model with random weights in PyTorch eager bf16, for tests/cuda/gpu-check.

Usage: tests/cuda/gpu_bench.py ROWS EXPERTS [LENGTH]

Prints milliseconds per step for each implementation of the experts.
"""
import sys
import time

import torch
import torch.nn.functional as F

rows, experts, length = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 25
D, H, A, V, K, UNITS = 512, 2048, 512, 32000, 4, 2048
torch.manual_seed(1)


def weight(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5


layers = [dict(x=weight(4 * H, 2 * D), r=weight(4 * H, D), p=weight(D, H)),
          dict(x=weight(4 * H, D), r=weight(4 * H, D), p=weight(D, H))]
embedding, w_query, v = weight(V, D), weight(A, D), weight(A)
gate, up, down = weight(experts, D), weight(experts, D, UNITS), weight(experts, UNITS, D)
keys, values = weight(rows, length, A), weight(rows, length, D)


def loop_over_experts(x):
    top, index = (x @ gate.T).topk(K)
    p, y = top.softmax(-1), torch.zeros_like(x)
    for e in index.unique().tolist():
        row, slot = (index == e).nonzero(as_tuple=True)
        y.index_add_(0, row, F.relu(x[row] @ up[e]) @ down[e] * p[row, slot].unsqueeze(1))
    return y


def grouped(x):
    top, index = (x @ gate.T).topk(K)
    p, flat = top.softmax(-1), index.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=experts).cumsum(0).to(torch.int32)
    units = F.relu(torch._grouped_mm(x[order // K], up, offs=ends))
    out = torch._grouped_mm(units, down, offs=ends) * p.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x).index_add_(0, order // K, out)


def lstm(layer, x, r, c):
    i, f, g, o = (x @ layer["x"].T + r @ layer["r"].T).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return (o.sigmoid() * c.tanh()) @ layer["p"].T, c


def step(ids, state, mixture):
    (r0, c0), (r1, c1) = state
    x = embedding[ids]
    p = ((keys + (r0 @ w_query.T).unsqueeze(1)).tanh() @ v).softmax(-1)
    context = (p.unsqueeze(1) @ values).squeeze(1)
    r0, c0 = lstm(layers[0], torch.cat((x, context), 1), r0, c0)
    x = x + r0
    x = x + mixture(x).sigmoid()
    r1, c1 = lstm(layers[1], x, r1, c1)
    logits = (x + r1) @ embedding.T
    best = logits.float().log_softmax(-1).topk(5)
    return best.indices[:, 0], ((r0, c0), (r1, c1))


for name, mixture in (("loop over experts", loop_over_experts), ("grouped_mm", grouped)):
    try:
        with torch.inference_mode():
            times = []
            for _ in range(3):
                ids = torch.zeros(rows, dtype=torch.long, device="cuda")
                state = [(torch.zeros(rows, D, device="cuda", dtype=torch.bfloat16),
                          torch.zeros(rows, H, device="cuda", dtype=torch.bfloat16))] * 2
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(20):
                    ids, state = step(ids, state, mixture)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begin) / 20)
            print("PyTorch %s bf16, %s: %d rows, %d experts: %.3f ms a step" % (torch.__version__, name, rows, experts,
                                                                                1e3 * min(times)))
    except Exception as error:  # older versions of PyTorch lack grouped_mm; small GPUs lack memory
        print("PyTorch, %s: %s" % (name, str(error).splitlines()[0]))
