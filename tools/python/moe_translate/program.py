"""The program moe-documents: options, files, progress, messages."""

import argparse
import errno
import os
import re
import shlex
import stat
import sys
import tempfile
import textwrap

from .documents import FORMATS, DocumentError, charset, format_of, is_doubt, translate_document
from .segments import TAG, untranslated
from .text import paired

NAME = "moe-documents"
WORD = re.compile(r"[^\W\d_]{2,}")
SENTENCE = 3  # minimum words of a text that is doubtful if its translation is equal
# (group, letter, name, argument, help): an empty argument is a flag, an empty help text means that of moe-translate
ROWS = (
    ("Model", "m", "model", "FILE",
     "model file (default: MOE_MODEL, else fetched models, else the installed model)"),
    ("Model", "", "models", "DIR", "use all models (*.bin) in a directory"),
    ("Model", "", "no-cache", "", "do not keep the conversion of a published model"),
    ("Languages", "t", "target", "LANG", ""),
    ("Languages", "s", "source", "LANG", ""),
    ("Input and output", "o", "output", "FILE", "write to FILE, or into a directory, instead of standard output (-)"),
    ("Input and output", "", "in-place", "", "write the translation over the document"),
    ("Input and output", "f", "format", "NAME", "format (default: by the file's suffix)"),
    ("Input and output", "", "encoding", "NAME", "character encoding (default: as the document declares, or UTF-8)"),
    ("Input and output", "", "overwrite", "", "PO, XLIFF, Qt: also replace existing translations"),
    ("Input and output", "", "columns", "LIST",
     "CSV, TSV: columns to translate, names or numbers from 1, e.g. 1,3 (default: all)"),
    ("Search", "", "beam", "N", ""),
    ("Search", "", "rerank", "X", ""),
    ("Text", "", "glossary", "FILE", ""),
    ("Text", "", "memory", "FILE", ""),
    ("Prompted models", "", "context", "N",
     "add up to N previous texts of the document to the prompt, without their translations, 0 to 16 (default: 0)"),
    ("Speed (same output)", "", "threads", "N", ""),
    ("Other", "", "set", "NAME=VALUE", "set an option of moe-translate, e.g. batch=64; may be repeated"),
    ("Other", "v", "verbose", "", "print how often each glossary term occurs and is kept"),
    ("Other", "q", "quiet", "", "print errors only, without progress or the final count"),
    ("Other", "h", "help", "", "print this help"),
    ("Other", "V", "version", "", "print the version"),
)
DESCRIPTION = "Translate the text of documents; all other bytes are copied.\n" + textwrap.fill(
    "Formats: " + ", ".join(FORMATS), 79)
NOTES = """A document is written completely or not at all. DOCUMENT - is standard input.
Exit status: 0 all translated, 1 some text left untranslated or cut, or glossary
terms lost, with place and reason on stderr, 2 usage error, 3 model or memory
error or a missing Python package, 4 input or output error, 130 interrupted."""


class Usage(Exception):
    """A usage error; the message says what is wrong."""


def say(text):
    print(f"{NAME}: {text}", file=sys.stderr)


# ---- Options -----------------------------------------------------------


class Help(argparse.HelpFormatter):
    """Print options like the other programs, from which tools/completions.awk makes completions."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=28, width=80)
        self._action_max_length = 26

    def add_usage(self, usage, actions, groups, prefix=None):
        super().add_usage(usage, actions, groups, "Usage: ")

    def _fill_text(self, text, width, indent):
        return text

    def _format_action_invocation(self, action):
        names = ", ".join(action.option_strings)
        indent = "" if len(action.option_strings) > 1 else "    "
        return indent + names + (f" {action.metavar}" if action.metavar else "")


class Parser(argparse.ArgumentParser):
    def _print_message(self, message, file=None):
        print(message, end="", file=file)  # argparse would ignore a full disk

    def error(self, message):
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def context(text):
    if not text.isdecimal() or int(text) > 16:
        raise argparse.ArgumentTypeError(f"invalid value {text!r}: out of range (0 to 16)")
    return int(text)


def parser_of():
    from .translator import options, version

    known = {name: text for name, _, text in options()}
    parser = Parser(prog=NAME, usage=f"{NAME} [-m MODEL] -t LANG [OPTION]... DOCUMENT...", description=DESCRIPTION,
                    epilog=NOTES, formatter_class=Help, add_help=False)
    parser.add_argument("input", nargs="+", metavar="DOCUMENT", help=argparse.SUPPRESS)
    more = {"help": {"action": "help"}, "version": {"action": "version", "version": f"{NAME} {version()}"},
            "format": {"choices": FORMATS}, "context": {"type": context, "default": 0},
            "set": {"action": "append", "default": []}}
    groups = {}
    for title, letter, name, argument, text in ROWS:
        group = groups[title] = groups.get(title) or parser.add_argument_group(title)
        kind = {"metavar": argument} if argument else {} if name in more else {"action": "store_true"}
        names = [f"-{letter}"] * bool(letter) + [f"--{name}"]
        group.add_argument(*names, help=(text or known[name]).replace("%", "%%"), **kind, **more.get(name, {}))
    return parser


def arguments_of(arguments):
    parser = parser_of()
    options = parser.parse_args(arguments)
    try:
        options.jobs = list(jobs_of(options))
        options.settings = settings_of(options)
    except Usage as error:
        parser.error(str(error))
    return options


def jobs_of(options):
    """Yield (input, format, output) of each document; output None: standard output."""
    if options.output == "-":
        options.output = None
    directory = options.output and os.path.isdir(options.output)
    if options.in_place and options.output:
        raise Usage("--in-place and -o are mutually exclusive")
    if len(options.input) > 1 and not directory and not options.in_place:
        if options.output and not os.path.exists(options.output):
            raise Usage(f"{options.output}: {missing_folder(options.output)}")
        raise Usage("several documents require --in-place or a directory: -o DIRECTORY")
    if options.encoding and not charset(options.encoding):
        raise Usage(f"unknown --encoding {options.encoding}")
    outputs = set()
    for path in options.input:
        kind = options.format or format_of(path)
        if not kind:
            raise Usage(f"{path}: unknown suffix: pass --format NAME")
        output = path if options.in_place else options.output
        if directory:
            output = os.path.join(options.output, os.path.basename(path))
        if options.in_place and path == "-":
            raise Usage("standard input cannot be written in place: omit --in-place")
        if output and not options.in_place and path != "-" and same_file(path, output):
            raise Usage(f"{output} is the document itself: pass --in-place to overwrite it")
        if not output and FORMATS[kind].binary and sys.stdout and sys.stdout.isatty():
            raise Usage(f"{path}: {kind} is binary and not written to a terminal: pass -o FILE")
        if output in outputs:
            raise Usage("two documents have the same name and would be written to the same file")
        outputs |= {output} - {None}
        yield path, kind, output


def settings_of(options):
    """Return the keyword arguments for Translator."""
    names = "target", "source", "glossary", "memory", "models", "context", "beam", "rerank", "threads"
    settings = {name: value for name in names if (value := getattr(options, name))}
    if options.no_cache:
        settings["cache"] = 0
    for text in options.set:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise Usage(f"--set {text}: expected NAME=VALUE")
        if name in settings:
            raise Usage(f"option {name} is given twice")
        settings[name] = value
    if options.model and options.models:
        raise Usage("--model and --models are mutually exclusive")
    return settings


def same_file(one, other):
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


# ---- Translating -------------------------------------------------------


def folded(text):
    """Return a text in lower case, without tags and white space, for comparison."""
    return "".join(TAG.sub("", text).lower().split())


class Watched:
    """A function that translates texts with a Translator and returns "" for failures. remarks: {text: why} for errors,
    cuts and doubts. segments: set by translate_document."""

    def __init__(self, translator, progress=False):
        self.translator, self.progress, self.remarks, self.segments = translator, progress, {}, 0
        self.done = self.total = 0
        self.heading = translator.glossary_heading

    def __call__(self, texts):
        found = []
        self.total += len(texts)
        for text, result in paired(texts, self.translator.results(texts)):
            broken = untranslated(text, result.note)  # translated in pieces
            same = result.text == text and "left untranslated" in result.note
            found.append("" if result.error or broken or same else result.text)
            why = (result.error or (result.cut and "translation was cut at the length limit")
                   or (result.truncated and "only the beginning was translated") or result.note
                   or (folded(result.text) == folded(text) and len(WORD.findall(TAG.sub(" ", text))) >= SENTENCE
                       and "doubtful: equal to the source"))
            if why and not broken and not why.startswith("a sentence exceeds"):  # and was translated in parts
                self.remarks[text] = why
            self.done += 1
            if self.progress and (self.done % 20 == 0 or len(found) == len(texts)):
                print(f"\r{self.done} of {self.total} segments", end="", file=sys.stderr, flush=True)
        if self.progress and self.done:
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
        return found


def translator_of(options):
    """Return a Translator with these options. Raise Usage for an option that the library rejects."""
    from .translator import MoeError, Translator

    try:
        translator = Translator(options.model or None, **options.settings)
    except MoeError as error:
        if error.where == "model":
            raise Usage(str(error)) from None
        if error.status != "argument" or error.where.startswith(("glossary", "memory")):
            raise
        letter = {"target": "-t: ", "source": "-s: "}.get(error.where, "")
        raise Usage(letter + str(error).removeprefix(f"{error.where}: ")) from None
    try:
        translator.check_languages()
    except MoeError as error:
        letter = {"target": "-t LANG (target language)", "source": "-s LANG (source language)"}.get(error.where)
        known = " ".join(translator.model.languages)
        raise Usage(f"missing {letter}; languages of this model: {known}" if letter else str(error)) from None
    return translator


def tell_terms(translator, every):
    """Print how often the glossary's terms occurred and were kept, in total, and for each lost term or, if `every`, for
    each one."""
    for term in translator.terms():
        if every or term.kept < term.asked:
            count = f"{term.kept} of {term.asked} kept" if term.asked else "does not occur"
            say(f"term {term.source!r} = {term.target!r}: {count}")
    if terms := [term for term in translator.terms() if term.asked]:
        count = "1 term" if len(terms) == 1 else f"{len(terms)} terms"
        say(f"{count}: {sum(term.kept for term in terms)} of {sum(term.asked for term in terms)} kept")


def opened(stream, name):
    """Return a standard stream, which is None if it is closed."""
    if stream is None:
        raise OSError(errno.EBADF, "closed", name)
    return stream


def read_file(path):
    if path == "-":
        return opened(sys.stdin, "standard input").buffer.read()
    with open(path, "rb") as file:
        return file.read()


class Count:
    """The segments of all documents."""

    def __init__(self):
        self.documents = self.segments = self.kept = self.doubtful = 0

    def add(self, segments, remarks):
        doubtful = sum(is_doubt(why) for _, why in remarks)
        self.documents, self.segments = self.documents + 1, self.segments + segments
        self.kept, self.doubtful = self.kept + len(remarks) - doubtful, self.doubtful + doubtful

    def __str__(self):
        documents = f"{self.documents} documents, " if self.documents > 1 else ""
        segments = f"{self.segments} segment{'s' * (self.segments != 1)}"
        return (f"{documents}{segments}: {max(0, self.segments - self.kept)} translated, "
                f"{self.kept} kept, {self.doubtful} doubtful")


def one_document(path, kind, output, watched, options, count):
    """Translate a document; return 0, or 1 if some text was left untranslated. Raise exceptions on failure."""
    remarks = []
    if output:
        check_output(output)
    else:
        opened(sys.stdout, "standard output")
    data = read_file(path)
    watched.remarks.clear()
    result = translate_document(data, kind, watched, lambda place, why: remarks.append((place, why)), options.encoding,
                                options.context, report=watched, overwrite=options.overwrite or None,
                                source=options.source, target=options.target, columns=options.columns)
    if output:
        write_file(output, result, data if options.in_place else None)
    else:
        write_all(sys.stdout.fileno(), result)
    for place, why in remarks:
        say(f"{path}: {place}{': ' if place else ''}{why}")
    remarks = [(place, why) for place, why in remarks if not why.startswith(("no text to translate", "kept because"))]
    count.add(watched.segments, remarks)
    return int(any(not why.startswith("doubtful") for _, why in remarks))


# ---- Files -------------------------------------------------------------


def check_output(path):
    """Raise OSError if `path` cannot be written, before time is spent on a translation."""
    real = os.path.realpath(path)
    for folder in os.path.dirname(path), os.path.dirname(real):
        if folder and not os.path.exists(folder):
            raise FileNotFoundError(errno.ENOENT, missing_folder(folder), path)
    if os.path.isdir(real):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    try:
        mode = os.stat(path).st_mode  # fails if the name is too long
    except FileNotFoundError:
        mode = 0
    for name in [path] * bool(mode) + [os.path.dirname(real)] * (not mode or stat.S_ISREG(mode)):
        if not os.access(name, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)


def missing_folder(path):
    return f"missing folder (create it: mkdir -p {shlex.quote(path)})"


def write_file(path, data, source=None):
    """Write `data` atomically: an existing file is only replaced once all data is on disk and, if `source` is given, if
    the file still contains it."""
    there = os.stat(path) if os.path.exists(path) else None
    if there and not stat.S_ISREG(there.st_mode):
        with open(path, "wb", buffering=0) as file:  # a pipe or a device
            write_all(file.fileno(), data)
        return
    path = os.path.realpath(path)
    handle, temporary = tempfile.mkstemp(".partial", ".moe-", os.path.dirname(path))
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            set_mode(handle, there)
            os.fsync(handle)
        if source is not None and read_file(path) != source:
            raise DocumentError("another program changed the document during translation")
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def set_mode(handle, old):
    """Give a file the owner and permissions of the file that it replaces, whose os.stat_result is `old`, if any."""
    if not old:
        os.umask(mask := os.umask(0))
        os.fchmod(handle, 0o666 & ~mask)
        return
    try:
        os.fchown(handle, old.st_uid, old.st_gid)
        os.fchmod(handle, stat.S_IMODE(old.st_mode))
    except OSError:
        os.fchmod(handle, old.st_mode & 0o777)  # set-user-ID bits would grant the rights of another owner


def write_all(descriptor, data):
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# ---- Main --------------------------------------------------------------


def failure(path, error, kind):
    """Return the exit status and message of an exception."""
    from .translator import MoeError

    if isinstance(error, MoeError) and error.where.startswith(("glossary", "memory")):
        return 4 if error.status == "io" else 2, str(error)
    if isinstance(error, (MoeError, ImportError)):
        return 3, str(error)
    if isinstance(error, MemoryError):
        return 3, f"{path}: out of memory"
    if isinstance(error, OSError):
        return 4, f"{error.filename or path}: {error.strerror or error}, nothing written"
    if isinstance(error, RecursionError):
        return 4, f"{path}: nested too deeply, nothing written"
    if isinstance(error, (ValueError, AssertionError)) and str(error):
        return 4, f"{path}: {error}, nothing written"
    return 4, f"{path}: damaged, or not a file of format {kind}; nothing written"


def reported(name, work):
    """Run `work` and return its exit status. Report in one line what can end any program."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - print() would write messages to standard output
    try:
        try:
            status = work()
        except SystemExit as end:  # argparse has printed the help or an error
            status = end.code
        if sys.stdout:
            sys.stdout.flush()
        return status
    except ImportError as error:
        status, text = 3, str(error)
    except KeyboardInterrupt:
        status, text = 130, "interrupted, nothing written"
    except OSError as error:
        if sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
        status, text = 4, f"{error.filename or 'standard output'}: {error.strerror}"
    print(f"{name}: {text}", file=sys.stderr)
    return status


def main(arguments=None):
    return reported(NAME, lambda: run(arguments_of(arguments)))


def run(options):
    status, count = 0, Count()
    try:
        watched = Watched(translator_of(options), sys.stderr.isatty() and not options.quiet)
    except Usage as error:
        say(str(error))
        return 2
    except Exception as error:  # noqa: BLE001 - report any failure in one line
        status, text = failure("model", error, "")
        say(text)
        return status
    if watched.heading and not options.quiet:
        say(f"{options.settings['glossary']}: the first line names the columns and was ignored: {watched.heading}")
    for path, kind, output in options.jobs:
        try:
            status = max(status, one_document(path, kind, output, watched, options, count))
        except KeyboardInterrupt:
            if len(options.jobs) == 1:
                raise
            say(f"interrupted at {path}, which was not written")
            return 130
        except Exception as error:  # noqa: BLE001 - report any failure in one line
            code, text = failure(path, error, kind)
            say(text)
            status = max(status, code)
    if count.documents and not options.quiet:
        tell_terms(watched.translator, options.verbose)
        say(str(count))
    return status


if __name__ == "__main__":
    sys.exit(main())
