"""Text to translate, cut out of a document, with the markup inside it.

A document is a list of strings, which stay as they are, and Segments. A Segment's items are texts and Marks. A
translator sees the texts with numbered tags in the place of marks ("Click <x1>Save</x1>."), and puts the tags where
they belong. Where it loses one, or nests them wrongly, the texts between the marks are translated one by one instead:
the document keeps its structure in any case.
"""

import itertools
import re
from dataclasses import dataclass, field

from .text import Text

TAG = re.compile(r"<(/?)x(\d+)(/?)>")
SPACE = re.compile(r"[ \t\r\n\f]+")
WORD = re.compile(r"[^\W\d_]")


@dataclass
class Mark:
    """Markup inside a sentence. kind: "open" and "close" come in pairs, "single" stands alone. `parts`: strings and
    Segments that `raw` is made of where there is something to translate in it."""

    raw: str
    kind: str = "single"
    parts: list = field(default_factory=list)


@dataclass
class Segment:
    """`escape` makes a text as the document writes it of one that a reader sees; the items have it as a reader does."""

    items: list
    escape: object = str
    check: object = None  # raw text of a translation -> False: not as it should be
    _before: list = field(default_factory=list, repr=False)
    _after: list = field(default_factory=list, repr=False)

    def __post_init__(self):
        items = merge(self.items)
        other, first, last = partners(items), 0, len(items)
        # Markup and space around all text stay outside.
        while first < last:
            if loose(items[first]):
                first += 1
            elif loose(items[last - 1]):
                last -= 1
            elif other.get(first) == last - 1:
                first, last = first + 1, last - 1
            else:
                break
        self._before, self._after, items = items[:first], items[last:], items[first:last]
        if items and isinstance(items[0], str) and items[0] != items[0].lstrip():
            self._before.append(items[0][: len(items[0]) - len(items[0].lstrip())])
            items[0] = items[0].lstrip()
        if items and isinstance(items[-1], str) and items[-1] != items[-1].rstrip():
            self._after.insert(0, items[-1][len(items[-1].rstrip()) :])
            items[-1] = items[-1].rstrip()
        self.items = items

    def source(self):
        """What the translator sees; "" if there are no words."""
        if not any(isinstance(item, str) and WORD.search(item) for item in self.items):
            return ""
        names = self._names()
        return "".join(
            SPACE.sub(" ", item) if isinstance(item, str) else names[at] for at, item in enumerate(self.items)
        )

    def accept(self, translation):
        """The raw text of a translation; None if its tags are not those of the source, well nested."""
        if translation == self.source():
            return self.unchanged()
        names = {name: self.items[at] for at, name in self._names().items()}
        out, open_tags, end = [], [], 0
        for tag in TAG.finditer(translation):
            mark = names.pop(tag[0], None)
            if mark is None:
                return None
            if mark.kind == "open":
                open_tags.append(tag[2])
            elif mark.kind == "close" and (not open_tags or open_tags.pop() != tag[2]):
                return None
            out += [self.escape(translation[end : tag.start()]), mark.raw]
            end = tag.end()
        if names or open_tags:
            return None
        return self._checked("".join(out) + self.escape(translation[end:]), None)

    def marks(self):
        return [item for item in (*self._before, *self.items, *self._after) if isinstance(item, Mark)]

    def pieces(self):
        """The texts between the marks, to be translated one by one."""
        return [
            SPACE.sub(" ", item).strip() if isinstance(item, str) and WORD.search(item) else "" for item in self.items
        ]

    def accept_pieces(self, translations):
        out = []
        for item, translation in zip(self.items, translations, strict=True):
            if isinstance(item, Mark):
                out.append(item.raw)
            elif not translation:
                out.append(self.escape(item))
            else:
                left, right = item[: len(item) - len(item.lstrip())], item[len(item.rstrip()) :]
                out.append(left + self.escape(translation) + right)
        return self._checked("".join(out), self.original())

    def unchanged(self):
        """Where the translation is the source."""
        return self.original()

    def original(self):
        return self._whole("".join(item.raw if isinstance(item, Mark) else self.escape(item) for item in self.items))

    def _checked(self, raw, otherwise):
        whole = self._whole(raw)
        return whole if self.check is None or self.check(whole) else otherwise

    def _whole(self, raw):
        text = [item.raw if isinstance(item, Mark) else self.escape(item) for item in (*self._before, *self._after)]
        return "".join(text[: len(self._before)]) + raw + "".join(text[len(self._before) :])

    def _names(self):
        """Item number -> tag."""
        names, stack, number = {}, [], 0
        for at, item in enumerate(self.items):
            if isinstance(item, Mark) and item.kind == "close":
                names[at] = f"</x{stack.pop()}>"
            elif isinstance(item, Mark):
                number += 1
                names[at] = f"<x{number}>" if item.kind == "open" else f"<x{number}/>"
                if item.kind == "open":
                    stack.append(number)
        return names


class Place(str):
    """An empty string among the parts of a document: what comes behind it stands in this line of the source, though the
    parts so far may have more or fewer lines."""

    def __new__(cls, line):
        place = super().__new__(cls)
        place.line = line
        return place


def loose(item):
    """Stands outside a segment that it is at an end of."""
    return item.kind == "single" if isinstance(item, Mark) else not item.strip()


def merge(items):
    """Neighbouring texts as one; empty ones go."""
    merged = []
    for texts, group in itertools.groupby((x for x in items if x != ""), lambda item: isinstance(item, str)):
        group = list(group)
        merged += ["".join(group)] if texts and len(group) > 1 else group
    return merged


def partners(items):
    """Item number -> that of its partner. Marks without one become single."""
    stack, found = [], {}
    for at, item in enumerate(items):
        if isinstance(item, Mark) and item.kind == "open":
            stack.append(at)
        elif isinstance(item, Mark) and item.kind == "close":
            if stack:
                begin = stack.pop()
                found[begin], found[at] = at, begin
            else:
                item.kind = "single"
    for at in stack:
        items[at].kind = "single"
    return found


def sensible(translate):
    """`translate` with "" in the place of what says nothing, such as " - " for "page - 1"; no space around a text: it
    could be a document's own, such as an indentation. A text that comes again is translated once."""

    def checked(texts):
        once = list(dict.fromkeys(texts))
        answers = [answer.strip() for answer in translate(once)]
        answers = [answer if WORD.search(TAG.sub("", answer)) else "" for answer in answers]
        found = dict(zip(once, answers, strict=True))
        return [found[text] for text in texts]

    return checked


def behind_others(sources, context):
    """Each source, with as many before it as `context` says."""
    if not context:
        return sources
    shown = [TAG.sub("", source) for source in sources]
    return [Text(source, "\n".join(shown[max(0, at - context) : at])) for at, source in enumerate(sources)]


def translate_segments(segments, translate, kept=None, context=0):
    """The raw text of each segment, translated, by its id(). `translate` answers "" for a text that it cannot do:
    the source stays there. kept(segment, why): called for each segment that is, at least in part, as it was. context:
    so many sources that stand before it come with each one, as `before` of a Text."""
    segments, translate = [segment for segment in segments if segment.source()], sensible(translate)
    sources = behind_others([segment.source() for segment in segments], context)
    texts = translate(sources) if segments else []
    done = {id(segment): segment.accept(text) if text else None for segment, text in zip(segments, texts, strict=True)}
    broken = [segment for segment in segments if done[id(segment)] is None]
    pieces = [piece for segment in broken for piece in segment.pieces() if piece]
    translated = iter(translate(pieces) if pieces else [])
    for segment in broken:
        answers = [next(translated) if piece else "" for piece in segment.pieces()]
        done[id(segment)] = segment.accept_pieces(answers) if any(answers) else segment.original()
        if kept and not all(answer for answer, piece in zip(answers, segment.pieces()) if piece):
            kept(segment, "could not be translated")
        elif kept and done[id(segment)] == segment.original() and answers != segment.pieces():
            kept(segment, "its translation would have changed the structure of the document")
    return done


def joined(parts, done):
    return "".join(part if isinstance(part, str) else done.get(id(part)) or part.original() for part in parts)


def translate_parts(parts, translate, kept=None, context=0):
    """The document of `parts`, translated; `translate`, `kept` and `context` as above."""
    segments = [part for part in parts if isinstance(part, Segment)]
    marks = [mark for segment in segments for mark in segment.marks() if mark.parts]
    inner = [part for mark in marks for part in mark.parts if isinstance(part, Segment)]
    inside = translate_segments(inner, translate, kept)
    for mark in marks:
        mark.raw = joined(mark.parts, inside)
    return joined(parts, translate_segments(segments, translate, kept, context))
