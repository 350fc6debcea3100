"""Java's .properties: translate values; keys, comments and spacing do not change. javaproperties decodes the escapes.
In MessageFormat values, which contain {0}, '' represents an apostrophe."""

import re

import javaproperties

from .conversions import prose
from .lines import text_parts

JOIN = r"\\(?:\r\n|\r|\n)[ \t\f]*"
BLANK = rf"(?:[ \t\f]|{JOIN})*"
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
APART = re.compile(r"[ \t\f]*(?:[#!]|[\r\n]|\Z)")  # comments and blank lines are never continued
KEY = re.compile(rf"{BLANK}(?:\\(?:\r\n|\r|\n|.)|[^\\:= \t\f\r\n])*{BLANK}(?:[:=]{BLANK})?", re.S)


def logical_lines(data):
    """Yield the lines of each logical line."""
    lines, rows = [match[0] for match in LINE.finditer(data)], []
    for line in lines:
        rows.append(line)
        row = line.rstrip("\r\n")
        kept = len(rows) == 1 and APART.match(line)
        if kept or (len(row) - len(row.rstrip("\\"))) % 2 == 0:
            yield rows
            rows = []
    if rows:
        yield rows


def read(lines):
    """Yield (source, parsed value) of each logical line. One library call per line keeps the time linear."""
    source = "".join(lines)
    if len(lines) == 1:
        return [(source, element) for element in javaproperties.parse(source)]
    rows = [line.lstrip(" \t\f").rstrip("\r\n") for line in lines]
    rows = [row[:-1] for row in rows[:-1]] + rows[-1:]
    return [(source, element) for element in javaproperties.parse("\\\n" + "".join(rows))]


def parts(data):
    found, ascii_only, elements, line = [], data.isascii(), [], 1
    for lines in logical_lines(data):
        try:
            elements += read(lines)
        except javaproperties.InvalidUEscapeError as error:
            raise ValueError(f"not a .properties file: line {line}: {str(error).strip()}") from None
        line += len(lines)
    for source, element in elements:
        if not isinstance(element, javaproperties.KeyValue) or not prose(element.value, element.key):
            found.append(source)
            continue
        body = source.rstrip("\r\n")
        begin = KEY.match(body).end()
        if javaproperties.unescape(re.sub(JOIN, "", body[begin:])) != element.value:
            found.append(source)  # do not change a line that the library reads differently
            continue
        found += [source[:begin], *value(element.value, ascii_only, body[begin:]), source[len(body) :]]
    return found


def value(text, ascii_only, raw):
    formatted = re.search(r"\{\d", text)
    text = text.replace("''", "'") if formatted else text

    def escape(plain):
        plain = plain.replace("'", "''") if formatted else plain
        plain = plain.replace("\\", "\\\\").replace("\t", "\\t").replace("\r", "\\r").replace("\n", "\\n")
        if ascii_only:
            plain = plain.encode("ascii", "javapropertiesreplace").decode("ascii")
        return plain

    size = len(text) - len(text.lstrip(" \t\r\n\f"))
    lead = re.match(r"(?:\\[ \t\ftnrf]|[ \t\f]){%d}|" % size, raw)[0]
    if size and not lead:
        lead, raw = escape(text[:size]).replace(" ", "\\ "), None
    else:
        raw = raw[len(lead) :]
    return [lead, *text_parts(text[size:], escape=escape, newline="\\n", raw=raw, checked=True)]
