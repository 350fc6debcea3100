"""YAML with user-visible strings, such as the locales of Rails: translate values that read like text. Keys, comments,
anchors, numbers, identifiers and layout do not change. PyYAML locates the values; no objects are constructed. If the
only top-level key is the source language, it is replaced with the target language."""

import json
import re

import yaml

from .conversions import prose
from .languages import two_letters
from .lines import Line, text_parts
from .segments import Place

PLAIN = re.compile(r"[^\W\d_][^:#\[\]{},&*!|>'\"%@`\n\\]*")
LANGUAGE = re.compile(r"[a-z]{2,3}(?:[-_][A-Z]{2})?")


DEEPEST = 100  # PyYAML inspects all levels at each token


def scalars(data):
    """Yield (event, whether the scalar is a key, depth) for each scalar."""
    stack = []  # for an open mapping, whether a key is next; for an open list, None
    for event in yaml.parse(data, Loader=yaml.SafeLoader):
        node = isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent, yaml.MappingStartEvent, yaml.SequenceStartEvent))
        key = bool(stack and stack[-1])
        if isinstance(event, yaml.ScalarEvent):
            yield event, key, len(stack)
        if node and stack and stack[-1] is not None:
            stack[-1] = not stack[-1]
        if isinstance(event, yaml.MappingStartEvent):
            stack.append(True)
        elif isinstance(event, yaml.SequenceStartEvent):
            stack.append(None)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            stack.pop()
        if len(stack) > DEEPEST:
            raise ValueError(f"lists and mappings nested more than {DEEPEST} deep")


def parts(data, target=None):
    try:
        events = list(scalars(data))
    except yaml.YAMLError as error:
        raise ValueError("not YAML: " + " ".join(str(error).split())) from None
    resolver, found, end = yaml.SafeLoader(""), [], 0
    tops = [event for event, key, depth in events if key and depth == 1]
    for event, key, _ in events:
        low, high = event.start_mark.index, event.end_mark.index
        if key:
            if target and event is tops[0] and len(tops) == 1 and LANGUAGE.fullmatch(data[low:high]):
                found += [data[end:low], two_letters(target).replace("_", "-")]
                end = high
            continue
        plain = event.style in (None, "")
        if plain and resolver.resolve(yaml.ScalarNode, event.value, (True, False)) != "tag:yaml.org,2002:str":
            continue
        if event.tag and event.tag != "tag:yaml.org,2002:str" and event.tag != "!" or not prose(event.value):
            continue
        found += [data[end:low], Place(event.start_mark.line + 1), *value(event, data[low:high])]
        end = high
    return [*found, data[end:]]


def value(event, raw):
    if event.style in ("|", ">"):
        return block(raw, event.style)
    if event.style == "'" and "\n" not in event.value:
        return ["'", Line([event.value], lambda text: text.replace("'", "''"), checked=True), "'"]
    if event.style in ("'", '"') or "\n" in event.value:
        return ['"', *text_parts(event.value, escape=quoted, newline="\\n", checked=True), '"']
    return [Plain([event.value], checked=True)]


def quoted(text):
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Plain(Line):
    """A scalar without quotes, whose translation may need quotes."""

    def _whole(self, raw):
        text = super()._whole(raw)
        if PLAIN.fullmatch(text) and text == text.strip() and yaml.safe_load(text) == text:
            return text
        return json.dumps(text, ensure_ascii=False)


def block(raw, style):
    """Yield a block scalar's header and lines; the lines of a folded paragraph are translated as one text."""
    lines, found, at = raw.split("\n"), [], 1
    found.append(lines[0])
    while at < len(lines):
        indent = re.match(r"\s*", lines[at])[0]
        end = at + 1
        while style == ">" and lines[at].strip() and end < len(lines) and re.match(indent + r"\S", lines[end]):
            end += 1
        rows = [line[len(indent) :] for line in lines[at:end]]
        found += ["\n" + indent, Line(rows, newline="\n" + indent, checked=True)]
        at = end
    return found
