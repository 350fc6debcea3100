"""Create small random checkpoints of decoder-only models in Hugging Face's layout; a seed determines the weights."""
import base64
import itertools
import json
import math
import os
import struct

import numpy as np

V = 96
COMMON = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
          "vocab_size": V, "hidden_act": "silu", "attention_bias": False, "intermediate_size": 40, "bos_token_id": 1,
          "max_position_embeddings": 128, "torch_dtype": "bfloat16"}
WITHOUT_HEAD = {key: value for key, value in COMMON.items() if key != "head_dim"}
SPARSE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
CONFIGS = {
    "hy_v3": {**COMMON, **SPARSE, "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "rms_norm_eps": 1e-5,
              "tie_word_embeddings": False, "num_shared_experts": 1, "first_k_dense_replace": 1, "qk_norm": True,
              "router_scaling_factor": 2.826, "route_norm": True, "moe_router_use_sigmoid": True, "eos_token_id": 2,
              "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"}},
    "hunyuan_v1_dense": {**COMMON, "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense",
                         "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_qk_norm": True, "eos_token_id": 2,
                         "rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "hunyuan_v1_moe": {**COMMON, "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe",
                       "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_qk_norm": True, "eos_token_id": 2,
                       "rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
                       "intermediate_size": 20, "moe_intermediate_size": [20, 20, 20], "num_experts": 4,
                       "moe_topk": [2, 2, 2], "num_shared_expert": [1, 1, 1]},
    "qwen3_moe": {**COMMON, **SPARSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                  "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "norm_topk_prob": True, "rope_theta": 1e6,
                  "eos_token_id": 2, "num_attention_heads": 6, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "llama": {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5,
              "tie_word_embeddings": True, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None,
              "eos_token_id": 2, "num_attention_heads": 6, "rope_interleaved": False},
    "qwen3": {**COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6,
              "tie_word_embeddings": True, "rope_theta": 1e6, "eos_token_id": 2, "use_sliding_window": False,
              "sliding_window": None, "max_window_layers": 3, "num_attention_heads": 6},
    "qwen2": {**WITHOUT_HEAD, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6,
              "tie_word_embeddings": False, "rope_theta": 1e6, "eos_token_id": 2, "use_sliding_window": False,
              "sliding_window": 16, "max_window_layers": 2, "use_mrope": False},
    "mistral": {**COMMON, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False, "rope_theta": 1e4, "eos_token_id": 2, "sliding_window": 124},
    "mixtral": {**WITHOUT_HEAD, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False, "rope_theta": 1e6, "eos_token_id": 2, "sliding_window": None,
                "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}}
CONFIGS["gemma3_text"] = {
    **COMMON, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e6,
    "rope_local_base_freq": 100.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 5,
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "sliding_attention", "full_attention",
                                            "sliding_attention"],
    "query_pre_attn_scalar": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "eos_token_id": 2,
    "use_bidirectional_attention": False, "_sliding_window_pattern": 6}
DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 20, "linear_num_key_heads": 2,
         "linear_num_value_heads": 6}
LINEAR, SLIDING, FULL = "linear_attention", "sliding_attention", "full_attention"
CONFIGS["qwen3_5_text"] = {
    **COMMON, **DELTA, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "eos_token_id": 2, "head_dim": 16, "attn_output_gate": True,
    "layer_types": [LINEAR, LINEAR, FULL], "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                        "mrope_interleaved": True, "mrope_section": [2, 1, 1]}}
CONFIGS["qwen3_5_moe_text"] = {
    **{key: x for key, x in CONFIGS["qwen3_5_text"].items() if key != "intermediate_size"}, **SPARSE,
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "tie_word_embeddings": False,
    "shared_expert_intermediate_size": 24}
CONFIGS["lara_mini"] = {
    **COMMON, **SPARSE, **DELTA, "architectures": ["LaraMiniForCausalLM"], "model_type": "lara_mini",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "norm_topk_prob": True, "eos_token_id": 2, "sliding_window": 5,
    "num_hidden_layers": 4, "layer_types": [LINEAR, SLIDING, FULL, LINEAR], "shared_expert_intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
del CONFIGS["lara_mini"]["intermediate_size"]
CONFIGS["cohere"] = {
    **WITHOUT_HEAD, "architectures": ["CohereForCausalLM"], "model_type": "cohere", "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625, "rope_theta": 100.0, "use_qk_norm": False, "eos_token_id": 2, "model_max_length": 128}
CONFIGS["cohere2"] = {
    **CONFIGS["cohere"], "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "logit_scale": 0.25,
    "num_hidden_layers": 5, "sliding_window": 5, "sliding_window_pattern": 4, "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0, "order_of_interleaved_layers": "local_attn_first", "use_parallel_block": True,
    "use_gated_activation": True, "use_embedding_sharing": True, "layer_switch": 4, "cache_implementation": "hybrid"}
COHERE = "cohere", "cohere2"
QWEN_3_5 = "qwen3_5_text", "qwen3_5_moe_text"
DELTA_FAMILIES = *QWEN_3_5, "lara_mini"
FAMILIES = tuple(CONFIGS)
SPARSE_FAMILIES = "hy_v3", "hunyuan_v1_moe", "qwen3_moe", "mixtral", "qwen3_5_moe_text", "lara_mini"
NORMED_FAMILIES = ("hy_v3", "hunyuan_v1_dense", "hunyuan_v1_moe", "qwen3_moe", "qwen3", "gemma3_text",
                   "gemma3", *DELTA_FAMILIES)  # queries and keys have norms
WITHOUT_1 = "gemma3_text", "gemma3", *QWEN_3_5  # norms add 1 to their weights
GEMMA_NORMS = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 48, "rope_theta": 100.0}
GENERATION = {"do_sample": True, "temperature": 0.7, "top_k": -1, "top_p": 0.6, "repetition_penalty": 1.05}
ENDS = {family: [2] for family in FAMILIES} | {"qwen3_moe": [2, 3, 4]}


def bf16(x):
    """Round float32 to the nearest BF16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000).view(np.float32)


def is_sparse(c, i):
    if c["model_type"] == "hy_v3":
        return i >= c["first_k_dense_replace"]
    return c["model_type"] in SPARSE_FAMILIES and i not in c.get("mlp_only_layers", ())


def in_all(x):
    """Return a setting that may be a list of equal numbers, one per layer."""
    return x[0] if isinstance(x, list) else x


def chosen_of(c):
    """Return the number of experts per token."""
    return in_all(c["moe_topk"] if c["model_type"] == "hunyuan_v1_moe" else c["num_experts_per_tok"])


def head_of(c):
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def kind_of(c, i):
    """Return the kind of a layer's attention."""
    return c["layer_types"][i] if c.get("layer_types") else FULL


def delta_shapes(c, at, out):
    """Add the tensors of Gated DeltaNet, as published."""
    d, heads = c["hidden_size"], c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    convolved = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
    if c["model_type"] == "lara_mini":
        out[at + "in_proj.weight"] = (convolved + values + 2 * heads, d)
    else:
        out.update({f"{at}in_proj_{part}.weight": (rows, d)
                    for part, rows in (("qkv", convolved), ("z", values), ("b", heads), ("a", heads))})
    norm = "out_norm" if c["model_type"] == "lara_mini" else "norm"
    out.update({at + "conv1d.weight": (convolved, 1, c["linear_conv_kernel_dim"]), at + "A_log": (heads,),
                at + "dt_bias": (heads,), f"{at}{norm}.weight": (c["linear_value_head_dim"],),
                at + "out_proj.weight": (d, values)})


def shapes(c):
    """Return the shapes of a checkpoint's tensors by published name."""
    d, h, queries, keys = c["hidden_size"], head_of(c), c["num_attention_heads"], c["num_key_value_heads"]
    out = {"model.embed_tokens.weight": (c["vocab_size"], d), "model.norm.weight": (d,)}
    if not c.get("tie_word_embeddings", True):
        out["lm_head.weight"] = (c["vocab_size"], d)

    def units(at, f):
        out.update({f"{at}gate_proj.weight": (f, d), f"{at}up_proj.weight": (f, d), f"{at}down_proj.weight": (d, f)})
    for i in range(c["num_hidden_layers"]):
        at, hunyuan = f"model.layers.{i}.", c["model_type"].startswith("hunyuan")
        for name in GEMMA_NORMS if c["model_type"].startswith("gemma3") else GEMMA_NORMS[:2 - (
                c["model_type"] in COHERE)]:
            out[f"{at}{name}.weight"] = (d,)
        linear = kind_of(c, i) == LINEAR
        if linear:
            delta_shapes(c, at + "linear_attn.", out)
        wide = 2 if c["model_type"] in QWEN_3_5 else 1
        for part, rows, cols in () if linear else (("q", wide * queries * h, d), ("k", keys * h, d), ("v", keys * h, d),
                                                   ("o", d, queries * h)):
            out[f"{at}self_attn.{part}_proj.weight"] = (rows, cols)
            if c["model_type"] == "qwen2" and part != "o":
                out[f"{at}self_attn.{part}_proj.bias"] = (rows,)
        norms = ("query_layernorm", "key_layernorm") if hunyuan else ("q_norm", "k_norm")
        for name in norms if c["model_type"] in NORMED_FAMILIES and not linear else ():
            out[f"{at}self_attn.{name}.weight"] = (h,)
        if not is_sparse(c, i):
            units(at + "mlp.", c["intermediate_size"])
            continue
        if c["model_type"] == "mixtral":
            out[at + "block_sparse_moe.gate.weight"] = (c["num_local_experts"], d)
            for expert, part in itertools.product(range(c["num_local_experts"]), (1, 2, 3)):
                shape = (d, c["intermediate_size"]) if part == 2 else (c["intermediate_size"], d)
                out[f"{at}block_sparse_moe.experts.{expert}.w{part}.weight"] = shape
            continue
        gate = {"hy_v3": "mlp.router.gate", "hunyuan_v1_moe": "mlp.gate.wg"}.get(c["model_type"], "mlp.gate")
        out[f"{at}{gate}.weight"] = (c["num_experts"], d)
        for expert in range(c["num_experts"]):
            units(f"{at}mlp.experts.{expert}.", in_all(c["moe_intermediate_size"]))
        if c["model_type"] in DELTA_FAMILIES:
            units(at + "mlp.shared_expert.", c["shared_expert_intermediate_size"])
        if c["model_type"] in QWEN_3_5:
            out[at + "mlp.shared_expert_gate.weight"] = (1, d)
        if hunyuan:
            units(at + "mlp.shared_mlp.", c["intermediate_size"] * in_all(c["num_shared_expert"]))
        if c["model_type"] == "hy_v3":
            out[at + "mlp.expert_bias"] = (c["num_experts"],)
            units(at + "mlp.shared_mlp.", c["moe_intermediate_size"] * c["num_shared_experts"])
    return out


def arrays_of(c, seed):
    rng, out = np.random.default_rng(seed), {}
    for name, shape in shapes(c).items():
        x = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            x = (c["model_type"] not in WITHOUT_1 or "linear_attn" in name) + 0.4 * x
        elif name.endswith("A_log"):
            x = x - 1
        elif "conv1d" in name:
            x = 0.7 * x
        elif name.endswith("bias"):
            x = 0.2 * x if name.endswith("expert_bias") else 0.5 * x
        elif name not in ("model.embed_tokens.weight",):
            x = x * (3 if "gate.weight" in name or "gate.wg" in name else 1.6) / np.sqrt(shape[-1])
        out[name] = np.float32(x) if name.endswith("expert_bias") else bf16(x)
    head = out.get("lm_head.weight", out["model.embed_tokens.weight"])
    if c.get("tie_word_embeddings", True):
        head[:] = bf16(0.5 * head / c.get("logit_scale", 1) ** 0.5)
    more = 4 if c["model_type"].startswith("gemma3") else 2 if c["model_type"] in COHERE else 1.5
    head[ENDS[c["model_type"]]] = bf16(more * head[ENDS[c["model_type"]]])  # make some translations end
    return out


PREDICTED = {"hy_v3": ("model.layers.3.", {}), **dict.fromkeys(QWEN_3_5, ("mtp.layers.0.", {
    "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
    "final_layernorm": "mtp.norm"}))}  # published names of the layer that predicts the token after the next one


def predictor_of(c, seed=9):
    """Return the arrays of a layer that predicts the token after the next one, by published name."""
    d, (at, names), rng = c["hidden_size"], PREDICTED[c["model_type"]], np.random.default_rng(seed)
    layer = arrays_of({**c, "num_hidden_layers": 1, "first_k_dense_replace": 0, "layer_types": [FULL]}, seed)
    out = {name.replace("model.layers.0.", at): x for name, x in layer.items() if name.startswith("model.layers.0.")}
    out[names.get("eh_proj", at + "eh_proj") + ".weight"] = bf16(1.2 * rng.standard_normal((d, 2 * d)) / d ** 0.5)
    for norm in "enorm", "hnorm", "final_layernorm":
        one = c["model_type"] not in WITHOUT_1
        out[names.get(norm, at + norm) + ".weight"] = bf16(one + 0.4 * rng.standard_normal(d))
    return out


SECOND = {"mlp.router.gate.": "mlp.gate.", "mlp.gate.wg.": "mlp.gate.", "mlp.shared_mlp.": "mlp.shared_experts.",
          "mlp.expert_bias": "mlp.e_score_correction_bias", "block_sparse_moe.": "mlp.", ".w1.weight": ".gate_proj.weight",
          ".w2.weight": ".down_proj.weight", ".w3.weight": ".up_proj.weight"}


def second_name(name):
    for published, second in SECOND.items():
        name = name.replace(published, second)
    return name


def fused(c, arrays):
    """Return the arrays under the second published naming scheme, in which experts are stacked in one tensor."""
    out, arrays = {}, {second_name(name): x for name, x in arrays.items()}
    for name, x in arrays.items():
        if ".experts." not in name:
            out[name] = x
    for i in filter(lambda i: is_sparse(c, i), range(c["num_hidden_layers"])):
        at = f"model.layers.{i}.mlp.experts."
        part = lambda e, name: arrays[f"{at}{e}.{name}_proj.weight"]
        experts = range(c.get("num_experts") or c["num_local_experts"])
        out[at + "gate_up_proj"] = np.stack([np.concatenate([part(e, "gate"), part(e, "up")]) for e in experts])
        out[at + "down_proj"] = np.stack([part(e, "down") for e in experts])
    return out


def write_safetensors(path, arrays, exact=False):
    """Write a safetensors file: biases as F32, other arrays as BF16 or, if `exact`, as F32, and tuples of a number
    format, a shape and bytes as they are."""
    header, data = {}, []
    at = 0
    for name, x in arrays.items():
        if not isinstance(x, tuple):
            f32 = exact or name.endswith(("expert_bias", "correction_bias"))
            x = (("F32", x.shape, x.astype("<f4").tobytes()) if f32 else
                 ("BF16", x.shape, (x.view(np.uint32) >> 16).astype("<u2").tobytes()))
        dtype, shape, piece = x
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(piece)]}
        data.append(piece)
        at += len(piece)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data))


def write_config(folder, config, generation=None):
    for name, values in ("config", config), ("generation_config", generation):
        if values is not None:
            with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as file:
                json.dump(values, file)


def write_zeros(folder, config):
    """Write a checkpoint with zero weights; the files are sparse, so even large models need little disk space."""
    header, at = {}, 0
    for name, shape in shapes(config).items():
        end = at + 2 * math.prod(shape)
        header[name], at = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}, end
    text = json.dumps(header).encode()
    write_config(folder, config)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def write(folder, config, arrays, generation=None, shards=1):
    write_config(folder, config, generation)
    if shards == 1:
        return write_safetensors(os.path.join(folder, "model.safetensors"), arrays)
    names, weight_map = list(arrays), {}
    for k in range(shards):
        shard, some = f"model-{k + 1:05d}-of-{shards:05d}.safetensors", names[k::shards]
        write_safetensors(os.path.join(folder, shard), {name: arrays[name] for name in some})
        weight_map.update(dict.fromkeys(some, shard))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"weight_map": weight_map}, file)


TOKENISER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "golden", "byte-bpe.json")


def write_tokeniser(folder, kind="A"):
    """Write a small tokeniser of tests/golden with ids up to 424; return the results that `tokenizers` gave with it."""
    with open(TOKENISER, encoding="utf-8") as file:
        golden = json.load(file)
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
        json.dump(golden["tokenizers"][kind], file)
    return golden["cases"][kind]


def ranks():
    """Return the ranks of tiktoken's format, {token: rank}, for the tokeniser "C" of tests/golden."""
    import byte_bpe
    with open(TOKENISER, encoding="utf-8") as file:
        vocabulary = json.load(file)["tokenizers"]["C"]["model"]["vocab"]
    bytes_of = {text: byte for byte, text in byte_bpe.BYTE_CHARS.items()}
    return {bytes(bytes_of[c] for c in text): i for text, i in vocabulary.items()}


def write_ranks(folder):
    with open(os.path.join(folder, "hy.tiktoken"), "wb") as file:
        file.writelines(base64.b64encode(token) + b" %d\n" % i for token, i in ranks().items())


def make(folder, family, seed=5, second=False, shards=1, **changes):
    """Write a checkpoint; return its config and its float64 arrays by published name."""
    config = {**CONFIGS[family], **changes}
    arrays = arrays_of(config, seed)
    ends = ENDS[family]
    write(folder, config, fused(config, arrays) if second else arrays,
          {**GENERATION, "eos_token_id": ends if len(ends) > 1 else ends[0]}, shards)
    return config, {name: x.astype(np.float64) for name, x in arrays.items()}


SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
         "intermediate_size": 8, "moe_intermediate_size": 4, "num_experts": 3, "num_experts_per_tok": 2,
         "max_position_embeddings": 16}


def small_changes(family, **changes):
    """Return changes of a family's config that make a checkpoint of a few kilobytes."""
    changes = {**SMALL, **changes}
    if family == "mixtral":
        changes = {**changes, "num_local_experts": changes["num_experts"], "num_experts": None,
                   "moe_intermediate_size": None}
    elif family == "hunyuan_v1_moe":
        changes = {**changes, "moe_intermediate_size": [4, 4], "moe_topk": [2, 2], "num_shared_expert": 1,
                   "num_experts_per_tok": None}
    elif family not in SPARSE_FAMILIES:
        changes = {key: x for key, x in changes.items() if "expert" not in key}
    if family in DELTA_FAMILIES:
        changes["layer_types"] = [LINEAR, FULL]
    elif family == "gemma3_text":
        changes["layer_types"] = [SLIDING, FULL]
    return changes


def small(at, family, **changes):
    """Write a checkpoint of a few kilobytes, as make() does."""
    return make(at, family, **small_changes(family, **changes))


def small_pieces():
    """Return a SentencePiece model of type BPE with tokens for bytes."""
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256)), ("\u2581", 1),
              ("a", 1), ("b", 1), ("ab", 1), ("\u2581ab", 1), ("<x>", 4)]
    out = b""
    for i, (text, kind) in enumerate(pieces):
        piece = bytes([0x0a, len(text.encode())]) + text.encode() + b"\x15" + struct.pack("<f", -i)
        piece += bytes([0x18, kind])
        out += bytes([0x0a, len(piece)]) + piece
    return out + b"\x12\x02\x18\x02" + b"\x1a\x02\x20\x00"


FP8 = {"row": ("_scale", {"quant_method": "compressed-tensors", "format": "float-quantized"}),
       "block": ("_scale_inv", {"quant_method": "fp8", "weight_block_size": [4, 3]})}


def write_fp8(at, family, name, **changes):
    """Write a folder with weights in FP8, with a scale per row or per block."""
    config, arrays = small(at, family, **changes)
    end, settings = FP8[name]
    for key, x in list(arrays.items()):
        if key.endswith("_proj.weight"):
            rows, cols = x.shape
            shape = (rows, 1) if name == "row" else (-(-rows // 4), -(-cols // 3))
            arrays[key] = "F8_E4M3", x.shape, bytes(i % 126 for i in range(x.size))
            arrays[key + end] = "F32", shape, struct.pack("<f", 0.01) * (shape[0] * shape[1])
        else:
            arrays[key] = x.astype(np.float32)
    write_config(at, {**config, "quantization_config": settings}, GENERATION)
    write_safetensors(at + "/model.safetensors", arrays)


def make_multimodal(folder, family, seed=5, **changes):
    """Write a checkpoint of Qwen3.5 as published: text_config, other prefixes, vision tensors, a predictor."""
    config = {**CONFIGS[family], "vocab_size": 448, **changes}
    outer = {"model_type": family.removesuffix("_text"), "vision_config": {"depth": 1}, "image_token_id": 90,
             "architectures": [config["architectures"][0].replace("CausalLM", "ConditionalGeneration")],
             "text_config": {key: x for key, x in config.items() if key != "architectures"}}
    arrays = {name.replace("model.", "model.language_model.", 1): x
              for name, x in fused(config, arrays_of(config, seed)).items()}
    for name in "model.visual.patch_embed.proj.weight", "mtp.fc.weight", "mtp.layers.0.mlp.gate.weight":
        arrays[name] = np.zeros((3, 4), np.float32)
    write(folder, outer, arrays, {**GENERATION, "eos_token_id": 2})
    return config


def prompt(i):
    """Return the i-th random prompt: 1 to 40 tokens, which may include end tokens."""
    rng = np.random.default_rng(1000 + i)
    return [1, *map(int, rng.integers(0, V, rng.integers(0, 12) if i else 39))]
