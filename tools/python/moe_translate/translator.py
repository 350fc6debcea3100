"""Translator: texts to translations by a model file of moe."""

import contextlib
import ctypes
import functools
import os
import queue
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import library as c

_lib = None
_load = threading.Lock()


def lib():
    """The library, loaded when it is first needed."""
    global _lib
    with _load:
        if _lib is None:
            _lib = c.load()
    return _lib


class MoeError(RuntimeError):
    """What the library said. status: "argument", "format", "memory", ...; where: an option, a file offset."""

    def __init__(self, message: str, status: str = "", where: str = ""):
        super().__init__(f"{where}: {message}" if where else message)
        self.status, self.where = status, where


class TextError(MoeError):
    """A text that could not be translated; index: its number in the list."""

    def __init__(self, message: str, status: str, index: int):
        super().__init__(message, status)
        self.index = index


@dataclass(frozen=True)
class Link:
    """Characters [begin, end) of source and translation that belong together."""

    source_begin: int
    source_end: int
    target_begin: int
    target_end: int


@dataclass(frozen=True)
class Hypothesis:
    text: str
    score: float  # what hypotheses are ordered by
    logprob: float  # sum of token_logprobs
    token_logprobs: tuple[float, ...]
    ids: tuple[int, ...]
    finished: bool  # False: cut at the length limit
    alignment: tuple[Link, ...]  # with the option alignment=1


@dataclass(frozen=True)
class Result:
    """What became of one text. error: why it, or a part of it, is not translated; "" where all is well."""

    text: str
    hypotheses: tuple[Hypothesis, ...]
    error: str
    status: str
    cut: bool  # at the length limit
    truncated: bool  # only the beginning of the source was used
    incomplete: bool  # parts are missing


def _raise(code, error):
    raise MoeError(
        error.message.decode("utf-8", "replace"),
        lib().moe_status_name(code).decode(),
        error.where.decode("utf-8", "replace"),
    )


def options() -> list[tuple[str, str, str]]:
    """(name, values, help) of every option that Translator takes."""
    found, at = [], 0
    while (info := lib().moetext_option(at)).name:
        found.append((info.name.decode(), info.values.decode(), info.help.decode()))
        at += 1
    return found


def default_model() -> str:
    """The model that is used where none is named: as for moe-translate $MOE_MODEL, else the installed one, else that in
    the repository. MoeError: there is none."""
    path, error = ctypes.create_string_buffer(8192), c.Error()
    code = lib().moetext_default_model(path, len(path), ctypes.byref(error))
    if code != c.OK:
        _raise(code, error)
    return os.fsdecode(path.value)


def version() -> str:
    return lib().moetext_version().decode()


@contextlib.contextmanager
def _glossary(terms):
    """The path of a file with these terms; None: there are none. It may go once the library has read it."""
    if terms is None or isinstance(terms, (str, os.PathLike)):
        yield None if terms is None else os.fspath(terms)
        return
    lines = ["source,target"]
    for pair in terms.items():
        if not all(isinstance(text, str) and not set(text) & set("\t\r\n") and text.strip() for text in pair):
            raise MoeError(f"{pair!r} is no term: both are texts of one line, without TABs", "argument", "glossary")
        lines.append(",".join('"' + text.replace('"', '""') + '"' for text in pair))
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


def _settings(wishes):
    parts = []
    for name, value in wishes.items():
        if value is None:
            continue
        text = str(int(value)) if isinstance(value, bool) else str(value)
        if ";" in text:
            raise MoeError(f"{text!r} has a semicolon in it", "argument", name)
        parts.append(f"{name.replace('_', '-')}={text}")
    return ";".join(parts).encode("utf-8")


class Model:
    """A model file (default: default_model()). Translators of one model share its memory, in any number of threads. The
    options are those with of_model of moetext.h; others are left to the translators."""

    def __init__(self, path: "str | os.PathLike | None" = None, **wishes):
        self._handle, error = ctypes.c_void_p(), c.Error()
        self.path = os.fspath(default_model() if path is None else path)
        code = lib().moetext_model_open(
            os.fsencode(self.path), _settings(wishes), ctypes.byref(self._handle), ctypes.byref(error)
        )
        if code != c.OK:
            _raise(code, error)

    @property
    def languages(self) -> list[str]:
        count = lib().moetext_model_language_count(self._handle)
        return [lib().moetext_model_language(self._handle, i).decode() for i in range(count)]

    def meta(self, key: str) -> str:
        """The text of a metadata key, such as "general.licence"; "" where there is none."""
        return lib().moetext_model_meta(self._handle, key.encode()).decode("utf-8")

    def knows(self, language: str) -> bool:
        """ "de", "DE", "de_DE" and "deu_Latn" are one language."""
        return lib().moetext_model_language_find(self._handle, language.encode()) >= 0

    @property
    def needs_source(self) -> bool:
        return bool(lib().moetext_model_needs_source(self._handle))

    def __del__(self):
        if getattr(self, "_handle", None) and _lib:
            _lib.moetext_model_close(self._handle)
            self._handle = None


class Translator:
    """Translates texts with one model (default: default_model()). Options by name, as options() lists them: target,
    beam, batch, threads... glossary: terms that translations must use, a file (option glossary) or {source: target}; a
    name that stays is its own target.

        with Translator("model.bin", target="de", beam=4) as translator:
            translator.translate(["Good morning!", "Where is my book?"])

    One thread at a time translates; others wait. Translators of one Model run beside each other. The call itself
    releases Python's lock."""

    def __init__(
        self,
        model: "str | os.PathLike | Model | None" = None,
        glossary: "str | os.PathLike | Mapping[str, str] | None" = None,
        **wishes,
    ):
        self.model = model if isinstance(model, Model) else Model(model, **wishes)
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._handle, error = ctypes.c_void_p(), c.Error()
        with _glossary(glossary) as path:
            settings = _settings(wishes | {"glossary": path})
            code = lib().moetext_new(self.model._handle, settings, ctypes.byref(self._handle), ctypes.byref(error))
        if code != c.OK:
            _raise(code, error)

    def translate(
        self,
        texts: "str | Sequence[str]",
        target: "str | None" = None,
        source: "str | None" = None,
        errors: str = "raise",
    ) -> "str | list[str]":
        """The best translation of a text, or of each text of a list. A text may have several lines and any length.
        errors: "raise" a TextError for the first text that cannot be translated, or let it "empty"."""
        if errors not in ("raise", "empty"):
            raise ValueError('errors is "raise" or "empty"')
        alone = isinstance(texts, str)
        encoded = [text.encode("utf-8", "surrogatepass") for text in ([texts] if alone else texts)]
        offsets = (ctypes.c_int64 * (len(encoded) + 1))()
        for at, text in enumerate(encoded):
            offsets[at + 1] = offsets[at] + len(text)
        joined = b"".join(encoded)
        with self._ready():
            rows = self._rows(ctypes.c_char_p(joined), offsets, len(encoded), None, source, target)
            if errors == "raise":
                for at in range(rows.n):
                    if rows.statuses[at]:
                        raise TextError(
                            rows.messages[at].decode("utf-8", "replace"),
                            lib().moe_status_name(rows.statuses[at]).decode(),
                            at,
                        )
            base = rows.bytes or 0
            found = [
                (
                    ctypes.string_at(base + rows.offsets[at], rows.offsets[at + 1] - rows.offsets[at]).decode("utf-8")
                    if rows.offsets[at + 1] > rows.offsets[at]
                    else ""
                )
                for at in range(rows.n)
            ]
        return found[0] if alone else found

    def translate_arrow(self, array, target: "str | None" = None, source: "str | None" = None):
        """A pyarrow array of strings -> (large_string array of translations, uint8 array of statuses, 0 is well). No
        Python object is made for each text. Null stays null."""
        import pyarrow

        if isinstance(array, pyarrow.ChunkedArray):
            array = array.combine_chunks()
        array = array.cast(pyarrow.large_string())
        if array.offset:
            array = pyarrow.concat_arrays([array])  # a copy that begins at its buffers' beginning
        if array.offset:
            array = pyarrow.array(array.to_pylist(), pyarrow.large_string())
        valid, offsets, data = array.buffers()
        size = len(array)
        with self._ready():
            rows = self._rows(
                ctypes.c_void_p(data.address if data else 0),
                ctypes.c_void_p(offsets.address),
                size,
                ctypes.c_void_p(valid.address) if valid else None,
                source,
                target,
            )
            ends = ctypes.string_at(rows.offsets, 8 * (size + 1))
            length = rows.offsets[size] if size else 0
            text = ctypes.string_at(rows.bytes, length) if length else b""
            statuses = ctypes.string_at(rows.statuses, size) if size else b""
        found = pyarrow.LargeStringArray.from_buffers(
            size, pyarrow.py_buffer(ends), pyarrow.py_buffer(text), valid, array.null_count
        )
        return found, pyarrow.UInt8Array.from_buffers(pyarrow.uint8(), size, [None, pyarrow.py_buffer(statuses)])

    def results(
        self, texts: Iterable[str], target: "str | None" = None, source: "str | None" = None, ahead: int = 1000
    ) -> Iterator[Result]:
        """A Result for each text, in order, while `texts` is still being read: at most `ahead` texts are under way, so
        memory does not grow with their number. Closing the iterator stops the work."""
        with self._ready():
            yield from _Stream(self, texts, target, source, ahead).run()

    def cancel(self) -> None:
        """Stop the call that another thread makes; it raises a MoeError with status "cancelled"."""
        if self._handle:
            lib().moetext_cancel(self._handle)

    def close(self) -> None:
        if getattr(self, "_handle", None) and self._pid == os.getpid():
            with self._lock:
                lib().moetext_free(self._handle)
                self._handle = None

    def __enter__(self):
        return self

    def __exit__(self, *what):
        self.close()

    def __del__(self):
        if _lib and getattr(self, "_handle", None):
            self.close()

    def __reduce__(self):
        raise TypeError(
            "a Translator has threads and memory of its process: open it where it works, with "
            "moe_translate.cached(path, ...)"
        )

    def _ready(self):
        if self._pid != os.getpid():
            raise MoeError("this Translator was made before fork(): make one in the child", "argument")
        if not self._handle:
            raise MoeError("this Translator is closed", "argument")
        return self._lock

    def _rows(self, data, offsets, count, valid, source, target):
        rows, error = c.Rows(), c.Error()
        code = lib().moetext_translate_rows(
            self._handle,
            data,
            offsets,
            count,
            valid,
            _code(source),
            _code(target),
            ctypes.byref(rows),
            ctypes.byref(error),
        )
        if code != c.OK:
            _raise(code, error)
        return rows


class _Stream:
    """moetext_translate in a thread of its own, its results in order."""

    def __init__(self, translator, texts, target, source, ahead):
        self.translator, self.texts = translator, iter(texts)
        self.target, self.source = _code(target), _code(source)
        self.room = threading.Semaphore(max(1, ahead))
        self.results, self.sent, self.failure, self.closed = queue.SimpleQueue(), 0, None, False
        self.alive = {}  # texts under way, whose bytes the library reads

    def pull(self, _, wait, request):
        if self.closed:
            return c.PULL_CANCEL
        if not self.room.acquire(blocking=bool(wait)):
            return c.PULL_LATER
        if self.closed:
            return c.PULL_CANCEL
        try:
            text = next(self.texts, None)
        except BaseException as error:
            self.failure = error
            return c.PULL_CANCEL
        if text is None:
            return c.PULL_END
        data = text.encode("utf-8", "surrogatepass")
        self.alive[self.sent] = (text, data)
        request[0].text, request[0].length = data, len(data)
        request[0].source, request[0].target = self.source, self.target
        request[0].user = self.sent
        self.sent += 1
        return c.PULL_REQUEST

    def done(self, _, result):
        number = result[0].user or 0
        text, _ = self.alive.pop(number)
        self.results.put((number, _result(text, result[0])))

    def work(self):
        error = c.Error()
        pull, done = c.PULL(self.pull), c.DONE(self.done)
        code = lib().moetext_translate(self.translator._handle, pull, done, None, ctypes.byref(error))
        self.results.put((None, (code, error)))

    def run(self):
        thread = threading.Thread(target=self.work, name="moe", daemon=True)
        thread.start()
        waiting, number = {}, 0
        try:
            while True:
                at, result = self.results.get()
                if at is None:
                    if self.failure:
                        raise self.failure
                    if result[0] != c.OK:
                        _raise(*result)
                    return
                waiting[at] = result
                while number in waiting:
                    yield waiting.pop(number)
                    self.room.release()
                    number += 1
        finally:
            self.closed = True
            if thread.is_alive():
                lib().moetext_cancel(self.translator._handle)
                self.room.release()
                thread.join()
                lib().moetext_forgive(self.translator._handle)


def _code(language):
    return None if language is None else language.encode("utf-8")


def _result(text, raw):
    hypotheses = []
    for i in range(raw.n_hypotheses):
        h = raw.hypotheses[i]
        data = ctypes.string_at(h.text, h.length)
        hypotheses.append(
            Hypothesis(
                data.decode("utf-8"),
                h.score,
                h.logprob,
                tuple(h.token_logprobs[: h.n_logprobs]),
                tuple(h.ids[: h.n_ids]),
                bool(h.finished),
                _links(text, data, h),
            )
        )
    status = lib().moe_status_name(raw.status).decode()
    return Result(
        hypotheses[0].text if hypotheses else "",
        tuple(hypotheses),
        raw.message.decode("utf-8", "replace") if raw.status else "",
        status,
        bool(raw.flags & 2),
        bool(raw.flags & 4),
        bool(raw.flags & 8),
    )


def _links(text, data, h):
    """Offsets of bytes as offsets of characters."""
    if not h.n_links:
        return ()
    source, target = _characters(text.encode("utf-8", "surrogatepass")), _characters(data)
    return tuple(
        Link(source[k.source_begin], source[k.source_end], target[k.target_begin], target[k.target_end])
        for k in h.links[: h.n_links]
    )


def _characters(data):
    """Characters before each byte of UTF-8, and behind the last one."""
    counts, count = [], 0
    for byte in data:
        counts.append(count if byte & 0xC0 != 0x80 else count - 1)
        count += byte & 0xC0 != 0x80
    return [*counts, count]


@functools.lru_cache(maxsize=8)
def _cached(pid, path, wishes):
    return Translator(path, **dict(wishes))


def cached(path: "str | os.PathLike", **wishes) -> Translator:
    """The translator of this process for these options, made at the first call: for workers of Spark and the like."""
    return _cached(os.getpid(), os.fspath(path), tuple(sorted(wishes.items())))
