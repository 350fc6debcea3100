"""Live: the translation of a text that grows or changes at its end."""

import ctypes
from dataclasses import dataclass

from . import library as c
from .engine import checked, checked_call, lib
from .text import Text
from .translator import TextError, Translator
from .typed import CallOptions, Unpack


@dataclass(frozen=True)
class Shown:
    """What to show of a live text. stable: the beginning of `text` in finished sentences, which changes only if their
    sources do, or rarely when the text is final. final: whether `text` is the translation of a final text."""

    text: str
    stable: str
    final: bool


class _Asked(Text):
    quick: int


class Live:
    """Translates captions of speech, or a text while someone types. Words appear a little late, and then mostly
    stay:

        live = Live(translator)
        for text in texts:                  # the whole text so far; skip to the newest if they come too fast
            print(live.update(text).text)
        print(live.finish(text).text)       # = translator.translate(text)

    One thread at a time may use it. After finish() it takes another text."""

    def __init__(self, translator: Translator, target: "str | None" = None, source: "str | None" = None,
                 **options: "Unpack[CallOptions]"):
        self._handle = ctypes.c_void_p()
        self._translate = lambda text: translator.translate(text, target, source, **options)
        translator._for(target, source, options=options)
        checked_call("moetext_live_new", ctypes.byref(self._handle))

    def update(self, text: str, paused: bool = False) -> Shown:
        """Translate new words of the text, if there are enough, and return the visible translation. With paused, after
        a moment without new words, translate and show all of them."""
        return self._give(text, c.LIVE_PAUSED if paused else c.LIVE_GROWING)

    def finish(self, text: str) -> Shown:
        """Return the translation of the whole text. Raises a TextError if it cannot be translated."""
        return self._give(text, c.LIVE_FINAL)

    def _give(self, text, state):
        data = checked(text).encode("utf-8", "surrogatepass")
        checked_call("moetext_live_give", self._handle, data, len(data), state)
        request = c.Request()
        while lib().moetext_live_next(self._handle, ctypes.byref(request)):
            asked = _Asked(ctypes.string_at(request.text, request.length).decode("utf-8"),
                           draft=ctypes.string_at(request.draft or b"", request.draft_length).decode("utf-8"))
            asked.quick = request.quick
            try:
                found = self._translate(asked).encode("utf-8")
            except TextError:
                if state == c.LIVE_FINAL:
                    raise
                found = None
            checked_call("moetext_live_take", self._handle, found, len(found or b""))
        shown = lib().moetext_live_shown(self._handle)
        whole = ctypes.string_at(shown.text, shown.length)
        return Shown(whole.decode("utf-8"), whole[:shown.stable].decode("utf-8"), bool(shown.final))

    def __del__(self) -> None:
        handle, self._handle = self._handle, None
        if handle:
            lib().moetext_live_free(handle)
