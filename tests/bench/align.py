#!/usr/bin/env python3
"""Compare moe-align with the statistical aligner of tools/train/phrases.py on the
Tatoeba dev sentences.

The aligner is trained on about a hundred times as many sentence pairs. Its
links count as sure if the product of both directions' probabilities is at least
0.5. Prints the share of sure links that moe-align finds, and the share of sure
links among its links at words with a sure link. No human alignment exists.

    tests/python tests/bench/align.py -m models/en-de-fr-es.bin \\
        --corpus ../shared/corpus --share 0.5 0.7 1
"""
import argparse
import os
import subprocess

import numpy as np

import data
import phrases

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

SURE = 0.5


def places(cell):
    """Return, for each word of the statistical aligner, the index of the space-separated word that contains it."""
    return [cell[:match.start()].count(" ") for match in phrases.WORD.finditer(cell)]


def sure_links(train, dev):
    """Return {number of the pair: {(source word, target word)}} for all dev pairs that the aligner can align."""
    lefts, rights = (list(a) + list(b) for a, b in zip(train, dev))
    found = {}
    for rows, _, _, both in phrases.agreement(phrases.Side(lefts), phrases.Side(rights)):
        for row, links in zip(rows, both):
            if row >= len(train[0]):
                left, right = places(lefts[row]), places(rights[row])
                found[int(row) - len(train[0])] = {(left[i], right[j]) for i, j in zip(*np.nonzero(links >= SURE))}
    return found


def agree(lines, sure):
    """Return (number of moe-align's links, share of the sure links that it finds, share of sure links among its links
    at words with a sure link)."""
    total = right = known = links = 0
    for number, wanted in sure.items():
        mine = {tuple(map(int, x.split("-"))) for x in lines[number].split()}
        lefts, rights = ({link[side] for link in wanted} for side in (0, 1))
        links += len(mine)
        total += len(wanted)
        right += len(mine & wanted)
        known += sum(a in lefts or b in rights for a, b in mine)
    return links, right / max(total, 1), right / max(known, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--corpus", default="../shared/corpus")
    parser.add_argument("--share", nargs="+", default=["0.7"], help="of moe-align (default: 0.7)")
    parser.add_argument("--align", default="./moe-align", help="program to run (default: %(default)s)")
    o = parser.parse_args()
    print("| | links | of the sure links | sure of its links |\n|---|---|---|---|")
    for language in "de", "fr", "es":
        table = data.read_table(os.path.join(o.corpus, "train", f"tatoeba.en-{language}.tsv.xz"))
        dev = data.read_dev(o.corpus, f"tatoeba.en-{language}", "en", language, None)
        sure = sure_links((table["en"], table[language]), dev)
        for share in o.share:
            out = subprocess.run([o.align, "-m", o.model, "-s", "en", "-t", language, "--share", share], check=True,
                                 text=True,
                                 input="".join(f"{a}\t{b}\n" for a, b in zip(*dev)),
                                 stdout=subprocess.PIPE).stdout.split("\n")
            links, found, true = agree(out, sure)
            print(f"| en-{language}, --share {share} | {links} | {100 * found:.0f} % | {100 * true:.0f} % |",
                  flush=True)


if __name__ == "__main__":
    main()
