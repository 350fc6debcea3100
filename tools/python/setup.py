"""`pip install tools/python`: build libmoetext and moe-translate with the repository's Makefile and copy both, and the
data for language detection, into the package. `make wheel` then adds the libraries that these files need. `make sdist`
copies the repository's files that the build needs into a source distribution, below `source`. tools/dist/wheel builds
the files for another system itself: MOE_MADE is the folder that contains them, MOE_PLATFORM the wheel's platform."""

import gzip
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.dist import Distribution

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE / "source" if (HERE / "source").is_dir() else HERE.parents[1]  # in a source distribution, or the repository
SOURCES = ("LICENSE", "Makefile", "moe.h", "moe.c", "moe-cuda.cu", "tools/*.mk", "tools/install-deps",
           "tools/text/*.*", "tools/programs/*.[ch]", "tools/programs/*.html", "tools/convert/*.[ch]",
           "tools/convert/*.inc", "tools/convert/*.json", "tools/get/*.[ch]")
NAME = "libmoetext.dylib" if sys.platform == "darwin" else "libmoetext.so"
BUILT = (NAME, "moe-translate")
MADE = os.environ.get("MOE_MADE")
DATA = {  # folder to put next to the library (see tools/text/places.h): installed folders to copy it from
    "libexttextcat": [f"{prefix}/share/libexttextcat" for prefix in ("/usr", "/usr/local", "/opt/homebrew")],
}


SYSTEM = ("libc6", "libgcc-s1", "libstdc++6")  # packages installed on every system with Python


def notices(built):
    """Return the copyright files of the Debian packages that provide a binary's libraries; {} on other systems."""
    if not shutil.which("dpkg-query") or not shutil.which("ldd"):
        return {}
    found = {}
    for path in re.findall(r"=> (/\S+)", subprocess.run(["ldd", str(built)], capture_output=True, text=True).stdout):
        for name in {path, path.removeprefix("/usr"), str(pathlib.Path(path).resolve())}:
            said = subprocess.run(["dpkg-query", "-S", name], capture_output=True, text=True).stdout
            package = said.split(":")[0]
            notice = pathlib.Path("/usr/share/doc", package, "copyright")
            if package and package not in SYSTEM and notice.exists():
                found[package] = notice
    return found


class Build(build_py):
    def run(self):
        super().run()
        package = pathlib.Path(self.build_lib) / "moe_translate"
        if MADE:
            for path in pathlib.Path(MADE).iterdir():
                (shutil.copytree if path.is_dir() else shutil.copy)(path, package / path.name)
            return
        subprocess.run(["make", "-C", str(ROOT), *BUILT], check=True)
        for name in BUILT:
            shutil.copy((ROOT / name).resolve(), package / name)
        for name, places in DATA.items():
            for place in filter(pathlib.Path.is_dir, map(pathlib.Path, places)):
                shutil.copytree(place, package / name, dirs_exist_ok=True)
                break
        (package / "notices").mkdir(exist_ok=True)
        shutil.copy(ROOT / "LICENSE", package / "notices" / "moe")
        for built in BUILT:
            for name, path in notices(ROOT / built).items():
                shutil.copy(path, package / "notices" / name)


class Sources(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        for path in (path for pattern in SOURCES for path in ROOT.glob(pattern)):
            copy = pathlib.Path(base_dir, "source", path.relative_to(ROOT))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        """Write the same bytes for the same files."""
        name, top = f"{base_name}.tar.gz", pathlib.Path(base_dir)
        with open(name, "wb") as file, gzip.GzipFile("", "wb", 9, file, 0) as packed, \
                tarfile.open(fileobj=packed, mode="w") as archive:
            for path in [top, *sorted(top.rglob("*"))]:
                archive.add(path, recursive=False, filter=without_owner)
        return name


def without_owner(member):
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    member.mtime = int(os.environ.get("SOURCE_DATE_EPOCH", 315532800))
    return member


class Wheel(bdist_wheel):
    def get_tag(self):
        # The wheel works with any Python 3, but only on this platform.
        return "py3", "none", os.environ.get("MOE_PLATFORM") or super().get_tag()[2]


class Binary(Distribution):
    def has_ext_modules(self):
        return True


version = re.search(r'^#define MOE_VERSION "(.*)"', (ROOT / "moe.h").read_text(encoding="utf-8"), re.M)[1]
setup(version=version, cmdclass={"build_py": Build, "bdist_wheel": Wheel, "sdist": Sources}, distclass=Binary)
