#!/usr/bin/env python3
"""The programs as a user runs them: options, bad input, signals. The output must not depend on the batch.

Usage: tests/python tests/programs/test_cli.py [MODEL]     default: $MOE_TEST_MODEL, else models/en-de-fr-es.bin
Prints `ok NAME` or `FAIL NAME` per test; standard library only. BIN is the folder of the programs.
"""
import hashlib
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time

from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
MODEL = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("MOE_TEST_MODEL") or os.path.join(ROOT,
                                                                                               "models/en-de-fr-es.bin")
TRANSLATE, INFO, QUANTIZE, ALIGN, ROUTING = (os.path.join(BIN, "moe-" + p) for p in
                                             ("translate", "info", "quantize", "align", "routing"))
DE = [TRANSLATE, "-m", MODEL, "-t", "de"]
LINES = ["The weather is nice today.", "Where is the station?", "I have lost my keys.", "She is reading a book.",
         "Thank you!"]
LONG = "MOE_TEST_LONG" in os.environ  # set by make test-long to use more input
test = Suite()
if not os.path.exists(MODEL):
    sys.exit("FAIL all: missing model %s" % MODEL)


def run(command, data=b"", **keywords):
    if isinstance(data, str):
        data = data.encode()
    result = subprocess.run(command, input=data, stdout=keywords.pop("stdout", subprocess.PIPE), stderr=subprocess.PIPE,
                            timeout=300, **keywords)
    result.text = (result.stdout or b"").decode()
    result.complaint = result.stderr.decode()
    return result


def translate(data, *options, status=0, **keywords):
    """Run moe-translate and split its output into lines; assert the status and a final newline."""
    result = run(DE + list(options), data, **keywords)
    assert result.returncode == status, "status %d, not %d: %s" % (result.returncode, status, result.complaint)
    assert not result.text or result.text.endswith("\n"), "the last line is not whole"
    result.lines = result.text.split("\n")[:-1]
    return result


def many_lines(count):
    """Return random sentences of different lengths, which are the same in every run."""
    r = random.Random(4)
    words = ("the a my your house dog child teacher river city is was has been sees reads likes to in on under and but "
             "not very old new green today tomorrow always never quickly , . ? ! 12 1984 Berlin Anna with without when "
             "who").split()
    return [" ".join(r.choice(words) for _ in range(r.choice((1, 2, 3, 5, 8, 8, 13, 21)))) for _ in range(count)]


def assert_refused(command, *rows):
    """Assert that the options of each row are refused with a message that contains the row's second string."""
    for options, message in rows:
        result = run(command + options.split(), "Hello\n")
        assert result.returncode == 2 and not result.text and message in result.complaint, (options, result)


# ---- Text in, text out -----------------------------------------------------------------------------------------


@test
def a_file_name_given_as_text_gets_a_hint():
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        assert f"-i {file.name}" in run(DE + [file.name]).complaint
    assert not run(DE + ["house"]).complaint
    assert "nvidia, tf, mlperf, hf or marian" in " ".join(run([DE[0], "--help"]).text.split())


@test
def a_memory_is_searched():
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/m.po"
        with open(path, "w") as file:
            file.write('msgid ""\nmsgstr "Language: de\\n"\n\nmsgid "Open %s"\nmsgstr "%s auf"\n')
        with open(path, "rb") as file:
            wanted = hashlib.sha256(file.read()).hexdigest()
        memory = ["--memory", path]
        assert run(DE + memory, "Open %s\n  Open %d \n").text == "%s auf\n  %d auf \n"
        first, second = map(json.loads, run(DE + memory + ["--json"], "Open %s\nGo.\n").text.splitlines())
        assert first["memory"] == second["memory"] == wanted and "matches" not in second
        assert first["matches"] == [{"part": 0, "match": "exact", "similarity": 1, "source": "Open %s",
                                     "target": "%s auf"}], first
        with open(path, "a") as file:
            file.write('\nmsgid "broken\n')
        done = run(DE + memory, "a\n")
        assert done.returncode == 2 and f"{path}: line 7: the string is not closed" in done.complaint, done.complaint
        assert run(DE + ["--memory", folder + "/no"], "a\n").returncode == 4


@test
def translations_of_similar_texts_are_repaired():
    """The words of the change are the model's, all others the memory's."""
    pairs = ("The cat sleeps in the old garden.\tDie Katze döst im alten Gärtlein.\n"
             "cannot open the file '%s' for the user\tDatei '%s' lässt sich für den Nutzer nicht öffnen\n")
    lines = ["The cat sleeps in the new garden.", " The dog sleeps in the old garden. ", "Where is my book?",
             "cannot open the directory '%s' for the user"]  # the model misses the change
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="utf-8") as file:
        file.write(pairs)
        file.flush()
        memory, data = ["--memory", file.name], "".join(line + "\n" for line in lines)
        plain, found = translate(data).lines, [json.loads(line) for line in translate(data, *memory, "--json").lines]
        texts = [one["translation"] for one in found]
        assert texts[:2] == ["Die Katze döst im neuen Garten.", " Der Hund schläft im alten Garten. "], texts
        assert texts[2:] == plain[2:] and "Datei" not in texts[3], (texts, plain)
        kinds = [one.get("matches", [{"match": ""}])[0]["match"] for one in found]
        assert kinds == ["repaired", "repaired", "", "fuzzy"], found
        for options in ["--batch", "1", "--threads", "1"], ["--threads", "2"], ["--split", "0"]:
            assert translate(data, *memory, *options).lines == texts, options
        terms = file.name + ".csv"
        with open(terms, "w", encoding="utf-8") as glossary:
            glossary.write("cat,Kater\n")
        try:  # terms come first
            assert "Kater" in translate(lines[0] + "\n", *memory, "--glossary", terms).text
        finally:
            os.unlink(terms)


@test
def min_target_lengthens_translations():
    short = json.loads(run(DE + ["--json", "Where is my book?"]).text)
    long = json.loads(run(DE + ["--json", "--min-target", "15", "Where is my book?"]).text)
    assert len(short["ids"]) < 15 <= len(long["ids"]), (short, long)


@test
def flags_can_be_repeated():
    assert translate("a\n", "-q", "-q").lines


@test
def directories_are_refused_by_name():
    with tempfile.TemporaryDirectory() as folder:
        for option in ("-i", "-o"):
            out = translate("a\n", option, folder, status=4)
            assert f"{folder}: this is a directory, but {option} expects a file" in out.complaint, out.complaint
        out = translate("a\n", "-o", folder + "/no/out", status=4)
        assert f"no/out: missing folder (create it: mkdir -p '{folder}/no')" in out.complaint, out.complaint
        kept = folder + "/kept"
        with open(kept, "w") as file:
            file.write("text")
        translate("", "-i", folder, "-o", kept, status=4)
        with open(kept) as file:
            assert file.read() == "text"


@test
def file_names_in_examples_have_one_format():
    formats = {}
    for path in ("README.md", "tools/programs/README.md", "tools/train/README.md"):
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            for option, name in re.findall(r"--(score|prefix|text|measure) (?:< )?(\w+\.tsv)", file.read()):
                formats.setdefault(name, set()).add("sample" if option in ("text", "measure") else option)
    assert len(formats) >= 3 and all(len(kinds) == 1 for kinds in formats.values()), formats


@test
def each_line_gives_one_line():
    out = translate("\n".join(LINES) + "\n").lines
    assert len(out) == len(LINES) and all(out), out


@test
def blank_lines_are_copied():
    text = "\n%s\n\n   \n%s\n\n\t\t\n \t \n" % (LINES[0], LINES[1])
    blank = ["", "", "   ", "", "\t\t", " \t "]
    for options in [], ["--nbest", "2"], ["--json"]:
        out = translate(text, *options).lines
        if options == ["--json"]:
            out = [json.loads(x)["translation"] for x in out]
        assert len(out) == 8 and out[1] and out[4] and out[:1] + out[2:4] + out[5:] == blank, out
    out = translate(text, "--no-protect").lines
    assert out[1] and out[4] and not any(out[:1] + out[2:4] + out[5:]), out


@test
def no_input_gives_no_output():
    assert translate("").text == ""


@test
def the_last_line_needs_no_line_end():
    assert translate(LINES[0]).text == translate(LINES[0] + "\n").text


@test
def windows_line_ends_and_byte_order_marks_are_accepted():
    plain = translate("\n".join(LINES) + "\n").text
    assert translate("\ufeff" + "\r\n".join(LINES) + "\r\n").text == plain


@test
def input_and_output_can_be_files():
    with tempfile.TemporaryDirectory() as folder:
        source, target = folder + "/in", folder + "/out"
        with open(source, "w") as f:
            f.write("\n".join(LINES) + "\n")
        with open(target, "w") as f:
            f.write("old contents " * 1000)
        assert translate("", "-i", source, "-o", target).text == ""
        with open(target) as f:
            assert f.read() == translate("\n".join(LINES) + "\n").text


@test
def the_input_is_never_overwritten():
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/both"
        with open(path, "w") as f:
            f.write("precious\n")
        assert "overwritten" in translate("", "-i", path, "-o", path, status=2).complaint
        with open(path) as f:
            assert f.read() == "precious\n"


@test
def ids_are_read_and_written():
    text = translate("\n".join(LINES) + "\n", "--json").lines
    ids = [" ".join(map(str, json.loads(x)["source_ids"])) for x in text]
    out = translate("\n".join(ids) + "\n", "--ids").lines
    assert out == [" ".join(map(str, json.loads(x)["ids"])) for x in text], out


@test
def bad_ids_are_reported():
    good = " ".join(map(str, json.loads(translate(LINES[0] + "\n", "--json").lines[0])["source_ids"]))
    result = translate(good + "\n5 x\n99999999999999999999\n-1\n" + good + "\n", "--ids", status=1)
    assert result.lines[0] == result.lines[4] != "" and result.lines[1:4] == ["", "", ""], result.lines
    assert "line 2: 'x' is not a token id" in result.complaint and "line 3: " in result.complaint, result.complaint


@test
def json_has_scores_tokens_and_hypotheses():
    out = [json.loads(x) for x in translate("\n".join(LINES) + "\n\n", "--json", "--nbest", "3").lines]
    plain = translate("\n".join(LINES) + "\n").lines
    for o, source, translation in zip(out, LINES, plain):
        assert o["source"] == source and o["translation"] == translation, o
        assert len(o["nbest"]) == 3 and o["nbest"][0]["ids"] == o["ids"], o
        assert all(a["score"] >= b["score"] for a, b in zip(o["nbest"], o["nbest"][1:])), o
        for h in [o] + o["nbest"]:
            assert len(h["token_logprobs"]) == len(h["ids"]) + h["finished"], h
            assert abs(sum(h["token_logprobs"]) - h["logprob"]) < 1e-3, h
    assert out[-1]["translation"] == "" and "error" not in out[-1]


@test
def hypotheses_are_separated_by_tabs():
    out = translate("\n".join(LINES) + "\n", "--nbest", "3").lines
    first = translate("\n".join(LINES) + "\n").lines
    assert [x.split("\t")[0] for x in out] == first and all(x.count("\t") == 2 for x in out), out


@test
def scores_equal_those_of_translations():
    out = [json.loads(x) for x in translate("\n".join(LINES) + "\n", "--json").lines]
    pairs = "".join("%s\t%s\n" % (" ".join(map(str, o["source_ids"])), " ".join(map(str, o["ids"]))) for o in out)
    for o, line in zip(out, translate(pairs, "--ids", "--score").lines):
        logprob, tokens = line.split("\t")
        assert float(logprob) == o["logprob"] and int(tokens) == len(o["ids"]) + 1, (o, line)


@test
def reranking_uses_scores_of_the_reverse_direction():
    data, options = "\n".join(LINES) + "\n", ("--json", "--beam", "6", "--nbest", "6")
    before = [json.loads(x) for x in translate(data, *options, "--rerank", "0").lines]
    after = [json.loads(x) for x in translate(data, *options, "--rerank", "5").lines]
    assert all("reverse" not in h for o in before for h in o["nbest"]), before
    pairs = "".join("%s\t%s\n" % (" ".join(map(str, h["ids"])), " ".join(map(str, o["source_ids"]))) for o in after
                    for h in o["nbest"])
    back = iter(run([TRANSLATE, "-m", MODEL, "-t", "en", "--ids", "--score"], pairs).text.splitlines())
    for a, b in zip(before, after):
        assert sorted(h["ids"] for h in a["nbest"]) == sorted(h["ids"] for h in b["nbest"]), (a, b)
        for h in b["nbest"]:
            assert float(next(back).split("\t")[0]) == h["reverse"] < 0, h
        best = [h for h in b["nbest"] if h["finished"]]
        assert best[0]["reverse"] >= best[-1]["reverse"], best
    orders = [[[h["ids"] for h in o["nbest"]] for o in found] for found in (before, after)]
    assert orders[0] != orders[1], "the order has not changed"
    best = translate(data, "--beam", "6", "--rerank", "5").lines
    assert best == translate(data, "--beam", "6", "--rerank", "5", "-s", "en").lines == [o["translation"]
                                                                                         for o in after], best


@test
def score_and_prefix_require_two_columns():
    for option in "--score", "--prefix":
        result = translate("a\tb\nno tab\n\na\tb\n", option, status=1)
        assert [bool(x) for x in result.lines] == [True, False, False, True], result.lines
        assert "line 2" in result.complaint and option in result.complaint, result.complaint


@test
def translations_continue_their_prefixes():
    free = translate("\n".join(LINES) + "\n", "--rerank", "0").lines
    assert translate("".join(f"{x}\t\n" for x in LINES), "--prefix", "--rerank", "0").lines == free
    begun = [(x, " ".join(y.split()[:2])) for x, y in zip(LINES, free)] + [(LINES[0], "Auch")]
    out = translate("".join("%s\t%s\n" % pair for pair in begun), "--prefix").lines
    assert all(line.startswith(prefix) for line, (_, prefix) in zip(out, begun)) and len(out[-1]) > len("Auch"), out
    objects = [json.loads(x) for x in translate("".join("%s\t%s\n" % pair for pair in begun), "--prefix", "--json",
                                                "--nbest", "2").lines]
    for o, line, (_, prefix) in zip(objects, out, begun):
        assert (o["prefix"] == prefix and o["translation"] == line
                and all(h["translation"].startswith(prefix) for h in o["nbest"])), o


# Pairs of sentences and the links that they must have.
ALIGNED = (("Where is the station?\tWo ist der Bahnhof?", {"0-0", "1-1", "2-2", "3-3"}),
           ("Thank you!\tDanke!", {"0-0"}),
           ("My sister works in a hospital.\tMeine Schwester arbeitet in einem Krankenhaus.",
            {"0-0", "1-1", "2-2", "3-3", "4-4", "5-5"}))


def align(lines, *options, status=0):
    result = run([ALIGN, "-m", MODEL, "-s", "en", "-t", "de", *options], "".join(line + "\n" for line in lines))
    assert result.returncode == status, (result.returncode, result.complaint)
    assert result.text.endswith("\n")
    return result.text.split("\n")[:-1], result.complaint


def links(line):
    return [tuple(map(int, x.split("-"))) for x in line.split()]


@test
def words_are_aligned():
    lines = [x for x, _ in ALIGNED]
    for line, (pair, sure) in zip(align(lines)[0], ALIGNED):
        assert len(sure & set(line.split())) >= 0.75 * len(sure), (pair, line)
        assert links(line) == sorted(set(links(line))), line
    most, best = align(lines, "--share", "0")[0], align(lines, "--share", "1")[0]
    for line, all_, few, pair in zip(align(lines)[0], most, best, lines):
        n, m = (len(x.split()) for x in pair.split("\t"))
        assert links(all_) == [(i, j) for i in range(n) for j in range(m)], all_
        assert set(links(few)) <= set(links(line)) <= set(links(all_)), (few, line)
        assert all(len(set(x)) == len(x) for x in zip(*links(few))), few  # each word has one link
    spaced = align(["  " + x.replace(" ", "   ").replace("\t", " \t  ") + "  " for x in lines])[0]
    assert spaced == align(lines)[0], spaced


@test
def alignments_do_not_depend_on_the_batch():
    texts = many_lines(300 if LONG else 60)
    translations = translate("\n".join(texts) + "\n", "--beam", "1", "--no-protect").lines
    pairs = [f"{x}\t{y}" for x, y in zip(texts, translations)]
    lines = align(pairs)[0]
    assert len(lines) == len(texts) and len(set(lines)) > len(texts) / 3
    for options in ["--batch", "1", "--threads", "1"], ["--batch", "7", "--threads", "3", "--no-mmap"]:
        assert align(pairs, *options)[0] == lines, options
    assert align(pairs[::-1])[0] == lines[::-1]
    ids = [json.loads(x) for x in translate("\n".join(LINES) + "\n", "--json").lines]
    out = align([" ".join(map(str, o["source_ids"])) + "\t" + " ".join(map(str, o["ids"])) for o in ids], "--ids",
                "--share", "0")[0]
    for line, o in zip(out, ids):
        assert len(links(line)) == len(o["source_ids"]) * len(o["ids"]), line


@test
def invalid_pairs_give_empty_lines():
    long = "a " * 600
    out, complaint = align(["no tab", "", "\t", "a\t", "\tb", f"{long}\tb", f"a\t{long}", "\0a\tb", "a\tb"], status=1)
    assert [bool(x) for x in out] == [False] * 8 + [True], out
    assert re.findall(r"line (\d+):", complaint) == ["1", "6", "7", "8"] and "4 of 9" in complaint, complaint
    assert run([ALIGN, "-m", MODEL, "-s", "en", "-t", "de"], b"a\xff\tb\n").returncode == 1
    assert run([ALIGN, "-m", MODEL, "-s", "en", "-t", "de"], b"").text == ""
    assert run([ALIGN, "-m", "/nowhere", "-s", "en", "-t", "de"]).returncode == 3
    assert "-s" in run([ALIGN, "--help"]).text


@test
def a_lexicon_lists_translations_of_tokens():
    texts = many_lines(300 if LONG else 100)
    translations = translate("\n".join(texts) + "\n", "--beam", "1", "--no-protect").lines
    pairs = [f"{x}\t{y}" for x, y in zip(texts, translations)]
    lines, complaint = align([*pairs, "no tab", f"{'a ' * 600}\tb"], "--lexicon", status=1)
    assert re.findall(r"line (\d+):", complaint) == [str(len(texts) + 1), str(len(texts) + 2)], complaint
    table = {}
    for line in lines:
        target, source, probability = line.split(" ")
        assert target not in table.setdefault(source, {}) and 0 < float(probability) <= 1, line
        table[source][target] = float(probability)
    for source, targets in table.items():
        assert list(targets.values()) == sorted(targets.values(), reverse=True) and sum(targets.values()) < 1.00001
    for source, target in ("▁not", "▁nicht"), ("▁Berlin", "▁Berlin"), ("▁and", "▁und"):
        assert max(table[source], key=table[source].get) == target, (source, table[source])
    for options in ["--batch", "1", "--threads", "1"], ["--batch", "7", "--threads", "2"]:
        assert align(pairs, "--lexicon", *options)[0] == lines, options
    ids = [json.loads(x) for x in translate("\n".join(texts) + "\n", "--beam", "1", "--no-protect", "--json").lines]
    named = align([" ".join(map(str, o["source_ids"])) + "\t" + " ".join(map(str, o["ids"])) for o in ids], "--lexicon",
                  "--ids")[0]
    met = [{x.rpartition(" ")[0] for x in of} for of in (lines, named)]
    assert len(met[0] & met[1]) > 0.8 * len(met[0])  # encoding a translation can give new ids


@test
def a_full_lexicon_drops_rare_pairs():
    rare = [f"{x}\tGuten Morgen" for x in many_lines(40)]
    lines = align(rare + ["Where is my book?\tWo ist mein Buch?"] * 60, "--lexicon")[0]
    few, complaint = align(rare + ["Where is my book?\tWo ist mein Buch?"] * 60, "--lexicon", "--pairs", "64")
    assert len(few) <= 64 < len(lines) and re.search("seen up to [1-9][0-9]* times were dropped", complaint)
    assert "▁Buch ▁book" in {line.rpartition(" ")[0] for line in few}, few


@test
def a_lexicon_is_complete_or_absent():
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "lex")
        command = [ALIGN, "-m", MODEL, "-s", "en", "-t", "de", "--lexicon", "-o", out]
        for lines, status in (b"no tab\n", 4), (b"", 4), (b"book\tBuch\n", 0):
            assert run(command, lines).returncode == status and os.listdir(folder) == ["lex"] * (status == 0)
        assert_refused(command, (f"-i {out}", "would be overwritten"), ("--share 0.5", "cannot be combined with"),
                       (f"-o {folder}/none/lex", "--output is given twice"))
        with open(out, encoding="utf-8") as file:
            assert file.read() == "▁Buch ▁book 1\n"


@test
def stats_go_to_standard_error():
    result = translate("\n".join(LINES) + "\n", "--stats")
    assert len(result.lines) == len(LINES)
    for word in ("source tokens", "target tokens ", "seconds", "target tokens/s", "peak memory", "tokens per visit"):
        assert word in result.complaint, word
    if "device           cpu" in result.complaint:
        assert "experts held" not in result.complaint and "experts fetched" not in result.complaint, result.complaint


@test
def expert_memory_does_not_change_translations():
    data = "\n".join(LINES) + "\n"
    base = translate(data).text
    for size in "600K", "8M", "auto":
        result = translate(data, "--expert-memory", size, "--stats")
        assert result.text == base, size
        assert "experts held" in result.complaint and "experts awaited" in result.complaint, result.complaint
        assert ("experts fetched" in result.complaint) == (size != "auto"), result.complaint
    assert "without experts" in translate(data, "--expert-memory", "8M", "--dry-run").text
    assert "is too small: 2 experts need" in translate(data, "--expert-memory", "100K", status=3).complaint


@test
def expert_memory_holds_gated_experts():
    ids = "\n".join(" ".join(str(10 + (7 * i * i + 31 * k) % 500) for k in range(3 + 5 * i)) for i in range(4)) + "\n"
    options = ["--ids", "--raw-ids", "--max-len", "24"]
    with tempfile.TemporaryDirectory() as folder:
        for experts, slab in ("f32", 24), ("q8", 12), ("q4", 8):
            model = os.path.join(folder, experts + ".bin")
            make = os.path.join(BIN, "moe-make-random")
            assert run([make, "--preset", "hy-mt2-narrow", "--experts", experts, "-o", model]).returncode == 0
            base = run([TRANSLATE, "-m", model, *options], ids)
            assert base.returncode == 0 and len(base.text) > 100, base.complaint
            for slots in 2, 40, 112:
                size = f"{slab * slots}K"
                result = run([TRANSLATE, "-m", model, *options, "--expert-memory", size, "--stats"], ids)
                assert result.text == base.text, (experts, slots)
                assert f" {slots} of 112\n" in result.complaint, result.complaint


@test
def search_options_are_accepted():
    options = ["--beam", "1"], ["--length-penalty", "0"], ["--coverage-penalty", "0.2"], ["--prune", "3"], [
        "--preset", "tf"], ["--max-len", "60"]
    for option in options:
        assert all(translate("\n".join(LINES) + "\n", *option).lines), option


# ---- The same bytes everywhere ------------------------------------------------------------------------------------


@test
def same_bytes_for_any_batch_threads_and_order():
    lines = many_lines(int(os.environ.get("MOE_TEST_LINES", "150" if LONG else "40")))
    data = "\n".join(lines) + "\n"
    base = translate(data, "-q").text
    for option in (["--batch", "1", "--threads", "2"], ["--batch", "7", "--no-mmap"],
                   ["--batch", "64", "--threads", "1"], ["--batch-tokens", "100", "--threads", "3"]):
        assert translate(data, "-q", *option).text == base, option
    order = list(range(len(lines)))
    random.Random(1).shuffle(order)
    shuffled = translate("".join(lines[i] + "\n" for i in order), "-q").lines
    assert dict(zip(order, shuffled)) == dict(enumerate(base.split("\n")[:-1])), "shuffled"


@test
def same_bytes_for_every_instruction_set():
    names = re.search(r"kernels: ([^)]*)\)", run([TRANSLATE, "--version"]).text).group(1).split()
    lines = many_lines(int(os.environ.get("MOE_TEST_LINES", "40" if LONG else "10")))
    base = translate("\n".join(lines) + "\n", "-q", "--json").text.splitlines()
    for name in names:
        n = 4 if name == "portable" and "MOE_TEST_LINES" not in os.environ else len(lines)  # portable is very slow
        result = run(DE + ["-q", "--json", "--isa", name], "\n".join(lines[:n]) + "\n")
        if result.returncode == 2 and "cannot run" in result.complaint:
            continue  # the machine lacks the instruction set
        assert result.text.splitlines() == base[:n], name
        result = run(DE + ["-q", "--json"], lines[0] + "\n", env=dict(os.environ, MOE_ISA=name))
        assert result.text.splitlines() == base[:1], "MOE_ISA=" + name


@test
def self_test_passes():
    for options in [], ["--expert-memory", "2G"]:
        result = run([TRANSLATE, "-m", MODEL, "--self-test", *options])
        assert result.returncode == 0, result.text + result.complaint
        assert re.search(r"^\d+ sentences: \d+ passed, 0 failed", result.text, re.M), result.text


# ---- Bad input ------------------------------------------------------------------------------------------------------

BAD = {
    "invalid UTF-8": b"Good \xff morning",
    "overlong UTF-8": b"Good \xc0\xaf morning",
    "a surrogate": b"Good \xed\xa0\x80 morning",
    "half a character": b"Good \xe2\x82",
    "NUL": b"Good \0 morning",
    "1 MB": b"a" * (1 << 20) + b"b",
    "too many tokens": b"good morning " * 1000,
}


@test
def bad_lines_are_reported_and_the_others_translated():
    before, after = LINES[0].encode(), LINES[1].encode()
    good = translate(before + b"\n" + after + b"\n").lines
    for name, line in BAD.items():
        result = translate(before + b"\n" + line + b"\n" + after + b"\n", "--split", "0", status=1)
        assert result.lines == [good[0], "", good[1]], (name, result.lines)
        assert re.search(r"^moe-translate: line 2: ", result.complaint, re.M), (name, result.complaint)


@test
def truncated_lines_are_reported():
    for name, line in BAD.items():
        if name == "1 MB":
            line = (b"Good morning. " * (1 << 17))
        result = translate(line + b"\n" + LINES[1].encode() + b"\n", "--truncate")
        assert len(result.lines) == 2 and all(result.lines), (name, result.lines)
        assert "line 1: " in result.complaint and "cut" in result.complaint, (name, result.complaint)


@test
def long_lines_are_split_into_sentences():
    sentences = [LINES[i % 5] for i in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0)]
    alone = translate("".join(x + "\n" for x in sentences)).lines
    for options in [], ["--batch", "1"], ["--batch", "2", "--threads", "1"]:
        both = translate("  ".join(sentences) + " \n\n" + LINES[0] + "\n" + " ".join(sentences), *options).lines
        assert both == ["  ".join(alone) + " ", "", alone[0], " ".join(alone)], both  # white space is preserved
    assert translate(" ".join(sentences) + "\n", "--split", "0").lines != [" ".join(alone)]
    assert translate(" ".join(sentences[:2]) + "\n", "--split", "10").lines == [" ".join(alone[:2])]
    assert translate("One. Two. Three. Four. Five. Six.\n").text.count(".") == 6


@test
def overlong_sentences_are_split():
    count = 400 if LONG else 150
    home = "we went home and ate bread with our friends"
    run_of_signs = "abcdefghij" * 1000
    clauses = ", ".join([home] * 60) + "."
    names = ", ".join(f"Maria{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(count))
    wide = "\u4eba\u6c11\u5927\u4f1a" * 300
    text = [clauses, names, f"{LINES[0]} {run_of_signs} {LINES[1]}", wide, run_of_signs * 10, LINES[2]]
    alone = translate(LINES[0] + "\n" + LINES[1] + "\n" + LINES[2] + "\n").lines
    whole = translate("".join(x + "\n" for x in text), status=1)  # parts are left untranslated
    assert len(whole.lines) == 6 and all(whole.lines), whole.lines
    assert whole.lines[2] == f"{alone[0]} {run_of_signs} {alone[1]}", whole.lines[2][:200]
    assert whole.lines[4:] == [run_of_signs * 10, alone[2]]
    assert len(whole.lines[0]) > len(clauses) / 2
    there = re.findall(r"\w+", whole.lines[1])
    assert re.findall(r"\w+", names) == there, set(there) ^ set(re.findall(r"\w+", names))
    assert whole.lines[1].count(",") == count - 1
    complaint = whole.complaint
    assert [complaint.count(f"line {n}: a sentence exceeds the model's limit of 510 tokens") for n in range(1, 7)] == \
        [1, 1, 1, 1, 1, 0], complaint
    assert translate("".join(x + "\n" for x in text), "--batch", "1", "--threads", "1", status=1).lines == whole.lines
    strict = translate(clauses + "\n", "--split", "0", status=1)
    assert "the limit is 510" in strict.complaint
    assert "cut after 510" in translate(clauses + "\n", "--truncate").complaint


@test
def looping_translations_are_retried_in_halves():
    lines = [f"{word} " * (n - 1) + word for word, n in (("adverse", 16), ("apa", 8), ("run", 16))]
    lines += ["ha ha ha ha", "very very very good"]
    text = "".join(x + "\n" for x in lines)
    result, whole = translate(text), translate(text, "--split", "0").lines
    assert all(len(a) < 2 * len(b) + 16 for a, b in zip(result.lines, lines)), result.lines
    assert "was cut" not in result.complaint, result.complaint
    assert result.lines[3:] == whole[3:] and all(a != b for a, b in zip(result.lines[:3], whole[:3]))
    assert translate(text, "--batch", "1", "--threads", "1").lines == result.lines


@test
def capitals_are_translated_as_lower_case():
    alone = translate("The weather is nice today.\nNATO\n").lines
    both = translate("THE WEATHER IS NICE TODAY.\nNATO\n").lines
    assert both == [alone[0].upper(), alone[1]], both
    assert json.loads(translate("THE WEATHER IS NICE TODAY.\n", "--json").lines[0])["translation"] == both[0]


@test
def bad_lines_in_json_have_an_error():
    result = translate(b"\xff\nHello\n", "--json", status=1)
    objects = [json.loads(x) for x in result.lines]
    assert objects[0]["translation"] == "" and "UTF-8" in objects[0]["error"] and "error" not in objects[1]


@test
def invalid_options_are_refused():
    size, split = "expected a size such as 8G, or auto", "--split cannot be combined with"
    assert_refused(
        DE, ("--beam x", "invalid value 'x' for --beam"), ("--beam 0", "value '0' of --beam is out of range"),
        ("--beam 2 --nbest 3", "--nbest 3"), ("--threads -1", "value '-1' of --threads is out of range"),
        ("--nonsense", "unrecognized option '--nonsense'"), ("--batch=", "invalid value '' for --batch"),
        ("--prune nan", "invalid value 'nan' for --prune"), ("--isa nonsense", "'nonsense'"), ("-s xx", "'xx'"),
        ("--min-target -1", "value '-1' of --min-target is out of range"), ("--rerank -1", "value '-1' of --rerank"),
        ("-i a -i b", "--input is given twice"), ("-o a --output b", "--output is given twice"),
        ("-t fr", "--target is given twice"), ("--beam 2 --beam=3", "--beam is given twice"),
        ("--score --split 100", split), ("--prefix --split 100", split), ("--split 10 --json", split),
        ("--split 10 --nbest 2", split), ("--split 10 --ids", split),
        ("--score --prefix", "--score cannot be combined with --prefix"),
        ("--paragraphs --score", "--paragraphs cannot be combined with --score"),
        *((f"--expert-memory {x}", size) for x in ("0", "8", "-1M", "all")),
        *((f"--max-memory={x}", "expected a size such as 512M or 2G")
          for x in ("12", "0M", "-1G", "1T", "M", "", "1MB", "nanM", "1e99G")))
    assert not os.path.exists("a")
    both = " -s en -t de "
    assert_refused(
        [ALIGN, "-m", MODEL], ("-s en", "missing -s LANG and -t LANG"), ("-t de", "missing -s LANG and -t LANG"),
        ("-s en -t xx", "'xx'"),
        (both + "--share 2", "value '2' of --share"), (both + "--share -1", "value '-1' of --share"),
        (both + "word", "unexpected argument 'word'"), (both + "--pairs 100", "--pairs requires --lexicon"),
        (both + "--ids --pretokenized", "--ids cannot be combined with --pretokenized"))
    assert_refused([TRANSLATE], ("", "missing -t LANG"), (f"-m {MODEL}", "missing -t LANG"),
                   (f"-m {MODEL} -t xx", "'xx'; available: en de"))
    assert_refused([INFO], ("", "missing argument"))
    assert_refused([os.path.join(BIN, "moe-score")], ("-m a -m b", "--model is given twice"))


@test
def help_and_version_are_printed():
    for program in (TRANSLATE, INFO, QUANTIZE):
        assert run([program, "--help"]).text.startswith("Usage:") and run([program, "-h"]).returncode == 0
        assert re.search(r"\d\.\d", run([program, "--version"]).text)


@test
def broken_models_are_refused():
    with open(MODEL, "rb") as f:
        whole = f.read()
    with tempfile.TemporaryDirectory() as folder:
        model, out = folder + "/model.bin", folder + "/out"
        header = struct.unpack("<Q", whole[16:24])[0]
        damaged = whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]
        future = whole[:8] + struct.pack("<I", 99) + whole[12:]
        for name, data in (("empty", b""), ("foreign", b"\x7fELF" + bytes(1000)), ("header cut", whole[:50]),
                           ("cut", whole[: header + 4096]), ("longer", whole + b"x"), ("damaged", damaged),
                           ("future", future)):
            with open(model, "wb") as f:
                f.write(data)
            result = run([TRANSLATE, "-m", model, "-t", "de", "-o", out], "Hello\n")
            assert result.returncode == 3, (name, result.returncode)
            assert len(result.complaint.splitlines()) == 1 and "model.bin" in result.complaint, (name, result.complaint)
            assert not result.text and not os.path.exists(out), name
            assert run([INFO, model]).returncode == 3 and run([QUANTIZE, model, out, "f32"]).returncode == 3, name
            assert os.listdir(folder) == ["model.bin"], (name, os.listdir(folder))
        last = bytearray(whole)
        last[-5000] ^= 0x40  # changes a weight, which only the checksum can detect
        with open(model, "wb") as f:
            f.write(last)
        assert run([INFO, "--check", model]).returncode == 3
        assert run([TRANSLATE, "-m", folder, "-t", "de"], "").returncode == 3
        assert run([TRANSLATE, "-m", folder + "/none", "-t", "de"], "").returncode == 3


# ---- Streams ---------------------------------------------------------------------------------------------------------


@test
def any_flipped_bit_is_detected_before_the_first_line():
    """Flip bits in and between tensors. --no-verify skips the checksums; moe-info verifies them with --check."""
    whole = open(MODEL, "rb").read()
    tensors = json.loads(run([INFO, "--json", MODEL]).text)["tensors"]
    ends = [t["offset"] + t["bytes"] for t in tensors]
    gaps = [end for end, t in zip(ends, tensors[1:]) if end < t["offset"]]
    r = random.Random(5)
    with tempfile.TemporaryDirectory() as folder:
        damaged = folder + "/damaged.bin"
        for at in gaps[:5] + [r.randrange(len(whole)) for _ in range(25)] + [ends[0] - 1]:
            with open(damaged, "wb") as f:
                f.write(whole[:at] + bytes([whole[at] ^ 1 << r.randrange(8)]) + whole[at + 1:])
            result = run([TRANSLATE, "-m", damaged, "-t", "de"], "Hello\n")
            assert result.returncode == 3 and result.text == "" and damaged in result.complaint, (at, result)
        assert "checksum" in result.complaint, result
        assert run([INFO, "--check", damaged]).returncode == 3 and run([INFO, damaged]).returncode == 0
        result = run([TRANSLATE, "--no-verify", "-m", damaged, "-t", "de"], "Hello\n")
        assert result.returncode == 0 and result.text.count("\n") == 1, result.complaint


@test
def a_full_disk_is_an_error():
    with open("/dev/full", "wb") as full:
        result = run(DE, "Hello\n", stdout=full)
    assert (result.returncode == 4 and "No space" in result.complaint
            and len(result.complaint.splitlines()) == 1), result.complaint


@test
def a_closed_output_is_an_error():
    result = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh"] + DE, input=b"Hello\n", stderr=subprocess.PIPE,
                            timeout=60)
    assert result.returncode == 4 and b"closed" in result.stderr, result


@test
def a_closed_pipe_is_an_error():
    process = subprocess.Popen(DE + ["-q"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    try:
        process.stdin.write(b"Hello there\n" * 200)
        process.stdin.close()
    except BrokenPipeError:
        pass
    complaint = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 4 and "pipe" in complaint and len(complaint.splitlines()) == 1, complaint


@test
def encodings_are_named():
    for data, word in ((b"caf\xe9 is a good word", "LATIN1"), (b"it\x92s here", "WINDOWS-1252"),
                       (b"\xff\xfeh\0i\0", "UTF-16"), ("a word".encode("utf-16-be"), "UTF-16")):
        assert word in translate(data + b"\n", status=1).complaint, (data, word)
    assert "as in" not in translate(b"Good \xff morning \0\n", status=1).complaint


@test
def documents_and_binary_files_are_refused():
    with tempfile.TemporaryDirectory() as folder:
        source, out = folder + "/in.txt", folder + "/out"
        for ending in ("docx DOCX odt epub pptx xlsx po pot xliff xlf sdlxliff html htm xml json jsonl yaml properties ts "
                       "srt vtt ass csv md").split():
            for option in "-i", "-o":
                path = f"{folder}/a.b.{ending}"
                result = translate("Hello\n", option, path, status=2)
                assert f"{path} is a document: translate it with moe-documents" in result.complaint, result.complaint
        assert os.listdir(folder) == []
        for ending in "txt", "tsv", "de", "text.gz", "docx.txt", "po/none":
            assert translate("Hello\n", "-i", f"{folder}/a.{ending}", status=4).complaint
        translate("Hello\n", "--json", "-o", out + ".jsonl")
        with open(folder + "/a.po", "w") as file:
            file.write("Hello\n")
        assert translate("", "-i", file.name, "--as-text").lines == translate("Hello\n").lines
        os.remove(file.name), os.remove(out + ".jsonl")
        letters = bytes(range(256)) * 8
        for data, words in (
            (b"PK\3\4\x14\0\6\0" + letters, "moe-documents"), (b"PK\3\4", "moe-documents"), (b"%PDF-1.7\n", "PDF"),
            (b"%PDF-2.0\nmore", "PDF"), (b"{\\rtf1\\ansi\n", "RTF"), (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", ".doc"),
            (b"\x1f\x8b\x08\0\0", "gzip -dc"), (b"BZh9\x31\x41\x59\1\2", "bzip2"), (b"\xfd7zXZ\0\0", "xz"),
            (b"\x28\xb5\x2f\xfd\4\x88\0", "zstd"), (b"\x7fELF" + letters, "not text"), (b"\0\1\2\3\4\5\6\7", "not text"),
            (b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" * 9 + letters, "not text"), (letters[::-1], "not text"),
        ):
            result = translate(data, "-o", out, status=2)
            assert words in result.complaint and "standard input is" in result.complaint, (data[:9], result.complaint)
            with open(source, "wb") as file:
                file.write(data)
            assert source in translate("", "-i", source, "-o", out, status=2).complaint
        assert os.listdir(folder) == ["in.txt"]
        for text in ("BZh is a name", "%PDF", "{\\rtf", "PK", "Good \0 morning", "\x1b[1mHello\x1b[0m", "a\fb", ""):
            translate(text.encode() + b"\n", status=int("\0" in text))


@test
def a_hyphen_means_the_standard_stream():
    assert translate("It rains.\n", "-i", "-", "-o", "-").lines == translate("It rains.\n").lines
    assert not os.path.exists("-")


@test
def paragraphs_are_joined():
    text = "\n\nWe have known each other\nfor ten years.\r\n  \nIt\n rains.\n\n"
    joined = "\n\nWe have known each other for ten years.\n\nIt rains.\n\n"
    found = translate(text, "--paragraphs")
    assert found.text == translate(joined).text and len(found.lines) == 6, found.lines
    assert translate("It\nrains.", "--paragraphs").lines == translate("It rains.\n").lines
    for wrapped, joined in (("The inter-\nnational dog.", "The international dog."),
                            ("The out-of-\ndate dog.", "The out-of-date dog."),
                            ("Vor-\nund Nachteile.", "Vor- und Nachteile.")):
        assert translate(wrapped, "--paragraphs").lines == translate(joined + "\n").lines, wrapped
    wrong = translate(b"It rains.\n\nGood\nmo\xff\xffrning\n", "--paragraphs", status=1)
    assert "line 3: " in wrong.complaint and wrong.lines[0] == translate("It rains.\n").lines[0]
    long = "\n".join(["word"] * 300000) + "\n\nIt rains.\n"
    assert "longer than" in translate(long, "--paragraphs", status=1).complaint


@test
def a_missing_input_file_is_an_error():
    assert translate("", "-i", "/nonexistent/file", status=4).complaint
    assert translate("x\n", "-o", "/nonexistent/file", status=4).complaint


@test
def lines_are_answered_before_the_input_ends():
    """Interactive users see the translation of each line as soon as it is complete."""
    process = subprocess.Popen(DE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    expected = translate("\n".join(LINES) + "\n").lines
    try:
        for line, answer in zip(LINES, expected):
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            assert select.select([process.stdout], [], [], 60)[0], "no answer"
            assert process.stdout.readline().decode() == answer + "\n"
        process.stdin.write(b"half a li")  # the rest of the line never arrives
        process.stdin.flush()
        time.sleep(0.2)
        assert not select.select([process.stdout], [], [], 0)[0], "an answer to half a line"
    finally:
        process.stdin.close()
        rest = process.stdout.read()
        process.stdout.close()
    assert process.wait(60) == 0 and rest.count(b"\n") == 1


@test
def bad_lines_do_not_delay_an_interactive_user():
    process = subprocess.Popen(DE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(b"\xff\n\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"\n" and process.stdout.readline() == b"\n"
    process.communicate()
    assert process.returncode == 1


def stopped_by(number, **keywords):
    # The pipes are unbuffered because communicate() would lose the bytes that readline() has read ahead.
    process = subprocess.Popen(DE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                               **keywords)
    process.stdin.write(("\n".join(LINES) + "\n").encode() * 200)  # the whole input fits into a pipe
    first = process.stdout.readline()
    process.send_signal(number)
    out, complaint = process.communicate(timeout=60)
    return process.returncode, first + out, complaint.decode()


@test
def signals_end_the_program_cleanly():
    expected = translate("\n".join(LINES) + "\n").text.encode()
    for number in (signal.SIGINT, signal.SIGTERM):
        status, out, complaint = stopped_by(number)
        assert status == 128 + number, status
        assert out.endswith(b"\n") and (expected * 200).startswith(out), "partial or wrong line"
        assert complaint.count("\n") == 1, complaint


@test
def a_signal_ends_a_wait_for_input():
    process = subprocess.Popen(DE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 128 + signal.SIGINT
    process.communicate()


@test
def progress_is_for_terminals():
    """Progress is shown on stderr, and cleared at the end, if stderr is a terminal and stdout is not."""
    master, slave = pty.openpty()
    data = ("\n".join(LINES) + "\n").encode() * 40
    process = subprocess.Popen(DE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    process.communicate(data, timeout=120)
    shown = b""
    while select.select([master], [], [], 0.5)[0]:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    assert not shown or (b"lines," in shown and shown.endswith(b"\r\x1b[K")), shown
    assert run(DE, data).complaint == ""


def on_terminals(command, text):
    """Run a command on two terminals; return what they receive from standard output and standard error."""
    (out, out_end), (err, err_end) = pty.openpty(), pty.openpty()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out_end, stderr=err_end)
    os.close(out_end), os.close(err_end)
    process.stdin.write(text.encode())
    process.stdin.close()
    shown = {out: b"", err: b""}
    while shown.keys() and (ready := select.select([out, err], [], [], 5)[0]):
        chunks = []
        for end in ready:
            try:
                chunks.append(os.read(end, 65536))
            except OSError:  # the program has closed its end of the pipe
                continue
            shown[end] += chunks[-1]
        if not any(chunks):
            break
    assert process.wait(60) == 0
    os.close(out), os.close(err)
    return shown[out].decode().replace("\r\n", "\n"), shown[err].decode()


@test
def partial_lines_are_shown_on_terminals():
    """Standard output receives only finished lines. Partial lines appear on standard error and are cleared."""
    text = "We have known each other for ten years, and she has been reading since this morning.\n" * 3 + "It rains.\n"
    wanted = run(DE, text).stdout.decode()
    out, err = on_terminals(DE, text)
    assert out == wanted, out
    lines, grown = wanted.splitlines(), re.findall(r"\r([^\r]+)\x1b\[K", err)
    assert grown and all(any(line.startswith(x) for line in lines) for x in grown), err
    assert err.endswith("\r\x1b[K") and "\n" not in err, err
    assert on_terminals([*DE, "-q"], text) == (wanted, "")
    assert on_terminals([*DE, "--json"], "It rains.\n")[1] == ""


@test
def a_full_disk_keeps_whole_lines_in_the_output_file():
    """With -o the program removes an incomplete last line. A limit on the file size simulates a full disk."""
    with tempfile.TemporaryDirectory() as folder:
        out = folder + "/out"
        script = "trap '' XFSZ; ulimit -f 1; exec \"$@\""  # one block is 512 bytes or 1 KiB
        result = run(["bash", "-c", script, "bash"] + DE + ["-q", "-o", out], ("\n".join(LINES) + "\n") * 40)
        with open(out, "rb") as f:
            written = f.read()
        assert result.returncode == 4 and "File too large" in result.complaint, (result.returncode, result.complaint)
        assert written.endswith(b"\n") and len(written) > 300, written[-40:]
        assert "%d complete lines" % written.count(b"\n") in result.complaint, result.complaint


# ---- Files that are written ---------------------------------------------------------------------------------------


ROUTING_LINES = ('{"model":"m","layers":[{"layer":"a","experts":2,"groups":0,"k":1,"gate":"softmax"}]}\n'
                 '{"line":1,"layer":"a","position":0,"id":5,"token":"x","experts":[0],"weights":[1],"empty":false}\n')


def limited(command, blocks=1):
    """Return a command with a limit on file sizes; SIGXFSZ ends a program that does not handle the signal."""
    return ["bash", "-c", 'ulimit -f %d; exec "$@"' % blocks, "bash"] + command


def device(folder, name):
    """Return a new device like /dev/NAME, or /dev/NAME itself without root. Programs must not replace devices."""
    path = folder + "/" + name
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.stat("/dev/" + name).st_rdev)
    except PermissionError:
        return "/dev/" + name
    return path


def wait_until(condition, process):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end and process.poll() is None, "no progress: %s" % process.poll()
        time.sleep(0.001)


@test
def a_file_size_limit_is_an_error_and_leaves_no_file():
    program = os.path.join(BIN, "moe-make-random")
    with tempfile.TemporaryDirectory() as folder:
        out = folder + "/out.bin"
        for command in ([QUANTIZE, MODEL, out, "f16"], [program, "--preset", "small", "-o", out],
                        DE + ["--routing", out], [ROUTING, "-", "-o", out]):
            data = ROUTING_LINES if command[0] == ROUTING else "\n".join(LINES)
            result = run(limited(command, 4), data)
            assert result.returncode == 4 and "too large" in result.complaint and out in result.complaint, result
            assert os.listdir(folder) == [], os.listdir(folder)
        result = run(limited(DE + ["-q", "-o", out]), "\n".join(LINES * 40))
        assert result.returncode == 4 and "too large" in result.complaint, result
        assert open(out, "rb").read().endswith(b"\n")


@test
def links_and_neighbouring_files_are_preserved():
    with tempfile.TemporaryDirectory() as folder:
        out, link, mine = folder + "/out", folder + "/link", folder + "/link.partial"
        os.symlink("out", link)
        open(mine, "w").write("mine")
        for command in ([QUANTIZE, MODEL, link, "q8"], DE + ["--routing", link], [ROUTING, "-", "-o", link]):
            for old in (False, True):
                if old:
                    os.chmod(out, 0o640)
                result = run(command, ROUTING_LINES if command[0] == ROUTING else LINES[0] + "\n")
                assert result.returncode == 0, result.complaint
                assert os.readlink(link) == "out" and os.path.getsize(out) > 100
                if old:
                    assert os.stat(out).st_mode & 0o777 == 0o640
            os.remove(out)
        assert open(mine).read() == "mine" and sorted(os.listdir(folder)) == ["link", "link.partial"]


@test
def devices_and_pipes_are_written_or_refused():
    program = os.path.join(BIN, "moe-make-random")
    with tempfile.TemporaryDirectory() as folder:
        null, full, pipe = device(folder, "null"), device(folder, "full"), folder + "/pipe"
        before = sorted(os.listdir(folder))
        os.mkfifo(pipe)
        for out in (null, pipe):
            for command in ([QUANTIZE, MODEL, out, "q8"], [program, "--preset", "small", "-o", out]):
                result = run(command)
                assert result.returncode == 4 and out in result.complaint, result
                assert "not a regular file" in result.complaint, result
        for command, data in ((DE + ["--routing"], LINES[0]), ([ROUTING, "-", "-o"], ROUTING_LINES)):
            assert run(command + [null], data).returncode == 0
            result = run(command + [full], data)
            assert result.returncode == 4 and full in result.complaint and "No space" in result.complaint, result
            process = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
            result = run(command + [pipe], data)
            assert result.returncode == 0 and len(process.communicate(timeout=60)[0]) > 100, result.complaint
        assert (stat.S_ISCHR(os.stat(null).st_mode) and stat.S_ISCHR(os.stat(full).st_mode)
                and stat.S_ISFIFO(os.stat(pipe).st_mode))
        assert sorted(os.listdir(folder)) == sorted(before + ["pipe"])


@test
def a_signal_leaves_no_temporary_file():
    """The first signal stops a program cleanly; the second ends it immediately, even while it writes a model."""
    program = os.path.join(BIN, "moe-make-random")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # children of nohup or a background shell inherit SIG_IGN
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen(DE + ["--routing", folder + "/routing"], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, bufsize=0)
            process.stdin.write(LINES[0].encode() + b"\n")
            assert process.stdout.readline()
            assert len(os.listdir(folder)) == 1 and not os.path.exists(folder + "/routing")
            process.send_signal(number)
            assert process.wait(60) == 128 + number, process.returncode
            process.communicate()
            assert os.listdir(folder) == []

            process = subprocess.Popen(DE + ["--batch", "64", "--beam", "16", "--nbest", "1", "--routing",
                                             folder + "/routing"],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
            process.stdin.write(("\n".join(many_lines(400)) + "\n").encode())
            wait_until(lambda: os.listdir(folder), process)
            time.sleep(0.3)  # wait until the first batch is being translated
            for _ in range(3):
                process.send_signal(number)
                time.sleep(0.05)
            process.communicate(timeout=60)
            assert process.returncode in (-number, 128 + number), process.returncode
            assert os.listdir(folder) == []

            process = subprocess.Popen([program, "--preset", "paper-32", "-o", folder + "/model.bin"],
                                       stderr=subprocess.DEVNULL)
            wait_until(lambda: os.listdir(folder), process)
            process.send_signal(number)
            assert process.wait(60) == -number, process.returncode
            assert os.listdir(folder) == []


@test
def two_programs_do_not_write_one_output():
    with tempfile.TemporaryDirectory() as folder:
        out = folder + "/out"
        first = subprocess.Popen(DE + ["-o", out], stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
        first.stdin.write(LINES[0].encode() + b"\n")
        wait_until(lambda: os.path.exists(out) and os.path.getsize(out), first)
        second = run(DE + ["-o", out], LINES[1] + "\n")
        assert second.returncode == 4 and out in second.complaint and "another program" in second.complaint, second
        first.stdin.write(LINES[2].encode() + b"\n")
        assert first.communicate(timeout=60) and first.returncode == 0
        assert open(out).read().splitlines() == translate("\n".join((LINES[0], LINES[2]))).lines
        assert run(DE + ["-o", out], LINES[1] + "\n").returncode == 0


# ---- moe-info, moe-quantize ------------------------------------------------------------------------------------------


@test
def info_prints_text_and_json():
    text = run([INFO, "--tensors", MODEL])
    assert text.returncode == 0
    for word in ("languages", "parameters", "encoder 0", "experts", "Tensors"):
        assert word in text.text, word
    whole = json.loads(run([INFO, "--json", MODEL]).text)
    assert whole["file_bytes"] == os.path.getsize(MODEL) and "de" in whole["languages"]
    assert sum(t["parameters"] for t in whole["tensors"]) == whole["parameters"] > whole["parameters_per_token"] > 0
    assert whole["tensors"][-1]["offset"] + whole["tensors"][-1]["bytes"] == whole["file_bytes"]
    assert run([INFO, "--check", MODEL]).returncode == 0
    missing = run([INFO, MODEL + ".none"])
    assert missing.returncode == 3 and "none" in missing.complaint, missing


@test
def quantize_writes_working_models():
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("f32", "f16", "bf16", "q8", "q4", "q3"):
            out = "%s/%s.bin" % (folder, kind)
            result = run([QUANTIZE, MODEL, out, kind])
            assert result.returncode == 0 and "MiB" in result.complaint, result.complaint
            assert json.loads(run([INFO, "--json", "--check", out]).text)["types"].get(kind)
            assert run([TRANSLATE, "-m", out, "-t", "de"], LINES[0] + "\n").text.strip()
            os.remove(out)
        copy = folder + "/copy.bin"
        shutil.copy(MODEL, copy)
        os.symlink(copy, folder + "/link.bin")
        assert run([QUANTIZE, copy, folder + "/link.bin", "f16"]).returncode == 2
        assert run([QUANTIZE, copy, folder + "/x.bin", "q9"]).returncode == 2
        assert run([QUANTIZE, copy, folder + "/no/x.bin", "f16"]).returncode == 4
        assert run([QUANTIZE, folder + "/none.bin", folder + "/x.bin", "f16"]).returncode == 3
        assert sorted(os.listdir(folder)) == ["copy.bin", "link.bin"]


@test
def quantize_measures_and_records_its_loss():
    pairs = ["en\tde\tGood morning!\tGuten Morgen!", "en\tfr\tThank you.\tMerci.",
             "de\ten\tIch habe Zeit.\tI have time."]
    with tempfile.TemporaryDirectory() as folder:
        fine, out, sample = folder + "/f32.bin", folder + "/mixed.bin", folder + "/pairs.tsv"
        open(sample, "w").write("\n".join(pairs) + "\n")
        assert run([QUANTIZE, MODEL, fine, "f32"]).returncode == 0
        result = run([QUANTIZE, fine, out, "q8", "--experts", "q4", "--measure", sample])
        assert result.returncode == 0, result.complaint
        about = json.loads(run([INFO, "--json", "--check", out]).text)
        assert about["types"]["q8"]["tensors"] and about["types"]["q4"]["tensors"], about["types"]
        quality = {k: v for k, v in about["metadata"].items() if k.startswith("quality.")}
        assert quality["quality.sentences"] == 3 and quality["quality.compared_with"] == "f32", quality
        loss = quality["quality.nats_per_token"] - quality["quality.nats_per_token_before"]
        assert 0 < quality["quality.nats_per_token"] < 20 and abs(loss) < 0.5, quality
        assert "nats_per_token" in run([INFO, out]).text
        open(sample, "w").write(pairs[0] + "\nno tabs here\n")
        result = run([QUANTIZE, fine, folder + "/x.bin", "q8", "--measure", sample])
        assert result.returncode == 3 and "line 2" in result.complaint, result.complaint
        assert run([QUANTIZE, fine, folder + "/x.bin", "q8", "--measure", folder + "/none.tsv"]).returncode == 4


if __name__ == "__main__":
    sys.exit(test.run())
