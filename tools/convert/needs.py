"""Imported first by the scripts of tools/: where a module of Python is missing, they say what to do about it."""
import os
import sys


def hook(kind, error, trace):
    if not issubclass(kind, ModuleNotFoundError):
        sys.__excepthook__(kind, error, trace)
        return
    script = os.path.relpath(sys.argv[0])
    print(f"{os.path.basename(script)}: Python's module {error.name} is missing here. tools/install-deps --train makes "
          f"an environment that has it; then run .venv/bin/python {script}", file=sys.stderr)


sys.excepthook = hook
