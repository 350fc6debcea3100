"""The options of Translator as keyword types, so that type checkers know every name. tests/package/test_translator.py
compares the names with options()."""

import sys
from typing import TYPE_CHECKING, Literal, TypedDict

if sys.version_info >= (3, 11):
    from typing import Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    Unpack = None  # annotations are text

__all__ = ["CallOptions", "Options", "Unpack"]


class CallOptions(TypedDict, total=False):
    """Options of a translation, for a Translator or one of its calls. None means the default."""

    # Search
    preset: "Literal['paper', 'nvidia', 'tf', 'mlperf', 'hf', 'marian'] | None"
    beam: "int | None"
    nbest: "int | None"
    rerank: "float | None"
    length_penalty: "float | None"
    length_constant: "float | None"
    coverage_penalty: "float | None"
    prune: "float | None"
    early_stopping: "bool | int | None"
    min_target: "int | None"
    max_len: "int | None"
    max_len_factor: "float | None"
    max_len_offset: "int | None"
    shortlist: "bool | int | None"
    repetition_penalty: "float | None"
    stop_loops: "bool | int | None"
    force: "int | None"
    # Sampling
    sample: "bool | int | None"
    temperature: "float | None"
    top_k: "int | None"
    top_p: "float | None"
    min_p: "float | None"
    seed: "int | None"
    # Text
    split: "int | None"
    truncate: "bool | int | None"
    capitals: "bool | int | None"
    protect: "bool | int | None"
    memory: "str | None"
    alignment: "bool | int | None"
    share: "float | None"
    # Prompted models
    style: "str | None"
    context: "int | None"
    prompt: "str | None"
    # Gates
    gating: "Literal['softmax', 'topk', 'threshold', 'sigmoid', 'batchwise'] | None"
    noise: "int | None"


class Options(CallOptions, total=False):
    """All options of a Translator."""

    target: "str | None"
    source: "str | None"
    verify: "bool | int | None"
    copy: "bool | int | None"
    cache: "bool | int | None"
    form: "Literal['text', 'pieces', 'ids', 'raw-ids'] | None"
    kind: "Literal['translation', 'language'] | None"
    routing: "bool | int | None"
    draft: "str | None"
    prompt_cache: "str | None"
    threads: "int | None"
    batch: "int | None"
    batch_tokens: "int | None"
    isa: "str | None"
    device: "str | None"
    gpu_memory: "int | None"
    max_memory: "str | int | None"
    models_memory: "str | int | None"
    expert_memory: "str | int | None"
    context_memory: "int | None"
    kv_bits: "Literal[8, 16, 32] | None"
    piece: "int | None"
