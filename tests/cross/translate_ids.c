/* translate_ids.c - prints translations of fixed token sequences, with scores in hexadecimal, for translations.py.
 *
 * Usage: translate_ids ISA BATCH THREADS MODEL[=TYPE]...
 *
 * ISA is as in moe.h, including "auto". With =TYPE, first converts the model to that number format. The first line of
 * output names the kernels used. */
#include "moe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SENTENCES = 24, LONGEST = 17, TEXT = 4096 };

typedef struct job {
    int32_t ids[SENTENCES][LONGEST];
    size_t length[SENTENCES], next;
    char text[SENTENCES][TEXT];
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
    (void)wait;
    if (j->next == SENTENCES) return MOE_PULL_END;
    request->source = j->ids[j->next];
    request->n_source = j->length[j->next];
    request->user = j->text[j->next++];
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

static int translate(const moe_model *model, const char *isa, int batch, int threads, int beam, job *j) {
    moe_session_params params = moe_session_params_default(model);
    moe_session *session;
    moe_error error;
    uint32_t random = 7;
    int failed;
    if (moe_model_language_count(model)) {
        const moe_span code = moe_model_language(model, 0);
        char name[16];
        snprintf(name, sizeof name, "%.*s", (int)code.length, code.data);
        params.target_tag = moe_model_language_tag(model, name);
    }
    params.isa = isa;
    params.beam = beam;
    params.nbest = beam > 1 ? 2 : 1;
    params.batch = batch;
    params.threads = threads;
    params.max_source = params.max_target = 32;
    params.max_len_factor = 1;
    params.max_len_offset = 2;
    j->next = 0;
    for (size_t s = 0; s < SENTENCES; s++) {
        j->length[s] = s % LONGEST + 1;
        for (size_t i = 0; i < j->length[s]; i++) {
            random = random * 1664525u + 1013904223u;
            j->ids[s][i] = (int32_t)((random >> 8) % (uint32_t)moe_model_vocabulary(model));
        }
    }
    if (moe_session_new(model, &params, &session, &error)) return fail("session", &error);
    if (j->isa != moe_session_stats(session).isa) printf("kernels: %s\n", j->isa = moe_session_stats(session).isa);
    failed = moe_translate(session, pull, done, j, &error) ? fail("translate", &error) : 0;
    moe_session_free(session);
    return failed;
}

static int run(const char *isa, int batch, int threads, char *path, job *j) {
    char *type = strchr(path, '='), saved[64] = ""; /* in the current folder, because WASI has no other */
    moe_model *model;
    moe_error error;
    int failed = 0;
    if (type) *type++ = 0;
    if (moe_model_open(path, NULL, &model, &error)) return fail(path, &error);
    if (type) {
        moe_save_params params = { .type = MOE_TYPE_F32 };
        moe_status status;
        if (!moe_type_parse(type, &params.type)) return printf("invalid type '%s'\n", type), 1;
        snprintf(saved, sizeof saved, "build/translate_ids-%.8s-%d-%d.tmp", isa, batch, threads);
        params.experts = params.type;
        status = moe_model_save(model, saved, &params, &error);
        moe_model_close(model);
        model = NULL;
        if (status == MOE_OK) status = moe_model_open(saved, NULL, &model, &error);
        if (status) return fail(saved, &error);
    }
    for (int beam = 1; beam <= 4 && !failed; beam += 3) {
        failed = translate(model, isa, batch, threads, beam, j);
        for (size_t s = 0; s < SENTENCES && !failed; s++)
            printf("%s %s beam %d: %s\n", path, type ? type : "", beam, j->text[s]);
    }
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
