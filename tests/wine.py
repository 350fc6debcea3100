"""Run programs for Windows with wine."""
import contextlib
import os
import subprocess


def environment(prefix, **more):
    """Return the environment of wine64; prefix is the folder of its settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MOE_", "XDG_"))}
    return {**kept, "WINEPREFIX": prefix, "WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree,mshtml=",
            "PATH": os.environ["PATH"] + ":/usr/lib/wine", **more}


@contextlib.contextmanager
def started(prefix):
    """Start wine's server and services in a prefix of their own; end them afterwards.

    A server that ends while a program starts breaks that program's connection, so this one keeps running. The services
    keep the first program's streams open, so that program gets no streams that a test reads.
    """
    os.makedirs(prefix, exist_ok=True)
    variables = environment(prefix)
    subprocess.run(["wineserver64", "-p"], env=variables, check=True)
    try:
        subprocess.run(["wine64", "wineboot"], env=variables, check=True, stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield variables
    finally:
        subprocess.run(["wineserver64", "-k"], env=variables)
