#!/usr/bin/env python3
"""Check that tools/convert/moefile.py and moe.c agree on the metadata keys of layers.

Usage: tests/python tests/convert/test_keys.py [WORD]      WORD: run tests with matching names

Compares the tables of keys row by row, using keys.c, which includes moe.c. Then moefile.py and moe-info must agree
whether to accept files in which one key is missing, out of range, or of another type. Norms of mixtures, which no
golden model has, are compared with reference.py.
"""
import json
import os
import subprocess
import sys
import tempfile

from converting import BIN, ROOT, convert_quietly, run
from suite import Suite

INFO, CLASSIFY = (os.path.join(BIN, name) for name in ("moe-info", "moe-classify"))
GOLDEN = os.path.join(ROOT, "tests", "golden")
try:
    import numpy as np

    import convert
    import make_transformers
    import moefile
except ImportError:
    np = None
try:
    import reference
except ImportError:
    reference = None
test = Suite()
numpy_test = test.needs(np, "NumPy")


# ---- The tables ------------------------------------------------------------------------------------------------------

def engine_table():
    """Run keys.c; return moe.c's (kinds of layers, {(kind of layer, key): (type, range or names, default)})."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "keys")
        source = os.path.join(ROOT, "tests", "convert", "keys.c")
        command = [*os.environ.get("CC", "cc").split(), "-std=c11", "-w", "-O0", "-DMOE_PORTABLE", "-I" + ROOT,
                   "-pthread", "-ffp-contract=off", source, "-o", program, "-lm"]
        subprocess.run(command, check=True)
        lines = run([program]).lines
    rows = [line.split("\t") for line in lines]
    table = {tuple(row[:2]): tuple(row[2:]) for row in rows if len(row) > 1}
    assert len(table) == sum(len(row) > 1 for row in rows), "duplicate key in moe.c"
    return [row[0] for row in rows if len(row) == 1], table


def python_table():
    """Return moefile.py's kinds of layers and keys in the form of engine_table()."""
    number, table = (lambda x: f"{float(x):.17g}"), {}
    for kind, rows in moefile.LAYERS.items():
        for row in rows:
            allowed = " ".join(row.names) if row.kind == "name" else f"{number(row.low)} {number(row.high)}"
            default = (f"as {row.inherits}" if row.inherits else "required" if row.default is None
                       else row.default if row.kind == "name" else number(row.default))
            assert (kind, row.key) not in table, f"{kind}: duplicate {row.key} in moefile.py"
            table[kind, row.key] = row.kind, allowed, default
    return list(moefile.LAYERS), table


@numpy_test
def both_tables_have_the_same_keys():
    (kinds, theirs), (ours, table) = engine_table(), python_table()
    assert sorted(kinds) == sorted(ours), f"kinds of layers: {kinds} in moe.c, {ours} in moefile.py"
    problems = [f"{name}: {theirs.get(name, 'missing')} in moe.c, {table.get(name, 'missing')} in moefile.py"
                for name in sorted(theirs.keys() | table.keys()) if theirs.get(name) != table.get(name)]
    assert not problems, "; ".join(problems)
    assert len(table) > 40, "incomplete table"


# ---- Files -----------------------------------------------------------------------------------------------------------

def values_of(row):
    """Yield values to try for a key; None removes the key."""
    yield None
    if row.kind == "name":
        yield from row.names
        yield from ("", "all", row.names[0].upper(), 0)
        return
    yield from dict.fromkeys((int(row.low) - 1, int(row.low), 1, 2, 5, int(row.high), int(row.high) + 1))
    yield from (0.5, "1", [1], float("nan"))


def small_models(folder):
    """Yield (name, metadata, tensors) of small models with layers of every kind."""
    for name in ("base", "product", "hierarchy-threshold", "language-hierarchy", "deep", "deep-sparse"):
        yield name, *moefile.read(os.path.join(GOLDEN, f"model-{name}.bin"))
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 2, "decoder_layers": 2}
    for family in ("nllb-moe", "marian"):
        checkpoint, path = os.path.join(folder, family), os.path.join(folder, family + ".bin")
        make_transformers.make(checkpoint, family, **sizes)
        complaint = convert_quietly("--from", "hf", checkpoint, "-o", path)
        assert complaint is None, complaint
        yield family, *moefile.read(path)
    yield "student", *student(*moefile.read(path))
    yield "average", *average(*moefile.read(path))


def student(meta, tensors):
    """Turn a Transformer into one whose decoder has a recurrent layer and a gated layer with an RMS norm."""
    random, d, hidden = np.random.default_rng(7), meta["model.width"], meta["decoder.2.hidden"]
    dropped = "decoder.0.qkv", "decoder.0.out", "decoder.0.heads", "decoder.2.norm.bias"
    meta, tensors = ({k: v for k, v in x.items() if not k.startswith(dropped)} for x in (meta, tensors))
    new = {"decoder.0.input.weight": (d, d), "decoder.0.forget.weight": (d, d), "decoder.0.forget.bias": (d,),
           "decoder.2.gate.weight": (hidden, d)}
    tensors.update({name: moefile.Tensor.encode(random.standard_normal(dims).astype(np.float32))
                    for name, dims in new.items()})
    return {**meta, "decoder.0.kind": "ssru", "decoder.2.gated": 1, "decoder.2.norm.kind": "rms"}, tensors


def average(meta, tensors):
    """Turn a Transformer into one with average attention in the decoder, and raw keys and values in the encoder."""
    random, d = np.random.default_rng(8), meta["model.width"]
    dropped = "decoder.0.qkv", "decoder.0.out", "decoder.0.heads", "encoder.0.qkv"
    meta, tensors = ({k: v for k, v in x.items() if not k.startswith(dropped)} for x in (meta, tensors))
    new = {"decoder.0.up.0.weight": (7, d), "decoder.0.up.1.weight": (7, 7), "decoder.0.up.1.bias": (7,),
           "decoder.0.down.weight": (d, 7), "decoder.0.input.weight": (d, d), "decoder.0.forget.weight": (d, d),
           "encoder.0.q.weight": (d, d), "encoder.0.q.bias": (d,), "encoder.0.kv.weight": (2 * d, d),
           "encoder.0.kv.bias": (2 * d,)}
    tensors.update({name: moefile.Tensor.encode(random.standard_normal(dims).astype(np.float32))
                    for name, dims in new.items()})
    return {**meta, "decoder.0.kind": "average", "decoder.0.hidden": 7, "decoder.0.depth": 3,
            "decoder.0.activation": "relu", "encoder.0.raw": 1, "encoder.0.norm": "before"}, tensors


def layers_to_try(m, seen):
    """Yield (name, kind) of each layer of a model whose variant is not in `seen`; add the variant to it."""
    for side in ("encoder", "decoder", "network"):
        for i, x in enumerate(getattr(m, side, ())):
            gate, groups, raw = (getattr(x, key, 0) for key in ("gate", "groups", "raw"))
            sort = m.architecture, side, x.kind, gate, groups > 0, raw
            if sort not in seen:
                seen.add(sort)
                yield f"{side}.{i}", x.kind
    if m.architecture == "gnmt-moe" and m.attention.kind not in seen:
        seen.add(m.attention.kind)
        yield "attention", "gnmt-attention"


def verdicts(folder, meta, tensors):
    """Write a model file; return the errors that (moefile.py, moe-info) report, "" for none."""
    path = os.path.join(folder, "tried.bin")
    moefile.write_model(path, meta, tensors)
    try:
        expected = moefile.shapes(moefile.describe(moefile.read_meta(path)), tensors)
        moefile.check_model(meta, {name: tensors[name] for name in expected if name in tensors})
        ours = ""
    except moefile.FormatError as error:
        ours = str(error)
    done = subprocess.run([INFO, path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8")
    assert done.returncode in (0, 3), f"moe-info: status {done.returncode}: {done.stderr}"
    return ours, done.stderr.strip() if done.returncode else ""


def changes(m, meta, seen):
    """For each kind of layer, yield (description, changed metadata) with changes to every key and to the kind."""
    for name, kind in layers_to_try(m, seen):
        for row in moefile.LAYERS[kind]:
            for value in values_of(row):
                key = f"{name}.{row.key}"
                if value is not None:
                    yield f"{key} = {value!r}", {**meta, key: value}
                elif key in meta:
                    yield f"no {key}", {k: v for k, v in meta.items() if k != key}
        if kind != "gnmt-attention":
            for other in [*moefile.LAYERS, "", "softmax", 1]:
                yield f"{name}.kind = {other!r}", {**meta, name + ".kind": other}


@numpy_test
def both_accept_the_same_files():
    problems, taken, refused, seen = [], set(), set(), set()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        for model, meta, tensors in small_models(folder):
            m = moefile.check_model(meta, tensors)
            assert verdicts(folder, meta, tensors) == ("", ""), model
            for what, changed in changes(m, meta, seen):
                ours, theirs = verdicts(folder, changed, tensors)
                if bool(ours) != bool(theirs):
                    problems.append(f"{model}, {what}: '{ours}' by moefile.py, '{theirs}' by moe.c")
                (refused if theirs else taken).add(what)
    assert not problems, f"{len(problems)}: " + "; ".join(problems[:20])
    assert len(taken) > 100 and len(refused) > 300, (len(taken), len(refused))


@test.needs(reference, "PyTorch")
def norms_are_computed_at_their_position():
    random = np.random.default_rng(5)
    meta, tensors = moefile.read(os.path.join(GOLDEN, "model-deep.bin"))
    wide = meta["network.0.hidden"]  # a norm after linear experts has the width of their outputs
    for place, right, wrong in ("before", 33, wide), ("after", wide, 33):
        def tried(columns):
            vectors = {f"network.0.norm.{x}": moefile.Tensor.encode(random.standard_normal(columns).astype(np.float32))
                       for x in ("weight", "bias")}
            return {**meta, "network.0.norm": place, "network.0.epsilon": 0.5}, {**tensors, **vectors}
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.bin")
            moefile.write_model(path, *tried(right))
            x = random.standard_normal((5, 33)).astype(np.float32)
            numbers = [" ".join(f"{v:.9g}" for v in row) for row in x]
            lines = run([CLASSIFY, "-m", path, "--json", "--top", "7"], numbers).lines
            wanted = reference.load(path, reference.torch.float64).classify(reference.torch.from_numpy(x).double())
            for line, row in zip(lines, wanted.tolist(), strict=True):
                got = {y["class"]: y["logprob"] for y in json.loads(line)["top"]}
                assert max(abs(got[i] - p) for i, p in enumerate(row)) < 1e-5, (place, got, row)
            ours, theirs = verdicts(folder, *tried(wrong))
            assert "network.0.norm" in ours and "network.0.norm" in theirs, (place, ours, theirs)


# ---- Writing ---------------------------------------------------------------------------------------------------------

@numpy_test
def invalid_settings_are_not_written():
    for settings in ({"hiden": 4}, {"hidden": 0}, {"hidden": 4.5}, {"hidden": True}, {"hidden": 1 << 21},
                     {"residual": 2}, {"forget_bias": 101}, {"forget_bias": float("nan")}, {"merge": "both"},
                     {"merge": 1}, {"heads": 2}):
        try:
            moefile.layer_meta("encoder.0", "lstm", **settings)
        except moefile.FormatError as error:
            assert next(iter(settings)) in str(error), error
            continue
        raise AssertionError(f"accepted {settings}")
    written = moefile.layer_meta("encoder.0", "lstm", hidden=np.int64(4), residual=True, forget_bias=1)
    assert written == {"encoder.0.kind": "lstm", "encoder.0.hidden": 4, "encoder.0.residual": 1,
                       "encoder.0.forget_bias": 1.0}
    assert [type(x) for x in written.values()] == [str, int, int, float]


@numpy_test
def configs_of_checkpoints_have_the_same_settings():
    layer = {"type": "moe", "experts": 6, "hidden": 4, "gate": "noisy top-k", "k": 1}
    meta = convert.mixture_meta("encoder.1", {**layer, "groups": 3, "parent_k": 2, "gate_relu": True})
    described = moefile.describe_mixture(moefile.Entries(meta, "encoder.1."))
    assert (described.gate, described.k, described.parent.gate, described.parent.k) == ("topk", 1, "topk", 2)
    assert described.gate_relu == 1 and described.groups == 3 and "encoder.1.parent.empty" in meta
    for row in moefile.LAYERS["moe"]:  # settings that the config lacks have the defaults of the file format
        plain = moefile.describe_mixture(moefile.Entries(convert.mixture_meta("encoder.1", layer), "encoder.1."))
        if row.default is not None and row.key != "k":
            assert getattr(plain, row.field) == row.default, row.key
    for wrong in ({"experts": 0}, {"units": 4}, {"kind": "moe"}, {"gate": "hard"},
                  {"groups": 3, "parent_gate": "hard"}):
        try:
            convert.mixture_meta("encoder.1", {**layer, **wrong})
        except moefile.FormatError as error:
            assert list(wrong)[-1] in str(error), error
            continue
        raise AssertionError(f"accepted {wrong}")


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
