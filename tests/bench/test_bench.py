#!/usr/bin/env python3
"""Test moe-bench and moe-make-random, which `make bench` builds: output, rejected options, written models.

Usage: tests/python tests/bench/test_bench.py
"""
import json
import os
import re
import sys
import tempfile

from programs.test_cli import BIN, INFO, MODEL, ROUTING, TRANSLATE, run
from programs.test_help import of_program
from suite import Suite

BENCH, MAKE = os.path.join(BIN, "moe-bench"), os.path.join(BIN, "moe-make-random")
test = Suite()


def made(folder, preset, *options):
    """Write a model of a preset; return (its path, moe-info's JSON)."""
    path = f"{folder}/{preset}.bin"
    result = run([MAKE, "--preset", preset, "-o", path, *options])
    assert result.returncode == 0, result.complaint
    return path, json.loads(run([INFO, "--json", path]).text)


@test
def help_is_complete():
    of_program("moe-bench.c")()
    of_program("moe-make-random.c")()


@test
def repeated_options_are_refused():
    for program, *options in (
        (MAKE, "--preset", "lm-4", "-o", "/dev/null", "-o", "/dev/null"),
        (MAKE, "--preset", "lm-4", "-o", "/dev/null", "--seed", "1", "--seed", "1"),
        (BENCH, "--layer", "lstm", "--reps", "1", "--rows", "1", "--rows", "1"),
    ):
        result = run([program, *options])
        assert result.returncode == 2 and " is given twice" in result.complaint, result.complaint


def bench(*options):
    result = run([BENCH] + list(options))
    assert result.returncode == 0 and not result.complaint, result.complaint
    return [json.loads(line) for line in result.text.splitlines()]


@test
def bench_measures_all_layers_types_and_instruction_sets():
    names = re.search(r"kernels: ([^)]*)\)", run([TRANSLATE, "--version"]).text).group(1).split()
    here = [n for n in names if run([TRANSLATE, "-m", MODEL, "-t", "de", "--isa", n], "").returncode == 0]
    out = bench("--layer", "all", "--type", "q8,q4,f32", "--isa", ",".join(here), "--rows", "3", "--experts", "3",
                "--k", "2",
                "--width", "64", "--hidden", "48", "--vocabulary", "90", "--src-len", "4", "--beam", "2", "--threads",
                "2")
    machines = [o for o in out if o["what"] == "machine"]
    assert [m["isa"] for m in machines] == here and out[: len(here)] == machines, machines
    assert all(m["l2_gbytes_s"] >= m["cache_gbytes_s"] >= m["dram_gbytes_s"] > 0 < m["integer_gops"]
               for m in machines), machines
    layers = out[len(here):]
    assert len(layers) == 5 * 3 * len(here), len(layers)
    for o in layers:
        assert o["ms_median"] >= o["ms_min"] > 0 and o["gops"] > 0 and o["gbytes_s"] > 0 and o["roofline_share"] > 0, o
    assert {o["what"] for o in layers} == {"moe", "lstm", "dense", "softmax", "attention"}
    assert {(o["experts"], o["k"]) for o in layers if o["what"] == "moe"} == {(3, 2)}


@test
def bench_forces_the_length_of_translations():
    out = bench("-m", MODEL, "--batch", "1,3", "--beam", "1,2", "--src-len", "6", "--tgt-len", "5", "--threads", "1",
                "--profile")
    models = [o for o in out if o["what"] == "model"]
    assert [(o["batch"], o["beam"]) for o in models] == [(1, 1), (1, 2), (3, 1), (3, 2)], models
    for o in models:
        assert abs(o["tok_s"] * o["ms_median"] / 1000 - 5 * o["batch"]) < 0.02 * o["batch"], "not 5 tokens each: %r" % o
        assert abs(o["ms_per_step"] * 5 / o["ms_median"] - 1) < 0.01 and o["rss_mb"] > 5 and o["roofline_share"] > 0, o
    for o in models:
        nodes = [n for n in out if n["what"] == "profile" and (n["batch"], n["beam"]) == (o["batch"], o["beam"])]
        assert abs(sum(n["share"] for n in nodes) - 1) < 0.01, nodes
        # rows may have equal names, as gathered and computed states do, if their ops differ
        rows = [(n["node"], n["op"]) for n in nodes]
        assert len(set(rows)) == len(rows) and {"decoder.*.cell", "decoder.logits"} <= {name for name, _ in rows}, rows


@test
def bench_separates_prompts_from_decoding():
    with tempfile.TemporaryDirectory() as folder:
        path, _ = made(folder, "hy-mt2-narrow", "--layers", "3")
        out = bench("-m", path, "--batch", "2", "--beam", "1", "--src-len", "40", "--tgt-len", "5", "--threads", "1")
    [o] = [o for o in out if o["what"] == "model"]
    assert abs(o["tok_s"] * o["ms_median"] / 1000 - 10) < 0.01, "not 5 tokens each: %r" % o
    prompts, rest = 80 / o["prompt_tok_s"], 8 / o["decode_tok_s"]  # seconds
    assert abs((prompts + rest) * 1000 / o["ms_median"] - 1) < 0.01, o
    assert 3 <= o["experts_read"] <= 6, o  # 2 rows visit 3 experts each


@test
def mixtures_like_marco_have_the_form_of_qwen3():
    with tempfile.TemporaryDirectory() as folder:
        path, _ = made(folder, "marco-narrow")
        with open(path, "rb") as file:
            data = file.read()
        assert all(x in data for x in (b"decoder.1.shared", b"decoder.7.gate.weight")) and b"gate.choice" not in data
        assert b"output.weight" not in data and b"shared.up" not in data
        [o] = [o for o in bench("-m", path, "--batch", "2", "--beam", "1", "--src-len", "9", "--tgt-len", "5",
                                "--threads", "1") if o["what"] == "model"]
    assert 3 <= o["experts_read"] <= 6, o


@test
def bench_translates_given_sentences():
    """Targets differ in length; tokens per second times seconds must give the sum of the lengths."""
    lines = [(4, -1, 6), (9, -1, 3), (2, -1, 12), (7, 20, 5)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        for target, force, source in lines:
            print(target, force, *range(40, 40 + source), file=file)
        file.flush()
        options = ["-m", MODEL, "--batch", "2", "--beam", "2", "--threads", "1", "--reps", "1",
                   "--sentences", file.name]
        for extra in ([], ["--no-mmap"]):
            [o] = [o for o in bench(*options, *extra) if o["what"] == "model"]
            assert (o["sentences"], o["src_len"], o["tgt_len"]) == (4, 6.5, 5.5), o
            assert abs(o["tok_s"] * o["ms_median"] / 1000 - 22) < 0.1, "not 22 tokens: %r" % o
    for text in ("", "5 -1\n", "5 -1 4 x\n", "1 -1 4\n", "5 -1 4\n5 -2 4\n", "5 -1 99999999999\n"):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(text)
            file.flush()
            result = run([BENCH, "-m", MODEL, "--sentences", file.name])
            assert result.returncode == 2 and result.complaint and not result.text, (text, result)


@test
def bench_reports_the_cost_of_reading_experts():
    found = []
    for size in "1M", "8M", "1G":
        out = bench("-m", MODEL, "--batch", "4", "--beam", "2", "--src-len", "9", "--tgt-len", "6", "--reps", "1",
                    "--threads", "1", "--expert-memory", size)
        [o] = [o for o in out if o["what"] == "model"]
        read = o["bytes_token"] * o["tok_s"] / (o["disk_gb_s"] * 1e9)  # share of the time spent reading
        assert o["disk_gb_s"] > 0 and 0 < o["disk_cpu_s_gb"] < 2, o
        assert abs(read - o["read_share"]) < 0.001 + 0.01 * read, (read, o)
        assert abs(max(o["read_share"], o["roofline_share"]) - o["bound_share"]) < 0.0015, o
        found.append((o["experts_held"], o["hit_rate"], -o["bytes_token"]))
    assert found == sorted(found) and found[0][1] < found[1][1], found
    assert found[2] == (64, 1, 0), found


@test
def invalid_options_are_refused():
    for options in (["--layer", "nonsense"], ["--layer", "moe", "-m", MODEL], ["--rows", "0"], ["--rows", "1,"],
                    ["--type", "q5"],
                    ["--isa", "nonsense"], ["--reps", "0"], ["--sentences", "/nonexistent/file"],
                     ["--layer", "moe", "--experts", "2", "--k", "3"], ["stray"],
                    ["-m", MODEL, "--src-len", "1"]):
        result = run([BENCH] + options)
        assert result.returncode == 2 and result.complaint and not result.text, (options, result.returncode)
    assert run([BENCH, "-m", "/nonexistent/file"]).returncode == 3
    for options in ["--help"], ["--version"], ["--layer", "lstm", "--rows", "1", "--reps", "1", "--width", "16"]:
        with open("/dev/full", "wb") as full:
            result = run([BENCH, *options], stdout=full)
        assert result.returncode == 4 and "moe-bench" in result.complaint, result


@test
def make_random_writes_working_reproducible_models():
    with tempfile.TemporaryDirectory() as folder:
        a, b, c = (folder + name for name in ("/a.bin", "/b.bin", "/c.bin"))
        for out, seed in ((a, "7"), (b, "7"), (c, "8")):
            result = run([MAKE, "--preset", "small", "--experts", "q4", "--seed", seed, "-o", out])
            assert result.returncode == 0, result.complaint
        first, again, other = (open(path, "rb").read() for path in (a, b, c))
        assert first == again and first != other
        about = json.loads(run([INFO, "--json", "--check", a]).text)
        assert (about["types"]["q4"]["tensors"] == 2 and about["parameters_in_experts"] == 2 * 32 * 2 * 256
                * 512), about["types"]
        assert run([TRANSLATE, "-m", a, "--ids"], "12 13 14\n").text.count("\n") == 1
        assert run([MAKE, "--preset", "huge", "-o", a]).returncode == 2
        assert run([MAKE, "--preset", "small", "-o", folder + "/no/a.bin"]).returncode == 4
        assert sorted(os.listdir(folder)) == ["a.bin", "b.bin", "c.bin"]


@test
def presets_of_papers_have_their_weights_and_gates():
    """The papers are Shazeer et al. 2017, App. E (parameters as counted in reference.md), and Wu et al. 2016."""
    ids = "\n".join(" ".join(str(4 + (7919 * i + 104729 * j) % 31000) for j in range(15)) for i in range(6)) + "\n"
    with tempfile.TemporaryDirectory() as folder:
        paper, about = made(folder, "paper-32", "--experts", "q4")
        cell = 4 * 2048 * (512 + 512) + 4 * 2048 + 512 * 2048
        mixture = 32 * 2 * 512 * 2048 + 32 * 512 + 32
        attention = 2 * 512 * 512 + 512
        assert about["parameters"] == 32000 * 512 + 5 * cell + 4 * 2048 * 512 + 2 * mixture + attention, about
        routing = folder + "/routing"
        assert run([TRANSLATE, "-m", paper, "--ids", "--beam", "1", "--max-len", "32", "--routing", routing],
                   ids).returncode == 0
        for layer in json.loads(run([ROUTING, routing, "--json"]).text)["layers"]:
            assert layer["gate"] == "threshold" and 3 < layer["experts_per_token"] < 5, layer
        deep, about = made(folder, "gnmt-8")
        def cell(inputs): return 4 * 1024 * (inputs + 1024) + 4 * 1024  # noqa: E704
        assert about["parameters"] == (3 * 32000 * 1024 + 2 * cell(1024) + cell(2048) + 6 * cell(1024) + 8 * cell(2048)
                                       + 2 * 1024 * 1024 + 1024), about["parameters"]
        assert len(run([TRANSLATE, "-m", deep, "--ids", "--max-len", "24"], ids).text.splitlines()) == 6


@test
def decoder_only_presets_have_the_shape_of_hy_mt2():
    """Check a narrow preset with four layers, the first of them dense, in each number format."""
    ids = "\n".join(" ".join(str(4 + (7919 * i + 104729 * j) % 590) for j in range(15)) for i in range(6)) + "\n"
    d, v, heads, keys, head, dense, experts, hidden = 64, 600, 4, 2, 32, 96, 16, 32
    attention = d + (heads + 2 * keys) * head * d + 2 * head + heads * head * d
    mixture = d + experts * (d + 1) + (experts + 1) * 3 * hidden * d
    with tempfile.TemporaryDirectory() as folder:
        for options in ("--type", "f32"), ("--type", "q8", "--experts", "q4"), ("--type", "q4"):
            path, about = made(folder, "hy-mt2-narrow", "--layers", "4", *options)
            wanted = 2 * v * d + 4 * attention + d + 3 * dense * d + 3 * mixture + d
            assert about["parameters"] == wanted + (1 << 15) * head, (about["parameters"], wanted)
            assert about["parameters_in_experts"] == 3 * experts * 3 * hidden * d, about
            with open(path, "rb") as file:  # as in converted models, whose products are measured
                assert b"activation.block" in file.read()
            lines = [run([TRANSLATE, "-m", path, "--ids", "--max-len", "9", "--batch", batch], ids).text
                     for batch in ("1", "4")]
            assert lines[0] == lines[1] and len(lines[0].splitlines()) == 6, lines
        for wrong in ("--layers", "9"), ("--layers", "0"), ("--layers", "x"):
            assert run([MAKE, "--preset", "hy-mt2-narrow", "-o", path,
                        *wrong]).returncode == 2, wrong
        result = run([MAKE, "--preset", "small", "--layers", "2", "-o", path])
        assert result.returncode == 2 and "--layers" in result.complaint, result


if __name__ == "__main__":
    sys.exit(test.run())
