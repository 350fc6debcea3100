#!/usr/bin/env python3
"""Train Deep MoE (Eigen et al. 2013, arXiv 1312.4314) on jittered MNIST, or on
frames of speech, with PyTorch on the CPU.

    train-digits.py train --data DIR --out DIR ...
        train one network; print error rates and an analysis of the gates
    train-digits.py table --data DIR --out DIR ...
        reproduce the comparison of the paper's Table 1; resumable

Data (section 4.1): every digit of 28 x 28 pixels is placed up to four pixels
from the centre of an image of 36 x 36, at one of 81 equally probable offsets.
DIR has the 10,000 images of MNIST's test set: 8,000 for training, with new
offsets in every epoch, and the last 2,000 for testing, each at one random
offset that does not depend on --seed. Alternatively (section 4.2) DIR has
frames of speech from speech.py (the classes are phonemes); the paper uses
    --experts 4 16 --hidden 128 128 --gate-hidden 64 64

The network is a stack of mixtures of rectified linear experts, a linear layer
and softmax. A gate is softmax(B max(0, A x + a) + b), with few hidden units.
Training is stochastic gradient descent, first with a constraint that balances
the running totals of the experts (gating.RunningTotals), then without it for
--fine-tune epochs. With --losses, the losses of Bengio et al. 2015 balance the
gates instead of the constraint; they are meant for sigmoids (--gate sigmoid),
since L_e of a softmax is always 0. --network selects the second layer:
    mixture      four experts, the paper's model
    single       one expert of the same size
    concat       one expert of the size of all four: the mixture's upper bound
    dense        plain layers instead of mixtures, with a second layer of the
                 same size and as many parameters in total as `mixture`
    one-layer    no second layer

Files in --out: model.pt (layout "moe-checkpoint-1", for convert.py) and
report.json. `table` writes table.json and, for every network, a checkpoint
NETWORK-HIDDEN-HIDDEN-GATE-GATE-SEED.pt.
"""
import common  # must be imported first to extend sys.path and report missing modules
import argparse
import gzip
import json
import math
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

import gating

DIGIT, IMAGE, CLASSES, TRAIN = 28, 36, 10, 8000
OFFSETS = IMAGE - DIGIT + 1
NETWORKS = ("mixture", "single", "concat", "dense", "one-layer")


# ---- Data ------------------------------------------------------------------------------------------------------------

def read_idx(path):
    """Read an array of bytes in MNIST's IDX format."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        data = file.read()
    dims = [int.from_bytes(data[4 + 4 * i:8 + 4 * i], "big") for i in range(data[3])]
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(dims)).reshape(dims)


def read_digits(folder):
    """Return (images [10000, 28, 28] in 0 .. 1, classes [10000])."""
    images = read_idx(os.path.join(folder, "t10k-images-idx3-ubyte.gz"))
    classes = read_idx(os.path.join(folder, "t10k-labels-idx1-ubyte.gz"))
    return torch.from_numpy(images.astype(np.float32) / 255), torch.from_numpy(classes.astype(np.int64))


def jitter(digits, random):
    """Place every digit at a random offset (down, right). Return (images [rows, 37 * 37], offsets [rows, 2])."""
    at = torch.from_numpy(random.integers(0, OFFSETS, (len(digits), 2)))
    pixel = torch.arange(DIGIT)
    rows, columns = at[:, :1] + pixel, at[:, 1:] + pixel
    images = torch.zeros(len(digits), IMAGE, IMAGE)
    images[torch.arange(len(digits))[:, None, None], rows[:, :, None], columns[:, None, :]] = digits
    return images.flatten(1), at


class Digits:
    """Jittered MNIST: the first digits for training, the rest for testing."""
    inputs, names, factor = IMAGE ** 2, [str(i) for i in range(CLASSES)], "location"

    def __init__(self, folder):
        self.digits, self.classes = read_digits(folder)
        self.test, self.fixed = (self.part(x, np.random.default_rng(2)) for x in (slice(TRAIN, None), slice(TRAIN)))

    def part(self, which, random):
        return jitter(self.digits[which], random)[0], self.classes[which]

    def epoch(self, random):
        """Return (images, classes) for an epoch of training."""
        return self.part(slice(TRAIN), random)

    def observed(self, draws=10):
        """Yield (images, factor, classes) for analysing gates: test digits at `draws` random offsets each. The factor
        is the cell of the offset; there are 25 cells of 2 x 2 offsets, smaller at the edge."""
        random = np.random.default_rng(3)
        for _ in range(draws):
            images, at = jitter(self.digits[TRAIN:], random)
            yield images, at[:, 0] // 2 * ((OFFSETS + 1) // 2) + at[:, 1] // 2, self.classes[TRAIN:]


class Frames:
    """Frames of speech from speech.py; the factor is the voice."""
    factor = "voice"

    def __init__(self, folder):
        def read(name):
            return torch.from_numpy(read_idx(os.path.join(folder, name + "-ubyte")).copy())
        self.fixed, self.test = ((read(part + "-images-idx3").flatten(1).float() / 255,
                                  read(part + "-labels-idx1").long()) for part in ("train", "test"))
        self.voices, self.inputs = read("test-voices-idx1").long(), self.fixed[0].shape[1]
        with open(os.path.join(folder, "phonemes.txt"), encoding="utf-8") as file:
            self.names = file.read().split()

    def epoch(self, random):
        return self.fixed

    def observed(self):
        yield self.test[0], self.voices, self.test[1]


def read_data(folder):
    return (Frames if os.path.exists(os.path.join(folder, "phonemes.txt")) else Digits)(folder)


# ---- Network ---------------------------------------------------------------------------------------------------------

def make_config(o, data=Digits):
    """Return the config of a network, which describes the network and is stored in the checkpoint."""
    def layer(experts, hidden, gate_hidden):
        kind = "sigmoid" if o.gate == "sigmoid" and experts > 1 else "dense"
        mixture = gating.mixture_config(kind, experts=experts, hidden=hidden, expert="linear", output="none",
                                        residual=False, gate_hidden=gate_hidden if experts > 1 else 0)
        return {**mixture, "expert_bias": True, "gate_bias": experts > 1}
    mixtures = [layer(n, h, g) for n, h, g in zip(o.experts, o.hidden, o.gate_hidden)]
    second, config = o.hidden[1], {"arch": "deep-moe", "classes": len(data.names), "inputs": data.inputs}
    network = {"mixture": mixtures, "single": [mixtures[0], layer(1, second, 0)],
               "concat": [mixtures[0], layer(1, second * o.experts[1], 0)],
               "dense": [layer(1, dense_units(config, mixtures), 0), layer(1, second, 0)],
               "one-layer": mixtures[:1]}[o.network]
    return {**config, "network": network, "output_bias": True, "class_names": data.names}


def weight_shapes(config):
    """Return name -> (shape, initial standard deviation). Matrices are [in, out] for gates, otherwise [out, in]."""
    shapes, width = {}, config["inputs"]
    for i, x in enumerate(config["network"]):
        name, features = f"network.{i}", x["gate_hidden"] or width
        if x["gate_hidden"]:
            shapes[name + ".gate.hidden.weight"] = (width, features), (2 / width) ** 0.5
            shapes[name + ".gate.hidden.bias"] = (features,), 0.0
        shapes[name + ".gate.weight"] = (features, x["experts"]), features ** -0.5 if x["experts"] > 1 else 0.0
        if x["gate_bias"]:
            shapes[name + ".gate.bias"] = (x["experts"],), 0.0
        shapes[name + ".experts.weight"] = (x["experts"] * x["hidden"], width), (2 / width) ** 0.5
        shapes[name + ".experts.bias"] = (x["experts"] * x["hidden"],), 0.0
        width = x["hidden"]
    shapes["output.weight"], shapes["output.bias"] = ((config["classes"], width),
                                                      width ** -0.5), ((config["classes"],), 0.0)
    return shapes


def parameters(config):
    """Return the number of parameters of a network, excluding the unused gates of single experts."""
    shapes = weight_shapes(config)
    single = {f"network.{i}.gate.weight" for i, x in enumerate(config["network"]) if x["experts"] == 1}
    return sum(math.prod(shape) for name, (shape, _) in shapes.items() if name not in single)


def dense_units(config, mixtures):
    """Return the number of first-layer units that gives a dense network as many parameters as mixtures and gates."""
    second, classes = mixtures[1]["hidden"], config["classes"]
    rest = second + second * classes + classes
    return round((parameters({**config, "network": mixtures}) - rest) / (config["inputs"] + 1 + second))


class Network:
    def __init__(self, config, seed):
        random = torch.Generator().manual_seed(seed)
        self.config = config
        self.weights = {name: (torch.randn(shape, generator=random) * deviation).requires_grad_()
                        for name, (shape, deviation) in weight_shapes(config).items()}
        self.totals = None  # one RunningTotals per layer while the constraint applies

    def constrain(self, margin):
        self.totals = [gating.RunningTotals(x["experts"], margin) for x in self.config["network"]]

    def forward(self, x):
        """Return (logits [rows, classes], gates of every layer [rows, experts])."""
        w, gates = self.weights, []
        for i, layer in enumerate(self.config["network"]):
            name, experts = f"network.{i}", layer["experts"]
            y = F.linear(x, w[name + ".experts.weight"], w[name + ".experts.bias"]).relu()
            if experts > 1:
                f = gating.mlp_features(x, w[name + ".gate.hidden.weight"].t(), w[name + ".gate.hidden.bias"])
                kind = gating.sigmoid if layer["gate"] == "sigmoid" else gating.dense
                gate = kind(f @ w[name + ".gate.weight"] + w[name + ".gate.bias"])
                if self.totals:
                    gate = self.totals[i](gate)
                y = (gate.weights[:, None] @ y.view(len(x), experts, -1))[:, 0]
                gates.append(gate.weights)
            else:
                gates.append(torch.ones(len(x), 1))
            x = y
        return F.linear(x, w["output.weight"], w["output.bias"]), gates

    @torch.no_grad()
    def errors(self, images, classes):
        """Return the error rate, and the mean loss in nats."""
        logits = torch.cat([self.forward(x)[0] for x in images.split(4096)])
        return float((logits.argmax(1) != classes).float().mean()), float(F.cross_entropy(logits, classes))

    def checkpoint(self, **more):
        return {"format": "moe-checkpoint-1", "config": {**self.config, **more},
                "weights": {name: weight.detach().clone() for name, weight in self.weights.items()}}


def balance_loss(gates, weights):
    """Return the weighted losses of Bengio et al. 2015 (L_b, L_e, L_v) of all mixtures' gates, with equal targets."""
    total = 0.0
    for g in gates:
        if g.shape[1] > 1:
            losses = (gating.mean_activation_loss(g, 1 / g.shape[1]), gating.example_activation_loss(g, 1 / g.shape[1]),
                      gating.variance_loss(g))
            total = total + sum(w * loss for w, loss in zip(weights, losses))
    return total


# ---- Analysis of gates -----------------------------------------------------------------------------------------------

def mutual_information(gates, labels):
    """Return I(expert; label) in bits, with the expert sampled by the gate weights [rows, n]; labels [rows]."""
    joint = torch.zeros(int(labels.max()) + 1, gates.shape[1], dtype=torch.float64)
    joint.index_add_(0, labels, gates.double() / len(gates))
    independent = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    return float((joint * (joint / independent).clamp(min=1e-300).log2())[joint > 0].sum())


def combinations(first, second):
    """Return how often gates [rows, n] and [rows, m] of two mixtures choose each pair of experts: fractions [n, m]."""
    return first.double().t() @ second.double() / len(first)


@torch.no_grad()
def gate_report(network, data):
    """Return for every mixture the gate's information about class and factor, and the balance of the experts; for the
    second mixture also how often each pair of experts is chosen. Weights are normalised."""
    images, factor, label = zip(*data.observed())
    gates = [network.forward(x)[1] for x in images]
    factor, label, report, before = torch.cat(factor), torch.cat(label), [], None
    for i, weights in enumerate(map(torch.cat, zip(*gates))):
        if weights.shape[1] > 1:
            weights = weights / weights.sum(1, keepdim=True)
            share = weights.mean(0)
            report.append({"layer": i, data.factor + "_bits": round(mutual_information(weights, factor), 4),
                           "class_bits": round(mutual_information(weights, label), 4),
                           "expert_bits": round(float(-(share * share.clamp(min=1e-30).log2()).sum()), 4),
                           "importance": [round(float(x), 4) for x in share],
                           "cv_importance": round(gating.cv(share), 4)})
            if before is not None:
                shares = combinations(before, weights)
                report[-1]["combinations"] = [[round(float(x), 4) for x in row] for row in shares]
            before = weights
    return report


# ---- Training --------------------------------------------------------------------------------------------------------

def train(o, log):
    """Train one network; return (network, report)."""
    data = read_data(o.data)
    config = make_config(o, data)
    network = Network(config, o.seed)
    optimizer = torch.optim.SGD(network.weights.values(), o.rate, o.momentum, weight_decay=o.weight_decay)
    random = np.random.default_rng([o.seed, 1])
    if not o.losses:
        network.constrain(o.margin)
    begin, epochs = time.time(), o.epochs + o.fine_tune
    for epoch in range(epochs):
        if epoch == o.epochs:
            network.totals = None
        factor = min(1.0, 2 * (1 - epoch / epochs))  # constant, then falling linearly to zero
        for group in optimizer.param_groups:
            group["lr"] = o.rate * factor
        images, classes = data.epoch(random)
        order, total = torch.from_numpy(random.permutation(len(images))), 0.0
        for rows in order.split(o.batch):
            logits, gates = network.forward(images[rows])
            loss = F.cross_entropy(logits, classes[rows])
            optimizer.zero_grad()
            (loss + balance_loss(gates, o.losses or ())).backward()
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        if epoch % max(1, epochs // 9) == 0 or epoch == epochs - 1:
            totals, network.totals = network.totals, None
            log(f"{o.network} {o.hidden} epoch {epoch + 1}/{epochs}: loss {total / len(images):.4f}, "
                f"test error {100 * network.errors(*data.test)[0]:.2f} %, {time.time() - begin:.0f} s")
            network.totals = totals
    train_error, test_error = network.errors(*data.fixed)[0], network.errors(*data.test)[0]
    report = {"network": o.network, "experts": o.experts, "hidden": [x["hidden"] for x in config["network"]],
              "gate_hidden": o.gate_hidden, "parameters": parameters(config), "seed": o.seed,
              "epochs": [o.epochs, o.fine_tune], "train_error": round(100 * train_error, 3),
              "test_error": round(100 * test_error, 3), "gates": gate_report(network, data), "factor": data.factor,
              "seconds": round(time.time() - begin)}
    return network, report


def save(network, path, report):
    torch.save(network.checkpoint(seed=report["seed"], test_error=report["test_error"]), path + ".part")
    os.replace(path + ".part", path)


def write(path, text):
    with open(path + ".part", "w") as file:
        file.write(text)
    os.replace(path + ".part", path)


def log(text):
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def train_one(o):
    network, report = train(o, log)
    os.makedirs(o.out, exist_ok=True)
    save(network, os.path.join(o.out, "model.pt"), report)
    write(os.path.join(o.out, "report.json"), json.dumps(report, indent=1) + "\n")
    print(f"{report['parameters']:,} parameters; error: train {report['train_error']:.2f} %, test "
          f"{report['test_error']:.2f} %")
    for gate in report["gates"]:
        factor = report["factor"]
        print(f"gate of layer {gate['layer']}: information about {factor} {gate[factor + '_bits']:.3f} bits, about "
              f"class {gate['class_bits']:.3f} bits, of {gate['expert_bits']:.3f}; CV(importance) "
              f"{gate['cv_importance']:.3f}")
        for row in gate.get("combinations", ()):
            print("  with an expert of the previous layer: " + " ".join(f"{100 * x:5.1f} %" for x in row))


def table(o):
    """Train the sizes of the paper's table: 20 to 100 units in both layers, 50 or 20 hidden units per gate."""
    os.makedirs(o.out, exist_ok=True)
    path = os.path.join(o.out, "table.json")
    done = json.load(open(path)) if os.path.exists(path) else []
    for hidden, gate_hidden in (([50, 20], [20, 20]), ([100, 20], [50, 20]), ([100, 20], [50, 50]),
                                ([100, 100], [50, 50])):
        for network in NETWORKS:
            size = f"4x{hidden[0]} - 4x{hidden[1]}, gates {gate_hidden[0]} - {gate_hidden[1]}"
            for seed in o.seeds:
                if any((x["size"], x["network"], x["seed"]) == (size, network, seed) for x in done):
                    continue
                settings = {**vars(o), "hidden": hidden, "gate_hidden": gate_hidden, "network": network, "seed": seed}
                trained, report = train(argparse.Namespace(**settings), log)
                save(trained, os.path.join(o.out, "-".join(map(str, [network, *hidden, *gate_hidden, seed])) + ".pt"),
                     report)
                done.append({"size": size, **report})
                write(path, json.dumps(done, indent=1) + "\n")
    print(f"| size | {' | '.join(NETWORKS)} |\n|---|{'---|' * len(NETWORKS)}")
    for size in dict.fromkeys(x["size"] for x in done):
        cells = []
        for network in NETWORKS:
            runs = [x for x in done if (x["size"], x["network"]) == (size, network)]
            mean = [sum(x[key] for x in runs) / max(1, len(runs)) for key in ("train_error", "test_error")]
            cells.append(f"{mean[0]:.2f} / {mean[1]:.2f}")
        print(f"| {size} | {' | '.join(cells)} |")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("train", "train one network"), ("table", "train the networks of Table 1")):
        p = commands.add_parser(name, help=text, description=text,
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        p.add_argument("--data", required=True, help="folder with MNIST's t10k files, or from speech.py")
        p.add_argument("--out", required=True, help="output folder")
        p.add_argument("--experts", type=int, nargs=2, default=[4, 4], help="experts of both layers")
        if name == "train":
            p.add_argument("--network", choices=NETWORKS, default="mixture", help="network to train")
            p.add_argument("--hidden", type=int, nargs=2, default=[50, 20], help="units per expert in both layers")
            p.add_argument("--gate-hidden", type=int, nargs=2, default=[20, 20], help="hidden units of the gates")
            p.add_argument("--seed", type=int, default=1, help="random seed of weights, offsets and order")
        else:
            p.add_argument("--seeds", type=int, nargs="+", default=[1], help="random seeds, one network each")
        p.add_argument("--epochs", type=int, default=60, help="epochs with the balancing constraint")
        p.add_argument("--fine-tune", type=int, default=30, help="subsequent epochs without it")
        p.add_argument("--gate", choices=("softmax", "sigmoid"), default="softmax", help="sigmoid requires --losses")
        p.add_argument("--losses", type=float, nargs=3, metavar=("B", "E", "V"),
                       help="use the losses of Bengio et al. 2015 instead of the constraint, with weights of mean "
                            "activation, activation per example and variance")
        p.add_argument("--margin", type=float, default=100, help="margin of the constraint, in examples above the mean")
        p.add_argument("--batch", type=int, default=50, help="examples per step")
        p.add_argument("--rate", type=float, default=0.02, help="learning rate")
        p.add_argument("--momentum", type=float, default=0.9, help="momentum of stochastic gradient descent")
        p.add_argument("--weight-decay", type=float, default=0.0, help="decay of all weights")
        p.add_argument("--threads", type=int, default=1, help="CPU threads")
    o = parser.parse_args()
    if o.gate == "sigmoid" and not o.losses:
        parser.error("--gate sigmoid is not supported with the constraint, which assumes weights that add up to 1: use "
                     "--losses, e.g. 0.1 0.1 0.1")
    return o


def main():
    o = arguments()
    torch.set_num_threads(o.threads)
    train_one(o) if o.command == "train" else table(o)


if __name__ == "__main__":
    main()
