#!/usr/bin/env python3
"""Ollama's client and requests with moe-server: chats, prompts, streams, options, models.

Usage: tests/python tests/server/test_ollama.py      (BIN is the folder of the programs)
"""

import json
import sys
import urllib.request

from suite import Suite
from test_openai import HELLO, SYSTEM, TALK, chatting, create, make, openai
from test_server import serving

try:
    import ollama
except ImportError:
    ollama = None

test = Suite()
client_test = test.needs(ollama, "ollama")
chat_test = test.needs(ollama and openai and make, "ollama, openai, NumPy, jinja2, or bpe_lines")
TASK = "Translate from English to German."
ROWS = {"1": "It rains.", "2": "Where is my book?"}


def client_of(server):
    return ollama.Client(f"http://127.0.0.1:{server.port}", timeout=60)


def objects(server, path, body):
    """Return the objects of a stream, one a line."""
    status, answer = server.ask(path, body)
    assert status == 200, answer
    return [answer] if isinstance(answer, dict) else [json.loads(x) for x in answer.splitlines()]


@client_test
def ollamas_client_translates_with_a_translation_model():
    with serving() as server:
        client, wanted = client_of(server), server.translate(list(ROWS.values()))[1]["translatedText"]
        messages = [{"role": "system", "content": TASK}, {"role": "user", "content": json.dumps(ROWS)}]
        schema = {"type": "object", "properties": {x: {"type": "string"} for x in ROWS}, "required": list(ROWS)}
        for format in None, "json", schema:
            whole = client.chat("any:latest", messages, format=format, options={"temperature": 0.5, "num_ctx": 4096})
            assert whole.model == "any:latest" and whole.message.role == "assistant" and whole.done_reason == "stop"
            assert json.loads(whole.message.content) == dict(zip(ROWS, wanted, strict=True)), whole
            assert whole.done and whole.eval_count > 4 and whole.prompt_eval_count > 4 and whole.total_duration > 0
            parts = list(client.chat("any", messages, format=format, stream=True))
            assert "".join(x.message.content for x in parts) == whole.message.content and parts[-1].done
            assert not any(x.done for x in parts[:-1])
            prompt = f"{TASK}\n\n{json.dumps(ROWS)}"
            assert client.generate("any", prompt, format=format).response == whole.message.content
            parts = list(client.generate("any", json.dumps(ROWS), system=TASK, format=format, stream=True))
            assert "".join(x.response for x in parts) == whole.message.content
        for format in "json", {"type": "array"}:
            try:
                client.generate("any", f"{TASK}\n\nIt rains.", format=format)
            except ollama.ResponseError as error:
                assert error.status_code == 400 and "requires JSON lines" in error.error, error
            else:
                raise AssertionError("it was taken")


@client_test
def models_are_described():
    with serving() as server:
        client = client_of(server)
        (model,) = client.list().models
        assert model.model == "en-de-fr-es:latest" and model.size > 10**7 and len(model.digest) == 64, model
        assert model.details.parameter_size.endswith("M") and model.details.quantization_level.startswith("q"), model
        found = client.show(model.model)
        assert found.capabilities == ["completion"] and found.details == model.details, found
        assert found.modelinfo["general.parameter_count"] > 10**7, found
        assert server.ask("/api/version")[1].keys() == {"version"}
        for method in "GET", "HEAD":
            for accept, wanted in (("application/json", b"Ollama is running"), ("*/*", b"Ollama is running"),
                                   ("text/html,*/*;q=0.8", b"<!DOCTYPE html>")):  # fmt: skip
                request = urllib.request.Request(f"http://127.0.0.1:{server.port}/", headers={"Accept": accept})
                request.method = method
                with urllib.request.urlopen(request) as reply:
                    assert reply.status == 200
                    assert reply.read()[: len(wanted)].lower() == (wanted.lower() if method == "GET" else b"")
        status, answer = server.ask("/api/embed", {"model": "a", "input": "b"})
        assert status == 404 and "Ollama's API" in answer["error"], answer
        for path, more in ("/api/chat", {"messages": []}), ("/api/generate", {}), ("/api/generate", {"prompt": ""}):
            for stream in False, True:  # loads the model
                (found,) = objects(server, path, {"model": "a", "stream": stream, **more})
                assert found["done"] and found["done_reason"] == "load" and "eval_count" not in found, found


@chat_test
def chats_equal_openais():
    with chatting() as server:
        client = client_of(server)
        for talk in HELLO, [SYSTEM, *HELLO], TALK:
            wanted = create(server, talk)
            found = client.chat("any", talk)
            assert found.message.content == wanted.choices[0].message.content
            assert (found.prompt_eval_count, found.eval_count) == (
                wanted.usage.prompt_tokens, wanted.usage.completion_tokens)  # fmt: skip
            parts = objects(server, "/api/chat", {"model": "any", "messages": talk})  # a stream by default
            assert len(parts) > 10 and "".join(x["message"]["content"] for x in parts) == found.message.content
            assert parts[-1]["eval_count"] == found.eval_count and all(x["created_at"].endswith("Z") for x in parts)
        one = client.generate("any", HELLO[0]["content"], system=SYSTEM["content"])
        assert one.response == create(server, [SYSTEM, *HELLO]).choices[0].message.content
        options = {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 7, "num_predict": 9, "repeat_penalty": 1.2}
        more = {"top_k": 20, "repeat_penalty": 1.2}
        wanted = create(server, temperature=0.9, top_p=0.8, seed=7, max_tokens=9, extra_body=more)
        found = client.chat("any", HELLO, options=options)
        assert found.message.content == wanted.choices[0].message.content and found.eval_count == 9
        assert found.done_reason == "length", found
        for limit in -1, -2:
            assert client.chat("any", HELLO, options={"num_predict": limit}).eval_count > 9
        whole = client.chat("any", HELLO).message.content
        assert client.chat("any", HELLO, options={"stop": [whole[9:12]]}).message.content == whole[:9]


@chat_test
def wrong_requests_are_refused():
    with chatting() as server:
        for path, word, body in (
            ("chat", "tools is not", {"messages": HELLO, "tools": [{"type": "function"}]}),
            ("chat", "images are not", {"messages": [{**HELLO[0], "images": ["aGk="]}]}),
            ("chat", "role of a message", {"messages": [{"role": "tool", "content": "a"}]}),
            ("chat", "options must be", {"messages": HELLO, "options": [1]}),
            ("chat", "format must be", {"messages": HELLO, "format": "xml"}),
            ("chat", "temperature must be", {"messages": HELLO, "options": {"temperature": -1}}),
            ("chat", "num_predict must be", {"messages": HELLO, "options": {"num_predict": 0.5}}),
            ("chat", "stream must be", {"messages": HELLO, "stream": "no"}),
            ("generate", "prompt must be", {"prompt": ["a"]}), ("generate", "raw is not", {"prompt": "a", "raw": True}),
            ("generate", "suffix is not", {"prompt": "a", "suffix": "b"}),
        ):  # fmt: skip
            status, answer = server.ask(f"/api/{path}", {"model": "any", **body})
            assert status == 400 and word in answer["error"], (body, answer)


if __name__ == "__main__":
    sys.exit(test.run(sys.argv[1] if len(sys.argv) > 1 else ""))
