"""The user's own corpus: any languages, file names and size.

    read_corpus(path, languages)      returns (rows by file: {name: [{language: text}]}, {ignored file: reason})
    Corpus(path, languages, dev)      the rows, divided into a training set and a (given or held-out) dev set

The path is a file, or a folder with files, of these types, optionally compressed (.xz): `.tsv` with language codes in
its first row or in its name (`mine.en-de.tsv`); PO files that name their language; TMX; two text files with the
same number of lines (`mine.en`, `mine.de`).
"""
import collections
import lzma
import os
import re
import shutil
import xml.etree.ElementTree as xml

import data

CODE = re.compile("[a-z]{2,3}([-_@][A-Za-z0-9]{2,8})*")
BETWEEN = re.compile(r".*?([a-z]{2,3}(?:_[A-Za-z]{2,4})?)-([a-z]{2,3}(?:_[A-Za-z]{2,4})?)")
MAX_DEV = 200


def open_text(path):
    return (lzma.open if path.endswith(".xz") else open)(path, "rt", encoding="utf-8-sig", newline=None)


def read_tsv(path, name, languages):
    with open_text(path) as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    header = rows[0] if rows else []
    named = BETWEEN.fullmatch(os.path.splitext(name)[0])
    if len(header) > 1 and all(CODE.fullmatch(x) for x in header):
        codes, rows = header, rows[1:]
    elif languages or named:
        codes = languages or list(named.groups())
    else:
        raise ValueError("no languages in the first row or in the file name, e.g. mine.en-de.tsv")
    return [{code: cell.strip() for code, cell in zip(codes, row)} for row in rows]


def read_po(path, name, languages):
    try:
        import polib
    except ImportError:
        raise ValueError("PO files require polib: pip install polib") from None
    try:
        po = polib.pofile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"not a PO file: {error}") from None
    target = po.metadata.get("Language") or os.path.splitext(name)[0].rpartition(".")[2]
    target = languages[1] if languages else target.split("_")[0]
    source = languages[0] if languages else "en"
    if not CODE.fullmatch(target) or target == source:
        raise ValueError("no language in the header: use --languages SOURCE,TARGET")
    return [{source: " ".join(x.msgid.split()), target: " ".join(x.msgstr.split())} for x in po.translated_entries()
            if not x.msgid_plural]


def read_tmx(path, name, languages):
    rows, key = [], "{http://www.w3.org/XML/1998/namespace}lang"
    try:
        for _, unit in xml.iterparse(path):
            if unit.tag == "tu":
                texts = {(v.get(key) or v.get("lang") or "").lower().split("-")[0]: "".join(v.find("seg").itertext())
                         for v in unit.iter("tuv") if v.find("seg") is not None}
                rows.append({code: " ".join(text.split()) for code, text in texts.items() if code})
                unit.clear()
    except xml.ParseError as error:
        raise ValueError(f"not XML: {error}") from None
    return rows


READERS = {".tsv": read_tsv, ".po": read_po, ".tmx": read_tmx}


def read_lines(path):
    with open_text(path) as file:
        return [line.strip() for line in file]


def read_corpus(path, languages=None):
    """Read a corpus; return (rows by file, {ignored file: reason})."""
    if not os.path.exists(path):
        raise SystemExit(f"{path}: no such file or directory")
    names = sorted(os.listdir(path)) if os.path.isdir(path) else [""]
    rows, ignored, parallel = {}, {}, collections.defaultdict(dict)
    for name in names:
        file = os.path.join(path, name) if name else path
        name = name or os.path.basename(path)
        stem, ending = os.path.splitext(name[:-3] if name.endswith(".xz") else name)
        try:
            if ending in READERS:
                rows[name] = READERS[ending](file, stem + ending, languages)
            elif os.path.isfile(file) and CODE.fullmatch(ending[1:]) and ending != ".txt":
                parallel[stem][ending[1:]] = (name, file)
            else:
                ignored[name] = "a folder" if os.path.isdir(file) else "not .tsv, .po, .tmx or text named by a language"
        except (ValueError, UnicodeDecodeError, OSError, lzma.LZMAError) as error:
            ignored[name] = " ".join(str(error).split())
    for stem, sides in parallel.items():
        texts = {code: read_lines(file) for code, (_, file) in sides.items()}
        lengths = {len(x) for x in texts.values()}
        if len(texts) > 1 and len(lengths) == 1:
            rows[stem] = [dict(zip(texts, cells)) for cells in zip(*texts.values())]
        else:
            why = f"numbers of lines differ: {lengths}" if len(lengths) > 1 else "no matching file in another language"
            ignored.update({name: why for name, _ in sides.values()})
    return {name: [r for r in found if sum(map(bool, r.values())) > 1] for name, found in rows.items()}, ignored


class Corpus:
    """Training and dev rows; training rows contain no text from the dev set."""

    def __init__(self, path, languages=None, dev=None, log=print):
        inside = os.path.join(path, "train")
        folder = inside if os.path.isdir(inside) else path
        rows, ignored = read_corpus(folder, languages)
        for name, why in ignored.items():
            if not (folder == path and name in ("dev", "test")):
                log(f"ignoring {name}: {why}")
        beside = os.path.join(path, "dev")
        dev = dev or (beside if os.path.isdir(beside) else None)
        unique = list({tuple(sorted(row.items())): row for found in rows.values() for row in found}.values())
        if dev:
            held, ignored = read_corpus(dev, languages)
            for name, why in ignored.items():
                log(f"ignoring {name}: {why}")
            self.dev = [row for found in held.values() for row in found][:1000]
        else:
            step = max(10, len(unique) // MAX_DEV)
            self.dev = unique[step // 2::step]
        texts = {text for row in self.dev for text in row.values() if text}
        self.rows = {name: [row for row in found if not texts & set(row.values())] for name, found in rows.items()}
        self.rows = {name: found for name, found in self.rows.items() if found}
        if not self.rows or not self.dev:
            raise SystemExit(f"{path}: found {len(unique)} pairs of texts; at least 20 are required")
        self.languages = sorted({code for found in [*self.rows.values(), self.dev] for row in found for code in row})
        log(f"{sum(map(len, self.rows.values()))} rows to train on, {len(self.dev)} held out, languages "
            + ", ".join(self.languages))

    def use(self, tags=None):
        """Register the languages and files in data.py; tags: language tags of the model."""
        for code in self.languages:
            if tags is not None and code not in tags:
                raise SystemExit(f"the corpus has {code}, but the model only has {', '.join(tags)}: select languages "
                                 "with --languages, or train from scratch")
        tags = tags or {code: 4 + i for i, code in enumerate(self.languages)}
        data.LANGUAGES = tuple(tags)
        data.TAG.clear()
        data.TAG.update(tags)
        self.names = [f"own.{i}" for i in range(len(self.rows))]
        data.SHARES.update({name: (len(rows), len(rows)) for name, rows in zip(self.names, self.rows.values())})

    def tables(self):
        return {name: {code: [row.get(code, "") for row in rows] for code in data.LANGUAGES}
                for name, rows in zip(self.names, self.rows.values())}

    def sets(self):
        """Return (name, source, target, texts, references) for every direction of the dev set."""
        out = []
        for a in data.LANGUAGES:
            for b in data.LANGUAGES:
                pairs = [(row[a], row[b]) for row in self.dev if a != b and row.get(a) and row.get(b)]
                if pairs:
                    out.append((f"{a}-{b}", a, b, [x for x, _ in pairs], [y for _, y in pairs]))
        return out


def train_vocabulary(tables, path, largest):
    """Train a vocabulary as large as the text supports."""
    texts = [cell for table in tables.values() for cells in table.values() for cell in cells if cell]
    signs = len(set("".join(texts)))
    words = len({word for text in texts for word in text.split()})
    size = min(largest, 260 + len(data.LANGUAGES) + signs + words // 2)
    try:
        data.train_pieces(texts, path, size, hard_vocab_limit=False, control_symbols=data.tags(), minloglevel=2)
    except RuntimeError as error:
        raise SystemExit(f"cannot train a vocabulary: {' '.join(str(error).split())}") from None


def prepare(corpus, cache, largest, vocabulary, log=print):
    """Create the cache; return the path of the SentencePiece model."""
    import sentencepiece
    os.makedirs(cache, exist_ok=True)
    model, tables = os.path.join(cache, "spm.model"), corpus.tables()
    if os.path.exists(os.path.join(cache, "done.json")):
        return model
    if vocabulary:
        shutil.copyfile(vocabulary, model)
    else:
        train_vocabulary(tables, model, largest)
    data.write_cache(cache, tables, sentencepiece.SentencePieceProcessor(model_file=model), "own", lambda text: None)
    return model
