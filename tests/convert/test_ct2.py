#!/usr/bin/env python3
"""Test models in CTranslate2's layout and packages of Argos Translate, which
make_ct2.py writes: converted models must score and search like NumPy in
float64, and damaged ones must be rejected.

Usage: tests/python tests/convert/test_ct2.py [--only NAME] [--cases N]

--cases N: random damage per kind of model (default: 20)
"""
import argparse
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile

from converting import BIN, ROOT, TRANSLATE, convert_quietly, run
from suite import Suite

BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
CONVERT = os.path.join(BUILD, "convert_here")
INFO = os.path.join(BIN, "moe-info")
TOLERANCE, MARGIN = 2e-5, 1e-4
try:
    import numpy as np

    import make_ct2 as make
    import make_decoder
    import moefile
except ImportError:
    np = None
test = Suite()
numpy_test = test.needs(np, "NumPy")
cases = 20


def convert(path, out, kind="f32", *options):
    """Convert in C; return the error message, or None."""
    done = subprocess.run([CONVERT, *options, kind, "-", path, out], capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done
    return None if done.stdout.endswith("ok\n") else done.stdout.rstrip("\n").split("\n")[-1]


def folder_of(at, kind, number_format=None, **how):
    """Write a model; return its arrays."""
    arrays, about = make.make(kind)
    if number_format:
        arrays = make.quantised(arrays, number_format)
    how.setdefault("separate", make.KINDS[kind][4].get("separate", False))
    make.write(at, arrays, how.pop("about", about), **how)
    return arrays


def translate(model, lines, *options):
    return [json.loads(x) for x in run([TRANSLATE, "-m", model, "--raw-ids", "--json", *options], lines).lines]


def sources(n):
    r = random.Random(5)
    return [[r.randrange(3, make.PIECES) for _ in range(1 + i * 3 % 37)] for i in range(n)]


def text(ids):
    return " ".join(map(str, ids))


def compare(model, reference, n=8):
    """Compare scores and searches with NumPy; return the number of searches without a close decision."""
    certain = 0
    lines = sources(n)
    targets = [[*line[::-1][:25], 2] for line in lines]
    found = translate(model, [f"{text(x)}\t{text(y)}" for x, y in zip(lines, targets)], "--score")
    for x, y, got in zip(lines, targets, found):
        logp = reference.score(x, y)
        off = max(abs(a - logp[i, y[i]]) for i, a in enumerate(got["token_logprobs"]))
        assert off < TOLERANCE, (model, x, off)
    for beam in 1, 4:
        found = translate(model, [text(x) for x in lines], "--beam", str(beam), "--nbest", str(beam), "--max-len", "20")
        for x, got in zip(lines, found):
            wanted = reference.beam(x, beam)
            if wanted[0].margin > MARGIN:
                certain += 1
                assert [h["ids"] for h in got["nbest"]] == [h.ids for h in wanted], (x, beam)
    return certain


@numpy_test
def scores_and_searches_match_the_reference():
    for kind in make.KINDS:
        with tempfile.TemporaryDirectory() as at:
            arrays = folder_of(at + "/in", kind)
            problem = convert(at + "/in", at + "/out")
            assert problem is None, (kind, problem)
            certain = compare(at + "/out", make.Reference(arrays, kind))
            assert certain >= 10, (kind, certain)


@numpy_test
def batches_threads_and_instruction_sets_give_the_same_bytes():
    for kind in "argos", "t5":
        with tempfile.TemporaryDirectory() as at:
            folder_of(at + "/in", kind)
            assert convert(at + "/in", at + "/out") is None
            lines, found = [text(x) for x in sources(12)], set()
            for options in (("--batch", "1"), ("--batch", "5", "--threads", "2"), ("--isa", "portable"),
                            ("--isa", "avx2")):
                done = subprocess.run([TRANSLATE, "-m", at + "/out", "--raw-ids", "--json", "--beam", "3", *options],
                                      input="\n".join(lines), capture_output=True, encoding="utf-8")
                if done.returncode != 2 or "isa" not in options[0]:  # 2: this machine lacks the instruction set
                    assert done.returncode == 0, done.stderr
                    found.add(done.stdout)
            assert len(found) == 1, kind


@numpy_test
def number_formats_keep_their_numbers():
    for kind, number_format in (("argos", "int8"), ("marian", "int8"), ("opennmt", "int16"), ("t5", "int8"),
                                ("post", "float16")):
        with tempfile.TemporaryDirectory() as at:
            arrays = folder_of(at + "/in", kind, number_format)
            assert convert(at + "/in", at + "/out") is None
            compare(at + "/out", make.Reference(arrays, kind), 4)
            assert convert(at + "/in", at + "/out", "-") is None
            if number_format == "int8":
                source, tensors = "encoder/layer_0/self_attention/linear_0/weight", moefile.read(at + "/out")[1]
                x = arrays[source].astype(np.float32) * (1 / arrays[source + "_scale"])[:, None]
                assert (tensors["encoder.0.qkv.weight"].array() == x).all(), (kind, "codes")


@numpy_test
def older_versions_give_the_same_model():
    for kind, versions in ("argos", (2, 3, 4, 5, 6)), ("post", (1, 6)):
        made = set()
        for version in versions:
            with tempfile.TemporaryDirectory() as at:
                about = {"about": None} if version < 6 else {}
                folder_of(at + "/in", kind, version=version, vocabulary="txt" if version < 5 else "json", **about)
                assert convert(at + "/in", at + "/out") is None, version
                with open(at + "/out", "rb") as file:
                    made.add(file.read())
        assert len(made) == 1, kind


@numpy_test
def decoder_only_models_have_the_tensors_of_the_published_layout():
    for family, more in (("llama", {}), ("llama", {"rope_scaling": make_decoder.LLAMA_3, "rope_theta": 100.0}),
                         ("qwen2", {}), ("qwen3", {}), ("mistral", {}), ("gemma3_text", {"query_pre_attn_scalar": 12})):
        with tempfile.TemporaryDirectory() as at:
            config, arrays = make_decoder.make(at, family, **more)
            with contextlib.redirect_stderr(io.StringIO()):
                problem = convert_quietly("--from", "hf", at, "-o", at + "/hf.bin", "--type", "f32")
            assert problem is None, (family, problem)
            os.mkdir(at + "/in")
            with open(at + "/in/model.bin", "wb") as file:
                file.write(make.model_bin(make.decoder(config, arrays), spec="TransformerDecoderSpec"))
            about = {"bos_token": "1", "eos_token": "2", "layer_norm_epsilon": config["rms_norm_eps"]}
            for name, value in ("config", about), ("vocabulary", [str(i) for i in range(make_decoder.V)]):
                with open(f"{at}/in/{name}.json", "w", encoding="utf-8") as file:
                    json.dump(value, file)
            done = subprocess.run([CONVERT, "--ids-only", "f32", "-", at + "/in", at + "/out"], capture_output=True,
                                  encoding="utf-8")
            assert done.stdout.endswith("ok\n"), (family, done)
            (a, b), (c, d) = moefile.read(at + "/hf.bin"), moefile.read(at + "/out")
            for name, x in d.items():  # tables of positions depend on the published number of positions
                y = b[name].array() if name in b else None
                n = min(len(x.array()), len(y)) if name.startswith("rotary") else len(y)
                assert (x.array()[:n] == y[:n]).all(), (family, name)
            assert b.keys() == d.keys(), family
            layers = [{k: v for k, v in x.items() if k.startswith(("decoder", "rotary.size"))} for x in (a, c)]
            assert layers[0] == layers[1], family


@numpy_test
def argos_merges_are_stored_for_moses():
    codes = "#version: 0.2\nt h\nth e</w>\na t</w>\nl o</w>\n"
    with tempfile.TemporaryDirectory() as at:
        folder_of(at + "/in/model", "argos", tokeniser=None)
        write = lambda text: [open(at + "/in/bpe.model", "wb").write(text), None][1]
        with open(at + "/in/metadata.json", "w", encoding="utf-8") as file:
            json.dump({"from_code": "en", "to_code": "de"}, file)
        write(codes.encode())
        assert convert(at + "/in", at + "/out") is None
        about = moefile.read_meta(at + "/out")
        assert about["tokenizer.kind"] == "bpe" and about["tokenizer.merges"] == codes.split("\n")[1:-1]
        assert [about["tokenizer." + x] for x in ("bpe_version", "separator", "source_language", "target_language",
                                                  "punctuation")] == ["0.2", "@@", "en", "de", 1]
        done = subprocess.run([TRANSLATE, "-m", at + "/out", "a"], capture_output=True, encoding="utf-8")
        assert done.returncode == 3 and "moses-bpe.py and --pretokenized" in done.stderr
        assert run([TRANSLATE, "-m", at + "/out", "--pretokenized"], ["a b \u2581c"]).lines[0]
        for text, words in ((codes + "a b c\n", "line 6 is not a merge"), (codes + "ab\n", "line 6"), ("", "0 merges"),
                            ("a \xff", "not valid UTF-8")):
            write(text.encode("latin-1"))
            problem = convert(at + "/in", at + "/out")
            assert problem and words in problem, (text, problem)
        try:
            import sacremoses  # noqa: F401
            import subword_nmt  # noqa: F401
        except ImportError:
            print("    encoding not tested: no sacremoses or subword-nmt here")
            return
        moses = [sys.executable, os.path.join(ROOT, "tools", "convert", "moses-bpe.py"), "-m", at + "/out"]
        found = run([*moses, "encode"], ["the \u201ccat\u201d, lo"]).lines
        assert found == ["the &@@ q@@ u@@ o@@ t@@ ; c@@ at , &@@ q@@ u@@ o@@ t@@ ; lo"], found


@numpy_test
def packages_of_argos_translate_by_their_languages():
    metadata = {"package_version": "1.0", "argos_version": "1.9", "from_code": "en", "from_name": "English",
                "to_code": "de", "to_name": "German", "links": []}
    with tempfile.TemporaryDirectory() as at:
        inside = at + "/translate-en_de-1_0"
        folder_of(inside + "/model", "argos", "int8", tokeniser=None)
        with open(inside + "/sentencepiece.model", "wb") as file:
            file.write(make.spm())
        with open(inside + "/metadata.json", "w", encoding="utf-8") as file:
            json.dump(metadata, file)
        for method in zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED:
            with zipfile.ZipFile(at + "/x.argosmodel", "w", method) as archive:
                for folder, _, names in os.walk(inside):
                    for name in names:
                        archive.write(f"{folder}/{name}", os.path.relpath(f"{folder}/{name}", at))
            for path in at + "/x.argosmodel", inside:
                assert convert(path, at + "/out", "-") is None, path
                about = moefile.read_meta(at + "/out")
                assert about["languages.sources"] == ["en"] and about["languages.targets"] == ["de"]
                assert about["decode.length_penalty"] == 0.2 and about["source.eos"] == 0
        env = {**os.environ, "XDG_CACHE_HOME": at + "/cache"}
        found = [subprocess.run([TRANSLATE, "--ids", "-m", path, "4 8 5"], env=env, capture_output=True)
                 for path in (at + "/x.argosmodel", inside, inside + "/")]
        assert all(x.returncode == 0 for x in found), found
        assert [b"converting" in x.stderr for x in found] == [True, True, False], found
        assert len({x.stdout for x in found}) == 1 and found[0].stdout.strip(), found
        for change, words in (({"type": "sbd"}, "type sbd"), ({"from_code": None}, "from_code is missing"),
                              ({"target_prefix": "__de__"}, "target_prefix __de__")):
            with open(inside + "/metadata.json", "w", encoding="utf-8") as file:
                json.dump({**metadata, **change}, file)
            assert words in convert(inside, at + "/out"), change


def edited(name, change):
    def damage(at):
        with open(f"{at}/{name}", "rb") as file:
            data = file.read()
        with open(f"{at}/{name}", "wb") as file:
            file.write(change(data))
    return damage


def with_arrays(**changes):
    """Return a damage that changes variables: None removes one."""
    def damage(at):
        arrays = {**make.make("argos")[0], **{k.replace("__", "/"): x for k, x in changes.items()}}
        with open(at + "/model.bin", "wb") as file:
            file.write(make.model_bin({k: x for k, x in arrays.items() if x is not None}))
    return damage


def settings(**changes):
    return edited("config.json", lambda x: json.dumps({**json.loads(x), **changes}).encode())


def damages():
    scalar, matrix = np.int8(1), np.ones((5, 7), np.float32)
    return [
        (edited("model.bin", lambda x: x[:-1]), "model.bin truncated"),
        (edited("model.bin", lambda x: x[:30]), "model.bin truncated"),
        (edited("model.bin", lambda x: x + b"\0"), "model.bin after the last variable"),
        (edited("model.bin", lambda x: b"\x07" + x[1:]), "version 7 is not supported"),
        (edited("model.bin", lambda x: x.replace(b"TransformerSpec", b"WhisperSpec_Big")), "WhisperSpec_Big expected"),
        (edited("model.bin", lambda x: x.replace(b"linear_1/weight", b"linear_9/weight")), "linear_1 is missing"),
        (with_arrays(decoder__alibi=scalar), "decoder/alibi is 1"),
        (with_arrays(decoder__project_in__weight=matrix), "unexpected tensor decoder/project_in/weight [5, 7]"),
        (with_arrays(encoder__activation=np.int8(4)), "encoder/activation is 4"),
        (with_arrays(encoder__layer_0__self_attention__linear_0__weight=matrix), "linear_0/weight 32 columns"),
        (with_arrays(encoder__layer_1__ffn__linear_1__bias=np.full(32, np.nan, np.float32)), "not finite"),
        (with_arrays(encoder__layer_1__self_attention__rotary_dim=np.int32(0)), "unexpected tensor rotary_dim"),
        (with_arrays(decoder__layer_norm__gamma=None), "unexpected tensor decoder/layer_norm/beta"),
        (with_arrays(decoder__embeddings__weight=None), "decoder/embeddings/weight is missing"),
        (lambda at: os.unlink(at + "/shared_vocabulary.json"), "shared_vocabulary.json are missing"),
        (lambda at: os.unlink(at + "/sentencepiece.model"), "no tokeniser"),
        (edited("sentencepiece.model", lambda x: x[:40]), "sentencepiece.model damaged"),
        (edited("shared_vocabulary.json", lambda x: b"[]"), "shared_vocabulary.json no tokens"),
        (edited("shared_vocabulary.json", lambda x: x.replace(b'"a"', b'1', 1)), "not a list of tokens"),
        (edited("shared_vocabulary.json", lambda x: json.dumps([f"x{i}" for i in range(60)]).encode()), "is missing"),
        (edited("shared_vocabulary.json", lambda x: json.dumps([*json.loads(x), "b", "c"]).encode()), "62 tokens"),
        (edited("config.json", lambda x: b"{"), "config.json not valid JSON"),
        (settings(quantization_type=1), "AWQ"), (settings(eos_token="<end>"), "end token"),
        (settings(layer_norm_epsilon="x"), "layer_norm_epsilon")]


@numpy_test
def damaged_models_are_rejected_by_file_and_problem():
    for number, (damage, words) in enumerate(damages()):
        with tempfile.TemporaryDirectory() as at:
            folder_of(at + "/in", "argos")
            damage(at + "/in")
            problem = convert(at + "/in", at + "/out")
            missing = [x for x in words.split(" ") if x not in (problem or "")]
            assert problem and not missing and not os.path.exists(at + "/out"), (number, words, problem)


@numpy_test
def random_damage_gives_errors_or_valid_models():
    accepted = 0
    for kind, number_format in ("argos", "int8"), ("t5", None), ("opennmt", "int16"):
        r = random.Random(kind)
        for number in range(cases):
            with tempfile.TemporaryDirectory() as at:
                folder_of(at + "/in", kind, number_format)
                path = at + "/in/" + r.choice(sorted(os.listdir(at + "/in")) + ["model.bin"] * 3)
                with open(path, "rb") as file:
                    data = bytearray(file.read())
                heads = [i for i in range(len(data) - 8) if data[i:i + 6] in (b"coder/", b"_scale")] or [0]
                for _ in range(r.choice((1, 1, 3))):
                    at_byte = min(r.choice(heads) + r.randrange(-6, 60), len(data) - 1)
                    data[max(at_byte, 0)] = r.choice((0, 1, 255, r.randrange(256)))
                with open(path, "wb") as file:
                    file.write(data[:r.choice((len(data), len(data), r.randrange(len(data))))])
                problem = convert(at + "/in", at + "/out", "-")
                if problem is None:
                    accepted += 1
                    assert subprocess.run([INFO, at + "/out"], capture_output=True).returncode == 0, (kind, number)
                else:
                    assert not os.path.exists(at + "/out") and len(problem) < 300, (kind, number, problem)
    print(f"    accepted {accepted} of {3 * cases}")


@numpy_test
def damaged_archives_are_rejected():
    with tempfile.TemporaryDirectory() as at:
        folder_of(at + "/in/model", "argos", tokeniser=None)
        with zipfile.ZipFile(at + "/x.argosmodel", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/metadata.json", '{"from_code": "en", "to_code": "de"}')
            archive.writestr("a/sentencepiece.model", make.spm())
            for name in os.listdir(at + "/in/model"):
                archive.write(f"{at}/in/model/{name}", "a/model/" + name)
        with open(at + "/x.argosmodel", "rb") as file:
            whole = file.read()
        assert convert(at + "/x.argosmodel", at + "/good") is None
        r = random.Random(3)
        for number in range(2 * cases):
            data = bytearray(whole)
            if number % 2:
                del data[r.randrange(len(data)):]
            else:
                for i in range(3):
                    data[r.randrange(len(data) - 600, len(data)) if i else r.randrange(4, len(data))] = r.randrange(256)
            with open(at + "/x.argosmodel", "wb") as file:
                file.write(data)
            problem = convert(at + "/x.argosmodel", at + "/out")
            if problem is None:
                os.unlink(at + "/out")
            else:
                assert not os.path.exists(at + "/out") and len(problem) < 300, (number, problem)


@numpy_test
def convert_py_names_the_programs_that_read_these_models():
    with tempfile.TemporaryDirectory() as at:
        folder_of(at + "/in", "argos")
        problem = convert_quietly(at + "/in", "-o", at + "/out")
        assert problem and "moe-translate -m" in problem and "CTranslate2" in problem, problem


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    parser.add_argument("--cases", type=int, default=cases)
    given = parser.parse_args()
    cases = given.cases
    sys.exit(test.run(given.only))
