"""Read GGUF files, the format of llama.cpp: Hunyuan's models, Qwen2 and Qwen3, Llama, Mistral, Mixtral, Gemma 3,
Qwen3.5, Cohere.

    found = read_gguf(path, say)     `found` as from hf.read_hf; the path may be any part of a split file

This module parses the header itself, so that a damaged header takes at most a small multiple of its size in memory; the
`gguf` package dequantises numbers to float32, block by block. Tensors get transformers' names, and keys the names of
config.json; decoder.py then builds the model.
"""
import copy
import json
import math
import os
import re
import struct

import numpy as np

import byte_bpe
import decoder
import hf
import hf_tokens
import moefile
import prompts
import tables
from hf_json import short
from moefile import FormatError, open_regular

MAGIC, ALIGNMENT = b"GGUF", 32
MAX_KEYS, MAX_TENSORS, MAX_PARTS, MAX_NAME = 4096, 1 << 16, 1000, 1024
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
PLAIN = {0: "F32", 1: "F16", 30: "BF16"}  # readable without the `gguf` package

ROWS = tables.read("decoder.inc")
FAMILIES = {}  # architecture: names of families, first the one of files without experts
for row in ROWS["FAMILY"]:
    if row[2]:
        FAMILIES.setdefault(row[2], []).append(row[0])
OUTSIDE, INSIDE, GEMMA, MIXED = ({theirs: own for place, theirs, own in ROWS["GGUF"] if place == where}
                                 for where in ("outside", "inside", "gemma", "mixed"))

PRE = {name: ([byte_bpe.EXPRESSIONS[x] for x in expressions.split()], byte_bpe.NFC * nfc | byte_bpe.WHOLE * whole,
              bool(begin))
       for name, expressions, nfc, whole, begin in ROWS["PRE"]}
NORMAL, UNKNOWN, CONTROL, USER, UNUSED = 1, 2, 3, 4, 5  # token types
TAG = re.compile(r"<.+>|\[.+\]", re.S)
ENDS = tuple(ROWS["ENDS"][0][0].split())
SPELLED = {text for row in ROWS["SPELLED"] for text in row[0].split()}
PIECE = re.compile(r"prompt\.(((system|answer)\.)?(prefix|suffix)|end)")


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
    """A tensor with rows of blocks for the `gguf` package to dequantise, or plain numbers."""

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
        gguf = package()
        with np.errstate(all="ignore"):
            rows = np.frombuffer(data, np.uint8).reshape(-1, self.row_bytes())
            return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[self.kind]).astype(np.float32, copy=False)


def package():
    """Import the `gguf` package, which only quantised files require; needs.py reports it if missing."""
    import gguf
    return gguf


def kind_of(number):
    """Return (name, (numbers per block, bytes per block)) of a number format, or None if unknown."""
    if number in PLAIN:
        return PLAIN[number], (1, hf.SIZES[PLAIN[number]])
    try:
        kind = package().GGMLQuantizationType(number)
    except ValueError:
        return None
    return kind.name, package().GGML_QUANT_SIZES[kind]


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
            if key in values or "\0" in key:
                h.fail(f"duplicate or invalid key {short(key)}")
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
        if name in stored:
            h.fail(f"tensor {name} is in the file twice")
        if offset != expected or offset + size > h.size - start:
            h.fail(f"tensor {name} has an invalid offset or size: truncated or damaged")
        expected = moefile.round_up(offset + size, alignment)
        stored[name] = Blocks(name, shape, kind, path, start + offset, block if dequantised(kind) else None)
    return values, stored


def dequantised(kind):
    return kind in hf.DTYPES or package().GGMLQuantizationType[kind] in package().quants._type_traits


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
        raise FormatError(f"{path}: split.count is {count}, so the names of the parts must end with "
                          f"-00001-of-{count:05d}.gguf etc.")
    paths, all_tensors = [f"{found[1]}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)], {}
    for i, piece in enumerate(paths):
        if not os.path.lexists(piece):
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

def transformers_names(stored, m, path):
    """Return the tensors under transformers' names."""
    about = decoder.ABOUT[m.family]
    out, inside = {}, {**INSIDE, **(GEMMA if about.gemma else MIXED if about.delta else {})}

    def put(name, t):
        if name in out:
            raise FormatError(f"{path}: tensors {out[name].name} and {t.name} are the same tensor")
        out[name] = t
    for name, t in stored.items():
        found = re.fullmatch(r"blk\.([0-9]{1,4})\.([a-z0-9_.]+?)(\.weight|\.bias)?", name)
        if not found:
            put(OUTSIDE.get(name, name), t)
            continue
        at, part, end = f"model.layers.{int(found[1])}.", found[2], found[3] or ""
        experts = re.fullmatch("ffn_(gate|up|down|gate_up)_exps", part)
        if int(found[1]) > m.layers:
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
            put(at + inside.get(part, part) + end, shaped(t, part) if about.delta else t)
    return out


def shaped(t, part):
    """Return a tensor of Qwen3.5 with the dimensions of 1 that transformers has."""
    if (part, len(t.shape)) in (("ssm_conv1d", 2), ("ffn_gate_inp_shexp", 1)):
        t = copy.copy(t)
        t.shape = (1, *t.shape) if len(t.shape) == 1 else (t.shape[0], 1, t.shape[1])
    return t


class Keys(hf.Config):
    """Read the metadata keys of the file's architecture; messages quote full key names."""

    def __init__(self, path, architecture, values):
        super().__init__(path, values)
        self.architecture = architecture

    def of(self, key, kind, default=None, **limits):
        """Return a value, which may be stored as a list of equal values, one per layer."""
        key = f"{self.architecture}.{key}"
        value = self.raw(key)
        if isinstance(value, np.ndarray):
            if not len(value) or (value != value[0]).any():
                raise FormatError(f"{self.path}: {key} differs between layers, which is not supported")
            return hf.Config(self.path, {key: value[0].item()}).get(key, kind, default, **limits)
        return self.get(key, kind, default, **limits)

    def must_be(self, key, kind, *fine):
        """Reject a key unless its value is in `fine` or it is missing."""
        value = self.of(key, kind, fine[0])
        if value not in fine:
            self.refuse(f"{self.architecture}.{key}", value, f": expected {' or '.join(map(str, fine))}")

    def refuse(self, key, value, more=""):
        value = value[:8].tolist() if isinstance(value, np.ndarray) else value
        raise FormatError(f"{self.path}: {key} is {short(value)}, which is not supported{more}")


UNREAD = [(name, tuple(json.loads(values)) if values else None) for name, values in ROWS["UNREAD"]]


def is_one_of(value, fine):
    return any(type(value) is type(x) and value == x for x in fine)


def check_unread(k):
    """Reject keys that were not read and may change the computation."""
    rules = [(re.compile(name.replace(".", r"\.").replace("*", ".*").replace("ARCH", re.escape(k.architecture))), fine)
             for name, fine in UNREAD]
    for key in sorted(set(k.values) - k.asked):
        fine = next(fine for name, fine in rules if name.fullmatch(key))
        value = k.values[key]
        if fine is not None and not is_one_of(value, fine):
            k.refuse(key, value)


def check_layers(k, stored, layers, all_layers):
    """Reject layers that are neither part of the network nor predict further tokens."""
    blocks = (re.match(r"blk\.([0-9]{1,4})\.", name) for name in stored)
    for i in sorted({int(found[1]) for found in blocks if found}):
        if i >= all_layers:
            raise FormatError(f"{k.path}: {k.architecture}.block_count is {all_layers}, but the file has layer {i}")
        if i >= layers and f"blk.{i}.nextn.eh_proj.weight" not in stored:
            raise FormatError(f"{k.path}: {k.architecture}.nextn_predict_layers is {all_layers - layers}, but layer {i} "
                              f"of {all_layers} has no tensor nextn.eh_proj")


def check_dimensions(k, stored):
    """Reject keys that contradict the tensors."""
    for tensor, first, axis, keys in ROWS["DIMENSION"]:
        pattern = rf"(blk\.{'0' if first else '[0-9]+'}\.)?{tensor}\.weight"
        t = next((t for name, t in stored.items() if re.fullmatch(pattern, name)), None)
        sizes = {f"{k.architecture}.{key}": k.of(key, int, 0) for key in keys.split() if t is not None}
        if sizes and axis < len(t.shape) and all(sizes.values()) and math.prod(sizes.values()) != t.shape[axis]:
            raise FormatError(f"{k.path}: {' and '.join(f'{key} {size}' for key, size in sizes.items())} contradict "
                              f"tensor {t.name} {list(t.shape)}")


def check_positions(k, scaled):
    """Return the factor by which positions are divided. Reject factors unless `scaled`; rope_freqs.weight contains the
    factors of Llama 3."""
    k.must_be("rope.scaling.type", str, "linear", "none")  # a missing type is linear
    linear = k.of("rope.scaling.type", str, "linear") == "linear"
    found = 1.0
    for key in "rope.scale_linear", "rope.scaling.factor":
        factor = k.of(key, float, 1.0)
        if factor in (0.0, 1.0) or not linear:
            continue
        if not scaled or not 1 <= factor <= 1e6:
            k.refuse(f"{k.architecture}.{key}", factor)
        found = factor
    return found


CONFIG_KEYS = {"hidden_size": "embedding_length", "num_hidden_layers": "block_count", "vocab_size": "vocab_size",
               "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
               "head_dim": "attention.key_length", "intermediate_size": "feed_forward_length",
               "rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon",
               "rope_theta": "rope.freq_base", "logit_scale": "logit_scale",
               "max_position_embeddings": "context_length", "num_experts": "expert_count",
               "num_experts_per_tok": "expert_used_count", "moe_topk": "expert_used_count",
               "moe_intermediate_size": "expert_feed_forward_length", "route_norm": "expert_weights_norm",
               "router_scaling_factor": "expert_weights_scale", "num_shared_experts": "expert_shared_count",
               "num_shared_expert": "expert_shared_count"}


def read_config(k, family, stored):
    """Return the equivalent of config.json, and its model; messages quote the file's keys."""
    config = hf.Config(k.path, config_of(k, family, stored))
    try:
        return config, decoder.read_config(config)
    except FormatError as error:
        name = lambda found: f"{k.architecture}.{CONFIG_KEYS[found[0]]}"
        raise FormatError(re.sub(rf"\b({'|'.join(CONFIG_KEYS)})\b", name, str(error))) from None


def config_of(k, family, stored):
    """Return the equivalent of config.json."""
    size = lambda key, default=None: k.of(key, int, default, least=1, most=1 << 24)
    all_layers = size("block_count")
    layers = all_layers - k.of("nextn_predict_layers", int, 0, least=0, most=all_layers - 1)
    heads = k.of("attention.head_count", int, least=1, most=1 << 16)
    head = size("attention.key_length", size("embedding_length") // heads)
    embedding = stored.get("token_embd.weight")
    if embedding is None:
        raise FormatError(f"{k.path}: tensor token_embd.weight is missing")
    check_layers(k, stored, layers, all_layers)
    check_dimensions(k, stored)
    k.must_be("attention.value_length", int, head)
    gemma, delta, cohere = (getattr(decoder.ABOUT[family], x) for x in ("gemma", "delta", "cohere"))
    turned = k.of("rope.dimension_count", int, head, least=1, most=head)
    if not delta:
        k.must_be("rope.dimension_count", int, head)
    factor = check_positions(k, gemma)
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in stored for i in range(min(layers, 256))]
    dense = sparse.index(True) if any(sparse) else layers
    k.must_be("leading_dense_block_count", int, dense, *([] if any(sparse) else [0]))
    c = {"model_type": family, "hidden_size": size("embedding_length"), "num_hidden_layers": layers,
         "num_attention_heads": heads, "num_key_value_heads": k.of("attention.head_count_kv", int, heads, least=1),
         "head_dim": head, "vocab_size": embedding.shape[0],
         "intermediate_size": size("feed_forward_length", size("expert_feed_forward_length", 1)),
         "layer_norm_eps" if cohere else "rms_norm_eps": k.of(
             f"attention.layer_norm{'' if cohere else '_rms'}_epsilon", float),
         "rope_parameters": {"rope_theta": k.of("rope.freq_base", float, 1e4), "rope_type": "default"},
         "tie_word_embeddings": "output.weight" not in stored, "max_position_embeddings": size("context_length")}
    if gemma:
        windows_of(k, c, factor)
    if cohere:
        c["logit_scale"] = k.of("logit_scale", float, 1.0, least=0.0, most=1e6) or 1.0  # 0 disables it
    if cohere == 2:
        kinds_of(k, c, k.of("attention.sliding_window", int, least=1, most=1 << 20), 4)
    if delta:
        delta_of(k, c, stored)
        c["partial_rotary_factor"] = min((turned + 0.5) / head, 1.0)  # the product with head is rounded down
    if any(sparse):
        mixture_of(k, family, c, sparse, stored)
    return c


LAYERS_27B = 62  # llama.cpp knows Gemma 3 27B, which has a query scale of its own, by its layers


def kinds_of(k, c, window, pattern):
    """Add the windows of layers to `c`. The pattern is a period, or a list with 1 for layers with a window."""
    key = f"{k.architecture}.attention.sliding_window_pattern"
    kinds = k.raw(key)
    if isinstance(kinds, np.ndarray):
        if len(kinds) != c["num_hidden_layers"] or kinds.dtype.kind == "f" or not np.isin(kinds, (0, 1)).all():
            k.refuse(key, kinds, ": expected 0 or 1 per layer")
        c["layer_types"] = ["sliding_attention" if x and window else "full_attention" for x in kinds]
    else:
        pattern = k.of("attention.sliding_window_pattern", int, pattern, least=1, most=1 << 24)
    c.update(sliding_window=window or 1, sliding_window_pattern=pattern if window else 1)


def windows_of(k, c, factor):
    """Add Gemma's windows and positions to `c`."""
    window, heads = k.of("attention.sliding_window", int, 0, least=0, most=1 << 20), c["num_attention_heads"]
    kinds_of(k, c, window, 6)
    c.update(rope_local_base_freq=k.of("rope.freq_base_swa", float, 1e4, least=1.0, most=1e12),
             query_pre_attn_scalar=c["hidden_size"] // heads if c["num_hidden_layers"] == LAYERS_27B else c["head_dim"])
    if factor != 1:
        c["rope_parameters"].update(rope_type="linear", factor=factor)


def delta_of(k, c, stored):
    """Add the kinds of Qwen3.5's layers and the sizes of Gated DeltaNet to `c`."""
    size = lambda key, most=1 << 16: k.of("ssm." + key, int, least=1, most=most)
    heads, inner = size("time_step_rank"), size("inner_size", 1 << 20)
    if inner % heads:
        k.refuse(f"{k.architecture}.ssm.inner_size", inner, f": not a multiple of {heads} heads")
    c.update(layer_types=["linear_attention" if f"blk.{i}.ssm_a" in stored else "full_attention"
                          for i in range(c["num_hidden_layers"])],
             linear_num_value_heads=heads, linear_value_head_dim=inner // heads, linear_key_head_dim=size("state_size"),
             linear_num_key_heads=size("group_count"), linear_conv_kernel_dim=size("conv_kernel", 64))


def mixture_of(k, family, c, sparse, stored):
    """Add mixture settings to `c`."""
    if decoder.ABOUT[family].dense:
        raise FormatError(f"{k.path}: experts are not supported in {k.architecture!r} models")
    k.must_be("expert_gating_func", int, *((2, 0) if family == "hy_v3" else (1, 0)))  # 2: sigmoid, 1: softmax
    k.must_be("expert_weights_norm", bool, True)
    if family != "hy_v3":
        k.must_be("expert_weights_scale", float, 1.0, 0.0)
    hidden = k.of("expert_feed_forward_length", int, c["intermediate_size"], least=1)
    used = k.of("expert_used_count", int)
    units = sum([t.shape[0] for name, t in stored.items() if name.endswith(".ffn_gate_shexp.weight")][:1])
    delta = decoder.ABOUT[family].delta
    one = c["intermediate_size"] if family == "hunyuan_v1_moe" else units or 1 if delta else hidden
    shared, rest = divmod(units, one)
    if rest:
        raise FormatError(f"{k.path}: the number of shared units is not a multiple of {one}")
    k.must_be("expert_shared_count", int, shared, *([] if shared else [0]))
    k.must_be("expert_shared_feed_forward_length", int, units, 0)
    c["num_experts"] = k.of("expert_count", int, least=2)
    if family == "hunyuan_v1_moe":
        c.update(moe_topk=used, moe_intermediate_size=hidden, num_shared_expert=shared)
    elif family == "hy_v3":
        c.update(num_experts_per_tok=used, moe_intermediate_size=hidden, num_shared_experts=shared,
                 mlp_layer_types=["sparse" if x else "dense" for x in sparse],
                 router_scaling_factor=k.of("expert_weights_scale", float, 1.0) or 1.0)  # 0 disables it
    elif delta:
        c.update(num_experts_per_tok=used, moe_intermediate_size=hidden, shared_expert_intermediate_size=units or 1)
    else:
        c.update(num_experts_per_tok=used, moe_intermediate_size=hidden, num_shared_experts=shared, norm_topk_prob=True,
                 mlp_only_layers=[i for i, x in enumerate(sparse) if not x])


# ---- The tokeniser ---------------------------------------------------------------------------------------------------

def token_of(k, name, count):
    """Return the token id stored under a key, or None if the key is missing."""
    key = f"tokenizer.ggml.{name}_token_id"
    return k.get(key, int, least=0, most=count - 1) if k.raw(key) is not None else None


class Tokens:
    """The tokens of a file: texts, kinds, and the pieces of the chat template."""

    def __init__(self, k, m, say):
        self.k, self.m, self.say, self.read = k, m, say, byte_bpe.Reader(k.path)
        value = lambda name: k.raw("tokenizer.ggml." + name)
        self.model, self.pre, self.texts, self.kinds = (value(x) for x in ("model", "pre", "tokens", "token_type"))
        self.ids = {name: token_of(k, name, m.vocabulary) for name in (*ENDS, "bos", "padding", "unknown")}
        self.of_characters = is_one_of(self.model, ("llama",))
        self.meta = {"tokenizer.kind": "none"}

    def check(self):
        """Reject unsupported tokenisers."""
        read = self.read
        if not is_one_of(self.model, ("gpt2", "llama")):
            read.fail(f"tokenizer.ggml.model {short(self.model)} is not supported: expected 'gpt2' (byte-level BPE) or "
                      "'llama' (SentencePiece)")
        known = ("default", None) if self.of_characters else PRE
        if self.pre is not None and not isinstance(self.pre, str) or self.pre not in known:
            read.fail(f"tokenizer.ggml.pre {short(self.pre)} is not supported: expected {', '.join(map(repr, known))}")
        if not isinstance(self.texts, list) or len(self.texts) > self.m.vocabulary:
            read.fail(f"tokenizer.ggml.tokens must be a list of at most {self.m.vocabulary} tokens")
        if self.kinds is None:
            self.kinds = np.full(len(self.texts), NORMAL)
        if not isinstance(self.kinds, np.ndarray) or len(self.kinds) != len(self.texts):
            read.fail("tokenizer.ggml.token_type must list the type of every token")
        self.kinds = self.kinds.copy()
        for key in ("add_eos_token", *(() if self.of_characters else ("add_space_prefix",))):
            if self.k.get("tokenizer.ggml." + key, bool, False):
                self.k.refuse("tokenizer.ggml." + key, True, ": prompts would differ")

    def text_of(self, name):
        i = self.ids[name]
        return self.texts[i] if i is not None and i < len(self.texts) else None

    def retype(self, merges, pieces):
        """Make tokens special if a key names them or the chat template spells them, unless merges can produce them."""
        made, named = {"".join(pair) for pair in merges}, [self.ids[name] for name in (*ENDS, "bos")]
        for i, text in enumerate(self.texts):
            if self.kinds[i] not in (CONTROL, USER) and len(text) > 1 and text not in made and (
                    i in named or any(text in piece for piece in pieces)):
                self.kinds[i] = CONTROL
                self.say(f"token {i}, {short(text)}, is typed as text, but named by a key or spelled by the chat "
                         "template: using it as a special token")

    def retype_users(self, pieces):
        """Make tokens of a SentencePiece model special that users' texts must not yield: the unknown token, and
        user-defined ones such as <start_of_turn> that the chat template spells, or keys name."""
        named = [self.ids[name] for name in (*ENDS, "bos")]
        for i, text in enumerate(self.texts):
            used = TAG.fullmatch(text) and (i in named or any(text in piece for piece in pieces))
            if self.kinds[i] == UNKNOWN or self.kinds[i] == USER and used:
                self.kinds[i] = CONTROL

    def derived_merges(self):
        """Return the merges of a SentencePiece model."""
        scores = self.k.raw("tokenizer.ggml.scores")
        if not isinstance(scores, np.ndarray) or scores.dtype != np.float32 or len(scores) != len(self.texts):
            self.read.fail("tokenizer.ggml.scores must list the score of every token")
        if not np.isfinite(scores).all():
            self.read.fail(f"the score of token {int(np.argmin(np.isfinite(scores)))} is not finite")
        tokens = {i: text for i, text in enumerate(self.texts) if self.kinds[i] in (NORMAL, USER) and text}
        if len(set(tokens.values())) < len(tokens):
            self.read.fail("the tokeniser has two ids for one token")
        return byte_bpe.merges_of(tokens, scores.tolist())

    def prompts(self, wanted):
        """Return the metadata of the chat template; `wanted` as in prompts.prompt_meta."""
        template, name = self.k.raw("tokenizer.chat_template"), self.k.raw("general.name")
        if wanted == "none":
            return prompts.no_prompt(self.say, wanted, "")
        if template is not None and not isinstance(template, str) or len(template or "") > prompts.LARGEST_TEMPLATE:
            self.k.refuse("tokenizer.chat_template", template)
        known = zip(prompts.TOKENS, map(self.text_of, ("bos", "eos", "padding", "unknown")))
        names = os.path.basename(self.k.path) + (f" {name}" if isinstance(name, str) else "")
        tokens = {key: text for key, text in known if text is not None}
        meta = prompts.meta_of(template, tokens, self.m.family, names, f"{self.k.path}: tokenizer.chat_template", wanted,
                               self.say)
        if not meta:
            return prompts.no_prompt(self.say, wanted, f"{self.k.path} has no tokenizer.chat_template")
        return {**meta, **prompts.named_languages(meta, self.k.raw("general.languages"))}

    def pack(self, wanted):
        """Set the metadata of the tokeniser and prompts."""
        self.check()
        if self.of_characters:
            spaced = self.k.get("tokenizer.ggml.add_space_prefix", bool, True)
            flags = byte_bpe.CHARACTERS | (byte_bpe.PREFIX | byte_bpe.TRIMMED) * spaced
            expressions, starts = (), True
        else:
            expressions, flags, starts = PRE[self.pre]
        found = self.prompts(wanted)
        pieces = [text for key, text in found.items() if PIECE.fullmatch(key)]
        if self.of_characters:
            self.retype_users(pieces)
        merges = (self.derived_merges() if self.of_characters
                  else self.read.merges({"merges": self.k.raw("tokenizer.ggml.merges")}))
        self.retype(merges, pieces)
        kinds, texts, users = self.kinds, list(enumerate(self.texts)), bool(self.of_characters)
        # User-defined tokens of characters are both: merges can make them.
        tokens = {i: text for i, text in texts if kinds[i] not in (CONTROL, UNUSED, *(() if users else (USER,)))}
        added = [byte_bpe.Added(i, text, bool(kinds[i] == CONTROL), False, bool(users and kinds[i] == USER))
                 for i, text in texts if kinds[i] in (CONTROL, USER)]
        try:
            blob = byte_bpe.pack(tokens, merges, added, list(expressions), flags)
        except FormatError as error:
            self.read.fail(error)
        self.meta = {"tokenizer.kind": byte_bpe.KIND, "tokenizer.model": blob, **found}
        if self.k.get("tokenizer.ggml.add_bos_token", bool, starts):
            self.begin()

    def begin(self):
        """Make prompts begin with the bos token, as in llama.cpp."""
        bos = self.text_of("bos")
        if bos is None:
            self.read.fail("tokenizer.ggml.add_bos_token is true, but bos_token_id is missing")
        for key in () if prompts.is_bare(self.meta) else ("prompt.prefix", "prompt.system.prefix"):
            if not self.meta.get(key, bos).startswith(bos):
                self.say(f"{key} begins with {short(bos)}: tokenizer.ggml.add_bos_token is true")
                self.meta[key] = bos + self.meta[key]
        self.meta = decoder.begin_with(self.meta, self.ids["bos"], self.m, self.k.path, self.say)

    def ends(self):
        """Return the ids that end an answer: end of text and of turn, by key and, as in llama.cpp, by spelling. Files
        of Hunyuan's 7B models also list an ordinary token, which is skipped."""
        found = [self.ids[name] for name in ENDS if self.ids[name] is not None]
        typed = isinstance(self.kinds, np.ndarray) and isinstance(self.texts, list)
        kind_of = lambda i: self.kinds[i] if typed and i < len(self.kinds) else None
        found += [i for i, text in enumerate(self.texts if typed else ()) if text in SPELLED and kind_of(i) == CONTROL]
        found = list(dict.fromkeys(found))
        plain = [i for i in found if kind_of(i) == NORMAL]
        if plain and len(plain) < len(found):
            self.say(f"ignoring end token {plain[0]}, which is an ordinary piece of text")
            return [i for i in found if i not in plain]
        return found


def tokens_of(k, m, say, wanted, ids_only):
    """Return the tokeniser of a file."""
    tokens = Tokens(k, m, say)
    pieces = "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.huggingface.json"
    there = [key for key in pieces if k.raw(key) is not None]
    missing = [key for key in pieces[:2] if key not in there]
    if ids_only:
        k.asked |= {key for key in k.values if key.startswith("tokenizer.")}
    elif missing:
        hf_tokens.no_tokeniser(missing, there)
    else:
        tokens.pack(wanted)
    return tokens


# ---- The model -------------------------------------------------------------------------------------------------------

SAMPLING, OTHER_SAMPLING = dict(ROWS["RECOMMENDED"]), tables.choices(ROWS["OTHER_SAMPLING"])


def generation_of(k, ends, say):
    """Return the equivalent of generation_config.json."""
    value, found = lambda name: k.raw("general.sampling." + name), {}
    for key, name in SAMPLING.items():
        kind, least, most = decoder.SAMPLING[name]
        if value(key) is not None:
            found[name] = k.get("general.sampling." + key, kind, least=least, most=most)
    for name, off in OTHER_SAMPLING.items():
        if value(name) is not None and not is_one_of(value(name), off):
            say(f"ignoring general.sampling.{name} {short(value(name))}, which is not supported")
    return hf.Config(k.path, {**found, "eos_token_id": ends})


def read_gguf(path, say=lambda message: None, row=None, ids_only=False):
    """Return the metadata and tensors of a file; `row` is a row of prompts.json."""
    values, stored, paths = open_parts(path)
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise FormatError(f"{path}: general.architecture {short(architecture)} is not supported: expected "
                          f"{', '.join(map(repr, FAMILIES))}")
    sparse = any(".ffn_gate_inp.weight" in name for name in stored)
    fitting = [x for x in FAMILIES[architecture] if sparse and not decoder.ABOUT[x].dense]
    family, k = (fitting or FAMILIES[architecture])[0], Keys(path, architecture, values)
    config, m = read_config(k, family, stored)
    m.norm_offset = 0  # llama.cpp's files include the 1 that Gemma and Qwen3.5 add to the weights of norms
    m.log_rate = False
    m.tiled = int(any(m.delta) and m.values != m.delta_keys)  # llama.cpp's order of value heads
    named = transformers_names(stored, m, path)
    if architecture == "llama":
        named = {name: decoder.interleaved(name, t, m) for name, t in named.items()}
    factors = named.pop("rope_freqs.weight", None)
    if factors is not None:
        if factors.shape != (m.head // 2,) or not factors.known():
            raise FormatError(f"{path}: rope_freqs.weight {list(factors.shape)} must contain {m.head // 2} factors")
        m.frequencies = m.frequencies / np.concatenate(list(factors.read(m.head))).astype(np.float64)
        if not (np.isfinite(m.frequencies) & (m.frequencies >= 0)).all():
            raise FormatError(f"{path}: tensor rope_freqs.weight contains invalid factors")
    tokens = tokens_of(k, m, say, row, ids_only)
    m.bos = m.bos if tokens.ids["bos"] is None else tokens.ids["bos"]
    if tokens.ids["padding"] is not None:
        config.values["pad_token_id"] = tokens.ids["padding"]
    generation = generation_of(k, tokens.ends(), say)
    licence = values.get("general.license")
    check_unread(k)
    found = decoder.build(m, config, generation, named, tokens.meta, paths, say)
    found.quantised = sorted({t.kind for t in stored.values()} - set(hf.DTYPES))
    found.licence = licence if isinstance(licence, str) else ""
    return found
