#!/usr/bin/env python3
"""Test lexical shortlists: both file formats, damaged files, and model files with a list. Translations must match
transformer_numpy.py in float64 with its softmax restricted to the tokens of ../shared/docs/marian.md section 6.

Usage: tests/python tests/convert/test_shortlist.py [WORD]      WORD: run tests with matching names
"""
import contextlib
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

from converting import BIN, ROOT, TRANSLATE, convert_quietly, run
from suite import Suite

BASE = os.path.join(ROOT, "tests", "golden", "model-base.bin")
try:
    import numpy as np

    import make_transformers as make
    import marian_numpy
    import moefile
    import shortlist
    import transformer_numpy
except ImportError:
    moefile = None
test = Suite()
numpy_test = test.needs(moefile, "NumPy")


def write_binary(path, lists, best=50, hash=None):
    """Write lists in the binary format of ../shared/docs/marian.md section 6."""
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
    """Random shortlists of random lengths for a vocabulary."""

    def __init__(self, size, first=5, seed=1, most=12):
        r = np.random.default_rng(seed)
        self.first = first
        self.rows = [sorted(r.choice(size, r.integers(0, most), replace=False).tolist()) for _ in range(size)]


def rows_of(lists):
    return [lists.ids[a:b].tolist() for a, b in zip(lists.offsets[:-1], lists.offsets[1:])]


@numpy_test
def binary_files_may_be_compressed():
    with tempfile.TemporaryDirectory() as folder:
        path, random = os.path.join(folder, "lex.bin"), Random(40)
        write_binary(path, random)
        with open(path, "rb") as file:
            data = file.read()
        contents = [data, gzip.compress(data)]
        if shutil.which("zstd"):  # compression is detected from the contents, not from the file name
            contents.append(subprocess.run(["zstd", "-cq", path], capture_output=True, check=True).stdout)
        else:
            assert "CI" not in os.environ, "no zstd here"
        for content in contents:
            with open(path, "wb") as file:
                file.write(content)
            read = shortlist.read(path, {"vocab.size": 40})
            assert rows_of(read) == random.rows and read.first == 5
        assert rows_of(shortlist.read(path, {"vocab.size": 41})) == random.rows + [[]]  # the start token has no list


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
        pairs = [(t, s, (t * 37 % 101 + s) / 200) for t in range(99) for s in range(99)] * 2  # the weights are unsorted
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{t} {s} {weight}\n" for t, s, weight in pairs)
        best = [sorted(sorted(range(99), key=lambda t: -(t * 37 % 101))[:3]) for _ in range(99)]
        assert rows_of(shortlist.read(path, {"vocab.size": 99}, best=3)) == best


def damages(folder):
    """Write damaged lists; yield (words of the expected error message, path)."""
    good, path = Random(40), os.path.join(folder, "damaged")
    write_binary(path, good)
    with open(path, "rb") as file:
        data = file.read()

    def put(content):
        with open(path, "wb") as file:
            file.write(content)
        return path
    yield "ends within its header", put(data[:40])
    yield "does not match", put(data[:-4])
    yield "does not match", put(data + b"\0\0\0\0")
    yield "does not match", put(data[:32] + b"\xff" * 8 + data[40:])
    yield "checksum", put(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    yield "truncated or damaged", put(gzip.compress(data)[:-20])
    yield "the limit for a shortlist", put(gzip.compress(bytes(100 << 20), 1))
    yield "16777216 first tokens", put(data[:16] + (1 << 24).to_bytes(8, "little") + data[24:])
    yield "UTF-8", put(b"a b \xff\n")
    yield "line 2: expected", put(b"1 2 0.5\n1 2\n")
    for weight in b"-0.5", b"x", b"nan", b"1.5":
        yield "line 2: expected", put(b"1 2 0.5\n1 2 " + weight + b"\n")
    yield "no line contains a source and a target token", put(b"1 99 0.5\n")
    yield "not a regular file", "/dev/zero"
    for rows, first, words in (([[1]] * 39 + [[2, 1]], 5, "do not ascend"), ([[1]] * 39 + [[40]], 5, "(0 to 39)"),
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
def lists_are_added_to_a_copy_of_a_model_file():
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


# ---- The engine ------------------------------------------------------------------------------------------------------

SIZE, PAD, MARGIN, TOLERANCE = 2501, 2500, 1e-4, 2e-5
CONFIG = make.configs("marian", vocab_size=SIZE, decoder_vocab_size=SIZE, pad_token_id=PAD,
                      decoder_start_token_id=PAD) if moefile else None


class Listed:
    """A reference that restricts each translation to the shortlist of its source, plus given tokens."""

    def __init__(self, folder, random):
        self.model, self.random, self.used = transformer_numpy.Transformer(folder), random, None
        whole = self.model.decode

        def decode(*args):
            logits, cache = whole(*args)
            masked = np.full_like(logits, -np.inf)
            masked[..., self.used] = logits[..., self.used]
            return masked, cache
        self.model.decode = decode

    def use(self, source, given=()):
        chosen = marian_numpy.listed(self.random.first, self.random.rows, source, SIZE)
        self.used = sorted({*chosen, *given})
        return len(chosen)


@contextlib.contextmanager
def listed(*options):
    """Yield (model file, reference with equal lists) for a random Transformer. The lists of some sentences have more
    tokens than a chunk of the output layer."""
    with tempfile.TemporaryDirectory() as folder:
        make.write(folder, *CONFIG, seed=20)
        random, path = Random(SIZE, 50, most=300), os.path.join(folder, "lex.bin")
        write_binary(path, random)
        model = os.path.join(folder, "model.bin")
        complaint = convert_quietly("--from", "hf", folder, "-o", model, "--shortlist", path, *options)
        assert complaint is None, complaint
        yield model, Listed(folder, random)


def translate(model, lines, *options):
    found = [json.loads(x) for x in run([TRANSLATE, "-m", model, "--raw-ids", "--json", *options], lines).lines]
    return [(x["ids"], x["score"], x["token_logprobs"]) for x in found]


def cases(count):
    return [make.case("marian", i, CONFIG[0]) for i in range(count)]


@numpy_test
def translations_match_the_reference():
    sentences, compared, sizes = cases(30), 0, []
    with listed() as (model, reference):
        for beam in 1, 4:
            found = translate(model, [make.text(source) for source, _, _ in sentences], "--beam", str(beam))
            for (source, _, _), (ids, score, _) in zip(sentences, found):
                sizes.append(reference.use(source))
                best = reference.model.greedy(source) if beam == 1 else reference.model.beam(source, beam)[0]
                if best.margin > MARGIN:
                    compared += 1
                    assert ids == best.ids and abs(score - best.score) < TOLERANCE, (beam, source, ids, best)
        full = translate(model, [make.text(source) for source, _, _ in sentences], "--beam", "1", "--shortlist=0")
    assert compared > 40 and min(sizes) < 1024 < max(sizes), (compared, sizes)
    assert sum(a[0] != b[0] for a, b in zip(full, found)) > 15  # the shortlist changes translations


@numpy_test
def damaged_lists_in_model_files_are_rejected():
    """Numbers are checked in blocks, so test invalid numbers within a block, at a boundary, and in the last block."""
    with listed() as (model, _):
        meta, tensors = moefile.read(model)
        ids = tensors["shortlist.ids"].array()
        for at in 1, 255, 256, 700, len(ids) - 1:
            for value in ids[at] + 0.5, -1, 1 << 20, 1 << 30, float("inf"):
                broken = ids.copy()
                broken[at] = value
                moefile.write_model(model, meta, {**tensors, "shortlist.ids": moefile.Tensor.encode(broken)})
                assert "shortlist.ids" in run([os.path.join(BIN, "moe-info"), model], status=3).stderr, (at, value)


@numpy_test
def given_tokens_are_added_to_the_set():
    sentences, outside = cases(30), 0
    with listed() as (model, reference):
        pairs = [f"{make.text(source)}\t{make.text(target)}" for source, _, target in sentences]
        for (source, _, target), (_, _, logprobs) in zip(sentences, translate(model, pairs, "--score")):
            reference.use(source)
            outside += bool(set(target) - set(reference.used))
            reference.use(source, target)
            wanted = reference.model.score(source, target, [PAD])
            for t, token in enumerate(target):
                assert abs(logprobs[t] - wanted[t, token]) < TOLERANCE, (source, target, t)
        begun = [f"{make.text(source)}\t{make.text(target[:-1])}" for source, _, target in sentences]
        for (source, _, target), (ids, _, logprobs) in zip(sentences, translate(model, begun, "--prefix", "--beam",
                                                                                "1")):
            reference.use(source, target[:-1])
            wanted = reference.model.score(source, ids, [PAD])
            assert ids[:len(target) - 1] == target[:-1]
            for t, token in enumerate(ids[:23]):  # the 24th token is a forced end
                assert abs(logprobs[t] - wanted[t, token]) < TOLERANCE, (source, target, t)
    assert outside > 10, outside


@numpy_test
def every_format_is_deterministic_for_any_batch_threads_order_and_kernels():
    kernels = re.search(r"kernels: ([^)]*)\)", run([TRANSLATE, "--version"]).stdout).group(1).split()
    emulated = os.path.join(BIN, "build", "moe-translate-emulated")
    lines = [make.text(source) for source, _, _ in cases(20)]
    for kind in "f32", "bf16", "q8", "q4":
        with listed("--type", kind) as (model, _):
            command = ["-m", model, "--raw-ids", "--json", "--nbest", "2"]
            for beam in "--beam 2", "--beam 4":
                want = run([TRANSLATE, *command, *beam.split()], lines).lines
                for option in ("--batch 1", "--batch 7", "--threads 3", *("--isa " + isa for isa in kernels)):
                    got = subprocess.run([TRANSLATE, *command, *beam.split(), *option.split()], capture_output=True,
                                         encoding="utf-8", input="".join(x + "\n" for x in lines))
                    assert got.stdout.split("\n")[:-1] == want or got.returncode == 2, (kind, beam, option)
                if os.path.exists(emulated) and kind in ("f32", "q8"):
                    got = run([emulated, *command, *beam.split(), "--device", "cuda"], lines)
                    assert got.lines == want, (kind, beam)
            # scoring reads rows of the whole matrix, translation gathers rows; the bits of the scores must be equal
            ours = translate(model, lines, "--beam", "1")
            pairs = [f"{line}\t{make.text(ids)}" for line, (ids, _, _) in zip(lines, ours)]
            for (_, _, scored), (_, _, ours) in zip(translate(model, pairs, "--score"), ours):
                assert scored[:23] == ours[:23], (kind, scored, ours)  # the 24th token is a forced end


@numpy_test
def lists_from_moe_align_keep_the_translations():
    model = os.path.join(ROOT, "models", "en-de-fr-es.bin")
    with open(os.path.join(ROOT, "tests", "train", "phrasebook.tsv"), encoding="utf-8") as file:
        texts = [line.split("\t")[0] for line in file][1:]
    command = ["-s", "en", "-t", "de", "--beam", "1", "--rerank", "0", "--split", "0", "--no-protect"]
    want = run([TRANSLATE, "-m", model, *command], texts).lines
    with tempfile.TemporaryDirectory() as folder:
        text, listed = os.path.join(folder, "lex.txt"), os.path.join(folder, "listed.bin")
        run([os.path.join(BIN, "moe-align"), "-m", model, "-q", "-s", "en", "-t", "de", "--lexicon", "-o", text],
            [f"{a}\t{b}" for a, b in zip(texts, want)])
        assert convert_quietly(model, "-o", listed, "--shortlist", text) is None
        meta, tensors = moefile.read(listed)
        mean = np.diff(tensors["shortlist.offsets"].array()).mean()
        assert run([TRANSLATE, "-m", listed, *command, "--shortlist=0"], texts).lines == want
        got = run([TRANSLATE, "-m", listed, *command], texts).lines
    kept = sum(a == b for a, b in zip(want, got))
    assert len(texts) > 100 and kept >= 0.9 * len(texts), (kept, len(texts))
    assert 0 < mean < meta["vocab.size"] / 20, mean


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
