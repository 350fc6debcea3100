#!/usr/bin/env python3
"""Compare tools/text/bpe.c with Hugging Face's `tokenizers`: both must give the
same ids for lines of the corpus, and for noise of Unicode 14 characters.

Usage: tests/python tests/convert/long_byte_bpe.py [--only NAME] [--lines N]
                                                     [--seed N]

Tests the tokenisers of tests/golden/byte-bpe.json, and those of ../shared if
available, with N (20000) lines of noise and N lines of ../shared/corpus each.
The package's NFC implements Unicode 9, so the noise for tokenisers with NFC
excludes the 98 combining marks that were added later.
"""
import argparse
import glob
import json
import lzma
import os
import random
import sys
import tempfile
import unicodedata

from suite import Skip, Suite
from test_byte_bpe import ROOT, SHARED, agree, byte_bpe

try:
    import tokenizers
except ImportError:
    tokenizers = None
test = Suite()
oracle_test = test.needs(tokenizers and byte_bpe, "tokenizers, or NumPy")
settings = argparse.Namespace(lines=20000, seed=47)


def published():
    """Yield (name, tokeniser of the package, bytes packed for bpe.c) for each tokeniser."""
    with open(os.path.join(ROOT, "tests", "golden", "byte-bpe.json"), encoding="utf-8") as file:
        found = [(kind, json.dumps(values)) for kind, values in json.load(file)["tokenizers"].items()]
    for name in ("hy-v3", "qwen3-moe") if os.path.isdir(SHARED) else ():
        with open(os.path.join(SHARED, name, "tokenizer.json"), encoding="utf-8") as file:
            found.append((name, file.read()))
    for name, text in found:
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
                file.write(text)
            yield name, tokenizers.Tokenizer.from_str(text), byte_bpe.tokenizer_blob(folder)


def compare(name, package, blob, texts):
    wanted = [x.ids for x in package.encode_batch(texts, add_special_tokens=False)]
    decoded = agree(blob, texts, wanted, True)
    assert decoded == package.decode_batch(wanted, skip_special_tokens=False), name
    print(f"{name}: {len(texts)} texts, {sum(map(len, wanted))} ids")


def characters():
    """Return the characters of Unicode 14 known to this Python, except surrogates."""
    fourteen = unicodedata if unicodedata.unidata_version.split(".")[0] == "14" else None
    for code in range(0x110000):
        c = chr(code)
        if unicodedata.category(c) not in ("Cn", "Cs") and (fourteen or unicodedata.ucd_3_2_0.category(c) != "Cn"):
            yield c


def noise(r, pools):
    out = []
    for _ in range(r.randint(1, 30)):
        out.append(r.choice(r.choice(pools)) * r.choice((1, 1, 1, 2, 3, 5)))
    return "".join(out)


@oracle_test
def noise_is_split_like_the_package():
    known = list(characters())
    nfc = tokenizers.normalizers.NFC()
    new = {c for c in known if nfc.normalize_str("a\u0345" + c) != unicodedata.normalize("NFC", "a\u0345" + c)}
    assert len(new) <= 98, " ".join(f"{ord(c):X}" for c in new)
    for name, package, blob in published():
        pool = [c for c in known if c not in new] if package.normalizer else known
        pools = (pool, [c for c in pool if ord(c) < 0x300 or 0x1e00 <= ord(c) < 0x2100],
                 list("'stremlvdSTREMLVD\u017f\u212a"),
                 [c for c in pool if c.isspace()] + list("\u200b\u180e\ufeff\x1c\x85"),
                 [c for c in pool if unicodedata.combining(c)], [c for c in pool if unicodedata.category(c)[0] == "N"])
        r = random.Random(settings.seed)
        compare(name, package, blob, [noise(r, pools) for _ in range(settings.lines)])


@oracle_test
def corpus_lines_are_split_like_the_package():
    files = sorted(glob.glob(os.path.join(ROOT, "..", "shared", "corpus", "*", "*.tsv.xz")))
    if not files:
        raise Skip("no ../shared")
    texts = []
    for path in files:
        with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
            texts += file.read(3000000).split("\n")[:2 * settings.lines // len(files) + 1]
    random.Random(settings.seed).shuffle(texts)
    for name, package, blob in published():
        compare(name, package, blob, texts[:settings.lines])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run tests with matching names")
    parser.add_argument("--lines", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=47)
    parser.parse_args(namespace=settings)
    return test.run(settings.only)


if __name__ == "__main__":
    sys.exit(main())
