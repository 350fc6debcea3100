"""The translatable text of a document, with the markup inside it.

A document is a list of Segments and of strings, which are copied. A Segment's items are texts and Marks. A translator
sees the texts with numbered tags for the marks ("Click <x1>Save</x1>.") and places the tags in its translation. If tags
are lost or wrongly nested, the texts between the marks are translated separately, so that the document keeps its
structure.
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
    """Markup inside a sentence. kind: "open" and "close" for pairs, else "single". parts: the strings and Segments that
    form `raw` if the markup contains translatable text."""

    raw: str
    kind: str = "single"
    parts: list = field(default_factory=list)


@dataclass
class Segment:
    """A translatable text. Items hold decoded text; `escape` encodes text as in the document."""

    items: list
    escape: object = str
    check: object = None  # check(raw text of a translation) returns False if it is invalid
    _before: list = field(default_factory=list, repr=False)
    _after: list = field(default_factory=list, repr=False)

    def __post_init__(self):
        items = merge(self.items)
        other, first, last = partners(items), 0, len(items)
        # Exclude markup and white space around the whole text.
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
        """Return the text for the translator; "" if it has no words."""
        if not any(isinstance(item, str) and WORD.search(item) for item in self.items):
            return ""
        names = self._names()
        return "".join(
            SPACE.sub(" ", item) if isinstance(item, str) else names[at] for at, item in enumerate(self.items)
        )

    def accept(self, translation):
        """Return the raw text of a translation, or None unless it has the source's tags, well nested."""
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
        """Return the texts between the marks, for separate translation."""
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
        """Return the raw text to write if the translation equals the source."""
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
        """Return {item number: tag} for the marks."""
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
    """An empty string among a document's parts, with the source line of the next part."""

    def __new__(cls, line):
        place = super().__new__(cls)
        place.line = line
        return place


def loose(item):
    """Return whether an item at an end of a segment belongs outside the segment."""
    return item.kind == "single" if isinstance(item, Mark) else not item.strip()


def merge(items):
    """Join adjacent texts; drop empty texts."""
    merged = []
    for texts, group in itertools.groupby((x for x in items if x != ""), lambda item: isinstance(item, str)):
        group = list(group)
        merged += ["".join(group)] if texts and len(group) > 1 else group
    return merged


def partners(items):
    """Return {item number: partner's number} for paired marks. Marks without a partner become single."""
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
    """Wrap `translate`: translate equal texts once, strip translations (outer space belongs to the document), and
    replace translations without words, such as " - ", with ""."""

    def checked(texts):
        once = list(dict.fromkeys(texts))
        answers = [answer.strip() for answer in translate(once)]
        answers = [answer if WORD.search(TAG.sub("", answer)) else "" for answer in answers]
        found = dict(zip(once, answers, strict=True))
        return [found[text] for text in texts]

    return checked


def with_context(sources, context):
    """Attach the `context` preceding sources to each source."""
    if not context:
        return sources
    shown = [TAG.sub("", source) for source in sources]
    return [Text(source, "\n".join(shown[max(0, at - context) : at])) for at, source in enumerate(sources)]


def translate_segments(segments, translate, kept=None, context=0):
    """Return {id(segment): translated raw text}. `translate` returns "" for texts that it cannot translate, for which
    the source is used. kept(segment, why) is called for each segment left at least partly untranslated. context: number
    of preceding sources to pass with each source, as `before` of a Text."""
    segments, translate = [segment for segment in segments if segment.source()], sensible(translate)
    sources = with_context([segment.source() for segment in segments], context)
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
            kept(segment, "left untranslated: the translation would change the structure of the document")
    return done


def joined(parts, done):
    return "".join(part if isinstance(part, str) else done.get(id(part)) or part.original() for part in parts)


def translate_parts(parts, translate, kept=None, context=0):
    """Translate the document with these parts and return it; other parameters as in translate_segments()."""
    return translate_all([parts], translate, kept, context)[0]


def translate_all(documents, translate, kept=None, context=0):
    """Translate several documents, given as lists of parts, with one call of `translate`."""
    segments = [part for parts in documents for part in parts if isinstance(part, Segment)]
    marks = [mark for segment in segments for mark in segment.marks() if mark.parts]
    inner = [part for mark in marks for part in mark.parts if isinstance(part, Segment)]
    inside = translate_segments(inner, translate, kept)
    for mark in marks:
        mark.raw = joined(mark.parts, inside)
    done = translate_segments(segments, translate, kept, context)
    return [joined(parts, done) for parts in documents]
