#!/usr/bin/env python3
"""Create random Transformer checkpoints in Hugging Face's layout, without
transformers or PyTorch, and the results that transformer_numpy.py expects.

    tests/python tests/convert/make_transformers.py FAMILY FOLDER \\
        [--layout NAME] [--dtype f32|f16|bf16] [--sparse] [KEY=VALUE ...]
            create a checkpoint
    tests/python tests/convert/make_transformers.py --golden
            update tests/golden/transformers.json

FAMILY is nllb-moe, nllb, marian (base: swish) or marian-big (relu, </s> not 0).
KEY=VALUE changes config.json ("d_model=1024"); --shape NAME (e.g. nllb-600m)
selects a published shape. A weight depends only on tensor name, position and
seed, and is computed with integers and one multiplication. All machines get
equal weights, so the repository stores expected results only.
"""
import argparse
import json
import os
import struct
import sys
import zlib

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GOLDEN = os.path.join(ROOT, "tests", "golden", "transformers.json")

LANGUAGES = range(190, 196)  # ids of the language tokens in small M2M-like checkpoints
M2M = {"architectures": ["M2M100ForConditionalGeneration"], "model_type": "m2m_100", "activation_function": "relu",
       "bos_token_id": 0,
       "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "scale_embedding": True,
       "is_encoder_decoder": True,
       "max_position_embeddings": 128, "d_model": 64, "vocab_size": 200, "encoder_layers": 3, "decoder_layers": 2,
       "encoder_attention_heads": 4, "decoder_attention_heads": 8, "encoder_ffn_dim": 96, "decoder_ffn_dim": 112,
       "dropout": 0.1,
       "torch_dtype": "float32", "use_cache": True}
MIXTURE = {**M2M, "architectures": ["NllbMoeModel"], "model_type": "nllb-moe", "encoder_layers": 4, "decoder_layers": 4,
           "decoder_attention_heads": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 8,
           "expert_capacity": 64,
           "moe_eval_capacity_token_fraction": 1.0, "moe_token_dropout": 0.2, "second_expert_policy": "all",
           "router_bias": False,
           "normalize_router_prob_before_dropping": False, "batch_prioritized_routing": False,
           "router_dtype": "float32",
           "router_ignore_padding_tokens": False}
MARIAN = {"architectures": ["MarianMTModel"], "model_type": "marian", "activation_function": "swish", "bos_token_id": 0,
          "pad_token_id": 200, "eos_token_id": 0, "forced_eos_token_id": 0, "decoder_start_token_id": 200,
          "bad_words_ids": [[200]],
          "scale_embedding": True, "is_encoder_decoder": True, "max_position_embeddings": 96, "d_model": 64,
          "vocab_size": 201,
          "decoder_vocab_size": 201, "share_encoder_decoder_embeddings": True, "static_position_embeddings": True,
          "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
          "encoder_ffn_dim": 128,
          "decoder_ffn_dim": 128, "max_length": 96, "num_beams": 4, "tie_word_embeddings": True, "use_cache": True}
SPECIAL = {"bos_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
           "transformers_version": "4.57.6"}
FAMILIES = {  # family -> (config.json, generation_config.json)
    "nllb-moe": (MIXTURE, {**SPECIAL, "max_new_tokens": 24}),
    "nllb": (M2M, {**SPECIAL, "max_length": 25}),
    "marian": (MARIAN, {"bad_words_ids": [[200]], "bos_token_id": 0, "decoder_start_token_id": 200, "eos_token_id": 0,
                        "forced_eos_token_id": 0, "max_length": 25, "num_beams": 4, "pad_token_id": 200,
                        "renormalize_logits": True}),
    "marian-big": ({**MARIAN, "activation_function": "relu", "eos_token_id": 77, "forced_eos_token_id": 77,
                    "encoder_layers": 2},
                   {"bad_words_ids": [[200]], "decoder_start_token_id": 200, "eos_token_id": 77,
                    "forced_eos_token_id": 77,
                    "max_length": 25, "num_beams": 4, "pad_token_id": 200, "early_stopping": True})}
# these seeds give varied outputs, about half of which end before the limit
SEEDS = {"nllb-moe": 3, "nllb": 3, "marian": 20, "marian-big": 9}


def large(layers, width, ffn, heads, vocabulary, **more):
    return {"encoder_layers": layers, "decoder_layers": layers, "d_model": width, "encoder_ffn_dim": ffn,
            "decoder_ffn_dim": ffn,
            "encoder_attention_heads": heads, "decoder_attention_heads": heads, "vocab_size": vocabulary, **more}


SHAPES = {  # the shapes of transformer.md, section 3
    "nllb-moe-54b": ("nllb-moe", large(24, 2048, 8192, 16, 256206, num_experts=128, encoder_sparse_step=4,
                                       decoder_sparse_step=4,
                                       max_position_embeddings=1024)),
    "nllb-600m": ("nllb", large(12, 1024, 4096, 16, 256206, max_position_embeddings=1024)),
    "m2m-418m": ("nllb", large(12, 1024, 4096, 16, 128112, max_position_embeddings=1024)),
    "opus-base": ("marian", large(6, 512, 2048, 8, 58101, max_position_embeddings=512, decoder_vocab_size=58101,
                                  pad_token_id=58100,
                                  decoder_start_token_id=58100))}


# ---- Tensors ---------------------------------------------------------------------------------------------------------

def uniform(name, count, seed, first=0):
    """Return `count` float32 numbers in [-1, 1) from the upper 24 bits of splitmix64, starting at position `first`."""
    with np.errstate(over="ignore"):
        z = (np.arange(first, first + count, dtype=np.uint64)
             + np.uint64((zlib.crc32(name.encode()) << 20) + (seed << 56)))
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2 ** -23) - np.float32(1)


def shapes(c):
    """Return the shapes of the tensors that Hugging Face saves, by name without the prefix."""
    d, out = c["d_model"], {}
    mixture, marian = c["model_type"] == "nllb-moe", c["model_type"] == "marian"

    def pair(name, *shape):
        out.update({name + ".weight": shape, name + ".bias": shape[:1]})
    if c.get("share_encoder_decoder_embeddings", True):
        out["shared.weight"] = (c["vocab_size"], d)
    else:
        out["encoder.embed_tokens.weight"] = (c["vocab_size"], d)
        out["decoder.embed_tokens.weight"] = (c["decoder_vocab_size"], d)
    for side in ("encoder", "decoder"):
        ffn = c[side + "_ffn_dim"]
        for i in range(c[side + "_layers"]):
            layer = f"{side}.layers.{i}."
            attentions = ["self_attn"] + [("cross_attention" if mixture else "encoder_attn")] * (side == "decoder")
            for attention in attentions:
                for part in "kvq":
                    pair(f"{layer}{attention}.{part}_proj", d, d)
                pair(f"{layer}{attention}.out_proj", d, d)
                pair(f"{layer}{attention}_layer_norm", d)
            steps = [layer + "ffn." if mixture else layer]
            if mixture and c[side + "_sparse_step"] and (i + 1) % c[side + "_sparse_step"] == 0:
                out[layer + "ffn.router.classifier.weight"] = (c["num_experts"], d)
                steps = [f"{layer}ffn.experts.expert_{e}." for e in range(c["num_experts"])]
            for step in steps:
                pair(step + "fc1", ffn, d)
                pair(step + "fc2", d, ffn)
            pair(layer + ("ff_layer_norm" if mixture else "final_layer_norm"), d)
        if not marian:
            pair(side + ".layer_norm", d)
    if marian:
        out["final_logits_bias"] = (1, c["decoder_vocab_size"])
    if not c.get("tie_word_embeddings", True):
        out["lm_head.weight"] = (c.get("decoder_vocab_size", c["vocab_size"]), d)
    return out


def tensor(name, shape, c, seed):
    """Return a random tensor. Its amplitude is chosen for peaked and varied outputs, and for most sentences to end."""
    d, last = c["d_model"], name.split(".")[-2:][0]
    x = uniform(name, int(np.prod(shape)), seed).reshape(shape)
    marian = c["model_type"] == "marian"
    if last in ("shared", "embed_tokens", "lm_head"):
        x *= np.float32((3.4 if marian else 1.7) * d ** -0.5)
        x[c["eos_token_id"]] *= np.float32(2.2)
        x[c["pad_token_id"]] = 0
    elif name == "final_logits_bias":
        x[0, c["eos_token_id"]] += 2
        x[0, c["pad_token_id"]] = 0
    elif last.endswith("norm"):
        x = x * np.float32(0.2) + np.float32(name.endswith("weight"))
        if name in ("decoder.layer_norm.weight", f"decoder.layers.{c['decoder_layers'] - 1}.final_layer_norm.weight"):
            # random signs in the last norm prevent repeated tokens
            x *= np.where(uniform(name, len(x), seed, len(x)) < 0, np.float32(-1), np.float32(1))
            x *= np.float32(2 if marian else 4)
    elif name.endswith("bias"):
        x *= np.float32(0.2)
    else:
        gain = {"q_proj": 2.4, "k_proj": 2.4, "v_proj": 2, "out_proj": 2, "fc1": 3, "fc2": 3.5, "classifier": 4}[last]
        if marian and last in ("out_proj", "fc2"):
            gain *= 0.5
        x *= np.float32(gain * shape[1] ** -0.5)
        # opposite columns cancel the positive means of activations, which would make all tokens alike
        if last == "fc2":
            x[:, 1::2] = -x[:, ::2]
    return x


def configs(family, **changes):
    config, generation = FAMILIES[family]
    config, generation = {**config, **changes}, dict(generation)
    for key in generation:
        if key in changes:
            generation[key] = changes[key]
    if config["model_type"] == "marian":
        generation["bad_words_ids"] = config["bad_words_ids"] = [[config["pad_token_id"]]]
    return config, generation


# ---- Files -----------------------------------------------------------------------------------------------------------

KINDS = {"f32": ("F32", 4), "f16": ("F16", 2), "bf16": ("BF16", 2), "f64": ("F64", 8)}


def encode(array, dtype):
    if dtype == "bf16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2").tobytes()
    return np.ascontiguousarray(array).astype({"f32": "<f4", "f16": "<f2", "f64": "<f8"}[dtype]).tobytes()


def write_safetensors(path, tensors, read, dtype):
    """Write a safetensors file. `tensors` maps names to shapes; read(name) returns the numbers of a tensor."""
    head, at = {"__metadata__": {"format": "pt"}}, 0
    kind, size = KINDS[dtype]
    for name, shape in tensors.items():
        count = size * int(np.prod(shape))
        head[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + count]}
        at += count
    head = json.dumps(head).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name in tensors:
            file.write(encode(read(name), dtype))


def write_bin(path, tensors, read, dtype, legacy):
    from gnmt_checkpoints import write_torch
    write_torch(path, {n: read(n).astype({"f32": "<f4", "f16": "<f2", "f64": "<f8"}[dtype]) for n in tensors}, legacy)


def write(folder, config, generation, seed=1, layout="safetensors", dtype="f32", prefix=None,
          change=lambda tensors: tensors,
          shards=3):
    """Write the folder of a checkpoint. `layout` is safetensors, bin (zip) or legacy (before PyTorch 1.6), optionally
    with "-sharded". `change` may modify the tensors, a dictionary of name -> (shape, function)."""
    os.makedirs(folder, exist_ok=True)
    if prefix is None:
        prefix = "" if config["architectures"] == ["NllbMoeModel"] else "model."
    tensors = {(prefix if name not in ("final_logits_bias", "lm_head.weight") else "")
               + name: (shape, lambda n=name, s=shape: tensor(n, s, config, seed))
               for name, shape in shapes(config).items()}
    tensors = change(tensors)
    for name, value in (("config", config), ("generation_config", generation)):
        if value is not None:
            with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as file:
                json.dump(value, file, indent=2, sort_keys=True)
    kind, _, sharded = layout.partition("-")
    stem, end = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")

    def put(path, names):
        these, read = {n: tensors[n][0] for n in names}, lambda n: tensors[n][1]()
        if kind == "safetensors":
            write_safetensors(path, these, read, dtype)
        else:
            write_bin(path, these, read, dtype, kind == "legacy")
    names = list(tensors)
    if not sharded:
        return put(os.path.join(folder, f"{stem}.{end}"), names)
    weight_map = {}
    for k in range(shards):
        path = f"{stem}-{k + 1:05d}-of-{shards:05d}.{end}"
        part = names[k * len(names) // shards:(k + 1) * len(names) // shards]
        weight_map.update(dict.fromkeys(part, path))
        put(os.path.join(folder, path), part)
    total = sum(int(np.prod(shape)) for shape, _ in tensors.values()) * KINDS[dtype][1]
    with open(os.path.join(folder, f"{stem}.{end}.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file)
    return None


def make(folder, family, seed=None, layout="safetensors", dtype="f32", **changes):
    """Write the checkpoint of a family; `changes` override its config."""
    write(folder, *configs(family, **changes), seed=SEEDS[family] if seed is None else seed, layout=layout, dtype=dtype)


def write_sparse(folder, config, generation, seed=1, shards=20):
    """Write a checkpoint as BF16 shards. Only the first row of each tensor is stored; the other rows are zeros (holes
    in the files), so even large models need little disk space."""
    os.makedirs(folder, exist_ok=True)
    prefix = "" if config["architectures"] == ["NllbMoeModel"] else "model."
    names, weight_map = list(shapes(config).items()), {}
    for k in range(shards):
        path, part = f"model-{k + 1:05d}-of-{shards:05d}.safetensors", names[k * len(names) // shards:(k + 1) * len(
            names) // shards]
        head, at, rows = {}, 0, []
        for name, shape in part:
            count = 2 * int(np.prod(shape))
            head[prefix + name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + count]}
            rows.append((at, encode(first_row(name, shape, seed), "bf16")))
            at += count
        head = json.dumps(head).encode()
        with open(os.path.join(folder, path), "wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            file.truncate(8 + len(head) + at)
            for place, data in rows:
                file.seek(8 + len(head) + place)
                file.write(data)
        weight_map.update(dict.fromkeys((prefix + name for name, _ in part), path))
    for name, value in (("config", config), ("generation_config", generation),
                        ("model.safetensors.index", {"weight_map": weight_map})):
        with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as file:
            json.dump(value, file)


def first_row(name, shape, seed):
    """Return the first row of a tensor, the only one that write_sparse stores."""
    return uniform(name, shape[-1], seed) * np.float32(shape[-1] ** -0.5)


# ---- fairseq ---------------------------------------------------------------------------------------------------------

def fairseq_name(name):
    """Return fairseq's name of a tensor; fairseq numbers experts globally."""
    last = name.split(".")[-2:]
    if name == "shared.weight":
        return "decoder.embed_tokens.weight"
    if ".ffn.experts.expert_" in name:
        return name.replace(".ffn.experts.expert_", ".moe_layer.experts.")
    if ".ffn.router.classifier." in name:
        return name.replace(".ffn.router.classifier.", ".moe_layer.gate.wg.")
    if ".ff_layer_norm." in name:
        return name.replace(".ff_layer_norm.", ".final_layer_norm.")
    if last[0] in ("fc1", "fc2"):
        return name.replace(".ffn.fc", ".fc")
    return name.replace(".cross_attention", ".encoder_attn")


def write_fairseq(prefix, config, seed=1, per_rank=1, legacy=False, settings=None, change=lambda files: files):
    """Write a checkpoint's weights in fairseq's layout: PREFIX-shared.pt and PREFIX-rank-K.pt, or PREFIX.pt for a dense
    model. `change` may modify the files, {file: {tensor: array}}, before they are written."""
    from gnmt_checkpoints import Call, write_torch
    args = {"activation_fn": "relu", "encoder_normalize_before": True, "decoder_normalize_before": True,
            "max_source_positions": config["max_position_embeddings"], "moe_eom": config.get("moe_token_dropout", 0.0),
            "max_target_positions": config["max_position_embeddings"], "moe_expert_count": config.get("num_experts", 0),
            "encoder_attention_heads": config["encoder_attention_heads"], "share_all_embeddings": True,
            "decoder_attention_heads": config["decoder_attention_heads"], "moe_second_expert_policy": "all",
            "arch": "transformer", "langs": ["a", "b"], **(settings or {})}
    mixture = "num_experts" in config
    files = {prefix + ("-shared.pt" if mixture else ".pt"): {}}
    files.update({f"{prefix}-rank-{k}.pt": {} for k in range(config.get("num_experts", 0) // per_rank)})
    for name, shape in shapes(config).items():
        x, name = tensor(name, shape, config, seed), fairseq_name(name) if mixture or name == "shared.weight" else name
        parts = name.split(".moe_layer.experts.")
        if len(parts) == 2:
            number, _, rest = parts[1].partition(".")
            local = f"{parts[0]}.moe_layer.experts.{int(number) % per_rank}.{rest}"
            files[f"{prefix}-rank-{int(number) // per_rank}.pt"][local] = x
        else:
            files[next(iter(files))][name] = x
    first = files[next(iter(files))]
    first["encoder.embed_tokens.weight"] = first["decoder.output_projection.weight"] = \
        first["decoder.embed_tokens.weight"]
    first["encoder.embed_positions._float_tensor"] = np.zeros(1, np.float32)
    first["decoder.version"] = np.array([3], np.float32)
    for path, tensors in change(files).items():
        write_torch(path, {
            "args": None, "cfg": {"model": Call("argparse", "Namespace", state=args),
                                  "ddp": Call("fairseq.dataclass.constants", "DDP_BACKEND_CHOICES", "c10d")},
            "model": tensors, "optimizer_history": [{"num_updates": 7, "optimizer_name": "FairseqAdam"}],
            "extra_state": {"metrics": [(0, "loss", "AverageMeter", {"val": 1.5, "sum": 3})]}}, legacy)


# ---- Expected results ------------------------------------------------------------------------------------------------

def case(family, i, config=None):
    """Return (source ids, forced token or -1, target ids) of the i-th random sentence. `config` replaces the family's
    config."""
    config, r = config or configs(family)[0], (uniform(f"case {family}", 64, 1, 64 * i) + 1) / 2
    special = {config["eos_token_id"], config["pad_token_id"], 0, 1, 2, 3, *LANGUAGES}

    def pick(first, count):
        size = config["vocab_size"] if first == 8 else config.get("decoder_vocab_size", config["vocab_size"])
        words = np.array([x for x in range(size) if x not in special])
        return words[(r[first:first + count] * len(words)).astype(int)].tolist()
    end, languages = [config["eos_token_id"]], [] if config["model_type"] == "marian" else [LANGUAGES[int(x * 6)]
                                                                                            for x in r[:2]]
    return ([*languages[:1], *pick(8, 1 + int(r[2] * 12) if i else 1), *end], languages[1] if languages else -1,
            [*languages[1:], *pick(32, int(r[3] * 9)), *end])


BEAMS, CASES, MARGIN = (2, 4, 5), 40, 1e-4


def expect(model, family, i):
    """Return the reference's results for the i-th sentence, and the smallest margin of any decision. The keys of
    "beams" are widths, followed by "e" for early_stopping."""
    source, force, target = case(family, i)
    greedy, beams = model.greedy(source, force=force), {}
    target, margin = greedy.ids if i % 2 else target, greedy.margin
    for n in BEAMS:
        for early in (False, True):
            found = model.beam(source, n, force=force, early_stopping=early)
            margin = min(margin, found[0].margin)
            beams[f"{n}{'e' * early}"] = [[text(h.ids), round(h.score, 6)] for h in found]
    o = model.options({})
    logp = model.score(source, target, o["bad_words"] if o["renormalize"] else ())
    out = {"source": text(source), "force": force, "greedy": [text(greedy.ids), round(greedy.logprob, 6)],
           "beams": beams,
           "target": text(target), "logprobs": [round(float(logp[t, x]), 7) for t, x in enumerate(target)]}
    if model.mixture:
        out["experts"] = {name: " ".join("%d,%d" % tuple(sorted(pair)) for pair in best)
                          for name, best in model.experts}
    assert (model.pad not in [*target, *greedy.ids]
            and f" {model.pad} " not in json.dumps(beams).replace('"', " ")), (family, i)
    return out, margin


def text(ids):
    return " ".join(map(str, ids))


def write_golden():
    import tempfile

    import transformer_numpy
    lines = []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            make(folder, family)
            model = transformer_numpy.Transformer(folder)
        found, i = [], 0
        while len(found) < CASES:
            out, margin = expect(model, family, i)
            if margin > MARGIN:
                found.append(json.dumps(out, separators=(",", ":")))
            i += 1
        different = sum(json.loads(x)["beams"]["4"] != json.loads(x)["beams"]["4e"] for x in found)
        print(f"{family}: {CASES} of the first {i} sentences, beam 4 differs with early_stopping in {different}")
        lines.append(json.dumps(family) + ":[\n" + ",\n".join(found) + "]")
    with open(GOLDEN, "w", encoding="utf-8") as file:
        file.write("{" + ",\n".join(lines) + "}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", action="store_true")
    parser.add_argument("--layout", default="safetensors")
    parser.add_argument("--dtype", choices=list(KINDS), default="f32")
    parser.add_argument("--shape", metavar="NAME", choices=list(SHAPES), help=", ".join(SHAPES))
    parser.add_argument("--sparse", action="store_true",
                        help="store only the first rows of tensors, with holes for the rest")
    parser.add_argument("--seed", type=int)
    parser.add_argument("arguments", nargs="*", metavar="FAMILY FOLDER KEY=VALUE")
    args = parser.parse_args()
    if args.golden:
        return write_golden()
    family, changes = SHAPES[args.shape] if args.shape else (args.arguments.pop(0), {})
    folder, *settings = args.arguments
    changes = {**changes, **{key: json.loads(value) for key, value in (s.split("=", 1) for s in settings)}}
    if args.sparse:
        return write_sparse(folder, *configs(family, **changes))
    return make(folder, family, args.seed, args.layout, args.dtype, **changes)


if __name__ == "__main__":
    sys.exit(main())
