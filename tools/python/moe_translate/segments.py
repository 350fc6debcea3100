"""The translatable text of a document, with the markup inside it.

A document is a list of Segments and of strings, which are copied. A Segment's items are texts and Marks. Formats only
say what their codes are: pairs (two elements, or begin and end codes), single codes, and codes that stand for words. A
translator sees numbered tags and placeholders for them ("Click <x1>Save</x1> or {2}.") and places these in its
translation. A translation that changes the structure is rejected: the texts between the marks are then translated
separately.
"""

import itertools
import re
import sys
from dataclasses import dataclass, field

from .text import Text, paired

TAG = re.compile(r"<(?:/?x\d+|x\d+/)>|\{\d+\}")  # a mark, as translators see it
SPACE = re.compile(r"(\{[{%#][^{}\n]*[}%#]\})|[ \t\r\n\f]+")  # spaces in template braces are significant
WORD = re.compile(r"[^\W\d_]")
LETTER = re.compile(r"[\W\d_]*[a-zA-Z][\W\d_]*")  # a single letter, which names a row, an option or a key
# a name or address that makes up a whole element, such as a link
NAME = re.compile(r"(?:https?://|www\.)\S+|[@#][^\s@#]*[^\W_]\S*|[^\s@]+@[^\s@]+\.[^\s@]+")
RAISED = ("sup", "sub")
INITIALS = 2  # maximum letters of a drop cap or initial
NEAR = 16  # maximum number of items of an element that becomes a single mark


@dataclass(eq=False)
class Mark:
    """Markup inside a sentence. kind: "open" and "close" for pairs, "word" for markup that stands for words (a field, a
    formula), else "single". partners() makes "begin" and "end" of the codes of pairs that overlap other pairs or are
    incomplete. parts: the strings and Segments that form `raw` if the markup contains translatable text. code: what the
    codes of a pair have in common if pairs may overlap. name: name of the element. link: a link, which may be a segment
    by itself. initial: number of letters of the word before a closing mark that belong to its pair."""

    raw: str
    kind: str = "single"
    parts: list = field(default_factory=list)
    code: object = None
    name: str = ""
    link: bool = False
    initial: int = 0
    twin: object = None  # the other mark of a pair


@dataclass(eq=False, **({"slots": True} if sys.version_info >= (3, 10) else {}))
class Segment:
    """A translatable text. Items hold decoded text; `escape` encodes text as the document does."""

    items: list
    escape: object = str
    check: object = None  # check(raw text of a translation) returns False if it is invalid
    _before: list = field(default_factory=list, repr=False)
    _after: list = field(default_factory=list, repr=False)
    _raw: object = field(default=None, init=False, repr=False)  # the original if marks inside words were moved
    place: object = field(default=None, init=False)  # where the text is in the document, for reports

    def __post_init__(self):
        items = collapsed(merge(self.items), self.escape)
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
        raw = self._written(items)
        self._raw = raw if whole_words(items) else None
        self.items = merge(items) if self._raw is not None else items

    def source(self):
        """Return the text for the translator; "" if it has no words."""
        words = " ".join(item for item in self.items if isinstance(item, str))
        if not WORD.search(words) or LETTER.fullmatch(words):
            return ""
        names = self._names()
        return "".join(spaced(item) if isinstance(item, str) else names[at] for at, item in enumerate(self.items))

    def accept(self, translation):
        """Return the raw text of a translation, or None unless it keeps the marks and their structure."""
        if translation == self.source():
            return self.unchanged()
        names = {name: self.items[at] for at, name in self._names().items()}
        placed, end = [], 0
        for seen in TAG.finditer(translation):
            mark = names.pop(seen[0], None)
            if mark is not None:
                placed += [translation[end : seen.start()], mark]
                end = seen.end()
            elif seen[0][0] != "{":  # braces may belong to the text
                return None
        placed.append(translation[end:])
        if names or structure(placed) != structure(self.items):
            return None
        return self._checked(self._written(placed), None)

    def marks(self):
        return [item for item in (*self._before, *self.items, *self._after) if isinstance(item, Mark)]

    def pieces(self):
        """Return the texts between the marks, for separate translation."""
        return [
            spaced(item).strip() if isinstance(item, str) and WORD.search(item) else "" for item in self.items
        ]

    def accept_pieces(self, translations):
        out = []
        for item, translation in paired(self.items, translations):
            if not translation:
                out.append(item)
            else:
                left, right = item[: len(item) - len(item.lstrip())], item[len(item.rstrip()) :]
                out += [left, translation, right]
        return self._checked(self._written(out), self.original())

    def unchanged(self):
        """Return the raw text to write if the translation equals the source."""
        return self.original()

    def original(self):
        return self._whole(self._written(self.items) if self._raw is None else self._raw)

    def _written(self, items):
        out = []
        for before, item in zip([None, *items], items):
            out.append(item.raw if isinstance(item, Mark) else self.escape(item))
            if isinstance(item, Mark) and item.initial and isinstance(before, str):
                end = initial_end(out[-2], item.initial)
                out[-2:] = [out[-2][:end], item.raw, out[-2][end:]]
        return "".join(out)

    def _checked(self, raw, otherwise):
        whole = self._whole(raw)
        return whole if self.check is None or self.check(whole) else otherwise

    def _whole(self, raw):
        return self._written(self._before) + raw + self._written(self._after)

    def _names(self):
        """Return {item number: tag or placeholder} for the marks."""
        taken = {name for item in self.items if isinstance(item, str) for name in re.findall(r"\{\d+\}", item)}
        names, numbers, number = {}, {}, 0
        for at, item in enumerate(self.items):
            if not isinstance(item, Mark):
                continue
            if item.kind == "close":
                names[at] = f"</x{numbers[item.twin]}>"
                continue
            number += 1
            while f"{{{number}}}" in taken:
                number += 1
            numbers[item] = number
            names[at] = {"open": f"<x{number}>", "word": f"{{{number}}}"}.get(item.kind, f"<x{number}/>")
        return names


class Place(str):
    """An empty string among a document's parts, with the source line of the next part."""

    def __new__(cls, line):
        place = super().__new__(cls)
        place.line = line
        return place


def spaced(text):
    """Replace white space with single spaces, except in template braces."""
    return SPACE.sub(lambda match: match[1] or " ", text)


def loose(item):
    """Return whether an item at an end of a segment belongs outside the segment."""
    return item.kind in ("single", "begin", "end") if isinstance(item, Mark) else not item.strip()


def merge(items):
    """Join adjacent texts; drop empty texts."""
    merged = []
    for texts, group in itertools.groupby((x for x in items if x != ""), lambda item: isinstance(item, str)):
        group = list(group)
        merged += ["".join(group)] if texts and len(group) > 1 else group
    return merged


def partners(items):
    """Return {item number: partner's number} for the pairs that nest. Codes of other pairs become "begin" and "end".
    A closing code belongs to the last opening code with the same Mark.code."""
    opened, found, stack = {}, {}, []
    for at, item in enumerate(items):
        if isinstance(item, Mark) and item.kind == "open":
            opened.setdefault(item.code, []).append(at)
        elif isinstance(item, Mark) and item.kind == "close" and opened.get(item.code):
            begin = opened[item.code].pop()
            found[begin], found[at] = at, begin
            item.twin, items[begin].twin = items[begin], item
    for at in list(sorted(found)):
        begin = found.get(at, at)
        if begin >= at:
            stack += [at] if begin > at else []
            continue
        above = stack[stack.index(begin) + 1 :] if stack[-1] != begin else []
        if items[begin].code is not None and any(items[other].code is None for other in above):
            above = [begin]  # keep pairs that cannot overlap in the document
            stack.remove(begin)
        else:
            del stack[len(stack) - len(above) - 1 :]
        for other in above:
            del found[found.pop(other)]
    for at, item in enumerate(items):
        if isinstance(item, Mark) and item.kind in ("open", "close") and at not in found:
            item.kind = "begin" if item.kind == "open" else "end"
    return found


def collapsed(items, escape):
    """Replace elements without words by single marks, and names and addresses with their elements by words."""
    other, found, at = partners(items), [], 0
    while at < len(items):
        end = other.get(at, at)
        inside = items[at + 1 : end]
        if 0 < end - at <= NEAR and not any(isinstance(x, Mark) and x.parts for x in items[at : end + 1]):
            text = "".join(x for x in inside if isinstance(x, str))
            whole = "".join(x.raw if isinstance(x, Mark) else escape(x) for x in items[at : end + 1])
            kind = "single" if not any(map(has_word, inside)) else "word" if is_name(text) or not text.strip() else ""
            if kind and not any(isinstance(x, Mark) and x.kind in ("begin", "end") for x in inside):
                found.append(Mark(whole, kind))
                at = end + 1
                continue
        found.append(items[at])
        at += 1
    return merge(found)


def is_name(text):
    return len(text) < 1000 and bool(NAME.fullmatch(text))


def initial_end(text, letters=1):
    """Return the end of the first letters of an encoded text, after quotes and other punctuation."""
    match = re.match(rf"(?:&[\w#]+;|[^\w&])*\w{{,{letters}}}", text)
    return match.end()


def cased(text):
    """Return the number of letters at the beginning of a text in scripts with capitals, which use spaces."""
    return next((at for at, letter in enumerate(text) if letter.lower() == letter.upper()), len(text))


def whole_words(items):
    """Move the ends of pairs inside a word to an end of the word, so that translators see whole words. A closing mark
    after the first letters of a word (a drop cap, a bold initial) returns there in the translation. Return whether
    marks were moved."""
    moved = False
    for at in range(1, len(items) - 1):
        left, mark, right = items[at - 1 : at + 2]
        if not isinstance(mark, Mark) or not isinstance(left, str) or not isinstance(right, str):
            continue
        if not mark.twin or mark.code is not None or {mark.name, mark.twin.name} & set(RAISED):
            continue
        begin, end = len(left) - cased(left[::-1]), cased(right)
        if begin == len(left) or not end or is_name(left):
            continue
        closes, word = mark.kind == "close", len(left) - begin
        whole = not any(map(str.isalnum, left[:begin])) if closes else end == len(right)
        inner, outer = (word, end) if closes else (end, word)
        if closes and whole and word <= INITIALS and items[at - 2] is mark.twin:
            mark.initial = word
        if (inner >= outer or whole) == closes:
            items[at - 1 : at + 2] = left + right[:end], mark, right[end:]
        else:
            items[at - 1 : at + 2] = left[:begin], mark, left[begin:] + right
        moved = True
    return moved


# ---- Structure ---------------------------------------------------------


def letters(item):
    return item.kind == "word" if isinstance(item, Mark) else bool(WORD.search(item))


def has_word(item):
    return item.kind == "word" if isinstance(item, Mark) else any(map(str.isalnum, item))


def counted(sums, item):
    """Count a text (with letters, with letters or digits), since "09" cannot replace "released"."""
    return sums if isinstance(item, Mark) else (sums[0] + letters(item), sums[1] + has_word(item))


def more(before, after):
    return after[0] > before[0], after[1] > before[1]


def structure(items):
    """Return what a translation must keep of each mark, or None if pairs do not nest: the pair around a pair or word;
    whether there are words inside a pair, after an incomplete "begin" and before an incomplete "end"."""
    found, words, around, before = {}, (0, 0), [], {}
    for item in items:
        if isinstance(item, Mark):
            before[item] = words
        if isinstance(item, Mark) and item.kind == "close":
            if not around or around.pop() is not item.twin:
                return None
            found[item] = more(before[item.twin], words)
        elif isinstance(item, Mark) and item.kind in ("open", "word"):
            found[item] = around[-1] if around else None
            around += [item] if item.kind == "open" else []
        words = counted(words, item)
    places = {mark: at for at, mark in enumerate(before)}
    for mark in before:
        twin = mark.twin if mark.twin in before else None
        if mark.kind == "begin":
            found[mark] = more(before[mark], before[twin] if twin else words), not twin or places[mark] < places[twin]
        elif mark.kind == "end" and not twin:
            found[mark] = more((0, 0), before[mark])
    return None if around else found


# ---- Translating -------------------------------------------------------


def untranslated(text, note):
    """Return whether a text must be translated in pieces because the engine could not place its marks."""
    return "left untranslated" in note and bool(TAG.search(text))


def sensible(translate):
    """Wrap `translate`: translate equal texts once, strip translations (outer space belongs to the document), and
    replace translations without words, such as " - ", with ""."""

    def checked(texts):
        once = list(dict.fromkeys(texts))
        answers = [answer.strip() for answer in translate(once)]
        answers = [answer if WORD.search(TAG.sub("", answer)) else "" for answer in answers]
        found = dict(paired(once, answers))
        return [found[text] for text in texts]

    return checked


def first_shown(earlier, context):
    """Return the index of the first earlier source to show, like text_prompt_first in tools/text/prompt.h."""
    step = context // 2 + 1
    return -(-max(0, earlier - context) // step) * step


def with_context(sources, context):
    """Attach up to `context` preceding sources to each source."""
    if not context:
        return sources
    shown = [TAG.sub("", source) for source in sources]
    return [Text(source, "\n".join(shown[first_shown(at, context) : at])) for at, source in enumerate(sources)]


def translate_segments(segments, translate, kept=None, context=0):
    """Return {id(segment): translated raw text}. `translate` returns "" for texts that it cannot translate, for which
    the source is used. kept(segment, why) is called for each segment left at least partly untranslated. context: maximum
    number of preceding sources to pass with each source, as the `before` of a Text."""
    segments, translate = [segment for segment in segments if segment.source()], sensible(translate)
    sources = with_context([segment.source() for segment in segments], context)
    texts = translate(sources) if segments else []
    done = {id(segment): segment.accept(text) if text else None for segment, text in paired(segments, texts)}
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
    """Translate several documents, given as lists of parts, with one call to `translate`."""
    segments = [part for parts in documents for part in parts if isinstance(part, Segment)]
    marks = [mark for segment in segments for mark in segment.marks() if mark.parts]
    inner = [part for mark in marks for part in mark.parts if isinstance(part, Segment)]
    inside = translate_segments(inner, translate, kept)
    for mark in marks:
        mark.raw = joined(mark.parts, inside)
    done = translate_segments(segments, translate, kept, context)
    return [joined(parts, done) for parts in documents]
