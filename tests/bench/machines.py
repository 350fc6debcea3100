#!/usr/bin/env python3
"""Compute the tables of tools/MACHINES.md, which list models for machines.

    tests/bench/machines.py [--disk 1,3] [--most 14,28]

File sizes follow from the shapes. The bytes read per token assume that the
cache holds the most frequent experts. Tokens per second are limited by the disk
or the processor (--most: for one sentence with a beam of 4, and for 8
sentences). Sentences have 25 tokens, translations have 28, and routing is
uniform, the worst case. Standard library only.
"""
import argparse

GIB = 1 << 30
SLAB = 17_907_712         # bytes of an expert of NLLB-MoE-54B in a Q4 file
DENSE = 30.5e9 - 12 * 128 * SLAB  # bytes of all other weights, in Q8
LAYERS, K, SOURCE, TARGET = 6, 2, 25, 28  # mixtures per side, experts per token, tokens of source and target
AT_ONCE = (1, 4), (8, 1)  # (sentences, beam)
SESSION = 1.4e9           # bytes, twice the larger session of nllb-1.3b, which has as many layers of half the
#                           width (--dry-run prints 414 MiB and 669 MiB)
SYSTEM = 1.0e9
WHOLE, PAIR, FOUR = (128, 128), (36, 12), (377 / 6, 223 / 6)  # experts per mixture (encoder, decoder)


def visited(experts, rows):
    """Return the expected number of experts of a mixture that at least one of the rows visits."""
    return experts * (1 - (1 - K / experts) ** rows)


def read(experts, batch, beam, budget):
    """Return the bytes read from disk per token, with a cache of `budget` bytes."""
    encoder, decoder = experts
    # visits of each expert per decoder step; the encoder runs once in TARGET steps
    asked = sorted([(visited(decoder, batch * beam) / decoder, LAYERS * decoder),
                    (visited(encoder, batch * SOURCE) / encoder / TARGET, LAYERS * encoder)], reverse=True)
    slots, reads = budget / SLAB, 0.0
    for often, count in asked:
        held = min(count, slots)
        slots -= held
        reads += often * (count - held)
    return reads * SLAB / batch


def size(experts):
    return DENSE + LAYERS * sum(experts) * SLAB


def files():
    yield "| NLLB-MoE-54B | experts | file, GB |"
    yield "|---|---|---|"
    for name, experts in ("whole", WHOLE), ("four languages, all directions", FOUR), ("one pair of languages", PAIR):
        yield f"| {name} | {LAYERS * sum(experts):,.0f} | {size(experts) / 1e9:.1f} |"


def machines(disks, most):
    yield ("| memory | file | `--expert-memory` | in memory, GB | tokens/s, one sentence, disk of "
           + " / ".join(f"{x:g}" for x in disks) + " GB/s | 8 sentences |")
    yield "|---|---|---|---|---|---|"
    for memory, name, experts, budget in ((8, "one pair", PAIR, 2), (16, "one pair", PAIR, None),
                                          (16, "whole", WHOLE, 9), (32, "four languages", FOUR, None),
                                          (32, "whole", WHOLE, 24), (64, "whole", WHOLE, None)):
        held = budget * GIB if budget else LAYERS * sum(experts) * SLAB
        taken = DENSE + held + SESSION
        assert taken + SYSTEM < memory * GIB, (memory, name, taken)
        cells = []
        for (batch, beam), speed in zip(AT_ONCE, most):
            bytes_read = read(experts, batch, beam, held)
            cells.append(" / ".join(f"{min(speed, x * 1e9 / bytes_read) if bytes_read > 1 else speed:.1f}"
                                    for x in disks) if budget else f"{speed:g}")
        yield (f"| {memory} GB | {name}, {size(experts) / 1e9:.1f} GB | {f'{budget}G' if budget else 'without'} | "
               f"{taken / 1e9:.1f} | {cells[0]} | {cells[1]} |")


def ranks():
    yield "| machines that share the experts (`mpirun`) | 1 | 2 | 4 | 8 |"
    yield "|---|---|---|---|---|"
    yield "| whole, GB in memory of each | " + " | ".join(
        f"{(DENSE + LAYERS * sum(WHOLE) * SLAB / n + SESSION) / 1e9:.1f}" for n in (1, 2, 4, 8)) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", default="1,3", help="GB/s (1,3)")
    parser.add_argument("--most", default="14,28", help="tokens/s of the processor (14,28)")
    o = parser.parse_args()
    disks, most = ([float(x) for x in text.split(",")] for text in (o.disk, o.most))
    print("\n".join([*files(), "", *machines(disks, most), "", *ranks()]))


if __name__ == "__main__":
    main()
