"""Split the texts and marks inside a block of a document into segments.

A link that is not next to words is a separate segment, because rows of links and tables of contents are not sentences.
An exponent or index forms one word with its base.
"""

import re

from .segments import RAISED, WORD, Mark, Segment, collapsed, has_word, letters, loose, merge, partners

MOST_MARKS = 64  # maximum number of marks per segment
SYMBOL = re.compile(r"(?:[-+\u2212]?\d[\d.,]*|[^\W\d_]{1,2}|[)\]])$")  # base of an exponent or index
# Characters of words, in scripts with spaces between words
IN_WORD = re.compile(r"(?:(?![\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff])[\w'\u2019\u00ad-])*")
ORDINAL = re.compile(r"(?:st|nd|rd|th|er|re|[eè]re|[eè]me|nde|ste)\s*", re.I)  # suffixes raised after a number
MORE_SYMBOL = re.compile(r"(?:[^\W\d_]{1,2}|\d+)(?![^\W_])")


def formulas(items, escape):
    """Replace each exponent or index, its base and the following symbol with a word; each note with a single mark."""
    other, found, at = partners(items), [], 0
    written = {}  # formula: parts of its text, joined at the end, so that long formulas take linear time
    while at < len(items):
        item, end = items[at], other.get(at, -1)
        before, inside = found[-1] if found else "", items[at + 1 : end] if end == at + 2 else []
        if not inside or item.kind != "open" or item.name not in RAISED or not is_raised(inside[0], before, written):
            found.append(item)
            at += 1
            continue
        raw, start = item.raw + escape(inside[0]) + items[end].raw, 0
        if isinstance(before, str):
            near = max(0, len(before) - 40)
            run = SYMBOL.search(before[near:])
            start = near + run.start() if run else 0
            if not run or (start and before[start - 1].isalnum()):  # a note after a word
                note = not WORD.search(inside[0])
                found.append(Mark(raw) if note else item)
                at = end + 1 if note else at + 1
                continue
            found[-1:] = [before[:start], Mark("", "word")]
            written[found[-1]] = [escape(before[start:])]
        parts, after = written[found[-1]], items[end + 1] if end + 1 < len(items) else ""
        parts.append(raw)
        more = MORE_SYMBOL.match(after) if isinstance(after, str) else None
        if more:
            parts.append(escape(more[0]))
            items[end + 1] = after[more.end() :]
            end += not items[end + 1]
        at = end + 1
    for mark, parts in written.items():
        mark.raw = "".join(parts)
    return merge(found)


def plain_ordinals(items):
    """Remove the marks of raised suffixes ("1st"), which other languages lack, and merge the texts."""
    items = merge(items)
    for at in range(1, len(items) - 2):
        before, mark, text, close = items[at - 1 : at + 3]
        raised = isinstance(mark, Mark) and (mark.kind, mark.name) == ("open", "sup") and isinstance(text, str)
        number = isinstance(before, str) and before[-1:].isdigit()
        if raised and number and ORDINAL.fullmatch(text) and close.kind == "close":
            items[at] = items[at + 2] = ""
    return merge(items)


def is_raised(text, before, written):
    """Return whether an exponent, index or note is next to its base."""
    if not isinstance(text, str) or not has_word(text) or re.search(r"\s", text):
        return False
    return before in written if isinstance(before, Mark) else bool(before) and before[-1].isalnum()


def deletions_before_words(items, kind, text, part):
    """Move deletions inside a word before the word. kind(item): "text", "deletion", "open" or "close"; all others are
    objects between words. text(item): the text; part(item, text): an item with a part of the text."""
    kinds = [kind(item) for item in items]
    if "deletion" not in kinds:
        return items
    markup = ("deletion", "open", "close")
    texts = [text(item) if kind == "text" else " " * (kind not in markup) for item, kind in zip(items, kinds)]
    before, after = set(), set()
    for found, numbers, step in ((before, range(len(items)), -1), (after, range(len(items) - 1, -1, -1), 1)):
        near = False
        for at in numbers:
            near = bool(IN_WORD.match(texts[at][::step])[0]) if texts[at] else near
            found |= {at} if near and kinds[at] == "deletion" else set()
    found, word, start, moved = [], [], 0, []  # the last word begins at `start` of the first item of `word`

    def end_word():
        whole, place = [items[at] for at in word], int(start > 0)
        if not moved:
            return whole
        first = texts[word[0]]
        if 0 < start < len(first):
            return [part(whole[0], first[:start]), *moved, part(whole[0], first[start:]), *whole[1:]]
        end = next(at for at in range(place, len(word)) if texts[word[at]])
        while end > place and kinds[word[end - 1]] == "open":
            end -= 1
        return [*whole[:end], *moved, *whole[end:]]

    for at, item in enumerate(items):
        if at in before and at in after:
            moved.append(item)
            continue
        tail = len(IN_WORD.match(texts[at][::-1])[0])
        if tail < len(texts[at]):
            found += end_word()
            word, start, moved = [], len(texts[at]) - tail, []
        word.append(at)
    return found + end_word()


def outside(item, escape):
    """Return the parts of an item outside all segments."""
    if isinstance(item, Mark):
        return item.parts or [item.raw]
    return [escape(item)]


def cut(items, escape=str, check=None):
    """Return the parts of a document, strings and Segments, made from `items`."""
    items = formulas(collapsed(merge(items), escape), escape)
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
        if alone and (not spoken or items[at].link):
            found += [(begin, at, True)] if begin < at else []
            found.append((at, end, False))
            begin = end
    return found + ([(begin, last, True)] if begin < last else [])


def sentence(items, escape, check):
    """Return the parts of a sentence: one segment, or a segment per text if there are too many marks."""
    if not any(isinstance(item, str) and WORD.search(item) for item in items):
        return [part for item in items for part in outside(item, escape)]
    if sum(isinstance(item, Mark) for item in items) <= MOST_MARKS:
        return [Segment(items, escape, check)]
    return [
        part
        for item in items
        for part in (outside(item, escape) if isinstance(item, Mark) else [Segment([item], escape, check)])
    ]
