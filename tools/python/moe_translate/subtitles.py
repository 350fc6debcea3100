"""SubRip, WebVTT, SubViewer (.sbv) and SubStation (.ass). A sentence that spans several cues is translated as a whole,
and its words are distributed over the cues, or over the times inside a line. Numbers, times, settings, styles, notes
and line ends do not change, nor do speaker marks: dashes, names, voices, positions, music signs and brackets around
sounds. Lines that scrolling captions repeat are translated one by one, so that the translations match."""

import re
from dataclasses import dataclass, field

from .languages import renamed
from .segments import WORD, Mark, Segment

CLOCK = r"\d[\d:.,]{3,20}"
LANGUAGE = re.compile(
    r"(\ufeff?WEBVTT[^\r\n]*(?:(?:\r\n|\r|\n)(?!Language:)[^\r\n]+)*)"
    r"(?:((?:\r\n|\r|\n)Language: *)([\w-]+)(?=[ \t]*(?:[\r\n]|\Z)))?"
)
TIMING = re.compile(rf"\s{{0,20}}({CLOCK})(?:[ \t]{{0,20}}-{{1,3}}>[ \t]{{0,20}}|,)({CLOCK})(?=\s|$)")
BLANK = re.compile(r"(?:[\s\u200b\u200e\u200f\ufeff]|&(?:nbsp|lrm|rlm);)*")
NUMBER = re.compile(r"\s*\d+\s*$")
LINES = re.compile(r"([^\r\n]*)(\r\n|\r|\n|$)")
DIALOGUE = re.compile(r"(Dialogue:\s*)([^\r\n]*)")
LINE_ENDS = re.compile(r"\r\n|\r|\n|\[br\]")
BREAKS = re.compile(r"\\[Nn](?:\s*\\[Nn])*")  # line breaks of SubStation, including empty lines

TIME = r"<\d[\d:.]*>"
ANGLES = rf"<(?:/?[a-zA-Z][^<>]{{0,200}}|/?[a-zA-Z])>|{TIME}"
# Marks that show a change of speaker, position or kind of text at the start of a line
PLACE = re.compile(r"\{\\(?:an?\d|pos|move|org|fad)[^{}]{0,500}\}|<v[ .][^<>]{0,200}>")
DASH = re.compile(r"(?:[-–—‐―]+|>>+)(?!\d)\s*")
NAME = re.compile(r"(?:\[[^\[\]]{1,40}\]|\([^()]{1,40}\)|[A-ZÀ-Þ][A-ZÀ-Þ0-9 .'’&#-]{0,30}[A-ZÀ-Þ0-9.]):(?!\S)\s*")
PROPER = re.compile(r"[A-ZÀ-Þ]\w{1,20}(?: [A-ZÀ-Þ]\w{1,20})?: ")
SONG = re.compile(r"[♪♫♬#*]+(?=\s|$|[♪♫♬])\s*")
SPACE = re.compile(r"\s*")
END = re.compile(r"[.!?…:;。！？؟]['\"”’»)\]]*$")
SHORT = re.compile(  # the sentence continues after an article, a preposition etc., even if a capital follows
    r"(?:^|\s)(?:the|an?|of|to|in|on|at|by|for|from|with|and|or|but|my|your|his|her|our|their|is|are|I|der|die|das|den"
    r"|dem|des|eine?[mnrs]?|und|oder|mit|von|zum?|zur|im|am|ist|meine?[nr]?|le|la|les|une?|du|de|et|ou|avec|el|los|las"
    r"|una|y|con|del|al)$"
)
FIXED = re.compile(r"\d+|[()\[\]]")
APART = 3.0  # maximum gap between cues of a sentence, in seconds
MOST = 4  # maximum number of cues of a sentence


class Syntax:
    """The codes of a format; braces: pattern of its codes in braces; times: pattern of times inside a line."""

    def __init__(self, braces, escapes=(), times=TIME):
        self.tag, self.escapes, self.times = rf"{ANGLES}|\{{{braces}\}}", escapes, re.compile(times)
        self.markup = re.compile(rf"(?={ANGLES})<(/?)([a-zA-Z][\w.]*)[^<>]*>|{TIME}|\{{{braces}\}}")
        self.lead = re.compile(rf"(?:{self.tag}|\s)*")
        self.song_end = re.compile(rf"(?:(?<!\s)\s+|(?<![\s♪♫♬#*]))[♪♫♬#*]+(?:{self.tag}|\s)*$")
        self.sound = re.compile(rf"(?:\([^()]*\)|\[[^\[\]]*\])(?:{self.tag})*(?=\s|$)")

    def shown(self, text):
        for sign, code in self.escapes[::-1]:
            text = text.replace(code, sign)
        return text

    def written(self, text, raw):
        """Escape a translation of `raw`, if `raw` uses escapes."""
        for sign, code in self.escapes if any(code in raw for _, code in self.escapes) else ():
            text = text.replace(sign, code)
        return text


SUBRIP = Syntax(r"\\[^{}]{0,500}")
REFERENCES = (
    ("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("\u00a0", "&nbsp;"), ("\u200e", "&lrm;"), ("\u200f", "&rlm;"),
)  # fmt: skip
WEBVTT = Syntax(r"\\[^{}]{0,500}", REFERENCES)
SCRIPT = Syntax(r"[^{}]{0,500}", (("\u00a0", "\\h"),), r"\{[^{}]*\\[kK][of]?\d")  # {a note} is a comment


@dataclass
class Unit:
    """The text of one speaker in a cue: whole lines, or part of a line."""

    before: str  # the file's content between the previous unit's text and this one's
    lines: list
    ends: list = field(default_factory=list)  # separators of the lines
    prefix: str = ""
    suffix: str = ""
    times: tuple = (0.0, 0.0)
    first: bool = True  # the first unit of the cue
    last: bool = True
    syntax: Syntax = SUBRIP
    repeated: bool = False  # a line of scrolling captions

    def __post_init__(self):
        self.text = " ".join(line.strip() for line in self.lines)

    def original(self):
        return "".join(a + b for a, b in zip(self.lines, [*self.ends, ""]))

    def framed(self):
        """Return whether the lines have codes only at their ends: <i>One</i>."""
        return all(sum(map(bool, map(str.strip, re.split(self.syntax.tag, line)))) < 2 for line in self.lines)

    def wrapped(self, words, between):
        """Distribute words over the unit's lines, making the lines about equally long."""
        rows = min(len(self.lines), len(words)) or 1
        total, out, at = sum(map(len, words)) + len(words), [], 0
        for row in range(rows):
            line, length = [], 0
            while at < len(words) and len(words) - at > rows - row - 1:
                if line and length + len(words[at]) / 2 >= total / rows:
                    break
                line.append(words[at])
                length += len(words[at]) + 1
                at += 1
            out.append(between.join(line))
        out[-1] = between.join([part for part in (out[-1], *words[at:]) if part])
        return "".join(a + b for a, b in zip(out, [*self.ends[: rows - 1], ""]))

    def at_times(self, words, between):
        """Distribute words over the texts between the unit's tags and line ends."""
        pieces = re.split(f"({self.syntax.tag}|\n)", "\n".join(self.lines))
        slots = [at for at in range(0, len(pieces), 2) if pieces[at].strip()]
        for at, mine in zip(slots, shared(words, [len(pieces[at]) for at in slots])):
            space = re.fullmatch(r"(\s*).*?(\s*)", pieces[at], re.S)
            pieces[at] = space[1] + between.join(mine) + space[2] if mine else ""
        out = "".join(pieces).split("\n")
        return "".join(a + b for a, b in zip(out, [*self.ends, ""]))


class Run(Segment):
    """A sentence that spans one or more cues. The file's content between the cues is inserted into the translation. If
    a number, bracket or code would move to another cue, the texts of the cues are translated separately."""

    def __init__(self, units):
        self.units, self.syntax = units, units[0].syntax
        text = " ".join(unit.text for unit in units)
        frames = sum(len(unit.lines) for unit in units) > 1 and all(map(Unit.framed, units))
        # Times, and codes at the ends of lines, keep their places; the words are distributed between them.
        self.timed = bool(self.syntax.times.search(text)) or frames and bool(self.syntax.markup.search(text))
        items = [self.syntax.markup.sub("", text)] if self.timed else cue_items(text, self.syntax)
        items = [self.syntax.shown(item) if isinstance(item, str) else item for item in items]
        super().__init__(items, lambda shown: self.syntax.written(shown, text))

    def pieces(self):
        if len(self.units) == 1:
            return super().pieces()
        texts = (self.syntax.markup.sub("", unit.text).strip() for unit in self.units)
        return [self.syntax.shown(text) if WORD.search(text) else "" for text in texts]

    def accept_pieces(self, translations):
        if len(self.units) == 1:
            return super().accept_pieces(translations)
        return self._joined([self._placed(unit, split_words(self._line(self.escape(text))), " ", True) if text
                             else unit.original() for unit, text in zip(self.units, translations)])  # fmt: skip

    def _line(self, raw):
        """Return a text in one line, without "-->", which would start a cue."""
        return " ".join(re.split(r"[\r\n]+", raw.replace("-->", "->")))

    def _whole(self, raw):
        return self._joined(self._shared(self._line(super()._whole(raw))))

    def _checked(self, raw, otherwise):
        texts = self._shared(self._line(super()._whole(raw)))
        pairs = [(unit.text, text) for unit, text in zip(self.units, texts)]
        kept = len(pairs) == 1 or all(self._fixed(source) == self._fixed(text) for source, text in pairs)
        return self._joined(texts) if kept else otherwise

    def _fixed(self, text):
        """Return the codes, numbers and brackets, which must remain in their cue."""
        codes = [match[0] for match in self.syntax.markup.finditer(text)]
        return codes, sorted(FIXED.findall(self.syntax.markup.sub(" ", text)))

    def _joined(self, texts):
        return "".join((unit.before if at else "") + text for at, (unit, text) in enumerate(zip(self.units, texts)))

    def _shared(self, text):
        """Distribute a translation over the units; return the text of each."""
        units = self.units
        if len(units) == 1 and len(units[0].lines) == 1 and not self.timed:
            return [text]
        words, between = split_words(text), " "
        if len(units) > 1 and all(unit.text.count("(") == unit.text.count(")") for unit in units):
            words = bracketed(words)
        if len(words) < sum(len(unit.lines) for unit in units):
            letters = re.findall(self.syntax.tag + r"|\S\s*", text)
            if len(letters) > 3 * len(words) and not text.isascii():  # a language written without spaces
                words, between = letters, ""
        each = zip(units, shared(words, [max(1, len(unit.text)) for unit in units]))
        return [self._placed(unit, mine, between) for unit, mine in each]

    def _placed(self, unit, words, between, apart=False):
        """Return a unit's text with these words. apart: the unit was translated separately."""
        stays = self.timed or apart and self.syntax.markup.search(unit.text)
        return (unit.at_times if stays else unit.wrapped)(words, between)

    def original(self):
        return self._joined([unit.original() for unit in self.units])


def shared(words, sizes):
    """Distribute words over places of these sizes, at least one word per place if there are enough."""
    total, out, at, passed, goal = sum(len(word) + 1 for word in words), [], 0, 0, 0
    for number, size in enumerate(sizes):
        goal += total * size / sum(sizes)
        left, mine = len(sizes) - number - 1, []
        while len(words) - at > left and (not left or not mine or passed + len(words[at]) / 2 < goal):
            mine.append(words[at])
            passed += len(words[at]) + 1
            at += 1
        out.append(mine)
    return out


def split_words(text):
    """Split at spaces, but not inside a tag."""
    return re.findall(r"(?:<[^<>]*>|\{\\[^{}]*\}|[^\s<{]+|[<{])+", text)


def bracketed(words):
    """Join up to 12 words between brackets, so that they remain in one cue."""
    out, depth, most = [], 0, 12
    for word in words:
        if depth > 0 and len(out[-1].split(" ")) < most:
            out[-1] += " " + word
        else:
            out.append(word)
            depth = 0
        depth += word.count("(") - word.count(")")
    return out


def cue_items(text, syntax):
    items, end = [], 0
    for match in syntax.markup.finditer(text):
        kind = "single" if match[2] is None else "close" if match[1] else "open"
        items += [text[end : match.start()], Mark(match[0], kind)]
        end = match.end()
    return [*items, text[end:]]


# ---- Speakers ----------------------------------------------------------


def lead(line, syntax):
    """Return the length of a line's speaker mark, and whether a new turn starts there."""
    start = syntax.lead.match(line).end()
    at, new = start, bool(PLACE.search(line, 0, start))
    for sign in (DASH, NAME, SONG):
        if match := sign.match(line, at):
            at, new = match.end(), True
            at = syntax.lead.match(line, at).end()
    if at == start:
        place = [match.end() for match in PLACE.finditer(line, 0, start)]
        at = place[-1] if place else 0  # italics are part of the text
    return at, new or bool(PROPER.match(line, at)) or bool(syntax.sound.match(line, syntax.lead.match(line, at).end()))


def turns(lines, ends, before, times, syntax, repeated):
    """Split a cue into units at changes of speaker, at sounds in brackets, and after each repeated line."""
    found = []
    for at, line in enumerate(lines):
        stood = before if not found else ends[at - 1]
        (size, new), marks = lead(line, syntax), ""
        if found and not found[-1].suffix and not found[-1].text:  # a line that has only marks
            alone, new = found.pop(), True
            stood, marks = alone.before.removesuffix(alone.prefix), alone.prefix + alone.original() + stood
        if found and not new and not found[-1].suffix and at > repeated:
            found[-1].lines.append(line)
            found[-1].ends.append(stood)
            continue
        prefix, begin, count = marks + line[:size], size, len(found)
        tags = syntax.lead.match(line, begin).end()
        while sound := syntax.sound.match(line, tags):
            close = re.search(r"[)\]][^)\]]*$", sound[0])[0]
            found.append(
                Unit(stood + prefix + line[begin : tags + 1], [sound[0][1 : len(sound[0]) - len(close)]], suffix=close)
            )
            space = SPACE.match(line, sound.end())
            stood, prefix, begin = space[0], "", space.end()
            tags = syntax.lead.match(line, begin).end()
        text = line[begin:]
        if text or not found or prefix:
            end = syntax.song_end.search(text) if SONG.search(prefix) else None
            suffix, text = (end[0], text[: end.start()]) if end else ("", text)
            found.append(Unit(stood + prefix, [text], prefix=prefix, suffix=suffix))
        elif stood:
            found[-1].suffix += stood
        for unit in found[count:]:
            unit.syntax, unit.repeated = syntax, at < repeated
    for at, unit in enumerate(found):
        unit.times, unit.first, unit.last = times, at == 0, at == len(found) - 1
        unit.__post_init__()
    return found


def continues(a, b):
    """Return whether a sentence in `a`, the last unit of a cue, continues in `b`, the first unit of the next cue."""
    text, more = (unit.syntax.markup.sub("", unit.text).strip() for unit in (a, b))
    if a.repeated or b.repeated or not (a.last and b.first) or a.suffix or b.prefix or b.suffix:
        return False
    if not text or not more or END.search(text):
        return False
    if not -0.5 <= b.times[0] - a.times[1] <= APART or b.times[0] < a.times[0]:
        return False
    if PROPER.match(more) or lead(b.lines[0], b.syntax)[1]:
        return False
    return not more[0].isupper() or text.endswith(",") or bool(re.match(r"I\b", more)) or bool(SHORT.search(text))


def runs(units):
    """Group the units of each sentence, at most MOST per group."""
    group = []
    for unit in units:
        if group and (len(group) == MOST or not continues(group[-1], unit)):
            yield group
            group = []
        group.append(unit)
    if group:
        yield group


# ---- Files -------------------------------------------------------------


def seconds(clock):
    total = 0.0
    for part in clock.strip(",.:").replace(",", ".").split(":"):
        total = total * 60 + float(re.match(r"\d*(?:\.\d+)?", part)[0] or 0)
    return total


def cues(data):
    """Return (preceding content, lines, line ends, times) of each cue, and the content after the last."""
    rows = [(match[1], match[2]) for match in LINES.finditer(data) if match[0]]
    vtt = data.lstrip("\ufeff").startswith("WEBVTT")
    timings = {at: match for at, (line, _) in enumerate(rows) if (match := TIMING.match(line))}
    heads = {at - 1 if at and NUMBER.match(rows[at - 1][0]) else at for at in timings}
    found, before, at, times = [], "", 0, None
    while at < len(rows):
        line, end = rows[at]
        if at in timings:
            times = (seconds(timings[at][1]), seconds(timings[at][2]))
        bare = NUMBER.match(line) and (not at or BLANK.fullmatch(rows[at - 1][0]))  # cue number without following times
        if at in timings or at in heads or BLANK.fullmatch(line) or times is None or bare:
            if not line and vtt:
                times = None  # in WebVTT, an empty line ends a cue's text
            before += line + end
            at += 1
            continue
        begin = at
        while at < len(rows) and not BLANK.fullmatch(rows[at][0]) and at not in heads and at not in timings:
            at += 1
        text = "".join(line + end for line, end in rows[begin : at - 1]) + rows[at - 1][0]
        found.append((before, LINE_ENDS.split(text), LINE_ENDS.findall(text), times))
        before = rows[at - 1][1]
    return found, before


def script_cues(data):
    """Do the same as cues() for SubStation, whose cues are the last field of a line."""
    fields, found, before, at, events = 10, [], "", 0, False
    for match in LINES.finditer(data):
        line = match[1]
        if line.startswith("["):
            events = line.strip().lower() == "[events]"
        if events and line.startswith("Format:"):
            fields = line.count(",") + 1
        row = DIALOGUE.match(line)
        if not events or not row or row[2].count(",") < fields - 1:
            continue
        columns = row[2].split(",", fields - 1)
        text = columns[-1]
        lines, breaks = BREAKS.split(text), BREAKS.findall(text)
        if not "".join(lines).strip() or re.search(r"\\p[1-9]", text):  # a drawing
            continue
        begin, end = match.end(1) - len(text), match.end(1)
        if not lines[0].strip():  # keep a break before the text, which moves the text down
            begin += len(lines.pop(0) + breaks.pop(0))
        if not lines[-1].strip():
            end -= len(lines.pop() + breaks.pop())
        times = tuple(seconds(clock) for clock in columns[1:3]) if fields > 3 else (0.0, 0.0)
        found.append((before + data[at:begin], lines, breaks, times))
        before, at = "", end
    return found, data[at:]


def repeated(lines, previous):
    """Return the number of lines at the start of a cue that repeat the last lines of the previous one."""
    return max((n for n in range(1, min(len(lines), len(previous)) + 1) if lines[:n] == previous[-n:]), default=0)


def parts(data, source=None, target=None):
    """Return the parts of a file: strings outside the cues' text, and one Run per sentence."""
    script = re.search(r"^\[(?:Script Info|V4\+? Styles|Events)\]", data, re.M | re.I)
    head = LANGUAGE.match(data)
    syntax = SCRIPT if script else WEBVTT if head else SUBRIP
    if head and head[2] and (code := renamed(head[3], source, target)):
        data = head[1] + head[2] + code + data[head.end() :]
    found, after = (script_cues if script else cues)(data)
    units, previous = [], []
    for before, lines, ends, times in found:
        shown = [syntax.markup.sub("", line).strip() for line in lines]
        units += turns(lines, ends, before, times, syntax, repeated(shown, previous))
        previous = shown
    result = []
    for group in runs(units):
        result += [group[0].before, Run(group), group[-1].suffix]
    return [*result, after]
