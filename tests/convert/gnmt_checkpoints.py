"""Write checkpoints of other programs according to their format documentation. This module shares no code with tools/,
PyTorch or TensorFlow, so tests notice if tools/ misreads a format. It also creates random models in each layout, as
dictionaries of float32 arrays.

    write_torch(path, {"state_dict": {"w": array}, "epoch": 3})    legacy=True uses the container of PyTorch before 1.6
    write_bundle(prefix, {"w": array})
"""
import pickle
import struct
import zipfile

import numpy as np

# ---- torch.save ------------------------------------------------------------------------------------------------------


class Call:
    """A pickled object: the result of module.name(*arguments), optionally with a state."""

    def __init__(self, module, name, *arguments, state=None):
        self.module, self.name, self.arguments, self.state = module, name, arguments, state


class Global:
    def __init__(self, module, name):
        self.module, self.name = module, name


class Pickler:
    """A protocol 2 pickler that supports only the opcodes used by torch.save."""

    def __init__(self, legacy):
        self.out, self.storages, self.legacy = bytearray(b"\x80\x02"), [], legacy

    def named(self, module, name):
        self.out += b"c" + module.encode() + b"\n" + name.encode() + b"\n"

    def put(self, x):
        if x is None or x is True or x is False:
            self.out += {None: b"N", True: b"\x88", False: b"\x89"}[x]
        elif isinstance(x, int):
            self.out += b"J" + struct.pack("<i", x) if abs(x) < 1 << 31 else b"\x8a\x08" + struct.pack("<q", x)
        elif isinstance(x, float):
            self.out += b"G" + struct.pack(">d", x)
        elif isinstance(x, str):
            self.out += b"X" + struct.pack("<I", len(x.encode())) + x.encode()
        elif isinstance(x, tuple):
            self.out += b"("
            for item in x:
                self.put(item)
            self.out += b"t"
        elif isinstance(x, list):
            self.out += b"]("
            for item in x:
                self.put(item)
            self.out += b"e"
        elif isinstance(x, dict):
            self.out += b"}("
            for key, value in x.items():
                self.put(key)
                self.put(value)
            self.out += b"u"
        elif isinstance(x, Global):
            self.named(x.module, x.name)
        elif isinstance(x, Call):
            self.named(x.module, x.name)
            self.put(tuple(x.arguments))
            self.out += b"R"
            if x.state is not None:
                self.put(x.state)
                self.out += b"b"
        else:
            self.tensor(np.asarray(x))

    def tensor(self, x):
        kind = {"f4": "FloatStorage", "f2": "HalfStorage", "f8": "DoubleStorage", "i8": "LongStorage"}[x.dtype.str[1:]]
        key, strides = str(len(self.storages)), np.cumprod((1,) + x.shape[:0:-1])[::-1].tolist() if x.shape else []
        self.storages.append(np.ascontiguousarray(x).tobytes())
        self.named("torch._utils", "_rebuild_tensor_v2")
        self.out += b"("
        self.put(("storage", Global("torch", kind), key, "cpu", int(x.size)) + ((None,) if self.legacy else ()))
        self.out += b"Q"
        for item in (0, x.shape, tuple(strides), False, Call("collections", "OrderedDict")):
            self.put(item)
        self.out += b"tR"


def write_torch(path, value, legacy=False):
    p = Pickler(legacy)
    p.put(value)
    p.out += b"."
    if not legacy:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as z:
            z.writestr("archive/data.pkl", bytes(p.out))
            z.writestr("archive/byteorder", b"little")
            for key, data in enumerate(p.storages):
                z.writestr(f"archive/data/{key}", data)
            z.writestr("archive/version", b"3\n")
        return
    sizes = {"f4": 4}
    with open(path, "wb") as file:
        for x in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": sizes}):
            pickle.dump(x, file, 2)
        file.write(p.out)
        pickle.dump([str(i) for i in range(len(p.storages))], file, 2)
        for data in p.storages:
            file.write(struct.pack("<q", len(data) // 4) + data)  # all storages are float32


# ---- TensorFlow ------------------------------------------------------------------------------------------------------

def shifted(crc):
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


def masked_crc(data, table=tuple(map(shifted, range(256)))):
    """Return the masked CRC-32C of data, as TensorFlow stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(n):
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sorted_table(records, block_bytes=300):
    """Return the bytes of a LevelDB table with these (key, value) records, in the given order."""
    out = bytearray()

    def block(entries, restart_every):
        body, restarts, before = bytearray(), [], b""
        for i, (key, value) in enumerate(entries):
            shared = 0
            if i % restart_every == 0:
                restarts.append(len(body))
            else:
                while shared < min(len(key), len(before)) and key[shared] == before[shared]:
                    shared += 1
            body += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
            before = key
        restarts = restarts or [0]
        body += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts)) + b"\0"
        handle = varint(len(out)) + varint(len(body) - 1)
        out.extend(body + struct.pack("<I", masked_crc(body)))
        return handle

    index, group = [], []
    for key, value in sorted(records):
        group.append((key, value))
        if sum(len(k) + len(v) for k, v in group) > block_bytes:
            index.append((group[-1][0], block(group, 4)))
            group = []
    if group:
        index.append((group[-1][0], block(group, 4)))
    handles = block([], 1) + block(index, 1)
    return bytes(out) + handles + bytes(40 - len(handles)) + struct.pack("<Q", 0xDB4775248B80FB57)


def write_bundle(prefix, tensors, shards=2, change=lambda records: records):
    """Write a TensorFlow checkpoint; `change` may modify the index's (key, value) records."""
    data = [bytearray() for _ in range(shards)]
    records = [(b"", field(1, shards) + field(3, field(1, 1)))]
    for i, (name, x) in enumerate(sorted(tensors.items())):
        x = np.asarray(x)
        shape = b"".join(field(2, field(1, n)) for n in x.shape)
        raw, shard = np.ascontiguousarray(x).tobytes(), i % shards
        kind = {"f4": 1, "f8": 2, "i8": 9, "f2": 19}[x.dtype.str[1:]]
        records.append((name.encode(), field(1, kind) + field(2, shape) + (field(3, shard) if shard else b"")
                        + (field(4, len(data[shard])) if data[shard] else b"") + field(5, len(raw))
                        + varint(6 << 3 | 5) + struct.pack("<I", masked_crc(raw))))
        data[shard] += raw
    for shard, raw in enumerate(data):
        with open(f"{prefix}.data-{shard:05d}-of-{shards:05d}", "wb") as file:
            file.write(raw)
    with open(prefix + ".index", "wb") as file:
        file.write(sorted_table(change(records)))


# ---- Random models ---------------------------------------------------------------------------------------------------
# The gains are large enough for varied outputs and for most sentences to end. Larger gains make the networks chaotic:
# the rounding errors of float32, even in NumPy, would exceed the tolerance of the tests.

def normal(r, *shape, gain=1.0):
    return (r.standard_normal(shape) * gain).astype(np.float32)


def random_nvidia(r, hidden, vocabulary, layers, shared=True):
    h, w = hidden, {}

    def lstm(prefix, width, suffix=""):
        w[f"{prefix}weight_ih_l0{suffix}"] = normal(r, 4 * h, width, gain=1.9 * width ** -0.5)
        w[f"{prefix}weight_hh_l0{suffix}"] = normal(r, 4 * h, h, gain=1.9 * h ** -0.5)
        for kind in ("ih", "hh"):
            w[f"{prefix}bias_{kind}_l0{suffix}"] = normal(r, 4 * h, gain=0.3)

    w["encoder.embedder.weight"] = normal(r, vocabulary, h)
    for i in range(layers):
        lstm(f"encoder.rnn_layers.{i}.", 2 * h if i == 1 else h)
    lstm("encoder.rnn_layers.0.", h, "_reverse")
    w["decoder.embedder.weight"] = w["encoder.embedder.weight"] if shared else normal(r, vocabulary, h)
    lstm("decoder.att_rnn.rnn.", h)
    for i in range(layers - 1):
        lstm(f"decoder.rnn_layers.{i}.", 2 * h)
    attn = "decoder.att_rnn.attn."
    w[attn + "linear_att"] = normal(r, h)
    w[attn + "normalize_scalar"] = np.array([6], np.float32) + normal(r, 1)
    w[attn + "normalize_bias"] = normal(r, h, gain=0.5)
    for name in "qk":
        w[f"{attn}linear_{name}.weight"] = normal(r, h, h, gain=1.5 * h ** -0.5)
    w["decoder.classifier.classifier.weight"] = normal(r, vocabulary, h, gain=3.5 * h ** -0.5)
    w["decoder.classifier.classifier.bias"] = normal(r, vocabulary, gain=0.5)
    w["decoder.classifier.classifier.bias"][3] += 3
    return w


def nvidia_checkpoint(w, hidden, layers, pieces, merges, pairs="de"):
    """Return a checkpoint like those of NVIDIA's trainer, with the optimizer's state and the pickled BPE tokeniser."""
    tok2idx = Call("collections", "defaultdict", Call("functools", "partial", Global("__builtin__", "int"),
                                                      state=(Global("__builtin__", "int"), (1,), {}, None)))
    bpe = Call("subword_nmt.apply_bpe", "BPE", state={
        "bpe_codes": {tuple(m.split()): i for i, m in enumerate(merges)}, "version": (0, 2), "separator": "@@",
        "vocab": None,
        "glossaries": [], "glossaries_regex": None, "cache": {}, "bpe_codes_reverse": {}})
    return {"epoch": 5, "state_dict": w,
            "optimizer": {"state": {0: {"step": 7, "exp_avg": normal(np.random.default_rng(0), 5)}},
                                                       "param_groups": [{"lr": 0.002, "betas": (0.9, 0.999),
                                                                         "params": [0]}]},
            "scheduler": {"last_epoch": 7, "base_lrs": [0.002]}, "loss": 1.5,
            "model_config": {"hidden_size": hidden, "vocab_size": len(pieces), "num_layers": layers, "dropout": 0.2,
                             "batch_first": False, "share_embedding": True},
            "config": Call("argparse", "Namespace",
                           state={"lr": 0.002, "math": "fp32", "lang": {"src": "en", "tgt": pairs}}),
            "tokenizer": {"lang": {"src": "en", "tgt": pairs}, "separator": "@@", "vocab_size": len(pieces), "bpe": bpe,
                          "tok2idx": tok2idx, "idx2tok": dict(enumerate(pieces))}}


def random_tf(r, hidden, vocabulary, layers, normalised=True, scope="dynamic_seq2seq/"):
    h, w = hidden, {}

    def cell(prefix, width):
        w[f"{scope}{prefix}/basic_lstm_cell/kernel"] = normal(r, width + h, 4 * h, gain=1.9 * (width + h) ** -0.5)
        w[f"{scope}{prefix}/basic_lstm_cell/bias"] = normal(r, 4 * h, gain=0.3)

    for side in ("encoder", "decoder"):
        w[f"embeddings/{side}/embedding_{side}"] = normal(r, vocabulary, h)
    for way in ("fw", "bw"):
        cell("encoder/bidirectional_rnn/" + way, h)
    for i in range(layers - 1):
        cell(f"encoder/rnn/multi_rnn_cell/cell_{i}", h if i else 2 * h)
    cell("decoder/multi_rnn_cell/cell_0_attention/attention", 2 * h)
    for i in range(1, layers):
        cell(f"decoder/multi_rnn_cell/cell_{i}", 2 * h)
    attention = scope + "decoder/multi_rnn_cell/cell_0_attention/attention/bahdanau_attention/"
    w[attention + "attention_v"] = normal(r, h)
    if normalised:
        w[attention + "attention_g"] = np.float32(5) + normal(r, 1)[0]
        w[attention + "attention_b"] = normal(r, h, gain=0.5)
    w[attention + "query_layer/kernel"] = normal(r, h, h, gain=1.5 * h ** -0.5)
    w[scope + "decoder/memory_layer/kernel"] = normal(r, h, h, gain=1.5 * h ** -0.5)
    w[scope + "decoder/output_projection/kernel"] = normal(r, h, vocabulary, gain=3.5 * h ** -0.5)
    w[scope + "decoder/output_projection/kernel"][:, 2] *= 5  # vary the lengths of sentences
    return w


def random_moe(r, width, vocabulary, threshold=True):
    """Return a checkpoint like those of this project's trainer: its cells have projections, its layers experts, and the
    first decoder layer also reads the previous context."""
    d, h, e, units, attention = width, 2 * width, 6, 24, width + 3
    lstm = {"type": "lstmp", "hidden": h, "proj": d, "residual": True}
    gate = {"type": "moe", "experts": e, "k": 2, "hidden": units, "gate": "batchwise/threshold" if threshold
            else "topk"}
    config = {"arch": "gnmt-moe", "vocab_size": vocabulary, "d_model": d, "embed_scale": d ** 0.5,
              "shared_embedding": True,
              "pad": 0, "unk": 1, "bos": 2, "eos": 3, "languages": {"en": 4, "de": 5},
              "never_generated": [0, 1, 2, 4, 5],
              "gate_order": "i f g o", "encoder": [lstm, lstm, gate, lstm],
              "decoder": [{**lstm, "residual": "embedding part", "input": "embedding, context"}, gate, lstm],
              "attention": {"type": "additive", "size": attention, "query": "state"}}
    w = {"embedding.weight": normal(r, vocabulary, d, gain=d ** -0.5)}
    w["embedding.weight"][3] *= 2
    for side in ("encoder", "decoder"):
        for i, layer in enumerate(config[side]):
            name, wide = f"{side}.{i}", d * (1 + ("input" in layer))
            if layer["type"] == "moe":
                w[name + ".gate.weight"] = normal(r, d, e, gain=1.5 * d ** -0.5)
                if threshold:
                    w[name + ".gate.threshold"] = np.full(e, 0.25, np.float32)
                w[name + ".experts.w_up"] = normal(r, e, d, units, gain=1.5 * d ** -0.5)
                w[name + ".experts.w_down"] = normal(r, e, units, d, gain=1.5 * units ** -0.5)
            else:
                w[name + ".w_x"] = normal(r, 4 * h, wide, gain=1.5 * wide ** -0.5)
                w[name + ".w_r"] = normal(r, 4 * h, d, gain=1.5 * d ** -0.5)
                w[name + ".bias"] = normal(r, 4 * h, gain=0.3)
                w[name + ".w_proj"] = normal(r, d, h, gain=1.5 * h ** -0.5)
    w["attention.w_key"], w["attention.w_query"] = (normal(r, attention, d, gain=1.5 * d ** -0.5) for _ in range(2))
    w["attention.v"] = normal(r, attention)
    return {"format": "moe-checkpoint-1", "config": config, "weights": w}
