#!/usr/bin/env python3
"""Test the tokenizer.json of decoder-only models as packed into a model file, and
the rejection of unsupported tokenisers by name. The ids and texts of
tools/text/bpe.c must match the results of Hugging Face's `tokenizers` in
tests/golden/byte-bpe.json (long_byte_bpe.py runs the package itself).

Usage: tests/python tests/convert/test_byte_bpe.py [--only NAME]
"""
import argparse
import base64
import contextlib
import copy
import json
import os
import struct
import subprocess
import sys
import tempfile

from suite import Skip, Suite

try:
    import byte_bpe
    import make_decoder
except ImportError:  # moefile.py requires NumPy
    byte_bpe = None
test = Suite()
numpy_test = test.needs(byte_bpe, "NumPy")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHARED = os.path.join(ROOT, "..", "shared", "llm")
LINES = os.path.join(ROOT, os.environ.get("BUILD", "build"), "bpe_lines")
DIGITS = {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def tokeniser():
    """Return the contents of a tokenizer.json with merges that create "he", "the" and "Ġthe"."""
    vocabulary = {text: i for i, text in enumerate([*sorted(byte_bpe.BYTE_CHARS.values()), "he", "the", "Ġthe"])}
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": 300, "content": "<｜end｜>", "special": True, "normalized": False, "lstrip": False,
                              "rstrip": False, "single_word": False},
                             {"id": 301, "content": "<think>", "special": False, "normalized": True}],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]},
            "post_processor": BYTES, "decoder": BYTES,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "byte_fallback": False, "ignore_merges": False,
                      "vocab": vocabulary, "merges": ["h e", ["t", "he"], "Ġ the"]}}


@contextlib.contextmanager
def folder_of(values, **more):
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {"tokenizer": values, **more}.items():
            with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as file:
                json.dump(content, file)
        yield folder


def unpack(data):
    """Unpack a packed tokeniser; return (NFC flag, expressions, tokens, merges as ids, [(id, flags, content)])."""
    at = 32

    def take(form):
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values

    def text():
        nonlocal at
        size, = take("H")
        at += size
        return data[at - size:at].decode()

    assert data[:8] == b"MOE-BPE\0"
    version, nfc, expressions, tokens, merges, added = struct.unpack_from("<6I", data, 8)
    assert version == 1
    found = (nfc, [text() for _ in range(expressions)], [text() for _ in range(tokens)],
             [take("3I") for _ in range(merges)], [(*take("2I"), text()) for _ in range(added)])
    assert at == len(data)
    return found


def complaint(values, vocabulary=400, **more):
    with folder_of(values, **more) as folder:
        try:
            byte_bpe.tokenizer_blob(folder, vocabulary)
        except byte_bpe.FormatError as error:
            assert str(error).startswith(folder) and "\n" not in str(error), str(error)
            return str(error)
    return None


@numpy_test
def packed_tokenisers_are_complete():
    values = tokeniser()
    with folder_of(values) as folder:
        meta = byte_bpe.tokenizer_meta(folder, 302)
    assert meta["tokenizer.kind"] == "byte-bpe"
    nfc, expressions, tokens, merges, added = unpack(meta["tokenizer.model"])
    assert (nfc, expressions) == (1, [r"\p{N}{1,3}"])
    assert tokens == list(values["model"]["vocab"])
    h, t, space = tokens.index("h"), tokens.index("t"), tokens.index("Ġ")
    assert merges == [(h, tokens.index("e"), 256), (t, 256, 257), (space, 257, 258)]
    assert added == [(300, 1, "<｜end｜>"), (301, 2, "<think>")]


@numpy_test
def alternative_spellings_are_supported():
    values = tokeniser()
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}]}
    values["normalizer"] = {"type": "Sequence", "normalizers": []}
    del values["model"]["vocab"]["Ġthe"]
    values["model"]["vocab"]["Ġthe"] = 270  # leave the ids between 257 and 270 unused
    values["model"]["merges"] = ["Ġ the", *values["model"]["merges"]]  # only the last of several equal merges counts
    more = {"added_tokens_decoder": {"300": values["added_tokens"][0], "302": {"content": "<b>", "special": True}}}
    with folder_of(values, tokenizer_config=more) as folder:
        nfc, expressions, tokens, merges, added = unpack(byte_bpe.tokenizer_blob(folder))
    space = r"\t-\r\x{85}\p{Z}"  # PCRE2's \s would include U+180E
    assert (nfc, expressions[0]) == (0, r"\p{N}") and len(expressions) == 2
    assert expressions[1].endswith(rf"[^{space}\p{{L}}\p{{N}}]+|[{space}]+(?![^{space}])|[{space}]+"), expressions[1]
    assert len(tokens) == 271 and tokens[258:270] == [""] * 12 and tokens[270] == "Ġthe"
    assert [result for _, _, result in merges] == [256, 257, 270]
    assert added[2] == (302, 1, "<b>") and len(added) == 3


def template(*parts, ids=(3,)):
    """Return a TemplateProcessing of texts (A, B) and special tokens (S)."""
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}} if x == "S" else {"Sequence": {"id": x, "type_id": 0}}
              for x in parts]
    return {"type": "TemplateProcessing", "single": single, "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": list(ids), "tokens": ["<s>"]}}}


@numpy_test
def whole_pieces_and_a_token_before_texts_are_supported():
    for processor, start in ((template("S", "A"), 3), (template("A"), None), (template("S", "A", ids=()), None),
                             ({"type": "Sequence", "processors": [BYTES, template("S", "A")]}, 3)):
        values = changed(("post_processor",), processor)
        values["model"]["ignore_merges"] = True
        with folder_of(values) as folder:
            blob = byte_bpe.tokenizer_blob(folder, 400)
        assert unpack(blob)[0] == 3 and blob.start == start, (processor, blob.start)
    for about, start in (({}, 3), ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}, 3),
                         ({"tokenizer_class": "LlamaTokenizerFast", "bos_token": {"content": "<｜end｜>"}}, 300),
                         ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, None)):
        with folder_of(changed(("post_processor",), template("S", "A")), tokenizer_config=about) as folder:
            assert byte_bpe.tokenizer_blob(folder, 400).start == start, about


# Expressions that the engine rejects, and the reason.
EXPRESSIONS = (("a*", "may match the empty string"), ("a|", "may match the empty string"), ("(?=a)", "empty string"),
               (r"(\s?|b{0,2})", "empty string"), ("(?!)", "empty string"), ("(a", "missing parenthesis"),
               ("a)", "unexpected parenthesis"), ("+a", "nothing to repeat"), ("a|*", "nothing to repeat"),
               ("a**", "repeated repetition"), ("a{3,2}", "invalid repetition"), ("a{70000}", "invalid repetition"),
               ("[b-a]", "invalid range"), (r"[\p{L}-z]", "invalid range"), ("[a", "missing bracket"),
               (r"\p{Klingon}", "unknown property 'Klingon'"), (r"\x{d800}", "invalid character"),
               (r"\v", "differently"), ("(?i-i-:a)", "differently"))


def changed(path, value, values=None):
    values = copy.deepcopy(values or tokeniser())
    *parents, last = path
    inner = values
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return values


@numpy_test
def unsupported_tokenisers_are_rejected_by_name():
    split = ("pre_tokenizer", "pretokenizers", 0)
    for path, value, part in (
            (("model", "type"), "Unigram", "type Unigram is"), (("model",), None, "type none is"),
            (("model", "dropout"), 0.1, "dropout of the model is not supported: 0.1"),
            (("model", "byte_fallback"), 1, "byte_fallback"), (("model", "ignore_merges"), 1, "ignore_merges"),
            (("model", "continuing_subword_prefix"), "##", "continuing_subword_prefix"),
            (("model", "end_of_word_suffix"), "</w>", "end_of_word_suffix"),
            (("normalizer",), {"type": "Lowercase"}, "'Lowercase'"),
            (("normalizer", "normalizers", 0, "type"), "NFKC", "'NFKC'"),
            (("normalizer",), {"type": "Sequence", "normalizers": 3}, "unexpected normalizers in the normaliser: 3"),
            (("pre_tokenizer",), None, "must end with ByteLevel"),
            (("pre_tokenizer", "pretokenizers"), [DIGITS], "must end with ByteLevel"),
            (("pre_tokenizer", "pretokenizers"), [BYTES, DIGITS], "steps after ByteLevel"),
            (split, {"type": "Metaspace"}, "'Metaspace'"), (split, 3, "unexpected pre-tokeniser 3"),
            ((*split, "behavior"), "Removed", "behavior of the Split is not supported: 'Removed'"),
            ((*split, "invert"), True, "invert"), ((*split, "pattern"), {"String": "a"}, "expected a Regex"),
            ((*split, "pattern", "Regex"), "a" * 5000, "'s expression"),
            ((*split, "pattern", "Regex"), "", "'s expression"),
            ((*split, "pattern", "Regex"), r"\w+", "differently"),
            ((*split, "pattern", "Regex"), r"[a[b]]", "differently"),
            ((*split, "pattern", "Regex"), r"(?<=a)b", "differently"),
            ((*split, "pattern", "Regex"), "^a", "differently"),
            ((*split, "pattern", "Regex"), "a{1,2}+", "differently"),
            *(((*split, "pattern", "Regex"), expression, why) for expression, why in EXPRESSIONS),
            (("pre_tokenizer", "pretokenizers"), [DIGITS] * 17 + [BYTES], "17 expressions"),
            (("pre_tokenizer", "pretokenizers", 1, "add_prefix_space"), True, "add_prefix_space"),
            (("post_processor",), {"type": "BertProcessing"}, "'BertProcessing'"),
            (("post_processor",), {"type": "TemplateProcessing"}, "TemplateProcessing None"),
            (("post_processor",), template("A", "S"), "at most one token before the text"),
            (("post_processor",), template("S", "S", "A"), "at most one token before the text"),
            (("post_processor",), template("A", "B"), "at most one token before the text"),
            (("post_processor",), template("S", "A", ids=[3, 4]), "at most one token before the text"),
            (("post_processor",), template("S", "A", ids=[400]), "id 400 exceeds the model's vocabulary"),
            (("decoder",), {"type": "Metaspace"}, "'Metaspace'"), (("decoder",), None, "'none'"),
            (("model", "vocab"), [], "must map tokens to ids"),
            (("model", "vocab", "he"), "1", "must map tokens to ids"),
            (("model", "vocab", "he"), 7, "two tokens with the same id"),
            (("model", "vocab", "he"), -1, "no tokens, too many merges or an id above"),
            (("model", "vocab", "he"), 1 << 20, "exceeds the model's vocabulary"),
            (("model", "vocab", ""), 299, "'s token ''"),
            (("model", "vocab", "x" * 1025), 299, "'s token 'xxx"),
            (("model", "merges"), {}, "must be a list"), (("model", "merges", 0), "h e e", "'h e e' is not a pair"),
            (("model", "merges", 0), ["h", 3], "is not a pair"), (("model", "merges", 0), 3, "3 is not a pair"),
            (("model", "merges", 0), "h q", "'hq' is not a token"),
            (("model", "merges", 0), "xx e", "'xx' is not a token"),
            (("added_tokens",), 3, "added_tokens 3"), (("added_tokens", 0), 3, "added token 3"),
            (("added_tokens", 0, "lstrip"), True, "lstrip of the added token"),
            (("added_tokens", 0, "single_word"), True, "single_word"),
            (("added_tokens", 0, "id"), 301, "'<think>' is a duplicate"),
            (("added_tokens", 0, "content"), "<think>", "duplicate"), (("added_tokens", 0, "content"), "", "''"),
            (("added_tokens", 0, "content"), "he", "contradicts"), (("added_tokens", 0, "id"), 3, "contradicts"),
            (("added_tokens", 0, "id"), 400, "id 400 exceeds the model's vocabulary of 400")):
        found = complaint(changed(path, value))
        assert found and part in found, (path, value, found)
    with open(os.path.join(ROOT, "tests", "golden", "byte-bpe.json"), encoding="utf-8") as file:
        golden = json.load(file)["tokenizers"]
    for kind, path, value, part in (
            ("llama2", ("normalizer", "normalizers", 0, "prepend"), "_", "normaliser"),
            ("gemma", ("normalizer", "content"), "_", "normaliser"), ("gemma", ("normalizer",), {"type": "NFC"}, "'NFC'"),
            ("mistral", ("pre_tokenizer", "split"), True, "without split"),
            ("mistral", ("pre_tokenizer", "replacement"), "_", "without split"),
            ("mistral", ("pre_tokenizer", "prepend_scheme"), "often", "without split"),
            ("gemma", ("pre_tokenizer", "behavior"), "Isolated", "without split"), ("llama2", ("decoder",), None, "decoder"),
            ("llama2", ("decoder", "decoders", 3, "stop"), 1, "decoder"),
            ("llama2", ("decoder", "decoders", 1, "type"), "ByteLevel", "decoder"),
            ("llama2", ("model", "vocab", "<0x41>"), 999, "exceeds"),
            ("llama2", ("model", "ignore_merges"), True, "ignore_merges")):
        found = complaint(changed(path, value, golden[kind]), 900)
        assert found and part in found, (kind, path, value, found)
    del golden["llama2"]["model"]["vocab"]["<0x41>"]
    assert "no token for the byte 41" in complaint(golden["llama2"], 900)
    for path in ("model", "new"), ("new",):
        assert "unknown key 'new' with value 1" in complaint(changed(path, 1))
    for key, value, fine in (("add_prefix_space", True, False), ("add_eos_token", True, False), ("new", 1, False),
                             ("add_prefix_space", False, True), ("model_max_length", 512, True), ("new", None, True)):
        found = complaint(tokeniser(), tokenizer_config={key: value})
        assert (found is None) == fine and (fine or key in found and "tokenizer_config.json" in found), (key, found)
    without = tokeniser()
    del without["model"]["vocab"]["Ġ"]
    assert "no token for the byte 20" in complaint(without)
    for more, part in (({"300": {"content": "<think>"}}, "301 in tokenizer.json"), (3, "added_tokens_decoder 3"),
                       ({"x": {}}, "added_tokens_decoder"), ({"305": {"content": "<b>", "rstrip": True}}, "rstrip")):
        found = complaint(tokeniser(), tokenizer_config={"added_tokens_decoder": more})
        assert found and part in found, (more, found)
    assert complaint(tokeniser()) is None


# ---- Texts, with the engine's tokeniser ------------------------------------------------------------------------------

def cut(blob, texts, added):
    """Tokenise texts with a packed tokeniser; return [(ids, decoded text)]."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(blob)
        file.flush()
        done = subprocess.run([LINES, file.name, "ADDED" if added else "TEXT"], stdout=subprocess.PIPE, check=True,
                              input=b"".join(struct.pack("=I", len(x)) + x for x in texts), timeout=600)
    found, at = [], 0
    for _ in texts:
        n, = struct.unpack_from("=I", done.stdout, at)
        ids = list(struct.unpack_from(f"={n}i", done.stdout, at + 4))
        size, = struct.unpack_from("=I", done.stdout, at + 4 + 4 * n)
        at += 8 + 4 * n + size
        found.append((ids, done.stdout[at - size:at]))
    assert at == len(done.stdout)
    return found


def agree(blob, texts, wanted, added):
    """Check that the tokeniser returns the expected ids for texts; return the decoded texts."""
    found = cut(blob, [x.encode() for x in texts], added)
    for text, ids, (ours, _) in zip(texts, wanted, found, strict=True):
        assert ours == ids, (text, ids, ours)
    return [text.decode() for _, text in found]


@numpy_test
def ids_and_texts_match_the_published_package():
    with open(os.path.join(ROOT, "tests", "golden", "byte-bpe.json"), encoding="utf-8") as file:
        golden = json.load(file)
    for kind, values in golden["tokenizers"].items():
        with folder_of(values) as folder:
            blob = byte_bpe.tokenizer_blob(folder)
        cases = golden["cases"][kind]
        assert len(cases) > 70 and sum("plain" in case for case in cases) >= 4
        texts = [case["text"] for case in cases]
        assert agree(blob, texts, [case["ids"] for case in cases], True) == [case["decoded"] for case in cases], kind
        agree(blob, texts, [case.get("plain", case["ids"]) for case in cases], False)


@numpy_test
def bytes_without_a_token_are_dropped():
    """Drop bytes without a token, as `tokenizers` 0.22.2 does."""
    values = tokeniser()
    for byte in 4, 0xf1:
        del values["model"]["vocab"][byte_bpe.BYTE_CHARS[byte]]
    with folder_of(values) as folder:
        blob = byte_bpe.tokenizer_blob(folder)
    id_of, rest = values["model"]["vocab"], byte_bpe.BYTE_CHARS[0x80]
    cases = {"h\4e": ["he"], "\4": [], "t\4h\4e\4": ["the"], "x\U00040000y": ["x", rest, rest, rest, "y"]}
    agree(blob, list(cases), [[id_of[x] for x in ids] for ids in cases.values()], True)


@numpy_test
def tiktoken_ranks_become_merges():
    with open(os.path.join(ROOT, "tests", "golden", "byte-bpe.json"), encoding="utf-8") as file:
        golden = json.load(file)
    tokens = make_decoder.ranks()
    rows = [base64.b64encode(token) + b" %d" % i for token, i in tokens.items()]
    cases = golden["cases"]["C"]
    with tempfile.TemporaryDirectory() as folder:
        def blob(lines, vocabulary=700):
            with open(os.path.join(folder, "hy.tiktoken"), "wb") as file:
                file.write(b"\n".join(lines) + b"\n")
            return byte_bpe.tokenizer_blob(folder, vocabulary)
        agree(blob(rows), [x["text"] for x in cases], [x.get("plain", x["ids"]) for x in cases], False)
        added = unpack(blob(rows))[4]
        assert added[1] == (len(tokens) + 1, 1, "<|startoftext|>") and added[-1][2] == "<|extra_204|>", added
        abc = base64.b64encode(b"qzjx") + b" %d" % len(rows)  # a token that merges cannot produce
        for lines, part in ((rows[:-1] + [b"x"], "line 420 is not"), (rows[:-1] + [b"%% 419"], "line 420 is not"),
                            (rows + rows[:1], "line 421 contains"), (rows[1:], "consecutive, starting at 0"),
                            ([], "line 1 is not"), (rows + [abc], "the token 'qzjx'")):
            try:
                assert not blob(lines), part
            except byte_bpe.FormatError as error:
                assert part in str(error) and str(error).startswith(folder), (part, error)
        try:
            assert not blob(rows, 500)
        except byte_bpe.FormatError as error:
            assert "id 629 exceeds the model's vocabulary of 500" in str(error), error


@numpy_test
def cases_of_shared_checkpoints_agree():
    if not os.path.isdir(SHARED):
        raise Skip("no ../shared")
    for name in "hy-v3", "hunyuan-dense", "qwen3-moe":
        blob = byte_bpe.tokenizer_blob(os.path.join(SHARED, name), 600)
        with open(os.path.join(SHARED, name, "tokenizer_cases.json"), encoding="utf-8") as file:
            cases = json.load(file)
        strings = cases["strings"]
        assert agree(blob, [x["text"] for x in strings], [x["ids"] for x in strings], True) == [
            x["decoded"] for x in strings]
        agree(blob, [x["text"] for x in cases["chat"]], [x["ids"] for x in cases["chat"]], True)
        plain = [x for x in strings if "think>" not in x["text"] and "reasoning_mode" not in x["text"]]
        assert len(plain) > 50  # exclude texts with tokens that the package always parses
        agree(blob, [x["text"] for x in plain], [x.get("ids_as_text", x["ids"]) for x in plain], False)
        found = cut(blob, [bytes.fromhex(x["bytes_hex"]) for x in cases["invalid"]], False)
        assert [ids for ids, _ in found] == [x["ids_if_replaced_by_U_FFFD"] for x in cases["invalid"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run tests with matching names")
    return test.run(parser.parse_args().only)


if __name__ == "__main__":
    sys.exit(main())
