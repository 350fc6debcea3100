#!/usr/bin/env python3
"""A peer of moe-bench: CTranslate2 on a Transformer of random weights, targets
of a forced length.

--shape says how large: transformer-base has 6 + 6 layers of width 512 with 2048
hidden units, 8 heads and 32,000 tokens, embeddings shared (60 million
parameters, of which a target token uses 42 million with the output); the others
are what moe-make-random calls so. The model is made in --folder where it is not
there yet.

The wheel's own OpenMP sleeps between the pools of the library's main thread and
its worker, which costs it most of its speed on few processors; Intel's does
not. Memory that is freed stays in the heap, and comes in huge pages. Measured
without, CTranslate2 is several times slower: do not quote that.
"""
import argparse
import multiprocessing
import os
import random

import peer

# width, hidden units, heads, tokens, layers of encoder and decoder, norm before a layer, activation
SHAPES = {
    "transformer-base": (512, 2048, 8, 32000, 6, True, "RELU"),
    "opus-base": (512, 2048, 8, 58101, 6, False, "SWISH"),
    "m2m-418m": (1024, 4096, 16, 128112, 12, True, "RELU"),
    "nllb-600m": (1024, 4096, 16, 256206, 12, True, "RELU"),
}


def make(folder, shape):
    import numpy
    from ctranslate2.specs import common_spec, transformer_spec

    numbers = numpy.random.default_rng(1)
    width, hidden, heads, vocabulary, layers, before, activation = SHAPES[shape]
    model = transformer_spec.TransformerSpec.from_config(layers, heads, pre_norm=before,
                                                         activation=common_spec.Activation[activation])

    def fill_linear(linear, outputs, inputs):
        linear.weight = numbers.standard_normal((outputs, inputs), dtype=numpy.float32) / inputs**0.5
        linear.bias = numpy.zeros(outputs, numpy.float32)

    def fill_norm(norm):
        norm.gamma, norm.beta = numpy.ones(width, numpy.float32), numpy.zeros(width, numpy.float32)

    table = numbers.standard_normal((vocabulary, width), dtype=numpy.float32) / width**0.5
    model.encoder.embeddings[0].weight = model.decoder.embeddings.weight = model.decoder.projection.weight = table
    for stack in (model.encoder, model.decoder):
        if before:
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
    words = ["<blank>", "<unk>", "<s>", "</s>"] + ["w%d" % i for i in range(vocabulary - 4)]
    model.register_source_vocabulary(words)
    model.register_target_vocabulary(words)
    model.validate()
    model.optimize(quantization="int8")
    os.makedirs(folder, exist_ok=True)
    model.save(folder)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--folder", required=True, help="where the model is or will be (60 to 620 MB)")
    p.add_argument("--shape", default="transformer-base", choices=SHAPES, metavar="NAME", help=", ".join(SHAPES))
    p.add_argument("--compute", default="int8", help="CTranslate2's compute_type")
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--beam", type=int, default=4)
    p.add_argument("--src-len", type=int, default=25)
    p.add_argument("--tgt-len", type=int, default=25)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--plain", action="store_true", help="the wheel as it comes, for the difference")
    o = p.parse_args()
    if not o.plain:
        # OMP_NUM_THREADS is for the main thread, which only waits; the worker has intra_threads
        peer.environment(LD_PRELOAD=peer.intel_openmp(), OMP_NUM_THREADS="1", KMP_BLOCKTIME="1",
                         MALLOC_MMAP_THRESHOLD_=str(1 << 30), MALLOC_TRIM_THRESHOLD_=str((1 << 32) - 1),
                         MALLOC_TOP_PAD_=str(1 << 26), GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
    import ctranslate2

    if not os.path.exists(os.path.join(o.folder, "model.bin")):
        maker = multiprocessing.Process(target=make, args=(o.folder, o.shape))  # whose memory does not count
        maker.start()
        maker.join()
    translator = ctranslate2.Translator(o.folder, device="cpu", compute_type=o.compute, inter_threads=1,
                                        intra_threads=o.threads)
    choose = random.Random(7)
    source = [["w%d" % choose.randrange(SHAPES[o.shape][3] - 4) for _ in range(o.src_len)] for _ in range(o.batch)]

    def translate():
        results = translator.translate_batch(source, max_batch_size=o.batch, batch_type="examples", beam_size=o.beam,
                                             min_decoding_length=o.tgt_len, max_decoding_length=o.tgt_len)
        return sum(len(r.hypotheses[0]) for r in results)

    peer.serve("CTranslate2 %s %s" % (ctranslate2.__version__, translator.compute_type), translate, o.batch * o.tgt_len)


if __name__ == "__main__":
    main()
