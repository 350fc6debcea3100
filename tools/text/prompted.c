/* prompted.c - the strategies for decoder-only models with a prompt (prompt.h), and for texts that are whole
 * prompts. */
#include "tools/text/marks.h"
#include "tools/text/strategy.h"
#include "tools/text/terms.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- 1. Missing terms ----------------------------------------------------------------------------------
 *
 * Decoder-only models have no attention that shows where a term belongs. If an answer lacks terms, the model translates
 * the text with the targets in place of these terms (Song et al. 2019, arXiv 1904.09107), because it copies most of
 * them. If the new answer still lacks one, the terms are added to the first answer one by one. The word whose
 * log-probability falls most when the term is written into the text is the model's word for it. The model continues
 * after the answer up to this word and the term. If this fails, the term replaces the word. */

enum { NO_STAGE, WRITE_IN, FIND, GO_ON, EDIT, KEEP }; /* purpose of a request; FIND, EDIT and KEEP score an answer */
enum { LOG_UNIT = 1 << 16, LEAST_FALL = LOG_UNIT };   /* units in a nat; minimum fall of the model's word */

static int32_t in_units(float logprob) { return (int32_t)lrintf(fmaxf(logprob, -1000.0f) * (float)LOG_UNIT); }

static text_terms_known known_of(const text_job *job) {
    return (text_terms_known){ .spans = text_keeps_spans(&job->options), .message = job->message, .inflects = 1 };
}

/* Find terms that an answer lacks. */
static moe_status find_missing(const text_job *job, moe_span answer, const text_term *terms[TEXT_MAX_PLACED], size_t *n,
                               moe_error *error) {
    const text_options *o = &job->options;
    const text_terms_known known = known_of(job);
    *n = 0;
    if (!o->rules || !text_rules_glossary(o->rules) || o->pairs) return MOE_OK;
    return text_terms_missing(text_rules_glossary(o->rules), (moe_span){ job->source.data, job->source.length }, answer,
                              &known, terms, TEXT_MAX_PLACED, n, error);
}

/* Set *out to a text with the targets of the current stage's terms. */
static moe_status write_terms(text_job *job, moe_span text, text_bytes *out, moe_error *error) {
    text_placing *p = &job->placing;
    const text_terms_known known = known_of(job);
    text_clear(out);
    if (p->written)
        return text_terms_write(text_rules_glossary(job->options.rules), text, &known, p->terms, p->written, out,
                                &p->place, error);
    text_append(out, text.data, text.length);
    text_append(out, "", 0);
    return out->failed ? text_out_of_memory(error) : MOE_OK;
}

/* Complete the request of a stage. */
static void request_stage(const text_job *job, moe_request *r) {
    const text_placing *p = &job->placing;
    const text_ids *given = p->stage == GO_ON  ? &job->begun_ids
                            : p->stage == EDIT ? &job->edited_ids
                                               : &job->answer_ids;
    const size_t usual = job->answer_ids.length > job->source_ids.length && p->stage != WRITE_IN
                             ? job->answer_ids.length
                             : job->source_ids.length;
    if (p->stage != WRITE_IN) r->target = given->data, r->n_target = given->length;
    r->prefix = p->stage == GO_ON;
    r->limit = usual + usual / 4 + 8;
    if (r->limit > job->options.max_target || p->stage > GO_ON || p->stage == FIND) r->limit = 0;
    if (p->stage != WRITE_IN && p->stage != GO_ON) r->partial = NULL;
}

/* Store an answer that lacks terms, and its log-probabilities. */
static moe_status keep_answer(text_job *job, const moe_hypothesis *h, moe_error *error) {
    moe_status status = text_ids_set(&job->answer_ids, h->ids, h->n_ids, error);
    job->logprobs.length = 0;
    for (size_t i = 0; i < h->n_ids && !status; i++) {
        const int32_t one = in_units(h->token_logprobs[i]);
        status = text_ids_append(&job->logprobs, &one, 1, error);
    }
    return status;
}

static size_t count_term(const text_term *term, const text_term *const *terms, size_t n) {
    size_t found = 0;
    for (size_t i = 0; i < n; i++) found += terms[i] == term;
    return found;
}

/* Start adding the next term that the stored answer lacks. Return 0 if it lacks none. */
static int begin_term(text_placing *p, const text_term *const *missing, size_t n) {
    while (p->written < p->n)
        if ((p->lacks = count_term(p->terms[p->written++], missing, n))) return p->stage = FIND, 1;
    return 0;
}

/* Find the model's word for a term in an answer: the word of the token whose log-probability fell most or, if none
 * fell, an empty word at the term's relative position in the text. */
static moe_span find_word(const text_job *job, const moe_hypothesis *h, const text_bytes *answer,
                          const text_offsets *begins) {
    const char *s = answer->data;
    const size_t n = answer->length;
    int32_t most = LEAST_FALL;
    size_t last = 0; /* token of the word */
    size_t at = (size_t)((double)job->placing.place / (double)(job->shown.length + 1) * (double)n), end = n, bytes;
    int found = 0;
    for (size_t i = 0; i < begins->length && i < h->n_ids; i++) {
        size_t begin = begins->data[i];
        const size_t after = i + 1 < begins->length ? begins->data[i + 1] : n;
        const int32_t fall = job->logprobs.data[i] - in_units(h->token_logprobs[i]);
        while (begin < after && s[begin] == ' ') begin++;
        if (fall < LEAST_FALL || !text_is_wordlike(s, n, begin)) continue;
        if (fall >= most) most = fall, at = begin, found = 1;
        else if (i != last + 1) continue;
        end = after, last = i;
    }
    at = text_utf8_cut(s, n, at);
    if (at < n && text_is_unspaced(s, n, at)) return (moe_span){ s + at, found ? end - at : 0 };
    for (size_t word = 0; word < n; word += bytes) {
        bytes = text_word_length(s, n, word);
        if (at < word + bytes && s[word] != ' ') return (moe_span){ s + word, found ? bytes : 0 };
    }
    return (moe_span){ s + n, 0 };
}

static int is_capital(moe_span word) {
    char first[4];
    const size_t n = text_utf8_next(word.data, word.length, 0);
    memcpy(first, word.data, n);
    text_lower_first(first, n);
    return memcmp(first, word.data, n) != 0;
}

/* Set begun_ids and edited_ids from the scores of the stored answer. */
static moe_status place_term(const text_front *front, text_job *job, const moe_result *result, moe_error *error) {
    const char *term = job->placing.terms[job->placing.written - 1]->target;
    const moe_hypothesis *h = result->n_hypotheses ? result->hypotheses : &(moe_hypothesis){ 0 };
    text_bytes answer = { 0 }, edited = { 0 };
    text_offsets begins = { 0 };
    moe_status status = text_decode(front, job->answer_ids.data, job->answer_ids.length, &answer, error);
    text_append(&answer, "", 0);
    if (!status && answer.failed) status = text_out_of_memory(error);
    if (!status) status = text_decode_begins(front, job->answer_ids.data, job->answer_ids.length, &begins, error);
    if (!status) {
        const moe_span word = find_word(job, h, &answer, &begins);
        const size_t at = (size_t)(word.data - answer.data), end = at + word.length;
        const int spaced = !text_is_unspaced(term, strlen(term), 0);
        text_append(&edited, answer.data, at);
        if (spaced && !word.length && (at == answer.length || text_is_wordlike_before(answer.data, answer.length, at)))
            text_append(&edited, " ", at > 0);
        text_append_string(&edited, term);
        if (word.length && !text_trimmed(answer.data, at, " ").length && is_capital(word))
            text_upper_case(edited.data + at, text_utf8_next(term, strlen(term), 0));
        status = edited.failed ? text_out_of_memory(error)
                               : text_encode_as(front, BPE_BARE, edited.data, edited.length, &job->begun_ids, error);
        if (spaced && !word.length && text_is_wordlike(answer.data, answer.length, end)) text_append(&edited, " ", 1);
        text_append(&edited, answer.data + end, answer.length - end);
        if (!status)
            status = edited.failed
                         ? text_out_of_memory(error)
                         : text_encode_as(front, BPE_BARE, edited.data, edited.length, &job->edited_ids, error);
    }
    text_bytes_free(&answer);
    text_bytes_free(&edited);
    free(begins.data);
    return status;
}

/* Choose the next stage after an answer that lacks `n` terms; `fails` is 1 if the answer cannot be used. Set *more to 1
 * if another stage follows. */
static moe_status next_stage(text_job *job, const moe_hypothesis *h, size_t bytes, const text_term *const *missing,
                             size_t n, int fails, int *more, moe_error *error) {
    text_placing *p = &job->placing;
    const int stage = p->stage;
    moe_status status = MOE_OK;
    *more = 1;
    if (stage == WRITE_IN) {
        if (!fails && !n) return *more = 0, MOE_OK;
        p->written = 0;
        begin_term(p, p->terms, p->n);
    } else if (stage == NO_STAGE || stage == KEEP ||
               (!fails && n < p->missing && count_term(p->terms[p->written - 1], missing, n) < p->lacks)) {
        status = keep_answer(job, h, error);
        p->missing = n, p->bytes = bytes;
        *more = stage == NO_STAGE || begin_term(p, missing, n);
        if (stage == NO_STAGE) {
            memcpy(p->terms, missing, n * sizeof *missing);
            p->n = p->written = n, p->stage = WRITE_IN;
        }
    } else p->stage = stage + 1;
    return status;
}

/* ---- 2. Prompted --------------------------------------------------------------------------------------- */

static size_t room(const text_front *front, const text_options *options) {
    const size_t extra = options->prompt ? options->prompt->extra : text_prompt_extra(front->prompt);
    return options->max_source > extra ? options->max_source - extra : 0;
}

/* Prepare a text for a prompt. A text without words is copied. */
static moe_status prepare(const text_front *front, text_job *job, moe_span source, moe_error *error) {
    const text_options *o = &job->options;
    if (job->attempt.bound && !job->placing.stage) return MOE_OK; /* the text has not changed */
    source = text_trimmed(source.data, source.length, " \t");
    const moe_status status = write_terms(job, source, &job->shown, error);
    if (status) return status;
    if (text_keeps_spans(o) && !o->pairs && source.length && !text_has_language(source.data, source.length))
        job->verbatim = 1;
    const moe_status encoded = text_job_encode(front, job, &job->shown, error);
    if (encoded || !job->placing.written || job->source_ids.length <= room(front, o)) return encoded;
    text_clear(&job->shown); /* with the terms it is too long */
    text_append(&job->shown, source.data, source.length);
    return job->shown.failed ? text_out_of_memory(error) : text_job_encode(front, job, &job->shown, error);
}

static moe_status prompt_of(const text_front *front, const text_job *job, int strictly, text_ids *ids, size_t *left,
                            moe_error *error) {
    const text_options *o = &job->options;
    const text_prompt_request asked = { .text = { job->shown.data, job->shown.length },
                                        .original = text_trimmed(job->source.data, job->source.length, " \t"),
                                        .context = { job->context.data, job->context.length },
                                        .source = job->from,
                                        .target = job->language,
                                        .glossary = o->rules ? text_rules_glossary(o->rules) : NULL,
                                        .example = { job->match.source, job->match.target },
                                        .strictly = strictly };
    return text_prompt_ids(front, o->prompt, &asked, o->max_source, ids, left, error);
}

/* Return 1 if a text has no span, number or term that an answer must preserve. */
static int keeps_nothing(const text_job *job) {
    const moe_span source = { job->source.data, job->source.length }, nothing = { "", 0 };
    moe_span number = { NULL, 0 };
    const text_term *terms[TEXT_MAX_PLACED];
    size_t n = 0;
    if (find_missing(job, nothing, terms, &n, NULL) || n) return 0;
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
    if (!status && left && !bound && !job->placing.stage)
        text_job_note(job, &job->noted, "glossary terms that do not fit into the prompt: %zu", left);
    r->source = job->prompt.data;
    r->n_source = job->prompt.length;
    r->constraints = bound ? job->bound->each : NULL;
    r->n_constraints = bound ? job->bound->n : 0;
    if (job->placing.stage) request_stage(job, r);
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

/* Find the terms that an answer lacks, and choose the next stage; `fails` is 1 if the answer cannot be used. */
static moe_status judge_terms(text_job *job, const moe_hypothesis *h, moe_span target, int fails, text_verdict *v,
                              moe_error *error) {
    const text_term *missing[TEXT_MAX_PLACED];
    size_t n = 0;
    int more = 0;
    moe_status status = find_missing(job, target, missing, &n, error);
    if (job->placing.stage == GO_ON && target.length < job->placing.bytes / 4 * 3) fails = 1; /* it ended early */
    if (!status && (n || job->placing.stage))
        status = next_stage(job, h, target.length, missing, n, fails, &more, error);
    if (more) v->reasons |= TEXT_TERM_LACKING;
    return status;
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
    const int stage = job->placing.stage, empty = !text_trimmed(target.data, target.length, " \t").length,
              fails = v->reasons || lost || empty || (number.length && !job->attempt.bound);
    if (!status && !job->attempt.bound && !stage && (lost || number.length))
        status = bind(front, job, target, lost, &can, error);
    if (!status && (stage || (!lost && !can && h->finished))) status = judge_terms(job, h, target, fails, v, error);
    if (stage || v->reasons & TEXT_TERM_LACKING) v->reasons &= TEXT_TERM_LACKING;
    else if (can) v->reasons |= lost ? TEXT_SIGN_MISSING : TEXT_NUMBER_MISSING;
    else if (lost) v->reasons |= TEXT_SIGN_LOST;
    else if (empty) v->reasons |= TEXT_EMPTY;
    if (!status && !(v->reasons & ~(unsigned)TEXT_LOOPED) && h->finished)
        note_doubts(front, doubts, job, h, target, number);
    text_bytes_free(&written);
    return status;
}

static moe_status judge(const text_front *front, text_suspicions *doubts, text_job *job, const moe_result *result,
                        text_verdict *v, moe_error *error) {
    const moe_hypothesis *h = result->hypotheses;
    const int refused = result->status == MOE_ERROR_NUMERIC || result->status == MOE_ERROR_ARGUMENT ||
                        result->status == MOE_ERROR_LIMIT,
              stage = job->placing.stage;
    if (stage == FIND) {
        v->reasons = TEXT_TERM_LACKING, job->placing.stage = GO_ON;
        return place_term(front, job, result, error);
    }
    if (stage && stage != KEEP && (result->status || !result->n_hypotheses || !h->finished || h->looped)) {
        int more;
        v->reasons = TEXT_TERM_LACKING;
        return next_stage(job, NULL, 0, NULL, 0, 1, &more, error);
    }
    if (refused && job->attempt.bound && job->bound->n) v->reasons = TEXT_SIGN_LOST;
    if (result->status || !result->n_hypotheses) return MOE_OK;
    if (h->looped) v->reasons |= TEXT_LOOPED;
    if (text_attempt_next(job->attempt, v).step == TEXT_RESUME) return MOE_OK;
    /* text_job_lost may take a replaced word for a lost name */
    const moe_status status = stage >= EDIT ? MOE_OK : text_job_lost(front, job, h, v, error);
    if (status || (v->reasons & ~(unsigned)TEXT_LOOPED && !stage) || job->options.pairs) return status;
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

/* ---- 3. Answered --------------------------------------------------------------------------------------- */

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
