#!/usr/bin/env python3
"""Measure model files on the test sets and print the tables of the card, or write them into it.

Every sentence goes through ./moe-translate as a user would run it; scores are sacreBLEU's BLEU and chrF with the signature
printed. tatoeba-2k: six language pairs, 2,000 sentences each, both directions; newstest2014: de-en and fr-en, both directions;
FLORES-200 devtest: all twelve directions. Several models stand side by side.

    tools/evaluate.py -m models/en-de-fr-es.bin --corpus ../shared/corpus --card models/README.md --part quality
    tools/evaluate.py -m MoE=a.bin dense=b.bin --sets tatoeba --directions en-de,fr-en,de-es

--card replaces what stands between the lines "<!-- PART -->" and "<!-- end of PART -->" of that file.
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
    for option in ("beam", "rerank", "threads"):
        if getattr(arguments, option) is not None:
            command += [f"--{option}", str(getattr(arguments, option))]
    result = subprocess.run(command, input="\n".join(sentences) + "\n", stdout=subprocess.PIPE, text=True, encoding="utf-8")
    lines = result.stdout.split("\n")[:-1]
    if result.returncode > 1 or len(lines) != len(sentences):
        sys.exit(f"evaluate.py: {' '.join(command)} gave {len(lines)} lines for {len(sentences)}, status {result.returncode}")
    return lines


def mean(values):
    return sum(values) / len(values) if values else float("nan")


def table(arguments, name, models):
    """The lines of the table of one test set; `models`: label -> file."""
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    wanted = set(arguments.directions.split(",")) if arguments.directions else None
    digits, scores = 1 if len(models) == 1 else 2, {}
    label = lambda x: "" if len(models) == 1 else x + " "  # noqa: E731
    out = [f"| {name} | " + " | ".join(f"{label(x)}BLEU | {label(x)}chrF" for x in models) + " |", "|---" * (1 + 2 * len(models)) + "|"]

    def row(title, values):
        out.append(f"| {title} | " + " | ".join(f"{value:.{digits}f}" for value in values) + " |")
    for source, target, sources, references in directions(arguments.corpus, name):
        pair, began, scores_here = f"{source}-{target}", time.time(), []
        if wanted and pair not in wanted:
            continue
        sources, references = sources[:arguments.limit], references[:arguments.limit]
        for model, path in models.items():
            lines = translate(arguments, path, source, target, sources)
            if arguments.save:
                arguments.save.mkdir(parents=True, exist_ok=True)
                (arguments.save / f"{label(model).strip()}{name}.{pair}").write_text("\n".join(lines) + "\n", encoding="utf-8")
            scores_here += [bleu.corpus_score(lines, [references]).score, chrf.corpus_score(lines, [references]).score]
        scores[pair] = scores_here
        row(pair, scores_here)
        print(f"{name} {pair}: {len(sources)} sentences, {time.time() - began:.0f} s, BLEU", *(f"{x:.2f}" for x in scores_here[::2]),
              file=sys.stderr)
    for title, some in (("with English", [x for pair, x in scores.items() if "en" in pair.split("-")]),
                        ("without", [x for pair, x in scores.items() if "en" not in pair.split("-")])):
        if some:
            row(f"mean, directions {title} ({len(some)})", [mean(x) for x in zip(*some)])
    return out, f"BLEU: `{bleu.get_signature()}`; chrF: `{chrf.get_signature()}`"


def write_card(path, part, text):
    card, begin, end = path.read_text(encoding="utf-8"), f"<!-- {part} -->\n", f"<!-- end of {part} -->"
    if card.count(begin) != 1 or card.count(end) != 1:
        sys.exit(f"evaluate.py: {path} has no lines {begin.strip()} and {end}, or several")
    path.write_text(card[:card.index(begin) + len(begin)] + text + card[card.index(end):], encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, nargs="+", help="model files, or LABEL=FILE")
    parser.add_argument("--corpus", type=pathlib.Path, default=pathlib.Path("../shared/corpus"), help="default: %(default)s")
    parser.add_argument("--sets", default=",".join(FILES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--directions", help="comma-separated, for instance en-de,fr-en (default: all)")
    parser.add_argument("--limit", type=int, help="only the first so many sentences of each direction")
    parser.add_argument("--beam", type=int, help="default: the model's")
    parser.add_argument("--rerank", type=float, help="default: the model's")
    parser.add_argument("--threads", type=int, help="default: all processors")
    parser.add_argument("--translate", default="./moe-translate", help="program to run (default: %(default)s)")
    parser.add_argument("--save", type=pathlib.Path, help="folder for the translations")
    parser.add_argument("--card", type=pathlib.Path, help="file to write the tables into")
    parser.add_argument("--part", default="quality", help="place in the card (default: %(default)s)")
    arguments = parser.parse_args()
    models = dict(x.split("=", 1) if "=" in x else (pathlib.Path(x).stem, x) for x in arguments.model)
    text = ""
    for name in arguments.sets.split(","):
        if name not in FILES:
            parser.error(f"no test set is called {name}; known: {', '.join(FILES)}")
        lines, signature = table(arguments, name, models)
        text += "\n" + "\n".join(lines) + "\n"
        print("\n" + "\n".join(lines), flush=True)
    print("\n" + signature)
    if arguments.card:
        write_card(arguments.card, arguments.part, text + "\n" + signature + "\n")


if __name__ == "__main__":
    main()
