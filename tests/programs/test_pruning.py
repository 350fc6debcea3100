#!/usr/bin/env python3
"""moe-prune on small models with every kind of gate. A pruned model equals a model written with fewer experts, the
importance of experts equals counts in routing files, and thresholds equal those of moe-calibrate.

Usage: tests/python tests/programs/test_pruning.py
Prints `ok NAME` or `FAIL NAME` per test; standard library only. BIN is the folder of the programs. Checkpoints of
published kinds are in tests/convert/test_prune.py.
"""
import collections
import contextlib
import json
import math
import os
import random
import struct
import sys
import tempfile

import small_models
from suite import Suite
from test_cli import BIN, INFO, LINES, MODEL, QUANTIZE, ROUTING, TRANSLATE, many_lines, run

PRUNE, CALIBRATE, SCORE, CLASSIFY = (os.path.join(BIN, "moe-" + x) for x in ("prune", "calibrate", "score", "classify"))
test = Suite()


def prune(model, out, *options, status=0):
    result = run([PRUNE, "-m", model, "-o", out, *options])
    assert result.returncode == status, (options, result.returncode, result.complaint)
    if status:
        assert len(result.complaint.splitlines()) == 1 and not os.path.exists(out), result.complaint
    assert not [x for x in os.listdir(os.path.dirname(out)) if "prune" in x or x.startswith(".moe")]
    return result.complaint if status else result.text


def about(path):
    return json.loads(run([INFO, "--json", "--check", path]).text)


def file_of(folder, name, text):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(text)
    return file.name


@contextlib.contextmanager
def small(made):
    """Write a small model; yield its path and its folder."""
    with tempfile.TemporaryDirectory() as folder:
        small_models.write(folder + "/model.bin", *made)
        yield folder + "/model.bin", folder


# ---- Against the same model with fewer experts -----------------------------------------------------------------------

def cut(meta, tensors, kept):
    """Return the model with only the experts `kept`, by removing the other experts' rows and slabs from its tensors."""
    meta, out = dict(meta), {}
    for layer, experts in kept.items():
        groups, of = meta.get(layer + ".groups", 0), meta[layer + ".experts"]
        meta[layer + ".experts"] = len(experts)
        if groups:
            each = of // groups
            kept_groups = sorted({e // each for e in experts})
            meta[layer + ".groups"] = len(kept_groups)
            compete = len(experts) // len(kept_groups)
        else:
            kept_groups, compete = [], len(experts)
        if meta.get(layer + ".k", 0) > compete:
            meta[layer + ".k"] = compete
        if groups and meta.get(layer + ".parent.k", 0) > len(kept_groups):
            meta[layer + ".parent.k"] = len(kept_groups)
    for name, (dims, data) in tensors.items():
        layer = next((x for x in kept if name.startswith(x + ".")), None)
        part = name[len(layer) + 1:] if layer else ""
        some = None
        if part.startswith("parent."):
            groups = dims[0]
            some = sorted({e // (before(tensors, layer) // groups) for e in kept[layer]})
        elif part.startswith("experts") or part.startswith("gate.") and not part.startswith("gate.hidden"):
            some = kept[layer]
            groups = before(tensors, layer)
        if some is not None:
            one = len(data) // groups
            data = b"".join(data[i * one:(i + 1) * one] for i in some)
            dims = (dims[0] // groups * len(some), *dims[1:])
        out[name] = (dims, data)
    return meta, out


def before(tensors, layer):
    return tensors[layer + ".gate.weight"][0][0]


def numbers(meta, kept):
    """Return the indices of the kept experts in a list of all mixtures' experts that starts with the encoder's."""
    layers = [key[:-8] for key in meta if key.endswith(".experts")]
    at, out = 0, []
    for layer in sorted(layers, key=lambda x: (not x.startswith("encoder"), x)):
        out += [at + e for e in kept[layer]]
        at += meta[layer + ".experts"]
    return out


IDS = [" ".join(str(4 + (i * 7 + j * j) % 36) for j in range(i % 9 + 1)) for i in range(30)]
FLAT = [0, 2, 3, 7, 8, 11], [1, 2, 4, 5, 6, 10]
GROUPED = [3, 5, 6, 8], [0, 1, 2, 9, 10, 11]  # keep 2 of 4 groups with 3 experts each
EVERY_GATE = [dict(gate="topk"), dict(gate="topk", noise=1), dict(gate="softmax", k=0), dict(gate="sigmoid", k=0),
              dict(gate="threshold", k=7), dict(gate="threshold", empty="zero"), dict(gate="topk", units=6)]


def results(model, *options):
    """Return the lines of --json without the name of the model."""
    lines = run([TRANSLATE, "-m", model, "--ids", "--json", *options], "\n".join(IDS) + "\n").text.splitlines()
    return [{**json.loads(line), "model": ""} for line in lines]


@test
def each_gate_selects_among_the_kept_experts():
    for how in EVERY_GATE:
        made = small_models.translation(**how)
        kept = dict(zip(("encoder.1", "decoder.1"), FLAT))
        with small(made) as (model, folder):
            table = prune(model, model + ".cut", "--experts", file_of(folder, "l", json.dumps(numbers(made[0], kept))))
            assert table.count("6 of 12 experts") == 2 and "12 of 24 experts" in table, table
            small_models.write(model + ".same", *cut(*made, kept))
            for options in ([], ["--noise", "5"] if how.get("noise") else ["--beam", "3"]):
                got, wanted, whole = (results(x, *options)
                                      for x in (model + ".cut", model + ".same", model))
                assert got == wanted != whole, (how, options)


@test
def two_levels_select_among_the_kept_groups():
    for parent in ("topk", "softmax", "threshold"):
        for gate in ("topk", "softmax", "threshold", "sigmoid"):
            k = 0 if gate in ("softmax", "sigmoid") else 2
            noise = parent == gate == "topk"
            made = small_models.translation(groups=4, gate=gate, k=k, parent=parent, parent_k=2, noise=noise)
            kept = dict(zip(("encoder.1", "decoder.1"), GROUPED))
            with small(made) as (model, folder):
                table = prune(model, model + ".cut", "--experts",
                              file_of(folder, "l", json.dumps(numbers(made[0], kept))))
                assert table.count("2 of 4 groups") == 2, table
                small_models.write(model + ".same", *cut(*made, kept))
                options = ["--noise", "3"] if noise else []
                got, wanted, whole = (results(x, *options)
                                      for x in (model + ".cut", model + ".same", model))
                assert got == wanted != whole, (parent, gate)


@test
def too_few_experts_and_unequal_groups_are_refused():
    made = small_models.translation(groups=4)
    with small(made) as (model, folder):
        for kept, words in (([0, 1, 3, 4, 5] + [12, 13, 15, 16], "equal"), ([0, 1] + [12, 13, 15, 16], "1 groups"),
                            ([0, 3] + [12, 13, 15, 16], "1 experts of a group")):
            bad = run([PRUNE, "-m", model, "-o", folder + "/out", "--experts", file_of(folder, "l", json.dumps(kept))])
            assert bad.returncode in (2, 3) and words in bad.complaint, (kept, bad.complaint)
            assert not os.path.exists(folder + "/out")


@test
def quantised_linear_experts_keep_their_codes():
    """Q8 and Q4 store blocks of 16 rows, and the 10 rows of an expert can start anywhere in a block."""
    made = small_models.classifier()
    kept = {"network.0": [0, 2], "network.1": [1]}
    rows = "".join(" ".join(str((i * 7 + j * 3) % 11 - 5) for j in range(6)) + "\n" for i in range(20))
    with small(made) as (model, folder):
        listed = file_of(folder, "l", json.dumps(numbers(made[0], kept)))
        small_models.write(model + ".same", *cut(*made, kept))
        for kind in ("f32", "q8", "q4"):
            for name in (model, model + ".same"):
                assert run([QUANTIZE, name, name + ".q", kind]).returncode == 0
            prune(model + ".q", folder + "/cut", "--experts", listed)
            got, wanted, whole = (run([CLASSIFY, "-m", x, "--json", "--top", "4"], rows).text
                                  for x in (folder + "/cut", model + ".same.q", model + ".q"))
            assert got == wanted != whole, kind
            datas = []
            for name in (folder + "/cut", model + ".same.q"):
                with open(name, "rb") as file:
                    data = file.read()
                datas.append({t["name"]: data[t["offset"]:t["offset"] + t["bytes"]] for t in about(name)["tensors"]})
            assert datas[0] == datas[1], kind


# ---- Importance ------------------------------------------------------------------------------------------------------

def counted(model, lines, by):
    """Return {(layer, language): experts by importance}, computed from the routing of given translations."""
    directions, uses = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for source, target, text, translation in lines:
            directions.setdefault((source, target), []).append(f"{text}\t{translation}\n")
        for (source, target), pairs in directions.items():
            named = ["-s", source, "-t", target] if source else ["--ids"]
            done = run([TRANSLATE, "-m", model, "--score", "--split", "0", "--routing", folder + "/r", *named],
                       "".join(pairs))
            assert done.returncode == 0, done.complaint
            with open(folder + "/r", encoding="utf-8") as file:
                header, *rows = map(json.loads, file)
            sizes = {x["layer"]: x["experts"] for x in header["layers"]}
            for row in rows:
                layer = row["layer"]
                at = uses.setdefault((layer, source if layer.startswith("encoder") else target),
                                     [[0, 0.0, 0.0] for _ in range(sizes[layer])])
                pairs = list(zip(row["experts"], row["weights"]))
                for expert, weight in pairs:
                    at[expert][2] += weight
                if pairs:
                    best = max(pairs, key=lambda x: (x[1], -x[0]))
                    at[best[0]][0] += 1
                    at[best[0]][1] += best[1]
    importance = {"first": lambda n, weight, total: n * math.exp(weight / n) if n else 0,
                  "mass": lambda n, weight, total: total}[by]
    return {key: sorted(range(len(x)), key=lambda e: (-importance(*x[e]), -x[e][2], e)) for key, x in uses.items()}


def kept_of(path):
    """Return the remaining experts according to the file's metadata: {layer: experts}."""
    out = {}
    for line in about(path)["metadata"]["prune.kept"]:
        layer, _, ranges = line.split(":")
        parts = [list(map(int, x.split("-"))) for x in ranges.split()]
        out[layer] = [e for x in parts for e in range(x[0], x[-1] + 1)]
    return out


@test
def the_most_important_experts_of_each_language_are_kept():
    r = random.Random(4)
    german = ["Der Hund schläft.", "Ich habe ein Buch.", "Wo ist der Bahnhof?", "Wir gehen heute nach Hause."]
    english = ["The dog sleeps.", "I have a book.", "Where is the station?", "We are going home today."]
    french = ["Le chien dort.", "J'ai un livre.", "Où est la gare ?", "Nous rentrons aujourd'hui."]
    lines = [("en", "de", *x) for x in zip(english, german)] + [("fr", "de", *x) for x in zip(french, german)]
    r.shuffle(lines)
    with tempfile.TemporaryDirectory() as folder:
        sample, out = file_of(folder, "s.tsv", "".join("\t".join(x) + "\n" for x in lines)), folder + "/out.bin"
        for by, options, sizes in (("first", ["--keep", "25%"], (8, 8)),
                                   ("mass", ["--keep", "25", "--rank", "mass"], (8, 8)),
                                   ("first", ["--keep", "25%", "--ratio", "3:1"], (12, 4)),
                                   ("first", ["--keep", "75%", "--ratio", "3:1"], (32, 16))):
            table = prune(MODEL, out, "--sample", sample, *options)
            best = counted(MODEL, lines, by)
            wanted = {"encoder.2": sorted({e for x in ("en", "fr") for e in best["encoder.2", x][:sizes[0]]}),
                      "decoder.1": sorted(best["decoder.1", "de"][:sizes[1]])}
            assert kept_of(out) == wanted, (options, kept_of(out), wanted)
            meta = about(out)["metadata"]
            assert set(meta["prune.directions"]) == {"en-de", "fr-de"} and "8 lines of s.tsv" in meta["prune.by"], meta
            assert f"{sizes[1]} of 32 experts" in table, table
        prune(MODEL, out, "--sample", sample, "--keep", "25%", "--pair", "fr-de")
        best = counted(MODEL, [x for x in lines if x[0] == "fr"], "first")
        assert kept_of(out) == {"encoder.2": sorted(best["encoder.2", "fr"][:8]),
                                "decoder.1": sorted(best["decoder.1", "de"][:8])}


@test
def important_experts_lose_less_than_random_ones():
    """Compare translations by pruned models with those by the full model. tests/bench/prune.py measures BLEU."""
    lines, r = [x for x in many_lines(90) if x.strip()], random.Random(8)
    answers = run([TRANSLATE, "-m", MODEL, "-s", "en", "-t", "de"], "".join(x + "\n" for x in lines)).text.splitlines()
    pairs = [f"en\tde\t{x}\t{y}\n" for x, y in zip(lines, answers)]
    with tempfile.TemporaryDirectory() as folder:
        sample, rest = file_of(folder, "s", "".join(pairs[::2])), file_of(folder, "r", "".join(pairs[1::2]))

        def loss(*options):
            out = folder + "/out.bin"
            assert run([PRUNE, "-q", "-m", MODEL, "-o", out, "--pair", "en-de", "--sample", sample, "--measure", rest,
                        *options]).returncode == 0
            return about(out)["metadata"]["quality.nats_per_token"]
        drawn = [[m * 32 + e for m in range(2) for e in r.sample(range(32), 8)] for _ in range(3)]
        chance = [loss("--experts", file_of(folder, "list", json.dumps(ids))) for ids in drawn]
        matters = loss("--keep", "25%")
        assert matters + 0.1 < min(chance), (matters, chance)


@test
def moe_routing_lists_experts_in_the_order_in_which_they_stay():
    """Files written by --routing contain the languages given by -s and -t in the model's spelling."""
    pairs = {("en", "DE"): ["The dog sleeps.\tDer Hund schläft.", "Where is my book?\tWo ist mein Buch?"],
             ("fr_FR", "deu"): ["Le chien dort.\tDer Hund schläft.", "J'ai un livre.\tIch habe ein Buch."]}
    with tempfile.TemporaryDirectory() as folder:
        files, sample = [], []
        for (source, target), lines in pairs.items():
            files.append(os.path.join(folder, source))
            done = run([TRANSLATE, "-m", MODEL, "--score", "--split", "0", "-s", source, "-t", target, "--routing",
                        files[-1]], "\n".join(lines) + "\n")
            assert done.returncode == 0, done.complaint
            sample += [f"{source}\t{target}\t{x}\n" for x in lines]
        done = run([ROUTING, *files, "--json"])
        assert done.returncode == 0, done.complaint
        uses = {x["layer"]: {u["language"]: [e[0] for e in u["experts"]] for u in x["languages"]}
                for x in json.loads(done.text)["layers"]}
        assert {x: set(u) for x, u in uses.items()} == {"encoder.2": {"en", "fr"}, "decoder.1": {"de"}}, uses
        for percent, n in (10, 3), (25, 8):
            prune(MODEL, folder + "/out", "--sample", file_of(folder, "s", "".join(sample)), "--keep", str(percent))
            assert kept_of(folder + "/out") == {x: sorted({e for best in u.values() for e in best[:n]})
                                                for x, u in uses.items()}, percent


@test
def each_gate_is_measured():
    pairs = [(x, y) for x, y in zip(IDS, reversed(IDS))]
    lines = [("", "", *x) for x in pairs]
    for how in EVERY_GATE:
        with small(small_models.translation(**how)) as (model, folder):
            sample = file_of(folder, "s", "".join(f"a\tb\t{x}\t{y}\n" for x, y in pairs))
            prune(model, model + ".cut", "--sample", sample, "--keep", "50%", "--ids")
            best = counted(model, lines, "first")
            assert kept_of(model + ".cut") == {x: sorted(best[x, ""][:6]) for x in ("encoder.1", "decoder.1")}, how
            bytes_of = set()
            for options in (["--batch", "1"], ["--batch", "7", "--threads", "3"], ["--batch", "32"]):
                prune(model, model + ".again", "--sample", sample, "--keep", "50%", "--ids", *options)
                with open(model + ".again", "rb") as file:
                    bytes_of.add(file.read())
            with open(model + ".cut", "rb") as file:
                assert bytes_of == {file.read()}, how
            assert run([TRANSLATE, "-m", model + ".cut", "--ids"], "\n".join(IDS) + "\n").returncode == 0


@test
def whole_groups_can_be_removed():
    """25% of the 12 experts in 4 groups are 3 experts: moe-prune keeps one group, or one expert in each of 3 groups."""
    pairs = [(x, y) for x, y in zip(IDS, reversed(IDS))]
    for how in (dict(k=1, parent_k=1), dict(gate="softmax", k=0, parent="softmax", parent_k=0), dict(k=2, parent_k=2)):
        with small(small_models.translation(groups=4, **how)) as (model, folder):
            sample = file_of(folder, "s", "".join(f"a\tb\t{x}\t{y}\n" for x, y in pairs))
            prune(model, model + ".cut", "--sample", sample, "--keep", "25%", "--ids", "--rank", "mass")
            with tempfile.TemporaryDirectory() as other:
                run([TRANSLATE, "-m", model, "--score", "--ids", "--routing", other + "/r"],
                    "".join(f"{x}\t{y}\n" for x, y in pairs))
                with open(other + "/r") as file:
                    rows = [json.loads(x) for x in file][1:]
            for layer, kept in kept_of(model + ".cut").items():
                mass = collections.Counter()
                for row in rows:
                    if row["layer"] == layer:
                        mass.update(dict(zip(row["experts"], row["weights"])))
                least, groups = max(how.get("k"), 1), max(how.get("parent_k"), 1)
                n, best = max(3, least * groups), -1
                for inside in range(least, 4):
                    many = min(4, n // inside)
                    if many >= groups:
                        sums = [sum(sorted((mass[g * 3 + i] for i in range(3)), reverse=True)[:inside])
                                for g in range(4)]
                        best = max(best, sum(sorted(sums, reverse=True)[:many]))
                assert abs(sum(mass[e] for e in kept) - best) < 1e-4 * (1 + best), (how, layer, kept)
                assert len(kept) <= n, (how, kept)
            assert run([TRANSLATE, "-m", model + ".cut", "--ids"], "\n".join(IDS) + "\n").returncode == 0


@test
def language_models_are_pruned_with_a_text():
    with small(small_models.language()) as (model, folder):
        sample = file_of(folder, "s", "\n".join(IDS) + "\n")
        table = prune(model, model + ".cut", "--sample", sample, "--keep", "25%", "--ids")
        assert "3 of 12 experts" in table, table
        assert "sum of weights in 30 lines of s" == about(model + ".cut")["metadata"]["prune.by"]
        assert run([SCORE, "-m", model + ".cut", "--ids"], "\n".join(IDS) + "\n").returncode == 0
        few = prune(model, model + ".few", "--sample", folder + "/s", "--keep", "1%", "--ids")
        assert "2 of 12 experts" in few, few  # each token needs 2 experts


# ---- Thresholds, the loss --------------------------------------------------------------------------------------------

@test
def thresholds_equal_those_of_moe_calibrate():
    pairs = "".join(f"a\tb\t{x}\t{y}\n" for x, y in zip(IDS, reversed(IDS)))
    for how in (dict(gate="threshold"), dict(gate="threshold", groups=4, parent="threshold", k=1, parent_k=1)):
        made = small_models.translation(**how)
        kept = dict(zip(("encoder.1", "decoder.1"), GROUPED if "groups" in how else FLAT))
        with small(made) as (model, folder):
            sample, listed = file_of(folder, "s", pairs), file_of(folder, "l", json.dumps(numbers(made[0], kept)))
            prune(model, folder + "/plain", "--experts", listed)
            prune(model, folder + "/set", "--experts", listed, "--sample", sample, "--ids")
            run([CALIBRATE, "-m", folder + "/plain", "-o", folder + "/wanted", "--text", sample, "--ids"])
            files = []
            for name in ("plain", "set", "wanted"):
                with open(f"{folder}/{name}", "rb") as file:
                    data = file.read()
                files.append({t["name"]: data[t["offset"]:t["offset"] + t["bytes"]]
                              for t in about(f"{folder}/{name}")["tensors"]})
            assert files[1] == files[2] and files[0] != files[1], how
            old = struct.unpack("<12f", made[1]["encoder.1.gate.threshold"][1])
            assert struct.pack("<%df" % len(kept["encoder.1"]), *(old[e] for e in kept["encoder.1"])) \
                == files[0]["encoder.1.gate.threshold"]


@test
def the_loss_is_measured_and_recorded():
    with small(small_models.translation()) as (model, folder):
        sample = file_of(folder, "s", "".join(f"a\tb\t{x}\t{y}\n" for x, y in zip(IDS, reversed(IDS))))
        result = run([PRUNE, "-m", model, "-o", model + ".cut", "--sample", sample, "--keep", "50%", "--ids",
                      "--measure", sample])
        assert result.returncode == 0 and "nats per token before" in result.complaint, result.complaint
        meta = about(model + ".cut")["metadata"]
        assert meta["quality.nats_per_token"] != meta["quality.nats_per_token_before"], meta
        scores = [json.loads(x) for name in (model, model + ".cut") for x in run(
            [TRANSLATE, "-m", name, "--ids", "--score", "--json"],
            "".join(f"{x}\t{y}\n" for x, y in zip(IDS, reversed(IDS)))).text.splitlines()]
        tokens = sum(len(x["token_logprobs"]) for x in scores[:30])
        for key, some in (("_before", scores[:30]), ("", scores[30:])):
            wanted = -sum(x["logprob"] for x in some) / tokens
            assert abs(meta["quality.nats_per_token" + key] - wanted) < 1e-5, (key, meta, wanted)
        answers = [run([TRANSLATE, "-m", name, "--ids"], "".join(x + "\n" for x in IDS)).text.splitlines()
                   for name in (model, model + ".cut")]
        same = sum(x == y for x, y in zip(*answers))
        assert 0 < same < len(IDS), answers
        assert abs(meta["quality.same_translations"] - same / len(IDS)) < 1e-6, (meta, same)
        message = f"{100 * same / len(IDS):.1f} % of {len(IDS)} translations the same"
        assert message in result.complaint, result.complaint


@test
def bad_samples_are_refused():
    with tempfile.TemporaryDirectory() as folder:
        good, out = file_of(folder, "good", "en\tde\t%s\tJa.\n" % LINES[0]), folder + "/out"
        keep = "--sample", good, "--keep"
        for options, status, words in (
                ((*keep, "0"), 2, "--keep"), ((*keep, "0%"), 2, "--keep"), ((*keep, "101%"), 2, "--keep"),
                ((*keep, "x"), 2, "--keep"), (("--sample", good), 2, "--keep"), (("--keep", "5"), 2, "--sample"),
                ((*keep, "25%", "--ratio", "3"), 2, "--ratio"), ((*keep, "25%", "--ratio", "3:0"), 2, "--ratio"),
                ((*keep, "25%", "--rank", "size"), 2, "--rank"), ((*keep, "25%", "--experts", good), 2, "--experts"),
                ((*keep, "25%", "--pair", "fr-de"), 3, "no line has one of these directions"),
                (("--sample", file_of(folder, "bad", "one\ttwo\n"), "--keep", "25%"), 3, "line 1"),
                (("--sample", file_of(folder, "it", "en\tit\tYes.\tSi.\n"), "--keep", "25%"), 3, "'it'"),
                (("--sample", folder + "/none", "--keep", "25%"), 4, "none"),
                (("--sample", file_of(folder, "empty", ""), "--keep", "25%"), 4, "empty")):
            bad = prune(MODEL, out, *options, status=status)
            assert words in bad, (options, bad)
        small_models.write(folder + "/classifier", *small_models.classifier())
        assert "classifier" in prune(folder + "/classifier", out, *keep, "25%", status=2)


if __name__ == "__main__":
    sys.exit(test.run())
