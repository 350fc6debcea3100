#!/usr/bin/env python3
"""Test damaged and half-published models of every family: both converters must
refuse them in one message that names the file and the problem, without output,
or convert them to the bytes of the undamaged model.

Usage: tests/python tests/convert/test_damaged.py [--only NAME] [--show TEXT]
           [--cases N] [--seed N]

--show prints the cases whose source or damage contains TEXT with their
messages.
--cases sets the number of random damages per model (12), on which both
converters must agree. BUILD selects the folder of convert_here, e.g. one with
sanitizers.
"""
import argparse
import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

from converting import ROOT, convert_here
from suite import Suite

sys.path.append(os.path.join(ROOT, "tests", "fuzz"))
try:
    import gguf
    import numpy as np

    import checkpoint_seeds
    import make_ct2
    import make_decoder as make
    import make_gguf
    import make_marian
    import make_transformers
    import moefile
    import test_damage
    import test_hf_tokens
    import test_marian
    import test_t5
    from containers import Ct2, Gguf, Marian, Safetensors
except ImportError:
    gguf = None
CONVERT = os.path.join(ROOT, os.environ.get("BUILD", "build"), "convert_here")
test = Suite()
gguf_test = test.needs(gguf, "NumPy or gguf")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>404</title></head><body>Entry not found</body></html>\n"
PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
FOLDER, NOWHERE, PIPE = "a folder", "a link to nowhere", "a pipe"  # in place of the bytes of a file


# ---- Undamaged models ------------------------------------------------------------------------------------------------

class Model:
    """The files of a model. weights, config, tokens: names of its most important files; config may be None."""

    def __init__(self, name, kind, files, weights, config="config.json", tokens="tokenizer.json", container=None,
                 given="", c=True, python=True):
        self.name, self.kind, self.files, self.weights = name, kind, files, weights
        self.config, self.tokens, self.container, self.given = config, tokens, container, given
        self.c, self.python = c, python  # which converters read the model

    def copy(self):
        return Model(self.name, self.kind, dict(self.files), self.weights, self.config, self.tokens, self.container,
                     self.given, self.c, self.python)

    def json(self, name=None):
        return json.loads(self.files[name or self.config])

    def edit(self, name=None, **values):
        """Set keys of a JSON file, in text_config if that has them; a value of `...` removes a key."""
        about = self.json(name)
        for key, x in values.items():
            inner = about["text_config"] if key in about.get("text_config", {}) and key != "model_type" else about
            inner[key] = x
            if x is ...:
                del inner[key]
        self.files[name or self.config] = json.dumps(about).encode()

    def setting(self, key):
        about = self.json()
        return {**about, **about.get("text_config", {})}.get(key)

    def open(self):
        return self.container(self.files[self.weights])

    def put(self, opened):
        self.files[self.weights] = opened.build()

    def write(self, at, whole=None):
        """Write the files, with links to equal files of whole = (model, its folder); return the path to convert."""
        os.makedirs(at)
        for name, data in self.files.items():
            path = os.path.join(at, name)
            if "/" in name:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            if whole and data is whole[0].files.get(name):
                os.link(os.path.join(whole[1], name), path)
                continue
            if data is FOLDER:
                os.mkdir(path)
            elif data is PIPE:
                os.mkfifo(path)
            elif data is NOWHERE:
                os.symlink("/nowhere/at/all", path)
            else:
                with open(path, "wb") as file:
                    file.write(data)
        return os.path.join(at, self.given) if self.given else at


def files_of(write):
    """Return {name: bytes} of the folder that write(at) makes."""
    files = {}
    with tempfile.TemporaryDirectory() as at:
        write(at)
        for folder, _, names in os.walk(at):
            for name in names:
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    files[os.path.relpath(path, at)] = file.read()
    return files


def hub(name, write, tokens="tokenizer.json", kind="hub", **more):
    return Model(name, kind, files_of(write), "model.safetensors", tokens=tokens, container=Safetensors, **more)


def decoders():
    """Yield folders of decoder-only models in Hugging Face's layout."""
    def small(family, **changes):
        def write(at):
            make.small(at, family, vocab_size=448, **changes)
            make.write_tokeniser(at, make_gguf.TOKENISERS[family])
        return write

    def multimodal(family):
        def write(at):
            make.make_multimodal(at, family, **make.small_changes(family))
            make.write_tokeniser(at, make_gguf.TOKENISERS[family])
        return write

    def fp8(form):
        def write(at):
            make.write_fp8(at, "qwen3_moe", form, vocab_size=448)
            make.write_tokeniser(at, "C")
        return write

    def pieces(at):
        make.small(at, "llama", vocab_size=300)
        with open(at + "/tokenizer.model", "wb") as file:
            file.write(make.small_pieces())

    def ranks(at):
        make.small(at, "hunyuan_v1_dense", vocab_size=700)
        make.write_ranks(at)
    for family in make.FAMILIES:
        yield hub(family, small(family))
    for family in "gemma3_text", *make.QWEN_3_5:
        yield hub(family.removesuffix("_text"), multimodal(family))
    for form in make.FP8:
        yield hub("fp8-" + form, fp8(form))
    yield hub("tokenizer.model", pieces, "tokenizer.model")
    yield hub("hy.tiktoken", ranks, "hy.tiktoken")
    sharded = hub("shards", small("llama", shards=3))
    sharded.weights = "model-00001-of-00003.safetensors"
    yield sharded


def encoders():
    """Yield folders that only convert.py reads: M2M-100, NLLB-MoE, OPUS-MT, T5 and its relatives."""
    for family, tokens in ("nllb", "sentencepiece.bpe.model"), ("nllb-moe", "sentencepiece.bpe.model"), (
            "marian", "source.spm"):
        name = "opus-mt" if family == "marian" else family  # "marian" is a kind of models
        yield hub(name, test_damage.hf(family, "safetensors"), tokens, "encoder", c=False)
    for model_type in "t5", "mt5", "umt5", "switch_transformers":
        yield hub(model_type, lambda at: test_t5.make_model(at, model_type), "spiece.model", "encoder", c=False)


def ggufs():
    for family in make_gguf.ARCHITECTURES:
        def write(at):
            with tempfile.TemporaryDirectory() as other:
                changes = {"rope_theta": 1e4, "rope_scaling": None} if family.startswith("hunyuan") else {}
                if family == "gemma3_text":
                    changes = {"query_pre_attn_scalar": make.SMALL["head_dim"]}
                config, arrays = make.small(other, family, vocab_size=448, **changes)
            tensors = {name: x.astype(np.float32) for name, x in arrays.items()}
            make_gguf.write(at + "/x.gguf", config, tensors, tokens=True)
        yield Model("gguf-" + family, "gguf", files_of(write), "x.gguf", None, "x.gguf", Gguf, "x.gguf")


def marians():
    for layout in "float32", "intgemm8", "npz":
        def write(at):
            make_marian.make(at, "student", layout, **{"dim-emb": 8, "transformer-dim-ffn": 8})
            test_marian.write_spm(at + "/vocab.enpt.spm", make_marian.TOKENS)
            os.unlink(at + "/vocab.yml")
        weights = "model.npz" if layout == "npz" else "model.bin"
        yield Model("marian-" + layout, "marian", files_of(write), weights, None, "vocab.enpt.spm",
                    None if layout == "npz" else Marian, c=layout != "npz")


def ct2s():
    for kind, numbers in ("argos", "int8"), ("opennmt", ""), ("t5", "int16"), ("marian", "float16"):
        def write(at):
            arrays, about = make_ct2.make(kind)
            make_ct2.write(at, make_ct2.quantised(arrays, numbers) if numbers else arrays, about,
                           separate=kind == "opennmt")
        yield Model("ct2-" + kind, "ct2", files_of(write), "model.bin", tokens="sentencepiece.model", container=Ct2,
                    python=False)


# ---- Damage ----------------------------------------------------------------------------------------------------------
# Rows are (kinds of models, name, damage, words). A damage changes a Model; it returns False if it does not apply. Each
# word is a regular expression that the messages of both converters match. "same": the model is converted to the bytes
# of the undamaged one; "fine": both converters write the same bytes, with a tokeniser; "agree": that, or both
# refuse it.

HUB, ALL = "hub encoder", "hub encoder gguf marian ct2"
SOME = "llama gemma3 shards nllb t5"  # models for damages of files that are read alike in all families


def of_files():
    """Yield damages of whole files."""
    changes = (("empty", lambda x: b"", ""), ("half", lambda x: x[:len(x) // 2], ""),
               ("a web page", lambda x: PAGE, "web.page"), ("a Git LFS pointer", lambda x: POINTER, "LFS"),
               ("a folder", lambda x: FOLDER, "regular|published|empty"),
               ("a pipe", lambda x: PIPE, "regular|published|checkpoint|GGUF"),
               ("a link to nowhere", lambda x: NOWHERE, "[Nn]o.such.file|missing|cannot.open|no.model"),
               ("zeros", lambda x: bytes(len(x)), ""), ("0xff", lambda x: b"\xff" * len(x), ""),
               ("missing", lambda x: None, ""))
    for which in "weights", "config", "tokens":
        for name, change, words in changes:
            def damage(m, which=which, change=change):
                file = getattr(m, which)
                if file is None or which == "tokens" and file == m.weights:
                    return False
                data = change(m.files.pop(file))
                if data is not None:
                    m.files[file] = data
            yield ALL, f"{which} {name}", damage, words

    def only(*names, **more):
        def damage(m):
            data = m.files.pop(m.weights)
            m.files.pop("model.safetensors.index.json", None)
            for name in [x for x in m.files if x.startswith("model-")]:
                del m.files[name]
            m.files.update({name: more.get("data", data) for name in names})
        return damage
    yield HUB, "only a .part of the weights", only("model.safetensors.part"), "safetensors.part finish"
    yield HUB, "only an .incomplete file", only(".cache/0123.incomplete", "x.incomplete"), "x.incomplete finish"
    yield "hub", "only a pickle", only("pytorch_model.bin", data=b"PK\3\4" + bytes(99)), "pytorch_model.bin"
    yield HUB, "only an adapter", only("adapter_model.safetensors", "adapter_config.json", data=b"{}"), "adapter merge"
    yield HUB, "only consolidated.safetensors", only("consolidated.safetensors"), "consolidated.safetensors rename"
    yield HUB, "only shards without an index", only("model-00001-of-00002.safetensors",
                                                    "model-00002-of-00002.safetensors"), "index|rename"
    yield HUB, "only weights of TensorFlow", only("tf_model.h5", data=b"\x89HDF"), "neither|tf_model.h5"
    yield HUB, "only a GGUF file beside config.json", only("x.gguf", data=b"GGUF"), "x.gguf"
    yield HUB, "only a file of a picture encoder", only("mmproj-x.gguf", data=b"GGUF"), "mmproj-x.gguf"
    yield "gguf", "only a file of a picture encoder", rename("x.gguf", "mmproj-x.gguf", clip), "clip"
    yield "gguf", "a web page with its name", lambda m: m.files.update({"x.gguf": PAGE}), ""

    def more(m):
        m.files.update({"README.md": b"# A model\n", "LICENSE.md": b"none", ".gitattributes": b"*.bin filter=lfs\n",
                        "optimizer.pt": b"x", "training_args.bin": b"x", "logo.png": b"\x89PNG", "x.part": b"x",
                        ".cache/huggingface/x.lock": b"", "original/params.json": b"{}", "tf_model.h5": b"x",
                        "onnx/model.onnx": b"x"})
    yield "hub encoder gguf ct2", "other files", more, "same"


def rename(old, new, change=lambda data: data):
    return lambda m: m.files.update({new: change(m.files.pop(old))}) or setattr(m, "given", new)


def clip(data):
    """Return a GGUF file of an encoder of pictures."""
    file = Gguf(data)
    file.head["general.architecture"] = Gguf.value("clip")
    return file.build()


def of_tensors():
    """Yield damages of one tensor in a well-formed file."""
    def changed(name, words, change, kinds="hub encoder gguf ct2 marian"):
        def damage(m):
            if m.container is None:
                return False
            file = m.open()
            if change(file, m) is False:
                return False
            m.put(file)
        return kinds, name, damage, words

    def norm(file):
        return next(t for t in file.tensors if re.search(r"norm|_ln_scale|/gamma", t.name))

    def matrix(file):
        return next(t for t in file.tensors if len(t.shape) == 2 and t.shape[0] != t.shape[1] and t.shape[0] < 400
                    and min(t.shape) > 1)
    yield changed("a norm is missing", "missing|index", lambda file, m: file.tensors.remove(norm(file)))
    yield changed("a matrix is missing", "missing|index", lambda file, m: file.tensors.remove(matrix(file)))
    for size in 2, 3, 4:
        yield changed(f"the last {size} tensors are missing", "missing|index|tensors|dimensions|special:model.yml",
                      lambda file, m, n=size: file.tensors.__delitem__(slice(-n, None))
                      if file.tensors[-1].shape and "mtp" not in file.tensors[-1].name else False)
    yield changed("no tensors", "missing|not.a|no.tensors|no.variables|special|has.no|index|damaged",
                  lambda file, m: file.tensors.clear())
    yield changed("a norm is renamed", "missing|unexpected|index", lambda file, m: setattr(norm(file), "name", "other"))
    yield changed("another tensor", "other.x|unexpected|index|not.list",
                  lambda file, m: file.tensors.insert(0, tensor_like(norm(file), "other.x")))
    yield changed("a tensor twice", "twice|duplicate|both",
                  lambda file, m: file.tensors.append(tensor_like(norm(file), norm(file).name)))
    yield changed("a transposed shape", "shape|columns|match|contradict|rows|scale|vocabulary",
                  lambda file, m: matrix(file).shape.reverse() if matrix(file).shape[0] % 32 else False)
    yield changed("a longer shape", "offset|size|match|shape|bytes|damaged", grow)
    yield changed("a norm with no numbers", "shape|offset|size|match|bytes", empty)
    yield changed("a norm with more dimensions", "shape|dimensions|offset",
                  lambda file, m: norm(file).shape.insert(0, 1) if m.kind != "marian" else False)
    yield changed("nine dimensions", "dimensions|lacks", lambda file, m: norm(file).shape.extend([1] * 9))
    for value in Safetensors.UNKNOWN if gguf else ():
        yield changed(f"number format {value!r}", "format|dtype|type",
                      lambda file, m, x=value: setattr(matrix(file), "kind", x), HUB)
    for number in range(4):
        yield changed(f"unknown number format {number}", "format|type",
                      lambda file, m, i=number: setattr(matrix(file), "kind", (*file.UNKNOWN, file.UNKNOWN[0])[i]),
                      "gguf ct2 marian")
    yield changed("integers", "I32|int|type|format|scale|numbers|match|size|offset", integers)
    for name, bits in ("NaN", 0x7fc00000), ("infinity", 0xff800000):
        yield changed(f"a norm with {name}", "finite", lambda file, m, x=bits: set_number(norm(file), x))
    yield changed("an unknown key in __metadata__", "same", lambda file, m: setattr(file, "head", {"a": "b"}), "hub")


def tensor_like(t, name):
    return type(t)(name, t.shape, t.kind, t.data)


def grow(file, m):
    t = next(t for t in file.tensors if len(t.shape) == 2)
    t.shape[0] += 1000


def empty(file, m):
    t = next(t for t in file.tensors if re.search(r"norm|_ln_scale|/gamma", t.name))
    t.shape[:], t.data = [0] * len(t.shape), b""


def integers(file, m):
    t = next(t for t in file.tensors if re.search(r"norm|_ln_scale|/gamma", t.name))
    t.kind = {"hub": "I32", "encoder": "I32", "gguf": 26, "ct2": 3, "marian": 0x104}[m.kind]
    n = int(np.prod(t.shape))
    t.data = (4 * n * b"\1")[:4 * n]
    if m.kind == "ct2":
        t.shape = [2 * x for x in t.shape]  # numbers of any type are converted
        t.data *= 2


def set_number(t, bits):
    """Make the last number of a tensor NaN or infinite."""
    if t.kind in ("F32", 0, 0x404):
        value = bits.to_bytes(4, "little")
    elif t.kind in ("F16", 1, 4):
        value = (bits >> 16 & 0x8000 | 0x7c00 | (0x200 if bits & 0x7fffff else 0)).to_bytes(2, "little")
    else:
        value = (bits >> 16).to_bytes(2, "little")
    end = int(np.prod(t.shape)) * len(value)
    t.data = t.data[:end - len(value)] + value + t.data[end:]


def of_headers():
    """Yield damages of the first bytes of weights in safetensors."""
    def changed(name, words, change):
        def damage(m):
            m.files[m.weights] = change(m.files[m.weights])
        return SOME, name, damage, words
    number = lambda n: n.to_bytes(8, "little")
    for size in 1 << 63, (1 << 64) - 1, 1 << 40, 1 << 25, 10 ** 6, 0, 1, 9:
        yield changed(f"a header of {size} bytes", "truncated|not.a.safetensors|not.valid",
                      lambda x, n=size: number(n) + x[8:])
    for text in b"[]", b"{}", b"7", b"null", b'{"a": 1}', b'{"a": {}}', b"[" * 50000, b'{"a":' * 50000, b"\xff\xfe{}":
        yield changed(f"a header {text[:9]!r}", "object|missing|lacks|damaged|not.valid|tensors|index",
                      lambda x, t=text: number(len(t)) + t)
    for end in b"more", bytes(4096):
        yield changed(f"{len(end)} bytes at the end", "damaged bytes", lambda x, e=end: x + e)
    for n in 1, 7, 8, 9, 20:
        yield changed(f"only {n} bytes", "truncated|not.a.safetensors|not.valid", lambda x, n=n: x[:n])
    yield changed("a byte less", "truncated", lambda x: x[:-1])

    def fields(name, words, **values):
        def change(x):
            size = int.from_bytes(x[:8], "little")
            header = json.loads(x[8:8 + size])
            header[next(k for k in header if "norm" in k)].update(values)
            text = json.dumps(header).encode()
            return number(len(text)) + text + x[8 + size:]
        return changed(name, words, change)
    for value in [-1], [1.5], ["8"], [1 << 62, 4], [1 << 40], 8, None, [[8]]:
        yield fields(f"shape {value}", "norm shape|offset|size", shape=value)
    for value in [0, 1 << 62], [-4, 4], [4, 0], [0], [0, 4, 4], "x", None, [0.5, 4]:
        yield fields(f"data_offsets {value}", "norm|overlap shape|offset|overlap", data_offsets=value)


def of_json():
    """Yield damages of JSON files, config.json and others."""
    def changed(file, name, words, change, kinds=SOME):
        def damage(m):
            there = m.config if file == "config" else file
            if there not in m.files:
                return False
            m.files[there] = change(m.files[there])
        return kinds, f"{file}: {name}", damage, words
    for file in "config", "generation_config.json", "tokenizer.json":
        yield changed(file, "invalid UTF-8", "valid", lambda x: x.replace(b'"', b'"\xff', 1))
        yield changed(file, "invalid UTF-8 in a value", "valid", lambda x: b'{"x": "\xc3(", ' + x[1:])
        yield changed(file, "nested lists", "valid",
                      lambda x: b'{"x": ' + b"[" * 100000 + b"]" * 100000 + b", " + x[1:])
        yield changed(file, "nested objects", "valid", lambda x: b'{"x": ' + b'{"a":' * 100000)
        yield changed(file, "a key twice", "duplicate", lambda x: x[:-1] + b"," + x[1:])
        yield changed(file, "a list", "object", lambda x: b"[" + x + b"]")
        yield changed(file, "a number", "object", lambda x: b"7")
        yield changed(file, "null", "object|valid", lambda x: b"null")
        yield changed(file, "NaN", "valid", lambda x: b'{"x": NaN, ' + x[1:])
        yield changed(file, "a comma at the end", "valid", lambda x: x[:-1] + b",}")
        yield changed(file, "a comment", "valid", lambda x: b"// x\n" + x)
        yield changed(file, "UTF-16", "valid", lambda x: x.decode().encode("utf-16"))
        yield changed(file, "text after it", "valid", lambda x: x + b"x")
        yield changed(file, "a NUL byte after it", "valid", lambda x: x + b"\0")
        yield changed(file, "a NUL character", "NUL|U.0000|valid|unknown", lambda x: b'{"x\\u0000": 1, ' + x[1:])
        yield changed(file, "half a surrogate", "valid|unknown|Unicode", lambda x: b'{"x": "\\ud800", ' + x[1:])
        yield changed(file, "an invalid escape", "valid", lambda x: b'{"x\\u00g0": 1, ' + x[1:])
        yield changed(file, "a number that begins with 0", "valid", lambda x: b'{"x": 01, ' + x[1:])
        yield changed(file, "a TAB in a text", "valid", lambda x: b'{"x\t": 1, ' + x[1:])
        yield changed(file, "a long number", "valid", lambda x: b'{"x": ' + b"1" * 5000 + b", " + x[1:])
        yield changed(file, "spaces", "same", lambda x: b" \r\n\t" + x.replace(b": ", b" :\n ") + b"\n\n",
                      "llama gemma3 shards")
        yield changed(file, "a byte order mark", "same", lambda x: b"\xef\xbb\xbf" + x, "llama gemma3 shards")


def short_of(value):
    return "missing" if value is ... else "10 ** 400" if value == 10 ** 400 else repr(value)


def of_config():
    """Yield damages of keys of config.json."""
    def keys(words, kinds=HUB, there=None, **values):
        def damage(m):
            if there and m.setting(there) is None or "intermediate_size" in values and m.setting("num_experts") \
                    and m.setting("linear_num_value_heads"):
                return False  # mixtures of Qwen3.5 and Lara have no such layer
            m.edit(**values)
        return kinds, ", ".join(f"{key} is {short_of(x)}" for key, x in values.items())[:70], damage, words
    for value in ..., None, 7, "", "gpt_oss", "clip", "siglip", "qwen2_vl", "x" * 1000, "a\nb\x1b[31m", ["llama"]:
        known = "lara_mini switch_transformers" if value is None or value is ... or isinstance(value, str) else ""
        yield keys("model_type " + known, model_type=value)
    for value in ["OtherModel"], "x", [], [7], {}, ["A", "B"]:
        yield keys("architectures expected", architectures=value)
    for key in "hidden_size", "d_model":
        for value in 0, -1, 1e18, 10 ** 18, 1.5, "8", True, [8], {}, ..., 1 << 63, 10 ** 400:
            yield keys(f"{key}|shape|heads|valid", there=key, **{key: value})
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size",
                "encoder_layers", "decoder_attention_heads", "encoder_ffn_dim", "num_layers", "num_heads", "d_kv"):
        for value in 0, "8", 1e18, 1000:
            yield keys(f"{key}|heads|shape|tensor|layers", there=key, **{key: value})
    for value in 3, 5, 0, -2, 1e18:
        yield keys("head_dim|columns|shape|head", "hub", "head_dim", head_dim=value)
    for key, most in ("num_experts_per_tok", "num_experts"), ("num_experts_per_tok", "num_local_experts"):
        for value in 99, 0, "2":
            yield keys(key, "hub", most, **{key: value})
    yield keys("moe_topk", "hub", "moe_topk", moe_topk=99)
    yield keys("num_experts", "hub", "num_experts", num_experts=1)
    for rope in {"type": "yarn", "factor": 4}, {"rope_type": "longrope"}, {"type": "dynamic", "factor": 2}, [], "x", \
            {"type": 7}, {"rope_type": "default", "new": 1}, {"rope_theta": 0}, {"rope_theta": "1e4"}:
        yield keys("rope", "hub", rope_scaling=rope, rope_parameters=None)
    for method in "awq", "gptq", "bitsandbytes", "quanto", "", None:
        yield keys(f"quantization_config {method or 'quant_method'} use", quantization_config={
            "quant_method": method, "bits": 4})
    for value in "fp8", [], {}, 7:
        yield keys("quantization_config", quantization_config=value)
    for value in {"a": 1}, "x" * 5000, [[[]]], 0, False:
        yield keys("new_feature remove", new_feature=value)
    yield keys("hidden_act", "hub", hidden_act="other")
    yield keys("heads", "hub", num_attention_heads=5, num_key_value_heads=3)
    yield keys("rms_norm_eps", "hub", rms_norm_eps=-1)
    yield keys("rms_norm_eps", "hub", rms_norm_eps="1e-5")
    yield keys("max_position_embeddings", "hub", max_position_embeddings=0)
    yield keys("bos_token_id", "hub", bos_token_id=99999)
    yield keys("tie_word_embeddings", tie_word_embeddings="yes")
    yield keys("auto_map", "encoder", auto_map={"AutoModel": "x.py"})

    def generation(words, kinds=HUB, **values):
        def damage(m):
            m.edit("generation_config.json", **values)
        return kinds, "generation: " + ", ".join(f"{key} is {short_of(x)}" for key, x in values.items()), damage, words
    for value in 99999, -1, [], [2] * 9, "2", 1.5, True:
        yield generation("eos_token_id", eos_token_id=value)
    yield generation("no_repeat_ngram_size", no_repeat_ngram_size=3)
    yield generation("new_feature", new_feature=3)
    yield generation("num_beams", num_beams=0)
    yield generation("num_beams", num_beams=1000)
    yield generation("length_penalty", length_penalty=-1)


def of_shards():
    """Yield damages of a folder with shards and an index."""
    index, last = "model.safetensors.index.json", "model-00003-of-00003.safetensors"

    def changed(name, words, change):
        def damage(m):
            if index not in m.files:
                return False
            change(m)
        return "hub", f"shards: {name}", damage, words

    def mapped(name, words, change):
        def damage(m):
            about = m.json(index)
            m.files[index] = json.dumps(change(about["weight_map"]) or about).encode()
        return changed(name, words, damage)
    yield changed("only the index", f"{m_shard(1)} missing", lambda m: [
        m.files.pop(x) for x in list(m.files) if x.startswith("model-")])
    yield changed("only the shards", "index|rename", lambda m: m.files.pop(index) and None)
    yield changed("an empty index", "index.json valid", lambda m: m.files.update({index: b""}))
    yield changed("a page as the index", "index.json web.page", lambda m: m.files.update({index: PAGE}))
    yield changed("a pointer as the index", "index.json LFS", lambda m: m.files.update({index: POINTER}))
    yield changed("a pointer as a shard", f"{last} LFS", lambda m: m.files.update({last: POINTER}))
    yield changed("a truncated shard", f"{last} truncated", lambda m: m.files.update({last: m.files[last][:-9]}))
    yield changed("a .part of a shard", f"{last} missing",
                  lambda m: m.files.update({last + ".part": m.files.pop(last)}))
    yield changed("a shard twice", "shard|both|missing|index", lambda m: m.files.update({last: m.files[m.weights]}))
    yield changed("a shard of another model", "", lambda m: m.files.update({last: other_shard(m.files[last])}))
    yield changed("a whole file too", "fine", lambda m: m.files.update({"model.safetensors": whole_of(m)}))
    yield mapped("a tensor that no shard has", f"{last} new missing", lambda x: x.update(new=last))
    yield mapped("a shard that is not there", "model-9 missing", lambda x: x.update(new="model-9.safetensors"))
    for name in "../x", "", "a/b", 7, None, ".", "..", "x" * 300:
        yield mapped(f"a shard named {str(name)[:9]!r}", "index.json|missing|x", lambda x, n=name: x.update(new=n))
    yield mapped("a tensor that it does not list", "same", lambda x: x.pop("model.norm.weight") and None)
    yield mapped("an empty map", "weight_map", lambda x: x.clear())
    yield mapped("no map", "weight_map", lambda x: {"metadata": {}})
    yield mapped("a list", "weight_map", lambda x: {"weight_map": list(x)})
    yield mapped("the wrong shard", "index.json|missing", lambda x: x.update(dict.fromkeys(x, last)))


def m_shard(i):
    return f"model-{i:05d}-of-00003.safetensors"


def other_shard(data):
    file = Safetensors(data)
    for t in file.tensors:
        t.shape, t.data = [x * 2 for x in t.shape], t.data * 2 ** len(t.shape)
    return file.build()


def whole_of(m):
    first = Safetensors(m.files[m_shard(1)])
    first.tensors += [t for i in (2, 3) for t in Safetensors(m.files[m_shard(i)]).tensors]
    return first.build()


def of_tokens():
    """Yield damages of tokenisers and of chat templates."""
    def changed(name, words, change):
        def damage(m):
            if m.tokens != "tokenizer.json":
                return False
            about = m.json(m.tokens)
            if change(about) is False:
                return False
            m.files[m.tokens] = json.dumps(about, ensure_ascii=False).encode()
        return "hub", f"tokeniser: {name}", damage, words

    def file(name, data, words, kinds="hub"):
        return kinds, f"{name}: {data[:30]!r}", lambda m: m.files.update({name: data}) if (
            m.tokens != "hy.tiktoken" or not re.search("remove|add_", words)) else False, words
    vocabulary = lambda x: x["model"]["vocab"]
    yield changed("an id above the vocabulary", "tokenizer.json 9999", lambda x: vocabulary(x).update(new=9999))
    yield changed("more ids than rows", "tokenizer.json 448", lambda x: vocabulary(x).update(
        {f"new{i}": i for i in range(440, 449)}))
    yield changed("ids twice", "tokenizer.json id", lambda x: vocabulary(x).update(new1=440, new2=440))
    yield changed("a negative id", "tokenizer.json id", lambda x: vocabulary(x).update(new=-1))
    yield changed("ids that are no numbers", "tokenizer.json id", lambda x: vocabulary(x).update(new="440"))
    yield changed("no vocabulary", "tokenizer.json vocab", lambda x: x["model"].pop("vocab") and None)
    yield changed("an empty vocabulary", "tokenizer.json", lambda x: vocabulary(x).clear())
    yield changed("no merges", "tokenizer.json merges", lambda x: x["model"].pop("merges") and None)
    yield changed("a merge of unknown tokens", "tokenizer.json merge", lambda x: x["model"]["merges"].append("zzq qzz"))
    yield changed("a merge that is no pair", "tokenizer.json merge", lambda x: x["model"]["merges"].append("a b c"))
    yield changed("no token for a byte", "tokenizer.json byte", lambda x: vocabulary(x).pop(
        "A" if "A" in vocabulary(x) and "<0x41>" not in vocabulary(x) else "<0x41>") and None
        if not any("A" in str(y) for y in x["model"]["merges"]) else False)
    for kind in "Unigram", "WordPiece", "WordLevel", "new", 7, ...:
        yield changed(f"type {short_of(kind)}", "tokenizer.json type|model", lambda x, k=kind: x["model"].pop("type")
                      and None if k is ... else x["model"].update(type=k))
    yield changed("no model", "tokenizer.json model|type", lambda x: x.pop("model") and None)
    yield changed("no pre-tokeniser", "tokenizer.json", lambda x: x["pre_tokenizer"] and x.update(pre_tokenizer=None)
                  if not x["model"].get("byte_fallback") else False)
    yield changed("another decoder", "tokenizer.json decoder", lambda x: x.update(decoder={"type": "WordPiece"}))
    yield changed("another normaliser", "tokenizer.json normaliser", lambda x: x.update(normalizer={
        "type": "Lowercase"}))
    yield changed("an unknown key", "tokenizer.json new", lambda x: x.update(new=1))
    yield changed("added tokens that are no list", "tokenizer.json added", lambda x: x.update(added_tokens={"a": 1}))
    yield changed("an added token without an id", "tokenizer.json added", lambda x: x["added_tokens"].append(
        {"content": "<x>", "special": True}))
    yield changed("added tokens twice", "tokenizer.json added|duplicate", lambda x: x["added_tokens"].append(
        dict(x["added_tokens"][0])))
    yield "hub", "fewer ids than rows", fewer, "fine"
    for name in "vocab.json", "vocab.txt", "merges.txt", "spiece.model":
        yield ("hub", f"only {name}", lambda m, n=name: m.files.update({n: m.files.pop(m.tokens)}),
               f"missing {name} ids-only")
    yield file("tokenizer_config.json", b"", "tokenizer_config.json valid", HUB)
    yield file("tokenizer_config.json", PAGE, "tokenizer_config.json web.page", HUB)
    yield file("tokenizer_config.json", b"[]", "tokenizer_config.json object", HUB)
    yield file("tokenizer_config.json", b'{"new": 1}', "tokenizer_config.json new remove", HUB)
    yield file("tokenizer_config.json", b'{"chat_template": 7}', "tokenizer_config.json chat_template", "hub")
    yield file("tokenizer_config.json", b'{"chat_template": [{"name": "x", "template": "y"}]}',
               "tokenizer_config.json chat_template default", "hub")
    yield file("tokenizer_config.json", b'{"add_prefix_space": 7}', "tokenizer_config.json add_prefix_space", "hub")
    yield file("tokenizer_config.json", b'{"add_eos_token": true}', "tokenizer_config.json add_eos_token", "hub")
    yield file("tokenizer_config.json", b'{"tokenizer_class": "OtherTokenizer"}', "tokenizer_class", "encoder")
    yield file("special_tokens_map.json", PAGE, "special_tokens_map.json web.page", HUB)
    yield file("special_tokens_map.json", b"[]", "special_tokens_map.json object", HUB)
    yield file("generation_config.json", PAGE, "generation_config.json web.page", HUB)
    for text in b"", b"{{ messages[0].content }}" + b" " * (1 << 18), b"\xff{{ messages }}", POINTER:
        words = "chat_template.jinja " + ("LFS" if text is POINTER else "")
        yield file("chat_template.jinja", text, words, "hub")
    yield "hub", "a folder as chat template", lambda m: m.files.update({"chat_template.jinja": FOLDER}), \
        "chat_template.jinja regular"


def fewer(m):
    """Add rows of the embedding without tokens, as published models have."""
    names = [x for x in m.files if x.endswith(".safetensors")]
    for name in names:
        file = Safetensors(m.files[name])
        for t in file.tensors:
            if "embed_tokens" in t.name or "lm_head" in t.name:
                t.data += t.data[:len(t.data) // t.shape[0]] * 64
                t.shape[0] += 64
        m.files[name] = file.build()
    m.edit(vocab_size=m.setting("vocab_size") + 64)


def of_gguf():
    """Yield damages of GGUF files: keys, and bytes of the header."""
    def changed(name, words, change):
        def damage(m):
            data = change(m.files["x.gguf"])
            if data is None:
                return False
            m.files["x.gguf"] = data
        return "gguf", f"GGUF: {name}", damage, "x.gguf " + words

    def keys(words, **values):
        def change(data):
            file = Gguf(data)
            arch = file.head["general.architecture"][1][8:].decode()
            for key, x in values.items():
                key = key.replace("__", ".").replace("ARCH", arch)
                if x is ... and key not in file.head:
                    return None
                file.head[key] = file.value(x if x is not ... else 0)
                if x is ...:
                    del file.head[key]
            return file.build()
        return changed(", ".join(f"{key} is {short_of(x)}" for key, x in values.items())[:60], words, change)
    for at, data in (0, b"GGUX"), (4, b"\1\0\0\0"), (4, b"\0\0\0\3"), (8, b"\xff" * 8), (16, b"\xff" * 8), (
            24, b"\xff" * 8), (16, bytes(8)):
        yield changed(f"byte {at} is {data.hex()}", "", lambda x, a=at, d=data: x[:a] + d + x[a + len(d):])
    for n in 4, 20, 100, 5000:
        yield changed(f"only {n} bytes", "truncated|ends|damaged", lambda x, n=n: x[:n])
    yield changed("a byte less", "truncated", lambda x: x[:-40])
    yield keys("gptneox expected", general__architecture="gptneox")
    yield keys("architecture", general__architecture=7)
    yield keys("architecture", general__architecture=...)
    yield keys("architecture", general__architecture="x" * 500)
    for key in "block_count", "embedding_length", "attention.head_count", "context_length":
        for value in ..., 0, -1, "8", 1 << 40:
            yield keys(f"{key}|layer|heads", **{"ARCH__" + key.replace(".", "__"): value})
    yield keys("layer_norm_rms_epsilon", ARCH__attention__layer_norm_rms_epsilon=...)
    yield keys("key_length|contradict|head|value_length", ARCH__attention__key_length=7)
    yield keys("rope.scaling.type", ARCH__rope__scaling__type="yarn")
    yield keys("expert_used_count", ARCH__expert_used_count=99)
    yield keys("new_feature", ARCH__new_feature=1)
    yield keys("causal", ARCH__attention__causal=False)
    yield keys("alignment", general__alignment=3)
    for value in "bert", "t5", 7, ...:
        yield keys("tokenizer.ggml.model|tokeniser|token", tokenizer__ggml__model=value)
    yield keys("tokenizer.ggml.pre", tokenizer__ggml__pre="tekken")
    yield keys("tokenizer.ggml.tokens", tokenizer__ggml__tokens=...)
    yield keys("tokenizer.ggml.tokens|token_type|merge|byte", tokenizer__ggml__tokens=["a", "b"])
    yield keys("tokenizer.ggml.tokens", tokenizer__ggml__tokens=7)
    yield keys("tokenizer.ggml.token_type", tokenizer__ggml__token_type=[1, 2])
    yield keys("tokenizer.ggml.merges|merge", tokenizer__ggml__merges=...)
    yield keys("tokenizer.ggml.scores", tokenizer__ggml__scores=...)
    yield keys("eos_token_id", tokenizer__ggml__eos_token_id=99999)
    yield keys("add_eos_token", tokenizer__ggml__add_eos_token=True)
    yield keys("split", split__count=3, split__no=0)
    yield keys("chat_template", tokenizer__chat_template=7)
    yield keys("UTF-8", general__name=b"\xff\xfe")
    yield keys("general.name type", general__name=(99, b""))


def of_marian():
    """Yield damages of the settings in Marian's models, and of the vocabulary's name."""
    def settings(name, words, change):
        def damage(m):
            if m.container is None:
                return False
            file = m.open()
            t = next(t for t in file.tensors if t.name == "special:model.yml")
            t.data = change(t.data)
            t.shape = [len(t.data)]
            m.put(file)
        return "marian", f"settings: {name}", damage, words
    for key, value in ("dim-emb", "0"), ("dim-emb", "x"), ("dim-emb", "99"), ("enc-depth", "9"), ("enc-depth", "-1"), (
            "type", "s2s"), ("type", "amun"), ("transformer-heads", "3"), ("dec-cell", "lstm"), (
            "transformer-ffn-activation", "tanh"), ("dim-emb", "1" * 400), ("version", "[]"):
        yield settings(f"{key} {value[:9]}", f"model.bin {key}|shape|heads|missing|unexpected",
                       lambda x, k=key, v=value: re.sub(rb"(?m)^%s:.*" % k.encode(), f"{k}: {v}".encode(), x))
    yield settings("nothing", "model.yml|settings|missing", lambda x: b"\0")
    yield settings("invalid UTF-8", "UTF-8", lambda x: b"\xff: 1\n" + x)
    yield settings("nested brackets", "model.bin", lambda x: b"a: " + b"[" * 100000 + b"\n" + x)
    yield settings("a key twice", "", lambda x: b"dim-emb: 8\n" + x)
    yield settings("an unknown key", "new-feature", lambda x: b"new-feature: 1\n" + x)
    yield "marian", "only a .part of the model", rename_file("model.", ".part"), ""
    yield ("marian", "a vocabulary that no name tells", rename_file("vocab.enpt.spm", ".bak"),
           "vocab|published|checkpoint")
    for text, words in (b"models:\n - other.bin\n", "other.bin"), (b"new-feature: 1\n", "decoder.yml new-feature"):
        yield "marian", f"decoder.yml: {text}", lambda m, x=text: m.files.update({"decoder.yml": x}), words


def rename_file(begin, end):
    def damage(m):
        name = next(x for x in m.files if x.startswith(begin))
        m.files[name + end] = m.files.pop(name)
    return damage


def of_ct2():
    """Yield damages of the other files of CTranslate2's models."""
    def put(name, data, words, kinds="ct2"):
        def damage(m):
            if name not in m.files:
                return False
            m.files[name] = data
        return kinds, f"{name}: {str(data)[:30]}", damage, words
    for name in "config.json", "shared_vocabulary.json", "target_vocabulary.json":
        for data in b"", PAGE, b"[]", b"7", b"[" * 100000, b'["\xff"]', POINTER, FOLDER, b"{}":
            words = "regular" if data is FOLDER else ""
            if name != "config.json" or data not in (b"{}",):
                yield put(name, data, name + " " + words)
    yield put("shared_vocabulary.json", json.dumps(["<unk>", "<s>", "</s>"] * 99).encode(), "shared_vocabulary.json")
    yield put("shared_vocabulary.json", json.dumps(["a"] * 60).encode(), "shared_vocabulary.json")
    for version in 0, 1, 7, 255:
        yield "ct2", f"version {version}", lambda m, v=version: m.files.update(
            {"model.bin": v.to_bytes(4, "little") + m.files["model.bin"][4:]}), "model.bin|published|checkpoint"
    for n in 3, 4, 15, 16, 40, 400:
        yield "ct2", f"only {n} bytes", lambda m, n=n: m.files.update({"model.bin": m.files["model.bin"][:n]}), ""
    yield "ct2", "a byte more", lambda m: m.files.update({"model.bin": m.files["model.bin"] + b"x"}), "damaged"
    yield "ct2", "only a .part", rename_file("model.bin", ".part"), ""
    yield "ct2", "no vocabulary", lambda m: [m.files.pop(x) for x in list(m.files) if "vocabulary" in x] and None, \
        "vocabulary copy"


def random_damage(m, r):
    """Damage a file at random; JSON and headers remain well-formed in most cases."""
    name = r.choice(sorted(m.files))
    data = m.files[name]
    if name.endswith(".json") and r.random() < 0.8:
        m.files[name] = json.dumps(test_damage.damage_value(r, json.loads(data))).encode()
    elif name.endswith(".safetensors") and r.random() < 0.7:
        size = int.from_bytes(data[:8], "little")
        text = json.dumps(test_damage.damage_value(r, json.loads(data[8:8 + size]), r.choice((0, 0, 1)))).encode()
        m.files[name] = len(text).to_bytes(8, "little") + text + data[8 + size:]
    else:
        m.files[name] = test_damage.damage_bytes(r, data)


def rows():
    for source in (of_files, of_tensors, of_headers, of_json, of_config, of_shards, of_tokens, of_gguf, of_marian,
                   of_ct2):
        for kinds, *row in source():
            yield kinds.split(), *row


# ---- Conversion ------------------------------------------------------------------------------------------------------

def run_c(pairs, kind, *options):
    """Convert (path, out) pairs in C to a number format; return [(message or None, notes)]."""
    done = subprocess.run([CONVERT, *options, kind, "-", *[x for pair in pairs for x in pair]], capture_output=True,
                          timeout=300)
    found, notes = [], []
    for line in done.stdout.decode(errors="replace").split("\n")[:-1]:
        if line.startswith("note: "):
            notes.append(line[6:])
        else:
            found.append((None if line == "ok" else line, notes))
            notes = []
    where = pairs[len(found)][0] if len(found) < len(pairs) else ""
    assert done.returncode == 0 and not done.stderr and len(found) == len(pairs), (where, done.returncode, done.stderr)
    return found


def run_python(path, out, kind):
    with contextlib.redirect_stderr(io.StringIO()):
        return convert_here(path, "-o", out, *(["--type", kind] if kind != "-" else []))[0]


def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


ADVICE = re.compile(r"download|fetch|copy|expected|must|use |remove|merge|name |keep|set |rename|only|require|differ|"
                    r"is missing|exceeds?|limit|invalid|duplicate|twice|unexpected|unknown|contradict|two|several|"
                    r"divide|not (a |described|finite|valid|regular|match|supported|UTF-8)|no token|empty|load and|[Nn]o such")


def problem_of(message, words):
    """Return the fault of a message, or ""."""
    if re.search(r"[\0-\x1f\x7f]", message) or len(message) > 450:
        return "not one short line"
    if not ADVICE.search(message) and not message.startswith("unsupported: "):  # the programs add advice
        return "no advice"
    return next((f"no {word!r}" for word in words.split() if not re.search(word, message)), "")


def check(m, cases, at):
    """Convert a model with each damage in both converters; return [(name, problem, messages)]."""
    done, pairs, kind = [], [], "q8" if m.kind == "marian" else "-"  # their defaults differ
    for i, (name, damaged, words) in enumerate(cases):
        pairs.append((damaged.write(f"{at}/{i}/m", (m, f"{at}/0/m") if i else None), f"{at}/{i}.c"))
    ours = run_c(pairs, kind)
    for i, (name, damaged, words) in enumerate(cases):
        out = f"{at}/{i}.py"
        messages = {"C": ours[i][0], "Python": run_python(pairs[i][0], out, kind)}
        readers = {"C": m.c, "Python": m.python}
        left = sorted(x for x in os.listdir(at) if x.startswith(f"{i}."))
        wrong = ""
        if words == "agree":
            words = "" if messages["C"] else "fine"
            if str(messages["C"]).startswith("unsupported: ") and not messages["Python"]:
                os.unlink(out)  # only Python reads it
                messages["Python"] = messages["C"]
        for who, message in messages.items():
            if not readers[who]:
                wrong = wrong or ("" if message else f"{who} converts it")
            elif words in ("same", "fine"):
                wrong = wrong or (f"{who} refuses it" if message else "")
            elif message is None:
                wrong = wrong or f"{who} converts it"
            else:
                problem = problem_of(message, words)
                wrong = wrong or (f"{who}: {problem}" if problem else "")
        if not wrong and str(messages["C"]).startswith("unsupported: ") and m.c and messages["Python"] and \
                not re.search("unknown chat template|no reader in C|rank in line", messages["C"]):
            wrong = "C advises a conversion that Python refuses"
        wanted = [f"{i}.{end}" for end, reads in (("c", m.c), ("py", m.python))
                  if reads and words in ("same", "fine")]
        if not wrong and left != wanted:
            wrong = f"left {left}"
        if not wrong and wanted:
            files = {bytes_of(f"{at}/{x}") for x in left}
            if len(files) > 1 or words == "same" and files != {bytes_of(f"{at}/0.{x.split('.')[1]}") for x in left}:
                wrong = "other bytes"
            elif moefile.read_meta(f"{at}/{left[0]}").get("tokenizer.kind", "none") == "none":
                wrong = "no tokeniser"
        if i:
            for name_of in left:
                os.unlink(f"{at}/{name_of}")
            shutil.rmtree(f"{at}/{i}")
        done.append((name, wrong, messages))
    return done


def run(source):
    table, problems = list(rows()), []
    for m in source():
        cases, r = [("nothing", m, "fine")], random.Random(f"{given.seed} {m.name}")
        for kinds, name, change, words in table:
            damaged = m.copy()
            if {m.kind, m.name} & set(kinds) and change(damaged) is not False:
                cases.append((name, damaged, words))
        for i in range(given.cases if m.c and m.python else 0):
            damaged = m.copy()
            random_damage(damaged, r)
            cases.append((f"random {i}", damaged, "agree"))
        with tempfile.TemporaryDirectory(dir=PLACE) as at:
            done = check(m, cases, at)
        wrong = [(m.name, *x) for x in done if x[1]]
        print(f"    {m.name}: {len(done)} cases, {len(wrong)} problems")
        problems += wrong
        for name, problem, messages in done if given.show is not None else ():
            if given.show in m.name or given.show in name:
                print(f"{m.name} | {name} | {problem}", *[f"    {who}: {x}" for who, x in messages.items()], sep="\n")
        assert len(done) > 20, (m.name, len(done))
    assert not problems, f"{len(problems)} problems: " + "\n".join(map(str, problems[:10]))


@gguf_test
def damaged_folders_of_decoders_are_refused():
    run(decoders)


@gguf_test
def damaged_gguf_files_are_refused():
    run(ggufs)


@gguf_test
def damaged_models_of_marian_are_refused():
    run(marians)


@gguf_test
def damaged_models_of_ctranslate2_are_refused():
    run(ct2s)


@gguf_test
def damaged_folders_of_other_models_are_refused():
    run(encoders)


@gguf_test
def seeds_of_the_fuzzer_are_converted():
    with tempfile.TemporaryDirectory(dir=PLACE) as at:
        pairs, names = [], []
        for name, write in checkpoint_seeds.seeds():
            os.mkdir(f"{at}/{name}")
            write(f"{at}/{name}")
            inside = "/package.argosmodel" if name == "argos" else ""
            pairs.append((f"{at}/{name}{inside}", f"{at}/{name}.bin"))
            assert len(checkpoint_seeds.packed_folder(f"{at}/{name}", checkpoint_seeds.NAMES)) < 393216, name
            names.append(name)
        found = run_c(pairs, "-", "--ids-only")
        assert not [x for x in zip(names, found) if x[1][0]], [x for x in zip(names, found) if x[1][0]][:5]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    parser.add_argument("--show", metavar="TEXT", help="print messages")
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sys.exit(test.run(given.only))
