"""JSON of a checkpoint's folder, which is untrusted input."""
import json
import math
import os
import reprlib

from moefile import FormatError

LARGEST_JSON = 1 << 26
LONGEST_NUMBER = 40


def short(value):
    """A value of a checkpoint in a message: of one line, and short whatever it is."""
    try:
        return reprlib.repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"


def number(kind):
    """A function that reads a number of JSON, or raises ValueError: JSON knows no infinity and no NaN."""
    def read(text):
        value = kind(text) if len(text) <= LONGEST_NUMBER else math.inf
        if not math.isfinite(value):
            raise ValueError
        return value
    return read


def parse_json(data, pairs_hook):
    """Raises ValueError for what is not JSON."""
    try:
        return json.loads(data, object_pairs_hook=pairs_hook, parse_int=number(int), parse_float=number(float),
                          parse_constant=number(float))
    except RecursionError:
        raise ValueError from None


def read_json(path):
    """An object of JSON, its keys told apart."""
    def unique(pairs):
        out = dict(pairs)
        if len(out) != len(pairs):
            raise FormatError(f"{path}: a key stands twice")
        return out
    if os.path.getsize(path) > LARGEST_JSON:
        raise FormatError(f"{path}: {os.path.getsize(path)} bytes, at most {LARGEST_JSON} are read")
    with open(path, "rb") as file:
        data = file.read()
    try:
        out = parse_json(data, unique)
    except FormatError:
        raise
    except ValueError:
        raise FormatError(f"{path}: not JSON") from None
    if not isinstance(out, dict):
        raise FormatError(f"{path}: not an object of JSON")
    return out
