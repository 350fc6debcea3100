"""Back-translated English as training text (Sennrich et al. 2016).

Much English text of the corpus has no translation into some language: Europarl only has French, books only Spanish. A
model translates these sentences. The next model is trained with these translations as sources only, so that all its
targets are written by people. Pairs whose English the model finds least probable, given the translation, are dropped.
"""
import os
import random
import re
import subprocess

SOURCES = ("europarl.en-fr", "europarl_more", "books", "wikipedia")
LANGUAGES = ("de", "fr", "es")
LONGEST, SHORTEST = 260, 30  # characters per English sentence
# fraction of translations to keep: those that make the English most probable
LIKELY = 0.75
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../moe-translate")


def usable(tables, language):
    """Yield rows (language -> cell) with a full English sentence and a translation, but no cell in `language`."""
    for columns in (tables[name] for name in SOURCES if name in tables):
        others = [x for x in columns if x not in ("en", language)]
        made = columns.get(language, [""] * len(columns["en"]))
        for i, sentence in enumerate(columns["en"]):
            row = {x: columns[x][i] for x in others if columns[x][i]}
            if row and not made[i] and SHORTEST <= len(sentence) <= LONGEST and re.search(r'\w[.?!]["»”)]?$', sentence):
                yield {"en": sentence, **row}


def lines_of(program, model, language, lines, *more):
    """Translate lines with moe-translate; return "" for lines that cannot be translated."""
    run = subprocess.run([program, "-m", model, "-t", language, "--split", "0", "--no-protect", *more],
                         input="".join(line + "\n" for line in lines), stdout=subprocess.PIPE, encoding="utf-8")
    if run.returncode not in (0, 1):  # status 1 if some lines could not be translated
        raise SystemExit(f"{program} failed with exit status {run.returncode}")
    return run.stdout.split("\n")[:-1]


def back_tables(tables, model, rows, seed, program=PROGRAM, log=print):
    """Return the tables "back.de", "back.fr" and "back.es": up to `rows` rows each, with one language translated by a
    model."""
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
