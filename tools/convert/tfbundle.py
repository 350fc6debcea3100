"""Read TensorFlow checkpoints (the bundle format of TensorFlow 1 and 2) without TensorFlow.

    tensors = tfbundle.open_bundle("translate.ckpt-340000")   # by name; .shape, .dtype, .array()

PREFIX.index is a sorted table in LevelDB's format that maps tensor names to records; PREFIX.data-00000-of-00001 and so
on contain the data. The input is untrusted: lengths are checked before use; blocks and tensors are verified by CRC-32C.

  table:  blocks, each followed by a compression byte (0: none) and a masked CRC; the last 48 bytes of the file are two
          handles (offset and size of the meta-index and of the index block, as varints), zeros and the magic number
  block:  entries, then u32 restart offsets and their number; an entry is the varints shared, fresh and value length,
          `fresh` bytes of the key, which follow the first `shared` bytes of the previous key, and the value
  index:  last key of a block -> its handle
  records (Protocol Buffers): "" -> header { 1 shards, 2 endianness },
          name -> { 1 type, 2 shape { 2 dimension { 1 size } }, 3 shard, 4 offset, 5 bytes, 6 CRC (fixed32), 7 slices }
"""
import os
import struct

import numpy as np

from moefile import FormatError, open_regular

TABLE_MAGIC = 0xDB4775248B80FB57
TYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 10: "?", 14: "bfloat16", 19: "<f2"}
LARGEST_INDEX = 1 << 26
MAX_NAME, MAX_DIMENSIONS = 4096, 8

# ---- CRC-32C ---------------------------------------------------------------------------------------------------------
# Table-driven, two bytes at a time, in many lanes in parallel: lane i computes the CRC of the i-th part of the data.
# The CRCs of the parts are then merged in pairs: appending n bytes is a linear map of the 32 bits of a CRC.


def byte_table():
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ (np.uint32(0x82F63B78) & (np.uint32(0) - (table & 1)))
    return table


BYTE = byte_table()
LOW = np.arange(65536, dtype=np.uint32)   # CRC of the two low bytes of a word ...
for _ in range(4):
    LOW = BYTE[LOW & 255] ^ (LOW >> 8)    # ... followed by two more bytes
HIGH = np.arange(65536, dtype=np.uint32)
for _ in range(2):
    HIGH = BYTE[HIGH & 255] ^ (HIGH >> 8)


def zeros_map(count):
    """Return the columns of the linear map that `count` appended zero bytes apply to a CRC."""
    columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
    step = BYTE[columns & 255] ^ (columns >> 8)  # map of one zero byte
    while count:
        if count & 1:
            columns = apply_map(step, columns)
        step, count = apply_map(step, step), count >> 1
    return columns


def apply_map(columns, values):
    out = np.zeros_like(values)
    for bit in range(32):
        out ^= columns[bit] & (np.uint32(0) - ((values >> np.uint32(bit)) & np.uint32(1)))
    return out


def crc32c(data):
    data, crc = memoryview(data), 0xFFFFFFFF
    lanes = 1
    while lanes < 16384 and lanes * 256 <= len(data):
        lanes *= 2
    length = len(data) // lanes // 4 * 4 if lanes > 1 else 0
    if length:
        words = np.frombuffer(data, "<u4", lanes * length // 4).reshape(lanes, length // 4)
        sums = np.zeros(lanes, np.uint32)
        sums[0] = crc
        for first in range(0, length // 4, 256):  # transpose in strips to make lanes contiguous
            for word in np.ascontiguousarray(words[:, first:first + 256].T):
                sums = sums ^ word
                sums = LOW[sums & 0xFFFF] ^ HIGH[sums >> 16]
        while len(sums) > 1:
            sums = apply_map(zeros_map(length), sums[::2]) ^ sums[1::2]
            length *= 2
        crc = int(sums[0])
    for byte in data[length:]:
        crc = int(BYTE[(crc ^ byte) & 255]) ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked(crc):
    """Return the stored form of a CRC, rotated and offset, because the CRC of a CRC is weak."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


# ---- Varints and records ---------------------------------------------------------------------------------------------

def varint(data, at):
    """Decode a varint: return (value, end position)."""
    value = shift = 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    raise FormatError("damaged number in the index")


def fields(data):
    """Yield (number, value) of a record's fields. Strings, messages and fixed-size numbers are bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if not key >> 3:
            raise FormatError("damaged record in the index")
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 in (1, 2, 5):
            size, at = (8, at) if key & 7 == 1 else (4, at) if key & 7 == 5 else varint(data, at)
            if size > len(data) - at:
                raise FormatError("damaged record in the index")
            value = data[at:at + size]
            at += size
        else:
            raise FormatError("damaged record in the index")
        yield key >> 3, value


def number(value, name):
    if not isinstance(value, int):
        raise FormatError(f"damaged record for {name}")
    return value


# ---- The index -------------------------------------------------------------------------------------------------------

def place(handle):
    """Decode a handle: (offset, size)."""
    offset, at = varint(handle, 0)
    return offset, varint(handle, at)[0]


def block(data, offset, size):
    """Yield the keys and values of a block."""
    if offset > len(data) or size + 5 > len(data) - offset or size < 4:
        raise FormatError("the index is truncated or damaged: block out of range")
    whole = data[offset:offset + size + 1]
    if masked(crc32c(whole)) != struct.unpack_from("<I", data, offset + size + 1)[0]:
        raise FormatError("the index is damaged: block checksum mismatch")
    if whole[-1] != 0:
        raise FormatError("compressed indexes are not supported")
    restarts = struct.unpack_from("<I", whole, size - 4)[0]
    if restarts > (size - 4) // 4:
        raise FormatError("the index is damaged: too many restart offsets")
    whole, at, key = whole[:size - 4 - 4 * restarts], 0, b""
    while at < len(whole):
        shared, at = varint(whole, at)
        fresh, at = varint(whole, at)
        length, at = varint(whole, at)
        if shared > len(key) or fresh + length > len(whole) - at or shared + fresh > MAX_NAME:
            raise FormatError("the index is damaged: an entry exceeds its block, or its name is too long")
        key = key[:shared] + whole[at:at + fresh]
        at += fresh
        yield key, whole[at:at + length]
        at += length


def table(path):
    """Return the index's records by key."""
    size = os.path.getsize(path)
    if not 48 <= size <= LARGEST_INDEX:
        raise FormatError(f"{path}: not an index: {size} bytes")
    with open_regular(path) as file:
        data = file.read(size)
    if len(data) < size:
        raise FormatError(f"{path}: truncated while being read")
    if struct.unpack_from("<Q", data, size - 8)[0] != TABLE_MAGIC:
        raise FormatError(f"{path}: not an index, or truncated: no magic number")
    handles, records, end, names = data[size - 48:size - 8], {}, 0, 0
    _, at = varint(handles, 0)
    _, at = varint(handles, at)
    for _, handle in block(data, *place(handles[at:])):
        offset, length = place(handle)
        if offset < end:
            raise FormatError(f"{path} is damaged: a block overlaps the previous one")
        end = offset + length
        for key, value in block(data, offset, length):
            records[key], names = value, names + len(key)
            if names > 16 * size + (1 << 20):  # shared prefixes are stored once, so names can exceed the file
                raise FormatError(f"{path} is damaged: the names are longer than is plausible for the file size")
    return records


# ---- Tensors ---------------------------------------------------------------------------------------------------------

class Tensor:
    """A tensor in a data file; `array` reads the data and verifies the checksum. bfloat16 becomes float32."""

    def __init__(self, name, path, dtype, shape, offset, crc):
        self.name, self.path, self.dtype, self.shape, self.offset, self.crc = name, path, dtype, shape, offset, crc

    def array(self):
        dtype = np.dtype("<u2" if self.dtype == "bfloat16" else self.dtype)
        count = int(np.prod(self.shape, dtype=object))
        with open_regular(self.path) as file:
            file.seek(self.offset)
            data = file.read(count * dtype.itemsize)
        if len(data) < count * dtype.itemsize:
            raise FormatError(f"tensor {self.name} exceeds {os.path.basename(self.path)}: truncated")
        if masked(crc32c(data)) != self.crc:
            raise FormatError(f"tensor {self.name}: checksum mismatch; {os.path.basename(self.path)} is damaged")
        array = np.frombuffer(data, dtype).reshape(self.shape)
        return (array.astype(np.uint32) << 16).view(np.float32) if self.dtype == "bfloat16" else array


def read_shape(data, name):
    if not isinstance(data, bytes):
        raise FormatError(f"damaged record for {name}")
    shape = []
    for field, dimension in fields(data):
        if field == 2 and isinstance(dimension, bytes):
            shape.append(next((number(value, name) for key, value in fields(dimension) if key == 1), 0))
        elif field == 3:
            raise FormatError(f"tensor {name} has no shape")
    if len(shape) > MAX_DIMENSIONS or max(shape, default=0) >= 1 << 40:
        raise FormatError(f"tensor {name} has an invalid shape")
    return tuple(shape)


def open_bundle(prefix):
    """Return the tensors by name. The index is read immediately, the data on demand."""
    prefix = prefix[:-len(".index")] if prefix.endswith(".index") else prefix
    records = table(prefix + ".index")
    header = dict(fields(records.pop(b"", b"")))
    shards = number(header.get(1, 0), "the header")
    if not 1 <= shards <= 99999 or header.get(2, 0) != 0:
        raise FormatError(f"{prefix}.index has no header, or is big-endian")
    tensors, spans = {}, []
    for key, record in records.items():
        name = key.decode("utf-8", "backslashreplace")
        f = dict(fields(record))
        if 7 in f:
            raise FormatError(f"tensor {name} is stored in slices, which is not supported")
        shape, kind = read_shape(f.get(2, b""), name), TYPES.get(f.get(1))
        if kind is None:
            raise FormatError(f"tensor {name} has unsupported type {f.get(1)}")
        shard, offset, size = (number(f.get(i, 0), name) for i in (3, 4, 5))
        path = f"{prefix}.data-{shard:05d}-of-{shards:05d}"
        wanted = int(np.prod(shape, dtype=object)) * (2 if kind == "bfloat16" else np.dtype(kind).itemsize)
        if shard >= shards or size != wanted or not isinstance(f.get(6, b""), bytes) or len(f.get(6, b"")) != 4:
            raise FormatError(f"damaged record for tensor {name}")
        if not os.path.lexists(path):
            raise FormatError(f"{path} is missing")
        if offset > os.path.getsize(path) or size > os.path.getsize(path) - offset:
            raise FormatError(f"tensor {name} exceeds {os.path.basename(path)}: truncated")
        spans.append((shard, offset, offset + size, name))
        tensors[name] = Tensor(name, path, kind, shape, offset, struct.unpack("<I", f[6])[0])
    spans.sort()
    for before, after in zip(spans, spans[1:]):
        if after[0] == before[0] and after[1] < before[2]:
            raise FormatError(f"damaged: tensors {before[3]} and {after[3]} overlap")
    return tensors
