#!/usr/bin/env python3
"""Test interrupted conversions of the C converter: killed, continued, with a
changed source, with a damaged partial file, two at once.

Usage: tests/python tests/convert/test_resume.py [--only NAME] [--kills N]
"""
import argparse
import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time

from converting import ROOT
from suite import Suite

try:
    import numpy as np

    import make_decoder as make
except ImportError:
    np = None
PROGRAM = os.path.join(ROOT, os.environ.get("BUILD", "build"), "convert_here")
SIZES = {"qwen3_moe": {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 8, "num_hidden_layers": 4,
                       "num_attention_heads": 4, "head_dim": 64, "vocab_size": 2000},
         "llama": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4,
                   "head_dim": 64, "vocab_size": 2000}}
test = Suite()
numpy_test = test.needs(np, "NumPy")
kills = 20


def start(path, out, kind="-"):
    return subprocess.Popen([PROGRAM, "--resume", "--ids-only", kind, "-", path, out], stdout=subprocess.PIPE)


def convert(path, out, kind="-"):
    """Convert; return the last line that the program prints."""
    process = start(path, out, kind)
    printed = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 0, (process.returncode, printed)
    return printed.splitlines()[-1]


def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


@contextlib.contextmanager
def model(family="qwen3_moe", **changes):
    """Write a folder; yield it, the path of a conversion, the bytes of a whole one, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as at:
        os.mkdir(at + "/in")
        make.make(at + "/in", family, **SIZES[family], **changes)
        os.mkdir(at + "/out")
        begin = time.monotonic()
        assert convert(at + "/in", at + "/whole") == "ok"
        yield at + "/in", at + "/out/x.bin", bytes_of(at + "/whole"), time.monotonic() - begin


def interrupt(path, out, after, number=signal.SIGKILL):
    """Interrupt a conversion after some seconds. Return 1, or 0 if the file was complete before."""
    process = start(path, out)
    time.sleep(after)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode in (0, -number), process.returncode
    return process.returncode != 0 and not os.path.exists(out)


def begin(path, out, pieces=12):
    """Kill a conversion that has written some pieces, but not all; return the partial file."""
    for _ in range(20):
        process = start(path, out)
        while process.poll() is None and not (os.path.exists(out + ".partial") and
                                              pieces_in(out + ".partial") >= pieces):
            time.sleep(.001)
        process.kill()
        process.communicate()
        if process.returncode < 0:
            return bytes_of(out + ".partial")
        os.unlink(out)
    raise AssertionError("every conversion was faster than the test")


def pieces_in(path):
    """Return the number of checksums in a partial file, which follow its 24 bytes."""
    with open(path, "rb") as file:
        magic, _, _, size = struct.unpack("<8sIIQ", file.read(24).ljust(24, b"\0"))
        if magic != b"moepart\0":  # empty, or complete
            return 0
        return sum(x != 0 for x, in struct.iter_unpack("<I", file.read(size - 24 & ~3))) if size else 0


@numpy_test
def killed_conversions_continue():
    for family, shards in ("qwen3_moe", 3), ("llama", 1):
        with model(family, shards=shards) as (path, out, whole, seconds):
            killed = most = 0
            for seed in range(20 * kills):
                if killed >= kills / 2:
                    break
                if interrupt(path, out, random.Random(seed).random() * 1.2 * seconds):
                    killed += 1
                    assert set(os.listdir(os.path.dirname(out))) <= {"x.bin.partial"}
                    if os.path.exists(out + ".partial"):
                        found = pieces_in(out + ".partial")
                        assert found >= most or not found, (found, most)
                        most = found  # 0: complete but for its name, and begun again
                else:
                    assert bytes_of(out) == whole and os.listdir(os.path.dirname(out)) == ["x.bin"]
                    os.unlink(out)
                    most = 0
            assert killed >= kills / 2, killed
            convert(path, out)
            assert bytes_of(out) == whole and os.listdir(os.path.dirname(out)) == ["x.bin"]


@numpy_test
def signals_leave_what_is_finished():
    with model() as (path, out, whole, seconds):
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
            if interrupt(path, out, seconds / 2, number):
                assert set(os.listdir(os.path.dirname(out))) <= {"x.bin.partial"}
            convert(path, out)
            assert bytes_of(out) == whole
            os.unlink(out)


@numpy_test
def finished_pieces_are_not_converted_again():
    """With unreadable numbers in the tensors that are finished, the conversion succeeds."""
    with model("llama") as (path, out, whole, _):
        begin(path, out)
        most = pieces_in(out + ".partial")
        before = os.stat(path + "/model.safetensors")
        with open(path + "/model.safetensors", "r+b") as file:  # the first tensor in file order: the embedding
            size, = struct.unpack("<Q", file.read(8))
            header = make.json.loads(file.read(size))
            at = 8 + size + header["model.embed_tokens.weight"]["data_offsets"][0]
            file.seek(at)
            kept = file.read(2)
            file.seek(at)
            file.write(b"\xff\x7f")  # NaN
        os.utime(path + "/model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
        assert most and convert(path, out) == "ok" and bytes_of(out) == whole
        os.unlink(out)
        assert "not finite" in convert(path, out) and not os.listdir(os.path.dirname(out))
        assert kept != b"\xff\x7f"


@numpy_test
def another_source_or_other_options_start_anew():
    with model("llama") as (path, out, whole, _):
        begin(path, out)
        convert(path, out, "q8")
        other = bytes_of(out)
        os.unlink(out)
        assert other != whole and convert(path, out, "q8") == "ok" and bytes_of(out) == other
        os.unlink(out)
        begin(path, out)
        make.make(path, "llama", **SIZES["llama"], seed=7)  # the same names, types and sizes
        os.utime(path + "/model.safetensors", ns=(1, 1))
        assert convert(path, out) == "ok"
        again = out + ".again"
        convert(path, again)
        assert bytes_of(out) == bytes_of(again) != whole


@numpy_test
def damaged_partial_files_are_not_believed():
    with model() as (path, out, whole, _):
        partial = begin(path, out)
        os.unlink(out + ".partial")
        r = random.Random(1)
        flipped = bytearray(partial)
        for _ in range(300):
            flipped[r.randrange(24, len(partial))] ^= 1 << r.randrange(8)
        cases = [bytes(flipped), partial[:len(partial) // 2], partial[:30], partial[:10], b"", b"a letter",
                 partial[:24] + b"\xff" * (len(partial) - 24), partial[:24] + bytes(len(partial) - 24),
                 partial + bytes(len(whole)), b"\1" * (2 * len(whole)), whole, whole[:-1]]
        for i, data in enumerate(cases):
            with open(out + ".partial", "wb") as file:
                file.write(data)
            assert convert(path, out) == "ok", i
            assert bytes_of(out) == whole and os.listdir(os.path.dirname(out)) == ["x.bin"], i
            os.unlink(out)
        os.symlink(path + "/config.json", out + ".partial")
        assert "x.bin.partial" in convert(path, out) and not os.path.exists(out)
        assert bytes_of(path + "/config.json").startswith(b"{")
        os.unlink(out + ".partial")
        os.mkdir(out + ".partial")
        assert "x.bin.partial" in convert(path, out) and not os.path.exists(out)


@numpy_test
def failed_conversions_leave_nothing():
    with model("llama") as (path, out, *_):
        begin(path, out)
        with open(path + "/model.safetensors", "r+b") as file:
            file.truncate(1000)
        assert "truncated" in convert(path, out) and not os.listdir(os.path.dirname(out))


@numpy_test
def conversions_at_once_write_one_file():
    with model() as (path, out, whole, seconds):
        for round_ in range(3):
            if round_:
                begin(path, out)
            processes = [start(path, out) for _ in range(4)]
            printed = [p.communicate(timeout=120)[0].decode() for p in processes]
            assert [p.returncode for p in processes] == [0] * 4 and all(x.endswith("ok\n") for x in printed), printed
            assert bytes_of(out) == whole and os.listdir(os.path.dirname(out)) == ["x.bin"]
            assert any("waiting for another process" in x for x in printed), printed
            os.unlink(out)
        first = start(path, out)
        while not os.path.exists(out + ".partial"):
            time.sleep(.001)
        second = start(path, out)
        time.sleep(seconds / 4)
        first.kill()
        assert second.communicate(timeout=120)[0].endswith(b"ok\n") and second.returncode == 0
        first.communicate()
        assert bytes_of(out) == whole and os.listdir(os.path.dirname(out)) == ["x.bin"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    parser.add_argument("--kills", type=int, default=kills, metavar="N")
    options = parser.parse_args()
    kills = options.kills
    sys.exit(test.run(options.only))
