"""Dictionary words as training text.

The main deficit of a small corpus is its vocabulary. Debian packages free dictionaries (installed by
`tools/install-deps --train`): Ding's for German and English (trans-de-en), and WikDict's and FreeDict's for German,
French and Spanish and for French and English (dict-freedict-*). `dictionary_tables` makes four tables: "dictionaries"
has words and short phrases as listed, and German nouns mostly with context; "bridged" pairs French and Spanish words
with English ones that share German translations; "nouns" has sentences of the corpus with one or two nouns replaced;
and "verbs" has German and English sentences with verbs or adjectives replaced.
"""
import gzip
import math
import os
import random
import re
from collections import Counter

DING = "usr/share/trans/de-en"
DICTD = "usr/share/dictd/freedict-{}.index"
# FreeDict's English-German (a copy of Ding's) and English-Spanish (adjacent words are merged) are not used.
PAIRS = ("deu-fra", "deu-spa", "eng-fra", "fra-deu", "fra-eng", "fra-spa", "spa-deu")
CODES = {"eng": "en", "deu": "de", "fra": "fr", "spa": "es"}
WORD = re.compile(r"\w+")
LIKELY = 0.3          # minimum probability of a word pair via German, averaged over both directions
COMMON = 10           # minimum occurrences in the corpus of each word in a cell of common words
MAX_WORDS = 9         # maximum words per cell
MAX_SYNONYMS = 3      # maximum synonyms used per entry
BARE = 0.4            # fraction of German nouns without context
SOURCES = ("tatoeba", "europarl", "wikipedia", "dialogue", "books", "guides", "debian_web")  # for replacing words
LONGEST = 250         # maximum characters of a sentence with replaced words
MAX_PAIRS = 60_000    # maximum sentence pairs per file for replacing words
GRAMMAR = set("""all any another both each either every few half last less little many more most much next no one only
              other own same several some such that this very what which whole be is was been have has had do does did
              done will would can could may might must shall should let want wants wanted need needs needed""".split())
ENDINGS = ("al", "ant", "bar", "ell", "ent", "haft", "ig", "isch", "iv", "lich", "los", "sam", "voll", "är", "ös")
VERB_PLACES = (0, 2, 3, 4)  # positions of infinitive, past participle, present and past in a verb's entry
ATTESTED = 0.7        # fraction of replacements that occur in the corpus


# ---- Reading ---------------------------------------------------------------------------------------------------------

SPECIAL = re.compile(r"\[(?:bot|zool|ornith|min|geol|chem|biochem|pharm|anat|obs|myc|textil|hist|mus|naut|mil)\.\]")
ASIDE = re.compile(r"\{[^}]*\}|\[[^]]*\]|\([^)]*\)|<[^>]*>|/[^/]*/|[\"“”„]")
SHORT = {"etw": "etwas", "jd": "jemand", "jdn": "jemanden", "jdm": "jemandem", "jds": "jemandes", "sth": "something",
         "sb": "somebody"}
DIGITS = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}


def plain(term):
    """Strip grammar, labels and explanations from a term; return "" if the rest is not plain words."""
    term = re.sub(r" \d$", "", " ".join(ASIDE.sub(" ", term).split()).strip(" ,.;:-"))
    term = re.sub(r"\b(etw|jdn|jdm|jds|jd|sth|sb)\b\.?", lambda match: SHORT[match[1]], term)
    usable = re.fullmatch(r"[\w'’.,!?%& -]+", term) and not re.search(r"\.\.|\bso\.", term)
    return term if usable and len(term.split()) <= MAX_WORDS else ""


def synonyms(part):
    """Split a part of an entry into terms; semicolons in brackets do not separate terms."""
    return re.split(r";(?![^(\[{]*[)\]}])", part)[:MAX_SYNONYMS]


def ding_lines(path):
    """Yield (German parts, English parts) of the usable lines of Ding's file: `Wort {n}; Synonym {n} [label] | Wörter
    {pl} :: word; synonym | words`."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            left, _, right = line.partition(" :: ")
            left, right = left.split(" | "), right.split(" | ")
            if not line.startswith("#") and len(left) == len(right) and not SPECIAL.search(line):
                yield left, right


def meanings_of(part, meaning):
    """Return [(German term as written, plain English term)] for a part of an entry and its translation."""
    germans, englishes = synonyms(part), [plain(x) for x in synonyms(meaning)]
    return [(x, englishes[0]) for x in germans] + [(germans[0], x) for x in englishes[1:]]


def ding_entries(path):
    """Yield (German, English, gender, countable) of Ding's file; the gender is None except for nouns of one word.
    Present participles, which the file lists for every verb, are skipped."""
    for left, right in ding_lines(path):
        countable = any("{pl}" in part for part in left[1:])
        for part, meaning in zip(left, right):
            for german, english in meanings_of(part, meaning):
                gender, german = re.search(r"\{(m|f|n|pl)\}", german), plain(german)
                if german and english and not (german.endswith("nd") and english.endswith("ing")):
                    yield german, english, gender[1] if gender and " " not in german else None, countable


def ding_forms(path):
    """Yield (German, English, kind) of Ding's adjectives and verbs that are one word in both languages, in all
    inflected forms. The kind is the ending of an adjective, or the position of a verb form in its entry, which lists
    infinitive, present participle, past participle, present and past. Uninflected adjectives must have an ending in
    ENDINGS; their kind is "adverb" if the English word ends in -ly."""
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
    """Yield the articles of a dictd dictionary as lists of lines, at the base-64 positions in the index."""
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
    """Yield (row, gender) of a dictd dictionary. The first line of an article is the word with its grammar, the second
    line the word's first sense. The gender is "m", "f" or None. Names with equal translations are skipped."""
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

# gender -> (contexts for all nouns, contexts for countable nouns). German nouns keep their base form in these.
AROUND = {
    "m": ([("der", "the"), ("dieser", "this"), ("kein", "no")], [("ein", "a"), ("jeder", "every")]),
    "f": ([("die", "the"), ("mit der", "with the"), ("für die", "for the"), ("in der", "in the"), ("der", "of the"),
           ("ohne", "without"), ("wegen der", "because of the")],
           [("eine", "a"), ("für eine", "for a"), ("mit einer", "with a"), ("jede", "every")]),
    "n": ([("das", "the"), ("mit dem", "with the"), ("für das", "for the"), ("im", "in the"), ("vom", "from the"),
           ("ohne", "without"), ("dieses", "this")], [("ein", "a"), ("für ein", "for a"), ("jedes", "every")]),
    "pl": ([("die", "the"), ("für die", "for the"), ("viele", "many"), ("ohne", "without"), ("keine", "no"),
            ("und", "and"), ("diese", "these"), ("der", "of the")], [])}


def article(noun):
    """Return "a" or "an"."""
    return "an" if noun[0] in "aeiouAEIOU" else "a"


def in_use(r, german, english, gender, countable):
    """Return a German noun and its translation, possibly with a context."""
    always, counted = AROUND[gender]
    if r.random() < BARE or len(english.split()) > 3 or english.startswith(("the ", "a ", "an ")):
        return german, english
    before, meaning = r.choice(always + counted * countable)
    return f"{before} {german}", f"{re.sub(r'a$', article(english), meaning)} {english}"


def occurrences(tables):
    """Count the words of a corpus. Return language -> Counter of lower-case words."""
    count = {language: Counter() for language in CODES.values()}
    for table in tables.values():
        for language, cells in table.items():
            count[language].update(word for cell in cells for word in WORD.findall(cell.lower()))
    return count


def rarest(count, cell):
    """Return the number of occurrences of a cell's rarest word; `count`: Counter of the language."""
    return min((count[word] for word in WORD.findall(cell.lower())), default=0)


def table_of(rows, count, known):
    """Return distinct rows as a table. Rows without a cell of common words and rows with a `known` cell are skipped."""
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
    """Return German word -> {translation: probability}, from word frequencies. `meanings`: German word -> cells."""
    chances = {}
    for german, cells in meanings.items():
        weights = {cell: 0.1 + math.log1p(rarest(count, cell)) for cell in sorted(cells)}
        total = sum(weights.values())
        chances[german] = {cell: weight / total for cell, weight in weights.items()}
    return chances


def bridged(english, others, adverbs):
    """Return [(English, other)] of words that are each other's most probable translation via German. `english`,
    `others`: results of `likely`; `adverbs`: suffix of the other language's adverbs (-ly in English)."""
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


# ---- Sentences with replaced words -----------------------------------------------------------------------------------

# Words are given as (word, English words, kind). Words of one kind can replace each other in any context.

def german_nouns(entries):
    """Yield German nouns. The kind is the gender, plus the last letter of a plural, because plurals without a final -n
    take an -n in the dative. Masculine nouns that are inflected in the singular have the kind None."""
    for german, english, gender, _ in entries:
        if gender:
            weak = gender == "m" and german.endswith(("e", "ent", "ist", "ant"))
            yield german, english, None if weak else gender + german[-1] * (gender == "pl")


def romance_nouns(pairs, genders, unsure, language):
    """Yield French or Spanish nouns and regular plurals. The kind is gender and number, or None if the initial letter
    changes the preceding word (l', el agua). `pairs`: [(English, other)]; `genders`: other -> genders in dictionaries;
    `unsure`: English words that may not be nouns."""
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
    """Return a pattern that finds `english`; its group is the A or a of a preceding article, or None."""
    return re.compile(rf"(?<![\w-])(?:([Aa])n? )?{re.escape(english)}(?![\w-])")


class Words:
    """Words of one language, each with a single kind. `meanings`: word -> (kind, English words); `pool`: kind ->
    [(word, English words)] with common English words; `attested`: the part of `pool` that occurs in the corpus.
    `count`: word counts of the language; `unsure`: English words that may be of other kinds, and are never replaced."""

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
        """Return [(kind, word, English words)] of the words that have a unique translation in the English sentence."""
        words, places = WORD.findall(sentence), []
        for word in words:
            kind, meanings = self.meanings.get(word, (None, ()))
            if kind in self.attested and words.count(word) == 1:
                there = [x for x in sorted(set(meanings)) if x in english and len(place_of(x).findall(english)) == 1]
                if len(there) == 1 and there[0] not in self.unsure:
                    places.append((kind, word, there[0]))
        return places

    def replaced(self, r, sentence, english, places):
        """Replace words at one or two of `places`, in both sentences."""
        for kind, word, meaning in r.sample(places, min(len(places), r.randint(1, 2))):
            other, means = r.choice((self.attested if r.random() < ATTESTED else self.pool)[kind])
            sentence = re.sub(rf"(?<!\w){word}(?!\w)", other, sentence)
            english = place_of(meaning).sub(lambda match: f"{match[1]}{article(means)[1:]} {means}" if match[1]
                                            else means, english)
        return sentence, english


def rows_with(r, words, language, tables, rows):
    """Yield about `rows` rows of a language and English: sentences of the corpus with replaced words (data augmentation
    for rare words, Fadaee, Bisazza and Monz 2017). Files are weighted by the square root of their size."""
    found = []
    for name, columns in sorted(tables.items()):
        if name.startswith(SOURCES) and {language, "en"} <= set(columns):
            pairs = [(a, b) for a, b in zip(columns[language], columns["en"]) if a and b and len(a) <= LONGEST]
            found.append([(a, b, places) for a, b in r.sample(pairs, min(len(pairs), MAX_PAIRS))
                          if (places := words.places(a, b))])
    weight = sum(len(usable) ** 0.5 for usable in found)
    for usable in found:
        for _ in range(round(rows * len(usable) ** 0.5 / weight) if usable else 0):
            yield dict(zip((language, "en"), words.replaced(r, *r.choice(usable))))


# ---- Tables ----------------------------------------------------------------------------------------------------------

def dictionary_tables(tables, known, rows, seed, root="/", log=print):
    """Return the tables "dictionaries", "bridged", "nouns" and "verbs" of dictionaries installed below `root`, or {}.
    `rows`: approximate number of rows for German nouns and for verbs; French and Spanish nouns get half as many each.
    `known`: test sentences, which must not be learned."""
    r, ding = random.Random(seed), os.path.join(root, DING)
    indices = [path for x in PAIRS if os.path.exists(path := os.path.join(root, DICTD.format(x)))]
    entries, forms = (list(f(ding)) if os.path.exists(ding) else [] for f in (ding_entries, ding_forms))
    others = [row for index in indices for row in dictd_rows(index)]
    log(f"dictionaries: {len(entries)} entries of trans-de-en, {len(others)} of {len(indices)} other dictionaries"
        + ("" if entries and others else "; tools/install-deps --train installs missing ones"))
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
