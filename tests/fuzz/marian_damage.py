"""Damage the structure of Marian's files, for the targets marian-* and shortlist of fuzz_convert.py.

    CASES[target]               {name: make(folder) -> arguments of convert.py}
    damage(r, target, folder)   damage files that the target's reader reads; return a description
"""
import gzip
import io
import os
import random
import re
import stat
import struct
import subprocess
import tempfile
import warnings
import zipfile

import numpy as np

import make_marian
import shortlist
import test_marian

warnings.filterwarnings("ignore", "Duplicate name")  # damaged archives have duplicates on purpose
NUMBERS = (0, 1, 2, 3, 7, 8, 16, 32, 63, 64, 65, 127, 128, 255, 256, 4096, 65535, 65536, 1 << 20, 1 << 24, 1 << 29,
           (1 << 30) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 62) + 1, (1 << 63) - 1,
           1 << 63, (1 << 64) - 1)
VALUES = ("", "~", "null", "0", "1", "-1", "true", "no", "1e9", "nan", "1_0", "9" * 50, "9" * 5000, "x" * 5000, "[]",
          "[a, b]", "[a", "[[a]]", "[a, [b, [c]]]", "[" * 3000, "{}", "{a: b}", "'", "'a", "'a''b'", '"', '"\\x4"',
          '"\\x41"', '"\\ud800"', '"\\U0010ffff"', '"\\U00110000"', '"\\UFFFFFFFF"', '"\\q"', '"\\0"', "&a b", "*a",
          "!!python/object:os.system x", "!!binary eA==", "|", ">", "<<", "# no", "a # yes", "a: b", "a\tb", "\0", "é",
          "\u2581", "\ufeff", "../../etc/passwd", "/dev/zero", "ssru", "gru", "rnn", "average-attention", "v1.9.56",
          "n", "da", "dan", "relu", "\u0663", "2.0")
PIECES = ("</s>", "<unk>", "", "a", ">>fra<<", ">>x y<<", ">><<", ">>" + "a" * 5000 + "<<", "\u2581", "x" * 5000, "\0",
          "\n", " ", "é")


# ---- Undamaged files ----

def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def lists(size, r, targets=None):
    """Return the bytes of a random binary shortlist for `size` tokens."""
    rows = [sorted(r.sample(range(targets or size), r.randrange(8))) for _ in range(size)]
    offsets = np.cumsum([0] + [len(x) for x in rows])
    return sealed(np.array([5, 50, len(offsets), offsets[-1]], "<u8").tobytes() + offsets.astype("<u8").tobytes()
                  + np.array([i for x in rows for i in x], "<u4").tobytes())


def sealed(body):
    words = np.frombuffer(body, "<u8", len(body) // 8)
    return struct.pack("<QQ", shortlist.MAGIC, shortlist.checksum(words)) + body


def folder(kind, layout, *options, spms=(), lex=None, decoder=True):
    """Return a function that writes a folder of files like those of Marian or Firefox."""
    def make(at):
        make_marian.make(at, kind, layout)
        write(at + "/LICENSE", b"Do what you like with it.")
        size = make_marian.TOKENS
        for name in spms:
            test_marian.write_spm(f"{at}/{name}", size)
        if "vocab.enpt.spm" in spms:
            os.unlink(at + "/vocab.yml")
        if lex == "text":
            names = range(14, 64) if "vocab.enpt.spm" not in spms else range(29, 64)
            write(at + "/lex.s2t.bin", "".join(f"w{i} w{j} {(i * j % 9) / 9}\n" for i in names for j in names
                                               if i * j % 7 < 3).encode())
        elif lex:
            write(at + "/lex.s2t.bin", lists(size, random.Random(1)))
        if decoder:
            model = "model." + ("npz" if layout == "npz" else "bin")
            words = ["models:", "  - " + model, "beam-size: 2", "normalize: 1", "word-penalty: 0", "mini-batch: 1",
                     "maxi-batch-sort: src", "max-length-factor: 2.0", "skip-cost: true"]
            if "vocab.enpt.spm" in spms:
                words += ["vocabs:", "  - vocab.enpt.spm", "  - vocab.enpt.spm"]
            if lex:
                words += ["shortlist:", "    - lex.s2t.bin", "    - false"]
            write(at + "/decoder.yml", "\n".join(words + [""]).encode())
        return ["--from", "marian", "{}", *options, *["--ids-only"] * (not spms)]
    return make


def deflated(make):
    def again(at):
        command = make(at)
        with zipfile.ZipFile(at + "/model.npz") as old:
            held = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(at + "/model.npz", "w", zipfile.ZIP_DEFLATED) as new:
            for name, data in held.items():
                new.writestr(name, data)
        return command
    return again


FIREFOX = ("vocab.enpt.spm",)
CASES = {
    "marian-bin": {"student": folder("student", "intgemm8", "--type", "q8", spms=FIREFOX),
                   "two": folder("two", "intgemm16"), "post": folder("post", "float32", decoder=False)},
    "marian-npz": {"post": folder("post", "npz"), "trained": folder("trained", "npz", decoder=False),
                   "untied": deflated(folder("untied", "npz")), "before": deflated(folder("before", "npz"))},
    "marian-yml": {"student": folder("student", "intgemm8", lex="binary"), "tied": folder("tied", "npz"),
                   "two": folder("two", "float32"), "before": folder("before", "npz")},
    "marian-spm": {"student": folder("student", "intgemm8", spms=FIREFOX),
                   "opus": folder("post", "npz", spms=("source.spm", "target.spm"))},
    "shortlist": {"binary": folder("student", "intgemm8", lex="binary", spms=FIREFOX),
                  "text": folder("student", "intgemm8", lex="text"),
                  "of pieces": folder("student", "intgemm8", lex="text", spms=FIREFOX)},
}
READ = {"marian-bin": r"model\.bin", "marian-npz": r"model\.npz", "marian-yml": r".*\.yml|model\..*",
        "marian-spm": r".*\.spm", "shortlist": r"lex\..*"}


# ---- Damage ----

def damage_bytes(r, data):
    data = bytearray(data)
    for _ in range(r.choice((1, 1, 2, 5))):
        at, kind = r.randrange(len(data) + 1), r.randrange(8)
        if r.random() < 0.5:
            at = min(at, r.randrange(600))  # damage headers more often
        if kind == 0:
            del data[at:]
        elif kind == 1:
            del data[at:at + r.randrange(1, 40)]
        elif kind == 2:
            data[at:at] = data[at:at + r.randrange(1, 80)] * r.choice((1, 2, 50))
        elif kind == 3:
            size = r.choice((1, 2, 4, 8))
            data[at:at + size] = (r.choice(NUMBERS) & (1 << 8 * size) - 1).to_bytes(size, "little")
        elif at < len(data):
            data[at] = r.choice((r.randrange(256), data[at] ^ 1 << r.randrange(8), 0, 255))
    return bytes(data)


def number(r, old=0):
    return r.choice((old + 1, max(old - 1, 0), 2 * old, old // 2, r.choice(NUMBERS))) & (1 << 64) - 1


def damage_bin(r, data):
    """Damage the header fields, items or multipliers of a .bin file; usually correct its padding."""
    try:
        count = struct.unpack_from("<Q", data, 8)[0]
        heads = [list(struct.unpack_from("<4Q", data, 16 + 32 * i)) for i in range(count)]
        at, names, shapes = 16 + 32 * count, [], []
        for head in heads:
            names.append(data[at:at + head[0]])
            at += head[0]
        for head in heads:
            shapes.append(list(struct.unpack_from(f"<{head[2]}i", data, at)))
            at += 4 * head[2]
        pad, blocks = struct.unpack_from("<Q", data, at)[0], []
        at += 8 + pad
        for head in heads:
            blocks.append(data[at:at + head[3]])
            at += head[3]
        assert len(heads) == len(blocks) and heads
    except (struct.error, AssertionError, OverflowError, MemoryError):
        return damage_bytes(r, data)
    for _ in range(r.choice((1, 1, 2))):
        i, what = r.randrange(len(heads)), r.randrange(12)
        if r.random() < 0.2:
            i = names.index(b"special:model.yml\0") if b"special:model.yml\0" in names else i
        if what < 3:
            k = r.randrange(4)
            heads[i][k] = r.choice((number(r, heads[i][k]), 0x404, 0x101, 0x4101, 0x4102, 0x808))
        elif what < 5 and shapes[i]:
            k = r.randrange(len(shapes[i]))
            shapes[i][k] = struct.unpack("<i", struct.pack("<I", number(r, shapes[i][k] & 0xffffffff) & 0xffffffff))[0]
        elif what == 5:
            names[i] = r.choice((names[r.randrange(len(names))], damage_bytes(r, names[i]), b"x" * 300 + b"\0", b"\0"))
            heads[i][0] = len(names[i])
        elif what == 6:
            for x in heads, names, shapes, blocks:
                x.append(x[i])
        elif what == 7:
            for x in heads, names, shapes, blocks:
                del x[i]
            if not heads:
                break
        elif what == 8:
            blocks[i] = blocks[i][:-4] + struct.pack("<f", r.choice((0, -1, 1e-38, 1e38, float("nan"), float("inf"))))
        elif what == 9:
            shapes[i] = shapes[i][::-1] if r.random() < 0.5 else [1] * r.randrange(6)
            heads[i][2] = len(shapes[i])
        elif what == 10:
            pad = number(r, pad)
        else:
            blocks[i] = damage_bytes(r, blocks[i])
            heads[i][3] = len(blocks[i])
    if r.random() < 0.7:
        size = 16 + 32 * len(heads) + sum(map(len, names)) + sum(4 * len(x) for x in shapes) + 8
        pad = -size % 256
    return (struct.pack("<QQ", r.choice((0, 2, 1 << 40)) if r.random() < 0.02 else 1,
                        number(r, len(heads)) if r.random() < 0.05 else len(heads))
            + b"".join(struct.pack("<4Q", *x) for x in heads) + b"".join(names)
            + b"".join(struct.pack(f"<{len(x)}i", *x) for x in shapes) + struct.pack("<Q", pad) + bytes(pad & 4095)
            + b"".join(blocks))


def damage_array(r, data):
    """Damage the header of a .npy file; usually correct its length."""
    if data[:6] != b"\x93NUMPY" or len(data) < 12:
        return damage_bytes(r, data)
    size = struct.unpack_from("<H", data, 8)[0]
    text, rest = data[10:10 + size], data[10 + size:]
    kind = r.randrange(8)
    if kind == 0:
        text = re.sub(rb"'descr': '[^']*'", b"'descr': " + r.choice((
            b"'<f2'", b"'<f3'", b"'>f4'", b"'|f4'", b"'<f8'", b"'|O'", b"'<U9'", b"[('a', '<f4')]", b"'<i9'")), text)
    elif kind == 1:
        text = text.replace(b"False", r.choice((b"True", b"0", b"'x'")))
    elif kind < 5:
        shape = r.choice((b"()", b"(%d,)" % number(r), b"(%d, %d)" % (number(r), number(r)), b"(0, 32)", b"(-1, 4)",
                          b"(" + b"1" * 200, b"(" + b"1," * 900 + b")", b"(1, 1, 1, 1, 1)", b"(64 32)"))
        text = re.sub(rb"\([^)]*\)", shape, text)
    elif kind == 5:
        text = damage_bytes(r, text)
    elif kind == 6:
        rest = damage_bytes(r, rest)
    else:
        text += b" " * r.choice((1, 64, 5000))
    length = len(text) if r.random() < 0.8 else number(r, len(text))
    wide = r.random() < 0.1
    return (data[:6] + (b"\2\0" if wide else r.choice((b"\1\0", b"\1\0", b"\1\0", b"\3\0", b"\x09\0")))
            + struct.pack("<I" if wide else "<H", length & (0xffffffff if wide else 0xffff)) + text + rest)


def damage_npz(r, data):
    """Damage a member of a .npz file, which remains a valid archive, or the archive's headers."""
    if r.random() < 0.3:
        heads = [x.start() for x in re.finditer(b"PK\1\2|PK\3\4|PK\5\6", data)]
        if not heads:
            return damage_bytes(r, data)
        data, at = bytearray(data), r.choice(heads) + 4 + r.randrange(42)
        size = r.choice((1, 2, 4))
        data[at:at + size] = (number(r) & (1 << 8 * size) - 1).to_bytes(size, "little")
        return bytes(data)
    held = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(held, "w") as new:
            names = old.namelist()
            chosen, what = r.choice(names), r.randrange(8)
            for name in names:
                content, packed = old.read(name), old.getinfo(name).compress_type
                if name == chosen and what == 0:
                    continue
                if name == chosen and what == 1:
                    new.writestr(r.choice(names + ["", "\0", "../x", "x" * 5000]), content)
                if name == chosen and what == 2:
                    content = content + bytes(r.choice((1, 4, 1 << 22)))
                    packed = zipfile.ZIP_DEFLATED
                if name == chosen and what == 3:
                    packed = r.choice((zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED))
                if name == chosen and what > 3:
                    content = damage_array(r, content)
                new.writestr(name, content, packed)
    except Exception:  # noqa: BLE001 - damaged earlier
        return damage_bytes(r, data)
    return held.getvalue()


def damage_yml(r, data):
    text = data.decode(errors="surrogateescape")
    lines = text.split("\n")
    for _ in range(r.choice((1, 1, 2, 4))):
        at, what = r.randrange(len(lines)), r.randrange(12)
        line = lines[at]
        key = line.split(":")[0]
        if what < 4:
            lines[at] = f"{key}: {r.choice(VALUES)}"
        elif what == 4:
            lines[at] = f"{r.choice(VALUES + PIECES)}: {line.split(':')[-1].strip()}"
        elif what == 5:
            del lines[at]
            lines = lines or [""]
        elif what == 6:
            lines.insert(r.randrange(len(lines)), line)
        elif what == 7:
            lines[at:at] = r.choice((["- " + r.choice(VALUES)] * r.choice((1, 3, 3000)), ["? " + line], [": x"],
                                     ["---"], ["%YAML 9"], ["  " * i + "a:" for i in range(r.choice((2, 400)))],
                                     [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(30)]))
        elif what == 8:
            lines[at] = r.choice(("  ", "\t", "- ", "? ", ": ")) + line
        elif what == 9:
            lines[at] = f"{key}: {number(r)}"
        elif what == 10:
            lines[at] = line + r.choice((" # x", "\r", " x: y", ":", "'", "\0", " " * 5000))
        else:
            lines[at] = damage_bytes(r, line.encode(errors="surrogateescape")).decode(errors="surrogateescape")
    return "\n".join(lines).encode(errors="surrogateescape")


def damage_settings(r, data):
    """Damage the YAML settings inside an otherwise intact model."""
    if data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            arrays = {name: old.read(name) for name in old.namelist()}
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w") as new:
            for name, content in arrays.items():
                if name == "special:model.yml.npy":
                    text = damage_yml(r, content[content.index(b"\n") + 1:])
                    out = io.BytesIO()
                    np.lib.format.write_array(out, np.frombuffer(text, np.int8), version=(1, 0))
                    content = out.getvalue()
                new.writestr(name, content)
        return held.getvalue()
    count = struct.unpack_from("<Q", data, 8)[0]
    old = struct.unpack_from("<4Q", data, 16 + 32 * (count - 1))[3]  # size of the last item, the settings
    text = damage_yml(r, data[len(data) - old:])
    name = data.index(b"special:model.yml\0") + len("special:model.yml\0")
    pads = sum(struct.unpack_from("<4Q", data, 16 + 32 * i)[2] for i in range(count - 1))
    data = bytearray(data[:len(data) - old] + text)
    struct.pack_into("<Q", data, 16 + 32 * (count - 1) + 24, len(text))
    struct.pack_into("<i", data, name + 4 * pads, len(text))
    return bytes(data)


def damage_spm(r, data, depth=0):
    """Damage a field of a protocol buffer message, or of a message nested in it."""
    try:
        fields, at = [], 0
        while at < len(data):
            begin = at
            key, at = varint(data, at)
            kind = key & 7
            if kind == 2:
                size, at = varint(data, at)
                fields.append([key, data[at:at + size]])
                at += size
            else:
                at = varint(data, at)[1] if kind == 0 else at + {1: 8, 5: 4}[kind]
                fields.append([key, data[begin:at]])  # bytes of the field, including its key
        i = r.randrange(len(fields))
    except (IndexError, KeyError, ValueError):
        return damage_bytes(r, data)
    what, (key, value) = r.randrange(10), fields[i]
    length = None
    if what < 5 and key & 7 == 2:
        fields[i][1] = damage_spm(r, value, depth + 1) if depth < 2 and r.random() < 0.7 else r.choice((
            r.choice(PIECES).encode(), b"\xff", b"", damage_bytes(r, value)))
    elif what == 5:
        fields.insert(i, fields[i])
    elif what == 6:
        del fields[i]
    elif what == 7:
        fields[i][0] = key ^ 1 << r.randrange(8)
    elif what == 8 and key & 7 == 2:
        length = number(r, len(value))
    else:
        j = r.randrange(len(fields))
        fields[i], fields[j] = fields[j], fields[i]
    out = bytearray()
    for k, (key, value) in enumerate(fields):
        if key & 7 == 2:
            out += as_varint(key) + as_varint(length if length is not None and k == i else len(value)) + value
        else:
            out += value
    return bytes(out)


def varint(data, at):
    value, shift = 0, 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def as_varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + bytes([value]))


def damage_lists(r, data):
    """Damage numbers of a binary shortlist (usually correcting its checksum), or lines of a text shortlist."""
    if data[:8] != struct.pack("<Q", shortlist.MAGIC):
        lines = data.split(b"\n")
        for _ in range(r.choice((1, 1, 3))):
            at = r.randrange(len(lines))
            words = lines[at].split(b" ")
            words[r.randrange(len(words))] = r.choice((*VALUES, *PIECES, "w20", "1e-9", "0.5", "99999999999")).encode()
            lines[at] = r.choice((b" ", b" ", b"\t", b"  ")).join(words)
            if r.random() < 0.1:
                lines[at:at + 1] = [lines[at]] * r.choice((0, 2, 5000))
                lines = lines or [b""]
        return b"\n".join(lines)
    body = bytearray(data[16:])
    for _ in range(r.choice((1, 1, 3))):
        wide = 8 if r.random() < 0.7 else 4
        at = wide * r.randrange(max(len(body) // wide, 1))
        if r.random() < 0.5:
            at = 8 * r.randrange(8)
        old = int.from_bytes(body[at:at + wide], "little")
        body[at:at + wide] = (number(r, old) & (1 << 8 * wide) - 1).to_bytes(wide, "little")
        if r.random() < 0.1:
            body = body[:-4 * r.randrange(1, 9)] if r.random() < 0.5 else body + bytes(4 * r.randrange(9))
    return sealed(bytes(body)) if r.random() < 0.9 else data[:16] + bytes(body)


WAYS = {"marian-bin": damage_bin, "marian-npz": damage_npz, "marian-spm": damage_spm, "shortlist": damage_lists}


def pack(r, path):
    """Compress a file; sometimes make it a decompression bomb, or damage the result."""
    kind = r.choice((".gz", ".zst"))
    with open(path, "rb") as file:
        data = file.read()
    if r.random() < 0.1:
        data = data + bytes(r.choice((1 << 20, 1 << 26)))
    data = gzip.compress(data, 1) if kind == ".gz" else subprocess.run(["zstd", "-cq"], input=data, capture_output=True,
                                                                       check=True).stdout
    if r.random() < 0.3:
        data = damage_bytes(r, data)
    os.unlink(path)
    path = path + kind if r.random() < 0.9 else path
    write(path, data)
    return path


def replace(r, path):
    """Replace the file with something that is not a regular file."""
    os.unlink(path)
    what = r.randrange(6)
    if what == 0:
        os.symlink("/dev/zero", path)
    elif what == 1:
        os.symlink(os.path.basename(path), path)
    elif what == 2:
        os.symlink("missing", path)
    elif what == 3:
        os.mkfifo(path)
    elif what == 4:
        os.mkdir(path)
    return ("a device", "a link to itself", "a dangling link", "a pipe", "a folder", "deleted")[what]


def damage(r, target, at):
    changes = []
    for _ in range(r.choice((1, 1, 1, 2))):
        names = sorted(x for x in os.listdir(at) if stat.S_ISREG(os.lstat(os.path.join(at, x)).st_mode))
        mine = [x for x in names if re.fullmatch(READ[target], x)]
        if not names:
            break
        name = r.choice(mine if mine and r.random() < 0.9 else names)
        path = os.path.join(at, name)
        with open(path, "rb") as file:
            data = file.read()
        way = WAYS.get(target, damage_yml) if name in mine else damage_bytes
        if name in mine and name.startswith("model.") and target == "marian-yml":
            way = damage_settings
        if r.random() < 0.15:
            way = damage_bytes
        try:
            if r.random() < 0.9:
                write(path, way(r, data))
        except Exception:  # noqa: BLE001 - damaged earlier
            write(path, damage_bytes(r, data))
        changes.append(f"{way.__name__} {name}")
        if r.random() < 0.2:
            changes.append("packed " + os.path.basename(pack(r, path)))
        elif r.random() < 0.03:
            changes.append(f"{name} now {replace(r, path)}")
    return ", ".join(changes)


# ---- Folders as inputs of fuzz_marian.c ----

NAMES = ("model.bin", "vocab.enpt.spm", "lex.s2t.bin", "decoder.yml", "vocab.yml", "LICENSE", "model.bin.gz",
         "srcvocab.enpt.spm.gz", "trgvocab.spm", "srcvocab.yml", "trgvocab.yml", "source.spm", "target.spm")


def packed_folder(at, names=NAMES):
    """Return the files of a folder as one input; names[2] of fuzz_marian.c is lex.enpt.s2t.bin."""
    out = b""
    for number, name in enumerate(names):
        if os.path.exists(f"{at}/{name}"):
            with open(f"{at}/{name}", "rb") as file:
                data = file.read()
            data = data.replace(b"lex.s2t.bin", b"lex.enpt.s2t.bin") if name == "decoder.yml" else data
            out += bytes([number]) + len(data).to_bytes(3, "little") + data
    return out


def write_seeds(made):
    makers = {f"{target}-{name}": make for target in ("marian-bin", "marian-yml", "marian-spm", "shortlist")
              for name, make in CASES[target].items()}
    makers |= {kind: folder(kind, "float32", decoder=False) for kind in ("average", "old", "trained")}
    makers |= {"pieces": folder("untied", "intgemm8", spms=("source.spm", "target.spm"), decoder=False)}
    for name, make in makers.items():
        with tempfile.TemporaryDirectory() as at:
            make(at)
            if os.path.exists(at + "/model.npz"):
                continue  # not for the converter in C
            if name == "old":
                with open(at + "/model.bin", "rb") as file:
                    write(at + "/model.bin.gz", gzip.compress(file.read()))
                os.unlink(at + "/model.bin")
            write(f"{made}/{name.replace(' ', '-')}", packed_folder(at))
