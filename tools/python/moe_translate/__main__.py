"""`moe-translate` and `python -m moe_translate`: run the program moe-translate of the package."""

import os
import pathlib
import sys

NAME = "moe-translate"


def main() -> int:
    """Replace this process with the program, which then handles signals, exit status and pipes."""
    here = pathlib.Path(__file__).resolve().parent
    for path in here / NAME, here.parents[2] / NAME:  # in the package, or in the repository that contains it
        if path.is_file():
            try:
                os.execv(path, [NAME, *sys.argv[1:]])
            except OSError as error:
                print(f"{NAME}: cannot run {path}: {error.strerror}", file=sys.stderr)
                return 3
    print(f"{NAME}: program not found: build it with `make` in the repository of moe", file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
