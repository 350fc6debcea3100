"""Parse JSON files of a checkpoint, which are untrusted input."""
import json
import math
import re
import reprlib

from moefile import FormatError, read_bounded

LARGEST_JSON = 1 << 26
# Limits on the numbers of values and containers (objects, lists): FREE, plus one per VALUE_BYTES or CONTAINER_BYTES of
# text. In memory, an empty list (3 bytes of text) takes 64 bytes and a key with a value 250.
FREE, VALUE_BYTES, CONTAINER_BYTES = 1 << 16, 6, 16
LONGEST_NUMBER, LONGEST_SHORT = 40, 100


def short(value):
    """Format a value of a checkpoint as one short line for a message."""
    try:
        text = reprlib.repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_SHORT else text[:LONGEST_SHORT - 3] + "..."


def contents(tokens):
    """Return the texts of tokens, which are strings or objects with `content`; anything else is skipped."""
    found = [token.get("content") if isinstance(token, dict) else token
             for token in (tokens if isinstance(tokens, (list, tuple)) else ())]
    return [token for token in found if isinstance(token, str)]


def number(kind):
    """Return a function that parses a number and raises ValueError for infinity and NaN, which JSON lacks."""
    def read(text):
        value = kind(text) if len(text) <= LONGEST_NUMBER else math.inf
        if not math.isfinite(value):
            raise ValueError
        return int(value) if value == int(value) and abs(value) < 1 << 53 else value  # as in C, 8.0 is 8
    return read


def parse_json(data, pairs_hook):
    """Parse JSON; raise ValueError if the text is invalid or would take far more memory than its size. Brackets and
    commas in strings count as values too; the limits are far above what real files need."""
    containers = data.count(b"[") + data.count(b"{")
    if containers > FREE + len(data) // CONTAINER_BYTES \
            or containers + data.count(b",") > FREE + len(data) // VALUE_BYTES:
        raise ValueError
    try:
        found = json.loads(data.decode("utf-8-sig"), object_pairs_hook=pairs_hook, parse_int=number(int),
                           parse_float=number(float), parse_constant=number(float))
        if re.search(rb"\\u[dD][89a-fA-F]", data):  # half a surrogate is not a character
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError:
        raise ValueError from None


def read_json(path):
    """Read a JSON object with unique keys."""
    return object_of(read_bounded(path, LARGEST_JSON, "a JSON file"), path)


def object_of(data, path):
    def unique(pairs):
        out = {}
        for key, value in pairs:
            if key in out:
                raise FormatError(f"{path}: duplicate key {short(key)}")
            out[key] = value
        return out
    try:
        out = parse_json(data, unique)
    except FormatError:
        raise
    except ValueError:
        raise FormatError(f"{path}: not valid JSON, or too many values for its size: download it again") from None
    if not isinstance(out, dict):
        raise FormatError(f"{path}: not a JSON object")
    return out
