"""The model file: reading, writing, number formats, and the contents of a model.

    meta, tensors = read(path)              # metadata as Python values, tensors by name
    tensors["encoder.1.w_x"].array()        # dequantised float32 [out, in]
    tensors["encoder.2.experts"].array()    # (up [E, hidden, width], down [E, width, hidden])
    write_model(path, meta, tensors)        # atomically

The container format accepts any metadata and tensors, and test data uses it too; `describe` and `shapes` define models.
Reading checks the whole file and raises FormatError with the position of the first error.
"""
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import struct
import types
import typing
import zlib

import numpy as np

MAGIC, VERSION, HEADER = b"MOEMODEL", 2, 64  # as moe.c, write version 2, or LOW_VERSION with Q3 or Q2; read 1 too
LOW_VERSION = 3
INT, REAL, TEXT, BYTES, INTS, REALS, TEXTS = range(1, 8)
F32, F16, BF16, Q8, Q4, Q4M, Q8B, Q3, Q2 = range(9)
TYPES = {"f32": F32, "f16": F16, "bf16": BF16, "q8": Q8, "q4": Q4, "q4m": Q4M, "q8b": Q8B, "q3": Q3, "q2": Q2}
BITS = {Q8: 8, Q4: 4, Q4M: 4, Q8B: 8, Q3: 3, Q2: 2}  # per code
LEVELS = {Q3: range(-4, 4), Q2: (-8, -3, 1, 6)}
SUBS = {Q4: (-15, 15), Q4M: (0, 16), Q3: (-30, 30), Q2: (-15, 15)}  # the smallest and largest group scales
SIDES = {Q8: 0, Q4: 2, Q4M: 6, Q8B: 2, Q3: 2, Q2: 2}  # bytes stored besides the codes, per 64 columns of a row
MATRIX, EXPERTS, GATED = 0, 1, 2  # layouts: number of matrices before the down matrix of a slab
TENSOR_ALIGN, EXPERT_ALIGN = 64, 4096
LARGEST_TEXT = 1 << 26  # maximum bytes of a vocabulary, a list of merges or a licence
MAX_LAYERS, MAX_TEXTS = 256, 65536  # these limits and those in the next line are from moe.c
MAX_VOCABULARY, MAX_BEAM, LONGEST = (2**31 - 1) // 2, 64, 1 << 16
Q4_GROUP = 32


class FormatError(ValueError):
    """A file, or data to write, violates the format."""


PAGE = "a web page, not the file itself: download it again"
POINTER = "a Git LFS pointer, not the file itself: run git lfs pull, or download the file"
IMPOSTORS = {b"version https://git-lfs.github.com/spec/": POINTER, b"<!doctype html": PAGE, b"<html": PAGE,
             b"<?xml": PAGE}


def open_regular(path):
    """Open a regular file, or a link to one, for reading. A pipe might block, and /dev/zero never ends."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if not os.path.lexists(path):
            raise
        raise FormatError(f"{path}: a link to a missing file: copy the model with cp -rL") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FormatError(f"{path}: not a regular file")
    head = os.pread(descriptor, 64, 0).lower()  # keeps the offset, which zstd inherits
    for begin, what in IMPOSTORS.items():
        if head.startswith(begin):
            os.close(descriptor)
            raise FormatError(f"{path}: {what}")
    return open(descriptor, "rb")


def read_bounded(path, most, what):
    """Read a regular file of at most `most` bytes; what: type of the file, for the message."""
    with open_regular(path) as file:
        data = file.read(most + 1)
        if len(data) > most:
            raise FormatError(f"{path}: {os.fstat(file.fileno()).st_size} bytes exceed the limit of {most} for {what}")
    return data


def round_up(value, multiple):
    return -(-value // multiple) * multiple


# ---- Number formats of matrices [n, k] -------------------------------------------------------------------------------

def q8_quantise(w):
    """Return codes int8 [n, k] and scales float32 [n], one per row, of a float32 matrix [n, k]."""
    w = np.asarray(w, np.float32)
    amax = np.abs(w).max(1, initial=np.float32(0))
    some = amax > 0
    inverse, scale = np.zeros_like(amax), np.zeros_like(amax)
    with np.errstate(over="ignore"):
        inverse[some] = np.float32(127) / amax[some]
    scale[some] = amax[some] / np.float32(127)
    if not np.isfinite(inverse).all():
        raise FormatError("a row's largest weight is too small to quantise (below 4e-37)")
    codes = np.clip(np.rint(w * inverse[:, None]), -127, 127).astype(np.int8)
    return codes, scale


def squared_error(difference):
    """Return sums of squares [groups] of numbers [32, groups], added in moe.c's order. Overwrites the numbers."""
    np.multiply(difference, difference, out=difference)
    error = difference[0].copy()
    for row in difference[1:]:
        error += row
    return error


def q4_group_codes(u):
    """Return codes int8 [32, groups] and group scales (subs) int8 [groups] of numbers u [32, groups], given in units of
    row scales. Among the subs near the one that maps the largest number to -8, choose the one with the least squared
    error, like moe_quantise_group in moe.c."""
    square = u * u
    extreme = np.take_along_axis(u, square.argmax(0)[None], 0)[0]
    around = np.rint(extreme * np.float32(-0.125))
    least, codes = np.full(u.shape[1], np.finfo(np.float32).max, np.float32), np.zeros(u.shape, np.float32)
    subs = np.zeros(u.shape[1], np.float32)
    for sub in range(-2, 3):
        for side in (1, -1):
            s = (around + np.float32(sub)) * np.float32(side)
            there = (s != 0) & (np.abs(s) <= 15)
            tried = np.clip(np.rint(u / np.where(there, s, np.float32(1))), -8, 7)
            error = squared_error(u - tried * s)
            better = there & (error < least)
            least = np.where(better, error, least)
            subs = np.where(better, s, subs)
            np.copyto(codes, tried, where=better)
    return codes.astype(np.int8), subs.astype(np.int8)


def low_group_codes(u, levels, most):
    """Return codes int8 [32, groups], which number the levels, and subs int8 [groups] in [-most, most] of numbers u
    [32, groups], like moe_quantise_group in moe.c for Q3 and Q2. Zeros have the sub 0."""
    levels = np.array(levels, np.float32)
    least, codes, subs = squared_error(u.copy()), np.zeros(u.shape, np.int8), np.zeros(u.shape[1], np.float32)
    for step in range(1, most + 1):
        for side in (1, -1):
            s = np.float32(step * side)
            v = u / s
            tried = sum(v >= (a + b) / 2 for a, b in zip(levels[:-1], levels[1:])).astype(np.int8)
            error = squared_error(u - levels[tried] * s)
            better = error < least
            least, subs = np.where(better, error, least), np.where(better, s, subs)
            np.copyto(codes, tried, where=better)
    return codes, subs.astype(np.int8)


def q4_quantise(w, encode=q4_group_codes):
    """Return codes int8 [n, columns], group scales int8 [n, columns / 32] and row scales float32 [n] of w [n, k]."""
    codes, subs, scale = in_groups(w, 120, Q4_GROUP, encode)
    subs[:, -(-w.shape[1] // Q4_GROUP):] = 0
    subs[scale == 0] = 0
    return codes, subs, scale


def in_groups(w, largest, group, encode):
    """Scale the rows of w [n, k] to at most `largest`, pad them, and encode all groups of numbers. Return the codes
    [n, columns], each group's other data [n, groups, ...] and the scales [n]."""
    n, k = w.shape
    scale = np.abs(w).max(1, initial=np.float32(0)) / np.float32(largest)
    scale[scale < np.finfo(np.float32).tiny] = 0
    u = np.zeros(q8_padded(n, k), np.float32)[:n]
    np.divide(w, scale[:, None], out=u[:, :k], where=scale[:, None] > 0)
    u = u.reshape(-1, group).T
    step = 65536 // group  # chunks that fit in the cache
    codes, parts = zip(*(encode(np.ascontiguousarray(u[:, at:at + step])) for at in range(0, u.shape[1], step)))
    parts = np.concatenate(parts, -1).T
    return np.concatenate(codes, 1).T.reshape(n, -1), parts.reshape(n, -1, *parts.shape[1:]), scale


def group_steps(u):
    """Return (steps, minima) of groups u [32, groups], like moe_group_step in moe.c. If a group's numbers are on a
    grid of at most 16 levels, return the step of the grid; otherwise spread 16 levels over the range of the numbers."""
    u = np.sort(u, axis=0)
    low, extent, between = u[0], u[-1] - u[0], np.diff(u, axis=0)
    gap = np.where(between > extent * np.float32(0.03125), between, extent).min(0)
    some = extent > 0
    levels = np.rint(np.divide(extent, gap, out=np.ones_like(extent), where=some))
    step = np.divide(extent, levels, out=np.ones_like(extent), where=some)
    level = (u - low) / step
    on_grid = (levels <= 15) & (np.abs(level - np.rint(level)) < np.float32(0.03125)).all(0)
    return np.where(some, np.where(on_grid, step, extent / np.float32(15)), np.float32(0)), low


def q4m_blocks(u):
    """Return codes int8 [64, blocks] and their SIDES bytes int8 [6, blocks], given numbers u [64, blocks] in units of
    the row scales; like moe_quantise_row_q4m in moe.c."""
    one, blocks = np.float32(1), u.shape[1]
    halves = u.reshape(2, 32, blocks)
    steps, lows = (np.stack(x) for x in zip(*map(group_steps, halves)))
    largest, least = np.abs(u).max(0), np.full(blocks, np.finfo(np.float32).max, np.float32)
    codes, sides = np.zeros(u.shape, np.int8), np.zeros((6, blocks), np.int8)
    for most in range(16, 7, -1):
        half = np.maximum(steps.max(0) / np.float32(most), largest / np.float32(127)).astype("<f2")
        there, part = half > 0, np.where(half > 0, half.astype(np.float32), one)
        subs = np.clip(np.rint(steps / part), 1, 16)
        mids = np.clip(np.rint((lows + np.float32(8) * steps) / part), -127, 127)
        first, last = np.maximum(-((127 + mids) // subs), -8)[:, None], np.minimum((127 - mids) // subs, 7)[:, None]
        tried = np.clip(np.rint((halves / part - mids[:, None]) / subs[:, None]), first, last)
        error = squared_error((halves - (tried * subs[:, None] + mids[:, None]) * part).reshape(u.shape))
        better = there & (error < least)
        least = np.where(better, error, least)
        np.copyto(codes, tried.reshape(u.shape).astype(np.int8), where=better)
        part = half.view(np.int8).reshape(blocks, 2).T
        np.copyto(sides, np.concatenate([subs.astype(np.int8), mids.astype(np.int8), part]), where=better)
    return codes, sides


def q4m_quantise(w):
    """Return codes int8 [n, columns], SIDES bytes int8 [n, columns / 64, 6] and scales float32 [n] of w [n, k]."""
    return in_groups(w, 16, 64, q4m_blocks)


def q8b_quantise(w):
    """Return codes int8 [n, columns], block scales F16 [n, columns / 64] and row scales float32 [n] (powers of two) of
    a float32 matrix [n, k], like moe_quantise_row_q8b in moe.c."""
    n, k = w.shape
    columns, most = q8_padded(n, k)[1], np.float32(127)
    scale = ((np.abs(w).max(1, initial=np.float32(0)) / most).view(np.uint32) & 0x7f800000).view(np.float32)
    blocks = np.zeros((n, columns), np.float32)
    blocks[:, :k] = w * (scale[:, None] > 0)
    blocks = blocks.reshape(n, columns // 64, 64)
    parts = (np.abs(blocks).max(2) / most / np.where(scale > 0, scale, np.float32(1))[:, None]).astype("<f2")
    step = (parts.astype(np.float32) * scale[:, None])[:, :, None]
    codes = np.zeros(blocks.shape, np.float32)
    np.divide(blocks, step, out=codes, where=step > 0)
    return np.clip(np.rint(codes), -127, 127).astype(np.int8).reshape(n, columns), parts, scale


def q8_padded(n, k):
    return round_up(n, 16), round_up(k, 64)


def blob_bytes(type, n, k):
    """Return the size of a matrix [n, k] in a number format, in bytes."""
    return sum(blob_regions(type, n, k))


def encode_blob(w, type):
    """Encode a float32 matrix [n, k], or a vector [n] (F32 only)."""
    w = np.ascontiguousarray(w, np.float32)
    if type == F32:
        return w.astype("<f4").tobytes()
    if type == F16:
        with np.errstate(over="ignore"):
            half = w.astype("<f2")
        if not np.isfinite(half).all():
            raise FormatError("a weight is too large for f16")
        return half.tobytes()
    if type == BF16:
        bits = w.view(np.uint32)
        rounded = (bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16  # rounds to nearest, ties to even
        if not np.isfinite(w).all() or (rounded & 0x7F80 == 0x7F80).any():
            raise FormatError("a weight is too large for bf16")
        return rounded.astype("<u2").tobytes()
    if not np.isfinite(w).all():
        raise FormatError("a weight is not finite")
    n, k = w.shape
    if type == Q8:
        return encode_codes(*q8_quantise(w))
    rows, columns = q8_padded(n, k)
    if type == Q8B:
        codes, parts, scale = q8b_quantise(w)
        return encode_codes(codes, scale, parts)
    codes, scale = np.zeros((rows, columns), np.int8), np.zeros(rows, "<f4")
    sides = np.zeros((rows, columns // 64, SIDES[type]), np.int8)
    if type == Q4:
        codes[:n], subs, scale[:n] = q4_quantise(w)
        sides[:n] = subs.reshape(n, -1, 2)
    elif type in LEVELS:
        codes[:n], subs, scale[:n] = q4_quantise(w, lambda u: low_group_codes(u, LEVELS[type], SUBS[type][1]))
        sides[:n] = subs.reshape(n, -1, 2)
        sums = int8_codes(np.array(LEVELS[type])[codes], sides).sum(1, dtype=np.int32).astype("<i4")
        return low_bytes(codes, BITS[type]) + side_bytes(sides) + scale.tobytes() + sums.tobytes()
    else:
        codes[:n], sides[:n], scale[:n] = q4m_quantise(w)
    sums = int8_codes(codes, sides).sum(1, dtype=np.int32).astype("<i4")
    codes[:n] += 8
    nibbles = codes.view(np.uint8).reshape(rows // 16, 16, columns // 8, 2, 4)
    pairs = (nibbles[:, :, :, 0] | nibbles[:, :, :, 1] << 4).transpose(0, 2, 1, 3)
    return pairs.tobytes() + side_bytes(sides) + scale.tobytes() + sums.tobytes()


def low_bytes(codes, bits):
    """Encode codes int8 [rows, columns] of Q3 or Q2: 32 columns of 16 rows, 8 units of 4, in [bits][16][4] bytes."""
    rows, columns = codes.shape
    units = codes.view(np.uint8).reshape(rows // 16, 16, columns // 32, 8, 4).transpose(3, 0, 2, 1, 4)
    if bits == 2:
        lines = [sum(units[4 * line + i] << 2 * i for i in range(4)) for line in range(2)]
    else:
        lines = [units[2 * line] | units[2 * line + 1] << 3 for line in range(3)]
        lines = [lines[0] | units[6] << 6, lines[1] | units[7] << 6,
                 lines[2] | units[6] >> 2 << 6 | units[7] >> 2 << 7]
    return np.stack(lines, 2).astype(np.uint8).tobytes()


def low_codes(data, rows, columns, type):
    """Like q8_codes, for Q3 and Q2 (no block scales)."""
    bits = BITS[type]
    lines = np.frombuffer(data, np.uint8, rows * columns * bits // 8).reshape(rows // 16, columns // 32, bits, 16, 4)
    if bits == 2:
        units = [lines[:, :, i // 4] >> i % 4 * 2 & 3 for i in range(8)]
    else:
        units = [lines[:, :, i // 2] >> i % 2 * 3 & 7 for i in range(6)]
        units += [lines[:, :, i - 6] >> 6 | (lines[:, :, 2] >> i & 1) << 2 for i in (6, 7)]
    codes = np.stack(units, 2).transpose(0, 3, 1, 2, 4).reshape(rows, columns)
    side = read_sides(data, rows, columns // 64, SIDES[type], lines.size)
    check_subs(side, type)
    return int8_codes(np.array(LEVELS[type])[codes], side), None, lines.size + side.size


def check_subs(side, type):
    least, most = SUBS[type]
    if (side[:, :, :2] < least).any() or (side[:, :, :2] > most).any():
        raise FormatError(f"a group scale is out of range ({least} to {most})")


def int8_codes(codes, sides):
    """Return the integer weights of products, int32 [rows, columns]: codes times group scales, plus offsets for Q4M."""
    groups = codes.reshape(len(codes), -1, 2, 32) * sides[:, :, :2, None].astype(np.int32)
    if sides.shape[2] > 2:
        groups += sides[:, :, 2:4, None]
    return groups.reshape(codes.shape)


def encode_codes(given, scales, parts=None):
    """Encode codes int8 [n, k] and scales float32 [n] as Q8, or with block scales F16 [n, columns / 64] as Q8B."""
    n, k = given.shape
    rows, columns = q8_padded(n, k)
    codes, scale = np.zeros((rows, columns), np.int8), np.zeros(rows, "<f4")
    codes[:n, :k], scale[:n] = given, scales
    sums = codes.sum(1, dtype=np.int32).astype("<i4")
    tiles = codes.reshape(rows // 16, 16, columns // 4, 4).transpose(0, 2, 1, 3)
    planes = np.zeros((rows, columns // 64, 2 * (parts is not None)), np.int8)
    if parts is not None:
        planes[:n] = parts.view(np.int8).reshape(n, -1, 2)
    return tiles.tobytes() + side_bytes(planes) + scale.tobytes() + sums.tobytes()


def side_bytes(sides):
    """Encode the SIDES bytes per 64 columns, int8 [rows, columns / 64, bytes], interleaving 16 rows."""
    return sides.reshape(len(sides) // 16, 16, -1).transpose(0, 2, 1).tobytes()


def read_sides(data, rows, blocks, sides, at):
    """Decode the output of side_bytes."""
    found = np.frombuffer(data, np.int8, rows * blocks * sides, at).reshape(rows // 16, -1, 16)
    return found.transpose(0, 2, 1).reshape(rows, blocks, sides)


def parts_of(sides):
    """Return the block scales, float32 [rows, columns / 64], which the last two SIDES bytes store as F16."""
    parts = np.ascontiguousarray(sides[:, :, -2:]).view("<f2")[:, :, 0].astype(np.float32)
    if not (np.isfinite(parts).all() and (parts >= 0).all()):
        raise FormatError("a block scale is negative or not finite")
    return parts


def blob_regions(type, n, k):
    """Return the sizes of the regions of an encoded matrix. Each has the rows in order, singly or in groups of 16."""
    if type not in SIDES:
        return [n * k * (4 if type == F32 else 2)]
    rows, columns = q8_padded(n, k)
    sides = [rows * columns // 64 * SIDES[type]] if SIDES[type] else []
    return [rows * columns * BITS[type] // 8, *sides, 4 * rows, 4 * rows]


def encode_blocks(blocks, type, n, k):
    """Yield the bytes of encode_blob for a matrix given as consecutive blocks of rows. All blocks except the last have
    a multiple of 16 rows. Regions after the codes are buffered until the end."""
    behind, done = [], 0
    for block in blocks:
        done += len(block)
        if len(block) % 16 and done < n or done > n or block.shape[1:] != (k,):
            raise FormatError(f"unexpected block of {len(block)} rows in a matrix with {n} rows")
        data, at = encode_blob(block, type), 0
        parts = blob_regions(type, *block.shape)
        for i, size in enumerate(parts):
            if i == 0:
                yield data[:size]
            else:
                behind += [[] for _ in range(len(behind), i)]
                behind[i - 1].append(data[at:at + size])
            at += size
    if done != n:
        raise FormatError(f"{done} rows, expected {n}")
    for part in behind:
        yield b"".join(part)


def encode_vector(x):
    return encode_blob(x, F32)


def decode_blob(data, type, n, k):
    """Decode a float32 matrix [n, k]."""
    if type == F32:
        return np.frombuffer(data, "<f4").astype(np.float32).reshape(n, k)
    if type == F16:
        return np.frombuffer(data, "<f2").astype(np.float32).reshape(n, k)
    if type == BF16:
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(n, k)
    rows, columns = q8_padded(n, k)
    decode = low_codes if type in LEVELS else q8_codes if type in (Q8, Q8B) else q4_codes
    codes, parts, at = decode(data, rows, columns, type)
    scale = np.frombuffer(data, "<f4", rows, at)
    sums = np.frombuffer(data, "<i4", rows, at + 4 * rows)
    if (codes.sum(1, dtype=np.int32) != sums).any():
        raise FormatError("codes do not match their sums")
    if codes[n:].any() or (type not in (Q4M, Q2) and codes[:, k:].any()) or scale[n:].any():
        raise FormatError("padding is not zero")
    if not (np.isfinite(scale).all() and (scale >= 0).all()):
        raise FormatError("a scale is negative or not finite")
    scales = scale[:, None] if parts is None else np.repeat(scale[:, None] * parts, 64, axis=1)[:n, :k]
    return codes[:n, :k].astype(np.float32) * scales[:n]


def q8_codes(data, rows, columns, type):
    """Return (int8 [rows, columns], block scales [rows, columns / 64] or None for Q8, bytes read). Tiles are 16 x 4."""
    tiles = np.frombuffer(data, np.int8, rows * columns).reshape(rows // 16, columns // 4, 16, 4)
    codes = tiles.transpose(0, 2, 1, 3).reshape(rows, columns)
    if (codes == -128).any():
        raise FormatError("a Q8 code is -128")
    side = read_sides(data, rows, columns // 64, SIDES[type], rows * columns)
    return codes, parts_of(side) if type == Q8B else None, rows * columns + side.size


def q4_codes(data, rows, columns, type):
    """Like q8_codes, for Q4 (no block scales) and Q4M. A byte holds columns 8g + i (low nibble) and 8g + 4 + i."""
    pairs = np.frombuffer(data, np.uint8, rows * columns // 2).reshape(rows // 16, columns // 8, 16, 4)
    nibbles = np.stack([pairs & 15, pairs >> 4], axis=2).astype(np.int32) - 8  # [rows/16, columns/8, 2, 16, 4]
    codes = nibbles.transpose(0, 3, 1, 2, 4).reshape(rows, columns)
    side = read_sides(data, rows, columns // 64, SIDES[type], rows * columns // 2)
    check_subs(side, type)
    codes, end = int8_codes(codes, side), rows * columns // 2 + side.size
    if (np.abs(codes) > 127).any():
        raise FormatError("a code is out of range (-127 to 127)")
    return codes, parts_of(side) if type == Q4M else None, end


# ---- Tensors ---------------------------------------------------------------------------------------------------------

def slab_layout(type, hidden, width, layout=EXPERTS):
    """Return (offset of the down matrix, stride) of an expert's slab."""
    down = round_up(blob_bytes(type, layout * hidden, width), 64)
    return down, round_up(down + blob_bytes(type, width, hidden), EXPERT_ALIGN)


def tensor_bytes(type, layout, dims):
    """Return the size of a tensor in bytes; raise FormatError if type, layout and dims are inconsistent."""
    if layout != MATRIX and len(dims) == 3:
        return dims[0] * slab_layout(type, dims[1], dims[2], layout)[1]
    if layout == MATRIX and len(dims) == 2:
        return blob_bytes(type, *dims)
    if layout == MATRIX and len(dims) == 1 and type == F32:
        return 4 * dims[0]
    raise FormatError(f"unsupported tensor: type {type}, layout {layout}, {len(dims)} dimensions")


class Tensor:
    """A tensor as stored: type, layout, dims and bytes."""

    def __init__(self, type, layout, dims, data):
        self.type, self.layout, self.dims, self.data = type, layout, tuple(dims), data

    @staticmethod
    def encode(array, type=F32):
        """Encode a vector (always F32), a matrix, or experts given as a pair (up [E, hidden, width], down [E, width,
        hidden]); gated experts have a pair (gate stacked on up [E, 2 hidden, width], down)."""
        if not isinstance(array, tuple):
            array = np.asarray(array)
            if array.ndim == 1:
                type = F32
            return Tensor(type, MATRIX, array.shape, encode_blob(array, type))
        up, down = array
        experts, width, hidden = down.shape
        layout = GATED if up.shape[1] == 2 * hidden else EXPERTS
        if up.shape != (experts, layout * hidden, width):
            raise FormatError(f"expert shapes {up.shape} and {down.shape} do not match")
        start, stride = slab_layout(type, hidden, width, layout)
        data = bytearray(experts * stride)
        for e in range(experts):
            for at, w in ((0, up[e]), (start, down[e])):
                blob = encode_blob(w, type)
                data[e * stride + at:e * stride + at + len(blob)] = blob
        return Tensor(type, layout, (experts, hidden, width), bytes(data))

    def array(self):
        """Return dequantised float32 arrays; experts are a pair, like the argument of `encode`."""
        if len(self.dims) == 1:
            return decode_blob(self.data, F32, 1, self.dims[0])[0]
        if self.layout == MATRIX:
            return decode_blob(self.data, self.type, *self.dims)
        experts, hidden, width = self.dims
        start, stride, above = *slab_layout(self.type, hidden, width, self.layout), self.layout * hidden
        up, down = np.empty((experts, above, width), np.float32), np.empty((experts, width, hidden), np.float32)
        n_up, n_down = blob_bytes(self.type, above, width), blob_bytes(self.type, width, hidden)
        for e in range(experts):
            slab = self.data[e * stride:(e + 1) * stride]
            if any(slab[n_up:start]) or any(slab[start + n_down:]):
                raise FormatError("padding between experts is not zero")
            up[e] = decode_blob(slab[:n_up], self.type, above, width)
            down[e] = decode_blob(slab[start:start + n_down], self.type, width, hidden)
        return up, down


# ---- Metadata --------------------------------------------------------------------------------------------------------
# Scalars are int, float, str and bytes. NumPy arrays of int64 and float64 (or lists of numbers) become INTS and REALS,
# lists of str and empty lists TEXTS.

KEY = re.compile(r"[a-z0-9._-]{1,255}\Z")


def pad8(data):
    return data + bytes(-len(data) % 8)


def utf8(text):
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise FormatError(f"invalid Unicode text: {text[:40]!r}") from None


def pack_value(value):
    """Return (kind, bytes) of a metadata value."""
    if isinstance(value, (bool, np.bool_)):
        raise FormatError("a metadata value cannot be a bool")
    if isinstance(value, (int, np.integer)):
        if not -2**63 <= value < 2**63:
            raise FormatError("a metadata integer exceeds 64 bits")
        return INT, struct.pack("<q", value)
    if isinstance(value, (float, np.floating)):
        return REAL, struct.pack("<d", value)
    if isinstance(value, str):
        value = utf8(value)
        return TEXT, struct.pack("<Q", len(value)) + value
    if isinstance(value, (bytes, bytearray)):
        return BYTES, struct.pack("<Q", len(value)) + bytes(value)
    if all(isinstance(x, str) for x in value) and not isinstance(value, np.ndarray):
        texts = [utf8(x) for x in value]
        return TEXTS, struct.pack("<Q", len(texts)) + b"".join(pad8(struct.pack("<Q", len(x)) + x) for x in texts)
    array = np.asarray(value)
    if array.ndim == 1 and array.dtype.kind in "iu":
        return INTS, struct.pack("<Q", len(array)) + array.astype("<i8").tobytes()
    if array.ndim == 1 and array.dtype.kind == "f":
        return REALS, struct.pack("<Q", len(array)) + array.astype("<f8").tobytes()
    raise FormatError(f"a metadata value cannot be a {type(value).__name__}")


class Cursor:
    """Read bytes sequentially, never past their end."""

    def __init__(self, data, at):
        self.data, self.at = data, at

    def take(self, count):
        if count > len(self.data) - self.at:
            raise FormatError(f"header truncated at byte {self.at}")
        self.at += count
        return self.data[self.at - count:self.at]

    def unpack(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def align(self):
        if any(self.take(-self.at % 8)):
            raise FormatError(f"padding before byte {self.at} is not zero")

    def string(self):
        return self.take(self.unpack("Q")[0])


def decode_text(data, where):
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{where}: not UTF-8") from None


def unpack_entry(cursor):
    """Read the metadata entry at the cursor: (key, value)."""
    kind, length = cursor.unpack("II")
    key = decode_text(cursor.take(length), "metadata key")
    if not KEY.match(key):
        raise FormatError(f"invalid metadata key {key!r}")
    cursor.align()
    if kind == INT:
        value = cursor.unpack("q")[0]
    elif kind == REAL:
        value = cursor.unpack("d")[0]
    elif kind == TEXT:
        value = decode_text(cursor.string(), key)
    elif kind == BYTES:
        value = cursor.string()
    elif kind in (INTS, REALS):
        count = cursor.unpack("Q")[0]
        data = cursor.take(8 * count)
        value = np.frombuffer(data, "<i8" if kind == INTS else "<f8").astype(np.int64 if kind == INTS else np.float64)
    elif kind == TEXTS:
        value = []
        for _ in range(cursor.unpack("Q")[0]):
            value.append(decode_text(cursor.string(), key))
            cursor.align()
    else:
        raise FormatError(f"{key}: unknown kind {kind}")
    cursor.align()
    return key, value


# ---- Files -----------------------------------------------------------------------------------------------------------

def pieces_of(layout, dims):
    """Return a tensor's number of checksums: one per expert slab (checked on first use), or one for a matrix."""
    return dims[0] if layout != MATRIX else 1


def pack_header(meta, tensors, checksums):
    """Return (header bytes, offset of each tensor, file size). tensors: name -> (type, layout, dims); checksums: a list
    per tensor, with `pieces_of` elements."""
    head = b""
    for key, value in meta.items():
        if not KEY.match(key):
            raise FormatError(f"invalid metadata key {key!r}")
        kind, data = pack_value(value)
        head += pad8(struct.pack("<II", kind, len(key)) + key.encode()) + pad8(data)
    entry_bytes = sum(round_up(16 + 8 * len(dims) + 24 + len(name.encode()), 8)
                      + (round_up(4 * pieces_of(layout, dims), 8) if layout != MATRIX else 0)
                      for name, (_, layout, dims) in tensors.items())
    end = header_bytes = HEADER + len(head) + entry_bytes
    offsets, entries = [], []
    for (name, (type, layout, dims)), sums in zip(tensors.items(), checksums):
        offset, size = round_up(end, EXPERT_ALIGN if layout != MATRIX
                                else TENSOR_ALIGN), tensor_bytes(type, layout, dims)
        offsets.append(offset)
        end = offset + size
        name = name.encode()
        entry = struct.pack("<IIII", type, layout, len(dims), len(name)) + struct.pack(f"<{len(dims)}Q", *dims)
        slabs = struct.pack(f"<{len(sums)}I", *sums) if layout != MATRIX else b""
        checksum = zlib.crc32(slabs) if layout != MATRIX else sums[0]
        entries.append(pad8(entry + struct.pack("<QQII", offset, size, checksum, 0) + name) + pad8(slabs))
    head += b"".join(entries)
    fixed = struct.pack("<QQII24x", header_bytes, end, len(meta), len(tensors))
    version = LOW_VERSION if any(type in LEVELS for type, _, _ in tensors.values()) else VERSION
    return MAGIC + struct.pack("<II", version, zlib.crc32(fixed + head)) + fixed + head, offsets, end


def written_file(path):
    """Resolve symbolic links in the path of a file to write; reject anything but regular files."""
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise FormatError(f"{path} exists and is not a regular file")
    return path


def finish_file(file, temporary, path):
    file.flush()
    os.fsync(file.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def new_file(path):
    """Open a new file for writing under a temporary name; rename it when complete."""
    path = written_file(path)
    temporary = f"{path}.{secrets.token_hex(6)}.tmp"
    try:
        with open(temporary, "xb") as file:
            yield file
            finish_file(file, temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


class Journal:
    """The progress of write_pieces: FILE.partial contains the bytes written, FILE.partial.log identifies the conversion
    and lists finished tensors."""

    def __init__(self, path, about):
        path = written_file(path)
        self.partial, self.path, self.done = path + ".partial", path + ".partial.log", {}
        self.first = f"moe-journal {VERSION} {zlib.crc32(about):08x} {len(about)}\n"

    @contextlib.contextmanager
    def open(self, path):
        """Open and lock FILE.partial to continue writing; do not follow links."""
        descriptor = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        with open(descriptor, "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise FormatError(f"{self.partial} is being written by another program") from None
            self.read(os.fstat(descriptor).st_size)
            try:
                yield file
                finish_file(file, self.partial, written_file(path))
                os.unlink(self.path)
            except FormatError:
                for left in self.partial, self.path:
                    os.unlink(left)
                raise

    def read(self, size):
        """Read the list of finished tensors; start a new log if it is empty."""
        lines = []
        if os.path.exists(self.path):
            with open(self.path, encoding="ascii", errors="replace") as file:
                lines = file.readlines()
        if size and lines[:1] != [self.first]:
            raise FormatError(f"{self.partial} is from another checkpoint or was written with other options: remove it "
                              "to start over")
        for line in lines[1:] if size else ():  # size 0 if a run was killed after renaming the partial file
            if not re.fullmatch("[0-9]{1,10}( [0-9a-f]{8})+\n", line):
                break  # the machine stopped while writing this line; ignore the rest
            index, *sums = line.split()
            self.done[int(index)] = [int(x, 16) for x in sums]
        with open(self.path + ".new", "w", encoding="ascii") as file:
            file.writelines([self.first, *(self.line(index, sums) for index, sums in self.done.items())])
        os.replace(self.path + ".new", self.path)

    @staticmethod
    def line(index, sums):
        return " ".join([str(index), *(f"{x:08x}" for x in sums)]) + "\n"

    def add(self, index, sums):
        with open(self.path, "a", encoding="ascii") as file:
            file.write(self.line(index, sums))
            file.flush()
            os.fsync(file.fileno())


def write_tensor(file, size, count, pieces, moved):
    """Write a tensor of `size` bytes at the file position; return one checksum for each of its `count` equal parts."""
    sums, part, done = [0] * count, size // count, 0
    for piece in pieces():
        if len(piece) > size - done:
            raise FormatError("data size does not match the shape")
        piece, at = memoryview(piece), 0
        while at < len(piece):  # stop at the end of each part
            stop = min(len(piece), at + part - done % part)
            sums[done // part] = zlib.crc32(piece[at:stop], sums[done // part])
            at, done = stop, done + stop - at
        file.write(piece)
        moved(done)
    if done != size:
        raise FormatError("data size does not match the shape")
    return sums


def check_disk(path, size, journal):
    """Fail early if the disk is too small, counting the bytes that an interrupted conversion has written."""
    path = written_file(path)
    there = os.stat(journal.partial).st_blocks * 512 if journal and os.path.exists(journal.partial) else 0
    free = shutil.disk_usage(os.path.dirname(path)).free
    if size - there > free:
        raise FormatError(f"{path} needs another {size - there:,} bytes, but only {free:,} are free on the disk")


def write_pieces(path, meta, tensors, journal=None, progress=lambda done, all, name: None):
    """Write a file with tensors produced in pieces: name -> (type, layout, dims, function that yields bytes). The file
    is renamed to `path` when complete. With a Journal, the next call continues an interrupted conversion."""
    specs, checksums = {name: t[:3] for name, t in tensors.items()}, []
    counts = [pieces_of(*t[1:3]) for t in tensors.values()]
    _, offsets, end = pack_header(meta, specs, [[0] * count for count in counts])
    check_disk(path, end, journal)
    with journal.open(path) if journal else new_file(path) as file:
        file.truncate(end)
        for index, ((name, t), offset, count) in enumerate(zip(tensors.items(), offsets, counts)):
            progress(offset, end, name)
            sums = journal.done.get(index, ()) if journal else ()
            if len(sums) != count:
                file.seek(offset)
                try:
                    sums = write_tensor(file, tensor_bytes(*t[:3]), count, t[3],
                                        lambda done, at=offset, name=name: progress(at + done, end, name))
                except FormatError as error:
                    raise error if "tensor " in str(error) else FormatError(f"tensor {name}: {error}") from None
                if journal:
                    file.flush()
                    os.fsync(file.fileno())
                    journal.add(index, sums)
            checksums.append(sums)
        file.seek(0)
        file.write(pack_header(meta, specs, checksums)[0])


def write_model(path, meta, tensors):
    """Write metadata and tensors (name -> Tensor) in order. The file is renamed to `path` when complete."""
    write_pieces(path, meta, {name: (t.type, t.layout, t.dims, lambda t=t: [t.data]) for name, t in tensors.items()})


def read_header(file):
    """Read the header of an open file. Return (metadata by key, cursor after it, number of tensors, file size)."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(HEADER)
    if len(start) < HEADER or start[:8] != MAGIC:
        raise FormatError("not a model file")
    version, crc, header_bytes, file_bytes, n_meta, n_tensors = struct.unpack_from("<IIQQII", start, 8)
    if version not in (1, VERSION, LOW_VERSION):
        raise FormatError(f"version {version} is not supported: expected 1 to {LOW_VERSION}")
    if file_bytes != size:
        raise FormatError(f"file has {size} bytes, but the header specifies {file_bytes}")
    if not HEADER <= header_bytes <= file_bytes or header_bytes % 8:
        raise FormatError(f"invalid header size {header_bytes}")
    data = start + file.read(header_bytes - HEADER)
    if zlib.crc32(data[16:]) != crc:
        raise FormatError("header checksum mismatch")
    if any(data[40:HEADER]):
        raise FormatError("reserved header bytes are not zero")
    cursor, meta = Cursor(data, HEADER), {}
    cursor.version = version
    for _ in range(n_meta):
        key, value = unpack_entry(cursor)
        if key in meta:
            raise FormatError(f"duplicate metadata key {key}")
        meta[key] = value
    return meta, cursor, n_tensors, file_bytes


def read_meta(path):
    """Return the metadata of a file by key without checking the tensors."""
    with open_regular(path) as file:
        return read_header(file)[0]


def read(path):
    """Return (metadata by key, Tensors by name) of a file, checking all rules of the container and all checksums."""
    with open_regular(path) as file:
        meta, cursor, n_tensors, file_bytes = read_header(file)
        file.seek(0)
        data = file.read()
    header_bytes = len(cursor.data)
    tensors, end = {}, header_bytes
    for _ in range(n_tensors):
        kind, layout, n_dims, name_length = cursor.unpack("IIII")
        if kind not in TYPES.values() or layout not in (MATRIX, EXPERTS, GATED) or not 1 <= n_dims <= 4:
            raise FormatError(f"tensor {len(tensors)}: unknown type, layout or number of dimensions")
        dims = cursor.unpack(f"{n_dims}Q")
        offset, size, crc, zero = cursor.unpack("QQII")
        name = decode_text(cursor.take(name_length), "tensor name")
        cursor.align()
        if name in tensors or not name or zero:
            raise FormatError(f"invalid directory entry for tensor {name!r}")
        slabs = b""  # checksums of expert slabs, in version 2
        if cursor.version > 1 and layout != MATRIX:
            slabs = cursor.take(4 * dims[0])
            cursor.align()
        expected = round_up(end, EXPERT_ALIGN if layout != MATRIX else TENSOR_ALIGN)
        if 0 in dims or size != tensor_bytes(kind, layout, dims) or offset != expected or size > file_bytes - offset:
            raise FormatError(f"{name}: invalid shape, size or offset")
        if any(data[end:offset]):
            raise FormatError(f"gap before {name} contains nonzero bytes")
        end = offset + size
        tensors[name] = Tensor(kind, layout, dims, data[offset:end])
        if zlib.crc32(slabs or tensors[name].data) != crc:
            raise FormatError(f"{name}: checksum mismatch")
        for i in range(len(slabs) // 4):
            begin, stride = offset + i * (size // dims[0]), size // dims[0]
            if zlib.crc32(data[begin:begin + stride]) != int.from_bytes(slabs[4 * i:4 * i + 4], "little"):
                raise FormatError(f"{name}: checksum mismatch in expert {i}")
    if cursor.at != header_bytes or end != file_bytes:
        raise FormatError("trailing bytes")
    if any(t.type in LEVELS for t in tensors.values()) != (cursor.version == LOW_VERSION):
        raise FormatError(f"version {cursor.version} does not match the number formats")
    return meta, tensors


# ---- Descriptions of models ------------------------------------------------------------------------------------------

class Entries:
    """Metadata with a common prefix; values are checked for type, range and permitted values."""

    def __init__(self, meta, prefix=""):
        self.meta, self.prefix = meta, prefix

    def get(self, key, default=None, values=None, kind=None):
        """Return a key's value, of type `kind`, the default's type, or else str. Keys with no default are required."""
        name, want = self.prefix + key, kind or (str if default is None else type(default))
        value = self.meta.get(name, default)
        if value is None:
            raise FormatError(f"metadata key {name} is missing")
        if want is float and type(value) is int:
            value = float(value)
        if not isinstance(value, want) or isinstance(value, bool):
            raise FormatError(f"{name}: invalid type")
        if values is not None and value not in values:
            raise FormatError(f"{name}: unknown value {value!r}")
        return value

    def within(self, key, least, most, default=None):
        """Return a number from `least` to `most`, with the type of `least`."""
        value = self.get(key, default, kind=type(least))
        if not least <= value <= most:
            raise FormatError(f"{self.prefix}{key}: {value} is out of range ({least} to {most})")
        return value

    def tokens(self, key, vocabulary):
        """Return a list of token ids, which may be empty."""
        value = self.meta.get(self.prefix + key, ())
        if not isinstance(value, (list, tuple, np.ndarray)) or not all(isinstance(x, (int, np.integer))
                                                                       for x in value):
            raise FormatError(f"{self.prefix}{key}: not a list of token ids")
        if len(value) and not 0 <= min(value) <= max(value) < vocabulary:
            raise FormatError(f"{self.prefix}{key}: a token id is outside the vocabulary")
        return [int(x) for x in value]

    def texts(self, key, count=None):
        """Return a list of texts, either empty or with `count` elements."""
        value = self.get(key, [])
        if count is not None and len(value) not in (0, count) or not all(isinstance(x, str) for x in value):
            raise FormatError(f"{self.prefix}{key}: not a list of {count} texts")
        return value


# ---- Layers ----------------------------------------------------------------------------------------------------------
# The Python counterpart of moe_keys in moe.c, section Layers: names, ranges and defaults of the settings of a layer.
# tests/convert/test_keys.py compares the two tables. All converters, trainers and readers use this table.

WIDEST = 1 << 20


class Key(typing.NamedTuple):
    """A setting of a layer, stored under NAME.KEY. Kinds "count" and "flag" are INT and "real" is REAL or INT, all from
    `low` to `high`; "name" is TEXT, one of `names`. A missing key takes the value of the key that it `inherits`, else
    the default. A key without either is required."""
    key: str
    kind: str
    low: float = 0
    high: float = 0
    names: tuple = ()
    default: typing.Any = None
    inherits: str = None

    @property
    def field(self):
        """The setting's name in a namespace and in the config of a checkpoint."""
        return self.key.replace(".", "_")


def count_key(key, least, default=None, inherits=None):
    return Key(key, "count", least, WIDEST, default=default, inherits=inherits)


def flag_key(key, default):
    return Key(key, "flag", 0, 1, default=default)


def real_key(key, low, high, default):
    return Key(key, "real", low, high, default=default)


def name_key(key, names, default=None, inherits=None):
    return Key(key, "name", names=tuple(names.split()), default=default, inherits=inherits)


ANY_NORM = real_key("epsilon", 0, 1, 1e-5), name_key("norm.kind", "layer rms", "layer")
NORM = name_key("norm", "none before after both", "none"), *ANY_NORM
HEADS = (count_key("heads", 1), flag_key("raw", 0), count_key("kv_heads", 1, inherits="heads"),
         count_key("head.size", 0, 0), count_key("window", 0, 0), Key("rotary", "flag", 0, 2, default=0),
         name_key("head.norm", "none before after", "none"), real_key("scale", -1e6, 1e6, 0.0),
         count_key("reach", 0, 0), flag_key("gated", 0), flag_key("residual", 1), *NORM)
ACTIVATIONS = "relu gelu swish gelu_tanh"
GATES, EMPTY = "softmax topk threshold sigmoid", "top1 zero"
DENSE = "softmax", "sigmoid"  # gates that select all experts
LAYERS = {
    "lstm": (count_key("hidden", 1), flag_key("residual", 0), count_key("proj", 0, 0),
             real_key("forget_bias", -100, 100, 0.0), flag_key("bidirectional", 0),
             name_key("merge", "concat sum", "concat"), name_key("context", "none previous current", "none")),
    "moe": (count_key("hidden", 1), flag_key("residual", 1), count_key("experts", 1), count_key("groups", 0, 0),
            name_key("gate", GATES), count_key("k", 0, 0), name_key("empty", EMPTY, "top1"),
            name_key("parent.gate", GATES, inherits="gate"), count_key("parent.k", 0, inherits="k"),
            name_key("parent.empty", EMPTY, inherits="empty"), count_key("gate.hidden", 0, 0), flag_key("gate.relu", 0),
            name_key("weights", "chosen all sigmoid", "chosen"), name_key("expert", "mlp linear gated", "mlp"),
            name_key("activation", "relu none", "relu"), name_key("output", "none sigmoid", "sigmoid"),
            real_key("scale", -1e6, 1e6, 1.0), count_key("shared", 0, 0), *NORM),
    "attention": HEADS,
    "cross": HEADS,
    "ffn": (count_key("hidden", 1), name_key("activation", ACTIVATIONS), flag_key("gated", 0), flag_key("parallel", 0),
            flag_key("residual", 1), *NORM),
    "ssru": (flag_key("residual", 1), *NORM),
    "average": (count_key("hidden", 1), Key("depth", "count", 1, 4), name_key("activation", ACTIVATIONS),
                flag_key("gated", 1), flag_key("residual", 1), *NORM),
    "delta": (count_key("heads", 1), count_key("key_heads", 1, inherits="heads"), count_key("head.size", 1),
              count_key("key.size", 1, inherits="head.size"), Key("kernel", "count", 1, 64, default=4),
              flag_key("tiled", 0), flag_key("residual", 1), *NORM),
    "norm": ANY_NORM,
    "gnmt-attention": (name_key("kind", "additive product"), count_key("size", 1), count_key("layer", 0, 0),
                       name_key("query", "state output"), name_key("start", "query zero", "query")),
}
KINDS = tuple(kind for kind in LAYERS if kind != "gnmt-attention")  # kinds of layers in encoders and decoders


def key_of(kind, key):
    """Return the row of a key."""
    for row in LAYERS[kind]:
        if row.key == key:
            return row
    raise FormatError(f"a layer of kind {kind} has no key {key}")


def setting(name, row, value):
    """Check and return the value of a setting as a float, int or str."""
    whole = isinstance(value, (int, np.integer)) and (row.kind == "flag" or not isinstance(value, bool))
    if not (isinstance(value, str) if row.kind == "name"
            else whole or row.kind == "real" and isinstance(value, (float, np.floating))):
        raise FormatError(f"{name}: invalid type")
    if row.kind == "name":
        if value not in row.names:
            raise FormatError(f"{name}: unknown value {value!r}")
        return value
    if not row.low <= value <= row.high:
        raise FormatError(f"{name}: {value} is out of range ({row.low} to {row.high})")
    return float(value) if row.kind == "real" else int(value)


def layer_meta(name, kind, /, **settings):
    """Return the metadata of a layer: its kind (except for GNMT's attention), then the settings in the given order."""
    meta = {} if kind == "gnmt-attention" else {name + ".kind": kind}
    for key, value in settings.items():
        meta[f"{name}.{key}"] = setting(f"{name}.{key}", key_of(kind, key), value)
    return meta


def read_layer(e, kind):
    """Return the settings of the layer with the prefix of `e` as a namespace, in which dots become underscores."""
    found = {}
    for row in LAYERS[kind]:
        name = e.prefix + row.key
        if name in e.meta:
            found[row.field] = setting(name, row, e.meta[name])
        else:
            found[row.field] = found[key_of(kind, row.inherits).field] if row.inherits else row.default
        if found[row.field] is None:
            raise FormatError(f"metadata key {name} is missing")
    return types.SimpleNamespace(**{"kind": kind, **found})


def check_level(e, prefix, level, n):
    """Check k, the number of experts or groups that a level of gates selects from n."""
    least = int(level.gate not in DENSE)
    if (least or e.prefix + prefix + "k" in e.meta) and not least <= level.k <= n:
        raise FormatError(f"{e.prefix}{prefix}k: {level.k} is out of range ({least} to {n})")


def describe_mixture(e):
    """Return a mixture as a namespace; `parent` is the level of gates over groups, or None."""
    x = read_layer(e, "moe")
    if x.groups and x.experts % x.groups:
        raise FormatError(f"{e.prefix}groups: {x.experts} experts are not a multiple of {x.groups} groups")
    if x.expert != "linear" and x.activation != "relu":
        raise FormatError(f"{e.prefix}activation: {x.activation!r} is not supported in experts with a hidden layer")
    if x.weights != "chosen" and (x.gate != "topk" or x.groups):
        raise FormatError(f"{e.prefix}weights: {x.weights!r} requires a top-k gate with one level")
    if x.shared and x.expert == "linear":
        raise FormatError(f"{e.prefix}shared: {x.shared} is not supported with linear experts")
    if x.expert == "linear" and x.hidden > (2**31 - 1) // x.experts:
        raise FormatError(f"{e.prefix}hidden: {x.hidden} is too large for {x.experts} experts")
    x.parent = types.SimpleNamespace(gate=x.parent_gate, k=x.parent_k, empty=x.parent_empty) if x.groups else None
    del x.parent_gate, x.parent_k, x.parent_empty
    check_level(e, "", x, x.experts // (x.groups or 1))
    if x.groups:
        check_level(e, "parent.", x.parent, x.groups)
    return x


MAX_STATE = 1 << 28  # numbers per hypothesis in a layer


def describe_delta(e, x):
    """Check a Gated DeltaNet; set the columns of its convolution and values."""
    x.values, keys = x.heads * x.head_size, x.key_heads * x.key_size
    x.convolved = 2 * keys + x.values
    if x.heads % x.key_heads:
        raise FormatError(f"{e.prefix}key_heads: {x.heads} heads are not a multiple of {x.key_heads} key_heads")
    if max(keys, x.values) > WIDEST or \
            x.heads * round_up(x.head_size, 16) * x.key_size + x.convolved * x.kernel > MAX_STATE:
        raise FormatError(f"{e.prefix}heads: {x.heads} is too large with keys of {x.key_size} and values of "
                          f"{x.head_size} columns")


def describe_layer(meta, side, index):
    """Return a layer of an encoder, decoder or network as a namespace."""
    e, architecture = Entries(meta, f"{side}.{index}."), meta["general.architecture"]
    x = e.get("kind", values=("moe",) if side == "network" else KINDS)
    x = describe_mixture(e) if x == "moe" else read_layer(e, x)
    if x.kind == "lstm" and x.bidirectional and side != "encoder":
        raise FormatError(f"{e.prefix}bidirectional: not supported in a decoder, which cannot read later tokens")
    if x.kind == "lstm" and x.context != "none" and (side != "decoder" or architecture in ("moe-lm", "decoder")):
        raise FormatError(f"{e.prefix}context: {x.context!r} requires an encoder")
    if x.kind in ("ssru", "average", "delta") and side != "decoder":
        raise FormatError(f"{e.prefix}kind: {x.kind!r} is not supported in an encoder")
    if x.kind == "cross" and (side != "decoder" or architecture in ("moe-lm", "decoder")):
        raise FormatError(f"{e.prefix}kind: 'cross' requires an encoder")
    if x.kind in ("attention", "cross"):
        if not x.head_size and meta["model.width"] % x.heads:
            raise FormatError(f"{e.prefix}heads: the width is not a multiple of {x.heads} heads")
        if x.heads % x.kv_heads:
            raise FormatError(f"{e.prefix}kv_heads: {x.heads} heads are not a multiple of {x.kv_heads} kv_heads")
        if x.kind == "cross" and (x.rotary or x.head_norm != "none" or x.reach):
            raise FormatError(f"{e.prefix}rotary, head.norm, reach: not supported in cross-attention")
        if x.window and (x.kind == "cross" or side != "decoder"):
            raise FormatError(f"{e.prefix}window: only supported in self-attention of decoders")
        if x.rotary and architecture != "decoder":
            raise FormatError(f"{e.prefix}rotary: only supported in architecture 'decoder'")
        x.head_size = x.head_size or meta["model.width"] // x.heads
        if x.gated and (x.kind == "cross" or x.raw):
            raise FormatError(f"{e.prefix}gated: only supported in plain self-attention")
    if x.kind == "delta":
        describe_delta(e, x)
    if getattr(x, "raw", 0) and (x.kind == "cross" or x.norm != "before"):
        raise FormatError(f"{e.prefix}raw: only supported in self-attention with norm 'before'")
    if x.kind == "norm":
        x.norm, x.residual = "before", 0
    return x


def describe_side(meta, side):
    count = Entries(meta).within(side + ".layers", 1, MAX_LAYERS)
    return [describe_layer(meta, side, i) for i in range(count)]


# ---- Models ----------------------------------------------------------------------------------------------------------

def describe_tokens(e):
    """Return the settings shared by all models with tokens: vocabulary, embedding, special tokens."""
    if e.get("tokenizer.kind", "none", ("sentencepiece", "byte-bpe", "bpe", "none")) in ("sentencepiece", "byte-bpe"):
        e.get("tokenizer.model", b"")
    m = types.SimpleNamespace(vocabulary=e.within("vocab.size", 2, MAX_VOCABULARY),
                              width=e.within("model.width", 1, WIDEST),
                              scale=e.within("embedding.scale", -1e6, 1e6, 1.0))
    last = m.vocabulary - 1
    m.bos, m.eos = e.within("token.bos", 0, last), e.within("token.eos", 0, last)
    m.unk, m.pad = e.within("token.unk", -1, last, -1), e.within("token.pad", -1, last, -1)
    m.never = e.tokens("token.never", m.vocabulary)
    e.texts("vocabulary.pieces", m.vocabulary)
    return m


def describe_sources(e, m):
    """Read the settings of source texts, whose token ids may be separate from target ids. Tags are source ids."""
    m.separate = "source.vocab.size" in e.meta
    m.source_vocabulary = e.within("source.vocab.size", 2, MAX_VOCABULARY, m.vocabulary)
    m.source_end = e.within("source.token.eos", 0, m.source_vocabulary - 1, None if m.separate else m.eos)
    m.source_unk = e.within("source.token.unk", -1, m.source_vocabulary - 1, m.unk)
    m.source_bos, m.source_eos = e.get("source.bos", 0, (0, 1)), e.get("source.eos", 1, (0, 1))
    e.texts("source.pieces", m.source_vocabulary)
    if m.separate and (m.source_bos or e.get("target.tag", 0)):
        raise FormatError("source.bos and target.tag must be 0 if sources have separate token ids")
    codes, tags = e.texts("languages.codes"), e.tokens("languages.tags", m.source_vocabulary)
    if len(codes) != len(tags) or len(set(codes)) != len(codes):
        raise FormatError("languages.codes and languages.tags do not match")
    m.languages = dict(zip(codes, tags))
    describe_shortlist(e, m)


def describe_shortlist(e, m):
    """Read the settings of shortlist.py; shortlist 0 means none."""
    m.shortlist = e.within("shortlist.entries", 1, (1 << 24) - 1) if "shortlist.entries" in e.meta else 0
    if m.shortlist:
        e.within("shortlist.first", 0, m.vocabulary, 0)
        e.within("shortlist.multiple", 1, 1024, 1)
        if e.get("shortlist.shared", 0, (0, 1)) and m.separate:
            raise FormatError("shortlist.shared must be 0 if sources have separate token ids")


def describe_limits(e, m):
    """Read the limits of source and target lengths, and the defaults of search and sampling."""
    m.limit_source, m.limit_target = (e.within(f"limit.{x}", 2, LONGEST, 512) for x in ("source", "target"))
    m.length_constant, m.prune = e.within("decode.length_constant", 0.0, 1e6, 5.0), e.within("decode.prune", 0.0, 1e6,
                                                                                             0.0)
    m.coverage_penalty, m.rerank = (e.within("decode." + x, 0.0, 100.0, 0.0) for x in ("coverage_penalty", "rerank"))
    m.max_len_factor = e.within("decode.max_len_factor", 0.0, 1e6, 2.0)
    m.max_len_offset = e.within("decode.max_len_offset", 0, LONGEST, 10)
    m.temperature, m.repetition_penalty = (e.within("sample." + x, 0.0, 100.0, otherwise)
                                           for x, otherwise in (("temperature", 1.0), ("repetition_penalty", 0.0)))
    m.top_k, m.top_p, m.min_p = e.within("sample.top_k", 0, 1 << 30, 0), e.within("sample.top_p", 0.0, 1.0, 1.0), \
        e.within("sample.min_p", 0.0, 1.0, 0.0)


def describe_attention(meta, m):
    """Return GNMT's attention, or None if the decoder has cross-attention layers instead."""
    if "attention.kind" not in meta and any(x.kind == "cross" for x in m.decoder):
        if any(x.kind == "lstm" and x.context != "none" for x in m.decoder):
            raise FormatError("attention.kind is missing, but a layer reads the context")
        return None
    a = read_layer(Entries(meta, "attention."), "gnmt-attention")
    if a.layer >= len(m.decoder) or m.decoder[a.layer].kind != "lstm":
        raise FormatError(f"attention.layer: decoder.{a.layer} is not an lstm layer")
    for i, x in enumerate(m.decoder):
        if x.kind == "lstm" and x.context == "current" and i <= a.layer:
            raise FormatError(f"decoder.{i}.context: the current context is only available after layer {a.layer}")
    return a


def describe_aligner(e, m):
    """Return (decoder layer, heads) whose mean attention aligns words in a Transformer, or None."""
    if m.attention or "align.layer" not in e.meta:
        return None
    layer = e.within("align.layer", 0, len(m.decoder) - 1)
    if m.decoder[layer].kind != "cross":
        raise FormatError(f"align.layer: decoder.{layer} does not attend to the source")
    heads = e.within("align.heads", 1, (1 << min(m.decoder[layer].heads, 62)) - 1)
    return layer, [i for i in range(62) if heads >> i & 1]


def describe_sides(meta, e, m):
    """Read an encoder and the decoder that attends to it."""
    m.source_tag = e.get("source.tag", int(bool(m.languages)), (0, 1, 2))
    m.encoder, m.decoder = describe_side(meta, "encoder"), describe_side(meta, "decoder")
    m.attention = describe_attention(meta, m)
    m.align = describe_aligner(e, m)
    m.init = e.get("decoder.init", "zero", ("zero", "encoder"))
    sides = [[(x.hidden, x.proj) for x in side if x.kind == "lstm"] for side in (m.encoder, m.decoder)]
    if m.init == "encoder" and sides[0] != sides[1]:
        raise FormatError('decoder.init is "encoder", but the lstm layers of encoder and decoder differ')


def describe_translation(meta):
    """Read architecture "gnmt-moe"; the default search is the paper's."""
    e = Entries(meta)
    m = describe_tokens(e)
    describe_sources(e, m)
    describe_limits(e, m)
    describe_sides(meta, e, m)
    m.beam = e.within("decode.beam", 1, MAX_BEAM, 4)
    m.length_penalty = e.within("decode.length_penalty", 0.0, 100.0, 0.6)
    m.rules = e.get("decode.rules", "paper", ("paper", "nvidia", "tf", "mlperf"))
    return m


def describe_hf_search(e, m, max_new):
    """Read the settings of Hugging Face's or Marian's search, with the program's default limit of new tokens."""
    m.rules, m.beam = e.get("decode.rules", "hf", ("hf", "marian")), e.within("decode.beam", 1, MAX_BEAM, 1)
    m.length_penalty = e.within("decode.length_penalty", 0.0, 100.0, 1.0)
    m.early_stopping, m.force_end = (e.get("decode." + x, 0, (0, 1)) for x in ("early_stopping", "force_end"))
    m.max_new = e.within("decode.max_new", 1, LONGEST, max_new)
    m.suppressed = e.tokens("token.suppressed", m.vocabulary)


def describe_transformer(meta):
    """Read architecture "transformer"; the default search is Hugging Face's."""
    e = Entries(meta)
    m = describe_tokens(e)
    describe_sources(e, m)
    describe_limits(e, m)
    m.target_tag = e.get("target.tag", 0, (0, 1))
    describe_sides(meta, e, m)
    describe_hf_search(e, m, 200)
    return m


def describe_language_model(meta):
    """Read architecture "moe-lm", a decoder without an encoder."""
    m = describe_tokens(Entries(meta))
    m.languages, m.decoder = {}, describe_side(meta, "decoder")
    return m


MAX_ENDS = 8


ROTARIES = "rotary.weight", "rotary.local.weight"  # tables of rotary positions, for values 1 and 2 of "rotary"


def describe_decoder(meta):
    """Read architecture "decoder", a decoder-only translation model: the source is a prefix of the target."""
    e = Entries(meta)
    m = describe_tokens(e)
    describe_limits(e, m)
    m.languages, m.decoder = {}, describe_side(meta, "decoder")
    m.predictor = describe_side(meta, "predict") if "predict.layers" in meta else []
    e.within("predict.epsilon", 0.0, 1.0, 1e-5)
    if any(x.kind not in ("attention", "ffn", "moe", "norm") for x in m.predictor):
        raise FormatError("predict.*.kind: only attention, ffn, moe and norm are supported")
    m.source_vocabulary, m.separate = m.vocabulary, False
    m.source_bos = e.get("source.bos", 0, (0, 1))
    m.ends = [m.eos, *e.tokens("token.ends", m.vocabulary)]
    if len(m.ends) > MAX_ENDS:
        raise FormatError(f"token.ends: {len(m.ends) - 1} tokens; the limit is {MAX_ENDS - 1}")
    m.rotary = {(ROTARIES[x.rotary - 1], x.head_size) for x in m.decoder if x.kind == "attention" and x.rotary}
    sizes = {size for _, size in m.rotary}
    turned = e.within("rotary.size", 2, WIDEST, min(sizes)) if sizes else 0
    if turned % 2 or any(size < turned or size != turned and "rotary.size" not in meta for size in sizes):
        raise FormatError(f"head.size: {sorted(sizes)}, expected a single even number with rotary positions, or at "
                          "least rotary.size")
    m.rotary = {(name, turned) for name, _ in m.rotary}
    m.places = e.within("rotary.positions", 2, 1 << 24) if m.rotary else 0
    if m.rotary and m.limit_source + m.limit_target > m.places:
        raise FormatError(f"limit.source and limit.target add up to more than {m.places} positions")
    describe_hf_search(e, m, 512)
    return m


def describe_classifier(meta):
    """Read architecture "deep-moe": a stack of MoE layers (Eigen et al. 2013), a linear layer and a softmax."""
    e = Entries(meta)
    m = types.SimpleNamespace(vocabulary=e.within("vocab.size", 2, MAX_VOCABULARY),
                              width=e.within("model.width", 1, WIDEST), languages={})
    m.network, m.names = describe_side(meta, "network"), e.texts("classes.names", m.vocabulary)
    return m


ARCHITECTURES = {"gnmt-moe": describe_translation, "transformer": describe_transformer,
                 "moe-lm": describe_language_model, "deep-moe": describe_classifier, "decoder": describe_decoder}


def describe(meta):
    """Return the model that the metadata describes as a namespace; fill in defaults and check values."""
    e = Entries(meta)
    architecture = e.get("general.architecture", values=tuple(ARCHITECTURES))
    for key in ("name", "description", "licence", "attribution"):
        e.get("general." + key)
    m = ARCHITECTURES[architecture](meta)
    m.architecture = architecture
    m.block = e.get("activation.block", 64, (64,)) if "activation.block" in meta else 0
    return m


def products(x, width, memory):
    """Return (name suffix, rows, columns) of a layer's matrices, except those of LSTM cells and mixtures."""
    gates = [(".input", width, width), (".forget", width, width)]
    if x.kind in ("attention", "cross"):
        queries, keys = x.heads * x.head_size, 2 * x.kv_heads * x.head_size
        out = (".out", width, queries)
        if x.kind == "cross" or x.raw:
            return [(".q", queries, width), (".kv", keys, memory), out]
        return [(".qkv", queries * (1 + x.gated) + keys, width), out]
    if x.kind == "delta":
        return [(".in", x.convolved + x.values + 2 * x.heads, width), (".out", width, x.values)]
    if x.kind == "ffn":
        return [(".up", x.hidden, width), (".down", width, x.hidden)] + [(".gate", x.hidden, width)] * x.gated
    if x.kind == "average":
        ups = [(f".up.{i}", x.hidden, x.hidden if i else width) for i in range(x.depth - 1)]
        down = [(".down", width, x.hidden)] if ups and x.hidden != width else []
        return ups + down + gates * x.gated
    return gates if x.kind == "ssru" else []


def shapes(m, present=()):
    """Return the tensors of a described model in file order: name -> (layout, dims, always F32). `present`: names in
    the file, which tell whether embeddings are shared and which optional tensors exist."""
    out = {}

    def add(name, *dims, layout=MATRIX, f32=False):
        out[name] = (layout, dims, f32 or len(dims) == 1)

    def add_if_present(name, *dims, f32=False):
        if name in present:
            add(name, *dims, f32=f32)

    def add_lstm(name, x, width):
        state = x.proj or x.hidden
        for part in ([".fwd", ".bwd"] if x.bidirectional else [""]):
            add(name + part + ".w_x", 4 * x.hidden, width)
            add(name + part + ".w_r", 4 * x.hidden, state)
            add(name + part + ".bias", 4 * x.hidden)
            if x.proj:
                add(name + part + ".w_proj", x.proj, x.hidden)
        return state * (2 if x.bidirectional and x.merge == "concat" else 1)

    def add_moe(name, x, width):
        features = x.gate_hidden or width
        if x.gate_hidden:
            add(name + ".gate.hidden.weight", x.gate_hidden, width, f32=True)
            add_if_present(name + ".gate.hidden.bias", x.gate_hidden)
        for level, part, n in ((x.parent, ".parent", x.groups), (x, ".gate", x.experts)):
            if level:
                add(name + part + ".weight", n, features, f32=True)
                add_if_present(name + part + ".bias", n)
                add_if_present(name + part + ".noise", n, features, f32=True)
                if level.gate == "threshold":
                    add(name + part + ".threshold", n)
        if x.weights == "sigmoid":
            add_if_present(name + ".gate.choice", x.experts)
        for part, n, k in ((".shared.up", x.shared, width), (".shared.gate", x.shared, width),
                           (".shared.down", width, x.shared)):
            if x.shared:
                add(name + part + ".weight", n, k)
                add_if_present(name + part + ".bias", n)
        if x.shared:
            add_if_present(name + ".shared.scale.weight", 1, width, f32=True)
        if x.expert != "linear":
            add(name + ".experts", x.experts, x.hidden, width, layout=GATED if x.expert == "gated" else EXPERTS)
            add_if_present(name + ".experts.load", x.experts)
            return width
        add(name + ".experts.weight", x.experts * x.hidden, width)
        add_if_present(name + ".experts.bias", x.experts * x.hidden)
        return x.hidden

    def add_layer(name, x, width):
        """Add a layer and return its output width."""
        if x.kind == "lstm":
            return add_lstm(name, x, width + (m.width if x.context != "none" else 0))
        if x.norm != "none":
            last = x.hidden if x.kind == "moe" and x.expert == "linear" else width
            norms = [("norm", last if x.norm == "after" else width)] + [("post_norm", last)] * (x.norm == "both")
            for norm, n in norms:
                add(f"{name}.{norm}.weight", n)
                if x.norm_kind == "layer":
                    add(f"{name}.{norm}.bias", n)
        for part in ("q_norm", "k_norm") if getattr(x, "head_norm", "none") != "none" else ():
            add(f"{name}.{part}.weight", x.head_size)
        if getattr(x, "reach", 0):  # a bias, or keys and perhaps values
            rows, bias = 2 * x.reach + 1, name + ".distance.bias"
            add_if_present(bias, rows, x.heads, f32=True)
            (add_if_present if bias in present else add)(name + ".distance.keys", rows, x.head_size, f32=True)
            add_if_present(name + ".distance.values", rows, x.head_size, f32=True)
        always = x.kind not in ("ssru", "average") and not getattr(x, "gated", 0) and m.architecture != "decoder" \
            and getattr(x, "norm_kind", "layer") == "layer"
        for part, rows, cols in products(x, width, m.width):
            add(name + part + ".weight", rows, cols)
            (add if always else add_if_present)(name + part + ".bias", rows)
        if x.kind == "delta":
            for part, n in ("conv", x.kernel * x.convolved), ("rate", x.heads), ("shift", x.heads), \
                    ("head_norm.weight", x.head_size):
                add(f"{name}.{part}", n)
        if x.kind != "moe":
            return width
        after = add_moe(name, x, width)
        if m.architecture == "transformer" and x.expert == "mlp" and x.norm_kind == "layer":
            add(name + ".experts.up_bias", x.experts * x.hidden)
            add(name + ".experts.down_bias", x.experts * width)
        return after

    def add_side(side, layers):
        """Add a stack of layers and return its output width."""
        width, before = m.width, None
        for i, x in enumerate(layers):
            name = f"{side}.{i}"
            if getattr(x, "parallel", 0) and before != width:
                raise FormatError(f"{name}: parallel requires a previous layer with inputs of {width} columns")
            if x.kind != "lstm" and side != "network" and width != m.width:
                raise FormatError(f"{name}: input width is {width}, but the model's is {m.width}")
            after = add_layer(name, x, width)
            if x.residual and after != width:
                raise FormatError(f"{name}: residual requires equal widths, not {width} and {after}")
            width, before = after, width
            if side == "decoder" and getattr(m, "attention", None) and i == m.attention.layer:
                query = (x.proj or x.hidden) if m.attention.query == "state" else width
                add("attention.w_key", m.attention.size, m.width)
                add("attention.w_query", m.attention.size, query)
                add("attention.v", m.attention.size)
                if m.attention.kind == "additive":
                    add_if_present("attention.bias", m.attention.size)
        if side != "network" and width != m.width:
            raise FormatError(f"{side}: output width is {width}, but the model's is {m.width}")
        return width

    if m.architecture == "deep-moe":
        add("output.weight", m.vocabulary, add_side("network", m.network))
    else:
        separate = m.architecture in ("gnmt-moe", "transformer") and ("source.embedding.weight" in present
                                                     or "target.embedding.weight" in present or m.separate)
        if separate:
            add("source.embedding.weight", m.source_vocabulary, m.width)
        add("target.embedding.weight" if separate else "embedding.weight", m.vocabulary, m.width)
        if "positions.weight" in present:
            add("positions.weight", max(m.limit_source, m.limit_target), m.width, f32=True)
        for name, size in sorted(getattr(m, "rotary", ()), reverse=True):
            add(name, m.places, size, f32=True)
        if m.architecture not in ("moe-lm", "decoder"):
            add_side("encoder", m.encoder)
        add_side("decoder", m.decoder)
        add_if_present("output.weight", m.vocabulary, m.width)
        if getattr(m, "predictor", ()):
            add("predict.embedding.norm.weight", m.width)
            add("predict.hidden.norm.weight", m.width)
            add("predict.join.weight", m.width, 2 * m.width)
            add_side("predict", m.predictor)
    add_if_present("output.bias", m.vocabulary)
    if getattr(m, "shortlist", 0):
        add("shortlist.offsets", m.source_vocabulary + 1)
        add("shortlist.ids", m.shortlist)
    return out


def check_model(meta, tensors):
    """Return a model's description after checking the tensors against it."""
    m = describe(meta)
    expected = shapes(m, tensors)
    for name, (layout, dims, f32) in expected.items():
        t = tensors.get(name)
        if t is None:
            raise FormatError(f"tensor {name} is missing")
        if t.layout != layout or t.dims != dims or f32 and t.type != F32:
            raise FormatError(f"tensor {name} has shape {t.dims}, expected {dims}")
        if name.endswith(".threshold") and not np.isfinite(t.array()).all():
            raise FormatError(f"tensor {name} contains values that are not finite")
    for name in tensors:
        if name not in expected:
            raise FormatError(f"unexpected tensor {name}")
    return m


def read_model(path):
    """Return (description, metadata, dequantised weights by name) of a model file."""
    meta, tensors = read(path)
    return check_model(meta, tensors), meta, {name: t.array() for name, t in tensors.items()}
