#!/usr/bin/env python3
"""Test Transformer checkpoints in Hugging Face's layout: the converted models must
score and search like transformers.

Usage: tests/python tests/convert/test_transformers.py [--only NAME]

make_transformers.py wrote the expected results, tests/golden/transformers.json,
with transformer_numpy.py in float64; tests create the checkpoints again from
their seeds. Three tests compare this reference with transformers 4.57.6 (5.x
computes NLLB-MoE incorrectly), if installed by tools/install-deps --test.
Prints `ok NAME` or `FAIL NAME` per test.
"""
import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import types
import warnings
from unittest import mock

from converting import BIN, TRANSLATE, convert_quietly, run
from suite import Suite

TOLERANCE = 2e-5  # maximum error of a token's log-probability
try:
    import numpy as np

    import convert
    import make_transformers as make
    import moefile
    import transformer_numpy
except ImportError:
    np = None
try:
    import torch
    import transformers
    if transformers.__version__ != "4.57.6":
        transformers = None
except ImportError:
    transformers = None
test = Suite()
numpy_test = test.needs(np, "NumPy")
oracle_test = test.needs(transformers, "transformers 4.57.6")


def ids(text):
    return [int(x) for x in text.split()]


def stored():
    with open(make.GOLDEN, encoding="utf-8") as file:
        return json.load(file)


@contextlib.contextmanager
def checkpoint(family, **how):
    with tempfile.TemporaryDirectory() as folder:
        make.make(folder, family, **how)
        yield folder


# ---- The reference ---------------------------------------------------------------------------------------------------

@numpy_test
def the_reference_matches_the_stored_results():
    for family, cases in stored().items():
        with checkpoint(family) as folder:
            model = transformer_numpy.Transformer(folder)
        for i in (0, 1, 7, 20):  # make_transformers.py --golden checks all cases
            case = cases[i]
            target, o = ids(case["target"]), model.options({})
            logp = model.score(ids(case["source"]), target, o["bad_words"] if o["renormalize"] else ())
            logp = [logp[t, x] for t, x in enumerate(target)]
            assert np.allclose(logp, case["logprobs"], rtol=0, atol=2e-7), (family, i)
            found = model.beam(ids(case["source"]), 4, force=case["force"])
            wanted = [x for x, _ in case["beams"]["4" + "e" * o["early_stopping"]]]
            assert [make.text(h.ids) for h in found] == wanted, (family, i)


@numpy_test
def cached_steps_match_a_whole_target():
    for family in make.FAMILIES:
        with checkpoint(family) as folder:
            model = transformer_numpy.Transformer(folder)
        source, force, _ = make.case(family, 3)
        best = model.beam(source, 3, force=force, renormalize=False, bad_words=[], force_end=-1)[0]
        logp = [model.score(source, best.ids)[t, x] for t, x in enumerate(best.ids)]
        assert abs(sum(logp[force >= 0:]) - best.logprob) < 1e-9, family


# ---- The engine ------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def converted(family, *options, **how):
    """Convert the random checkpoint of a family; yield the model file."""
    with checkpoint(family, **how) as folder:
        model = os.path.join(folder, "model.bin")
        complaint = convert_quietly("--from", "hf", folder, "-o", model, *options)
        assert complaint is None, complaint
        yield model


def translate(model, lines, *options):
    return [json.loads(x) for x in run([TRANSLATE, "-m", model, "--raw-ids", "--json", *options], lines).lines]


@numpy_test
def scores_match_the_reference():
    for family, cases in stored().items():
        with converted(family) as model:
            found = translate(model, [f"{c['source']}\t{c['target']}" for c in cases], "--score")
        for got, wanted in zip(found, cases, strict=True):
            differences = [abs(x - y) for x, y in zip(got["token_logprobs"], wanted["logprobs"], strict=True)]
            assert max(differences) < TOLERANCE, (family, wanted["source"], max(differences))
            assert got["ids"] == ids(wanted["target"]), (family, got["ids"])


@numpy_test
def expert_selection_matches_the_reference():
    cases = stored()["nllb-moe"]
    with converted("nllb-moe") as model:
        routing = model + ".routing"
        run([TRANSLATE, "-m", model, "--raw-ids", "--score", "--routing", routing],
            [f"{c['source']}\t{c['target']}" for c in cases])
        with open(routing, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file][1:]
    found = {}
    for row in rows:
        found.setdefault((row["line"], row["layer"]), []).append("%d,%d" % tuple(row["experts"]))
    for line, case in enumerate(cases, 1):
        for name, wanted in case["experts"].items():
            side, layer = name.split(".")  # encoder layers have 2 sub-layers, decoder layers 3
            n = 2 if side == "encoder" else 3
            chosen, wanted = found[line, f"{side}.{int(layer) * n + n - 1}"], wanted.split()
            rest = chosen[len(wanted):]  # one more row for the end if the target lacks it
            assert chosen[:len(wanted)] == wanted and len(rest) < 2, (line, name)


def by_force(cases):
    """Group cases with the same forced token, which share a run."""
    out = {}
    for case in cases:
        out.setdefault(case["force"], []).append(case)
    return out.items()


@numpy_test
def searches_match_the_reference():
    for family, cases in stored().items():
        with converted(family) as model:
            for force, same in by_force(cases):
                options, lines = ["--force", str(force)] if force >= 0 else [], [c["source"] for c in same]
                for n in make.BEAMS:
                    for early in (0, 1):
                        found = translate(model, lines, *options, "--beam", str(n), "--nbest", str(n),
                                          f"--early-stopping={early}")
                        for got, case in zip(found, same, strict=True):
                            where = family, case["source"], n, early
                            wanted = case["beams"][f"{n}{'e' * early}"]
                            got = [(make.text(h["ids"]), h["score"]) for h in got["nbest"]]
                            assert [x for x, _ in got] == [x for x, _ in wanted], (where, got)
                            assert all(abs(x - y) < TOLERANCE for (_, x), (_, y) in zip(got, wanted)), where


@numpy_test
def beam_1_is_greedy_search():
    """Compare all 40 cases: like num_beams=1 in transformers, a beam of 1 is greedy search despite early_stopping."""
    for family, cases in stored().items():
        with converted(family) as model, checkpoint(family) as folder:
            reference = transformer_numpy.Transformer(folder)
            for case in cases[:8]:
                best = reference.beam(ids(case["source"]), 1, force=case["force"], early_stopping=True)[0]
                assert make.text(best.ids) == case["greedy"][0], (family, case["source"])
            for force, same in by_force(cases):
                options, lines = ["--force", str(force)] if force >= 0 else [], [c["source"] for c in same]
                for early in (0, 1):
                    found = translate(model, lines, *options, "--beam", "1", f"--early-stopping={early}")
                    for got, case in zip(found, same, strict=True):
                        assert make.text(got["ids"]) == case["greedy"][0], (family, case["source"], early, got["ids"])
                        assert abs(got["logprob"] - case["greedy"][1]) < 2e-4, (family, case["source"], early)


@numpy_test
def defaults_come_from_the_checkpoint():
    for family, cases in stored().items():
        generation = make.FAMILIES[family][1]
        n, early = generation.get("num_beams", 1), generation.get("early_stopping", False)
        with converted(family) as model:
            force, same = max(by_force(cases), key=lambda x: len(x[1]))
            found = translate(model, [c["source"] for c in same], *(["--force", str(force)] if force >= 0 else []))
        for got, case in zip(found, same, strict=True):
            wanted = case["greedy"][0] if n == 1 else case["beams"][f"{n}{'e' * early}"][0][0]
            assert make.text(got["ids"]) == wanted, (family, case["source"])


def compare(folder, family, cases, **given):
    """Convert a checkpoint and compare it with the reference; return the number of cases without a close decision."""
    model, reference, certain = folder + ".bin", transformer_numpy.Transformer(folder), 0
    complaint = convert_quietly("--from", "hf", folder, "-o", model)
    assert complaint is None, complaint
    penalty = ["--length-penalty", str(given["length_penalty"])] if "length_penalty" in given else []
    for i in cases:
        source, force, target = make.case(family, i, reference.config)
        o = reference.options({})
        logp = reference.score(source, target, o["bad_words"] if o["renormalize"] else ())
        found = translate(model, [f"{make.text(source)}\t{make.text(target)}"], "--score")[0]["token_logprobs"]
        assert max(abs(x - logp[t, target[t]]) for t, x in enumerate(found)) < TOLERANCE, (family, i)
        best = reference.beam(source, 3, force=force, **given)
        found = translate(model, [make.text(source)], "--beam", "3", "--nbest", "3",
                          *(["--force", str(force)] if force >= 0 else []), *penalty)
        if best[0].margin > make.MARGIN:
            certain += 1
            assert [h["ids"] for h in found[0]["nbest"]] == [h.ids for h in best], (family, i, best, found)
            assert all(abs(h["score"] - x.score) < TOLERANCE for h, x in zip(found[0]["nbest"], best)), (family, i)
    return certain


@numpy_test
def suppressed_tokens_may_keep_their_share_of_the_softmax():
    for family in ("marian-big", "marian"):  # only "marian" sets renormalize_logits
        def likely(tensors):
            shape, bias = tensors["final_logits_bias"]
            pad = np.arange(shape[1]) == 200
            return {**tensors, "final_logits_bias": (shape, lambda: np.where(pad, np.float32(7), bias()))}
        with broken(family, change=likely) as folder:
            assert compare(folder, family, range(6)) >= 4, family
            reference = transformer_numpy.Transformer(folder)
            source = make.case(family, 3)[0]
            other = not reference.options({})["renormalize"]
            assert reference.beam(source, 3)[0].score != reference.beam(source, 3, renormalize=other)[0].score


@numpy_test
def other_settings_are_supported():
    for family, settings, given in (
            ("nllb",
             {"activation_function": "gelu", "scale_embedding": False, "encoder_ffn_dim": 72,
              "decoder_attention_heads": 2}, {}),
            ("nllb", {"d_model": 36, "encoder_attention_heads": 3, "decoder_attention_heads": 9},
             {"length_penalty": 0.0}),
            ("nllb-moe",
             {"encoder_sparse_step": 1, "decoder_sparse_step": 3, "num_experts": 5, "moe_token_dropout": 0.5},
             {"length_penalty": 2.0}),
            ("nllb-moe", {"encoder_sparse_step": 0, "decoder_sparse_step": 4, "num_experts": 2, "decoder_ffn_dim": 34},
             {}),
            ("marian", {"share_encoder_decoder_embeddings": False, "activation_function": "silu"},
             {"length_penalty": 0.5}),
            ("marian", {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}, {}),
            *((family, {"vocab_size": sources, "decoder_vocab_size": targets, "pad_token_id": pad,
                        "decoder_start_token_id": pad, "share_encoder_decoder_embeddings": False,
                        "tie_word_embeddings": tied}, {})
              for family, sources, targets, pad, tied in (("marian", 150, 230, 140, True), ("marian", 260, 190, 180,
                                                                                         False),
                                                          ("marian-big", 120, 170, 119, True))),
            ("marian-big", {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1}, {})):
        with broken(family, **settings) as folder:
            assert compare(folder, family, range(4), **given) >= 2, (family, settings)


# ---- The converter ---------------------------------------------------------------------------------------------------

def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


@numpy_test
def every_container_gives_the_same_file():
    for family in ("nllb-moe", "marian"):
        with tempfile.TemporaryDirectory() as folder:
            files = set()
            for layout in ("safetensors", "bin", "legacy", "safetensors-sharded", "bin-sharded", "legacy-sharded"):
                there = os.path.join(folder, layout)
                make.make(there, family, layout=layout)
                complaint = convert_quietly("--from", "hf", there, "-o", there + ".model", "--name", "x", "--type",
                                            "q8", "--experts", "q4")
                assert complaint is None, (layout, complaint)
                files.add(bytes_of(there + ".model"))
            assert len(files) == 1, family


@numpy_test
def fairseqs_files_give_the_same_model_file():
    for family, changes in (("nllb-moe", {"per_rank": 1}), ("nllb-moe", {"per_rank": 4}), ("nllb", {}),
                            ("nllb-moe", {"per_rank": 2, "legacy": True})):
        with checkpoint(family) as folder:
            config, generation = make.configs(family)
            make.write_fairseq(folder + "/fs", config, make.SEEDS[family], **changes)
            common = ["--type", "q8", "--experts", "q4", "--name", "x", "--ids-only"]
            longest = generation.get("max_new_tokens", generation.get("max_length", 0) - 1)
            assert convert_quietly("--from", "hf", folder, "-o", folder + "/a", *common) is None
            wanted = bytes_of(folder + "/a")
            for name in ("/fs", "/fs-shared.pt", "/fs-rank-0.pt") if family == "nllb-moe" else ("/fs", "/fs.pt"):
                complaint = convert_quietly("--from", "fairseq", folder + name, "-o", folder + "/b", *common, "--meta",
                                            f"decode.max_new={longest}")
                assert complaint is None, complaint
                assert bytes_of(folder + "/b") == wanted, (family, name)


@numpy_test
def fairseqs_tokeniser_is_a_separate_file():
    import test_hf_tokens
    spm = test_hf_tokens.Unigram(test_hf_tokens.lines(), 420)
    size = len(spm.pieces) + 1 + 202 + 3
    with tempfile.TemporaryDirectory() as folder:
        make.make(folder + "/hf", "nllb-moe", vocab_size=size)
        make.write_fairseq(folder + "/fs", make.configs("nllb-moe", vocab_size=size)[0], make.SEEDS["nllb-moe"])
        for name in ("/hf/sentencepiece.bpe.model", "/spm"):
            with open(folder + name, "wb") as file:
                file.write(spm.bytes)
        assert convert_quietly("--from", "hf", folder + "/hf", "-o", folder + "/a", "--name", "x") is None
        assert convert_quietly("--from", "fairseq", folder + "/fs", "-o", folder + "/b", "--name", "x", "--spm",
                               folder + "/spm", "--meta", "decode.max_new=24") is None
        assert bytes_of(folder + "/a") == bytes_of(folder + "/b")
        line = run([TRANSLATE, "-m", folder + "/b", "-s", "en", "-t", "de"], ["the old house"]).lines
        assert len(line) == 1, line


@numpy_test
def mismatched_fairseq_files_are_rejected():
    def attempt(part, **how):
        with tempfile.TemporaryDirectory() as folder:
            config = make.configs("nllb-moe", encoder_layers=2, decoder_layers=2, num_experts=4)[0]
            os.mkdir(folder + "/fs")
            make.write_fairseq(folder + "/fs/c", config, **how)
            complaint = convert_quietly("--from", "fairseq", folder + "/fs/c", "-o", folder + "/b", "--ids-only") or ""
            assert part in complaint and "\n" not in complaint and os.listdir(folder) == ["fs"], (part, complaint)

    def at(rank, change):
        return lambda files: {p: change(dict(x)) if p.endswith(rank) else x for p, x in files.items()}

    def drop(name):
        return lambda tensors: {k: v for k, v in tensors.items() if k != name}
    for setting, part in (({"moe_second_expert_policy": "sampling"}, "moe_second_expert_policy is 'sampling'"),
                          ({"encoder_normalize_before": False}, "encoder_normalize_before"),
                          ({"encoder_attention_heads": None}, "encoder_attention_heads is missing"),
                          ({"encoder_attention_heads": 5}, "encoder_attention_heads 5"),
                          ({"moe_expert_count": 64}, "moe_expert_count is 64"), ({"moe_eom": 2}, "moe_token_dropout")):
        attempt(part, settings=setting)
    inner = "encoder.layers.1.moe_layer.experts.0.fc1.weight"
    attempt("rank-1.pt is missing", change=lambda files: {p: x for p, x in files.items() if "rank-1" not in p})
    attempt("rank-0.pt is missing", change=lambda files: {p: x for p, x in files.items() if "shared" in p})
    attempt("expert_2.fc1.weight is missing", change=at("rank-2.pt", drop(inner)))
    attempt(f"tensor {inner} has shape [96, 63]", change=at("rank-3.pt", lambda t: {**t, inner: t[inner][:, 1:]}))
    attempt("does not belong to an expert",
            change=at("rank-1.pt", lambda t: {**t, "decoder.layer_norm.bias": t[inner]}))
    source = "encoder.embed_tokens.weight"
    attempt("should be tied, but differ", change=at("shared.pt", lambda t: {**t, source: t[source] * 2}))
    attempt("decoder.embed_tokens.weight is missing", change=at("shared.pt", drop("decoder.embed_tokens.weight")))
    attempt("not a fairseq checkpoint", change=lambda files: {p: [] for p in files})


@numpy_test
def half_precision_is_read():
    for dtype, step in (("f16", 2 ** -11), ("bf16", 2 ** -8)):
        for layout in ("safetensors", "bin"):
            if (dtype, layout) == ("bf16", "bin"):
                continue
            with converted("marian", layout=layout, dtype=dtype) as half, converted("marian") as whole:
                a, b = moefile.read_model(half)[2], moefile.read_model(whole)[2]
                for name, x in b.items():
                    assert np.abs(a[name] - x).max() <= step * np.abs(x).max(), name
                    assert name == "positions.weight" or np.any(a[name] != x), name


@numpy_test
def types_match_the_library():
    """convert.py with --type and --experts must write the same bytes as moe-quantize does from the F32 file."""
    with converted("nllb-moe") as plain:
        for kind, experts in (("q8", "q4"), ("q4", "q4m"), ("q4m", "q4"), ("f16", "q8b"),
                              ("q8b", "q8"), ("bf16", "bf16"), ("q3", "q2"), ("q2", "q3")):
            run([os.path.join(BIN, "moe-quantize"), "--experts", experts, plain, plain + ".there", kind])
            with converted("nllb-moe", "--type", kind, "--experts", experts) as here:
                a, b = moefile.read(here)[1], moefile.read(plain + ".there")[1]
            for name, t in b.items():
                assert (a[name].type, a[name].data) == (t.type, t.data), (kind, experts, name)


def convert_noting(*command):
    """Run convert.py; return (its error message or None, its notes)."""
    with contextlib.redirect_stderr(io.StringIO()) as notes:
        return convert_quietly(*command), notes.getvalue()


def refused(folder, *options):
    """Check that convert.py rejects a checkpoint and leaves no files behind; return the error message."""
    before = sorted(os.listdir(os.path.dirname(folder)))
    complaint = convert_quietly("--from", "hf", folder, "-o", folder + ".bin", *options)
    assert sorted(os.listdir(os.path.dirname(folder))) == before, (complaint, os.listdir(os.path.dirname(folder)))
    return complaint or ""


@contextlib.contextmanager
def broken(family, layout="safetensors", dtype="f32", change=lambda tensors: tensors, **settings):
    """Write a checkpoint with changed settings or tensors; yield its folder."""
    generation = settings.pop("generation", {})
    with tempfile.TemporaryDirectory() as folder:
        config, usual = make.configs(family, **{k: v for k, v in settings.items() if v is not None})
        make.write(folder + "/model", config, {**usual, **generation}, 1, layout, dtype, change=change)
        if None in settings.values():
            with open(folder + "/model/config.json", "w", encoding="utf-8") as file:
                json.dump({k: v for k, v in config.items() if settings.get(k, 0) is not None}, file)
        yield folder + "/model"


@numpy_test
def unsupported_settings_are_rejected_by_name():
    for family, settings, part in (
            ("nllb-moe", {"moe_eval_capacity_token_fraction": 0.25}, "moe_eval_capacity_token_fraction is 0.25"),
            ("nllb-moe", {"second_expert_policy": "sampling"}, "second_expert_policy is 'sampling'"),
            ("nllb-moe", {"router_bias": True}, "router_bias"), ("nllb-moe", {"num_experts": 1}, "num_experts"),
            ("nllb", {"model_type": "bart"}, "model_type 'bart' is"),
                                   ("nllb", {"architectures": ["T5"]}, "architectures ['T5'] is"),
            ("nllb", {"activation_function": "gelu_new"}, "activation_function 'gelu_new' is"),
            ("nllb", {"encoder_attention_heads": 5}, "encoder_attention_heads 5"),
                                   ("nllb", {"d_model": None}, "d_model is missing"),
            ("nllb", {"d_model": "64"}, "d_model is '64'"), ("nllb", {"vocab_size": 10 ** 12}, "vocab_size"),
            ("nllb", {"decoder_start_token_id": 200}, "decoder_start_token_id"),
                                   ("nllb", {"quantization_config": {}}, "quantization"),
            ("marian", {"normalize_before": True}, "normalize_before"), ("nllb", {"prefix": "to de: "}, "prefix is"),
            ("nllb", {"new_norm": 5}, "unknown key 'new_norm' with value 5"),
            ("nllb", {"is_decoder": True}, "is_decoder is True"),
            ("nllb-moe", {"router_dtype": "float16"}, "router_dtype is 'float16'"),
            ("nllb", {"task_specific_params": {"a": {"num_beams": 3}}}, "task_specific_params"),
            ("marian", {"tie_encoder_decoder": True}, "tie_encoder_decoder is True"),
            ("nllb", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
                                   ("marian", {"decoder_vocab_size": 199}, "decoder_vocab_size")):
        with broken(family, change=lambda t: {}, **settings) as folder:
            assert part in refused(folder), (settings, refused(folder))
    for generation, part in (({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size is 3"),
                             ({"early_stopping": "never"}, "'never'"),
                             ({"num_beams": 0}, "num_beams"), ({"bad_words_ids": [[5, 6]]}, "bad_words_ids"),
                             ({"forced_eos_token_id": 9}, "forced_eos_token_id"), ({"do_sample": True}, "do_sample"),
                             ({"eos_token_id": [17, 40]}, "eos_token_id is [17, 40]"), ({"max_length": 1}, "max_len"),
                             ({"suppress_tokens": [2, 7]}, "suppress_tokens"), ({"min_length": 5}, "min_length is 5"),
                             ({"begin_suppress_tokens": [7]}, "begin_suppress"), ({"min_new_tokens": 4}, "min_new"),
                             ({"forced_bos_token_id": 192}, "forced_bos_token_id is 192"), ({"num_beams": 65}, "beams"),
                             ({"decoder_start_token_id": 1}, "pad_token_id"), ({"length_penalty": -1}, "length_penalty"),
                             ({"decoder_start_token_id": [2, 5]}, "decoder_start"), ({"max_new_tokens": 0}, "max_new"),
                             ({"sequence_bias": [[[5], 2.0]]}, "sequence_bias"), ({"stop_strings": ["a"]}, "stop_str"),
                             ({"repetition_penalty": 1.3}, "repetition_penalty"), ({"max_time": 2.0}, "max_time"),
                             ({"encoder_no_repeat_ngram_size": 2}, "encoder_no"), ({"guidance_scale": 2.0}, "guidance"),
                             ({"token_healing": True}, "token_healing"), ({"new": {"a": 1}}, "unknown key 'new'")):
        with broken("nllb", generation=generation) as folder:
            assert part in refused(folder), (generation, refused(folder))
    with broken("marian", change=with_tensor("model.encoder.embed_positions.weight", (96, 64))) as folder:
        assert "learned positions" in refused(folder), refused(folder)
    for generation, part in (({"eos_token_id": None}, "lacks eos_token_id"), ({"max_length": None}, "no max_length"),
                             ({"max_length": 500}, "limiting translations to 128 tokens")):
        with broken("nllb", generation=generation) as folder:
            assert part in convert_noting("--from", "hf", folder, "-o", folder + ".bin")[1], generation


def without(name):
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def with_tensor(name, shape, value=None):
    """Return a function that adds or replaces a tensor; the default value is zeros."""
    return lambda tensors: {**tensors, name: (shape, lambda: np.zeros(shape, np.float32) if value is None else value)}


@numpy_test
def mismatched_tensors_are_rejected_by_name():
    fc1, shared = "model.encoder.layers.1.fc1.weight", "model.shared.weight"
    for change, part in (
            (without(fc1), "tensor encoder.layers.1.fc1.weight is missing"),
                         (with_tensor(fc1, (96, 63)), f"tensor {fc1} has shape [96, 63]"),
            (with_tensor("model.extra", (3,)), "unexpected tensor model.extra [3]"),
                         (without(shared), "shared.weight is missing"),
            (with_tensor("lm_head.weight", (200, 64)), "lm_head.weight should be tied, but differ"),
            (with_tensor("encoder.layers.1.fc1.weight", (96, 64)), "with and without a prefix"),
            (with_tensor(fc1, (96, 64), np.full((96, 64), np.nan, np.float32)),
             f"tensor {fc1} contains values that are not finite")):
        for layout in ("safetensors", "bin"):
            with broken("nllb", layout, change=change) as folder:
                assert part in refused(folder), (part, layout, refused(folder))
                assert part in refused(folder, "--resume"), (part, layout)
    for layout in ("safetensors", "bin"):
        with broken("nllb", layout, "f64") as folder:
            assert "number format F64 of tensor model.shared.weight" in refused(folder), refused(folder)
    def with_others(tensors):
        same = {name: tensors[shared] for name in ("lm_head.weight", "model.encoder.embed_tokens.weight")}
        return with_tensor("model.encoder.embed_positions.weights", (9, 64))({**tensors, **same})
    with broken("nllb", change=with_others) as folder:
        # the additional tensors equal others or are ignored
        assert convert_quietly("--from", "hf", folder, "-o", folder + ".bin", "--name", "nllb") is None
        plain = bytes_of(folder + ".bin")
    with broken("nllb", layout="bin") as folder:
        assert convert_quietly("--from", "hf", folder, "-o", folder + ".bin", "--name", "nllb") is None
        assert bytes_of(folder + ".bin") == plain


@numpy_test
def broken_files_are_rejected():
    def change_json(path, change):
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        changed = change(value)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(value, file)
        return changed
    for layout, stem in (("safetensors-sharded", "model"), ("bin-sharded", "pytorch_model")):
        end = layout.split("-")[0]
        index, second = f"{stem}.{end}.index.json", f"{stem}-00002-of-00003.{end}"
        with broken("nllb", layout) as folder:
            os.rename(os.path.join(folder, second), folder + "/elsewhere")
            assert f"shard {second} is missing" in refused(folder), refused(folder)
        with broken("nllb", layout) as folder:
            change_json(os.path.join(folder, index), lambda v: v["weight_map"].update({"model.ghost": second}))
            assert f"tensor model.ghost is missing from {second}" in refused(folder), refused(folder)
        with broken("nllb", layout) as folder:
            change_json(os.path.join(folder, index),
                        lambda v: v["weight_map"].update({"model.ghost": "../config.json"}))
            assert "no weight_map from tensors to files in this folder" in refused(folder)
        name = "model.encoder.layer_norm.bias"
        with broken("nllb", layout) as folder, broken("nllb") as whole:  # like transformers, use unlisted tensors
            change_json(os.path.join(folder, index), lambda v: v["weight_map"].pop(name))
            complaint, notes = convert_noting("--from", "hf", folder, "-o", folder + ".bin", "--name", "x")
            assert complaint is None and f"does not list tensor {name}" in notes, (complaint, notes)
            assert convert_quietly("--from", "hf", whole, "-o", whole + ".bin", "--name", "x") is None
            assert bytes_of(folder + ".bin") == bytes_of(whole + ".bin")
        with broken("nllb", layout) as folder:
            first = change_json(os.path.join(folder, index), lambda v: v["weight_map"].pop(name))
            shutil.copy(os.path.join(folder, first), os.path.join(folder, first + ".copy"))
            change_json(os.path.join(folder, index), lambda v: v["weight_map"].update(
                {x: first + ".copy" for x, file in v["weight_map"].items() if file == first and "q_proj" in x}))
            assert "in several shards" in refused(folder) or "is also in" in refused(folder), refused(folder)
    with broken("nllb") as folder:
        for name in ("config.json", "generation_config.json"):
            whole = bytes_of(os.path.join(folder, name))
            for text in (b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff", b"[" * 100000):
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(text)
                assert name in refused(folder), (name, text[:20])
            with open(os.path.join(folder, name), "wb") as file:
                file.write(whole)
        os.unlink(os.path.join(folder, "model.safetensors"))
        assert "neither model.safetensors nor pytorch_model.bin" in refused(folder)
        for name, part in (("model.gguf", "name that"), ("model.npz", "--from marian"), ("x.safetensors", "rename"),
                           ("flax_model.msgpack", "save it"), ("adapter_config.json", "contains an adapter")):
            with open(os.path.join(folder, name), "w", encoding="utf-8"):
                pass
            assert part in refused(folder), (name, refused(folder))
            os.unlink(os.path.join(folder, name))
        for name in ("model.safetensors", "generation_config.json", "sentencepiece.bpe.model"):
            with open(os.path.join(folder, name), "wb") as file:
                file.write(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n")
            assert f"{name}: a Git LFS pointer" in refused(folder), (name, refused(folder))
            os.unlink(os.path.join(folder, name))
            make.write(folder, make.configs("nllb")[0], None)
        os.unlink(os.path.join(folder, "config.json"))
        assert f"{folder}: config.json is missing" in refused(folder), refused(folder)
        os.unlink(os.path.join(folder, "model.safetensors"))
        assert f"{folder}: the folder is empty" in refused(folder), refused(folder)
    assert "not a folder" in (convert_quietly("--from", "hf", "/nowhere", "-o", "/nowhere.bin") or "")


@numpy_test
def damaged_safetensors_are_rejected_or_unaffected():
    with broken("nllb") as folder:
        path = os.path.join(folder, "model.safetensors")
        whole = bytes_of(path)
        length = struct.unpack("<Q", whole[:8])[0]
        head = json.loads(whole[8:8 + length])

        def attempt(data):
            with open(path, "wb") as file:
                file.write(data)
            return refused(folder)
        for cut in (0, 7, 8, 9, 8 + length - 1, 8 + length, len(whole) - 1):
            assert ("is truncated" if cut > 7 else "not a safetensors file") in attempt(whole[:cut]), cut
        assert "is damaged" in attempt(whole + b"x"), refused(folder)
        for size in (0, 1, length - 1, length + 1, 1 << 40, (1 << 64) - 1):
            assert attempt(struct.pack("<Q", size) + whole[8:]), size
        name = "model.encoder.layers.0.fc1.weight"
        for key, value in (("data_offsets", [0, 4]), ("data_offsets", [-4, 0]), ("data_offsets", [1 << 63, 1 << 63]),
                           ("data_offsets", 3),
                           ("shape", [96, -64]), ("shape", [1 << 40, 1 << 40]), ("shape", "x"), ("shape", [96.5, 64]),
                           ("dtype", "F33"),
                           ("dtype", None), ("dtype", ["F32"]),
                           ("data_offsets", head["model.shared.weight"]["data_offsets"])):
            broken_head = json.dumps({**head, name: {**head[name], key: value}}).encode()
            part = attempt(struct.pack("<Q", len(broken_head)) + broken_head + whole[8 + length:])
            assert name in part, (key, value, part)
        twice = whole[8:8 + length].rstrip()[:-1] + b', "model.shared.weight": {}}'
        assert "duplicate" in attempt(struct.pack("<Q", len(twice)) + twice + whole[8 + length:])
        r = np.random.default_rng(1)
        # headers with a flipped bit are rejected unless the bit is in an unused name
        for _ in range(100):
            data = bytearray(whole)
            data[8 + int(r.integers(length))] ^= 1 << int(r.integers(8))
            with open(path, "wb") as file:
                file.write(data)
            complaint = convert_quietly("--from", "hf", folder, "-o", folder + ".bin")
            assert complaint is None or "convert.py: " in complaint, complaint
            if os.path.exists(folder + ".bin"):
                os.unlink(folder + ".bin")


@numpy_test
def interrupted_conversions_can_be_resumed():
    with broken("nllb-moe") as folder:
        out = folder + ".bin"
        assert convert_quietly("--from", "hf", folder, "-o", out, "--type", "q8") is None
        whole = bytes_of(out)
        os.unlink(out)
        written, real = [], moefile.encode_blob

        def stopping(w, kind):
            written.append(w)
            if len(written) == 40:
                raise KeyboardInterrupt
            return real(w, kind)
        command = ["--from", "hf", folder, "-o", out, "--type", "q8", "--resume"]
        for moefile_encode in (stopping, real):
            moefile.encode_blob = moefile_encode
            try:
                interrupted = convert_quietly(*command)
            finally:
                moefile.encode_blob = real
            left = sorted(x for x in os.listdir(os.path.dirname(folder)) if x != "model")
            if moefile_encode is stopping:
                assert interrupted == "130" and left == ["model.bin.partial", "model.bin.partial.log"], left
                with open(out + ".partial.log", encoding="ascii") as file:
                    done = len(file.readlines()) - 1
                assert 10 < done < 100, done
        assert interrupted is None and left == ["model.bin"] and bytes_of(out) == whole, left


def killed_at(count, command):
    """Run convert.py in a child that kills itself at the count-th checksum, sync, rename or removal of a file; return
    False if the child ended normally."""
    child = os.fork()
    if not child:
        left = [count]

        def deadly(function):
            def run(*arguments, **named):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **named)
            return run
        moefile.zlib = types.SimpleNamespace(crc32=deadly(moefile.zlib.crc32))
        moefile.os = types.SimpleNamespace(**{**vars(os), **{x: deadly(getattr(os, x))
                                                             for x in ("fsync", "replace", "unlink")}})
        complaint = "?"
        try:
            complaint = convert_quietly(*command)
        finally:
            os._exit(complaint is not None)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    return status != 0


@numpy_test
def conversions_killed_anywhere_resume_to_the_same_bytes():
    how = {"encoder_layers": 2, "decoder_layers": 2, "num_experts": 3}
    # files survive a killed process even without fsync, so skip it to run faster
    with mock.patch("os.fsync", lambda file: None), broken("nllb-moe", "bin-sharded", **how) as folder:
        out = folder + ".bin"
        command = ["--from", "hf", folder, "-o", out, "--type", "q8", "--experts", "q4", "--resume"]
        assert convert_quietly(*command) is None
        whole, points = bytes_of(out), 0
        for count in range(1, 10000, 7):  # kill a single run
            os.unlink(out)
            if not killed_at(count, command):
                break
            points += 1
            assert not os.path.exists(out) or bytes_of(out) == whole, count
            assert convert_quietly(*command) is None and bytes_of(out) == whole, count
            assert sorted(os.listdir(os.path.dirname(folder))) == ["model", "model.bin"], count
        assert points > 20, points
        os.unlink(out)
        runs = 1  # kill several runs, each of which makes little progress
        while killed_at(17, command) and not os.path.exists(out):  # after the rename, the conversion is complete
            runs += 1
        assert bytes_of(out) == whole and 5 < runs < 100, runs
        assert convert_quietly(*command) is None and bytes_of(out) == whole
        assert sorted(os.listdir(os.path.dirname(folder))) == ["model", "model.bin"]
        # files of another checkpoint or with other options must not be resumed
        os.unlink(out)
        assert killed_at(100, command)
        assert "is from another checkpoint" in (convert_quietly(*command, "--name", "other") or "")
        path = os.path.join(folder, "config.json")
        os.utime(path, (1, 1))
        assert "is from another checkpoint" in (convert_quietly(*command) or "")


@numpy_test
def a_signal_leaves_no_files_without_resume():
    with tempfile.TemporaryDirectory() as folder:
        make.make(folder + "/model", "nllb-moe", encoder_ffn_dim=30000, decoder_ffn_dim=30000)
        command = [sys.executable, convert.__file__, "--from", "hf", folder + "/model", "-o", folder + "/out.bin",
                   "--type", "q4", "--ids-only"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while len(os.listdir(folder)) == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(os.listdir(folder)) == 2, "it never started writing"
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 143 and os.listdir(folder) == ["model"], (process.returncode, os.listdir(folder))


# ---- transformers ----------------------------------------------------------------------------------------------------

def transformers_model(folder, family):
    """Return the model as loaded by transformers, in float64."""
    torch.set_num_threads(1)
    # the causal mask of NllbMoe overflows with a float32 default
    torch.set_default_dtype(torch.float64 if family == "nllb-moe" else torch.float32)
    kind = {"nllb": transformers.M2M100ForConditionalGeneration,
            "nllb-moe": transformers.NllbMoeForConditionalGeneration}
    with contextlib.redirect_stderr(io.StringIO()):
        model = kind.get(family, transformers.MarianMTModel).from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager").eval()
    for module in model.modules():
        if type(module).__name__ == "NllbMoeTop2Router":
            module.dtype = torch.float64
    return model


def oracle(folder, family):
    """Return (transformers' model, the reference with transformers' table of positions)."""
    model = transformers_model(folder, family)
    reference, table = transformer_numpy.Transformer(folder), model.model.encoder.embed_positions
    if not reference.marian:
        reference.positions = table.weights[2:2 + len(reference.positions)].double().numpy()
    return model, reference


def inputs(source):
    return {"input_ids": torch.tensor([source]), "attention_mask": torch.ones(1, len(source), dtype=torch.long)}


@oracle_test
def the_reference_scores_like_transformers():
    worst, routed = {}, 0
    for family in make.FAMILIES:
        with checkpoint(family) as folder:
            model, reference = oracle(folder, family)
        chosen = []
        for module in model.modules():
            if type(module).__name__ == "NllbMoeTop2Router":
                module.register_forward_hook(lambda m, i, out: chosen.append(out[1].nonzero()[:, 1].reshape(-1, 2)))
        for i in range(make.CASES):
            source, _, target = make.case(family, i)
            chosen.clear()
            with torch.no_grad():
                logits = model(**inputs(source),
                               decoder_input_ids=torch.tensor([[reference.start, *target[:-1]]])).logits[0]
            there = torch.log_softmax(logits.double(), -1).numpy()
            worst[family] = max(worst.get(family, 0), np.abs(there - reference.score(source, target)).max())
            wanted = [np.sort(best, 1).tolist() for _, best in reference.experts]
            assert [x.tolist() for x in chosen] == wanted, (family, i)
            routed += sum(len(x) for x in chosen)
    print("log-probabilities differ by", {k: float(f"{v:.1e}") for k, v in worst.items()}, "-", routed,
          "tokens routed equally")
    assert max(worst.values()) < 2e-12 and routed > 100, worst


@oracle_test
def the_reference_searches_like_transformers():
    for family in make.FAMILIES:
        with checkpoint(family) as folder:
            model, reference = oracle(folder, family)
        for case in stored()[family]:
            source, force = ids(case["source"]), case["force"]
            given = {**inputs(source), "forced_bos_token_id": force if force >= 0 else None,
                     "use_model_defaults": False}
            config = {k: v for k, v in reference.generation.items() if k not in ("num_beams", "early_stopping")}

            def generate(n, early):
                settings = transformers.GenerationConfig(
                    **{**config, "num_beams": n, "early_stopping": early, "num_return_sequences": n, "do_sample": False,
                       "return_dict_in_generate": True, "output_scores": True})
                with torch.no_grad():
                    return model.generate(**given, generation_config=settings)

            def tokens(row):
                row = row.tolist()[1:]
                end = row.index(reference.eos) + 1 if reference.eos in row else len(row)
                return make.text(row[:end])
            assert tokens(generate(1, False).sequences[0]) == case["greedy"][0], (family, source)
            for n in make.BEAMS:
                for early in (False, True):
                    out, wanted = generate(n, early), case["beams"][f"{n}{'e' * early}"]
                    assert [tokens(x) for x in out.sequences] == [x for x, _ in wanted], (family, source, n, early)
                    scores = out.sequences_scores.numpy()
                    assert np.allclose(scores, [x for _, x in wanted], rtol=0, atol=5e-6), (family, source, n)


SOME = list(range(20, 60))
VARIANTS = [  # family, changes of generation_config.json (None: no such file) and of config.json; None removes a key
    ("nllb", {"num_beams": 3}, {}), ("nllb", {"num_beams": 4, "early_stopping": True, "length_penalty": 0.4}, {}),
    ("nllb", {"num_beams": 4, "length_penalty": 2.5}, {}), ("nllb", {"eos_token_id": [2, 17, 40]}, {}),
    ("nllb", {"eos_token_id": [17, 2], "num_beams": 4}, {}), ("nllb", {"suppress_tokens": SOME}, {}),
    ("nllb", {"suppress_tokens": SOME, "num_beams": 4}, {}), ("nllb", {"min_length": 1}, {}),
    ("nllb", {"suppress_tokens": SOME, "num_beams": 4, "renormalize_logits": True}, {}),
    ("nllb", {"bad_words_ids": [[i] for i in range(60, 110)] + [[2]], "num_beams": 3}, {}),
    ("nllb", {"bad_words_ids": [[60]], "suppress_tokens": SOME, "num_beams": 3}, {}), ("nllb", {"max_length": 7}, {}),
    ("nllb", {"max_new_tokens": 5, "max_length": 20}, {}), ("nllb", {"forced_eos_token_id": 2, "max_length": 6}, {}),
    ("nllb", {"forced_eos_token_id": [2], "max_length": 6, "num_beams": 4}, {}),
    ("nllb", {"decoder_start_token_id": 0}, {}), ("nllb", {"decoder_start_token_id": [5]}, {}),
    ("nllb", {"decoder_start_token_id": None}, {}), ("nllb", {"temperature": 0.3, "top_k": 5, "top_p": 0.2}, {}),
    ("nllb", {"use_cache": False, "output_scores": True, "cache_implementation": "dynamic"}, {}),
    ("nllb", None, {"max_length": 9, "num_beams": 3, "early_stopping": True}), ("nllb", {}, {"scale_embedding": None}),
    ("nllb", {}, {"num_beams": 4, "max_length": 9, "no_repeat_ngram_size": 2, "forced_bos_token_id": 190}),
    ("nllb", {}, {"decoder_start_token_id": None}), ("nllb", {"decoder_start_token_id": 7}, {"pad_token_id": 0}),
    ("marian", {"forced_eos_token_id": None, "max_length": 8}, {}), ("marian", {"num_beams": 1}, {}),
    ("marian", None, {}), ("marian", None, {"forced_eos_token_id": None}), ("marian", {"bad_words_ids": None}, {}),
    ("marian", {"eos_token_id": [0, 33], "num_beams": 4}, {}), ("marian", {"decoder_start_token_id": 5}, {}),
    ("marian", {"renormalize_logits": False, "suppress_tokens": [3, 4, 5, 6, 7, 8]}, {}),
    ("marian", {"max_length": 12}, {"decoder_start_token_id": None}), ("marian", {}, {"activation_function": None}),
    ("marian", {}, {"max_position_embeddings": None}), ("nllb-moe", {"eos_token_id": [2, 30], "num_beams": 2}, {}),
    ("nllb-moe", {"suppress_tokens": [12, 13, 14]}, {}),
    ("nllb-moe", {}, {"moe_token_dropout": None, "second_expert_policy": None})]


def changed_checkpoint(folder, family, generation, changes):
    """Write a family's checkpoint with changed files; return their values."""
    config, usual = make.configs(family)
    make.write(folder, {**config, **{k: v for k, v in changes.items() if v is not None}}, None, make.SEEDS[family])
    files = {"config.json": {**config, **changes}}
    if generation is not None:
        files["generation_config.json"] = {**usual, **generation}
    for name, values in files.items():
        files[name] = {k: v for k, v in values.items() if v is not None}
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(files[name], file)
    return files


@oracle_test
def settings_of_a_checkpoint_work_as_in_transformers():
    for family, generation, changes in VARIANTS:
        with tempfile.TemporaryDirectory() as at:
            files = changed_checkpoint(at, family, generation, changes)
            assert convert_quietly("--from", "hf", at, "-o", at + "/model.bin") is None, (family, generation, changes)
            ends = list(files.values())[-1]["eos_token_id"]
            ends, model = ends if isinstance(ends, list) else [ends], transformers_model(at, family)
            sources = [make.case(family, i)[0] for i in range(6)]
            found = translate(at + "/model.bin", [make.text(source) for source in sources])
        for got, source in zip(found, sources):
            with torch.no_grad():
                wanted = model.generate(**inputs(source))[0].tolist()[1:]
            end = next((i + 1 for i, x in enumerate(wanted) if x in ends), len(wanted))
            assert got["ids"] == wanted[:end], (family, generation, changes, got["ids"], wanted)


@oracle_test
def the_reference_matches_transformers_with_separate_vocabularies():
    """transformers 4.57.6 loads only vocabularies of equal size; other tests compare vocabularies of unequal size
    with the reference."""
    for family, settings in (("marian", {"tie_word_embeddings": False}), ("marian", {}), ("marian-big", {})):
        with broken(family, share_encoder_decoder_embeddings=False, **settings) as folder:
            model, reference = oracle(folder, family)
            for i in range(12):
                source, _, target = make.case(family, i, reference.config)
                with torch.no_grad():
                    start = torch.tensor([[reference.start, *target[:-1]]])
                    logits = model(**inputs(source), decoder_input_ids=start).logits[0]
                there = torch.log_softmax(logits.double(), -1).numpy()
                assert there.shape == (len(target), reference.vocabulary)
                assert np.abs(there - reference.score(source, target)).max() < 2e-12, (family, settings, i)
            # transformers omits tied tensors when it saves a model, which must not change the converted model
            with warnings.catch_warnings(action="ignore"):
                model.float().save_pretrained(folder + "/again")
            for complaint in (convert_quietly("--from", "hf", folder + "/again", "-o", folder + "/a", "--name", "x"),
                              convert_quietly("--from", "hf", folder, "-o", folder + "/b", "--name", "x")):
                assert complaint is None, complaint
            a, b = (moefile.read(folder + x)[1] for x in ("/a", "/b"))
            assert {k: t.data for k, t in a.items()} == {k: t.data for k, t in b.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run tests with matching names")
    return test.run(parser.parse_args().only)


if __name__ == "__main__":
    sys.exit(main())
