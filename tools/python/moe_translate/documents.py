"""Translate the text of documents; all other bytes are copied.

moe-documents -m model.bin -s en -t de page.html -o seite.html

from moe_translate import Translator
from moe_translate.documents import translate_document
page = translate_document(open("page.html").read(), "html", Translator("model.bin", target="de").translate)
"""

import argparse
import importlib
import inspect
import os
import re
import shutil
import stat
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
    "odt": Format((".odt", ".ott", ".odp"), "odt", True),
    "epub": Format((".epub",), "epub", True),
    "xliff": Format((".xliff", ".xlf"), "xliff"),
    "json": Format((".json", ".arb", ".jsonl"), "strings_json"),
    "table": Format((".csv", ".tsv"), "table"),
    "android": Format((".xml",), "android"),
    "qt": Format((".ts",), "qt"),
    "properties": Format((".properties",), "properties"),
    "yaml": Format((".yaml", ".yml"), "strings_yaml"),
}
# Encodings that documents declare
DECLARED = {
    "html": re.compile(
        rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?([\w.:-]+)|<\?xml[^>]{0,100}?encoding=[\"']([\w.:-]+)", re.I
    ),
    "po": re.compile(rb"Content-Type:[^\"\\]*charset=([\w.:-]+)", re.I),
    "xml": re.compile(rb"\A\s*<\?xml[^>]{0,100}?encoding=[\"']([\w.:-]+)"),
}
# Encodings that standards prescribe for files that are not UTF-8, such as Java's for .properties
OTHERWISE = {"properties": "iso-8859-1"}
XML = ("html", "android", "qt", "xliff")
MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
# module -> name of its package, if different
PACKAGES = {"markdown_it": "markdown-it-py", "yaml": "PyYAML"}


class DocumentError(ValueError):
    """A document cannot be read or written; the message says why."""


def text_parts(data):
    """Return the parts of a plain text, with one segment per line."""
    parts = []
    for line in data.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        parts += [Segment([body]), line[len(body) :]]
    return parts


def format_of(path):
    """Return the name of the format for a file's suffix, or None."""
    ending = os.path.splitext(path)[1].lower()
    return next((name for name, form in FORMATS.items() if ending in form.endings), None)


# ---- Characters --------------------------------------------------------


def decoded(data, kind, encoding=None):
    """Decode a file's bytes: (text, encoding, byte order mark)."""
    for mark, name in MARKS:
        if data.startswith(mark):
            return decode(data[len(mark) :], name), name, mark
    if encoding is None:
        declared = DECLARED.get(kind, DECLARED["xml"]).search(data[:4096])
        encoding = next((name for name in declared.groups() if name), b"").decode() if declared else ""
    try:
        if encoding:
            b"".decode(encoding)
    except LookupError:
        encoding = ""  # not an encoding, such as CHARSET in templates
    if not encoding and kind in OTHERWISE and not is_utf8(data):
        encoding = OTHERWISE[kind]
    return decode(data, encoding or "utf-8"), encoding or "utf-8", b""


def is_utf8(data):
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def decode(data, encoding):
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"byte {error.start} is not valid {encoding.upper()}: pass --encoding, e.g. windows-1252"
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


def translate_document(data, kind, translate, kept=None, encoding=None, context=0, **options):
    """Translate `data`, str or bytes, and return the same type. kind: a key of FORMATS. `translate` maps a list of
    texts to translations, "" for failures. kept(place, why) is called for each place left at least partly untranslated.
    context: number of preceding texts to pass with each text (Text.before). Options, ignored by formats that do not use
    them: target: the language, for formats that record it; overwrite=True: replace existing translations in PO, XLIFF
    and Qt; columns: names or numbers of a table's columns."""
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
    parts, finish = read(data, **options), getattr(module, "finish", None)
    if form.binary:
        parts, finish = parts
    notes = []
    if not any(isinstance(part, Segment) and (part.source() or inner(part)) for part in parts) and kept and parts:
        kept("", "no text to translate")
    text = translate_parts(parts, translate, lambda segment, why: notes.append((segment, why)), context)
    if kept and notes:
        report(parts, notes, kept)
    if finish:
        text = finish(text, lambda line, why: kept and kept(f"line {line}" if isinstance(line, int) else line, why))
    return before + encoded(text, kind, encoding) if written else text


def load(module, kind):
    try:
        return importlib.import_module("." + module, __package__)
    except ModuleNotFoundError as error:
        package = PACKAGES.get((error.name or "").split(".")[0], error.name)
        raise ImportError(f"{kind}: missing package {package}; pip install {package}", name=error.name) from None


def inner(segment):
    return any(isinstance(part, Segment) for mark in segment.marks() for part in mark.parts)


def report(parts, notes, kept):
    """Call `kept` with the place and text of each segment in `notes`."""
    where, line = {}, 1
    for part in parts:
        if isinstance(part, Place):
            line = part.line
        elif isinstance(part, str):
            line += part.count("\n")
        else:
            place = getattr(part, "place", None) or f"line {line}"
            for one in (part, *(deep for mark in part.marks() for deep in mark.parts if isinstance(deep, Segment))):
                where[id(one)] = place
            line += part.original().count("\n")
    for segment, why in notes:
        if getattr(segment, "speaks", True):
            text = segment.source()
            kept(where.get(id(segment), ""), f"{why}: {text[:60]!r}{'...' * (len(text) > 60)}")


class Watched:
    """A function that translates texts with a Translator and returns "" for failures. `notes` collects errors and
    truncations, `doubts` suspicious translations."""

    def __init__(self, translator, progress=False):
        self.translator, self.notes, self.doubts, self.done = translator, {}, {}, 0
        self.progress = progress

    def __call__(self, texts):
        found = []
        for text, result in zip(texts, self.translator.results(texts), strict=True):
            found.append("" if result.error else result.text)
            if result.error:
                self.notes[text] = result.error
            elif result.cut:
                self.notes[text] = "translation was cut at the length limit"
            elif result.truncated:
                self.notes[text] = "only the beginning was translated"
            elif result.note.startswith("doubtful"):
                self.doubts[text] = result.note
            self.done += 1
            if self.progress and (self.done % 20 == 0 or len(found) == len(texts)):
                print(f"\r{self.done} texts", end="", file=sys.stderr, flush=True)
        if self.progress and self.done:
            print("\r" + " " * 30 + "\r", end="", file=sys.stderr, flush=True)
        return found


# ---- Files -------------------------------------------------------------


def write_file(path, data):
    """Write `data` atomically: an existing file is only replaced once all data is on disk."""
    path = os.path.realpath(path)
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        with open(path, "wb", buffering=0) as file:  # a pipe or a device
            write_all(file.fileno(), data)
        return
    temporary = f"{path}.{os.getpid()}.partial"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def write_all(descriptor, data):
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def say(text):
    print("moe-documents: " + text, file=sys.stderr)


def arguments_of(arguments):
    parser = argparse.ArgumentParser(
        prog="moe-documents",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"Translate documents: {', '.join(FORMATS)}.\nOnly text is translated; structure keeps its bytes.",
        epilog="Exit status: 0 all translated; 1 some text left untranslated or cut, with place and reason on stderr;\n"
        "2 usage; 3 model, memory or a missing Python package; 4 input or output, nothing written;\n130 interrupted.",
    )
    parser.add_argument("input", nargs="+", help="document, or - for standard input; several need -o DIRECTORY")
    parser.add_argument("-m", "--model", help="model file (default: as for moe-translate)")
    parser.add_argument("--models", metavar="DIR",
                        help="folder of models: translate with one of them, or with two through a pivot language")
    parser.add_argument("-s", "--source", help="language of the document, if the model needs it")
    parser.add_argument("-t", "--target", help="language to translate into")
    parser.add_argument("-o", "--output", help="file or directory to write (default: standard output)")
    parser.add_argument("--in-place", action="store_true", help="write the translation over the document")
    parser.add_argument("-f", "--format", choices=FORMATS, help="format (default: by the file's suffix)")
    parser.add_argument("--encoding", help="character encoding (default: as the document declares, or UTF-8)")
    parser.add_argument("--overwrite", action="store_true", help="PO, XLIFF, Qt: also replace existing translations")
    parser.add_argument(
        "--glossary",
        metavar="FILE",
        help="terms that translations must contain: source TAB target per line, or CSV; a name alone on a line does "
        "not change",
    )
    parser.add_argument("--context", type=int, default=0, metavar="N",
                        help="prompted models: include N preceding texts of the document in each prompt, 1 to 16")
    parser.add_argument("--columns", help="CSV, TSV: columns to translate, names or numbers from 1 (1,3); default: all")
    options = parser.parse_args(arguments)
    if not 0 <= options.context <= 16:
        parser.error(f"--context {options.context}: out of range (0 to 16)")
    directory = options.output and os.path.isdir(options.output)
    if options.in_place and options.output:
        parser.error("--in-place and -o are mutually exclusive")
    if len(options.input) > 1 and not directory and not options.in_place:
        parser.error("several documents require --in-place or an existing directory: -o DIRECTORY")
    options.jobs = []
    for path in options.input:
        kind = options.format or format_of(path)
        if not kind:
            known = ", ".join(ending for form in FORMATS.values() for ending in form.endings)
            parser.error(f"{path}: unknown suffix; expected {known}, or pass --format " + ", ".join(FORMATS))
        output = path if options.in_place else options.output
        if directory:
            output = os.path.join(options.output, os.path.basename(path))
        if options.in_place and path == "-":
            parser.error("standard input cannot be written in place: omit --in-place")
        if output and not options.in_place and path != "-" and same_file(path, output):
            parser.error(f"{output} is the document itself: pass --in-place to overwrite it")
        options.jobs.append((path, kind, output))
    outputs = [output for _, _, output in options.jobs if output]
    if len(set(outputs)) < len(outputs):
        parser.error("two documents have the same name and would be written to the same file")
    if options.encoding:
        try:
            b"".decode(options.encoding)
        except LookupError:
            parser.error(f"unknown --encoding {options.encoding}")
    if options.model and options.models:
        parser.error("--model and --models are mutually exclusive")
    if options.model is None and options.models is None:
        from .translator import MoeError, default_model

        try:
            options.model = default_model()
        except MoeError as error:
            parser.error(str(error))
    return options


def same_file(one, other):
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def one_document(path, kind, output, watched, options):
    """Translate a document; return 0, or 1 if some text was left untranslated. Raise exceptions on failure."""
    said = []

    def kept(place, why):
        said.append(f"{path}: {place}{': ' if place else ''}{why}")

    if path == "-":
        data = sys.stdin.buffer.read()
    else:
        with open(path, "rb") as file:
            data = file.read()
    watched.notes.clear()
    watched.doubts.clear()
    result = translate_document(data, kind, watched, kept, options.encoding, options.context,
                                overwrite=options.overwrite or None, source=options.source, target=options.target,
                                columns=options.columns)
    if output:
        write_file(output, result)
    else:
        write_all(sys.stdout.fileno(), result)
    said += shown(path, watched.notes)
    for line in [*said, *shown(path, watched.doubts)]:
        say(line)
    return int(any("no text to translate" not in line for line in said))


def shown(path, notes):
    return [f"{path}: {why}: {text[:60]!r}{'...' * (len(text) > 60)}" for text, why in notes.items()]


def failure(path, error, need):
    """Return the exit status and message of an exception."""
    from .translator import MoeError

    if isinstance(error, MoeError) and error.where.startswith("glossary"):
        return 4 if error.status == "io" else 2, str(error)
    if isinstance(error, (MoeError, ImportError)):
        return 3, str(error)
    if isinstance(error, MemoryError):
        return 3, f"{path}: out of memory"
    if isinstance(error, OSError):
        return 4, f"{error.filename or path}: {error.strerror or error}, nothing written"
    if isinstance(error, RecursionError):
        return 4, f"{path}: nested too deeply, nothing written"
    if isinstance(error, (ValueError, AssertionError)):
        return 4, f"{path}: {error}, nothing written"
    return 4, f"{path}: cannot read as {need} ({type(error).__name__}: {error}), nothing written"


def main(arguments=None):
    try:
        return run(arguments_of(arguments))
    except ImportError as error:
        say(str(error))
        return 3
    except KeyboardInterrupt:
        say("interrupted, nothing written")
        return 130


def run(options):
    from .translator import Translator

    status, watched = 0, None
    for path, kind, output in options.jobs:
        try:
            if watched is None:
                names = "source", "target", "glossary", "models", "context"
                given = {name: value for name in names if (value := getattr(options, name))}
                watched = Watched(Translator(options.model, **given), sys.stderr.isatty())
            status = max(status, one_document(path, kind, output, watched, options))
        except KeyboardInterrupt:
            if len(options.jobs) == 1:
                raise
            say(f"interrupted at {path}, which was not written")
            return 130
        except Exception as error:  # noqa: BLE001 - report any failure in one line
            code, text = failure(path, error, kind)
            say(text)
            status = max(status, code)
            if watched is None:
                return code
    return status


if __name__ == "__main__":
    sys.exit(main())
