#!/usr/bin/env python3
"""Checkpoint -> model file. Checkpoints of the trainer are described here, those of other programs (--from) in gnmt.py.

A checkpoint of the trainer, "moe-checkpoint-1", is what `torch.save` makes of {"format", "config", "weights"}. The
config is plain values:

    arch "gnmt-moe" | vocab_size | d_model | embed_scale | shared_embedding | pad unk bos eos (optional but bos, eos)
    languages {code: tag} | never_generated [ids] | gate_order "i f g o"
    output_weight (True: own output matrix) | output_bias (True: a bias on the logits)        both False by default
    encoder, decoder: lists of layers
      type "lstm" | "lstmp" | "bi-lstm" | "bi-lstmp": hidden, proj (with p), residual (False, True, "embedding part"),
        forget_bias (0), merge ("concat" | "sum"), input ("embedding, context": the first decoder layer's way to say
        context "previous"), context ("none" | "previous" | "current")
      type "moe": experts, k, hidden, gate ("softmax" | "sigmoid" | "topk" | "noisy top-k" | "threshold" |
        "batchwise/threshold"), empty ("top1" | "zero"), activation "relu", output ("sigmoid" | "none"), scale (1),
        residual; two levels: groups, and parent_gate, parent_k, parent_empty where they differ; gate_hidden (units of
        an MLP gate), gate_relu (rectified logits), gate_bias (every gate's maps have biases); expert ("mlp" |
        "linear": then activation "none" too), expert_bias (of linear experts)
    attention: type ("additive" | "product"), size, query ("state" | "output", see below), layer (0),
      start ("query" | "zero"), bias (False)

    arch "moe-lm": the same without languages, shared_embedding, encoder and attention
    arch "deep-moe": inputs | classes | class_names | output_bias | network: a list of layers of type "moe"

Any other top-level value is information about training and is kept as `training.NAME`; an unknown key in a layer is
refused. The whole config is kept as `training.config` (JSON), so that --back makes a checkpoint of a model file and
training can go on. Weights are named as in the model file but for: gate.weight, gate.noise, parent.weight, parent.noise
[d, n], gate.hidden.weight [d, units], experts.w_up [n, d, h], experts.w_down [n, h, d] (all [in, out]). A "noisy top-k"
gate has gate.noise, which goes into the file: noise (eq 4) is for training, but can be asked for at inference.

The query that checkpoints of the first kind call "output of decoder.0 at the previous step" is the recurrent state,
before the residual: teacher-forced loss on 720 Tatoeba dev pairs 1.794 nats; with the residual added it would be 1.920.
"""
import needs  # first: it tells what is missing
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
import marian
import moefile
import shortlist
import torchfile
from hf_json import short
from moefile import LARGEST_TEXT, FormatError, read_bounded

QUERY = {"state": "state", "output": "output", "output of decoder.0 at the previous step, zero at first": "state"}
GATE = {"softmax": "softmax", "sigmoid": "sigmoid", "topk": "topk", "noisy top-k": "topk", "threshold": "threshold",
        "batchwise/threshold": "threshold"}
WORDS = {"lstm": ("type", "input"), "moe": ("type", "gate_bias", "expert_bias"),  # of configs alone
         "gnmt-attention": ("type", "bias")}
MIXTURE = "experts", "k", "hidden", "gate", "empty", "output", "scale", "activation", "residual"  # are always written
LEVELS = "groups", "parent.gate", "parent.k", "parent.empty"  # of a hierarchy
KNOWN = {"arch", "vocab_size", "d_model", "embed_scale", "shared_embedding", "pad", "unk", "bos", "eos", "languages",
         "never_generated", "gate_order", "output_weight", "output_bias", "encoder", "decoder", "attention",
         "inputs", "classes", "class_names", "network"}
SIDES = {"gnmt-moe": ("encoder", "decoder"), "moe-lm": ("decoder",), "deep-moe": ("network",)}
TRANSPOSED = tuple(f".{x}.{y}" for x in ("gate", "parent") for y in ("weight", "noise")) + (".gate.hidden.weight",)


# ---- Configuration -> metadata ---------------------------------------------------------------------------------------

def choose(name, value, table):
    if not isinstance(value, (str, bool, int)) or value not in table:
        raise FormatError(f"config: {name} is {short(value)}, this program knows {', '.join(map(repr, table))}")
    return table[value]


def value_of(config, key, kind, default=None):
    """A value of a config, which is untrusted input; `default` None: required."""
    value = config.get(key, default)
    if value is None:
        raise FormatError(f"config: key {key!r} is missing")
    if kind is float and type(value) is int and abs(value) < 1 << 53:
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
        raise FormatError(f"config: {key} is {short(value)}, which is no {kind.__name__}")
    return value


def list_of(config, key, kind, default=None):
    """The same of a list of values of a kind."""
    values = value_of(config, key, list, default)
    for value in values:
        if type(value) is not kind:
            raise FormatError(f"config: {key} holds {short(value)}, which is no {kind.__name__}")
    return values


def settings_of(name, kind, layer):
    """The settings that a layer of a config has under the keys of the file, of those that it may have."""
    rows = {row.field: row.key for row in moefile.LAYERS[kind] if row.key != "kind"}
    for word in layer:
        if word not in rows and word not in WORDS[kind]:
            raise FormatError(f"config: {name} has an unknown key {short(word)}")
    return {key: layer[field] for field, key in rows.items() if field in layer}


def with_defaults(kind, keys, settings):
    """The settings under some keys, in their order, each with its default where it is not there."""
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
    moefile.layer_meta(name, "lstm", **settings)  # or what is compared here may be no numbers
    if layer["type"].endswith("p") != (settings["proj"] > 0):
        raise FormatError(f"config: {name} is {layer['type']!r} with proj {short(settings['proj'])}")
    if two:
        settings.update(bidirectional=1, **with_defaults("lstm", ("merge",), given))
    settings.update(with_defaults("lstm", ("residual", "forget_bias"), given))
    settings["residual"] = choose(name + " residual", settings["residual"], {False: 0, True: 1, "embedding part": 1})
    if name.startswith("decoder"):
        read = choose(name + " input", layer.get("input", ""), {"": "none", "embedding, context": "previous"})
        settings["context"] = given.get("context", read)
    return moefile.layer_meta(name, "lstm", **settings)


def config_meta(config):
    """A checkpoint's configuration as metadata of a model file, without the other general and tokenizer keys."""
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
            raise FormatError(f"config: {short(key)} is no key")
        if key not in KNOWN and isinstance(value, (int, float, str)):
            meta["training." + key.lower()] = int(value) if isinstance(value, bool) else value
    try:
        meta["training.config"] = json.dumps(config)
    except (TypeError, ValueError, RecursionError):
        raise FormatError("config: it holds something else than numbers, texts, lists and dictionaries") from None
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
        raise FormatError(f"config: {key} holds {short(ids)}, which are no token ids")
    return np.array(ids, np.int64)


def attention_meta(config):
    """Attention and what the decoder does by default."""
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
    """Names of the tensors that a config asks for and another could do without."""
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
    """The checkpoint's tensors under the model file's names and shapes, as float32 arrays; experts as pairs."""
    present, translation = optional_tensors(config), m.architecture == "gnmt-moe"
    if translation and not config.get("shared_embedding", True):
        present.add("source.embedding.weight")
    elif "source.embedding.weight" in weights:
        raise FormatError("tensor source.embedding.weight is there, the config says shared_embedding")
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
            raise FormatError(f"tensor {name} is missing: the config calls for {list(dims)}")
        if tuple(weights[name].shape) != dims:
            raise FormatError(f"tensor {name} is {list(weights[name].shape)}: the config calls for {list(dims)}")
        if not np.isfinite(weights[name]).all():
            raise FormatError(f"tensor {name} {list(dims)} holds values that are not finite")
    for name in weights:
        if name not in sources:
            raise FormatError(f"tensor {name} {list(weights[name].shape)} is not part of what the config describes")

    out = {}
    for name, (layout, _, _) in expected.items():
        if layout == moefile.EXPERTS:
            out[name] = weights[name + ".w_up"].transpose(0, 2, 1), weights[name + ".w_down"].transpose(0, 2, 1)
        else:
            out[name] = weights[name].T if name.endswith(TRANSPOSED) else weights[name]
    return out


def read_checkpoint(path, extra=None):
    """(description, metadata, weights by name) of a checkpoint; `extra`: metadata that goes first."""
    checkpoint = torchfile.load(path)
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != "moe-checkpoint-1":
        raise FormatError('not a checkpoint of format "moe-checkpoint-1"')
    config, weights = checkpoint.get("config"), checkpoint.get("weights")
    if not isinstance(config, dict) or not isinstance(weights, dict) or not all(
            isinstance(x, torchfile.Tensor) for x in weights.values()):
        raise FormatError("it has no config, or its weights are no tensors")
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
    """A model file as a checkpoint to go on training from; its weights are those of the file, dequantised."""
    import torch
    m, meta, weights = moefile.read_model(args.input)
    if m.architecture == "transformer":
        raise FormatError("it is a Transformer, which this project's trainer does not train")
    if "training.config" not in meta:
        raise FormatError("it has no training.config: it was converted by an older convert.py")
    try:
        config, out = json.loads(meta["training.config"]), {}
        assert isinstance(config, dict)
    except (TypeError, ValueError, RecursionError, AssertionError):
        raise FormatError("its training.config is no JSON object") from None
    checked_meta(config)
    for name, array in weights.items():
        if isinstance(array, tuple):
            out[name + ".w_up"], out[name + ".w_down"] = (x.transpose(0, 2, 1) for x in array)
        else:
            out[name] = array.T if name.endswith(TRANSPOSED) else array
    for name in optional_tensors(config) - set(out):
        if name.endswith(".noise"):  # a file of an older convert.py: start the noise at zero, as training does
            out[name] = np.zeros_like(out[name[:-len("noise")] + "weight"])
    out = {name: np.array(array, np.float32) for name, array in out.items()}
    checkpoint_weights(config, m, out)
    out = {name: torch.from_numpy(array) for name, array in out.items()}
    if args.spm and not isinstance(meta.get("tokenizer.model"), bytes):
        raise FormatError("it holds no SentencePiece model for --spm")
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


def parse_meta(meta, setting):
    """KEY=VALUE as (key, value): of the kind that the key has in `meta`, else the first of INT, REAL, TEXT that
    fits."""
    key, equals, text = setting.partition("=")
    if not equals or not moefile.KEY.match(key):
        raise FormatError(f"--meta {setting}: expected KEY=VALUE")
    kinds = [type(meta[key])] if key in meta else [int, float, str]
    for kind in kinds:
        try:
            if kind in (int, float, str):
                return key, kind(text)
        except ValueError:
            continue
    raise FormatError(f"--meta {setting}: {key} cannot be set to this")


CARRIED = re.compile(r"general\.(name|description|licence|attribution)|decode\..*|tokenizer\..*")


def carried(args):
    """Metadata that --like takes over from a model file: what the command line says itself stays out."""
    if not args.like:
        return {}
    meta = moefile.read_meta(args.like)
    given = {"general." + key for key in ("name", "description", "licence", "attribution") if getattr(args, key)}
    return {key: value for key, value in meta.items() if CARRIED.fullmatch(key) and key not in given}


def default_name(path):
    """What a checkpoint is called: a folder by all of its name, "Hy-MT2-1.8B", a file or prefix without its ending."""
    name = gnmt.default_name(os.path.abspath(path))
    return name if os.path.isdir(path) else os.path.splitext(name)[0]


def convert(args):
    name = args.name or default_name(args.input)
    texts = []
    for path in (args.licence, args.attribution):
        data = read_bounded(path, LARGEST_TEXT, "a licence or attribution") if path else b""
        texts.append(data.decode().replace("\r\n", "\n"))
    meta = {**general(name, args.description, *texts), **carried(args)}
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
            raise FormatError(f"{args.spm} has {len(pieces)} pieces, the model {m.vocabulary}")
        meta.update({"tokenizer.kind": "sentencepiece", "tokenizer.model": data})
    if m.architecture != "deep-moe":
        meta.setdefault("tokenizer.kind", "none")
    for setting in args.meta:
        key, value = parse_meta(meta, setting)
        meta[key] = value
    weights.update(listed(args.shortlist, meta))
    m.shortlist = meta.get("shortlist.entries", 0)
    (kind, experts), tensors = number_formats(args), {}
    expected = moefile.shapes(m, weights)
    for tensor in expected:  # one at a time: a checkpoint may be as large as this machine's memory
        array = weights[tensor]()
        if not all(np.isfinite(x).all() for x in (array if isinstance(array, tuple) else (array,))):
            raise FormatError(f"tensor {tensor} holds values that are not finite")
        try:
            chosen = experts if expected[tensor][0] != moefile.MATRIX else kind
            tensors[tensor] = moefile.Tensor.encode(array, moefile.F32 if expected[tensor][2] else chosen)
        except FormatError as error:
            raise FormatError(f"tensor {tensor}: {error}") from None
    moefile.check_model(meta, tensors)
    moefile.write_model(args.output, meta, tensors)
    return tensors


def listed(path, meta):
    """The vectors of a shortlist, as functions by name; its numbers go into the metadata."""
    if not path:
        return {}
    tensors = {}
    shortlist.put(meta, tensors, shortlist.read(path, meta))
    return {name: tensor.array for name, tensor in tensors.items()}


def aligner(setting):
    """LAYER:HEAD,... as metadata; nothing of None."""
    if setting is None:
        return {}
    if not re.fullmatch("[0-9]{1,4}:[0-9]{1,2}(,[0-9]{1,2})*", setting):
        raise FormatError(f"--align {setting}: expected LAYER:HEAD,HEAD,...")
    layer, heads = setting.split(":")
    return {"align.layer": int(layer), "align.heads": sum(1 << head for head in set(map(int, heads.split(","))))}


def check_aligner(args, m):
    if args.align and not getattr(m, "align", None):
        raise FormatError("--align is for Transformers with an encoder: this model has " +
                          ("an attention of its own" if getattr(m, "attention", None) else "none"))


def add_to_copy(args):
    """Copies a model file with a shortlist, or with other heads that align."""
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
    """Whether a model file is there; a checkpoint may be a folder, or a prefix of files."""
    if not os.path.isfile(path):
        return False
    with moefile.open_regular(path) as file:
        return file.read(len(moefile.MAGIC)) == moefile.MAGIC


def expert_pieces(up, down, kind):
    """The slabs of experts given as lists of Rows, one after the other; several are at work at once."""
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
    """Says on a terminal, or now and then elsewhere, how far writing is."""
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
    """Those of matrices and of experts; `matrices` and `experts`: where the command line says nothing."""
    names = args.type or matrices, args.experts or args.type or experts or matrices
    return [moefile.TYPES[name] for name in names]


def convert_transformer(args, meta):
    """A folder of Hugging Face's layout or of Marian's files, or fairseq's files, or GGUF, tensor by tensor."""
    began, say = time.monotonic(), lambda message: print(message, file=sys.stderr)
    if args.layout == "fairseq":
        found, formats = fairseq.read_fairseq(args.input, args.spm, say), number_formats(args)
    elif args.layout == "marian":
        found, formats = marian.read_marian(args.input, meta["general.licence"], say), number_formats(args)
    elif args.layout == "gguf":
        found, formats = gguf_file.read_gguf(args.input, say, args.prompts), number_formats(args, "q8b", "q4")
        meta["general.licence"] = meta["general.licence"] or found.licence
    elif decoder.is_decoder(args.input):
        found, formats = decoder.read_decoder(args.input, say, args.prompts), number_formats(args, "q8b", "q4")
    else:
        found, formats = hf.read_hf(args.input, say), number_formats(args)
    meta["general.architecture"] = "transformer"
    meta.update(found.meta)
    meta.update(aligner(args.align))
    for setting in args.meta:
        key, value = parse_meta(meta, setting)
        meta[key] = value
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
            raise FormatError(f"tensor {name} is missing, which the settings call for")
        if layout != moefile.MATRIX:
            kind = formats[1]
            pieces = lambda rows=rows, kind=kind: expert_pieces(*rows, kind)
        else:
            kind = moefile.F32 if f32 else formats[0]
            n, k = dims if len(dims) == 2 else (*dims, None)
            if kind == moefile.Q8 and getattr(rows, "coded", False):
                pieces = lambda rows=rows: [moefile.encode_codes(*rows.codes())]
            else:
                pieces = (lambda rows=rows, kind=kind, n=n, k=k: moefile.encode_blocks(rows.blocks(), kind, n,
                                                                                   k)) if k else (
                lambda rows=rows: map(moefile.encode_vector, rows.blocks()))
        tensors[name] = kind, layout, dims, pieces
    if getattr(found, "quantised", ()) and moefile.Q4 in [t[0] for t in tensors.values()]:
        say(f"{', '.join(found.quantised)} becomes Q4, on another grid: what was lost before is lost twice; with "
            "--type q8b or q4m hardly anything is")
    if found.tensors:
        raise FormatError(f"tensor {next(iter(found.tensors))} has no place in the model file")
    journal = None
    if args.resume:
        own = os.path.basename(moefile.written_file(args.output))  # which may lie among the checkpoint's files
        own = own, own + ".partial", own + ".partial.log", own + ".partial.log.new"
        about = repr((sorted(meta.items(), key=lambda x: x[0]), [(n, t[:3]) for n, t in tensors.items()],
                      [x for x in found.identity if x[0] not in own]))
        journal = moefile.Journal(args.output, about.encode())
    moefile.write_pieces(args.output, meta, tensors, journal, progress_line(began))
    return tensors


def translate_ids(program, model, language, sources):
    """Translations (ids) of sources (ids) by a program called as `PROGRAM -m MODEL [-t LANGUAGE] --ids`."""
    command = [program, "-m", model, *(["-t", language] if language else []), "--ids"]
    text = "".join(" ".join(map(str, ids)) + "\n" for ids in sources)
    result = subprocess.run(command, input=text, stdout=subprocess.PIPE, encoding="utf-8")
    lines = result.stdout.splitlines()
    if result.returncode or len(lines) != len(sources):
        raise FormatError(f"{' '.join(command)}: status {result.returncode}, {len(lines)} lines for {len(sources)}")
    return [[int(x) for x in line.split()] for line in lines]


def add_golden(args):
    """Copies a model file with golden sentences: their translations by this very file at its decode defaults."""
    meta, tensors = moefile.read(args.input)
    m = moefile.check_model(meta, tensors)
    if meta.get("tokenizer.kind") != "sentencepiece":
        raise FormatError(f"{args.input} has no tokenizer")
    import sentencepiece
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=meta["tokenizer.model"])
    except RuntimeError:
        raise FormatError("its tokenizer.model is no SentencePiece model, or damaged") from None
    with open(args.golden, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    if any(len(row) != 3 for row in rows):
        raise FormatError(f"{args.golden}: expected source language, target language and text on every line")
    sources, targets = [pieces.encode(row[2]) for row in rows], [None] * len(rows)
    for language in sorted({row[1] for row in rows}):
        if m.languages and language not in m.languages:
            raise FormatError(f"{args.golden}: the model does not have the language {language!r}")
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
        description="Converts a checkpoint into a model file; or, with --golden, copies a model file and puts golden "
                    "sentences into it; or, with --back, makes a checkpoint of a model file. Nothing is written unless "
                    "all is well.",
        epilog="Exit status: 0 done, 1 refused (one line on standard error says why), 2 wrong arguments.")
    parser.add_argument("input", metavar="CHECKPOINT",
                        help="checkpoint to convert; with --golden or --back: model file")
    parser.add_argument("-o", dest="output", metavar="OUT", required=True, help="file to write")
    parser.add_argument("--back", action="store_true",
                        help="write a checkpoint (train.py --init takes it), and the vocabulary to "
                        "the file that --spm names")
    group = parser.add_argument_group("converting")
    layouts = ["moe", *gnmt.READERS, "hf", "fairseq", "marian", "gguf"]
    group.add_argument("--from", dest="layout", choices=layouts, default="moe",
                       help="the program that wrote the checkpoint: this project's trainer (moe), NVIDIA's PyTorch "
                            "GNMT, tensorflow/nmt or MLPerf (tf-gnmt: CHECKPOINT is the prefix, such as "
                            "translate.ckpt-340000), or Hugging Face (hf: CHECKPOINT is the folder of an NLLB, "
                            "NLLB-MoE, M2M-100, Marian, Hunyuan, Qwen3-MoE or Llama model), or fairseq (CHECKPOINT is "
                            "the PREFIX of PREFIX-shared.pt and PREFIX-rank-0.pt, ... of NLLB-MoE, or one file of a "
                            "dense NLLB or M2M-100), or Marian (marian: CHECKPOINT is the folder of a model of "
                            "Firefox, Bergamot or OPUS-MT, or its .bin or .npz), or llama.cpp (gguf: CHECKPOINT is a "
                            "GGUF file of Hunyuan's models, Qwen3's mixtures or Llama's kind, or a piece of one) "
                            "(default: moe)")
    group.add_argument("--preset", choices=list(gnmt.PRESETS),
                       help="decode defaults to write into the file (default: those "
                       "of the program that wrote the checkpoint)")
    group.add_argument("--spm", metavar="FILE", help="SentencePiece model to put into the file (none: token ids only); "
                       "with fairseq NLLB's")
    group.add_argument("--type", choices=list(moefile.TYPES),
                       help="number format of matrices and experts; gates and vectors stay f32 (default: f32; of "
                       "decoder-only models q8b, and q4 for experts)")
    group.add_argument("--experts", choices=list(moefile.TYPES),
                       help="number format of experts, if different")
    group.add_argument("--resume", action="store_true",
                       help="hf, fairseq, gguf: continue a stopped conversion with the same command; its finished part "
                       "stays beside OUT")
    group.add_argument("--name", metavar="TEXT", help="general.name (default: the name of the checkpoint's folder or "
                       "file)")
    group.add_argument("--description", metavar="TEXT", default="", help="general.description (default: empty)")
    group.add_argument("--licence", metavar="FILE", help="text for general.licence (default: empty)")
    group.add_argument("--attribution", metavar="FILE", help="text for general.attribution (default: empty)")
    group.add_argument("--like", metavar="MODEL",
                       help="take over name, licence, attribution, decoding defaults and tokeniser of the model file "
                       "that was trained on, where no other option says otherwise (moe)")
    group.add_argument("--shortlist", metavar="FILE",
                       help="lexical shortlist, so that a translation uses only tokens that its source makes likely: "
                       "Marian's lex.*.bin, or text, a line for each pair of tokens: target source probability; "
                       "perhaps compressed by gzip or zstd. With a model file as CHECKPOINT, a copy of it gets the "
                       "list")
    group.add_argument("--align", metavar="LAYER:HEADS",
                       help="the heads of a Transformer whose mean links words, such as 4:0 or 16:3,7: the number "
                       "that moe-info gives a decoder layer with attention to the source, and heads from 0. "
                       "tests/bench/heads.py measures which ones align best. With a model file as CHECKPOINT, a copy "
                       "of it gets them")
    group.add_argument("--prompts", metavar="NAME",
                       help="of a decoder-only model: the wordings that it is asked with, a row of prompts.json, or "
                            "none: each line is a whole prompt (default: by the model's kind and the folder's name)")
    group.add_argument("--meta", metavar="KEY=VALUE", action="append", default=[],
                       help="set a metadata number or text, e.g. decode.beam=8; may be repeated")
    group = parser.add_argument_group("converting tf-gnmt, whose checkpoints do not say")
    group.add_argument("--vocab", metavar="FILE", help="vocabulary, a piece per line")
    group.add_argument("--bpe", metavar="FILE", help="BPE codes of subword-nmt")
    group.add_argument("--languages", metavar="CODE", nargs=2, help="source and target language, for Moses")
    group.add_argument("--tf-architecture", choices=["gnmt_v2", "gnmt"], default="gnmt_v2",
                       help="upper layers read the current step's context, or the previous one's (default: gnmt_v2)")
    group.add_argument("--tf-forget-bias", metavar="X", type=float, default=1.0,
                       help="added to the forget gates (default: 1)")
    group.add_argument("--tf-zero-state", action="store_true",
                       help="the decoder starts from zeros (pass_hidden_state was false)")
    group = parser.add_argument_group("golden sentences")
    group.add_argument("--golden", metavar="FILE",
                       help="sentences: source language, target language, text, tab-separated")
    group.add_argument("--translate", metavar="PROGRAM", default="./moe-translate",
                       help="translates with the model file (default: ./moe-translate)")
    return parser.parse_args()


def fail(message):
    """Ends with one line. It may quote a checkpoint, which must not reach a terminal with more than text."""
    sys.exit("convert.py: " + "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in message))


def main():
    args = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):  # nothing partial stays behind then, as after an error
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        tensors = (back(args) if args.back else add_golden(args) if args.golden
                   else add_to_copy(args) if (args.shortlist or args.align) and is_model_file(args.input)
                   else convert(args))
    except KeyboardInterrupt:
        sys.exit(130)
    except MemoryError:
        fail(f"{args.input}: it needs more memory than there is")
    except (FormatError, OSError, UnicodeError) as error:
        where = "" if isinstance(error, OSError) else f"{args.input}: "
        fail(f"{where}{error}")
    print(f"{args.output}: {len(tensors)} tensors, {os.path.getsize(args.output):,} bytes")


if __name__ == "__main__":
    main()
