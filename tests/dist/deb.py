#!/usr/bin/env python3
"""Test the Debian package of tools/dist/deb: contents, and an installation in new Debian 12 and 13 roots.

Usage: tests/python tests/dist/deb.py [NAME]

Requires root, and tools/install-deps --dist --man --fresh. lintian checks the package too if it is installed.
"""
import functools
import gzip
import os
import re
import shutil
import subprocess
import sys
import tempfile

from roots import Root
from suite import Skip, Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORK = tempfile.mkdtemp()
PROGRAMS = "align calibrate classify documents evaluate get info prune quantize routing score server translate".split()
test = Suite()


def run(*command, status=0):
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800)
    assert done.returncode == status, (command, done.returncode, (done.stdout + done.stderr)[-1500:])
    return done.stdout


@functools.cache
def package():
    return os.path.join(ROOT, run("tools/dist/deb").splitlines()[-1])


def unpacked():
    folder = os.path.join(WORK, "package")
    if not os.path.exists(folder):
        run("dpkg-deb", "-R", package(), folder)
    return folder


@test
def the_package_has_the_same_bytes_twice():
    with open(package(), "rb") as file:
        first = file.read()
    run("tools/dist/deb")
    with open(package(), "rb") as file:
        assert file.read() == first


@test
def the_package_contains_what_debian_expects():
    folder, made = unpacked(), package()
    fields = dict(re.findall(r"^(\w[\w-]*): (.*)", run("dpkg-deb", "-f", made), re.M))
    assert fields["Package"] == "moe-translate" and fields["Architecture"] == "amd64", fields
    assert os.path.basename(made) == f"moe-translate_{fields['Version']}_amd64.deb", made
    listed = run("dpkg-deb", "-c", made).splitlines()
    assert all(re.match(r"[dl-]rw[xr-]{2}[rwx-]*\S* root/root ", line) for line in listed), listed[:3]
    names = {line.split(" -> ")[0].split()[-1].removeprefix("./").rstrip("/") for line in listed}
    for program in PROGRAMS:
        assert {f"usr/bin/moe-{program}", f"usr/share/man/man1/moe-{program}.1.gz",
                f"usr/share/bash-completion/completions/moe-{program}"} <= names, program
    assert {"usr/share/moe/en-de-fr-es.bin", "usr/lib/systemd/system/moe-server.service"} <= names
    assert not any(re.search(r"\.a$|\.h$|\.pc$|usr/local|^etc/", name) for name in names), names
    run("sh", "-c", f"cd '{folder}' && md5sum -c --quiet DEBIAN/md5sums")
    doc = folder + "/usr/share/doc/moe-translate/"
    with open(doc + "copyright", encoding="utf-8") as file:
        text = file.read()
    for library in "sentencepiece", "pcre2", "libmicrohttpd", "libexttextcat", "curl", "zlib":
        assert f"==== {library}/" in text, library
    with gzip.open(doc + "changelog.gz", "rt", encoding="utf-8") as file:
        head = r"moe-translate \(" + re.escape(fields["Version"]) + r"\) unstable; urgency=\w+\n\n  \* .*\n\n -- .* <.*>  "
        assert re.match(head, file.read())


@test
def lintian_finds_no_errors():
    if not shutil.which("lintian"):
        raise Skip("no lintian here")
    # this package contains its libraries on purpose, and is not built from a source package
    expected = "embedded-library,statically-linked-binary"
    said = run("lintian", "--fail-on", "none", "--suppress-tags", expected, package())
    assert not re.findall(r"^E: .*", said, re.M), said


@test
def the_package_installs_translates_and_leaves_nothing():
    made = package()
    for suite in "bookworm", "trixie":
        with Root(suite, "python3") as root:
            root.run("true", files=[made])
            before = root.files()
            root.run("dpkg -i /moe/*.deb")
            assert root.run("moe-translate -t fr 'Where is my book?'") == "Où est mon livre ?\n"
            assert root.run("printf 'It rains.\\n' > /tmp/a.txt && moe-documents -q -t de /tmp/a.txt -o /tmp/b.txt && "
                            "cat /tmp/b.txt && rm /tmp/a.txt /tmp/b.txt && rm -rf /root/.cache") == "Es regnet.\n"
            for program in PROGRAMS:
                if program != "evaluate":  # needs a package of PyPI
                    assert root.run(f"moe-{program} --version").startswith(f"moe-{program} "), program
            assert "WantedBy" in root.run("cat /usr/lib/systemd/system/moe-server.service")
            assert root.run("find /etc/systemd /run -name 'moe-server*'") == ""
            root.run("dpkg --purge moe-translate && rm -rf /root/.cache")
            changing = re.compile(r"var/(lib/dpkg|log|cache)|run|tmp|proc|dev")
            left = {name for name in root.files() - before if not changing.match(name)}
            assert not left, (suite, sorted(left)[:20])


if __name__ == "__main__":
    try:
        sys.exit(test.run(*sys.argv[1:]))
    finally:
        shutil.rmtree(WORK)
