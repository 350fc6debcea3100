#!/usr/bin/env python3
"""Write what llama.cpp makes of texts with Gemma 3 270M, for test_gemma.py:
ids of 2,000 lines, and greedy continuations of 40 beginnings.

Usage: PYTHON=... tests/python tests/convert/gemma_llama.py

Writes tests/golden/gemma-llama.json. Needs ../shared/corpus, and Python with
llama-cpp-python 0.3.36 (built from source by pip), NumPy and gguf. Lines of the
corpus are stored as hashes of their ids.
"""
import glob
import hashlib
import json
import lzma
import os
import random
import struct
import sys

from converting import ROOT

GOLDEN = os.path.join(ROOT, "tests", "golden", "gemma-llama.json")
CORPUS = os.path.join(ROOT, "..", "shared", "corpus", "*", "*.tsv.xz")
LINES, NOISE, STEPS = 1200, 800, 32
WORDS = ("<start_of_turn>", "<end_of_turn>", "<b>", "</b>", "<bos>", "<eos>", "<unused5>", "[multimodal]", "<0x41>",
         "\n\n")


def digest(ids):
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()[:8]


def kept(texts):
    """Drop duplicates, and texts with </s>: a token of users' texts in Gemma's files, a control token in llama.cpp."""
    return [x for x in dict.fromkeys(texts) if x and "</s>" not in x]


def of_corpus():
    """Return lines of all files of the corpus, or [] without it."""
    files, found, r = sorted(glob.glob(CORPUS)), [], random.Random(5)
    for path in files:
        with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
            rows = [text for row in file.read(400000).split("\n")[:-1] for text in row.split("\t")]
        found += r.sample(rows, min(len(rows), LINES // len(files) + 9))
    return kept(found)[:LINES]


def of_cases():
    """Return the texts of byte-bpe.json."""
    with open(os.path.join(ROOT, "tests", "golden", "byte-bpe.json"), encoding="utf-8") as file:
        return kept(case["text"] for cases in json.load(file)["cases"].values() for case in cases)


def of_noise():
    """Return random lines: all scripts, spaces, control characters, emoji, names of tokens."""
    from long_byte_bpe import characters, noise
    known, r = list(characters()), random.Random(11)
    pools = (known, [c for c in known if c.isspace()] + ["\u2581", "\u200b"], [c for c in known if c < "\u00a0"], [" "],
             list("\t\n\r "), list("<>0x41/kEF|_ima"), WORDS, list("😀👍🏽👨‍👩‍👧🇩🇪"),
             [c for c in known if "\u0300" <= c < "\u3400"])
    return kept(noise(r, pools) for _ in range(NOISE + 50))[:NOISE]


def beginnings():
    """Return 40 phrases in four languages, without their last characters."""
    with open(os.path.join(ROOT, "tests", "train", "phrasebook.tsv"), encoding="utf-8") as file:
        rows = [line.split("\t")[2].rstrip(".?!") for line in file][1:]
    return kept(sorted(rows, key=lambda x: -len(x))[:160:4])


def main():
    import llama_cpp
    import test_gemma
    path = test_gemma.folder().name + "/x.gguf"
    model = llama_cpp.Llama(model_path=path, n_ctx=512, n_threads=1, n_threads_batch=1, n_batch=1, n_ubatch=1,
                            verbose=False)  # batches of one: its AMX code crashed in a virtual machine
    ids_of = lambda text: model.tokenize(text.encode(), add_bos=False, special=False)
    corpus, noise, prompts = of_corpus(), of_noise(), beginnings()
    if len(corpus) < LINES or len(prompts) < 40:
        return "needs ../shared/corpus, whose files are large enough"
    answers = []
    for prompt in prompts:
        model.reset()
        ids = [2, *ids_of(prompt)]
        for token in ids:
            model.eval([token])
        for _ in range(STEPS):
            logits = model._ctx.get_logits()[:model.n_vocab()]
            ids.append(max(range(len(logits)), key=logits.__getitem__))
            if ids[-1] in (1, 106):
                break
            model.eval([ids[-1]])
        answers.append(ids[1:])
    found = {"made_with": f"llama-cpp-python {llama_cpp.__version__}, tests/convert/gemma_llama.py",
             "corpus": [digest(ids_of(x)) for x in corpus], "cases": [digest(ids_of(x)) for x in of_cases()],
             "noise": [[x, digest(ids_of(x))] for x in noise], "prompts": prompts, "answers": answers}
    with open(GOLDEN, "w", encoding="utf-8") as file:
        json.dump(found, file, ensure_ascii=False, separators=(",", ":"))
        file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
