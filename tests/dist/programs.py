#!/usr/bin/env python3
"""Test a program of `make dist`.

Usage: tests/python tests/dist/programs.py TARGET [NAME]

Runs it in empty folders and, as root, in a root directory without any other file: translations, commands, links, the
server, moe get with the local services of tests/get, invalid arguments. Results must equal those of BIN's programs.
AArch64 runs under qemu. Prints `ok NAME` or `FAIL NAME` per test.
"""
import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests/get"))
from services import Services
from suite import Skip, Suite

TARGET = sys.argv[1] if len(sys.argv) > 1 else "linux-x86_64"
EMULATOR = {"linux-aarch64": ["qemu-aarch64"]}.get(TARGET, [])
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
PROGRAM = os.path.join(ROOT, "build/dist", TARGET, "programs/moe")
SENTENCE, FRENCH = "Where is my book?", "Où est mon livre ?\n"
test = Suite()
services = Services(wheel=True)


class Place:
    """A folder that contains only the program, as the root directory if `root`."""

    def __init__(self, folder, root):
        self.folder, self.root = folder, root
        self.program = ("" if root else folder) + "/moe"
        shutil.copy(PROGRAM, folder + "/moe")

    def start(self, *words, name=None, variables=None, **more):
        enter = (lambda: (os.chroot(self.folder), os.chdir("/"))) if self.root else None
        command = [*EMULATOR, self.program] if EMULATOR else [name or self.program]
        return subprocess.Popen([*command, *words], executable=None if EMULATOR else self.program, cwd=self.folder,
                                env=variables or {}, preexec_fn=enter, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, **more)

    def run(self, *words, status=0, **more):
        process = self.start(*words, **more)
        out, err = (text.decode("utf-8") for text in process.communicate(timeout=300))
        assert process.returncode == status, (words, process.returncode, out, err)
        return out, err

    def files(self):
        return sorted(os.path.relpath(os.path.join(folder, name), self.folder)
                      for folder, _, names in os.walk(self.folder) for name in names)


@contextlib.contextmanager
def place(root=False):
    if root and EMULATOR:
        raise Skip("the emulator is not in the root directory")
    if root and os.geteuid() != 0:
        raise Skip("only root can use chroot")
    with tempfile.TemporaryDirectory() as folder:
        yield Place(folder, root)


def sentences():
    """Return README's sentences and 60 others."""
    text = open(os.path.join(ROOT, "README.md"), encoding="utf-8").read()
    found = re.findall(r"^  (\w.*)\n    = ", text, re.M)
    with open(os.path.join(ROOT, "tests/golden/sentences.tsv"), encoding="utf-8") as file:
        found += [line.rstrip("\n").split("\t")[3] for line in file]
    assert len(found) >= 63, len(found)
    return found


def ordinary(name, *words, text=""):
    done = subprocess.run([os.path.join(BIN, name), *words], input=text, capture_output=True, text=True, check=True,
                          env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"})
    return done.stdout


@test
def first_sentence_within_a_second():
    with place() as p:
        begin = time.monotonic()
        assert p.run(SENTENCE, "-t", "fr") == (FRENCH, "")
        assert time.monotonic() - begin < (30 if EMULATOR else 1), time.monotonic() - begin
        assert p.files() == ["moe"]


@test
def a_root_directory_without_other_files():
    with place(root=True) as p:
        assert p.run(SENTENCE, "-t", "fr") == (FRENCH, "")
        assert p.run("-s", "auto", "-t", "en", "Où est mon livre ?")[0] == "Where is my book?\n"
        assert p.run("info", "/moe")[0].startswith("/moe: 26.4 MiB"), p.run("info", "/moe")
        assert p.files() == ["moe"]


@test
def commands_and_texts():
    with place() as p:
        assert p.run("translate", SENTENCE, "-t", "fr")[0] == FRENCH
        assert p.run("-t", "fr", SENTENCE)[0] == FRENCH
        assert p.run("-t", "fr", "--", SENTENCE)[0] == FRENCH
        for command in ("serve", "info"):  # a text that is the name of a command
            assert p.run("-t", "de", "--", command)[0] == ordinary("moe-translate", "-t", "de", command)
        assert p.run("-t", "de", "--", "--help")[0] == ordinary("moe-translate", "-t", "de", "--", "--help")
        version = ordinary("moe-info", "--version").split()[1]
        assert p.run("--version")[0] == f"moe {version}\n"
        listed = re.findall(r"^  (\w+)  +\w", p.run("--help")[0], re.M)
        assert len(listed) == 13, listed
        for command in listed:
            if command not in ("documents", "evaluate"):
                out = p.run(command, "--help")[0]
                assert re.match(rf"Usage: moe {command} ", out), out
                assert not re.search(r"[ (]moe-(translate|server|get|info|prune)[ ;:.]", out), out
                assert version in p.run(command, "--version")[0]


@test
def links_select_a_command():
    if EMULATOR:
        raise Skip("the emulator opens the link's target")
    with place() as p:
        assert p.run("--help", name="moe-get")[0].startswith("Usage: moe-get "), "links keep their names"
        for name in ("moe-translate", p.folder + "/moe-translate", "./moe-translate"):
            assert p.run(SENTENCE, "-t", "fr", name=name)[0] == FRENCH
        assert p.run("--version", name="moe-get")[0] == ordinary("moe-get", "--version")
        os.symlink("moe", p.folder + "/moe-translate")
        done = subprocess.run([p.folder + "/moe-translate", SENTENCE, "-t", "fr"], capture_output=True, text=True,
                              env={}, check=True)
        assert done.stdout == FRENCH, done
        done = subprocess.run(["moe", SENTENCE, "-t", "fr"], capture_output=True, text=True, check=True, cwd="/",
                              env={"PATH": p.folder})
        assert done.stdout == FRENCH, done


@test
def same_bytes_as_other_builds():
    lines = sentences()[:8] if EMULATOR else sentences()
    with place() as p, tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        for options in (["-t", "de", "--json"], ["-t", "fr", "--beam", "2"], ["-s", "auto", "-t", "es"]):
            out = p.run(*options, "-i", file.name)[0]
            assert out == ordinary("moe-translate", *options, "-i", file.name), options


@test
def languages_are_detected_without_files():
    with place() as p:
        lines = ["Dies ist ein Satz über das Wetter in Berlin.\n", "Ceci est une phrase sur le temps à Paris.\n"]
        for line in lines:
            assert p.run("-s", "auto", "-t", "en", line)[0] == ordinary("moe-translate", "-s", "auto", "-t", "en", line)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def server(p, *words, **more):
    port = free_port()
    process = p.start("serve", "--port", str(port), *words, **more)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def answer(url, **fields):
    request = urllib.request.Request(url, json.dumps(fields).encode() if fields else None,
                                     {"Content-Type": "application/json"} if fields else {})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read().decode("utf-8")


@test
def the_server_has_its_page():
    for root in (False, True):
        with contextlib.suppress(Skip) if root else contextlib.nullcontext(), place(root) as p, server(p) as url:
            page = answer(url + "/")
            assert page == open(os.path.join(ROOT, "tools/server/server.html"), encoding="utf-8").read()
            got = json.loads(answer(url + "/translate", q=SENTENCE, source="en", target="fr"))
            assert got["translatedText"] == FRENCH.strip(), got
            assert json.loads(answer(url + "/languages"))[0]["model"] == "en-de-fr-es"
            assert p.files() == ["moe"]


@test
def fetched_models_come_first():
    """moe get writes only to the model folders; the included model translates languages that the fetched one lacks."""
    with place(root=not EMULATOR and os.geteuid() == 0) as p:
        home = "/home" if p.root else p.folder + "/home"
        variables = {"HOME": home, **services.environment()}
        out, _ = p.run("get", "-q", "en-pt", variables=variables)
        assert out == home + "/.cache/moe/firefox/en-pt.bin\n", out
        text = "The contract was signed yesterday in Lisbon."
        assert p.run(text, "-t", "pt", variables=variables)[0] == "O contrato foi assinado ontem em Lisboa.\n"
        assert p.run(SENTENCE, "-t", "fr", variables=variables)[0] == FRENCH
        places = {re.match(r"(moe$|home/\.(local/share|cache)/moe/)", name) is not None for name in p.files()}
        assert places == {True}, p.files()


@test
def certificates_are_verified():
    with place(root=not EMULATOR and os.geteuid() == 0) as p:
        variables = {"HOME": "/home" if p.root else p.folder + "/home", **services.environment("https")}
        authority = open(variables["SSL_CERT_FILE"], "rb").read()
        words = ["get", "--dry-run", "--retries", "1", "en-pt"]
        if p.root:
            del variables["SSL_CERT_FILE"]
            assert "SSL_CERT_FILE" in p.run(*words, variables=variables, status=4)[1]
            os.makedirs(p.folder + "/etc/pki/tls/certs")
            with open(p.folder + "/etc/pki/tls/certs/ca-bundle.crt", "wb") as file:
                file.write(authority)
        p.run(*words, variables=variables)


@test
def the_server_fetches_models():
    if EMULATOR:
        raise Skip("the program cannot start itself under qemu")
    with place() as p:
        variables = {"HOME": p.folder + "/home", **services.environment()}
        with server(p, "--allow-get", variables=variables) as url:
            assert "en-pt" in answer(url + "/models/available") + answer_when_listed(url), "no list"


def answer_when_listed(url):
    for _ in range(100):
        text = answer(url + "/models/available")
        if "en-pt" in text:
            return text
        time.sleep(0.1)
    return ""


@test
def python_programs():
    with place() as p:
        out, err = p.run("documents", "x.docx", status=3)
        assert re.search(r'pip install "moe_translate-[\d.]+-py3-none-manylinux_\w+\.whl\[documents\]"', err), err
        if EMULATOR:
            return
        python = os.path.join(ROOT, ".venv/bin")
        if not os.path.exists(python):
            python = os.path.dirname(sys.executable)
        with open(p.folder + "/a.txt", "w", encoding="utf-8") as file:
            file.write(SENTENCE + "\n")
        variables = {"PATH": python, "PYTHONPATH": ROOT + "/tools/python", "PYTHONDONTWRITEBYTECODE": "1",
                     "MOE_LIBRARY": os.path.join(BIN, "libmoetext.so"), "HOME": p.folder + "/home"}
        assert p.run("documents", "-t", "fr", "a.txt", variables=variables)[0] == FRENCH


NOWHERE = "/nonexistent.bin"
WRONG = [  # arguments, status, part of the message
    (["serv"], 2, "did you mean 'serve'"), (["tranlsate"], 2, "did you mean 'translate'"),
    (["server"], 2, "did you mean 'serve'"), (["moe-get"], 2, "did you mean 'get'"),
    (["help"], 2, "did you mean '--help'"), ([SENTENCE, "-t", "pt"], 2, "fetch one: moe get en-pt"),
    (["get", "--frobnicate"], 2, "see moe get --help"), (["get", "--list"], 4, "HOME"),
    ([], 2, "Usage: moe"), (["--frobnicate"], 2, "--frobnicate"), ([SENTENCE], 2, "missing -t LANG"),
    ([SENTENCE, "-t"], 2, "-t"), ([SENTENCE, "-t", "xx"], 2, "xx"), ([SENTENCE, "-t", "fr", "--beam", "0"], 2, "--beam"),
    ([SENTENCE, "-t", "fr", "-m", NOWHERE], 3, NOWHERE), ([SENTENCE, "-t", "fr", "-m", "/"], 3, "not a regular file"),
    (["-t", "fr", "-i", "/nonexistent"], 4, "/nonexistent"),
    ([SENTENCE, "-t", "fr", "-o", "/nonexistent/x"], 4, "/nonexistent/x"),
    (["info"], 2, "missing argument"), (["info", NOWHERE], 3, NOWHERE),
    (["get"], 2, "no model is named"), (["get", "../x"], 2, "../x"), (["get", "en-pt"], 4, "HOME"),
    (["serve", "--port", "99999999"], 2, "--port"), (["serve", "x"], 2, "unexpected argument 'x'"),
    (["quantize", "a"], 2, "missing argument"), (["documents"], 3, "pip install"), (["evaluate"], 3, "pip install"),
    (["score", "-m", NOWHERE], 3, NOWHERE),
]


@test
def wrong_uses_are_explained():
    assert len(WRONG) >= 20
    problems = []
    with place() as p:
        for words, status, message in WRONG:
            process = p.start(*words, variables=services.environment())
            out, err = (text.decode("utf-8") for text in process.communicate(timeout=120))
            lines = err.strip().split("\n")
            if process.returncode != status or message not in err or out or len(lines) > 1 and words:
                problems.append((words, process.returncode, out, err))
        assert p.files() == ["moe"]
    assert not problems, "\n".join(map(str, problems))


@test
def damaged_programs_are_explained():
    with open(PROGRAM, "rb") as file:
        data = file.read()
    offset = int.from_bytes(data[-56:-48], "little")
    end = data[-64:]
    cases = {
        "a changed model": (data[:offset + 5000] + b"\xff" * 64 + data[offset + 5064:], 3),
        "no model": (data[:offset], 2),
        "an offset outside the file": (data[:-56] + (2 ** 63).to_bytes(8, "little") + end[16:], 2),
        "an odd offset": (data[:-56] + (offset + 1).to_bytes(8, "little") + end[16:], 2),
        "a truncated model": (data[:-1000], 2),
    }
    with place() as p:
        for name, (changed, status) in cases.items():
            with open(p.folder + "/moe", "wb") as file:
                file.write(changed)
            _, err = p.run(SENTENCE, "-t", "fr", status=status)
            *about, last = err.splitlines()
            assert last.startswith("moe-translate: "), (name, err)
            if status == 2:  # the advice that follows is for a program without a model
                assert len(about) == 1 and "download it again" in about[0], (name, err)
                assert last.endswith("or fetch one: moe get en-fr"), (name, err)
            else:
                assert not about, (name, err)
        if EMULATOR:  # it runs programs by their own names only
            return
        with open(p.folder + "/moe", "wb") as file:  # as in a package, with its model elsewhere
            file.write(data[:offset])
        variables = {"MOE_MODEL": os.path.join(ROOT, "models/en-de-fr-es.bin")}
        assert p.run(SENTENCE, "-t", "fr", name="moe-translate", variables=variables) == (FRENCH, "")
        os.makedirs(p.folder + "/share/moe")
        os.makedirs(p.folder + "/bin")
        shutil.copy(variables["MOE_MODEL"], p.folder + "/share/moe")
        os.rename(p.folder + "/moe", p.folder + "/bin/moe")
        p.program = p.folder + "/bin/moe"
        assert p.run(SENTENCE, "-t", "fr") == (FRENCH, "")


@test
def archives_are_complete_and_reproducible():
    folder = os.path.join(ROOT, "build/dist")
    [archive] = glob.glob(f"{folder}/moe-*-{TARGET}.tar.gz")
    version = os.path.basename(archive)[4:-len(f"-{TARGET}.tar.gz")]
    listed = subprocess.run(["tar", "tzf", archive], capture_output=True, text=True, check=True).stdout.split()
    inside = {name.split("/", 1)[1] for name in listed}
    libraries = "curl libexttextcat libmicrohttpd mbedtls pcre2 sentencepiece utf8proc zlib cjson model".split()
    for name in ["moe", "moe-translate", "moe-server", "README.txt", "LICENSE"]:
        assert name in inside, (name, inside)
    for name in libraries:
        assert any(path.startswith(f"licences/{name}/") for path in inside), name
    assert any(re.match(r"libmicrohttpd/.*\.orig\.tar\.", path) for path in inside)
    assert listed == sorted(listed)
    hashes = []
    for _ in range(2):
        subprocess.run([ROOT + "/tools/dist/pack", TARGET, version], check=True, stdout=subprocess.DEVNULL)
        hashes.append([hashlib.sha256(open(path, "rb").read()).hexdigest()
                       for path in (archive, archive[:-len(".tar.gz")])])
    assert hashes[0] == hashes[1]


@test
def objects_are_reproducible():
    """Compile and link everything of ours again, in another folder."""
    with tempfile.TemporaryDirectory() as again:
        variables = subprocess.run([ROOT + "/tools/dist/libraries", "--variables", TARGET], capture_output=True,
                                   text=True, check=True).stdout.strip()
        command = f"nice make -s -C '{ROOT}' {variables} BUILD='{again}' BIN='{again}' '{again}/moe'"
        subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL)
        with open(again + "/moe", "rb") as new, open(PROGRAM, "rb") as old:
            assert new.read() == old.read()


if __name__ == "__main__":
    failed = test.run(sys.argv[2] if len(sys.argv) > 2 else "")
    services.close()
    sys.exit(failed)
