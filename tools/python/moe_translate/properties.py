"""Java's .properties: translate values; keys, comments and spacing do not change. javaproperties decodes the escapes.
In MessageFormat values, which contain {0}, '' represents an apostrophe, and the texts of {0,choice,0#none|1#one} are
translated separately."""

import re

import javaproperties

from .conversions import prose
from .lines import Line, text_parts
from .segments import Mark, Segment

JOIN = r"\\(?:\r\n|\r|\n)[ \t\f]*"
BLANK = rf"(?:[ \t\f]|{JOIN})*"
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
APART = re.compile(r"[ \t\f]*(?:[#!]|[\r\n]|\Z)")  # comments and blank lines are never continued
KEY = re.compile(rf"{BLANK}(?:\\(?:\r\n|\r|\n|.)|[^\\:= \t\f\r\n])*{BLANK}(?:[:=]{BLANK})?", re.S)
CHOICE = re.compile(r"\{\s*\d+\s*,\s*choice\s*,")
LIMIT = re.compile(r"\s*[-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|\u221e)\s*[#<\u2264]")
SIGNS = re.compile(r"\{[^{}]*\}|\\u2264|[|#<\u2264{}]")


class Message(Line):
    """A line with choices, each of which is a word to the translator."""

    def __init__(self, lines, escape, **options):
        super().__init__(lines, escape, **options)
        self.items = [found for item in self.items for found in choices(item, escape)]
        self.given = [mark.raw for mark in self.marks()]

    def original(self):
        same = self.given == [mark.raw for mark in self.marks()]
        return super().original() if same else self._whole(self._written(self.items))


def choices(text, escape):
    """Return the texts and marks of a text with choices. Raise ValueError if a choice is invalid or inside another."""
    found, end = [], 0
    while match := CHOICE.search(text, end):
        limbs, depth, begin = [], 1, match.end()
        for sign in re.compile(r"[{}|]").finditer(text, begin):
            depth += {"{": 1, "}": -1, "|": 0}[sign[0]]
            if not depth or depth == 1 and sign[0] == "|":
                limbs.append(text[begin : sign.start()])
                begin = sign.end()
            if not depth:
                break
        if depth or not all(map(LIMIT.match, limbs)) or any(map(CHOICE.search, limbs)):
            raise ValueError("invalid choice")
        parts = [escape(match[0])]
        for limb in limbs:
            limit = LIMIT.match(limb)[0]
            parts += [escape(limit), limb_of(limb[len(limit) :], escape), "|"]
        parts[-1] = "}"
        raw = "".join(part if isinstance(part, str) else part.original() for part in parts)
        found += [text[end : match.start()], Mark(raw, "word", parts)]
        end = begin
    return [item for item in (*found, text[end:]) if item != ""]


def limb_of(text, escape):
    """Return the Segment of one text of a choice. Java parses a text with {0} once more."""
    again = "{" in text

    def encode(plain):
        return escape(plain.replace("'", "''") if again else plain)

    text = text.replace("''", "'") if again else text
    signs = sorted(SIGNS.findall(encode(text)))
    return Segment([text], encode, lambda raw: sorted(SIGNS.findall(raw)) == signs)


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
    quoted = formatted and "'" in text.replace("''", "")
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
    options = {"escape": escape, "newline": "\\n", "raw": raw, "checked": True}
    if not CHOICE.search(text):
        return [lead, *text_parts(text[size:], **options)]
    try:
        if quoted:
            raise ValueError("quotes in a choice")
        return [lead, *text_parts(text[size:], Message, **options)]
    except ValueError:
        found = text_parts(text[size:], **options)
    for line in found:
        if isinstance(line, Line):
            line.check = lambda raw: False  # leave the message unchanged, with a note
    return [lead, *found]
