#!/usr/bin/env python3
"""Test moe-prune: pruned models must match references whose routers have only the
rows of the remaining experts.

Usage: tests/python tests/convert/test_prune.py [--only NAME]

The references are transformer_numpy.py and decoder_numpy.py in float64, which
this script prunes; checkpoints have fixed seeds. Prints `ok NAME` or `FAIL
NAME` per test.
"""
import argparse
import contextlib
import json
import os
import random
import re
import resource
import sys
import tempfile

from converting import BIN, ROOT, TRANSLATE, convert_quietly, run
from suite import Suite

PRUNE, INFO, QUANTIZE = (os.path.join(BIN, "moe-" + name) for name in ("prune", "info", "quantize"))
SHIPPED = os.path.join(ROOT, "models", "en-de-fr-es.bin")
TOLERANCE = {"nllb-moe": 2e-5, "hy_v3": 1e-4, "qwen3_moe": 1e-4}  # maximum error of a log-probability
try:
    import numpy as np

    import decoder_numpy
    import make_decoder
    import make_transformers
    import moefile
    import test_hf_tokens
    import test_prompted
    import transformer_numpy
except ImportError:
    np = None
test = Suite()
numpy_test = test.needs(np, "NumPy")


def line(ids):
    return " ".join(map(str, ids))


def prune(model, out, *options, status=0):
    result = run([PRUNE, "-m", model, "-o", out, *options], status=status)
    if status:
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert not os.path.exists(out) and not [x for x in os.listdir(os.path.dirname(out)) if x.startswith(".moe-")]
        return result.stderr
    return result.stdout


def write_list(folder, listed, name="experts.json"):
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(listed, file)
    return path


def chosen(sizes, experts, seed=1):
    """Choose sizes[i] random experts for mixture i; return (ascending experts per mixture, shuffled global numbers)."""
    r = random.Random(seed)
    kept = [sorted(r.sample(range(experts), n)) for n in sizes]
    ids = [m * experts + e for m, some in enumerate(kept) for e in some]
    r.shuffle(ids)
    return kept, ids


def cut_transformer(reference, kept):
    """Prune a reference: keep and renumber the experts in `kept` and their router rows. Return the reference."""
    at = iter(kept)
    for side in "encoder", "decoder":
        for w in reference.layers(side):
            if "router" not in w["ffn"]:
                continue
            router, experts, some = w["ffn"]["router"]["classifier"], w["ffn"]["experts"], next(at)
            router["weight"] = router["weight"][some]
            names = [f"expert_{e}" for e in some] + ["expert_0"] * (len(experts) - len(some))  # padding, never selected
            w["ffn"]["experts"] = {f"expert_{i}": experts[name] for i, name in enumerate(names)}
    assert next(at, None) is None
    return reference


def cut_decoder(config, arrays, kept):
    """Prune a decoder: return the arrays with only the experts in `kept`, renumbered."""
    out, layers = {}, [i for i in range(config["num_hidden_layers"]) if make_decoder.is_sparse(config, i)]
    some_of = {f"model.layers.{i}.mlp.": some for i, some in zip(layers, kept, strict=True)}
    for name, x in arrays.items():
        at = name[:name.find("mlp.") + 4]
        part = name[len(at):]
        if at not in some_of:
            out[name] = x
        elif part.startswith("experts."):
            _, number, rest = part.split(".", 2)
            if int(number) in some_of[at]:
                out[f"{at}experts.{some_of[at].index(int(number))}.{rest}"] = x
        elif part in ("router.gate.weight", "gate.weight", "expert_bias"):
            out[name] = x[some_of[at]]
        else:
            out[name] = x
    return out


@contextlib.contextmanager
def of_transformer(*options, **changes):
    """Convert a random NLLB-MoE checkpoint; yield (model file, reference, folder)."""
    with tempfile.TemporaryDirectory() as folder:
        make_transformers.make(folder, "nllb-moe", **changes)
        model = os.path.join(folder, "model.bin")
        complaint = convert_quietly("--from", "hf", folder, "-o", model, *options)
        assert complaint is None, complaint
        yield model, transformer_numpy.Transformer(folder), folder


@contextlib.contextmanager
def of_decoder(family, *options):
    """Convert a random decoder-only checkpoint; yield (model file, its config, its arrays, folder)."""
    with tempfile.TemporaryDirectory() as folder:
        config, arrays = make_decoder.make(folder, family)
        model = os.path.join(folder, "model.bin")
        complaint = convert_quietly("--from", "hf", folder, "-o", model, "--type", "f32", *options)
        assert complaint is None, complaint
        yield model, config, arrays, folder


def translate(model, lines, *options, raw="--raw-ids"):
    return [json.loads(x) for x in run([TRANSLATE, "-m", model, raw, "--json", *options], lines).lines]


def close(found, wanted, family):
    return max(abs(x - y) for x, y in zip(found, wanted, strict=True)) < TOLERANCE[family]


# ---- Cut by a list ---------------------------------------------------------------------------------------------------

def compare_transformer(model, reference, cases=range(10)):
    """Compare scores, experts and search results; return the number of searches without a close decision."""
    certain, routing = 0, model + ".routing"
    for i in cases:
        source, force, target = make_transformers.case("nllb-moe", i)
        logp = reference.score(source, target)
        routes = [best for _, best in reference.experts]
        got, = translate(model, [f"{line(source)}\t{line(target)}"], "--score", "--routing", routing)
        assert close(got["token_logprobs"], [logp[t, x] for t, x in enumerate(target)], "nllb-moe"), i
        with open(routing, encoding="utf-8") as file:
            rows = [json.loads(x) for x in file][1:]
        layers = list(dict.fromkeys(row["layer"] for row in rows))
        for layer, best in zip(layers, routes, strict=True):
            found = [row["experts"] for row in rows if row["layer"] == layer]
            assert found[:len(best)] == [sorted(map(int, pair)) for pair in best], (i, layer)
        best = reference.beam(source, 3, force=force)
        got, = translate(model, [line(source)], "--beam", "3", "--nbest", "3",
                         *(["--force", str(force)] if force >= 0 else []))
        if best[0].margin > make_transformers.MARGIN:
            certain += 1
            assert [h["ids"] for h in got["nbest"]] == [h.ids for h in best], i
            assert close([h["score"] for h in got["nbest"]], [h.score for h in best], "nllb-moe"), i
    return certain


@numpy_test
def a_transformer_pruned_by_a_list_matches_the_reference():
    with of_transformer() as (model, reference, folder):
        kept, ids = chosen((3, 2, 5, 8), 8)
        notes = prune(model, model + ".cut", "--experts", write_list(folder, ids + ids[:2]))
        assert "18 of 32 experts" in notes and "3 of 8 experts" in notes, notes
        assert compare_transformer(model + ".cut", cut_transformer(reference, kept)) >= 6


@numpy_test
def published_lists_of_128_experts_are_supported():
    """Published lists keep 36 of 128 experts in each of 6 mixtures for a source language, 12 for a target language."""
    changes = {"num_experts": 128, "d_model": 16, "encoder_layers": 24, "decoder_layers": 24, "encoder_sparse_step": 4,
               "decoder_sparse_step": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    with of_transformer(**changes) as (model, reference, folder):
        german, english = (chosen((36,) * 6 + (12,) * 6, 128, seed) for seed in (2, 3))
        lists = {"deu_Latn": sorted(german[1]), "eng_Latn": english[1], "fra_Latn": []}
        by_language = write_list(folder, lists)
        notes = prune(model, model + ".cut", "--experts", by_language, "--pair", "eng_Latn-deu_Latn")
        assert "288 of 1536 experts" in notes, notes
        kept = english[0][:6] + german[0][6:]
        pair = [m * 128 + e for m, some in enumerate(kept) for e in some]
        by_pair = write_list(folder, {"eng_Latn-deu_Latn": pair, "eng_Latn": [0], "deu_Latn": [0]}, "pairs.json")
        prune(model, model + ".same", "--experts", by_pair, "--pair", "eng_Latn-deu_Latn", "-q")
        tensors = [moefile.read(model + end)[1] for end in (".cut", ".same")]
        assert all(tensors[0][name].data == x.data for name, x in tensors[1].items())
        cut_transformer(reference, kept)
        for i in range(3):
            source, _, target = make_transformers.case("nllb-moe", i)
            logp = reference.score(source, target)
            got, = translate(model + ".cut", [f"{line(source)}\t{line(target)}"], "--score")
            # 48 layers accumulate rounding errors in F32: even the unpruned model differs by up to 2.3e-5
            assert np.allclose(got["token_logprobs"], [logp[t, x] for t, x in enumerate(target)], rtol=0, atol=1e-4), i
        both = prune(model, model + ".both", "--experts", by_language, "--languages", "eng_Latn,deu_Latn")
        wanted = sum(len(set(a) | set(b)) for a, b in zip(german[0], english[0]))
        assert f"{wanted} of 1536 experts" in both, (wanted, both)
        bad = prune(model, model + ".bad", "--experts", by_language, "--pair", "eng_Latn-spa_Latn", status=2)
        assert "eng_Latn-spa_Latn" in bad and "spa_Latn" in bad, bad
        bad = prune(model, model + ".bad", "--experts", by_language, "--pair", "eng_Latn-fra_Latn", status=2)
        assert "decoder" in bad and "0 experts" in bad, bad


@numpy_test
def decoders_pruned_by_half_match_the_reference():
    for family in "hy_v3", "qwen3_moe":
        with of_decoder(family) as (model, config, arrays, folder):
            kept, ids = chosen((4, 4), 8, 5)
            prune(model, model + ".cut", "--experts", write_list(folder, ids))
            reference = decoder_numpy.Decoder(config, cut_decoder(config, arrays, kept))
            whole = decoder_numpy.Decoder(config, arrays)
            sources, target, certain, moved = [make_decoder.prompt(i) for i in range(12)], [5, 12, 19, 26, 33], 0, 0
            scored = translate(model + ".cut", [f"{line(s)}\t{line(target)}" for s in sources], "--score",
                               "--kv-bits", "32", raw="--ids")
            found = translate(model + ".cut", [line(s) for s in sources], "--beam", "1", "--max-len-factor", "0",
                              "--max-len-offset", "8", "--kv-bits", "32", "--repetition-penalty", "1", raw="--ids")
            for source, got, best in zip(sources, scored, found, strict=True):
                wanted = reference.score(source, target + [2])
                assert close(got["token_logprobs"], wanted, family), (family, source)
                moved += not close(wanted, whole.score(source, target + [2]), family)
                reference.margin = np.inf
                ids, _ = reference.greedy(source, 8, make_decoder.ENDS[family])
                if reference.margin > 1e-4:
                    certain += 1
                    assert best["ids"] + [ids[-1]] * best["finished"] == ids, (family, source)
            assert certain > 4 and moved == 12, (family, certain, moved)


@numpy_test
def the_choice_bias_is_kept_or_zeroed():
    with of_decoder("hy_v3") as (model, config, arrays, folder):
        kept, ids = chosen((4, 4), 8, 5)
        listed, routing = write_list(folder, ids), model + ".routing"
        for options, sign, words in ((), 1, "is unchanged"), (("--no-choice-bias",), 0, "is 0"):
            notes = prune(model, model + ".cut", "--experts", listed, *options)
            assert f"the choice bias {words}" in notes, notes
            about = json.loads(run([INFO, "--json", model + ".cut"]).stdout)["metadata"]["prune.by"]
            assert about == "list experts.json" + ", without the choice bias" * (not sign), about
            some = {name: x * sign if name.endswith("expert_bias") else x for name, x in arrays.items()}
            reference, other = (decoder_numpy.Decoder(config, cut_decoder(config, x, kept)) for x in (some, arrays))
            moved = 0
            for i in range(12):
                source, target = make_decoder.prompt(i), [5, 12, 19, 26, 33]
                got, = translate(model + ".cut", [f"{line(source)}\t{line(target)}"], "--score", "--kv-bits", "32",
                                 "--routing", routing, raw="--ids")
                assert close(got["token_logprobs"], reference.score(source, target + [2]), "hy_v3"), (options, i)
                with open(routing, encoding="utf-8") as file:
                    rows = [json.loads(x)["experts"] for x in list(file)[1:]]
                wanted = [[e for e, _ in pairs] for layer in reference.experts for pairs in layer]
                assert rows == wanted, (options, i)
                other.score(source, target + [2])
                moved += wanted != [[e for e, _ in pairs] for layer in other.experts for pairs in layer]
            assert (moved > 3) == (not sign), (options, moved)
        tensors = {end: moefile.read(model + end)[1] for end in ("", ".cut")}
        differ = [name for name, x in tensors[".cut"].items()
                  if name.endswith(".gate.choice") and x.array().any() or x.dims == tensors[""][name].dims
                  and x.data != tensors[""][name].data]
        assert not differ, differ
    with of_decoder("qwen3_moe") as (model, _, _, folder):
        listed = write_list(folder, chosen((4, 4), 8, 5)[1])
        bad = prune(model, folder + "/out.bin", "--experts", listed, "--no-choice-bias", status=2)
        assert "no gate of the model has a choice bias" in bad, bad
        assert "bias" not in prune(model, folder + "/out.bin", "--experts", listed)


def kept_of(path):
    """Return the kept experts of each mixture, read from a model file's metadata."""
    out = []
    for notes in json.loads(run([INFO, "--json", path]).stdout)["metadata"]["prune.kept"]:
        spans = [x.split("-") for x in notes.split(": ")[2].split()]
        out.append([e for x in spans for e in range(int(x[0]), int(x[-1]) + 1)])
    return out


@numpy_test
def sample_lines_use_their_source_language():
    """NLLB's encoder reads a source tag and its decoder a target tag; experts are ranked by these languages."""
    class Weighed(transformer_numpy.Transformer):
        def route(self, name, w, x):
            y = super().route(name, w, x)
            p = transformer_numpy.softmax(x.reshape(-1, self.width) @ w["router"]["classifier"]["weight"].T)
            best = np.sort(p)[:, :-3:-1]
            self.weights.append(best[:, 0] / best.sum(1))
            return y

    texts = [x for x in test_hf_tokens.lines(60) if x.strip() and "\t" not in x]
    directions = [("eng_Latn", "deu_Latn"), ("rus_Cyrl", "deu_Latn"), ("rus_Cyrl", "zho_Hans")]
    lines = [(*directions[i % 3], texts[i], texts[-1 - i]) for i in range(24)]
    with test_hf_tokens.checkpoint("nllb", family="nllb-moe", changes={"num_experts": 16}) as c:
        model = test_hf_tokens.converted(c)
        folder, reference = os.path.dirname(model), Weighed(c.folder)

        def ranks(tag=str, sides=(0, 1)):
            """Return the best experts of each mixture for each language. tag(source) is the tag of a line; sides[0]
            selects the language that ranks encoder experts (0 source, 1 target), sides[1] the one for decoders."""
            uses = {}
            for source, target, text, translation in lines:
                reference.weights = []
                reference.score([c.languages[tag(source)], *c.encode(text), c.end],
                              [c.languages[target], *c.encode(translation), c.end])
                for (name, best), weights in zip(reference.experts, reference.weights, strict=True):
                    language = (source, target)[sides[not name.startswith("enc")]]
                    use = uses.setdefault(name, {}).setdefault(language, np.zeros((2, 16)))
                    for expert, weight in zip(best[:, 0], weights, strict=True):
                        use[:, expert] += 1, weight
            best = [[np.argsort(-n * np.exp(w / np.maximum(n, 1)))[:4].tolist() for n, w in of.values()]
                    for of in uses.values()]
            return [sorted({e for some in of for e in some}) for of in best]

        sample = os.path.join(folder, "sample.tsv")
        with open(sample, "w", encoding="utf-8") as file:
            file.writelines("\t".join(x) + "\n" for x in lines)
        assert "2 lines skipped that the model cannot score" in \
            prune(model, model + ".cut", "--sample", sample, "--keep", "25%")
        notes = prune(model, model + ".cut", "--sample", sample, "--keep", "25%", "--max-len", "127")
        assert "skipped" not in notes, notes
        wanted = ranks()
        assert kept_of(model + ".cut") == wanted, (kept_of(model + ".cut"), wanted)
        wrong = [ranks(*x) == wanted for x in ((lambda source: "fra_Latn",), (str, (1, 1)), (str, (0, 0)))]
        assert not any(wrong), ("the test does not distinguish the languages", wrong)
        about = json.loads(run([INFO, "--json", model + ".cut"]).stdout)["metadata"]
        assert about["prune.directions"] == ["-".join(x) for x in directions], about
        bad = run([TRANSLATE, "-m", model + ".cut", "-s", "fra_Latn", "-t", "deu_Latn"], ["x"], status=2).stderr
        assert "eng_Latn rus_Cyrl" in bad, bad


class Measured(decoder_numpy.Decoder if np else object):
    """A decoder that sums, for each expert, its uses, its weights, and its weights times output norms."""

    def mixture(self, z, at):
        y = super().mixture(z, at)
        sums = self.sums.setdefault(at, np.zeros((3, 8)))
        for row, pairs in enumerate(self.experts[-1]):
            for expert, weight in pairs:
                size = np.linalg.norm(self.ffn(z[row], f"{at}experts.{expert}."))
                sums[:, expert] += weight, weight * size, 1
        return y


@test.needs(np and os.path.exists(test_prompted.LINES), "NumPy, or bpe_lines")
def sample_lines_become_prompts_with_the_models_wording():
    texts = [x for x in test_prompted.HOSTILE if "\t" not in x]
    with tempfile.TemporaryDirectory() as folder:
        config, arrays = make_decoder.make(folder, "hy_v3", vocab_size=448, max_position_embeddings=4096)
        make_decoder.write_tokeniser(folder)
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
            file.write(test_prompted.TEMPLATE)
        model, sample = folder + "/model.bin", folder + "/sample.tsv"
        complaint = convert_quietly("--from", "hf", folder, "-o", model, "--type", "f32", "--prompts", "hy_mt2")
        assert complaint is None, complaint
        lines = [(*(("en", "de"), ("de", "fr"), ("en", "zh"))[i % 3], x, texts[-1 - i]) for i, x in enumerate(texts)]
        with open(sample, "w", encoding="utf-8") as file:
            file.writelines("\t".join(x) + "\n" for x in lines)

        def ranks(ask):
            reference, uses = Measured(config, arrays), {}
            for source, target, text, translation in lines:
                reference.sums = uses.setdefault(target, {})
                reference.logits(ask(source, target, text) + test_prompted.encode(translation))
            best = [[np.argsort(-x[0])[:3].tolist() for x in sums.values()] for sums in uses.values()]
            return [sorted({e for of in mixture for e in of}) for mixture in zip(*best)]

        def asked(source, target, text):
            return test_prompted.plain(text, target, "zh" if "zh" in (source, target) else "en")

        prune(model, model + ".cut", "--sample", sample, "--keep", "37%")
        wanted = ranks(asked)
        assert kept_of(model + ".cut") == wanted, (kept_of(model + ".cut"), wanted)
        assert wanted != ranks(lambda source, target, text: test_prompted.encode(text)), "any prompt would do"
        about = json.loads(run([INFO, "--json", model + ".cut"]).stdout)["metadata"]
        assert about["prune.directions"] == ["en-de", "de-fr", "en-zh"], about


@numpy_test
def ranking_of_a_decoders_experts_matches_the_reference():
    """Rank experts by their summed weights, or by the mean of weight times output norm, over prompts and answers."""
    pairs = [(make_decoder.prompt(i), [5 + 7 * i % 80, 12, 40 + i]) for i in range(8)]
    for family in "hy_v3", "qwen3_moe":
        with of_decoder(family) as (model, config, arrays, folder):
            reference, sample = Measured(config, arrays), os.path.join(folder, "sample.tsv")
            reference.sums = {}
            with open(sample, "w", encoding="utf-8") as file:
                file.writelines(f"a\tb\t{line(s)}\t{line(t)}\n" for s, t in pairs)
            for source, target in pairs:
                reference.logits(source + target)
            differ = 0
            for options in (), ("--rank", "output"):
                prune(model, model + ".cut", "--sample", sample, "--keep", "50%", "--ids", *options)
                for found, sums in zip(kept_of(model + ".cut"), reference.sums.values(), strict=True):
                    ranks = sums[1] / np.maximum(sums[2], 1) if options else sums[0]
                    best = sorted(np.argsort(-ranks)[:4].tolist())
                    assert found == best, (family, options, ranks)
                    differ += best != sorted(np.argsort(-sums[0])[:4].tolist())
            assert differ, "the test does not distinguish them"


@numpy_test
def weights_are_copied_byte_for_byte():
    """moe-prune copies the slabs of kept experts and all other tensors without decoding them, even if quantised."""
    with of_transformer("--type", "q8", "--experts", "q4") as (model, _, folder):
        kept, ids = chosen((3, 2, 5, 8), 8)
        prune(model, model + ".cut", "--experts", write_list(folder, ids))
        (_, before), (_, after) = moefile.read(model), moefile.read(model + ".cut")
        assert list(before) == list(after)
        at, types = dict(zip([x[:-8] for x in before if x.endswith(".experts")], kept, strict=True)), set()
        for name, x in before.items():
            y, some = after[name], at.get(name.rsplit(".experts" if ".experts" in name else ".gate.", 1)[0])
            assert x.type == y.type
            types.add((x.type, x.layout))
            if some is None:
                assert x.data == y.data and x.dims == y.dims, name
            elif name.endswith(".experts"):
                slab = len(x.data) // 8
                assert y.data == b"".join(x.data[e * slab:(e + 1) * slab] for e in some), name
            else:
                assert np.array_equal(y.array().reshape(len(some), -1), x.array().reshape(8, -1)[some]), name
        assert {(moefile.Q4, 1), (moefile.Q8, 0), (moefile.F32, 0)} <= types


@numpy_test
def pruning_does_not_depend_on_batch_and_threads():
    with of_transformer("--type", "q8", "--experts", "q4") as (model, _, folder):
        prune(model, model + ".cut", "--experts", write_list(folder, chosen((3, 4, 5, 3), 8)[1]))
        lines = [line(make_transformers.case("nllb-moe", i)[0]) for i in range(24)]
        outputs = {run([TRANSLATE, "-m", model + ".cut", "--raw-ids", "--json", "--beam", "3", "--batch", batch,
                        "--threads", threads], lines).stdout
                   for batch in ("1", "7", "32") for threads in ("1", "3")}
        assert len(outputs) == 1


@numpy_test
def a_pruned_model_gives_the_same_bytes_with_streamed_experts():
    sources = [line(make_transformers.case("nllb-moe", i)[0]) for i in range(16)]
    prompts = [line(make_decoder.prompt(i)) for i in range(12)]
    for kind, sizes, most in (("nllb-moe", (3, 4, 5, 3), 15), ("hy_v3", (4, 5), 9)):
        for experts in "f32", "q8", "q4":
            types = "--type", "f32" if experts == "f32" else "q8", "--experts", experts
            made = of_transformer(*types) if kind == "nllb-moe" else of_decoder(kind, *types[2:])
            with made as (model, *_, folder):
                prune(model, model + ".cut", "--experts", write_list(folder, chosen(sizes, 8)[1]))
                lines, raw = (sources, ["--raw-ids", "--beam", "3"]) if kind == "nllb-moe" else (
                    prompts, ["--ids", "--repetition-penalty", "1", "--max-len-factor", "0", "--max-len-offset", "12"])
                command = [TRANSLATE, "-m", model + ".cut", "--json", *raw]
                mapped = run(command, lines).stdout
                assert mapped != run([TRANSLATE, "-m", model, "--json", *raw], lines).stdout
                least = run([*command, "--expert-memory", "1K"], lines, status=3).stderr
                sizes_of = re.search(r" 2 experts need ([0-9]+) bytes; all [0-9]+ need ([0-9]+) bytes", least)
                least, full = map(int, sizes_of.groups())
                for memory, batch, threads in (least, 1, 1), (least * 2, 7, 3), (full, 32, 2):
                    got = run([*command, "--stats", "--expert-memory", f"{memory // 1024}K", "--batch", str(batch),
                               "--threads", str(threads)], lines)
                    assert got.stdout == mapped, (kind, experts, memory)
                    held, of = map(int, re.search(r"experts held +([0-9]+) of ([0-9]+)", got.stderr).groups())
                    assert of == most and held == min(most, memory * 2 // least), (kind, experts, held, got.stderr)


# ---- Languages -------------------------------------------------------------------------------------------------------

def every_expert(path):
    mixtures = json.loads(run([INFO, "--json", path]).stdout)["mixtures"]
    return list(range(sum(x["experts"] for x in mixtures)))


@test
def a_pruned_model_supports_the_languages_it_was_pruned_for():
    with tempfile.TemporaryDirectory() as folder:
        out, ids = folder + "/cut.bin", every_expert(SHIPPED)
        notes = prune(SHIPPED, out, "--experts", write_list(folder, ids[:-4]), "--pair", "en-de", "--pair", "en-fr")
        assert "en-de en-fr" in notes, notes
        for options, has in (("-t", "es"), "de fr"), (("-s", "de", "-t", "fr"), "en"):
            bad = run([TRANSLATE, "-m", out, *options], ["Hello."], status=2).stderr
            assert f"has no language '{options[1]}'; available: {has}" in bad, bad
        assert run([TRANSLATE, "-m", out, "-s", "en", "-t", "de"], ["Good morning."]).stdout.strip()
        page = run([INFO, out]).stdout
        for wanted in ("en -> de fr", "list experts.json", "directions", "32 of 32: 0-31", "28 of 32: 0-27"):
            assert wanted in page, (wanted, page)
        about = json.loads(run([INFO, "--json", "--check", out]).stdout)
        assert about["metadata"]["prune.directions"] == ["en-de", "en-fr"], about["metadata"]
        assert about["metadata"]["languages.sources"] == ["en"]
        assert not [key for key in about["metadata"] if key.startswith(("golden.", "quality."))]


@test
def reranking_is_off_without_the_reverse_direction():
    with tempfile.TemporaryDirectory() as folder:
        path = write_list(folder, every_expert(SHIPPED))
        before = json.loads(run([INFO, "--json", SHIPPED]).stdout)["metadata"]["decode.rerank"]
        assert before > 0
        for options, wanted in (("--pair", "en-de"), 0), (("--languages", "en,de"), before), ((), before):
            prune(SHIPPED, folder + "/cut.bin", "--experts", path, *options)
            about = json.loads(run([INFO, "--json", folder + "/cut.bin"]).stdout)
            assert about["metadata"]["decode.rerank"] == wanted, (options, about["metadata"]["decode.rerank"])


# ---- Rejected requests -----------------------------------------------------------------------------------------------

@test
def unsupported_pruning_is_rejected_by_name():
    with tempfile.TemporaryDirectory() as folder:
        out, ids = folder + "/out.bin", every_expert(SHIPPED)
        lists = {"good": ids, "beyond": [0, len(ids)], "below": [-1, *ids], "half": [0.5], "words": ["1"],
                 "number": 5, "one": [0, 32], "none": [], "deep": {"en": {"de": ids}},
                 "missing": {"en-de": ids}}
        path = {name: write_list(folder, value, name + ".json") for name, value in lists.items()}
        for name, text in ("cut", json.dumps(ids)[:-1]), ("no", "no json"), ("more", "[1] [2]"), ("empty", ""):
            path[name] = os.path.join(folder, name)
            with open(path[name], "w", encoding="utf-8") as file:
                file.write(text)
        pair = "--pair", "en-de"
        for name, options, status, words in (
                ("beyond", (), 3, (f"expert {len(ids)}", f"0 to {len(ids) - 1}")), ("below", (), 3, ("expert -1",)),
                ("half", (), 3, ("0.5",)), ("words", (), 3, ("expert indices",)), ("number", (), 3, ("JSON list",)),
                ("none", (), 2, ("0 experts", "encoder.2")), ("deep", pair, 3, ("expert indices",)),
                ("missing", ("--pair", "en-fr"), 2, ("en-fr", "language en")), ("missing", (), 2, ("--pair",)),
                ("cut", (), 3, ("JSON",)), ("no", (), 3, ("JSON",)), ("more", (), 3, ("JSON",)),
                ("empty", (), 3, ("JSON",)), ("good", ("--pair", "en-it"), 2, ("'it'", "available: ")),
                ("good", ("--pair", "ende"), 2, ("'ende'", "pair")), ("good", ("--languages", "en"), 2, ("two",)),
                ("good", (*pair, "--languages", "en,de"), 2, ("--pair",)), ("good", ("more",), 2, ("more",))):
            bad = prune(SHIPPED, out, "--experts", path[name], *options, status=status)
            assert all(word in bad for word in words), (name, options, bad)
        assert "experts" in prune(SHIPPED, out, status=2)
        assert "same file" in run([PRUNE, "-m", SHIPPED, "-o", SHIPPED, "--experts", path["good"]], status=2).stderr
        assert "no experts" in prune(os.path.join(ROOT, "tests/golden/gnmt-tf.bin"), out, "--experts", path["good"],
                                     status=2)
        prune(folder + "/none.bin", out, "--experts", path["good"], status=3)
        prune(SHIPPED, out, "--experts", folder + "/absent.json", status=4)
        run([PRUNE, "-m", SHIPPED, "-o", folder + "/no/out.bin", "--experts", path["good"]], status=4)


@test
def a_full_disk_leaves_no_files():
    with tempfile.TemporaryDirectory() as folder:
        path, before = write_list(folder, every_expert(SHIPPED)), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            bad = prune(SHIPPED, folder + "/out.bin", "--experts", path, status=4)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "out.bin" in bad and "large" in bad, bad
        assert os.listdir(folder) == ["experts.json"]


@test
def damage_is_detected_in_kept_experts_only():
    with tempfile.TemporaryDirectory() as folder:
        model, ids = folder + "/model.bin", every_expert(SHIPPED)
        run([QUANTIZE, SHIPPED, model, "q8", "--experts", "q4"])  # version 2 has a checksum per expert
        tensor = next(x for x in json.loads(run([INFO, "--json", model]).stdout)["tensors"] if x["experts"])
        with open(model, "r+b") as file:
            file.seek(tensor["offset"] + tensor["bytes"] // 32 * 5)  # start of expert 5
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        bad = prune(model, folder + "/out.bin", "--experts", write_list(folder, ids), status=3)
        assert "expert 5" in bad, bad
        prune(model, folder + "/out.bin", "--experts", write_list(folder, [x for x in ids if x != 5]))
        assert json.loads(run([INFO, "--json", "--check", folder + "/out.bin"]).stdout)["checksums_verified"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    sys.exit(test.run(parser.parse_args().only))
