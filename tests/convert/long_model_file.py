#!/usr/bin/env python3
"""Compare tools/text/bpe.c, given a converted tokenizer.model, with transformers'
fast tokeniser for Llama and with the sentencepiece package: ids and texts must
be equal for lines of ../shared/corpus and noise in all scripts.

Usage: tests/python tests/convert/long_model_file.py [--lines N] [--size N]

Needs sentencepiece, protobuf and transformers 4 (PYTHON names an interpreter).
"""
import argparse
import glob
import io
import json
import lzma
import os
import random
import sys
import tempfile

import byte_bpe
from long_byte_bpe import characters, noise
from test_byte_bpe import ROOT, agree

try:
    import sentencepiece
    import transformers
except ImportError:
    transformers = None

SYMBOLS = ["<|im_start|>", "<|im_end|>"]
CASES = {}, {"legacy": False}, {"add_prefix_space": False}, {"legacy": False, "add_prefix_space": False}


def corpus(count):
    texts = []
    files = sorted(glob.glob(os.path.join(ROOT, "..", "shared", "corpus", "*", "*.tsv.xz")))
    for path in files:
        with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
            texts += file.read(1000000).split("\n")[:2 * count // len(files) + 1]
    return texts


def noises(count):
    known = list(characters())
    spaces = [c for c in known if c.isspace()] + list("  \u2581\u200b")
    pools, r = (known, spaces, list("<>0x41/sunkEF|_ima"), [" "], SYMBOLS), random.Random(11)
    return [noise(r, pools) for _ in range(count)]


def compare(at, config, texts):
    """Compare with transformers' tokeniser, which parses added tokens that are not special in all texts."""
    with open(at + "/tokenizer_config.json", "w", encoding="utf-8") as file:
        json.dump({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, **config}, file)
    fast = transformers.LlamaTokenizerFast.from_pretrained(at)
    added = {token.content for token in byte_bpe.tokenizer_blob(at).added if token.special}
    texts = [x for x in texts if not any(token in x for token in added)]
    wanted = [fast(x).input_ids for x in texts]
    decoded = agree(byte_bpe.tokenizer_blob(at), texts, wanted, False)
    different = [x for x, ids, ours in zip(texts, wanted, decoded) if ours != fast.decode(ids, **PLAIN)]
    assert not different, (config, len(different), different[:3])
    print(f"{config}: {len(texts)} texts, {sum(map(len, wanted))} ids")


PLAIN = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--size", type=int, default=8000)
    args = parser.parse_args()
    if not transformers:
        parser.error("needs sentencepiece, protobuf and transformers")
    lines, model = corpus(args.lines), io.BytesIO()
    lines = [x for line in lines for x in line.split("\t")]
    random.Random(3).shuffle(lines)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, user_defined_symbols=SYMBOLS,
        vocab_size=args.size, character_coverage=.99)
    texts = lines[:args.lines] + noises(args.lines)
    with tempfile.TemporaryDirectory() as at:
        with open(at + "/tokenizer.model", "wb") as file:
            file.write(model.getvalue())
        for config in CASES:
            compare(at, config, texts)
        plain = [x for x in texts if not any(symbol in x for symbol in SYMBOLS)]
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        with open(at + "/tokenizer_config.json", "w", encoding="utf-8") as file:
            json.dump({}, file)
        agree(byte_bpe.tokenizer_blob(at), plain, [pieces.encode(x) for x in plain], False)
        print(f"sentencepiece: {len(plain)} texts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
