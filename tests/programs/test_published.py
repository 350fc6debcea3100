#!/usr/bin/env python3
"""Test published models as -m: a folder of Firefox, with and without .gz, a folder
in Hugging Face's layout, a GGUF file. They are converted once, into the cache.

Usage: tests/python tests/programs/test_published.py [--only NAME]
"""
import argparse
import contextlib
import gzip
import os
import signal
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "convert"))

from converting import TRANSLATE, BIN  # noqa: E402
from suite import Suite  # noqa: E402

try:
    import gguf  # noqa: F401
    import numpy as np

    import make_decoder as make
    import make_gguf
    import make_marian
    import test_marian
except ImportError:
    gguf = None
test = Suite()
numpy_test = test.needs(gguf, "NumPy or gguf")
INFO = os.path.join(BIN, "moe-info")
BEGIN = "converting "


@contextlib.contextmanager
def home():
    """Yield a folder, and the environment of a user whose cache and temporary files are there."""
    with tempfile.TemporaryDirectory() as at:
        os.mkdir(at + "/tmp")
        yield at, {**os.environ, "XDG_CACHE_HOME": at + "/cache", "XDG_DATA_HOME": at + "/data", "TMPDIR": at + "/tmp",
                   "HOME": at}


def info(path, environment, *options, status=0):
    """Run moe-info, which opens a model; return (standard output, standard error)."""
    done = subprocess.run([INFO, *options, path], capture_output=True, encoding="utf-8", env=environment, timeout=120)
    assert done.returncode == status, (path, done)
    return done.stdout, done.stderr


def translate(path, environment, *options, text="1 2 3\n", status=0):
    done = subprocess.run([TRANSLATE, "-m", path, "--ids", *options], input=text, capture_output=True, encoding="utf-8",
                          env=environment, timeout=120)
    assert done.returncode == status, (path, done)
    return done.stdout, done.stderr


def files_in(folder):
    return sorted(os.path.join(at, name)[len(folder):] for at, _, names in os.walk(folder) for name in names)


def write_marian(at, packed=False):
    os.mkdir(at)
    make_marian.make(at, "student", "intgemm8")
    test_marian.write_spm(at + "/vocab.enpt.spm", make_marian.SIZES["student"][1] if "student" in make_marian.SIZES
                          else make_marian.TOKENS)
    for name in os.listdir(at):
        if name.endswith("vocab.yml"):
            os.unlink(f"{at}/{name}")
        elif packed:
            with open(f"{at}/{name}", "rb") as file, gzip.open(f"{at}/{name}.gz", "wb") as out:
                out.write(file.read())
            os.unlink(f"{at}/{name}")


def write_hub(at, **changes):
    os.makedirs(at, exist_ok=True)
    make.make(at, "llama", vocab_size=448, **changes)
    make.write_tokeniser(at)


def write_gguf(at):
    with tempfile.TemporaryDirectory() as folder:
        config, arrays = make.make(folder, "llama", vocab_size=448)
        make_gguf.write(at, config, {name: x.astype(np.float32) for name, x in arrays.items()}, tokens=True)


# ---- Opening ---------------------------------------------------------------------------------------------------------

@numpy_test
def published_models_are_converted_once():
    for name, write in (("folder", write_hub), ("x.gguf", write_gguf), ("enpt", write_marian),
                        ("packed", lambda at: write_marian(at, True))):
        with home() as (at, environment):
            path = f"{at}/{name}"
            write(path)
            first, notes = translate(path, environment)
            assert first and notes.count(BEGIN) == 1 and path in notes and at + "/cache/moe/files" in notes, notes
            found = files_in(at + "/cache")
            assert len(found) == 1 and f"/{name}-" in found[0], found
            again, notes = translate(path, environment)
            assert again == first and BEGIN not in notes, notes
            assert translate(at + "/cache" + found[0], environment)[0] == first
            assert not os.listdir(at + "/tmp")


@numpy_test
def a_changed_source_is_converted_again():
    with home() as (at, environment):
        path = at + "/model"
        write_hub(path)
        first, notes = info(path, environment, "--json")
        old = files_in(at + "/cache")
        os.utime(path + "/model.safetensors", ns=(1, 1))
        assert BEGIN in info(path, environment)[1] and files_in(at + "/cache") != old
        write_hub(path, seed=7)
        assert BEGIN in info(path, environment)[1]
        old = files_in(at + "/cache")
        assert len(old) == 1, old
        with open(path + "/generation_config.json", encoding="utf-8") as file:  # the same size and time
            text = file.read()
        before = os.stat(path + "/generation_config.json")
        with open(path + "/generation_config.json", "w", encoding="utf-8") as file:
            file.write(text.replace("0.7", "0.8"))
        os.utime(path + "/generation_config.json", ns=(before.st_atime_ns, before.st_mtime_ns))
        assert "0.8" in info(path, environment, "--json")[0] and "0.7" in first
        with open(path + "/notes.txt", "w", encoding="utf-8") as file:
            file.write("not a part of the model")
        assert BEGIN not in info(path, environment)[1]
        os.symlink(path, at + "/link")
        assert BEGIN not in info(at + "/link", environment)[1]
        os.rename(path, at + "/other")
        assert BEGIN in info(at + "/other", environment)[1]


@numpy_test
def a_damaged_conversion_is_made_again():
    with home() as (at, environment):
        path = at + "/x.gguf"
        write_gguf(path)
        first, _ = translate(path, environment)
        (name,) = files_in(at + "/cache")
        with open(at + "/cache" + name, "rb") as file:
            whole = file.read()
        for damaged in whole[:-70] + bytes(70), whole[:len(whole) // 2], b"", whole[::-1]:
            with open(at + "/cache" + name, "wb") as file:
                file.write(damaged)
            again, notes = translate(path, environment)
            assert again == first and BEGIN in notes and files_in(at + "/cache") == [name], notes
            assert BEGIN not in translate(path, environment)[1]


@numpy_test
def no_cache_leaves_nothing_behind():
    for name, write in ("folder", write_hub), ("x.gguf", write_gguf), ("enpt", write_marian):
        with home() as (at, environment):
            path = f"{at}/{name}"
            write(path)
            wanted, _ = translate(path, environment)
            kept = files_in(at + "/cache")
            found, notes = translate(path, environment, "--no-cache")
            assert found == wanted and "for this run" in notes and at + "/tmp" in notes, notes
            assert files_in(at + "/cache") == kept and not os.listdir(at + "/tmp")
            os.chmod(at + "/tmp", 0o500)
            if os.getuid():
                assert "--no-cache" not in translate(path, environment, "--no-cache", status=3)[1]


@numpy_test
def every_program_has_the_option():
    """Programs that open models. Those for other kinds of models refuse this one, after its conversion."""
    with home() as (at, environment):
        path = at + "/model"
        write_hub(path)
        for name, arguments, status in (("moe-info", [path], 0), ("moe-quantize", [path, at + "/out.bin", "q8"], 0),
                                        ("moe-score", ["-m", path, "--ids"], 2),
                                        ("moe-classify", ["-m", path, "/dev/null"], 2),
                                        ("moe-align", ["-m", path, "--ids", "-s", "en", "-t", "de"], 2),
                                        ("moe-calibrate", ["--ids", "-m", path, "-o", at + "/out.bin", "--text",
                                                           "/dev/null"], None),
                                        ("moe-prune", ["--experts", "/dev/null", "-m", path, "-o", at + "/out.bin"],
                                         None),
                                        ("moe-documents", ["-m", path, "-t", "de", "/dev/null", "-f", "text"], None)):
            done = subprocess.run([os.path.join(BIN, name), "--no-cache", *arguments], capture_output=True, text=True,
                                  env=environment, timeout=60, stdin=subprocess.DEVNULL)
            assert status in (None, done.returncode), done
            assert BEGIN in done.stderr and "for this run" in done.stderr, done
            assert not os.path.exists(at + "/cache") and not os.listdir(at + "/tmp"), name
        server = subprocess.Popen([os.path.join(BIN, "moe-server"), "--no-cache", "-m", path, "--port", "0"],
                                  stderr=subprocess.PIPE, env=environment, text=True)
        while "for this run" not in server.stderr.readline():
            assert server.poll() is None
        server.terminate()
        server.communicate(timeout=60)
        assert not os.path.exists(at + "/cache") and not os.listdir(at + "/tmp")


@numpy_test
def a_larger_conversion_is_announced_with_both_sizes():
    with home() as (at, environment):
        with tempfile.TemporaryDirectory() as folder:
            config, arrays = make.make(folder, "llama", hidden_size=64, head_dim=16, intermediate_size=96,
                                       num_attention_heads=4, vocab_size=4096)
            tensors = {name: x.astype(np.float32) for name, x in arrays.items()}
            kinds = {name: "Q4_0" for name, x in make_gguf.arrays_of(config, tensors).items() if x.ndim > 1}
            make_gguf.write(at + "/x.gguf", config, tensors, kinds, tokens=True)
        _, notes = info(at + "/x.gguf", environment)
        assert "larger than the published" in notes, notes


# ---- Errors ----------------------------------------------------------------------------------------------------------

@numpy_test
def damaged_and_unsupported_models_are_named():
    with home() as (at, environment):
        write_hub(at + "/model")
        with open(at + "/model/config.json", "r+b") as file:
            file.truncate(100)
        _, notes = info(at + "/model", environment, status=3)
        assert "/model" in notes and "config.json" in notes and "JSON" in notes, notes
        assert files_in(at + "/cache") == []
        write_hub(at + "/m2m")
        with open(at + "/m2m/config.json", "w", encoding="utf-8") as file:
            file.write('{"model_type": "m2m_100"}')
        _, notes = info(at + "/m2m", environment, status=3)
        assert "m2m_100" in notes and "tools/convert/convert.py" in notes, notes
        with open(at + "/x.gguf", "wb") as file:
            file.write(b"GGUF\3\0\0\0")
        _, notes = info(at + "/x.gguf", environment, status=3)
        assert "x.gguf" in notes and "truncated" in notes and notes.count("x.gguf") == 1, notes


@test
def folders_without_a_model_are_named():
    with home() as (at, environment):
        for folder in at, at + "/one":
            os.makedirs(folder, exist_ok=True)
            assert "contains no published model" in translate(folder, environment, status=3)[1]


@numpy_test
def a_cache_that_cannot_be_written_is_named():
    with home() as (at, environment):
        write_hub(at + "/model")
        with open(at + "/cache", "w", encoding="utf-8"):
            pass
        _, notes = info(at + "/model", environment, status=3)
        assert at + "/cache" in notes, notes
        assert translate(at + "/model", environment, "--no-cache")[0]


@numpy_test
def an_interrupted_conversion_continues():
    for number in signal.SIGINT, signal.SIGKILL:
        with home() as (at, environment):
            path = at + "/big"
            os.mkdir(path)
            make.write_zeros(path, {**make.CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 2048,
                                    "num_hidden_layers": 12, "vocab_size": 8000, "head_dim": 64,
                                    "num_attention_heads": 8})
            make.write_tokeniser(path)
            for changed in False, True:
                process = subprocess.Popen([TRANSLATE, "-m", path, "--ids"], stdin=subprocess.DEVNULL,
                                           stderr=subprocess.PIPE, env=environment)
                while BEGIN.encode() not in process.stderr.readline():
                    assert process.poll() is None
                process.send_signal(number)
                process.communicate(timeout=60)
                assert process.returncode != 0, "the conversion was faster than the test"
                left, = files_in(at + "/cache")
                assert left.endswith(".bin.partial"), left
                if changed:
                    os.utime(path + "/model.safetensors", ns=(1, 1))
                assert BEGIN in info(path, environment)[1]
                found, = files_in(at + "/cache")
                assert (found + ".partial" == left) != changed and found.endswith(".bin"), (found, left)
                os.unlink(at + "/cache" + found)
            assert not os.listdir(at + "/tmp")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
