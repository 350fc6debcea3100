"""Everyday phrases: greetings, directions, restaurant, doctor, times, letters.

Everyday phrases are rare in the corpus, because people collect remarkable sentences. everyday.tsv has patterns in four
languages and words for their slots: "Where is {the place}?" with "station Bahnhof m gare f ...".

The slot {place} stands for the bare word. A form before the name adds an article or adjective of the language: {the
place}, {der place}, {dem place}, {le place}, {du place}, {el place}. Some adjectives replace the noun: {cerrado place}
gives "cerrado" or "cerrada". {day2} and {day} are different days. {time}, {hour}, {number} and others are generated.
A line "= NAME" starts the words of a slot, "= WORD NAME" words without gender, and "= SAY" the patterns.
"""
import pathlib
import random
import re

LANGUAGES = ("en", "de", "fr", "es")
FILE = pathlib.Path(__file__).with_name("everyday.tsv")
PHRASEBOOK = pathlib.Path(__file__).parents[2] / "tests/train/phrasebook.tsv"  # for testing models
LIMIT = 60   # maximum sentences per pattern
REPEATS = 8  # rows per pattern without slots
VOWEL = re.compile(r"[aeiouyhâàéèêîôœAEIOUÉÎ]")
MARK = re.compile(r"\{(?:([^{}]+) )?(\w+?)(\d?)\}")

GERMAN = {form: dict(zip("mfn", words.split())) for form, words in {
    "der": "der die das", "den": "den die das", "dem": "dem der dem", "im": "im in-der im",
    "ein": "ein eine ein", "einen": "einen eine ein", "kein": "kein keine kein", "keinen": "keinen keine kein",
    "mein": "mein meine mein", "meinen": "meinen meine mein", "meinem": "meinem meiner meinem",
    "Ihr": "Ihr Ihre Ihr", "Ihren": "Ihren Ihre Ihr", "Ihrem": "Ihrem Ihrer Ihrem",
    "der next": "der-nächste die-nächste das-nächste"}.items()}
FRENCH = {"le": ("le", "la", "les"), "un": ("un", "une", "des"), "mon": ("mon", "ma", "mes"),
          "du": ("du", "de la", "des"), "votre": ("votre", "votre", "vos"), "de": ("de", "de", "de"),
          "le prochain": ("le prochain", "la prochaine", "les prochains")}
FRENCH_ELIDED = {"le": "l'", "mon": "mon ", "du": "de l'", "de": "d'"}
SPANISH = {"el": ("el", "la"), "un": ("un", "una"), "mi": ("mi", "mi"), "su": ("su", "su"),
           "el próximo": ("el próximo", "la próxima")}

CONTRACTIONS = {  # contractions of each language
    "de": ((r"\b([Zz])u dem\b", r"\1um"), (r"\b([Zz])u der\b", r"\1ur"), (r"\b([Ii])n dem\b", r"\1m"),
           (r"\b([Bb])ei dem\b", r"\1eim")),
    "fr": ((r"\bà le\b", "au"), (r"\bÀ le\b", "Au"), (r"\bà les\b", "aux"), (r"\bde le\b", "du"),
           (r"\bde les\b", "des")),
    "es": ((r"\ba el\b", "al"), (r"\bA el\b", "Al"), (r"\bde el\b", "del"), (r"\b([Ss])on la una\b", r"Es la una"))}


# ---- Numbers and times -----------------------------------------------------------------------------------------------

ONES = {
    "en": "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
          "seventeen eighteen nineteen",
    "de": "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
          "siebzehn achtzehn neunzehn",
    "fr": "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept "
          "dix-huit dix-neuf",
    "es": "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis "
          "diecisiete dieciocho diecinueve"}
ONES = {language: words.split() for language, words in ONES.items()}
TENS = {"en": "twenty thirty forty fifty sixty seventy eighty ninety".split(),
        "de": "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split(),
        "fr": "vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt".split(),
        "es": "veinte treinta cuarenta cincuenta sesenta setenta ochenta noventa".split()}
TWENTIES = ("veinte veintiuno veintidós veintitrés veinticuatro veinticinco veintiséis veintisiete veintiocho "
            "veintinueve").split()


def spelled(language, n):
    """Spell out 0 to 99."""
    ten, one = divmod(n, 10)
    if n < 20:
        return ONES[language][n]
    word = TENS[language][ten - 2]
    if language == "en":
        return word + (f"-{ONES['en'][one]}" if one else "")
    if language == "de":
        return ({1: "ein"}.get(one, ONES["de"][one]) + "und" if one else "") + word
    if language == "es":
        return TWENTIES[one] if ten == 2 else word + (f" y {ONES['es'][one]}" if one else "")
    if ten in (7, 9):
        one += 10
    if n == 80:
        return "quatre-vingts"
    join = " et " if one in (1, 11) and ten < 8 else "-"
    return word + (join + ONES["fr"][one] if one else "")


def clock(hour):
    """Return {language: hour as part of a time}, such as "three", "drei", "trois heures", "las tres"."""
    return {"en": ONES["en"][hour], "de": ONES["de"][hour],
            "fr": {1: "une heure", 12: "midi"}.get(hour, ONES["fr"][hour] + " heures"),
            "es": "la una" if hour == 1 else "las " + ONES["es"][hour]}


def a_time(r):
    hour = r.randint(1, 12)
    now, after = clock(hour), clock(hour % 12 + 1)
    minutes = r.choice((5, 10, 20))
    word = {language: spelled(language, minutes) for language in LANGUAGES}
    return r.choice((
        {**now, "en": now["en"] + " o'clock", "de": ("ein" if hour == 1 else now["de"]) + " Uhr"},
        {"en": "half past " + now["en"], "de": "halb " + after["de"],
         "fr": now["fr"] + (" et demi" if hour == 12 else " et demie"), "es": now["es"] + " y media"},
        {"en": "a quarter past " + now["en"], "de": "Viertel nach " + now["de"], "fr": now["fr"] + " et quart",
         "es": now["es"] + " y cuarto"},
        {"en": "a quarter to " + after["en"], "de": "Viertel vor " + after["de"], "fr": after["fr"] + " moins le quart",
         "es": after["es"] + " menos cuarto"},
        {"en": f"{word['en']} past {now['en']}", "de": f"{word['de']} nach {now['de']}",
         "fr": f"{now['fr']} {word['fr']}", "es": f"{now['es']} y {word['es']}"},
        {"en": f"{word['en']} to {after['en']}", "de": f"{word['de']} vor {after['de']}",
         "fr": f"{after['fr']} moins {word['fr']}", "es": f"{after['es']} menos {word['es']}"}))


def a_number(r, low, high):
    """Return a number that does not end in 1, because "one" agrees with the gender of the noun."""
    n = r.choice([n for n in range(low, high + 1) if n % 10 != 1])
    in_digits = n > 12 and r.random() < 0.5
    return {language: str(n) if in_digits else spelled(language, n) for language in LANGUAGES}


def some_digits(r):
    digits = [r.randint(1, 9) for _ in range(r.randint(3, 6))]
    join = r.choice((" ", ", "))
    return {language: join.join(ONES[language][digit] for digit in digits) for language in LANGUAGES}


MADE = {"time": a_time, "hour": lambda r: clock(r.randint(1, 12)), "number": lambda r: a_number(r, 2, 60),
        "few": lambda r: a_number(r, 2, 8), "age": lambda r: a_number(r, 3, 90), "digits": some_digits,
        "small": lambda r: dict.fromkeys(LANGUAGES, str(r.randint(2, 28)))}


# ---- Forms -----------------------------------------------------------------------------------------------------------

def adjective(language, word, gender):
    if language == "es":
        return word[:-1] + "a" if gender.startswith("f") and word.endswith("o") else word
    if word == "le plus proche":
        return ("la" if gender == "f" else "le") + " plus proche"
    return {"cher": "chère", "délicieux": "délicieuse"}.get(word, word + "e") if gender == "f" else word


def formed(language, form, word):
    """Return a word (text, gender) in a form, or the bare word if the form is None."""
    noun, gender = word
    if form is None:
        return noun
    if language == "en":
        article = form if form != "a" else "an" if re.match("[aeio]|hour|umbrella|uncle|underground", noun) else "a"
        return f"{article} {noun}"
    if language == "de":
        return f"{GERMAN[form][gender].replace('-', ' ')} {noun}"
    if language == "fr":
        if form in FRENCH_ELIDED and gender != "p" and VOWEL.match(noun):
            return FRENCH_ELIDED[form] + noun
        return f"{FRENCH[form]['mfp'.index(gender)]} {noun}" if form in FRENCH else adjective("fr", form, gender)
    if form in SPANISH:
        return f"{SPANISH[form][gender == 'f' or gender != 'm' and form not in ('el', 'un')]} {noun}"
    return adjective("es", form, gender)


def finished(language, sentence):
    for pattern, whole in CONTRACTIONS.get(language, ()):
        sentence = re.sub(pattern, whole, sentence)
    first = re.search(r"\w", sentence)
    return sentence[:first.start()] + sentence[first.start()].upper() + sentence[first.end():]


# ---- The table -------------------------------------------------------------------------------------------------------

def read(path=FILE):
    """Return (slots: name -> list of {language: (text, gender)}, patterns: list of {language: text})."""
    slots, patterns, section, gendered = {}, [], None, False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        head, *cells = line.split("\t")
        if head == "=":
            section, gendered = cells[0].split()[-1], not cells[0].startswith("WORD")
        elif section == "SAY":
            patterns.append(dict(zip(LANGUAGES, cells, strict=True)))
        else:
            pairs = [(cell, "") if language == "en" or not gendered else tuple(cell.rsplit(" ", 1))
                     for language, cell in zip(LANGUAGES, cells, strict=True)]
            slots.setdefault(section, []).append(dict(zip(LANGUAGES, pairs)))
    return slots, patterns


def fill(r, slots, pattern):
    """Fill the slots of a pattern at random; return {language: text}."""
    chosen = {}
    for name, number in sorted({mark[1:] for text in pattern.values() for mark in MARK.findall(text)}):
        if name in MADE:
            chosen[name, number] = {language: (text, "") for language, text in MADE[name](r).items()}
        else:
            taken = [word for key, word in chosen.items() if key[0] == name]
            chosen[name, number] = r.choice([word for word in slots[name] if word not in taken])
    return {language: finished(language, MARK.sub(
        lambda mark: formed(language, mark[1], chosen[mark[2], mark[3]][language]), text))
            for language, text in pattern.items()}


def everyday_table(seed, excluded=()):
    """Return language -> sentences. Rows that equal one of `excluded`, except for case and punctuation, are omitted."""
    r, (slots, patterns) = random.Random(seed), read()
    bare = {plain(text) for text in excluded}
    table = {language: [] for language in LANGUAGES}
    for pattern in patterns:
        if any(MARK.search(text) for text in pattern.values()):
            rows = list(dict.fromkeys(tuple(fill(r, slots, pattern).values()) for _ in range(2 * LIMIT)))[:LIMIT]
        else:
            rows = [tuple(pattern.values())] * REPEATS
        for row in rows:
            if not any(plain(text) in bare for text in row):
                for language, text in zip(LANGUAGES, row):
                    table[language].append(text)
    return table


def phrasebook(path=PHRASEBOOK):
    """Return the phrases for testing models, in all languages, or [] if the file is missing."""
    if not path.exists():
        return []
    return [line.split("\t")[2] for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def plain(text):
    return " ".join(re.findall(r"\w+", text.lower()))


if __name__ == "__main__":
    made = everyday_table(seed=1, excluded=phrasebook())
    for sentences in zip(*(made[language] for language in LANGUAGES)):
        print("\t".join(sentences))
