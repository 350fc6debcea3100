#!/usr/bin/env python3
"""Live text against translating anew after each word: words that change, lag, time and processor time.

    tests/python tests/bench/live.py [--lines N] [MODEL:LANG]...   default: 300 models/en-de-fr-es.bin:de build/cross/en-pt.bin:pt

Half of the lines are news (newstest2014), half are from Tatoeba; each grows by one word at a time. `anew` translates
every prefix and shows the whole translation; `live` is moe_translate.Live. Prints for each model:

  final bytes   final translations that differ from translate()
  changed       shown words that a later output changes or removes, and the ratio live / anew
  lag           words of the source between the words that first showed word i of the final translation and those with
                which `anew` first showed a word i, on average
  change        milliseconds from a new word to a change of what is shown, if any: median and 95 %; in brackets, those of
                processor time, which other processes do not extend
  processor     seconds of the process, and the ratio live / anew
"""
import argparse
import lzma
import pathlib
import sys
import time

from moe_translate import Live, Translator

ROOT = pathlib.Path(__file__).resolve().parents[2]
CORPUS = ROOT.parent / "shared" / "corpus" / "test"


def english(name, n):
    """Return n evenly spaced English lines of a corpus."""
    with lzma.open(CORPUS / name, "rt", encoding="utf-8") as file:
        column = next(file).rstrip("\n").split("\t").index("en")
        lines = [line.rstrip("\n").split("\t")[column] for line in file]
    return [" ".join(lines[i * len(lines) // n].split()) for i in range(n)]


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Watched:
    """Words and times of a growing line's output."""

    def __init__(self):
        self.changed, self.delays, self.times, self.used, self.processor, self.texts = 0, [], [], [], 0.0, []

    def line(self, words, translate):
        """Let a line grow. Return, for each target word, the number of source words when it first appeared."""
        shown, first = [], []
        for k in range(1, len(words) + 1):
            began, used = time.perf_counter(), time.process_time()
            text = translate(" ".join(words[:k]), k == len(words))
            taken = time.perf_counter() - began
            used = time.process_time() - used
            self.processor += used
            new = text.split()
            self.changed += len(shown) - common(shown, new)
            if new != shown:
                self.times.append(1000 * taken)
                self.used.append(1000 * used)
            shown = new
            first += [k] * (len(new) - len(first))
        self.texts.append(text)
        self.delays.append(first[:len(shown)])


def part(values, share):
    return sorted(values)[int(share * (len(values) - 1))]


def measure(path, target, lines):
    anew, live = Watched(), Watched()
    with Translator(path, target=target, threads=1) as translator:
        translator.translate("Warm up.")
        begun = Live(translator)
        for line in lines:
            words = line.split()
            anew.line(words, lambda text, _: translator.translate(text))
            live.line(words, lambda text, last: (begun.finish if last else begun.update)(text).text)
            begun.update("")
        wanted = translator.translate(lines)
    wrong = sum(a != b for a, b in zip(live.texts, wanted, strict=True))
    lag = [b - a for x, y in zip(anew.delays, live.delays, strict=True) for a, b in zip(x, y, strict=False)]
    print(f"{path} to {target}, {len(lines)} lines, {sum(len(line.split()) for line in lines)} words")
    print(f"  final bytes   {wrong} of {len(lines)} differ")
    print(f"  changed       {live.changed} of {anew.changed} words: {live.changed / anew.changed:.3f}")
    print(f"  lag           {sum(lag) / len(lag):.2f} words")
    for name, one in ("live", live), ("anew", anew):
        times = [f"{part(one.times, x):.0f} ({part(one.used, x):.0f}) ms" for x in (0.5, 0.95)]
        print(f"  change        {name}: {times[0]}, 95 %: {times[1]}")
    print(f"  processor     {live.processor:.1f} of {anew.processor:.1f} s: {live.processor / anew.processor:.3f}",
          flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=300, metavar="N", help="number of lines (default: 300)")
    parser.add_argument("models", nargs="*", metavar="MODEL:LANG", default=["models/en-de-fr-es.bin:de",
                                                                           "build/cross/en-pt.bin:pt"])
    options = parser.parse_args()
    lines = english("wmt_newstest2014.de-en.tsv.xz", options.lines // 2)
    lines += english("tatoeba-2k.de-en.tsv.xz", options.lines - len(lines))
    return any([measure(*one.rsplit(":", 1), lines) for one in options.models])


if __name__ == "__main__":
    sys.exit(main())
