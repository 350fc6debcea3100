"""Read weights in FP8, which are multiplied by scales: one per matrix, per row, or per block of rows and columns."""
import numpy as np

import hf
from hf_json import short
from moefile import FormatError

UNUSED = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")  # of activations and caches


def table(exponent_bits):
    """Return the float32 values of the 256 codes. E4M3 has no infinity and one NaN; E5M2 is like float16."""
    codes = np.arange(256)
    if exponent_bits == 5:
        return (codes << 8).astype("<u2").view("<f2").astype(np.float32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa * 1.0, -9))
    return np.where(codes & 127 == 127, np.nan, np.where(codes < 128, size, -size)).astype(np.float32)


TABLES = {"F8_E4M3": table(4), "F8_E5M2": table(5)}


class Scaled(hf.Stored):
    """A matrix in FP8; scales: float32 [rows / block[0], columns / block[1]], rounded up."""

    def __init__(self, t, scales, block):
        super().__init__(t.name, t.shape, t.kind, t.file, t.open, t.place)
        self.scales, self.block = scales, block

    def known(self):
        return True

    def row_bytes(self):
        return self.shape[1]

    def numbers(self, data):
        return TABLES[self.kind][np.frombuffer(data, np.uint8)]

    def read(self, rows):
        at, columns = 0, np.arange(self.shape[1]) // self.block[1]
        for x in super().read(rows):
            with np.errstate(over="ignore"):
                x = x * self.scales[np.arange(at, at + len(x)) // self.block[0]][:, columns]
            if not np.isfinite(x).all():
                raise FormatError(f"{self.file}: tensor {self.name} contains values that are not finite")
            yield x
            at += len(x)


def scale_block(c):
    """Check quantization_config; return the rows and columns of a block. The tensors' types show which are in FP8."""
    about = c.raw("quantization_config")
    if about is None:
        return 128, 128
    about = about if isinstance(about, dict) else {}
    method, format = about.get("quant_method"), about.get("format")
    packed = format not in (None, "float-quantized", "naive-quantized")
    if method not in ("fp8", "compressed-tensors") or packed:
        raise FormatError(f"{c.path}: quantization_config: {'format' if packed else 'quant_method'} "
                          f"{short(format if packed else method)} is not supported: use the model in FP8, as GGUF, or "
                          "unquantised")
    block = about.get("weight_block_size")
    if block is None:
        return 128, 128
    if not isinstance(block, list) or len(block) != 2 or any(type(x) is not int or not 1 <= x <= 65536 for x in block):
        raise FormatError(f"{c.path}: quantization_config: weight_block_size {short(block)} is not supported")
    return tuple(block)


def connected(t, scales, block):
    """Return a matrix with its scales."""
    if len(t.shape) != 2 or 0 in t.shape:
        raise FormatError(f"{t.file}: tensor {t.name} {list(t.shape)}: only matrices are supported in FP8")
    if not scales.known():
        raise FormatError(f"{scales.file}: number format {scales.kind} of tensor {scales.name} is not supported")
    rows, columns = t.shape
    blocks = (rows - 1) // block[0] + 1, (columns - 1) // block[1] + 1
    n = int(np.prod(scales.shape, dtype=np.int64))
    if n == 1:
        block, blocks = (rows, columns), (1, 1)
    elif n == rows == scales.shape[0]:
        block, blocks = (1, columns), (rows, 1)
    elif scales.shape != blocks:
        raise FormatError(f"{scales.file}: tensor {scales.name} has shape {list(scales.shape)}: expected one scale, "
                          f"one per row, or one per {block[0]} x {block[1]} numbers")
    with scales.open() as file:
        size = n * np.dtype(hf.DTYPES[scales.kind]).itemsize
        data = file.read(size)
    if len(data) < size:
        raise FormatError(f"{scales.file}: tensor {scales.name} is truncated")
    return Scaled(t, scales.numbers(data).reshape(blocks), block)


def connect_scales(stored, block, say):
    """Return the tensors after connecting those in FP8 with their scales, NAME_scale or NAME_scale_inv."""
    out, scales = {}, set()
    if any(name.endswith(UNUSED) for name in stored):
        say("ignoring the scales of activations, which are not in FP8 here")
    for name, t in stored.items():
        if t.kind in TABLES:
            found = [name + end for end in ("_scale", "_scale_inv") if name + end in stored][:1]
            if not found:
                raise FormatError(f"{t.file}: tensor {t.name} is in FP8 and has no scale ({t.name}_scale); "
                                  "download it again")
            scales.update(found)
            t = connected(t, stored[found[0]], block)
        out[name] = t
    return {name: t for name, t in out.items() if name not in scales and not name.endswith(UNUSED)}
