"""SubRip and WebVTT: a sentence that runs over several cues is translated whole, and its words are dealt out to the
cues again. Numbers, times, settings, styles and notes stay."""

import re

from .segments import Mark, Segment

TIMING = re.compile(r"^\s*(?:\d+:)?\d{1,2}:\d{2}[.,]\d{1,3}\s*-->\s*(?:\d+:)?\d{1,2}:\d{2}[.,]\d{1,3}.*$")
MARKUP = re.compile(r"<(/?)([a-zA-Z][\w.]*)[^<>]*>|\{\\[^{}]*\}")
END = re.compile(r"[.!?…:;]['\"”’»)\]]*$|[♪♫]\s*$")
SPEAKER = re.compile(r"^\s*(?:[-–—]|[A-ZÀ-Þ][A-ZÀ-Þ .]+:|\[|\(|♪)")


TURN = re.compile(r"^\s*[-–—]")


class Cue:
    """What one speaks in a cue."""

    def __init__(self, lines):
        self.lines = lines
        self.text = " ".join(line.strip() for line in lines)

    def wrapped(self, words):
        """Words on as many lines as before, about equally long."""
        rows = min(len(self.lines), len(words)) or 1
        total, out, at = sum(map(len, words)) + len(words), [], 0
        for row in range(rows):
            line, room = [], total / rows
            while (
                at < len(words)
                and (not line or len(" ".join(line)) + len(words[at]) / 2 < room)
                and len(words) - at > rows - row - 1
            ):
                line.append(words[at])
                at += 1
            out.append(" ".join(line))
        out[-1] = " ".join([out[-1], *words[at:]])
        return "\n".join(out)


class Run(Segment):
    """A sentence over one cue or more: what stands between its cues in the file comes between its words again."""

    def __init__(self, cues, between):
        self.cues, self.between = cues, between
        items = []
        for cue in cues:
            if items:
                items.append(" ")
            items += cue_items(cue.text)
        super().__init__(items)

    def _whole(self, raw):
        text = super()._whole(raw)
        if len(self.cues) == 1 and len(self.cues[0].lines) == 1:
            return text
        shares = [max(1, len(cue.text)) for cue in self.cues]
        words, out, at, passed = split_words(text), [], 0, 0
        total = max(1, sum(len(word) + 1 for word in words))
        for number, cue in enumerate(self.cues):
            goal = total * sum(shares[: number + 1]) / sum(shares)
            left = len(self.cues) - number - 1
            mine = []
            while (
                at < len(words)
                and (not left or not mine or passed + len(words[at]) / 2 < goal)
                and len(words) - at > left
            ):
                mine.append(words[at])
                passed += len(words[at]) + 1
                at += 1
            out.append(cue.wrapped(mine))
            if left:
                out.append(self.between[number])
        return "".join(out)

    def original(self):
        text = ["\n".join(cue.lines) for cue in self.cues]
        return "".join(a + b for a, b in zip(text, [*self.between, ""]))


def split_words(text):
    """At spaces, but not inside a tag."""
    return re.findall(r"(?:<[^<>]*>|\{\\[^{}]*\}|[^\s<{]+|[<{])+", text)


def cue_items(text):
    items, end = [], 0
    for match in MARKUP.finditer(text):
        kind = "single" if match[2] is None else "close" if match[1] else "open"
        items += [text[end : match.start()], Mark(match[0], kind)]
        end = match.end()
    return [*items, text[end:]]


def runs(cues):
    """Cue numbers that belong to one sentence, at most four."""
    group = []
    for at, (cue, _) in enumerate(cues):
        plain = MARKUP.sub("", cue.text).strip()
        if group and (SPEAKER.match(plain) or len(group) == 4):
            yield group
            group = []
        group.append(at)
        if END.search(plain) or not plain:
            yield group
            group = []
    if group:
        yield group


def turns(lines):
    """The lines of a cue, cut where another one speaks."""
    found = []
    for line in lines:
        if not found or TURN.match(MARKUP.sub("", line)):
            found.append([])
        found[-1].append(line)
    return found


def parts(data):
    """What is no cue's text, and one Run a sentence."""
    newline = "\r\n" if "\r\n" in data else "\n"
    lines = data.replace("\r\n", "\n").split("\n")
    cues, before, at = [], [], 0  # (cue, what stands before it)
    while at < len(lines):
        before.append(lines[at])
        if TIMING.match(lines[at]):
            begin = at + 1
            end = begin
            while end < len(lines) and lines[end].strip():
                end += 1
            stood = "\n".join(before) + "\n"
            for turn in turns(lines[begin:end]):
                cues.append((Cue(turn), stood))
                stood = "\n"
            if end > begin:
                before, at = [""], end - 1
        at += 1
    found = []
    for group in runs(cues):
        found += [cues[group[0]][1], Run([cues[i][0] for i in group], [cues[i][1] for i in group[1:]])]
    return found + ["\n".join(before)], newline
