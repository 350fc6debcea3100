#!/usr/bin/env python3
"""Test GGUF files: convert.py must write the same model file as from a checkpoint
in Hugging Face's layout with equal weights, and reject bad files.

Usage: tests/python tests/convert/test_gguf.py [--only NAME]

make_gguf.py creates the files with the package's writer. Prints `ok NAME` or
`FAIL NAME` per test.
"""
import argparse
import contextlib
import io
import json
import os
import re
import struct
import sys
import tempfile
from unittest import mock

from converting import TRANSLATE, convert_quietly, run
from suite import Suite

try:
    import gguf
    import numpy as np

    import gguf_file
    import gguf_keys
    import make_decoder as make
    import make_gguf
    import moefile
except ImportError:
    gguf = None
test = Suite()
gguf_test = test.needs(gguf, "NumPy or gguf")


def convert(*command):
    """Run convert.py; return (error message or None, the notes that it printed)."""
    notes = io.StringIO()
    with contextlib.redirect_stderr(notes):
        complaint = convert_quietly(*command)
    return complaint, notes.getvalue()


def made(folder, family, vocabulary=None, **changes):
    """Write a checkpoint whose RoPE settings both formats can express; return (config, arrays)."""
    if family.startswith("hunyuan"):
        changes = {"rope_theta": 11158840.0, "rope_scaling": None, **changes}
    if family == "gemma3_text":
        changes = {"query_pre_attn_scalar": make.COMMON["head_dim"], **changes}
    if family in make.QWEN_3_5:  # llama.cpp has another order of value heads if they share key heads
        changes = {"linear_num_key_heads": make.DELTA["linear_num_value_heads"], **changes}
    config, arrays = make.make(folder, family, vocab_size=vocabulary or make.V, **changes)
    return config, {name: x.astype(np.float32) for name, x in arrays.items()}


def read(path):
    """Read a model file; return (metadata except names and recommended sampling, {tensor name: bytes})."""
    meta, tensors = moefile.read(path)
    meta = {key: value for key, value in meta.items() if not key.startswith(("general.", "sample."))}
    return meta, {name: (t.type, t.dims, t.data) for name, t in tensors.items()}


def assert_same(found, wanted, leave=()):
    for key in {*found[0], *wanted[0]} - set(leave):
        assert np.array_equal(found[0].get(key), wanted[0].get(key)), (key, found[0].get(key), wanted[0].get(key))
    assert found[1].keys() == wanted[1].keys()
    for name, t in wanted[1].items():
        assert found[1][name] == t, name


def read_ids(model):
    """Translate prompts; return their ids and scores."""
    lines = [" ".join(map(str, make.prompt(i))) for i in range(12)]
    found = run([TRANSLATE, "-m", model, "--ids", "--json", "--beam", "4", "--kv-bits", "32",
                 "--max-len-offset", "8"], lines)
    return [(x["ids"], x["score"]) for x in map(json.loads, found.lines)]


@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory() as at:
        os.mkdir(at + "/hf")
        yield at


@gguf_test
def value_heads_in_llama_cpps_order_give_the_same_ids():
    for family in make.QWEN_3_5:
        with folder() as at:
            config, arrays = made(at + "/hf", family, linear_num_key_heads=2)
            make_gguf.write(at + "/x.gguf", config, arrays)
            for source in "hf", "x.gguf":
                kind = "hf" if source == "hf" else "gguf"
                assert convert("--from", kind, f"{at}/{source}", "-o", f"{at}/{kind}.bin", "--type", "f32")[0] is None
            assert moefile.read(at + "/gguf.bin")[0]["decoder.0.tiled"] == 1
            for (a, x), (b, y) in zip(read_ids(at + "/hf.bin"), read_ids(at + "/gguf.bin"), strict=True):
                assert a == b and abs(x - y) < 1e-4, (family, a, b, x, y)


@gguf_test
def the_file_equals_that_of_hugging_faces_layout():
    for family in make_gguf.ARCHITECTURES:
        for options in ("--type", "f32"), ("--type", "f16"), ():
            with folder() as at:
                config, arrays = made(at + "/hf", family)
                make_gguf.write(at + "/x.gguf", config, arrays)
                assert convert("--from", "hf", at + "/hf", "-o", at + "/a", *options)[0] is None
                complaint, notes = convert("--from", "gguf", at + "/x.gguf", "-o", at + "/b", *options)
                assert complaint is None and "twice" not in notes, (family, complaint, notes)
                assert_same(read(at + "/b"), read(at + "/a"), ["token.ends"])


@gguf_test
def any_pattern_of_windows_equals_that_of_hugging_faces_layout():
    key, kinds = "gemma3__attention__sliding_window_pattern", ("full_attention", "sliding_attention")
    for pattern in [0, 1, 1, 0], [True, False, True, True], [1, 1, 1, 1], [0, 0, 0, 0]:
        with folder() as at:
            config, arrays = made(at + "/hf", "gemma3_text", layer_types=[kinds[x] for x in pattern])
            make_gguf.write(at + "/x.gguf", config, arrays, **{key: pattern})
            assert convert("--from", "hf", at + "/hf", "-o", at + "/a")[0] is None
            assert convert("--from", "gguf", at + "/x.gguf", "-o", at + "/b")[0] is None
            assert_same(read(at + "/b"), read(at + "/a"), ["token.ends"])
            found = [moefile.read_meta(at + "/b").get(f"decoder.{2 * i}.window", 0) for i in range(4)]
            assert found == [5 * x for x in pattern], (pattern, found)


@gguf_test
def recommended_sampling_settings_are_stored():
    with folder() as at:
        config, arrays = made(at + "/hf", "qwen3_moe")
        keys = {"temp": 0.75, "top_k": 20, "top_p": 0.5, "min_p": 0.25, "penalty_repeat": 1.5, "mirostat": 2}
        make_gguf.write(at + "/x.gguf", config, arrays, **{f"general__sampling__{x}": y for x, y in keys.items()})
        assert convert("--from", "gguf", at + "/x.gguf", "-o", at + "/out")[0] is None
        meta = moefile.read(at + "/out")[0]
        assert {x: y for x, y in meta.items() if x.startswith("sample.")} == {
            "sample.temperature": 0.75, "sample.top_k": 20, "sample.top_p": 0.5, "sample.min_p": 0.25,
            "sample.repetition_penalty": 1.5}, meta
        for key, value in ("temp", -1.0), ("top_k", "many"):
            make_gguf.write(at + "/x.gguf", config, arrays, **{f"general__sampling__{key}": value})
            assert f"general.sampling.{key} is" in convert(at + "/x.gguf", "-o", at + "/out")[0]


@gguf_test
def alternative_spellings_give_the_same_file():
    """Gate and up matrices may be one tensor, biases may lack ".bias", and files may be split."""
    for family in "hy_v3", "qwen3_moe":
        rename = lambda tensors: {name.replace("exp_probs_b.bias", "exp_probs_b"): x for name, x in tensors.items()}
        with folder() as at:
            config, arrays = made(at + "/hf", family)
            make_gguf.write(at + "/x.gguf", config, arrays)
            make_gguf.write(at + "/y.gguf", config, arrays, fused=True, change=rename)
            make_gguf.write(at + "/z.gguf", config, arrays, pieces=9)
            pieces = sorted(x for x in os.listdir(at) if x.startswith("z-"))
            assert len(pieces) > 2, pieces
            wanted = None
            for name in "x.gguf", "y.gguf", pieces[0], pieces[-1]:
                assert convert("--from", "gguf", f"{at}/{name}", "-o", at + "/out")[0] is None, name
                wanted = wanted or read(at + "/out")
                assert_same(read(at + "/out"), wanted)
            os.unlink(f"{at}/{pieces[1]}")
            complaint, _ = convert("--from", "gguf", f"{at}/{pieces[0]}", "-o", at + "/out")
            assert pieces[1] in complaint and "missing" in complaint, complaint
            os.rename(f"{at}/{pieces[0]}", f"{at}/{pieces[1]}")
            complaint, _ = convert("--from", "gguf", f"{at}/{pieces[1]}", "-o", at + "/out")
            assert "missing" in complaint, complaint
            os.rename(f"{at}/{pieces[1]}", f"{at}/z.gguf")
            complaint, _ = convert("--from", "gguf", f"{at}/z.gguf", "-o", at + "/out")
            assert "parts" in complaint, complaint


@gguf_test
def quantised_numbers_match_the_package():
    wide = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32,
            "num_attention_heads": 4}
    for family, kind in (("hy_v3", "Q4_0"), ("qwen3_moe", "Q8_0"), ("llama", "Q4_1"), ("hunyuan_v1_dense", "BF16"),
                         ("llama", "F16"), ("hunyuan_v1_dense", "Q5_0")):
        for options in ("--type", "f32"), ("--type", "q8", "--experts", "q4"):
            with folder() as at:
                config, arrays = made(at + "/hf", family, **wide)
                kinds = {name: kind for name, x in make_gguf.arrays_of(config, arrays).items()
                         if x.ndim > 1 and "gate_inp" not in name}
                make_gguf.write(at + "/x.gguf", config, arrays, kinds)
                meant = {name: make_gguf.quantised(x, kind)[1] if x.ndim > 1 and "gate.weight" not in name else x
                         for name, x in arrays.items()}
                make.write_safetensors(at + "/hf/model.safetensors", meant, exact=True)
                assert convert("--from", "hf", at + "/hf", "-o", at + "/a", *options)[0] is None
                complaint, notes = convert("--from", "gguf", at + "/x.gguf", "-o", at + "/b", *options)
                assert complaint is None, (family, kind, complaint)
                lossy = kind[0] == "Q" and "q4" in options and "num_experts" in config
                assert ("quantises twice" in notes) == lossy, notes
                assert_same(read(at + "/b"), read(at + "/a"), ["token.ends"])


@gguf_test
def blocks_of_256_are_read():
    """Blocks of 256 numbers are read correctly for single rows, and for some rows of an expert."""
    r = np.random.default_rng(3)
    with folder() as at:
        for kind, size in ("Q4_K", 144), ("Q6_K", 210):
            data = r.integers(0, 255, (3, 4, 2 * size)).astype(np.uint8)
            halves = data.reshape(-1, size)
            for place in ((0, 2) if kind == "Q4_K" else (208,)):  # make the scales finite half floats
                halves[:, place:place + 2] = r.uniform(-1, 1, len(halves)).astype("<f2").view(np.uint8).reshape(-1, 2)
            w = gguf.GGUFWriter(at + "/x.gguf", "llama")
            w.add_tensor("t", data, raw_dtype=gguf.GGMLQuantizationType[kind])
            w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
            t = gguf_file.open_gguf(at + "/x.gguf")[1]["t"]
            wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
            assert t.shape == (3, 4, 512) and np.array_equal(np.concatenate(list(t.read(2))), wanted)
            assert np.array_equal(np.concatenate(list(t.part(1, 1, 4).read(2))), wanted[1, 1:4])


# ---- Tokens ----------------------------------------------------------------------------------------------------------

@gguf_test
def tokenisers_match_tokenizer_json():
    for family in make_gguf.ARCHITECTURES:
        with folder() as at:
            config, arrays = made(at + "/hf", family, 448, bos_token_id=420)
            template = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"
            make_gguf.write(at + "/x.gguf", config, arrays, tokens=True, tokenizer__chat_template=template)
            make.write_tokeniser(at + "/hf", make_gguf.TOKENISERS[family])
            with open(at + "/hf/tokenizer_config.json", "w", encoding="utf-8") as file:
                bos = make_gguf.tokens_of(family, 448)[0][config["bos_token_id"]]
                json.dump({"bos_token": bos, "chat_template": template}, file)
            assert convert("--from", "hf", at + "/hf", "-o", at + "/a")[0] is None
            assert convert("--from", "gguf", at + "/x.gguf", "-o", at + "/b")[0] is None
            found, wanted = read(at + "/b"), read(at + "/a")
            assert wanted[0]["tokenizer.kind"] == "byte-bpe" and wanted[0]["prompt.prefix"] == bos + "<user>"
            assert_same(found, wanted, ["token.ends"])


@gguf_test
def unsupported_tokenisers_are_rejected_by_name():
    cases = [({"tokenizer__ggml__model": "t5"}, "'t5'"), ({"tokenizer__ggml__model": "llama"}, "pre 'smollm' is"),
             ({"tokenizer__ggml__model": "llama", "tokenizer__ggml__pre": None}, "scores must list"),
             ({"tokenizer__ggml__pre": "tekken"}, "'tekken'"),
             ({"tokenizer__ggml__model": [1, 2]}, "model array"), ({"tokenizer__ggml__pre": "llama-bpe"}, "bos_token_id"),
             ({"tokenizer__ggml__add_bos_token": True}, "bos_token_id is missing"),
             ({"tokenizer__ggml__add_eos_token": True}, "add_eos_token is True"),
             ({"tokenizer__ggml__add_space_prefix": True}, "add_space_prefix is True"),
             ({"tokenizer__ggml__add_bos_token": 1}, "add_bos_token is 1"),
             ({"tokenizer__ggml__pre": None}, "pre None is"), ({"tokenizer__ggml__merges": ["a"]}, "is not a pair"),
             ({"tokenizer__ggml__merges": None}, "merges must be a list"),
             ({"tokenizer__ggml__tokens": ["a"] * 449}, "at most 448 tokens"),
             ({"tokenizer__ggml__tokens": ["a", "b"]}, "token_type"),
             ({"tokenizer__ggml__eos_token_id": 448}, "eos_token_id is 448"),
             ({"tokenizer__ggml__bos_token_id": "x"}, "bos_token_id is 'x'"),
             ({"tokenizer__ggml__eos_token_id": None}, "eos_token_id is []"),
             ({"tokenizer__chat_template": "{{ x"}, "chat template"),
             ({"tokenizer__chat_template": 3}, "template is 3")]
    for more, wanted in cases:
        with folder() as at:
            config, arrays = made(at + "/hf", "llama", 448)
            make_gguf.write(at + "/x.gguf", config, arrays, tokens=True, **{"tokenizer__ggml__bos_token_id": None, **more})
            complaint, _ = convert("--from", "gguf", at + "/x.gguf", "-o", at + "/b")
            assert complaint and wanted in complaint and "x.gguf" in complaint, (more, complaint)


CHAT = ("{% for m in messages %}{{ {'user': '<｜User｜>', 'system': '<think>', 'assistant': '</think>'}[m.role] }}"
        "{{ m.content }}END{% endfor %}</think>")
TEXT_END, TURN_END, USER_TOKEN = 420, 421, 422


def converted(at, family="llama", change=None, **more):
    """Convert a file with a tokeniser; return the metadata of the model file and the notes."""
    config, arrays = made(at + "/hf", family, 448)
    make_gguf.write(at + "/x.gguf", config, arrays, tokens=True, change=change, **more)
    complaint, notes = convert(at + "/x.gguf", "-o", at + "/b")
    assert complaint is None, complaint
    return moefile.read_meta(at + "/b"), notes


@gguf_test
def files_with_a_part_of_a_tokeniser_need_ids_only():
    with folder() as at:
        config, arrays = made(at + "/hf", "llama", 448)
        make_gguf.write(at + "/x.gguf", config, arrays, tokens=True, tokenizer__ggml__model=None)
        complaint, _ = convert(at + "/x.gguf", "-o", at + "/b")
        assert "tokenizer.ggml.model is missing; found only tokenizer.ggml.tokens and tokenizer.ggml.merges" in complaint
        assert "--ids-only" in complaint and not os.path.exists(at + "/b")
        assert convert(at + "/x.gguf", "-o", at + "/b", "--ids-only")[0] is None
        assert moefile.read_meta(at + "/b")["tokenizer.kind"] == "none"


@gguf_test
def answers_end_like_those_of_the_chat_template():
    turn, spelled = make_gguf.tokens_of("llama", 448)[0][TURN_END], make_gguf.tokens_of("llama", 448)
    spelled[0][425], spelled[1][425] = "<|im_end|>", 3
    spelled = {"tokenizer__ggml__tokens": spelled[0], "tokenizer__ggml__token_type": spelled[1]}
    chat = lambda end: {"tokenizer__chat_template": CHAT.replace("END", end)}
    for more, wanted in (
            (chat(turn), [TEXT_END, TURN_END]), (chat("\n" + turn), [TEXT_END, TURN_END]),  # the text's end is eos
            (chat(turn + "\n"), [TEXT_END, TURN_END]), (chat("."), [TEXT_END]), ({}, [TEXT_END]),
            (chat(turn + "{{ loop.index }}"), [TEXT_END, TURN_END]),
            ({**chat(turn), "tokenizer__ggml__eot_token_id": TURN_END}, [TEXT_END, TURN_END]),
            ({**chat(turn), "tokenizer__ggml__eos_token_id": TURN_END}, [TURN_END]),
            ({**chat(turn), **spelled}, [TEXT_END, 425, TURN_END]), (spelled, [TEXT_END, 425]),
            ({"tokenizer__ggml__eom_token_id": 424, "tokenizer__ggml__fim_pad_token_id": 423}, [TEXT_END, 424, 423])):
        with folder() as at:
            meta, notes = converted(at, **{"tokenizer__ggml__eos_token_id": TEXT_END, **more})
            found = [meta["token.eos"], *meta.get("token.ends", ())]
            assert found == wanted, (more, found)
            assert ("answers also end" in notes) == (TURN_END in wanted[1:] and "_eot_" not in str(more)), notes


@gguf_test
def chat_tokens_typed_as_text_are_special():
    texts, kinds, _ = make_gguf.tokens_of("llama", 448)
    more = {"tokenizer__chat_template": CHAT.replace("END", texts[TURN_END]),
            "tokenizer__ggml__eos_token_id": TEXT_END, "tokenizer__ggml__bos_token_id": TEXT_END}
    with folder() as at:
        wanted, notes = converted(at, **more)
        assert "typed as text" not in notes, notes
        for kind in 1, 2, 5, 0:  # normal, unknown, unused, undefined
            typed = [kind if i in (TEXT_END, TURN_END, USER_TOKEN) else x for i, x in enumerate(kinds)]
            found, notes = converted(at, **more, tokenizer__ggml__token_type=typed)
            assert notes.count("typed as text") == 3, notes
            assert found["tokenizer.model"] == wanted["tokenizer.model"], kind
            assert np.array_equal(found["token.ends"], wanted["token.ends"]), kind
        typed = [1 if i == USER_TOKEN else x for i, x in enumerate(kinds)]
        found, notes = converted(at, tokenizer__ggml__token_type=typed)  # no template spells it
        assert "typed as text" not in notes, notes


@gguf_test
def texts_begin_with_bos_if_the_file_requires_it():
    bos = make_gguf.tokens_of("llama", 448)[0][TEXT_END]
    chat = CHAT.replace("END", "")
    for more, prefix, begin in (
            ({"add_bos_token": True}, None, 1), ({"add_bos_token": False}, None, None), ({}, None, None),
            ({"pre": "llama-bpe"}, None, 1), ({"pre": "llama-bpe", "add_bos_token": False}, None, None),
            ({"add_bos_token": True, "chat": chat}, bos + "<｜User｜>", None),
            ({"add_bos_token": True, "chat": "{{ bos_token }}" + chat}, bos + "<｜User｜>", None),
            ({"chat": chat}, "<｜User｜>", None)):
        keys = {f"tokenizer__ggml__{key}": value for key, value in more.items() if key != "chat"}
        with folder() as at:
            meta, notes = converted(at, **keys, tokenizer__ggml__bos_token_id=TEXT_END,
                                    tokenizer__chat_template=more.get("chat"))
            found = meta.get("prompt.prefix"), meta.get("source.bos"), meta["token.bos"]
            assert found == (prefix, begin, TEXT_END), (more, found)
            assert ("bos" in notes) == (begin is not None or prefix == bos + "<｜User｜>" and "{{" not in more["chat"][:3])
            if begin:  # the engine adds it
                found = [json.loads(run([TRANSLATE, "-m", at + "/b", option, "--json"], [ids]).lines[0])["score"]
                         for option, ids in (("--ids", "5 9"), ("--raw-ids", f"{TEXT_END} 5 9"), ("--raw-ids", "5 9"))]
                assert found[0] == found[1] != found[2], found


@gguf_test
def llama_3s_tokeniser_matches_tokenizer_json():
    texts, kinds, merges = make_gguf.tokens_of("llama", 448, "llama")
    keys = {"tokens": texts, "token_type": kinds, "merges": merges, "pre": "llama-bpe", "bos_token_id": TEXT_END}
    with folder() as at:
        meta, _ = converted(at, **{f"tokenizer__ggml__{key}": value for key, value in keys.items()})
        make.write_tokeniser(at + "/hf", "llama")
        assert convert(at + "/hf", "-o", at + "/a")[0] is None
        wanted = moefile.read_meta(at + "/a")
        for key in "tokenizer.model", "source.bos", "token.bos":
            assert meta[key] == wanted[key], key


@gguf_test
def languages_that_the_authors_name_are_stored():
    for named, wanted in (["en", "de"], "en de"), ("en", "en"), (["en", "multilingual"], None), (None, None), (3, None):
        with folder() as at:
            meta, _ = converted(at, "qwen3_moe", general__languages=named, tokenizer__chat_template=CHAT)
            assert meta.get("languages.named") == wanted, named


@gguf_test
def answers_also_end_at_the_end_of_a_turn():
    with folder() as at:
        config, arrays = made(at + "/hf", "hunyuan_v1_dense", 448)
        texts, kinds, _ = make_gguf.tokens_of("hunyuan_v1_dense", 448)
        control = [i for i, kind in enumerate(kinds) if kind == 3]
        for eos, eot, wanted in ((control[0], control[1], [control[0], control[1]]), (3, control[1], [control[1]]),
                                 (3, None, [3]), (control[0], control[0], [control[0]])):
            make_gguf.write(at + "/x.gguf", config, arrays, tokens=True, tokenizer__ggml__eos_token_id=eos,
                            tokenizer__ggml__eot_token_id=eot)
            complaint, notes = convert("--from", "gguf", at + "/x.gguf", "-o", at + "/b")
            assert complaint is None and ("piece of text" in notes) == (eos == 3 and eot is not None), (
                complaint, notes)
            meta = moefile.read_meta(at + "/b")
            assert [meta["token.eos"], *meta.get("token.ends", ())] == wanted, (eos, eot, texts[eos])


# ---- Rejected files --------------------------------------------------------------------------------------------------

@gguf_test
def unknown_settings_are_rejected_by_name():
    cases = [("llama", {"general__architecture": "gemma"}, "'gemma'"),
             ("llama", {"llama__rope__scaling__type": "yarn"}, "'yarn'"),
             ("llama", {"llama__attention__value_length": 10}, "value_length is 10"),
             ("llama", {"llama__rope__dimension_count": 6}, "dimension_count is 6"),
             ("llama", {"llama__expert_count": 8}, "llama.expert_count is 8"), ("llama", {"llama__expert_count": 1}, None),
             ("llama", {"llama__block_count": 4}, "tensor model.layers.3"),
             ("llama", {"llama__block_count": 2}, "llama.block_count is 2, but the file has layer 2"),
             ("hy_v3", {"hy_v3__nextn_predict_layers": 1}, "hy_v3.nextn_predict_layers is 1, but layer 2 of 3 has no"),
             ("hy_v3", {"hy_v3__nextn_predict_layers": 3}, "hy_v3.nextn_predict_layers is 3"),
             ("llama", {"llama__rope__scaling__factor": 2.0}, "llama.rope.scaling.factor is 2.0"),
             ("llama", {"llama__rope__scaling__factor": 2.0, "llama__rope__scaling__type": "none"}, None),
             ("llama", {"llama__rope__freq_base": 0.5}, "llama.rope.freq_base is 0.5"),
             ("llama", {"llama__attention__head_count_kv": 4}, "llama.attention.head_count_kv 4"),
             ("hy_v3", {"hy_v3__leading_dense_block_count": 2}, "leading_dense_block_count is 2"),
             ("hy_v3", {"hy_v3__leading_dense_block_count": 1}, None),
             ("hy_v3", {"hy_v3__expert_shared_feed_forward_length": 7}, "expert_shared_feed_forward_length is 7"),
             ("llama", {"quantize__imatrix__file": "x", "general__url": "y", "qwen3moe__expert_count": 3}, None),
             ("llama", {"llama__some__new_key": 1}, "llama.some.new_key is 1"),
             ("llama", {"adapter__type": "lora"}, "adapter.type is 'lora'"),
             ("llama", {"general__type": "mmproj"}, "general.type is 'mmproj'"),
             ("llama", {"llama__block_count": None}, "block_count is missing"),
             ("llama", {"llama__attention__head_count_kv": [2, 3, 2]}, "differs between layers"),
             ("llama", {"llama__attention__head_count_kv": [2, 2, 2]}, None),
             ("llama", {"llama__embedding_length": 16}, "llama.embedding_length 16"),
             ("llama", {"general__alignment": 24}, "general.alignment"),
             ("hy_v3", {"hy_v3__expert_gating_func": 1}, "expert_gating_func is 1"),
             ("hy_v3", {"hy_v3__expert_weights_norm": False}, "expert_weights_norm is False"),
             ("qwen3_moe", {"qwen3moe__expert_gating_func": 2}, "expert_gating_func is 2"),
             ("qwen3_moe", {"qwen3moe__expert_used_count": 9}, "qwen3moe.expert_used_count is 9"),
             ("qwen3_moe", {"qwen3moe__attention__sliding_window": 64}, "sliding_window is 64"),
             ("qwen3_moe", {"split__count": 3}, "parts")]
    for family, more, wanted in cases:
        with folder() as at:
            config, arrays = made(at + "/hf", family)
            make_gguf.write(at + "/x.gguf", config, arrays, **more)
            complaint, _ = convert("--from", "gguf", at + "/x.gguf", "-o", at + "/b")
            assert (complaint is None) == (wanted is None), (family, more, complaint)
            assert wanted is None or wanted in complaint and "x.gguf" in complaint, (family, more, complaint)
            assert os.path.exists(at + "/b") == (wanted is None)
    with folder() as at:
        config, arrays = made(at + "/hf", "llama", 448)
        make_gguf.write(at + "/x.gguf", config, arrays, tokens=True, tokenizer__ggml__some_new_key=1)
        assert "tokenizer.ggml.some_new_key is 1" in convert(at + "/x.gguf", "-o", at + "/b")[0]


@gguf_test
def every_key_of_llama_cpp_is_used_or_harmless_or_refused():
    for family in "hy_v3", "llama":
        found = gguf_keys.counted(family, gguf_keys.VALUES[:2])
        assert set(found) == {"refused", "same", "read"} and found["refused"] > 400, found


@gguf_test
def layers_that_predict_further_tokens_are_skipped():
    with folder() as at:
        config, arrays = made(at + "/hf", "hy_v3")
        make_gguf.write(at + "/x.gguf", config, arrays)
        more = lambda t: {**t, "blk.3.nextn.eh_proj.weight": np.ones((4, 8)), "blk.3.attn_norm.weight": np.ones(8)}
        make_gguf.write(at + "/y.gguf", config, arrays, change=more, hy_v3__block_count=4, hy_v3__nextn_predict_layers=1)
        for name in "x", "y":
            complaint, notes = convert(f"{at}/{name}.gguf", "-o", f"{at}/{name}")
            assert complaint is None and ("skipping layer 3" in notes) == (name == "y"), (complaint, notes)
        assert_same(read(at + "/y"), read(at + "/x"))


@gguf_test
def missing_and_extra_tensors_are_rejected():
    for family in make_gguf.ARCHITECTURES:
        config, arrays = make.CONFIGS[family], make.arrays_of(make.CONFIGS[family], 1)
        names = list(make_gguf.arrays_of(config, arrays))
        for name in names[::5]:
            for change in (lambda t: {k: x for k, x in t.items() if k != name},
                           lambda t: {**t, name: t[name][:-1]}, lambda t: {**t, "blk.0.attn_output.bias": t[name]}):
                with folder() as at:
                    make_gguf.write(at + "/x.gguf", config, arrays, change=change)
                    complaint, _ = convert("--from", "gguf", at + "/x.gguf", "-o", at + "/b")
                    if complaint is None and name in ("output.weight", "token_embd.weight"):
                        continue  # these changes are valid: a tied output, a smaller vocabulary
                    assert complaint and re.search("tensor |differs|expert_shared_feed_forward_length", complaint), (
                        family, name, complaint)


@gguf_test
def tensors_of_too_many_experts_take_no_memory():
    many = np.zeros((1 << 16, 1, 1), np.float32)
    with folder() as at:
        for family in "qwen3_moe", "llama":
            config, arrays = make.CONFIGS[family], make.arrays_of(make.CONFIGS[family], 1)
            make_gguf.write(at + "/x.gguf", config, arrays, change=lambda t: {**t, "blk.0.ffn_up_exps.weight": many})
            complaint, _ = convert("--from", "gguf", at + "/x.gguf", "-o", at + "/b")
            assert "tensor blk.0.ffn_up_exps.weight [65536, 1, 1]" in complaint, complaint


@gguf_test
def rotary_frequencies_are_divided_by_their_factors():
    with folder() as at:
        config, arrays = made(at + "/hf", "llama")
        factors = np.array([1, 1, 2, 4, 8, 8], np.float32)
        for x in factors, factors[:5], np.full(6, np.nan, np.float32), np.zeros(6, np.float32):
            make_gguf.write(at + "/x.gguf", config, arrays, change=lambda t: {"rope_freqs.weight": x, **t})
            complaint, _ = convert("--from", "gguf", at + "/x.gguf", "-o", at + "/b")
            assert (complaint is None) == (x is factors), complaint
            if x is factors:
                table = moefile.read(at + "/b")[1]["rotary.weight"].array()
                angle = 1e4 ** (-2 * np.arange(6) / 12) / factors
                assert np.allclose(table[7], [*np.cos(7 * angle), *np.sin(7 * angle)], atol=1e-6)
            else:
                assert "rope_freqs" in complaint, complaint


@gguf_test
def damaged_files_are_refused_by_name():
    """Try files that are truncated, have a changed header byte, or have impossible counts."""
    with folder() as at:
        path, r = at + "/x.gguf", np.random.default_rng(11)
        config, arrays = made(at + "/hf", "qwen3_moe", 448)
        make_gguf.write(path, config, arrays, tokens=True)
        with open(path, "rb") as file:
            data = file.read()
        head = data.index(b"output_norm.weight")
        for i in range(100):
            changed = bytearray(data)
            if i < 30:
                del changed[int(r.integers(0, head if i % 2 else len(data))):]
            elif i < 60:
                place = int(r.integers(0, head // 8)) * 8
                changed[place:place + 8] = struct.pack("<Q", int(r.choice([1 << 40, (1 << 63) + 1, 1 << 31, 9])))
            else:
                changed[int(r.integers(0, head))] ^= 1 << int(r.integers(0, 8))
            with open(path, "wb") as file:
                file.write(changed)
            complaint, _ = convert("--from", "gguf", path, "-o", at + "/b")
            assert complaint is None or "x.gguf" in complaint and "\n" not in complaint, complaint
            if complaint is None:
                os.unlink(at + "/b")
            assert i >= 30 or complaint, "truncated file"
        for version in b"\1\0\0\0", b"\0\0\0\3", b"\4\0\0\0":
            with open(path, "wb") as file:
                file.write(data[:4] + version + data[8:])
            complaint, _ = convert("--from", "gguf", path, "-o", at + "/b")
            assert complaint and "version" in complaint, complaint


@gguf_test
def plain_numbers_need_no_package():
    with folder() as at:
        for kind in "F16", "Q8_0":
            config, arrays = made(at + "/hf", "llama")
            make_gguf.write(at + "/x.gguf", config, arrays, {"token_embd.weight": kind})
            with mock.patch.dict(sys.modules, {"gguf": None}):
                try:
                    assert convert("--from", "gguf", at + "/x.gguf", "-o", at + "/b")[0] is None and kind == "F16"
                except ModuleNotFoundError as error:  # needs.py reports it
                    assert kind == "Q8_0" and error.name == "gguf", error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
