"""Byte-level BPE of decoder-only models (llm.md, section 4) as bytes that a model file keeps.

    meta.update(tokenizer_meta(folder, vocabulary))
        of folder/tokenizer.json, or else folder/hy.tiktoken; vocabulary: vocab_size of config.json, which may be larger
        than the tokeniser. That is
            tokenizer.kind   "byte-bpe"
            tokenizer.model  bytes, tokenizer_blob(folder, vocabulary); tools/text/bpe.h says what is in them
    pack(tokens, merges, added, expressions, nfc)
        the same bytes of a tokeniser from elsewhere, such as a GGUF file

What would cut texts in another way than the engine does is refused by name: other models, normalisers, splits,
tokens that take the spaces around them.
"""
import base64
import os
import re
import struct
import typing

from hf_json import LARGEST_JSON, read_json, short
from moefile import FormatError, read_bounded

KIND = "byte-bpe"
MAGIC, VERSION = b"MOE-BPE\0", 1
# As in bpe.h.
MOST_TOKENS, MOST_ADDED, MOST_EXPRESSIONS, LONGEST_PIECE, LONGEST_EXPRESSION = 1 << 20, 4096, 16, 1024, 4096
SPECIAL, NORMALISED = 1, 2
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own
# GPT-2's stand-ins: bytes that have a printable sign are that sign, the others follow from U+0100 on.
PRINTABLE = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
STAND_INS = dict(zip(PRINTABLE + [b for b in range(256) if b not in PRINTABLE],
                     map(chr, PRINTABLE + list(range(0x100, 0x144)))))
# Bytes of control characters and of the highest planes: SmolLM2 has no tokens for some of them, and texts lose them, as
# in the published package.
MAY_LACK = {*range(0x20), 0x7f, 0xc0, 0xc1, *range(0xf1, 0x100)}

SPACE = r"\t-\r\x{85}\p{Z}"  # \s of the published package; PCRE2's has U+180E too


class Added(typing.NamedTuple):
    """A token that is cut out of a text before anything else; `normalised`: out of the normalised text."""
    id: int
    content: str
    special: bool
    normalised: bool = False


def utf8(text, what, longest):
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = b""
    if not 0 < len(data) <= longest or b"\0" in data:
        raise FormatError(f"the tokeniser's {what} {short(text)} is not of 1 to {longest} bytes of UTF-8 without NUL")
    return data


# What means the same to Oniguruma, which the published package uses, and to PCRE2.
SAME = re.compile(r"\\[rntvfd]|\\[pP]\{\^?[A-Za-z_]+\}|\\x\{[0-9a-fA-F]+\}|\\[^\w\s]|\(\?[i-]*:|\(\?[=!]|\((?![?*])|"
                  r"\{[0-9]+(?:,[0-9]*)?\}(?!\+)|[^\\{}^$&(\[\]]|&(?!&)", re.S)


def for_pcre2(expression):
    """The expression that means to PCRE2 what this one means to the published package."""
    out, inside, at = [], False, 0
    utf8(expression, "expression", LONGEST_EXPRESSION)
    while at < len(expression):
        rest = expression[at:]
        same = SAME.match(rest)
        part = same[0] if same else r"\s" if rest.startswith(r"\s") else r"\S" if rest.startswith(r"\S") else rest[0]
        at += len(part)
        if part == r"\s":
            part = SPACE if inside else f"[{SPACE}]"
        elif part == r"\S" and not inside:
            part = f"[^{SPACE}]"
        elif part == "[" and not inside:
            part = "[^" if rest.startswith("[^") else "["
            at += len(part) - 1
            inside = True
        elif part == "]" and inside:
            inside = False
        elif not same and not (inside and part in "^${}"):
            raise FormatError(f"the tokeniser's expression {short(expression)}: {short(rest[:12])} may mean something "
                              "else here, it is not supported")
        out.append(part)
    return "".join(out)


def pack(tokens, merges, added=(), expressions=(), nfc=False):
    """The bytes of a tokeniser. tokens: {id: how it is written, bytes as stand-ins}; merges: pairs of such texts, the
    first to be joined first; expressions: of the splits, the first first."""
    if len(expressions) > MOST_EXPRESSIONS:
        raise FormatError(f"the tokeniser has {len(expressions)} expressions, at most {MOST_EXPRESSIONS} are supported")
    if len(added) > MOST_ADDED:
        raise FormatError(f"the tokeniser has {len(added)} added tokens, at most {MOST_ADDED} are supported")
    if not tokens or not 0 <= min(tokens) <= max(tokens) < MOST_TOKENS or len(merges) > MOST_TOKENS:
        raise FormatError(f"the tokeniser has no token, an id that is not from 0 to {MOST_TOKENS - 1}, or more merges "
                          "than that")
    ids = {text: i for i, text in tokens.items()}
    if len(ids) != len(tokens):
        raise FormatError("two ids of the tokeniser stand for one token")
    for byte, text in STAND_INS.items():
        if text not in ids and byte not in MAY_LACK:
            raise FormatError(f"the tokeniser has no token for the byte {byte:02x}")
    ranks = {}
    for rank, pair in enumerate(merges):
        for text in (*pair, "".join(pair)):
            if text not in ids:
                raise FormatError(f"merge {rank + 1} of the tokeniser, {short(pair)}: {short(text)} is no token")
        ranks[pair] = rank  # of two equal ones the later, as in the published package
    out = [MAGIC, struct.pack("<6I", VERSION, bool(nfc), len(expressions), max(tokens) + 1, len(ranks), len(added))]
    for expression in expressions:
        data = utf8(for_pcre2(expression), "expression", LONGEST_EXPRESSION)
        out += struct.pack("<H", len(data)), data
    for i in range(max(tokens) + 1):
        data = utf8(tokens[i], "token", LONGEST_PIECE) if i in tokens else b""
        out += struct.pack("<H", len(data)), data
    for left, right in sorted(ranks, key=ranks.get):
        out.append(struct.pack("<3I", ids[left], ids[right], ids[left + right]))
    seen, contents = set(), set()
    for token in added:
        if not 0 <= token.id < MOST_TOKENS or token.id in seen or token.content in contents:
            raise FormatError(f"the added token {short(token.content)} has the id {token.id}: that is no id, or one of "
                              "two, or the token stands twice")
        if tokens.get(token.id, token.content) != token.content or ids.get(token.content, token.id) != token.id:
            raise FormatError(f"the added token {short(token.content)} has the id {token.id}, the vocabulary says "
                              "otherwise")
        seen.add(token.id)
        contents.add(token.content)
        data = utf8(token.content, "added token", LONGEST_PIECE)
        flags = SPECIAL * bool(token.special) | NORMALISED * bool(token.normalised)
        out += struct.pack("<IIH", token.id, flags, len(data)), data
    return b"".join(out)


# ---- tokenizer.json --------------------------------------------------------------------------------------------------

class Reader:
    """Values of one file; what is wrong with them names it."""

    def __init__(self, path):
        self.path = path

    def fail(self, why):
        raise FormatError(f"{self.path}: {why}")

    def type_of(self, value, what):
        """How a part of the tokeniser is called; "none": there is no such part."""
        if value is None:
            return "none"
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            self.fail(f"its {what} is {short(value)}")
        return value["type"]

    def refuse(self, value, what, **fine):
        """Refuses settings that are neither missing nor fine."""
        for key, good in fine.items():
            if key in value and not any(value[key] is x or type(value[key]) is type(x) and value[key] == x
                                        for x in good):
                self.fail(f"{key} of its {what} is {short(value[key])}, which is not supported")

    def parts(self, value, what, key):
        """The parts of a sequence, or of what is none."""
        if self.type_of(value, what) != "Sequence":
            return [] if value is None else [value]
        if not isinstance(value.get(key), list):
            self.fail(f"its {what} is a sequence of {short(value.get(key))}")
        return [part for inner in value[key] for part in ([inner] if self.type_of(inner, what) != "Sequence" else
                                                          self.fail(f"its {what} is a sequence inside a sequence"))]

    def normaliser(self, value):
        """Whether it is NFC."""
        found = {self.type_of(part, "normaliser") for part in self.parts(value, "normaliser", "normalizers")}
        for other in sorted(found - {"NFC"}):
            self.fail(f"its normaliser {short(other)} is not supported: NFC is, and none")
        return bool(found)

    def expressions(self, value):
        """Of the splits, in their order."""
        found, last = [], None
        for part in self.parts(value, "pre-tokeniser", "pretokenizers"):
            if last == "ByteLevel":
                self.fail("its pre-tokeniser goes on behind ByteLevel, which is not supported")
            last = self.type_of(part, "pre-tokeniser")
            if last == "Split":
                self.refuse(part, "Split", behavior=("Isolated",), invert=(False,))
                pattern = part.get("pattern")
                if not isinstance(pattern, dict) or not isinstance(pattern.get("Regex"), str):
                    self.fail(f"the pattern of its Split is {short(pattern)}, only a Regex is supported")
                found.append(pattern["Regex"])
            elif last == "Digits":
                found.append(r"\p{N}" if part.get("individual_digits") is True else r"\p{N}+")
            elif last == "ByteLevel":
                if part.get("add_prefix_space", True) is not False:
                    self.fail("its ByteLevel puts a space before texts (add_prefix_space), which is not supported")
                found += [GPT2] * (part.get("use_regex", True) is not False)
            else:
                self.fail(f"its pre-tokeniser {short(last)} is not supported: Split, Digits and ByteLevel are")
        if last != "ByteLevel":
            self.fail("its pre-tokeniser does not end with ByteLevel")
        return found

    def tokens(self, model):
        """{id: token}."""
        vocabulary = model.get("vocab")
        if not isinstance(vocabulary, dict) or not all(type(i) is int for i in vocabulary.values()):
            self.fail("its vocabulary is no object of ids")
        tokens = {i: text for text, i in vocabulary.items()}
        if len(tokens) != len(vocabulary):
            self.fail("an id of its vocabulary stands for two tokens")
        return tokens

    def merges(self, model):
        """[(left, right)]: "left right", or, newer, ["left", "right"]."""
        found = model.get("merges")
        if not isinstance(found, list):
            self.fail("its merges are no list")
        pairs = [tuple(x.split(" ") if isinstance(x, str) else x if isinstance(x, list) else ()) for x in found]
        for pair, x in zip(pairs, found):
            if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                self.fail(f"the merge {short(x)} is no pair of tokens")
        return pairs

    def added(self, rows):
        """[Added]; rows: [(id, what the file says of the token)]."""
        found = []
        for i, about in rows:
            if not isinstance(about, dict) or type(i) is not int or not isinstance(about.get("content"), str):
                self.fail(f"an added token is {short(about)}")
            self.refuse(about, f"added token {short(about['content'])}", lstrip=(False,), rstrip=(False,),
                        single_word=(False,), special=(False, True), normalized=(False, True))
            special = about.get("special", False)
            found.append(Added(i, about["content"], special, about.get("normalized", not special)))
        return found


def more_added(folder, added):
    """With the tokens that tokenizer_config.json has beside those of tokenizer.json."""
    path = os.path.join(folder, "tokenizer_config.json")
    more = read_json(path).get("added_tokens_decoder") if os.path.exists(path) else None
    reader, ids = Reader(path), {token.content: token.id for token in added}
    known = set(ids)
    if more is None:
        return added
    if not isinstance(more, dict) or not all(re.fullmatch("[0-9]{1,9}", i) for i in more):
        reader.fail(f"added_tokens_decoder is {short(more)}")
    found = list(added)
    for token in reader.added([(int(i), about) for i, about in more.items()]):
        if ids.setdefault(token.content, token.id) != token.id:
            reader.fail(f"the added token {short(token.content)} has the id {token.id}, tokenizer.json says "
                        f"{ids[token.content]}")
        if token.content not in known:
            found.append(token)
    return found


# ---- hy.tiktoken -----------------------------------------------------------------------------------------------------
# Hunyuan-MT-7B, Hy-MT2-7B: lines "base64 rank", and tokenization_hy.py, whose expression and special tokens are here.

HY = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
      r"|\s+")
HY_SPECIALS = ["endoftext", "startoftext", "bos", "eos", "pad", *(f"extra_{i}" for i in range(205))]
MOST_STEPS = 1 << 27  # of all tokens, the square of their bytes


def halves(ranks, token):
    """The two tokens that a token is joined of: what the merges of lower ranks leave of it."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))]
        rank, i = min(found)
        if rank >= ranks[token]:
            break
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def read_ranks(path):
    """{bytes: rank}: every rank once, from 0 on."""
    ranks = {}
    for number, line in enumerate(read_bounded(path, LARGEST_JSON, "a file of tiktoken").splitlines(), 1):
        try:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
        except ValueError:
            raise FormatError(f"{path}: line {number} is not a token in base64 and its rank") from None
        if len(ranks) != number or len(ranks) > MOST_TOKENS:
            raise FormatError(f"{path}: line {number} has a token for the second time, or one too many")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise FormatError(f"{path}: its ranks are not 0, 1, 2 and so on")
    if sum(len(token) ** 2 for token in ranks) > MOST_STEPS:
        raise FormatError(f"{path}: its tokens are too long")
    return ranks


def tiktoken_blob(path, vocabulary=None):
    """The tokeniser of hy.tiktoken as bytes."""
    ranks, merges = read_ranks(path), []
    written = {token: "".join(STAND_INS[byte] for byte in token) for token in sorted(ranks, key=ranks.get)}
    for token, text in written.items():
        parts = halves(ranks, token) if len(token) > 1 else ()
        if len(parts) > 2 or any(part not in ranks for part in parts):
            raise FormatError(f"{path}: the token {short(text)} is not what merges of lower ranks make")
        if parts:
            merges.append((written[parts[0]], written[parts[1]]))
    added = [Added(len(ranks) + i, f"<|{name}|>", True) for i, name in enumerate(HY_SPECIALS)]
    if vocabulary is not None and added[-1].id >= vocabulary:
        raise FormatError(f"{path}: it does not fit: it has the id {added[-1].id}, the model {vocabulary} tokens")
    try:
        return pack({ranks[token]: text for token, text in written.items()}, merges, added, [HY], True)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def tokenizer_blob(folder, vocabulary=None):
    """The tokeniser of a folder in Hugging Face's layout as bytes. vocabulary: how many ids the model has."""
    path, ranks = os.path.join(folder, "tokenizer.json"), os.path.join(folder, "hy.tiktoken")
    if os.path.exists(ranks) and not os.path.exists(path):
        return tiktoken_blob(ranks, vocabulary)
    reader, values = Reader(path), read_json(path)
    model = values.get("model")
    if reader.type_of(model, "model") != "BPE":
        reader.fail(f"its model is {short(model.get('type') if model else None)}, only BPE over bytes is supported")
    reader.refuse(model, "model", dropout=(None, 0, 0.0), byte_fallback=(False,), ignore_merges=(False,),
                  continuing_subword_prefix=(None, ""), end_of_word_suffix=(None, ""))
    for part, fine in ("post_processor", ("none", "ByteLevel")), ("decoder", ("ByteLevel",)):
        kind = reader.type_of(values.get(part), part)
        if kind not in fine:
            reader.fail(f"its {part} {short(kind)} is not supported, ByteLevel is")
    rows = values.get("added_tokens") or []
    if not isinstance(rows, list):
        reader.fail(f"added_tokens is {short(rows)}")
    added = reader.added([(row.get("id") if isinstance(row, dict) else None, row) for row in rows])
    added, tokens = more_added(folder, added), reader.tokens(model)
    last = max([*tokens, *(token.id for token in added)], default=0)
    if vocabulary is not None and last >= vocabulary:
        reader.fail(f"it does not fit: it has the id {last}, the model {vocabulary} tokens")
    try:
        return pack(tokens, reader.merges(model), added, reader.expressions(values.get("pre_tokenizer")),
                    reader.normaliser(values.get("normalizer")))
    except FormatError as error:
        raise error if str(error).startswith(path) else FormatError(f"{path}: {error}") from None


def tokenizer_meta(folder, vocabulary=None):
    """Metadata of the tokeniser of a folder."""
    return {"tokenizer.kind": KIND, "tokenizer.model": tokenizer_blob(folder, vocabulary)}
