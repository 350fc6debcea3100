#!/usr/bin/env python3
"""Compare mixtures with dense layers in translation: train networks with a dense
layer, with noisy and with strictly balanced mixtures, several seeds each, and
tabulate loss and BLEU.

The networks are those of train.py --recipe mixture, in which experts do half
of the work. Networks only differ in the two mixtures: 32 experts of 1,024
units, 4 per token, or one dense layer of 4,096 units, which takes as many
operations. All networks of a seed see the same batches.

Dev loss (nats per token) and greedy BLEU cover the Tatoeba dev sets in the six
directions with English and three directions of newstest2012, with inference
thresholds. "±" precedes half of the 95% confidence interval of the mean over
the seeds. The last columns compare each network with the first, seed by seed.

Every network has a folder NETWORK-seed-N in --out with the files of train.py,
the trainer's output (log) and the result (test.json). SIGTERM or SIGINT saves
and stops; the same command continues.
"""
import common  # must be imported first to extend sys.path and report missing modules
import argparse
import functools
import os
import pathlib

import torch

from networks import Networks, interval
import report
import train


MIXTURES = "encoder.2", "decoder.1"


def operations(config):
    """Return the multiply-adds of a source and a target token at inference, excluding attention and gates."""
    d, count = config["d_model"], dict.fromkeys(("LSTM", "experts", "softmax"), 0)
    for i, layer in [(i, layer) for side in ("encoder", "decoder") for i, layer in enumerate(config[side])]:
        hidden = layer["hidden"]
        if layer["type"] == "moe":
            count["experts"] += layer["k"] * 2 * d * hidden
        else:
            cells, inputs = 1 + (layer["type"] == "bi-lstmp"), d * (1 + train.reads_context(layer))
            count["LSTM"] += cells * (4 * hidden * (inputs + layer["proj"]) + hidden * layer["proj"])
    return {**count, "softmax": d * config["vocab_size"]}


def cache_of(o):
    return o.cache or os.path.join(o.out, "data")


def network_options(o, name, seed, folder):
    """Return train.py's options for a network."""
    words = ["train", "--corpus", o.corpus, "--out", folder, "--cache", cache_of(o),
             "--recipe", "mixture", "--gate", name, "--seed", str(seed), "--tokens", str(o.tokens),
             "--device", o.device, "--precision", o.precision, "--threads", "1",
             "--batch-tokens", str(o.batch_tokens), "--short-minutes", "0", "--evaluate-every", "1e9",
             "--rate", str(o.rate), "--muon-rate", str(o.muon_rate),
             "--dev-sentences", str(o.dev_sentences), "--news-sentences", str(o.news_sentences)]
    return train.arguments(words + (["--spm", o.spm] if o.spm else []))


def measure(o):
    """Train one network; return its final losses, BLEU and balance."""
    torch.set_num_threads(1)
    train.keep_memory()
    train.use(train.CpuKernels if o.device == "cpu" else train.TorchKernels, o.precision)
    trainer = train.Trainer(o)
    trainer.run()
    if trainer.stopped:
        return None
    row = trainer.measured
    bleu = {key: value for key, value in row.items() if key.startswith("bleu.")}

    def mean(wanted):
        found = [value for key, value in bleu.items() if wanted(key)]
        return sum(found) / len(found)
    return {"tokens": trainer.tokens, "minutes": round(trainer.elapsed / 60, 1), "weights": trainer.model.flat.numel(),
            "operations": operations(trainer.model.config), **row,
            "from English": mean(lambda key: key.startswith("bleu.en-")),
            "into English": mean(lambda key: key.endswith("-en") and "news" not in key),
            "Tatoeba": mean(lambda key: "news" not in key), "news": mean(lambda key: "news" in key)}


def shown(values, digits):
    """Format the mean of values and half of the confidence interval."""
    mean, half = interval(values)
    return f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if len(values) > 1 else "")


def table(results):
    """Return the lines of the table, with a row per network."""
    rows, first = [], next(iter(results.values()))[1]
    for name, (_, found) in results.items():
        def values(key, found=found):
            return [x[key] for x in found]

        def against(key, values=values):
            return [a - b[key] for a, b in zip(values(key), first)]

        def gates(key, name=name, found=found):
            if name == "dense":
                return "-"
            return ", ".join(f"{sum(x[f'{gate}.gate.{key}'] for x in found) / len(found):.2f}" for gate in MIXTURES)
        rows.append({
            "network": name, "weights, M": f"{found[0]['weights'] / 1e6:.1f}",
            **{f"{part}, k": f"{count / 1e3:.0f}" for part, count in found[0]["operations"].items()},
            "dev loss": shown(values("dev_loss"), 3), "news loss": shown(values("news_loss"), 3),
            "BLEU from English": shown(values("from English"), 2), "into English": shown(values("into English"), 2),
            "news": shown(values("news"), 2), "experts (encoder, decoder)": gates("experts"), "CV(load)": gates("cv"),
            "loss, compared": "" if found is first else shown(against("dev_loss"), 3),
            "BLEU, compared": "" if found is first else shown(against("Tatoeba"), 2)})
    return report.table(rows)


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--corpus", required=True, help="folder with train/ and dev/")
    p.add_argument("--out", required=True, help="folder of the networks' folders")
    p.add_argument("--cache", help="tokenised corpus, created if missing (default: data in --out)")
    p.add_argument("--spm", help="SentencePiece model to use for the cache")
    p.add_argument("--networks", nargs="+", default=["dense", "noisy", "balanced"],
                   choices=("dense", "noisy", "balanced"), metavar="NETWORK",
                   help="dense, noisy, balanced (default: all)")
    p.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="one network each (default: 1 2 3)")
    p.add_argument("--tokens", type=float, default=10, help="million target tokens per network (default: 10)")
    p.add_argument("--batch-tokens", type=int, default=3000, help="initial tokens per batch (default: 3000)")
    p.add_argument("--rate", type=float, default=2e-3, help="learning rate of Adam (default: 0.002)")
    p.add_argument("--muon-rate", type=float, default=0.01, help="learning rate of Muon (default: 0.01)")
    p.add_argument("--dev-sentences", type=int, default=500, help="sentences of each Tatoeba dev set (default: 500)")
    p.add_argument("--news-sentences", type=int, default=200, help="sentences of newstest2012 (default: 200)")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute (default: cpu)")
    p.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="precision (default: bf16)")
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="networks to train in parallel")
    p.add_argument("--card", type=pathlib.Path, help="file to write the table into")
    p.add_argument("--part", default="mixtures", help="section of the card (default: mixtures)")
    return p.parse_args()


def main():
    o = arguments()
    os.makedirs(o.out, exist_ok=True)
    train.data.prepare(o.corpus, cache_of(o), train.RECIPES["mixture"][0], o.spm, train.log)
    networks = Networks(o, functools.partial(network_options, o), measure, "dev_loss")
    networks.same_as_before()
    networks.train()
    lines = table(networks.results())
    print("\n".join(lines))
    if o.card:
        report.write_card(o.card, o.part, "\n".join(["", *lines, ""]))


if __name__ == "__main__":
    main()
