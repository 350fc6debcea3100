/* parity.c - dumps the output of every graph node, which tests/engine/parity.py compares with the output of
 * tools/convert/reference.py.
 *
 *     parity MODEL LANG < pairs > dump
 *
 * An input line consists of source ids, a tab and target ids. Sentences are scored one at a time. An output record
 * consists of u32 name length, name, u32 rows, u32 cols, and rows * cols floats. A "line" record ends each line. */
#include "moe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_IDS = 4096, MAX_LINE = 1 << 16 };

typedef struct input {
    char line[MAX_LINE];
    int32_t source[MAX_IDS], target[MAX_IDS];
    int failed;
} input;

static void put(const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    const uint32_t length = (uint32_t)strlen(name), shape[2] = { (uint32_t)rows, (uint32_t)cols };
    fwrite(&length, 4, 1, stdout);
    fwrite(name, 1, length, stdout);
    fwrite(shape, 4, 2, stdout);
    for (size_t r = 0; r < rows; r++) fwrite(data + r * stride, sizeof *data, cols, stdout);
}

static void trace(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    (void)user;
    put(name, data, rows, cols, stride);
}

static size_t read_ids(char *text, int32_t *ids) {
    size_t n = 0;
    for (char *word = strtok(text, " \n"); word && n < MAX_IDS; word = strtok(NULL, " \n"))
        ids[n++] = (int32_t)strtol(word, NULL, 10);
    return n;
}

static int next(void *user, int wait, moe_request *request) {
    input *in = user;
    char *tab;
    if (!wait) return MOE_PULL_LATER; /* one sentence at a time, so that the sentence of each record is known */
    if (!fgets(in->line, sizeof in->line, stdin)) return MOE_PULL_END;
    tab = strchr(in->line, '\t');
    if (!tab) return MOE_PULL_CANCEL;
    *tab = 0;
    request->source = in->source;
    request->n_source = read_ids(in->line, in->source);
    request->target = in->target;
    request->n_target = read_ids(tab + 1, in->target);
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *result) {
    input *in = user;
    if (result->status != MOE_OK) in->failed = 1;
    put("line", NULL, 0, 0, 0);
}

int main(int argc, char **argv) {
    static input in;
    moe_error error;
    moe_model *model;
    moe_session *session;
    moe_session_params params;
    moe_status status;
    if (argc != 3) return fprintf(stderr, "usage: parity MODEL LANG < pairs > dump\n"), 2;
    if (moe_model_open(argv[1], NULL, &model, &error)) return fprintf(stderr, "%s\n", error.message), 3;
    params = moe_session_params_default(model);
    params.target_tag = moe_model_language_tag(model, argv[2]);
    params.batch = params.beam = 1;
    params.trace = trace;
    if (moe_session_new(model, &params, &session, &error)) return fprintf(stderr, "%s\n", error.message), 3;
    status = moe_translate(session, next, done, &in, &error);
    moe_session_free(session);
    moe_model_close(model);
    return status != MOE_OK || in.failed;
}
