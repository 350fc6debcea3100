#!/usr/bin/env python3
"""Test the model files written by Python: version 2, with a checksum per expert, identical to those of moe.c.

Usage: tests/python tests/convert/test_file.py [WORD]      WORD: run tests with matching names

tests/golden/model-tensors.json lists the type and SHA-256 of each tensor in the shipped models. The values are
those of the models' version 1 files, which `moe-quantize` converted.
"""
import hashlib
import json
import os
import sys
import tempfile

from converting import BIN, ROOT, convert_quietly, run
from suite import Suite

GOLDEN, MODELS = os.path.join(ROOT, "tests", "golden"), os.path.join(ROOT, "models")
INFO, QUANTIZE = (os.path.join(BIN, name) for name in ("moe-info", "moe-quantize"))
TYPES = {"digits.bin": ["q8"], "en-de-fr-es.bin": ["q8", "--experts", "q4"], "lm-en.bin": ["q8"]}
try:
    import moefile
except ImportError:
    moefile = None
test = Suite()
numpy_test = test.needs(moefile, "NumPy")


def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


def version_of(path):
    return int.from_bytes(bytes_of(path)[8:12], "little")


@numpy_test
def python_and_the_engine_write_the_same_bytes():
    old = ["model-base.bin", "model-both.bin", "model-hierarchy-topk.bin", "model-language.bin", "model-deep.bin"]
    with tempfile.TemporaryDirectory() as folder:
        ours, engine = os.path.join(folder, "ours"), os.path.join(folder, "engine")
        for name in old:
            path = os.path.join(GOLDEN, name)
            assert version_of(path) == 1, name
            meta, tensors = moefile.read(path)
            types = {t.type for t in tensors.values() if t.layout == moefile.EXPERTS or t.type != moefile.F32}
            kind = {number: word for word, number in moefile.TYPES.items()}[max(types, default=moefile.F32)]
            run([QUANTIZE, path, engine, kind])
            moefile.write_model(ours, *moefile.read(engine))
            assert version_of(ours) == 2 and bytes_of(ours) == bytes_of(engine), name
            if bytes_of(engine) and all(moefile.read(engine)[1][x].type == tensors[x].type for x in tensors):
                moefile.write_model(ours, meta, tensors)
                assert bytes_of(ours) == bytes_of(engine), name


@numpy_test
def experts_in_3_and_2_bits_need_version_3():
    with tempfile.TemporaryDirectory() as folder:
        ours, engine = os.path.join(folder, "ours"), os.path.join(folder, "engine")
        meta, tensors = moefile.read(os.path.join(GOLDEN, "model-base.bin"))
        for kind in "q3", "q2":
            run([QUANTIZE, os.path.join(GOLDEN, "model-base.bin"), engine, "f32", "--experts", kind])
            written = moefile.read(engine)
            encoded = {name: moefile.Tensor.encode(t.array(), moefile.TYPES[kind] if t.layout else moefile.F32)
                       for name, t in tensors.items()}
            assert any(t.layout for t in encoded.values())
            moefile.write_model(ours, written[0], encoded)
            assert version_of(ours) == 3 and bytes_of(ours) == bytes_of(engine), kind
            with open(ours, "r+b") as file:
                file.seek(8)
                file.write(bytes([2]))
            try:
                moefile.read(ours)
            except moefile.FormatError as error:
                assert "version 2 does not match" in str(error), error
            else:
                raise AssertionError("version 2 with " + kind)


@numpy_test
def mixtures_with_their_own_type_have_the_same_bytes():
    with tempfile.TemporaryDirectory() as folder:
        ours, engine = os.path.join(folder, "ours"), os.path.join(folder, "engine")
        golden = os.path.join(GOLDEN, "model-base.bin")
        tensors = moefile.read(golden)[1]
        types = dict(zip((name for name, t in tensors.items() if t.layout), ("q2", "q3", "q4", "q8")))
        assert len(types) > 1
        run([QUANTIZE, golden, engine, "f32", "--types", ",".join(
            f"{name.removesuffix('.experts')}={kind}" for name, kind in types.items())])
        moefile.write_model(ours, moefile.read(engine)[0], {
            name: moefile.Tensor.encode(t.array(), moefile.TYPES[types.get(name, "f32")]) for name, t in tensors.items()})
        assert version_of(ours) == 3 and bytes_of(ours) == bytes_of(engine)


@numpy_test
def a_damaged_expert_is_named():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "m")
        meta, tensors = moefile.read(os.path.join(GOLDEN, "model-base.bin"))
        moefile.write_model(path, meta, tensors)
        data = bytearray(bytes_of(path))
        name, t = next((name, t) for name, t in tensors.items() if t.layout == moefile.EXPERTS)
        at = bytes(data).index(t.data) + len(t.data) // t.dims[0] * 2  # first byte of the third expert
        data[at] ^= 1
        with open(path, "wb") as file:
            file.write(data)
        message = ""
        try:
            moefile.read(path)
        except moefile.FormatError as error:
            message = str(error)
        assert message == f"{name}: checksum mismatch in expert 2", message
        assert "expert 2" in run([INFO, "--check", path], status=3).stderr


@numpy_test
def shipped_models_have_version_2_and_the_original_weights():
    with open(os.path.join(GOLDEN, "model-tensors.json"), encoding="utf-8") as file:
        known = json.load(file)
    shipped = sorted(name for name in os.listdir(MODELS) if name.endswith(".bin"))
    assert shipped == sorted(known) == sorted(TYPES), shipped
    for name in shipped:
        path = os.path.join(MODELS, name)
        assert version_of(path) == 2, name
        tensors = moefile.read(path)[1]
        sums = {x: hashlib.sha256(bytes([t.type]) + t.data).hexdigest()[:32] for x, t in tensors.items()}
        assert sums == known[name], f"{name}: {[x for x in sums if sums[x] != known[name].get(x)]}"


@numpy_test
def requantising_to_the_same_types_copies_the_file():
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "copy")
        for name, types in TYPES.items():
            run([QUANTIZE, os.path.join(MODELS, name), copy, *types])
            assert bytes_of(copy) == bytes_of(os.path.join(MODELS, name)), name


@numpy_test
def finetuned_models_keep_licence_and_defaults():
    try:
        import torch  # noqa: F401
    except ImportError:
        return
    path = os.path.join(MODELS, "en-de-fr-es.bin")
    before = moefile.read_meta(path)
    with tempfile.TemporaryDirectory() as folder:
        start, spm, out = (os.path.join(folder, x) for x in ("start.pt", "spm", "out.bin"))
        assert convert_quietly(path, "--back", "--spm", spm, "-o", start) is None
        complaint = convert_quietly(start, "--like", path, "--name", "mine", "--type", "q8", "--experts", "q4",
                                    "-o", out)
        assert complaint is None, complaint
        after = moefile.read_meta(out)
        for key in ("general.licence", "general.attribution", "decode.beam", "decode.rerank", "tokenizer.model"):
            assert before[key] and after[key] == before[key], key
        assert after["general.name"] == "mine" and "golden.source" not in after
        assert {t.type for t in moefile.read(out)[1].values()} == {t.type for t in moefile.read(path)[1].values()}


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
