#!/usr/bin/env python3
"""Split text into the pieces of a GNMT model or of an Argos package, or join
pieces into text: Moses tokenisation and BPE, with the merges stored in the
model file.

    tools/convert/moses-bpe.py -m gnmt.bin encode < text.en | \\
        ./moe-translate -m gnmt.bin --pretokenized | \\
        tools/convert/moses-bpe.py -m gnmt.bin decode

Requires sacremoses and subword-nmt, which NVIDIA's GNMT and Argos Translate
use: pip install sacremoses subword-nmt
"""
import needs  # must be first to report missing modules
import argparse
import io
import signal
import sys

import moefile
from moefile import FormatError

SPECIAL = ("token.pad", "token.unk", "token.bos", "token.eos")


def languages_of(meta, given):
    """Return the languages (source, target) for Moses: as given, else from the file."""
    found = given or [meta.get("tokenizer.source_language"), meta.get("tokenizer.target_language")]
    if not all(found):
        raise FormatError("the file does not name its languages: use --languages")
    return found


def encoder(meta, language):
    """Return a function that splits a line of text into pieces joined by spaces."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer
    from subword_nmt.apply_bpe import BPE
    codes = "\n".join(["#version: " + meta["tokenizer.bpe_version"], *meta["tokenizer.merges"]])
    moses, bpe = MosesTokenizer(lang=language), BPE(io.StringIO(codes + "\n"), separator=meta["tokenizer.separator"])
    punctuation = MosesPunctNormalizer(language).normalize if meta.get("tokenizer.punctuation") else str
    return lambda line: bpe.process_line(moses.tokenize(punctuation(line), return_str=True)).strip()


def decoder(meta, language):
    """Return a function that joins pieces into a line of text and drops special tokens except <unk>."""
    from sacremoses import MosesDetokenizer
    moses, separator, pieces = MosesDetokenizer(lang=language), meta["tokenizer.separator"], meta.get(
        "vocabulary.pieces", [])
    silent = {pieces[meta[key]] for key in SPECIAL if key != "token.unk" and 0 <= meta.get(key, -1) < len(pieces)}

    def decode(line):
        words = " ".join(piece for piece in line.split() if piece not in silent)
        words = (words + " ").replace(separator + " ", "")
        return moses.detokenize(words.split())
    return decode


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["encode", "decode"],
                        help="split text into pieces, or join pieces to text, line by line")
    parser.add_argument("-m", dest="model", metavar="FILE", required=True, help="model file with BPE merges")
    parser.add_argument("--languages", metavar="CODE", nargs=2, help="source and target language (default: the file's)")
    return parser.parse_args()


def main():
    args = parse_arguments()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit quietly if the output is closed, like other filters
    try:
        meta = moefile.read_meta(args.model)
        if meta.get("tokenizer.kind") != "bpe":
            raise FormatError("the file has no BPE merges")
        source, target = languages_of(meta, args.languages)
        change = encoder(meta, source) if args.what == "encode" else decoder(meta, target)
    except (FormatError, OSError) as error:
        sys.exit(f"moses-bpe.py: {'' if isinstance(error, OSError) else args.model + ': '}{error}")
    except ImportError as error:
        sys.exit(f"moses-bpe.py: {error}: pip install sacremoses subword-nmt")
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", newline="\n")
    for line in sys.stdin:
        print(change(line.rstrip("\r\n")), flush=True)


if __name__ == "__main__":
    main()
