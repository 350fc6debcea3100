"""Write checkpoints of make_decoder.py as GGUF files, using the package `gguf` and the names of llama.cpp's converter.

    write(path, config, arrays, ...)         write one file or several parts
    keys_of(config)                          return the metadata {key: value}
"""
import json
import re

import gguf
import numpy as np

from make_decoder import COHERE, QWEN_3_5, SPARSE_FAMILIES, TOKENISER, chosen_of, head_of, in_all, second_name

ARCHITECTURES = {"hy_v3": "hy_v3", "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe",
                 "qwen3_moe": "qwen3moe", "llama": "llama", "qwen3": "qwen3", "qwen2": "qwen2", "mistral": "llama",
                 "mixtral": "llama", "gemma3_text": "gemma3", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
                 "cohere": "command-r", "cohere2": "cohere2"}
TOKENISERS = {"hy_v3": "A", "hunyuan_v1_dense": "A", "hunyuan_v1_moe": "A", "qwen3_moe": "C", "qwen3": "C",
              "qwen2": "C", "llama": "smollm", "mistral": "llama2", "mixtral": "llama2",
              "gemma3_text": "gemma", "qwen3_5_text": "C", "qwen3_5_moe_text": "C", "lara_mini": "C",
              "cohere": "cohere", "cohere2": "cohere"}
PRE = {"A": "hunyuan-dense", "C": "qwen2", "smollm": "smollm", "cohere": "command-r"}
MIXED_NAMES = (("post_attention_layernorm", "post_attention_norm"), ("linear_attn.in_proj_qkv", "attn_qkv"),
               ("linear_attn.in_proj_z", "attn_gate"), ("linear_attn.in_proj_b", "ssm_beta"),
               ("linear_attn.in_proj_a", "ssm_alpha"), ("linear_attn.conv1d", "ssm_conv1d"),
               ("linear_attn.A_log", "ssm_a"), ("linear_attn.dt_bias", "ssm_dt.bias"), ("linear_attn.norm", "ssm_norm"),
               ("linear_attn.out_proj", "ssm_out"), ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
               *((f"mlp.shared_expert.{x}_proj", f"ffn_{x}_shexp") for x in ("gate", "up", "down")))
GEMMA_NAMES = (("post_attention_layernorm", "post_attention_norm"), ("pre_feedforward_layernorm", "ffn_norm"),
               ("post_feedforward_layernorm", "post_ffw_norm"))
NAMES = (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
         ("model.layers.", "blk."), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
         *((f"self_attn.{x}_proj", f"attn_{x}") for x in "qkv"), ("self_attn.o_proj", "attn_output"),
         ("self_attn.query_layernorm", "attn_q_norm"), ("self_attn.key_layernorm", "attn_k_norm"),
         ("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"),
         ("block_sparse_moe.", "mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
         ("mlp.router.gate", "ffn_gate_inp"), ("mlp.gate.wg.", "ffn_gate_inp."), ("mlp.gate.", "ffn_gate_inp."),
         ("mlp.expert_bias", "exp_probs_b.bias"),
         *((f"mlp.shared_mlp.{x}_proj", f"ffn_{x}_shexp") for x in ("gate", "up", "down")),
         *((f"mlp.{x}_proj", f"ffn_{x}") for x in ("gate", "up", "down")))
BYTE = re.compile("<0x[0-9A-F]{2}>")
EXPERT = re.compile(r"(.*\.)mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def keys_of(c):
    """Return the metadata {key: value} of a config; keys lack the architecture prefix."""
    theta = c.get("rope_theta") or c.get("rope_parameters", {}).get("rope_theta", 1e4)
    alpha, head = (c.get("rope_scaling") or {}).get("alpha", 1), head_of(c)
    window = c.get("sliding_window") if c["model_type"] == "mistral" else None
    keys = {"block_count": c["num_hidden_layers"],
            "context_length": min(c["max_position_embeddings"], window or c["max_position_embeddings"]),
            "embedding_length": c["hidden_size"],
            "attention.head_count": c["num_attention_heads"], "attention.head_count_kv": c["num_key_value_heads"],
            "attention.key_length": head, "attention.value_length": head,
            "rope.freq_base": float(theta * alpha ** (head / (head - 2)))}
    if c["model_type"] in COHERE:
        keys.update({"attention.layer_norm_epsilon": float(c["layer_norm_eps"]), "rope.scaling.type": "none",
                     "logit_scale": float(c["logit_scale"]), "rope.dimension_count": head})
    else:
        keys["attention.layer_norm_rms_epsilon"] = float(c["rms_norm_eps"])
    if c["model_type"] == "cohere2":
        keys.update({"attention.sliding_window": c["sliding_window"], "vocab_size": c["vocab_size"]})
    if "intermediate_size" in c:
        keys["feed_forward_length"] = c["intermediate_size"]
    if c["model_type"] == "gemma3_text":
        keys.update({"attention.sliding_window": c["sliding_window"], "attention.sliding_window_pattern": 3,
                     "rope.freq_base_swa": c["rope_local_base_freq"]})
        if c["rope_scaling"]:
            keys.update({"rope.scaling.type": "linear", "rope.scaling.factor": float(c["rope_scaling"]["factor"])})
    if c["model_type"] in QWEN_3_5:
        turned = int(head * c["rope_parameters"]["partial_rotary_factor"])
        keys.update({"rope.dimension_count": turned,
                     "rope.dimension_sections": c["rope_parameters"]["mrope_section"] + [0],
                     "ssm.conv_kernel": c["linear_conv_kernel_dim"], "ssm.state_size": c["linear_key_head_dim"],
                     "ssm.group_count": c["linear_num_key_heads"], "ssm.time_step_rank": c["linear_num_value_heads"],
                     "ssm.inner_size": c["linear_num_value_heads"] * c["linear_value_head_dim"],
                     "full_attention_interval": 4})
    if c["model_type"] in SPARSE_FAMILIES:
        keys.update({"expert_count": c.get("num_experts") or c["num_local_experts"],
                     "expert_used_count": chosen_of(c)})
    if "moe_intermediate_size" in c:
        keys["expert_feed_forward_length"] = in_all(c["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in c:
        keys["expert_shared_feed_forward_length"] = c["shared_expert_intermediate_size"]
    if c["model_type"] == "hunyuan_v1_moe":
        keys["expert_shared_feed_forward_length"] = c["intermediate_size"] * in_all(c["num_shared_expert"])
    if c["model_type"] == "hy_v3":
        keys.update({"expert_shared_feed_forward_length": c["moe_intermediate_size"] * c["num_shared_experts"],
                     "expert_weights_norm": True, "expert_weights_scale": c["router_scaling_factor"],
                     "expert_gating_func": 2})
    return keys


def interleaved(x, heads):
    """Interleave query and key rows as llama.cpp's converter does for `llama`."""
    return x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def tiled(c, name, x):
    """Change a tensor of Gated DeltaNet as llama.cpp's converter does: value heads that share a key head are
    `linear_num_key_heads` apart, not adjacent, and A_log becomes -exp(A_log)."""
    keys, heads, size = (c[f"linear_{x}"] for x in ("num_key_heads", "num_value_heads", "value_head_dim"))
    part, first = name.split("linear_attn.")[1], 0
    if part == "A_log":
        x = np.float32(-np.exp(x.astype(np.float64)))
    if part == "norm.weight":
        return x
    if part.startswith(("in_proj_qkv", "conv1d")):
        first = 2 * keys * c["linear_key_head_dim"]
    if part == "conv1d.weight":
        x = x[:, 0]
    one = 1 if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight") else size
    y = x.T if part == "out_proj.weight" else x
    more = y[first:].reshape(keys, heads // keys, one, *y.shape[1:]).swapaxes(0, 1).reshape(-1, *y.shape[1:])
    y = np.concatenate([y[:first], more])
    return np.ascontiguousarray(y.T if part == "out_proj.weight" else y)


def arrays_of(c, arrays, fused=False):
    """Return the tensors by llama.cpp's names; `fused` merges the gate and up matrices of experts."""
    out, experts = {}, {}
    for name, x in arrays.items():
        expert = EXPERT.fullmatch(second_name(name))
        if expert:
            experts.setdefault((expert[1], expert[3]), []).append(x)
            continue
        heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}.get(name.split(".")[-2])
        x = interleaved(x, heads) if heads and ARCHITECTURES[c["model_type"]] == "llama" else x
        gemma, qwen = c["model_type"] == "gemma3_text", c["model_type"] in QWEN_3_5
        if (gemma or qwen) and name.endswith("norm.weight") and "linear_attn" not in name:
            x = x + np.float32(1)
        if qwen and "linear_attn" in name:
            x = tiled(c, name, x)
        for a, b in (GEMMA_NAMES if gemma else MIXED_NAMES if qwen else ()) + NAMES:
            name = name.replace(a, b)
        out[name] = x
    for (at, part), matrices in experts.items():
        at = at.replace("model.layers.", "blk.")
        if fused and part == "gate":
            both = [np.concatenate(pair) for pair in zip(matrices, experts[at.replace("blk.", "model.layers."), "up"])]
            out[at + "ffn_gate_up_exps.weight"] = np.stack(both)
        elif not fused or part == "down":
            out[f"{at}ffn_{part}_exps.weight"] = np.stack(matrices)
    return out


def tokens_of(family, size, kind=None):
    """Return (tokens, types, merges) of the family's, or another, small tokeniser in tests/golden."""
    with open(TOKENISER, encoding="utf-8") as file:
        values = json.load(file)["tokenizers"][kind or TOKENISERS[family]]
    texts, kinds = [f"[PAD{i}]" for i in range(size)], [5] * size
    for text, i in values["model"]["vocab"].items():
        texts[i], kinds[i] = text, 6 if BYTE.fullmatch(text) else 1
    for token in values["added_tokens"]:
        texts[token["id"]], kinds[token["id"]] = token["content"], 3 if token["special"] else 4
    merges = values["model"]["merges"]
    return texts, kinds, [x if isinstance(x, str) else " ".join(x) for x in merges]


def quantised(x, kind):
    """Quantise x to a type of GGMLQuantizationType, given by name; return (its bytes, the dequantised numbers)."""
    data = gguf.quants.quantize(np.ascontiguousarray(x, np.float32), gguf.GGMLQuantizationType[kind])
    return data, gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).astype(np.float32)


def write(path, c, arrays, kinds=None, fused=False, pieces=0, tokens=False, change=None, **more):
    """Write a GGUF file. `kinds` maps tensor names to formats (default F32), `pieces` is the number of tensors per
    part, `change` modifies the tensors. `more` sets keys, spelt with "__" for dots; None removes a key."""
    w = gguf.GGUFWriter(path, ARCHITECTURES[c["model_type"]], split_max_tensors=pieces)
    keys = {f"{w.arch}.{key}": value for key, value in keys_of(c).items()}
    keys.update({"tokenizer.ggml.bos_token_id": c["bos_token_id"], "tokenizer.ggml.eos_token_id": c["eos_token_id"]})
    if tokens:
        texts, kinds_of_tokens, merges = tokens_of(c["model_type"], c["vocab_size"])
        keys.update({"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds_of_tokens})
        if 6 in kinds_of_tokens:
            keys.update({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
                         "tokenizer.ggml.scores": [-float(i) for i in range(len(texts))]})
            if TOKENISERS[c["model_type"]] == "gemma":
                keys["tokenizer.ggml.add_space_prefix"] = False
        else:
            keys.update({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges,
                         "tokenizer.ggml.pre": PRE[TOKENISERS[c["model_type"]]]})
    keys.update({key.replace("__", "."): value for key, value in more.items()})
    for key, value in keys.items():
        if value is None:
            continue
        if isinstance(value, bool):
            w.add_bool(key, value)
        elif isinstance(value, int):
            w.add_uint32(key, value)
        elif isinstance(value, float):
            w.add_float32(key, value)
        elif isinstance(value, str):
            w.add_string(key, value)
        else:
            w.add_array(key, value)
    tensors = arrays_of(c, arrays, fused)
    for name, x in (change(tensors) if change else tensors).items():
        kind = (kinds or {}).get(name, "F32")
        data = np.ascontiguousarray(x, np.float32) if kind == "F32" else quantised(x, kind)[0]
        w.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
