"""Training data for moe: reading the corpus, the vocabulary, the mix of sources, batches.

The corpus is a folder of `train/*.tsv.xz` and `dev/*.tsv.xz` files: a header row of language codes, then one row per unit
and one column per language; any two non-empty cells of a row are a pair, usable in both directions.

`prepare` turns it into a cache: a SentencePiece model trained on a balanced sample and, for every file and language, the
pieces of all cells as one flat uint16 array with offsets. `Mixture` draws pairs from that cache by shares of target
tokens, each source shuffled without replacement, and cuts them into batches of sentences of like length.
"""
import glob
import json
import lzma
import os

import numpy as np
import sentencepiece

LANGUAGES = ("en", "de", "fr", "es")
PAD, UNK, BOS, EOS = 0, 1, 2, 3
TAG = {language: 4 + i for i, language in enumerate(LANGUAGES)}  # the first source token names the target language
DIRECTIONS = tuple((a, b) for a in LANGUAGES for b in LANGUAGES if a != b)

# Shares of target tokens: file -> (directions with English, directions without). They are normalised over what exists.
SHARES = {
    "tatoeba.en-de": (0.115, 0), "tatoeba.en-fr": (0.110, 0), "tatoeba.en-es": (0.110, 0),
    "tatoeba_pivot.de-fr": (0, 0.048), "tatoeba_pivot.de-es": (0, 0.048), "tatoeba_pivot.fr-es": (0, 0.045),
    "europarl.en-fr": (0.150, 0), "europarl_more": (0.080, 0.030), "europarl_pivot": (0, 0.015),
    "wikipedia": (0.060, 0.014), "dialogue": (0.020, 0.004), "books": (0.050, 0.015),
    "guides": (0.030, 0.015), "debian_web": (0.015, 0.010), "apps": (0.007, 0.003),
    "phpdoc": (0.005, 0.002), "pydoc": (0.004, 0), "gnomehelp": (0.002, 0.001), "debhandbook": (0.003, 0.002),
    "mozilla_www": (0.002, 0.001), "bible": (0.004, 0.002), "suttacentral": (0.003, 0.001), "interface": (0.003, 0.001),
    "picard": (0.0005, 0), "cryptpad": (0.0005, 0),
}


# ---- Reading -----------------------------------------------------------------------------------------------------------

def read_table(path):
    """The columns of one corpus file: language -> list of cells (empty string: no translation)."""
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        header = file.readline().rstrip("\n").split("\t")
        rows = [line.rstrip("\n").split("\t") for line in file]
    return {language: [row[i] if i < len(row) else "" for row in rows]
            for i, language in enumerate(header) if language in LANGUAGES}


def read_dev(corpus, name, source, target, limit):
    """The first `limit` pairs of a dev file in one direction: (source texts, target texts)."""
    table = read_table(os.path.join(corpus, "dev", name + ".tsv.xz"))
    pairs = [(a, b) for a, b in zip(table[source], table[target]) if a and b][:limit]
    return [a for a, _ in pairs], [b for _, b in pairs]


# ---- Vocabulary and cache ----------------------------------------------------------------------------------------------

def train_vocabulary(tables, path, size, sentences_per_language, seed):
    """Trains the shared unigram vocabulary on the same number of sentences of each language, drawn by the shares."""
    random = np.random.default_rng(seed)
    sample = []
    for language in LANGUAGES:
        having = {name: table[language] for name, table in tables.items() if language in table}
        weight = sum(sum(SHARES[name]) for name in having)
        for name, cells in having.items():
            cells = [cell for cell in cells if cell]
            count = min(len(cells), round(sentences_per_language * sum(SHARES[name]) / weight))
            sample += [cells[i] for i in random.choice(len(cells), count, replace=False)]
    random.shuffle(sample)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sample), model_prefix=path[:-len(".model")], model_type="unigram", vocab_size=size,
        normalization_rule_name="nmt_nfkc", character_coverage=0.9998, byte_fallback=True,
        pad_id=PAD, unk_id=UNK, bos_id=BOS, eos_id=EOS,
        control_symbols=[f"<2{language}>" for language in LANGUAGES], num_threads=os.cpu_count(), minloglevel=1)


def prepare(corpus, cache, vocabulary_size, vocabulary=None, log=print):
    """Makes the cache unless it is complete; returns the path of the SentencePiece model.

    `vocabulary`: an existing SentencePiece model to use instead of training one.
    """
    done, model = os.path.join(cache, "done.json"), os.path.join(cache, "spm.model")
    if os.path.exists(done):
        return model
    os.makedirs(cache, exist_ok=True)
    log("reading the corpus")
    tables = {}
    for path in sorted(glob.glob(os.path.join(corpus, "train", "*.tsv.xz"))):
        name = os.path.basename(path)[:-len(".tsv.xz")]
        if name in SHARES:
            tables[name] = read_table(path)
    if vocabulary:
        with open(vocabulary, "rb") as source, open(model, "wb") as target:
            target.write(source.read())
    else:
        log("training the vocabulary")
        train_vocabulary(tables, model, vocabulary_size, 80_000, seed=1)
    pieces = sentencepiece.SentencePieceProcessor(model_file=model)
    for name, table in tables.items():
        log(f"encoding {name}")
        arrays = {}
        for language, cells in table.items():
            ids = pieces.encode(cells, num_threads=os.cpu_count())
            arrays[language + "_offsets"] = np.concatenate([[0], np.cumsum([len(x) for x in ids], dtype=np.int64)])
            arrays[language] = np.concatenate([np.asarray(x, np.uint16) for x in ids])
        np.savez(os.path.join(cache, name + ".npz"), **arrays)
    with open(done, "w") as file:
        json.dump({"corpus": os.path.abspath(corpus), "files": sorted(tables)}, file)
    return model


# ---- The mix -----------------------------------------------------------------------------------------------------------

class Source:
    """All usable pairs of one file, with or without English, in shuffled epochs without replacement."""

    def __init__(self, name, arrays, english, max_pieces, max_ratio, seed):
        self.name, self.arrays, self.seed = name, arrays, seed
        self.epoch, self.position = 0, 0
        rows, sources, targets, lengths = [], [], [], []
        present = [x for x in LANGUAGES if x in arrays]
        size = {x: np.diff(arrays[x + "_offsets"]) for x in present}
        for a in present:
            for b in present:
                if a == b or ("en" in (a, b)) != english:
                    continue
                long, short = np.maximum(size[a], size[b]), np.minimum(size[a], size[b])
                row = np.nonzero((short > 0) & (long <= max_pieces) & (long <= max_ratio * short + 3))[0]
                rows.append(row)
                sources.append(np.full(len(row), LANGUAGES.index(a)))
                targets.append(np.full(len(row), LANGUAGES.index(b)))
                lengths.append(np.stack([size[a][row] + 2, size[b][row] + 1], 1))
        count = sum(len(x) for x in rows)
        empty = np.zeros(0, np.int64)
        self.pairs = np.stack([np.concatenate(x or [empty]) for x in (rows, sources, targets)], 1).astype(np.int32)
        self.lengths = (np.concatenate(lengths) if count else np.zeros((0, 2))).astype(np.int32)
        self.shuffle()

    def shuffle(self):
        random = np.random.default_rng([self.seed, self.epoch])
        self.order = random.permutation(len(self.pairs)).astype(np.int32)

    def take(self, tokens):
        """Indices of the next pairs, about `tokens` target tokens of them."""
        taken = []
        while tokens > 0:
            ahead = self.order[self.position:self.position + int(tokens) // 2 + 1]
            total = np.cumsum(self.lengths[ahead, 1])
            count = int(np.searchsorted(total, tokens)) + 1
            taken.append(ahead[:count])
            tokens -= int(total[min(count, len(total)) - 1])
            self.position += len(taken[-1])
            if self.position >= len(self.order):
                self.epoch, self.position = self.epoch + 1, 0
                self.shuffle()
        return np.concatenate(taken) if taken else np.zeros(0, np.int32)

    def ids(self, language, row):
        offsets = self.arrays[language + "_offsets"]
        return self.arrays[language][offsets[row]:offsets[row + 1]]


class Mixture:
    """Endless batches: a pool of pairs drawn by the shares, sorted by length, cut by token count, in random order."""

    POOL = 150_000  # target tokens drawn and sorted at a time

    def __init__(self, cache, max_pieces=60, max_ratio=2.5, seed=1):
        self.seed, self.pools, self.used = seed, 0, 0
        self.sources, shares = [], []
        with open(os.path.join(cache, "done.json")) as file:
            files = json.load(file)["files"]
        for name in files:
            with np.load(os.path.join(cache, name + ".npz")) as data:
                arrays = {key: data[key] for key in data.files}
            for english, share in zip((True, False), SHARES[name]):
                source = Source(name, arrays, english, max_pieces, max_ratio, seed + len(self.sources))
                if share and len(source.pairs):
                    self.sources.append(source)
                    shares.append(share)
        self.shares = np.array(shares) / sum(shares)
        self.credit = np.zeros(len(shares))
        self.batches = []

    def fill(self, batch_tokens, longest):
        """Draws the next pool. `longest`: pairs with more pieces than this are put aside (short sentences first)."""
        self.before = {"pools": self.pools, "credit": self.credit.tolist(), "batch_tokens": batch_tokens,
                       "longest": longest, "positions": [(s.epoch, s.position) for s in self.sources]}
        self.credit += self.shares * self.POOL
        drawn = []
        for number, source in enumerate(self.sources):
            taken = source.take(self.credit[number])
            self.credit[number] -= source.lengths[taken, 1].sum()
            taken = taken[source.lengths[taken].max(1, initial=0) <= longest]
            drawn.append(np.stack([np.full(len(taken), number), taken, *source.lengths[taken].T], 1))
        random = np.random.default_rng([self.seed, 7, self.pools])
        pool = random.permutation(np.concatenate(drawn))
        pool = pool[np.argsort(pool[:, 2] + pool[:, 3], kind="stable")]
        cost = np.cumsum((pool[:, 2] + pool[:, 3]) / 2)
        cuts = np.searchsorted(cost, np.arange(1, int(cost[-1] / batch_tokens)) * batch_tokens)
        self.batches = [x for x in np.split(pool, cuts) if len(x)]
        random.shuffle(self.batches)
        self.pools, self.used = self.pools + 1, 0

    def next(self, batch_tokens, longest):
        """The next batch: a list of (source ids, target ids), source = tag, pieces, eos; target = pieces, eos."""
        if self.used >= len(self.batches):
            self.fill(batch_tokens, longest)
        batch = []
        for number, index, _, _ in self.batches[self.used]:
            source = self.sources[number]
            row, a, b = source.pairs[index]
            a, b = LANGUAGES[a], LANGUAGES[b]
            batch.append((np.concatenate([[TAG[b]], source.ids(a, row), [EOS]]),
                          np.concatenate([source.ids(b, row), [EOS]])))
        self.used += 1
        return batch

    def state(self):
        return {**self.before, "used": self.used}

    def restore(self, state):
        for source, (epoch, position) in zip(self.sources, state["positions"]):
            source.epoch, source.position = epoch, position
            source.shuffle()
        self.pools, self.credit = state["pools"], np.array(state["credit"])
        self.fill(state["batch_tokens"], state["longest"])
        self.used = state["used"]

    def report(self):
        """One line per source: share, pairs, mean target length."""
        return [f"{s.name:22s} share {share:.3f}  pairs {len(s.pairs):8d}  mean target tokens {s.lengths[:, 1].mean():.1f}"
                for s, share in zip(self.sources, self.shares)]
