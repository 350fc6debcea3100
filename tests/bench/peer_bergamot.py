#!/usr/bin/env python3
"""Measure Bergamot on lines of text, for marian.py. Requires Python 3.10 with bergamot==0.4.5.

Usage: peer_bergamot.py CONFIG [--threads N] [--one] [--full] [--times N]   (lines on stdin, translations on stdout)

--one translates a line at a time, like an app. --full disables the shortlist. Prints a line of JSON on stderr: seconds
to load the model, wall and processor seconds of each repetition, and peak resident memory in bytes.
"""

import argparse
import glob
import importlib.util
import json
import os
import resource
import sys
import time

import yaml


def extension():
    """Load and return the extension without the package's __init__, which needs an internet connection."""
    (folder,) = importlib.util.find_spec("bergamot").submodule_search_locations
    spec = importlib.util.spec_from_file_location("_bergamot", glob.glob(os.path.join(folder, "_bergamot*.so"))[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configuration(path, full):
    """Return a model's configuration as YAML with absolute paths; `full` removes the shortlist."""
    folder = os.path.dirname(os.path.abspath(path))
    with open(path) as file:
        config = yaml.safe_load(file)
    config.pop("relative-paths", None)
    for key in ("models", "vocabs"):
        config[key] = [os.path.join(folder, x) for x in config[key]]
    if full:
        config.pop("shortlist", None)
    elif "shortlist" in config:
        config["shortlist"][0] = os.path.join(folder, config["shortlist"][0])
    config.update({"max-length-break": 128, "mini-batch-words": 1024, "ssplit-mode": "paragraph", "alignment": "soft"})
    return yaml.safe_dump(config)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    begin = time.monotonic()
    bergamot = extension()
    service = bergamot.Service(bergamot.ServiceConfig(numWorkers=args.threads, cacheSize=0, logLevel="off"))
    model = service.modelFromConfig(configuration(args.config, args.full))
    options = bergamot.ResponseOptions(qualityScores=False, alignment=False, HTML=False)

    def translate(texts):
        return [x.target.text for x in service.translate(model, bergamot.VectorString(texts), options)]

    lines = sys.stdin.read().splitlines()
    translate(["Hello."])
    start, walls, cpus = time.monotonic() - begin, [], []
    for _ in range(args.times):
        wall, cpu = time.monotonic(), time.process_time()
        out = [y for x in lines for y in translate([x])] if args.one else translate(lines)
        walls.append(time.monotonic() - wall)
        cpus.append(time.process_time() - cpu)
    print("\n".join(out))
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"start": start, "wall": walls, "cpu": cpus, "rss": rss}), file=sys.stderr)


if __name__ == "__main__":
    main()
