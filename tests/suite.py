"""Run the tests of a Python suite.

    test = Suite()
    numpy_test = test.needs(np, "NumPy")    # np: the module, or None if it is missing

    @test
    def statement_about_the_program():
        assert ...

    if __name__ == "__main__":
        sys.exit(test.run())

Every test prints `ok NAME (seconds)`, `skip NAME: why` or `FAIL NAME: line N: what`, and the last line is `N passed, N
failed`. If CI is set, tools/install-deps --test-long has run, so tests with a missing module fail.
"""
import os
import signal
import sys
import time
import traceback

for number in signal.SIGHUP, signal.SIGINT:  # nohup and background jobs ignore them, which programs inherit
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)


class Skip(Exception):
    """Raised by a test that cannot run here. The message is the reason."""


class Suite:
    def __init__(self):
        self.tests = []

    def __call__(self, function, missing=None):
        self.tests.append((function, missing))
        return function

    def needs(self, module, name):
        """Return a decorator for tests that require a module."""
        return lambda function: self(function, None if module else name)

    def run(self, only=""):
        """Run the tests with `only` in their names; return whether one failed."""
        passed = failed = 0
        for function, missing in self.tests:
            name, begin = function.__name__, time.monotonic()
            if only not in name:
                continue
            try:
                if missing:
                    raise (RuntimeError if os.environ.get("CI") else Skip)(f"no {missing} here")
                function()
                passed += 1
                print(f"ok {name} ({time.monotonic() - begin:.1f} s)")
            except Skip as why:
                print(f"skip {name}: {why}")
            except Exception as problem:  # noqa: BLE001 - any exception fails only this test
                failed += 1
                lines = [x.lineno for x in traceback.extract_tb(problem.__traceback__)
                         if x.filename == function.__code__.co_filename]
                print(f"FAIL {name}: line {', '.join(map(str, lines[:5]))}: {type(problem).__name__} "
                      f"{str(problem)[:1000]}")
            sys.stdout.flush()
        print(f"{passed} passed, {failed} failed")
        return failed > 0
