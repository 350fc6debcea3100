"""Use every public name of moe_translate. test_translator.py checks this program with mypy --strict and runs it.

Usage: tests/python tests/package/every_call.py MODEL
"""

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator

import moe_translate
from moe_translate import (AvailableModel, CallOptions, Hypothesis, Link, Live, LocalModel, Model, MoeError, Options, Result,
                           Shown, Stats, Term, Text, TextError, Translator)

path: str = sys.argv[1] if len(sys.argv) > 1 else moe_translate.default_model()
version: str = moe_translate.__version__
assert version == moe_translate.version()
names: list[str] = [name for name, values, text in moe_translate.options() if values or text]
assert "beam" in names

local: list[LocalModel] = moe_translate.models()
assert all(one.path and one.directions and one.bytes and (one.shipped or one.name) for one in local)
os.environ["HF_HUB_OFFLINE"] = "1"  # no network
try:
    offers: list[AvailableModel] = moe_translate.available("pt")
    got: str = moe_translate.get("nllb", accept_licence=True)
except MoeError as error:
    assert "HF_HUB_OFFLINE" in str(error) or "not installed" in str(error), error

model: Model = Model(path)
languages: list[str] = model.languages
licence: str = model.meta("general.licence")
assert model.path == path and model.knows("de") and not model.needs_source and languages and licence
directions: list[tuple[str, str]] = Model(models=[path]).directions
assert directions == model.directions and ("en", "de") in directions
ids: tuple[int, ...] = model.encode("Where is my book?")
assert model.tokens(ids, source=True)[-1] == "?" and model.encode("Wo?", translation=True)
words: str = model.decode(iter(ids))
assert words == "Where is my book?"
likely: list[tuple[str, float]] = model.detect("Where is my book?")
assert likely[0][0] == "en"


def look(result: Result) -> str:
    best: Hypothesis = result.hypotheses[0]
    numbers: tuple[float, ...] = (best.score, best.logprob, *best.token_logprobs)
    links: tuple[Link, ...] = best.alignment
    for link in links:
        assert link.source_begin < link.source_end and link.target_begin < link.target_end
    assert not (result.error or result.cut or result.truncated or result.incomplete) and result.status == "ok"
    tokens: tuple[str, ...] = model.tokens(best.ids)
    assert tokens == best.tokens and result.source_tokens == model.tokens(result.source_ids)
    assert numbers and best.finished and best.text == result.text
    between: str = result.between + result.between_language + result.note
    confidence: "float | None" = result.confidence
    assert not between and (confidence is None or 0 <= confidence <= 1)
    return result.text


async def ask(translator: Translator) -> list[str]:
    one: str = await translator.translate_async("It rains.")
    two: list[str] = await translator.translate_async(["It rains."], target="fr", prefix=["Il"])

    async def texts() -> AsyncIterator[str]:
        yield "It rains."

    stream: AsyncIterator[Result] = translator.stream_async(texts(), ahead=10)
    return [one, *two, *[result.text async for result in stream]]


with Translator(model, target="de", glossary={"Mary": "Mary"}, beam=2, rerank=0, threads=1, alignment=1) as translator:
    text: str = translator.translate("It rains.")
    pieces: list[str] = list(translator.stream("It rains.", target="de", prefix="Es"))
    pairs: list[tuple[str, str]] = list(translator.stream("It rains.", source="en", glossary={"a": "b"}, after=True))
    several: list[str] = translator.translate(["It rains.", "x"], target="de", source="en", errors="empty")
    begun: str = translator.translate("It rains.", prefix="Es")
    termed: str = translator.translate("The dog sleeps.", glossary={"dog": "Gugelhupf"})
    assert "Gugelhupf" in termed
    assert [look(result) for result in translator.results(iter(["It rains."]))] == [text] == several[:1] == [begun]
    scored: Hypothesis = translator.score("It rains.", text)
    more: list[Hypothesis] = translator.score(["It rains."], [text])
    translator.check_languages()
    terms: list[Term] = translator.terms()
    assert terms == [Term("Mary", "Mary", 0, 0)] and translator.glossary_heading == ""
    stats: Stats = translator.stats()
    assert 0 < stats.sentences <= stats.source_tokens and 0 < stats.target_tokens and 0 < stats.steps <= stats.rows
    assert stats.bytes and stats.isa and stats.device and stats.device_bytes >= 0
    assert 0 < stats.expert_visits <= stats.expert_pairs
    assert 0 <= stats.experts_held <= stats.experts and 0 <= stats.expert_hits <= stats.expert_visits
    assert stats.expert_fetches * stats.expert_fetch_bytes >= 0 <= stats.expert_wait_ns
    assert 0 <= stats.expert_ahead_used <= stats.expert_ahead
    assert scored == more[0] and translator.detect("It rains.")[0][0] == translator.model.languages[0]
    assert asyncio.run(ask(translator))[0] == text
    shown: Text = Text("It rains.", before="", draft="Es regnet.")
    assert translator.translate([shown])[0] == text and not shown.before
    live: Live = Live(translator, target="de", source="en", beam=2)
    view: Shown = live.update("It rains. The sun does not", paused=True)
    assert view.text.startswith(view.stable) and view.stable == text and not view.final
    assert live.finish("It rains.") == Shown(text, text, True)
    counts: list[int] = []
    narrow: CallOptions = {"beam": 1}
    cells: list[str | None] = translator.translate(["It rains.", None, float("nan")], progress=counts.append, **narrow)
    assert cells[1:] == [None, None] and cells[:1] == translator.translate(["It rains."], beam=1, length_penalty=0.2)
    gaps: list[Result | None] = list(translator.results(["It rains.", None], nbest=2, beam=2))
    assert gaps[0] and len(gaps[0].hypotheses) == 2 and gaps[1] is None
    try:
        translator.remember("It rains.", "Es regnet.", source_language="en")
    except ValueError as error:  # the translator has no memory
        assert "memory=FILE" in str(error)
    translator.cancel()
    try:
        translator.translate("a\0b")
    except TextError as error:
        number: int = error.index
        assert number == 0 and error.status == "argument" and isinstance(error, MoeError) and not error.where
    if importlib.util.find_spec("pyarrow"):
        pyarrow = importlib.import_module("pyarrow")
        assert translator.translate_arrow(pyarrow.array(["It rains."]))[0].to_pylist() == [text]
with Translator(models=[path], target="de", source="en", models_memory="1G", beam=2, rerank=0, threads=1) as translator:
    assert translator.translate("It rains.") == text
    translator.check_languages()
every: Options = {"target": "de", "beam": 2, "rerank": 0, "threads": 1}
with Translator(path, **every) as translator:
    by_id: list[Result] = translator.translate_tokens([model.encode("It rains.")])
    by_piece: list[Result] = translator.translate_tokens([["▁It", "▁rain", "s", "."]], progress=counts.append)
    assert by_id[0].hypotheses[0].tokens == by_piece[0].hypotheses[0].tokens
    for ask_for in (lambda: model.prompt([{"role": "user", "content": "Hello!"}]), lambda: translator.generate("Hello!"),
                    lambda: list(translator.generate_stream([1, 2], max_tokens=4, beam=1, seed=1))):
        try:
            ask_for()
        except MoeError as wrong:
            assert wrong.status == "unsupported", wrong  # the model only translates
again: Translator = moe_translate.cached(path, target="de", beam=2, rerank=0, threads=1)
assert again is moe_translate.cached(path, target="de", beam=2, rerank=0, threads=1)
assert again.translate("It rains.") == text
again.close()
print("done")
