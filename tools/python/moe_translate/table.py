"""CSV and TSV tables: translate cells that read like text. Numbers, identifiers, quotes, delimiters and line ends do
not change, nor does the first row if columns are selected by name."""

import re

from .conversions import prose
from .lines import text_parts

QUOTED = re.compile(r'"(?:[^"]|"")*"')
BARE = "\x01"  # marks the ends of an unquoted cell, whose translation may need quotes


def delimiter_of(data):
    line = re.sub(r'"(?:[^"]|"")*"', "", data[:10000]).split("\n")[0]
    return max("\t;,|", key=line.count)


def cells(data, delimiter):
    """Yield (row, column, begin, end) of each cell."""
    field = re.compile(rf'{QUOTED.pattern}(?=[{re.escape(delimiter)}\r\n]|\Z)|[^{re.escape(delimiter)}\r\n]*')
    at = row = column = 0
    while at < len(data):
        match = field.match(data, at)
        yield row, column, match.start(), match.end()
        at = match.end()
        if data[at : at + 1] == delimiter:
            at, column = at + 1, column + 1
        elif at < len(data):
            at += 2 if data.startswith("\r\n", at) else 1
            row, column = row + 1, 0


def unquoted(raw):
    return raw[1:-1].replace('""', '"') if QUOTED.fullmatch(raw) else raw


def doubled(text):
    return text.replace('"', '""')


def chosen(columns, names):
    """Return the column numbers, and whether the first row is a header."""
    wanted, numbers = [name.strip() for name in columns.split(",")], set()
    for name in wanted:
        if name in names:
            numbers.add(names.index(name))
        elif name.isdigit() and 0 < int(name) <= len(names):
            numbers.add(int(name) - 1)
        else:
            raise ValueError(f"unknown column {name!r}; available: {', '.join(map(repr, names))}")
    return numbers, any(name in names for name in wanted)


def parts(data, columns=None):
    if BARE in data:
        raise ValueError("unexpected control character")
    delimiter = delimiter_of(data)
    where = list(cells(data, delimiter))
    names = [unquoted(data[begin:end]).strip("\ufeff ") for row, _, begin, end in where if row == 0]
    numbers, header = chosen(columns, names) if columns else (None, False)
    found, last = [], 0
    for row, column, begin, end in where:
        raw = data[begin:end]
        text = unquoted(raw)
        if numbers is not None and column not in numbers or header and not row or not prose(text):
            continue
        if raw[:1] == '"' and text == raw:  # a damaged cell, which readers may understand in several ways
            found += [data[last:begin], *text_parts(text, checked=True)]
        elif raw[:1] == '"':
            newline = "\r\n" if text.count("\r\n") == text.count("\n") else "\n"
            inner = text_parts(text.replace(newline, "\n"), newline=newline, escape=doubled, checked=True)
            found += [data[last : begin + 1], *inner, '"']
        else:
            found += [data[last:begin], BARE, *text_parts(text, checked=True), BARE]
        last = end
    return [*found, data[last:]]


def finish(text, report):
    delimiter = delimiter_of(text.replace(BARE, ""))

    def bare(match):
        cell = match[1]
        needs = delimiter in cell or "\n" in cell or "\r" in cell or cell.startswith('"')
        return '"' + cell.replace('"', '""') + '"' if needs else cell

    return re.sub(f"{BARE}([^{BARE}]*){BARE}", bare, text)
