"""Read fairseq's checkpoints and rename their contents to Hugging Face's layout: the original NLLB-MoE-54B, and dense
NLLB or M2M-100 in one file.

    PREFIX-shared.pt       weights shared by all ranks
    PREFIX-rank-0.pt ...   experts of each rank; each file numbers its experts from 0

A file is {"model": state_dict, "cfg": {"model": settings}} or {"model": ..., "args": settings}. Shapes are taken from
the tensors, all other values from the settings. Instances of fairseq's classes are read as objects without methods.
"""
import os
import re

import hf
import hf_tokens
import torchfile
from moefile import FormatError

CLASSES = "fairseq", "omegaconf", "numpy", "_codecs"  # modules that a checkpoint's training records refer to
NAMES = (  # fairseq's names -> NllbMoe's names in transformers
    (re.compile(r"\.moe_layer\.gate\.wg\."), ".ffn.router.classifier."),
    (re.compile(r"\.encoder_attn(\.|_layer_norm\.)"), r".cross_attention\1"),
    (re.compile(r"\.final_layer_norm\."), ".ff_layer_norm."),
    (re.compile(r"(layers\.[0-9]+)\.(fc[12])\."), r"\1.ffn.\2."))
EXPERT = re.compile(r"(.*\.layers\.[0-9]+)\.moe_layer\.experts\.([0-9]{1,6})\.(.*)")
# Settings and their supported values, the default first.
FIXED = (("activation_fn", "relu"), ("encoder_normalize_before", True), ("decoder_normalize_before", True),
         ("encoder_learned_pos", False), ("decoder_learned_pos", False), ("layernorm_embedding", False),
         ("no_token_positional_embeddings", False), ("moe_second_expert_policy", "all"), ("moe_top1_expert", False),
         ("no_decoder_final_norm", False), ("no_cross_attention", False), ("cross_self_attention", False))


def files_of(path):
    """Return the files of a checkpoint, given the prefix or one file: shared weights first, then ranks from 0."""
    prefix = re.sub(r"(-shared|-rank-[0-9]+)?(\.pt)?\Z", "", path)
    shared = prefix + "-shared.pt"
    if not os.path.lexists(shared):
        return [path if os.path.lexists(path) else prefix + ".pt"]
    folder, start = os.path.split(prefix)
    ranks = [re.fullmatch(re.escape(start) + r"-rank-([0-9]{1,6})\.pt", name) for name in os.listdir(folder or ".")]
    count = 1 + max((int(rank[1]) for rank in ranks if rank), default=-1)
    out = [f"{prefix}-rank-{k}.pt" for k in range(count)]
    for name in out:
        if not os.path.lexists(name):
            raise FormatError(f"{name} is missing: the last rank is {count - 1}")
    if not out:
        raise FormatError(f"{prefix}-rank-0.pt is missing: {shared} requires it")
    return [shared, *out]


def load(path):
    """Return (settings or None, tensors by name) of a file."""
    try:
        checkpoint = torchfile.load(path, CLASSES)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("model"), dict):
        raise FormatError(f"{path}: not a fairseq checkpoint: no state_dict under \"model\"")
    cfg = checkpoint.get("cfg")
    settings = cfg.get("model") if isinstance(cfg, (dict, torchfile.Object)) else checkpoint.get("args")
    if isinstance(settings, torchfile.Object):
        settings = settings.attributes
    return settings, hf.stored_tensors(path, checkpoint["model"])


def renamed(tensors, mixture):
    """Return a file's tensors under transformers' names; expert numbers do not change."""
    out = {}
    for name, t in tensors.items():
        if name == "decoder.output_projection.weight":
            name = "lm_head.weight"
        for pattern, new in NAMES if mixture else ():
            name = pattern.sub(new, name)
        out[name] = t
    return out


def read_files(paths):
    """Return (settings, tensors under transformers' names, number of experts)."""
    settings, tensors, experts = None, {}, 0
    found = [load(path) for path in paths]
    mixture = any(EXPERT.fullmatch(name) for _, these in found for name in these)
    for path, (about, these) in zip(paths, found):
        settings, here = settings or about, 0
        for name, t in renamed(these, mixture).items():
            expert = EXPERT.fullmatch(name)
            if expert:
                number = int(expert[2])
                here = max(here, number + 1)
                name = f"{expert[1]}.ffn.experts.expert_{experts + number}.{expert[3]}"
            elif len(paths) > 1 and path != paths[0]:
                raise FormatError(f"{path}: tensor {name} does not belong to an expert: it should be in {paths[0]}")
            tensors[name] = t
        experts += here
    if not isinstance(settings, dict):
        raise FormatError(f"{paths[0]}: missing settings: neither \"cfg\" nor \"args\" contains the number of heads")
    return settings, tensors, experts


def layers_of(tensors, side, inside=""):
    """Return the numbers of the encoder's or decoder's layers with matching tensor names."""
    found = (re.match(rf"{side}\.layers\.([0-9]{{1,6}})\.{inside}", name) for name in tensors)
    return sorted({int(x[1]) for x in found if x})


def config_of(path, settings, tensors, experts):
    """Return the equivalent of config.json."""
    given = hf.Config(path, settings)
    for key, *values in FIXED:
        given.only(key, *values)
    embedding = tensors.get("decoder.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FormatError(f"{path}: tensor decoder.embed_tokens.weight is missing or not a matrix")
    out = {"model_type": "nllb-moe" if experts else "m2m_100", "activation_function": "relu",
           "vocab_size": embedding.shape[0], "d_model": embedding.shape[1], "pad_token_id": 1, "eos_token_id": 2,
           "decoder_start_token_id": 2, "scale_embedding": not given.get("no_scale_embedding", bool, False),
           "max_position_embeddings": max(given.get(f"max_{x}_positions", int, 1024, least=2, most=1 << 16)
                                          for x in ("source", "target"))}
    for side in ("encoder", "decoder"):
        inner = [t for name, t in tensors.items() if name.startswith(side + ".layers.") and name.endswith("fc1.weight")]
        if not inner:
            raise FormatError(f"{path}: tensor {side}.layers.0.fc1.weight is missing")
        out.update({side + "_layers": len(layers_of(tensors, side)), side + "_ffn_dim": inner[0].shape[0],
                    side + "_attention_heads": given.get(side + "_attention_heads", int)})
        if experts:
            sparse = layers_of(tensors, side, r"ffn\.router\.")
            out[side + "_sparse_step"] = sparse[0] + 1 if sparse else 0
    if experts:
        given.only("moe_expert_count", experts)
        out.update({"num_experts": experts, "moe_token_dropout": given.get("moe_eom", float, 0.0)})
    return hf.Config(path, out)


def read_fairseq(path, spm=None, say=lambda message: None, ids_only=False):
    """Return the metadata and tensors of a checkpoint, like hf.read_hf; `spm` is NLLB's SentencePiece model."""
    if not spm and not ids_only:
        hf_tokens.no_tokeniser(["--spm, NLLB's SentencePiece model,"])
    paths = files_of(path)
    settings, tensors, experts = read_files(paths)
    config = config_of(os.path.basename(paths[0]), settings, tensors, experts)
    m = hf.read_config(config)
    generation = hf.Config(config.path, {"max_new_tokens": min(200, m.positions)})  # as in facebook/nllb-moe-54b
    tokens = {"tokenizer.kind": "sentencepiece", **hf_tokens.nllb_meta(None, m, spm)} if spm else hf_tokens.NO_TOKENS
    return hf.build(m, tensors, generation, tokens, paths, say)
