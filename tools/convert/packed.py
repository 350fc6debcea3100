"""Files of a checkpoint that may be compressed, which are untrusted input.

    file = packed.unpacked(path, most, what)        a file of bytes that can be mapped
    data = packed.read(path, most, what)            the same as bytes; at most `most` of them, unpacked

What a file begins with says how it is compressed, or else its name.
"""
import gzip
import os
import subprocess
import tempfile
import zlib

from moefile import FormatError, open_regular

EXPANSION, ALWAYS = 16, 1 << 20  # a file may become so many times as long, and this much in any case
KINDS = (b"\x1f\x8b", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst")
ZSTD = "zstd", "-dcq", "--memory=128MB"


def unpacked(path, most, what):
    """The file, or a compressed one's contents, in a file without a name. what: a file of its kind, for messages."""
    packed = open_regular(path)
    begin = os.pread(packed.fileno(), 4, 0)
    kind = next((name for magic, name in KINDS if begin.startswith(magic) or path.endswith(name)), None)
    if kind is None:
        return packed
    most = min(most, EXPANSION * os.fstat(packed.fileno()).st_size + ALWAYS)
    with packed:
        return (unzipped if kind == ".gz" else unpacked_zstd)(packed, path, most, what)


def copied(source, path, most, what):
    out = tempfile.TemporaryFile()
    try:
        while block := source.read(1 << 20):
            if out.tell() + len(block) > most:
                raise FormatError(f"{path}: unpacked it has more than {most} bytes, too many for {what}")
            out.write(block)
    except BaseException:
        out.close()
        raise
    out.seek(0)
    return out


def unzipped(packed, path, most, what):
    try:
        with gzip.GzipFile(fileobj=packed) as source:
            return copied(source, path, most, what)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise FormatError(f"{path}: not of gzip, damaged or cut off") from None


def unpacked_zstd(packed, path, most, what):
    try:
        process = subprocess.Popen(ZSTD, stdin=packed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        raise FormatError(f"{path}: the program zstd, which reads it, is missing here") from None
    try:
        out = copied(process.stdout, path, most, what)
        if process.wait():
            out.close()
            raise FormatError(f"{path}: not of zstd, damaged or cut off")
        return out
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def read(path, most, what):
    with unpacked(path, most, what) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise FormatError(f"{path}: more than {most} bytes, too many for {what}")
    return data
