/* jobs.c - see jobs.h. The sections have the same numbers. */
#define _POSIX_C_SOURCE 200809L

#include "tools/text/jobs.h"
#include "tools/text/lost.h"
#include "tools/text/quotes.h"
#include "tools/text/repair.h"
#include "tools/text/sentences.h"
#include "tools/text/spans.h"
#include "tools/text/strategy.h"
#include "tools/text/terms.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_blank(char c) { return c == ' ' || c == '\t'; }

/* ---- 1. Jobs ------------------------------------------------------------------------------------------- */

void text_job_note(text_job *job, int *flag, const char *format, ...) {
    const int first = !job->cut && !job->failed;
    const size_t said = job->noted ? strlen(job->note) : 0;
    *flag = 1;
    if (job->failed && !job->status) job->status = MOE_ERROR_ARGUMENT;
    if (!first || said + 3 > sizeof job->note) return; /* full */
    va_list arguments;
    va_start(arguments, format);
    const int joint = said ? snprintf(job->note + said, sizeof job->note - said, "; ") : 0;
    vsnprintf(job->note + said + joint, sizeof job->note - said - (size_t)joint, format, arguments);
    va_end(arguments);
}

int text_job_keeps_source(const text_job *job) { return job->attempt.step == TEXT_KEEP_SOURCE; }

static const char *before_option(const text_options *options) { return options->option ? options->option : "--"; }

/* Return the length of a line up to its first problem. There, cut the line (option truncate) or fail the job. */
static size_t usable(const text_options *options, const text_line *line, text_job *job) {
    char why[128];
    const size_t length = text_line_usable(line, why, sizeof why);
    if (*why)
        text_job_note(job, options->truncate ? &job->cut : &job->failed,
                      options->truncate ? "%s; the line was cut there" : "%s; %s%s", why, before_option(options),
                      "truncate cuts the line there");
    return length;
}

static moe_status parse_text(const text_front *front, int ids, int pieces, moe_span text, text_ids *out,
                             moe_error *error) {
    return ids      ? text_parse_ids(front, text.data, text.length, out, error)
           : pieces ? text_parse_pieces(front, text.data, text.length, out, error)
                    : text_encode(front, text.data, text.length, out, error);
}

static moe_status to_ids(const text_front *front, int ids, int pieces, text_job *job, const text_bytes *text,
                         text_ids *out, moe_error *error) {
    moe_error why;
    out->length = 0;
    moe_status status = parse_text(front, ids, pieces, (moe_span){ text->data, text->length }, out, &why);
    if (status == MOE_ERROR_MEMORY) return text_out_of_memory(error);
    if (status) text_job_note(job, &job->failed, "%s", why.message);
    return MOE_OK;
}

moe_status text_job_encode(const text_front *front, text_job *job, const text_bytes *text, moe_error *error) {
    return to_ids(front, job->options.ids, job->options.pretokenized, job, text, &job->source_ids, error);
}

/* Return 1 for the pieces <0x80> to <0xBF>, which continue a character. */
static int continues_character(const text_front *front, int32_t id) {
    if (front->bpe) return bpe_continues(front->bpe, id);
    const moe_span piece = front->of_targets ? text_piece(front, id) : text_source_piece(front, id);
    const char high = piece.length == 6 && memcmp(piece.data, "<0x", 3) == 0 ? piece.data[3] : 0;
    return (high == '8' || high == '9' || high == 'A' || high == 'B') && piece.data[5] == '>';
}

/* Reject or cut ids beyond the limit, but never inside a character that is spelled in bytes. */
static void limit_ids(const text_front *front, int ids, int pieces, const char *what, size_t limit, text_ids *out,
                      text_job *job) {
    const text_options *options = &job->options;
    if (job->failed || out->length <= limit) return;
    if (!options->truncate) {
        const int shares = moe_model_prompted(front->model) && !front->of_targets;
        text_job_note(job, &job->failed,
                      "the %s has %zu tokens, but the limit is %zu; use %struncate to cut the %s, or %s %smax-len%s",
                      what, out->length, limit, before_option(options), what, shares ? "reduce" : "raise",
                      before_option(options), shares ? ": prompt and answer share the model's positions" : "");
        job->status = MOE_ERROR_LIMIT;
        return;
    }
    size_t keep = limit;
    if (text_cuts(front) && !ids && !pieces)
        while (keep && continues_character(front, out->data[keep])) keep--;
    text_job_note(job, &job->cut, "the %s has %zu tokens and was cut after %zu", what, out->length, keep);
    out->length = keep;
}

int text_keeps_spans(const text_options *options) { return options->rules && text_rules_spans(options->rules); }

static size_t room_of(const text_front *front, const text_job *job) {
    return job->options.strategy->room(front, &job->options);
}

/* Fill source_ids for the job's attempt. */
static moe_status prepare_source(const text_front *front, text_job *job, moe_error *error) {
    text_bytes read = { 0 };
    moe_span source = { job->source.data, job->source.length };
    if (job->message) {
        text_message_show(job->message, source.data, source.length, &read);
        source = (moe_span){ read.data, read.length };
    }
    const moe_status status =
        read.failed ? text_out_of_memory(error) : job->options.strategy->prepare(front, job, source, error);
    text_bytes_free(&read);
    return status;
}

/* A target prefix can end within a word, with other tokens than the whole word. The first attempt
 * withholds the tokens of the last word (at most MOST_HELD) from the model; each further attempt gives it one more,
 * until the translation starts with the prefix. If it starts with all tokens of the prefix, the next attempt gives all
 * of them. A space at the end marks the last word as complete. */
enum { MOST_HELD = 4 };

/* Set the number of tokens that the first attempt withholds. */
static moe_status hold_word(const text_front *targets, text_job *job, moe_error *error) {
    const char *text = job->target.data;
    const size_t length = job->target.length, n = job->target_ids.length;
    text_offsets begins = { 0 };
    size_t word = length;
    while (word && (unsigned char)text[word - 1] > ' ' && !strchr("\"#$%&'()*+,-./:;<=>?@[]_", text[word - 1])) word--;
    if (word == length || !text_cuts(targets)) return MOE_OK;
    const int unspaced = text_is_unspaced(text, length, text_utf8_cut(text, length, length - 1));
    const moe_status status = text_encode_begins(targets, text, length, &begins, error);
    if (!status && begins.length == n)
        for (size_t most = unspaced ? 1 : MOST_HELD, end = length;
             job->attempt.held < n && job->attempt.held < most && end > word;)
            end = begins.data[n - ++job->attempt.held];
    free(begins.data);
    return status;
}

int text_job_begins(const text_job *job, const char *text, size_t length) {
    const moe_span given = text_trimmed(job->target.data, job->target.length, " \t");
    return !job->attempt.held || (length >= given.length && memcmp(text, given.data, given.length) == 0);
}

/* Check whether a translation made without the last tokens of its target prefix starts with the prefix. */
static moe_status judge_beginning(const text_front *front, text_job *job, const moe_result *result, text_verdict *v,
                                  moe_error *error) {
    const moe_hypothesis *h = result->n_hypotheses ? result->hypotheses : NULL;
    const text_ids *given = &job->target_ids;
    text_bytes written = { 0 };
    if (h && h->n_ids >= given->length && memcmp(h->ids, given->data, given->length * sizeof *h->ids) == 0)
        job->attempt.held = 1, h = NULL;
    const moe_status status = h ? text_job_write(front, job, h, &written, error) : MOE_OK;
    if (!h || !text_job_begins(job, written.data ? written.data : "", written.length)) v->reasons = TEXT_BEGINNING_LOST;
    text_bytes_free(&written);
    return status;
}

moe_status text_job_prepare(const text_front *front, const text_options *options, const text_line *line, text_job *job,
                            moe_error *error) {
    job->options = *options;
    if (line->prompt) return text_ids_set(&job->source_ids, line->prompt, line->n_prompt, error);
    const size_t length = usable(options, line, job);
    if (job->failed) return MOE_OK; /* leave `source` empty rather than incomplete */
    text_append(&job->source, line->data, length);
    text_append(&job->target, line->given, options->pairs ? line->given_length : 0);
    if (job->source.failed || job->target.failed) return text_out_of_memory(error);
    if (options->pairs && !text_is_usable(line->given, line->given_length)) {
        text_job_note(job, &job->failed, "the target is not valid UTF-8 or contains a NUL byte");
        return MOE_OK;
    }

    int open = 0;
    text_append(&job->source, "", 0); /* make sure that data is not NULL */
    if (line->kept || (text_keeps_spans(options) && text_has_message(job->source.data, job->source.length, &open)))
        text_job_note(job, &job->noted, "left untranslated: the line contains an ICU message ({n, plural, ...})");
    job->verbatim = open |= line->kept;
    if (open) return MOE_OK;
    const text_front targets = text_front_of_targets(front);
    moe_status status = prepare_source(front, job, error);
    if (!status && options->pairs && !job->failed)
        status =
            to_ids(&targets, options->target_ids, options->target_pieces, job, &job->target, &job->target_ids, error);
    if (status || job->failed) return status;
    limit_ids(front, options->ids, options->pretokenized, "line", room_of(front, job), &job->source_ids, job);
    if (options->pairs)
        limit_ids(&targets, options->target_ids, options->target_pieces, "target",
                  options->max_target ? options->max_target - 1 : 0, &job->target_ids, job);
    if (options->begins && !options->target_ids && !options->target_pieces && !job->failed && !job->cut)
        if ((status = hold_word(&targets, job, error))) return status;
    /* White space needs neither a translation nor a score. */
    job->blank = !job->failed && job->source_ids.length == 0 && job->target_ids.length == 0;
    if (job->blank && options->rules) job->verbatim = 1; /* a text without ids, such as an empty row of a table */
    return MOE_OK;
}

enum { HALVED = 16 /* minimum bytes of a text that is halved because it lost something */ };

/* Find where to halve a text after a loss, if it may be halved. */
static void find_half(const text_job *job, text_verdict *v) {
    static const unsigned lost = TEXT_PLACEHOLDER_LOST | TEXT_FIGURE_LOST | TEXT_BRACKET_LOST;
    const moe_span s = { job->source.data, job->source.length };
    if (!job->divisible || job->cut || v->half || !(v->reasons & lost)) return;
    if (v->reasons & TEXT_BRACKET_LOST) v->half = text_half_at_bracket(s.data, s.length);
    if (!v->half && s.length >= HALVED) v->half = text_half(s.data, s.length, 1);
}

/* Compare the numbers, brackets, signs and joints of a translation with those of its source. With placeholders, an
 * added sign may be a fragment of one. */
static moe_status compare(const text_job *job, moe_span target, text_verdict *v, moe_error *error) {
    const moe_span source = { job->source.data, job->source.length };
    text_figures figures;
    size_t joints[2], half;
    if (text_guard_has_signs(job->guard)) return MOE_OK; /* the glossary may change numbers and signs */
    const moe_status status = text_figures_compare(source, target, text_guard_digits(job->guard), &figures, error);
    if (status) return status;
    if (figures == TEXT_FIGURES_ADDED) v->reasons |= TEXT_PLACEHOLDER_LOST;
    else if (figures) v->reasons |= TEXT_FIGURE_LOST;
    else if (!text_brackets_kept(source, target)) v->reasons |= TEXT_BRACKET_LOST;
    else if (text_signs_added(source, target))
        v->reasons |= text_guard_used(job->guard) ? TEXT_PLACEHOLDER_LOST : TEXT_BRACKET_LOST;
    else if ((half = text_half_at_joint(source.data, source.length, joints)) && !text_joints_kept(target, joints) &&
             job->divisible)
        v->reasons |= TEXT_PART_LOST, v->half = half;
    else if (!text_words_kept(source, target)) v->reasons |= TEXT_WORD_LOST;
    return MOE_OK;
}

moe_status text_job_lost(const text_front *front, text_job *job, const moe_hypothesis *h, text_verdict *v,
                         moe_error *error) {
    const text_options *o = &job->options;
    const moe_span source = { job->source.data, job->source.length };
    const int compares = !o->strategy->prompts && !o->strategy->answers && text_keeps_spans(o) && h->finished &&
                         !job->target_ids.length && !o->target_ids && !o->target_pieces;
    if (job->cut || o->quick || (!job->divisible && !compares)) return MOE_OK;
    text_clear(&job->written);
    moe_status status = text_job_write(front, job, h, &job->written, error);
    job->written_of = status ? NULL : h;
    const moe_span target = { job->written.data ? job->written.data : "", job->written.length };
    if (!status && compares) status = compare(job, target, v, error);
    if (!job->divisible || v->reasons & TEXT_LOST ||
        (h->looped && text_sentence(source.data, source.length) == source.length))
        return status;
    const text_names names = status ? TEXT_NO_NAMES : text_names_kept(source, target);
    if (names == TEXT_NAMES_MEMORY) status = text_out_of_memory(error);
    if (job->name_list && (names == TEXT_NAMES_LOST || names == TEXT_NAMES_COUNT))
        job->name_list = 2; /* the halves must keep all names too */
    if (!status && (!h->finished || names == TEXT_NAMES_COUNT || (job->name_list == 2 && names != TEXT_NAMES) ||
                    text_loops(source, target) || !text_signs_kept(source, target))) {
        v->half = text_half(source.data, source.length, o->rules != NULL);
        v->reasons |= v->half ? TEXT_PART_LOST : TEXT_WORD_LOST;
    }
    return status;
}

/* Prepare the source of the job's attempt; set *fits to 1 if it is valid and short enough for the model, else 0. */
static moe_status prepare_attempt(const text_front *front, text_job *job, int *fits, moe_error *error) {
    const moe_status status = prepare_source(front, job, error);
    *fits = !job->failed && job->source_ids.length <= room_of(front, job);
    if (!status && !*fits) job->failed = 0;
    return status;
}

static const char *old_word(const void *guard, const text_term *term, size_t n) {
    return text_guard_old_word(guard, term, n);
}

/* Verify and count the glossary terms in the final translation. */
static moe_status check_terms(const text_front *front, text_job *job, const moe_result *result, moe_error *error) {
    const text_options *o = &job->options;
    const text_glossary *glossary = o->rules ? text_rules_glossary(o->rules) : NULL;
    text_terms_known known = { .spans = text_keeps_spans(o),
                               .message = job->message,
                               .inflects = o->strategy->prompts,
                               .user = job->guard };
    text_bytes written = { 0 }, message = { 0 };
    if (!glossary || o->pairs || !result->n_hypotheses) return MOE_OK;
    job->term_uses.length = 0;
    moe_status status = text_job_write(front, job, result->hypotheses, &written, error);
    if (!status && text_guard_used(job->guard) && text_guard_knows_free(job->guard, &known.without))
        known.old_word = old_word;
    if (!status)
        status = text_terms_check(glossary, (moe_span){ job->source.data, job->source.length },
                                  (moe_span){ written.data, written.length }, &known, &job->term_uses, &message, error);
    if (!status && message.length && job->attempt.step == TEXT_ACCEPT)
        text_job_note(job, &job->noted, "%s", message.data);
    text_bytes_free(&written);
    text_bytes_free(&message);
    return status;
}

moe_status text_job_rank(const text_front *front, text_job *job, const moe_result *result,
                         moe_hypothesis ranked[MOE_MAX_BEAM], moe_error *error) {
    const char *wanted = job->match.target;
    text_bytes written = { 0 };
    moe_status status = MOE_OK;
    if (result->n_hypotheses) memcpy(ranked, result->hypotheses, result->n_hypotheses * sizeof *ranked);
    if (job->match.kind != TEXT_MATCH_FUZZY || job->options.strategy->prompts || job->phrase_ids.length ||
        text_repair_is_busy(job->repair))
        return MOE_OK;
    job->written_of = NULL;
    for (size_t i = 0; i < result->n_hypotheses && !status && ranked[i].finished; i++) {
        float similarity = 0;
        text_clear(&written);
        status = text_job_write(front, job, &ranked[i], &written, error);
        if (!status)
            status = text_recall_compare((moe_span){ written.data ? written.data : "", written.length },
                                         (moe_span){ wanted, strlen(wanted) }, &similarity, error);
        moe_hypothesis h = ranked[i];
        h.score += TEXT_RECALL_WEIGHT * similarity;
        size_t at = i; /* keep the order of equal scores */
        for (; at && ranked[at - 1].score < h.score; at--) ranked[at] = ranked[at - 1];
        ranked[at] = h;
    }
    text_bytes_free(&written);
    return status;
}

moe_status text_job_next(const text_front *front, text_suspicions *doubts, text_job *job, const moe_result *result,
                         moe_error *error) {
    static const text_verdict unfit = { .reasons = TEXT_UNFIT };
    text_attempt *a = &job->attempt;
    text_verdict verdict = { 0 };
    int fits = 0, repairs;
    job->written_of = NULL; /* results may share memory */
    moe_status status = text_repair_take(front, job, result, &repairs, error);
    if (job->match.kind == TEXT_MATCH_REPAIRED) job->verbatim = 1, a->step = TEXT_ACCEPT;
    if (status || repairs) return status;
    status = job->options.strategy->judge(front, doubts, job, result, &verdict, error);
    if (!status && a->held) status = judge_beginning(front, job, result, &verdict, error);
    if (status) return status;
    find_half(job, &verdict);
    verdict.half = text_guard_outside_term(job->guard, verdict.half);
    if (result->status && !verdict.reasons) {
        a->step = TEXT_FAIL;
        job->failed = 1;
        job->status = result->status;
        snprintf(job->note, sizeof job->note, "%s", result->message);
        return MOE_OK;
    }
    *a = text_attempt_next(*a, &verdict);
    if (a->step == TEXT_RESUME)
        return text_ids_set(&job->resumed_ids, result->hypotheses->ids, result->hypotheses->n_ids, error);
    for (; a->step < TEXT_HALVE && !fits; *a = fits ? *a : text_attempt_next(*a, &unfit))
        if ((status = prepare_attempt(front, job, &fits, error))) return status;
    if (a->step == TEXT_FAIL) job->status = MOE_ERROR_UNSUPPORTED;
    const int half = job->divided && a->note && text_begins_with(a->note, strlen(a->note), "left");
    if (a->note)
        text_job_note(job, a->step == TEXT_FAIL ? &job->failed : &job->cut, "%s%s", half ? "a part was " : "", a->note);
    return a->step < TEXT_ACCEPT ? MOE_OK : check_terms(front, job, result, error);
}

static void resume(const text_job *job, moe_request *request) {
    static const float penalties[TEXT_RESUMES] = { 1.1f, 1.3f };
    /* Skip the first token if the session forces it, but not the tag of a request that is not raw. */
    const size_t forced = request->force >= 0 || (request->raw && job->resumed_ids.data[0] == request->target_tag);
    request->target = job->resumed_ids.data + forced;
    request->n_target = job->resumed_ids.length - forced;
    request->prefix = 1;
    request->repetition_penalty = penalties[job->attempt.resumed - 1];
}

moe_status text_job_request(const text_front *front, text_job *job, moe_request *request, moe_error *error) {
    text_clear(&job->partial.text);
    job->partial.ids.length = 0;
    job->partial.decoding = (bpe_stream){ 0 };
    int repairs;
    moe_status status = text_repair_request(front, job, request, &repairs, error);
    if (status || repairs) return job->partial.final = 0, status;
    status = job->options.strategy->request(front, job, request, error);
    if (job->attempt.step == TEXT_RESUME) resume(job, request);
    if (job->attempt.held) job->partial.final = 0;
    return status;
}

moe_status text_job_divide(const text_front *front, text_job *job, text_job *second, moe_error *error) {
    const size_t at = job->attempt.half, end = text_before_mark(job->source.data, at);
    const text_bytes gap = second->gap;
    second->gap = job->gap, job->gap = gap;
    text_clear(&job->gap);
    text_append(&second->source, job->source.data + at, job->source.length - at);
    text_append(&job->gap, job->source.data + end, at - end);
    job->source.data[job->source.length = end] = '\0';
    second->more = job->more, job->more = 1;
    second->options = job->options;
    second->attempt = job->attempt;
    second->name_list = job->name_list;
    second->message = job->message;
    second->joined = job->joined, job->joined = 0;
    second->divisible = 1;
    second->divided = job->divided = 1;
    second->of_capitals = job->of_capitals |= job->capitals;
    text_guard_clear(job->guard); /* the guard was for the undivided text */
    text_append(&second->context, job->context.data, job->context.length);
    moe_status status =
        job->gap.failed || second->source.failed || second->context.failed ? text_out_of_memory(error) : MOE_OK;
    if (!status) status = prepare_source(front, job, error);
    return status ? status : prepare_source(front, second, error);
}

moe_status text_job_write(const text_front *front, const text_job *job, const moe_hypothesis *h, text_bytes *out,
                          moe_error *error) {
    const size_t begin = out->length;
    int sound = 0;
    if (job->options.target_pieces) return text_join_pieces(front, h->ids, h->n_ids, out, error);
    if (job->options.target_ids) {
        text_append_ids(out, h->ids, h->n_ids);
        return out->failed ? text_out_of_memory(error) : MOE_OK;
    }
    if (h == job->written_of && !text_job_keeps_source(job)) {
        text_append(out, job->written.data, job->written.length);
        return out->failed ? text_out_of_memory(error) : MOE_OK;
    }
    if (!text_job_keeps_source(job)) {
        const moe_status status = job->options.strategy->write(front, job, job->capitals, h, out, &sound, error);
        if (!status && sound && !job->options.strategy->prompts && !job->options.strategy->answers &&
            text_keeps_spans(&job->options))
            text_repair_quotes((moe_span){ job->source.data, job->source.length }, begin, out);
        if (status || sound) return status || !out->failed ? status : text_out_of_memory(error);
    }
    out->length = begin; /* undo a broken hypothesis */
    text_append(out, job->source.data, job->source.length);
    return out->failed ? text_out_of_memory(error) : MOE_OK;
}

void text_job_grow(const text_front *front, text_job *job, const int32_t *ids, size_t n) {
    text_partial *p = &job->partial;
    const text_options *o = &job->options;
    moe_status status = text_ids_append(&p->ids, ids, n, NULL);
    if (front->bpe && !o->target_ids && !o->target_pieces) {
        text_decode_more(front, &p->decoding, ids, n, o->strategy->answers, &p->text);
    } else if (!status) {
        text_clear(&p->text);
        if (o->target_ids) text_append_ids(&p->text, p->ids.data, p->ids.length);
        else
            status =
                (o->target_pieces ? text_join_pieces : text_decode)(front, p->ids.data, p->ids.length, &p->text, NULL);
    }
    p->text.failed |= status != MOE_OK;
}

size_t text_job_show(const text_front *front, const text_job *job, text_bytes *out) {
    const size_t at = out->length;
    if (job->partial.text.failed || text_job_keeps_source(job)) return 0;
    job->options.strategy->show(front, job, out);
    if (job->capitals && !out->failed) text_upper_case(out->data + at, out->length - at);
    return job->partial.final ? out->length - at : 0;
}

void text_show_partial(const text_front *front, const text_partial *p, size_t begin, text_bytes *out) {
    static const char broken[] = "\xEF\xBF\xBD"; /* may become a whole character with the next tokens */
    size_t end = p->text.length;
    const char *data = p->text.data;
    while (end && (is_blank(data[end - 1]) || (!front->bpe && text_ends_with(data, end, broken))))
        end -= is_blank(data[end - 1]) ? 1 : sizeof broken - 1;
    if (begin < end) text_append(out, data + begin, end - begin);
}

/* Numbers of text_bytes and of text_ids in a job. */
enum { TEXTS = 8, IDS = 12 };

static void memory_of(text_job *job, text_bytes *texts[TEXTS], text_ids *ids[IDS]) {
    text_bytes *const t[TEXTS] = { &job->source, &job->target,  &job->gap,      &job->context,
                                   &job->shown,  &job->written, &job->recalled, &job->partial.text };
    text_ids *const i[IDS] = { &job->source_ids,  &job->target_ids, &job->prompt,    &job->phrase_ids,
                               &job->draft_ids,   &job->answer_ids, &job->logprobs,  &job->begun_ids,
                               &job->resumed_ids, &job->edited_ids, &job->term_uses, &job->partial.ids };
    memcpy(texts, t, sizeof t), memcpy(ids, i, sizeof i);
}

void text_job_clear(text_job *job) {
    text_bytes *texts[TEXTS];
    text_ids *ids[IDS];
    memory_of(job, texts, ids);
    for (int i = 0; i < TEXTS; i++) text_clear(texts[i]);
    for (int i = 0; i < IDS; i++) ids[i]->length = 0;
    text_guard_clear(job->guard); /* the next text may have no rules */
    text_repair_clear(job->repair);
    memset((char *)job + offsetof(text_job, retry), 0, sizeof *job - offsetof(text_job, retry));
}

void text_job_free(text_job *job) {
    text_bytes *texts[TEXTS];
    text_ids *ids[IDS];
    memory_of(job, texts, ids);
    text_bytes_free_all(texts, TEXTS);
    for (int i = 0; i < IDS; i++) text_ids_free(ids[i]);
    text_guard_free(job->guard);
    text_repair_free(job->repair);
    if (job->bound) text_ids_free(&job->bound->ids);
    free(job->bound);
}

/* ---- 2. Samples ---------------------------------------------------------------------------------------- */

/* Cut the next field off `rest`; return 0 if no TAB follows. */
static int next_field(moe_span *rest, moe_span *field) {
    const char *tab = memchr(rest->data, '\t', rest->length);
    if (!tab) return 0;
    *field = (moe_span){ rest->data, (size_t)(tab - rest->data) };
    *rest = (moe_span){ tab + 1, rest->length - field->length - 1 };
    return 1;
}

/* Fill the ids of a source, or of the whole prompt of a prompted model. */
static moe_status parse_source(const text_front *front, const text_options *options, moe_span source, text_pair *p,
                               moe_error *error) {
    const text_prompt_request asked = { .text = source, .source = p->source_tag, .target = p->tag };
    size_t left;
    if (!front->prompt || options->ids || options->pretokenized)
        return parse_text(front, options->ids, options->pretokenized, source, &p->source, error);
    return text_prompt_ids(front, options->prompt, &asked, SIZE_MAX, &p->source, &left, error);
}

static moe_status read_pair(const text_front *front, const text_options *options, moe_span rest, int targets_wanted,
                            text_pair *p, moe_error *error) {
    const text_front targets = text_front_of_targets(front);
    moe_span fields[3], *source = &fields[2];
    char code[32];
    moe_status status = MOE_OK;
    if (moe_model_kind(front->model) == MOE_MODEL_LANGUAGE) {
        p->has_target = 1;
        return parse_text(&targets, options->ids, options->pretokenized, rest, &p->target, error);
    }
    int n = 0;
    while (n < 3 && next_field(&rest, &fields[n])) n++;
    if (n == 2 && !targets_wanted) *source = rest, rest.length = 0;
    else if (n < 3)
        return text_fail(error, MOE_ERROR_ARGUMENT, "",
                         "expected source language, target language, source and target, separated by TABs");
    for (int side = 0; side < 2 && moe_model_language_count(front->model); side++) {
        snprintf(code, sizeof code, "%.*s", fields[side].length < 31 ? (int)fields[side].length : 31,
                 fields[side].data);
        status = text_language(front, code, side, side ? &p->tag : &p->source_tag, error);
        if (status == MOE_ERROR_ARGUMENT && !side) p->source_tag = -1;
        else if (status) return status;
    }
    status = parse_source(front, options, *source, p, error);
    p->has_target = targets_wanted || rest.length;
    if (!status && p->has_target)
        status = parse_text(&targets, options->ids, options->pretokenized, rest, &p->target, error);
    return status;
}

static moe_status add_pair(const text_front *front, const text_options *options, const text_line *line,
                           int targets_wanted, text_sample *sample, moe_error *error) {
    char why[128];
    moe_status status =
        text_reserve(&sample->pairs, &sample->capacity, sample->count + 1, sizeof *sample->pairs, error);
    if (status) return status;
    text_pair *p = &sample->pairs[sample->count];
    *p = (text_pair){ .line = line->number, .source_tag = -1, .tag = -1 };
    text_line_usable(line, why, sizeof why);
    if (*why) status = text_fail(error, MOE_ERROR_ARGUMENT, "", "%s", why);
    else status = read_pair(front, options, (moe_span){ line->data, line->length }, targets_wanted, p, error);
    if (status) {
        text_ids_free(&p->source);
        text_ids_free(&p->target);
        if (error) snprintf(error->where, sizeof error->where, "line %llu", (unsigned long long)line->number);
        return status;
    }
    sample->count++;
    return MOE_OK;
}

moe_status text_sample_read(const text_front *front, const text_options *options, const char *path, int targets_wanted,
                            text_sample *sample, moe_error *error) {
    const int language = moe_model_kind(front->model) == MOE_MODEL_LANGUAGE;
    text_reader reader;
    text_line line;
    text_read got = TEXT_READ_END;
    moe_status status = MOE_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return text_fail(error, MOE_ERROR_IO, "open", "cannot open %s: %s", path, strerror(errno));
    text_reader_init(&reader, fd, NULL, -1);
    while (!status && (got = text_reader_next(&reader, 1, &line)) == TEXT_READ_LINE)
        if (!language || text_trimmed(line.data, line.length, " \t").length)
            status = add_pair(front, options, &line, targets_wanted, sample, error);
    if (!status && got != TEXT_READ_END)
        status = text_fail(error, MOE_ERROR_IO, "read", "%s: %s", path, strerror(errno));
    if (!status && !sample->count)
        status = text_fail(error, MOE_ERROR_IO, "read", "%s contains no lines to measure with", path);
    text_reader_free(&reader);
    close(fd);
    return status;
}

void text_sample_free(text_sample *sample) {
    for (size_t i = 0; i < sample->count; i++) {
        text_ids_free(&sample->pairs[i].source);
        text_ids_free(&sample->pairs[i].target);
    }
    free(sample->pairs);
    *sample = (text_sample){ 0 };
}
