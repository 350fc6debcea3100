"""Lexical shortlists: for every source token, the target tokens that its translations may contain.

    lists = read(path, meta)            read a file; meta: the model's metadata, which maps pieces to ids
    put(meta, tensors, lists)           add the lists to a model's metadata and tensors (moefile.Tensor)

A model file stores the lists as two vectors, `shortlist.offsets` [source vocabulary + 1] and `shortlist.ids`. The list
of source token s is ids[offsets[s] .. offsets[s + 1]), ascending. All values are below 2^24 and exact in float32.
Metadata: `shortlist.entries`: length of ids; `shortlist.first`: smaller ids are always allowed; `shortlist.shared`: 1
if the source's ids are allowed; `shortlist.multiple`: ids from `first` on pad the allowed ids to a multiple of this.

File formats, optionally compressed by gzip or zstd: Marian's binary format (lex.50.50.xxyy.s2t.bin: u64 magic,
checksum, first, best, number of offsets and of ids; u64 offsets; u32 ids) and text: "target source probability" lines.
Tokens are pieces of the model's vocabulary, or ids if the model has no vocabulary.
"""
import collections
import io

import numpy as np

import hf_tokens
import moefile
import packed
from moefile import FormatError

MAGIC, HEADER = 0xF11A48D5013417F5, 48
LARGEST = 1 << 28  # maximum bytes of a file
MOST = 1 << 24  # limit of ids and of their number: float32 cannot represent all larger integers
MULTIPLE = 8  # as in Marian
MUCH = 4  # candidates kept per token while reading a text, as a multiple of `best`

Lists = collections.namedtuple("Lists", "first offsets ids")


def checksum(words):
    """Compute Marian's hash of 64-bit words."""
    h, low = 0, (1 << 64) - 1
    for at in range(0, len(words), 1 << 16):  # in parts, because a list of Python integers takes five times the memory
        for word in words[at:at + (1 << 16)].tolist():
            h ^= (word + 0x9E3779B9 + (h << 6) + (h >> 2)) & low
    return h


def parse_binary(data, path="shortlist"):
    """Parse a binary file, which may be damaged."""
    if len(data) < HEADER:
        raise FormatError(f"{path}: the shortlist ends within its header")
    magic, stored, first, best, n_offsets, n_ids = np.frombuffer(data, "<u8", 6).tolist()
    if magic != MAGIC:
        raise FormatError(f"{path}: not a binary shortlist")
    if len(data) != HEADER + 8 * n_offsets + 4 * n_ids:
        raise FormatError(f"{path}: the size of {len(data)} bytes does not match {n_offsets} offsets and {n_ids} ids")
    if n_ids >= MOST or first >= MOST:
        raise FormatError(f"{path}: the shortlist's {n_ids} ids or {first} first tokens exceed the limit of {MOST}")
    if checksum(np.frombuffer(data, "<u8", (len(data) - 16) // 8, 16)) != stored:
        raise FormatError(f"{path}: shortlist checksum mismatch")
    offsets = np.frombuffer(data, "<u8", n_offsets, HEADER)
    if (offsets > n_ids).any():
        raise FormatError(f"{path}: shortlist offset out of range")
    return Lists(first, offsets.astype(np.int64), np.frombuffer(data, "<u4", n_ids, HEADER + 8 * n_offsets).astype(
        np.int64))


def numbers_of(pieces):
    """Return {piece: id} without unused ids (""); the first of several equal pieces wins."""
    return {piece: i for i, piece in reversed(list(enumerate(pieces))) if piece}


def vocabularies(meta):
    """Return {piece: id} of a model's sources and of its targets, or (None, None) if the model accepts ids only."""
    targets = numbers_of(meta.get("vocabulary.pieces", ()))
    if not targets and isinstance(meta.get("tokenizer.model"), bytes):
        pieces = [piece for piece, _ in hf_tokens.parse_pieces(meta["tokenizer.model"], "tokenizer.model")]
        ids = meta.get("tokenizer.ids", range(len(pieces)))
        targets = {piece: int(i) for piece, i in reversed(list(zip(pieces, ids))) if i >= 0}
    sources = numbers_of(meta["source.pieces"]) if "source.pieces" in meta else targets
    return (sources, targets) if targets else (None, None)


def fields_of(line):
    """Parse a line of text into (target, source, probability)."""
    target, source, weight = line.split("\t" if "\t" in line else " ")
    weight = float(weight)
    if not 0 <= weight <= 1:
        raise ValueError
    return target, source, weight


def parse_text(data, path, meta, first, best):
    """Parse lines of text; return the `best` targets of every source token. Lines with unknown tokens are ignored."""
    size = meta.get("source.vocab.size", meta["vocab.size"])
    sources, targets = vocabularies(meta)
    found = collections.defaultdict(dict)

    def number(token, known):
        return known.get(token, -1) if known is not None else int(token) if token.isascii() and token.isdigit() else -1

    def chosen(of):
        """Return the `best` targets of {target: weight}."""
        return sorted(of, key=lambda i: (-of[i], i))[:best]
    for at, line in enumerate(io.BytesIO(data), 1):
        if not line.strip():
            continue
        try:
            target, source, weight = fields_of(line.decode())
            target, source = number(target, targets), number(source, sources)
        except UnicodeDecodeError:
            raise FormatError(f"{path}: neither a binary shortlist nor UTF-8 text (line {at})") from None
        except ValueError:
            raise FormatError(f"{path}: line {at}: expected target, source and probability") from None
        if 0 <= source < size and 0 <= target < meta["vocab.size"]:
            of = found[source]
            of[target] = max(weight, of.get(target, 0))
            if len(of) > MUCH * best:  # limit memory: drop all but the best targets
                found[source] = {i: of[i] for i in chosen(of)}
    if not found:
        raise FormatError(f"{path}: no line contains a source and a target token of the model")
    lists = [sorted(chosen(found.get(s, {}))) for s in range(size)]
    return Lists(min(first, meta["vocab.size"]), np.cumsum([0] + [len(x) for x in lists]),
                 np.array([i for x in lists for i in x], np.int64))


def read(path, meta, first=50, best=50):
    """Read a shortlist; `first` and `best` apply to text files only."""
    data = packed.read(path, LARGEST, "a shortlist")
    binary = data[:8] == MAGIC.to_bytes(8, "little")
    lists = parse_binary(data, path) if binary else parse_text(data, path, meta, first, best)
    if len(lists.offsets) == meta.get("source.vocab.size", meta["vocab.size"]):  # add an empty list for the start token
        lists = lists._replace(offsets=np.append(lists.offsets, len(lists.ids)))
    check(lists, meta, path)
    return lists


def check(lists, meta, path):
    """Reject lists that do not match the model or are invalid for the engine."""
    size, last = meta.get("source.vocab.size", meta["vocab.size"]), meta["vocab.size"] - 1
    first, offsets, ids = lists
    if len(offsets) != size + 1:
        raise FormatError(f"{path}: the shortlist has {len(offsets) - 1} source tokens, but the model has {size}")
    if not len(ids) or len(ids) >= MOST:
        raise FormatError(f"{path}: the shortlist has {len(ids)} ids, expected 1 to {MOST - 1}")
    if not 0 <= first <= last + 1:
        raise FormatError(f"{path}: the shortlist's first {first} tokens exceed the vocabulary of {last + 1}")
    if offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise FormatError(f"{path}: the shortlist's offsets do not ascend from 0 to {len(ids)}")
    begins = np.zeros(len(ids), bool)
    begins[offsets[:-1][offsets[:-1] < len(ids)]] = True
    if ids.min() < 0 or ids.max() > last or (~begins[1:] & (np.diff(ids) <= 0)).any():
        raise FormatError(f"{path}: the shortlist's ids do not ascend or are out of range (0 to {last})")


def specs(lists):
    """Return the metadata and vectors that represent the lists."""
    return ({"shortlist.entries": len(lists.ids), "shortlist.first": int(lists.first)},
            {"shortlist.offsets": lists.offsets.astype(np.float32), "shortlist.ids": lists.ids.astype(np.float32)})


def put(meta, tensors, lists, shared=None, multiple=MULTIPLE):
    """Add lists to metadata and tensors, replacing existing ones. shared: source and target share a vocabulary."""
    entries, vectors = specs(lists)
    shared = "source.vocab.size" not in meta if shared is None else shared
    meta.update({**entries, "shortlist.shared": int(shared), "shortlist.multiple": multiple})
    for name, vector in vectors.items():
        tensors[name] = moefile.Tensor.encode(vector)
