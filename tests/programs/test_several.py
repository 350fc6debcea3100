#!/usr/bin/env python3
"""moe-translate with several models: one model translates a text if it has the direction, else two through a pivot,
with the bytes of two programs joined by a pipe.

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
def a_pivot_writes_what_two_commands_with_a_pipe_write():
    for options in ([], ["--no-protect"], ["--split", "0"], ["--paragraphs"], ["--batch", "1"], ["--threads", "1"],
                    ["--max-len", "24"]):
        status, out, _ = translate(LINES, *PAIR, "-s", "en", "-t", "fr", *options)
        assert (status, out) == piped(LINES, *options)[:2], (options, out)


@test
def more_texts_than_are_under_way_at_once_keep_their_order():
    lines = [f"The {what} is {how}." for what in "house book letter car train table child".split()
             for how in "new old red small good bad here lost".split()] * 3
    text = "\n".join(lines) + "\n"
    status, out, _ = translate(text, *PAIR, "-s", "en", "-t", "fr", "--batch", "2")
    assert status == 0 and out == piped(text)[1]


@test
def a_line_that_cannot_be_translated_is_said_and_left_empty():
    text = b"Good morning.\nbad \xff byte\nzero \0 byte\nGood evening.\n" + b"x" * (1 << 20) + b"y\nThe end.\n"
    status, out, said = translate(text, *PAIR, "-s", "en", "-t", "fr", data=True)
    assert status == 1 and out == piped(text, data=True)[1] and out.count(b"\n") == 6, out
    lines = re.findall(r"line (\d+): (?:en to de: |longer than)", said)
    assert lines == ["2", "3", "5"] and "3 of 6 lines could not be translated" in said, said


@test
def what_is_too_long_for_a_model_is_said():
    options = ["--max-len", "12", "--split", "0"]
    text = "I would like to know when the train to Berlin leaves, please.\nGood morning.\n"
    status, out, said = translate(text, *PAIR, "-s", "en", "-t", "fr", *options)
    assert status == piped(text, *options)[0] + 1 == 1 and "line 1: en to de: " in said, (status, out, said)
    assert out == piped(text, *options)[1] and out.startswith("\n"), out


WAY = [*PAIR, "-s", "en", "-t", "fr"]
SECOND = ["-m", MODELS / "de-fr.bin", "-s", "de", "-t", "fr"]


def between(text, *options):
    return translate(text, "-m", MODELS / "en-de.bin", "-s", "en", "-t", "de", *options)[1]


@test
def hypotheses_are_those_of_the_last_model():
    text = "Where is my book?\nThe <b>weather</b> is {nice} today.\n\nHELLO THERE MY FRIEND\nhouse\n"
    german = between(text, "--split", "0")
    for options in ["--nbest", "2"], ["--force", "20", "--split", "0"], ["--prefix"]:
        lines = [x + "\tLe" if "--prefix" in options and x else x for x in text.splitlines()]
        other = [x + "\tLe" if "--prefix" in options and x else x for x in german.splitlines()]
        found, wanted = translate("\n".join(lines), *WAY, *options), translate("\n".join(other), *SECOND, *options)
        assert found[:2] == wanted[:2], (options, found, wanted)
    found, wanted = (translate(x, *y, "--json", "--nbest", "2") for x, y in ((text, WAY), (german, SECOND)))
    assert found[0] == wanted[0] == 0, found
    for got, want, source, middle in zip(*(x[1].splitlines() for x in (found, wanted)), text.splitlines(),
                                         german.splitlines(), strict=True):
        got, want = json.loads(got), json.loads(want)
        assert got.pop("source") == source and want.pop("source") == got.pop("between", "") == middle, (got, want)
        assert got == want


@test
def ids_and_pieces_are_read_by_the_first_model_and_written_by_the_last():
    sides = []
    for text, way in (("Where is my book?", ["-m", MODELS / "en-de.bin", "-s", "en", "-t", "de"]),
                      (between("Where is my book?", "--no-protect", "--split", "0"), SECOND)):
        sides.append(json.loads(translate(text, *way, "--json", "--no-protect")[1]))
    given, wanted = (" ".join(map(str, side[key])) for side, key in zip(sides, ("source_ids", "ids"), strict=True))
    assert translate(given, *WAY, "--ids")[:2] == (0, wanted + "\n")
    whole = translate(given, "-m", MODELS / "en-de.bin", "-s", "en", "-t", "de", "--ids")[1]
    alone = translate(given, "--models", MODELS, "-s", "en", "-t", "de", "--ids")
    assert alone[:2] == (0, whole), alone  # one model of several
    raw = translate(f"4 {given} 3", *WAY, "--raw-ids")
    assert raw[0] == 0 and re.fullmatch(r"[0-9 ]+ 3\n", raw[1]), raw
    pieces = translate("▁Where ▁is ▁my ▁book ?", *WAY, "--pretokenized")
    assert pieces[0] == 0 and pieces[1].startswith("▁"), pieces
    for options in ["--ids"], ["--force", "20"]:
        found = translate("5", *PAIR, "-t", "fr", "-s", "auto", *options)
        assert found[0] == 2 and not found[1], found


@test
def scores_are_for_one_model():
    line = "Where is my book?\tWo ist mein Buch?\n"
    alone = translate(line, "-m", MODELS / "en-de.bin", "-s", "en", "-t", "de", "--score")
    assert translate(line, "--models", MODELS, "-s", "en", "-t", "de", "--score")[:2] == alone[:2]
    status, out, said = translate(line, *WAY, "--score")
    assert (status, out) == (1, "\n") and "line 1: a translation through another language" in said, said


@test
def every_file_is_tested():
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
def the_direct_model_goes_before_two():
    models = several_models.one_way(TMP / "three", "en-de", "de-fr", "en-fr")
    status, out, said = translate("Where is my book?", "--models", models, "-s", "en", "-t", "fr", "-v")
    alone = translate("Where is my book?", "-m", several_models.SHIPPED, "-s", "en", "-t", "fr")
    assert status == 0 and out == alone[1] and "en-fr.bin" in said and "en-de.bin" not in said, (out, said)


@test
def a_folder_is_its_translation_models():
    """It skips the language model and the classifier."""
    status, out, said = translate("Where is my book?", "--models", ROOT / "models", "-s", "en", "-t", "fr", "-v")
    alone = translate("Where is my book?", "-m", several_models.SHIPPED, "-s", "en", "-t", "fr")
    assert status == 0 and out == alone[1]
    assert said.count(".bin") == 1, said


@test
def a_file_without_languages_is_named_by_them():
    folder = TMP / "names"
    folder.mkdir()
    meta, tensors = small_models.translation()
    for name in "opus-mt-en-fi", "fi-sv":
        small_models.write(folder / f"{name}.bin", meta, tensors)
    _, _, said = translate("a", "--models", folder, "-s", "sv", "-t", "en")
    assert "from sv to en; from sv: nothing; to en: nothing" in said, said
    status, _, said = translate("a", "--models", folder, "-s", "en", "-t", "sv")
    assert status == 3 and "opus-mt-en-fi.bin" in said and "tokeniser" in said, (status, said)
    small_models.write(folder / "model.bin", meta, tensors)
    status, _, said = translate("a", "--models", folder, "-s", "en", "-t", "sv")
    assert status == 3 and "model.bin" in said and "en-de.bin" in said, (status, said)


@test
def no_way_names_what_there_is():
    for options, status, words in (
            (["-s", "en", "-t", "es"], 2, "from en to es; from en: de fr; to es: de fr"),
            (["-s", "fr", "-t", "de"], 2, "from fr to de; from fr: es; to de: en"),
            (["-s", "en", "-t", "pt"], 2, "no model here has the language 'pt'; they have: de fr en es"),
            (["-t", "fr"], 2, "say with -s which language the lines are in; de to fr es; fr to es; en to de fr"),
            (["-s", "en"], 2, "say with -t which language to translate into")):
        found = translate("a", "--models", MODELS, *options)
        assert found[0] == status and words in found[2], (options, found)


@test
def the_only_source_needs_no_name():
    models = several_models.one_way(TMP / "two", "en-de", "en-fr")
    assert translate("Where is my book?", "--models", models, "-t", "fr") == \
        translate("Where is my book?", "--models", models, "-s", "en", "-t", "fr")


@test
def auto_finds_a_way_for_each_line():
    lines = ["Where is my book?", "Wo ist mein Buch?", "Où est mon livre ?", "12"]
    status, out, _ = translate("\n".join(lines), "--models", MODELS, "-s", "auto", "-t", "fr")
    wanted = [piped(lines[0])[1], translate(lines[1], "-m", MODELS / "de-fr.bin", "-s", "de", "-t", "fr")[1],
              lines[2] + "\n", "12\n"]
    assert status == 0 and out == "".join(wanted), (out, wanted)


@test
def terms_of_a_glossary_get_through_both():
    glossary = TMP / "terms.tsv"
    glossary.write_text("book\touvrage\ntrain station\tgare routière\nTom\nMary\tMarielle\n")
    text = "The book is here.\nWhere is the train station?\nTom has my book.\nI know Mary well.\n"
    status, out, said = translate(text, *PAIR, "-s", "en", "-t", "fr", "--glossary", glossary)
    lines = out.splitlines()
    assert status == 0, said
    for line, term in zip(lines, ["ouvrage", "gare routière", "Tom", "Marielle"], strict=True):
        assert term in line, (term, line)
    assert "ouvrage" in lines[2], lines


@test
def the_limit_on_memory_closes_models():
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
def damage_in_a_model_is_an_error_of_the_model():
    models = several_models.one_way(TMP / "damaged", "en-de", "de-fr")
    data = bytearray((models / "de-fr.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (models / "de-fr.bin").write_bytes(data)
    status, out, said = translate("a", "--models", models, "-s", "en", "-t", "fr")
    assert status == 3 and not out and "de-fr.bin" in said, (status, said)
    assert translate("Good morning!", "--models", models, "-s", "en", "-t", "de")[0] == 0  # which is not needed here
    (models / "de-fr.bin").write_bytes(b"something else")
    status, out, said = translate("a", "--models", models, "-s", "en", "-t", "de")
    assert status == 3 and "de-fr.bin" in said, (status, said)


@test
def what_lies_in_a_folder_is_refused_by_name_and_at_once():
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
                       (lambda: path.symlink_to("x.bin"), "x.bin: "),  # systems say it in other words
                       (lambda: path.symlink_to("none"), "No such file"), (cut, "truncated"),
                       (many, "more than 1024 languages")):
        make()
        status, out, said = translate("a", "--models", folder, "-s", "en", "-t", "de")
        assert status == 3 and not out and "x.bin" in said and word in said and said.count("\n") == 1, (word, said)
        path.rmdir() if path.is_dir() else path.unlink()
    for i in range(4096):
        (folder / f"{i}.bin").symlink_to("en-de.bin")
    status, _, said = translate("a", "--models", folder, "-s", "en", "-t", "de")
    assert status == 3 and "odd" in said and "more than 4096 models" in said, said


@test
def what_is_no_model_is_refused_by_name():
    (TMP / "empty").mkdir()
    for options, status, words in (
            (["--models", TMP / "empty"], 3, "empty: there is no translation model (*.bin) in this folder"),
            (["--models", TMP / "nowhere"], 3, "nowhere: No such file"),
            (["-m", MODELS / "en-de.bin", "-m", ROOT / "models" / "lm-en.bin"], 3, "this is no translation model")):
        found = translate("a", *options, "-s", "en", "-t", "de")
        assert found[0] == status and words in found[2], (options, found)
    for option in ["--routing", TMP / "r"], ["--dry-run"], ["--max-memory", "1G"]:
        found = translate("a", *PAIR, "-s", "en", "-t", "fr", *option)
        words = f"{option[0]} cannot be combined with several models"
        assert found[0] == 2 and words in found[2] and not found[1], found
    found = translate("a", "-m", several_models.SHIPPED, "-t", "fr", "--models-memory", "1G")
    assert found[0] == 2 and "--models-memory requires several models" in found[2], found


@test
def no_model_is_overwritten():
    before = (MODELS / "fr-es.bin").read_bytes()
    found = translate("a", "--models", MODELS, "-s", "en", "-t", "fr", "-o", MODELS / "fr-es.bin")
    assert found[0] == 2 and "would be overwritten" in found[2] and (MODELS / "fr-es.bin").read_bytes() == before, found


@test
def a_signal_stops_it():
    (TMP / "long.txt").write_text("I have never seen this man, and I do not know where he lives.\n" * 20000)
    command = [BIN / "moe-translate", *PAIR, "-s", "en", "-t", "fr", "-i", TMP / "long.txt"]
    for seconds in 0.3, 2:  # while models are opened, while they work
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            time.sleep(seconds)
            run.send_signal(signal.SIGINT)
            out, said = run.communicate(timeout=60)
            assert run.returncode == 128 + signal.SIGINT and b"stopped by signal" in said, (run.returncode, said)
            assert out.count(b"\n") < 20000 and (not out or out.endswith(b"\n"))


@test
def moefile_reads_what_the_directions_are():
    """The lists are ordinary metadata, so that a conversion can write them."""
    meta = moefile.read(MODELS / "en-de.bin")[0]
    assert meta["languages.sources"] == ["en"] and meta["languages.targets"] == ["de"]


if __name__ == "__main__":
    sys.exit(test.run())
