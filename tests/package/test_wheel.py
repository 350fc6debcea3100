#!/usr/bin/env python3
"""Test that `make wheel` builds a wheel that works in an environment without this repository.

Usage: tests/python tests/package/test_wheel.py
Prints `ok NAME` or `FAIL NAME` per test. Without a package registry the tests are skipped, unless CI is set.
"""

import glob
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

from suite import Skip, Suite

try:
    import numpy
except ImportError:
    numpy = None

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("BUILD", "build")
MODEL = ROOT / "models/en-de-fr-es.bin"
WORK = pathlib.Path(tempfile.mkdtemp())
PYTHON = WORK / "venv/bin/python"
UNREACHABLE = re.compile(r"No matching distribution|Could not find a version|onnection|Could not fetch|resolution")
test = Suite()
numpy_test = test.needs(numpy, "NumPy")


def run(*command, status=0, data="", clean=True, **more):
    """Run a program without the environment variables of this repository; return its output and messages."""
    dropped = ("PYTHONPATH", "MOE_LIBRARY", "MOE_MODEL", "LD_LIBRARY_PATH", "BIN")
    env = {**{k: v for k, v in os.environ.items() if not clean or k not in dropped}, **more}
    done = subprocess.run(list(map(str, command)), input=data, capture_output=True, text=True, env=env, cwd=WORK)
    log = done.stdout + done.stderr
    if done.returncode and UNREACHABLE.search(log) and not os.environ.get("CI"):
        raise Skip("the package registry cannot be reached")
    assert done.returncode == status, (command, done.returncode, log[-1500:])
    return log


def documents(name, text, status=0, **more):
    path = WORK / name
    path.write_text(text, encoding="utf-8")
    return run(WORK / "venv/bin/moe-documents", "-q", "-t", "de", path, status=status, **{"MOE_MODEL": str(MODEL), **more})


def wheel():
    found = glob.glob(str(BUILD / "wheel/*.whl"))
    if len(found) != 1:
        raise Skip("no wheel was built")
    return pathlib.Path(found[0])


def in_venv(code, status=0, **more):
    if not PYTHON.exists():
        raise Skip("no wheel was installed")
    return run(PYTHON, "-c", code, status=status, **more)


@test
def make_wheel_builds_one_wheel_for_every_python_3():
    if sys.platform != "linux":
        raise Skip("auditwheel is Linux's")
    run("make", "-s", "-C", ROOT, "wheel", "BUILD=" + os.environ.get("BUILD", "build"))
    assert re.fullmatch(r"moe_translate-\d+\.\d+\.\d+-py3-none-manylinux_2_\d+_\w+\.whl", wheel().name), wheel().name
    assert wheel().stat().st_size < 5e6


@test
def the_wheel_installs_without_a_package_registry():
    made = wheel()
    run(sys.executable, "-m", "venv", WORK / "venv")
    offline = ["unshare", "-rn"] if shutil.which("unshare") and not subprocess.run(["unshare", "-rn", "true"]).returncode else []
    run(*offline, PYTHON, "-m", "pip", "install", "--quiet", "--no-index", made)
    code = f"import moe_translate as m; print(m.Translator({str(MODEL)!r}, target='de').translate('It rains.'))"
    assert run(*offline, PYTHON, "-c", code) == "Es regnet.\n"
    assert documents("a.srt", "1\n00:00:01,000 --> 00:00:02,000\nIt rains.\n").splitlines()[2] == "Es regnet."
    log = documents("a.md", "# Good morning!\n", status=3)
    assert "pip install markdown-it-py" in log and log.count("\n") == 1, log
    table = WORK / "table.tsv"
    table.write_text("a\tb\n", encoding="utf-8")
    log = run(WORK / "venv/bin/moe-evaluate", table, status=3)
    assert "pip install sacrebleu" in log and log.count("\n") == 1, log
    assert "py.typed" in run(PYTHON, "-m", "zipfile", "-l", made)
    version = re.search(r'MOE_VERSION "(.*)"', (ROOT / "moe.h").read_text(encoding="utf-8"))[1]
    assert in_venv("import moe_translate as m; print(m.__version__)") == version + "\n"
    assert f"Version: {version}\n" in run(PYTHON, "-m", "pip", "show", "moe-translate")


@test
def the_wheel_uses_its_own_libraries():
    code = f"""
import re, moe_translate as m
print(m.Translator({str(MODEL)!r}, target="de").translate("Where is my book?"), m.__file__)
maps = open("/proc/self/maps").read()
print(*sorted(set(re.findall(r"/\\S+/lib(?:moetext|sentencepiece|pcre2|exttextcat|utf8proc)\\S*", maps))), sep="\\n")
"""
    first, *libraries = in_venv(code).splitlines()
    assert first.startswith("Wo ist mein Buch? " + str(WORK)), first
    assert len(libraries) == 5 and all(x.startswith(str(WORK)) for x in libraries), libraries
    code = "import moe_translate as m; print(m.Translator(target='de').translate('It rains.'))"
    assert in_venv(code, MOE_MODEL=str(MODEL)) == "Es regnet.\n"


@test
def the_wheel_contains_moe_translate():
    in_venv("")
    program = WORK / "venv/bin/moe-translate"
    for command in (program,), (PYTHON, "-m", "moe_translate"):
        assert run(*command, "-t", "de", "-m", MODEL, data="Where is my book?\nIt rains.\n") == (
            "Wo ist mein Buch?\nEs regnet.\n"
        )
        assert run(*command, "-t", "de", "It rains.", MOE_MODEL=str(MODEL)) == "Es regnet.\n"
        log = run(*command, "--no-such-option", status=2)
        assert log.startswith("moe-translate: ") and "--no-such-option" in log, log
    version = re.search(r'MOE_VERSION "(.*)"', (ROOT / "moe.h").read_text(encoding="utf-8"))[1]
    assert version in run(program, "--version")
    (file,) = WORK.glob("venv/lib/python*/site-packages/moe_translate/moe-translate")
    needed = subprocess.run(["ldd", file], capture_output=True, text=True, env={}).stdout
    for library in "libsentencepiece", "libpcre2-8", "libexttextcat", "libutf8proc":
        assert re.search(rf"{library}\S* => {re.escape(str(WORK))}", needed), needed
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([program, "-q", "-m", MODEL, "-t", "de"], **pipes) as running:
        running.stdin.write(b"It rains.\n")
        running.stdin.flush()
        assert running.stdout.readline() == b"Es regnet.\n"  # by now, moe-translate has replaced the Python process
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == 128 + signal.SIGTERM
    file.chmod(0o644)
    try:
        assert "cannot run" in run(program, "It rains.", status=3)
        file.rename(file.with_name("away"))
        assert "program not found" in run(program, "It rains.", status=3)
    finally:
        if file.with_name("away").exists():
            file.with_name("away").rename(file)
        file.chmod(0o755)


@numpy_test
def the_wheel_contains_data_for_language_detection():
    sys.path.insert(0, str(ROOT / "tests/convert"))
    from test_hf_tokens import checkpoint, converted

    with checkpoint("nllb") as c:  # models of NLLB need a source language
        model = converted(c)
        code = f"""
import moe_translate as m
with m.Translator({model!r}, target="deu_Latn", source="auto", max_len=12) as t:
    print(t.translate("Les enfants jouent près de la vieille maison, qui est déjà fermée."))
"""
        translated = in_venv(code)
        assert translated == in_venv(code.replace("auto", "fra_Latn")) != in_venv(code.replace("auto", "eng_Latn"))
        (data,) = WORK.glob("venv/lib/python*/site-packages/moe_translate/libexttextcat")
        for path in data.glob("*.lm"):
            path.rename(path.with_suffix(".away"))
        try:
            assert "fingerprint" in in_venv(code, status=1)
        finally:
            for path in data.glob("*.away"):
                path.rename(path.with_suffix(".lm"))


@test
def documents_are_translated_and_missing_packages_reported():
    in_venv("")
    run(PYTHON, "-m", "pip", "install", "--quiet", f"{wheel()}[documents,evaluate]")
    markdown, po = "# Good morning!\n", 'msgid "Good morning!"\nmsgstr ""\n'
    assert documents("a.md", markdown) == "# Guten Morgen!\n"
    header = 'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    assert "Guten Morgen!" in documents("a.po", header + po)
    run(PYTHON, "-m", "pip", "uninstall", "--quiet", "--yes", "polib", "markdown-it-py")
    for name, text, package in ("a.md", markdown, "markdown-it-py"), ("a.po", po, "polib"):
        log = documents(name, text, status=3)
        assert f"missing package {package}: {PYTHON} -m pip install {package}\n" in log and log.count("\n") == 1, log


@test
def library_errors_are_reported():
    in_venv("")
    (part,) = WORK.glob("venv/lib/python*/site-packages/moe_translate.libs/libutf8proc*")
    part.rename(part.with_name("away"))
    try:
        log = documents("a.txt", "Good morning!\n", status=3)
    finally:
        part.with_name("away").rename(part)
    assert "cannot load" in log and part.name in log and log.count("\n") == 1, log
    log = documents("a.txt", "Good morning!\n", status=3, MOE_LIBRARY="/no/such/library.so")
    assert "MOE_LIBRARY: no such file: /no/such/library.so" in log and log.count("\n") == 1, log
    log = documents("a.txt", "Good morning!\n", status=3, MOE_LIBRARY=str(ROOT / "moe.h"))
    assert "cannot load" in log and "moe.h" in log and log.count("\n") == 1, log


@test
def scores_are_computed():
    table = WORK / "table.tsv"
    table.write_text("a b c d e\ta b c d e\n", encoding="utf-8")
    assert "100.00  100.00" in run(WORK / "venv/bin/moe-evaluate", table)


@test
def the_source_distribution_installs_without_the_repository():
    run("make", "-s", "-C", ROOT, "sdist", "BUILD=" + os.environ.get("BUILD", "build"))
    (made,) = (BUILD / "sdist").glob("moe_translate-*.tar.gz")
    first = made.read_bytes()
    assert len(first) < 5e6
    run("make", "-s", "-C", ROOT, "sdist", "BUILD=" + os.environ.get("BUILD", "build"))
    assert made.read_bytes() == first, "other bytes for the same files"
    run(sys.executable, "-m", "venv", WORK / "sdist")
    alone = shutil.copy(made, WORK)
    run(WORK / "sdist/bin/pip", "install", "--quiet", "--no-cache-dir", alone)
    code = f"""
import moe_translate as m, pathlib
print(m.Translator({str(MODEL)!r}, target="de").translate("It rains."))
print(*sorted(str(x.relative_to(pathlib.Path(m.__file__).parent)) for x in pathlib.Path(m.__file__).parent.rglob("*")))
"""
    translation, names = run(WORK / "sdist/bin/python", "-c", code).splitlines()
    assert translation == "Es regnet."
    for name in "libmoetext.so", "moe-translate", "evaluate.py", "py.typed", "notices/moe":
        assert name in names.split(), names


if __name__ == "__main__":
    try:
        sys.exit(test.run(*sys.argv[1:]))
    finally:
        shutil.rmtree(WORK)
