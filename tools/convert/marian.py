"""Read Marian's own model files: Firefox's and Bergamot's students (.bin), OPUS-MT (.npz).

    found = read_marian(path, licence, say)     a folder, or a model file in it; `found` as from hf.read_hf

The folder contains the model, the vocabularies, and optionally decoder settings (decoder.yml, config*.yml). Files may
be compressed (.gz, .zst), as Firefox serves them. The model's item `special:model.yml` describes the model. Marian's
matrices are [in, out]; intgemm8 and intgemm16 matrices are stored transposed, which is the layout of Q8: with --type q8
their codes are copied exactly, with one scale for all rows.

All names, types, shapes and lengths are checked before any data is read. Only one tensor at a time is in memory.
Unknown and unsupported options are rejected by name. marian.inc contains the names of files, options and tensors, and
marian.c reads it too; it must write the same model files.
"""
import fnmatch
import hashlib
import io
import math
import mmap
import os
import re
import struct
import types
import zipfile

import numpy as np

import hf
import hf_tokens
import moefile
import packed
import tables
import torchfile
from hf_json import object_of, short
from moefile import FormatError, open_regular

FLOAT, CODES8, CODES16, BYTES = 0x404, 0x4101, 0x4102, 0x101
TYPES = {FLOAT: "float32", CODES8: "intgemm8", CODES16: "intgemm16", BYTES: "int8"}
MAX_ITEMS, LONGEST_NAME, MAX_DIMENSIONS = 1 << 16, 256, 4
LARGEST_YAML, MAX_LINES, LONGEST_LINE = 1 << 24, 1 << 18, 4096  # limits in bytes, lines (two per token) and characters
LARGEST_MODEL, SETTINGS = 1 << 36, "special:model.yml"
SOURCES, TARGETS = 512, 1024  # maximum tokens of models with computed positions, which Marian does not limit
ROWS = tables.read("marian.inc")
TENSOR = dict(ROWS["TENSOR"])
NUMBERS = {int: r"[+-]?[0-9]{1,30}", float: r"[0-9+\-.eE]{1,31}"}


# ---- Files -----------------------------------------------------------------------------------------------------------

def read_text(path, most=LARGEST_YAML, what="a text"):
    try:
        return packed.read(path, most, what).decode()
    except UnicodeDecodeError:
        raise FormatError(f"{path}: not UTF-8") from None


class Item:
    """A tensor as stored: file, name, shape, kind (from TYPES), load() -> (numbers in file order, multiplier)."""

    def __init__(self, file, name, shape, kind, load):
        self.file, self.name, self.shape, self.kind, self.load = file, name, shape, kind, load


def read_bin(file, path):
    """Return (items by name, text of the settings) of a .bin file."""
    size = os.fstat(file.fileno()).st_size
    if size < 64:
        raise FormatError(f"{path}: not a Marian .bin file, or truncated")
    data, at = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), 0

    def take(form):
        nonlocal at
        if struct.calcsize(form) > size - at:
            raise FormatError(f"{path}: the header is truncated")
        values = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return values

    version, count = take("<QQ")
    if version != 1 or not 1 <= count <= MAX_ITEMS:
        raise FormatError(f"{path}: not a Marian model: expected a .npz, or a .bin of version 1")
    heads = [take("<4Q") for _ in range(count)]
    names, shapes = [], []
    for length, kind, rank, _ in heads:
        if not 2 <= length <= LONGEST_NAME or rank > MAX_DIMENSIONS:
            raise FormatError(f"{path}: invalid item: name of {length} bytes, {rank} dimensions: damaged")
        name = take(f"<{length}s")[0]
        if name[-1] or not name[:-1].isascii() or not name[:-1].decode().isprintable():
            raise FormatError(f"{path}: invalid name {short(name)}: damaged")
        names.append(name[:-1].decode())
    for name, (_, _, rank, _) in zip(names, heads):
        shapes.append(take(f"<{rank}i"))
        if not all(0 < n < hf.LARGEST_DIMENSION for n in shapes[-1]):
            raise FormatError(f"{path}: {name} has shape {list(shapes[-1])}: damaged")
    if len(set(names)) != len(names):
        raise FormatError(f"{path}: duplicate name")
    pad, = take("<Q")
    if pad > size - at or (at + pad) % 256:
        raise FormatError(f"{path}: the data at {at + pad} is not aligned to 256 bytes: damaged")
    at += pad
    items, settings = {}, None
    for name, (_, kind, _, length), shape in zip(names, heads, shapes):
        if length > size - at:
            raise FormatError(f"{path}: {name} is truncated")
        elements = math.prod(shape)
        if name == SETTINGS:
            if kind != BYTES or length != elements or length > LARGEST_YAML:
                raise FormatError(f"{path}: {name} is not text")
            settings = data[at:at + length]
        else:
            if kind not in TYPES or kind == BYTES:
                raise FormatError(f"{path}: {name} has unsupported type {kind:#x}; expected {TYPES[FLOAT]}, "
                                  f"{TYPES[CODES8]} or {TYPES[CODES16]} (CPU-specific packed formats are unsupported)")
            wanted = {FLOAT: 4 * elements, CODES8: elements + 4, CODES16: 2 * elements + 4}[kind]
            if not wanted <= length < wanted + 256:
                raise FormatError(f"{path}: {name} {list(shape)} has {length} bytes, not {wanted} + padding: damaged")
            if not name.endswith("_QuantMultA"):
                items[name] = Item(path, name, shape, TYPES[kind], loader(data, at, elements, kind, f"{path}: {name}"))
        at += length
    if at != size:
        raise FormatError(f"{path}: {size - at} bytes after the last item: damaged")
    return items, settings


def loader(data, at, elements, kind, where):
    def load():
        if kind == FLOAT:
            return np.frombuffer(data, "<f4", elements, at), None
        codes = np.frombuffer(data, np.int8 if kind == CODES8 else "<i2", elements, at)
        multiplier = struct.unpack_from("<f", data, at + codes.nbytes)[0]
        fine = codes.min() > np.iinfo(codes.dtype).min and math.isfinite(multiplier) and multiplier > 1e-30
        if not fine:
            raise FormatError(f"{where}: invalid multiplier {multiplier}, or code out of range: damaged")
        return codes, multiplier
    return load


def read_npz(file, path):
    """Return (items by name, text of the settings) of a .npz file."""
    items, settings, size = {}, None, os.fstat(file.fileno()).st_size
    heads = re.finditer(rb"PK\x01\x02", mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else ()
    if any(i == MAX_ITEMS for i, _ in enumerate(heads)):  # limit the objects that ZipFile creates
        raise FormatError(f"{path}: more than {MAX_ITEMS} items")
    try:
        archive = zipfile.ZipFile(file)
        entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, OSError):
        raise FormatError(f"{path}: not a .npz, or damaged") from None
    if sum(e.file_size for e in entries) > packed.EXPANSION * size:
        raise FormatError(f"{path}: decompresses to more than {packed.EXPANSION} times its size")
    for entry in entries:
        name = entry.filename.removesuffix(".npy")
        where = f"{path}: {short(name)}"
        if name in items or name == SETTINGS and settings is not None:
            raise FormatError(f"duplicate item {where}")
        with torchfile.reading(where), archive.open(entry) as member:
            shape, dtype, at = npy_header(member, where)
            if entry.file_size != at + math.prod(shape) * dtype.itemsize:
                raise FormatError(f"the size of {where} {list(shape)} does not match its length: damaged")
            if name == SETTINGS:
                if dtype.itemsize != 1 or entry.file_size > LARGEST_YAML:
                    raise FormatError(f"{where} is not text")
                settings = member.read()
                continue
        if dtype != "<f4":
            raise FormatError(f"{where} has unsupported type {dtype}; expected float32")
        items[name] = Item(path, name, shape, "float32", member_loader(archive, entry, at, math.prod(shape), where))
    return items, settings


NPY = re.compile(rb"\{'descr': '(<[fiu][248]|[<|][iu]1)', 'fortran_order': (True|False), "
                 rb"'shape': \(((?:[0-9]{1,12}, ?)*(?:[0-9]{1,12})?)\), \} *\n?\Z")


def npy_header(member, where):
    """Return (shape, dtype, start of the numbers) of a .npy file."""
    start = member.read(8)
    wide = start[:6] == b"\x93NUMPY" and start[6:7] in (b"\2", b"\3")
    length = member.read(4 if wide else 2)
    if start[:6] != b"\x93NUMPY" or start[6] not in (1, 2, 3) or len(length) != (4 if wide else 2):
        raise FormatError(f"{where} is not a NumPy array")
    length = int.from_bytes(length, "little")
    text = member.read(min(length, 4096))
    match = NPY.match(text)
    if len(text) != length or not match:
        raise FormatError(f"{where} is not an array of numbers: {short(text)}")
    if match[2] == b"True":
        raise FormatError(f"{where} is in Fortran order, which is not supported")
    shape = tuple(int(n) for n in match[3].replace(b",", b" ").split())
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"{where} has {len(shape)} dimensions")
    return shape, np.dtype(match[1].decode()), 8 + (4 if wide else 2) + length


def member_loader(archive, entry, at, elements, where):
    def load():
        with torchfile.reading(where), archive.open(entry) as member:
            member.read(at)
            data = member.read(4 * elements + 1)
        if len(data) != 4 * elements:
            raise FormatError(f"the size of {where} does not match the recorded length: damaged")
        return np.frombuffer(data, "<f4"), None
    return load


# ---- YAML ------------------------------------------------------------------------------------------------------------
# Parser for the subset of YAML that Marian's programs write: a mapping of strings to strings or lists of strings.
# Callers interpret the strings. A YAML 1.1 parser would convert pieces such as `y`, `null` or `1.0` to other types.

REST = r"(?:[^#:\s]|:(?=\S)|(?<=\S)#|[ \t]+(?=[^\s#]))*"
PLAIN = rf"[^\s\-?:,\[\]{{}}#&*!|>'\"%@`]{REST}|[\-?:](?=\S){REST}"
SCALAR = re.compile(rf"""'(?P<single>(?:[^']|'')*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<plain>{PLAIN})""")
ESCAPES = {"0": "\0", "a": "\a", "b": "\b", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b",
           '"': '"', "/": "/", "\\": "\\", " ": " ", "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029"}


def unescaped(text):
    def one(match):
        if match[1]:
            code = int(match[1], 16)
            if 0xd800 <= code < 0xe000 or code > 0x10ffff:
                raise ValueError
            return chr(code)
        if match[2] not in ESCAPES:
            raise ValueError
        return ESCAPES[match[2]]
    return re.sub(r"\\(?:(?:x(?=.{2})|u(?=.{4})|U(?=.{8}))((?<=x)[0-9a-fA-F]{2}|(?<=u)[0-9a-fA-F]{4}|"
                  r"(?<=U)[0-9a-fA-F]{8})|(.))", one, text)


def scalar(text):
    """Parse a scalar; return (value, rest of the line)."""
    match = SCALAR.match(text)
    if not match:
        raise ValueError
    if match["single"] is not None:
        return match["single"].replace("''", "'"), text[match.end():]
    if match["double"] is not None:
        return unescaped(match["double"]), text[match.end():]
    return match["plain"].strip(), text[match.end():]


def value_of(text):
    """Parse a string or a list of strings, optionally followed by a comment. Return None if the line has no value."""
    text = text.strip()
    if not text or text[0] == "#":
        return None
    if text[0] == "[":
        out, rest = [], text[1:].strip()
        while rest[:1] != "]":
            if out:
                if rest[:1] != ",":
                    raise ValueError
                rest = rest[1:].strip()
            item = re.match(r"[^\s,\[\]{}\"'#]+", rest)
            value, rest = (item[0], rest[item.end():]) if item else scalar(rest)
            out.append(value)
            rest = rest.strip()
        value, rest = out, rest[1:]
    else:
        value, rest = scalar(text)
    if rest.strip() and not re.match(r"\s+#", rest):
        raise ValueError
    return value


def parse_yaml(text, where):
    """Parse a mapping into a list of (key, value), in order."""
    out, items, asked = [], None, None  # items: the list being read; asked: a key introduced by `?`
    number, line = 0, ""
    try:
        for number, line in enumerate(io.StringIO(text.removesuffix("\0").removeprefix("\ufeff"), newline="\n"), 1):
            line = line.removesuffix("\n").removesuffix("\r")
            if len(line) > LONGEST_LINE or number > MAX_LINES:
                raise ValueError
            bare = line.strip(" ")
            if not bare or bare[0] == "#" or line in ("---", "...") or line.startswith("%"):
                continue
            if items is not None and re.match(r"-\s", bare):
                value = value_of(bare[1:])
                if not isinstance(value, str):
                    raise ValueError
                items.append(value)
                continue
            if line[0] == " " and bare == "[]" and items == []:
                items = None
                continue
            if asked is not None and not line.startswith(": "):
                raise ValueError
            name, rest = (asked, line) if asked is not None else scalar(line[2:] if line.startswith("? ") else line)
            if line.startswith("? ") and not rest.strip():
                asked = name
                continue
            if not re.match(r"\s*:(\s|\Z)", rest):
                raise ValueError
            value, asked = value_of(rest.lstrip()[1:]), None
            items = [] if value is None else None
            out.append((name, items if value is None else value))
        if asked is not None:
            raise ValueError
    except ValueError:
        raise FormatError(f"{where}: line {number} is not valid in Marian's YAML: {short(line)}") from None
    if len({key for key, _ in out}) != len(out):
        raise FormatError(f"{where}: duplicate key")
    return out


class Options:
    """The options of a .yml file, read with type checks and defaults. Options that were not read are rejected."""

    def __init__(self, text, where):
        self.where, self.values = where, dict(parse_yaml(text, where))
        self.asked = set()

    def text(self, key, default=None):
        self.asked.add(key)
        value = self.values.get(key, default)
        if value is None or not isinstance(value, str):
            self.refuse(key)
        return value

    def refuse(self, key):
        value = self.values.get(key)
        raise FormatError(f"{self.where}: {key} is missing" if value is None else
                          f"{self.where}: {key} {short(value)} is not supported")

    def texts(self, key):
        self.asked.add(key)
        value = self.values.get(key, [])
        return [value] if isinstance(value, str) else value

    def number(self, key, default, least, most, kind=int):
        text = self.text(key, default)
        text = {"true": "1", "false": "0"}.get(text, text) if kind is float else text
        try:
            value = kind(text if re.fullmatch(NUMBERS[kind], text) else "")
        except ValueError:
            self.refuse(key)
        if not least <= value <= most:
            self.refuse(key)
        return value

    def flag(self, key, default=False):
        return self.one_of(key, "true" if default else "false", "true", "false") == "true"

    def one_of(self, key, *values):
        """Return the value of a key, which must be one of `values`; the default is the first."""
        if self.text(key, values[0]) not in values:
            self.refuse(key)
        return self.values.get(key, values[0])

    def ignore(self, rows):
        patterns = [pattern for keys, in rows for pattern in keys.split()]
        self.asked.update(key for key in self.values if any(fnmatch.fnmatchcase(key, x) for x in patterns))

    def fixed(self, key, value):
        """Reject a key unless its value is `value`, the default, or an empty list."""
        self.asked.add(key)
        if self.values.get(key, []) not in ([] if value == "[]" else value, []):
            self.refuse(key)

    def end(self):
        for key in self.values:
            if key not in self.asked:
                raise FormatError(f"{self.where}: unknown option {key} with value {short(self.values[key])}")


# ---- Settings --------------------------------------------------------------------------------------------------------

def read_model(o):
    """Return the settings of a model as a namespace."""
    m = types.SimpleNamespace()
    for key, value in ROWS["FIXED"]:
        o.fixed(key, value)
    for field, key, values, when in ROWS["CHOICE"]:
        if when in ("", getattr(m, "decoder", None)):
            setattr(m, field, o.one_of(key, *values.split()))
    for field, key, default, least, most, when in ROWS["NUMBER"]:
        if when in ("", m.decoder):
            setattr(m, field, o.number(key, default or None, least, most))
    for field, key in ROWS["FLAG"]:
        setattr(m, field, o.flag(key))
    if m.width % m.heads or m.width % 2:
        o.refuse("transformer-heads")
    if m.decoder_products == 1:
        o.refuse("transformer-decoder-ffn-depth")
    if m.decoder == "rnn" and o.text("dec-cell") != "ssru":
        o.refuse("dec-cell")
    m.layers = {"encoder": m.encoder_layers, "decoder": m.decoder_layers}
    m.hidden = {"encoder": m.encoder_hidden, "decoder": m.decoder_hidden or m.encoder_hidden}
    ops = [o.text(f"transformer-{x}", default).replace("d", "") for x, default in
           (("preprocess", ""), ("postprocess", "dan"), ("postprocess-top", ""), ("postprocess-emb", "d"))]
    if ops[:2] not in (["", "an"], ["n", "a"]) or not {*ops[2:]} <= {"", "n"}:
        raise FormatError(f"{o.where}: unsupported transformer-preprocess, -postprocess, -postprocess-top and "
                          f"-postprocess-emb: {', '.join(repr(x) for x in ops)} (dropout 'd' ignored): norms must "
                          f"precede or follow every layer, and may also be at the top and after embeddings")
    aligns = o.text("transformer-guided-alignment-layer", "last")
    if aligns != "last" and not (re.fullmatch("[0-9]{1,3}", aligns) and 1 <= int(aligns) <= m.layers["decoder"]):
        o.refuse("transformer-guided-alignment-layer")
    m.aligns = m.layers["decoder"] if aligns == "last" else int(aligns)
    m.before, m.top, m.first = (x == "n" for x in (ops[0], *ops[2:]))
    version = re.match(r"v(\d+)\.(\d+)\.(\d+)", o.text("version", ""))
    if m.before and not version:
        raise FormatError(f"{o.where}: invalid version {short(o.values.get('version', ''))}: transformer-preprocess n "
                          f"requires the version, because keys have been normalised since v1.10.28")
    m.raw = int(m.before and tuple(map(int, version.groups())) < (1, 10, 28))  # keys and values use unnormalised inputs
    tied = o.texts("transformer-tied-layers")
    if not all(re.fullmatch("[0-9]{1,3}", x) and 1 <= int(x) <= m.layers["decoder"] for x in tied) \
            or tied and len(tied) != m.layers["decoder"]:
        o.refuse("transformer-tied-layers")
    m.tied = [int(x) for x in tied] or list(range(1, m.layers["decoder"] + 1))
    m.version = o.text("version", "").strip()
    o.ignore(ROWS["IGNORED"])
    o.end()
    return m


def decoder_meta(o, say):
    """Return (decode.* metadata, whether <unk> is allowed); `o` is None without a settings file."""
    meta = {"decode.rules": "marian", "decode.length_constant": 0.0, "decode.max_len_offset": 0}
    if o is None:
        say("no decoder.yml or config*.yml: using beam 1, normalize 1 and factor 2, as in Firefox")
        return {**meta, "decode.beam": 1, "decode.length_penalty": 1.0, "decode.max_len_factor": 2.0}, False
    beam = o.number("beam-size", "12", 1, moefile.MAX_BEAM)
    found = {field: o.number(key, default, least, most, float) for field, key, default, least, most in ROWS["REAL"]}
    normalize, penalty = found["normalize"], found["word_penalty"]
    meta.update({"decode.beam": beam, "decode.length_penalty": normalize, "decode.max_len_factor": found["factor"]})
    if penalty and normalize != 1:
        raise FormatError(f"{o.where}: word-penalty {penalty:g} is supported only with normalize 1, not "
                          f"{normalize:g}: set it to 0, and compare translations")
    if penalty:  # (sum - penalty * length) / length: the same order of hypotheses
        say(f"ignoring word-penalty {penalty:g}: with normalize 1 it only lowers all scores by {penalty:g}")
    if o.texts("weights") not in ([], ["1"], ["1.0"]) or len(o.texts("models")) > 1:
        raise FormatError(f"{o.where}: ensembles are not supported")
    unknown = o.flag("allow-unk")
    o.ignore(ROWS["UNUSED"])
    o.end()
    return meta, unknown


# ---- Tensors ---------------------------------------------------------------------------------------------------------

class Part:
    """Part of a matrix: rows [out, in], a vector, or zeros."""

    def __init__(self, shape, item=None, stored_as_shown=False):
        self.shape, self.item, self.as_shown = shape, item, stored_as_shown

    def codes(self):
        """Return (int8 [out, in], scale)."""
        if self.item is None:
            return np.zeros(self.shape, np.int8), np.float32(0)
        codes, multiplier = self.item.load()
        return codes.reshape(self.shape), np.float32(1) / np.float32(multiplier)

    def floats(self):
        if self.item is None:
            return np.zeros(self.shape, np.float32)
        x, multiplier = self.item.load()
        if multiplier is not None:
            return x.reshape(self.shape).astype(np.float32) * (np.float32(1) / np.float32(multiplier))
        if not np.isfinite(x).all():
            raise FormatError(f"{self.item.file}: tensor {self.item.name} contains values that are not finite")
        return x.reshape(self.shape) if self.as_shown or len(self.shape) < 2 else x.reshape(self.shape[::-1]).T

    def read(self, rows):
        x = self.floats()
        return (np.ascontiguousarray(x[at:at + rows]) for at in range(0, len(x), rows))


class Rows(hf.Rows):
    """hf.Rows with Q8 codes if all parts are intgemm8."""

    def __init__(self, parts):
        super().__init__((sum(p.shape[0] for p in parts), *parts[0].shape[1:]), [p.read for p in parts])
        kinds = {p.item.kind for p in parts if p.item}
        self.coded = kinds == {"intgemm8"}
        self.all_parts = parts

    def codes(self):
        """Return (int8 [n, k], scales float32 [n])."""
        found = [p.codes() for p in self.all_parts]
        return (np.concatenate([codes for codes, _ in found]),
                np.concatenate([np.full(len(codes), scale, np.float32) for codes, scale in found]))


class Builder(hf.Builder):
    """Take items by name and shape; Marian's matrices are [in, out]."""

    def take(self, name, *shape, as_shown=False):
        item = self.stored.get(name)
        if item is None:
            raise FormatError(f"{self.file}: tensor {name} is missing: the settings require shape {list(shape)}; "
                              f"{hf.AGAIN}")
        vector = len(shape) == 1
        if item.shape != ((1, *shape) if vector else shape):
            raise FormatError(f"{item.file}: tensor {name} has shape {list(item.shape)}: the settings require "
                              f"{list(shape)}")
        if item.kind != "float32" and (vector or not re.search("_W.?$|Wemb$", name) or name.endswith("_Wt")):
            raise FormatError(f"{item.file}: number format {item.kind} of tensor {name} is not supported")
        self.taken.add(name)
        return Part(shape if vector or as_shown else shape[::-1], item, as_shown)

    def put(self, name, *parts):
        self.tensors[name] = Rows(parts)

    def linear(self, name, rows, cols, *sources, bias=True):
        """Add the weight and bias of a linear layer; sources: (name of the weight, name of the bias)."""
        self.put(name + ".weight", *(self.take(w, cols, rows // len(sources)) for w, _ in sources))
        if bias:
            self.put(name + ".bias", *(self.take(b, rows // len(sources)) for _, b in sources))

    def sublayer(self, m, side, number, kind, **settings):
        """Add a sub-layer of layer `number` with its norm and, except for average attention, its products."""
        (block, after, before), = (row[1:] for row in ROWS["SUBLAYER"] if row[0] == kind)
        source, sizes = f"{side}_l{number}_{block}", {"width": m.width, "hidden": m.hidden[side]}
        name = self.layer(side, kind="attention" if kind == "raw" else kind, **settings,
                          norm="before" if m.before else "after", epsilon=1e-6, residual=1)
        self.norm(name, source + (before if m.before else after), m.width, "_pre" if m.before else "")
        if kind == "average":
            put_products(self, m, name, source)
        for row, part, sources, bias, rows, cols in ROWS["LINEAR"]:
            if row == kind and not (kind == "average" and m.average_plain):
                parts = [x.strip("-") for x in sources.split()]
                self.linear(f"{name}.{part}", len(parts) * sizes[rows], sizes[cols],
                            *((f"{source}_W{x}", f"{source}_b{x}") for x in parts), bias=bias)
        return name

    def norm_layer(self, side, source, width, suffix=""):
        self.norm(self.layer(side, kind="norm", epsilon=1e-6), source, width, suffix)

    def norm(self, name, source, width, suffix=""):
        for part, word in (".weight", "scale"), (".bias", "bias"):
            self.put(name + ".norm" + part, self.take(f"{source}_ln_{word}{suffix}", width))


def put_products(b, m, name, source):
    """Add the stacked products of average attention."""
    cols = m.width
    for i in range(1, m.average_depth):
        b.linear(f"{name}.up.{i - 1}", m.average_hidden, cols, (f"{source}_W{i}", f"{source}_b{i}"))
        cols = m.average_hidden
    if cols != m.width:
        b.linear(name + ".down", m.width, cols, tuple(f"{source}_{x}{m.average_depth}" for x in "Wb"))


def put_self(b, m, side, number):
    """Add the sub-layer that reads the side's own tokens."""
    if side == "decoder" and m.decoder == "average-attention":
        b.sublayer(m, side, number, "average", hidden=m.average_hidden, depth=m.average_depth,
                   activation=m.average_activation, gated=int(not m.average_plain))
    elif side == "decoder" and m.decoder == "rnn":
        b.sublayer(m, side, number, "ssru")
    elif m.raw:
        b.sublayer(m, side, number, "raw", heads=m.heads, raw=1)
    else:
        b.sublayer(m, side, number, "attention", heads=m.heads)


def put_side(b, m, side):
    if m.first:
        b.norm_layer(side, side + "_emb", m.width, "_pre")
    for i, number in enumerate(m.tied if side == "decoder" else range(1, m.layers["encoder"] + 1)):
        put_self(b, m, side, number)
        if side == "decoder":
            name = b.sublayer(m, side, number, "cross", heads=m.heads)
            if i + 1 == m.aligns:  # Marian aligns words by head 0 of this layer (guided alignment)
                b.meta.update({"align.layer": int(name.removeprefix("decoder.")), "align.heads": 1})
        b.sublayer(m, side, number, "ffn", hidden=m.hidden[side], activation=m.activation)
    if m.top:
        b.norm_layer(side, side + "_top", m.width)


def put_embeddings(b, m, where):
    """Add embeddings, positions and the output matrix. The start token follows the target tokens; its row is zero."""
    d, shared = m.width, m.all_tied or m.source_tied
    names = [TENSOR["shared"]] if shared else [TENSOR["source"], TENSOR["target"]]
    sizes = [b.stored[n].shape[0] if n in b.stored and len(b.stored[n].shape) == 2 else 0 for n in names]
    m.source_vocabulary, m.targets, m.shared = sizes[0], sizes[-1], shared
    if not all(4 <= n < moefile.MAX_VOCABULARY for n in sizes):
        raise FormatError(f"{where}: tensor {' or '.join(names)} is missing or not an embedding matrix")
    start = Part((1, d))
    if not shared:
        b.put("source.embedding.weight", b.take(names[0], sizes[0], d, as_shown=True))
    table = b.take(names[-1], sizes[-1], d, as_shown=True)
    b.put("embedding.weight" if shared else "target.embedding.weight", table, start)
    if not (m.all_tied or m.output_tied):
        own = TENSOR["output"]
        b.put("output.weight", b.take(own + "t", m.targets, d, as_shown=True) if own + "t" in b.stored
              else b.take(own, d, m.targets), start)
    if not m.no_bias:
        b.put("output.bias", b.take(TENSOR["output_bias"], m.targets), Part((1,)))
    if not m.trained:
        m.positions = TARGETS
        b.tensors["positions.weight"] = hf.Rows((TARGETS, d), [lambda rows: (
            hf.m2m_positions(at - 2, min(rows, TARGETS - at), d) for at in range(0, TARGETS, rows))])
        return
    table = TENSOR["positions"]
    m.positions = b.stored[table].shape[0] if table in b.stored and b.stored[table].shape else 0
    if not 2 <= m.positions <= moefile.LONGEST:
        raise FormatError(f"{where}: tensor {table} is missing or not a matrix of positions")
    b.put("positions.weight", b.take(table, m.positions, d, as_shown=True))


# ---- Vocabularies ----------------------------------------------------------------------------------------------------

def yml_vocabulary(path, size):
    """Return {piece: id} of a vocabulary in YAML or JSON."""
    if re.search(r"\.json(\.gz|\.zst)?\Z", path):
        pairs = list(object_of(packed.read(path, LARGEST_YAML, "a vocabulary"), path).items())
    else:
        pairs = parse_yaml(read_text(path, what="a vocabulary"), path)
    out, seen = {}, set()
    for piece, i in pairs:
        if isinstance(i, str) and re.fullmatch("[0-9]{1,9}", i):
            i = int(i)
        if type(i) is not int or not 0 <= i < size:
            raise FormatError(f"{path}: invalid id {short(i)} for {short(piece)}: the model has {size} tokens")
        if i in seen:
            raise FormatError(f"{path}: duplicate id {i}")
        seen.add(i)
        if i < 2 and piece in (("", "eos", "</s>"), ("", "UNK", "unk", "<unk>"))[i]:  # includes Nematus's names
            piece = ("</s>", "<unk>")[i]
        out[piece] = i
    for piece in ("</s>", "<unk>"):
        if piece not in out:
            raise FormatError(f"{path}: {piece} is missing")
    return out


def read_spm(path):
    """Return (bytes, pieces) of a SentencePiece model."""
    data = packed.read(path, hf_tokens.LARGEST_MODEL, "a SentencePiece model")
    return data, hf_tokens.parse_pieces(data, path)


def spm_ids(path, pieces, size):
    if len(pieces) != size:
        raise FormatError(f"{path}: {len(pieces)} pieces do not match the model's {size} tokens")
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    if len(ids) != size or "</s>" not in ids or not any(kind == hf_tokens.UNKNOWN for _, kind in pieces):
        raise FormatError(f"{path}: duplicate pieces, or </s> or the unknown piece is missing")
    ids.setdefault("<unk>", next(i for i, (_, kind) in enumerate(pieces) if kind == hf_tokens.UNKNOWN))
    return ids


PAIR = re.compile(r"(?:(?:src|trg)?vocab|lex\..*)\.([a-z]{2})([a-z]{2})\.")  # Firefox's names, e.g. vocab.enpt.spm


def tokens_meta(m, folder, paths, ids_only):
    """Return tokenizer.*, vocabulary.*, special tokens and languages; paths: source and target vocabulary."""
    sizes = m.source_vocabulary, m.targets
    if m.shared and paths[0] != paths[1]:
        raise FormatError(f"{paths[1]}: source and target share an embedding, but not a vocabulary")
    own = all(re.search(r"\.spm(\.gz|\.zst)?\Z", p) for p in paths)  # the vocabularies are SentencePiece models
    if own:
        models = [read_spm(p) for p in paths]
        ids = [spm_ids(p, pieces, size) for p, (_, pieces), size in zip(paths, models, sizes)]
    else:
        ids = [yml_vocabulary(p, size) for p, size in zip(paths, sizes)]
        cuts = [find(folder, x + "_pieces") for x in ("source", "target")]
        if not all(cuts) and not ids_only:
            unread = [x for x in sorted(os.listdir(folder)) if x.endswith((".bpe", ".spm"))]
            hf_tokens.no_tokeniser([x for x, cut in zip(("source.spm", "target.spm"), cuts) if not cut], unread)
        models = [read_spm(p) for p in cuts] if all(cuts) else None
    models = None if ids_only else models
    source, target = ids
    meta = {"token.eos": target["</s>"], "token.unk": target["<unk>"], "source.tag": 0, "tokenizer.kind": "none"}
    if models:
        meta.update({"tokenizer.kind": "sentencepiece", "tokenizer.model": models[0][0]})
        if models[1][0] != models[0][0]:
            meta["tokenizer.target_model"] = models[1][0]
    if not (m.shared and own):
        meta["vocabulary.pieces"] = hf_tokens.names_of(target, m.targets + 1, paths[1])
    if not m.shared:
        meta.update({"source.vocab.size": m.source_vocabulary, "source.token.eos": source["</s>"],
                     "source.token.unk": source["<unk>"],
                     "source.pieces": hf_tokens.names_of(source, m.source_vocabulary, paths[0])})
    codes = {p[2:-2]: i for p, i in sorted(source.items(), key=lambda x: x[1]) if re.fullmatch(">>[^<>]+<<", p)}
    if codes:
        meta.update({"languages.codes": list(codes), "languages.tags": np.array(list(codes.values()), np.int64),
                     "source.tag": 1})
    pairs = {x.groups() for name in os.listdir(folder) if (x := PAIR.match(name))}
    if len(pairs) == 1 and not codes:  # needed for pivot translation
        source, target = pairs.pop()
        meta.update({"languages.sources": [source], "languages.targets": [target]})
    return meta


# ---- Folders ---------------------------------------------------------------------------------------------------------

def find(folder, what):
    """Return a folder's only file of a kind in marian.inc, compressed or not, or None if there is none."""
    (names, excluded), = (row[1:] for row in ROWS["FILES"] if row[0] == what)
    found = sorted(x for x in os.listdir(folder)
                   if any(fnmatch.fnmatchcase(re.sub(r"\.(gz|zst)\Z", "", x), name) for name in names.split())
                   and not any(fnmatch.fnmatchcase(x, name) for name in excluded.split()))
    if len(found) > 1:
        raise FormatError(f"{folder} contains {' and '.join(found)}: keep one or specify the model file")
    return os.path.join(folder, found[0]) if found else None


def named(folder, name):
    """Return the path of a file named in a .yml file; the file may be compressed."""
    path = os.path.join(folder, os.path.basename(name))
    there = [path + x for x in ("", ".gz", ".zst") if os.path.lexists(path + x)]
    if not there:
        raise FormatError(f"{path} is missing: the decoder's settings require it")
    return there[0]


def find_shortlist(folder, o, say):
    """Return the path of the model's lexical shortlist, or None if missing."""
    if o is None:
        return find(folder, "shortlist")
    for name in o.texts("shortlist")[:1]:
        try:
            return named(folder, name)
        except FormatError as error:
            say(f"{error}: continuing without a shortlist")
    return None


def read_licence(folder, licence, say):
    """Return general.licence as given, else as found in the folder."""
    if licence:
        return licence
    path = find(folder, "licence")
    if path:
        return read_text(path).replace("\r\n", "\n")
    say("unknown licence: look up the licence of the model and pass it with --licence")
    return "Unknown: the converted files state no licence."


def read_marian(given, licence="", say=lambda message: None, ids_only=False):
    """Return the metadata and tensors of a model."""
    folder = given if os.path.isdir(given) else os.path.dirname(given) or "."
    if re.search(r"\.(ya?ml|json|spm)\Z", given):
        raise FormatError(f"{given}: not a Marian model: name its folder, or the .bin or .npz")
    config = find(folder, "decoder") or find(folder, "config")
    o = Options(read_text(config), config) if config else None
    lists = find_shortlist(folder, o, say)
    decode, unknown = decoder_meta(o, say)
    if folder != given:
        path = given
    elif o and o.texts("models"):
        path = named(folder, o.texts("models")[0])
    else:
        path = find(folder, "model")
        if not path:
            raise FormatError(f"{folder} contains no Marian model (.npz or .bin): copy the model's whole folder")
    file = packed.unpacked(path, LARGEST_MODEL, "a model")
    if o and o.texts("vocabs"):
        vocabs = [named(folder, x) for x in o.texts("vocabs")]
    else:
        one = find(folder, "vocabulary")
        vocabs = [one, one] if one else [find(folder, x + "_vocabulary") for x in ("source", "target")]
    if len(vocabs) != 2 or not all(vocabs):
        raise FormatError(f"{folder}: found {sum(map(bool, vocabs))} vocabularies, expected two")
    items, settings = (read_npz if re.search(r"\.npz(\.gz|\.zst)?\Z", path) else read_bin)(file, path)
    if settings is None:
        raise FormatError(f"{path}: {SETTINGS}, the model's description, is missing")
    try:
        settings = Options(bytes(settings).decode(), f"{os.path.basename(path)}: {SETTINGS}")
    except UnicodeDecodeError:
        raise FormatError(f"{path}: {SETTINGS} is not UTF-8") from None
    m, b = read_model(settings), Builder(items, path)
    put_embeddings(b, m, path)
    for side in ("encoder", "decoder"):
        put_side(b, m, side)
    for name, item in items.items():
        if name not in b.taken:
            raise FormatError(f"{path}: unexpected tensor {name} {list(item.shape)}: not described by the settings")
    tokens = tokens_meta(m, folder, vocabs, ids_only)
    with open_regular(path) as stored:
        digest = hashlib.file_digest(stored, "sha256").hexdigest()
    limit = m.positions
    meta = {"general.licence": read_licence(folder, licence, say), "origin.file": os.path.basename(path),
            "origin.sha256": digest, "origin.version": m.version, "vocab.size": m.targets + 1, "model.width": m.width,
            "embedding.scale": 1.0 if m.trained else math.sqrt(m.width), "token.bos": m.targets,
            "token.never": np.array([m.targets], np.int64), "source.bos": 0, "source.eos": 1,
            "limit.source": min(SOURCES, limit), "limit.target": limit}
    if not unknown:
        meta["token.suppressed"] = np.array([tokens["token.unk"]], np.int64)
    files = [path, *vocabs, *(x for x in (config, lists) if x)]
    return types.SimpleNamespace(meta={**meta, **b.meta, **decode, **tokens}, tensors=b.tensors, shortlist=lists,
                                 identity=hf.identity(files))
