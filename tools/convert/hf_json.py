"""JSON of a checkpoint's folder, which is untrusted input."""
import json
import os

from moefile import FormatError

LARGEST_JSON = 1 << 27


def read_json(path):
    """An object of JSON, its keys told apart."""
    def unique(pairs):
        out = dict(pairs)
        if len(out) != len(pairs):
            raise FormatError(f"{path}: a key stands twice")
        return out
    if os.path.getsize(path) > LARGEST_JSON:
        raise FormatError(f"{path}: too large")
    with open(path, "rb") as file:
        try:
            out = json.loads(file.read(), object_pairs_hook=unique)
        except (ValueError, RecursionError):
            raise FormatError(f"{path}: not JSON") from None
    if not isinstance(out, dict):
        raise FormatError(f"{path}: not an object of JSON")
    return out
