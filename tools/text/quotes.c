/* quotes.c - see quotes.h. */
#include "tools/text/quotes.h"
#include "tools/text/sentences.h"

#include <float.h>
#include <string.h>

/* ---- 1. Quotation marks -------------------------------------------------------------------------------- */

enum { QUOTES = 16 }; /* maximum number of marks in a text that is repaired */

#define NOWHERE SIZE_MAX

typedef struct quote {
    size_t at, end;
    int opens; /* 1 for a mark that opens a quotation, 0 for one that closes it */
} quote;

/* The quotation marks of the text data[begin, end), which excludes list markers and outer white space. */
typedef struct quotes {
    const char *data;
    size_t begin, end, count;
    quote all[QUOTES + 1];
} quotes;

size_t text_quote(const char *data, size_t length) {
    if (length && (unsigned char)*data < 0x80) return *data == '"';
    return text_prefix("\" \xC2\xAB \xC2\xBB \xE2\x80\x9C \xE2\x80\x9D \xE2\x80\x9E \xE2\x80\x9F "
                       "\xE3\x80\x8C \xE3\x80\x8D \xE3\x80\x8E \xE3\x80\x8F",
                       data, length);
}

/* Return 1 if the mark at [at, end) opens a quotation; `turn` is 1 if an opening mark is expected. */
static int opens(moe_span s, size_t at, size_t end, int turn) {
    static const char before[] = " \t([{", after[] = " \t)]},.;:!?";
    if (text_prefix("\xC2\xA0 \xE2\x80\xAF", s.data + end, s.length - end)) return 1; /* inside French quotations */
    if (text_ends_with(s.data, at, "\xC2\xA0") || text_ends_with(s.data, at, "\xE2\x80\xAF")) return 0;
    const int outside = !at || strchr(before, s.data[at - 1]), ends = end == s.length || strchr(after, s.data[end]);
    if (outside != ends) return outside;
    return outside ? turn : text_prefix("\xE2\x80\x9C \xE3\x80\x8C \xE3\x80\x8E", s.data + at, end - at) > 0;
}

static quotes quotes_of(moe_span s) {
    size_t after, turn = 1;
    quotes q = { .data = s.data, .begin = text_frame(s.data, s.length, &after) };
    q.end = s.length - after;
    for (size_t at = q.begin, bytes; at < q.end && q.count <= QUOTES; at += bytes) {
        if (!(bytes = text_quote(s.data + at, q.end - at))) bytes = 1;
        else {
            q.all[q.count] = (quote){ at, at + bytes, opens(s, at, at + bytes, (int)turn) };
            turn = !q.all[q.count++].opens;
        }
    }
    return q;
}

static double place(const quotes *q, size_t i) {
    return (double)(q->all[i].at - q->begin) / (double)(q->end - q->begin);
}

/* Return which mark of `more` has no partner in `fewer`, which has one mark less; `more->count` if none fits. */
static size_t lone_mark(const quotes *more, const quotes *fewer) {
    size_t lone = more->count;
    double least = DBL_MAX;
    for (size_t skipped = 0; skipped < more->count; skipped++) {
        double distance = 0;
        size_t i = 0;
        for (; i < fewer->count && fewer->all[i].opens == more->all[i + (i >= skipped)].opens; i++) {
            const double d = place(fewer, i) - place(more, i + (i >= skipped));
            distance += d * d;
        }
        if (i == fewer->count && distance < least) lone = skipped, least = distance;
    }
    return lone;
}

/* ---- 2. Places ----------------------------------------------------------------------------------------- */

/* Return the kind of punctuation at the beginning of a text, and its length; -1 for other characters. */
static int sign(const char *data, size_t length, size_t *bytes) {
    static const char *const signs[] = { ". \xE3\x80\x82", ", \xEF\xBC\x8C \xE3\x80\x81",
                                         ": \xEF\xBC\x9A", "; \xEF\xBC\x9B",
                                         "! \xEF\xBC\x81", "? \xEF\xBC\x9F" };
    for (int i = 0; i < (int)(sizeof signs / sizeof *signs); i++)
        if ((*bytes = text_prefix(signs[i], data, length))) return i;
    return -1;
}

/* Return the kind of the punctuation that ends at data[at], not looking before `begin`, and its length. */
static int sign_before(const char *data, size_t begin, size_t at, size_t *bytes) {
    size_t length;
    for (*bytes = 1; *bytes <= 3 && begin + *bytes <= at; (*bytes)++) {
        const int kind = sign(data + at - *bytes, *bytes, &length);
        if (kind >= 0 && length == *bytes) return kind;
    }
    return -1;
}

/* Find the next punctuation of a kind in data[*at, end) that ends a word or clause. */
static int next_sign(const char *data, size_t *at, size_t end, int kind, size_t *bytes) {
    for (; *at < end; (*at)++) {
        if (sign(data + *at, end - *at, bytes) != kind) continue;
        const size_t next = *at + *bytes;
        if (*bytes > 1 || next == end || data[next] == ' ' || text_quote(data + next, end - next)) return 1;
    }
    return 0;
}

static size_t count_signs(const char *data, size_t at, size_t end, int kind) {
    size_t n = 0, bytes;
    for (; next_sign(data, &at, end, kind, &bytes); at += bytes) n++;
    return n;
}

/* Return where the target lacks mark `k` of its source, or NOWHERE. */
static size_t place_of(const quotes *from, size_t k, const quotes *to) {
    const quote *mark = &from->all[k];
    const size_t begin = k && k <= to->count ? to->all[k - 1].end : to->begin,
                 end = k < to->count ? to->all[k].at : to->end;
    const size_t before = k ? from->all[k - 1].end : from->begin,
                 behind = k + 1 < from->count ? from->all[k + 1].at : from->end;
    size_t bytes = 0, at = mark->at;
    if (mark->opens && mark->at == from->begin) return to->begin;
    while (mark->opens && at > before && from->data[at - 1] == ' ') at--;
    int kind = sign_before(from->data, before, at, &bytes);
    const int outside = !mark->opens && kind < 0; /* the sign follows a closing mark */
    if (outside) kind = sign(from->data + mark->end, behind - mark->end, &bytes);
    const size_t rest = mark->end + (outside && kind >= 0 ? bytes : 0);
    if (!mark->opens && rest == from->end) {
        if (outside && kind >= 0 && sign_before(to->data, begin, end, &bytes) == kind) return end - bytes;
        return end;
    }
    if (kind < 0) return NOWHERE;
    const size_t n = count_signs(to->data, begin, end, kind);
    const size_t m =
        mark->opens ? count_signs(from->data, before, at, kind) : count_signs(from->data, rest, behind, kind) + 1;
    if (m > n) return NOWHERE;
    size_t turn = mark->opens ? m : n + 1 - m;
    for (at = begin; next_sign(to->data, &at, end, kind, &bytes) && --turn;) at += bytes;
    if (outside) return at;
    for (at += bytes; mark->opens && at < end && to->data[at] == ' ';) at++;
    return at;
}

/* ---- 3. Repairs ---------------------------------------------------------------------------------------- */

/* Return the mark that completes a pair with mark i of a text, or '"'. */
static const char *partner(const quotes *q, size_t i) {
    static const char *const pairs[][2] = { { "\xE2\x80\x9E", "\xE2\x80\x9C" }, { "\xE2\x80\x9C", "\xE2\x80\x9D" },
                                            { "\xC2\xAB", "\xC2\xBB" },         { "\xC2\xBB", "\xC2\xAB" },
                                            { "\xE3\x80\x8C", "\xE3\x80\x8D" }, { "\xE3\x80\x8E", "\xE3\x80\x8F" } };
    if (i < q->count)
        for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++)
            if (text_begins_with(q->data + q->all[i].at, q->end - q->all[i].at, pairs[p][!q->all[i].opens]))
                return pairs[p][q->all[i].opens];
    return "\"";
}

/* Return 1 for a " that follows a digit. */
static int is_inch(const quote *mark, const char *data) {
    return mark->at && data[mark->at] == '"' && data[mark->at - 1] >= '0' && data[mark->at - 1] <= '9';
}

static void insert(text_bytes *out, size_t at, const char *mark) {
    const size_t length = strlen(mark);
    if (!text_room(out, length)) return;
    memmove(out->data + at + length, out->data + at, out->length - at);
    memcpy(out->data + at, mark, length);
    out->length += length;
    out->data[out->length] = '\0';
}

static void erase(text_bytes *out, size_t at, size_t end) {
    memmove(out->data + at, out->data + end, out->length - end);
    out->length -= end - at;
    out->data[out->length] = '\0';
}

/* Remove the mark at out[at, end), and the space before it if it is between spaces. */
static void take_out(text_bytes *out, size_t begin, size_t at, size_t end) {
    if (at > begin && out->data[at - 1] == ' ' && (end == out->length || out->data[end] == ' ')) at--;
    erase(out, at, end);
}

/* Return the number of the kind of mark i, which both marks of a pair share. */
static size_t kind_of(const quotes *q, size_t i) {
    static const char *const kinds[] = { "\"", "\xC2\xAB \xC2\xBB", "\xE3\x80\x8C \xE3\x80\x8D",
                                         "\xE3\x80\x8E \xE3\x80\x8F" };
    size_t kind = 0;
    const quote *mark = &q->all[i];
    while (kind < sizeof kinds / sizeof *kinds && !text_prefix(kinds[kind], q->data + mark->at, mark->end - mark->at))
        kind++;
    return kind;
}

/* Return 1 if marks 2i and 2i + 1 begin and end a quotation. */
static int is_pair(const quotes *q, size_t i) { return q->all[2 * i].opens && !q->all[2 * i + 1].opens; }

/* Let quotations end with the kind of mark they begin with, if those of the source do. */
static void match_marks(const quotes *from, quotes *to, size_t begin, text_bytes *out) {
    for (size_t i = 0; i < from->count / 2; i++)
        if (!is_pair(from, i) || !is_pair(to, i) || kind_of(from, 2 * i) != kind_of(from, 2 * i + 1)) return;
    for (size_t i = to->count / 2; i-- > 0;) { /* from the end, so that offsets stay valid */
        const quote *last = &to->all[2 * i + 1];
        if (kind_of(to, 2 * i) == kind_of(to, 2 * i + 1)) continue;
        insert(out, begin + last->end, partner(to, 2 * i));
        erase(out, begin + last->at, begin + last->end);
        to->data = out->data + begin;
    }
}

void text_repair_quotes(moe_span source, size_t begin, text_bytes *out) {
    if (out->failed || out->length == begin) return;
    const quotes from = quotes_of(source);
    quotes to = quotes_of((moe_span){ out->data + begin, out->length - begin });
    const size_t n = from.count, m = to.count;
    if (n > QUOTES || m > QUOTES || to.begin == to.end) return;
    if (n == 2 && !m && from.all[0].at == from.begin && place_of(&from, 1, &to) == to.end) {
        insert(out, begin + place_of(&from, 1, &to), "\"");
        insert(out, begin + to.begin, "\"");
    } else if (n == m + 1) {
        const size_t k = lone_mark(&from, &to);
        const size_t at = k < n ? place_of(&from, k, &to) : NOWHERE;
        if (at != NOWHERE) insert(out, begin + at, partner(&to, from.all[k].opens ? k : k - 1));
    } else if (m == n + 1) {
        const size_t k = lone_mark(&to, &from);
        if (k < m && !is_inch(&to.all[k], to.data)) take_out(out, begin, begin + to.all[k].at, begin + to.all[k].end);
    } else if (n == m && n % 2 == 0) {
        match_marks(&from, &to, begin, out);
    }
}
