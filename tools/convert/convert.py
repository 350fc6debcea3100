#!/usr/bin/env python3
"""Convert a checkpoint to a model file. This module reads checkpoints of this project's trainer; gnmt.py, hf.py,
fairseq.py, marian.py, decoder.py and gguf_file.py read those of other programs (--from).

A checkpoint of the trainer, "moe-checkpoint-1", is written by `torch.save` from {"format", "config", "weights"}. The
config holds plain values:

    arch "gnmt-moe" | vocab_size | d_model | embed_scale | shared_embedding | pad unk bos eos (required: bos, eos)
    languages {code: tag} | never_generated [ids] | gate_order "i f g o"
    output_weight (True: separate output matrix) | output_bias (True: bias on the logits); both default to False
    encoder, decoder: lists of layers
      type "lstm" | "lstmp" | "bi-lstm" | "bi-lstmp": hidden, proj (lstmp), residual (False, True, "embedding part"),
        forget_bias (0), merge ("concat" | "sum"), input ("embedding, context": in the first decoder layer, the same as
        context "previous"), context ("none" | "previous" | "current")
      type "moe": experts, k, hidden, gate ("softmax" | "sigmoid" | "topk" | "noisy top-k" | "threshold" |
        "batchwise/threshold"), empty ("top1" | "zero"), activation "relu", output ("sigmoid" | "none"), scale (1),
        residual; for two levels: groups, and parent_gate, parent_k, parent_empty if they differ; gate_hidden (units of
        an MLP gate), gate_relu (rectified logits), gate_bias (biases in all maps of the gate); expert ("mlp" |
        "linear": requires activation "none"), expert_bias (for linear experts)
    attention: type ("additive" | "product"), size, query ("state" | "output", see below), layer (0),
      start ("query" | "zero"), bias (False)

    arch "moe-lm": the keys above except languages, shared_embedding, encoder and attention
    arch "deep-moe": inputs | classes | class_names | output_bias | network: a list of layers of type "moe"

Other top-level values describe the training and become `training.NAME`; unknown keys in a layer are rejected. The whole
config is stored as `training.config` (JSON), so that --back can turn a model file into a checkpoint and training can
continue. Weights have the names and shapes of the model file except gate.weight, gate.noise, parent.weight and
parent.noise [d, n], gate.hidden.weight [d, units], experts.w_up [n, d, h], experts.w_down [n, h, d] (all [in, out]). A
model file also stores gate.noise of "noisy top-k" gates: noise (eq 4) is for training, but inference can enable it.

Early checkpoints name a query "output of decoder.0 at the previous step", but use the recurrent state, before the
residual: the teacher-forced loss on 720 Tatoeba dev pairs is 1.794 nats with the state and 1.920 with the output.
"""
import needs  # must be imported first to report missing modules
import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np

import decoder
import fairseq
import gguf_file
import gnmt
import hf
import hf_tokens
import layouts
import marian
import moefile
import shortlist
import torchfile
from hf_json import short
from moefile import LARGEST_TEXT, FormatError, read_bounded

QUERY = {"state": "state", "output": "output", "output of decoder.0 at the previous step, zero at first": "state"}
GATE = {"softmax": "softmax", "sigmoid": "sigmoid", "topk": "topk", "noisy top-k": "topk", "threshold": "threshold",
        "batchwise/threshold": "threshold"}
WORDS = {"lstm": ("type", "input"), "moe": ("type", "gate_bias", "expert_bias"),  # keys found only in configs
         "gnmt-attention": ("type", "bias")}
MIXTURE = "experts", "k", "hidden", "gate", "empty", "output", "scale", "activation", "residual"  # always written
LEVELS = "groups", "parent.gate", "parent.k", "parent.empty"  # written only for two levels of gates
KNOWN = {"arch", "vocab_size", "d_model", "embed_scale", "shared_embedding", "pad", "unk", "bos", "eos", "languages",
         "never_generated", "gate_order", "output_weight", "output_bias", "encoder", "decoder", "attention",
         "inputs", "classes", "class_names", "network"}
SIDES = {"gnmt-moe": ("encoder", "decoder"), "moe-lm": ("decoder",), "deep-moe": ("network",)}
TRANSPOSED = tuple(f".{x}.{y}" for x in ("gate", "parent") for y in ("weight", "noise")) + (".gate.hidden.weight",)


# ---- Configuration -> metadata ---------------------------------------------------------------------------------------

def choose(name, value, table):
    if not isinstance(value, (str, bool, int)) or value not in table:
        raise FormatError(f"config: {name} {short(value)} is not supported: expected {', '.join(map(repr, table))}")
    return table[value]


def value_of(config, key, kind, default=None):
    """Return a value from a config, which is untrusted input. The key is required if `default` is None."""
    value = config.get(key, default)
    if value is None:
        raise FormatError(f"config: key {key!r} is missing")
    if kind is float and type(value) is int and abs(value) < 1 << 53:
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
        raise FormatError(f"config: {key} is {short(value)}, expected {kind.__name__}")
    return value


def list_of(config, key, kind, default=None):
    """Return a list from a config after checking the types of its values."""
    values = value_of(config, key, list, default)
    for value in values:
        if type(value) is not kind:
            raise FormatError(f"config: {key} contains {short(value)}, expected {kind.__name__}")
    return values


def settings_of(name, kind, layer):
    """Return a layer's settings by their keys in the model file; reject unknown settings."""
    rows = {row.field: row.key for row in moefile.LAYERS[kind] if row.key != "kind"}
    for word in layer:
        if word not in rows and word not in WORDS[kind]:
            raise FormatError(f"config: unknown key {short(word)} in {name}")
    return {key: layer[field] for field, key in rows.items() if field in layer}


def with_defaults(kind, keys, settings):
    """Return the settings with the given keys, in order; missing settings get defaults."""
    found = {}
    for key in keys:
        row = moefile.key_of(kind, key)
        found[key] = settings.get(key, found[row.inherits] if row.inherits else row.default)
        if found[key] is None:
            raise KeyError(key)
    return found


def mixture_meta(name, layer):
    given = settings_of(name, "moe", layer)
    for key in {"gate", "parent.gate"} & set(given):
        given[key] = choose(f"{name} {key.replace('.', '_')}", given[key], GATE)
    settings = with_defaults("moe", MIXTURE + LEVELS * bool(given.get("groups")), given)
    for gate, k in ("gate", "k"), ("parent.gate", "parent.k"):
        if settings.get(gate) in moefile.DENSE:
            settings[k] = 0
    settings.update({key: value for key, value in given.items() if value and key not in MIXTURE + LEVELS})
    return moefile.layer_meta(name, "moe", **settings)


def lstm_meta(name, layer):
    given = settings_of(name, "lstm", layer)
    two = choose(name + " type", layer.get("type"), {"lstm": 0, "lstmp": 0, "bi-lstm": 1, "bi-lstmp": 1})
    settings = with_defaults("lstm", ("hidden", "proj"), given)
    moefile.layer_meta(name, "lstm", **settings)  # validate the types before the comparison
    if layer["type"].endswith("p") != (settings["proj"] > 0):
        raise FormatError(f"config: {name}: type {layer['type']!r} does not match proj {short(settings['proj'])}")
    if two:
        settings.update(bidirectional=1, **with_defaults("lstm", ("merge",), given))
    settings.update(with_defaults("lstm", ("residual", "forget_bias"), given))
    settings["residual"] = choose(name + " residual", settings["residual"], {False: 0, True: 1, "embedding part": 1})
    if name.startswith("decoder"):
        read = choose(name + " input", layer.get("input", ""), {"": "none", "embedding, context": "previous"})
        settings["context"] = given.get("context", read)
    return moefile.layer_meta(name, "lstm", **settings)


def config_meta(config):
    """Return a checkpoint's configuration as metadata; general.architecture is the only general.* key."""
    arch = config.get("arch")
    choose("arch", arch, SIDES)
    meta = {"general.architecture": arch, **(classifier_meta if arch == "deep-moe" else token_meta)(config)}
    for side in SIDES[arch]:
        meta[side + ".layers"] = len(value_of(config, side, list))
        for i, layer in enumerate(list_of(config, side, dict)):
            meta.update((mixture_meta if layer.get("type") == "moe" else lstm_meta)(f"{side}.{i}", layer))
    if arch == "gnmt-moe":
        meta.update(attention_meta(config))
    for key, value in config.items():
        if not isinstance(key, str):
            raise FormatError(f"config: invalid key {short(key)}")
        if key not in KNOWN and isinstance(value, (int, float, str)):
            meta["training." + key.lower()] = int(value) if isinstance(value, bool) else value
    try:
        meta["training.config"] = json.dumps(config)
    except (TypeError, ValueError, RecursionError):
        raise FormatError("config: only numbers, strings, lists and dictionaries are supported") from None
    return meta


def classifier_meta(config):
    names = list_of(config, "class_names", str, [])
    return {"vocab.size": value_of(config, "classes", int), "model.width": value_of(config, "inputs", int),
            **({"classes.names": names} if names else {})}


def token_meta(config):
    choose("gate_order", config.get("gate_order", "i f g o"), {"i f g o": 1})
    meta = {"vocab.size": value_of(config, "vocab_size", int), "model.width": value_of(config, "d_model", int),
            "embedding.scale": value_of(config, "embed_scale", float, 1.0)}
    for key in ("pad", "unk", "bos", "eos"):
        meta["token." + key] = value_of(config, key, int, -1)
    meta["token.never"] = ids_of(list_of(config, "never_generated", int, []), "never_generated")
    if config["arch"] == "gnmt-moe":
        languages = value_of(config, "languages", dict, {})
        meta.update({"source.tag": int(bool(languages)), "source.bos": 0, "source.eos": 1})
        meta["languages.codes"] = list_of({"languages": list(languages)}, "languages", str)
        meta["languages.tags"] = ids_of(list(languages.values()), "languages")
    return meta


def ids_of(ids, key):
    if not all(type(x) is int and 0 <= x < moefile.MAX_VOCABULARY for x in ids):
        raise FormatError(f"config: {key}: invalid token ids {short(ids)}")
    return np.array(ids, np.int64)


def attention_meta(config):
    """Return the metadata of the attention and the decoding defaults."""
    a = value_of(config, "attention", dict)
    given = {"kind": a["type"], **settings_of("attention", "gnmt-attention", a)}
    settings = with_defaults("gnmt-attention", ("kind", "size", "layer", "query", "start"), given)
    settings["query"] = choose("attention query", settings["query"], QUERY)
    return {**moefile.layer_meta("attention", "gnmt-attention", **settings), "decoder.init": "zero",
            "decode.beam": 4, "decode.length_penalty": 0.6, "decode.length_constant": 5.0,
            "decode.coverage_penalty": 0.0, "decode.prune": 0.0, "decode.max_len_factor": 2.0,
            "decode.max_len_offset": 10, "limit.source": 512, "limit.target": 512}


# ---- Weights ---------------------------------------------------------------------------------------------------------

def optional_tensors(config):
    """Return the names of the tensors that depend on options of the config."""
    names = {name for name, key in (("output.weight", "output_weight"), ("output.bias", "output_bias"))
             if config.get(key)}
    for side in SIDES[config["arch"]]:
        for i, layer in enumerate(config[side]):
            gates = [".gate"] + [".parent"] * bool(layer.get("groups"))
            if layer.get("gate_bias"):
                names |= {f"{side}.{i}{x}.bias" for x in gates + [".gate.hidden"]}
            if layer.get("expert_bias"):
                names.add(f"{side}.{i}.experts.bias")
            for x in gates:
                kind = layer.get("gate") if x == ".gate" else layer.get("parent_gate", layer.get("gate"))
                if kind == "noisy top-k":
                    names.add(f"{side}.{i}{x}.noise")
    return names


def checkpoint_weights(config, m, weights):
    """Return float32 arrays with the names and shapes of the model file; experts are pairs of arrays."""
    present, translation = optional_tensors(config), m.architecture == "gnmt-moe"
    if translation and not config.get("shared_embedding", True):
        present.add("source.embedding.weight")
    elif "source.embedding.weight" in weights:
        raise FormatError("unexpected tensor source.embedding.weight: the config sets shared_embedding")
    if translation and config["attention"].get("bias"):
        present.add("attention.bias")
    expected, sources = moefile.shapes(m, present), {}
    for name, (layout, dims, _) in expected.items():
        if layout == moefile.EXPERTS:
            n, h, d = dims
            sources[name + ".w_up"], sources[name + ".w_down"] = (n, d, h), (n, h, d)
        else:
            sources[name] = dims[::-1] if name.endswith(TRANSPOSED) else dims
    for name, dims in sources.items():
        if name not in weights:
            raise FormatError(f"tensor {name} is missing: the config requires shape {list(dims)}")
        if tuple(weights[name].shape) != dims:
            raise FormatError(f"tensor {name} has shape {list(weights[name].shape)}: the config requires {list(dims)}")
        if not np.isfinite(weights[name]).all():
            raise FormatError(f"tensor {name} {list(dims)} contains values that are not finite")
    for name in weights:
        if name not in sources:
            raise FormatError(f"unexpected tensor {name} {list(weights[name].shape)}: not described by the config")

    out = {}
    for name, (layout, _, _) in expected.items():
        if layout == moefile.EXPERTS:
            out[name] = weights[name + ".w_up"].transpose(0, 2, 1), weights[name + ".w_down"].transpose(0, 2, 1)
        else:
            out[name] = weights[name].T if name.endswith(TRANSPOSED) else weights[name]
    return out


def read_checkpoint(path, extra=None):
    """Return (description, metadata, weights by name) of a checkpoint; the metadata starts with `extra`."""
    checkpoint = torchfile.load(path)
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != "moe-checkpoint-1":
        raise FormatError('not a checkpoint of format "moe-checkpoint-1"')
    config, weights = checkpoint.get("config"), checkpoint.get("weights")
    if not isinstance(config, dict) or not isinstance(weights, dict) or not all(
            isinstance(x, torchfile.Tensor) for x in weights.values()):
        raise FormatError("the config is missing, or weights are not tensors")
    read = gnmt.reader(weights)
    weights = {name: read(name) for name in weights}
    meta = {**(extra or general("", "", "", "")), **checked_meta(config)}
    m = moefile.describe(meta)
    return m, meta, checkpoint_weights(config, m, weights)


def checked_meta(config):
    try:
        return config_meta(config)
    except KeyError as error:
        raise FormatError(f"config: key {error} is missing") from None


def back(args):
    """Write a model file's (dequantised) weights as a checkpoint from which training can continue."""
    import torch
    m, meta, weights = moefile.read_model(args.input)
    if m.architecture == "transformer":
        raise FormatError("Transformers are not supported by this project's trainer")
    if "training.config" not in meta:
        raise FormatError("training.config is missing: the file was converted by an older convert.py")
    try:
        config, out = json.loads(meta["training.config"]), {}
        assert isinstance(config, dict)
    except (TypeError, ValueError, RecursionError, AssertionError):
        raise FormatError("training.config is not a JSON object") from None
    checked_meta(config)
    for name, array in weights.items():
        if isinstance(array, tuple):
            out[name + ".w_up"], out[name + ".w_down"] = (x.transpose(0, 2, 1) for x in array)
        else:
            out[name] = array.T if name.endswith(TRANSPOSED) else array
    for name in optional_tensors(config) - set(out):
        if name.endswith(".noise"):  # missing in older files: start from zero, as in training
            out[name] = np.zeros_like(out[name[:-len("noise")] + "weight"])
    out = {name: np.array(array, np.float32) for name, array in out.items()}
    checkpoint_weights(config, m, out)
    out = {name: torch.from_numpy(array) for name, array in out.items()}
    if args.spm and not isinstance(meta.get("tokenizer.model"), bytes):
        raise FormatError("the file has no SentencePiece model to write to --spm")
    with contextlib.ExitStack() as files:
        if args.spm:
            files.enter_context(moefile.new_file(args.spm)).write(meta["tokenizer.model"])
        torch.save({"format": "moe-checkpoint-1", "config": config, "weights": out},
                   files.enter_context(moefile.new_file(args.output)))
    return out


# ---- Writing ---------------------------------------------------------------------------------------------------------

def general(name, description, licence, attribution):
    return {"general.architecture": "gnmt-moe", "general.name": name, "general.description": description,
            "general.licence": licence, "general.attribution": attribution}


def add_meta(meta, settings):
    """Add KEY=VALUE settings. A value is parsed as the type of `meta[key]` if present, else as int, float or str."""
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not moefile.KEY.match(key):
            raise FormatError(f"--meta {setting}: expected KEY=VALUE")
        for kind in {int, float, str} & {type(meta[key])} if key in meta else (int, float, str):
            with contextlib.suppress(ValueError):
                meta[key] = kind(text)
                break
        else:
            raise FormatError(f"--meta {setting}: invalid value for {key}")


CARRIED = re.compile(r"general\.(name|description|licence|attribution)|decode\..*|tokenizer\..*")


def carried(args):
    """Return the metadata that --like copies from a model file, except for keys given on the command line."""
    if not args.like:
        return {}
    meta = moefile.read_meta(args.like)
    given = {"general." + key for key in ("name", "description", "licence", "attribution") if getattr(args, key)}
    return {key: value for key, value in meta.items() if CARRIED.fullmatch(key) and key not in given
            and not (args.ids_only and key.startswith("tokenizer."))}


def default_name(path):
    """Return a folder's full name ("Hy-MT2-1.8B"), or a file's or prefix's name without its extension."""
    name = gnmt.default_name(os.path.abspath(path))
    return name if os.path.isdir(path) else os.path.splitext(name)[0]


def convert(args):
    if not args.layout:
        args.layout, args.input = layouts.guess(args.input)
    elif args.layout == "gguf" and os.path.isdir(args.input):
        args.input = layouts.gguf_in(args.input)
    name = args.name or default_name(args.input)
    texts = []
    for path in (args.licence, args.attribution):
        data = read_bounded(path, LARGEST_TEXT, "a licence or attribution") if path else b""
        texts.append(data.decode().replace("\r\n", "\n"))
    meta = {**general(name, args.description, *texts), **carried(args)}
    if args.ids_only and (args.spm or args.vocab or args.bpe):
        raise FormatError("--ids-only cannot be combined with --spm, --vocab or --bpe")
    if args.layout in ("hf", "fairseq", "marian", "gguf"):
        return convert_transformer(args, meta)
    if args.layout == "moe":
        m, meta, weights = read_checkpoint(args.input, meta)
        weights = {tensor: lambda array=array: array for tensor, array in weights.items()}
        meta.update(carried(args))
        meta.update(gnmt.preset_meta(args.preset) if args.preset else {})
    else:
        found, weights = gnmt.READERS[args.layout](args.input, args)
        meta.update(found)
        m = moefile.describe(meta)
    if args.spm:
        data, pieces = hf_tokens.read_pieces(args.spm)
        if len(pieces) != m.vocabulary:
            raise FormatError(f"{args.spm} has {len(pieces)} pieces, but the model has {m.vocabulary} tokens")
        meta.update({"tokenizer.kind": "sentencepiece", "tokenizer.model": data})
    if m.architecture != "deep-moe":
        if args.layout == "moe" and "tokenizer.kind" not in meta and not args.ids_only:
            hf_tokens.no_tokeniser(["--spm"])
        meta.setdefault("tokenizer.kind", "none")
    add_meta(meta, args.meta)
    weights.update(listed(args.shortlist, meta))
    m.shortlist = meta.get("shortlist.entries", 0)
    (kind, experts), tensors = number_formats(args), {}
    expected = moefile.shapes(m, weights)
    for tensor in expected:  # load one tensor at a time, since a checkpoint may fill the memory
        array = weights[tensor]()
        if not all(np.isfinite(x).all() for x in (array if isinstance(array, tuple) else (array,))):
            raise FormatError(f"tensor {tensor} contains values that are not finite")
        try:
            chosen = experts if expected[tensor][0] != moefile.MATRIX else kind
            tensors[tensor] = moefile.Tensor.encode(array, moefile.F32 if expected[tensor][2] else chosen)
        except FormatError as error:
            raise FormatError(f"tensor {tensor}: {error}") from None
    moefile.check_model(meta, tensors)
    moefile.write_model(args.output, meta, tensors)
    return tensors


def listed(path, meta):
    """Return {name: function returning a vector} of a shortlist; add the shortlist's sizes to the metadata."""
    if not path:
        return {}
    tensors = {}
    shortlist.put(meta, tensors, shortlist.read(path, meta))
    return {name: tensor.array for name, tensor in tensors.items()}


def aligner(setting):
    """Parse LAYER:HEAD,... into metadata; return {} for None."""
    if setting is None:
        return {}
    if not re.fullmatch("[0-9]{1,4}:[0-9]{1,2}(,[0-9]{1,2})*", setting):
        raise FormatError(f"--align {setting}: expected LAYER:HEAD,HEAD,...")
    layer, heads = setting.split(":")
    return {"align.layer": int(layer), "align.heads": sum(1 << head for head in set(map(int, heads.split(","))))}


def check_aligner(args, m):
    if args.align and not getattr(m, "align", None):
        raise FormatError("--align requires a Transformer with an encoder: this model has " +
                          ("GNMT attention" if getattr(m, "attention", None) else "no encoder"))


def add_to_copy(args):
    """Copy a model file, adding a shortlist or replacing the alignment heads."""
    meta, tensors = moefile.read(args.input)
    moefile.check_model(meta, tensors)
    if args.shortlist:
        shortlist.put(meta, tensors, shortlist.read(args.shortlist, meta))
    meta.update(aligner(args.align))
    check_aligner(args, moefile.describe(meta))
    moefile.check_model(meta, tensors)
    moefile.write_model(args.output, meta, tensors)
    return tensors


def is_model_file(path):
    """Return True if the path is a model file; a checkpoint may also be a folder or a prefix of files."""
    if not os.path.isfile(path):
        return False
    with moefile.open_regular(path) as file:
        return file.read(len(moefile.MAGIC)) == moefile.MAGIC


def expert_pieces(up, down, kind):
    """Yield the encoded slabs of experts, given as lists of Rows; several slabs are encoded in parallel."""
    width, hidden = down[0].shape
    start, stride = moefile.slab_layout(kind, hidden, width, up[0].shape[0] // hidden)
    workers, waiting = min(4, os.cpu_count() or 1), collections.deque()

    def slab(e):
        first, second = moefile.encode_blob(up[e].array(), kind), moefile.encode_blob(down[e].array(), kind)
        return first + bytes(start - len(first)) + second + bytes(stride - start - len(second))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for e in range(len(up)):
            waiting.append(pool.submit(slab, e))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def progress_line(began):
    """Return a function that reports progress: frequently on a terminal, otherwise every 30 s."""
    last = [time.monotonic()]

    def show(done, total, name):
        now = time.monotonic()
        if now - last[0] < (0.2 if sys.stderr.isatty() else 30):
            return
        last[0] = now
        sys.stderr.write(f"{done / 2**30:.1f} of {total / 2**30:.1f} GiB, {now - began:.0f} s: {name}"
                         + ("\033[K\r" if sys.stderr.isatty() else "\n"))
        sys.stderr.flush()
    return show


def number_formats(args, matrices="f32", experts=None):
    """Return the number formats of matrices and experts; the parameters are the defaults if options are missing."""
    names = args.type or matrices, args.experts or args.type or experts or matrices
    return [moefile.TYPES[name] for name in names]


def convert_transformer(args, meta):
    """Convert a checkpoint in Hugging Face's, Marian's, fairseq's or GGUF format, tensor by tensor."""
    began, say = time.monotonic(), lambda message: print(message, file=sys.stderr)
    formats, ids_only = number_formats(args), args.ids_only
    if args.layout == "fairseq":
        found = fairseq.read_fairseq(args.input, args.spm, say, ids_only)
    elif args.layout == "marian":
        found = marian.read_marian(args.input, meta["general.licence"], say, ids_only)
    elif args.layout == "gguf" or decoder.is_decoder(args.input):
        read = gguf_file.read_gguf if args.layout == "gguf" else decoder.read_decoder
        found, formats = read(args.input, say, args.prompts, ids_only), number_formats(args, "q8b", "q4")
    else:
        found = hf.read_hf(args.input, say, ids_only)
    meta["general.licence"] = meta["general.licence"] or getattr(found, "licence", "")
    meta["general.architecture"] = "transformer"
    meta.update(found.meta)
    meta.update(aligner(args.align))
    add_meta(meta, args.meta)
    lists = listed(args.shortlist or getattr(found, "shortlist", None), meta)
    m = moefile.describe(meta)
    check_aligner(args, m)
    tensors = {}
    for name, (layout, dims, f32) in moefile.shapes(m, found.tensors).items():
        rows = found.tensors.pop(name, None)
        if name in lists:
            tensors[name] = moefile.F32, layout, dims, lambda name=name: [moefile.encode_vector(lists[name]())]
            continue
        if rows is None:
            raise FormatError(f"tensor {name} is missing: the configuration requires it")
        if layout != moefile.MATRIX:
            kind = formats[1]
            pieces = lambda rows=rows, kind=kind: expert_pieces(*rows, kind)
        else:
            kind = moefile.F32 if f32 else formats[0]
            n, k = dims if len(dims) == 2 else (*dims, None)
            if kind == moefile.Q8 and getattr(rows, "coded", False):
                pieces = lambda rows=rows: [moefile.encode_codes(*rows.codes())]
            else:
                pieces = (lambda rows=rows, kind=kind, n=n, k=k: moefile.encode_blocks(rows.blocks(), kind, n, k) if k
                          else map(moefile.encode_vector, rows.blocks()))
        tensors[name] = kind, layout, dims, pieces
    if getattr(found, "quantised", ()) and moefile.Q4 in [t[0] for t in tensors.values()]:
        say(f"converting {', '.join(found.quantised)} to Q4 quantises twice and loses precision; use --type q8b or "
            "q4m to preserve precision")
    if found.tensors:
        raise FormatError(f"tensor {next(iter(found.tensors))} is not supported by the model file format")
    journal = None
    if args.resume:
        own = os.path.basename(moefile.written_file(args.output))  # output files may be in the checkpoint's folder
        own = own, own + ".partial", own + ".partial.log", own + ".partial.log.new"
        about = repr((sorted(meta.items(), key=lambda x: x[0]), [(n, t[:3]) for n, t in tensors.items()],
                      [x for x in found.identity if x[0] not in own]))
        journal = moefile.Journal(args.output, about.encode())
    moefile.write_pieces(args.output, meta, tensors, journal, progress_line(began))
    return tensors


def translate_ids(program, model, language, sources):
    """Translate lists of ids by running `PROGRAM -m MODEL [-t LANGUAGE] --ids`."""
    command = [program, "-m", model, *(["-t", language] if language else []), "--ids"]
    text = "".join(" ".join(map(str, ids)) + "\n" for ids in sources)
    result = subprocess.run(command, input=text, stdout=subprocess.PIPE, encoding="utf-8")
    lines = result.stdout.splitlines()
    if result.returncode or len(lines) != len(sources):
        raise FormatError(f"{' '.join(command)}: exit status {result.returncode}, {len(lines)} of {len(sources)} lines")
    return [[int(x) for x in line.split()] for line in lines]


def add_golden(args):
    """Copy a model file and add golden sentences, translated by the input file with its decoding defaults."""
    meta, tensors = moefile.read(args.input)
    m = moefile.check_model(meta, tensors)
    if meta.get("tokenizer.kind") != "sentencepiece":
        raise FormatError(f"{args.input} has no SentencePiece tokeniser")
    import sentencepiece
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=meta["tokenizer.model"])
    except RuntimeError:
        raise FormatError("tokenizer.model is not a SentencePiece model, or is damaged") from None
    with open(args.golden, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    if any(len(row) != 3 for row in rows):
        raise FormatError(f"{args.golden}: expected source language, target language and text on every line")
    sources, targets = [pieces.encode(row[2]) for row in rows], [None] * len(rows)
    for language in sorted({row[1] for row in rows}):
        if m.languages and language not in m.languages:
            raise FormatError(f"{args.golden}: model has no language {language!r}")
        which = [i for i, row in enumerate(rows) if row[1] == language]
        done = translate_ids(args.translate, args.input, language if m.languages else None, [sources[i] for i in which])
        for i, ids in zip(which, done):
            targets[i] = ids
    meta.update({"golden.source": [row[2] for row in rows], "golden.source_language": [row[0] for row in rows],
                 "golden.language": [row[1] for row in rows], "golden.target": [pieces.decode(ids) for ids in targets],
                 "golden.source_ids": [" ".join(map(str, ids)) for ids in sources],
                 "golden.target_ids": [" ".join(map(str, ids)) for ids in targets]})
    moefile.write_model(args.output, meta, tensors)
    return tensors


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Convert a checkpoint to a model file. With --golden, copy a model file and add golden sentences; "
                    "with --back, turn a model file into a checkpoint. No partial file is ever written.",
        epilog="Exit status: 0 success, 1 error (one line on standard error), 2 invalid arguments.")
    parser.add_argument("input", metavar="CHECKPOINT",
                        help="checkpoint to convert; with --golden or --back: model file")
    parser.add_argument("-o", dest="output", metavar="OUT", required=True, help="file to write")
    parser.add_argument("--back", action="store_true",
                        help="write a checkpoint for train.py --init, and the vocabulary to the file given by --spm")
    group = parser.add_argument_group("converting")
    group.add_argument("--from", dest="layout", choices=list(layouts.LAYOUTS),
                       help="format of the checkpoint (default: guessed from its files). " + "; ".join(
                           f"{layout}: {text}" for layout, text in layouts.LAYOUTS.items()))
    group.add_argument("--preset", choices=list(gnmt.PRESETS),
                       help="decoding defaults to store (default: those of the program that wrote the checkpoint)")
    group.add_argument("--spm", metavar="FILE", help="SentencePiece model to store (moe, and NLLB's for fairseq)")
    group.add_argument("--ids-only", action="store_true",
                       help="store no tokeniser: the model accepts token ids only. Without this option, a text model "
                       "without a tokeniser is an error")
    group.add_argument("--type", choices=list(moefile.TYPES),
                       help="number format of matrices and experts; gates and vectors are always f32 (default: f32; "
                       "for decoder-only models q8b, with q4 experts)")
    group.add_argument("--experts", choices=list(moefile.TYPES), help="number format of experts, if different")
    group.add_argument("--resume", action="store_true",
                       help="hf, fairseq, gguf: continue a stopped conversion with the same command; unfinished "
                       "files are kept next to OUT")
    group.add_argument("--name", metavar="TEXT", help="general.name (default: name of the checkpoint)")
    group.add_argument("--description", metavar="TEXT", default="", help="general.description (default: empty)")
    group.add_argument("--licence", metavar="FILE", help="text for general.licence (default: empty)")
    group.add_argument("--attribution", metavar="FILE", help="text for general.attribution (default: empty)")
    group.add_argument("--like", metavar="MODEL",
                       help="copy name, licence, attribution, decoding defaults and tokeniser from the model file that "
                       "training started from; other options take precedence (moe)")
    group.add_argument("--shortlist", metavar="FILE",
                       help="lexical shortlist, which restricts translations to tokens that the source makes likely: "
                       "Marian's lex.*.bin, or text with lines of target, source, probability; may be compressed by "
                       "gzip or zstd. If CHECKPOINT is a model file, add the list to a copy of it")
    group.add_argument("--align", metavar="LAYER:HEADS",
                       help="attention heads of a Transformer that align words by their mean, e.g. 4:0 or 16:3,7: a "
                       "decoder layer with cross-attention as numbered by moe-info, and its heads from 0; "
                       "tests/bench/heads.py measures which heads align best. If CHECKPOINT is a model file, set them "
                       "in a copy of it")
    group.add_argument("--prompts", metavar="NAME",
                       help="prompts of a decoder-only model: a row of prompts.json, or none to treat each line as a "
                            "whole prompt (default: chosen by model type and folder name)")
    group.add_argument("--meta", metavar="KEY=VALUE", action="append", default=[],
                       help="set a metadata number or text, e.g. decode.beam=8; repeatable")
    group = parser.add_argument_group("converting tf-gnmt (not stored in checkpoints)")
    group.add_argument("--vocab", metavar="FILE", help="vocabulary, one piece per line")
    group.add_argument("--bpe", metavar="FILE", help="subword-nmt's BPE codes")
    group.add_argument("--languages", metavar="CODE", nargs=2, help="source and target language for Moses")
    group.add_argument("--tf-architecture", choices=["gnmt_v2", "gnmt"], default="gnmt_v2",
                       help="upper layers use the context of the current (gnmt_v2) or the previous step (gnmt) "
                       "(default: gnmt_v2)")
    group.add_argument("--tf-forget-bias", metavar="X", type=float, default=1.0,
                       help="added to the forget gates (default: 1)")
    group.add_argument("--tf-zero-state", action="store_true",
                       help="start the decoder from zeros (pass_hidden_state was false)")
    group = parser.add_argument_group("golden sentences")
    group.add_argument("--golden", metavar="FILE",
                       help="tab-separated sentences: source language, target language, text")
    group.add_argument("--translate", metavar="PROGRAM", default="./moe-translate",
                       help="program that translates them (default: ./moe-translate)")
    return parser.parse_args()


def fail(message):
    """Exit with a one-line message. Unprintable characters are replaced, since a message may quote a checkpoint."""
    sys.exit("convert.py: " + "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in message))


UNFINISHED = re.compile(r".*\.(part|incomplete|crdownload|aria2|download)")


def advice(path, text):
    """Return what to add to a message about a damaged file, or a folder with an unfinished download."""
    names = filter(UNFINISHED.fullmatch, sorted(os.listdir(path)) if os.path.isdir(path) else [os.path.basename(path)])
    return "; download it again" * text.endswith(("damaged", "truncated")) + "".join(
        f"; {name} is an unfinished download" for name in list(names)[:1])


def main():
    args = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):  # exit normally, which removes partial files
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        tensors = (back(args) if args.back else add_golden(args) if args.golden
                   else add_to_copy(args) if (args.shortlist or args.align) and is_model_file(args.input)
                   else convert(args))
    except KeyboardInterrupt:
        sys.exit(130)
    except MemoryError:
        fail(f"{args.input}: out of memory")
    except (FormatError, OSError, UnicodeError) as error:
        text = str(error).removeprefix(os.path.basename(args.input) + ": ")
        if isinstance(error, OSError):
            text = f"{error.filename}: {error.strerror}" if error.filename else text
        elif not text.startswith(args.input):
            text = f"{args.input}: {text}"
        fail(text + advice(args.input, text))
    print(f"{args.output}: {len(tensors)} tensors, {os.path.getsize(args.output):,} bytes")


if __name__ == "__main__":
    main()
