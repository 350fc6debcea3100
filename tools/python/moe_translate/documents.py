"""Documents: text, HTML, Markdown, subtitles, PO. Only text is translated; structure keeps its bytes.

moe-documents -m model.bin -s en -t de page.html -o seite.html

from moe_translate import Translator
from moe_translate.documents import translate_document
page = translate_document(open("page.html").read(), "html", Translator("model.bin", target="de").translate)
"""

import argparse
import importlib
import os
import sys

from .segments import Segment, translate_parts

FORMATS = {
    "text": (".txt", ".text"),
    "html": (".html", ".htm", ".xhtml"),
    "markdown": (".md", ".markdown"),
    "subtitles": (".srt", ".vtt"),
    "po": (".po", ".pot"),
}
PACKAGES = {"markdown_it": "markdown-it-py"}  # where a module has another name than the package that brings it


def text_parts(data):
    """A segment a line."""
    parts = []
    for line in data.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        parts += [Segment([body]), line[len(body) :]]
    return parts


def format_of(path):
    """The name of a file's format by its ending; None if unknown."""
    ending = os.path.splitext(path)[1].lower()
    return next((name for name, endings in FORMATS.items() if ending in endings), None)


def translate_document(data, kind, translate, **options):
    """`data` translated. kind: a key of FORMATS; `translate`: list of texts -> list of translations. Of the options
    "po" knows overwrite=True: translate messages that have a translation already."""
    if kind not in FORMATS:
        raise ValueError(f"unknown format {kind!r}; known are {', '.join(FORMATS)}")
    if kind == "text":
        return translate_parts(text_parts(data), translate)
    # Each format has a module with parts(), and imports its library itself, so that nobody needs all of them.
    try:
        module = importlib.import_module("." + kind, __package__)
    except ModuleNotFoundError as error:
        package = PACKAGES.get((error.name or "").split(".")[0], error.name)
        raise ImportError(f"{kind}: {package} is missing; pip install {package}", name=error.name) from None
    found = module.parts(data, **options)
    if kind == "subtitles":
        found, newline = found
        return translate_parts(found, translate).replace("\n", newline)
    return translate_parts(found, translate)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="moe-documents",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Translate a document: text, HTML, Markdown, SRT, VTT, PO.\n"
        "Only text is translated; structure keeps its bytes.",
    )
    parser.add_argument("input", help="document; - is standard input")
    parser.add_argument("-m", "--model", help="model file (default: as for moe-translate)")
    parser.add_argument("-s", "--source", help="language of the document, for models that read it")
    parser.add_argument("-t", "--target", help="language to translate into")
    parser.add_argument("-o", "--output", help="file to write (default: standard output)")
    parser.add_argument("-f", "--format", choices=FORMATS, help="format (default: by the ending of the file)")
    parser.add_argument("--overwrite", action="store_true", help="PO: also translate messages that have a translation")
    options = parser.parse_args(arguments)
    kind = options.format or format_of(options.input)
    if not kind:
        parser.error(f"{options.input}: unknown ending; say --format " + ", ".join(FORMATS))
    from .translator import MoeError, Translator, default_model

    try:
        model = default_model() if options.model is None else options.model
    except MoeError as error:
        parser.error(str(error))
    except ImportError as error:
        print(f"moe-documents: {error}", file=sys.stderr)
        return 3

    try:
        data = sys.stdin.buffer.read() if options.input == "-" else open(options.input, "rb").read()
        wishes = {name: value for name, value in (("source", options.source), ("target", options.target)) if value}
        translator = Translator(model, **wishes)
        extra = {"overwrite": True} if options.overwrite and kind == "po" else {}
        text = translate_document(data.decode("utf-8"), kind, translator.translate, **extra)
    except UnicodeDecodeError as error:
        print(
            f"moe-documents: {options.input}: byte {error.start} is not UTF-8; convert it with iconv", file=sys.stderr
        )
        return 4
    except OSError as error:
        print(f"moe-documents: {error}", file=sys.stderr)
        return 4
    except (MoeError, ImportError) as error:
        print(f"moe-documents: {error}", file=sys.stderr)
        return 3
    if options.output:
        temporary = f"{options.output}.{os.getpid()}.partial"
        try:
            with open(temporary, "xb") as file:
                file.write(text.encode("utf-8"))
            os.replace(temporary, options.output)
        except OSError as error:
            print(f"moe-documents: {error}", file=sys.stderr)
            return 4
    else:
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
