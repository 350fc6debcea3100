#!/usr/bin/env python3
"""Load test for a server with LibreTranslate's API: many clients, some of them broken, and a shutdown under load.

Usage: tests/server/load.py [OPTION]...

  --clients N     number of clients that send one text after another (default: 64)
  --seconds S     duration (default: 60)
  --set X=Y       setting of moe-server, also used as an option of moe-translate; may be repeated
  --url URL       load this server; its answers are not compared, and it is not stopped
  --plain         start no broken clients
  --growth MIB    tolerated growth of resident memory after the first quarter (default: 4)

Starts moe-server with the bundled model and translates sentences from English to German on persistent connections.
Every answer must equal that of moe-translate byte for byte. Meanwhile other clients send slowly, send too much or
invalid data, or disconnect, and each must get the right status. Finally the server gets SIGTERM while all clients wait
for answers, and must answer all earlier requests. Resident memory must not grow after the first quarter.

Prints requests, times and memory. The exit status is 0 if everything was correct.
"""

import argparse
import http.client
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / os.environ.get("BIN", ".")
MODEL = ROOT / "models/en-de-fr-es.bin"
JSON = {"Content-Type": "application/json"}


def sentences():
    who = ["I", "The old man", "My sister and her friends", "We"]
    does = ["can see", "would like to buy", "have never found", "forgot"]
    what = ["the book", "a small house near the river", "it", "the way home"]
    when = ["today.", "again, because it rains and the streets are wet.", "!", "in the city?"]
    return [" ".join(words).replace(" !", "!") for words in itertools.product(who, does, what, when)]


def body_of(text):
    return json.dumps({"q": text, "source": "en", "target": "de"}).encode()


class Load:
    def __init__(self, host, port, wanted):
        self.host, self.port, self.wanted = host, port, wanted
        self.lock = threading.Lock()
        self.seconds, self.wrong, self.refused = [], [], 0
        self.stop = self.ending = False

    def report(self, what):
        with self.lock:
            self.wrong.append(what)

    def connect(self):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def client(self, number):
        """Send one request after another until the test stops or the server closes the connection."""
        texts, connection = list(self.wanted), None
        for i in itertools.count(number * 7):
            if self.stop:
                return
            text = texts[i % len(texts)]
            sent = False
            try:
                connection = connection or self.connect()
                begin = time.monotonic()
                connection.request("POST", "/translate", body_of(text), JSON)
                sent = True
                reply = connection.getresponse()
                status, answer = reply.status, json.loads(reply.read())
            except (OSError, http.client.HTTPException) as error:
                # A request is not lost if the server closed the connection before reading it.
                closed = isinstance(error, http.client.RemoteDisconnected | ConnectionError)
                if not self.ending or (sent and not closed):
                    self.report(f"client {number}: {type(error).__name__} {error}")
                return
            seconds = time.monotonic() - begin
            if self.ending and status == 503:
                with self.lock:
                    self.refused += 1
                return
            if status != 200 or self.wanted[text] not in (None, answer.get("translatedText")):
                self.report(f"client {number}: {status} {answer} for {text!r}")
            with self.lock:
                self.seconds.append(seconds)

    def warm_up(self):
        """Send all texts in one request, so that the memory of a full batch does not count as growth."""
        connection = self.connect()
        connection.request("POST", "/translate", body_of(2 * list(self.wanted)), JSON)
        if (status := connection.getresponse().status) != 200:
            self.report(f"a list of texts: {status}")
        connection.close()

    def raw(self, data, pause=0.0, answered=True):
        """Send bytes and return the status of the answer, or None."""
        with socket.create_connection((self.host, self.port), 60) as raw:
            for at in range(0, len(data), len(data) if not pause else 16):
                raw.sendall(data[at : at + (len(data) if not pause else 16)])
                time.sleep(pause)
            if not answered:
                return None
            reply = re.match(rb"HTTP/1.1 (\d+)", raw.recv(65536))
            return int(reply[1]) if reply else None

    def broken(self):
        """Run one broken client after another."""

        def post(body, length=None):
            head = f"POST /translate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body

        long = body_of("This is a long sentence about the weather and the people in it.")
        cases = (
            ("slow", lambda: self.raw(post(long), pause=0.05), 200),
            ("too large", lambda: self.raw(post(b" " * (1 << 20) + long)), 413),
            ("no JSON", lambda: self.raw(post(b"{q")), 400),
            ("no UTF-8", lambda: self.raw(post(b'{"q":"\xff","target":"de"}')), 400),
            ("no HTTP", lambda: self.raw(b"\0\1\2\r\n\r\n" * 10), (400, None)),
            ("gone early", lambda: self.raw(post(long, 500), answered=False), None),
            ("gone while it is translated", lambda: self.raw(post(long), answered=False), None),
        )
        for name, ask, status in itertools.cycle(cases):
            if self.stop or self.ending:
                return
            try:
                found = ask()
            except (ConnectionError, TimeoutError) as error:
                found = type(error).__name__ if status != 413 else 413  # the request was too large
            if found != status and not (isinstance(status, tuple) and found in (*status, "ConnectionResetError")):
                if not self.ending:
                    self.report(f"{name}: {found}, not {status}")
            time.sleep(0.02)


def resident(pid):
    """Return the resident memory of a process in MiB."""
    found = re.search(r"VmRSS:\s*(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024


def start(settings):
    options = [word for setting in settings for word in ("--set", setting)]
    process = subprocess.Popen(
        [str(BIN / "moe-server"), "-m", str(MODEL), "--port", "0", *options], stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/", line):
            return process, int(found[1])
    raise SystemExit("the server did not start")


def translations(texts, settings):
    """Return the translations of the texts by moe-translate."""
    options = [f"--{setting}" for setting in settings]
    run = subprocess.run(
        [str(BIN / "moe-translate"), "-q", "-m", str(MODEL), "-s", "en", "-t", "de", *options],
        input="".join(text + "\n" for text in texts), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return run.stdout.split("\n")[:-1]


def report(load, seconds):
    times = sorted(load.seconds)
    if not times:
        return "no answers"
    at = lambda part: 1000 * times[min(len(times) - 1, int(part * len(times)))]  # noqa: E731
    return (
        f"{len(times)} answers, {len(times) / seconds:.0f} a second; "
        f"ms: p50 {at(0.5):.0f}, p90 {at(0.9):.0f}, p99 {at(0.99):.0f}, longest {1000 * times[-1]:.0f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--set", action="append", default=[], metavar="X=Y")
    parser.add_argument("--url")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--growth", type=float, default=4)
    options = parser.parse_args()
    texts, process = sentences(), None
    if options.url:
        parts = urllib.parse.urlsplit(options.url)
        load = Load(parts.hostname, parts.port, dict.fromkeys(texts))
    else:
        wanted = dict(zip(texts, translations(texts, options.set), strict=True))
        process, port = start(options.set)
        load = Load("127.0.0.1", port, wanted)
    load.warm_up()
    threads = [threading.Thread(target=load.client, args=(number,)) for number in range(options.clients)]
    if not options.plain and process:
        threads += [threading.Thread(target=load.broken) for _ in range(2)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(options.seconds / 4)
    early = resident(process.pid) if process else 0
    time.sleep(options.seconds * 3 / 4)
    late = resident(process.pid) if process else 0
    seconds = time.monotonic() - begin
    print(report(load, seconds))
    if process:
        load.ending = True
        process.send_signal(signal.SIGTERM)
    else:
        load.stop = True
    for thread in threads:
        thread.join()
    if process:
        status = process.wait(200)
        process.stderr.close()
        print(f"resident MiB: {early:.1f} after a quarter, {late:.1f} at the end")
        print(f"SIGTERM under load: exit status {status}, {load.refused} later requests were refused")
        if status:
            load.report(f"exit status {status}")
        if late > early + options.growth:
            load.report(f"memory grew from {early:.1f} to {late:.1f} MiB")
    print(f"{len(load.wrong)} wrong")
    for problem in load.wrong[:10]:
        print(f"    {problem[:300]}")
    return bool(load.wrong)


if __name__ == "__main__":
    sys.exit(main())
