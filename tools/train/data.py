"""Training data: the corpus, the vocabulary, the mix of sources, and batches.

The corpus is a folder of `train/*.tsv.xz` and `dev/*.tsv.xz` files with a header row of language codes and a column per
language. Any two non-empty cells of a row form a pair, which is used in both directions.

`prepare` converts it to a cache: a SentencePiece model trained on a balanced sample and, for every file and language,
the pieces of all cells as one flat uint16 array with offsets. It adds generated tables: two with noise, from Tatoeba,
for robustness; one each with everyday sentences as people type them, with phrases around rarer words, and with replaced
names; four from the installed dictionaries; and one with French machine-translated to Spanish.

`Mixture` samples pairs from the cache by shares of target tokens, shuffling each source without replacement, and cuts
them into batches of sentences of similar length.
"""
import common  # must be imported first to extend sys.path and report missing modules
import glob
import json
import lzma
import os
import random
import re
import shutil

import numpy as np
import sentencepiece

import backtranslation
import dictionaries
import everyday
import names
import phrases
import pivot

LANGUAGES = ("en", "de", "fr", "es")
PAD, UNK, BOS, EOS = 0, 1, 2, 3
TAG = {language: 4 + i for i, language in enumerate(LANGUAGES)}  # first source token, which selects the target language
DIRECTIONS = tuple((a, b) for a in LANGUAGES for b in LANGUAGES if a != b)

# file -> shares of the target tokens in (directions with English, other directions), normalised over existing files.
SHARES = {
    "tatoeba.en-de": (0.100, 0), "tatoeba.en-fr": (0.085, 0), "tatoeba.en-es": (0.075, 0),
    "tatoeba_pivot.de-fr": (0, 0.022), "tatoeba_pivot.de-es": (0, 0.022), "tatoeba_pivot.fr-es": (0, 0.022),
    "europarl.en-fr": (0.190, 0), "europarl_more": (0.240, 0.025), "europarl_pivot": (0, 0.008),
    "wikipedia": (0.090, 0.008), "dialogue": (0.014, 0.003), "books": (0.120, 0.002),
    "guides": (0.125, 0.020), "debian_web": (0.055, 0.010), "apps": (0.010, 0.005),
    "phpdoc": (0.005, 0.002), "pydoc": (0.004, 0), "gnomehelp": (0.002, 0.001), "debhandbook": (0.003, 0.002),
    "mozilla_www": (0.002, 0.001), "bible": (0.008, 0.002), "suttacentral": (0.003, 0.001), "interface": (0.003, 0.001),
    "picard": (0.0005, 0), "cryptpad": (0.0005, 0),
    "everyday.en-de": (0.048, 0), "everyday.en-fr": (0.042, 0), "everyday.en-es": (0.042, 0),
    "everyday.de-fr": (0, 0.020), "everyday.de-es": (0, 0.020), "everyday.fr-es": (0, 0.020), "phrases": (0.008, 0.008),
    # Generated tables: see everyday.py (everyday.written), pivot.py, backtranslation.py (back.*), dictionaries.py,
    # phrases.py (aligned), names.py, noise_tables and typed_table.
    "everyday.written": (0.045, 0.045),
    "pivot": (0.040, 0.012), "back.de": (0.160, 0.020), "back.fr": (0.060, 0.008), "back.es": (0.035, 0.004),
    "dictionaries": (0.105, 0.015), "bridged": (0.022, 0), "nouns": (0.070, 0), "verbs": (0.045, 0),
    "aligned": (0.070, 0), "names": (0.075, 0.012), "typed": (0.036, 0.020), "noise": (0.032, 0.012),
    "same": (0.004, 0.004)}

# file -> language of the machine-translated column, which is used as the source only.
MADE = {"pivot": "es", "back.de": "de", "back.fr": "fr", "back.es": "es"}


# ---- Reading ---------------------------------------------------------------------------------------------------------

def read_table(path):
    """Return the columns of a corpus file: language -> list of cells, "" if there is no translation."""
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        header = file.readline().rstrip("\n").split("\t")
        rows = [line.rstrip("\n").split("\t") for line in file]
    return {language: [row[i] if i < len(row) else "" for row in rows]
            for i, language in enumerate(header) if language in LANGUAGES}


def columns_of(rows):
    """Return rows {language: cell} as a table with all languages."""
    rows = list(rows)
    return {language: [row.get(language, "") for row in rows] for language in LANGUAGES}


def read_dev(corpus, name, source, target, limit):
    """Return the first `limit` pairs of a dev file in one direction: (source texts, target texts)."""
    table = read_table(os.path.join(corpus, "dev", name + ".tsv.xz"))
    pairs = [(a, b) for a, b in zip(table[source], table[target]) if a and b][:limit]
    return [a for a, _ in pairs], [b for _, b in pairs]


# ---- Noise -----------------------------------------------------------------------------------------------------------

EMOJI = [chr(c) for low, high in ((0x1F600, 0x1F64F), (0x1F300, 0x1F5FF), (0x1F680, 0x1F6C5), (0x1F90C, 0x1F9FF))
         for c in range(low, high)] + "\u2764\ufe0f \u2600\ufe0f \u2615 \u2705 \u2b50 \u263a\ufe0f".split()
SCRIPTS = ((0x0410, 0x044F), (0x0391, 0x03C9), (0x4E00, 0x9FA5), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x05D0, 0x05EA),
           (0x0620, 0x064A), (0xAC00, 0xD7A3), (0x0904, 0x0939), (0x0E01, 0x0E2E))
LETTERS = "eeeeaaaiiooutttnnssrrldcmpbgfhvkwyjxqz"


def a_word(r, low=2, high=9):
    return "".join(r.choice(LETTERS) for _ in range(r.randint(low, high)))


def an_address(r):
    host = a_word(r, 3, 10) + "." + r.choice("com org net de fr es eu io co.uk gov edu info".split())
    return r.choice((f"https://www.{host}/{a_word(r)}", f"http://{host}",
                     f"https://{host}/{a_word(r)}/{r.randint(1, 999)}", f"www.{host}", host, f"{a_word(r)}@{host}",
                     f"{a_word(r)}.{a_word(r)}@{host}", f"@{a_word(r)}", f"#{a_word(r)}",
                     f"/{a_word(r)}/{a_word(r)}.{r.choice('txt pdf py c html'.split())}"))


def a_number(r):
    n = r.randint(0, 10 ** r.randint(1, 6))
    return r.choice((f"{n}", f"{n}", f"{r.randint(0, 99)}.{r.randint(0, 99)}", f"{r.randint(0, 99)},{r.randint(0, 99)}",
                     f"{r.randint(0, 23)}:{r.randint(0, 59):02}", f"{n} %", f"{n} km", f"{n} €", f"${n}", f"-{n}",
                     f"{r.randint(1, 12)}/{r.randint(1, 28)}/{r.randint(1950, 2030)}", f"{r.randint(100, 999)}-{n}",
                     f"v{r.randint(0, 9)}.{r.randint(0, 30)}.{r.randint(0, 9)}", f"{r.choice('ABCDEFGHIJKLM')}{n}",
                     f"+{r.randint(1, 99)} {r.randint(100, 999)} {n}"))


def an_emoji(r):
    return r.choice(EMOJI) * r.choice((1, 1, 1, 2, 3))


def foreign_words(r, count):
    low, high = r.choice(SCRIPTS)
    return " ".join("".join(chr(r.randint(low, high)) for _ in range(r.randint(1, 6))) for _ in range(count))


def some_signs(r):
    return r.choice((r.choice("!?.,;:-()[]{}<>/|*+=#%&@^~_\"'-") * r.randint(1, 25),
                     "".join(r.choice("!?.,;:-()[]{}<>/|*+=#%&@^~_\"'") for _ in range(r.randint(1, 16)))))


def some_markup(r, cells):
    tag, name = r.choice("p b i li a div span h1 td".split()), a_word(r, 1, 6)
    before = r.choice((f"<{tag}>", f"<{tag} class=\"{name}\">", f"<{tag} id=\"{name}\">",
                       f"<a href=\"{an_address(r)}\">"))
    return [f"{before}{cell}</{before[1:].split()[0].rstrip('>')}>" for cell in cells]


def copied(r):
    """Return a text that is the same in all languages."""
    return r.choice((an_address, a_number, a_number, an_emoji, lambda r: foreign_words(r, 1)))(r)


def noisy_row(r, cells, more):
    """Add the same noise to all cells of a row. `more()` returns the cells of another row."""
    roll = r.random()
    if roll < 0.20:
        return [cell.upper() for cell in cells]
    if roll < 0.30:
        return [re.sub(r"[.,;:!?¡¿\"]", "", cell).lower().strip() for cell in cells]
    if roll < 0.55:
        what = copied(r)
        where = r.random()
        if where < 0.4:
            return [f"{cell} {what}" for cell in cells]
        if where < 0.8:
            return [f"{what} {cell}" for cell in cells]
        return [f"{cell[:-1]} {what}{cell[-1]}" if cell[-1:] in ".!?" else f"{cell} ({what})" for cell in cells]
    if roll < 0.80:
        for _ in range(r.randint(1, 4)):
            cells = [f"{cell} {next_cell}" for cell, next_cell in zip(cells, more())]
        return cells
    if roll < 0.85:
        return some_markup(r, cells)
    what = r.choice((an_address, a_number, an_emoji, some_signs, some_signs,
                     lambda r: foreign_words(r, r.randint(1, 6)), lambda r: foreign_words(r, r.randint(1, 6)),
                     lambda r: " ".join(copied(r) for _ in range(r.randint(1, 5))),
                     lambda r: r.choice(LETTERS) * r.randint(3, 60), lambda r: " ".join([a_word(r)] * r.randint(2, 20)),
                     lambda r: f"{a_word(r)}({a_word(r)}, {r.randint(0, 99)});"))(r)
    return [what] * len(cells)


def noise_tables(tables, rows, seed):
    """Make two tables from short plain sentences. "noise" has capitals, lower case, several sentences per row, and
    copied items (numbers, addresses, emoji, unknown scripts, markup) in or instead of sentences. "same" has sentences
    that are already in the target language and must not change."""
    r, noise, same = random.Random(seed), [], []
    sources = [table for name, table in sorted(tables.items()) if name.startswith("tatoeba")]
    for table in sources:
        languages, n = list(table), len(next(iter(table.values())))
        for _ in range(rows // len(sources)):
            def take():
                while True:
                    at = r.randrange(n)
                    if all(table[language][at] for language in languages):
                        return [table[language][at] for language in languages]
            noise.append(dict(zip(languages, noisy_row(r, take(), take))))
            same.append(dict(zip(languages, take())))
    return {"noise": columns_of(noise), "same": columns_of(same)}


def as_typed(r, cells):
    """Remove capitals, final punctuation, or both, from all cells of a row."""
    how = r.randrange(3)
    if how != 1:
        cells = [cell.lower() for cell in cells]
    if how != 0:  # Spanish also has an initial mark
        cells = [re.sub(r"^[¿¡]|\s*[.,:;!?]+$", "", cell) for cell in cells]
    return cells


def typed_table(tables, seed):
    """Return everyday sentences as people often type them."""
    r = random.Random(seed)
    return columns_of(dict(zip(table, as_typed(r, cells))) for name, table in sorted(tables.items())
                      if name.startswith("everyday.") or name == "phrases" for cells in zip(*table.values()))


# ---- Vocabulary and cache --------------------------------------------------------------------------------------------

def train_pieces(texts, path, size, **more):
    """Train a unigram SentencePiece model."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=path[:-len(".model")], model_type="unigram", vocab_size=size,
        normalization_rule_name="nmt_nfkc", character_coverage=0.9998, byte_fallback=True, pad_id=PAD, unk_id=UNK,
        bos_id=BOS, eos_id=EOS, **{"minloglevel": 1, **more})


def tags():
    return [f"<2{language}>" for language in LANGUAGES]


def train_vocabulary(tables, path, size, sentences_per_language, seed):
    """Train the shared unigram vocabulary on equal numbers of sentences per language, sampled by the shares."""
    generator = np.random.default_rng(seed)
    sample = []
    for language in LANGUAGES:
        having = {name: table[language] for name, table in tables.items() if language in table}
        weight = sum(sum(SHARES[name]) for name in having)
        for name, cells in having.items():
            cells = [cell for cell in cells if cell]
            count = min(len(cells), round(sentences_per_language * sum(SHARES[name]) / weight))
            sample += [cells[i] for i in generator.choice(len(cells), count, replace=False)]
    generator.shuffle(sample)
    train_pieces(sample, path, size, control_symbols=tags(), num_threads=os.cpu_count())


def write_cache(cache, tables, pieces, corpus, log=print):
    """Write the pieces of all tables, then a file that marks the cache as complete."""
    for name, table in tables.items():
        log(f"encoding {name}")
        arrays = {}
        for language, cells in table.items():
            ids = pieces.encode(cells, num_threads=os.cpu_count())
            arrays[language + "_offsets"] = np.concatenate([[0], np.cumsum([len(x) for x in ids], dtype=np.int64)])
            arrays[language] = np.concatenate([np.zeros(0, np.uint16)] + [np.asarray(x, np.uint16) for x in ids])
        np.savez(os.path.join(cache, name + ".npz"), **arrays)
    with open(os.path.join(cache, "done.json"), "w") as file:
        json.dump({"corpus": corpus, "files": sorted(tables)}, file)


def prepare(corpus, cache, vocabulary_size, vocabulary=None, log=print, back=None):
    """Create the cache unless it is complete; return the path of the SentencePiece model. `vocabulary`: an existing
    SentencePiece model to use instead of training one; `back`: a model file for back-translation."""
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
    tables["everyday.written"] = everyday.everyday_table(seed=1, excluded=everyday.phrasebook())
    if vocabulary:
        shutil.copyfile(vocabulary, model)
    else:
        log("training the vocabulary")
        train_vocabulary(tables, model, vocabulary_size, 80_000, seed=1)
    pieces = sentencepiece.SentencePieceProcessor(model_file=model)
    known = {cell for part in ("dev", "test") for path in glob.glob(os.path.join(corpus, part, "*.tsv.xz"))
             for cells in read_table(path).values() for cell in cells if cell}
    tables.update(noise_tables(tables, 120_000, seed=1), names=names.name_table(tables, 240_000, seed=1),
                  typed=typed_table(tables, seed=1), aligned=phrases.phrase_table(tables, "en", seed=1, log=log),
                  **dictionaries.dictionary_tables(tables, known, 250_000, seed=1, log=log),
                  **pivot.pivot_table(tables, 300_000, seed=1, log=log),
                  **(backtranslation.back_tables(tables, back, 200_000, seed=1, log=log) if back else {}))
    write_cache(cache, tables, pieces, os.path.abspath(corpus), log)
    return model


# ---- The mix ---------------------------------------------------------------------------------------------------------

class Source:
    """All usable pairs of one file, with or without English, in shuffled epochs without replacement. File "same" pairs
    sentences with themselves. If a file has machine-translated text, this text is the source of all pairs."""

    def __init__(self, name, arrays, english, max_pieces, max_ratio, seed):
        self.name, self.arrays, self.seed = name, arrays, seed
        self.epoch, self.position = 0, 0
        rows, sources, targets, lengths = [], [], [], []
        present = [x for x in LANGUAGES if x in arrays]
        size = {x: np.diff(arrays[x + "_offsets"]) for x in present}
        for a in present:
            for b in present:
                if (a == b) != (name == "same") or ("en" in (a, b)) != english or a != MADE.get(name, a):
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
        self.order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.pairs)).astype(np.int32)

    def take(self, tokens):
        """Return the indices of the next pairs, with about `tokens` target tokens."""
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
    """An endless sequence of batches: pools of pairs sampled by the shares are sorted by length, split and shuffled."""

    POOL = 150_000  # target tokens sampled and sorted at a time

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
        """Sample the next pool, skipping pairs with more than `longest` pieces (to train on short sentences first)."""
        self.before = {"pools": self.pools, "credit": self.credit.tolist(), "batch_tokens": batch_tokens,
                       "longest": longest, "positions": [(s.epoch, s.position) for s in self.sources]}
        self.credit += self.shares * self.POOL
        drawn = []
        for number, source in enumerate(self.sources):
            taken = source.take(self.credit[number])
            self.credit[number] -= source.lengths[taken, 1].sum()
            taken = taken[source.lengths[taken].max(1, initial=0) <= longest]
            drawn.append(np.stack([np.full(len(taken), number), taken, *source.lengths[taken].T], 1))
        generator = np.random.default_rng([self.seed, 7, self.pools])
        pool = generator.permutation(np.concatenate(drawn))
        pool = pool[np.argsort(pool[:, 2] + pool[:, 3], kind="stable")]
        cost = np.cumsum((pool[:, 2] + pool[:, 3]) / 2)
        cuts = np.searchsorted(cost, np.arange(1, int(cost[-1] / batch_tokens)) * batch_tokens)
        self.batches = [x for x in np.split(pool, cuts) if len(x)]
        generator.shuffle(self.batches)
        self.pools, self.used = self.pools + 1, 0

    def next(self, batch_tokens, longest):
        """Return the next batch: (source ids, target ids) pairs; source = tag, pieces, eos; target = pieces, eos."""
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
        """Return a line of text per source: share, number of pairs, mean target length."""
        return [f"{s.name:22s} share {share:.3f}  pairs {len(s.pairs):8d}  "
                f"mean target tokens {s.lengths[:, 1].mean():.1f}" for s, share in zip(self.sources, self.shares)]
