"""Running text whose names and numbers are others.

A name is to be copied, and there are more of them in the world than in any corpus: what a model learns of the few it
sees often is their spelling, not to copy. So where a name or a number is the same in all languages of a row, another
takes its place in all of them: one of the corpus, or one that is made up letter by letter after those. `name_table`
makes such rows.
"""
import random
import re
from collections import Counter

SOURCES = ("tatoeba", "europarl", "wikipedia", "dialogue", "books", "guides", "debian_web", "bible")
LONGEST = 250      # characters of a cell
COMMON = 50        # occurrences in small letters from which a capitalised word is no name
MADE_UP = 0.5      # share of names that no corpus has
TWO = 0.3          # share of places where two names stand for one
ORDER = 3          # letters that the next one of a made-up name follows
INITIALS = "AABCDEEFGHIIJKLMNOOPQRSTUUVWXYZ"

BEFORE, AFTER = r"(?<![\w.,:/-])", r"(?![\w:/]|[.,]\d)"
NAME = re.compile(BEFORE + r"[A-ZÀ-ÖØ-Þ]\w+" + AFTER)
NUMBER = re.compile(BEFORE + r"\d{1,4}(?!-)" + AFTER)


class Names:
    """Names to put in the place of others. `known`: those of the corpus; `follows`: ORDER letters -> the letters that
    follow them in known names, as often as they do; an empty one is the end."""

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
        """What takes the place of a name, an abbreviation or a number; years become years, and what is more than one
        stays so."""
        if word.isdigit():
            return str(r.randint(1800, 2030) if len(word) == 4 and word[0] in "12" else r.randint(2, 10 ** len(word)))
        if word.isupper():
            return "".join(r.choice(INITIALS) for _ in range(r.randint(2, 5)))
        return f"{self.draw(r)} {self.draw(r)}" if r.random() < TWO else self.draw(r)


def named_rows(columns, small):
    """Rows of one file that can be used: ({language: cell}, names and numbers that all its cells have). `small`:
    occurrences of words in small letters."""
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
    """About `rows` rows with other names, as one table: language -> cells. Files give by the square root of what they
    have."""
    r = random.Random(seed)
    table = {language: [] for columns in tables.values() for language in columns}
    small = Counter(word for columns in tables.values() for cells in columns.values() for cell in cells
                    for word in cell.split()
                    if word.islower())
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
