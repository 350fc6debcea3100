"""`moe-translate` and `python -m moe_translate`: the program of that name, which comes with the package."""

import os
import pathlib
import sys

NAME = "moe-translate"


def main() -> int:
    """Becomes the program, in the same process: signals, statuses and pipes are its own."""
    here = pathlib.Path(__file__).resolve().parent
    for path in here / NAME, here.parents[2] / NAME:  # in the package; in the repository that the package lies in
        if path.is_file():
            try:
                os.execv(path, [NAME, *sys.argv[1:]])
            except OSError as error:
                print(f"{NAME}: {path} cannot be run: {error.strerror}", file=sys.stderr)
                return 3
    print(f"{NAME}: the program is not here: build it with `make` in the repository of moe", file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
