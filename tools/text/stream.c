/* stream.c - stream.h says what this is and has the contracts. */
#include "tools/text/stream.h"
#include "tools/text/lost.h"
#include "tools/text/protect.h"
#include "tools/text/sentences.h"
#include "tools/text/spans.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int is_long(const text_stream *s, const text_line *line) {
    char why[64];
    if (!s->split || line->length <= s->split) return 0;
    text_line_usable(line, why, sizeof why);
    return !*why && text_utf8_count(line->data, line->length) > s->split;
}

/* The bytes up to the next TAB between two words, it and the white space around it included. */
static size_t cell(const char *data, size_t length) {
    size_t at = 0, begin = 0;
    while (begin < length && (data[begin] == ' ' || data[begin] == '\t')) begin++;
    const char *tab = memchr(data + begin, '\t', length - begin);
    if (!tab) return length;
    for (at = (size_t)(tab - data); at < length && (data[at] == ' ' || data[at] == '\t'); at++) {}
    return at;
}

/* Whether a text goes in parts: the cells between TABs, where they are kept, and the sentences of what is long. */
static int is_cut(const text_stream *s, const text_line *line) {
    char why[64];
    if (is_long(s, line)) return 1;
    if (!s->split || !s->options.rules || cell(line->data, line->length) == line->length) return 0;
    text_line_usable(line, why, sizeof why);
    return !*why;
}

/* Tokens of a part of a sentence that the model cannot read at once: as many as it has learned to read. Bytes of it
 * that are cut into tokens to find where they end. */
enum { PART = 48, WINDOW = 2048 };

/* Where the tokens of data[length] reach `tokens`; `length` if there are no more. */
static moe_status reach(const text_stream *s, const char *data, size_t length, size_t tokens, size_t *bytes,
                        moe_error *error) {
    uint32_t *begins = NULL;
    size_t capacity = 0, count = 0;
    char why[128];
    const int failed =
        spm_encode_begins(s->front->tokeniser, data, length, &begins, &capacity, &count, why, sizeof why);
    *bytes = failed || count <= tokens ? length : begins[tokens];
    free(begins);
    if (!failed) return MOE_OK;
    *error = (moe_error){ .code = MOE_ERROR_MEMORY };
    snprintf(error->message, sizeof error->message, "%s", why);
    return error->code;
}

/* Whether a sentence is more than the model reads at once. */
static int is_too_long(text_stream *s, const char *data, size_t length) {
    const size_t most = s->options.max_source, room = most > s->front->source_extra ? most - s->front->source_extra : 0;
    size_t bytes = length;
    if (!s->front->tokeniser || s->options.truncate || room < 8 || length < room) return 0;
    if (length > 64 * room) return 1;
    return !reach(s, data, length, room, &bytes, &s->trouble) && bytes < length;
}

/* The bytes of the next part of a sentence that is too long. */
static size_t next_clause(text_stream *s, const char *data, size_t length) {
    const size_t room = s->options.max_source - s->front->source_extra, tokens = room < PART ? room : PART;
    const size_t window = text_utf8_cut(data, length, WINDOW);
    size_t bytes = window;
    if (reach(s, data, window, tokens, &bytes, &s->trouble)) return length;
    return text_clause(data, length, bytes, s->options.rules != NULL, &s->verbatim);
}

/* The sentence at hand, and whether it is cut. */
static void begin_sentence(text_stream *s, const text_line *line) {
    s->sentence = s->sentences ? text_sentence(line->data, s->cell) : s->cell;
    s->divided = s->sentences && is_too_long(s, line->data, s->sentence);
    s->told = 0;
}

/* The next text, or the next part of one; *more: others follow behind *gap, white space that is no part of any. */
static int next_part(text_stream *s, int wait, text_line *line, int *more, moe_span *gap) {
    *more = 0;
    s->verbatim = s->divided = 0;
    *gap = (moe_span){ "", 0 };
    if (!s->rest.length) {
        const int answer = s->next(s, wait, line);
        if (answer == MOE_PULL_REQUEST && s->seen) s->seen(s, line);
        if (answer != MOE_PULL_REQUEST || !is_cut(s, line)) return answer;
        s->rest = *line;
        s->cell = s->sentence = 0;
    }
    *line = s->rest;
    if (!s->cell) {
        s->cell = line->length = s->options.rules ? cell(line->data, line->length) : line->length;
        int open;
        s->sentences = is_long(s, line) && !(s->options.rules && text_has_message(line->data, line->length, &open));
    }
    if (!s->sentence) begin_sentence(s, line);
    else s->divided = 1;
    line->length = s->divided ? next_clause(s, line->data, s->sentence) : s->sentence;
    s->sentence -= line->length;
    s->cell -= line->length;
    s->rest.data += line->length;
    s->rest.length -= line->length;
    *more = s->rest.length > 0;
    const size_t whole = line->length;
    if (*more || s->verbatim)
        while (line->length && strchr(" \t", line->data[line->length - 1])) line->length--;
    if (s->divided && *more && !s->verbatim) line->length = text_before_mark(line->data, line->length);
    *gap = (moe_span){ line->data + line->length, whole - line->length };
    return MOE_PULL_REQUEST;
}

static int ask(text_stream *s, text_job *job, moe_request *request) {
    s->asked++;
    request->user = job;
    s->ask(s, job, request);
    if (s->options.rules) text_guard_ask(job->guard, request);
    return s->trouble.code ? MOE_PULL_CANCEL : MOE_PULL_REQUEST;
}

/* What is said of a sentence that is cut, once. */
static void tell_divided(text_stream *s, text_job *job) {
    if (s->told++ || job->failed || job->cut || job->divided) return;
    job->divided = 1;
    snprintf(job->note, sizeof job->note,
             "a sentence is longer than the %zu tokens that the model reads at once: translated in parts",
             s->options.max_source - s->front->source_extra);
}

/* Fill a job from its part of the line. 0: there is nothing to ask for, or trouble. */
static int prepare_part(text_stream *s, const text_line *line, moe_span gap, text_job *job) {
    text_append(&job->gap, gap.data, gap.length);
    if (s->verbatim) {
        job->line = line->number;
        job->verbatim = 1;
        text_append(&job->source, line->data, line->length);
        if (!job->more) text_append(&job->source, gap.data, gap.length);
    } else if (text_job_prepare(s->front, &s->options, line, job, &s->trouble)) {
        return 0;
    }
    job->rules = s->options.rules, job->calm = s->options.calm;
    job->dividable =
        s->split && s->front->tokeniser && !s->options.ids && !s->options.pretokenized && !s->options.pairs;
    job->names = s->divided;
    if (job->gap.failed || job->source.failed)
        s->trouble = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
    if (s->trouble.code) return 0;
    if (s->divided) tell_divided(s, job);
    return !job->failed && !job->verbatim && (!job->blank || s->blank_too);
}

void text_stream_join(const text_job *before, text_bytes *out) {
    static const char wide[] = "\xE3\x80\x82\xEF\xBC\x81\xEF\xBC\x9F\xEF\xBC\x8C\xE3\x80\x81\xEF\xBC\x9B";
    if (before->gap.length) {
        text_append(out, before->gap.data, before->gap.length);
        return;
    }
    for (size_t i = 0; out->length >= 3 && i + 3 < sizeof wide; i += 3)
        if (memcmp(out->data + out->length - 3, wide + i, 3) == 0) return;
    text_append(out, " ", 1);
}

static int stream_pull(void *user, int wait, moe_request *request) {
    text_stream *s = user;
    for (;;) {
        int more;
        text_line line;
        moe_span gap;
        if (s->trouble.code) return MOE_PULL_CANCEL;
        if (s->again) {
            text_job *job = s->again;
            s->again = job->again;
            return ask(s, job, request);
        }
        const int answer = s->ended ? MOE_PULL_END : next_part(s, wait, &line, &more, &gap);
        if (answer == MOE_PULL_END) s->ended = 1;
        if (answer == MOE_PULL_END && s->asked && !s->trouble.code) return MOE_PULL_LATER; /* one may come again */
        if (answer != MOE_PULL_REQUEST || s->trouble.code) return s->trouble.code ? MOE_PULL_CANCEL : answer;
        text_job *job = s->add(s, &line, more);
        if (!job) {
            s->trouble = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
            return MOE_PULL_CANCEL;
        }
        if (!prepare_part(s, &line, gap, job)) {
            if (s->trouble.code) return MOE_PULL_CANCEL;
            s->finish(s, job, NULL);
            continue;
        }
        s->pieces += job->source_ids.length;
        for (size_t i = 0; i < job->source_ids.length; i++)
            s->unknown_pieces += (uint64_t)text_is_unknown(s->front, job->source_ids.data[i]);
        return ask(s, job, request);
    }
}

/* Whether a translation is not one of all of the source. */
static int is_lost(text_stream *s, const text_options *options, text_job *job, const moe_hypothesis *h) {
    if (!job->dividable || job->stays || job->cut) return 0;
    s->text.length = 0;
    if (text_job_write(s->front, options, job, h, &s->text, &s->trouble)) return 0;
    const moe_span source = { job->source.data, job->source.length }, target = { s->text.data, s->text.length };
    const text_names names = text_names_kept(source, target);
    if (names == TEXT_NAMES_MEMORY) s->trouble = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
    if (job->names && (names == TEXT_NAMES_LOST || names == TEXT_NAMES_COUNT)) job->names = 2; /* so are its halves */
    return !h->finished || names == TEXT_NAMES_COUNT || (job->names == 2 && names != TEXT_NAMES) ||
           text_loops(source, target);
}

static void try_again(text_stream *s, text_job *job) {
    if (job->failed || !job->source_ids.length) s->finish(s, job, NULL);
    else job->again = s->again, s->again = job;
}

/* The halves of a job are tried instead of it. 0: it is one word, which stays as it is, or there is trouble. */
static int divide(text_stream *s, const text_options *options, text_job *job) {
    const size_t at = text_half(job->source.data, job->source.length, options->rules != NULL);
    if (!at) return text_job_keep(job), 0;
    text_job *second = s->insert(s, job, at);
    if (!second) s->trouble = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
    if (!second || text_job_divide(s->front, options, job, second, at, &s->trouble)) return 0;
    try_again(s, second);
    try_again(s, job);
    return 1;
}

static void stream_done(void *user, const moe_result *result) {
    text_stream *s = user;
    text_job *job = result->user;
    text_options options = s->options; /* those of the text at hand, which may be another one */
    options.rules = job->rules, options.calm = job->calm;
    s->asked--;
    if (s->trouble.code) return;
    if (!result->status && result->n_hypotheses) {
        const moe_hypothesis *best = &result->hypotheses[0];
        int again = 0;
        if (text_job_again(s->front, &options, job, best, &again, &s->trouble)) return;
        if (again) try_again(s, job);
        if (again || (is_lost(s, &options, job, best) && divide(s, &options, job)) || s->trouble.code) return;
    }
    if (result->status) {
        job->failed = 1;
        job->status = result->status;
        snprintf(job->note, sizeof job->note, "%s", result->message);
    }
    s->finish(s, job, result);
}

moe_status text_stream_run(text_stream *s, moe_session *session, moe_error *error) {
    s->rest = (text_line){ 0 };
    s->cell = s->sentence = 0;
    s->again = NULL, s->asked = 0, s->ended = 0;
    const moe_status status = moe_translate(session, stream_pull, stream_done, s, error);
    text_bytes_free(&s->text);
    if (!s->trouble.code) return status;
    if (error) *error = s->trouble;
    return s->trouble.code;
}
