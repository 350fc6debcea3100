"""Scripts below tools/ import this module first: if a Python module is missing, it restarts the script with the
interpreter of .venv, or says how to install the module."""
import os
import sys

TOOLS = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def hook(kind, error, trace):
    if not issubclass(kind, ModuleNotFoundError):
        sys.__excepthook__(kind, error, trace)
        return
    environment = os.path.realpath(os.path.join(os.path.dirname(TOOLS), ".venv", "bin"))
    python = os.path.join(environment, "python")
    if os.access(python, os.X_OK) and os.path.realpath(os.path.dirname(sys.executable)) != environment:
        os.execv(python, [python, *sys.argv])
    script = os.path.realpath(sys.argv[0])
    purpose = "convert" if os.path.dirname(script) == os.path.join(TOOLS, "convert") else "train"
    print(f"{os.path.basename(script)}: missing Python module {error.name}; create an environment with "
          f"tools/install-deps --{purpose}", file=sys.stderr)


sys.excepthook = hook
