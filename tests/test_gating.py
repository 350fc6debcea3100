#!/usr/bin/env python3
"""Gates, as a user meets them: --gating, --noise and --routing of the programs, and moe-calibrate.

Usage: tests/test_gating.py [MODEL]     default: $MOE_TEST_MODEL, else models/en-de-fr-es.bin
Prints `ok NAME` or `FAIL NAME` per test; standard library only. BIN says where the programs are.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import small_models
from test_cli import BIN, DE, INFO, LINES, MODEL, QUANTIZE, TRANSLATE, main, many_lines, run, translate

CALIBRATE = os.path.join(BIN, "moe-calibrate")

TEXT = "\n".join(LINES) + "\n"
tests = []


def test(function):
    tests.append(function)
    return function


def routing_of(path):
    """(header, entries) of a routing file, with everything in it checked that can be."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    assert text.endswith("\n"), "the last line is not whole"
    header, *entries = [json.loads(line) for line in text.splitlines()]
    assert set(header) == {"model", "layers"}, header
    layers = {x["layer"]: i for i, x in enumerate(header["layers"])}
    limits = {x["layer"]: x["experts"] for x in header["layers"]}
    order = []
    for e in entries:
        assert set(e) - {"id", "token"} == {"line", "layer", "position", "experts", "weights", "empty"}, e
        assert e["experts"] == sorted(set(e["experts"])) and all(0 <= x < limits[e["layer"]] for x in e["experts"]), e
        assert len(e["experts"]) == len(e["weights"]) and isinstance(e["empty"], bool), e
        assert not e["experts"] or abs(sum(e["weights"]) - 1) < 1e-6, e
        assert not e["empty"] or len(e["experts"]) <= 1, e
        order.append((e["line"], layers[e["layer"]], e["position"]))
    assert order == sorted(set(order)), "lines, layers and positions do not come in order"
    return header, entries


def kernels():
    return re.search(r"kernels: ([^)]*)\)", run([TRANSLATE, "--version"]).text).group(1).split()


# ---- moe-translate ---------------------------------------------------------------------------------------------------


@test
def routing_is_that_of_the_translation():
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
def routing_is_the_same_for_any_batch_threads_and_instruction_set():
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
def lines_that_fail_have_no_routing():
    with tempfile.TemporaryDirectory() as folder:
        translate(b"Hello.\n\xff\nHello.\n", "--routing", folder + "/r", status=1)
        assert {e["line"] for e in routing_of(folder + "/r")[1]} == {1, 3}


@test
def routing_of_a_cut_translation_ends_where_it_was_cut():
    with tempfile.TemporaryDirectory() as folder:
        result = translate("One two three four five six.\n", "--json", "--max-len", "10", "--truncate", "--routing", folder + "/r")
        out = json.loads(result.lines[0])
        steps = [e for e in routing_of(folder + "/r")[1] if e["layer"] == "decoder.1"]
        assert len(steps) == len(out["ids"]) + out["finished"], (len(steps), out)


@test
def a_routing_file_is_whole_or_not_there():
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/r"
        process = subprocess.Popen(DE + ["--routing", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
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
        assert "of its own" in translate("", "-i", source, "-o", path, "--routing", path, status=2).complaint
        assert open(source).read() == TEXT
        assert translate(TEXT, "--routing", "/dev/stderr").complaint.startswith('{"model":')


@test
def gates_can_be_overridden():
    data = "\n".join(many_lines(40)) + "\n"
    base = translate(data).text
    same = translate(data, "--gating", "threshold")
    assert same.text == base and not same.complaint
    other = translate(data, "--gating", "topk")
    assert other.text != base and not other.complaint and all(other.lines)
    assert translate(data, "--gating", "topk", "--batch", "3").text == other.text
    assert all(translate(LINES[0] + "\n", "--gating", "softmax").lines)
    for options in (["--gating", "nonsense"], ["--gating", ""], ["--gating", "topk", "--self-test"], ["--noise", "1", "--self-test"]):
        assert run(DE + options, "").returncode == 2, options
    with tempfile.TemporaryDirectory() as folder:
        translate(TEXT, "--gating", "topk", "--routing", folder + "/r")
        header, entries = routing_of(folder + "/r")
        assert {x["gate"] for x in header["layers"]} == {"topk"} and {len(e["experts"]) for e in entries} == {2}


@test
def batchwise_gating_says_that_neighbours_matter():
    result = translate(TEXT, "--gating", "batchwise")
    assert result.complaint.count("batch") and len(result.complaint.splitlines()) == 1, result.complaint
    assert not translate(TEXT, "--gating", "batchwise", "-q").complaint
    with tempfile.TemporaryDirectory() as folder:
        assert len(translate(TEXT, "--gating", "batchwise", "--routing", folder + "/r").complaint.splitlines()) == 1
        routing_of(folder + "/r")


@test
def noise_needs_a_seed_and_a_model_that_was_trained_with_it():
    for seed in ("", "-1", "x", "1x", "99999999999999999999999"):
        assert "seed" in translate("", "--noise", seed, status=2).complaint, seed
    assert "noise" in translate("", "--noise", "1", status=2).complaint  # the shipped model has none


# ---- moe-calibrate ---------------------------------------------------------------------------------------------------


def calibrate(model, out, text, *options, status=0):
    """The table's lines; `text` is a list of lines."""
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file:
        file.write("".join(line + "\n" for line in text))
        file.flush()
        result = run([CALIBRATE, "-m", model, "-o", out, "--text", file.name] + list(options))
    assert result.returncode == status, (result.returncode, result.complaint)
    assert bool(result.complaint) == bool(status) and (not status or len(result.complaint.splitlines()) == 1), result.complaint
    result.lines = result.text.splitlines()
    return result


def about(model):
    return json.loads(run([INFO, "--json", "--check", model]).text)


@test
def calibrated_experts_get_equal_shares():
    """Nothing before encoder.2 has a gate, so there every expert is selected for exactly m tokens of the same text."""
    lines = many_lines(60)
    with tempfile.TemporaryDirectory() as folder:
        out, path = folder + "/out.bin", folder + "/r"
        table = calibrate(MODEL, out, ["en\tde\t" + x for x in lines]).text
        assert "encoder.2.gate" in table and "mean absolute difference" in table, table
        assert os.listdir(folder) == ["out.bin"]
        targets = translate("\n".join(lines) + "\n").lines
        result = run([TRANSLATE, "-m", out, "-t", "de", "--score", "--routing", path], "".join("%s\t%s\n" % p for p in zip(lines, targets)))
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
def calibrating_changes_thresholds_and_nothing_else():
    with tempfile.TemporaryDirectory() as folder:
        out = folder + "/out.bin"
        calibrate(MODEL, out, ["en\tde\t%s\tHallo!" % x for x in LINES])
        before, after = about(MODEL), about(out)
        strip = ("golden.", "quality.")
        assert {k: v for k, v in before["metadata"].items() if not k.startswith(strip)} == after["metadata"]
        kept = [[(t["name"], t["type"], t["shape"], t["crc32"]) for t in x["tensors"] if "threshold" not in t["name"]] for x in (before, after)]
        assert kept[0] == kept[1] and len(before["tensors"]) == len(after["tensors"])


@test
def calibrating_is_the_same_for_any_batch_and_threads():
    small = [" ".join(str(4 + (i * 7 + j * j) % 36) for j in range(i % 9 + 1)) for i in range(50)]
    with tempfile.TemporaryDirectory() as folder:
        model, seen = folder + "/model.bin", set()
        for how, lines in ((small_models.language(groups=3), small), (small_models.translation(groups=3, gate="softmax", k=2),
                                                                      ["a\tb\t%s\t%s" % (x, " ".join(x.split()[::-1])) for x in small])):
            small_models.write(model, *how)
            seen.clear()
            for options in ([], ["--batch", "1"], ["--batch", "5", "--threads", "3"]):
                table = calibrate(model, folder + "/out.bin", lines, "--ids", *options).text
                with open(folder + "/out.bin", "rb") as file:
                    seen.add((file.read(), table))
            assert len(seen) == 1, len(seen)


@test
def calibrating_twice_changes_nothing_before_the_first_gate():
    pieces = ["w%d w%d w%d w%d" % (4 + i % 36, 4 + i * 5 % 36, 4 + i * i % 36, 4 + i * 11 % 36) for i in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        model, once, twice = (folder + x for x in ("/model.bin", "/once.bin", "/twice.bin"))
        for gate in ("topk", "softmax", "threshold"):
            small_models.write(model, *small_models.translation(groups=4, gate=gate, parent=gate, k=1))
            lines = ["a\tb\t%s\t%s" % (x, y) for x, y in zip(pieces, reversed(pieces))]
            first = calibrate(model, once, lines, "--pretokenized").text
            assert ("mean absolute difference" in first) == (gate == "threshold"), first
            meta = about(once)["metadata"]
            assert all(meta[s + ".1." + k] == "threshold" for s in ("encoder", "decoder") for k in ("gate", "parent.gate")), meta
            again = calibrate(once, twice, lines, "--pretokenized").lines
            parent = [x for x in again if x.startswith("encoder.1.parent")][0]
            assert parent.split(";")[1].split()[-1] == "0", parent


@test
def calibrating_a_dense_gate_needs_k():
    with tempfile.TemporaryDirectory() as folder:
        model, out = folder + "/model.bin", folder + "/out.bin"
        small_models.write(model, *small_models.language(gate="softmax", k=0))
        assert "--k" in calibrate(model, out, ["5 6 7"], "--ids", status=2).complaint and os.listdir(folder) == ["model.bin"]
        calibrate(model, out, ["5 6 7 8 9 10 11", "12 13 14 15"] * 3, "--ids", "--k", "3")
        meta = about(out)["metadata"]
        assert (meta["decoder.1.gate"], meta["decoder.1.k"]) == ("threshold", 3), meta
        calibrate(model, out, ["5 6 7 8 9 10 11"], "--ids", "--k", "99")
        assert about(out)["metadata"]["decoder.1.k"] == 12  # all that there are


@test
def calibrating_bad_input():
    with tempfile.TemporaryDirectory() as folder:
        model, out = folder + "/model.bin", folder + "/out.bin"
        small_models.write(model, *small_models.language())
        result = calibrate(model, out, ["5 6 7", " ".join(["5"] * 100), "3", "8 9"], "--ids")
        assert "2 lines, 2 more left out" in result.lines[0], result.lines[0]
        os.remove(out)
        assert "line 2" in calibrate(model, out, ["5 6", "5 x"], "--ids", status=3).complaint
        assert "none of the lines" in calibrate(model, out, ["3"], "--ids", status=3).complaint
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
        for options in ([], ["-m", model, "-o", out], ["-m", model, "-o", out, "--text", "x", "--k", "0"], ["-m", model, "-o", out, "--text", "x", "y"]):
            assert run([CALIBRATE] + options).returncode == 2, options


@test
def quantize_measures_a_language_model():
    with tempfile.TemporaryDirectory() as folder:
        model, out, text = folder + "/model.bin", folder + "/out.bin", folder + "/text"
        small_models.write(model, *small_models.language())
        open(text, "w").write("5 6 7\n8 9 10 11\n")
        result = run([QUANTIZE, "--ids", "--measure", text, model, out, "q8"])
        assert result.returncode == 0 and "nats per token" in result.complaint and "translations" not in result.complaint, result.complaint
        quality = {k: v for k, v in about(out)["metadata"].items() if k.startswith("quality.")}
        assert quality["quality.sentences"] == 2 and "quality.same_translations" not in quality, quality
        small_models.write(model, *small_models.classifier())
        assert run([QUANTIZE, model, out, "q8"]).returncode == 0
        assert run([QUANTIZE, "--ids", "--measure", text, model, out, "q8"]).returncode == 2


if __name__ == "__main__":
    sys.exit(main(tests))
