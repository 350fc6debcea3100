"""Common code of the peers, programs that measure other engines on request.

A peer prints a JSON line when it is ready. For each line `N` on standard input it
translates its batch N times and prints a JSON line with the seconds. This way,
several programs can alternate without loading models and warming up again.
"""
import json
import os
import resource
import sys
import time


def environment(**wanted):
    """Restart this process with new environment variables, because the dynamic linker has already read the old ones."""
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable] + sys.argv)


def intel_openmp():
    path = os.path.join(sys.prefix, "lib", "libiomp5.so")
    if not os.path.exists(path):
        sys.exit("%s is missing: %s -m pip install intel-openmp" % (path, sys.executable))
    return path


def serve(name, translate, tokens, warm_up=2):
    """Measure `translate` on request; exit if it does not return `tokens`, the expected number of target tokens."""

    def once():
        busy, begin = time.process_time(), time.perf_counter()
        made = translate()
        wall, busy = time.perf_counter() - begin, time.process_time() - busy
        if made != tokens:
            sys.exit("%s made %d tokens, not %d" % (name, made, tokens))
        return wall, busy / wall

    for _ in range(warm_up):
        once()
    print(json.dumps({"name": name, "tokens": tokens}), flush=True)
    for line in sys.stdin:
        runs = [once() for _ in range(int(line))]
        print(json.dumps({"seconds": [round(wall, 6) for wall, _ in runs], "cpus": [round(cpus, 2) for _, cpus in runs],
                          "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)}), flush=True)
