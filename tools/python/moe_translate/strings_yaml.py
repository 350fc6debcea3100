"""YAML with user-visible strings, such as Rails locales: translate values that read like text. Keys, comments,
anchors, numbers, identifiers and layout do not change. PyYAML locates the values; no objects are constructed. If the
only top-level key is the code of a language, it becomes the target language."""

import json
import re

import yaml

from .conversions import NOTES, noted, prose
from .languages import renamed
from .lines import Line, text_parts
from .segments import Place

PLAIN = re.compile(r"[^\W\d_][^:#\[\]{},&*!|>'\"%@`\n\\]*")


PROPERTIES = re.compile(r"(?:[&!]\S*(?:\s+|$))*")  # anchors and tags
DEEPEST = 100  # PyYAML inspects all levels at each token


class Loader(yaml.SafeLoader):
    """Read :year in lists as YAML 1.2 requires and Ruby does; PyYAML treats any colon in brackets as a separator."""

    def __init__(self, data):
        super().__init__(data)
        self.buffer += "\0" * 4  # PyYAML looks ahead beyond the end

    def apart(self):
        return self.peek(1) in "\0 \t\r\n\x85\u2028\u2029" + ",[]{}" * bool(self.flow_level)

    def check_value(self):
        if not self.flow_level:
            return super().check_value()
        return self.apart() or self.index > 0 and self.buffer[self.pointer - 1] in "\"'}]"

    def check_plain(self):
        return super().check_plain() or bool(self.flow_level) and self.peek() == ":" and not self.apart()


def scalars(data):
    """Yield (event, whether the scalar is a key, depth, its path, sibling keys) for each scalar."""
    stack = []  # for each open mapping or list, [whether a key is next (None in lists), the last key, all keys]
    for event in yaml.parse(data, Loader=Loader):
        node = isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent, yaml.MappingStartEvent, yaml.SequenceStartEvent))
        key = bool(stack and stack[-1][0])
        if isinstance(event, yaml.ScalarEvent):
            if key:
                stack[-1][1] = event.value
                stack[-1][2].add(event.value)
            yield event, key, len(stack), [level[1] for level in stack], stack[-1][2] if stack else set()
        if node and stack and stack[-1][0] is not None:
            stack[-1][0] = not stack[-1][0]
        if isinstance(event, yaml.MappingStartEvent):
            stack.append([True, "", set()])
        elif isinstance(event, yaml.SequenceStartEvent):
            stack.append([None, stack[-1][1] if stack else "", set()])
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            stack.pop()
        if len(stack) > DEEPEST:
            raise ValueError(f"lists and mappings nested more than {DEEPEST} deep")


def parts(data, source=None, target=None):
    try:
        events = list(scalars(data))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"not YAML: line {mark.line + 1}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError("not YAML: " + " ".join(str(error).split())) from None
    resolver, found, end = yaml.SafeLoader(""), [], 0
    tops = [event for event, key, depth, *_ in events if key and depth == 1]
    for event, key, depth, path, keys in events:
        low, high = event.start_mark.index, event.end_mark.index
        if key:
            if tops == [event] and (code := renamed(event.value, source, target)):
                low = data.index(event.value, low)
                found += [data[end:low], code]
                end = low + len(event.value)
            continue
        plain = event.style in (None, "")
        if plain and resolver.resolve(yaml.ScalarNode, event.value, (True, False)) != "tag:yaml.org,2002:str":
            continue
        if event.tag not in (None, "!", "tag:yaml.org,2002:str") or not prose(event.value, ".".join(path[-2:])):
            continue
        if depth > 1 and path[-1] in NOTES and noted(keys):
            continue
        low += PROPERTIES.match(data[low:high]).end()
        found += [data[end:low], Place(event.start_mark.line + 1), *value(event, data[low:high])]
        end = high
    return [*found, data[end:]]


def value(event, raw):
    if event.style in ("|", ">"):
        return block(raw, event.style)
    if event.style == "'" and "\n" not in event.value:
        return ["'", Line([event.value], lambda text: text.replace("'", "''"), checked=True, raw=raw[1:-1]), "'"]
    if event.style in ("'", '"') or "\n" in event.value:
        inner = raw[1:-1] if event.style == '"' else None
        return ['"', *text_parts(event.value, escape=quoted, newline="\\n", checked=True, raw=inner), '"']
    return [Plain([event.value], checked=True, raw=raw)]


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
        found += ["\n" + indent, Line(rows, newline="\n" + indent, checked=True, raw=("\n" + indent).join(rows))]
        at = end
    return found
