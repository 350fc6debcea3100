/* html.c - HTML and XML: cuts a document into segments and puts their translations back (moetext.h).
 *
 * Contents
 *   1. Tokens       texts, tags and other markup
 *   2. Characters   references such as &amp;
 *   3. Segments     the texts that the translator receives
 *   4. Placing      restore the markup in a translation
 *
 * The tokeniser follows the HTML standard but builds no tree. (In libraries that report byte ranges, the tree of a
 * hostile page has quadratic size.)
 */
#define _GNU_SOURCE /* memmem */
#include "tools/text/bytes.h"
#include "tools/text/moetext.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

typedef moetext_html html;

/* ==== 1. Tokens =========================================================================================
 * Implements the tokeniser states of the HTML standard that decide where a token ends. */

typedef enum kind { TEXT, OPEN, CLOSE, SINGLE, WORD } kind;

typedef struct token {
    kind kind;    /* SINGLE is an unpaired tag, WORD is markup or code that is kept as one word */
    kind half;    /* for a SINGLE, OPEN or CLOSE if the other tag of its pair is missing */
    int link;     /* 1 for a link or label, which may be a separate segment inside a sentence */
    int raised;   /* 1 for a superscript or subscript */
    int formula;  /* for a WORD, 1 if it contains an exponent or index */
    int edge;     /* 1 for white space or an unpaired tag, excluded from both ends of a segment */
    int glued;    /* for a TEXT, 1 if it is a part of a word that a tag interrupts */
    int moved;    /* for a tag, 1 if it was moved to an end of the word that it interrupts */
    int initial;  /* for a CLOSE, number of letters of the word before it that its pair encloses; 0 if all */
    int number;   /* N in the mark {N}, <xN> or <xN/>; 0 if it has none */
    size_t words; /* number of preceding collected tokens with words */
    size_t begin, end;
    size_t partner; /* for OPEN and CLOSE, index of the other tag */
    size_t at;      /* position in the segment's source */
    size_t stop;    /* for a TEXT, end in the segment's source */
} token;

static int is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\f' || c == '\r'; }
static int is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
static char small(char c) { return (char)(c >= 'A' && c <= 'Z' ? c + 32 : c); }

static int is_same(const char *a, const char *b, size_t n) {
    while (n && small(*a) == small(*b)) a++, b++, n--;
    return !n;
}

/* Return 1 if data[0 .. n) is one of the words of a list, ignoring case. */
static int is_one_of(const char *list, const char *data, size_t n) {
    char word[32]; /* longer than any listed word */
    if (!n || n > sizeof word) return 0;
    for (size_t i = 0; i < n; i++) word[i] = small(data[i]);
    return text_is_listed(list, word, n);
}

/* Attributes of interest. Readers see the first N_SHOWN in the elements of shown_in, "" for all elements. */
enum {
    TITLE,
    PLACEHOLDER,
    ARIA_LABEL,
    ARIA_DESCRIPTION,
    ARIA_ROLE,
    ARIA_VALUE,
    ARIA_PLACEHOLDER,
    LABEL,
    SUMMARY,
    ABBR
};
enum { ALT = ABBR + 1, VALUE, CONTENT, N_SHOWN, TYPE = N_SHOWN, NAME, PROPERTY, ITEM, HEADER, LANG, XML_LANG, N_SPOTS };
static const char *const spot_names[N_SPOTS] = {
    "title",
    "placeholder",
    "aria-label",
    "aria-description",
    "aria-roledescription",
    "aria-valuetext",
    "aria-placeholder",
    "label",
    "summary",
    "abbr",
    "alt",
    "value",
    "content",
    "type",
    "name",
    "property",
    "itemprop",
    "http-equiv",
    "lang",
    "xml:lang",
};
static const char *const shown_in
    [N_SHOWN] = { [LABEL] = "optgroup option track menu menuitem command", [SUMMARY] = "table", [ABBR] = "td th" };

typedef struct spot { /* value of an attribute; all zero if absent */
    size_t begin, end;
    int quoted;
} spot;

typedef struct tag {
    const char *name;   /* [length] */
    size_t length, end; /* `end` is the offset after '>', or the end of the document */
    int kept;           /* 1 if translate="no" or class="notranslate" */
    int slash;          /* 1 if the tag ends in "/>" */
    int empty;          /* 1 for svg or math that ends in "/>"; in other tags, HTML ignores the slash */
    spot spots[N_SPOTS];
} tag;

/* Return 1 if a class list contains "notranslate". */
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

/* Parse the tag with its name at `at`. */
static tag read_tag(const char *data, size_t length, size_t at) {
    tag t = { .name = data + at };
    for (; at < length && !is_space(data[at]) && data[at] != '/' && data[at] != '>'; at++) t.length++;
    while (at < length && data[at] != '>') {
        if (is_space(data[at]) || data[at] == '/') {
            at++;
            continue;
        }
        const size_t name = at++; /* a name may start with = */
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
        t.kept |= is_one_of("translate", data + name, name_end - name) && is_one_of("no", data + value, at - value);
        t.kept |= is_one_of("class", data + name, name_end - name) && has_class(data + value, at - value);
        at += quote && at < length;
    }
    t.end = at + (at < length);
    t.slash = at < length && data[at - 1] == '/';
    t.empty = t.slash && is_one_of("svg math", t.name, t.length);
    return t;
}

static int is_tag(const tag *t, const char *list) { return is_one_of(list, t->name, t->length); }

/* Return the position after the next `what`, or the end of the document. */
static size_t after(const char *data, size_t length, size_t at, const char *what) {
    const size_t n = strlen(what);
    const char *found = at < length ? memmem(data + at, length - at, what, n) : NULL;
    return found ? (size_t)(found - data) + n : length;
}

/* Return the start of the next end tag with this name, or the end of the document. */
static size_t end_tag(const char *data, size_t length, size_t at, const char *name, size_t n) {
    for (; at + 2 + n <= length; at++) {
        if (data[at] != '<' || data[at + 1] != '/' || !is_same(data + at + 2, name, n)) continue;
        const char next = at + 2 + n < length ? data[at + 2 + n] : '>';
        if (is_space(next) || next == '/' || next == '>') return at;
    }
    return length;
}

enum { LONGEST_CODE = 2000 }; /* maximum bytes of code between <% and %> */

/* Return the end of the code of a template at data[at], <% ... %> (ERB, EJS, JSP), or 0. */
static size_t end_of_code(const char *data, size_t length, size_t at) {
    const size_t most = length - at < LONGEST_CODE ? length : at + LONGEST_CODE;
    if (!text_begins_with(data + at, length - at, "<%")) return 0;
    const size_t end = after(data, most, at + 2, "%>");
    return end < most || text_ends_with(data, most, "%>") ? end : 0;
}

/* Return 1 if the '<' at data[at] starts markup. */
static int begins_markup(const char *data, size_t length, size_t at) {
    const char next = at + 1 < length ? data[at + 1] : 0;
    if (next == '%') return end_of_code(data, length, at) > 0;
    return is_letter(next) || next == '!' || next == '?' || (next == '/' && at + 2 < length);
}

/* Return the end of the comment, declaration or processing instruction at `at`. */
static size_t end_of_other(const char *data, size_t length, size_t at) {
    if (text_begins_with(data + at, length - at, "<%")) return end_of_code(data, length, at);
    if (text_prefix("<?php <?=", data + at, length - at)) return after(data, length, at, "?>"); /* skip '>' in PHP */
    if (!text_begins_with(data + at, length - at, "<!--")) return after(data, length, at, ">");
    if (at + 4 < length && data[at + 4] == '>') return at + 5;
    /* Search for both ends at once. Searching for a rare end would read the rest of the document for each comment. */
    for (size_t end = at + 4 - (at + 5 < length && data[at + 4] == '-'); end + 3 <= length; end++) {
        if (data[end] != '-' || data[end + 1] != '-') continue;
        if (data[end + 2] == '>') return end + 3;
        if (end >= at + 4 && text_begins_with(data + end + 2, length - end - 2, "!>")) return end + 4;
    }
    return length;
}

/* ==== 2. Characters =====================================================================================
 * Decodes the named characters common in Latin text. Unknown references are passed through as written. */

static const char latin[] = /* U+00A0 to U+00FF in order */
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
    /* entries up to "quot" are also valid without a semicolon */
    { "AMP", '&' },       { "LT", '<' },        { "GT", '>' },        { "QUOT", '"' },      { "COPY", 0xa9 },
    { "REG", 0xae },      { "amp", '&' },       { "lt", '<' },        { "gt", '>' },        { "quot", '"' },
    { "apos", '\'' },     { "OElig", 0x152 },   { "oelig", 0x153 },   { "Scaron", 0x160 },  { "scaron", 0x161 },
    { "Yuml", 0x178 },    { "ensp", 0x2002 },   { "emsp", 0x2003 },   { "thinsp", 0x2009 }, { "ndash", 0x2013 },
    { "mdash", 0x2014 },  { "lsquo", 0x2018 },  { "rsquo", 0x2019 },  { "sbquo", 0x201a },  { "ldquo", 0x201c },
    { "rdquo", 0x201d },  { "bdquo", 0x201e },  { "dagger", 0x2020 }, { "bull", 0x2022 },   { "hellip", 0x2026 },
    { "permil", 0x2030 }, { "lsaquo", 0x2039 }, { "rsaquo", 0x203a }, { "euro", 0x20ac },   { "trade", 0x2122 },
    { "minus", 0x2212 },
};

/* Find a whole name, or its longest prefix that is valid without a semicolon. Return its length. */
static size_t find_name(const char *name, size_t n, int whole, uint32_t *code) {
    enum { LAST_PREFIX = 10, ALL = sizeof others / sizeof *others };
    const char *word = latin;
    size_t best = 0;
    for (size_t i = 0; *word; i++) {
        const char *known = i < ALL ? others[i].name : word;
        const size_t length = strcspn(known, " ");
        if (i >= ALL) word += length + (word[length] == ' ');
        if (whole ? length != n : length > n || length <= best || (i >= LAST_PREFIX && i < ALL)) continue;
        if (memcmp(known, name, length) == 0)
            best = length, *code = i < ALL ? others[i].code : (uint32_t)(0xa0 + i - ALL);
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

/* Return the length of the reference, such as &name; or &#1;, at the start of data, or 0. */
static size_t reference_length(const char *data, size_t length) {
    size_t at = length > 1 && data[1] == '#' ? 2 : 1;
    while (at < length && at < 40 && is_alnum(data[at])) at++;
    return at > 2 && at < length && data[at] == ';' ? at + 1 : 0;
}

/* Decode the reference at data[0], and set *n to its length in bytes. Return 0 for an unknown reference. */
static uint32_t reference(const char *data, size_t length, size_t *n) {
    if (length < 3 || data[0] != '&') return 0;
    if (data[1] == '#') return numbered(data, length, n);
    size_t end = 1;
    while (end < length && end < 40 && is_alnum(data[end])) end++;
    uint32_t code = 0;
    if (end < length && data[end] == ';' && find_name(data + 1, end - 1, 1, &code)) return *n = end + 1, code;
    *n = 1 + find_name(data + 1, end - 1, 0, &code);
    return code;
}

/* Decode the first character of data[0 .. length) to out[*n]. Return the number of bytes read. */
static size_t character(const char *data, size_t length, char out[4], size_t *n) {
    size_t read = 1;
    const uint32_t code = reference(data, length, &read);
    if (code) return *n = (size_t)utf8proc_encode_char((int32_t)code, (utf8proc_uint8_t *)out), read;
    read = text_utf8_next(data, length, 0);
    memcpy(out, data, *n = read < 4 ? read : 4);
    return *n;
}

static utf8proc_category_t category_of(const char *c, size_t n) {
    utf8proc_int32_t code = (unsigned char)*c;
    if (n > 1) utf8proc_iterate((const utf8proc_uint8_t *)c, (utf8proc_ssize_t)n, &code);
    return utf8proc_category(code);
}

enum { LETTERS = 1, WORDLIKE = 2 }; /* bits for the contents of a text: has letters; has letters or digits */

/* Return the contents of a character: 0, WORDLIKE or LETTERS | WORDLIKE. */
static int contents_of(const char *c, size_t n) {
    const utf8proc_category_t category = category_of(c, n);
    if (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) return LETTERS | WORDLIKE;
    return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO ? WORDLIKE : 0;
}

/* Return the contents of decoded text. */
static int contents(const char *text, size_t length) {
    int found = 0;
    for (size_t at = 0, next; at < length && found != (LETTERS | WORDLIKE); at = next) {
        next = text_utf8_next(text, length, at);
        found |= contents_of(text + at, next - at);
    }
    return found;
}

/* ==== 3. Segments =======================================================================================
 * Collects tokens up to the next block tag, then divides them into segments. */

enum {
    MOST_MARKS = 64,                  /* limit per segment; placing marks is recursive and takes quadratic time */
    MOST_TOKENS = 4 * MOST_MARKS + 1, /* two marks have at most three texts between them, including parts of words */
};

typedef struct segment {
    int attribute;         /* 1 for the value of an attribute, which has no tokens */
    size_t begin, end;     /* the bytes of the document that the translation replaces */
    size_t first, last;    /* tokens [first .. last) */
    size_t source, length; /* position in html.sources */
} segment;

typedef struct range {
    size_t first, last; /* tokens */
    int sentence;       /* 1 if the range must not be divided */
} range;

struct moetext_html {
    const char *data;
    size_t length;
    moetext_html_options options;
    int failed;
    text_bytes language; /* of the page: options.source, or as stated in the page */
    spot *languages;     /* [n_languages] values of attributes, replaced by options.target */
    size_t n_languages, language_capacity;
    size_t foreign; /* depth of svg elements, whose tags may end in "/>" */
    token *tokens;  /* tokens of all segments, then the collected tokens */
    size_t n_tokens, token_capacity, collected;
    segment *segments;
    size_t n_segments, segment_capacity;
    size_t *attributes; /* [n_attributes] segment numbers of the attributes */
    size_t n_attributes, attribute_capacity;
    text_bytes sources, out; /* `out` is the text that the last call returned */
    range *ranges;           /* stack of ranges to divide */
    size_t n_ranges, range_capacity;
};

/* Append an item to an array of *n items. */
static void append(html *h, void *array, size_t *n, size_t *capacity, const void *item, size_t size) {
    if (!h->failed) h->failed = text_add(array, n, capacity, item, 1, size, NULL) != MOE_OK;
}

static void add(html *h, kind what, size_t begin, size_t end) {
    token *last = h->n_tokens > h->collected ? &h->tokens[h->n_tokens - 1] : NULL;
    if (begin == end) return;
    if (last && what == TEXT && last->kind == TEXT && last->end == begin && !last->glued) {
        last->end = end;
        return;
    }
    const token t = { .kind = what, .begin = begin, .end = end };
    append(h, &h->tokens, &h->n_tokens, &h->token_capacity, &t, sizeof t);
}

/* Return the length of the letters that begin a text, or end it if `back` is 1, in scripts with capitals; these scripts
 * write spaces between words. */
static size_t cased_bytes(const html *h, size_t begin, size_t end, int back) {
    size_t at = back ? end : begin;
    while (begin < end) {
        const size_t from = back ? text_utf8_cut(h->data, h->length, end - 1) : begin;
        const size_t to = back ? end : text_utf8_next(h->data, end, begin);
        utf8proc_int32_t code = (unsigned char)h->data[from];
        if (to - from > 1)
            utf8proc_iterate((const utf8proc_uint8_t *)h->data + from, (utf8proc_ssize_t)(to - from), &code);
        if (utf8proc_tolower(code) == utf8proc_toupper(code)) break;
        at = back ? (end = from) : (begin = to);
    }
    return at;
}

/* Add a text. If a tag interrupts a word, the parts of the word become separate tokens for whole_words(). */
static void add_text(html *h, size_t begin, size_t end) {
    const size_t n = h->n_tokens;
    token *last = n ? &h->tokens[n - 1] : NULL;
    size_t left = n; /* the text that precedes the tags before this text */
    while (left > h->collected && left + 4 > n && h->tokens[left - 1].kind == CLOSE && !last->raised) left--;
    if (left == n && n > h->collected && last->kind == OPEN && !last->raised) left--;
    token *word = left < n && left > h->collected ? &h->tokens[left - 1] : NULL;
    const size_t head = word && word->kind == TEXT ? cased_bytes(h, begin, end, 0) : begin;
    const size_t tail = head > begin ? cased_bytes(h, word->begin, word->end, 1) : 0;
    if (head > begin && tail < word->end && last->kind == CLOSE) {
        const token part = { .kind = TEXT, .begin = begin, .end = head, .glued = 1 };
        append(h, &h->tokens, &h->n_tokens, &h->token_capacity, &part, sizeof part);
        begin = head;
    } else if (head > begin && tail < word->end && tail > word->begin) {
        const token moved = *last, part = { .kind = TEXT, .begin = tail, .end = word->end, .glued = 1 };
        word->end = tail;
        *last = part;
        append(h, &h->tokens, &h->n_tokens, &h->token_capacity, &moved, sizeof moved);
    } else if (head > begin && tail == word->begin) word->glued = 1;
    add(h, TEXT, begin, end);
}

/* Pair tags by their order, ignoring names; unpaired tags become SINGLE. `partner` links the stack of open tags. */
static void pair_up(token *t, size_t first, size_t last) {
    size_t top = SIZE_MAX;
    for (size_t i = first; i < last; i++) {
        if (t[i].kind == OPEN) t[i].partner = top, top = i;
        if (t[i].kind != CLOSE) continue;
        if (top == SIZE_MAX) {
            t[i].kind = SINGLE, t[i].half = CLOSE;
            continue;
        }
        const size_t opened = top;
        top = t[opened].partner;
        t[opened].partner = i, t[i].partner = opened;
    }
    for (size_t next; top != SIZE_MAX; top = next) next = t[top].partner, t[top].kind = SINGLE, t[top].half = OPEN;
}

static int is_wordlike(char c) { return is_alnum(c) || (unsigned char)c >= 0x80; }

/* Return 1 for an address, @name or #tag. */
static int is_name(const char *text, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (is_space(text[i])) return 0;
    if (n > 1 && (*text == '@' || *text == '#')) return contents(text, n) && !memchr(text + 1, *text, n - 1);
    const size_t begin = text_prefix("http:// https:// www.", text, n);
    if (begin && n > begin) return 1;
    const char *sign = n ? memchr(text, '@', n) : NULL;
    return sign && sign > text && memchr(sign, '.', n - (size_t)(sign - text)) != NULL;
}

/* ---- Tags inside words: they move to an end of the word, so that the translator receives whole words ---- */

enum { INITIALS = 2 }; /* maximum letters of a drop cap or initial */

static size_t letters(const html *h, size_t begin, size_t end) {
    size_t n = 0;
    for (; begin < end; begin = text_utf8_next(h->data, end, begin)) n++;
    return n;
}

/* Move the tags that end before token i, the rest of a word, after it. */
static void move_close(html *h, size_t first, size_t i) {
    token *t = h->tokens;
    size_t at = i, opened;
    while (at > first && t[at - 1].kind == CLOSE) at--;
    const token *word = &t[at - 1];
    if (at == first || word->kind != TEXT) return;
    const size_t begin = cased_bytes(h, word->begin, word->end, 1), n = letters(h, begin, word->end);
    if (is_name(h->data + word->begin, word->end - word->begin)) return; /* not <a>https://a.b/cfirst</a> */
    for (opened = at; opened < i && t[opened].partner + opened + 2 == 2 * at;) opened++;
    const int whole = !contents(h->data + word->begin, begin - word->begin) && opened == i;
    if (!whole && n < letters(h, t[i].begin, t[i].end)) return;
    const token part = t[i];
    memmove(&t[at + 1], &t[at], (i - at) * sizeof *t);
    t[at] = part;
    t[at].glued = 1, t[at - 1].glued |= whole;
    for (size_t k = at + 1; k <= i; k++)
        t[k].moved = 1, t[k].initial = whole && n <= INITIALS ? (int)n : 0, t[t[k].partner].partner = k;
}

/* Move the tag after token i, the beginning of a word, before it. */
static void move_open(html *h, size_t i) {
    token *t = h->tokens, part = t[i];
    if (i + 3 >= h->n_tokens || t[i + 1].kind != OPEN || t[i + 2].kind != TEXT) return;
    const size_t end = cased_bytes(h, t[i + 2].begin, t[i + 2].end, 0);
    const int whole = end == t[i + 2].end && t[i + 1].partner == i + 3;
    if (!whole && letters(h, t[i + 2].begin, end) < letters(h, part.begin, part.end)) return;
    t[i] = t[i + 1], t[i + 1] = part;
    t[i].moved = 1, t[i + 1].glued = 1, t[t[i].partner].partner = i;
}

static void whole_words(html *h, size_t first) {
    for (size_t i = first; i < h->n_tokens; i++) {
        token *t = &h->tokens[i];
        if (t->kind != TEXT || !t->glued) continue;
        t->glued = 0;
        if (i > first && t[-1].kind == CLOSE && t[-1].end == t->begin) move_close(h, first, i);
        else move_open(h, i);
    }
}

/* Return 1 for white space that Python's str.strip() removes, because callers strip translations. */
static int is_blank(const char *c, size_t n) {
    if (n == 1) return is_space(*c) || *c == '\v' || (*c >= 0x1c && *c <= 0x1f);
    const utf8proc_category_t category = category_of(c, n);
    return (category >= UTF8PROC_CATEGORY_ZS && category <= UTF8PROC_CATEGORY_ZP) || memcmp(c, "\xC2\x85", 2) == 0;
}

/* Remove white space, including no-break and thin spaces, from both ends of a text. */
static token trimmed(const html *h, token t) {
    size_t begin = t.end, end = t.end, n;
    char c[4];
    for (size_t at = t.begin, read; at < t.end; at += read) {
        read = character(h->data + at, t.end - at, c, &n);
        if (is_blank(c, n)) continue;
        if (begin == t.end) begin = at;
        end = at + read;
    }
    t.begin = begin, t.end = end;
    return t;
}

/* Read the digits at the beginning of a text, until the number exceeds `most`. Return how many were read. */
static size_t read_digits(const char *text, size_t length, size_t most, size_t *number) {
    size_t n = 0;
    for (*number = 0; n < length && is_digit(text[n], 0) && *number <= most; n++)
        *number = 10 * *number + (size_t)(text[n] - '0');
    return n;
}

/* Return a table of the numbers up to `most` that the segment's own text uses as {N}, or NULL if out of memory. */
static unsigned char *taken_numbers(const html *h, const segment *s, size_t most) {
    const size_t end = s->end;
    unsigned char *taken = calloc(most + 1, 1);
    for (size_t at = s->begin; taken && at < end; at++) {
        size_t number, next = at + 1;
        if (h->data[at] != '{' || next == end || h->data[next] == '0') continue;
        next += read_digits(h->data + next, end - next, most, &number);
        if (next < end && h->data[next] == '}' && number <= most) taken[number] = 1;
    }
    return taken;
}

static int is_numbered(const html *h, const token *t) {
    return t->kind == WORD || (h->options.tags == MOETEXT_TAGS_MARKED && (t->kind == OPEN || t->kind == SINGLE));
}

/* Number the marks of a segment from 1, skipping the numbers that its own text uses. */
static void number_marks(html *h, const segment *s) {
    size_t marks = 0, number = 0;
    for (size_t i = s->first; i < s->last; i++) marks += (size_t)is_numbered(h, &h->tokens[i]);
    if (!marks) return;
    /* A text of N bytes uses at most N / 3 numbers, so enough numbers below this limit are free. */
    unsigned char *taken = taken_numbers(h, s, marks + (s->end - s->begin) / 3);
    h->failed |= !taken;
    for (size_t i = s->first; taken && i < s->last; i++) {
        if (!is_numbered(h, &h->tokens[i])) continue;
        for (number++; taken[number];) number++;
        h->tokens[i].number = (int)number;
    }
    free(taken);
}

/* Write the mark that the translator receives for a token; return its length, 0 if the token has no mark. */
static size_t mark_of(const html *h, size_t i, char out[32]) {
    static const char *const formats[] = { [OPEN] = "<x%d>", [CLOSE] = "</x%d>", [SINGLE] = "<x%d/>", [WORD] = "{%d}" };
    const token *t = &h->tokens[i];
    const int number = h->tokens[t->kind == CLOSE ? t->partner : i].number;
    return t->kind == TEXT || !number ? 0 : (size_t)snprintf(out, 32, formats[t->kind], number);
}

/* Append decoded text and return its contents. Replace each run of white space with a space, but drop it at
 * offset `source`. */
static int put_words(const html *h, text_bytes *out, size_t begin, size_t end, size_t source) {
    int found = 0;
    for (size_t at = begin, n; at < end;) {
        char c[4];
        at += character(h->data + at, end - at, c, &n);
        const int space = n == 1 && is_space(c[0]);
        if (space && (out->length == source || out->data[out->length - 1] == ' ')) continue;
        if (!(found & LETTERS)) found |= contents_of(c, n);
        text_append(out, space ? " " : c, space ? 1 : n);
    }
    return found;
}

/* Write the source of a segment, which consists of words and marks. Return 1 if it has letters. */
static int write_source(html *h, segment *s) {
    int found = 0;
    char mark[32];
    s->source = h->sources.length;
    number_marks(h, s);
    for (size_t i = s->first; i < s->last; i++) {
        token *t = &h->tokens[i];
        t->at = h->sources.length - s->source;
        if (t->kind == TEXT) found |= put_words(h, &h->sources, t->begin, t->end, s->source);
        else text_append(&h->sources, mark, mark_of(h, i, mark));
        t->stop = h->sources.length - s->source;
    }
    s->length = h->sources.length - s->source;
    return found & LETTERS;
}

static void add_segment(html *h, size_t first, size_t last) {
    segment s = { .first = first, .last = last };
    if (first == last || h->failed) return;
    token *begin = &h->tokens[first], *end = &h->tokens[last - 1];
    if (begin->kind == TEXT) begin->begin = trimmed(h, *begin).begin;
    if (end->kind == TEXT) end->end = trimmed(h, *end).end;
    while (end > begin && end->kind == CLOSE && end->moved) end--; /* tags that were moved are inside the segment */
    s.begin = begin[begin->kind == OPEN && begin->moved].begin, s.end = end->end;
    if (write_source(h, &s)) append(h, &h->segments, &h->n_segments, &h->segment_capacity, &s, sizeof s);
    else h->sources.length = s.source;
}

/* ---- Names and formulas: each becomes one WORD, including its markup ---- */

enum { NEAR = 16, LONGEST_NAME = 200 }; /* maximum tokens per formula; maximum bytes per name */

/* Copy the text of tokens (first .. last). Return SIZE_MAX if it exceeds LONGEST_NAME bytes or contains a WORD. */
static size_t text_inside(const html *h, size_t first, size_t last, char *out) {
    size_t length = 0;
    for (size_t i = first + 1; i < last; i++) {
        if (h->tokens[i].kind == WORD) return SIZE_MAX;
        for (size_t at = h->tokens[i].begin, n; h->tokens[i].kind == TEXT && at < h->tokens[i].end; length += n) {
            if (length + 4 > LONGEST_NAME) return SIZE_MAX;
            at += character(h->data + at, h->tokens[i].end - at, out + length, &n);
        }
    }
    return length;
}

/* Return the length of the base of an exponent after or before `at`: a number, or one or two letters. */
static size_t symbol_bytes(const html *h, size_t at, size_t most, int after) {
    size_t n = 0, digits = 0;
    for (; n < most && n < 40; n++) {
        const char c = h->data[after ? at + n : at - 1 - n];
        if (!is_wordlike(c)) break;
        digits += (size_t)is_digit(c, 0);
    }
    return n <= 2 || digits == n ? n : 0;
}

/* Turn a raised element that contains text[n] into part of a formula or a note. Return 0 if it is neither. */
static int take_raised(html *h, token *before, token *t, token *next, const char *text, size_t n, size_t *kept) {
    if (before->end != t->begin || memchr(text, ' ', n) || !contents(text, n)) return 0;
    if (before->kind == TEXT) {
        const size_t symbol = symbol_bytes(h, before->end, before->end - before->begin, 0);
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
        const size_t more = symbol_bytes(h, next->begin, next->end - next->begin, 1);
        word->end += more, next->begin += more;
    }
    return 1;
}

/* Merge names and formulas among the collected tokens. */
static void collapse(html *h, size_t first) {
    size_t kept = first;
    char text[LONGEST_NAME];
    for (size_t i = first; i < h->n_tokens; i++) {
        token t = h->tokens[i];
        token *before = kept > first ? &h->tokens[kept - 1] : NULL;
        if (t.kind == TEXT && before && before->kind == TEXT && before->end == t.begin) {
            before->end = t.end;
            continue;
        }
        if (t.kind == TEXT && t.begin == t.end) continue;
        const size_t last = t.kind == OPEN ? t.partner : i;
        const int whole_tags = !t.moved && !h->tokens[last].moved;
        const size_t n = last > i && last - i <= NEAR && whole_tags ? text_inside(h, i, last, text) : SIZE_MAX;
        if (n != SIZE_MAX) {
            token whole = t, *next = last + 1 < h->n_tokens ? &h->tokens[last + 1] : NULL;
            whole.end = h->tokens[last].end;
            whole.kind = !contents(text, n) ? SINGLE : is_name(text, n) ? WORD : OPEN;
            if (whole.kind != OPEN) t = whole, i = last;
            else if (t.raised && kept > first && take_raised(h, &h->tokens[kept - 1], &whole, next, text, n, &kept)) {
                i = last;
                continue;
            }
        }
        h->tokens[kept++] = t;
    }
    h->n_tokens = kept;
}

/* ---- Cutting ---- */

static void push(html *h, size_t first, size_t last, int sentence) {
    const range r = { first, last, sentence };
    if (first < last) append(h, &h->ranges, &h->n_ranges, &h->range_capacity, &r, sizeof r);
}

static size_t words_before(const html *h, size_t i, size_t all) { return i < h->n_tokens ? h->tokens[i].words : all; }

/* Set `edge` and `words` of the collected tokens. Return the number of tokens with words. */
static size_t measure(html *h, size_t first) {
    size_t words = 0;
    for (size_t i = first; i < h->n_tokens; i++) {
        token *t = &h->tokens[i];
        int found = t->kind == WORD ? LETTERS : 0;
        t->words = words, t->edge = t->kind == SINGLE;
        if (t->kind == TEXT) {
            const token rest = trimmed(h, *t);
            t->edge = rest.begin == rest.end;
            for (size_t at = t->begin, n; at < t->end && !(found & LETTERS);) {
                char c[4];
                at += character(h->data + at, t->end - at, c, &n);
                found |= contents_of(c, n);
            }
        }
        words += (size_t)(found & LETTERS);
    }
    return words;
}

/* Return 1 for the first tag of an element that may be a segment by itself; a part of a word may not. */
static int is_element(const token *t, size_t i) { return t[i].kind == OPEN && !t[i].moved && !t[t[i].partner].moved; }

/* Push each element of a range whose neighbours are not words, and the ranges between these elements. */
static void divide(html *h, range r, size_t all) {
    const token *t = h->tokens;
    const size_t bottom = h->n_ranges;
    int spoken = 0, left = 0;
    size_t begin = r.first;
    for (size_t i = r.first, end; i < r.last; i = end) {
        end = t[i].kind == OPEN ? t[i].partner + 1 : i + 1;
        spoken |= !is_element(t, i) && words_before(h, end, all) > t[i].words;
    }
    for (size_t i = r.first, end; i < r.last; i = end) {
        const int element = is_element(t, i);
        end = t[i].kind == OPEN ? t[i].partner + 1 : i + 1;
        const int words = words_before(h, end, all) > t[i].words;
        int right = 0;
        for (size_t k = end; element && !right && k < r.last && !is_element(t, k); k++)
            right = words_before(h, k + 1, all) > t[k].words;
        if (element && words && !left && !right && (!spoken || t[i].link)) {
            push(h, begin, i, 1);
            push(h, i, end, 0);
            begin = end;
        }
        left = element ? 0 : left || words;
    }
    push(h, begin, r.last, 1);
    for (size_t a = bottom, b = h->n_ranges; a + 1 < b;) { /* reverse the ranges, so that the first is on top */
        const range swap = h->ranges[a];
        h->ranges[a++] = h->ranges[--b], h->ranges[b] = swap;
    }
}

static void add_sentence(html *h, size_t first, size_t last) {
    size_t marks = 0;
    for (size_t i = first; i < last; i++) marks += h->tokens[i].kind != TEXT;
    const int whole = h->options.tags != MOETEXT_TAGS_SPLIT && marks <= MOST_MARKS;
    if (whole) add_segment(h, first, last);
    for (size_t i = first; i < last && !whole; i++)
        if (h->tokens[i].kind == TEXT && !h->tokens[i].edge) add_segment(h, i, i + 1);
}

/* Divide the collected tokens into segments, which exclude markup and white space at their ends. */
static void flush(html *h) {
    pair_up(h->tokens, h->collected, h->n_tokens);
    if (h->options.tags != MOETEXT_TAGS_SPLIT) {
        whole_words(h, h->collected);
        collapse(h, h->collected);
    }
    pair_up(h->tokens, h->collected, h->n_tokens);
    const size_t all = measure(h, h->collected);
    push(h, h->collected, h->n_tokens, 0);
    while (h->n_ranges && !h->failed) {
        range r = h->ranges[--h->n_ranges];
        while (r.first < r.last) {
            const token *f = &h->tokens[r.first], *l = &h->tokens[r.last - 1];
            if (f->edge) r.first++;
            else if (l->edge) r.last--;
            else if (f->kind == OPEN && f->partner == r.last - 1 && (f->moved || l->moved)) {
                r.sentence = 1;
                break;
            } else if (f->kind == OPEN && f->partner == r.last - 1) r.first++, r.last--, r.sentence = 0;
            else break;
        }
        if (r.first == r.last || words_before(h, r.last, all) == h->tokens[r.first].words) continue;
        if (r.sentence) add_sentence(h, r.first, r.last);
        else divide(h, r, all);
    }
    h->n_ranges = 0, h->collected = h->n_tokens;
}

static const char INLINE[] = "a abbr acronym b bdi bdo big cite data del dfn em font i ins label mark q s small span "
                             "strike strong sub sup time tspan tt u";
static const char SENTENCE[] = "img wbr input code kbd math samp var"; /* inline elements; the first three are void */
static const char VOID[] = "area base br col embed hr img input link meta source track wbr";
static const char KEPT[] = "script style pre textarea math code kbd samp var xmp iframe";
static const char MUTE[] = "script style math xmp";
static const char METAS[] =
    "description keywords abstract og:title og:description og:image:alt twitter:title twitter:description "
    "twitter:image:alt dc.title dc.description dcterms.title dcterms.description headline";
static const char RAW[] =
    "script style textarea title xmp iframe noembed noframes noscript"; /* elements without tags in their content */

#define BLOCKS                                                                                                        \
    "address article aside blockquote center details dialog dir div dl fieldset figcaption figure footer form h1 h2 " \
    "h3 h4 h5 h6 header hgroup hr main menu nav ol pre search section summary table ul"
#define ROWS "tbody thead tfoot tr"

/* Elements with an optional end tag, and the start tags and end tags that close them, except within `inside`. */
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

/* Return 1 if a value contains template syntax. */
static int is_template(const char *data, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (text_prefix("{% {{ {# <? <%", data + i, n - i)) return 1;
    return 0;
}

/* Make the value of an attribute a segment if it has letters. */
static void add_attribute(html *h, spot at) {
    if (!at.quoted || h->failed || is_template(h->data + at.begin, at.end - at.begin)) return;
    const token t = trimmed(h, (token){ .begin = at.begin, .end = at.end });
    segment s = { .attribute = 1, .begin = t.begin, .end = t.end, .source = h->sources.length };
    const int found = put_words(h, &h->sources, s.begin, s.end, s.source);
    s.length = h->sources.length - s.source;
    if (found & LETTERS) {
        append(h, &h->attributes, &h->n_attributes, &h->attribute_capacity, &h->n_segments, sizeof h->n_segments);
        append(h, &h->segments, &h->n_segments, &h->segment_capacity, &s, sizeof s);
    } else h->sources.length = s.source;
}

static int spot_is(const html *h, const tag *t, int which, const char *list) {
    return is_one_of(list, h->data + t->spots[which].begin, t->spots[which].end - t->spots[which].begin);
}

/* Return 1 if two language codes have the same first part, such as en and en-GB. */
static int same_language(const char *a, size_t n, const char *b) {
    size_t i = 0;
    while (i < n && a[i] != '-' && a[i] != '_' && b[i] && small(a[i]) == small(b[i])) i++;
    return i && (i == n || a[i] == '-' || a[i] == '_') && (!b[i] || b[i] == '-' || b[i] == '_');
}

/* Add the visible attributes of a tag, in document order. */
static void take_attributes(html *h, const tag *t) {
    const int input = is_tag(t, "input");
    int wanted[N_SHOWN];
    for (int i = 0; i < N_SHOWN; i++) wanted[i] = !shown_in[i] || is_tag(t, shown_in[i]);
    if (input) wanted[ALT] = spot_is(h, t, TYPE, "image");
    wanted[VALUE] = input && spot_is(h, t, TYPE, "submit button reset");
    wanted[CONTENT] = is_tag(t, "meta") &&
                      (spot_is(h, t, NAME, METAS) || spot_is(h, t, PROPERTY, METAS) || spot_is(h, t, ITEM, METAS));
    for (size_t at = 0;;) {
        int next = -1;
        for (int i = 0; i < N_SHOWN; i++)
            if (wanted[i] && t->spots[i].end && t->spots[i].begin >= at &&
                (next < 0 || t->spots[i].begin < t->spots[next].begin))
                next = i;
        if (next < 0) break;
        add_attribute(h, t->spots[next]);
        wanted[next] = 0, at = t->spots[next].begin;
    }
}

/* Note the attributes of a tag that name the language of the page. */
static void take_language(html *h, const tag *t) {
    const int page = is_tag(t, "html"), meta = is_tag(t, "meta") && spot_is(h, t, HEADER, "content-language");
    spot codes[] = { t->spots[LANG], t->spots[XML_LANG], meta ? t->spots[CONTENT] : (spot){ 0 } };
    if (codes[1].begin < codes[0].begin) codes[0] = t->spots[XML_LANG], codes[1] = t->spots[LANG];
    for (size_t i = 0; i < 3 && h->options.target; i++) {
        const char *code = h->data + codes[i].begin;
        const size_t n = codes[i].end - codes[i].begin;
        if (n && page && !h->language.length) text_append(&h->language, code, n);
        if (n && h->language.length && same_language(code, n, h->language.data))
            append(h, &h->languages, &h->n_languages, &h->language_capacity, &codes[i], sizeof codes[i]);
    }
}

/* ---- Markup ---- */

/* Return where the content at `at` of an untranslated element ends: at its end tag, or at a tag that implies it. */
static size_t end_of_kept(const html *h, size_t at, const tag *of) {
    const char *data = h->data;
    const size_t length = h->length;
    const char *starts = "", *ends = "", *inside = "";
    for (size_t i = 0; i < sizeof ended / sizeof *ended; i++)
        if (!h->options.xml && is_tag(of, ended[i].name))
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
        const int same = t.length == of->length && is_same(t.name, of->name, t.length);
        if (!nested && depth == 1 && is_tag(&t, closes ? ends : starts)) return at;
        if (is_tag(&t, inside)) nested += closes ? (size_t)-1 : 1;
        at = t.end;
        if (same && !(h->options.xml ? t.slash : t.empty) && !nested) depth += closes ? (size_t)-1 : 1;
        if (!depth) return at;
        if (!closes && !h->options.xml && is_tag(&t, RAW) && !same) at = end_tag(data, length, at, t.name, t.length);
    }
    return length;
}

/* Process an XML tag. Any element may be inline; divide() decides by its neighbours. */
static size_t take_element(html *h, size_t at, const tag *t, int closes) {
    const int kept = t->kept && !closes && !t->slash;
    const size_t end = kept ? end_of_kept(h, t->end, t) : t->end;
    add(h, kept ? WORD : closes ? CLOSE : t->slash ? SINGLE : OPEN, at, end);
    return end;
}

/* Process markup other than tags. A comment belongs to its sentence, but a declaration ends the sentence. */
static size_t take_other(html *h, size_t at) {
    const char *data = h->data;
    size_t end = end_of_other(data, h->length, at);
    if (h->options.xml && text_begins_with(data + at, h->length - at, "<![CDATA["))
        end = after(data, h->length, at, "]]>");
    if (h->options.xml && data[at + 1] == '?') end = after(data, h->length, at, "?>");
    if (text_prefix("<%= <?= <%-", data + at, h->length - at)) add(h, WORD, at, end); /* the value of code */
    else if (data[at + 1] == '%' || (data[at + 1] == '!' && end - at > 3 && data[at + 2] == '-'))
        add(h, SINGLE, at, end);
    else flush(h);
    return end;
}

/* Process a tag that ends a sentence. */
static size_t take_block(html *h, const tag *t, int closes) {
    flush(h);
    if (!closes && is_tag(t, "title") && !(h->foreign && t->slash)) { /* a title contains no tags */
        const size_t end = end_tag(h->data, h->length, t->end, t->name, t->length);
        add(h, TEXT, t->end, end);
        flush(h);
        return end;
    }
    return is_tag(t, "plaintext") ? h->length : t->end;
}

/* Process the markup at `at`. Return the start of the next token. */
static size_t take_markup(html *h, size_t at) {
    const char *data = h->data;
    const int closes = data[at + 1] == '/';
    if (!is_letter(data[at + 1 + (size_t)closes])) return take_other(h, at);
    const tag t = read_tag(data, h->length, at + 1 + (size_t)closes);
    if (h->options.xml) return take_element(h, at, &t, closes);
    const int in_sentence = is_tag(&t, INLINE) || is_tag(&t, SENTENCE);
    const int empty = t.empty || is_tag(&t, VOID) || (h->foreign && t.slash);
    size_t end = t.end;
    if (!closes && !t.kept) take_language(h, &t);
    if (!closes && !t.kept && !is_tag(&t, MUTE) && !(in_sentence && is_tag(&t, KEPT))) take_attributes(h, &t);
    if (is_tag(&t, "svg") && closes) h->foreign -= h->foreign > 0;
    else if (is_tag(&t, "svg") && !t.kept && !empty) h->foreign++;
    if (!closes && !empty && (t.kept || is_tag(&t, KEPT))) {
        end = is_tag(&t, RAW) ? end_tag(data, h->length, end, t.name, t.length) : end;
        end = end_of_kept(h, end, &t);
        if (in_sentence) add(h, WORD, at, end);
        else flush(h);
        return end;
    }
    if (!in_sentence) return take_block(h, &t, closes);
    add(h, empty ? SINGLE : closes ? CLOSE : OPEN, at, end);
    if (!h->failed) {
        h->tokens[h->n_tokens - 1].link = is_tag(&t, "a label");
        h->tokens[h->n_tokens - 1].raised = is_tag(&t, "sup sub");
    }
    return end;
}

/* Return 1 for a line or paragraph separator, which ends a sentence. */
static int is_separator(const char *data, size_t length, size_t at) {
    return text_prefix("\xE2\x80\xA8 \xE2\x80\xA9", data + at, length - at) > 0;
}

moe_status moetext_html_new(const char *data, size_t length, const moetext_html_options *options, moetext_html **out,
                            moe_error *error) {
    html *h = calloc(1, sizeof *h);
    if (h) h->data = data, h->length = length, h->options = *options;
    if (h && options->source) text_append_string(&h->language, options->source);
    for (size_t at = 0; h && at < length;) {
        size_t end = at;
        while (end < length && !is_separator(data, length, end) &&
               (data[end] != '<' || !begins_markup(data, length, end)))
            end++;
        add_text(h, at, end);
        if (is_separator(data, length, end)) flush(h), at = end + 3;
        else at = end < length ? take_markup(h, end) : end;
    }
    if (h) flush(h);
    if (h && !h->failed && !h->sources.failed) return *out = h, MOE_OK;
    moetext_html_free(h);
    if (error) *error = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
    return MOE_ERROR_MEMORY;
}

void moetext_html_free(moetext_html *h) {
    if (!h) return;
    free(h->tokens), free(h->segments), free(h->attributes), free(h->ranges), free(h->languages);
    text_bytes_free(&h->sources), text_bytes_free(&h->out), text_bytes_free(&h->language);
    free(h);
}

size_t moetext_html_count(const moetext_html *h) { return h->n_segments; }

const char *moetext_html_source(const moetext_html *h, size_t i, size_t *length) {
    *length = h->segments[i].length;
    return h->sources.data + h->segments[i].source;
}

/* ---- Writing ----
 * A tag inside a sentence moves with its words, and so do its attributes: the placed sentence contains their segment
 * numbers between two bytes MARK, which UTF-8 never uses. */

enum { MARK = 0xff };

static text_bytes *begin_output(html *h) {
    text_clear(&h->out);
    text_append(&h->out, "", 0);
    return &h->out;
}

static const char *end_output(const html *h, size_t *length) {
    *length = h->out.length;
    return h->out.failed ? NULL : h->out.data;
}

static void put_number(text_bytes *out, size_t number) { text_printf(out, "%c%zu%c", MARK, number, MARK); }

/* Copy bytes of the document, replacing the language of the page. */
static void put_raw(const html *h, size_t from, size_t to, text_bytes *out) {
    size_t low = 0, high = h->n_languages;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (h->languages[middle].begin < from) low = middle + 1;
        else high = middle;
    }
    for (; low < h->n_languages && h->languages[low].end <= to; low++) {
        text_append(out, h->data + from, h->languages[low].begin - from);
        for (const char *c = h->options.target; *c; c++) text_append(out, *c == '_' ? "-" : c, 1);
        from = h->languages[low].end;
    }
    text_append(out, h->data + from, to - from);
}

/* Copy the bytes of a tag in a sentence, with the numbers of its attributes. */
static void put_tag(const html *h, size_t from, size_t to, text_bytes *out) {
    size_t low = 0, high = h->n_attributes;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (h->segments[h->attributes[middle]].begin < from) low = middle + 1;
        else high = middle;
    }
    for (; low < h->n_attributes && h->segments[h->attributes[low]].begin < to; low++) {
        const segment *s = &h->segments[h->attributes[low]];
        put_raw(h, from, s->begin, out);
        put_number(out, h->attributes[low]);
        from = s->end;
    }
    put_raw(h, from, to, out);
}

typedef const char *translation_fn(void *user, size_t segment, size_t *length);

/* Append the translations of a segment and of its attributes. */
static void put_translated(html *h, size_t i, translation_fn *translation, void *user) {
    size_t length, n;
    const char *text = translation(user, i, &length);
    for (const char *end = text + length, *next; text < end; text = next) {
        const char *mark = memchr(text, MARK, (size_t)(end - text));
        text_append(&h->out, text, (size_t)((mark ? mark : end) - text));
        if (!mark) break;
        size_t number;
        next = mark + 1 + read_digits(mark + 1, (size_t)(end - mark - 1), h->n_segments - 1, &number);
        if (next == end || (unsigned char)*next != MARK) continue;
        next++;
        if (number >= h->n_segments || !h->segments[number].attribute) continue;
        const char *value = translation(user, number, &n);
        text_append(&h->out, value, n);
    }
}

const char *moetext_html_write(moetext_html *h, translation_fn *translation, void *user, size_t *length) {
    size_t at = 0;
    begin_output(h);
    for (size_t i = 0, a = 0; i < h->n_segments || a < h->n_attributes;) { /* segments and attributes in page order */
        while (i < h->n_segments && h->segments[i].attribute) i++;
        const int sentence =
            i < h->n_segments && (a == h->n_attributes || h->segments[i].begin <= h->segments[h->attributes[a]].begin);
        if (!sentence && a == h->n_attributes) break;
        const size_t which = sentence ? i++ : h->attributes[a++];
        const segment *s = &h->segments[which];
        if (s->begin < at) continue; /* an attribute of a sentence that is already written */
        put_raw(h, at, s->begin, &h->out);
        if (translation) put_translated(h, which, translation, user);
        else put_number(&h->out, which);
        at = s->end;
    }
    put_raw(h, at, h->length, &h->out);
    return end_output(h, length);
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
    int wrong;       /* 1 if a pair of tags lost its words, or a WORD is missing */
    size_t seen;     /* position in the document after the last reference found */
    size_t misses;   /* references that the document does not contain */
    size_t searched; /* number of bytes searched for out-of-order references */
} placing;

/* Estimate the position of a source byte in the translation by its relative position, rounded to a space. */
static size_t in_proportion(const placing *p, size_t at) {
    size_t byte = p->s->length ? (size_t)((double)at / (double)p->s->length * (double)p->length) : 0;
    if (at >= p->s->length) return p->length;
    while (byte && p->text[byte - 1] != ' ') byte--;
    return byte;
}

/* Return the position in the translation of markup that precedes byte `at` of the source. */
static size_t place_single(const placing *p, size_t at) {
    const moetext_link *next = NULL, *before = NULL;
    if (at && is_wordlike(p->h->sources.data[p->s->source + at - 1])) { /* a note attached to a word */
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

/* Return the range of the translation that a pair of tags encloses, the range of the mark of a WORD (empty if missing),
 * or the position of an unpaired tag. */
static place place_of(const placing *p, size_t i) {
    const token *t = &p->h->tokens[i];
    place found = { .token = i };
    if (t->kind == WORD) {
        char name[32];
        const size_t n = mark_of(p->h, i, name);
        const char *mark = p->length ? memmem(p->text, p->length, name, n) : NULL;
        if (mark) found.begin = (size_t)(mark - p->text), found.end = found.begin + n;
        return found;
    }
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

/* Return the place of a token. A pair encloses everything inside it and never splits the mark of a WORD. */
static place whole_place(const placing *p, size_t i) {
    const token *t = p->h->tokens;
    place found = place_of(p, i);
    if (t[i].kind == WORD) return found;
    const size_t last = t[i].kind == OPEN ? t[i].partner : i;
    for (size_t k = i + 1; k < last; k++) {
        if (t[k].kind != OPEN && t[k].kind != WORD) continue;
        const place one = place_of(p, k);
        if (one.begin < found.begin) found.begin = one.begin;
        if (one.end > found.end) found.end = one.end;
    }
    for (size_t k = p->s->first; k < p->s->last; k++) {
        if (t[k].kind != WORD) continue;
        const place one = place_of(p, k);
        const int inside = k > i && k < last;
        if (found.begin > one.begin && found.begin < one.end) found.begin = inside ? one.begin : one.end;
        if (found.end > one.begin && found.end < one.end) found.end = inside ? one.end : one.begin;
    }
    if (found.end < found.begin) found.end = found.begin;
    return found;
}

/* Return 1 if the original of a segment contains an unknown reference. As references are mostly in order, search from
 * the previous one, then from the start, within a limit. */
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

/* Append a text as HTML. Unknown references were passed to the translator as written and are restored unchanged. */
static void escape(placing *p, const char *text, size_t length) {
    for (size_t i = 0, n, read; i < length; i++) {
        const char *name = text[i] == '&' ? "&amp;" : text[i] == '<' ? "&lt;" : text[i] == '>' ? "&gt;" : NULL;
        if (p->s->attribute && text[i] == '"') name = "&quot;";
        if (p->s->attribute && text[i] == '\'') name = "&#x27;";
        n = text[i] == '&' ? reference_length(text + i, length - i) : 0;
        if (n && !reference(text + i, length - i, &read) && had_reference(p, text + i, n)) {
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

/* Return the contents of the source's texts between the tags of a pair. */
static int contents_inside(const placing *p, size_t first, size_t last) {
    int found = 0;
    for (size_t i = first; i < last; i++) {
        const token *t = &p->h->tokens[i];
        if (t->kind == TEXT) found |= contents(p->h->sources.data + p->s->source + t->at, t->stop - t->at);
    }
    return found;
}

/* Parse a mark at the start of text. Return its length, or 0 if the text does not start with a mark. */
static size_t read_mark(const char *text, size_t length, kind *what, size_t *number) {
    const int word = length && *text == '{', closes = length > 1 && text[1] == '/';
    size_t at = word ? 1 : closes ? 3 : 2;
    if (length < 3 || (!word && (*text != '<' || text[at - 1] != 'x'))) return 0;
    const size_t first = at;
    at += read_digits(text + at, length - at, 999999, number);
    const int single = !word && !closes && at < length && text[at] == '/';
    at += (size_t)single;
    *what = word ? WORD : closes ? CLOSE : single ? SINGLE : OPEN;
    return at > first + (size_t)single && at < length && text[at] == (word ? '}' : '>') ? at + 1 : 0;
}

/* Return the contents of bytes [from .. to) of the translation, without marks. */
static int contents_between(const placing *p, size_t from, size_t to) {
    kind what;
    int found = 0;
    for (size_t at = from, n, number; at < to; at += n) {
        n = read_mark(p->text + at, to - at, &what, &number);
        if (n) continue;
        n = text_utf8_next(p->text, to, at) - at;
        found |= contents_of(p->text + at, n);
    }
    return found;
}

/* Return the end of the first letters of a text or of HTML, after quotes, and of the end tags that follow them. */
static size_t initial_end(const char *text, size_t at, size_t length, int letters) {
    for (size_t next; at < length && letters; at = next) {
        next = text[at] == '<' ? after(text, length, at, ">") : text_utf8_next(text, length, at);
        if (text[at] == '&')
            next = at + (reference_length(text + at, length - at) ? reference_length(text + at, length - at) : 1);
        else if (text[at] != '<' && contents_of(text + at, next - at)) letters--;
    }
    while (length - at > 1 && text[at] == '<' && text[at + 1] == '/') at = after(text, length, at, ">");
    return at;
}

/* Return 1 if a token has white space on both sides. */
static int is_spaced(const html *h, const token *t) {
    return t->begin && t->end < h->length && is_space(h->data[t->begin - 1]) && is_space(h->data[t->end]);
}

/* Append bytes [begin .. end) of the translation with their markup. Tags that would overlap follow one another. */
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
        const token *mark = &t[places[i].token];
        if (mark->kind == OPEN && t[mark->partner].initial)
            to = initial_end(p->text, from, to, t[mark->partner].initial);
        at = to;
        const int spaced = mark->kind == SINGLE && is_spaced(p->h, mark) && from && to < p->length;
        if (spaced && p->text[from - 1] != ' ') text_append(p->out, " ", 1);
        put_token(p, places[i].token);
        if (spaced && p->text[to] != ' ') text_append(p->out, " ", 1);
        if (mark->kind == WORD) p->wrong |= from == to || from != places[i].begin || to != places[i].end;
        if (mark->kind != OPEN) continue;
        p->wrong |= !contents_inside(p, places[i].token + 1, mark->partner) != !contents_between(p, from, to);
        put_range(p, places[i].token + 1, mark->partner, from, to);
        put_token(p, mark->partner);
    }
    escape(p, p->text + at, end - at);
}

/* Put an end tag after the first letters of the output from byte `begin`. */
static void put_initial(placing *p, size_t i, size_t begin) {
    text_bytes rest = { 0 };
    if (p->out->failed) return;
    const size_t at = initial_end(p->out->data, begin, p->out->length, p->h->tokens[i].initial);
    text_append(&rest, p->out->data + at, p->out->length - at);
    p->out->length = at;
    put_token(p, i);
    text_append(p->out, rest.data, rest.length);
    p->out->failed |= rest.failed;
    text_bytes_free(&rest);
}

/* ---- By marks ---- */

/* Return the first unused token that has this mark, or the end of the segment's tokens if there is none. */
static size_t token_of(const placing *p, kind what, size_t number, const unsigned char *used) {
    const token *t = p->h->tokens;
    size_t i = p->s->first;
    for (; i < p->s->last; i++)
        if (t[i].kind == what && t[what == CLOSE ? t[i].partner : i].number == (int)number && !used[i - p->s->first])
            break;
    return i;
}

/* Return the first tag of the pair around a token of the segment, or the end of its tokens. */
static size_t around(const placing *p, size_t i) {
    const token *t = p->h->tokens;
    while (i-- > p->s->first)
        if (t[i].kind == OPEN) return i;
        else if (t[i].kind == CLOSE) i = t[i].partner;
    return p->s->last;
}

/* Return 1 if token i, whose mark ends at `end`, has the pair `open` around it and, if it is half of a pair, words on
 * its side as in the source. */
static int is_in_place(const placing *p, size_t i, size_t end, size_t open) {
    const token *t = &p->h->tokens[i];
    if (t->kind == OPEN || t->kind == WORD) return around(p, i) == open;
    if (t->kind != SINGLE || !t->half) return 1;
    if (t->half == CLOSE) return !contents_inside(p, p->s->first, i) == !contents_between(p, 0, end);
    return !contents_inside(p, i + 1, p->s->last) == !contents_between(p, end, p->length);
}

/* Append a translation with its marks replaced by the markup. Return 0 if a mark is missing, repeated or out of place,
 * or a pair of tags lost or gained words. */
static int put_marked(placing *p) {
    unsigned char used[MOST_TOKENS] = { 0 };
    size_t open[MOST_MARKS + 1], starts[MOST_MARKS + 1] = { 0 }, depth = 0, from = 0, left = 0, number;
    int held[MOST_MARKS + 1] = { 0 };
    const token *t = p->h->tokens;
    kind what = TEXT;
    if (p->s->last - p->s->first > sizeof used) return 0;
    for (size_t i = p->s->first; i < p->s->last; i++) left += t[i].kind != TEXT;
    for (size_t at = 0, n; at <= p->length; at += n) {
        n = at < p->length ? read_mark(p->text + at, p->length - at, &what, &number) : 0;
        const size_t i = n ? token_of(p, what, number, used) : p->s->last;
        if (n && i == p->s->last && what != WORD) return 0;
        if (i == p->s->last && at < p->length) {
            n = n ? n : 1; /* not a mark of this segment, so part of the text */
            continue;
        }
        held[depth] |= contents(p->text + from, at - from);
        escape(p, p->text + from, at - from);
        if (at == p->length) break;
        from = at + n, left--, used[i - p->s->first] = 1;
        if (!is_in_place(p, i, from, depth ? open[depth - 1] : p->s->last)) return 0;
        if (what == OPEN) open[depth++] = i, held[depth] = 0;
        if (what == CLOSE) {
            if (!depth || open[depth - 1] != t[i].partner) return 0;
            if (held[depth] != contents_inside(p, t[i].partner + 1, i)) return 0;
            held[depth - 1] |= held[depth], depth--;
        }
        if (what == CLOSE && t[i].initial) put_initial(p, i, starts[depth]);
        else put_token(p, i);
        if (what == OPEN) starts[depth - 1] = p->out->length;
    }
    return !left && !depth;
}

const char *moetext_html_place(moetext_html *h, size_t i, const char *text, size_t length, const moetext_link *links,
                               size_t n_links, size_t *out_length) {
    placing p = { .h = h, .s = &h->segments[i], .text = text, .length = length, .links = links, .n_links = n_links };
    const int marked = h->options.tags == MOETEXT_TAGS_MARKED;
    const int same = length == p.s->length && !memcmp(text, h->sources.data + p.s->source, length);
    p.out = begin_output(h);
    if (same && p.s->attribute) text_append(p.out, h->data + p.s->begin, p.s->end - p.s->begin);
    else if (same && marked) put_tag(h, p.s->begin, p.s->end, p.out);
    else if (p.s->attribute) escape(&p, text, length);
    else if (marked) p.wrong = !put_marked(&p);
    else put_range(&p, p.s->first, p.s->last, 0, length);
    return p.wrong ? NULL : end_output(h, out_length);
}

/* ---- Piece by piece ---- */

/* Return 1 if token i of a segment is a text with letters. */
static int is_piece(const html *h, const segment *s, size_t i) {
    const token *t = &h->tokens[i];
    return t->kind == TEXT && !t->glued && contents(h->sources.data + s->source + t->at, t->stop - t->at) & LETTERS;
}

const char *moetext_html_pieces(moetext_html *h, size_t i, size_t *length) {
    const segment *s = &h->segments[i];
    text_bytes *out = begin_output(h);
    if (s->attribute) text_append(out, h->sources.data + s->source, s->length);
    for (size_t k = s->first, n = 0; k < s->last; k++) {
        if (!is_piece(h, s, k)) continue;
        const token t = trimmed(h, h->tokens[k]);
        if (n++) text_append(out, "\n", 1);
        put_words(h, out, t.begin, t.end, out->length);
    }
    return end_output(h, length);
}

const char *moetext_html_place_pieces(moetext_html *h, size_t i, const char *text, size_t length, size_t *out_length) {
    const segment *s = &h->segments[i];
    size_t lines = 1, pieces = 0;
    placing p = { .h = h, .s = s, .out = begin_output(h) };
    for (size_t at = 0; at < length; at++) lines += text[at] == '\n';
    for (size_t k = s->first; k < s->last; k++) pieces += (size_t)is_piece(h, s, k);
    if (s->attribute && length) return moetext_html_place(h, i, text, length, NULL, 0, out_length);
    if (s->attribute) text_append(p.out, h->data + s->begin, s->end - s->begin);
    size_t order[MOST_TOKENS], n_order = 0; /* tokens in document order, since tags inside words were moved */
    for (size_t k = s->first, at; k < s->last && n_order < MOST_TOKENS; k++) {
        for (at = n_order++; at && h->tokens[order[at - 1]].begin > h->tokens[k].begin; at--) order[at] = order[at - 1];
        order[at] = k;
    }
    for (size_t k = 0; k < n_order; k++) {
        const token *t = &h->tokens[order[k]];
        const int piece = lines == pieces && is_piece(h, s, order[k]);
        const char *newline = piece && length ? memchr(text, '\n', length) : NULL;
        const size_t n = !piece ? 0 : newline ? (size_t)(newline - text) : length;
        if (!n) put_tag(h, t->begin, t->end, p.out);
        else {
            const token words = trimmed(h, *t);
            text_append(p.out, h->data + t->begin, words.begin - t->begin);
            escape(&p, text, n);
            text_append(p.out, h->data + words.end, t->end - words.end);
        }
        text += n + (newline != NULL), length -= n + (newline != NULL);
    }
    return end_output(h, out_length);
}
