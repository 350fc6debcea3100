#!/usr/bin/env python3
"""Measure CTranslate2 as a peer of moe-bench, with targets of a forced length.

    peer_ctranslate2.py --folder DIR
        a Transformer-base with random weights: 6 + 6 layers of width 512 with
        2048 hidden units, 8 heads and 32,000 tokens (60 million parameters, 42
        million of which each target token uses, including the output layer)
    peer_ctranslate2.py --folder DIR --checkpoint FROM
        a dense checkpoint of tests/convert/make_transformers.py; token i is
        called w<i>

Creates the model in --folder if missing. --sentences takes a file as for
moe-bench. The library has one target length per call, so batches contain
sentences with targets of similar length, and use their mean length, so no
sentence waits for another. --score FILE instead prints the log-probabilities of
targets that consist of the first tokens of their sources.

The OpenMP of the wheel sleeps between the thread pools of the library's main
thread and its worker, which makes it slow on few processors, so Intel's OpenMP
replaces it. Freed memory remains in the heap, in huge pages. Without these
settings CTranslate2 is several times slower; such speeds are not meaningful.
"""
import argparse
import json
import multiprocessing
import os
import random
import sys

import peer

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path += [os.path.join(ROOT, "tools", "convert"), os.path.join(ROOT, "tests", "convert")]

# ---- Making the model ------------------------------------------------------------------------------------------------

def random_weights(model, numpy):
    """Fill a model with random weights of a Transformer-base; return its tokens."""
    numbers, width, hidden, vocabulary = numpy.random.default_rng(1), 512, 2048, 32000

    def fill_linear(linear, outputs, inputs):
        linear.weight = numbers.standard_normal((outputs, inputs), dtype=numpy.float32) / inputs**0.5
        linear.bias = numpy.zeros(outputs, numpy.float32)

    def fill_norm(norm):
        norm.gamma, norm.beta = numpy.ones(width, numpy.float32), numpy.zeros(width, numpy.float32)

    table = numbers.standard_normal((vocabulary, width), dtype=numpy.float32) / width**0.5
    model.encoder.embeddings[0].weight = model.decoder.embeddings.weight = model.decoder.projection.weight = table
    for stack in (model.encoder, model.decoder):
        fill_norm(stack.layer_norm)
        for layer in stack.layer:
            attentions = [(layer.self_attention, (3 * width, width))]
            if stack is model.decoder:
                attentions.append((layer.attention, (width, 2 * width, width)))
            for attention, sizes in attentions:
                fill_norm(attention.layer_norm)
                for linear, outputs in zip(attention.linear, sizes):
                    fill_linear(linear, outputs, width)
            fill_norm(layer.ffn.layer_norm)
            fill_linear(layer.ffn.linear_0, hidden, width)
            fill_linear(layer.ffn.linear_1, width, hidden)
    return ["<blank>", "<unk>", "<s>", "</s>"] + ["w%d" % i for i in range(vocabulary - 4)]


def checkpoint_weights(model, config, read, numpy):
    """Fill a model with a checkpoint's weights like the library's own converter; return its tokens."""
    from transformer_numpy import m2m_positions, marian_positions
    marian, width = config["model_type"] == "marian", config["d_model"]
    vocabulary = config["vocab_size"] - marian  # the last row of Marian's embedding is that of the pad token, all zeros
    table = read("model.shared.weight")[:vocabulary]
    positions = (marian_positions if marian else m2m_positions)(config["max_position_embeddings"], width)

    def fill_linear(linear, *names):
        linear.weight = numpy.concatenate([read(name + ".weight") for name in names])
        linear.bias = numpy.concatenate([read(name + ".bias") for name in names])

    def fill_norm(norm, name):
        norm.gamma, norm.beta = read(name + ".weight"), read(name + ".bias")

    for side, stack, table_of in (("encoder", model.encoder, model.encoder.embeddings[0]),
                                  ("decoder", model.decoder, model.decoder.embeddings)):
        table_of.weight = table
        stack.scale_embeddings = width**0.5
        stack.position_encodings.encodings = positions.astype(numpy.float32)
        if not marian:
            fill_norm(stack.layer_norm, "model.%s.layer_norm" % side)
        for i, layer in enumerate(stack.layer):
            name = "model.%s.layers.%d." % (side, i)
            own = [name + "self_attn.%s_proj" % part for part in ("q", "k", "v")]
            fill_linear(layer.self_attention.linear[0], *own)
            fill_linear(layer.self_attention.linear[1], name + "self_attn.out_proj")
            fill_norm(layer.self_attention.layer_norm, name + "self_attn_layer_norm")
            if side == "decoder":
                fill_linear(layer.attention.linear[0], name + "encoder_attn.q_proj")
                fill_linear(layer.attention.linear[1], name + "encoder_attn.k_proj", name + "encoder_attn.v_proj")
                fill_linear(layer.attention.linear[2], name + "encoder_attn.out_proj")
                fill_norm(layer.attention.layer_norm, name + "encoder_attn_layer_norm")
            fill_linear(layer.ffn.linear_0, name + "fc1")
            fill_linear(layer.ffn.linear_1, name + "fc2")
            fill_norm(layer.ffn.layer_norm, name + "final_layer_norm")
    model.decoder.projection.weight = table
    if marian:
        model.decoder.projection.bias = read("final_logits_bias")[0, :vocabulary]
        model.decoder.start_from_zero_embedding = True
    end, unknown = config["eos_token_id"], 1 if marian else 3
    names = {end: "</s>", unknown: "<unk>"}
    model.config.eos_token = model.config.decoder_start_token = "</s>"
    model.config.unk_token = "<unk>"
    return [names.get(i, "w%d" % i) for i in range(vocabulary)]


def make(folder, checkpoint, kind):
    import numpy
    from ctranslate2.specs import common_spec, transformer_spec

    def spec(layers, heads, before, activation):
        return transformer_spec.TransformerSpec.from_config(layers, heads, pre_norm=before,
                                                            activation=common_spec.Activation[activation])
    if checkpoint:
        import hf
        stored = hf.read_safetensors(os.path.join(checkpoint, "model.safetensors"))
        config = read_config(checkpoint)
        model = spec((config["encoder_layers"], config["decoder_layers"]), config["encoder_attention_heads"],
                     config["model_type"] != "marian", config["activation_function"].upper())
        tokens = checkpoint_weights(model, config, lambda name: numpy.concatenate(list(stored[name].read(1 << 16))),
                                    numpy)
    else:
        model = spec(6, 8, True, "RELU")
        tokens = random_weights(model, numpy)
    model.register_source_vocabulary(tokens)
    model.register_target_vocabulary(tokens)
    model.validate()
    model.optimize(quantization=None if kind == "float32" else kind)
    os.makedirs(folder, exist_ok=True)
    model.save(folder)


def read_config(checkpoint):
    with open(os.path.join(checkpoint, "config.json"), encoding="utf-8") as file:
        return json.load(file)


# ---- Using it --------------------------------------------------------------------------------------------------------

def read_sentences(path):
    """Return [(length of the target, its first token or -1, ids of the source)], one for each line of a file."""
    with open(path, encoding="utf-8") as file:
        return [(n[0], n[1], n[2:]) for n in ([int(x) for x in line.split()] for line in file)]


def batches(o, words):
    """Return the batches as [(sources, first tokens of the targets or None, length of the targets)]."""
    if not o.sentences:
        choose = random.Random(7)
        source = [["w%d" % choose.randrange(32000 - 4) for _ in range(o.src_len)] for _ in range(o.batch)]
        return [(source, None, o.tgt_len)]
    lines = sorted(read_sentences(o.sentences), key=lambda line: (line[0], len(line[2])))
    groups = [lines[i:i + o.batch] for i in range(0, len(lines), o.batch)]
    return [([words(ids) for _, _, ids in group],
             [words([force]) for _, force, _ in group] if group[0][1] >= 0 else None,
             max(2, round(sum(n for n, _, _ in group) / len(group)))) for group in groups]


def score(translator, path, words):
    """Print a JSON line per sentence: the log-probabilities of a target made of the first ids of its source."""
    lines = [(ids, ([force] if force >= 0 else []) + ids[1:n]) for n, force, ids in read_sentences(path)]
    for found in translator.score_batch([words(source) for source, _ in lines], [words(target) for _, target in lines]):
        print(json.dumps([round(x, 5) for x in found.log_probs]))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--folder", required=True, help="where the model is or will be (60 to 620 MB)")
    p.add_argument("--checkpoint", help="a folder in Hugging Face's layout")
    p.add_argument("--save", default="int8", help="weights of a new model: int8, float32")
    p.add_argument("--compute", default="int8", help="CTranslate2's compute_type")
    p.add_argument("--sentences", metavar="FILE", help="sentences instead of --src-len and --tgt-len")
    p.add_argument("--score", metavar="FILE", help="only print log-probabilities")
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--beam", type=int, default=4)
    p.add_argument("--src-len", type=int, default=25)
    p.add_argument("--tgt-len", type=int, default=25)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--workers", type=int, default=1, help="batches at a time, which share the threads")
    p.add_argument("--once", action="store_true", help="translate once and exit, for the cold start")
    p.add_argument("--plain", action="store_true", help="the wheel with its own OpenMP")
    o = p.parse_args()
    if not o.plain:
        # OMP_NUM_THREADS limits the main thread, which only waits; intra_threads is for the worker
        peer.environment(LD_PRELOAD=peer.intel_openmp(), OMP_NUM_THREADS="1", KMP_BLOCKTIME="1",
                         MALLOC_MMAP_THRESHOLD_=str(1 << 30), MALLOC_TRIM_THRESHOLD_=str((1 << 32) - 1),
                         MALLOC_TOP_PAD_=str(1 << 26), GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
    import ctranslate2

    if not os.path.exists(os.path.join(o.folder, "model.bin")):
        # in another process, so that the peak memory excludes it
        maker = multiprocessing.Process(target=make, args=(o.folder, o.checkpoint, o.save))
        maker.start()
        maker.join()
    end = read_config(o.checkpoint)["eos_token_id"] if o.checkpoint else 3
    words = lambda ids: ["</s>" if i == end else "w%d" % i for i in ids]  # noqa: E731
    translator = ctranslate2.Translator(o.folder, device="cpu", compute_type=o.compute, inter_threads=o.workers,
                                        intra_threads=o.threads // o.workers)
    if o.score:
        return score(translator, o.score, words)
    work = batches(o, words)

    def translate(work=work):
        under_way = [translator.translate_batch(source, target_prefix=first, max_batch_size=o.batch,
                                                batch_type="examples", beam_size=o.beam, min_decoding_length=n,
                                                max_decoding_length=n, asynchronous=True) for source, first, n in work]
        return sum(len(x.result().hypotheses[0]) for batch in under_way for x in batch)

    translate(work[-1:])
    if o.once:
        return
    peer.serve("CTranslate2 %s %s" % (ctranslate2.__version__, translator.compute_type), translate,
               sum(len(source) * n for source, _, n in work), warm_up=len(work) == 1)


if __name__ == "__main__":
    main()
