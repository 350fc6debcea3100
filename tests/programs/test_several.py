#!/usr/bin/env python3
"""moe-translate with several models. A text is translated by the model for its direction or else by two
models through a pivot language, with the same output as two commands joined by a pipe.

    tests/run tests/programs/test_several.py
"""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import moefile
import several_models
import small_models
from suite import Suite

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / os.environ.get("BIN", ".")
TEMPORARY = tempfile.TemporaryDirectory()
TMP = pathlib.Path(TEMPORARY.name)
MODELS = several_models.one_way(TMP / "models", "en-de", "de-fr", "fr-es")
FAST = ["--beam", "2", "--rerank", "0"]
PAIR = ["-m", MODELS / "en-de.bin", "-m", MODELS / "de-fr.bin"]
test = Suite()


def translate(text, *options, data=False):
    done = subprocess.run([BIN / "moe-translate", *FAST, *options], input=text if data else text.encode(),
                          capture_output=True, check=False, timeout=300)
    return done.returncode, done.stdout if data else done.stdout.decode(), done.stderr.decode()


def piped(text, *options, data=False):
    first = translate(text, "-m", MODELS / "en-de.bin", "-s", "en", "-t", "de", *options, data=data)
    return translate(first[1], "-m", MODELS / "de-fr.bin", "-s", "de", "-t", "fr", *options, data=data)


LINES = """Good morning, my friend. Where is my book?
The <b>weather</b> is {nice} today.

HELLO THERE MY FRIEND
See https://example.com/x, or write to a@b.org for 12.50 EUR.
  indented
name\tvalue\tGood evening
house
I have never seen this man. He came to my house yesterday, and he said that he knows you. What do you think?
{count, plural, one {There is one book.} other {There are # books.}}
{count, plural,
  one {There is one book.}
  other {There are # books.}
}
The end."""


@test
def a_pivot_equals_two_commands_joined_by_a_pipe():
    for options in ([], ["--no-protect"], ["--split", "0"], ["--paragraphs"], ["--batch", "1"], ["--threads", "1"],
                    ["--max-len", "24"]):
        status, out, _ = translate(LINES, *PAIR, "-s", "en", "-t", "fr", *options)
        assert (status, out) == piped(LINES, *options)[:2], (options, out)


@test
def many_texts_keep_their_order():
    lines = [f"The {what} is {how}." for what in "house book letter car train table child".split()
             for how in "new old red small good bad here lost".split()] * 3
    text = "\n".join(lines) + "\n"
    status, out, _ = translate(text, *PAIR, "-s", "en", "-t", "fr", "--batch", "2")
    assert status == 0 and out == piped(text)[1]


@test
def invalid_lines_are_reported_and_left_empty():
    text = b"Good morning.\nbad \xff byte\nzero \0 byte\nGood evening.\n" + b"x" * (1 << 20) + b"y\nThe end.\n"
    status, out, log = translate(text, *PAIR, "-s", "en", "-t", "fr", data=True)
    assert status == 1 and out == piped(text, data=True)[1] and out.count(b"\n") == 6, out
    lines = re.findall(r"line (\d+): (?:en to de: |longer than)", log)
    assert lines == ["2", "3", "5"] and "3 of 6 lines could not be translated" in log, log


@test
def overlong_lines_are_reported():
    options = ["--max-len", "12", "--split", "0"]
    text = "I would like to know when the train to Berlin leaves, please.\nGood morning.\n"
    status, out, log = translate(text, *PAIR, "-s", "en", "-t", "fr", *options)
    assert status == piped(text, *options)[0] + 1 == 1 and "line 1: en to de: " in log, (status, out, log)
    assert out == piped(text, *options)[1] and out.startswith("\n"), out


THROUGH = [*PAIR, "-s", "en", "-t", "fr"]
SECOND = ["-m", MODELS / "de-fr.bin", "-s", "de", "-t", "fr"]


def between(text, *options):
    return translate(text, "-m", MODELS / "en-de.bin", "-s", "en", "-t", "de", *options)[1]


@test
def the_last_model_gives_the_hypotheses():
    text = "Where is my book?\nThe <b>weather</b> is {nice} today.\n\nHELLO THERE MY FRIEND\nhouse\n"
    german = between(text, "--split", "0")
    for options in ["--nbest", "2"], ["--force", "20", "--split", "0"], ["--prefix"]:
        lines = [x + "\tLe" if "--prefix" in options and x else x for x in text.splitlines()]
        other = [x + "\tLe" if "--prefix" in options and x else x for x in german.splitlines()]
        found, wanted = translate("\n".join(lines), *THROUGH, *options), translate("\n".join(other), *SECOND, *options)
        assert found[:2] == wanted[:2], (options, found, wanted)
    found, wanted = (translate(x, *y, "--json", "--nbest", "2") for x, y in ((text, THROUGH), (german, SECOND)))
    assert found[0] == wanted[0] == 0, found
    for got, want, source, middle in zip(*(x[1].splitlines() for x in (found, wanted)), text.splitlines(),
                                         german.splitlines(), strict=True):
        got, want = json.loads(got), json.loads(want)
        assert got.pop("between_model", "en-de") == "en-de" and got.get("model", "de-fr") == "de-fr", got
        assert got.pop("source") == source and want.pop("source") == got.pop("between", "") == middle, (got, want)
        want.pop("confidence", None)  # the probability for the pivot's text, not for the source
        assert got == want, (got, want)


@test
def ids_and_pieces_belong_to_the_first_and_last_model():
    sides = []
    for text, way in (("Where is my book?", ["-m", MODELS / "en-de.bin", "-s", "en", "-t", "de"]),
                      (between("Where is my book?", "--no-protect", "--split", "0"), SECOND)):
        sides.append(json.loads(translate(text, *way, "--json", "--no-protect")[1]))
    given, wanted = (" ".join(map(str, side[key])) for side, key in zip(sides, ("source_ids", "ids"), strict=True))
    assert translate(given, *THROUGH, "--ids")[:2] == (0, wanted + "\n")
    whole = translate(given, "-m", MODELS / "en-de.bin", "-s", "en", "-t", "de", "--ids")[1]
    alone = translate(given, "--models", MODELS, "-s", "en", "-t", "de", "--ids")
    assert alone[:2] == (0, whole), alone  # only one model of the folder is used
    raw = translate(f"4 {given} 3", *THROUGH, "--raw-ids")
    assert raw[0] == 0 and re.fullmatch(r"[0-9 ]+ 3\n", raw[1]), raw
    pieces = translate("▁Where ▁is ▁my ▁book ?", *THROUGH, "--pretokenized")
    assert pieces[0] == 0 and pieces[1].startswith("▁"), pieces


@test
def scores_require_one_model():
    line = "Where is my book?\tWo ist mein Buch?\n"
    alone = translate(line, "-m", MODELS / "en-de.bin", "-s", "en", "-t", "de", "--score")
    assert translate(line, "--models", MODELS, "-s", "en", "-t", "de", "--score")[:2] == alone[:2]
    status, out, log = translate(line, *THROUGH, "--score")
    assert (status, out) == (1, "\n") and "line 1: a translation through a pivot language" in log, log


@test
def the_self_test_covers_each_model():
    for model in several_models.SHIPPED.parent, TMP / "copies":
        if model.name == "copies":
            model.mkdir()
            for name in "a.bin", "b.bin":
                (model / name).symlink_to(several_models.SHIPPED)
        found = subprocess.run([BIN / "moe-translate", "--self-test", "--models", model], capture_output=True,
                               check=False, text=True, timeout=300)
        count = 2 if model.name == "copies" else 1
        assert found.returncode == 0 and found.stdout.count(", 0 failed") == count, found
        assert found.stdout.count(".bin\n") == count, found.stdout


@test
def direct_models_are_preferred():
    models = several_models.one_way(TMP / "three", "en-de", "de-fr", "en-fr")
    status, out, log = translate("Where is my book?", "--models", models, "-s", "en", "-t", "fr", "-v")
    alone = translate("Where is my book?", "-m", several_models.SHIPPED, "-s", "en", "-t", "fr")
    assert status == 0 and out == alone[1] and "en-fr.bin" in log and "en-de.bin" not in log, (out, log)


@test
def a_folder_gives_its_translation_models():
    """A folder's language models and classifiers are skipped."""
    status, out, log = translate("Where is my book?", "--models", ROOT / "models", "-s", "en", "-t", "fr", "-v")
    alone = translate("Where is my book?", "-m", several_models.SHIPPED, "-s", "en", "-t", "fr")
    assert status == 0 and out == alone[1]
    assert log.count(".bin") == 1, log


@test
def file_names_give_missing_languages():
    folder = TMP / "names"
    folder.mkdir()
    meta, tensors = small_models.translation()
    for name in "opus-mt-en-fi", "fi-sv":
        small_models.write(folder / f"{name}.bin", meta, tensors)
    _, _, log = translate("a", "--models", folder, "-s", "sv", "-t", "en")
    assert "from sv to en; from sv: nothing; to en: nothing" in log, log
    status, _, log = translate("a", "--models", folder, "-s", "en", "-t", "sv")
    assert status == 3 and "opus-mt-en-fi.bin" in log and "tokeniser" in log, (status, log)
    small_models.write(folder / "model.bin", meta, tensors)
    status, _, log = translate("a", "--models", folder, "-s", "en", "-t", "sv")
    assert status == 3 and "model.bin" in log and "en-de.bin" in log, (status, log)


@test
def missing_directions_list_the_available_ones():
    for options, status, words in (
            (["-s", "en", "-t", "es"], 2, "from en to es; from en: de fr; to es: de fr"),
            (["-s", "fr", "-t", "de"], 2, "from fr to de; from fr: es; to de: en"),
            (["-s", "en", "-t", "pt"], 2, "no model has the language 'pt'; available: de fr en es"),
            (["-t", "fr"], 2, "missing -s LANG (source language); available: de to fr es; fr to es; en to de fr"),
            (["-s", "en"], 2, "missing -t LANG (target language)")):
        found = translate("a", "--models", MODELS, *options)
        assert found[0] == status and words in found[2], (options, found)


@test
def the_only_source_language_is_the_default():
    models = several_models.one_way(TMP / "two", "en-de", "en-fr")
    assert translate("Where is my book?", "--models", models, "-t", "fr") == \
        translate("Where is my book?", "--models", models, "-s", "en", "-t", "fr")


@test
def auto_selects_models_for_each_line():
    lines = ["Where is my book?", "Wo ist mein Buch?", "Où est mon livre ?", "12"]
    status, out, _ = translate("\n".join(lines), "--models", MODELS, "-s", "auto", "-t", "fr")
    wanted = [piped(lines[0])[1], translate(lines[1], "-m", MODELS / "de-fr.bin", "-s", "de", "-t", "fr")[1],
              lines[2] + "\n", "12\n"]
    assert status == 0 and out == "".join(wanted), (out, wanted)


@test
def terms_of_a_glossary_pass_both_models():
    glossary = TMP / "terms.tsv"
    glossary.write_text("book\touvrage\ntrain station\tgare routière\nTom\nMary\tMarielle\n")
    text = "The book is here.\nWhere is the train station?\nTom has my book.\nI know Mary well.\n"
    status, out, log = translate(text, *PAIR, "-s", "en", "-t", "fr", "--glossary", glossary)
    lines = out.splitlines()
    assert status == 0, log
    for line, term in zip(lines, ["ouvrage", "gare routière", "Tom", "Marielle"], strict=True):
        assert term in line, (term, line)
    assert "ouvrage" in lines[2], lines


@test
def the_memory_limit_closes_models():
    least = translate("a", *PAIR, "-s", "en", "-t", "fr", "--batch", "2", "--models-memory", "1K")
    need = float(re.search(r"need ([0-9.]+) MiB, which is more than models-memory allows", least[2])[1])
    assert least[0] == 3 and 26 < need < 60, least
    text = "Where is my book?\n" * 3 + "The house is new.\n" * 40
    wanted = translate(text, *PAIR, "-s", "en", "-t", "fr", "--batch", "2", "--stats")
    limited = translate(text, *PAIR, "-s", "en", "-t", "fr", "--batch", "2", "--stats", "--models-memory", "45M")
    assert wanted[0] == limited[0] == 0 and wanted[1] == limited[1]
    sessions = [float(re.search(r"resident, ([0-9.]+) MiB", x[2])[1]) for x in (wanted, limited)]
    tokens = [re.search(r"target tokens +(\d+)", x[2])[1] for x in (wanted, limited)]
    assert abs(sessions[0] - 2 * sessions[1]) < 0.2 and tokens[0] == tokens[1], (sessions, tokens)


@test
def damaged_models_are_reported():
    models = several_models.one_way(TMP / "damaged", "en-de", "de-fr")
    data = bytearray((models / "de-fr.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (models / "de-fr.bin").write_bytes(data)
    status, out, log = translate("a", "--models", models, "-s", "en", "-t", "fr")
    assert status == 3 and not out and "de-fr.bin" in log, (status, log)
    assert translate("Good morning!", "--models", models, "-s", "en", "-t", "de")[0] == 0  # needs only en-de.bin
    (models / "de-fr.bin").write_bytes(b"something else")
    status, out, log = translate("a", "--models", models, "-s", "en", "-t", "de")
    assert status == 3 and "de-fr.bin" in log, (status, log)


@test
def invalid_files_in_a_folder_are_refused_by_name():
    folder = several_models.one_way(TMP / "odd", "en-de")
    path = folder / "x.bin"
    meta, tensors = small_models.translation()
    codes = [f"x{i:x}" for i in range(1 << 16)]

    def cut():
        path.write_bytes((folder / "en-de.bin").read_bytes()[:5000])

    def many():
        small_models.write(path, {**meta, "languages.sources": codes, "languages.targets": ["en"]}, tensors)
    for make, word in ((lambda: os.mkfifo(path), "not a regular file"), (path.mkdir, "not a regular file"),
                       (path.touch, "empty"), (lambda: path.symlink_to("/dev/zero"), "not a regular file"),
                       (lambda: path.symlink_to("x.bin"), "x.bin: "),  # the message of ELOOP depends on the system
                       (lambda: path.symlink_to("none"), "No such file"), (cut, "truncated"),
                       (many, "more than 1024 languages")):
        make()
        status, out, log = translate("a", "--models", folder, "-s", "en", "-t", "de")
        assert status == 3 and not out and "x.bin" in log and word in log and log.count("\n") == 1, (word, log)
        path.rmdir() if path.is_dir() else path.unlink()
    for i in range(4096):
        (folder / f"{i}.bin").symlink_to("en-de.bin")
    status, _, log = translate("a", "--models", folder, "-s", "en", "-t", "de")
    assert status == 3 and "odd" in log and "more than 4096 models" in log, log


@test
def pairs_of_an_icu_message_stay_lines():
    lines = "{n, plural, one {# book}\tDas\nother {# books}}\tDie\n"
    status, out, complaint = translate(lines, "--models", MODELS, "-s", "en", "-t", "de", "--prefix")
    assert status == 0 and [x[:3] for x in out.splitlines()] == ["Das", "Die"], (out, complaint)


@test
def invalid_options_are_refused():
    (TMP / "empty").mkdir()
    german, combined = ["-s", "en", "-t", "de"], "cannot be combined with several models"
    for options, status, message in (
            (["--models", TMP / "empty", *german], 3, "empty: no translation model (*.bin) in this folder"),
            (["--models", TMP / "nowhere", *german], 3, "nowhere: No such file"),
            (["-m", MODELS / "en-de.bin", "-m", ROOT / "models" / "lm-en.bin", *german], 3,
             "lm-en.bin: not a translation model"),
            ([*THROUGH, "--routing", TMP / "r"], 2, f"--routing {combined}"),
            ([*THROUGH, "--dry-run"], 2, f"--dry-run {combined}"),
            ([*THROUGH, "--max-memory", "1G"], 2, f"--max-memory {combined}"),
            (["-m", several_models.SHIPPED, "-t", "fr", "--models-memory", "1G"], 2, "requires several models"),
            ([*PAIR, "-t", "fr", "-s", "auto", "--ids"], 2, "auto"),
            ([*THROUGH, "--isa", "none"], 2, "en-de.bin: isa: unknown kernels 'none'"),
            ([*THROUGH, "--style", "formal"], 2, "en-de.bin: style: style requires a prompted model"),
            ([*PAIR, "-s", "en", "-t", "xx"], 2, "no model has the language 'xx'"),
            ([*PAIR, "-t", "fr", "-s", "auto", "--force", "20"], 2, "force requires a source language")):
        found = translate("5", *options)
        assert found[0] == status and not found[1] and message in found[2], (options, found)


@test
def models_are_not_overwritten():
    before = (MODELS / "fr-es.bin").read_bytes()
    found = translate("a", "--models", MODELS, "-s", "en", "-t", "fr", "-o", MODELS / "fr-es.bin")
    assert found[0] == 2 and "would be overwritten" in found[2] and (MODELS / "fr-es.bin").read_bytes() == before, found


@test
def a_signal_stops_the_program():
    (TMP / "long.txt").write_text("I have never seen this man, and I do not know where he lives.\n" * 20000)
    command = [BIN / "moe-translate", *PAIR, "-s", "en", "-t", "fr", "-i", TMP / "long.txt"]
    for seconds in 0.3, 2:  # while opening models and while translating
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            time.sleep(seconds)
            run.send_signal(signal.SIGINT)
            out, log = run.communicate(timeout=60)
            assert run.returncode == 128 + signal.SIGINT and b"stopped by signal" in log, (run.returncode, log)
            assert out.count(b"\n") < 20000 and (not out or out.endswith(b"\n"))


@test
def moefile_reads_the_directions():
    """The lists of languages are ordinary metadata, which convert.py can write."""
    meta = moefile.read(MODELS / "en-de.bin")[0]
    assert meta["languages.sources"] == ["en"] and meta["languages.targets"] == ["de"]


if __name__ == "__main__":
    sys.exit(test.run())
