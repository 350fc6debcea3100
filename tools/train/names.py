"""Running text with replaced names and numbers.

Models should copy names, but a model that sees few distinct names learns their spelling instead. `name_table` takes
rows in which a name or number is the same in all languages, and replaces it in all cells with another name of the
corpus or with a name generated letter by letter.
"""
import random
import re
from collections import Counter

SOURCES = ("tatoeba", "europarl", "wikipedia", "dialogue", "books", "guides", "debian_web", "bible")
LONGEST = 250      # maximum characters per cell
COMMON = 50        # a capitalised word with this many lower-case occurrences is not a name
MADE_UP = 0.5      # fraction of replacements that are generated
TWO = 0.3          # fraction of names replaced with two names
ORDER = 3          # the next letter of a generated name depends on this many letters
INITIALS = "AABCDEEFGHIIJKLMNOOPQRSTUUVWXYZ"

BEFORE, AFTER = r"(?<![\w.,:/-])", r"(?![\w:/]|[.,]\d)"
NAME = re.compile(BEFORE + r"[A-ZÀ-ÖØ-Þ]\w+" + AFTER)
NUMBER = re.compile(BEFORE + r"\d{1,4}(?!-)" + AFTER)


class Names:
    """Replacement names. `known`: names in the corpus; `follows`: ORDER letters -> letters that follow in known names,
    with repetitions, or "" at the end."""

    def __init__(self, known):
        self.known, self.follows = sorted(known), {}
        for name in self.known:
            padded = " " * ORDER + name
            for at in range(ORDER, len(padded) + 1):
                self.follows.setdefault(padded[at - ORDER:at], []).append(padded[at:at + 1])

    def made_up(self, r):
        name = " " * ORDER
        while letter := r.choice(self.follows[name[-ORDER:]]):
            name += letter
        return name[ORDER:]

    def draw(self, r):
        for _ in range(100):
            name = self.made_up(r) if r.random() < MADE_UP else r.choice(self.known)
            if 3 <= len(name) <= 15:
                break
        return name

    def instead(self, r, word):
        """Return a replacement for a name, abbreviation or number; years become years, no number becomes 0 or 1."""
        if word.isdigit():
            return str(r.randint(1800, 2030) if len(word) == 4 and word[0] in "12" else r.randint(2, 10 ** len(word)))
        if word.isupper():
            return "".join(r.choice(INITIALS) for _ in range(r.randint(2, 5)))
        return f"{self.draw(r)} {self.draw(r)}" if r.random() < TWO else self.draw(r)


def named_rows(columns, small):
    """Yield ({language: cell}, shared names and numbers) of usable rows. `small`: word -> lower-case occurrences."""
    for cells in zip(*columns.values()):
        cells = {language: cell for language, cell in zip(columns, cells) if cell}
        if len(cells) < 2 or max(map(len, cells.values())) > LONGEST:
            continue
        names, numbers = (set.intersection(*(set(pattern.findall(cell)) for cell in cells.values()))
                          for pattern in (NAME, NUMBER))
        shared = {word for word in names if word.isupper() or len(word) > 2 and small[word.lower()] < COMMON}
        shared |= {word for word in numbers if int(word) > 1}
        if shared:
            yield cells, sorted(shared)


def name_table(tables, rows, seed):
    """Return about `rows` rows with replaced names as a table; files are weighted by the square root of their size."""
    r = random.Random(seed)
    table = {language: [] for columns in tables.values() for language in columns}
    small = Counter(word for columns in tables.values() for cells in columns.values() for cell in cells
                    for word in cell.split() if word.islower())
    found = {source: list(named_rows(columns, small)) for source, columns in sorted(tables.items())
             if source.startswith(SOURCES)}
    known = {word for usable in found.values() for _, shared in usable for word in shared
             if len(word) > 3 and word.isalpha() and not word.isupper() and not small[word.lower()]}
    if not known:
        return table
    names, weight = Names(known), sum(len(usable) ** 0.5 for usable in found.values())
    for usable in found.values():
        for _ in range(round(rows * len(usable) ** 0.5 / weight)):
            cells, shared = r.choice(usable)
            others = {word: names.instead(r, word) for word in shared}
            place = re.compile(BEFORE + "(?:" + "|".join(map(re.escape, others)) + ")" + AFTER)
            for language, column in table.items():
                column.append(place.sub(lambda match: others[match[0]], cells[language]) if language in cells else "")
    return table
