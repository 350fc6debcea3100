"""Cut the texts and tags inside a block of a document into segments.

A link that is not next to words is a separate segment, because rows of links and tables of contents are not sentences.
Code, names, addresses and formulas are copied with their markup; the translator sees a placeholder, {1}. If a pair of
tags around words does not enclose words in the translation, the texts between tags are translated separately.
"""

import re
from dataclasses import dataclass

from .segments import WORD, Mark, Segment, loose, partners

MOST_MARKS = 64  # maximum number of marks per segment
NEAR = 16  # maximum number of items in a name or formula
SEEN = re.compile(r"<(?:/?x\d+|x\d+/)>|\{\d+\}")
NAME = re.compile(r"(?:https?://|www\.)\S+|[@#][^\s@#]*[^\W_]\S*|[^\s@]+@[^\s@]+\.[^\s@]+")
SYMBOL = re.compile(r"(?:[-+\u2212]?\d[\d.,]*|[^\W\d_]{1,2}|[)\]])$")  # base of an exponent or index
MORE_SYMBOL = re.compile(r"(?:[^\W\d_]{1,2}|\d+)(?![^\W_])")


class Text(str):
    """A decoded text with the encoded form of each character."""

    def __new__(cls, shown, raws=None):
        text = super().__new__(cls, shown)
        text.raws = list(raws) if raws is not None else list(shown)
        return text

    @property
    def raw(self):
        return "".join(self.raws)

    def part(self, begin, end):
        return Text(self[begin:end], self.raws[begin:end])


@dataclass
class Tag(Mark):
    """A mark of a document. kind "word": copied like a word; name: element name; link: may be a segment by itself."""

    name: str = ""
    link: bool = False


def letters(item):
    return item.kind == "word" if isinstance(item, Mark) else bool(WORD.search(item))


class Sentence(Segment):
    """A segment in which the translator sees copied words as {1}, {2}..."""

    def _names(self):
        taken = {int(n) for item in self.items if isinstance(item, str) for n in re.findall(r"\{(\d+)\}", item)}
        names, stack, number = {}, [], 0
        for at, item in enumerate(self.items):
            if not isinstance(item, Mark):
                continue
            if item.kind == "close":
                names[at] = f"</x{stack.pop()}>"
                continue
            number += 1
            while number in taken:
                number += 1
            names[at] = {"open": f"<x{number}>", "word": f"{{{number}}}"}.get(item.kind, f"<x{number}/>")
            if item.kind == "open":
                stack.append(number)
        return names

    def accept(self, translation):
        if translation == self.source():
            return self.unchanged()
        names = {name: at for at, name in self._names().items()}
        out, stack, end, words = [], [], 0, (0, 0)
        held, opened, partner = [words], {}, {}
        for at, item in enumerate(self.items):  # count words before each item; pair the marks
            held.append(counted(held[-1], item))
            if isinstance(item, Mark) and item.kind == "open":
                stack.append(at)
            elif isinstance(item, Mark) and item.kind == "close":
                partner[at] = stack.pop()
        for seen in SEEN.finditer(translation):
            if seen[0] not in names:
                if seen[0][0] == "{":
                    continue  # braces in the text itself
                return None
            at = names.pop(seen[0])
            mark, text = self.items[at], translation[end : seen.start()]
            words = counted(words, text)
            if mark.kind == "open":
                stack.append(at)
                opened[at] = words
            elif mark.kind == "close":
                begin = partner[at]
                if not stack or stack.pop() != begin or more(held[begin], held[at]) != more(opened[begin], words):
                    return None
            out += [self.escape(text), mark.raw]
            words = counted(words, mark)
            end = seen.end()
        if names or stack:
            return None
        return self._checked("".join(out) + self.escape(translation[end:]), None)

    def accept_pieces(self, translations):
        out = []
        for item, translation in zip(self.items, translations, strict=True):
            if isinstance(item, Mark) or not translation:
                out.append(raw_of(item, self.escape))
            else:
                left, right = item[: len(item) - len(item.lstrip())], item[len(item.rstrip()) :]
                out.append(left + self.escape(translation) + right)
        return self._checked("".join(out), self.original())

    def original(self):
        return self._whole("".join(raw_of(item, self.escape) for item in self.items))


def has_word(item):
    return item.kind == "word" if isinstance(item, Mark) else any(map(str.isalnum, item))


def counted(sums, item):
    """Count an item (as text with letters, as text with letters or digits), since "09" cannot replace "released"."""
    return sums[0] + letters(item), sums[1] + has_word(item)


def more(before, after):
    return after[0] > before[0], after[1] > before[1]


def raw_of(item, escape):
    raw = getattr(item, "raw", None)
    return escape(item) if raw is None else raw


def joined_texts(items):
    """Join adjacent texts."""
    found, waiting = [], []

    def end():
        if waiting:
            whole = "".join(waiting)
            if all(isinstance(text, Text) for text in waiting):
                whole = Text(whole, [raw for text in waiting for raw in text.raws])
            found.append(whole)
            waiting.clear()

    for item in items:
        if isinstance(item, Mark):
            end()
            found.append(item)
        elif item:
            waiting.append(item)
    end()
    return found


def slice_of(text, begin, end):
    return text.part(begin, end) if isinstance(text, Text) else text[begin:end]


def collapsed(items, escape):
    """Collapse each name, address or formula into one word."""
    other, found, at = partners(items), [], 0
    formulas = []  # (tag, parts of its text); joined at the end, so that long formulas take linear time
    while at < len(items):
        item, end = items[at], other.get(at, -1)
        if not isinstance(item, Mark) or item.kind != "open" or end - at > NEAR:
            found.append(item)
            at += 1
            continue
        inside = items[at + 1 : end]
        text = "".join(x for x in inside if isinstance(x, str))
        raw = "".join(raw_of(x, escape) for x in items[at : end + 1])
        plain = not any(isinstance(x, Mark) and x.parts for x in items[at : end + 1])
        before = found[-1] if found else ""
        if plain and not any(has_word(x) for x in inside):
            found.append(Tag(raw))
        elif plain and len(text) < 1000 and NAME.fullmatch(text):
            found.append(Tag(raw, "word"))
        elif plain and item.name in ("sup", "sub") and text and not re.search(r"\s", text) and glued(before):
            near = max(0, len(before) - 40) if isinstance(before, str) else 0
            run = SYMBOL.search(before[near:]) if isinstance(before, str) else None
            start = near + run.start() if run else 0
            if run and start and (before[start - 1].isalnum()):
                run = None
            if run is None and not isinstance(before, Mark):  # a footnote reference after a word
                found.append(Tag(raw) if not WORD.search(text) else item)
                at = end + 1 if not WORD.search(text) else at + 1
                continue
            if isinstance(before, Mark):
                if not formulas or formulas[-1][0] is not before:
                    formulas.append((before, [before.raw]))
            else:
                found[-1] = slice_of(before, 0, start)
                found.append(Tag("", "word", name="formula"))
                formulas.append((found[-1], [raw_of(slice_of(before, start, len(before)), escape)]))
            formulas[-1][1].append(raw)
            after = items[end + 1] if end + 1 < len(items) else ""
            more = MORE_SYMBOL.match(after) if isinstance(after, str) else None
            if more:
                formulas[-1][1].append(raw_of(slice_of(after, 0, more.end()), escape))
                items[end + 1] = slice_of(after, more.end(), len(after))
                end += not items[end + 1]
        else:
            found.append(item)
            at += 1
            continue
        at = end + 1
    for tag, parts in formulas:
        tag.raw = "".join(parts)
    return [item for item in found if item != ""]


def glued(before):
    """Return whether no space separates `before` from the next item."""
    return before.name == "formula" if isinstance(before, Tag) else bool(before) and before[-1].isalnum()


def outside(item, escape):
    """Return the parts of an item outside all segments."""
    if isinstance(item, Mark):
        return item.parts or [item.raw]
    return [raw_of(item, escape)]


def cut(items, escape=str, check=None):
    """Return the parts of a document, strings and Segments, made from `items`."""
    items = collapsed(joined_texts(items), escape)
    other = partners(items)
    words = [0]  # number of words before each item
    for item in items:
        words.append(words[-1] + letters(item))
    edge = [loose(item) for item in items]
    parts, stack = [], [(0, len(items), False)]
    while stack:
        first, last, whole = stack.pop()
        if words[first] == words[last]:
            for item in items[first:last]:
                parts += outside(item, escape)
            continue
        if edge[first]:
            stack += [(first + 1, last, whole), (first, first + 1, True)]
        elif edge[last - 1]:
            stack += [(last - 1, last, True), (first, last - 1, whole)]
        elif other.get(first) == last - 1:
            stack += [(last - 1, last, True), (first + 1, last - 1, False), (first, first + 1, True)]
        elif whole:
            parts += sentence(items[first:last], escape, check)
        else:
            stack += divided(items, first, last, other, words)[::-1]
    return parts


def divided(items, first, last, other, words):
    """Divide a range into separate elements and the sentences between them; return [(first, last, is a sentence)]."""
    nodes, at = [], first
    while at < last:
        end = other[at] + 1 if isinstance(items[at], Mark) and items[at].kind == "open" else at + 1
        nodes.append((at, end, end > at + 1))
        at = end
    spoken = any(not element and words[end] > words[at] for at, end, element in nodes)
    left, right = [], [False] * len(nodes)
    near = False
    for at, end, element in nodes:
        left.append(near)
        near = False if element else near or words[end] > words[at]
    near = False
    for number in range(len(nodes) - 1, -1, -1):
        at, end, element = nodes[number]
        right[number] = near
        near = False if element else near or words[end] > words[at]
    found, begin = [], first
    for number, (at, end, element) in enumerate(nodes):
        alone = element and words[end] > words[at] and not left[number] and not right[number]
        if alone and (not spoken or getattr(items[at], "link", False)):
            found += [(begin, at, True)] if begin < at else []
            found.append((at, end, False))
            begin = end
    return found + ([(begin, last, True)] if begin < last else [])


def sentence(items, escape, check):
    """Return the parts of a sentence: one segment, or a segment per text if there are too many marks."""
    if not any(isinstance(item, str) and WORD.search(item) for item in items):
        return [part for item in items for part in outside(item, escape)]
    if sum(isinstance(item, Mark) for item in items) > MOST_MARKS:
        found = []
        for item in items:
            found += outside(item, escape) if isinstance(item, Mark) else trimmed([item], escape, check)
        return found
    return trimmed(items, escape, check)


def trimmed(items, escape, check):
    """Return the parts of a sentence, with white space at both ends outside the segment."""
    items, before, after = list(items), [], []
    if isinstance(items[0], str):
        size = len(items[0]) - len(items[0].lstrip())
        before = [raw_of(slice_of(items[0], 0, size), escape)] if size else []
        items[0] = slice_of(items[0], size, len(items[0]))
    if items and isinstance(items[-1], str):
        size = len(items[-1].rstrip())
        after = [raw_of(slice_of(items[-1], size, len(items[-1])), escape)] if size < len(items[-1]) else []
        items[-1] = slice_of(items[-1], 0, size)
    if not any(isinstance(item, str) and WORD.search(item) for item in items):
        return [*before, *(part for item in items for part in outside(item, escape)), *after]
    return [*before, Sentence(items, escape, check), *after]
