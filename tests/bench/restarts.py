#!/usr/bin/env python3
"""Measure the first answer after a start with a long system prompt, with and
without --prompt-cache.

    make
    tests/python tests/bench/restarts.py MODEL      # a model that answers chats
    tests/python tests/bench/restarts.py MODEL --length 9 --rounds 9

Each round starts four servers: without a cache, with a new file, with this file
and the same question, with this file and another question. Prints medians: ms
until the server is ready, to the first token of its answer, and to its exit.
"""
import argparse
import os
import statistics
import tempfile
import time

import beginnings
from beginnings import test_server


def once(model, options, system, question, answer):
    """Start a server, ask one question and stop it. Return the three times, the prompt's tokens and the loaded ones."""
    begin = time.monotonic()
    server = test_server.Server(*options, fast=False, model=model)
    ready = time.monotonic() - begin
    first, usage = beginnings.ask(server.port, system, question, answer)
    found = test_server.figure(server, "loaded_rows_total")
    begin = time.monotonic()
    assert server.stop() == 0
    return ready, first, time.monotonic() - begin, usage["prompt_tokens"], found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--length", type=int, default=9, help="repetitions of the system prompt of about 160 tokens")
    p.add_argument("--answer", type=int, default=4, help="tokens of an answer")
    o, options = p.parse_known_args()
    system, rows = beginnings.RULES * o.length, {}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(o.rounds):
            file = os.path.join(folder, f"{i}.prompts")
            cache = [*options, "--prompt-cache", file]
            for name, words, question in (("without a file", options, 0), ("writes a file", cache, 0),
                                          ("reads it, same question", cache, 0), ("reads it, another one", cache, 1)):
                rows.setdefault(name, []).append(once(o.model, words, system, beginnings.QUESTIONS[question], o.answer))
        size = os.path.getsize(file)
    for name, found in rows.items():
        ready, first, end, tokens, loaded = map(statistics.median, zip(*found))
        print(f"{name:24} ready after {1000 * ready:6.0f} ms, first token after {1000 * first:6.0f} ms, ended after "
              f"{1000 * end:5.0f} ms, {loaded:.0f} of {tokens:.0f} tokens from the file")
    print(f"file: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
