#!/usr/bin/env python3
"""Test the tokenisers of Hugging Face's checkpoints as stored in a model file:
text to ids and back, language names, and mismatched files.

Usage: tests/python tests/convert/test_hf_tokens.py [--only NAME]

The tests need neither sentencepiece nor transformers: they create a
SentencePiece model of the most frequent substrings of 500 lines in eight
languages, and split texts in Python, maximising the sum of scores. The rules of
transformer.md, section 5, are implemented here independently. If the packages
are available, a test compares these rules with transformers' tokenisers and a
model trained by sentencepiece. Prints `ok NAME` or `FAIL NAME` per test.
"""
import argparse
import collections
import contextlib
import io
import json
import os
import random
import struct
import sys
import tempfile

from moe_translate import Model, Translator

from converting import TRANSLATE, convert_here, convert_quietly, run
from suite import Suite

try:
    import numpy as np

    import hf_tokens
    import make_transformers as make
    import moefile
except ImportError:
    np = None
try:
    import sentencepiece
    import transformers
    if transformers.__version__ != "4.57.6":
        transformers = None
except ImportError:
    transformers = None
test = Suite()
numpy_test = test.needs(np, "NumPy")
oracle_test = test.needs(transformers, "transformers 4.57.6 with sentencepiece")

WORDS = {
    "eng_Latn": "the house stands near an old river where children play every long summer day and nobody asks why",
    "deu_Latn": "das alte Haus steht am Fluß, wo Kinder jeden Tag spielen und niemand weiß warum die Tür offen bleibt",
    "fra_Latn": "la vieille maison près de l'eau où les enfants jouent chaque été, déjà fermée à clé pour l'hiver",
    "rus_Cyrl": "старый дом стоит у реки где дети играют каждый день и никто не знает почему дверь открыта",
    "ell_Grek": "το παλιό σπίτι είναι κοντά στο ποτάμι όπου τα παιδιά παίζουν κάθε μέρα και κανείς δεν ξέρει",
    "arb_Arab": "البيت القديم قرب النهر حيث يلعب الأطفال كل يوم ولا أحد يعرف لماذا الباب مفتوح",
    "hin_Deva": "पुराना घर नदी के पास है जहाँ बच्चे हर दिन खेलते हैं और कोई नहीं जानता क्यों",
    "zho_Hans": "老 房子 在 河边 孩子们 每天 都 在 那里 玩 没有人 知道 为什么 门 开着"}
MARK = "\u2581"


def lines(count=500):
    r, out = random.Random(7), []
    for i in range(count):
        words = list(WORDS.values())[i % len(WORDS)].split()
        chosen = [r.choice(words) for _ in range(r.randint(1, 9))]
        for _ in range(r.randint(0, 2)):
            chosen.insert(r.randint(0, len(chosen)),
                          r.choice(["12", "1984", "(A)", "–", "ß", "x2", "☃", "🙂🙃", "Ω", "é", "..."]))
        line = r.choice([" ", " ", "  "]).join(chosen)
        out.append(r.choice(["", "", " "]) + line + r.choice([".", "!", "?", "", " "]))
    return out


# ---- A SentencePiece model -------------------------------------------------------------------------------------------

def proto(*numbered):
    """Return the bytes of a protocol buffer message with these (field number, value) pairs."""
    def varint(n):
        out = b""
        while n > 127:
            out, n = out + bytes([n & 127 | 128]), n >> 7
        return out + bytes([n])
    out = b""
    for number, value in numbered:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            value = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def marked(text):
    return MARK + MARK.join(text.split())


class Unigram:
    """A unigram model, which splits a text into the pieces with the largest sum of scores. As in SentencePiece, the
    first pieces are <unk>, <s> and </s>."""

    def __init__(self, texts, size, most=6):
        counts = collections.Counter()
        for text in map(marked, texts):
            counts.update(text[i:j] for i in range(len(text)) for j in range(i + 1, min(i + 1 + most, len(text) + 1))
                          if MARK not in text[i + 1:j])
        for piece in [x for x in counts if set(x) & set("🙂🙃☃Ω")]:
            del counts[piece]
        single = [x for x in counts if len(x) == 1]
        longer = sorted((x for x in counts if len(x) > 1),
                        key=lambda x: (-counts[x] * len(x), x))[:size - 3 - len(single)]
        total = sum(counts.values())
        scores = [struct.unpack("<f", struct.pack("<f", float(np.log(counts[x] / total) * 0.7 - 1e-3 * i % 0.1)))[0]
                  for i, x in enumerate(single + longer)]
        self.pieces = ["<unk>", "<s>", "</s>", *single, *longer]
        self.score = dict(zip(single + longer, scores))
        self.most, self.unknown = most, min(scores) - 10
        self.bytes = b"".join(proto((1, proto((1, x), (2, self.score.get(x, 0.0)),
                                              (3, {"<unk>": 2, "<s>": 3, "</s>": 3}.get(x, 1)))))
                              for x in self.pieces) + proto((3, proto((1, "identity"), (3, 1), (4, 1), (5, 1))))

    def cut(self, text):
        """Split a text; return its pieces. Adjacent unknown characters form one piece."""
        text = marked(text) if text.split() else ""
        best = [(0.0, 0, False)] + [(-1e9, 0, False)] * len(text)
        for j in range(1, len(text) + 1):
            for i in range(max(0, j - self.most), j):
                known = text[i:j] in self.score
                if known or j == i + 1:
                    score = best[i][0] + (self.score[text[i:j]] if known else self.unknown)
                    if score > best[j][0]:
                        best[j] = score, i, not known
        out, at = [], len(text)
        while at:
            out.append((text[best[at][1]:at], best[at][2]))
            at = best[at][1]
        joined = []
        for piece, unknown in out[::-1]:
            if unknown and joined and joined[-1][1]:
                joined[-1] = joined[-1][0] + piece, True
            else:
                joined.append((piece, unknown))
        return [piece for piece, _ in joined]


# ---- Checkpoints with tokenisers -------------------------------------------------------------------------------------

def write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)


def change_json(path, values):
    """Add keys to a JSON file, or create it."""
    old = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            old = json.load(file)
    write_json(path, {**old, **values})


def write_bytes(path, data):
    with open(path, "wb") as file:
        file.write(data)


class Checkpoint:
    """A checkpoint in a folder, with functions that follow its tokeniser's rules, encode(text) -> ids and decode(ids)
    -> text, and its languages {code: id}."""

    def __init__(self, folder, kind, target_spm=None, **how):
        self.folder, self.kind, self.how, texts = folder, kind, how, lines()
        self.spm, self.end, self.unknown = how.get("spm") or Unigram(texts, 420), 2, 3
        self.other = how.get("other") or Unigram([x[::-1] for x in texts], 300)
        getattr(self, kind)(texts)

    def nllb(self, texts):
        size = len(self.spm.pieces)
        codes = [*WORDS, "ace_Arab", "zho_Hant", "por_Latn", "aka_Latn", "heb_Hebr", "tgl_Latn", "ron_Latn"]
        ids = {x: i + 1 for i, x in enumerate(self.spm.pieces) if i > 2}
        self.languages = {code: size + 1 + i for i, code in enumerate(codes)}
        self.encode = lambda text: [ids.get(x, 3) for x in self.spm.cut(text)]
        self.names = {i: x for x, i in ids.items()} | {3: " \u2047 "}
        make.make(self.folder, self.how.get("family", "nllb"), vocab_size=size + 1 + len(codes) + 1,
                  **self.how.get("changes", {}))
        write_bytes(self.folder + "/sentencepiece.bpe.model", self.spm.bytes)
        write_json(self.folder + "/special_tokens_map.json", {"bos_token": "<s>", "additional_special_tokens": codes})

    def m2m(self, texts, codes=("de", "en", "fr", "zh", "ru", "el", "ar", "hi", "pt", "he", "id", "no"), **about):
        order = random.Random(3).sample(self.spm.pieces[3:], len(self.spm.pieces) - 3)
        vocabulary = {x: i for i, x in enumerate(["<s>", "<pad>", "</s>", "<unk>", *order])}
        self.languages = {code: len(vocabulary) + i for i, code in enumerate(codes)}
        self.encode = lambda text: [vocabulary.get(x, 3) for x in self.spm.cut(text)]
        self.names = {i: x for x, i in vocabulary.items() if i > 3} | {3: " \u2047 "}
        make.make(self.folder, "nllb", vocab_size=len(vocabulary) + len(codes) + 8)
        write_bytes(self.folder + "/sentencepiece.bpe.model", self.spm.bytes)
        write_json(self.folder + "/vocab.json", vocabulary)
        write_json(self.folder + "/tokenizer_config.json",
                   about or {"additional_special_tokens": [f"__{x}__" for x in codes]})

    def small100(self, texts):
        self.m2m(texts, hf_tokens.M2M_CODES, tokenizer_class="SMALL100Tokenizer", language_codes="m2m100")

    def wmt21(self, texts):
        self.m2m(texts, hf_tokens.CODES["wmt21"], tokenizer_class="M2M100Tokenizer", language_codes="wmt21")

    def marian(self, texts, codes=("deu", "fra", "cmn_Hans")):
        """Write Marian's files: a SentencePiece model per side, and a shared vocabulary with additional characters."""
        self.end, self.unknown = 0, 1
        pieces = sorted({*self.spm.pieces, *self.other.pieces, "☃", "🙂🙃"} - {"<s>", "</s>", "<unk>"})
        pieces = random.Random(5).sample(pieces, len(pieces))
        vocabulary = {x: i for i, x in enumerate(["</s>", "<unk>", *(f">>{c}<<" for c in codes), *pieces, "<pad>"])}
        self.languages = {code: vocabulary[f">>{code}<<"] for code in codes}
        self.encode = lambda text: [vocabulary.get(x, 1) for x in self.spm.cut(text)]
        self.encode_target = lambda text: [vocabulary.get(x, 1) for x in self.other.cut(text)]
        self.names = {i: x for x, i in vocabulary.items() if i > 1 + len(codes) and x != "<pad>"} | {1: " \u2047 "}
        pad = len(vocabulary) - 1
        make.make(self.folder, "marian", vocab_size=pad + 1, decoder_vocab_size=pad + 1, pad_token_id=pad,
                  decoder_start_token_id=pad)
        write_bytes(self.folder + "/source.spm", self.spm.bytes)
        write_bytes(self.folder + "/target.spm", self.other.bytes)
        write_json(self.folder + "/vocab.json", vocabulary)

    def separate(self, texts, codes=("deu", "fra")):
        """Give source and target separate vocabularies, with different ids even for </s> and <unk>."""
        def numbered(first, pieces, seed):
            pieces = sorted({*pieces} - {"<s>", "</s>", "<unk>"})
            return {x: i for i, x in enumerate([*first, *random.Random(seed).sample(pieces, len(pieces)), "<pad>"])}
        sources = numbered(["<x>", "<unk>", *(f">>{c}<<" for c in codes), "</s>"], [*self.spm.pieces, "☃"], 5)
        targets = numbered(["</s>", "<y>", "<unk>"], self.other.pieces, 6)
        self.end, self.unknown, pad = sources["</s>"], 1, targets["<pad>"]
        assert pad < sources["<pad>"] and self.end != 0
        self.languages = {code: sources[f">>{code}<<"] for code in codes}
        self.encode = lambda text: [sources.get(x, 1) for x in self.spm.cut(text)]
        self.encode_target = lambda text: [targets.get(x, 2) for x in self.other.cut(text)]
        self.names = {i: x for x, i in targets.items() if x not in ("</s>", "<unk>", "<pad>")} | {2: " \u2047 "}
        make.make(self.folder, "marian", vocab_size=len(sources), decoder_vocab_size=len(targets), pad_token_id=pad,
                  decoder_start_token_id=pad, share_encoder_decoder_embeddings=False)
        write_bytes(self.folder + "/source.spm", self.spm.bytes)
        write_bytes(self.folder + "/target.spm", self.other.bytes)
        write_json(self.folder + "/vocab.json", sources)
        write_json(self.folder + "/target_vocab.json", targets)
        write_json(self.folder + "/tokenizer_config.json", {"separate_vocabs": True})

    def decode(self, ids):
        return "".join(self.names.get(i, "") for i in ids).replace(MARK, " ")


@contextlib.contextmanager
def checkpoint(kind, **how):
    with tempfile.TemporaryDirectory() as folder:
        yield Checkpoint(folder + "/model", kind, **how)


def converted(c):
    complaint = convert_quietly("--from", "hf", c.folder, "-o", c.folder + ".bin")
    assert complaint is None, complaint
    return c.folder + ".bin"


LANGUAGES = {"nllb": ["-s", "eng_Latn", "-t", "deu_Latn"], "m2m": ["-s", "en", "-t", "de"], "marian": ["-t", "deu"],
             "separate": ["-t", "deu"]}


@numpy_test
def text_encodes_to_ids_by_the_rules():
    for kind, languages in LANGUAGES.items():
        with checkpoint(kind) as c:
            unknown, texts = c.unknown, lines()
            command = [TRANSLATE, "-m", converted(c), *languages, "--json", "--beam", "1", "--max-len", "4",
                       "--no-protect"]
            found = [json.loads(x) for x in run(command, texts).lines]
            for text, about in zip(texts, found, strict=True):
                assert about["source_ids"] == c.encode(text), (kind, text, about["source_ids"], c.encode(text))
            unknowns = sum(x.count(unknown) for x in map(c.encode, texts))
            assert 20 < unknowns < 1000 and len({i for x in map(c.encode, texts) for i in x}) > 150, (kind, unknowns)


@numpy_test
def ids_decode_to_text_by_the_rules():
    for kind, languages in LANGUAGES.items():
        with checkpoint(kind) as c:
            model, texts = converted(c), lines(80)
            found = [json.loads(x) for x in run([TRANSLATE, "-m", model, *languages, "--json", "--beam", "2",
                                                 "--no-protect"], texts).lines]
            words = 0
            for about in found:
                assert about["translation"].strip() == c.decode(about["ids"]).strip(), (kind, about)
                words += len(set(about["translation"]))
            assert words > 100, kind
            # language tags are the first tokens of the source and of the output
            wanted = [[c.languages[x] for x in languages[1::2]], c.encode(texts[5])]
            source = [*wanted[0][:1], *wanted[1], c.end]
            force = ["--force", str(wanted[0][1])] if len(wanted[0]) == 2 else []
            raw = run([TRANSLATE, "-m", model, "--raw-ids", "--beam", "2", *force],
                      [" ".join(map(str, source))]).lines[0].split()
            assert [int(x) for x in raw[len(force) // 2:]][:len(found[5]["ids"])] == found[5]["ids"], (
                kind, raw, found[5]["ids"])
            pieces = run([TRANSLATE, "-m", model, *languages, "--pretokenized", "--beam", "2"],
                         [" ".join(c.spm.cut(texts[5]))]).lines[0]
            if " " not in c.decode(found[5]["ids"]).strip():
                continue
            wanted = c.decode(found[5]["ids"]).replace(" \u2047 ", "<unk>").strip()
            assert pieces.replace(" ", "").replace(MARK, " ").strip() == wanted, (kind, pieces, wanted)


@numpy_test
def given_targets_are_split_as_targets():
    for kind in ("marian", "separate"):
        with checkpoint(kind) as c:
            model, texts = converted(c), [x for x in lines(40) if x.strip() and "\t" not in x]
            found = run([TRANSLATE, "-m", model, *LANGUAGES[kind], "--score", "--json"], [f"{x}\t{x}" for x in texts])
            for text, about in zip(texts, map(json.loads, found.lines), strict=True):
                assert about["source_ids"] == c.encode(text), (kind, text, about)
                assert about["ids"] == c.encode_target(text), (kind, text, about["ids"], c.encode_target(text))
            assert sum(c.encode(x) != c.encode_target(x) for x in texts) > 30, kind
            # ids given as text are checked against the vocabulary of their side
            sizes = [moefile.read_meta(model).get(x) for x in ("source.vocab.size", "vocab.size")]
            for side, size in zip((0, 1), sizes if sizes[0] else sizes[1:] * 2):
                pair = ["5", "5"]
                for last, status in ((size - 2, 0), (size, 1)):
                    pair[side] = str(last)
                    run([TRANSLATE, "-m", model, *LANGUAGES[kind], "--score", "--ids"], ["\t".join(pair)], status)


@numpy_test
def languages_are_found_by_alternative_names():
    cases = {"nllb": {"de": "deu_Latn", "deu": "deu_Latn", "DEU-latn": "deu_Latn", "en": "eng_Latn", "zh": "zho_Hans",
                      "zh-TW": "zho_Hant",
                      "zh-Hant": "zho_Hant", "zh-CN": "zho_Hans", "pt-BR": "por_Latn", "ar": "arb_Arab",
                      "el": "ell_Grek", "ace": "ace_Arab", "ak": "aka_Latn", "iw": "heb_Hebr", "fil-PH": "tgl_Latn",
                      "he": "heb_Hebr", "mo": "ron_Latn"},
             "m2m": {"deu_Latn": "de", "eng": "en", "zho_Hans": "zh", "zh-Hant": "zh", "de-AT": "de", "por_Latn": "pt",
                     "iw": "he", "heb_Hebr": "he", "in-ID": "id", "nb": "no"},
             "marian": {"de": "deu", "deu_Latn": "deu", "fr": "fra", "cmn": "cmn_Hans", "cmn-hans": "cmn_Hans"},
             "separate": {"de": "deu", "fr": "fra"}}
    for kind, names in cases.items():
        with checkpoint(kind) as c:
            model, first = converted(c), LANGUAGES[kind][:-1]
            wanted = {}
            for name, code in names.items():
                wanted.setdefault(code, run([TRANSLATE, "-m", model, *first, code, "--json"], ["the house"]).stdout)
                assert run([TRANSLATE, "-m", model, *first, name, "--json"],
                           ["the house"]).stdout == wanted[code], (kind, name)
            assert len(set(wanted.values())) > 1, kind
            for name in ("xx", "deutsch", "", "de" * 40):
                part = "has no language" if name in ("xx", "deutsch") else f"invalid value '{name[:60]}"
                assert part in run([TRANSLATE, "-m", model, *first, name], status=2).stderr, (kind, name)
            if len(first) > 1:
                assert "missing -s LANG" in run([TRANSLATE, "-m", model, "-t", "de"], status=2).stderr
            assert "missing -t LANG" in run([TRANSLATE, "-m", model], status=2).stderr


@numpy_test
def the_language_of_every_line_is_detected():
    texts = {"eng_Latn": "The children play in the old house near the river every day. Nobody knows why the door is "
                         "open, and nobody has asked for a long time, because they all like it as it is.",
             "deu_Latn": "Niemand weiß, warum die Tür offen bleibt.", "12": "12",
             "fra_Latn": "Les enfants jouent près de la vieille maison, qui est déjà fermée.",
             "rus_Cyrl": "Старый дом стоит у реки, где играют дети."}
    with checkpoint("nllb") as c:
        model = converted(c)
        command = [TRANSLATE, "-m", model, "-t", "deu_Latn", "--beam", "2", "--max-len", "12", "--split", "0",
                   "--no-protect", "-s"]
        first = Model(model).languages[0]  # the language that auto uses for texts without letters
        alone = [run([*command, first if code == "12" else code], [text]).stdout for code, text in texts.items()]
        assert run([*command, "auto"], texts.values()).stdout == "".join(alone) and len(set(alone)) == len(alone)
        assert run([*command, "auto", "--batch", "1"], texts.values()).stdout == "".join(alone)
        pairs = [f"{text}\tDer Hund" for text in texts.values()]
        scores = [run([*command, first if code == "12" else code, "--score"], [pair]).stdout
                  for code, pair in zip(texts, pairs)]
        assert run([*command, "auto", "--score"], pairs).stdout == "".join(scores)
        assert "do not" not in run([*command, "auto", "--routing", c.folder + ".jsonl"], status=2).stdout
        with Translator(model, target="deu_Latn", source="auto", beam=2, max_len=12,
                        split=0, protect=False) as translator:
            assert "".join(x + "\n" for x in translator.translate(list(texts.values()))) == "".join(alone)
            named = translator.translate(list(texts.values()), source="fra_Latn")
            assert named[3] + "\n" == alone[3] and "".join(x + "\n" for x in named) != "".join(alone)


@numpy_test
def classes_determine_where_languages_go():
    """SMaLL-100's sources begin with the target language; M2M-100's with the source, and targets with the target."""
    text = lines()[3]
    for kind, languages, first, forced in (("small100", ["-t", "de"], "de", None), ("m2m", ["-s", "en", "-t", "de"],
                                           "en", "de"), ("wmt21", ["-s", "is", "-t", "ha"], "is", "ha")):
        with checkpoint(kind) as c:
            model = converted(c)
            assert moefile.read_meta(model)["languages.codes"] == list(c.languages), kind
            search = ["-m", model, "--beam", "2", "--max-len", "8", "--json", "--no-protect"]
            found = json.loads(run([TRANSLATE, *search, *languages], [text]).stdout)
            source = [c.languages[first], *c.encode(text), c.end]
            force = ["--force", str(c.languages[forced])] if forced else []
            raw = json.loads(run([TRANSLATE, *search, "--raw-ids", *force], [" ".join(map(str, source))]).stdout)
            assert raw["ids"][bool(forced):][:len(found["ids"])] == found["ids"] != [], (kind, raw["ids"], found["ids"])
    for about, part in (({"language_codes": "wmt19"}, "language_codes 'wmt19' is not supported"),
                        ({"added_tokens_decoder": {"417": {"content": "__de__"}}}, "language de has id 417, but")):
        with checkpoint("wmt21") as c:
            change_json(c.folder + "/tokenizer_config.json", about)
            assert part in refused(c), (about, refused(c))


@numpy_test
def a_forced_language_is_noted_or_rejected():
    for kind, tag, part in (("nllb", "deu_Latn", "is deu_Latn: select it as the target language, -t deu_Latn"),
                            ("nllb", 5, "is not a target language"), ("small100", "de", "not a target language"),
                            ("marian", "deu", "is not a target language")):
        with checkpoint(kind) as c:
            change_json(c.folder + "/generation_config.json", {"forced_bos_token_id": c.languages.get(tag, tag)})
            with contextlib.redirect_stderr(io.StringIO()) as notes:
                complaint = convert_quietly("--from", "hf", c.folder, "-o", c.folder + ".bin")
            assert part in (complaint or notes.getvalue()) and (complaint is None) == ("select" in part), complaint


def refused(c):
    complaint = convert_quietly("--from", "hf", c.folder, "-o", c.folder + ".bin")
    assert os.listdir(os.path.dirname(c.folder)) == ["model"], complaint
    return complaint or ""


@numpy_test
def mismatched_tokenisers_are_rejected():
    with checkpoint("nllb") as c:
        path = c.folder + "/sentencepiece.bpe.model"
        # without a list of special tokens, 202 languages are expected, too many for the vocabulary
        write_json(c.folder + "/special_tokens_map.json", {})
        assert "202 language token ids" in refused(c), refused(c)
        big = Unigram(lines(), 900)
        for data, part in ((big.bytes, "do not match"), (c.spm.bytes[:-50], "damaged"), (b"", "no pieces"),
                           (b"\x0a\xff", "damaged"),
                           (proto((1, proto((1, "a"), (2, 0.0)))) + proto((3, b"")), "not NLLB's"),
                           (proto((1, proto((1, "a"), (2, 0.0)))), "truncated")):
            write_bytes(path, data)
            assert part in refused(c), (part, refused(c))
    with checkpoint("m2m") as c:
        with open(c.folder + "/vocab.json", encoding="utf-8") as file:
            vocabulary = json.load(file)
        for change, part in (({"x": 10 ** 6}, "the model's vocabulary"), ({"x": -1}, "must be integers"),
                             ({"x": "5"}, "must be integers"),
                             ({"x": 5}, "two pieces have the same id"), ({"</s>": 437, "x": 2}, "</s> has id 437"),
                             ({"<unk>": None}, "must be integers")):
            write_json(c.folder + "/vocab.json", {**vocabulary, **change})
            assert part in refused(c), (change, refused(c))
    with checkpoint("marian") as c:
        write_json(c.folder + "/tokenizer_config.json", {"separate_vocabs": True})
        assert "share an embedding" in refused(c), refused(c)
        os.unlink(c.folder + "/tokenizer_config.json")
        os.unlink(c.folder + "/target.spm")
        assert "target.spm is missing" in refused(c)
        os.unlink(c.folder + "/source.spm")
        os.unlink(c.folder + "/vocab.json")
        # a model without a tokeniser accepts only ids
        assert "contains no tokeniser" in run([TRANSLATE, "-m", converted(c)], status=3).stderr


@numpy_test
def the_direction_of_a_model_is_stored():
    """Model files store the direction for pivot translation, but only its source if the model has target tags."""
    for tagged, part, wanted in ((True, {"source_lang": "en", "target_lang": "gem"}, (["en"], None)),
                                 (False, {"source_lang": "en", "target_lang": "de"}, (["en"], ["de"])),
                                 (False, {"source_lang": "mul,de", "target_lang": 5}, (None, None))):
        with checkpoint("marian") as c:
            with open(c.folder + "/vocab.json", encoding="utf-8") as file:
                vocabulary = json.load(file)
            write_json(c.folder + "/vocab.json", {x: i for x, i in vocabulary.items() if tagged or x[:2] != ">>"})
            write_json(c.folder + "/tokenizer_config.json", part)
            meta = moefile.read(converted(c))[0]
            assert (meta.get("languages.sources"), meta.get("languages.targets")) == wanted, (part, wanted)
            if wanted[1]:
                models = [TRANSLATE, "-m", c.folder + ".bin", "-m", c.folder + ".bin"]
                assert "available: en de" in run([*models, "-s", "en", "-t", "fr", "a"], status=2).stderr
            elif tagged:  # the tags give the targets, the stored list the sources
                for several in [], ["-m", c.folder + ".bin"]:
                    ask = [TRANSLATE, "-m", c.folder + ".bin", *several, "-t", next(iter(c.languages)), "-s"]
                    assert run([*ask, "en", "a"]).stdout.count("\n") == 1
                    assert "available: en" in run([*ask, "xx", "a"], status=2).stderr


@numpy_test
def mismatched_separate_vocabularies_are_rejected():
    with checkpoint("separate") as c:
        path = c.folder + "/target_vocab.json"
        with open(path, encoding="utf-8") as file:
            targets = json.load(file)
        for change, part in (({"x": len(targets)}, "the model's vocabulary"), ({"x": 5}, "two pieces"),
                             ({"</s>": len(targets) - 1, "<pad>": 0}, "but 0 in config.json")):
            write_json(path, {**targets, **change})
            assert part in refused(c) and "target_vocab.json" in refused(c), (change, refused(c))
        write_json(path, {x: i for x, i in targets.items() if x != "<unk>"})
        assert "<unk> is missing" in refused(c), refused(c)
        os.unlink(path)
        assert "target_vocab.json" in refused(c), refused(c)
        write_json(path, targets)
        write_json(c.folder + "/tokenizer_config.json", {"separate_vocabs": 3})
        assert "invalid separate_vocabs 3" in refused(c), refused(c)
        write_json(c.folder + "/tokenizer_config.json", {})
        assert "set separate_vocabs in tokenizer_config.json" in refused(c), refused(c)


@numpy_test
def programs_reject_mismatched_separate_vocabularies():
    with checkpoint("separate") as c:
        meta, tensors = moefile.read(converted(c))
        size = meta["source.vocab.size"]
        info = run([os.path.join(os.path.dirname(TRANSLATE), "moe-info"), c.folder + ".bin"]).stdout
        assert f"{size} separate tokens" in info, info
        for change, part in (({"source.vocab.size": size - 1}, "source.embedding.weight"),
                             ({"source.token.eos": size}, "source.token.eos"), ({"source.token.eos": None}, "missing"),
                             ({"languages.tags": np.array([2, size])}, "languages.tags"),
                             ({"target.tag": 1}, "target.tag"), ({"source.bos": 1}, "source.bos"),
                             ({"source.pieces": ["x"]}, "source.pieces"),
                             ({"source.pieces": None}, "source.pieces")):
            bad = {k: v for k, v in {**meta, **change}.items() if v is not None}
            moefile.write_model(c.folder + ".bad", bad, tensors)
            assert part in run([TRANSLATE, "-m", c.folder + ".bad", "-t", "de"], status=3).stderr, change
        with contextlib.suppress(FileNotFoundError):
            os.unlink(c.folder + ".bad")


@numpy_test
def programs_reject_damaged_lists_of_ids():
    with checkpoint("nllb") as c:
        meta, tensors = moefile.read(converted(c))
        ids = meta["tokenizer.ids"]
        for value, part in ((ids[:-1], "must be a list of"),
                            (np.where(ids == 9, 10 ** 6, ids), "outside the vocabulary"),
                            (np.where(ids == 9, -2, ids), "outside the vocabulary"), ("x", "must be a list of")):
            moefile.write_model(c.folder + ".bad", {**meta, "tokenizer.ids": value}, tensors)
            assert part in run([TRANSLATE, "-m", c.folder + ".bad", *LANGUAGES["nllb"]], status=3).stderr, part
        moefile.write_model(c.folder + ".none", {**meta, "tokenizer.ids": np.full(len(ids), -1), "token.unk": -1},
                            tensors)
        assert "which has no unknown token" in run([TRANSLATE, "-m", c.folder + ".none", *LANGUAGES["nllb"]], ["the"],
                                                   status=1).stderr


@numpy_test
def tokenisers_that_split_differently_are_rejected_by_name():
    added = {"400": {"content": "friend", "special": False}}
    for name, values, part in (("tokenizer_config.json", {"legacy_behaviour": True}, "legacy_behaviour is True"),
                               ("tokenizer_config.json", {"sp_model_kwargs": {"alpha": 0.1}}, "sp_model_kwargs"),
                               ("tokenizer_config.json", {"added_tokens_decoder": added}, "added token 'friend'"),
                               ("special_tokens_map.json", {"additional_special_tokens": ["[X]"]}, "token '[X]'"),
                               ("added_tokens.json", {"friend": 400}, "added token 'friend'"),
                               ("added_tokens.json", {"<mask>": 400, "deu_Latn": 401}, None),
                               ("tokenizer_config.json", {"legacy_behaviour": False}, None),
                               ("tokenizer.json", {"added_tokens": [{"id": 400, "content": "friend"}]}, "'friend'"),
                               ("tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"}, "tokenizer_class 'T5To"),
                               ("tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer"}, "vocab.json is miss"),
                               ("tokenizer_config.json", {"tokenizer_class": "NllbTokenizerFast"}, None),
                               ("config.json", {"tokenizer_class": "MBartTokenizer"}, "'MBartTokenizer' is not"),
                               ("special_tokens_map.json", {"eos_token": {"content": "<end>"}}, "eos_token is '<end>'"),
                               ("tokenizer_config.json", {"unk_token": "[UNK]", "pad_token": "<pad>"}, "unk_token is"),
                               ("tokenizer_config.json", {"extra_special_tokens": {"x": "<x>"}}, "extra_special_tok"),
                               ("tokenizer_config.json", {"keep_accents": False}, "unknown key 'keep_accents'"),
                               ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a.B", None]}}, "never run"),
                               ("tokenizer_config.json", {"model_max_length": 1024, "src_lang": "deu_Latn", "tgt_lang":
                                                          None, "clean_up_tokenization_spaces": True}, None)):
        with checkpoint("nllb") as c:
            change_json(os.path.join(c.folder, name), values)
            complaint = convert_quietly("--from", "hf", c.folder, "-o", c.folder + ".bin")
            assert part in complaint if part else complaint is None, (values, complaint)
            assert os.path.exists(c.folder + ".bin") == (part is None)


# Of each family: the missing files, a file that cannot replace them, and the message.
INCOMPLETE = (("nllb", ["sentencepiece.bpe.model"], "tokenizer.json", "sentencepiece.bpe.model is missing; found only "
               "tokenizer.json"), ("nllb", ["sentencepiece.bpe.model"], None, "sentencepiece.bpe.model is missing. To convert"),
              ("m2m", ["vocab.json"], "tokenizer_config.json", "vocab.json is missing; found only sentencepiece.bpe.model"),
              ("marian", ["source.spm", "target.spm"], "tokenizer.json", "source.spm and target.spm are missing; found "
               "only tokenizer.json and vocab.json"), ("marian", ["source.spm", "target.spm", "vocab.json"], None,
                                                "source.spm and target.spm and vocab.json are missing. To convert"),
              ("marian", ["source.spm", "target.spm", "vocab.json"], "source.bpe", "found only source.bpe"))


@numpy_test
def models_without_a_tokeniser_need_ids_only():
    for kind, missing, other, message in INCOMPLETE:
        with checkpoint(kind) as c:
            for name in missing:
                os.unlink(os.path.join(c.folder, name))
            if other:
                write_json(os.path.join(c.folder, other), {"tokenizer_class": "M2M100Tokenizer"})
            command, out = ("--from", "hf", c.folder, "-o", c.folder + ".bin"), c.folder + ".bin"
            complaint, _ = convert_here(*command)
            assert complaint and not os.path.exists(out), (kind, missing)
            assert message in complaint and "use --ids-only" in complaint, complaint
            with contextlib.redirect_stderr(io.StringIO()) as notes:
                assert convert_quietly(*command, "--ids-only") is None
            assert "tokeniser" not in notes.getvalue(), notes.getvalue()
            assert "contains no tokeniser" in run([TRANSLATE, "-m", out], status=3).stderr
            os.unlink(out)


@numpy_test
def tokenisers_beyond_the_engines_limit_are_rejected():
    import hf_tokens
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with open(os.path.join(root, "tools", "text", "spm.h"), encoding="utf-8") as file:
        megabytes = int(file.read().split("SPM_MAX_MODEL = ")[1].split(" << 20")[0])
    assert hf_tokens.LARGEST_MODEL == megabytes << 20
    with checkpoint("nllb") as c:
        with open(os.path.join(c.folder, "sentencepiece.bpe.model"), "r+b") as file:
            file.truncate((megabytes << 20) + 1)
        complaint = convert_quietly("--from", "hf", c.folder, "-o", c.folder + ".bin")
        assert f"limit of {megabytes << 20}" in complaint, complaint


# ---- transformers ----------------------------------------------------------------------------------------------------

class Trained(Unigram):
    """A unigram model that sentencepiece trains and applies."""

    def __init__(self, texts, size):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, vocab_size=size,
                                                 minloglevel=2,
                                                 character_coverage=0.995, unk_id=0, bos_id=1, eos_id=2)
        self.bytes = model.getvalue()
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=self.bytes)
        self.pieces = [self.processor.id_to_piece(i) for i in range(size)]

    def cut(self, text):
        return self.processor.encode(text, out_type=str)


@oracle_test
def the_rules_split_like_transformers():
    """Compare HF's slow tokenisers for a trained model with the rules above, and with moe-translate, which may use
    another version of SentencePiece."""
    import logging
    logging.disable(logging.WARNING)
    for kind, languages in LANGUAGES.items():
        texts = lines()
        with checkpoint(kind, spm=Trained(texts, 300), other=Trained([x[::-1] for x in texts], 280)) as c:
            if kind == "nllb":
                ids = {str(i): {"content": x, "special": True} for x, i in c.languages.items()}
                write_json(c.folder + "/tokenizer_config.json", {"added_tokens_decoder": ids})
                there = transformers.NllbTokenizer.from_pretrained(c.folder, src_lang="eng_Latn", tgt_lang="deu_Latn")
            elif kind == "m2m":
                there = transformers.M2M100Tokenizer.from_pretrained(c.folder, src_lang="en", tgt_lang="de")
            else:
                there = transformers.MarianTokenizer.from_pretrained(c.folder)
            found = [json.loads(x)["source_ids"]
                     for x in run([TRANSLATE, "-m", converted(c), *languages, "--json", "--beam", "1", "--max-len", "4",
                                   "--no-protect"], texts).lines]
            differ = 0
            for text, ours in zip(texts, found, strict=True):
                wanted = there(text).input_ids
                if kind == "nllb":
                    assert wanted[0] == c.languages["eng_Latn"] and wanted[-1] == 2
                if kind in ("marian", "separate"):
                    assert wanted[-1] == c.end and there(text_target=text).input_ids[:-1] == c.encode_target(text)
                body = wanted[1:-1] if kind in ("nllb", "m2m") else wanted[:-1]
                assert c.encode(text) == body, (kind, text, c.encode(text), body)
                differ += ours != body
            print(f"{kind}: the programs' SentencePiece splits {differ} of {len(texts)} lines differently")
            assert differ <= len(texts) // 100


@oracle_test
def languages_have_the_ids_of_transformers():
    import logging
    logging.disable(logging.WARNING)
    for kind, about in (("wmt21", {}), ("small100", {"tokenizer_class": "M2M100Tokenizer"}),
                        ("small100", {"tokenizer_class": None, "language_codes": None}),
                        ("small100", {"tokenizer_class": "M2M100Tokenizer", "additional_special_tokens":
                                      [f"__{x}__" for x in sorted(hf_tokens.M2M_CODES, reverse=True)]}), ("nllb", {})):
        with checkpoint(kind) as c:
            change_json(c.folder + "/tokenizer_config.json", about)
            if kind == "nllb":  # as in the published files: ids not in the order of the list
                ids = dict(zip(random.Random(2).sample(list(c.languages), len(c.languages)), c.languages.values()))
                change_json(c.folder + "/tokenizer_config.json", {"added_tokens_decoder": {
                    str(i): {"content": code, "special": True} for code, i in ids.items()}})
                there = transformers.NllbTokenizer.from_pretrained(c.folder)
            else:
                if about.get("language_codes", 0) is None:
                    write_json(c.folder + "/tokenizer_config.json", {})
                there = transformers.M2M100Tokenizer.from_pretrained(c.folder)
            meta = moefile.read_meta(converted(c))
            for code, tag in zip(meta["languages.codes"], meta["languages.tags"], strict=True):
                wanted = there.convert_tokens_to_ids(code) if kind == "nllb" else there.get_lang_id(code)
                assert tag == wanted, (kind, about, code, tag, wanted)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run tests with matching names")
    return test.run(parser.parse_args().only)


if __name__ == "__main__":
    sys.exit(main())
