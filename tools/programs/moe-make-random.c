/* moe-make-random - write a model of a published size with random weights, for benchmarks: see usage() below, or
 * --help.
 *
 * Contents
 *   1. Shapes   the layer lists of Shazeer et al. 2017, App. C and E
 *   2. Model    metadata and tensors of a shape
 *   3. Main
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "moe.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_DONE = 0, EXIT_USAGE = 2, EXIT_MODEL = 3, EXIT_INPUT_OUTPUT = 4 };

/* ==== 1. Shapes ========================================================================================= */

/* Translation: encoder lstm, lstm, [moe,] lstm; decoder lstm with attention, [moe,] lstm; residuals around all of them.
 * A language model (no attention): lstm, moe, lstm. With groups two levels of gates, `k` of each; the paper does not
 * say how it split its 512 and 2048 experts. */
typedef struct shape {
    const char *name, *words;
    int vocabulary, width, hidden, attention, experts, groups, k, expert_hidden;
} shape;

static const shape shapes[] = {
    { "paper-dense", "the paper's network without its mixtures", 32000, 512, 2048, 512, 0, 0, 0, 0 },
    { "paper-32", "32 experts of 2048, 4 for a token", 32000, 512, 2048, 512, 32, 0, 4, 2048 },
    { "paper-512", "16 groups of 32 experts, 2.2 billion weights", 32000, 512, 2048, 512, 512, 16, 2, 2048 },
    { "paper-2048", "32 groups of 64 experts, 8.7 billion weights", 32000, 512, 2048, 512, 2048, 32, 2, 2048 },
    { "multilingual-512", "512 experts of 8192, 2 a token, 8.7 billion weights", 32000, 512, 2048, 512, 512, 0, 2,
      8192 },
    { "lm-32", "language model: 32 experts of 1024, 4 for a token", 32000, 512, 512, 0, 32, 0, 4, 1024 },
    { "lm-4096", "language model: 16 groups of 256 experts", 32000, 512, 512, 0, 4096, 16, 2, 1024 },
    { "lm-131072", "language model: 256 groups of 512 experts", 32000, 128, 128, 0, 131072, 256, 2, 32 },
    { "small", "the size of the shipped model", 8000, 256, 512, 256, 32, 0, 2, 512 },
};

static void usage(FILE *to) {
    fputs("Usage: moe-make-random --preset NAME -o FILE [OPTION]...\n"
          "Writes a model of a published size with random weights. It translates into\n"
          "nonsense, at the speed of a trained model.\n"
          "\n"
          "      --preset NAME    one of these:\n",
          to);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        fprintf(to, "        %-16s  %s\n", shapes[i].name, shapes[i].words);
    fputs("  -o FILE              model file to write\n"
          "      --type TYPE      type of the matrices: f32, f16, bf16, q8 (default), q4\n"
          "      --experts TYPE   type of the experts, if another\n"
          "      --seed N         other weights (default: 1)\n"
          "  -h, --help           this text\n"
          "  -V, --version        version\n"
          "\n"
          "With groups a token goes to 2 experts in each of 2 groups. lm-131072 has smaller\n"
          "layers than the paper's model (128-32-128), so that it fits a disk. Little\n"
          "memory is needed: one expert at a time is made and written.\n"
          "\n"
          "Exit status: 0 done, 2 usage, 3 memory ran out, 4 FILE could not be written.\n",
          to);
}

/* ==== 2. Model ========================================================================================== */

enum { MAX_TENSORS = 64, MAX_ENTRIES = 96, NAME = 48 };

typedef struct maker {
    char names[MAX_TENSORS + MAX_ENTRIES][NAME];
    size_t n_names;
    moe_tensor_spec tensors[MAX_TENSORS];
    float spread[MAX_TENSORS]; /* numbers are uniform in [-spread, spread] / sqrt(cols) */
    size_t n_tensors;
    moe_meta_entry entries[MAX_ENTRIES];
    size_t n_entries;
    moe_type type, experts;
    uint64_t random;
    int show;
} maker;

static const char *name_of(maker *m, const char *prefix, const char *rest) {
    char *name = m->names[m->n_names++];
    snprintf(name, NAME, "%s%s", prefix, rest);
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

static int projected(const shape *s) { return s->hidden != s->width; }

static void put_lstm(maker *m, const shape *s, const char *prefix, int in, const char *context) {
    put_text(m, prefix, "kind", "lstm");
    put_int(m, prefix, "hidden", s->hidden);
    put_int(m, prefix, "proj", projected(s) ? s->width : 0);
    put_int(m, prefix, "residual", 1);
    if (context) put_text(m, prefix, "context", context);
    put_matrix(m, prefix, "w_x", 4 * s->hidden, in, m->type, 2);
    put_matrix(m, prefix, "w_r", 4 * s->hidden, s->width, m->type, 2);
    put_vector(m, prefix, "bias", 4 * s->hidden, 1);
    if (projected(s)) put_matrix(m, prefix, "w_proj", s->width, s->hidden, m->type, 3);
}

static void put_moe(maker *m, const shape *s, const char *prefix) {
    put_text(m, prefix, "kind", "moe");
    put_int(m, prefix, "experts", s->experts);
    put_int(m, prefix, "groups", s->groups);
    put_int(m, prefix, "k", s->k);
    put_int(m, prefix, "hidden", s->expert_hidden);
    put_text(m, prefix, "gate", "topk");
    put_matrix(m, prefix, "gate.weight", s->experts, s->width, MOE_TYPE_F32, 4);
    if (s->groups) put_matrix(m, prefix, "parent.weight", s->groups, s->width, MOE_TYPE_F32, 4);
    m->spread[m->n_tensors] = 2;
    m->tensors[m->n_tensors++] =
        (moe_tensor_spec){ name_of(m, prefix, "experts"),
                           m->experts,
                           3,
                           { (uint64_t)s->experts, (uint64_t)s->expert_hidden, (uint64_t)s->width } };
}

static void describe_translation(maker *m, const shape *s) {
    const int mixture = s->experts > 0;
    put_text(m, "", "attention.kind", "additive");
    put_int(m, "", "attention.size", s->attention);
    put_text(m, "", "attention.query", "state");
    put_int(m, "", "encoder.layers", 3 + mixture);
    put_int(m, "", "decoder.layers", 2 + mixture);
    put_lstm(m, s, "encoder.0.", s->width, NULL);
    put_lstm(m, s, "encoder.1.", s->width, NULL);
    if (mixture) put_moe(m, s, "encoder.2.");
    put_lstm(m, s, mixture ? "encoder.3." : "encoder.2.", s->width, NULL);
    put_lstm(m, s, "decoder.0.", 2 * s->width, "previous");
    if (mixture) put_moe(m, s, "decoder.1.");
    put_lstm(m, s, mixture ? "decoder.2." : "decoder.1.", s->width, NULL);
    put_matrix(m, "", "attention.w_key", s->attention, s->width, m->type, 2);
    put_matrix(m, "", "attention.w_query", s->attention, s->width, m->type, 2);
    put_vector(m, "", "attention.v", s->attention, 2);
}

static void describe(maker *m, const shape *s) {
    put_text(m, "", "general.architecture", s->attention ? "gnmt-moe" : "moe-lm");
    put_text(m, "", "general.name", s->name);
    put_text(m, "", "general.description", "random weights, for benchmarks: it means nothing");
    put_int(m, "", "vocab.size", s->vocabulary);
    put_int(m, "", "model.width", s->width);
    put_int(m, "", "token.bos", 2);
    put_int(m, "", "token.eos", 3);
    put_matrix(m, "", "embedding.weight", s->vocabulary, s->width, m->type, 3);
    if (s->attention) {
        describe_translation(m, s);
        return;
    }
    put_int(m, "", "decoder.layers", 3);
    put_lstm(m, s, "decoder.0.", s->width, NULL);
    put_moe(m, s, "decoder.1.");
    put_lstm(m, s, "decoder.2.", s->width, NULL);
}

/* splitmix64 */
static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void fill(void *user, size_t tensor, size_t piece, size_t row, float *out, size_t cols) {
    maker *m = user;
    const float step = m->spread[tensor] / sqrtf((float)cols) / 8388608.0f;
    for (size_t c = 0; c < cols; c += 2) {
        uint64_t bits = next_random(&m->random);
        out[c] = ((float)(bits & 0xffffff) - 8388608.0f) * step;
        if (c + 1 < cols) out[c + 1] = ((float)(bits >> 40) - 8388608.0f) * step;
    }
    if (m->show && row == 0 && piece % 16 == 0)
        fprintf(stderr, "\r\033[Ktensor %zu of %zu, piece %zu of %llu ", tensor + 1, m->n_tensors, piece + 1,
                (unsigned long long)(m->tensors[tensor].n_dims == 3 ? m->tensors[tensor].dims[0] : 1));
}

/* ==== 3. Main =========================================================================================== */

static int parse_type(const char *name, moe_type *type) {
    if (moe_type_parse(name, type)) return 1;
    fprintf(stderr, "moe-make-random: '%s' is not a number format; there are f32, f16, bf16, q8 and q4\n", name);
    return 0;
}

int main(int argc, char **argv) {
    enum { PRESET = 256, TYPE, EXPERTS, SEED };
    static const struct option known[] = { { "preset", required_argument, NULL, PRESET },
                                           { "type", required_argument, NULL, TYPE },
                                           { "experts", required_argument, NULL, EXPERTS },
                                           { "seed", required_argument, NULL, SEED },
                                           { "help", no_argument, NULL, 'h' },
                                           { "version", no_argument, NULL, 'V' },
                                           { NULL, 0, NULL, 0 } };
    static maker m;
    const char *preset = NULL, *out = NULL, *type = "q8", *experts = NULL, *seed = "1";
    const shape *s = NULL;
    char *end;
    for (int c; (c = getopt_long(argc, argv, "o:hV", known, NULL)) != -1;) {
        switch (c) {
        case PRESET: preset = optarg; break;
        case TYPE: type = optarg; break;
        case EXPERTS: experts = optarg; break;
        case SEED: seed = optarg; break;
        case 'o': out = optarg; break;
        case 'h': usage(stdout); return fflush(stdout) ? EXIT_INPUT_OUTPUT : EXIT_DONE;
        case 'V': printf("moe-make-random %s\n", moe_version()); return fflush(stdout) ? EXIT_INPUT_OUTPUT : EXIT_DONE;
        default: fputs("Try moe-make-random --help\n", stderr); return EXIT_USAGE;
        }
    }
    if (!preset || !out || optind != argc)
        return fputs("moe-make-random: wants --preset NAME and -o FILE; see moe-make-random --help\n", stderr),
               EXIT_USAGE;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (strcmp(shapes[i].name, preset) == 0) s = &shapes[i];
    if (!s)
        return fprintf(stderr, "moe-make-random: no preset is called '%s'; --help lists them\n", preset), EXIT_USAGE;
    if (!parse_type(type, &m.type) || !parse_type(experts ? experts : type, &m.experts)) return EXIT_USAGE;
    m.random = strtoull(seed, &end, 10);
    if (!*seed || *end) return fprintf(stderr, "moe-make-random: --seed wants a number, not '%s'\n", seed), EXIT_USAGE;
    m.show = isatty(2);
    describe(&m, s);
    const moe_write_params params = { .entries = m.entries,
                                      .n_entries = m.n_entries,
                                      .tensors = m.tensors,
                                      .n_tensors = m.n_tensors,
                                      .fill = fill,
                                      .user = &m };
    moe_error e;
    moe_status status = moe_model_write(out, &params, &e);
    moe_model *model;
    if (m.show) fputs("\r\033[K", stderr);
    if (!status) status = moe_model_open(out, NULL, &model, &e);
    if (status) {
        fprintf(stderr, "moe-make-random: %s\n", e.message);
        return status == MOE_ERROR_IO ? EXIT_INPUT_OUTPUT : EXIT_MODEL;
    }
    fprintf(stderr, "%s: %s, %.1f MiB\n", out, s->name, (double)moe_model_file_bytes(model) / 1048576);
    moe_model_close(model);
    return EXIT_DONE;
}
