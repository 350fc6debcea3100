"""Translator: translate texts with a moe model file."""

import contextlib
import ctypes
import functools
import itertools
import numbers
import os
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, overload

from . import library as c
from .engine import (Call, Engine, Glossary, Job, MoeError, Term, checked, checked_call, checked_terms, language, lib,
                     no_text, register_for_fork, without_nul)
from .local import chosen
from .text import paired
from .typed import CallOptions, Options, Unpack

if TYPE_CHECKING:
    from typing_extensions import TypeAlias  # checkers know it without the package


class TextError(MoeError):
    """A text could not be translated; index: position of the text in the list."""

    def __init__(self, message: str, status: str = "", index: int = 0):  # unpickling passes only the message
        super().__init__(message, status)
        self.index = index


@dataclass(frozen=True)
class Link:
    """Aligned characters [begin, end) of source and translation."""

    source_begin: int
    source_end: int
    target_begin: int
    target_end: int


@dataclass(frozen=True)
class Hypothesis:
    text: str
    score: float  # hypotheses are ranked by this score
    logprob: float  # sum of token_logprobs
    token_logprobs: tuple[float, ...]  # natural logarithms, including the end token of every sentence
    ids: tuple[int, ...]
    finished: bool  # False if cut at the length limit
    alignment: tuple[Link, ...]  # empty without the option alignment=1
    tokens: tuple[str, ...] = ()  # the pieces of `ids`


@dataclass(frozen=True)
class Result:
    """The result of one text. error: why the text or part of it was not translated; "" on success."""

    text: str
    hypotheses: tuple[Hypothesis, ...]
    error: str
    status: str
    cut: bool  # True if the translation was cut at the length limit
    truncated: bool  # only the beginning of the source was used
    incomplete: bool  # parts of the translation are missing
    source_tokens: tuple[str, ...] = ()
    source_ids: tuple[int, ...] = ()
    # Pivot text and language if two models translated (tokens, ids and scores refer to the pivot text), else "".
    between: str = ""
    between_language: str = ""
    note: str = ""  # a remark about the translation, such as why it is doubtful
    # Probability that the translation is right (chrF of at least 60); None if the model has no table for it.
    confidence: "float | None" = None
    # Terms of the glossary that occur in the text: (term, translation, True if the translation has it).
    terms: tuple[tuple[str, str, bool], ...] = ()


class Stats(SimpleNamespace):
    """Counts of a Translator since its creation: the members of moe_stats in moe.h, integers unless declared here."""

    isa: str
    device: str
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


def options() -> list[tuple[str, str, str]]:
    """Return (name, values, help) of every option of Translator."""
    found, at = [], 0
    while (info := lib().moetext_option(at)).name:
        found.append((info.name.decode(), info.values.decode(), info.help.decode()))
        at += 1
    return found


def default_model() -> str:
    """Return the path to the default model: $MOE_MODEL, else the installed model, else the repository's model. Raises
    MoeError if there is none."""
    path = ctypes.create_string_buffer(8192)
    checked_call("moetext_default_model", path, len(path))
    return os.fsdecode(path.value)


def version() -> str:
    return lib().moetext_version().decode()


@contextlib.contextmanager
def _glossary(terms):
    """Yield the path to a file with these terms, or None without terms."""
    if terms is None or isinstance(terms, (str, os.PathLike)):
        yield None if terms is None else os.fspath(terms)
        return
    lines = ["source,target"]
    lines += [",".join('"' + text.replace('"', '""') + '"' for text in pair) for pair in checked_terms(_terms(terms))]
    if len(lines) == 1:
        yield None
        return
    handle, path = tempfile.mkstemp(suffix=".csv")
    try:
        with open(handle, "wb") as file:
            file.write("\n".join(lines).encode("utf-8", "surrogatepass"))
        yield path
    finally:
        os.unlink(path)


def _option_string(settings):
    parts = []
    for name, value in settings.items():
        if value is None:
            continue
        text = str(int(value)) if isinstance(value, bool) else str(value)
        if ";" in text or "\0" in text:
            raise MoeError(f"invalid value {text!r}: contains a semicolon or NUL", "argument", name)
        parts.append(f"{name.replace('_', '-')}={text}")
    return os.fsencode(";".join(parts))  # file names need not be UTF-8


Paths: "TypeAlias" = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
Terms: "TypeAlias" = "Mapping[str, str] | None"
Cell: "TypeAlias" = "str | float | None"  # of a column; floats are NaN
Progress: "TypeAlias" = "Callable[[int], object] | None"
Prompt: "TypeAlias" = "str | Sequence[int] | Sequence[Mapping[str, str]]"


class Model:
    """A model file. Translators in any number of threads share its memory. Options are those marked of_model in
    moetext.h; other options are for translators. Without a path: MOE_MODEL, else the best fetched model for the options
    source and target (see models()), perhaps two with a pivot language, else the shipped model.

    models: several files as one model, given as a folder or a list of files and folders. A text is translated by one
    model if it has the direction, else by two models through a pivot language."""

    def __init__(self, path: "str | os.PathLike[str] | None" = None, models: "Paths | None" = None,
                 **settings: "Unpack[Options]") -> None:
        self._handle = ctypes.c_void_p()
        if path is None and models is None:
            found = chosen(settings.get("source"), settings.get("target"))
            path, models = (found[0], None) if len(found) == 1 else (None, found)
        self._opened, self._forms = (path, models, settings), {}
        self._pieces, self._detector, self._detecting = {}, None, threading.Lock()
        self._several = models is not None
        if path is not None and models is not None:
            raise TypeError("path and models are mutually exclusive")
        several = [models] if isinstance(models, (str, os.PathLike)) else list(models or ())
        encoded = _option_string(settings)
        if self._several:
            self.path = ":".join(os.fsdecode(one) for one in several)
            paths = (ctypes.c_char_p * len(several))(*(without_nul(os.fsencode(one)) for one in several))
            checked_call("moetext_models_open", paths, len(several), encoded, ctypes.byref(self._handle))
        else:
            self.path = os.fspath(path)
            checked_call("moetext_model_open", without_nul(os.fsencode(self.path)), encoded, ctypes.byref(self._handle))
        register_for_fork(self)

    def _forked(self):
        """Replace the lock and the detector, since another thread may have been using both during the fork."""
        self._detector, self._detecting = None, threading.Lock()

    def _in_form(self, form):
        """Return this model opened with another option `form`; both map the same file."""
        path, models, settings = self._opened
        if form not in self._forms:
            self._forms[form] = Model(path, models, **settings | {"form": form})
        return self._forms[form]

    def __repr__(self) -> str:
        return f"<moe_translate.Model {os.fsdecode(self.path)!r}>"

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a Model: open it in the process that uses it, with moe_translate.Model(path)")

    @property
    def languages(self) -> list[str]:
        count = lib().moetext_model_language_count(self._handle)
        return [lib().moetext_model_language(self._handle, i).decode() for i in range(count)]

    def meta(self, key: str) -> str:
        """Return the text of a metadata key, such as "general.licence"; "" if the file lacks it."""
        return lib().moetext_model_meta(self._handle, without_nul(checked(key).encode("utf-8"))).decode("utf-8")

    def knows(self, language: str) -> bool:
        """Return whether the model has a language; "de", "DE", "de_DE" and "deu_Latn" are equivalent."""
        return lib().moetext_model_language_find(self._handle, _code(language)) >= 0

    @property
    def directions(self) -> list[tuple[str, str]]:
        """Return every (source, target) that the model translates."""
        known = list(enumerate(self.languages))
        return [(a, b) for i, a in known for k, b in known if i != k and lib().moetext_model_hops(self._handle, i, k)]

    def _has_one_source(self, target):
        """Return whether the model translates into `target` from exactly one language."""
        to = lib().moetext_model_language_find(self._handle, _code(target))
        sources = range(lib().moetext_model_language_count(self._handle))
        return sum(lib().moetext_model_hops(self._handle, i, to) > 0 for i in sources) == 1

    @property
    def needs_source(self) -> bool:
        return bool(lib().moetext_model_needs_source(self._handle))

    def encode(self, text: str, translation: bool = False) -> tuple[int, ...]:
        """Tokenise a text, or a translation (some models have separate ids), without begin and end tokens. When the
        model translates, it sees sentences without markup, whose ids are in Result.source_ids."""
        data = checked(text).encode("utf-8", "surrogatepass")
        room = len(text) + 16
        return tuple(self._filled(ctypes.c_int32, room, "moetext_model_encode", data, len(data), translation))

    def decode(self, ids: Iterable[int]) -> str:
        """Convert the token ids of a translation to text. Raises MoeError for an id outside the vocabulary."""
        numbers = _ids(ids)
        room, several = 16 * len(numbers) + 16, (ctypes.c_int32 * len(numbers))(*numbers)
        text = self._filled(ctypes.c_char, room, "moetext_model_decode", several, len(numbers))
        return text.decode("utf-8", "replace")  # ids may end inside a character

    def prompt(self, messages: "str | Sequence[Mapping[str, str]]") -> tuple[int, ...]:
        """Return the token ids of the chat template for messages: {"role": "system", "user" or "assistant", "content":
        text}, or one text of the user. Raises MoeError if the model does not answer messages."""
        messages = _messages(messages)
        several = (c.Message * len(messages))(*map(_message, messages, itertools.count()))
        room = sum(message.length for message in several) + 256
        return tuple(self._filled(ctypes.c_int32, room, "moetext_model_prompt", several, len(several)))

    def _filled(self, kind, room, function, *arguments):
        """Return the array that a library function fills; retry with a larger array if necessary."""
        count = ctypes.c_size_t()
        while True:
            out = (kind * room)()
            checked_call(function, self._handle, *arguments, out, room, ctypes.byref(count))
            if count.value <= room:
                return out[: count.value]
            room = count.value

    def tokens(self, ids: Iterable[int], source: bool = False) -> tuple[str, ...]:
        """Return the tokeniser's pieces for the ids of a translation, or of a source; "" for an invalid id."""
        return self._tokens(_ids(ids), source, self._handle)

    def _tokens(self, numbers, source, handle):
        """Return the pieces of ids. Only a single model has a cache, because handles of closed models may be reused."""
        known = {} if self._several else self._pieces
        return tuple([known.get((number, source)) or _piece(known, number, source, handle) for number in numbers])

    def detect(self, text: str) -> list[tuple[str, float]]:
        """Detect the language of a text. Return (language, probability) of each language with a probability of at least
        1%, most probable first; [] for a text without letters. Models with many languages use fingerprints, which only
        return the best language, with its lead over the second best (0 to 1) instead of a probability."""
        data = checked(text).encode("utf-8", "replace")
        found = (ctypes.c_float * (lib().moetext_model_language_count(self._handle) + 1))()
        with self._detecting:
            if self._detector is None:
                detector = ctypes.c_void_p()
                checked_call("moetext_detector_new", self._handle, ctypes.byref(detector))
                self._detector = detector
            best = lib().moetext_detect(self._detector, data, len(data), found)
        numbers = [i for i in range(len(found) - 1) if found[i] >= 0.01 or i == best]
        numbers.sort(key=lambda i: (i != best, -found[i]))
        return [(lib().moetext_model_language(self._handle, i).decode(), found[i]) for i in numbers]

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            lib().moetext_detector_free(self._detector)
            lib().moetext_model_close(self._handle)
            self._handle = None


def _piece(known, number, source, handle):
    length = ctypes.c_size_t()
    of = lib().moetext_model_source_piece if source else lib().moetext_model_piece
    data = of(handle, number, ctypes.byref(length))
    piece = ctypes.string_at(data, length.value).decode("utf-8", "replace")
    if piece:
        known[number, source] = piece
    return piece


def _messages(messages):
    """Return a list of messages, or of the token ids of a whole prompt."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return _listed(messages, "messages must be a text, a list of messages or a list of token ids")


def _message(message, number):
    if not isinstance(message, Mapping) or message.get("role") not in c.ROLES:
        raise ValueError(f'message {number} must be {{"role": one of {", ".join(c.ROLES)}, "content": text}}')
    if not isinstance(message.get("content"), str):
        raise TypeError(f"the content of message {number} must be a str, not {type(message.get('content')).__name__}")
    data = message["content"].encode("utf-8", "surrogatepass")
    return c.Message(c.ROLES.index(message["role"]), data, len(data))


def _code(code):
    """Encode a language code."""
    if not isinstance(code, str):
        raise TypeError(f"a language code must be a str, not {type(code).__name__}")
    return without_nul(language(code))


def _listed(values, what):
    """Return a list. Reject what Python also iterates over: characters, bytes, keys and sets."""
    if isinstance(values, (str, bytes, bytearray, memoryview, Mapping, Set)) or not isinstance(values, Iterable):
        raise TypeError(f"{what}, not {type(values).__name__}")
    return list(values)


def _ids(ids):
    numbers = _listed(ids, "token ids must be a list")
    for number in numbers:
        if not hasattr(number, "__index__") or isinstance(number, bool):  # also accepts NumPy's integers
            raise TypeError(f"a token id must be an int, not {type(number).__name__}")
        if not -(1 << 31) <= number < 1 << 31:
            raise ValueError(f"token id {number} out of range")
    return numbers


class _List(Call):
    """A list of texts, None for missing ones; `given`: a prefix or translation of each, or None."""

    def __init__(self, texts, given=None, convert=None, **more):
        pairs = paired(texts, given if given is not None else [None] * len(texts))
        jobs = (Job(self, number, *pair) for number, pair in enumerate(pairs) if pair[0] is not None)
        super().__init__(jobs, convert or _best, None, **more)
        self.rows, self.count = len(texts), sum(text is not None for text in texts)

    def done(self):
        return self.error or len(self.found) == self.count

    def put(self, job, result):
        self.found[job.number] = self.convert(job, result)
        if self.done():
            self.notify()

    def all(self):
        """Return the result of each text, None for missing ones."""
        if self.error:
            raise self.error
        return [self.found.get(number) for number in range(self.rows)]


class _Stream(Call):
    """Texts from an iterable, at most `ahead` of them in flight; results are returned in order."""

    def __init__(self, ahead, convert, notify, **more):
        super().__init__(iter(()), convert, notify, **more)
        self.ahead = max(1, ahead)
        self.sent, self.given, self.ended, self.broken = 0, 0, False, None
        self.room = threading.Condition()

    def forked(self):
        self.room = threading.Condition()
        super().forked()

    def add(self, text, given=None):
        with self.engine.state:
            number, is_missing = self.sent, _is_missing(text)
            job = None if is_missing else Job(self, number, checked(text, number),
                                              checked(given, number) if self.task == c.PREFIX else None)
            self.sent += 1
            if is_missing:
                self.found[number] = None
                self.notify()
                return
            self.again.append(job)
            if not self.queued:
                self.engine.submit(self)

    def put(self, job, raw):
        self.found[job.number] = self.convert(job, raw)
        if job.number == self.given:  # otherwise the caller has results to take, or waits for an earlier one
            self.notify()

    def full(self):
        return self.live and self.sent - self.given >= self.ahead

    def end(self, broken=None):
        """Record the end of the texts. An exception from the iterable is raised after the results of earlier texts."""
        self.broken, self.ended = broken, True
        self.notify()

    def start(self, texts, prefix):
        """Read the texts in a separate thread, because the iterable may block for longer than a result takes."""
        pairs = _pairs(texts, prefix)
        ready = isinstance(texts, (list, tuple)) and isinstance(prefix, (list, tuple, type(None)))
        threading.Thread(target=self.read, args=(pairs, ready), name="moe texts", daemon=True).start()

    def read(self, pairs, ready):
        try:
            if ready:  # start with a full batch
                with self.engine.state:
                    for pair in itertools.islice(pairs, self.ahead):
                        self.add(*pair)
            for pair in pairs:
                if self.full():
                    with self.room:
                        while self.full():
                            self.room.wait()
                if not self.live:
                    return
                self.add(*pair)
            self.end()
        except BaseException as error:
            self.end(error)

    def leave(self):
        self.engine.end(self)
        with self.room:
            self.room.notify()

    def over(self):
        if self.error:
            raise self.error
        if self.ended and self.given == self.sent and self.broken:
            raise self.broken
        return self.ended and self.given == self.sent

    def has_result(self):
        return self.given in self.found

    def next_results(self):
        """Yield the results that have arrived, in order. Wake the reader only when half of its texts are done, because
        switching threads for each text would take longer than short translations."""
        while self.given in self.found and not self.error:
            result = self.found.pop(self.given)
            self.given += 1
            left = self.sent - self.given
            if left == self.ahead // 2 or not left:
                with self.room:
                    self.room.notify()
            yield result


class _Growing(Call):
    """The translation of a text, or the answer to a prompt, in parts. The library may restart a text, which gives the
    same result."""

    def __init__(self, text, given, notify, **more):
        super().__init__(iter(()), None, notify, **more)
        self.jobs = self.begin(text, given)
        self.tell, self.news, self.ended = self.add, deque(), False
        self.seen = self.sent = 0  # bytes received since the last start; bytes passed to the caller

    def begin(self, text, given):
        yield Job(self, 0, text, given)

    def next(self):
        job = super().next()
        if job:
            self.seen = 0
        return job

    def add(self, raw):
        text, before = ctypes.string_at(raw.text, raw.length), self.seen
        self.seen += len(text)
        text = text[max(0, self.sent - before) :]
        self.sent += len(text)
        self.news.append((text, ctypes.string_at(raw.after, raw.after_length)))
        self.notify()

    def put(self, job, raw):
        text, status, message = _best(job, raw)
        self.news.append((text[self.sent :], b""))
        if status:
            self.error = TextError(message.decode("utf-8", "replace"), lib().moe_status_name(status).decode(), 0)
        self.ended = True
        self.notify()

    def done(self):
        return self.error or self.ended


_KEPT = 4  # sessions kept for calls with options


class Translator:
    """Translates texts with a model (default: that of Model). Keywords are the options that options() lists: target,
    beam, batch, threads... glossary: terms that translations must contain, a file or {source: target}; list a name that
    must not change as its own target. models: several, as for Model; models_memory="512M" limits the memory of open
    models and closes the least recently used. prompt_cache="FILE": close() saves the computed prompts of a
    decoder-only model, which the next Translator loads.

        with Translator("model.bin", target="de", beam=4) as translator:
            translator.translate(["Good morning!", "Where is my book?"])
            translator.translate("Good morning!", target="fr", beam=8, length_penalty=0.6)

    Any number of threads, tasks and loops may use a Translator at once: their texts are decoded together, which does
    not change translations. target, source and options of a call (those of CallOptions) override the translator's. Calls
    with the same options share a session, which needs the same memory as the translator's; the last four are kept."""

    def __init__(self, model: "str | os.PathLike[str] | Model | None" = None,
                 glossary: "str | os.PathLike[str] | Mapping[str, str] | None" = None, models: "Paths | None" = None,
                 **settings: "Unpack[Options]") -> None:
        if isinstance(model, Model) and models is not None:
            raise TypeError("model and models are mutually exclusive")
        self.model = model if isinstance(model, Model) else Model(model, models, **settings)
        self._named = {name for name in ("target", "source") if settings.get(name)}
        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._glossary = dict(glossary) if isinstance(glossary, Mapping) else glossary
        self._others = OrderedDict()  # engines of calls with options
        self._confirmed = []  # pairs of remember()
        self._past, self._past_terms = {}, []  # counts of those closed
        self._engine = self._new_engine({}, None)

    def _new_engine(self, options, form):
        model = self.model._in_form(form) if form else self.model
        own = {"prompt_cache": None} if options or form else {}  # only one session may write the file
        settings = self._settings | options | own | ({"form": form, "memory": None} if form else {})
        with _glossary(self._glossary) as path:
            engine = Engine(model, _option_string(settings | {"glossary": path}))
        for pair in self._confirmed if not form else ():
            engine.remember(*pair)
        return engine

    def _engine_of(self, given, form=None):
        """Return the engine for the options of a call."""
        given = {name: value for name, value in given.items() if value is not None}
        for name in given.keys() - CallOptions.__annotations__.keys():
            known = {name.replace("-", "_") for name, _, _ in options()}
            why = "is an option of Translator, not of a call" if name in known else "is not an option of a call"
            raise TypeError(f"{name!r} {why}; available: {', '.join(sorted(CallOptions.__annotations__))}")
        if not given and not form:
            return self._engine
        self._engine.check()
        key = form, _option_string(dict(sorted(given.items())))
        found = self._others.get(key) or self._new_engine(given, form)
        with self._engine.state:
            found = self._others.setdefault(key, found)
            self._others.move_to_end(key)
            idle = [key for key, engine in self._others.items() if engine is not found and engine.is_idle()]
            for old in idle[: max(0, len(self._others) - _KEPT)]:
                engine = self._others.pop(old)
                self._add(self._past, engine.stats())
                self._past_terms += engine.terms()
        return found

    def _engines(self):
        return [self._engine, *self._others.values()]

    @overload
    def translate(self, texts: str, target: "str | None" = None, source: "str | None" = None, errors: str = "raise",
                  prefix: "str | None" = None, glossary: Terms = None, format: "str | None" = None,
                  progress: Progress = None, **options: "Unpack[CallOptions]") -> str: ...

    @overload
    def translate(self, texts: Iterable[str], target: "str | None" = None, source: "str | None" = None,
                  errors: str = "raise", prefix: "str | Sequence[str] | None" = None, glossary: Terms = None,
                  format: "str | None" = None, progress: Progress = None,
                  **options: "Unpack[CallOptions]") -> list[str]: ...

    @overload
    def translate(self, texts: Iterable[Cell], target: "str | None" = None, source: "str | None" = None,
                  errors: str = "raise", prefix: "str | Sequence[str] | None" = None, glossary: Terms = None,
                  format: "str | None" = None, progress: Progress = None,
                  **options: "Unpack[CallOptions]") -> "list[str | None]": ...

    def translate(self, texts: "str | Iterable[Cell]", target: "str | None" = None, source: "str | None" = None,
                  errors: str = "raise", prefix: "str | Sequence[str] | None" = None, glossary: Terms = None,
                  format: "str | None" = None, progress: Progress = None,
                  **options: "Unpack[CallOptions]") -> "str | list[str] | list[str | None]":
        """Translate a text, or each text of a list or column. A text may have several lines and any length. None, NaN
        and pandas' NA become None.

        errors: "raise" a TextError for the first text that cannot be translated, or return "" for such texts ("empty").
        prefix: the beginning of the translation, or of each. Its last word may be incomplete unless a space follows.
        Texts with a prefix must be single lines, and nothing in them is protected. glossary: terms for this call,
        instead of the translator's. format: "html" translates pages and keeps their markup; with errors="empty", text
        that cannot be translated remains in the source language.
        progress: called with the number of texts finished since its last call, e.g. tqdm's update. options: those of
        CallOptions, e.g. beam=1."""
        if format == "html" and prefix is None:
            if progress:
                raise ValueError("progress counts texts, not pages: translate pages one by one")
            return self._pages(texts, errors, target, source, self._for(target, source, glossary, None, options))
        if format not in (None, "text"):
            raise ValueError('format must be "text" or "html", and "text" with a prefix')
        call = self._texts(texts, errors, prefix, self._for(target, source, glossary, prefix, options))
        return _strings(self._wait(call, progress), errors, isinstance(texts, str))

    def _pages(self, pages, errors, target, source, named):
        from .pages import translate_pages
        from .segments import untranslated

        _check_errors(errors)
        failed, column = {}, _several(pages)

        def translate(texts):
            found = self._wait(self._texts(texts, errors, None, named))
            failed.update((text, answer) for text, answer in paired(texts, found) if answer[1])
            found = [(b"", *why) if untranslated(text, why[1].decode("utf-8", "replace")) else (data, *why)
                     for text, (data, *why) in paired(texts, found)]
            return _strings(found, "empty", False)

        def kept(segment, number):
            for piece in segment.pieces():
                if piece in failed:
                    raise _answer_error(failed[piece], number, isinstance(pages, str))

        found = iter(translate_pages([page for page in column if page is not None], translate,
                                     source or self._settings.get("source"), target or self._settings.get("target"),
                                     kept if errors == "raise" else None))
        done = [None if page is None else next(found) for page in column]
        return done[0] if isinstance(pages, str) else done

    @overload
    async def translate_async(self, texts: str, target: "str | None" = None, source: "str | None" = None,
                              errors: str = "raise", prefix: "str | None" = None, glossary: Terms = None,
                              **options: "Unpack[CallOptions]") -> str: ...

    @overload
    async def translate_async(self, texts: Iterable[str], target: "str | None" = None, source: "str | None" = None,
                              errors: str = "raise", prefix: "str | Sequence[str] | None" = None,
                              glossary: Terms = None, **options: "Unpack[CallOptions]") -> list[str]: ...

    @overload
    async def translate_async(self, texts: Iterable[Cell], target: "str | None" = None, source: "str | None" = None,
                              errors: str = "raise", prefix: "str | Sequence[str] | None" = None,
                              glossary: Terms = None, **options: "Unpack[CallOptions]") -> "list[str | None]": ...

    async def translate_async(self, texts: "str | Iterable[Cell]", target: "str | None" = None,
                              source: "str | None" = None, errors: str = "raise",
                              prefix: "str | Sequence[str] | None" = None, glossary: Terms = None,
                              **options: "Unpack[CallOptions]") -> "str | list[str] | list[str | None]":
        """translate() for asyncio. Cancelling the task drops its texts."""
        named = await self._for_async(target, source, glossary, prefix, options)
        call = self._texts(texts, errors, prefix, named)
        arrived, call.notify = _event()
        try:
            self._submit(call)
            if not call.done():
                await arrived.wait()
        finally:
            call.engine.end(call)
        return _strings(call.all(), errors, isinstance(texts, str))

    def translate_tokens(self, tokens: "Iterable[Sequence[int]] | Iterable[Sequence[str]]",
                         target: "str | None" = None, source: "str | None" = None, progress: Progress = None,
                         **options: "Unpack[CallOptions]") -> list[Result]:
        """Translate lists of token ids, or of the tokeniser's pieces, without begin and end tokens. The hypotheses have
        `ids` and `tokens`; `text` contains the same kind of tokens as the lists, separated by spaces. Raises TextError
        for the first list that cannot be translated."""
        lists = [_listed(one, f"row {row}: tokens must be a list of ids or pieces")
                 for row, one in enumerate(_listed(tokens, "tokens must be a list of lists"))]
        form = "pieces" if any(isinstance(token, str) for one in lists for token in one) else "ids"
        texts = [_token_line(one, form, row) for row, one in enumerate(lists)]
        call = _List(texts, convert=self._result, **self._for(target, source, options=options, form=form))
        found = _all_ok(self._wait(call, progress))
        for row, (one, result) in enumerate(paired(lists, found) if form == "pieces" else ()):
            for token, read in zip(one, result.source_tokens):
                if token != read:
                    raise TextError(f"row {row}: token {token!r} is not in the vocabulary", "argument", row)
        return found

    def generate(self, messages: Prompt, max_tokens: "int | None" = None,
                 **options: "Unpack[CallOptions]") -> Result:
        """Return the answer of a decoder-only model to messages ({"role": "user", "content": text}...), to the text of
        one message, or to the token ids of a whole prompt. max_tokens: limit of the answer; `cut` is True at the limit.
        options: e.g. temperature=0.7, seed=1."""
        call = _List([""], [self._prompt(messages)], self._result, **self._answer(max_tokens, options))
        return _all_ok(self._wait(call), alone=True)[0]

    def generate_stream(self, messages: Prompt, max_tokens: "int | None" = None,
                        **options: "Unpack[CallOptions]") -> Iterator[str]:
        """Yield the answer of generate() in pieces. Closing the iterator stops the work."""
        for piece, _ in self._grow("", self._prompt(messages), self._answer(max_tokens, options)):
            if piece:
                yield piece

    def _prompt(self, messages):
        """Return the token ids of a prompt."""
        parts = _messages(messages)
        whole = all(hasattr(part, "__index__") for part in parts)
        ids = _ids(parts) if whole else self.model.prompt(parts)
        if not ids:
            raise ValueError("empty prompt")
        return ids

    def _answer(self, max_tokens, options):
        if max_tokens is not None and (not hasattr(max_tokens, "__index__") or max_tokens < 1):
            raise ValueError(f"max_tokens must be an int, 1 or more, not {max_tokens!r}")
        return {"task": c.ANSWER, "limit": min(max_tokens or 0, 1 << 31), "engine": self._engine_of(options)}

    @overload
    def score(self, texts: str, translations: str, target: "str | None" = None, source: "str | None" = None,
              **options: "Unpack[CallOptions]") -> Hypothesis: ...

    @overload
    def score(self, texts: Sequence[str], translations: Sequence[str], target: "str | None" = None,
              source: "str | None" = None, **options: "Unpack[CallOptions]") -> list[Hypothesis]: ...

    def score(self, texts: "str | Sequence[str]", translations: "str | Sequence[str]", target: "str | None" = None,
              source: "str | None" = None, **options: "Unpack[CallOptions]") -> "Hypothesis | list[Hypothesis]":
        """Score the translation of each text: logprob is the sum of token_logprobs, which include the end token.
        Raises TextError if a translation cannot be scored."""
        alone = isinstance(texts, str)
        if alone is not isinstance(translations, str):
            raise TypeError("score() expects a text and a translation, or a list of each")
        texts, translations = ([checked(text, row) for row, text in enumerate(_several(side))]
                               for side in (texts, translations))
        if len(texts) != len(translations):
            raise ValueError(f"{len(texts)} texts but {len(translations)} translations")
        call = _List(texts, translations, self._result, task=c.SCORE, **self._for(target, source, options=options))
        found = _all_ok(self._wait(call), "nothing to score", alone)
        hypotheses = [result.hypotheses[0] for result in found]
        return hypotheses[0] if alone else hypotheses

    @overload
    def results(self, texts: Iterable[str], target: "str | None" = None, source: "str | None" = None, ahead: int = 1000,
                prefix: "Iterable[str] | None" = None, glossary: Terms = None,
                **options: "Unpack[CallOptions]") -> Iterator[Result]: ...

    @overload
    def results(self, texts: Iterable[Cell], target: "str | None" = None, source: "str | None" = None,
                ahead: int = 1000, prefix: "Iterable[str] | None" = None, glossary: Terms = None,
                **options: "Unpack[CallOptions]") -> "Iterator[Result | None]": ...

    def results(self, texts: Iterable[Cell], target: "str | None" = None, source: "str | None" = None,
                ahead: int = 1000, prefix: "Iterable[str] | None" = None, glossary: Terms = None,
                **options: "Unpack[CallOptions]") -> "Iterator[Result] | Iterator[Result | None]":
        """Yield a Result for each text, in order, while another thread reads `texts`, or None for None and NaN. At most
        `ahead` texts are in flight, so memory does not grow with their total. prefix: the beginning of each
        translation, as in translate(). glossary: terms for this call. Closing the iterator stops the work."""
        arrived = threading.Event()
        stream = self._stream(arrived.set, ahead, prefix, self._for(target, source, glossary, prefix, options))
        try:
            stream.start(texts, prefix)
            while not stream.over():
                arrived.clear()
                yield from stream.next_results()
                if not stream.has_result() and not stream.over():
                    arrived.wait(_LOOK)
        finally:
            stream.leave()

    @overload
    def stream(self, text: str, target: "str | None" = None, source: "str | None" = None, prefix: "str | None" = None,
               glossary: Terms = None, *, after: "Literal[False]" = False,
               **options: "Unpack[CallOptions]") -> Iterator[str]: ...

    @overload
    def stream(self, text: str, target: "str | None" = None, source: "str | None" = None, prefix: "str | None" = None,
               glossary: Terms = None, *, after: "Literal[True]",
               **options: "Unpack[CallOptions]") -> Iterator[tuple[str, str]]: ...

    def stream(self, text: str, target: "str | None" = None, source: "str | None" = None, prefix: "str | None" = None,
               glossary: Terms = None, *, after: bool = False,
               **options: "Unpack[CallOptions]") -> "Iterator[str] | Iterator[tuple[str, str]]":
        """Yield the translation of one text in pieces, which do not change and add up to translate(text). Sentences and
        lines arrive whole, because each may be retried until it is finished; with split=0 or a prefix, words arrive one
        by one unless the text contains protected parts. after: yield pairs of a piece and the likely continuation, to
        show until the next pair. Closing the iterator stops the work."""
        named = self._for(target, source, glossary, prefix, options)
        task = c.TRANSLATE if prefix is None else c.PREFIX
        begun = None if prefix is None else checked(prefix)
        for piece, likely in self._grow(checked(text), begun, {"task": task, **named}):
            if after:
                yield piece, likely
            elif piece:
                yield piece

    def _grow(self, text, given, named):
        """Yield the (piece, likely continuation) of a text or an answer."""
        arrived = threading.Event()
        call = _Growing(text, given, arrived.set, **named)
        try:
            self._submit(call)
            while call.news or not call.done():
                arrived.clear()
                if call.news:
                    piece, likely = (part.decode("utf-8") for part in call.news.popleft())
                    yield piece, likely
                elif not call.done():
                    arrived.wait(_LOOK)
            if call.error:
                raise call.error
        finally:
            call.engine.end(call)

    @overload
    def stream_async(self, texts: "Iterable[str] | AsyncIterable[str]", target: "str | None" = None,
                     source: "str | None" = None, ahead: int = 1000, glossary: Terms = None,
                     **options: "Unpack[CallOptions]") -> AsyncIterator[Result]: ...

    @overload
    def stream_async(self, texts: "Iterable[Cell] | AsyncIterable[Cell]", target: "str | None" = None,
                     source: "str | None" = None, ahead: int = 1000, glossary: Terms = None,
                     **options: "Unpack[CallOptions]") -> "AsyncIterator[Result | None]": ...

    async def stream_async(self, texts: "Iterable[Cell] | AsyncIterable[Cell]", target: "str | None" = None,
                           source: "str | None" = None, ahead: int = 1000, glossary: Terms = None,
                           **options: "Unpack[CallOptions]") -> "AsyncIterator[Any]":
        """results() for asyncio: `async for result in translator.stream_async(texts)`."""
        import asyncio

        (arrived, notify), room = _event(), asyncio.Event()
        named = await self._for_async(target, source, glossary, None, options)
        stream, reader = self._stream(notify, ahead, None, named), None
        try:
            if isinstance(texts, AsyncIterable):
                reader = asyncio.ensure_future(_read_async(stream, texts, room))
            else:
                stream.start(texts, None)
            while not stream.over():
                arrived.clear()
                for result in stream.next_results():
                    room.set()
                    yield result
                if not stream.has_result() and not stream.over():
                    await arrived.wait()
        finally:
            stream.leave()
            if reader:
                reader.cancel()

    def detect(self, text: str) -> list[tuple[str, float]]:
        """Detect the language of a text, like Model.detect()."""
        self._engine.check()
        return self.model.detect(text)

    def translate_arrow(self, array: Any, target: "str | None" = None, source: "str | None" = None,
                        **options: "Unpack[CallOptions]") -> Any:
        """Translate a pyarrow array of strings. Return (large_string array of translations, uint8 array of statuses, 0
        on success). Null remains null."""
        import pyarrow

        if isinstance(array, pyarrow.ChunkedArray):
            array = array.combine_chunks()
        if not isinstance(array, pyarrow.Array) or pyarrow.types.is_primitive(array.type):
            kind = f"{array.type} array" if isinstance(array, pyarrow.Array) else type(array).__name__
            raise TypeError(f"translate_arrow() expects a pyarrow array of strings, not {kind}")
        array = array.cast(pyarrow.large_string())
        there = array.is_valid().to_pylist()
        spans = itertools.compress(_spans(array), there)
        call = _List(list(spans), **self._for(target, source, options=options))
        call.kept = array  # the library reads the array's buffers
        found = iter(self._wait(call))
        rows = [next(found) if is_there else (None, 0, b"") for is_there in there]
        texts = pyarrow.array([row[0] for row in rows], pyarrow.large_binary()).cast(pyarrow.large_string())
        return texts, pyarrow.array([row[1] for row in rows], pyarrow.uint8())

    def stats(self) -> Stats:
        """Return the counts since creation; while texts are in flight, the counts as of the last finished text."""
        first, *others = (engine.stats() for engine in self._engines())
        counts = dict(first)
        for more in [self._past, *others]:
            self._add(counts, more)
        return Stats(**counts)

    @staticmethod
    def _add(counts, more):
        """Add the totals of another session."""
        for row in c.stat_rows(lib()):
            name = row[0].name.decode()
            if row[0].sum and name in more:
                counts[name] = counts.get(name, 0) + more[name]

    def terms(self) -> list[Term]:
        """Return the terms of the glossary option with their counts since creation. Waits for texts in flight."""
        counts = {}
        for term in itertools.chain(self._past_terms, *(engine.terms() for engine in self._engines())):
            asked, kept = counts.get((term.source, term.target), (0, 0))
            counts[term.source, term.target] = asked + term.asked, kept + term.kept
        return [Term(*pair, *numbers) for pair, numbers in counts.items()]

    def remember(self, source: str, translation: str, source_language: "str | None" = None,
                 target_language: "str | None" = None) -> None:
        """Add a confirmed translation to the memory of the option `memory`. It counts for every text whose translation
        begins later, in place of an earlier pair with the same source and languages (None: all languages)."""
        pair = source, translation, source_language, target_language
        self._engine.remember(*pair)
        self._confirmed.append(pair)
        for (form, _), engine in self._others.items():
            if not form:
                engine.remember(*pair)

    @property
    def glossary_heading(self) -> str:
        """The first line of the glossary file if it names the columns and was ignored, else ""."""
        return self._engine.heading() if isinstance(self._glossary, (str, os.PathLike)) else ""

    def cancel(self) -> None:
        """Stop all running calls: each raises a MoeError with status "cancelled"."""
        for engine in self._engines():
            engine.cancel()

    def close(self) -> None:
        if hasattr(self, "_engine"):
            for engine in self._engines():
                engine.close()

    def __enter__(self) -> "Translator":
        self._engine.check()
        return self

    def __exit__(self, *what: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value!r}" for name, value in self._settings.items())
        closed = ", closed" if self._engine.closed else ""
        return f"<moe_translate.Translator {os.fsdecode(self.model.path)!r}{settings}{closed}>"

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a Translator: create it where it is used, with moe_translate.cached(path, ...)")

    def check_languages(self) -> None:
        """Raise a MoeError if every call would have to name a language that the options lack."""
        self._for(None, None)

    def _for(self, target, source, glossary=None, prefix=None, options=(), form=None):
        """Return a call's checked arguments. Raises MoeError for an unknown or missing language, or invalid terms."""
        if glossary and prefix is not None:
            raise ValueError("prefix and glossary are mutually exclusive")
        for name, code in ("target", target), ("source", source):
            if code is None or (name, code) == ("source", "auto"):
                wanted = name not in self._named and (name == "target" or self._needs_source(target))
                if code is None and wanted and lib().moetext_model_language_count(self.model._handle):
                    raise MoeError(f"missing language: pass {name} to the call or the Translator", "argument", name)
            elif not self.model.knows(code):
                known = ", ".join(self.model.languages[:20])
                raise MoeError(f"model has no language {code!r}; available: {known}", "argument", name)
        engine = self._engine_of(dict(options), form)
        terms = Glossary(engine, _terms(glossary)) if glossary else None
        return {"target": target, "source": source, "glossary": terms, "engine": engine}

    def _needs_source(self, target):
        target = target or self._settings.get("target")
        if self.model._several and target and self.model.knows(str(target)):
            return not self.model._has_one_source(str(target))
        return self.model.needs_source

    def _texts(self, texts, errors, prefix, languages):
        _check_errors(errors)
        texts = _several(texts)
        if isinstance(prefix, str):
            prefix = [prefix] * len(texts)
        elif prefix is not None and len(_no_bytes(prefix)) != len(texts):
            raise ValueError(f"{len(texts)} texts but {len(prefix)} prefixes")
        task = c.TRANSLATE if prefix is None else c.PREFIX
        given = None if prefix is None else [checked(one, row) for row, one in enumerate(prefix)]
        return _List(texts, given, task=task, **languages)

    async def _for_async(self, target, source, glossary, prefix, options):
        """Call _for() in a thread, because reading many terms or opening a session would block the loop."""
        if not glossary and not options:
            return self._for(target, source, None, prefix)
        import asyncio

        terms = dict(_terms(glossary)) if glossary else None
        return await asyncio.to_thread(self._for, target, source, terms, prefix, options)

    def _stream(self, notify, ahead, prefix, named):
        task = c.TRANSLATE if prefix is None else c.PREFIX
        stream = _Stream(ahead, self._result, notify, task=task, **named)
        stream.engine.begin(stream)
        return stream

    def _submit(self, call):
        self._engine.check()
        if not call.done():
            call.engine.submit(call)

    def _wait(self, call, progress=None):
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be a function of a number of texts, not {type(progress).__name__}")
        arrived, shown = threading.Event(), 0
        call.notify = arrived.set
        try:
            self._submit(call)
            while not call.done():
                arrived.wait(_LOOK)
                if progress:
                    done = len(call.found) + call.rows - call.count
                    progress(done - shown)
                    shown = done
        finally:
            call.engine.end(call)
        found = call.all()
        if progress and call.rows > shown:
            progress(call.rows - shown)
        return found

    def _result(self, job, raw):
        return _result(self.model, job.text, raw)


_LOOK = 0.2  # seconds between checks for signals, which may arrive in a thread other than the waiting one


def _event():
    """Return an asyncio event and a function that sets it from another thread."""
    import asyncio  # imported here because asyncio loads slowly

    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def notify():
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(event.set)

    return event, notify


def _pairs(texts, prefix):
    for many in (texts,) if prefix is None else (texts, prefix):
        if isinstance(many, (str, bytes, bytearray, memoryview)) or not isinstance(many, Iterable):
            raise TypeError(f"results() expects an iterable of texts, not {type(many).__name__}")
    return ((text,) for text in texts) if prefix is None else paired(texts, prefix)


async def _read_async(stream, texts, room):
    try:
        async for text in texts:
            stream.add(text)
            while stream.full():
                room.clear()
                await room.wait()
        stream.end()
    except BaseException as error:  # raised by the iterable of texts, which may run in a cancelled task
        stream.end(error)
        if not isinstance(error, Exception):
            raise


def _terms(glossary):
    if not isinstance(glossary, Mapping):
        raise TypeError(f"glossary terms must be {{source: target}}, not {type(glossary).__name__}")
    return glossary


def _spans(array):
    """Return (address, length) of each string of an Arrow array."""
    if not len(array):
        return []
    _, offsets, data = array.buffers()
    ends = (ctypes.c_int64 * (array.offset + len(array) + 1)).from_address(offsets.address)[array.offset :]
    base = data.address if data else 0
    return [(base + begin, end - begin) for begin, end in zip(ends, ends[1:])]


def _is_missing(cell):
    """Return whether a cell of a column is None, NaN, NaT or pandas' NA."""
    if isinstance(cell, str):
        return False
    return cell is None or type(cell).__name__ in ("NAType", "NaTType") or (isinstance(cell, numbers.Real) and cell != cell)


def _several(texts):
    """Return a list of texts, with None for missing ones."""
    if isinstance(texts, str):
        return [texts]
    return [None if _is_missing(text) else checked(text, row) for row, text in enumerate(_no_bytes(texts))]


def _token_line(tokens, form, row):
    """Return tokens as a line for the option `form`."""
    if form == "ids":
        return " ".join(map(str, _ids(tokens)))
    for token in tokens:
        if not checked(token, row) or token.split() != [token]:
            raise ValueError(f"row {row}: invalid token {token!r}: empty, or contains white space")
    return " ".join(tokens)


def _all_ok(results, missing="", alone=False):
    """Return results, or raise the TextError of the first that failed or lacks a hypothesis."""
    for number, result in enumerate(results):
        if result.error or missing and not result.hypotheses:
            raise _text_error(result.error or missing, result.status, number, alone)
    return results


def _no_bytes(texts):
    if isinstance(texts, (bytes, bytearray, memoryview)) or not isinstance(texts, Iterable):
        raise no_text(texts)
    return texts


def _check_errors(errors):
    if errors not in ("raise", "empty"):
        raise ValueError('errors must be "raise" or "empty"')


def _text_error(message, status, number, alone):
    """Return the error for a text, the only one or one of a list."""
    return TextError(message if alone else f"row {number}: {message}", status, number)


def _answer_error(answer, number, alone):
    _, status, message = answer
    return _text_error(message.decode("utf-8", "replace"), lib().moe_status_name(status).decode(), number, alone)


def _strings(found, errors, alone):
    for number, answer in enumerate(found):
        if answer and answer[1] and errors == "raise":
            raise _answer_error(answer, number, alone)
    texts = [answer and answer[0].decode("utf-8") for answer in found]
    return texts[0] if alone else texts


def _best(job, raw):
    """Return the bytes, status and message of the best translation."""
    best = raw.hypotheses[0] if raw.n_hypotheses else None
    return ctypes.string_at(best.text, best.length) if best else b"", raw.status, raw.message or b""


def _result(model, text, raw):
    hypotheses, characters = [], None
    for i in range(raw.n_hypotheses):
        h = raw.hypotheses[i]
        data = ctypes.string_at(h.text, h.length)
        characters = characters or (h.n_links and _characters(text.encode("utf-8", "surrogatepass")))
        hypotheses.append(
            Hypothesis(
                data.decode("utf-8"),
                h.score,
                h.logprob,
                tuple(h.token_logprobs[: h.n_logprobs]),
                ids := tuple(h.ids[: h.n_ids]),
                bool(h.finished),
                _links(characters, data, h),
                model._tokens(ids, False, raw.model),
            )
        )
    status = lib().moe_status_name(raw.status).decode()
    source_ids = tuple(raw.source_ids[: raw.n_source_ids])
    return Result(
        hypotheses[0].text if hypotheses else "",
        tuple(hypotheses),
        raw.message.decode("utf-8", "replace") if raw.status else "",
        status,
        bool(raw.flags & 2),
        bool(raw.flags & 4),
        bool(raw.flags & 8),
        model._tokens(source_ids, True, raw.model),
        source_ids,
        ctypes.string_at(raw.between, raw.between_length).decode("utf-8") if raw.between else "",
        (raw.between_language or b"").decode("utf-8"),
        "" if raw.status else raw.message.decode("utf-8", "replace"),
        confidence if (confidence := lib().moetext_confidence(ctypes.byref(raw))) >= 0 else None,
        tuple((t.source.decode("utf-8"), t.target.decode("utf-8"), bool(t.kept)) for t in raw.terms[: raw.n_terms]),
    )


def _links(source, data, h):
    """Convert byte offsets to character offsets; source: the source's _characters()."""
    if not h.n_links:
        return ()
    target = _characters(data)
    return tuple(
        Link(source[k.source_begin], source[k.source_end], target[k.target_begin], target[k.target_end])
        for k in h.links[: h.n_links]
    )


def _characters(data):
    """Return the number of characters before each byte of a UTF-8 text, and before its end."""
    if data.isascii():
        return range(len(data) + 1)
    counts, count = [], 0
    for byte in data:
        counts.append(count if byte & 0xC0 != 0x80 else count - 1)
        count += byte & 0xC0 != 0x80
    return [*counts, count]


@functools.lru_cache(maxsize=8)
def _cached(pid, path, settings, closed):
    return Translator(path, **dict(settings))


def cached(path: "str | os.PathLike[str]", **settings: "Unpack[Options]") -> Translator:
    """Return this process's translator with these options, for workers of Spark etc. The first call creates it."""
    known = os.getpid(), os.fspath(path), tuple(sorted(settings.items()))
    for closed in itertools.count():  # skip translators that were closed, e.g. by a with statement
        found = _cached(*known, closed)
        if not found._engine.closed:
            break
    return found
