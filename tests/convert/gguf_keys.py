#!/usr/bin/env python3
"""Set every GGUF key that llama.cpp reads to unusual values, and compare
converted files with llama.cpp.

Usage: tests/python tests/convert/gguf_keys.py [--peer]

For each family, key and value, convert.py must reject the key by name, write
the same model file as without the key, or use the key (READ). --peer also
compares log-probabilities of the accepted files with those of llama.cpp, which
must be equal unless llama.cpp fails to load the file (low-level functions of
llama-cpp-python; used: 0.3.36, built from source by pip). Prints the number of
files per family and result. test_gguf.py runs the part without --peer.
"""
import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile

import gguf
import numpy as np

import gguf_file
import make_decoder as make
import make_gguf
from moefile import FormatError

# Keys of llama-arch.cpp at 0c1e570 that the package's constants lack.
LATER = """
activation.situ_beta activation.situ_linear_beta adapters.count adapters.lora_rank adapters.router_gain
adapters.token_ids_activate adapters.token_ids_substitute attention.compress_ratios attention.compress_rope_freq_base
attention.indexer.block_size attention.indexer.kpool attention.indexer.kpool_select_tail attention.indexer.local_blocks
attention.indexer.types attention.key_length_mla_swa attention.kv_lora_rank_swa attention.output_group_count
attention.output_lora_rank attention.recurrent_layers attention.rope_pattern attention.value_length_mla_swa
attention.value_scale attn_res.block_size block_size classifier.pooling_type conv_group_size conv_kernel_size
deepstack_mapping dense_2_feat_in dense_2_feat_out dense_3_feat_in dense_3_feat_out expert_latent_length
hash_layer_count hidden_activation hrm.h_cycles hrm.l_cycles hrm.layers_per_stack hrm.prefix_lm hyper_connection.count
hyper_connection.epsilon hyper_connection.low_rank hyper_connection.magnitude hyper_connection.sinkhorn_iterations
kda.gate_lower_bound kda.safe_gate norm_before_fc norm_before_residual num_loops ple.conv_kernel ple.eos_token_id
ple.head_offsets ple.head_vocab_sizes ple.heads_per_ngram ple.image_token_id ple.layer_multipliers ple.layers
ple.ngram_size rope.scale_linear selector_rank selector_top_k skip_loop_final_norm target_hidden_size target_layers
""".split()
OTHER = ["general.source.huggingface.repository", "general.tensor_extra.name", "general.tensor_extra.prec_a4",
         *(f"tokenizer.ggml.{x}" for x in ("cls_token_id", "normalizer.lowercase", "normalizer.strip_accents",
                                           "suppress_tokens"))]
VALUES = 3, 0.37, "unusual", True, False, [1, 2, 1]
# Keys that may change the model file.
READ = re.compile(r"general\.(sampling\.(temp|top_k|top_p|min_p|penalty_repeat)|license|name|alignment)|"
                  r"tokenizer\.ggml\.((bos|eos|eot|eom|padding|fim_pad|fim_rep|fim_sep)_token_id|add_bos_token|pre)|"
                  r"tokenizer\.chat_template|"
                  r"ARCH\.(context_length|rope\.freq_base|attention\.layer_norm_rms_epsilon|expert_used_count|"
                  r"expert_weights_scale)")
FIXED = {"general.architecture", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"}
IDS = [1, 5, 9, 33, 60, 8, 7, 77, 90, 3]


def keys_of(package):
    """Return the keys in the package's constants."""
    for name, value in vars(package).items():
        if isinstance(value, str) and not name.startswith("_"):
            yield re.sub(r"\{(id|name|dense)\}", "0", value.replace("{arch}", "ARCH"))
        elif isinstance(value, type):
            yield from keys_of(value)


KEYS = sorted({*keys_of(gguf.constants.Keys), *(f"ARCH.{key}" for key in LATER), *OTHER, "ARCH.unknown"} - FIXED)


def made(at, family):
    """Write the checkpoint of a family; return its config and arrays."""
    changes = {"hunyuan_v1_dense": {"rope_theta": 11158840.0, "rope_scaling": None},
               "qwen3_moe": {"mlp_only_layers": []}}.get(family, {})
    config, arrays = make.make(at, family, vocab_size=448, **changes)
    return config, {name: x.astype(np.float32) for name, x in arrays.items()}


def write(path, config, arrays, **more):
    rename = lambda tensors: {name.replace("exp_probs_b.bias", "exp_probs_b"): x for name, x in tensors.items()}
    make_gguf.write(path, config, arrays, tokens=True, change=rename, **more)


def read(path):
    """Return the metadata and the position table of the converted file, or the message of a refusal."""
    try:
        found = gguf_file.read_gguf(path)
    except FormatError as error:
        return str(error)
    table = found.tensors["rotary.weight"].array().tobytes()
    return {key: str(value) for key, value in found.meta.items()}, table, found.licence


def cases(family, at, values=VALUES):
    """Yield (key, value, path, full key, result, same): same is True if the result equals that without the key."""
    architecture, path = make_gguf.ARCHITECTURES[family], os.path.join(at, "x.gguf")
    config, arrays = made(at, family)
    write(path, config, arrays)
    wanted = read(path)
    for key in KEYS:
        for value in values:
            name = key.replace("ARCH", architecture)
            write(path, config, arrays, **{name.replace(".", "__"): value})
            found = read(path)
            yield key, value, path, name, found, found == wanted


def outcome(key, value, name, found, same):
    """Return "refused", "same" or "read"."""
    if isinstance(found, str):
        return "refused" if name in found else f"{name} = {value!r}: {found}"
    return "same" if same else "read" if READ.fullmatch(key) else f"{name} = {value!r} changes the model file"


def counted(family, values=VALUES):
    """Return the number of files per result."""
    with tempfile.TemporaryDirectory() as at:
        return collections.Counter(outcome(key, value, *rest) for key, value, _, *rest in cases(family, at, values))


# ---- llama.cpp -------------------------------------------------------------------------------------------------------

PEER = """
import ctypes, json, os, sys
import numpy as np
import llama_cpp.llama_cpp as lib
path, ids = sys.argv[1], json.loads(sys.argv[2])
lib.llama_backend_init()
model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
if not model:
    sys.exit(3)
p = lib.llama_context_default_params()
p.n_ctx, p.n_threads, p.flash_attn_type, p.type_k, p.type_v = 64, 1, 0, 0, 0
context, batch = lib.llama_init_from_model(model, p), lib.llama_batch_init(len(ids), 0, 1)
for i, token in enumerate(ids):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
    batch.seq_id[i][0] = 0
batch.n_tokens = len(ids)
assert lib.llama_decode(context, batch) == 0
vocabulary = lib.llama_model_get_vocab(model)
n = lib.llama_vocab_n_tokens(vocabulary)
rows = [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (n,)).tolist() for i in range(len(ids))]
tokens, text = (ctypes.c_int32 * 64)(), b"<think>the house 12345"
count = lib.llama_tokenize(vocabulary, text, len(text), tokens, 64, True, True)
ends = [i for i in range(n) if lib.llama_vocab_is_eog(vocabulary, i)]
print("\\n" + json.dumps({"rows": rows, "ids": list(tokens[:count]), "ends": ends}))
sys.stdout.flush()
os._exit(0)
"""


def peer(path):
    """Return llama.cpp's results for a file, or None if it fails."""
    result = subprocess.run([sys.executable, "-c", PEER, path, json.dumps(IDS)], capture_output=True, text=True,
                            timeout=60)
    if result.returncode:
        return None
    found = json.loads(result.stdout.splitlines()[-1])
    rows = np.array(found.pop("rows"))
    return rows - rows.max(-1, keepdims=True), found


def compared(family):
    """Compare the accepted files with llama.cpp; return the number of files per result."""
    count = collections.Counter()
    with tempfile.TemporaryDirectory() as at:
        config, arrays = made(at, family)
        write(at + "/base.gguf", config, arrays)
        rows, rest = peer(at + "/base.gguf")
        for key, value, path, name, found, same in cases(family, at):
            if outcome(key, value, name, found, same) != "same" or key.startswith(("general.", "clip.", "imatrix.")):
                continue
            other = peer(path)
            if other is None:
                count["llama.cpp fails"] += 1
                print(f"{name} = {value!r}: llama.cpp fails", flush=True)
            elif np.abs(other[0] - rows).max() < 1e-4 and other[1] == rest:
                count["equal"] += 1
            else:
                count["DIFFERENT"] += 1
                print(f"{name} = {value!r}: {np.abs(other[0] - rows).max():.3g}, {other[1]} for {rest}", flush=True)
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="store_true", help="compare with llama.cpp")
    arguments = parser.parse_args()
    for model in make_gguf.ARCHITECTURES:
        print(model, dict(counted(model)), dict(compared(model)) if arguments.peer else "", flush=True)
