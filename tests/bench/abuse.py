#!/usr/bin/env python3
"""Measure how moe-server serves one well-behaved client, the canary, under every
known kind of abuse.

    tests/python tests/bench/abuse.py                  # ten minutes
    tests/python tests/bench/abuse.py --seconds 60 --size 0.1

Attackers at other loopback addresses send requests that once stopped the
server: texts for which a quadratic scan would take hours, empty lists, bodies
that arrive slowly or never end, idle connections, ambiguous HTTP, and abandoned
requests. Meanwhile the canary requests four sentences per second.

Fails if one of the canary's answers differs from moe-translate's, if its 99th
percentile reaches 2 seconds, if an attacker receives an unexpected status, if
memory is still 10% larger afterwards, or if the server needs more than --grace
plus two seconds to exit after SIGTERM under abuse.
"""
import argparse
import collections
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / os.environ.get("BIN", ".")
MODEL = ROOT / "models/en-de-fr-es.bin"
SENTENCES = ["Where is my book?", "It rains.", "We have known each other for ten years.", "Good morning, my friend.",
             "The old man would like to buy a small house near the river.", "She forgot the way home.",
             "I can see the streets of the city, and they are wet."]
GRACE, QUIET = 2, 20  # in seconds: the server's --grace, the wait before memory is measured
ATTACKERS, HOLDERS = 6, 3  # number of client addresses
FINE = {200, 204, 400, 403, 404, 405, 413, 414, 415, 429, 431, 503, 504, "closed"}  # statuses expected by attackers

# Strings whose repetition took or might take quadratic time in the scanners of text, HTML and Markdown.
TRIGGERS = ("..", "1+", "a@", "http://", "((", "%(", "{{", "``", "$x", "\\", "--", "''", "a.", "A. ", "é", "e\u0301",
            "\u200b", "<<", "&", "#a", ":a", "/*", "+1 ", "One. ", "\"", "[x](", "0x", "\U0001f600", "\ufffd", "\t",
            ",,")
TAGS = ("<b>", "<b><i>5</i>", "<p class=notranslate>", "<!--", "<a x='", "<svg>", "<script>", "&", "<", "</b>", "<wbr>",
        "<p>", "<br>\n", "<a href=x>@<span>t</span></a>", "<pre>", "&amp", "<![CDATA[", "<?")


def resident(pid):
    """Return the resident memory of a process in MiB."""
    return int(re.search(r"VmRSS:\s*(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) / 1024


class Attacker:
    """An attacker with its own address."""

    def __init__(self, number, port, size, seed):
        self.address, self.port, self.size = f"127.0.0.{number + 2}", port, size
        self.pick, self.seen = random.Random(seed * 100 + number), collections.Counter()
        self.over = threading.Event()
        self.kinds = [x for x in dir(self) if x.startswith("try_")]

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), 70, (self.address, 0))

    def some(self, n):
        """Return a number scaled by --size, at least 1."""
        return max(1, int(n * self.size))

    def post(self, body, path="/translate", kind="application/json", more=""):
        head = (f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {kind}\r\n{more}"
                f"Content-Length: {len(body)}\r\n\r\n")
        return head.encode() + body

    def ask(self, data):
        """Send a request; return the status of the response."""
        with self.connect() as raw:
            try:
                raw.sendall(data)
            except OSError:
                pass  # the server may reject the request before it is complete
            try:
                reply = raw.makefile("rb").read()
            except OSError:
                return "closed"
        found = re.match(rb"HTTP/1.1 (\d+)", reply)
        return int(found[1]) if found else "closed"

    def translate(self, q, **more):
        return self.ask(self.post(json.dumps({"q": q, "source": "en", "target": "de", **more}).encode()))

    def leave(self, data, seconds):
        with self.connect() as raw:
            raw.sendall(data)
            self.over.wait(seconds)
        return "closed"

    # ---- Kinds of abuse; each function returns the status of the response ----

    def try_trigger(self):
        part = self.pick.choice(TRIGGERS)
        end = self.pick.choice(["", "x", " %s", "\n"])
        return self.translate(part * (self.some(900000) // len(part.encode())) + end)

    def try_tags(self):
        part = self.pick.choice(TAGS)
        return self.translate(part * (self.some(900000) // len(part)), format="html")

    def try_blanks_and_tags(self):
        return self.translate(" " * self.some(400000) + "x" + "<wbr>" * self.some(100000), format="html")

    def try_empty_texts(self):
        n = self.some(340000)
        if self.pick.random() < 0.5:
            return self.ask(self.post(b"q=&" * n + b"target=de", kind="application/x-www-form-urlencoded"))
        return self.ask(self.post(b'{"q":[' + b'"",' * n + b'""],"target":"de"}'))

    def try_newlines(self):
        n = self.some(500000)
        return self.translate("\n" * n if self.pick.random() < 0.5 else ["\n" * (n // 900)] * 900)

    def try_many_texts(self):
        return self.translate([f"Sentence number {i} is a rather long one, and nobody waits for it."
                               for i in range(self.some(1000))])

    def try_large_text(self):
        return self.translate(" ".join(itertools.islice(itertools.cycle(SENTENCES), self.some(30000))))

    def try_large_words(self):
        return self.translate(self.pick.choice(["a", "ab,", "1", "x y "]) * self.some(300000))

    def try_large_detection(self):
        text = json.dumps({"q": self.pick.choice(TRIGGERS) * self.some(100000)}).encode()
        return self.ask(self.post(text, "/detect"))

    def try_abandoned(self):
        body = json.dumps({"q": SENTENCES * self.some(100), "source": "en", "target": "de",
                           "stream": self.pick.random() < 0.5}).encode()
        return self.leave(self.post(body), self.pick.random() * 2)

    def try_deaf(self):
        body = json.dumps({"q": ["1" * 300] * self.some(900), "source": "en", "target": "de", "stream": True}).encode()
        return self.leave(self.post(body), 5)

    def try_unfinished(self):
        return self.leave(self.post(b"{" + b" " * self.some(900000))[:-1], self.pick.random() * 5)

    def try_two_readings(self):
        body = b'{"q":"It rains.","source":"en","target":"de"}'
        length = f"Content-Length: {len(body)}\r\n"
        more = self.pick.choice([length, "Content-Length: 3\r\n", "Transfer-Encoding: chunked\r\n", "Host: y\r\n",
                                 "Content-Length : 3\r\n", "Transfer-Encoding: gzip, chunked\r\n"])
        status = self.ask(self.post(body, more=more))
        return status if status in (400, "closed") else f"{status} for {more!r}"

    def try_no_http(self):
        return self.ask(self.pick.choice([b"\0" * 5000, b"GET / HTTP/9\r\n\r\n", b"A" * 200000, b"\r\n" * 50000,
                                          b"GET " + b"/" * 60000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                                          b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 20000 + b"\r\n"]))

    def try_no_json(self):
        n = self.some(900000)
        return self.ask(self.post(self.pick.choice([
            b"[" * n, b'{"a":' * (n // 5), b'{"q":"One.\0Two.","target":"de"}', b'{"q":"a","target":"de"}x',
            b"\xff" * n,
            b'{"q":"' + b"\\u0000" * (n // 6) + b'","target":"de"}', b'{"q":["' + b"\\" * n, b'{"q":"a",' * (n // 9),
            b'{' + b'"x":1,' * (n // 6) + b'"q":"a","target":"de"}', b'{"q":"\\ud800","target":"de"}', b"\0" * n])))

    def try_parts(self):
        part = b'--xx\r\nContent-Disposition: form-data; name="q"\r\n\r\na\r\n'
        body = part * (self.some(900000) // len(part)) + b"--xx--\r\n"
        return self.ask(self.post(body, kind="multipart/form-data; boundary=xx"))

    def try_addresses(self):
        path = self.pick.choice(["/languages", "/metrics", "/health", "/", "/nowhere", "/translate?q=" + "a+" * 10000,
                                 "/frontend/settings", "/%00%ff", "/translate"])
        method = self.pick.choice(["GET", "GET", "PUT", "OPTIONS", "HEAD", "X" * 3000])
        return self.ask(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())

    def run(self):
        while not self.over.is_set():
            kind = self.pick.choice(self.kinds)
            try:
                status = getattr(self, kind)()
            except OSError:
                status = "closed"
            if not self.over.is_set():
                self.seen[kind[4:], status] += 1

    def hold(self):
        """Hold as many connections as possible; send a byte through some of them now and then."""
        held = collections.deque()
        while not self.over.is_set():
            with contextlib.suppress(OSError):
                raw = self.connect()
                raw.setblocking(False)
                held.append(raw)
                if len(held) % 3:
                    raw.send(b"POST /translate HTTP/1.1\r\nHost: x\r\nX: ")
                if len(held) % 3 == 2:
                    raw.send(b"y\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{" + b" " * 40000)
            if len(held) > self.some(300) + 10:
                held.popleft().close()
            for raw in list(held)[:: max(1, len(held) // 20)]:
                with contextlib.suppress(OSError):
                    raw.send(b" ")
            self.over.wait(0.02)
        for raw in held:
            raw.close()


def attack(port, size, seed, over, results):
    """Run all attackers in a separate process, so that they do not slow down the canary's client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    attackers = [Attacker(number, port, size, seed) for number in range(ATTACKERS + HOLDERS)]
    threads = [threading.Thread(target=x.run if number < ATTACKERS else x.hold, daemon=True)
               for number, x in enumerate(attackers)]
    for thread in threads:
        thread.start()
    over.wait()
    for attacker in attackers:
        attacker.over.set()
    results.put(sum((x.seen for x in attackers), collections.Counter()))


class Canary:
    """A client that requests a sentence four times per second and compares it with moe-translate's output."""

    def __init__(self, port, wanted):
        self.port, self.wanted, self.seconds, self.wrong = port, wanted, [], []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def ask(self, connection, text):
        body = json.dumps({"q": text, "source": "en", "target": "de"})
        connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()

    def run(self):
        connection = None
        for i, (text, wanted) in enumerate(itertools.cycle(self.wanted.items())):
            if self.over.wait(0.25):
                return
            begin = time.monotonic()
            try:
                if not connection or i % 5 == 0:  # reconnect even while attackers hold connections
                    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
                got = self.ask(connection, text)
            except (OSError, http.client.HTTPException) as error:
                got, connection = repr(error), None
            self.seconds.append(time.monotonic() - begin)
            if got != (200, json.dumps({"translatedText": wanted}, ensure_ascii=False, separators=(",", ":")) + "\n"):
                self.wrong.append(f"{text!r} after {self.seconds[-1]:.1f} s: {got}"[:300])

    def end(self):
        self.over.set()
        self.thread.join()


class Abuse:
    """A server under abuse and the measurements: times, errors, statuses of attackers, memory, and the exit."""

    def __init__(self, seconds, size=1.0, seed=1, settings=(), options=()):
        more = [x for setting in settings for x in ("--set", setting)]
        self.process, self.port = self.start([*more, *options])
        self.wanted = dict(zip(SENTENCES, self.translations([f"--{x}" for x in settings]), strict=True))
        warm = Attacker(0, self.port, size, seed)
        warm.translate(SENTENCES * 60)  # fill a batch and read most of the model file
        warm.translate([f"{text} She saw {text} and {text * 9}, but not me." for text in (*TRIGGERS, *TAGS)])
        self.before = resident(self.process.pid)
        over, results, attackers = self.attack(size, seed)
        canary = Canary(self.port, self.wanted)
        time.sleep(seconds)
        self.most = resident(self.process.pid)
        canary.end()
        over.set()
        self.seen = results.get()
        attackers.join(10)
        attackers.kill()
        self.seconds, self.wrong = sorted(canary.seconds), canary.wrong

    def start(self, options):
        command = [BIN / "moe-server", "-m", MODEL, "--port", "0", "--grace", str(GRACE), *options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/", line):
                return process, int(found[1])
        raise SystemExit("the server did not start")

    def translations(self, options):
        command = [BIN / "moe-translate", "-q", "-m", MODEL, "-s", "en", "-t", "de", *options]
        text = "".join(x + "\n" for x in SENTENCES)
        return subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()

    def attack(self, size, seed):
        over, results = multiprocessing.Event(), multiprocessing.Queue()
        process = multiprocessing.Process(target=attack, args=(self.port, size, seed, over, results), daemon=True)
        process.start()
        return over, results, process

    def memory_after(self, quiet=QUIET):
        """Wait until the attackers' requests are done or dropped; return the server's memory in MiB."""
        time.sleep(quiet)
        return resident(self.process.pid)

    def end(self, size=1.0):
        """Send SIGTERM under abuse; return (seconds until the server exits, exit status)."""
        over, _, attackers = self.attack(size, 2)
        time.sleep(5)
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        seconds = time.monotonic() - begin
        over.set()
        attackers.join(10)
        attackers.kill()
        self.process.stderr.close()
        return seconds, status

    def percentile(self, part):
        return self.seconds[min(len(self.seconds) - 1, int(part * len(self.seconds)))]

    def unfit(self):
        """Return how often each kind of abuse got an unexpected status."""
        return {f"{kind}: {status}": n for (kind, status), n in self.seen.items() if status not in FINE}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="how long (600)")
    parser.add_argument("--size", type=float, default=1, help="size of the requests (1: a megabyte)")
    parser.add_argument("--seed", type=int, default=1, help="of the attackers' choices")
    parser.add_argument("--set", action="append", default=[], metavar="X=Y", help="a setting for moe-server")
    options = parser.parse_args()
    abuse = Abuse(options.seconds, options.size, options.seed, options.set)
    after = abuse.memory_after()
    seconds, status = abuse.end(options.size)
    print(f"canary: {len(abuse.seconds)} answers, {len(abuse.wrong)} wrong or refused; ms: p50 "
          f"{1000 * abuse.percentile(.5):.0f}, p90 {1000 * abuse.percentile(.9):.0f}, p99 "
          f"{1000 * abuse.percentile(.99):.0f}, longest {1000 * abuse.seconds[-1]:.0f}")
    for line in abuse.wrong[:10]:
        print("    " + line)
    print(f"attackers: {sum(abuse.seen.values())} requests")
    for kind in sorted({kind for kind, _ in abuse.seen}):
        told = {str(status): n for (name, status), n in abuse.seen.items() if name == kind}
        print(f"    {kind}: " + ", ".join(f"{status} {n}" for status, n in sorted(told.items())))
    print(f"resident MiB: {abuse.before:.1f} before, {abuse.most:.1f} during, {after:.1f} {QUIET} s after it")
    print(f"SIGTERM under abuse: {seconds:.1f} s, exit status {status}")
    problems = {"canary": abuse.wrong, "p99": abuse.percentile(.99) >= 2, "memory": after > 1.1 * abuse.before,
                "attackers": abuse.unfit(), "end": status or seconds > GRACE + 2}
    failed = [name for name, problem in problems.items() if problem]
    print("failed: " + ", ".join(failed) if failed else "passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
