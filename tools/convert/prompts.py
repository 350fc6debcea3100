"""Prompts of decoder-only models as metadata of a model file.

    prompt_meta(folder, family, name, say)     metadata for a folder in Hugging Face's layout
    meta_of(template, tokens, family, name)    metadata for a chat template, given the values of its special tokens;
                                               {} without a template, unless the model's row of
                                               prompts.json has pieces

    prompt.prefix, prompt.suffix   text that the checkpoint's chat template adds around a user turn; special tokens in
                                   this text are parsed as tokens
    prompt.system.prefix, .suffix  text around a system message, which replaces prompt.prefix
    prompt.answer.prefix, .suffix  text around an answer between two user turns; missing if the template does not
                                   support answers or formats them differently
    prompt.end                     text after an answer, if prompt.answer.suffix is missing but answers are supported
    prompt.name                    row of prompts.json with the wordings
    prompt.KIND.LANGUAGE           wordings: plain, terms, context, style, delimiters, structured; en, zh
    prompt.chinese                 source or target languages that require the Chinese wordings
    languages.codes, .tags         the languages and their indices, which are not tokens
    languages.english, .chinese    names of the languages in wordings
    languages.named                codes of languages that the authors name, separated by spaces, if they name any
"""
import hashlib
import json
import os
import re
import subprocess
import sys

import numpy as np

import tables
from hf_json import contents, read_json, short
from moefile import FormatError, read_bounded

HERE = os.path.dirname(os.path.abspath(__file__))
LARGEST_TEMPLATE, LONGEST_PIECE = 1 << 18, 1 << 14
PATIENCE = 60  # wall-clock seconds; template.py limits itself to 2 s of processor time
# Contents of messages. The second one has characters that a template might escape.
MARKS = "\ue000{}\ue001", "\ue002another 'one', {},\nwhich is \"longer\" & <b>bold</b>\ue003"
TALKS = "u", "su", "uauau", "suau"  # u: user, s: system, a: assistant
ROLES = {"s": "system", "u": "user", "a": "assistant"}
TOKENS = "bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"
WITHOUT = "; or use --prompts none"
# Special tokens of transformers' classes if the files name none, and the classes of families.
ROWS, CLASS_TOKENS = tables.read("decoder.inc"), {}
for kind, token, text in ROWS["SPECIALS"]:
    CLASS_TOKENS.setdefault(kind, {})[token] = text
FAMILY_CLASSES = dict(ROWS["CLASS"])


def data():
    return read_json(os.path.join(HERE, "prompts.json"))


def settings_of(family):
    """Return the variables that switch off thinking."""
    settings = data()["settings"]
    return {**settings[""], **settings.get(family, {})}


def render(template, values, where):
    """Render the template for each of TALKS, with each of MARKS as the messages' content. Return (texts, dates)."""
    talks = [[{"role": ROLES[role], "content": mark.format(i)} for i, role in enumerate(talk)]
             for talk in TALKS for mark in MARKS]
    request = json.dumps({"template": template, "values": values, "talks": talks, "needed": len(MARKS)})
    try:
        result = subprocess.run([sys.executable, "-I", os.path.join(HERE, "template.py")], input=request.encode(),
                                capture_output=True, timeout=PATIENCE)
        answer = json.loads(result.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        raise FormatError(f"{where}: the chat template requires more than 2 seconds or 256 MB{WITHOUT}") from None
    if answer.get("missing"):
        raise ModuleNotFoundError(answer["error"], name="jinja2")  # needs.py reports it
    if "error" in answer:
        raise FormatError(f"{where}: the chat template cannot be rendered: {answer['error']}{WITHOUT}")
    return answer["texts"], answer["dates"]


def surrogates(piece):
    return any(0xD800 <= ord(x) < 0xE000 for x in piece)


def fits(pieces):
    return not any(surrogates(x) or len(x.encode()) > LONGEST_PIECE or "\0" in x for x in pieces)


def between(text, mark, n):
    """Return the texts before, between and after n messages, or None unless each message occurs once, in order."""
    pieces = []
    for i in range(n):
        if text is None or text.count(mark.format(i)) != 1:
            return None
        piece, text = text.split(mark.format(i))
        pieces.append(piece)
    return [*pieces, text]


def cut(template, values, where, say=lambda message: None):
    """Return the prefix and suffix of user turns, and of system messages and answers if the template supports them."""
    texts, dates = render(template, values, where)
    if dates:
        say(f"the chat template writes the date, {', '.join(dates[:3])}: all prompts will have the date of the "
            "conversion")
    for text, mark in zip(texts, MARKS):
        times = text.count(mark.format(0))
        if times != 1:
            raise FormatError(f"{where}: the chat template contains the user's message {times} times, expected once"
                              + WITHOUT)
    cuts = []
    for i, talk in enumerate(TALKS):
        both = [between(text, mark, len(talk)) for text, mark in zip(texts[2 * i:2 * i + 2], MARKS)]
        cuts.append(both[0] if both[0] == both[1] and both[0] is not None and fits(both[0]) else None)
        if not i and both[0] != both[1]:
            raise FormatError(f"{where}: chat templates that depend on the user's message are not supported{WITHOUT}")
        if not i and surrogates("".join(both[0])):
            raise FormatError(f"{where}: the chat template's output contains a lone surrogate")
    if cuts[0] is None:
        raise FormatError(f"{where}: the chat template's prompt contains a NUL byte or exceeds {LONGEST_PIECE} bytes")
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
    if cuts[2] and not answer:
        found["end"] = cuts[2][2]
    return {"prefix": prefix, "suffix": suffix, **found}


def known_row(template, about, families=(), row=None):
    """Return the row of `templates` in prompts.json for the C converter: the template's SHA-256 and its pieces, with
    names of special tokens in braces. Templates that use the settings of a family need a row per family; those of
    models whose row in `rows` has settings, a row per such row."""
    settings = row["settings"] if row else settings_of(families[0] if families else "")
    pieces = cut(template, {**{name: "{" + name + "}" for name in TOKENS}, **settings}, about)
    return {"about": about, "sha256": hashlib.sha256(template.encode()).hexdigest(), "families": list(families),
            **({"row": row["name"]} if row else {}), "pieces": pieces}


def row_for(rows, family, name, wanted):
    """Return the row of prompts.json for a model."""
    if wanted:
        found = [row for row in rows if row["name"] == wanted]
        if not found:
            raise FormatError(f"--prompts {wanted}: expected {', '.join(row['name'] for row in rows)} or none")
        return found[0]
    fits = lambda row: (not row["families"] or family in row["families"]) and (
        not row["words"] or any(word in name.lower() for word in row["words"]))
    return next(row for row in rows if fits(row))


def filled(piece, tokens, where):
    """Return a piece of a row with special tokens in place of their names in braces."""
    for key in re.findall(r"\{(\w+_token)\}", piece):
        if not isinstance(tokens.get(key), str):
            raise FormatError(f"{where}: the prompt begins with {key}, which is undefined{WITHOUT}")
        piece = piece.replace("{" + key + "}", tokens[key])
    return piece


def meta_of(template, tokens, family, name, where, wanted=None, say=lambda message: None):
    known = data()
    row = row_for(known["rows"], family, name, wanted)
    if "pieces" in row:  # the authors use these instead of a chat template
        pieces = {key: filled(piece, tokens, where) for key, piece in row["pieces"].items()}
    elif template is None:
        return {}
    else:
        pieces = cut(template, {**tokens, **row.get("settings", settings_of(family))}, where, say)
    languages = [(*x, x[1])[:3] for x in row.get("languages", known["languages"])]
    codes, english, chinese = (list(x) for x in zip(*languages))
    return {**{f"prompt.{name}": text for name, text in pieces.items()}, "prompt.name": row["name"],
            **{f"prompt.{key}": text for key, text in row["wordings"].items()}, "prompt.chinese": known["chinese"],
            "languages.codes": codes, "languages.tags": np.arange(len(codes), dtype=np.int64), "source.tag": 0,
            "languages.english": english, "languages.chinese": chinese}


def is_bare(meta):
    """Return True if the tokeniser puts its bos token before a prompt, as before any text."""
    return meta.get("prompt.prefix") == "" and any(
        row["name"] == meta["prompt.name"] and "pieces" in row for row in data()["rows"])


def named_languages(meta, named):
    """Return the languages that a GGUF file or a model card names (a list, or one) as metadata. Rows of prompts.json
    for a family of translation models have its languages."""
    named = [x for x in (named if isinstance(named, list) else [named]) if isinstance(x, str)]
    codes = [x for x in named if re.fullmatch(r"[A-Za-z]{2,3}([-_][A-Za-z]{2,4})?", x)]
    known = meta["prompt.name"] == "general" and codes and len(codes) == len(named)  # "multilingual" is not a code
    return {"languages.named": " ".join(codes)} if known else {}


def card_languages(folder):
    """Return `language` of the YAML at the beginning of a folder's README.md, or []."""
    try:
        with open(os.path.join(folder, "README.md"), encoding="utf-8", errors="replace") as card:
            head = re.match(r"---\n(.*?\n)---", card.read(1 << 16), re.S)
    except OSError:
        return []
    found = re.search(r"^language:(.*\n(?:[ \t]*-.*\n)*)", head[1] if head else "", re.M)
    return re.findall(r"[\w-]+", re.sub(r"#.*|^[ \t]*-", " ", found[1], flags=re.M)) if found else []


def template_of(path, about, folder):
    """Return (template, path) of a folder, or (None, None) without a template."""
    alone = os.path.join(folder, "chat_template.jinja")
    if os.path.lexists(alone):
        try:
            return read_bounded(alone, LARGEST_TEMPLATE, "a chat template").decode(), alone
        except UnicodeDecodeError:
            raise FormatError(f"{alone}: not UTF-8") from None
    found = about.get("chat_template")
    if isinstance(found, list):  # several templates: [{name, template}], or {name: template}
        found = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
    if isinstance(found, dict):
        if "default" not in found:
            raise FormatError(f"{path}: chat_template has {', '.join(map(str, found))}, but no default{WITHOUT}")
        found = found["default"]
    if found is not None and (not isinstance(found, str) or len(found) > LARGEST_TEMPLATE):
        raise FormatError(f"{path}: chat_template is {short(found)}, which is not supported")
    return (found, path) if found is not None else (None, None)


def tokens_of(folder, about, family):
    """Return the special tokens that transformers passes to templates, by name; `about`: tokenizer_config.json."""
    paths = [os.path.join(folder, name) for name in ("special_tokens_map.json", "config.json")]
    more, config = (read_json(path) if os.path.lexists(path) else {} for path in paths)
    if "added_tokens_decoder" in about:  # then transformers ignores special_tokens_map.json
        more = {}
    name = about.get("tokenizer_class") or config.get("tokenizer_class") or FAMILY_CLASSES.get(family)
    values = {**CLASS_TOKENS.get(f"{name}".removesuffix("Fast"), {}), **about, **more}
    extra = about.get("extra_special_tokens")
    named = {**{key: values.get(key) for key in TOKENS}, **(extra if isinstance(extra, dict) else {})}
    found = {key: text for key, value in named.items() for text in contents([value]) if text}
    listed = [text for source in (about, more) for text in contents(source.get("additional_special_tokens"))]
    return {**found, "additional_special_tokens": list(dict.fromkeys(listed))} if listed else found


def check_tokens(added, tokens, meta, where):
    """Reject special tokens in prompts that the tokeniser would split, because its files do not add them. added: the
    name of its file, and the contents of added tokens."""
    texts = "\n".join(value for key, value in meta.items() if key.endswith(("prefix", "suffix")))
    written = {key: text for key, text in tokens.items() if isinstance(text, str) and text in texts}
    for key, text in written.items():
        if added and not any(text in token for token in added[1]):
            raise FormatError(f"{where}: the chat template writes {key} {short(text)}, which {added[0]} does not add "
                              f"as a token{WITHOUT}")


def no_prompt(say, wanted, missing):
    say(f"no prompt: {'--prompts none' if wanted == 'none' else missing}. Each input line must be a whole prompt")
    return {}


def prompt_meta(folder, family, name, say, wanted=None, added=None):
    """Return the metadata of a folder's prompts; wanted: name of a row of prompts.json, or "none"; added: as in
    check_tokens, if known."""
    path = os.path.join(folder, "tokenizer_config.json")
    about = read_json(path) if os.path.lexists(path) else {}
    template, where = template_of(path, about, folder) if wanted != "none" else (None, None)
    tokens, where = tokens_of(folder, about, family), where or folder
    meta = meta_of(template, tokens, family, name, where, wanted, say) if wanted != "none" else {}
    if not meta:
        return no_prompt(say, wanted, f"{folder} has no chat template")
    meta.update(named_languages(meta, card_languages(folder)))
    check_tokens(added, tokens, meta, where)
    return meta
