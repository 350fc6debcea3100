#!/usr/bin/env python3
"""Compare models that CTranslate2's own converters made from random checkpoints
with CTranslate2 in float32: the same tokens for 40 sources, greedy and with
beam 4.

Usage: tests/python tests/convert/test_ct2_peer.py [--only NAME]

Needs ctranslate2 4.8.5, transformers 4.57.6, PyTorch and protobuf (make
test-long). CT2_MODELS names tests/data/models of CTranslate2's repository: five
small transliteration models that were trained. Models in int8 have the same
tokens if CTranslate2 computes in float32. In int8 it quantises inputs too: at
least 15 of 40 translations, mean scores within 0.15. T5 and Switch in Hugging
Face's layout are compared with transformers in float64.
"""
import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import warnings
from unittest import mock

from converting import convert_quietly
from suite import Skip, Suite
from test_ct2 import TOLERANCE, convert, sources, text, translate

try:
    import ctranslate2
    import numpy as np
    import torch
    import transformers
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.specs import common_spec, transformer_spec

    import make_ct2 as make
    import test_t5
    if transformers.__version__ != "4.57.6":
        ctranslate2 = None
except ImportError:
    ctranslate2 = None
test = Suite()
peer_test = test.needs(ctranslate2, "ctranslate2 and transformers 4.57.6")
CODES = "en de fr es ru zh".split()


def spread(model, scale=3.0):
    """Give weights that make decisions clear."""
    r = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=r)
            p.copy_(noise * scale / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.2 * noise + ("norm.weight" in name))
    return model


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)


def write_spm(*paths, pieces=None):
    for path in paths:
        with open(path, "wb") as file:
            file.write(make.spm() if pieces is None else pieces)


def marian(at):
    write_spm(at + "/source.spm", at + "/target.spm")
    words = ["</s>", "<unk>", *make.tokens()[3:], "<pad>"]
    write_json(at + "/vocab.json", {w: i for i, w in enumerate(words)})
    write_json(at + "/tokenizer_config.json", {"tokenizer_class": "MarianTokenizer"})
    pad = len(words) - 1
    config = transformers.MarianConfig(
        vocab_size=pad + 1, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, pad_token_id=pad, eos_token_id=0,
        decoder_start_token_id=pad, forced_eos_token_id=0, max_position_embeddings=128, activation_function="swish",
        scale_embedding=True)
    spread(transformers.MarianMTModel(config)).save_pretrained(at)
    return "source.spm", "target.spm"


def m2m(at):
    write_spm(at + "/sentencepiece.bpe.model")
    words = ["<s>", "<pad>", "</s>", "<unk>", *make.tokens()[3:]]
    write_json(at + "/vocab.json", {w: i for i, w in enumerate(words)})
    tokens = transformers.models.m2m_100.tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"]
    transformers.M2M100Tokenizer(at + "/vocab.json", at + "/sentencepiece.bpe.model", additional_special_tokens=[
        f"__{x}__" for x in tokens]).save_pretrained(at)
    config = transformers.M2M100Config(
        vocab_size=len(words) + 108, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=8, encoder_ffn_dim=96, decoder_ffn_dim=80, max_position_embeddings=128)
    spread(transformers.M2M100ForConditionalGeneration(config)).save_pretrained(at)
    return ("sentencepiece.bpe.model",)


def t5(at, **more):
    pieces = make.spm(["<pad>", "</s>", "<unk>", *make.tokens()[3:]])
    write_spm(at + "/spiece.model", pieces=pieces)
    transformers.T5Tokenizer(at + "/spiece.model", extra_ids=0, legacy=True).save_pretrained(at)
    config = transformers.T5Config(vocab_size=make.PIECES, d_model=48, d_kv=16, d_ff=64, num_layers=2,
                                   num_decoder_layers=3, num_heads=4, decoder_start_token_id=0, **more)
    model = spread(transformers.T5ForConditionalGeneration(config), 2.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            large = more["tie_word_embeddings"] and "shared" in name
            p.mul_(0.25 if name.endswith("Attention.q.weight") else 6 if large else 1)
    model.save_pretrained(at)
    return ("spiece.model",)


def decoder(at, model, config, **more):
    from tokenizers import Tokenizer, decoders, models, normalizers
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *map(chr, range(97, 123))]
    t = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(words)}, merges=[], byte_fallback=True, fuse_unk=True,
                             unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>",
                                         unk_token="<unk>").save_pretrained(at)
    spread(model(config(vocab_size=len(words), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=None,
                        **more))).save_pretrained(at)
    return "tokenizer.json", "tokenizer_config.json"


@contextlib.contextmanager
def made(write, quantization=None):
    """Write a checkpoint, and convert it by CTranslate2; yield (its folder, our model)."""
    with tempfile.TemporaryDirectory() as at, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.makedirs(at + "/hf")
        files = write(at + "/hf")
        TransformersConverter(at + "/hf", copy_files=list(files)).convert(at + "/ct2", quantization=quantization)
        problem = convert(at + "/ct2", at + "/model", "f32")
        assert problem is None, problem
        yield at + "/ct2", at + "/model"


def vocabulary_of(folder, side="shared"):
    with open(f"{folder}/{side + '_' if side else ''}vocabulary.json", encoding="utf-8") as file:
        return json.load(file)


def same_translations(folder, model, ends, compute="float32"):
    """Return how many of 40 sources have the same tokens, greedy and with beam 4, and the differences of scores of
    equal ones."""
    words, r, off, same = vocabulary_of(folder), random.Random(7), [0.0], {}
    plain = [i for i, x in enumerate(words) if not x.startswith(("<", "__", "madeup"))]
    tags = [i for i, x in enumerate(words) if x.startswith("__")]
    with open(folder + "/config.json", encoding="utf-8") as file:
        eos = words.index(json.load(file)["eos_token"])
    lines = [([r.choice(tags)] if tags else []) + r.choices(plain, k=r.choice((1, 2, 5, 9, 20, 33))) + [eos] * ends
             for _ in range(40)]
    forced = r.choice(tags) if tags else None
    translator = ctranslate2.Translator(folder, compute_type=compute, intra_threads=1)
    for beam in 1, 4:
        options = ["--beam", str(beam), "--max-len", "24", *(["--force", str(forced)] if tags else [])]
        found = translate(model, [text(x) for x in lines], *options)
        theirs = translator.translate_batch([[words[i] for i in x] for x in lines], beam_size=beam, return_scores=True,
                                            target_prefix=[[words[forced]]] * 40 if tags else None,
                                            max_decoding_length=24, min_decoding_length=0)
        same[beam] = 0
        for got, wanted in zip(found, theirs):
            ids = got["ids"][:-1] if got["ids"][-1] == eos else got["ids"]
            if ids == [words.index(x) for x in wanted.hypotheses[0]]:
                same[beam] += 1
                off.append(abs(got["score"] - wanted.scores[0]))
    return same, off


@peer_test
def translations_in_float32_are_equal():
    for name, write in (("marian", marian), ("m2m", m2m),
                        ("t5", lambda at: t5(at, feed_forward_proj="relu", tie_word_embeddings=True)),
                        ("t5 1.1", lambda at: t5(at, feed_forward_proj="gated-gelu", tie_word_embeddings=False))):
        with made(write) as (folder, model):
            same, off = same_translations(folder, model, True)
            print(f"    {name}: {same}, scores within {max(off):.1e}")
            assert same == {1: 40, 4: 40} and max(off) < 1e-4, name


@peer_test
def translations_in_int8_are_close():
    for name, write in ("marian", marian), ("m2m", m2m):
        with made(write, "int8") as (folder, model):
            exact, _ = same_translations(folder, model, True)
            same, off = same_translations(folder, model, True, "int8")
            mean = sum(off) / len(off)
            print(f"    {name}: {exact}; CTranslate2 in int8 {same}, scores within {max(off):.3f}, mean {mean:.3f}")
            assert exact == {1: 40, 4: 40} and min(same.values()) >= 15 and mean < 0.15, name


@peer_test
def opennmts_relative_positions_are_equal():
    r = np.random.default_rng(3)
    rows = lambda *shape: (r.standard_normal(shape) * 3 / shape[-1] ** 0.5).astype(np.float32)
    spec = transformer_spec.TransformerSpec.from_config((2, 2), 4, with_relative_position=True, ffn_glu=True,
                                                        activation=common_spec.Activation.GELU)
    words = ["<unk>", "<blank>", *make.tokens()[1:]]
    spec.encoder.scale_embeddings = spec.decoder.scale_embeddings = False

    def fill(part):
        for name, x in list(vars(part).items()):
            if isinstance(x, list):
                for y in x:
                    fill(y)
            elif hasattr(x, "validate"):
                fill(x)
            elif x is None:
                at = name if name in ("gamma", "beta") else "matrix" if name == "weight" else name
                shape = {"gamma": (32,), "beta": (32,), "relative_position_keys": (11, 8),
                         "relative_position_values": (11, 8)}.get(at)
                setattr(part, name, 0.2 * r.standard_normal(32).astype(np.float32) + (at == "gamma") if at in (
                    "gamma", "beta") else rows(*shape) if shape else None)
    fill(spec)
    for side in spec.encoder, spec.decoder:
        (side.embeddings[0] if side is spec.encoder else side.embeddings).weight = rows(len(words), 32)
        for layer in side.layer:
            for part in ["self_attention"] + ["attention"] * (side is spec.decoder):
                shapes = [(96, 32), (32, 32)] if part == "self_attention" else [(32, 32), (64, 32), (32, 32)]
                for linear, shape in zip(getattr(layer, part).linear, shapes):
                    linear.weight, linear.bias = rows(*shape), rows(shape[0])
            for linear, shape in ((layer.ffn.linear_0, (48, 32)), (layer.ffn.linear_0_noact, (48, 32)),
                                  (layer.ffn.linear_1, (32, 48))):
                linear.weight, linear.bias = rows(*shape), rows(shape[0])
    spec.decoder.projection.weight, spec.decoder.projection.bias = rows(len(words), 32), rows(len(words))
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.validate()
    spec.optimize()
    with tempfile.TemporaryDirectory() as at:
        spec.save(at)
        write_spm(at + "/sentencepiece.model")
        assert convert(at, at + "/model", "f32") is None
        same, off = same_translations(at, at + "/model", False)
        print(f"    {same}, scores within {max(off):.1e}")
        assert same == {1: 40, 4: 40} and max(off) < 1e-4


def same_answers(folder, ours, theirs, beams=(1, 4)):
    """Return for each beam how many of 40 random prompts have the answers that `theirs(prompt, beam)` returns."""
    words, r, same = vocabulary_of(folder, None), random.Random(3), {}
    lines = [[r.randrange(3, len(words)) for _ in range(r.choice((1, 3, 8, 20, 40)))] for _ in range(40)]
    cut = lambda ids: ids[:-1] if ids and ids[-1] == 2 else ids
    for beam in beams:
        found = translate(ours, [text(x) for x in lines], "--kv-bits", "32", "--beam", str(beam), "--max-len", "16",
                          "--early-stopping=1")
        same[beam] = sum(cut(a["ids"]) == cut(theirs(x, beam)) for a, x in zip(found, lines))
    return same


def answers_of(folder):
    """Return a function that searches with CTranslate2."""
    words, generator = vocabulary_of(folder, None), ctranslate2.Generator(folder, compute_type="float32",
                                                                          intra_threads=1)
    return lambda x, beam: generator.generate_batch(
        [[words[i] for i in x]], beam_size=beam, max_length=16, min_length=0,
        include_prompt_in_result=False)[0].sequences_ids[0]


def searched(model):
    """Return a function that searches greedily with transformers."""
    def search(x, _):
        x = torch.tensor([x])
        return model.generate(x, attention_mask=torch.ones_like(x), do_sample=False, max_new_tokens=16, num_beams=1,
                              pad_token_id=0)[0, x.shape[1]:].tolist()
    return search


def exact_model(folder):
    """Return the checkpoint that a model was made of, in float64."""
    return transformers.AutoModelForCausalLM.from_pretrained(os.path.dirname(folder) + "/hf", dtype=torch.float64,
                                                             attn_implementation="eager").eval()


LLAMA_3 = {"max_position_embeddings": 384, "rope_scaling": {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48}}
GEMMA_3 = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2}


@peer_test
def decoder_only_models_are_equal():
    t = transformers
    for name, model, config, more in (
            ("llama", t.LlamaForCausalLM, t.LlamaConfig, {}), ("qwen2", t.Qwen2ForCausalLM, t.Qwen2Config, {}),
            ("qwen3", t.Qwen3ForCausalLM, t.Qwen3Config, {"head_dim": 16}),
            ("mistral", t.MistralForCausalLM, t.MistralConfig, {"sliding_window": 512}),
            ("llama3", t.LlamaForCausalLM, t.LlamaConfig, LLAMA_3),
            ("gemma", t.GemmaForCausalLM, t.GemmaConfig, {"head_dim": 16}),
            ("gemma2", t.Gemma2ForCausalLM, t.Gemma2Config, {"head_dim": 16}),
            ("gemma3", t.Gemma3ForCausalLM, t.Gemma3TextConfig, {**GEMMA_3, "sliding_window": 64})):
        with made(lambda at: decoder(at, model, config, **more)) as (folder, ours):
            same = same_answers(folder, ours, answers_of(folder))
            print(f"    {name}: {same}")
            assert same == {1: 40, 4: 40}, name


@peer_test
def llama_3s_scaled_positions_are_those_of_transformers():
    """CTranslate2 reads all factors, but its converter writes only two of them."""
    from ctranslate2.converters.transformers import LlamaLoader
    whole = LlamaLoader.get_model_spec

    def with_factors(self, model):
        spec, about = whole(self, model), model.config.rope_scaling
        for layer in spec.decoder.layer:
            vars(layer.self_attention).update(
                rotary_scaling_factor=np.float32(about["factor"]),
                original_max_position_embeddings=np.int32(about["original_max_position_embeddings"]))
        return spec
    t = transformers
    with mock.patch.object(LlamaLoader, "get_model_spec", with_factors), \
            made(lambda at: decoder(at, t.LlamaForCausalLM, t.LlamaConfig, **LLAMA_3)) as (folder, ours):
        same = same_answers(folder, ours, answers_of(folder))
        exact = same_answers(folder, ours, searched(exact_model(folder)), (1,))
        print(f"    CTranslate2 {same}, transformers {exact}")
        assert same == {1: 40, 4: 40} and exact == {1: 40}


def mask_of_ct2(n, window, slides):
    """Return what CTranslate2 lets each of n prompt tokens see. It reads all but the last in chunks of `window` tokens.
    With a window, a token sees the whole window before its chunk, too; without one, the tokens of chunks after the
    second see only the first tokens, as many as there are in a window and up to themselves in the chunk."""
    seen = torch.full((n, n), -torch.inf, dtype=torch.float64)
    for i in range(n - 1):
        chunk, at = divmod(i, window)
        seen[i, max(0, chunk - 1) * window if slides else 0:i + 1 if slides else min(chunk, 1) * window + at + 1] = 0
    seen[-1, (max(0, n - window) if slides else 0):] = 0
    return seen[None, None]


@peer_test
def windows_shorter_than_prompts_are_those_of_transformers():
    """CTranslate2 differs from transformers here: mask_of_ct2 explains its values."""
    window, r, t = 8, random.Random(4), transformers
    with made(lambda at: decoder(at, t.Gemma3ForCausalLM, t.Gemma3TextConfig, **GEMMA_3,
                                 sliding_window=window)) as (folder, ours):
        model, words = exact_model(folder), vocabulary_of(folder, None)
        generator = ctranslate2.Generator(folder, compute_type="float32", intra_threads=1)
        lines = [[r.randrange(3, len(words)) for _ in range(n)] for n in (1, 8, 9, 10, 16, 17, 25, 40)]
        found = translate(ours, [f"{text(x)}\t{text([5])}" for x in lines], "--score", "--kv-bits", "32")
        for x, got in zip(lines, found):
            with torch.no_grad():
                exact = torch.log_softmax(model(torch.tensor([x])).logits[0, -1], -1).numpy()
                masks = {f"{kind}_attention": mask_of_ct2(len(x), window, kind == "sliding")
                         for kind in ("sliding", "full")}
                chunked = torch.log_softmax(model(torch.tensor([x]), attention_mask=masks).logits[0, -1], -1).numpy()
            theirs = np.array(generator.generate_batch([[words[i] for i in x]], max_length=1, return_logits_vocab=True,
                                                       include_prompt_in_result=False)[0].logits[0], float).reshape(-1)
            theirs = theirs[:len(words)] - np.logaddexp.reduce(theirs[:len(words)])
            assert abs(got["token_logprobs"][0] - exact[5]) < 1e-4, (len(x), got, exact[5])
            assert abs(theirs - chunked).max() < 1e-4, len(x)
            assert (abs(theirs - exact).max() > 1e-2) == (len(x) > window + 1), len(x)
        same = same_answers(folder, ours, searched(model), (1,))
        print(f"    {same}")
        assert same == {1: 40}


@peer_test
def transliterations_of_ctranslate2s_own_models_are_equal():
    if "CT2_MODELS" not in os.environ:
        raise Skip("CT2_MODELS is not set")
    for name in "v1/{}", "v1/{}-i16", "v2/{}", "v2/{}-i16", "v2/{}-i8":
        folder, r = os.path.join(os.environ["CT2_MODELS"], name.format("aren-transliteration")), random.Random(1)
        source, target = ([x.rstrip("\n") for x in open(f"{folder}/{side}_vocabulary.txt", encoding="utf-8")]
                          for side in ("source", "target"))
        lines = [[r.randrange(3, len(source)) for _ in range(r.choice((1, 3, 6, 9, 14, 20)))] for _ in range(200)]
        lines.append([source.index(x) for x in "\u0622\u062a\u0632\u0645\u0648\u0646"])
        with tempfile.TemporaryDirectory() as at:
            assert convert(folder, at + "/model", "f32", "--ids-only") is None, name
            translator = ctranslate2.Translator(folder, compute_type="float32", intra_threads=1)
            for beam in 1, 4:
                found = translate(at + "/model", [text(x) for x in lines], "--beam", str(beam), "--max-len", "60")
                theirs = translator.translate_batch([[source[i] for i in x] for x in lines], beam_size=beam,
                                                    max_decoding_length=60, min_decoding_length=0)
                answers = ["".join(target[i] for i in x["ids"] if i != 2) for x in found]
                assert answers == ["".join(x.hypotheses[0]) for x in theirs] and answers[-1] == "atzmon", (name, beam)


@peer_test
def t5_and_switch_match_transformers():
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        for kind, model_type in (("t5", "t5"), ("t5-tied", "t5"), ("t5-tied", "switch_transformers")):
            with tempfile.TemporaryDirectory() as at:
                sparse = model_type[0] == "s"
                ct2, arrays = test_t5.switch() if sparse else (make.make(kind)[0], None)
                config = test_t5.config_of(kind, model_type, **(test_t5.SWITCH if sparse else {}))
                test_t5.write(at, config, arrays or test_t5.arrays_of(ct2))
                assert convert_quietly("--from", "hf", at, "-o", at + "/out") is None
                model = transformers.AutoModelForSeq2SeqLM.from_pretrained(at, torch_dtype=torch.float64).eval()
                for module in model.modules():
                    if hasattr(module, "expert_capacity"):
                        module.dtype = torch.float64
                lines = sources(40)
                targets = [[*line[::-1][:20], 2] for line in lines]
                found = translate(at + "/out", [f"{text(x)}\t{text(y)}" for x, y in zip(lines, targets)], "--score")
                worst = 0.0
                for x, y, got in zip(lines, targets, found):
                    with torch.no_grad():
                        before = torch.tensor([[1, *y[:-1]]])
                        logits = model(input_ids=torch.tensor([x]), decoder_input_ids=before).logits
                    logp = torch.log_softmax(logits[0], -1)
                    off = max(abs(a - float(logp[i, y[i]])) for i, a in enumerate(got["token_logprobs"]))
                    assert off < TOLERANCE, (kind, model_type, x, off)
                    worst = max(worst, off)
                for beam in 1, 4:
                    found = translate(at + "/out", [text(x) for x in lines], "--beam", str(beam), "--max-len", "20")
                    same = 0
                    for x, got in zip(lines, found):
                        with torch.no_grad():
                            ids = model.generate(torch.tensor([x]), num_beams=beam, early_stopping=beam > 1,
                                                 max_new_tokens=20, do_sample=False)[0].tolist()[1:]
                        same += got["ids"] == ids
                    assert same == 40, (kind, model_type, beam, same)
                print(f"    {model_type}, {kind}: log-probabilities within {worst:.1e}")
    finally:
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
