#!/usr/bin/env python3
"""Measure how often prompts find the computed beginning of an earlier one, and
the time to the first token.

    make all build/convert_here
    tests/python tests/bench/beginnings.py             # SmolLM2-135M-Instruct
    tests/python tests/bench/beginnings.py --set=batch=1

Each line is one moe-server that answers 200 chats: first with one system
prompt, then with system prompts that differ in their first word, so nothing can
be shared. A request hits if it computes less than half of its prompt's tokens.
Options of moe-server may follow, as one word each.
"""
import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import statistics
import sys
import time

from compare import ROOT

sys.path[:0] = [os.path.join(ROOT, "tests", part) for part in ("server", "convert")]

import test_server  # noqa: E402

RULES = ("You answer for a shop that sells and repairs bicycles in a town by a river. The shop opens at nine in the "
         "morning and closes at six in the evening, except on Sundays. Repairs take two days; a new bicycle can be "
         "tried for a week and returned without a reason. Children's bicycles are lent for a small fee, and helmets "
         "are lent for nothing. Be short and friendly, and never promise a price. If a customer asks for a part that "
         "is not in stock, offer to order it and say that this takes about a week. If a customer is angry, say that "
         "you are sorry, and offer to call back. Do not answer questions about anything else than bicycles. ")
QUESTIONS = ("How long does it take to mend a flat tyre?", "Can I try a bicycle before I buy it?",
             "Do you lend bicycles for children?", "When do you open on Saturday?", "My brakes make a noise. Why?",
             "Which lock should I buy?", "Is a helmet included?", "Can you order a saddle for me?")


def ask(port, system, question, length):
    """Return the seconds until the first token of an answer, and the number of its prompt's tokens."""
    chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"messages": chat, "stream": True, "max_tokens": length, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    begin, first, usage = time.monotonic(), None, None
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        if not first and any(choice["delta"].get("content") for choice in chunk["choices"]):
            first = time.monotonic() - begin
    connection.close()
    return first if first else time.monotonic() - begin, usage


def measure(model, options, shared, o):
    """Return the median seconds, the share of hits and the share of the prompts' tokens that were not computed."""
    system = RULES * o.length
    seconds, hits, computed, tokens = [], 0, 0, 0
    with test_server.serving(*options, fast=False, model=model) as server, \
            concurrent.futures.ThreadPoolExecutor(o.clients) as clients:
        ask(server.port, "Warm up.", "Hello?", 2)
        for i in range(0, o.requests, o.clients):
            before = test_server.figure(server, "decoder_rows_total")
            asked = [(server.port, system if shared else f"{k} {system}", f"{k}: {QUESTIONS[k % len(QUESTIONS)]}",
                      o.answer) for k in range(i, min(i + o.clients, o.requests))]
            answers = list(clients.map(lambda one: ask(*one), asked))
            rows = test_server.figure(server, "decoder_rows_total") - before
            prompt = sum(usage["prompt_tokens"] for _, usage in answers)
            rows -= sum(usage["completion_tokens"] for _, usage in answers)
            seconds += [first for first, _ in answers]
            hits += len(answers) * (rows < prompt / 2)
            computed, tokens = computed + max(rows, 0), tokens + prompt
    return statistics.median(seconds), hits / o.requests, 1 - computed / tokens, tokens / o.requests


def smollm2():
    import test_smollm2
    return test_smollm2.converted("q8")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", help="model that answers chats (SmolLM2-135M-Instruct, downloaded)")
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--clients", type=int, default=1, help="requests at once")
    p.add_argument("--length", type=int, default=1, help="repetitions of the system prompt of about 160 tokens")
    p.add_argument("--answer", type=int, default=4, help="tokens of an answer")
    o, options = p.parse_known_args()
    model = o.model or smollm2()
    for shared in True, False:
        median, hits, saved, tokens = measure(model, options, shared, o)
        print(f"{'one system prompt' if shared else 'different ones':18} {tokens:5.0f} tokens a prompt, "
              f"first token after {1000 * median:7.1f} ms, {100 * hits:5.1f} % hits, {100 * saved:4.1f} % of the "
              "prompts' tokens not computed", flush=True)


if __name__ == "__main__":
    main()
