#!/usr/bin/env python3
"""Test the Python package with several models: pivots, folders, memory limits, documents.

    tests/run tests/package/test_several_models.py
"""
import asyncio
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading

import several_models
from suite import Skip, Suite

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / os.environ.get("BIN", ".")
os.environ.setdefault("MOE_LIBRARY", str(BIN / ("libmoetext.dylib" if sys.platform == "darwin" else "libmoetext.so")))

from moe_translate import Model, MoeError, TextError, Translator  # noqa: E402

TEMPORARY = tempfile.TemporaryDirectory()
MODELS = several_models.one_way(pathlib.Path(TEMPORARY.name) / "models", "en-de", "de-fr", "fr-es")
FAST = {"beam": 2, "rerank": 0, "threads": 1}
TEXTS = ["Good morning, my friend. Where is my book?", "The <b>weather</b> is {nice} today.", "", "  two\n\nlines  ",
         "We have known each other for ten years."]
test = Suite()


def alone(source, target, **options):
    return Translator(MODELS / f"{source}-{target}.bin", source=source, target=target, **FAST, **options)


def fails(kind, words, action, *arguments, **named):
    try:
        action(*arguments, **named)
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(f"no exception: {words}")


@test
def a_pivot_equals_two_translators():
    with alone("en", "de") as first, alone("de", "fr") as second, Translator(models=MODELS, **FAST) as both:
        between = first.translate(TEXTS)
        wanted = second.translate(between)
        assert both.translate(TEXTS, target="fr", source="en") == wanted
        assert both.translate(TEXTS[0], target="de", source="en") == between[0]
        for result, text, middle, end in zip(both.results(TEXTS, target="fr", source="en"), TEXTS, between, wanted,
                                             strict=True):
            assert (result.between, result.between_language, result.text) == (middle, "de", end), (text, result)
            assert result.source_ids == next(second.results([middle])).source_ids
            assert result.hypotheses[0].tokens == second.model.tokens(result.hypotheses[0].ids)
        assert next(both.results(TEXTS[:1], target="de", source="en")).between == ""
        for text, end in zip(TEXTS, wanted, strict=True):
            pairs = list(both.stream(text, target="fr", source="en", after=True))
            assert "".join(piece for piece, _ in pairs) == end, (pairs, end)
        assert any(rest for _, rest in pairs), pairs

        async def work():
            return await both.translate_async(TEXTS, target="fr", source="en")

        assert asyncio.run(work()) == wanted


@test
def a_list_of_files_is_accepted():
    paths = [MODELS / "en-de.bin", str(MODELS / "de-fr.bin")]
    model = Model(models=paths)
    assert sorted(model.directions) == [("de", "fr"), ("en", "de"), ("en", "fr")] and model.needs_source
    assert sorted(model.languages) == ["de", "en", "fr"] and model.knows("deu_Latn") and not model.knows("es")
    assert sorted(Model(models=MODELS).directions) == \
        [("de", "es"), ("de", "fr"), ("en", "de"), ("en", "fr"), ("fr", "es")]
    assert len(Model(several_models.SHIPPED).directions) == 12
    assert model.detect("Wo ist mein Haus, mein Freund?")[0][0] == "de" and model.meta("general.name") == ""
    fails(MoeError, "several models have no token ids", model.encode, "a")
    fails(MoeError, "several models have no token ids", model.decode, [5])
    assert model.tokens([5]) == ("",)
    fails(TypeError, "mutually exclusive", Model, MODELS, models=MODELS)
    fails(MoeError, "no model was named", Model, models=[])
    fails(MoeError, "not a translation model", Model, models=[ROOT / "models" / "lm-en.bin"])
    assert Model(models=MODELS, form="ids").directions == Model(models=MODELS).directions


@test
def missing_languages_are_reported():
    with Translator(models=MODELS, **FAST) as both:
        fails(MoeError, "pass target to the call", both.translate, "a", source="en")
        fails(MoeError, "pass source to the call", both.translate, "a", target="fr")
        fails(MoeError, "no language 'pt'", both.translate, "a", target="pt", source="en")
        fails(TextError, "translates from en to es; from en: de fr; to es: de fr", both.translate, "a", target="es",
              source="en")
        assert both.translate("Where is my house?", target="fr", source="auto") == \
            both.translate("Where is my house?", target="fr", source="en")
        assert both.translate("Ma maison.", target="fr", source="auto") == "Ma maison."
        assert both.translate("Good morning!", target="de") == both.translate("Good morning!", target="de", source="en")
        fails(TextError, "through a pivot language has no probability", both.score, "house", "maison", target="fr",
              source="en")
        assert both.score("house", "Haus", target="de", source="en").logprob < 0
    fails(MoeError, "translates from en to es", Translator, models=MODELS, source="en", target="es")


@test
def words_are_linked_through_both_models():
    text = "Where is my book?"
    with Translator(models=MODELS, alignment=1, nbest=2, **FAST) as both:
        result = next(both.results([text], target="fr", source="en"))
        best = result.hypotheses[0]
        assert len(result.hypotheses) == 2 and result.hypotheses[1].alignment
        links = {(text[k.source_begin:k.source_end], best.text[k.target_begin:k.target_end]) for k in best.alignment}
        assert ("my", "mon") in links, links
    with alone("en", "de", alignment=1) as first, alone("de", "fr", alignment=1) as second:
        one = next(first.results([text])).hypotheses[0]
        two = next(second.results([one.text])).hypotheses[0]
        wanted = {((a.source_begin, a.source_end), (b.target_begin, b.target_end)) for a in one.alignment
                  for b in two.alignment if a.target_begin < b.source_end and b.source_begin < a.target_end}
        assert {((k.source_begin, k.source_end), (k.target_begin, k.target_end)) for k in best.alignment} == wanted


@test
def a_prefix_applies_to_the_last_model():
    with Translator(models=MODELS, **FAST) as both:
        assert both.translate("Where is my book?", target="fr", source="en", prefix="Mon livre").startswith("Mon livre")


@test
def glossaries_apply_to_both_models():
    terms = {"book": "ouvrage", "Tom": "Tom"}
    with Translator(models=MODELS, **FAST) as both:
        for _ in range(2):
            found = both.translate("Tom has my book.", target="fr", source="en", glossary=terms)
            assert "Tom" in found and "ouvrage" in found, found
        assert "ouvrage" not in both.translate("Tom has my book.", target="fr", source="en")
    with Translator(models=MODELS, glossary=terms, **FAST) as both:
        assert "ouvrage" in both.translate("Tom has my book.", target="fr", source="en")
    with Translator(models=MODELS, models_memory="50M", batch=2, **FAST) as both:  # too little for all models
        for target in "fr", "de", "fr":
            found = both.translate("Tom has my book.", target=target, source="en", glossary=terms)
            assert "ouvrage" in found, (target, found)


def opened():
    """Return the names of the models that are mapped, and the anonymous memory in MiB."""
    maps = pathlib.Path("/proc/self/smaps")
    if not maps.exists():
        raise Skip("no /proc here")
    names = set(re.findall(r"models/(\S+)\.bin", maps.read_text()))
    return names, int(re.search(r"RssAnon:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024


@test
def models_are_closed_under_the_memory_limit():
    with Translator(models=MODELS, models_memory="60M", batch=4, **FAST) as both:
        assert opened()[0] == set()
        both.translate("Good morning.", target="de", source="en")
        names, anonymous = opened()
        assert names == {"en-de"}
        for _ in range(4):
            for source, target in ("en", "fr"), ("de", "es"), ("fr", "es"), ("en", "de"):
                both.translate("Tom is here.", target=target, source=source)
        assert "en-de" in opened()[0] and len(opened()[0]) <= 2 and opened()[1] < anonymous + 15, (anonymous, opened())
    assert opened()[0] == set()
    with Translator(models=MODELS, models_memory="20M", **FAST) as both:
        fails(TextError, "more than models-memory allows (20.0 MiB)", both.translate, "a", target="de", source="en")


@test
def threads_share_a_translator():
    with Translator(models=MODELS, models_memory="90M", batch=4, **FAST) as both:
        ways = [("en", "de", "Where is my book?"), ("en", "fr", "Where is my house?"), ("de", "es", "Wo ist Tom?"),
                ("fr", "es", "Où est Tom ?")]
        wanted = [both.translate(text, target=target, source=source) for source, target, text in ways]
        wrong = []

        def work(i):
            source, target, text = ways[i]
            for n in 1, 30, 3:
                if both.translate([text] * n, target=target, source=source) != [wanted[i]] * n:
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(i % 4,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong


@test
def calls_can_be_cancelled():
    with Translator(models=MODELS, **FAST) as both:
        timer = threading.Timer(0.5, both.cancel)
        timer.start()
        fails(MoeError, "cancelled", both.translate, ["I do not know this man, my friend. " * 50] * 200, target="fr",
              source="en")
        assert both.translate("Good morning.", target="de", source="en")


@test
def files_of_other_programs_get_a_conversion_command():
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text('{"model_type": "m2m_100"}')
        pathlib.Path(folder, "model.safetensors").write_bytes(b"")
        for given in {"path": folder}, {"models": folder}:
            try:
                Model(**given)
            except MoeError as error:
                assert f"convert it first: tools/convert/convert.py --from hf {folder} -o model.bin" in str(error)
            else:
                raise AssertionError(f"{given} is a model")


@test
def two_translators_share_the_models():
    model = Model(models=MODELS)
    with Translator(model, **FAST) as one, Translator(model, **FAST) as two:
        assert one.translate("Tom is here.", target="fr", source="en") == \
            two.translate("Tom is here.", target="fr", source="en")


@test
def a_model_pruned_for_a_direction_has_only_that():
    with tempfile.TemporaryDirectory() as folder:
        listed, cut = os.path.join(folder, "list.json"), os.path.join(folder, "cut.bin")
        with open(listed, "w", encoding="utf-8") as file:
            file.write(str(list(range(0, 64, 2))))
        subprocess.run([BIN / "moe-prune", "-q", "-m", several_models.SHIPPED, "-o", cut, "--experts", listed, "--pair",
                        "en-de"], check=True)
        assert Model(cut).directions == [("en", "de")]
        with Translator(cut, source="en", target="de", **FAST) as translator:
            assert translator.translate("Good morning.")
        fails(MoeError, "has no language 'fr'; available: de", Translator, cut, target="fr")
        fails(MoeError, "has no language 'de'; available: en", Translator, cut, source="de", target="de")


@test
def documents_are_translated_through_a_pivot():
    html = b"<p>Where is <b>my book</b>?</p>"
    program = [sys.executable, "-m", "moe_translate.program"]
    command = [*program, "--models", MODELS, "-s", "en", "-t", "fr", "-f", "html", "-"]
    done = subprocess.run(command, input=html, capture_output=True, check=False)
    assert done.returncode == 0 and b"<b>" in done.stdout and b"livre" in done.stdout, done
    done = subprocess.run([*command, "-m", MODELS / "en-de.bin"], input=html, capture_output=True, check=False)
    assert done.returncode == 2 and b"mutually exclusive" in done.stderr, done


if __name__ == "__main__":
    sys.exit(test.run())
