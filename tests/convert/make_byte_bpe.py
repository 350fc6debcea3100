#!/usr/bin/env python3
"""Create small BPE tokenisers and the results of Hugging Face's `tokenizers` with them.

Usage: tests/python tests/convert/make_byte_bpe.py FILE      writes tests/golden/byte-bpe.json (created with 0.22.2)

FILE contains {"tokenizers": {kind: tokenizer.json}, "cases": {kind: [{"text", "ids", "plain", "decoded"}]}, "prompts":
{kind: {prefix, suffix: [{"text", "ids"}]}}}, with the ids of texts in chat templates. In "ids" added tokens are parsed;
"plain" treats them as text and is omitted if equal. Kinds of bytes: Hunyuan's (A), Qwen's (C), SmolLM2's, Cohere's, and
Llama 3's ("llama"), which has no merges for tokens that are whole pieces. Kinds of characters, in which "plain" parses
added tokens that are not special: Llama 2's, Mistral's and Gemma's.
"""
import json
import sys

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

PAGE = """The old house stands near the river, where children play every long summer day; nobody asks why.
Das alte Haus steht am Fluß, wo die Kinder jeden Tag spielen, und niemand weiß, warum die Tür offen bleibt.
La vieille maison près de l'eau, où les enfants jouent chaque été, est déjà fermée à clé pour l'hiver.
Старый дом стоит у реки, где дети играют каждый день, и никто не знает, почему дверь открыта.
老房子在河边，孩子们每天都在那里玩，没有人知道为什么门开着。川の近くの古い家で、子供たちは毎日遊んでいます。
오래된 집은 강가에 있고 아이들은 매일 거기서 놉니다. पुराना घर नदी के पास है जहाँ बच्चे हर दिन खेलते हैं।
البيت القديم قرب النهر حيث يلعب الأطفال كل يوم. In 1984 it cost $12.50 (or 1,234 in all): "cheap", they'd say.
    for (int i = 0; i < n; i++) { sum += x[i] * y[i]; }   # they're the rows; we've 3 of them, don't you?
"""
SPLITS = {
    "A": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
          r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
          r"""[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""],
    "C": [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+"]}
SPLITS["llama"] = [SPLITS["C"][0].replace(r"|\p{N}|", r"|\p{N}{1,3}|")]
ADDED = [("<｜end▁of▁text｜>", True), ("<｜end▁of｜>", True), ("<｜User｜>", True), ("<think>", False),
         ("</think>", False)]
TEXTS = ["", " ", "  ", "   x", "x   ", "\n", "\n\n", " \n", "\n ", "\t", "\r\n", "\r", "a\r\n\r\nb", " \n \n x",
         "   \n\n   y", "the house", " the house", "The  house", "THE HOUSE",
         "they're WE'VE don'T it'S 'Tis I'LL 'ſ 'K", "1", "12", "123", "1234", "12345678", "a1b22c333d4444",
         "３４５６ ½ Ⅷ ٣٤٥", "$12.50", "1,234,567.89", "(x)", " (x) ", "!?!?", "...", "->x", "foo_bar.baz(qux)",
         "https://example.org/a?b=c&d=%20", "#include <stdio.h>", "\\n \\t", "naïve café", "nai\u0308ve cafe\u0301",
         "\u0301\u0323a\u0323\u0301", "a\u0345\u0301\u0323\u0327", "\u1100\u1161\u11a8", "각", "ﬁ ﬃ Ω \u2126 \u212b",
         "Straße ẞ ŉ İ ı", "Старый дом", "старый\u00a0дом", "老房子在河边，孩子们", "川の近くのABC古い家123", "カタカナ ｶﾀｶﾅ", "오래된 집",
         "पुराना घर नदी", "البيت القديم", "😀", "👩\u200d👩\u200d👧", "🇩🇪🇫🇷", "a\u200bb\u200cc\ufeffd",
         "\u180e \u180ex  \u180e", "\u3000\u3000x\u2003y\u2028z\u2029", "\x00a\x00", "\x1c\x1d\x85x",
         "\ue000\U0010ffff", "<think>", "<think>x</think>", "<｜User｜>Hi<｜end▁of▁text｜>", "a <｜end▁of｜> b",
         "<｜end▁of", "<｜｜User｜>", "<|User|>", "x" * 70, "ab" * 40, "the" * 30, " " * 70, "\n" * 40, "!" * 50,
         "<s>x</s>", " <s> x", "a<unk>", "<0x41>", "\u2581x \u2581", "老 x老", "0" * 50, "é" * 33, "\u0301\u0323" * 20, PAGE]


def with_whole_pieces(tokenizer):
    """Drop half of the merges of tokens that are not part of others, and ignore merges for whole pieces, like Llama 3."""
    values = json.loads(tokenizer.to_str())
    merges = [x.split(" ") if isinstance(x, str) else x for x in values["model"]["merges"]]
    parts = {part for pair in merges for part in pair}
    last = [pair for pair in merges if "".join(pair) not in parts]
    values["model"].update(merges=[pair for pair in merges if pair not in last[::2]], ignore_merges=True)
    return Tokenizer.from_str(json.dumps(values))


def made(kind):
    tokenizer = Tokenizer(models.BPE())
    if kind in ("smollm", "cohere"):
        cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        cuts = [pre_tokenizers.Split(Regex(x), "isolated") for x in SPLITS[kind]]
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    if kind in ("C", "cohere"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator([PAGE], trainer)
    tokenizer = with_whole_pieces(tokenizer) if kind == "llama" else tokenizer
    plain = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in ADDED])
    if kind in ("llama", "cohere"):
        begin = ADDED[0][0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.token_to_id(begin))])
    return tokenizer, plain


SPACES = "llama2", "mistral", "gemma"
TALKS = ("<s>[INST] ", " [/INST]"), ("<s>", "<think>"), ("", "\n")
TURNS = "house", "the old house, near the river", "日本語 x", "a <b>bold</b> word", "Fluß 😀", "<think>x"


def all_merges(vocabulary):
    """Return all pairs of tokens that join to a token, as transformers derives them from SentencePiece's scores, which
    fall with the id."""
    pairs = [(i, -at, text) for text, i in vocabulary.items() for at in range(1, len(text))
             if text[:at] in vocabulary and text[at:] in vocabulary]
    return [(text[:-at], text[-at:]) for _, at, text in sorted(pairs)]


def of_characters(kind):
    """Return a tokeniser of characters with tokens for bytes, and the same without special tokens."""
    replace = normalizers.Replace(" ", "\u2581")
    learner = Tokenizer(models.BPE())
    learner.normalizer = replace
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    usual = sorted(set(PAGE), key=lambda c: (-PAGE.count(c), c))[:60]  # the others become bytes
    learner.train_from_iterator(["".join(c for c in line if c in usual) for line in PAGE.splitlines()], trainer)
    learned = json.loads(learner.to_str())["model"]["vocab"]
    more = ADDED + [("\n\n", False), ("<b>", False)] * (kind == "gemma")
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n", *learned]
    texts = list(dict.fromkeys(texts))[:420] + [text for text, _ in more]
    vocabulary = {text: i for i, text in enumerate(texts)}
    values = Tokenizer(models.BPE(vocabulary, all_merges(vocabulary), unk_token="<unk>", fuse_unk=True,
                                  byte_fallback=True))
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    if kind == "mistral":
        values.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    else:
        values.normalizer = replace if kind == "gemma" else normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    if kind == "gemma":
        values.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    values.decoder = tokenizers.decoders.Sequence(steps + [tokenizers.decoders.Strip(" ", 1, 0)] * (kind != "gemma"))
    plain = Tokenizer.from_str(values.to_str())
    values.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    values.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in more])
    plain.add_tokens([AddedToken(text, special=False, normalized=False) for text, special in more if not special])
    return values, plain


def main():
    found = {"made_with": f"tokenizers {tokenizers.__version__}, tests/convert/make_byte_bpe.py", "tokenizers": {},
             "cases": {}, "prompts": {}}
    for kind in ("A", "C", "smollm", "llama", *SPACES, "cohere"):
        tokenizer, plain = of_characters(kind) if kind in SPACES else made(kind)
        values = json.loads(tokenizer.to_str())
        values["model"]["merges"] = [x if isinstance(x, str) else " ".join(x) for x in values["model"]["merges"]]
        found["tokenizers"][kind], found["cases"][kind] = values, []
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            case = {"text": text, "ids": ids, "plain": plain.encode(text).ids}
            case["decoded"] = tokenizer.decode(case["ids"], skip_special_tokens=False)
            if case["plain"] == case["ids"]:
                del case["plain"]
            found["cases"][kind].append(case)
    for kind in SPACES:
        tokenizer = Tokenizer.from_str(json.dumps(found["tokenizers"][kind]))
        found["prompts"][kind] = [{"prefix": before, "suffix": after, "cases": [
            {"text": text, "ids": tokenizer.encode(before + text + after, add_special_tokens=False).ids}
            for text in TURNS]} for before, after in TALKS]
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(found, file, ensure_ascii=False, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
