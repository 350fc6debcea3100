"""Guess the layout of a checkpoint for convert.py --from, or explain what a path is instead.

    layout, path = guess(path)     `path` as the reader of the layout expects it
"""
import os
import re
import struct
import zipfile

import decoder
import fairseq
import gguf_file
import hf
import moefile
import torchfile
from moefile import FormatError, open_regular

HF = tuple(dict.fromkeys(x.replace("nllb_moe", "nllb-moe") for x in (*hf.FAMILIES, *decoder.FAMILIES)))
# --from and a description for --help; `convert.py` has a reader for each.
LAYOUTS = {
    "moe": "a checkpoint of this project's trainer",
    "nvidia-gnmt": "NVIDIA's PyTorch GNMT",
    "tf-gnmt": "tensorflow/nmt or MLPerf: CHECKPOINT is the prefix, e.g. translate.ckpt-340000",
    "hf": f"Hugging Face: a folder with config.json of model_type {', '.join(HF[:-1])} or {HF[-1]}",
    "fairseq": "the PREFIX of PREFIX-shared.pt and PREFIX-rank-0.pt, ... of NLLB-MoE, or the file of a dense NLLB or "
               "M2M-100",
    "marian": "Marian: the folder of a Firefox, Bergamot or OPUS-MT model, or its .bin or .npz",
    "gguf": f"llama.cpp: a GGUF file, or any part of a split one, of architecture {', '.join(gguf_file.FAMILIES)}"}
MARIAN = r".*\.npz(\.gz|\.zst)?|.*\.intgemm.*\.bin(\.gz|\.zst)?|.*vocab.*\.(spm|yml)|decoder\.yml|lex\..*"
# File names that identify the layout of a folder; the first match counts.
FOLDERS = ((r"config\.json", "hf"), (r".*\.gguf", "gguf"), (MARIAN, "marian"))
WEIGHTS = r"(model.*\.safetensors|pytorch_model.*\.bin)(\.index\.json)?"
# File names that are only part of a checkpoint, with descriptions.
PARTS = ((WEIGHTS, "a weights file of a model in Hugging Face's layout"),
         (r".*config.*\.json|tokenizer.*\.json|special_tokens_map\.json|.*\.jinja|hy\.tiktoken|vocab\.json|merges\.txt",
          "a configuration or tokeniser file of a model in Hugging Face's layout"),
         (r".*\.ya?ml|.*\.spm|lex\..*", "a configuration, vocabulary or shortlist file of a Marian model"))


def whole(path):
    """Return the folder of a path, for messages."""
    return os.path.dirname(path) or "."


def gguf_in(folder):
    """Return the only GGUF model of a folder, which may be split."""
    names = sorted(x for x in os.listdir(folder) if x.endswith(".gguf") and "mmproj" not in x)  # encoders of pictures
    models = list(dict.fromkeys(re.sub(r"-[0-9]{5}-of-", "-00001-of-", x) for x in names))
    if len(models) > 1:
        raise FormatError(f"{folder} contains several GGUF files: name one of {', '.join(models[:8])}")
    if not models:
        raise FormatError(f"{folder} contains no GGUF file of a model")
    return os.path.join(folder, models[0])


def of_folder(path):
    names = os.listdir(path)
    for pattern, layout in FOLDERS:
        if any(re.fullmatch(pattern, name) for name in names):
            return layout, gguf_in(path) if layout == "gguf" else path
    if not names:
        raise FormatError(f"{path}: the folder is empty")
    if any(re.fullmatch(WEIGHTS + r"|tokenizer.*|.*config\.json", name) for name in names):
        raise FormatError(f"{path}: config.json is missing: copy the model's whole folder")
    raise FormatError(f"{path}: no checkpoint in this folder: expected config.json, a GGUF file or a Marian model; "
                      "name the file of any other checkpoint")


def of_torch(path):
    """Return the layout of a file written by torch.save; the reader of "moe" reports damage."""
    try:
        found = torchfile.load(path, fairseq.CLASSES)
    except FormatError:
        return "moe"
    has = lambda key, kind=object: isinstance(found, dict) and isinstance(found.get(key), kind)
    if has("format", str):
        return "moe"
    if has("state_dict", dict):
        return "nvidia-gnmt"
    if has("model", dict) and (has("cfg") and found["cfg"] or has("args") and found["args"]):
        return "fairseq"
    raise FormatError(f"{path}: a PyTorch file of an unknown program: name the folder if it has config.json")


def of_file(path):
    name = os.path.basename(path)
    with open_regular(path) as file:
        head = file.read(16)
    for pattern, what in PARTS:
        if re.fullmatch(pattern, name):
            raise FormatError(f"{path} is {what}: name its folder, {whole(path)}")
    if head.startswith(moefile.MAGIC):
        raise FormatError(f"{path} is already a model file and needs no conversion")
    if head.startswith(gguf_file.MAGIC):
        return "gguf"
    if name.endswith(".index"):
        return "tf-gnmt"
    if re.fullmatch(r".*\.npz(\.gz|\.zst)?|.*\.bin(\.gz|\.zst)", name) or head[:8] == struct.pack("<Q", 1):
        return "marian"
    if head.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise FormatError(f"{path}: truncated or damaged zip file")
    if head[:1] == b"\x80" or head.startswith(b"PK"):
        return of_torch(path)
    raise FormatError(f"{path}: not a checkpoint of any supported format" + (
        "; GGUF files start with GGUF: truncated or damaged" if name.endswith(".gguf") else ""))


def is_ct2(path):
    """Return True for a model of CTranslate2, or a package of Argos Translate that contains one."""
    names = (f"{path}/{side}_vocabulary.{end}" for side in ("shared", "source") for end in ("json", "txt"))
    if any(map(os.path.lexists, names)):
        return True
    for model in (path, f"{path}/model.bin", f"{path}/model/model.bin"):
        if os.path.isfile(model):
            with open_regular(model) as file:
                head = file.read(16)
            if re.fullmatch(rb"[\2-\x1f]\0\0\0[\5-\x3f]\0[A-Z][A-Za-z0-9]{3}.*", head, re.DOTALL):
                return True
    return path.endswith(".argosmodel")


def guess(path):
    """Return the layout of a checkpoint and its path."""
    if os.path.exists(path) and is_ct2(path):
        raise FormatError(f"{path}: a model of CTranslate2, which the programs convert: moe-translate -m {path}")
    if os.path.isdir(path):
        return of_folder(path)
    if os.path.exists(path):
        return of_file(path), path
    if os.path.exists(path + ".index"):
        return "tf-gnmt", path
    if os.path.exists(path + "-shared.pt"):
        return "fairseq", path
    raise FormatError("no such file or folder")
