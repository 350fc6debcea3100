"""ctypes bindings of libmoetext: the types and functions of moetext.h."""

import ctypes
import ctypes.util
import itertools
import os
import pathlib
import sys
from ctypes import (CFUNCTYPE, POINTER, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_size_t, c_ssize_t, c_uint,
                    c_uint64, c_void_p)

VERSION = 0, 2  # library version with the structs below, which may change with each minor version
OK, CANCELLED = 0, 8  # moe_status
TRANSLATE, PREFIX, SCORE, ANSWER = range(4)  # moetext_task
PULL_REQUEST, PULL_END, PULL_LATER, PULL_CANCEL = 1, 0, -1, -2
NAME = {"darwin": "libmoetext.dylib", "win32": "libmoetext.dll"}.get(sys.platform, "libmoetext.so")


class Error(ctypes.Structure):  # moe_error
    _fields_ = [("code", c_int), ("message", c_char * 256), ("where", c_char * 96)]


class OptionInfo(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("values", c_char_p), ("help", c_char_p), ("of_model", c_int)]


class Request(ctypes.Structure):
    _fields_ = [("text", c_char_p), ("length", c_size_t), ("source", c_char_p), ("target", c_char_p), ("task", c_int),
                ("given", c_char_p), ("given_length", c_size_t), ("glossary", c_void_p), ("user", c_void_p),
                ("place", c_void_p), ("drop", c_void_p), ("context", c_char_p), ("context_length", c_size_t),
                ("partial", c_void_p), ("ids", POINTER(c_int32)), ("n_ids", c_size_t), ("limit", c_size_t),
                ("sampling", c_void_p), ("routing", c_void_p), ("draft", c_char_p), ("draft_length", c_size_t),
                ("memory", c_void_p), ("next_token", c_void_p), ("quick", c_int)]


LIVE_GROWING, LIVE_PAUSED, LIVE_FINAL = range(3)  # moetext_live_state


class LiveView(ctypes.Structure):
    _fields_ = [("text", c_void_p), ("length", c_size_t), ("stable", c_size_t), ("final", c_int)]


class Link(ctypes.Structure):
    _fields_ = [("source_begin", c_size_t), ("source_end", c_size_t), ("target_begin", c_size_t),
                ("target_end", c_size_t)]


class Hypothesis(ctypes.Structure):
    _fields_ = [("text", c_void_p), ("length", c_size_t), ("score", c_float), ("logprob", c_float),
                ("reverse", c_float), ("finished", c_int), ("n_ids", c_size_t), ("ids", POINTER(c_int32)),
                ("n_logprobs", c_size_t), ("token_logprobs", POINTER(c_float)), ("n_links", c_size_t),
                ("links", POINTER(Link)), ("part_ends", POINTER(c_size_t)), ("looped", c_int)]


class Term(ctypes.Structure):
    _fields_ = [("source", c_char_p), ("target", c_char_p), ("asked", c_uint64), ("kept", c_uint64)]


class Note(ctypes.Structure):
    _fields_ = [("part", c_size_t), ("status", c_int), ("message", c_char_p)]


class TermUse(ctypes.Structure):
    _fields_ = [("part", c_size_t), ("source", c_char_p), ("target", c_char_p), ("kept", c_int)]


class Result(ctypes.Structure):
    _fields_ = [("user", c_void_p), ("status", c_int), ("message", c_char_p), ("flags", c_uint), ("n_parts", c_size_t),
                ("n_source_ids", c_size_t), ("source_ids", POINTER(c_int32)), ("part_ends", POINTER(c_size_t)),
                ("n_hypotheses", c_size_t), ("hypotheses", POINTER(Hypothesis)), ("model", c_void_p),
                ("between", c_void_p), ("between_length", c_size_t), ("between_language", c_char_p),
                ("n_notes", c_size_t), ("notes", POINTER(Note)), ("model_path", c_char_p), ("between_path", c_char_p),
                ("n_matches", c_size_t), ("matches", c_void_p), ("source_language", c_char_p),
                ("target_language", c_char_p), ("parts", c_void_p), ("n_terms", c_size_t), ("terms", POINTER(TermUse))]


class Local(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("path", c_char_p), ("ways", c_char_p), ("bytes", c_uint64), ("comet", c_double),
                ("bleu", c_double), ("shipped", c_int)]


class Choice(ctypes.Structure):
    _fields_ = [("local", POINTER(POINTER(Local))), ("n_local", c_size_t), ("paths", POINTER(c_char_p)),
                ("n_paths", c_size_t), ("name", c_char_p), ("named", c_int)]


ROLES = "system", "user", "assistant"  # moetext_role


class Message(ctypes.Structure):
    _fields_ = [("role", c_int), ("text", c_char_p), ("length", c_size_t)]


TAGS_MARKED = 2  # moetext_html_tags


class HtmlOptions(ctypes.Structure):
    _fields_ = [("tags", c_int), ("xml", c_int), ("source", c_char_p), ("target", c_char_p)]


class Partial(ctypes.Structure):
    _fields_ = [("user", c_void_p), ("text", c_void_p), ("length", c_size_t), ("after", c_void_p),
                ("after_length", c_size_t), ("n_ids", c_size_t)]


class Stat(ctypes.Structure):  # moe_stat
    _fields_ = [("name", c_char_p), ("meaning", c_char_p), ("offset", c_size_t), ("sum", c_int), ("text", c_int)]


def stat_rows(library):
    """Return the rows of moe_stats in the loaded library."""
    return list(itertools.takewhile(bool, map(library.moe_stat_at, itertools.count())))


def read_stats(library, handle):
    """Return a translator's statistics as a dict with the members of moe_stats."""
    rows = stat_rows(library)
    size = max(row[0].offset for row in rows) + 8
    buffer = ctypes.create_string_buffer(size)
    library.moetext_stats_sized(handle, buffer, size)
    values = {}
    for row in rows:
        kind = c_char_p if row[0].text else c_uint64
        value = kind.from_buffer(buffer, row[0].offset).value
        values[row[0].name.decode()] = (value or b"").decode() if row[0].text else value
    return values


PULL = CFUNCTYPE(c_int, c_void_p, c_int, POINTER(Request))
DONE = CFUNCTYPE(None, c_void_p, POINTER(Result))
PARTIAL = CFUNCTYPE(None, c_void_p, POINTER(Partial))

FUNCTIONS = {  # name: (result type, argument types)
    "moe_status_name": (c_char_p, [c_int]),
    "moe_version_number": (c_int, []),
    "moetext_version": (c_char_p, []),
    "moetext_default_model": (c_int, [c_char_p, c_size_t, POINTER(Error)]),
    "moetext_choose": (c_int, [c_char_p, c_char_p, POINTER(POINTER(Choice)), POINTER(Error)]),
    "moetext_choice_free": (None, [POINTER(Choice)]),
    "moetext_option": (OptionInfo, [c_size_t]),
    "moetext_model_open": (c_int, [c_char_p, c_char_p, POINTER(c_void_p), POINTER(Error)]),
    "moetext_models_open": (c_int, [POINTER(c_char_p), c_size_t, c_char_p, POINTER(c_void_p), POINTER(Error)]),
    "moetext_model_close": (None, [c_void_p]),
    "moe_stat_at": (POINTER(Stat), [c_size_t]),
    "moe_request_drop": (None, [c_void_p]),
    "moetext_model_hops": (c_int, [c_void_p, c_size_t, c_size_t]),
    "moetext_model_meta": (c_char_p, [c_void_p, c_char_p]),
    "moetext_model_language_count": (c_size_t, [c_void_p]),
    "moetext_model_language": (c_char_p, [c_void_p, c_size_t]),
    "moetext_model_language_find": (c_ssize_t, [c_void_p, c_char_p]),
    "moetext_model_needs_source": (c_int, [c_void_p]),
    "moetext_model_piece": (c_void_p, [c_void_p, c_int32, POINTER(c_size_t)]),
    "moetext_model_source_piece": (c_void_p, [c_void_p, c_int32, POINTER(c_size_t)]),
    "moetext_model_encode": (
        c_int,
        [c_void_p, c_char_p, c_size_t, c_int, POINTER(c_int32), c_size_t, POINTER(c_size_t), POINTER(Error)],
    ),
    "moetext_model_decode": (
        c_int,
        [c_void_p, POINTER(c_int32), c_size_t, c_char_p, c_size_t, POINTER(c_size_t), POINTER(Error)],
    ),
    "moetext_model_prompt": (
        c_int,
        [c_void_p, POINTER(Message), c_size_t, POINTER(c_int32), c_size_t, POINTER(c_size_t), POINTER(Error)],
    ),
    "moetext_detector_new": (c_int, [c_void_p, POINTER(c_void_p), POINTER(Error)]),
    "moetext_detector_free": (None, [c_void_p]),
    "moetext_detect": (c_ssize_t, [c_void_p, c_char_p, c_size_t, POINTER(c_float)]),
    "moetext_new": (c_int, [c_void_p, c_char_p, POINTER(c_void_p), POINTER(Error)]),
    "moetext_free": (None, [c_void_p]),
    "moetext_save_prompts": (c_int, [c_void_p, POINTER(Error)]),
    "moetext_glossary_new": (
        c_int,
        [c_void_p, POINTER(c_char_p), POINTER(c_char_p), c_size_t, POINTER(c_void_p), POINTER(Error)],
    ),
    "moetext_glossary_free": (None, [c_void_p]),
    "moetext_glossary_heading": (c_char_p, [c_void_p]),
    "moetext_confidence": (c_double, [POINTER(Result)]),
    "moetext_memory_of": (c_void_p, [c_void_p]),
    "moetext_memory_add": (
        c_int,
        [c_void_p, c_char_p, c_char_p, c_char_p, c_size_t, c_char_p, c_size_t, POINTER(Error)],
    ),
    "moetext_term_at": (Term, [c_void_p, c_size_t]),
    "moetext_html_new": (c_int, [c_char_p, c_size_t, POINTER(HtmlOptions), POINTER(c_void_p), POINTER(Error)]),
    "moetext_html_free": (None, [c_void_p]),
    "moetext_html_source": (c_void_p, [c_void_p, c_size_t, POINTER(c_size_t)]),
    "moetext_html_place": (c_void_p, [c_void_p, c_size_t, c_char_p, c_size_t, c_void_p, c_size_t, POINTER(c_size_t)]),
    "moetext_html_pieces": (c_void_p, [c_void_p, c_size_t, POINTER(c_size_t)]),
    "moetext_html_place_pieces": (c_void_p, [c_void_p, c_size_t, c_char_p, c_size_t, POINTER(c_size_t)]),
    "moetext_html_write": (c_void_p, [c_void_p, c_void_p, c_void_p, POINTER(c_size_t)]),
    "moetext_live_new": (c_int, [POINTER(c_void_p), POINTER(Error)]),
    "moetext_live_free": (None, [c_void_p]),
    "moetext_live_give": (c_int, [c_void_p, c_char_p, c_size_t, c_int, POINTER(Error)]),
    "moetext_live_next": (c_int, [c_void_p, POINTER(Request)]),
    "moetext_live_take": (c_int, [c_void_p, c_char_p, c_size_t, POINTER(Error)]),
    "moetext_live_shown": (LiveView, [c_void_p]),
    "moetext_cancel": (None, [c_void_p]),
    "moetext_stats_sized": (None, [c_void_p, c_void_p, c_size_t]),
    "moetext_translate": (c_int, [c_void_p, PULL, DONE, c_void_p, POINTER(Error)]),
}


def candidates():
    """Return candidate paths of the library: MOE_LIBRARY, else those in this package and its repository, else the
    system's. The system's library does not replace the package's if that cannot be loaded."""
    here = pathlib.Path(__file__).resolve().parent
    if os.environ.get("MOE_LIBRARY"):
        return [os.environ["MOE_LIBRARY"]]
    own = [str(path) for path in (here / NAME, here.parents[2] / NAME) if path.exists()]
    return own or [ctypes.util.find_library("moetext") or NAME]


def opened(path):
    """Load the library at `path` and declare the functions. Raise OSError on failure or if the version differs."""
    library = ctypes.CDLL(path)
    for name, (result, arguments) in FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"incompatible version of libmoetext ({error})") from None
        function.restype, function.argtypes = result, arguments
    found = divmod(library.moe_version_number() // 1000, 1000)
    if found != VERSION:
        raise OSError("libmoetext has version {}.{}, but the package requires {}.{}".format(*found, *VERSION))
    return library


def load():
    """Load the first library that works. Raise ImportError with the reasons if all fail."""
    why = []
    for path in candidates():
        try:
            return opened(path)
        except OSError as error:
            if os.path.exists(path):  # the loader's message gives the reason
                why.append(f"cannot load {path}: {error}")
    if not why and os.environ.get("MOE_LIBRARY"):
        why.append(f"MOE_LIBRARY: no such file: {os.environ['MOE_LIBRARY']}")
    raise ImportError(
        "; ".join(why)
        or "libmoetext not found: build it with `make` in the repository of moe, `make install` it, or set MOE_LIBRARY"
    )
