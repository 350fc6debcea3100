/* repair.c - see repair.h. */
#include "tools/text/repair.h"
#include "tools/text/lost.h"
#include "tools/text/marks.h"
#include "tools/text/strategy.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

/* All in nats. DROP: minimum loss of a changed word; a quarter of the largest loss suffices, if at least LEAST_DROP.
 * LOSS: maximum loss of a token that is kept. GAIN: how much more probable the repair must be for the new text than for
 * the memory's source. */
static const float DROP = 2.0f, LEAST_DROP = 0.5f, LOSS = 2.0f, GAIN = 1.0f;
enum { WORDS = 8, BEST = 2 }; /* maximum words of the model for a change; maximum hypotheses used */

typedef enum stage { NOT_BEGUN, SCORE_OLD, SCORE_NEW, CONTINUE, SCORE_CANDIDATES, VERIFY, DONE } stage;

struct text_repair {
    stage stage;
    text_ids source, old_source, old, ids; /* the new text; the memory's texts; the candidate */
    text_offsets begins, words;            /* offsets of the tokens of `old`; begin and end of its words */
    float *logprobs;                       /* [n_logprobs] of `old` and the end token, given old_source */
    size_t n_logprobs, capacity;
    size_t from, to;  /* bytes of the change in the memory's translation */
    size_t given;     /* tokens before the change */
    text_bytes all;   /* the candidates, each with a NUL byte */
    size_t at, next;  /* offsets of the current and the next candidate */
    text_bytes best;  /* the best candidate so far */
    float score, sum; /* of the best one: score and log-probability */
    float before;     /* mean log-probability of the memory's translation for the new text */
};

static moe_span span_of(const char *text) { return (moe_span){ text, strlen(text) }; }
static moe_span bytes_of(const text_bytes *text) { return (moe_span){ text->data ? text->data : "", text->length }; }

int text_repair_is_busy(const text_repair *p) { return p && p->stage != NOT_BEGUN && p->stage != DONE; }

/* ---- Requests ------------------------------------------------------------------------------------------ */

/* Return 1 if a job has a fuzzy match that can be repaired. */
static int is_wanted(const text_front *front, const text_job *job) {
    const text_options *o = &job->options;
    return job->match.kind == TEXT_MATCH_FUZZY && !o->strategy->prompts && !o->strategy->answers && !o->quick &&
           !o->pairs && !o->target_ids && !o->target_pieces && !o->ids && !o->pretokenized && !job->cut &&
           !job->message && text_cuts(front) && !(o->rules && text_rules_glossary(o->rules)) &&
           job->attempt.step == TEXT_FIRST;
}

/* Encode the memory's texts. Set *fits to 0 if one is too long for the model. */
static moe_status begin(const text_front *front, text_job *job, int *fits, moe_error *error) {
    const text_front targets = text_front_of_targets(front);
    const text_options *o = &job->options;
    text_repair *p = job->repair;
    const moe_span source = span_of(job->match.source), target = span_of(job->match.target);
    p->old_source.length = p->old.length = 0;
    moe_status status = text_encode(front, source.data, source.length, &p->old_source, error);
    if (!status) status = text_encode(&targets, target.data, target.length, &p->old, error);
    if (!status) status = text_encode_begins(&targets, target.data, target.length, &p->begins, error);
    if (!status) status = text_recall_words(target, &p->words, error);
    *fits = !status && p->old_source.length <= o->strategy->room(front, o) && p->old.length < o->max_target &&
            p->begins.length == p->old.length && p->words.length;
    return status;
}

/* Encode the new text and a candidate, which may be NULL. */
static moe_status encode(const text_front *front, text_job *job, const char *candidate, moe_error *error) {
    const text_front targets = text_front_of_targets(front);
    text_repair *p = job->repair;
    p->source.length = p->ids.length = 0;
    moe_status status = text_encode(front, job->source.data, job->source.length, &p->source, error);
    if (!status && candidate) status = text_encode(&targets, candidate, strlen(candidate), &p->ids, error);
    if (!status && p->source.length > job->options.strategy->room(front, &job->options)) p->stage = DONE;
    return status;
}

moe_status text_repair_request(const text_front *front, text_job *job, moe_request *r, int *asks, moe_error *error) {
    text_repair *p = job->repair;
    int fits = 1;
    moe_status status = MOE_OK;
    *asks = 0;
    if (!p && !is_wanted(front, job)) return MOE_OK;
    if (!p && !(p = job->repair = calloc(1, sizeof *p))) return text_out_of_memory(error);
    if (p->stage == NOT_BEGUN && is_wanted(front, job)) {
        status = begin(front, job, &fits, error);
        p->stage = fits ? SCORE_OLD : DONE;
    }
    const char *candidate = p->stage == SCORE_CANDIDATES ? p->all.data + p->at
                            : p->stage == VERIFY         ? p->best.data
                                                         : NULL;
    if (p->stage > SCORE_OLD && p->stage < DONE) status = encode(front, job, candidate, error);
    *asks = !status && text_repair_is_busy(p);
    if (!*asks) return status;
    const text_ids *source = p->stage == SCORE_OLD || p->stage == VERIFY ? &p->old_source : &p->source,
                   *target = candidate ? &p->ids : &p->old;
    r->source = source->data, r->n_source = source->length;
    r->target = target->data, r->n_target = p->stage == CONTINUE ? p->given : target->length;
    r->prefix = p->stage == CONTINUE;
    r->partial = NULL, r->draft = NULL, r->n_draft = 0;
    if (!r->n_target) r->target = NULL, r->prefix = 0;
    return MOE_OK;
}

/* ---- Results ------------------------------------------------------------------------------------------- */

static float sum_of(const moe_hypothesis *h) {
    float sum = 0;
    for (size_t i = 0; i <= h->n_ids; i++) sum = sum + h->token_logprobs[i];
    return sum;
}

static float mean(const moe_hypothesis *h) { return sum_of(h) / (float)(h->n_ids + 1); }

/* Return the offset of a token without the spaces before it. */
static size_t token_at(const text_repair *p, const char *text, size_t i) {
    size_t at = p->begins.data[i];
    while (text[at] == ' ') at++;
    return at;
}

/* Find the words that lost probability. Return 0 if no word or too many of them did. */
static int find_change(text_repair *p, const char *text, const moe_hypothesis *h) {
    const size_t n = p->words.length / 2, end = strlen(text);
    float largest = 0;
    size_t first = n, last = 0;
    for (int pass = 0; pass < 2; pass++) {
        const float least = largest / 4 < DROP ? largest / 4 : DROP;
        for (size_t w = 0, i = 0; w <= n; w++) { /* word n is the end */
            const size_t next = w + 1 < n ? p->words.data[2 * w + 2] : w < n ? end + 1 : SIZE_MAX;
            float loss = 0;
            for (; i <= h->n_ids && (i == h->n_ids ? w == n : token_at(p, text, i) < next); i++)
                if (p->logprobs[i] > h->token_logprobs[i]) loss = loss + (p->logprobs[i] - h->token_logprobs[i]);
            if (pass && loss >= least && loss >= LEAST_DROP) first = w < first ? w : first, last = w + 1;
            if (loss > largest) largest = loss;
        }
    }
    if (last > n) last = n;
    if (largest < LEAST_DROP || (float)(last - (first < last ? first : last)) >= TEXT_REPAIR_SHARE * (float)n) return 0;
    p->from = first < n ? p->words.data[2 * first] : end;
    p->to = last < n ? p->words.data[2 * last] : end;
    for (p->given = 0; p->given < p->begins.length && token_at(p, text, p->given) < p->from; p->given++) {}
    if (p->given && p->given < p->begins.length && token_at(p, text, p->given) > p->from) p->given--;
    return 1;
}

/* Add a candidate: the memory's words before the change, words of the model, the memory's words from offset `from`. */
static void add(text_repair *p, moe_span before, moe_span words, const char *old, size_t from) {
    const size_t at = p->all.length, length = strlen(old);
    text_append(&p->all, before.data, before.length);
    text_append(&p->all, words.data, words.length);
    if (from < length && from && old[from - 1] == ' ' && (before.length || words.length)) text_append(&p->all, " ", 1);
    text_append(&p->all, old + from, length - from);
    text_append(&p->all, "", 1);
    if (p->all.failed) return;
    int known = strcmp(p->all.data + at, old) == 0;
    for (size_t i = 0; i < at && !known; i += strlen(p->all.data + i) + 1)
        known = strcmp(p->all.data + i, p->all.data + at) == 0;
    if (known) p->all.length = at;
}

/* Add the candidates of a translation that begins with the given tokens. */
static moe_status add_each(const text_front *front, text_repair *p, const char *old, const moe_hypothesis *h,
                           text_bytes *text, text_offsets *words, moe_error *error) {
    size_t begin = p->given < p->begins.length ? p->begins.data[p->given] : p->from;
    while (begin && old[begin - 1] == ' ') begin--;
    text_clear(text);
    moe_status status = text_decode(front, h->ids, p->given, text, error);
    const size_t first = text->length;
    text_clear(text);
    if (!status) status = text_decode(front, h->ids, h->n_ids, text, error);
    if (!status) status = text_recall_words(bytes_of(text), words, error);
    if (status || first > text->length) return status;
    const moe_span before = { old, begin };
    const char *own = bytes_of(text).data + first;
    size_t end = first;
    for (size_t n = 0, w = 0; n <= WORDS; n++, end = words->data[w + 1]) {
        add(p, before, (moe_span){ own, end - first }, old, p->to);
        if (n) add(p, before, (moe_span){ own, end - first }, old, p->from);
        while (w < words->length && words->data[w + 1] <= end) w += 2;
        if (w == words->length) break;
    }
    add(p, before, (moe_span){ own, text->length - first }, old, strlen(old));
    return p->all.failed ? text_out_of_memory(error) : MOE_OK;
}

static moe_status add_all(const text_front *front, text_job *job, const moe_result *result, moe_error *error) {
    text_bytes text = { 0 };
    text_offsets words = { 0 };
    moe_status status = MOE_OK;
    for (size_t k = 0; k < result->n_hypotheses && k < BEST && !status; k++) {
        const moe_hypothesis *h = &result->hypotheses[k];
        if (h->finished && h->n_ids >= job->repair->given)
            status = add_each(front, job->repair, job->match.target, h, &text, &words, error);
    }
    text_bytes_free(&text);
    free(words.data);
    return status;
}

/* Set *kept to 1 if a candidate keeps numbers, placeholders and signs. */
static moe_status is_kept(const text_job *job, moe_span candidate, int *kept, moe_error *error) {
    const moe_span source = bytes_of(&job->source);
    text_figures figures = TEXT_FIGURES_LOST;
    const moe_status status = text_figures_compare(source, candidate, 0, &figures, error);
    const int marks = text_marks_kept(source, candidate);
    *kept = !status && !figures && marks > 0 && !text_prompt_missing(source, candidate).length &&
            text_brackets_kept(source, candidate) && !text_signs_added(source, candidate) &&
            !text_loops(source, candidate);
    return status || marks >= 0 ? status : text_out_of_memory(error);
}

/* Return 1 if a candidate keeps a token of the memory that lost much probability and so belongs to the change. */
static int loses(const text_repair *p, const moe_hypothesis *h) {
    const size_t n = p->old.length, m = h->n_ids, shorter = n < m ? n : m;
    size_t same = 0, end = 0; /* numbers of common tokens at the beginning and the end */
    while (same < shorter && p->old.data[same] == h->ids[same]) same++;
    while (end < shorter - same && p->old.data[n - 1 - end] == h->ids[m - 1 - end]) end++;
    for (size_t i = 0; i <= m; i++)
        if ((i < same && p->logprobs[i] - h->token_logprobs[i] > LOSS) ||
            (i >= m - end && p->logprobs[n - m + i] - h->token_logprobs[i] > LOSS))
            return 1;
    return 0;
}

static moe_status judge(text_job *job, const moe_hypothesis *h, moe_error *error) {
    text_repair *p = job->repair;
    const moe_span candidate = span_of(p->all.data + p->at);
    float similarity = 0;
    int kept = 0;
    moe_status status = is_kept(job, candidate, &kept, error);
    if (!status && kept) status = text_recall_compare(candidate, span_of(job->match.target), &similarity, error);
    const float own = mean(h), score = own + TEXT_REPAIR_WEIGHT * similarity;
    if (status || !kept || loses(p, h) || own <= p->before || score <= p->score) return status;
    p->score = score, p->sum = sum_of(h);
    text_clear(&p->best);
    text_append(&p->best, candidate.data, candidate.length);
    return p->best.failed ? text_out_of_memory(error) : MOE_OK;
}

/* Use the best candidate if it is more probable for the new text than for the memory's. */
static moe_status finish(text_job *job, const moe_hypothesis *h, moe_error *error) {
    text_repair *p = job->repair;
    const moe_span all = bytes_of(&job->source), core = text_trimmed(all.data, all.length, " \t\r\n");
    p->stage = DONE;
    if (p->sum - sum_of(h) < GAIN) return MOE_OK;
    text_clear(&job->recalled);
    text_append(&job->recalled, all.data, (size_t)(core.data - all.data));
    text_append(&job->recalled, p->best.data, p->best.length);
    text_append(&job->recalled, core.data + core.length, all.length - core.length - (size_t)(core.data - all.data));
    job->match.kind = TEXT_MATCH_REPAIRED;
    return job->recalled.failed ? text_out_of_memory(error) : MOE_OK;
}

moe_status text_repair_take(const text_front *front, text_job *job, const moe_result *result, int *used,
                            moe_error *error) {
    text_repair *p = job->repair;
    const moe_hypothesis *h = result->n_hypotheses ? result->hypotheses : NULL;
    moe_status status = MOE_OK;
    if (!(*used = text_repair_is_busy(p))) return MOE_OK;
    if (!h || result->status) {
        if (p->stage != SCORE_CANDIDATES) return p->stage = DONE, MOE_OK;
    } else if (p->stage == SCORE_OLD || p->stage == SCORE_NEW) {
        const int scored = h->n_ids == p->old.length && h->finished;
        if (!scored || (p->stage == SCORE_NEW && !find_change(p, job->match.target, h))) return p->stage = DONE, MOE_OK;
        p->before = mean(h), p->score = -FLT_MAX;
        if (p->stage++ == SCORE_NEW) return MOE_OK;
        p->n_logprobs = 0;
        return text_add(&p->logprobs, &p->n_logprobs, &p->capacity, h->token_logprobs, h->n_ids + 1,
                        sizeof *p->logprobs, error);
    } else if (p->stage == CONTINUE) {
        status = add_all(front, job, result, error);
        p->stage++;
    } else if (p->stage == VERIFY) return finish(job, h, error);
    else status = judge(job, h, error);
    if (status) return status;
    p->at = p->next;
    if (p->at == p->all.length) return p->stage = p->best.length ? VERIFY : DONE, MOE_OK;
    p->next += strlen(p->all.data + p->at) + 1;
    return MOE_OK;
}

void text_repair_clear(text_repair *p) {
    if (!p) return;
    text_clear(&p->all);
    text_clear(&p->best);
    p->stage = NOT_BEGUN, p->at = p->next = 0;
}

void text_repair_free(text_repair *p) {
    if (!p) return;
    text_bytes *const texts[] = { &p->all, &p->best };
    text_bytes_free_all(texts, 2);
    text_ids_free(&p->source), text_ids_free(&p->old_source), text_ids_free(&p->old), text_ids_free(&p->ids);
    free(p->begins.data), free(p->words.data), free(p->logprobs);
    free(p);
}
