/* gpu_run.c - random sentences through a model on a device, for tests/gpu-check: results as text for cmp, speed on stderr.
 *
 * Usage: gpu_run MODEL DEVICE SENTENCES LENGTH BATCH BEAM [trace]
 * Sentences have 1 to 2 * LENGTH - 1 tokens,
     the same ones in every run. With `trace` a line for every tensor of every step: its
 * name, size and a sum of its bits; two devices are to be traced with the same BATCH. */
#if !defined(_POSIX_C_SOURCE) && !defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE /* as moe.c, which comes after system headers here */
#endif
#include "moe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct feed {
    size_t n, next, length, vocabulary;
    uint64_t random;
    int32_t *ids;   /* [2 * length] */
    char **answers; /* [n] a line each */
} feed;

static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int pull(void *user, int wait, moe_request *r) {
    feed *f = user;
    (void)wait;
    if (f->next == f->n) return MOE_PULL_END;
    r->n_source = 1 + next_random(&f->random) % (2 * f->length - 1);
    for (size_t i = 0; i < r->n_source; i++) f->ids[i] = (int32_t)(4 + next_random(&f->random) % (f->vocabulary - 4));
    r->source = f->ids;
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

static void trace(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    uint64_t sum = 14695981039346656037u; /* FNV-1a over numbers */
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
    double begin, opened, translated;
    if (argc < 7) return fputs("usage: gpu_run MODEL DEVICE SENTENCES LENGTH BATCH BEAM [trace]\n", stderr), 2;
    f.length = strtoul(argv[4], NULL, 10);
    begin = seconds();
    if (moe_model_open(argv[1], NULL, &m, &e)) return fprintf(stderr, "%s\n", e.message), 3;
    p = moe_session_params_default(m);
    p.device = argv[2];
    p.batch = atoi(argv[5]);
    p.beam = p.nbest = atoi(argv[6]);
    p.max_source = (int)(2 * f.length + 4);
    p.max_target = (int)f.length + 8;
    p.max_len_factor = 0; /* random weights would end at once */
    p.min_target = (int)f.length;
    p.max_len_offset = (int)f.length + 4;
    if (moe_model_language_count(m)) p.target_tag = moe_model_language_tag(m, "de");
    if (argc > 7) p.trace = trace;
    if (moe_session_new(m, &p, &s, &e)) return fprintf(stderr, "%s\n", e.message), 3;
    opened = seconds();
    f.vocabulary = (size_t)moe_model_vocabulary(m);
    f.n = (size_t)atol(argv[3]);
    f.ids = calloc(2 * f.length, sizeof *f.ids);
    f.answers = calloc(f.n, sizeof *f.answers);
    if (!f.ids || !f.answers) return 3;
    if (moe_translate(s, pull, done, &f, &e)) return fprintf(stderr, "%s\n", e.message), 3;
    translated = seconds();
    stats = moe_session_stats(s);
    for (size_t i = 0; i < f.n; i++) {
        if (argc == 7) puts(f.answers[i] ? f.answers[i] : "(nothing)");
        free(f.answers[i]);
        f.answers[i] = NULL;
    }
    fprintf(stderr, "%s: opened in %.2f s; %.3f s, %llu target tokens, %llu steps of %.1f rows, %.3f ms a step, "
            "%.0f target tokens/s\n",
            stats.device, opened - begin, translated - opened, (unsigned long long)stats.target_tokens,
                (unsigned long long)stats.steps,
            (double)stats.rows / (double)(stats.steps ? stats.steps : 1), 1e3 * (translated - opened) / (double)(stats.steps
                ? stats.steps : 1),
            (double)stats.target_tokens / (translated - opened));
    moe_session_free(s);
    moe_model_close(m);
    free(f.ids);
    free(f.answers);
    return fflush(stdout) != 0;
}
