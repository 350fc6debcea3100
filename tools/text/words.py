#!/usr/bin/env python3
"""Write words.inc, frequent words for detecting the language of short texts, and common.inc, frequent words that are
not copied even if a vocabulary lacks some of their letters.

    pip install wordfreq==3.1.1
    tools/text/words.py > tools/text/words.inc
    tools/text/words.py common > tools/text/common.inc
"""

import collections
import math
import re
import sys
import textwrap

import wordfreq

LANGUAGES = ["en", "de", "fr", "es", "it", "nl", "pt"]
WORDS = 2000  # per language
COLUMNS = 116
# Number of words to search for non-ASCII initials; more for German, the shipped model's best language.
BEGINNING = collections.defaultdict(lambda: 10000, de=100000)
# Names, abbreviations and units, which are copied if the vocabulary cannot spell them.
NAMES = """adélaïde alexeï anaïs andreï andré aïcha aïn béjaïa citroën daniël daniëlle delanoë dostoïevski françois
gabriël garcía gaël gaëlle gaëtan gonzález henriëtte héloïse isaïe ismaël josé joão joël joëlle leïla león loïc
lópez maría michaël mickaël mikhaïl moïse müller noëlle qaïda raphaël rodríguez saïd sergueï staël sánchez tolstoï
zoë ºc álava álex álvares álvarez álvaro ángela ávila ângela ângelo édith édouard élie élisabeth élise élodie émile
émilie éric érica érico étienne éva évora évreux ísis ítalo íñigo ñuñoa óscar öaab öamtc öbb öcalan ödp öfb ögb
öhringen ömer öpnv öpp örr ösv ötv ötzi ötztal ötztaler öv övp özcan özdemir özgür özil özils özkan özoguz öztürk
úrsula übach überlingen škoda μg на""".split()

SOURCE = """\
wordfreq 3.1.1 (Robyn Speer, https://github.com/rspeer/wordfreq), whose data are under CC BY-SA 4.0
 * (https://creativecommons.org/licenses/by-sa/4.0/), and so is this file. wordfreq credits Wikipedia, SUBTLEX (Marc
 * Brysbaert et al.), OpenSubtitles (http://www.opensubtitles.org/), Google Books Ngrams, OSCAR, and others. */"""

HEAD = """\
/* The {words} most frequent words of some languages: language, -10 log10 of the frequency, words. words.py made it of
 * """ + SOURCE

COMMON_HEAD = """\
/* Words with letters that are not ASCII, by their bytes: of the {words} most frequent ones of the languages in
 * words.inc, and of the {beginning} most frequent ones ({german} German ones) those that begin with such a letter;
 * without names; ss stands for \u00df. words.py made it of
 * """ + SOURCE


def frequencies(language):
    """Return {word: frequency}; words are runs of letters, as in words.c."""
    found = collections.Counter()
    for text, frequency in wordfreq.get_frequency_dict(language, "large").items():
        for word in re.findall(r"[^\W\d_]+", text.lower()):
            found[word] += frequency
    return found


def lines(words, columns):
    return textwrap.wrap(" ".join(words), columns, break_long_words=False, break_on_hyphens=False)


def common():
    words = set()
    for language in LANGUAGES:
        frequent = [word for word, _ in frequencies(language).most_common(BEGINNING[language])]
        words.update(word for word in frequent[:WORDS] if not word.isascii())
        words.update(word for word in frequent if not word[0].isascii() and len(word) > 1)
    print(COMMON_HEAD.format(words=f"{WORDS:,}", beginning=f"{BEGINNING['en']:,}",
                             german=f"{BEGINNING['de']:,}"))
    print(*lines([f'"{word}",' for word in sorted(words - set(NAMES), key=str.encode)], COLUMNS), sep="\n")


def main():
    print(HEAD.format(words=f"{WORDS:,}"))
    for language in LANGUAGES:
        levels = collections.defaultdict(list)
        for word, frequency in frequencies(language).most_common(WORDS):
            levels[round(-10 * math.log10(frequency))].append(word)
        for level, words in sorted(levels.items()):
            begin = f'{{ "{language}", {level}, "'
            for line in lines(words, COLUMNS - len(begin)):
                print(f'{begin}{line}" }},')


if __name__ == "__main__":
    common() if "common" in sys.argv else main()
