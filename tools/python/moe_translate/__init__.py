"""Offline machine translation: the Python interface to moe.

from moe_translate import Translator
Translator("model.bin", target="de").translate("Where is my book?")
"""

from .local import AvailableModel, LocalModel, available, get, models
from .live import Live, Shown
from .text import Text
from .translator import (Hypothesis, Link, Model, MoeError, Result, Stats, Term, TextError, Translator, cached,
                         default_model, options, version)
from .typed import CallOptions, Options

__all__ = ["AvailableModel", "CallOptions", "Hypothesis", "Link", "Live", "LocalModel", "Model", "MoeError", "Options",
           "Result", "Shown", "Stats", "Term", "Text", "TextError", "Translator", "available", "cached",
           "default_model", "get", "models", "options", "version"]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":  # version of the library, which is loaded at first use
        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
