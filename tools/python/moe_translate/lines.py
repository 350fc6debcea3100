"""Texts of several lines in files of strings: as many line breaks come out as went in. A sentence that was wrapped is
translated whole, and its words are dealt out to the lines again."""

import re

from .segments import Segment

WORDS = re.compile(r"(?:<[^<>]*>|%\([^()]*\)|\$?\{[^{}]*\}|\S)+")
END = re.compile(r"[.!?:;。！？؟]['\"”’»)\]]*$")


class Line(Segment):
    """A line, or several that are one sentence; `newline`: how the document writes a line break."""

    def __init__(self, lines, escape=str, newline="\n"):
        self.rows, self.newline = lines, newline
        super().__init__([" ".join([lines[0].rstrip(), *(line.strip() for line in lines[1:])])], escape)

    def _whole(self, raw):
        text = super()._whole(raw)
        if len(self.rows) == 1:
            return text
        indent = text[: len(text) - len(text.lstrip())]
        words = [match[0] for match in WORDS.finditer(text)]
        total, out, at = sum(map(len, self.rows)), [], 0
        size, done, passed = sum(map(len, words)) + len(words), 0, 0
        for row, line in enumerate(self.rows):
            done += len(line)
            begin = at
            while at < len(words) and (row == len(self.rows) - 1 or passed + len(words[at]) / 2 < size * done / total):
                passed += len(words[at]) + 1
                at += 1
            space = indent if not row else line[: len(line) - len(line.lstrip())]
            out.append(space + " ".join(words[begin:at]))
        return self.newline.join(out)


def goes_on(line, following):
    return (
        len(line) > 40
        and bool(following.strip())
        and following.lstrip()[0].islower()
        and not END.search(line.rstrip())
        and len(following) - len(following.lstrip()) == len(line) - len(line.lstrip())
    )


def text_parts(text, make=Line, newline="\n", **options):
    """A text as its line breaks and Segments, which make(lines, newline=...) makes."""
    lines, found, at = text.split("\n"), [], 0
    while at < len(lines):
        end = at + 1
        while end < len(lines) and goes_on(lines[end - 1], lines[end]):
            end += 1
        found += [newline] if at else []
        found.append(make(lines[at:end], newline=newline, **options))
        at = end
    return found
