"""Java's .properties: values are translated; keys, comments and what is between them stay. javaproperties knows the
escapes. Where a value is a MessageFormat ({0}) its '' are apostrophes."""

import io
import re

import javaproperties

from .conversions import prose
from .lines import text_parts

JOIN = r"\\(?:\r\n|\r|\n)[ \t\f]*"
BLANK = rf"(?:[ \t\f]|{JOIN})*"
KEY = re.compile(rf"{BLANK}(?:\\(?:\r\n|\r|\n|.)|[^\\:= \t\f\r\n])*{BLANK}(?:[:=]{BLANK})?", re.S)


def parts(data):
    found, ascii_only = [], data.isascii()
    try:
        elements = list(javaproperties.parse(io.StringIO(data, newline="")))
    except javaproperties.InvalidUEscapeError as error:
        raise ValueError(str(error)) from None
    for element in elements:
        source = element.source
        if not isinstance(element, javaproperties.KeyValue) or not prose(element.value):
            found.append(source)
            continue
        body = source.rstrip("\r\n")
        begin = KEY.match(body).end()
        if javaproperties.unescape(re.sub(JOIN, "", body[begin:])) != element.value:
            found.append(source)  # unlike what the library reads
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

    size = len(text) - len(text.lstrip())
    lead = re.match(r"(?:\\[ tnrf]){%d}|" % size, raw)[0]
    if size and not lead:
        lead, raw = escape(text[:size]).replace(" ", "\\ "), None
    else:
        raw = raw[len(lead) :]
    return [lead, *text_parts(text[size:], escape=escape, newline="\\n", raw=raw, checked=True)]
