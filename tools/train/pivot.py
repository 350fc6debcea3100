"""Spanish made of French, as training text to translate from.

The corpus has ten times as much French as Spanish beside its English. Apertium translates between those two with a
dictionary and rules (Forcada et al. 2011; Debian: apertium and apertium-fr-es, which `tools/install-deps --train`
installs), better than a small model does. So the French of Europarl becomes Spanish too, and what Apertium lacks words
for, or makes the least likely Spanish of, is left out. `pivot_table` makes rows of English, French and Spanish. The
Spanish is a machine's: it is only ever the source (back-translation, Sennrich et al. 2016), so that what is learned to
be written is what people wrote.
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
LONGEST, SHORTEST = 250, 30  # characters of a French sentence
CHUNK = 2000                 # sentences that Apertium is given at a time
# share of the translations that is used, those with the smallest share of new pairs of words
LIKELY = 0.7

WORDS = re.compile(r"\w+|[^\w\s]")
UNKNOWN = re.compile(r"\*(?=\w)")  # how Apertium marks a word it does not know, which it leaves as it is


def translated(sentences, program):
    """Their translations, one for each, or none for all where Apertium did not keep the lines apart."""
    run = subprocess.run([program, MODE], input="".join(sentence + "\n" for sentence in sentences),
                         stdout=subprocess.PIPE,
                         encoding="utf-8", errors="replace")
    lines = run.stdout.split("\n")[:-1]
    return lines if run.returncode == 0 and len(lines) == len(sentences) else [""] * len(sentences)


def tidied(spanish, french):
    """A translation with single spaces and the first letter as the French one, names that were left as they are
    unmarked; "" if another word is unknown or half of it is missing."""
    if any(not spanish[x.end()].isupper() for x in UNKNOWN.finditer(spanish)):
        return ""
    spanish = re.sub(r" ([,.;:?!])", r"\1", " ".join(UNKNOWN.sub("", spanish).split()))
    spanish = re.sub(r"^\w", lambda match: match[0].upper(), spanish) if french[0].isupper() else spanish
    return spanish if len(french) < 2 * len(spanish) < 4 * len(
        french) and "@" not in spanish and "#" not in spanish else ""


def pairs(sentence):
    words = WORDS.findall(sentence.lower())
    return list(zip(["", *words], [*words, ""]))


def pivot_table(tables, rows, seed, program="apertium", log=print):
    """The table "pivot" made of up to `rows` rows, language -> cells; none without Apertium. Which pairs of Spanish
    words are known is learned from all tables."""
    usable = [(a, b) for columns in (tables[name] for name in SOURCES if name in tables)
              for a, b in zip(columns["en"], columns["fr"])
              if a and SHORTEST <= len(b) <= LONGEST and re.search(r"\w[.?!]$", b)]
    if not usable or not shutil.which(program) or MODE not in subprocess.run([program, "-l"], capture_output=True,
                                                                             text=True).stdout.split():
        log("pivot: no Spanish is made of French" + "; tools/install-deps --train installs Apertium" * bool(usable))
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
    log(f"pivot: {len(found)} rows of Spanish made of French, of {len(usable)} translated")
    return {"pivot": dict(zip(("en", "fr", "es"), map(list, zip(*(row[1:] for row in found)))))} if found else {}
