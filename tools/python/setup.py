"""`pip install tools/python`: builds libmoetext with the repository's Makefile and puts it into the package."""

import pathlib
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "libmoetext.dylib" if sys.platform == "darwin" else "libmoetext.so"


class Build(build_py):
    def run(self):
        super().run()
        if (ROOT / "Makefile").exists():
            subprocess.run(["make", "-C", str(ROOT), NAME], check=True)
            shutil.copy((ROOT / NAME).resolve(), pathlib.Path(self.build_lib) / "moe_translate" / NAME)


class Binary(Distribution):
    def has_ext_modules(self):
        return True  # so that the wheel names its platform


setup(cmdclass={"build_py": Build}, distclass=Binary)
