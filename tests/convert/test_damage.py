#!/usr/bin/env python3
"""Test damaged checkpoints: convert.py must reject them in one line, or write a
file that moe-info accepts, with bounded memory and without leftover files.

Usage: tests/python tests/convert/test_damage.py [--cases N] [--seed N]
           [--show N] [--only NAME]

Small checkpoints of every kind are damaged at random: bytes are flipped, cut
off, moved or duplicated, numbers become huge, and values in JSON, pickles and
TensorFlow records change while checksums remain valid. --cases sets the number
of damaged files of each kind (default: MOE_TEST_DAMAGE, else 25; use thousands
in manual runs). Bugs found by such runs have tests of their own. Prints `ok
NAME` or `FAIL NAME` per test.
"""
import argparse
import contextlib
import gzip
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
import zlib

from suite import Suite

try:
    import numpy as np

    import convert
    import gnmt_checkpoints
    import make_marian
    import make_transformers
    import moefile
    import test_hf_tokens
    import torchfile
except ImportError:
    np = None
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
INFO = os.path.join(ROOT, os.environ.get("BIN", "."), "moe-info")
MEMORY, SECONDS = 256 << 20, 10  # limits per case: additional bytes of memory, processor time
test = Suite()
numpy_test = test.needs(np, "NumPy")
arguments = None


# ---- Checkpoints -----------------------------------------------------------------------------------------------------

SMALL = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 40,
         "max_position_embeddings": 8}
TINY = {"nllb": SMALL, "nllb-moe": {**SMALL, "num_experts": 2, "encoder_sparse_step": 1},
        "marian": {**SMALL, "decoder_vocab_size": 40, "pad_token_id": 39, "decoder_start_token_id": 39}}


def write_bytes(path, data):
    with open(path, "wb") as file:
        file.write(data)


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def small_model(pieces):
    """Return the bytes of a SentencePiece model with these pieces."""
    kinds, proto = {"<unk>": 2, "<s>": 3, "</s>": 3}, test_hf_tokens.proto
    return b"".join(proto((1, proto((1, x), (2, -1.0 * i), (3, kinds.get(x, 1)))))
                    for i, x in enumerate(pieces)) + proto((3, proto((1, "identity"), (3, 1))))


def separate(folder):
    """Write a Marian checkpoint with separate source and target ids; return convert.py's arguments."""
    command = hf("marian", "safetensors")(folder)
    make_transformers.make(folder, "marian", **{**TINY["marian"], "vocab_size": 50},
                           share_encoder_decoder_embeddings=False)
    os.rename(folder + "/vocab.json", folder + "/target_vocab.json")
    vocabulary = {x: i for i, x in enumerate(["<unk>", "</s>", ">>de<<", *"zyxwvutsrqponmlkjihgfedcba"])}
    write_bytes(folder + "/vocab.json", json.dumps(vocabulary).encode())
    write_bytes(folder + "/tokenizer_config.json", b'{"separate_vocabs": true}')
    return command


def hf(family, layout):
    def make(folder):
        make_transformers.make(folder, family, layout=layout, **TINY[family])
        letters = [chr(97 + i) for i in range(20)]
        if family == "marian":
            write_bytes(folder + "/source.spm", small_model(["<unk>", "<s>", "</s>", *letters]))
            write_bytes(folder + "/target.spm", small_model(["<unk>", "<s>", "</s>", *letters[::-1]]))
            vocabulary = {x: i for i, x in enumerate(["</s>", "<unk>", ">>de<<", *letters])} | {"<pad>": 39}
            write_bytes(folder + "/vocab.json", json.dumps(vocabulary).encode())
        elif layout != "legacy":
            write_bytes(folder + "/sentencepiece.bpe.model", small_model(["<unk>", "<s>", "</s>", *letters]))
            about = {"additional_special_tokens": ["deu_Latn", "eng_Latn"]}
            write_bytes(folder + "/special_tokens_map.json", json.dumps(about).encode())
        return ["--from", "hf", folder, *["--ids-only"] * (family != "marian" and layout == "legacy")]
    return make


def fairseq(folder):
    config = make_transformers.configs("nllb-moe", **TINY["nllb-moe"])[0]
    make_transformers.write_fairseq(folder + "/m", config)
    return ["--from", "fairseq", folder + "/m", "--ids-only"]


def nvidia(legacy):
    def make(folder):
        r, pieces = np.random.default_rng(1), ["<pad>", "<unk>", "<s>", "<\\s>", "a", "b@@", "c"]
        weights = gnmt_checkpoints.random_nvidia(r, 4, len(pieces), 2)
        checkpoint = gnmt_checkpoints.nvidia_checkpoint(weights, 4, 2, pieces, ["a b", "ab c</w>"])
        gnmt_checkpoints.write_torch(folder + "/m.pt", checkpoint, legacy)
        return [folder + "/m.pt", "--from", "nvidia-gnmt"]
    return make


def tensorflow(folder):
    gnmt_checkpoints.write_bundle(folder + "/m.ckpt", gnmt_checkpoints.random_tf(np.random.default_rng(1), 4, 9, 2))
    write_bytes(folder + "/vocab", "\n".join(f"w{i}" for i in range(6)).encode())
    write_bytes(folder + "/bpe", b"#version: 0.2\na b\n")
    return [folder + "/m.ckpt", "--from", "tf-gnmt", "--vocab", folder + "/vocab", "--bpe", folder + "/bpe"]


def trainer(legacy):
    def make(folder):
        checkpoint = gnmt_checkpoints.random_moe(np.random.default_rng(1), 4, 9)
        gnmt_checkpoints.write_torch(folder + "/m.pt", checkpoint, legacy)
        return [folder + "/m.pt", "--ids-only"]
    return make


def model_file(folder):
    """Write a model file instead of a checkpoint; return ["read", path], which verdict() understands."""
    command = [*hf("nllb-moe", "safetensors")(folder), "--type", "q4", "-o", folder + "/m.bin"]
    assert convert_here(command) == (None, None)
    for name in os.listdir(folder):
        if name != "m.bin":
            os.unlink(os.path.join(folder, name))
    return ["read", folder + "/m.bin"]


KINDS = {"nllb in safetensors": hf("nllb", "safetensors"), "nllb-moe in shards of torch": hf("nllb-moe", "bin-sharded"),
         "nllb-moe in shards": hf("nllb-moe", "safetensors-sharded"), "marian in torch": hf("marian", "bin"),
         "marian, separate": separate, "nllb in old torch": hf("nllb", "legacy"), "fairseq": fairseq,
         "nvidia": nvidia(False), "old nvidia": nvidia(True), "tensorflow": tensorflow, "trainer": trainer(False),
         "old trainer": trainer(True), "model file": model_file}


# ---- Damage ----------------------------------------------------------------------------------------------------------

ODD = [0, 1, 2, 127, 128, 255, 256, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 62) + 1,
       (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
VALUES = [None, True, False, 0, 1, -1, 2, 7, 1 << 20, 1 << 31, 1 << 63, 1 << 64, 10 ** 30, -(1 << 63), 0.0, -0.5,
          1e-300, 1e300, "", "x", "relu", "a" * 300, "\ud800", "\n", [], {}, [0], [[0]], ["x"], {"x": 1}, [None],
          [1e300]]


def damage_bytes(r, data):
    """Return the data after changing, inserting, removing or moving some bytes."""
    data = bytearray(data)
    for _ in range(r.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        places = (r.randrange(len(data)), r.randrange(min(len(data), 400)), max(0, len(data) - 1 - r.randrange(400)))
        at, size = r.choice(places), r.choice((1, 1, 2, 4, 8, 20, 300))
        how = r.randrange(7)
        if how == 0:
            data[at] ^= 1 << r.randrange(8)
        elif how == 1:
            data[at:at + 1] = bytes([r.randrange(256)])
        elif how == 2:
            width = r.choice((1, 2, 4, 8))
            value = r.choice(ODD) & ((1 << 8 * width) - 1)
            data[at:at + width] = value.to_bytes(width, r.choice(("little", "big")))
        elif how == 3:
            del data[at:]
        elif how == 4:
            del data[at:at + size]
        elif how == 5:
            data[at:at] = data[at:at + size] * r.choice((1, 2, 50))
        else:
            other = r.randrange(len(data))
            data[at:at + size] = data[other:other + size]
    return bytes(data)


def damage_value(r, value, depth=0):
    """Return a JSON or pickle value with a random change at some depth."""
    if isinstance(value, (dict, list, tuple)) and value and (depth < 1 or r.random() < 0.8):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = r.choice(keys)
        new = dict(value) if isinstance(value, dict) else list(value)
        how = r.random()
        if how < 0.12:
            del new[key]
        elif how < 0.16 and isinstance(new, dict):
            new[r.choice(("x", "", "shared.weight", "lm_head.weight"))] = new[key]
        else:
            new[key] = damage_value(r, value[key], depth + 1)
        return tuple(new) if isinstance(value, tuple) else new
    if type(value) is int and r.random() < 0.4:
        return value + r.choice((-1, 1, 2, 1000))
    return r.choice(VALUES)


def damage_pickle(r, data):
    """Return a pickle after removing, duplicating or inserting instructions."""
    if r.random() < 0.5:
        return damage_bytes(r, data)
    strange = [b"j\0\0\0\x20", b"r\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", b"X\xff\xff\xff\xff", b"(", b"1", b"0",
               b"2", b"b", b"R", b"\x81", b"Q", b"\x85" * 3000, b"]" * 3000, b"(" * 3000, b"2" * 3000, b"e", b"u", b"s",
               b"a", b"t", b"\x93", b"cos\nsystem\n", b"ctorch\nSize\n", b"\x8a\x14" + b"\x7f" * 20, b"}", b")", b"N",
               b"\x95" + b"\xff" * 8, b"ccollections\nOrderedDict\n)R", b"\x80\x09", b"G" + b"\x7f\xf8" + bytes(6)]
    at = r.randrange(len(data))
    return data[:at] + r.choice(strange) + data[at + r.choice((0, 0, 1, 5)):]


def damage_zip(r, path):
    """Damage the pickle or another entry of a zip archive; its checksums remain valid."""
    with zipfile.ZipFile(path) as z:
        entries = {name: z.read(name) for name in z.namelist()}
    name = next(x for x in entries if x.endswith("data.pkl")) if r.random() < 0.8 else r.choice(list(entries))
    change = damage_pickle if name.endswith("data.pkl") else damage_bytes
    entries[name] = change(r, entries[name])
    with zipfile.ZipFile(path, "w", r.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))) as z:
        for name, data in entries.items():
            z.writestr(name, data)


def damage_header(r, path):
    """Change the header of a safetensors file, keeping it well-formed."""
    data = read_bytes(path)
    length = struct.unpack("<Q", data[:8])[0]
    head = json.dumps(damage_value(r, json.loads(data[8:8 + length]), r.choice((0, 0, 1)))).encode()
    write_bytes(path, struct.pack("<Q", len(head)) + head + data[8 + length:])


def damage_bundle(r, folder):
    """Damage records in the index of a TensorFlow checkpoint; the checksums remain valid."""
    def change(records):
        records = list(records)
        for _ in range(r.choice((1, 1, 3))):
            at = r.randrange(len(records))
            key, value = records[at]
            records[at] = (key, damage_bytes(r, value)) if r.random() < 0.9 else (damage_bytes(r, key), value)
        return records
    gnmt_checkpoints.write_bundle(folder + "/m.ckpt", gnmt_checkpoints.random_tf(np.random.default_rng(1), 4, 9, 2),
                                  change=change)


def damage_objects(r, folder, legacy):
    """Write a checkpoint of this project's trainer with a damaged config or damaged shapes."""
    checkpoint = gnmt_checkpoints.random_moe(np.random.default_rng(1), 4, 9)
    if r.random() < 0.8:
        checkpoint["config"] = damage_value(r, checkpoint["config"])
    else:
        weights = checkpoint["weights"]
        name = r.choice(list(weights))
        x = weights[name]
        weights[name] = r.choice((x[:-1], x[None], x.astype(np.float64), x * np.float32(1e38), x * np.float32(1e-38),
                                  x[:0], np.full_like(x, np.inf), x.astype(np.int64), 5, None))
    try:
        gnmt_checkpoints.write_torch(folder + "/m.pt", checkpoint, legacy)
    except (UnicodeEncodeError, KeyError, struct.error, OverflowError):  # the writer does not support this value
        write_bytes(folder + "/m.pt", b"")


def damage(r, kind, folder):
    """Damage one random file of a checkpoint's folder."""
    files = sorted(os.listdir(folder))
    path = os.path.join(folder, r.choice(files))
    if kind == "model file" and r.random() < 0.7:
        data = read_bytes(path)
        size = struct.unpack("<Q", data[16:24])[0]
        data = data[:16] + damage_bytes(r, data[16:size]) + data[size:]
        write_bytes(path, data[:12] + struct.pack("<I", zlib.crc32(data[16:size])) + data[16:])
    elif kind == "tensorflow" and r.random() < 0.5:
        damage_bundle(r, folder)
    elif "trainer" in kind and r.random() < 0.6:
        damage_objects(r, folder, "old" in kind)
    elif path.endswith(".json") and r.random() < 0.8:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        write_bytes(path, json.dumps(damage_value(r, value)).encode())
    elif path.endswith(".safetensors") and r.random() < 0.6:
        damage_header(r, path)
    elif read_bytes(path)[:2] == b"PK" and r.random() < 0.7:
        damage_zip(r, path)
    else:
        write_bytes(path, damage_bytes(r, read_bytes(path)))


# ---- One case --------------------------------------------------------------------------------------------------------

def convert_here(command):
    """Run convert.py in this process; return (its error message or None, a traceback or None)."""
    argv, printed = sys.argv, io.StringIO()
    sys.argv = ["convert.py", *command]
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            convert.main()
        return None, None
    except SystemExit as stop:
        return str(stop.code), None
    except BaseException:  # noqa: BLE001 - any exception is a failure
        return None, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.argv = argv


def verdict(command, out):
    """Convert a damaged checkpoint; return a description of the bug found, or ""."""
    if command[0] == "read":
        with contextlib.suppress(moefile.FormatError):
            moefile.read_model(command[1])
        return ""
    complaint, trace = convert_here([*command, "-o", out + "/model.bin"])
    left = os.listdir(out)
    if trace:
        return trace
    if complaint is not None:
        if "\n" in complaint or not complaint.startswith("convert.py: ") or len(complaint) > 2000:
            return f"complaint {complaint!r}"
        return f"rejected ({complaint}), but left {left}" if left else ""
    if left != ["model.bin"]:
        return f"converted, but left {left}"
    done = subprocess.run([INFO, out + "/model.bin"], capture_output=True, encoding="utf-8", errors="replace")
    return f"moe-info: status {done.returncode}: {done.stderr}" if done.returncode else ""


def limit_memory():
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))


def work(kind, first, count):
    """Run cases of a kind in this process with limited memory; print a JSON line per bug found, and a summary."""
    refused = 0
    with tempfile.TemporaryDirectory() as scratch:
        whole, there, out = (os.path.join(scratch, x) for x in ("whole", "there", "out"))
        os.makedirs(whole)
        command = KINDS[kind](whole)
        os.makedirs(out)
        assert not verdict(command, out), verdict(command, out)
        limit_memory()
        for seed in range(first, first + count):
            shutil.rmtree(there, ignore_errors=True)
            shutil.copytree(whole, there)
            shutil.rmtree(out)
            os.makedirs(out)
            damage(random.Random(f"{kind} {seed}"), kind, there)
            try:
                wrong = verdict([x.replace(whole, there) for x in command], out)
            except Exception:  # noqa: BLE001
                wrong = traceback.format_exc()
            refused += not os.path.exists(out + "/model.bin")
            if wrong:
                print(json.dumps({"kind": kind, "seed": seed, "wrong": wrong}), flush=True)
    print(json.dumps({"cases": count, "refused": refused}), flush=True)


def in_a_process(*how):
    """Run this script with these arguments in a subprocess with a single malloc arena; return its JSON lines."""
    done = subprocess.run([sys.executable, os.path.abspath(__file__), *how], capture_output=True, encoding="utf-8",
                          env={**os.environ, "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}, timeout=600)
    assert not done.returncode, f"status {done.returncode}: {done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@numpy_test
def damaged_checkpoints_are_rejected_or_become_valid_files():
    wrong = []
    for kind in KINDS:
        *found, end = in_a_process("--work", kind, "--seed", str(arguments.seed), "--cases", str(arguments.cases))
        print(f"    {kind}: {end['cases']} damaged, {end['refused']} rejected, {len(found)} wrong")
        assert arguments.cases < 20 or 0 < end["refused"], "no damage was detected"
        wrong += found
    for x in wrong[:arguments.show]:
        print(f"    {x['kind']}, seed {x['seed']}:\n{x['wrong']}")
    assert not wrong


# ---- Findings of such runs, and earlier measurements -----------------------------------------------------------------

def pickled(path, code, entries=(), legacy=False):
    """Write a file like torch.save's whose pickle consists of these instructions."""
    code = b"\x80\x02" + code + b"."
    if legacy:
        head = (torchfile.LEGACY_MAGIC, torchfile.LEGACY_PROTOCOL, {"little_endian": True})
        tail = pickle.dumps([key for key, _ in entries], 2) + b"".join(struct.pack("<q", len(x) // 4) + x
                                                                       for _, x in entries)
        return write_bytes(path, b"".join(pickle.dumps(x, 2) for x in head) + code + tail)
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("archive/data.pkl", code)
        for key, data in entries:
            z.writestr(f"archive/data/{key}", data)
    return None


def storage(count, kind="FloatStorage"):
    """Return the pickle instructions that load storage "0"."""
    return (b"(X\x07\0\0\0storagectorch\n" + kind.encode() + b"\nX\x01\0\0\x000X\x03\0\0\0cpu\x8a\x08"
            + struct.pack("<q", count) + b"tQ")


def rebuilt(count, shape, stride):
    """Return the pickle instructions that rebuild a tensor from storage "0"."""
    def numbers(values):
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", x) for x in values) + b"t"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(count) + b"K\0" + numbers(shape) + numbers(
        stride) + b"\x89}tR"


PICKLES = {  # name -> instructions, and part of the error message
    "a memo index that would need 8 GB": (b"]r\xff\xff\xff\x3f", "state_dict of tensors is missing"),
    "a text of 4 GB": (b"X\xff\xff\xff\xff", "truncated"),
    "bytes of 2^63": (b"\x8e" + b"\xff" * 8, "truncated"),
    "an integer of 2 GB": (b"\x8b\xff\xff\xff\x7f", "integer has 2147483647 bytes"),
    "an integer of 5,000 digits": (b"\x8b\x00\x10\0\0" + b"\x7f" * 4096, "integer has 4096 bytes"),
    "lists 300,000 deep": (b"]" * 300000 + b"a" * 299999, "state_dict of tensors is missing"),
    "tuples 300,000 deep": (b")" + b"\x85" * 300000, "state_dict of tensors is missing"),
    "tuples 300,000 deep as a key": (b"})" + b"\x85" * 300000 + b"Ns", "key must be a string"),
    "a list in itself as a configuration": (b"}X\x06\0\0\0format]q\0h\0as", "state_dict"),
    "300,000 marks": (b"(" * 300000, "the stack is empty"),
    "five million objects": (b"N" * 5000000, "far more memory"),
    "the same list copied repeatedly": (b"(" + b"ctorch\nSize\nq\1" + b"](" + b"K\1" * 60000 + b"eq\0"
                                  + b"h\1h\0\x85R" * 60000 + b"t", "far more memory"),
    "a tensor of 4 GB of one number": (rebuilt(1, [1 << 30], [0]), "strides"),
    "a tensor of more than 2^64 bytes": (rebuilt(1, [1 << 40, 1 << 40], [0, 0]), "strides"),
    "an empty tensor with large dimensions": (rebuilt(1, [0, 1 << 61, 1 << 61], [1, 1, 1]), "state_dict of"),
    "a tensor of ninety dimensions": (rebuilt(1, [1] * 90, [1] * 90), "invalid shape"),
    "a negative stride": (rebuilt(1, [1, 1], [2, -1]), "invalid shape"),
    "a missing storage": (rebuilt(1 << 40, [1], [1]), "is truncated"),
    "code to run": (b"cposix\nsystem\nX\x02\0\0\0ls\x85R", "nothing was executed"),
    "a name with a line end and an escape": (b"\x8c\x04a\n\x1bb\x8c\x01c\x93", "refers to a\ufffd\ufffdb.c")}


@numpy_test
def pickles_need_no_more_memory_than_their_file():
    """Regression: some of these pickles crashed Python's unpickler or needed gigabytes; a subprocess reads them."""
    found = in_a_process("--pickles")
    assert len(found) == 2 * len(PICKLES), f"ended after {found[-1]['name']}"
    for end in found:
        part, legacy = PICKLES[end["name"]][1], end["legacy"]
        assert not end["trace"] and "\n" not in end["complaint"] and len(end["complaint"]) < 500, end
        # in the legacy container, one storage is unused if the pickle has no tensors
        wanted = (part, "list of storages", "is truncated") if legacy else (part,)
        assert any(x in end["complaint"] for x in wanted) and end["left"] == ["m.pt"], end


def try_pickles():
    limit_memory()
    for name, (code, _) in PICKLES.items():
        for legacy in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                pickled(folder + "/m.pt", code, [("0", bytes(4))], legacy)
                command = [folder + "/m.pt", "--from", "nvidia-gnmt", "-o", folder + "/m.bin"]
                complaint, trace = convert_here(command)
                print(json.dumps({"name": name, "legacy": legacy, "complaint": complaint, "trace": trace,
                                  "left": os.listdir(folder)}), flush=True)


def config_of(text):
    """Return a function that writes a checkpoint whose config.json has 3 MB of repeated `text`."""
    def make(folder):
        command = hf("marian", "safetensors")(folder)
        write_bytes(folder + "/config.json", b'{"a": [' + (3 << 20) // len(text) * text + b"0]}")
        return command, 3 << 20
    return make


def marian_with(name, data):
    """Return a function that writes Marian's files and replaces the contents of file `name` with `data`."""
    def make(folder):
        arrays = make_marian.make(folder, "student", "float32")
        text = arrays.pop("special:model.yml")
        if name.startswith("vocab") and name != "vocab.yml":
            os.unlink(folder + "/vocab.yml")
        if name == "settings":
            write_bytes(folder + "/model.bin", make_marian.as_bin(arrays, data + text))
        else:
            write_bytes(f"{folder}/{name}", data)
        return ["--from", "marian", folder], len(data)
    return make


def repeated(line):
    return (3 << 20) // len(line) * line


def header_of(text):
    """Return a function that writes a checkpoint whose safetensors header repeats `text`."""
    def make(folder):
        command = hf("marian", "safetensors")(folder)
        data = b'{"a": [' + (3 << 20) // len(text) * text + b"0]}"
        write_bytes(folder + "/model.safetensors", struct.pack("<Q", len(data)) + data)
        return command, 3 << 20
    return make


def pickle_of(code, legacy):
    """Return a function that writes a checkpoint whose pickle has 3 MB of repeated instructions."""
    def make(folder):
        pickled(folder + "/m.pt", (3 << 20) // len(code) * code + b"N", [("0", bytes(4))], legacy)
        return [folder + "/m.pt", "--from", "nvidia-gnmt"], 3 << 20
    return make


SWELLING = {"lists in config.json": config_of(b"[],"), "objects in config.json": config_of(b"{},"),
            "numbers in config.json": config_of(b"1e9,"), "lists in a header": header_of(b"[],"),
            "pairs in a header": header_of(b'{"a":1},'),
            "keys in a vocab.yml": marian_with("vocab.yml", repeated(b"a:\n")),
            "items in a vocab.yml": marian_with("vocab.yml", b"a:\n" + repeated(b"- b\n")),
            "a key of megabytes": marian_with("vocab.yml", repeated(b"ab ")),
            "keys in a decoder.yml": marian_with("decoder.yml", repeated(b"a: [b, c]\n")),
            "a list of megabytes": marian_with("decoder.yml", b"a: [b" + repeated(b", b") + b"]"),
            "keys in a model's settings": marian_with("settings", repeated(b"a: b\n")),
            "pieces of a .spm": marian_with("vocab.spm", repeated(b"\x0a\x06\x0a\x04abcd")),
            "a .gz of zeros": marian_with("vocab.yml.gz", gzip.compress(bytes(1 << 26))),
            "a .gz of lines": marian_with("decoder.yml.gz", gzip.compress(b"a:\n" * (1 << 22))),
            **{f"{name} in a pickle{' of before 1.6' * legacy}": pickle_of(code, legacy)
               for name, code in (("sets", b"\x8f"), ("dictionaries", b"}"), ("lists", b"]"), ("marks", b"("),
                                  ("memory", b"N\x94"), ("large numbers", b"\x8a\x08aaaaaaaa"), ("tuples", b"N\x85"),
                                  ("entries", b"}K\x01Ns"), ("objects", b"cargparse\nNamespace\n)R"))
               for legacy in (False, True)}}
MULTIPLE, FREE = 16, 80 << 20  # reading a file may use MULTIPLE times its size plus FREE bytes


@numpy_test
def memory_is_a_small_multiple_of_the_file():
    """One byte of a pickle can create an empty set of 216 bytes; three bytes of JSON can create a list of 64 bytes."""
    for end in in_a_process("--swelling"):
        assert not end["trace"] and end["complaint"] and end["taken"] < FREE + MULTIPLE * end["size"], end
        SWELLING.pop(end["name"])
    assert not SWELLING, f"not reached: {list(SWELLING)}"


def try_swelling():
    """Run each case in a child process, because the peak memory of a process never decreases."""
    for name, make in SWELLING.items():
        with tempfile.TemporaryDirectory() as folder:
            command, size = make(folder)
            if os.fork() == 0:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                complaint, trace = convert_here([*command, "-o", folder + "/out.bin"])
                taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
                print(json.dumps({"name": name, "complaint": complaint, "trace": trace, "taken": taken,
                                  "size": size}), flush=True)
                os._exit(0)
            os.wait()


def own(folder):
    """Write a Marian student with all files that convert.py looks for."""
    make_marian.make(folder, "student", "intgemm8")
    write_bytes(folder + "/decoder.yml", b"models:\n  - model.bin\nvocabs:\n  - vocab.yml\n  - vocab.yml\n"
                b"shortlist:\n  - lex.bin\n")
    write_bytes(folder + "/lex.bin", b"".join(b"y w%d 0.5\n" % i for i in range(20, 64)))
    write_bytes(folder + "/LICENSE", b"Anybody may do anything.")
    return ["--from", "marian", folder, "--ids-only"]


ENDLESS = {"config.json": ("marian", "safetensors"), "vocab.json": ("marian", "safetensors"),
           "source.spm": ("marian", "safetensors"), "model.safetensors": ("marian", "safetensors"),
           "pytorch_model.bin": ("marian", "legacy"), "special_tokens_map.json": ("nllb", "safetensors"),
           **dict.fromkeys(("model.bin", "vocab.yml", "decoder.yml", "lex.bin", "LICENSE"))}


@numpy_test
def devices_and_pipes_are_rejected_by_name():
    """Reading /dev/zero never ends, and reading a pipe might block. A link to a regular file is accepted."""
    ways = [lambda path: os.symlink("/dev/zero", path), os.mkfifo]
    for name, kind in ENDLESS.items():
        ways.reverse()
        with tempfile.TemporaryDirectory() as folder:
            command = hf(*kind)(folder) if kind else own(folder)
            path = os.path.join(folder, name)
            os.rename(path, folder + "/else")
            for make in ways[:1 + (name == "config.json")]:
                make(path)
                (end,) = in_a_process("--convert", *command, "-o", folder + "/m.bin")
                assert name in end["complaint"] and "not a regular file" in end["complaint"], (name, end)
                assert end["seconds"] < SECONDS and not os.path.exists(folder + "/m.bin"), end
                os.unlink(path)
            os.symlink("else", path)
            assert convert_here([*command, "-o", folder + "/m.bin"]) == (None, None), name


def refused(command, out="model.bin"):
    """Check that a checkpoint is rejected in one line without output; return the message."""
    with tempfile.TemporaryDirectory() as folder:
        complaint, trace = convert_here([*command, "-o", os.path.join(folder, out)])
        assert complaint is not None and "\n" not in complaint, trace or complaint
        assert not os.listdir(folder), os.listdir(folder)
        return complaint


@numpy_test
def keys_with_long_shared_prefixes_are_rejected():
    with tempfile.TemporaryDirectory() as folder:
        command = tensorflow(folder)
        data = bytearray()  # 80,000 keys, each a byte longer than the previous one
        for i in range(80000):
            data += gnmt_checkpoints.varint(i) + b"\1\0k"
        block = bytes(data) + struct.pack("<II", 0, 1) + b"\0"
        block += struct.pack("<I", gnmt_checkpoints.masked_crc(block))
        handle = gnmt_checkpoints.varint(0) + gnmt_checkpoints.varint(len(block) - 5)
        for handles in (1, 5000):  # one or many references to the same block
            index = b"".join(b"\0\1" + bytes([len(handle)]) + b"k" + handle for _ in range(handles))
            index += struct.pack("<II", 0, 1) + b"\0"
            index += struct.pack("<I", gnmt_checkpoints.masked_crc(index))
            ends = (gnmt_checkpoints.varint(0) * 2 + gnmt_checkpoints.varint(len(block))
                    + gnmt_checkpoints.varint(len(index) - 5))
            write_bytes(folder + "/m.ckpt.index", block + index + ends + bytes(40 - len(ends))
                        + struct.pack("<Q", 0xDB4775248B80FB57))
            (end,) = in_a_process("--convert", *command, "-o", folder + "/m.bin")
            assert "too long" in end["complaint"] and end["seconds"] < SECONDS, end


def changed_json(folder, name, **values):
    path = os.path.join(folder, name)
    with open(path, encoding="utf-8") as file:
        value = json.load(file)
    write_bytes(path, json.dumps({**value, **values}).encode())


@numpy_test
def values_outside_the_engines_limits_are_rejected():
    with tempfile.TemporaryDirectory() as folder:
        for key, value, part in (
                ("embed_scale", 1e300, "embedding.scale: 1e+300 is out of range"), ("bos", 1 << 40, "token.bos"),
                ("embed_scale", [1], "expected float"), ("d_model", 1 << 62, "model.width"),
                ("arch", ["x"], "arch ['x'] is"), ("never_generated", [[1]], "expected int"),
                ("languages", {"en": -4}, "invalid token ids"),
                ("encoder", [5], "expected dict"), ("encoder", {}, "expected list")):
            checkpoint = gnmt_checkpoints.random_moe(np.random.default_rng(1), 4, 9)
            checkpoint["config"][key] = value
            gnmt_checkpoints.write_torch(folder + "/m.pt", checkpoint)
            assert part in refused([folder + "/m.pt"]), (key, refused([folder + "/m.pt"]))
        command = trainer(False)(folder)
        assert "embedding.scale: 1e+300" in refused([*command, "--meta", "embedding.scale=1e300"])
    for family, name, values, part in (
            ("nllb", "generation_config.json", {"length_penalty": 1000}, "length_penalty is 1000.0, which is"),
            ("nllb", "generation_config.json", {"bad_words_ids": 7}, "bad_words_ids"),
            ("nllb", "config.json", {"d_model": 10 ** 30}, "d_model is 1000"),
            ("nllb", "config.json", {"scale_embedding": [[[]]]}, "scale_embedding is [[[]]]"),
            ("nllb", "config.json", {"x" * 300: float("nan")}, "not valid JSON"),
            ("nllb", "config.json", {"architectures": ["x" * 5000]}, "architectures"),
            ("marian", "vocab.json", {"\ud800": 30}, "not valid JSON")):
        with tempfile.TemporaryDirectory() as folder:
            command = hf(family, "safetensors")(folder)
            changed_json(folder, name, **values)
            assert part in refused(command) and len(refused(command)) < 400, (values, refused(command))


@numpy_test
def weights_that_overflow_are_refused():
    with tempfile.TemporaryDirectory() as folder:
        w = gnmt_checkpoints.random_nvidia(np.random.default_rng(1), 4, 7, 2)
        names = [f"decoder.att_rnn.rnn.bias_{x}_l0" for x in ("ih", "hh")]
        for name in names:
            w[name][0] = 3e38  # the sum of both biases, which the model file would contain, is infinite
        checkpoint = gnmt_checkpoints.nvidia_checkpoint(w, 4, 2, list("abcdefg"), [])
        gnmt_checkpoints.write_torch(folder + "/m.pt", checkpoint)
        assert "tensor decoder.0.bias contains values that are not finite" in refused([folder + "/m.pt", "--from",
                                                                                    "nvidia-gnmt"])


@numpy_test
def only_regular_outputs_are_written():
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(folder + "/c")
        command = trainer(False)(folder + "/c")
        write_bytes(folder + "/target", b"old")
        os.symlink(folder + "/target", folder + "/link")
        assert convert_here([*command, "-o", folder + "/link"]) == (None, None)
        assert os.path.islink(folder + "/link") and read_bytes(folder + "/target")[:8] == b"MOEMODEL"
        os.mkfifo(folder + "/fifo")
        complaint, _ = convert_here([*command, "-o", folder + "/fifo"])
        assert "not a regular file" in complaint and sorted(os.listdir(folder)) == ["c", "fifo", "link", "target"]
        # a file with the name of a partial conversion but other contents is preserved
        os.makedirs(folder + "/h")
        command = [*hf("nllb", "safetensors")(folder + "/h"), "--resume", "-o", folder + "/out"]
        write_bytes(folder + "/out.partial", b"a letter")
        complaint, _ = convert_here(command)
        assert "is from another checkpoint" in complaint and \
            read_bytes(folder + "/out.partial") == b"a letter", complaint
        os.unlink(folder + "/out.partial")
        os.symlink(folder + "/target", folder + "/out.partial")
        complaint, _ = convert_here(command)
        assert complaint.startswith("convert.py: ") and os.path.islink(folder + "/out.partial"), complaint


def convert_alone(*command):
    """Run convert.py in this process with limited memory; print the result."""
    limit_memory()
    began = time.process_time()
    complaint, trace = convert_here(list(command))
    print(json.dumps({"complaint": complaint, "trace": trace, "seconds": time.process_time() - began}))


def main():
    global arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=int(os.environ.get("MOE_TEST_DAMAGE", "25")))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=20, help="number of findings to print (20)")
    parser.add_argument("--only", default="", help="run tests with matching names")
    parser.add_argument("--work", metavar="KIND", choices=list(KINDS) if np else [],
                        help="run cases of this kind in this process")
    alone = {"--convert": convert_alone, "--pickles": try_pickles, "--swelling": try_swelling}
    if sys.argv[1:] and sys.argv[1] in alone:  # this process is a child of the script
        return alone[sys.argv[1]](*sys.argv[2:])
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments.work, arguments.seed, arguments.cases)
    return test.run(arguments.only)


if __name__ == "__main__":
    sys.exit(main())
