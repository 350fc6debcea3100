#!/usr/bin/env python3
"""moe-server under a minute of abuse: regular clients get their usual answers. tests/bench/abuse.py is ten
times as large and also measures times and memory.

Usage: tests/python tests/server/test_abuse.py      (BIN is the folder of the programs)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import sys

from bench.abuse import Abuse
from suite import Suite

test = Suite()
SECONDS, SIZE = 60, 0.1


@test
def regular_clients_are_answered_under_abuse():
    """Response times are not limited because other suites may run in parallel."""
    abuse = Abuse(SECONDS, SIZE, settings=("beam=2", "rerank=0"), options=("--timeout", "600"))
    try:
        assert len(abuse.seconds) > 3 and not abuse.wrong, (len(abuse.seconds), abuse.wrong[:5])
        assert len({kind for kind, _ in abuse.seen}) > 10 and not abuse.unfit(), (abuse.seen, abuse.unfit())
        assert abuse.process.poll() is None
        assert abuse.end(SIZE)[1] == 0
    finally:
        abuse.process.kill()


if __name__ == "__main__":
    sys.exit(test.run())
