"""Small random models of every kind for the tests, written with the standard library only.

    write(path, *language())        writes metadata and tensors to a file
    meta, tensors = classifier()    returns dicts in file order, which a test can change before writing

This second implementation of the format supports only F32 and does not depend on tools/.
"""
import random
import struct
import zlib

INT, REAL, TEXT, BYTES, INTS, TEXTS = 1, 2, 3, 4, 5, 7
WIDTH, VOCABULARY, BOS, EOS = 16, 40, 2, 3
WORDS = ["<pad>", "<unk>", "<s>", "</s>"] + ["w%d" % i for i in range(4, VOCABULARY)]


def pad(data, to):
    return data + bytes(-len(data) % to)


def value(v):
    if isinstance(v, int):
        return INT, struct.pack("<q", v)
    if isinstance(v, float):
        return REAL, struct.pack("<d", v)
    if isinstance(v, bytes):
        return BYTES, struct.pack("<Q", len(v)) + v
    if isinstance(v, str):
        return TEXT, struct.pack("<Q", len(v.encode())) + v.encode()
    if v and isinstance(v[0], int):
        return INTS, struct.pack("<Q%dq" % len(v), len(v), *v)
    return TEXTS, struct.pack("<Q", len(v)) + b"".join(pad(struct.pack("<Q", len(x.encode())) + x.encode(), 8)
                                                       for x in v)


def write(path, meta, tensors):
    head = b""
    for key, v in meta.items():
        kind, data = value(v)
        head += pad(struct.pack("<II", kind, len(key)) + key.encode(), 8) + pad(data, 8)
    at = header = 64 + len(head) + sum(-(-(40 + 8 * len(t[0]) + len(name)) // 8) * 8 for name, t in tensors.items())
    body = b""
    for name, (dims, data) in tensors.items():
        layout = len(dims) == 3
        gap = -at % (4096 if layout else 64)
        entry = struct.pack("<IIII%dQ" % len(dims), 0, layout, len(dims), len(name), *dims)
        head += pad(entry + struct.pack("<QQII", at + gap, len(data), zlib.crc32(data), 0) + name.encode(), 8)
        body += bytes(gap) + data
        at += gap + len(data)
    fixed = struct.pack("<QQII24x", header, at, len(meta), len(tensors))
    with open(path, "wb") as file:
        file.write(b"MOEMODEL" + struct.pack("<II", 1, zlib.crc32(fixed + head)) + fixed + head + body)


class Maker:
    def __init__(self, seed):
        self.random, self.meta, self.tensors = random.Random(seed), {}, {}

    def floats(self, n, amplitude, middle=0.0):
        return struct.pack("<%df" % n, *(self.random.uniform(middle - amplitude, middle + amplitude) for _ in range(n)))

    def matrix(self, name, rows, cols, amplitude=0.6):
        self.tensors[name] = ((rows, cols), self.floats(rows * cols, amplitude))

    def vector(self, name, n, amplitude=0.3, middle=0.0):
        self.tensors[name] = ((n,), self.floats(n, amplitude, middle))

    def lstm(self, name, width):
        self.meta.update({name + ".kind": "lstm", name + ".hidden": WIDTH})
        self.matrix(name + ".w_x", 4 * WIDTH, width)
        self.matrix(name + ".w_r", 4 * WIDTH, WIDTH)
        self.vector(name + ".bias", 4 * WIDTH)

    def gate(self, name, part, kind, n, compete, width, noise):
        self.matrix("%s.%s.weight" % (name, part), n, width, 0.9)
        if noise:
            self.matrix("%s.%s.noise" % (name, part), n, width, 0.5)
        if kind == "threshold":
            self.vector("%s.%s.threshold" % (name, part), n, 0.4 / compete, 1 / compete)

    def mixture(self, name, width, experts, groups=0, gate="topk", k=2, parent="topk", parent_k=2, noise=0, units=0,
                linear=0, **more):
        self.meta.update({name + ".kind": "moe", name + ".experts": experts, name + ".gate": gate,
                          name + ".hidden": linear or 12})
        if k:
            self.meta[name + ".k"] = k
        if groups:
            self.meta.update({name + ".groups": groups, name + ".parent.gate": parent, name + ".parent.k": parent_k})
        features = width
        if units:
            self.meta[name + ".gate.hidden"] = features = units
            self.matrix(name + ".gate.hidden.weight", units, width)
        self.gate(name, "gate", gate, experts, experts // (groups or 1), features, noise)
        if groups:
            self.gate(name, "parent", parent, groups, groups, features, noise)
        if linear:
            self.meta[name + ".expert"] = "linear"
            self.matrix(name + ".experts.weight", experts * linear, width)
        else:
            one = pad(self.floats(12 * width, 0.6), 64)
            size = len(pad(one + self.floats(12 * width, 0.6), 4096))
            self.tensors[name + ".experts"] = ((experts, 12, width), b"".join(
                pad(pad(self.floats(12 * width, 0.6), 64) + self.floats(12 * width, 0.6), 4096)
                for _ in range(experts)))
            assert len(self.tensors[name + ".experts"][1]) == size * experts
        self.meta.update({"%s.%s" % (name, key): v for key, v in more.items()})


def begin(architecture, seed, vocabulary, width):
    m = Maker(seed)
    m.meta.update({"general.architecture": architecture, "general.name": "small %s" % architecture,
                   "vocab.size": vocabulary,
                   "model.width": width})
    return m


def tokens(m, pieces, vocabulary=VOCABULARY):
    m.meta.update({"token.bos": BOS, "token.eos": EOS, "token.unk": 1, "limit.target": 30, "limit.source": 30})
    if pieces:
        m.meta["vocabulary.pieces"] = WORDS
    m.matrix("embedding.weight", vocabulary, WIDTH, 1)


def tokeniser_of(path):
    """Return the bytes of the SentencePiece model in a model file."""
    with open(path, "rb") as file:
        data = file.read()
    key = b"tokenizer.model"
    at = data.index(struct.pack("<II", BYTES, len(key)) + key) + 8 + len(key)
    at += -at % 8
    length = struct.unpack("<Q", data[at:at + 8])[0]
    return data[at + 8:at + 8 + length]


def language(seed=1, pieces=1, tokeniser=None, vocabulary=VOCABULARY, **mixture):
    """Return a language model: an LSTM, a mixture and an LSTM."""
    m = begin("moe-lm", seed, vocabulary, WIDTH)
    tokens(m, pieces and not tokeniser, vocabulary)
    if tokeniser:
        m.meta.update({"tokenizer.kind": "sentencepiece", "tokenizer.model": tokeniser})
    m.meta["decoder.layers"] = 3
    m.lstm("decoder.0", WIDTH)
    m.mixture("decoder.1", WIDTH, **dict({"experts": 12}, **mixture))
    m.lstm("decoder.2", WIDTH)
    return m.meta, m.tensors


def translation(seed=1, pieces=1, tokeniser=None, vocabulary=VOCABULARY, **mixture):
    """Return a translation model for one direction, with an LSTM and a mixture in both encoder and decoder."""
    m = begin("gnmt-moe", seed, vocabulary, WIDTH)
    tokens(m, pieces and not tokeniser, vocabulary)
    if tokeniser:
        m.meta.update({"tokenizer.kind": "sentencepiece", "tokenizer.model": tokeniser})
    m.meta.update({"encoder.layers": 2, "decoder.layers": 2, "decoder.0.context": "previous",
                   "attention.kind": "additive",
                   "attention.size": 12, "attention.query": "state", "decode.max_len_offset": 4})
    for side, width in (("encoder", WIDTH), ("decoder", 2 * WIDTH)):
        m.lstm(side + ".0", width)
        m.mixture(side + ".1", WIDTH, **dict({"experts": 12}, **mixture))
    m.matrix("attention.w_key", 12, WIDTH)
    m.matrix("attention.w_query", 12, WIDTH)
    m.vector("attention.v", 12, 1)
    return m.meta, m.tensors


def transformer(seed=1, pieces=1, **mixture):
    """Return a Transformer with self-attention and a mixture; its decoder also attends to the source."""
    m = begin("transformer", seed, VOCABULARY, WIDTH)
    tokens(m, pieces)
    m.meta.update({"source.tag": 0, "decode.max_new": 20, "encoder.layers": 2, "decoder.layers": 3})
    m.matrix("positions.weight", 32, WIDTH, 1)
    for name, kind in (("encoder.0", "attention"), ("decoder.0", "attention"), ("decoder.1", "cross")):
        m.meta.update({name + ".kind": kind, name + ".heads": 2, name + ".norm": "before"})
        for part, rows in (("qkv", 3), ("out", 1)) if kind == "attention" else (("q", 1), ("kv", 2), ("out", 1)):
            m.matrix("%s.%s.weight" % (name, part), rows * WIDTH, WIDTH)
            m.vector("%s.%s.bias" % (name, part), rows * WIDTH)
    for name in ("encoder.1", "decoder.2"):
        m.mixture(name, WIDTH, **dict({"experts": 4, "output": "none", "norm": "before"}, **mixture))
    for name in ("encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"):
        m.vector(name + ".norm.weight", WIDTH, 0.3, 1)
        m.vector(name + ".norm.bias", WIDTH)
    return m.meta, m.tensors


def classifier(seed=1, width=6, classes=4, **mixture):
    """Return a Deep MoE classifier: two dense mixtures of linear experts with MLP gates."""
    m = begin("deep-moe", seed, classes, width)
    m.meta["network.layers"] = 2
    shape = dict({"experts": 3, "gate": "softmax", "k": 0, "linear": 10, "units": 5, "residual": 0, "output": "none"},
                 **mixture)
    m.mixture("network.0", width, **shape)
    m.mixture("network.1", 10, **shape)
    m.matrix("output.weight", classes, 10, 2)
    m.vector("output.bias", classes)
    return m.meta, m.tensors
