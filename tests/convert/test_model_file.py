#!/usr/bin/env python3
"""Test decoder-only models with tokenizer.model alone: both converters must
write the same tokeniser for a SentencePiece model, and tools/text/bpe.c must
split texts as the sentencepiece package does.

Usage: tests/python tests/convert/test_model_file.py [--only NAME]
"""
import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile

from converting import ROOT, convert_quietly
from suite import Suite

try:
    import sentencepiece

    import byte_bpe
    import make_decoder as make
    import test_decoder_c
    from test_byte_bpe import agree
except ImportError:
    sentencepiece = None
test = Suite()
spm_test = test.needs(sentencepiece, "NumPy, gguf or sentencepiece")
SYMBOLS = ["<|im_start|>", "<|im_end|>", "[gap]"]
SIZE = 700


def texts():
    """Return lines of many scripts, without the user-defined symbols."""
    with open(os.path.join(ROOT, "tests", "golden", "byte-bpe.json"), encoding="utf-8") as file:
        found = [case["text"] for case in json.load(file)["cases"]["llama2"]]
    with open(os.path.join(ROOT, "tools", "convert", "README.md"), encoding="utf-8") as file:
        return found + file.read().split("\n")


def train(path, **changes):
    settings = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False, "user_defined_symbols": SYMBOLS, "vocab_size": SIZE, **changes}
    lines = [line for text in texts() for line in text.split("\n") if line.strip() and "\0" not in line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, minloglevel=2,
                                             character_coverage=.98, hard_vocab_limit=False, **settings)
    with open(path, "wb") as file:
        file.write(model.getvalue())


@contextlib.contextmanager
def folder(config=None, added=None, family="llama", **changes):
    """Yield a checkpoint with tokenizer.model, given tokenizer_config.json and added_tokens.json."""
    changes = {**GEMMA, **changes} if family == "gemma3_text" else changes
    with tempfile.TemporaryDirectory() as at:
        os.mkdir(at + "/m")
        make.make(at + "/m", family, vocab_size=SIZE + 4)
        train(at + "/m/tokenizer.model", **changes)
        for name, values in ("tokenizer_config.json", config), ("added_tokens.json", added):
            if values is not None:
                with open(f"{at}/m/{name}", "w", encoding="utf-8") as file:
                    json.dump(values, file)
        yield at + "/m"


@spm_test
def texts_are_split_as_by_sentencepiece():
    with folder() as at:
        model, blob = sentencepiece.SentencePieceProcessor(model_file=at + "/tokenizer.model"), byte_bpe.tokenizer_blob(at)
        lines = [x for x in texts() if not any(symbol in x for symbol in SYMBOLS)]
        wanted = [model.encode(x) for x in lines]
        assert agree(blob, lines, wanted, False) == [model.decode(ids) for ids in wanted]
        assert len({i for ids in wanted for i in ids}) > SIZE // 2
        assert [(x.id, x.content, x.special, x.in_text) for x in blob.added[:4]] == [
            (0, "<unk>", True, False), (1, "<s>", True, False), (2, "</s>", True, False), (3, SYMBOLS[0], False, True)]


TURNS = ["<start_of_turn>", "<end_of_turn>"]
GEMMA = {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>",
         "eos_piece": "<eos>", "bos_piece": "<bos>", "user_defined_symbols": ["\n\n", "\t", "<b>", *TURNS]}
PICTURES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


@spm_test
def gemma_gets_no_space_and_its_bos_token():
    for config, start in (None, 2), ({**PICTURES, "add_bos_token": False}, None), ({"bos_token": "<eos>"}, 1):
        with folder(config, {"<image_soft_token>": SIZE + 1}, "gemma3_text") as at:
            test_decoder_c.assert_same(at)
            model, blob = (sentencepiece.SentencePieceProcessor(model_file=at + "/tokenizer.model"),
                           byte_bpe.tokenizer_blob(at, family="gemma3_text"))
            assert blob.start == start, (config, blob.start)
            special = [x.content for x in blob.added if x.special and not x.in_text]
            named = ["<image_soft_token>"] * ("image_token" in (config or {}))
            assert special == ["<pad>", "<eos>", "<bos>", "<unk>", *TURNS, *named], special
            lines = [x for x in texts() if not any(turn in x for turn in TURNS)]
            lines += ["a\n\n\n\nb <b>c", " \t\t  d", "  e"]
            wanted = [model.encode(x) for x in lines]
            assert agree(blob, lines, wanted, False) == [model.decode(ids) for ids in wanted]
    with folder(None, None, "gemma3_text", add_dummy_prefix=True) as at:
        for convert in test_decoder_c.convert_c, test_decoder_c.convert_python:
            assert "but GemmaTokenizer does not" in convert(at, at + "/out")[0]


CASES = ({}, {"legacy": False}, {"add_prefix_space": False, "tokenizer_class": "LlamaTokenizerFast"},
         {"add_bos_token": False, "bos_token": {"content": "</s>"}},
         {"added_tokens_decoder": {"0": {"content": "<unk>", "special": True}, "3": {"content": SYMBOLS[0], "special": True},
                                   str(SIZE + 1): {"content": "<new>", "special": False}}})


@spm_test
def both_converters_write_the_same_bytes():
    for config in CASES:
        with folder(config) as at:
            test_decoder_c.assert_same(at)
    with folder({"additional_special_tokens": ["<b>"]}, {"<a>": SIZE, "<b>": SIZE + 1, SYMBOLS[1]: 4}) as at:
        test_decoder_c.assert_same(at)
        blob = byte_bpe.tokenizer_blob(at)
        assert [(x.id, x.special) for x in blob.added[-3:]] == [(SIZE, False), (SIZE + 1, True), (4, False)], blob.added
    with folder({"chat_template": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>'"
                 " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"}) as at:
        assert convert_quietly(at, "-o", at + "/out", "--prompts", "general") is None


REFUSED = (({}, {"model_type": "unigram"}, "unigram"), ({}, {"normalization_rule_name": "nmt_nfkc"}, "normaliser"),
           ({}, {"remove_extra_whitespaces": True}, "normaliser"), ({}, {"byte_fallback": False}, "byte 00"),
           ({}, {"add_dummy_prefix": False}, "add_prefix_space"), ({}, {"treat_whitespace_as_suffix": True}, "normaliser"),
           ({"tokenizer_class": "XLNetTokenizer"}, {}, "XLNetTokenizer"), ({"legacy": "yes"}, {}, "legacy"),
           ({"sp_model_kwargs": {"alpha": .1}}, {}, "sp_model_kwargs"), ({"add_eos_token": True}, {}, "add_eos_token"),
           ({"unknown_key": 1}, {}, "unknown_key"), ({"added_tokens_decoder": {"3": {"content": "x"}}}, {}, "added token"),
           ({"added_tokens_decoder": {"9999": {"content": "xy"}}}, {}, "9999"))


@spm_test
def other_models_are_rejected_by_both():
    def check(at, part):
        for convert in test_decoder_c.convert_c, test_decoder_c.convert_python:
            complaint, _ = convert(at, at + "/out")
            assert complaint and part in complaint and not os.path.exists(at + "/out"), (part, complaint)

    for config, changes, part in REFUSED:
        with folder(config, **changes) as at:
            check(at, part)
    with folder(family="qwen2") as at:
        check(at, "Qwen2Tokenizer")
    with folder() as at:
        shutil.copy(at + "/tokenizer.model", at + "/whole")
        with open(at + "/whole", "rb") as file:
            data = file.read()
        os.unlink(at + "/whole")
        middle = data.index(b"\x0a", 2000)
        for damaged in data[:middle + 1], b"", data[:-1], data.replace(b"[gap]", b"[\xff\xffp]"):
            with open(at + "/tokenizer.model", "wb") as file:
                file.write(damaged)
            check(at, "tokenizer.model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
