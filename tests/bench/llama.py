#!/usr/bin/env python3
"""Compare moe and llama.cpp on models with the shapes of Hy-MT2, Marco-Mini,
Qwen3-4B and Qwen 3.6 35B-A3B.

    make all bench build/convert_here
    .venv/bin/pip install gguf==0.19.0 llama-cpp-python==0.3.36
    tests/python tests/bench/llama.py make FOLDER  # --shapes NAME...
    tests/python tests/bench/llama.py run FOLDER >> results
    tests/python tests/bench/llama.py experts FOLDER >> results
    tests/python tests/bench/llama.py table results

30B-A3B is measured with 4 and 8 of its 48 layers and scaled, Marco-Mini with 4
and 8 of 28, Qwen 3.6 with 4 and 8 of 40, the others with all layers. If the
time of four layers of 30B-A3B would be lost in noise, --layers 16 before the
command measures 16 layers without scaling. pip builds llama.cpp from the
package's source; making all files takes an hour and 45 GB of disk. If
llama.cpp's code for AMX crashes, build it without (-DGGML_NATIVE=OFF and
-DGGML_AVX512_VNNI=ON), and set LLAMA_CPP_LIB_PATH to its folder.

`make` writes a GGUF file with random weights in Q8_0. Its embedding is wide, so
that tokens select different experts in all layers; otherwise few experts would
be used. llama.cpp quantises it to Q4_0 and Q4_K_M, moe's converter to its
default and to Q4 for all weights. The file with 4 layers has the first layers
of the file with 8, because Q4_K_M gives more bits to every second layer.

`run` alternates all files --rounds times. A turn reads its file, warms up, and
measures prompts of 64 tokens with 48 generated tokens at batch 1, 8 and 32, and
a prompt of 512 tokens. llama.cpp runs with and without repacked weights.

`experts` counts the experts per layer that llama.cpp reads in a step of such a
batch. moe-bench reports this number for moe in each turn.

`table` prints the medians of the rounds, scaled to 48 layers (t8 + 10 (t8 -
t4)), relative to llama.cpp's best and to the time for reading a step's weights
at the bandwidth that moe-bench measured.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys

import numpy as np

from compare import HERE, ROOT, program

sys.path.append(os.path.join(ROOT, "tests", "convert"))
PROMPT, OUT, LONG, BATCHES, THREADS = 64, 48, 512, (1, 8, 32), 2
COMMON = {"vocab_size": 120832, "hidden_size": 2048, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-5,
          "max_position_embeddings": 8192}
SHAPES = {
    "30b": {**COMMON, "model_type": "hy_v3", "num_hidden_layers": 48, "num_attention_heads": 32,
            "intermediate_size": 6912, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "num_shared_experts": 1, "router_scaling_factor": 2.826, "rope_theta": 11158840.0},
    "1.8b": {**COMMON, "model_type": "hunyuan_v1_dense", "num_hidden_layers": 32, "num_attention_heads": 16,
             "intermediate_size": 6144, "rope_theta": 1e4, "rope_scaling": {"alpha": 1000.0}},
    "marco-mini": {**COMMON, "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 1024,
                   "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "intermediate_size": 3072, "num_experts": 256, "num_experts_per_tok": 8,
                   "moe_intermediate_size": 768, "norm_topk_prob": True, "rope_theta": 1e6},
    "qwen3-4b": {**COMMON, "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 9728, "rope_theta": 1e6},
    "qwen3.6-35b": {**COMMON, "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "num_hidden_layers": 40,
                    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256,
                    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25,
                                        "mrope_section": [11, 11, 10]}}}
# Layers of the measured files
MEASURED = {"30b": (4, 8), "1.8b": (32,), "marco-mini": (4, 8), "qwen3-4b": (36,), "qwen3.6-35b": (4, 8)}
PEER_PROGRAM = os.path.join(HERE, "peer_llama.py")
CONVERT = os.path.join(ROOT, "build", "convert_here")  # convert.py takes hours for such files
# Variants: name -> suffix of the file and, for moe, types of weights and experts.
MOE = {"30b": {"moe, experts Q4, the rest Q8": (".bin", "--"), "moe, all Q4": ("-q4.bin", ("q4", "q4"))},
       "1.8b": {"moe, Q8": (".bin", "--"), "moe, Q4": ("-q4.bin", ("q4", "q4"))},
       "marco-mini": {"moe, all Q4": ("-q4.bin", ("q4", "q4"))},
       "qwen3-4b": {"moe, Q4": ("-q4.bin", ("q4", "q4"))},
       "qwen3.6-35b": {"moe, all Q4": ("-q4.bin", ("q4", "q4"))}}
PEER = {"30b": {"Q4_0": "-q4_0.gguf", "Q4_K_M": "-q4_k_m.gguf"},
        "1.8b": {"Q8_0": ".gguf", "Q4_0": "-q4_0.gguf", "Q4_K_M": "-q4_k_m.gguf"},
        **{shape: {"Q4_0": "-q4_0.gguf"} for shape in ("marco-mini", "qwen3-4b", "qwen3.6-35b")}}
BYTES = {"q8": 1, "q4": 0.53125}  # bytes per weight


def path_of(o, shape, layers, ending):
    return os.path.join(o.folder, f"{shape}-{layers}{ending}")


# ---- Files -----------------------------------------------------------------------------------------------------------

def mixtures(c, layers):
    """Return how many of the layers are mixtures."""
    return 0 if "num_experts" not in c else layers - (c["model_type"] == "hy_v3")


def tensors(c, layers):
    """Yield (name, shape, kind) of each tensor. "weight" and "wide" are Q8_0, the others F32."""
    d, h, experts = c["hidden_size"], c["head_dim"], c.get("num_experts")
    queries, keys = c["num_attention_heads"] * h, c["num_key_value_heads"] * h

    def units(at, end, f, count=()):
        for part, rows, cols in ("gate", f, d), ("up", f, d), ("down", d, f):
            yield f"{at}ffn_{part}{end}.weight", (*count, rows, cols), "weight"
    yield "token_embd.weight", (c["vocab_size"], d), "wide"
    yield "output_norm.weight", (d,), "one"
    mixed = "linear_num_key_heads" in c  # Gated DeltaNet in three of four layers
    if c["model_type"] == "hy_v3" or mixed:  # the others are tied
        yield "output.weight", (c["vocab_size"], d), "weight"
    for i in range(layers):
        at = f"blk.{i}."
        for name in "attn_norm", "post_attention_norm" if mixed else "ffn_norm":
            yield f"{at}{name}.weight", (d,), "one"
        if mixed and (i + 1) % 4:
            size, heads = c["linear_value_head_dim"], c["linear_num_value_heads"]
            all_values, all_keys = heads * size, c["linear_num_key_heads"] * c["linear_key_head_dim"]
            for name, rows, cols in (("attn_qkv", all_values + 2 * all_keys, d), ("attn_gate", all_values, d),
                                     ("ssm_alpha", heads, d), ("ssm_beta", heads, d), ("ssm_out", d, all_values)):
                yield f"{at}{name}.weight", (rows, cols), "weight"
            yield at + "ssm_conv1d.weight", (all_values + 2 * all_keys, c["linear_conv_kernel_dim"]), "one"
            yield at + "ssm_norm.weight", (size,), "one"
            yield at + "ssm_dt.bias", (heads,), "bias"
            yield at + "ssm_a", (heads,), "decay"
        else:
            for name in "attn_q_norm", "attn_k_norm":
                yield f"{at}{name}.weight", (h,), "one"
            gated = 1 + mixed  # the query's projection contains the gate
            for name, rows, cols in ("q", gated * queries, d), ("k", keys, d), ("v", keys, d), ("output", d, queries):
                yield f"{at}attn_{name}.weight", (rows, cols), "weight"
        if i < layers - mixtures(c, layers):
            yield from units(at, "", c["intermediate_size"])
            continue
        yield at + "ffn_gate_inp.weight", (experts, d), "gate"
        yield from units(at, "_exps", c["moe_intermediate_size"], (experts,))
        if c["model_type"] == "hy_v3":
            yield at + "exp_probs_b", (experts,), "bias"  # named as in llama.cpp 0c1e570
            yield from units(at, "_shexp", c["moe_intermediate_size"] * c["num_shared_experts"])
        if mixed:
            yield at + "ffn_gate_inp_shexp.weight", (d,), "gate"
            yield from units(at, "_shexp", c["shared_expert_intermediate_size"])


def writer_of(path, c, layers):
    """Return a GGUF writer with all keys and a minimal tokeniser (256 bytes, one merge): the benchmark processes no text."""
    import gguf
    import make_gguf
    w = gguf.GGUFWriter(path, make_gguf.ARCHITECTURES[c["model_type"]])
    for key, value in make_gguf.keys_of({**c, "num_hidden_layers": layers}).items():
        add = (w.add_bool if isinstance(value, bool) else w.add_uint32 if isinstance(value, int) else
               w.add_array if isinstance(value, list) else w.add_float32)
        add(f"{w.arch}.{key}", value)
    w.add_vocab_size(c["vocab_size"])
    letters = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 324))]  # GPT-2's characters for bytes
    texts = letters + ["!!"]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("hunyuan-dense")
    w.add_token_list(texts + [f"[PAD{i}]" for i in range(len(texts), c["vocab_size"])])
    w.add_token_types([1] * len(texts) + [5] * (c["vocab_size"] - len(texts)))
    w.add_token_merges(["! !"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    return w


def write(w, named, data_of):
    """Write tensors, `named` (name, shape of bytes or numbers, number type); data_of(name) returns their data."""
    import gguf
    for name, shape, kind in named:
        plain = kind == gguf.GGMLQuantizationType.F32
        w.add_tensor_info(name, shape, np.dtype(np.float32 if plain else np.uint8),
                          int(np.prod(shape)) * (4 if plain else 1), raw_dtype=None if plain else kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for name, _, _ in named:
        w.write_tensor_data(data_of(name))
    w.close()


def make_random(path, c, layers):
    """Write normally distributed numbers in Q8_0: tensors use random slices of the same few thousand rows."""
    import gguf
    q8, f32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
    random, piece = np.random.default_rng(1), 1 << 14
    pools = {kind: gguf.quants.quantize(random.normal(0, spread, (1 << 13, 2048)).astype(np.float32), q8)
             for kind, spread in (("weight", 0.02), ("wide", 20))}
    spreads, about = {"gate": 0.02, "bias": 0.01}, {name: (shape, kind) for name, shape, kind in tensors(c, layers)}

    def numbers(name):
        shape, kind = about[name]
        if kind in ("one", "decay"):
            return np.full(shape, 1 if kind == "one" else -0.5, np.float32)
        if kind in spreads:
            return random.normal(0, spreads[kind], shape).astype(np.float32)
        blocks, pool = np.empty((int(np.prod(shape)) // 32, 34), np.uint8), pools[kind].reshape(-1, 34)
        for at in range(0, len(blocks), piece):
            some, begin = blocks[at:at + piece], random.integers(len(pool) - piece)
            some[:] = pool[begin:begin + len(some)]
        return blocks.reshape(*shape[:-1], -1)
    w = writer_of(path, c, layers)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    w.add_quantization_version(2)
    write(w, [(name, (*shape[:-1], shape[-1] // 32 * 34), q8) if kind in pools else (name, shape, f32)
              for name, (shape, kind) in about.items()], numbers)


def cut(path, source, c, layers):
    """Write a file with the first `layers` layers of another file."""
    import gguf
    reader = gguf.GGUFReader(source)
    found, w = {t.name: t for t in reader.tensors}, writer_of(path, c, layers)
    for key in "general.file_type", "general.quantization_version":
        w.add_uint32(key, int(reader.fields[key].contents()))
    write(w, [(name, found[name].data.shape, found[name].tensor_type) for name, _, _ in tensors(c, layers)],
          lambda name: np.array(found[name].data))


def make(o):
    os.makedirs(o.folder, exist_ok=True)

    def once(path, step):
        if not os.path.exists(path):
            print(path, file=sys.stderr, flush=True)
            step(path + ".new")
            os.rename(path + ".new", path)

    def call(*command):
        subprocess.run(command, check=True, stdout=sys.stderr)
    for shape in o.shapes:
        c, most = SHAPES[shape], MEASURED[shape][-1]
        whole = path_of(o, shape, most, ".gguf")
        once(whole, lambda new: make_random(new, c, most))
        for layers in MEASURED[shape]:
            part = path_of(o, shape, layers, ".gguf")
            once(part, lambda new: cut(new, whole, c, layers))
            for side, (ending, types) in MOE[shape].items():
                if re.search(o.only, side):
                    once(path_of(o, shape, layers, ending),
                         lambda new: call(CONVERT, *types, part, new))
        for kind, ending in PEER[shape].items():
            if not re.search(o.only, kind):
                continue
            source = path_of(o, shape, most, ending)
            once(source, lambda new: call(sys.executable, PEER_PROGRAM, "quantise", whole, new, kind))
            for layers in MEASURED[shape]:
                once(path_of(o, shape, layers, ending), lambda new: cut(new, source, c, layers))


# ---- Turns -----------------------------------------------------------------------------------------------------------

def json_lines(*command):
    """Run a program; return the JSON lines that it prints."""
    done = subprocess.run([str(x) for x in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{command}: status {done.returncode}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def moe_turn(path, isa):
    def bench(batches, source, target):
        return json_lines(program("moe-bench"), "-m", path, "--beam", 1, "--threads", THREADS, "--reps", 1, "--batch",
                          ",".join(map(str, batches)), "--src-len", source, "--tgt-len", target,
                          *(["--isa", isa] if isa else []))
    machine, *models = bench(BATCHES, PROMPT, OUT + 1)  # the first of these tokens is computed with the prompt
    _, long = bench([1], LONG, 2)
    seconds, read = {f"prompt {LONG}": LONG / long["prompt_tok_s"]}, {}
    for m in models:
        seconds[f"decode {m['batch']}"] = m["batch"] / m["decode_tok_s"]
        seconds[f"out {m['batch']}"] = m["ms_median"] / 1e3
        if "experts_read" in m:
            read[str(m["batch"])] = m["experts_read"]
    return {"seconds": seconds, "experts": read, "gbytes_s": machine["dram_gbytes_s"], "isa": machine["isa"],
            "cpu": machine["cpu"], "cpus": min(m["cpu_share"] for m in models) * THREADS,
            "session_mb": {m["batch"]: m["session_mb"] for m in models}}


def peer(step, path, *options):
    found, = json_lines(sys.executable, PEER_PROGRAM, step, path, "--threads", THREADS, "--batch",
                        ",".join(map(str, BATCHES)), "--prompt", PROMPT, "--out", OUT, "--long", LONG, *options)
    return found


def run(o):
    for turn in range(o.rounds):
        for shape in o.shapes:
            sides = [(name, ending, None) for name, (ending, _) in MOE[shape].items()]
            for repacked in 1, 0:
                sides += [(f"{kind}, {'repacked' if repacked else 'not repacked'}", ending, repacked)
                          for kind, ending in PEER[shape].items()]
            for name, ending, repacked in sides[::-1] if turn % 2 else sides:
                for layers in MEASURED[shape]:
                    if not re.search(o.only, name):
                        continue
                    path = path_of(o, shape, layers, ending)
                    with open(path, "rb") as file:
                        while file.read(1 << 24):
                            pass
                    found = moe_turn(path, o.isa) if repacked is None else peer("bench", path, "--repack", repacked)
                    print(json.dumps({"shape": shape, "side": name, "layers": layers, **found}), flush=True)


def experts(o):
    for layers in MEASURED["30b"]:
        found = peer("experts", path_of(o, "30b", layers, PEER["30b"]["Q4_0"]))
        print(json.dumps({"shape": "30b", "side": "llama.cpp", "layers": layers, **found}), flush=True)


# ---- The table -------------------------------------------------------------------------------------------------------

def step_bytes(c, kind, expert_kind, read):
    """Return the bytes of weights that a step reads, given the number of experts that it reads per layer."""
    d, h, layers, count = c["hidden_size"], c["head_dim"], c["num_hidden_layers"], c.get("num_experts", 0)
    sparse, unit = mixtures(c, layers), 3 * d * c.get("moe_intermediate_size", 0)
    attention = layers * 2 * d * h * (c["num_attention_heads"] + c["num_key_value_heads"])
    if "linear_num_key_heads" in c:
        values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        mixed = d * (3 * values + 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + 2 * c["linear_num_value_heads"])
        attention = layers // 4 * (attention // layers + d * h * c["num_attention_heads"] + 3 * mixed)
    rest = attention + (layers - sparse) * 3 * d * c.get("intermediate_size", 0) + d * c["vocab_size"]
    rest += sparse * (unit * c.get("num_shared_experts", 0) + 3 * d * c.get("shared_expert_intermediate_size", 0))
    return rest * BYTES[kind] + sparse * (count * d * 4 + read * unit * BYTES[expert_kind])


def scaled(by_layers, layers):
    """Scale {layers: seconds} to the whole model; the difference between two files is the cost of added layers."""
    if len(by_layers) == 1:
        return by_layers[max(by_layers)]
    less, more = sorted(by_layers)
    return by_layers[more] + (layers - more) / (more - less) * (by_layers[more] - by_layers[less])


def rate(key, seconds):
    what, n = key.split()
    return {"prompt": int(n), "decode": int(n), "out": int(n) * OUT}[what] / seconds


def table(o):
    with open(o.results, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    keys = [f"decode {n}" for n in BATCHES] + [f"out {n}" for n in BATCHES] + [f"prompt {LONG}"]
    for shape, c in SHAPES.items():
        turns = {}
        for line in lines:
            if line["shape"] == shape and "seconds" in line:
                turns.setdefault(line["side"], {}).setdefault(line["layers"], []).append(line)
        turns = {side: of for side, of in turns.items() if set(of) == set(MEASURED[shape])}
        if not turns:
            continue
        whole, layers = {}, c["num_hidden_layers"]
        for side, of in turns.items():
            whole[side] = {key: rate(key, scaled({n: statistics.median(t["seconds"][key] for t in some)
                                                  for n, some in of.items()}, layers)) for key in keys}
        print(f"{shape}, tokens per second\n\n| | {' | '.join(keys)} |\n|---|{'---|' * len(keys)}")
        for side in turns:
            print(f"| {side} | {' | '.join(f'{whole[side][key]:.1f}' for key in keys)} |")
        for side in MOE[shape]:
            ours = side[-2:] if shape != "30b" else ""
            rivals = [whole[x] for x in turns if x not in MOE[shape] and (ours in ("", "Q4") or x.startswith("Q8_0"))]
            if side in turns and rivals:
                ratios = [whole[side][key] / max(x[key] for x in rivals) for key in keys]
                print(f"| {side} : llama.cpp's best | {' | '.join(f'{x:.2f}' for x in ratios)} |")
        for side in MOE[shape]:
            if side in turns:
                print(bounds(shape, side, turns[side], whole[side], keys))
        print()
    counted = {}
    for line in lines:
        for n, read in line.get("experts", {}).items():
            counted.setdefault(line["side"], {}).setdefault(int(n), []).append(read)
    for side, of in counted.items():
        print(f"experts read per layer and step, {side}: " +
              ", ".join(f"{statistics.mean(read):.1f} at batch {n}" for n, read in sorted(of.items())))


def bounds(shape, side, of, rates, keys):
    """Return a row of the table: the memory bandwidth and the shares of the memory bound that moe reaches."""
    c, some = SHAPES[shape], [t for turns in of.values() for t in turns]
    speed = statistics.median(t["gbytes_s"] for t in some)
    kinds = ("q4", "q4") if side.endswith("Q4") else ("q8", "q4") if shape == "30b" else ("q8", "q8")
    shares = []
    for key in keys:
        what, n = key.split()
        read = statistics.mean(t["experts"].get(n, 0) for t in some)
        least = step_bytes(c, *kinds, read) / speed / 1e9
        shares.append(f"{rates[key] * least / int(n):.2f}" if what == "decode" else "")
    return f"| {side} : its bound at {speed:.0f} GB/s | {' | '.join(shares)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="layers of 30B-A3B, instead of 4 and 8")
    commands = parser.add_subparsers(required=True)
    for name, step in ("make", make), ("run", run), ("experts", experts):
        p = commands.add_parser(name)
        p.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
        p.add_argument("folder")
        p.set_defaults(step=step)
        if step in (make, run):
            p.add_argument("--only", default="", help="only variants with matching names")
        if step is run:
            p.add_argument("--rounds", type=int, default=3)
            p.add_argument("--isa", help="of moe's kernels")
    p = commands.add_parser("table")
    p.add_argument("results")
    p.set_defaults(step=table)
    o = parser.parse_args()
    if o.layers:
        MEASURED["30b"], SHAPES["30b"]["num_hidden_layers"] = (o.layers,), o.layers
    o.step(o)


if __name__ == "__main__":
    main()
