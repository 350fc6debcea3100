/* marks.c - see marks.h. */
#include "tools/text/marks.h"
#include "tools/text/spans.h"
#include "tools/text/text.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* MAX_MARKS: a text with more marks is not verified. TIGHT_MARKS: a text with more has its spaces kept. */
enum { MAX_MARKS = 4000, TIGHT_MARKS = 64 };

/* Markup or a placeholder in the source text. */
typedef struct mark {
    text_span_kind kind;
    moe_span bytes;
    size_t partner; /* index of the other tag of a pair, or SIZE_MAX */
} mark;

/* A pair or placeholder in a text. */
typedef struct fact {
    const mark *what; /* the pair's first tag, or the placeholder */
    size_t around;    /* index of the pair around it, or SIZE_MAX */
    unsigned words;   /* kinds of words inside */
    int matched;
} fact;

enum { LETTERS = 1, WORDLIKE = 2 };

typedef struct facts {
    fact *data;
    size_t n, capacity;
} facts;

typedef struct table {
    mark *data;
    size_t n, capacity;
    int pairs;
    unsigned char begins[256]; /* 1 for the first byte of a mark */
} table;

/* Pair a closing tag with the last open tag of its name; a tag between them without a partner gets none. */
static void pair_up(table *t, size_t close) {
    const char *name, *other;
    mark *m = t->data;
    const size_t length = text_tag_name(m[close].bytes.data, m[close].bytes.length, &name);
    for (size_t i = close; i-- > 0;) {
        if (m[i].kind == TEXT_SPAN_CLOSE && m[i].partner != SIZE_MAX) i = m[i].partner; /* skip a pair */
        else if (m[i].kind == TEXT_SPAN_OPEN && text_tag_name(m[i].bytes.data, m[i].bytes.length, &other) == length &&
                 memcmp(name, other, length) == 0) {
            m[i].partner = close, m[close].partner = i;
            t->pairs = 1;
            return;
        }
    }
}

/* Find the marks of a source. Return 0 if out of memory. */
static int find_marks(moe_span source, table *t) {
    text_scan scan = text_scan_begin(source.data, source.length);
    for (size_t at = 0, bytes; at < source.length && t->n <= MAX_MARKS; at += bytes) {
        const text_span_kind kind = text_span_next(&scan, at, &bytes);
        if (kind == TEXT_SPAN_NONE || kind == TEXT_SPAN_NUMBER || kind == TEXT_SPAN_HYPHEN) continue;
        const mark m = { kind, { source.data + at, bytes }, SIZE_MAX };
        if (text_add(&t->data, &t->n, &t->capacity, &m, 1, sizeof m, NULL)) return 0;
        t->begins[(unsigned char)source.data[at]] = 1;
        if (kind == TEXT_SPAN_CLOSE) pair_up(t, t->n - 1);
    }
    return 1;
}

/* Return 1 if a mark is at text[at], and not a part of a longer word. */
static int is_at(moe_span text, size_t at, const mark *m) {
    const size_t n = m->bytes.length, end = at + n;
    if (n > text.length - at || memcmp(text.data + at, m->bytes.data, n) != 0) return 0;
    return m->kind != TEXT_SPAN_WORD ||
           !((text_is_wordlike_before(text.data, text.length, at) && text_is_wordlike(m->bytes.data, n, 0)) ||
             (text_is_wordlike(text.data, text.length, end) && text_is_wordlike_before(m->bytes.data, n, n)));
}

/* Return the longest mark at text[at]; among equal ones, the tag that closes the pair `open`, or a tag of a pair. */
static const mark *mark_at(const table *t, moe_span text, size_t at, const mark *open) {
    const mark *best = NULL;
    if (!t->begins[(unsigned char)text.data[at]]) return NULL;
    for (const mark *m = t->data; m < t->data + t->n; m++) {
        if ((best && m->bytes.length < best->bytes.length) || !is_at(text, at, m)) continue;
        if (!best || m->bytes.length > best->bytes.length || best->partner == SIZE_MAX ||
            (open && m->kind == TEXT_SPAN_CLOSE && text_same(t->data[open->partner].bytes, m->bytes)))
            best = m;
    }
    return best;
}

/* Collect the facts of a text. Return 0 if its pairs do not nest, -1 if out of memory. */
static int collect(const table *t, moe_span text, facts *out) {
    size_t around = SIZE_MAX, bytes;
    for (size_t at = 0; at < text.length; at += bytes) {
        const mark *open = around == SIZE_MAX ? NULL : out->data[around].what;
        const mark *m = mark_at(t, text, at, open);
        unsigned words = 0;
        bytes = m ? m->bytes.length : 0;
        if (!m && text_is_wordlike(text.data, text.length, at)) words = WORDLIKE;
        if (!m && text_is_letter(text_character(text.data, text.length, at, &bytes))) words |= LETTERS;
        if (m && m->kind == TEXT_SPAN_CLOSE && m->partner != SIZE_MAX) {
            if (!open || !text_same(t->data[open->partner].bytes, m->bytes)) return 0;
            words = out->data[around].words;
            around = out->data[around].around;
        } else if (m && (m->kind == TEXT_SPAN_WORD || m->partner != SIZE_MAX)) {
            const fact f = { .what = m, .around = around };
            if (text_add(&out->data, &out->n, &out->capacity, &f, 1, sizeof f, NULL)) return -1;
            if (m->kind != TEXT_SPAN_WORD) around = out->n - 1;
        }
        if (words && around != SIZE_MAX) out->data[around].words |= words;
    }
    return around == SIZE_MAX;
}

static int same_mark(const mark *a, const mark *b) { return a == b || text_same(a->bytes, b->bytes); }

/* Return 1 if two facts are equal. */
static int same_fact(const facts *a, const fact *x, const facts *b, const fact *y) {
    if (!same_mark(x->what, y->what) || (x->what->kind != TEXT_SPAN_WORD && x->words != y->words)) return 0;
    if (x->around == SIZE_MAX || y->around == SIZE_MAX) return x->around == y->around;
    return same_mark(a->data[x->around].what, b->data[y->around].what);
}

/* Return 1 if a translation has each fact of its source. Glossary terms may replace placeholders everywhere. */
static int matches(const facts *source, const facts *target) {
    for (const fact *s = source->data; s < source->data + source->n; s++) {
        int found = 0, there = 0;
        for (fact *f = target->data; f < target->data + target->n && !found; f++) {
            there |= same_mark(s->what, f->what);
            found = !f->matched && same_fact(source, s, target, f);
            f->matched |= found;
        }
        if (!found && (there || s->what->kind != TEXT_SPAN_WORD)) return 0;
    }
    for (const fact *f = target->data; f < target->data + target->n; f++)
        if (!f->matched && f->what->kind != TEXT_SPAN_WORD) return 0;
    return 1;
}

int text_marks_kept(moe_span source, moe_span target) {
    table t = { 0 };
    facts wanted = { 0 }, found = { 0 };
    int kept = find_marks(source, &t) ? 1 : -1;
    if (kept > 0 && t.pairs && t.n <= MAX_MARKS) {
        const int can = collect(&t, source, &wanted); /* 0: the source has more tags of a pair */
        if (can) kept = can < 0 ? can : collect(&t, target, &found);
        if (can > 0 && kept > 0) kept = matches(&wanted, &found);
    }
    free(t.data);
    free(wanted.data);
    free(found.data);
    return kept;
}

/* ---- Spaces around tags inside a word or number ---- */

/* Return the byte before the tags and spaces that end at `at`, which moves to their start; 0 at the beginning. */
static char byte_before(moe_span s, size_t *at) {
    while (*at) {
        const char last = s.data[*at - 1];
        size_t begin = *at - 1;
        if (last == '>')
            while (begin && s.data[begin] != '<') begin--;
        if (last != ' ' && (last != '>' || s.data[begin] != '<')) return last;
        *at = begin;
    }
    return 0;
}

/* Return the byte after the tags and spaces that begin at `at`, which moves to their end; 0 at the end. */
static char byte_after(moe_span s, size_t *at) {
    while (*at < s.length) {
        const char *end = s.data[*at] == '<' ? memchr(s.data + *at, '>', s.length - *at) : NULL;
        if (s.data[*at] != ' ' && !end) return s.data[*at];
        *at = end ? (size_t)(end - s.data) + 1 : *at + 1;
    }
    return 0;
}

/* Drop the spaces outside tags in bytes [from, to) of a text. Return their number. */
static size_t drop_spaces(char *data, size_t from, size_t to, size_t length) {
    size_t n = from;
    int inside = 0;
    for (size_t i = from; i < to; i++) {
        inside = data[i] == '<' || (inside && data[i] != '>');
        if (data[i] != ' ' || inside) data[n++] = data[i];
    }
    memmove(data + n, data + to, length - to);
    return to - n;
}

void text_marks_tighten(moe_span source, size_t begin, text_bytes *out) {
    table t = { 0 };
    text_bytes joint = { 0 };
    const int found = !out->failed && find_marks(source, &t) && t.n <= TIGHT_MARKS;
    for (const mark *m = t.data; found && m < t.data + t.n; m++) {
        size_t from = (size_t)(m->bytes.data - source.data), to = from + m->bytes.length;
        if (m->partner == SIZE_MAX) continue;
        const char left = byte_before(source, &from), right = byte_after(source, &to);
        text_clear(&joint);
        text_append(&joint, source.data + from, to - from);
        if (!left || !right || joint.failed || drop_spaces(joint.data, 0, joint.length, joint.length)) continue;
        for (size_t at = begin; at + m->bytes.length <= out->length; at++) {
            if (memcmp(out->data + at, m->bytes.data, m->bytes.length) != 0) continue;
            const moe_span target = { out->data, out->length };
            from = at, to = at + m->bytes.length;
            if (byte_before(target, &from) != left || byte_after(target, &to) != right || from < begin) continue;
            out->length -= drop_spaces(out->data, from, to, out->length);
            out->data[out->length] = '\0';
        }
    }
    text_bytes_free(&joint);
    free(t.data);
}
