#!/usr/bin/env python3
"""Test that the C and Python converters write the same bytes for decoder-only
models, as folders and as GGUF files, and that errors of the C converter name
the damaged file and the problem.

Usage: tests/python tests/convert/test_decoder_c.py [--only NAME]
"""
import argparse
import base64
import contextlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile

from converting import ROOT, TRANSLATE, convert_here, convert_quietly, has_tokeniser
from suite import Skip, Suite

try:
    import gguf
    import numpy as np

    import make_decoder as make
    import make_gguf
    import moefile
    import prompts
    import tables
except ImportError:
    gguf = None
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
SHARED = os.path.join(ROOT, "..", "shared", "llm")
WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_attention_heads": 4}
test = Suite()
gguf_test = test.needs(gguf, "NumPy or gguf")


def convert_c(path, out, kind="-", experts="-", ids_only=True):
    """Convert in C; return (error message or None, notes). Sources without a tokeniser become models of token ids if
    `ids_only` is True."""
    options = ["--ids-only"] * (ids_only and not has_tokeniser(path))
    done = subprocess.run([os.path.join(BUILD, "convert_here"), *options, kind, experts, path, out],
                          capture_output=True, timeout=120)
    lines = done.stdout.decode(errors="replace").splitlines()
    assert done.returncode == 0 and lines, (path, done)
    return None if lines[-1] == "ok" else lines[-1], [x.removeprefix("note: ") for x in lines[:-1]]


def convert_python(path, out, kind="-", experts="-"):
    """Convert in Python; return (error message or None, notes)."""
    given = ("--type", kind), ("--experts", experts)
    options = [x for option, value in given if value != "-" for x in (option, value)]
    notes = io.StringIO()
    with contextlib.redirect_stderr(notes):
        complaint = convert_quietly(path, "-o", out, *options)
    return complaint, notes.getvalue().splitlines()


def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def assert_same(path, kind="-", experts="-"):
    """Convert with both programs; compare the files and the notes."""
    with tempfile.TemporaryDirectory() as at:
        complaint, theirs = convert_python(path, at + "/python", kind, experts)
        assert complaint is None, (path, complaint)
        problem, ours = convert_c(path, at + "/c", kind, experts)
        assert problem is None, (path, kind, problem)
        assert sorted(os.listdir(at)) == ["c", "python"], os.listdir(at)
        assert bytes_of(at + "/c") == bytes_of(at + "/python"), (path, kind, experts)
        assert ours == theirs, (ours, theirs)


def made(at, family, vocabulary=None, **changes):
    """Write a folder whose RoPE settings GGUF can express; return (config, arrays)."""
    if family.startswith("hunyuan"):
        changes = {"rope_theta": 11158840.0, "rope_scaling": None, **changes}
    if family == "gemma3_text":
        changes = {"query_pre_attn_scalar": make.COMMON["head_dim"], **changes}
    if family in make.QWEN_3_5:  # llama.cpp has another order of value heads if they share key heads
        changes = {"linear_num_key_heads": make.DELTA["linear_num_value_heads"], **changes}
    config, arrays = make.make(at, family, vocab_size=vocabulary or make.V, **changes)
    return config, {name: x.astype(np.float32) for name, x in arrays.items()}


@contextlib.contextmanager
def gguf_file(family, vocabulary=None, changes=(), **more):
    """Write a GGUF file; yield its path."""
    with tempfile.TemporaryDirectory() as at:
        os.mkdir(at + "/hf")
        config, arrays = made(at + "/hf", family, vocabulary, **dict(changes))
        make_gguf.write(at + "/x.gguf", config, arrays, **more)
        yield at + "/x.gguf"


# ---- Same bytes ------------------------------------------------------------------------------------------------------

@gguf_test
def folders_have_the_same_bytes():
    for family in make.FAMILIES:
        for options in {}, {"second": True}, {"shards": 3}:
            with tempfile.TemporaryDirectory() as at:
                make.make(at, family, **options)
                assert_same(at)
        with tempfile.TemporaryDirectory() as at:
            make.make(at, family, vocab_size=448)
            make.write_tokeniser(at, make_gguf.TOKENISERS[family])
            for formats in ("f32", "-"), ("q8", "q4m"), ("bf16", "f16"), ("q4", "-"), ("q4m", "q8b"), ("q3", "q2"):
                assert_same(at, *formats)
    for family in make.QWEN_3_5:
        with tempfile.TemporaryDirectory() as at:
            make.make_multimodal(at, family)
            assert_same(at)
    with tempfile.TemporaryDirectory() as at:
        make.make(at, "llama", rope_parameters=make.LLAMA_3, max_position_embeddings=40000)
        assert_same(at, "f32")
        make.make(at, "qwen3_moe", norm_topk_prob=False)
        assert_same(at)
        for limit in 3, 9999:
            make.write_config(at, {**make.CONFIGS["qwen3_moe"], "norm_topk_prob": False},
                              {**make.GENERATION, "eos_token_id": [2, 3], "max_new_tokens": limit})
            assert_same(at)
        os.unlink(at + "/generation_config.json")
        make.make(at, "llama", num_return_sequences=1, temperature=0.5, num_beams=3, moe_topk=4)
        assert_same(at)


@gguf_test
def ranks_have_the_same_bytes():
    """hy.tiktoken, as Hunyuan-MT-7B has it, instead of tokenizer.json."""
    with tempfile.TemporaryDirectory() as at:
        make.make(at, "hunyuan_v1_dense", vocab_size=700)
        make.write_ranks(at)
        assert_same(at)
        lines = bytes_of(at + "/hy.tiktoken").splitlines()
        write(at + "/hy.tiktoken", b"\r\n".join(lines))
        assert_same(at)
        abc = base64.b64encode(b"qzjx") + b" %d" % len(lines)  # a token that merges cannot produce
        for number, damaged in enumerate((lines[:-1] + [b"x"], lines[:-1] + [b"%%%% 419"], lines[:-1] + [b"QQ 419"],
                                          lines[:-1] + [b"QQ== 419 1"], lines + lines[:1], lines[1:], [b""],
                                          lines + [abc], lines + [lines[0].split()[0] + b" %d" % len(lines)],
                                          lines + [b"==== 420"],
                                          lines[:-1] + [lines[-1] + b"\0"], lines[:200])):
            write(at + "/hy.tiktoken", b"\n".join(damaged))
            for complaint, _ in convert_c(at, at + "/c"), convert_python(at, at + "/python"):
                assert complaint and "hy.tiktoken" in complaint, (number, complaint)
                assert not os.path.exists(at + "/c") and not os.path.exists(at + "/python"), number


def plain(text):
    """Return a message without spaces and quotation marks, with which Python and C write values differently."""
    return re.sub(r"[\s'\"]", "", text)


def fp8_value(code, exponent_bits):
    """Return the value of a code: sign, exponent, mantissa."""
    bits = 7 - exponent_bits
    exponent, mantissa = code >> bits & (1 << exponent_bits) - 1, code & (1 << bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    size = (bool(exponent) + mantissa / 2 ** bits) * 2.0 ** (max(exponent, 1) - bias)
    return -size if code & 128 else size


# Number format, shape of a block (0: all), shape of the tensor of scales, its number format, ending and settings
FP8 = {"one": ("F8_E4M3", (0, 0), lambda r, c: (), "BF16", "_scale", {"quant_method": "fp8"}),
       "one_inside": ("F8_E5M2", (0, 0), lambda r, c: (1, 1), "F16", "_scale", {"quant_method": "fp8"}),
       "row": ("F8_E4M3", (1, 0), lambda r, c: (r, 1), "BF16", "_scale",
               {"quant_method": "compressed-tensors", "format": "float-quantized", "ignored_layers": ["lm_head"]}),
       "vector": ("F8_E4M3", (1, 0), lambda r, c: (r,), "F32", "_scale", {"quant_method": "compressed-tensors"}),
       "block": ("F8_E4M3", (7, 24), lambda r, c: (-(-r // 7), -(-c // 24)), "F32", "_scale_inv",
                 {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [7, 24]}),
       "wide": ("F8_E4M3", (128, 128), lambda r, c: (-(-r // 128), -(-c // 128)), "BF16", "_scale_inv",
                {"quant_method": "fp8", "weight_block_size": None})}


def quantised(arrays, form, r, more=lambda name: {}):
    """Return the tensors of a checkpoint in FP8, and their values."""
    kind, block, shape_of, scale_kind, end, _ = FP8[form]
    codes_of = [x for x in range(256) if x & 127 < (127 if kind == "F8_E4M3" else 124)]
    table = np.array([fp8_value(x, int(kind[4])) if x in codes_of else np.nan for x in range(256)])
    there, meant = {}, {}
    for name, x in arrays.items():
        if not name.endswith("_proj.weight") or x.ndim != 2:
            there[name] = meant[name] = x
            continue
        rows, cols = x.shape
        shape = shape_of(rows, cols)
        scales = make.bf16(r.uniform(0.001, 0.02, shape).astype(np.float32))
        data = {"F32": lambda: scales.astype("<f4"), "F16": lambda: scales.astype("<f2"),
                "BF16": lambda: (scales.view(np.uint32) >> 16).astype("<u2")}[scale_kind]().tobytes()
        scales = scales.astype(np.float16).astype(np.float32) if scale_kind == "F16" else scales
        codes = r.choice(codes_of, (rows, cols)).astype(np.uint8)
        high, wide = block[0] or rows, block[1] or cols
        grid = scales.reshape(-(-rows // high), -(-cols // wide))
        meant[name] = table[codes].astype(np.float32) * grid.repeat(high, 0)[:rows].repeat(wide, 1)[:, :cols]
        there |= {name: (kind, x.shape, codes.tobytes()), name + end: (scale_kind, shape, data), **more(name)}
    return there, meant


@gguf_test
def weights_in_fp8_are_multiplied_by_their_scales():
    r = np.random.default_rng(8)
    for form, (*_, settings) in FP8.items():
        for family in "hunyuan_v1_dense", "qwen3_moe":
            with tempfile.TemporaryDirectory() as at:
                os.makedirs(at + "/fp8/model"), os.makedirs(at + "/f32/model")
                config, arrays = make.make(at, family)
                there, meant = quantised(arrays, form, r, lambda name: {
                    name.replace("weight", "input_scale"): ("F32", (1,), struct.pack("<f", 2))})
                make.write_config(at + "/fp8/model", {**config, "quantization_config": settings}, make.GENERATION)
                make.write_safetensors(at + "/fp8/model/model.safetensors", there, True)
                make.write_config(at + "/f32/model", config, make.GENERATION)
                make.write_safetensors(at + "/f32/model/model.safetensors", meant, True)
                for kind, experts in ("f32", "f32"), ("-", "-"):
                    assert_same(at + "/fp8/model", kind, experts)
                    for name in "fp8", "f32":
                        assert convert_c(f"{at}/{name}/model", f"{at}/{name}.bin", kind, experts)[0] is None
                    assert bytes_of(at + "/fp8.bin") == bytes_of(at + "/f32.bin"), (form, family, kind)


@gguf_test
def damaged_fp8_is_rejected():
    r = np.random.default_rng(9)
    first = "model.layers.0.self_attn.q_proj.weight"
    cases = [
        ("row", lambda t, c: t.pop(first + "_scale"), f"tensor {first} is in FP8 and has no scale"),
        ("row", lambda t, c: t.update({first + "_scale": ("F32", (3, 1), bytes(12))}),
         "expected one scale, one per row"),
        ("row", lambda t, c: t.update({first + "_scale": ("I8", t[first][1][:1], bytes(t[first][1][0]))}),
         "number format I8"),
        ("block", lambda t, c: c["quantization_config"].update(weight_block_size=[7, 0]), "weight_block_size [7,0]"),
        ("block", lambda t, c: c["quantization_config"].update(weight_block_size=[7]), "weight_block_size [7]"),
        ("block", lambda t, c: c["quantization_config"].update(weight_block_size=[7, 24, 1]), "weight_block_size"),
        ("block", lambda t, c: c["quantization_config"].update(weight_block_size=[8, 24]), "one per 8 x 24 numbers"),
        ("one", lambda t, c: c["quantization_config"].update(quant_method="awq"), "quant_method awq is not supported"),
        ("one", lambda t, c: c["quantization_config"].update(format="pack-quantized"), "format pack-quantized is not"),
        ("one", lambda t, c: c.update(quantization_config="fp8"), "quant_method"),
        ("one", lambda t, c: t.update({first: (t[first][0], t[first][1], b"\x7f" + t[first][2][1:])}), "not finite"),
        ("row", lambda t, c: t.update({first + "_scale": (
            "F32", t[first][1][:1], struct.pack("<f", float("inf")) * t[first][1][0])}), "not finite"),
        ("one", lambda t, c: t.update({"model.norm.weight": ("F8_E4M3", t["model.norm.weight"].shape, bytes(
            t["model.norm.weight"].shape[0])), "model.norm.weight_scale": ("F32", (), bytes(4))}), "only matrices"),
    ]
    for form, damage, wanted in cases:
        with tempfile.TemporaryDirectory() as at:
            config, arrays = make.make(at, "hunyuan_v1_dense")
            there, _ = quantised(arrays, form, r)
            config = {**config, "quantization_config": dict(FP8[form][-1])}
            damage(there, config)
            make.write_config(at, config, make.GENERATION)
            make.write_safetensors(at + "/model.safetensors", there, True)
            for convert in convert_python, convert_c:
                problem, _ = convert(at, at + "/out")
                assert problem and plain(wanted) in plain(problem), (form, wanted, problem)
                assert not os.path.exists(at + "/out")


@gguf_test
def unsupported_tokenisers_of_characters_are_rejected():
    with open(make.TOKENISER, encoding="utf-8") as file:
        golden = json.load(file)["tokenizers"]
    strip = golden["llama2"]["decoder"]["decoders"][-1]
    for kind, change in (
            ("llama2", lambda x: x["decoder"]["decoders"].extend([strip] * 3)),
            ("llama2", lambda x: x["decoder"]["decoders"].reverse()), ("llama2", lambda x: x.update(decoder=strip)),
            ("llama2", lambda x: x["decoder"].update(decoders=[])),
            ("llama2", lambda x: x["normalizer"]["normalizers"][0].update(prepend="_")),
            ("llama2", lambda x: x["model"].update(ignore_merges=True)),
            ("llama2", lambda x: x["model"]["vocab"].pop("<0x41>")),
            ("mistral", lambda x: x["pre_tokenizer"].update(split=True)),
            ("mistral", lambda x: x["pre_tokenizer"].update(prepend_scheme="often")),
            ("gemma", lambda x: x["pre_tokenizer"].update(behavior="Isolated")),
            ("gemma", lambda x: x["normalizer"].update(type="NFC"))):
        with tempfile.TemporaryDirectory() as at:
            make.make(at, "mistral", vocab_size=448)
            values = json.loads(json.dumps(golden[kind]))
            change(values)
            write(at + "/tokenizer.json", json.dumps(values).encode())
            for convert in convert_c, convert_python:
                complaint, _ = convert(at, at + "/out")
                assert complaint and "tokenizer.json" in complaint and not os.path.exists(at + "/out"), complaint


@gguf_test
def shared_folders_have_the_same_bytes():
    if not os.path.isdir(SHARED):
        raise Skip("no ../shared/llm here")
    for name in "hy-v3", "hy-v3-fused", "hunyuan-dense", "qwen3-moe":
        for formats in ("-", "-"), ("f32", "-"):
            assert_same(os.path.join(SHARED, name), *formats)


@gguf_test
def gguf_files_have_the_same_bytes():
    rename = lambda tensors: {name.replace("exp_probs_b.bias", "exp_probs_b"): x for name, x in tensors.items()}
    sampling = {"temp": 0.75, "top_k": 20, "top_p": 0.5, "min_p": 0.25, "penalty_repeat": 1.5, "mirostat": 2}
    for family in make_gguf.ARCHITECTURES:
        sparse = family in make.SPARSE_FAMILIES
        sampled = {f"general__sampling__{x}": y for x, y in sampling.items()}
        for more in {}, {"change": rename}, {"fused": sparse}, sampled:
            with gguf_file(family, **more) as path:
                assert_same(path)
        with gguf_file(family, pieces=9) as path:
            parts = sorted(x for x in os.listdir(os.path.dirname(path)) if x.endswith(".gguf"))
            for name in parts[0], parts[-1]:
                problem, _ = convert_c(os.path.join(os.path.dirname(path), name), path + ".bin")
                assert problem is None, problem
                assert convert_python(os.path.join(os.path.dirname(path), name), path + ".py")[0] is None
                assert bytes_of(path + ".bin") == bytes_of(path + ".py"), name
        for more in {}, {"tokenizer__ggml__add_bos_token": True}, {"tokenizer__ggml__eot_token_id": 421}:
            with gguf_file(family, 448, {"bos_token_id": 420}, tokens=True, **more) as path:
                assert_same(path)


@gguf_test
def patterns_of_windows_have_the_same_bytes():
    key = "gemma3__attention__sliding_window_pattern"
    for pattern in 2, [0, 1, 1, 0], [True, False, True, True], [1, 1, 1, 1], [0, 0, 0, 0]:
        with gguf_file("gemma3_text", **{key: pattern}) as path:
            assert_same(path)
    for pattern in [0, 1, 1], [0, 1, 1, 0, 1], [0, 1, 2, 0], [-1, 0, 0, 0], [0.0, 1.0, 1.0, 0.0], ["a"] * 4, 0, "a":
        with gguf_file("gemma3_text", **{key: pattern}) as path:
            for complaint, _ in convert_c(path, path + ".c"), convert_python(path, path + ".python"):
                assert complaint and "sliding_window_pattern is" in complaint, (pattern, complaint)


# Number formats of GGUF, and where their blocks have float16 scales
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "F16": (0,), "BF16": (), "IQ4_NL": (0,), "IQ4_XS": (0,),
          "MXFP4": (), "IQ2_XS": (0,)}


def write_blocks(path, name, r):
    """Write a GGUF file with random blocks, including values that no quantiser would choose."""
    config = {**make.CONFIGS["llama"], **WIDE, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    arrays = make_gguf.arrays_of(config, make.arrays_of(config, 5))
    kind = gguf.GGMLQuantizationType[name]
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    w = gguf.GGUFWriter(path, "llama")
    for key, value in make_gguf.keys_of(config).items():
        (w.add_float32 if isinstance(value, float) else w.add_uint32)("llama." + key, value)
    w.add_uint32("tokenizer.ggml.eos_token_id", 2)
    for tensor, x in arrays.items():
        if x.ndim < 2:
            w.add_tensor(tensor, np.ascontiguousarray(x, np.float32))
            continue
        blocks = r.integers(0, 256, (x.size // numbers, size), np.uint8)
        for place in SCALES[name]:
            scales = r.uniform(-1, 1, len(blocks)).astype("<f2")
            blocks[:, place:place + 2] = scales.view(np.uint8).reshape(-1, 2)
        if name == "BF16":
            blocks[:, 1] &= 0xbf
        if name == "MXFP4":
            blocks[:, 0] = r.integers(0, 140, len(blocks))
        w.add_tensor(tensor, blocks.reshape(x.shape[0], -1), raw_dtype=kind)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()


@gguf_test
def blocks_of_all_formats_have_the_same_bytes():
    r = np.random.default_rng(5)
    with tempfile.TemporaryDirectory() as at:
        for name in SCALES:
            write_blocks(at + "/x.gguf", name, r)
            if name != "IQ2_XS":
                assert_same(at + "/x.gguf", "f32")
                assert_same(at + "/x.gguf", "q4m")


@gguf_test
def formats_without_a_reader_in_c_name_the_command():
    with tempfile.TemporaryDirectory() as at:
        write_blocks(at + "/x.gguf", "IQ2_XS", np.random.default_rng(5))
        done = subprocess.run([TRANSLATE, "-m", at + "/x.gguf", "--no-cache", "Hello."], capture_output=True, text=True)
        assert done.returncode == 3 and "number format IQ2_XS of tensor " in done.stderr, done
        assert f"convert.py --from gguf {at}/x.gguf -o model.bin" in done.stderr, done
        assert convert_python(at + "/x.gguf", at + "/out")[0] is None and os.path.getsize(at + "/out") > 0


SMOLLM2 = (  # the template of SmolLM2-Instruct
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}")


@gguf_test
def languages_that_the_authors_name_have_the_same_bytes():
    for named in ["en", "pt-BR", "zho_Hant"], "de", ["multilingual"], None, [1, 2]:
        more = {"tokenizer__chat_template": SMOLLM2, "general__languages": named}
        with gguf_file("llama", 448, tokens=True, **more) as path:
            assert_same(path)
    cards = ("---\nlanguage:\n- en  # English\n- de\n - 'pt'\nlicense: mit\n---\n",
             "---\r\nlanguage: [en, fr]\r\n---\r\n", "---\nlicense: mit\n---\nlanguage: en\n", "language: en\n",
             "---\nlanguage: multilingual\n---\n", "---\nlanguage: en", "---\n---\nlanguage: en\n---\n",
             "---\nbase: x\nlanguage:\n  - en\n  -de\nmore:\n  - fr\n---")
    for card in cards:
        with tempfile.TemporaryDirectory() as at:
            make.make(at, "llama", vocab_size=448)
            make.write_tokeniser(at, "smollm")
            write(at + "/chat_template.jinja", SMOLLM2.encode())
            write(at + "/README.md", card.encode())
            assert_same(at)


@gguf_test
def known_templates_have_the_pieces_that_python_renders():
    if not os.path.isdir(SHARED):
        raise Skip("no ../shared/llm here")
    known = {(row["sha256"], *row["families"]): row for row in prompts.data()["templates"]}
    row = prompts.known_row(CHATML, "ChatML, as in many folders")
    assert known[row["sha256"],] == row, row
    row = prompts.known_row(SMOLLM2, "SmolLM2-Instruct")
    assert known[row["sha256"],] == row, row
    for name, families in ("hy-v3", ["hy_v3"]), ("hunyuan-dense", []), (
            "qwen3-moe", ["qwen3_moe", "qwen3", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"]):
        with open(os.path.join(SHARED, name, "chat_template.jinja"), encoding="utf-8", newline="") as file:
            row = prompts.known_row(file.read(), f"../shared/llm/{name}", families)
        assert known[row["sha256"], *families] == row, row
    with open(os.path.join(SHARED, "qwen3-moe", "chat_template.jinja"), encoding="utf-8", newline="") as file:
        template = file.read()
    lmt = next(row for row in prompts.data()["rows"] if row["name"] == "lmt")
    row = prompts.known_row(template, "../shared/llm/qwen3-moe, without settings", ["qwen3"], lmt)
    assert known[row["sha256"], "qwen3"] == row, row
    with tempfile.TemporaryDirectory() as at:
        for name in "LMT-60-0.6B", "Qwen3-0.6B":
            os.mkdir(f"{at}/{name}")
            make.make(f"{at}/{name}", "qwen3", vocab_size=448)
            make.write_tokeniser(f"{at}/{name}", "C")
            write(f"{at}/{name}/chat_template.jinja", template.encode())
            assert_same(f"{at}/{name}")


CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
          "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


@gguf_test
def models_of_authors_without_templates_have_the_same_bytes():
    for name, family, kind, token in (
            ("Seed-X-PPO-7B", "mistral", "mistral", "<s>"), ("MiLMMT-46-1B", "llama", "llama2", "<s>"),
            ("TowerInstruct-7B", "llama", "llama2", "<s>"), ("Marco-Nano-Instruct", "qwen3_moe", "C", None)):
        with tempfile.TemporaryDirectory() as at:
            os.mkdir(f"{at}/{name}")
            make.make(f"{at}/{name}", family, vocab_size=448)
            make.write_tokeniser(f"{at}/{name}", kind)
            about = {"chat_template": CHATML, "tokenizer_class": "LlamaTokenizer" if token else "Qwen2Tokenizer"}
            write(f"{at}/{name}/tokenizer_config.json", json.dumps({**about, "bos_token": token}).encode())
            assert_same(f"{at}/{name}")
            assert convert_c(f"{at}/{name}", at + "/out")[0] is None
            found = moefile.read_meta(at + "/out")
            bare = name.startswith(("Seed", "MiLMMT"))
            assert found.get("source.bos", 0) == bare and (found["prompt.prefix"] == "") == bare, (name, found)
    for name in "Seed-X-PPO-7B", "translategemma-4b-it":
        for more in {}, {"tokenizer__chat_template": "{{ unknown }}"}:
            with gguf_file("llama", 448, {"bos_token_id": 420}, tokens=True, general__name=name,
                           tokenizer__ggml__add_bos_token=True, **more) as path:
                assert_same(path)


@gguf_test
def tables_of_both_converters_are_complete():
    rows = tables.read("decoder.inc")
    names = {row[0] for row in rows["FAMILY"]}
    assert all(set(row[0].split()) <= names for row in rows["ONLY"])
    assert all(x in dict(rows["EXPRESSION"]) for row in rows["PRE"] for x in row[1].split())


# ---- Errors ----------------------------------------------------------------------------------------------------------

@gguf_test
def models_without_a_tokeniser_are_rejected():
    with tempfile.TemporaryDirectory() as at, gguf_file("qwen3") as gguf_path:
        os.mkdir(at + "/m")
        make.make(at + "/m", "qwen3")
        for path in at + "/m", gguf_path:
            for complaint, _ in convert_c(path, at + "/c", ids_only=False), convert_here(path, "-o", at + "/c"):
                assert "missing" in complaint and "--ids-only" in complaint and not os.path.exists(at + "/c"), complaint
        program = [sys.executable, os.path.join(ROOT, "tools", "convert", "convert.py")]
        done = subprocess.run([*program, at + "/m", "-o", at + "/c"], capture_output=True, encoding="utf-8")
        assert done.returncode == 1 and "tokenizer.json is missing" in done.stderr, done
        config = {**make.CONFIGS["qwen3"], "model_type": "gpt_oss"}
        write(at + "/m/config.json", json.dumps(config).encode())
        for complaint, _ in convert_c(at + "/m", at + "/c"), convert_here(at + "/m", "-o", at + "/c"):
            known = [x.removesuffix("_text") for x in make.FAMILIES]
            assert "gpt_oss" in complaint and all(x in complaint for x in known), complaint
        os.unlink(gguf_path)
    with gguf_file("llama", change=lambda x: x) as path:
        data = bytes_of(path).replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0gptox", 1)
        write(path, data)
        for complaint, _ in convert_c(path, path + ".bin"), convert_here(path, "-o", path + ".bin"):
            assert "gptox" in complaint and "hunyuan-moe" in complaint and "qwen3moe" in complaint, complaint


@gguf_test
def damaged_gguf_files_name_the_file_and_the_problem():
    with gguf_file("llama", 448, tokens=True) as path:
        whole = bytes_of(path)
        cases = [(whole[:-9], "truncated"), (b"GGUF", "truncated"), (whole[:4] + b"\1" + whole[5:], "version 1"),
                 (whole[:4] + b"\0\0\0\3" + whole[8:], "big-endian"), (whole[:8] + b"\xff" * 8 + whole[16:], "tensors"),
                 (whole.replace(b"llama.block_count", b"llama.block_xount"), "block_count is missing"),
                 (whole.replace(b"general.architecture\x08\0\0\0\5\0\0\0\0\0\0\0llama",
                                b"general.architecture\x08\0\0\0\5\0\0\0\0\0\0\0lxxma"), "'lxxma' hunyuan-moe"),
                 (whole.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"), "q_proj missing"),
                 (whole.replace(b"blk.0.attn_q.weight", b"blk.1.attn_q.weight"), "blk.1.attn_q.weight twice"),
                 (whole.replace(b"tokenizer.ggml.pre\x08\0\0\0\6", b"tokenizer.ggml.pre\x08\0\0\0\5"), ""),
                 (whole.replace(b"\6\0\0\0\0\0\0\0smollm", b"\6\0\0\0\0\0\0\0tekken"), "tokenizer.ggml.pre 'tekken'"),
                 (whole.replace(b"\4\0\0\0\0\0\0\0gpt2", b"\4\0\0\0\0\0\0\0bert"), "tokenizer.ggml.model 'bert'")]
        norm = whole.index(b"blk.0.attn_norm.weight") + 22  # dimensions, sizes, number format, offset
        tokens = whole.index(b"tokenizer.ggml.tokens") + 21  # array, type, count
        for at, data, words in ((16, b"\xff" * 8, "keys above the limits"), (24, b"\xff" * 8, "key 1 is too long"),
                                (norm, b"\x09", "attn_norm.weight 9 dimensions"),
                                (norm + 4, bytes(8), "attn_norm invalid shape"),
                                (norm + 4, b"\x21", "ffn_norm invalid offset"), (norm + 12, b"\x63", "format 99"),
                                (norm + 16, b"\xff" * 8, "attn_norm invalid offset"),
                                (tokens + 4, b"\x63", "tokenizer.ggml.tokens type 99"),
                                (tokens + 12, b"\1", "tokenizer.ggml.tokens array damaged"),
                                (len(whole) - 4, b"\0\0\xc0\x7f", "ffn_down.weight not finite")):
            cases.append((whole[:at] + data + whole[at + len(data):], words))
        for old, new, words in ((b"llama.block_count\4", b"llama.block_count\x63", "block_count type 99"),
                                (b"llama.attention.value_length", b"llama.attention.key_length\0\0", "duplicate"),
                                (b"head_count\4\0\0\0\6", b"head_count\4\0\0\0\7", "head_count contradict attn_q"),
                                (b"context_length\4\0\0\0\x80", b"context_length\4\0\0\0\0", "context_length is 0")):
            assert old in whole
            cases.append((whole.replace(old, new), words))
        cases += [(whole[:n], "truncated") for n in range(9, len(whole), len(whole) // 40)]
        for data, words in cases:
            write(path, data)
            problem, _ = convert_c(path, path + ".bin")
            assert problem and "x.gguf" in problem and all(word in problem for word in words.split()), (words, problem)
            assert not os.path.exists(path + ".bin")
    with gguf_file("llama", pieces=9) as path:
        folder = os.path.dirname(path)
        parts = sorted(x for x in os.listdir(folder) if x.endswith(".gguf"))
        os.unlink(f"{folder}/{parts[1]}")
        problem, _ = convert_c(f"{folder}/{parts[0]}", path + ".bin")
        assert parts[1] in problem and "missing" in problem, problem
    for more, words in (({"tokenizer__chat_template": "{{ messages[0].content }}"}, "unknown chat template"),
                        ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.type 'yarn'"),
                        ({"llama__attention__causal": False}, "attention.causal False"),
                        ({"tokenizer__ggml__add_eos_token": True}, "add_eos_token True"),
                        ({"tokenizer__ggml__eos_token_id": None}, "eos_token_id")):
        with gguf_file("llama", 448, tokens=True, **more) as path:
            problem, _ = convert_c(path, path + ".bin")
            assert problem and "x.gguf" in problem and all(word in problem for word in words.split()), (words, problem)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
