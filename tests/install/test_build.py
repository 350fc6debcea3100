#!/usr/bin/env python3
"""Test `make` when the compiler is installed late, the user is not root, or flags change. Also test its messages, the
packages that it installs, and the output of tests/run.

Usage: tests/python tests/install/test_build.py
Requires only the standard library. Builds use a separate folder.
"""
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile

from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
COMPILER = os.environ.get("CC") or "cc"
test = Suite()


def script(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write("#!/bin/sh\n" + text)
    os.chmod(path, 0o755)
    return path


def text_of(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


OURS = "MAKE", "MFLAGS", "CFLAGS", "HARDEN", "EXTRA", "WERROR", "CI", "DEPS", "CUDA", "NVCC"


def made(work, *words, status=0, **more):
    """Run make in a separate build folder; return its output."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    done = subprocess.run(["make", f"BUILD={work}/build", f"BIN={work}/build", *words], cwd=ROOT, env={**clean, **more},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == status, (done.returncode, done.stdout[-1500:])
    return done.stdout


def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


@test
def flags_do_not_depend_on_when_the_compiler_is_installed():
    with tempfile.TemporaryDirectory() as work:
        real = shutil.which(COMPILER.split()[0])
        kept = script(work + "/kept", f'exec {real} "$@"\n')  # a link would change argv[0], which ccache uses
        late = script(work + "/install", f"[ -e {work}/late ] || ln -s {kept} {work}/late\n")
        first = made(work, f"CC={work}/late", "DEPS=" + late, "CXX=c++", work + "/build/bytes.o")
        there = bytes_of(work + "/build/bytes.o")
        assert "-D_FORTIFY_SOURCE=" in first and "not found" not in first, first
        assert " -c " not in made(work, f"CC={work}/late", "DEPS=" + late, "CXX=c++", work + "/build/bytes.o")
        os.remove(work + "/build/bytes.o")
        made(work, f"CC={work}/late", "DEPS=" + late, "CXX=c++", work + "/build/bytes.o")
        assert bytes_of(work + "/build/bytes.o") == there


@test
def other_flags_rebuild_objects():
    with tempfile.TemporaryDirectory() as work:
        words = "DEPS=true", work + "/build/bytes.o"
        assert " -c " in made(work, *words)
        assert " -c " not in made(work, *words)
        assert "-D_FORTIFY_SOURCE" not in made(work, "HARDEN=", *words)
        assert "-D_FORTIFY_SOURCE" in made(work, *words)


@test
def packages_are_installed_one_group_at_a_time():
    with tempfile.TemporaryDirectory() as work:
        slow = script(work + "/install", f"mkdir {work}/busy || exit 1; sleep 1; rmdir {work}/busy\n")
        made(work, "-j4", "DEPS=" + slow, *(f"{work}/build/.deps-{x}" for x in ("build", "test", "valgrind")))


@test
def other_flags_cause_no_warnings():
    """Other flags must not cause warnings, for instance about truncated names."""
    for flags in ["HARDEN="], ["CFLAGS=-O3"], ["HARDEN=", "CFLAGS=-O3"]:
        with tempfile.TemporaryDirectory() as work:
            objects = (f"{work}/build/{x}.o" for x in ("moe-make-random", "program", "routing"))
            made(work, "DEPS=true", "WERROR=-Werror", *flags, *objects)


@test
def without_root_or_sudo_the_command_is_printed():
    with tempfile.TemporaryDirectory() as work:
        tools = work + "/bin"
        os.mkdir(tools)
        for name in "sh", "dirname", "uname", "cat", "rm", "grep", "ls", "sed":
            os.symlink(shutil.which(name), f"{tools}/{name}")
        script(tools + "/id", "echo 1000\n")
        script(tools + "/apt-get", f"echo ran >> {work}/ran\n")
        done = subprocess.run(["sh", ROOT + "/tools/install-deps"], env={"PATH": tools, "CC": "no-cc", "CXX": "no-cxx"},
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and not done.stdout and not os.path.exists(work + "/ran"), done
        assert done.stderr.count("\n") == 1, done.stderr
        log = done.stderr.split("run: ")[1]
        assert log.startswith("apt-get update && apt-get install -y --no-install-recommends g++ "), log
        for package in "libsentencepiece-dev", "libpcre2-dev", "libcjson-dev", "libmicrohttpd-dev", "libutf8proc-dev", \
                "zlib1g-dev":
            assert package in log, log
        script(tools + "/sudo", f'echo "$@" >> {work}/ran\n')
        os.symlink(shutil.which("env"), tools + "/env")
        done = subprocess.run(["sh", ROOT + "/tools/install-deps"], env={"PATH": tools, "CC": "no-cc", "CXX": "no-cxx"},
                              capture_output=True, text=True, timeout=60)
        ran = bytes_of(work + "/ran").decode().splitlines()
        assert done.returncode == 0 and len(ran) == 2, (done, ran)
        assert "apt-get update" in ran[0] and "apt-get install -y" in ran[1] and "g++" in ran[1], ran
        assert "Installing with apt-get: g++" in done.stdout, done.stdout


def bare(work):
    """Return an environment without compilers, in which the user has sudo and work/ran records installed packages."""
    tools = work + "/bin"
    os.mkdir(tools)
    script(tools + "/id", "echo 1000\n")
    for name in "apt-get", "sudo":
        script(f"{tools}/{name}", f'echo {name} "$@" >> {work}/ran\n')
    return {"PATH": tools + ":" + os.environ["PATH"], "CC": "no-cc", "CXX": "no-cxx"}


@test
def make_reports_missing_packages_and_installs_none():
    with tempfile.TemporaryDirectory() as work:
        more = bare(work)
        for goal, command in (("all", "make deps"), ("install", "make deps"),
                              (work + "/build/.deps-valgrind", "tools/install-deps --valgrind")):
            log = made(work, goal, status=2, **more)
            for line in "a C++ compiler (Debian: g++)", "SentencePiece (Debian: libsentencepiece-dev)":
                assert log.count("missing: " + line) == 1, log
            assert f"run: CC='no-cc' CXX='no-cxx' {command}\n" in log, log
            assert "apt-get install -y --no-install-recommends g++ libsentencepiece-dev" in log, log
        assert not os.path.exists(work + "/ran") and not os.path.exists(work + "/build/.deps-build")
        made(work, "all", "-n", "DEPS=true", **more)  # DEPS=true skips the check for packages


@test
def setup_commands_install_packages_and_report_them():
    for goal in "deps", "demo", "test":
        with tempfile.TemporaryDirectory() as work:
            log = made(work, goal, status=2 * (goal != "deps"), **bare(work))  # the fake apt-get installs nothing
            assert "Installing with apt-get:" in log and "missing:" not in log, log
            assert "apt-get install -y -qq --no-install-recommends g++" in text_of(work + "/ran"), log


@test
def nothing_is_printed_if_no_package_is_missing():
    done = subprocess.run(["tools/install-deps", "--say"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done


@test
def warnings_are_errors_only_in_ci():
    with tempfile.TemporaryDirectory() as work:
        words = "-n", "DEPS=true", work + "/build/bytes.o"
        assert "-Werror" not in made(work, *words) and "-Wconversion" in made(work, *words)
        assert "-Werror" in made(work, *words, CI="1") and "-Werror" in made(work, *words, "WERROR=-Werror")


@test
def help_lists_every_target():
    with tempfile.TemporaryDirectory() as work:
        listed = re.findall(r"^make ([a-z-]+)", made(work, "help"), re.M)
    rules = "".join(map(text_of, ("Makefile", "tools/dist/dist.mk", "tools/web/web.mk", "tools/python/package.mk",
                                  "tests/rules.mk")))
    targets = " ".join(re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)", rules, re.M))
    named = set(re.findall(r"(?<!\S)[a-z-]+(?!\S)", targets)) - {"all", "help", "c-suites"}
    assert len(named) > 15 and sorted(listed) == sorted(named), named ^ set(listed)
    assert text_of("Makefile").count("\n") < 230, "targets for tests only belong in tests/rules.mk"


@test
def unlisted_gpus_get_ptx():
    """Builds contain machine code for all the compiler's architectures, and PTX for the oldest and the newest."""
    with tempfile.TemporaryDirectory() as work:
        nvcc = script(work + "/nvcc", "case $* in --list-gpu-arch) printf 'compute_%s\\n' 75 80 90 100;; esac\n")
        words = "-n", "DEPS=true", "CUDA=1", "NVCC=" + nvcc, work + "/build/moe-cuda.o"
        code = re.findall(r"arch=compute_(\d+),code=(\w+)", made(work, *words))
        assert sorted(code) == sorted([*((x, "sm_" + x) for x in ("75", "80", "90", "100")), ("75", "compute_75"),
                                       ("100", "compute_100")]), code
        code = re.findall(r"code=(\w+)", made(work, *words, "CUDA_ARCH=90"))
        assert code == ["sm_90", "compute_90"], code


def ran(terminal, *suites):
    """Run tests/run with two suites at a time; return (its output, its exit status)."""
    command = [sys.executable, ROOT + "/tests/run", "-j", "2", *suites]
    if not terminal:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
        return done.stdout, done.returncode
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=theirs, env=dict(os.environ, COLUMNS="100"))
    os.close(theirs)
    log = b""
    try:
        while got := os.read(ours, 4096):
            log += got
    except OSError:  # on Linux, reading from a closed terminal is an error
        pass
    os.close(ours)
    return log.decode(), process.wait(timeout=60)


@test
def suites_are_reported_at_their_end_and_terminals_show_progress():
    slow, quick, bad = "sh -c 'sleep 3; echo ok a'", "sh -c 'echo ok b; echo skip c: no c here'", "sh -c 'echo FAIL d'"
    plain, status = ran(False, slow, quick)
    assert status == 0 and "\033" not in plain, plain
    lines = plain.splitlines()
    assert lines[0].startswith("sh -c 'echo ok b") and lines[1] == "    skip c: no c here", lines
    assert "sleep 3" in lines[2] and lines[3] == "2 passed, 0 failed" and len(lines) == 4, lines
    log, status = ran(True, slow, bad)
    assert status == 1 and "1 of 2 suites, 0 passed, 1 failed" in log and "running: sh -c 'sleep 3" in log, log
    assert log.rstrip().endswith("1 passed, 1 failed"), log


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:]))
