"""Training text with Spanish translated from French.

The corpus has ten times as much French as Spanish paired with English. Apertium translates French to Spanish with a
dictionary and rules (Forcada et al. 2011; Debian: apertium and apertium-fr-es, installed by `tools/install-deps
--train`), and does so better than a small model. `pivot_table` translates the French of Europarl and adds the Spanish
to rows of English and French, dropping translations with unknown words and the least probable ones. Machine-translated
text is only used as the source (back-translation, Sennrich et al. 2016), so that people wrote all targets.
"""
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

SOURCES = ("europarl.en-fr",)
MODE = "fr-es"
LONGEST, SHORTEST = 250, 30  # characters per French sentence
CHUNK = 2000                 # sentences per call of Apertium
# fraction of translations to keep: those with the fewest unseen word pairs
LIKELY = 0.7

WORDS = re.compile(r"\w+|[^\w\s]")
UNKNOWN = re.compile(r"\*(?=\w)")  # Apertium's mark for unknown words, which are not translated


def translated(sentences, program):
    """Translate sentences; return "" for all sentences if Apertium changed the number of lines."""
    run = subprocess.run([program, MODE], input="".join(sentence + "\n" for sentence in sentences),
                         stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
    lines = run.stdout.split("\n")[:-1]
    return lines if run.returncode == 0 and len(lines) == len(sentences) else [""] * len(sentences)


def tidied(spanish, french):
    """Normalise a translation and unmark untranslated names. Return "" if other words are unknown or if the length is
    implausible."""
    if any(not spanish[x.end()].isupper() for x in UNKNOWN.finditer(spanish)):
        return ""
    spanish = re.sub(r" ([,.;:?!])", r"\1", " ".join(UNKNOWN.sub("", spanish).split()))
    spanish = re.sub(r"^\w", lambda match: match[0].upper(), spanish) if french[0].isupper() else spanish
    return spanish if 0.5 < len(spanish) / len(french) < 2 and not {"@", "#"} & set(spanish) else ""


def pairs(sentence):
    words = WORDS.findall(sentence.lower())
    return list(zip(["", *words], [*words, ""]))


def pivot_table(tables, rows, seed, program="apertium", log=print):
    """Return the table "pivot" with up to `rows` rows, or {} if Apertium is missing. A word pair is known if any of
    `tables` contains it."""
    usable = [(a, b) for columns in (tables[name] for name in SOURCES if name in tables)
              for a, b in zip(columns["en"], columns["fr"])
              if a and SHORTEST <= len(b) <= LONGEST and re.search(r"\w[.?!]$", b)]
    if not usable or not shutil.which(program) or MODE not in subprocess.run([program, "-l"], capture_output=True,
                                                                             text=True).stdout.split():
        log("pivot: no Spanish from French" + "; tools/install-deps --train installs Apertium" * bool(usable))
        return {}
    usable = random.Random(seed).sample(usable, min(rows, len(usable)))
    chunks = [usable[at:at + CHUNK] for at in range(0, len(usable), CHUNK)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(lambda chunk: translated([french for _, french in chunk], program), chunks))
    seen = Counter(pair for table in tables.values() for cell in table.get("es", ()) for pair in pairs(cell))
    found = []
    for chunk, spanish in zip(chunks, made):
        for (english, french), cell in zip(chunk, spanish):
            if cell := tidied(cell, french):
                new = [not seen[pair] for pair in pairs(cell)]
                found.append((sum(new) / len(new), english, french, cell))
    found = sorted(found)[:round(LIKELY * len(found))]
    log(f"pivot: kept {len(found)} of {len(usable)} sentences translated from French to Spanish")
    return {"pivot": dict(zip(("en", "fr", "es"), map(list, zip(*(row[1:] for row in found)))))} if found else {}
