/* prompted.c - the strategies for decoder-only models with a prompt (prompt.h), and for texts that are whole
 * prompts. */
#include "tools/text/marks.h"
#include "tools/text/strategy.h"

#include <stdlib.h>
#include <string.h>

/* ---- 1. Prompted --------------------------------------------------------------------------------------- */

static size_t room(const text_front *front, const text_options *options) {
    const size_t extra = options->prompt ? options->prompt->extra : text_prompt_extra(front->prompt);
    return options->max_source > extra ? options->max_source - extra : 0;
}

/* Prepare a text for a prompt. A text without words is copied. */
static moe_status prepare(const text_front *front, text_job *job, moe_span source, moe_error *error) {
    const text_options *o = &job->options;
    if (job->attempt.bound) return MOE_OK; /* the text has not changed */
    source = text_trimmed(source.data, source.length, " \t");
    text_clear(&job->shown);
    text_append(&job->shown, source.data, source.length);
    text_append(&job->shown, "", 0);
    if (job->shown.failed) return text_out_of_memory(error);
    if (text_keeps_spans(o) && !o->pairs && source.length && !text_has_language(source.data, source.length))
        job->verbatim = 1;
    return text_job_encode(front, job, &job->shown, error);
}

static moe_status prompt_of(const text_front *front, const text_job *job, int strictly, text_ids *ids, size_t *left,
                            moe_error *error) {
    const text_options *o = &job->options;
    const text_prompt_request asked = { .text = { job->shown.data, job->shown.length },
                                        .context = { job->context.data, job->context.length },
                                        .source = job->from,
                                        .target = job->language,
                                        .glossary = o->rules ? text_rules_glossary(o->rules) : NULL,
                                        .example = { job->match.source, job->match.target },
                                        .strictly = strictly };
    return text_prompt_ids(front, o->prompt, &asked, o->max_source, ids, left, error);
}

/* Return 1 if a text contains no span or number that could be missing in an answer. */
static int keeps_nothing(const text_job *job) {
    const moe_span source = { job->source.data, job->source.length }, nothing = { "", 0 };
    moe_span number = { NULL, 0 };
    if (job->options.pairs || !text_keeps_spans(&job->options)) return 1;
    return !text_prompt_missing(source, nothing).length &&
           !text_prompt_missing_number(source, nothing, &number, NULL) && !number.length;
}

static moe_status request(const text_front *front, text_job *job, moe_request *r, moe_error *error) {
    const int bound = job->attempt.bound;
    size_t left = 0;
    if (r->partial) job->partial.final = !job->divisible && !job->message && keeps_nothing(job);
    job->language = r->target_tag, job->from = r->source_tag;
    const moe_status status = prompt_of(front, job, bound == 1, &job->prompt, &left, error);
    if (!status && left && !bound)
        text_job_note(job, &job->noted, "glossary terms that do not fit into the prompt: %zu", left);
    r->source = job->prompt.data;
    r->n_source = job->prompt.length;
    r->constraints = bound ? job->bound->each : NULL;
    r->n_constraints = bound ? job->bound->n : 0;
    return status;
}

/* Set *has to 1 if the strict prompt differs from the current prompt. An equal prompt would get the same answer. */
static moe_status has_strict_prompt(const text_front *front, const text_job *job, int *has, moe_error *error) {
    text_ids other = { 0 };
    size_t left = 0;
    const moe_status status = prompt_of(front, job, 1, &other, &left, error);
    *has = !status && (other.length != job->prompt.length ||
                       memcmp(other.data, job->prompt.data, other.length * sizeof *other.data) != 0);
    text_ids_free(&other);
    return status;
}

/* Build constraints from numbers, and if `strictly` is 1, from spans that an answer lacks. Set *can to 0 if there are
 * none. */
static moe_status bind(const text_front *front, text_job *job, moe_span target, int strictly, int *can,
                       moe_error *error) {
    const moe_span source = { job->shown.data, job->shown.length };
    const size_t most = job->options.max_target - job->options.max_target / 4;
    if (!job->bound && !(job->bound = calloc(1, sizeof *job->bound))) return text_out_of_memory(error);
    const moe_status status = text_prompt_bind(front, source, target, most, job->bound, error);
    *can = !status && job->bound->n;
    return status || *can || !strictly ? status : has_strict_prompt(front, job, can, error);
}

/* Append a trimmed answer with the white space of its source. */
static moe_status write_text(const text_front *front, const text_job *job, int shout, const moe_hypothesis *h,
                             text_bytes *out, int *sound, moe_error *error) {
    const text_bytes *source = &job->source;
    const moe_span core = text_trimmed(source->data, source->length, " \t");
    const size_t before = core.length ? (size_t)(core.data - source->data) : 0, end = before + core.length;
    const int keeps = text_keeps_spans(&job->options) && !job->options.pairs && core.length;
    text_bytes answer = { 0 };
    moe_status status = text_decode(front, h->ids, h->n_ids, &answer, error);
    const moe_span words = text_trimmed(answer.data, answer.length, " \t");
    const size_t at = out->length;
    (void)shout;
    *sound = 1;
    if (keeps) text_append(out, source->data, before);
    text_append(out, words.data, words.length);
    if (keeps) text_append(out, source->data + end, source->length - end);
    if (!status && job->message)
        *sound = text_message_repair(job->message, job->source.data, job->source.length, at, out);
    text_bytes_free(&answer);
    return status || !out->failed ? status : text_out_of_memory(error);
}

/* Add a note to a job with a suspicious answer. */
static void note_doubts(const text_front *front, text_suspicions *doubts, text_job *job, const moe_hypothesis *h,
                        moe_span target, moe_span number) {
    const moe_span source = { job->source.data, job->source.length }, none = { "", 0 };
    const int lines = !job->message && text_decodes_lines(front, h->ids, h->n_ids);
    const char *why =
        text_suspicious_reason(doubts,
                               job->language < 0 ? none : moe_model_language(front->model, (size_t)job->language),
                               source, target, lines);
    if (why) text_job_note(job, &job->noted, "doubtful: %s", why);
    else if (number.length)
        text_job_note(job, &job->noted, "doubtful: missing number %.*s",
                      (int)text_utf8_cut(number.data, number.length, 40), number.data);
}

static moe_status judge_answer(const text_front *front, text_suspicions *doubts, text_job *job, const moe_hypothesis *h,
                               text_verdict *v, moe_error *error) {
    text_bytes written = { 0 };
    moe_span number = { NULL, 0 };
    int sound = 0, can = 0;
    moe_status status = write_text(front, job, 0, h, &written, &sound, error);
    const moe_span source = { job->source.data, job->source.length },
                   target = { written.data ? written.data : "", written.length };
    const int keeps = text_keeps_spans(&job->options), kept = keeps ? text_marks_kept(source, target) : 1,
              lost = keeps && (!sound || !kept || text_prompt_missing(source, target).length);
    if (!status && kept < 0) status = text_out_of_memory(error);
    if (!status && keeps) status = text_prompt_missing_number(source, target, &number, error);
    if (!status && !job->attempt.bound && (lost || number.length)) status = bind(front, job, target, lost, &can, error);
    if (can) v->reasons |= lost ? TEXT_SIGN_MISSING : TEXT_NUMBER_MISSING;
    else if (lost) v->reasons |= TEXT_SIGN_LOST;
    else if (!text_trimmed(target.data, target.length, " \t").length) v->reasons |= TEXT_EMPTY;
    else if (!status && h->finished) note_doubts(front, doubts, job, h, target, number);
    text_bytes_free(&written);
    return status;
}

static moe_status judge(const text_front *front, text_suspicions *doubts, text_job *job, const moe_result *result,
                        text_verdict *v, moe_error *error) {
    const moe_hypothesis *h = result->hypotheses;
    const int refused = result->status == MOE_ERROR_NUMERIC || result->status == MOE_ERROR_ARGUMENT ||
                        result->status == MOE_ERROR_LIMIT;
    if (refused && job->attempt.bound && job->bound->n) v->reasons = TEXT_SIGN_LOST;
    if (result->status || !result->n_hypotheses) return MOE_OK;
    if (h->looped) v->reasons |= TEXT_LOOPED;
    if (text_attempt_next(job->attempt, v).step == TEXT_RESUME) return MOE_OK;
    const moe_status status = text_job_lost(front, job, h, v, error);
    if (status || v->reasons & ~(unsigned)TEXT_LOOPED || job->options.pairs) return status;
    return judge_answer(front, doubts, job, h, v, error);
}

static void show(const text_front *front, const text_job *job, text_bytes *out) {
    const text_bytes *source = &job->source, *text = &job->partial.text;
    const size_t at = out->length, blanks = strspn(source->data, " \t"),
                 begin = text->length ? strspn(text->data, " \t") : 0;
    if (job->message) return;
    if (text_keeps_spans(&job->options)) text_append(out, source->data, blanks);
    const size_t shown = out->length;
    text_show_partial(front, &job->partial, begin, out);
    if (out->length == shown) out->length = at;
}

const struct text_strategy text_prompted = { 1, 0, room, prepare, request, judge, write_text, show };

/* ---- 2. Answered --------------------------------------------------------------------------------------- */

static moe_status request_answer(const text_front *front, text_job *job, moe_request *r, moe_error *error) {
    (void)front, (void)r, (void)error;
    job->partial.final = 1;
    job->attempt.resumed = TEXT_RESUMES; /* answers end at a repetition */
    return MOE_OK;
}

static moe_status judge_nothing(const text_front *front, text_suspicions *doubts, text_job *job,
                                const moe_result *result, text_verdict *v, moe_error *error) {
    (void)front, (void)doubts, (void)job, (void)error;
    if (!result->status && result->n_hypotheses && result->hypotheses->looped) v->reasons = TEXT_LOOPED;
    return MOE_OK;
}

/* Append an answer with its line breaks, but without an incomplete last character. */
static moe_status write_answer(const text_front *front, const text_job *job, int shout, const moe_hypothesis *h,
                               text_bytes *out, int *sound, moe_error *error) {
    bpe_stream stream = { 0 };
    (void)job, (void)shout;
    text_decode_more(front, &stream, h->ids, h->n_ids, 1, out);
    *sound = 1;
    return out->failed ? text_out_of_memory(error) : MOE_OK;
}

static void show_answer(const text_front *front, const text_job *job, text_bytes *out) {
    (void)front;
    text_append(out, job->partial.text.data, job->partial.text.length);
}

const struct text_strategy text_answered = { 0,          1, room, prepare, request_answer, judge_nothing, write_answer,
                                             show_answer };
