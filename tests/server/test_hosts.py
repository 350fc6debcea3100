#!/usr/bin/env python3
"""moe-server answers only requests for its own names; web pages of other origins need --allow-origin.

Usage: tests/python tests/server/test_hosts.py      (BIN is the folder of the programs)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""
import http.client
import json
import pathlib
import re
import socket
import subprocess
import sys
import tempfile

from suite import Skip, Suite
from test_server import BIN, FAST, MODEL, serving

test = Suite()
TEXT = {"q": "It rains.", "source": "en", "target": "de"}
FORM = b"q=It+rains.&source=en&target=de"


def send(server, path, host, body=None, address="127.0.0.1", **headers):
    """Return the status and the headers of an answer."""
    connection = http.client.HTTPConnection(address, server.port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest("POST" if body else "GET", path, skip_host=True)
    for name, value in {"Host": host, **({"Content-Length": len(body)} if body else {}), **named}.items():
        connection.putheader(name, str(value))
    connection.endheaders(body)
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply.status, dict(reply.headers), data


def own_address():
    """Return an address of this machine other than loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            raise Skip("no network here") from None
        return probe.getsockname()[0]


@test
def only_names_of_the_server_are_answered():
    named = ["--server-name", "translate.example.org", "--server-name", "Moe.Example"]
    for options, good, bad in (
        ([], ["localhost", "localhost:5000", "127.0.0.1", "127.8.9.1:80", "[::1]:5000", "a", "LOCALHOST.", "x.localhost",
              "moe:5000"],
         ["evil.example", "evil.example:5000", "127.0.0.1.evil.example", "localhost.evil.example", "192.168.1.7",
          "8.8.8.8:80", "[2001:db8::1]", "1.2.3", "127.0.0.1.nip.io", "xlocalhost.com", "[evil.example]"]),
        (named, ["translate.example.org", "TRANSLATE.example.org:443", "moe.example.", "localhost"],
         ["evil.example", "x.translate.example.org", "translate.example.org.evil.example", "translate.example"]),
        (["--server-name", "*"], ["evil.example", "8.8.8.8"], []),
    ):
        with serving(*options) as server:
            for path, body in (("/metrics", None), ("/health", None), ("/", None), ("/nowhere", None),
                               ("/translate", FORM)):
                more = {"Content_Type": "application/x-www-form-urlencoded"} if body else {}
                for host in good:
                    assert send(server, path, host, body, **more)[0] in (200, 404), (path, host)
                for host in bad:
                    status, _, said = send(server, path, host, body, **more)
                    assert status == 421 and b"--server-name" in said, (path, host, status)


@test
def names_from_other_machines_are_checked_if_the_server_has_names():
    address = own_address()
    for options, wanted in (([], 200), (["--server-name", "translate.example.org"], 421)):
        with serving("--host", "0.0.0.0", *options) as server:
            assert send(server, "/health", "evil.example", address=address)[0] == wanted
            assert send(server, "/health", "evil.example")[0] == 421  # from this machine
            for host in (address, "nas", "translate.example.org"):
                assert send(server, "/health", host, address=address)[0] == 200, host


@test
def pages_of_other_origins_are_refused():
    page = "https://page.example"
    kinds = ("application/x-www-form-urlencoded", FORM), ("application/json", json.dumps(TEXT).encode())
    for options, origin, more, wanted in (
        ([], None, {}, 200),
        ([], page, {}, 403),
        ([], "null", {}, 403),  # a sandboxed frame, a local file
        ([], "chrome-extension://abcdef", {}, 403),
        ([], page, {"Sec_Fetch_Site": "cross-site"}, 403),
        ([], "http://localhost:8000", {"Sec_Fetch_Site": "same-site"}, 403),  # another program on this machine
        ([], "http://localhost:8000", {}, 403),
        ([], "http://localhost", {}, 200),
        ([], "http://LOCALHOST", {}, 200),
        ([], page, {"Sec_Fetch_Site": "same-origin"}, 200),  # the server's page behind a proxy that changes Host
        (["--server-name", "page.example"], page, {}, 200),
        (["--server-name", "page.example"], "https://page.example.evil.example", {}, 403),
        (["--allow-origin", page], page, {"Sec_Fetch_Site": "cross-site"}, 200),
        (["--allow-origin", "moz-extension://1", "--allow-origin", page], page, {}, 200),
        (["--allow-origin", "moz-extension://1", "--allow-origin", page], page + ".evil.example", {}, 403),
        (["--allow-origin", "*"], page, {}, 200),
    ):
        more = {**({"Origin": origin} if origin else {}), **more}
        with serving(*options) as server:
            for kind, body in kinds:
                status, headers, said = send(server, "/translate", "localhost", body, Content_Type=kind, **more)
                assert status == wanted and (status == 200 or b"--allow-origin" in said), (options, origin, said)
                if "--allow-origin" in options and status == 200:
                    assert headers["Access-Control-Allow-Origin"] in (origin, "*"), headers
                else:
                    assert "Access-Control-Allow-Origin" not in headers, headers
            assert send(server, "/metrics", "localhost", **more)[0] == wanted
            texts = int(re.search(rb"moe_texts_total (\d+)", send(server, "/metrics", "localhost")[2])[1])
            assert texts == (2 if wanted == 200 else 0), texts  # nothing was started


@test
def pages_of_other_origins_can_only_link():
    """Images, scripts, frames and links send no Origin header."""
    page = "https://page.example"
    for options, site, use, wanted in (
        ([], "cross-site", "image", 403), ([], "cross-site", "iframe", 403), ([], "same-site", "script", 403),
        ([], "cross-site", "empty", 403), ([], "cross-site", None, 403), ([], "cross-site", "document", 200),
        ([], "none", "document", 200), ([], "same-origin", "empty", 200), ([], None, None, 200),
        (["--allow-origin", page], "cross-site", "iframe", 200),
    ):
        more = {name: value for name, value in (("Sec_Fetch_Site", site), ("Sec_Fetch_Dest", use)) if value}
        with serving(*options) as server:
            for path in "/", "/languages", "/ready", "/metrics":
                status, headers, said = send(server, path, "localhost", **more)
                assert status == wanted and (status == 200 or b"--allow-origin" in said), (site, use, path, status)
                frames = " ".join(["frame-ancestors 'self'", *options[1:]]) if path == "/" else None
                assert headers.get("Content-Security-Policy") == frames, (path, headers)
                assert (b"foreign\">" in said) == (path == "/" and wanted == 200 and site == "cross-site"), (path, said)


@test
def a_server_without_keys_on_the_network_warns():
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write("key\n")
        keys.flush()
        for options, warned in ((["--host", "0.0.0.0"], True), (["--host", "::"], True), ([], False),
                                (["--host", "127.0.0.2"], False), (["--host", "0.0.0.0", "-q"], False),
                                (["--host", "0.0.0.0", "--api-keys", keys.name], False)):
            process = subprocess.Popen([BIN / "moe-server", "-m", MODEL, "--port", "0", *FAST, *options],
                                       stderr=subprocess.PIPE, text=True)
            if "-q" not in options:
                process.stderr.readline()
            process.terminate() if not warned else None
            said = process.stderr.readline()
            process.terminate()
            process.wait(30)
            process.stderr.close()
            assert ("--api-keys" in said) == warned, (options, said)


@test
def options_are_checked():
    for option, value in (("--server-name", "http://x"), ("--server-name", "x:80"), ("--server-name", ""),
                          ("--allow-origin", "example.org"), ("--allow-origin", "https://example.org/"),
                          ("--allow-origin", "https://")):
        done = subprocess.run([BIN / "moe-server", "-m", MODEL, option, value], capture_output=True, text=True,
                              timeout=30)
        assert done.returncode == 2 and f"'{value}' for {option}: expected" in done.stderr, done


@test
def key_files_have_comments():
    for text, keys, said in (
        ("# my keys\n\n  # indented\nkey\t100\tbrowser # 1\n", ["key"], ""),
        ("\ufeffkey\n", ["key"], ""),
        ("\ufeff# my keys\r\nkey\r\n", ["key"], ""),
        ("key\t-\tname\n#other\n", ["key"], ""),
        ("# nothing\n", None, "contains no keys"),
        ("key 1000\n", None, "line 1: keys cannot contain spaces"),
        ("one\nkey # comment\n", None, "line 2: keys cannot contain spaces"),
        ("key\t0\n", None, "expected KEY TAB LIMIT"),
        ("key\t-5\n", None, "expected KEY TAB LIMIT"),
        ("key\t5\ta\tb\n", None, "expected KEY TAB LIMIT"),
        ("one\ntwo\none\t5\n", None, "line 3: the key is already on line 1"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "keys"
            path.write_text(text, encoding="utf-8")
            if keys is None:
                done = subprocess.run([BIN / "moe-server", "-m", MODEL, "--port", "0", "--api-keys", path],
                                      capture_output=True, text=True, timeout=30)
                assert done.returncode == 2 and said in done.stderr, (text, done.stderr)
                continue
            with serving("--api-keys", str(path)) as server:
                for key in (*keys, *text.split("\n"), "#", "# my keys", "#other", "", "browser"):
                    status = server.ask("/translate", {**TEXT, "api_key": key})[0]
                    assert status == (200 if key in keys else 403), (text, key, status)


if __name__ == "__main__":
    sys.exit(test.run(sys.argv[1] if len(sys.argv) > 1 else ""))
