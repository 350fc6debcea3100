#!/usr/bin/env python3
"""Test T5, MADLAD-400 and Switch in Hugging Face's layout, with random weights:
the tensors of CTranslate2's form of the same model, which test_ct2.py compares
with NumPy, and scores and searches of NumPy for Switch. test_ct2_peer.py
compares them with transformers.

Usage: tests/python tests/convert/test_t5.py [--only NAME]
"""
import argparse
import json
import os
import sys
import tempfile

from converting import BIN, convert_quietly, run
from suite import Suite
from test_ct2 import compare, convert

try:
    import numpy as np

    import make_ct2 as make
    import make_decoder
    import moefile
except ImportError:
    np = None
test = Suite()
numpy_test = test.needs(np, "NumPy")
EXPERTS = 5


def config_of(kind, model_type="t5", **more):
    activation, _, _, _, o = make.KINDS[kind]
    names = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5", "switch_transformers": "SwitchTransformers"}
    gated = {"feed_forward_proj": "gated-gelu" if o.get("gated") else activation}
    return {"architectures": [names[model_type] + "ForConditionalGeneration"], "model_type": model_type,
            "d_model": make.WIDTH, "d_kv": o.get("head", make.WIDTH // make.HEADS), "d_ff": make.HIDDEN,
            "num_layers": 2, "num_decoder_layers": 2, "num_heads": make.HEADS, "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 20, "vocab_size": make.PIECES, "pad_token_id": 0, "eos_token_id": 2,
            "decoder_start_token_id": 1, "layer_norm_epsilon": 1e-6, "tie_word_embeddings": o.get("tied", False),
            "dropout_rate": 0.1, "is_encoder_decoder": True, **({} if model_type[0] == "s" else gated), **more}


def arrays_of(ct2, every_layer=False):
    """Return arrays under transformers' names, given those of make_ct2.py."""
    heads = make.HEADS * ct2["encoder/layer_0/self_attention/linear_1/weight"].shape[1] // make.HEADS
    out = {"shared.weight": ct2["encoder/embeddings_0/weight"]}
    if ct2["decoder/projection/weight"] is not ct2["decoder/embeddings/weight"]:
        out["lm_head.weight"] = ct2["decoder/projection/weight"]
    for side in "encoder", "decoder":
        out[side + ".final_layer_norm.weight"] = ct2[side + "/layer_norm/gamma"]
        for i in range(2):
            at, ours = f"{side}.block.{i}.layer.", f"{side}/layer_{i}/"
            parts = [("self_attention", "0.SelfAttention")] + [("attention", "1.EncDecAttention")] * (side == "decoder")
            for theirs, name in parts:
                out[f"{at}{name[0]}.layer_norm.weight"] = ct2[f"{ours}{theirs}/layer_norm/gamma"]
                q = ct2[f"{ours}{theirs}/linear_0/weight"]
                kv = q[heads:] if name[0] == "0" else ct2[f"{ours}{theirs}/linear_1/weight"]
                last = ct2[f"{ours}{theirs}/linear_{1 + int(name[0])}/weight"]
                for x, array in zip("qkvo", (q[:heads], *np.split(kv, 2), last)):
                    out[f"{at}{name}.{x}.weight"] = array
                if name[0] == "0" and (i == 0 or every_layer):
                    out[f"{at}{name}.relative_attention_bias.weight"] = ct2[f"{ours}{theirs}/relative_attention_bias"]
            at += str(len(parts))
            out[at + ".layer_norm.weight"] = ct2[ours + "ffn/layer_norm/gamma"]
            gated = ours + "ffn/linear_0_noact/weight" in ct2
            first = "wi_0" if gated else "wi"
            for name, theirs in ((first, "linear_0"), ("wi_1", "linear_0_noact"), ("wo", "linear_1")):
                if f"{ours}ffn/{theirs}/weight" in ct2:
                    out[f"{at}.DenseReluDense.{name}.weight"] = ct2[f"{ours}ffn/{theirs}/weight"]
            for name, array in ct2.items():
                if name.startswith(ours + "ffn/experts"):
                    out[f"{at}.mlp.experts.expert_{name.split('/')[4]}.{name.split('/')[5]}.weight"] = array
            if ours + "ffn/router" in ct2:
                out[at + ".mlp.router.classifier.weight"] = ct2[ours + "ffn/router"]
    return out


def write(at, config, arrays):
    os.makedirs(at, exist_ok=True)
    generation = {"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_new_tokens": 20,
                  "early_stopping": True}
    for name, value in (("config", config), ("generation_config", generation)):
        with open(f"{at}/{name}.json", "w", encoding="utf-8") as file:
            json.dump(value, file)
    make_decoder.write_safetensors(at + "/model.safetensors", arrays, exact=True)
    with open(at + "/spiece.model", "wb") as file:
        file.write(make.spm())


def switch():
    """Return (make_ct2's arrays with experts in the second layers, transformers' arrays)."""
    ct2, r = make.make("t5-tied")[0], np.random.default_rng(9)
    for side in "encoder", "decoder":
        ours = side + "/layer_1/ffn/"
        ct2[ours + "router"] = r.standard_normal((EXPERTS, make.WIDTH)).astype(np.float32)
        for e in range(EXPERTS):
            for name, shape in (("wi", (make.HIDDEN, make.WIDTH)), ("wo", (make.WIDTH, make.HIDDEN))):
                spread = 2 / shape[1] ** 0.5
                ct2[f"{ours}experts/{e}/{name}"] = (spread * r.standard_normal(shape)).astype(np.float32)
        del ct2[ours + "linear_0/weight"], ct2[ours + "linear_1/weight"]
    arrays = {name.replace("DenseReluDense", "mlp"): x for name, x in arrays_of(ct2).items()}
    return ct2, arrays


SWITCH = {"num_experts": EXPERTS, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 40,
          "router_bias": False, "router_dtype": "float32", "dense_act_fn": "relu"}


def make_model(at, model_type):
    """Write a folder of this type."""
    if model_type == "switch_transformers":
        return write(at, config_of("t5-tied", model_type, **SWITCH), switch()[1])
    return write(at, config_of("t5", model_type), arrays_of(make.make("t5")[0], model_type == "umt5"))


class Switch(make.Reference if np else object):
    """One expert per token, weighted by its probability."""

    def feed(self, name, x):
        if name + "/router" not in self.w:
            return super().feed(name, x)
        logits = x @ self.w[name + "/router"].T
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        best, y = p.argmax(-1), np.zeros_like(x)
        for e in range(EXPERTS):
            rows = best == e
            inner = np.maximum(x[rows] @ self.w[f"{name}/experts/{e}/wi"].T, 0) @ self.w[f"{name}/experts/{e}/wo"].T
            y[rows] = p[rows][:, e:e + 1] * inner
        return y


@numpy_test
def models_equal_those_of_ctranslate2s_layout():
    for kind, model_type in (("t5", "t5"), ("t5-tied", "t5"), ("t5", "mt5"), ("t5", "umt5")):
        with tempfile.TemporaryDirectory() as at:
            ct2, about = make.make(kind)
            make.write(at + "/ct2", ct2, about)
            write(at + "/hf", config_of(kind, model_type), arrays_of(ct2, model_type == "umt5"))
            assert convert(at + "/ct2", at + "/a") is None
            assert convert_quietly("--from", "hf", at + "/hf", "-o", at + "/b") is None
            (meta, tensors), (other, same) = moefile.read(at + "/a"), moefile.read(at + "/b")
            assert all(meta[key] == other[key] for key in meta if key.startswith(("encoder", "decoder", "source")))
            assert tensors.keys() == same.keys()
            assert all((x.array() == same[name].array()).all() for name, x in tensors.items()), kind


@numpy_test
def tables_of_distances_stay_f32_when_quantised():
    with tempfile.TemporaryDirectory() as at:
        make_model(at + "/in", "t5")
        assert convert_quietly("--from", "hf", at + "/in", "-o", at + "/a") is None
        run([os.path.join(BIN, "moe-quantize"), at + "/a", at + "/b", "q8"])
        run([os.path.join(BIN, "moe-info"), at + "/b"])  # opens the model
        names = [name for name, t in moefile.read(at + "/b")[1].items() if t.type == moefile.TYPES["f32"]]
        assert sum(".distance.bias" in name for name in names) == 4, names


@numpy_test
def switch_scores_and_searches_like_the_reference():
    with tempfile.TemporaryDirectory() as at:
        ct2, arrays = switch()
        write(at + "/in", config_of("t5-tied", "switch_transformers", **SWITCH), arrays)
        problem = convert_quietly("--from", "hf", at + "/in", "-o", at + "/out")
        assert problem is None, problem
        assert moefile.read_meta(at + "/out")["limit.source"] == SWITCH["expert_capacity"]
        assert compare(at + "/out", Switch(ct2, "t5-tied")) >= 10


@numpy_test
def wrong_settings_are_rejected_by_name():
    ct2 = make.make("t5")[0]
    for changes, words in (({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj 'gated-tanh'"),
                           ({"relative_attention_max_distance": 12}, "relative_attention_max_distance 12"),
                           ({"num_heads": 8}, "requires [32, 8]"), ({"d_model": 33}, "requires"),
                           ({"scale": 3}, "scale"), ({"architectures": ["T5Model"]}, "architectures")):
        with tempfile.TemporaryDirectory() as at:
            write(at, config_of("t5", **changes), arrays_of(ct2))
            problem = convert_quietly("--from", "hf", at, "-o", at + "/out")
            assert problem and words in problem, (changes, problem)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
