#!/usr/bin/env python3
"""moe-server with a directory of models: languages, pivots, memory.

    tests/run tests/server/test_several_models.py
"""
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import several_models
from suite import Skip, Suite
from test_server import BIN, LINES, MODEL, resident, serving

TEMPORARY = tempfile.TemporaryDirectory()
MODELS = several_models.one_way(pathlib.Path(TEMPORARY.name) / "models", "en-de", "de-fr", "fr-es")
test = Suite()


def folder(*options):
    return serving(*options, model=MODELS)


def opened(server):
    """Return the names of the model files that a server has mapped."""
    maps = pathlib.Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        raise Skip("no /proc here")
    return sorted(set(re.findall(r"models/(\S+)\.bin", maps.read_text())))


def held(server):
    """Return the resident memory of a server in MiB."""
    return resident(server.process.pid) / (1 << 20)


def alone(text, source, target):
    done = subprocess.run([BIN / "moe-translate", "-m", MODELS / f"{source}-{target}.bin", "-s", source, "-t", target,
                           "--beam", "3", "--rerank", "0"], input=text, capture_output=True, text=True, check=True)
    return done.stdout


@test
def languages_list_targets_of_models_and_pivots():
    with folder() as server:
        targets = {x["code"]: x["targets"] for x in server.ask("/languages")[1]}
        assert {code: set(x) for code, x in targets.items()} == \
            {"en": {"de", "fr"}, "de": {"fr", "es"}, "fr": {"es"}, "es": set()}, targets
        assert {x["language"] for x in server.ask("/v2/languages")[1]} == {"EN", "DE", "FR"}
        assert {x["language"] for x in server.ask("/v2/languages?type=target")[1]} == {"DE", "FR", "ES"}
        assert server.ask("/frontend/settings")[1]["language"]["target"]["code"] in {"de", "fr", "es"}


@test
def a_pivot_translation_equals_two_commands():
    with folder() as server:
        assert opened(server) == []  # no request has needed a model yet
        status, answer = server.translate(LINES, "fr")
        wanted = alone(alone("\n".join(LINES) + "\n", "en", "de"), "de", "fr").splitlines()
        assert status == 200 and answer["translatedText"] == wanted, (answer, wanted)
        assert opened(server) == ["de-fr", "en-de"], opened(server)
        status, answer = server.ask("/translate", {"q": ["Wo ist mein Buch?", "12"], "source": "auto", "target": "fr"})
        wanted = [alone("Wo ist mein Buch?\n", "de", "fr")[:-1], "12"]
        assert status == 200 and answer["translatedText"] == wanted, answer
        status, answer = server.ask("/translate", {"q": "Où est-il ?", "source": "fr", "target": "fr"})
        assert status == 200 and answer["translatedText"] == "Où est-il ?", answer


@test
def unreachable_targets_are_refused():
    with folder() as server:
        status, answer = server.translate("Good morning.", "es")
        assert status == 400 and "en to es is not supported" in answer["error"], answer
        status, answer = server.translate("Good morning.", "pt")
        assert status == 400 and "pt is not supported" in answer["error"], answer
        question = {"q": "Where is my book, my friend?", "source": "auto", "target": "es"}
        status, answer = server.ask("/translate", question)
        assert status == 400 and "en to es" in answer["error"], answer


@test
def words_are_linked_through_both_models():
    with folder() as server:
        text = "Where is my book?"
        _, answer = server.translate(text, "fr", details=True)
        links = {(text[a:b], answer["translatedText"][c:d]) for a, b, c, d in answer["details"]["alignment"]}
        assert ("my", "mon") in links and any(a.startswith("book") and b.startswith("livre") for a, b in links), links


@test
def html_keeps_its_tags():
    with folder() as server:
        html = '<p>Where is <b>my book</b>?</p><p>The <a href="/x">house</a> is <i>new</i>.</p>'
        status, answer = server.translate(html, "fr", format="html")
        found = re.findall("<[^>]+>", answer["translatedText"])
        assert status == 200 and sorted(found) == sorted(re.findall("<[^>]+>", html)), answer
        assert "<b>mon livre</b>" in answer["translatedText"], answer


@test
def a_glossary_applies_to_both_models():
    with folder() as server:
        for _ in range(2):
            status, answer = server.translate("Where is my book?", "fr", glossary={"book": "ouvrage"})
            assert status == 200 and "ouvrage" in answer["translatedText"], answer


@test
def models_are_closed_under_the_memory_limit():
    with folder("--models-memory", "70M", "--set", "batch=4") as server:
        assert server.translate("Good morning.", "de")[0] == 200
        one = held(server)
        assert opened(server) == ["en-de"]
        for _ in range(3):
            for source, target, text in (("de", "es", "Guten Morgen."), ("fr", "es", "Bonjour."),
                                         ("en", "fr", "Good morning."), ("en", "de", "Good morning.")):
                status, answer = server.ask("/translate", {"q": text, "source": source, "target": target})
                assert status == 200 and answer["translatedText"], answer
        assert len(opened(server)) == 1 and "en-de" in opened(server), opened(server)
        time.sleep(3)
        if "asan" not in str(BIN):  # AddressSanitizer retains freed memory
            assert held(server) < one + 12, (one, held(server))
    with folder("--set", "batch=4") as server:  # without a limit, models stay open
        for source, target in ("en", "de"), ("de", "fr"), ("fr", "es"):
            server.ask("/translate", {"q": "Tom", "source": source, "target": target})
        assert len(opened(server)) == 3 and held(server) > one + 30, (one, held(server))


@test
def clients_with_different_directions_share_the_server():
    texts = {("en", "de"): "Where is my book?", ("en", "fr"): "Where is my house?", ("de", "fr"): "Wo ist mein Buch?",
             ("de", "es"): "Wo ist mein Haus?", ("fr", "es"): "Où est mon livre ?"}
    with folder("--models-memory", "100M", "--set", "batch=4") as server:
        wanted = {way: server.ask("/translate", {"q": text, "source": way[0], "target": way[1]})[1]["translatedText"]
                  for way, text in texts.items()}
        wrong = []

        def client(way):
            for _ in range(6):
                status, answer = server.ask("/translate", {"q": [texts[way]] * 9, "source": way[0], "target": way[1]})
                if status != 200 or answer["translatedText"] != [wanted[way]] * 9:
                    wrong.append((way, status, answer))

        threads = [threading.Thread(target=client, args=(way,)) for way in texts for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[:2]


@test
def the_server_ends_while_models_are_busy():
    with folder("--grace", "1") as server:
        found, texts = [], ["I do not know this man. " * 200] * 40
        thread = threading.Thread(target=lambda: found.append(server.translate(texts, "fr")))
        thread.start()
        time.sleep(1)
        assert server.stop() == 0
        thread.join()
        assert found[0][0] == 503, found


@test
def files_of_other_programs_get_a_conversion_command():
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text('{"model_type": "m2m_100"}')
        pathlib.Path(folder, "model.safetensors").write_bytes(b"")
        for option in "-m", "--models":
            found = subprocess.run([BIN / "moe-server", option, folder, "--port", "0"], capture_output=True, text=True,
                                   timeout=60)
            wanted = f"convert it first: tools/convert/convert.py --from hf {folder} -o model.bin"
            assert found.returncode in (2, 3) and wanted in found.stderr, found


@test
def a_single_model_option_opens_one_model():
    """A single -m opens only that model."""
    with serving() as server:
        targets = [x["targets"] for x in server.ask("/languages")[1]]
        assert targets == [["en", "de", "fr", "es"]] * 4 and MODEL.exists(), targets


if __name__ == "__main__":
    sys.exit(test.run())
