#!/usr/bin/env python3
"""Write the table of model families in tools/MODELS.md, from the tests that prove its cells.

Usage: tests/families.py [--check]

A cell of ROWS is a text and the test that proves it, as `TEXT; SUITE:TEST`; None: does not apply. --check, which `make
check` runs, fails if a test is missing, if a type of tools/convert/decoder.inc has no row, or if the table in
MODELS.md is out of date.
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = "tools/MODELS.md"
HEAD = "| family | models | checkpoints | random weights | published weights | tokeniser | prompt |"

DECODER = "NumPy, transformers; test_decoder:scores_match_the_reference"
SEARCHED = "NumPy, transformers; test_transformers:searches_match_the_reference"
HF_TOKENS = "transformers; test_hf_tokens:the_rules_split_like_transformers"
BYTE_BPE = "tokenizers; test_byte_bpe:ids_and_texts_match_the_published_package"
SPM_BPE = "sentencepiece; test_model_file:texts_are_split_as_by_sentencepiece"
TEMPLATES = "transformers; test_prompts:shared_templates_match_transformers"
RENDERED = "the folder's template; test_prompts:templates_see_what_transformers_passes"
EXAMPLES = "authors' examples; test_prompts:turns_match_the_examples_of_the_authors"
FOLDER, GGUF = "folder", "folder, GGUF"
ROWS = (  # types in config.json, or None; models; checkpoints; the four proofs
    ("GNMT, GNMT-MoE", None, "the shipped model, MLPerf", "NVIDIA, tensorflow/nmt, [our trainer](train/README.md)",
     "NumPy; test_gnmt:tensorflow_checkpoints_match_numpy", "ours; test_golden:", "", None),
    ("Marian's students", None, "Firefox, Bergamot", "`.bin` (†)",
     "NumPy; test_marian:scores_and_searches_of_every_kind_match_the_reference",
     "en-pt, pt-en; test_marian_real:tokens_in_f32_match_the_reference",
     "sentencepiece; test_marian_real:tokens_in_f32_match_the_reference", None),
    ("Marian", None, "OPUS-MT", "folder, `.npz`", SEARCHED, "", HF_TOKENS, None),
    ("OpenNMT", None, "Argos Translate, LibreTranslate", "CTranslate2, `.argosmodel` (†)",
     "NumPy, CTranslate2; test_ct2_peer:opennmts_relative_positions_are_equal",
     "transliteration; test_ct2_peer:transliterations_of_ctranslate2s_own_models_are_equal", None, None),
    ("T5", None, "T5, mT5, UMT5, MADLAD-400, Switch", "folder, CTranslate2 (†)",
     "NumPy, transformers; test_ct2_peer:t5_and_switch_match_transformers", "", None, None),
    ("M2M-100", None, "M2M-100, SMaLL-100, WMT21, NLLB-200 600M to 3.3B", "folder, fairseq", SEARCHED, "", HF_TOKENS,
     None),
    ("NLLB-MoE", None, "NLLB-MoE-54B", "folder, fairseq", SEARCHED, "", HF_TOKENS, None),
    ("Hunyuan", "hunyuan_v1_dense hunyuan_v1_moe hy_v3", "Hy-MT2, HY-MT1.5, Hunyuan-MT", GGUF, DECODER, "", BYTE_BPE,
     TEMPLATES),
    ("Qwen2", "qwen2", "Qwen2, Qwen2.5", GGUF, DECODER, "", BYTE_BPE, RENDERED),
    ("Qwen3", "qwen3", "Qwen3, LMT-60", GGUF, DECODER, "", BYTE_BPE, EXAMPLES),
    ("Qwen3-MoE", "qwen3_moe", "Qwen3-30B-A3B, Marco-MoE", GGUF, DECODER, "", BYTE_BPE, TEMPLATES),
    ("Llama", "llama", "Llama 2 and 3, TowerInstruct, EuroLLM, SalamandraTA", GGUF, DECODER,
     "SmolLM2-135M; test_smollm2:perplexity_in_f32_matches_the_reference", SPM_BPE, EXAMPLES),
    ("Mistral", "mistral", "Mistral, Seed-X", GGUF, DECODER, "", SPM_BPE, EXAMPLES),
    ("Mixtral", "mixtral", "Mixtral", GGUF, DECODER, "", SPM_BPE, RENDERED),
    ("Gemma 3", "gemma3_text gemma3", "Gemma 3 270M to 27B, MiLMMT-46, TranslateGemma", GGUF, DECODER,
     "Gemma 3 270M; test_gemma:scores_match_the_reference", "llama.cpp; test_gemma:texts_are_split_as_by_llama_cpp",
     EXAMPLES),
    ("Qwen3.5", "qwen3_5_text qwen3_5 qwen3_5_moe_text qwen3_5_moe", "Qwen3.5, Qwen3.6, dense and mixtures", GGUF,
     "NumPy; test_decoder:scores_match_the_reference", "", BYTE_BPE, RENDERED),
    ("Cohere", "cohere cohere2", "Aya Expanse, Aya 23, Command R, Command R7B", GGUF, DECODER, "",
     "tokenizers; test_cohere:texts_are_split_as_by_the_package",
     "the chat template; test_cohere:the_prompt_is_that_of_the_chat_template"),
    ("Lara", "lara_mini", "Lara-mini", FOLDER, "NumPy; test_decoder:scores_match_the_reference", "", BYTE_BPE, ""),
)


def suite(name):
    for folder, _, names in os.walk(os.path.join(ROOT, "tests")):
        for ending in ".py", ".c":
            if name + ending in names:
                return os.path.relpath(os.path.join(folder, name + ending), ROOT)
    raise SystemExit(f"tests/families.py: no suite {name}")


def cell(proof):
    """Return a cell of the table; check that its test exists."""
    if not proof:
        return "–"
    text, at = proof.split("; ")
    name, test = at.split(":")
    path = suite(name)
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        if not re.search(rf"^(def {test}\(\):|TEST\({test}\))" if test else "TEST", file.read(), re.M):
            raise SystemExit(f"tests/families.py: {path} has no test {test}")
    return f"[{text}](../{path})"


def table():
    with open(os.path.join(ROOT, "tools/convert/decoder.inc"), encoding="utf-8") as file:
        types = set(re.findall(r'^FAMILY\("(\w+)"', file.read(), re.M))
    rows = {name for row in ROWS for name in (row[1] or "").split()}
    if types != rows:
        raise SystemExit(f"tests/families.py: types without a row, or unknown types: {' '.join(sorted(types ^ rows))}")
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for family, names, models, checkpoints, *proofs in ROWS:
        family += " (%s)" % ", ".join(f"`{name}`" for name in names.split()) if names else ""
        cells = ["" if proof is None else cell(proof) for proof in proofs]
        lines.append("| " + " | ".join([family, models, checkpoints, *cells]) + " |")
    return "\n".join(lines)


def main():
    path = os.path.join(ROOT, PAGE)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    begin = text.index(HEAD)
    new = text[:begin] + table() + text[text.index("\n\n", begin):]
    if sys.argv[1:] == ["--check"]:
        return f"{PAGE}: the table of families is out of date: run tests/families.py" if new != text else 0
    with open(path, "w", encoding="utf-8") as file:
        file.write(new)


if __name__ == "__main__":
    sys.exit(main())
