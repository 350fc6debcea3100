/* passes.c - run a text through a model; documented in passes.h. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/passes.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int shows(const passes *p) { return !p->common->quiet && isatty(STDERR_FILENO); }

static int pull(void *user, int wait, moe_request *request) {
    static const int32_t nothing[1] = { 0 };
    passes *p = user;
    (void)wait;
    if (p->trouble.code) return MOE_PULL_CANCEL;
    while (p->next < p->sample.count &&
           (p->left_out[p->next] || (p->translating && p->sample.pairs[p->next].has_target)))
        p->next++;
    if (p->next == p->sample.count) return MOE_PULL_END;
    text_pair *x = &p->sample.pairs[p->next++];
    request->source = x->source.data ? x->source.data : nothing;
    request->n_source = x->source.length;
    request->target_tag = x->tag;
    request->source_tag = x->source_tag;
    request->user = x;
    if (!p->translating) {
        request->target = x->target.data ? x->target.data : nothing;
        request->n_target = x->target.length;
    }
    if (shows(p) && p->next % 16 == 0) fprintf(stderr, "\r%s: %zu of %zu\033[K", p->verb, p->next, p->sample.count);
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *result) {
    passes *p = user;
    text_pair *x = result->user;
    if (result->status == MOE_ERROR_LIMIT || result->status == MOE_ERROR_ARGUMENT) p->left_out[x - p->sample.pairs] = 1;
    else if (result->status) text_fail(&p->trouble, result->status, "", "%s", result->message);
    else if (p->translating)
        text_ids_set(&x->target, result->hypotheses[0].ids, result->hypotheses[0].n_ids, &p->trouble);
}

moe_status passes_run(passes *p, const moe_model *model, const char *verb, moe_error *e) {
    moe_session_params params = moe_session_params_default(model);
    moe_session *session;
    program_apply(p->common, &params);
    params.device = "cpu";
    if (!p->translating) {
        params.beam = params.nbest = 1;
        if (p->alone) params.batch = 1;
        params.max_target++; /* room for the end token of a translation truncated at the maximum length */
        params.rules = MOE_RULES_PAPER;
        params.prune = params.coverage_penalty = 0;
        params.routing = p->routing;
        params.trace = p->trace;
        params.routing_user = params.trace_user = p->user;
    }
    moe_status status = moe_session_new(model, &params, &session, e);
    if (status == MOE_ERROR_ARGUMENT && !p->translating) { /* the model has no position for the end token */
        params.max_target--;
        status = moe_session_new(model, &params, &session, e);
    }
    if (status) return status;
    p->next = 0;
    p->verb = verb;
    status = moe_translate(session, pull, done, p, e);
    if (shows(p)) fputs("\r\033[K", stderr);
    moe_session_free(session);
    if (p->trouble.code) *e = p->trouble;
    return p->trouble.code ? p->trouble.code : status;
}

moe_status passes_read(passes *p, const text_front *front, const char *path, moe_error *e) {
    const text_options how = { .ids = p->common->ids, .pretokenized = p->common->pretokenized };
    moe_status status = text_sample_read(front, &how, path, 0, &p->sample, e);
    if (status) return status;
    p->left_out = calloc(p->sample.count, 1);
    if (!p->left_out) return text_out_of_memory(e);
    for (size_t i = 0; i < p->sample.count; i++) p->translating |= !p->sample.pairs[i].has_target;
    if (p->translating) status = passes_run(p, front->model, "translating", e);
    p->translating = 0;
    return status;
}

size_t passes_left_out(const passes *p) {
    size_t n = 0;
    for (size_t i = 0; i < p->sample.count; i++) n += (size_t)p->left_out[i];
    return n;
}

void passes_free(passes *p) {
    text_sample_free(&p->sample);
    free(p->left_out);
}
