"""Create random checkpoints in Marian's own formats for tests/convert/test_marian.py; a seed determines the weights.

        make(folder, kind, layout)    write model.npz or model.bin, and vocabularies; return {name: array} as in .npz
"""
import os
import struct
import zipfile

import numpy as np

from make_transformers import uniform

FORMS = {"float32": 0x404, "int8": 0x101, "intgemm8": 0x4101, "intgemm16": 0x4102}
COMMON = {"type": "transformer", "dim-emb": 32, "transformer-heads": 4, "transformer-dim-ffn": 48, "enc-depth": 2,
          "dec-depth": 2, "transformer-ffn-depth": 2, "transformer-ffn-activation": "swish",
          "transformer-decoder-autoreg": "self-attention", "dec-cell": "gru", "transformer-preprocess": '""',
          "transformer-dim-aan": 2048, "transformer-aan-depth": 2, "transformer-aan-activation": "swish",
          "transformer-aan-nogate": "false", "transformer-postprocess": "dan", "transformer-postprocess-emb": "d",
          "transformer-postprocess-top": '""',
          "tied-embeddings": "false", "tied-embeddings-all": "true", "tied-embeddings-src": "false",
          "transformer-tied-layers": [], "transformer-train-position-embeddings": "false", "output-omit-bias": "false",
          "ulr": "false", "input-types": [], "skip": "false", "transformer-guided-alignment-layer": "last",
          "version": "v1.9.56 94aeaa46 2021-04-28 00:28:35 +0100 "}
STUDENT = {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru", "transformer-ffn-activation": "relu"}
BEFORE = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
AVERAGE = {"transformer-decoder-autoreg": "average-attention"}
KINDS = {
    "student": STUDENT,
    "post": {},
    "tied": {**STUDENT, "dec-depth": 3, "transformer-tied-layers": [1, 1, 2]},
    "two": {**STUDENT, "tied-embeddings-all": "false", "tied-embeddings": "true"},
    "untied": {"tied-embeddings-all": "false", "output-omit-bias": "true"},
    "trained": {"transformer-train-position-embeddings": "true"},
    "before": {**BEFORE, "version": "v1.12.0 65bf82ff 2023-02-21 09:56:29 -0800"},
    "between": {**BEFORE, "version": "v1.10.28 8da539e 2022-02-06"},
    "old": {**BEFORE, "version": "v1.10.27 0 2022-02-05"},
    "old-student": {**BEFORE, **STUDENT},
    "average": {**AVERAGE, "transformer-dim-aan": 40},
    "average-old": {**AVERAGE, **BEFORE, "transformer-dim-aan": 32, "transformer-aan-activation": "relu",
                    "transformer-aan-depth": 3},
    "average-plain": {**AVERAGE, "transformer-aan-depth": 1, "transformer-aan-nogate": "true",
                      "transformer-postprocess-emb": "dn", "transformer-postprocess-top": "n"},
    "average-open": {**AVERAGE, **BEFORE, "dec-depth": 1, "transformer-dim-aan": 24, "transformer-aan-nogate": "true",
                     "transformer-aan-activation": "gelu", "transformer-ffn-activation": "gelu",
                     "transformer-postprocess-top": '""', "version": "v1.12.0"},
}
SIZES = {"two": (60, 52), "untied": (60, 52)}  # vocabulary sizes (source, target)
TOKENS, POSITIONS = 64, 40


def settings(kind, **changes):
    return {**COMMON, **KINDS[kind], **changes}


def as_yaml(values):
    return "".join(f"{key}:\n" + "".join(f"  - {x}\n" for x in value) if isinstance(value, list) and value
                   else f"{key}: {value}\n" for key, value in sorted(values.items()))


def shapes(kind, s):
    """Return {name: shape} in Marian's order [in, out]."""
    d, f, out = s["dim-emb"], s["transformer-dim-ffn"], {}
    sources, targets = SIZES.get(kind, (TOKENS, TOKENS))

    def norms(prefix, before=s["transformer-preprocess"] == "n"):
        for word in "scale", "bias":
            out[f"{prefix}_ln_{word}" + "_pre" * before] = 1, d

    def attention(prefix):
        for x in "qkvo":
            out[f"{prefix}_W{x}"], out[f"{prefix}_b{x}"] = (d, d), (1, d)
        norms(prefix + "_Wo")

    def average(prefix):
        cols = d
        for i in range(1, s["transformer-aan-depth"]):
            width = s["transformer-dim-aan"]
            out[f"{prefix}_W{i}"], out[f"{prefix}_b{i}"] = (cols, width), (1, width)
            cols = width
        if cols != d:
            i = s["transformer-aan-depth"]
            out[f"{prefix}_W{i}"], out[f"{prefix}_b{i}"] = (cols, d), (1, d)
        for x in "if" * (s["transformer-aan-nogate"] != "true"):
            out[f"{prefix}_W{x}"], out[f"{prefix}_b{x}"] = (d, d), (1, d)
    if s["tied-embeddings-all"] == "true":
        out["Wemb"] = targets, d
    else:
        out["encoder_Wemb"], out["decoder_Wemb"] = (sources, d), (targets, d)
    if s["transformer-train-position-embeddings"] == "true":
        out["Wpos"] = POSITIONS, d
    decoder = max([*s["transformer-tied-layers"]] or [s["dec-depth"]])
    for side, depth in ("encoder", s["enc-depth"]), ("decoder", decoder):
        for i in range(1, depth + 1):
            p = f"{side}_l{i}_"
            if side == "decoder" and s["dec-cell"] == "ssru":
                out[p + "rnn_W"], out[p + "rnn_Wf"], out[p + "rnn_bf"] = (d, d), (d, d), (1, d)
                norms(p + ("rnn" if s["transformer-preprocess"] == "n" else "rnn_ffn"))
            elif side == "decoder" and s["transformer-decoder-autoreg"] == "average-attention":
                average(p + "aan")
                norms(p + "aan_ffn")
            else:
                attention(p + "self")
            if side == "decoder":
                attention(p + "context")
            out.update({p + "ffn_W1": (d, f), p + "ffn_b1": (1, f), p + "ffn_W2": (f, d), p + "ffn_b2": (1, d)})
            norms(p + "ffn_ffn")
        if "n" in s["transformer-postprocess-top"]:
            norms(side + "_top", False)
        if "n" in s["transformer-postprocess-emb"]:
            norms(side + "_emb", True)
    if s["tied-embeddings-all"] != "true" and s["tied-embeddings"] != "true":
        out["decoder_ff_logit_out_W"] = d, targets
    if s["output-omit-bias"] != "true":
        out["decoder_ff_logit_out_b"] = 1, targets
    return out


def weights(kind, s, seed=1):
    out = {}
    for name, shape in shapes(kind, s).items():
        x = uniform(name, shape[0] * shape[1], seed).reshape(shape)
        if "_ln_scale" in name:
            x = 1 + x / 4
        elif "Wemb" in name or name == "Wpos":
            x = x / np.float32(3)
        elif shape[0] > 1:
            x = x * np.float32(2.5 * shape[0] ** -0.5)
        else:
            x = x / np.float32(2)
        if name == "decoder_ff_logit_out_b":
            x[0, 0] += 1  # make some translations end
        out[name] = x.astype(np.float32)
    return out


def stored(name, array, form):
    """Return (type, bytes) of an array as stored in a .bin file; `form` is the number format of matrices."""
    if form == "float32" or not (name[-3:-1] == "_W" or name.endswith("_W") or "Wemb" in name or name[-4:-2] == "_W"):
        return "float32", array.astype("<f4").tobytes()
    largest = 127 if form == "intgemm8" else 1024 * np.abs(array).max()
    multiplier = np.float32(largest / np.abs(array).max())
    codes = np.rint(array * multiplier).astype("i1" if form == "intgemm8" else "<i2")
    return form, (codes if "Wemb" in name else codes.T).tobytes() + struct.pack("<f", multiplier)


def as_bin(arrays, text, form="float32", alphas=()):
    """Return the bytes of a .bin file with these arrays and the settings in `text`."""
    items = [(name, a.shape, *stored(name, a, form)) for name, a in sorted(arrays.items())]
    items += [(name + "_QuantMultA", (1, 1), "float32", struct.pack("<f", 9.5)) for name in alphas]
    data = [bytes_ + bytes(-len(bytes_) % 256) for _, _, _, bytes_ in items]
    items.append(("special:model.yml", (len(text),), "int8", text))
    data.append(text)
    head = struct.pack("<QQ", 1, len(items))
    for (name, shape, form, _), block in zip(items, data):
        head += struct.pack("<4Q", len(name) + 1, FORMS[form], len(shape), len(block))
    head += b"".join(name.encode() + b"\0" for name, *_ in items)
    head += b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, shape, _, _ in items)
    pad = -(len(head) + 8) % 256
    return head + struct.pack("<Q", pad) + bytes(pad) + b"".join(data)


def write_npz(path, arrays, text):
    with zipfile.ZipFile(path, "w") as archive:
        for name, a in {**arrays, "special:model.yml": np.frombuffer(text, np.int8)}.items():
            with archive.open(name + ".npy", "w") as file:
                np.lib.format.write_array(file, a, version=(1, 0))


def vocabulary(size):
    """Return the text of a vocab.yml that includes pieces which a YAML 1.1 parser would not read as strings."""
    odd = ["y", "'null'", '"~"', '"\\u2581a"', "1.0", '"\\""', "'it''s'", "'>>fra<<'", '"#"', "a:b", '"- x"', "no"]
    return "</s>: 0\n<unk>: 1\n" + "".join(
        f"? {odd[i - 2]}\n: {i}\n" if i == 4 else f"{odd[i - 2] if i - 2 < len(odd) else f'w{i}'}: {i}\n"
        for i in range(2, size))


def make(folder, kind, layout="npz", seed=1, **changes):
    s = settings(kind, **changes)
    arrays, text = weights(kind, s, seed), as_yaml(s).encode() + b"\0"
    if layout == "npz":
        write_npz(os.path.join(folder, "model.npz"), arrays, text)
    else:
        with open(os.path.join(folder, "model.bin"), "wb") as file:
            file.write(as_bin(arrays, text, layout, ["encoder_l1_self_Wq"] * (layout == "intgemm8")))
    sources, targets = SIZES.get(kind, (TOKENS, TOKENS))
    for name, size in ([("src", sources), ("trg", targets)] if sources != targets else [("", sources)]):
        with open(os.path.join(folder, f"{name}vocab.yml"), "w", encoding="utf-8") as file:
            file.write(vocabulary(size))
    return {**arrays, "special:model.yml": text}


def case(kind, number):
    """Return (source of 2 to 9 tokens, target of 2 to 7 tokens); both counts include </s>."""
    size = SIZES.get(kind, (TOKENS, TOKENS))
    x = (uniform(f"{kind} {number}", 16, 0) + 1) / 2
    n, m = 1 + int(x[0] * 8), 1 + int(x[1] * 6)
    return ([2 + int(v * (size[0] - 2)) for v in x[2:2 + n]] + [0],
            [2 + int(v * (size[1] - 2)) for v in x[10:10 + m]] + [0])
