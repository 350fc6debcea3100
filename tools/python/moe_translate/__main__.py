"""`moe-translate` and `python -m moe_translate`: run the program moe-translate of the package."""

import os
import pathlib
import subprocess
import sys

NAME = "moe-translate"


def main() -> int:
    """Replace this process with the program, which then handles signals, exit status and pipes."""
    here = pathlib.Path(__file__).resolve().parent
    file = NAME + ".exe" if os.name == "nt" else NAME
    for path in here / file, here.parents[2] / file:  # in the package, or in the repository that contains it
        if path.is_file():
            try:
                if os.name == "nt":  # execv would not wait
                    return subprocess.call([path, *sys.argv[1:]])
                os.execv(path, [NAME, *sys.argv[1:]])
            except OSError as error:
                print(f"{NAME}: cannot run {path}: {error.strerror}", file=sys.stderr)
                return 3
    print(f"{NAME}: program not found: build it with `make` in the repository of moe", file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
