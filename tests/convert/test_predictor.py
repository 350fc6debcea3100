#!/usr/bin/env python3
"""Test layers that predict the token after the next one, as converted from
folders and GGUF files: what they compute, and that they change no result.

Usage: tests/python tests/convert/test_predictor.py [--only NAME]

Expected results come from decoder_numpy.py in float64, checkpoints from
make_decoder.py with fixed seeds. Needs build/predict_here and
build/convert_here.
"""
import argparse
import os
import subprocess
import sys
import tempfile

from converting import ROOT, TRANSLATE, run
from suite import Suite

try:
    import gguf
    import numpy as np

    import decoder_numpy
    import make_decoder as make
    import make_gguf
    import moefile
    from test_decoder_c import convert_c, convert_python
except ImportError:
    gguf = None
PREDICT = os.path.join(ROOT, os.environ.get("BUILD", "build"), "predict_here")
TOLERANCE = 2e-4  # maximum error of a logit
MARGIN = 1e-3  # least margin of a choice that rounding must not change
NOTE = "keeping the layer that predicts the token after the next one, which saves time"
test = Suite()
gguf_test = test.needs(gguf, "NumPy or gguf")


def checkpoint(at, family, predicts=True, change=lambda arrays: arrays, **changes):
    """Write a folder; return its config and arrays."""
    config = {**make.CONFIGS[family], **changes}
    arrays = make.arrays_of(config, 5)
    more = change(make.predictor_of(config)) if predicts else {}
    make.write(at, config, {**arrays, **more}, {**make.GENERATION, "eos_token_id": 2})
    return config, {**arrays, **more}


def converted(at, family, **more):
    """Convert a checkpoint; return (model file, config, arrays, notes)."""
    config, arrays = checkpoint(at, family, **more)
    complaint, notes = convert_python(at, at + "/converted", "f32")
    assert complaint is None, complaint
    return at + "/converted", config, arrays, notes


def write_gguf(path, config, arrays):
    """Write a checkpoint with a predictor as llama.cpp's converter does."""
    at, names = make.PREDICTED[config["model_type"]]
    layer = f"model.layers.{config['num_hidden_layers']}."
    nextn = {part: f"{layer}nextn.{'shared_head_norm' if part == 'final_layernorm' else part}"
             for part in ("eh_proj", "enorm", "hnorm", "final_layernorm")}
    named = {f"{names.get(part, at + part)}.weight": f"{name}.weight" for part, name in nextn.items()}
    arrays = {named.get(name, name.replace(at, layer)): x for name, x in arrays.items()}
    architecture = make_gguf.ARCHITECTURES[config["model_type"]]
    make_gguf.write(path, config, arrays, **{f"{architecture}__block_count": config["num_hidden_layers"] + 1,
                                             f"{architecture}__nextn_predict_layers": 1})


def rows_of(model, sources, piece):
    """Return the last computed row of each position, [(next id, best id or -1, log-probability, input of the output
    matrix)] per source."""
    lines = "".join(" ".join(map(str, ids)) + "\n" for ids in sources)
    done = subprocess.run([PREDICT, model, str(piece)], input=lines, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    out, rows = [], {}
    for text in done.stdout.splitlines():
        if not text:
            out, rows = [*out, rows], {}
            continue
        position, token, best, logprob, *values = text.split()
        rows[int(position)] = int(token), int(best), float(logprob), np.array(values, float)
    return out


@gguf_test
def predictions_match_the_reference():
    """Compare all rows of prompts, and the best tokens, with the reference, which notices wrong formulas."""
    for family in make.PREDICTED:
        with tempfile.TemporaryDirectory() as at:
            compare_with_reference(family, *converted(at, family)[:3])


def compare_with_reference(family, model, config, arrays):
    sources = [make.prompt(i) for i in range(12)]
    arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
    head = arrays.get("lm_head.weight", arrays["model.embed_tokens.weight"])
    references = {wrong: decoder_numpy.Decoder(config, arrays, wrong) for wrong in
                  ((), ("exchanged halves",), ("same token",), ("before the norm",))}
    errors, compared = dict.fromkeys(references, 0.0), 0
    for piece in 0, 5:
        for source, rows in zip(sources, rows_of(model, sources, piece), strict=True):
            n = len(source)
            ids = [*source, rows[n - 1][0]]
            assert [rows[p][0] for p in range(n)] == ids[1:], (family, ids)
            found = np.array([rows[p][3] for p in range(n)]) @ head.T
            for wrong, reference in references.items():
                errors[wrong] = max(errors[wrong], abs(found - reference.predicted(ids)).max())
            last, (_, token, logprob, _) = decoder_numpy.log_softmax(references[()].predicted(ids))[-1], rows[n - 1]
            best, second = np.argsort(-last)[:2]
            if token >= 0 and last[best] - last[second] > MARGIN:
                assert token == best and abs(logprob - last[best]) < TOLERANCE, (family, token, best, logprob)
                compared += 1
    right = errors.pop(())
    assert right < TOLERANCE and min(errors.values()) > 1 and compared > 12, (family, right, errors, compared)


@gguf_test
def a_predictor_changes_no_result():
    """Translate with and without, with one thread and one sentence or with several; read the file in Python."""
    lines = [" ".join(map(str, make.prompt(i))) for i in range(16)]
    for family in make.PREDICTED:
        with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
            (model, *_, notes), (plain, *_, other) = converted(a, family), converted(b, family, predicts=False)
            assert NOTE in " ".join(notes) and NOTE not in " ".join(other), (notes, other)
            found, meta, weights = moefile.read_model(model)
            assert len(found.predictor) == meta["predict.layers"] == 3 and "predict.join.weight" in weights
            assert "predict.layers" not in moefile.read_model(plain)[1]
            for options in ("--beam", "1"), ("--beam", "1", "--sample", "--temperature", "0.5"), ("--beam", "3"):
                for more in ("--batch", "1", "--threads", "1"), ("--batch", "5", "--threads", "2", "--kv-bits", "8"):
                    got, wanted = (run([TRANSLATE, "-m", x, "--ids", "--json", *options, *more], lines).lines
                                   for x in (model, plain))
                    assert got == wanted and len(got) == len(lines), (family, options, more)


@gguf_test
def both_converters_write_the_same_bytes():
    """Compare folders and GGUF files, whose names, norms and rates differ, in several number formats."""
    for family in make.PREDICTED:
        with tempfile.TemporaryDirectory() as at:
            config, arrays = checkpoint(at, family, hidden_size=64, head_dim=16, intermediate_size=96,
                                        **{"moe_intermediate_size": 32} if "moe" in family or family == "hy_v3" else {})
            write_gguf(at + "/x.gguf", config, arrays)
            for source in at, at + "/x.gguf":
                for kind, experts in ("f32", "-"), ("q8b", "q4"):
                    notes = [convert(source, f"{at}/{name}", kind, experts)
                             for name, convert in (("c", convert_c), ("python", convert_python))]
                    assert notes[0][0] is None and notes[1][0] is None, (family, source, notes)
                    with open(at + "/c", "rb") as c, open(at + "/python", "rb") as python:
                        assert c.read() == python.read(), (family, source, kind)
                    assert moefile.read_meta(at + "/c")["predict.layers"] == 3


@gguf_test
def incomplete_predictors_are_skipped():
    for family, missing in ("hy_v3", "model.layers.3.enorm.weight"), ("qwen3_5_text", "mtp.norm.weight"):
        with tempfile.TemporaryDirectory() as at:
            checkpoint(at, family, change=lambda arrays: {name: x for name, x in arrays.items() if name != missing})
            for convert in convert_c, convert_python:
                complaint, notes = convert(at, at + "/out", "f32")
                assert complaint is None and "skipping" in " ".join(notes) and NOTE not in " ".join(notes), notes
                assert "predict.layers" not in moefile.read_meta(at + "/out")
    with tempfile.TemporaryDirectory() as at:  # tensors of a layer must all be there
        checkpoint(at, "hy_v3", change=lambda arrays: {name: x for name, x in arrays.items() if "o_proj" not in name})
        for convert in convert_c, convert_python:
            assert "model.layers.3.self_attn.o_proj.weight" in convert(at, at + "/out", "f32")[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
