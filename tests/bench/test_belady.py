#!/usr/bin/env python3
"""Test that the bank caches experts nearly optimally, unlike an LRU cache. Prints `ok NAME` or `FAIL NAME`."""
import sys

import belady
from suite import Suite

test = Suite()


@test
def few_visits_require_reading():
    """For each network, moe must be within the limits for every budget, and LRU must miss them for some budget."""
    for network in belady.networks(belady.phrases("en"), "de"):
        for batch in (32, 128) if network.name == "NLLB-MoE-54B, uniform" else (32,):
            found = list(belady.compare(network, batch, 450))
            assert not any(belady.too_low(network, *shares) for _, _, *shares in found), found
            assert any(belady.too_low(network, recent, *best) for _, recent, _, *best in found), found


@test
def belady_and_the_fixed_set_equal_a_manual_trace():
    runs = [(0, dict.fromkeys(x, 1)) for x in ((0, 1), (2,), (0, 1), (2,), (0,))]
    assert belady.belady(runs, 1) == 2 / 7  # the optimum keeps expert 0
    assert belady.belady(runs, 2) == 3 / 7
    assert belady.belady(runs, 3) == 4 / 7
    assert belady.lru(runs, 2) == 2 / 7 and belady.lru(runs, 3) == 4 / 7
    assert belady.fixed([(1, {7: 1}), None, *runs], 1) == 3 / 7


if __name__ == "__main__":
    sys.exit(test.run())
