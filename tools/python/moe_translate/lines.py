"""Multi-line texts in string files. A sentence that spans lines is translated as a whole, and its words are
distributed over the same number of lines. An accelerator key (&File, _Open) moves to the same letter of the
translation, or to the first letter."""

import re

from .conversions import KEY, same_conversions
from .segments import Segment

WORDS = re.compile(r"(?:<[^<>]*>|%\([^()]*\)|\$?\{[^{}]*\}|\S)+")
SHORTCUT = re.compile(r"(?:(?:Ctrl|Alt|Shift|Meta|Cmd|Command|Option|Super|Win)\s?[+-]\s?)+\S+|F\d{1,2}")
END = re.compile(r"[.!?:;。！？؟]['\"”’»)\]]*$")


class Line(Segment):
    """A line, or several lines that form a sentence. newline: how the document writes a line break; keys: & or _ may
    mark an accelerator; checked: reject translations whose placeholders (%s, {name}) differ from those of the line;
    raw: the original text, used if the line is not translated."""

    def __init__(self, lines, escape=str, newline="\n", keys=False, checked=False, raw=None):
        self.rows, self.newline, self.key, self.raw = lines, newline, None, raw
        if keys and len(lines) == 1 and len(lines[0]) < 60 and lines[0].count("&") + lines[0].count("_") == 1:
            self.key = KEY.search(lines[0])
        if self.key:
            lines = [lines[0][: self.key.start(1)] + lines[0][self.key.end(1) :]]
        text = " ".join([lines[0].rstrip(), *map(str.strip, lines[1:])]) if len(lines) > 1 else lines[0]
        super().__init__([text], escape, same_conversions(escape(text)) if checked else None)

    def source(self):
        """Return the text with its spaces, or "" for keys, which programs show beside a text: Open\\tCtrl+O."""
        text = "" if SHORTCUT.fullmatch(self.rows[0].strip()) else super().source()
        return self.items[0] if text and len(self.items) == 1 and isinstance(self.items[0], str) else text

    def original(self):
        return super().original() if self.raw is None else self.raw

    def _whole(self, raw):
        text = super()._whole(raw)
        if self.key:
            return self._signed(text)
        if len(self.rows) == 1:
            return text
        indent = text[: len(text) - len(text.lstrip())]
        words = [match[0] for match in WORDS.finditer(text)]
        total, out, at = sum(map(len, self.rows)), [], 0
        size, done, passed = sum(map(len, words)) + len(words), 0, 0
        for row, line in enumerate(self.rows):
            done += len(line)
            begin = at
            left = max(0, min(len(self.rows) - row, len(words) - row) - 1)  # words to reserve for later lines
            while len(words) - at > left and (
                not left or at == begin or passed + len(words[at]) / 2 < size * done / total
            ):
                passed += len(words[at]) + 1
                at += 1
            space = indent if not row else line[: len(line) - len(line.lstrip())]
            out.append(space + " ".join(words[begin:at]))
        return self.newline.join(out)

    def _signed(self, text):
        """Insert the accelerator mark before the source's accelerator letter, or else before the first letter."""
        letters = [match.start() for match in re.finditer(r"(?<![\\%&])[^\W\d_]", text)]
        same = [at for at in letters if text[at].lower() == self.key[2].lower()]
        at = (same or letters or [len(text)])[0]
        return text[:at] + self.escape(self.key[1]) + text[at:]


def continues(line, following):
    return (
        len(line) > 40
        and bool(following.strip())
        and following.lstrip()[0].islower()
        and not END.search(line.rstrip())
        and len(following) - len(following.lstrip()) == len(line) - len(line.lstrip())
    )


def raw_lines(raw, newline, plain=False):
    """Split at line breaks written as `newline`, e.g. \\n, but not in \\\\n (an escaped backslash before an n). If
    `plain`, also split at unescaped line breaks. Return the lines and the line breaks."""
    lines, breaks = [[]], []
    for token in re.findall(r"\\.|[^\\\n]+|\\|\n", raw, re.S) if newline == "\\n" else re.split("(\n)", raw):
        if token == newline or plain and token == "\n":
            lines.append([])
            breaks.append(token)
        else:
            lines[-1].append(token)
    return ["".join(line) for line in lines], breaks


def text_parts(text, make=Line, newline="\n", raw=None, **options):
    """Return a text's line breaks and Segments; make(lines, newline=...) creates one. raw: the text as written
    in the document."""
    lines, found, at = text.split("\n"), [], 0
    raws, breaks = [], []
    for plain in (False, True) if raw is not None else ():
        if len(raws) != len(lines):
            raws, breaks = raw_lines(raw, newline, plain)
    while at < len(lines):
        end = at + 1
        while end < len(lines) and continues(lines[end - 1], lines[end]):
            end += 1
        found += [breaks[at - 1] if len(raws) == len(lines) else newline] if at else []
        raw = newline.join(raws[at:end]) if len(raws) == len(lines) else None
        columns = re.split("(\t+)", lines[at]) if "\t" in lines[at].strip() and end == at + 1 else []
        raw_columns = re.split(r"((?:\\t|\t)+)", raw or "")
        for number, column in enumerate(columns):  # a tab separates texts
            kept = {"raw": raw_columns[number]} if len(raw_columns) == len(columns) else {}
            found.append(make([column], newline=newline, **kept, **options))
        if not columns:
            found.append(make(lines[at:end], newline=newline, **({} if raw is None else {"raw": raw}), **options))
        at = end
    return found
