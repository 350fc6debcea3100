#!/usr/bin/env python3
"""Measure model files on the test or dev sets; print the tables of the model
card, or write the tables into a card.

./moe-translate translates every sentence. Scores are sacreBLEU's BLEU and chrF,
printed with the signature.

    tatoeba       six language pairs, 2,000 sentences each, both directions
    newstest2014  de-en and fr-en, both directions
    flores200     FLORES-200 devtest, all twelve directions
    tatoeba-dev   English with each other language, both directions, for
                  model selection
    newstest2012  all twelve directions, also for model selection
    words         recall of words of newstest2012's references: words not in
                  the source, by frequency in the training text, and names
                  that occur in the source
    phrasebook    fraction of 150 everyday phrases whose translation is accepted
                  by tests/train/phrasebook.tsv, in each of the twelve
                  directions, ignoring capitals and punctuation
    common        like phrasebook, for the hundred most frequent sentences of
                  the training text in each direction, with its translations
    balance       how evenly the experts of every mixture are used with given
                  targets, in three domains and overall

Several models are shown in adjacent columns. Below each table is the
probability that chance alone explains the BLEU difference between a model and
the first one (approximate randomisation).

    tools/train/evaluate.py -m models/en-de-fr-es.bin \\
        --corpus ../shared/corpus --card models/README.md --part quality
    tools/train/evaluate.py -m MoE=a.bin dense=b.bin --sets tatoeba \\
        --directions en-de,fr-en,de-es
    tools/train/evaluate.py -m models/en-de-fr-es.bin --sets words --limit 600 \\
        --beam 4 --rerank 0 --card models/README.md --part words
    tools/train/evaluate.py -m models/en-de-fr-es.bin --sets balance \\
        --card models/README.md --part balance

--card FILE replaces the text between the lines "<!-- PART -->" and
"<!-- end of PART -->" of that file.
"""
import common  # must be imported first to extend sys.path and report missing modules
import argparse
import itertools
import json
import lzma
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import unicodedata

import sacrebleu
from sacrebleu.significance import PairedTest

from dictionaries import WORD, occurrences
from report import write_card

LANGUAGES = ("en", "de", "fr", "es")
TEST_FILES = {
    "tatoeba": [f"test/tatoeba-2k.{pair}.tsv.xz" for pair in ("de-en", "de-es", "de-fr", "en-es", "en-fr", "fr-es")],
    "newstest2014": [f"test/wmt_newstest2014.{pair}.tsv.xz" for pair in ("de-en", "fr-en")],
    "flores200": ["test/flores200-devtest.tsv.xz"]}
FILES = TEST_FILES | {
    "tatoeba-dev": [f"dev/tatoeba.{pair}.tsv.xz" for pair in ("en-de", "en-es", "en-fr")],
    "newstest2012": ["dev/wmt_newstest2012.tsv.xz"]}
WORDS, WORDS_DIRECTIONS = "words", "de-en,fr-en,es-en,en-de,en-es"  # for word_table, on newstest2012
PHRASES, COMMON = "phrasebook", "common"  # for phrase_table
COMMON_FILES, COMMON_ROWS, COMMON_LONGEST = ("everyday.*", "tatoeba*", "phrases.*"), 100, 6  # at most 6 words
# For balance_table: number of sentences per direction and domain, and their maximum length in characters.
BALANCE = "balance"
BALANCE_ROWS, BALANCE_LONGEST = 100, 250
DOMAINS = {"Tatoeba": FILES["tatoeba"],
           "Europarl": ["train/europarl_more.tsv.xz"],  # training text, because no Europarl test set has all directions
           "newstest2012": FILES["newstest2012"]}
OFTEN = (30, 300, 3000)  # bounds of the frequency groups of words: occurrences in the training text
NAME = re.compile(r"(?<=[\w,;:)»”\"] )[A-ZÀ-ÖØ-Þ]\w{2,}")  # excludes the first word of a sentence


def read_columns(path):
    """Return language -> list of sentences."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        header, *rows = [line.rstrip("\n").split("\t") for line in file]
    return {language: [row[i] for row in rows] for i, language in enumerate(header)}


def directions(corpus, name):
    """Yield (source language, target language, sources, references)."""
    for file in FILES[name]:
        columns = read_columns(corpus / file)
        known = [language for language in columns if language in LANGUAGES]
        for source in known:
            for target in known:
                if source != target:
                    rows = [(s, t) for s, t in zip(columns[source], columns[target]) if s and t]
                    yield source, target, [s for s, _ in rows], [t for _, t in rows]


def translate(arguments, model, source, target, sentences):
    command = [arguments.translate, "-m", model, "-s", source, "-t", target, "--truncate"]
    for option in ("beam", "rerank", "threads"):
        if getattr(arguments, option) is not None:
            command += [f"--{option}", str(getattr(arguments, option))]
    result = subprocess.run(command, input="\n".join(sentences) + "\n", stdout=subprocess.PIPE, text=True,
                            encoding="utf-8")
    lines = result.stdout.split("\n")[:-1]
    if result.returncode > 1 or len(lines) != len(sentences):
        sys.exit(f"evaluate.py: {' '.join(command)}: exit status {result.returncode}, {len(lines)} lines instead of "
                 f"{len(sentences)}")
    return lines


def mean(values):
    return sum(values) / len(values) if values else float("nan")


def table(arguments, name, models):
    """Measure one test set; return (lines of the table, signatures). `models`: label -> file."""
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    wanted = set(arguments.directions.split(",")) if arguments.directions else None
    digits, scores, chances = 1 if len(models) == 1 else 2, {}, []
    label = lambda x: "" if len(models) == 1 else x + " "  # noqa: E731
    out = [f"| {name} | " + " | ".join(f"{label(x)}BLEU | {label(x)}chrF" for x in models) + " |",
           "|---" * (1 + 2 * len(models)) + "|"]

    def row(title, values):
        out.append(f"| {title} | " + " | ".join(f"{value:.{digits}f}" for value in values) + " |")
    for source, target, sources, references in directions(arguments.corpus, name):
        pair, began, scores_here, outputs = f"{source}-{target}", time.time(), [], []
        if wanted and pair not in wanted:
            continue
        sources, references = sources[:arguments.limit], references[:arguments.limit]
        for model, path in models.items():
            lines = translate(arguments, path, source, target, sources)
            outputs.append((model, lines))
            if arguments.save:
                arguments.save.mkdir(parents=True, exist_ok=True)
                (arguments.save / f"{label(model).strip()}{name}.{pair}").write_text("\n".join(lines) + "\n",
                                                                                     encoding="utf-8")
            scores_here += [bleu.corpus_score(lines, [references]).score, chrf.corpus_score(lines, [references]).score]
        scores[pair] = scores_here
        if len(models) > 1:
            found = PairedTest(outputs, {"BLEU": bleu}, [references], "ar", 1000)()[1]["BLEU"]
            chances.append(f"{pair} " + ", ".join(f"{a} {b.p_value:.2f}" for a, b in list(zip(models, found))[1:]))
        row(pair, scores_here)
        print(f"{name} {pair}: {len(sources)} sentences, {time.time() - began:.0f} s, BLEU",
              *(f"{x:.2f}" for x in scores_here[::2]), file=sys.stderr)
    for title, some in (("with English", [x for pair, x in scores.items() if "en" in pair.split("-")]),
                        ("without", [x for pair, x in scores.items() if "en" not in pair.split("-")])):
        if some:
            row(f"mean, directions {title} ({len(some)})", [mean(x) for x in zip(*some)])
    if chances:
        out += ["", f"Probability that chance explains the BLEU difference from {next(iter(models))}: "
                f"{'; '.join(chances)}."]
    return out, f"BLEU: `{bleu.get_signature()}`; chrF:\n`{chrf.get_signature()}`"


def found_words(source, reference, translation, count, german):
    """Yield (group, found) for the words of a reference that are not in the source, grouped by frequency, and for names
    that are (last group). All words count in German, which capitalises nouns; elsewhere only lower-case words do."""
    ours, theirs = set(WORD.findall(translation)), set(WORD.findall(reference))
    small, known = {word.lower() for word in ours}, {word.lower() for word in WORD.findall(source)}
    for word in {word.lower() for word in theirs} if german else {word for word in theirs if word.islower()}:
        if word.isalpha() and word not in known:
            yield sum(count[word] > x for x in OFTEN), word in small
    for word in theirs.intersection(NAME.findall(source)):
        yield len(OFTEN) + 1, word in ours


def word_table(arguments, models):
    """Return the table of words found, in percent; `models`: label -> file."""
    count = occurrences({path.name: {language: cells for language, cells in read_columns(path).items()
                                     if language in LANGUAGES}
                         for path in sorted((arguments.corpus / "train").glob("*.tsv.xz"))})
    columns = read_columns(arguments.corpus / FILES["newstest2012"][0])
    out = ["| words | " + " | ".join(f"up to {x:,} times" for x in OFTEN) + " | more often | names |",
           "|---" * (len(OFTEN) + 3) + "|"]
    for pair in (arguments.directions or WORDS_DIRECTIONS).split(","):
        source, target = pair.split("-")
        rows = [(a, b) for a, b in zip(columns[source], columns[target]) if a and b][:arguments.limit]
        for label, path in models.items():
            total, right = [0] * (len(OFTEN) + 2), [0] * (len(OFTEN) + 2)
            for (a, b), line in zip(rows, translate(arguments, path, source, target, [a for a, _ in rows])):
                for group, found in found_words(a, b, line, count[target], target == "de"):
                    total[group] += 1
                    right[group] += found
            out.append(f"| {pair}{f' {label}' * (len(models) > 1)} | "
                       + " | ".join(f"{100 * x / y:.1f} of {y}" if y else "-" for x, y in zip(right, total)) + " |")
    return out


def plain(text):
    """Normalise capitals, punctuation, apostrophes and spaces of a phrase."""
    return " ".join(re.sub(r"[^\w']", " ", unicodedata.normalize("NFKC", text).replace("’", "'").lower()).split())


def alternatives(text):
    """Yield all texts that a cell accepts: `a|b` is a or b, `x{a/b} y` is xa y or xb y."""
    for part in text.split("|"):
        pieces = re.split(r"\{([^}]*)\}", part)
        for choice in itertools.product(*(piece.split("/") if i % 2 else [piece] for i, piece in enumerate(pieces))):
            yield plain("".join(choice))


def phrasebook(arguments):
    """Return {(source, target): (texts, sets of accepted translations)} of the phrasebook."""
    phrases = {}  # language -> (texts, sets of accepted texts)
    for line in arguments.phrasebook.read_text(encoding="utf-8").splitlines()[1:]:
        _, language, text, accepted = line.split("\t")
        texts, answers = phrases.setdefault(language, ([], []))
        texts.append(text)
        answers.append(set(alternatives(accepted)))
    return {(source, target): (phrases[source][0], phrases[target][1])
            for source, target in itertools.permutations(LANGUAGES, 2)}


def commonest(arguments):
    """Like phrasebook(), but return the most frequent sentences of the corpus and their translations in the corpus."""
    found = {}  # (source, target) -> plain source -> (source, translations)
    for path in sorted(path for name in COMMON_FILES for path in (arguments.corpus / "train").glob(name)):
        columns = read_columns(path)
        for source, target in itertools.permutations(columns, 2):
            sentences = found.setdefault((source, target), {})
            for text, translation in zip(columns[source], columns[target]):
                if text and translation and len(text.split()) <= COMMON_LONGEST:
                    sentences.setdefault(plain(text), (text, []))[1].append(plain(translation))
    result = {}
    for direction, sentences in found.items():
        most = sorted(sentences.values(), key=lambda x: -len(x[1]))[:COMMON_ROWS]
        result[direction] = [text for text, _ in most], [set(translations) for _, translations in most]
    return result


def phrase_table(arguments, models, name):
    """Return the table of phrases with an accepted translation, in percent; `models`: label -> file."""
    phrases = {PHRASES: phrasebook, COMMON: commonest}[name](arguments)
    heads = ["accepted, %"] if len(models) == 1 else list(models)
    out = [f"| {name} | " + " | ".join(heads) + " |", "|---" * (len(models) + 1) + "|"]
    means = []
    for source, target in itertools.permutations(LANGUAGES, 2):
        if arguments.directions and f"{source}-{target}" not in arguments.directions.split(","):
            continue
        shares = []
        for label, path in models.items():
            texts, answers = phrases[source, target]
            texts = texts[:arguments.limit]
            lines = translate(arguments, path, source, target, texts)
            right = [plain(line) in wanted for line, wanted in zip(lines, answers)]
            shares.append(100 * sum(right) / len(right))
            if arguments.save:
                arguments.save.mkdir(parents=True, exist_ok=True)
                rows = (f"{'accepted' if x else 'rejected'}\t{a}\t{b}\n" for x, a, b in zip(right, texts, lines))
                (arguments.save / f"{label}.{name}.{source}-{target}").write_text("".join(rows), encoding="utf-8")
        means.append(shares)
        out.append(f"| {source}-{target} | " + " | ".join(f"{x:.1f}" for x in shares) + " |")
    return out + [f"| mean ({len(means)}) | " + " | ".join(f"{mean(x):.1f}" for x in zip(*means)) + " |"]


class Balance:
    """Statistics of a mixture of n experts over tokens."""

    def __init__(self, n):
        self.tokens, self.empty, self.load, self.importance = 0, 0, [0] * n, [0.0] * n

    def add(self, entry):
        self.tokens += 1
        self.empty += entry["empty"]
        for expert, weight in zip(entry["experts"], entry["weights"]):
            self.load[expert] += 1
            self.importance[expert] += weight

    def cells(self):
        def variation(values):
            return statistics.pstdev(values) / mean(values)
        return (f"{sum(self.load) / self.tokens:.2f}", f"{100 * self.empty / self.tokens:.1f}",
                f"{variation(self.load):.2f}", f"{max(self.load) / mean(self.load):.2f}", f"{self.load.count(0)}",
                f"{variation(self.importance):.2f}")


def routing(arguments, model, source, target, rows):
    """Return (header, entries) of a file that records the routing of sentence pairs."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as file:
        command = [arguments.translate, "-m", model, "-s", source, "-t", target, "--score", "-q",
                   "--routing", file.name]
        subprocess.run(command, input="".join(f"{a}\t{b}\n" for a, b in rows), stdout=subprocess.DEVNULL,
                       text=True, encoding="utf-8", check=True)
        with open(file.name, encoding="utf-8") as lines:  # reopen, since the file may have been replaced
            header, *entries = map(json.loads, lines)
    return header, entries


def balance_table(arguments, models):
    """Return the table of expert balance over all directions; `models`: label -> file."""
    out = ["| mixture | text | experts per token | empty masks, % | CV(load) | largest / mean load | dead "
           "| CV(weights) |", "|---" * 8 + "|"]
    for label, path in models.items():
        found = {}  # (layer, domain) -> Balance
        for domain, files in DOMAINS.items():
            tables = [read_columns(arguments.corpus / file) for file in files]
            for source, target in itertools.permutations(LANGUAGES, 2):
                if arguments.directions and f"{source}-{target}" not in arguments.directions.split(","):
                    continue
                rows = [(a, b) for columns in tables if {source, target} <= set(columns)
                        for a, b in zip(columns[source], columns[target])
                        if a and b and max(len(a), len(b)) <= BALANCE_LONGEST]
                header, entries = routing(arguments, path, source, target, rows[-(arguments.limit or BALANCE_ROWS):])
                for layer in header["layers"]:
                    for name in (domain, "all"):
                        found.setdefault((layer["layer"], name), Balance(layer["experts"]))
                for entry in entries:
                    found[entry["layer"], domain].add(entry)
                    found[entry["layer"], "all"].add(entry)
        for layer in dict.fromkeys(layer for layer, _ in found):
            for name in (*DOMAINS, "all"):
                row = [f"{f'{label} ' * (len(models) > 1)}{layer}", name, *found[layer, name].cells()]
                out.append("| " + " | ".join(row) + " |")
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, nargs="+", help="model files, or LABEL=FILE")
    parser.add_argument("--corpus", type=pathlib.Path, default=pathlib.Path("../shared/corpus"),
                        help="default: %(default)s")
    parser.add_argument("--sets", default=",".join(TEST_FILES),
                        help="comma-separated list of sets (default: %(default)s)")
    parser.add_argument("--directions", help=f"comma-separated list, e.g. en-de,fr-en (default: all; words: "
                                             f"{WORDS_DIRECTIONS})")
    parser.add_argument("--limit", type=int, help="number of sentences per direction")
    parser.add_argument("--beam", type=int, help="beam size (default: the model's)")
    parser.add_argument("--rerank", type=float, help="weight of reranking (default: the model's)")
    parser.add_argument("--threads", type=int, help="number of threads (default: all processors)")
    parser.add_argument("--translate", default="./moe-translate", help="program to run (default: %(default)s)")
    parser.add_argument("--phrasebook", type=pathlib.Path, default=pathlib.Path("tests/train/phrasebook.tsv"),
                        help="default: %(default)s")
    parser.add_argument("--save", type=pathlib.Path, help="folder for the translations")
    parser.add_argument("--card", type=pathlib.Path, help="file to write the tables into")
    parser.add_argument("--part", default="quality", help="section of the card (default: %(default)s)")
    arguments = parser.parse_args()
    models = dict(x.split("=", 1) if "=" in x else (pathlib.Path(x).stem, x) for x in arguments.model)
    text, signature = "", ""
    for name in arguments.sets.split(","):
        if name == WORDS:
            lines = word_table(arguments, models)
        elif name in (PHRASES, COMMON):
            lines = phrase_table(arguments, models, name)
        elif name == BALANCE:
            lines = balance_table(arguments, models)
        elif name in FILES:
            lines, signature = table(arguments, name, models)
        else:
            parser.error(f"unknown test set {name}; available: {', '.join([*FILES, WORDS, PHRASES, COMMON, BALANCE])}")
        text += "\n" + "\n".join(lines) + "\n"
        print("\n" + "\n".join(lines), flush=True)
    text += f"\n{signature}\n" if signature else ""
    if signature:
        print("\n" + signature)
    if arguments.card:
        write_card(arguments.card, arguments.part, text)


if __name__ == "__main__":
    main()
