#!/usr/bin/env python3
"""Measure eager PyTorch as a peer of moe-bench, with the network of
`moe-make-random --preset paper-32`, random weights and a forced length.

The encoder has LSTM, LSTM, mixture, LSTM; the decoder has an LSTM with the
attention of App. G, mixture, LSTM. LSTMs have 2048 cells projected to 512,
experts have 2048 units, and about 4 of 32 experts pass the threshold for a
token. Every layer has a residual connection, and mixtures end with a sigmoid.

Products use oneDNN with weights packed once (f32, bf16), or PyTorch's dynamic
quantisation (int8: a scale per row of the weights, and one for all activations
of a call). The best of 32,000 logits are selected by blocks, twice as fast as
one topk. Freed memory remains in the heap. OpenMP is Intel's.
"""
import argparse
import sys
import warnings

import peer

VOCABULARY, WIDTH, HIDDEN, EXPERTS, CHOSEN = 32000, 512, 2048, 32, 4
END = 3

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--type", default="int8", choices=("f32", "bf16", "int8"))
p.add_argument("--batch", type=int, default=32)
p.add_argument("--beam", type=int, default=4)
p.add_argument("--src-len", type=int, default=25)
p.add_argument("--tgt-len", type=int, default=25)
p.add_argument("--threads", type=int, default=2)
o = p.parse_args()
peer.environment(LD_PRELOAD=peer.intel_openmp(), KMP_BLOCKTIME="1", MALLOC_MMAP_THRESHOLD_=str(1 << 30),
                 MALLOC_TRIM_THRESHOLD_=str((1 << 32) - 1), MALLOC_TOP_PAD_=str(1 << 26))

import torch  # noqa: E402

warnings.simplefilter("ignore")  # torch.ops.quantized needs deprecated tensors
FLOAT = torch.bfloat16 if o.type == "bf16" else torch.float32


def matrix(outputs, inputs, spread=1.0):
    return torch.empty(outputs, inputs).uniform_(-1, 1) * (spread * (3 / inputs) ** 0.5)


def product(outputs, inputs, rows, relu=False, spread=1.0):
    """Return a function that computes x w' or relu(x w'), with weights packed for about `rows` rows of x."""
    w = matrix(outputs, inputs, spread)
    if o.type == "int8":
        torch.backends.quantized.engine = "onednn" if rows >= 8 else "fbgemm"  # the faster engine
        scales = w.abs().amax(1) / 127
        w = torch.quantize_per_channel(w, scales, torch.zeros(outputs, dtype=torch.long), 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(w, None)
        call = torch.ops.quantized.linear_relu_dynamic if relu else torch.ops.quantized.linear_dynamic
        return lambda x: call(x, packed, False)
    packed = torch.ops.mkldnn._reorder_linear_weight(w.to(FLOAT), max(1, round(rows)))
    after = "relu" if relu else "none"
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, after, [], "")


class Cell:
    """A projected LSTM with gates in the order input, forget, output, candidate. If `inputs` is 0, step() gets the
    products of the inputs."""

    def __init__(self, inputs, rows):
        self.gates, self.project = product(4 * HIDDEN, inputs + WIDTH, rows), product(WIDTH, HIDDEN, rows)

    def step(self, x, c, ready=None):
        z = self.gates(x)
        if ready is not None:
            z = z.add_(ready)
        i, f, out = z[:, : 3 * HIDDEN].sigmoid_().chunk(3, 1)
        c = torch.addcmul(f * c, i, z[:, 3 * HIDDEN :].tanh_())
        return self.project(out * c.tanh()), c


class Mixture:
    def __init__(self, rows):
        share = rows * CHOSEN / EXPERTS
        self.gate, self.threshold = matrix(EXPERTS, WIDTH, 3.0).to(FLOAT), None
        self.up = [product(HIDDEN, WIDTH, share, relu=True) for _ in range(EXPERTS)]
        self.down = [product(WIDTH, HIDDEN, share) for _ in range(EXPERTS)]

    def __call__(self, x):
        p = torch.nn.functional.linear(x, self.gate).float().softmax(1)
        if self.threshold is None:  # calibrate: CHOSEN experts per row must pass
            self.threshold = p.view(-1).sort(descending=True)[0][len(p) * CHOSEN]
        mask = p > self.threshold
        mask.scatter_(1, p.argmax(1, keepdim=True), True)  # use at least the best expert
        experts, rows = mask.t().nonzero(as_tuple=True)
        weights = (p / (p * mask).sum(1, keepdim=True))[rows, experts]
        sorted_x, parts, at = x[rows], [], 0
        for e, n in enumerate(mask.sum(0).tolist()):
            if n:
                parts.append(self.down[e](self.up[e](sorted_x[at : at + n])))
            at += n
        y = torch.cat(parts).float() * weights.unsqueeze(1)
        return torch.zeros(x.shape).index_add_(0, rows, y).sigmoid_().to(FLOAT)


class Network:
    def __init__(self):
        batch, rows, tokens = o.batch, o.batch * o.beam, o.batch * o.src_len
        self.embedding = matrix(VOCABULARY, WIDTH, WIDTH**0.5).to(FLOAT)
        self.inputs = [product(4 * HIDDEN, WIDTH, tokens) for _ in range(3)]
        self.encoder = [Cell(0, batch) for _ in range(3)]
        self.encoder_mixture, self.decoder_mixture = Mixture(tokens), Mixture(rows)
        self.key, self.query = product(WIDTH, WIDTH, tokens), product(WIDTH, WIDTH, rows)
        self.v = matrix(1, WIDTH).to(FLOAT).view(WIDTH)
        self.bottom, self.top = Cell(2 * WIDTH, rows), Cell(WIDTH, rows)
        self.output = product(VOCABULARY, WIDTH, rows, spread=3.0)

    def encode(self, ids):
        """Encode ids [batch, source]; return memory and keys, each [batch, source, width]."""
        x = self.embedding[ids.t().reshape(-1)]  # rows ordered by time step
        for layer, cell in enumerate(self.encoder):
            if layer == 2:
                x = x + self.encoder_mixture(x)
            ready = self.inputs[layer](x).view(o.src_len, o.batch, 4 * HIDDEN)
            r, c, outputs = torch.zeros(o.batch, WIDTH, dtype=FLOAT), torch.zeros(o.batch, HIDDEN, dtype=FLOAT), []
            for step in range(o.src_len):
                r, c = cell.step(r, c, ready[step])
                outputs.append(r)
            x = x + torch.cat(outputs)
        memory = x.view(o.src_len, o.batch, WIDTH).transpose(0, 1).contiguous()
        return memory, self.key(memory.view(-1, WIDTH)).tanh_().view(memory.shape)

    def step(self, ids, state, memory, keys):
        """Run a decoder step; return logits [rows, vocabulary] and the next state."""
        r1, c1, r2, c2 = state
        query = self.query(r1).tanh_().view(o.batch, -1, WIDTH) * self.v
        weights = torch.bmm(query, keys.transpose(1, 2)).softmax(-1)
        context = torch.bmm(weights, memory).view(-1, WIDTH)
        x = self.embedding[ids]
        r1, c1 = self.bottom.step(torch.cat((x, context, r1), 1), c1)
        x = x + r1
        x = x + self.decoder_mixture(x)
        r2, c2 = self.top.step(torch.cat((x, r2), 1), c2)
        logits = self.output(x + r2)
        logits[:, END] = -1e9  # force the length
        return logits, (r1, c1, r2, c2)

    def translate(self, ids):
        memory, keys = self.encode(ids)
        rows = o.batch * o.beam
        state = tuple(torch.zeros(rows, n, dtype=FLOAT) for n in (WIDTH, HIDDEN, WIDTH, HIDDEN))
        last = torch.full((rows,), 2)
        score = torch.full((o.batch, o.beam), -1e9)
        score[:, 0] = 0  # a sentence starts with one hypothesis
        first_row = torch.arange(0, rows, o.beam).unsqueeze(1)
        history = torch.empty(rows, 0, dtype=torch.long)
        for _ in range(o.tgt_len):
            logits, state = self.step(last, state, memory, keys)
            values, ids = best(logits, o.beam)
            if o.beam == 1:
                last = ids.view(-1)
            else:
                values = values.float() - logits.logsumexp(1, keepdim=True).float()
                score, pick = (score.view(-1, 1) + values).view(o.batch, -1).topk(o.beam, 1)
                parents = (first_row + pick // o.beam).view(-1)
                last = ids.view(o.batch, -1).gather(1, pick).view(-1)
                state, history = tuple(s[parents] for s in state), history[parents]
            history = torch.cat((history, last.unsqueeze(1)), 1)
        return history.view(o.batch, o.beam, -1)[:, 0]


def best(logits, count, block=128):
    """Return topk of every row; the `count` blocks with the highest maxima contain the result."""
    blocks = logits.view(len(logits), -1, block)
    where = blocks.amax(2).topk(count, 1)[1]
    values, at = blocks.gather(1, where.unsqueeze(2).expand(-1, -1, block)).flatten(1).topk(count, 1)
    return values, where.gather(1, at // block) * block + at % block


def main():
    torch.set_num_threads(o.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    network = Network()
    source = torch.randint(4, VOCABULARY, (o.batch, o.src_len))
    peer.serve("PyTorch %s %s" % (torch.__version__.split("+")[0], o.type), lambda: network.translate(source).numel(),
               o.batch * o.tgt_len)


if __name__ == "__main__":
    sys.exit(main())
