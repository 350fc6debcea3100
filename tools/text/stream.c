/* stream.c - stream.h says what this is and has the contracts. */
#include "tools/text/stream.h"
#include "tools/text/protect.h"

#include <stdio.h>
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

/* The next text, or the next sentence of a long one; *more: others follow. */
static int next_part(text_stream *s, int wait, text_line *line, int *more) {
    *more = 0;
    if (!s->rest.length) {
        const int answer = s->next(s, wait, line);
        if (answer == MOE_PULL_REQUEST && s->seen) s->seen(s, line);
        if (answer != MOE_PULL_REQUEST || !is_cut(s, line)) return answer;
        s->rest = *line;
    }
    *line = s->rest;
    if (!s->cell) {
        s->cell = line->length = s->options.rules ? cell(line->data, line->length) : line->length;
        s->sentences = is_long(s, line);
    }
    line->length = s->sentences ? text_sentence(line->data, s->cell) : s->cell;
    s->cell -= line->length;
    s->rest.data += line->length;
    s->rest.length -= line->length;
    *more = s->rest.length > 0;
    return MOE_PULL_REQUEST;
}

static int ask(text_stream *s, text_job *job, moe_request *request) {
    s->asked++;
    request->user = job;
    s->ask(s, job, request);
    if (s->options.rules) text_guard_ask(job->guard, request);
    return s->trouble.code ? MOE_PULL_CANCEL : MOE_PULL_REQUEST;
}

static int stream_pull(void *user, int wait, moe_request *request) {
    text_stream *s = user;
    for (;;) {
        int more;
        text_line line;
        if (s->trouble.code) return MOE_PULL_CANCEL;
        if (s->again) {
            text_job *job = s->again;
            s->again = job->again;
            return ask(s, job, request);
        }
        const int answer = s->ended ? MOE_PULL_END : next_part(s, wait, &line, &more);
        if (answer == MOE_PULL_END) s->ended = 1;
        if (answer == MOE_PULL_END && s->asked && !s->trouble.code) return MOE_PULL_LATER; /* one may come again */
        if (answer != MOE_PULL_REQUEST || s->trouble.code) return s->trouble.code ? MOE_PULL_CANCEL : answer;
        text_job *job = s->add(s, &line, more);
        if (!job) {
            s->trouble = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
            return MOE_PULL_CANCEL;
        }
        if (text_job_prepare(s->front, &s->options, &line, job, &s->trouble)) return MOE_PULL_CANCEL;
        if (job->failed || (job->blank && !s->blank_too)) {
            s->finish(s, job, NULL);
            continue;
        }
        s->pieces += job->source_ids.length;
        for (size_t i = 0; i < job->source_ids.length; i++)
            s->unknown_pieces += (uint64_t)text_is_unknown(s->front, job->source_ids.data[i]);
        return ask(s, job, request);
    }
}

static void stream_done(void *user, const moe_result *result) {
    text_stream *s = user;
    text_job *job = result->user;
    int again = 0;
    s->asked--;
    if (s->trouble.code) return;
    if (!result->status && result->n_hypotheses &&
        text_job_again(s->front, &s->options, job, &result->hypotheses[0], &again, &s->trouble))
        return;
    if (again) {
        job->again = s->again, s->again = job;
        return;
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
    s->cell = 0;
    s->again = NULL, s->asked = 0, s->ended = 0;
    const moe_status status = moe_translate(session, stream_pull, stream_done, s, error);
    if (!s->trouble.code) return status;
    if (error) *error = s->trouble;
    return s->trouble.code;
}
