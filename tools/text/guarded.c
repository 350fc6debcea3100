/* guarded.c - the strategy for models that translate their input directly. protect.h protects spans and terms. */
#include "tools/text/marks.h"
#include "tools/text/strategy.h"
#include "tools/text/words.h"

#include <float.h>

static int is_guarded(const text_job *job) { return job->options.rules && text_guard_used(job->guard); }

static size_t room(const text_front *front, const text_options *options) {
    return options->max_source > front->source_extra ? options->max_source - front->source_extra : 0;
}

/* Find the next phrase to translate separately. */
static moe_status prepare_phrase(const text_front *front, text_job *job, moe_error *error) {
    text_bytes text = { 0 };
    size_t source;
    int small;
    moe_status status = MOE_OK;
    job->phrase_ids.length = 0;
    if (!is_guarded(job)) return MOE_OK;
    const moe_span words = text_guard_phrase(job->guard, (size_t)job->attempt.phrases, &source, &small);
    if (!words.length) return MOE_OK;
    text_append(&text, words.data, words.length);
    text_apply_variant(small ? TEXT_LOWERED : TEXT_UNCHANGED, &text);
    status =
        text.failed ? text_out_of_memory(error) : text_encode(front, text.data, text.length, &job->phrase_ids, error);
    if (!status && job->phrase_ids.length > room(front, &job->options)) job->phrase_ids.length = 0;
    text_bytes_free(&text);
    return status;
}

/* Prepare the next missing term, closed by a full stop; the job fails after the last one. */
static moe_status prepare_lookup(const text_front *front, text_job *job, moe_error *error) {
    text_bytes text = { 0 };
    const moe_span words = text_guard_missing_term(job->guard, (size_t)job->attempt.looked - 1);
    text_append(&text, words.data, words.length);
    text_apply_variant(TEXT_CLOSED, &text);
    moe_status status =
        text.failed ? text_out_of_memory(error) : text_encode(front, text.data, text.length, &job->phrase_ids, error);
    job->failed = !words.length || job->phrase_ids.length > room(front, &job->options);
    text_bytes_free(&text);
    return status;
}

static moe_status prepare(const text_front *front, text_job *job, moe_span source, moe_error *error) {
    const text_options *o = &job->options;
    text_attempt *a = &job->attempt;
    text_bytes text = { 0 };
    moe_span shown = source;
    moe_status status = MOE_OK;
    if (a->step == TEXT_PHRASE) return prepare_phrase(front, job, error);
    if (a->step == TEXT_LOOK_UP_TERM) return prepare_lookup(front, job, error);
    job->phrase_ids.length = 0;
    if (o->rules)
        status = text_guard_begin(o->rules, source.data, source.length, job->more, a->placeholders, job->message,
                                  a->terms, &job->guard, &shown, error);
    if (status) return status;
    text_append(&text, shown.data, shown.length);
    job->capitals = o->lower_case && !text.failed && (job->of_capitals || text_is_capitals(text.data, text.length));
    if (job->capitals) text_lower_case(text.data, text.length);
    job->title = o->lower_case && !job->capitals && !text.failed && text_is_title(text.data, text.length);
    if (job->title) text_lower_title(text.data, text.length);
    const int brief = text.failed ? 0 : text_is_short(text.data, text.length);
    if (a->step == TEXT_FIRST && o->variants && !job->capitals) a->variants = (text_variant)brief;
    if (!a->is_sentence) a->sentences = brief ? 3 - brief : 0; /* a capital needs no TEXT_SENTENCE */
    text_apply_variant(a->variant, &text);
    if ((job->capitals || job->title || a->variant) && !text.failed && text_guard_used(job->guard))
        text_guard_put_placeholders(job->guard, text.data);
    status = text.failed ? text_out_of_memory(error) : text_job_encode(front, job, &text, error);
    if (!status && !job->failed && text_guard_used(job->guard))
        status = text_guard_bind(o->rules, job->guard, text.data, text.length, &job->source_ids, o->max_target, error);
    text_bytes_free(&text);
    return status || a->step != TEXT_FIRST ? status : prepare_phrase(front, job, error);
}

static moe_status request(const text_front *front, text_job *job, moe_request *r, moe_error *error) {
    (void)front, (void)error;
    /* Weak models lose numbers or brackets in many long sentences. Retries with the full beam would add 4 to
     * 12 % of work without improving BLEU. The beam does not depend on nbest, so that the best translation is the
     * same with and without alternatives. */
    const text_step step = job->attempt.step;
    if (step == TEXT_PLACEHOLDERS || step == TEXT_HIDE_NUMBERS || step == TEXT_HALVE)
        r->beam = step == TEXT_HALVE ? 2 : 1;
    job->partial.final = !(job->divisible || job->attempt.variants || job->message || job->capitals ||
                           job->attempt.variant || text_guard_used(job->guard));
    if (job->phrase_ids.length)
        r->source = job->phrase_ids.data, r->n_source = job->phrase_ids.length, r->partial = NULL;
    else text_guard_constrain(job->guard, r);
    return MOE_OK;
}

static moe_status write_text(const text_front *front, const text_job *job, int shout, const moe_hypothesis *h,
                             text_bytes *out, int *sound, moe_error *error) {
    const text_options *o = &job->options;
    const size_t begin = out->length;
    const int guarded = is_guarded(job);
    moe_status status = MOE_OK;
    if (guarded) status = text_guard_restore(o->rules, job->guard, h, job->attempt.variant, shout, out, error);
    else status = text_decode(front, h->ids, h->n_ids, out, error);
    if (!status && !guarded) text_undo_variant(job->attempt.variant, out, begin);
    if (!status && !out->failed && shout && !guarded) text_upper_case(out->data + begin, out->length - begin);
    *sound = status || !guarded || text_guard_is_intact(job->guard);
    if (!status && !out->failed && guarded && *sound && text_rules_spans(o->rules)) {
        const int kept = text_marks_kept((moe_span){ job->source.data, job->source.length },
                                         (moe_span){ out->data + begin, out->length - begin });
        if (kept < 0) status = text_out_of_memory(error);
        *sound = kept;
        text_marks_tighten((moe_span){ job->source.data, job->source.length }, begin, out);
    }
    if (!status && job->message)
        *sound &= text_message_repair(job->message, job->source.data, job->source.length, begin, out);
    return status || !out->failed ? status : text_out_of_memory(error);
}

/* Return the reason to report if a placeholder is lost. */
static unsigned lost_placeholder(const text_job *job) {
    return is_guarded(job) && !job->target_ids.length ? TEXT_PLACEHOLDER_LOST : TEXT_SIGN_LOST;
}

static moe_status judge_phrase(const text_front *front, text_job *job, const moe_result *result, moe_error *error) {
    const moe_hypothesis nothing = { 0 }, *h = result->n_hypotheses ? result->hypotheses : &nothing;
    text_bytes text = { 0 };
    size_t source;
    int small;
    text_guard_phrase(job->guard, (size_t)job->attempt.phrases, &source, &small);
    moe_status status = text_decode(front, h->ids, h->n_ids, &text, error);
    text_append(&text, "", 0);
    if (!status &&
        (text.failed || !(job->attempt.step == TEXT_LOOK_UP_TERM
                              ? text_guard_look_up(job->guard, (size_t)job->attempt.looked - 1, text.data, text.length)
                              : text_guard_add_phrase(job->guard, source, text.data, text.length))))
        status = text_out_of_memory(error);
    text_bytes_free(&text);
    return status;
}

/* Check protected spans and glossary terms. */
static moe_status judge_kept(const text_front *front, text_job *job, const moe_hypothesis *h, text_verdict *v,
                             moe_error *error) {
    static const unsigned reasons[] = { 0, TEXT_TERM_MISSING, TEXT_TERM_DOUBLED, TEXT_TERM_WORSE };
    text_bytes unused = { 0 };
    text_terms terms = job->attempt.terms;
    int sound;
    moe_status status = write_text(front, job, 0, h, &unused, &sound, error);
    text_bytes_free(&unused);
    if (!status && is_guarded(job)) status = text_guard_next_terms(job->guard, h, sound, &terms, error);
    if (terms != job->attempt.terms) v->reasons |= reasons[terms];
    else if (!status && sound && terms && text_guard_has_remaining(job->guard)) v->reasons |= TEXT_TERM_BESIDE;
    if (!sound) v->reasons |= lost_placeholder(job);
    return status;
}

/* Return 1 if a translation is empty or ends with punctuation, unlike its source. */
static int is_closed(const text_bytes *t) {
    static const char *const signs[] = { ".", "!", "?", ":", "\xE2\x80\xA6", "\xEF\xBC\x9F" };
    int closed = !t->length;
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) closed |= text_ends_with(t->data, t->length, signs[i]);
    return closed;
}

/* Decide whether the translation of a variant can replace the translation of the text. */
static moe_status judge_variant(const text_front *front, text_job *job, const moe_hypothesis *h, text_verdict *v,
                                moe_error *error) {
    text_bytes written = { 0 };
    int sound = 1;
    v->fits = !(v->reasons & TEXT_LOST);
    v->reasons &= ~(unsigned)TEXT_LOST;
    if (!job->attempt.variants || job->cut) return MOE_OK;
    v->reasons |= TEXT_SHORT;
    v->score = h->score;
    if (!job->attempt.variant) return MOE_OK;
    const moe_status status = write_text(front, job, 0, h, &written, &sound, error);
    v->fits &= sound && !is_closed(&written) && !(text_guard_used(job->guard) && text_guard_lacks_term(job->guard));
    text_bytes_free(&written);
    return status;
}

static moe_status judge(const text_front *front, text_suspicions *doubts, text_job *job, const moe_result *result,
                        text_verdict *v, moe_error *error) {
    const moe_hypothesis *h = result->hypotheses;
    const text_attempt *a = &job->attempt;
    const int varies = a->variant && !a->is_sentence;
    moe_status status = MOE_OK;
    (void)doubts;
    if (a->step == TEXT_LOOK_UP_TERM) v->reasons = TEXT_TERM_MISSING;
    if (a->step == TEXT_LOOK_UP_TERM && result->status) return MOE_OK;
    if (result->status) { /* no translation meets the constraints */
        if (result->status == MOE_ERROR_NUMERIC && text_guard_has_constraints(job->guard))
            v->reasons = varies ? TEXT_SHORT : lost_placeholder(job), v->score = -FLT_MAX;
        return MOE_OK;
    }
    if (job->phrase_ids.length) {
        if (!v->reasons) v->reasons = TEXT_PHRASE_DONE;
        return judge_phrase(front, job, result, error);
    }
    if (!result->n_hypotheses) return MOE_OK;
    if (h->looped) v->reasons |= TEXT_LOOPED;
    if (text_attempt_next(*a, v).step == TEXT_RESUME) return MOE_OK;
    if (!varies && (is_guarded(job) || job->message)) status = judge_kept(front, job, h, v, error);
    if (status || v->reasons & ~(unsigned)TEXT_LOOPED) return status;
    status = text_job_lost(front, job, h, v, error);
    if (a->is_sentence && (!h->finished || !text_trimmed(job->written.data, job->written.length, " \t").length))
        v->reasons |= TEXT_WORD_LOST; /* cut, or only the full stop was translated */
    if (status || (!varies && v->reasons & ~(unsigned)TEXT_LOOPED)) return status;
    return judge_variant(front, job, h, v, error);
}

static void show(const text_front *front, const text_job *job, text_bytes *out) {
    if (job->message || job->attempt.variant || text_guard_used(job->guard)) return;
    if (job->options.target_ids || job->options.target_pieces)
        text_append(out, job->partial.text.data, job->partial.text.length);
    else text_show_partial(front, &job->partial, 0, out);
}

const struct text_strategy text_guarded = { 0, 0, room, prepare, request, judge, write_text, show };
