"""Read the files of a checkpoint, which are untrusted input and may be compressed.

    file = packed.unpacked(path, most, what)        a binary file that can be mapped
    data = packed.read(path, most, what)            the bytes of a file, at most `most` after decompression

Compression is recognised by the magic number, else by the file name.
"""
import gzip
import os
import subprocess
import tempfile
import zlib

from moefile import FormatError, open_regular

EXPANSION, ALWAYS = 16, 1 << 20  # limits of decompressed size: a multiple of the file size, plus a constant
KINDS = (b"\x1f\x8b", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst")
ZSTD = "zstd", "-dcq", "--memory=128MB"


def unpacked(path, most, what):
    """Open a file; decompress a compressed one to an unnamed temporary file. what: type of the file, for messages."""
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
                raise FormatError(f"{path}: decompresses to more than {most} bytes, the limit for {what}")
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
        raise FormatError(f"{path}: not a gzip file, truncated or damaged") from None


def unpacked_zstd(packed, path, most, what):
    try:
        process = subprocess.Popen(ZSTD, stdin=packed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        raise FormatError(f"{path}: cannot decompress: the program zstd is not installed") from None
    try:
        out = copied(process.stdout, path, most, what)
        if process.wait():
            out.close()
            raise FormatError(f"{path}: not a zstd file, truncated or damaged")
        return out
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def read(path, most, what):
    with unpacked(path, most, what) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise FormatError(f"{path}: more than {most} bytes, the limit for {what}")
    return data
