#!/usr/bin/env python3
"""moe-server: LibreTranslate's API, limits, many simultaneous clients, shutdown.

Usage: tests/python tests/server/test_server.py      (BIN is the folder of the programs)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser

from suite import Suite

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / os.environ.get("BIN", ".")
MODEL = ROOT / "models/en-de-fr-es.bin"
FAST = ["--set", "beam=3", "--set", "rerank=0", "--threads", "1"]
LINES = [
    "Where is my book?",
    "It rains.",
    "Good morning! How are you?",
    "We have known each other for ten years.",
    "One. " * 5,
]

test = Suite()


class Server:
    def __init__(self, *options, fast=True, model=MODEL):
        named = "--models" if os.path.isdir(model) else "-m"
        command = [str(BIN / "moe-server"), named, str(model), "--port", "0", *(FAST if fast else []), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"http://[\d.]+:(\d+)/", line):
                self.port = int(found[1])
                return
        raise AssertionError("the server did not start")

    def ask(self, path, body=None, kind="application/json", method=None):
        """Send a request; return the status and the JSON or text of the answer."""
        data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": kind} if data else {}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                status, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        with contextlib.suppress(ValueError):
            return status, json.loads(text)
        return status, text

    def translate(self, q, target="de", **more):
        return self.ask("/translate", {"q": q, "source": "en", "target": target, **more})

    def stop(self, with_signal=signal.SIGTERM, limit=30):
        """Stop the server and return its exit status."""
        self.process.send_signal(with_signal)
        status = self.process.wait(limit)
        self.process.stderr.close()
        return status


def resident(pid):
    """Return the resident memory of a process in bytes."""
    status = pathlib.Path(f"/proc/{pid}/status")
    if status.exists():  # macOS has no /proc, and Debian images can lack ps
        return 1024 * int(re.search(r"VmRSS:\s*(\d+) kB", status.read_text())[1])
    return 1024 * int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], stdout=subprocess.PIPE, check=True).stdout)


@contextlib.contextmanager
def serving(*options, **named):
    server = Server(*options, **named)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            assert server.stop() == 0


def moe_translate(lines, target):
    command = [
        str(BIN / "moe-translate"),
        "-q",
        "-m",
        str(MODEL),
        "-s",
        "en",
        "-t",
        target,
        "--beam",
        "3",
        "--rerank",
        "0",
    ]
    return subprocess.run(
        command, input="\n".join(lines) + "\n", stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split("\n")[:-1]


@test
def translations_equal_moe_translates():
    with serving() as server:
        for target in ("de", "fr"):
            wanted = moe_translate(LINES, target)
            assert server.translate(LINES, target) == (200, {"translatedText": wanted})
            assert server.translate(LINES[0], target) == (200, {"translatedText": wanted[0]})
        assert server.translate([])[1] == {"translatedText": []}
        assert server.translate("")[1] == {"translatedText": ""}
        assert server.translate("One.\n\nTwo.")[1]["translatedText"].count("\n") == 2


@test
def forms_and_multipart_are_parsed():
    wanted = moe_translate(LINES[:1], "de")[0]
    fields = {"q": LINES[0], "source": "en", "target": "de"}
    with serving() as server:
        form = urllib.parse.urlencode(fields).encode()
        assert server.ask("/translate", form, "application/x-www-form-urlencoded")[1] == {"translatedText": wanted}
        parts = "".join(f'--xx\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in fields.items())
        assert server.ask("/translate", (parts + "--xx--\r\n").encode(), "multipart/form-data; boundary=xx")[1] == {
            "translatedText": wanted
        }
        long = {**fields, "q": "It rains. " * 130}  # longer than the server's buffer for forms
        status, answer = server.ask(
            "/translate", urllib.parse.urlencode(long).encode(), "application/x-www-form-urlencoded"
        )
        assert status == 200 and answer["translatedText"].count(".") > 100


@test
def alternatives_details_and_languages_are_returned():
    with serving() as server:
        _, answer = server.ask(
            "/translate", {"q": LINES[0], "source": "auto", "target": "de", "alternatives": 2, "details": True}
        )
        assert len(answer["alternatives"]) == 2 and answer["translatedText"] not in answer["alternatives"]
        assert answer["detectedLanguage"]["language"] == "en" and 0 <= answer["detectedLanguage"]["confidence"] <= 100
        assert [19 - 4 - 3, 16] == answer["details"]["alignment"][-2][:2] or answer["details"]["alignment"]
        lines = ["Where is my book?", "It rains.", "The dog sleeps."]
        text = " ".join(lines[:2]) + "\n\n" + lines[2]
        answer = server.translate(text, details=True)[1]
        parts = {answer["translatedText"][a:b]: p for a, b, p in answer["details"]["parts"]}
        for line in lines:
            single = server.translate(line, details=True)[1]
            assert parts.pop(single["translatedText"]) == single["details"]["confidence"], (line, answer)
        assert not parts, parts
        terms = {"dog": "Gugelhupf", "cat": "Kater"}
        answer = server.translate(lines[2], details=True, glossary=terms)[1]
        assert answer["details"]["terms"] == [{"source": "dog", "target": "Gugelhupf", "kept": True}], answer
        assert "terms" not in server.translate(lines[0], details=True, glossary=terms)[1]["details"]
        _, answers = server.ask("/translate", {"q": LINES[:2], "source": "auto", "target": "de", "alternatives": 1})
        assert [len(x) for x in answers["alternatives"]] == [1, 1] and len(answers["detectedLanguage"]) == 2
        assert server.ask("/detect", {"q": "Wo ist mein Buch geblieben?"})[1][0]["language"] == "de"
        assert server.ask("/detect", {"q": "Je ne sais pas où est mon livre."})[1][0]["language"] == "fr"
        for text, language in {"Hello": "en", "Good morning.": "en", "Danke": "de", "Hola": "es"}.items():
            (answer,) = server.ask("/detect", {"q": text})[1]
            assert answer["language"] == language and 90 < answer["confidence"] <= 100, (text, answer)


class Structure(HTMLParser):
    """Collect what translation must not change in a document: tags, attributes, comments and untranslated texts."""

    def __init__(self, data):
        super().__init__(convert_charrefs=True)
        self.found, self.kept = [], 0
        self.feed(data)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append(self.get_starttag_text())
        self.kept += tag in ("script", "pre", "code")

    def handle_endtag(self, tag):
        self.found.append(f"</{tag}>")
        self.kept -= tag in ("script", "pre", "code")

    def handle_data(self, data):
        if self.kept:
            self.found.append(data)

    def handle_comment(self, data):
        self.found.append(f"<!--{data}-->")


def random_document(pick):
    """Return random HTML with nested inline tags, some of which are broken."""
    words = "the dog saw a big house and it was &amp; old &uuml; in 5 &lt; 6 my <b friend".split()

    def sentence(depth=0):
        out = []
        for _ in range(pick.randint(1, 6)):
            kind = pick.random()
            if kind < 0.6 or depth > 3:
                out.append(" ".join(pick.choice(words[:-2]) for _ in range(pick.randint(1, 4))))
            elif kind < 0.85:
                tag = pick.choice(["b", "i", 'a href="x>y"', "span class='q'", "EM"])
                out.append(f"<{tag}>{sentence(depth + 1)}</{tag.split()[0]}>")
            else:
                out.append(pick.choice(["<img src=x>", "<!-- b > c -->", "<code>if (a)</code>", "<wbr/>"]))
        return pick.choice([" ", "", "\n  "]).join(out)

    blocks = []
    for _ in range(pick.randint(1, 4)):
        tag = pick.choice(["p", "div", "h2 id=q", "li", "td"])
        blocks.append(f"<{tag}>{sentence()}</{tag.split()[0]}>")
        blocks.append(pick.choice(["\n", "", "<br>", "<script>if (a<b) '</p>'</script>", "<pre> as  it is\n</pre>"]))
    return "".join(blocks)


@test
def html_keeps_its_structure():
    count = 200 if "MOE_TEST_LONG" in os.environ else 40
    documents = [random_document(random.Random(seed)) for seed in range(count)]
    with serving() as server:
        answers = [server.translate(documents[at : at + 20], format="html")[1] for at in range(0, count, 20)]
        same_order = 0
        for document, translation in zip(documents, sum((x["translatedText"] for x in answers), []), strict=True):
            before, after = Structure(document).found, Structure(translation).found
            assert sorted(before) == sorted(after), (document, translation)
            same_order += before == after
            blocks = r"(</?(?:p|div|h2[^>]*|li|td|br)>|<script>.*?</script>|<pre>.*?</pre>)"
            before, after = (re.findall(blocks, x, re.S) for x in (document, translation))
            assert before == after, (document, translation)
            depth = []
            for tag in re.findall(r"<(/?)(b|i|a|span|EM)\b", translation.replace("a<b", "")):
                if tag[0]:
                    assert depth.pop() == tag[1], translation
                else:
                    depth.append(tag[1])
            assert not depth
        assert same_order > count / 2
        sentence = "<p>Where is <b>my book</b>?</p>"
        _, answer = server.translate([sentence, "<hr>", sentence], format="html", alternatives=1, stream=False)
        assert answer["translatedText"][:2] == ["<p>Wo ist <b>mein Buch</b>?</p>", "<hr>"]
        assert [len(x) for x in answer["alternatives"]] == [1, 0, 1]
        assert Structure(answer["alternatives"][0][0]).found == Structure(sentence).found
        status, text = server.translate([sentence, "<hr>", "<p>It rains.</p>"], format="html", stream=True)
        lines = {line["index"]: line["translatedText"] for line in map(json.loads, text.splitlines())}
        assert lines == {0: "<p>Wo ist <b>mein Buch</b>?</p>", 1: "<hr>", 2: "<p>Es regnet.</p>"}, lines
        assert server.translate("x", format="rtf")[0] == 400
        _, answer = server.ask("/translate", {"q": "<p>Wo ist <b>mein Buch</b>?</p>", "source": "auto", "target": "en",
                                              "format": "html"})
        assert answer["detectedLanguage"]["language"] == "de"


@test
def html_cases_of_documents_hold():
    cases = json.loads((ROOT / "tests/package/html_cases.json").read_text())
    with serving() as server:
        answers = server.translate([given for given, _ in cases], format="html")[1]["translatedText"]
        for (given, wanted), answer in zip(cases, answers, strict=True):
            tags = r"</?[a-zA-Z][^<>]*>|<[!?][^<>]*>"
            found, expected = (sorted(re.sub("='[^']*'", "=", x) for x in re.findall(tags, text))
                               for text in (answer, wanted))  # values such as titles are translated
            assert found == expected, (given, answer)
            kept = r"<(code|kbd|a|sup|sub)\b[^<>]*>[^A-Z]*</\1>"  # the untranslated words are in lower case
            assert all(found[0] in answer for found in re.finditer(kept, wanted)), (given, answer)
            links = [re.sub(r"<[^>]*>", "", found[1]) for found in re.finditer(r"<a\b[^>]*>(.*?)</a>", answer)]
            assert all(links), (given, answer)
        for given, wanted in (
            ("<a>Home</a> | <a>About</a>", r"<a>[^<|]+</a> \| <a>[^<|]+</a>"),
            ('<p class="notranslate">Good<p>Good morning.', '<p class="notranslate">Good<p>Guten Morgen\\.'),
            ("<p>We have 10<sup>2</sup> dogs.</p>", r".* 10<sup>2</sup> .*"),
            ("<p>Water is H<sub>2</sub>O.</p>", r".* H<sub>2</sub>O.*"),
            ("<p>The file <code>a.txt</code> is empty.</p>", r".* <code>a\.txt</code> .*"),
            ("<p>Press <kbd>Enter</kbd> to open the <b>house</b>.</p>", r".* <kbd>Enter</kbd>.*<b>\S.*"),
            ("<p>We have a house<sup>[1]</sup> and a dog.</p>", r".*\w<sup>\[1\]</sup> .*"),
            ("<p>Home &rarr; Products</p>", "<p>.* ?(&rarr;|\u2192) ?.*</p>"),
            ("<p>The house &amp the dog &copy 2024</p>", ".*\u00a9.*"),
            ("<p>Good morning, &unknown; my friend &amp;rarr; here.</p>", ".*&unknown;.*"),
            ("<p>Ask <a href=u>@<span>tom</span></a> about the book.</p>", ".*<a href=u>@<span>tom</span></a>.*"),
        ):
            answer = server.translate(given, format="html")[1]["translatedText"]
            assert re.fullmatch(wanted, answer), (given, answer)
            assert "&amp;unknown" not in answer and ("&amp;rarr" in answer) == ("&amp;rarr" in given), answer


@test
def many_links_keep_a_text_each():
    words = "dog house book river friend city water street morning night".split()
    pick = random.Random(5)
    pages = []
    for _ in range(60):
        links = [f"<a href={i}>the {pick.choice(words)}</a>" for i in range(pick.randint(1, 4))]
        pages.append("<p>We saw " + pick.choice((" and ", ", ", " near ")).join(links) + " in the evening.</p>")
    with serving() as server:
        for page, answer in zip(pages, server.translate(pages, format="html")[1]["translatedText"], strict=True):
            texts = dict(re.findall(r"<a href=(\d)>([^<>]*)</a>", answer))
            assert len(texts) == page.count("<a ") and all(text.strip() for text in texts.values()), (page, answer)


@test
def hostile_html_takes_little_time():
    with serving("--set", "beam=1", fast=False) as server:
        for page in (
            " " * 400000 + "X" + "<wbr>" * 100000,
            "<b><i>5</i>" * 20000,
            "<b>" * 100000,
            "<p class=notranslate>" * 20000,
        ):
            assert server.translate(page, format="html")[1]["translatedText"].count("<") == page.count("<")
        for part in ("<b>", "<b id=1><p>", "</b>", "<!--", "<", "<a x='", "<svg>", "<script>", "&", "<p>a</p>"):
            document = part * ((1000 if part == "<p>a</p>" else 60000) // len(part))
            status, answer = server.translate(document, format="html")
            assert status == 200, (part, status)
            assert part == "<p>a</p>" or answer["translatedText"] == document


@test
def experts_equal_the_routing():
    lines = ["Where is my book?", "It rains. " * 20]
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as log:
        run = [BIN / "moe-translate", "-q", "-m", MODEL, "-s", "en", "-t", "de", "--beam", "3", "--rerank", "0"]
        subprocess.run([*run, "--routing", log.name, lines[0]], check=True, stdout=subprocess.DEVNULL)
        with open(log.name) as whole:
            head, *entries = map(json.loads, whole)
    with serving() as server:
        _, answer = server.translate(lines, experts=True)
        found = answer["experts"][0]
        for side, name in (("source", "encoder"), ("target", "decoder")):
            layers = [x["layer"] for x in head["layers"] if x["layer"].startswith(name)]
            assert [x["layer"] for x in found[side]["layers"]] == layers
            for at, token in enumerate(found[side]["tokens"]):
                wanted = [x for x in entries if x["position"] == at and x["layer"] in layers]
                assert side == "target" or token["token"] == wanted[0]["token"]
                for layer, entry in zip(token["experts"], wanted, strict=True):
                    assert [x[0] for x in layer] == entry["experts"]
                    assert all(abs(x[1] - y) < 1e-3 for x, y in zip(layer, entry["weights"], strict=True))
        text = "".join(x["token"] for x in found["target"]["tokens"]).replace("\u2581", " ").strip()
        assert text == "Wo ist mein Buch?"
        parts = answer["experts"][1]
        assert sum(x["token"] == "\u2581It" for x in parts["source"]["tokens"]) == 20  # each sentence contains "It"
        text = "".join(x["token"] for x in parts["target"]["tokens"]).replace("\u2581", " ").strip()
        assert text == answer["translatedText"][1].strip()
        assert "experts" not in server.translate(lines[0])[1]
        assert server.translate("", experts=True)[1]["experts"]["source"]["tokens"] == []
        assert server.translate(lines[0], experts=True, format="html")[1]["experts"] is None


@test
def alignments_count_characters():
    with serving() as server:
        text = "Où est le café ?"
        _, answer = server.ask("/translate", {"q": text, "source": "fr", "target": "en", "details": True})
        words = [text[a:b] for a, b, _, _ in answer["details"]["alignment"]]
        assert words and all(word and word == word.strip() for word in words) and "café" in words, words


@test
def finished_texts_are_streamed():
    with serving() as server:
        status, text = server.translate(LINES, stream=True)
        lines = [json.loads(line) for line in text.splitlines()]
        assert status == 200 and sorted(line["index"] for line in lines) == list(range(len(LINES)))
        wanted = moe_translate(LINES, "de")
        assert all(line["translatedText"] == wanted[line["index"]] for line in lines)


@test
def addresses_of_libretranslate():
    with serving() as server:
        _, languages = server.ask("/languages")
        assert [x["code"] for x in languages] == ["en", "de", "fr", "es"] and languages[1]["name"] == "German"
        assert languages[0]["targets"] == ["en", "de", "fr", "es"]
        status, health = server.ask("/health")
        assert status == 200 and health["status"] == "ok" and health["version"], health
        settings = server.ask("/frontend/settings")[1]
        assert settings["language"]["source"]["code"] == "auto" and settings["keyRequired"] is False
        server.translate(LINES)
        figures = server.ask("/metrics")[1]
        assert f"moe_texts_total {len(LINES)}\n" in figures and 'moe_requests_total{status="2xx"} 4\n' in figures
        status, page = server.ask("/")
        assert status == 200 and page.startswith("<!DOCTYPE html>") and page.rstrip().endswith("</html>")


@test
def experts_are_loaded_on_demand():
    with serving("--set", "expert-memory=8M") as server:
        assert server.translate(LINES)[1]["translatedText"] == moe_translate(LINES, "de")
        figures = dict(re.findall(r"^moe_(experts?_\w+|experts) ([\d.]+)$", server.ask("/metrics")[1], re.M))
        assert 0 < int(figures["experts_held"]) < int(figures["experts"]), figures
        for name in "visits_total", "hits_total", "fetches_total", "fetched_bytes_total":
            assert int(figures["expert_" + name]) > 0, figures
        assert float(figures["expert_wait_seconds_total"]) > 0 and "experts_ahead_used_total" in figures


@test
def invalid_requests_are_explained():
    with serving("--max-body", "16", "--max-texts", "3") as server:
        for body, status, word in (
            ({"q": "a", "target": "xx"}, 400, "xx is not supported"),
            ({"q": "a", "source": "yy", "target": "de"}, 400, "yy is not supported"),
            ({"q": "a"}, 400, "missing target"),
            ({"target": "de"}, 400, "missing q"),
            ({"q": [1], "target": "de"}, 400, "only texts"),
            (b"{", 400, "JSON"),
            (b"[]", 400, "JSON"),
            (b'{"q":"\xff","target":"de"}', 400, "UTF-8"),
            (b'{"q":"One.\0Two.","target":"de"}', 400, "NUL"),
            (b'{"q":"It rains.","target":"de"}\0', 400, "NUL"),
            (b'{"q":"It rains.","target":"de"}x', 400, "unexpected data"),
            (b'{"q":"It rains.","target":"de"} {"q":"It snows."}', 400, "unexpected data"),
            ({"q": "One.\0Two.", "target": "de"}, 400, "U+0000"),
            ({"q": ["a"] * 4, "target": "de"}, 413, "texts"),
            ({"q": "a" * 20000, "target": "de"}, 413, "too large"),
            *((f'{{"q":"a","target":"de","alternatives":{x}}}'.encode(), 400, "from 0 to 64")
              for x in ("1.5", "1e-9", "1e999", "-1e999", "1e17", "-1", "65", "4294967297", '"-1"', '"nan"')),
            *((f'{{"q":"a","target":"de","alternatives":{x}}}'.encode(), 400, "is not a number")
              for x in ('"3x"', '""', "true", "[3]", "{}", f'"{"0" * 40}3"')),
            *(({"q": "a", "target": "de", name: x}, 400, f"{name} parameter must be true or false")
              for name in ("stream", "details", "experts") for x in (2, 0.5, "yes", -1, {})),
        ):
            got = server.ask("/translate", body)
            assert got[0] == status and word in got[1]["error"], (body, got)
        assert server.ask("/nowhere")[0] == 404 and server.ask("/translate")[0] == 405
        for x in (0, 64, 3.0, "3", "64", None, False):
            got = server.translate("a", alternatives=x, details=False)
            assert got[0] == 200, (x, got)
        assert server.ask("/translate", b"q=a", "text/plain")[0] in (400, 415)
        assert server.translate("It rains.")[0] == server.translate("a\\u0000")[0] == 200
        assert server.ask("/translate", b' {"q":"It rains.","target":"de"}\r\n\t ')[0] == 200


@test
def parameters_can_be_in_the_url():
    """Parameters in the URL work as in LibreTranslate. A null or empty format means text."""
    with serving() as server:
        wanted = server.translate("It rains.", target="de")[1]["translatedText"]
        at = "/translate?q=It+rains.&source=en&target=de"
        assert server.ask(at, b"", "")[1] == {"translatedText": wanted}
        assert server.ask("/translate?source=en&target=de", b"q=It+rains.",
                          "application/x-www-form-urlencoded")[1] == {"translatedText": wanted}
        assert server.ask("/translate?target=de", b"", "")[0] == 400
        for kind in (None, "", "text"):
            body = {"q": "It rains.", "source": "en", "target": "de", "format": kind}
            assert server.ask("/translate", body)[1] == {"translatedText": wanted}, kind
        assert server.ask("/translate", {**body, "format": "rtf"})[0] == 400


@test
def too_many_texts_take_little_memory():
    """Regression: a megabyte of empty texts took 230 MB before the request was refused."""
    with serving() as server:
        server.translate("It rains.")
        before = resident(server.process.pid)
        body = b'{"q":[' + b'"",' * 340000 + b'""],"target":"de"}'
        for _ in range(3):
            assert server.ask("/translate", body)[0] == 413
        nested = b'{"x":[' + (b"[" * 900 + b"]" * 900 + b",") * 550 + b'1],"q":"It rains.","source":"en","target":"de"}'
        assert server.ask("/translate", nested)[0] == 413  # a JSON value takes 1 or 2 bytes
        assert server.ask("/translate", b"q=&" * 340000 + b"target=de", "application/x-www-form-urlencoded")[0] == 413
        assert resident(server.process.pid) - before < 16 << 20


@test
def broken_clients_do_not_affect_others():
    with serving() as server:
        for data in (
            b"",
            b"GET",
            b"POST /translate HTTP/1.1\r\nContent-Length: 99\r\n\r\n{",
            b"\0" * 5000,
            b"GET / HTTP/9\r\n\r\n",
            b"POST /translate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"A" * 200000,
        ):
            with socket.create_connection(("127.0.0.1", server.port), 5) as raw:
                with contextlib.suppress(OSError):
                    raw.sendall(data)
        body = json.dumps({"q": ["This is a long sentence about the weather."] * 200, "target": "de"}).encode()
        for _ in range(5):  # connections closed during the translation
            raw = socket.create_connection(("127.0.0.1", server.port), 5)
            raw.sendall(
                b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % len(body)
                + body
            )
            time.sleep(0.05)
            raw.close()
        slow = socket.create_connection(("127.0.0.1", server.port), 60)  # sends byte by byte
        for byte in b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n":
            slow.sendall(bytes([byte]))
            time.sleep(0.002)
        assert b'"ok"' in slow.makefile("rb").read()
        assert server.translate("It rains.")[0] == 200


@test
def keys_rates_and_queues_are_limited():
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write("first-key\nsecond-key\n")
        keys.flush()
        with serving("--api-keys", keys.name) as server:
            assert (
                server.translate("It rains.")[0] == 403 and server.translate("It rains.", api_key="first-ke")[0] == 403
            )
            assert server.translate("It rains.", api_key="second-key")[0] == 200 and server.ask("/languages")[0] == 200
    with serving("--rate", "3") as server:
        statuses = [server.ask("/languages")[0] for _ in range(8)]
        assert 429 in statuses and statuses[:2] == [200, 200]
        assert [server.ask("/health")[0] for _ in range(5)] == [200] * 5  # /health has no limit
    with serving("--max-queue", "10") as server:
        status, answer = server.translate(["It rains."] * 11)  # can never fit, so 413 instead of 429
        assert status == 413 and "11 texts exceed the queue limit of 10" in answer["error"], answer
        status, answer = server.translate("<p>It rains.</p>" * 11, format="html")
        assert status == 413 and server.translate(["It rains."] * 5)[0] == 200
        refused = 0
        for _ in range(20):  # repeat until the second request finds a full queue
            with contextlib.closing(post(server, {"q": MANY[:9], "source": "en", "target": "de"})):
                wait_for(lambda: figure(server, "requests_open") == 1)
                status = server.translate(["It rains."] * 10)[0]
                assert status in (200, 429), status
                refused += status == 429
            wait_for(lambda: figure(server, "requests_open") == 0)
            if refused:
                break
        assert refused


@test
def a_key_file_is_read_completely_or_refused():
    """Regression: when memory ran out, a key became empty, which would admit requests without a key."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "keys"
        for data, word in (
            (b"one\ntwo\0three\n", "line 2: contains a NUL"),
            (b"\0", "line 1: contains a NUL"),
            (b"one\n" + b"a" * 132, "line 2: key longer than 131 bytes"),
            (b"a\t" + b"0" * 300 + b"1x\n", "line 1: expected KEY TAB LIMIT"),
            (b"\n\n", "contains no keys"),
        ):
            path.write_bytes(data)
            done = refused_start("--api-keys", path)
            assert done.returncode == 2 and word in done.stderr, (data, done)
        done = refused_start("--api-keys", folder)
        assert done.returncode == 4 and "directory" in done.stderr, done
        path.write_text("first\nsecond\t100\n" + "k" * 131 + "\n")
        if sys.platform != "linux" or "asan" in str(BIN) or "tsan" in str(BIN):
            return
        library = pathlib.Path(folder) / "fail.so"
        source = ROOT / "tests/programs/fail_allocation.c"
        cc = os.environ.get("CC", "cc").split()[-1]
        subprocess.run([cc, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        failed = 0
        for n in range(1, 16):
            environment = dict(os.environ, LD_PRELOAD=str(library), FAIL_AT=str(n))
            done = refused_start("--api-keys", path, model="/nowhere", env=environment)
            failed += ": out of memory" in done.stderr or "Cannot allocate" in done.stderr
            assert "/nowhere" in done.stderr or "memory" in done.stderr or "allocate" in done.stderr, (n, done)
        assert failed >= 8, failed  # allocations: file, buffer, line, two per key


def refused_start(*options, model=MODEL, **named):
    return subprocess.run([BIN / "moe-server", "-m", model, "--port", "0", *options], capture_output=True, text=True,
                          timeout=60, **named)


@test
def late_answers_are_504():
    with serving("--timeout", "1", "--set", "batch=1", fast=False) as server:
        status, answer = server.translate(["This is a long sentence about the weather and the people in it."] * 900)
        assert status == 504 and "too long" in answer["error"]
        assert server.process.poll() is None


SLOW = ["--threads", "1", "--set", "beam=16", "--set", "batch=4"]
MANY = [f"Sentence number {i} is a rather long one, which takes a while, and nobody waits for it." for i in range(900)]


def figure(server, name):
    return int(re.search(rf"^moe_{name} (\d+)$", server.ask("/metrics")[1], re.M)[1])


def post(server, body, source="127.0.0.1"):
    """Send a request on a new connection, which the server closes after the answer."""
    data = json.dumps(body).encode()
    raw = socket.create_connection(("127.0.0.1", server.port), 60, (source, 0))
    head = "POST /translate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    raw.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return raw


def read_all(raw):
    with raw, raw.makefile("rb") as reply:
        return reply.read()


def wait_for(what, seconds=30):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.02)


@test
def cut_streams_contain_the_reason():
    body = {"q": MANY, "source": "en", "target": "de", "stream": True}
    for options, word in ((["--timeout", "3"], b"too long"), (["--grace", "0"], b"is shutting down")):
        with serving(*SLOW, *options, fast=False) as server:
            raw = post(server, body)
            if "--grace" in options:
                wait_for(lambda: figure(server, "texts_total"))
                assert server.stop() == 0
            reply = read_all(raw)
            assert reply.startswith(b"HTTP/1.1 200") and reply.count(b"translatedText") < len(MANY)
            last = [line for line in reply.split(b"\n") if line.startswith(b"{")][-1]
            assert word in last and "error" in json.loads(last), last
            assert not reply.endswith(b"\r\n0\r\n\r\n")  # only complete streams end with this chunk


@test
def a_timeout_returns_the_finished_texts():
    many = MANY * 3
    with serving("--timeout", "3", "--max-texts", "5000") as server:
        status, answer = server.translate(many)
        finished = [x for x in answer["translatedText"] if x is not None]
        assert status == 504 and "took too long" in answer["error"] and len(answer["translatedText"]) == len(many)
        assert 0 < len(finished) < len(many) and all(finished), len(finished)
        page = "".join(f"<p>{text}</p>" for text in many)
        status, answer = server.translate(["<p>Hello.</p>", page], format="html")
        assert status == 504 and answer["translatedText"][1] is None and answer["translatedText"][0], answer
        status, answer = server.translate("\n".join(many))
        assert (status, list(answer)) == (504, ["error"]), answer  # a single text is returned whole or not at all


@test
def limits_of_time_follow_the_size():
    """A large request within --max-body gets more time than a small one."""
    page, begin = "".join(f"<p>{text}</p>" for text in MANY[:250]), time.monotonic()
    with serving() as server:
        assert server.translate(page, format="html")[0] == 200
    limit = max(1, int((time.monotonic() - begin) / 2))
    large = page + f"<!-- {'x' * 600000} -->"
    with serving("--timeout", str(limit)) as server:  # a tenth of the time of the large page
        status, answer = server.translate(large, format="html")
        assert status == 200 and answer["translatedText"].endswith("x -->"), (status, str(answer)[:200])


@test
def a_failed_translator_is_status_3():
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "m.bin"
        model.write_bytes(MODEL.read_bytes())
        for stream in (False, True):
            server = Server(*FAST, fast=False, model=model)
            assert server.translate("It rains.")[0] == 200
            time.sleep(1.1)
            model.touch()  # the server does not trust a mapped file that has changed
            raw = post(server, {"q": MANY, "target": "de", "source": "en", "stream": stream})
            reply = read_all(raw)
            assert b"the translator failed" in reply and not reply.endswith(b"\r\n0\r\n\r\n"), reply
            assert reply.startswith(b"HTTP/1.1 500"), reply
            log = server.process.stderr.read()
            assert server.process.wait(30) == 3 and "the translator failed: " in log, log
            server.process.stderr.close()


@test
def texts_of_closed_connections_are_dropped():
    with serving(*SLOW, fast=False) as server:
        for stream in (False, True):
            raw = post(server, {"q": MANY, "source": "en", "target": "de", "stream": stream})
            wait_for(lambda: figure(server, "texts_waiting"))
            raw.close()
            before = figure(server, "texts_total")
            wait_for(lambda: figure(server, "texts_waiting") == figure(server, "requests_open") == 0)
            done = figure(server, "texts_total")
            assert done < before + len(MANY) / 2
            assert server.translate("It rains.")[0] == 200
            assert figure(server, "texts_total") <= done + 100  # at most one batch is finished


@test
def the_server_ends_within_the_grace_time():
    for grace, stuck in ((1, False), (1, True), (60, False)):
        server = Server(*SLOW, "--grace", str(grace), fast=False)
        raws = [post(server, {"q": MANY, "source": "en", "target": "de"}) for _ in range(3)]
        slow = socket.create_connection(("127.0.0.1", server.port), 60)
        slow.sendall(b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        if stuck:  # this client never reads its large answer
            deaf = post(server, {"q": ["1" * 300] * 900, "source": "en", "target": "de", "stream": True})
        wait_for(lambda: figure(server, "requests_open") >= 3)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with contextlib.closing(socket.socket()) as late:
            assert late.connect_ex(("127.0.0.1", server.port)) != 0
        if grace == 60:
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) != 0
        else:
            assert all(b"503" in (reply := read_all(raw))[:16] and b"is shutting down" in reply for raw in raws)
            assert server.process.wait(30) == 0 and grace <= time.monotonic() - begin
            assert "did not finish within" in server.process.stderr.read()
        for raw in (*raws, slow, *([deaf] if stuck else [])):
            raw.close()
        server.process.stderr.close()


@test
def many_clients_share_batches():
    with serving() as server:
        wanted, wrong = dict(zip(LINES, moe_translate(LINES, "de"))), []

        def client(number):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
            for i in range(6):
                line = LINES[(number + i) % len(LINES)]
                connection.request(
                    "POST",
                    "/translate",
                    json.dumps({"q": line, "source": "en", "target": "de"}),
                    {"Content-Type": "application/json"},
                )
                reply = connection.getresponse()
                status, text = reply.status, reply.read()
                if status != 200 or json.loads(text)["translatedText"] != wanted[line]:
                    wrong.append((number, line, status))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[:3]
        figures = server.ask("/metrics")[1]
        rows, steps = (int(re.search(rf"moe_decoder_{what}_total (\d+)", figures)[1]) for what in ("rows", "steps"))
        assert rows > 6 * steps, "clients were decoded one by one"  # a text takes 3 rows per step


@test
def load_does_not_affect_answers():
    command = [sys.executable, str(ROOT / "tests/server/load.py"), "--seconds", "5", "--growth", "12"]
    command += ["--set", "beam=2", "--set", "rerank=0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0 and "\n0 wrong" in run.stdout, run.stdout + run.stderr


@test
def shutdown_answers_all_requests():
    server, answers = Server("--grace", "60"), []

    def client():
        answers.append(server.translate(LINES * 10))

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    while int(re.search(r"moe_requests_open (\d+)", server.ask("/metrics")[1])[1]) + len(answers) < 8:
        time.sleep(0.02)  # wait until all requests have arrived
    status = server.stop(limit=60)
    for thread in threads:
        thread.join()
    assert status == 0 and len(answers) == 8
    wanted = moe_translate(LINES, "de") * 10
    assert all(answer == (200, {"translatedText": wanted}) for answer in answers), answers[0]
    with contextlib.closing(socket.socket()) as closed:
        assert closed.connect_ex(("127.0.0.1", server.port)) != 0


@test
def addresses_of_ipv6_have_brackets():
    command = [str(BIN / "moe-server"), "-m", str(MODEL), "--host", "::1", "--port", "0", *FAST]
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        print("# no IPv6 here")
        return
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        found = re.search(r"http://\[::1\]:\d+/", process.stderr.readline())
        assert found, "no address"
        with urllib.request.urlopen(found[0] + "health", timeout=60) as reply:
            assert reply.status == 200
    finally:
        process.terminate()
        assert process.wait(30) == 0
        process.stderr.close()


@test
def invalid_options_are_refused():
    for options, message in (
        ("--port x", "invalid value 'x' for --port"),
        ("--port 99999", "value '99999' of --port is out of range"),
        ("--port 1 --port 2", "--port is given twice"),
        ("--threads 2;beam=2", "invalid value '2;beam=2' for --threads"),
        ("--nothing", "unrecognized option '--nothing'"),
        ("--set beem=4", "'beem'"),
        ("x", "unexpected argument 'x'"),
        ("--listen /tmp/x", "for --listen: expected"),
        ("--listen unix:", "for --listen: expected"),
        ("--listen unix:" + "x" * 200, "for --listen: expected"),
        ("--listen unix:x --port 1", "--listen cannot be combined with --port"),
    ):
        command = [BIN / "moe-server", "-m", MODEL, *options.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 2 and message in done.stderr and "moe-server --help" in done.stderr, done


@test
def a_used_port_and_a_missing_model_are_reported():
    with serving() as server:
        other = subprocess.run(
            [str(BIN / "moe-server"), "-m", str(MODEL), "--port", str(server.port)],
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
        assert other.returncode == 4 and str(server.port) in other.stderr
    missing = subprocess.run([BIN / "moe-server", "-m", "none.bin"], capture_output=True, text=True, timeout=30)
    assert missing.returncode == 3 and missing.stderr.startswith("moe-server: "), missing


if __name__ == "__main__":
    sys.exit(test.run())
