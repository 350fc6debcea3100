#!/usr/bin/env python3
"""Test converted decoder-only models: scores and searches must match transformers.

Usage: tests/python tests/convert/test_decoder.py [--only NAME]

Expected results come from decoder_numpy.py in float64, checkpoints from
make_decoder.py with fixed seeds. If ../shared/llm is available, its checkpoints
are compared with its expected values. Prints `ok NAME` or `FAIL NAME` per test.
"""
import argparse
import collections
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from unittest import mock

from converting import ROOT, TRANSLATE, convert_quietly, run
from suite import Skip, Suite

TOLERANCE = 2e-4  # maximum error of a token's log-probability
MARGIN = 1e-5  # least margin of a choice that rounding must not change
SHARED = os.path.join(ROOT, "..", "shared", "llm")
EMULATED = os.path.join(ROOT, os.environ.get("BUILD", "build"), "moe-translate-emulated")
try:
    import numpy as np

    import decoder_numpy
    import make_decoder as make
    import moefile
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
PROMPTS, LIMIT = 16, 8


def line(ids):
    return " ".join(map(str, ids))


def convert(source, model, *options):
    with contextlib.redirect_stderr(io.StringIO()):
        return convert_quietly("--from", "hf", source, "-o", model, "--type", "f32", *options)


@contextlib.contextmanager
def converted(family, *options, **changes):
    """Convert a random checkpoint of a family; yield (model file, config of the checkpoint, its arrays)."""
    with tempfile.TemporaryDirectory() as at:
        config, arrays = make.make(at, family, **changes)
        model = os.path.join(at, "converted")
        complaint = convert(at, model, *options)
        assert complaint is None, (family, complaint)
        yield model, config, arrays


def translate(model, lines, *options, program=TRANSLATE):
    result = run([program, "-m", model, "--ids", "--json", *options], lines)
    return [json.loads(x) for x in result.lines]


EXACT = "--kv-bits", "32"  # cache keys and values in float32, because the reference does not round them


def limits(limit):
    return "--max-len-factor", "0", "--max-len-offset", str(limit)


def searches(model, sources, beam, early, limit=LIMIT, *options):
    """Translate with a beam; return the hypotheses of each source, [[(ids without end, score, finished)]]."""
    found = translate(model, [line(s) for s in sources], "--beam", str(beam), "--nbest", str(beam),
                      f"--early-stopping={early}", *limits(limit), *EXACT, *options)
    return [[(h["ids"], h["score"], h["finished"]) for h in x.get("nbest", [x])] for x in found]


def scores(model, pairs, *options, exact=EXACT):
    """Score pairs of ids; return the log-probabilities of each target's tokens, including the end."""
    lines = [f"{line(s)}\t{line(t)}" for s, t in pairs]
    return [x["token_logprobs"] for x in translate(model, lines, "--score", *exact, *options)]


def close(found, wanted):
    return max(abs(x - y) for x, y in zip(found, wanted, strict=True)) < TOLERANCE


def assert_found(found, wanted, where):
    """Compare hypotheses with `wanted`, (ids including the end, score, finished)."""
    wanted = [(ids[:-1] if ended else ids, score, ended) for ids, score, ended in wanted]
    assert [(ids, ended) for ids, _, ended in found] == [(ids, ended) for ids, _, ended in wanted], (where, found,
                                                                                                   wanted)
    assert close([score for _, score, _ in found], [score for _, score, _ in wanted]), (where, found, wanted)


# ---- Arithmetic and search -------------------------------------------------------------------------------------------

TARGETS = [5 + 7 * i % 80 for i in range(6)]


@numpy_test
def scores_match_the_reference():
    for family in make.FAMILIES:
        with converted(family) as (model, config, arrays):
            reference = decoder_numpy.Decoder(config, arrays)
            sources = [make.prompt(i) for i in range(PROMPTS)]
            for got, source in zip(scores(model, [(s, TARGETS) for s in sources]), sources, strict=True):
                assert close(got, reference.score(source, TARGETS + [2])), (family, source)


@oracle_test
def the_reference_matches_transformers():
    """transformers 4.57.6 lacks hy_v3, for which ../shared/llm has values of 5.24.0, and DELTA_FAMILIES, which were
    compared with 5.24.0 once (README.md)."""
    for family in set(make.FAMILIES) - {"hy_v3", *make.DELTA_FAMILIES}:
        with tempfile.TemporaryDirectory() as at:
            config, arrays = make.make(at, family)
            model = transformers.AutoModelForCausalLM.from_pretrained(at, dtype=torch.float64,
                                                                      attn_implementation="eager").eval()
        for i in range(PROMPTS):
            source = make.prompt(i)
            with torch.no_grad():
                wanted = torch.log_softmax(model(torch.tensor([source])).logits[0], -1).numpy()
            # transformers computes norms, rotations and router probabilities in float32
            found = decoder_numpy.Decoder(config, arrays).logprobs(source)
            assert abs(found - wanted).max() < 2e-5, (family, i, abs(found - wanted).max())


@numpy_test
def a_window_limits_positions():
    with converted("mistral", sliding_window=40) as (model, config, arrays):
        assert moefile.read(model)[0]["rotary.positions"] == 40
        source = make.prompt(0)[:20]
        found, = scores(model, [(source, TARGETS)])
        assert close(found, decoder_numpy.Decoder(config, arrays).score(source, TARGETS + [2]))
    with converted("mistral", sliding_window=None) as (model, _, _):
        assert moefile.read(model)[0]["rotary.positions"] == 128


@numpy_test
def vision_tensors_are_skipped():
    """Gemma3ForConditionalGeneration: text_config and tensors under two prefixes give the text model's file."""
    with tempfile.TemporaryDirectory() as at:
        os.mkdir(at + "/text"), os.mkdir(at + "/pictures")
        config, _ = make.make(at + "/text", "gemma3_text", num_attention_heads=8, num_key_value_heads=4)
        assert convert(at + "/text", at + "/text.bin") is None
        arrays = make.arrays_of(config, 5)
        more = {f"{x}.embeddings.patch_embedding.weight": np.zeros((3, 4, 5), np.float32)
                for x in ("vision_tower.vision_model", "multi_modal_projector", "model.vision_tower")}
        left_out = "architectures", "eos_token_id", "num_attention_heads", "num_key_value_heads"  # 8 and 4 by default
        inner = {key: x for key, x in config.items() if key not in left_out}
        whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner,
                 "vision_config": {"hidden_size": 5}, "eos_token_id": 2, "image_token_index": 7}
        for prefix in "language_model.model.", "model.language_model.":
            make.write(at + "/pictures", whole, {**{name.replace("model.", prefix, 1): x for name, x in arrays.items()},
                                                 **more}, {**make.GENERATION, "eos_token_id": 2})
            with contextlib.redirect_stderr(io.StringIO()) as said:
                assert convert_quietly("--from", "hf", at + "/pictures", "-o", at + "/p.bin", "--type", "f32") is None
            assert "skipping 3 vision tensors" in said.getvalue()
            (meta, tensors), (other, same) = moefile.read(at + "/p.bin"), moefile.read(at + "/text.bin")
            assert {**meta, "general.name": ""} == {**other, "general.name": ""}
            assert {name: t.data for name, t in tensors.items()} == {name: t.data for name, t in same.items()}
        for key, value in ("model_type", "gemma2"), ("layer_types", ["chunked_attention"] * 4), \
                ("rope_parameters", {"full_attention": {"rope_theta": 1e6}}), ("query_pre_attn_scalar", 0), \
                ("final_logit_softcapping", 30.0), ("hidden_activation", "gelu"), ("sliding_window", 0):
            make.write(at + "/pictures", {**whole, "text_config": {**inner, key: value}}, arrays)
            complaint = convert(at + "/pictures", at + "/no.bin")
            assert complaint and ("text_config" if key == "model_type" else key) in complaint, (key, complaint)


@numpy_test
def published_qwen_3_5_gives_the_text_models_file():
    """Qwen3_5ForConditionalGeneration: vision tensors and those that predict further tokens are skipped."""
    for family in make.QWEN_3_5:
        with tempfile.TemporaryDirectory() as at:
            os.mkdir(at + "/text"), os.mkdir(at + "/whole")
            make.make(at + "/text", family, vocab_size=448)
            make.make_multimodal(at + "/whole", family)
            assert convert(at + "/text", at + "/text.bin") is None
            with contextlib.redirect_stderr(io.StringIO()) as said:
                assert convert_quietly("--from", "hf", at + "/whole", "-o", at + "/w.bin", "--type", "f32") is None
            for note in "skipping 1 vision tensors", "skipping 2 tensors that predict further tokens":
                assert note in said.getvalue(), said.getvalue()
            (meta, tensors), (other, same) = moefile.read(at + "/w.bin"), moefile.read(at + "/text.bin")
            assert {**meta, "general.name": ""} == {**other, "general.name": ""}
            assert {name: t.data for name, t in tensors.items()} == {name: t.data for name, t in same.items()}


WIDE = {"hidden_size": 640, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 512,
        "intermediate_size": 2048, "query_pre_attn_scalar": 256, "rope_local_base_freq": 1e4, "sliding_window": 16,
        "num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}


@oracle_test
def wide_gemma_is_as_exact_as_transformers_in_float32():
    """Layers of the widths of Gemma 3 270M, with random weights. Log-probabilities reach -480, so float32 alone loses
    more than 2e-5: transformers in float32 is off by 1.7e-4, the engine by 7e-5. The limit is three times transformers'."""
    with converted("gemma3_text", **WIDE) as (model, config, arrays):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(os.path.dirname(model), dtype=torch.float32,
                                                                   attn_implementation="eager").eval()
        reference, found = decoder_numpy.Decoder(config, arrays), []
        for seed in range(3):
            ids = [1, *map(int, np.random.default_rng(seed).integers(5, WIDE["vocab_size"], 40))]
            at = np.arange(len(ids)), np.array([*ids[1:], 2])
            wanted = reference.logprobs(ids)[at]
            with torch.no_grad():
                other = torch.log_softmax(theirs(torch.tensor([ids])).logits[0].double(), -1).numpy()[at]
            own = np.array(scores(model, [(ids[:1], ids[1:])])[0])
            found.append((np.abs(own - wanted).max(), np.abs(other - wanted).max()))
        own, other = np.max(found, 0)
        assert own < max(2e-5, 3 * other), (own, other)


@numpy_test
def wrong_formulas_are_detected():
    """Check that the comparison with the reference would notice each of these errors."""
    wrong = {"hy_v3": ("side", "neighbours", "spread", "exchanged", "bias ignored", "bias in the weights", "scale",
                       "shared"),
             "hunyuan_v1_dense": ("side", "neighbours", "spread", "exchanged", "alpha"),
             "hunyuan_v1_moe": ("side", "neighbours", "spread", "exchanged", "alpha", "norm", "shared"),
             "qwen3_moe": ("side", "neighbours", "spread", "exchanged", "norm"),
             "llama": ("neighbours", "spread", "exchanged"), "qwen3": ("side", "neighbours", "spread", "exchanged"),
             "qwen2": ("neighbours", "spread", "exchanged", "unbiased"),
             "gemma3_text": ("side", "neighbours", "spread", "exchanged", "plus 1", "window", "local", "linear", "swish",
                             "query scale", "unscaled"),
             "qwen3_5_text": ("side", "neighbours", "spread", "exchanged", "plus 1", "ungated", "gate first",
                              "all turned", "shift", "reversed", "tiled", "long q", "no delta", "linear gate"),
             "qwen3_5_moe_text": ("norm", "shared", "whole shared", "tiled", "no delta"),
             "lara_mini": ("side", "neighbours", "spread", "exchanged", "norm", "shared", "window", "turned", "shift",
                           "reversed", "tiled", "long q", "no delta", "linear gate"),
             "mistral": ("neighbours", "spread", "exchanged"), "mixtral": ("neighbours", "spread", "exchanged", "norm"),
             "cohere": ("neighbours", "spread", "exchanged", "mean", "serial", "logit scale"),
             "cohere2": ("neighbours", "spread", "exchanged", "mean", "serial", "logit scale", "window", "turned")}
    assert sorted(wrong) == sorted(make.FAMILIES)
    for family, mistakes in wrong.items():
        with tempfile.TemporaryDirectory() as at:
            config, arrays = make.make(at, family)
        right, sources = decoder_numpy.Decoder(config, arrays), [make.prompt(i) for i in range(PROMPTS)]
        wanted = [right.score(s, TARGETS) for s in sources]
        for mistake in mistakes:
            reference = decoder_numpy.Decoder(config, arrays, (mistake,))
            off = sum(not close(reference.score(s, TARGETS), x) for s, x in zip(sources, wanted))
            assert off > PROMPTS // 2, (family, mistake, off)


@numpy_test
def llama_3_frequencies_match_the_reference():
    with converted("llama", rope_parameters=make.LLAMA_3) as (model, config, arrays):
        reference, other = (decoder_numpy.Decoder(config, arrays, wrong) for wrong in ((), ("llama3",)))
        slower = reference.frequency / other.frequency
        assert slower[0] == 1 and np.isclose(slower[-1], 1 / 8) and any(0.2 < x < 0.9 for x in slower), slower
        source = make.prompt(0)
        found, = scores(model, [(source, TARGETS)])
        assert close(found, reference.score(source, TARGETS + [2]))
        assert not close(found, other.score(source, TARGETS + [2]))


@numpy_test
def searches_match_the_reference():
    for family in make.FAMILIES:
        with converted(family) as (model, config, arrays):
            sure, ended = 0, 0
            for beam, early in (1, 0), (4, 0), (4, 1):
                sources = [make.prompt(i) for i in range(PROMPTS)]
                for got, source in zip(searches(model, sources, beam, early), sources, strict=True):
                    reference = decoder_numpy.Decoder(config, arrays)
                    wanted = reference.search(source, beam, LIMIT, make.ENDS[family], early)
                    if reference.margin < MARGIN:
                        continue
                    assert_found(got, wanted, (family, beam, early, source))
                    sure, ended = sure + 1, ended + sum(end for _, _, end in wanted)
            assert sure > PROMPTS and ended > PROMPTS // 4, (family, sure, ended)


@numpy_test
def repetition_penalties_match_the_reference():
    """Greedy search penalises logits, beam search log-probabilities; reported log-probabilities exclude the penalty."""
    for family in make.FAMILIES:
        with converted(family) as (model, config, arrays):
            reference, sources = decoder_numpy.Decoder(config, arrays), [make.prompt(i) for i in range(PROMPTS)]
            sure, moved = 0, 0
            for penalty in 1.05, 1.5, 0.8:
                options = f"--repetition-penalty={penalty}",
                greedy = translate(model, [line(s) for s in sources], "--beam", "1", *limits(LIMIT), *options, *EXACT)
                for got, source in zip(greedy, sources, strict=True):
                    reference.margin = np.inf
                    ids, logprobs = reference.greedy(source, LIMIT, make.ENDS[family], penalty)
                    if reference.margin < MARGIN:
                        continue
                    assert got["ids"] + [ids[-1]] * got["finished"] == ids, (family, penalty, source, got, ids)
                    assert close(got["token_logprobs"], logprobs), (family, penalty, source)
                    sure, moved = sure + 1, moved + (ids != reference.greedy(source, LIMIT, make.ENDS[family])[0])
                beam = searches(model, sources[:8], 4, 0, LIMIT, *options)
                for got, source in zip(beam, sources, strict=False):
                    reference.margin = np.inf
                    wanted = reference.search(source, 4, LIMIT, make.ENDS[family], 0, penalty)
                    if reference.margin >= MARGIN:
                        assert_found(got, wanted, (family, penalty, source))
                        sure += 1
            assert sure > 2 * PROMPTS and moved > PROMPTS // 2, (family, sure, moved)


SAMPLING = ({}, {"temperature": 0.7}, {"top_k": 3}, {"temperature": 1.5, "top_p": 0.6}, {"min_p": 0.3},
            {"penalty": 1.3}, {"temperature": 0.7, "top_k": 20, "top_p": 0.6, "penalty": 1.05},
            {"top_k": 9, "top_p": 0.9, "min_p": 0.1})


def sampling_options(seed, how):
    """Return options of moe-translate that override the model's recommendations."""
    told = {"sample": 1, "temperature": 1, "top_k": 0, "top_p": 1, "repetition_penalty": 1, "seed": seed,
            **{key: value for key, value in how.items() if key != "penalty"}}
    told["repetition_penalty"] = how.get("penalty", 1)
    return [f"--{name.replace('_', '-')}={value}" for name, value in told.items()]


@numpy_test
def samples_match_the_reference():
    """Compare samples for many seeds unless rounding could change them. llama's vocabulary fills several chunks."""
    for family in make.FAMILIES:
        with converted(family, **({"vocab_size": 2500} if family == "llama" else {})) as (model, config, arrays):
            reference, sources = decoder_numpy.Decoder(config, arrays), [make.prompt(i) for i in range(PROMPTS)]
            sure, others = 0, set()
            for seed, how in enumerate(SAMPLING if family == "llama" else 2 * SAMPLING):
                options = *limits(LIMIT), *sampling_options(seed, how), *EXACT
                found = translate(model, [line(s) for s in sources], *options)
                for got, source in zip(found, sources, strict=True):
                    reference.margin = np.inf
                    ids, logprobs = reference.sample(source, LIMIT, make.ENDS[family], seed, **how)
                    if reference.margin < MARGIN:
                        continue
                    assert got["ids"] + ids[-1:] * got["finished"] == ids, (family, seed, how, source, got, ids)
                    assert close(got["token_logprobs"], logprobs), (family, seed, how, source)
                    sure += 1
                    others.add((tuple(source), tuple(ids)))
            assert sure > 6 * PROMPTS and len(others) > 5 * PROMPTS, (family, sure, len(others))


@numpy_test
def sampling_must_be_requested():
    """Sampling from one token or with temperature 0 equals greedy search. Sampling with a beam is rejected."""
    with converted("qwen3_moe") as (model, _, _):
        lines = [line(make.prompt(i)) for i in range(PROMPTS)]
        greedy = run([TRANSLATE, "-m", model, "--ids", "--json", "--beam", "1", *limits(LIMIT)], lines).stdout
        for options in ("--top-k=1", "--repetition-penalty=1"), ("--temperature=0", "--seed=3"), \
                ("--sample=0", "--top-p=0.5"), ("--top-p=0", "--repetition-penalty=1"), \
                ("--min-p=1", "--repetition-penalty=1"):
            assert run([TRANSLATE, "-m", model, "--ids", "--json", "--beam", "1", *limits(LIMIT), *options],
                       lines).stdout == greedy, options
        refused = run([TRANSLATE, "-m", model, "--ids", "--temperature=1", "--beam=2"], lines, 2)
        assert "beam of 2" in refused.stderr, refused.stderr


def loop(ids, source, given=0):
    """Return the length of the loop at the end of the ids, or 0 if absent; ignore the first `given` ids."""
    most = max((len(run) for p in range(1, 129) for run in "".join(
        "x" if a == b else " " for a, b in zip(source, source[p:])).split()), default=0)
    for p in range(1, 129):
        run = next((i for i, (a, b) in enumerate(zip(ids[::-1], ids[::-1][p:])) if a != b), len(ids) - p)
        run = min(run, len(ids) - given)
        if run >= max(3 * p, 60, 2 * most + 1):
            return run
    return 0


@numpy_test
def loops_are_retried_with_a_penalty():
    """The search resumes at the start of a loop up to twice, then ends there and reports the loop. Prompt
    tokens have no penalty. Large embeddings, which are also the output layer, make this model repeat tokens."""
    limit, seen, true = 220, collections.Counter(), make.arrays_of

    def repeating(*about):
        arrays = true(*about)
        return {**arrays, "model.embed_tokens.weight": make.bf16(4 * arrays["model.embed_tokens.weight"])}
    with mock.patch.object(make, "arrays_of", repeating), \
            converted("llama", max_position_embeddings=512) as (model, config, arrays):
        reference, sources = decoder_numpy.Decoder(config, arrays), [make.prompt(i) for i in range(8)]
        options = "--beam", "1", "--min-target", str(limit - 5), *limits(limit), *EXACT
        free = translate(model, [line(s) for s in sources], *options, "--stop-loops=0")
        found = translate(model, [line(s) for s in sources], *options)
        for got, plain, source in zip(found, free, sources, strict=True):
            wanted, tries, given, reference.margin = plain["ids"], 0, 0, np.inf
            run = next((n for n in range(1, limit) if loop(wanted[:n], source)), None)
            wanted = wanted[:run]
            while run := loop(wanted, source, given) if len(wanted) < limit else 0:
                wanted, given = wanted[:-run], len(wanted) - run
                if tries == 2:
                    break
                wanted, _ = reference.greedy(source, limit, make.ENDS["llama"], (1.1, 1.3)[tries], len(source),
                                           lambda ids: loop(ids, source, given), limit - 5, wanted)
                tries += 1
            if reference.margin < MARGIN:
                continue
            assert got["ids"] == wanted[:len(wanted) - (wanted[-1] in make.ENDS["llama"])], (source, got, wanted)
            assert got.get("looped", False) == bool(run) == ("repeat itself" in str(got)), (got, run)
            assert tries or got == plain
            seen[tries, bool(run)] += 1
        assert {(1, False), (2, False), (2, True)} <= set(seen), seen


@numpy_test
def recommended_sampling_settings_are_stored():
    """Sampling uses the model's recommended settings unless overridden; moe-info shows the settings."""
    with converted("llama") as (model, _, _):
        lines = [line(make.prompt(i)) for i in range(PROMPTS)]
        meta = moefile.read_meta(model)
        found = {key: meta[f"sample.{key}"] for key in ("temperature", "top_k", "top_p", "repetition_penalty")}
        assert found == {"temperature": 0.7, "top_k": 0, "top_p": 0.6, "repetition_penalty": 1.05}, found
        shown = run([os.path.join(os.path.dirname(TRANSLATE), "moe-info"), model]).stdout
        assert "--sample 1" in shown and "repetition_penalty 1.05" in " ".join(shown.split()), shown

        def output(*options):
            return run([TRANSLATE, "-m", model, "--ids", "--json", *limits(LIMIT), *options], lines).stdout
        told = [f"--{key.replace('_', '-')}={value}" for key, value in found.items()]
        assert output("--sample=1") == output("--seed=0") == output("--sample=1", *told)
        for option in told:
            name = option.split("=")[0]
            other = {"--temperature": 2, "--top-k": 1, "--top-p": 1, "--repetition-penalty": 2}[name]
            assert output("--sample=1", f"{name}={other}") != output("--sample=1"), name


def routed(model, sources):
    """Translate sources with --routing; return {(line, layer, position): [(expert, weight)]}."""
    with tempfile.TemporaryDirectory() as at:
        path = os.path.join(at, "routing")
        translate(model, [line(s) for s in sources], "--routing", path, *limits(2), "--beam", "1", *EXACT)
        with open(path, encoding="utf-8") as file:
            rows = [row for row in map(json.loads, file) if "line" in row]
    return {(row["line"], row["layer"], row["position"]): list(zip(row["experts"], row["weights"])) for row in rows}


@numpy_test
def experts_match_the_reference():
    for family in "hy_v3", "qwen3_moe", "qwen3_5_moe_text", "lara_mini":
        with converted(family) as (model, config, arrays):
            sources = [make.prompt(i) for i in range(8)]
            found = routed(model, sources)
            for number, source in enumerate(sources, 1):
                reference = decoder_numpy.Decoder(config, arrays)
                reference.logprobs(source)
                layers = sorted({layer for _, layer, _ in found})
                for layer, rows in zip(layers, reference.experts, strict=True):
                    for position, wanted in enumerate(rows):
                        got = found[number, layer, position]
                        scale = config.get("router_scaling_factor", 1.0)
                        assert [e for e, _ in got] == [e for e, _ in wanted], (family, source, layer, position)
                        assert close([w * scale for _, w in got], [w for _, w in wanted])


@numpy_test
def cached_keys_and_values_match_the_reference():
    """With F16 and Q8 caches, scores are much closer to a reference with the same rounding than to the others. The
    scores differ slightly, because values halfway between two codes may be rounded either way."""
    pairs = [(make.prompt(i), TARGETS) for i in range(PROMPTS)]
    for family in make.FAMILIES:
        with converted(family) as (model, config, arrays):
            def distance(found, *reference):
                return np.mean([np.abs(np.subtract(got, wanted)).mean() for got, wanted in zip(found, reference)])

            def reference(bits, *wrong):
                return [decoder_numpy.Decoder(config, arrays, wrong, bits).score(s, t + [2]) for s, t in pairs]
            right = {bits: reference(bits) for bits in (8, 16, 32)}
            for bits in (8,) if family in make.DELTA_FAMILIES else (8, 16):  # F16 hardly matters to few layers
                found = scores(model, pairs, exact=("--kv-bits", str(bits)))
                others = [right[x] for x in right if x != bits] + [reference(bits, "own")]
                if bits == 8:
                    others.append(reference(bits, "one scale"))
                off = distance(found, *right[bits])
                assert off < 0.2 * min(distance(found, *x) for x in others), (family, bits, off)


@numpy_test
def results_do_not_depend_on_batch_threads_instructions_or_device():
    for family in make.FAMILIES:
        for kind, bits, search in ("f32", "16", ()), ("q8", "8", ("--repetition-penalty=1.3",)), ("q4", "32", ()), \
                ("f32", "16", ("--beam", "1", "--repetition-penalty=1.3")), \
                ("q8", "16", ("--beam", "1", "--temperature=0.9", "--top-p=0.9", "--top-k=40", "--min-p=0.01",
                              "--seed=7", "--repetition-penalty=1.1")):
            with converted(family, "--type", kind) as (model, _, _):
                sources = [line(make.prompt(i)) for i in range(9)] + [line(range(5, 65))]
                options = (*(() if "--beam" in search else ("--beam", "4", "--nbest", "2")), *limits(8), *search,
                           "--kv-bits", bits)
                wanted = run([TRANSLATE, "-m", model, "--ids", "--json", *options], sources).stdout
                for more in ("--batch", "1"), ("--batch", "7", "--threads", "2"), ("--batch", "32", "--threads", "3"), \
                        ("--isa", "portable"), ("--piece", "1"), ("--piece", "16", "--batch", "7", "--threads", "2"), \
                        ("--piece", "512", "--batch", "1", "--threads", "3"), ("--isa", "portable", "--piece", "3"):
                    got = run([TRANSLATE, "-m", model, "--ids", "--json", *options, *more], sources).stdout
                    assert got == wanted, (family, kind, more)
                if not os.path.exists(EMULATED):
                    continue
                if family in make.DELTA_FAMILIES:
                    refused = run([EMULATED, "-m", model, "--ids", *options, "--device", "cuda"], sources, status=2)
                    assert "a model with Gated DeltaNet is only supported on device cpu" in refused.stderr, refused
                    continue
                for more in (), ("--piece", "16", "--batch", "3"):
                    got = run([EMULATED, "-m", model, "--ids", "--json", *options, "--device", "cuda", *more],
                              sources).stdout
                    assert got == wanted, (family, kind, bits, more, "device")


@numpy_test
def scales_by_block_give_the_same_bytes_everywhere():
    """Rows of 200 and 600 columns end with a partial block. Without activation.block, a row has a single scale."""
    sizes = {"hidden_size": 200, "moe_intermediate_size": 600, "intermediate_size": 136}
    pairs = [(make.prompt(i), TARGETS) for i in range(7)]
    texts = [f"{line(s)}\t{line(t)}" for s, t in pairs]
    for kind in "q8", "q8b", "q4":
        with converted("hy_v3", "--type", kind, **sizes) as (model, _, _):
            options = "-m", model, "--ids", "--json", "--score"
            wanted = run([TRANSLATE, *options], texts).stdout
            for more in ("--batch", "1"), ("--batch", "5", "--threads", "3"), ("--isa", "portable"):
                assert run([TRANSLATE, *options, *more], texts).stdout == wanted, (kind, more)
            if os.path.exists(EMULATED):
                assert run([EMULATED, *options, "--device", "cuda"], texts).stdout == wanted, (kind, "device")
            blocks, (meta, tensors) = scores(model, pairs), moefile.read(model)
            assert meta.pop("activation.block") == 64
            moefile.write_model(model, meta, tensors)
            rows = scores(model, pairs)
            differences = [abs(x - y) for a, b in zip(rows, blocks) for x, y in zip(a, b)]
            assert rows != blocks and sum(differences) / len(differences) < 0.3, (kind, differences)
            moefile.write_model(model, {**meta, "activation.block": 32}, tensors)
            assert "activation.block" in run([TRANSLATE, "-m", model, "--ids"], ["1 5"], status=3).stderr


@numpy_test
def a_limited_context_does_not_change_results():
    """The 1 MB cache holds 1,808 tokens, so sentences wait until others release some; a request that needs more than
    the whole cache is rejected."""
    with converted("hy_v3", "--type", "q8") as (model, _, _):
        sources = [line(range(5, 5 + 3 * i % 60)) for i in range(1, 60)]
        for search in ("--beam", "8"), ("--temperature=1.1", "--seed=3", "--top-p=0.95"):
            options = ("--ids", "--json", *search, "--kv-bits", "32", *limits(64))
            wanted = run([TRANSLATE, "-m", model, *options], sources).stdout
            for more in ("--piece", "512"), ("--piece", "7", "--threads", "2"), ("--batch", "7"), ("--batch", "59"):
                got = run([TRANSLATE, "-m", model, *options, *more, "--context-memory", "1"], sources)
                assert got.stdout == wanted, (search, more)
        options = ("--ids", "--json", "--kv-bits", "32", *limits(64))
        large = run([TRANSLATE, "-m", model, *options, "--beam", "29", "--context-memory", "1"],
                    [line([5, 6]), line([5])], status=1)
        assert "for 1858 tokens, but context_memory holds 1808" in large.stderr, large.stderr
        fits = run([TRANSLATE, "-m", model, *options, "--beam", "28", "--context-memory", "1"], [line([5, 6])])
        assert len(fits.lines) == 1


@numpy_test
def prompts_may_fill_the_models_positions():
    """limit.source (512) limits neither prompts nor the memory of a batch. Error messages state the fix."""
    with converted("llama", max_position_embeddings=4096) as (model, _, _):
        long, short = [5 + i % 90 for i in range(3584)], [5, 6, 7]
        wanted = translate(model, [line(long), line(short)], *limits(20), "--context-memory", "64", "--batch", "1")
        for batch in "4", "32":
            found = translate(model, [line(long), line(short)], *limits(20), "--batch", batch)
            assert [(x["ids"], x["token_logprobs"]) for x in found] == [(x["ids"], x["token_logprobs"]) for x in wanted], batch
        refused = run([TRANSLATE, "-m", model, "--ids", "--batch", "1", *limits(20)], [line(long)], status=1).stderr
        mb = int(re.search(r"for 3604 tokens, but context_memory holds 1024; raise it to (\d+) MB", refused)[1])
        run([TRANSLATE, "-m", model, "--ids", "--batch", "1", *limits(20), "--context-memory", str(mb)], [line(long)])
        refused = run([TRANSLATE, "-m", model, "--ids"], [line(long + [5])], status=1).stderr
        assert "3585 tokens, but the limit is 3584" in refused and "share the model's positions" in refused, refused
        longer = run([TRANSLATE, "-m", model, "--ids", "--max-len", "1000", *limits(900)], [line(long[:3096])], status=0)
        assert len(longer.lines) == 1


def rows_run(stderr):
    """Return the number of rows in all decoder steps, as printed by --stats."""
    steps, rows = re.search(r"decoder steps +(\d+), ([\d.]+) rows each", stderr).groups()
    return int(steps) * float(rows)


@numpy_test
def shared_prefixes_do_not_change_results():
    """Prompts with 0 to 50 leading tokens in common share the computation of these tokens. Results must equal
    those of runs with a single line, which have nothing to share, for any order, type of keys and values, beam, and
    batch. Equal tokens after different prefixes are not shared."""
    long, other = [5 + 7 * i % 80 for i in range(60)], [6 + 11 * i % 80 for i in range(60)]
    sources = [(beginning[:n] + [5 + n, 9, 5 + n]) for n in (0, 14, 15, 16, 17, 31, 32, 33, 42, 47)
               for beginning in (long, other)]
    sources = sources + sources[::-1] + sources[::3]
    sources += [[i] * 16 + after[16:34] for i in range(5, 35) for after in (long, other)]
    for family in make.FAMILIES:
        with converted(family, "--type", "q8") as (model, _, _):
            for bits, beam, how in ("16", "1", ()), ("8", "3", ()), ("32", "1", ("--score",)), \
                    ("16", "1", ("--temperature=1.1", "--seed=3", "--repetition-penalty=1.1")):
                options = "-m", model, "--ids", "--beam", beam, "--kv-bits", bits, *how, *limits(8)
                lines = [f"{line(x)}\t{line(TARGETS)}" if "--score" in how else line(x) for x in sources]
                alone = {x: run([TRANSLATE, *options], [x]).stdout for x in lines}
                wanted = "".join(alone[x] for x in lines)
                for more in ("--batch", "1"), ("--batch", "7", "--threads", "2"), ("--batch", "64"), \
                        ("--batch", "32", "--piece", "1"), ("--piece", "16"), ("--piece", "512", "--threads", "3"), \
                        ("--batch", "40", "--context-memory", "1"), ("--batch", "16", "--isa", "portable"):
                    got = run([TRANSLATE, *options, *more, "--stats"], lines)
                    assert got.stdout == wanted, (family, bits, beam, how, more)
                    saved = 1 - rows_run(got.stderr) / sum(len(x) + 8 for x in sources)
                    assert beam != "1" or more == ("--batch", "1") or 0.1 < saved < 0.8, (family, bits, more, saved)


@numpy_test
def both_naming_schemes_and_shards_give_the_same_file():
    with tempfile.TemporaryDirectory() as at:
        files = []
        for n, (second, shards) in enumerate(((False, 1), (True, 1), (True, 3))):
            folder, model = os.path.join(at, str(n), "same"), os.path.join(at, f"model-{n}")
            os.makedirs(folder)
            make.make(folder, "hy_v3", second=second, shards=shards)
            assert convert(folder, model, "--type", "q8", "--experts", "q4") is None
            with open(model, "rb") as file:
                files.append(file.read())
        assert files[0] == files[1] == files[2]


# ---- Text ------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def with_tokeniser(family, *options, **changes):
    """Convert a checkpoint with a tokeniser; yield (model file, results of `tokenizers` for texts)."""
    with tempfile.TemporaryDirectory() as at:
        make.make(at, family, vocab_size=448, **changes)
        cases, model = make.write_tokeniser(at), os.path.join(at, "converted")
        complaint = convert(at, model, *options)
        assert complaint is None, (family, complaint)
        yield model, cases


@numpy_test
def model_files_contain_the_tokeniser_of_the_folder():
    with with_tokeniser("hunyuan_v1_dense") as (model, cases):
        cases = [c for c in cases if c["text"].strip() and not set("\n\r\0") & set(c["text"]) and len(c["ids"]) < 60]
        texts = run([TRANSLATE, "-m", model, "--json", *limits(LIMIT)], [c["text"] for c in cases]).lines
        ids = translate(model, [line(c.get("plain", c["ids"])) for c in cases], *limits(LIMIT))
        assert len(cases) > 40
        for case, text, wanted in zip(cases, texts, ids, strict=True):
            found = json.loads(text)
            assert (found["ids"], found["score"]) == (wanted["ids"], wanted["score"]), case["text"]


@numpy_test
def mismatched_tokenisers_are_rejected():
    with tempfile.TemporaryDirectory() as at:
        make.make(at, "hy_v3", vocab_size=424)
        make.write_tokeniser(at)
        complaint = convert(at, os.path.join(at, "converted"))
        assert complaint and "tokenizer.json" in complaint and "424" in complaint, complaint
        os.rename(at + "/tokenizer.json", at + "/vocab.json")
        complaint = convert(at, os.path.join(at, "converted"))
        assert "tokenizer.json is missing; found only vocab.json" in complaint and "--ids-only" in complaint
        assert convert(at, os.path.join(at, "converted"), "--ids-only") is None


@numpy_test
def defaults_are_q8b_for_matrices_and_q4_for_experts():
    for options, wanted in (((), (moefile.Q8B, moefile.Q4)), (("--type", "f16"), (moefile.F16, moefile.F16)),
                            (("--experts", "q8"), (moefile.Q8B, moefile.Q8))):
        with tempfile.TemporaryDirectory() as at, contextlib.redirect_stderr(io.StringIO()):
            make.make(at, "qwen3_moe")
            assert convert_quietly("--from", "hf", at, "-o", at + "/converted", *options) is None
            tensors = moefile.read(at + "/converted")[1]
            found = tensors["decoder.0.out.weight"].type, tensors["decoder.1.experts"].type
            assert found == wanted and tensors["decoder.1.gate.weight"].type == moefile.F32, (options, found)


@numpy_test
def a_full_disk_is_detected_in_advance():
    room = collections.namedtuple("Room", "free")
    with tempfile.TemporaryDirectory() as at:
        make.make(at, "llama")
        with mock.patch("shutil.disk_usage", lambda folder: room(5000)):
            complaint = convert(at, at + "/converted")
        assert complaint and "only 5,000 are free" in complaint, complaint
        assert not [x for x in os.listdir(at) if x.startswith("converted")]


@numpy_test
def interrupted_conversions_can_be_resumed():
    for family, shards in ("hy_v3", 1), ("qwen3_moe", 2):
        with tempfile.TemporaryDirectory() as at:
            make.make(at, family, shards=shards)
            out, encode, done = os.path.join(at, "converted"), moefile.encode_blob, []

            def stopping(w, kind):
                done.append(kind)
                if len(done) == 12:
                    raise KeyboardInterrupt
                return encode(w, kind)
            assert convert(at, out, "--experts", "q4") is None
            with open(out, "rb") as file:
                whole = file.read()
            os.unlink(out)
            with mock.patch("moefile.encode_blob", stopping):
                assert convert(at, out, "--experts", "q4", "--resume") == "130", family
            assert sorted(x for x in os.listdir(at) if x.startswith("conv")) == ["converted.partial",
                                                                              "converted.partial.log"]
            left = []
            with mock.patch("moefile.encode_blob", lambda w, kind: left.append(kind) or encode(w, kind)):
                complaint = convert(at, out, "--experts", "q4", "--resume")
            assert complaint is None, complaint
            with open(out, "rb") as file:
                assert file.read() == whole, family
            with mock.patch("moefile.encode_blob", lambda w, kind: done.append(kind) or encode(w, kind)):
                done.clear()
                assert convert(at, out, "--experts", "q4") is None
            assert len(left) < len(done) - 5, (family, len(left), len(done))


@numpy_test
def large_matrices_are_converted_in_blocks():
    """Convert an embedding as large as Hy-MT2-30B-A3B's with less memory than its size in float32 (990 MB)."""
    if not os.path.exists("/proc/self/status"):
        raise Skip("no /proc here")
    config = {**make.CONFIGS["llama"], "vocab_size": 120832, "hidden_size": 2048, "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as at:
        make.write_zeros(at, config)
        program = os.path.join(ROOT, "tools", "convert", "convert.py")
        process = subprocess.Popen([sys.executable, program, "--from", "hf", at, "-o", at + "/out", "--ids-only"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        peak = 0
        while process.poll() is None:
            with open(f"/proc/{process.pid}/status", encoding="ascii") as file:
                peak = max([peak, *(int(x.split()[1]) for x in file if x.startswith("RssAnon"))])
            time.sleep(0.005)
        assert process.returncode == 0 and os.path.getsize(at + "/out") > 120832 * 2048
        assert 20 << 10 < peak < 800 << 10, f"{peak >> 10} MB"


# ---- Rejected checkpoints --------------------------------------------------------------------------------------------

@numpy_test
def unknown_settings_are_rejected_by_name():
    cases = [("hy_v3", {"hidden_act": "gelu"}), ("hy_v3", {"qk_norm": False}), ("hy_v3", {"route_norm": False}),
             ("hy_v3", {"n_group": 4}), ("hy_v3", {"quantization_config": {"bits": 8}}),
             ("hunyuan_v1_dense", {"use_cla": True}), ("hunyuan_v1_dense", {"norm_type": "layer"}),
             ("hunyuan_v1_dense", {"num_experts": 4}), ("qwen3_moe", {"use_sliding_window": True}),
             ("qwen3_moe", {"attention_bias": True}), ("qwen3_moe", {"architectures": ["Qwen3MoeModel"]}),
             ("qwen3_moe", {"num_key_value_heads": 4}), ("qwen3_moe", {"head_dim": 13}),
             ("hy_v3", {"mlp_layer_types": ["dense"]}), ("hy_v3", {"expert_hidden_dim": 21}),
             ("hy_v3", {"model_type": ["x"]}), ("hy_v3", {"mlp_layer_types": [["dense"]] * 3}),
             ("llama", {"hidden_act": "gelu"}), ("llama", {"attention_bias": True}), ("llama", {"mlp_bias": True}),
             ("llama", {"pretraining_tp": 2}), ("llama", {"qk_norm": True}), ("llama", {"rope_interleaved": True}),
             ("llama", {"num_local_experts": 8}), ("llama", {"architectures": ["MistralForCausalLM"]}),
             ("llama", {"logit_scale": 0.5}), ("qwen3_moe", {"attention_multiplier": 2}), ("llama", {"prefix": "x"}),
             ("llama", {"partial_rotary_factor": 0.5}), ("hy_v3", {"position_embedding_xdrope": True}),
             ("hunyuan_v1_dense", {"use_mla": True}), ("llama", {"moe_layer_num_skipped": 1}),
             ("llama", {"bad_words_ids": [[3]]}), ("llama", {"min_length": 5}),
             ("qwen3_5_text", {"attn_output_gate": False}), ("qwen3_5_text", {"layer_types": [make.FULL]}),
             ("qwen3_5_text", {"layer_types": [make.SLIDING] * 3}), ("qwen3_5_text", {"linear_num_key_heads": 4}),
             ("qwen3_5_text", {"linear_conv_kernel_dim": 65}), ("qwen3_5_moe_text", {"mlp_only_layers": [1]}),
             ("qwen3_5_moe_text", {"norm_topk_prob": False}), ("lara_mini", {"sliding_window": 0})]
    ropes = [("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
             ("qwen3_moe", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
             ("hy_v3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}),
             ("hy_v3", {"rope_parameters": {"rope_type": ["default"], "rope_theta": 1e4}}),
             ("hy_v3", {"rope_parameters": make.LLAMA_3}), ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}),
             ("llama", {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}),
             ("llama", {"rope_parameters": {**make.LLAMA_3, "factor": None}}),
             ("llama", {"rope_parameters": {**make.LLAMA_3, "low_freq_factor": 4.0}}),
             ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
             ("llama", {"rope_parameters": {"rope_type": "default", "attention_factor": 2.0}}),
             ("llama", {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e6}),
             ("qwen3_5_text", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}),
             ("lara_mini", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}})]
    for family, changes in cases + ropes:
        with tempfile.TemporaryDirectory() as at:
            make.write(at, {**make.CONFIGS[family], **changes}, make.arrays_of(make.CONFIGS[family], 1))
            complaint = convert(at, os.path.join(at, "converted"))
            name = "rope" if "rope" in next(iter(changes)) else next(iter(changes))
            assert complaint and name in complaint, (family, changes, complaint)
            assert not os.path.exists(os.path.join(at, "converted"))


@numpy_test
def keys_without_effect_are_accepted():
    more = {"transformers_version": "5.0.0", "use_cache": True, "initializer_range": 0.02, "eod_token_id": 3,
            "auto_map": {"AutoConfig": "x.X"}, "sliding_window": 4096, "temperature": 1.0, "max_length": 20,
            "unsloth_version": "1", "attention_dropout": 0.1, "prefix": None, "unknown": None}
    for family in make.FAMILIES:
        with tempfile.TemporaryDirectory() as at:
            make.write(at, {**make.CONFIGS[family], **more}, make.arrays_of(make.CONFIGS[family], 1))
            assert convert(at, os.path.join(at, "converted")) is None, family


@numpy_test
def generation_settings_are_used_or_rejected_by_name():
    config = make.CONFIGS["llama"]
    for key, value, fine in (
            ("do_sample", True, True), ("max_new_tokens", 4096, True), ("renormalize_logits", True, True),
            ("typical_p", 1.0, True), ("pad_token_id", 3, True), ("cache_implementation", "static", True),
            ("top_k", 40, True), ("num_beams", 4, True), ("length_penalty", 2.0, True), ("new_key", None, True),
            ("typical_p", 0.9, False), ("epsilon_cutoff", 0.1, False), ("bad_words_ids", [[3]], False),
            ("suppress_tokens", [3], False), ("forced_eos_token_id", 2, False), ("forced_bos_token_id", 2, False),
            ("no_repeat_ngram_size", 3, False), ("min_new_tokens", 2, False), ("stop_strings", ["x"], False),
            ("exponential_decay_length_penalty", [1, 1.5], False), ("guidance_scale", 2.0, False), ("new_key", 1, False),
            ("early_stopping", "never", False), ("top_k", "many", False), ("eos_token_id", [999], False),
            ("max_new_tokens", 0, False), ("max_new_tokens", "5", False)):
        with tempfile.TemporaryDirectory() as at:
            make.write(at, config, make.arrays_of(config, 1), {"eos_token_id": 2, key: value})
            complaint = convert(at, os.path.join(at, "converted"))
            assert (complaint is None) == fine and (fine or key in complaint), (key, value, complaint)
    for wanted, limit, note in (7, 7, ""), (4096, 64, "max_new_tokens is 4096, but answers have up to 64 tokens"):
        with tempfile.TemporaryDirectory() as at:
            make.write(at, config, make.arrays_of(config, 1), {"eos_token_id": 2, "max_new_tokens": wanted})
            with contextlib.redirect_stderr(io.StringIO()) as said:
                complaint = convert_quietly("--from", "hf", at, "-o", at + "/converted")
            assert complaint is None and note in said.getvalue(), (wanted, complaint, said.getvalue())
            assert bool(note) == ("max_new_tokens" in said.getvalue())
            assert dict(moefile.read_meta(at + "/converted"))["decode.max_new"] == limit, wanted


@numpy_test
def answers_end_like_those_of_the_chat_template():
    with tempfile.TemporaryDirectory() as at:
        make.make(at, "llama", vocab_size=448)
        make.write_tokeniser(at, "smollm")
        template = "{% for m in messages %}<｜User｜>{{ m.content }}<｜end▁of｜>{% endfor %}"
        for text, eos, wanted in ((template, 420, [420, 421]), (template, [421, 420], [421, 420]), (None, 420, [420])):
            make.write_config(at, {**make.CONFIGS["llama"], "vocab_size": 448}, {"eos_token_id": eos})
            with open(os.path.join(at, "tokenizer_config.json"), "w", encoding="utf-8") as file:
                json.dump({"chat_template": text}, file)
            assert convert(at, os.path.join(at, "converted")) is None
            meta = moefile.read_meta(os.path.join(at, "converted"))
            assert [meta["token.eos"], *meta.get("token.ends", ())] == wanted, (eos, meta.get("token.ends"))


@numpy_test
def missing_and_extra_tensors_are_rejected():
    for family in make.FAMILIES:
        config = make.CONFIGS[family]
        arrays = make.arrays_of(config, 1)
        for name in {*list(arrays)[::7], *({"lm_head.weight"} & arrays.keys())}:
            for broken in ({k: v for k, v in arrays.items() if k != name}, {**arrays, name: arrays[name][:-1]},
                           {**arrays, "model.x" + name.removeprefix("model."): arrays[name]}):
                with tempfile.TemporaryDirectory() as at:
                    make.write(at, config, broken)
                    complaint = convert(at, os.path.join(at, "converted"))
                    assert complaint and "tensor " in complaint, (name, complaint)


@numpy_test
def tied_outputs_must_equal_the_embedding_and_later_layers_are_skipped():
    config = make.CONFIGS["hunyuan_v1_dense"]
    arrays = make.arrays_of(config, 1)
    embedding = arrays["model.embed_tokens.weight"]
    for head, fine in (embedding.copy(), True), (make.bf16(embedding + 1), False):
        with tempfile.TemporaryDirectory() as at:
            make.write(at, config, {**arrays, "lm_head.weight": head})
            complaint = convert(at, os.path.join(at, "converted"))
            assert (complaint is None) == fine and (fine or "lm_head" in complaint), complaint
    with tempfile.TemporaryDirectory() as at:
        make.write(at, config, {**arrays, "model.layers.3.eh_proj.weight": embedding})
        assert convert(at, os.path.join(at, "converted")) is None
        make.write(at, {**config, "num_hidden_layers": 2}, arrays)  # the last layer is an ordinary one
        complaint = convert(at, os.path.join(at, "other"))
        assert complaint and "num_hidden_layers is 2" in complaint and "model.layers.2." in complaint, complaint


@numpy_test
def positions_and_prompts_beyond_the_limits_are_rejected():
    with converted("hunyuan_v1_dense") as (model, config, _):
        assert moefile.read_meta(model)["rotary.positions"] == config["max_position_embeddings"]
        long = run([TRANSLATE, "-m", model, "--ids"], [line([1] * 65), line([1, 5])], status=1)
        assert "65 tokens, but the limit is 64" in long.stderr and len(long.lines) == 2 and long.lines[1], long
        more = run([TRANSLATE, "-m", model, "--ids", "--max-len", "100"], [line([1, 5])], status=2)
        assert "128 together" in more.stderr, more.stderr
        bits = run([TRANSLATE, "-m", model, "--ids", "--kv-bits", "24"], [line([1, 5])], status=2)
        assert "kv_bits is 24, but must be 8, 16 or 32" in bits.stderr, bits.stderr
    recurrent = os.path.join(ROOT, "models", "en-de-fr-es.bin")
    other = run([TRANSLATE, "-m", recurrent, "-t", "de", "--kv-bits", "16"], ["a"], status=2)
    assert "kv_bits must be 32" in other.stderr, other.stderr


@numpy_test
def inconsistent_model_files_are_rejected():
    changes = [{"decoder.2.kv_heads": 3}, {"decoder.2.head.size": 13}, {"decoder.2.heads": 5},
               {"decoder.2.kind": "cross"}, {"decoder.3.weights": "sigmoids"},
               {"decoder.3.gate": "softmax"}, {"decoder.3.expert": "mlp"},
               {"decoder.3.shared": 21}, {"decoder.3.hidden": 40}, {"token.ends": np.array([make.V])},
               {"token.ends": np.arange(8)}, {"token.ends": 3},
               "rotary.weight", "decoder.2.q_norm.weight", "decoder.3.shared.gate.weight", "decoder.3.experts",
               "decoder.3.experts.up_bias"]
    delta = [{"decoder.0.heads": 4}, {"decoder.0.key_heads": 4}, {"decoder.0.key.size": 9}, {"decoder.0.kernel": 3},
             {"decoder.0.kernel": 65}, {"decoder.0.head.size": 1 << 20}, {"decoder.0.key.size": 1 << 20},
             {"decoder.4.gated": 0}, {"decoder.4.head.size": 6}, "decoder.0.conv", "decoder.0.rate",
             "decoder.0.shift", "decoder.0.head_norm.weight", "decoder.0.in.weight", "rotary.weight"]
    for family, some in ("hy_v3", changes), ("qwen3_5_text", delta):
        assert_rejected(family, some)


def assert_rejected(family, changes):
    """Check that programs and moefile.py reject changes of a model file's metadata, or removed tensors."""
    with converted(family) as (model, _, _), tempfile.TemporaryDirectory() as folder:
        meta, tensors = moefile.read(model)
        path = os.path.join(folder, "broken")
        for change in changes:
            some = {k: t for k, t in tensors.items() if k != change}
            if isinstance(change, str) and change not in tensors:
                biases = meta["decoder.3.experts"] * meta["decoder.3.hidden"]
                some[change] = moefile.Tensor.encode(np.zeros(biases, np.float32))
            moefile.write_model(path, {**meta, **(change if isinstance(change, dict) else {})}, some)
            result = run([TRANSLATE, "-m", path, "--ids"], ["1 5"], status=3)
            name = change if isinstance(change, str) else next(iter(change))
            part = name.rpartition(".")[0]
            assert "decoder." in result.stderr or part in result.stderr, (change, result.stderr)
            try:
                moefile.read_model(path)
            except moefile.FormatError:
                continue
            assert False, change


# ---- ../shared/llm ---------------------------------------------------------------------------------------------------

def assert_experts(model, cases, scale):
    """Check that the last token of each prompt has the expected experts and weights."""
    cases = [c for c in cases if "experts" in c]
    found = routed(model, [c["source"] for c in cases])
    for number, case in enumerate(cases, 1):
        last = [found[key] for key in found if key[0] == number and key[2] == len(case["source"]) - 1]
        for got, wanted in zip(last, case["experts"].values(), strict=True):
            got, wanted = sorted(got), sorted(wanted)
            assert [e for e, _ in got] == [e for e, _ in wanted], case["source"]
            assert close([scale * w for _, w in got], [w for _, w in wanted]), case["source"]


def assert_first_samples(model, cases, end, seeds=150):
    """Check that first tokens are sampled in proportion to their probabilities, within five standard deviations."""
    cases = [c for c in cases if "sampling_first" in c]
    counts = [collections.Counter() for _ in cases]
    how = {"temperature": 0.7, "top_k": 20, "top_p": 0.6, "penalty": 1.05}
    for seed in range(seeds):
        found = translate(model, [line(c["source"]) for c in cases], *limits(1), *sampling_options(seed, how), *EXACT)
        for got, count in zip(found, counts, strict=True):
            count[got["ids"][0] if got["ids"] else end] += 1
    for case, count in zip(cases, counts):
        wanted = dict(case["sampling_first"])
        assert set(count) <= set(wanted), (case["source"], count)
        for token, p in wanted.items():
            assert abs(count[token] - seeds * p) < 5 * (seeds * p * (1 - p)) ** 0.5 + 0.01, (case["source"], count)


@numpy_test
def shared_checkpoints_match_transformers():
    if not os.path.isdir(SHARED):
        raise Skip("no ../shared/llm here")
    for name, expected in ("hy-v3", "hy-v3"), ("hy-v3-fused", "hy-v3"), ("hunyuan-dense",) * 2, ("qwen3-moe",) * 2:
        with open(os.path.join(SHARED, expected, "expected.json"), encoding="utf-8") as file:
            about = json.load(file)
        with open(os.path.join(SHARED, name, "config.json"), encoding="utf-8") as file:
            scale = json.load(file).get("router_scaling_factor", 1.0)
        cases = about["cases"]
        with tempfile.TemporaryDirectory() as at:
            model = os.path.join(at, "converted")
            assert convert(os.path.join(SHARED, name), model) is None, name
            assert_first_samples(model, cases, about["eos"][0])
            if any("experts" in c for c in cases):
                assert_experts(model, cases, scale)
            for got, case in zip(scores(model, [(c["source"], c["target"][:-1]) for c in cases]), cases, strict=True):
                assert close(got, case["target_logprobs"]), (name, case["source"])
            for kind, beam, early in ("greedy", 1, 0), ("beam4", 4, 0), ("beam4_early", 4, 1):
                for limit in {c["limit"] for c in cases}:
                    some = [c for c in cases if c["limit"] == limit]
                    found = searches(model, [c["source"] for c in some], beam, early, limit)
                    for got, case in zip(found, some, strict=True):
                        wanted = case[kind] if beam > 1 else [case[kind]]
                        wanted = [(h["ids"], h["score"] if beam > 1 else sum(h["logprobs"]) / len(h["logprobs"]),
                                   h["finished"]) for h in wanted]
                        assert_found(got, wanted, (name, kind, case["source"]))
            for case in cases:
                wanted = case["greedy_repetition_penalty"]
                [got] = translate(model, [line(case["source"])], "--beam", "1", "--repetition-penalty=1.05",
                                  *limits(case["limit"]), *EXACT)
                assert got["ids"] == wanted["ids"][:len(got["ids"])] and got["finished"] == wanted["finished"], case


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
