"""Write inputs of fuzz_checkpoint.c: small models of each family, as folders and as GGUF files; models of CTranslate2.

    seeds()          yield (name, write); write(folder) writes the files, which test_damaged.py converts
    write_seeds(at)  write them as inputs of the fuzzer
"""
import os
import tempfile
import zipfile

import gguf
import make_ct2
import make_decoder as make
import make_gguf
import numpy as np
from containers import Gguf
from marian_damage import packed_folder

NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "chat_template.jinja", "model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
         "model-00002-of-00002.safetensors", "x.gguf", "x-00001-of-00002.gguf", "x-00002-of-00002.gguf",
         "tokenizer.model", "added_tokens.json", "hy.tiktoken", "model.bin", "shared_vocabulary.json",
         "source_vocabulary.txt", "target_vocabulary.txt", "sentencepiece.model", "README.md", "package.argosmodel")
CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
          "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
CARD = "---\nlanguage:\n- en\n- de\n---\n"


def put(at, **files):
    """Write texts; the names of files have __ for dots."""
    for name, text in files.items():
        with open(f"{at}/{name.replace('__', '.')}", "w" if isinstance(text, str) else "wb") as file:
            file.write(text)


def folder(family, tokeniser=None, files=(), **options):
    def write(at):
        make.small(at, family, **options)
        if tokeniser:
            make.write_tokeniser(at, tokeniser)
        put(at, **dict(files))
    return write


def gguf_file(family, kinds=None, changes=(), parts=False, **options):
    """kinds: the number format of all matrices."""
    def write(at):
        size = 448 if options.get("tokens") else 96
        if family.startswith("hunyuan"):
            more = {"rope_theta": 1e4, "rope_scaling": None}
        else:
            more = {"query_pre_attn_scalar": make.SMALL["head_dim"]} if family == "gemma3_text" else {}
        with tempfile.TemporaryDirectory() as other:
            config, arrays = make.small(other, family, **{"vocab_size": size, **more, **dict(changes)})
        tensors = {name: x.astype(np.float32) for name, x in arrays.items()}
        there = make_gguf.arrays_of(config, tensors)
        names = [name for name, x in there.items() if x.ndim == 2] if kinds else ()
        make_gguf.write(at + "/x.gguf", config, tensors, dict.fromkeys(names, kinds), **options,
                        pieces=(len(there) + 1) // 2 if parts else 0)
    return write


# Number formats that the package gguf does not write, and where their blocks have float16 scales
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
          "IQ4_XS": (0,), "MXFP4": ()}


def blocks(kind):
    """Write random blocks of a number format."""
    def write(at):
        size = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 1, "head_dim": 256,
                "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 8}
        gguf_file("llama", None, size)(at)
        with open(at + "/x.gguf", "rb") as stored:
            file = Gguf(stored.read())
        number = gguf.GGMLQuantizationType[kind]
        numbers, length = gguf.GGML_QUANT_SIZES[number]
        for t in file.tensors:
            if len(t.shape) < 2:
                continue
            data = np.random.default_rng(1).integers(0, 128, (int(np.prod(t.shape)) // numbers, length), np.uint8)
            for place in SCALES[kind]:
                data[:, place:place + 2] = 0, 0x28  # 0.03
            t.kind, t.data = int(number), data.tobytes()
        put(at, x__gguf=file.build())
    return write


def ct2(kind, numbers):
    def write(at):
        arrays, about = make_ct2.make(kind)
        separate = kind == "opennmt"
        make_ct2.write(at, make_ct2.quantised(arrays, numbers) if numbers else arrays, about,
                       vocabulary="txt" if separate else "json", separate=separate)
    return write


def argos(at):
    arrays, about = make_ct2.make("argos")
    with tempfile.TemporaryDirectory() as inside, \
            zipfile.ZipFile(at + "/package.argosmodel", "w", zipfile.ZIP_DEFLATED) as archive:
        make_ct2.write(inside, make_ct2.quantised(arrays, "int8"), about)
        archive.writestr("a/metadata.json", '{"from_code": "en", "to_code": "de"}')
        archive.write(inside + "/sentencepiece.model", "a/sentencepiece.model")
        for name in "model.bin", "config.json", "shared_vocabulary.json":
            archive.write(f"{inside}/{name}", "a/model/" + name)


def ranks(at):
    make.small(at, "hunyuan_v1_dense", vocab_size=700)
    make.write_ranks(at)


def seeds():
    for name in make.FP8:
        yield "fp8-" + name, lambda at, name=name: make.write_fp8(at, "qwen3_moe", name)
    for kind in make_ct2.KINDS:
        for numbers in "", "int8":
            yield f"ct2-{kind}{numbers}", ct2(kind, numbers)
    yield "argos", argos
    yield "llama-pieces", folder("llama", vocab_size=300, files={
        "tokenizer__model": make.small_pieces(), "added_tokens__json": '{"<new>": 280}'})
    yield "hunyuan-ranks", ranks
    yield "llama-prompt", folder("llama", "smollm", vocab_size=448, files={
        "chat_template__jinja": CHATML, "README__md": CARD, "special_tokens_map__json": '{"eos_token": "<|im_end|>"}'})
    about = '{"bos_token": "<think>", "add_eos_token": false}'
    for family, kind in make_gguf.TOKENISERS.items():
        yield family, folder(family)
        yield family + "-second", folder(family, second=True)
        yield family + "-shards", folder(family, shards=2)
        yield family + "-tokens", folder(family, kind, vocab_size=448, files={"tokenizer_config__json": about})
        if family in make_gguf.ARCHITECTURES:
            yield f"gguf-{family}", gguf_file(family)
            yield f"gguf-{family}-parts", gguf_file(family, parts=True)
            yield f"gguf-{family}-tokens", gguf_file(family, tokens=True)
            yield f"gguf-{family}-fused", gguf_file(family, fused=True)
    wide = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16,
            "num_hidden_layers": 1}
    for kind in SCALES:
        yield "gguf-" + kind, blocks(kind)
    for numbers in "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16":
        yield "gguf-" + numbers, gguf_file("llama", numbers, wide)


def write_seeds(made):
    for name, write in seeds():
        with tempfile.TemporaryDirectory() as at:
            write(at)
            with open(f"{made}/{name}", "wb") as file:
                file.write(packed_folder(at, NAMES))
