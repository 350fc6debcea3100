"""Imported first by the scripts here: modules of tools/convert are found too, and needs.py tells what is missing."""
import pathlib
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent / "convert"))

import needs  # noqa: E402,F401
