"""Machine translation on this machine: Python's interface to moe.

from moe_translate import Translator
Translator("model.bin", target="de").translate("Where is my book?")
"""

from .translator import Hypothesis, Link, Model, MoeError, Result, TextError, Translator, cached, options, version

__all__ = [
    "Hypothesis",
    "Link",
    "Model",
    "MoeError",
    "Result",
    "TextError",
    "Translator",
    "cached",
    "options",
    "version",
]
