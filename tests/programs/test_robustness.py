#!/usr/bin/env python3
"""The shipped translation model with realistic, noisy input: 2,000 lines, 500
for each of four target languages.

    test_robustness.py            prints `ok NAME` and `FAIL NAME`
    test_robustness.py --show     also prints rates and some translations
    test_robustness.py -m FILE    tests another model

Every line must have a translation, which is empty only for an empty line.
Models may hallucinate and repeat themselves endlessly, so the translation of a
line of N tokens may have at most 3 N + 10 tokens. LIMITS has upper bounds for
two rates: lines of N words with translations over 3 N + 10 words, and
translations with repetitions that the line does not have. It also has lower
bounds for preserved numbers, addresses and emoji.
"""
import argparse
import json
import os
import random
import re
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
LANGUAGES = ("en", "de", "fr", "es")
LINES = 500  # per target language

SENTENCES = {
    "en": """The weather is very nice today. | I would like a cup of tea, please. | My brother works in a small shop.
        Can you tell me where the station is? | She did not want to talk about it. | We have been waiting for two hours.
        The meeting was moved to next week. | He bought a new car last month. | Do you have time tomorrow morning?
        The children are playing in the garden. | I have lost my keys again. | That is not what I wanted to say.
        The government has announced a new plan for the schools. | Please open the window, it is too hot in here.""",
    "de": """Das Wetter ist heute sehr schön. | Ich hätte gern eine Tasse Tee.
        Mein Bruder arbeitet in einem kleinen Laden.
        Können Sie mir sagen, wo der Bahnhof ist? | Sie wollte nicht darüber sprechen. | Wir warten seit zwei Stunden.
        Die Sitzung wurde auf nächste Woche verschoben. | Er hat letzten Monat ein neues Auto gekauft.
        Hast du morgen früh Zeit? | Die Kinder spielen im Garten. | Ich habe wieder meine Schlüssel verloren.
        Das wollte ich nicht sagen. | Die Regierung hat einen neuen Plan für die Schulen angekündigt.""",
    "fr": """Il fait très beau aujourd'hui. | Je voudrais une tasse de thé, s'il vous plaît.
        Mon frère travaille dans un petit magasin.
        Pouvez-vous me dire où est la gare ? | Elle ne voulait pas en parler. | Nous attendons depuis deux heures.
        La réunion a été reportée à la semaine prochaine. | Il a acheté une nouvelle voiture le mois dernier.
        As-tu le temps demain matin ? | Les enfants jouent dans le jardin. | J'ai encore perdu mes clés.
        Ce n'est pas ce que je voulais dire. | Le gouvernement a annoncé un nouveau plan pour les écoles.""",
    "es": """Hoy hace muy buen tiempo. | Quisiera una taza de té, por favor. | Mi hermano trabaja en una tienda pequeña.
        ¿Puede decirme dónde está la estación? | Ella no quería hablar de eso. | Llevamos dos horas esperando.
        La reunión se aplazó a la semana que viene. | El mes pasado compró un coche nuevo.
        ¿Tienes tiempo mañana por la mañana?
        Los niños juegan en el jardín. | He vuelto a perder mis llaves. | Eso no es lo que quería decir.
        El gobierno ha anunciado un nuevo plan para las escuelas.""",
}
SENTENCES = {language: [s.strip() for s in re.split(r"\||\n", text)] for language, text in SENTENCES.items()}

EMOJI = "😀 😂 👍 ❤️ 🎉 🚀 😢 🙏 🔥 ☕".split()
SCRIPTS = ((0x0430, 0x044F), (0x03B1, 0x03C9), (0x4E00, 0x4FFF), (0x3042, 0x3093), (0x05D0, 0x05EA), (0x0627, 0x064A),
           (0xAC00, 0xAD00))


def address(r):
    word = lambda: "".join(r.choice("abcdeghilmnoprstuw") for _ in range(r.randint(4, 8)))  # noqa: E731
    return r.choice((f"https://www.{word()}.org/{word()}", f"http://{word()}.com", f"{word()}@{word()}.net",
                     f"www.{word()}.de"))


def number(r):
    return r.choice((str(r.randint(10, 99)), str(r.randint(1000, 9999)), f"{r.randint(1, 23)}:{r.randint(10, 59)}",
                     f"{r.randint(1, 99)}.{r.randint(1, 9)}", f"{r.randint(100, 999)}-{r.randint(100, 999)}"))


def foreign(r, words):
    low, high = r.choice(SCRIPTS)
    return " ".join("".join(chr(r.randint(low, high)) for _ in range(r.randint(2, 7))) for _ in range(words))


def typos(r, text):
    letters = list(text)
    for _ in range(max(1, len(letters) // 12)):
        i = r.randrange(len(letters) - 1)
        letters[i], letters[i + 1] = letters[i + 1], letters[i]
    return "".join(letters)


def joined(r, s, what):
    """Return a line and the part that its translation must contain."""
    return r.choice((f"{s} {what}", f"{what} {s}")), what


# Functions of (random numbers, sentence, all sentences of its language) that return a line or (line, required part).
KINDS = {
    "empty": lambda r, s, some: r.choice(("", " ", "\t")),
    "one word": lambda r, s, some: r.choice(re.findall(r"\w+", s)),
    "capitals": lambda r, s, some: s.upper(),
    "no capitals, no points": lambda r, s, some: re.sub(r"[^\w ']", "", s.lower()),
    "typing errors": lambda r, s, some: typos(r, s),
    "numbers": lambda r, s, some: joined(r, s, number(r)),
    "addresses": lambda r, s, some: joined(r, s, address(r)),
    "emoji": lambda r, s, some: joined(r, s, r.choice(EMOJI)),
    "unknown script": lambda r, s, some: foreign(r, r.randint(1, 6)),
    "unknown script inside": lambda r, s, some: f"{s[:-1]} {foreign(r, 1)}{s[-1]}",
    "signs only": lambda r, s, some: "".join(r.choice("!?.,;:-()[]{}<>/\\|*+=#%&@^~_\"'")
                                             for _ in range(r.randint(1, 30))),
    "one letter": lambda r, s, some: r.choice("aeoxz!?") * r.randint(5, 80),
    "a repeated word": lambda r, s, some: " ".join([r.choice(re.findall(r"\w+", s))] * r.randint(3, 30)),
    "words in any order": lambda r, s, some: " ".join(r.sample(s.split(), len(s.split()))),
    "already translated": lambda r, s, some: s,
    "two sentences": lambda r, s, some: f"{s} {r.choice(some)}",
    "very long": lambda r, s, some: " ".join(r.choice(some) for _ in range(r.randint(6, 40))),
    "markup": lambda r, s, some: f"<p class=\"{r.choice('abc')}\">{s}</p>",
    "code": lambda r, s, some: f"for (int i = 0; i < {r.randint(2, 99)}; i++) x[i] = {r.randint(1, 9)};",
}


def lines(target, seed):
    """Yield 500 noisy lines as (kind, language, line, required part or None)."""
    r = random.Random(f"{target} {seed}")
    for i in range(LINES):
        kind = list(KINDS)[i % len(KINDS)]
        language = target if kind == "already translated" else r.choice([x for x in LANGUAGES if x != target])
        line = KINDS[kind](r, r.choice(SENTENCES[language]), SENTENCES[language])
        yield kind, language, *(line if isinstance(line, tuple) else (line, None))


def repeats(text):
    """Return whether one to four words occur four times in a row, or up to eight characters twelve times."""
    return bool(re.search(r"(?<!\S)(\S+(?: \S+){0,3})(?: \1){3}(?!\S)", text) or re.search(r"(\S{1,8}?)\1{11}", text))


def translate(model, target, some, *options):
    command = [os.path.join(BIN, "moe-translate"), "-m", model, "-t", target, "-q", "--device", "cpu", "--truncate",
               *options]
    result = subprocess.run(command, input="".join(x + "\n" for x in some), stdout=subprocess.PIPE, text=True,
                            encoding="utf-8",
                            cwd=ROOT)
    return result.returncode, result.stdout.split("\n")[:-1]


# Limits in percent: upper limits for "too long" and "repeats", lower limits for preserved parts.
LIMITS = {"too long": 1, "repeats": 3, "numbers": 85, "addresses": 60, "emoji": 60}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="models/en-de-fr-es.bin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true")
    o = parser.parse_args()
    count, wordy, looped, kept, examples, failures = {}, {}, {}, {}, {}, []
    for target in LANGUAGES:
        asked = list(lines(target, o.seed))
        status, answers = translate(o.model, target, [line for _, _, line, _ in asked])
        details, objects = translate(o.model, target, [line for _, _, line, _ in asked], "--json")
        # Status 1: lines whose numbers or brackets the model loses stay untranslated.
        if not {status, details} <= {0, 1} or not len(asked) == len(answers) == len(objects):
            failures.append(f"to {target}: status {status}, {details}; {len(answers)} answers to {len(asked)} lines")
            continue
        for (kind, language, line, what), answer, whole in zip(asked, answers, map(json.loads, objects)):
            count[kind] = count.get(kind, 0) + 1
            if not line.strip() and answer != line:
                failures.append(f"to {target}: {line!r} became {answer!r}")
            if len(whole.get("ids", [])) > 3 * len(whole["source_ids"]) + 10:
                failures.append(f"to {target}, {kind}: {len(whole['source_ids'])} tokens became {len(whole['ids'])}: "
                                f"{line!r}")
            long = len(answer.split()) > 3 * len(line.split()) + 10
            bad = repeats(answer) and not repeats(line)
            wordy[kind] = wordy.get(kind, 0) + long
            looped[kind] = looped.get(kind, 0) + bad
            if what:
                kept[kind] = kept.get(kind, 0) + (what in answer)
            examples.setdefault(kind, []).append((bad + 2 * long, f"{language}-{target} {line!r}: {answer!r}"))
    lines_in_all = max(1, sum(count.values()))
    rates = {"too long": 100 * sum(wordy.values()) / lines_in_all,
             "repeats": 100 * sum(looped.values()) / lines_in_all,
             **{kind: 100 * n / count[kind] for kind, n in kept.items()}}
    if o.show:
        for kind in count:
            print(f"{kind}: {count[kind]} lines, {wordy[kind]} too long, {looped[kind]} repeat themselves" +
                  (f", {kept[kind]} preserved" if kind in kept else ""))
            for bad, text in sorted(examples[kind], key=lambda x: -x[0])[:6]:
                print("   ", ("    ", "LOOP", "LONG", "BOTH")[bad], text[:300])
    within = {kind: rate <= LIMITS[kind] if kind in ("too long", "repeats") else rate >= LIMITS[kind]
              for kind, rate in rates.items()}
    names = {"too long": "of the translations are too long", "repeats": "of the translations repeat themselves"}
    checks = [(f"{sum(count.values())} noisy lines get translations of normal length", not failures and count,
               "; ".join(failures[:5])),
              *((f"{rate:.1f} % {names.get(kind, f'of the {kind} are kept')}", within[kind],
                 f"the limit is {LIMITS[kind]} %")
                for kind, rate in rates.items())]
    for name, good, why in checks:
        print(f"ok {name}" if good else f"FAIL {name}: {why}")


if __name__ == "__main__":
    main()
