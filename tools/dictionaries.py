"""Words of dictionaries as training text.

What a small corpus lacks most is words. Free dictionaries have them, and Debian has such dictionaries (`tools/install-deps --train`
installs them): Ding's of German and English (package trans-de-en), those of WikDict and FreeDict for German, French and Spanish
(packages dict-freedict-*). `dictionary_tables` makes two tables of them: "dictionaries", words and short phrases as they stand there,
German nouns mostly with something around them; and "nouns", sentences of the corpus in which one or two nouns are others.
"""
import glob
import gzip
import os
import random
import re
from collections import Counter

DING = "usr/share/trans/de-en"
DICTD = "usr/share/dictd/freedict-*-*.index"
CODES = {"deu": "de", "fra": "fr", "spa": "es"}
WORD = re.compile(r"\w+")
COMMON = 10           # occurrences in the corpus of every word of one cell, from which a row is used
MOST_WORDS = 9        # of a cell
MOST_SYNONYMS = 3     # of an entry that are used
BARE = 0.4            # share of German nouns with nothing around them
SOURCES = ("tatoeba", "europarl", "wikipedia", "dialogue", "books", "guides", "debian_web")  # whose nouns are replaced
LONGEST = 250         # characters of a German sentence whose nouns are replaced
ATTESTED = 0.7        # share of nouns in the place of others that the corpus has too


# ---- Reading -----------------------------------------------------------------------------------------------------------

SPECIAL = re.compile(r"\[(?:bot|zool|ornith|min|geol|chem|biochem|pharm|anat|obs|myc|textil|hist|mus|naut|mil)\.\]")
ASIDE = re.compile(r"\{[^}]*\}|\[[^]]*\]|\([^)]*\)|<[^>]*>|/[^/]*/|[\"“”„]")
SHORT = {"etw": "etwas", "jd": "jemand", "jdn": "jemanden", "jdm": "jemandem", "jds": "jemandes", "sth": "something", "sb": "somebody"}
DIGITS = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}


def plain(term):
    """A term without grammar, labels and explanations; "" if it is no plain one."""
    term = re.sub(r" \d$", "", " ".join(ASIDE.sub(" ", term).split()).strip(" ,.;:-"))
    term = re.sub(r"\b(etw|jdn|jdm|jds|jd|sth|sb)\b\.?", lambda match: SHORT[match[1]], term)
    usable = re.fullmatch(r"[\w'’.,!?%& -]+", term) and len(term.split()) <= MOST_WORDS and not re.search(r"\.\.|\bso\.", term)
    return term if usable else ""


def synonyms(part):
    """The terms of a part of an entry, as they are written; a semicolon inside brackets separates nothing."""
    return re.split(r";(?![^(\[{]*[)\]}])", part)[:MOST_SYNONYMS]


def ding_entries(path):
    """(German, English, gender, countable) of Ding's file: `Wort {n}; Synonym {n} [label] | Wörter {pl} :: word; synonym | words`. Of
    what are no nouns of one word the gender is None. Present participles are left out, which it has of every verb."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            left, _, right = line.partition(" :: ")
            left, right = left.split(" | "), right.split(" | ")
            if line.startswith("#") or len(left) != len(right) or SPECIAL.search(line):
                continue
            countable = any("{pl}" in part for part in left[1:])
            for part, meaning in zip(left, right):
                germans, englishes = synonyms(part), [plain(x) for x in synonyms(meaning)]
                for german, english in [(x, englishes[0]) for x in germans] + [(germans[0], x) for x in englishes[1:]]:
                    gender, german = re.search(r"\{(m|f|n|pl)\}", german), plain(german)
                    if german and english and not (german.endswith("nd") and english.endswith("ing")):
                        yield german, english, gender[1] if gender and " " not in german else None, countable


def articles(index):
    """The articles of a dictionary in dictd's format as lists of lines; where one is, its index says in base 64."""
    def number(text):
        value = 0
        for c in text:
            value = value * 64 + DIGITS[c]
        return value
    with gzip.open(index[:-len("index")] + "dict.dz") as file:
        text = file.read()
    with open(index, encoding="utf-8") as file:
        fields = [line.rstrip("\n").split("\t") for line in file if not line.startswith("00")]
    for offset, length in sorted({(number(x[1]), number(x[2])) for x in fields}):
        yield text[offset:offset + length].decode().splitlines()


def dictd_rows(index):
    """Rows of a dictionary in dictd's format: the first line of an article is the word, the second what it means in its first sense.
    Names that stay the same are left out."""
    pair = [CODES[x] for x in index[:-len(".index")].split("-")[-2:]]
    for lines in articles(index):
        word = plain(ASIDE.sub(" ", lines[0]).split(",")[0]) if len(lines) > 1 else ""
        for meaning in re.sub(r"^\d+\. ", "", lines[1]).split(",")[:2] if word else ():
            meaning = plain(meaning)
            if meaning and not (word == meaning and word[0].isupper()):
                yield dict(zip(pair, (word, meaning)))


def joined(rows):
    """Rows of more languages, by the German words that mean one thing in each: what has one meaning in English and one in French
    has the same one in both, mostly."""
    meanings = {}
    for row in rows:
        for language in set(row) - {"de"} if "de" in row else ():
            meanings.setdefault(row["de"], {}).setdefault(language, set()).add(row[language])
    for german, others in sorted(meanings.items()):
        row = {language: min(cells) for language, cells in others.items() if len(cells) == 1}
        if len(row) > 1:
            yield {"de": german, **row}


# ---- Words -------------------------------------------------------------------------------------------------------------

# What can stand around a German noun without changing it, by gender: before any, and before what can be counted.
AROUND = {
    "m": ([("der", "the"), ("dieser", "this"), ("kein", "no")], [("ein", "a"), ("jeder", "every")]),
    "f": ([("die", "the"), ("mit der", "with the"), ("für die", "for the"), ("in der", "in the"), ("der", "of the"), ("ohne", "without"),
           ("wegen der", "because of the")], [("eine", "a"), ("für eine", "for a"), ("mit einer", "with a"), ("jede", "every")]),
    "n": ([("das", "the"), ("mit dem", "with the"), ("für das", "for the"), ("im", "in the"), ("vom", "from the"), ("ohne", "without"),
           ("dieses", "this")], [("ein", "a"), ("für ein", "for a"), ("jedes", "every")]),
    "pl": ([("die", "the"), ("für die", "for the"), ("viele", "many"), ("ohne", "without"), ("keine", "no"), ("und", "and"),
            ("diese", "these"), ("der", "of the")], []),
}


def article(noun):
    """a or an."""
    return "an" if noun[0] in "aeiouAEIOU" else "a"


def in_use(r, german, english, gender, countable):
    """A German noun and what it means, with something around them or not."""
    always, counted = AROUND[gender]
    if r.random() < BARE or len(english.split()) > 3 or english.startswith(("the ", "a ", "an ")):
        return german, english
    before, meaning = r.choice(always + counted * countable)
    return f"{before} {german}", f"{re.sub(r'a$', article(english), meaning)} {english}"


def occurrences(tables):
    """How often each word is in a corpus: language -> Counter of words in small letters."""
    count = {language: Counter() for table in tables.values() for language in table}
    for table in tables.values():
        for language, cells in table.items():
            count[language].update(word for cell in cells for word in WORD.findall(cell.lower()))
    return count


def is_common(count, cell):
    """Whether every word of a cell occurs COMMON times. `count`: of its language."""
    return min((count[word] for word in WORD.findall(cell.lower())), default=0) >= COMMON


def word_table(r, entries, rows, count, known):
    """The distinct ones of Ding's entries, of rows, and of what can be joined of both, as one table. A row is used if all words of a
    cell are common and no cell is `known`."""
    table, seen = {language: [] for language in count}, set()
    bare = [{"de": german, "en": english} for german, english, *_ in entries]
    used = (dict(zip(("de", "en"), in_use(r, *entry) if entry[2] else entry)) for entry in entries)
    for row in [*used, *rows, *joined(bare + rows)]:
        cells = tuple(row.get(language, "") for language in table)
        if (cells not in seen and known.isdisjoint(row.values()) and set(row) <= set(table)
                and any(is_common(count[language], cell) for language, cell in row.items())):
            seen.add(cells)
            for language, cell in zip(table, cells):
                table[language].append(cell)
    return table


# ---- Sentences with other nouns ----------------------------------------------------------------------------------------

def kind(german, gender):
    """What nouns must share to take each other's place: the gender, in the plural also the last letter, for some have no n that the
    dative could add. None: weak ones, which better stay."""
    if gender == "m" and german.endswith(("e", "ent", "ist", "ant")):
        return None
    return gender + german[-1] * (gender == "pl")


def place_of(english):
    """Finds words where they are not part of others, with the article before them: (a or A, or None)."""
    return re.compile(rf"(?<![\w-])(?:([Aa])n? )?{re.escape(english)}(?![\w-])")


class Nouns:
    """Ding's nouns of one word and one gender. `meanings`: German word -> (kind, English words); `pool`: kind -> [(German word, English
    words)], those whose English words are common; `attested`: those of them that the corpus has in German."""

    def __init__(self, entries, count):
        found, self.meanings, self.pool, self.attested = {}, {}, {}, {}
        for german, english, gender, _ in entries:
            if gender and len(english.split()) <= 3:
                found.setdefault(german, {}).setdefault(kind(german, gender), []).append(english)
        for german, kinds in sorted(found.items()):
            (sort, meanings), *more = kinds.items()
            if sort and not more:
                self.meanings[german] = sort, meanings
                if is_common(count["en"], meanings[0]):
                    for group in (self.pool, self.attested) if count["de"][german.lower()] else (self.pool,):
                        group.setdefault(sort, []).append((german, meanings[0]))

    def places(self, german, english):
        """Nouns of a German sentence that one place of the English one translates: [(kind, German word, English words)]."""
        words, places = WORD.findall(german), []
        for word in words:
            sort, meanings = self.meanings.get(word, (None, ()))
            if sort in self.attested and words.count(word) == 1:
                there = [x for x in set(meanings) if len(place_of(x).findall(english)) == 1]
                if len(there) == 1:
                    places.append((sort, word, there[0]))
        return places

    def replaced(self, r, german, english, places):
        """The sentences with other nouns in one or two of the places."""
        for sort, word, meaning in r.sample(places, min(len(places), r.randint(1, 2))):
            other, means = r.choice((self.attested if r.random() < ATTESTED else self.pool)[sort])
            german = re.sub(rf"(?<!\w){word}(?!\w)", other, german)
            english = place_of(meaning).sub(lambda match: f"{match[1]}{article(means)[1:]} {means}" if match[1] else means, english)
        return german, english


def noun_table(r, entries, tables, count, rows):
    """About `rows` German and English sentences of the corpus in which nouns are others (data augmentation for rare words, Fadaee,
    Bisazza and Monz 2017), as one table. Files give by the square root of what they have."""
    table, nouns, found = {language: [] for language in count}, Nouns(entries, count), []
    for name, columns in sorted(tables.items()):
        if name.startswith(SOURCES) and {"de", "en"} <= set(columns):
            pairs = [(a, b) for a, b in zip(columns["de"], columns["en"]) if a and b and len(a) <= LONGEST]
            found.append([(a, b, places) for a, b in pairs if (places := nouns.places(a, b))])
    weight = sum(len(usable) ** 0.5 for usable in found)
    for usable in found:
        for _ in range(round(rows * len(usable) ** 0.5 / weight) if usable else 0):
            row = dict(zip(("de", "en"), nouns.replaced(r, *r.choice(usable))))
            for language, cells in table.items():
                cells.append(row.get(language, ""))
    return table


def dictionary_tables(tables, known, rows, seed, root="/", log=print):
    """The tables "dictionaries" and "nouns" of the dictionaries installed below `root`, language -> cells; none without any. `rows`: of
    nouns, about. `known`: a set of sentences that are for testing, and so must not be learned."""
    r, ding = random.Random(seed), os.path.join(root, DING)
    indices = [x for x in sorted(glob.glob(os.path.join(root, DICTD))) if set(x[:-len(".index")].split("-")[-2:]) <= set(CODES)]
    entries = list(ding_entries(ding)) if os.path.exists(ding) else []
    others = [row for index in indices for row in dictd_rows(index)]
    log(f"dictionaries: {len(entries)} entries of trans-de-en, {len(others)} of {len(indices)} other dictionaries"
        + ("" if entries and others else "; tools/install-deps --train installs what is missing"))
    if not entries and not others:
        return {}
    count = occurrences(tables)
    made = {"dictionaries": word_table(r, entries, others, count, known), "nouns": noun_table(r, entries, tables, count, rows)}
    log("dictionaries: " + ", ".join(f"{len(next(iter(x.values()), []))} rows of {name}" for name, x in made.items()))
    return {name: x for name, x in made.items() if any(map(any, x.values()))}
