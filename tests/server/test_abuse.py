#!/usr/bin/env python3
"""moe-server under a minute of abuse, a tenth of the size of tests/bench/abuse.py's, which also looks at times and
memory: who behaves is answered as if nobody else were there.

Usage: tests/python tests/server/test_abuse.py      (BIN: where the programs are)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import sys

from bench.abuse import Abuse
from suite import Suite

test = Suite()
SECONDS, SIZE = 60, 0.1


@test
def who_behaves_is_answered_under_abuse():
    """Not how soon: other suites may run beside this one, so that an answer may take its time."""
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
