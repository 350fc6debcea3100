#!/usr/bin/env python3
"""moe-server: requests of chat clients for several lines at once, and answers in JSON of a schema.

Usage: tests/python tests/server/test_structured.py      (BIN is the folder of the programs)

The sentences are those of the README files. Every line must be moe-translate's. With MOE_TEST_LONG, 500 requests are
sent. The requests have the form of those of SubtitleEdit, immersive-translate, OmegaT, Weblate and others.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import random
import re
import subprocess
import sys

from suite import Suite
from test_deepl import refused
from test_openai import FREE, LONGEST, TEMPLATE, client_of, made, make, openai
from test_server import BIN, MODEL, ROOT, serving

test = Suite()
client_test = test.needs(openai, "openai")
chat_test = test.needs(openai and make, "openai, NumPy, jinja2, or bpe_lines")
REQUESTS = 500 if os.environ.get("MOE_TEST_LONG") else 40
TASK = "Translate the subtitles from English to German. Be informal."
NUMBERED = {"type": "object", "additionalProperties": False}


@functools.cache
def sentences():
    """Return sentences of the documentation that contain no separator of a form."""
    found = []
    for path in sorted(ROOT.glob("tools/**/README.md")):
        text = re.sub(r"```.*?```|^[ #|*>-].*?$|\[|\]\(.*?\)", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        found += re.findall(r"[A-Z][^.\n<|%={]{10,90}\.(?=\s)", text.replace("\n", " "))
    return sorted(set(found))


def user(text):
    return {"role": "user", "content": text}


def with_task(text):
    return {"messages": [{"role": "system", "content": TASK}, user(text)]}


def schema_of(keys):
    rows = {str(k): {"type": "string"} for k in keys}
    schema = {**NUMBERED, "properties": rows, "required": list(rows)}
    return {"type": "json_schema", "json_schema": {"name": "translations", "strict": True, "schema": schema}}


def subtitles(rng, lines):
    """SubtitleEdit's advanced engine, with one of the formats that it tries."""
    first, history = rng.randrange(1, 500), [{"source": "Hello.", "translation": "Hallo."}]
    rows = [{"n": first + i, "text": x} for i, x in enumerate(lines)]
    kinds = {"response_format": schema_of(x["n"] for x in rows)}, {"response_format": {"type": "json_object"}}, {}
    return {**with_task(json.dumps({"history": history, "lines": rows})), "cache_prompt": True, "temperature": 0.2,
            "max_tokens": 900, **rng.choice(kinds)}, lambda x: [json.loads(x)[str(row["n"])] for row in rows]  # fmt: skip


def subtitle(rng, lines):
    """SubtitleEdit's plain engine."""
    separator = rng.choice(["\n", "<br />"])
    prompt = "Translate from English to German, keep punctuation as input, give only the output without comments:"
    body = {"messages": [user(f"{prompt}\n\n{separator.join(lines)}")], "repeat_penalty": 1.05}
    return body, lambda x: x.split(separator)


def paragraphs(rng, lines):
    """immersive-translate: paragraphs between %%."""
    if rng.random() < 0.5:
        return with_task("\n\n%%\n\n".join(lines)), lambda x: x.split("\n\n%%\n\n")
    text = "".join(f"%% Paragraph {i}\n{x}\n" for i, x in enumerate(lines, 1))
    return with_task(text), lambda x: [p.strip("\n") for p in re.split(r"^%% Paragraph \d+$", x, flags=re.M)[1:]]


def strings(rng, lines):
    prompt = "Translate this JSON array into German. Answer with an array."
    return {"messages": [user(f"{prompt}\n\n{json.dumps(lines)}")]}, json.loads


def objects(rng, lines):
    rows = [{"id": 7 * i, "src": x} for i, x in enumerate(lines)]

    def read(text):
        found = json.loads(text)
        assert [x["id"] for x in found] == [x["id"] for x in rows] and all(len(x) == 2 for x in found), found
        return [x["dst"] for x in found]

    return with_task(json.dumps(rows, ensure_ascii=False)), read


def keys(rng, lines):
    rows = dict(enumerate(lines, 1))
    return with_task(f"```json\n{json.dumps(rows, indent=1)}\n```"), lambda x: [json.loads(x)[str(i)] for i in rows]


def numbers(rng, lines):
    text = "\n".join(f"{i}. {x}" for i, x in enumerate(lines, 1))
    return with_task(text), lambda x: [re.fullmatch(rf"{i}\. (.*)", y)[1] for i, y in enumerate(x.split("\n"), 1)]


def joined(rng, lines):
    return with_task(" ||| ".join(lines)), lambda x: x.split(" ||| ")


def elements(rng, lines):
    text = "\n".join(f"<p id={i}>{x}</p>" for i, x in enumerate(lines, 1))
    return with_task(text), lambda x: [re.fullmatch(rf"<p id={i}>(.*)</p>", y)[1]
                                       for i, y in enumerate(x.split("\n"), 1)]  # fmt: skip


def parts(rng, lines):
    """Weblate: languages in quotation marks, and a line between two strings; OmegaT: one segment."""
    task = "You are a translator, adept at translating text\nfrom language 'en'\nto language 'de'\nwith precision."
    text = "\n==WEBLATE_PART==\n".join(lines)
    return {"messages": [{"role": "system", "content": task}, user(text)]}, lambda x: x.split("\n==WEBLATE_PART==\n")


def described(source):
    """Return a string as newer versions of Weblate describe it."""
    return {"source": source, "parts": [{"type": "text", "text": source}], "context": "menu", "explanation": "a label"}


def descriptions(rng, lines):
    """Newer Weblate: the message names the languages, the instruction does not."""
    task = "You are a professional translation engine.\n\nRules:\n1. Translate each string in order.\n2. Output an array."
    text = json.dumps({"source_language": "en", "target_language": "de", "glossary": [],
                       "strings": [described(x) for x in lines]})  # fmt: skip
    return {"messages": [{"role": "system", "content": task}, user(text)], "temperature": 0}, json.loads


def with_examples(body, pairs):
    """Put an earlier turn before Weblate's message, as newer versions do: examples and their translations."""
    system, message = body["messages"]
    before = descriptions(None, list(pairs))[0]["messages"][1]
    answer = {"role": "assistant", "content": json.dumps(list(pairs.values()))}
    return {**body, "messages": [system, before, answer, message]}


SHAPES = [subtitles, subtitle, paragraphs, strings, objects, keys, numbers, joined, elements, parts, descriptions]


def ask(server, body):
    """Return the content of an answer."""
    if not body.get("stream"):
        status, answer = server.ask("/v1/chat/completions", body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop", choice
        return choice["message"]["content"]
    status, answer = server.ask("/v1/chat/completions", body)
    *events, last = [x.removeprefix("data: ") for x in answer.split("\n\n") if x]
    choices = [json.loads(x)["choices"][0] for x in events]
    assert status == 200 and last == "[DONE]" and choices[-1]["finish_reason"] == "stop", answer
    assert choices[0]["delta"]["role"] == "assistant" and not any(x["finish_reason"] for x in choices[:-1]), answer
    return "".join(x["delta"].get("content", "") for x in choices)


def translated(lines, *options):
    """Return moe-translate's line for each line."""
    command = [BIN / "moe-translate", "-q", "-s", "en", "-t", "de", *options]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1: some lines are left untranslated
    return dict(zip(lines, done.stdout.split("\n")[:-1], strict=True))


def check_shapes(server, wanted, n, batch=6):
    """Send `n` requests of all shapes, eight at a time."""
    rng, pool = random.Random(1), list(wanted)
    jobs = []
    for i in range(n):
        lines = rng.sample(pool, rng.randint(1, batch))
        body, read = SHAPES[i % len(SHAPES)](rng, lines)
        jobs.append((SHAPES[i % len(SHAPES)].__name__, lines, {**body, "stream": rng.random() < 0.5}, read))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda job: ask(server, job[2]), jobs))
    for (name, lines, body, read), answer in zip(jobs, answers, strict=True):
        assert read(answer) == [wanted[x] for x in lines], (name, body, answer)


@test
def every_line_of_all_shapes_is_moe_translates():
    lines = random.Random(2).sample(sentences(), min(len(sentences()), REQUESTS))
    wanted = translated(lines, "-m", MODEL, "--beam", "3", "--rerank", "0")
    assert len(set(wanted.values())) > 0.9 * len(lines) > 30
    with serving() as server:
        check_shapes(server, wanted, REQUESTS)


@test
def weblate_and_omegat_are_answered():
    """Send requests with the members and instructions of each connector."""
    line = "The dog sleeps."
    with serving() as server:
        def content(messages):
            status, answer = server.ask("/v1/chat/completions", {"model": "any", "messages": messages, "temperature": 0})
            assert status == 200, answer
            return answer["choices"][0]["message"]["content"]

        wanted = server.ask("/translate", {"q": line, "source": "en", "target": "de"})[1]["translatedText"]
        marked = "Click @@PH6@@Save@@PH16@@ to open @@PH30@@."
        body, read = descriptions(None, [line, marked])
        system = body["messages"][0]
        examples = {"Hello, @@PH1@@!": "Hallo, @@PH1@@!", "Weblate": "Weblate"}
        found = read(content(with_examples(body, examples)["messages"]))
        assert found[0] == wanted and len(found) == 2, found
        assert sorted(re.findall(r"@@PH\d+@@", found[1])) == ["@@PH16@@", "@@PH30@@", "@@PH6@@"], found
        body, read = descriptions(None, ["Hello, @@PH7@@!", line])  # examples are the client's translation memory
        found = read(content(with_examples(body, {**examples, line: "Der Hund ruht."})["messages"]))
        assert found == ["Hallo, @@PH7@@!", "Der Hund ruht."], found
        terms = {"source_language": "en", "target_language": "de", "glossary": [
            {"source": "dog", "target": "Gugelhupf", "source_explanation": "a cake", "flags": ["terminology"]}],
            "strings": [described(line)]}  # fmt: skip
        assert "Gugelhupf" in read(content([system, user(json.dumps(terms))]))[0]
        for task in ("Please translate the following text from EN to DE.",
                     "Please translate the following text from EN-US to DE-DE.",
                     "You are a translation tool integrated in a CAT (Computer-Assisted Translation) tool. Translate the "
                     "following text from EN-US to DE. Preserve the tags in the text and keep any segmentations intact.",
                     "You are a professional translation engine for OmegaT. Translate from en-US to de. Preserve tags, "
                     "placeholders, and line breaks. Return only the translated text."):  # fmt: skip
            assert content([{"role": "system", "content": task}, user(line)]) == wanted, task
            assert content([user(f"{task}\n\n{line}")]) == wanted, task
        given = server.ask("/translate", {"q": line, "source": "en", "target": "de", "glossary": {"dog": "Gugelhupf"}})
        given = given[1]["translatedText"]
        assert given != wanted
        ask_for = "Translate from EN to DE:\n\n"
        for before, after in (
            ("", "\n\nTerminology that occurs in this segment, for reference:\n- dog → Gugelhupf\n- cat → Kater"),
            ("", '\n\nApproved terms:\n- "dog" → "Gugelhupf" (a cake)'),
            ("Glossary:\ndog\tGugelhupf\n\n", ""), ("Terms:\n- dog = Gugelhupf\n\n", "\n"),
        ):  # fmt: skip
            assert content([user(f"{ask_for}{before}{line}{after}")]) == given, (before, after)
            task = {"role": "system", "content": "You are a professional translator. Return only the translation."}
            assert content([task, user(f"{ask_for}{before}{line}{after}")]) == given, (before, after)
        for rows in "\n\nStrict glossary, use exactly:\n- dog → Gugelhupf  [a cake]", "Glossary:\ndog\tGugelhupf\n":
            task = {"role": "system", "content": f"You are a translation engine. Translate from en-US to de.\n\n{rows}"}
            assert content([task, user(line)]) == given, rows
        for text in f"{line}\n\nTerms:\nThe cat sleeps.", f"Terms:\n- dog → Hund\n{line}":  # texts, not glossaries
            found = content([user(f"{ask_for}{text}")])
            assert wanted in found and found.count("\n") == text.count("\n"), found
        task = "You are a translation assistant, adept at translating text\nfrom language 'en'\nto language 'de'\nprecisely."
        status, answer = server.ask("/api/generate", {"model": "any", "system": task, "stream": False,
                                                      "prompt": f"{line}\n==WEBLATE_PART==\n{line}"})  # fmt: skip
        assert status == 200 and answer["response"] == f"{wanted}\n==WEBLATE_PART==\n{wanted}", answer
        status, answer = server.ask("/translate", {"api_key": "", "q": [line, line], "source": "en", "target": "de"})
        assert status == 200 and answer["translatedText"] == [wanted, wanted], answer


@chat_test
def chat_models_keep_the_shapes_too():
    lines = random.Random(3).sample(sentences(), 30)
    model = made(TEMPLATE)[0]
    free = ["--max-len-factor", "0", "--max-len-offset", str(LONGEST)]
    wanted = translated(lines, "-m", model, *free)
    with serving(*FREE, fast=False, model=model) as server:
        structured = [x for x, y in wanted.items() if y.strip() == y and not re.search(r"[|%<]", y)]
        assert len(structured) > 10, wanted
        rng = random.Random(4)
        for shape in SHAPES:
            some = rng.sample(structured, 3)
            body, read = shape(rng, some)
            more = {"q": some, "source": "en", "target": "de", "context": "Hello.\n"}  # SubtitleEdit's history
            mine = [wanted[x] for x in some]
            if shape == subtitles:
                mine = server.ask("/translate", more)[1]["translatedText"]
            for stream in False, True:
                found = read(ask(server, {**body, "stream": stream}))
                assert found == mine, (shape.__name__, found, mine)
        changed = [x for x in structured if wanted[x] != x]
        body, read = descriptions(None, changed)
        mine = [wanted[x] for x in changed]
        assert read(ask(server, with_examples(body, {"Weblate": "Weblate", "Save": "Sichern"}))) == mine
        similar = {re.sub(r"\w+", "House", x, count=1): "Das Haus ist alt." for x in changed}
        found = server.ask("/translate", {"q": changed, "source": "en", "target": "de", "memory": similar})
        found = found[1]["translatedText"]
        assert read(ask(server, with_examples(body, similar))) == found != mine, (similar, found, mine)
        messages = with_examples(descriptions(None, ["x"])[0], {"a": "b"})["messages"]
        for chat in [*messages[:3], user("Be formal.")], [user("Hi!"), {"role": "assistant", "content": "Hello!"}, messages[3]]:
            status, answer = server.ask("/v1/chat/completions", {"messages": chat, "max_tokens": 5})
            assert status == 200 and answer["usage"]["completion_tokens"] == 5, answer
        chat = {"messages": [user(f"Translate into German: {some[0]}")], "max_tokens": 5}  # no structure to keep
        status, answer = server.ask("/v1/chat/completions", chat)
        assert status == 200 and answer["usage"]["completion_tokens"] == 5, answer
        assert ask(server, {**chat, "target": "de"}) == wanted[some[0]]


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


TREE = {
    "type": "object", "additionalProperties": False, "required": ["name", "leaves"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "ok": {"type": ["boolean", "null"]},
                   "kind": {"enum": ["a", "b c", 7]}, "size": {"anyOf": [{"type": "null"}, {"type": "number"}]},
                   "leaves": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 2, "maxItems": 3}},
    "$defs": {"leaf": {"type": "object", "properties": {"key": {"const": "x"}, "more": {
        "type": "array", "items": {"$ref": "#/$defs/leaf"}}}, "required": ["key", "more"]}},
}  # fmt: skip


def check_leaf(leaf):
    assert list(leaf) == ["key", "more"] and leaf["key"] == "x", leaf
    for x in leaf["more"]:
        check_leaf(x)


def check_tree(text):
    tree = json.loads(text)
    assert list(tree) == list(TREE["properties"]) and isinstance(tree["name"], str) and type(tree["age"]) is int, tree
    assert tree["ok"] in (True, False, None) and tree["kind"] in ("a", "b c", 7) and 2 <= len(tree["leaves"]) <= 3, tree
    assert tree["size"] is None or isinstance(tree["size"], (int, float)), tree
    for leaf in tree["leaves"]:
        check_leaf(leaf)


@chat_test
def answers_of_chat_models_fit_any_schema():
    """The model is noise, so the schema alone makes its answers valid; a limit cuts many of them."""
    model = made(TEMPLATE, bos_token_id=445)[0]  # its token 1 is a quotation mark
    with serving(*FREE, "--set", "max-len-offset=200", fast=False, model=model) as server:
        def answer(kind, **more):
            body = {"messages": [user("Describe a tree.")], "response_format": kind, **more}
            status, found = server.ask("/v1/chat/completions", body)
            assert status == 200, found
            content = found["choices"][0]["message"]["content"]
            events = server.ask("/v1/chat/completions", {**body, "stream": True})[1].split("\n\n")[:-2]
            parts = [json.loads(x.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for x in events]
            assert "".join(parts) == content, (parts, content)
            return content

        found = set()
        for seed in range(12):
            sampled = {"temperature": 3, "seed": seed, "max_tokens": 200 if seed % 3 else 3 * seed + 1, "stop": ["{"]}
            check_tree(one := answer(json_schema(TREE), **sampled))
            found.add(one)
            assert isinstance(json.loads(answer({"type": "json_object"}, **sampled)), dict)
            assert json.loads(answer(json_schema({"enum": ["yes", "no"]}), **sampled)) in ("yes", "no")
            assert isinstance(json.loads(answer(json_schema({"type": "array"}), **sampled)), list)
        check_tree(answer(json_schema(TREE)))
        assert len(found) > 6, found
        for word, schema in (("pattern", {"type": "string", "pattern": "a"}), ("unknown type", {"type": "text"}),
                             ("not an object", {"$ref": "#/nowhere"}),
                             ("not listed", {"required": ["a"], "properties": {"b": {}}}),
                             ("too long", {"type": "object", "properties": {"a": {"$ref": "#"}}}), ("empty", {"enum": []}),
                             ("is empty", {"anyOf": []}), ("minItems", {"type": "array", "minItems": 9, "maxItems": 1})):  # fmt: skip
            body = {"messages": [user("Describe.")], "response_format": json_schema(schema)}
            status, refusal = server.ask("/v1/chat/completions", body)
            assert status == 400 and word in refusal["error"]["message"], (schema, refusal)
        whole = answer({"type": "text"})
        body = {"messages": [user("Describe a tree.")], "format": TREE, "stream": False, "options": {"num_predict": 30}}
        check_tree(server.ask("/api/chat", body)[1]["message"]["content"])
        assert whole and whole == answer({"type": "text"})


@test
def broken_and_hostile_messages_are_answered_or_refused():
    def content(server, text, **more):
        return ask(server, {**with_task(text), **more})

    with serving("--max-texts", "50") as server:
        def refusal(text, word, status=400, **more):
            got, answer = server.ask("/v1/chat/completions", {**with_task(text), **more})
            assert got == status and word in answer["error"]["message"], answer

        one, two = translated(["It rains.", "Where is my book?"], "-m", MODEL, "--beam", "3", "--rerank", "0").values()
        for stream in False, True:
            for text, wanted in (
                ("", ""), ("{}", "{}"), ("[]", "[]"), ('{"lines": []}', "{}"), ("[1, null, true]", "[1,null,true]"),
                ('["", " \\n", "It rains."]', f'[""," \\n","{one}"]'),
                ('{"lines": [{"n": "a\\"", "text": ""}, {"n": 1, "text": "It rains."}]}', f'{{"a\\"":"","1":"{one}"}}'),
                ('[{"id": {"x": [1]}, "src": "It rains.", "more": "It"}]',
                 f'[{{"id":{{"x":[1]}},"dst":"{one}","more":"It"}}]'),
                ("It rains.\n\n\n%%\n\n%%\nWhere is my book?", f"{one}\n\n\n%%\n\n%%\n{two}"),
                ("1. It rains.\n2.\n3. Where is my book?", f"1. {one}\n2.\n3. {two}"),
                ("  It rains.\r\n", one), ("<br><br/>It rains.<br >", f"<br><br/>{one}<br >"),
                ('<item id="a">It rains.</item>', f'<item id="a">{one}</item>'),
                ("It rains.|||Where is my book?|||", f"{one}|||{two}|||"),
                ("It rains.\n[1]", f"{one}\n[1]"),
            ):  # fmt: skip
                assert content(server, text, stream=stream) == wanted, (text, content(server, text))
        hard = 'He said "no" \\ and\tleft.\x07 \U0001f3e0 </p> %% 2. ||| {"n": 1}'
        found = json.loads(content(server, json.dumps([hard, "It rains."])))
        assert len(found) == 2 and found[1] == one, found
        assert json.loads(content(server, json.dumps({hard: "It rains."}))) == {hard: one}
        deep = json.loads(content(server, "[" * 900 + '"It rains."' + "]" * 900))
        for _ in range(900):
            (deep,) = deep
        assert deep == one
        for broken in ('{"lines": [{"n": 1', '["It rains."', "{'1': 'It rains.'}", '["\\ud800"]', "[" * 1500 + "]" * 1500,
                       '{"1": "It rains."} and more'):  # fmt: skip
            assert content(server, broken), broken
        refusal('{"1": "a", "1": "b"}', "occurs twice")
        refusal('{"lines": [{"n": 1, "text": "a"}, {"n": "1", "text": "b"}]}', "the number 1")
        refusal("[9007199254740993, 1e300]", "2^53")
        refusal(json.dumps(["a"] * 51), "too many texts", 413)
        refusal(json.dumps([""] * 20000), "too many values", 413)
        refusal("It rains.", "requires JSON lines", response_format={"type": "json_object"})
        array = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
        for wrong in schema_of([1, 2]), schema_of([2]), array:
            refusal('{"1": "It rains."}', "do not fit the schema", response_format=wrong)
        refusal("a", "schema is missing", response_format={"type": "json_schema"})
        refusal("a", "response_format must be", response_format={"type": "xml"})
        refusal("a", "xx is not supported", target="xx")
        refusal("a", "target must be the code", target=1)
        status, answer = server.ask("/v1/chat/completions", {"messages": [user("It rains.")]})
        assert status == 400 and "target language is missing" in answer["error"]["message"], answer
        talk = [user("a"), {"role": "assistant", "content": "b"}]
        status, answer = server.ask("/v1/chat/completions", {"messages": talk})
        assert status == 400 and "must be the user's" in answer["error"]["message"], answer
        wrapped = {"type": "json_schema", "json_schema": {"schema": {
            "type": "object", "required": ["rows"], "properties": {"rows": {"$ref": "#/$defs/rows"}},
            "$defs": {"rows": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}}}  # fmt: skip
        assert json.loads(content(server, '["It rains."]', response_format=wrapped)) == {"rows": [one]}


@test
def languages_and_terms_are_read_from_the_instruction():
    line = "The house is old."
    with serving() as server:
        plain = {x: server.translate(line, x)[1]["translatedText"] for x in ("de", "fr", "es")}
        for instruction, target in (
            ("Translate into French:", "fr"), ("Traduisez en français :", "fr"), ("Übersetze auf Deutsch:", "de"),
            ("You translate English subtitles to Spanish.", "es"), ("Translation, English → German", "de"),
            ("You are a professional German native translator who needs to fluently translate text into German.", "de"),
            ("Translate the following segment into French, without additional explanation.", "fr"),
            ("Source language: English\nTarget language: Spanish\nTranslate.", "es"), ("translate from en to fr", "fr"),
            ("Translate English to French. The film plays in Germany; a Spanish detective hunts a German thief.", "fr"),
        ):  # fmt: skip
            body = {"messages": [{"role": "system", "content": instruction}, user(line)]}
            assert ask(server, body) == plain[target], (instruction, ask(server, body))
            if instruction.startswith(("Translate", "translate")) and "\n" not in instruction:
                assert ask(server, {"messages": [user(f"{instruction}\n\n{line}")]}) == plain[target], instruction
        terms = {"house": "Schuppen"}
        wanted = server.translate(line, "de", glossary=terms)[1]["translatedText"]
        assert wanted != plain["de"]
        for row in "house = Schuppen", "- house = Schuppen\nhouse = Haus", "house\tSchuppen":
            body = {"messages": [{"role": "system", "content": f"{TASK}\nGlossary:\n{row}"}, user(json.dumps([line]))]}
            assert json.loads(ask(server, body)) == [wanted], row


@client_test
def openais_client_works_with_a_translation_model():
    with serving() as server:
        (model,) = client_of(server).models.list().data
        assert client_of(server).models.retrieve(model.id) == model
        more = {"model": "any", "messages": with_task('{"1": "It rains.", "2": "One."}')["messages"]}
        whole = client_of(server).chat.completions.create(**more, response_format=schema_of([1, 2]))
        assert whole.usage.prompt_tokens > 3 and whole.usage.completion_tokens > 3, whole.usage
        stream = client_of(server).chat.completions.create(**more, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert "".join(x.choices[0].delta.content or "" for x in chunks[:-1]) == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage and set(json.loads(whole.choices[0].message.content)) == {"1", "2"}
        with refused(openai.BadRequestError, "do not fit the schema"):
            client_of(server).chat.completions.create(**more, response_format=schema_of([1]))


if __name__ == "__main__":
    sys.exit(test.run(sys.argv[1] if len(sys.argv) > 1 else ""))
