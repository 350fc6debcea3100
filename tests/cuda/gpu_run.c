/* gpu_run.c - translates random sentences on a device, for tests/cuda/gpu-check. It prints the results to stdout, so
 * that cmp can compare them, and the speed to stderr.
 *
 * Usage: gpu_run MODEL DEVICE SENTENCES LENGTH BATCH BEAM [trace | least]
 *        gpu_run write DIRECTORY     write small models with gates that moe-make-random lacks
 * Sentences have 1 to 2 * LENGTH - 1 tokens and are identical in every run. A language model scores up to LENGTH
 * tokens; a classifier reads rows of numbers and prints its BEAM best classes. `trace` prints a line for every tensor
 * of every step: its name, size and a checksum of its bits; use the same BATCH on both devices. `least` limits the
 * session to the minimum amount of GPU memory, so that experts are fetched. */
#if !defined(_POSIX_C_SOURCE) && !defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE /* as in moe.c, which this file includes after system headers */
#endif
#include "moe.h"
#include "tests/engine/model_writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct feed {
    size_t n, next, length, vocabulary;
    moe_kind kind;
    uint64_t random;
    int32_t *ids;   /* [2 * length] */
    char **answers; /* [n] one line per sentence */
} feed;

static int pull(void *user, int wait, moe_request *r) {
    feed *f = user;
    (void)wait;
    if (f->next == f->n) return MOE_PULL_END;
    const size_t n = 1 + mw_below(&f->random, f->kind == MOE_MODEL_LANGUAGE ? f->length : 2 * f->length - 1);
    for (size_t i = 0; i < n; i++) f->ids[i] = (int32_t)(4 + mw_below(&f->random, f->vocabulary - 4));
    if (f->kind == MOE_MODEL_LANGUAGE) r->target = f->ids, r->n_target = n;
    else r->source = f->ids, r->n_source = n;
    r->user = &f->answers[f->next++];
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *r) {
    size_t room = 256, at = 0;
    char *line;
    (void)user;
    for (size_t h = 0; h < r->n_hypotheses; h++) room += 64 + 24 * r->hypotheses[h].n_ids;
    line = malloc(room);
    if (!line) exit(3);
    at += (size_t)snprintf(line + at, room - at, "%s", r->status ? r->message : "");
    for (size_t h = 0; h < r->n_hypotheses; h++) {
        const moe_hypothesis *y = &r->hypotheses[h];
        at += (size_t)snprintf(line + at, room - at, "%s%a", h ? " | " : "", (double)y->score);
        for (size_t i = 0; i < y->n_ids; i++) {
            uint32_t bits;
            memcpy(&bits, &y->token_logprobs[i], 4);
            at += (size_t)snprintf(line + at, room - at, " %d:%08x", (int)y->ids[i], (unsigned)bits);
        }
    }
    *(char **)r->user = line;
}

/* Classify all rows with one call; the session splits them into batches. */
static moe_status classify(moe_session *s, feed *f, size_t width, size_t best, moe_error *e) {
    float *inputs = calloc(f->n * width, sizeof *inputs), *logprobs = calloc(f->n * best, sizeof *logprobs);
    int32_t *classes = calloc(f->n * best, sizeof *classes);
    moe_status status;
    if (!inputs || !logprobs || !classes) exit(3);
    for (size_t i = 0; i < f->n * width; i++) inputs[i] = mw_uniform(&f->random, -2, 2);
    status = moe_classify(s, inputs, f->n, classes, logprobs, e);
    for (size_t r = 0; r < f->n && status == MOE_OK; r++) {
        const size_t room = 32 * best + 1;
        char *line = calloc(room, 1);
        if (!line) exit(3);
        for (size_t i = r * best; i < (r + 1) * best; i++) {
            const size_t at = strlen(line);
            uint32_t bits;
            memcpy(&bits, &logprobs[i], 4);
            snprintf(line + at, room - at, " %d:%08x", (int)classes[i], (unsigned)bits);
        }
        f->answers[r] = line;
    }
    free(inputs);
    free(logprobs);
    free(classes);
    return status;
}

static int write_models(const char *directory) {
    static const struct {
        const char *name;
        mw_model *(*make)(uint32_t type, uint64_t seed);
    } models[] = { { "two-levels", mw_hierarchical },
                   { "language", mw_language_model },
                   { "classifier", mw_classifier } };
    for (size_t i = 0; i < 6; i++) {
        mw_model *m = models[i / 2].make(i % 2 ? MW_Q8 : MW_F32, 1);
        const mw_image image = mw_build(m);
        char path[512];
        FILE *file;
        int good;
        snprintf(path, sizeof path, "%s/%s-%s.bin", directory, models[i / 2].name, i % 2 ? "q8" : "f32");
        file = fopen(path, "wb");
        good = file && fwrite(image.data, image.bytes, 1, file) == 1;
        if (file && fclose(file) != 0) good = 0;
        free(image.data);
        mw_free(m);
        if (!good) return fprintf(stderr, "cannot write %s\n", path), 3;
    }
    return 0;
}

static void trace(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    uint64_t sum = 14695981039346656037u; /* FNV-1a, applied to numbers instead of bytes */
    (void)user;
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++) {
            uint32_t bits;
            memcpy(&bits, data + r * stride + c, 4);
            if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
            sum = (sum ^ bits) * 1099511628211u;
        }
    printf("%s [%zu, %zu] %016llx\n", name, rows, cols, (unsigned long long)sum);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
    moe_error e = { MOE_OK, "", "" };
    moe_model *m = NULL;
    moe_session *s = NULL;
    moe_session_params p;
    moe_stats stats;
    feed f = { .random = 1 };
    size_t least = 1;
    double begin, opened, translated;
    if (argc == 3 && strcmp(argv[1], "write") == 0) return write_models(argv[2]);
    if (argc < 7) return fputs("usage: gpu_run MODEL DEVICE SENTENCES LENGTH BATCH BEAM [trace | least]\n", stderr), 2;
    f.length = strtoul(argv[4], NULL, 10);
    begin = seconds();
    if (moe_model_open(argv[1], NULL, &m, &e)) return fprintf(stderr, "%s\n", e.message), 3;
    p = moe_session_params_default(m);
    p.device = argv[2];
    p.batch = atoi(argv[5]);
    p.beam = p.nbest = atoi(argv[6]);
    p.max_source = (int)(2 * f.length + 4);
    p.max_target = (int)f.length + 8;
    p.max_len_factor = 0; /* models with random weights would end immediately */
    p.min_target = (int)f.length;
    p.max_len_offset = (int)f.length + 4;
    if (moe_model_language_count(m)) p.target_tag = moe_model_language_tag(m, "de");
    if (argc > 7 && strcmp(argv[7], "trace") == 0) p.trace = trace;
    else if (argc > 7) p.device_memory = 1; /* too small, so the error names the minimum */
    if (p.device_memory && moe_session_new(m, &p, &s, &e)) {
        if (sscanf(e.message, "cuda:%*d: needs at least %zu MB", &least) != 1)
            return fprintf(stderr, "%s\n", e.message), 3;
        p.device_memory = least << 20;
    }
    if (!s && moe_session_new(m, &p, &s, &e)) return fprintf(stderr, "%s\n", e.message), 3;
    opened = seconds();
    f.kind = moe_model_kind(m);
    f.vocabulary = (size_t)moe_model_vocabulary(m);
    f.n = (size_t)atol(argv[3]);
    f.ids = calloc(2 * f.length, sizeof *f.ids);
    f.answers = calloc(f.n, sizeof *f.answers);
    if (!f.ids || !f.answers) return 3;
    if (f.kind == MOE_MODEL_CLASSIFIER ? classify(s, &f, moe_model_width(m), (size_t)p.nbest, &e)
                                       : moe_translate(s, pull, done, &f, &e))
        return fprintf(stderr, "%s\n", e.message), 3;
    translated = seconds();
    stats = moe_session_stats(s);
    for (size_t i = 0; i < f.n; i++) {
        if (!p.trace) puts(f.answers[i] ? f.answers[i] : "(nothing)");
        free(f.answers[i]);
        f.answers[i] = NULL;
    }
    fflush(stdout); /* in a log of both streams, the speed must be the last line */
    if (p.device_memory)
        fprintf(stderr, "%llu of %llu experts held, %llu fetched, %llu hits;  ", (unsigned long long)stats.experts_held,
                (unsigned long long)stats.experts, (unsigned long long)stats.expert_fetches,
                (unsigned long long)stats.expert_hits);
    fprintf(stderr,
            "%s: opened in %.2f s; %.3f s, %llu target tokens, %llu steps of %.1f rows, %.3f ms a step, "
            "%.0f target tokens/s\n",
            stats.device, opened - begin, translated - opened, (unsigned long long)stats.target_tokens,
            (unsigned long long)stats.steps, (double)stats.rows / (double)(stats.steps ? stats.steps : 1),
            1e3 * (translated - opened) / (double)(stats.steps ? stats.steps : 1),
            (double)stats.target_tokens / (translated - opened));
    moe_session_free(s);
    moe_model_close(m);
    free(f.ids);
    free(f.answers);
    return fflush(stdout) != 0;
}
