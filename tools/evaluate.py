#!/usr/bin/env python3
"""Measure a model file on the test sets and print the tables of its card.

Every sentence goes through ./moe-translate as a user would run it; scores are sacreBLEU's BLEU and chrF with the signature
printed. tatoeba-2k: six language pairs, 2,000 sentences each, both directions; newstest2014: de-en and fr-en, both directions;
FLORES-200 devtest: all twelve directions.

    tools/evaluate.py -m models/en-de-fr-es.bin --corpus ../shared/corpus
    tools/evaluate.py -m a.bin --against b.bin --sets tatoeba --directions en-de,fr-en,de-es
"""
import argparse
import lzma
import pathlib
import subprocess
import sys
import time

import sacrebleu

LANGUAGES = ("en", "de", "fr", "es")
FILES = {
    "tatoeba": [f"tatoeba-2k.{pair}.tsv.xz" for pair in ("de-en", "de-es", "de-fr", "en-es", "en-fr", "fr-es")],
    "newstest2014": [f"wmt_newstest2014.{pair}.tsv.xz" for pair in ("de-en", "fr-en")],
    "flores200": ["flores200-devtest.tsv.xz"],
}


def read_columns(path):
    """Language -> list of sentences."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        header, *rows = [line.rstrip("\n").split("\t") for line in file]
    return {language: [row[i] for row in rows] for i, language in enumerate(header)}


def directions(corpus, name):
    """Yield (source language, target language, sources, references)."""
    for file in FILES[name]:
        columns = read_columns(corpus / "test" / file)
        known = [language for language in columns if language in LANGUAGES]
        for source in known:
            for target in known:
                if source != target:
                    rows = [(s, t) for s, t in zip(columns[source], columns[target]) if s and t]
                    yield source, target, [s for s, _ in rows], [t for _, t in rows]


def translate(arguments, model, source, target, sentences):
    command = [arguments.translate, "-m", model, "-s", source, "-t", target, "--truncate"]
    for option in ("beam", "threads"):
        if getattr(arguments, option):
            command += [f"--{option}", str(getattr(arguments, option))]
    result = subprocess.run(command, input="\n".join(sentences) + "\n", stdout=subprocess.PIPE, text=True, encoding="utf-8")
    lines = result.stdout.split("\n")[:-1]
    if result.returncode > 1 or len(lines) != len(sentences):
        sys.exit(f"evaluate.py: {' '.join(command)} gave {len(lines)} lines for {len(sentences)}, status {result.returncode}")
    return lines


def mean(values):
    return sum(values) / len(values) if values else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="model file")
    parser.add_argument("--against", help="a second model file: print its BLEU and the difference beside")
    parser.add_argument("--corpus", type=pathlib.Path, default=pathlib.Path("../shared/corpus"), help="default: %(default)s")
    parser.add_argument("--sets", default=",".join(FILES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--directions", help="comma-separated, for instance en-de,fr-en (default: all)")
    parser.add_argument("--limit", type=int, help="only the first so many sentences of each direction")
    parser.add_argument("--beam", type=int, help="default: the model's")
    parser.add_argument("--threads", type=int, help="default: all processors")
    parser.add_argument("--translate", default="./moe-translate", help="program to run (default: %(default)s)")
    parser.add_argument("--save", type=pathlib.Path, help="folder for the translations")
    arguments = parser.parse_args()
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    wanted = set(arguments.directions.split(",")) if arguments.directions else None
    for name in arguments.sets.split(","):
        if name not in FILES:
            parser.error(f"no test set is called {name}; known: {', '.join(FILES)}")
        scores = {}
        print(f"\n| {name} | BLEU | chrF |" + (" BLEU of the other | difference |" if arguments.against else ""))
        print("|---|---|---|" + ("---|---|" if arguments.against else ""))
        for source, target, sources, references in directions(arguments.corpus, name):
            pair = f"{source}-{target}"
            if wanted and pair not in wanted:
                continue
            sources, references = sources[:arguments.limit], references[:arguments.limit]
            began = time.time()
            lines = translate(arguments, arguments.model, source, target, sources)
            if arguments.save:
                arguments.save.mkdir(parents=True, exist_ok=True)
                (arguments.save / f"{name}.{pair}").write_text("\n".join(lines) + "\n", encoding="utf-8")
            scores[pair] = bleu.corpus_score(lines, [references]).score
            row = f"| {pair} | {scores[pair]:.1f} | {chrf.corpus_score(lines, [references]).score:.1f} |"
            if arguments.against:
                other = bleu.corpus_score(translate(arguments, arguments.against, source, target, sources), [references]).score
                row += f" {other:.2f} | {scores[pair] - other:+.2f} |"
            print(row, flush=True)
            print(f"{name} {pair}: {len(lines)} sentences, {time.time() - began:.0f} s", file=sys.stderr)
        english = [score for pair, score in scores.items() if "en" in pair.split("-")]
        others = [score for pair, score in scores.items() if "en" not in pair.split("-")]
        print(f"| mean, directions with English ({len(english)}) | {mean(english):.1f} | |" + (" | |" if arguments.against else ""))
        if others:
            print(f"| mean, directions without ({len(others)}) | {mean(others):.1f} | |" + (" | |" if arguments.against else ""))
    print(f"\nBLEU: `{bleu.get_signature()}`; chrF: `{chrf.get_signature()}`")


if __name__ == "__main__":
    main()
