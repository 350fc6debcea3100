"""JSON of a checkpoint's folder, which is untrusted input."""
import json
import math
import reprlib

from moefile import FormatError, read_bounded

LARGEST_JSON = 1 << 26
# Values, and objects and lists, that any JSON may hold, and one more of them for so many of its bytes: an empty list
# of 3 bytes takes 64 of memory, a key with its value 250.
FREE, VALUE_BYTES, CONTAINER_BYTES = 1 << 16, 6, 16
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
    """Raises ValueError for what is not JSON, or far larger in memory than it is. Signs within texts count too: what
    is written by programs stays far below."""
    containers = data.count(b"[") + data.count(b"{")
    if containers > FREE + len(data) // CONTAINER_BYTES \
            or containers + data.count(b",") > FREE + len(data) // VALUE_BYTES:
        raise ValueError
    try:
        return json.loads(data, object_pairs_hook=pairs_hook, parse_int=number(int), parse_float=number(float),
                          parse_constant=number(float))
    except RecursionError:
        raise ValueError from None


def read_json(path):
    """An object of JSON, its keys told apart."""
    return object_of(read_bounded(path, LARGEST_JSON, "a file of JSON"), path)


def object_of(data, path):
    def unique(pairs):
        out = dict(pairs)
        if len(out) != len(pairs):
            raise FormatError(f"{path}: a key stands twice")
        return out
    try:
        out = parse_json(data, unique)
    except FormatError:
        raise
    except ValueError:
        raise FormatError(f"{path}: not JSON, or of far more values than its size lets expect") from None
    if not isinstance(out, dict):
        raise FormatError(f"{path}: not an object of JSON")
    return out
