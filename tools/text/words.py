#!/usr/bin/env python3
"""Write words.inc, the frequent words by which the languages of short texts are told.

    pip install wordfreq==3.1.1
    tools/text/words.py > tools/text/words.inc
"""

import collections
import math
import re

import wordfreq

LANGUAGES = ["en", "de", "fr", "es", "it", "nl", "pt"]
WORDS = 2000  # of each language
COLUMNS = 116

HEAD = """\
/* The {words} most frequent words of some languages: language, -10 log10 of the frequency, words. words.py made it of
 * wordfreq 3.1.1 (Robyn Speer, https://github.com/rspeer/wordfreq), whose data are under CC BY-SA 4.0
 * (https://creativecommons.org/licenses/by-sa/4.0/), and so is this file. wordfreq credits Wikipedia, SUBTLEX (Marc
 * Brysbaert et al.), OpenSubtitles (http://www.opensubtitles.org/), Google Books Ngrams, OSCAR, and others. */"""


def frequencies(language):
    """{word: frequency}, where a word is a run of letters, as in words.c."""
    found = collections.Counter()
    for text, frequency in wordfreq.get_frequency_dict(language, "large").items():
        for word in re.findall(r"[^\W\d_]+", text.lower()):
            found[word] += frequency
    return found


def main():
    print(HEAD.format(words=f"{WORDS:,}"))
    for language in LANGUAGES:
        levels = collections.defaultdict(list)
        for word, frequency in frequencies(language).most_common(WORDS):
            levels[round(-10 * math.log10(frequency))].append(word)
        for level, words in sorted(levels.items()):
            begin = f'{{ "{language}", {level}, "'
            line = ""
            for word in [*words, None]:
                if line and (word is None or len(begin + line) + len(word) > COLUMNS):
                    print(f'{begin}{line[:-1]}" }},')
                    line = ""
                line += f"{word} "


if __name__ == "__main__":
    main()
