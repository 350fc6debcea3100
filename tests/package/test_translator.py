#!/usr/bin/env python3
"""tools/python/moe_translate.Translator: the same bytes as moe-translate, errors as exceptions, bounded memory.

Usage: tests/python tests/package/test_translator.py      (BIN: where programs and libmoetext are)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import ctypes
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / os.environ.get("BIN", ".")
os.environ["MOE_LIBRARY"] = str(BIN / ("libmoetext.dylib" if sys.platform == "darwin" else "libmoetext.so"))

import pyarrow  # noqa: E402
from moe_translate import Model, MoeError, TextError, Translator, cached, options, version  # noqa: E402
from moe_translate import library  # noqa: E402
from suite import Suite  # noqa: E402

test = Suite()
MODEL = ROOT / "models/en-de-fr-es.bin"
LINES = [
    "Where is my book?",
    "",
    "She has been reading since this morning.",
    "Good morning! How are you?",
    "  12  ",
    "It rains.",
    "One sentence. Another one! " * 12,
    "We have known each other for ten years.",
] * 3
FAST = {"beam": 2, "rerank": 0, "threads": 1}


def fails(status, action, *arguments, **named):
    """The MoeError that an action ends with."""
    try:
        action(*arguments, **named)
    except MoeError as error:
        assert error.status == status, (error.status, str(error))
        return error
    raise AssertionError(f"no MoeError, {status!r} is wanted")


@test
def structures_are_those_of_the_header():
    mirrors = {
        "moe_error": library.Error,
        "moetext_option_info": library.OptionInfo,
        "moetext_request": library.Request,
        "moetext_link": library.Link,
        "moetext_hypothesis": library.Hypothesis,
        "moetext_result": library.Result,
        "moetext_rows": library.Rows,
    }
    lines = [f'printf("{name} %zu\\n", sizeof({name}));' for name in mirrors]
    lines += [
        f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));'
        for name, mirror in mirrors.items()
        for field in mirror._fields_
    ]
    wanted = [f"{name} {ctypes.sizeof(mirror)}" for name, mirror in mirrors.items()]
    wanted += [
        f"{name}.{field[0]} {getattr(mirror, field[0]).offset}"
        for name, mirror in mirrors.items()
        for field in mirror._fields_
    ]
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "sizes.c"
        source.write_text(
            '#include "tools/text/moetext.h"\n#include <stdio.h>\nint main(void) {\n' + "\n".join(lines) + "}\n"
        )
        compiler = os.environ.get("CC", "cc").split()
        subprocess.run([*compiler, f"-I{ROOT}", str(source), "-o", f"{folder}/sizes"], check=True)
        assert subprocess.run([f"{folder}/sizes"], stdout=subprocess.PIPE, text=True).stdout.splitlines() == wanted


@test
def bytes_are_those_of_moe_translate():
    command = [str(BIN / "moe-translate"), "-q", "-m", str(MODEL), "-t", "fr", "--beam", "2", "--rerank", "0"]
    out = subprocess.run(command, input="\n".join(LINES) + "\n", stdout=subprocess.PIPE, text=True, check=True).stdout
    with Translator(MODEL, target="fr", batch=3, **FAST) as translator:
        assert translator.translate(LINES) == out.split("\n")[:-1]
        assert [result.text for result in translator.results(LINES, ahead=2)] == out.split("\n")[:-1]


@test
def one_text_or_many_in_any_language():
    with Translator(MODEL, target="de", **FAST) as translator:
        alone = translator.translate(LINES[0])
        assert isinstance(alone, str) and translator.translate([LINES[0]]) == [alone] and translator.translate([]) == []
        assert translator.translate(LINES[0], target="fr") not in (alone, "")
        assert translator.translate("One.\n\nTwo.").count("\n") == 2


@test
def results_say_more():
    with Translator(MODEL, target="de", nbest=2, alignment=True, **FAST) as translator:
        result, blank = translator.results([LINES[0], ""])
        best, second = result.hypotheses
        assert result.text == best.text and best.score >= second.score and best.text != second.text
        assert best.finished and len(best.token_logprobs) == len(best.ids) + 1
        assert abs(sum(best.token_logprobs) - best.logprob) < 1e-3
        words = {
            LINES[0][k.source_begin : k.source_end]: best.text[k.target_begin : k.target_end] for k in best.alignment
        }
        assert words.get("book?") == "Buch?", words
        assert blank.text == "" and not blank.error


@test
def alignments_count_characters():
    text = "Où est le café ? Où est le café ?"
    with Translator(MODEL, source="fr", target="en", alignment=True, **FAST) as translator:
        (result,) = translator.results([text])
        assert result.hypotheses[0].alignment
        for link in result.hypotheses[0].alignment:
            assert text[link.source_begin : link.source_end].strip() == text[link.source_begin : link.source_end] != ""


@test
def mistakes_are_exceptions():
    assert "xx" in str(fails("argument", Translator, MODEL, target="xx"))
    assert "beem" in str(fails("argument", Translator, MODEL, beem=4))
    fails("argument", Translator, MODEL, beam="4;nbest=4")
    fails("io", Translator, ROOT / "models/none.bin")
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"no model" * 100)
        file.flush()
        fails("format", Model, file.name)
    with Translator(MODEL, target="de", **FAST) as translator:
        error = fails("argument", translator.translate, ["fine", "a\0b"])
        assert isinstance(error, TextError) and error.index == 1
        assert [bool(text) for text in translator.translate(["fine", "a\0b", "fine"], errors="empty")] == [
            True,
            False,
            True,
        ]
        assert [bool(result.error) for result in translator.results(["fine", "a\0b"])] == [False, True]
        fails("argument", translator.translate, "fine", target="xx")
        assert translator.translate("It rains.")
    fails("argument", translator.translate, "closed")


@test
def glossaries_are_files_or_terms():
    line = "The dog sleeps."
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file:
        file.write("dog\tGugelhupf\n")
        file.flush()
        for terms in (file.name, pathlib.Path(file.name), {"dog": "Gugelhupf"}):
            with Translator(MODEL, target="de", glossary=terms, **FAST) as translator:
                assert "Gugelhupf" in translator.translate(line), terms
    terms = {"source": "target", "#dog": "x", 'a "dog"': 'b, "c"; d', "dog": "Gugel, hupf;", "Mary": "Mary"}
    before = set(os.listdir(tempfile.gettempdir()))
    with Translator(MODEL, target="de", glossary=terms, **FAST) as translator:
        assert "Gugel, hupf;" in translator.translate(line)
        assert "Mary" in translator.translate("Mary sleeps.") and "x" in translator.translate("See #dog here.")
        assert "target" in translator.translate("This is the source of it.")
    with Translator(MODEL, target="de", glossary={}, **FAST) as translator:
        assert "Hund" in translator.translate(line)
    for bad in ({"a\tb": "c"}, {"a": "b\nc"}, {"a": ""}, {"a": 1}, {"a": "x" * 300}):
        assert "glossary" in str(fails("argument", Translator, MODEL, target="de", glossary=bad, **FAST)), bad
    fails("io", Translator, MODEL, target="de", glossary="/nowhere", **FAST)
    assert not {name for name in set(os.listdir(tempfile.gettempdir())) - before if name.endswith(".csv")}


@test
def lone_surrogates_are_refused_not_crashed_on():
    with Translator(MODEL, target="de", **FAST) as translator:
        assert isinstance(fails("argument", translator.translate, ["\ud800"]), TextError)


@test
def memory_is_bounded_by_what_is_under_way():
    asked, given = [0], [0]

    def texts():
        for i in range(400):
            asked[0] += 1
            assert asked[0] - given[0] <= 12, "read too far ahead"
            yield f"It rains in {i}."

    with Translator(MODEL, target="de", **FAST) as translator:
        for _ in translator.results(texts(), ahead=10):
            given[0] += 1
    assert given[0] == 400


@test
def an_iterator_may_be_left():
    with Translator(MODEL, target="de", **FAST) as translator:
        stream = translator.results(f"It rains in {i}." for i in range(10**9))
        assert next(stream).text
        stream.close()
        assert translator.translate("It rains.")


@test
def what_the_source_of_texts_raises_comes_through():
    def texts():
        yield "It rains."
        raise KeyError("no more")

    with Translator(MODEL, target="de", **FAST) as translator:
        try:
            list(translator.results(texts()))
        except KeyError:
            pass
        else:
            raise AssertionError("no KeyError")
        assert translator.translate("It rains.")


@test
def another_thread_cancels():
    with Translator(MODEL, target="de", threads=1) as translator:
        begin = time.monotonic()
        threading.Timer(0.3, translator.cancel).start()
        fails("cancelled", translator.translate, ["This is a long sentence about the weather and the people."] * 20000)
        assert time.monotonic() - begin < 30
        assert translator.translate("It rains.")


@test
def threads_share_a_model():
    model, found = Model(MODEL), []

    def work(target):
        with Translator(model, target=target, **FAST) as translator:
            found.append((target, translator.translate(LINES)))

    threads = [threading.Thread(target=work, args=(target,)) for target in ("de", "fr", "de", "es")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    german = [texts for target, texts in found if target == "de"]
    assert german[0] == german[1]


@test
def a_translator_stays_in_its_process():
    with Translator(MODEL, target="de", **FAST) as translator:
        try:
            pickle.dumps(translator)
        except TypeError as error:
            assert "cached" in str(error)
        else:
            raise AssertionError("pickled")
        child = os.fork()
        if not child:
            try:
                translator.translate("It rains.")
            except MoeError as error:
                os._exit(42 if "fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert cached(MODEL, target="de") is cached(MODEL, target="de") is not cached(MODEL, target="fr")


@test
def arrow_arrays_come_and_go():
    with Translator(MODEL, target="de", **FAST) as translator:
        lines = translator.translate(LINES)
        for array in (
            pyarrow.array(LINES),
            pyarrow.array(LINES, pyarrow.large_string()),
            pyarrow.chunked_array([LINES[:5], LINES[5:]]),
        ):
            texts, statuses = translator.translate_arrow(array)
            assert texts.to_pylist() == lines and statuses.to_pylist() == [0] * len(LINES)
        texts, statuses = translator.translate_arrow(pyarrow.array(["x", None, LINES[0], "a\0b", None])[1:])
        assert texts.to_pylist() == [None, lines[0], "", None] and [bool(x) for x in statuses.to_pylist()] == [
            0,
            0,
            1,
            0,
        ]
        assert len(translator.translate_arrow(pyarrow.array([], pyarrow.string()))[0]) == 0
        texts.validate(full=True)


@test
def models_tell_of_themselves():
    model = Model(MODEL)
    assert (
        model.languages == ["en", "de", "fr", "es"]
        and model.knows("DE")
        and model.knows("deu")
        and not model.knows("nl")
    )
    assert model.meta("general.name") == "en-de-fr-es" and model.meta("no.such.key") == "" and not model.needs_source
    assert {"beam", "target", "batch", "threads"} <= {name for name, _, help in options() if help} and version()


if __name__ == "__main__":
    sys.exit(test.run())
