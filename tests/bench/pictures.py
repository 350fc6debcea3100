#!/usr/bin/env python3
"""Create the pictures in the documentation: the server's page, a page of experts, and a plot of speeds.

    tests/python tests/bench/pictures.py      # after make; requires chromium on PATH

The pages are screenshots of moe-server and moe-routing. Speeds are from the
tables of tests/bench/README.md, which name the machine and the commands.
"""
import http.server
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from html import escape

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "models", "en-de-fr-es.bin")
TEXT = "She has been reading since this morning. Where is my book?"
POINT = "Morgen"  # the word of the translation at which the mouse points
# A script that moves the mouse once the translation has arrived.
POINTING = """<script>new MutationObserver((list, self) => {
  const word = [...document.querySelectorAll("#out .word")].find(x => x.textContent === "%s");
  if (word) { self.disconnect(); document.activeElement.blur(); setTimeout(() => {
    document.getElementById("state").textContent = ""; // virtual time shows no duration
    word.onmouseenter();
  }, 200); }
}).observe(document.getElementById("out"), { childList: true });</script>"""
SCROLLING = """<script>setTimeout(() => {
  const search = document.querySelector("input[type=search]");
  search.value = "#3"; // an expert that prefers the first person and negations
  search.dispatchEvent(new Event("input"));
  const part = [...document.querySelectorAll("h2")].find(x => x.textContent.startsWith("What each"));
  document.querySelector("main").style.marginTop = 55 - part.getBoundingClientRect().top + "px";
}, 500);</script>"""
PHRASES = os.path.join(ROOT, "tests", "train", "phrasebook.tsv")


def program(name):
    return os.path.join(ROOT, os.environ.get("BIN", "."), name)


def photograph(address, path, width, height, *more):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--lang=en",
                        "--user-data-dir=" + folder, "--virtual-time-budget=20000", "--screenshot=" + path,
                        "--window-size=%d,%d" % (width, height), *more, address],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    size = os.path.getsize(path)
    print("%s: %d bytes" % (os.path.relpath(path, ROOT), size))
    if size > 100_000:
        sys.exit("larger than 100 KB")


class Between(http.server.BaseHTTPRequestHandler):
    """A proxy of moe-server that adds POINTING to the page."""

    def do_GET(self, body=None):
        asked = urllib.request.Request(self.server.behind + self.path, body,
                                       {"Content-Type": self.headers.get("Content-Type") or "text/plain"})
        try:
            with urllib.request.urlopen(asked) as reply:
                data, kind = reply.read(), reply.headers["Content-Type"]
        except urllib.error.HTTPError:
            return self.send_error(404)
        if self.path == "/":
            data = data.replace(b"</body>", (POINTING % POINT).encode() + b"</body>")
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        self.do_GET(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, *words):
        pass


def server_page():
    """Take a screenshot of moe-server's page with the mouse on a word of the translation."""
    with subprocess.Popen([program("moe-server"), "-m", MODEL, "--port", "0"], stderr=subprocess.PIPE, text=True) as it:
        try:
            between = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Between)
            between.behind = re.search(r"(http://[^ ]*\d)/", it.stderr.readline())[1]
            threading.Thread(target=between.serve_forever, daemon=True).start()
            wishes = urllib.parse.urlencode({"source": "en", "target": "de", "experts": 1, "q": TEXT})
            photograph("http://127.0.0.1:%d/#%s" % (between.server_port, wishes),
                       os.path.join(ROOT, "tools/server/page.png"), 920, 670)
            between.shutdown()
        finally:
            it.terminate()


def page_of_experts():
    """Take a screenshot of moe-routing's page about the English sentences of the phrasebook."""
    with open(PHRASES, encoding="utf-8") as file:
        lines = "".join(x.split("\t")[2] + "\n" for x in file if x.split("\t")[1] == "en")
    with tempfile.TemporaryDirectory() as folder:
        routing, page = folder + "/routing.jsonl", folder + "/page.html"
        subprocess.run([program("moe-translate"), "-q", "-m", MODEL, "-s", "en", "-t", "de", "--routing", routing],
                       input=lines.encode(), check=True, stdout=subprocess.DEVNULL)
        subprocess.run([program("moe-routing"), routing, "-o", page], check=True, stdout=subprocess.DEVNULL)
        with open(page, "a", encoding="utf-8") as file:
            file.write(SCROLLING)
        photograph("file://" + page, os.path.join(ROOT, "tools/programs/experts.png"), 920, 670)


def speeds():
    """Read [(network, batch, moe, CTranslate2)] from the table in tests/bench/README.md that compares equal weights."""
    with open(os.path.join(ROOT, "tests/bench/README.md"), encoding="utf-8") as file:
        text = file.read().split("## Transformers: the same network")[1].split("\n## ")[0]
    found, network = [], ""
    for cells in re.findall(r"^\| (.*) \|$", text, re.M):
        cells = [x.strip() for x in cells.split("|")]
        network = cells[0] or network
        if len(cells) == 9 and cells[2].isdigit() and not cells[1].isdigit() and "real" not in cells[1]:
            found.append((network, int(cells[2]), int(cells[3]), int(cells[4])))
    machine = re.search(r"Two cores[^(]*", text)[0].strip()
    version, day = re.search(r"CTranslate2 is ([\d.]+)", text)[1], re.search(r"(\d{4}-\d\d-\d\d), commit", text)[1]
    return found, "%s, beam 4, CTranslate2 %s, %s" % (machine[0].lower() + machine[1:], version, day)


def drawn():
    """Return the plot as SVG: tokens per second of both engines. Each network has its own scale."""
    rows, about = speeds()
    networks = list(dict.fromkeys(row[0] for row in rows))
    half, bottom, high = 400, 262, 175
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 320" width="820" height="320" '
           'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
           '<title>Speed compared with CTranslate2</title>',
           '<rect width="820" height="320" rx="8" fill="#fdfdfb"/>']

    def say(x, y, text, anchor="middle", fill="#1c1c1a", more=""):
        out.append('<text x="%g" y="%g" text-anchor="%s" fill="%s"%s>%s</text>' % (x, y, anchor, fill, more,
                                                                                 escape(text)))

    say(24, 30, "Target tokens a second, the same weights in 8 bits", "start", more=' font-size="16" font-weight="600"')
    for x, colour, name in (560, "#1f5f8b", "moe"), (630, "#c9c7bd", "CTranslate2"):
        out.append('<rect x="%d" y="19" width="13" height="13" rx="2" fill="%s"/>' % (x, colour))
        say(x + 19, 30, name, "start")
    for i, network in enumerate(networks):
        mine = [row for row in rows if row[0] == network]
        most, left = max(max(row[2:]) for row in mine), 24 + i * half
        say(left, 58, network, "start", "#63635d")
        out.append('<path d="M%d %d H%d" stroke="#63635d"/>' % (left, bottom, left + half - 30))
        for k, (_, batch, ours, theirs) in enumerate(mine):
            x = left + 8 + k * (half - 30) / len(mine)
            for at, value, colour in (x, ours, "#1f5f8b"), (x + 40, theirs, "#c9c7bd"):
                tall = high * value / most
                out.append('<rect x="%g" y="%.1f" width="36" height="%.1f" rx="2" fill="%s"/>'
                           % (at, bottom - tall, tall, colour))
                say(at + 18, bottom - tall - 5, str(value), more=' font-size="12"')
            say(x + 38, bottom + 18, ("batch " if k == 0 else "") + str(batch))
    say(24, 306, "25 + 25 tokens; " + about + "; commands: tests/bench/README.md", "start", "#63635d",
        ' font-size="12"')
    return "\n".join(out) + "\n</svg>\n"


if __name__ == "__main__":
    print(subprocess.run([program("moe-translate"), "--version"], capture_output=True, text=True).stdout.strip())
    with open(os.path.join(ROOT, "tests/bench/speed.svg"), "w", encoding="utf-8") as plot:
        plot.write(drawn())
    server_page()
    page_of_experts()
