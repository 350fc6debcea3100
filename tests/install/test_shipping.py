#!/usr/bin/env python3
"""Test tools/text/SHIPPING.md: build its examples against an installed prefix, and run them.

Usage: tests/python tests/install/test_shipping.py
Prints `ok NAME` or `FAIL NAME` per test. Requires only the standard library, pkg-config and, for two tests, CMake. BIN
and BUILD are the folders of the build.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

from suite import Skip, Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN, BUILD = os.environ.get("BIN", "."), os.environ.get("BUILD", "build")
WORK = tempfile.mkdtemp()
PREFIX = WORK + "/prefix"
MODEL = ROOT + "/models/en-de-fr-es.bin"
test = Suite()

with open(ROOT + "/tools/text/SHIPPING.md", encoding="utf-8") as file:
    PAGE = file.read()


def block(language, word):
    """Return the only code block of a language that contains a word."""
    found, = (x for x in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M) if word in x)
    return found


def run(*command, cwd=WORK, status=0, **more):
    env = {**os.environ, "PKG_CONFIG_PATH": PREFIX + "/lib/pkgconfig", "LD_LIBRARY_PATH": PREFIX + "/lib", **more}
    env.pop("MOE_MODEL", None)
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=300)
    assert done.returncode == status, (command, done.returncode, done.stdout[-1500:])
    return done.stdout


def folder(name, **files):
    path = os.path.join(WORK, name)
    os.mkdir(path)
    for file_name, text in files.items():
        with open(os.path.join(path, file_name.replace("__", ".")), "w", encoding="utf-8") as out:
            out.write(text)
    return path


def is_sanitized():
    return "__asan_init" in run("nm", os.path.join(ROOT, BIN, "libmoe.a"))


def example(name):
    with open(f"{ROOT}/tools/text/examples/{name}", encoding="utf-8") as text:
        return text.read()


# Vector kernels take the compiler most of its time: tests that compile the engine leave them out.
def cmake(path, **variables):
    if not shutil.which("cmake"):
        raise Skip("no cmake here")
    run("cmake", "-S", path, "-B", path + "/out", *(f"-D{k}={v}" for k, v in variables.items()))
    run("cmake", "--build", path + "/out")
    return path + "/out/app"


def install():
    if is_sanitized():
        raise Skip("a sanitized library needs flags of the compiler")
    if not os.path.exists(PREFIX):
        run("make", "-s", "-o", "all", "install", "PREFIX=" + PREFIX, "BIN=" + BIN, "BUILD=" + BUILD, cwd=ROOT)


@test
def cmake_finds_the_installed_library():
    install()
    app = cmake(folder("installed", CMakeLists__txt=block("cmake", "MOETEXT"), app__c=example("text.c")))
    assert run(app) == "Guten Morgen, mein Freund.\nWo ist mein Buch?\n"


@test
def cmake_builds_the_engine():
    path = folder("engine", CMakeLists__txt=block("cmake", "MOE_DIR"), app__c=example("ids.c"))
    app = cmake(path, MOE_DIR=ROOT, CMAKE_C_FLAGS="-DMOE_PORTABLE")
    assert run(app, MODEL, "de").split() == "1747 392 4731 266 1680 2962 264".split()


@test
def archives_are_linked_statically():
    install()
    path = folder("static", app__c=example("text.c"), ids__c=example("ids.c"))
    run("sh", "-ec", block("sh", "libmoetext.a"), cwd=path, PREFIX=PREFIX)
    assert "libmoe" not in run("ldd", path + "/app")
    assert run(path + "/app", PATH=f"{PREFIX}/bin:{os.environ['PATH']}").startswith("Guten Morgen")
    run("sh", "-ec", block("sh", "-static").replace("cc ", "cc -DMOE_PORTABLE "), cwd=path, MOE_DIR=ROOT)
    assert run(path + "/ids", MODEL, "de").split()[:2] == ["1747", "392"]


@test
def a_model_in_an_archive_is_opened():
    install()
    path = folder("archive", app__c=block("c", "moe_source"))
    flags = run("pkg-config", "--cflags", "--libs", "moetext").split()
    run("cc", "-Wall", "-Wextra", "-Werror", "app.c", *flags, "-o", "app", cwd=path)
    with open(MODEL, "rb") as model, open(path + "/archive", "wb") as archive:
        data = model.read()
        archive.write(b"x" * 1001 + data + b"more")
    assert run(path + "/app", path + "/archive", "1001", str(len(data))) == "Wo ist mein Buch?\n"
    refused = run(path + "/app", path + "/archive", "1000", str(len(data)), status=1)
    assert refused.startswith(f"{path}/archive: ") and "not a moe model file" in refused, refused


@test
def every_library_of_libmoetext_is_named():
    install()
    flags = run("pkg-config", "--static", "--libs", "moetext")
    for name, title in {"sentencepiece": "SentencePiece", "pcre2-8": "PCRE2", "exttextcat-2.0": "libexttextcat",
                        "utf8proc": "utf8proc", "cjson": "cJSON", "z": "zlib"}.items():
        assert "-l" + name in flags and re.search(rf"^\| {title}", PAGE, re.M), name
    others = set(re.findall(r"-l(\S+)", flags)) - {"moetext", "sentencepiece", "pcre2-8", "exttextcat-2.0", "utf8proc",
                                                   "cjson", "z", "stdc++", "m"}
    assert not others, others


if __name__ == "__main__":
    try:
        sys.exit(test.run())
    finally:
        shutil.rmtree(WORK)
