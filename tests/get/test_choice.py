#!/usr/bin/env python3
"""Test which of the models on this machine moe-translate, moe-server and the Python package choose.

Usage: tests/python tests/get/test_choice.py [NAME]
The fetched models are small random ones, with records like moe-get's.
"""
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request

from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests/programs"))
import small_models  # noqa: E402

BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
SHIPPED = "en-de-fr-es"
FAST = ["--beam", "2", "--rerank", "0"]
TOKENISER = small_models.tokeniser_of(os.path.join(ROOT, "models", SHIPPED + ".bin"))
test = Suite()


class Home:
    """A user's folders with fetched models."""

    def __init__(self, path):
        self.path, self.more = path, {}
        self.data, self.cache = path + "/.local/share/moe", path + "/.cache/moe"

    def add(self, name, ways=None, size=0, convert=True, **scores):
        """Add a fetched model from one language to others, such as "en pt"."""
        source, *targets = (ways or name.split("/")[1].replace("-", " ")).split()
        os.makedirs(f"{self.data}/{name}")
        os.makedirs(os.path.dirname(f"{self.cache}/{name}"), exist_ok=True)
        with open(f"{self.data}/{name}/moe-get.json", "w", encoding="utf-8") as file:
            json.dump({"model": name, **scores, "files": []}, file, indent="\t")
        meta, tensors = small_models.translation(tokeniser=TOKENISER, vocabulary=8000)
        meta |= {"languages.sources": [source], "languages.targets": targets, "general.padding": "x" * (10 * size + 1)}
        if convert:
            small_models.write(f"{self.cache}/{name}.bin", meta, tensors)

    def environment(self):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MOE_", "XDG_", "HF_"))}
        return {**kept, "HOME": self.path, **self.more}

    def run(self, *words, status=(0, 1), program="moe-translate"):  # 1: text that the random models cannot translate
        done = subprocess.run([os.path.join(BIN, program), *words], env=self.environment(), capture_output=True,
                              text=True, timeout=120, stdin=subprocess.DEVNULL)
        assert done.returncode in status, (words, done.returncode, done.stdout, done.stderr)
        return done

    def chosen(self, *words):
        """Return the names of the models that translate a line."""
        line = json.loads(self.run("-q", "--json", *FAST, *words, "w5 w6").stdout)
        return " + ".join(filter(None, [line.get("between_model"), line["model"]]))

    def fails(self, *words):
        return self.run(*FAST, *words, "w5", status=(2,)).stderr

    def python(self, code):
        more = {"PYTHONPATH": os.path.join(ROOT, "tools/python")}
        done = subprocess.run([sys.executable, "-c", code], env={**self.environment(), **more}, capture_output=True,
                              text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@contextlib.contextmanager
def home():
    with tempfile.TemporaryDirectory() as path:
        yield Home(path)


@test
def without_a_suitable_model_the_message_names_the_command():
    with home() as h:
        for words, says in ((("-t", "pt"), "moe-get en-pt"), (("-s", "de", "-t", "ja"), "moe-get en-ja"),
                            (("-s", "ja", "-t", "fr"), "moe-get ja-en"), (("-s", "ja", "-t", "pt"), "moe-get ja-pt"),
                            (("-s", "auto", "-t", "pt"), "moe-get en-pt"), (("-t", "x y"), "moe-get --search")):
            assert says in h.fails(*words), words
        for code, says in (("pt-BR", "moe-get en-pt"), ("IT_IT", "moe-get en-it"), ("af-419", "moe-get en-af"),
                           ("zh_TW", "--search zh "), ("zh-Hant", "--search zh "), ("sr_Latn", "--search sr ")):
            assert says in h.fails("-t", code) + " ", code
        assert not os.path.exists(h.data) and not os.path.exists(h.cache)


@test
def a_named_model_precedes_fetched_ones_and_these_the_shipped_one():
    with home() as h:
        arguments = "-q", "--json", "-t", "de", "Hello."
        assert json.loads(h.run(*arguments).stdout)["model"] == SHIPPED
        h.add("firefox/en-de")
        assert h.chosen("-t", "de") == h.chosen("-s", "en", "-t", "de") == "firefox/en-de"
        h.add("o/named", "en de")
        named = h.cache + "/o/named.bin"
        shutil.copy(named, h.path + "/other.bin")
        h.more = {"MOE_MODEL": h.path + "/other.bin"}
        assert h.chosen("-t", "de") == "other" and h.chosen("-m", named, "-t", "de") == "o/named"


@test
def a_direct_pair_then_comet_bleu_size_and_name_decide():
    with home() as h:
        h.add("o/b", "en pt", size=1000)
        assert h.chosen("-t", "pt") == "o/b"
        h.add("o/c", "en pt", size=1000)
        assert h.chosen("-t", "pt") == "o/b"  # by name
        h.add("o/d", "en pt")
        assert h.chosen("-t", "pt") == "o/d"  # by size
        h.add("o/e", "en pt", size=2000, bleu=30.5)
        assert h.chosen("-t", "pt") == "o/d"  # the others have no BLEU
        h.add("o/f", "en pt", size=3000, bleu=31)
        h.add("o/g", "en pt", size=3000, comet=0.8, bleu=20)
        h.add("o/h", "en pt", size=4000, comet=0.81, bleu=10)
        names = re.findall(r"\w/\w", h.python("import moe_translate as m; print([x.name for x in m.models()])"))
        assert names.index("o/h") < names.index("o/g") and names.index("o/f") < names.index("o/e"), names
        for name in "o/b", "o/c", "o/d", "o/e", "o/f":
            shutil.rmtree(f"{h.data}/{name}")
        assert h.chosen("-t", "pt") == "o/h"  # by COMET
        h.add("p/de", "de en", comet=0.99)
        h.add("p/pt", "de pt", size=9000, comet=0.1)
        assert h.chosen("-s", "de", "-t", "pt") == "p/pt"


@test
def two_fetched_models_precede_the_shipped_one():
    with home() as h:
        h.add("firefox/de-en")
        assert h.chosen("-s", "de", "-t", "en") == "firefox/de-en"
        h.add("firefox/en-fr")
        assert h.chosen("-s", "de", "-t", "fr") == "firefox/de-en + firefox/en-fr"
        h.add("firefox/de-fr")
        assert h.chosen("-s", "de", "-t", "fr") == "firefox/de-fr"


@test
def the_shipped_model_can_be_one_of_two():
    with home() as h:
        h.add("firefox/en-pt")
        assert h.chosen("-s", "de", "-t", "pt") == f"{SHIPPED} + firefox/en-pt"
        assert f"model: {SHIPPED} + firefox/en-pt" in h.run(*FAST, "-v", "-s", "de", "-t", "pt", "Gut.").stderr


@test
def a_fetched_model_is_named_if_its_name_is_not_a_file():
    with home() as h:
        h.add("firefox/en-pt")
        for name in "en-pt", "firefox/en-pt":
            done = h.run("-m", name, "-t", "pt", "w5", status=(3,))
            assert f"the fetched model is {h.cache}/firefox/en-pt.bin" in done.stderr, done.stderr
        for name in "en-xx", "../.cache/moe/firefox/en-pt", "/firefox/en-pt":
            said = h.run("-m", name, "-t", "pt", "w5", status=(3,)).stderr
            assert "fetched model" not in said and ("moe-get en-xx" in said) == (name == "en-xx"), said


@test
def a_missing_target_lists_the_directions_of_all_models():
    with home() as h:
        h.add("firefox/en-pt")
        h.add("o/x", "ja ko th")
        message = h.fails()
        assert "en to pt; ja to ko th; en to de fr es; " in message, message


@test
def a_source_is_not_a_target():
    with home() as h:
        h.add("firefox/pt-en")
        assert "moe-get en-pt" in h.fails("-t", "pt")


@test
def models_for_other_sources_must_be_told_apart():
    with home() as h:
        h.add("firefox/en-pt")
        assert h.chosen("-t", "pt") == "firefox/en-pt"
        h.add("firefox/ja-pt")
        assert "-s ja" in h.fails("-t", "pt") or "-s en" in h.fails("-t", "pt")
        for source in "en", "ja":
            assert h.chosen("-s", source, "-t", "pt") == f"firefox/{source}-pt"


@test
def a_changed_choice_is_reported_once():
    with home() as h:
        def says(*words):
            return [x for x in h.run(*FAST, "-t", "de", *words, "w5").stderr.splitlines() if "instead" in x]
        h.run("-q", "-t", "de", "Hello.")
        h.add("firefox/en-de", size=9000)
        first, = says()
        assert f"firefox/en-de instead of {SHIPPED}" in first and "MOE_MODEL" in first
        assert not says()
        h.add("o/better", "en de", comet=0.9)
        h.add("o/best", "en de", comet=0.91)
        assert not says("-q") and not says()
        shutil.rmtree(h.data + "/o")
        assert "firefox/en-de instead of o/best" in says()[0] and not says()
        h.add("firefox/en-pt")
        assert "instead" not in h.run(*FAST, "-t", "pt", "w5").stderr  # the first choice for this pair
        os.chmod(h.cache, 0o500)
        assert h.chosen("-s", "en", "-t", "de") == "firefox/en-de"


@test
def unusable_models_are_skipped():
    with home() as h:
        h.add("firefox/en-pt", convert=False)
        assert "moe-get en-pt (not converted: firefox/en-pt)" in h.fails("-t", "pt")
        h.add("o/damaged", "en pt")
        with open(h.cache + "/o/damaged.bin", "r+b") as file:
            file.seek(20)
            file.write(b"damage")
        assert "not converted: " in h.fails("-t", "pt")
        h.add("o/incomplete", "en pt")
        os.remove(h.data + "/o/incomplete/moe-get.json")
        h.fails("-t", "pt")
        h.add("o/whole", "en pt")
        assert h.chosen("-t", "pt") == "o/whole"
        with open(h.data + "/o/whole/moe-get.json", "wb") as file:
            file.write(b"\0{\n\t\"comet\": 1e999999" + b"[" * 100000)
        assert h.chosen("-t", "pt") == "o/whole"


@test
def the_python_package_makes_the_same_choice():
    with home() as h:
        h.add("firefox/en-pt")
        h.add("firefox/de-en")
        code = "import moe_translate as m; print(m.Model({}).path)"
        assert h.python(code.format("target='pt'")) == h.cache + "/firefox/en-pt.bin"
        two = h.python(code.format("source='de', target='pt'"))
        assert two == f"{h.cache}/firefox/de-en.bin:{h.cache}/firefox/en-pt.bin"
        assert h.python(code.format("target='fr'")).endswith(f"/{SHIPPED}.bin")
        assert h.python("import moe_translate as m; print(*[x.name for x in m.models()])") == \
            f"firefox/de-en firefox/en-pt {SHIPPED}"
        failed = h.python("import moe_translate as m\ntry: m.Translator(target='ja')\nexcept m.MoeError as e: print(e)")
        assert "moe-get en-ja" in failed, failed


@test
def the_python_package_returns_paths_that_are_not_utf_8():
    with home() as h:
        h.add("firefox/en-pt")
        with open(h.data + "/firefox/en-pt/a", "w", encoding="utf-8") as file:
            file.write("x")
        with open(h.data + "/firefox/en-pt/moe-get.json", "w", encoding="utf-8") as file:
            json.dump({"files": [{"name": "a", "bytes": 1}]}, file)
        h.more = {"XDG_CACHE_HOME": h.path + "/c\udcff ", "HF_HUB_OFFLINE": "1"}
        os.mkdir(h.more["XDG_CACHE_HOME"])
        shutil.move(h.cache, h.more["XDG_CACHE_HOME"])
        found = h.python("import os, moe_translate as m; print(os.fsencode(m.get('en-pt')))")
        assert found.endswith("/c\\xff /moe/firefox/en-pt.bin'"), found


@test
def the_server_uses_all_models_and_names_them():
    with home() as h:
        h.add("firefox/en-pt", comet=0.87)
        h.add("firefox/de-en")
        process = subprocess.Popen([os.path.join(BIN, "moe-server"), "--port", "0", "--set", "beam=2"],
                                   env=h.environment(), stderr=subprocess.PIPE, text=True)
        try:
            line = next(x for x in process.stderr if "http://" in x)
            at = re.search(r"http://[\d.:]+/", line)[0]
            assert "3 models" in line, line

            def ask(path, data=None):
                try:
                    with urllib.request.urlopen(at + path, data, timeout=60) as answer:
                        return answer.status, json.loads(answer.read())
                except urllib.error.HTTPError as error:
                    return error.code, json.loads(error.read())
            models = {x["code"]: x["models"] for x in ask("languages")[1]}
            assert models["en"]["pt"] == "firefox/en-pt" and models["en"]["de"] == SHIPPED, models
            assert models["de"]["pt"] == "firefox/de-en + firefox/en-pt" and models["de"]["en"] == "firefox/de-en"
            local = ask("models")[1]
            assert [x["name"] for x in local["local"]] == ["firefox/de-en", "firefox/en-pt", SHIPPED], local
            assert local["local"][1]["comet"] == 0.87 and not local["can_fetch"]
            for refused in ask("models/available"), ask("models/fetch", b"model=en-pt"):
                assert refused[0] == 403 and "--allow-get" in refused[1]["error"], refused
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            process.stderr.close()


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:]))
