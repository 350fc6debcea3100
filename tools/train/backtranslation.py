"""English translated by a model, as training text to translate from.

The corpus has much English that one language or another has no translation of: Europarl beside French, books beside
Spanish. A model translates it into what is missing, and a pair of the two teaches the next model to write what people
wrote (back-translation, Sennrich et al. 2016). What the model made is only ever the source. The pairs of which the same
model finds the English the least probable, given what it made of it, are left out.
"""
import os
import random
import re
import subprocess

SOURCES = ("europarl.en-fr", "europarl_more", "books", "wikipedia")
LANGUAGES = ("de", "fr", "es")
LONGEST, SHORTEST = 260, 30  # characters of an English sentence
# share of the translations that is used, those from which the English is the most probable
LIKELY = 0.75
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../moe-translate")


def usable(tables, language):
    """Rows of cells, language -> cell, that have a whole sentence in English, some translation, but none into
    `language`."""
    for columns in (tables[name] for name in SOURCES if name in tables):
        others = [x for x in columns if x not in ("en", language)]
        made = columns.get(language, [""] * len(columns["en"]))
        for i, sentence in enumerate(columns["en"]):
            row = {x: columns[x][i] for x in others if columns[x][i]}
            if row and not made[i] and SHORTEST <= len(sentence) <= LONGEST and re.search(r'\w[.?!]["»”)]?$', sentence):
                yield {"en": sentence, **row}


def lines_of(program, model, language, lines, *more):
    """What moe-translate answers to these lines: as many. An empty answer to what it cannot do."""
    run = subprocess.run([program, "-m", model, "-t", language, "--split", "0", "--no-protect", *more],
                         input="".join(line + "\n" for line in lines), stdout=subprocess.PIPE, encoding="utf-8")
    if run.returncode not in (0, 1):  # 1: some lines could not be translated
        raise SystemExit(f"{program} failed with exit status {run.returncode}")
    return run.stdout.split("\n")[:-1]


def back_tables(tables, model, rows, seed, program=PROGRAM, log=print):
    """The tables "back.de", "back.fr" and "back.es", each of up to `rows` rows of which one language is made by the
    model file `model`."""
    found = {}
    for language in LANGUAGES:
        chosen = list(usable(tables, language))
        chosen = random.Random(seed).sample(chosen, min(rows, len(chosen)))
        if not chosen:
            continue
        log(f"back.{language}: translating {len(chosen)} sentences")
        made = lines_of(program, model, language, [row["en"] for row in chosen], "--beam", "4", "--rerank", "0")
        kept = [{**row, language: cell} for row, cell in zip(chosen, made) if cell]
        scores = lines_of(program, model, "en", [f"{row[language]}\t{row['en']}" for row in kept], "--score")
        ranked = []
        for i, score in enumerate(scores):
            if score:
                logprob, tokens = score.split("\t")
                ranked.append((float(logprob) / int(tokens), i))
        kept = [kept[i] for _, i in sorted(ranked, reverse=True)[:round(LIKELY * len(ranked))]]
        log(f"back.{language}: {len(kept)} rows kept")
        if kept:
            names = sorted({x for row in kept for x in row})
            found["back." + language] = {x: [row.get(x, "") for row in kept] for x in names}
    return found
