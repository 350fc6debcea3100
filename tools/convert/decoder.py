"""Read decoder-only models in Hugging Face's layout: Hunyuan's translation models (Hy-MT2, HY-MT1.5, Hunyuan-MT), Qwen2
and Qwen3, Llama, Mistral and Mixtral, Lara, Cohere, and the text part of Gemma 3 and Qwen3.5.

    found = read_decoder(folder, say, row)     `found` as from hf.read_hf; row: name in prompts.json (None: automatic)

A folder contains config.json, generation_config.json and safetensors, in one file or in shards with an index. Experts
may be stored as one tensor per expert and matrix, as published, or as two tensors for all experts. Options of a
configuration that the engine does not support are rejected by name.
"""
import json
import math
import os
import re
import types

import numpy as np

import byte_bpe
import fp8
import hf
import hf_tokens
import moefile
import prompts
import tables
from hf_json import read_json, short
from moefile import FormatError

ROWS = tables.read("decoder.inc")
QWEN, LARA = 1, 2  # values of `delta`
FAMILIES = {name: architecture for name, architecture, *_ in ROWS["FAMILY"]}
ABOUT = {name: types.SimpleNamespace(norm=norm, tied=bool(tied), epsilon=epsilon, dense=bool(dense),
                                     biased=bool(biased), windowed=bool(windowed), gemma=bool(gemma),
                                     gated=delta == QWEN, fused=delta == LARA, delta=delta > 0,
                                     offset=bool(gemma) or delta == QWEN, cohere=cohere)
         for name, _, _, norm, tied, epsilon, dense, biased, windowed, gemma, delta, cohere in ROWS["FAMILY"]}
PREDICTED, PREDICTOR = ROWS["PREDICTED"], ROWS["PREDICTOR"]
SHARED = "embed_tokens.weight", "shared_head.head.weight"
SKIPPED = [(what, tuple(prefixes.split())) for what, prefixes in ROWS["SKIPPED"]]
MAX_POSITIONS = 1 << 15  # rows of the position table: translations are shorter than the published context lengths
DEFAULT_LIMIT, MOST = 512, (1 << 31) - 1
NO_EFFECT = hf.NO_EFFECT | tables.words(ROWS["IGNORED"], "decoder")
MIXTURE_KEYS = tables.words(ROWS["IGNORED"], "dense")
ROPE_NO_EFFECT = tables.words(ROWS["IGNORED"], "rope")


# ---- config.json -----------------------------------------------------------------------------------------------------

def is_decoder(folder):
    """Return True if config.json names a decoder-only model, and False if hf.py reads it; reject all other models."""
    path = os.path.join(folder, "config.json")
    if not os.path.isdir(folder):
        return False
    if not os.path.lexists(path):
        raise FormatError(f"{folder}: " + ("config.json is missing: not a model in Hugging Face's layout"
                                           if os.listdir(folder) else "the folder is empty"))
    found = read_json(path).get("model_type")
    if not isinstance(found, str) or found not in {**hf.FAMILIES, **FAMILIES}:
        raise FormatError(f"config.json: model_type {short(found)} is not supported: expected "
                          f"{', '.join({**hf.FAMILIES, **FAMILIES})}")
    return found in FAMILIES


def first_of(c, keys, kind, default=None, **limits):
    """Return the value of a key with several names; raise FormatError if the values differ."""
    found = {key: c.get(key, kind, **limits) for key in keys if c.raw(key) is not None}
    if len(set(found.values())) > 1:
        raise FormatError(f"{c.path}: {' and '.join(f'{key} {value}' for key, value in found.items())} differ")
    return next(iter(found.values()), None) if found else c.get(keys[0], kind, default, **limits)


def read_frequencies(c, m):
    """Return the rotary frequencies, one per pair of columns, as changed by Hunyuan's alpha or Llama 3.1's factors."""
    new, old = c.raw("rope_parameters"), c.raw("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise FormatError(f"{c.path}: {key} is {short(value)}, which is not supported: expected an object")
    about = {**(old or {}), **(new or {})}
    inside = hf.Config(f"{c.path}: rope_parameters", about)
    given = inside if about.get("rope_theta") is not None else c
    theta = given.get("rope_theta", float, 1e4 if m.family == "llama" else None, least=1.0, most=1e12)
    kinds = [value for value in (about.get("type"), about.get("rope_type")) if value is not None] or ["default"]
    kind = kinds[0] if kinds[0] == kinds[-1] else kinds
    alpha = about.get("alpha") is not None
    if kind == "dynamic" and m.family.startswith("hunyuan") and alpha:
        if m.head < 4:
            raise FormatError(f"{c.path}: head_dim is {m.head}, which is not supported with alpha")
        theta *= inside.get("alpha", float, least=1.0, most=1e9) ** (m.head / (m.head - 2))
    elif kind != "default" and not (kind == "llama3" and m.family == "llama") \
            and not (kind == "linear" and ABOUT[m.family].gemma):
        raise FormatError(f"{c.path}: rope type {short(kind)}{' with alpha' if alpha else ''}: only 'default', "
                          "Hunyuan's 'dynamic' with alpha, Llama's 'llama3' and Gemma's 'linear' are supported")
    elif alpha and inside.get("alpha", float) != 1.0:
        raise FormatError(f"{c.path}: alpha {short(about['alpha'])} is not supported with rope type {kind!r}")
    if given is inside:
        c.only("rope_theta", about["rope_theta"])
    if not ABOUT[m.family].gated:
        inside.only("partial_rotary_factor", 1.0)
    frequencies = np.array([math.pow(theta, -2 * i / m.turned) for i in range(m.turned // 2)])
    if kind == "llama3":
        frequencies = slower(inside, frequencies)
    if kind == "linear":
        frequencies = frequencies / inside.get("factor", float, least=1.0, most=1e6)
    inside.end(ROPE_NO_EFFECT, ("type", "rope_type", "rope_theta", "alpha", "partial_rotary_factor"))
    return frequencies


def slower(c, frequencies):
    """Divide frequencies with fewer than `low_freq_factor` turns within the original training length by `factor`; keep
    frequencies with more than `high_freq_factor` turns, and interpolate linearly in between."""
    factor, low = c.get("factor", float, least=1.0, most=1e6), c.get("low_freq_factor", float, least=1e-3, most=1e6)
    high = c.get("high_freq_factor", float, least=1e-3, most=1e6)
    turns = c.get("original_max_position_embeddings", int, least=1, most=1 << 24) * frequencies / (2 * np.pi)
    if high <= low:
        raise FormatError(f"{c.path}: high_freq_factor {high} must be greater than low_freq_factor {low}")
    fast = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (fast + (1 - fast) / factor)


def read_kinds(c, m, period):
    """Read the windows of layers: of all but each `period`-th, unless the configuration has a period or a list."""
    pattern = first_of(c, ("sliding_window_pattern", "_sliding_window_pattern"), int, period, least=1, most=MOST)
    sliding, full = "sliding_attention", "full_attention"
    kinds = c.raw("layer_types", [sliding if (i + 1) % pattern else full for i in range(m.layers)])
    if not isinstance(kinds, list) or len(kinds) != m.layers or any(x not in (sliding, full) for x in kinds):
        raise FormatError(f"{c.path}: layer_types is {short(kinds)}, expected {sliding!r} or {full!r} per layer")
    window = c.get("sliding_window", int, least=1, most=1 << 20)
    m.windows = [window if kind == sliding else 0 for kind in kinds]


def read_windows(c, m):
    """Read Gemma's windows and the frequencies of the layers that have one."""
    sliding, full = "sliding_attention", "full_attention"
    read_kinds(c, m, 6)
    m.query_scale = math.sqrt(m.head / c.get("query_pre_attn_scalar", float, least=1.0, most=1e6))
    both, local = c.raw("rope_parameters"), {"rope_theta": c.get("rope_local_base_freq", float, 1e4)}
    if isinstance(both, dict) and full in both:
        c.raw("rope_theta")
        c.only("rope_parameters", {full: both[full], sliding: both.get(sliding)})
        c, local = hf.Config(c.path, {"rope_parameters": both[full]}), both.get(sliding)
    m.frequencies = read_frequencies(c, m)
    m.local_frequencies = read_frequencies(hf.Config(c.path, {"rope_parameters": local}), m)


def read_cohere(c, m):
    """Read Cohere's windows, positions and factor of logits."""
    m.logit_scale = c.get("logit_scale", float, least=1e-6, most=1e6)
    if ABOUT[m.family].cohere == 2:
        c.only("layer_switch", 4)
        read_kinds(c, m, 4)
        m.rotary = [int(window > 0) for window in m.windows]
    m.frequencies = read_frequencies(c, m)


PERIOD = "linear", "sliding", "linear", "full", "sliding"  # kinds of Lara's layers


def read_delta(c, m):
    """Read the kinds of Qwen3.5's and Lara's layers, and the sizes of Gated DeltaNet."""
    lara, every = ABOUT[m.family].fused, c.get("full_attention_interval", int, 4, least=1, most=1 << 24)
    default = [PERIOD[i % 5] if lara else "linear" if (i + 1) % every else "full" for i in range(m.layers)]
    kinds = c.raw("layer_types", [f"{kind}_attention" for kind in default])
    known = ["linear_attention", "full_attention"] + ["sliding_attention"] * lara
    if not isinstance(kinds, list) or len(kinds) != m.layers or any(x not in known for x in kinds):
        raise FormatError(f"{c.path}: layer_types is {short(kinds)}, expected {' or '.join(known)} per layer")
    window = c.get("sliding_window", int, least=1, most=1 << 20) if lara else 0
    m.delta = [kind == "linear_attention" for kind in kinds]
    m.windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    m.rotary = [(0, 1)[not lara or window > 0] for window in m.windows]
    size = lambda key, most: c.get("linear_" + key, int, least=1, most=most)
    m.values, m.delta_keys = size("num_value_heads", 1 << 16), size("num_key_heads", 1 << 16)
    m.value, m.key, m.kernel = size("value_head_dim", 1 << 16), size("key_head_dim", 1 << 16), \
        size("conv_kernel_dim", 64)
    if m.values % m.delta_keys:
        raise FormatError(f"{c.path}: linear_num_key_heads {m.delta_keys} does not divide linear_num_value_heads "
                          f"{m.values}")
    if not lara:
        inside = c.raw("rope_parameters")
        c.get("partial_rotary_factor", float, 0.25, least=0.0, most=1.0)
        about = hf.Config(c.path, {**c.values, **(inside if isinstance(inside, dict) else {})})
        m.turned = int(m.head * about.get("partial_rotary_factor", float, 0.25, least=0.0, most=1.0))
        if m.turned < 2 or m.turned % 2:
            raise FormatError(f"{c.path}: rope_parameters: partial_rotary_factor: {m.turned} of {m.head} columns; "
                              "expected an even number")
    m.frequencies = read_frequencies(c, m)


def sparse_layers(c, m):
    """Return a list of booleans: True for layers that are mixtures."""
    layers = range(m.layers)
    if ABOUT[m.family].dense or ABOUT[m.family].delta:
        return [not ABOUT[m.family].dense for _ in layers]
    if m.family == "hy_v3":
        kinds = c.raw("mlp_layer_types")
        if kinds is None:
            first = c.get("first_k_dense_replace", int, 1, least=0)
            return [i >= first for i in layers]
        if not isinstance(kinds, list) or len(kinds) != m.layers or any(x not in ("sparse", "dense") for x in kinds):
            raise FormatError(f"{c.path}: mlp_layer_types is {short(kinds)}, expected 'sparse' or 'dense' per layer")
        return [kind == "sparse" for kind in kinds]
    dense, step = c.raw("mlp_only_layers", []), c.get("decoder_sparse_step", int, 1, least=1)
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise FormatError(f"{c.path}: mlp_only_layers is {short(dense)}, which is not supported")
    return [i not in dense and (i + 1) % step == 0 for i in layers]


def same_in_all(c, key, kind, m, **limits):
    """Return a number, which Hunyuan's mixtures may store as a list of equal numbers, one per layer."""
    value = c.raw(key)
    if isinstance(value, list) and len(value) >= m.layers and all(x == value[0] for x in value):
        return hf.Config(c.path, {key: value[0]}).get(key, kind, **limits)
    return c.get(key, kind, **limits)


def read_mixture(c, m):
    m.experts = first_of(c, ("num_experts", "num_local_experts"), int, least=2, most=1 << 16)
    m.shared, m.scale = 0, 1.0
    if m.family == "hunyuan_v1_moe":
        m.chosen = same_in_all(c, "moe_topk", int, m, least=1, most=m.experts)
        m.hidden = same_in_all(c, "moe_intermediate_size", int, m, least=1, most=1 << 20)
        m.shared = m.ffn * same_in_all(c, "num_shared_expert", int, m, least=1, most=64)
        m.weights = "chosen"
        return
    m.chosen = c.get("num_experts_per_tok", int, least=1, most=m.experts)
    m.hidden = first_of(c, ("moe_intermediate_size", "expert_hidden_dim"), int, m.ffn if m.family == "mixtral" else None,
                        least=1, most=1 << 20)
    if m.family == "hy_v3":
        m.weights, m.scale = "sigmoid", c.get("router_scaling_factor", float, 1.0, least=0.0, most=1e6)
        m.shared = m.hidden * c.get("num_shared_experts", int, 1, least=0, most=64)
    elif ABOUT[m.family].delta:
        m.shared = c.get("shared_expert_intermediate_size", int, m.hidden, least=1, most=1 << 20)
        m.weights = "chosen" if c.get("norm_topk_prob", bool, True) else "all"
    else:
        m.weights = "chosen" if c.get("norm_topk_prob", bool, m.family == "mixtral") else "all"


def most_positions(m):
    """Return the maximum rows of a position table; fewer for Gemma, which has two tables and wide heads."""
    return MAX_POSITIONS // 4 if ABOUT[m.family].gemma else MAX_POSITIONS


def text_part(c):
    """Return the configuration of a model's text part, including defaults that published files omit."""
    family, inner = c.raw("model_type"), c.raw("text_config")
    values = dict(c.values)
    if f"{family}_text" in FAMILIES:
        if not isinstance(inner, dict) or inner.get("model_type", f"{family}_text") != f"{family}_text":
            raise FormatError(f"{c.path}: text_config is {short(inner)}, which is not supported")
        del values["text_config"]
        values = {**values, **inner, "model_type": family}
        values["architectures"] = c.values.get("architectures")
    for families, key, value in ROWS["DEFAULT"]:
        if family in families.split() and values.get(key) is None:
            values[key] = json.loads(value)
    return hf.Config(c.path, values)


def read_config(c):
    family = c.get("model_type", str)
    given = c.raw("architectures", [FAMILIES[family]])
    if given != [FAMILIES[family]]:
        raise FormatError(f"{c.path}: architectures {short(given)} is not supported: expected {FAMILIES[family]}")
    rows = [row for row in ROWS["ONLY"] if not row[0] or family in row[0].split()]
    for key, values in tables.choices(rows).items():
        c.only(key, *values)
    m = types.SimpleNamespace(path=c.path, family=family, scale_block=fp8.scale_block(c),
                              width=c.get("hidden_size", int, least=1, most=1 << 20),
                              layers=c.get("num_hidden_layers", int, least=1, most=256),
                              heads=c.get("num_attention_heads", int, least=1, most=1 << 16),
                              vocabulary=c.get("vocab_size", int, least=4, most=1 << 24),
                              ffn=c.get("intermediate_size", int, least=1, most=1 << 24),
                              epsilon=c.get("layer_norm_eps" if ABOUT[family].cohere else "rms_norm_eps", float,
                                            ABOUT[family].epsilon, least=0.0, most=1.0))
    m.keys = c.get("num_key_value_heads", int, m.heads, least=1, most=m.heads)
    if m.heads % m.keys:
        raise FormatError(f"{c.path}: num_key_value_heads {m.keys} does not divide num_attention_heads {m.heads}")
    m.head = first_of(c, ("head_dim", "attention_head_dim"), int, m.width // m.heads, least=2, most=1 << 16)
    if m.head % 2:
        raise FormatError(f"{c.path}: head_dim {m.head} must be even")
    m.windows, m.query_scale, m.local_frequencies, m.turned = [0] * m.layers, 1.0, None, m.head
    m.delta, m.rotary, m.tiled, m.log_rate = [False] * m.layers, None, 0, True
    if ABOUT[family].gemma:
        read_windows(c, m)
        m.rotary = [2 if window else 1 for window in m.windows]
    elif ABOUT[family].delta:
        read_delta(c, m)
    elif ABOUT[family].cohere:
        read_cohere(c, m)
    else:
        m.frequencies = read_frequencies(c, m)
    m.rotary = m.rotary or [1] * m.layers
    m.tied = c.get("tie_word_embeddings", bool, ABOUT[family].tied)
    m.context = c.get("max_position_embeddings", int, least=4, most=1 << 24)
    if ABOUT[family].cohere:  # as trained
        m.context = c.get("model_max_length", int, m.context, least=4, most=1 << 24)
    window = c.get("sliding_window", int, m.context, least=4) if ABOUT[family].windowed else m.context
    m.places = min(m.context, window, most_positions(m))  # a window changes nothing up to its length
    m.sparse = sparse_layers(c, m)
    if any(m.sparse):
        read_mixture(c, m)
    m.norm, m.norm_offset = ABOUT[family].norm, 1
    m.bos = c.get("bos_token_id", int, 0, least=0, most=m.vocabulary - 1)
    return m


# Sampling settings of generation_config.json with type, minimum and maximum. The model file stores them, but sampling
# must be requested. Missing settings are disabled, unlike in transformers.
ACCEPTED = ROWS["ACCEPTED"][0][0].split()
GENERATION = tables.choices(ROWS["DECODER_GENERATION"])
GENERATION_NO_EFFECT = tables.words(ROWS["IGNORED"], "decoder_generation")
SAMPLING = {key: (float if kind == "real" else int, least, most) for key, kind, least, most in ROWS["SAMPLING"]}


def sampling_meta(c):
    """Return the recommended sampling settings as metadata sample.*."""
    found = {key: c.get(key, kind, least=least, most=most) for key, (kind, least, most) in SAMPLING.items()
             if c.raw(key) is not None}
    return {f"sample.{key}": max(value, 0) for key, value in found.items()}  # top_k -1 means no limit


def decode_meta(c, m, config, say):
    for key, values in {**hf.GENERATION, **GENERATION}.items():
        if key not in ACCEPTED:
            c.only(key, *values)
    ends = c.raw("eos_token_id", config.raw("eos_token_id"))
    ends = ends if isinstance(ends, list) else [ends]
    if not ends or not all(type(x) is int and 0 <= x < m.vocabulary for x in ends) or len(ends) > moefile.MAX_ENDS:
        raise FormatError(f"{c.path}: eos_token_id is {short(ends)}: expected 1 to {moefile.MAX_ENDS} tokens")
    ends = list(dict.fromkeys(ends))
    limit = min(DEFAULT_LIMIT, m.places // 2)
    longest = c.get("max_new_tokens", int, limit, least=1)
    if longest > limit:  # memory grows with the limit
        say(f"{c.path}: max_new_tokens is {longest}, but answers have up to {limit} tokens (--max-len raises the limit)")
    meta = {"token.bos": m.bos, "token.eos": ends[0], "decode.rules": "hf",
            "decode.beam": c.get("num_beams", int, 1, least=1, most=64),
            "decode.length_penalty": c.get("length_penalty", float, 1.0, least=0.0, most=100.0),
            "decode.length_constant": 0.0, "decode.early_stopping": int(c.get("early_stopping", bool, False)),
            "decode.max_new": min(longest, limit), "limit.source": limit, "limit.target": limit, **sampling_meta(c)}
    if ends[1:]:
        meta["token.ends"] = np.array(ends[1:], np.int64)
    pad = c.raw("pad_token_id", config.raw("pad_token_id"))
    if type(pad) is int and 0 <= pad < m.vocabulary:
        meta["token.pad"] = pad
    if c is not config:
        c.end(hf.GENERATION_NO_EFFECT, GENERATION_NO_EFFECT)
    return meta


def add_end(decode, tokens, say):
    """Add the token that follows answers in the chat template to the end tokens."""
    text = tokens.get("prompt.answer.suffix", tokens.get("prompt.end", ""))
    end = byte_bpe.added_at(tokens.get("tokenizer.model"), text.lstrip())
    ends = [decode["token.eos"], *decode.get("token.ends", ())]
    if end and end.id not in ends:
        decode["token.ends"] = np.array([*ends[1:], end.id], np.int64)
        say(f"answers also end with token {end.id}, {short(end.content)}, which follows answers in the chat template")


def begin_with(tokens, start, m, path, say):
    """Make texts begin with the token `start`, unless a template precedes them."""
    if start is None or "prompt.prefix" in tokens and not prompts.is_bare(tokens):
        return tokens
    m.bos = start
    say(f"each text begins with the bos token {start}, as {path} requires")
    return {**tokens, "source.bos": 1}


# ---- Tensors ---------------------------------------------------------------------------------------------------------

def rotary_table(frequencies, first, count):
    """Return a row per position: cosines, then sines, of position times frequency, computed in float64."""
    angle = np.arange(first, first + count)[:, None] * frequencies
    return np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)


def predicted_names(stored, m):
    """Return {name: transformers' name} of the layer that predicts the token after the next one, if it is complete.
    Such layers may repeat the embedding and the output matrix, which are then dropped: None."""
    at, found = f"model.layers.{m.layers}.", {}
    for name in stored:
        rest = name.removeprefix(at) if name.startswith(at) else name
        for published, own in PREDICTED:
            rest = own + rest.removeprefix(published) if rest.startswith(published) else rest
        if name.startswith(at) or rest != name and ABOUT[m.family].gated:
            found[name] = None if rest in SHARED else at + rest
    complete = all(at + source in found.values() for _, source, _ in PREDICTOR)
    return found if complete else {}


def canonical_names(stored, m, say):
    """Return the tensors under transformers' names; drop extra layers except one that predicts further tokens."""
    out, skipped, more = {}, set(), {what: 0 for what, _ in SKIPPED}
    predicted = predicted_names(stored, m)
    for name, t in stored.items():
        canonical = predicted.get(name, name)
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if canonical is None:
            continue
        if layer and int(layer[1]) >= m.layers and name not in predicted:
            skipped.add(int(layer[1]))
            continue
        needless = [what for what, prefixes in SKIPPED if ABOUT[m.family].offset and name.startswith(prefixes)
                    and name not in predicted]
        if needless:
            more[needless[0]] += 1
            continue
        for published, own in ROWS["SPELLING"]:
            canonical = canonical.replace(published, own)
        if canonical in out:
            raise FormatError(f"{t.file}: tensors {name} and {out[canonical].name} are the same tensor under two names")
        out[canonical] = interleaved(canonical, t, m) if ABOUT[m.family].cohere else t
    for what, count in more.items():
        if count:
            say(f"skipping {count} {what}")
    if predicted:
        say("keeping the layer that predicts the token after the next one, which saves time")
    for layer in sorted(skipped):
        names = [name for name in stored if name.startswith(f"model.layers.{layer}.")]
        if not any("eh_proj" in name for name in names):
            raise FormatError(f"{stored[names[0]].file}: tensor {names[0]}: num_hidden_layers is {m.layers}, and only "
                              "layers with eh_proj, which predict further tokens, may follow")
        say(f"skipping layer {layer}, which predicts further tokens")
    return out


def put_layer_tensors(b, m, name, kind, source):
    """Add the tensors of a sub-layer, except experts."""
    sizes = {"width": m.width, "head": m.head, "queries": m.heads * m.head, "keys": m.keys * m.head, "ffn": m.ffn,
             "experts": getattr(m, "experts", 0), "shared": getattr(m, "shared", 0), "row": 1}
    if any(m.delta):
        sizes.update(values=m.values * m.value, gates=m.values, value=m.value)
        sizes["convolved"] = 2 * m.delta_keys * m.key + sizes["values"]
        sizes["projected"] = sizes["convolved"] + sizes["values"] + 2 * m.values
    about = ABOUT[m.family]
    wanted = {"": True, "head_norm": m.norm != "none", "biased": about.biased, "gemma": about.gemma,
              "choice": getattr(m, "weights", "") == "sigmoid", "shared": sizes["shared"] > 0,
              "plain": not about.gemma and not about.cohere, "cohere": about.cohere > 0, "gated": about.gated,
              "ungated": not about.gated, "fused": about.fused, "apart": not about.fused}

    def take(source, rows, columns):
        if source[0] == "?":
            return take(source[1:], rows, columns) if at + source[1:] in b.stored else zeros(sizes[rows])
        half = "+-".find(source[0])
        t = b.take(f"{at}{source.lstrip('+-')}", sizes[rows] * (1 + (half >= 0)), *columns)
        return t if half < 0 else Halves(t, m.head, half)
    at = source
    for _, part, sources, rows, columns, when in (row for row in ROWS["TENSOR"] if row[0] == kind and wanted[row[5]]):
        more = () if columns == "one" else (1, m.kernel) if columns == "kernel" else (sizes[columns],)
        b.put(f"{name}.{part}", *(take(x, n, more) for x, n in zip(sources.split(), rows.split())))
        if part.endswith("norm.weight") and part != "head_norm.weight":
            change_norm(b, m, f"{name}.{part}", m.query_scale if part == "q_norm.weight" else 1.0)
        if part == "conv":
            b.tensors[f"{name}.conv"] = transposed(b.tensors[f"{name}.conv"])
        if part == "rate" and m.log_rate:
            stored = b.tensors[f"{name}.rate"].parts[0]
            b.tensors[f"{name}.rate"].parts = [lambda rows: (negative_exp(x) for x in stored(rows))]


def zeros(count):
    """Return a vector of zeros."""
    return types.SimpleNamespace(shape=(count,), read=lambda rows: iter([np.zeros(count, np.float32)]))


class Interleaved(hf.Stored):
    """Rows of queries or keys whose halves are interleaved per head, because rotations turn neighbouring columns.
    Reading restores transformers' usual order: first half, then second half."""

    def __init__(self, t, head):
        super().__init__(t.name, t.shape, t.kind, t.file, t.open, t.place)
        self.t, self.head = t, head

    def known(self):
        return self.t.known()

    def read(self, rows):
        for block in self.t.read(max(rows // self.head, 1) * self.head):
            yield block.reshape(-1, self.head // 2, 2, block.shape[1]).swapaxes(1, 2).reshape(block.shape)


def interleaved(name, t, m):
    """Return a tensor as Interleaved if it has queries or keys."""
    turned = re.search(r"\.self_attn\.[qk]_proj\.weight\Z", name) and len(t.shape) == 2 and t.shape[0] % m.head == 0
    return Interleaved(t, m.head) if turned else t


class Halves(hf.Stored):
    """The first or second half of each head's rows."""

    def __init__(self, t, head, half):
        super().__init__(t.name, (t.shape[0] // 2, *t.shape[1:]), t.kind, t.file, t.open, (t.place, half))
        self.t, self.head, self.half = t, head, half

    def read(self, rows):
        for block in self.t.read(max(rows // self.head, 1) * 2 * self.head):
            yield block.reshape(-1, 2, self.head, block.shape[1])[:, self.half].reshape(-1, block.shape[1])


def transposed(stored):
    """Return the weights of a convolution [channels, 1, kernel] as a vector [kernel * channels]."""
    return hf.Rows((math.prod(stored.shape),), [lambda rows: iter([stored.array()[:, 0].T.reshape(-1)])])


def negative_exp(x):
    """Return -exp(x), computed in float64."""
    if not (x < 88).all():
        raise FormatError(f"A_log contains {x.max()}, which is too large")
    return np.float32([-math.exp(v) for v in x.tolist()])


def change_norm(b, m, name, scale=1.0):
    """Add the 1 that Gemma's and Qwen3.5's files omit to the weights of a norm, and multiply them by `scale`."""
    offset = ABOUT[m.family].offset
    if not offset and scale == 1:
        return
    stored, more = b.tensors[name].parts[0], np.float32(m.norm_offset if offset else 0)
    b.tensors[name].parts = [lambda rows: ((x + more) * np.float32(scale) for x in stored(rows))]


def put_experts(b, m, name, source):
    """Add the experts as pairs: gate and up matrices stacked, and the down matrix."""
    d, f, n = m.width, m.hidden, m.experts
    if source + "gate_up_proj" in b.stored:
        both, down = b.take(source + "gate_up_proj", n, 2 * f, d), b.take(source + "down_proj", n, d, f)
        above = [[both.part(e, 0, 2 * f)] for e in range(n)]
        below = [down.part(e, 0, d) for e in range(n)]
    else:
        above = [[b.take(f"{source}{e}.{part}_proj.weight", f, d) for part in ("gate", "up")] for e in range(n)]
        below = [b.take(f"{source}{e}.down_proj.weight", d, f) for e in range(n)]
    b.tensors[name] = ([hf.Rows((2 * f, d), [t.read for t in parts]) for parts in above],
                       [hf.Rows((d, f), [t.read]) for t in below])


def put_mixture(b, m, side, source, norm):
    name = b.layer(side, kind="moe", experts=m.experts, k=m.chosen, hidden=m.hidden, gate="topk",
                   weights=m.weights, expert="gated", output="none", scale=m.scale, shared=m.shared, residual=1, **norm)
    put_layer_tensors(b, m, name, "moe", source)
    put_experts(b, m, name + ".experts", source + "mlp.experts.")


def put_layer(b, m, i, side="decoder"):
    source = f"model.layers.{i}."
    predicts = i == m.layers
    gemma, cohere = ABOUT[m.family].gemma, ABOUT[m.family].cohere
    norm = {"norm": "both" if gemma else "before", "norm.kind": "layer" if cohere else "rms", "epsilon": m.epsilon}
    delta, window, rotary = (False, 0, 1) if predicts else (m.delta[i], m.windows[i], m.rotary[i])
    sparse = any(m.sparse) and source + "mlp.gate.weight" in b.stored if predicts else m.sparse[i]
    if delta:
        name = b.layer(side, kind="delta", heads=m.values, key_heads=m.delta_keys,
                       **{"head.size": m.value, "key.size": m.key}, kernel=m.kernel, tiled=m.tiled, residual=1, **norm)
    else:
        more = {"window": window} if window else {}
        more.update({"gated": 1} if ABOUT[m.family].gated else {})
        name = b.layer(side, kind="attention", heads=m.heads, **{"kv_heads": m.keys, "head.size": m.head,
                                                                 "rotary": rotary, "head.norm": m.norm},
                       **more, residual=1, **norm)
    put_layer_tensors(b, m, name, "delta" if delta else "attention", source)
    if sparse:
        put_mixture(b, m, side, source, norm)
    else:
        name = b.layer(side, kind="ffn", hidden=m.ffn, activation="gelu_tanh" if gemma else "swish", gated=1,
                       **{"parallel": 1} if cohere else {}, residual=1, **norm)
        put_layer_tensors(b, m, name, "ffn", source)


def put_predictor(b, m):
    """Add the layer that predicts the token after the next one, if the checkpoint has one."""
    source = f"model.layers.{m.layers}."
    if source + "eh_proj.weight" not in b.stored:
        return
    b.meta["predict.epsilon"] = m.epsilon
    put_layer(b, m, m.layers, "predict")
    b.layer("predict", kind="norm", **{"norm.kind": "rms", "epsilon": m.epsilon})
    for name, part, columns in PREDICTOR:
        b.put(name, b.take(source + part, m.width, *([columns * m.width] if columns else [])))
        if not columns:
            change_norm(b, m, name)


def put_embeddings(b, m, say):
    names = ("model.embed_tokens.weight",) + ("lm_head.weight",) * m.tied
    hf.put_tied(b, m, "embedding.weight", names, m.vocabulary, say)
    if not m.tied:
        b.put("output.weight", b.take("lm_head.weight", m.vocabulary, m.width))
    tables = ("rotary.weight", m.frequencies), ("rotary.local.weight", m.local_frequencies)
    for table, (name, frequencies) in enumerate(tables, 1):
        if any(x == table and not delta for x, delta in zip(m.rotary, m.delta)):
            b.tensors[name] = hf.Rows((m.places, m.turned), [
                lambda rows, f=frequencies: (rotary_table(f, at, min(rows, m.places - at))
                                             for at in range(0, m.places, rows))])


TOKENISERS = "tokenizer.json", "hy.tiktoken", "tokenizer.model"  # the first of these files is read


def tokens_meta(folder, m, say, row=None, ids_only=False):
    """Return the metadata of a folder's tokeniser and prompts, or of a model that accepts ids only."""
    if ids_only:
        return {"tokenizer.kind": "none"}
    there = hf_tokens.pieces_in(folder)
    if not set(TOKENISERS) & set(there):
        hf_tokens.no_tokeniser(["tokenizer.json"], there)
    name, file = os.path.basename(os.path.abspath(folder)), next(x for x in TOKENISERS if x in there)
    found = byte_bpe.tokenizer_meta(folder, m.vocabulary, m.family)
    added = [token.content for token in found["tokenizer.model"].added]
    found.update(prompts.prompt_meta(folder, m.family, name, say, row, (file, added)))
    return begin_with(found, found["tokenizer.model"].start, m, f"{folder}/{file}", say)


def read_decoder(folder, say=lambda message: None, row=None, ids_only=False):
    """Return the metadata and tensors of a checkpoint."""
    config, generation = hf.read_configs(folder)
    alone = generation is config
    config = text_part(config)
    generation = config if alone else generation
    m, stored = read_config(config), hf.open_checkpoint(folder, say)
    found = build(m, config, generation, stored, tokens_meta(folder, m, say, row, ids_only),
                  hf.files_in(folder), say)
    config.end(NO_EFFECT, MIXTURE_KEYS if ABOUT[m.family].dense else (), hf.GENERATION, hf.GENERATION_NO_EFFECT,
               GENERATION, GENERATION_NO_EFFECT, SAMPLING, hf.GENERATION_USED)
    return found


def build(m, config, generation, stored, tokens, files, say):
    """Return the metadata and tensors of a configuration; names in `stored` follow one of the published schemes."""
    decode = decode_meta(generation, m, config, say)
    add_end(decode, tokens, say)
    if m.places < m.context:
        say(f"limiting positions to {m.places} of the model's {m.context}")
    b = hf.Builder(fp8.connect_scales(canonical_names(stored, m, say), m.scale_block, say), m.path)
    put_embeddings(b, m, say)
    for i in range(m.layers):
        put_layer(b, m, i)
    cohere = ABOUT[m.family].cohere
    name = b.layer("decoder", kind="norm", **{"norm.kind": "layer" if cohere else "rms", "epsilon": m.epsilon})
    b.put(name + ".norm.weight", b.take("model.norm.weight", m.width))
    change_norm(b, m, name + ".norm.weight", m.logit_scale if cohere else 1.0)
    if cohere:
        bias = "model.norm.bias"
        b.put(name + ".norm.bias", b.take(bias, m.width) if bias in b.stored else zeros(m.width))
    put_predictor(b, m)
    b.finish(re.compile(r".*rotary_emb\.inv_freq\Z"))
    scale = {"embedding.scale": math.sqrt(m.width)} if ABOUT[m.family].gemma else {}
    scale.update({"rotary.size": m.turned} if m.turned != m.head else {})
    meta = {"general.architecture": "decoder", "vocab.size": m.vocabulary, "model.width": m.width, **scale,
            "rotary.positions": m.places, "activation.block": 64, **tokens}
    return types.SimpleNamespace(meta={**meta, **decode, **b.meta}, tensors=b.tensors, identity=hf.identity(files))
