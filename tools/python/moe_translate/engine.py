"""A translator's thread, which decodes the texts of all callers together and passes each caller its results.

A Call holds one caller's jobs. Calls take turns, one text each, so that a short text does not wait for a long list. The
thread runs while there are jobs. A caller that is interrupted or cancelled does not wait for the library, because the
engine owns the memory that the library reads.
"""

import atexit
import ctypes
import itertools
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from . import library as c


class MoeError(RuntimeError):
    """An error of the library. status: "argument", "format", "memory", ...; where: an option or a file offset."""

    def __init__(self, message: str, status: str = "", where: str = ""):
        super().__init__(f"{where}: {message}" if where else message)
        self.status, self.where = status, where


_lib = None
_load = threading.Lock()


def lib():
    """Return the library, which the first call loads."""
    global _lib
    if _lib is None:
        with _load:
            _lib = _lib or c.load()
    return _lib


# Objects with locks that a forked child must replace: the thread that holds a lock does not exist in the child.
_locking: "weakref.WeakSet[Any]" = weakref.WeakSet()


def register_for_fork(one):
    """Register an object: its _forked() is called in the child of every fork."""
    _locking.add(one)


def _forked():
    global _load
    _load = threading.Lock()
    for one in list(_locking):
        one._forked()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)


def failure(code, error):
    """Convert a moe_error to an exception."""
    message, where = (text.decode("utf-8", "replace") for text in (error.message, error.where))
    return MoeError(message, lib().moe_status_name(code).decode(), where)


def checked_call(function, *arguments):
    """Call a library function with a moe_error as its last argument, and raise the error."""
    error = c.Error()
    code = getattr(lib(), function)(*arguments, ctypes.byref(error))
    if code != c.OK:
        raise failure(code, error)


FORKED = "this Translator was created before fork(): create one in the child"
def no_text(value, row=None):
    """Return the TypeError for a value that is not a text. row: its index in the caller's list, for the message."""
    hint = ": decode it first, as in data.decode('utf-8')" if isinstance(value, (bytes, bytearray, memoryview)) else (
        ": use translate_arrow()" if type(value).__module__.partition(".")[0] == "pyarrow" else "")
    return TypeError(f"{'' if row is None else f'row {row}: '}a text must be a str, not {type(value).__name__}{hint}")


def checked(text, row=None):
    if not isinstance(text, str):
        raise no_text(text, row)
    return text


@dataclass(frozen=True)
class Term:
    """A glossary term, with the number of its occurrences in the texts, and of those kept in the translations."""

    source: str
    target: str
    asked: int
    kept: int


class Job:
    """A text of a call; `text` and `given` are str or, for Arrow arrays, (address, length). An answer's `given` is the
    ids of its prompt. `kept` is the memory that the library reads while the text is in flight."""

    __slots__ = "call", "number", "text", "given", "kept"

    def __init__(self, call: "Call", number: int, text: object, given: object = None):
        self.call, self.number, self.text, self.given, self.kept = call, number, text, given, None


class Call:
    """One caller's jobs for an engine, created lazily, and their results. `convert` copies a result before the library
    frees it; `notify` is called in the engine's thread for each result. limit: maximum tokens of an answer, or 0."""

    def __init__(self, jobs, convert, notify, engine, task=c.TRANSLATE, source=None, target=None, glossary=None,
                 limit=0):
        self.jobs, self.again, self.convert, self.notify = jobs, deque(), convert, notify
        self.drop = ctypes.c_int(0)  # a moe_drop
        self.task, self.source, self.target = task, language(source), language(target)
        self.engine, self.glossary, self.limit = engine, glossary, limit
        self.found, self.error, self.live, self.queued = {}, None, True, False
        self.tell = None  # called in the engine's thread with partial results, if not None

    def next(self):
        return self.again.popleft() if self.again else next(self.jobs, None)

    def put(self, job, result):
        self.found[job.number] = self.convert(job, result)
        self.notify()

    def fail(self, error):
        self.error = self.error or error
        self.notify()

    def forked(self):
        """Fail this call in a forked child, which lacks the engine's thread."""
        self.live, self.notify = False, lambda: None
        self.fail(MoeError(FORKED, "argument"))


def language(code):
    """Encode a language code with surrogatepass; the library rejects lone surrogates."""
    return None if code is None else code.encode("utf-8", "surrogatepass")


def without_nul(data):
    if b"\0" in data:
        raise ValueError(f"unexpected NUL in {data!r}")
    return data


def checked_terms(terms):
    """Return the pairs of {source: target}."""
    for pair in terms.items():
        if not all(isinstance(text, str) and not set(text) & set("\t\r\n\0") and text.strip() for text in pair):
            raise MoeError(f"invalid term {pair!r}: both must be non-empty, without TABs or line breaks", "argument",
                           "glossary")
    return list(terms.items())


class Glossary:
    """The terms of one call, as a library glossary."""

    def __init__(self, engine, terms):
        self.handle = ctypes.c_void_p()
        pairs = checked_terms(terms)
        sides = [[text.encode("utf-8", "surrogatepass") for text in side] for side in zip(*pairs)]
        sources, targets = ((ctypes.c_char_p * len(pairs))(*side) for side in sides)
        with engine.state:
            engine.check()
            engine.makers += 1  # close() waits for this thread; other calls continue
        try:
            checked_call("moetext_glossary_new", engine.handle, sources, targets, len(pairs), ctypes.byref(self.handle))
        finally:
            with engine.state:
                engine.glossaries.add(self)
                engine.makers -= 1
                engine.state.notify_all()  # close() may be waiting in free()

    def free(self):
        handle, self.handle = self.handle, None
        if handle:
            lib().moetext_glossary_free(handle)

    def __del__(self):
        self.free()


class Engine:
    """A library translator. `model` is kept alive because the library's model must outlive the translator."""

    def __init__(self, model, settings):
        self.model, self.handle, self.pid = model, ctypes.c_void_p(), os.getpid()
        self.state = threading.Condition()  # guards the members below; reentrant, since __del__ may run at any time
        self.calls, self.waiting = set(), deque()  # live calls; calls with jobs to start
        self.under_way, self.numbers = {}, itertools.count(1)
        self.worker, self.closed, self.glossaries, self.makers = None, False, weakref.WeakSet(), 0
        self.partial = None  # the library's callback while the thread runs
        self.counts, self.unsaved = {}, None
        checked_call("moetext_new", model._handle, settings, ctypes.byref(self.handle))
        register_for_fork(self)

    # ---- Callers ----

    def check(self):
        if self.pid != os.getpid():
            raise MoeError(FORKED, "argument")
        if self.closed:
            raise MoeError("this Translator is closed", "argument")

    def begin(self, call):
        """Register a call without jobs, so that close() and cancel() end it too."""
        with self.state:
            self.check()
            self.calls.add(call)

    def submit(self, call):
        """Start decoding the new jobs of a call."""
        self.check()
        with self.state:
            self.check()
            if not call.live:
                return
            self.calls.add(call)
            if not call.queued:
                call.queued = True
                self.waiting.append(call)
            if self.worker is None:  # if two threads were started at once, the second exits
                threading.Thread(target=self.work, name="moe", daemon=True).start()

    def end(self, call):
        """Drop a call and its texts in flight."""
        with self.state:
            call.live = False
            lib().moe_request_drop(ctypes.byref(call.drop))
            self.calls.discard(call)
            if self.under_way and not self.calls:
                lib().moetext_cancel(self.handle)

    def cancel(self):
        with self.state:
            for call in list(self.calls):
                call.fail(MoeError("cancelled", "cancelled"))
                self.end(call)

    def stats(self):
        """Return the library's counts. Only the engine's thread may read the counts, which it does after each text."""
        with self.state:
            self.check()
            if self.worker is None:
                self.count()
            return self.counts

    def terms(self):
        """Return the terms of the option glossary with their counts. Wait until no texts are in flight, because only
        the engine's thread may use the translator meanwhile."""
        with self.state:
            self.check()
            while self.worker is not None:
                self.state.wait(0.01)
            rows = map(lib().moetext_term_at, itertools.repeat(self.handle), itertools.count())
            return [Term(row.source.decode(), row.target.decode(), row.asked, row.kept)
                    for row in itertools.takewhile(lambda row: row.source is not None, rows)]

    def heading(self):
        with self.state:
            self.check()
            return lib().moetext_glossary_heading(self.handle).decode("utf-8")

    def remember(self, source, translation, source_language, target_language):
        """Add a pair to the memory of the option, which may be in use."""
        pair = [text.encode("utf-8") for text in (source, translation)]
        codes = [code and code.encode("utf-8") for code in (source_language, target_language)]
        with self.state:
            self.check()
            memory = lib().moetext_memory_of(self.handle)
            if not memory:
                raise ValueError("remember() requires the option memory=FILE; os.devnull is an empty memory")
            checked_call("moetext_memory_add", memory, *codes, pair[0], len(pair[0]), pair[1], len(pair[1]))

    def count(self):
        self.counts = c.read_stats(lib(), self.handle)

    def is_idle(self):
        return not self.calls and self.worker is None

    def close(self):
        if self.pid != os.getpid():
            return  # a forked child: the engine's thread does not exist here
        with self.state:
            self.closed = True
            for call in list(self.calls):
                call.fail(MoeError("this Translator was closed", "cancelled"))
                self.end(call)
            if self.worker is not threading.current_thread():
                while self.worker is not None:
                    self.state.wait(0.2)
                self.free()
        unsaved, self.unsaved = self.unsaved, None
        if unsaved:
            raise unsaved

    def _forked(self):
        """Fail all calls in the child, which has no thread to decode texts."""
        self.state, calls, self.calls = threading.Condition(), self.calls, set()
        self.worker, self.under_way, self.waiting = None, {}, deque()
        for call in calls:
            call.forked()

    def __del__(self):
        if self.handle:
            self.close()

    def free(self):
        while self.makers:
            self.state.wait(0.2)
        handle, self.handle = self.handle, None
        if handle:
            for glossary in list(self.glossaries):  # glossaries must be freed before the translator
                glossary.free()
            try:
                checked_call("moetext_save_prompts", handle)
            except MoeError as error:
                self.unsaved = error  # for close(): this may be the engine's thread
            lib().moetext_free(handle)

    # ---- The thread ----

    def work(self):
        with self.state:
            if self.worker is not None or self.closed:
                return
            self.worker = threading.current_thread()
            self.count()
        pull, done, partial = c.PULL(self.pull), c.DONE(self.done), c.PARTIAL(self.tell)
        with self.state:
            self.partial = partial
        try:
            while self.has_work():
                error = c.Error()
                code = lib().moetext_translate(self.handle, pull, done, None, ctypes.byref(error))
                self.settle(code, error)
        finally:
            with self.state:
                if self.partial is partial:
                    self.partial = None  # breaks a reference cycle
                if self.worker is threading.current_thread():
                    self.worker = None
                    if self.closed:
                        self.free()
                    self.state.notify_all()

    def has_work(self):
        with self.state:
            if not self.waiting and not self.closed:
                self.worker = None  # the next caller starts another thread
            return self.worker is not None and not self.closed

    def pull(self, _, wait, request):
        with self.state:
            while self.waiting and not self.closed:
                call = self.waiting[0]
                try:
                    job = call.next() if call.live else None
                    if job:
                        self.fill(job, request[0])
                        self.waiting.rotate(-1)
                        return c.PULL_REQUEST
                except BaseException as error:  # an exception must not unwind through the library
                    call.fail(error)
                self.waiting.popleft()
                call.queued = False
        return c.PULL_END if wait else c.PULL_LATER

    def fill(self, job, request):
        call = job.call
        ids = (ctypes.c_int32 * len(job.given))(*job.given) if call.task == c.ANSWER else None
        given = job.given if ids is None else None
        text, given, before, draft = kept = (_bytes(job.text), _bytes(given), _bytes(getattr(job.text, "before", None)),
                                             _bytes(getattr(job.text, "draft", None)))
        request.text, request.length = text[0], text[1]
        request.context, request.context_length = before
        request.draft, request.draft_length = draft
        request.quick = getattr(job.text, "quick", 0)
        request.given, request.given_length = given[0], given[1]
        request.ids, request.n_ids, request.limit = ids, len(ids or ()), call.limit
        request.task, request.source, request.target = call.task, call.source, call.target
        request.drop = ctypes.addressof(call.drop)
        request.glossary = call.glossary and call.glossary.handle
        request.partial = ctypes.cast(self.partial, ctypes.c_void_p) if call.tell else None
        request.user = number = next(self.numbers)
        job.kept = kept, ids
        self.under_way[number] = job

    def tell(self, _, partial):
        with self.state:
            call = self.under_way[partial[0].user].call
        if call.live:
            try:
                call.tell(partial[0])
            except BaseException as error:
                call.fail(error)

    def done(self, _, result):
        with self.state:
            job = self.under_way.pop(result[0].user)
            self.count()
        if job.call.live:
            try:
                job.call.put(job, result[0])
            except BaseException as error:
                job.call.fail(error)

    def settle(self, code, error):
        """Fail or requeue the texts that the library left unfinished."""
        with self.state:
            left, self.under_way = list(self.under_way.values()), {}
            if code not in (c.OK, c.CANCELLED):  # fail the affected calls, or all calls, so that the loop ends
                for call in {job.call for job in left} or list(self.calls):
                    call.fail(failure(code, error))
                    self.end(call)
            for job in left:  # jobs of a new call, cancelled together with other calls
                if job.call.live:
                    job.call.again.append(job)
                    self.submit(job.call)


def _bytes(text):
    """Return (bytes or an address, length) of a text; the memory must remain valid while the text is in flight."""
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")
    return text if isinstance(text, tuple) else (text, len(text)) if text is not None else (None, 0)


@atexit.register
def _stop():
    """Stop worker threads before the interpreter shuts down."""
    for engine in list(_locking):
        if isinstance(engine, Engine) and engine.worker is not None:
            # Only daemon threads remain. Print no errors: Python aborts if such a thread holds stderr's lock at exit.
            threading.excepthook = lambda *_: None
            engine.close()
