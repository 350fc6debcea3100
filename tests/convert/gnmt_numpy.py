"""GNMT in plain NumPy float64 for each checkpoint layout: an independent implementation of reference.md, section 3,
which shares no code with tools/. Weights are the checkpoint's arrays with their original names.

    model = Nvidia(arrays, layers)           or Tf(arrays, layers, ...), Moe(checkpoint)
    model.score(source, target)              log-probabilities of target and end
    model.nvidia(source, beam=5, ...)        (ids, smallest margin of any choice, 1 if it ended)
    model.tf(...), model.paper(...)          all ids exclude the begin and end tokens
"""
import numpy as np


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def run(cell, x, width, backward=False):
    """Run a cell over the rows of x, starting with a zero state; return (outputs, last state)."""
    state, out = (np.zeros((1, width)), np.zeros((1, width))), [None] * len(x)
    for t in range(len(x))[::-1] if backward else range(len(x)):
        state = cell(x[t:t + 1], state)
        out[t] = state[0]
    return np.concatenate(out), state


def gap(values, chosen):
    """Return the smallest difference between neighbours among the first `chosen` + 1 of the sorted values."""
    values = np.asarray(values[:chosen + 1])
    values = values[np.isfinite(values)]
    return np.inf if len(values) < 2 else float(np.min(values[:-1] - values[1:]))


class Model:
    """A model with searches. Subclasses define begin(source) -> state and step(state, tokens) -> (log-probabilities
    [B, V], attention [B, T], state)."""

    def score(self, source, target):
        state, out = self.begin(source), []
        for last, wanted in zip([self.bos, *target], [*target, self.eos]):
            logp, _, state = self.step(state, [last])
            out.append(logp[0, wanted])
        return np.array(out)

    def repeat(self, state, rows):
        return [x[rows] for x in state]

    def nvidia(self, source, beam, alpha=0.6, constant=5.0, beta=0.1, most=80, bug=True):
        """Search like NVIDIA's code: lengths include BOS and EOS; penalties apply only if all beams end before the
        limit; finished beams repeat EOS at no cost. With `bug`, coverage is not reordered with the beams."""
        state = self.repeat(self.begin(source), [0] * beam)
        ids, scores = [[self.bos] for _ in range(beam)], np.zeros(beam)
        lengths, ended, margin, coverage = np.ones(beam), np.zeros(beam, bool), np.inf, 0.0
        for index in range(1, most):
            done = ended.all()
            lengths = lengths + ~ended
            logp, attention, state = self.step(state, [x[-1] for x in ids])
            coverage = coverage + np.where(ended[:, None], 0, attention)
            logp[ended] = -np.inf
            logp[ended, self.eos] = 0
            total = scores[:, None] + logp
            if index == 1:
                total[1:] = -np.inf
            order = np.argsort(-total, axis=None, kind="stable")
            margin = min(margin, gap(total.reshape(-1)[order], beam))
            parents, words = np.unravel_index(order[:beam], total.shape)
            scores = total[parents, words]
            ids = [ids[p] + [int(w)] for p, w in zip(parents, words)]
            lengths, ended = lengths[parents], words == self.eos
            state = self.repeat(state, parents)
            if not bug:
                coverage = coverage[parents]
            if done:
                seen = np.clip(coverage, 0, 1)
                seen = np.where(seen > 0, np.log(np.where(seen > 0, seen, 1)), 0).sum(1)
                scores = scores / ((constant + lengths) / (constant + 1)) ** alpha + beta * seen
                break
        best = int(np.argmax(scores))
        margin = min(margin, gap(np.sort(scores)[::-1], 1))
        return self.cut(ids[best][1:]), margin, bool(ended[best])

    def cut(self, ids):
        return ids[:ids.index(self.eos)] if self.eos in ids else ids

    def tf(self, source, beam, weight=1.0, count_end=False, most=None):
        """Search like tensorflow/nmt: order by normalised score; lengths exclude EOS unless `count_end` is set."""
        state = self.repeat(self.begin(source), [0] * beam)
        ids, totals = [[self.bos] for _ in range(beam)], np.where(np.arange(beam) == 0, 0, -np.inf)
        lengths, ended, margin = np.zeros(beam), np.zeros(beam, bool), np.inf
        for _ in range(2 * len(source) if most is None else most):
            logp, _, state = self.step(state, [x[-1] for x in ids])
            logp[ended] = -np.inf
            logp[ended, self.eos] = 0
            total = totals[:, None] + logp
            longer = lengths[:, None] + (~ended[:, None] & (np.arange(total.shape[1]) != self.eos)[None])
            rank = total / ((5 + longer) / 6) ** weight
            order = np.argsort(-rank, axis=None, kind="stable")
            margin = min(margin, gap(rank.reshape(-1)[order], beam))
            parents, words = np.unravel_index(order[:beam], total.shape)
            totals, before = total[parents, words], ended[parents]
            ids = [ids[p] + [int(w)] for p, w in zip(parents, words)]
            ended = before | (words == self.eos)
            lengths = lengths[parents] + (~before if count_end else ~ended)
            state = self.repeat(state, parents)
            if ended.all():
                break
        return self.cut(ids[0][1:]), margin, bool(ended[0])

    def paper(self, source, beam, alpha=0.2, constant=5.0, beta=0.2, prune=3.0, factor=2.0, offset=0):
        """Search like the GNMT paper (section 7) and moe.c: finished hypotheses leave the beam."""
        limit = max(1, int(factor * len(source)) + offset)
        state, live, done, margin = self.begin(source), [([self.bos], 0.0, 0.0)], [], np.inf

        def penalty(length):
            return ((constant + length) / (constant + 1)) ** alpha

        def finish(ids, total, coverage, ended):
            seen = np.log(np.clip(coverage, 1e-10, 1)).sum()
            done.append((ended, total / penalty(len(ids) - 1) + beta * seen, ids))

        for length in range(1, limit + 1):
            logp, attention, state = self.step(state, [x[0][-1] for x in live])
            total = np.array([x[1] for x in live])[:, None] + logp
            order = np.argsort(-total, axis=None, kind="stable")
            values = total.reshape(-1)[order]
            margin = min(margin, gap(values, 2 * beam))
            grown, parents = [], []
            for position, (at, value) in enumerate(zip(order, values)):
                if prune and value < values[0] - prune or not np.isfinite(value) or len(grown) == beam:
                    break
                margin = min(margin, abs(value - values[0] + prune)) if prune else margin
                row, word = divmod(int(at), total.shape[1])
                coverage = live[row][2] + attention[row]
                if word != self.eos:
                    grown.append((live[row][0] + [word], value, coverage))
                    parents.append(row)
                elif position < beam:
                    finish(live[row][0] + [word], value, coverage, True)
            live = grown
            done.sort(key=lambda x: -x[1])
            for x in done:
                margin = min(margin, abs(x[1] - done[0][1] + prune)) if prune else margin
            done = [x for x in done if not prune or x[1] >= done[0][1] - prune]
            if len(done) >= beam or not live:
                break
            state = self.repeat(state, parents)
            if length == limit:
                for ids, value, coverage in live:
                    finish(ids, value, coverage, False)
            elif done:
                best = live[0][1] / penalty(limit)
                margin = min(margin, abs(done[0][1] - best))
                if done[0][1] >= best:
                    break
        done.sort(key=lambda x: (not x[0], -x[1]))
        margin = min(margin, gap([x[1] for x in done if x[0] == done[0][0]], 1))
        return self.cut(done[0][2][1:]), margin, done[0][0]


# ---- NVIDIA's PyTorch GNMT -------------------------------------------------------------------------------------------

class Nvidia(Model):
    bos, eos = 2, 3

    def __init__(self, arrays, layers):
        self.w, self.layers = {k: v.astype(np.float64) for k, v in arrays.items()}, layers
        a = "decoder.att_rnn.attn."
        direction = self.w[a + "linear_att"]
        self.v = direction / np.linalg.norm(direction) * self.w[a + "normalize_scalar"]
        self.wq, self.wk, self.bias = self.w[a + "linear_q.weight"], self.w[a + "linear_k.weight"], self.w[
            a + "normalize_bias"]

    def cell(self, prefix, suffix=""):
        wx, wh, bx, bh = (self.w[f"{prefix}{k}_l0{suffix}"] for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))

        def step(x, state):
            h, c = state
            i, f, g, o = np.split(x @ wx.T + bx + h @ wh.T + bh, 4, axis=1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            return sigmoid(o) * np.tanh(c), c
        return step

    def begin(self, source):
        x = self.w["encoder.embedder.weight"][[self.bos, *source, self.eos]]
        h = x.shape[1]
        x = np.concatenate([run(self.cell("encoder.rnn_layers.0."), x, h)[0],
                            run(self.cell("encoder.rnn_layers.0.", "_reverse"), x, h, True)[0]], axis=1)
        for i in range(1, self.layers):
            y = run(self.cell(f"encoder.rnn_layers.{i}."), x, h)[0]
            x = x + y if i >= 2 else y
        zero = np.zeros((1, h))
        return [x[None], (x @ self.wk.T)[None]] + [zero] * 2 * self.layers

    def step(self, state, tokens):
        memory, keys, lstm = state[0], state[1], state[2:]
        x = self.w["decoder.embedder.weight"][tokens]
        new = list(self.cell("decoder.att_rnn.rnn.")(x, (lstm[0], lstm[1])))
        x = new[0]
        p = softmax(np.tanh(keys + (x @ self.wq.T + self.bias)[:, None]) @ self.v)
        context = (p[:, :, None] * memory).sum(1)
        for i in range(self.layers - 1):
            h, c = self.cell(f"decoder.rnn_layers.{i}.")(np.concatenate([x, context], 1),
                                                         (lstm[2 * i + 2], lstm[2 * i + 3]))
            new += [h, c]
            x = x + h if i >= 1 else h
        out = "decoder.classifier.classifier."
        return log_softmax(x @ self.w[out + "weight"].T + self.w[out + "bias"]), p, [memory, keys, *new]


# ---- tensorflow/nmt --------------------------------------------------------------------------------------------------

class Tf(Model):
    bos, eos = 1, 2

    def __init__(self, arrays, layers, previous=False, forget_bias=1.0, zero_state=False):
        self.w = {k.replace("dynamic_seq2seq/", ""): v.astype(np.float64) for k, v in arrays.items()}
        self.layers, self.previous, self.forget, self.zero = layers, previous, forget_bias, zero_state
        self.attention = "decoder/multi_rnn_cell/cell_0_attention/attention"
        a = self.attention + "/bahdanau_attention/"
        self.v, self.bias = self.w[a + "attention_v"], self.w.get(a + "attention_b", 0.0)
        if a + "attention_g" in self.w:
            self.v = self.w[a + "attention_g"] * self.v / np.sqrt((self.v ** 2).sum())
        self.wq = self.w[a + "query_layer/kernel"]

    def cell(self, name):
        kernel, bias = self.w[name + "/basic_lstm_cell/kernel"], self.w[name + "/basic_lstm_cell/bias"]

        def step(x, state):
            h, c = state
            i, j, f, o = np.split(np.concatenate([x, h], 1) @ kernel + bias, 4, axis=1)
            c = c * sigmoid(f + self.forget) + sigmoid(i) * np.tanh(j)
            return np.tanh(c) * sigmoid(o), c
        return step

    def begin(self, source):
        x = self.w["embeddings/encoder/embedding_encoder"][source]
        h = x.shape[1]
        forward, _ = run(self.cell("encoder/bidirectional_rnn/fw"), x, h)
        backward, last = run(self.cell("encoder/bidirectional_rnn/bw"), x, h, True)
        x, states = np.concatenate([forward, backward], axis=1), [last]
        for i in range(self.layers - 1):
            y, last = run(self.cell(f"encoder/rnn/multi_rnn_cell/cell_{i}"), x, h)
            x = x + y if i >= 1 else y
            states.append(last)
        if self.zero:
            states = [(np.zeros((1, h)),) * 2] * self.layers
        keys = x @ self.w["decoder/memory_layer/kernel"]
        return [x[None], keys[None], np.zeros((1, h)), *(part for state in states for part in state)]

    def step(self, state, tokens):
        memory, keys, before, lstm = state[0], state[1], state[2], state[3:]
        x = self.w["embeddings/decoder/embedding_decoder"][tokens]
        new = list(self.cell(self.attention)(np.concatenate([x, before], 1), (lstm[0], lstm[1])))
        x = new[0]
        p = softmax(np.tanh(keys + (x @ self.wq)[:, None] + self.bias) @ self.v)
        context = (p[:, :, None] * memory).sum(1)
        for i in range(1, self.layers):
            wide = np.concatenate([x, before if self.previous else context], 1)
            h, c = self.cell(f"decoder/multi_rnn_cell/cell_{i}")(wide, (lstm[2 * i], lstm[2 * i + 1]))
            new += [h, c]
            x = x + h if i >= 2 else h
        return log_softmax(x @ self.w["decoder/output_projection/kernel"]), p, [memory, keys, context, *new]


# ---- This project's trainer ------------------------------------------------------------------------------------------

class Moe(Model):
    """A model with projected cells and experts (threshold or top-k gate) whose first decoder layer also reads the
    context of the previous step."""

    def __init__(self, checkpoint, tag):
        self.config, self.tag = checkpoint["config"], tag
        self.bos, self.eos = self.config["bos"], self.config["eos"]
        self.w = {k: v.astype(np.float64) for k, v in checkpoint["weights"].items()}

    def cell(self, name):
        wx, wr, bias, wp = (self.w[f"{name}.{k}"] for k in ("w_x", "w_r", "bias", "w_proj"))

        def step(x, state):
            r, c = state
            i, f, g, o = np.split(x @ wx.T + r @ wr.T + bias, 4, axis=1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            return sigmoid(o) * np.tanh(c) @ wp.T, c
        return step

    def experts(self, name, layer, x):
        logits = x @ self.w[name + ".gate.weight"]
        if "threshold" in layer["gate"]:
            p = softmax(logits)
            mask = p > self.w[name + ".gate.threshold"]
            mask[~mask.any(1), logits[~mask.any(1)].argmax(1)] = True
        else:
            mask = logits >= np.sort(logits, 1)[:, -layer["k"], None]
        g, y = softmax(np.where(mask, logits, -np.inf)), 0.0
        for e in range(layer["experts"]):
            y = y + g[:, e:e + 1] * (np.maximum(x @ self.w[name + ".experts.w_up"][e],
                                                0) @ self.w[name + ".experts.w_down"][e])
        return x + sigmoid(y)

    def begin(self, source):
        x = self.w["embedding.weight"][[self.tag, *source, self.eos]] * self.config["embed_scale"]
        for i, layer in enumerate(self.config["encoder"]):
            name = f"encoder.{i}"
            if layer["type"] == "moe":
                x = self.experts(name, layer, x)
                continue
            r, c, rows, step = np.zeros((1, layer["proj"])), np.zeros((1, layer["hidden"])), [], self.cell(name)
            for t in range(len(x)):
                r, c = step(x[t:t + 1], (r, c))
                rows.append(r)
            x = x + np.concatenate(rows)
        state = [x[None], (x @ self.w["attention.w_key"].T)[None]]
        for layer in self.config["decoder"]:
            if layer["type"] != "moe":
                state += [np.zeros((1, layer["proj"])), np.zeros((1, layer["hidden"]))]
        return state

    def step(self, state, tokens):
        memory, keys, lstm, new = state[0], state[1], state[2:], []
        x = self.w["embedding.weight"][tokens] * self.config["embed_scale"]
        p = softmax(np.tanh(keys + (lstm[0] @ self.w["attention.w_query"].T)[:, None]) @ self.w["attention.v"])
        context = (p[:, :, None] * memory).sum(1)
        for i, layer in enumerate(self.config["decoder"]):
            if layer["type"] == "moe":
                x = self.experts(f"decoder.{i}", layer, x)
                continue
            wide = np.concatenate([x, context], 1) if "input" in layer else x
            r, c = self.cell(f"decoder.{i}")(wide, (lstm[len(new)], lstm[len(new) + 1]))
            new += [r, c]
            x = x + r
        logits = x @ self.w["embedding.weight"].T
        logits[:, self.config["never_generated"]] = -np.inf
        return log_softmax(logits), p, [memory, keys, *new]
