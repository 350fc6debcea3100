"""Write inputs of fuzz_checkpoint.c: small models of each family, as folders and as GGUF files."""
import os
import struct
import tempfile
import zipfile

import make_ct2
import make_decoder as make
import make_gguf
import numpy as np
from marian_damage import packed_folder

NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "chat_template.jinja", "model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
         "model-00002-of-00002.safetensors", "x.gguf", "x-00001-of-00002.gguf", "x-00002-of-00002.gguf",
         "tokenizer.model", "added_tokens.json", "hy.tiktoken", "model.bin", "shared_vocabulary.json",
         "source_vocabulary.txt", "target_vocabulary.txt", "sentencepiece.model", "package.argosmodel")
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
         "intermediate_size": 8, "moe_intermediate_size": 4, "num_experts": 3, "num_experts_per_tok": 2,
         "max_position_embeddings": 16}


def write(made, name, at):
    data = packed_folder(at, NAMES)
    with open(f"{made}/{name}", "wb") as file:
        file.write(data)


def small(at, family, **changes):
    changes = {**SMALL, **changes}
    if family == "mixtral":
        changes = {**changes, "num_local_experts": changes["num_experts"], "num_experts": None}
    elif family == "hunyuan_v1_moe":
        changes = {**changes, "moe_intermediate_size": [4, 4], "moe_topk": [2, 2], "num_shared_expert": 1}
    elif family not in make.SPARSE_FAMILIES:
        changes = {key: x for key, x in changes.items() if "expert" not in key}
    if family in make.DELTA_FAMILIES:
        changes["layer_types"] = [make.LINEAR, make.FULL]
    return make.make(at, family, **changes)


def small_pieces():
    """Return a SentencePiece model of type BPE with tokens for bytes."""
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256)), ("\u2581", 1),
              ("a", 1), ("b", 1), ("ab", 1), ("\u2581ab", 1), ("<x>", 4)]
    out = b""
    for i, (text, kind) in enumerate(pieces):
        piece = bytes([0x0a, len(text.encode())]) + text.encode() + b"\x15" + struct.pack("<f", -i) + bytes([0x18, kind])
        out += bytes([0x0a, len(piece)]) + piece
    return out + b"\x12\x02\x18\x02" + b"\x1a\x02\x20\x00"


def write_fp8(made):
    """Write folders with weights in FP8, with a scale per row and per block."""
    for name, ends, settings in (("row", "_scale", {"quant_method": "compressed-tensors", "format": "float-quantized"}),
                                 ("block", "_scale_inv", {"quant_method": "fp8", "weight_block_size": [4, 3]})):
        with tempfile.TemporaryDirectory() as at:
            config, arrays = small(at, "qwen3_moe")
            for key, x in list(arrays.items()):
                if key.endswith("_proj.weight"):
                    rows, cols = x.shape
                    shape = (rows, 1) if name == "row" else (-(-rows // 4), -(-cols // 3))
                    arrays[key] = "F8_E4M3", x.shape, bytes(i % 126 for i in range(x.size))
                    arrays[key + ends] = "F32", shape, struct.pack("<f", 0.01) * (shape[0] * shape[1])
            make.write_config(at, {**config, "quantization_config": settings}, make.GENERATION)
            make.write_safetensors(at + "/model.safetensors", arrays)
            write(made, "fp8-" + name, at)


def write_ct2(made):
    """Write models of CTranslate2, and a package of Argos Translate."""
    for kind in make_ct2.KINDS:
        for number_format in "", "int8":
            with tempfile.TemporaryDirectory() as at:
                arrays, about = make_ct2.make(kind)
                arrays = make_ct2.quantised(arrays, number_format) if number_format else arrays
                separate = kind == "opennmt"
                make_ct2.write(at, arrays, about, vocabulary="txt" if separate else "json", separate=separate)
                write(made, f"ct2-{kind}{number_format}", at)
    with tempfile.TemporaryDirectory() as at:
        arrays, about = make_ct2.make("argos")
        make_ct2.write(at + "/in", make_ct2.quantised(arrays, "int8"), about)
        with zipfile.ZipFile(at + "/package.argosmodel", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/metadata.json", '{"from_code": "en", "to_code": "de"}')
            archive.write(at + "/in/sentencepiece.model", "a/sentencepiece.model")
            for name in "model.bin", "config.json", "shared_vocabulary.json":
                archive.write(f"{at}/in/{name}", "a/model/" + name)
        write(made, "argos", at)


def write_seeds(made):
    write_fp8(made)
    write_ct2(made)
    with tempfile.TemporaryDirectory() as at:
        small(at, "llama", vocab_size=300)
        with open(at + "/tokenizer.model", "wb") as file:
            file.write(small_pieces())
        with open(at + "/added_tokens.json", "w", encoding="utf-8") as file:
            file.write('{"<new>": 280}')
        write(made, "llama-pieces", at)
    with tempfile.TemporaryDirectory() as at:
        small(at, "hunyuan_v1_dense", vocab_size=700)
        make.write_ranks(at)
        write(made, "hunyuan-ranks", at)
    for family, kind in make_gguf.TOKENISERS.items():
        for number, options in enumerate(({}, {"second": True}, {"shards": 2}, {"vocab_size": 448})):
            with tempfile.TemporaryDirectory() as at:
                small(at, family, **options)
                if "vocab_size" in options:
                    make.write_tokeniser(at, kind)
                    with open(at + "/tokenizer_config.json", "w", encoding="utf-8") as file:
                        file.write('{"bos_token": "<think>", "add_eos_token": false}')
                write(made, f"{family}-{number}", at)
        for number, options in enumerate(({}, {"pieces": 14}, {"tokens": True}, {"fused": True})):
            with tempfile.TemporaryDirectory() as at:
                config, arrays = small(at, family, vocab_size=448 if number == 2 else 96)
                for name in os.listdir(at):
                    os.unlink(f"{at}/{name}")
                tensors = {name: x.astype(np.float32) for name, x in arrays.items()}
                make_gguf.write(at + "/x.gguf", config, tensors, **options)
                write(made, f"{family}-gguf-{number}", at)
