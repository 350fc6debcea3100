"""Import this module first in scripts in this folder: it adds tools/convert to sys.path and reports missing modules."""
import pathlib
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent / "convert"))

import needs  # noqa: E402,F401
