"""Read checkpoints of T5, mT5, UMT5, MADLAD-400 (type t5) and Switch in Hugging Face's layout, for hf.py.

Scores of attention are not scaled; a bias per head depends on the distance of the tokens, in buckets that grow with it.
The model file has the bias for each distance up to the largest one (`reach`). UMT5 has biases in every layer, the
others in the first layer of a side, for all. With tied embeddings the output layer's input is multiplied by
1 / sqrt(width), which becomes part of the last norm. Switch has one expert per token, weighted by its probability.
"""
import math
import re
import types

import numpy as np

import hf
from moefile import FormatError

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
               "silu": "swish", "swish": "swish"}
# Settings of training, and old names of other keys
NO_EFFECT = set("""dropout_rate classifier_dropout initializer_factor n_positions task_specific_params dense_act_fn
    is_gated_act router_jitter_noise router_z_loss_coef router_aux_loss_coef router_ignore_padding_tokens
    router_type add_router_probs encoder_sparse_step decoder_sparse_step batch_prioritized_routing
    output_past gradient_checkpointing tokenizer_class scalable_attention d_kv_new attention_dropout""".split())
IGNORED = re.compile(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight\Z")
POSITIONS = 1024  # longest source and target: there are no positions


def read_config(c):
    """Return the configuration as a namespace, as hf.read_config does."""
    _, architectures = c.choose("model_type", hf.FAMILIES)
    sparse = c.raw("model_type") == "switch_transformers"
    given = c.raw("architectures", list(architectures))
    if given != list(architectures):
        raise FormatError(f"{c.path}: architectures {hf.short(given)} is not supported: expected {architectures[0]}")
    whole = lambda key, *default, least=1, most=1 << 20: c.get(key, int, *default, least=least, most=most)
    m = types.SimpleNamespace(
        path=c.path, family="t5", width=whole("d_model", 512, least=4), heads=whole("num_heads", 8),
        head=whole("d_kv", 64), ffn=whole("d_ff", 2048), vocabulary=whole("vocab_size", 32128, least=4, most=1 << 24),
        buckets=whole("relative_attention_num_buckets", 32, least=4),
        most=whole("relative_attention_max_distance", 128, most=4096), epsilon=c.get("layer_norm_epsilon", float, 1e-6),
        tied=c.get("tie_word_embeddings", bool, True), shared=True, positions=POSITIONS,
        tokenizer_class=c.raw("tokenizer_class"), experts=0)
    layers = whole("num_layers", 6, most=256)
    m.layers = {"encoder": layers, "decoder": c.get("num_decoder_layers", int, layers, least=1, most=256)}
    m.every_layer, m.source_vocabulary = c.raw("model_type") == "umt5", m.vocabulary
    name = c.get("dense_act_fn" if sparse else "feed_forward_proj", str, "relu")
    name = "gated-gelu_new" if name == "gated-gelu" else name
    m.gated, m.activation = name.startswith("gated-"), ACTIVATIONS.get(name.removeprefix("gated-"))
    if m.activation is None:
        raise FormatError(f"{c.path}: feed_forward_proj {hf.short(name)} is not supported")
    if m.most <= m.buckets // 2:
        raise FormatError(f"{c.path}: relative_attention_max_distance {m.most} is not supported with {m.buckets} "
                          "buckets")
    m.sparse = dict.fromkeys(m.layers, 0)
    if sparse:
        read_mixture(c, m)
    m.pad = c.get("pad_token_id", int, 0, least=0, most=m.vocabulary - 1)
    m.eos = c.get("eos_token_id", int, 1, least=0, most=m.vocabulary - 1)
    m.start = c.raw("decoder_start_token_id", m.pad)
    hf.refuse_quantised(c)
    for key, values in hf.ONLY.items():
        if key != "task_specific_params":
            c.only(key, *values)
    c.end(hf.NO_EFFECT, NO_EFFECT, hf.GENERATION, hf.GENERATION_USED, hf.GENERATION_NO_EFFECT)
    return m


def read_mixture(c, m):
    """Read Switch's mixtures. An expert takes only `capacity` tokens of a sentence, so sources may not be longer."""
    m.experts = c.get("num_experts", int, 8, least=2, most=1 << 20)
    m.positions = min(c.get("expert_capacity", int, 64, least=2, most=1 << 20), POSITIONS)
    for side, layers in m.layers.items():
        n = c.get(f"num_sparse_{side}_layers", int, 3, least=0, most=layers)
        m.sparse[side] = layers // n if n else layers
    c.only("router_bias", False)
    c.only("router_dtype", "float32")
    if m.activation != "relu":
        raise FormatError(f"{c.path}: experts with dense_act_fn {m.activation} are not supported")


def bucket_of(distance, buckets, most, both):
    """Return the bucket of a distance, key minus query; `both`: keys may follow. Logarithms are rounded to float32."""
    first, d = 0, abs(distance) if distance < 0 or both else 0
    if both:
        buckets //= 2
        first = buckets if distance > 0 else 0
    exact = buckets // 2
    if d < exact:
        return first + d
    x = np.float32(math.log(float(np.float32(d) / np.float32(exact)))) / np.float32(math.log(most / exact))
    return first + min(exact + int(x * np.float32(buckets - exact)), buckets - 1)


def put_bias(b, m, name, side, layer):
    source = f"{side}.block.{layer if m.every_layer else 0}.layer.0.SelfAttention.relative_attention_bias.weight"
    table = b.take(source, m.buckets, m.heads)
    rows = [bucket_of(d, m.buckets, m.most, side == "encoder") for d in range(-m.most, m.most + 1)]
    b.tensors[name + ".distance.bias"] = hf.Rows((len(rows), m.heads), [
        lambda n: (np.concatenate(list(table.read(n)))[rows] for _ in (0,))])


def put_norm(b, m, name, source, scale=1.0):
    t = b.take(source + ".weight", m.width)
    b.tensors[name + ".norm.weight"] = hf.Rows(t.shape, [t.read if scale == 1 else lambda n: (
        x * np.float32(scale) for x in t.read(n))])


def put_attention(b, m, side, layer, kind):
    inner, d = m.heads * m.head, m.width
    at = f"{side}.block.{layer}.layer.{int(kind == 'cross')}."
    source = at + ("EncDecAttention." if kind == "cross" else "SelfAttention.")
    norm = {"norm": "before", "norm.kind": "rms", "epsilon": m.epsilon, "residual": 1}
    size = {"head.size": m.head} if inner != d else {}
    reach = {} if kind == "cross" else {"reach": m.most}
    name = b.layer(side, kind=kind, heads=m.heads, **size, scale=1.0, **norm, **reach)
    put_norm(b, m, name, at + "layer_norm")
    if kind == "attention":
        put_bias(b, m, name, side, layer)
    q, k, v = (b.take(f"{source}{x}.weight", inner, d) for x in "qkv")
    for part, stored in ((".q", (q,)), (".kv", (k, v))) if kind == "cross" else ((".qkv", (q, k, v)),):
        b.put(f"{name}{part}.weight", *stored)
    b.put(name + ".out.weight", b.take(source + "o.weight", d, inner))


def put_feed_forward(b, m, side, layer):
    d, f = m.width, m.ffn
    at = f"{side}.block.{layer}.layer.{1 + (side == 'decoder')}."
    norm = {"norm": "before", "norm.kind": "rms", "epsilon": m.epsilon, "residual": 1}
    if m.sparse[side] and (layer % m.sparse[side] == 1 or m.sparse[side] == 1):
        name = b.layer(side, kind="moe", experts=m.experts, k=1, hidden=f, gate="topk", weights="all", output="none",
                       scale=1.0, activation="relu", **norm)
        put_norm(b, m, name, at + "layer_norm")
        b.put(name + ".gate.weight", b.take(at + "mlp.router.classifier.weight", m.experts, d))
        experts = [f"{at}mlp.experts.expert_{e}." for e in range(m.experts)]
        b.tensors[name + ".experts"] = tuple([hf.Rows(t.shape, [t.read])
                                              for t in (b.take(f"{x}{part}.weight", *shape) for x in experts)]
                                             for part, shape in (("wi", (f, d)), ("wo", (d, f))))
        return
    inner = at + ("mlp." if m.experts else "DenseReluDense.")
    name = b.layer(side, kind="ffn", hidden=f, activation=m.activation, **{"gated": 1} if m.gated else {}, **norm)
    put_norm(b, m, name, at + "layer_norm")
    b.put(name + ".up.weight", b.take(inner + ("wi_1.weight" if m.gated else "wi.weight"), f, d))
    b.put(name + ".down.weight", b.take(inner + "wo.weight", d, f))
    if m.gated:
        b.put(name + ".gate.weight", b.take(inner + "wi_0.weight", f, d))


def build(m, stored, generation, tokens, files, say):
    """Return the metadata and tensors, as hf.build does."""
    decode, b = hf.decode_meta(generation, m, tokens, say), hf.Builder(stored, m.path)
    meta = {"vocab.size": m.vocabulary, "model.width": m.width, "embedding.scale": 1.0,
            "token.bos": decode["token.bos"], "token.eos": decode["token.eos"], "token.pad": m.pad, "source.bos": 0,
            "source.eos": 1, "limit.source": m.positions, "limit.target": POSITIONS}
    if m.positions < POSITIONS:
        say(f"limiting sources to {m.positions} tokens, expert_capacity: of longer ones, experts would drop tokens")
    hf.put_tied(b, m, "embedding.weight", hf.TIED[:3] + (("lm_head.weight",) if m.tied else ()), m.vocabulary, say)
    for side in ("encoder", "decoder"):
        for i in range(m.layers[side]):
            put_attention(b, m, side, i, "attention")
            if side == "decoder":
                put_attention(b, m, side, i, "cross")
            put_feed_forward(b, m, side, i)
        name = b.layer(side, kind="norm", **{"norm.kind": "rms"}, epsilon=m.epsilon)
        put_norm(b, m, name, side + ".final_layer_norm", m.width ** -0.5 if m.tied and side == "decoder" else 1)
    if not m.tied:
        b.put("output.weight", b.take("lm_head.weight", m.vocabulary, m.width))
    b.finish(IGNORED)
    return types.SimpleNamespace(meta={**meta, **b.meta, **decode, **tokens}, tensors=b.tensors,
                                 identity=hf.identity(files))
