"""Independent reference for decoder-only models: Hugging Face's layout and search rules, in NumPy float64.

Arrays have the published names and layouts. Searches and routing record a margin: the smallest difference between
values whose order decided a result.
"""
import numpy as np
from make_decoder import PREDICTED, chosen_of
from transformer_numpy import log_softmax, softmax


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


def penalised(values, ids, penalty):
    """Apply Hugging Face's repetition penalty once to each distinct token of `ids`; return the new values."""
    out, used = values.copy(), np.unique(ids).astype(int)
    out[used] = np.where(values[used] > 0, values[used] / penalty, values[used] * penalty)
    return out


def scrambled(z):
    """Advance the splitmix64 state z by one step; return its scrambled value."""
    z = (z + 0x9e3779b97f4a7c15) % 2 ** 64
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 % 2 ** 64
    z = (z ^ z >> 27) * 0x94d049bb133111eb % 2 ** 64
    return z ^ z >> 31


def draw(logits, bits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return (sampled token, margin: the smallest relative change that could select another token)."""
    weights = np.floor(2.0 ** 30 * np.exp((logits - logits.max()) / temperature))
    order = np.argsort(-weights, kind="stable")
    if top_k:
        order = order[:top_k]
    falling = weights[order]
    sums = np.cumsum(falling)
    before, margin = sums - falling, np.inf
    if top_p < 1:
        stay = before < np.float64(np.float32(top_p)) * sums[-1]
        margin = np.abs(before / sums[-1] - top_p)[1:].min(initial=1)
        order, falling, sums = order[stay], falling[stay], sums[stay]
    if min_p:
        least = np.float64(np.float32(min_p)) * 2.0 ** 30
        margin = min(margin, np.abs(falling / least - 1).min())
        order, sums = order[falling >= least], sums[falling >= least]
    at = np.floor(np.float64(bits >> 11) * 2.0 ** -53 * sums[-1])
    return int(order[np.searchsorted(sums, at, "right")]), min(margin, np.abs(sums - at)[:-1].min(initial=sums[-1]) /
                                                              sums[-1])


def usual_name(name):
    """Return a tensor's name in Qwen's spelling if it has Mixtral's or Hunyuan's."""
    for theirs, usual in (("linear_attn.out_norm", "linear_attn.norm"), ("block_sparse_moe", "mlp"),
                          (".gate.wg.", ".gate."), (".w1.", ".gate_proj."),
                          (".w2.", ".down_proj."), (".w3.", ".up_proj.")):
        name = name.replace(theirs, usual)
    return name


class Decoder:
    def __init__(self, config, arrays, wrong=(), bits=32):
        """`wrong` names deliberate errors that tests must detect; `bits` is the precision of cached keys and values."""
        self.c, self.wrong, self.bits = {"norm_topk_prob": True, **config}, wrong, bits
        self.w = {usual_name(name): x for name, x in arrays.items()}
        self.head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        about = config.get("rope_parameters") or {}
        theta = config.get("rope_theta") or about.get("rope_theta", 1e4)
        family = config["model_type"]
        self.qwen, self.lara = family.startswith("qwen3_5"), family == "lara_mini"
        self.turned = int(self.head * about.get("partial_rotary_factor", .25 if self.qwen else 1))
        if "all turned" in wrong:
            self.turned = self.head
        alpha = (config.get("rope_scaling") or {}).get("alpha")
        if alpha and "alpha" not in wrong:
            theta *= alpha ** (self.head / (self.head - 2))
        self.frequency = theta ** (-2.0 * np.arange(self.turned // 2) / self.turned)
        if about.get("rope_type") == "llama3" and "llama3" not in wrong:
            self.frequency = np.array([self.llama_3(f, about) for f in self.frequency])
        self.margin, self.experts = np.inf, []
        self.gemma, self.cohere = config["model_type"].startswith("gemma3"), config["model_type"].startswith("cohere")
        if self.gemma:
            self.set_gemma(config, theta)
        period = config.get("sliding_window_pattern", 4) if config["model_type"] == "cohere2" else 0
        still = np.zeros(self.head // 2)  # layers without windows have no positions
        if self.cohere:
            self.layers = [(config["sliding_window"] + ("window" in wrong), None) if period and (i + 1) % period else
                           (None, still if period and "turned" not in wrong else None)
                           for i in range(config["num_hidden_layers"])]

    def set_gemma(self, c, theta):
        """Set the window and frequencies of each layer. Only global layers have scaled positions."""
        scaling = c.get("rope_scaling") or {}
        factor = scaling.get("factor", 1) if "linear" not in self.wrong else 1
        base = lambda theta: theta ** (-2.0 * np.arange(self.head // 2) / self.head)
        full, local = base(theta) / factor, base(c["rope_local_base_freq"])
        pattern = c.get("layer_types") or ["sliding_attention" if (i + 1) % c.get("sliding_window_pattern", 6) else
                                           "full_attention" for i in range(c["num_hidden_layers"])]
        self.layers = [(c["sliding_window"] + ("window" in self.wrong), local if "local" not in self.wrong else full)
                       if kind == "sliding_attention" else (None, full) for kind in pattern]

    @staticmethod
    def llama_3(frequency, about):
        """Scale frequencies like Hugging Face's ROPE_INIT_FUNCTIONS["llama3"]."""
        length, low, high = (about[key] for key in ("original_max_position_embeddings", "low_freq_factor",
                                                    "high_freq_factor"))
        wave = 2 * np.pi / frequency
        if wave < length / high:
            return frequency
        if wave > length / low:
            return frequency / about["factor"]
        smooth = (length / wave - low) / (high - low)
        return (1 - smooth) * frequency / about["factor"] + smooth * frequency

    def rms(self, x, name):
        more = (self.gemma or self.qwen) and "plus 1" not in self.wrong
        return (self.w[name] + more) * (x / np.sqrt((x ** 2).mean(-1, keepdims=True) + self.c["rms_norm_eps"]))

    def layer_norm(self, x, name):
        mean = 0 if "mean" in self.wrong else x.mean(-1, keepdims=True)
        return self.w[name] * (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + self.c["layer_norm_eps"])

    def turn(self, x, frequency=None):
        """Apply RoPE to x [tokens, heads, head]."""
        angle = np.arange(len(x))[:, None, None] * (self.frequency if frequency is None else frequency)
        cosine, sine = np.cos(angle), np.sin(angle)
        x, rest = x[..., :2 * angle.shape[-1]], x[..., 2 * angle.shape[-1]:]
        if self.cohere != ("neighbours" in self.wrong):
            a, b, y = x[..., ::2], x[..., 1::2], np.empty_like(x)
            y[..., ::2], y[..., 1::2] = a * cosine - b * sine, b * cosine + a * sine
            return y
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, rest], -1)

    def kept(self, x):
        """Round keys or values [tokens, heads, head] like the cache: not at all with 32 bits, to F16
        with 16, and to a byte per number with a scale per head with 8."""
        if self.bits == 32:
            return x
        if self.bits == 16:
            return x.astype(np.float16).astype(np.float64)
        scale = np.abs(x).max((0, 1, 2) if "one scale" in self.wrong else -1, keepdims=True) / 127
        return np.round(x / scale) * scale

    def attention(self, z, at, window=None, frequency=None):
        n, queries, keys = len(z), self.c["num_attention_heads"], self.c["num_key_value_heads"]
        bias = lambda part: 0 if "unbiased" in self.wrong else self.w.get(f"{at}{part}_proj.bias", 0)
        q, k, v = ((z @ self.w[f"{at}{part}_proj.weight"].T + bias(part)).reshape(n, heads, -1)
                   for part, heads in (("q", queries), ("k", keys), ("v", keys)))
        gate = 1
        if self.qwen and "ungated" in self.wrong:
            q = q[..., :self.head]
        elif self.qwen:
            halves = q[..., :self.head], q[..., self.head:]
            q, gate = halves[::-1] if "gate first" in self.wrong else halves
            gate = 1 / (1 + np.exp(-gate.reshape(n, -1)))
        hunyuan = self.c["model_type"].startswith("hunyuan")
        names = ("query_layernorm", "key_layernorm") if hunyuan else ("q_norm", "k_norm")
        norms = [lambda x, name=name: self.rms(x, f"{at}{name}.weight") for name in names]
        if at + names[0] + ".weight" not in self.w:
            q, k = self.turn(q, frequency), self.turn(k, frequency)
        elif hunyuan != ("side" in self.wrong):
            q, k = (norm(self.turn(x, frequency)) for norm, x in zip(norms, (q, k)))
        else:
            q, k = (self.turn(norm(x), frequency) for norm, x in zip(norms, (q, k)))
        which = np.arange(queries) // (queries // keys)
        if "spread" in self.wrong:
            which = np.arange(queries) % keys
        (own_k, own_v), (k, v) = ([x[:, which] for x in (f(k), f(v))] for f in (lambda x: x, self.kept))
        root = self.c["query_pre_attn_scalar"] if self.gemma and "query scale" not in self.wrong else self.head
        scores = np.einsum("ihd,jhd->hij", q, k) * root ** -0.5
        if "own" in self.wrong:  # a deliberate error: let each row attend to its own unrounded key and value
            scores[:, range(n), range(n)] = np.einsum("ihd,ihd->hi", q, own_k) * root ** -0.5
        seen = np.tril(np.ones((n, n), bool))
        if window:
            seen = np.triu(seen, 1 - window)
        scores = softmax(np.where(seen, scores, -np.inf))
        y = np.einsum("hij,jhd->ihd", scores, v)
        if "own" in self.wrong:
            y += np.einsum("hii,ihd->ihd", scores, own_v - v)
        return (y.reshape(n, queries * self.head) * gate) @ self.w[at + "o_proj.weight"].T

    def delta(self, z, at):
        """Apply Gated DeltaNet, token by token."""
        c, w, wrong = self.c, self.w, self.wrong
        heads, key_heads, size = (c[f"linear_{x}"] for x in ("num_value_heads", "num_key_heads", "value_head_dim"))
        width, n, values = c["linear_key_head_dim"], len(z), heads * size
        if at + "in_proj.weight" in w:
            x = z @ w[at + "in_proj.weight"].T
        else:
            x = np.concatenate([z @ w[f"{at}in_proj_{part}.weight"].T for part in ("qkv", "z", "b", "a")], 1)
        mixed, gate, beta, a = np.split(x, np.cumsum([x.shape[1] - values - 2 * heads, values, heads]), 1)
        beta = 1 / (1 + np.exp(-beta))
        if "shift" not in wrong:
            a = a + w[at + "dt_bias"]
        decay = np.exp(-np.exp(w[at + "A_log"]) * np.log1p(np.exp(a)))
        kernel = w[at + "conv1d.weight"][:, 0]
        if "reversed" in wrong:
            kernel = kernel[:, ::-1]
        padded = np.concatenate([np.zeros((kernel.shape[1] - 1, mixed.shape[1])), mixed])
        mixed = silu(sum(padded[i:i + n] * kernel[:, i] for i in range(kernel.shape[1])))
        q, k, v = np.split(mixed, [key_heads * width, 2 * key_heads * width], 1)
        which = np.arange(heads) % key_heads if "tiled" in wrong else np.arange(heads) // (heads // key_heads)
        unit = lambda x: x / np.sqrt((x ** 2).sum(-1, keepdims=True) + 1e-6)
        q, k = (unit(x.reshape(n, key_heads, width))[:, which] for x in (q, k))
        q = q if "long q" in wrong else q * width ** -0.5
        v, y, state = v.reshape(n, heads, size), np.empty((n, heads, size)), np.zeros((heads, width, size))
        for t in range(n):
            state = state * decay[t][:, None, None]
            change = v[t] - (0 if "no delta" in wrong else np.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][:, :, None] * (change * beta[t][:, None])[:, None]
            y[t] = np.einsum("hk,hkv->hv", q[t], state)
        y = w[at + "norm.weight"] * (y / np.sqrt((y ** 2).mean(-1, keepdims=True) + c["rms_norm_eps"]))
        gate = gate if "linear gate" in wrong else silu(gate)
        return (y.reshape(n, values) * gate) @ w[at + "out_proj.weight"].T

    def mixed(self, z, at, i):
        """Apply the attention of layer i of Qwen3.5 or Lara."""
        kind = self.c["layer_types"][i]
        if kind == "linear_attention":
            return self.delta(z, at + "linear_attn.")
        if kind == "sliding_attention":
            return self.attention(z, at + "self_attn.", self.c["sliding_window"] + ("window" in self.wrong))
        turned = not self.lara or "turned" in self.wrong
        return self.attention(z, at + "self_attn.", None, None if turned else np.zeros(self.head // 2))

    def ffn(self, z, at):
        gate, up, down = (self.w[f"{at}{part}_proj.weight"] for part in ("gate", "up", "down"))
        if "exchanged" in self.wrong:
            gate, up = up, gate
        active = gelu if self.gemma and "swish" not in self.wrong else silu
        return (active(z @ gate.T) * (z @ up.T)) @ down.T

    def mixture(self, z, at):
        hy, k = self.c["model_type"] == "hy_v3", chosen_of(self.c)
        logits = z @ self.w[at + ("router.gate.weight" if hy else "gate.weight")].T
        bias = self.w[at + "expert_bias"] if hy else 0
        value = 1 / (1 + np.exp(-logits)) if hy else softmax(logits)
        rank = value if "bias ignored" in self.wrong else value + bias
        y, chosen_by_row = np.zeros_like(z), []
        for row in range(len(z)):
            order = np.argsort(-rank[row], kind="stable")
            chosen = np.sort(order[:k])
            self.margin = min(self.margin, rank[row][order[k - 1]] - rank[row][order[k]])
            g = (rank if "bias in the weights" in self.wrong else value)[row][chosen]
            if hy or self.c["norm_topk_prob"] != ("norm" in self.wrong):
                g = g / g.sum()
            if hy and "scale" not in self.wrong:
                g = g * self.c["router_scaling_factor"]
            for weight, expert in zip(g, chosen):
                y[row] += weight * self.ffn(z[row], f"{at}experts.{expert}.")
            chosen_by_row.append(list(zip(map(int, chosen), map(float, g))))
        self.experts.append(chosen_by_row)
        shared = next((at + x for x in ("shared_mlp.", "shared_expert.") if f"{at}{x}up_proj.weight" in self.w), None)
        if not shared or "shared" in self.wrong:
            return y
        weight = self.w.get(at + "shared_expert_gate.weight")
        gate = 1 if weight is None or "whole shared" in self.wrong else 1 / (1 + np.exp(-z @ weight.T))
        return y + gate * self.ffn(z, shared)

    def predicted(self, ids):
        """Return logits [tokens - 1, V] of the layer that predicts the token after the next one (predictor_of)."""
        at, names = PREDICTED[self.c["model_type"]]
        named = lambda part: names.get(part, at + part) + ".weight"
        hidden, embedding = self.hidden(ids)[:-1], self.w["model.embed_tokens.weight"]
        both = [self.rms(embedding[ids[1:]], named("enorm")), self.rms(hidden, named("hnorm"))]
        if "exchanged halves" in self.wrong:
            both.reverse()
        if "same token" in self.wrong:
            both[0] = self.rms(embedding[ids[:-1]], named("enorm"))
        x = np.concatenate(both, 1) @ self.w[named("eh_proj")].T
        x = x + self.attention(self.rms(x, at + "input_layernorm.weight"), at + "self_attn.")
        sparse = at + "mlp.gate_proj.weight" not in self.w
        x = x + (self.mixture if sparse else self.ffn)(self.rms(x, at + "post_attention_layernorm.weight"), at + "mlp.")
        return self.rms(x, named("final_layernorm")) @ self.w.get("lm_head.weight", embedding).T

    def logits(self, ids):
        """Return logits [tokens, V]; store the experts of each token in each sparse layer in `experts`."""
        x = self.hidden(ids)
        y = x @ self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]).T
        return y * self.c["logit_scale"] if self.cohere and "logit scale" not in self.wrong else y

    def hidden(self, ids):
        """Return the input of the output matrix [tokens, D]."""
        self.experts, x = [], self.w["model.embed_tokens.weight"][ids]
        if self.gemma and "unscaled" not in self.wrong:
            x = x * self.c["hidden_size"] ** 0.5
        for i in range(self.c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            if self.gemma:
                norm = lambda y, name: self.rms(y, f"{at}{name}_layernorm.weight")
                x = x + norm(self.attention(norm(x, "input"), at + "self_attn.", *self.layers[i]), "post_attention")
                x = x + norm(self.ffn(norm(x, "pre_feedforward"), at + "mlp."), "post_feedforward")
                continue
            if self.cohere:
                z = self.layer_norm(x, at + "input_layernorm.weight")
                y = x + self.attention(z, at + "self_attn.", *self.layers[i])
                z = self.layer_norm(y, at + "input_layernorm.weight") if "serial" in self.wrong else z
                x = y + self.ffn(z, at + "mlp.")
                continue
            z = self.rms(x, at + "input_layernorm.weight")
            x = x + (self.mixed(z, at, i) if self.qwen or self.lara else self.attention(z, at + "self_attn."))
            z = self.rms(x, at + "post_attention_layernorm.weight")
            sparse = at + "mlp.gate_proj.weight" not in self.w
            x = x + (self.mixture if sparse else self.ffn)(z, at + "mlp.")
        if "before the norm" in self.wrong:
            return x
        return (self.layer_norm if self.cohere else self.rms)(x, "model.norm.weight")

    def logprobs(self, ids):
        return log_softmax(self.logits(ids))

    def score(self, source, target):
        found = self.logprobs(source + target[:-1])[len(source) - 1:]
        return [float(row[token]) for row, token in zip(found, target, strict=True)]

    def greedy(self, source, limit, ends, penalty=1.0, spared=0, stop=None, least=0, begin=()):
        """Return (ids, log-probabilities without penalty). The first `spared` source tokens have no penalty,
        stop(ids) ends the search, `least` ids must precede the end, and `begin` is a given prefix without scores."""
        ids, found = list(begin), []
        while len(ids) < limit and not (found and (ids[-1] in ends or stop and stop(ids))):
            logits = self.logits(source + ids)[-1]
            weighed = penalised(logits, (source + ids)[spared:], penalty)
            weighed[ends if len(ids) < least else []] = -np.inf
            best, second = np.argsort(-weighed, kind="stable")[:2]
            self.margin = min(self.margin, weighed[best] - weighed[second])
            found.append(float(log_softmax(logits[None])[0, best]))
            ids.append(int(best))
        return ids, found

    def sample(self, source, limit, ends, seed, penalty=1.0, **how):
        """Sample instead of choosing the best token; return (ids, log-probabilities without penalty)."""
        ids, found, key = [], [], 0
        for token in source:
            key = scrambled(key ^ token)
        key = scrambled((key + seed) % 2 ** 64)
        while len(ids) < limit and not (ids and ids[-1] in ends):
            logits = self.logits(source + ids)[-1]
            token, margin = draw(penalised(logits, source + ids, penalty), scrambled((key + len(ids)) % 2 ** 64), **how)
            self.margin = min(self.margin, margin)
            found.append(float(log_softmax(logits[None])[0, token]))
            ids.append(token)
        return ids, found

    def search(self, source, beam, limit, ends, early, penalty=1.0):
        """Return the hypotheses of a beam search as [(ids, score, finished)], best first, excluding the prompt."""
        running, finished = [(0.0, [])], []
        for step in range(1, limit + 1):
            rows = np.array([total + penalised(self.logprobs(source + ids)[-1], source + ids, penalty)
                             for total, ids in running])
            most = max(2, 1 + len(ends)) * beam
            order = np.argsort(-rows, axis=None, kind="stable")[:most + 1]
            values = rows.reshape(-1)[order]
            self.margin = min(self.margin, *(values[:-1] - values[1:]))
            found = [(value, running[at // rows.shape[1]][1] + [int(at % rows.shape[1])])
                     for value, at in zip(values[:most], order)]
            done = [ids[-1] in ends or step == limit for _, ids in found]
            finished += [(value / step, ids) for (value, ids), end in list(zip(found, done))[:beam] if end]
            finished.sort(key=lambda f: -f[0])
            scores = [f[0] for f in finished[:beam + 1]]
            self.margin = min([self.margin, *(a - b for a, b in zip(scores, scores[1:]))])
            finished = finished[:beam]
            running = [x for x, end in zip(found, done) if not end][:beam]
            if not running or len(finished) == beam and (early or beam == 1 or running[0][0] / step <= finished[-1][0]):
                break
            if len(finished) == beam:
                self.margin = min(self.margin, abs(running[0][0] / step - finished[-1][0]))
        return [(ids, score, ids[-1] in ends) for score, ids in finished]
