/* cues.c - see cues.h. */
#include "tools/programs/cues.h"
#include "tools/text/live.h"
#include "tools/text/text.h"

#include <string.h>

enum { APART = 3 }; /* maximum seconds between cues of a sentence */

/* ---- Lines ---- */

/* Parse a time such as 01:02:03,450 or 02:03.450. Return its length, or 0. */
static size_t clock_of(const char *at, size_t length, double *seconds) {
    double part = 0, scale = 0;
    size_t i = 0, colons = 0;
    for (*seconds = 0; i < length; i++) {
        if (at[i] >= '0' && at[i] <= '9') {
            part = scale > 0 ? part + (at[i] - '0') * scale : 10 * part + (at[i] - '0');
            if (scale > 0) scale /= 10;
        } else if (at[i] == ':' && scale <= 0) *seconds = 60 * (*seconds + part), part = 0, colons++;
        else if ((at[i] == ',' || at[i] == '.') && scale <= 0) scale = 0.1;
        else break;
    }
    *seconds += part;
    return colons && colons < 3 && scale > 0 ? i : 0;
}

static int is_timing(const char *line, size_t length, double *begin, double *end) {
    const size_t n = clock_of(line, length, begin);
    size_t at = n;
    while (at < length && line[at] == ' ') at++;
    if (!n || length - at < 4 || memcmp(line + at, "-->", 3) != 0) return 0;
    for (at += 3; at < length && line[at] == ' ';) at++;
    return clock_of(line + at, length - at, end) > 0;
}

static int is_number(const char *line, size_t length) {
    size_t n = 0;
    while (n < length && line[n] >= '0' && line[n] <= '9') n++;
    return n && n == length;
}

static void hold(text_bytes *out, const char *line, size_t length) {
    text_append(out, line, length);
    text_append(out, "\n", 1);
}

/* Return 1 if the lines of a cue are translated one by one: they have markup, or begin with a speaker's dash. */
static int has_form(const text_bytes *text) {
    for (size_t i = 0; i < text->length; i++) {
        const int begins = !i || text->data[i - 1] == '\n';
        if (text->data[i] == '<' || text->data[i] == '{') return 1;
        if (begins && (text->data[i] == '-' || text_begins_with(text->data + i, text->length - i, "\xE2\x80\x93")))
            return 1;
    }
    return 0;
}

/* ---- Cues ---- */

/* Return 1 if the cues so far are complete. */
static int is_complete(const cue_stream *s) {
    const cue *last = &s->cues[s->n - 1];
    return s->n == MOST_CUES || !last->text.length || has_form(&last->text) ||
           text_live_ended(last->text.data, last->text.length);
}

/* Translate the cues so far; a cue with a form only by itself. */
static cue_step translate_cues(cue_stream *s) {
    s->now = s->n > 1 && has_form(&s->cues[s->n - 1].text) ? s->n - 1 : s->n;
    text_clear(&s->source);
    for (size_t i = 0; i < s->now; i++) {
        if (i) text_append(&s->source, " ", 1);
        text_append(&s->source, s->cues[i].text.data ? s->cues[i].text.data : "", s->cues[i].text.length);
    }
    const int lines = has_form(&s->source);
    for (size_t i = 0; i < s->source.length && !lines; i++)
        if (s->source.data[i] == '\n') s->source.data[i] = ' ';
    return CUE_TRANSLATE;
}

static cue_step begin_cue(cue_stream *s, const char *line, size_t length, double begin, double end) {
    cue *c = &s->cues[s->n++];
    text_clear(&c->head), text_clear(&c->text);
    text_append(&c->head, s->held.length ? s->held.data : "", s->held.length);
    hold(&c->head, line, length);
    text_clear(&s->held);
    c->begin = begin, c->end = end;
    s->inside = 1;
    return CUE_TAKEN;
}

static cue_step add_line(cue *c, const char *line, size_t length) {
    if (c->text.length) text_append(&c->text, "\n", 1);
    text_append(&c->text, line, length);
    return CUE_TAKEN;
}

cue_step cues_take(cue_stream *s, const char *line, size_t length) {
    double begin, end;
    const int times = line && is_timing(line, length, &begin, &end);
    if (s->on < 0) return CUE_OTHER;
    if (!s->on && line && (times || text_begins_with(line, length, "WEBVTT"))) s->on = 1;
    if (!s->on && line && (!length || is_number(line, length)) && s->held.length < 4096)
        return hold(&s->held, line, length), CUE_TAKEN;
    if (!s->on) return s->on = -1, CUE_OTHER;
    if (s->inside && line && length && !times) return add_line(&s->cues[s->n - 1], line, length);
    s->ended |= s->inside && line && !length; /* cues_write writes this blank line */
    s->cut |= s->inside && !line;
    s->inside = 0;
    if (s->n && (!line || is_complete(s))) return translate_cues(s);
    if (s->ended) return s->ended = 0, CUE_TAKEN;
    if (times) {
        const int joins = !s->n || (begin - s->cues[s->n - 1].end < (double)APART && begin >= s->cues[s->n - 1].begin);
        return joins ? begin_cue(s, line, length, begin, end) : translate_cues(s);
    }
    if (s->n && length && !is_number(line, length)) return translate_cues(s); /* a note follows */
    if (line) hold(&s->held, line, length);
    return !line || (!length && !s->n) ? CUE_COPY : CUE_TAKEN;
}

/* Return the end of the words after `from` that are nearest to the byte `wanted`; at least one word unless none is
 * left; `later` words remain if there are enough. */
static size_t share_of(const char *text, size_t length, size_t from, size_t wanted, size_t later) {
    size_t left = text_live_words(text + from, length - from), at = from;
    while (left > later || at == from) {
        const size_t next = text_live_word(text, length, at);
        if (next == at || (at > from && next > wanted && next - wanted > (wanted > at ? wanted - at : 0))) break;
        at = next, left -= left > 0;
    }
    return at;
}

/* Append words, in the cue's number of lines. */
static void put_lines(const cue *c, const char *words, size_t length, text_bytes *out) {
    size_t lines = 1, at = 0;
    for (size_t i = 0; i < c->text.length; i++) lines += c->text.data[i] == '\n';
    for (size_t i = 0; i < lines && at < length; i++) {
        const size_t end =
            i + 1 == lines ? length : share_of(words, length, at, (i + 1) * length / lines, lines - i - 1);
        const moe_span line = text_trimmed(words + at, end - at, " ");
        hold(out, line.data, line.length);
        at = end;
    }
}

void cues_write(cue_stream *s, const char *translation, size_t length, text_bytes *out) {
    size_t total = 0, sum = 0, at = 0;
    for (size_t i = 0; i < s->now; i++) total += s->cues[i].text.length;
    for (size_t i = 0; i < s->now; i++) {
        const cue *c = &s->cues[i];
        sum += c->text.length;
        const size_t end = i + 1 == s->now
                               ? length
                               : share_of(translation, length, at, total ? sum * length / total : 0, s->now - i - 1);
        text_append(out, c->head.data, c->head.length);
        if (has_form(&c->text)) hold(out, translation, length);
        else put_lines(c, translation + at, end - at, out);
        if (!s->cut || i + 1 < s->n) text_append(out, "\n", 1);
        at = end;
    }
    const cue last = s->cues[0];
    if (s->now < s->n) s->cues[0] = s->cues[s->now], s->cues[s->now] = last;
    s->n -= s->now;
}

void cues_free(cue_stream *s) {
    for (size_t i = 0; i < MOST_CUES; i++) text_bytes_free(&s->cues[i].head), text_bytes_free(&s->cues[i].text);
    text_bytes_free(&s->held), text_bytes_free(&s->source);
}
