/* moe-make-random - write a model of a published size with random weights, for benchmarks (see --help).
 *
 * Contents
 *   1. Shapes   the layer lists of Shazeer et al. 2017, App. C and E
 *   2. Model    metadata and tensors of a shape
 *   3. Main
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "moe.h"
#include "tools/programs/options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_DONE = 0, EXIT_USAGE = 2, EXIT_MODEL = 3, EXIT_INPUT_OUTPUT = 4 };

/* ==== 1. Shapes ========================================================================================= */

/* Encoders consist of lstm, lstm, [moe,] lstm; decoders consist of lstm with attention, [moe,] lstm. Every layer has a
 * residual. Language models (without attention) have lstm, moe, lstm. With groups, gates have two levels, each of which
 * selects `k`; the paper does not say how it grouped its 512 and 2048 experts. Attention is that of App. G (`product`)
 * or additive. Gates use thresholds (App. F; App. E for one language pair) or top-k. GNMT has no mixtures; its encoder
 * and its decoder have `layers` layers each. */
typedef struct shape {
    const char *name, *words;
    int vocabulary, width, hidden, attention, experts, groups, k, expert_hidden, product, thresholds, layers;
} shape;

static const shape shapes[] = {
    { "paper-dense", "the paper's network without its mixtures", 32000, 512, 2048, 512, 0, 0, 0, 0, 1, 0, 0 },
    { "paper-32", "32 experts of 2048, 4 for a token", 32000, 512, 2048, 512, 32, 0, 4, 2048, 1, 1, 0 },
    { "paper-512", "16 groups of 32 experts, 2.2 billion weights", 32000, 512, 2048, 512, 512, 16, 2, 2048, 1, 1, 0 },
    { "paper-2048", "32 groups of 64 experts, 8.7 billion weights", 32000, 512, 2048, 512, 2048, 32, 2, 2048, 1, 1, 0 },
    { "multilingual-512", "512 experts of 8192, 2 a token, 8.7 billion weights", 32000, 512, 2048, 512, 512, 0, 2, 8192,
      1, 0, 0 },
    { "gnmt-8", "Wu et al.'s 8 + 8 layers, 279 million weights", 32000, 1024, 1024, 1024, 0, 0, 0, 0, 0, 0, 8 },
    { "lm-32", "language model: 32 experts of 1024, 4 for a token", 32000, 512, 512, 0, 32, 0, 4, 1024, 0, 0, 0 },
    { "lm-4096", "language model: 16 groups of 256 experts", 32000, 512, 512, 0, 4096, 16, 2, 1024, 0, 0, 0 },
    { "lm-131072", "language model: 256 groups of 512 experts", 32000, 128, 128, 0, 131072, 256, 2, 32, 0, 0, 0 },
    { "small", "the size of the shipped model", 8000, 256, 512, 256, 32, 0, 2, 512, 0, 0, 0 },
};

/* Transformers of published checkpoints. M2M-100's family has norms before sub-layers, Marian's family after them.
 * Every `step`-th feed-forward layer is a mixture of `experts` that selects 2 per token. */
enum { MARIAN = 1, STUDENT = 2, GATED = 4 }; /* students have 2 recurrent decoder layers; gated models have RMS norms */
typedef struct transformer {
    const char *name, *words;
    int layers, width, hidden, heads, vocabulary, positions, marian, experts, step;
} transformer;

static const transformer transformers[] = {
    { "nllb-moe-54b", "NLLB-MoE, 128 experts in 12 layers: 54.5 billion", 24, 2048, 8192, 16, 256206, 1024, 0, 128, 4 },
    { "nllb-moe-1b", "its quarter: 64 experts in 6 layers, 1.1 billion", 12, 512, 2048, 8, 256206, 1024, 0, 64, 4 },
    { "nllb-1.3b", "NLLB-200 of 1.37 billion weights", 24, 1024, 8192, 16, 256206, 1024, 0, 0, 0 },
    { "nllb-600m", "NLLB-200 of 615 million weights", 12, 1024, 4096, 16, 256206, 1024, 0, 0, 0 },
    { "m2m-418m", "M2M-100 of 484 million weights", 12, 1024, 4096, 16, 128112, 1024, 0, 0, 0 },
    { "opus-big", "OPUS-MT tc-big: 231 million weights", 6, 1024, 4096, 16, 53017, 1024, 1, 0, 0 },
    { "opus-base", "OPUS-MT: 74 million weights", 6, 512, 2048, 8, 58101, 512, MARIAN, 0, 0 },
    { "opus-gated", "its size with gated units and RMS norms: 87 million", 6, 512, 2048, 8, 58101, 512, MARIAN | GATED,
      0, 0 },
    { "student-tiny", "Marian's tiny student, recurrent: 17 million", 6, 256, 1536, 8, 32000, 512, MARIAN | STUDENT, 0,
      0 },
};

/* Decoder-only models: Tencent's Hy-MT2, and Marco-MoE, whose form is Qwen3's (`qwen`). With experts, Hy-MT2's layer 0
 * is dense and the other layers are mixtures with a shared expert; all of Qwen3's are mixtures without one, and the
 * output is tied. Heads have width `head`. Dense models normalise heads after rotating them. */
typedef struct prompted {
    const char *name, *words;
    int layers, width, heads, keys, head, hidden, vocabulary, bos, eos, experts, k, expert_hidden, qwen;
} prompted;

static const prompted decoders[] = {
    { "hy-mt2-30b-a3b", "Hy-MT2-30B-A3B: 128 experts of 768, 8 for a token", 48, 2048, 32, 4, 128, 6912, 120832, 120000,
      120025, 128, 8, 768, 0 },
    { "hy-mt2-7b", "Hy-MT2-7B, dense", 32, 4096, 32, 8, 128, 14336, 128167, 127958, 127960, 0, 0, 0, 0 },
    { "hy-mt2-1.8b", "Hy-MT2-1.8B, dense", 32, 2048, 16, 4, 128, 6144, 120818, 120000, 120020, 0, 0, 0, 0 },
    { "hy-mt2-narrow", "the 30B's form, narrow: 16 experts of 32, for tests", 8, 64, 4, 2, 32, 96, 600, 1, 2, 16, 3, 32,
      0 },
    { "marco-mini", "Marco-Mini, 17.3 billion: 256 experts of 768, 8 for a token", 28, 1024, 16, 8, 128, 3072, 151936,
      151643, 151645, 256, 8, 768, 1 },
    { "marco-nano", "Marco-Nano, 8 billion: 232 experts of 384, 8 for a token", 28, 1024, 16, 8, 128, 3072, 151936,
      151643, 151645, 232, 8, 384, 1 },
    { "marco-narrow", "their form, narrow: 16 experts of 32, for tests", 4, 64, 4, 2, 32, 96, 600, 1, 2, 16, 3, 32, 1 },
};

/* ==== 2. Model ========================================================================================== */

enum { MAX_TENSORS = 1024, MAX_ENTRIES = 1536, NAME = 48 };

typedef struct maker {
    char names[MAX_TENSORS + MAX_ENTRIES][NAME];
    size_t n_names;
    moe_tensor_spec tensors[MAX_TENSORS];
    float spread[MAX_TENSORS];   /* numbers are uniform in middle +- spread / sqrt(cols) */
    float middle[MAX_TENSORS];   /* mean of the numbers */
    size_t n_tensors, positions; /* index of the table of positions, or MAX_TENSORS */
    int marian;                  /* 1 if the table of positions is Marian's */
    int rotary, gated;           /* rotary: 1 if the table has cosines and sines; gated: 1 if experts are gated */
    int layers;                  /* value of --layers, 0 for all */
    int predictor;               /* 1 to add a layer that predicts further tokens */
    moe_meta_entry entries[MAX_ENTRIES];
    size_t n_entries;
    moe_type type, experts;
    uint64_t random;
    int show;
} maker;

static const char *name_of(maker *m, const char *prefix, const char *rest) {
    char *name = m->names[m->n_names++];
    if (snprintf(name, NAME, "%s%s", prefix, rest) >= NAME) { /* only a bug can cause this, as presets are built in */
        fprintf(stderr, "moe-make-random: name %s%s is too long\n", prefix, rest);
        exit(EXIT_USAGE);
    }
    return name;
}

static void put_int(maker *m, const char *prefix, const char *key, int64_t value) {
    m->entries[m->n_entries++] =
        (moe_meta_entry){ .key = name_of(m, prefix, key), .kind = MOE_META_INT, .integer = value };
}

static void put_text(maker *m, const char *prefix, const char *key, const char *value) {
    m->entries[m->n_entries++] =
        (moe_meta_entry){ .key = name_of(m, prefix, key), .kind = MOE_META_TEXT, .text = { value, strlen(value) } };
}

static void put_matrix(maker *m, const char *prefix, const char *name, int rows, int cols, moe_type type,
                       float spread) {
    m->spread[m->n_tensors] = spread;
    m->tensors[m->n_tensors++] =
        (moe_tensor_spec){ name_of(m, prefix, name), type, 2, { (uint64_t)rows, (uint64_t)cols, 0 } };
}

static void put_vector(maker *m, const char *prefix, const char *name, int n, float spread) {
    m->spread[m->n_tensors] = spread;
    m->tensors[m->n_tensors++] = (moe_tensor_spec){ name_of(m, prefix, name), MOE_TYPE_F32, 1, { (uint64_t)n, 0, 0 } };
}

static void put_experts(maker *m, const char *prefix, int experts, int hidden, int width) {
    m->spread[m->n_tensors] = 2;
    m->tensors[m->n_tensors++] = (moe_tensor_spec){ name_of(m, prefix, "experts"),
                                                    m->experts,
                                                    3,
                                                    { (uint64_t)experts, (uint64_t)hidden, (uint64_t)width } };
}

static void put_real(maker *m, const char *prefix, const char *key, double value) {
    m->entries[m->n_entries++] =
        (moe_meta_entry){ .key = name_of(m, prefix, key), .kind = MOE_META_REAL, .real = value };
}

static int projected(const shape *s) { return s->hidden != s->width; }

static void put_cell(maker *m, const shape *s, const char *prefix, const char *direction, int in) {
    char cell[NAME];
    snprintf(cell, sizeof cell, "%s%s", prefix, direction);
    put_matrix(m, cell, "w_x", 4 * s->hidden, in, m->type, 2);
    put_matrix(m, cell, "w_r", 4 * s->hidden, s->width, m->type, 2);
    put_vector(m, cell, "bias", 4 * s->hidden, 1);
    if (projected(s)) put_matrix(m, cell, "w_proj", s->width, s->hidden, m->type, 3);
}

static void put_lstm(maker *m, const shape *s, const char *prefix, int in, const char *context, int residual) {
    put_text(m, prefix, "kind", "lstm");
    put_int(m, prefix, "hidden", s->hidden);
    put_int(m, prefix, "proj", projected(s) ? s->width : 0);
    put_int(m, prefix, "residual", residual);
    if (context) put_text(m, prefix, "context", context);
    put_cell(m, s, prefix, "", in);
}

/* Set thresholds that about k of n experts exceed, in units of 1/n, the mean of a softmax. The constants were measured
 * with such random weights; the decoder's are larger because its gate inputs vary more. */
static void put_thresholds(maker *m, const char *prefix, const char *name, int n, int within, int k) {
    const int decoder = prefix[0] == 'd';
    const double halvings = log2((double)within / k) - 3; /* 0 if one expert in eight is selected */
    m->middle[m->n_tensors] = (float)((decoder ? 1.87 : 1.43) * pow(decoder ? 1.33 : 1.16, halvings) / within);
    put_vector(m, prefix, name, n, 0);
}

static void put_moe(maker *m, const shape *s, const char *prefix) {
    put_text(m, prefix, "kind", "moe");
    put_int(m, prefix, "experts", s->experts);
    put_int(m, prefix, "groups", s->groups);
    put_int(m, prefix, "k", s->k);
    put_int(m, prefix, "hidden", s->expert_hidden);
    put_text(m, prefix, "gate", s->thresholds ? "threshold" : "topk");
    put_matrix(m, prefix, "gate.weight", s->experts, s->width, MOE_TYPE_F32, 4);
    if (s->groups) put_matrix(m, prefix, "parent.weight", s->groups, s->width, MOE_TYPE_F32, 4);
    if (s->thresholds)
        put_thresholds(m, prefix, "gate.threshold", s->experts, s->groups ? s->experts / s->groups : s->experts, s->k);
    if (s->thresholds && s->groups) put_thresholds(m, prefix, "parent.threshold", s->groups, s->groups, s->k);
    put_experts(m, prefix, s->experts, s->expert_hidden, s->width);
}

static void put_attention(maker *m, const shape *s) {
    put_text(m, "", "attention.kind", s->product ? "product" : "additive");
    put_int(m, "", "attention.size", s->attention);
    put_text(m, "", "attention.query", "state");
    put_matrix(m, "", "attention.w_key", s->attention, s->width, m->type, 2);
    put_matrix(m, "", "attention.w_query", s->attention, s->width, m->type, 2);
    put_vector(m, "", "attention.v", s->attention, 2);
}

/* Describe the model from Wu et al. 2016: the bottom encoder layer is bidirectional, every decoder layer reads the
 * context, residuals start at the third layer. */
static void describe_gnmt(maker *m, const shape *s) {
    char prefix[24];
    put_attention(m, s);
    put_matrix(m, "", "source.embedding.weight", s->vocabulary, s->width, m->type, 3);
    put_matrix(m, "", "target.embedding.weight", s->vocabulary, s->width, m->type, 3);
    put_matrix(m, "", "output.weight", s->vocabulary, s->width, m->type, 3);
    put_int(m, "", "encoder.layers", s->layers);
    put_int(m, "", "decoder.layers", s->layers);
    put_text(m, "encoder.0.", "kind", "lstm");
    put_int(m, "encoder.0.", "hidden", s->hidden);
    put_int(m, "encoder.0.", "bidirectional", 1);
    put_cell(m, s, "encoder.0.", "fwd.", s->width);
    put_cell(m, s, "encoder.0.", "bwd.", s->width);
    for (int i = 1; i < s->layers; i++) {
        snprintf(prefix, sizeof prefix, "encoder.%d.", i);
        put_lstm(m, s, prefix, i == 1 ? 2 * s->width : s->width, NULL, i > 1);
    }
    for (int i = 0; i < s->layers; i++) {
        snprintf(prefix, sizeof prefix, "decoder.%d.", i);
        put_lstm(m, s, prefix, 2 * s->width, "previous", i > 1);
    }
}

static void describe_translation(maker *m, const shape *s) {
    const int mixture = s->experts > 0;
    put_attention(m, s);
    put_int(m, "", "encoder.layers", 3 + mixture);
    put_int(m, "", "decoder.layers", 2 + mixture);
    put_lstm(m, s, "encoder.0.", s->width, NULL, 1);
    put_lstm(m, s, "encoder.1.", s->width, NULL, 1);
    if (mixture) put_moe(m, s, "encoder.2.");
    put_lstm(m, s, mixture ? "encoder.3." : "encoder.2.", s->width, NULL, 1);
    put_lstm(m, s, "decoder.0.", 2 * s->width, "previous", 1);
    if (mixture) put_moe(m, s, "decoder.1.");
    put_lstm(m, s, mixture ? "decoder.2." : "decoder.1.", s->width, NULL, 1);
}

static void describe_any(maker *m, const char *architecture, const char *name, int vocabulary, int width, int bos,
                         int eos) {
    put_text(m, "", "general.architecture", architecture);
    put_text(m, "", "general.name", name);
    put_text(m, "", "general.description", "random weights, for benchmarks: it means nothing");
    put_int(m, "", "vocab.size", vocabulary);
    put_int(m, "", "model.width", width);
    put_int(m, "", "token.bos", bos);
    put_int(m, "", "token.eos", eos);
}

static void describe(maker *m, const shape *s) {
    describe_any(m, s->attention ? "gnmt-moe" : "moe-lm", s->name, s->vocabulary, s->width, 2, 3);
    if (s->layers) {
        describe_gnmt(m, s);
        return;
    }
    put_matrix(m, "", "embedding.weight", s->vocabulary, s->width, m->type, 3);
    if (s->attention) {
        describe_translation(m, s);
        return;
    }
    put_int(m, "", "decoder.layers", 3);
    put_lstm(m, s, "decoder.0.", s->width, NULL, 1);
    put_moe(m, s, "decoder.1.");
    put_lstm(m, s, "decoder.2.", s->width, NULL, 1);
}

/* ---- Transformers ---- */

static void put_linear(maker *m, const char *prefix, const char *part, int rows, int cols) {
    char name[16];
    snprintf(name, sizeof name, "%s.weight", part);
    put_matrix(m, prefix, name, rows, cols, m->type, 2);
    snprintf(name, sizeof name, "%s.bias", part);
    put_vector(m, prefix, name, rows, 1);
}

/* Add the kind and norm of a sub-layer. */
static void put_sublayer(maker *m, const transformer *s, const char *prefix, const char *kind) {
    const int alone = strcmp(kind, "norm") == 0;
    put_text(m, prefix, "kind", kind);
    put_real(m, prefix, "epsilon", 1e-5);
    if (!alone) put_text(m, prefix, "norm", s->marian ? "after" : "before");
    if (!alone) put_int(m, prefix, "residual", 1);
    m->middle[m->n_tensors] = 1;
    put_vector(m, prefix, "norm.weight", s->width, 1);
    if (s->marian & GATED) put_text(m, prefix, "norm.kind", "rms");
    else put_vector(m, prefix, "norm.bias", s->width, 1);
}

static void put_heads(maker *m, const transformer *s, const char *prefix, const char *kind) {
    put_sublayer(m, s, prefix, kind);
    put_int(m, prefix, "heads", s->heads);
    if (strcmp(kind, "attention") == 0) {
        put_linear(m, prefix, "qkv", 3 * s->width, s->width);
    } else {
        put_linear(m, prefix, "q", s->width, s->width);
        put_linear(m, prefix, "kv", 2 * s->width, s->width);
    }
    put_linear(m, prefix, "out", s->width, s->width);
}

/* Add a simpler simple recurrent unit (SSRU). */
static void put_cell_layer(maker *m, const transformer *s, const char *prefix) {
    put_sublayer(m, s, prefix, "ssru");
    put_matrix(m, prefix, "input.weight", s->width, s->width, m->type, 2);
    put_linear(m, prefix, "forget", s->width, s->width);
}

static void put_feed_forward(maker *m, const transformer *s, const char *prefix, int mixture) {
    put_sublayer(m, s, prefix, mixture ? "moe" : "ffn");
    put_int(m, prefix, "hidden", s->hidden);
    put_text(m, prefix, "activation", strcmp(s->name, "opus-base") == 0 || s->marian & GATED ? "swish" : "relu");
    if (!mixture) {
        put_linear(m, prefix, "up", s->hidden, s->width);
        if (s->marian & GATED) put_int(m, prefix, "gated", 1), put_linear(m, prefix, "gate", s->hidden, s->width);
        put_linear(m, prefix, "down", s->width, s->hidden);
        return;
    }
    put_int(m, prefix, "experts", s->experts);
    put_int(m, prefix, "k", 2);
    put_text(m, prefix, "gate", "topk");
    put_text(m, prefix, "output", "none");
    put_real(m, prefix, "scale", 0.8);
    put_matrix(m, prefix, "gate.weight", s->experts, s->width, MOE_TYPE_F32, 4);
    put_experts(m, prefix, s->experts, s->hidden, s->width);
    put_vector(m, prefix, "experts.up_bias", s->experts * s->hidden, 1);
    put_vector(m, prefix, "experts.down_bias", s->experts * s->width, 1);
}

static void put_side(maker *m, const transformer *s, const char *side) {
    char prefix[24];
    int n = 0;
    const int recurrent = s->marian & STUDENT && side[0] == 'd';
    for (int i = 0; i < (recurrent ? 2 : s->layers); i++) {
        snprintf(prefix, sizeof prefix, "%s.%d.", side, n++);
        if (recurrent) put_cell_layer(m, s, prefix);
        else put_heads(m, s, prefix, "attention");
        snprintf(prefix, sizeof prefix, "%s.%d.", side, n++);
        if (side[0] == 'd') put_heads(m, s, prefix, "cross");
        if (side[0] == 'd') snprintf(prefix, sizeof prefix, "%s.%d.", side, n++);
        put_feed_forward(m, s, prefix, s->step && (i + 1) % s->step == 0);
    }
    snprintf(prefix, sizeof prefix, "%s.%d.", side, n);
    if (!s->marian) put_sublayer(m, s, prefix, "norm"), n++;
    put_int(m, side, ".layers", n);
}

static void describe_transformer(maker *m, const transformer *s) {
    const int bos = s->marian ? s->vocabulary - 1 : 2;
    describe_any(m, "transformer", s->name, s->vocabulary, s->width, bos, s->marian ? 0 : 2);
    put_real(m, "", "embedding.scale", sqrt(s->width));
    put_int(m, "", "source.tag", 0);
    put_int(m, "", "limit.source", s->positions);
    put_int(m, "", "limit.target", s->positions);
    put_text(m, "", "decode.rules", "hf");
    put_int(m, "", "decode.beam", s->marian ? 4 : 1);
    put_real(m, "", "decode.length_penalty", 1);
    put_real(m, "", "decode.length_constant", 0);
    put_int(m, "", "decode.max_new", s->marian ? s->positions - 1 : 200);
    put_matrix(m, "", "embedding.weight", s->vocabulary, s->width, m->type, 3);
    m->positions = m->n_tensors;
    m->marian = s->marian;
    put_matrix(m, "", "positions.weight", s->positions, s->width, MOE_TYPE_F32, 1);
    put_side(m, s, "encoder");
    put_side(m, s, "decoder");
}

/* ---- Decoder-only models ---- */

static void put_normed(maker *m, const prompted *s, const char *prefix, const char *kind) {
    put_text(m, prefix, "kind", kind);
    put_real(m, prefix, "epsilon", 1e-5);
    put_text(m, prefix, "norm.kind", "rms");
    m->middle[m->n_tensors] = 1;
    put_vector(m, prefix, "norm.weight", s->width, 1);
    if (strcmp(kind, "norm") == 0) return;
    put_text(m, prefix, "norm", "before");
    put_int(m, prefix, "residual", 1);
}

static void put_rotated(maker *m, const prompted *s, const char *prefix) {
    static const char *const norms[] = { "q_norm.weight", "k_norm.weight" };
    put_normed(m, s, prefix, "attention");
    put_int(m, prefix, "heads", s->heads);
    put_int(m, prefix, "kv_heads", s->keys);
    put_int(m, prefix, "head.size", s->head);
    put_int(m, prefix, "rotary", 1);
    put_text(m, prefix, "head.norm", s->experts ? "before" : "after");
    put_matrix(m, prefix, "qkv.weight", (s->heads + 2 * s->keys) * s->head, s->width, m->type, 2);
    for (int i = 0; i < 2; i++) m->middle[m->n_tensors] = 1, put_vector(m, prefix, norms[i], s->head, 1);
    put_matrix(m, prefix, "out.weight", s->width, s->heads * s->head, m->type, 2);
}

static void put_units(maker *m, const prompted *s, const char *prefix, int hidden) {
    put_matrix(m, prefix, "up.weight", hidden, s->width, m->type, 2);
    put_matrix(m, prefix, "gate.weight", hidden, s->width, m->type, 2);
    put_matrix(m, prefix, "down.weight", s->width, hidden, m->type, 2);
}

static void put_gated_mixture(maker *m, const prompted *s, const char *prefix) {
    char shared[32];
    snprintf(shared, sizeof shared, "%sshared.", prefix);
    put_normed(m, s, prefix, "moe");
    put_int(m, prefix, "experts", s->experts);
    put_int(m, prefix, "k", s->k);
    put_int(m, prefix, "hidden", s->expert_hidden);
    put_text(m, prefix, "gate", "topk");
    put_text(m, prefix, "weights", s->qwen ? "chosen" : "sigmoid");
    put_text(m, prefix, "expert", "gated");
    put_text(m, prefix, "output", "none");
    put_real(m, prefix, "scale", s->qwen ? 1 : 2.826);
    put_int(m, prefix, "shared", s->qwen ? 0 : s->expert_hidden);
    put_matrix(m, prefix, "gate.weight", s->experts, s->width, MOE_TYPE_F32, 4);
    if (!s->qwen) put_vector(m, prefix, "gate.choice", s->experts, 0.01f);
    put_experts(m, prefix, s->experts, s->expert_hidden, s->width);
    if (!s->qwen) put_units(m, s, shared, s->expert_hidden);
}

/* Put attention and feed-forward, as the sub-layers `first` and `first` + 1 of a side. */
static void put_decoder_layer(maker *m, const prompted *s, const char *side, int first, int sparse) {
    char prefix[24];
    snprintf(prefix, sizeof prefix, "%s.%d.", side, first);
    put_rotated(m, s, prefix);
    snprintf(prefix, sizeof prefix, "%s.%d.", side, first + 1);
    if (sparse) {
        put_gated_mixture(m, s, prefix);
        return;
    }
    put_normed(m, s, prefix, "ffn");
    put_int(m, prefix, "hidden", s->hidden);
    put_text(m, prefix, "activation", "swish");
    put_int(m, prefix, "gated", 1);
    put_units(m, s, prefix, s->hidden);
}

/* Put a layer that predicts the token after the next one. */
static void put_predictor(maker *m, const prompted *s) {
    put_real(m, "", "predict.epsilon", 1e-5);
    put_int(m, "", "predict.layers", 3);
    m->middle[m->n_tensors] = m->middle[m->n_tensors + 1] = 1;
    put_vector(m, "", "predict.embedding.norm.weight", s->width, 1);
    put_vector(m, "", "predict.hidden.norm.weight", s->width, 1);
    put_matrix(m, "", "predict.join.weight", s->width, 2 * s->width, m->type, 2);
    put_decoder_layer(m, s, "predict", 0, s->experts > 0);
    put_normed(m, s, "predict.2.", "norm");
}

static void describe_decoder(maker *m, const prompted *s) {
    enum { PLACES = 1 << 15 };
    const int layers = m->layers ? m->layers : s->layers;
    char prefix[24];
    describe_any(m, "decoder", s->name, s->vocabulary, s->width, s->bos, s->eos);
    put_text(m, "", "decode.rules", "hf");
    put_int(m, "", "decode.beam", 1);
    put_real(m, "", "decode.length_penalty", 1);
    put_real(m, "", "decode.length_constant", 0);
    put_int(m, "", "decode.max_new", 512);
    put_int(m, "", "rotary.positions", PLACES);
    put_int(m, "", "activation.block", 64); /* the default of convert.py */
    put_int(m, "", "decoder.layers", 2 * layers + 1);
    put_matrix(m, "", "embedding.weight", s->vocabulary, s->width, m->type, 3);
    if (s->experts && !s->qwen) put_matrix(m, "", "output.weight", s->vocabulary, s->width, m->type, 3);
    m->positions = m->n_tensors;
    m->rotary = 1;
    m->gated = s->experts > 0;
    put_matrix(m, "", "rotary.weight", PLACES, s->head, MOE_TYPE_F32, 1);
    for (int i = 0; i < layers; i++) put_decoder_layer(m, s, "decoder", 2 * i, s->experts && (i || s->qwen));
    snprintf(prefix, sizeof prefix, "decoder.%d.", 2 * layers);
    put_normed(m, s, prefix, "norm");
    if (m->predictor) put_predictor(m, s);
}

/* Fill a row of Hunyuan's table: cosines, then sines. */
static void fill_rotation(size_t row, float *out, size_t cols) {
    for (size_t i = 0; i < cols / 2; i++) {
        const double angle = (double)row * pow(11158840, -2.0 * (double)i / (double)cols);
        out[i] = (float)cos(angle);
        out[cols / 2 + i] = (float)sin(angle);
    }
}

/* Fill a row: sines, then cosines. M2M-100's table starts at position 2, and its frequencies end at 1/10000. */
static void fill_position(int marian, size_t row, float *out, size_t cols) {
    const size_t half = cols / 2;
    const double last = (double)half - (marian ? 0 : 1), p = (double)row + (marian ? 0 : 2);
    for (size_t i = 0; i < cols / 2; i++) {
        const double angle = p * exp(-log(10000.0) * (double)i / last);
        out[i] = (float)sin(angle);
        out[cols / 2 + i] = (float)cos(angle);
    }
}

/* Return the next random number of splitmix64. */
static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void fill(void *user, size_t tensor, size_t piece, size_t row, float *out, size_t cols) {
    maker *m = user;
    const float step = m->spread[tensor] / sqrtf((float)cols) / 8388608.0f, middle = m->middle[tensor];
    if (tensor == m->positions) {
        if (m->rotary) fill_rotation(row, out, cols);
        else fill_position(m->marian, row, out, cols);
        return;
    }
    for (size_t c = 0; c < cols; c += 2) {
        uint64_t bits = next_random(&m->random);
        out[c] = middle + ((float)(bits & 0xffffff) - 8388608.0f) * step;
        if (c + 1 < cols) out[c + 1] = middle + ((float)(bits >> 40) - 8388608.0f) * step;
    }
    if (m->show && row == 0 && piece % 16 == 0)
        fprintf(stderr, "\r\033[Ktensor %zu of %zu, piece %zu of %llu ", tensor + 1, m->n_tensors, piece + 1,
                (unsigned long long)(m->tensors[tensor].n_dims == 3 ? m->tensors[tensor].dims[0] : 1));
}

/* ==== 3. Main =========================================================================================== */

typedef struct options {
    const char *preset, *output, *type, *experts;
    int layers, predictor;
    int64_t seed;
} options;

static int is_type(const char *name) {
    moe_type type;
    return moe_type_parse(name, &type);
}

#define TYPE_OF(member) OPTION_MEMBER(ROW_WORD, member), .valid = is_type, .values = MOE_TYPE_NAMES

static const option_row own_rows[] = {
    { "preset", "NAME", "one of the presets above", .group = GROUP_MODEL, OPTION_MEMBER(ROW_WORD, preset) },
    { "output", "FILE", "model file to write", .letter = 'o', .group = GROUP_MODEL, OPTION_MEMBER(ROW_WORD, output) },
    { "type", "TYPE", "type of matrices: " MOE_TYPE_NAMES " (default: q8)", .group = GROUP_MODEL, TYPE_OF(type) },
    { "experts", "TYPE", "type of the experts (default: as --type)", .group = GROUP_MODEL, TYPE_OF(experts) },
    { "layers", "N", "reduce a Hy-MT2 model to N layers", .group = GROUP_MODEL, OPTION_INT(layers, 1, MOE_MAX_LAYERS) },
    { "predictor", NULL, "add a layer that predicts further tokens to a Hy-MT2 model", .group = GROUP_MODEL,
      OPTION_FLAG(predictor) },
    { "seed", "N", "random seed of the weights (default: 1)", .group = GROUP_MODEL, OPTION_MEMBER(ROW_SEED, seed) },
    { 0 },
};

/* Write the text of --help before the options, with the presets. */
static void describe_presets(char *about, size_t size) {
    size_t n = (size_t)snprintf(about, size,
                                "Write a model of a published size with random weights.\n\nIts "
                                "translations are nonsense, at the speed of a trained model. Presets:\n");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        n += (size_t)snprintf(about + n, size - n, "  %-16s  %s\n", shapes[i].name, shapes[i].words);
    for (size_t i = 0; i < sizeof transformers / sizeof *transformers; i++)
        n += (size_t)snprintf(about + n, size - n, "  %-16s  %s\n", transformers[i].name, transformers[i].words);
    for (size_t i = 0; i < sizeof decoders / sizeof *decoders; i++)
        n += (size_t)snprintf(about + n, size - n, "  %-16s  %s\n", decoders[i].name, decoders[i].words);
}

/* Describe the model of a preset; return an exit status. */
static int describe_preset(maker *m, const char *name) {
    m->positions = MAX_TENSORS;
    for (size_t i = 0; i < sizeof decoders / sizeof *decoders; i++) {
        if (strcmp(decoders[i].name, name) != 0) continue;
        if (m->layers <= decoders[i].layers) return describe_decoder(m, &decoders[i]), EXIT_DONE;
        fprintf(stderr, "moe-make-random: --layers: %s has %d\n", name, decoders[i].layers);
        return EXIT_USAGE;
    }
    if (m->layers || m->predictor) {
        fputs("moe-make-random: --layers and --predictor require a preset of Hy-MT2\n", stderr);
        return EXIT_USAGE;
    }
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (strcmp(shapes[i].name, name) == 0) return describe(m, &shapes[i]), EXIT_DONE;
    for (size_t i = 0; i < sizeof transformers / sizeof *transformers; i++)
        if (strcmp(transformers[i].name, name) == 0) return describe_transformer(m, &transformers[i]), EXIT_DONE;
    fprintf(stderr, "moe-make-random: unknown preset '%s'; see moe-make-random --help\n", name);
    return EXIT_USAGE;
}

int main(int argc, char **argv) {
    static maker m;
    char about[8192];
    options o = { .type = "q8", .seed = 1 };
    const option_program program = {
        .name = "moe-make-random",
        .usage = "--preset NAME -o FILE [OPTION]...",
        .about = about,
        OPTION_LISTS(OPTION_OWN),
        .notes = "With groups, each token uses 2 experts in each of 2 groups. lm-131072 has smaller layers than the "
                 "paper's model (128-32-128), so that it fits a disk. The program needs little memory: it generates "
                 "and writes one expert at a time.\n"
                 "\n"
                 "Exit status: 0 done, 2 usage error, 3 out of memory, 4 output error.\n",
        .required = "preset output",
    };
    describe_presets(about, sizeof about);
    const int parsed = option_parse(&program, argc, argv, &o);
    if (parsed >= 0) return parsed;
    moe_type_parse(o.type, &m.type);
    moe_type_parse(o.experts ? o.experts : o.type, &m.experts);
    m.layers = o.layers, m.predictor = o.predictor;
    m.random = (uint64_t)o.seed;
    m.show = isatty(2);
    if (describe_preset(&m, o.preset)) return EXIT_USAGE;
    const moe_write_params params = { .entries = m.entries,
                                      .n_entries = m.n_entries,
                                      .tensors = m.tensors,
                                      .n_tensors = m.n_tensors,
                                      .fill = fill,
                                      .user = &m,
                                      .gated = m.gated };
    moe_error e;
    moe_status status = moe_model_write(o.output, &params, &e);
    moe_model *model;
    if (m.show) fputs("\r\033[K", stderr);
    if (!status) status = moe_model_open(o.output, NULL, &model, &e);
    if (status) {
        fprintf(stderr, "moe-make-random: %s\n", e.message);
        return status == MOE_ERROR_IO ? EXIT_INPUT_OUTPUT : EXIT_MODEL;
    }
    fprintf(stderr, "%s: %s, %.1f MiB\n", o.output, o.preset, (double)moe_model_file_bytes(model) / 1048576);
    moe_model_close(model);
    return EXIT_DONE;
}
