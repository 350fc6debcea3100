#!/usr/bin/env python3
"""Transformer checkpoints of Hugging Face's layout: read in NumPy, converted,
scored and searched as transformers would.

Usage: tests/python tests/convert/test_transformers.py [--only NAME]

Expectations are tests/golden/transformers.json, which make_transformers.py made
with transformer_numpy.py in float64; the checkpoints themselves are made again
from their seeds. Two tests compare the reading with transformers 4.57.6 (5.x
computes NLLB-MoE wrongly) and are skipped where it is not installed: `pip
install torch==2.13.0 transformers==4.57.6`. Prints `ok NAME` or `FAIL NAME` per
test.
"""
import argparse
import contextlib
import io
import json
import os
import sys
import tempfile

from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
try:
    import numpy as np

    import make_transformers as make
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


# ---- The reading itself ----------------------------------------------------------------------------------------------

@numpy_test
def the_reading_gives_what_is_stored():
    for family, cases in stored().items():
        with checkpoint(family) as folder:
            model = transformer_numpy.Transformer(folder)
        for i in (0, 1, 7, 20):  # the whole takes a minute: make_transformers.py --golden
            case = cases[i]
            target, o = ids(case["target"]), model.options({})
            logp = model.score(ids(case["source"]), target, o["bad_words"] if o["renormalize"] else ())
            assert np.allclose([logp[t, x] for t, x in enumerate(target)], case["logprobs"], rtol=0,
                               atol=2e-7), (family, i)
            found = model.beam(ids(case["source"]), 4, force=case["force"])
            assert [make.text(h.ids)
                    for h in found] == [x for x, _ in case["beams"]["4" + "e" * o["early_stopping"]]], (family, i)


@numpy_test
def steps_with_a_cache_are_what_a_whole_target_gives():
    for family in make.FAMILIES:
        with checkpoint(family) as folder:
            model = transformer_numpy.Transformer(folder)
        source, force, _ = make.case(family, 3)
        best = model.beam(source, 3, force=force, renormalize=False, bad_words=[], force_end=-1)[0]
        logp = [model.score(source, best.ids)[t, x] for t, x in enumerate(best.ids)]
        assert abs(sum(logp[force >= 0:]) - best.logprob) < 1e-9, family


# ---- transformers ----------------------------------------------------------------------------------------------------

def oracle(folder, family):
    """The model of transformers in float64, and the reading with its table of positions."""
    torch.set_num_threads(1)
    # NllbMoe's causal mask overflows otherwise
    torch.set_default_dtype(torch.float64 if family == "nllb-moe" else torch.float32)
    kind = {"nllb": transformers.M2M100ForConditionalGeneration,
            "nllb-moe": transformers.NllbMoeForConditionalGeneration}
    with contextlib.redirect_stderr(io.StringIO()):
        model = kind.get(family, transformers.MarianMTModel).from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager").eval()
    for module in model.modules():
        if type(module).__name__ == "NllbMoeTop2Router":
            module.dtype = torch.float64
    reading, table = transformer_numpy.Transformer(folder), model.model.encoder.embed_positions
    if not reading.marian:
        reading.positions = table.weights[2:2 + len(reading.positions)].double().numpy()
    return model, reading


@oracle_test
def transformers_scores_as_the_reading_does():
    worst, routed = {}, 0
    for family in make.FAMILIES:
        with checkpoint(family) as folder:
            model, reading = oracle(folder, family)
        chosen = []
        for module in model.modules():
            if type(module).__name__ == "NllbMoeTop2Router":
                module.register_forward_hook(
                    lambda m, i, out: chosen.append(out[1].nonzero()[:, 1].reshape(-1, 2).numpy()))
        for i in range(make.CASES):
            source, _, target = make.case(family, i)
            chosen.clear()
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([source]),
                               attention_mask=torch.ones(1, len(source), dtype=torch.long),
                               decoder_input_ids=torch.tensor([[reading.start, *target[:-1]]])).logits[0]
            there = torch.log_softmax(logits.double(), -1).numpy()
            worst[family] = max(worst.get(family, 0), np.abs(there - reading.score(source, target)).max())
            assert [np.sort(best, 1).tolist() for _, best in reading.experts] == [x.tolist()
                                                                                  for x in chosen], (family, i)
            routed += sum(len(x) for x in chosen)
    print("log-probabilities differ by", {k: float(f"{v:.1e}") for k, v in worst.items()}, "-", routed,
          "tokens routed equally")
    assert max(worst.values()) < 2e-12 and routed > 100, worst


@oracle_test
def transformers_searches_as_the_reading_does():
    for family in make.FAMILIES:
        with checkpoint(family) as folder:
            model, reading = oracle(folder, family)
        for case in stored()[family]:
            source, force = ids(case["source"]), case["force"]
            given = {"input_ids": torch.tensor([source]),
                     "attention_mask": torch.ones(1, len(source), dtype=torch.long),
                     "forced_bos_token_id": force if force >= 0 else None, "use_model_defaults": False}
            config = {k: v for k, v in reading.generation.items() if k not in ("num_beams", "early_stopping")}

            def generate(n, early):
                settings = transformers.GenerationConfig(
                    **{**config, "num_beams": n, "early_stopping": early, "num_return_sequences": n, "do_sample": False,
                       "return_dict_in_generate": True, "output_scores": True})
                with torch.no_grad():
                    return model.generate(**given, generation_config=settings)

            def tokens(row):
                row = row.tolist()[1:]
                end = row.index(reading.eos) + 1 if reading.eos in row else len(row)
                return make.text(row[:end])
            assert tokens(generate(1, False).sequences[0]) == case["greedy"][0], (family, source)
            for n in make.BEAMS:
                for early in (False, True):
                    out, wanted = generate(n, early), case["beams"][f"{n}{'e' * early}"]
                    assert [tokens(x) for x in out.sequences] == [x for x, _ in wanted], (family, source, n, early)
                    assert np.allclose(out.sequences_scores.numpy(), [x for _, x in wanted], rtol=0,
                                       atol=5e-6), (family, source, n)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tests whose name contains this")
    return test.run(parser.parse_args().only)


if __name__ == "__main__":
    sys.exit(main())
