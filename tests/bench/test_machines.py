#!/usr/bin/env python3
"""Test that tools/MACHINES.md has the tables of machines.py, and that the formulas of machines.py agree with
simulations. Prints `ok NAME` or `FAIL NAME`."""
import os
import random
import sys

import machines
from suite import Suite

test = Suite()
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@test
def the_page_has_the_tables():
    with open(os.path.join(ROOT, "tools", "MACHINES.md"), encoding="utf-8") as file:
        page = file.read()
    for table in machines.files(), machines.machines([1, 3], [14, 28]), machines.ranks():
        table = "\n".join(table)
        assert table in page, table


@test
def visits_equal_those_of_random_rows():
    r = random.Random(1)
    for experts, rows in (128, 4), (128, 32), (36, 25), (12, 4):
        drawn = sum(len({e for _ in range(rows) for e in r.sample(range(experts), machines.K)}) for _ in range(3000))
        assert abs(machines.visited(experts, rows) / (drawn / 3000) - 1) < 0.02, (experts, rows)


@test
def bytes_equal_those_of_a_cache_of_the_most_frequent_experts():
    """Simulate steps with a cache that prefers the decoder's experts to the encoder's, as the formula assumes."""
    r = random.Random(2)
    for experts, (batch, beam), budget in ((machines.PAIR, (1, 4), 2), (machines.WHOLE, (1, 4), 9),
                                           (machines.WHOLE, (8, 1), 9), (machines.PAIR, (8, 1), 1)):
        slots, reads, sentences = int(budget * machines.GIB / machines.SLAB), 0, 40
        room = []  # cached experts per mixture of the decoder, of the encoder
        for n in experts[::-1]:
            room.append(min(n, slots / machines.LAYERS))
            slots -= room[-1] * machines.LAYERS
        for _ in range(sentences):
            for n, held, runs, rows in ((experts[1], room[0], machines.TARGET, batch * beam),
                                        (experts[0], room[1], 1, batch * machines.SOURCE)):
                for _ in range(runs * machines.LAYERS):
                    reads += sum(e >= held for e in {e for _ in range(rows) for e in r.sample(range(n), machines.K)})
        drawn = reads * machines.SLAB / (sentences * machines.TARGET * batch)
        found = machines.read(experts, batch, beam, budget * machines.GIB)
        assert abs(drawn / found - 1) < 0.05, (experts, batch, budget, drawn, found)


if __name__ == "__main__":
    sys.exit(test.run())
