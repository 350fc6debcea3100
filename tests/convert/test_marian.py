#!/usr/bin/env python3
"""Test models converted from Marian's formats: scores and searches must match.

Usage: tests/python tests/convert/test_marian.py [--only NAME]

Expected results come from marian_numpy.py in float64, checkpoints from
make_marian.py with fixed seeds. If ../shared/marian is available, its
checkpoints are compared with its expected values, which match Marian itself.
Prints `ok NAME` or `FAIL NAME` per test.
"""
import argparse
import contextlib
import glob
import gzip
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile

from converting import BIN, ROOT, TRANSLATE, convert_quietly, run
from suite import Skip, Suite

TOLERANCE = 2e-5  # maximum error of a token's log-probability
ALIGN = os.path.join(BIN, "moe-align")
SHARED = os.path.join(ROOT, "..", "shared", "marian")
try:
    import numpy as np

    import make_marian as make
    import marian
    import marian_numpy
    import moefile
except ImportError:
    np = None
test = Suite()
numpy_test = test.needs(np, "NumPy")


def line(ids):
    return " ".join(map(str, ids))


@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory() as path:
        yield path


def convert(source, model, *options):
    with contextlib.redirect_stderr(io.StringIO()):
        return convert_quietly("--from", "marian", source, "-o", model, *options)


@contextlib.contextmanager
def converted(kind, layout="npz", *options, **changes):
    """Convert a random checkpoint; yield (model file, reference in NumPy)."""
    with folder() as at:
        arrays = make.make(at, kind, layout, **changes)
        if layout != "npz":
            arrays = marian_numpy.read_bin(os.path.join(at, "model.bin"))
        else:
            arrays = {name: a if isinstance(a, bytes) else a.astype(np.float64) for name, a in arrays.items()}
        model = os.path.join(at, "converted")
        complaint = convert(at, model, *options)
        assert complaint is None, (kind, complaint)
        yield model, marian_numpy.Marian(arrays)


def translate(model, lines, *options):
    return [json.loads(x) for x in run([TRANSLATE, "-m", model, "--raw-ids", "--json", *options], lines).lines]


def scores(model, pairs, *options):
    lines = [f"{line(s)}\t{line(t)}" for s, t in pairs]
    return [x["token_logprobs"] for x in translate(model, lines, "--score", *options)]


def searches(model, sources, beam, normalize, factor, *options):
    """Translate sources with a beam; return the hypotheses of each source, [[(ids, score)]]."""
    found = translate(model, [line(s) for s in sources], "--beam", str(beam), "--nbest", str(beam),
                      "--length-penalty", str(normalize), "--max-len-factor", str(factor), *options)
    return [[(tuple(h["ids"]), h["score"]) for h in x.get("nbest", [x])] for x in found]


def assert_close(found, wanted, where):
    worst = max(abs(x - y) for x, y in zip(found, wanted, strict=True))
    assert worst < TOLERANCE, (where, worst)


def assert_same(found, wanted, where):
    """Check the tokens and scores of hypotheses; `wanted` includes end tokens."""
    assert [h for h, _ in found] == [tuple(h) for h, _ in wanted], (where, found, wanted)
    assert_close([x for _, x in found], [x for _, x in wanted], where)


# ---- Marian's arithmetic and search ----------------------------------------------------------------------------------

@numpy_test
def scores_and_searches_of_every_kind_match_the_reference():
    kinds = [(kind, "npz") for kind in make.KINDS] + [("student", x) for x in ("float32", "intgemm8", "intgemm16")]
    kinds += [("two", "intgemm16"), ("old", "intgemm8"), ("average", "intgemm16"), ("average-old", "intgemm8")]
    ended = 0
    for kind, layout in kinds:
        with converted(kind, layout) as (model, reference):
            cases = [make.case(kind, i) for i in range(16)]
            cases.append(([5, 9, 0], [7, 1, 0]))  # searches never choose <unk>, but it has a score
            for got, (source, target) in zip(scores(model, cases), cases, strict=True):
                assert_close(got, reference.score(source, target), (kind, layout, source))
            for beam, normalize, factor in (1, 1.0, 2), (4, 0.6, 1.5):
                found = searches(model, [s for s, _ in cases], beam, normalize, factor)
                for got, (source, _) in zip(found, cases, strict=True):
                    wanted = reference.search(source, beam, normalize, factor)
                    assert_same(got, wanted, (kind, layout, beam, source))
                    ended += sum(ids[-1] == 0 for ids, _ in wanted)
    assert ended > 40, ended


@numpy_test
def words_are_aligned_by_marians_head():
    """Compare the links of --share 1, the pairs of tokens (excluding </s>) whose weight is the largest for both."""
    if not os.path.isdir(SHARED):
        raise Skip("no ../shared/marian here")
    for name in "ssru/model.npz", "post/model.npz":
        with open(os.path.join(SHARED, name[:4], "npz.json"), encoding="utf-8") as file:
            cases = [c for c in json.load(file)["cases"] if len(c["source"]) > 1 and len(c["target"]) > 1]
        with folder() as at:
            model = os.path.join(at, "converted")
            assert convert(os.path.join(SHARED, name), model) is None, name
            found = run([ALIGN, "-m", model, "--ids", "--share", "1"],
                        [line(c["source"][:-1]) + "\t" + line(c["target"][:-1]) for c in cases]).lines
        for got, case in zip(found, cases, strict=True):
            weights = np.array(case["alignment"])[:-1, :-1]
            weights /= weights.sum(1, keepdims=True)
            best = (weights == weights.max(1, keepdims=True)) & (weights == weights.max(0, keepdims=True))
            wanted = sorted((s, t) for t, s in zip(*np.nonzero(best)))
            assert got.split() == [f"{s}-{t}" for s, t in wanted], (name, case["source"], got, wanted)


@numpy_test
def the_file_names_the_layer_that_aligns():
    for given, kinds in ("last", "cross ffn"), ("1", "cross ffn ssru cross ffn"):
        with converted("student", **{"transformer-guided-alignment-layer": given}) as (model, _):
            m = moefile.describe(moefile.read_meta(model))
            layer, heads = m.align
            assert heads == [0] and " ".join(x.kind for x in m.decoder[layer:]) == kinds, (given, m.align)
    for wrong in "0", "9", "first":
        with folder() as at:
            make.make(at, "student", "npz", **{"transformer-guided-alignment-layer": wrong})
            complaint = convert(at, os.path.join(at, "converted"))
            assert complaint and "transformer-guided-alignment-layer" in complaint, complaint


def with_a_head_that_aligns(path, layer=2, head=2):
    """Write a checkpoint in which only one head uses positions: its query and key are the fastest sinusoids, so it
    attends to the token with the same index. Earlier layers do not change the embeddings."""
    arrays, s = make.weights("post", make.settings("post")), make.settings("post")
    width, half = s["dim-emb"] // s["transformer-heads"], s["dim-emb"] // 2
    for name, array in arrays.items():
        if name == "Wemb":
            array *= np.float32(0.02)
        elif name.endswith(("_Wo", "_W2")) or "_b" in name[-4:]:
            array *= np.float32(0.01)
        elif "_ln_" in name:
            array[:] = "scale" in name
    chosen = np.zeros((s["dim-emb"], width), np.float32)
    for i in range(width // 2):
        chosen[i, i] = chosen[half + i, width // 2 + i] = 6
    for x in "qk":
        arrays[f"decoder_l{layer}_context_W{x}"][:, head * width:(head + 1) * width] = chosen
    make.write_npz(os.path.join(path, "model.npz"), arrays, make.as_yaml(s).encode() + b"\0")
    with open(os.path.join(path, "vocab.yml"), "w", encoding="utf-8") as file:
        file.write(make.vocabulary(make.TOKENS).replace(">>fra<<", "fra"))


@numpy_test
def alignment_heads_are_found_and_stored():
    generator, heads = np.random.default_rng(5), os.path.join(ROOT, "tests", "bench", "heads.py")
    with folder() as at:
        model, other, pairs = (os.path.join(at, x) for x in ("converted", "aligned", "pairs"))
        with_a_head_that_aligns(at)
        assert convert(at, model, "--align", "1:3") is None  # --align also works for checkpoints
        assert moefile.describe(moefile.read_meta(model)).align == (1, [3])
        with open(pairs, "w", encoding="utf-8") as file:
            for _ in range(600):
                source = generator.integers(2, 30, generator.integers(3, 10))
                file.write(line(source) + "\t" + line(source + 32) + "\n")
        found = run([sys.executable, heads, "-m", model, "--ids", "--lines", "100", "--align", ALIGN, pairs]).lines
        assert found[3].startswith("| 4:2 |") and found[-1] == "--align 4:2", found
        marks = [float(x.split(" | ")[1]) for x in found[3:5]]
        assert marks[0] > 75 and marks[1] < 50, found
        assert convert_quietly(model, "-o", other, "--align", "4:2,0") is None
        assert moefile.describe(moefile.read_meta(other)).align == (4, [0, 2])
        for wrong in "0:1", "4:4", "4", "4:", "x:1", "9:0":
            assert "align" in convert_quietly(model, "-o", other + "2", "--align", wrong), wrong
        ours = os.path.join(ROOT, "models", "en-de-fr-es.bin")
        assert "has GNMT attention" in convert_quietly(ours, "-o", other + "2", "--align", "0:0")
        language_model = os.path.join(ROOT, "models", "lm-en.bin")
        assert "has no encoder" in convert_quietly(language_model, "-o", other + "2", "--align", "0:0")
        assert not os.path.exists(other + "2")


@numpy_test
def shared_checkpoints_match_marian():
    """Compare models with the results of marian.md, section 9, except for empty sources."""
    if not os.path.isdir(SHARED):
        raise Skip("no ../shared/marian here")
    for name, values, *options in (("ssru/model.npz", "npz.json", "--shortlist=0"), ("post/model.npz", "npz.json"),
                                   ("post/model.bin", "npz.json"), ("ssru/model.intgemm.alphas.bin", "bin.json")):
        with open(os.path.join(SHARED, name[:4], values), encoding="utf-8") as file:
            expected = json.load(file)
        with folder() as at:
            model = os.path.join(at, "converted")
            assert convert(os.path.join(SHARED, name), model) is None, name
            cases = [c for c in expected["cases"] if c["source"] != [0]]
            given = [c for c in cases if c["target"] and 0 not in c["target"][:-1]]  # token 0 is not in the shortlist
            scored = scores(model, [(c["source"], c["target"]) for c in given], *options)
            for got, case in zip(scored, given, strict=True):
                assert_close(got, case["target_logprobs"], (name, case["source"]))
            for beam in 1, 4:
                found = searches(model, [c["source"] for c in cases], beam, expected["normalize"],
                                 expected["max_length_factor"], *options)
                for got, case in zip(found, cases, strict=True):
                    assert_same(got, [(h["ids"], h["score"]) for h in case[f"beam{beam}"]], (name, beam))


@numpy_test
def unconverted_folders_are_reported_with_the_command():
    with folder() as at:
        make.make(at, "student", "npz")
        for given in at, os.path.join(at, "model.npz"):
            told = run([TRANSLATE, "-m", given, "Hello."], status=3).stderr
            assert f"tools/convert/convert.py --from marian {given} -o model.bin" in told, told
        os.remove(os.path.join(at, "model.npz"))
        assert "convert" not in run([TRANSLATE, "-m", at, "Hello."], status=3).stderr
        with open(os.path.join(at, "config.json"), "w", encoding="utf-8") as file:
            file.write('{"model_type": "marian"}')
        with open(os.path.join(at, "model.safetensors"), "wb") as file:
            file.write(bytes(100))
        told = run([TRANSLATE, "-m", file.name, "Hello."], status=3).stderr
        assert f"convert.py --from hf {at} -o model.bin" in told, told


@numpy_test
def codes_of_intgemm8_are_copied_exactly():
    with converted("student", "intgemm8", "--type", "q8") as (model, reference):
        _, tensors = moefile.read(model)
        for name, part in ("encoder.0.qkv.weight", "encoder_l1_self_Wq"), ("embedding.weight", "Wemb"), \
                ("decoder.0.input.weight", "decoder_l1_rnn_W"):
            wanted = reference.w[part] if part == "Wemb" else reference.w[part].T
            found = tensors[name].array()[:len(wanted)]
            assert tensors[name].type == moefile.Q8 and np.allclose(found, wanted, rtol=1e-6, atol=0), name
        assert not tensors["embedding.weight"].array()[make.TOKENS:].any()
    with converted("post", "intgemm16", "--type", "q8") as (model, reference):
        found = moefile.read(model)[1]["encoder.0.out.weight"].array()
        assert np.abs(found - reference.w["encoder_l1_self_Wo"].T).max() < 0.01


# ---- Settings, vocabularies, compressed files ------------------------------------------------------------------------

@numpy_test
def decoder_yml_gives_the_defaults_and_names_the_files():
    with folder() as at:
        make.make(at, "post")
        os.rename(os.path.join(at, "model.npz"), os.path.join(at, "opus.npz"))
        with open(os.path.join(at, "decoder.yml"), "w", encoding="utf-8") as file:
            file.write("# as OPUS-MT\nrelative-paths: true\nmodels:\n  - /some/where/opus.npz\nvocabs:\n"
                       "  - vocab.yml\n  - vocab.yml\nbeam-size: 6\nnormalize: 0.7\nword-penalty: 0\nmini-batch: 1\n"
                       "max-length-factor: 2.5\nallow-unk: true\n")
        with open(os.path.join(at, "LICENSE"), "w", encoding="utf-8") as file:
            file.write("CC-BY 4.0\n")
        model = os.path.join(at, "converted")
        assert convert(at, model) is None
        meta, _ = moefile.read(model)
        wanted = {"decode.rules": "marian", "decode.beam": 6, "decode.max_len_factor": 2.5, "token.eos": 0,
                  "general.licence": "CC-BY 4.0\n", "origin.file": "opus.npz", "languages.codes": ["fra"],
                  "vocab.size": make.TOKENS + 1, "token.bos": make.TOKENS}
        for key, value in wanted.items():
            assert meta[key] == value, (key, meta[key])
        assert abs(meta["decode.length_penalty"] - 0.7) < 1e-9 and "token.suppressed" not in meta
        assert meta["vocabulary.pieces"][2:14] == ["y", "null", "~", "\u2581a", "1.0", '"', "it's", ">>fra<<", "#",
                                                   "a:b", "- x", "no"]


@numpy_test
def a_word_penalty_only_shifts_scores_of_normalize_1():
    with folder() as at:
        arrays = make.make(at, "post")
        with open(os.path.join(at, "decoder.yml"), "w", encoding="utf-8") as file:
            file.write("beam-size: 4\nnormalize: 1\nword-penalty: 0.1\n")
        model, log = os.path.join(at, "converted"), io.StringIO()
        with contextlib.redirect_stderr(log):
            assert convert_quietly("--from", "marian", at, "-o", model) is None
        assert "ignoring word-penalty 0.1" in log.getvalue(), log.getvalue()
        reference = marian_numpy.Marian({k: a if isinstance(a, bytes) else a.astype(np.float64)
                                         for k, a in arrays.items()})
        for i in range(8):
            source = make.case("post", i)[0]
            [found], wanted = searches(model, [source], 4, 1, 3), reference.search(source, 4, 1.0, 3, penalty=0.1)
            assert_same([(h, score - 0.1) for h, score in found], wanted, source)


@numpy_test
def unsupported_settings_are_rejected_by_name():
    cases = [("type", "s2s"), ("dec-cell", "gru"), ("ulr", "true"), ("transformer-pool", "true"),
             ("transformer-postprocess", "dar"), ("transformer-ffn-depth", "3"), ("transformer-rnn-projection", "true"),
             ("input-types", ["sequence", "class"]), ("transformer-heads", "5"), ("dim-emb", "y"),
             ("layer-normalization", "true"), ("transformer-decoder-autoreg", "convolution"),
             ("transformer-tied-layers", [1, 3]), ("some-new-option", "1")]
    for key, value in cases:
        with folder() as at:
            make.make(at, "student")
            s = make.settings("student", **{key: value})
            arrays = make.weights("student", make.settings("student"))
            make.write_npz(os.path.join(at, "model.npz"), arrays, make.as_yaml(s).encode() + b"\0")
            model = os.path.join(at, "converted")
            complaint = convert(at, model)
            name = {"transformer-postprocess": "transformer-preprocess"}.get(key, key)
            assert complaint and name in complaint and not os.path.exists(model), (key, complaint)
    with folder() as at:
        make.make(at, "before", version="12")
        assert "invalid version '12'" in convert(at, os.path.join(at, "converted"))
        for key, value in ("depth", 5), ("activation", "tanh"), ("nogate", "y"):
            make.make(at, "average", **{"transformer-aan-" + key: value})
            assert "transformer-aan-" + key in convert(at, os.path.join(at, "converted"))
        make.make(at, "post")
        for text, name in ("word-penalty: 0.5\n", "word-penalty"), ("beam-size: 0\n", "beam-size"), \
                ("new-option: 1\n", "new-option"), ("models:\n  - a.npz\n  - b.npz\n", "ensembles"), \
                ("vocabs:\n  - vocab.yml\n  - v.yml\n", "v.yml is missing"), ("a: &x 1\n", "line 1"), \
                ("a: 1\na: 2\n", "duplicate"), ("models:\n- {}\n", "line 2"), ("a: |\n  x\n", "line 1"):
            with open(os.path.join(at, "decoder.yml"), "w", encoding="utf-8") as file:
                file.write(text)
            complaint = convert(at, os.path.join(at, "converted"))
            assert complaint and name in complaint, (text, complaint)


def write_spm(path, size):
    """Write a SentencePiece model whose pieces are mostly letters; as in models for Marian, </s> is the first piece."""
    def piece(text, kind, score):
        body = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
        return b"\x0a" + bytes([len(body)]) + body
    pieces = piece(b"</s>", 3, 0) + piece(b"<unk>", 2, 0) + piece("\u2581".encode(), 1, -1)
    pieces += b"".join(piece(b"%c" % (97 + i) if i < 26 else b"w%d" % i, 1, -1 - i) for i in range(size - 3))
    trainer = b"\x18\x01\xc0\x02\x01\xc8\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\xd0\x02\x00"  # unigram, no bos
    with open(path, "wb") as file:
        file.write(pieces + b"\x12" + bytes([len(trainer)]) + trainer + b"\x1a\0")


@numpy_test
def compressed_files_of_text_models_are_supported():
    """Firefox serves all files as .gz or .zst. The model file must not change, except for the digest of its source."""
    found = []
    for pack in "", ".gz", ".zst":
        if pack == ".zst" and not shutil.which("zstd"):
            assert "CI" not in os.environ, "no zstd here"
            continue
        with folder() as at:
            make.make(at, "student", "intgemm8")
            os.unlink(os.path.join(at, "vocab.yml"))
            write_spm(os.path.join(at, "vocab.enpt.spm"), make.TOKENS)
            for path in glob.glob(os.path.join(at, "*")) if pack else ():
                if pack == ".zst":
                    subprocess.run(["zstd", "-q", "--rm", path], check=True)
                    continue
                with open(path, "rb") as file, gzip.open(path + pack, "wb") as out:
                    out.write(file.read())
                os.unlink(path)
            model = os.path.join(at, "converted")
            assert convert(at, model, "--name", "x", "--type", "q8") is None
            meta, tensors = moefile.read(model)
            assert meta["tokenizer.kind"] == "sentencepiece" and meta["token.suppressed"].tolist() == [1]
            assert (meta["languages.sources"], meta["languages.targets"]) == (["en"], ["pt"])  # from the file name
            found.append([(name, t.data) for name, t in tensors.items()])
            # --split 0: a random translation fails the checks of texts
            assert len(run([TRANSLATE, "-m", model, "--split", "0", "ab cd"]).lines) == 1
    assert len(found) > 1 and all(x == found[0] for x in found)


# ---- Damage ----------------------------------------------------------------------------------------------------------

def refused(at, data, name, *words):
    path, model = os.path.join(at, name), os.path.join(at, "converted")
    with open(path, "wb") as file:
        file.write(data)
    before = sorted(os.listdir(at))
    complaint = convert(path, model)
    assert complaint and "Traceback" not in complaint, (name, words)
    assert all(w in complaint for w in words), (words, complaint)
    assert sorted(os.listdir(at)) == before
    return complaint


@numpy_test
def damaged_files_are_rejected_without_output():
    with folder() as at:
        make.make(at, "student", "intgemm8")
        with open(os.path.join(at, "model.bin"), "rb") as file:
            whole = file.read()
        count = struct.unpack_from("<Q", whole, 8)[0]
        for n in (0, 15, 63, 100, 32 * count, len(whole) // 2, len(whole) - 1):
            refused(at, whole[:n], "cut.bin")
        refused(at, whole + b"\0", "long.bin", "after the last item")
        for i in range(0, 16 + 32 * count, 5):  # damage every field of the header, lengths included
            for value in (0xff, 0x7f, 0):
                data = bytearray(whole)
                data[i] = value if data[i] != value else 1
                model = os.path.join(at, "converted")
                with open(os.path.join(at, "odd.bin"), "wb") as file:
                    file.write(data)
                complaint = convert(os.path.join(at, "odd.bin"), model)
                assert complaint and "\n" not in complaint, (i, value)
        first = 16 + 32 * count
        refused(at, whole[:first] + b"\xff" + whole[first + 1:], "name.bin", "invalid name")
        multiplier = whole.index(struct.pack("<f", 127 / np.abs(make.weights("student", make.settings("student"))[
            "decoder_l1_context_Wk"]).max()))
        refused(at, whole[:multiplier] + struct.pack("<f", float("nan")) + whole[multiplier + 4:], "nan.bin",
                "decoder_l1_context_Wk", "multiplier")
        refused(at, whole[:multiplier - 1] + b"\x80" + whole[multiplier:], "code.bin", "out of range")
        refused(at, gzip.compress(whole)[:-9], "cut.bin.gz", "damaged")
        refused(at, gzip.compress(bytes(100 << 20)), "bomb.bin.gz", "the limit for a model")
        text = make.as_yaml(make.settings("student")).encode() + b"\0"
        arrays = make.weights("student", make.settings("student"))
        refused(at, make.as_bin(arrays, text + bytes(marian.LARGEST_YAML)), "text.bin", "special:model.yml is not text")
        for value, word in ("[1]", "version ['1']"), ('"\\uD800"', "line"), ('"\\UFFFFFFFF"', "line"), \
                ("a" * 5000, "line"), ("&a [*a, *a]", "line"), ("{a: b}", "line"):
            changed = make.as_yaml(make.settings("student", version=value)).encode()
            refused(at, make.as_bin(arrays, changed), "odd.bin", "special:model.yml", word)
        refused(at, b"\x28\xb5\x2f\xfd" + whole, "bad.bin.zst", "zst")


def mended(archive, old, new):
    """Return an uncompressed .zip file with some bytes of a member replaced and its checksums updated."""
    held = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as whole, zipfile.ZipFile(held, "w") as out:
        for name in whole.namelist():
            out.writestr(name, whole.read(name).replace(old, new))
    return held.getvalue()


@numpy_test
def inconsistent_archives_are_rejected():
    with folder() as at:
        s = make.settings("post")
        arrays, text = make.make(at, "post"), make.as_yaml(s).encode() + b"\0"
        arrays.pop("special:model.yml")
        path = os.path.join(at, "odd.npz")

        def archive(change, packed=zipfile.ZIP_STORED):
            held = io.BytesIO()
            with zipfile.ZipFile(held, "w", packed) as out:
                for name, a in {**arrays, "special:model.yml": np.frombuffer(text, np.int8)}.items():
                    block = io.BytesIO()
                    np.lib.format.write_array(block, change(name, a), version=(1, 0))
                    out.writestr(name + ".npy", block.getvalue())
            return held.getvalue()
        assert convert(path, path + "x") is not None
        with open(path, "wb") as file:  # compressed members are valid
            file.write(archive(lambda name, a: a, zipfile.ZIP_DEFLATED))
        assert convert(path, os.path.join(at, "fine")) is None
        refused(at, archive(lambda n, a: np.asfortranarray(a) if n == "Wemb" else a), "f.npz", "Wemb", "Fortran")
        refused(at, archive(lambda n, a: a.astype("f8") if n == "Wemb" else a), "d.npz", "Wemb", "float64")
        refused(at, archive(lambda n, a: a[:, :-1] if n == "encoder_l1_self_Wq" else a), "s.npz", "encoder_l1_self_Wq")
        refused(at, archive(lambda n, a: a * np.float32("nan") if n == "decoder_l1_ffn_W1" else a), "n.npz",
                "decoder_l1_ffn_W1", "finite")
        refused(at, archive(lambda n, a: np.zeros((1 << 12, 1 << 12), "f4") if n == "Wemb" else a,
                            zipfile.ZIP_DEFLATED), "bomb.npz", "times its size")
        whole = archive(lambda n, a: a)
        head = b"'descr': '<f4', 'fortran_order': False, 'shape': (64, 32), }" + b" " * 10
        assert whole.count(head) == 1
        for odd in b"'descr': '<f3', 'fortran_order': False, 'shape': (64, 32), }", \
                b"'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1" * 60 + b"x)":  # regex with 2^59 splits
            refused(at, mended(whole, head, odd.ljust(len(head))), "head.npz", "Wemb")
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w") as out:
            for i in range(marian.MAX_ITEMS + 1):
                out.writestr(f"{i}", b"")
        refused(at, held.getvalue(), "many.npz", "more than 65536 items")
        for n in (0, 10, len(whole) // 2, len(whole) - 1):
            refused(at, whole[:n], "cut.npz")
        refused(at, whole.replace(b"'descr': '<f4'", b"'descr': 'O' ,", 1), "o.npz")


@numpy_test
def damaged_vocabularies_are_refused():
    with folder() as at:
        make.make(at, "post")
        path = os.path.join(at, "vocab.yml")
        for text, word in (make.vocabulary(make.TOKENS + 1), "has 64 tokens"), ("</s>: 0\nw: 2\n", "<unk>"), \
                ("</s>: 0\n<unk>: 1\na: 1\n", "duplicate id 1"), ("a: b: 0\n", "line 1"), ('"a\n', "line 1"), \
                ("</s>: 0\n<unk>: 1\na: -1\n", "-1"), ('"\\q": 0\n', "line 1"), ("a: [1, 2\n", "line 1"), \
                ("? a\n", "line"), ("</s>: 0\n</s>: 1\n", "duplicate"), ("- a\n", "line 1"):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            complaint = convert(at, os.path.join(at, "converted"))
            assert complaint and word in complaint, (text[:20], complaint)
        with gzip.open(os.path.join(at, "vocab.json.gz"), "wt") as file:
            file.write('{"</s>": 0, "<unk>": 1, "a": 99}')
        os.unlink(path)
        assert "id 99 for 'a'" in convert(at, os.path.join(at, "converted"))
        os.rename(os.path.join(at, "vocab.json.gz"), os.path.join(at, "vocab.spm"))
        assert "SentencePiece" in convert(at, os.path.join(at, "converted"))
        write_spm(os.path.join(at, "vocab.spm"), make.TOKENS - 1)
        assert "63 pieces" in convert(at, os.path.join(at, "converted"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
