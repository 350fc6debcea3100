"""Read checkpoints of GNMT models made by other programs.

    nvidia-gnmt  PyTorch GNMT v2 from NVIDIA's DeepLearningExamples: a torch.save file
    tf-gnmt      tensorflow/nmt with attention architecture "gnmt_v2" or "gnmt", including MLPerf's: a bundle,
                 PREFIX.index

Both are LSTM encoder-decoders with additive attention and without experts; metadata describes their differences. Gates
are reordered to i f g o, the two biases of a cell are added, and the normalised attention vector is scaled by its gain.
Names and shapes of all tensors are checked before any data is read.
"""
import os

import numpy as np

import hf_tokens
import moefile
import tfbundle
import torchfile
from moefile import LARGEST_TEXT, FormatError, read_bounded

PRESETS = {  # values of moe_session_params_preset in moe.c
    "paper": (8, 0.2, 0.2, 3.0, 2.0, 0), "nvidia": (5, 0.6, 0.1, 0.0, 0.0, 79),
    "tf": (10, 1.0, 0.0, 0.0, 2.0, 0), "mlperf": (10, 1.0, 0.0, 0.0, 2.0, 0)}


def preset_meta(name):
    beam, alpha, beta, prune, factor, offset = PRESETS[name]
    return {"decode.rules": name, "decode.beam": beam, "decode.length_penalty": alpha, "decode.length_constant": 5.0,
            "decode.coverage_penalty": beta, "decode.prune": prune, "decode.max_len_factor": factor,
            "decode.max_len_offset": offset}


# ---- Shared by both --------------------------------------------------------------------------------------------------

def check_tensors(tensors, expected):
    """Reject missing tensors, extra tensors and unexpected shapes, naming the tensor."""
    for name, shape in expected.items():
        if name not in tensors:
            raise FormatError(f"tensor {name} is missing: expected shape {list(shape)}")
        if tuple(tensors[name].shape) != tuple(shape):
            raise FormatError(f"tensor {name} has shape {list(tensors[name].shape)}: expected {list(shape)}")
    for name in tensors:
        if name not in expected:
            raise FormatError(f"unexpected tensor {name} {list(tensors[name].shape)}")


def reader(tensors):
    """Return a function that reads a tensor by name as finite float32."""
    def read(name):
        array = tensors[name].array()
        if array.dtype.kind != "f":
            raise FormatError(f"tensor {name} has unsupported type {array.dtype}")
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise FormatError(f"tensor {name} contains values that are not finite")
        return array
    return read


def lstm_meta(name, hidden, **more):
    return moefile.layer_meta(name, "lstm", hidden=hidden, proj=0, **more)


def model_meta(vocabulary, hidden, encoder, decoder):
    """Return all metadata except that of layers, tokens and decoding."""
    return {"vocab.size": vocabulary, "model.width": hidden, "embedding.scale": 1.0, "source.tag": 0,
            "encoder.layers": encoder, "decoder.layers": decoder,
            **moefile.layer_meta("attention", "gnmt-attention", kind="additive", size=hidden, layer=0, query="state",
                                 start="zero"), "limit.source": 512, "limit.target": 512}


def attention_vector(v, gain):
    """Return gain * v / ||v||, computed in float64."""
    v = v.astype(np.float64)
    norm = np.sqrt((v * v).sum())
    if norm == 0:
        raise FormatError("the attention vector is zero")
    with np.errstate(over="ignore"):
        return (v / norm * float(gain)).astype(np.float32)


def vocabulary_meta(pieces, size, where):
    """Return the metadata of a list of unique pieces; "" marks an unused id and may repeat."""
    if len(pieces) != size:
        raise FormatError(f"{where} has {len(pieces)} pieces, but the model has {size} tokens")
    if len(pieces) > moefile.MAX_TEXTS:
        raise FormatError(f"{where} has {len(pieces)} pieces; the limit of a model file is {moefile.MAX_TEXTS}")
    seen = set()
    for piece in pieces:
        if not isinstance(piece, str) or piece in seen:
            raise FormatError(f"{where}: invalid or duplicate piece {piece!r}")
        seen.update([piece] if piece else [])
    return {"vocabulary.pieces": pieces}


def bpe_meta(merges, version, separator, languages):
    """Return the metadata of merges ("left right", best first); languages: (source, target) for Moses, or None."""
    if len(merges) > moefile.MAX_TEXTS:
        raise FormatError(f"{len(merges)} BPE merges; the limit of a model file is {moefile.MAX_TEXTS}")
    meta = {"tokenizer.kind": "bpe", "tokenizer.merges": merges, "tokenizer.bpe_version": version,
            "tokenizer.separator": separator}
    if languages:
        meta.update({"tokenizer.source_language": languages[0], "tokenizer.target_language": languages[1]})
    return meta


def read_lines(path):
    return read_bounded(path, LARGEST_TEXT, "a vocabulary or a list of merges").decode().split("\n")


def bpe_file_meta(path, languages):
    """Read subword-nmt's codes: an optional line "#version: 0.2", then one merge per line."""
    lines = [line.strip("\r ") for line in read_lines(path)]
    while lines and not lines[-1]:
        lines.pop()
    version = lines.pop(0).split()[-1] if lines and lines[0].startswith("#version:") else "0.1"
    for number, line in enumerate(lines, 1):
        if len(line.split(" ")) != 2:
            raise FormatError(f"{path}: merge {number} must be two pieces: {line!r}")
    return bpe_meta(lines, version, "@@", languages)


# ---- NVIDIA ----------------------------------------------------------------------------------------------------------

def nvidia_shapes(hidden, vocabulary, layers):
    """Return the expected state_dict, including both embedders and the _reverse cell."""
    h, out = hidden, {"encoder.embedder.weight": (vocabulary, hidden), "decoder.embedder.weight": (vocabulary, hidden)}

    def lstm(prefix, width, suffix=""):
        out.update({f"{prefix}weight_ih_l0{suffix}": (4 * h, width), f"{prefix}weight_hh_l0{suffix}": (4 * h, h),
                    f"{prefix}bias_ih_l0{suffix}": (4 * h,), f"{prefix}bias_hh_l0{suffix}": (4 * h,)})

    for i in range(layers):
        lstm(f"encoder.rnn_layers.{i}.", 2 * h if i == 1 else h)
    lstm("encoder.rnn_layers.0.", h, "_reverse")
    lstm("decoder.att_rnn.rnn.", h)
    for i in range(layers - 1):
        lstm(f"decoder.rnn_layers.{i}.", 2 * h)
    attn = "decoder.att_rnn.attn."
    out.update({attn + "linear_att": (h,), attn + "normalize_scalar": (1,), attn + "normalize_bias": (h,),
                attn + "linear_q.weight": (h, h), attn + "linear_k.weight": (h, h),
                "decoder.classifier.classifier.weight": (vocabulary, h),
                "decoder.classifier.classifier.bias": (vocabulary,)})
    return out


def nvidia_tokenizer_meta(tokenizer, size, ids_only):
    """Return the metadata of the tokenizer's pieces, merges and languages, or of a model that accepts ids only."""
    if ids_only:
        return {"tokenizer.kind": "none"}
    if not isinstance(tokenizer, dict):
        hf_tokens.no_tokeniser(["the checkpoint's tokenizer"])
    names, bpe = tokenizer.get("idx2tok"), tokenizer.get("bpe")
    if not isinstance(names, dict) or not all(type(i) is int and 0 <= i < size for i in names):
        raise FormatError(f"the tokenizer's idx2tok must be a dictionary of ids below {size}")
    meta = vocabulary_meta([names.get(i, "") for i in range(size)], size, "the tokenizer")
    bpe = bpe if isinstance(bpe, torchfile.Object) else torchfile.Object()
    codes, version = bpe.get("bpe_codes"), bpe.get("version")
    if not isinstance(codes, dict) or version not in ((0, 1), (0, 2)):
        raise FormatError("the tokenizer's BPE has no merges or an unknown version")
    if bpe.get("vocab") or bpe.get("glossaries"):
        raise FormatError("vocabulary filters and glossaries of the tokenizer's BPE are not supported")
    if not all(isinstance(pair, tuple) and len(pair) == 2
               and all(isinstance(x, str) and x and " " not in x for x in pair)
               and type(rank) is int for pair, rank in codes.items()):
        raise FormatError("the tokenizer's BPE merges must be pairs of pieces with ranks")
    languages, separator = tokenizer.get("lang"), tokenizer.get("separator", "@@")
    if languages is not None:
        languages = [languages.get(x) for x in ("src", "tgt")] if isinstance(languages, dict) else [None]
        if not all(isinstance(x, str) for x in languages):
            raise FormatError("the tokenizer's lang does not name a source and a target language")
    if not isinstance(separator, str):
        raise FormatError("the tokenizer's separator is not text")
    merges = [" ".join(pair) for pair in sorted(codes, key=codes.get)]
    return {**meta, **bpe_meta(merges, "%d.%d" % version, separator, languages)}


def same(a, b):
    """Return True if two tensors share their storage or have equal values."""
    places = [(id(x.storage), x.offset, x.shape, x.stride) for x in (a, b)]
    return places[0] == places[1] or np.array_equal(a.array(), b.array())


def read_nvidia(path, options):
    """Return (metadata, {name: function that returns the weight})."""
    checkpoint = torchfile.load(path)
    tensors = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(tensors, dict) or not all(isinstance(t, torchfile.Tensor) for t in tensors.values()):
        raise FormatError("not an NVIDIA GNMT checkpoint: the state_dict of tensors is missing")
    if tensors and all(name.startswith("module.") for name in tensors):  # saved from DistributedDataParallel
        tensors = {name[len("module."):]: t for name, t in tensors.items()}
    for name in ("encoder.embedder.weight", "decoder.embedder.weight"):
        if name not in tensors or len(tensors[name].shape) != 2:
            raise FormatError(f"not an NVIDIA GNMT checkpoint: tensor {name} is missing or not a matrix")
    size, hidden = tensors["encoder.embedder.weight"].shape
    config = checkpoint.get("model_config")
    config = config if isinstance(config, dict) else {}
    layers = sum(name.startswith("encoder.rnn_layers.") and name.endswith(".weight_hh_l0") for name in tensors)
    layers = config.get("num_layers", layers)
    for key, found in (("hidden_size", hidden), ("vocab_size", size)):
        if config.get(key, found) != found:
            raise FormatError(f"{key} is {config[key]!r} in model_config, but {found} in encoder.embedder.weight")
    if type(layers) is not int or not 2 <= layers <= moefile.MAX_LAYERS:
        raise FormatError(f"{layers!r} layers: expected 2 to {moefile.MAX_LAYERS}")
    check_tensors(tensors, nvidia_shapes(hidden, size, layers))
    read = reader(tensors)

    meta = model_meta(size, hidden, layers, layers)
    meta.update({"token.pad": 0, "token.unk": 1, "token.bos": 2, "token.eos": 3, "source.bos": 1, "source.eos": 1,
                 "decoder.init": "zero"})
    weights = {}

    def cell(name, prefix, suffix=""):
        weights[name + ".w_x"] = lambda: read(f"{prefix}weight_ih_l0{suffix}")
        weights[name + ".w_r"] = lambda: read(f"{prefix}weight_hh_l0{suffix}")
        weights[name + ".bias"] = lambda: read(f"{prefix}bias_ih_l0{suffix}") + read(f"{prefix}bias_hh_l0{suffix}")

    def put(name, source):
        weights[name] = lambda: read(source)

    if same(tensors["encoder.embedder.weight"], tensors["decoder.embedder.weight"]):
        put("embedding.weight", "encoder.embedder.weight")
    else:
        put("source.embedding.weight", "encoder.embedder.weight")
        put("target.embedding.weight", "decoder.embedder.weight")
    for i in range(layers):
        meta.update(lstm_meta(f"encoder.{i}", hidden, residual=int(i >= 2)))
        cell(f"encoder.{i}" if i else "encoder.0.fwd", f"encoder.rnn_layers.{i}.")
        meta.update(lstm_meta(f"decoder.{i}", hidden, residual=int(i >= 2), context="current" if i else "none"))
        cell(f"decoder.{i}", f"decoder.rnn_layers.{i - 1}." if i else "decoder.att_rnn.rnn.")
    meta.update(moefile.layer_meta("encoder.0", "lstm", bidirectional=1, merge="concat"))
    cell("encoder.0.bwd", "encoder.rnn_layers.0.", "_reverse")
    attn = "decoder.att_rnn.attn."
    put("attention.w_key", attn + "linear_k.weight")
    put("attention.w_query", attn + "linear_q.weight")
    put("attention.bias", attn + "normalize_bias")
    weights["attention.v"] = lambda: attention_vector(read(attn + "linear_att"), read(attn + "normalize_scalar")[0])
    put("output.weight", "decoder.classifier.classifier.weight")
    put("output.bias", "decoder.classifier.classifier.bias")
    meta.update(preset_meta(options.preset or "nvidia"))
    if options.vocab or options.bpe:
        raise FormatError("--vocab and --bpe require tf-gnmt: nvidia-gnmt checkpoints contain a tokenizer")
    return {**meta, **nvidia_tokenizer_meta(checkpoint.get("tokenizer"), size, options.ids_only)}, weights


# ---- TensorFlow ------------------------------------------------------------------------------------------------------

# suffixes of an optimizer's state tensors
TF_TRAINING = ("/Adam", "/Adam_1", "/Momentum", "/Adagrad", "/RMSProp", "/RMSProp_1")
TF_COUNTERS = ("global_step", "beta1_power", "beta2_power", "learning_rate", "Variable")


def tf_name(name):
    """Remove differences between builds: outer scope, scopes of embeddings, and missing indices of single layers."""
    last = name.split("/")[-1]
    if last in ("embedding_encoder", "embedding_decoder", "embedding_share"):
        return last
    for scope in ("dynamic_seq2seq/", "build_network/"):
        if name.startswith(scope):
            name = name[len(scope):]
    return name.replace("encoder/rnn/basic_lstm_cell", "encoder/rnn/multi_rnn_cell/cell_0/basic_lstm_cell")


def tf_shapes(hidden, vocabulary, encoder, decoder, shared, normalised):
    """Return {name: expected shape}; kernels are [in + hidden, 4 hidden]. A bidirectional layer counts as one layer."""
    h = hidden
    out = {name: (vocabulary, h)
           for name in (["embedding_share"] if shared else ["embedding_encoder", "embedding_decoder"])}

    def cell(prefix, width):
        out.update({prefix + "/basic_lstm_cell/kernel": (width + h, 4 * h), prefix + "/basic_lstm_cell/bias": (4 * h,)})

    for way in ("fw", "bw"):
        cell("encoder/bidirectional_rnn/" + way, h)
    for i in range(encoder - 1):
        cell(f"encoder/rnn/multi_rnn_cell/cell_{i}", h if i else 2 * h)
    attention = "decoder/multi_rnn_cell/cell_0_attention/attention"
    cell(attention, 2 * h)
    for i in range(1, decoder):
        cell(f"decoder/multi_rnn_cell/cell_{i}", 2 * h)
    attention += "/bahdanau_attention/"
    out.update({"decoder/memory_layer/kernel": (h, h), attention + "query_layer/kernel": (h, h)})
    out[attention + "attention_v"] = (h,)
    if normalised:
        out.update({attention + "attention_g": (), attention + "attention_b": (h,)})
    out["decoder/output_projection/kernel"] = (h, vocabulary)
    return out


def tf_cell(kernel, bias, width):
    """Return (w_x, w_r, bias) with rows in order i f g o, given a kernel with columns in order i j f o."""
    w = kernel.T.reshape(4, -1, kernel.shape[0])[[0, 2, 1, 3]].reshape(-1, kernel.shape[0])
    return w[:, :width], w[:, width:], bias.reshape(4, -1)[[0, 2, 1, 3]].reshape(-1)


def tf_vocabulary_meta(path, size):
    """Read one piece per line; prepend <unk> <s> </s> if the file does not start with them, as tensorflow/nmt does."""
    pieces = [line.strip() for line in read_lines(path)]
    while pieces and not pieces[-1]:
        pieces.pop()
    special = ["<unk>", "<s>", "</s>"]
    return vocabulary_meta(pieces if pieces[:3] == special else special + pieces, size, path)


def read_tf(prefix, options):
    """Return (metadata, {name: function that returns the weight})."""
    tensors = {}
    for name, tensor in tfbundle.open_bundle(prefix).items():
        if name.endswith(TF_TRAINING) or name in TF_COUNTERS:
            continue
        if tf_name(name) in tensors:
            raise FormatError(f"tensor {name} is in more than one scope")
        tensors[tf_name(name)] = tensor
    kernel = tensors.get("decoder/output_projection/kernel")
    if kernel is None or len(kernel.shape) != 2:
        raise FormatError("not a tensorflow/nmt checkpoint: decoder/output_projection/kernel is not a matrix")
    hidden, size = kernel.shape
    encoder = 1 + sum(n.startswith("encoder/rnn/multi_rnn_cell/") and n.endswith("/kernel") for n in tensors)
    decoder = sum(n.startswith("decoder/multi_rnn_cell/") and n.endswith("basic_lstm_cell/kernel") for n in tensors)
    for side, layers in (("encoder", encoder), ("decoder", decoder)):
        if not 2 <= layers <= moefile.MAX_LAYERS:
            raise FormatError(f"{layers} {side} layers: expected 2 to {moefile.MAX_LAYERS}")
    attention = "decoder/multi_rnn_cell/cell_0_attention/attention/bahdanau_attention/"
    shared, normalised = "embedding_share" in tensors, attention + "attention_g" in tensors
    check_tensors(tensors, tf_shapes(hidden, size, encoder, decoder, shared, normalised))
    read = reader(tensors)

    meta = model_meta(size, hidden, encoder, decoder)
    meta.update({"token.unk": 0, "token.bos": 1, "token.eos": 2, "source.bos": 0, "source.eos": 0,
                 "decoder.init": "zero" if options.tf_zero_state else "encoder"})
    if not options.tf_zero_state and encoder != decoder:
        raise FormatError(f"{encoder} encoder layers cannot initialise {decoder} decoder layers: use --tf-zero-state")
    weights, kept = {}, {}

    def cell(name, prefix, width):
        def part(i):
            if kept.get("name") != prefix:  # read the kernel once for its parts, which are requested in sequence
                kernel, bias = (read(f"{prefix}/basic_lstm_cell/{x}") for x in ("kernel", "bias"))
                kept.update(name=prefix, parts=tf_cell(kernel, bias, width))
            return kept["parts"][i]
        for i, key in enumerate((".w_x", ".w_r", ".bias")):
            weights[name + key] = lambda i=i: part(i)

    def put(name, source, transposed=False):
        weights[name] = lambda: read(source).T if transposed else read(source)

    forget = {"forget_bias": options.tf_forget_bias}
    residual = 2 if encoder == decoder else 1  # first residual layer of the decoder; the encoder's is layer 2
    upper = "previous" if options.tf_architecture == "gnmt" else "current"
    if shared:
        put("embedding.weight", "embedding_share")
    else:
        put("source.embedding.weight", "embedding_encoder")
        put("target.embedding.weight", "embedding_decoder")
    meta.update(lstm_meta("encoder.0", hidden, residual=0, bidirectional=1, merge="concat", **forget))
    cell("encoder.0.fwd", "encoder/bidirectional_rnn/fw", hidden)
    cell("encoder.0.bwd", "encoder/bidirectional_rnn/bw", hidden)
    for i in range(1, encoder):
        meta.update(lstm_meta(f"encoder.{i}", hidden, residual=int(i >= 2), **forget))
        cell(f"encoder.{i}", f"encoder/rnn/multi_rnn_cell/cell_{i - 1}", hidden if i > 1 else 2 * hidden)
    for i in range(decoder):
        context = upper if i else "previous"
        meta.update(lstm_meta(f"decoder.{i}", hidden, residual=int(i >= residual), context=context, **forget))
        cell(f"decoder.{i}", f"decoder/multi_rnn_cell/cell_{i}" + ("" if i else "_attention/attention"), 2 * hidden)
    put("attention.w_key", "decoder/memory_layer/kernel", True)
    put("attention.w_query", attention + "query_layer/kernel", True)
    if normalised:
        put("attention.bias", attention + "attention_b")
        weights["attention.v"] = lambda: attention_vector(read(attention + "attention_v"),
                                                          read(attention + "attention_g"))
    else:
        put("attention.v", attention + "attention_v")
    put("output.weight", "decoder/output_projection/kernel", True)
    meta.update(preset_meta(options.preset or "tf"))
    meta["tokenizer.kind"] = "none"
    if not options.vocab and not options.ids_only:
        hf_tokens.no_tokeniser(["--vocab"])
    if options.vocab:
        meta.update(tf_vocabulary_meta(options.vocab, size))
    if options.bpe:
        if not options.vocab:
            raise FormatError("--bpe requires --vocab")
        meta.update(bpe_file_meta(options.bpe, options.languages))
    return meta, weights


READERS = {"nvidia-gnmt": read_nvidia, "tf-gnmt": read_tf}


def default_name(path):
    return os.path.basename(path[:-len(".index")] if path.endswith(".index") else path)
