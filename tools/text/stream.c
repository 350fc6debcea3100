/* stream.c - see stream.h. */
#include "tools/text/stream.h"
#include "tools/text/sentences.h"
#include "tools/text/settings.h"
#include "tools/text/spans.h"
#include "tools/text/strategy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* PART: tokens per part of a sentence that is too long, about the length of training sentences. WINDOW: bytes that are
 * encoded to find the end of a part. */
enum { PART = 48, WINDOW = 2048 };

static size_t room_of(const text_stream *s) { return s->options.strategy->room(s->front, &s->options); }

/* Set *bytes to the offset of token `tokens` in data[length], or to `length` if the text has fewer tokens. */
static moe_status reach(const text_stream *s, const char *data, size_t length, size_t tokens, size_t *bytes,
                        moe_error *error) {
    text_offsets begins = { 0 };
    const moe_status status = text_encode_begins(s->front, data, length, &begins, error);
    *bytes = status || begins.length <= tokens ? length : begins.data[tokens];
    free(begins.data);
    return status;
}

/* Return 1 if lines are split by tokens, as for prompted models unless the user sets a number of characters. */
static int counts_tokens(const text_stream *s) { return s->split == TEXT_SPLIT && s->options.strategy->prompts; }

/* Return 1 if a text fits into one request. */
static int is_whole(text_stream *s, const char *data, size_t length) {
    const size_t room = room_of(s), most = room < TEXT_PROMPT_WHOLE ? room : TEXT_PROMPT_WHOLE;
    size_t bytes = length;
    if (length <= most) return 1;
    return length <= 64 * most && !reach(s, data, length, most, &bytes, &s->trouble) && bytes == length;
}

static int is_usable(const text_line *line) {
    char why[64];
    text_line_usable(line, why, sizeof why);
    return !*why;
}

static int is_long(text_stream *s, const text_line *line) {
    if (counts_tokens(s)) return is_usable(line) && !is_whole(s, line->data, line->length);
    return s->split && line->length > s->split && is_usable(line) &&
           text_utf8_count(line->data, line->length) > s->split;
}

/* Return the length of a text's first cell, or of the separators before that cell; `length` if nothing is protected. */
static size_t cell(const text_stream *s, const char *data, size_t length, int *separates) {
    const struct text_rules *rules = s->options.rules;
    *separates = 0;
    return rules ? text_cell(data, length, text_rules_spans(rules), separates) : length;
}

/* Return 1 if a text is translated cell by cell, or, if it is long, sentence by sentence. */
static int is_cut(text_stream *s, const text_line *line) {
    int separates;
    if (line->kept) return 0;
    if (is_long(s, line)) return 1;
    return s->split && cell(s, line->data, line->length, &separates) < line->length && is_usable(line);
}

/* Return 1 if a text is cut into the pieces of its ICU messages. */
static int is_framed(const text_stream *s, const text_line *line) {
    int open;
    return s->split && !line->kept && text_keeps_spans(&s->options) &&
           text_has_message(line->data, line->length, &open) && is_usable(line) &&
           text_message_is(line->data, line->length);
}

/* Return 1 if a sentence exceeds the model's limit. */
static int is_too_long(text_stream *s, const char *data, size_t length) {
    const size_t room = room_of(s);
    size_t bytes = length;
    if (!text_cuts(s->front) || s->options.truncate || room < 8 || length < room) return 0;
    if (length > 64 * room) return 1;
    return !reach(s, data, length, room, &bytes, &s->trouble) && bytes < length;
}

/* Return the length of the next part of a sentence that is too long. */
static size_t next_clause(text_stream *s, text_cursor *c, const char *data, size_t length) {
    const size_t room = room_of(s), tokens = room < PART ? room : PART;
    const size_t window = text_utf8_cut(data, length, WINDOW);
    size_t bytes = window;
    if (reach(s, data, window, tokens, &bytes, &s->trouble)) return length;
    return text_clause(data, length, bytes, s->options.rules != NULL, &c->verbatim);
}

/* Find the end of the current sentence and decide whether it is translated in parts. */
static void begin_sentence(text_stream *s, text_cursor *c, const text_line *line) {
    c->sentence = c->sentences ? text_sentence(line->data, c->cell) : c->cell;
    while (c->sentences && c->sentence < c->cell && counts_tokens(s)) { /* add sentences that fit into one request */
        const size_t next = c->sentence + text_sentence(line->data + c->sentence, c->cell - c->sentence);
        if (!is_whole(s, line->data, next)) break;
        c->sentence = next;
    }
    c->divided = c->sentences && is_too_long(s, line->data, c->sentence);
    c->reported = 0;
}

/* Take the next piece of a text with messages. Return 1 for syntax, which is copied, 0 for text to translate. */
static int next_frame(text_cursor *c, text_line *line, int *more) {
    size_t bytes;
    if (text_message_next(&c->message, line->data, line->length, &bytes) == TEXT_MESSAGE_TEXT) {
        c->piece = bytes;
        return 0;
    }
    line->length = bytes;
    c->rest.data += bytes;
    c->rest.length -= bytes;
    *more = c->rest.length > 0;
    return c->verbatim = 1;
}

/* Collect the earlier lines that are shown with a line. */
static void look_back(text_stream *s, const text_line *line) {
    const size_t lines = s->options.prompt && s->options.strategy->prompts ? s->options.prompt->context : 0;
    text_clear(&s->context);
    if (!lines || !text_trimmed(line->data, line->length, " \t\r\n").length) return;
    s->before(s, line, lines, &s->context);
    if (s->context.failed) text_out_of_memory(&s->trouble);
}

int text_stream_recalls(text_stream *s, moe_span text, int exactly) {
    text_clear(&s->recalled);
    s->match = (text_match){ .kind = TEXT_MATCH_NONE };
    if (!s->recall || s->trouble.code) return 0;
    s->recall(s, text, &s->match, &s->recalled, &s->trouble);
    return s->match.kind >= (exactly ? TEXT_MATCH_EXACT : TEXT_MATCH_ADAPTED);
}

/* Get the next text or part. *more is 1 if other parts follow after the white space *gap. */
static int next_part(text_stream *s, int wait, text_line *line, int *more, moe_span *gap) {
    const int turn = s->turn(s, wait);
    if (turn != MOE_PULL_REQUEST) return turn;
    text_cursor *c = s->at;
    *more = 0;
    c->verbatim = c->divided = 0;
    *gap = (moe_span){ "", 0 };
    if (!c->rest.length) {
        s->next(s, line);
        look_back(s, line);
        c->framed = is_framed(s, line);
        if (line->recalled) c->framed = 0;
        if (line->recalled || (!c->framed && !is_cut(s, line))) return MOE_PULL_REQUEST;
        if (!line->kept && text_stream_recalls(s, (moe_span){ line->data, line->length }, 0)) {
            c->framed = 0, line->recalled = 1;
            return MOE_PULL_REQUEST;
        }
        c->rest = *line;
        c->message = (text_message){ 0 };
        c->piece = c->framed ? 0 : line->length;
        c->cell = c->sentence = 0;
    }
    *line = c->rest;
    if (!c->piece && next_frame(c, line, more)) return MOE_PULL_REQUEST;
    if (!c->cell) {
        int open;
        c->cell = line->length = cell(s, line->data, c->piece, &c->verbatim);
        if (c->verbatim) c->sentence = c->cell;
        c->sentences = is_long(s, line) && !(s->options.rules && text_has_message(line->data, line->length, &open));
    }
    if (!c->sentence) begin_sentence(s, c, line);
    else if (!c->verbatim) c->divided = 1;
    line->length = c->divided ? next_clause(s, c, line->data, c->sentence) : c->sentence;
    c->sentence -= line->length;
    c->cell -= line->length;
    c->piece -= line->length;
    c->rest.data += line->length;
    c->rest.length -= line->length;
    *more = c->rest.length > 0;
    const size_t whole = line->length;
    if (*more || c->verbatim) line->length = text_before_blanks(line->data, line->length);
    if (c->divided && *more && !c->verbatim) line->length = text_before_mark(line->data, line->length);
    *gap = (moe_span){ line->data + line->length, whole - line->length };
    return MOE_PULL_REQUEST;
}

/* If memory ran out, finish the job with MOE_ERROR_MEMORY and clear `trouble`. */
static void lose(text_stream *s, text_job *job) {
    if (s->trouble.code != MOE_ERROR_MEMORY) return;
    job->failed = 1;
    job->status = s->trouble.code;
    snprintf(job->note, sizeof job->note, "%s", s->trouble.message);
    s->trouble.code = MOE_OK;
    s->finish(s, job, NULL);
}

/* Fill the request of a job. Return 0 and leave the request unchanged if the job is lost or `trouble` is set. */
static int fill_request(text_stream *s, text_job *job, moe_request *request) {
    const moe_request before = *request;
    request->user = job;
    s->request(s, job, request);
    if (!s->trouble.code) text_job_request(s->front, job, request, &s->trouble);
    s->requested += !s->trouble.code;
    if (!s->trouble.code) return 1;
    *request = before;
    lose(s, job);
    return 0;
}

/* Find a part in the translation memory. Return 1 if the memory has its translation. */
static int recall_part(text_stream *s, const text_line *line, text_job *job) {
    const text_cursor *c = s->at;
    const moe_span text = { line->data, line->length };
    if (!line->recalled && (c->verbatim || c->divided || c->framed || line->kept || line->prompt)) return 0;
    if (!line->recalled) text_stream_recalls(s, text, 0);
    job->match = s->match;
    if (s->match.kind < TEXT_MATCH_ADAPTED) return 0;
    text_append(&job->recalled, s->recalled.data, s->recalled.length);
    text_append(&job->source, text.data, text.length);
    if (job->recalled.failed || job->source.failed) text_out_of_memory(&s->trouble);
    return job->verbatim = 1;
}

/* Fill a job from its part of the line. Return 0 if no request is needed or `trouble` is set. */
static int prepare_part(text_stream *s, const text_line *line, moe_span gap, text_job *job) {
    text_cursor *c = s->at;
    text_append(&job->gap, gap.data, gap.length);
    job->joined = c->framed && !c->piece;
    if (c->framed) job->message = text_message_of(&c->message);
    if (recall_part(s, line, job)) {
        /* nothing is left to translate */
    } else if (c->verbatim) {
        job->verbatim = 1;
        text_append(&job->source, line->data, line->length);
        if (!job->more) text_append(&job->source, gap.data, gap.length);
    } else {
        text_options options = s->options;
        if (line->prompt) options.strategy = &text_answered;
        if (text_job_prepare(s->front, &options, line, job, &s->trouble)) return 0;
    }
    job->divisible =
        s->split && text_cuts(s->front) && !s->options.ids && !s->options.pretokenized && !s->options.pairs;
    job->name_list = c->divided;
    text_append(&job->context, s->context.data, s->context.length);
    if (job->gap.failed || job->source.failed || job->context.failed) text_out_of_memory(&s->trouble);
    if (s->trouble.code) return 0;
    if (c->divided && !c->reported++ && !job->failed && !job->cut && !job->noted)
        text_job_note(job, &job->noted,
                      "a sentence exceeds the model's limit of %zu tokens and was translated in parts", room_of(s));
    return !job->failed && !job->verbatim && (!job->blank || s->blank_too);
}

void text_stream_join(const text_job *before, text_bytes *out) {
    static const char wide[] = "\xE3\x80\x82\xEF\xBC\x81\xEF\xBC\x9F\xEF\xBC\x8C\xE3\x80\x81\xEF\xBC\x9B";
    if (before->gap.length) {
        text_append(out, before->gap.data, before->gap.length);
        return;
    }
    if (before->joined) return;
    if (out->length && text_is_unspaced(out->data, out->length, text_utf8_cut(out->data, out->length, out->length - 1)))
        return;
    for (size_t i = 0; out->length >= 3 && i + 3 < sizeof wide; i += 3)
        if (memcmp(out->data + out->length - 3, wide + i, 3) == 0) return;
    text_append(out, " ", 1);
}

/* While other parts are in progress, a call skips at most this many parts that need no request, such as blank lines. */
enum { MOST_IDLE = 1000 };

static int stream_pull(void *user, int wait, moe_request *request) {
    text_stream *s = user;
    for (size_t idle = 0;; idle++) {
        int more;
        text_line line;
        moe_span gap;
        if (s->trouble.code) return MOE_PULL_CANCEL;
        if (s->retries) {
            text_job *job = s->retries;
            s->retries = job->retry;
            if (fill_request(s, job, request)) return MOE_PULL_REQUEST;
            continue;
        }
        if (!wait && idle == MOST_IDLE) return MOE_PULL_LATER;
        const int answer = s->ended ? MOE_PULL_END : next_part(s, wait, &line, &more, &gap);
        if (answer == MOE_PULL_END) s->ended = 1;
        if (answer == MOE_PULL_END && s->requested && !s->trouble.code) return MOE_PULL_LATER; /* jobs may be retried */
        if (answer != MOE_PULL_REQUEST) return s->trouble.code ? MOE_PULL_CANCEL : answer;
        text_job *job = s->add(s, &line, more);
        if (!job && s->trouble.code == MOE_ERROR_MEMORY) s->trouble.code = MOE_OK; /* `add` dropped the text */
        if (!job) continue;
        if (s->trouble.code || !prepare_part(s, &line, gap, job)) {
            if (s->trouble.code) lose(s, job);
            else s->finish(s, job, NULL);
            continue;
        }
        s->pieces += job->source_ids.length;
        for (size_t i = 0; i < job->source_ids.length; i++)
            s->unknown_pieces += (uint64_t)text_is_unknown(s->front, job->source_ids.data[i]);
        if (fill_request(s, job, request)) return MOE_PULL_REQUEST;
    }
}

void text_stream_partial(void *stream, void *job, const int32_t *ids, size_t n) {
    text_stream *s = stream;
    if (s->trouble.code) return;
    text_job_grow(s->front, job, ids, n);
    s->partial(s, job);
}

static void try_again(text_stream *s, text_job *job) {
    if (job->failed || job->verbatim || !job->source_ids.length) s->finish(s, job, NULL);
    else job->retry = s->retries, s->retries = job;
}

/* Replace a job by its halves. */
static void divide(text_stream *s, text_job *job) {
    text_job *second = s->insert(s, job, job->attempt.half);
    if (!second) text_out_of_memory(&s->trouble);
    else if (!text_job_divide(s->front, job, second, &s->trouble)) {
        try_again(s, second);
        try_again(s, job);
        return;
    }
    const moe_error trouble = s->trouble;
    if (second) lose(s, second);
    s->trouble = trouble;
    lose(s, job);
}

static void stream_done(void *user, const moe_result *given) {
    text_stream *s = user;
    text_job *job = given->user;
    moe_hypothesis ranked[MOE_MAX_BEAM];
    moe_result own = *given;
    const moe_result *result = &own;
    s->requested--;
    if (s->trouble.code) return;
    own.hypotheses = ranked;
    if (text_job_rank(s->front, job, given, ranked, &s->trouble) ||
        text_job_next(s->front, &s->doubts, job, result, &s->trouble)) {
        lose(s, job);
    } else if (job->attempt.step == TEXT_HALVE) {
        divide(s, job);
    } else if (job->attempt.step < TEXT_HALVE) {
        try_again(s, job);
    } else {
        if (result->status && text_job_keeps_source(job)) job->verbatim = 1;
        s->finish(s, job, job->verbatim ? NULL : result);
    }
}

void text_stream_free(text_stream *s) { text_suspicions_free(&s->doubts); }

moe_status text_stream_run(text_stream *s, moe_session *session, moe_error *error) {
    s->retries = NULL, s->requested = 0, s->ended = 0;
    s->options.strategy = text_strategy_of(s->front, &s->options);
    const moe_status status = moe_translate(session, stream_pull, stream_done, s, error);
    text_bytes_free(&s->context);
    text_bytes_free(&s->recalled);
    if (!s->trouble.code) return status;
    if (error) *error = s->trouble;
    return s->trouble.code;
}
