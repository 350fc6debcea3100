#!/usr/bin/env python3
"""moe-routing: numbers equal to those computed by hand and by independent code, hostile and broken input, the page.

Usage: tests/python tests/programs/test_routing.py
Prints `ok NAME` or `FAIL NAME` per test; standard library only. BIN is the folder of the program.
If node is installed, the script of the page is run with a stub of a document.
"""
import collections
import html.parser
import csv
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile

from suite import Skip, Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ROUTING = os.path.join(ROOT, os.environ.get("BIN", "."), "moe-routing")
SANITIZED = "asan" in os.environ.get("BUILD", "")
test = Suite()


def run(data, *options, status=0, **keywords):
    """Run the program with `data` (bytes, text, or a list of objects) as standard input."""
    if isinstance(data, list):
        data = lines_of(data)
    if isinstance(data, str):
        data = data.encode()
    result = subprocess.run([ROUTING] + list(options), input=data, stdout=keywords.pop("stdout", subprocess.PIPE),
                            stderr=subprocess.PIPE, timeout=300, **keywords)
    result.complaint = result.stderr.decode()
    assert result.returncode == status, "status %d, not %d: %s" % (result.returncode, status, result.complaint)
    assert (status == 0) == (not result.complaint), result.complaint
    result.text = (result.stdout or b"").decode()
    return result


def lines_of(objects):
    return "".join(json.dumps(o, ensure_ascii=False) + "\n" for o in objects)


class Page(html.parser.HTMLParser):
    """Parse a page like a browser: tags, title, script contents, and the text outside scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.title, self.words, self.inside = [], [], "", "", ""
        self.feed(text)
        self.close()
        assert len(self.scripts) == 2, "%d scripts" % len(self.scripts)
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside == "title":
            self.title += data
        elif self.inside != "style":
            self.words += data


def page(data, *options):
    return Page(run(data, "-", "-o", "-", *options).text)


def header(*layers, model="m"):
    return {"model": model, "layers": [dict({"layer": "a", "experts": 4, "groups": 0, "k": 2, "gate": "topk"}, **x)
                                       for x in layers or [{}]]}


def row(line, position, token, experts, weights, layer="a", empty=False, **more):
    return dict({"line": line, "layer": layer, "position": position, "token": token, "id": sum(map(ord, token)) if token
                 else 0,
                 "experts": experts, "weights": weights, "empty": empty}, **more)


def close(a, b):
    return a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12))


# ---- Numbers -----------------------------------------------------------------------------------------------------


@test
def a_small_example_by_hand():
    data = [header({"layer": "e", "gate": "threshold"}, {"layer": "d", "groups": 2, "k": 1}),
            row(1, 0, "x", [0, 2], [0.75, 0.25], "e"), row(1, 1, "y", [0], [1], "e"),
            row(1, 2, "x", [0], [0.5], "e", empty=True),
            row(1, 0, "s", [3], [1], "d"),
            row(7, 0, "y", [], [], "e", empty=True)]
    p = page(data, "--min-count", "1").data
    e, d = p["layers"]
    assert (p["model"], p["sentences"], p["tokens_routed"]) == ("m", 2, 5), p
    assert (e["layer"], e["gate"], e["experts"], e["groups"], e["k"], e["tokens"],
            e["pairs"]) == ("e", "threshold", 4, 0, 2, 4, 4), e
    assert e["load"] == [3, 0, 1, 0] and e["importance"] == [2.25, 0, 0.25, 0] and e["dead"] == 2, e
    assert e["experts_per_token"] == 1 and e["histogram"] == [[0, 1], [1, 2], [2, 1]], e
    assert e["empty"] == 2 and e["empty_share"] == 0.5, e
    # The load has mean 1 and deviations 2 -1 0 -1; the importance has mean 5/8 and deviations 13/8 -5/8 -3/8 -5/8.
    assert close(e["cv_load"], math.sqrt(6 / 4)) and e["max_over_mean_load"] == 3, e
    assert abs(e["cv_importance"] - math.sqrt((169 + 25 + 9 + 25) / 64 / 4) / 0.625) < 1e-11, e
    assert (d["load"] == [0, 0, 0, 1] and d["group_load"] == [0, 1] and d["group_importance"] == [0, 1]
            and d["dead"] == 3), d
    assert close(d["cv_load"], math.sqrt(3)) and d["max_over_mean_load"] == 4, d

    def name(t):
        return p["tokens"][t][0]

    first, third = e["preferred"]
    assert [first["expert"], third["expert"]] == [0, 2]
    assert [(name(x["t"]), x["n"], x["w"], x["sum"]) for x in first["weight"]] == [("y", 1, 1, 1),
                                                                                   ("x", 2, 0.75, 1.25)], first
    assert [[name(t) for t in x["before"] + [x["t"]] + x["after"]]
            for x in first["weight"]] == [["x", "y", "x"], ["x", "y", "x"]], first
    # 2 of the expert's 3 tokens are x and 1 is y; 2 of all 4 tokens are x and 2 are y.
    assert [(name(x["t"]), x["n"], x["all"]) for x in first["lift"]] == [("x", 2, 2), ("y", 1, 2)], first
    assert (close(first["lift"][0]["lift"], 4 / 3) and close(first["lift"][1]["lift"], 2 / 3)
            and third["lift"][0]["lift"] == 2)
    shown = [(s["line"], [(t["layer"], [[name(x[0])] + x[1:] for x in t["tokens"]]) for t in s["layers"]])
             for s in p["text"]]
    assert shown == [(1, [(0, [["x", 0, 2, 0, 0.75, 2, 0.25], ["y", 0, 1, 0, 1], ["x", 1, 1, 0, 0.5]]),
                          (1, [["s", 0, 1, 3, 1]])]),
                     (7, [(0, [["y", 1, 0]])])], shown


@test
def ratios_without_tokens_are_null():
    p = page([header()]).data["layers"][0]
    assert p["tokens"] == 0 and p["dead"] == 4 and p["load"] == [0] * 4 and p["histogram"] == [], p
    assert [p[x] for x in ("cv_load", "cv_importance", "max_over_mean_load", "empty_share",
                           "experts_per_token")] == [None] * 5, p
    p = page([header(), row(1, 0, "x", [], [], empty=True)]).data["layers"][0]
    assert p["tokens"] == 1 and p["empty_share"] == 1 and p["cv_load"] is None and p["preferred"] == [], p


def generate(seed, sentences, layers, vocabulary):
    """Yield the routing of random sentences by gates of all kinds, in which each token has preferred experts."""
    r = random.Random(seed)
    yield header(*layers)
    line = 0
    for _ in range(sentences):
        line += r.choice((1, 1, 1, 2))
        for l in layers:
            for position in range(r.randint(1, 14)):
                t = min(vocabulary - 1, int(r.expovariate(4 / vocabulary)))
                n = {"softmax": l["experts"], "topk": l["k"], "threshold": r.choice((1, 1, 2, 3))}[l["gate"]]
                favourites = [(t * 7 + i * i) % l["experts"] for i in range(5)]
                chosen = set()
                while len(chosen) < n:
                    chosen.add(r.choice(favourites) if r.random() < 0.6 and n <= 4 else r.randrange(l["experts"]))
                empty = l["gate"] == "threshold" and r.random() < 0.1
                if empty:
                    chosen = set(list(chosen)[: r.randint(0, 1)])
                weights = [r.randint(1, 9) for _ in chosen]
                yield row(line, position, "t%d" % t, sorted(chosen), [round(w / sum(weights), 3) for w in weights],
                          l["layer"], empty)


def f32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def expected(objects, top, min_count, listed):
    """Return the expected JSON of the page, computed naively, with the texts of tokens instead of their indices."""
    out, layers, rows = [], objects[0]["layers"], objects[1:]
    first_seen = {}
    for x in rows:
        first_seen.setdefault(x["token"], len(first_seen))
    for l in layers:
        mine = [x for x in rows if x["layer"] == l["layer"]]
        load, importance = [0] * l["experts"], [0.0] * l["experts"]
        sentences = collections.defaultdict(list)
        for x in mine:
            sentences[x["line"]].append(x)
            for e, w in zip(x["experts"], x["weights"]):
                load[e] += 1
                importance[e] += w

        def cv(v):
            mean = sum(v) / len(v)
            return math.sqrt(sum((x - mean) ** 2 for x in v) / len(v)) / mean

        size = l["experts"] // l["groups"] if l["groups"] else 1
        want = dict(l, tokens=len(mine), load=load, importance=importance, cv_load=cv(load),
                    cv_importance=cv(importance),
                    pairs=sum(load), experts_per_token=sum(load) / len(mine), empty=sum(x["empty"] for x in mine),
                    empty_share=sum(x["empty"] for x in mine) / len(mine), dead=load.count(0),
                    max_over_mean_load=max(load) * len(load) / sum(load),
                    histogram=sorted(map(list, collections.Counter(len(x["experts"]) for x in mine).items())),
                    group_load=[sum(load[g * size: (g + 1) * size]) for g in range(l["groups"])],
                    group_importance=[sum(importance[g * size: (g + 1) * size]) for g in range(l["groups"])])
        all_times = collections.Counter(x["token"] for x in mine)
        want["preferred"] = []
        for e in sorted(sorted(range(l["experts"]), key=lambda e: (-load[e], e))[:listed]):
            if not load[e]:
                continue
            count, total, best = collections.Counter(), collections.Counter(), {}
            for s in sentences.values():
                for i, x in enumerate(s):
                    if e not in x["experts"]:
                        continue
                    t, w = x["token"], x["weights"][x["experts"].index(e)]
                    count[t] += 1
                    total[t] += w
                    if t not in best or f32(w) > best[t][0]:
                        best[t] = (f32(w), x["line"], [y["token"] for y in s[max(0, i - 6): i]],
                                   [y["token"] for y in s[i + 1: i + 7]])
            lift = {t: count[t] / load[e] * len(mine) / all_times[t] for t in count}
            by_weight = sorted(count, key=lambda t: (-best[t][0], -total[t], first_seen[t]))[:top]
            by_lift = sorted((t for t in count if count[t] >= min_count),
                             key=lambda t: (-lift[t], -count[t], first_seen[t]))[:top]
            want["preferred"].append({"expert": e, "weight": [(t, count[t], total[t]) + best[t] for t in by_weight],
                                      "lift": [(t, count[t], all_times[t], lift[t]) for t in by_lift]})
        out.append(want)
    return out


@test
def generated_routing_equals_an_independent_computation():
    for seed, sentences, listed in ((1, 40, 3), (2, 400, 1000), (3, 1500, 20)):
        layers = [{"layer": "encoder.0", "experts": 24, "groups": 0, "k": 2, "gate": "threshold"},
                  {"layer": "decoder.0", "experts": 60, "groups": 5, "k": 4, "gate": "topk"},
                  {"layer": "decoder.1", "experts": 3, "groups": 0, "k": 0, "gate": "softmax"}]
        objects = list(generate(seed, sentences, layers, 150))
        p = page(objects, "--top", "7", "--min-count", "3", "--experts", str(listed), "--sentences", "30").data
        for got, want in zip(p["layers"], expected(objects, 7, 3, listed)):
            for key, value in want.items():
                if key == "preferred":
                    continue
                same = all(map(close, got[key], value)) and len(got[key]) == len(value) if key.startswith(
                    ("importance", "group_")) else \
                    close(got[key], value) if isinstance(value, float) else got[key] == value
                # The page rounds numbers to 12 digits.
                same = same or (isinstance(value, float) and abs(got[key] - value) < 1e-9) or \
                    (isinstance(value, list) and value and isinstance(value[0], float)
                     and max(abs(a - b) for a, b in zip(got[key], value)) < 1e-6)
                assert same, (seed, key, got[key], value)

            def name(t):
                return p["tokens"][t][0]

            assert [x["expert"] for x in got["preferred"]] == [x["expert"] for x in want["preferred"]], seed
            for a, b in zip(got["preferred"], want["preferred"]):
                assert len(a["weight"]) == len(b["weight"]) and len(a["lift"]) == len(b["lift"]), (a, b)
                for x, (t, n, total, best, line, before, after) in zip(a["weight"], b["weight"]):
                    assert ((name(x["t"]), x["n"], f32(x["w"]), x["line"]) == (t, n, best, line)
                            and abs(x["sum"] - total) < 1e-8), (seed, x, b)
                    assert ([name(i) for i in x["before"]] == before
                            and [name(i) for i in x["after"]] == after), (seed, x, b)
                for x, (t, n, times, lift) in zip(a["lift"], b["lift"]):
                    assert ((name(x["t"]), x["n"], x["all"]) == (t, n, times) and abs(x["lift"] - lift) < 1e-9
                            * lift), (seed, x, b)
        check_text(p, objects, 30)


def check_text(p, objects, limit):
    """Assert that a page shows the routing of the first sentences token by token."""
    lines = sorted({x["line"] for x in objects[1:]})[:limit]
    want = [x for x in objects[1:] if x["line"] in lines]
    got = [(s["line"], p["layers"][l["layer"]]["layer"], t) for s in p["text"] for l in s["layers"]
           for t in l["tokens"]]
    assert len(got) == len(want) and [s["line"] for s in p["text"]] == lines, (len(got), len(want))
    for (line, layer, t), x in zip(got, want):
        pairs = sorted(zip(x["experts"], map(f32, x["weights"])), key=lambda y: (-y[1], y[0]))[:8]
        assert (line, layer, p["tokens"][t[0]], t[1], t[2]) == (x["line"], x["layer"], [x["token"], x["id"]],
                                                                x["empty"], len(x["experts"])), (t, x)
        assert list(zip(t[3::2], map(f32, t[4::2]))) == pairs, (t, x)


@test
def json_equals_the_summary_of_the_page():
    objects = list(generate(5, 60, [{"layer": "a", "experts": 12, "groups": 3, "k": 4, "gate": "topk"}], 40))
    summary, whole = json.loads(run(objects, "-", "--json").text), page(objects).data
    for l in whole["layers"]:
        del l["preferred"]
    assert summary == {k: whole[k] for k in ("title", "model", "made_by", "sentences", "tokens_routed", "rank",
                                             "layers")}
    with tempfile.TemporaryDirectory() as folder:
        assert run(objects, "-", "--json", "-o", folder + "/s.json").text == ""
        assert json.load(open(folder + "/s.json")) == summary


@test
def the_table_has_a_row_for_each_expert():
    layers = {"layer": "encoder.1"}, {"layer": 'decoder "1", x'}
    one = [header(*layers), row(1, 0, "x", [0, 2], [0.75, 0.25], "encoder.1"), row(1, 0, "a", [1], [1], layers[1]["layer"])]
    two = [header(*layers), row(1, 0, "x", [3], [1], "encoder.1")]
    for files in [spoken(one, "en", "de"), spoken(two, "fr", "de")], [one]:
        summary, rows = of_files(files), list(csv.DictReader(of_files(files, "--csv").splitlines()))
        assert len(rows) == sum(layer["experts"] for layer in summary["layers"])
        for layer in summary["layers"]:
            mine = [x for x in rows if x["layer"] == layer["layer"]]
            for key in "load", "importance":
                assert [float(x[key]) for x in mine] == layer[key], (mine, layer)
            assert {(x["gate"], x["k"], x["tokens"]) for x in mine} == {(layer["gate"], str(layer["k"]), str(layer["tokens"]))}
            assert [int(x["expert"]) for x in mine] == list(range(layer["experts"]))
            shares = {x["language"]: {expert: share for expert, share, _ in x["experts"]} for x in layer["languages"]}
            for name in set(rows[0]) - {"layer", "gate", "k", "tokens", "expert", "load", "importance"}:
                assert [float(x[name] or 0) for x in mine] == [
                    shares.get(name, {}).get(e, 0) for e in range(layer["experts"])], (name, mine, shares)
    assert "mutually exclusive" in of_files([one], "--csv", "--json", status=2)


# ---- Languages -------------------------------------------------------------------------------------------------------


def of_files(files, *options, status=0):
    """Return the summary of several files, or the error message if a status is expected."""
    with tempfile.TemporaryDirectory() as folder:
        names = ["%s/%d.jsonl" % (folder, i) for i in range(len(files))]
        for name, objects in zip(names, files):
            with open(name, "w") as f:
                f.write(lines_of(objects))
        result = run("", *names, *(options or ["--json"]), status=status)
    return result.complaint if status else result.text if options else json.loads(result.text)


def spoken(objects, source=None, target=None):
    return [dict(objects[0], **{k: v for k, v in (("source", source), ("target", target)) if v})] + objects[1:]


@test
def experts_of_a_language_are_sorted_by_importance():
    layers = {"layer": "encoder.1"}, {"layer": "decoder.1"}
    one = [header(*layers),
           row(1, 0, "x", [0, 2], [0.75, 0.25], "encoder.1"), row(1, 1, "y", [1, 2], [0.25, 0.75], "encoder.1"),
           row(1, 2, "z", [2, 3], [0.5, 0.5], "encoder.1"), row(1, 0, "a", [1, 3], [0.25, 0.75], "decoder.1")]
    two = [header(*layers), row(1, 0, "x", [0, 3], [0.75, 0.25], "encoder.1"),
           row(1, 0, "b", [0], [1], "decoder.1"), row(2, 0, "b", [], [], "decoder.1", empty=True)]
    s = of_files([spoken(one, "en", "de"), spoken(two, "en", "fr")])
    encoder, decoder = s["layers"]
    # In en, experts 0 and 2 are first choice twice (0.75, 0.75 and 0.75, 0.5); the lower index wins ties.
    assert (s["rank"], s["sentences"], s["tokens_routed"]) == ("first", 3, 7), s
    assert encoder["languages"] == [{"language": "en", "tokens": 4, "experts": [
        [0, 0.375, 0.375], [2, 0.375, 0.75], [3, 0.1875, 0.9375], [1, 0.0625, 1]]}], encoder["languages"]
    assert decoder["languages"] == [{"language": "de", "tokens": 1, "experts": [[3, 0.75, 0.75], [1, 0.25, 1]]},
                                    {"language": "fr", "tokens": 2, "experts": [[0, 1, 1]]}], decoder["languages"]
    assert encoder["load"] == [2, 1, 3, 2] and decoder["load"] == [1, 1, 0, 1], s
    # Without an encoder, experts are sorted by the sum of weights: 3 precedes 1, which is first choice twice.
    data = [header({"layer": "decoder.0"}), row(1, 0, "x", [1, 3], [0.51, 0.49], "decoder.0"),
            row(1, 1, "y", [1, 3], [0.51, 0.49], "decoder.0"), row(1, 2, "z", [3], [1], "decoder.0")]
    s = of_files([spoken(data, "en", "de")])
    assert s["rank"] == "mass" and [x[0] for x in s["layers"][0]["languages"][0]["experts"]] == [3, 1], s
    assert of_files([spoken(data, "en")])["layers"][0]["languages"] == of_files([data])["layers"][0]["languages"] == []


@test
def sentences_of_several_files_are_separate():
    one = [header({}), row(1, 0, "x", [0], [1]), row(1, 1, "y", [0], [1]), row(2, 0, "y", [1], [1])]
    two = [header({}), row(2, 0, "z", [2], [1]), row(3, 0, "x", [0], [1])]
    p = Page(of_files([one, two, two], "-o", "-")).data
    shown = [(s["line"], [p["tokens"][t[0]][0] for t in s["layers"][0]["tokens"]]) for s in p["text"]]
    assert shown == [(1, ["x", "y"]), (2, ["y"]), (2, ["z"]), (3, ["x"]), (2, ["z"]), (3, ["x"])], shown
    assert p["sentences"] == 6 and p["layers"][0]["load"] == [4, 1, 2, 0]
    assert Page(of_files([one, two, two], "-o", "-", "--sentences", "3")).data["text"] == p["text"][:3]


@test
def generated_languages_equal_an_independent_computation():
    layers = [{"layer": "encoder.0", "experts": 24, "groups": 0, "k": 2, "gate": "threshold"},
              {"layer": "decoder.0", "experts": 60, "groups": 5, "k": 4, "gate": "topk"}]
    spoken_by = ("en", "de"), ("fr", "de"), ("en", "fr"), (None, "es")
    files = [list(generate(20 + i, 60, layers, 80)) for i in range(4)]
    s = of_files([spoken(x, *pair) for x, pair in zip(files, spoken_by)])
    for side, (got, names) in enumerate(zip(s["layers"], (["en", "fr"], ["de", "fr", "es"]))):
        assert sorted(x["language"] for x in got["languages"]) == sorted(names), got["languages"]
        for use in got["languages"]:
            rows = [x for data, pair in zip(files, spoken_by) if pair[side] == use["language"]
                    for x in data[1:] if x["layer"] == layers[side]["layer"]]
            mass, first = collections.Counter(), collections.defaultdict(list)
            for x in rows:
                mass.update(dict(zip(x["experts"], map(f32, x["weights"]))))
                if x["experts"]:
                    best = max(x["weights"])
                    first[x["experts"][x["weights"].index(best)]].append(f32(best))
            by = {e: len(w) * math.exp(sum(w) / len(w)) for e, w in first.items()}
            order = sorted((e for e in mass if mass[e] > 0), key=lambda e: (-by.get(e, 0), -mass[e], e))
            assert [x[0] for x in use["experts"]] == order and use["tokens"] == len(rows), (use["language"], side)
            so_far, total = 0, sum(mass.values())
            for e, share, up_to in use["experts"]:
                so_far += mass[e] / total
                assert abs(share - mass[e] / total) < 1e-9 and abs(up_to - so_far) < 1e-9, (use["language"], e)


@test
def files_of_different_models_are_refused():
    first = [header({}, {"layer": "b", "experts": 6, "groups": 3}), row(1, 0, "x", [0, 2], [0.5, 0.5])]
    layers = first[0]["layers"]
    for change, words in (({"model": "n"}, "model: 'n'"), ({"layers": layers[:1]}, "layers: 1, but 2"),
                          ({"layers": layers[::-1]}, "layers: 'b' differs"), ({"source": 5}, "source"),
                          ({"target": None}, "target"), ({"target": "x" * 1025}, "target"),
                          *(({"layers": [layers[0], dict(layers[1], **x)]}, "layers: 'b' differs")
                            for x in ({"experts": 9}, {"groups": 2}, {"k": 3}, {"gate": "threshold"}))):
        bad = of_files([first, [dict(first[0], **change)] + first[1:]], "--json", status=3)
        assert "1.jsonl: line 1: " in bad and words in bad, (change, bad)
    for bad in [first, [first[1]]], [first, []], [first, first + [first[1]]]:
        assert "1.jsonl: line " in of_files(bad, "--json", status=3)
    assert of_files([first, first])["layers"][0]["load"] == [2, 0, 2, 0]


@test
def limits_apply_to_lists_but_not_to_counts():
    objects = list(generate(6, 80, [{"layer": "a", "experts": 30, "groups": 0, "k": 3, "gate": "topk"}], 40))
    whole = page(objects).data
    assert len(whole["text"]) == 80 and max(len(x["weight"]) for x in whole["layers"][0]["preferred"]) == 12
    few = page(objects, "--sentences", "3", "--top", "2", "--experts", "4").data
    assert len(few["text"]) == 3 and len(few["layers"][0]["preferred"]) == 4
    assert {len(x["weight"]) for x in few["layers"][0]["preferred"]} == {2} and few["sentences"] == 80
    none = page(objects, "--sentences", "0", "--top", "0").data
    assert none["text"] == none["tokens"] == none["layers"][0]["preferred"] == []
    for p in few, none:
        assert (p["layers"][0]["load"] == whole["layers"][0]["load"]
                and p["layers"][0]["cv_load"] == whole["layers"][0]["cv_load"])


@test
def tokens_can_lack_text_or_id():
    objects = [header(), row(1, 0, "", [0], [1], id=5), row(1, 1, "x", [0], [1]), row(1, 2, "x", [1], [1])]
    objects += [row(2, 0, "", [1], [1]), row(3, 0, "", [1], [1])]
    del objects[1]["token"], objects[3]["id"]
    for o in objects[4:]:  # as in a classifier's routing file
        del o["token"], o["id"]
    assert page(objects, "--min-count", "1").data["tokens"] == [[None, 5], ["x", 120], ["x", None], [None, None]]


@test
def unknown_fields_are_ignored():
    objects = [dict(header(), more=[1, {"a": None}]), row(1, 0, "x", [0], [1], beam=3, more={"layer": "z"})]
    assert page(objects).data["layers"][0]["load"] == [1, 0, 0, 0]


@test
def very_wide_dense_layers_are_accepted():
    experts = 131072
    objects = [header({"experts": experts, "groups": 256, "k": 0, "gate": "softmax"})]
    objects += [row(1, i, "x", list(range(experts)), [1 / experts] * experts) for i in range(2)]
    p = page(objects, "--experts", "5", "--top", "1")
    l = p.data["layers"][0]
    assert (l["cv_load"] == 0 and l["load"] == [2] * experts and l["group_load"] == [2 * 512] * 256
            and len(l["preferred"]) == 5)
    assert l["histogram"] == [[experts, 2]] and len(p.data["text"][0]["layers"][0]["tokens"][0]) == 3 + 2 * 8


# ---- Hostile strings -----------------------------------------------------------------------------------------------

HOSTILE = ["</script><script>alert(1)</script>", "<!--<script>", "]]>", "\"'`\\", "\u2028\u2029", "&lt;&amp;",
           "\x01\x1b[31m\x7f", "\u202eabc\u2066",
           "@DATA@ @TITLE@", "\\u003c/script>", "</title><img src=x onerror=alert(1)>", "%s%n", "${x}",
           "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
           "__proto__", "\t\n", "\u2581", " ", "javascript:alert(1)", "??<??!??/", "\ufeff"]


@test
def hostile_strings_remain_text():
    plain = page([header(), row(1, 0, "x", [0], [1])])
    for hostile in HOSTILE:
        objects = spoken([header({"layer": hostile}, model=hostile)], hostile, hostile)
        objects += [row(1, i, t, [0], [1], hostile) for i, t in enumerate(HOSTILE)]
        for options in ([], ["--title", hostile]):
            text = run(objects, "-", "-o", "-", *options).text
            p = Page(text)
            assert p.tags == plain.tags and p.scripts[1] == plain.scripts[1], "other tags or script: %r" % hostile
            layer, = p.data["layers"]
            assert p.data["model"] == layer["layer"] == layer["languages"][0]["language"] == hostile, p.data["model"]
            assert [t[0] for t in p.data["tokens"]] == HOSTILE, p.data["tokens"]
            visible = re.sub("[\x00-\x08\x0b-\x1f\x7f\u2028-\u202e\u2066-\u2069]", "\ufffd", hostile)
            visible = visible.replace("\t", " ").replace("\n", " ")
            assert p.title == ("" if options else "Routing of ") + visible, (p.title, visible)
            block = text[text.index('id="data">') + 10: text.rindex("<script>")]
            assert not set("<>&'\u2028\u2029") & set(block[: block.index("</script>")]), "not escaped"
    with_ascii = "".join(json.dumps(o) + "\n" for o in objects)  # json.dumps writes \u escapes and surrogate pairs
    assert [t[0] for t in page(with_ascii).data["tokens"]] == HOSTILE


@test
def the_page_loads_nothing_else():
    text = run([header(), row(1, 0, "x", [0], [1])], "-", "-o", "-").text
    assert set(re.findall(r"[a-z]+://[^\"' ]*",
                          text)) == {"http://www.w3.org/2000/svg"}, "a name of a namespace, nothing else"
    p = Page(text)
    for tag, attributes in p.tags:
        assert (tag not in ("link", "img", "iframe", "object", "base", "form")
                and not {"src", "href", "srcset", "onclick"} & set(attributes)), (tag, attributes)
    policy = [a["content"] for t, a in p.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policy) == 1 and policy[0].startswith("default-src 'none'")
    assert ("url(" not in text and "@import" not in text and "innerHTML" not in text and "insertAdjacent" not in text
            and "document.write" not in text)
    assert not text.count("@TITLE@") and not text.count("@DATA@") and all(ord(c) < 128 for c in p.scripts[1])
    with open(os.path.join(ROOT, "tools/programs/routing.html"), encoding="utf-8") as f:
        template = f.read()
    assert text == template.replace("@TITLE@", "Routing of m").replace(
        "@DATA@", p.scripts[0]), "the Makefile changed the template"


# ---- Broken input ----------------------------------------------------------------------------------------------------


def broken():
    """Yield invalid input: (name, input, line number in the message, other words of the message)."""
    h, good = header({}, {"layer": "b", "experts": 6, "groups": 3}), row(1, 0, "x", [0, 2], [0.5, 0.5])

    def with_header(**change):
        return lines_of([dict({"model": "m", "layers": [dict(h["layers"][0], **change)]})])

    def without(o, key):
        return {k: v for k, v in o.items() if k != key}

    yield "no input", "", 1, "header"
    yield "a blank line only", "\n", 1, "header"
    yield "a token first", lines_of([good]), 1, "model"
    yield "a list", "[1,2]\n", 1, "object"
    yield "not JSON", "{\"model\":\n", 1, "JSON"
    yield "two objects", lines_of([h]).strip() + "{}\n", 1, "JSON"
    yield "no layers", lines_of([{"model": "m", "layers": []}]), 1, "layers"
    yield "layers missing", lines_of([{"model": "m"}]), 1, "layers"
    yield "layers no objects", lines_of([{"model": "m", "layers": [1]}]), 1, "layers"
    yield "too many layers", lines_of([{"model": "m", "layers": [dict(h["layers"][0], layer=str(i))
                                                                 for i in range(513)]}]), 1, "layers"
    yield "model no text", lines_of([{"model": 1, "layers": h["layers"]}]), 1, "model"
    yield "model very long", lines_of([dict(h, model="x" * 1025)]), 1, "model"
    yield "layer twice", lines_of([header({}, {})]), 1, "layer: 'a' appears twice"
    for field, values in (("layer", ("", 3, None, "x" * 1025)), ("experts", (0, -1, 1.5, "4", None, 1 << 25, 1e300)),
                          ("groups", (3, -1, 5, 0.5, True)), ("k", (-1, 5, "2", None)),
                          ("gate", ("best", 1, None, "softmax\u001b[31m"))):
        for value in values:
            yield "header %s %r" % (field, value), with_header(**{field: value}), 1, field
        yield "header without " + field, lines_of([{"model": "m",
                                                    "layers": [without(h["layers"][0], field)]}]), 1, field
    yield "experts of all layers", lines_of([header({"experts": 1 << 24, "k": 1}, {"layer": "b"})]), 1, "experts"
    yield "a field twice", lines_of([h]) + '{"line":1,"line":1}\n', 2, "line: appears twice"

    head = lines_of([h, good])
    for field, values in (("line", (0, -1, 1.5, "1", None, 1e300, 1 << 60)), ("layer", ("c", "", 1, None)),
                          ("position", (-1, 0.5, "0", None, 1 << 31)),
                          ("id", (-1, 0.5, "0", None, 1 << 31)), ("token", (5, None, ["x"], "x" * 1025)),
                          ("experts", (None, 3, [4], [-1, 0], [0.5, 1], [2, 0], [0, 0], [0, 1, 2], [0], ["0", "1"],
                                       [0, None], [])),
                          ("weights",
                           (None, 3, [0.5], [0.5, 0.5, 0], [0.5, -0.1], [0.5, 1.1], [0.5, "0.5"], [0.5, None], [])),
                          ("empty", (0, 1, None, "false"))):
        for value in values:
            yield "%s %r" % (field, value), head + lines_of([dict(good, position=1, **{field: value}) if field
                                                             != "position" else dict(good, position=value)]), 3, field
        if field not in ("id", "token"):
            yield "without " + field, head + lines_of([without(dict(good, line=2), field)]), 3, field
    yield "no experts, not empty", head + lines_of([dict(good, line=2, experts=[], weights=[])]), 3, "experts"
    yield "weights NaN", head + lines_of([dict(good, line=2)]).replace("0.5", "NaN"), 3, "JSON"
    yield "weights infinite", head + lines_of([dict(good, line=2)]).replace("0.5", "1e999"), 3, "weights"
    yield "position again", head + lines_of([good]), 3, "position"
    yield "line backwards", lines_of([h, dict(good, line=5), dict(good, line=4)]), 3, "line"
    yield "layer backwards", lines_of([h, dict(good, layer="b"), good]), 3, "layer"
    yield "a blank line", head + "\n" + lines_of([dict(good, line=2)]), 3, "blank"
    yield "cut off", (head + lines_of([dict(good, line=2)]))[:-9], 3, "JSON"
    yield "a second header", head + lines_of([h]), 3, "line"
    yield "not UTF-8", head.encode() + lines_of([dict(good, line=2,
                                                      token="@")]).encode().replace(b"@", b"\xff"), 3, "UTF-8"
    yield "a surrogate", head + lines_of([dict(good, line=2, token="@")]).replace("@", "\\ud800"), 3, "JSON"
    yield "a NUL", head.encode() + lines_of([dict(good, line=2, token="@")]).encode().replace(b"@", b"\0"), 3, "NUL"
    yield "a NUL escape", head + lines_of([dict(good, line=2, token="@")]).replace("@", "\\u0000"), 3, "NUL"
    yield "deep", head + '{"line":' + "[" * 100000 + "\n", 3, "JSON"
    yield "binary", bytes(range(256)) * 10, 1, ""


@test
def broken_input_is_refused_with_its_line_and_field():
    with tempfile.TemporaryDirectory() as folder:
        out = folder + "/page.html"
        with open(out, "w") as f:
            f.write("an older page")
        count = 0
        for name, data, line, words in broken():
            result = run(data, "-", "-o", out, status=3)
            start = "moe-routing: standard input: line %d: " % line
            assert result.complaint.startswith(start) and words in result.complaint, (name, result.complaint)
            assert result.complaint.count("\n") == 1 and "\x1b" not in result.complaint, (name, result.complaint)
            count += 1
        assert (count > 80 and os.listdir(folder) == ["page.html"]
                and open(out).read() == "an older page"), os.listdir(folder)


@test
def an_escaped_backslash_before_u0000_is_not_nul():
    assert page([header(), row(1, 0, "\\u0000", [0], [1])]).data["tokens"][0][0] == "\\u0000"


@test
def other_line_ends_are_accepted():
    objects = [header(), row(1, 0, "x", [0], [1]), row(1, 1, "y", [0], [1])]
    base = run(objects, "-", "-o", "-").text
    assert run(lines_of(objects).replace("\n", "\r\n"), "-", "-o", "-").text == base
    assert run(lines_of(objects)[:-1], "-", "-o", "-").text == base


@test
def damaged_files_never_crash_the_program():
    r = random.Random(3)
    whole = lines_of(generate(8, 6, [{"layer": "a", "experts": 6, "groups": 2, "k": 2, "gate": "topk"}], 20)).encode()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(r.randint(1, 4)):
            at = r.randrange(len(data))
            data[at: at + r.choice((0, 1, 1, 5))] = bytes(r.choice(b'{}[],:"0123456789.eE-\\u<\n\xff')
                                                          for _ in range(r.choice((0, 1, 1, 3))))
        result = subprocess.run([ROUTING, "-", "-o", "-"], input=bytes(data), stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, timeout=60)
        assert result.returncode in (0, 3), (result.returncode, result.stderr, bytes(data))
        if result.returncode == 0:
            Page(result.stdout.decode())
        else:
            assert not result.stdout and b": line " in result.stderr, result.stderr


# ---- Files and options -----------------------------------------------------------------------------------------------


@test
def files_and_links_are_read_and_written():
    objects = [header(), row(1, 0, "x", [0], [1])]
    with tempfile.TemporaryDirectory() as folder:
        source, out, link = folder + "/r.jsonl", folder + "/out.html", folder + "/link.html"
        with open(source, "w") as f:
            f.write(lines_of(objects))
        expect = run(objects, "-", "-o", "-").text
        run("", source, "-o", out)
        assert open(out).read() == expect
        umask = os.umask(0)
        os.umask(umask)
        assert os.stat(out).st_mode & 0o777 == 0o666 & ~umask
        os.symlink(out, link)
        os.chmod(out, 0o640)
        run("", source, "-o", link, "--title", "other")
        assert (os.path.islink(link) and "<title>other</title>" in open(out).read() and os.stat(out).st_mode
                & 0o777 == 0o640)
        assert "overwritten" in run("", source, "-o", source, status=2).complaint
        os.symlink(source, folder + "/s")
        assert ("overwritten" in run("", folder + "/s", "-o", source, status=2).complaint
                and open(source).read() == lines_of(objects))
        assert sorted(os.listdir(folder)) == ["link.html", "out.html", "r.jsonl", "s"]
        run("", source, "-o", "/dev/null")
        run("", folder + "/none", "-o", out, status=4)
        run("", folder, "-o", out, status=4)
        run("", source, "-o", folder + "/no/out.html", status=4)
        assert "<title>other</title>" in open(out).read()


@test
def a_full_disk_preserves_the_old_page():
    objects = list(generate(5, 60, [{"layer": "a", "experts": 12, "groups": 3, "k": 4, "gate": "topk"}], 40))
    with open("/dev/full", "wb") as full:
        assert "No space" in run(objects, "-", "-o", "-", status=4, stdout=full).complaint
    with tempfile.TemporaryDirectory() as folder:
        out, source = folder + "/out.html", folder + "/r.jsonl"
        open(out, "w").write("an older page")
        open(source, "w").write(lines_of(objects))
        script = "trap '' XFSZ; ulimit -f 4; exec \"$@\""
        result = subprocess.run(["bash", "-c", script, "bash", ROUTING, source, "-o", out], stderr=subprocess.PIPE,
                                timeout=60)
        assert result.returncode == 4 and b"File too large" in result.stderr, result
        assert (open(out).read() == "an older page"
                and sorted(os.listdir(folder)) == ["out.html", "r.jsonl"]), os.listdir(folder)


@test
def a_closed_output_is_an_error():
    data = lines_of([header()]).encode()
    result = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", ROUTING, "-", "-o", "-"], input=data,
                            stderr=subprocess.PIPE, timeout=60)
    assert result.returncode == 4 and result.stderr, result


@test
def options_are_checked():
    for options, message in (
            ("", "missing argument: FILE"), ("-", "missing --output"), ("-o x", "missing argument: FILE"),
            ("y z", "missing --output"), ("- -o - --top x", "invalid value 'x' for --top"),
            ("- -o - --top -1", "value '-1' of --top"), ("- -o - --top=", "invalid value '' for --top"),
            ("- -o - --min-count 0", "value '0' of --min-count"), ("- --nonsense", "option '--nonsense'"),
            ("- -o - --sentences 1.5", "invalid value '1.5' for --sentences"), ("- -o", "option '--output'")):
        result = run("", *options.split(), status=2)
        assert not result.text and message in result.complaint, (options, result)
    text = run("", "--help").text
    assert text.startswith("Usage:") and text == run("", "-h").text
    assert re.match(r"moe-routing \d+\.\d+", run("", "-V").text) and run("", "--version").text == run("", "-V").text


# ---- Size ------------------------------------------------------------------------------------------------------------


def measured(path, *options):
    """Return the peak memory of a run in MiB."""
    process = subprocess.Popen([ROUTING, path, "-o", "/dev/null"] + list(options))
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


@test
def memory_does_not_depend_on_the_number_of_lines():
    """400,000 lines take only slightly more memory than 100,000 lines."""
    with tempfile.TemporaryDirectory() as folder:
        path, r = folder + "/r.jsonl", random.Random(9)
        one = ('{"line":%d,"layer":"a","position":%d,"id":%d,"token":"t%d","experts":[%d,%d],'
               '"weights":[0.75,0.25],"empty":false}\n')
        block = [(r.randrange(500), sorted(r.sample(range(64), 2))) for _ in range(100000)]
        with open(path, "w") as f:
            f.write(lines_of([header({"experts": 64})]))
            for i, (t, e) in enumerate(block):
                f.write(one % (i // 10 + 1, i % 10, t, t, e[0], e[1]))
        once = measured(path)
        with open(path, "a") as f:
            for i, (t, e) in enumerate(block * 3, len(block)):
                f.write(one % (i // 10 + 1, i % 10, t, t, e[0], e[1]))
        four_times = measured(path)
        if not SANITIZED and "MOE_TEST_WRAP" not in os.environ:
            assert four_times < once + 4, "%.1f MiB for 100,000 lines, %.1f for 400,000" % (once, four_times)


# ---- The script ------------------------------------------------------------------------------------------------------

# A stub of a browser's document, in which the script builds elements. The stub prints these elements as JSON.
STUBS = r"""
var fs = require("fs"), text = fs.readFileSync(process.argv[2], "utf8"), ids = {}, timers = [];
function Element(tag) {
  this.tag = tag; this.attributes = {}; this.children = []; this.on = {};
  this.style = { setProperty: function (k, v) { this[k] = v; } };
  this.className = this.value = ""; this.checked = this.hidden = this.disabled = false;
  this.clientWidth = 900; this.offsetWidth = 100; this.own = "";
}
Element.prototype = {
  setAttribute: function (k, v) { this.attributes[k] = String(v); if (k === "class") this.className = String(v); },
  appendChild: function (c) { this.children.push(c); return c; },
  removeChild: function (c) { this.children.splice(this.children.indexOf(c), 1); return c; },
  get firstChild() { return this.children[0] || null; },
  get textContent() { return this.own + this.children.map(function (c) { return c.textContent; }).join(""); },
  set textContent(v) { this.children = []; this.own = String(v); },
  addEventListener: function (k, f) { (this.on[k] = this.on[k] || []).push(f); },
  fire: function (k, e) {
    (this.on[k] || []).forEach(function (f) { f(e || { clientX: 100, clientY: 5, pageX: 100, pageY: 5 }); });
  },
  getBoundingClientRect: function () { return { left: 0, top: 0, bottom: 20, width: 900, height: 190 }; },
  scrollIntoView: function () {},
  all: function (name) {
    var out = [];
    this.children.forEach(function (c) {
      if (c.className && c.className.split(" ").indexOf(name) >= 0) out.push(c);
      if (c.all) out = out.concat(c.all(name));
    });
    return out;
  }
};
var known = {}; (text.match(/ id="[^"]+"/g) || []).forEach(function (x) { known[x.slice(5, -1)] = 1; });
global.document = { documentElement: new Element("html"),
  getElementById: function (i) {
    if (!known[i]) throw new Error("no element " + i);
    return ids[i] = ids[i] || new Element(i);
  },
  createElement: function (t) { return new Element(t); }, createElementNS: function (n, t) { return new Element(t); },
  createTextNode: function (t) { return { textContent: t }; } };
global.window = { pageXOffset: 0, pageYOffset: 0, addEventListener: function () {} };
global.setTimeout = function (f) { f(); }; global.clearTimeout = function () {};
var $ = document.getElementById, data = text.slice(text.indexOf('id="data">') + 10);
$("expert-order").value = "number"; $("keep").value = "25";
$("data").own = data.slice(0, data.indexOf("</script>"));
(0, eval)(text.slice(text.lastIndexOf("<script>") + 8, text.lastIndexOf("</script>")));
function state() { return { about: $("about").textContent, summary: $("summary").textContent,
  experts: $("expert-count").textContent, cards: $("cards").children.length,
  pieces: $("cards").all("piece").map(function (e) { return e.textContent; }), hits: $("cards").all("hit").length,
  tokens: $("sentences").all("token").map(function (e) { return e.textContent; }),
  lit: $("sentences").all("lit").length,
  hues: $("sentences").all("token").map(function (e) { return e.style["--h"] || ""; }),
  rows: $("sentences").children.length, count: $("sentence-count").textContent, charts: $("charts").children.length,
  paths: $("charts").all("value").map(function (e) { return e.attributes.d; }).join(" "),
  languages: $("languages").textContent, unspoken: $("of-languages").hidden,
  kept: $("languages").all("kept").map(function (e) { return e.textContent; }),
  gone: $("languages").all("gone").length,
  tip: $("tip").hidden ? null : $("tip").textContent }; }
var out = [state()];
JSON.parse(process.argv[3]).forEach(function (step) {
  var e = step[0] === "token" ? $("sentences").all("token")[step[3]] :
    step[0] === "legend" ? $("legend").children[step[3]] :
    step[0] === "layer" ? $("layers").children[step[3]] :
    step[0] === "chart" ? $("charts").children[step[3]].all("chart")[0].children[0] :
    step[0] === "row" ? $("sentences").children[step[3]].children[0] : $(step[0]);
  if (step[2] !== null && typeof step[2] === "string") e.value = step[2];
  if (typeof step[2] === "boolean") e.checked = step[2];
  e.fire(step[1]);
  out.push(state());
});
console.log(JSON.stringify(out));
"""


def script(text, *steps):
    """Return the initial state of the page and its state after each step: (element, event, value, index)."""
    node = shutil.which("node")
    if not node:
        raise Skip("node is missing")
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/page.html", "w", encoding="utf-8") as f:
            f.write(text)
        with open(folder + "/stubs.js", "w") as f:
            f.write(STUBS)
        result = subprocess.run([node, folder + "/stubs.js", folder + "/page.html", json.dumps(steps)],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    assert result.returncode == 0, result.stderr.decode()[:2000]
    states = json.loads(result.stdout.decode())
    for s in states:
        assert "NaN" not in s["paths"] and "undefined" not in json.dumps(s) and "Infinity" not in json.dumps(s), s
    return states


@test
def the_script_draws_and_searches():
    layers = [{"layer": "encoder.0", "experts": 40, "groups": 0, "k": 2, "gate": "threshold"},
              {"layer": "decoder.0", "experts": 60, "groups": 5, "k": 4, "gate": "topk"}]
    objects = list(generate(11, 90, layers, 60))
    text = run(objects, "-", "-o", "-", "--sentences", "50").text
    p = Page(text).data
    s = script(text, ("expert-search", "input", "t17", None), ("expert-search", "input", "#5", None),
               ("expert-search", "input", "", None), ("more-cards", "click", None, None),
               ("expert-order", "change", "load", None), ("sorted", "change", True, None),
               ("chart", "mousemove", None, 0), ("chart", "click", None, 0),
               ("next", "click", None, None), ("sentence-search", "input", "#%d" % p["text"][3]["line"], None),
               ("sentence-search", "input", "", None),
               ("token", "mousemove", None, 0), ("token", "mouseleave", None, 0), ("legend", "click", None, 0),
               ("legend", "click", None, 0), ("row", "click", None, 1),
               ("row", "click", None, 0), ("layer", "click", None, 1), ("by-group", "change", True, None),
               ("chart", "mousemove", None, 2))
    (start, t17, five, every, more, loaded, ordered, bar, picked, nextpage, one, again, tip, untip, lit, unlit, alone,
     together, other, grouped, group) = s
    alive = 40 - p["layers"][0]["dead"]
    assert (start["cards"] == 24 and start["experts"] == "%d experts" % alive and start["charts"] == 2
            and start["rows"] == 20), start["experts"]
    assert (0 < t17["cards"] <= 24 and t17["hits"] > 0 and five["cards"] == 1 and every["cards"] == 24
            and more["cards"] == alive)
    first = p["text"][0]["layers"][0]
    assert (first["layer"] == 0
            and start["tokens"][: len(first["tokens"])] == [p["tokens"][t[0]][0] for t in first["tokens"]])
    heaviest = [t[3] for t in first["tokens"] if len(t) > 3]
    assert [float(h) for h in start["hues"][: len(first["tokens"])]
            if h] == [round(e * 137.508 % 360, 1) for e in heaviest], "the expert with the largest weight"
    assert start["paths"] != ordered["paths"] and "expert " in bar["tip"] and picked["cards"] == 1
    assert nextpage["count"].startswith("21\u201340 of 50") and one["rows"] == 1 and again["rows"] == 20
    x = first["tokens"][0]
    assert (p["tokens"][x[0]][0] in tip["tip"] and untip["tip"] is None
            and (len(x) < 4 or "%.3f\u2002expert %d" % (x[4], x[3]) in tip["tip"])), tip["tip"]
    assert (lit["lit"] > 0 and unlit["lit"] == 0 and alone["rows"] == 1
            and len(alone["tokens"]) == sum(len(l["tokens"]) for l in p["text"][1]["layers"]))
    assert together["rows"] == 20 and other["charts"] == 3 and other["tokens"] != together["tokens"]
    assert len(set(grouped["hues"])) <= 5 + 1 and group["tip"].startswith("group ")


@test
def the_script_shows_the_experts_of_each_language():
    layers = [{"layer": "encoder.0", "experts": 40, "groups": 0, "k": 2, "gate": "threshold"},
              {"layer": "decoder.0", "experts": 60, "groups": 0, "k": 4, "gate": "topk"}]
    files = [spoken(list(generate(i, 60, layers, 60)), *pair) for i, pair in ((1, ("en", "de")), (2, ("fr", "de")))]
    text = of_files(files, "-o", "-")
    p = Page(text).data["layers"]
    start, half, none, decoder = script(text, ("keep", "input", "50", None), ("keep", "input", "", None),
                                        ("layer", "click", None, 1))
    for state, x, n in (start, p[0], 10), (half, p[0], 20), (none, p[0], 1), (decoder, p[1], 4):
        uses, together = x["languages"], set()
        shares = [(e, 100 * share) for u in uses for e, share, _ in u["experts"][:n]]
        assert state["kept"] == ["%d\u2002%.*f\u2009%%" % (e, 2 if share < 10 else 1, share) for e, share in shares], n
        assert state["gone"] == sum(len(u["experts"]) - n for u in uses), n
        for u in uses:
            together |= {e[0] for e in u["experts"][:n]}
            assert "the first %d have %.1f\u2009%% of the weights" % (n, 100 * u["experts"][n - 1][2]) \
                in state["languages"] or 100 * u["experts"][n - 1][2] < 10, (n, state["languages"])
        assert ("Together %d of %d experts" % (len(together), x["experts"]) in state["languages"]) == (len(uses) > 1)
        assert not state["unspoken"] and all(u["language"] in state["languages"] for u in uses)
    alone = script(run(files[0], "-", "-o", "-").text)[0]
    assert "Together" not in alone["languages"]
    one = [header(), row(1, 0, "x", [0], [1])]
    both, focused = script(of_files([one, one], "-o", "-"), ("row", "click", None, 1))
    assert (both["rows"], focused["rows"]) == (2, 1)  # two sentences, both on line 1
    unspoken = script(run(one, "-", "-o", "-").text)[0]
    assert unspoken["unspoken"] and not unspoken["languages"]


@test
def the_script_shows_hostile_strings_unchanged():
    objects = [header({"layer": "<b>x</b>"}, model="<i>m</i>")] + [row(1, i, t, [0], [1], "<b>x</b>")
                                                                   for i, t in enumerate(HOSTILE)]
    s = script(run(objects, "-", "-o", "-", "--top", "100", "--min-count", "1").text)[0]
    assert s["tokens"] == ["\u2423" if t in (" ", "\u2581") else t for t in HOSTILE], s["tokens"]
    assert (set(HOSTILE) - {"\u2581", " "} <= set(s["pieces"]) and "<i>m</i>" in s["about"]
            and "<b>x</b>" in s["summary"])


@test
def the_script_handles_zero_and_thousands_of_experts():
    s = script(run([header()], "-", "-o", "-").text, ("expert-search", "input", "#2", None))
    assert s[0]["count"] == "none" and s[1]["experts"].endswith("is dead"), s
    objects = list(generate(12, 50, [{"layer": "a", "experts": 5000, "groups": 50, "k": 2, "gate": "topk"}], 60))
    s = script(run(objects, "-", "-o", "-").text, ("chart", "mousemove", None, 0), ("sorted", "change", True, None),
               ("chart", "mousemove", None, 0))
    assert len(s[0]["paths"]) < 200000 and "more" in s[1]["tip"], s[1]["tip"]


if __name__ == "__main__":
    sys.exit(test.run())
