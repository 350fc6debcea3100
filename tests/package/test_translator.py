#!/usr/bin/env python3
"""Test moe_translate.Translator (tools/python): equality with moe-translate, exceptions, and memory limits.

Usage: tests/python tests/package/test_translator.py      (BIN is the folder of the programs and libmoetext)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import asyncio
import copy
import ctypes
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / os.environ.get("BIN", ".")
os.environ["MOE_LIBRARY"] = str(BIN / ("libmoetext.dylib" if sys.platform == "darwin" else "libmoetext.so"))

import moe_translate  # noqa: E402
import made_up  # noqa: E402
import numpy  # noqa: E402
import pyarrow  # noqa: E402
import tqdm  # noqa: E402
from moe_translate import Model, MoeError, Text, TextError, Translator, cached, options, version  # noqa: E402
from moe_translate import library  # noqa: E402
from suite import Suite  # noqa: E402

sys.path.insert(0, str(ROOT / "tests/programs"))
import small_models  # noqa: E402

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
    """Return the MoeError that an action raises."""
    try:
        action(*arguments, **named)
    except MoeError as error:
        assert error.status == status, (error.status, str(error))
        return error
    raise AssertionError(f"no MoeError with status {status!r}")


@test
def search_parameters_are_options():
    assert "min-target" in [name for name, _, _ in options()]
    whole = Translator(MODEL, target="de", min_target=15, **FAST).translate("It rains.")
    assert len(whole) > len(Translator(MODEL, target="de", **FAST).translate("It rains.")), whole


@test
def libraries_of_other_versions_are_refused():
    wanted = library.VERSION
    found = divmod(library.opened(os.environ["MOE_LIBRARY"]).moe_version_number() // 1000, 1000)
    assert found == wanted
    try:
        library.VERSION = wanted[0], wanted[1] + 1
        library.opened(os.environ["MOE_LIBRARY"])
    except OSError as error:
        assert "libmoetext has version {}.{}, but the package requires {}.{}".format(*found, *library.VERSION) == \
            str(error), error
    else:
        raise AssertionError("a library of another version was accepted")
    finally:
        library.VERSION = wanted


@test
def structures_match_the_header():
    mirrors = {
        "moe_error": library.Error,
        "moetext_option_info": library.OptionInfo,
        "moetext_request": library.Request,
        "moetext_link": library.Link,
        "moetext_hypothesis": library.Hypothesis,
        "moetext_term_use": library.TermUse,
        "moetext_result": library.Result,
        "moetext_local": library.Local,
        "moetext_choice": library.Choice,
        "moe_stat": library.Stat,
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
def translations_equal_moe_translates():
    command = [str(BIN / "moe-translate"), "-q", "-m", str(MODEL), "-t", "fr", "--beam", "2", "--rerank", "0"]
    out = subprocess.run(command, input="\n".join(LINES) + "\n", stdout=subprocess.PIPE, text=True, check=True).stdout
    with Translator(MODEL, target="fr", batch=3, **FAST) as translator:
        assert translator.translate(LINES) == out.split("\n")[:-1]
        assert [result.text for result in translator.results(LINES, ahead=2)] == out.split("\n")[:-1]


@test
def one_or_many_texts_in_any_language():
    with Translator(MODEL, target="de", **FAST) as translator:
        alone = translator.translate(LINES[0])
        assert isinstance(alone, str) and translator.translate([LINES[0]]) == [alone] and translator.translate([]) == []
        assert translator.translate(LINES[0], target="fr") not in (alone, "")
        assert translator.translate("One.\n\nTwo.").count("\n") == 2


@test
def results_have_hypotheses_and_alignments():
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
def icu_messages_can_span_lines():
    message = "{n, plural,\n  one {one letter is here}\n  other {# letters are here. Good morning.}\n}"
    text = f"Good morning!\n{message}\nGood night."
    done = subprocess.run([BIN / "moe-translate", "-m", MODEL, "-t", "de", "--beam", "2", "--rerank", "0"], input=text,
                          capture_output=True, text=True, check=True)
    with Translator(MODEL, target="de", **FAST) as translator:
        assert translator.translate(text) + "\n" == done.stdout
        got = translator.translate(text.replace("\n", "\r\n"))
        assert got == done.stdout[:-1].replace("\n", "\r\n"), got
        assert got.count("{") == 3 and "ein" in got and "is here" not in got, got
        result, = translator.results(["{n, plural,\n one two {the house}\n}\nGood night."])
        assert result.text == "{n, plural,\n one two {the house}\n}\nGute Nacht.", result
    for more in {"split": 0}, {"alignment": True}, {"nbest": 2}:
        with Translator(MODEL, target="de", **FAST, **more) as translator:
            got = next(iter(translator.results([text]))).text
            assert got == done.stdout[:-1] or got == f"Guten Morgen!\n{message}\nGute Nacht.", (more, got)


@test
def a_call_can_have_options():
    line = LINES[2]
    wide = {"beam": 4, "nbest": 3, "length_penalty": 1.5}
    with Translator(MODEL, target="de", **FAST) as translator, Translator(MODEL, target="de", threads=1, rerank=0,
                                                                            **wide) as other:
        for result in translator.results([line], **wide), other.results([line]):
            (found,) = result
            assert len(found.hypotheses) == 3, found
        assert next(translator.results([line], **wide)) == next(other.results([line]))
        sampled = {translator.translate(line, beam=1, temperature=2.0, seed=seed) for seed in range(8)}
        assert len(sampled) > 2 and len(translator._others) == 4  # the sessions that are kept
        assert "".join(translator.stream(line, beam=1)) == translator.translate(line, beam=1)
        assert asyncio.run(translator.translate_async(line, beam=1)) == translator.translate(line, beam=1)
        long = translator.translate("It rains.", min_target=15)
        assert len(long) > len(translator.translate("It rains.", min_target=None))
        assert translator.score(line, "Der Hund.") == translator.score(line, "Der Hund.", capitals=0)
        before = translator.stats().sentences
        translator.translate([line] * 3, beam=1)
        assert translator.stats().sentences == before + 3
        for wrong, said in ({"targt": "de"}, "'targt' is not an option"), ({"threads": 2}, "an option of Translator"):
            try:
                translator.translate(line, **wrong)
            except TypeError as error:
                assert said in str(error) and "beam" in str(error), error
            else:
                raise AssertionError(wrong)
        assert "1 to 64" in str(fails("argument", translator.translate, line, beam=99))
        waiting = translator.results([line] * 3, beam=3)
        next(waiting)
        translator.cancel()
        fails("cancelled", lambda: list(waiting))
    fails("argument", translator.translate, line, beam=1)
    with Translator(MODEL, target="de", glossary={"dog": "Gugelhupf"}, **FAST) as translator:
        for beam in 1, 2, 3, 4, 5, 6, 7:
            assert "Gugelhupf" in translator.translate("The dog sleeps.", beam=beam)
        (term,) = translator.terms()
        assert (term.asked, term.kept) == (7, 7), term


@test
def options_have_types():
    ours = {name.replace("-", "_") for name, _, _ in options()} - {"glossary"}
    theirs = set(moe_translate.Options.__annotations__)
    assert ours == theirs, ours ^ theirs
    oldest = "import sys; sys.version_info = 3, 9, 0; import moe_translate as m; print(m.CallOptions.__name__)"
    done = subprocess.run([sys.executable, "-c", oldest], capture_output=True, text=True)
    assert done.stdout == "CallOptions\n", done.stderr  # old Pythons have no typing.Unpack


class NAType:
    """Like pandas.NA, which is not true, false or equal to itself."""

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")

    __ne__ = __eq__ = lambda self, other: NAType()


@test
def missing_cells_of_columns_stay_missing():
    missing = [None, float("nan"), numpy.float32("nan"), NAType()]
    texts = ["It rains.", *missing, "Good morning."]
    with Translator(MODEL, target="de", **FAST) as translator:
        wanted = ["Es regnet.", None, None, None, None, "Guten Morgen."]
        assert translator.translate(texts) == translator.translate(iter(texts)) == wanted
        assert translator.translate(texts, prefix="")[1:5] == translator.translate(missing) == [None] * 4
        assert asyncio.run(translator.translate_async(texts)) == wanted
        for found in translator.results(texts), translator.results(iter(texts), ahead=1):
            assert [result and result.text for result in found] == wanted
        assert translator.translate(["<p>It rains.", None], format="html") == ["<p>Es regnet.", None]
        error = fails("argument", translator.translate, [None, "fine", "a\0b"])
        assert error.index == 2 and str(error).startswith("row 2: NUL byte"), error
        assert str(fails("argument", translator.translate, "a\0b")).startswith("NUL byte")
        assert translator.translate([None, "a\0b"], errors="empty") == [None, ""]
        for action in (
            lambda wrong: translator.translate(["fine", None, wrong]),
            lambda wrong: list(translator.results(["fine", None, wrong])),
            lambda wrong: translator.score(["fine", "b", wrong], ["a"] * 3),
        ):
            for wrong in 5, 2.5, b"x":
                try:
                    action(wrong)
                except TypeError as error:
                    assert str(error).startswith("row 2: a text must be a str, not "), error
                else:
                    raise AssertionError(wrong)


@test
def progress_counts_all_texts():
    texts = (["It rains.", None, float("nan"), ""] + [None] * 36) * 500
    counts = []
    with Translator(MODEL, target="de", max_len=16, **FAST) as translator:
        translator.translate(texts[:1000], progress=counts.append)
        assert sum(counts) == 1000 and all(count >= 0 for count in counts), counts
        bar = tqdm.tqdm(total=len(texts), file=open(os.devnull, "w"))
        found = translator.translate(texts, beam=1, progress=bar.update)
        assert bar.n == 20000 == len(found) and found == found[:40] * 500, found[:40]
        assert found[:4] == ["Es regnet.", None, None, ""], found[:4]
        assert_raises(KeyError, translator.translate, texts, progress=lambda count: {}["stop"])
        assert_raises(ValueError, translator.translate, ["<p>"], format="html", progress=print)
        assert translator.translate("It rains.") == "Es regnet."


@test
def tokens_go_in_and_out():
    with Translator(MODEL, target="de", **FAST) as translator:
        (whole,) = translator.results([LINES[0]])
        ids, pieces = whole.source_ids, whole.source_tokens
        for tokens in [ids], [list(ids)], [numpy.array(ids)], [pieces], iter([list(pieces)]):
            (found,) = translator.translate_tokens(tokens)
            assert found.hypotheses[0].ids == whole.hypotheses[0].ids and found.source_ids == ids, found
            assert found.hypotheses[0].tokens == whole.hypotheses[0].tokens
        assert found.text.split() == list(whole.hypotheses[0].tokens)
        assert len(translator.translate_tokens([ids, [], ids], target="fr", beam=4, nbest=2)[0].hypotheses) == 2
        assert translator.translate_tokens([]) == []
        for wrong, kind in ([["▁rains"]], TextError), ([["a b"]], ValueError), ([[1 << 20]], TextError), ([[1.5]], TypeError):
            assert_raises(kind, translator.translate_tokens, wrong)
        assert_raises(TypeError, translator.translate_tokens, [["▁It", 5]])


@test
def decoder_only_models_answer():
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/model"
        made_up.write(path, {"?": "A question.", ".": "A sentence.\nOf two lines."})
        with Translator(path, threads=1) as translator:
            for asked in "Is it?", [{"role": "user", "content": "Is it?"}], translator.model.prompt("Is it?"):
                assert translator.generate(asked).text == "A question.", asked
                assert "".join(translator.generate_stream(asked)) == "A question.", asked
            assert translator.generate("It is.").text == "A sentence.\nOf two lines."
            talk = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"},
                    {"role": "assistant", "content": "z"}, {"role": "user", "content": "It is."}]
            assert "messages" in str(fails("unsupported", translator.generate, talk))  # the model has no template
            cut = translator.generate(translator.model.prompt("Is it?"), max_tokens=1, temperature=0.5, seed=3)
            assert cut.hypotheses[0].ids and not cut.error
            assert translator.generate([ord("?")], beam=1).text == "A question."
            for wrong in [], [{"role": "robot", "content": "a"}], [{"role": "user"}], [5, "a"]:
                try:
                    translator.generate(wrong)
                except (TypeError, ValueError):
                    continue
                raise AssertionError(wrong)
            assert_raises(ValueError, translator.generate, "a", max_tokens=0)
    with Translator(MODEL, target="de", **FAST) as translator:
        assert "prompt" in str(fails("unsupported", translator.generate, "Is it?"))


@test
def results_start_with_a_full_batch():
    """Regression: decoding started with the first text alone, so that short lists took 1.4 to 1.9 times as long."""
    lines, steps = [f"I have {i}." for i in range(40)], []
    with Translator(MODEL, target="de", beam=1, rerank=0, threads=2) as translator:
        for action in [lambda: translator.translate(lines)] + [lambda: list(translator.results(lines))] * 12:
            before = translator.stats().steps
            action()
            steps.append(translator.stats().steps - before)
    assert len(set(steps)) == 1, steps


@test
def alignments_count_characters():
    text = "Où est le café ? Où est le café ?"
    with Translator(MODEL, source="fr", target="en", alignment=True, **FAST) as translator:
        (result,) = translator.results([text])
        assert result.hypotheses[0].alignment
        for link in result.hypotheses[0].alignment:
            assert text[link.source_begin : link.source_end].strip() == text[link.source_begin : link.source_end] != ""


@test
def errors_are_exceptions():
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
        (result,) = translator.results([f"{line} Mary sleeps."])
        assert result.terms == (("dog", "Gugel, hupf;", True), ("Mary", "Mary", True)), result.terms
        assert "Mary" in translator.translate("Mary sleeps.") and "x" in translator.translate("See #dog here.")
        assert "target" in translator.translate("This is the source of it.")
    with Translator(MODEL, target="de", glossary={}, **FAST) as translator:
        assert "Hund" in translator.translate(line)
    for bad in ({"a\tb": "c"}, {"a": "b\nc"}, {"a": ""}, {"a": 1}, {"a": "x" * 300}):
        assert "glossary" in str(fails("argument", Translator, MODEL, target="de", glossary=bad, **FAST)), bad
    fails("io", Translator, MODEL, target="de", glossary="/nowhere", **FAST)
    assert not {name for name in set(os.listdir(tempfile.gettempdir())) - before if name.endswith(".csv")}


@test
def confirmed_lines_count_from_the_next_text():
    line, wanted = "Where is my book?", "Wo ist nur das Buch?"
    with Translator(MODEL, target="de", memory=os.devnull, **FAST) as translator:
        assert wanted not in (translator.translate(line), translator.translate(line, beam=3))
        translator.remember(line, wanted, "en", "de")
        assert wanted == translator.translate(line) == translator.translate(line, beam=3)
        assert wanted == translator.translate(line, beam=4)  # an engine that is made later
        assert translator.translate(line, target="fr") != wanted
    with Translator(MODEL, target="de", **FAST) as translator:
        assert_raises(ValueError, translator.remember, line, wanted)
    fails("io", Translator, MODEL, target="de", memory="/nowhere", **FAST)


@test
def a_call_can_have_a_glossary():
    line, terms = "The dog sleeps.", {"dog": "Gugelhupf"}

    async def work(translator):
        one = await translator.translate_async(line, glossary=terms)
        return [one] + [result.text async for result in translator.stream_async([line], glossary=terms)]

    with Translator(MODEL, target="de", glossary={"dog": "Werwolf"}, **FAST) as translator:
        own, called = translator.translate(line), translator.translate(line, glossary=terms)
        assert "Werwolf" in own and "Gugelhupf" in called and translator.translate(line, glossary={}) == own
        (result,) = translator.results([line], glossary=terms)
        assert [result.text, *asyncio.run(work(translator))] == [called] * 3 and translator.translate(line) == own
        for bad in ({"a\tb": "c"}, {"a": "b\0c"}, {"a": ""}, {"a": 1}, {"a": "x" * 300}):
            fails("argument", translator.translate, line, glossary=bad)
        assert_raises(ValueError, translator.translate, line, glossary=terms, prefix="Der")
        kept = translator.results([line] * 9, glossary=terms)
        assert "Gugelhupf" in next(kept).text
    fails("cancelled", next, kept)
    with Translator(MODEL, target="de", protect=0, **FAST) as translator:
        fails("unsupported", translator.translate, line, glossary=terms)


@test
def lone_surrogates_are_refused():
    with Translator(MODEL, target="de", **FAST) as translator:
        assert isinstance(fails("argument", translator.translate, ["\ud800"]), TextError)


@test
def the_number_of_texts_in_progress_is_bounded():
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
def translations_can_be_streamed():
    """Joined pieces equal the translation. With `after`, pieces also contain preliminary text of unfinished parts."""
    text = "\n".join(LINES)
    with Translator(MODEL, target="de", **FAST) as translator:
        wanted = translator.translate(text)
        pieces = list(translator.stream(text))
        assert "".join(pieces) == wanted and len(pieces) > 4 and all(pieces), pieces
        pairs = list(translator.stream(text, after=True))
        assert "".join(piece for piece, _ in pairs) == wanted
        assert len({after for _, after in pairs}) > 6, pairs
        assert "".join(translator.stream("")) == "" and "".join(translator.stream(" \n ")) == " \n "
        terms = {"book": "Werk"}
        assert "".join(translator.stream(LINES[0], glossary=terms)) == translator.translate(LINES[0], glossary=terms)
    with Translator(MODEL, target="de", split=0, protect=0, beam=1, rerank=0) as translator:
        for line in LINES[:1] + LINES[6:8]:
            pieces = list(translator.stream(line))
            assert "".join(pieces) == translator.translate(line) and len(pieces) > 4, pieces
        pieces = list(translator.stream(LINES[2], prefix="Sie liest"))
        assert "".join(pieces) == translator.translate(LINES[2], prefix="Sie liest") and len(pieces) > 3, pieces
    with Translator(MODEL, target="de", beam=4, rerank=1, split=0, protect=0) as translator:
        pieces = list(translator.stream(LINES[2]))
        assert "".join(pieces) == translator.translate(LINES[2]) and pieces, pieces


@test
def streams_end_on_errors_and_when_closed():
    long = "word " * 3000
    with Translator(MODEL, target="de", split=0, **FAST) as translator:
        pieces = translator.stream(f"{LINES[0]}\n{long}")
        try:
            assert list(pieces) is None
        except TextError as error:
            assert error.status == "limit", error
        fails("argument", lambda: list(translator.stream("a", target="xx")))
        pieces = translator.stream("\n".join(LINES * 100))
        next(pieces)
        pieces.close()
        steps = translator.stats().steps
        assert translator.translate(LINES[0]) and translator.stats().steps < steps + 100
        pieces = translator.stream("\n".join(LINES * 100))
        next(pieces)
        translator.cancel()
        fails("cancelled", lambda: list(pieces))


@test
def iterators_can_be_closed_early():
    with Translator(MODEL, target="de", **FAST) as translator:
        stream = translator.results(f"It rains in {i}." for i in range(10**9))
        assert next(stream).text
        stream.close()
        assert translator.translate("It rains.")


@test
def exceptions_of_the_source_are_raised():
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
def another_thread_can_cancel():
    with Translator(MODEL, target="de", threads=1) as translator:
        threading.Timer(0.3, translator.cancel).start()
        fails("cancelled", translator.translate, ["This is a long sentence about the weather and the people."] * 20000)
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
def translators_cannot_be_pickled_or_used_after_fork():
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


FORKED = """
import multiprocessing
m, first = t.model, t.results(L)
assert next(first).text
waiting = t.results(os.fdopen(os.pipe()[0]))  # without a text yet
threading.Thread(target=next, args=(waiting,), daemon=True).start()
threading.Thread(target=t.translate, args=(L,), daemon=True).start()
held, release = threading.Event(), threading.Event()

def hold():  # locks that a thread can hold while another one forks
    from moe_translate import engine
    with engine._load, t._engine.state, m._detecting:
        held.set()
        release.wait()

def work(number):
    from moe_translate import engine
    engine._lib = None  # as if loaded again
    found = []
    for action in (lambda: t.translate('It rains.'), lambda: next(first), lambda: next(waiting), lambda: t.detect('a')):
        try:
            action()
        except MoeError as error:
            found.append('fork' in str(error))
        except ValueError:  # the other thread's generator
            found.append(action is not None)
    t.cancel()
    t.close()
    with Translator(m, target='de') as mine, Translator(m.path, target='fr') as other:
        return found + [m.detect('Guten Morgen!')[0][0], mine.translate('It rains.'), other.translate('It rains.')]

multiprocessing.set_start_method('fork')
for holding in False, True:
    if holding:
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
    for _ in range(3):
        with multiprocessing.Pool(2) as pool:
            answers = pool.map_async(work, range(2)).get(30)
        assert answers == [[True] * 4 + ['de', 'Es regnet.', 'Il pleut.']] * 2, answers
release.set()
t.cancel()
assert t.translate('It rains.') == 'Es regnet.'
print('done')
"""


@test
def children_of_a_fork_do_not_hang():
    assert child(FORKED) == "done"


@test
def closed_translators_are_not_cached():
    with cached(MODEL, target="de", beam=1) as first:
        assert first is cached(MODEL, target="de", beam=1)
    second = cached(MODEL, target="de", beam=1)
    assert second is not first and second is cached(MODEL, target="de", beam=1)
    assert second.translate("It rains.") == "Es regnet."


@test
def objects_have_a_repr_and_refuse_pickling():
    with Translator(MODEL, target="de", **FAST) as translator:
        assert repr(translator.model) == f"<moe_translate.Model {str(MODEL)!r}>"
        parameters = "target='de', beam=2, rerank=0, threads=1"
        assert repr(translator) == f"<moe_translate.Translator {str(MODEL)!r}, {parameters}>"
        for one, way in (translator, "cached"), (translator.model, "Model(path)"):
            for action in pickle.dumps, copy.copy, copy.deepcopy:
                try:
                    action(one)
                except TypeError as error:
                    assert way in str(error), error
                else:
                    raise AssertionError(action)
        (result,) = translator.results(["It rains."])
        assert pickle.loads(pickle.dumps(result)) == result
        error = fails("argument", translator.translate, ["fine", "a\0b"])
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.index, again.status) == (TextError, str(error), 1, "argument")
    assert repr(translator).endswith(", closed>")
    for action in (
        translator.__enter__,
        lambda: translator.detect("a"),
        lambda: translator.translate([]),
        lambda: translator.score("a", "b"),
        lambda: next(translator.results([])),
        lambda: translator.translate_arrow(pyarrow.array(["a"])),
        lambda: asyncio.run(translator.translate_async("a", glossary={"a": "b"})),
    ):
        assert "closed" in str(fails("argument", action))


@test
def arguments_of_wrong_types_or_characters_are_refused():
    def outcome(action):
        try:
            return action()
        except (TypeError, ValueError, MoeError) as error:
            return error

    with Translator(MODEL, target="de", **FAST) as translator:
        t, model = translator, translator.model
        for wrong in None, 5, b"de", bytearray(b"de"), [b"de"], [("a",)]:
            for action in (
                lambda x: t.translate(x),
                lambda x: t.score(x, x),
                lambda x: list(t.results(x)),
                lambda x: asyncio.run(t.translate_async(x)),
                lambda x: t.detect(x),
                lambda x: model.encode(x),
                lambda x: model.decode(x),
                lambda x: model.meta(x),
                lambda x: t.translate("a", target=x) if x is not None else model.knows(x),
                lambda x: t.translate("a", source=x) if x is not None else model.knows(x),
                lambda x: t.translate("a", prefix=x if x is not None else 5),
                lambda x: list(t.results(["a"], prefix=x if x is not None else 5)),
                lambda x: t.translate("a", glossary=x if x is not None else 5),
                lambda x: Translator(model, target="de", glossary=x if x is not None else 5),
            ):
                got = outcome(lambda action=action, wrong=wrong: action(wrong))
                numbers = isinstance(wrong, (bytes, bytearray)) and got == model.decode([100, 101])
                assert numbers or isinstance(got, TypeError), (wrong, got)
                assert numbers or re.search("str|texts|token id|terms|not iterable", str(got)), (wrong, got)
        for wrong in "\0", "de\0", "\ud800", "de\ud800":
            for action in (
                lambda x: t.translate(f"Good {x} morning"),
                lambda x: t.translate("a", prefix=x),
                lambda x: t.score("a", x),
                lambda x: t.translate("a", target=x),
                lambda x: t.translate("a", source=x),
                lambda x: t.translate("dog", glossary={"dog": x}),
                lambda x: t.translate("dog", glossary={x: "dog"}),
                lambda x: Translator(model, target="de", glossary={"dog": x}),
                lambda x: Translator(model, target=x),
                lambda x: Translator(f"{MODEL}{x}", target="de"),
                lambda x: model.encode(x),
                lambda x: model.meta(f"general.licence{x}") or ValueError(),
            ):
                got = outcome(lambda action=action, wrong=wrong: action(wrong))
                assert isinstance(got, (MoeError, ValueError)), (wrong, got)
        assert t.translate("It rains.") == "Es regnet."


@test
def texts_are_encoded_and_decoded():
    with Translator(MODEL, target="de", **FAST) as translator:
        model = translator.model
        (result,) = translator.results(["Where is my book?"])
        best = result.hypotheses[0]
        assert model.encode("Where is my book?") == result.source_ids and model.decode(best.ids) == best.text
        assert model.encode(best.text, translation=True) == best.ids and model.decode(iter(best.ids)) == best.text
        text = "Où est le café? 東京 \U0001f600 " * 500
        assert model.decode(model.encode(text, True)).split()[:4] == ["Où", "est", "le", "café?"]
        assert model.encode("") == () and model.decode([]) == "" and len(model.encode("\ufdfa" * 1000)) > 1016
        for wrong in [-1], [1 << 20]:
            fails("argument", model.decode, wrong)
        assert_raises(ValueError, model.decode, [1 << 40])
        assert_raises(TypeError, model.decode, [1.5])
        assert model.decode(numpy.array(best.ids)) == model.decode([numpy.int64(x) for x in best.ids]) == best.text


@test
def sources_can_have_a_separate_vocabulary():
    sys.path.insert(0, str(ROOT / "tests/convert"))
    from test_hf_tokens import checkpoint, converted

    with checkpoint("separate") as c, Translator(converted(c), max_len=12) as translator:
        text, model = "the old house", translator.model
        target = {"target": model.languages[0]} if model.languages else {}
        (result,) = translator.results([text], **target)
        assert "".join(result.source_tokens).replace("▁", " ").strip() == text, result
        assert model.tokens(result.source_ids) != result.source_tokens == model.tokens(result.source_ids, source=True)
        assert model.encode(text) == result.source_ids != model.encode(text, translation=True)
        assert model.decode(result.hypotheses[0].ids) == result.text


@test
def arrow_arrays_are_translated():
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
def scores_equal_moe_translates():
    pairs = [("Where is my book?", text) for text in ("Wo ist mein Buch?", "Der Hund.")] + [("It rains.", "Es regnet.")]
    command = [str(BIN / "moe-translate"), "-q", "-m", str(MODEL), "-t", "de", "--score"]
    lines = "".join(f"{source}\t{target}\n" for source, target in pairs)
    out = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True).stdout
    with Translator(MODEL, target="de", threads=1) as translator:
        found = translator.score([source for source, _ in pairs], [target for _, target in pairs])
        assert [f"{one.logprob:.3f}" for one in found] == [f"{float(x.split()[0]):.3f}" for x in out.splitlines()], out
        assert found[0] == translator.score(*pairs[0]) and found[0].logprob > found[1].logprob
        assert found[0].tokens == ("▁Wo", "▁ist", "▁mein", "▁Buch", "?") and found[0].text == pairs[0][1]
        assert len(found[0].token_logprobs) == 6 and abs(sum(found[0].token_logprobs) - found[0].logprob) < 1e-3
        error = fails("argument", translator.score, ["fine", "a\0b"], ["gut", "gut"])
        assert isinstance(error, TextError) and error.index == 1
        for wrong in (("a", ["b"]), (["a"], "b"), ("a", b"b")):
            assert_raises(TypeError, translator.score, *wrong)
        assert_raises(ValueError, translator.score, ["a", "b"], ["c"])


def assert_raises(kind, action, *arguments, **named):
    try:
        action(*arguments, **named)
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


@test
def translations_can_have_a_prefix():
    texts, begun = ["Where is my book?", "It rains."], ["Mein", "Heute"]
    command = [str(BIN / "moe-translate"), "-qm", str(MODEL), "-t", "de", "--prefix", "--beam", "2", "--rerank", "0"]
    lines = "".join(map("{}\t{}\n".format, texts, begun))
    out = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    with Translator(MODEL, target="de", **FAST) as translator:
        assert translator.translate(texts, prefix=begun) == out and all(map(str.startswith, out, begun))
        assert translator.translate(texts[0], prefix="Mein") == out[0]
        assert [result.text for result in translator.results(texts, prefix=iter(begun))] == out
        assert all(text.startswith("Mein") for text in translator.translate(texts, prefix="Mein"))
        assert_raises(ValueError, translator.translate, texts, prefix=["Mein"])
        assert_raises(ValueError, list, translator.results(texts, prefix=["Mein"]))
        assert_raises(TypeError, translator.translate, texts[0], prefix=b"Mein")


@test
def tokens_equal_those_of_the_tokeniser():
    with Translator(MODEL, target="de", **FAST) as translator:
        (result,) = translator.results(["Where is my book?"])
        best = result.hypotheses[0]
        assert "".join(result.source_tokens).replace("▁", " ").strip() == "Where is my book?", result
        assert "".join(best.tokens).replace("▁", " ").strip() == best.text == "Wo ist mein Buch?", best
        assert translator.model.tokens(best.ids) == best.tokens and len(result.source_ids) == len(result.source_tokens)
        assert translator.model.tokens([10**6, -1]) == ("", "")


@test
def languages_are_detected():
    with Translator(MODEL, target="de", **FAST) as translator:
        for language, text in (
            ("en", "Where is my book?"),
            ("de", "Wo ist mein Buch?"),
            ("fr", "Où est mon livre ?"),
            ("es", "¿Dónde está mi libro?"),
        ):
            (first, probability), *others = translator.detect(text)
            assert first == language and 0.9 < probability <= 1 and all(x < probability for _, x in others), text
        several = translator.detect("no")
        assert len(several) > 1 and several == sorted(several, key=lambda pair: -pair[1]), several
        assert 0.9 < sum(probability for _, probability in several) <= 1.0001, several
        assert translator.detect("123 :-)") == translator.detect("") == [] and translator.detect("a\0b\ud800")
        assert_raises(TypeError, translator.detect, b"Good")


@test
def unknown_languages_are_refused_first():
    with Translator(MODEL, **FAST) as translator:
        for action in (translator.translate, lambda *a, **k: next(translator.results(*a, **k))):
            assert "target" in str(fails("argument", action, ["It rains."]))
            for wrong in ({"target": "xx"}, {"target": "de", "source": "xx"}, {"target": "auto"}):
                assert "model has no language " in str(fails("argument", action, ["It rains."], **wrong))
        fails("argument", translator.translate, ["It rains."], errors="empty")
        assert translator.translate("It rains.", target="DE", source="auto") == "Es regnet."


# ---- Many callers ----


@test
def calls_within_a_loop_over_results_are_allowed():
    with Translator(MODEL, target="de", **FAST) as translator:
        alone = translator.translate(LINES)
        found = []
        for number, result in enumerate(translator.results(LINES)):
            found.append(result.text)
            line = LINES[number]
            assert translator.translate(line) == alone[number] == next(translator.results([line])).text
            if number == 3:
                assert translator.translate_arrow(pyarrow.array(LINES[:3]))[0].to_pylist() == alone[:3]
        assert found == alone
        texts = (translator.translate(text) for text in LINES)  # an iterator of texts may call the translator
        assert [bool(result.text) for result in translator.results(texts, source="de")] == list(map(bool, alone))


@test
def threads_share_a_translator():
    with Translator(MODEL, target="de", **FAST) as translator:
        alone, found = translator.translate(LINES), {}

        def work(number):
            found[number] = [r.text for r in translator.results(LINES)] if number % 2 else translator.translate(LINES)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(found[number] == alone for number in range(8))


MANY = [f"I have {i} dogs and a very big house near the sea." for i in range(3000)]


@test
def a_long_list_does_not_delay_other_texts():
    with Translator(MODEL, target="de", threads=1) as translator:
        ended = []

        def long():
            try:
                translator.translate(MANY)
            except MoeError as error:
                ended.append(error.status)

        thread = threading.Thread(target=long)
        thread.start()
        time.sleep(0.2)
        assert translator.translate("It rains.") == "Es regnet." and not ended
        translator.cancel()
        thread.join()
        assert ended == ["cancelled"] and translator.translate("It rains.") == "Es regnet."


@test
def closing_ends_the_calls_of_other_threads():
    translator, ended = Translator(MODEL, target="de", threads=1), []

    def long():
        try:
            translator.translate(MANY)
        except MoeError as error:
            ended.append(str(error))

    thread = threading.Thread(target=long)
    thread.start()
    time.sleep(0.2)
    translator.close()
    thread.join()
    assert "closed" in ended[0] and "closed" in str(fails("argument", translator.translate, "It rains."))


@test
def a_hundred_tasks_share_a_translator():
    lines = [f"I have {i} dogs." for i in range(100)]

    async def work(translator):
        found = await asyncio.gather(*map(translator.translate_async, lines))
        assert [x async for x in translator.stream_async(lines)] == list(translator.results(lines))
        assert await translator.translate_async(lines[:2], prefix="Ich") == found[:2]
        assert await translator.translate_async([]) == []
        return found

    with Translator(MODEL, target="de", **FAST) as translator:
        assert asyncio.run(work(translator)) == translator.translate(lines)


@test
def reading_terms_does_not_block_the_event_loop():
    terms = {f"dog number {i}": f"Hund Nummer {i}" for i in range(10000)}

    async def longest(action):
        """Run an action; return the longest time for which it blocks the event loop."""
        times, task = [], asyncio.ensure_future(action)
        while not task.done():
            begin = time.thread_time()  # use CPU time of the loop's thread
            await asyncio.sleep(0)
            times.append(time.thread_time() - begin)
        await task
        return max(times)

    async def first(translator):
        async for result in translator.stream_async(["It rains."], glossary=terms):
            return result.text

    with Translator(MODEL, target="de", **FAST) as translator:
        begin = time.process_time()
        translator.translate("", glossary=terms)
        alone = time.process_time() - begin
        for work in (
            lambda: translator.translate_async("", glossary=terms),
            lambda: first(translator),
        ):
            took = asyncio.run(longest(work()))
            assert took < alone / 4, (took, alone)

        async def closed():
            task = asyncio.ensure_future(translator.translate_async("It rains.", glossary=terms))
            await asyncio.sleep(alone / 4)
            translator.close()
            return await task

        try:  # close() interrupts reading the glossary or, on a busy machine, translating
            raise AssertionError(asyncio.run(closed()))
        except MoeError as error:
            assert error.status in ("argument", "cancelled") and "closed" in str(error), error


@test
def a_cancelled_source_ends_its_stream():
    async def texts():
        yield "It rains."
        raise asyncio.CancelledError

    async def work(translator):
        seen = []
        try:
            async for result in translator.stream_async(texts()):
                seen.append(result.text)
        except asyncio.CancelledError:
            return seen
        raise AssertionError("not cancelled")

    with Translator(MODEL, target="de", **FAST) as translator:
        assert asyncio.run(asyncio.wait_for(work(translator), 20)) == ["Es regnet."]


@test
def closing_ends_waiting_streams():
    for ends in "close", "cancel":
        reading, writing = os.pipe()
        with open(reading, encoding="utf-8") as file, Translator(MODEL, target="de", **FAST) as translator:
            ended = []

            def loop(translator=translator, file=file, ended=ended):
                try:
                    next(translator.results(file))
                except MoeError as error:
                    ended.append(error.status)

            thread = threading.Thread(target=loop)
            thread.start()
            while not translator._engine.calls and thread.is_alive():
                time.sleep(0.01)
            getattr(translator, ends)()
            thread.join(20)
            os.close(writing)
            assert not thread.is_alive() and ended == ["cancelled"], (ends, ended)


@test
def a_cancelled_task_does_not_affect_others():
    async def work(translator):
        long = [asyncio.create_task(translator.translate_async(MANY)) for _ in range(50)]
        short = [asyncio.create_task(translator.translate_async(f"I have {i} dogs.")) for i in range(50)]
        await asyncio.sleep(0.1)
        for task in long:
            task.cancel()
        found = await asyncio.gather(*short)
        assert all(isinstance(x, asyncio.CancelledError) for x in await asyncio.gather(*long, return_exceptions=True))
        assert found == await asyncio.to_thread(translator.translate, [f"I have {i} dogs." for i in range(50)])
        try:
            await asyncio.wait_for(translator.translate_async(MANY), 0.3)
        except asyncio.TimeoutError:
            pass
        else:
            raise AssertionError("3,000 texts in .3 s")
        return await translator.translate_async("It rains.")

    with Translator(MODEL, target="de", **FAST) as translator:
        assert asyncio.run(work(translator)) == "Es regnet."


@test
def asynchronous_streams_are_bounded_closed_and_fail():
    asked, given = [0], [0]

    async def texts():
        while True:
            asked[0] += 1
            assert asked[0] - given[0] <= 12, "read too far ahead"
            yield f"I have {asked[0]} dogs."
            await asyncio.sleep(0)

    async def broken():
        yield "It rains."
        raise KeyError("no more")

    async def work(translator):
        stream = translator.stream_async(texts(), ahead=10)
        async for result in stream:
            given[0] += 1
            assert f" {given[0]} " in result.text and result.text.endswith("."), result.text
            if given[0] == 100:
                break
        await stream.aclose()
        seen = []
        try:
            async for result in translator.stream_async(broken()):
                seen.append(result.text)
        except KeyError:
            return seen
        raise AssertionError("no KeyError")

    with Translator(MODEL, target="de", **FAST) as translator:
        assert asyncio.run(work(translator)) == ["Es regnet."]
        assert translator.translate("It rains.")


# ---- Ctrl-C ----


def child(program, quiet=False, **more):
    """Run a program that must end in time; return its output."""
    begin = "from moe_translate import *\nimport asyncio, os, pyarrow, signal, sys, threading, time\n"
    # The background jobs of a shell ignore SIGINT.
    begin += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    begin += f"t = Translator({str(MODEL)!r}, target='de', threads=1)\n"
    begin += "L = [f'I have {i} dogs and a very big house near the sea.' for i in range(50000)]\n"
    command = [sys.executable, "-c", begin + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **more)
    assert done.returncode == 0 and not (quiet and done.stderr), done.stderr
    return done.stdout.strip()


INTERRUPTED = """
threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
async def each(stream):
    async for result in stream: pass
def loop(results):
    for result in results: pass
try:
    ACTION
except KeyboardInterrupt:
    print('interrupted')
assert t.translate('Good morning.') == 'Guten Morgen.'
"""


@test
def ctrl_c_stops_every_call():
    for action in (
        "t.translate(L)",
        "t.score(L, L)",
        "t.translate(L, prefix='Ich')",
        "t.translate_arrow(pyarrow.array(L))",
        "loop(t.results(L))",
        "loop(t.results(sys.stdin))",
        "loop((r, t.translate(L)) for r in t.results(L))",
        "asyncio.run(t.translate_async(L))",
        "asyncio.run(each(t.stream_async(L)))",
    ):
        reading, writing = os.pipe()  # standard input stays open without data
        try:
            assert child(INTERRUPTED.replace("ACTION", action), stdin=reading) == "interrupted", action
        finally:
            os.close(reading), os.close(writing)


@test
def programs_can_exit_during_a_call():
    for action in (
        "threading.Thread(target=t.translate, args=(L,), daemon=True).start(); time.sleep(.3)",
        "x = t.results(L); next(x)",
        "x = t.results(L); next(x); sys.exit()",
    ):
        assert child(action, quiet=True) == "", action


@test
def results_do_not_wait_for_the_next_text():
    program = "for r in t.results(sys.stdin): print(r.text.strip(), flush=True)"
    begin = f"import sys\nfrom moe_translate import *\nt = Translator({str(MODEL)!r}, target='de', threads=1)\n"
    command = [sys.executable, "-c", begin + program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asked:
        for text, wanted in ("It rains.", "Es regnet."), ("Good morning.", "Guten Morgen."):
            asked.stdin.write(text + "\n")
            asked.stdin.flush()
            assert asked.stdout.readline() == wanted + "\n"
        asked.stdin.close()
        assert asked.wait(20) == 0


@test
def values_of_wrong_types_are_refused_by_name():
    """Regression: a dict, a set, bytes or characters were token ids, and a generator lost its first message."""
    with tempfile.TemporaryDirectory() as folder, Translator(MODEL, target="de", **FAST) as translator:
        made_up.write(folder + "/model", {"?": "A question.", ".": "A sentence."})
        with Translator(folder + "/model", threads=1) as chat:
            talk = {"role": "user", "content": "Is it?"}
            assert chat.generate(part for part in [talk]).text == "A question."
            for action, said in (
                (lambda: translator.translate("a", progress=5), "progress must be a function"),
                (lambda: translator.translate("a", beam=[2]), "beam"),
                (lambda: translator.translate(pyarrow.array(["a"])), "use translate_arrow()"),
                (lambda: translator.translate_arrow(["a"]), "expects a pyarrow array of strings, not list"),
                (lambda: translator.translate_arrow(pyarrow.array([1])), "expects a pyarrow array of strings, not int"),
                (lambda: translator.translate_tokens("abc"), "not str"),
                (lambda: translator.translate_tokens([[5], "abc"]), "row 1: tokens must be a list of ids or pieces, not"),
                (lambda: translator.translate_tokens([b"ab"]), "row 0: tokens must be a list"),
                (lambda: translator.translate_tokens([{1, 2}]), "not set"),
                (lambda: translator.translate_tokens([5, 6]), "row 0: tokens must be a list"),
                (lambda: translator.translate_tokens([[True]]), "not bool"),
                (lambda: translator.translate_tokens([[5], [10**6]]), "row 1: token id 1000000 is out of range"),
                (lambda: translator.model.decode(5), "token ids must be a list, not int"),
                (lambda: chat.generate(b"abc"), "messages must be a text, a list"),
                (lambda: chat.generate(talk), "not dict"),
                (lambda: chat.generate([talk | {"content": ["x"]}]), "the content of message 0 must be a str, not list"),
                (lambda: chat.generate("a", max_tokens="5"), "max_tokens must be an int"),
                (lambda: chat.generate("a", max_tokens=2.5), "max_tokens must be an int"),
                (lambda: Text("a", before=5), "before must be a str, not int"),
            ):
                try:
                    raise AssertionError((said, action()))
                except (TypeError, ValueError, MoeError) as error:
                    assert said in str(error), (said, error)


@test
def bytes_are_refused():
    with Translator(MODEL, target="de") as translator:
        for action in (
            lambda: translator.translate(b"Good"),
            lambda: translator.translate([b"Good"]),
            lambda: list(translator.results([b"Good"])),
        ):
            try:
                action()
            except TypeError as error:
                assert "str, not bytes" in str(error), error
            else:
                raise AssertionError("bytes were accepted")


@test
def examples_of_the_readme_run():
    page = (ROOT / "tools/python/README.md").read_text(encoding="utf-8")
    examples = [text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "Translator" in text]
    assert len(examples) == 3
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(ROOT / "models", folder + "/models")
        pathlib.Path(folder, "big.txt").write_text("It rains.\nGood morning.\n", encoding="utf-8")
        command = [sys.executable, "-c", "".join(examples)]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    said = run.stdout + run.stderr
    assert not run.returncode and all(x in said for x in ("Es regnet.", "None, None,", "Buenos días", "4/4")), said


@test
def a_growing_text():
    line = "The contract was signed yesterday in Lisbon. When does the train leave?"
    with Translator(MODEL, target="de", beam=2) as translator:
        live, shown = moe_translate.Live(translator), []
        words = line.split()
        for n in range(1, len(words) + 1):
            shown.append(live.update(" ".join(words[:n])))
        assert [x.text for x in shown[:2]] == ["", ""] and not any(x.final for x in shown)
        assert all(x.text.startswith(x.stable) for x in shown)
        assert shown[6].stable == translator.translate("The contract was signed yesterday in Lisbon."), shown[6]
        assert live.finish(line) == moe_translate.Shown(translator.translate(line), translator.translate(line), True)
        assert live.update("").text == ""
        for text in "a\0b", "\ud800":
            assert_raises(MoeError, live.update, text)
        assert_raises(TypeError, live.update, b"a")
        assert_raises(MoeError, moe_translate.Live, translator, target="xx")


def checked_by_mypy(program):
    """Return the errors that mypy --strict reports for a program."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", folder]
        done = subprocess.run(
            [*command, "-c", program],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "MYPYPATH": str(ROOT / "tools/python")},
        )
    assert "Success" in done.stdout or "error:" in done.stdout, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "error:" in line]


def public(kind):
    return [name for name in [*vars(kind), *getattr(kind, "__annotations__", ())] if not name.startswith("_")]


@test
def type_checkers_know_every_name():
    program = (ROOT / "tests/package/every_call.py").read_text(encoding="utf-8")
    every = {"__version__", *moe_translate.__all__}
    kinds = moe_translate.Result, moe_translate.Hypothesis, moe_translate.Link, moe_translate.Stats, TextError
    for kind in Translator, Model, *kinds:
        every |= {"." + name for name in public(kind)}
    missing = [name for name in sorted(every) if not re.search(re.escape(name) + r"\b", program)]
    assert not missing, missing
    assert not checked_by_mypy(program), checked_by_mypy(program)
    wrong = checked_by_mypy("from moe_translate import Translator\nx: int = Translator().translate('a')\n")
    assert len(wrong) == 1 and "assignment" in wrong[0], wrong
    calls = ['Translator("x", targt="de")', 'Translator("x", beam="4")', 'Model("x", verfy=1)', 'T.translate("a", bean=1)',
             'T.translate("a", beam="1")', 'T.results(["a"], nbests=2)', 'T.stream("a", threads=2)', 'T.score("a", "b", x=1)',
             'T.generate("a", temprature=1)', 'T.translate_async("a", sead=1)', 'T.translate_tokens([[1]], targt="de")',
             'moe_translate.cached("x", targt="de")', 'T.translate("a", preset="huggingface")', 'T.translate_arrow(0, x=1)']
    program = "import moe_translate\nfrom moe_translate import Model, Translator\nT = Translator()\n"
    wrong = checked_by_mypy(program + "\n".join(calls) + "\n")
    found = {int(line.split(":")[1]) for line in wrong}
    missed = [call for number, call in enumerate(calls, 4) if number not in found]
    assert not missed, (missed, wrong)


@test
def every_public_name_is_used():
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/package/every_call.py"), str(MODEL)], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stdout == "done\n", run.stdout + run.stderr


def stats_of_a_program(log):
    """Return the expert statistics in the output of --stats, with their names in moe_stats."""
    forms = (
        (r"target tokens +(\d+)", ["target_tokens"]),
        (r"per visit \((\d+) pairs of a token and an expert, (\d+) visits", ["expert_pairs", "expert_visits"]),
        (r"experts held +(\d+) of (\d+)", ["experts_held", "experts"]),
        (r"experts fetched +(\d+) times .*; (\d+) visits found", ["expert_fetches", "expert_hits"]),
    )
    return {name: int(x) for form, names in forms for name, x in zip(names, re.search(form, log).groups())}


@test
def statistics_of_experts_equal_moe_translates():
    """Translating texts one by one must give the same statistics as moe-translate --stats."""
    lines = LINES[:8]
    options = {**FAST, "batch": 1, "expert_memory": "4M"}
    with Translator(MODEL, target="de", **options) as translator:
        before = translator.stats()
        assert before.sentences == before.expert_visits == before.expert_fetches == 0 < before.experts_held
        wanted = translator.translate(lines)
        stats = translator.stats()
        names = [*map("--{}".format, ("beam=2", "rerank=0", "threads=1", "batch=1", "expert-memory=4M"))]
        run = subprocess.run(
            [BIN / "moe-translate", "-m", MODEL, "-t", "de", "--stats", *names],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
        )
        assert run.stdout.splitlines() == wanted
        for name, value in stats_of_a_program(run.stderr).items():
            assert getattr(stats, name) == value, (name, value, stats)
        assert stats.experts == 64 > stats.experts_held > 2 and stats.device == "cpu" and stats.isa, stats
        assert stats.expert_fetch_bytes % stats.expert_fetches == 0 and stats.expert_wait_ns > 0, stats
        assert 0 <= stats.expert_ahead_used <= stats.expert_ahead <= stats.expert_fetches, stats
        seen = [translator.stats().sentences for _ in translator.results(lines)]
        assert all(0 < x - stats.sentences for x in seen) and seen == sorted(seen), (stats, seen)
        assert translator.stats().sentences == 2 * stats.sentences
    assert fails("argument", translator.stats)
    with Translator(MODEL, target="de", **FAST) as translator:
        translator.translate(lines)
        mapped = translator.stats()
    assert mapped.expert_visits > 0 == mapped.experts == mapped.expert_fetches == mapped.expert_wait_ns, mapped


@test
def models_report_their_languages_and_metadata():
    model = Model(MODEL)
    assert (
        model.languages == ["en", "de", "fr", "es"]
        and model.knows("DE")
        and model.knows("deu")
        and not model.knows("nl")
    )
    assert model.meta("general.name") == "en-de-fr-es" and model.meta("no.such.key") == "" and not model.needs_source
    assert {"beam", "target", "batch", "threads"} <= {name for name, _, help in options() if help} and version()


@test
def models_with_65000_languages_open_quickly():
    meta, tensors = small_models.translation()
    meta["languages.codes"] = [f"l{i}" for i in range(65000)]
    meta["languages.tags"] = [5 + i % 20 for i in range(65000)]
    with tempfile.TemporaryDirectory() as folder:
        small_models.write(folder + "/model", meta, tensors)
        begin = time.process_time()
        model = Model(folder + "/model", form="ids")
        assert model.knows("l64999") and time.process_time() - begin < 5  # regression: 16 s with linear search


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:]))
