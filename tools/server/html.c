/* html.c - html.h says what this is.
 *
 * Contents
 *   1. Tokens       texts, tags and the rest of a document
 *   2. Characters   references such as &amp;
 *   3. Segments     what a translator sees
 *   4. Placing      tags among the words of a translation
 */
#define _GNU_SOURCE /* memmem */
#include "tools/server/html.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ==== 1. Tokens =========================================================================================
 * The states of the HTML standard's tokeniser, as far as they decide where a token ends. */

typedef enum kind { TEXT, OPEN, CLOSE, SINGLE, WORD } kind;

typedef struct token {
    kind kind;    /* SINGLE: stands inside a sentence without a partner; WORD: a word that stays as it is */
    int link;     /* it may be a segment of its own in a sentence too */
    int raised;   /* an exponent, an index */
    int formula;  /* a WORD that one belongs to */
    int edge;     /* white space or a single mark: at an end of a segment it stays outside */
    int number;   /* of a WORD's stand-in, {number} */
    size_t words; /* tokens with words before it, of those that were collected with it */
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

/* Attributes that are looked at; the first four are always what a reader sees. */
enum { ALT, TITLE, PLACEHOLDER, LABEL, VALUE, CONTENT, TYPE, NAME, PROPERTY, LANG, N_SPOTS };
static const char *const spot_names[N_SPOTS] = { "alt",     "title", "placeholder", "aria-label", "value",
                                                 "content", "type",  "name",        "property",   "lang" };

typedef struct spot { /* the value of an attribute; all zero: there is none */
    size_t begin, end;
    int quoted;
} spot;

typedef struct tag {
    size_t name, name_end, end; /* end: behind its >, or of the document */
    int kept;                   /* its author wants its content as it is */
    int empty;                  /* it ends with />, which counts for svg and math */
    int slash;                  /* it ends with /> */
    spot spots[N_SPOTS];
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
        for (size_t i = 0; i < N_SPOTS; i++)
            if (!t.spots[i].end && is_one_of(spot_names[i], data + name, name_end - name))
                t.spots[i] = (spot){ value, at, quote != 0 };
        if (is_one_of("translate", data + name, name_end - name) && is_one_of("no", data + value, at - value))
            t.kept = 1;
        if (is_one_of("class", data + name, name_end - name) && has_class(data + value, at - value)) t.kept = 1;
        at += quote && at < length;
    }
    t.end = at + (at < length);
    t.slash = at < length && data[at - 1] == '/';
    t.empty = t.slash && is_one_of("svg math", data + t.name, t.name_end - t.name);
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
    static const char *const programs[] = { "<?php", "<?=" }; /* which have > of their own */
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        if (at + strlen(programs[i]) <= length && !memcmp(data + at, programs[i], strlen(programs[i])))
            return behind(data, length, at, "?>");
    if (at + 4 > length || memcmp(data + at, "<!--", 4) != 0) return behind(data, length, at, ">");
    if (at + 4 < length && data[at + 4] == '>') return at + 5;
    /* Both ends in one search: one for each, and many comments with the rarer end would be looked through to the end of
     * the document. */
    for (size_t end = at + 4 - (at + 5 < length && data[at + 4] == '-'); end + 3 <= length; end++) {
        if (data[end] != '-' || data[end + 1] != '-') continue;
        if (data[end + 2] == '>') return end + 3;
        if (end >= at + 4 && end + 4 <= length && memcmp(data + end + 2, "!>", 2) == 0) return end + 4;
    }
    return length;
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

/* The longest of the names that need no semicolon which a text begins with: its length, and its character. */
static size_t without_semicolon(const char *name, size_t n, uint32_t *code) {
    static const struct {
        const char *name;
        uint32_t code;
    } more[] = { { "AMP", '&' }, { "LT", '<' }, { "GT", '>' }, { "QUOT", '"' }, { "COPY", 0xa9 }, { "REG", 0xae } };
    size_t best = 0;
    for (size_t i = 0; i < sizeof more / sizeof *more; i++)
        if (strlen(more[i].name) <= n && !memcmp(more[i].name, name, strlen(more[i].name)))
            best = strlen(more[i].name), *code = more[i].code;
    for (size_t i = 0; i < 4; i++) /* amp, lt, gt and quot */
        if (strlen(others[i].name) <= n && !memcmp(others[i].name, name, strlen(others[i].name)))
            best = strlen(others[i].name), *code = others[i].code;
    uint32_t at = 0xa0;
    for (const char *word = latin; *word; at++) {
        const size_t length = strcspn(word, " ");
        if (length <= n && length > best && !memcmp(word, name, length)) best = length, *code = at;
        word += length + (word[length] == ' ');
    }
    return best;
}

static int is_digit(char c, int hex) { return (c >= '0' && c <= '9') || (hex && small(c) >= 'a' && small(c) <= 'f'); }

static int is_alnum(char c) { return is_letter(c) || is_digit(c, 0); }

static uint32_t numbered(const char *data, size_t length, size_t *n) {
    const int hex = length > 2 && small(data[2]) == 'x';
    size_t at = 2 + (size_t)hex;
    uint32_t code = 0;
    for (; at < length && is_digit(data[at], hex); at++) {
        const char digit = small(data[at]);
        if (code <= 0x10ffff) code = code * (hex ? 16 : 10) + (uint32_t)(digit <= '9' ? digit - '0' : digit - 'a' + 10);
    }
    *n = at + (at < length && data[at] == ';');
    return code >= 0x20 && code <= 0x10ffff && (code < 0x7f || code > 0x9f) && (code < 0xd800 || code > 0xdfff) ? code
                                                                                                                : 0;
}

/* The bytes of something like &name; or &#1; that data begins with; 0: of nothing. */
static size_t reference_length(const char *data, size_t length) {
    size_t at = length > 1 && data[1] == '#' ? 2 : 1;
    while (at < length && at < 40 && is_alnum(data[at])) at++;
    return at > 2 && at < length && data[at] == ';' ? at + 1 : 0;
}

/* The character of the reference that begins at data[0], and its length; 0: it is none that is known. */
static uint32_t reference(const char *data, size_t length, size_t *n) {
    if (length < 3 || data[0] != '&') return 0;
    if (data[1] == '#') return numbered(data, length, n);
    size_t end = 1;
    while (end < length && end < 40 && is_alnum(data[end])) end++;
    uint32_t code = end < length && data[end] == ';' ? named(data + 1, end - 1) : 0;
    if (code) return *n = end + 1, code;
    end = without_semicolon(data + 1, end - 1, &code);
    *n = 1 + end;
    return end ? code : 0;
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

/* ==== 3. Segments =======================================================================================
 * Tokens are collected until a block tag comes; what stands between two of them becomes a segment, or several. */

enum { MOST_MARKS = 64 }; /* in one segment: placing them takes time with their square, and stack with their depth */

typedef struct segment {
    int attribute;         /* it is the value of one, without tokens */
    size_t begin, end;     /* bytes of the document that its translation replaces */
    size_t first, last;    /* tokens [first .. last) in it, TEXT, OPEN, CLOSE and SINGLE */
    size_t source, length; /* of html.sources */
} segment;

typedef struct range {
    size_t first, last; /* tokens */
    int sentence;       /* it is not to be divided */
} range;

struct html {
    const char *data;
    size_t length;
    html_wish wish;
    int failed;
    spot lang;     /* what becomes wish.target */
    token *tokens; /* of all segments, and behind them those that are collected */
    size_t n_tokens, token_capacity, collected;
    segment *segments;
    size_t n_segments, segment_capacity;
    size_t *attributes; /* [n_attributes] numbers of the segments that are */
    size_t n_attributes, attribute_capacity;
    text_bytes sources;
    range *ranges; /* what is to be cut into segments */
    size_t n_ranges, range_capacity;
};

static void add(html *h, kind what, size_t begin, size_t end) {
    if (begin == end || h->failed) return;
    token *last = h->n_tokens > h->collected ? &h->tokens[h->n_tokens - 1] : NULL;
    if (last && what == TEXT && last->kind == TEXT && last->end == begin) {
        last->end = end;
        return;
    }
    if (!h->tokens || h->n_tokens == h->token_capacity) {
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

/* Which numbers a segment has a stand-in of itself: taken[number]. Of those up to `most` that it can have, all in one
 * pass. NULL: no memory. */
static unsigned char *taken_numbers(const html *h, const segment *s, size_t most) {
    const size_t end = h->tokens[s->last - 1].end;
    unsigned char *taken = calloc(most + 1, 1);
    for (size_t at = h->tokens[s->first].begin; taken && at < end; at++) {
        size_t number = 0, behind = at + 1;
        if (h->data[at] != '{' || behind == end || h->data[behind] == '0') continue;
        for (; behind < end && is_digit(h->data[behind], 0) && number <= most; behind++)
            number = 10 * number + (size_t)(h->data[behind] - '0');
        if (behind < end && h->data[behind] == '}' && number <= most) taken[number] = 1;
    }
    return taken;
}

/* The words that stay get the first numbers from one on whose stand-ins the segment does not have itself. */
static void number_words(html *h, const segment *s) {
    size_t words = 0, number = 0;
    for (size_t i = s->first; i < s->last; i++) words += h->tokens[i].kind == WORD;
    if (!words) return;
    /* As many stand-ins, of three bytes or more, as there is room for leave a number free below this. */
    unsigned char *taken = taken_numbers(h, s, words + (h->tokens[s->last - 1].end - h->tokens[s->first].begin) / 3);
    h->failed |= !taken;
    for (size_t i = s->first; taken && i < s->last; i++) {
        if (h->tokens[i].kind != WORD) continue;
        for (number++; taken[number];) number++;
        h->tokens[i].number = (int)number;
    }
    free(taken);
}

/* The words of the tokens, in which white space is one space; a stand-in for each word that stays. 1 if there is a
 * letter. */
static int write_source(html *h, segment *s) {
    int letters = 0;
    s->source = h->sources.length;
    number_words(h, s);
    for (size_t i = s->first; i < s->last; i++) {
        token *t = &h->tokens[i];
        t->at = h->sources.length - s->source;
        if (t->kind == WORD) text_printf(&h->sources, "{%d}", t->number);
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

static void keep_segment(html *h, const segment *s) {
    segment *more = text_grown(h->segments, &h->segment_capacity, h->n_segments + 1, sizeof *more);
    if (!more) {
        h->failed = 1;
        return;
    }
    h->segments = more;
    h->segments[h->n_segments++] = *s;
}

static void add_segment(html *h, size_t first, size_t last) {
    segment s = { .first = first, .last = last };
    if (first == last || h->failed) return;
    token *begin = &h->tokens[first], *end = &h->tokens[last - 1];
    if (begin->kind == TEXT) begin->begin += blank_begin(h, begin);
    if (end->kind == TEXT) end->end -= blank_end(h, end);
    s.begin = begin->begin, s.end = end->end;
    if (write_source(h, &s)) keep_segment(h, &s);
    else h->sources.length = s.source;
}

/* ---- Names and formulas: one word, markup and all ---- */

enum { NEAR = 16, LONGEST_NAME = 200 }; /* tokens, bytes */

/* The text of tokens (first .. last), as far as it is at most LONGEST_NAME bytes; SIZE_MAX: it is longer. */
static size_t text_inside(const html *h, size_t first, size_t last, char *out) {
    size_t length = 0;
    for (size_t i = first + 1; i < last; i++)
        for (size_t at = h->tokens[i].begin, n; h->tokens[i].kind == TEXT && at < h->tokens[i].end; length += n) {
            if (length + 4 > LONGEST_NAME) return SIZE_MAX;
            at += character(h->data + at, h->tokens[i].end - at, out + length, &n);
        }
    return length;
}

static int is_wordlike(char c) { return is_alnum(c) || (unsigned char)c >= 0x80; }

static int has_wordlike(const char *text, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (is_wordlike(text[i])) return 1;
    return 0;
}

/* An address, @name, #tag. */
static int is_name(const char *text, size_t n) {
    static const char *const begins[] = { "http://", "https://", "www." };
    for (size_t i = 0; i < n; i++)
        if (is_space(text[i])) return 0;
    if (n > 1 && (*text == '@' || *text == '#')) return has_wordlike(text, n) && !memchr(text + 1, *text, n - 1);
    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++)
        if (n > strlen(begins[i]) && !memcmp(text, begins[i], strlen(begins[i]))) return 1;
    const char *sign = n ? memchr(text, '@', n) : NULL;
    return sign && sign > text && memchr(sign, '.', n - (size_t)(sign - text)) != NULL;
}

/* The bytes at the end of a text that an exponent or an index can stand at: a number, or at most two letters. */
static size_t symbol_before(const html *h, const token *t) {
    size_t at = t->end, digits = 0;
    while (at > t->begin && is_wordlike(h->data[at - 1]) && t->end - at < 40)
        digits += (size_t)is_digit(h->data[--at], 0);
    const size_t n = t->end - at;
    return n && (n <= 2 || digits == n) ? n : 0;
}

static size_t symbol_behind(const html *h, const token *t) {
    size_t n = 0, digits = 0;
    while (t->begin + n < t->end && is_wordlike(h->data[t->begin + n]) && n < 40)
        digits += (size_t)is_digit(h->data[t->begin + n++], 0);
    return n <= 2 || digits == n ? n : 0;
}

/* An element with a text of `n` bytes that stands raised behind `before`: it becomes a part of a formula, or a note.
 * `next`: the token behind it. */
static int take_raised(html *h, token *before, token *t, token *next, const char *text, size_t n, size_t *kept) {
    if (before->end != t->begin || memchr(text, ' ', n) || !has_wordlike(text, n)) return 0;
    if (before->kind == TEXT) {
        const size_t symbol = symbol_before(h, before);
        int letters = 0;
        for (size_t i = 0; i < n; i++) letters |= is_wordlike(text[i]) && !is_digit(text[i], 0);
        if (!symbol) {
            if (letters || !is_wordlike(h->data[before->end - 1])) return 0;
            t->kind = SINGLE;
            h->tokens[(*kept)++] = *t;
            return 1;
        }
        t->begin = before->end -= symbol;
        t->kind = WORD, t->formula = 1;
        if (before->begin == before->end) (*kept)--;
        h->tokens[(*kept)++] = *t;
    } else if (before->formula) {
        before->end = t->end;
    } else {
        return 0;
    }
    token *word = &h->tokens[*kept - 1];
    if (next && next->kind == TEXT && next->begin == word->end) {
        const size_t more = symbol_behind(h, next);
        word->end += more, next->begin += more;
    }
    return 1;
}

/* The collected tokens from `first` on, with names and formulas as one. */
static void collapse(html *h, size_t first) {
    size_t kept = first;
    char text[LONGEST_NAME];
    for (size_t i = first; i < h->n_tokens; i++) {
        token t = h->tokens[i];
        if (t.kind == TEXT && t.begin == t.end) continue;
        const size_t last = t.kind == OPEN ? t.partner : i;
        const size_t n = last > i && last - i <= NEAR ? text_inside(h, i, last, text) : SIZE_MAX;
        token *next = last + 1 < h->n_tokens ? &h->tokens[last + 1] : NULL;
        int word = 0;
        if (n != SIZE_MAX) {
            for (size_t k = i + 1; k < last; k++) word |= h->tokens[k].kind == WORD;
            t.end = h->tokens[last].end;
            if (!word && !has_wordlike(text, n)) t.kind = SINGLE;
            else if (!word && is_name(text, n)) t.kind = WORD;
            else if (!word && t.raised && kept > first &&
                     take_raised(h, &h->tokens[kept - 1], &t, next, text, n, &kept)) {
                i = last;
                continue;
            }
        }
        if (t.kind != OPEN || n == SIZE_MAX) {
            if (t.kind != h->tokens[i].kind) i = last;
        } else {
            t.end = h->tokens[i].end;
        }
        h->tokens[kept++] = t;
    }
    h->n_tokens = kept;
}

/* ---- Cutting ---- */

static int push(html *h, size_t first, size_t last, int sentence) {
    if (first >= last) return 1;
    if (h->n_ranges == h->range_capacity) {
        range *more = realloc(h->ranges, (2 * h->n_ranges + 64) * sizeof *more);
        if (!more) return h->failed = 1, 0;
        h->ranges = more, h->range_capacity = 2 * h->n_ranges + 64;
    }
    h->ranges[h->n_ranges++] = (range){ first, last, sentence };
    return 1;
}

static size_t words_before(const html *h, size_t i, size_t all) { return i < h->n_tokens ? h->tokens[i].words : all; }

/* What is at each token, and the words before it. Gives all words. */
static size_t measure(html *h, size_t first) {
    size_t words = 0;
    for (size_t i = first; i < h->n_tokens; i++) {
        token *t = &h->tokens[i];
        int letters = t->kind == WORD;
        t->words = words, t->edge = t->kind == SINGLE;
        if (t->kind == TEXT) {
            t->edge = is_blank_text(h, t);
            for (size_t at = t->begin, n; at < t->end && !letters;) {
                char c[4];
                at += character(h->data + at, t->end - at, c, &n);
                letters = n > 1 ? !is_blank(c, n) : is_letter(c[0]);
            }
        }
        words += (size_t)letters;
    }
    return words;
}

/* Push the elements of a range that stand alone, their neighbours being no words, and what is between them. */
static void divide(html *h, range r, size_t all) {
    const token *t = h->tokens;
    const size_t bottom = h->n_ranges;
    int spoken = 0, left = 0;
    size_t begin = r.first;
    for (size_t i = r.first, end; i < r.last; i = end) {
        end = t[i].kind == OPEN ? t[i].partner + 1 : i + 1;
        spoken |= t[i].kind != OPEN && words_before(h, end, all) > t[i].words;
    }
    for (size_t i = r.first, end; i < r.last; i = end) {
        const int element = t[i].kind == OPEN;
        end = element ? t[i].partner + 1 : i + 1;
        const int words = words_before(h, end, all) > t[i].words;
        int right = 0;
        for (size_t k = end; element && !right && k < r.last && t[k].kind != OPEN; k++)
            right = words_before(h, k + 1, all) > t[k].words;
        if (element && words && !left && !right && (!spoken || t[i].link)) {
            push(h, begin, i, 1);
            push(h, i, end, 0);
            begin = end;
        }
        left = element ? 0 : left || words;
    }
    push(h, begin, r.last, 1);
    for (size_t a = bottom, b = h->n_ranges; a + 1 < b;) { /* the first one is on top */
        const range swap = h->ranges[a];
        h->ranges[a++] = h->ranges[--b], h->ranges[b] = swap;
    }
}

static void add_sentence(html *h, size_t first, size_t last) {
    size_t marks = 0;
    for (size_t i = first; i < last; i++) marks += h->tokens[i].kind != TEXT;
    if (h->wish.whole && marks <= MOST_MARKS) {
        add_segment(h, first, last);
        return;
    }
    for (size_t i = first; i < last; i++)
        if (h->tokens[i].kind == TEXT && !h->tokens[i].edge) add_segment(h, i, i + 1);
}

/* Make segments of what is collected. Markup and white space around all words stay outside. */
static void flush(html *h) {
    pair_up(h->tokens, h->collected, h->n_tokens);
    if (h->wish.whole) collapse(h, h->collected);
    pair_up(h->tokens, h->collected, h->n_tokens);
    const size_t all = measure(h, h->collected);
    push(h, h->collected, h->n_tokens, 0);
    while (h->n_ranges && !h->failed) {
        range r = h->ranges[--h->n_ranges];
        while (r.first < r.last) {
            const token *f = &h->tokens[r.first], *l = &h->tokens[r.last - 1];
            if (f->edge) r.first++;
            else if (l->edge) r.last--;
            else if (f->kind == OPEN && f->partner == r.last - 1) r.first++, r.last--, r.sentence = 0;
            else break;
        }
        if (r.first == r.last || words_before(h, r.last, all) == h->tokens[r.first].words) continue;
        if (r.sentence) add_sentence(h, r.first, r.last);
        else divide(h, r, all);
    }
    h->n_ranges = 0, h->collected = h->n_tokens;
}

static const char INLINE[] = "a abbr acronym b bdi bdo big cite data del dfn em font i ins label mark q s small span "
                             "strike strong sub sup time tt u";
static const char SENTENCE[] = "img wbr input code kbd samp var"; /* inline; the first three have no content */
static const char VOID[] = "area base br col embed hr img input link meta source track wbr";
static const char KEPT[] = "script style pre textarea template svg math noscript code kbd samp var xmp iframe noembed "
                           "noframes";
static const char MUTE[] = "script style pre template svg math noscript xmp iframe noembed noframes";
static const char METAS[] = "description keywords og:title og:description twitter:title twitter:description";
static const char RAW[] = "script style textarea title xmp iframe noembed noframes noscript"; /* no tags inside */

#define BLOCKS                                                                                                        \
    "address article aside blockquote center details dialog dir div dl fieldset figcaption figure footer form h1 h2 " \
    "h3 h4 h5 h6 header hgroup hr main menu nav ol pre search section summary table ul"
#define ROWS "tbody thead tfoot tr"

/* Elements whose end tag may be left out: the start tags and the end tags that end them unless they belong to one of
 * `inside`. */
static const struct {
    const char *name, *starts, *ends, *inside;
} ended[] = {
    { "p", BLOCKS " p", BLOCKS " li dd dt td th body html button caption", "" },
    { "li", "li", "ul ol menu", "ul ol menu" },
    { "dt", "dt dd", "dl", "dl" },
    { "dd", "dt dd", "dl", "dl" },
    { "td", "td th " ROWS, "table " ROWS, "table" },
    { "th", "td th " ROWS, "table " ROWS, "table" },
    { "tr", ROWS, "table tbody thead tfoot", "table" },
    { "option", "option optgroup", "select optgroup datalist", "" },
};

/* ---- Attributes ---- */

/* What programs make a value of is none of ours. */
static int is_template(const char *data, size_t n) {
    for (size_t i = 0; i + 1 < n; i++) {
        if (data[i] == '{' && strchr("%{#", data[i + 1])) return 1;
        if (data[i] == '<' && strchr("?%", data[i + 1])) return 1;
    }
    return 0;
}

/* The value of an attribute as a segment, if it has letters. */
static void add_attribute(html *h, spot at) {
    const token text = { .kind = TEXT, .begin = at.begin, .end = at.end };
    segment s = { .attribute = 1, .begin = at.begin, .end = at.end, .source = h->sources.length };
    int letters = 0;
    if (!at.quoted || h->failed || is_template(h->data + at.begin, at.end - at.begin)) return;
    s.begin += blank_begin(h, &text);
    if (s.begin < s.end) s.end -= blank_end(h, &text);
    for (size_t i = s.begin, n; i < s.end;) {
        char c[4];
        i += character(h->data + i, s.end - i, c, &n);
        letters |= n > 1 ? !is_blank(c, n) : is_letter(c[0]);
        text_append(&h->sources, c, n);
    }
    s.length = h->sources.length - s.source;
    size_t *more =
        letters ? text_grown(h->attributes, &h->attribute_capacity, h->n_attributes + 1, sizeof *more) : NULL;
    if (!letters) h->sources.length = s.source;
    else if (!more) h->failed = 1;
    else {
        h->attributes = more;
        h->attributes[h->n_attributes++] = h->n_segments;
        keep_segment(h, &s);
    }
}

static int spot_is(const html *h, const tag *t, int which, const char *list) {
    return is_one_of(list, h->data + t->spots[which].begin, t->spots[which].end - t->spots[which].begin);
}

/* 1 if the first part of a language's code is the same: en and en-GB. */
static int same_language(const char *a, size_t n, const char *b) {
    size_t i = 0;
    while (i < n && a[i] != '-' && a[i] != '_' && b[i] && small(a[i]) == small(b[i])) i++;
    return i && (i == n || a[i] == '-' || a[i] == '_') && (!b[i] || b[i] == '-' || b[i] == '_');
}

/* The attributes of a tag that a reader sees, in their order. */
static void take_attributes(html *h, const tag *t) {
    const char *name = h->data + t->name;
    const size_t n = t->name_end - t->name;
    const int input = is_one_of("input", name, n), html_tag = is_one_of("html", name, n);
    int wanted[N_SPOTS] = { [ALT] = !input || spot_is(h, t, TYPE, "image"), 1, 1, 1 };
    wanted[VALUE] = input && spot_is(h, t, TYPE, "submit button reset");
    wanted[CONTENT] = is_one_of("meta", name, n) && (spot_is(h, t, NAME, METAS) || spot_is(h, t, PROPERTY, METAS));
    for (size_t at = 0;;) {
        int next = -1;
        for (int i = 0; i <= CONTENT; i++)
            if (wanted[i] && t->spots[i].end && t->spots[i].begin >= at &&
                (next < 0 || t->spots[i].begin < t->spots[next].begin))
                next = i;
        if (next < 0) break;
        add_attribute(h, t->spots[next]);
        wanted[next] = 0, at = t->spots[next].begin;
    }
    const spot *lang = &t->spots[LANG];
    if (html_tag && h->wish.target && !h->lang.end && lang->end > lang->begin &&
        (!h->wish.source[0] || same_language(h->data + lang->begin, lang->end - lang->begin, h->wish.source)))
        h->lang = *lang;
}

/* ---- Markup ---- */

/* Behind the end tag of an element that is kept, whose content begins at `at`; before what ends it without one. */
static size_t end_of_kept(const html *h, size_t at, const char *name, size_t n) {
    const char *data = h->data;
    const size_t length = h->length;
    const char *starts = "", *ends = "", *inside = "";
    for (size_t i = 0; i < sizeof ended / sizeof *ended; i++)
        if (!h->wish.xml && is_one_of(ended[i].name, name, n))
            starts = ended[i].starts, ends = ended[i].ends, inside = ended[i].inside;
    for (size_t depth = 1, nested = 0; at < length;) {
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
        if (!nested && depth == 1 && is_one_of(closes ? ends : starts, data + t.name, t.name_end - t.name)) return at;
        if (is_one_of(inside, data + t.name, t.name_end - t.name)) nested += closes ? (size_t)-1 : 1;
        at = t.end;
        if (same == n && t.name_end - t.name == n && !(h->wish.xml ? t.slash : t.empty) && !nested)
            depth += closes ? (size_t)-1 : 1;
        if (!depth) return at;
        if (!closes && !h->wish.xml && is_one_of(RAW, data + t.name, t.name_end - t.name) && same < n)
            at = end_tag(data, length, at, data + t.name, t.name_end - t.name);
    }
    return length;
}

/* A tag of XML: any element may stand in a sentence; what its neighbours are tells (divide). */
static size_t take_element(html *h, size_t at, const tag *t, int closes) {
    if (closes || t->slash || !t->kept) {
        add(h, closes ? CLOSE : t->slash ? SINGLE : OPEN, at, t->end);
        return t->end;
    }
    const size_t end = end_of_kept(h, t->end, h->data + t->name, t->name_end - t->name);
    add(h, WORD, at, end);
    return end;
}

/* What is no tag: a comment goes with its sentence, a declaration does not. */
static size_t take_other(html *h, size_t at) {
    static const char cdata[] = "<![CDATA[";
    const char *data = h->data;
    size_t end = end_of_other(data, h->length, at);
    if (h->wish.xml && h->length - at >= sizeof cdata - 1 && !memcmp(data + at, cdata, sizeof cdata - 1))
        end = behind(data, h->length, at, "]]>");
    if (h->wish.xml && data[at + 1] == '?') end = behind(data, h->length, at, "?>");
    if (data[at + 1] == '!' && end - at > 3 && data[at + 2] == '-') add(h, SINGLE, at, end);
    else flush(h);
    return end;
}

/* A tag that ends a sentence. */
static size_t take_block(html *h, const tag *t, int closes) {
    const char *name = h->data + t->name;
    const size_t n = t->name_end - t->name;
    flush(h);
    if (!closes && is_one_of("title", name, n)) { /* text without tags */
        const size_t end = end_tag(h->data, h->length, t->end, name, n);
        add(h, TEXT, t->end, end);
        flush(h);
        return end;
    }
    return is_one_of("plaintext", name, n) ? h->length : t->end;
}

/* The tag or the like at `at`, a <; gives where the next token begins. */
static size_t take_markup(html *h, size_t at) {
    const char *data = h->data;
    const int closes = data[at + 1] == '/';
    if (!is_letter(data[at + 1 + (size_t)closes])) return take_other(h, at);
    const tag t = read_tag(data, h->length, at + 1 + (size_t)closes);
    const char *name = data + t.name;
    const size_t n = t.name_end - t.name;
    if (h->wish.xml) return take_element(h, at, &t, closes);
    const int in_sentence = is_one_of(INLINE, name, n) || is_one_of(SENTENCE, name, n);
    const int empty = t.empty || is_one_of(VOID, name, n);
    size_t end = t.end;
    if (!closes && !t.kept && !is_one_of(MUTE, name, n) && !(in_sentence && is_one_of(KEPT, name, n)))
        take_attributes(h, &t);
    if (!closes && !empty && (t.kept || is_one_of(KEPT, name, n))) {
        end = is_one_of(RAW, name, n) ? end_tag(data, h->length, end, name, n) : end;
        end = end_of_kept(h, end, name, n);
        if (in_sentence) add(h, WORD, at, end);
        else flush(h);
        return end;
    }
    if (!in_sentence) return take_block(h, &t, closes);
    add(h, empty ? SINGLE : closes ? CLOSE : OPEN, at, end);
    if (!h->failed) {
        h->tokens[h->n_tokens - 1].link = is_one_of("a label", name, n);
        h->tokens[h->n_tokens - 1].raised = is_one_of("sup sub", name, n);
    }
    return end;
}

html *html_read(const char *data, size_t length, const html_wish *wish) {
    html *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    h->data = data, h->length = length, h->wish = *wish;
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
    free(h->tokens), free(h->segments), free(h->attributes), free(h->ranges);
    text_bytes_free(&h->sources);
    free(h);
}

size_t html_count(const html *h) { return h->n_segments; }

const char *html_source(const html *h, size_t i, size_t *length) {
    *length = h->segments[i].length;
    return h->sources.data + h->segments[i].source;
}

/* ---- Writing ----
 * A tag in a sentence goes where its words went, and its attributes with it: what html_place makes of the sentence has
 * their numbers in their places, between two bytes that no text has. */

enum { MARK = 0xff };

/* Bytes of the document, the language in its place. */
static void put_raw(const html *h, size_t from, size_t to, text_bytes *out) {
    const spot *lang = &h->lang;
    if (lang->end && lang->begin >= from && lang->end <= to) {
        text_append(out, h->data + from, lang->begin - from);
        for (const char *c = h->wish.target; *c; c++) text_append(out, *c == '_' ? "-" : c, 1);
        from = lang->end;
    }
    text_append(out, h->data + from, to - from);
}

/* Bytes of a tag in a sentence, with the numbers of its attributes. */
static void put_tag(const html *h, size_t from, size_t to, text_bytes *out) {
    size_t low = 0, high = h->n_attributes;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (h->segments[h->attributes[middle]].begin < from) low = middle + 1;
        else high = middle;
    }
    for (; low < h->n_attributes && h->segments[h->attributes[low]].begin < to; low++) {
        const segment *s = &h->segments[h->attributes[low]];
        text_append(out, h->data + from, s->begin - from);
        text_printf(out, "%c%zu%c", MARK, h->attributes[low], MARK);
        from = s->end;
    }
    text_append(out, h->data + from, to - from);
}

typedef struct writing {
    const html *h;
    const text_bytes *(*translation)(const void *user, size_t segment);
    const void *user;
    text_bytes *out;
} writing;

/* What became of a segment, with what became of its attributes. */
static void put_translated(const writing *w, size_t i) {
    const text_bytes *text = w->translation(w->user, i);
    for (size_t at = 0; at < text->length;) {
        const char *mark = memchr(text->data + at, MARK, text->length - at);
        const size_t n = mark ? (size_t)(mark - text->data) - at : text->length - at;
        char *end = NULL;
        text_append(w->out, text->data + at, n);
        if (!mark) break;
        const unsigned long long number = strtoull(mark + 1, &end, 10);
        if ((unsigned char)*end == MARK && number < w->h->n_segments && w->h->segments[number].attribute) {
            const text_bytes *value = w->translation(w->user, (size_t)number);
            if (value->length) text_append(w->out, value->data, value->length);
        }
        at = (size_t)(end - text->data) + ((unsigned char)*end == MARK);
    }
}

void html_write(const html *h, const text_bytes *(*translation)(const void *user, size_t segment), const void *user,
                text_bytes *out) {
    const writing w = { h, translation, user, out };
    size_t at = 0;
    for (size_t i = 0, a = 0; i < h->n_segments || a < h->n_attributes;) { /* sentences and attributes in their order */
        while (i < h->n_segments && h->segments[i].attribute) i++;
        const int sentence =
            i < h->n_segments && (a == h->n_attributes || h->segments[i].begin <= h->segments[h->attributes[a]].begin);
        if (!sentence && a == h->n_attributes) break;
        const size_t which = sentence ? i++ : h->attributes[a++];
        const segment *s = &h->segments[which];
        if (s->begin < at) continue; /* an attribute that went with its sentence */
        put_raw(h, at, s->begin, out);
        put_translated(&w, which);
        at = s->end;
    }
    put_raw(h, at, h->length, out);
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
    int wrong;       /* a pair of tags lost its words, or a word that stays was lost */
    size_t seen;     /* byte of the document behind the reference that was found last */
    size_t misses;   /* what looks like a reference and is none, */
    size_t searched; /* and the bytes that those which came out of their order were looked for in */
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
    if (at && is_wordlike(p->h->sources.data[p->s->source + at - 1])) { /* a note at a word */
        for (const moetext_link *l = p->links; l < p->links + p->n_links; l++)
            if (l->source_begin < at && (!before || l->source_end > before->source_end ||
                                         (l->source_end == before->source_end && l->target_end > before->target_end)))
                before = l;
        if (before && before->source_end >= at) return before->target_end;
        before = NULL;
    }
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

/* Where the stand-in of a word that stays is; begin is end: nowhere. */
static place word_place(const placing *p, size_t i) {
    char name[16];
    const size_t n = (size_t)snprintf(name, sizeof name, "{%d}", p->h->tokens[i].number);
    const char *found = p->length ? memmem(p->text, p->length, name, n) : NULL;
    const size_t at = found ? (size_t)(found - p->text) : 0;
    return (place){ i, at, at + (found ? n : 0) };
}

/* The place of a token; a pair stands around all that is inside it, and nothing in the middle of a stand-in. */
static place whole_place(const placing *p, size_t i) {
    const token *t = p->h->tokens;
    if (t[i].kind == WORD) return word_place(p, i);
    place found = place_of(p, i);
    const size_t last = t[i].kind == OPEN ? t[i].partner : i;
    for (size_t k = i + 1; k < last; k++) {
        if (t[k].kind != OPEN && t[k].kind != WORD) continue;
        const place one = t[k].kind == WORD ? word_place(p, k) : place_of(p, k);
        if (one.begin < found.begin) found.begin = one.begin;
        if (one.end > found.end) found.end = one.end;
    }
    for (size_t k = p->s->first; k < p->s->last; k++) {
        if (t[k].kind != WORD) continue;
        const place one = word_place(p, k);
        const int inside = k > i && k < last;
        if (found.begin > one.begin && found.begin < one.end) found.begin = inside ? one.begin : one.end;
        if (found.end > one.begin && found.end < one.end) found.end = inside ? one.end : one.begin;
    }
    if (found.end < found.begin) found.end = found.begin;
    return found;
}

/* Whether a segment has a reference that is not known: looked for from where the one before it was, since they come in
 * their order, mostly; and for a few that do not, from the beginning. */
static int had_reference(placing *p, const char *name, size_t n) {
    const char *data = p->h->data;
    const size_t begin = p->s->begin, end = p->s->end, from = p->seen > begin ? p->seen : begin;
    if (p->misses >= 64 || p->searched >= 64 * (end - begin)) return 0;
    const char *found = memmem(data + from, end - from, name, n);
    if (!found && from > begin) {
        found = memmem(data + begin, end - begin, name, n);
        p->searched += end - begin;
    }
    p->misses += !found;
    if (found) p->seen = (size_t)(found - data) + n;
    return found != NULL;
}

/* A text as HTML. A reference that is not known was shown to the translator as it is written, and stays so. */
static void escape(placing *p, const char *text, size_t length) {
    for (size_t i = 0, n; i < length; i++) {
        const char *name = text[i] == '&' ? "&amp;" : text[i] == '<' ? "&lt;" : text[i] == '>' ? "&gt;" : NULL;
        if (p->s->attribute && text[i] == '"') name = "&quot;";
        if (p->s->attribute && text[i] == '\'') name = "&#x27;";
        n = text[i] == '&' ? reference_length(text + i, length - i) : 0;
        if (n && had_reference(p, text + i, n)) {
            text_append(p->out, text + i, n);
            i += n - 1;
            continue;
        }
        if (name) text_append_string(p->out, name);
        else text_append(p->out, text + i, 1);
    }
}

static void put_token(const placing *p, size_t i) {
    const token *t = &p->h->tokens[i];
    put_tag(p->h, t->begin, t->end, p->out);
}

/* Whether there was a word between the tags of a pair, or a number. */
static int held_words(const placing *p, size_t first, size_t last) {
    const token *t = p->h->tokens;
    for (size_t i = first; i < last; i++) {
        if (t[i].kind == WORD) return 1;
        if (t[i].kind == TEXT && has_wordlike(p->h->sources.data + p->s->source + t[i].at, t[i].stop - t[i].at))
            return 1;
    }
    return 0;
}

/* White space stood on both sides of a token. */
static int is_spaced(const html *h, const token *t) {
    return t->begin && t->end < h->length && is_space(h->data[t->begin - 1]) && is_space(h->data[t->end]);
}

/* The words [begin .. end) of the translation with the marks among tokens [first .. last). Marks that would cross stand
 * one behind the other. */
static void put_range(placing *p, size_t first, size_t last, size_t begin, size_t end) { /* NOLINT(misc-no-recursion) */
    place places[MOST_MARKS];
    const token *t = p->h->tokens;
    size_t n = 0, at = begin;
    for (size_t i = first; i < last; i++) {
        if (t[i].kind == TEXT) continue;
        place one = whole_place(p, i);
        size_t before = n++;
        for (; before && places[before - 1].begin > one.begin; before--) places[before] = places[before - 1];
        places[before] = one;
        if (t[i].kind == OPEN) i = t[i].partner;
    }
    for (size_t i = 0; i < n; i++) {
        size_t from = places[i].begin, to = places[i].end;
        if (from < at) from = at;
        if (from > end) from = end;
        if (to < from) to = from;
        if (to > end) to = end;
        escape(p, p->text + at, from - at);
        at = to;
        const token *mark = &t[places[i].token];
        const int spaced = mark->kind == SINGLE && is_spaced(p->h, mark) && from && to < p->length;
        if (spaced && p->text[from - 1] != ' ') text_append(p->out, " ", 1);
        put_token(p, places[i].token);
        if (spaced && p->text[to] != ' ') text_append(p->out, " ", 1);
        if (mark->kind == WORD) p->wrong |= from == to || from != places[i].begin || to != places[i].end;
        if (mark->kind != OPEN) continue;
        p->wrong |= held_words(p, places[i].token + 1, mark->partner) != has_wordlike(p->text + from, to - from);
        put_range(p, places[i].token + 1, mark->partner, from, to);
        put_token(p, mark->partner);
    }
    escape(p, p->text + at, end - at);
}

int html_place(const html *h, size_t i, const char *text, size_t length, const moetext_link *links, size_t n_links,
               text_bytes *out) {
    placing p = { .h = h, .s = &h->segments[i], .text = text, .length = length };
    const size_t begin = out->length;
    p.links = links, p.n_links = n_links, p.out = out;
    if (p.s->attribute) { /* one that is still the same keeps its bytes */
        const int same = length == p.s->length && !memcmp(text, h->sources.data + p.s->source, length);
        if (same) text_append(out, h->data + p.s->begin, p.s->end - p.s->begin);
        else escape(&p, text, length);
        return 1;
    }
    put_range(&p, p.s->first, p.s->last, 0, length);
    if (p.wrong) out->length = begin;
    return !p.wrong;
}

/* ---- Piece by piece ---- */

/* 1 if token i of a segment is a text with letters: source bytes [*begin .. *end), without the spaces at its ends. */
static int is_piece(const html *h, const segment *s, size_t i, size_t *begin, size_t *end) {
    const token *t = &h->tokens[i];
    const char *source = h->sources.data + s->source;
    int letters = 0;
    *begin = t->at, *end = t->stop;
    while (*begin < *end && source[*begin] == ' ') ++*begin;
    while (*end > *begin && source[*end - 1] == ' ') --*end;
    for (size_t at = *begin; at < *end; at++) letters |= is_letter(source[at]) || (unsigned char)source[at] >= 0x80;
    return t->kind == TEXT && letters;
}

void html_pieces(const html *h, size_t i, text_bytes *out) {
    const segment *s = &h->segments[i];
    size_t begin, end;
    for (size_t k = s->first, n = 0; k < s->last; k++) {
        if (!is_piece(h, s, k, &begin, &end)) continue;
        if (n++) text_append(out, "\n", 1);
        text_append(out, h->sources.data + s->source + begin, end - begin);
    }
}

void html_place_pieces(const html *h, size_t i, const char *text, size_t length, text_bytes *out) {
    const segment *s = &h->segments[i];
    size_t begin, end, lines = 1, pieces = 0;
    placing p = { .h = h, .s = s, .out = out };
    for (size_t at = 0; at < length; at++) lines += text[at] == '\n';
    for (size_t k = s->first; k < s->last; k++) pieces += (size_t)is_piece(h, s, k, &begin, &end);
    for (size_t k = s->first; k < s->last; k++) {
        const token *t = &h->tokens[k];
        if (lines != pieces || !is_piece(h, s, k, &begin, &end)) {
            put_tag(h, t->begin, t->end, out);
            continue;
        }
        const char *newline = memchr(text, '\n', length);
        const size_t n = newline ? (size_t)(newline - text) : length;
        text_append(out, h->data + t->begin, blank_begin(h, t));
        escape(&p, text, n);
        text_append(out, h->data + t->end - blank_end(h, t), blank_end(h, t));
        text += n + (newline != NULL), length -= n + (newline != NULL);
    }
}
