"""Phrase pairs around the rarer words of the corpus.

A small model hardly learns words that occur only a few hundred times, each time as one of about thirty tokens.
`phrase_table` extracts short phrases around such words, which teach a word with a quarter as many tokens.

Words are aligned by IBM model 1 with a preference for the diagonal (Dyer, Chahuneau and Smith 2013), trained in both
directions by expectation maximisation; only links found in both directions are used. Phrase pairs are defined as in
phrase-based translation (Koehn, Och and Marcu 2003): no word inside is linked to a word outside.
"""
import re

import numpy as np

WORD = re.compile(r"\w+")
SOURCES = ("tatoeba.", "europarl", "wikipedia", "dialogue", "books", "guides", "debian_web", "apps", "bible")
MAX_PAIRS = 400_000  # maximum number of sentence pairs to align per language pair
LONGEST = 32          # maximum words per sentence
ROUNDS = 4            # iterations of expectation maximisation
NULL, TENSION = 0.08, 6.0  # probability of the empty word; strength of the preference for the diagonal
# minimum product of a link's posteriors in both directions: for any link, and for a link to extract phrases around
LINK, ANCHOR = 0.2, 0.4
RAREST, COMMONEST = 4, 6000  # minimum and maximum occurrences of a link's rarer word, for extracting phrases


# ---- Alignment -------------------------------------------------------------------------------------------------------

class Side:
    """Sentences of one language as word numbers, which start at 1: `ids` [words], `starts` and `lengths` [sentences],
    and `count` [vocabulary + 1], occurrences of each word."""

    def __init__(self, cells):
        numbers, ids, lengths = {}, [], []
        for cell in cells:
            words = WORD.findall(cell)
            ids += [numbers.setdefault(word.lower(), len(numbers) + 1) for word in words]
            lengths.append(len(words))
        self.ids, self.lengths = np.asarray(ids, np.int64), np.asarray(lengths, np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.count = np.bincount(self.ids, minlength=len(numbers) + 1)

    def rows(self, rows, length):
        """Return the words [rows, length] of sentences that all have this length."""
        return self.ids[self.starts[rows][:, None] + np.arange(length)]


def chunks(left, right):
    """Yield chunks of sentence pairs with equal lengths on each side: (pair numbers, left [b, n], right [b, m])."""
    usable = np.nonzero((np.minimum(left.lengths, right.lengths) > 0)
                        & (np.maximum(left.lengths, right.lengths) <= LONGEST))[0]
    key = left.lengths[usable] * (LONGEST + 1) + right.lengths[usable]
    order = np.argsort(key, kind="stable")
    for group in np.split(usable[order], np.nonzero(np.diff(key[order]))[0] + 1):
        if len(group):
            n, m = int(left.lengths[group[0]]), int(right.lengths[group[0]])
            step = 1 + 1_000_000 // (n * m)
            for at in range(0, len(group), step):
                rows = group[at:at + step]
                yield rows, left.rows(rows, n), right.rows(rows, m)


class Table:
    """t(target word | source word) of one direction, stored as hashed counts. Source word 0 is the empty word."""

    def __init__(self, source, pairs, reverse):
        """Train the table. `source`: the source Side; `pairs()` returns `chunks`; `reverse`: the source is `right`."""
        cells = sum(a.size * b.shape[1] for _, a, b in pairs())
        self.bits = min(27, max(10, (4 * cells).bit_length()))  # a few hash collisions do no harm
        self.counts = self.totals = None
        for _ in range(ROUNDS):
            counts, totals = np.zeros(1 << self.bits, np.float32), np.zeros(len(source.count), np.float32)
            for _, a, b in pairs():
                p, slots, words = self.expected(*((b, a) if reverse else (a, b)))
                np.add.at(counts, slots.ravel(), p.ravel())
                np.add.at(totals, words.ravel(), p.sum(2).ravel())
            self.counts, self.totals = counts, np.maximum(totals, 1e-6)

    def expected(self, source, target):
        """Return the posterior [b, n + 1, m] of each source position (the first is the empty word) for each target
        position of words [b, n] and [b, m], the slots [b, n + 1, m] of word pairs, and source words [b, n + 1]."""
        n, m = source.shape[1], target.shape[1]
        source = np.concatenate([np.zeros((len(source), 1), np.int64), source], 1)
        mixed = (source.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))[:, :, None] + \
            (target.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F))[:, None, :]
        slots = (mixed >> np.uint64(64 - self.bits)).astype(np.int64)
        near = np.exp(-TENSION * np.abs((np.arange(n)[:, None] + 0.5) / n - (np.arange(m) + 0.5) / m))
        prior = np.concatenate([np.full((1, m), NULL), (1 - NULL) * near / near.sum(0)]).astype(np.float32)
        p = np.broadcast_to(prior, slots.shape)
        if self.counts is not None:
            p = p * (self.counts[slots] / self.totals[source][:, :, None] + np.float32(1e-9))
        return p / p.sum(1, keepdims=True), slots, source


def agreement(left, right):
    """Yield (pair numbers, left words [b, n], right words [b, m], product of both directions' posteriors [b, n, m])."""
    def pairs():
        return chunks(left, right)
    forward, backward = Table(left, pairs, False), Table(right, pairs, True)
    for rows, a, b in pairs():
        yield rows, a, b, forward.expected(a, b)[0][:, 1:] * backward.expected(b, a)[0][:, 1:].transpose(0, 2, 1)


# ---- Phrases ---------------------------------------------------------------------------------------------------------

def cut(links, i, j, generator):
    """Return the bounds (first and last left word, first and last right word) of a phrase pair of random size and
    position that contains left word i and right word j, with at most seven left words; None if impossible."""
    n = len(links)
    for size in range(int(generator.integers(2, 8)), 1, -1):
        starts = np.arange(max(0, i - size + 1), min(i, n - size) + 1)
        for first in generator.permutation(starts):
            inside = links[first:first + size]
            if inside[0].any() and inside[-1].any():
                columns = np.nonzero(inside.any(0))[0]
                c, d = columns[0], columns[-1]
                if d - c < 2 * size and c <= j <= d and links[:, c:d + 1].sum() == inside[:, c:d + 1].sum():
                    return first, first + size - 1, c, d
    return (i, i, j, j) if links[i].sum() == links[:, j].sum() == 1 else None


def span(cell, first, last):
    """Return the text from a first to a last word."""
    words = list(WORD.finditer(cell))
    return cell[words[first].start():words[last].end()]


def phrase_pairs(lefts, rights, seed):
    """Return distinct phrase pairs of parallel sentences, sorted: about 2 sqrt(f) for a word with f occurrences."""
    generator, found = np.random.default_rng(seed), set()
    left, right = Side(lefts), Side(rights)
    for rows, a, b, both in agreement(left, right):
        rarer = np.minimum(left.count[a][:, :, None], right.count[b][:, None, :])
        chosen = (both > ANCHOR) & (rarer >= RAREST) & (rarer <= COMMONEST)
        chosen &= generator.random(both.shape, np.float32) < 2 / np.sqrt(rarer)
        for at, i, j in zip(*np.nonzero(chosen)):
            bounds = cut(both[at] > LINK, i, j, generator)
            if bounds:
                found.add((span(lefts[rows[at]], *bounds[:2]), span(rights[rows[at]], *bounds[2:])))
    return sorted(found)


def phrase_table(tables, pivot, seed, log=print):
    """Return the phrases of every language paired with `pivot` as one table with two cells per row."""
    table = {language: [] for table in tables.values() for language in table}
    for language in sorted(set(table) - {pivot}):
        pairs = [(a, b) for name, columns in sorted(tables.items()) if name.startswith(SOURCES)
                 and {pivot, language} <= set(columns) for a, b in zip(columns[pivot], columns[language]) if a and b]
        if not pairs:
            continue
        chosen = np.random.default_rng([seed, 1]).permutation(len(pairs))[:MAX_PAIRS]
        log(f"phrases: aligning {len(chosen)} of {len(pairs)} pairs of {pivot} and {language}")
        found = phrase_pairs(*zip(*(pairs[at] for at in np.sort(chosen))), [seed, 2])
        log(f"phrases: {len(found)} in {pivot} and {language}")
        for cells in table.values():
            cells += [""] * len(found)
        if found:
            table[pivot][-len(found):], table[language][-len(found):] = zip(*found)
    return table
