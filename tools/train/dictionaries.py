"""Words of dictionaries as training text.

What a small corpus lacks most is words. Free dictionaries have them, and Debian has such dictionaries
(`tools/install-deps --train` installs them): Ding's of German and English (package trans-de-en), those of WikDict and
FreeDict for German, French and Spanish and for French and English (packages dict-freedict-*). `dictionary_tables`
makes four tables of them: "dictionaries", words and short phrases as they stand there, German nouns mostly with
something around them; "bridged", French and Spanish words with the English ones that have the same German ones;
"nouns", sentences of the corpus in which one or two nouns are others; and "verbs", German and English ones in which
verbs or adjectives are others.
"""
import gzip
import math
import os
import random
import re
from collections import Counter

DING = "usr/share/trans/de-en"
DICTD = "usr/share/dictd/freedict-{}.index"
# FreeDict's of English and German are Ding's, and in those of English and Spanish words run together.
PAIRS = ("deu-fra", "deu-spa", "eng-fra", "fra-deu", "fra-eng", "fra-spa", "spa-deu")
CODES = {"eng": "en", "deu": "de", "fra": "fr", "spa": "es"}
WORD = re.compile(r"\w+")
LIKELY = 0.3          # share of what leads from one word over German to any that leads to the other, and back
COMMON = 10           # occurrences in the corpus of every word of one cell, from which a row is used
MOST_WORDS = 9        # of a cell
MOST_SYNONYMS = 3     # of an entry that are used
BARE = 0.4            # share of German nouns with nothing around them
SOURCES = ("tatoeba", "europarl", "wikipedia", "dialogue", "books", "guides", "debian_web")  # whose words are replaced
LONGEST = 250         # characters of a sentence whose words are replaced
MOST_PAIRS = 60_000   # of a file whose words are replaced
GRAMMAR = set("""all any another both each either every few half last less little many more most much next no one only
              other own same several some such that this very what which whole be is was been have has had do does did
              done will would can could may might must shall should let want wants wanted need needs needed""".split())
ENDINGS = ("al", "ant", "bar", "ell", "ent", "haft", "ig", "isch", "iv", "lich", "los", "sam", "voll", "är", "ös")
VERB_PLACES = (0, 2, 3, 4)  # of infinitive, past participle, present and past in an entry of a verb
ATTESTED = 0.7        # share of words in the place of others that the corpus has too


# ---- Reading ---------------------------------------------------------------------------------------------------------

SPECIAL = re.compile(r"\[(?:bot|zool|ornith|min|geol|chem|biochem|pharm|anat|obs|myc|textil|hist|mus|naut|mil)\.\]")
ASIDE = re.compile(r"\{[^}]*\}|\[[^]]*\]|\([^)]*\)|<[^>]*>|/[^/]*/|[\"“”„]")
SHORT = {"etw": "etwas", "jd": "jemand", "jdn": "jemanden", "jdm": "jemandem", "jds": "jemandes", "sth": "something",
         "sb": "somebody"}
DIGITS = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}


def plain(term):
    """A term without grammar, labels and explanations; "" if it is no plain one."""
    term = re.sub(r" \d$", "", " ".join(ASIDE.sub(" ", term).split()).strip(" ,.;:-"))
    term = re.sub(r"\b(etw|jdn|jdm|jds|jd|sth|sb)\b\.?", lambda match: SHORT[match[1]], term)
    usable = re.fullmatch(r"[\w'’.,!?%& -]+",
                          term) and len(term.split()) <= MOST_WORDS and not re.search(r"\.\.|\bso\.", term)
    return term if usable else ""


def synonyms(part):
    """The terms of a part of an entry, as they are written; a semicolon inside brackets separates nothing."""
    return re.split(r";(?![^(\[{]*[)\]}])", part)[:MOST_SYNONYMS]


def ding_lines(path):
    """(German parts, English parts) of the usable lines of Ding's file: `Wort {n}; Synonym {n} [label] | Wörter {pl} ::
    word; synonym | words`."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            left, _, right = line.partition(" :: ")
            left, right = left.split(" | "), right.split(" | ")
            if not line.startswith("#") and len(left) == len(right) and not SPECIAL.search(line):
                yield left, right


def meanings_of(part, meaning):
    """[(German term as it is written, plain English one)] of a part of an entry and what it means."""
    germans, englishes = synonyms(part), [plain(x) for x in synonyms(meaning)]
    return [(x, englishes[0]) for x in germans] + [(germans[0], x) for x in englishes[1:]]


def ding_entries(path):
    """(German, English, gender, countable) of Ding's file. Of what are no nouns of one word the gender is None. Present
    participles are left out, which it has of every verb."""
    for left, right in ding_lines(path):
        countable = any("{pl}" in part for part in left[1:])
        for part, meaning in zip(left, right):
            for german, english in meanings_of(part, meaning):
                gender, german = re.search(r"\{(m|f|n|pl)\}", german), plain(german)
                if german and english and not (german.endswith("nd") and english.endswith("ing")):
                    yield german, english, gender[1] if gender and " " not in german else None, countable


def ding_forms(path):
    """(German, English, kind) of the adjectives and verbs of Ding's file that are one word in both languages, in all
    forms that say what they are: an adjective by its ending, a verb by its place in an entry, which has infinitive,
    present participle, past participle, present and past in this order. Adjectives without an ending are only those
    that are no participles by the look of them, apart from those that English has as adverbs."""
    for left, right in ding_lines(path):
        used = re.search(r"\{(adj|v[it])\}", left[0])
        verb = used and used[1] != "adj"
        if not used or verb and not (len(left) > 2 and right[1].endswith("ing")):
            continue
        for place in [x for x in VERB_PLACES if x < len(left)] if verb else [0]:
            for german, english in meanings_of(left[place], right[place]):
                german, english = plain(german), english.removeprefix("to ") if verb and place == 0 else english
                if (not re.fullmatch("[a-zäöüß]+", german) or not re.fullmatch("[a-z][a-z-]+", english)
                        or english in GRAMMAR):
                    continue
                if verb:
                    if english.endswith("s") == (place == 3):
                        yield german, english, f"{used[1]} {place}"
                    continue
                if german.endswith(ENDINGS):
                    yield german, english, "adverb" if english.endswith("ly") else "adjective"
                if not german.endswith(("a", "e", "el", "er", "hoch", "i", "o")):
                    yield from ((german + x, english, "adjective " + x) for x in ("e", "em", "en", "er", "es"))


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
    """(row, gender) of a dictionary in dictd's format: the first line of an article is the word with its grammar, the
    second what it means in its first sense. The gender is "m", "f" or None. Names that stay the same are left out."""
    pair = [CODES[x] for x in index[:-len(".index")].split("-")[-2:]]
    for lines in articles(index):
        if len(lines) < 2:
            continue
        word, gender = plain(ASIDE.sub(" ", lines[0]).split(",")[0]), re.search(r"<n, ([mf])", lines[0])
        for meaning in re.sub(r"^\d+\. ", "", ASIDE.sub(" ", lines[1])).split(",")[:2]:
            meaning = plain(meaning)
            if word and meaning and not (word == meaning and word[0].isupper()):
                yield dict(zip(pair, (word, meaning))), gender[1] if gender else None


# ---- Words -----------------------------------------------------------------------------------------------------------

# What can stand around a German noun without changing it, by gender: before any, and before what can be counted.
AROUND = {
    "m": ([("der", "the"), ("dieser", "this"), ("kein", "no")], [("ein", "a"), ("jeder", "every")]),
    "f": ([("die", "the"), ("mit der", "with the"), ("für die", "for the"), ("in der", "in the"), ("der", "of the"),
           ("ohne", "without"),
           ("wegen der", "because of the")],
           [("eine", "a"), ("für eine", "for a"), ("mit einer", "with a"), ("jede", "every")]),
    "n": ([("das", "the"), ("mit dem", "with the"), ("für das", "for the"), ("im", "in the"), ("vom", "from the"),
           ("ohne", "without"),
           ("dieses", "this")], [("ein", "a"), ("für ein", "for a"), ("jedes", "every")]),
    "pl": ([("die", "the"), ("für die", "for the"), ("viele", "many"), ("ohne", "without"), ("keine", "no"),
            ("und", "and"),
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
    """How often each word is in a corpus: language -> Counter of words in small letters, of those that it lacks too."""
    count = {language: Counter() for language in CODES.values()}
    for table in tables.values():
        for language, cells in table.items():
            count[language].update(word for cell in cells for word in WORD.findall(cell.lower()))
    return count


def rarest(count, cell):
    """How often the rarest word of a cell occurs. `count`: of its language."""
    return min((count[word] for word in WORD.findall(cell.lower())), default=0)


def table_of(rows, count, known):
    """The distinct ones of rows as a table. A row is used if all words of a cell are common and no cell is `known`."""
    table, seen = {language: [] for language in count}, set()
    for row in rows:
        cells = tuple(row.get(language, "") for language in table)
        if (cells not in seen and known.isdisjoint(row.values())
                and any(rarest(count[language], cell) >= COMMON for language, cell in row.items())):
            seen.add(cells)
            for language, cell in zip(table, cells):
                table[language].append(cell)
    return table


def likely(meanings, count):
    """German word -> {what it means: how likely}, after how common that is, as far as that says something. `meanings`:
    German word -> cells, `count`: of their language."""
    chances = {}
    for german, cells in meanings.items():
        weights = {cell: 0.1 + math.log1p(rarest(count, cell)) for cell in sorted(cells)}
        total = sum(weights.values())
        chances[german] = {cell: weight / total for cell, weight in weights.items()}
    return chances


def bridged(english, others, adverbs):
    """[(English, other)] of words that lead to each other over German more than to any else. `english`, `others`: what
    `likely` gives; `adverbs`: how other adverbs end, which English has in -ly."""
    both, from_english, from_other = Counter(), Counter(), Counter()
    for german in sorted(set(english) & set(others)):
        for a, p in english[german].items():
            for b, q in others[german].items():
                both[a, b] += p * q
                from_english[a] += p * q
                from_other[b] += p * q
    share = {(a, b): 2 * p / (from_english[a] + from_other[b]) for (a, b), p in both.items() if b.endswith(adverbs)
             or not a.endswith("ly")}
    best = {}
    for pair, p in sorted(share.items()):
        for end in enumerate(pair):
            if p > (share[best[end]] if end in best else LIKELY):
                best[end] = pair
    return [(a, b) for (side, a), (_, b) in sorted(best.items()) if side == 0 and best.get((1, b)) == (a, b)]


# ---- Sentences with other words --------------------------------------------------------------------------------------

# They come as (word, English words, kind). Those of one kind can take each other's place, whatever is around them.

def german_nouns(entries):
    """The kind is the gender, in the plural with the last letter, for some have no n that the dative could add.
    Masculine ones that change in the singular have the kind None."""
    for german, english, gender, _ in entries:
        if gender:
            weak = gender == "m" and german.endswith(("e", "ent", "ist", "ant"))
            yield german, english, None if weak else gender + german[-1] * (gender == "pl")


def romance_nouns(pairs, genders, unsure, language):
    """Nouns of French or Spanish and their regular plurals. The kind is gender and number, of those that begin so that
    no word before them is shortened. `pairs`: [(English, other)], `genders`: other -> genders that dictionaries give,
    `unsure`: English words that may be no nouns."""
    for english, other in pairs:
        gender, usual = genders.get(other, ()), re.fullmatch(r"[^\W\d_A-Z]+ [^A-Z]+", f"{other} {english}")
        if len(gender) == 1 and usual and english not in unsure and not re.search("^to |[^su]s$", english):
            kind = min(gender) if other[0] in "bcdfgjklmnpqrstvwz" else None
            yield other, english, kind
            if re.search("[^sxzlu]$" if language == "fr" else "[aeiou]$|[^aeiousz]$",
                         other) and re.search("[a-rt-wz]$", english):
                yield (other + ("s" if language == "fr" or other[-1] in "aeiou" else "es"),
                       english + ("es" if english.endswith(("ch", "sh")) else "s"), kind and kind + "pl")


def place_of(english):
    """Finds words where they are not part of others, with the article before them: (a or A, or None)."""
    return re.compile(rf"(?<![\w-])(?:([Aa])n? )?{re.escape(english)}(?![\w-])")


class Words:
    """Words of one language of which each is of one kind. `meanings`: word -> (kind, English words); `pool`: kind
    -> [(word, English words)], those whose English words are common; `attested`: those of them that the corpus has.
    `count`: of that language; `unsure`: English words that may be of other kinds, and so are not taken for one of
    these in a sentence."""

    def __init__(self, words, count, english_count, unsure=()):
        found, self.meanings, self.pool, self.attested, self.unsure = {}, {}, {}, {}, unsure
        for word, english, kind in words:
            if len(english.split()) <= 3:
                found.setdefault(word, {}).setdefault(kind, []).append(english)
        for word, kinds in sorted(found.items()):
            (kind, meanings), *more = kinds.items()
            if kind and not more:
                self.meanings[word] = kind, meanings
                if rarest(english_count, meanings[0]) >= COMMON:
                    for group in (self.pool, self.attested) if count[word.lower()] else (self.pool,):
                        group.setdefault(kind, []).append((word, meanings[0]))

    def places(self, sentence, english):
        """Words of a sentence that one place of the English one translates: [(kind, word, English words)]."""
        words, places = WORD.findall(sentence), []
        for word in words:
            kind, meanings = self.meanings.get(word, (None, ()))
            if kind in self.attested and words.count(word) == 1:
                there = [x for x in sorted(set(meanings)) if x in english and len(place_of(x).findall(english)) == 1]
                if len(there) == 1 and there[0] not in self.unsure:
                    places.append((kind, word, there[0]))
        return places

    def replaced(self, r, sentence, english, places):
        """The sentences with other words in one or two of the places."""
        for kind, word, meaning in r.sample(places, min(len(places), r.randint(1, 2))):
            other, means = r.choice((self.attested if r.random() < ATTESTED else self.pool)[kind])
            sentence = re.sub(rf"(?<!\w){word}(?!\w)", other, sentence)
            english = place_of(meaning).sub(lambda match: f"{match[1]}{article(means)[1:]} {means}" if match[1]
                                            else means, english)
        return sentence, english


def rows_with(r, words, language, tables, rows):
    """About `rows` rows of a language and English, sentences of the corpus in which words are others (data augmentation
    for rare words, Fadaee, Bisazza and Monz 2017). Files give by the square root of what they have."""
    found = []
    for name, columns in sorted(tables.items()):
        if name.startswith(SOURCES) and {language, "en"} <= set(columns):
            pairs = [(a, b) for a, b in zip(columns[language], columns["en"]) if a and b and len(a) <= LONGEST]
            found.append([(a, b, places) for a, b in r.sample(pairs, min(len(pairs), MOST_PAIRS))
                          if (places := words.places(a, b))])
    weight = sum(len(usable) ** 0.5 for usable in found)
    for usable in found:
        for _ in range(round(rows * len(usable) ** 0.5 / weight) if usable else 0):
            yield dict(zip((language, "en"), words.replaced(r, *r.choice(usable))))


# ---- Tables ----------------------------------------------------------------------------------------------------------

def dictionary_tables(tables, known, rows, seed, root="/", log=print):
    """The tables "dictionaries", "bridged", "nouns" and "verbs" of the dictionaries installed below `root`, language ->
    cells; none without any. `rows`: of nouns and of verbs of German, about; of French and Spanish half as many.
    `known`: a set of sentences that are for testing, and so must not be learned."""
    r, ding = random.Random(seed), os.path.join(root, DING)
    indices = [path for x in PAIRS if os.path.exists(path := os.path.join(root, DICTD.format(x)))]
    entries, forms = (list(f(ding)) if os.path.exists(ding) else [] for f in (ding_entries, ding_forms))
    others = [row for index in indices for row in dictd_rows(index)]
    log(f"dictionaries: {len(entries)} entries of trans-de-en, {len(others)} of {len(indices)} other dictionaries"
        + ("" if entries and others else "; tools/install-deps --train installs what is missing"))
    if not entries and not others:
        return {}
    count, german, genders = occurrences(tables), {"en": {}, "fr": {}, "es": {}}, {}
    for row, gender in [({"de": word, "en": english}, None) for word, english, *_ in entries] + others:
        for language in set(row) - {"de"} if "de" in row else ():
            german[language].setdefault(row["de"], set()).add(row[language])
        if gender:
            genders.setdefault(next(iter(row.values())), set()).add(gender)
    english = likely(german["en"], count["en"])
    unsure = {meaning for word, meaning, gender, _ in entries if not gender and word.islower()}
    words = [dict(zip(("de", "en"), in_use(r, *entry) if entry[2] else entry))
             for entry in entries] + [row for row, _ in others]
    bridges, nouns = [], Words(german_nouns(entries), count["de"], count["en"], unsure)
    changed = [*rows_with(r, nouns, "de", tables, rows)]
    for language, adverbs in ("fr", "ment"), ("es", "mente"):
        pairs = bridged(english, likely(german[language], count[language]), adverbs)
        bridges += [{"en": a, language: b} for a, b in pairs]
        nouns = Words(romance_nouns(pairs, genders, unsure, language), count[language], count["en"], unsure)
        changed += rows_with(r, nouns, language, tables, rows / 2)
    verbs = [*rows_with(r, Words(forms, count["de"], count["en"]), "de", tables, rows)]
    made = {"dictionaries": table_of(words, count, known), "bridged": table_of(bridges, count, known),
            **{name: {language: [row.get(language, "") for row in x] for language in count}
               for name, x in (("nouns", changed), ("verbs", verbs))}}
    made = {name: table for name, table in made.items() if any(map(any, table.values()))}
    log("dictionaries: " + ", ".join(f"{len(next(iter(x.values())))} rows of {name}" for name, x in made.items()))
    return made
