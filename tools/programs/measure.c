/* measure.c - measure the quality loss of a model; documented in measure.h. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/measure.h"
#include "tools/text/jobs.h"
#include "tools/text/system.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Results for a pair of the sample. */
typedef struct verdict {
    int left_out;      /* 1 if the pair is too long, or a model cannot generate a token of the target */
    double logprob[2]; /* log-probability of the target in IN and OUT */
    text_ids output[2];
} verdict;

typedef struct sample {
    text_sample text;
    verdict *verdicts; /* [text.count] */
    int translates;    /* 0 for a language model, which only scores */
} sample;

static void free_sample(sample *s) {
    for (size_t i = 0; s->verdicts && i < s->text.count; i++)
        for (int k = 0; k < 2; k++) text_ids_free(&s->verdicts[i].output[k]);
    free(s->verdicts);
    text_sample_free(&s->text);
}

typedef struct walk {
    sample *s;
    size_t next;
    int which;   /* 0 for IN, 1 for OUT */
    int scoring; /* 1 to score, 0 to translate */
    int show;
    const char *complaint;
} walk;

static int pull(void *user, int wait, moe_request *request) {
    static const int32_t nothing[1] = { 0 }; /* token ids of an empty text */
    walk *w = user;
    (void)wait;
    if (w->complaint) return MOE_PULL_CANCEL;
    if (w->next == w->s->text.count) return MOE_PULL_END;
    const text_pair *p = &w->s->text.pairs[w->next];
    request->user = &w->s->verdicts[w->next++];
    request->source = p->source.data;
    request->n_source = p->source.length;
    if (w->scoring) {
        request->target = p->target.data ? p->target.data : nothing;
        request->n_target = p->target.length;
    }
    request->target_tag = p->tag;
    request->source_tag = p->source_tag;
    if (w->show && w->next % 16 == 0)
        fprintf(stderr, "\r%s: %s %zu of %zu ", w->which ? "after" : "before", w->scoring ? "scoring" : "translating",
                w->next, w->s->text.count);
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *result) {
    walk *w = user;
    verdict *p = result->user;
    const moe_hypothesis *h = result->hypotheses;
    moe_error e;
    if (result->status == MOE_ERROR_LIMIT || result->status == MOE_ERROR_ARGUMENT) p->left_out = 1;
    else if (result->status || !result->n_hypotheses)
        w->complaint = "the network's output is not a number: the model's weights are damaged";
    else if (w->scoring) p->logprob[w->which] = (double)h->logprob;
    else if (text_ids_set(&p->output[w->which], h->ids, h->n_ids, &e))
        w->complaint = "out of memory for the translations";
}

static moe_status measure_one(const moe_model *model, sample *s, int which, moe_error *e) {
    moe_session_params p = moe_session_params_default(model);
    moe_session *session;
    moe_status status = moe_session_new(model, &p, &session, e);
    if (status) return status;
    walk w = { .s = s, .which = which, .show = isatty(2) };
    for (w.scoring = 1; w.scoring >= !s->translates && !status; w.scoring--) {
        w.next = 0;
        status = moe_translate(session, pull, done, &w, e);
        if (w.complaint) status = text_fail(e, MOE_ERROR_NUMERIC, "", "%s", w.complaint);
    }
    if (w.show) fputs("\r\033[K", stderr);
    moe_session_free(session);
    return status;
}

static const char *main_type(const moe_model *m) {
    uint64_t best = 0;
    const char *name = "?";
    for (size_t i = 0; i < moe_model_tensor_count(m); i++) {
        moe_tensor_info t = moe_model_tensor(m, i);
        if (t.bytes > best) best = t.bytes, name = moe_type_name(t.type);
    }
    return name;
}

moe_status measure_loss(const text_front *in, const char *out, const char *sample_path, int ids, moe_error *e) {
    sample s = { .translates = moe_model_kind(in->model) == MOE_MODEL_TRANSLATION };
    moe_model *after;
    double tokens = 0, before_sum = 0, after_sum = 0, same = 0, count = 0;
    moe_status status = moe_model_open(out, NULL, &after, e);
    if (status) return status;
    text_front front = *in; /* not freed; OUT may have fewer languages than IN */
    front.model = after;
    status = text_sample_read(&front, &(text_options){ .ids = ids }, sample_path, 1, &s.text, e);
    if (!status && !(s.verdicts = calloc(s.text.count, sizeof *s.verdicts)))
        status = text_fail(e, MOE_ERROR_MEMORY, "", "out of memory for the sample");
    if (!status) status = measure_one(in->model, &s, 0, e);
    if (!status) status = measure_one(after, &s, 1, e);
    for (size_t i = 0; !status && i < s.text.count; i++) {
        const verdict *p = &s.verdicts[i];
        if (p->left_out) continue;
        count++;
        tokens += (double)(s.text.pairs[i].target.length + 1);
        before_sum -= p->logprob[0];
        after_sum -= p->logprob[1];
        same += p->output[0].length == p->output[1].length &&
                (!p->output[0].length ||
                 !memcmp(p->output[0].data, p->output[1].data, p->output[0].length * sizeof(int32_t)));
    }
    const char *base = system_name(sample_path), *type = main_type(in->model);
    const moe_meta_entry entries[] = {
        { .key = "quality.sample", .kind = MOE_META_TEXT, .text = { base, strlen(base) } },
        { .key = "quality.sentences", .kind = MOE_META_INT, .integer = (int64_t)count },
        { .key = "quality.compared_with", .kind = MOE_META_TEXT, .text = { type, strlen(type) } },
        { .key = "quality.nats_per_token", .kind = MOE_META_REAL, .real = after_sum / tokens },
        { .key = "quality.nats_per_token_before", .kind = MOE_META_REAL, .real = before_sum / tokens },
        { .key = "quality.same_translations", .kind = MOE_META_REAL, .real = same / count },
    };
    if (!status && count == 0)
        status = text_fail(e, MOE_ERROR_ARGUMENT, "", "this model cannot score any line of the sample");
    if (!status) {
        const moe_save_params p = { .type = MOE_TYPE_KEEP,
                                    .experts = MOE_TYPE_KEEP,
                                    .entries = entries,
                                    .n_entries = sizeof entries / sizeof *entries -
                                                 !s.translates }; /* the last entry applies only to translations */
        status = moe_model_save(after, out, &p, e);
        fprintf(stderr, "%s: %.4f nats per token before, %.4f after", base, before_sum / tokens, after_sum / tokens);
        if (s.translates) fprintf(stderr, "; %.1f %% of %.0f translations the same", 100 * same / count, count);
        if (count < (double)s.text.count)
            fprintf(stderr, "; %.0f lines skipped that the model cannot score", (double)s.text.count - count);
        fputc('\n', stderr);
    }
    moe_model_close(after);
    free_sample(&s);
    return status;
}
