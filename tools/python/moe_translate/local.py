"""Models on this machine, and models that moe-get can fetch."""

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import library as c
from .engine import MoeError, checked_call, language, lib, without_nul


@dataclass(frozen=True)
class LocalModel:
    """A model that moe-get has fetched, or (`shipped`) the one that is installed with moe."""

    name: str  # such as "firefox/en-pt"
    path: str
    directions: str  # such as "en to pt"
    bytes: int
    comet: "float | None"  # published scores
    bleu: "float | None"
    shipped: bool


@dataclass(frozen=True)
class AvailableModel:
    """A model that get() can fetch."""

    name: str
    about: str
    licence: str  # "" if unknown
    bytes: "int | None"
    comet: "float | None"
    bleu: "float | None"


@contextmanager
def _choice(source: Any, target: Any) -> "Iterator[Any]":
    """Yield a moetext_choice."""
    codes = [without_nul(language(code)) if code else None for code in (source, target)]
    found = ctypes.POINTER(c.Choice)()
    checked_call("moetext_choose", *codes, ctypes.byref(found))
    try:
        yield found.contents
    finally:
        lib().moetext_choice_free(found)


def chosen(source: Any, target: Any) -> "list[str]":
    """Return the model files for two languages: MOE_MODEL, else fetched models, else the shipped one."""
    with _choice(source, target) as choice:
        return [os.fsdecode(choice.paths[i]) for i in range(choice.n_paths)]


def models() -> "list[LocalModel]":
    """Return the models on this machine: fetched ones in the order in which they are preferred, then the shipped one."""
    try:
        with _choice(None, None) as choice:
            rows = [choice.local[i].contents for i in range(choice.n_local)]
            return [LocalModel(os.fsdecode(row.name), os.fsdecode(row.path), os.fsdecode(row.ways), row.bytes,
                               *(None if score < 0 else score for score in (row.comet, row.bleu)), bool(row.shipped))
                    for row in rows]
    except MoeError as error:
        if error.status == "io":
            return []
        raise


def _moe_get(*words: str) -> str:
    """Run moe-get, which uses the network, and return its output."""
    here = os.path.dirname(os.path.abspath(getattr(lib(), "_name", "")))
    name = "moe-get.exe" if os.name == "nt" else "moe-get"
    places = [os.path.join(here, name), os.path.join(here, "..", "bin", name)]
    program = next((path for path in places if os.access(path, os.X_OK)), None) or shutil.which("moe-get")
    if program is None:
        raise MoeError("moe-get is not installed: run `make install` in the repository of moe", "io", "moe-get")
    done = subprocess.run([program, *words], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["moe-get failed"])[-1]
        raise MoeError(last.removeprefix("moe-get: "), "argument" if done.returncode == 2 else "io", "moe-get")
    return os.fsdecode(done.stdout)


def available(word: str = "") -> "list[AvailableModel]":
    """Return the models whose names or descriptions contain a word, such as a language. Uses the network."""
    return [AvailableModel(row["name"], row["about"], row["licence"], row.get("bytes"), row.get("comet"),
                           row.get("bleu")) for row in json.loads(_moe_get("--search=" + word, "--json"))]


def get(name: str, accept_licence: bool = False) -> str:
    """Fetch a model with moe-get, such as "en-pt", unless it is here already. Return the path of the converted model, or
    of its folder if moe-get cannot convert it. accept_licence: accept a licence that does not permit commercial use."""
    return _moe_get("-q", *(["--accept-licence"] if accept_licence else []), "--", name).removesuffix("\n")
