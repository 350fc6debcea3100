#!/usr/bin/env python3
"""Compare the engine with tools/convert/reference.py on real sentences, in
float32. Requires PyTorch (tools/install-deps --train).

    tests/python tests/engine/parity.py -m model-f32.bin -t en \\
        --text sentences.txt [--forced 200] [--beam-lines 1000]

Teacher-forced: encoder output, gate weights and logits must differ by at most
1e-4 absolute, and the selected experts must be the same for every token with a
margin (distance of its nearest gate value from its threshold) above 1e-5.
Beam search: the outputs must be identical on at least 99.5% of the lines, and
where they differ, both translations must have scores within 1e-5. Exit status 1
if a limit is exceeded.
"""
import argparse
import subprocess
import sys

import numpy as np
import sentencepiece
import torch

import reference

TOLERANCE, MARGIN, TIE = 1e-4, 1e-5, 1e-5


def read_dump(data):
    """Return one dict per line; it maps each node name to the rows of all runs of that node."""
    lines, nodes, at = [], {}, 0
    while at < len(data):
        length = int.from_bytes(data[at:at + 4], "little")
        name = data[at + 4:at + 4 + length].decode()
        rows, cols = np.frombuffer(data, "<u4", 2, at + 4 + length)
        at += 12 + length
        values = np.frombuffer(data, "<f4", rows * cols, at).reshape(rows, cols)
        at += 4 * int(rows) * int(cols)
        if name == "line":
            lines.append({key: np.concatenate(parts) for key, parts in nodes.items()})
            nodes = {}
        else:
            nodes.setdefault(name, []).append(values)
    return lines


def margins(p, layer, name, model):
    """Return each token's margin: how close its gate values are to changing the selection."""
    if layer.gate == "threshold":
        return np.abs(p - model.w[name + ".gate.threshold"].numpy()).min(axis=1)
    if layer.gate == "topk":
        ordered = np.sort(p, axis=1)[:, ::-1]
        return ordered[:, layer.k - 1] - ordered[:, layer.k] if layer.k < p.shape[1] else np.full(len(p), np.inf)
    return np.full(len(p), np.inf)


def compare_forced(model, program, model_path, language, pairs):
    text = "".join(f"{' '.join(map(str, s))}\t{' '.join(map(str, t))}\n" for s, t in pairs)
    dump = subprocess.run([program, model_path, language], input=text.encode(), stdout=subprocess.PIPE,
                          check=True).stdout
    worst, tokens, close, wrong = {}, 0, 0, 0
    last = f"encoder.{len(model.m.encoder) - 1}.output"
    layers = [(f"{side}.{i}", layer) for side in ("encoder", "decoder")
              for i, layer in enumerate(getattr(model.m, side)) if layer.kind == "moe"]
    for (source, target), engine in zip(pairs, read_dump(dump), strict=True):
        expected = {}
        reference.dump_forced(model, expected, "x", model.source_ids(source, model.languages[language]), target)
        for mine, theirs in ([(last, "encoder.output"), ("decoder.logits", "decoder.logits")]
                             + [(name + ".gate", name + ".gate") for name, _ in layers]):
            difference = np.abs(engine[mine] - expected["x." + theirs]).max()
            worst[theirs] = max(worst.get(theirs, 0.0), float(difference))
        for name, layer in layers:
            p = torch.softmax(torch.from_numpy(engine[name + ".gate.logits"].copy()), dim=1).numpy()
            same = ((engine[name + ".gate"] != 0) == (expected[f"x.{name}.gate"] != 0)).all(axis=1)
            near = margins(p, layer, name, model) <= MARGIN
            tokens, close, wrong = tokens + len(p), close + int(near.sum()), wrong + int((~same & ~near).sum())
    print(f"teacher-forced, {len(pairs)} sentences; largest absolute differences:")
    for name, value in sorted(worst.items()):
        print(f"  {name:24s} {value:.2e}")
    print(f"  selected experts: {tokens} tokens, {close} with a margin below {MARGIN:g}, {wrong} others that differ")
    return max(worst.values()) <= TOLERANCE and wrong == 0


def compare_beam(model, program, model_path, language, sources, beam):
    command = [program, "-m", model_path, "-t", language, "--ids", "--beam", str(beam)]
    text = "".join(" ".join(map(str, s)) + "\n" for s in sources)
    lines = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\n")[:-1]
    tag, same, unexplained = model.languages[language], 0, 0
    for number, (source, line) in enumerate(zip(sources, lines, strict=True), 1):
        best = model.translate(source, tag, beam=beam)[0]
        ids = [int(x) for x in line.split()]
        if ids == best.ids:
            same += 1
            continue
        penalty = reference.length_penalty_of(len(ids) + 1, model.m.length_penalty, model.m.length_constant)
        score = model.score(source, ids, tag).sum().item() / penalty
        explained = abs(score - best.score) <= TIE
        unexplained += not explained
        print(f"  line {number}: the engine's translation scores {score:.7f}, the reference's {best.score:.7f}"
              f"{'' if explained else ': NOT a tie'}")
    share = same / len(sources)
    print(f"beam {beam}: {same} of {len(sources)} identical ({100 * share:.2f} %), {unexplained} differences not "
          f"explained by a tie")
    return share >= 0.995 and unexplained == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="an f32 model file with a tokenizer")
    parser.add_argument("-t", "--language", required=True, help="target language")
    parser.add_argument("--text", required=True, help="source sentences, one per line")
    parser.add_argument("--forced", type=int, default=200,
                        help="sentences compared node by node (default: %(default)s)")
    parser.add_argument("--beam-lines", type=int, default=1000, help="sentences translated (default: %(default)s)")
    parser.add_argument("--beam", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--parity", default="build/parity", help="built by make build/parity (default: %(default)s)")
    parser.add_argument("--translate", default="./moe-translate", help="default: %(default)s")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    model = reference.load(args.model)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.meta["tokenizer.model"])
    with open(args.text, encoding="utf-8") as file:
        sources = [pieces.encode(line.rstrip("\n")) for line in file if line.strip()]
    tag = model.languages[args.language]
    pairs = [(s, model.translate(s, tag, beam=1)[0].ids) for s in sources[:args.forced]]
    good = compare_forced(model, args.parity, args.model, args.language, pairs)
    good &= compare_beam(model, args.translate, args.model, args.language, sources[:args.beam_lines], args.beam)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
