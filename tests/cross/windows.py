#!/usr/bin/env python3
"""Test the programs for Windows x86-64 with wine.

Usage: tests/python tests/cross/windows.py [NAME]    (make test-targets)

Builds the programs in build/windows with MinGW and the libraries of tools/dist/libraries. Their results must equal
tests/golden/hashes.txt and those of this machine's programs, in the folder BIN. Requires tools/install-deps --targets.
wine treats Linux pipes as files that are always ready, so interrupt.c creates the pipes of programs that wait.
"""
import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

import targets
import wine
from suite import Suite

sys.path.insert(0, os.path.join(targets.ROOT, "tests/get"))
import certificates  # noqa: E402
from services import Services  # noqa: E402

ROOT = targets.ROOT
TARGET, BUILD = "windows-x86_64", os.path.join(ROOT, "build/windows")
NATIVE = os.path.join(ROOT, targets.BIN, "moe-translate")
SHIPPED, EN_PT = (os.path.join(ROOT, path) for path in (targets.SHIPPED, targets.EN_PT))
MINGW = "x86_64-w64-mingw32-"
FLAGS = ["-std=gnu11", "-O1", "-static", "-municode"]
SMILE = "\U0001F600"
test = Suite()


def environment(**more):
    return wine.environment(os.path.join(BUILD, "prefix"), **more)


def start(program, *words, **more):
    more = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT,
            "env": environment(), **more}
    return subprocess.Popen(["wine64", os.path.join(BUILD, program + ".exe"), *words], **more)


def run(program, *words, text=None, status=0, **more):
    """Run a program; return the bytes of its standard output, and standard error as text."""
    if text is not None:
        more["stdin"] = subprocess.PIPE
    with start(program, *words, **more) as process:
        out, err = process.communicate(text, timeout=300)
    err = "".join(line for line in err.decode().splitlines(True) if not line.startswith("wine"))
    assert status in (process.returncode, None), (words, process.returncode, err[-500:])
    return out, err


def windows(path):
    return "Z:" + path.replace("/", "\\")


def sentences():
    return "".join(row[2] + "\n" for row in targets.sentences(targets.SHIPPED) if row[0] == "de").encode()


def native(*words, text=b""):
    return subprocess.run([NATIVE, "-q", "-m", SHIPPED, *words], input=text, capture_output=True, check=True).stdout


def compiled(name, *words, flags=FLAGS):
    command = [MINGW + "gcc-posix", *flags, "-I.", *words, "-o", os.path.join(BUILD, name + ".exe")]
    subprocess.run(command, cwd=ROOT, check=True)


# ---- Build ----

@test
def programs_are_built():
    made = subprocess.run(["tools/dist/libraries", "--variables", TARGET], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-1000:]
    names = "translate info score classify quantize calibrate prune routing align server get".split()
    goals = [f"{BUILD}/moe-{name}.exe" for name in names] + [f"{BUILD}/libmoetext.dll"]
    alone = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}  # not a part of make -j
    done = subprocess.run(["make", "-s", *shlex.split(made.stdout), f"BUILD={BUILD}", f"BIN={BUILD}", *goals], cwd=ROOT,
                          capture_output=True, text=True, env=alone)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr[-2000:]
    compiled("interrupt", "tests/cross/interrupt.c")


@test
def no_vector_is_moved_with_alignment():
    command = [MINGW + "objdump", "-d", f"{BUILD}/moe.o"]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert code.count("%ymm") > 1000 and code.count("%zmm") > 1000  # there are kernels
    aligned = re.findall(r"\b(?:vmovdqa\w*|vmovap[sd]|vmovnt\w+)\s.*\(.*", code)  # with an operand in memory
    assert not aligned, aligned[:3]


@test
def first_sentence_in_an_empty_prefix_takes_ten_seconds():
    prefix = os.path.join(BUILD, "prefix")
    shutil.rmtree(prefix, ignore_errors=True)
    begin = time.monotonic()
    out, _ = run("moe-translate", "-m", SHIPPED, "-t", "fr", "Where is my book?")
    seconds, load = time.monotonic() - begin, max(1, os.getloadavg()[0] / os.cpu_count())
    assert out.decode() == "Où est mon livre ?\n"
    # Keep wine's services, which inherit the first program's streams, so that the next programs start at once.
    subprocess.run(["wineserver64", "-p"], env=environment(), check=True)
    with start("moe-info", "--version", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        assert process.wait() == 0
    assert seconds < 10 * load, (seconds, load)


# ---- Results ----

@test
def texts_have_the_recorded_hashes():
    for case, model in ("README text", targets.SHIPPED), ("en-pt text", targets.EN_PT):
        lines = []
        for target in dict.fromkeys(row[0] for row in targets.sentences(model)):
            text = "".join(row[2] + "\n" for row in targets.sentences(model) if row[0] == target)
            out, _ = run("moe-translate", "-q", "-m", model, *(["-t", target] if target != "-" else []),
                         text=text.encode())
            lines += out.decode().split("\n")[:-1]
        targets.check(case, lines)


@test
def all_kernels_give_the_same_bytes():
    wanted = native("-t", "de", text=sentences())
    for isa in "portable", "avx2", "auto":
        out, _ = run("moe-translate", "-q", "-m", SHIPPED, "-t", "de", "--isa", isa, text=sentences())
        assert out == wanted, isa


@test
def a_program_in_c_calls_the_library():
    compiled("text", "-Itools/text", "tools/text/examples/text.c", f"{BUILD}/libmoetext.dll", flags=["-std=c11"])
    out, _ = run("text", env=environment(MOE_MODEL=windows(SHIPPED)))
    assert out.splitlines() == native("-t", "de", "--beam", "4",
                                      text=b"Good morning, my friend.\nWhere is my book?\n").splitlines()


@test
def posix_functions_work():
    library = f"build/dist/{TARGET}"
    compiled("posix", "-Itests/cross", "-Itools/windows", "-include", "tools/windows/posix.h", "-DPCRE2_STATIC",
             "-isystem", f"{library}/include", "tests/cross/posix_calls.c", "tools/windows/posix.c", f"-L{library}/lib",
             "-lpcre2-8", "-lws2_32", "-ladvapi32", "-lpthread", flags=["-std=gnu11", "-static"])
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        out, _ = run("posix", cwd=folder, status=None)
        assert b"not ok" not in out and out.count(b"\nok ") == int(out.split(b"\n")[0][3:]), out
        assert os.listdir(folder) == []


@test
def published_folders_are_converted():
    folder = targets.converting.student("enpt")
    wanted = subprocess.run([NATIVE, "-m", EN_PT, "Where is my book?"], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(dir=BUILD) as cache:
        more = environment(XDG_CACHE_HOME=windows(cache), TEMP=windows(cache))
        for words in ["--no-cache"], [], []:
            assert run("moe-translate", "-m", windows(folder), *words, "Where is my book?", env=more)[0] == wanted
            assert len(os.listdir(cache)) == (not words), os.listdir(cache)
        with open(EN_PT, "rb") as a, open(next(pathlib.Path(cache).rglob("*.bin")), "rb") as b:
            assert a.read() == b.read()


@test
def a_model_may_follow_five_gigabytes():
    offset = 5 << 30
    with open(SHIPPED, "rb") as file:
        model = file.read()
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        with open(f"{folder}/sparse.bin", "wb") as file:  # tools/text/contained.h describes the end
            file.seek(offset)
            file.write(model + b"moe\nend\n" + struct.pack("<QQ", offset, len(model)) + b"sparse".ljust(40, b"\0"))
        out, _ = run("moe-translate", "-m", "sparse.bin", "-t", "fr", "Where is my book?", cwd=folder)
        assert out.decode() == "Où est mon livre ?\n"


# ---- Arguments, paths, lines ----

@test
def arguments_and_paths_are_utf8():
    name = f"Über {SMILE} ж"
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        os.mkdir(f"{folder}/{name}")
        shutil.copy(SHIPPED, f"{folder}/{name}/{SMILE}.bin")
        with open(f"{folder}/{name}/in {SMILE}.txt", "w", encoding="utf-8") as file:
            file.write(f"I like {SMILE} and café.\n")
        wanted = native("-t", "de", f"I like {SMILE} and café.")
        assert SMILE in wanted.decode()
        for model in f"{name}/{SMILE}.bin", f"{name}\\{SMILE}.bin", windows(f"{folder}/{name}/{SMILE}.bin"):
            assert run("moe-translate", "-m", model, "-t", "de", f"I like {SMILE} and café.", cwd=folder)[0] == wanted
        run("moe-translate", "-m", f"{name}/{SMILE}.bin", "-t", "de", "-i", f"{name}\\in {SMILE}.txt", "-o",
            f"{name}\\out {SMILE}.txt", cwd=folder)
        with open(f"{folder}/{name}/out {SMILE}.txt", "rb") as file:
            assert file.read() == wanted
        _, err = run("moe-translate", "-m", f"{name}\\none.bin", "x", cwd=folder, status=3)
        assert f"{name}\\none.bin: No such file or directory" in err, err
        _, err = run("moe-translate", "-m", f"{name}/{SMILE}.bin", "-t", "de", "-o", "none\\out", "x", cwd=folder,
                     status=4)
        assert "missing folder" in err, err


@test
def question_marks_are_no_patterns():
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        open(f"{folder}/Whys", "w", encoding="utf-8").close()
        assert run("moe-translate", "-m", SHIPPED, "-t", "de", "Why?", cwd=folder)[0] == native("-t", "de", "Why?")
        assert run("moe-translate", "-m", SHIPPED, "-t", "de", 'a "b" c\\', cwd=folder)[0] == \
            native("-t", "de", 'a "b" c\\')


@test
def lines_may_end_with_crlf():
    text, wanted = sentences(), native("-t", "de", text=sentences())
    assert run("moe-translate", "-m", SHIPPED, "-q", "-t", "de", text=text.replace(b"\n", b"\r\n"))[0] == wanted
    assert b"\r" not in wanted


@test
def options_may_be_in_a_file_with_crlf():
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        with open(f"{folder}/glossary", "wb") as file:
            file.write(b"book\tWerk\r\n")
        out, _ = run("moe-translate", "-m", SHIPPED, "-t", "de", "--glossary", windows(f"{folder}/glossary"),
                     "Where is my book?")
        assert b"Werk" in out, out


# ---- Failures ----

@test
def failed_output_is_reported():
    with open("/dev/full", "wb") as full:
        _, err = run("moe-translate", "-m", SHIPPED, "-t", "de", "Hello.", stdout=full, status=4)
    assert "standard output: No space left on device" in err, err
    script = f"exec wine64 {BUILD}/moe-translate.exe -m {targets.SHIPPED} -t de Hello. >&-"
    closed = subprocess.run(["sh", "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert closed.returncode == 4 and "standard output" in closed.stderr, (closed.returncode, closed.stderr)
    with start("moe-translate", "-m", SHIPPED, "-q", "-t", "de", stdin=subprocess.PIPE) as process:
        process.stdout.close()
        process.stdin.write(sentences())
        process.stdin.close()
        assert process.wait(timeout=100) == 4, process.returncode
        assert b"Broken pipe" in process.stderr.read()


@test
def ctrl_c_ends_with_a_status_and_whole_lines():
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        with open(f"{folder}/in", "wb") as file:
            file.write(sentences() * 2000)
        program = windows(f"{BUILD}/moe-translate.exe")
        out, err = run("interrupt", "4", "1", program, "-m", windows(SHIPPED), "-t", "de", cwd=folder)
        assert out == b"status 130\n" and "stopped by signal 2; 0 complete lines" in err, (out, err)
        out, err = run("interrupt", "6", "1", program, "-m", windows(SHIPPED), "-t", "de", "-i", "in", "-o", "out",
                       cwd=folder)
        assert out == b"status 130\n" and "stopped by signal 2" in err, (out, err)
        with open(f"{folder}/out", "rb") as file:
            lines = file.read()
        n = lines.count(b"\n")
        assert n == int(re.search(r"(\d+) complete lines", err)[1]) and (not n or lines.endswith(b"\n"))
        text = b"".join((sentences() * 2000).splitlines(True)[:min(n, 60)])
        assert lines.startswith(native("-t", "de", text=text))
        assert sorted(os.listdir(folder)) == ["in", "out"]


@test
def ctrl_c_leaves_no_partial_model():
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        big = os.path.join(folder, "big.bin")
        subprocess.run([os.path.join(os.path.dirname(NATIVE), "moe-quantize"), SHIPPED, big, "f32"], check=True,
                       capture_output=True)
        out, _ = run("interrupt", "0.4", "3", windows(f"{BUILD}/moe-quantize.exe"), "big.bin", "out.bin", "q8",
                     cwd=folder)
        status = int(out.split()[1])
        left = sorted(os.listdir(folder))
        assert (status, left) in ((130, ["big.bin"]), (0, ["big.bin", "out.bin"])), (status, left)


# ---- Server and moe-get ----

@contextlib.contextmanager
def running_server(*options, command=(windows(f"{BUILD}/moe-server.exe"),), **more):
    """Start moe-server, yield its address, and send ^C."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    with tempfile.TemporaryDirectory(dir=BUILD) as folder, \
         start("interrupt", f"{folder}/end", "1", *command, "--port", str(port), *options, **more) as process:
        while process.poll() is None:
            try:
                urllib.request.urlopen(url + "health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        try:
            yield url
        finally:
            open(f"{folder}/end", "w", encoding="utf-8").close()
            out, err = process.communicate(timeout=100)
    assert out == b"status 0\n" and f"at {url}".encode() in err, (out, err)


@test
def server_answers_and_ends_with_ctrl_c():
    with running_server("-m", windows(SHIPPED)) as url:
        with urllib.request.urlopen(url, timeout=30) as page:
            assert b"<title>moe</title>" in page.read()
        body = urllib.parse.urlencode({"q": "Where is my book?", "source": "en", "target": "fr"}).encode()
        with urllib.request.urlopen(url + "translate", body, timeout=30) as answer:
            assert "Où est mon livre ?" in answer.read().decode()


@test
def server_starts_moe_get():
    with Services() as services, tempfile.TemporaryDirectory(dir=BUILD) as folder:
        more = environment(**services.environment("http"), XDG_DATA_HOME=windows(folder),
                           XDG_CACHE_HOME=windows(folder))
        with running_server("-m", windows(SHIPPED), "--allow-get", env=more) as url:
            with urllib.request.urlopen(url + "models/fetch", b"model=en-pt", timeout=30) as answer:
                assert answer.status == 202
            state = {"state": "running"}
            while state["state"] == "running":
                time.sleep(0.2)
                with urllib.request.urlopen(url + "models", timeout=30) as answer:
                    state = json.load(answer)["job"]
        assert (state["state"], state["model"]) == ("failed", "en-pt"), state  # its models are random bytes
        assert "firefox/en-pt" in state["message"] and os.path.exists(f"{folder}/moe/firefox/en-pt/moe-get.json"), state


@test
def missing_features_are_named():
    for words in ["--listen", "unix:x"], ["--reuse-port"], ["--reload"], ["--pid-file", "x"]:
        _, err = run("moe-server", "-m", SHIPPED, *words, status=2)
        assert f"{words[0]} is not supported on Windows" in err, err


@test
def moe_get_fetches_over_http_and_https():
    with Services() as services, tempfile.TemporaryDirectory(dir=BUILD) as folder:
        for listener in "http", "https":
            more = {k: windows(v) if v.startswith("/") else v for k, v in services.environment(listener).items()}
            more["XDG_DATA_HOME"] = windows(f"{folder}/{listener}")
            out, err = run("moe-get", "--no-convert", "--retries", "2", "en-pt", env=environment(**more))
            assert "verified" in err and out.decode().strip().endswith(f"{listener}/moe/firefox/en-pt"), (out, err)
            assert "moe-get.json" in os.listdir(f"{folder}/{listener}/moe/firefox/en-pt")
            assert b"firefox/en-pt" in run("moe-get", "--list", env=environment(**more))[0]
            run("moe-get", "rm", "en-pt", env=environment(**more))
            assert not os.path.exists(f"{folder}/{listener}/moe/firefox")
        # Name another authority: unlike Windows, wine verifies nothing without a file.
        more = {**services.environment("https"), "XDG_DATA_HOME": windows(folder),
                "SSL_CERT_FILE": windows(certificates.authority("theirs"))}
        _, err = run("moe-get", "--no-convert", "--retries", "0", "en-pt", env=environment(**more), status=None)
        assert "certificate" in err.lower(), err
        out, _ = run("moe-get", "--no-convert", "en-pt", env=environment(**services.environment("http")))
        assert out.decode().strip().endswith("AppData/Local/moe/models/firefox/en-pt"), out


@test
def one_program_contains_all():
    subprocess.run(["make", "-s", "dist-" + TARGET], cwd=ROOT, check=True, capture_output=True)
    os.makedirs(BUILD, exist_ok=True)
    compiled("interrupt", "tests/cross/interrupt.c")
    french = "Où est mon livre ?\n"
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        for name in "moe.exe", "moe-translate.exe":
            shutil.copy(os.path.join(ROOT, "build/dist", TARGET, "programs/moe.exe"), os.path.join(folder, name))
        more = {"cwd": folder, "env": environment(XDG_DATA_HOME=windows(folder), XDG_CACHE_HOME=windows(folder))}
        program = os.path.join(folder, "moe")
        for words in ["Where is my book?", "-t", "fr"], ["translate", "-t", "fr", "--", "Where is my book?"]:
            assert run(program, *words, **more)[0].decode() == french
        assert run(program + "-translate", "-t", "fr", "Where is my book?", **more)[0].decode() == french
        assert run(program, "-t", "de", text=sentences(), **more)[0] == native("-t", "de", text=sentences())
        assert b"translate" in run(program, "--help", **more)[0]
        assert run(program, "get", "--list", **more)[0] == b""
        for words, status, said in ((["trnslate"], 2, "did you mean 'translate'"),
                                    (["documents", "x"], 3, "pip install"),
                                    (["serve", "--listen", "unix:x"], 2, "--listen is not supported on Windows")):
            _, err = run(program, *words, status=status, **more)
            assert said in err, (words, err)
        left = sorted(os.listdir(folder))
        assert left == ["moe-translate.exe", "moe.exe"], left
        with running_server(command=[windows(program + ".exe"), "serve"], **more) as url:
            with urllib.request.urlopen(url, timeout=30) as page:
                assert b"<title>moe</title>" in page.read()


if __name__ == "__main__":
    failed = test.run(*sys.argv[1:2])
    subprocess.run(["wineserver64", "-k"], env=environment())
    sys.exit(failed)
