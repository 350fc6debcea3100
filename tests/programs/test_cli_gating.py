#!/usr/bin/env python3
"""Gates on the command line: --gating, --noise and --routing of the programs, and moe-calibrate.

Usage: tests/python tests/programs/test_cli_gating.py [MODEL]     default: $MOE_TEST_MODEL, else models/en-de-fr-es.bin
Prints `ok NAME` or `FAIL NAME` per test; standard library only. BIN is the folder of the programs.
"""
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
import tempfile

import small_models
from suite import Suite
from test_cli import BIN, DE, INFO, LINES, MODEL, QUANTIZE, TRANSLATE, assert_refused, many_lines, run, translate

CALIBRATE, SCORE, CLASSIFY = (os.path.join(BIN, p) for p in ("moe-calibrate", "moe-score", "moe-classify"))

TEXT = "\n".join(LINES) + "\n"
test = Suite()


def routing_of(path):
    """Return (header, entries) of a routing file after checking its contents."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    assert text.endswith("\n"), "the last line is not whole"
    header, *entries = [json.loads(line) for line in text.splitlines()]
    assert set(header) - {"source", "target"} == {"model", "layers"}, header
    layers = {x["layer"]: i for i, x in enumerate(header["layers"])}
    limits = {x["layer"]: x["experts"] for x in header["layers"]}
    flat = {x["layer"] for x in header["layers"] if not x["groups"]}
    order = []
    for e in entries:
        assert set(e) - {"id", "token"} == {"line", "layer", "position", "experts", "weights", "empty"}, e
        assert e["experts"] == sorted(set(e["experts"])) and all(0 <= x < limits[e["layer"]] for x in e["experts"]), e
        assert len(e["experts"]) == len(e["weights"]) and isinstance(e["empty"], bool), e
        assert not e["experts"] or abs(sum(e["weights"]) - 1) < 1e-6, e
        # In a layer with groups, only some of the groups can have empty masks.
        assert not e["empty"] or len(e["experts"]) <= 1 or e["layer"] not in flat, e
        order.append((e["line"], layers[e["layer"]], e["position"]))
    assert order == sorted(set(order)), "lines, layers and positions are not sorted"
    return header, entries


def kernels():
    return re.search(r"kernels: ([^)]*)\)", run([TRANSLATE, "--version"]).text).group(1).split()


# ---- moe-translate ---------------------------------------------------------------------------------------------------


@test
def routing_matches_the_translation():
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/r.jsonl"
        data = "%s\n\n%s\n" % (LINES[0], LINES[1])
        plain = [json.loads(x) for x in translate(data, "--json").lines]
        assert translate(data, "--routing", path).lines == [o["translation"] for o in plain]
        assert os.listdir(folder) == ["r.jsonl"]
        header, entries = routing_of(path)
        assert header["model"] and [x["layer"] for x in header["layers"]] == ["encoder.2", "decoder.1"], header
        assert all(set(x) == {"layer", "experts", "groups", "k", "gate"} for x in header["layers"]), header
        assert {e["line"] for e in entries} == {1, 3}
        for line, o in ((1, plain[0]), (3, plain[2])):
            source = [e["id"] for e in entries if e["line"] == line and e["layer"] == "encoder.2"]
            target = [e["id"] for e in entries if e["line"] == line and e["layer"] == "decoder.1"]
            assert source[1:-1] == o["source_ids"] and len(source) == len(o["source_ids"]) + 2, (source, o)
            assert target[1:] == o["ids"], (target, o)
        assert entries[0]["token"] == "<2de>" and "\u2581The" in {e["token"] for e in entries}


@test
def routing_does_not_depend_on_batch_threads_or_instruction_set():
    data = "\n".join(many_lines(24)) + "\n"
    with tempfile.TemporaryDirectory() as folder:
        path, seen = folder + "/r", set()
        for options in ([], ["--batch", "1"], ["--batch", "16"], ["--threads", "1"], ["--threads", "3"],
                        *(["--isa", name] for name in kernels() if name != "portable")):
            result = run(DE + ["-q", "--routing", path] + options, data)
            if result.returncode == 2 and "cannot run" in result.complaint:
                continue
            assert result.returncode == 0, result.complaint
            with open(path) as file:
                seen.add(file.read())
        assert len(seen) == 1, len(seen)
        routing_of(path)


@test
def routing_of_ids_and_of_given_translations():
    with tempfile.TemporaryDirectory() as folder:
        paths = [folder + "/%d" % i for i in range(3)]
        out = [json.loads(x) for x in translate(TEXT, "--json", "--routing", paths[0]).lines]
        sources, targets = ([" ".join(map(str, o[k])) for o in out] for k in ("source_ids", "ids"))
        translate("\n".join(sources) + "\n", "--ids", "--routing", paths[1])
        translate("".join("%s\t%s\n" % p for p in zip(sources, targets)), "--ids", "--score", "--routing", paths[2])
        assert len({open(p).read() for p in paths}) == 1


@test
def failed_lines_have_no_routing():
    with tempfile.TemporaryDirectory() as folder:
        translate(b"Hello.\n\xff\nHello.\n", "--routing", folder + "/r", status=1)
        assert {e["line"] for e in routing_of(folder + "/r")[1]} == {1, 3}


@test
def routing_of_a_cut_translation_ends_at_the_cut():
    with tempfile.TemporaryDirectory() as folder:
        result = translate("One two three four five six.\n", "--json", "--max-len", "10", "--truncate", "--routing",
                           folder + "/r")
        out = json.loads(result.lines[0])
        steps = [e for e in routing_of(folder + "/r")[1] if e["layer"] == "decoder.1"]
        assert len(steps) == len(out["ids"]) + out["finished"], (len(steps), out)


@test
def a_routing_file_is_complete_or_absent():
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/r"
        process = subprocess.Popen(DE + ["--routing", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, bufsize=0)
        process.stdin.write(TEXT.encode() * 100)
        process.stdout.readline()
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 128 + 15 and os.listdir(folder) == [], (process.returncode, os.listdir(folder))
        with open("/dev/full", "wb") as full:
            assert run(DE + ["--routing", path], TEXT, stdout=full).returncode == 4 and os.listdir(folder) == []
        assert translate(TEXT, "--routing", folder + "/no/r", status=4).complaint
        result = translate(TEXT, "--routing", "/dev/full", status=4)
        assert "/dev/full: No space" in result.complaint and len(result.complaint.splitlines()) == 1, result.complaint
        source = folder + "/in"
        open(source, "w").write(TEXT)
        for victim in (source, MODEL):
            assert "overwritten" in translate("", "-i", source, "--routing", victim, status=2).complaint
        assert "separate file" in translate("", "-i", source, "-o", path, "--routing", path, status=2).complaint
        assert open(source).read() == TEXT
        assert translate(TEXT, "--routing", "/dev/stderr").complaint.startswith('{"model":')


@test
def gates_can_be_overridden():
    data = "\n".join(many_lines(40)) + "\n"
    base = translate(data, "--no-protect").text  # gates of another kind lose brackets, which is reported
    same = translate(data, "--no-protect", "--gating", "threshold")
    assert same.text == base and not same.complaint
    other = translate(data, "--no-protect", "--gating", "topk")
    assert other.text != base and not other.complaint and len(other.lines) == len(same.lines)
    assert translate(data, "--no-protect", "--gating", "topk", "--batch", "3").text == other.text
    assert len(translate(LINES[0] + "\n", "--gating", "softmax").lines) == 1
    with tempfile.TemporaryDirectory() as folder:
        translate(TEXT, "--gating", "topk", "--routing", folder + "/r")
        header, entries = routing_of(folder + "/r")
        assert {x["gate"] for x in header["layers"]} == {"topk"} and {len(e["experts"]) for e in entries} == {2}


@test
def batchwise_gating_warns_about_the_batch():
    result = translate(TEXT, "--gating", "batchwise")
    assert result.complaint.count("batch") and len(result.complaint.splitlines()) == 1, result.complaint
    assert not translate(TEXT, "--gating", "batchwise", "-q").complaint
    with tempfile.TemporaryDirectory() as folder:
        assert len(translate(TEXT, "--gating", "batchwise", "--routing", folder + "/r").complaint.splitlines()) == 1
        routing_of(folder + "/r")


@test
def invalid_options_are_refused():
    seed, files = "expected a seed", "-m a -o b "
    assert_refused(
        DE, ("--gating nonsense", "invalid value 'nonsense' for --gating"),
        ("--gating=", "invalid value '' for --gating"),
        ("--gating topk --self-test", "--self-test cannot be combined with --gating"),
        ("--noise 1 --self-test", "--self-test cannot be combined with --noise"), ("--noise=", seed),
        ("--noise -1", seed), ("--noise x", seed), ("--noise 1x", seed), (f"--noise {'9' * 23}", seed),
        ("--noise 1", "noise"))  # the model has no noise weights
    assert_refused(
        [CALIBRATE], ("", "missing --model"), (files, "missing --text"), (files + "--text x y", "argument 'y'"),
        (files + "--text x --k 0", "value '0' of --k"))
    for program in SCORE, CALIBRATE, CLASSIFY:
        assert_refused(
            [program], ("", "missing --model"), ("--nonsense", "option '--nonsense'"), ("-m", "option '--model'"),
            (f"-m {MODEL} --threads 0", "value '0' of --threads"), (f"-m {MODEL} --batch x", "'x' for --batch"))


# ---- moe-calibrate ---------------------------------------------------------------------------------------------------


def calibrate(model, out, text, *options, status=0):
    """Run moe-calibrate on a list of lines; return the table that it prints."""
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file:
        file.write("".join(line + "\n" for line in text))
        file.flush()
        result = run([CALIBRATE, "-m", model, "-o", out, "--text", file.name] + list(options))
    assert result.returncode == status, (result.returncode, result.complaint)
    assert (bool(result.complaint) == bool(status)
            and (not status or len(result.complaint.splitlines()) == 1)), result.complaint
    result.lines = result.text.splitlines()
    return result


def about(model):
    return json.loads(run([INFO, "--json", "--check", model]).text)


@test
def calibrated_experts_have_equal_loads():
    """No layer before encoder.2 has a gate, so each expert in encoder.2 gets exactly m tokens of the text."""
    lines = many_lines(60)
    with tempfile.TemporaryDirectory() as folder:
        out, path = folder + "/out.bin", folder + "/r"
        table = calibrate(MODEL, out, ["en\tde\t" + x for x in lines]).text
        assert "encoder.2.gate" in table and "mean absolute change" in table, table
        assert os.listdir(folder) == ["out.bin"]
        targets = translate("\n".join(lines) + "\n").lines
        result = run([TRANSLATE, "-m", out, "-t", "de", "--score", "--routing", path],
                     "".join("%s\t%s\n" % p for p in zip(lines, targets)))
        assert result.returncode == 0, result.complaint
        rows = [e for e in routing_of(path)[1] if e["layer"] == "encoder.2"]
        load = [0] * 32
        for e in rows:
            for expert in e["experts"] if not e["empty"] else ():
                load[expert] += 1
        assert set(load) == {2 * len(rows) // 32}, (len(rows), load)
        shown = re.search(r"^encoder\.2 +(\d+) +(\d+) ", table, re.M)
        assert (int(shown.group(1)), int(shown.group(2))) == (len(rows), 2), table
        assert all(run([TRANSLATE, "-m", out, "-t", "fr"], TEXT).text.splitlines())


@test
def recorded_loads_equal_counts_of_the_routing():
    """moe-calibrate --loads adds only load tensors, and moe-prune removes the loads of removed experts."""
    pairs = ["%s\t%s" % (line, line[::-1]) for line in many_lines(20)]
    with tempfile.TemporaryDirectory() as folder:
        out, path, cut = folder + "/out.bin", folder + "/r", folder + "/cut.bin"
        table = calibrate(MODEL, out, ["en\tde\t" + x for x in pairs], "--loads").lines
        assert [row.split()[:2] for row in table[1:]] == [["encoder.2", "32"], ["decoder.1", "32"]], table
        assert run([TRANSLATE, "-m", MODEL, "-s", "en", "-t", "de", "--score", "--routing", path],
                   "".join(x + "\n" for x in pairs)).returncode == 0
        wanted = {"encoder.2": [0] * 32, "decoder.1": [0] * 32}
        for entry in routing_of(path)[1]:
            for expert in entry["experts"]:
                wanted[entry["layer"]][expert] += 1
        assert loads_of(out) == wanted
        same = run([TRANSLATE, "-m", MODEL, "-t", "fr"], TEXT).text
        assert run([TRANSLATE, "-m", out, "-t", "fr"], TEXT).text == same
        with open(path, "w") as file:
            json.dump([3, 5, 8, 32 + 30, 32 + 31, 32 + 7], file)
        assert run([os.path.join(BIN, "moe-prune"), "-q", "-m", out, "-o", cut, "--experts", path]).returncode == 0
        kept = {"encoder.2": (3, 5, 8), "decoder.1": (7, 30, 31)}
        assert loads_of(cut) == {layer: [wanted[layer][e] for e in experts] for layer, experts in kept.items()}
        assert "be combined with --k" in calibrate(MODEL, out, pairs, "--loads", "--k", "2", status=2).complaint
        model = folder + "/linear.bin"
        small_models.write(model, *small_models.language(linear=small_models.WIDTH))
        complaint = calibrate(model, out, ["4 5 6"], "--ids", "--loads", status=2).complaint
        assert "no experts with separate matrices" in complaint, complaint


def loads_of(model):
    """Return the loads of the experts in a model file: {layer: loads}."""
    found = {}
    for tensor in about(model)["tensors"]:
        if tensor["name"].endswith(".experts.load"):
            with open(model, "rb") as file:
                file.seek(tensor["offset"])
                found[tensor["name"][:-13]] = [int(x) for x in struct.unpack("<%df" % (tensor["bytes"] // 4),
                                                                           file.read(tensor["bytes"]))]
    return found


@test
def calibrated_experts_of_groups_have_equal_loads():
    """All groups are selected, so each row counts in every group. Empty masks add no experts. The text is a single line
    because all lines start with the same probabilities, and probabilities at the threshold select no expert."""
    r = random.Random(3)
    lines = [" ".join(str(r.randrange(4, 40)) for _ in range(600))]
    with tempfile.TemporaryDirectory() as folder:
        model, out, path = folder + "/model.bin", folder + "/out.bin", folder + "/r"
        meta, tensors = small_models.language(groups=4, k=1, parent="softmax", parent_k=4, empty="zero")
        small_models.write(model, dict(meta, **{"limit.target": 1000}), tensors)
        calibrate(model, out, lines, "--ids")
        assert run([SCORE, "-m", out, "--ids", "-q", "--routing", path], "\n".join(lines) + "\n").returncode == 0
        load = [0] * 12
        with open(path) as file:
            rows = [json.loads(x) for x in file][1:]
        for e in rows:
            for expert in e["experts"]:
                load[expert] += 1
        assert set(load) == {len(rows) // 3}, (len(rows), load)


@test
def calibrating_changes_only_thresholds():
    with tempfile.TemporaryDirectory() as folder:
        out = folder + "/out.bin"
        calibrate(MODEL, out, ["en\tde\t%s\tHallo!" % x for x in LINES])
        before, after = about(MODEL), about(out)
        strip = ("golden.", "quality.")
        assert {k: v for k, v in before["metadata"].items() if not k.startswith(strip)} == after["metadata"]
        files = [open(path, "rb").read() for path in (MODEL, out)]
        kept = [[(t["name"], t["type"], t["shape"], data[t["offset"]:t["offset"] + t["bytes"]])
                 for t in x["tensors"] if "threshold" not in t["name"]] for x, data in zip((before, after), files)]
        assert kept[0] == kept[1] and len(before["tensors"]) == len(after["tensors"])


@test
def calibrating_does_not_depend_on_batch_or_threads():
    small = [" ".join(str(4 + (i * 7 + j * j) % 36) for j in range(i % 9 + 1)) for i in range(50)]
    with tempfile.TemporaryDirectory() as folder:
        model, seen = folder + "/model.bin", set()
        for how, lines in ((small_models.language(groups=3), small),
                           (small_models.translation(groups=3, gate="softmax", k=2),
                                                                      ["a\tb\t%s\t%s" % (x, " ".join(x.split()[::-1]))
                                                                       for x in small])):
            small_models.write(model, *how)
            seen.clear()
            for options in ([], ["--batch", "1"], ["--batch", "5", "--threads", "3"]):
                table = calibrate(model, folder + "/out.bin", lines, "--ids", *options).text
                with open(folder + "/out.bin", "rb") as file:
                    seen.add((file.read(), table))
            assert len(seen) == 1, len(seen)


@test
def calibrating_twice_does_not_change_the_first_gate():
    pieces = ["w%d w%d w%d w%d" % (4 + i % 36, 4 + i * 5 % 36, 4 + i * i % 36, 4 + i * 11 % 36) for i in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        model, once, twice = (folder + x for x in ("/model.bin", "/once.bin", "/twice.bin"))
        for gate in ("topk", "softmax", "threshold"):
            small_models.write(model, *small_models.translation(groups=4, gate=gate, parent=gate, k=1))
            lines = ["a\tb\t%s\t%s" % (x, y) for x, y in zip(pieces, reversed(pieces))]
            first = calibrate(model, once, lines, "--pretokenized").text
            assert ("mean absolute change" in first) == (gate == "threshold"), first
            meta = about(once)["metadata"]
            assert all(meta[s + ".1." + k] == "threshold" for s in ("encoder", "decoder")
                       for k in ("gate", "parent.gate")), meta
            again = calibrate(once, twice, lines, "--pretokenized").lines
            parent = [x for x in again if x.startswith("encoder.1.parent")][0]
            assert parent.split(";")[1].split()[-1] == "0", parent


@test
def calibrating_a_dense_gate_requires_k():
    with tempfile.TemporaryDirectory() as folder:
        model, out = folder + "/model.bin", folder + "/out.bin"
        small_models.write(model, *small_models.language(gate="softmax", k=0))
        assert ("--k" in calibrate(model, out, ["5 6 7"], "--ids", status=2).complaint
                and os.listdir(folder) == ["model.bin"])
        calibrate(model, out, ["5 6 7 8 9 10 11", "12 13 14 15"] * 3, "--ids", "--k", "3")
        meta = about(out)["metadata"]
        assert (meta["decoder.1.gate"], meta["decoder.1.k"]) == ("threshold", 3), meta
        calibrate(model, out, ["5 6 7 8 9 10 11"], "--ids", "--k", "99")
        assert about(out)["metadata"]["decoder.1.k"] == 12  # the layer has 12 experts


@test
def invalid_calibration_data_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        model, out = folder + "/model.bin", folder + "/out.bin"
        small_models.write(model, *small_models.language())
        result = calibrate(model, out, ["5 6 7", " ".join(["5"] * 100), "3", "8 9"], "--ids")
        assert "2 lines, 2 more skipped" in result.lines[0], result.lines[0]
        os.remove(out)
        assert "line 2" in calibrate(model, out, ["5 6", "5 x"], "--ids", status=3).complaint
        assert "cannot score any line" in calibrate(model, out, ["3"], "--ids", status=3).complaint
        assert "tokenizer" in calibrate(model, out, ["5 6"], status=3).complaint
        calibrate(model, out, [], "--ids", status=4)
        calibrate(model, folder + "/no/out.bin", ["5 6"], "--ids", status=4)
        calibrate(model, model, ["5 6"], "--ids", status=2)
        calibrate(folder + "/none.bin", out, ["5 6"], "--ids", status=3)
        assert "line 2" in calibrate(MODEL, out, ["en\tde\tYes.\tJa.", "no tabs"], status=3).complaint
        assert "line 1" in calibrate(MODEL, out, ["en\txx\tYes.\tJa."], status=3).complaint
        assert run([CALIBRATE, "-m", model, "-o", out, "--ids", "--text", folder + "/none"]).returncode == 4
        small_models.write(model, *small_models.classifier())
        assert "classifier" in calibrate(model, out, ["5 6"], "--ids", status=2).complaint
        assert sorted(os.listdir(folder)) == ["model.bin"]


@test
def quantize_measures_a_language_model():
    with tempfile.TemporaryDirectory() as folder:
        model, out, text = folder + "/model.bin", folder + "/out.bin", folder + "/text"
        small_models.write(model, *small_models.language())
        open(text, "w").write("5 6 7\n8 9 10 11\n")
        result = run([QUANTIZE, "--ids", "--measure", text, model, out, "q8"])
        assert (result.returncode == 0 and "nats per token" in result.complaint
                and "translations" not in result.complaint), result.complaint
        quality = {k: v for k, v in about(out)["metadata"].items() if k.startswith("quality.")}
        assert quality["quality.sentences"] == 2 and "quality.same_translations" not in quality, quality
        small_models.write(model, *small_models.classifier())
        assert run([QUANTIZE, model, out, "q8"]).returncode == 0
        assert run([QUANTIZE, "--ids", "--measure", text, model, out, "q8"]).returncode == 2


# ---- moe-score -------------------------------------------------------------------------------------------------------

IDS = ["5 6 7", "", "8 9 10 11 12 13 14", "30", "   ", "5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"] * 5


def score(model, data, *options, status=0):
    result = run([SCORE, "-m", model] + list(options), data)
    assert result.returncode == status, (result.returncode, result.complaint)
    assert not result.text or result.text.endswith("\n")
    result.lines = result.text.split("\n")[:-1]
    return result


def with_model(how):
    """Decorate a test that takes a new model file and its folder."""
    def wrap(function):
        def inner():
            with tempfile.TemporaryDirectory() as folder:
                small_models.write(folder + "/model.bin", *how)
                function(folder + "/model.bin", folder)
        inner.__name__ = function.__name__
        return test(inner)
    return wrap


@with_model(small_models.language(groups=3))
def scores_are_log_probabilities(model, folder):
    """The probabilities of all first tokens sum to 1. An empty line gives the probability of the end token."""
    words = [str(i) for i in range(small_models.VOCABULARY) if i != small_models.EOS]
    lines = [json.loads(x) for x in score(model, "\n".join([""] + words) + "\n", "--ids", "--json").lines]
    assert lines[0]["tokens"] == 1 and lines[0]["logprob"] == lines[0]["token_logprobs"][0] and lines[0]["ids"] == []
    assert abs(sum(math.exp(o["token_logprobs"][0]) for o in lines) - 1) < 1e-5
    for o, text in zip(lines, [""] + words):
        assert o["text"] == text and abs(sum(o["token_logprobs"]) - o["logprob"]) < 1e-5, o
        assert abs(math.exp(-o["logprob"] / o["tokens"]) / o["perplexity"] - 1) < 1e-5, o


@with_model(small_models.language())
def score_prints_lines_and_totals(model, folder):
    result = score(model, "\n".join(IDS) + "\n", "--ids", "--stats")
    rows = [x.split("\t") for x in result.lines]
    assert len(rows) == len(IDS) and [int(r[1]) for r in rows] == [len(x.split()) + 1 for x in IDS]
    nats, tokens = -sum(float(r[0]) for r in rows), sum(int(r[1]) for r in rows)
    assert all(abs(math.exp(-float(r[0]) / int(r[1])) / float(r[2]) - 1) < 1e-4 for r in rows), rows
    assert re.search(r"^tokens +%d " % tokens, result.complaint, re.M), result.complaint
    assert abs(float(re.search(r"^nats per token +(\S+)", result.complaint, re.M).group(1))
               - nats / tokens) < 1e-5, result.complaint
    assert abs(float(re.search(r"^perplexity +(\S+) per token", result.complaint,
                               re.M).group(1)) / math.exp(nats / tokens) - 1) < 1e-4
    assert "per word" not in result.complaint and "tokens/s" in result.complaint
    assert score(model, "5 6\n", "--ids", "-q").complaint == "" and score(model, "", "--ids").text == ""
    with open(folder + "/in", "w") as file:
        file.write("\n".join(IDS) + "\n")
    assert score(model, "", "--ids", "-i", folder + "/in", "-o", folder + "/out").text == ""
    assert open(folder + "/out").read() == result.text


@with_model(small_models.language(groups=3, gate="threshold", parent="topk"))
def scores_do_not_depend_on_batch_threads_or_instruction_set(model, folder):
    seen = set()
    data = "\n".join(IDS) + "\n"
    for options in ([], ["--batch", "1"], ["--batch", "7"], ["--threads", "3"], ["--no-mmap"],
                    *(["--isa", x] for x in kernels())):
        result = run([SCORE, "-m", model, "--ids", "--routing", folder + "/r"] + options, data)
        if result.returncode == 2 and "cannot run" in result.complaint:
            continue
        assert result.returncode == 0, result.complaint
        seen.add((result.text, result.complaint, open(folder + "/r").read()))
    assert len(seen) == 1, len(seen)
    entries = routing_of(folder + "/r")[1]
    for i, line in enumerate(IDS):
        ids = [e["id"] for e in entries if e["line"] == i + 1]
        assert ids == [small_models.BOS] + [int(x) for x in line.split()], (i, ids)
    assert entries[1]["token"] == "w5", entries[1]


@with_model(small_models.language(groups=3, noise=1))
def noise_depends_on_its_seed_but_not_on_the_batch(model, folder):
    data = "\n".join(IDS) + "\n"
    plain, one, two = (score(model, data, "--ids", *o).text for o in ([], ["--noise", "1"], ["--noise", "2"]))
    assert len({plain, one, two}) == 3
    assert score(model, data, "--ids", "--noise", "1", "--batch", "2", "--threads", "2").text == one
    assert score(model, "\n".join(reversed(IDS)) + "\n", "--ids", "--noise", "1").lines == one.split("\n")[-2::-1]


@with_model(small_models.language())
def gates_can_be_overridden_in_scoring(model, folder):
    data = "\n".join(IDS) + "\n"
    base = score(model, data, "--ids", "-q").text
    assert score(model, data, "--ids", "-q", "--gating", "topk").text == base != score(model, data, "--ids", "-q",
                                                                                       "--gating", "softmax").text
    assert score(model, data, "--ids", "--gating", "threshold", status=2).complaint.count("moe-calibrate") == 1
    result = score(model, data, "--ids", "--gating", "batchwise", "--routing", folder + "/r")
    assert result.complaint.count("batch") >= 1, result.complaint
    routing_of(folder + "/r")
    calibrate(model, folder + "/out.bin", [x for x in IDS if x.strip()], "--ids")
    assert score(folder + "/out.bin", data, "--ids", "-q", "--gating", "topk").text == base


@with_model(small_models.language())
def invalid_lines_are_reported_in_scoring(model, folder):
    bad = ["x", "99", "3", " ".join(["5"] * 30)]
    result = score(model, "5 6\n%s\n5 6\n" % "\n".join(bad), "--ids", "--routing", folder + "/r", status=1)
    assert result.lines[0] == result.lines[-1] != "" and set(result.lines[1:-1]) == {""}, result.lines
    assert all(re.search(r"^moe-score: line %d: " % (i + 2), result.complaint, re.M)
               for i in range(4)), result.complaint
    assert {e["line"] for e in routing_of(folder + "/r")[1]} == {1, 6}
    objects = [json.loads(x) for x in score(model, "\n".join(bad) + "\n", "--ids", "--json", status=1).lines]
    assert all("error" in o and "logprob" not in o for o in objects), objects
    assert all("cut" in json.loads(x) for x in score(model, bad[3] + "\n", "--ids", "--json", "--truncate").lines)
    assert score(model, " ".join(["5"] * 29) + "\n", "--ids").lines
    assert "unknown" in score(model, "w5 w6 nowhere\n", "--pretokenized").complaint
    assert "--pretokenized" in score(model, "w5\n", status=3).complaint


@test
def score_reads_text_if_the_model_has_a_tokeniser():
    with tempfile.TemporaryDirectory() as folder:
        model = folder + "/model.bin"
        small_models.write(model, *small_models.language(tokeniser=small_models.tokeniser_of(MODEL), vocabulary=8000))
        result = score(model, "The weather is nice.\n\n\u00dcber uns\n")
        nats = -sum(float(x.split("\t")[0]) for x in result.lines)
        words, characters = re.search(r"per word \((\d+)\), \S+ per character \((\d+)\)", result.complaint).groups()
        assert (int(words), int(characters)) == (4 + 2 + 3, 20 + 8 + 3), result.complaint
        shown = float(re.search(r"(\S+) per word", result.complaint).group(1))
        assert abs(shown / math.exp(nats / 9) - 1) < 1e-4, (shown, nats)
        assert score(model, b"\xff\n", status=1).lines == [""]


@test
def messages_name_the_program_for_a_model():
    with tempfile.TemporaryDirectory() as folder:
        language, classifier = folder + "/language.bin", folder + "/classifier.bin"
        small_models.write(language, *small_models.language())
        small_models.write(classifier, *small_models.classifier())
        for program, model, right in ((SCORE, MODEL, "moe-translate"), (SCORE, classifier, "moe-classify"),
                                      (TRANSLATE, language, "moe-score"),
                                      (TRANSLATE, classifier, "moe-classify"), (CLASSIFY, MODEL, "moe-translate"),
                                      (CLASSIFY, language, "moe-score")):
            result = run([program, "-m", model, "--ids"] if program == TRANSLATE else [program, "-m", model], "")
            assert (result.returncode == 2 and right in result.complaint
                    and len(result.complaint.splitlines()) == 1), (program, result.complaint)


@test
def help_version_and_missing_files():
    for program in (SCORE, CALIBRATE, CLASSIFY):
        result = run([program, "--help"])
        assert result.text.startswith("Usage:") and result.returncode == 0, program
        assert re.search(r"\d\.\d", run([program, "-V"]).text)
        assert run([program, "-m", "/nonexistent/file"]
                   + (["-o", "/tmp/x", "--text", "x"] if program == CALIBRATE else []), "").returncode == 3
    with open("/dev/full", "wb") as full, tempfile.TemporaryDirectory() as folder:
        small_models.write(folder + "/l", *small_models.language())
        small_models.write(folder + "/c", *small_models.classifier())
        assert run([SCORE, "-m", folder + "/l", "--ids"], "5\n", stdout=full).returncode == 4
        assert run([CLASSIFY, "-m", folder + "/c"], "1 2 3 4 5 6\n", stdout=full).returncode == 4


# ---- moe-info --------------------------------------------------------------------------------------------------------


@test
def info_describes_every_kind_of_model():
    with tempfile.TemporaryDirectory() as folder:
        model = folder + "/model.bin"

        def info(how):
            small_models.write(model, *how)
            return run([INFO, model]).text, about(model)

        text, whole = info(small_models.language(groups=4, gate="topk", parent="softmax", parent_k=0, noise=1))
        assert ("12 experts" in text and "4 groups of 3: of the groups all used" in text
                and "inside them the best 2" in text), text
        assert "noise" in text and "moe-score" in text and "attention" not in text, text
        assert whole["kind"] == "language" and len(whole["layers"]["decoder"]) == 3, whole
        assert whole["mixtures"] == [{"layer": "decoder.1", "experts": 12, "groups": 4, "gate": "topk", "k": 2,
                                      "parent_gate": "softmax", "parent_k": 0,
                                      "gate_hidden": 0, "noise": True, "expert": "mlp",
                                      "hidden": 12}], whole["mixtures"]
        weights = sum(t["parameters"] for t in whole["tensors"])
        # A token uses two of three experts in every group. Noise weights are not used.
        assert whole["parameters_per_token"] == weights - 12 * 2 * 12 * 16 // 3 - 16 * (12 + 4), whole[
            "parameters_per_token"]
        text, whole = info(small_models.classifier(gate="topk", k=1))
        assert ("3 linear experts of 10 columns" in text and "hidden layer of 5" in text and "classes" in text
                and "moe-classify" in text), text
        assert (whole["kind"] == "classifier" and (whole["inputs"], whole["classes"]) == (6, 4)
                and len(whole["layers"]["network"]) == 2), whole
        assert whole["parameters_in_experts"] == 3 * 10 * (6 + 10) and whole["mixtures"][1]["expert"] == "linear", whole
        text, whole = info(small_models.translation(groups=3, gate="threshold", parent="threshold"))
        assert ("attention" in text and text.count("3 groups of 4") == 2 and "moe-translate" in text
                and whole["kind"] == "translation"), text


# ---- moe-classify ----------------------------------------------------------------------------------------------------


def classify(model, data=b"", *options, status=0):
    result = run([CLASSIFY, "-m", model] + list(options), data)
    assert result.returncode == status, (result.returncode, result.complaint)
    result.lines = result.text.split("\n")[:-1]
    return result


def single(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def images(count, rows, columns, seed=1):
    r = random.Random(seed)
    pixels = [bytes(r.choice((0, 0, 255, r.randrange(256))) for _ in range(rows * columns)) for _ in range(count)]
    return struct.pack(">IIII", 0x803, count, rows, columns) + b"".join(pixels), pixels


@with_model(small_models.classifier())
def rows_of_numbers_are_classified(model, folder):
    rows = ["1 2 3 4 5 6", "", "-1,-2,3e0,.4,5.,6", " 0\t0\t0  0 0 0 ", "0.5, 0.5, 0.5, 1, 1, 1"]
    result = classify(model, "\n".join(rows) + "\r\n", "--top", "4")
    assert (len(result.lines) == 5 and [bool(x) for x in result.lines] == [True, False, True, True, True]
            and not result.complaint)
    for line in result.lines:
        fields = line.split("\t") if line else ["0", "1"]
        probabilities = [float(x) for x in fields[1::2]]
        assert abs(sum(probabilities) - 1) < 1e-5 and probabilities == sorted(probabilities, reverse=True), line
    assert [x.split("\t")[:2] for x in result.lines] == [x.split("\t")[:2]
                                                         for x in classify(model, "\n".join(rows) + "\n").lines]
    objects = [json.loads(x) for x in classify(model, "\n".join(rows), "--json", "--top", "9").lines]
    assert [len(o.get("top", ())) for o in objects] == [4, 0, 4, 4, 4] and objects[1] == {"line": 2}, objects
    assert abs(math.exp(objects[0]["logprob"]) - objects[0]["probability"]) < 1e-6


@with_model(small_models.classifier())
def bad_rows_are_reported(model, folder):
    bad = ["1 2 3 4 5", "1 2 3 4 5 6 7", "1 2 x 4 5 6", "1 2 nan 4 5 6", "1 2 1e99 4 5 6", "1 2 3 4 5 6;", "1" * 100,
           "3e38 3e38 3e38 -3e38 3e38 3e38"]
    result = classify(model, "1 2 3 4 5 6\n%s\n1 2 3 4 5 6\n" % "\n".join(bad), "--routing", folder + "/r", status=1)
    assert result.lines[0] == result.lines[-1] != "" and result.lines[1:-2] == [""] * 7, result.lines
    assert all("row %d: " % (i + 2) in result.complaint for i in range(7)), result.complaint
    assert {1, 10} <= {e["line"] for e in routing_of(folder + "/r")[1]} <= {1, 9, 10}
    assert "error" in json.loads(classify(model, "1\n", "--json", status=1).lines[0])
    assert classify(model, "", folder + "/none", status=4).complaint


@with_model(small_models.classifier(width=25, classes=10))
def images_are_scaled_and_placed(model, folder):
    """An image has the same class as a row of numbers with its scaled pixels at the offset and zeros elsewhere."""
    data, pixels = images(9, 3, 2)
    idx, labels = folder + "/idx", folder + "/labels"
    open(idx, "wb").write(data)
    for options, x, y in (([], 1, 1), (["--offset", "0,0"], 0, 0), (["--offset", "3,2"], 3, 2)):
        rows = []
        for image in pixels:
            square = [0.0] * 25
            for i, p in enumerate(image):
                square[(y + i // 2) * 5 + x + i % 2] = single(p / 255)
            rows.append(" ".join("%.9g" % v for v in square))
        wanted = classify(model, "\n".join(rows) + "\n", "--top", "3").text
        for batch in ("1", "4", "100"):
            assert classify(model, b"", "--top", "3", "--batch", batch, *options, idx).text == wanted, options
        assert classify(model, data, "--top", "3", *options).text == wanted
    assert_refused(
        [CLASSIFY, "-m", model, idx], ("--offset 4,0", "extend beyond the model's"),
        ("--offset 0,3", "extend beyond the model's"),
        *((f"--offset {x}", f"invalid value '{x}' for --offset") for x in ("1", "-1,0", "1,1x", "4294967296,0")))
    best = [int(x.split("\t")[0]) for x in classify(model, b"", idx).lines]
    right = best[:6] + [(c + 1) % 10 for c in best[6:]]
    open(labels, "wb").write(struct.pack(">II", 0x801, 9) + bytes(right))
    result = classify(model, b"", "--labels", labels, idx)
    assert "accuracy         0.6667 (6 of 9)" in result.complaint, result.complaint
    assert [json.loads(x)["label"] for x in classify(model, b"", "--json", "--labels", labels, idx).lines] == right
    result = classify(model, b"", "--labels", labels, idx, idx, status=1)
    assert len(result.lines) == 18 and "9 labels for 18 rows" in result.complaint, result.complaint


@with_model(small_models.classifier(width=25))
def bad_images_are_errors(model, folder):
    good, _ = images(3, 5, 5)
    path = folder + "/idx"
    for name, data, status, lines in (("cut", good[:-1], 4, 2), ("no images", good[:16], 4, 0),
                                      ("header cut", good[:10], 4, 0), ("longer", good + b"x", 4, 3),
                                      ("compressed", b"\x1f\x8b\x08\0" + good, 4, 0),
                                      ("labels", struct.pack(">II", 0x801, 3) + b"abc", 4, 0),
                                      ("large", images(1, 6, 5)[0], 2, 0),
                                      ("flat", struct.pack(">IIII", 0x803, 1, 0, 5), 2, 0),
                                      ("huge", struct.pack(">IIII", 0x803, 1, 1 << 31, 1 << 31), 2, 0)):
        open(path, "wb").write(data)
        result = classify(model, b"", path, status=status)
        assert (len(result.lines) == lines and len(result.complaint.splitlines()) == 1), (name, result.lines,
                                                                                          result.complaint)
    assert "gzip -dc" in classify(model, b"\x1f\x8b\x08\0xxx", status=4).complaint
    open(path, "wb").write(good)
    for name, data, status in (("cut", b"\0\0\x08\x01\0\0\0\x03ab", 4), ("longer", b"\0\0\x08\x01\0\0\0\x01ab", 4),
                               ("images", good, 4),
                               ("compressed", b"\x1f\x8b\x08\0", 4),
                               ("class", struct.pack(">II", 0x801, 3) + bytes([0, 1, 9]), 2)):
        open(folder + "/labels", "wb").write(data)
        assert classify(model, b"", "--labels", folder + "/labels", path, status=status).complaint, name
    for option in ("-o", "--routing"):
        assert "overwritten" in classify(model, b"", option, path, path, status=2).complaint
        assert "overwritten" in classify(model, b"", option, model, path, status=2).complaint
    assert open(path, "rb").read() == good


@test
def classes_have_names_and_rows_have_routing():
    with tempfile.TemporaryDirectory() as folder:
        model, path = folder + "/model.bin", folder + "/r"
        meta, tensors = small_models.classifier(gate="threshold", k=1)
        meta["classes.names"] = ["cat", "dog", "a\tb", "\u00fc"]
        small_models.write(model, meta, tensors)
        rows = ["%d %d %d %d 1 0" % (i % 3, i % 5, i % 7, i % 2) for i in range(40)]
        seen = set()
        for options in ([], ["--batch", "1"], ["--batch", "16", "--threads", "3"], *(["--isa", x] for x in kernels())):
            result = run([CLASSIFY, "-m", model, "--top", "4", "--routing", path] + options, "\n".join(rows))
            if result.returncode == 2 and "cannot run" in result.complaint:
                continue
            assert result.returncode == 0, result.complaint
            seen.add((result.text, open(path).read()))
        assert len(seen) == 1, len(seen)
        assert {x for line in classify(model, "\n".join(rows), "--top", "4").lines
                for x in line.split("\t")[::2]} == {"cat", "dog", "a b", "\u00fc"}
        assert json.loads(classify(model, rows[0], "--json").lines[0])["name"] in ("cat", "dog", "a b", "\u00fc")
        header, entries = routing_of(path)
        assert [x["layer"] for x in header["layers"]] == ["network.0", "network.1"] and len(entries) == 80
        assert all(e["position"] == 0 and "id" not in e and "token" not in e for e in entries)
        assert "batch" in classify(model, rows[0], "--gating", "batchwise").complaint


if __name__ == "__main__":
    sys.exit(test.run())
