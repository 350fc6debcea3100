#!/usr/bin/env python3
"""Test moe-get against services.py, the stand-in for Firefox's storage and Hugging Face.

Usage: tests/python tests/get/test_get.py [NAME]
Prints `ok NAME` or `FAIL NAME` per test. BIN is the folder of the programs.
"""
import contextlib
import fcntl
import functools
import gzip
import hashlib
import json
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.parse
import urllib.request

from services import HOSTILE_NAMES, READER, STRANGER, Services
from suite import Skip, Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GET = os.path.join(ROOT, os.environ.get("BIN", "."), "moe-get")
TRANSLATE, INFO = (os.path.join(os.path.dirname(GET), name) for name in ("moe-translate", "moe-info"))
MODEL = "*/model.*.bin.gz"
SAFE = "*.safetensors"
test = Suite()
services = Services()


class Done:
    def __init__(self, process, seconds):
        self.out, self.err = (x.decode("utf-8", "replace") for x in process.communicate(timeout=120))
        self.status, self.seconds = process.returncode, time.monotonic() - seconds


class Player:
    """A user with a home of their own."""

    def __init__(self, home):
        self.home, self.more, self.listener, self.services = home, {}, "http", services
        self.data, self.cache = home + "/.local/share/moe", home + "/.cache/moe"
        services.heal()
        services.log.clear()

    def environment(self):
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LD_LIBRARY_PATH", "ASAN_OPTIONS")}
        return {**kept, "HOME": self.home, **self.services.environment(self.listener), **self.more}

    def start(self, *words, before=(), **more):
        options = [] if "--retries" in words else ["--retries", "2"]
        if self.services == services:
            options += ["--no-convert"]  # its models are random bytes
        return subprocess.Popen([*before, GET, *options, *words], env=self.environment(), cwd=self.home,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)

    def get(self, *words, status=0, **more):
        begin = time.monotonic()
        done = Done(self.start(*words, **more), begin)
        assert done.status == status, (words, done.status, done.out, done.err)
        assert "\033" not in done.err and "\0" not in done.err, done.err
        return done

    def fails(self, *words, status=4, says="", **more):
        """Run a command that fails; check the message and that nothing is complete."""
        done = self.get(*words, status=status, **more)
        last = done.err.strip().splitlines()[-1]
        assert last.startswith("moe-get: ") and not done.out, done.err
        for word in says.split("|"):
            assert word in last, (word, done.err)
        assert not self.records(), self.files()
        return done

    def files(self):
        return sorted(os.path.relpath(os.path.join(folder, x), self.home)
                      for folder, _, names in os.walk(self.home) for x in names)

    def records(self):
        return [x for x in self.files() if x.endswith("moe-get.json")]

    def partial(self):
        return [x for x in self.files() if x.endswith(".partial")]


@contextlib.contextmanager
def player():
    with tempfile.TemporaryDirectory() as home:
        yield Player(home)


def requests(pattern="*"):
    return services.requests(pattern)


def entries(pair):
    return services.models[pair]


def check_complete(folder):
    """Check the record and the hashes of a fetched model."""
    with open(folder + "/moe-get.json", encoding="utf-8") as file:
        record = json.load(file)
    for one in record["files"]:
        with open(f"{folder}/{one['name']}", "rb") as file:
            data = file.read()
        assert len(data) == one["bytes"], one
        content = gzip.decompress(data) if one["name"].endswith(".gz") else data
        assert hashlib.sha256(content).hexdigest() == one["sha256"], one
    assert sorted(os.listdir(folder)) == sorted([x["name"] for x in record["files"]] + ["moe-get.json"])
    return record


# ---- Fetching --------------------------------------------------------------------------------------------------------

@test
def a_pair_is_fetched_listed_and_removed():
    with player() as p:
        done = p.get("en-de")
        assert done.out.strip() == p.data + "/firefox/en-de", done.out
        for word in "MPL-2.0", "kB", "base-memory", services.url() + "/db/models.json":
            assert word in done.err, done.err
        record = check_complete(p.data + "/firefox/en-de")
        model = entries("en-de")[1]["files"]["model"]
        assert record["version"] == model["path"] and record["comet"] == 0.8811 and record["bleu"] == 41.7
        assert model["uncompressedHash"] in [x["sha256"] for x in record["files"]]
        assert "firefox/en-de" in p.get("--list").out
        p.more = {"HF_HUB_OFFLINE": "1"}
        services.log.clear()
        assert p.get("EN_DE").out == done.out and not requests()
        p.get("rm", "en-de")
        assert not p.files() and p.get("--list").out == ""
        assert "moe-get --list" in p.get("rm", "en-de", status=3).err
        assert "HF_HUB_OFFLINE" in p.fails("en-de").err and not requests()


@test
def the_best_entry_is_chosen():
    with player() as p:
        for pair, architecture in (("en-pt", "tiny"), ("de-en", "base-memory"), ("en-fr", "base-memory"),
                                   ("fr-en", "base"), ("en-es", "tiny"), ("en-ru", "tiny"), ("ru-en", "tiny"),
                                   ("sr-en", "tiny"), ("en-uk", "base"), ("en-zh", "base")):
            assert f"{pair}, {architecture}" in p.get("--dry-run", pair).err, (pair, architecture)
        assert "tiny" in p.get("--dry-run", "--small", "en-de").err
        assert not p.files()


@test
def every_pair_of_the_index_can_be_fetched():
    with player() as p:
        p.get("-q", *services.models)
        for pair in services.models:
            check_complete(p.data + "/firefox/" + pair.replace("_", "-"))
        assert len(requests("/db/models.json")) == 1 and not p.partial()
        assert len(p.get("--list").out.splitlines()) == len(services.models)


@test
def two_vocabularies_are_fetched():
    with player() as p:
        names = [x["name"] for x in check_complete(p.get("en-zh_hant").out.strip())["files"]]
        assert len([x for x in names if "vocab" in x]) == 2, names


@test
def repositories_are_pinned_and_fetched():
    with player() as p:
        for word, folder in (("hy-mt2-30b", "tencent/Hy-MT2-30B-A3B"), ("m2m-100", "facebook/m2m100_418M"),
                             ("marco-nano", "AIDC-AI/Marco-Nano-Instruct"),
                             ("opus-mt-en-fr", "Helsinki-NLP/opus-mt-en-fr")):
            done = p.get(word)
            assert done.out.strip() == f"{p.data}/{folder}", done.out
            record = check_complete(done.out.strip())
            names = {x["name"] for x in record["files"]}
            assert "config.json" in names and any(x.endswith(".safetensors") for x in names), names
            assert not any(x.endswith((".bin", ".h5", ".png")) for x in names), names
            assert all(f"/resolve/{record['version']}/" in x.path for x in requests(f"/{folder}/resolve/*")[1:])
            services.log.clear()


@test
def pickles_are_fetched_only_without_safetensors():
    with player() as p:
        names = {x["name"] for x in check_complete(p.get("opus-mt-de-en").out.strip())["files"]}
        assert "pytorch_model.bin" in names, names
        names = {x["name"] for x in check_complete(p.get("--accept-licence", "nllb-3.3b").out.strip())["files"]}
        assert len([x for x in names if x.startswith("pytorch_model-")]) == 3, names


@test
def a_gguf_is_fetched_by_its_name():
    with player() as p:
        done = p.get("tencent/Hy-MT2-1.8B-GGUF", status=3)
        assert "moe-get tencent/Hy-MT2-1.8B-GGUF/Hy-MT2-1.8B-" in done.err, done.err
        for kind, other in ("Q8_0", "Q4_K_M"), ("Q4_K_M", "Q8_0"):
            folder = p.get(f"tencent/Hy-MT2-1.8B-GGUF/Hy-MT2-1.8B-{kind}.gguf").out.strip()
            names = {x["name"] for x in check_complete(folder)["files"]}
            assert f"Hy-MT2-1.8B-{kind}.gguf" in names and f"Hy-MT2-1.8B-{other}.gguf" not in names


@test
def revisions_have_folders_of_their_own():
    with player() as p:
        services.publish("o/versions", {"config.json": b"{}", "model.safetensors": b"1" * 2000})
        commit = check_complete(p.get("o/versions").out.strip())["version"]
        services.publish("o/versions", {"config.json": b"{}", "model.safetensors": b"2" * 2000})
        folder = p.get("o/versions@" + commit).out.strip()
        assert folder == p.data + "/o/versions@" + commit and check_complete(folder)["version"] == commit
        p.get("rm", "o/versions")
        assert check_complete(p.get("o/versions").out.strip())["version"] != commit
        assert len(p.get("--list").out.splitlines()) == 2


@test
def opus_mt_is_tried_after_firefox():
    with player() as p:
        missing = p.get("de-fr", status=3).err
        assert "moe-get de-en en-fr" in missing, missing
        assert "--search" in p.get("xx-yy", status=3).err
        services.publish("Helsinki-NLP/opus-mt-tc-big-xx-yy", {"config.json": b"{}", "model.safetensors": bytes(2000)})
        assert p.get("xx-yy").out.strip().endswith("/Helsinki-NLP/opus-mt-tc-big-xx-yy")


@test
def a_non_commercial_licence_needs_a_yes():
    with player() as p:
        done = p.get("nllb", status=2)
        assert "cc-by-nc-4.0" in done.err and "--accept-licence" in done.err and not p.files(), done.err
        assert not requests("*pytorch_model*")
        p.get("--accept-licence", "nllb")


@test
def searches():
    with player() as p:
        out = p.get("--search", "pt").out
        assert "en-pt" in out and "pt-en" in out and "en-de" not in out, out
        assert "nllb-moe" in p.get("--search", "NLLB").out
        assert "OWNER/NAME" in p.get("--search", "nothing").err
        assert not p.files()


@test
def a_real_model_is_converted_and_translates():
    with player() as p:
        try:
            p.services = Services(wheel=True)
        except (OSError, subprocess.CalledProcessError) as problem:
            raise Skip(f"cannot download the wheel: {problem}") from problem
        with p.services:
            status, used = peak(p, "en-pt")  # with the conversion
            assert status == 0 and used < 64 + 24, used
            done = p.get("en-pt")
            converted = p.cache + "/firefox/en-pt.bin"
            assert done.out.strip() == converted and "Python" not in done.err, (done.out, done.err)
            assert p.get("en-pt").out == done.out
            with open(converted, "rb") as file:
                whole = file.read()
            for damaged in whole[:-9] + bytes(9), whole[:90], b"":  # made again
                with open(converted, "wb") as file:
                    file.write(damaged)
                assert p.get("en-pt").out == done.out
                with open(converted, "rb") as file:
                    assert file.read() == whole
            translated = subprocess.run([TRANSLATE, "-t", "pt", "When does the next train leave?"], capture_output=True,
                                        env=p.environment(), text=True, check=True, timeout=60)
            assert translated.stdout == "Quando sai o próximo trem?\n" and not translated.stderr, translated
            the_server_fetches_the_other_direction(p)
            with open(p.data + "/firefox/en-pt/moe-get.json", encoding="utf-8") as file:
                assert json.load(file)["licence"] == "MPL-2.0"
            p.get("rm", "en-pt", "pt-en")
            assert p.files() == [".cache/moe/choices"], p.files()


def the_server_fetches_the_other_direction(p):
    process = subprocess.Popen([os.path.join(os.path.dirname(GET), "moe-server"), "--port", "0", "--allow-get"],
                               env=p.environment(), stderr=subprocess.PIPE, text=True)
    try:
        at = re.search(r"http://[\d.:]+/", next(x for x in process.stderr if "http://" in x))[0]

        def ask(path, **data):
            body = urllib.parse.urlencode(data).encode() if data else None
            with urllib.request.urlopen(at + path, body, timeout=60) as answer:
                return answer.status, json.loads(answer.read())

        def wait(what):
            end = time.monotonic() + 60
            while not what():
                assert time.monotonic() < end, ask("models")
                time.sleep(0.2)
        wait(lambda: ask("models/available")[0] == 200)
        assert "en-pt" in [x["name"] for x in ask("models/available")[1]["available"]]
        assert ask("models/fetch", model="pt-en")[0] == 202
        wait(lambda: any("en" in x.get("models", {}) for x in ask("languages")[1] if x["code"] == "pt"))
        assert ask("models")[1]["job"]["state"] == "done" and "firefox/pt-en" in str(ask("models")[1])
        assert ask("translate", q="Bom dia.", source="pt", target="en")[1]["translatedText"] == "Good morning."
        assert ask("models/fetch", model="../x")[0] == 202
        wait(lambda: ask("models")[1]["job"]["state"] == "failed")
        assert "unknown model" in ask("models")[1]["job"]["message"], ask("models")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        process.stderr.close()


@test
def repositories_are_converted_if_a_reader_in_c_knows_them():
    with player() as p:
        _, files = services.hub.repositories["tencent/Hy-MT2-30B-A3B"].files()
        services.publish("o/hy", {name: data for name, data in files.items() if name != "chat_template.jinja"})
        done = subprocess.run([GET, "o/hy"], env=p.environment(), capture_output=True, text=True, timeout=60)
        assert done.stdout == p.cache + "/o/hy.bin\n" and "Python" not in done.stderr, done
        assert subprocess.run([TRANSLATE, "-m", p.cache + "/o/hy.bin", "--ids", "5 6"], capture_output=True).returncode == 0
        for word, why in (("hy-mt2-30b", "chat template"), ("opus-mt-de-en", "no *.safetensors"), ("m2m-100", "m2m_100")):
            assert why in p.get("--dry-run", word).err.split("Python converter")[1], word


def gguf_of(*entries):
    """Return the beginning of a GGUF file with texts as metadata, and much more than is read before the download."""
    text = lambda x: struct.pack("<Q", len(x)) + x
    return (b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) +
            b"".join(text(key.encode()) + struct.pack("<I", 8) + text(value) for key, value in entries) +
            bytes(9_000_000))


@test
def a_gguf_without_a_reader_is_noticed_before_the_download():
    architecture, model, pre = "general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"
    for entries, why in (([(architecture, b"gptneox")], "its architecture gptneox is not supported"),
                         ([(architecture, b"a\33[1m" + b"x" * 99)], "its architecture a?[1m" + "x" * 35 + " is"),
                         ([(architecture, b"llama"), (model, b"bert")], "its tokeniser bert is not supported"),
                         ([(architecture, b"llama"), (model, b"llama"), (pre, b"default")], None),
                         ([(architecture, b"llama"), (model, b"gpt2"), (pre, b"tekken")], "tokeniser tekken is not"),
                         ([(architecture, b"llama"), (model, b"gpt2"), (pre, b"smollm"),
                           ("tokenizer.chat_template", b"{{ 1 }}")], "its chat template is unknown here"),
                         ([(architecture, b"llama"), (model, b"gpt2"), (pre, b"smollm")], None), ([], None)):
        with player() as p:
            data = gguf_of(*entries)
            services.publish("o/g-GGUF", {"x.gguf": data})
            for ranges in True, False:
                services.heal()
                if not ranges:
                    services.fault("*x.gguf*", ignore_ranges=True)
                before = len(services.requests("*x.gguf*"))
                told = p.get("--dry-run", "o/g-GGUF/x.gguf").err
                assert ("Python converter" in told) == ("template" in (why or "")), told
                assert ("converter" in told) == (why is not None) and (why or "") in told, (why, told)
                sent = services.requests("*x.gguf*")[before:]
                assert sent and all(x.headers["range"] == f"bytes=0-{len(data) // 64 - 1}" for x in sent)


@test
def a_fetched_decoder_translates_with_its_prompt():
    folder = os.path.join(ROOT, "..", "shared", "llm", "hy-v3")
    if not os.path.isdir(folder):
        raise Skip("no ../shared/llm here")
    files = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            files[name] = file.read()
    with player() as p:
        services.publish("o/hy-v3", files)
        assert "Python" not in p.get("--dry-run", "o/hy-v3").err
        done = subprocess.run([GET, "o/hy-v3"], env=p.environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout == p.cache + "/o/hy-v3.bin\n", done
        # the model's weights are random, but it has languages, a template and wordings
        about = subprocess.run([INFO, "--json", p.cache + "/o/hy-v3.bin"], capture_output=True, text=True).stdout
        assert "<｜hy_User｜>" in json.loads(about)["metadata"]["prompt.prefix"], about[:2000]
        for name in done.stdout.strip(), p.data + "/o/hy-v3":
            text = subprocess.run([TRANSLATE, "-m", name, "-t", "pt", "--max-len", "8", "--json", "Hello world"],
                                  env=p.environment(), capture_output=True, text=True)
            assert text.returncode in (0, 1) and json.loads(text.stdout)["translation"], text


@test
def a_model_that_cannot_be_converted_is_an_error():
    with player() as p:
        folder = p.get("en-de").out.strip()
        done = subprocess.run([GET, "en-de"], env=p.environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 3 and not done.stdout and "model.ende" in done.stderr, done
        assert "first run: moe-get rm firefox/en-de" in done.stderr.splitlines()[-1], done.stderr
        assert check_complete(folder) and not os.listdir(p.cache + "/firefox")


def on_terminal(p, *words, answer=b""):
    """Run moe-get on a terminal, where `answer` is typed at a question; return the exit status and what is shown."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([GET, "--no-convert", *words], env=p.environment(), stdin=theirs,
                               stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True,
                               preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(ours, 4096):
            shown += data
            if shown.endswith(b"(y/N) "):
                os.write(ours, answer)
    os.close(ours)
    return process.wait(60), shown


@test
def a_licence_is_accepted_on_a_terminal():
    with player() as p:
        for answer, status in (b"\n", 2), (b"no\n", 2), (b"yikes\n", 2), (b"\4", 2), (b"\3", 130), (b"Yes\n", 0):
            assert on_terminal(p, "nllb", answer=answer)[0] == status, answer
            assert bool(p.records()) == (status == 0)


@test
def a_terminal_shows_rate_and_time_left():
    with player() as p:
        services.fault(MODEL, rate=20_000)
        status, shown = on_terminal(p, "en-de")
        assert status == 0, shown
        line = rb"\r\[1/3\] model\.ende\.in\.\.\.  [\d.]+ kB of [\d.]+ kB \(\d+%\), [\d.]+ kB/s, 0:00:0\d left"
        assert re.search(line, shown), shown
        check_complete(p.data + "/firefox/en-de")


# ---- Broken connections ----------------------------------------------------------------------------------------------

@test
def cuts_at_20_points_are_resumed():
    with player() as p:
        size = entries("en-de")[1]["files"]["model"]["uncompressedSize"]
        for i in range(20):
            services.heal()
            services.fault(MODEL, cut=1 + i * size // 20, times=1)
            p.get("en-de")
            check_complete(p.data + "/firefox/en-de")
            shutil.rmtree(p.data)
        ranges = [x.headers.get("range") for x in requests(MODEL)]
        assert len([x for x in ranges if x]) == 20, ranges


@test
def many_cuts_in_one_file_are_resumed():
    with player() as p:
        services.fault(MODEL, cut=3000, times=12)
        p.get("en-de")
        check_complete(p.data + "/firefox/en-de")
        assert len(requests(MODEL)) == 13
        assert all("if-range" in x.headers for x in requests(MODEL)[1:])


@test
def resets_and_closed_connections_are_retried():
    with player() as p:
        services.fault(MODEL, reset=2000, times=2)
        services.fault(MODEL, cut=-1, times=1)
        p.get("en-de")
        check_complete(p.data + "/firefox/en-de")


def interrupt(p, word, pattern, number=signal.SIGKILL):
    """Stop moe-get while it fetches a file slowly."""
    services.fault(pattern, rate=10_000)
    process = p.start(word)
    while not sum(os.path.getsize(f"{p.home}/{x}") for x in p.partial()) > 3000:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    services.heal()
    services.log.clear()
    return Done(process, time.monotonic())


@test
def a_killed_run_is_continued():
    with player() as p:
        for word, pattern in ("en-de", MODEL), ("m2m-100", "/cdn/*/model.safetensors"):
            interrupt(p, word, pattern)
            size, = (os.path.getsize(f"{p.home}/{x}") for x in p.partial())
            check_complete(p.get(word).out.strip())
            headers, = (x.headers for x in requests(pattern))
            assert headers["range"] == f"bytes={size}-" and headers["if-range"].startswith('"'), headers


@test
def a_changed_file_starts_again():
    with player() as p:
        old = bytes(50000)
        for folder, new in ("o/same-size", bytes([1]) * 50000), ("o/smaller", bytes([1]) * 2000):
            services.publish(folder, {"config.json": b"{}", "model.safetensors": old})
            interrupt(p, folder, "/cdn/*")
            services.publish(folder, {"config.json": b"{}", "model.safetensors": new})
            check_complete(p.get(folder).out.strip())
            assert requests("/cdn/*")[0].headers.get("range") or len(new) == 2000
            with open(f"{p.data}/{folder}/model.safetensors", "rb") as file:
                assert file.read() == new


@test
def partial_files_of_others_are_not_trusted():
    with player() as p:
        p.get("en-de")
        folder = p.data + "/firefox/en-de/"
        with open(folder + "moe-get.json", encoding="utf-8") as file:
            names = [x["name"] for x in json.load(file)["files"]]
        os.remove(folder + "moe-get.json")
        for name in names:  # a damaged file with its final name, and a partial file that is too long
            with open(folder + name, "r+b") as file:
                file.seek(100)
                file.write(b"damage")
            with open(folder + name + ".partial", "wb") as file:
                file.write(bytes(1 << 20))
        p.get("en-de")
        check_complete(folder)


@test
def ignored_and_wrong_ranges_start_again():
    with player() as p:
        services.fault(MODEL, cut=9000, times=1)
        services.fault(MODEL, ignore_ranges=True)
        p.get("en-de")
        check_complete(p.data + "/firefox/en-de")
        p.get("rm", "en-de")
        services.heal()
        services.fault(MODEL, cut=9000, times=1)
        services.fault(MODEL, content_range="bytes 7-9/10", times=1)
        p.get("en-de")
        check_complete(p.data + "/firefox/en-de")
        p.get("rm", "en-de")
        services.heal()
        services.fault(MODEL, cut=9000, times=1)
        services.fault(MODEL, content_range="nonsense")
        p.get("en-de")  # the third request has no range
        check_complete(p.data + "/firefox/en-de")


@test
def a_slow_connection_is_given_up():
    with player() as p:
        services.fault(MODEL, rate=100)
        done = p.start("--timeout", "1", "--retries", "0", "en-de")
        time.sleep(4)
        done.send_signal(signal.SIGINT)
        done = Done(done, time.monotonic())
        assert done.status == 130 and "broke" in done.err and "100 bytes" not in done.err, done.err
        services.heal()
        services.fault(MODEL, delay=5)
        p.fails("--timeout", "1", "--retries", "0", "en-de", says="try again")
        services.heal()
        p.get("en-de")


# ---- Answers ---------------------------------------------------------------------------------------------------------

@test
def temporary_errors_are_retried():
    with player() as p:
        for status in 408, 429, 500, 502, 503, 504:
            services.heal()
            services.log.clear()
            services.fault(MODEL, status=status, times=2)
            p.get("en-de")
            assert len(requests(MODEL)) == 3
            check_complete(p.data + "/firefox/en-de")
            shutil.rmtree(p.data)


@test
def retry_after_is_honoured():
    with player() as p:
        services.fault(MODEL, status=429, headers={"Retry-After": "2"}, times=1)
        done = p.get("en-de")
        assert done.seconds > 2 and "retrying in 2 s" in done.err, done.err
        p.get("rm", "en-de")
        services.fault(MODEL, status=429, headers={"Retry-After": "7200"})
        done = p.fails("en-de", says="429|try again later|7200")
        assert done.seconds < 2


@test
def errors_name_the_next_step():
    with player() as p:
        for path, status, says in ((MODEL, 401, "401"), (MODEL, 403, "403"), (MODEL, 404, "404|check the name"),
                                   (MODEL, 500, "try again later"), ("/db/*", 404, "404"), ("/db/*", 500, "try again"),
                                   ("/db/*", 403, "403"), (MODEL, 410, "410"), (MODEL, 418, "418|check the address")):
            services.heal()
            services.fault(path, status=status)
            p.fails("--retries", "0", "en-de", says=says)
        assert not p.files(), p.files()


@test
def damaged_indexes_are_refused():
    with player() as p:
        for fault in {"body": "["}, {"body": "[]"}, {"body": "{}"}, {"body": ""}, {"resize": -10}, {"body": "null"}, \
                {"body": '{"models": {"en-de": []}, "baseUrl": 5}'}:
            services.heal()
            services.fault("/db/models.json", **fault)
            p.fails("en-de", status=3, says="MOE_FIREFOX_INDEX")
            services.heal()
            services.fault("/api/*", **fault)
            p.fails("m2m-100", status=3, says="HF_ENDPOINT")


@test
def wrong_content_is_deleted():
    with player() as p:
        for fault in {"corrupt": -20}, {"corrupt": 5000}, {"resize": -100}, {"resize": 100}, {"endless": True}, \
                {"bomb": 1 << 30}, {"body": "Please log in"}, {"body": ""}:
            services.heal()
            services.fault(MODEL, **fault)
            p.fails("en-de", status=3)
            assert not any("model." in x for x in p.files()), (fault, p.files())
        services.heal()
        for fault in {"corrupt": 5000}, {"resize": 100}, {"resize": -100}, {"endless": True}:
            services.heal()
            services.fault("/cdn/*", **fault)
            done = p.fails("m2m-100", status=3)
            assert not any("safetensors" in x for x in p.files()), (fault, done.err, p.files())


@test
def a_log_in_page_is_no_vocabulary():
    with player() as p:
        pair, path = next((pair, one["files"]["vocab"]["path"]) for pair, (one, *more) in services.models.items()
                          if not more and not one["files"].get("vocab", {"uncompressedHash": 1}).get("uncompressedHash"))
        services.fault("/" + path, body="<html>Hotel Wi-Fi</html>")
        p.fails(pair, status=3, says="log-in page")


@test
def nothing_from_the_network_controls_the_terminal():
    with player() as p:
        services.publish("o/n", {"config.json": json.dumps({"model_type": "\033[2Jx\x07"}).encode(),
                                 "model.safetensors": bytes(200)})
        assert "\x07" not in p.get("o/n").err
        record = p.data + "/o/n/moe-get.json"
        with open(record, encoding="utf-8") as file:
            known = json.load(file)
        with open(record, "w", encoding="utf-8") as file:
            json.dump(known | {"licence": "\033]0;x\x07", "variant": "\x9b31m\n"}, file)
        out = p.get("--list").out
        assert out.count("\n") == 1 and not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out), out


@test
def wrong_hashes_in_the_index_are_noticed():
    with player() as p:
        right = entries("en-de")[1]["files"]["model"]["uncompressedHash"]
        services.fault("/db/models.json", replace=[right, "0" * 64])
        p.fails("en-de", status=3, says="SHA-256")
        services.heal()
        services.fault("/db/models.json", replace=[right, "zz"])
        p.fails("en-de", status=3, says="hash")


@test
def names_with_dots_are_refused():
    with player() as p:
        path = entries("en-de")[1]["files"]["model"]["path"]
        for other in "../outside.bin", "models/../../outside.bin", "/outside.bin", "models/..", "models\\\\outside.bin":
            services.heal()
            services.fault("/db/models.json", replace=[path, other])
            p.get("--dry-run", "en-de")
            assert path not in p.get("--dry-run", "en-de").err
        services.heal()
        services.fault("/api/models/*", names=HOSTILE_NAMES)
        p.get("m2m-100")
        assert not any("outside" in x for x in p.files()) and not requests("*outside*")
        services.heal()
        services.fault("/api/models/*", names=["..\\x.model"])
        p.get("rm", "m2m-100")
        p.fails("m2m-100", status=3, says="unsafe")


# ---- Hosts, tokens, TLS ----------------------------------------------------------------------------------------------

@test
def tokens_stay_with_the_first_host():
    with player() as p:
        p.more = {"HF_TOKEN": READER}
        check_complete(p.get("moe-tests/gated").out.strip())
        assert any("authorization" in x.headers for x in services.requests(listener="http"))
        away = services.requests(listener="http-away")
        assert away and not any("authorization" in x.headers for x in away)
        services.log.clear()
        p.get("en-de")
        assert requests() and not any("authorization" in x.headers for x in requests())


@test
def tokens_come_from_the_environment_or_a_file():
    with player() as p:
        for folder in "/.cache/huggingface", "/hf":
            p.more = {} if folder != "/hf" else {"HF_HOME": p.home + "/hf"}
            os.makedirs(p.home + folder)
            with open(p.home + folder + "/token", "w", encoding="ascii") as file:
                file.write(READER + "\n")
            p.get("moe-tests/private")
            p.get("rm", "moe-tests/private")
            shutil.rmtree(p.home + folder)
        p.more = {}
        p.fails("moe-tests/gated", says="401|HF_TOKEN")
        p.more = {"HF_TOKEN": STRANGER}
        p.fails("moe-tests/gated", says="403|terms")
        p.fails("moe-tests/private", status=3, says="404")
        p.more = {"HF_TOKEN": "a b\nInjected: yes"}
        p.fails("moe-tests/gated", says="HF_TOKEN")


@test
def certificates_are_verified():
    with player() as p:
        p.listener = "https"
        check_complete(p.get("en-de").out.strip())
        check_complete(p.get("m2m-100").out.strip())
        p.get("rm", "en-de", "m2m-100")
        for listener in "https-host", "https-expired", "https-early", "https-unknown":
            p.listener = listener
            done = p.fails("en-de", says="certificate|SSL_CERT_FILE")
            assert done.seconds < 5 and not services.requests(listener=listener)
        p.listener, p.more = "https", {"SSL_CERT_FILE": "/nonexistent"}
        p.fails("en-de", says="SSL_CERT_FILE")
        p.more = {"SSL_CERT_FILE": ""}
        p.fails("en-de", says="certificate")


@test
def redirects_to_plain_http_are_refused():
    with player() as p:
        p.listener = "https"
        services.fault(MODEL, redirect="http")
        p.fails("en-de", says="HTTPS|refused")
        assert not services.requests(MODEL, "http")
        services.heal()
        base = services.url("http")
        services.fault("/db/models.json", replace=[f'"baseUrl": "{services.url("https")}"', f'"baseUrl": "{base}"'])
        p.fails("en-de", status=3, says="HTTPS|refused")
        p.listener = "http"
        services.heal()
        for target in "http", "file:///etc/passwd", "ftp://127.0.0.1/x":
            services.heal()
            services.fault(MODEL, redirect=target)
            p.fails("en-de", says="redirects")


@test
def proxies_are_used():
    with player() as p:
        p.more = {"http_proxy": services.url("http-away")}
        services.url("http")
        p.get("en-de")
        assert services.requests(listener="http-away")
        p.get("rm", "en-de")
        p.listener, p.more = "https", {"https_proxy": services.url("http")}
        check_complete(p.get("en-de").out.strip())
        p.get("rm", "en-de")
        p.more = {"https_proxy": "http://127.0.0.1:9"}
        p.fails("en-de", says="https_proxy")
        p.more["no_proxy"] = "127.0.0.1"
        p.get("en-de")


@test
def unreachable_services_fail_at_once():
    with player() as p:
        p.more = {"MOE_FIREFOX_INDEX": "http://127.0.0.1:9/x"}
        assert p.fails("en-de", says="cannot connect|network").seconds < 3
        for address in "ftp://127.0.0.1/x", "/etc/passwd", "file:///etc/passwd", "http://", "x":
            p.more = {"MOE_FIREFOX_INDEX": address}
            p.fails("en-de", says="address" if address != "http://" else "")


# ---- Resources -------------------------------------------------------------------------------------------------------

MEASURE = """import resource, subprocess, sys
status = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(status, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


def peak(p, *words):
    """Run moe-get from a small process, because its parent counts too; return its exit status and its peak in MB."""
    status, used = p.get(*words, before=[sys.executable, "-c", MEASURE]).out.split()
    return int(status), float(used)


@test
def memory_stays_below_64_mb():
    with player() as p:
        cases = [("en-de", None, {}), ("en-de", "/db/models.json", {"huge": 20_000_000}),
                 ("en-de", "/db/models.json", {"endless": True}), ("en-de", MODEL, {"endless": True}),
                 ("en-de", MODEL, {"bomb": 1 << 30}), ("m2m-100", "/api/*", {"huge": 20_000_000}),
                 ("m2m-100", "/api/*", {"endless": True}), ("m2m-100", "*README*", {"endless": True}),
                 ("en-de", "/db/models.json", {"body": "[" * 1_000_000}),
                 ("en-de", "/db/models.json", {"body": "[" + "1," * 4_000_000 + "1]"})]
        for word, path, fault in cases:
            services.heal()
            if path:
                services.fault(path, **fault)
            status, used = peak(p, word)
            assert used < 64 and (status == 0) == (path is None), (word, path, fault, status, used)
            p.get("rm", word) if not status else None
        assert not p.records()


@test
def signals_leave_a_partial_file():
    with player() as p:
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGKILL:
            done = interrupt(p, "en-de", MODEL, number)
            assert done.status == (-number if number == signal.SIGKILL else 128 + number), done.err
            assert done.seconds < 2 and not p.records() and not done.out
            assert number == signal.SIGKILL or "continues" in done.err, done.err
            assert all(x.endswith((".partial", ".etag", ".lock", ".plan", ".gz")) for x in p.files()), p.files()
            p.get("en-de")
            check_complete(p.data + "/firefox/en-de")
            assert requests(MODEL)[-1].headers.get("range"), requests(MODEL)
            p.get("rm", "en-de")


@test
def two_gets_at_once_fetch_once():
    with player() as p:
        services.fault(MODEL, rate=40_000)
        first, second = p.start("en-de"), p.start("en-de")
        done = [Done(x, time.monotonic()) for x in (first, second)]
        assert [x.status for x in done] == [0, 0] and done[0].out == done[1].out, [x.err for x in done]
        assert "waiting for process" in done[0].err + done[1].err
        assert len(requests(MODEL)) == 1
        check_complete(p.data + "/firefox/en-de")


@test
def a_limit_on_file_sizes_and_a_full_disk():
    with player() as p:
        def limited():
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        p.fails("en-de", says="cannot write", preexec_fn=limited)
        assert len(p.partial()) == 1
        p.get("en-de")
        check_complete(p.data + "/firefox/en-de")
        p.get("rm", "en-de")


@test
def rm_removes_only_what_was_fetched():
    with player() as p:
        os.makedirs(p.home + "/documents/n")
        os.makedirs(p.data + "/own/model")
        for name in p.home + "/documents/n/thesis.odt", p.data + "/own/model/weights.bin":
            with open(name, "wb") as file:
                file.write(b"mine")
        os.symlink(p.home + "/documents", p.data + "/o")
        for word in "o/n", "own/model":
            assert "except files" in p.get("rm", word).err
        interrupt(p, "en-de", MODEL)
        assert p.partial()
        p.get("rm", "en-de")
        assert p.files() == [".local/share/moe/own/model/weights.bin", "documents/n/thesis.odt"], p.files()
        folder = p.get("en-de").out.strip()
        assert "--dry-run" in p.get("rm", "--dry-run", "en-de", status=2).err
        check_complete(folder)
        assert not p.get("rm", "-q", "en-de").err and not os.path.exists(folder)


@test
def rm_waits_for_a_get_and_can_be_stopped():
    with player() as p:
        services.fault(MODEL, rate=5_000)
        first = p.start("en-de")
        while not p.partial():
            time.sleep(0.05)
        second = p.start("rm", "en-de")
        time.sleep(1)
        second.send_signal(signal.SIGINT)
        done = Done(second, time.monotonic())
        assert done.status == 130 and "waiting for process" in done.err and done.seconds < 2, done.err
        first.kill()
        first.communicate()


@test
def pipes_in_the_folder_do_not_block():
    with player() as p:
        folder = p.data + "/firefox/en-de"
        os.makedirs(folder)
        name = os.path.basename(entries("en-de")[1]["files"]["model"]["path"])
        for one in name, name + ".partial", name + ".etag", "moe-get.json", ".plan":
            os.mkfifo(f"{folder}/{one}")
        os.makedirs(p.cache)
        os.mkfifo(p.cache + "/choices")
        assert "incomplete" in p.get("--list").out
        assert subprocess.run([TRANSLATE, "-t", "pt", "x"], env=p.environment(), capture_output=True,
                              timeout=30).returncode == 2
        os.remove(f"{folder}/{name}.partial")
        p.get("en-de")
        check_complete(folder)


def mounted(p, options, script):
    """Run a script with a tmpfs at p.data, in a namespace of its own."""
    os.makedirs(p.data, exist_ok=True)
    done = subprocess.run(["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o {options} none {p.data} || exit 99; "
                           f"cd {p.home}; {script}"], env=p.environment(), capture_output=True, text=True, timeout=60)
    if done.returncode == 99 or "unshare:" in done.stderr:
        raise Skip("cannot mount a tmpfs")
    return done


@test
def full_and_read_only_disks():
    get = GET + " --no-convert"
    with player() as p:
        done = mounted(p, "size=32k", f"{get} en-de; echo $?; find {p.data} -type f")
        assert done.stdout.split()[0] == "4" and "needs" in done.stderr and "XDG_DATA_HOME" in done.stderr, done
        services.fault(MODEL, rate=10_000, times=1)  # another file fills the disk after the check of its room
        partial, other = p.data + "/firefox/en-de/model*.partial", p.data + "/other"
        done = mounted(p, "size=100k", f"(until ls {partial}; do sleep 0.05; done; cat {GET} > {other}) >/dev/null 2>&1 & "
                       f"{get} en-de; echo $?; wait; rm {other}; {get} -q en-de; echo $?; cp -r {p.data} {p.home}/copy")
        assert done.stdout.split()[0] == "4" and "No space" in done.stderr and "continues" in done.stderr, done
        assert done.stdout.split()[-1] == "0", done
        check_complete(p.home + "/copy/firefox/en-de")
        done = mounted(p, "ro", f"{get} en-de; echo $?")
        assert done.stdout.split()[0] == "4" and "Read-only" in done.stderr and "XDG_DATA_HOME" in done.stderr, done


@test
def nothing_else_is_written():
    with player() as p:
        p.more = {"XDG_DATA_HOME": p.home + "/d", "XDG_CACHE_HOME": p.home + "/c", "TMPDIR": p.home}
        p.get("en-de")
        p.get("m2m-100")
        p.get("--search", "x")
        assert all(x.startswith(("d/moe/firefox/en-de/", "d/moe/facebook/m2m100_418M/")) for x in p.files()), p.files()


@test
def usage_errors():
    with player() as p:
        for words in (), ("rm",), ("--list", "en-de"), ("--search", "x", "y"), ("foo",), ("../x",), ("a/../b",), ("--x",):
            done = p.get(*words, status=2)
            assert "moe-get --help" in done.err, (words, done.err)
        assert not p.files() and not requests()


if __name__ == "__main__":
    with contextlib.closing(services):
        sys.exit(test.run(*sys.argv[1:]))
