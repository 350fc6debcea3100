/* html.c - html.h says what this is.
 *
 * Contents
 *   1. Tokens       texts, tags and the rest of a document
 *   2. Characters   references such as &amp;
 *   3. Segments     what a translator sees
 *   4. Placing      tags among the words of a translation
 */
#include "tools/server/html.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ==== 1. Tokens =========================================================================================
 * The states of the HTML standard's tokeniser, as far as they decide where a token ends. */

typedef enum kind { TEXT, OPEN, CLOSE, SINGLE } kind;

typedef struct token {
    kind kind; /* SINGLE: stands inside a sentence without a partner */
    size_t begin, end;
    size_t partner; /* of OPEN and CLOSE */
    size_t at;      /* the byte of the segment's source where it stands */
    size_t stop;    /* of a text: where it ends there */
} token;

static int is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\f' || c == '\r'; }
static int is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
static char small(char c) { return (char)(c >= 'A' && c <= 'Z' ? c + 32 : c); }

/* 1 if data[0 .. n) is one of the words of a list, whatever its case. */
static int is_one_of(const char *list, const char *data, size_t n) {
    for (const char *word = list; *word;) {
        const size_t length = strcspn(word, " ");
        size_t same = 0;
        while (same < n && n == length && small(data[same]) == word[same]) same++;
        if (n && same == n) return 1;
        word += length + (word[length] == ' ');
    }
    return 0;
}

typedef struct tag {
    size_t name, name_end, end; /* end: behind its >, or of the document */
    int kept;                   /* its author wants its content as it is */
    int empty;                  /* it ends with />, which counts for svg and math */
} tag;

/* 1 if a list of classes has "notranslate". */
static int has_class(const char *data, size_t n) {
    for (size_t at = 0; at < n;) {
        while (at < n && is_space(data[at])) at++;
        size_t end = at;
        while (end < n && !is_space(data[end])) end++;
        if (is_one_of("notranslate", data + at, end - at)) return 1;
        at = end;
    }
    return 0;
}

/* The tag whose name begins at `at`. */
static tag read_tag(const char *data, size_t length, size_t at) {
    tag t = { .name = at };
    while (at < length && !is_space(data[at]) && data[at] != '/' && data[at] != '>') at++;
    t.name_end = at;
    while (at < length && data[at] != '>') {
        if (is_space(data[at]) || data[at] == '/') {
            at++;
            continue;
        }
        const size_t name = at++; /* which may begin with = */
        while (at < length && !is_space(data[at]) && data[at] != '/' && data[at] != '>' && data[at] != '=') at++;
        const size_t name_end = at;
        while (at < length && is_space(data[at])) at++;
        if (at >= length || data[at] != '=') continue;
        for (at++; at < length && is_space(data[at]);) at++;
        const char quote = at < length && (data[at] == '"' || data[at] == '\'') ? data[at++] : 0;
        const size_t value = at;
        while (at < length && (quote ? data[at] != quote : !is_space(data[at]) && data[at] != '>')) at++;
        if (is_one_of("translate", data + name, name_end - name) && is_one_of("no", data + value, at - value))
            t.kept = 1;
        if (is_one_of("class", data + name, name_end - name) && has_class(data + value, at - value)) t.kept = 1;
        at += quote && at < length;
    }
    t.end = at + (at < length);
    t.empty = at < length && data[at - 1] == '/' && is_one_of("svg math", data + t.name, t.name_end - t.name);
    return t;
}

/* Behind the next `what`, or the document's end. */
static size_t behind(const char *data, size_t length, size_t at, const char *what) {
    const size_t n = strlen(what);
    for (; at + n <= length; at++)
        if (memcmp(data + at, what, n) == 0) return at + n;
    return length;
}

/* Where the end tag of a name begins, or the document's end: what stands before it is no markup. */
static size_t end_tag(const char *data, size_t length, size_t at, const char *name, size_t n) {
    for (; at + 2 + n <= length; at++) {
        if (data[at] != '<' || data[at + 1] != '/') continue;
        size_t same = 0;
        while (same < n && small(data[at + 2 + same]) == small(name[same])) same++;
        const char next = at + 2 + n < length ? data[at + 2 + n] : '>';
        if (same == n && (is_space(next) || next == '/' || next == '>')) return at;
    }
    return length;
}

/* 1 if no text goes on at data[at], which is a <. */
static int begins_markup(const char *data, size_t length, size_t at) {
    const char next = at + 1 < length ? data[at + 1] : 0;
    return is_letter(next) || next == '!' || next == '?' || (next == '/' && at + 2 < length);
}

/* The end of a comment, a declaration or the like, whose < is at `at`. */
static size_t end_of_other(const char *data, size_t length, size_t at) {
    if (at + 4 > length || memcmp(data + at, "<!--", 4) != 0) return behind(data, length, at, ">");
    if (at + 4 < length && data[at + 4] == '>') return at + 5;
    const size_t usual = behind(data, length, at + 4 - (at + 5 < length && data[at + 4] == '-'), "-->");
    const size_t other = behind(data, usual, at + 4, "--!>");
    return other < usual ? other : usual;
}

/* ==== 2. Characters =====================================================================================
 * Names of characters that texts in Latin letters have. Others stay as they are written. */

static const char latin[] = /* U+00A0 and those behind it, in their order */
    "nbsp iexcl cent pound curren yen brvbar sect uml copy ordf laquo not shy reg macr deg plusmn sup2 sup3 acute "
    "micro para middot cedil sup1 ordm raquo frac14 frac12 frac34 iquest Agrave Aacute Acirc Atilde Auml Aring "
    "AElig Ccedil Egrave Eacute Ecirc Euml Igrave Iacute Icirc Iuml ETH Ntilde Ograve Oacute Ocirc Otilde Ouml "
    "times Oslash Ugrave Uacute Ucirc Uuml Yacute THORN szlig agrave aacute acirc atilde auml aring aelig ccedil "
    "egrave eacute ecirc euml igrave iacute icirc iuml eth ntilde ograve oacute ocirc otilde ouml divide oslash "
    "ugrave uacute ucirc uuml yacute thorn yuml";

static const struct {
    const char *name;
    uint32_t code;
} others[] = {
    { "amp", '&' },       { "lt", '<' },        { "gt", '>' },        { "quot", '"' },      { "apos", '\'' },
    { "OElig", 0x152 },   { "oelig", 0x153 },   { "Scaron", 0x160 },  { "scaron", 0x161 },  { "Yuml", 0x178 },
    { "ensp", 0x2002 },   { "emsp", 0x2003 },   { "thinsp", 0x2009 }, { "ndash", 0x2013 },  { "mdash", 0x2014 },
    { "lsquo", 0x2018 },  { "rsquo", 0x2019 },  { "sbquo", 0x201a },  { "ldquo", 0x201c },  { "rdquo", 0x201d },
    { "bdquo", 0x201e },  { "dagger", 0x2020 }, { "bull", 0x2022 },   { "hellip", 0x2026 }, { "permil", 0x2030 },
    { "lsaquo", 0x2039 }, { "rsaquo", 0x203a }, { "euro", 0x20ac },   { "trade", 0x2122 },  { "minus", 0x2212 },
};

static uint32_t named(const char *name, size_t n) {
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strlen(others[i].name) == n && memcmp(others[i].name, name, n) == 0) return others[i].code;
    uint32_t code = 0xa0;
    for (const char *word = latin; *word; code++) {
        const size_t length = strcspn(word, " ");
        if (length == n && memcmp(word, name, n) == 0) return code;
        word += length + (word[length] == ' ');
    }
    return 0;
}

/* The character of the reference that begins at data[0], and its length; 0: it is none that is known. */
static uint32_t reference(const char *data, size_t length, size_t *n) {
    const char *semicolon = length > 2 && data[0] == '&' ? memchr(data, ';', length < 12 ? length : 12) : NULL;
    if (!semicolon) return 0;
    *n = (size_t)(semicolon - data) + 1;
    if (data[1] != '#') return named(data + 1, *n - 2);
    const int hex = small(data[2]) == 'x';
    uint32_t code = 0;
    for (const char *c = data + 2 + hex; c < semicolon; c++) {
        const char digit = small(*c);
        const int value = digit >= '0' && digit <= '9'   ? digit - '0'
                          : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                                                         : 99;
        if (value >= (hex ? 16 : 10) || code > 0x10ffff) return 0;
        code = code * (hex ? 16 : 10) + (uint32_t)value;
    }
    return code >= 0x20 && code <= 0x10ffff && (code < 0x7f || code > 0x9f) && (code < 0xd800 || code > 0xdfff) ? code
                                                                                                                : 0;
}

static size_t put_utf8(uint32_t code, char out[4]) {
    const size_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char heads[] = { 0, 0, 0xc0, 0xe0, 0xf0 };
    for (size_t i = n; --i; code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)(heads[n] | code);
    return n;
}

/* One character of a text at data[0 .. length): its bytes in out, how many in *n; gives how many it was read from. */
static size_t character(const char *data, size_t length, char out[4], size_t *n) {
    size_t read = 1;
    const uint32_t code = reference(data, length, &read);
    if (code) return *n = put_utf8(code, out), read;
    for (read = 1; read < length && ((unsigned char)data[read] & 0xc0) == 0x80;) read++;
    memcpy(out, data, *n = read < 4 ? read : 4);
    return *n;
}

static int is_blank(const char *c, size_t n) {
    return (n == 1 && is_space(*c)) || (n == 2 && !memcmp(c, "\xc2\xa0", 2));
}

static void escape(text_bytes *out, const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        const char *name = text[i] == '&' ? "&amp;" : text[i] == '<' ? "&lt;" : text[i] == '>' ? "&gt;" : NULL;
        if (name) text_append_string(out, name);
        else text_append(out, text + i, 1);
    }
}

/* ==== 3. Segments =======================================================================================
 * Tokens are collected until a block tag comes; what stands between two of them becomes a segment, or several. */

enum { MOST_MARKS = 64 }; /* in one segment: placing them takes time with their square, and stack with their depth */

typedef struct segment {
    size_t begin, end;     /* bytes of the document that its translation replaces */
    size_t first, last;    /* tokens [first .. last) in it, TEXT, OPEN, CLOSE and SINGLE */
    size_t source, length; /* of html.sources */
} segment;

struct html {
    const char *data;
    size_t length;
    int whole, failed;
    token *tokens; /* of all segments, and behind them those that are collected */
    size_t n_tokens, token_capacity, collected;
    segment *segments;
    size_t n_segments, segment_capacity;
    text_bytes sources;
};

static void add(html *h, kind what, size_t begin, size_t end) {
    if (begin == end || h->failed) return;
    token *last = h->n_tokens > h->collected ? &h->tokens[h->n_tokens - 1] : NULL;
    if (last && what == TEXT && last->kind == TEXT && last->end == begin) {
        last->end = end;
        return;
    }
    if (h->n_tokens == h->token_capacity) {
        token *more = realloc(h->tokens, (2 * h->n_tokens + 64) * sizeof *more);
        if (!more) {
            h->failed = 1;
            return;
        }
        h->tokens = more, h->token_capacity = 2 * h->n_tokens + 64;
    }
    h->tokens[h->n_tokens++] = (token){ .kind = what, .begin = begin, .end = end };
}

/* Opening and closing tags find each other by their order, whatever their names; those that do not become single. The
 * partner of what opens serves as the stack. */
static void pair_up(token *t, size_t first, size_t last) {
    size_t top = SIZE_MAX;
    for (size_t i = first; i < last; i++) {
        if (t[i].kind == OPEN) t[i].partner = top, top = i;
        if (t[i].kind != CLOSE) continue;
        if (top == SIZE_MAX) {
            t[i].kind = SINGLE;
            continue;
        }
        const size_t opened = top;
        top = t[opened].partner;
        t[opened].partner = i, t[i].partner = opened;
    }
    for (size_t next; top != SIZE_MAX; top = next) next = t[top].partner, t[top].kind = SINGLE;
}

/* The bytes of a text that are white space: at its beginning, or at its end. */
static size_t blank_begin(const html *h, const token *t) {
    char c[4];
    size_t at = t->begin, n;
    for (size_t read; at < t->end; at += read) {
        read = character(h->data + at, t->end - at, c, &n);
        if (!is_blank(c, n)) break;
    }
    return at - t->begin;
}

static size_t blank_end(const html *h, const token *t) {
    char c[4];
    size_t at = t->begin, from = t->begin, n; /* from: where the white space that goes on begins */
    for (size_t read; at < t->end; at += read) {
        read = character(h->data + at, t->end - at, c, &n);
        if (!is_blank(c, n)) from = at + read;
    }
    return t->end - from;
}

static int is_blank_text(const html *h, const token *t) {
    return t->kind == TEXT && blank_begin(h, t) == t->end - t->begin;
}

/* The words of the tokens, in which white space is one space; 1 if there is a letter. */
static int write_source(html *h, segment *s) {
    int letters = 0;
    s->source = h->sources.length;
    for (size_t i = s->first; i < s->last; i++) {
        token *t = &h->tokens[i];
        t->at = h->sources.length - s->source;
        for (size_t at = t->begin, n; t->kind == TEXT && at < t->end;) {
            char c[4];
            at += character(h->data + at, t->end - at, c, &n);
            const int space = n == 1 && is_space(c[0]);
            if (space && (h->sources.length == s->source || h->sources.data[h->sources.length - 1] == ' ')) continue;
            letters |= n > 1 ? !is_blank(c, n) : is_letter(c[0]);
            text_append(&h->sources, space ? " " : c, space ? 1 : n);
        }
        t->stop = h->sources.length - s->source;
    }
    s->length = h->sources.length - s->source;
    return letters;
}

static void add_segment(html *h, size_t first, size_t last) {
    segment s = { .first = first, .last = last };
    if (first == last || h->failed) return;
    token *begin = &h->tokens[first], *end = &h->tokens[last - 1];
    if (begin->kind == TEXT) begin->begin += blank_begin(h, begin);
    if (end->kind == TEXT) end->end -= blank_end(h, end);
    s.begin = begin->begin, s.end = end->end;
    if (!write_source(h, &s)) {
        h->sources.length = s.source;
        return;
    }
    if (h->n_segments == h->segment_capacity) {
        segment *more = realloc(h->segments, (2 * h->n_segments + 16) * sizeof *more);
        if (!more) {
            h->failed = 1;
            return;
        }
        h->segments = more, h->segment_capacity = 2 * h->n_segments + 16;
    }
    h->segments[h->n_segments++] = s;
}

/* Make segments of what is collected. Markup and white space around all words stay outside. */
static void flush(html *h) {
    size_t first = h->collected, last = h->n_tokens, marks = 0;
    h->collected = last;
    pair_up(h->tokens, first, last);
    for (int go_on = 1; go_on && first < last;) {
        const token *f = &h->tokens[first], *l = &h->tokens[last - 1];
        if (f->kind == SINGLE || is_blank_text(h, f)) first++;
        else if (l->kind == SINGLE || is_blank_text(h, l)) last--;
        else if (f->kind == OPEN && f->partner == last - 1) first++, last--;
        else go_on = 0;
    }
    for (size_t i = first; i < last; i++) marks += h->tokens[i].kind != TEXT;
    if (h->whole && marks <= MOST_MARKS) {
        add_segment(h, first, last);
        return;
    }
    for (size_t i = first; i < last; i++)
        if (h->tokens[i].kind == TEXT && !is_blank_text(h, &h->tokens[i])) add_segment(h, i, i + 1);
}

static const char INLINE[] = "a abbr acronym b bdi bdo big cite data del dfn em font i ins label mark q s small span "
                             "strike strong sub sup time tt u";
static const char SENTENCE[] = "img wbr input code kbd samp var"; /* inline; the first three have no content */
static const char VOID[] = "area base br col embed hr img input link meta source track wbr";
static const char KEPT[] = "script style pre textarea template svg math noscript code kbd samp var xmp iframe noembed "
                           "noframes";
static const char RAW[] = "script style textarea title xmp iframe noembed noframes noscript"; /* no tags inside */

/* Behind the end tag of an element that is kept, whose content begins at `at`. */
static size_t end_of_kept(const char *data, size_t length, size_t at, const char *name, size_t n) {
    for (size_t depth = 1; at < length;) {
        if (data[at] != '<' || !begins_markup(data, length, at)) {
            at++;
            continue;
        }
        const int closes = data[at + 1] == '/';
        if (!is_letter(data[at + 1 + (size_t)closes])) {
            at = end_of_other(data, length, at);
            continue;
        }
        const tag t = read_tag(data, length, at + 1 + (size_t)closes);
        size_t same = 0;
        while (same < n && same < t.name_end - t.name && small(data[t.name + same]) == small(name[same])) same++;
        at = t.end;
        if (same == n && t.name_end - t.name == n && !t.empty) depth += closes ? (size_t)-1 : 1;
        if (!depth) return at;
        if (!closes && is_one_of(RAW, data + t.name, t.name_end - t.name) && same < n)
            at = end_tag(data, length, at, data + t.name, t.name_end - t.name);
    }
    return length;
}

/* The tag or the like at `at`, a <; gives where the next token begins. */
static size_t take_markup(html *h, size_t at) {
    const char *data = h->data;
    const int closes = data[at + 1] == '/';
    if (!is_letter(data[at + 1 + (size_t)closes])) { /* a comment goes with its sentence, a declaration does not */
        const size_t end = end_of_other(data, h->length, at);
        if (data[at + 1] == '!' && end - at > 3 && data[at + 2] == '-') add(h, SINGLE, at, end);
        else flush(h);
        return end;
    }
    const tag t = read_tag(data, h->length, at + 1 + (size_t)closes);
    const char *name = data + t.name;
    const size_t n = t.name_end - t.name;
    const int in_sentence = is_one_of(INLINE, name, n) || is_one_of(SENTENCE, name, n);
    const int empty = t.empty || is_one_of(VOID, name, n);
    size_t end = t.end;
    if (!closes && !empty && (t.kept || is_one_of(KEPT, name, n))) {
        end = is_one_of(RAW, name, n) ? end_tag(data, h->length, end, name, n) : end;
        end = end_of_kept(data, h->length, end, name, n);
        if (in_sentence) add(h, SINGLE, at, end);
        else flush(h);
    } else if (in_sentence) {
        add(h, empty ? SINGLE : closes ? CLOSE : OPEN, at, end);
    } else {
        flush(h);
        if (!closes && is_one_of("title", name, n)) { /* text without tags */
            end = end_tag(data, h->length, t.end, name, n);
            add(h, TEXT, t.end, end);
            flush(h);
        } else if (is_one_of("plaintext", name, n)) {
            end = h->length;
        }
    }
    return end;
}

html *html_read(const char *data, size_t length, int whole) {
    html *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    h->data = data, h->length = length, h->whole = whole;
    for (size_t at = 0; at < length;) {
        size_t end = at;
        while (end < length && (data[end] != '<' || !begins_markup(data, length, end))) end++;
        add(h, TEXT, at, end);
        at = end < length ? take_markup(h, end) : end;
    }
    flush(h);
    if (!h->failed && !h->sources.failed) return h;
    html_free(h);
    return NULL;
}

void html_free(html *h) {
    if (!h) return;
    free(h->tokens), free(h->segments);
    text_bytes_free(&h->sources);
    free(h);
}

size_t html_count(const html *h) { return h->n_segments; }

const char *html_source(const html *h, size_t i, size_t *length) {
    *length = h->segments[i].length;
    return h->sources.data + h->segments[i].source;
}

void html_write(const html *h, const text_bytes *(*translation)(const void *user, size_t segment), const void *user,
                text_bytes *out) {
    size_t at = 0;
    for (size_t i = 0; i < h->n_segments; i++) {
        const text_bytes *text = translation(user, i);
        text_append(out, h->data + at, h->segments[i].begin - at);
        if (text->length) text_append(out, text->data, text->length);
        at = h->segments[i].end;
    }
    text_append(out, h->data + at, h->length - at);
}

/* ==== 4. Placing ======================================================================================== */

typedef struct placing {
    const html *h;
    const segment *s;
    const char *text;
    size_t length;
    const moetext_link *links;
    size_t n_links;
    text_bytes *out;
} placing;

/* Where a byte of the source is in the translation, as far as its place in the sentence tells; between words. */
static size_t in_proportion(const placing *p, size_t at) {
    size_t byte = p->s->length ? (size_t)((double)at / (double)p->s->length * (double)p->length) : 0;
    if (at >= p->s->length) return p->length;
    while (byte && p->text[byte - 1] != ' ') byte--;
    return byte;
}

/* Where markup goes that stands before byte `at` of the source. */
static size_t place_single(const placing *p, size_t at) {
    const moetext_link *next = NULL, *before = NULL;
    for (const moetext_link *l = p->links; l < p->links + p->n_links; l++) {
        if (l->source_begin >= at && (!next || l->source_begin < next->source_begin ||
                                      (l->source_begin == next->source_begin && l->target_begin < next->target_begin)))
            next = l;
        if (l->source_begin < at && (!before || l->target_end > before->target_end)) before = l;
    }
    return next ? next->target_begin : before ? before->target_end : in_proportion(p, at);
}

typedef struct place {
    size_t token, begin, end;
} place;

/* The bytes of the translation that go between a pair of tags, or where a single one goes. */
static place place_of(const placing *p, size_t i) {
    const token *t = &p->h->tokens[i];
    place found = { .token = i };
    if (t->kind == SINGLE) {
        found.begin = found.end = place_single(p, t->at);
        return found;
    }
    const size_t from = t->at, to = p->h->tokens[t->partner].at;
    found.begin = SIZE_MAX;
    for (const moetext_link *l = p->links; l < p->links + p->n_links; l++) {
        if (l->source_begin >= to || l->source_end <= from) continue;
        if (l->target_begin < found.begin) found.begin = l->target_begin;
        if (l->target_end > found.end) found.end = l->target_end;
    }
    const char last = to ? p->h->sources.data[p->s->source + to - 1] : ' ';
    while (found.end > found.begin + 1 && strchr(".,;:!?", p->text[found.end - 1]) && !strchr(".,;:!?", last))
        found.end--;
    if (found.begin < found.end) return found;
    found.begin = in_proportion(p, from), found.end = in_proportion(p, to);
    while (found.end > found.begin && to < p->s->length && p->text[found.end - 1] == ' ') found.end--;
    return found;
}

static void put_token(const placing *p, size_t i) {
    const token *t = &p->h->tokens[i];
    text_append(p->out, p->h->data + t->begin, t->end - t->begin);
}

/* The words [begin .. end) of the translation with the marks among tokens [first .. last). Marks that would cross stand
 * one behind the other. */
static void put_range(const placing *p, size_t first, size_t last, size_t begin,
                      size_t end) { /* NOLINT(misc-no-recursion) */
    place places[MOST_MARKS];
    size_t n = 0, at = begin;
    for (size_t i = first; i < last; i++) {
        if (p->h->tokens[i].kind == TEXT) continue;
        place one = place_of(p, i);
        size_t before = n++;
        for (; before && places[before - 1].begin > one.begin; before--) places[before] = places[before - 1];
        places[before] = one;
        if (p->h->tokens[i].kind == OPEN) i = p->h->tokens[i].partner;
    }
    for (size_t i = 0; i < n; i++) {
        size_t from = places[i].begin, to = places[i].end;
        if (from < at) from = at;
        if (from > end) from = end;
        if (to < from) to = from;
        if (to > end) to = end;
        escape(p->out, p->text + at, from - at);
        at = to;
        put_token(p, places[i].token);
        if (p->h->tokens[places[i].token].kind != OPEN) continue;
        const size_t partner = p->h->tokens[places[i].token].partner;
        put_range(p, places[i].token + 1, partner, from, to);
        put_token(p, partner);
    }
    escape(p->out, p->text + at, end - at);
}

void html_place(const html *h, size_t i, const char *text, size_t length, const moetext_link *links, size_t n_links,
                text_bytes *out) {
    const placing p = { h, &h->segments[i], text, length, links, n_links, out };
    put_range(&p, p.s->first, p.s->last, 0, length);
}
