"""Pack the BPE tokeniser of a decoder-only model for a model file. It merges bytes, as in GPT-2, or characters with
tokens <0xHH> for single bytes, as in SentencePiece.

    meta.update(tokenizer_meta(folder, vocabulary))
        Read folder/tokenizer.json, or folder/hy.tiktoken or tokenizer.model if tokenizer.json is missing. `vocabulary`
        is vocab_size of config.json, which may exceed the tokeniser's size. The returned metadata is
            tokenizer.kind   "byte-bpe"
            tokenizer.model  bytes, in the format of tools/text/bpe.h
    pack(tokens, merges, added, expressions, flags)
        Pack a tokeniser from another source, such as a GGUF file. The result lists the added tokens (`added`).
    merges_of(tokens, scores)
        Return the merges of a SentencePiece model.

Settings that would make the engine split text differently are rejected by name: other tokeniser types, normalisers and
pre-tokenisers, expressions that the engine rejects, and added tokens that absorb adjacent spaces.
"""
import base64
import math
import os
import re
import struct
import typing

import hf_tokens
import tables
import tfbundle
from hf_json import LARGEST_JSON, contents, read_json, short
from moefile import FormatError, read_bounded

KIND = "byte-bpe"
MAGIC, VERSION = b"MOE-BPE\0", 1
# Limits of bpe.h.
MAX_TOKENS, MAX_ADDED, MAX_EXPRESSIONS, MAX_PIECE, MAX_EXPRESSION = 1 << 20, 16384, 16, 1024, 4096
MAX_MODEL = 64 << 20
SPECIAL, NORMALISED, IN_TEXT = 1, 2, 4
NFC, WHOLE, CHARACTERS, PREFIX, FIRST, UNLESS, TRIMMED = (1 << i for i in range(7))
MARK = "\u2581"  # a space in tokens of characters
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
ROWS = tables.read("decoder.inc")
EXPRESSIONS = dict(ROWS["EXPRESSION"])
GPT2 = EXPRESSIONS["gpt2"]  # ByteLevel's default
# GPT-2's byte alphabet maps printable bytes to themselves and all others to U+0100 and up.
PRINTABLE = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
BYTE_CHARS = dict(zip(PRINTABLE + [b for b in range(256) if b not in PRINTABLE],
                     map(chr, PRINTABLE + list(range(0x100, 0x144)))))
# A vocabulary may lack control characters and the bytes 0xc0, 0xc1 and 0xf1 to 0xff, which are rare. SmolLM2
# lacks some of these bytes, which are dropped from texts, as in the published package.
MAY_LACK = {*range(0x20), 0x7f, 0xc0, 0xc1, *range(0xf1, 0x100)}

SPACE = r"\t-\r\x{85}\p{Z}"  # what \s matches in the published package; PCRE2's \s also matches U+180E


class Added(typing.NamedTuple):
    """A token that is matched before the text is split; `normalised` tokens are matched in the normalised text, tokens
    `in_text` also in users' texts."""
    id: int
    content: str
    special: bool
    normalised: bool = False
    in_text: bool = False


class Packed(bytes):
    """A packed tokeniser, its added tokens, and the id that it puts before each text, or None."""
    added, start = (), None


def added_at(blob, text):
    """Return the longest added token that a text starts with, or None."""
    found = [token for token in getattr(blob, "added", ()) if text.startswith(token.content)]
    return max(found, key=lambda token: len(token.content), default=None)


def utf8(text, what, longest):
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = b""
    if not 0 < len(data) <= longest or b"\0" in data:
        raise FormatError(f"the tokeniser's {what} {short(text)} must be 1 to {longest} bytes of UTF-8 without NUL")
    return data


# Syntax that Oniguruma (used by the published package) and PCRE2 interpret equally.
SAME = re.compile(r"\\[rntfd]|\\[pP]\{\^?[A-Za-z_]+\}|\\x\{[0-9a-fA-F]{1,6}\}|\\[^\w\s]|\(\?i?(?:-i)?:|\(\?[=!]|\((?![?*])|"
                  r"\{[0-9]+(?:,[0-9]*)?\}(?!\+)|[^\\{}^$&(\[\]]|&(?!&)", re.S)


# Character properties known to all versions of Oniguruma and PCRE2: general categories and scripts.
PROPERTIES = set("""
Any C Cc Cf Cn Co Cs L Ll Lm Lo Lt Lu M Mc Me Mn N Nd Nl No P Pc Pd Pe Pf Pi Po Ps S Sc Sk Sm So Z Zl Zp Zs
Arabic Armenian Bengali Bopomofo Braille Buhid Canadian_Aboriginal Cherokee Common Coptic Cyrillic Deseret Devanagari
Ethiopic Georgian Glagolitic Gothic Greek Gujarati Gurmukhi Han Hangul Hanunoo Hebrew Hiragana Inherited Kannada
Katakana Kharoshthi Khmer Lao Latin Limbu Linear_B Malayalam Mongolian Myanmar New_Tai_Lue Ogham Old_Italic Old_Persian
Oriya Osmanya Runic Shavian Sinhala Syloti_Nagri Syriac Tagalog Tagbanwa Tai_Le Tamil Telugu Thaana Thai Tibetan
Tifinagh Ugaritic Yi Balinese Cuneiform Nko Phags_Pa Phoenician
""".split())


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
    Checker(expression).check()
    return "".join(out)


class Checker:
    """Reject expressions that PCRE2 rejects, or that may match the empty string, which the engine rejects. SAME has
    already limited the syntax."""
    QUANTIFIER = re.compile(r"[*?]|(\+)|\{([0-9]+)(?:,([0-9]*))?\}")
    ESCAPE = re.compile(r"\\(?:[pP]\{\^?([A-Za-z_]+)\}|x\{([0-9a-fA-F]+)\}|(.))", re.S)

    def __init__(self, text):
        self.text, self.at = text, 0

    def fail(self, why):
        raise FormatError(f"the tokeniser's expression {short(self.text)} is not supported: {why}, before character "
                          f"{self.at + 1}")

    def take(self, pattern):
        found = re.compile(pattern).match(self.text, self.at)
        self.at = found.end() if found else self.at
        return bool(found)

    def check(self):
        empty = self.alternatives()
        if self.at < len(self.text):
            self.fail("unexpected parenthesis")
        if empty:
            self.fail("it may match the empty string")

    def alternatives(self):
        """Skip alternatives; return True if one may match the empty string."""
        empty = self.sequence()
        while self.take(r"\|"):
            empty |= self.sequence()
        return empty

    def sequence(self):
        empty = True
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            empty &= self.item()
        return empty

    def item(self):
        if self.QUANTIFIER.match(self.text, self.at):
            self.fail("nothing to repeat")
        looks = self.take(r"\(\?[=!]")
        if looks or self.take(r"\((?:\?i?(?:-i)?:)?"):
            empty = self.alternatives() | looks
            if not self.take(r"\)"):
                self.fail("missing parenthesis")
        elif self.take(r"\[\^?"):
            empty = self.members()
        elif not (empty := self.take(r"[\^$]")):
            self.character()
        return self.repeated(empty, looks)

    def repeated(self, empty, looks):
        found = self.QUANTIFIER.match(self.text, self.at)
        if not found:
            return empty
        least = int(found[2] or bool(found[1]))
        if looks or max(least, int(found[3] or 0)) > 65535 or found[3] and int(found[3]) < least:
            self.fail("invalid repetition")
        self.at = found.end()
        self.take(r"[+?]")
        if self.QUANTIFIER.match(self.text, self.at):
            self.fail("repeated repetition")
        return empty or not least

    def character(self):
        """Skip a character or an escape; return its code, or None if it matches several characters."""
        found = self.ESCAPE.match(self.text, self.at)
        self.at = found.end() if found else self.at + 1
        if not found:
            return ord(self.text[self.at - 1])
        if found[1]:
            return None if found[1] in PROPERTIES else self.fail(f"unknown property {short(found[1])}")
        code = int(found[2], 16) if found[2] else ord({"r": "\r", "n": "\n", "t": "\t", "f": "\f"}.get(found[3], found[3]))
        if code > 0x10ffff or 0xd800 <= code < 0xe000:
            self.fail("invalid character")
        return None if found[3] and found[3] in "sSd" else code

    def members(self):
        """Skip the members of a class."""
        if self.text[self.at:self.at + 1] == "]":
            self.fail("empty class")
        while not self.take(r"\]"):
            if self.at >= len(self.text):
                self.fail("missing bracket")
            first = self.character()
            if self.take(r"-(?![\]])"):
                last = self.character() if self.at < len(self.text) else None
                if first is None or last is None or last < first:
                    self.fail("invalid range")
        return False


def merges_of(tokens, scores):
    """Return the merges of a SentencePiece model as transformers derives them: all pairs of tokens that join to a token,
    ordered by its score. tokens: {id: text}; scores: {id: score}."""
    ids, found = {text: i for i, text in tokens.items()}, []
    for i, text in tokens.items():
        for at in range(1, len(text)):
            left, right = ids.get(text[:at]), ids.get(text[at:])
            if left is not None and right is not None:
                found.append((-scores[i], -at, at - len(text), i, left, right))
    return [(tokens[left], tokens[right]) for *_, left, right in sorted(found)]


def check_bytes(ids, flags):
    """Reject a vocabulary without tokens for all bytes."""
    for byte, text in enumerate(BYTE_TOKENS) if flags & CHARACTERS else BYTE_CHARS.items():
        if text not in ids and (flags & CHARACTERS or byte not in MAY_LACK):
            raise FormatError(f"the tokeniser has no token for the byte {byte:02x}")
    if flags & CHARACTERS and MARK not in ids:
        raise FormatError(f"the tokeniser has no token for a space, {MARK}")


def pack(tokens, merges, added=(), expressions=(), flags=0):
    """Return the packed tokeniser. tokens: {id: text, of bytes in the byte alphabet}; merges: pairs of such texts, by
    descending priority; expressions: regular expressions of the splits, in order; flags as in bpe.h."""
    if flags & CHARACTERS:  # texts and merges must not yield special tokens
        special = {token.content for token in added if token.special}
        tokens = {i: text for i, text in tokens.items() if text not in special}
        merges = [pair for pair in merges if not special.intersection((*pair, "".join(pair)))]
    if len(expressions) > MAX_EXPRESSIONS:
        raise FormatError(f"the tokeniser has {len(expressions)} expressions; the limit is {MAX_EXPRESSIONS}")
    if len(added) > MAX_ADDED:
        raise FormatError(f"the tokeniser has {len(added)} added tokens; the limit is {MAX_ADDED}")
    if not tokens or not 0 <= min(tokens) <= max(tokens) < MAX_TOKENS or len(merges) > MAX_TOKENS:
        raise FormatError(f"the tokeniser has no tokens, too many merges or an id above {MAX_TOKENS - 1}")
    ids = {text: i for i, text in tokens.items()}
    if len(ids) != len(tokens):
        raise FormatError("the tokeniser has two ids for one token")
    check_bytes(ids, flags)
    ranks = {}
    for rank, pair in enumerate(merges):
        for text in (*pair, "".join(pair)):
            if text not in ids:
                raise FormatError(f"tokeniser merge {rank + 1}, {short(pair)}: {short(text)} is not a token")
        ranks[pair] = rank  # the last duplicate wins, as in the published package
    out = [MAGIC, struct.pack("<6I", VERSION, flags, len(expressions), max(tokens) + 1, len(ranks), len(added))]
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
        bits = SPECIAL * bool(token.special) | NORMALISED * bool(token.normalised) | IN_TEXT * bool(token.in_text)
        out += struct.pack("<IIH", token.id, bits, len(data)), data
    blob = Packed(b"".join(out))
    if len(blob) > MAX_MODEL:
        raise FormatError(f"the tokeniser takes {len(blob)} bytes; the limit is {MAX_MODEL}")
    blob.added = tuple(added)
    return blob


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

    def known(self, values, keys):
        """Reject keys that are not in `keys`."""
        for key in values:
            if key not in keys and values[key] is not None:
                self.fail(f"unknown key {short(key)} with value {short(values[key])}: remove it if texts do not depend "
                          "on it")

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
                self.refuse(part, "Split", **FINE["split"])
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

    def start(self, value):
        """Return the id that the post-processor puts before a text, or None."""
        found = None
        for part in self.parts(value, "post_processor", "processors"):
            kind = self.type_of(part, "post_processor")
            if kind not in ("ByteLevel", "TemplateProcessing"):
                self.fail(f"post_processor {short(kind)} is not supported: expected ByteLevel or TemplateProcessing")
            if kind == "TemplateProcessing":
                found = self.begin_of(part)
        return found

    def begin_of(self, part):
        """Return the id of the only special token that a TemplateProcessing puts before a text, or None."""
        try:
            names = [next(iter(x)) for x in part["single"]]
            if names in (["Sequence"], ["SpecialToken", "Sequence"]):
                ids = [i for x in part["single"][:-1]
                       for i in part["special_tokens"][x["SpecialToken"]["id"]]["ids"]]
                if len(ids) < len(names) and all(type(i) is int and i >= 0 for i in ids):
                    return ids[0] if ids else None
        except (KeyError, TypeError, AttributeError, StopIteration):
            pass
        self.fail(f"TemplateProcessing {short(part.get('single'))} is not supported: expected at most one token before "
                  "the text")

    def of_characters(self, values):
        """Return the flags of a tokeniser that merges characters; reject other settings than those of Llama 2, Mistral
        and Gemma."""
        flags, replace = CHARACTERS, {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
        self.refuse(values["model"], "model", ignore_merges=[False])
        for part in self.parts(values.get("normalizer"), "normaliser", "normalizers"):
            if part == {"type": "Prepend", "prepend": MARK}:
                flags |= PREFIX
            elif part != replace:
                self.fail(f"normaliser {short(part)} is not supported: expected Prepend or Replace with {MARK}")
        for part in self.parts(values.get("pre_tokenizer"), "pre-tokeniser", "pretokenizers"):
            flags |= self.metaspace(part)
        first, *parts = self.parts(values.get("decoder"), "decoder", "decoders") or [None]
        kinds, trims = [self.type_of(part, "decoder") for part in parts], {"type": "Strip", "content": " ", "start": 1,
                                                                         "stop": 0}
        if first != {"type": "Replace", "pattern": {"String": MARK}, "content": " "} or (
                kinds[:2] != ["ByteFallback", "Fuse"] or parts[2:] not in ([], [trims])):
            self.fail(f"decoder {short(values.get('decoder'))} is not supported: expected Replace, ByteFallback, Fuse and "
                      "Strip")
        return flags | TRIMMED * (len(parts) > 2)

    def metaspace(self, part):
        """Return the flags of a pre-tokeniser of a tokeniser that merges characters."""
        scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
        flags = {"always": PREFIX | UNLESS, "first": FIRST | UNLESS, "never": 0}
        if self.type_of(part, "pre-tokeniser") == "Metaspace" and part.get("split", True) is False and (
                part.get("replacement") == MARK and scheme in flags):
            return flags[scheme]
        if part != {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}:
            self.fail(f"pre-tokeniser {short(part)} is not supported: expected Metaspace without split")
        return 0  # spaces were replaced before

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

    def added(self, rows, flags=0):
        """Return [Added] for rows [(id, description)] of a tokeniser with these flags."""
        found = []
        for i, about in rows:
            if not isinstance(about, dict) or type(i) is not int or not isinstance(about.get("content"), str):
                self.fail(f"invalid added token {short(about)}: expected its id and content")
            self.refuse(about, f"added token {short(about['content'])}", **FINE["added"])
            special = about.get("special", False)
            normalised = about.get("normalized", not special)
            found.append(Added(i, about["content"], special, not flags & CHARACTERS and normalised,
                               bool(flags & CHARACTERS and not special)))
        return found


# Keys of tokenizer.json and its model; of tokenizer_config.json the only supported values, and keys that change no ids
# here or are read elsewhere (prompts.py).
PARTS, MODEL = (tables.words(ROWS["KNOWN"], part) for part in ("whole", "model"))
FINE = {part: tables.choices(row for row in ROWS["SETTING"] if row[0] == part)
        for part in ("settings", "spaced", "unspaced", "pieces", "model", "split", "added")}
KNOWN = tables.words(ROWS["IGNORED"], "settings") | set(FINE["settings"]) | set(FINE["spaced"])


def read_settings(folder, flags=0):
    """Return the values of tokenizer_config.json, or {} if it is missing, for a tokeniser with these flags."""
    path = os.path.join(folder, "tokenizer_config.json")
    values, reader = read_json(path) if os.path.lexists(path) else {}, Reader(path)
    spaced = "spaced" if flags & (PREFIX | FIRST) else "unspaced"
    reader.refuse(values, "tokeniser", **FINE["settings"], **FINE[spaced])
    reader.known(values, KNOWN)
    return values


STARTS = {"LlamaTokenizer": "<s>", "CodeLlamaTokenizer": "<s>", "GemmaTokenizer": "<bos>",
          "CohereTokenizer": "<BOS_TOKEN>"}


def start_of(about, start, ids):
    """Return the token before texts: the post-processor's `start`, unless one of transformers' classes replaces it."""
    bos = next((bos for name, bos in STARTS.items() if f"{about.get('tokenizer_class')}".startswith(name)), None)
    if bos is None:
        return start
    return ids.get((contents([about.get("bos_token")]) or [bos])[0]) if about.get("add_bos_token", True) else None


def more_added(folder, added, about, flags):
    """Return `added` plus the tokens that only tokenizer_config.json (`about`) lists."""
    more, reader = about.get("added_tokens_decoder"), Reader(os.path.join(folder, "tokenizer_config.json"))
    ids = {token.content: token.id for token in added}
    known = set(ids)
    if more is None:
        return added
    if not isinstance(more, dict) or not all(re.fullmatch("[0-9]{1,9}", i) for i in more):
        reader.fail(f"invalid added_tokens_decoder {short(more)}")
    found = list(added)
    for token in reader.added([(int(i), about) for i, about in more.items()], flags):
        if ids.setdefault(token.content, token.id) != token.id:
            reader.fail(f"added token {short(token.content)} has id {token.id}, but {ids[token.content]} in "
                        "tokenizer.json")
        if token.content not in known:
            found.append(token)
    return found


# ---- hy.tiktoken -----------------------------------------------------------------------------------------------------
# Hunyuan-MT-7B and Hy-MT2-7B have lines "BASE64 RANK". HY_SPECIALS are from tokenization_hy.py.

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
            if not re.fullmatch(rb"[A-Za-z0-9+/=]+ [0-9]{1,9}", line):
                raise ValueError
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
        return pack({ranks[token]: text for token, text in written.items()}, merges, added, [EXPRESSIONS["hy"]], NFC)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


# ---- tokenizer.model -------------------------------------------------------------------------------------------------
# Without tokenizer.json, a SentencePiece model is converted as by transformers' class for Llama or Gemma.

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # types of pieces
CLASSES = "LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast"
TURNS = "<start_of_turn>", "<end_of_turn>"  # special tokens of Gemma, although its models call them user-defined


def read_model(path):
    """Return [(text, score, type)] of a SentencePiece model of type BPE, and whether it puts a space before texts."""
    reader, pieces, trainer, normaliser, whole = Reader(path), [], {}, {}, False
    data = read_bounded(path, hf_tokens.LARGEST_MODEL, "a SentencePiece model")
    try:
        for number, value in tfbundle.fields(data):
            whole = whole or number == hf_tokens.NORMALISER and isinstance(value, bytes)
            if number == 1:
                about = dict(tfbundle.fields(value))
                score = struct.unpack("<f", about.get(2, bytes(4)))[0]
                pieces.append((about[1].decode(), score, about.get(3, NORMAL)))
            elif number in (2, 3):
                (trainer if number == 2 else normaliser).update(tfbundle.fields(value))
    except (FormatError, KeyError, AttributeError, TypeError, UnicodeDecodeError, struct.error):
        reader.fail("not a SentencePiece model, or damaged")
    if not 0 < len(pieces) <= MAX_TOKENS:
        reader.fail(f"not a SentencePiece model: {len(pieces)} pieces")
    if not whole:
        reader.fail(hf_tokens.TRUNCATED)
    if trainer.get(3, 1) != 2:
        kind = {1: "unigram", 3: "word", 4: "char"}.get(trainer.get(3, 1), short(trainer.get(3)))
        reader.fail(f"SentencePiece models of type {kind} are not supported for decoder-only models: expected bpe")
    for i, (text, score, kind) in enumerate(pieces):
        if kind not in (NORMAL, UNKNOWN, CONTROL, USER, BYTE) or not math.isfinite(score):
            reader.fail(f"piece {i}, {short(text)}: type {short(kind)} or score {score} is not supported")
    if normaliser.get(2) or normaliser.get(4, 1) or not normaliser.get(5, 1) or trainer.get(24):
        reader.fail("this normaliser is not supported: expected identity, without removed or trailing spaces")
    return pieces, bool(normaliser.get(3, 1))


def class_of(folder, about, family):
    """Return the name of transformers' class for a folder's tokeniser."""
    path = os.path.join(folder, "config.json")
    config = read_json(path) if os.path.lexists(path) else {}
    return about.get("tokenizer_class") or config.get("tokenizer_class") or dict(ROWS["CLASS"]).get(family)


def added_pieces(folder, pieces, about, special):
    """Return the [Added] of a SentencePiece model, whose pieces `special` are special, and the folder's other files."""
    in_text = lambda text, kind: kind == USER and text not in special
    found = [Added(i, text, not in_text(text, kind), False, in_text(text, kind))
             for i, (text, _, kind) in enumerate(pieces) if kind in (UNKNOWN, CONTROL, USER)]
    more = about.get("added_tokens_decoder")
    if more is not None:
        known = set(contents(list(more.values()) if isinstance(more, dict) else []))
        return more_added(folder, [token for token in found if token.content not in known], about, CHARACTERS)
    paths = [os.path.join(folder, name) for name in ("special_tokens_map.json", "added_tokens.json")]
    named, more = (read_json(path) if os.path.lexists(path) else {} for path in paths)
    special = {x for source in (about, named) for x in contents([*source.values(), *(
        source.get("additional_special_tokens") if isinstance(source.get("additional_special_tokens"), list) else ())])}
    rows = [(i, {"content": text, "special": text in special}) for text, i in more.items()]
    return [token for token in found if token.content not in more] + Reader(paths[1]).added(rows, CHARACTERS)


def model_blob(folder, vocabulary, family):
    """Pack the tokeniser of tokenizer.model."""
    path, config = (os.path.join(folder, name) for name in ("tokenizer.model", "tokenizer_config.json"))
    reader, about = Reader(path), read_json(config) if os.path.lexists(config) else {}
    if (name := class_of(folder, about, family)) not in CLASSES:
        reader.fail(f"tokenizer_class {short(name)} with this file is not supported: expected {CLASSES[0]} or "
                    f"{CLASSES[2]}")
    (pieces, spaced), gemma = read_model(path), name.startswith("Gemma")
    wanted = not gemma and about.get("add_prefix_space") is not False
    if wanted and not spaced:
        reader.fail("the model puts no space before texts, but add_prefix_space is not false")
    if gemma and spaced:
        reader.fail(f"the model puts a space before texts, but {name} does not")
    flags = CHARACTERS
    if wanted:
        flags |= TRIMMED | (FIRST | UNLESS if about.get("legacy") is False else PREFIX)
    read_settings(folder, flags)
    Reader(config).refuse(about, "tokeniser", **FINE["pieces"])
    added = added_pieces(folder, pieces, about, TURNS if gemma else ())
    tokens = {i: text for i, (text, _, kind) in enumerate(pieces) if kind not in (UNKNOWN, CONTROL)}
    ids = {token.content: token.id for token in added} | {text: i for i, text in tokens.items()}
    start = start_of({**about, "tokenizer_class": name}, None, ids)
    last = max([len(pieces) - 1, *(token.id for token in added)])
    if vocabulary is not None and last >= vocabulary:
        reader.fail(f"token id {last} exceeds the model's vocabulary of {vocabulary}")
    merged = {i: text for i, (text, _, kind) in enumerate(pieces) if kind in (NORMAL, USER)}
    try:
        blob = pack(tokens, merges_of(merged, [score for _, score, _ in pieces]), added, (), flags)
    except FormatError as error:
        reader.fail(error)
    blob.start = start
    return blob


def tokenizer_blob(folder, vocabulary=None, family="llama"):
    """Pack the tokeniser of a folder in Hugging Face's layout; `vocabulary` is the number of token ids in the model."""
    path, ranks = os.path.join(folder, "tokenizer.json"), os.path.join(folder, "hy.tiktoken")
    if os.path.lexists(ranks) and not os.path.lexists(path):
        return tiktoken_blob(ranks, vocabulary)
    if os.path.lexists(os.path.join(folder, "tokenizer.model")) and not os.path.lexists(path):
        return model_blob(folder, vocabulary, family)
    reader, values = Reader(path), read_json(path)
    model = values.get("model")
    kind = reader.type_of(model, "model")
    if kind != "BPE":
        reader.fail(f"tokeniser type {kind} is not supported: expected BPE")
    reader.refuse(model, "model", **FINE["model"])
    kind = reader.type_of(values.get("decoder"), "decoder")
    flags = reader.of_characters(values) if model.get("byte_fallback") is True else 0
    if kind != "ByteLevel" and not flags:
        reader.fail(f"decoder {short(kind)} is not supported: expected ByteLevel")
    reader.known(values, PARTS)
    reader.known(model, MODEL)
    start = reader.start(values.get("post_processor"))
    rows = values.get("added_tokens")
    rows = [] if rows is None else rows
    if not isinstance(rows, list):
        reader.fail(f"invalid added_tokens {short(rows)}: expected a list")
    added = reader.added([(row.get("id") if isinstance(row, dict) else None, row) for row in rows],
                         flags)
    about, tokens = read_settings(folder, flags), reader.tokens(model)
    added = more_added(folder, added, about, flags)
    start = start_of(about, start, {token.content: token.id for token in added} | {x: i for i, x in tokens.items()})
    last = max([*tokens, *(token.id for token in added), start or 0], default=0)
    if vocabulary is not None and last >= vocabulary:
        reader.fail(f"token id {last} exceeds the model's vocabulary of {vocabulary}")
    try:
        expressions = () if flags else reader.expressions(values.get("pre_tokenizer"))
        flags = flags or NFC * reader.normaliser(values.get("normalizer")) | WHOLE * model.get("ignore_merges", False)
        blob = pack(tokens, reader.merges(model), added, expressions, flags)
    except FormatError as error:
        raise error if str(error).startswith(path) else FormatError(f"{path}: {error}") from None
    blob.start = start
    return blob


def tokenizer_meta(folder, vocabulary=None, family="llama"):
    """Return the metadata of a folder's tokeniser; `family` decides transformers' class if the files name none."""
    return {"tokenizer.kind": KIND, "tokenizer.model": tokenizer_blob(folder, vocabulary, family)}
