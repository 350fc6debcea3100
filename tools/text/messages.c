/* messages.c - see messages.h. */
#include "tools/text/messages.h"

#include <string.h>

enum { DEEPEST = 8 };

static int is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

text_message_text text_message_of(const text_message *m) {
    return m->depth && (m->plural & 1) ? TEXT_MESSAGE_PLURAL : TEXT_MESSAGE_PLAIN;
}

/* Count the words before a branch, except "offset:N". */
static size_t selectors(const char *s, size_t n) {
    static const char offset[] = "offset:";
    size_t words = 0, at = 0;
    while (at < n && is_space(s[at])) at++;
    if (n - at >= sizeof offset && memcmp(s + at, offset, sizeof offset - 1) == 0) {
        for (at += sizeof offset - 1; at < n && is_space(s[at]); at++) {}
        while (at < n && !is_space(s[at])) at++;
    }
    for (; at < n; at++) words += (size_t)(!is_space(s[at]) && (!at || is_space(s[at - 1])));
    return words;
}

/* Return the distance to the next branch or the end of the message; 0 if neither follows. */
static size_t next_branch(text_message *m, const char *s, size_t n) {
    size_t end = 0;
    while (end < n && s[end] != '{' && s[end] != '}') end++;
    if (end == n || selectors(s, end) != (size_t)(s[end] == '{')) return 0;
    if (s[end] == '}') {
        if (m->between < 2) return 0;
        m->depth--, m->plural >>= 1;
    }
    m->between = 0;
    return end + 1;
}

/* Return the length of the text at the beginning of s, or 0 if the text is malformed. */
static size_t text_end(const text_message *m, const char *s, size_t n) {
    size_t at = 0, bytes, inner = 0;
    int plural;
    for (; at < n; at += bytes) {
        bytes = 1;
        if (s[at] == '\'' && !inner) {
            if (!(bytes = text_message_quote(s + at, n - at, text_message_of(m)))) return 0;
        } else if (s[at] == '{') {
            if (!inner && text_message_begin(s + at, n - at, &plural)) break;
            inner++;
        } else if (s[at] == '}') {
            if (!inner) break;
            inner--;
        } else if (s[at] == '\n' && !inner) {
            break;
        }
    }
    if (inner || (m->depth ? at == n : at < n && s[at] == '}')) return 0;
    while (at && is_space(s[at - 1])) at--;
    return at;
}

text_message_kind text_message_next(text_message *m, const char *s, size_t n, size_t *bytes) {
    size_t at = 0, head;
    int plural;
    for (;;) {
        if (m->between) {
            if (!(head = next_branch(m, s + at, n - at))) return TEXT_MESSAGE_BROKEN;
            at += head;
        }
        while (at < n && is_space(s[at])) at++;
        if (at < n && m->depth && s[at] == '}') {
            m->between = 2;
            at++;
        } else if (at < n && (head = text_message_begin(s + at, n - at, &plural))) {
            if (m->depth == DEEPEST) return TEXT_MESSAGE_BROKEN;
            m->depth++, m->between = 1;
            m->plural = m->plural << 1 | (unsigned)plural;
            at += head;
        } else {
            break;
        }
    }
    *bytes = at;
    if (at == n) return m->depth ? TEXT_MESSAGE_BROKEN : TEXT_MESSAGE_FRAME;
    if (at) return TEXT_MESSAGE_FRAME;
    return (*bytes = text_end(m, s, n)) ? TEXT_MESSAGE_TEXT : TEXT_MESSAGE_BROKEN;
}

int text_message_is(const char *data, size_t length) {
    text_message m = { 0 };
    int found = 0;
    for (size_t at = 0, bytes; at < length; at += bytes) {
        const text_message_kind kind = text_message_next(&m, data + at, length - at, &bytes);
        if (kind == TEXT_MESSAGE_BROKEN) return 0;
        found |= m.depth > 0 || (kind == TEXT_MESSAGE_FRAME && memchr(data + at, '{', bytes));
    }
    return found;
}

/* Counts that must be equal in a text and its translation. */
typedef struct signature {
    size_t open, close, numbers, quotations;
    size_t doubled; /* doubled apostrophes, whose number may differ */
    int broken;
} signature;

static signature sign(text_message_text kind, const char *s, size_t n) {
    signature g = { 0 };
    for (size_t at = 0, bytes; at < n && !g.broken; at += bytes) {
        bytes = 1;
        g.open += s[at] == '{', g.close += s[at] == '}';
        g.numbers += s[at] == '#' && kind == TEXT_MESSAGE_PLURAL;
        g.broken = g.close > g.open;
        if (s[at] != '\'' || g.open > g.close) continue;
        bytes = text_message_quote(s + at, n - at, kind);
        g.broken = !bytes;
        g.quotations += bytes > 2, g.doubled += bytes == 2;
    }
    g.broken |= g.open != g.close;
    return g;
}

void text_message_show(text_message_text kind, const char *data, size_t length, text_bytes *out) {
    const signature g = sign(kind, data, length);
    size_t done = 0;
    for (size_t at = 0; g.doubled && !g.quotations && at + 1 < length; at++)
        if (data[at] == '\'' && data[at + 1] == '\'') {
            text_append(out, data + done, at - done);
            done = ++at;
        }
    text_append(out, data + done, length - done);
}

int text_message_repair(text_message_text kind, const char *source, size_t length, size_t begin, text_bytes *out) {
    const signature wanted = sign(kind, source, length);
    if (wanted.broken || out->failed) return 0;
    if (!wanted.quotations && out->length > begin && memchr(out->data + begin, '\'', out->length - begin)) {
        text_bytes mended = { 0 };
        const char *s = out->data + begin;
        const size_t n = out->length - begin;
        for (size_t at = 0; at < n; at++) {
            text_append(&mended, s + at, 1);
            if (s[at] != '\'') continue;
            if (at + 1 < n && s[at + 1] == '\'') text_append(&mended, s + ++at, 1);
            else if (wanted.doubled || at + 1 == n || text_message_quote(s + at, n - at, kind) != 1)
                text_append(&mended, "'", 1);
        }
        out->length = begin;
        text_append(out, mended.data, mended.length);
        out->failed |= mended.failed;
        text_bytes_free(&mended);
    }
    const signature got = sign(kind, out->data + begin, out->length - begin);
    return !got.broken && got.open == wanted.open && got.numbers == wanted.numbers &&
           got.quotations == wanted.quotations;
}
