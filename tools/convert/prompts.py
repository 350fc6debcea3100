"""How a decoder-only model is asked for a translation, as metadata of a model file.

    prompt_meta(folder, family, name, say)     of a folder in Hugging Face's layout
    meta_of(template, tokens, family, name)    of a template and of the special tokens that it knows by name

    prompt.prefix, prompt.suffix   what the checkpoint's chat template puts around one turn of the user: texts in which
                                   special tokens are tokens
    prompt.system.prefix, .suffix  the same around a text of the system, in the place of prompt.prefix
    prompt.answer.prefix, .suffix  the same around an answer between two turns of the user. A template that cannot do
                                   that, or not always in the same way, has none of these
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
MARKS = "\ue000{}\ue001", "\ue002another one, {}, which is longer\ue003"
TALKS = "u", "su", "uauau", "suau"  # system, user, assistant
ROLES = {"s": "system", "u": "user", "a": "assistant"}
TOKENS = "bos_token", "eos_token", "pad_token", "unk_token"


def data():
    return read_json(os.path.join(HERE, "prompts.json"))


def render(template, values, where):
    """What a template makes of each of TALKS, with both marks."""
    talks = [[{"role": ROLES[role], "content": mark.format(i)} for i, role in enumerate(talk)]
             for talk in TALKS for mark in MARKS]
    request = json.dumps({"template": template, "values": values, "talks": talks, "needed": len(MARKS)})
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


def surrogates(piece):
    return any(0xD800 <= ord(x) < 0xE000 for x in piece)


def fits(pieces):
    return not any(surrogates(x) or len(x.encode()) > LONGEST_PIECE or "\0" in x for x in pieces)


def between(text, mark, n):
    """What stands before, between and behind n messages; None: that is not each of them once, in their order."""
    pieces = []
    for i in range(n):
        if text is None or text.count(mark.format(i)) != 1:
            return None
        piece, text = text.split(mark.format(i))
        pieces.append(piece)
    return [*pieces, text]


def cut(template, values, where):
    """{prefix, suffix: what stands around the user's turn; system.prefix, ...: see above}."""
    texts = render(template, values, where)
    for text, mark in zip(texts, MARKS):
        times = text.count(mark.format(0))
        if times != 1:
            raise FormatError(f"{where}: the chat template shows what the user says {times} times, not once")
    cuts = []
    for i, talk in enumerate(TALKS):
        both = [between(text, mark, len(talk)) for text, mark in zip(texts[2 * i:2 * i + 2], MARKS)]
        cuts.append(both[0] if both[0] == both[1] and both[0] is not None and fits(both[0]) else None)
        if not i and both[0] != both[1]:
            raise FormatError(f"{where}: the chat template depends on what the user says, which is not supported")
        if not i and surrogates("".join(both[0])):
            raise FormatError(f"{where}: the chat template writes a lone surrogate, which is no character")
    if cuts[0] is None:
        raise FormatError(f"{where}: the chat template writes more than {LONGEST_PIECE} bytes around what the user "
                          "says, or a NUL byte")
    (prefix, suffix), found = cuts[0], {}
    system = cuts[1][:2] if cuts[1] and cuts[1][2] == suffix else None
    answer = cuts[2][1:3] if cuts[2] else None
    if answer and cuts[2] != [prefix, *answer, *answer, suffix]:
        answer = None
    if answer and system and cuts[3] != [*system, *answer, suffix]:
        answer = None
    for name, around in ("system", system), ("answer", answer):
        if around:
            found.update({f"{name}.prefix": around[0], f"{name}.suffix": around[1]})
    return {"prefix": prefix, "suffix": suffix, **found}


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
    pieces = cut(template, {**tokens, **known["settings"].get(family, {})}, where)
    codes, english, chinese = (list(x) for x in zip(*known["languages"]))
    return {**{f"prompt.{name}": text for name, text in pieces.items()}, "prompt.name": row["name"],
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
