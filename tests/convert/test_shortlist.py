#!/usr/bin/env python3
"""Lexical shortlists: files of both forms, damaged ones, model files with one.

Usage: tests/python tests/convert/test_shortlist.py [WORD]      with WORD only the tests whose names have it
"""
import gzip
import os
import sys
import tempfile

from converting import ROOT, convert_quietly
from suite import Suite

BASE = os.path.join(ROOT, "tests", "golden", "model-base.bin")
try:
    import numpy as np

    import moefile
    import shortlist
except ImportError:
    moefile = None
test = Suite()
numpy_test = test.needs(moefile, "NumPy")


def write_binary(path, lists, best=50, hash=None):
    """The form of ../shared/docs/marian.md section 6."""
    offsets = np.cumsum([0] + [len(x) for x in lists.rows])
    ids = np.array([i for row in lists.rows for i in row], "<u4")
    body = np.array([lists.first, best, len(offsets), len(ids)], "<u8").tobytes() + offsets.astype(
        "<u8").tobytes() + ids.tobytes()
    if hash is None:
        hash = 0
        for at in range(0, len(body) // 8 * 8, 8):
            word = int.from_bytes(body[at:at + 8], "little")
            hash ^= (word + 0x9E3779B9 + (hash << 6) + (hash >> 2)) % 2**64
    with open(path, "wb") as file:
        file.write(np.array([0xF11A48D5013417F5, hash], "<u8").tobytes() + body)


class Random:
    """Lists of random length for a vocabulary."""

    def __init__(self, size, first=5, seed=1, most=12):
        r = np.random.default_rng(seed)
        self.first = first
        self.rows = [sorted(r.choice(size, r.integers(0, most), replace=False).tolist()) for _ in range(size)]


def rows_of(lists):
    return [lists.ids[a:b].tolist() for a, b in zip(lists.offsets[:-1], lists.offsets[1:])]


@numpy_test
def binary_files_are_read_compressed_or_not():
    with tempfile.TemporaryDirectory() as folder:
        path, random = os.path.join(folder, "lex.bin"), Random(40)
        write_binary(path, random)
        with open(path, "rb") as file:
            data = file.read()
        for content in data, gzip.compress(data):
            with open(path, "wb") as file:
                file.write(content)
            read = shortlist.read(path, {"vocab.size": 40})
            assert rows_of(read) == random.rows and read.first == 5
        assert rows_of(shortlist.read(path, {"vocab.size": 41})) == random.rows + [[]]  # a token for the start


@numpy_test
def text_gives_the_most_probable_targets():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "lex.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write("ein a 0.5\nder a 0.25\nhaus a 0.125\nhaus b 1\nNULL b 0.5\nein NULL 1\n\nder\tb\t0.1\n")
        meta = {"vocab.size": 6, "vocabulary.pieces": ["</s>", "<unk>", "der", "ein", "haus", "b"],
                "source.vocab.size": 3, "source.pieces": ["</s>", "a", "b"]}
        read = shortlist.read(path, meta, first=2, best=2)
        assert rows_of(read) == [[], [2, 3], [2, 4]] and read.first == 2
        with open(path, "w", encoding="utf-8") as file:
            file.write("3 0 0.5\n2 0 0.5\n9 0 1\n5 2 1\n")
        assert rows_of(shortlist.read(path, {"vocab.size": 6}))[:3] == [[2, 3], [], [5]]


def damages(folder):
    """(words of the message, path)."""
    good, path = Random(40), os.path.join(folder, "damaged")
    write_binary(path, good)
    with open(path, "rb") as file:
        data = file.read()

    def put(content):
        with open(path, "wb") as file:
            file.write(content)
        return path
    yield "ends within its header", put(data[:40])
    yield "its header says", put(data[:-4])
    yield "its header says", put(data + b"\0\0\0\0")
    yield "its header says", put(data[:32] + b"\xff" * 8 + data[40:])
    yield "checksum", put(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    yield "damaged or cut off", put(gzip.compress(data)[:-20])
    yield "has more than", put(gzip.compress(bytes(shortlist.LARGEST + 1), 1))
    yield "UTF-8", put(b"a b \xff\n")
    yield "line 2 is not", put(b"1 2 0.5\n1 2\n")
    yield "has no probability", put(b"1 2 -0.5\n")
    yield "has no probability", put(b"1 2 x\n")
    yield "no line has two tokens", put(b"1 99 0.5\n")
    yield "not a regular file", "/dev/zero"
    for rows, first, words in (([[1]] * 39 + [[2, 1]], 5, "do not ascend"), ([[1]] * 39 + [[40]], 5, "from 0 to 39"),
                               ([[1]] * 38, 5, "38 source tokens"), ([[1]] * 40, 41, "first 41"),
                               ([[]] * 40, 5, "0 ids")):
        bad = Random(40, first)
        bad.rows = rows
        write_binary(path, bad)
        yield words, path


@numpy_test
def damaged_files_are_refused_by_name():
    with tempfile.TemporaryDirectory() as folder:
        for words, path in damages(folder):
            try:
                shortlist.read(path, {"vocab.size": 40})
            except moefile.FormatError as error:
                assert words in str(error) and path in str(error), (words, str(error))
                continue
            raise AssertionError(f"{words}: accepted")


@numpy_test
def a_copy_of_a_model_file_gets_a_list():
    with tempfile.TemporaryDirectory() as folder:
        path, out = os.path.join(folder, "lex.bin"), os.path.join(folder, "model.bin")
        meta, tensors = moefile.read(BASE)
        random = Random(meta["vocab.size"])
        write_binary(path, random)
        assert convert_quietly(BASE, "-o", out, "--shortlist", path) is None
        more, copied = moefile.read(out)
        assert {name: t.data for name, t in copied.items() if name in tensors} == {
            name: t.data for name, t in tensors.items()} and list(more)[:len(meta)] == list(meta)
        assert copied["shortlist.ids"].array().tolist() == [i for row in random.rows for i in row]
        assert more["shortlist.first"] == 5 and more["shortlist.multiple"] == 8 and more["shortlist.shared"] == 1
        write_binary(path, Random(meta["vocab.size"] - 3))
        os.unlink(out)
        assert "source tokens" in convert_quietly(BASE, "-o", out, "--shortlist", path)
        assert not os.path.exists(out)


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
