#!/usr/bin/env python3
"""Of tests/mutations, which takes too long to run whole: that every error can still be made, and a few of them.

Usage: tests/python tests/train/test_mutations.py
"""
import importlib.machinery
import importlib.util
import os
import sys
import tempfile

from suite import Suite

PATH = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "mutations")
loader = importlib.machinery.SourceFileLoader("mutations", PATH)
mutations = importlib.util.module_from_spec(importlib.util.spec_from_loader("mutations", loader))
loader.exec_module(mutations)
test = Suite()
FEW = ("masks_of_training", "two_levels_of_topk")


@test
def every_error_has_its_place():
    with tempfile.TemporaryDirectory() as folder:
        tree, problems = mutations.Tree(folder), []
        for name, old, new, _ in mutations.MUTATIONS:
            try:
                tree.text(name, old, new)
            except (AssertionError, SyntaxError) as problem:
                problems.append(str(problem))
        assert not problems, "; ".join(problems)
        assert len(mutations.MUTATIONS) >= 51


@test
def a_few_errors_are_noticed():
    few = [x for x in mutations.MUTATIONS if x[3].endswith(FEW)]
    with tempfile.TemporaryDirectory() as folder:
        tree = mutations.Tree(folder)
        for suite in dict.fromkeys(x[3] for x in few):
            assert not tree.fails(suite)[0], f"{suite} fails without an error"
        missed = [x[2] for x in few if not tree.mutated(*x)]
        assert not missed, f"not noticed: {missed}"
        assert len(few) == 2


if __name__ == "__main__":
    sys.exit(test.run())
