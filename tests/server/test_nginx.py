#!/usr/bin/env python3
"""moe-server behind nginx with TLS and a path prefix: OPERATING.md's block, official clients, prompts of 4,000 tokens.

Usage: tests/python tests/server/test_nginx.py      (BIN is the folder of the programs)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

from suite import Suite
from test_libretranslate import multipart
from test_openai import FREE, HELLO, SYSTEM, endless, made, make, open_requests, openai
from test_server import LINES, ROOT, moe_translate, serving, wait_for

try:
    import deepl
    from libretranslatepy import LibreTranslateAPI
except ImportError:
    deepl = None

test = Suite()
NGINX = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
OPTIONS = ["--server-name", "localhost", "--url-prefix", "/translator", "--trust-proxy", "127.0.0.1"]
nginx_test = test.needs(NGINX and deepl and openai and make, "nginx, deepl, openai, libretranslatepy or NumPy")
CERTIFICATE = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
               "-addext", "subjectAltName=DNS:localhost"]
CONFIG = """daemon off; pid %(folder)s/pid; error_log %(folder)s/error.log; worker_processes 1; events {}
http {
    access_log off; client_body_temp_path %(folder)s/a; proxy_temp_path %(folder)s/b; fastcgi_temp_path %(folder)s/c;
    uwsgi_temp_path %(folder)s/d; scgi_temp_path %(folder)s/e;
    server {
        listen 127.0.0.1:%(port)d ssl; server_name localhost;
        ssl_certificate %(folder)s/cert.pem; ssl_certificate_key %(folder)s/key.pem;
        %(block)s
    }
}
"""


def documented():
    """Return the nginx block of OPERATING.md, after checking the options that the page gives with it."""
    page = (ROOT / "tools/server/OPERATING.md").read_text()
    block, text = re.search(r"## nginx.*?\n\n(    .*?\n\n)(\S.*?)\n## ", page, re.S).groups()
    for name, value in zip(OPTIONS[::2], OPTIONS[1::2], strict=True):
        assert f"{name} {value.replace('localhost', 'translate.example.org')}" in " ".join(text.split()), name
    return block


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextlib.contextmanager
def behind_nginx(server, block=None):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*CERTIFICATE, "-keyout", f"{folder}/key.pem", "-out", f"{folder}/cert.pem"], check=True,
                       capture_output=True)
        port = free_port()
        block = (block or documented()).replace("127.0.0.1:5000", f"127.0.0.1:{server.port}")
        pathlib.Path(folder, "nginx.conf").write_text(CONFIG % {"folder": folder, "port": port, "block": block})
        os.chmod(folder, 0o755)
        os.environ["SSL_CERT_FILE"] = f"{folder}/cert.pem"
        nginx = subprocess.Popen([NGINX, "-p", folder, "-c", f"{folder}/nginx.conf"])
        try:
            wait_for(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
            yield f"https://localhost:{port}/translator"
        finally:
            nginx.terminate()
            nginx.wait(20)
            del os.environ["SSL_CERT_FILE"]


def ask(url, body=None, kind="application/json"):
    """Send a request through nginx; return the status, the JSON or text of the answer, and its headers."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(url, data, {"Content-Type": kind} if data else {})
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            status, text, headers = reply.status, reply.read().decode(), reply.headers
    except urllib.error.HTTPError as error:
        status, text, headers = error.code, error.read().decode(), error.headers
    with contextlib.suppress(ValueError):
        text = json.loads(text)
    return status, text, headers


def chat(client, messages, **more):
    return client.chat.completions.create(model="any", messages=messages, max_tokens=16, **more)


@nginx_test
def a_prompt_of_4000_tokens_is_answered():
    words = [{"role": "user", "content": "house " * 1030}]
    model = made(max_position_embeddings=8192)[0]
    with serving(*FREE, *OPTIONS, fast=False, model=model) as server, behind_nginx(server) as url:
        direct, client = (openai.OpenAI(base_url=f"{base}/v1", api_key="a key", max_retries=0, timeout=300)
                          for base in (f"http://127.0.0.1:{server.port}", url))
        wanted = chat(direct, words)
        assert wanted.usage.prompt_tokens > 4000 and wanted.choices[0].message.content, wanted
        found = chat(client, words)
        assert (found.choices, found.usage) == (wanted.choices, wanted.usage), (found, wanted)
        parts = list(chat(client, words, stream=True))
        assert "".join(x.choices[0].delta.content or "" for x in parts) == wanted.choices[0].message.content
        assert client.models.list().data[0].id == wanted.model


@nginx_test
def streams_are_not_buffered():
    with endless(*OPTIONS) as server, behind_nginx(server) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="a key", max_retries=0, timeout=300)
        stream = client.chat.completions.create(model="any", messages=HELLO, stream=True)
        next(iter(stream))
        assert open_requests(server) == 1  # the answer is not complete
        stream.close()
        wait_for(lambda: not open_requests(server))  # nginx closes its connection too


@nginx_test
def requests_of_subtitle_edit_are_answered():
    lines = {"history": [{"source": "a", "translation": "b"}], "lines": [{"n": 12, "text": "the house " * 400}]}
    schema = {"name": "translations", "strict": True, "schema": {"type": "object", "additionalProperties": False,
              "properties": {"12": {"type": "string"}}, "required": ["12"]}}
    text = "Translate into German\n\n" + "the house<br />the river\n" * 200
    plain = {"messages": [{"role": "user", "content": text}],
             "max_tokens": 20, "temperature": 0.7, "top_p": 0.6, "top_k": 20, "repeat_penalty": 1.05}
    advanced = {"messages": [SYSTEM, {"role": "user", "content": json.dumps(lines)}], "stream": True,
                "cache_prompt": True, "temperature": 0.2, "max_tokens": 20}
    model = made(max_position_embeddings=8192)[0]
    with serving(*FREE, *OPTIONS, fast=False, model=model) as server, behind_nginx(server) as url:
        status, answer, _ = ask(url + "/v1/chat/completions", plain)
        assert status == 200 and answer["choices"][0]["message"]["content"], answer
        for kind, keys in ({"type": "json_schema", "json_schema": schema}, {"12"}), ({"type": "json_object"}, ()), (
                {"type": "text"}, None):
            status, events, headers = ask(url + "/v1/chat/completions", {**advanced, "response_format": kind})
            assert status == 200 and headers["Content-Type"] == "text/event-stream", headers
            *events, last, rest = events.split("\n\n")
            assert last == "data: [DONE]" and not rest, last
            deltas = [json.loads(x.removeprefix("data: "))["choices"][0]["delta"] for x in events]
            content = "".join(x.get("content", "") for x in deltas)
            assert content if keys is None else json.loads(content).keys() >= set(keys), (kind, content)


@nginx_test
def official_clients_and_files_work():
    block, wanted = documented(), moe_translate(LINES, "de")
    removes = block.replace("http://127.0.0.1:5000;", "http://127.0.0.1:5000/;")
    assert removes != block
    for kind in block, removes:
        with serving(*OPTIONS) as server, behind_nginx(server, kind) as url:
            client = deepl.Translator("a key", server_url=url + "/", verify_ssl=os.environ["SSL_CERT_FILE"])
            found = client.translate_text(LINES, source_lang="EN", target_lang="DE")
            assert [x.text for x in found] == wanted and client.get_usage().character.count == sum(map(len, LINES))
            libre = LibreTranslateAPI(url + "/")
            assert [libre.translate(x, "en", "de") for x in LINES] == wanted
            assert [x["code"] for x in libre.languages()] == ["en", "de", "fr", "es"]
            form = multipart({"source": "en", "target": "de"}, "a.txt", b"It rains.")
            status, answer, _ = ask(url + "/translate_file", *form)
            prefix = "https://localhost/translator/download_file/"  # Host $host has no port
            assert status == 200 and answer["translatedFileUrl"].startswith(prefix), answer
            path = answer["translatedFileUrl"].removeprefix("https://localhost/translator")
            assert ask(url + path)[:2] == (200, "Es regnet.")
            assert "<title>" in ask(url)[1] and "<title>" in ask(url + "/")[1]  # the first is redirected


if __name__ == "__main__":
    sys.exit(test.run(sys.argv[1] if len(sys.argv) > 1 else ""))
