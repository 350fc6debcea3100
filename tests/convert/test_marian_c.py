#!/usr/bin/env python3
"""Test that the converters in C and Python write the same bytes for Marian's
files, and that the one in C rejects what Python's rejects.

Usage: tests/python tests/convert/test_marian_c.py [--only NAME] [--cases N]

--cases N: random damage per kind of folder (default: 6)
"""
import argparse
import contextlib
import gzip
import io
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile

from converting import ROOT, TRANSLATE, convert_here, convert_quietly, has_tokeniser
from suite import Skip, Suite

BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
SHARED = os.path.join(ROOT, "..", "shared", "marian")
sys.path.append(os.path.join(ROOT, "tests", "fuzz"))
try:
    import numpy as np

    import make_marian as make
    import marian_damage
    import test_marian
except ImportError:
    np = None
LEX, SPM = "lex.50.50.enpt.s2t.bin", "vocab.enpt.spm"
test = Suite()
numpy_test = test.needs(np, "NumPy")
cases = 6


def convert_c(path, out, kind="q8", ids_only=True):
    """Convert in C; return (error message or None, notes). Sources without a tokeniser become models of token ids if
    `ids_only` is True."""
    options = ["--ids-only"] * (ids_only and not has_tokeniser(path))
    done = subprocess.run([os.path.join(BUILD, "convert_here"), *options, kind, "-", path, out], capture_output=True,
                          timeout=60)
    lines = done.stdout.decode(errors="replace").splitlines()
    assert done.returncode == 0 and lines, (path, done)
    return None if lines[-1] == "ok" else lines[-1], lines[:-1]


def convert_python(path, out, kind="q8"):
    """Convert in Python; return its error message or None."""
    with contextlib.redirect_stderr(io.StringIO()):
        return convert_quietly("--from", "marian", path, "-o", out, "--type", kind)


def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


def assert_same(path, kind="q8"):
    """Convert with both programs and compare the files; return the bytes."""
    with tempfile.TemporaryDirectory() as at:
        ours, theirs = at + "/c", at + "/python"
        complaint = convert_python(path, theirs, kind)
        assert complaint is None, (path, complaint)
        problem, _ = convert_c(path, ours, kind)
        assert problem is None, (path, kind, problem)
        assert sorted(os.listdir(at)) == ["c", "python"], os.listdir(at)
        first, second = bytes_of(ours), bytes_of(theirs)
        assert first == second, (path, kind, len(first), len(second))
        return first


@contextlib.contextmanager
def made(kind="student", layout="intgemm8", spms=(SPM,), lex=True, decoder=False, **changes):
    """Write a folder like Firefox's or OPUS-MT's."""
    with tempfile.TemporaryDirectory() as at:
        make.make(at, kind, layout, **changes)
        for name in spms:
            test_marian.write_spm(f"{at}/{name}", make.SIZES[kind]["src" not in name] if kind in make.SIZES
                                  else make.TOKENS)
        if any("vocab" in name for name in spms):
            for name in os.listdir(at):
                if name.endswith("vocab.yml"):
                    os.unlink(f"{at}/{name}")
        if lex:
            sizes = make.SIZES.get(kind, (make.TOKENS, make.TOKENS))
            marian_damage.write(f"{at}/{LEX}", marian_damage.lists(sizes[0], random.Random(1), sizes[1]))
        if decoder:
            with open(at + "/decoder.yml", "w", encoding="utf-8") as file:
                file.write("beam-size: 6\nnormalize: 0.7\nmax-length-factor: 2.5\nallow-unk: true\nquiet: true\n")
        yield at


def packed(at):
    """Compress all files of a folder."""
    for name in os.listdir(at):
        with gzip.open(f"{at}/{name}.gz", "wb") as file:
            file.write(bytes_of(f"{at}/{name}"))
        os.unlink(f"{at}/{name}")


# ---- Same bytes ------------------------------------------------------------------------------------------------------

@numpy_test
def every_kind_and_number_format_has_the_same_bytes():
    for kind in make.KINDS:
        for layout in "float32", "intgemm8", "intgemm16":
            with made(kind, layout, (), lex=False) as at:
                assert_same(at)
    for number_format in "f32", "f16", "bf16", "q4", "q4m", "q8b", "q3", "q2":
        for layout in "float32", "intgemm8":
            with made("post", layout, ()) as at:
                assert_same(at, number_format)


@numpy_test
def vocabularies_lists_and_settings_have_the_same_bytes():
    plain = []
    for compressed in False, True:
        for options in ({}, {"decoder": True}, {"lex": False}, {"spms": ("source.spm", "target.spm")},
                        {"kind": "two", "spms": ("srcvocab.ende.spm", "trgvocab.ende.spm")},
                        {"kind": "untied", "layout": "float32", "spms": (), "decoder": True}):
            with made(**options) as at:
                marian_damage.write(at + "/LICENSE", "MPL 2.0\r\n\rtwo é\n".encode())
                if options.get("spms") == ("source.spm", "target.spm"):
                    test_marian.write_spm(at + "/target.spm", make.TOKENS - 1)
                    marian_damage.write(at + "/model.bpe", b"")
                if compressed:
                    packed(at)
                assert_same(at)
        with made() as at:
            assert_same(at + "/model.bin")
            here = os.getcwd()
            try:
                os.chdir(at)
                plain.append(assert_same("."))
                assert_same("model.bin")
                assert_same("../" + os.path.basename(at) + "/./")
            finally:
                os.chdir(here)


@numpy_test
def shared_checkpoints_have_the_same_bytes():
    if not os.path.isdir(SHARED):
        raise Skip("no ../shared/marian here")
    for name in "ssru/model.intgemm.alphas.bin", "post/model.bin":
        for kind in "q8", "f32", "q4":
            assert_same(os.path.join(SHARED, name), kind)


@numpy_test
def tables_of_positions_of_real_widths_have_the_same_bytes():
    for width in 256, 384, 512, 1024:
        s = {"dim-emb": width, "transformer-heads": 8, "transformer-dim-ffn": 4, "enc-depth": 1, "dec-depth": 1}
        with made("student", "float32", (), lex=False, **s) as at:
            assert_same(at, "f32")


# ---- Errors ----------------------------------------------------------------------------------------------------------

def changed(name, change):
    """Return a damage of one file of a folder: `change` receives and returns its bytes."""
    return lambda at: marian_damage.write(f"{at}/{name}", change(bytes_of(f"{at}/{name}")))


def settings(**changes):
    """Return a damage that replaces special:model.yml and keeps the tensors."""
    def damage(at):
        s = make.settings("student")
        marian_damage.write(at + "/model.bin", make.as_bin(make.weights("student", s), make.as_yaml(
            {**s, **changes}).encode(), "intgemm8"))
    return damage


def renamed(old, new):
    return lambda at: os.rename(f"{at}/{old}", f"{at}/{new}")


def written(name, data):
    return lambda at: marian_damage.write(f"{at}/{name}", data)


def nan_in(name):
    def damage(at):
        s = make.settings("student")
        arrays = make.weights("student", s)
        arrays[name].reshape(-1)[3] = np.nan
        marian_damage.write(at + "/model.bin", make.as_bin(arrays, make.as_yaml(s).encode(), "float32"))
    return damage


DAMAGED = [  # damage, words of the message
    (lambda at: os.unlink(at + "/model.bin"), "no Marian model"),
    (lambda at: os.unlink(f"{at}/{SPM}"), "found 0 vocabularies"),
    (renamed(SPM, "srcvocab.enpt.spm"), "found 1 vocabularies"),
    (changed("model.bin", lambda x: x[:-100]), "model.bin truncated"),
    (changed("model.bin", lambda x: x[:40]), "model.bin not a Marian .bin file"),
    (changed("model.bin", lambda x: b""), "model.bin not a Marian .bin file"),
    (changed("model.bin", lambda x: x + b"\0"), "model.bin after the last item"),
    (changed("model.bin", lambda x: x[:16] + b"\xff" * 8 + x[24:]), "model.bin invalid item"),
    (changed("model.bin", lambda x: x.replace(b"encoder_l1_ffn_W1\0", b"encoder_l1_ffn_W9\0")),
     "model.bin tensor encoder_l1_ffn_W1 is missing"),
    (changed("model.bin", lambda x: x.replace(b"encoder_l1_ffn_W1\0", b"encoder_l1_ffn_W2\0")),
     "model.bin duplicate name encoder_l1_ffn_W2"),
    (nan_in("decoder_l1_ffn_W1"), "model.bin decoder_l1_ffn_W1 not finite"),
    (settings(type="s2s"), "model.bin special:model.yml type 's2s' is not supported"),
    (settings(**{"dim-emb": "40"}), "model.bin tensor Wemb shape [64, 40]"),
    (settings(**{"new-option": "1"}), "model.bin unknown option 'new-option'"),
    (settings(version="'"), "model.bin special:model.yml line"),
    (settings(**{"dec-depth": "1"}), "model.bin unexpected tensor decoder_l2"),
    (changed(SPM, lambda x: x[:-40]), f"{SPM} damaged"),
    (changed(SPM, lambda x: x[15:]), f"{SPM} do not match the model's 64 tokens"),
    (changed(SPM, lambda x: b"<page>404</page>"), f"{SPM} not a SentencePiece model"),
    (changed(LEX, lambda x: x[:-4]), f"{LEX} does not match"),
    (changed(LEX, lambda x: x[:-1] + bytes([x[-1] ^ 1])), f"{LEX}"),
    (changed(LEX, lambda x: x[:60] + bytes([x[60] ^ 1]) + x[61:]), f"{LEX} checksum mismatch"),
    (changed(LEX, lambda x: b"a b 0.5\n"), f"{LEX} not a binary shortlist reader in C"),
    (written("decoder.yml", b"models:\n  - other.bin\n"), "decoder.yml 'other.bin' is missing"),
    (written("decoder.yml", b"beam-size: 0\n"), "decoder.yml beam-size '0'"),
    (written("decoder.yml", b"normalize: 0.5\nword-penalty: 1\n"), "decoder.yml word-penalty 1 normalize 1"),
    (written("decoder.yml", b"{a: b}\n"), "decoder.yml line 1"),
    (written("decoder.yml", b"a: \xff\n"), "decoder.yml not UTF-8"),
    (written("LICENSE", b"\xff"), "LICENSE UTF-8"),
    (written("other.bin", b""), "model.bin and other.bin keep one"),
    (written("model.bin.gz", b"\x1f\x8b"), "model.bin and model.bin.gz keep one"),
    (renamed("model.bin", "model.npz"), "model.npz .npz reader in C"),
    (renamed("model.bin", "model.bin.zst"), "model.bin.zst zstd -d"),
    (written("model.bin", b"version https://git-lfs.github.com/spec/v1\n"), "model.bin Git LFS pointer"),
    (changed(SPM, gzip.compress), ""),
    (changed(SPM, lambda x: gzip.compress(x)[:-9]), f"{SPM} truncated or damaged"),
    (changed("model.bin", lambda x: gzip.compress(x) + b"tail"), "model.bin truncated or damaged"),
    (changed("model.bin", lambda x: gzip.compress(bytes(64 << 20))), "model.bin the limit for a model"),
    (lambda at: (os.unlink(at + "/model.bin"), os.mkfifo(at + "/model.bin")), "model.bin not a regular file"),
    (lambda at: (os.unlink(at + "/model.bin"), os.symlink("/nowhere", at + "/model.bin")), "model.bin missing file"),
]


@numpy_test
def damaged_and_incomplete_folders_are_rejected_by_file_and_problem():
    for damage, words in DAMAGED:
        with made() as at, tempfile.TemporaryDirectory() as target:
            damage(at)
            problem, _ = convert_c(at, target + "/out")
            assert os.listdir(target) == (["out"] if problem is None else []), os.listdir(target)
            if not words:
                assert problem is None, problem
                continue
            missing = [x for x in words.split(" ") if x not in (problem or "")]
            assert problem and not missing and len(problem) < 300, (words, problem)


@numpy_test
def existing_files_survive_errors():
    with made() as at, tempfile.TemporaryDirectory() as target:
        marian_damage.write(target + "/out", b"old")
        marian_damage.write(at + "/model.bin", bytes_of(at + "/model.bin")[:-300])
        assert convert_c(at, target + "/out")[0] and bytes_of(target + "/out") == b"old"
        assert convert_c(at, target + "/none/out")[0]
        assert "cannot open /nowhere" in convert_c("/nowhere", target + "/out")[0]


@numpy_test
def notes_name_what_is_missing():
    with made(spms=(), lex=False) as at, tempfile.TemporaryDirectory() as target:
        problem, notes = convert_c(at, target + "/out")
        assert problem is None and [x.split()[1] for x in notes] == ["no", "unknown"], notes
        marian_damage.write(at + "/decoder.yml", b"shortlist:\n  - lex.bin\n")
        notes = convert_c(at, target + "/out")[1]
        assert "note: decoder.yml: 'lex.bin' is missing: continuing without a shortlist" in notes, notes
        marian_damage.write(at + "/decoder.yml", b"normalize: 1\nword-penalty: 0.25\n")
        assert "note: word-penalty 0.25 is left out" in " ".join(convert_c(at, target + "/out")[1]), notes
        assert_same(at)
        assert "name its folder" in convert_c(at + "/vocab.yml", target + "/out")[0]
        problems = convert_c(at, target + "/none", ids_only=False)[0], convert_here(at, "-o", target + "/none")[0]
        for problem in problems:
            assert "source.spm and target.spm are missing. To convert" in problem, problem
        marian_damage.write(at + "/a.bpe", b"")
        for problem in convert_c(at, target + "/out")[0], convert_python(at, target + "/out"):
            assert "source.spm and target.spm are missing; found only a.bpe" in problem, problem


def usable(path):
    """Return whether moe-translate accepts a model and its tokeniser."""
    return subprocess.run([TRANSLATE, "-m", path, "a"], capture_output=True).returncode != 3


@numpy_test
def random_damage_has_the_same_outcome():
    outcomes = {}
    for target in "marian-bin", "marian-yml", "marian-spm", "shortlist":
        for name, maker in marian_damage.CASES[target].items():
            if name in ("opus", "tied") or "text" in name or "pieces" in name or (target, name) == ("marian-yml",
                                                                                                   "before"):
                continue  # .npz archives and lists of text
            for number in range(cases):
                r = random.Random(f"{target} {name} {number}")
                with tempfile.TemporaryDirectory() as at, tempfile.TemporaryDirectory() as out:
                    maker(at)
                    done = marian_damage.damage(r, target, at)
                    complaint = convert_python(at, out + "/python")
                    problem, _ = convert_c(at, out + "/c")
                    where = target, name, number, done, complaint, problem
                    if complaint is None and problem is None:
                        assert bytes_of(out + "/python") == bytes_of(out + "/c"), where
                    elif complaint is None:
                        assert problem.startswith("unsupported") or not usable(out + "/python"), where
                    else:
                        assert problem is not None, where
                    key = complaint is None, problem is None
                    outcomes[key] = outcomes.get(key, 0) + 1
    print(f"    both accept {outcomes.get((True, True), 0)}, both reject {outcomes.get((False, False), 0)}, "
          f"only C rejects {outcomes.get((True, False), 0)}")
    assert outcomes.get((False, False), 0) > cases


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--cases", type=int, default=cases)
    given = parser.parse_args()
    cases = given.cases
    sys.exit(test.run(given.only))
