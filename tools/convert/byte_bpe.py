"""Pack the byte-level BPE tokeniser of a decoder-only model (llm.md, section 4) for a model file.

    meta.update(tokenizer_meta(folder, vocabulary))
        Read folder/tokenizer.json, or folder/hy.tiktoken if tokenizer.json is missing. `vocabulary` is vocab_size of
        config.json, which may exceed the tokeniser's size. The returned metadata is
            tokenizer.kind   "byte-bpe"
            tokenizer.model  bytes, in the format of tools/text/bpe.h
    pack(tokens, merges, added, expressions, nfc)
        Pack a tokeniser from another source, such as a GGUF file.

Settings that would make the engine split text differently are rejected by name: other tokeniser types, normalisers and
pre-tokenisers, and added tokens that absorb adjacent spaces.
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
# Limits of bpe.h.
MAX_TOKENS, MAX_ADDED, MAX_EXPRESSIONS, MAX_PIECE, MAX_EXPRESSION = 1 << 20, 4096, 16, 1024, 4096
SPECIAL, NORMALISED = 1, 2
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's default
# GPT-2's byte alphabet maps printable bytes to themselves and all others to U+0100 and up.
PRINTABLE = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
BYTE_CHARS = dict(zip(PRINTABLE + [b for b in range(256) if b not in PRINTABLE],
                     map(chr, PRINTABLE + list(range(0x100, 0x144)))))
# A vocabulary may lack control characters and the bytes 0xc0, 0xc1 and 0xf1 to 0xff, which are rare. SmolLM2
# lacks some of these bytes, which are dropped from texts, as in the published package.
MAY_LACK = {*range(0x20), 0x7f, 0xc0, 0xc1, *range(0xf1, 0x100)}

SPACE = r"\t-\r\x{85}\p{Z}"  # what \s matches in the published package; PCRE2's \s also matches U+180E


class Added(typing.NamedTuple):
    """A token that is matched before the text is split; `normalised` tokens are matched in the normalised text."""
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
        raise FormatError(f"the tokeniser's {what} {short(text)} must be 1 to {longest} bytes of UTF-8 without NUL")
    return data


# Syntax that Oniguruma (used by the published package) and PCRE2 interpret equally.
SAME = re.compile(r"\\[rntvfd]|\\[pP]\{\^?[A-Za-z_]+\}|\\x\{[0-9a-fA-F]+\}|\\[^\w\s]|\(\?[i-]*:|\(\?[=!]|\((?![?*])|"
                  r"\{[0-9]+(?:,[0-9]*)?\}(?!\+)|[^\\{}^$&(\[\]]|&(?!&)", re.S)


def for_pcre2(expression):
    """Translate an Oniguruma expression into an equivalent PCRE2 expression."""
    out, inside, at = [], False, 0
    utf8(expression, "expression", MAX_EXPRESSION)
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
            raise FormatError(f"the tokeniser's expression {short(expression)} is not supported: PCRE2 may interpret "
                              f"{short(rest[:12])} differently")
        out.append(part)
    return "".join(out)


def pack(tokens, merges, added=(), expressions=(), nfc=False):
    """Return the packed tokeniser. tokens: {id: text in the byte alphabet}; merges: pairs of such texts, by descending
    priority; expressions: regular expressions of the splits, in order."""
    if len(expressions) > MAX_EXPRESSIONS:
        raise FormatError(f"the tokeniser has {len(expressions)} expressions; the limit is {MAX_EXPRESSIONS}")
    if len(added) > MAX_ADDED:
        raise FormatError(f"the tokeniser has {len(added)} added tokens; the limit is {MAX_ADDED}")
    if not tokens or not 0 <= min(tokens) <= max(tokens) < MAX_TOKENS or len(merges) > MAX_TOKENS:
        raise FormatError(f"the tokeniser has no tokens, too many merges or an id above {MAX_TOKENS - 1}")
    ids = {text: i for i, text in tokens.items()}
    if len(ids) != len(tokens):
        raise FormatError("the tokeniser has two ids for one token")
    for byte, text in BYTE_CHARS.items():
        if text not in ids and byte not in MAY_LACK:
            raise FormatError(f"the tokeniser has no token for the byte {byte:02x}")
    ranks = {}
    for rank, pair in enumerate(merges):
        for text in (*pair, "".join(pair)):
            if text not in ids:
                raise FormatError(f"tokeniser merge {rank + 1}, {short(pair)}: {short(text)} is not a token")
        ranks[pair] = rank  # the last duplicate wins, as in the published package
    out = [MAGIC, struct.pack("<6I", VERSION, bool(nfc), len(expressions), max(tokens) + 1, len(ranks), len(added))]
    for expression in expressions:
        data = utf8(for_pcre2(expression), "expression", MAX_EXPRESSION)
        out += struct.pack("<H", len(data)), data
    for i in range(max(tokens) + 1):
        data = utf8(tokens[i], "token", MAX_PIECE) if i in tokens else b""
        out += struct.pack("<H", len(data)), data
    for left, right in sorted(ranks, key=ranks.get):
        out.append(struct.pack("<3I", ids[left], ids[right], ids[left + right]))
    seen, contents = set(), set()
    for token in added:
        if not 0 <= token.id < MAX_TOKENS or token.id in seen or token.content in contents:
            raise FormatError(f"added token {short(token.content)} is a duplicate or has the invalid id {token.id}")
        if tokens.get(token.id, token.content) != token.content or ids.get(token.content, token.id) != token.id:
            raise FormatError(f"added token {short(token.content)} has id {token.id}, which contradicts the vocabulary")
        seen.add(token.id)
        contents.add(token.content)
        data = utf8(token.content, "added token", MAX_PIECE)
        flags = SPECIAL * bool(token.special) | NORMALISED * bool(token.normalised)
        out += struct.pack("<IIH", token.id, flags, len(data)), data
    return b"".join(out)


# ---- tokenizer.json --------------------------------------------------------------------------------------------------

class Reader:
    """Read the parts of one file; error messages name the file."""

    def __init__(self, path):
        self.path = path

    def fail(self, why):
        raise FormatError(f"{self.path}: {why}")

    def type_of(self, value, what):
        """Return the type of a part, or "none" if it is missing."""
        if value is None:
            return "none"
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            self.fail(f"unexpected {what} {short(value)}")
        return value["type"]

    def refuse(self, value, what, **fine):
        """Reject settings whose value is not listed in `fine`; missing settings are accepted."""
        for key, good in fine.items():
            if key in value and not any(value[key] is x or type(value[key]) is type(x) and value[key] == x
                                        for x in good):
                self.fail(f"{key} of the {what} is not supported: {short(value[key])}")

    def parts(self, value, what, key):
        """Return the elements of a Sequence component, or a list with the component itself."""
        if self.type_of(value, what) != "Sequence":
            return [] if value is None else [value]
        if not isinstance(value.get(key), list):
            self.fail(f"unexpected {key} in the {what}: {short(value.get(key))}")
        parts = value[key]
        if any(self.type_of(part, what) == "Sequence" for part in parts):
            self.fail(f"nested sequences in the {what} are not supported")
        return parts

    def normaliser(self, value):
        """Return True if texts are normalised to NFC."""
        found = {self.type_of(part, "normaliser") for part in self.parts(value, "normaliser", "normalizers")}
        for other in sorted(found - {"NFC"}):
            self.fail(f"normaliser {short(other)} is not supported: expected NFC")
        return bool(found)

    def expressions(self, value):
        """Return the regular expressions of the splits, in order."""
        found, last = [], None
        for part in self.parts(value, "pre-tokeniser", "pretokenizers"):
            if last == "ByteLevel":
                self.fail("pre-tokeniser steps after ByteLevel are not supported")
            last = self.type_of(part, "pre-tokeniser")
            if last == "Split":
                self.refuse(part, "Split", behavior=("Isolated",), invert=(False,))
                pattern = part.get("pattern")
                if not isinstance(pattern, dict) or not isinstance(pattern.get("Regex"), str):
                    self.fail(f"Split pattern {short(pattern)} is not supported: expected a Regex")
                found.append(pattern["Regex"])
            elif last == "Digits":
                found.append(r"\p{N}" if part.get("individual_digits") is True else r"\p{N}+")
            elif last == "ByteLevel":
                if part.get("add_prefix_space", True) is not False:
                    self.fail("add_prefix_space in ByteLevel is not supported")
                found += [GPT2] * (part.get("use_regex", True) is not False)
            else:
                self.fail(f"pre-tokeniser {short(last)} is not supported: expected Split, Digits or ByteLevel")
        if last != "ByteLevel":
            self.fail("the pre-tokeniser must end with ByteLevel")
        return found

    def tokens(self, model):
        """Return {id: token}."""
        vocabulary = model.get("vocab")
        if not isinstance(vocabulary, dict) or not all(type(i) is int for i in vocabulary.values()):
            self.fail("the vocabulary must map tokens to ids")
        tokens = {i: text for text, i in vocabulary.items()}
        if len(tokens) != len(vocabulary):
            self.fail("the vocabulary has two tokens with the same id")
        return tokens

    def merges(self, model):
        """Return [(left, right)]; merges are "left right" or, in newer files, ["left", "right"]."""
        found = model.get("merges")
        if not isinstance(found, list):
            self.fail("the merges must be a list")
        pairs = [tuple(x.split(" ") if isinstance(x, str) else x if isinstance(x, list) else ()) for x in found]
        for pair, x in zip(pairs, found):
            if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                self.fail(f"merge {short(x)} is not a pair of tokens")
        return pairs

    def added(self, rows):
        """Return [Added] for rows [(id, description)]."""
        found = []
        for i, about in rows:
            if not isinstance(about, dict) or type(i) is not int or not isinstance(about.get("content"), str):
                self.fail(f"invalid added token {short(about)}")
            self.refuse(about, f"added token {short(about['content'])}", lstrip=(False,), rstrip=(False,),
                        single_word=(False,), special=(False, True), normalized=(False, True))
            special = about.get("special", False)
            found.append(Added(i, about["content"], special, about.get("normalized", not special)))
        return found


def more_added(folder, added):
    """Return `added` plus the tokens that only tokenizer_config.json lists."""
    path = os.path.join(folder, "tokenizer_config.json")
    more = read_json(path).get("added_tokens_decoder") if os.path.exists(path) else None
    reader, ids = Reader(path), {token.content: token.id for token in added}
    known = set(ids)
    if more is None:
        return added
    if not isinstance(more, dict) or not all(re.fullmatch("[0-9]{1,9}", i) for i in more):
        reader.fail(f"invalid added_tokens_decoder {short(more)}")
    found = list(added)
    for token in reader.added([(int(i), about) for i, about in more.items()]):
        if ids.setdefault(token.content, token.id) != token.id:
            reader.fail(f"added token {short(token.content)} has id {token.id}, but {ids[token.content]} in "
                        "tokenizer.json")
        if token.content not in known:
            found.append(token)
    return found


# ---- hy.tiktoken -----------------------------------------------------------------------------------------------------
# Hunyuan-MT-7B and Hy-MT2-7B have lines "BASE64 RANK". HY and HY_SPECIALS are from tokenization_hy.py.

HY = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
      r"|\s+")
HY_SPECIALS = ["endoftext", "startoftext", "bos", "eos", "pad", *(f"extra_{i}" for i in range(205))]
MAX_STEPS = 1 << 27  # limit of the sum of squared token lengths


def halves(ranks, token):
    """Return the two tokens that merge into `token`, found by applying all merges of lower rank to its bytes."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))]
        rank, i = min(found)
        if rank >= ranks[token]:
            break
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def read_ranks(path):
    """Return {bytes: rank}; ranks must be consecutive from 0."""
    ranks = {}
    for number, line in enumerate(read_bounded(path, LARGEST_JSON, "a tiktoken file").splitlines(), 1):
        try:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
        except ValueError:
            raise FormatError(f"{path}: line {number} is not a base64 token followed by its rank") from None
        if len(ranks) != number or len(ranks) > MAX_TOKENS:
            raise FormatError(f"{path}: line {number} contains a duplicate token or exceeds the limit of {MAX_TOKENS}")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise FormatError(f"{path}: ranks must be consecutive, starting at 0")
    if sum(len(token) ** 2 for token in ranks) > MAX_STEPS:
        raise FormatError(f"{path}: tokens are too long")
    return ranks


def tiktoken_blob(path, vocabulary=None):
    """Pack the tokeniser of hy.tiktoken."""
    ranks, merges = read_ranks(path), []
    written = {token: "".join(BYTE_CHARS[byte] for byte in token) for token in sorted(ranks, key=ranks.get)}
    for token, text in written.items():
        parts = halves(ranks, token) if len(token) > 1 else ()
        if len(parts) > 2 or any(part not in ranks for part in parts):
            raise FormatError(f"{path}: merges of lower rank do not produce the token {short(text)}")
        if parts:
            merges.append((written[parts[0]], written[parts[1]]))
    added = [Added(len(ranks) + i, f"<|{name}|>", True) for i, name in enumerate(HY_SPECIALS)]
    if vocabulary is not None and added[-1].id >= vocabulary:
        raise FormatError(f"{path}: token id {added[-1].id} exceeds the model's vocabulary of {vocabulary}")
    try:
        return pack({ranks[token]: text for token, text in written.items()}, merges, added, [HY], True)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def tokenizer_blob(folder, vocabulary=None):
    """Pack the tokeniser of a folder in Hugging Face's layout; `vocabulary` is the number of token ids in the model."""
    path, ranks = os.path.join(folder, "tokenizer.json"), os.path.join(folder, "hy.tiktoken")
    if os.path.exists(ranks) and not os.path.exists(path):
        return tiktoken_blob(ranks, vocabulary)
    reader, values = Reader(path), read_json(path)
    model = values.get("model")
    kind = reader.type_of(model, "model")
    if kind != "BPE":
        reader.fail(f"tokeniser type {kind} is not supported: expected byte-level BPE")
    reader.refuse(model, "model", dropout=(None, 0, 0.0), byte_fallback=(False,), ignore_merges=(False,),
                  continuing_subword_prefix=(None, ""), end_of_word_suffix=(None, ""))
    for part, fine in ("post_processor", ("none", "ByteLevel")), ("decoder", ("ByteLevel",)):
        kind = reader.type_of(values.get(part), part)
        if kind not in fine:
            reader.fail(f"{part} {short(kind)} is not supported: expected ByteLevel")
    rows = values.get("added_tokens") or []
    if not isinstance(rows, list):
        reader.fail(f"invalid added_tokens {short(rows)}")
    added = reader.added([(row.get("id") if isinstance(row, dict) else None, row) for row in rows])
    added, tokens = more_added(folder, added), reader.tokens(model)
    last = max([*tokens, *(token.id for token in added)], default=0)
    if vocabulary is not None and last >= vocabulary:
        reader.fail(f"token id {last} exceeds the model's vocabulary of {vocabulary}")
    try:
        return pack(tokens, reader.merges(model), added, reader.expressions(values.get("pre_tokenizer")),
                    reader.normaliser(values.get("normalizer")))
    except FormatError as error:
        raise error if str(error).startswith(path) else FormatError(f"{path}: {error}") from None


def tokenizer_meta(folder, vocabulary=None):
    """Return the metadata of a folder's tokeniser."""
    return {"tokenizer.kind": KIND, "tokenizer.model": tokenizer_blob(folder, vocabulary)}
