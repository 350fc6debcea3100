"""JSON with user-visible strings, such as files of i18next, Vue and Flutter (.arb): translate values that read like
text. Keys, numbers, identifiers, values of keys that start with @ or $, comments (in messages of browser extensions)
and all other bytes do not change."""

import json
import re

from .conversions import prose
from .lines import text_parts

STRING, COMMENT = r'"(?:[^"\\]|\\.)*(?:"|\Z)', r"//[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/|\Z)"
TOKEN = re.compile(rf"{STRING}|{COMMENT}|[{{}}\[\],:]", re.S)


def parts(data):
    check(data)
    ascii_only = data.isascii() and "\\u" in data
    found, end, stack, key = [], 0, [], None  # stack: (kind, whether its content is left untranslated)
    tokens = [match for match in TOKEN.finditer(data) if match[0][0] != "/"]
    for at, match in enumerate(tokens):
        sign = match[0]
        kept = bool(stack and stack[-1][1]) or bool(key and key[:1] in "@$")
        if sign in "{[":
            stack.append((sign, kept))
            key = None
        elif sign in "}]":
            stack.pop()
            key = None
        elif sign == ",":
            key = None if stack and stack[-1][0] == "{" else key
        elif sign[0] == '"' and stack and stack[-1][0] == "{" and tokens[at + 1][0] == ":":
            key = json.loads(sign, strict=False)
        elif sign[0] == '"' and not kept:
            text = json.loads(sign, strict=False)
            if prose(text):
                found.append(data[end : match.start() + 1])
                found += value(text, ascii_only, sign[1:-1])
                end = match.end() - 1
    return [*found, data[end:]]


def value(text, ascii_only, raw):
    def escape(plain):
        return json.dumps(plain, ensure_ascii=ascii_only)[1:-1]

    return text_parts(text, escape=escape, newline="\\n", raw=raw, checked=True)


def check(data):
    """Raise ValueError unless the data is one JSON value, or one per line."""
    try:
        json.loads(TOKEN.sub(lambda match: " " if match[0][0] == "/" else match[0], data), strict=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        try:
            lines = [json.loads(line, strict=False) for line in data.splitlines() if line.strip()]
        except ValueError:
            lines = []
        if len(lines) < 2:
            raise ValueError(f"not JSON: {error}") from None
