#!/usr/bin/env python3
"""Test moe-evaluate: scores equal sacreBLEU's, for files and tables; errors name the file and line.

Usage: tests/python tests/package/test_evaluate.py      (BIN is the folder of the programs)
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import sacrebleu
from suite import Suite

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("BIN", ".") / "moe-evaluate"
test = Suite()
REFERENCE = ["Das Wetter ist heute schön.", "Wo ist der Bahnhof, bitte?", "Sie hat drei Hunde und eine Katze."] * 20
SYSTEM = ["Das Wetter ist heute gut.", "Wo ist der Bahnhof?", "Sie hat drei Hunde und eine Katze."] * 20
WORSE = ["Wetter heute gut.", "Der Bahnhof wo ist?", "Drei Hunde und Katze."] * 20


def run(files, *options, status=0, data=""):
    """Run the program with files given as name -> lines or text; return its output or its only message."""
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in files.items():
            text = lines if isinstance(lines, (str, bytes)) else "".join(line + "\n" for line in lines)
            pathlib.Path(folder, name).write_bytes(text if isinstance(text, bytes) else text.encode())
        done = subprocess.run([PROGRAM, *options], input=data, capture_output=True, text=True, cwd=folder)
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    assert not status or done.stderr.startswith("moe-evaluate: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr if status else done.stdout


def scores(texts, lower=False, order=0):
    bleu, chrf = sacrebleu.BLEU(lowercase=lower), sacrebleu.CHRF(lowercase=lower, word_order=order)
    return bleu.corpus_score(texts, [REFERENCE]).score, chrf.corpus_score(texts, [REFERENCE]).score


def found(files, *options, **more):
    said = json.loads(run(files, "--json", *options, **more))
    return said, [(x["bleu"], x["chrf"]) for x in said["systems"]]


@test
def scores_equal_those_of_sacrebleu():
    files = {"r": REFERENCE, "a": SYSTEM, "b": WORSE}
    said, rows = found(files, "r", "a", "b")
    assert rows == [scores(SYSTEM), scores(WORSE)] and said["sentences"] == 60 and said["reference"] == "r", said
    assert [x["name"] for x in said["systems"]] == ["a", "b"] and said["systems"][1]["p"] < 0.01 and "p" not in said["systems"][0]
    assert f"version:{sacrebleu.__version__}" in said["signatures"]["bleu"], said
    shown = run(files, "r", "a", "b").splitlines()
    assert shown[1].split() == ["a", *(f"{x:.2f}" for x in scores(SYSTEM))], shown
    assert found(files, "r", "-", data="\n".join(SYSTEM))[1] == rows[:1]
    equal = found({"r": REFERENCE, "a": SYSTEM, "b": SYSTEM}, "r", "a", "b")[0]["systems"]
    assert equal[1]["p"] == 1, equal  # sacreBLEU's test would say 0.001
    upper = {"r": REFERENCE, "a": [line.upper() for line in SYSTEM]}
    assert found(upper, "r", "a", "--lower-case", "--word-order", "2")[1] == [scores(SYSTEM, True, 2)]
    same = found({"r": "\ufeff" + "\r\n".join(REFERENCE) + "\r\n", "a": SYSTEM}, "r", "a")[1]
    assert same == rows[:1]  # a byte order mark and CRLF line ends have no effect
    chinese = {"r": ["我们明天去学校。"] * 3, "a": ["我们今天去学校。"] * 3}
    plain, split = found(chinese, "r", "a")[1][0][0], found(chinese, "r", "a", "-t", "zh_Hans")[1][0][0]
    assert split > plain, (plain, split)


@test
def columns_of_tables_are_chosen_by_name_or_number():
    def table(*columns, names=None):
        return {"t.tsv": ["\t".join(row) for row in ([names] if names else []) + list(zip(*columns, strict=True))]}

    source, wanted, worse = ["x"] * 60, [scores(SYSTEM)], [scores(WORSE)]
    for columns, names, options, result in (
        ((REFERENCE, SYSTEM), None, [], wanted),
        ((REFERENCE, SYSTEM), ("de", "moe"), ["-r", "de"], wanted),
        ((REFERENCE, SYSTEM), ("de", "mt"), [], wanted),
        ((SYSTEM, REFERENCE), ("translation", "reference"), [], wanted),
        ((SYSTEM, REFERENCE), None, ["-r", "2"], wanted),
        ((REFERENCE, SYSTEM), ("Reference", "Marian 1.12"), [], wanted),
        ((source, REFERENCE, SYSTEM, WORSE), ("source", "ref", "mt", "system2"), [], wanted + worse),
        ((source, REFERENCE, SYSTEM, WORSE), None, ["-r", "2", "-c", "4"], worse),
        ((source, WORSE, REFERENCE, SYSTEM), ("en", "Google", "Human", "moe"), ["-r", "human", "-c", "moe,google"],
         wanted + worse),
    ):
        said, rows = found(table(*columns, names=names), "t.tsv", *options)
        assert rows == result and said["sentences"] == 60, (names, options, said)
    three = table(source, REFERENCE, SYSTEM)
    assert "select the reference" in run(three, "t.tsv", status=2)
    assert "no column 'nope'; available: 1 to 3" in run(three, "t.tsv", "-r", "nope", status=4)
    assert "no column '9'" in run(three, "t.tsv", "-r", "1", "-c", "9", status=4)


@test
def a_full_or_closed_output_is_an_error():
    files = {"r": REFERENCE, "a": SYSTEM}
    for redirected, options in (">/dev/full", "r a"), (">/dev/full", "--help"), (">/dev/full", "-V"), (">&-", "r a"):
        with tempfile.TemporaryDirectory() as folder:
            for name, lines in files.items():
                pathlib.Path(folder, name).write_text("\n".join(lines))
            done = subprocess.run(["sh", "-c", f"{PROGRAM} {options} {redirected}"], cwd=folder, capture_output=True,
                                  text=True)
        reason = "closed" if "-" in redirected else "No space left on device"
        assert (done.returncode, done.stderr) == (4, f"moe-evaluate: standard output: {reason}\n"), (options, done)


@test
def errors_name_the_file_and_line():
    files = {"r": REFERENCE, "short": SYSTEM[:-1], "empty": "", "bad": b"a\nb\xff\n", "t.tsv": ["a\tb", "a\tb\tc"]}
    for arguments, status, said in (
        (["r", "short"], 4, "short has 59 lines, but r has 60"),
        (["r", "empty"], 4, "empty is empty"),
        (["r", "none"], 4, "none: No such file"),
        (["bad", "r"], 4, "bad: line 2 is not valid UTF-8"),
        (["t.tsv"], 4, "line 2 has 3 columns, but line 1 has 2"),
        (["r"], 4, "line 1 has no TAB"),
        (["r", "r", "-r", "1"], 2, "require one TABLE"),
        (["-", "-"], 2, "twice"),
        ([], 2, "--help"),
        (["r", "r", "--no-such-option"], 2, "--no-such-option"),
    ):
        assert said in run(files, *arguments, status=status), (arguments, run(files, *arguments, status=status))


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:]))
