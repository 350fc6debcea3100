"""How a decoder-only model is asked for a translation, as metadata of a model file.

    prompt_meta(folder, family, name, say)     of a folder in Hugging Face's layout
    meta_of(template, tokens, family, name)    of a template and of the special tokens that it knows by name

    prompt.prefix, prompt.suffix   what the checkpoint's chat template puts around one turn of the user: texts in which
                                   special tokens are tokens
    prompt.name                    the row of prompts.json that the wordings are of
    prompt.KIND.LANGUAGE           wordings: plain, terms, context, style, delimiters, structured; en, zh
    prompt.chinese                 languages for which Chinese wordings are taken, on either side
    languages.codes, .tags         the languages, and their numbers: they are no tokens
    languages.english, .chinese    what wordings call them
"""
import json
import os
import subprocess
import sys

import numpy as np

from hf_json import read_json, short
from moefile import FormatError, read_bounded

HERE = os.path.dirname(os.path.abspath(__file__))
LARGEST_TEMPLATE, LONGEST_PIECE = 1 << 18, 1 << 14
PATIENCE = 60  # seconds of the clock; template.py ends itself after 2 of the processor
MARKS = "\ue000prompt\ue001", "\ue002another one, which is longer\ue003"
TOKENS = "bos_token", "eos_token", "pad_token", "unk_token"


def data():
    return read_json(os.path.join(HERE, "prompts.json"))


def render(template, values, where):
    """What a template makes of both marks."""
    request = json.dumps({"template": template, "values": values, "marks": MARKS})
    try:
        result = subprocess.run([sys.executable, "-I", os.path.join(HERE, "template.py")], input=request.encode(),
                                capture_output=True, timeout=PATIENCE)
        answer = json.loads(result.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        raise FormatError(f"{where}: the chat template takes more than 2 seconds, or more than 256 MB") from None
    if answer.get("missing"):
        raise FormatError(f"{answer['error']} (Debian: python3-jinja2); --prompts none does without a prompt")
    if "error" in answer:
        raise FormatError(f"{where}: the chat template cannot be rendered: {answer['error']}")
    return answer["texts"]


def cut(template, values, where):
    """(what stands before the user's turn, what stands behind it)."""
    pieces = []
    for text, mark in zip(render(template, values, where), MARKS):
        if text.count(mark) != 1:
            raise FormatError(f"{where}: the chat template shows what the user says {text.count(mark)} times, not once")
        pieces.append(tuple(text.split(mark)))
    if pieces[0] != pieces[1]:
        raise FormatError(f"{where}: the chat template depends on what the user says, which is not supported")
    for piece in pieces[0]:
        if any(0xD800 <= ord(x) < 0xE000 for x in piece):
            raise FormatError(f"{where}: the chat template writes a lone surrogate, which is no character")
        if len(piece.encode()) > LONGEST_PIECE or "\0" in piece:
            raise FormatError(f"{where}: the chat template writes more than {LONGEST_PIECE} bytes around what the user "
                              "says, or a NUL byte")
    return pieces[0]


def row_for(rows, family, name, wanted):
    """The wordings for a model."""
    if wanted:
        found = [row for row in rows if row["name"] == wanted]
        if not found:
            raise FormatError(f"--prompts {wanted}: known are {', '.join(row['name'] for row in rows)} and none")
        return found[0]
    fits = lambda row: (not row["families"] or family in row["families"]) and (
        not row["words"] or any(word in name.lower() for word in row["words"]))
    return next(row for row in rows if fits(row))


def meta_of(template, tokens, family, name, where, wanted=None):
    known = data()
    row = row_for(known["rows"], family, name, wanted)
    prefix, suffix = cut(template, {**tokens, **known["settings"].get(family, {})}, where)
    codes, english, chinese = (list(x) for x in zip(*known["languages"]))
    return {"prompt.prefix": prefix, "prompt.suffix": suffix, "prompt.name": row["name"],
            **{f"prompt.{key}": text for key, text in row["wordings"].items()}, "prompt.chinese": known["chinese"],
            "languages.codes": codes, "languages.tags": np.arange(len(codes), dtype=np.int64), "source.tag": 0,
            "languages.english": english, "languages.chinese": chinese}


def template_of(path, about, folder):
    """(a folder's template, where it stands); (None, None): it has none."""
    alone = os.path.join(folder, "chat_template.jinja")
    if os.path.exists(alone):
        try:
            return read_bounded(alone, LARGEST_TEMPLATE, "a chat template").decode(), alone
        except UnicodeDecodeError:
            raise FormatError(f"{alone}: it is no UTF-8") from None
    found = about.get("chat_template")
    if isinstance(found, list):  # of several: [{name, template}]
        named = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
        found = named.get("default")
    if found is not None and (not isinstance(found, str) or len(found) > LARGEST_TEMPLATE):
        raise FormatError(f"{path}: chat_template is {short(found)}, which is not supported")
    return (found, path) if found is not None else (None, None)


def tokens_of(about):
    """{name of a special token: its text}."""
    found = {}
    for key in TOKENS:
        value = about.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[key] = value
    return found


def prompt_meta(folder, family, name, say, wanted=None):
    """Metadata of the prompts of a folder; wanted: a row of prompts.json, "none": no prompt."""
    path = os.path.join(folder, "tokenizer_config.json")
    about = read_json(path) if os.path.exists(path) else {}
    template, where = template_of(path, about, folder) if wanted != "none" else (None, None)
    if template is None:
        say(f"no prompt: {'--prompts none' if wanted == 'none' else f'{folder} has no chat template'}. Each line that "
            "is translated must be a whole prompt")
        return {}
    return meta_of(template, tokens_of(about), family, name, where, wanted)
