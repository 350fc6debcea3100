"""Read GGUF files, the format of llama.cpp: Hunyuan's models, Qwen3 mixtures, and the Llama family.

    found = read_gguf(path, say)     `found` as from hf.read_hf; the path may be any part of a split file

This module parses the header itself, so that a damaged header takes at most a small multiple of its size in memory; the
`gguf` package dequantises numbers to float32, block by block. Tensors get transformers' names, and keys the names of
config.json; decoder.py then builds the model.
"""
import math
import os
import re
import struct
import types

import numpy as np

import byte_bpe
import decoder
import hf
import moefile
import prompts
from hf_json import short
from moefile import FormatError, open_regular

MAGIC, ALIGNMENT = b"GGUF", 32
MAX_KEYS, MAX_TENSORS, MAX_PARTS, MAX_NAME = 4096, 1 << 16, 1000, 1024
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
PLAIN = {0: "F32", 1: "F16", 30: "BF16"}  # readable without the `gguf` package

FAMILIES = {"hy_v3": "hy_v3", "hunyuan-dense": "hunyuan_v1_dense", "hunyuan-moe": "hunyuan_v1_moe",
            "qwen3moe": "qwen3_moe", "llama": "llama"}
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
           "output.weight": "lm_head.weight"}
INSIDE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
          "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
          "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate_inp": "mlp.gate",
          **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
          **{f"ffn_{x}_shexp": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")}}

# tokenizer.ggml.pre -> (regular expressions of the splits, whether texts are normalised to NFC); llm.md, section 4.
PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
DEEPSEEK = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|"
            r"\s+(?!\S)|\s+")
PRE = {"hunyuan-dense": (DEEPSEEK, False), "hunyuan": ((byte_bpe.HY,), True), "qwen2": ((byte_bpe.HY,), True),
       "smollm": ((r"\p{N}", byte_bpe.GPT2), False), "gpt-2": ((byte_bpe.GPT2,), False)}
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5  # token types


# ---- The file --------------------------------------------------------------------------------------------------------

class Header:
    """Read a file sequentially, never past its end."""

    def __init__(self, path):
        self.path, self.file = path, open_regular(path)
        self.size = os.fstat(self.file.fileno()).st_size

    def fail(self, why):
        raise FormatError(f"{self.path}: {why}")

    def take(self, count, what):
        data = self.file.read(count) if count <= self.size else b""
        if len(data) < count:
            self.fail(f"file ends within {what}: truncated or damaged")
        return data

    def number(self, form, what):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form), what))[0]

    def text(self, what, longest=1 << 26):
        length = self.number("Q", what)
        if length > longest:
            self.fail(f"{what} is too long ({length} bytes): damaged")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def numbers(self, kind, count, what):
        """Read an array of numbers."""
        dtype = np.dtype("<" + NUMBERS[kind])
        if count > (self.size - self.file.tell()) // dtype.itemsize:
            self.fail(f"file ends within {what}: truncated or damaged")
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)

    def value(self, key):
        kind = self.number("I", key)
        if kind == STRING:
            return self.text(key)
        if kind in NUMBERS:
            value = self.number(NUMBERS[kind], key)
            return float(str(np.float32(value))) if kind == 6 else value  # shortest decimal with the same float32
        if kind != ARRAY:
            self.fail(f"{key} has unknown type {kind}: damaged")
        kind, count = self.number("I", key), self.number("Q", key)
        if kind in NUMBERS:
            return self.numbers(kind, count, key)
        if kind != STRING or count > (self.size - self.file.tell()) // 8:
            self.fail(f"{key} is an array of {count} values of type {kind}: damaged or not supported")
        return [self.text(key) for _ in range(count)]


class Blocks(hf.Stored):
    """A tensor whose rows are blocks for the `gguf` package to dequantise, or plain numbers."""

    def __init__(self, name, shape, kind, path, at, block):
        super().__init__(name, shape, kind, path, lambda: hf.open_at(path, at), (path, at))
        self.block = block

    def known(self):
        return self.kind in hf.DTYPES or self.block is not None

    def row_bytes(self):
        if self.kind in hf.DTYPES:
            return super().row_bytes()
        numbers, size = self.block
        return math.prod(self.shape[1:]) // numbers * size

    def numbers(self, data):
        if self.kind in hf.DTYPES:
            return super().numbers(data)
        package = package_of(self.kind)
        with np.errstate(all="ignore"):
            rows = np.frombuffer(data, np.uint8).reshape(-1, self.row_bytes())
            return package.quants.dequantize(rows, package.GGMLQuantizationType[self.kind]).astype(np.float32,
                                                                                                   copy=False)


def package_of(kind):
    """Import the `gguf` package, which only quantised files require."""
    try:
        import gguf
    except ImportError:
        raise FormatError(f"{kind} numbers require the Python package gguf: pip install gguf==0.19.0, or "
                          "run tools/install-deps --convert and use .venv/bin/python") from None
    return gguf


def kind_of(number):
    """Return (name, (numbers per block, bytes per block)) of a number format; None if unknown."""
    if number in PLAIN:
        return PLAIN[number], (1, hf.SIZES[PLAIN[number]])
    package = package_of(f"quantised (kind {number})")
    try:
        kind = package.GGMLQuantizationType(number)
    except ValueError:
        return None
    return kind.name, package.GGML_QUANT_SIZES[kind]


def open_gguf(path):
    """Return (values by key, tensors by name) of one file, checking every length and offset of the header."""
    h = Header(path)
    with h.file:
        if h.take(4, "the magic number") != MAGIC:
            h.fail("not a GGUF file")
        version = h.number("I", "the version")
        if version not in (2, 3):
            h.fail(f"GGUF version {version & 0xffff or version >> 16 & 0xffff} is not supported"
                   f"{' (big-endian)' if version & 0xffff == 0 else ''}: expected 2 or 3")
        count, keys = h.number("Q", "the counts"), h.number("Q", "the counts")
        if count > MAX_TENSORS or keys > MAX_KEYS:
            h.fail(f"{count} tensors and {keys} keys: damaged, or above the limits of {MAX_TENSORS} and {MAX_KEYS}")
        values, stored = {}, {}
        for i in range(keys):
            key = h.text(f"key {i + 1}", MAX_NAME)
            if key in values:
                h.fail(f"duplicate key {short(key)}")
            values[key] = h.value(short(key))
        entries = [tensor_entry(h, i) for i in range(count)]
        alignment = values.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & alignment - 1:
            h.fail(f"general.alignment is {short(alignment)}, which is not supported")
        start = moefile.round_up(h.file.tell(), alignment)
    expected = 0
    for name, shape, number, offset in entries:
        kind = kind_of(number)
        if kind is None:
            h.fail(f"tensor {name} has unknown number format {number}")
        kind, block = kind
        if shape[-1] % block[0]:
            h.fail(f"tensor {name} {list(shape)}: row length is not a multiple of {block[0]}, the block size of {kind}")
        size = math.prod(shape) // block[0] * block[1]
        if name in stored or offset != expected or offset + size > h.size - start:
            h.fail(f"tensor {name} has an invalid offset or size: truncated or damaged")
        expected = moefile.round_up(offset + size, alignment)
        stored[name] = Blocks(name, shape, kind, path, start + offset, block if dequantised(kind) else None)
    return values, stored


def dequantised(kind):
    return kind in hf.DTYPES or package_of(kind).GGMLQuantizationType[kind] in package_of(kind).quants._type_traits


def tensor_entry(h, i):
    """Read (name, shape, number format, offset); the file lists the fastest dimension first."""
    name = h.text(f"the name of tensor {i + 1}", MAX_NAME)
    dimensions = h.number("I", f"tensor {name}")
    if not 1 <= dimensions <= 4:
        h.fail(f"tensor {name} has {dimensions} dimensions: damaged")
    shape = tuple(h.number("Q", f"tensor {name}") for _ in range(dimensions))[::-1]
    if not all(0 < n < hf.LARGEST_DIMENSION for n in shape) or math.prod(shape) >= hf.LARGEST_DIMENSION:
        h.fail(f"tensor {name} has shape {short(list(shape))}: damaged")
    return name, shape, h.number("I", f"tensor {name}"), h.number("Q", f"tensor {name}")


PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf\Z", re.S)


def open_parts(path):
    """Return (values of the first part, tensors of all parts, paths)."""
    values, stored = open_gguf(path)
    count, found = values.get("split.count", 1), PART.match(path)
    if type(count) is not int or count > MAX_PARTS:
        raise FormatError(f"{path}: split.count is {short(count)}, which is not supported")
    if count <= 1:
        return values, stored, [path]
    if not found or int(found[3]) != count:
        raise FormatError(f"{path}: the names of {count} parts must end with -00001-of-{count:05d}.gguf etc.")
    paths, all_tensors = [f"{found[1]}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)], {}
    for i, piece in enumerate(paths):
        if not os.path.exists(piece):
            raise FormatError(f"{piece} is missing: {path} is one of {count} parts")
        some, tensors = open_gguf(piece)
        values = some if i == 0 else values
        if some.get("split.no") != i or some.get("split.count") != count:
                raise FormatError(f"{piece}: split.no {short(some.get('split.no'))} and split.count "
                                  f"{short(some.get('split.count'))} do not match the name: expected {i} and {count}")
        for name, tensor in tensors.items():
            if name in all_tensors:
                raise FormatError(f"tensor {name} is in both {all_tensors[name].file} and {piece}")
            all_tensors[name] = tensor
    wanted = values.get("split.tensors.count", len(all_tensors))
    if wanted != len(all_tensors):
        raise FormatError(f"{path}: split.tensors.count is {short(wanted)}, but the parts contain {len(all_tensors)}")
    return values, all_tensors, paths


# ---- Names and keys of transformers ----------------------------------------------------------------------------------

class Interleaved(hf.Stored):
    """Query or key rows of a `llama` file, in which the two halves of each head are interleaved (rotary pairs are
    adjacent). Reading restores transformers' order: first half, then second half."""

    def __init__(self, t, head):
        super().__init__(t.name, t.shape, t.kind, t.file, t.open, t.place)
        self.t, self.head = t, head

    def known(self):
        return self.t.known()

    def read(self, rows):
        for block in self.t.read(max(rows // self.head, 1) * self.head):
            yield block.reshape(-1, self.head // 2, 2, block.shape[1]).swapaxes(1, 2).reshape(block.shape)


def transformers_names(stored, m, path):
    """Return the tensors under transformers' names."""
    out = {}

    def put(name, t):
        if name in out:
            raise FormatError(f"{path}: tensors {out[name].name} and {t.name} are the same tensor")
        out[name] = t
    for name, t in stored.items():
        found = re.fullmatch(r"blk\.([0-9]{1,4})\.([a-z_]+?)(\.weight|\.bias)?", name)
        if not found:
            put(OUTSIDE.get(name, name), t)
            continue
        at, part, end = f"model.layers.{int(found[1])}.", found[2], found[3] or ""
        experts = re.fullmatch("ffn_(gate|up|down|gate_up)_exps", part)
        if int(found[1]) >= m.layers:
            put(at + name, t)
        elif part == "exp_probs_b":
            put(at + "mlp.e_score_correction_bias", t)
        elif experts and end == ".weight":
            if len(t.shape) != 3 or t.shape[0] != getattr(m, "experts", 0):
                raise FormatError(f"{path}: tensor {name} {list(t.shape)} must have one matrix per expert")
            if f"blk.{found[1]}.ffn_gate_up_exps.weight" in stored:
                put(f"{at}mlp.experts.{experts[1]}_proj", t)
                continue
            for e in range(t.shape[0]):
                put(f"{at}mlp.experts.{e}.{experts[1]}_proj.weight", t.part(e, 0, t.shape[1]))
        else:
            put(at + INSIDE.get(part, part) + end, t)
    return out


class Keys(hf.Config):
    """Read the metadata keys of the file's architecture; messages quote full key names."""

    def __init__(self, path, architecture, values):
        super().__init__(path, {key: value for key, value in values.items() if not isinstance(value, list)})
        self.architecture = architecture

    def of(self, key, kind, default=None, **limits):
        """Return a value, which may be stored as a list of equal values, one per layer."""
        key = f"{self.architecture}.{key}"
        value = self.values.get(key)
        if isinstance(value, np.ndarray):
            if not len(value) or (value != value[0]).any():
                raise FormatError(f"{self.path}: {key} differs between layers, which is not supported")
            return hf.Config(self.path, {key: value[0].item()}).get(key, kind, default, **limits)
        return self.get(key, kind, default, **limits)


def config_of(k, family, stored):
    """Return the equivalent of config.json."""
    size = lambda key, default=None: k.of(key, int, default, least=1, most=1 << 24)
    layers = size("block_count") - k.of("nextn_predict_layers", int, 0, least=0, most=64)
    heads = k.of("attention.head_count", int, least=1, most=1 << 16)
    head = size("attention.key_length", size("embedding_length") // heads)
    embedding = stored.get("token_embd.weight")
    if embedding is None:
        raise FormatError(f"{k.path}: tensor token_embd.weight is missing")
    for key, wanted in ("attention.value_length", head), ("rope.dimension_count", head):
        if k.of(key, int, wanted) != wanted:
            raise FormatError(f"{k.path}: {k.architecture}.{key} is {k.of(key, int)}: only {wanted} is supported")
    scaling = k.of("rope.scaling.type", str, "none")
    if scaling != "none" and not (scaling == "linear" and k.of("rope.scaling.factor", float, 1.0) == 1.0):
        raise FormatError(f"{k.path}: {k.architecture}.rope.scaling.type is {short(scaling)}: only 'none' is supported")
    for key in "attention.sliding_window", "expert_group_count", "expert_group_used_count":
        if k.of(key, int, 0) > 1:
            raise FormatError(f"{k.path}: {k.architecture}.{key} is {k.of(key, int)}, which is not supported")
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in stored for i in range(min(max(layers, 1), 256))]
    c = {"model_type": family, "hidden_size": size("embedding_length"), "num_hidden_layers": layers,
         "num_attention_heads": heads, "num_key_value_heads": k.of("attention.head_count_kv", int, heads, least=1),
         "head_dim": head, "vocab_size": embedding.shape[0],
         "intermediate_size": size("feed_forward_length", size("expert_feed_forward_length", 1)),
         "rms_norm_eps": k.of("attention.layer_norm_rms_epsilon", float),
         "rope_parameters": {"rope_theta": k.of("rope.freq_base", float, 1e4), "rope_type": "default"},
         "tie_word_embeddings": "output.weight" not in stored, "max_position_embeddings": size("context_length")}
    if any(sparse):
        mixture_of(k, family, c, sparse, stored)
    return c


def mixture_of(k, family, c, sparse, stored):
    """Add mixture settings to `c`."""
    if family in decoder.DENSE:
        raise FormatError(f"{k.path}: experts are not supported in {k.architecture!r} models")
    gate = 2 if family == "hy_v3" else 1  # 2 means sigmoid, 1 softmax
    if k.of("expert_gating_func", int, gate) != gate:
        raise FormatError(f"{k.path}: {k.architecture}.expert_gating_func is {k.of('expert_gating_func', int)}: only "
                          f"{gate} is supported with this architecture")
    if family != "hy_v3" and k.of("expert_weights_scale", float, 1.0) not in (0.0, 1.0):
        raise FormatError(f"{k.path}: {k.architecture}.expert_weights_scale is not supported with this architecture")
    norm = k.of("expert_weights_norm", bool, True)
    hidden = k.of("expert_feed_forward_length", int, c["intermediate_size"], least=1)
    used = k.of("expert_used_count", int)
    shared = [t.shape[0] for name, t in stored.items() if name.endswith(".ffn_gate_shexp.weight")][:1]
    one = c["intermediate_size"] if family == "hunyuan_v1_moe" else hidden
    shared, rest = divmod(sum(shared), one)
    if rest:
        raise FormatError(f"{k.path}: the number of shared units is not a multiple of {one}")
    c["num_experts"] = k.of("expert_count", int, least=2)
    if family == "hunyuan_v1_moe":
        c.update(moe_topk=used, moe_intermediate_size=hidden)
        c["num_shared_expert"] = shared
    else:
        c.update(num_experts_per_tok=used, moe_intermediate_size=hidden)
        c["num_shared_experts"], kinds = shared, ["sparse" if x else "dense" for x in sparse]
        c.update({"mlp_layer_types": kinds, "route_norm": norm,
                  "router_scaling_factor": k.of("expert_weights_scale", float, 1.0)} if family == "hy_v3" else
                 {"mlp_only_layers": [i for i, x in enumerate(sparse) if not x], "norm_topk_prob": norm})


# ---- The tokeniser ---------------------------------------------------------------------------------------------------

def token_of(k, values, name, count):
    """Return the token id stored under a key, or None if the key is missing."""
    key = f"tokenizer.ggml.{name}_token_id"
    return k.get(key, int, least=0, most=count - 1) if values.get(key) is not None else None


def ends_of(k, values, count, say):
    """Return the ids that end an answer: end of text and end of turn. Files of Hunyuan's 7B models also list an
    ordinary token, which is skipped."""
    kinds, found = values.get("tokenizer.ggml.token_type"), []
    for name in "eos", "eot", "eom":
        token = token_of(k, values, name, count)
        if token is not None and token not in found:
            found.append(token)
    plain = [x for x in found if isinstance(kinds, np.ndarray) and x < len(kinds) and kinds[x] == NORMAL]
    if plain and len(plain) < len(found):
        say(f"ignoring end token {plain[0]}, which is an ordinary piece of text")
        return [x for x in found if x not in plain]
    return found


def prompt_meta(path, values, texts, family, say, wanted):
    """Return the metadata of a file's prompts; `wanted` as in prompts.prompt_meta."""
    template, name = values.get("tokenizer.chat_template"), values.get("general.name")
    if wanted == "none" or template is None:
        return prompts.no_prompt(say, wanted, f"{path} has no tokenizer.chat_template")
    if not isinstance(template, str) or len(template) > prompts.LARGEST_TEMPLATE:
        raise FormatError(f"{path}: tokenizer.chat_template is {short(template)}, which is not supported")
    known = {}
    for key, short_name in zip(prompts.TOKENS, ("bos", "eos", "padding", "unknown")):
        token = values.get(f"tokenizer.ggml.{short_name}_token_id")
        if type(token) is int and 0 <= token < len(texts):
            known[key] = texts[token]
    names = os.path.basename(path) + (f" {name}" if isinstance(name, str) else "")
    return prompts.meta_of(template, known, family, names, path, wanted, say)


def tokeniser_meta(path, values, m, say, wanted):
    """Return the metadata of a file's tokeniser and prompts."""
    read = byte_bpe.Reader(path)
    kind, pre, texts, kinds = (values.get("tokenizer.ggml." + x) for x in ("model", "pre", "tokens", "token_type"))
    if kind is None or texts is None:
        say(f"no tokeniser: {path} has no tokenizer.ggml.model or tokens. The model will accept token ids only")
        return {"tokenizer.kind": "none"}
    if kind != "gpt2":
        read.fail(f"tokenizer.ggml.model {short(kind)} is not supported: expected 'gpt2' (byte-level BPE)")
    if not isinstance(pre, str) or pre not in PRE:
        read.fail(f"tokenizer.ggml.pre {short(pre)} is not supported: expected {', '.join(map(repr, PRE))}")
    if not isinstance(texts, list) or len(texts) > m.vocabulary:
        read.fail(f"tokenizer.ggml.tokens must be a list of at most {m.vocabulary} tokens")
    if kinds is None:
        kinds = np.full(len(texts), NORMAL)
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(texts):
        read.fail("tokenizer.ggml.token_type must list the type of every token")
    merges = read.merges({"merges": values.get("tokenizer.ggml.merges")})
    tokens = {i: text for i, text in enumerate(texts) if kinds[i] not in (CONTROL, USER, UNUSED)}
    added = [byte_bpe.Added(i, text, bool(kinds[i] == CONTROL)) for i, text in enumerate(texts)
             if kinds[i] in (CONTROL, USER)]
    expressions, nfc = PRE[pre]
    try:
        blob = byte_bpe.pack(tokens, merges, added, list(expressions), nfc)
    except FormatError as error:
        read.fail(error)
    return {"tokenizer.kind": byte_bpe.KIND, "tokenizer.model": blob,
            **prompt_meta(path, values, texts, m.family, say, wanted)}


# ---- The model -------------------------------------------------------------------------------------------------------

SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
            "penalty_repeat": "repetition_penalty"}


def generation_of(values, ends):
    """Return the equivalent of generation_config.json."""
    found = {name: values[f"general.sampling.{key}"] for key, name in SAMPLING.items()
             if isinstance(values.get(f"general.sampling.{key}"), (int, float))}
    return {**found, "eos_token_id": ends}


def read_gguf(path, say=lambda message: None, row=None):
    """Return the metadata and tensors of a file; `row` is a row of prompts.json."""
    values, stored, paths = open_parts(path)
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise FormatError(f"{path}: general.architecture {short(architecture)} is not supported: expected "
                          f"{', '.join(map(repr, FAMILIES))}")
    family, k = FAMILIES[architecture], Keys(path, architecture, values)
    config = hf.Config(path, config_of(k, family, stored))
    m = decoder.read_config(config)
    bos = token_of(k, values, "bos", m.vocabulary)
    m.bos = m.bos if bos is None else bos
    named = transformers_names(stored, m, path)
    if architecture == "llama":
        for name, t in named.items():
            if re.search(r"\.self_attn\.[qk]_proj\.weight\Z", name) and len(t.shape) == 2 and t.shape[0] % m.head == 0:
                named[name] = Interleaved(t, m.head)
    factors = named.pop("rope_freqs.weight", None)
    if factors is not None:
        if factors.shape != (m.head // 2,) or not factors.known():
            raise FormatError(f"{path}: rope_freqs.weight {list(factors.shape)} must contain {m.head // 2} factors")
        m.frequencies = m.frequencies / np.concatenate(list(factors.read(m.head))).astype(np.float64)
        if not (np.isfinite(m.frequencies) & (m.frequencies >= 0)).all():
            raise FormatError(f"{path}: tensor rope_freqs.weight contains invalid factors")
    pad = token_of(k, values, "padding", m.vocabulary)
    if pad is not None:
        config.values["pad_token_id"] = pad
    generation = hf.Config(path, generation_of(values, ends_of(k, values, m.vocabulary, say)))
    tokens = tokeniser_meta(path, values, m, say, row)
    found = decoder.build(m, config, generation, named, tokens, paths, say)
    found.quantised = sorted({t.kind for t in stored.values()} - set(hf.DTYPES))
    licence = values.get("general.license")
    found.licence = licence if isinstance(licence, str) else ""
    return found
