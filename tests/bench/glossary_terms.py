#!/usr/bin/env python3
"""Measure how many glossary terms appear in translations (`terms`: 200 terms with
their sentences, sampled from the test sets), and how a glossary of thirty words
affects ordinary sentences (`bleu`).

    tests/python tests/bench/glossary_terms.py terms ../shared/corpus/test
    tests/python tests/bench/glossary_terms.py bleu ../shared/corpus/test
    tests/python tests/bench/glossary_terms.py prompted ../shared/corpus/test \\
        -m MODEL

A term is a word that the model does not translate like the reference; word
co-occurrence finds its translations. A term counts as kept if it appears in the
output as a separate word and replaces the model's own word (some of these were
corrected by hand, see CORRECTED). All terms of a direction form one glossary.
`prompted` measures 200 terms that a decoder-only model does not write by
itself. A term is at the reference's position if the shares of preceding words
differ by at most a quarter.
"""
import argparse
import collections
import lzma
import os
import pathlib
import random
import re
import subprocess
import tempfile

DIRECTIONS = "en-de en-fr en-es de-en fr-en es-en de-fr fr-es".split()
SAMPLE, EACH, SEED = 2000, 25, 43


def words(text):
    return re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)?", text)


def pairs(folder, source, target):
    """Return (rows of Tatoeba's test set, rows of all test sets, for counting co-occurrence)."""
    ordinary, everything = [], []
    for path in sorted(pathlib.Path(folder).glob("*.tsv.xz")):
        lines = lzma.open(path, "rt", encoding="utf-8").read().split("\n")[:-1]
        names = lines[0].split("\t")
        if source not in names or target not in names:
            continue
        rows = [line.split("\t") for line in lines[1:]]
        rows = [(row[names.index(source)], row[names.index(target)]) for row in rows]
        everything += [row for row in rows if all(row)]
        if path.name.startswith("tatoeba"):
            ordinary = [row for row in rows if all(row)]
    return ordinary, everything


class Words:
    """Counts of the words and word pairs in rows, for Dice's coefficient."""

    def __init__(self, rows):
        self.source, self.target, self.both = (collections.Counter() for _ in range(3))
        for a, b in rows:
            s, t = {w.lower() for w in words(a)}, {w.lower() for w in words(b)}
            self.source.update(s)
            self.target.update(t)
            self.both.update((x, y) for x in s for y in t)

    def dice(self, a, b):
        a, b = a.lower(), b.lower()
        both = self.both[a, b]
        return 2 * both / (self.source[a] + self.target[b]) if both > 1 else 0

    def is_term(self, word):
        return len(word) > 3 and 3 <= self.source[word.lower()] <= 150


SEARCH = "--beam", "4", "--rerank", "0"


def translate(moe, model, lines, target, *options, search=SEARCH):
    done = subprocess.run([moe, "-m", model, "-t", target, *search, *options],
                          input="".join(line + "\n" for line in lines), capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: some lines cannot be translated
        raise SystemExit(done.stderr)
    return done.stdout.split("\n")[:-1]


def with_glossary(terms):
    file = tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="utf-8")
    file.write("".join(f"{source}\t{target}\n" for source, target in terms))
    file.flush()
    return file


def partner(known, word, sentence, candidates, least):
    """Return the candidate that translates a word best, or None if the candidate fits another word better."""
    found = max(candidates, key=lambda c: known.dice(word, c), default=None)
    if not found or known.dice(word, found) < least:
        return None
    return found if max(sentence, key=lambda w: known.dice(w, found)).lower() == word.lower() else None


def choose(known, rows, plain, rng):
    """Sample EACH terms; return [(sentence, reference, output, source word, term, the model's word)]."""
    found, used = [], set()
    for (source, reference), output in zip(rows, plain):
        have = {word.lower() for word in words(output)}
        candidates = []
        for word in words(source):
            if not known.is_term(word):
                continue
            term = partner(known, word, words(source), words(reference), 0.1)
            old = partner(known, word, words(source), words(output), 0.1)
            if (term and old and len(term) > 2 and term.lower() not in have and word.lower() not in used
                    and len(os.path.commonprefix([term.lower(), old.lower()])) < 4):
                candidates.append((source, reference, output, word, term, old))
        if candidates:
            found.append(rng.choice(candidates))
            used.add(found[-1][3].lower())
    return rng.sample(found, min(EACH, len(found)))


# The model's words, corrected by hand where Dice's coefficient finds a wrong one; "" if the translation omits
# the word.
CORRECTED = {("en-de", "thinks", "denke"): "glaubt", ("de-en", "mehr", "no"): "", ("de-en", "einmal", "again"): "",
             ("de-en", "Gebrauchtwagen", "car"): "", ("es-en", "quiero", "I"): "would",
             ("de-fr", "getroffen", "l'ai"): "rencontrée", ("de-fr", "Weil", "n'ai"): "Comme",
             ("de-fr", "überall", "cuisine"): "", ("de-fr", "großen", "vivent"): "grande",
             ("fr-es", "même", "sí"): "solo", ("fr-es", "devez", "estar"): "Debes"}


def parts(text):
    """Return the words of a text in lower case. Apostrophes separate words, so "l'anglais" contains "anglais"."""
    return [word.lower() for word in re.findall(r"[^\W\d_]+", text)]


def count(sequence, wanted):
    return sum(sequence[i:i + len(wanted)] == wanted for i in range(len(sequence) - len(wanted) + 1))


def is_kept(case, output, old):
    """Return (whether the term appears, whether the old word has become rarer outside terms)."""
    term, old = parts(case[4]), parts(old)
    before, after = parts(case[2]), parts(output)
    stands = count(after, term) > 0
    if not old or (len(old) > len(term) and old[-len(term):] == term):  # e.g. l'anglais for the term anglais
        return stands, True
    left = [count(text, old) - count(term, old) * count(text, term) for text in (before, after)]
    return stands, left[1] < left[0]


def run_terms(args):
    import sacrebleu
    total = kept = stand = gone = as_chosen = 0
    gains = []
    for direction in args.directions:
        source, target = direction.split("-")
        ordinary, everything = pairs(args.folder, source, target)
        rng = random.Random(f"{args.seed} {direction}")
        rows = rng.sample(ordinary, SAMPLE)
        known = Words(everything)
        plain = translate(args.moe_without, args.model, [a for a, _ in rows], target)
        cases = choose(known, rows, plain, rng)
        with with_glossary((case[3], case[4]) for case in cases) as file:
            outputs = translate(args.moe, args.model, [case[0] for case in cases], target, "--glossary", file.name)
        before, after = (sacrebleu.corpus_bleu(x, [[case[1] for case in cases]]).score
                         for x in ([case[2] for case in cases], outputs))
        gains.append(after - before)
        for case, output in zip(cases, outputs):
            old = CORRECTED.get((direction, case[3], case[5]), case[5])
            stands, is_gone = is_kept(case, output, old)
            as_chosen += all(is_kept(case, output, case[5]))
            total, stand, gone, kept = total + 1, stand + stands, gone + is_gone, kept + (stands and is_gone)
            if args.verbose or (args.failed and not (stands and is_gone)):
                print("# ", "" if stands else "no term", "" if is_gone else "old word",
                      f"{case[3]}={case[4]} ({old}): {case[0]} | {case[2]} -> {output}")
        print(f"# {direction}: {len(cases)} terms; so far {kept} of {total} kept; BLEU of these sentences "
              f"{before:.2f} to {after:.2f}", flush=True)
    print(f"{kept} of {total} terms kept ({100 * kept / total:.1f} %): {stand} appear, {gone} replace the old word; "
          f"{as_chosen} without the corrections; BLEU {sum(gains) / len(gains):+.2f} on average")


def place(text, term):
    """Return the share of words before a term, which may have an ending, in a text, or None."""
    have, term = parts(text), parts(term)
    for i in range(len(have) - len(term) + 1):
        *first, last = have[i:i + len(term)]
        if first == term[:-1] and (last == term[-1] or (last.startswith(term[-1]) and last[len(term[-1]):] in ENDINGS)):
            return i / len(have)
    return None


ENDINGS = "s es e n en er ern em x".split()


def run_prompted(args):
    import sacrebleu
    done, count = [], -(-args.terms // len(args.directions))
    for direction in args.directions:
        source, target = direction.split("-")
        ordinary, everything = pairs(args.folder, source, target)
        rng = random.Random(f"{args.seed} {direction}")
        rows = rng.sample([row for row in ordinary if 5 < len(words(row[0])) < 20], count * 3)
        known = Words(everything)
        search = "--beam", "1", "-s", source, "--max-len-factor", "2", "--max-len-offset", "30"
        cases, used = [], set()
        while rows and len(cases) < count:
            some, rows = rows[:count], rows[count:]
            plain = translate(args.moe_without, args.model, [a for a, _ in some], target, search=search)
            for (text, reference), output in zip(some, plain):
                found = [(word, partner(known, word, words(text), words(reference), 0.1)) for word in words(text)
                         if output != text and known.is_term(word) and word.lower() not in used]
                found = [x for x in found if x[1] and len(x[1]) > 2 and place(output, x[1]) is None]
                if found and len(cases) < count:
                    word, term = rng.choice(found)
                    old = partner(known, word, words(text), words(output), 0.1) or ""
                    cases.append((text, reference, output, word, term, old))
                    used.add(word.lower())
        with with_glossary((case[3], case[4]) for case in cases) as file:
            outputs = translate(args.moe, args.model, [case[0] for case in cases], target, "--glossary", file.name,
                                search=search)
        done += [(*case, output) for case, output in zip(cases, outputs)]
        if args.verbose:
            print(*("# " + " | ".join(row) for row in done[-len(cases):]), sep="\n", flush=True)
    at = [(place(row[-1], row[4]), place(row[1], row[4])) for row in done]
    kept = [pair for pair in at if pair[0] is not None]
    near = sum(abs(a - b) <= 0.25 for a, b in kept)
    replacing = [is_kept(row, row[-1], row[5])[1] for row in done if row[5]]
    lengths = [(len(words(row[-1])), len(words(row[2])), len(words(row[1]))) for row in done]
    new, old, wanted = map(sum, zip(*lengths))
    scores = [metric([row[i] for row in done], [[row[1] for row in done]]).score
              for metric in (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf) for i in (2, -1)]
    print(f"{len(kept)} of {len(done)} terms kept, {near} of them where the reference has them; {sum(replacing)} of "
          f"{len(replacing)} known words of the model are gone; {sum(not a for a, *_ in lengths)} empty; length "
          f"{new / wanted:.2f} of the reference's (without a glossary {old / wanted:.2f}), "
          f"{sum(a > 1.3 * max(b, c) + 2 for a, b, c in lengths)} lines longer than 1.3 times; "
          f"BLEU {scores[0]:.2f} to {scores[1]:.2f}, chrF {scores[2]:.2f} to {scores[3]:.2f}")


def run_bleu(args):
    import sacrebleu
    for direction in args.directions:
        source, target = direction.split("-")
        ordinary, everything = pairs(args.folder, source, target)
        known, rng = Words(everything), random.Random(f"{args.seed} {direction}")
        often = collections.Counter(w.lower() for a, _ in ordinary for w in words(a) if len(w) > 3)
        terms, capital = [], collections.Counter(w for _, b in everything for w in words(b)[1:])
        inside = collections.Counter(w for a, _ in everything for w in words(a)[1:])
        for word, _ in often.most_common(400)[60:]:
            form = max((word, word.capitalize()), key=lambda w: inside[w])
            other = max(known.target, key=lambda w: known.dice(word, w))
            if known.dice(word, other) > 0.3:
                terms.append((form, max((other, other.capitalize()), key=lambda w: capital[w])))
        terms = rng.sample(terms, min(30, len(terms)))
        lines, references = [a for a, _ in ordinary], [[b for _, b in ordinary]]
        plain = translate(args.moe_without, args.model, lines, target)
        with with_glossary(terms) as file:
            given = translate(args.moe, args.model, lines, target, "--glossary", file.name)
        sources = {source.lower() for source, _ in terms}
        touched = [i for i, line in enumerate(lines) if {w.lower() for w in words(line)} & sources]
        scores = [sacrebleu.corpus_bleu(x, references).score for x in (plain, given)]
        part = [sacrebleu.corpus_bleu([x[i] for i in touched], [[references[0][i] for i in touched]]).score
                for x in (plain, given)]
        print(f"{direction}: {len(terms)} terms; BLEU of {len(lines)} sentences {scores[0]:.2f} to {scores[1]:.2f}; "
              f"of the {len(touched)} with a term {part[0]:.2f} to {part[1]:.2f}; "
              f"{sum(a != b for a, b in zip(plain, given))} differ", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["terms", "bleu", "prompted"])
    parser.add_argument("folder", help="with the test sets, as TSV files compressed by xz")
    parser.add_argument("--directions", default=DIRECTIONS, type=lambda s: s.split(","))
    parser.add_argument("-m", "--model", default="models/en-de-fr-es.bin")
    parser.add_argument("--moe", default="./moe-translate")
    parser.add_argument("--moe-without", help="model that selects the terms, to compare versions")
    parser.add_argument("--terms", default=200, type=int, help="number of terms of `prompted` (%(default)s)")
    parser.add_argument("--failed", action="store_true", help="print the terms that were lost")
    parser.add_argument("-v", "--verbose", action="store_true", help="print all terms")
    parser.add_argument("--seed", type=int, default=SEED,
                        help="seed of the sample; the corrections are for %(default)s")
    args = parser.parse_args()
    args.moe_without = args.moe_without or args.moe
    {"terms": run_terms, "bleu": run_bleu, "prompted": run_prompted}[args.what](args)


if __name__ == "__main__":
    main()
