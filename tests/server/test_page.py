#!/usr/bin/env python3
"""The web page of moe-server in a browser: typing, reading and copying.

Usage: tests/python tests/server/test_page.py      (BIN is the folder of the programs)

The browser is headless Chromium, controlled with the DevTools protocol over a pipe. Prints `ok NAME` or `FAIL NAME` per
test and a closing line `N passed, N failed`.
"""

import contextlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from suite import Suite
from test_server import serving

test = Suite()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
page_test = test.needs(CHROMIUM, "Chromium")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--remote-debugging-pipe", "--host-resolver-rules=MAP *.test 127.0.0.1"]


class Browser:
    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        to_read, self.out = os.pipe()
        self.inside, to_write = os.pipe()
        command = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", CHROMIUM, *FLAGS,
                   f"--user-data-dir={self.folder.name}", "about:blank"]
        self.process = subprocess.Popen(command, pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.read, self.number = b"", 0

    def call(self, method, session=None, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.read:
                more = os.read(self.inside, 65536)
                assert more, "the browser is gone"
                self.read += more
            answer, self.read = self.read.split(b"\0", 1)
            answer = json.loads(answer)
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def close(self):
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        self.process.wait(20)
        os.close(self.out)
        os.close(self.inside)
        with contextlib.suppress(OSError):
            self.folder.cleanup()


class Page:
    def __init__(self, browser, url):
        self.browser = browser
        self.target = browser.call("Target.createTarget", url=url)["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        browser.call("Emulation.setFocusEmulationEnabled", self.session, enabled=True)

    def run(self, script):
        """Return the value of a JavaScript expression, or of the promise that it returns."""
        got = self.browser.call("Runtime.evaluate", self.session, expression=script, awaitPromise=True,
                                returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in got, (script, got["exceptionDetails"])
        return got["result"].get("value")

    def wait(self, script, seconds=30):
        end = time.monotonic() + seconds
        while not (value := self.run_here(script)):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.05)
        return value

    def run_here(self, script):
        """Return the value of an expression, or None if another page is being loaded."""
        try:
            return self.run(script)
        except AssertionError as error:
            if "navigated" not in str(error):
                raise
            return None

    def type(self, text):
        self.run(f"say(''); input.value = {json.dumps(text)}; input.oninput()")

    def translated(self, text):
        """Type a text; return the translation that the page shows."""
        self.type(text)
        self.wait("plain && $('state').textContent.endsWith(' ms')")
        return self.run("out.textContent")

    def close(self):
        self.browser.call("Target.closeTarget", targetId=self.target)


@contextlib.contextmanager
def browsing():
    browser = Browser()
    try:
        yield browser
    finally:
        browser.close()


@contextlib.contextmanager
def page_of(browser, server, host="127.0.0.1", behind=""):
    page = Page(browser, f"http://{host}:{server.port}/{behind}")
    try:
        page.wait("typeof ready === 'boolean' && ready")
        yield page
    finally:
        page.close()


class Pretender(http.server.BaseHTTPRequestHandler):
    """Serve the page of a moe-server, but answer its requests as the test chooses."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        status, text = self.server.real.ask(self.path)
        self.send(status, text if isinstance(text, str) else json.dumps(text))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.answer:
            self.send(*self.server.answer)
        else:
            self.close_connection = True  # like a crashed server

    def send(self, status, text):
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if text.startswith("<") else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def pretending(real):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pretender)
    server.real, server.port, server.daemon_threads = real, server.server_port, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@page_test
def a_text_is_translated_and_copied():
    with serving("--server-name", "moe.test") as server, browsing() as browser:
        browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        with page_of(browser, server) as page, page_of(browser, server, "moe.test") as plain:
            assert page.run("isSecureContext") and not plain.run("isSecureContext || !!navigator.clipboard")
            for at, text, wanted in ((page, "It rains.", "Es regnet."),
                                     (plain, "Where is my book?\n\nIt rains.", "Wo ist mein Buch?\n\nEs regnet.")):
                at.run("source.value = 'en'; target.value = 'de'")
                assert at.translated(text) == wanted  # the text has no invisible characters
                at.run("$('copy').click()")
                at.wait("state.textContent === 'Copied.' && !state.className")
                assert page.run("navigator.clipboard.readText()") == wanted
            assert plain.run("[input.value, `${getSelection()}`]") == ["Where is my book?\n\nIt rains.", ""]


@page_test
def a_translation_grows_with_the_text():
    words = "The contract was signed yesterday in Lisbon by both".split()
    with serving() as server, browsing() as browser, page_of(browser, server) as page:
        page.run("source.value = 'en'; target.value = 'de'")
        for n in range(1, len(words) + 1):  # without the timer that translates the whole text
            page.run(f"input.value = {json.dumps(' '.join(words[:n]))}; input.oninput(); clearTimeout(timer)")
        page.wait("out.textContent.startsWith('Der Vertrag') && !busy && session.length === 32")
        page.run("session = '0'.repeat(32)")  # a session that has ended
        assert page.translated("It rains.") == "Es regnet."
        page.run("input.value = 'It rains. It rains.'; input.oninput(); clearTimeout(timer)")
        page.wait("!busy && !session")
        page.run("input.value = 'It rains. It rains. It'; input.oninput(); clearTimeout(timer)")
        page.wait("out.textContent.startsWith('Es regnet. Es regnet.') && session.length === 32")


@page_test
def swap_uses_the_detected_language():
    with serving() as server, browsing() as browser, page_of(browser, server) as page:
        page.run("source.value = 'auto'; target.value = 'en'")
        german = "Wo ist mein Buch geblieben?"
        english = page.translated(german)
        page.run("$('swap').click()")
        page.wait("state.textContent.endsWith(' ms') && plain && out.textContent !== " + json.dumps(english))
        assert page.run("[source.value, target.value]") == ["en", "de"] and page.run("input.value") == english
        page.run("$('swap').click()")
        assert page.run("[source.value, target.value]") == ["de", "en"]
        page.run("source.value = 'auto'; target.value = 'fr'; plain = detected = ''; $('swap').click()")
        assert page.run("source.value") == "fr" and page.run("target.value") in ("en", "de", "es")
        page.run("source.value = 'auto'; target.value = 'fr'; detected = 'fr'; $('swap').click()")
        assert page.run("source.value !== target.value")


@page_test
def the_page_asks_for_the_key_and_keeps_it():
    with tempfile.NamedTemporaryFile("w") as keys, browsing() as browser:
        keys.write("right\n")
        keys.flush()
        with serving() as server, page_of(browser, server) as page:
            assert page.run("$('keys').hidden && getComputedStyle($('keys')).display === 'none'")
        with serving("--api-keys", keys.name) as server, page_of(browser, server) as page:
            page.run("source.value = 'en'; target.value = 'de'; input.focus()")
            assert not page.run("$('keys').hidden")
            page.type("It rains.")
            assert page.wait("state.className && state.textContent").startswith("This server needs an API key")
            assert page.run("document.activeElement.id") == "in"  # the input keeps the focus
            page.run("key.value = 'wrong'; key.onchange()")
            page.wait("state.textContent.includes('does not know this API key')")
            page.run("key.value = 'right'; key.onchange()")
            page.wait("out.textContent === 'Es regnet.' && !state.className && $('again').hidden")
            page.run("location.reload()")
            time.sleep(0.3)
            page.wait("typeof ready === 'boolean' && ready")
            assert page.run("key.value") == "right" and page.run("sessionStorage.getItem('moe-key')") == "right"
            assert page.run("Object.values(localStorage).join().includes('right')") is False


@page_test
def errors_are_shown_above_the_text():
    with serving() as real, pretending(real) as server, browsing() as browser, page_of(browser, server) as page:
        for answer, words in (
            ((413, '{"error":"the request is too large"}'), ("too much at once", "1048,000 characters", "a part")),
            ((429, '{"error":"too many texts are waiting; try again"}'), ("Too many requests", "wait a minute")),
            ((456, '{"error":"quota"}'), ("Too many requests",)),
            ((504, '{"error":"the request took too long; send smaller requests"}'), ("too long", "shorter part")),
            ((400, '{"error":"xx is not supported"}'), ("cannot translate this: xx is not supported.",)),
            ((500, '{"error":"the translator failed"}'), ("has a problem", "still here")),
            ((503, '{"error":"the server is shutting down"}'), ("being restarted", "still here")),
            ((502, "<html>Bad Gateway</html>"), ("has a problem", "still here")),
            ((200, "<html>Log in</html>"), ("has a problem",)),
        ):
            server.answer = answer
            page.type("It rains." + answer[1])
            shown = page.wait("state.className && state.textContent")
            assert all(word in shown for word in words), (answer, shown)
            assert page.run("!$('again').hidden && input.value.startsWith('It rains.')")
            above = "$('state').getBoundingClientRect().bottom <= out.getBoundingClientRect().top + 1"
            assert page.run(above + " && $('state').getBoundingClientRect().top < innerHeight / 2")
            server.answer = 200, '{"translatedText":"Es regnet.","alternatives":[]}'
            page.run("$('again').click()")
            page.wait("out.textContent === 'Es regnet.' && !state.className && $('again').hidden")
        server.answer = None
        page.type("It rains again.")
        assert "cannot be reached" in page.wait("state.className && state.textContent")


@page_test
def long_alternatives_are_folded():
    first = "Der Hund sah das große Haus am Fluss. " * 40
    other = first[:760] + "Eine Katze sah es auch. " + first[760:]
    third = "Etwas ganz anderes steht hier. " * 40
    short = {"translatedText": "Es regnet.", "alternatives": ["Es regnet.", "Es regnete.", "", "Es regnete."]}
    with serving() as real, pretending(real) as server, browsing() as browser, page_of(browser, server) as page:
        server.answer = 200, json.dumps(short)
        assert page.translated("It rains.") == "Es regnet."
        assert page.run("[...$('others').children].map(x => x.innerText)") == ["Es regnete."]
        page.run("$('others').querySelector('button').click()")
        assert page.run("[out.textContent, plain, $('others').innerText]") == ["Es regnete."] * 2 + ["Es regnet."]
        server.answer = 200, json.dumps({"translatedText": first, "alternatives": [other, third]})
        page.type("x")
        page.wait("plain.length > 1000 && state.textContent.endsWith(' ms')")
        assert page.run("$('others').getBoundingClientRect().height < 150")
        shown = page.run("[...document.querySelectorAll('#others summary')].map(x => x.textContent)")
        assert len(shown) == 2 and "Eine Katze sah es auch." in shown[0] and len(shown[0]) < 200, shown
        assert shown[1].startswith("Etwas ganz anderes") and len(shown[1]) < 200 and shown[1].endswith(" …")
        page.run("document.querySelector('#others summary').click(); $('others').querySelector('button').click()")
        assert page.run("[out.textContent, $('others').querySelector('button').textContent]") == [other, first]


@page_test
def right_to_left_text_is_right_aligned():
    with serving() as real, pretending(real) as server, browsing() as browser, page_of(browser, server) as page:
        direction = "x => getComputedStyle(x).direction"
        server.answer = 200, json.dumps({"translatedText": "أين كتابي؟", "alternatives": ["كتاب"]})
        page.translated("Where is my book?")
        assert page.run(f"[input, out, mirror, $('others').querySelector('button')].map({direction})") == [
            "ltr", "rtl", "ltr", "rtl"]
        server.answer = 200, json.dumps({"translatedText": "Where is my book?", "alternatives": []})
        page.translated("أين كتابي؟")
        assert page.run(f"[input, out, mirror].map({direction})") == ["rtl", "ltr", "rtl"]


@page_test
def aligned_words_are_highlighted():
    with serving() as server, browsing() as browser, page_of(browser, server) as page:
        page.run("source.value = 'en'; target.value = 'de'")
        assert page.translated("Where is my book?") == "Wo ist mein Buch?"
        page.run("[...out.querySelectorAll('.word')].find(x => x.textContent === 'Buch?').onmouseenter()")
        assert page.run("[...mirror.querySelectorAll('.on')].map(x => x.textContent)") == ["book?"]
        assert page.run("mirror.textContent") == "Where is my book?"
        page.run("$('experts').click()")
        page.wait("!$('routing').hidden && !!$('routing').querySelector('.chip')")
        page.type(" ")
        page.wait("out.textContent === '' && $('routing').hidden")


@page_test
def doubtful_lines_are_underlined():
    doubtful = "Colourless green ideas sleep furiously quodlibet."
    text = f"Where is my book?\n\nThe dog sleeps. It rains.\n{doubtful}\n🏠 It rains."
    with serving() as server, browsing() as browser, page_of(browser, server) as page:
        page.run("source.value = 'en'; target.value = 'de'")
        legend = "$('legend').textContent"
        shown = page.translated(text)
        wanted = server.translate(doubtful, details=True)[1]
        low = wanted["details"]["confidence"]
        assert low < 0.5 and shown == server.translate(text)[1]["translatedText"]
        percent = f"{round(100 * low)} %"
        marks = "[...out.querySelectorAll('.doubt')].map(x => [x.textContent, x.title])"
        assert page.run(marks) == [[wanted["translatedText"], f"{percent} likely to be right"]], page.run(marks)
        assert page.run("getComputedStyle(out.querySelector('.doubt')).textDecorationStyle") == "wavy"
        assert page.run(legend) == f"Underlined: less than 50 % likely to be right (line 4: {percent}).", page.run(legend)
        assert page.run("out.style.borderInlineStart") == ""
        page.run("[...out.querySelectorAll('.doubt .word')][0].onmouseenter()")  # words of marked lines remain linked
        assert page.run("mirror.querySelectorAll('.on').length") == 1
        page.run("$('others').querySelector('button').click()")  # an alternative, whose confidence is unknown
        assert page.run(f"{legend} + out.querySelectorAll('.doubt').length") == "0"
        assert page.translated("It rains. It rains.") == "Es regnet. Es regnet."
        assert page.run(f"{legend} + out.querySelectorAll('.doubt').length") == "0"
        assert page.translated(doubtful) == wanted["translatedText"]  # one line has a coloured edge
        assert page.run(f"{legend} + out.title") == f"{percent} likely to be right"
        assert page.run("out.style.borderInlineStart").startswith("0.3rem solid")
        with pretending(server) as without, page_of(browser, without) as other:  # a model without a table
            details = {"score": -1, "alignment": []}
            without.answer = 200, json.dumps({"translatedText": "a\nb", "alternatives": [], "details": details})
            assert other.translated("It rains.\nIt rains.") == "a\nb"
            assert other.run(f"{legend} + out.title + out.style.borderInlineStart") == ""


# ---- Other pages ----

SEND = """(async () => {
  const text = {q: "It rains.", source: "en", target: "de"}, json = JSON.stringify(text), found = [];
  const post = (body, type, mode) => ({method: "POST", body, mode, headers: type ? {"Content-Type": type} : {}});
  for (const [path, options] of [
    ["/metrics", {}], ["/languages", {}], ["/translate", post(json, "application/json", "cors")],
    ["/translate", post(json, "text/plain", "no-cors")], ["/translate", post(new URLSearchParams(text), "", "no-cors")],
    ["/v1/chat/completions", post(new Blob([json]), "", "no-cors")], ["/metrics", {mode: "no-cors"}],
    ["/v1/chat/completions", post(json, "text/plain", "cors")], ["/ready", {mode: "no-cors"}]])
    try {
      const reply = await fetch(BASE + path, options);
      found.push([reply.status, await reply.text()]);
    } catch (problem) { found.push([0, ""]); }
  navigator.sendBeacon(BASE + "/translate", new URLSearchParams(text));
  const form = document.createElement("form"), frame = document.createElement("iframe");
  form.method = "post"; form.action = BASE + "/translate"; form.target = frame.name = "inside";
  for (const name in text) form.append(Object.assign(document.createElement("input"), {name, value: text[name]}));
  document.body.append(frame, form);
  await new Promise(resolve => { frame.onload = resolve; form.submit(); });
  for (const element of ["iframe", "embed", "object", "script", "img"]) {
    const given = document.createElement(element), url = BASE + "/#q=It rains.&source=en&target=de";
    await new Promise(resolve => {
      given.onload = given.onerror = resolve;
      given[element === "object" ? "data" : "src"] = url;
      document.body.append(given);
    });
  }
  return found;
})()"""


@contextlib.contextmanager
def foreign():
    """Serve an empty page; yield its port."""
    class Empty(Pretender):
        def do_GET(self):
            self.send(200, "<html><body></body></html>")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def texts_of(server):
    return int(server.ask("/metrics")[1].split("\nmoe_texts_total ")[1].split()[0])


@page_test
def pages_of_other_origins_get_nothing_and_start_nothing():
    with foreign() as port, browsing() as browser:
        origin = f"http://evil.test:{port}"
        for allowed in False, True:
            with serving(*(["--allow-origin", origin] if allowed else [])) as server:
                page = Page(browser, f"{origin}/")
                page.wait("location.port && document.readyState === 'complete'")
                found = page.run(SEND.replace("BASE", f"'http://127.0.0.1:{server.port}'"))
                page.close()
                if allowed:
                    assert found[2] == [200, '{"translatedText":"Es regnet."}\n'] and texts_of(server) >= 3, found
                else:
                    assert found == [[0, ""]] * len(found) and texts_of(server) == 0, found


@page_test
def a_link_of_another_origin_starts_nothing():
    text = "#q=It rains.&source=en&target=de"
    with foreign() as port, browsing() as browser:
        for policy in "origin", "no-referrer":  # the server knows from Sec-Fetch-Site, the page from the referrer
            with serving() as server:
                base = f"http://127.0.0.1:{server.port}/"
                page = Page(browser, f"http://evil.test:{port}/")
                page.wait("location.port && document.readyState === 'complete'")
                page.run(f"document.head.innerHTML = '<meta name=referrer content={policy}>';"
                         f"setTimeout(() => location = '{base}{text}'); 0")
                page.wait(f"location.href.startsWith('{base}') && typeof ready === 'boolean' && ready")
                said = page.wait("state.textContent")
                assert "another page" in said and page.run("input.value") == "It rains.", said
                time.sleep(1)
                assert texts_of(server) == 0
                assert page.translated("It rains.") == "Es regnet."
                page.close()
                with page_of(browser, server, behind=text) as own:  # a URL that the user typed
                    own.wait("out.textContent === 'Es regnet.'")


@page_test
def a_rebound_name_gets_nothing_and_starts_nothing():
    with serving() as server, browsing() as browser:
        for host in "evil.test", "localhost.evil.test", "127.0.0.1.evil.test":
            page = Page(browser, f"http://{host}:{server.port}/")
            assert "--server-name" in page.wait("location.port && document.body && document.body.innerText")
            found = page.run(SEND.replace("BASE", "''"))
            page.close()
            assert {x[0] for x in found} <= {0, 421} and not any("regnet" in x[1] for x in found), found
        assert texts_of(server) == 0
        with page_of(browser, server) as page:
            assert page.translated("It rains.") == "Es regnet."


if __name__ == "__main__":
    sys.exit(test.run(sys.argv[1] if len(sys.argv) > 1 else ""))
