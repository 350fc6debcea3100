#!/usr/bin/env python3
"""The LibreTranslate API of moe-server: every documented endpoint, and LibreTranslate's own client.

Usage: tests/python tests/server/test_libretranslate.py      (BIN is the folder of the programs)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import re
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request

from suite import Suite
from test_server import LINES, moe_translate, serving

try:
    from libretranslatepy import LibreTranslateAPI
except ImportError:
    LibreTranslateAPI = None

test = Suite()
test_client = test.needs(LibreTranslateAPI, "libretranslatepy")
FORM = "application/x-www-form-urlencoded"
DETECTED = {"confidence": float, "language": str}


def shape(answer, wanted):
    """Return whether a JSON value has a shape: a type, {member: shape}, [shape of all elements], or a given value."""
    if isinstance(wanted, dict):
        return isinstance(answer, dict) and answer.keys() == wanted.keys() and all(
            shape(answer[name], of) for name, of in wanted.items())
    if isinstance(wanted, list):
        return isinstance(answer, list) and bool(answer) and all(shape(x, wanted[0]) for x in answer)
    if isinstance(wanted, type):
        return isinstance(answer, (int, float) if wanted is float else wanted)
    return answer == wanted


def multipart(fields, file=None, data=b""):
    """Return the body of a form with a file, and its content type."""
    out = b""
    for name, value in fields.items():
        out += f'--xx\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    if file is not None:
        out += f'--xx\r\nContent-Disposition: form-data; name="file"; filename="{file}"\r\n'.encode()
        out += b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n"
    return out + b"--xx--\r\n", "multipart/form-data; boundary=xx"


def fetch(url):
    """Return the contents and headers of a URL."""
    with urllib.request.urlopen(url, timeout=60) as reply:
        return reply.read(), reply.headers


def translate_file(server, name, data, **fields):
    return server.ask("/translate_file", *multipart({"source": "en", "target": "de", **fields}, name, data))


@test
def every_documented_endpoint_matches():
    """Each row contains a request, status and answer shape from version 1.9 of LibreTranslate's specification."""
    text = {"q": "It rains.", "source": "en", "target": "de"}
    one, language = {"translatedText": str}, {"code": str, "name": str, "targets": [str], "model": str}
    settings = {
        "apiKeys": False, "charLimit": int, "filesTranslation": True, "frontendTimeout": int, "keyRequired": False,
        "language": {"source": {"code": "auto", "name": str}, "target": {"code": str, "name": str}},
        "suggestions": False, "supportedFilesFormat": [str],
    }  # fmt: skip
    with serving() as server:
        for method, path, body, status, wanted in (
            ("POST", "/translate", text, 200, one),
            ("POST", "/translate", {**text, "q": ["It rains.", "Hello"]}, 200, {"translatedText": [str]}),
            ("POST", "/translate", {**text, "format": "html", "api_key": "x"}, 200, one),
            ("POST", "/translate", {**text, "alternatives": 2}, 200, {**one, "alternatives": [str]}),
            ("POST", "/translate", {**text, "q": ["Hi"], "alternatives": "1"}, 200,
             {"translatedText": [str], "alternatives": [[str]]}),
            ("POST", "/translate", {**text, "source": "auto"}, 200, {**one, "detectedLanguage": DETECTED}),
            ("POST", "/translate", {**text, "source": "auto", "q": ["Hi"]}, 200,
             {"translatedText": [str], "detectedLanguage": [DETECTED]}),
            ("POST", "/translate", {**text, "target": "zz"}, 400, {"error": "zz is not supported"}),
            ("POST", "/translate", {**text, "format": "rtf"}, 400, {"error": "rtf format is not supported"}),
            ("POST", "/translate", {**text, "alternatives": "few"}, 400,
             {"error": "Invalid request: alternatives parameter is not a number"}),
            ("POST", "/translate", {"source": "en", "target": "de"}, 400,
             {"error": "Invalid request: missing q parameter"}),
            ("POST", "/translate", {"q": "a", "source": "en"}, 400,
             {"error": "Invalid request: missing target parameter"}),
            ("GET", "/translate", None, 405, {"error": str}),
            ("POST", "/detect", {"q": "Wo ist mein Buch?"}, 200, [DETECTED]),
            ("POST", "/detect", {"q": ["Wo ist mein Buch?", "Où est mon livre ?"]}, 200, [DETECTED]),
            ("POST", "/detect", {}, 400, {"error": "Invalid request: missing q parameter"}),
            ("GET", "/detect", None, 405, {"error": str}),
            ("GET", "/languages", None, 200, [language]),
            ("POST", "/languages", {}, 405, {"error": str}),
            ("GET", "/frontend/settings", None, 200, settings),
            ("POST", "/suggest", {**text, "s": "Es regnet."}, 403,
             {"error": "Suggestions are disabled on this server."}),
            ("GET", "/suggest", None, 405, {"error": str}),
            ("GET", "/health", None, 200, {"status": "ok", "version": str}),
            ("POST", "/spec", {}, 405, {"error": str}),
            ("GET", "/download_file/nothing.txt", None, 404, {"error": str}),
            ("GET", "/download_file/", None, 404, {"error": str}),
            ("GET", "/download_file/../spec", None, 404, {"error": str}),
            ("POST", "/translate_file", text, 400, {"error": "Invalid request: missing file parameter"}),
        ):  # fmt: skip
            got = server.ask(path, body, method=method)
            assert got[0] == status and shape(got[1], wanted), (method, path, body, got)
            if body and method == "POST" and path == "/translate" and all(isinstance(x, str) for x in body.values()):
                assert server.ask(path, urllib.parse.urlencode(body).encode(), FORM) == got, body


@test
def the_specification_lists_all_routes():
    with serving() as server:
        status, spec = server.ask("/spec")
        assert status == 200 and spec["openapi"] == "3.0.3" and len(spec["paths"]) == 23
        for path, methods in spec["paths"].items():
            for method in ("get", "post"):
                status, _ = server.ask(path, {} if method == "post" else None, method=method.upper())
                assert (status != 405) == (method in methods), (path, method, status)
                assert status != 404 or "{" in path, path


@test
def detection_of_a_list_returns_one_list():
    """Each language detected in any of the texts is returned once, sorted by the amount of text."""
    with serving() as server:
        texts = ["Je ne sais pas où est mon livre.", "Where is my book?", "I have not seen the book since last year."]
        found = server.ask("/detect", {"q": texts})[1]
        assert [x["language"] for x in found] == ["en", "fr"], found
        assert all(0 < x["confidence"] <= 100 for x in found)
        assert server.ask("/detect", {"q": texts[0]})[1][0]["language"] == "fr"


@test_client
def its_own_client_works():
    with tempfile.NamedTemporaryFile("w") as keys, serving() as server:
        client = LibreTranslateAPI(f"http://127.0.0.1:{server.port}/")
        wanted = moe_translate(LINES, "de")
        assert [client.translate(line, "en", "de") for line in LINES] == wanted
        assert client.translate(LINES[0], "auto", "de") == wanted[0]
        assert client.detect("Wo ist mein Buch geblieben?")[0]["language"] == "de"
        assert [x["code"] for x in client.languages()] == ["en", "de", "fr", "es"]
        keys.write("right\n")
        keys.flush()
        with serving("--api-keys", keys.name) as guarded:
            url = f"http://127.0.0.1:{guarded.port}/"
            assert LibreTranslateAPI(url, "right").translate(LINES[0], "en", "de") == wanted[0]
            for key in ("wrong", None):
                try:
                    LibreTranslateAPI(url, key).translate(LINES[0], "en", "de")
                except urllib.error.HTTPError as error:
                    assert error.code == 403
                else:
                    raise AssertionError(f"the key {key} was taken")


# Posts as Mastodon 4 sends them, in a list of HTML texts.
POSTS = [
    '<p>Good morning, <span class="h-card" translate="no"><a href="https://example.social/@tom" class="u-url mention">'
    '@<span>tom</span></a></span>! Have you read <a href="https://example.org/a-long-path" target="_blank" '
    'rel="nofollow noopener"><span class="invisible">https://</span><span class="ellipsis">example.org/a-long-</span>'
    '<span class="invisible">path</span></a>?</p><p>It is about a city in winter.</p>',
    '<p>We saw a dog in the park today <a href="https://example.social/tags/dogs" class="mention hashtag" rel="tag">'
    "#<span>dogs</span></a></p>",
    "<p>First line<br>Second line</p>",
    "The content warning",
    "",
]


@test
def posts_of_mastodon_keep_their_markup():
    with serving() as server:
        status, answer = server.ask(
            "/translate", {"q": POSTS, "source": "en", "target": "de", "format": "html", "api_key": ""})
        assert status == 200, answer
        for given, got in zip(POSTS, answer["translatedText"], strict=True):
            tags = r"<[^>]*>"
            assert sorted(re.findall(tags, given)) == sorted(re.findall(tags, got)), (given, got)
            assert (got == given) == (not given), got
            for kept in ("@<span>tom</span></a>", "#<span>dogs</span></a>", '"invisible">https://</span>'):
                assert (kept in given) == (kept in got), (kept, got)
        one = server.ask("/translate", {"q": POSTS[0], "source": "en", "target": "de", "format": "html"})[1]
        assert one["translatedText"] == answer["translatedText"][0]


@test
def a_request_can_have_a_glossary():
    terms = {"book": "Schinken", "#1": "Nummer eins"}
    text = "Where is my book? The book is old."
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file, serving() as server:
        file.write("book\tSchinken\n")
        file.flush()
        plain = server.translate(text)[1]["translatedText"]
        with serving("--set", f"glossary={file.name}") as other:
            wanted = other.translate(text)[1]["translatedText"]
            assert other.translate(text, glossary={"cat": "Katze"})[1]["translatedText"] == plain
            assert other.translate(text, glossary={})[1]["translatedText"] == wanted
        assert "Schinken" in wanted and "Schinken" not in plain
        texts = [text, "We are #1.", "It rains."]
        got = server.translate(texts, glossary=terms)[1]["translatedText"]
        assert got[0] == wanted and "Nummer eins" in got[1] and got[2] == "Es regnet.", got
        assert server.translate(text)[1]["translatedText"] == plain
        page = server.translate("<p>Where is my <b>book</b>?</p>", format="html", glossary=terms)[1]["translatedText"]
        assert "Schinken" in page, page
        deepl = {"text": [text], "source_lang": "EN", "target_lang": "DE", "glossary": terms}
        assert server.ask("/v2/translate", deepl)[1]["translations"][0]["text"] == wanted
        memory = {"Where is my book?": "Wo ist nur das Buch?", "It costs %d.": "Kostet %d."}
        got = server.translate(["Where is my book?", "It costs %s.", "It rains."], memory=memory)[1]["translatedText"]
        assert got == ["Wo ist nur das Buch?", "Kostet %s.", "Es regnet."], got
        assert server.translate("Where is my book?")[1]["translatedText"] != got[0]  # it was the other client's
        assert "must be texts" in server.translate(text, memory={"a": 1})[1]["error"]
        assert server.translate(text, memory="a")[0] == 400
        large = {f"{i:03}" * 60: "Wort" * 45 for i in range(10, 300)}
        assert server.translate(text, glossary={"book": "Schinken", **large})[0] == 413
        many = {f"word{i}": "Wort" for i in range(1000)}
        assert server.translate(text, glossary={**many, "book": "Schinken"})[0] == 413
        assert server.translate(text, glossary=many)[1]["translatedText"] == plain
        for wrong, word in (
            ({"": "x"}, "glossary, term 1"),
            ({"dog": "Hund", "x": "a\nb"}, "glossary, term 2"),
            ({"x": "y" * 201}, "200 bytes"),
            ({"x": 1}, "must be texts"),
            (["x"], "object of terms"),
            ("x\ty", "object of terms"),
        ):
            status, answer = server.translate(text, glossary=wrong)
            assert status == 400 and word in answer["error"], (wrong, answer)
        form = urllib.parse.urlencode({"q": text, "target": "de", "glossary": "{}"}).encode()
        assert server.ask("/translate", form, FORM)[0] == 400
    with serving("--set", "protect=0") as server:
        assert "protect" in server.translate(text, glossary=terms)[1]["error"]


@test
def files_are_translated():
    with serving() as server:
        lines = [*LINES[:4], ""]
        wanted = "\n".join([*moe_translate(LINES[:4], "de"), ""]).encode()
        status, answer = translate_file(server, "My letter.txt", "\n".join(lines).encode())
        assert status == 200 and answer.keys() == {"translatedFileUrl"}, answer
        url = answer["translatedFileUrl"]
        assert re.fullmatch(rf"http://127\.0\.0\.1:{server.port}/download_file/[0-9a-f]{{32}}\.My_letter_de\.txt", url)
        data, headers = fetch(url)
        assert data == wanted, data
        assert headers["Content-Disposition"] == 'attachment; filename="My_letter_de.txt"'
        assert headers["Content-Type"] == "text/plain; charset=utf-8"
        page = b"<p>It rains.</p><script>It rains.</script>"
        status, answer = translate_file(server, "../../etc/x.HTML", page, source="auto")
        data, headers = fetch(answer["translatedFileUrl"])
        assert data == b"<p>Es regnet.</p><script>It rains.</script>", data
        assert answer["translatedFileUrl"].endswith(".x_de.html") and headers["Content-Type"].startswith("text/html")
        assert translate_file(server, "My letter.txt", b"It rains.")[1]["translatedFileUrl"] != url
        assert fetch(url)[0] == wanted


@test
def files_that_cannot_be_translated_are_refused():
    with serving("--max-body", "16") as server:
        for name, data, fields, word in (
            ("a.docx", b"PK", {}, "moe-documents"),
            ("a", b"It rains.", {}, "format not supported"),
            (".txt/x", b"It rains.", {}, "format not supported"),
            ("a.txt", b"", {}, "empty file"),
            ("a.txt", b"\xff", {}, "file is not valid UTF-8"),
            ("a.txt", b"One.\0Two.", {}, "NUL"),
            ("a.txt", b"It rains.", {"target": "xx"}, "xx is not supported"),
            ("a.txt", b"It rains.", {"source": "xx"}, "xx is not supported"),
            ("a.txt", b"It rains.", {"target": ""}, "missing target"),
            (None, b"", {"file": "It rains."}, "multipart/form-data"),
        ):
            status, answer = translate_file(server, name, data, **fields)
            assert status == 400 and word in answer["error"], (name, data, fields, status, answer)
        assert translate_file(server, "a.txt", b"a" * 20000)[0] == 413


@test
def new_files_replace_old_ones():
    with serving("--max-body", "4096") as server:
        urls = [translate_file(server, f"{i}.txt", b"1")[1]["translatedFileUrl"] for i in range(101)]
        found = [server.ask("/" + url.split("/", 3)[3])[0] for url in urls]
        assert found == [404] + [200] * 100 and len(set(urls)) == 101
        page = b"<pre>" + b"a" * 4000000 + b"</pre>"  # <pre> is not translated; 16 such files take 64 MB
        pages = [translate_file(server, "a.html", page)[1]["translatedFileUrl"] for _ in range(17)]
        found = [server.ask("/" + url.split("/", 3)[3])[0] for url in pages]
        assert found == [404] + [200] * 16, found


if __name__ == "__main__":
    sys.exit(test.run())
