#!/usr/bin/env python3
"""HTTP in moe-server: ambiguous requests, slow connections, limits per address.

Usage: tests/python tests/server/test_http.py      (BIN is the folder of the programs)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time

from suite import Suite
from test_server import BIN, MODEL, ROOT, Server, resident, serving, wait_for
from test_service import slow_server

test = Suite()
BODY = b'{"q":"It rains.","source":"en","target":"de"}'
HEAD = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def raw(server, data, address="127.0.0.1", limit=20):
    """Send bytes; return everything that arrives until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), limit, (address, 0)) as connection:
        connection.sendall(data)
        return connection.makefile("rb").read()


def status(reply):
    return int(reply.split(b" ", 2)[1]) if reply else 0


@test
def ambiguous_requests_are_refused():
    get = b"GET /health HTTP/1.1\r\n"
    with serving() as server:
        for good in (
            HEAD + LENGTH + b"\r\n" + BODY,
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS,
            HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + CHUNKS,
            get + b"Host:x\r\n\r\n",
            get + b"Host: x:5000 \r\nX-Empty:\r\n\r\n",
            b"GET /health HTTP/1.0\r\n\r\n",
        ):
            line, rest = good.split(b"\r\n", 1)
            assert status(raw(server, line + b"\r\nConnection: close\r\n" + rest)) == 200, good
        for bad in (
            HEAD + LENGTH + LENGTH + b"\r\n" + BODY,
            HEAD + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY,
            HEAD + b"Content-Length: 5\r\n" + LENGTH + b"\r\n" + BODY,
            HEAD + b"Content-Length: %d, %d\r\n\r\n" % (len(BODY), len(BODY)) + BODY,
            HEAD + b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY,
            HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS,
            HEAD + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNKS,
            HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
            HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS,
            HEAD + b"Transfer-Encoding: identity\r\n" + LENGTH + b"\r\n" + BODY,
            HEAD + b"Content-Length : %d\r\n\r\n" % len(BODY) + BODY,
            get + b"\r\n",
            get + b"X: y\r\n\r\n",
            get + b"Host: x\r\nHost: x\r\n\r\n",
            get + b"Host: x\r\nhost: y\r\n\r\n",
            get + b"Host : y\r\nHost: x\r\n\r\n",
            get + b" Host: y\r\nHost: x\r\n\r\n",
            b"GET /health HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n",
            HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS,
        ):
            # The bytes after the bad request must not be parsed as another request.
            reply = raw(server, bad + get + b"Host: x\r\n\r\n")
            assert status(reply) == 400 and b" 200 " not in reply, (bad, reply)


@test
def wrong_lengths_close_the_connection():
    """libmicrohttpd refuses them itself; before 1.0 the text of its answer begins with a second header."""
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving() as server:
        for length, wanted in ((b"abc", 400), (b"-1", 400), (b"", 400), (b"5x", 400), (b"0x5", 400), (b"9" * 30, 413)):
            with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
                connection.sendall(HEAD + b"Content-Length: " + length + b"\r\n\r\n" + get)
                whole = connection.makefile("rb").read()  # until the server closes the connection
            header, text = whole.split(b"\r\n\r\n", 1)
            assert status(header) == wanted and b"\r\nConnection: close" in header, (length, header)
            text = text.removeprefix(header + b"\r\n\r\n")
            assert text.startswith(b"<html>") and b" 200 " not in text, (length, text)


@test
def urls_are_taken_whole():
    close = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    with serving() as server:
        for path in b"/health%00", b"/health%00/x", b"/translate?q=a%00b&source=en&target=de", b"/%00":
            assert status(raw(server, b"GET " + path + close + b"\r\n")) == 400, path
        for n, wanted in (1, 200), (500, 200), (501, 400), (1000, 400), (3000, 400):
            for value in b"", b"=b":
                url = b"GET /health?" + b"&".join(b"a%d" % i + value for i in range(n))
                reply = raw(server, url + close + b"\r\n", limit=5)
                assert status(reply) == wanted and (b"more than 500" in reply) == (wanted == 400), (n, reply)
        typed = close + b"Content-Type: application/json\r\n"
        assert status(raw(server, b"GET /v2/languages" + typed + b"\r\n")) == 200  # no body
        asked = b"POST /translate?q=It%20rains.&source=en&target=de" + typed + b"Content-Length: 0\r\n\r\n"
        assert b"Es regnet." in raw(server, asked)


@test
def a_server_without_memory_says_so():
    """cJSON reports both an invalid request and a lack of memory as NULL."""
    if sys.platform != "linux" or "asan" in str(BIN):
        return
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "fail.so"
        source = ROOT / "tests/programs/fail_allocation.c"
        cc = os.environ.get("CC", "cc").split()[-1]
        subprocess.run([cc, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        os.environ.update(LD_PRELOAD=str(library), FAIL_ABOVE="120000000")
        try:
            server = Server("--max-body", "16000", "--max-texts", "1048576")
        finally:
            del os.environ["LD_PRELOAD"], os.environ["FAIL_ABOVE"]
        many = b'{"source":"en","target":"de","q":[' + b",".join([b'""'] * 1048000) + b"]}"
        assert server.ask("/translate", many)[0] == 503
        assert server.ask("/translate", many[:-1])[0] in (400, 503) and server.translate("It rains.")[0] == 200
        assert server.stop() == 0
        # A server without enough memory exits instead of translating with weaker settings.
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        for above in range(40, 64, 4):
            done = subprocess.Popen([BIN / "moe-server", "-m", MODEL, "--port", "0", "--threads", "1"],
                                    stderr=subprocess.PIPE, text=True, env={**environment, "FAIL_ABOVE": f"{above}000000"})
            message = done.stderr.readline()
            if "http://" in message:
                port = int(re.search(r":(\d+)/", message)[1])
                server.port = port
                answer = server.translate("I <b>have</b> not <i>seen</i> the dog.", format="html", details=True)
                assert answer[0] == 503 or answer[1]["translatedText"] == \
                    "Ich <b>habe</b> den Hund nicht <i>gesehen</i>.", (above, answer)
                done.terminate()
            assert done.wait(30) == (0 if "http://" in message else 3), (above, message)
            done.stderr.close()


@test
def invalid_line_ends_are_refused():
    """libmicrohttpd 0.9.75 accepts folded lines and lone LFs and cuts values at NUL bytes; moe-server refuses these."""
    close, get = HEAD + b"Connection: close\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n"
    with serving() as server:
        for bad in (
            close + b"Content-Length:\r\n %d\r\n\r\n" % len(BODY) + BODY,
            close + b"Content-Length: 5\r\n 0\r\n\r\n" + BODY,
            close + LENGTH + b" Transfer-Encoding: chunked\r\n\r\n" + BODY,
            close + LENGTH + b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n" + BODY,
            close + LENGTH + b"X: a\nTransfer-Encoding: chunked\r\n\r\n" + BODY,
            close + LENGTH + b"X: a\nContent-Length: 3\r\n\r\n" + BODY,
            close + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS,
            b"GET /health HTTP/1.1\r\nHost: x\r\n y\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\nHost: y\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
            HEAD + b"Content-Length: 4\r\n 5\r\n\r\n" + BODY,
            HEAD + b"Content-Length: %d\0x\r\n\r\n" % len(BODY) + BODY,
            HEAD + b"Transfer-Encoding: chunked\0x\r\n\r\n" + CHUNKS,
            HEAD + b"Transfer-Encoding: chunked\0x\r\nX: a\r\n\r\n" + CHUNKS,
            get + b"X: a\nContent-Length: 5\r\n\r\nabcde",
            get + b"X: a\r\n b\r\n\r\n",
            get + b"X: a\r\n\tb\r\nY: c\r\n\r\n",
            get + b"X: a\r\n \r\n\r\n",
            get + b"X: a\n\r\n",
            get + b"X: a\n\n",
            get + b"X: a\rY: b\r\n\r\n",
            get + b"X: a\0b\r\n\r\n",
            get + b"\0X: a\r\n\r\n",
            b"GET /health HTTP/1.1\nHost: x\r\n\r\n",
            b"GET\0 /health HTTP/1.1\r\nHost: x\r\n\r\n",
        ):
            reply = raw(server, bad + get + b"\r\n")
            assert status(reply) == 400 and b" 200 " not in reply, (bad, reply)


@test
def long_slow_and_pipelined_requests_are_answered():
    """libmicrohttpd can store the lines of a request after those of another request or in a buffer that has grown."""
    get, close = b"GET /health HTTP/1.1\r\nHost: x\r\n", b"Connection: close\r\n"
    many = b"".join(b"X-%d:%s%s\r\n" % (i, b" " * (i % 4), b"y" * (i * 7 % 90)) for i in range(200))
    cookies = b"Cookie: a=b; c=\"d e\"; f\r\nCookie: g=h\r\n"
    asked = b"POST /translate?q=It%20rains.&source=en&target=de HTTP/1.1\r\nHost: x\r\n"
    with serving() as server:
        for good in (
            get + many + close,
            get + close + cookies + b"Empty:\r\nBlank: \r\n",
            get + b"X: " + b"y" * 20000 + b"\r\n" + close + b"Last: \t a \t \r\n",
            b"\r\n" + get + close,
            asked + close + b"Content-Length: 0\r\n",
            HEAD + close + b"Expect: 100-continue\r\n" + LENGTH,
        ):
            good += b"\r\n" + (BODY if LENGTH in good else b"")
            assert b" 200 OK\r\n" in raw(server, good), good
        posted = HEAD + LENGTH + cookies + b"\r\n" + BODY
        last = get + many + close + b"\r\n"
        assert raw(server, (posted + get + many + b"\r\n") * 9 + last).count(b" 200 OK\r\n") == 19
        with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
            for at in range(0, len(last), 97):
                connection.sendall(last[at : at + 97])
                time.sleep(0.01)
            assert status(connection.makefile("rb").read()) == 200


@test
def other_methods_get_the_allowed_ones():
    with serving() as server:
        for path, method, allow in (
            ("translate", "GET", b"POST, OPTIONS"),
            ("detect", "PUT", b"POST, OPTIONS"),
            ("languages", "POST", b"GET, HEAD, OPTIONS"),
            ("", "DELETE", b"GET, HEAD, OPTIONS"),
            ("health", "OPTIONS", b"GET, HEAD, OPTIONS"),
        ):
            reply = raw(server, f"{method} /{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert status(reply) == (204 if method == "OPTIONS" else 405), reply
            assert b"\r\nAllow: " + allow + b"\r\n" in reply, reply
        assert b"Allow:" not in raw(server, b"PUT /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")


@test
def a_named_browser_extension_may_send_requests():
    origin = "chrome-extension://abcdefgh"
    ask = "OPTIONS /translate HTTP/1.1\r\nHost: x\r\nOrigin: %s\r\nConnection: close\r\n\r\n" % origin
    for options, named in ([], False), (["--allow-origin", origin], True):
        with serving(*options) as server:
            reply = raw(server, ask.encode()).lower()
            assert status(reply) == 204, reply
            assert (b"access-control-allow-origin: " + origin.encode() in reply) == named, reply
            assert (b"access-control-allow-headers: content-type, authorization" in reply) == named, reply


@test
def one_address_does_not_lock_out_others():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    health = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with serving("--host", "0.0.0.0") as server, contextlib.ExitStack() as held:
        for _ in range(1100):
            held.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
        assert status(raw(server, health, "127.0.0.2")) == 200


@test
def slow_requests_are_closed():
    slow = HEAD + b"Content-Length: 1000\r\n\r\n"
    with serving("--read-timeout", "1") as server:
        for begun in (b"GET /health HTTP/1.1\r\nHost: x\r\nX: ", slow):
            with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
                connection.sendall(begun)
                with contextlib.suppress(OSError):
                    for _ in range(600):
                        connection.sendall(b"x")
                        time.sleep(0.1)
                    raise AssertionError(f"it still reads: {begun}")
        assert server.translate("It rains.")[0] == 200


@test
def slow_readers_are_closed():
    """Clients that never read must not hold the memory for answers (a hundred per address) indefinitely."""
    asked = {"q": [f"<!-- {'x' * 8000} -->"] * 900, "source": "en", "target": "de", "format": "html"}
    with tempfile.NamedTemporaryFile() as log, serving(
        "--read-timeout", "1", "--max-body", "8192", "--log", log.name
    ) as server:
        for stream in (False, True):
            body = json.dumps({**asked, "stream": stream}).encode()
            request = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            assert raw(server, request).count(b"<!--") == 900  # a normal reader gets the whole answer
            os.truncate(log.name, 0)
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", server.port))
                connection.sendall(request)
                begin = time.monotonic()
                while not os.path.getsize(log.name) and connection.recv(2000):
                    assert time.monotonic() - begin < 120
                    time.sleep(0.2)
            line = json.loads(pathlib.Path(log.name).read_text())
            assert (line["status"], line["cut"]) == (200, 408) and line["ms"] > 6000, line


@test
def incoming_bodies_have_a_common_limit():
    """The total size of bodies is limited, and one address may use at most the memory that is still free."""
    padded = BODY + b" " * 170000
    request = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(padded) + padded
    with serving("--max-bodies", "1024") as server, contextlib.ExitStack() as held:
        for address in ("127.0.0.1", "127.0.0.3"):
            for _ in range(6):
                connection = held.enter_context(socket.create_connection(("127.0.0.1", server.port), 20, (address, 0)))
                connection.sendall(HEAD + b"Content-Length: 200000\r\n\r\n" + b" " * 170000)
            time.sleep(0.5)
            got = raw(server, request, address)
            assert status(got) == 503 and b"try again" in got, got
            if address == "127.0.0.1":
                assert status(raw(server, request, "127.0.0.2")) == 200
        small = HEAD + b"Connection: close\r\n" + LENGTH + b"\r\n" + BODY
        assert status(raw(server, small, "127.0.0.2")) == 200
        held.close()
        time.sleep(0.5)
        assert status(raw(server, request)) == 200
    with serving("--max-bodies", "300") as server:  # the body will never fit, so the status is not 503
        assert status(raw(server, request)) == 413


@test
def a_slow_reader_gets_every_byte():
    """A client may read a stream in parts of any size, chunked or not. Parts do not move the server's buffer."""
    texts = [f"<p><!-- {i} {'x' * (i % 4000)} --></p>" for i in range(900)]
    body = json.dumps({"q": texts, "source": "en", "target": "de", "format": "html", "stream": True}).encode()
    with serving("--max-body", "4096") as server:
        for version in (b"1.1", b"1.0"):
            head = HEAD.replace(b"1.1", version) + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.settimeout(20)
                connection.connect(("127.0.0.1", server.port))
                connection.sendall(head + body)
                reply = http.client.HTTPResponse(connection)
                reply.begin()
                data, pick = b"", random.Random(1)
                while part := reply.read(pick.choice((1, 100, 3000, 50000))):
                    data += part
                    if pick.random() < 0.01:
                        time.sleep(0.02)
            lines = [json.loads(line) for line in data.splitlines()]
            assert [line["index"] for line in lines] == list(range(900))
            assert [line["translatedText"] for line in lines] == texts
    page = "<p><!-- " + "x" * 40_000_000 + " --></p>"
    if sys.platform != "linux":
        return
    moved = []
    for stream in (False, True):
        with tempfile.NamedTemporaryFile("r") as file:
            server = slow_server("--max-body", "50000", "--max-bodies", "200000", MOE_MOVED=file.name)
            got, answer = server.translate(page, format="html", stream=stream)
            assert got == 200 and answer["translatedText"] == page
            assert server.stop() == 0
            moved.append(int(file.read()))
    assert moved[1] < moved[0] + 2 * len(page), moved


@test
def clients_share_the_memory_of_a_file():
    page = b"<pre>" + b"a" * 8000000 + b"</pre>"
    head = (b"POST /translate_file HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: multipart/form-data; boundary=xx\r\n")

    def keep(server, address="127.0.0.1", data=page):
        parts = b""
        for name, value in ((b'file"; filename="a.html', data), (b"source", b"en"), (b"target", b"de")):
            parts += b'--xx\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name, value)
        parts += b"--xx--\r\n"
        reply = raw(server, head + b"Content-Length: %d\r\n\r\n" % len(parts) + parts, address)
        return status(reply), re.search(rb'/download_file/[^"]+', reply)[0] if status(reply) == 200 else reply

    def get(path):
        return b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path

    with serving("--max-body", "8192") as server, contextlib.ExitStack() as held:
        names = [keep(server)[1] for _ in range(2)]
        before = resident(server.process.pid)
        for i in range(40):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
            connection.sendall(get(names[i % 2]))
            assert connection.recv(9) == b"HTTP/1.1 "
        assert resident(server.process.pid) - before < 30 << 20
        other = keep(server, "127.0.0.2", b"<p>1</p>")[1]
        seen = [keep(server)[0] for _ in range(10)]  # new files replace only files of the same client
        assert seen == [200] * 10, seen
        assert status(raw(server, get(other))) == 200, other
        assert status(raw(server, get(names[0]))) == 404
        held.close()
        time.sleep(1)
        assert resident(server.process.pid) - before < (72 << 20)
        got = raw(server, get(keep(server)[1]))
        assert got.endswith(page)


@test
def memory_of_bodies_is_returned():
    """Regression: malloc placed request bodies among small blocks, so that 60 bodies (21 MB) were not returned."""
    with serving() as server:
        server.translate(["It rains."] * 100)
        before = resident(server.process.pid)
        for _ in range(2):
            with contextlib.ExitStack() as held:
                for _ in range(60):
                    connection = held.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
                    connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 400000)
                time.sleep(0.5)
            time.sleep(0.5)
        assert server.translate("It rains.")[0] == 200
        wait_for(lambda: resident(server.process.pid) - before < 6 << 20)


@test
def metrics_need_a_key():
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write("right\n")
        keys.flush()
        with serving("--api-keys", keys.name) as server:
            head = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            for more, wanted in ((b"", 403), (b"Authorization: Bearer wrong\r\n", 403),
                                 (b"Authorization: Bearer right\r\n", 200)):
                assert status(raw(server, head + more + b"\r\n")) == wanted, more


if __name__ == "__main__":
    sys.exit(test.run(sys.argv[1] if len(sys.argv) > 1 else ""))
