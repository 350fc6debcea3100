/* translate_ids.c - prints what models of every kind compute for fixed tokens or numbers, with log-probabilities in
 * hexadecimal, for translations.py and targets.py.
 *
 * Usage: translate_ids ISA BATCH THREADS MODEL[=TYPE | @SENTENCES]...
 *
 * ISA is as in moe.h, including "auto". With =TYPE, first converts the model to that number format. The input is made
 * up, and translated with beams of 1 and 4. With @SENTENCES, a file in the format of tests/golden/sentences.tsv, it
 * translates the lines that begin with the model's name, with the model's own parameters. The first line of output
 * names the kernels used. */
#include "moe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SENTENCES = 96, MADE_UP = 24, LONGEST = 128, TEXT = 4096 };

typedef struct job {
    int32_t ids[SENTENCES][LONGEST], target[SENTENCES];
    size_t length[SENTENCES], n, next;
    char text[SENTENCES][TEXT];
    int scored;      /* 1: the ids are a text of a language model */
    const char *isa; /* kernels that the last session used */
} job;

static void put(char *text, const char *format, unsigned value) {
    const size_t used = strlen(text);
    snprintf(text + used, TEXT - used, format, value);
}

static unsigned bits(float f) {
    unsigned u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static int pull(void *user, int wait, moe_request *request) {
    job *j = user;
    const size_t i = j->next;
    (void)wait;
    if (i == j->n) return MOE_PULL_END;
    if (j->scored) {
        request->target = j->ids[i];
        request->n_target = j->length[i];
    } else {
        request->source = j->ids[i];
        request->n_source = j->length[i];
        request->target_tag = j->target[i];
    }
    request->user = j->text[i];
    j->next++;
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *result) {
    char *text = result->user;
    (void)user;
    *text = 0;
    if (result->status != MOE_OK) snprintf(text, TEXT, "%s", result->message);
    for (size_t h = 0; h < result->n_hypotheses; h++) {
        const moe_hypothesis *best = &result->hypotheses[h];
        for (size_t i = 0; i < best->n_ids; i++) put(text, "%u ", (unsigned)best->ids[i]);
        put(text, "%08x ", bits(best->score));
        put(text, "%08x ", bits(best->logprob));
    }
}

static int fail(const char *what, const moe_error *error) { return printf("%s: %s\n", what, error->message), 1; }

/* ---- Input ---- */

static uint32_t next_number(uint32_t *random) { return (*random = *random * 1664525u + 1013904223u) >> 8; }

static void make_up(const moe_model *model, job *j) {
    uint32_t random = 7;
    const uint32_t n = (uint32_t)(j->scored ? moe_model_vocabulary(model) : moe_model_source_vocabulary(model));
    j->n = MADE_UP;
    for (size_t s = 0; s < MADE_UP; s++) {
        j->target[s] = moe_model_language_count(model) ? moe_model_language_tag_at(model, 0) : -1;
        j->length[s] = s % 17 + 1;
        for (size_t i = 0; i < j->length[s]; i++) j->ids[s][i] = (int32_t)(next_number(&random) % n);
    }
}

/* Read the lines `NAME TARGET IDS TEXT`, separated by tabs, of the model's name. Returns 1 if there are none. */
static int read_sentences(const moe_model *model, const char *path, const char *file, job *j) {
    static char line[8192];
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    FILE *in = fopen(file, "rb");
    j->n = 0;
    while (in && j->n < SENTENCES && fgets(line, sizeof line, in)) {
        char *target = strchr(line, '\t'), *ids = target ? strchr(target + 1, '\t') : NULL, *end;
        int32_t *to = j->ids[j->n];
        if (!ids || strcspn(name, ".") != (size_t)(target - line) || strncmp(line, name, (size_t)(target - line)))
            continue;
        *ids++ = 0;
        j->target[j->n] = target[1] == '-' ? -1 : moe_model_language_tag(model, target + 1);
        for (size_t i = 0; i < LONGEST; i++, ids = end) {
            to[i] = (int32_t)strtol(ids, &end, 10);
            if (end == ids) break;
            j->length[j->n] = i + 1;
        }
        j->n++;
    }
    if (in) fclose(in);
    if (!j->n) printf("%s: no sentences for %s\n", file, name);
    return !j->n;
}

/* ---- Models ---- */

static int translate(const moe_model *model, const moe_session_params *params, job *j) {
    moe_session *session;
    moe_error error;
    int failed;
    j->next = 0;
    if (moe_session_new(model, params, &session, &error)) return fail("session", &error);
    if (j->isa != moe_session_stats(session).isa) printf("kernels: %s\n", j->isa = moe_session_stats(session).isa);
    failed = moe_translate(session, pull, done, j, &error) ? fail("translate", &error) : 0;
    moe_session_free(session);
    return failed;
}

static int classify(const moe_model *model, moe_session_params *params, const char *path) {
    const size_t width = moe_model_width(model);
    float *rows = malloc(MADE_UP * width * sizeof *rows), logprobs[2 * MADE_UP];
    int32_t classes[2 * MADE_UP];
    moe_session *session = NULL;
    moe_error error;
    uint32_t random = 7;
    int failed = !rows;
    params->nbest = 2;
    for (size_t i = 0; rows && i < MADE_UP * width; i++)
        rows[i] = (float)((int)(next_number(&random) % 2001) - 1000) / 1024;
    if (rows && (moe_session_new(model, params, &session, &error) ||
                 moe_classify(session, rows, MADE_UP, classes, logprobs, &error)))
        failed = fail(path, &error);
    for (size_t i = 0; !failed && i < 2 * MADE_UP; i++)
        printf("%s: %d %08x\n", path, (int)classes[i], bits(logprobs[i]));
    moe_session_free(session);
    free(rows);
    return failed;
}

static int run_model(const moe_model *model, moe_session_params *params, const char *path, const char *type,
                     const char *file, job *j) {
    j->scored = moe_model_kind(model) == MOE_MODEL_LANGUAGE;
    if (moe_model_kind(model) == MOE_MODEL_CLASSIFIER) return classify(model, params, path);
    if (file && read_sentences(model, path, file, j)) return 1;
    if (!file) {
        make_up(model, j);
        params->max_source = params->max_target = 32;
        params->max_len_factor = 1;
        params->max_len_offset = 2;
    }
    for (int beam = 1; beam <= (file || j->scored ? 1 : 4); beam += 3) {
        if (!file) {
            params->beam = beam;
            params->nbest = beam > 1 ? 2 : 1;
        }
        if (translate(model, params, j)) return 1;
        for (size_t s = 0; s < j->n; s++)
            if (file) printf("%s: %s\n", path, j->text[s]);
            else printf("%s %s beam %d: %s\n", path, type, beam, j->text[s]);
    }
    return 0;
}

static int run(const char *isa, int batch, int threads, char *path, job *j) {
    char *form = path + strcspn(path, "=@"), saved[64] = ""; /* in the current folder, because WASI has no other */
    const char separator = *form, *type = "", *file = NULL;
    moe_session_params params;
    moe_model *model;
    moe_error error;
    int failed;
    if (separator) *form++ = 0;
    if (separator == '=') type = form;
    if (separator == '@') file = form;
    if (moe_model_open(path, NULL, &model, &error)) return fail(path, &error);
    if (*type) {
        moe_save_params save = { .type = MOE_TYPE_F32 };
        moe_status status;
        if (!moe_type_parse(type, &save.type)) return printf("invalid type '%s'\n", type), 1;
        snprintf(saved, sizeof saved, "build/translate_ids-%.8s-%d-%d.tmp", isa, batch, threads);
        save.experts = save.type;
        status = moe_model_save(model, saved, &save, &error);
        moe_model_close(model);
        model = NULL;
        if (status == MOE_OK) status = moe_model_open(saved, NULL, &model, &error);
        if (status) return fail(saved, &error);
    }
    params = moe_session_params_default(model);
    params.isa = isa;
    params.batch = batch;
    params.threads = threads;
    failed = run_model(model, &params, path, type, file, j);
    moe_model_close(model);
    if (*saved) remove(saved);
    return failed;
}

int main(int argc, char **argv) {
    static job j;
    int failed = argc < 5;
    for (int i = 4; i < argc; i++) failed |= run(argv[1], atoi(argv[2]), atoi(argv[3]), argv[i], &j);
    return failed;
}
