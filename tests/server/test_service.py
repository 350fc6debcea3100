#!/usr/bin/env python3
"""moe-server as a service: log, proxies, supervisors, and shutdown under all conditions.

Usage: tests/python tests/server/test_service.py      (BIN and BUILD are the folders of the programs)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import contextlib
import datetime
import http.client
import ipaddress
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from suite import Skip, Suite
from test_server import BIN, FAST, MANY, MODEL, ROOT, SLOW, Server, post, read_all, serving, wait_for

test = Suite()
BUILD = ROOT / os.environ.get("BUILD", "build")
SECRET = "The secret letter is in the house."


def lines_of(path):
    """Return the lines of a log as objects."""
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def send(server, head=(), path="/health", address="127.0.0.1", body=None, source=None):
    """Send a request to `address` on a new connection; return the status."""
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: x", "Connection: close", *head]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as raw:
        raw.settimeout(60)
        if source:
            raw.bind((source, 0))
        raw.connect((address, server.port))
        raw.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b""))
        reply = raw.makefile("rb").read()
    return int(reply.split(b" ", 2)[1]) if reply else 0


# ---- The log ----


@test
def untranslated_texts_are_counted():
    lost = "unexpected `}'"  # the model adds a quotation mark
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "requests.log"
        with serving("--log", str(log)) as server:
            for texts, more, wanted in (
                    (["Good morning."], {}, None), ([lost, "Good morning.", lost], {}, '2; texts="0,2"'),
                    (["Good morning.", f"<p>{lost}</p><p>{lost}</p>"], {"format": "html"}, '2; texts="1"'),
                    ([lost] * 101, {}, f'101; texts="{",".join(map(str, range(100)))}"'),
                    ([lost], {"stream": True}, None)):
                body = json.dumps({"q": texts, "source": "en", "target": "de", **more}).encode()
                address = f"http://127.0.0.1:{server.port}/translate"
                asked = urllib.request.Request(address, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(asked) as reply:
                    answer, header = reply.read().decode(), reply.headers["X-Untranslated"]
                n = answer.count(lost)
                assert n == "".join(texts).count(lost) and header == wanted, (answer, header)
                wait_for(lambda: lines_of(log))
                assert lines_of(log)[-1].get("untranslated", 0) == n, lines_of(log)
                log.write_text("")


@test
def every_request_is_logged():
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w") as keys:
        log = pathlib.Path(folder) / "requests.log"
        keys.write("right-key\n")
        keys.flush()
        with serving("--log", str(log), "--api-keys", keys.name, "--max-body", "64") as server:
            def ask(*words, **named):
                n = len(lines_of(log))
                reply = server.ask(*words, **named)[1]
                wait_for(lambda: len(lines_of(log)) > n)  # the line is written after the answer was sent
                return reply

            body = {"q": [SECRET, "It rains."], "source": "en", "target": "de", "api_key": "right-key"}
            answer = ask("/translate?alternatives=1&token=hidden", body)
            ask("/translate", {**body, "stream": True})
            ask("/translate", {**body, "q": "<p>Good</p><p>Bad</p>", "format": "html"})
            ask("/translate", {**body, "api_key": "wrong-key"})
            ask("/translate", b"{")
            ask("/translate", b" " * 100000)
            ask("/languages", method="DELETE")
            ask("/a%0Ab%22%FF" + "c" * 500)
            ask("/health", method="HEAD")
            text, found = log.read_text(), lines_of(log)
        short = [(x["method"], x["path"], x["status"], x["texts"]) for x in found]
        assert short[:7] == [("POST", "/translate", 200, 2), ("POST", "/translate", 200, 2),
                             ("POST", "/translate", 200, 1), ("POST", "/translate", 403, 2),
                             ("POST", "/translate", 400, 0), ("POST", "/translate", 413, 0),
                             ("DELETE", "/languages", 405, 0)], short
        assert found[7]["path"].startswith("/a") and "\n" not in found[7]["path"] and len(found[7]["path"]) < 250
        assert found[0]["in"] == len(json.dumps(body)) and found[0]["out"] == len(json.dumps(
            answer, ensure_ascii=False, separators=(",", ":")).encode()) + 1, (found[0], answer)
        assert found[1]["out"] > 60 and found[5]["in"] > 64 << 10 and found[8]["out"] == 0
        for line in found:
            assert set(line) == {"time", "client", "method", "path", "status", "in", "out", "ms", "texts"}, line
            at = datetime.datetime.strptime(line["time"], "%Y-%m-%dT%H:%M:%S.%fZ")
            now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
            assert abs((now - at).total_seconds()) < 60 and line["client"] == "127.0.0.1" and 0 <= line["ms"] < 60000
        for private in ("secret", "hidden", "alternatives", "-key", answer["translatedText"][0]):
            assert private not in text, private
        assert log.stat().st_mode & 0o077 == log.stat().st_mode & 0o040  # other users cannot read the log


@test
def no_line_is_lost_or_mixed():
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        with serving("--log", str(log)) as server:
            def client(number):
                for i in range(200):
                    send(server, path=f"/{number}/{i}/" + "x" * 150)

            threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            moved = []
            while any(thread.is_alive() for thread in threads):  # rotate the log meanwhile
                with contextlib.suppress(FileNotFoundError):
                    log.rename(f"{log}.{len(moved)}")
                    moved.append(f"{log}.{len(moved)}")
                server.process.send_signal(signal.SIGHUP)
                time.sleep(0.02)
            for thread in threads:
                thread.join()
        assert len(moved) > 2
        paths = [line["path"] for name in (*moved, *([log] if log.exists() else [])) for line in lines_of(name)]
        assert sorted(paths) == sorted(f"/{n}/{i}/" + "x" * 150 for n in range(8) for i in range(200)), len(paths)


@test
def unanswered_requests_are_logged_with_a_reason():
    """The log has status 408 for incomplete requests and 499 after a disconnect; `cut` says why an answer was cut."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        with serving(*SLOW, "--timeout", "2", "--read-timeout", "1", "--log", str(log), fast=False) as server:
            body = {"q": MANY, "source": "en", "target": "de"}
            for number, (wanted, more) in enumerate((((200, 504), {"stream": True}), ((504, None), {}))):
                read_all(post(server, {**body, **more}))
                wait_for(lambda: log.read_text().count("\n") > number)
                line = lines_of(log)[-1]
                assert (line["status"], line.get("cut")) == wanted and line["texts"] == len(MANY), line
            for more in ({}, {"stream": True}):
                before = len(lines_of(log))
                raw = post(server, {**body, **more})
                if more:
                    raw.recv(1)  # wait for the start of the answer
                else:
                    time.sleep(0.5)
                raw.close()
                wait_for(lambda: len(lines_of(log)) > before)
                line = lines_of(log)[-1]
                assert (line["status"], line.get("cut")) == ((200, 499) if more else (499, None)), line
            slow = socket.create_connection(("127.0.0.1", server.port), 60)
            slow.sendall(b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            with slow:
                slow.recv(1)
            wait_for(lambda: lines_of(log)[-1]["status"] == 408)
            assert lines_of(log)[-1]["in"] == 1


@test
def requests_are_answered_if_the_log_fails():
    with serving("--log", "/dev/full") as server:
        assert server.translate("It rains.")[0] == server.ask("/health")[0] == 200
        message = server.process.stderr.readline()
        assert "--log /dev/full" in message and "No space" in message, message
        server.process.send_signal(signal.SIGTERM)
        rest = server.process.stderr.read()
        assert rest == "", rest  # the error is reported only once
    for path in ("/nowhere/log", "/"):
        done = subprocess.run([BIN / "moe-server", "-m", MODEL, "--port", "0", "--log", path], capture_output=True,
                              text=True, timeout=30)
        assert done.returncode == 4 and f"--log {path}: " in done.stderr, done
    for options, lines in (((), 0), (("--log", "-"), 2)):
        with serving(*options) as server:
            assert server.ask("/health")[0] == send(server) == 200
            server.process.send_signal(signal.SIGHUP)  # reloads
            wait_for(lambda: 'moe_reloads_total 1\n' in server.ask("/metrics")[1])
            server.process.terminate()
            assert server.process.stderr.read().count('"path":"/health"') == lines


# ---- Proxies ----


def parsed(word):
    """Parse an entry of X-Forwarded-For with Python's library; return None if it is invalid."""
    word = word.strip(" \t")
    if found := re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](?::\d{1,5})?", word):
        word = found[1]
    elif found := re.fullmatch(r"([^:]*):\d{1,5}", word):
        word = found[1] if "." in found[1] else "none"
    try:
        address = ipaddress.ip_address(word)
    except ValueError:
        return None
    if getattr(address, "scope_id", None):
        return None
    return getattr(address, "ipv4_mapped", None) or address


def forwarded(fields, trusted, peer="127.0.0.1"):
    client = ipaddress.ip_address(peer)
    for word in reversed(",".join(fields).split(",")):
        if not any(client in network for network in trusted):
            break
        if word.strip(" \t"):
            address = parsed(word)
            if address is None:
                break
            client = address
    return client


@test
def clients_of_trusted_proxies_are_identified():
    pick = random.Random(3)
    good = ["192.0.2.7", "10.1.2.3", "10.200.0.1", "127.0.0.1", "2001:db8::7", "2001:db8:ffff::1", "::1", "fd00::1:2",
            "::ffff:192.0.2.9", "192.0.2.7:8080", "[2001:db8::9]:443", "[fd00::9]", "\t198.51.100.4 "]
    bad = ["unknown", "_hidden", "1.2.3", "1.2.3.4.5", "256.1.1.1", "1.2.3.4:", "1.2.3.4:123456", "[1.2.3.4]", "[::1",
           "::1]", "fe80::1%eth0", "1.2.3.4/8", "\"1.2.3.4\"", "x" * 3000, "\x80\xff", "1.2.3.4 5.6.7.8", "[]:1", "[:]",
           ":"]
    trusted = ["127.0.0.1", "10.0.0.0/9", "fd00::/16", "2001:db8:8000::/33"]
    networks = [ipaddress.ip_network(x) for x in trusted]
    cases = [[], [""], [","], [", , "], *([x] for x in good + bad), ["192.0.2.7", "203.0.113.9"],
             ["203.0.113.9, 192.0.2.7", "10.1.2.3"], ["192.0.2.7", "unknown", "10.1.2.3"],
             [",".join(["10.1.2.3"] * 3000)]]
    for _ in range(300):
        words = [pick.choice(good if pick.random() < 0.8 else [*bad, ""]) for _ in range(pick.randint(1, 6))]
        cut = pick.randint(0, len(words))
        cases.append([field for field in (",".join(words[:cut]), ", ".join(words[cut:])) if field])
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        options = [word for network in trusted for word in ("--trust-proxy", network)]
        with serving("--log", str(log), *options) as server:
            for fields in cases:
                name = lambda: pick.choice(["X-Forwarded-For", "x-forwarded-for"])  # noqa: E731
                assert send(server, [f"{name()}: {field}" for field in fields]) == 200, fields
            wait_for(lambda: len(lines_of(log)) == len(cases))
            for fields, line in zip(cases, lines_of(log), strict=True):
                assert line["client"] == str(forwarded(fields, networks)), (fields, line)
        log.unlink()
        with serving("--log", str(log), "--trust-proxy", "10.0.0.0/8", "--trust-proxy", "::1") as server:
            send(server, ["X-Forwarded-For: 192.0.2.7"])  # an untrusted peer can send any header
            wait_for(lambda: log.exists() and lines_of(log))
            assert lines_of(log)[0]["client"] == "127.0.0.1"


@test
def proxies_with_ipv6_are_identified():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        raise Skip("no IPv6 here") from None
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        command = [BIN / "moe-server", "-m", MODEL, "--host", "::1", "--port", "0", *FAST, "--log", log]
        with subprocess.Popen([*command, "--trust-proxy", "::/127"], stderr=subprocess.PIPE, text=True) as process:
            class Six:
                port = int(re.search(r"\]:(\d+)/", process.stderr.readline())[1])

            assert send(Six, ["X-Forwarded-For: 2001:db8::5"], address="::1") == send(Six, address="::1") == 200
            wait_for(lambda: len(lines_of(log)) == 2)
            process.terminate()
        assert [x["client"] for x in lines_of(log)] == ["2001:db8::5", "::1"]


@test
def networks_are_parsed_strictly():
    for word in ("", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/-1", "10.0.0.0/8x", "10.0.0", "::/129", "[::1]", "1.2.3.4:5",
                 "localhost", "10.0.0.0/8,::1", "10.0.0.0/ 8"):
        done = subprocess.run([BIN / "moe-server", "-m", MODEL, "--trust-proxy", word], capture_output=True, text=True,
                              timeout=30)
        assert done.returncode == 2 and f"'{word}' for --trust-proxy: expected" in done.stderr, done


def get(server, head=(), source=None):
    """Return the status of /languages, which is subject to limits, unlike /health."""
    return send(server, head, "/languages", source=source)


@test
def limits_apply_to_the_clients_of_a_proxy():
    if (late := 60 - time.monotonic() % 60) < 10:
        time.sleep(late)  # rates are counted per minute of the clock
    one, other = ["X-Forwarded-For: 192.0.2.1"], ["X-Forwarded-For: 192.0.2.2, 10.0.0.1"]
    same = ["X-Forwarded-For: 2001:db8:0:1::1"], ["X-Forwarded-For: 2001:db8:0:1:ffff::2"]  # equal in the first 64 bits
    trusted = ["--trust-proxy", "127.0.0.1", "--trust-proxy", "10.0.0.1"]
    with serving("--rate", "3", *trusted) as server:
        assert [get(server, one) for _ in range(5)] == [200] * 3 + [429] * 2
        assert [get(server, other) for _ in range(4)] == [200] * 3 + [429]
        assert [get(server, ["X-Forwarded-For: 6.6.6.6, 192.0.2.1"]), get(server)] == [429, 200]
        assert [get(server, same[i % 2]) for i in range(4)] == [200] * 3 + [429]
        assert send(server, one) == 200  # /health has no limit
        # The requests of untrusted peers count towards the limit of their own address, whatever header they send.
        statuses = [get(server, [f"X-Forwarded-For: 192.0.2.{10 + i}"], "127.0.0.9") for i in range(5)]
        assert statuses == [200] * 3 + [429] * 2, statuses
    with serving("--rate", "1") as server:  # each address has its own counter
        assert [get(server, source=f"127.0.{1 + i // 250}.{1 + i % 250}") for i in range(400)] == [200] * 400
    head = b"POST /translate HTTP/1.1\r\nHost: x\r\n%s\r\nContent-Length: 99\r\n\r\n{"
    with serving("--max-address", "2", *trusted) as server, contextlib.ExitStack() as held:
        def hold(data=b""):
            raw = held.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
            raw.sendall(data)

        for _ in range(6):
            hold()  # proxies keep connections open
        for _ in range(2):
            hold(head % one[0].encode())
        time.sleep(0.5)
        assert get(server, one) == 429 and get(server, other) == get(server) == send(server, one) == 200
        held.close()
        wait_for(lambda: get(server, one) == 200)
    with serving("--max-address", "2", "--trust-proxy", "10.0.0.1") as server, contextlib.ExitStack() as held:
        for _ in range(2):
            hold()
        time.sleep(0.5)
        with contextlib.suppress(ConnectionError):
            assert send(server, other) == 0  # the address has reached its limit of connections


# ---- A socket with a file ----


class Local(Server):
    """A server that listens on a Unix domain socket."""

    def __init__(self, path, *options):
        command = [BIN / "moe-server", "-m", MODEL, *FAST, "--listen", f"unix:{path}", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.messages, self.path = self.process.stderr.readline(), str(path)

    def fetch(self, path, *head, body=None):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(60)
            raw.connect(self.path)
            lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", "Host: x", "Connection: close", *head]
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
            raw.sendall("\r\n".join([*lines, "", ""]).encode() + (body or b""))
            head, answer = raw.makefile("rb").read().split(b"\r\n\r\n", 1)
        return int(head.split(b" ", 2)[1]), answer


@test
def the_server_listens_on_a_unix_socket():
    with tempfile.TemporaryDirectory() as folder:
        path, log = pathlib.Path(folder) / "socket", pathlib.Path(folder) / "log"
        body = json.dumps({"q": "It rains.", "source": "en", "target": "de"}).encode()
        server = Local(path, "--log", log, "--rate", "3")
        assert server.messages.rstrip().endswith(f" at unix:{path}"), server.messages
        assert path.is_socket() and path.stat().st_mode & 0o777 == 0o660
        assert server.fetch("/translate", body=body) == (200, b'{"translatedText":"Es regnet."}\n')
        forged = [server.fetch("/languages", f"X-Forwarded-For: 192.0.2.{i}")[0] for i in range(3)]
        assert forged == [200, 200, 429] and server.fetch("/health")[0] == 200
        wait_for(lambda: len(lines_of(log)) == 5)
        assert {line["client"] for line in lines_of(log)} == {"unix"}
        second = Local(path)  # does not replace a socket that is in use
        assert second.process.wait(10) == 4 and "in use" in second.messages, second.messages
        second.process.stderr.close()
        assert server.fetch("/health")[0] == 200
        server.process.kill()
        server.process.wait(10)
        server.process.stderr.close()
        assert path.is_socket()  # the killed server left its socket file
        server = Local(path, "--rate", "1", "--trust-proxy", "unix")
        assert [server.fetch("/languages", f"X-Forwarded-For: 192.0.2.{i}")[0] for i in (1, 2, 1)] == [200, 200, 429]
        held = socket.socket(socket.AF_UNIX)
        held.connect(server.path)
        status = server.stop()
        held.close()
        assert status == 0 and not path.exists()
        server = Local(path)
        path.rename(f"{path}.old")
        path.write_text("another's")
        assert server.stop() == 0 and path.read_text() == "another's"
        third = Local(path)  # does not replace another file
        assert third.process.wait(10) == 4 and path.read_text() == "another's", third.messages
        third.process.stderr.close()


# ---- Supervisors ----


class Supervisor:
    """Restarts moe-server after failures, as systemd does with Restart=on-failure, and reads its notifications."""

    def __init__(self, *options):
        self.folder = tempfile.TemporaryDirectory()
        self.heard, self.statuses, self.ready = [], [], 0
        self.port, self.log = self.free_port(), pathlib.Path(self.folder.name) / "log"
        self.ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ear.bind(self.folder.name + "/notify")
        self.command = [BIN / "moe-server", "--port", str(self.port), "--log", self.log, *options]
        self.messages = open(self.folder.name + "/messages", "w+")
        for run in (self.listen, self.run):
            threading.Thread(target=run, daemon=True).start()
        wait_for(lambda: self.ready == 1)

    @staticmethod
    def free_port():
        with socket.create_server(("127.0.0.1", 0)) as found:
            return found.getsockname()[1]

    def listen(self):
        while True:
            word = self.ear.recv(100).decode()
            self.heard.append(word)
            self.ready += word == "READY=1"

    def run(self):
        while not self.statuses or self.statuses[-1]:
            env = {**os.environ, "NOTIFY_SOCKET": self.folder.name + "/notify"}
            self.process = subprocess.Popen(self.command, env=env, stdout=subprocess.DEVNULL, stderr=self.messages)
            self.statuses.append(self.process.wait())

    ask, translate = Server.ask, Server.translate


@test
def supervisors_restart_the_server_after_a_failure():
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "m.bin"
        model.write_bytes(MODEL.read_bytes())
        it = Supervisor("-m", model, *FAST)
        for round_ in (1, 2):
            assert it.translate("It rains.") == (200, {"translatedText": "Es regnet."})
            time.sleep(1.1)
            model.touch()  # the server does not trust a mapped file that has changed
            status, answer = it.translate(MANY)
            assert status == 500 and "the translator failed" in answer["error"], answer
            wait_for(lambda: it.ready == round_ + 1)
            assert it.statuses == [3] * round_
        it.translate("It rains.")
        wait_for(lambda: len(lines_of(it.log)) == 5)  # a line can be written after the next answer
        it.ask("/nowhere")
        wait_for(lambda: len(lines_of(it.log)) == 6)
        assert [x["status"] for x in lines_of(it.log)] == [200, 500, 200, 500, 200, 404]
        figures = it.ask("/metrics")[1]  # counters start at 0 after a restart
        for kind, n in (("2xx", 1), ("4xx", 1), ("5xx", 0)):
            assert f'moe_requests_total{{status="{kind}"}} {n}\n' in figures, figures
        it.process.terminate()
        wait_for(lambda: len(it.statuses) == 3)
        time.sleep(0.2)
        assert it.statuses == [3, 3, 0] and it.process.poll() == 0  # no restart after status 0
        assert it.heard == ["READY=1", "STOPPING=1"] * 3, it.heard
        it.messages.seek(0)
        assert it.messages.read().count("the translator failed: ") == 2
        it.messages.close()
        it.folder.cleanup()


@test
def health_reports_a_failed_translator():
    """Before it exits, the server reports the failure on open connections. Failed texts do not count as usage."""
    for _ in range(5):  # the time before the exit is short
        with tempfile.TemporaryDirectory() as folder:
            model, keys = pathlib.Path(folder) / "m.bin", pathlib.Path(folder) / "keys"
            model.write_bytes(MODEL.read_bytes())
            keys.write_text("key\n")
            server = Server("--api-keys", str(keys), model=model)
            watcher = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

            def watch(path):
                watcher.request("GET", path, headers={"Authorization": "Bearer key"})
                reply = watcher.getresponse()
                return reply.status, reply.read().decode()

            assert server.translate("It rains.", api_key="key")[0] == 200
            assert watch("/health")[1].startswith('{"status":"ok","version":"')
            time.sleep(1.1)
            model.touch()
            raw, seen = post(server, {"q": MANY, "source": "en", "target": "de", "api_key": "key"}), []
            with contextlib.suppress(OSError, http.client.HTTPException):  # loop until the server exits
                while True:
                    seen.append((watch("/health"), watch("/metrics")[1], json.loads(watch("/v2/usage")[1])))
            reply = read_all(raw)
            assert reply.startswith(b"HTTP/1.1 500 ") or not reply, reply  # the server may exit before it answers
            assert server.process.wait(30) == 3
            assert "the translator failed: " in server.process.stderr.read()
            server.process.stderr.close()
            watcher.close()
        healths = [x[0] for x in seen]
        assert healths, "the connection was not kept"
        found = {(status, json.loads(text)["status"]) for status, text in healths}
        assert found <= {(200, "ok"), (503, "failed")}, found
        failed = sum(status == 503 for status, _ in healths)
        refused = re.search(r'moe_requests_total{status="5xx"} (\d+)', seen[-1][1])[1]
        if failed and (int(refused), seen[-1][2]["character_count"]) == (failed + 1, 9):
            return
    raise AssertionError((failed, refused, seen[-1][2]))


@test
def abstract_notify_sockets_work():
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as ear:
        name = f"moe-test-{os.getpid()}"
        try:
            ear.bind("\0" + name)
        except OSError:
            raise Skip("names without files are Linux's") from None
        os.environ["NOTIFY_SOCKET"] = "@" + name
        try:
            with serving():
                ear.settimeout(20)
                assert ear.recv(100) == b"READY=1"
            assert ear.recv(100) == b"STOPPING=1"
        finally:
            del os.environ["NOTIFY_SOCKET"]


@test
def systemd_accepts_the_unit():
    with tempfile.TemporaryDirectory() as folder:
        make = ["make", "-s", "-o", "all", "install", f"PREFIX={folder}/usr", f"UNITDIR={folder}/units", f"BIN={BIN}",
                f"BUILD={BUILD}", "STRIP="]
        subprocess.run(make, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        unit = pathlib.Path(folder) / "units/moe-server.service"
        text = unit.read_text()
        assert f"ExecStart={folder}/usr/bin/moe-server " in text and "@PREFIX" not in text, text
        for line in ("Type=notify", "Restart=on-failure", "DynamicUser=yes", "ProtectSystem=strict",
                     "NoNewPrivileges=yes", "MemoryMax="):
            assert re.search(rf"^{line}", text, re.M), line
        grace = int(re.search(r"TimeoutStopSec=(\d+)", text)[1])
        assert grace > 6  # the server's own --grace plus a second
        subprocess.run(["make", "-s", "uninstall", f"PREFIX={folder}/usr"], cwd=ROOT, check=True)
        assert not unit.exists()
        subprocess.run([x for x in make if not x.startswith("UNITDIR")], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL)
        assert not list(pathlib.Path(folder).rglob("*.service"))  # `make install` needs UNITDIR to install a unit
        if not shutil.which("systemd-analyze"):
            raise Skip("no systemd-analyze here")
        unit.parent.mkdir(exist_ok=True)
        unit.write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
        assert done.returncode == 0 and "moe-server" not in done.stderr, done.stderr
        done = subprocess.run(["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", unit],
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# ---- The end ----


@test
def the_server_ends_even_if_a_thread_is_stuck():
    """A request waits for a language detector that never returns."""
    if sys.platform != "linux":
        raise Skip("LD_PRELOAD is Linux's")
    for signals in (1, 2):
        server = slow_server("--grace", "1")
        try:
            ends_in_time(server, signals)
        finally:
            server.process.kill()
            server.process.wait()
            server.process.stderr.close()


@test
def a_busy_socket_does_not_delay_the_end():
    """libmicrohttpd aborts if a listening socket is closed before its thread has removed the socket from epoll."""
    if sys.platform != "linux":
        raise Skip("LD_PRELOAD is Linux's")
    server = slow_server()
    watcher = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    server.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(OSError, http.client.HTTPException):  # loop until the server exits
        while True:
            watcher.request("GET", "/health")
            watcher.getresponse().read()
    watcher.close()
    message = server.process.stderr.read()
    server.process.stderr.close()
    assert server.process.wait(30) == 0, message


def slow_server(*options, **environment):
    """Start a server with stuck.c preloaded."""
    assert (BUILD / "stuck.so").exists(), "make test builds it"
    environment["LD_PRELOAD"] = str(BUILD / "stuck.so")
    os.environ.update(environment)
    try:
        return Server(*options)
    finally:
        for name in environment:
            del os.environ[name]


def ends_in_time(server, signals):
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 60)) as stuck:
        body = json.dumps({"q": "STRA\u1e9eE"}, ensure_ascii=False).encode()
        stuck.sendall(b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                      b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.5)
        stuck.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            raise AssertionError(f"it is not stuck: {stuck.recv(1000)}")
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        status = server.process.wait(30)
        assert status == (-signal.SIGTERM if signals == 2 else 0), (signals, status)


@test
def large_texts_do_not_delay_the_end():
    for text in ("word " * 200000, "." * 1000000, "a" * 1000000, "Good morning. " * 70000, "1+" * 500000):
        server = Server("--grace", "0", "--set", "beam=1", fast=False)
        raws = [post(server, {"q": text, "source": "en", "target": "de"}) for _ in range(3)]
        time.sleep(0.7)
        assert server.stop() == 0, text[:20]
        for raw in raws:
            reply = read_all(raw)
            assert b"is shutting down" in reply or text.encode() in reply, (text[:20], reply[:300])  # texts are copied


if __name__ == "__main__":
    sys.exit(test.run())
