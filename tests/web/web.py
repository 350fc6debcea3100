#!/usr/bin/env python3
"""Test moe-web, the page and the module that translate in WebAssembly, in node and in headless Chromium.

Usage: tests/python tests/web/web.py [NAME]    (make test-web; requires make web and tests/cross' en-pt.bin)
"""
import base64
import contextlib
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "tests"), os.path.join(ROOT, "tests/cross"), os.path.join(ROOT, "tests/server")]
from suite import Suite  # noqa: E402
from targets import EN_PT, SHIPPED, check, output, sentences  # noqa: E402
from test_page import CHROMIUM, Page, browsing  # noqa: E402

WEB = "build/dist/moe-web"
FUZZ = "build/cross/fuzz-seeds"
BUILD, BIN = os.environ.get("BUILD", "build"), os.environ.get("BIN", ".")
NODE = ["node", "--no-incremental-marking", "tests/web/translate.mjs", WEB + "/moe.mjs"]  # see tests/cross/targets.py
test = Suite()
page_test = test.needs(CHROMIUM, "Chromium")


def node(*tasks):
    """Return the results of tasks of translate.mjs."""
    run = subprocess.run(NODE, input="".join(json.dumps(task) + "\n" for task in tasks), cwd=ROOT, capture_output=True,
                         encoding="utf-8", timeout=1200)
    assert run.returncode == 0, (run.returncode, run.stderr[-1000:])
    return [json.loads(line) for line in run.stdout.splitlines()]


def native(text, *options):
    return output([os.path.join(BIN, "moe-translate"), "-q", *options], text + "\n")


# ---- Module ----

@test
def same_texts_as_everywhere():
    for case, model in ("README text", SHIPPED), ("en-pt text", EN_PT):
        texts = [(text, {} if target == "-" else {"to": target}) for target, _, text in sentences(model)]
        texts.sort(key=lambda x: [row[0] for row in sentences(model)].index(x[1].get("to", "-")))
        results, = node({"model": model, "texts": texts})
        check(case, results)


@test
def long_texts_and_options():
    text = "The weather is beautiful today.\n\n  Where is my book? I have lost it.\r\nGood morning!\n"
    results, = node({"model": SHIPPED, "options": {"to": "de"}, "texts": [
        [text, {}], [text, {"beam": 4}], [text, {"to": "fr", "maxLenOffset": 3}], ["", {}], [" \n ", {}],
        ["Where is my book?", {"to": "es", "from": "en"}], ["Where is my book?", {"to": "fr", "protect": False}]]})
    path = ["-m", SHIPPED, "-t"]
    for result, more in (results[0], ["de"]), (results[1], ["de", "--beam", "4"]):
        assert [x.rstrip() for x in result.split("\n")][:4] == native(text[:-1], *path, *more), (result, more)
    assert results[3] == "" and results[4] == " \n ", results
    assert all(isinstance(x, str) for x in results), results


@test
def wrong_uses_are_errors():
    (unknown, value, model, language, semicolon, cancelled, good), (at_open,) = node(
        {"model": SHIPPED, "options": {"to": "de"}, "texts": [
            ["a", {"beams": 4}], ["a", {"beam": 1000}], ["a", {"verify": 1}], ["a", {"to": "xx"}],
            ["a", {"to": "de;beam=2"}], ["Good morning!\n" * 2000, {"cancelled": 1}], ["Good morning!", {}]]},
        {"model": SHIPPED, "options": {"nothing": 1}, "texts": []})
    for got, words in (unknown, "beams"), (value, "beam"), (model, "verify"), (language, "xx"), (semicolon, ";"), \
            (at_open, "nothing"):
        assert words in got["error"] and not got["trap"], got
    assert cancelled["name"] == "AbortError", cancelled
    assert good == native("Good morning!", "-m", SHIPPED, "-t", "de")[0], good


@test
def misuse_of_the_module_is_explained():
    run = subprocess.run(["node", "--no-incremental-marking", "tests/web/misuse.mjs", WEB + "/moe.mjs", SHIPPED],
                         cwd=ROOT, capture_output=True, encoding="utf-8", timeout=600)
    assert run.returncode == 0, (run.returncode, run.stderr[-1000:])
    results = json.loads(run.stdout)
    wanted = [native("Where is my book?", "-m", SHIPPED, "-t", to)[0] for to in ("de", "fr", "es")]
    table = [  # name, part of the result
        (r"file of \d+ bytes", "limited to 2 GB"), ("size .*", "TypeError: size"), ("no size", "opened"),
        ("missing file", "status 404"), ("stream of .*", "TypeError: the stream of a model"),
        ("stopped .*", "AbortError: "), ("buffer of .*", "does not start with MOEMODEL"),
        ("option of open with ;", "unknown option 'beam=2;batch'"),
        ("option of prototypes", "unknown option 'constructor'"),
        ("text .*", "TypeError: the text is not a string"), (r"to (\[|\{).*", "TypeError: option to"),
        ("to \"de.*", "NUL"), ("options (\"de\"|\\[).*", "TypeError: options"),
        ('options .*"signal":5.*', "TypeError: signal"),
        ("options .*", wanted[1]), ("throws instead.*", "false"), ("several at once", " | ".join(wanted)),
        ("closed.*", "the translator is closed")]
    for name, got in results.items():
        part = next(part for pattern, part in table if re.fullmatch(pattern, name))
        assert part in got, (name, got, part)
    assert len(results) > 30, results


@test.needs(shutil.which("tsc"), "TypeScript")
def types_describe_the_module():
    with tempfile.TemporaryDirectory() as folder:
        for name in "moe.mjs", "moe.d.mts":
            shutil.copy(os.path.join(ROOT, WEB, name), folder)
        shutil.copy(os.path.join(ROOT, "tests/web/types.mts"), folder)
        output(["tsc", "--noEmit", "--strict", "--target", "es2022", "--lib", "es2022,dom", "--module", "nodenext",
                "--moduleResolution", "nodenext", folder + "/types.mts"])


@test
def damaged_models_are_errors():
    size = os.path.getsize(os.path.join(ROOT, SHIPPED))
    tasks = [{"model": SHIPPED, "bytes": n, "texts": []} for n in (0, 1, 100, 4096, size // 2, size - 1)]
    tasks += [{"model": SHIPPED, "damage": n, "options": {"verify": 1}, "texts": [["Good morning!", {"to": "de"}]]}
              for n in (0, 9, 20, 70, 5000, size // 2, size - 64)]
    tasks += [{"model": "README.md", "texts": []}]
    for task, (result,) in zip(tasks, node(*tasks)):
        assert "error" in result and not result["trap"] and "failed" not in result["error"], (task, result)


@test
def seeds_of_the_fuzzer_do_not_trap():
    os.makedirs(os.path.join(ROOT, FUZZ), exist_ok=True)
    output([os.path.join(BUILD, "seeds"), FUZZ])
    tasks = [{"model": os.path.join(FUZZ, name), "texts": [["1 2 3", {}]], "options": {"form": "ids"}}
             for name in sorted(os.listdir(os.path.join(ROOT, FUZZ)))]
    results = node(*tasks)
    assert len(results) == len(tasks) > 10
    for task, result in zip(tasks, results):
        assert all(isinstance(x, str) or not x["trap"] for x in result), (task, result)
        assert "moe.wasm failed" not in json.dumps(result), (task, result)
    print("    %d seeds" % len(tasks))


# ---- Page ----

class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def page(folder=WEB):
    handler = functools.partial(Quiet, directory=os.path.join(ROOT, folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with browsing() as browser:
            shown = Page(browser, "http://127.0.0.1:%d/index.html" % server.server_address[1])
            shown.wait("document.readyState === 'complete' && !!document.getElementById('file')")
            yield shown
    finally:
        server.shutdown()
        server.server_close()


def choose_model(shown, path):
    root = shown.browser.call("DOM.getDocument", shown.session)["root"]["nodeId"]
    field = shown.browser.call("DOM.querySelector", shown.session, nodeId=root, selector="#file")["nodeId"]
    shown.browser.call("DOM.setFileInputFiles", shown.session, files=[os.path.join(ROOT, path)], nodeId=field)


def state(shown):
    return shown.run("document.getElementById('state').textContent")


def type_text(shown, text):
    shown.run("(box => { box.value = %s; box.dispatchEvent(new Event('input')); })(document.getElementById('in'))"
              % json.dumps(text))


def translated(shown, text):
    shown.run("document.getElementById('state').textContent = ''")
    type_text(shown, text)
    shown.wait("document.getElementById('state').textContent.endsWith(' ms')", 60)
    return shown.run("document.getElementById('out').textContent")


@page_test
def page_translates_with_files():
    with page() as shown:
        for model, target, text in (EN_PT, None, "The house is red."), (SHIPPED, "fr", "Where is my book?"):
            choose_model(shown, model)
            shown.wait("!document.getElementById('languages').hidden" if target else
                       "document.getElementById('model').textContent.startsWith('Model: ')", 90)
            if target:
                shown.run("document.getElementById('to').value = '%s'" % target)
            wanted = native(text, "-m", model, *(["-t", target] if target else []))[0]
            assert translated(shown, text) == wanted, wanted
        for scheme in "light", "dark":
            shown.browser.call("Emulation.setEmulatedMedia", shown.session,
                               features=[{"name": "prefers-color-scheme", "value": scheme}])
            back = shown.run("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", back))) > 600) == (scheme == "light"), (scheme, back)
            if os.environ.get("SCREENSHOT"):
                picture = shown.browser.call("Page.captureScreenshot", shown.session)["data"]
                with open("%s-%s.png" % (os.environ["SCREENSHOT"], scheme), "wb") as file:
                    file.write(base64.b64decode(picture))


@page_test
def page_stops_and_reports():
    with page() as shown:
        choose_model(shown, "README.md")
        shown.wait("document.getElementById('state').className === 'bad'")
        assert "Cannot open the model" in state(shown), state(shown)
        choose_model(shown, SHIPPED)
        shown.wait("!document.getElementById('languages').hidden", 90)
        type_text(shown, "I would like a cup of coffee.\n" * 3000)
        shown.wait("!document.getElementById('cancel').hidden")
        shown.run("document.getElementById('cancel').click()")
        shown.wait("document.getElementById('state').textContent === 'Stopped.'", 30)
        assert translated(shown, "Good morning!") == native("Good morning!", "-m", SHIPPED, "-t", "de")[0]


def press(shown, key, modifiers=0):
    code = "Key" + key.upper() if len(key) == 1 else key
    for kind in "keyDown", "keyUp":
        shown.browser.call("Input.dispatchKeyEvent", shown.session, type=kind, key=key, code=code, modifiers=modifiers)


@page_test
def page_offers_the_model_in_its_folder_and_obeys_keys():
    with tempfile.TemporaryDirectory() as folder:
        for name in os.listdir(os.path.join(ROOT, WEB)):
            os.symlink(os.path.join(ROOT, WEB, name), os.path.join(folder, name))
        os.symlink(os.path.join(ROOT, SHIPPED), os.path.join(folder, "model.bin"))
        with page(folder) as shown:
            shown.wait("!document.getElementById('shipped').hidden")
            shown.run("document.getElementById('shipped').click()")
            shown.wait("!document.getElementById('languages').hidden", 90)
            wanted = native("Where is my book?", "-m", SHIPPED, "-t", "fr")[0]
            shown.run("document.getElementById('to').value = 'fr'")
            assert translated(shown, "Where is my book?") == wanted
            shown.run("document.getElementById('state').textContent = ''")
            press(shown, "s", modifiers=1)  # Alt
            shown.wait("document.getElementById('state').textContent.endsWith(' ms')", 60)
            values = shown.run("['from', 'to', 'in'].map(id => document.getElementById(id).value)")
            assert values == ["fr", "en", wanted], values
            back = shown.run("document.getElementById('out').textContent")
            assert back == native(wanted, "-m", SHIPPED, "-t", "en")[0], back
            shown.browser.call("Browser.grantPermissions",
                               permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
            press(shown, "c", modifiers=1)
            shown.wait("document.getElementById('state').textContent === 'Copied.'")
            assert shown.run("navigator.clipboard.readText()") == back
            type_text(shown, "I would like a cup of coffee.\n" * 3000)
            shown.wait("!document.getElementById('cancel').hidden")
            press(shown, "Escape")
            shown.wait("document.getElementById('state').textContent === 'Stopped.'", 30)
            for text, direction in ("Où est mon livre ?", "ltr"), ("أين كتابي؟", "rtl"), ("איפה הספר שלי?", "rtl"):
                type_text(shown, text)
                assert shown.run("document.getElementById('in').matches(':dir(%s)')" % direction), text


@page_test
def page_opens_another_model_meanwhile():
    """Open a model while another is being opened or translates, and after a failure, without local storage."""
    with page() as shown:
        shown.run("Object.defineProperty(window, 'localStorage', { get() { throw new Error('denied'); } }), 0")
        ready = "!document.getElementById('languages').hidden"
        choose_model(shown, EN_PT)
        choose_model(shown, SHIPPED)
        shown.wait(ready, 90)
        assert "en-de-fr-es" in shown.run("document.getElementById('model').textContent"), state(shown)
        shown.run("(list => { list.value = 'fr'; list.onchange(); })(document.getElementById('to'))")
        type_text(shown, "I would like a cup of coffee.\n" * 3000)
        shown.wait("!document.getElementById('cancel').hidden")
        choose_model(shown, "README.md")
        shown.wait("document.getElementById('state').className === 'bad'")
        assert state(shown).startswith("Cannot open the model: README.md"), state(shown)
        assert shown.run("['languages', 'cancel', 'progress'].every(id => document.getElementById(id).hidden)")
        type_text(shown, "")
        choose_model(shown, SHIPPED)
        press(shown, "Escape")
        shown.wait("document.getElementById('state').textContent.startsWith('Stopped. Choose')")
        choose_model(shown, EN_PT)
        choose_model(shown, SHIPPED)
        shown.wait(ready, 90)
        assert shown.run("document.getElementById('to').value") == "fr"
        assert translated(shown, "Where is my book?") == native("Where is my book?", "-m", SHIPPED, "-t", "fr")[0]


@page_test
def page_takes_dropped_files():
    with page() as shown:
        data = {"items": [], "files": [os.path.join(ROOT, SHIPPED)], "dragOperationsMask": 1}
        for kind in "dragEnter", "dragOver":
            shown.browser.call("Input.dispatchDragEvent", shown.session, type=kind, x=300, y=300, data=data)
        shown.wait("document.body.classList.contains('over')")
        shown.browser.call("Input.dispatchDragEvent", shown.session, type="drop", x=300, y=300, data=data)
        shown.wait("!document.getElementById('languages').hidden", 90)
        assert not shown.run("document.body.classList.contains('over')")
        assert translated(shown, "Good morning!") == native("Good morning!", "-m", SHIPPED, "-t", "de")[0]


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
