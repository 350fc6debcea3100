"""Read checkpoints in Hugging Face's layout: M2M-100 and dense NLLB, NLLB-MoE, Marian (OPUS-MT); T5 with t5.py.

A folder contains config.json, optionally generation_config.json and tokeniser files, and model.safetensors or
pytorch_model.bin, in one file or in shards with an index. Neither transformers nor PyTorch is needed. All names, types
and shapes are checked before any data is read. Tensors are read in blocks of rows to limit memory.

    found = read_hf(folder)
    found.meta              metadata
    found.tensors           name -> Rows (shape, blocks() of float32 rows), or (up, down) lists of Rows for experts
"""
import copy
import json
import math
import os
import re
import struct
import types

import numpy as np

import hf_tokens
import moefile
import tables
import torchfile
from hf_json import parse_json, read_json, short
from moefile import FormatError, open_regular

BLOCK = 1 << 24  # approximate number of values per block
LARGEST_HEADER, LARGEST_DIMENSION = 1 << 25, 1 << 40
AGAIN = "download it again"
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
SIZES = {**{kind: np.dtype(d).itemsize for kind, d in DTYPES.items()}, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
         "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8}


# ---- Files -----------------------------------------------------------------------------------------------------------

class Rows:
    """A matrix [n, k] or vector [n], read in blocks of rows."""

    def __init__(self, shape, parts):
        self.shape, self.parts = tuple(shape), parts

    def blocks(self):
        """Yield the rows of all parts in order, as float32 arrays; all but the last have a multiple of 16 rows."""
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        want, held = max(16, BLOCK // max(width, 1) // 16 * 16), []
        for part in self.parts:
            for block in part(want):
                held.append(block)
                have = sum(map(len, held))
                if have >= 16:
                    whole = held[0] if len(held) == 1 else np.concatenate(held)
                    yield whole[:have // 16 * 16]
                    held = [whole[have // 16 * 16:]] if have % 16 else []
        if held:
            yield np.concatenate(held)

    def array(self):
        return np.concatenate(list(self.blocks()))


class Stored:
    """A tensor in a checkpoint file; kind: number format ("F32", ...); place: equal for tensors that share bytes."""

    def __init__(self, name, shape, kind, file, open, place):
        self.name, self.shape, self.kind, self.file, self.open, self.place = name, tuple(shape), kind, file, open, place

    def known(self):
        """Return True if the number format is supported."""
        return self.kind in DTYPES

    def row_bytes(self):
        return math.prod(self.shape[1:]) * np.dtype(DTYPES[self.kind]).itemsize

    def numbers(self, data):
        """Decode the bytes of whole rows to float32."""
        x = np.frombuffer(data, DTYPES[self.kind])
        return (x.astype(np.uint32) << 16).view(np.float32) if self.kind == "BF16" else x.astype(np.float32, copy=False)

    def read(self, rows):
        """Yield the tensor's rows as float32 arrays of `rows` rows each."""
        with self.open() as file:
            for at in range(0, self.shape[0], rows):
                count = min(rows, self.shape[0] - at)
                data = file.read(count * self.row_bytes())
                if len(data) < count * self.row_bytes():
                    raise FormatError(f"{self.file}: tensor {self.name} is truncated")
                x = self.numbers(data)
                if not np.isfinite(x).all():
                    raise FormatError(f"{self.file}: tensor {self.name} contains values that are not finite")
                yield x.reshape(count, *self.shape[1:])

    def part(self, index, begin, end):
        """Return rows [begin, end) of the index-th matrix of a tensor [n, rows, cols]."""
        inner = copy.copy(self)
        inner.shape, inner.place = (end - begin, *self.shape[2:]), (self.place, index, begin)

        def opened():
            file = self.open()
            file.seek((index * self.shape[1] + begin) * inner.row_bytes(), os.SEEK_CUR)
            return file
        inner.open = opened
        return inner


def open_at(path, offset):
    file = open_regular(path)
    file.seek(offset)
    return file


def read_safetensors(path):
    """Return the stored tensors by name, checking every length and offset of the header."""
    with open_regular(path) as file:
        size, start = os.fstat(file.fileno()).st_size, file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) == 8 and size - 8 < length <= LARGEST_HEADER:
            raise FormatError(f"{path} is truncated: {size} bytes, but its header alone has {length}; {AGAIN}")
        if not 2 <= length <= LARGEST_HEADER:
            raise FormatError(f"{path}: not a safetensors file: {AGAIN}")
        try:
            header = parse_json(file.read(length), tuple)
        except ValueError:
            raise FormatError(f"{path}: the header is not valid JSON, or too many values: {AGAIN}") from None
    if not isinstance(header, tuple):
        raise FormatError(f"{path}: the header is not an object: {AGAIN}")
    last = dict(header)
    for name, about in header:
        if last[name] is not about:
            raise FormatError(f"{path}: duplicate key {name}")
    out, spans = {}, []
    for name, about in header:
        if name == "__metadata__":
            continue
        about = dict(about) if isinstance(about, tuple) and len(dict(about)) == len(about) else {}
        kind, shape, place = about.get("dtype"), about.get("shape"), about.get("data_offsets")
        if not (isinstance(shape, list) and isinstance(place, list) and len(place) == 2
                and len(shape) <= torchfile.MAX_DIMENSIONS
                and all(type(x) is int and 0 <= x < LARGEST_DIMENSION for x in shape + place)):
            raise FormatError(f"{path}: tensor {name} lacks a valid dtype, shape or data_offsets: {AGAIN}")
        if not isinstance(kind, str) or kind not in SIZES:
            raise FormatError(f"{path}: tensor {name} has number format {short(kind)}, which is not supported: use the "
                              "model in FP8, as GGUF, or unquantised")
        begin, end = place
        if end - begin != math.prod(shape) * SIZES[kind]:
            raise FormatError(f"{path}: tensor {name} has an invalid offset or size: {AGAIN}")
        spans.append((begin, end, name))
        out[name] = Stored(name, shape, kind, path, lambda at=8 + length + begin: open_at(path, at), (path, begin, end))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise FormatError(f"{path}: tensor {name} overlaps another, or follows a gap: {AGAIN}")
        at = end
    if size != 8 + length + at:
        raise FormatError(f"{path} is {'truncated' if size < 8 + length + at else 'damaged'}: {size} bytes, but its "
                          f"tensors end at {8 + length + at}; {AGAIN}")
    return out


MAX_NAMES = 8  # limit of names per shared tensor; embeddings have four
TORCH_KINDS = {"<f4": "F32", "<f2": "F16", "<f8": "F64", torchfile.BFLOAT16: "BF16"}


def read_torch(path):
    """Return the tensors stored in a file written by torch.save, by name."""
    try:
        checkpoint = torchfile.load(path)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    if isinstance(checkpoint, dict) and isinstance(checkpoint.get("model"), dict):
        checkpoint = checkpoint["model"]
    return stored_tensors(path, checkpoint)


def stored_tensors(path, state):
    """Return the stored tensors of a state_dict."""
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise FormatError(f"{path}: no state_dict of tensors")
    out = {}
    for name, t in state.items():
        if not isinstance(t, torchfile.Tensor):
            raise FormatError(f"{path}: {name} is not a tensor")
        kind = TORCH_KINDS.get(t.storage.kind, "I64")
        if kind in DTYPES and not t.contiguous():
            raise FormatError(f"{path}: tensor {name} is a transposed or partial view, which is not supported")
        out[name] = Stored(name, t.shape, kind, path, t.open, (path, t.storage.key, t.offset, t.shape))
    if sum(math.prod(t.shape) for t in out.values()) > MAX_NAMES * os.path.getsize(path):
        raise FormatError(f"{path}: the tensors share bytes and are larger than is plausible for the file size")
    return out


READERS = (("model.safetensors", read_safetensors), ("pytorch_model.bin", read_torch))
ELSEWHERE = (  # files of other programs, and advice
    (r"model-.*-of-.*\.safetensors", "copy its index too, model.safetensors.index.json"),
    (r".*\.gguf", "name that file"), (r".*\.npz|model\..*\.bin", "convert it with --from marian"),
    (r".*\.pt", "convert it with --from fairseq"),
    (r"tf_model\.h5|flax_model\.msgpack|rust_model\.ot|.*\.onnx", "load and save it with transformers in PyTorch"),
    (r".*\.(safetensors|bin)", "rename it to model.safetensors or pytorch_model.bin if it holds all weights"))


def no_weights(folder):
    """Return the error for a folder without weights, with advice for the files it has."""
    for pattern, advice in ELSEWHERE:
        found = sorted(name for name in os.listdir(folder) if re.fullmatch(pattern, name))
        if found:
            return FormatError(f"{folder} contains no weights in Hugging Face's layout, but {found[0]}: {advice}")
    names = " nor ".join(name for name, _ in READERS)
    return FormatError(f"{folder} contains neither {names}, whole or in shards: copy the model's whole folder")


def read_shards(folder, index, read, say):
    """Return the tensors of all shards in an index. Like transformers, also use tensors that it does not list."""
    weight_map, index = read_json(index).get("weight_map"), os.path.basename(index)
    if not isinstance(weight_map, dict) or not weight_map or not all(
            isinstance(file, str) and file not in ("", ".", "..") and os.path.basename(file) == file
            for file in weight_map.values()):
        raise FormatError(f"{index}: no weight_map from tensors to files in this folder: {AGAIN}")
    shards, out = {}, {}
    for tensor, file in weight_map.items():
        if file not in shards:
            if not os.path.lexists(os.path.join(folder, file)):
                raise FormatError(f"shard {file} is missing: {index} lists it for {tensor}")
            shards[file] = read(os.path.join(folder, file))
        if tensor not in shards[file]:
            raise FormatError(f"tensor {tensor} is missing from {file}: {index} lists it there")
        out[tensor] = shards[file][tensor]
    for file, tensors in shards.items():
        for tensor in tensors:
            if tensor not in weight_map and tensor in out:
                raise FormatError(f"tensor {tensor} is in several shards, and {index} does not list it")
            if tensor not in weight_map:
                say(f"{index} does not list tensor {tensor}: using the one in {file}")
                out[tensor] = tensors[tensor]
            elif weight_map[tensor] != file:
                raise FormatError(f"tensor {tensor} is also in {file}, but {index} lists {weight_map[tensor]}")
    return out


def open_checkpoint(folder, say=lambda message: None):
    """Return the stored tensors of one file or of all shards, by name."""
    if os.path.lexists(os.path.join(folder, "adapter_config.json")):
        raise FormatError(f"{folder} contains an adapter (adapter_config.json), which is not supported: merge it into "
                          "the model first")
    for name, read in READERS:
        path = os.path.join(folder, name)
        if os.path.lexists(path):
            return read(path)
        if os.path.lexists(path + ".index.json"):
            return read_shards(folder, path + ".index.json", read, say)
    raise no_weights(folder)


# ---- config.json -----------------------------------------------------------------------------------------------------

FAMILIES = {"m2m_100": ("m2m", ("M2M100ForConditionalGeneration", "M2M100Model")),
            "nllb-moe": ("mixture", ("NllbMoeForConditionalGeneration", "NllbMoeModel")),
            "nllb_moe": ("mixture", ("NllbMoeForConditionalGeneration", "NllbMoeModel")),
            "marian": ("marian", ("MarianMTModel", "MarianModel")), "t5": ("t5", ("T5ForConditionalGeneration",)),
            "mt5": ("t5", ("MT5ForConditionalGeneration",)), "umt5": ("t5", ("UMT5ForConditionalGeneration",)),
            "switch_transformers": ("t5", ("SwitchTransformersForConditionalGeneration",))}
KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}


def expected(kind, least, most):
    """Describe a value for a message."""
    if least is None or most is None:
        return KINDS[kind] + (f" of {least} or more" if least is not None else "")
    return f"{least:g} to {most:g}" if kind is float else f"{least} to {most}"


class Config:
    """The values of config.json or generation_config.json, read with type checks and defaults. Keys that were not read
    are rejected by end()."""

    def __init__(self, path, values):
        self.path, self.values, self.asked = os.path.basename(path), values, set()

    def raw(self, key, default=None):
        """Return the value of a key without checks, or `default` if it is missing or null."""
        self.asked.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def get(self, key, kind, default=None, least=None, most=None):
        """Return the value of a key. The key is required if `default` is None."""
        value = self.raw(key, default)
        if value is None:
            raise FormatError(f"{self.path}: {key} is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or least is not None and value < least or most is not None and value > most:
            raise FormatError(f"{self.path}: {key} is {short(value)}, which is not supported: expected "
                              f"{expected(kind, least, most)}")
        return value

    def choose(self, key, table):
        """Look up the value of a key in `table`."""
        value = self.get(key, str)
        if value not in table:
            raise FormatError(f"{self.path}: {key} {short(value)} is not supported: expected {', '.join(table)}")
        return table[value]

    def only(self, key, *values):
        """Reject a key unless its value is one of `values`; the default is the first."""
        if self.raw(key) is not None and self.values[key] not in values:
            raise FormatError(f"{self.path}: {key} is {short(self.values[key])}: only "
                              f"{' or '.join(map(repr, values))} is supported")

    def end(self, *ignored):
        """Reject keys that have a value, but were neither read nor listed in `ignored`."""
        for key, value in self.values.items():
            if value is not None and key not in self.asked and not any(key in table for table in ignored):
                raise FormatError(f"{self.path}: unknown key {short(key)} with value {short(value)}: remove it if the "
                                  "model does not depend on it")


# Keys of config.json that do not change translations: training, labels, types of computation, what is returned.
ROWS = tables.read("decoder.inc")
NO_EFFECT = tables.words(ROWS["IGNORED"], "config")
# Keys with only one supported value, listed with its synonyms; the default is the first.
ONLY = {"is_encoder_decoder": (True,), "is_decoder": (False,),
        "tie_encoder_decoder": (False,), "pruned_heads": (None, {}), "prefix": (None, ""), "auto_map": (None,),
        "task_specific_params": (None, {}), "force_bos_token_to_be_generated": (False,)}
NOT_IN_MARIAN = {"normalize_before": (False,), "normalize_embedding": (False,), "add_final_layer_norm": (False,)}
# Values that transformers' classes use for missing keys.
SPECIAL = {"decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
DEFAULTS = {"m2m": {**SPECIAL, "scale_embedding": True}, "mixture": {**SPECIAL, "scale_embedding": True},
            "marian": {"eos_token_id": 0, "forced_eos_token_id": 0, "activation_function": "gelu"}}


def refuse_quantised(c):
    about = c.raw("quantization_config")
    if about is not None:
        method = about.get("quant_method") if isinstance(about, dict) else about
        raise FormatError(f"{c.path}: quantization_config: quant_method {short(method)} is not supported: use the "
                          "unquantised model")


def read_config(c):
    """Return the checkpoint's configuration as a namespace."""
    family, architectures = c.choose("model_type", FAMILIES)
    c.values = {**DEFAULTS[family], **c.values}
    given = c.raw("architectures", [architectures[0]])
    if not isinstance(given, list) or len(given) != 1 or given[0] not in architectures:
        raise FormatError(f"{c.path}: architectures {short(given)} is not supported: expected "
                          f"{' or '.join(architectures)}")
    m = types.SimpleNamespace(path=c.path, family=family, sides={}, shared=True,
                              width=c.get("d_model", int, least=4, most=1 << 20),
                              vocabulary=c.get("vocab_size", int, least=4, most=1 << 24), experts=0,
                              tokenizer_class=c.raw("tokenizer_class"))
    m.source_vocabulary = m.vocabulary
    if family == "marian":
        m.shared = c.get("share_encoder_decoder_embeddings", bool, True)
        if m.shared:
            c.only("decoder_vocab_size", m.vocabulary)
        m.vocabulary = c.get("decoder_vocab_size", int, m.vocabulary, least=4, most=1 << 24)
    for side in ("encoder", "decoder"):
        heads = c.get(side + "_attention_heads", int, least=1, most=m.width)
        if m.width % heads:
            raise FormatError(f"{c.path}: {side}_attention_heads {heads} does not divide d_model {m.width}")
        m.sides[side] = types.SimpleNamespace(layers=c.get(side + "_layers", int, least=1, most=256), heads=heads,
                                              ffn=c.get(side + "_ffn_dim", int, least=1, most=1 << 24), step=0)
    m.activation = c.choose("activation_function", ACTIVATIONS)
    m.scale = math.sqrt(m.width) if c.get("scale_embedding", bool, False) else 1.0
    m.positions = c.get("max_position_embeddings", int, 1024, least=2, most=1 << 16)
    m.pad = c.get("pad_token_id", int, least=0, most=min(m.vocabulary, m.source_vocabulary) - 1)
    m.eos = c.get("eos_token_id", int, least=0, most=m.vocabulary - 1)
    m.start = c.raw("decoder_start_token_id")
    m.tied = c.get("tie_word_embeddings", bool, True)
    refuse_quantised(c)
    for key, values in {**ONLY, **(NOT_IN_MARIAN if family == "marian" else {})}.items():
        c.only(key, *values)
    if family == "mixture":
        read_mixture(c, m)
    c.end(NO_EFFECT, GENERATION, GENERATION_USED, GENERATION_NO_EFFECT)
    return m


def read_mixture(c, m):
    m.experts = c.get("num_experts", int, 128, least=2, most=1 << 20)
    m.dropout = c.get("moe_token_dropout", float, 0.2, least=0.0, most=0.99)
    for side, about in m.sides.items():
        about.step = c.get(side + "_sparse_step", int, 4, least=0)
    c.only("second_expert_policy", "all")
    c.only("moe_eval_capacity_token_fraction", 1.0)  # values below 1 make the tokens of a batch compete for experts
    c.only("router_bias", False)
    c.only("router_dtype", "float32")
    if m.activation != "relu":
        raise FormatError(f"{c.path}: experts with activation_function {m.activation!r} are not supported")


GENERATION_FILE = "generation_config.json"
# Keys of this file with only one supported meaning, listed with its synonyms.
GENERATION = tables.choices(ROWS["GENERATION"])
# Keys that do not change which tokens are generated without sampling.
GENERATION_NO_EFFECT = tables.words(ROWS["IGNORED"], "generation")
GENERATION_USED = tables.words(ROWS["IGNORED"], "used_generation")


def start_of(c, m):
    """Return the decoder's first token. If generation_config.json lacks it, transformers uses its bos_token_id."""
    given = c.raw("decoder_start_token_id", c.raw("bos_token_id", m.start))
    given = given[0] if isinstance(given, list) and len(given) == 1 else given
    for path, start in (c.path, given), ("config.json", m.start):
        if start is not None and not (type(start) is int and 0 <= start < m.vocabulary):
            raise FormatError(f"{path}: decoder_start_token_id is {short(start)}: not a token of the model")
    if given is None:
        raise FormatError(f"{c.path}: decoder_start_token_id is missing")
    if given == m.pad and m.family not in ("marian", "t5"):
        raise FormatError(f"{c.path}: decoder_start_token_id {given} is not supported: it is pad_token_id, which has "
                          "no position")
    return given


def ends_of(c, m, say):
    """Return the tokens that end a translation, first the one that also ends sources."""
    given = c.raw("eos_token_id")
    if given is None and c.path == GENERATION_FILE:
        say(f"{c.path} lacks eos_token_id: translations end with {m.eos}, eos_token_id of config.json")
    ends = m.eos if given is None else given
    ends = ends if isinstance(ends, list) else [ends]
    if m.eos not in ends or len(ends) > moefile.MAX_ENDS \
            or not all(type(x) is int and 0 <= x < m.vocabulary for x in ends):
        raise FormatError(f"{c.path}: eos_token_id is {short(given)}: expected up to {moefile.MAX_ENDS} tokens of the "
                          f"model, including {m.eos}, which ends sources")
    return [m.eos, *dict.fromkeys(x for x in ends if x != m.eos)]


def suppressed_tokens(c, m, ends):
    """Return the tokens that are never generated."""
    words, more = c.raw("bad_words_ids", []), c.raw("suppress_tokens", [])
    if not isinstance(words, list) or not all(isinstance(w, list) and len(w) == 1 and type(w[0]) is int
                                              and 0 <= w[0] < m.vocabulary for w in words):
        raise FormatError(f"{c.path}: bad_words_ids must contain single tokens only, not {short(words)}")
    if not isinstance(more, list) or not all(type(x) is int and 0 <= x < m.vocabulary and x not in ends for x in more):
        raise FormatError(f"{c.path}: suppress_tokens must contain tokens that do not end translations, not "
                          f"{short(more)}")
    return sorted({w[0] for w in words if w[0] not in ends}.union(more))  # transformers drops end tokens from bad words


def check_forced_start(c, tokens, say):
    """Check that the first token forced by `generate` is a language, which moe-translate -t forces too."""
    forced = c.raw("forced_bos_token_id")
    if forced is None:
        return
    tags = list(tokens.get("languages.tags", ())) if tokens.get("target.tag") else []
    if type(forced) is not int or forced not in tags:
        raise FormatError(f"{c.path}: forced_bos_token_id is {short(forced)}, which is not supported: it is not a "
                          "target language of the tokeniser. Remove it, and force the token with --raw-ids --force")
    code = tokens["languages.codes"][tags.index(forced)]
    say(f"forced_bos_token_id of {c.path} is {code}: select it as the target language, -t {code}")


def longest_of(c, m, say):
    """Return the largest number of generated tokens; max_length includes the start token."""
    if c.raw("max_new_tokens") is None and c.raw("max_length") is None:
        say(f"{c.path} has no max_length: translations are limited to 200 tokens, not to transformers' default of 20")
    longest = c.get("max_length", int, 201, least=2) - 1
    if c.raw("max_new_tokens") is not None:
        longest = c.get("max_new_tokens", int, least=1)
    if longest > m.positions:
        say(f"limiting translations to {m.positions} tokens, the model's positions, of the {longest} in {c.path}")
    return min(longest, m.positions)


def decode_meta(c, m, tokens, say=lambda message: None):
    """Return decode.* and token.*, the defaults of `generate` for this checkpoint. Reject settings that the engine
    lacks."""
    for key, values in GENERATION.items():
        if key != "suppress_tokens":
            c.only(key, *values)
    start, ends = start_of(c, m), ends_of(c, m, say)
    check_forced_start(c, tokens, say)
    meta = {"token.bos": start, "token.eos": ends[0], "decode.rules": "hf",
            "decode.beam": c.get("num_beams", int, 1, least=1, most=moefile.MAX_BEAM),
            "decode.length_penalty": c.get("length_penalty", float, 1.0, least=0.0, most=100.0),
            "decode.length_constant": 0.0,
            "decode.early_stopping": int(c.get("early_stopping", bool, False)),
            "decode.max_new": longest_of(c, m, say)}
    if ends[1:]:
        meta["token.ends"] = np.array(ends[1:], np.int64)
    if c.raw("forced_eos_token_id") is not None:
        c.only("forced_eos_token_id", m.eos, [m.eos])
        meta["decode.force_end"] = 1
    renormalise, words = c.get("renormalize_logits", bool, False), suppressed_tokens(c, m, ends)
    if words:
        meta["token.never" if renormalise else "token.suppressed"] = np.array(words, np.int64)
    if c.path == GENERATION_FILE:  # read_config() checks config.json
        c.end(GENERATION_NO_EFFECT)
    return meta


# ---- Tensors ---------------------------------------------------------------------------------------------------------

IGNORED = re.compile(r"(encoder|decoder)\.(embed_positions\.(weights?|_float_tensor)|version)\Z|(lm_head\.)?version\Z")
TIED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


def m2m_positions(first, count, width):
    """Return rows first + 2, first + 3, ... of M2M-100's table (transformer.md, section 1) in float32, with each
    operation rounded once; the first token's row is pad_token_id + 1. PyTorch's exp is off by one ulp for some
    frequencies, and its table by at most 1.5e-5 in 1026 rows of width 1024 (torch 2.13.0 on x86-64)."""
    half = width // 2
    step = np.float32(math.log(10000) / (half - 1))
    frequency = np.exp((np.arange(half, dtype=np.float32) * -step).astype(np.float64)).astype(np.float32)
    angle = (np.arange(first + 2, first + 2 + count, dtype=np.float32)[:, None] * frequency).astype(np.float64)
    return np.pad(np.concatenate([np.sin(angle), np.cos(angle)], 1).astype(np.float32), ((0, 0), (0, width % 2)))


def marian_positions(first, count, width):
    """Return the sines, then the cosines, of p / 10000^(2i / width), computed in float64."""
    angle = np.arange(first, first + count)[:, None] / np.power(10000, 2 * np.arange((width + 1) // 2) / width)
    return np.concatenate([np.sin(angle), np.cos(angle[:, :width // 2])], 1).astype(np.float32)


def check_positions(b, m):
    """Reject learned positions. Marian's files may contain the computed table, rounded."""
    for name in ("encoder.embed_positions.weight", "decoder.embed_positions.weight"):
        at = 0
        for block in b.take(name, m.positions, m.width).read(4096) if name in b.stored else ():
            if np.abs(block - marian_positions(at, len(block), m.width)).max() > 0.01:
                raise FormatError(f"{b.stored[name].file}: tensor {name} contains learned positions, which are not "
                                  "supported")
            at += len(block)


class Builder:
    """Take tensors of a checkpoint by name and shape, and add them under their names in the model file."""

    def __init__(self, stored, file):
        """file: the name of the file that describes the model, for messages."""
        self.stored, self.file, self.taken, self.meta, self.tensors = stored, file, set(), {}, {}

    def take(self, name, *shape):
        t = self.stored.get(name)
        if t is None:
            raise FormatError(f"{self.file}: tensor {name} is missing: the configuration requires shape {list(shape)}; "
                              f"{AGAIN}")
        if not t.known():
            raise FormatError(f"{t.file}: number format {t.kind} of tensor {t.name} is not supported: expected F32, "
                              "F16 or BF16")
        if t.shape != shape:
            raise FormatError(f"{t.file}: tensor {t.name} has shape {list(t.shape)}: the configuration requires "
                              f"{list(shape)}")
        self.taken.add(name)
        return t

    def finish(self, ignored):
        """Reject tensors that were neither taken nor ignored."""
        for name, t in self.stored.items():
            if name not in self.taken and not ignored.match(name):
                raise FormatError(f"{t.file}: unexpected tensor {t.name} {list(t.shape)}: not described by the "
                                  "configuration")

    def put(self, name, *stored):
        self.tensors[name] = Rows((sum(t.shape[0] for t in stored), *stored[0].shape[1:]), [t.read for t in stored])

    def linear(self, name, rows, cols, *sources):
        """Add the weight and bias of a linear layer, stacking several sources."""
        self.put(name + ".weight", *(self.take(s + ".weight", rows // len(sources), cols) for s in sources))
        self.put(name + ".bias", *(self.take(s + ".bias", rows // len(sources)) for s in sources))

    def norm(self, name, source, width):
        for part in (".weight", ".bias"):
            self.put(name + ".norm" + part, self.take(source + part, width))

    def layer(self, side, kind, **settings):
        """Add a sub-layer to the encoder or decoder and return its name."""
        name = f"{side}.{self.meta.get(side + '.layers', 0)}"
        self.meta[side + ".layers"] = self.meta.get(side + ".layers", 0) + 1
        self.meta.update(moefile.layer_meta(name, kind, **settings))
        return name


def put_attention(b, m, side, source, kind, norm):
    d = m.width
    name = b.layer(side, kind=kind, heads=m.sides[side].heads, norm=norm, epsilon=1e-5, residual=1)
    b.norm(name, source + "_layer_norm", d)
    q, k, v = (f"{source}.{x}_proj" for x in "qkv")
    if kind == "attention":
        b.linear(name + ".qkv", 3 * d, d, q, k, v)
    else:
        b.linear(name + ".q", d, d, q)
        b.linear(name + ".kv", 2 * d, d, k, v)
    b.linear(name + ".out", d, d, source + ".out_proj")


def put_experts(b, m, side, source, norm):
    d, f, n = m.width, m.sides[side].ffn, m.experts
    name = b.layer(side, kind="moe", experts=n, k=2, hidden=f, gate="topk", output="none", scale=1 - m.dropout,
                   activation="relu", norm=norm, epsilon=1e-5, residual=1)
    b.norm(name, source + "ff_layer_norm", d)
    b.put(name + ".gate.weight", b.take(source + "ffn.router.classifier.weight", n, d))
    experts = [f"{source}ffn.experts.expert_{e}." for e in range(n)]
    b.tensors[name + ".experts"] = tuple([Rows(t.shape, [t.read])
                                          for t in (b.take(f"{x}{part}.weight", *shape) for x in experts)]
                                         for part, shape in (("fc1", (f, d)), ("fc2", (d, f))))
    b.put(name + ".experts.up_bias", *(b.take(x + "fc1.bias", f) for x in experts))
    b.put(name + ".experts.down_bias", *(b.take(x + "fc2.bias", d) for x in experts))


def put_side(b, m, side):
    d, about = m.width, m.sides[side]
    norm = "after" if m.family == "marian" else "before"
    cross = "cross_attention" if m.family == "mixture" else "encoder_attn"
    for i in range(about.layers):
        source = f"{side}.layers.{i}."
        put_attention(b, m, side, source + "self_attn", "attention", norm)
        if side == "decoder":
            put_attention(b, m, side, source + cross, "cross", norm)
        if about.step > 0 and (i + 1) % about.step == 0:
            put_experts(b, m, side, source, norm)
            continue
        name = b.layer(side, kind="ffn", hidden=about.ffn, activation=m.activation, norm=norm, epsilon=1e-5, residual=1)
        b.norm(name, source + ("ff" if m.family == "mixture" else "final") + "_layer_norm", d)
        inner = source + "ffn." if m.family == "mixture" else source
        b.linear(name + ".up", about.ffn, d, inner + "fc1")
        b.linear(name + ".down", d, about.ffn, inner + "fc2")
    if m.family != "marian":
        b.norm(b.layer(side, kind="norm", epsilon=1e-5), side + ".layer_norm", d)


def put_tied(b, m, name, names, vocabulary, say):
    """Add one of several tied tensors after checking that all are equal."""
    there = [x for x in names if x in b.stored]
    found = [b.take(x, vocabulary, m.width) for x in there or names[:1]]
    for other in found[1:]:
        if other.place == found[0].place:
            continue
        if vocabulary * m.width > 1 << 26:
            say(f"comparing {other.name} with {found[0].name}")
        rows = max(1, BLOCK // m.width)
        if other.kind != found[0].kind or not all(np.array_equal(x, y)
                                                  for x, y in zip(found[0].read(rows), other.read(rows))):
            raise FormatError(f"{other.file}: tensors {found[0].name} and {other.name} should be tied, but differ")
    b.put(name, found[0])


def put_embeddings(b, m, say):
    outside = ("lm_head.weight",) if m.tied else ()
    if m.shared:
        put_tied(b, m, "embedding.weight", TIED[:3] + outside, m.vocabulary, say)
    else:
        put_tied(b, m, "source.embedding.weight", TIED[1:2], m.source_vocabulary, say)
        put_tied(b, m, "target.embedding.weight", TIED[2:3] + outside, m.vocabulary, say)
    if not m.tied:
        b.put("output.weight", b.take("lm_head.weight", m.vocabulary, m.width))
    if m.family == "marian" and "final_logits_bias" in b.stored:
        bias = b.take("final_logits_bias", 1, m.vocabulary)
        b.tensors["output.bias"] = Rows((m.vocabulary,), [lambda rows: (x.reshape(-1) for x in bias.read(rows))])
    if m.family == "marian":
        check_positions(b, m)
    table, first = (marian_positions, 0) if m.family == "marian" else (m2m_positions, m.pad - 1)
    b.tensors["positions.weight"] = Rows((m.positions, m.width), [
        lambda rows: (table(first + at, min(rows, m.positions - at), m.width) for at in range(0, m.positions, rows))])


def read_configs(folder):
    """Return config.json and generation_config.json, which defaults to config.json, as in transformers."""
    paths = [os.path.join(folder, name) for name in ("config.json", GENERATION_FILE)]
    config = Config(paths[0], read_json(paths[0]))
    return config, Config(paths[1], read_json(paths[1])) if os.path.lexists(paths[1]) else config


def files_in(folder):
    return [entry.path for entry in os.scandir(folder) if entry.is_file()]


def identity(paths):
    """Identify a checkpoint without reading it: return the names, sizes and times of its files."""
    about = [(os.path.basename(path), os.stat(path)) for path in paths]
    return sorted((name, x.st_size, x.st_mtime_ns) for name, x in about)


def without_prefix(stored):
    """Remove the prefix "model." from names; NllbMoeModel writes names without the prefix."""
    out = {}
    for name, t in stored.items():
        short = name[len("model."):] if name.startswith("model.") else name
        if short in out:
            raise FormatError(f"{t.file}: tensors {name} and {out[short].name} are the same tensor, with and without a "
                              "prefix")
        out[short] = t
    return out


def read_hf(folder, say=lambda message: None, ids_only=False):
    """Return the metadata and tensors of a checkpoint."""
    if not os.path.isdir(folder):
        raise FormatError("not a folder: --from hf requires a folder that contains config.json")
    config, generation = read_configs(folder)
    family = FAMILIES.get(config.raw("model_type") if isinstance(config.raw("model_type"), str) else "", ("",))[0]
    reader = t5 if family == "t5" else types.SimpleNamespace(read_config=read_config, build=build)
    m = reader.read_config(config)
    return reader.build(m, open_checkpoint(folder, say), generation, hf_tokens.read_tokens(folder, m, ids_only),
                        files_in(folder), say)


def build(m, stored, generation, tokens, files, say):
    """Return the metadata and tensors of a configuration; `stored`: tensors by transformers' names."""
    decode, b = decode_meta(generation, m, tokens, say), Builder(without_prefix(stored), m.path)
    meta = {"vocab.size": m.vocabulary, "model.width": m.width, "embedding.scale": m.scale,
            "token.bos": decode["token.bos"], "token.eos": decode["token.eos"], "token.pad": m.pad, "source.bos": 0,
            "source.eos": 1, "limit.source": m.positions, "limit.target": m.positions}
    put_embeddings(b, m, say)
    for side in ("encoder", "decoder"):
        put_side(b, m, side)
    b.finish(IGNORED)
    return types.SimpleNamespace(meta={**meta, **b.meta, **decode, **tokens}, tensors=b.tensors,
                                 identity=identity(files))


import t5  # noqa: E402 - it uses the names above
