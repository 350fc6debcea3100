"""Translate the text of documents; all other bytes are copied.

moe-documents -m model.bin -s en -t de page.html -o seite.html

from moe_translate import Translator
from moe_translate.documents import translate_document
page = translate_document(open("page.html").read(), "html", Translator("model.bin", target="de").translate)
"""

import codecs
import contextlib
import gc
import importlib
import inspect
import os
import re
import sys
from dataclasses import dataclass

from .segments import Place, Segment, translate_parts


@dataclass(frozen=True)
class Format:
    """`module` defines parts(text, **options) or, for binary formats, unpack(bytes, **options)."""

    endings: tuple
    module: str = ""
    binary: bool = False


FORMATS = {
    "text": Format((".txt", ".text")),
    "html": Format((".html", ".htm", ".xhtml"), "pages"),
    "markdown": Format((".md", ".markdown"), "markdown"),
    "subtitles": Format((".srt", ".vtt", ".sbv", ".ass", ".ssa"), "subtitles"),
    "po": Format((".po", ".pot"), "po"),
    "docx": Format((".docx", ".docm", ".dotx"), "docx", True),
    "pptx": Format((".pptx", ".pptm", ".potx", ".ppsx"), "pptx", True),
    "xlsx": Format((".xlsx", ".xlsm", ".xltx"), "xlsx", True),
    "odt": Format((".odt", ".ott", ".odp", ".otp"), "odt", True),
    "epub": Format((".epub",), "epub", True),
    "xliff": Format((".xliff", ".xlf", ".sdlxliff", ".mqxliff", ".mxliff"), "xliff"),
    "json": Format((".json", ".arb", ".jsonl"), "strings_json"),
    "table": Format((".csv", ".tsv"), "table"),
    "android": Format((".xml",), "android"),
    "qt": Format((".ts",), "qt"),
    "properties": Format((".properties",), "properties"),
    "yaml": Format((".yaml", ".yml"), "strings_yaml"),
}
# Encodings that documents declare; in HTML a delimiter must follow, because charset= may be part of a text
DECLARED = {
    "html": re.compile(
        rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?([\w.:-]+)(?=[\s\"'/>;])"
        rb"|<\?xml[^>]{0,100}?encoding=[\"']([\w.:-]+)",
        re.I,
    ),
    "po": re.compile(rb"Content-Type:[^\"\\]*charset=([\w.:-]+)", re.I),
    "xml": re.compile(rb"\A\s*<\?xml[^>]{0,100}?encoding=[\"']([\w.:-]+)"),
}
# Encodings that standards prescribe for files that are not UTF-8, such as Java's for .properties
OTHERWISE = {"properties": "iso-8859-1"}
XML = ("html", "android", "qt", "xliff")
MARKS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\0\0", "utf-32-le"),
    (b"\0\0\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
# Python's names for document encodings; others, such as unicode_escape, would change the text
CHARSET = re.compile(r"(?:ascii|utf-(?:8|16|32)|iso|cp\d|koi8|mac|gb|hz$|big5|euc|shift|johab|tis|kz1048|ptcp154)")
# module -> name of its package, if different
PACKAGES = {"markdown_it": "markdown-it-py", "yaml": "PyYAML"}


class DocumentError(ValueError):
    """A document cannot be read or written; the message says why."""


class Body(Segment):
    """A line of plain text, whose spaces and tabs the translator keeps."""

    def source(self):
        return self.items[0] if super().source() else ""


def text_parts(data):
    """Return the parts of plain text, with one segment per line."""
    parts = []
    for line in data.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        parts += [Body([body]), line[len(body) :]]
    return parts


def format_of(path):
    """Return the name of the format for a file's suffix, or None."""
    ending = os.path.splitext(path)[1].lower()
    return next((name for name, form in FORMATS.items() if ending in form.endings), None)


# ---- Characters --------------------------------------------------------


def charset(name):
    """Return Python's name for a document's character encoding; None if it is unknown, such as CHARSET in templates."""
    try:
        found = codecs.lookup(name.strip().lower().removeprefix("x-")).name
    except (LookupError, ValueError):
        return None
    return found if CHARSET.match(found) else None


def decoded(data, kind, encoding=None):
    """Decode a file's bytes: (text, encoding, byte order mark). The name of an unknown encoding is corrected."""
    for mark, name in MARKS:
        if data.startswith(mark):
            return decode(data[len(mark) :], name), name, mark
    if encoding and not charset(encoding):
        raise DocumentError(f"unknown encoding {encoding!r}")
    match = DECLARED.get(kind, DECLARED["xml"]).search(data[: 1 << 16 if kind == "po" else 4096])
    begin, end = match.span(match.lastindex) if match else (0, 0)
    declared = data[begin:end].decode("ascii")
    if not encoding:
        encoding = charset(declared)
        if not encoding or encoding.startswith(("utf-16", "utf-32")):  # their bytes would not match DECLARED
            encoding = "utf-8" if is_utf8(data) else OTHERWISE.get(kind)
        if not encoding:
            return decode(data, "utf-8", declared), "utf-8", b""
    if declared and not charset(declared):
        data = data[:begin] + encoding.upper().encode() + data[end:]
    return decode(data, encoding), encoding, b""


def is_utf8(data):
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def decode(data, encoding, declared=""):
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line, unknown = data.count(b"\n", 0, error.start) + 1, f"the document declares {declared!r}, and "
        raise DocumentError(
            f"{unknown if declared and not charset(declared) else ''}line {line}, byte {error.start} is not valid "
            f"{encoding.upper()}: pass --encoding, e.g. windows-1252"
        ) from None


def encoded(text, kind, encoding):
    instead = {"properties": "javapropertiesreplace"} | dict.fromkeys(XML, "xmlcharrefreplace")
    try:
        return text.encode(encoding, instead.get(kind, "strict"))
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"cannot encode translation: {encoding} lacks {text[error.start]!r}; convert the document to UTF-8"
        ) from None


# ---- Translating -------------------------------------------------------


def translate_document(data, kind, translate, kept=None, encoding=None, context=0, report=None, **options):
    """Translate `data`, str or bytes, and return the same type. kind: a key of FORMATS. `translate` maps a list of
    texts to translations, "" for failures. kept(place, why) is called for each place left at least partly untranslated.
    context: maximum number of preceding texts to pass with each text (Text.before). report: an object; its `remarks`,
    {text: why} filled by `translate`, are passed to `kept` with their places, and its `segments` is set to the number
    of segments. Options, ignored by formats that do not use them: target: the language, for formats that record it;
    overwrite=True: replace existing translations in PO, XLIFF and Qt; columns: names or numbers of a table's columns.
    """
    if kind not in FORMATS:
        raise ValueError(f"unknown format {kind!r}; available: {', '.join(FORMATS)}")
    form = FORMATS[kind]
    # Each format's module imports its own packages, so that users install only the packages they need.
    module = load(form.module, kind) if form.module else None
    read = (module.unpack if form.binary else module.parts) if module else text_parts
    known = inspect.signature(read).parameters
    options = {name: value for name, value in options.items() if name in known and value is not None}
    before, written = b"", isinstance(data, bytes) and not form.binary
    if written:
        data, encoding, before = decoded(data, kind, encoding)
    with reading(kind):
        parts, finish = read(data, **options), getattr(module, "finish", None)
    if form.binary:
        parts, finish = parts
    notes, segments = {}, [segment for segment in segments_of(parts) if segment.source()]
    if not segments and kept and parts:
        kept("", "no text to translate")
    text = translate_parts(parts, translate, lambda segment, why: notes.update({id(segment): why}), context)
    if report:
        report.segments = len(segments)
        for segment in segments if report.remarks else ():
            texts = segment.source(), *segment.pieces()
            notes.update({id(segment): report.remarks[text] for text in texts if text in report.remarks})
    if kept and notes:
        tell(parts, notes, kept)
    if finish:
        with reading(kind):
            text = finish(text, lambda line, why: kept and kept(f"line {line}" if isinstance(line, int) else line, why))
    return before + encoded(text, kind, encoding) if written else text


@contextlib.contextmanager
def reading(kind):
    """Report failures for which a format's reader has no message. Suspend Python's garbage collector, which would
    repeatedly visit the growing tree of a document."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    except RecursionError:
        raise DocumentError("nested too deeply") from None
    except (ArithmeticError, AssertionError, AttributeError, LookupError, StopIteration, TypeError):
        raise DocumentError(f"damaged: cannot be read as {kind}") from None
    finally:
        if enabled:
            gc.enable()


def load(module, kind):
    try:
        return importlib.import_module("." + module, __package__)
    except ModuleNotFoundError as error:
        package = PACKAGES.get((error.name or "").split(".")[0], error.name)
        outside = "python3 -m venv .venv && . .venv/bin/activate && pip"  # Debian's Python is externally managed
        pip = f"{sys.executable} -m pip" if sys.prefix != sys.base_prefix else outside
        raise ImportError(f"{kind}: missing package {package}: {pip} install {package}", name=error.name) from None


def segments_of(parts):
    """Yield the segments among the parts, each followed by those inside its marks."""
    for part in parts:
        if isinstance(part, Segment):
            yield part
            for mark in part.marks():
                yield from segments_of(mark.parts)


def is_doubt(why):
    """Return whether a remark is about a text that was translated, but perhaps wrongly."""
    return why.startswith(("doubtful", "glossary"))


def tell(parts, notes, kept):
    """Call `kept` with the place and text of each segment in `notes`, {id(segment): why}."""
    line = 1
    for part in parts:
        if isinstance(part, Place):
            line = part.line
        elif isinstance(part, str):
            line += part.count("\n")
        else:
            place = getattr(part, "place", None) or f"line {line}"
            for segment in segments_of([part]):
                why = notes.get(id(segment), "")
                if why and (getattr(segment, "speaks", True) or is_doubt(why)):
                    text = segment.source().replace("\xa0", " ")
                    kept(place, f"{why}: {text[:60]!r}{'...' * (len(text) > 60)}")
            line += part.original().count("\n")


def main(arguments=None):
    from .program import main

    return main(arguments)


if __name__ == "__main__":  # scripts run `python -m moe_translate.documents`
    sys.exit(main())
