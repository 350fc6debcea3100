"""JSON with user-visible strings, such as files of i18next, Vue, browser extensions and Flutter (.arb): translate
values that read like text. Keys, numbers, identifiers, values of keys that start with @ or $, comments, notes for
translators and all other bytes do not change. The file's own language code, as in "@@locale", becomes the target's.
"""

import json
import re

from .conversions import MESSAGE, noted, prose
from .languages import renamed
from .lines import text_parts

STRING, COMMENT = r'"(?:[^"\\]|\\.)*(?:"|\Z)', r"//[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/|\Z)"
TOKEN = re.compile(rf"{STRING}|{COMMENT}|[{{}}\[\],:]", re.S)
LANGUAGE = ("@@locale", "locale", "lang", "language")


class Level:
    """An open object or array. key: of the current value; keys: all keys; kept: no value is translated."""

    def __init__(self, sign, parent, keys):
        self.object, self.parent, self.keys = sign == "{", parent, keys
        self.key = None if self.object or not parent else parent.key
        self.kept = parent is not None and parent.keeps()
        catalogue = parent is not None and parent.object or not keys.isdisjoint(("id", "key", "defaultMessage"))
        self.notes = catalogue and noted(keys)

    def keeps(self):
        """Return whether the current value is for programs or translators."""
        key = self.key
        return self.kept or key == "" or key and key[0] in "@$" or self.notes and self.object and key not in MESSAGE

    def names(self):
        """Return whether the current value identifies the text beside it, as in {"key": "hello", "value": "Hello"}."""
        return self.object and self.key in ("id", "key") and not self.keys.isdisjoint(MESSAGE | {"text", "value"})

    def path(self):
        return f"{self.parent and self.parent.key or ''}.{self.key or ''}"


def keys_of(tokens):
    """Return the keys of each object, by the number of its first token."""
    found, stack = {}, []
    for at, token in enumerate(tokens):
        if token[0] in "{[":
            stack.append(found.setdefault(at, set()))
        elif token[0] in "}]":
            stack.pop()
        elif token[0] == ":":
            stack[-1].add(json.loads(tokens[at - 1][0], strict=False))
    return found


def parts(data, source=None, target=None):
    target = target if check(data) else None
    ascii_only = data.isascii() and "\\u" in data
    tokens = [match for match in TOKEN.finditer(data) if match[0][0] != "/"]
    keys, found, end, top = keys_of(tokens), [], 0, None
    for at, match in enumerate(tokens):
        sign, new = match[0], None
        if sign in "{[":
            top = Level(sign, top, keys[at])
        elif sign in "}]":
            top = top.parent
        elif sign[0] == '"':
            text, first = json.loads(sign, strict=False), top is not None and top.object and top.parent is None
            if top is not None and top.object and tokens[at + 1][0] == ":":
                top.key = text
                if first and len(top.keys) == 1 and tokens[at + 2][0] == "{":
                    new = renamed(text, source, target)
            elif first and top.key in LANGUAGE and renamed(text, source, target):
                new = renamed(text, source, target)
            elif not (top and (top.keeps() or top.names())) and prose(text, top.path() if top else ""):
                new = value(text, ascii_only, sign[1:-1])
        if new:
            found += [data[end : match.start() + 1], *new]
            end = match.end() - 1
    return [*found, data[end:]]


def value(text, ascii_only, raw):
    def escape(plain):
        return json.dumps(plain, ensure_ascii=ascii_only)[1:-1]

    newline = "\n" if "\n" in raw and "\\n" not in raw else "\\n"  # some programs write line breaks as they are
    return text_parts(text, escape=escape, newline=newline, raw=raw, checked=True)


def check(data):
    """Return True if the data is one JSON value, False if it is one per line. Raise ValueError if it is neither."""

    def load(text):
        json.loads(text, strict=False, parse_int=str, parse_float=str)

    try:
        load(TOKEN.sub(lambda match: " " if match[0][0] == "/" else match[0], data))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        lines = [line for line in data.split("\n") if line.strip()]
        try:
            for line in lines:
                load(line)
        except ValueError:
            lines = []
        if len(lines) < 2:
            raise ValueError(f"not JSON: {error}") from None
        return False
    return True
