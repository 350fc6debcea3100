#!/usr/bin/env python3
"""Test the wheels of tools/dist/wheel: contents, symbol versions, and translations on other systems.

Usage: tests/python tests/dist/wheels.py [NAME]

The x86-64 wheel is installed with the Python of Debian 11, 12 and 13, in new roots without a network, and with every
other Python on this machine. The library and moe-translate of the AArch64 and musl wheels run under qemu and Debian's
musl, and must give the texts of tests/golden/hashes.txt; a C program calls the Windows DLL under wine. This machine has
no Python for these systems, so these wheels are not imported. Requires root, and tools/install-deps --dist --wheel
--fresh --targets.
"""
import functools
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

from roots import Root
from suite import Skip, Suite

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cross"))
import targets  # noqa: E402
import wine  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "models/en-de-fr-es.bin")
WORK = tempfile.mkdtemp()
ZIG = [sys.executable, "-m", "ziglang", "cc"]
TARGETS = {  # libraries that the files may need, zig's name of the system, how to run a program
    "manylinux_2_28-x86_64": (r"lib(c|m|pthread|dl|rt)\.so\.\d|ld-linux-x86-64\.so\.2", "x86_64-linux-gnu.2.28", []),
    "manylinux_2_28-aarch64": (r"lib(c|m|pthread|dl|rt)\.so\.\d|ld-linux-aarch64\.so\.1", "aarch64-linux-gnu.2.28",
                               ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]),
    "musllinux_1_2-x86_64": (r"libc\.so", "x86_64-linux-musl", []),
}
WINDOWS = re.compile(r"(?i)(kernel32|msvcrt|ucrtbase|ws2_32|advapi32|bcrypt|crypt32|secur32|iphlpapi|shell32|user32|"
                     r"api-ms-win-crt-\w+-l1-1-0)\.dll")  # libraries of Windows itself
SUITES = {"bullseye": "3.9", "bookworm": "3.11", "trixie": "3.13"}
IN_PYTHON = ("import sys, moe_translate as m; print(*sys.version_info[:2], sep='.'); "
             "print(m.Translator({0!r}, target='de').translate('Where is my book?')); "
             "print(*m.Translator({0!r}, target='fr', beam=4).translate(['It rains.', '']), sep='|')")
TRANSLATED = ["Wo ist mein Buch?", "Il pleut.|"]
DOCUMENT = "1\n00:00:01,000 --> 00:00:02,000\nIt rains.\n"
test = Suite()


def run(*command, status=0, text=None, **more):
    without = "PYTHONPATH", "MOE_LIBRARY", "MOE_MODEL", "LD_LIBRARY_PATH"
    env = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run(list(map(str, command)), input=text, capture_output=True, text=True, cwd=ROOT,
                          env={**env, **more})
    assert done.returncode == status, (command, done.returncode, (done.stdout + done.stderr)[-1500:])
    return done.stdout


@functools.cache
def wheel(target):
    """Build a wheel; return its path."""
    out = run("tools/dist/wheel", target)
    return os.path.join(ROOT, out.splitlines()[-1])


def unpacked(target):
    folder = os.path.join(WORK, target)
    if not os.path.exists(folder):
        with zipfile.ZipFile(wheel(target)) as archive:
            archive.extractall(folder)
        for program in glob.glob(folder + "/moe_translate/moe-*"):
            os.chmod(program, 0o755)
    return folder + "/moe_translate"


def version():
    with open(os.path.join(ROOT, "moe.h"), encoding="utf-8") as file:
        return re.search(r'MOE_VERSION "(.*)"', file.read())[1]


def contents(target):
    allowed = TARGETS[target][0]
    path = wheel(target)
    assert os.path.basename(path) == f"moe_translate-{version()}-py3-none-{target.replace('-', '_')}.whl", path
    assert os.path.getsize(path) < 15e6, os.path.getsize(path)
    with open(path, "rb") as file:
        first = file.read()
    run("tools/dist/wheel", target)
    with open(path, "rb") as file:
        assert file.read() == first, "other bytes for the same files"
    package = unpacked(target)
    notices = os.listdir(package + "/notices")
    assert {"moe", "sentencepiece", "pcre2", "cjson", "utf8proc", "zlib", "libexttextcat", "curl"} <= set(notices)
    for name in "libmoetext.so", "moe-translate", "moe-get":
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", f"{package}/{name}"))
        assert all(re.fullmatch(allowed, library) for library in needed), (name, needed)
        assert "(RUNPATH)" not in run("readelf", "-dW", f"{package}/{name}")
        found = re.findall(r"GLIBC_([\d.]+)", run("readelf", "-VW", f"{package}/{name}"))
        versions = {tuple(map(int, number.split("."))) for number in found}
        assert all(x <= (2, 28) for x in versions), (name, versions)
        assert bool(versions) == target.startswith("manylinux"), (name, versions)
    symbols = run("readelf", "--dyn-syms", "-W", package + "/libmoetext.so")
    exported = re.findall(r"(?:GLOBAL|WEAK) +DEFAULT +\d+ (\S+)", symbols)
    assert exported and all(name.startswith("moe") for name in exported), exported[:9]


@test
def the_wheels_contain_all_libraries():
    for target in TARGETS:
        contents(target)


@test
def the_windows_wheel_needs_only_windows_libraries():
    path = wheel("windows-x86_64")
    assert os.path.basename(path) == f"moe_translate-{version()}-py3-none-win_amd64.whl", path
    assert os.path.getsize(path) < 15e6, os.path.getsize(path)
    for name in "libmoetext.dll", "moe-translate.exe", "moe-get.exe":
        said = run("x86_64-w64-mingw32-objdump", "-p", f"{unpacked('windows-x86_64')}/{name}")
        needed = re.findall(r"DLL Name: (\S+)", said)
        assert needed and all(WINDOWS.fullmatch(library) for library in needed), (name, needed)


@test
def a_c_program_calls_the_windows_library():
    package, program = unpacked("windows-x86_64"), os.path.join(WORK, "text.exe")
    if not os.path.exists("/usr/lib/wine/wine64"):
        raise Skip("no wine here")
    run("x86_64-w64-mingw32-gcc-posix", "-static", "-std=c11", "-I.", "-Itools/text", "tools/text/examples/text.c",
        package + "/libmoetext.dll", "-o", program)
    shutil.copy(package + "/libmoetext.dll", WORK)
    with tempfile.TemporaryDirectory() as prefix, wine.started(prefix) as variables:
        variables["MOE_MODEL"] = "Z:" + MODEL
        assert run("wine64", program, **variables).split("\n") == [
            "Guten Morgen, mein Freund.", "Wo ist mein Buch?", ""]
        said = run("wine64", package + "/moe-translate.exe", "-t", "de", text="It rains.\n", **variables)
        assert said == "Es regnet.\n", said


@test
def auditwheel_confirms_manylinux():
    for target in TARGETS:
        if target.startswith("manylinux"):
            said = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel(target)).split())
            assert f'consistent with the following platform tag: "{target.replace("-", "_")}"' in said or \
                re.search(r'platform tag: "manylinux_2_(\d+)_', said) and \
                int(re.search(r'platform tag: "manylinux_2_(\d+)_', said)[1]) <= 28, said


def check_python(said, number):
    assert said.splitlines() == [number, *TRANSLATED], said


@test
def the_wheel_translates_on_debian_11_to_13():
    made = wheel("manylinux_2_28-x86_64")
    for suite, number in SUITES.items():
        with Root(suite, "python3,python3-venv") as root:
            root.run("python3 -m venv /venv && /venv/bin/pip install -q --no-index /moe/*.whl", files=[made, MODEL])
            model = "/moe/" + os.path.basename(MODEL)
            check_python(root.run(f'/venv/bin/python -c "{IN_PYTHON.format(model)}"'), number)
            assert root.run(f"echo It rains. | /venv/bin/moe-translate -m {model} -t de") == "Es regnet.\n"
            root.run(f"printf '{DOCUMENT}' > /a.srt && /venv/bin/moe-documents -q -t de /a.srt -o /b.srt",
                     MOE_MODEL=model)
            assert "Es regnet." in root.run("cat /b.srt")
            print(f"Python {number} of {suite}")


@test
def the_wheel_translates_with_other_pythons():
    found = {}
    for path in [*glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin/python3")), *filter(None, map(
            shutil.which, (f"python3.{minor}" for minor in range(9, 16))))]:
        code = "import sys, ensurepip; print(*sys.version_info[:2] if sys.version_info >= (3, 9) else [], sep='.')"
        number = subprocess.run([path, "-c", code], capture_output=True, text=True).stdout.strip()
        if number:
            found[number] = path
    if not found:
        raise Skip("no other Python here")
    for number, path in found.items():
        venv = os.path.join(WORK, "venv" + number)
        run(path, "-m", "venv", venv)
        run(venv + "/bin/pip", "install", "-q", "--no-index", wheel("manylinux_2_28-x86_64"))
        check_python(run(venv + "/bin/python", "-c", IN_PYTHON.format(MODEL)), number)
        print(f"Python {number}")


def called_from_c(target):
    """Build the example text.c for a target with the wheel's library, and run it and the wheel's moe-translate."""
    package, (_, system, emulator) = unpacked(target), TARGETS[target]
    program = os.path.join(WORK, "text-" + target)
    soname, = re.findall(r"\(SONAME\).*\[(.*)\]", run("readelf", "-dW", package + "/libmoetext.so"))
    os.symlink("libmoetext.so", f"{package}/{soname}")
    dynamic = ["-dynamic"] if "musl" in system else []
    run(*ZIG, "-target", system, *dynamic, "-std=c11", "-I.", "-Itools/text", "tools/text/examples/text.c",
        package + "/libmoetext.so", f"-Wl,-rpath,{package}", "-o", program)
    assert run(*emulator, program, MOE_MODEL=MODEL) == "Guten Morgen, mein Freund.\nWo ist mein Buch?\n"
    for case, model in ("README text", targets.SHIPPED), ("en-pt text", targets.EN_PT):
        targets.check(case, targets.texts([*emulator, package + "/moe-translate"], model))


@test
def a_c_program_calls_the_aarch64_library():
    if not shutil.which("qemu-aarch64") or not os.path.exists("/usr/aarch64-linux-gnu/lib/libc.so.6"):
        raise Skip("no qemu-aarch64 with a C library")
    called_from_c("manylinux_2_28-aarch64")


@test
def a_c_program_calls_the_musl_library():
    if not os.path.exists("/lib/ld-musl-x86_64.so.1"):
        raise Skip("no musl here")
    called_from_c("musllinux_1_2-x86_64")


if __name__ == "__main__":
    try:
        sys.exit(test.run(*sys.argv[1:]))
    finally:
        shutil.rmtree(WORK)
