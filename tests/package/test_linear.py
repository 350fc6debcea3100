#!/usr/bin/env python3
"""Documents that are one sign again and again are read in seconds of processor time, where a scan that is worse than
linear would take minutes.

Usage: tests/python tests/package/test_linear.py
"""

import resource
import subprocess
import sys

from moe_translate.documents import translate_document
from suite import Suite

test = Suite()
SIZE = 150000  # characters
MOST = 60  # seconds of processor time for all of a format
REPEATED = {
    "html": ["<!-- -->", "<code>a</code>", "<a ", "<b>", "&"],
    "markdown": ["\\(", "{{", "{%", "<code>", "[^"],
    "yaml": ["[", "{"],
    "android": ["a\n"],
}


def read(kind):
    resource.setrlimit(resource.RLIMIT_CPU, (MOST, MOST))
    for unit in REPEATED[kind]:
        text = unit * (SIZE // len(unit))
        text = f"<resources><string name='a'>{text}</string></resources>" if kind == "android" else text
        try:
            translate_document(text, kind, list)
        except ValueError as error:
            assert kind == "yaml" and "nested more than" in str(error), error


@test
def repeated_signs_are_read_in_seconds():
    for kind in REPEATED:
        run = subprocess.run([sys.executable, __file__, "read", kind], capture_output=True, text=True)
        assert run.returncode == 0, (kind, run.returncode, run.stderr[-500:])


if __name__ == "__main__":
    sys.exit(read(sys.argv[2]) if sys.argv[1:2] == ["read"] else test.run(*sys.argv[1:]))
