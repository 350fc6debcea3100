#!/usr/bin/env python3
"""Test tools/train/backtranslation.py with a fake moe-translate: which text it back-translates, and which results it
keeps.

Usage: tests/python tests/train/test_backtranslation.py

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""
import os
import sys
import tempfile

import backtranslation as back
from suite import Suite

test = Suite()
PROGRAM = """
import sys
sys.stdin.reconfigure(encoding="utf-8"), sys.stdout.reconfigure(encoding="utf-8")
o = dict(zip(sys.argv[1:], [*sys.argv[2:], ""]))
lines = sys.stdin.read().split("\\n")[:-1]
def answer(line):
    if "--score" not in o:
        return "" if "unusable" in line else o["-t"] + " " + line
    source, target = line.split("\\t")
    if "unscored" in target:
        return ""
    assert o["-t"] == "en" and source.endswith(" " + target), line
    return f"{-len(target) * (5 if 'unlikely' in target else 1)}\\t{len(target)}"
sys.stdout.writelines(answer(x) + "\\n" for x in lines)
sys.exit(STATUS)
"""
WHOLE = "This sentence is as long as it has to be."


def made(tables, likely=1.0, rows=100, status=1):
    before, back.LIKELY = back.LIKELY, likely
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "translate")
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"#!{sys.executable}" + PROGRAM.replace("STATUS", str(status)))
            os.chmod(path, 0o755)
            return back.back_tables(tables, "model.bin", rows, 1, path, log=lambda _: None)
    finally:
        back.LIKELY = before


@test
def missing_cells_are_translated_from_english():
    another, third = "Another " + WHOLE, "A third " + WHOLE
    found = made({"books": {"en": [WHOLE, "Too short."], "es": ["Español.", "Corto."]},
                  "europarl.en-fr": {"en": [another, "Alone " + WHOLE], "fr": ["Français.", ""]},
                  "wikipedia": {"en": [third], "de": ["Deutsch."], "es": ["Tercero."], "fr": [""]}})
    rows = {name: {en: dict(zip(table, cells)) for en, *cells in zip(table["en"], *table.values())}
            for name, table in found.items()}
    assert rows == {
        "back.de": {WHOLE: {"en": WHOLE, "de": "de " + WHOLE, "es": "Español.", "fr": ""},
                    another: {"en": another, "de": "de " + another, "es": "", "fr": "Français."}},
        "back.fr": {WHOLE: {"en": WHOLE, "de": "", "es": "Español.", "fr": "fr " + WHOLE},
                    third: {"en": third, "de": "Deutsch.", "es": "Tercero.", "fr": "fr " + third}},
        "back.es": {another: {"en": another, "fr": "Français.", "es": "es " + another}}}, rows


@test
def only_whole_sentences_of_fitting_length_are_used():
    cells = [WHOLE[:-1], "A" + "a" * back.LONGEST + ".", "a" * (back.SHORTEST - 2) + ".", "", WHOLE]
    assert made({"books": {"en": cells, "es": ["x"] * 5}})["back.de"]["en"] == [WHOLE]
    assert made({"apps": {"en": cells, "es": ["x"] * 5}}) == {}  # the corpus "apps" is not back-translated


@test
def failed_and_improbable_translations_are_dropped():
    likely = "A likely " + WHOLE[:-1] * 4 + "."
    cells = ["An unscored " + WHOLE, WHOLE, "An unusable " + WHOLE, "An unlikely " + WHOLE, likely]
    table = made({"books": {"en": cells, "es": ["x"] * 5}}, likely=2 / 3)["back.fr"]
    assert sorted(table["en"]) == [likely, WHOLE], table
    assert table["fr"] == ["fr " + x for x in table["en"]]
    assert len(made({"books": {"en": [WHOLE, "A " + WHOLE], "es": ["x"] * 2}}, rows=1)["back.fr"]["en"]) == 1


@test
def a_program_that_fails_is_an_error():
    try:
        made({"books": {"en": [WHOLE], "es": ["x"]}}, status=3)
    except SystemExit as error:
        assert "exit status 3" in str(error)
    else:
        raise AssertionError("no error was reported")


if __name__ == "__main__":
    sys.exit(test.run())
