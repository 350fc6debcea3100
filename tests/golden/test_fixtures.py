#!/usr/bin/env python3
"""Test that the files in tests/golden match tools/convert/reference.py.

Usage: tests/python tests/golden/test_fixtures.py [WORD]

Recomputes the files from the stored weights and seeds with the functions of make_golden.py. Numbers may differ by 1e-6;
integers and texts must be equal. WORD selects tests by name. Prints `ok NAME` or `FAIL NAME` per test and `N passed, N
failed`. Requires PyTorch (tools/install-deps --test).
"""
import os
import sys
import tempfile

import make_golden as golden
import moefile
import numpy as np
import reference as ref
import torch
from suite import Suite

FOLDER = os.path.join(golden.ROOT, "tests", "golden")
torch.set_num_threads(1)
torch.set_grad_enabled(False)
test = Suite()


def same(path, meta, tensors):
    """Check that a file in tests/golden has this metadata and these tensors."""
    with tempfile.TemporaryDirectory() as folder:  # write the new tensors to pack them like those of the file
        moefile.write_model(os.path.join(folder, "new"), meta, tensors)
        meta, tensors = moefile.read(os.path.join(folder, "new"))
    there, arrays = moefile.read(os.path.join(FOLDER, path))
    assert list(there) == list(meta) and list(arrays) == list(tensors), f"{path}: different entries"
    for key, value in meta.items():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" or isinstance(value, float):
            assert np.allclose(there[key], value, rtol=0, atol=1e-6), f"{path}: {key}"
        else:
            assert np.array_equal(there[key], value), f"{path}: {key}"
    for key, tensor in tensors.items():
        parts = [x.array() if isinstance(x.array(), tuple) else (x.array(),) for x in (arrays[key], tensor)]
        assert all(np.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(*parts)), f"{path}: {key}"


def model_of(name):
    """Read a model in tests/golden; return (seed, metadata, weights, model)."""
    meta, tensors = moefile.read(os.path.join(FOLDER, f"model-{name}.bin"))
    weights = {key: tensor.array() for key, tensor in tensors.items()}
    seed = moefile.read(os.path.join(FOLDER, f"model-{name}.expect.bin"))[0]["seed"]
    return seed, meta, weights, ref.Model(moefile.describe(meta), meta, weights, torch.float64)


@test
def ops_match_the_reference():
    cases = golden.Cases()
    for add in golden.OPS:
        add(cases)
    same("ops.bin", cases.meta, cases.tensors)


@test
def translations_match_the_reference():
    for name in golden.MODELS:
        seed, meta, weights, model = model_of(name)
        sources, _, tags = golden.sentences(meta, seed)
        results = {run: golden.translate_all(model, sources, tags, run) for run in golden.runs_of(meta)}
        same(f"model-{name}.expect.bin", *golden.expect(seed, meta, weights, results))


@test
def language_models_and_classifiers_match_the_reference():
    for names, expect in ((golden.LANGUAGE_MODELS, golden.expect_language),
                          (golden.CLASSIFIERS, golden.expect_classes)):
        for name in names:
            seed, _, _, model = model_of(name)
            same(f"model-{name}.expect.bin", *expect(seed, model))


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
