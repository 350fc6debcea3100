#!/usr/bin/env python3
"""Measure a translation memory with the PO files of two releases: the first release is the memory, and the lines of the
second one that differ are the test.

    tests/python tests/bench/memory.py --old bookworm/po --new trixie/po --source en --target de

Both folders contain NAME.LANGUAGE.po. To get them, download the source packages of both releases (apt-get source
--download-only dpkg git coreutils nano wget) and extract each package's po/de.po as dpkg.de.po. The memory gets the
single-line messages of all old files; the test has each message of a new file once. Prints chrF2 without and with the
memory by the kind of match, the lines that became worse, and the time of a lookup.
"""
import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tempfile

import polib


def pairs(folder, language):
    """Return the finished single-line translations of all files, in order."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob(f"*.{language}.po")):
        for entry in polib.pofile(str(path)):
            if entry.obsolete or "fuzzy" in entry.flags or not entry.msgid:
                continue
            forms = entry.msgstr_plural
            texts = [(entry.msgid, entry.msgstr)] if not entry.msgid_plural else [
                (entry.msgid, forms.get(0)), (entry.msgid_plural, forms.get(1))]
            for source, target in texts:
                source, target = (source or "").strip(), (target or "").strip()
                if source and target and not set("\n\t\r") & set(source + target) and source[0] != "#":
                    found[source] = target
    return found


def chrf(hypothesis, reference):
    """Return chrF2 of a sentence, as sacreBLEU's default."""
    hypothesis, reference = hypothesis.replace(" ", ""), reference.replace(" ", "")
    precision = recall = orders = 0
    for n in range(1, 7):
        a, b = (collections.Counter(s[i:i + n] for i in range(len(s) - n + 1)) for s in (hypothesis, reference))
        if a and b:
            same, orders = sum((a & b).values()), orders + 1
            precision, recall = precision + same / sum(a.values()), recall + same / sum(b.values())
    return 100 * 5 * precision * recall / (4 * precision + recall) / orders if precision else 0


def translate(args, lines, *options):
    done = subprocess.run([args.moe, "-m", args.model, "-s", args.source, "-t", args.target, "--json", *options],
                          input="".join(line + "\n" for line in lines), stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.split("\n")[:-1]]


def mean(numbers):
    return sum(numbers) / len(numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--old", required=True)
    parser.add_argument("--new", required=True)
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--moe", default="./moe-translate")
    parser.add_argument("--model", default="models/en-de-fr-es.bin")
    parser.add_argument("--show", type=int, default=5, help="print this many lines that became worse")
    args = parser.parse_args()
    old, new = pairs(args.old, args.target), pairs(args.new, args.target)
    changed = [source for source in new if source not in old]
    print(f"{len(old)} pairs; {len(new)} new messages, {len(new) - len(changed)} of them exact")
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="utf-8") as file:
        file.write("".join(f"{source}\t{target}\n" for source, target in old.items()))
        file.flush()
        after = translate(args, changed, "--memory", file.name)
    before = translate(args, changed)
    rows = collections.defaultdict(list)
    for source, one, two in zip(changed, before, after):
        match = two.get("matches", [None])[0]
        scores = [chrf(x.get("translation", ""), new[source]) for x in (one, two)]
        rows[match["match"] if match else "none"].append((*scores, match and chrf(match["target"], new[source]),
                                                          source, one, two))
    rows["adapted or fuzzy"] = rows["adapted"] + rows["repaired"] + rows["fuzzy"]
    print("match             lines  without   with   change  worse  by >5  the pair's own translation")
    for kind in "adapted", "repaired", "fuzzy", "adapted or fuzzy", "none":
        found = rows[kind]
        if found:
            a, b = (mean([row[i] for row in found]) for i in (0, 1))
            own = f"{mean([row[2] for row in found]):7.1f}" if kind != "none" else ""
            print(f"{kind:17} {len(found):5} {a:8.1f} {b:6.1f} {b - a:+8.1f} "
                  f"{sum(row[1] < row[0] for row in found):6} {sum(row[1] < row[0] - 5 for row in found):6} {own}")
    for row in sorted(rows["adapted or fuzzy"], key=lambda row: row[1] - row[0])[:args.show]:
        print(f"\n{row[1] - row[0]:+.1f}  {row[3]}\n  reference  {new[row[3]]}\n  without    {row[4]['translation']}\n"
              f"  with       {row[5]['translation']}\n  match      {row[5]['matches'][0]['source']}")


if __name__ == "__main__":
    sys.exit(main())
