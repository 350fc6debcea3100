#!/usr/bin/env python3
"""Measure llama.cpp for llama.py, with the bindings of llama-cpp-python, which pip
builds from source.

    peer_llama.py quantise IN.gguf OUT.gguf Q4_K_M
    peer_llama.py bench MODEL.gguf --repack 1
        process random tokens, like llama-batched-bench and llama-bench -p
    peer_llama.py experts MODEL.gguf
        count the experts of a mixture that a step of such a batch reads

`bench` and `experts` print one JSON line.
"""
import argparse
import ctypes
import json
import os
import re
import sys
import time

import numpy as np

try:
    import llama_cpp as lib
except ImportError:
    lib = None

MOST, PIECE = 2048, 512  # maximum tokens per call and per graph, llama.cpp's defaults


class Rows:
    """A context of n sequences and a batch of random tokens for it."""

    def __init__(self, o, model, n, length, watch=None):
        p = lib.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = n * length, MOST, PIECE, n
        p.n_threads = p.n_threads_batch = o.threads
        if watch:
            p.cb_eval = watch
        self.context, self.n, self.random = lib.llama_init_from_model(model, p), n, np.random.default_rng(1)
        self.size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.batch = lib.llama_batch_init(MOST, 0, 1)
        if not self.context:
            sys.exit("no context")

    def run(self, begin, end):
        """Process positions [begin, end) of all sequences; compute logits at the last one."""
        rows = [(sequence, position) for sequence in range(self.n) for position in range(begin, end)]
        for at in range(0, len(rows), MOST):
            some, b = rows[at:at + MOST], self.batch
            for i, (sequence, position) in enumerate(some):
                b.token[i], b.pos[i], b.n_seq_id[i] = int(self.random.integers(self.size)), position, 1
                b.seq_id[i][0], b.logits[i] = sequence, position == end - 1
            b.n_tokens = len(some)
            if lib.llama_decode(self.context, b):
                sys.exit("llama_decode failed")
        lib.llama_synchronize(self.context)

    def close(self):
        lib.llama_batch_free(self.batch)
        lib.llama_free(self.context)


def bench(o, model):
    def passage(n, prompt, out):
        """Return (seconds to process the prompts, seconds to generate the other tokens)."""
        rows = Rows(o, model, n, prompt + out)
        begin = time.perf_counter()
        rows.run(0, prompt)
        middle = time.perf_counter()
        for step in range(out):
            rows.run(prompt + step, prompt + step + 1)
        end = time.perf_counter()
        rows.close()
        return middle - begin, end - middle
    passage(1, o.prompt, 4)  # warm up
    found, wall, busy = {}, time.perf_counter(), time.process_time()
    for n in o.batch:
        first, rest = passage(n, o.prompt, o.out)
        found[f"decode {n}"], found[f"out {n}"] = rest / o.out, first + rest
    found[f"prompt {o.long}"] = passage(1, o.long, 0)[0]
    cpus = (time.process_time() - busy) / (time.perf_counter() - wall)
    print(json.dumps({"seconds": found, "cpus": round(cpus, 2)}))


class Watch:
    """Counts the distinct experts that the rows of each mixture select."""

    def __init__(self, o):
        base = ctypes.CDLL(o.base)
        self.name_of, self.get, self.bytes_of = base.ggml_get_name, base.ggml_backend_tensor_get, base.ggml_nbytes
        self.name_of.argtypes, self.name_of.restype = [ctypes.c_void_p], ctypes.c_char_p
        self.get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self.bytes_of.argtypes, self.bytes_of.restype = [ctypes.c_void_p], ctypes.c_size_t
        self.count, self.k, self.read, self.runs = o.experts, o.k, 0, 0
        self.function = lib.ggml_backend_sched_eval_callback(self.seen)

    def seen(self, tensor, ask, _):
        """Count the experts of a tensor. Rows have one column per expert; the first k columns are selected."""
        if not re.match(rb"ffn_moe_topk-\d", self.name_of(tensor)):
            return not ask
        if not ask:
            size = self.bytes_of(tensor) // 4
            rows = 1 + (size - self.k) // self.count
            ids = np.zeros(rows * self.count, np.int32)
            self.get(tensor, ids.ctypes.data, 0, 4 * size)
            self.read += len(np.unique(ids.reshape(rows, self.count)[:, :self.k]))
            self.runs += 1
        return True


def experts(o, model):
    found, watch = {}, Watch(o)
    for n in o.batch:
        rows = Rows(o, model, n, o.prompt + o.out, watch.function)
        rows.run(0, o.prompt)
        watch.read = watch.runs = 0
        for step in range(o.out):
            rows.run(o.prompt + step, o.prompt + step + 1)
        rows.close()
        found[str(n)] = round(watch.read / watch.runs, 2)
    print(json.dumps({"experts": found}))


def quantise(o):
    p = lib.llama_model_quantize_default_params()
    p.ftype, p.allow_requantize, p.nthread = getattr(lib, "LLAMA_FTYPE_MOSTLY_" + o.kind), True, o.threads
    if lib.llama_model_quantize(o.model.encode(), o.out.encode(), ctypes.byref(p)):
        sys.exit(f"cannot quantise {o.model}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["quantise", "bench", "experts"])
    parser.add_argument("model")
    parser.add_argument("out", nargs="?")
    parser.add_argument("kind", nargs="?")
    parser.add_argument("--repack", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--out", dest="steps", type=int, default=48)
    parser.add_argument("--long", type=int, default=512)
    parser.add_argument("--batch", type=lambda text: [int(x) for x in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--k", type=int, default=8)
    o = parser.parse_args()
    if lib is None:
        sys.exit("llama-cpp-python==0.3.36 is required")
    lib.llama_backend_init()
    if o.step == "quantise":
        quantise(o)
        return
    o.out, o.base = o.steps, os.path.join(os.environ.get("LLAMA_CPP_LIB_PATH", os.path.join(
        os.path.dirname(lib.__file__), "lib")), "libggml-base.so")
    p = lib.llama_model_default_params()
    p.use_extra_bufts = bool(o.repack)
    model = lib.llama_model_load_from_file(o.model.encode(), p)
    if not model:
        sys.exit(f"cannot load {o.model}")
    (bench if o.step == "bench" else experts)(o, model)


if __name__ == "__main__":
    main()
