#!/usr/bin/env python3
"""Test Cohere's tokeniser and chat template with llama.cpp's test vocabulary,
models/ggml-vocab-command-r.gguf, and random weights: ids must be those of the
package `tokenizers` and of llama.cpp.

Usage: tests/python tests/convert/test_cohere.py [--only NAME] [--lines N]

pip downloads the source distribution of llama-cpp-python 0.3.36 (77 MB), which
contains the file, and caches it. Lines are from ../shared/corpus, and random
characters of all scripts, spaces, control characters and emoji.
"""
import argparse
import functools
import glob
import lzma
import os
import random
import subprocess
import sys
import tempfile
import unicodedata

from converting import ROOT, convert_quietly, out_of_wheel
from suite import Suite

try:
    import gguf
    import numpy as np
    import tokenizers

    import gguf_file
    import make_decoder
    import make_gguf
    import moefile
    import test_byte_bpe
    from long_byte_bpe import characters, noise
except ImportError:
    tokenizers = None
CONVERT = os.path.join(ROOT, os.environ.get("BUILD", "build"), "convert_here")
SOURCE = "llama_cpp_python-0.3.36.tar.gz"
DIGEST = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
VOCABULARY = SOURCE.removesuffix(".tar.gz") + "/vendor/llama.cpp/models/ggml-vocab-command-r.gguf"
lines = 2000
test = Suite()
cohere_test = test.needs(tokenizers, "tokenizers, NumPy or gguf")


@functools.cache
def vocabulary():
    """Return a temporary folder with VOCABULARY, texts and ids."""
    return out_of_wheel("llama-cpp-python==0.3.36", SOURCE, DIGEST, lambda name: name.startswith(VOCABULARY),
                        "--no-binary", "llama-cpp-python")


@functools.cache
def published():
    """Return the metadata of the vocabulary's file."""
    return gguf_file.open_gguf(os.path.join(vocabulary().name, VOCABULARY))[0]


@functools.cache
def made():
    """Return a temporary folder with aya-expanse-8b-F32.gguf, which has the vocabulary and random weights, and its
    conversions by both programs."""
    values = {key.replace(".", "__"): x.tolist() if isinstance(x, np.ndarray) else x for key, x in published().items()
              if key.startswith("tokenizer") and ".chat_template." not in key and "templates" not in key}
    config = {**make_decoder.CONFIGS["cohere"], "vocab_size": len(values["tokenizer__ggml__tokens"])}
    holder = tempfile.TemporaryDirectory()
    path = holder.name + "/aya-expanse-8b-F32.gguf"
    make_gguf.write(path, config, make_decoder.arrays_of(config, 5), general__name="aya-expanse-8b", **values)
    assert convert_quietly("--from", "gguf", path, "-o", holder.name + "/python", "--type", "q8") is None
    done = subprocess.run([CONVERT, "q8", "-", path, holder.name + "/c"], capture_output=True, encoding="utf-8")
    assert done.stdout.endswith("ok\n"), done
    return holder


@functools.cache
def package():
    """Return a tokeniser of the package with the same tokens and merges."""
    value = lambda name: published()["tokenizer.ggml." + name]
    texts, kinds = value("tokens"), value("token_type")
    merges = [tuple(x.split(" ")) for x in value("merges")]
    found = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(texts)}, merges))
    cuts = tokenizers.pre_tokenizers
    found.normalizer = tokenizers.normalizers.NFC()
    found.pre_tokenizer = cuts.Sequence([cuts.Digits(individual_digits=True), cuts.ByteLevel(add_prefix_space=False)])
    found.decoder = tokenizers.decoders.ByteLevel()
    for kind in gguf_file.CONTROL, gguf_file.USER:
        found.add_tokens([tokenizers.AddedToken(texts[i], special=kind == gguf_file.CONTROL, normalized=False)
                          for i in np.flatnonzero(kinds == kind)])
    return found


def blob():
    return bytes(moefile.read_meta(made().name + "/c")["tokenizer.model"])


@cohere_test
def both_converters_write_the_same_bytes():
    found = []
    for name in "c", "python":
        with open(f"{made().name}/{name}", "rb") as file:
            found.append(file.read())
    assert found[0] == found[1]


@cohere_test
def the_prompt_is_that_of_the_chat_template():
    about = moefile.read_meta(made().name + "/c")
    assert about["prompt.prefix"] == "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>"
    assert about["prompt.suffix"] == "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    assert about["prompt.name"] == "aya" and len(about["languages.codes"]) == 24 and about["token.eos"] == 255001
    assert about["token.bos"] == 5 and "source.bos" not in about  # the prompt has it
    text = about["prompt.prefix"] + "Hello!" + about["prompt.suffix"]
    (ids, _), = test_byte_bpe.cut(blob(), [text.encode()], True)
    assert ids == package().encode(text, add_special_tokens=False).ids and len(ids) == 8, ids


@cohere_test
def texts_are_split_as_by_the_package():
    r, nfc = random.Random(5), tokenizers.normalizers.NFC()
    known = [c for c in characters()  # the package's NFC implements Unicode 9
             if nfc.normalize_str("a\u0345" + c) == unicodedata.normalize("NFC", "a\u0345" + c)]
    pools = (known, [c for c in known if c.isspace()] + ["\u200b"], [c for c in known if c < "\u00a0"], list("\t\n\r "),
             [c for c in known if unicodedata.category(c)[0] == "N"], list("'stremlvdSTREMLVD"),
             list("\U0001f600\U0001f44d\U0001f3fd\u200d\U0001f1e9\U0001f1ea"),
             ["<|START_OF_TURN_TOKEN|>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<PAD>"])
    texts = [noise(r, pools) for _ in range(lines // 2)]
    files = sorted(glob.glob(os.path.join(ROOT, "..", "shared", "corpus", "*", "*.tsv.xz")))
    for path in files:
        with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
            rows = [text for row in file.read(400000).split("\n")[:-1] for text in row.split("\t")]
        texts += r.sample(rows, min(len(rows), lines // 2 // len(files) + 1))
    wanted = [x.ids for x in package().encode_batch(texts, add_special_tokens=False)]
    decoded = test_byte_bpe.agree(blob(), texts, wanted, True)
    assert decoded == package().decode_batch(wanted, skip_special_tokens=False)
    print(f"    {len(texts)} texts, {sum(map(len, wanted))} ids")


@cohere_test
def texts_are_split_as_by_llama_cpp():
    path = os.path.join(vocabulary().name, VOCABULARY)
    with open(path + ".inp", encoding="utf-8") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    with open(path + ".out", encoding="utf-8") as file:
        wanted = [list(map(int, line.split())) for line in file]
    texts = texts[:len(wanted)]
    assert len(wanted) > 40
    found = [ids for ids, _ in test_byte_bpe.cut(blob(), [text.encode() for text in texts], False)]
    assert found == wanted, [(a, b, c) for a, b, c in zip(texts, found, wanted) if b != c][:3]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    parser.add_argument("--lines", type=int, default=lines)
    given = parser.parse_args()
    lines = given.lines
    sys.exit(test.run(given.only))
