#!/usr/bin/env python3
"""Test which layout convert.py guesses, its messages for other paths, and that
the programs recommend only conversions that it supports.

Usage: tests/python tests/convert/test_layouts.py [--only NAME]
"""
import argparse
import os
import subprocess
import sys
import tempfile
from unittest import mock

from converting import ROOT, TRANSLATE, convert_quietly, run
from suite import Suite

try:
    import decoder
    import gguf_file
    import hf
    import layouts
    import make_decoder
    import make_gguf
    import make_marian
    import numpy as np
    import prompts
    import test_damage
except ImportError:
    np = None
test = Suite()
numpy_test = test.needs(np, "NumPy or gguf")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def write(path, data=b"x"):
    with open(path, "wb") as file:
        file.write(data)


@numpy_test
def layouts_are_guessed_from_the_files():
    for kind, make in test_damage.KINDS.items():
        with tempfile.TemporaryDirectory() as at:
            command = make(at)
            if kind == "model file":
                continue
            layout = command.pop(command.index("--from") + 1) if "--from" in command else "moe"
            given = [x for x in command if x != "--from"]
            assert layouts.guess(given[0]) == (layout, given[0]), (kind, layouts.guess(given[0]))
            assert convert_quietly(*given, "-o", at + "/out") is None, kind
    for layout in "npz", "float32", "intgemm8":
        with tempfile.TemporaryDirectory() as at:
            make_marian.make(at, "student", layout)
            model = next(x for x in os.listdir(at) if x.endswith((".npz", ".bin")) and not x.startswith("lex"))
            for given in at, os.path.join(at, model):
                assert layouts.guess(given) == ("marian", given), given
    for pieces in 0, 9:
        with tempfile.TemporaryDirectory() as at:
            config = make_decoder.CONFIGS["llama"]
            make_gguf.write(at + "/x.gguf", config, make_decoder.arrays_of(config, 1), pieces=pieces)
            first = sorted(os.listdir(at))[0]
            assert layouts.guess(at) == ("gguf", os.path.join(at, first))
            for name in os.listdir(at):
                assert layouts.guess(os.path.join(at, name))[0] == "gguf"


@numpy_test
def supported_kinds_of_rope_are_converted():
    for family, key, rope in (("llama", "rope_parameters", make_decoder.LLAMA_3),
                              ("llama", "rope_scaling", make_decoder.LLAMA_3),
                              ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 100.0})):
        with tempfile.TemporaryDirectory() as at:
            make_decoder.make(at, family, **{key: rope})
            assert convert_quietly("--from", "hf", at, "-o", at + "/out") is None, (family, key, rope)


def folder(*names, **data):
    """Return a function that writes files to a folder and returns the folder's path, or that of the only file."""
    def make(at):
        for name in names:
            write(os.path.join(at, name), data.get("data", b"x"))
        return os.path.join(at, names[0]) if data.get("file") else at
    return make


@numpy_test
def other_paths_get_a_helpful_message():
    with open(os.path.join(ROOT, "models", "en-de-fr-es.bin"), "rb") as file:
        model = file.read(64)
    cases = ((folder(), (), "the folder is empty"), (folder(), ("--from", "hf"), "the folder is empty"),
             (folder("README.md"), (), "no checkpoint in this folder"),
             (folder("README.md"), ("--from", "hf"), "config.json is missing"),
             (folder("README.md"), ("--from", "gguf"), "contains no GGUF file"),
             (folder("model.safetensors"), (), "config.json is missing: copy the model's whole folder"),
             (folder("a.gguf", "b.gguf"), (), "several GGUF files: name one of a.gguf, b.gguf"),
             (folder("missing", file=True, data=b""), (), "not a checkpoint of any supported format"),
             (folder("config.json", file=True), (), "name its folder"),
             (folder("model-00001-of-00002.safetensors", file=True), (), "name its folder"),
             (folder("tokenizer.json", file=True), (), "name its folder"),
             (folder("decoder.yml", file=True, data=b"models:\n"), (), "of a Marian model: name its folder"),
             (folder("model.yml", file=True, data=b"dim-emb: 1\n# " + b"x" * 99), ("--from", "marian"), "not a Marian model"),
             (folder("x.gguf", file=True, data=b"<page>"), (), "GGUF files start with GGUF"),
             (folder("x.bin", file=True, data=model), (), "is already a model file"),
             (folder("x.pt", file=True, data=b"PK\3\4" * 9), (), "truncated or damaged zip file"),
             (folder("config.json", data=b'{"model_type": "bert"}'), (), "model_type 'bert' is not supported: expected"),
             (folder("config.json", data=b"{}"), ("--from", "hf"), "model_type None is not supported: expected"),
             *((folder(name, file=file, data=POINTER), options, "Git LFS pointer") for name, file, options in (
                 ("x.gguf", True, ()), ("config.json", False, ()), ("x.pt", True, ("--from", "moe")),
                 ("x.npz", True, ("--from", "marian")), ("x.gguf", False, ()))))
    for make, options, wanted in cases:
        with tempfile.TemporaryDirectory() as at:
            path = make(at)
            complaint = convert_quietly(path, *options, "-o", at + "/out")
            assert complaint and wanted in complaint and at in complaint, (wanted, complaint)
            assert complaint.count(at) <= 2 and "Errno" not in complaint and "\n" not in complaint, complaint
    assert "no such file or folder" in convert_quietly("/tmp/no-such-checkpoint", "-o", "/tmp/out")
    for name in "model.safetensors", "tokenizer.json", "generation_config.json":
        with tempfile.TemporaryDirectory() as at:
            make_decoder.make(at, "llama", vocab_size=448)
            make_decoder.write_tokeniser(at, "smollm")
            write(os.path.join(at, name), POINTER)
            complaint = convert_quietly(at, "-o", at + "/out")
            assert f"{name}: a Git LFS pointer, not the file itself" in complaint, complaint


@numpy_test
def lists_of_families_are_complete():
    families = [*hf.FAMILIES, *decoder.FAMILIES]
    text = " ".join(subprocess.run([sys.executable, os.path.join(ROOT, "tools", "convert", "convert.py"), "--help"],
                                   capture_output=True, text=True, check=True,
                                   env={**os.environ, "COLUMNS": "9999"}).stdout.split())
    for name in {*families, *gguf_file.FAMILIES} - {"nllb_moe"}:
        assert name in text, name
    assert set(hf.FAMILIES) == set(decoder.ROWS["PYTHON"][0][0].split())
    with tempfile.TemporaryDirectory() as at:
        write(at + "/config.json", b'{"model_type": "bert"}')
        complaint = convert_quietly("--from", "hf", at, "-o", at + "/out")
        said = run([TRANSLATE, "-m", at, "Hello."], status=3).stderr
        for name in families:
            assert name in complaint, (name, complaint)
            assert name.removesuffix("_text") in said, (name, said)


@numpy_test
def programs_advise_conversions_that_are_supported():
    def said(path):
        return run([TRANSLATE, "-m", path, "Hello."], status=3).stderr

    def header(**keys):
        values = b"".join(len(key).to_bytes(8, "little") + key.encode() + (8).to_bytes(4, "little")
                          + len(value).to_bytes(8, "little") + value.encode() for key, value in keys.items())
        return b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + len(keys).to_bytes(8, "little") + values
    with tempfile.TemporaryDirectory() as at:
        write(at + "/model.safetensors")
        for family, advised in [*dict.fromkeys([*hf.FAMILIES, *decoder.FAMILIES], True).items(), ("gemma2", False),
                                ("phi3", False), ("bart", False)]:
            write(at + "/config.json", f'{{"a": [{{"model_type": "x"}}], "model_type": "{family}"}}'.encode())
            if family in decoder.FAMILIES:  # converted by the programs themselves
                outer = f"{family}_text" in decoder.FAMILIES
                wanted = "text_config is null" if outer else "hidden_size is missing"
                assert f"config.json: {wanted}" in said(at), said(at)
                continue
            assert ("convert it first" in said(at)) == advised, said(at)
            assert advised or f"model_type '{family}': expected " in said(at), said(at)
    keys = "general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"
    for key, values in zip(keys, (gguf_file.FAMILIES, ["gpt2", "llama"], gguf_file.PRE)):
        fine = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
        with tempfile.TemporaryDirectory() as at:
            for value, advised in [*dict.fromkeys(values, True).items(), ("other", False), ("", False), ("llam", False)]:
                write(at + "/x.gguf", header(**{**fine, key: value}) + bytes(99))
                read = advised or key != keys[0]  # otherwise the message names the architecture
                assert ("block_count is missing" in said(at + "/x.gguf")) == read, (key, value, said(at + "/x.gguf"))
                assert "convert it first" not in said(at + "/x.gguf")


@numpy_test
def missing_modules_are_reported_by_needs():
    """needs.py restarts a Python without gguf or jinja2 with that of .venv, or names the command that creates it."""
    script = os.path.join(ROOT, "tools", "convert", "convert.py")
    with tempfile.TemporaryDirectory() as at:
        config = make_decoder.CONFIGS["llama"]
        make_gguf.write(at + "/x.gguf", config, make_decoder.arrays_of(config, 1), {"token_embd.weight": "Q8_0"})
        write(at + "/gguf.py", b"raise ModuleNotFoundError('none', name='gguf')")
        found = subprocess.run([sys.executable, script, at + "/x.gguf", "-o", at + "/out"], capture_output=True,
                               text=True, env={**os.environ, "PYTHONPATH": at})
        assert "missing Python module gguf" in found.stderr and "install-deps --convert" in found.stderr, found
        answer = mock.Mock(stdout=b'{"missing": true, "error": "none"}')
        with mock.patch.object(prompts.subprocess, "run", return_value=answer):
            try:
                prompts.render("", {}, "x")
            except ModuleNotFoundError as error:
                assert error.name == "jinja2"
            else:
                raise AssertionError("rendered")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
