/* protect.c - see protect.h.
 *
 * Contents
 *   1. Rules      what to protect
 *   2. Showing    the text for the model
 *   3. Binding    constraints
 *   4. Placing    positions of markup in the translation
 *   5. Restoring  edits of the translation
 */
#define _POSIX_C_SOURCE 200809L
#include "tools/text/protect.h"
#include "tools/text/glossary.h"
#include "tools/text/sentences.h"
#include "tools/text/spans.h"
#include "tools/text/terms.h"
#include "tools/text/words.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum {
    MAX_WORD = 200,     /* maximum bytes of a word that is looked up in the vocabulary */
    VERBATIM_BYTES = 4, /* maximum bytes passed to the model if a text contains no language; the result is ignored */
    MAX_SPANS = 4000,   /* a text with more spans is treated as containing no language */
    MAX_PHRASES = 16,   /* maximum number of tag pairs whose words are translated separately */
    PHRASE_BYTES = 100,
    PHRASE_WORDS = 12 /* maximum number of words in a phrase's translation */
};

static int is_space(char c) { return c == ' ' || c == '\t'; }
static int is_digit(char c) { return c >= '0' && c <= '9'; }
static size_t least(size_t a, size_t b) { return a < b ? a : b; }
static size_t most(size_t a, size_t b) { return a > b ? a : b; }

static int wordlike(const text_bytes *t, size_t at) { return text_is_wordlike(t->data, t->length, at); }
static int wordlike_before(const text_bytes *t, size_t at) { return text_is_wordlike_before(t->data, t->length, at); }
static size_t word_bytes(const text_bytes *t, size_t at) { return text_word_length(t->data, t->length, at); }
static size_t character_bytes(const text_bytes *t, size_t at) { return text_utf8_next(t->data, t->length, at) - at; }
static size_t character_begin(const text_bytes *t, size_t at) { return text_utf8_cut(t->data, t->length, at); }

/* ==== 1. Rules ========================================================================================== */

struct text_rules {
    const text_front *front;
    text_front targets;
    int spans;
    int derived;               /* 1 if `characters` belongs to other rules */
    text_glossary *glossary;   /* may be NULL */
    unsigned char *characters; /* a bit per character that occurs in a vocabulary piece; NULL if unknown */
    int bytes;                 /* the vocabulary spells other characters in bytes; models can copy ASCII bytes */
};

/* Return 1 if every character occurs in vocabulary pieces, or is ASCII and either a letter or spelled in bytes. */
static int is_listed(const text_rules *r, const char *text, size_t length) {
    for (size_t at = 0, bytes; at < length; at += bytes) {
        const int32_t c = text_character(text, length, at, &bytes);
        if (!c && text[at]) return 1;
        if (!r->characters || r->characters[c / 8] >> c % 8 & 1) continue;
        if (c >= 0x80 || (!r->bytes && c > ' ' && !text_is_wordlike(text, length, at))) return 0;
    }
    return 1;
}

/* Collect the characters of text pieces, decoding only pieces with new characters. Return 0 if out of memory. */
static int find_characters(text_rules *r) {
    const text_front *f = r->front;
    if (!f->tokeniser) return 1;
    r->characters = calloc(0x110000 / 8, 1);
    for (int32_t id = 0, n = spm_size(f->tokeniser); r->characters && id < n; id++) {
        const char *piece = spm_piece(f->tokeniser, id);
        const size_t length = strlen(piece);
        const int byte = strncmp(piece, "<0x", 3) == 0 && spm_is_byte(f->tokeniser, id); /* fast test first */
        r->bytes |= byte;
        if (byte || is_listed(r, piece, length) || spm_is_control(f->tokeniser, id) ||
            spm_is_unknown(f->tokeniser, id) || (f->map.ids && f->map.ids[id] < 0))
            continue;
        for (size_t at = 0, bytes; at < length; at += bytes) {
            const int32_t c = text_character(piece, length, at, &bytes);
            if (!c) break;
            r->characters[c / 8] = (unsigned char)(r->characters[c / 8] | 1 << c % 8);
        }
    }
    return r->characters != NULL;
}

moe_status text_rules_new(const text_front *front, int spans, const char *glossary, const text_bytes *contents,
                          text_rules **out, moe_error *error) {
    text_rules *r = calloc(1, sizeof *r);
    if (!r) return text_out_of_memory(error);
    *r = (text_rules){ .front = front, .targets = text_front_of_targets(front), .spans = spans };
    text_bytes file = { 0 };
    moe_status status = spans && !find_characters(r) ? text_out_of_memory(error) : MOE_OK;
    if (!status && glossary && !contents) status = text_glossary_load(glossary, &file, error), contents = &file;
    if (!status && glossary)
        status = text_glossary_read(&r->targets, glossary, contents->data, contents->length, &r->glossary, error);
    text_bytes_free(&file);
    if (status) return text_rules_free(r), status;
    return *out = r, MOE_OK;
}

moe_status text_rules_with(const text_rules *base, const char *const *sources, const char *const *translations,
                           size_t n, text_rules **out, moe_error *error) {
    text_rules *r = malloc(sizeof *r);
    if (!r) return text_out_of_memory(error);
    *r = *base;
    r->derived = 1, r->glossary = NULL;
    const moe_status status = text_glossary_of(&base->targets, sources, translations, n, &r->glossary, error);
    if (status) return text_rules_free(r), status;
    return *out = r, MOE_OK;
}

int text_rules_spans(const text_rules *r) { return r->spans; }
const text_glossary *text_rules_glossary(const text_rules *r) { return r->glossary; }

void text_rules_free(text_rules *r) {
    if (!r) return;
    text_glossary_free(r->glossary);
    if (!r->derived) free(r->characters);
    free(r);
}

/* ==== 2. Showing ======================================================================================== */

/* A protected span. */
typedef struct span {
    text_span_kind kind;
    size_t source, length; /* bytes in the trimmed text */
    size_t at, shown;      /* bytes in the shown text; `shown` is 0 for markup */
    size_t partner;        /* index of the other tag of a pair */
    size_t parent, depth;  /* index of the pair around the span, or SIZE_MAX; number of pairs around it */
    int before, after;     /* 1 at the text's start or after white space; 1 at the text's end or before white space */
    size_t first, n;       /* tokens of the span, set by text_guard_bind */
    int runs_on;           /* 1 if the last token includes following punctuation, as in "2008." */
    const text_term *term; /* may be NULL */
    int inflected;         /* 1 if the term has an ending in the text, and may have one in the translation */
    size_t from, to;       /* place in the translation; SIZE_MAX if unknown */
} span;

/* The separate translation of a phrase between a pair of tags. */
typedef struct phrase {
    size_t source;        /* offset of the pair's first tag */
    size_t begin, length; /* position in text_guard.phrase_text */
} phrase;

/* A word of the FREE translation for a missing term. */
typedef struct old_word {
    const text_term *term;
    size_t at; /* offset in text_guard.old, where it is NUL-terminated */
    int sure;  /* 1 if the term alone becomes this word; 0 for a compound of it, or if the model wrote it while */
               /* attending to the term                                                                          */
} old_word;

/* A change of the translation: bytes [at, at + length) become span `what`, or are removed if `what` is SIZE_MAX. */
typedef struct edit {
    size_t at, length, what, order;
} edit;

struct text_guard {
    int capitals;       /* 1 if the translation is in upper case */
    int used, verbatim; /* `verbatim` is 1 if the text contains no language */
    int lower;          /* 1 if capitalised terms are shown as the glossary spells them */
    int placeholders;   /* kind of placeholders: 0 for X1, 1 for [1] */
    int joins;          /* 1 if slashes between words are shown with spaces */
    int numbers;        /* 1 if placeholders replace numbers */
    text_message_text message;
    text_terms terms;     /* treatment of terms */
    text_bytes free, old; /* the FREE translation; its words for missing terms, NUL-terminated */
    old_word *old_words;
    size_t n_old, old_capacity;
    size_t *missing; /* spans of the terms that the FREE translation lacks */
    size_t n_missing, missing_capacity;
    size_t enough;            /* number of words in the FREE translation, plus those of missing terms */
    float cost;               /* cost_of the BOUND translation, with penalties */
    text_bytes text, shown;   /* the trimmed text; the shown text */
    text_plain plain;         /* the text without markup, if there is a glossary */
    text_bytes before, after; /* white space, markers and brackets removed from its ends */
    span *spans;
    size_t n, capacity;
    moe_constraint *constraints;
    size_t n_constraints, constraint_capacity;
    text_ids ids, scratch; /* `ids` contains the tokens of all constraints */
    size_t room;           /* maximum number of tokens in `ids` */
    text_offsets offsets;  /* start of each token of the shown text */
    text_bytes translation;
    text_offsets places; /* start of each token of the translation */
    edit *edits;
    size_t n_edits, edit_capacity;
    phrase *phrases;
    size_t n_phrases, phrase_capacity;
    text_bytes phrase_text;
};

void text_guard_clear(text_guard *g) {
    if (!g) return;
    g->used = 0;
    g->n_phrases = 0;
    text_clear(&g->phrase_text);
}

int text_guard_used(const text_guard *g) { return g && g->used; }

size_t text_guard_outside_term(const text_guard *g, size_t at) {
    for (size_t i = 0; text_guard_used(g) && i < g->n; i++) {
        const span *k = &g->spans[i];
        const size_t begin = g->before.length + k->source;
        size_t end = k->source + k->length;
        if (!k->term || at <= begin || at >= begin + k->length) continue;
        if (k->source) return begin;
        while (end < g->text.length && is_space(g->text.data[end])) end++;
        return end < g->text.length ? g->before.length + end : 0;
    }
    return at;
}

size_t text_guard_plain(const text_guard *g) {
    if (!text_guard_used(g)) return 0;
    for (size_t i = 0; i < g->n; i++)
        if (g->spans[i].kind == TEXT_SPAN_WORD || (g->spans[i].kind != TEXT_SPAN_NUMBER && !g->spans[i].term))
            return SIZE_MAX;
    const int bracketed = text_before_blanks(g->after.data, g->after.length) > 0;
    return g->shown.length == g->text.length && !g->verbatim && !g->lower && !bracketed ? g->before.length : SIZE_MAX;
}

static int has_signs(const char *data, size_t length) {
    for (size_t at = 0; at < length; at++)
        if (data[at] > ' ' && !(data[at] >= 'a' && data[at] <= 'z') && !(data[at] >= 'A' && data[at] <= 'Z')) return 1;
    return 0;
}

int text_guard_has_signs(const text_guard *g) {
    for (size_t i = 0; text_guard_used(g) && i < g->n; i++) {
        const span *k = &g->spans[i];
        if (!k->term) continue;
        if (has_signs(g->text.data + k->source, k->length) || has_signs(k->term->target, strlen(k->term->target)))
            return 1;
    }
    return 0;
}

unsigned text_guard_digits(const text_guard *g) {
    unsigned digits = 0;
    for (size_t i = 0; text_guard_used(g) && !g->verbatim && i < g->n; i++)
        for (size_t at = g->spans[i].at; g->spans[i].kind == TEXT_SPAN_WORD && at < g->spans[i].at + g->spans[i].shown;
             at++)
            if (is_digit(g->shown.data[at])) digits |= 1u << (g->shown.data[at] - '0');
    return digits;
}

void text_guard_free(text_guard *g) {
    if (!g) return;
    text_bytes *const all[] = { &g->text,        &g->shown,       &g->before, &g->after,
                                &g->translation, &g->phrase_text, &g->free,   &g->old };
    text_bytes_free_all(all, sizeof all / sizeof *all);
    text_plain_free(&g->plain);
    free(g->phrases);
    free(g->old_words);
    free(g->missing);
    text_ids_free(&g->ids);
    text_ids_free(&g->scratch);
    free(g->spans);
    free(g->constraints);
    free(g->offsets.data);
    free(g->places.data);
    free(g->edits);
    free(g);
}

static span *add_span(text_guard *g, text_span_kind kind, size_t source, size_t length) {
    const size_t end = source + length;
    const span k = { .kind = kind,
                     .source = source,
                     .length = length,
                     .at = g->shown.length,
                     .partner = SIZE_MAX,
                     .before = !source || is_space(g->text.data[source - 1]),
                     .after = end == g->text.length || is_space(g->text.data[end]) };
    return text_add(&g->spans, &g->n, &g->capacity, &k, 1, sizeof k, NULL) ? NULL : &g->spans[g->n - 1];
}

/* Return the largest N for which the text contains XN or [N]. */
static int largest_taken(const text_guard *g) {
    int largest = 0;
    for (size_t i = 0; i < g->text.length; i++) {
        int number = 0;
        if (g->text.data[i] != 'X' && g->text.data[i] != '[') continue;
        for (size_t at = i + 1; at < g->text.length && is_digit(g->text.data[at]); at++)
            number = number < 100000 ? 10 * number + (g->text.data[at] - '0') : number;
        if (number > largest) largest = number;
    }
    return largest;
}

static void show_word(text_guard *g, span *k, int *number) {
    const char *text = g->text.data;
    const size_t end = k->source + k->length;
    if (g->shown.length && !is_space(g->shown.data[g->shown.length - 1])) text_append(&g->shown, " ", 1);
    k->at = g->shown.length;
    const int counts = g->message == TEXT_MESSAGE_PLURAL && k->length == 1 && text[k->source] == '#';
    text_append_string(&g->shown, g->placeholders ? "[" : counts ? "2" : "X"); /* shown as a number, such as 21 */
    text_printf(&g->shown, g->placeholders ? "%d]" : "%d", ++*number);
    k->shown = g->shown.length - k->at;
    if (text_is_wordlike(text, g->text.length, end)) text_append(&g->shown, " ", 1);
}

/* Return the first byte of the plain text that comes from data[at] or later. */
static size_t plain_from(const text_guard *g, size_t at) {
    size_t low = 0, high = g->plain.text.length;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (g->plain.from[middle] < at) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Return 1 if a pair ends and another begins inside a term, which no word can be part of: <b>customer</b>
 * <i>portal</i>.
 */
static int is_split(const text_guard *g, size_t begin, size_t bytes) {
    size_t opened = 0, closed = 0, n;
    text_scan scan = text_scan_begin(g->text.data, begin + bytes);
    scan.message = g->message;
    for (size_t at = begin; at < begin + bytes; at += n) {
        const text_span_kind kind = text_span_next(&scan, at, &n);
        opened += kind == TEXT_SPAN_OPEN;
        if (kind != TEXT_SPAN_CLOSE) continue;
        if (opened) opened--;
        else closed++;
    }
    return opened && closed;
}

/* Find the term at a word or punctuation mark, and set *bytes to its length with the markup inside it. Return NULL if
 * no term matches, if it is split, or if a longer span starts there. */
static const text_term *term_at(const text_rules *r, const text_guard *g, size_t at, text_span_kind kind, size_t *bytes,
                                int *inflected) {
    const size_t begin = r->glossary ? plain_from(g, at) : 0;
    if (!r->glossary || begin == g->plain.text.length || g->plain.from[begin] != at) return NULL;
    size_t found = *bytes;
    const text_term *term = text_term_at(r->glossary, &g->plain.text, begin, kind, &found, inflected);
    if (!term) return NULL;
    found = g->plain.from[begin + found - 1] + 1 - at;
    if (is_split(g, at, found)) return NULL;
    *bytes = found;
    return term;
}

/* Return a term as the text spells it, without markup. */
static moe_span spelled(const text_guard *g, const span *k) {
    const size_t begin = plain_from(g, k->source), end = plain_from(g, k->source + k->length);
    return (moe_span){ g->plain.text.data + begin, end - begin };
}

/* Add the markup inside term i, which then encloses the whole term. Return 0 if out of memory. */
static int add_markup_inside(text_guard *g, size_t i) {
    const size_t begin = g->spans[i].source, end = begin + g->spans[i].length;
    text_scan scan = text_scan_begin(g->text.data, end);
    scan.message = g->message;
    for (size_t at = begin, bytes; at < end; at += bytes) {
        const text_span_kind kind = text_span_next(&scan, at, &bytes);
        if (kind == TEXT_SPAN_HYPHEN || !text_is_hidden(g->text.data, at, kind, bytes)) continue;
        span *k = add_span(g, kind, at, bytes);
        if (!k) return 0;
        k->at = g->spans[i].at + (kind == TEXT_SPAN_OPEN ? 0 : g->spans[i].shown);
        if (kind != TEXT_SPAN_OPEN) continue;
        const span open = *k, term = g->spans[i];
        memmove(g->spans + i + 2, g->spans + i + 1, (g->n - i - 2) * sizeof open);
        g->spans[i] = open, g->spans[++i] = term;
    }
    return 1;
}

/* Return 1 if a token is a single byte. */
static int is_byte(const text_front *front, int32_t id) {
    const moe_span piece = text_source_piece(front, id);
    return piece.length == 6 && memcmp(piece.data, "<0x", 3) == 0 && piece.data[5] == '>';
}

/* Return the length of the word or sign at text[at] if the vocabulary cannot spell it, otherwise 0. Frequent words are
 * excluded, because models have learned to read them without the letters that the vocabulary lacks. */
static size_t unspelt(const text_rules *r, text_guard *g, size_t at, int *failed) {
    const char *text = g->text.data;
    const size_t length = g->text.length;
    const size_t bytes = text_is_unspaced(text, length, at) ? character_bytes(&g->text, at) : word_bytes(&g->text, at);
    moe_error ignored;
    if (bytes > MAX_WORD || is_listed(r, text + at, bytes) || text_word_is_common(text + at, bytes)) return 0;
    const moe_status status = text_encode(r->front, text + at, bytes, &g->scratch, &ignored);
    if (status == MOE_ERROR_MEMORY) return *failed = 1, 0;
    for (size_t i = 0; !status && i < g->scratch.length; i++)
        if (text_is_unknown(r->front, g->scratch.data[i]) || is_byte(r->front, g->scratch.data[i])) return bytes;
    return status ? bytes : 0;
}

/* Return the length of a run in a script without spaces if the vocabulary lacks a quarter of its characters, otherwise
 * 0. The model does not know such a script, and a placeholder per character would break up the run. Set *end to its
 * end. */
static size_t unspelt_run(const text_rules *r, text_guard *g, size_t at, size_t *end, int *failed) {
    const char *text = g->text.data;
    const size_t length = g->text.length;
    size_t all = 0, strange = 0, to = at;
    for (; to < length && text_is_unspaced(text, length, to) && text_is_wordlike(text, length, to);
         to += character_bytes(&g->text, to), all++)
        strange += unspelt(r, g, to, failed) > 0;
    *end = to;
    return strange && 4 * strange >= all ? to - at : 0;
}

/* Append the shown form of a span. */
static void show_span(text_guard *g, span *k, int *number) {
    const char *text = g->text.data;
    const size_t end = k->source + k->length;
    const char last = g->shown.length ? g->shown.data[g->shown.length - 1] : ' ';
    if (k->kind == TEXT_SPAN_WORD) {
        show_word(g, k, number);
    } else if (k->term) {
        const moe_span word = spelled(g, k);
        if (g->lower && text_term_is_capitals(k->term, word.data, word.length))
            text_term_lower_case(k->term, word.data, word.length, &g->shown);
        else text_append(&g->shown, word.data, word.length);
        k->shown = g->shown.length - k->at;
    } else if (k->kind == TEXT_SPAN_NUMBER) {
        text_append(&g->shown, text + k->source, k->length);
        k->shown = k->length;
    } else if (!is_space(last) && text_is_wordlike(text, g->text.length, end) &&
               (strchr(".!?,;:", last) || wordlike_before(&g->shown, g->shown.length))) {
        text_append(&g->shown, " ", 1);
    }
}

/* Extend a placeholder to surrounding quotation marks or brackets, which models lose. Return the bytes before it. */
static size_t enclose(text_guard *g, size_t at, size_t *bytes) {
    static const char *const marks[][2] = {
        { "(", ")" },
        { "[", "]" },
        { "\"", "\"" },
        { "'", "'" },
        { "`", "'" },
        { "\xE2\x80\x98", "\xE2\x80\x99" },
        { "\xE2\x80\x9C", "\xE2\x80\x9D" },
        { "\xE2\x80\x9E", "\xE2\x80\x9C" },
        { "\xC2\xAB", "\xC2\xBB" },
    };
    const text_bytes *t = &g->text;
    const size_t end = at + *bytes;
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        const size_t open = strlen(marks[i][0]), close = strlen(marks[i][1]);
        if (open > at || memcmp(t->data + at - open, marks[i][0], open) != 0 || wordlike_before(t, at - open) ||
            !text_begins_with(t->data + end, t->length - end, marks[i][1]) || wordlike(t, end + close) ||
            !text_ends_with(g->shown.data, g->shown.length, marks[i][0]))
            continue;
        g->shown.length -= open;
        *bytes += open + close;
        return open;
    }
    return 0;
}

/* Return the length of a number and adjoining letters, or 0. */
static size_t lettered_number(const text_bytes *t, size_t at) {
    if (!is_digit(t->data[at]) || wordlike_before(t, at)) return 0;
    return text_word_end(t->data, t->length, at) - at;
}

/* Show signs as models have learned them: dashes and slashes between words with spaces, "10 a.m." for "10am". Return
 * the bytes that this replaces, or 0. */
static size_t respell(text_guard *g, size_t at) {
    const char *text = g->text.data;
    const size_t length = g->text.length, n = text_joint(text, length, at);
    if (n) {
        const char *sign = text[at] == '-' ? "\xE2\x80\x93" : text + at;
        text_append(&g->shown, " ", 1);
        text_append(&g->shown, sign, text[at] == '-' ? 3 : n);
        text_append(&g->shown, " ", 1);
        g->joins |= text[at] == '/';
        return n;
    }
    if (at + 2 > length || text[at + 1] != 'm' || (text[at] != 'a' && text[at] != 'p') || wordlike(&g->text, at + 2))
        return 0;
    const int tight = at && is_digit(text[at - 1]);
    if (!tight && !(at > 1 && text[at - 1] == ' ' && is_digit(text[at - 2]) && text[at] == 'p')) return 0;
    text_printf(&g->shown, "%s%c.m%s", tight ? " " : "", text[at], at + 2 < length && text[at + 2] == '.' ? "" : ".");
    return 2;
}

/* Return 1 for the synopsis of a command, which is not language: push [-p | --patch] [-q] [<path>]. */
static int is_synopsis(const text_bytes *t) {
    size_t options = 0, words = 0, depth = 0, bytes;
    if (!t->length || t->data[0] < 'a' || t->data[0] > 'z') return 0;
    for (size_t at = 0; at < t->length; at += bytes) {
        bytes = wordlike(t, at) ? word_bytes(t, at) : 1;
        words += (size_t)(wordlike(t, at) && !depth);
        options += (size_t)text_begins_with(t->data + at, t->length - at, "[-");
        if (t->data[at] == '[') depth++;
        if (t->data[at] == ']') depth -= depth > 0;
    }
    return options > 1 && words <= options;
}

/* Find the spans of a text and build the shown text. Return 1 if it contains language, -1 if out of memory. */
static int show(const text_rules *r, text_guard *g) {
    const char *text = g->text.data;
    int number = largest_taken(g), language = 0, failed = 0;
    size_t bytes, unused, word = 0, run = 0; /* ends of the last examined word and unspaced run */
    text_scan scan = text_scan_begin(text, g->text.length);
    scan.message = g->message;
    for (size_t at = 0; at < g->text.length; at += bytes) {
        text_span_kind kind = text_span_next(&scan, at, &bytes);
        if (!r->spans) kind = TEXT_SPAN_NONE, bytes = character_bytes(&g->text, at);
        int inflected = 0;
        const text_term *term = term_at(r, g, at, kind, &bytes, &inflected);
        if (term) kind = g->terms == TEXT_TERMS_REPLACED ? TEXT_SPAN_WORD : TEXT_SPAN_NONE;
        if (kind == TEXT_SPAN_HYPHEN) {
            g->used = 1;
            continue;
        }
        if (kind == TEXT_SPAN_NONE && !term && r->spans && at >= word) {
            const int unspaced = text_is_unspaced(text, g->text.length, at);
            size_t strange = at >= run && unspaced ? unspelt_run(r, g, at, &run, &failed) : 0;
            if (!strange) strange = unspelt(r, g, at, &failed);
            word = at + (unspaced ? bytes : word_bytes(&g->text, at));
            if (strange) kind = wordlike(&g->text, at) ? TEXT_SPAN_WORD : TEXT_SPAN_LONE, bytes = strange;
        }
        if (kind == TEXT_SPAN_NUMBER && (g->numbers || !is_listed(r, text + at, bytes))) kind = TEXT_SPAN_WORD;
        if (kind == TEXT_SPAN_NONE && !term && g->numbers && (unused = lettered_number(&g->text, at)))
            kind = TEXT_SPAN_WORD, bytes = unused;
        if (kind == TEXT_SPAN_WORD && !term) at -= enclose(g, at, &bytes);
        if (kind == TEXT_SPAN_NONE && !term) {
            language |= text_is_letter(text_character(text, g->text.length, at, &unused));
            const size_t respelt = r->spans ? respell(g, at) : 0;
            if (respelt) g->used = 1, bytes = respelt;
            else text_append(&g->shown, text + at, bytes);
            continue;
        }
        span *k = add_span(g, kind, at, bytes);
        if (!k || failed) return -1;
        k->term = term;
        k->inflected = inflected;
        show_span(g, k, &number);
        if (g->shown.failed || (term && !add_markup_inside(g, g->n - 1))) return -1;
    }
    return g->shown.failed || failed ? -1 : language && g->n <= MAX_SPANS && !(r->spans && is_synopsis(&g->text));
}

/* Build the shown text. Terms in capitals within ordinary text are shown as the glossary spells them, because few
 * models have learned capitals. */
static int show_lower(const text_rules *r, text_guard *g) {
    int shouted = 0, language = show(r, g);
    if (language < 0 || text_is_capitals(g->shown.data, g->shown.length)) return language;
    for (size_t i = 0; i < g->n && !shouted; i++) {
        const span *k = &g->spans[i];
        const moe_span word = k->term ? spelled(g, k) : (moe_span){ "", 0 };
        shouted = k->term && text_term_is_capitals(k->term, word.data, word.length);
    }
    if (!shouted) return language;
    g->lower = 1;
    g->n = g->shown.length = 0;
    return show(r, g);
}

static moe_span tag_name(const text_guard *g, const span *k) {
    moe_span name;
    name.length = text_tag_name(g->text.data + k->source, k->length, &name.data);
    return name;
}

static void leave_unpaired(text_guard *g, size_t first, size_t last) {
    for (span *k = g->spans + first; k < g->spans + last; k++)
        if (k->partner == SIZE_MAX && (k->kind == TEXT_SPAN_OPEN || k->kind == TEXT_SPAN_CLOSE))
            k->kind = TEXT_SPAN_LONE;
}

/* Match pairs of tags. A tag without a partner becomes LONE. */
static void pair_tags(text_guard *g) {
    for (size_t i = 0; i < g->n; i++) {
        span *close = &g->spans[i];
        if (close->kind != TEXT_SPAN_CLOSE) continue;
        const moe_span name = tag_name(g, close);
        for (size_t j = i; j-- > 0 && close->partner == SIZE_MAX;) {
            span *open = &g->spans[j];
            if (open->kind != TEXT_SPAN_OPEN || open->partner != SIZE_MAX || !text_same(tag_name(g, open), name))
                continue;
            open->partner = i, close->partner = j;
            leave_unpaired(g, j + 1, i);
        }
    }
    leave_unpaired(g, 0, g->n);
}

moe_status text_guard_begin(const text_rules *r, const char *text, size_t length, int more, int placeholders,
                            text_message_text message, text_terms terms, text_guard **guard, moe_span *shown,
                            moe_error *error) {
    text_guard *g = *guard;
    moe_span core = text_trimmed(text, length, " \t");
    size_t after = (size_t)(text + length - core.data) - core.length;
    if (r->spans) {
        const size_t before = text_frame(text, length, &after);
        core = (moe_span){ text + before, length - before - after };
    }
    const char *end = core.data + core.length;
    *shown = (moe_span){ text, length };
    if (!g) *guard = g = calloc(1, sizeof *g);
    if (!g) return text_out_of_memory(error);
    g->used = g->verbatim = g->lower = g->joins = 0;
    g->placeholders = (placeholders & TEXT_IN_BRACKETS) > 0;
    g->numbers = (placeholders & TEXT_FOR_NUMBERS) > 0;
    g->message = message;
    g->terms = terms;
    g->n = g->n_constraints = g->ids.length = 0;
    text_bytes *const all[] = { &g->text, &g->shown, &g->before, &g->after };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) text_clear(all[i]), text_append(all[i], "", 0);
    if (!core.length) return MOE_OK;
    if (r->spans) text_append(&g->before, text, (size_t)(core.data - text));
    if (r->spans) text_append(&g->after, end, more ? text_before_blanks(end, after) : after);
    text_append(&g->text, core.data, core.length);
    int language = 1;
    if (r->glossary) {
        const moe_span whole = { g->text.data, g->text.length };
        const moe_status status = text_plain_set(&g->plain, whole, r->spans, message, error);
        if (status) return status;
    }
    if (g->text.failed || g->before.failed || g->after.failed) return text_out_of_memory(error);
    if (r->spans || r->glossary) language = show_lower(r, g);
    else text_append(&g->shown, g->text.data, g->text.length);
    if (language < 0 || g->shown.failed) return text_out_of_memory(error);
    if (g->n || g->before.length || g->after.length || !language) g->used = 1;
    if (!g->used) return MOE_OK;
    g->verbatim = !language;
    if (g->n <= MAX_SPANS) pair_tags(g);
    *shown = g->verbatim ? (moe_span){ g->text.data, text_utf8_cut(g->text.data, g->text.length, VERBATIM_BYTES) }
                         : (moe_span){ g->shown.data, g->shown.length };
    return MOE_OK;
}

void text_guard_put_placeholders(const text_guard *g, char *lower) {
    for (size_t i = 0; !g->verbatim && i < g->n; i++)
        if (g->spans[i].shown && (!g->spans[i].term || g->spans[i].kind == TEXT_SPAN_WORD))
            memcpy(lower + g->spans[i].at, g->shown.data + g->spans[i].at, g->spans[i].shown);
}

/* ==== 3. Binding ======================================================================================== */

/* Return the start of a token of the shown text, excluding its leading space. */
static size_t token_begin(const text_guard *g, size_t i) {
    size_t begin = g->offsets.data[i];
    while (begin < g->shown.length && is_space(g->shown.data[begin])) begin++;
    return begin;
}

/* Find the tokens of a span; k->n is 0 if unknown. Visit spans in text order, since *token only advances. */
static void find_tokens(const text_guard *g, span *k, size_t *token) {
    const size_t end = k->at + k->shown;
    k->first = k->n = 0;
    k->runs_on = 0;
    for (size_t *i = token; *i < g->offsets.length; ++*i) {
        const size_t begin = token_begin(g, *i);
        if (begin < k->at) continue;
        if (begin >= end) break;
        if (!k->n) k->first = *i;
        k->n = *i + 1 - k->first;
        k->runs_on = end < (*i + 1 < g->offsets.length ? g->offsets.data[*i + 1] : g->shown.length);
    }
}

/* Add a constraint for a span: the translation must contain the tokens `ids`. */
static moe_status add_constraint(text_guard *g, const span *k, const text_ids *ids, moe_error *error) {
    if (g->n_constraints == MOE_MAX_CONSTRAINTS || g->ids.length + ids->length >= g->room) return MOE_OK;
    const int once = k->kind == TEXT_SPAN_WORD || (k->term && k->term->stays);
    const moe_constraint c = { .n_ids = ids->length, .first = k->first, .n_source = k->n, .once = once };
    const moe_status status = text_ids_append(&g->ids, ids->data, ids->length, error);
    if (status) return status;
    return text_add(&g->constraints, &g->n_constraints, &g->constraint_capacity, &c, 1, sizeof c, error);
}

moe_status text_guard_bind(const text_rules *r, text_guard *g, const char *encoded, size_t length, const text_ids *ids,
                           size_t room, moe_error *error) {
    const text_front *f = r->front;
    size_t token = 0;
    moe_status status = MOE_OK;
    g->offsets.length = 0;
    if (g->verbatim || !text_cuts(f)) return MOE_OK;
    if (text_encode_begins(f, encoded, length, &g->offsets, error) == MOE_ERROR_MEMORY)
        return text_out_of_memory(error);
    if (g->offsets.length != ids->length) g->offsets.length = 0;
    g->room = room;
    for (size_t i = 0; i < g->n && !status; i++) {
        span *k = &g->spans[i];
        if (!k->shown) continue;
        find_tokens(g, k, &token);
        if (k->kind == TEXT_SPAN_NUMBER && !(k->at == 0 || is_space(encoded[k->at - 1]))) continue;
        /* A model with the piece "2008." writes that piece. A constraint on 2008 would make it omit the full stop. */
        if (k->runs_on && !k->term && !g->placeholders) continue;
        if (k->term && g->terms != TEXT_TERMS_REPLACED) {
            if (g->terms != TEXT_TERMS_FREE && g->terms != TEXT_TERMS_EDITED)
                status = add_constraint(g, k, &k->term->ids, error);
            continue;
        }
        status = text_encode(&r->targets, g->shown.data + k->at, k->shown, &g->scratch, error);
        if (!status) status = add_constraint(g, k, &g->scratch, error);
    }
    for (size_t c = 0, at = 0; c < g->n_constraints; at += g->constraints[c++].n_ids)
        g->constraints[c].ids = g->ids.data + at;
    return status;
}

void text_guard_constrain(const text_guard *g, moe_request *request) {
    if (!text_guard_used(g) || g->verbatim) return;
    request->constraints = g->constraints;
    request->n_constraints = g->n_constraints;
}

int text_guard_has_constraints(const text_guard *g) { return text_guard_used(g) && !g->verbatim && g->n_constraints; }

/* ==== 4. Placing ======================================================================================== */

/* Return the start of the next word in [at, end), or `end`. */
static size_t next_word(const text_bytes *t, size_t at, size_t end) {
    if (at < end && character_begin(t, at) < at) at += character_bytes(t, at);
    while (at < end && !wordlike(t, at)) at += character_bytes(t, at);
    return least(at, end);
}

/* Return the end of the word that contains the character before `at`, or `at`. */
static size_t end_of_word(const text_bytes *t, size_t at) {
    return most(at, text_word_end(t->data, t->length, character_begin(t, at - 1)));
}

/* Return the end of the last word in [begin, end), or `begin`. */
static size_t last_word_end(const text_bytes *t, size_t begin, size_t end) {
    while (end > begin && !wordlike_before(t, end)) end--;
    return end;
}

/* Return the start of the word that contains the character at `at`. */
static size_t word_begin(const text_bytes *t, size_t at) {
    while (at && wordlike(t, at)) {
        const size_t before = character_begin(t, at - 1);
        if (!wordlike(t, before)) break;
        at = before;
    }
    return at;
}

/* Find the bytes of token j of the translation, extended to whole words; return 0 if it is white space. */
static int token_bytes(const text_guard *g, size_t j, size_t *begin, size_t *end) {
    const text_bytes *t = &g->translation;
    *begin = g->places.data[j];
    *end = j + 1 < g->places.length ? g->places.data[j + 1] : t->length;
    while (*begin < *end && is_space(t->data[*begin])) ++*begin;
    while (*end > *begin && is_space(t->data[*end - 1])) --*end;
    if (*begin == *end) return 0;
    *begin = word_begin(t, character_begin(t, *begin));
    *end = end_of_word(t, *end);
    return *end > *begin;
}

/* Find the bytes that the model wrote while attending to source tokens [first, end); return 0 if there are none. */
static int find_written(const text_guard *g, const moe_hypothesis *h, size_t first, size_t end, size_t *from,
                        size_t *to) {
    int found = 0;
    for (size_t j = 0; h->sources && j < g->places.length; j++) {
        size_t begin, stop;
        if (h->sources[j] < (int32_t)first || h->sources[j] >= (int32_t)end || !token_bytes(g, j, &begin, &stop))
            continue;
        *from = found ? least(*from, begin) : begin;
        *to = found ? most(*to, stop) : stop;
        found = 1;
    }
    return found;
}

/* Return the first token of the shown text that starts at or after byte `at`. */
static size_t token_at(const text_guard *g, size_t at) {
    size_t i = 0;
    for (; i < g->offsets.length; i++) {
        const size_t begin = token_begin(g, i);
        if (begin >= at && begin < g->shown.length) break;
    }
    return i;
}

static int has_word(const text_bytes *t, size_t at, size_t end) { return next_word(t, at, end) < end; }

/* Find the place for byte `at` of the shown text: after the preceding word if `left` is 1, or before the next word. */
static size_t find_place(const text_guard *g, const moe_hypothesis *h, size_t at, int left) {
    const text_bytes *t = &g->translation;
    const size_t token = token_at(g, at);
    size_t from, to;
    if (!has_word(&g->shown, 0, at)) return 0;
    if (!has_word(&g->shown, at, g->shown.length)) /* assume similar punctuation at the end */
        return at < g->shown.length ? last_word_end(t, 0, t->length) : t->length;
    if (!g->offsets.length || !h->sources) { /* guess by the relative position, between two words */
        size_t guess = (size_t)((double)at / (double)g->shown.length * (double)t->length);
        for (guess = least(guess, t->length); guess < t->length && !is_space(t->data[guess]); guess++) {}
        return !left && guess < t->length ? guess + 1 : guess;
    }
    for (size_t i = token; left && i-- > 0;)
        if (find_written(g, h, i, i + 1, &from, &to)) return to;
    for (size_t i = token; i < g->offsets.length; i++)
        if (find_written(g, h, i, i + 1, &from, &to)) return from;
    return t->length;
}

/* Place an unpaired tag: next to the translation of the word that it adjoins, or at a space if it is between spaces. */
static void place_lone(const text_guard *g, const moe_hypothesis *h, span *k) {
    const text_bytes *t = &g->translation;
    const int left = !k->before;
    size_t at = find_place(g, h, k->at, left);
    if (has_word(&g->shown, 0, k->at) && has_word(&g->shown, k->at, g->shown.length) && k->before && k->after)
        while (at && at < t->length && !is_space(t->data[at - 1])) at--;
    k->from = k->to = at;
}

/* Return 1 if a pair of tags contains all words. It then surrounds the translation, except for outer punctuation. */
static int is_around_all(const text_guard *g, const span *k) {
    const span *close = &g->spans[k->partner];
    return !has_word(&g->shown, 0, k->at) && !has_word(&g->shown, close->at, g->shown.length);
}

static void place_around_all(const text_guard *g, span *k) {
    const text_bytes *t = &g->translation;
    const span *close = &g->spans[k->partner];
    size_t bytes;
    k->from = 0, k->to = t->length;
    for (size_t at = 0; at < k->at && k->from < t->length; at += bytes) { /* punctuation before the pair */
        bytes = word_bytes(&g->shown, at);
        if (wordlike(t, k->from)) break;
        k->from += word_bytes(t, k->from);
    }
    for (size_t at = close->at; at < g->shown.length && k->to > k->from; at += bytes) { /* punctuation after the pair */
        const size_t last = character_begin(t, k->to - 1);
        bytes = word_bytes(&g->shown, at);
        if (wordlike(t, last)) break;
        k->to = last;
    }
}

/* Choose a nearby word for a pair, whose contents end at `end`, if no token was written while attending to its
 * contents. If two words were written for the preceding word, choose the second. */
static void find_word(const text_guard *g, const moe_hypothesis *h, span *k, size_t end) {
    const text_bytes *t = &g->translation;
    const size_t before = token_at(g, k->at);
    size_t from, to;
    k->from = k->to = find_place(g, h, k->at, 1);
    if (end == k->at || !t->length) return;
    if (before && find_written(g, h, before - 1, before, &from, &to)) {
        to = last_word_end(t, from, to);
        const size_t last = to > from ? word_begin(t, character_begin(t, to - 1)) : to;
        if (last > from) {
            k->from = last, k->to = to;
            return;
        }
    }
    k->from = next_word(t, k->from, t->length);
    if (k->from == t->length) { /* no word follows, so take the last one */
        k->to = k->from = last_word_end(t, 0, k->from);
        k->from = k->from ? word_begin(t, character_begin(t, k->from - 1)) : 0;
    } else {
        k->to = text_word_end(t->data, t->length, k->from);
    }
}

/* Return the words inside a pair of tags if they are worth a separate translation: few and without protected spans. */
static moe_span words_between(const text_guard *g, size_t i) {
    const span *k = &g->spans[i];
    const moe_span nothing = { "", 0 };
    if (k->kind != TEXT_SPAN_OPEN || is_around_all(g, k)) return nothing;
    for (size_t j = i + 1; j < k->partner; j++)
        if (g->spans[j].shown) return nothing;
    const size_t end = g->spans[k->partner].at;
    const moe_span words = text_trimmed(g->shown.data + k->at, end - k->at, " \t");
    return words.length > PHRASE_BYTES || !has_word(&g->shown, k->at, end) ? nothing : words;
}

moe_span text_guard_phrase(const text_guard *g, size_t n, size_t *source, int *lower) {
    moe_span words = { "", 0 };
    size_t pairs = 0;
    *lower = 0;
    if (!text_guard_used(g) || g->verbatim || g->n > MAX_SPANS) return words;
    for (size_t i = 0; i < g->n && pairs < MAX_PHRASES; i++) {
        words = words_between(g, i);
        if (!words.length) continue;
        pairs++;
        *source = g->spans[i].source;
        if (n-- == 0) return words;
        if (text_is_short(words.data, words.length) < 2) continue;
        *lower = 1;
        if (n-- == 0) return words;
        *lower = 0;
    }
    return (moe_span){ "", 0 };
}

int text_guard_add_phrase(text_guard *g, size_t source, const char *text, size_t length) {
    const phrase p = { source, g->phrase_text.length, length };
    text_append(&g->phrase_text, text, length);
    return !g->phrase_text.failed && !text_add(&g->phrases, &g->n_phrases, &g->phrase_capacity, &p, 1, sizeof p, NULL);
}

/* Return 3 if two words are equal except for the first letter's case, 2 for likely forms of the same word, or 0. */
static int likeness(moe_span a, moe_span b) {
    char first[2][8] = { { 0 } };
    const size_t bytes = text_utf8_next(a.data, a.length, 0), longer = most(a.length, b.length);
    size_t same;
    if (bytes != text_utf8_next(b.data, b.length, 0) || bytes >= sizeof first[0]) return 0;
    memcpy(first[0], a.data, bytes), memcpy(first[1], b.data, bytes);
    text_lower_first(first[0], bytes), text_lower_first(first[1], bytes);
    if (memcmp(first[0], first[1], bytes) != 0) return 0;
    for (same = bytes; same < least(a.length, b.length) && a.data[same] == b.data[same]; same++) {}
    return same == longer ? 3 : same >= 4 && 3 * same >= 2 * longer ? 2 : 0;
}

/* Read up to `room` words of a text, starting at *at; return their number. */
static size_t read_words(const char *text, size_t length, size_t *at, moe_span *words, size_t room) {
    size_t n = 0;
    for (size_t bytes; *at < length && n < room; *at += bytes) {
        bytes = text_word_length(text, length, *at);
        if (text_is_wordlike(text, length, *at)) words[n++] = (moe_span){ text + *at, bytes };
    }
    return n;
}

/* Return 1 for words as short as articles and prepositions. */
static int is_short_word(moe_span word) {
    size_t i = word.length && word.data[0] >= 'A' && word.data[0] <= 'Z';
    while (i < word.length && word.data[i] >= 'a' && word.data[i] <= 'z') i++;
    return i == word.length && i <= 3;
}

/* Return 1 if a word may begin or end the contents of a pair. A short word must be in the phrase too. */
static int may_end_pair(moe_span word, moe_span of_phrase) {
    return !is_short_word(word) || likeness(word, of_phrase) == 3;
}

/* Score how well the words there[n] match those of a phrase; return 0 if too few words match, or only short ones. */
static int fit_of(const moe_span *there, size_t n, const moe_span *words, size_t n_words) {
    int fit = 0;
    size_t found = 0, short_words = 0, short_found = 0;
    for (size_t i = 0; i < n_words; i++) {
        int best = 0;
        for (size_t j = 0; j < n; j++) {
            const int l = likeness(words[i], there[j]);
            best = l > best ? l : best;
        }
        fit += best;
        found += best > 0;
        short_words += (size_t)is_short_word(words[i]);
        short_found += best && is_short_word(words[i]);
    }
    for (size_t j = 0; j < n; j++) { /* penalise words that are not in the phrase */
        int best = 0;
        for (size_t i = 0; i < n_words; i++) best |= likeness(words[i], there[j]);
        if (!best) fit -= 2;
    }
    return 2 * found >= n_words && (found > short_found || short_words == n_words) ? fit : 0;
}

/* Find the translation of a phrase in the whole translation: the best match above *fit that is nearest to `near`. */
static void find_phrase(const text_guard *g, const phrase *a, size_t near, int *fit, size_t *from, size_t *to) {
    const text_bytes *t = &g->translation;
    moe_span words[PHRASE_WORDS + 1], there[PHRASE_WORDS + 2];
    size_t at = 0, n_there = 0;
    const size_t n = read_words(g->phrase_text.data + a->begin, a->length, &at, words, PHRASE_WORDS + 1);
    if (!n || n > PHRASE_WORDS) return;
    for (at = 0;;) {
        n_there += read_words(t->data, t->length, &at, there + n_there, n + 1 - n_there);
        if (!n_there) return;
        const size_t begin = (size_t)(there[0].data - t->data);
        const size_t far = begin > near ? begin - near : near - begin;
        for (size_t k = 1; k <= n_there; k++) {
            const int f = fit_of(there, k, words, n);
            const size_t before = *from > near ? *from - near : near - *from;
            if (f < *fit || !f || (f == *fit && far >= before)) continue;
            if (k > 1 && !(may_end_pair(there[0], words[0]) && may_end_pair(there[k - 1], words[n - 1]))) continue;
            *fit = f, *from = begin;
            *to = (size_t)(there[k - 1].data - t->data) + there[k - 1].length;
        }
        memmove(there, there + 1, --n_there * sizeof *there);
    }
}

/* Find bytes at or after `at`, not inside a longer word or number. Return the text's length if they are missing. */
static size_t find_bytes(const text_bytes *t, const char *bytes, size_t length, size_t at) {
    for (; at + length <= t->length; at++)
        if (memcmp(t->data + at, bytes, length) == 0 &&
            !(at && wordlike(t, at - 1) && text_is_wordlike(bytes, length, 0)) &&
            !(at + length < t->length && is_digit(t->data[at + length])))
            return at;
    return t->length;
}

static void find_parents(text_guard *g) {
    size_t parent = SIZE_MAX;
    for (size_t i = 0; i < g->n; i++) {
        span *k = &g->spans[i];
        if (k->kind == TEXT_SPAN_CLOSE) parent = g->spans[k->partner].parent;
        k->parent = parent;
        k->depth = parent == SIZE_MAX ? 0 : g->spans[parent].depth + 1;
        if (k->kind == TEXT_SPAN_OPEN) parent = i;
    }
}

static int is_word_span(const span *k) { return k->kind == TEXT_SPAN_WORD || k->kind == TEXT_SPAN_NUMBER; }

/* Find the placeholder, or the number or term if the translation contains it once. */
static void find_word_place(const text_guard *g, span *k) {
    const text_bytes *t = &g->translation;
    const int term = k->term && k->kind != TEXT_SPAN_WORD;
    const char *bytes = term ? k->term->target : g->shown.data + k->at;
    const size_t length = term ? strlen(bytes) : k->shown, at = find_bytes(t, bytes, length, 0);
    k->from = k->to = SIZE_MAX;
    if (at == t->length || (k->kind != TEXT_SPAN_WORD && find_bytes(t, bytes, length, at + length) < t->length)) return;
    k->from = at, k->to = term ? end_of_word(t, at + length) : at + length;
}

/* Return the term if a pair of tags contains nothing else and its place is known, otherwise NULL. */
static const span *only_term(const text_guard *g, size_t i, size_t end) {
    for (size_t j = i + 1; j < g->spans[i].partner; j++) {
        const span *k = &g->spans[j];
        if (k->term && k->at == g->spans[i].at && k->at + k->shown == end && k->from != SIZE_MAX) return k;
    }
    return NULL;
}

/* Move markup inside numbers and placeholders to their end, which keeps the order of the markup. */
static void move_markup_out(text_guard *g) {
    const text_bytes *t = &g->translation;
    for (size_t i = 0; i < g->n; i++) {
        const span *k = &g->spans[i];
        const char *bytes = g->shown.data + k->at;
        if (k->kind != TEXT_SPAN_NUMBER && k->kind != TEXT_SPAN_WORD) continue;
        for (size_t at = 0; (at = find_bytes(t, bytes, k->shown, at)) < t->length; at += k->shown)
            for (size_t j = 0; j < g->n; j++) {
                span *m = &g->spans[j];
                if (m->from > at && m->from < at + k->shown) m->from = at + k->shown;
                if (m->to > at && m->to < at + k->shown) m->to = at + k->shown;
            }
    }
}

/* Return 1 if a pair has letters in the text besides its placeholders and numbers. */
static int has_own_letters(const text_guard *g, size_t i) {
    const size_t last = g->spans[i].partner;
    size_t at = g->spans[i].at, bytes;
    for (size_t j = i + 1; j <= last; j++) {
        const span *k = &g->spans[j];
        if (!is_word_span(k) && j < last) continue;
        for (; at < k->at; at += bytes)
            if (text_is_letter(text_character(g->shown.data, g->shown.length, at, &bytes))) return 1;
        at = k->at + k->shown;
    }
    return 0;
}

/* Return 1 if bytes [from, to) of the translation have letters besides its placeholders. */
static int has_letters(const text_guard *g, size_t from, size_t to) {
    const text_bytes *t = &g->translation;
    for (size_t at = from, bytes; at < to; at += bytes) {
        if (!text_is_letter(text_character(t->data, t->length, at, &bytes))) continue;
        const span *k = g->spans;
        while (k < g->spans + g->n && !(k->kind == TEXT_SPAN_WORD && at >= k->from && at < k->to)) k++;
        if (k == g->spans + g->n) return 1;
        bytes = k->to - at;
    }
    return 0;
}

/* Find the words of a pair: those written while attending to its contents, and those of the spans inside. */
static void place_pair(const text_guard *g, const moe_hypothesis *h, size_t i) {
    const text_bytes *t = &g->translation;
    span *k = &g->spans[i];
    const size_t end = g->spans[k->partner].at;
    const int spoken = has_word(&g->shown, k->at, end);
    const span *term = only_term(g, i, end);
    int placed = 0;
    for (size_t j = i + 1; j < k->partner; j++) placed |= is_word_span(&g->spans[j]) && g->spans[j].from != SIZE_MAX;
    if (end > k->at && is_around_all(g, k)) {
        place_around_all(g, k);
    } else if (term) {
        k->from = term->from, k->to = term->to;
    } else if (placed && !has_own_letters(g, i)) {
        k->from = SIZE_MAX, k->to = 0;
    } else {
        if (!find_written(g, h, token_at(g, k->at), token_at(g, end), &k->from, &k->to)) find_word(g, h, k, end);
        const size_t near = k->from;
        int fit = 0;
        for (size_t a = 0; a < g->n_phrases; a++)
            if (g->phrases[a].source == k->source) find_phrase(g, &g->phrases[a], near, &fit, &k->from, &k->to);
        const size_t begin = next_word(t, k->from, k->to), stop = last_word_end(t, begin, k->to);
        if (begin < stop) k->from = begin, k->to = stop; /* exclude punctuation */
        if (begin < stop && !spoken) k->to = k->from;
    }
    for (size_t j = i + 1; j < k->partner; j++)
        if (g->spans[j].kind != TEXT_SPAN_CLOSE && g->spans[j].kind != TEXT_SPAN_LONE && g->spans[j].from != SIZE_MAX)
            k->from = least(k->from, g->spans[j].from), k->to = most(k->to, g->spans[j].to);
}

static void trim(const text_bytes *t, span *k) {
    while (k->from < k->to && is_space(t->data[k->from])) k->from++;
    while (k->to > k->from && is_space(t->data[k->to - 1])) k->to--;
}

/* Move span `k` off span `o`, which is not inside it: to the side that has more of its words. If neither side has any,
 * a pair `o` yields. */
static void separate(const text_guard *g, span *k, span *o) {
    const text_bytes *t = &g->translation;
    if (k->from >= o->to || k->to <= o->from) return;
    const size_t left = most(k->from, o->from), right = least(k->to, o->to);
    const int before = has_word(t, k->from, left), after = has_word(t, right, k->to);
    const size_t first = left - k->from, last = k->to - right;
    if (before || after) {
        if (before && (!after || first >= last)) k->to = left;
        else k->from = right;
        trim(t, k);
    } else if (o->kind == TEXT_SPAN_OPEN && k->kind == TEXT_SPAN_OPEN &&
               (has_word(t, o->from, k->from) || has_word(t, k->to, o->to))) {
        if (has_word(t, o->from, k->from) && (k->from - o->from >= o->to - k->to || !has_word(t, k->to, o->to)))
            o->to = k->from;
        else o->from = k->to;
        trim(t, o);
    } else {
        k->from = k->to = o->to;
    }
}

static size_t next_sibling(const text_guard *g, size_t i) {
    return (g->spans[i].kind == TEXT_SPAN_OPEN ? g->spans[i].partner : i) + 1;
}

/* Return 1 if no placeholder, number or placed pair among the siblings [first, last) except `k` occupies
 * bytes [from, to). */
static int is_free(const text_guard *g, const span *k, size_t first, size_t last, size_t from, size_t to) {
    for (size_t i = first; i < last; i = next_sibling(g, i)) {
        const span *o = &g->spans[i];
        if (o == k || !(is_word_span(o) ? o->from != SIZE_MAX : o->kind == TEXT_SPAN_OPEN && o < k)) continue;
        if (o->from < to && o->to > from) return 0;
    }
    return 1;
}

/* Give a pair that lost its words the next word of [from, to) if it is free, or the word before it. */
static void take_word(text_guard *g, span *k, size_t first, size_t last, size_t from, size_t to) {
    const text_bytes *t = &g->translation;
    const int empty = !has_word(t, k->from, k->to); /* otherwise the pair contains only numbers */
    const size_t next = next_word(t, k->to, to), end = least(text_word_end(t->data, t->length, next), to);
    const size_t before = last_word_end(t, from, k->from),
                 begin = most(word_begin(t, character_begin(t, before - (before > 0))), from);
    if (next < end && is_free(g, k, first, last, next, end)) k->from = empty ? next : k->from, k->to = end;
    else if (begin < before && is_free(g, k, first, last, begin, before))
        k->from = begin, k->to = empty ? before : k->to;
}

/* Move the markup between spans [first, last), which are in the same pair, off each other and into [from, to]. */
static void place_siblings(text_guard *g, size_t first, size_t last, size_t from, size_t to) {
    for (size_t i = first; i < last; i = next_sibling(g, i)) {
        span *k = &g->spans[i];
        if (k->kind != TEXT_SPAN_OPEN && k->kind != TEXT_SPAN_LONE) continue;
        k->from = least(most(k->from, from), to);
        k->to = least(most(k->to, from), to);
        for (size_t j = first; j < last; j = next_sibling(g, j)) {
            span *o = &g->spans[j];
            if (is_word_span(o) ? o->from != SIZE_MAX : o->kind == TEXT_SPAN_OPEN && j < i) separate(g, k, o);
        }
        if (k->kind != TEXT_SPAN_OPEN) continue;
        if (has_own_letters(g, i) && !has_letters(g, k->from, k->to)) take_word(g, k, first, last, from, to);
        while (!k->before && k->after && k->from > from && is_space(g->translation.data[k->from - 1]) &&
               is_free(g, k, first, last, k->from - 1, k->from))
            k->from--; /* a space that the pair begins with */
    }
}

/* Find places for all markup: pairs nest as in the text, and contain the placeholders and numbers that they contain
 * there. */
static void place_markup(text_guard *g, const moe_hypothesis *h) {
    find_parents(g);
    for (size_t i = g->n; i-- > 0;) { /* inner pairs first */
        span *k = &g->spans[i];
        if (k->kind == TEXT_SPAN_LONE) place_lone(g, h, k);
        else if (is_word_span(k) || k->term) find_word_place(g, k);
        else if (k->kind == TEXT_SPAN_OPEN) place_pair(g, h, i);
    }
    move_markup_out(g);
    place_siblings(g, 0, g->n, 0, g->translation.length);
    for (size_t i = 0; i < g->n; i++) { /* outer pairs first */
        const span *k = &g->spans[i];
        if (k->kind == TEXT_SPAN_OPEN) place_siblings(g, i + 1, k->partner, k->from, k->to);
    }
    for (size_t i = 0; i < g->n; i++) {
        span *k = &g->spans[i];
        if (k->kind == TEXT_SPAN_CLOSE) k->from = k->to = g->spans[k->partner].to;
    }
}

/* ==== 5. Restoring ====================================================================================== */

/* Return 1 if tag `a` precedes tag `b` at the same place. */
static int is_first_tag(const text_guard *g, size_t a, size_t b) {
    const span *s = g->spans;
    const size_t of_a = s[a].kind == TEXT_SPAN_CLOSE ? s[a].partner : a;
    const size_t of_b = s[b].kind == TEXT_SPAN_CLOSE ? s[b].partner : b;
    size_t x = of_a, y = of_b;
    if (x == y) return a < b;
    while (s[x].depth > s[y].depth) x = s[x].parent;
    while (s[y].depth > s[x].depth) y = s[y].parent;
    if (x == y) return x == of_a ? a == of_a : b != of_b; /* one is inside the other */
    while (s[x].parent != s[y].parent) x = s[x].parent, y = s[y].parent;
    if (s[x].from != s[y].from) return s[x].from < s[y].from;
    return s[x].to != s[y].to ? s[x].to < s[y].to : x < y;
}

static int is_before(const text_guard *g, const edit *a, const edit *b) {
    if (a->at != b->at) return a->at < b->at;
    return a->order < g->n && b->order < g->n ? is_first_tag(g, a->order, b->order) : a->order < b->order;
}

static moe_status add_edit(text_guard *g, size_t at, size_t length, size_t what, size_t order, moe_error *error) {
    const edit e = { at, length, what, order };
    const moe_status status = text_add(&g->edits, &g->n_edits, &g->edit_capacity, &e, 1, sizeof e, error);
    if (status) return status;
    edit *to = &g->edits[g->n_edits - 1];
    for (; to > g->edits && is_before(g, &e, &to[-1]); to--) *to = to[-1];
    *to = e;
    return MOE_OK;
}

/* Return 1 if the model added a space before a placeholder that follows a bracket or quotation mark in the text. */
static int is_glued(const text_guard *g, const span *k, size_t at) {
    static const char opening[] = "\xE2\x80\x9E \xE2\x80\x9C \xE2\x80\x98 \" ' ( [ \xC2\xBF \xC2\xA1";
    const text_bytes *t = &g->translation;
    if (at < 2 || t->data[at - 1] != ' ' || k->before || !k->source) return 0;
    if (t->data[at - 2] == g->text.data[k->source - 1]) return 1;
    const size_t sign = character_begin(t, at - 2);
    return text_is_listed(opening, t->data + sign, at - 1 - sign);
}

/* Replace the first occurrence of a placeholder with the original, and remove other occurrences. */
static moe_status restore_word(text_guard *g, size_t i, const moe_hypothesis *h, moe_error *error) {
    const text_bytes *t = &g->translation;
    span *k = &g->spans[i];
    const char *name = g->shown.data + k->at;
    moe_status status = MOE_OK;
    size_t at = find_bytes(t, name, k->shown, 0);
    if (at == t->length) return add_edit(g, find_place(g, h, k->at, 0), 0, i, g->n + i, error); /* as for markup */
    for (size_t what = i; at < t->length && !status; at = find_bytes(t, name, k->shown, at + k->shown)) {
        const size_t space = what == SIZE_MAX ? at && t->data[at - 1] == ' ' : (size_t)is_glued(g, k, at);
        status = add_edit(g, at - space, k->shown + space, what, g->n + i, error);
        what = SIZE_MAX;
    }
    return status;
}

/* Count the terms up to term i that have its target. If term i has an ending, count all terms with its target, because
 * is_word_at cannot tell them apart. */
static size_t terms_alike(const text_guard *g, size_t i) {
    const span *k = &g->spans[i];
    size_t n = 0;
    for (size_t j = 0; j < (k->inflected ? g->n : i + 1); j++)
        n += g->spans[j].term && (k->inflected || !g->spans[j].inflected) &&
             strcmp(g->spans[j].term->target, k->term->target) == 0;
    return n;
}

/* Return 1 if a sentence of the translation starts at byte `at`. */
static int begins_sentence(const text_bytes *t, size_t at) {
    while (at && !wordlike_before(t, at)) {
        at = character_begin(t, at - 1);
        if (strchr(".!?", t->data[at])) return 1;
    }
    return !at;
}

/* Return 1 if the target of a term is a separate word at byte `at`, possibly capitalised at the start of a sentence. */
static int is_word_at(const text_bytes *t, size_t at, const span *k) {
    const char *target = k->term->target;
    const size_t length = strlen(target);
    char first[4];
    const size_t bytes = text_utf8_next(target, length, 0);
    memcpy(first, target, bytes);
    text_upper_case(first, bytes);
    if (at + length > t->length || memcmp(t->data + at + bytes, target + bytes, length - bytes) != 0 ||
        (memcmp(t->data + at, target, bytes) != 0 &&
         (memcmp(t->data + at, first, bytes) != 0 || !begins_sentence(t, at))))
        return 0;
    const size_t rest = end_of_word(t, at + length) - at - length;
    return word_begin(t, at) == at && (!rest || (k->inflected && text_term_ends(k->term, t->data + at + length, rest)));
}

/* Count the occurrences of a term's target in the translation. */
static size_t count_term(const text_bytes *t, const span *k) {
    const size_t length = strlen(k->term->target);
    size_t n = 0;
    for (size_t at = 0; at + length <= t->length; at++)
        if (is_word_at(t, at, k)) n++, at += length - 1;
    return n;
}

/* Return 1 if a term may be capitalised at the start of a sentence. It must not be a name or have capitals. */
static int may_capitalise(const text_term *term) {
    for (const char *c = term->target; *c; c++)
        if (*c >= 'A' && *c <= 'Z') return 0;
    return !term->stays;
}

/* Capitalise a term that starts the translation if the text starts with a capital. */
static void capitalise_first(text_guard *g, const span *k) {
    text_bytes *t = &g->translation;
    const size_t at = next_word(t, 0, t->length), from = next_word(&g->shown, 0, g->shown.length);
    char small[4];
    if (from == g->shown.length || !may_capitalise(k->term) || !is_word_at(t, at, k)) return;
    const size_t bytes = character_bytes(&g->shown, from);
    memcpy(small, g->shown.data + from, bytes);
    text_lower_first(small, bytes);
    if (memcmp(small, g->shown.data + from, bytes) == 0) return;
    text_upper_case(t->data + at, character_bytes(t, at));
}

static int is_unedited(const text_guard *g, size_t begin, size_t end) {
    for (size_t e = 0; e < g->n_edits; e++)
        if (g->edits[e].at + g->edits[e].length > begin && g->edits[e].at < end) return 0;
    return 1;
}

/* If the search wrote a term's tokens as part of a longer word, replace that word with the term. */
static moe_status restore_term(text_guard *g, size_t i, moe_error *error) {
    const text_bytes *t = &g->translation;
    const char *target = g->spans[i].term->target;
    const size_t length = strlen(target);
    size_t wanted = terms_alike(g, i), from = SIZE_MAX, to = 0;
    if (g->capitals) return MOE_OK;
    for (size_t at = 0; at + length <= t->length && wanted; at++) {
        if (memcmp(t->data + at, target, length) != 0) continue;
        const size_t begin = word_begin(t, at), end = end_of_word(t, at + length);
        if (is_word_at(t, at, &g->spans[i])) wanted--;
        else if (from == SIZE_MAX && is_unedited(g, begin, end)) from = begin, to = end;
    }
    return wanted && from != SIZE_MAX ? add_edit(g, from, to - from, i, g->n + i, error) : MOE_OK;
}

/* Replace the model's word for term i, which is missing, with the term. */
static moe_status edit_term(text_guard *g, size_t i, moe_error *error) {
    const text_bytes *t = &g->translation;
    if (count_term(t, &g->spans[i]) >= terms_alike(g, i)) return MOE_OK;
    for (size_t w = 0; w < g->n_old; w++) {
        const char *word = g->old.data + g->old_words[w].at;
        const size_t length = strlen(word);
        if (!g->old_words[w].sure || g->old_words[w].term->number != g->spans[i].term->number) continue;
        for (size_t at = next_word(t, 0, t->length); at < t->length;
             at = next_word(t, at + word_bytes(t, at), t->length))
            if (word_bytes(t, at) == length && memcmp(t->data + at, word, length) == 0 &&
                is_unedited(g, at, at + length))
                return add_edit(g, at, length, i, g->n + i, error);
    }
    return MOE_OK;
}

/* Return 1 if the number of span i occurs in the translation as often as in the shown text up to this span. */
static int has_number(const text_guard *g, size_t i) {
    const span *k = &g->spans[i];
    const char *bytes = g->shown.data + k->at;
    size_t wanted = 0;
    for (size_t j = 0; j <= i; j++)
        wanted += g->spans[j].kind == TEXT_SPAN_NUMBER && g->spans[j].shown == k->shown &&
                  memcmp(g->shown.data + g->spans[j].at, bytes, k->shown) == 0;
    for (size_t at = 0; wanted; wanted--, at += k->shown)
        if ((at = find_bytes(&g->translation, bytes, k->shown, at)) == g->translation.length) return 0;
    return 1;
}

/* Insert a missing number, in place of the model's words for it if they contain a digit. */
static moe_status restore_number(text_guard *g, size_t i, const moe_hypothesis *h, moe_error *error) {
    const text_bytes *t = &g->translation;
    span *k = &g->spans[i];
    size_t from, to;
    if (has_number(g, i)) return MOE_OK;
    if (!k->n || !find_written(g, h, k->first, k->first + k->n, &from, &to))
        return add_edit(g, find_place(g, h, k->at, 0), 0, i, g->n + i, error);
    int digits = 0, spaces = 0;
    for (size_t at = from; at < to; at++) digits |= is_digit(t->data[at]), spaces |= is_space(t->data[at]);
    const size_t length = digits && !spaces && is_unedited(g, from, to) ? to - from : 0;
    return add_edit(g, from, length, i, g->n + i, error);
}

static moe_status find_edits(text_guard *g, const moe_hypothesis *h, moe_error *error) {
    moe_status status = MOE_OK;
    g->n_edits = 0;
    place_markup(g, h);
    for (size_t i = 0; i < g->n && !status; i++)
        if (g->spans[i].kind == TEXT_SPAN_WORD) status = restore_word(g, i, h, error);
    for (size_t i = 0; i < g->n && !status; i++) {
        const span *k = &g->spans[i];
        if (k->term && k->kind != TEXT_SPAN_WORD && g->terms != TEXT_TERMS_FREE) {
            status = g->terms == TEXT_TERMS_EDITED ? edit_term(g, i, error) : restore_term(g, i, error);
            capitalise_first(g, k);
        } else if (k->kind == TEXT_SPAN_NUMBER) status = restore_number(g, i, h, error);
        else if (k->kind == TEXT_SPAN_OPEN || k->kind == TEXT_SPAN_CLOSE || k->kind == TEXT_SPAN_LONE)
            status = add_edit(g, k->from, 0, i, i, error);
    }
    return status;
}

/* Append the target of a term, capitalised if it starts a sentence (`begins`). */
static void put_term(const text_term *term, int begins, text_bytes *out) {
    const size_t begin = out->length;
    text_append_string(out, term->target);
    if (out->failed || !begins || !may_capitalise(term)) return;
    text_upper_case(out->data + begin, character_bytes(out, begin));
}

/* Return 1 if a hyphen at byte `at` joins two words. */
static int joins(const text_bytes *t, size_t at) { return at < t->length && t->data[at] == '-' && wordlike(t, at + 1); }

/* Return 1 if the character at byte `at` of the translation is a hyphen that would extend the span: an option, address
 * or path, or any span if a single letter follows, because the letter would look like an option (%d-L). */
static int extends(const text_guard *g, const span *k, size_t at) {
    const char *s = g->text.data + k->source, first = k->length ? *s : 0;
    const text_bytes *t = &g->translation;
    if (k->kind != TEXT_SPAN_WORD || k->term || t->data[at] != '-') return 0;
    const size_t end = k->source + k->length;
    if (end < g->text.length && g->text.data[end] == '-') return 0;
    if (first == '-' || (wordlike(t, at + 1) && !wordlike(t, at + 2))) return 1;
    return !strchr("<{[%$#`&", first) && (memchr(s, '/', k->length) || memchr(s, '@', k->length));
}

/* Append a span with its white space. Return 1 if the caller must drop a following space, because the span joins two
 * words, or a following hyphen, which would extend the span. */
static int put_span(const text_guard *g, const edit *e, size_t begin, text_bytes *out) {
    const span *k = &g->spans[e->what];
    const text_bytes *t = &g->translation;
    const int beside = k->kind == TEXT_SPAN_LONE || (!e->length && k->shown);
    const int word = k->kind == TEXT_SPAN_WORD || k->kind == TEXT_SPAN_NUMBER;
    const int spaced = out->length == begin || is_space(out->data[out->length - 1]);
    const size_t next = e->at + e->length, end = k->source + k->length;
    const int glued = !k->before && !k->after && wordlike(&g->text, end) && (k->kind == TEXT_SPAN_LONE || word);
    if (!spaced && ((beside && k->before) || (word && wordlike_before(out, out->length) &&
                                              (k->before || !wordlike_before(&g->text, k->source)))))
        text_append(out, " ", 1);
    if (k->term) put_term(k->term, begins_sentence(t, e->at), out);
    else text_append(out, g->text.data + k->source, k->length);
    if (next >= t->length || is_space(t->data[next])) return glued;
    if (extends(g, k, next)) {
        text_append(out, " ", 1);
        return 1;
    }
    const int spoken = wordlike(t, next),
              joint = (unsigned char)g->text.data[k->source] >= 0x80 && !wordlike(&g->text, end);
    if ((k->kind == TEXT_SPAN_LONE && spoken && joint) || (beside && k->after && (!e->at || spoken)) ||
        (word && spoken && !wordlike(&g->text, end)))
        text_append(out, " ", 1);
    return 0;
}

/* Append a part of the translation without double spaces, and without spaces around slashes that join words in the
 * text. */
static void put_text(const text_guard *g, const char *text, size_t length, size_t begin, text_bytes *out) {
    for (size_t i = 0; i < length; i++) {
        const char last = out->length > begin ? out->data[out->length - 1] : 0;
        if (text[i] == ' ' && (last == ' ' || (g->joins && last == '/'))) continue;
        if (text[i] == '/' && g->joins && last == ' ') out->length--;
        text_append(out, text + i, 1);
    }
}

static void apply_edits(const text_guard *g, text_bytes *out) {
    const text_bytes *t = &g->translation;
    const size_t begin = out->length;
    size_t at = 0;
    for (size_t i = 0; i < g->n_edits; i++) {
        const edit *e = &g->edits[i];
        if (e->at > at) put_text(g, t->data + at, e->at - at, begin, out), at = e->at;
        const int drops = e->what != SIZE_MAX && put_span(g, e, begin, out);
        at = most(at, e->at + e->length);
        if (drops && at < t->length && (t->data[at] == ' ' || t->data[at] == '-')) at++;
    }
    if (at < t->length) put_text(g, t->data + at, t->length - at, begin, out);
}

/* Count U+FFFD, which replaces invalid bytes that a model wrote. */
static size_t count_broken(const text_bytes *t) {
    size_t n = 0;
    for (size_t i = 0; i + 3 <= t->length; i++) n += memcmp(t->data + i, "\xEF\xBF\xBD", 3) == 0;
    return n;
}

/* Return 1 if `digits` is the number of a placeholder, repeated `times` times. */
static int is_placeholder_number(const text_guard *g, const char *digits, size_t n, size_t times) {
    for (const span *k = g->spans; n && k < g->spans + g->n; k++) {
        const size_t length = k->shown - 1;
        if (k->kind != TEXT_SPAN_WORD || k->shown < 2 || times * length != n) continue;
        size_t same = 0;
        while (same < n && digits[same] == g->shown.data[k->at + 1 + same % length]) same++;
        if (same == n) return 1;
    }
    return 0;
}

/* Count fragments of placeholders such as X, X 1, x2, XC, P1, 11, or a bracket or number of [1]. */
static size_t count_parts(const text_guard *g, const text_bytes *t) {
    size_t n = 0;
    for (size_t i = 0; i < t->length; i++) {
        const char c = t->data[i];
        if (g->placeholders && is_digit(c) && !(i && is_digit(t->data[i - 1]))) n++;
        if (g->placeholders && (c == '[' || c == ']')) n++;
        const int digit = is_digit(c);
        if (!((c >= 'A' && c <= 'Z') || c == 'x' || digit) || (i && wordlike_before(t, i))) continue;
        size_t end = i + 1;
        while (end < t->length && is_digit(t->data[end])) end++;
        const int more = end < t->length && wordlike(t, end);
        const int other = !g->placeholders && more && t->data[end] >= 'A' && t->data[end] <= 'Z'; /* XC for X4 */
        if (digit) n += (size_t)(!g->placeholders && !more && is_placeholder_number(g, t->data + i, end - i, 2));
        else if (c == 'X' || c == 'x') n += (size_t)(end > i + 1 || (c == 'X' && other) || !more);
        else n += (size_t)(!g->placeholders && !more && is_placeholder_number(g, t->data + i + 1, end - i - 1, 1));
    }
    return n;
}

static size_t count_words(const char *text, size_t length) {
    size_t n = 0;
    for (size_t at = 0; at < length; at += text_word_length(text, length, at))
        n += (size_t)text_is_wordlike(text, length, at);
    return n;
}

/* Count the occurrences of a word in a translation. */
static size_t count_word(const text_bytes *t, const char *word, size_t length) {
    size_t n = 0;
    for (size_t at = 0, bytes; at < t->length; at += bytes) {
        bytes = word_bytes(t, at);
        n += (size_t)(bytes == length && memcmp(t->data + at, word, length) == 0);
    }
    return n;
}

static void add_old(text_guard *g, const text_term *term, const char *word, size_t length, int sure) {
    const old_word x = { term, g->old.length, sure };
    text_append(&g->old, word, length);
    text_append(&g->old, "", 1);
    if (text_add(&g->old_words, &g->n_old, &g->old_capacity, &x, 1, sizeof x, NULL)) g->old.failed = 1;
}

/* Store the words of the FREE translation that were written while attending to a missing term. */
static void note_old(text_guard *g, const span *k, const moe_hypothesis *h) {
    const text_bytes *t = &g->translation;
    for (size_t j = 0; h->sources && j < g->places.length; j++) {
        size_t at, end, bytes;
        if (h->sources[j] < (int32_t)k->first || h->sources[j] >= (int32_t)(k->first + k->n)) continue;
        if (!token_bytes(g, j, &at, &end)) continue;
        for (at = next_word(t, at, end); at < end; at = next_word(t, at + bytes, end)) {
            bytes = word_bytes(t, at);
            add_old(g, k->term, t->data + at, bytes, 0);
        }
    }
}

/* Return 1 if the translation contains a word at least as often as the FREE translation. */
static int is_left(const text_guard *g, const char *word) {
    const size_t length = strlen(word);
    return count_word(&g->translation, word, length) >= count_word(&g->free, word, length);
}

/* Return the share of the stored words that a translation still has, or `unknown` if none are stored. */
static float part_left(const text_guard *g, float unknown) {
    size_t left = 0;
    size_t n = 0;
    for (size_t i = 0; i < g->n_old; i++) {
        if (g->old_words[i].sure) continue;
        n++;
        left += (size_t)is_left(g, g->old.data + g->old_words[i].at);
    }
    return n ? (float)left / (float)n : unknown;
}

moe_span text_guard_missing_term(const text_guard *g, size_t n) {
    return n < g->n_missing ? spelled(g, &g->spans[g->missing[n]]) : (moe_span){ "", 0 };
}

/* Return 1 if a word is one of a term's target. */
static int is_of_target(moe_span word, const span *k) {
    const char *target = k->term->target;
    const size_t length = strlen(target);
    for (size_t at = 0, bytes; at < length; at += bytes) {
        bytes = text_word_length(target, length, at);
        if (likeness(word, (moe_span){ target + at, bytes }) == 3) return 1;
    }
    return 0;
}

/* Return 1 if two words are equal, or forms of one word with five equal letters. */
static int is_form(moe_span a, moe_span b) {
    const int like = likeness(a, b);
    return like == 3 || (like && a.length > 4 && b.length > 4 && memcmp(a.data + 1, b.data + 1, 4) == 0);
}

/* Return 1 if `whole` may be a compound that starts with `part`, as Telefonnummer with Telefon. */
static int is_compound(moe_span part, moe_span whole) {
    return part.length > 4 && whole.length > part.length + 3 &&
           likeness(part, (moe_span){ whole.data, part.length }) == 3;
}

/* Return 1 if another word of the text resembles the only word of a term. */
static int has_similar(const text_guard *g, const span *k) {
    const moe_span own = spelled(g, k);
    size_t n = 0;
    moe_span word;
    for (size_t at = 0; read_words(g->shown.data, g->shown.length, &at, &word, 1);) n += likeness(word, own) > 0;
    for (size_t i = 0; i < g->n; i++) n -= g->spans[i].term == k->term && n;
    return n > 0;
}

int text_guard_look_up(text_guard *g, size_t n, const char *text, size_t length) {
    const text_bytes *t = &g->free;
    const span *k = &g->spans[g->missing[n]];
    if (has_similar(g, k)) return 1; /* the word may translate another word of the text */
    moe_span word, found;
    for (size_t at = 0; read_words(text, length, &at, &word, 1);)
        for (size_t next = 0; !is_short_word(word) && read_words(t->data, t->length, &next, &found, 1);)
            if (!is_of_target(found, k) && (is_form(word, found) || is_compound(word, found)))
                add_old(g, k->term, found.data, found.length, is_form(word, found));
    return !g->old.failed;
}

/* Return the n-th word that a lookup of the term has found, or NULL. */
static const char *sure_word(const text_guard *g, const text_term *term, size_t n) {
    for (size_t i = 0; i < g->n_old; i++) {
        const old_word *x = &g->old_words[i];
        if (x->sure && x->term->number == term->number && n-- == 0) return g->old.data + x->at;
    }
    return NULL;
}

/* Return 1 if at most one word separates `word` from the target of a term in the translation. */
static int is_near(const text_guard *g, const char *word, const text_term *term) {
    const text_bytes *t = &g->translation;
    size_t n = 0, of_word = 0, of_term = 0; /* words read; number of the last match, or 0 */
    for (size_t at = 0, bytes; at < t->length; at += bytes) {
        bytes = word_bytes(t, at);
        if (!wordlike(t, at)) continue;
        n++;
        if (bytes == strlen(word) && memcmp(t->data + at, word, bytes) == 0) of_word = n;
        if (text_begins_with(t->data + at, t->length - at, term->target)) of_term = n;
        if (of_word && of_term && of_word != of_term && (of_word > of_term ? of_word - of_term : of_term - of_word) < 3)
            return 1;
    }
    return 0;
}

/* Return the longest unsure word of a term, if the translation still has all of them, else the longest one that it has
 * near the term, or NULL. */
static const char *unsure_word(const text_guard *g, const text_term *term) {
    const char *longest = NULL, *near = NULL;
    int all = 1;
    for (size_t i = 0; i < g->n_old; i++) {
        const old_word *x = &g->old_words[i];
        const char *word = g->old.data + x->at;
        if (x->sure || x->term->number != term->number || is_short_word((moe_span){ word, strlen(word) })) continue;
        if (!is_left(g, word)) {
            all = 0;
            continue;
        }
        if (!longest || strlen(word) > strlen(longest)) longest = word;
        if (is_near(g, word, term) && (!near || strlen(word) > strlen(near))) near = word;
    }
    return all ? longest : near;
}

const char *text_guard_old_word(const text_guard *g, const text_term *term, size_t n) {
    const char *word = sure_word(g, term, n);
    return word || n ? word : unsure_word(g, term);
}

int text_guard_has_remaining(const text_guard *g) {
    int remains = 0;
    for (size_t i = 0; i < g->n_missing; i++)
        if (!sure_word(g, g->spans[g->missing[i]].term, 0)) return 0;
    for (size_t i = 0; i < g->n_old; i++)
        remains |= g->old_words[i].sure && is_left(g, g->old.data + g->old_words[i].at);
    return remains;
}

int text_guard_knows_free(const text_guard *g, moe_span *free) {
    *free = (moe_span){ g->free.data, g->free.length };
    return g->terms != TEXT_TERMS_FREE;
}

/* Return 1 if bytes [begin, end) belong to a term or its placeholder. */
static int is_of_term(const text_guard *g, size_t begin, size_t end) {
    const text_bytes *t = &g->translation;
    for (size_t i = 0; i < g->n; i++) {
        const span *k = &g->spans[i];
        if (!k->term) continue;
        const int named = k->kind == TEXT_SPAN_WORD;
        const size_t length = named ? k->shown : strlen(k->term->target);
        for (size_t at = begin > length ? begin - length + 1 : 0; at < end && at + length <= t->length; at++)
            if (at + length > begin &&
                (named ? memcmp(t->data + at, g->shown.data + k->at, length) == 0 : is_word_at(t, at, k)))
                return 1;
    }
    return 0;
}

/* Return the mean negative log-probability per token, excluding terms, which the model did not choose. */
static float cost_of(const text_guard *g, const moe_hypothesis *h) {
    const text_bytes *t = &g->translation;
    float sum = 0.0f;
    size_t n = 0;
    for (size_t j = 0; j < h->n_ids + (size_t)(h->finished != 0); j++) {
        size_t begin = j < g->places.length ? g->places.data[j] : t->length;
        const size_t end = j + 1 < g->places.length ? g->places.data[j + 1] : t->length;
        while (begin < end && is_space(t->data[begin])) begin++;
        if (begin < end && is_of_term(g, begin, end)) continue;
        sum -= h->token_logprobs[j];
        n++;
    }
    return n ? sum / (float)n : 0.0f;
}

/* Return 1 if each placeholder of a term is a separate word, and no hyphen was added to it. */
static int names_are_words(const text_guard *g) {
    const text_bytes *t = &g->translation;
    for (size_t i = 0; i < g->n; i++) {
        const span *k = &g->spans[i];
        if (!k->term || k->kind != TEXT_SPAN_WORD) continue;
        const size_t end = find_bytes(t, g->shown.data + k->at, k->shown, 0) + k->shown;
        if (end > t->length || wordlike(t, end)) return 0;
        if (joins(t, end) && !joins(&g->shown, k->at + k->shown)) return 0;
    }
    return 1;
}

/* Count missing terms, and their words in *words. If `h` is not NULL, store the words written instead. */
static size_t missing_terms(text_guard *g, const moe_hypothesis *h, size_t *words) {
    size_t missing = 0;
    *words = 0;
    for (size_t i = 0; i < g->n; i++) {
        const span *k = &g->spans[i];
        if (!k->term || k->kind == TEXT_SPAN_WORD || count_term(&g->translation, k) >= terms_alike(g, i)) continue;
        missing++;
        *words += count_words(k->term->target, strlen(k->term->target));
        if (!h) continue;
        note_old(g, k, h);
        if (text_add(&g->missing, &g->n_missing, &g->missing_capacity, &i, 1, sizeof i, NULL)) g->old.failed = 1;
    }
    return missing;
}

int text_guard_lacks_term(text_guard *g) {
    size_t words;
    return !g->verbatim && missing_terms(g, NULL, &words) > 0;
}

/* Return 1 if a word of the FREE translation may have remained next to a term of this BOUND translation. The weights
 * were tuned with the 200 terms of tests/bench/glossary_terms.py. */
static int may_be_doubled(text_guard *g, const moe_hypothesis *h) {
    const int grown = count_words(g->translation.data, g->translation.length) >= g->enough;
    const float left = part_left(g, grown ? 0.5f : 0.0f);
    size_t words;
    g->cost = cost_of(g, h) + 0.5f * left + (grown ? 0.5f : 0.0f);
    return grown || left >= 0.5f || missing_terms(g, NULL, &words);
}

moe_status text_guard_next_terms(text_guard *g, const moe_hypothesis *h, int sound, text_terms *next,
                                 moe_error *error) {
    const text_bytes *t = &g->translation;
    size_t words;
    *next = g->terms;
    if (g->verbatim || (!sound && g->terms != TEXT_TERMS_REPLACED)) return MOE_OK;
    if (g->terms == TEXT_TERMS_FREE) {
        text_clear(&g->old);
        text_clear(&g->free);
        g->n_old = g->n_missing = 0;
        text_append(&g->free, t->data, t->length);
        if (missing_terms(g, h, &words)) *next = TEXT_TERMS_BOUND;
        g->enough = count_words(t->data, t->length) + words;
    } else if (g->terms == TEXT_TERMS_BOUND) {
        if (may_be_doubled(g, h)) *next = TEXT_TERMS_REPLACED;
    } else if (g->terms == TEXT_TERMS_REPLACED) {
        if (!sound || !names_are_words(g) || cost_of(g, h) >= g->cost) *next = TEXT_TERMS_REBOUND;
    }
    return g->old.failed || g->free.failed ? text_out_of_memory(error) : MOE_OK;
}

int text_guard_is_intact(const text_guard *g) {
    const text_bytes *t = &g->translation;
    size_t words = 0;
    if (!text_guard_used(g) || g->verbatim) return 1;
    if (count_broken(t) > count_broken(&g->shown)) return 0;
    for (size_t i = 0; i < g->n; i++) {
        const span *k = &g->spans[i];
        if (k->kind != TEXT_SPAN_WORD) continue;
        const char *name = g->shown.data + k->at;
        const size_t at = find_bytes(t, name, k->shown, 0);
        if (at == t->length || find_bytes(t, name, k->shown, at + k->shown) < t->length) return 0;
        words++;
    }
    return !words || count_parts(g, t) <= count_parts(g, &g->shown);
}

/* Append the markup inside a term that belongs before it (`open` is 1) or after it. */
static void put_markup_inside(const text_guard *g, const span *term, int open, text_bytes *out) {
    for (size_t i = 0; i < g->n; i++) {
        const span *k = &g->spans[i];
        if (k->source > term->source && k->source < term->source + term->length && (k->kind == TEXT_SPAN_OPEN) == open)
            text_append(out, g->text.data + k->source, k->length);
    }
}

/* Append a text without language unchanged, except for its terms. */
static void put_verbatim(const text_guard *g, text_bytes *out) {
    size_t at = 0;
    for (size_t i = 0; i < g->n; i++) {
        const span *k = &g->spans[i];
        if (!k->term) continue;
        text_append(out, g->text.data + at, k->source - at);
        put_markup_inside(g, k, 1, out);
        put_term(k->term, 0, out);
        put_markup_inside(g, k, 0, out);
        at = k->source + k->length;
    }
    text_append(out, g->text.data + at, g->text.length - at);
}

moe_status text_guard_restore(const text_rules *r, text_guard *g, const moe_hypothesis *h, text_variant variant,
                              int shout, text_bytes *out, moe_error *error) {
    const text_front *f = r->front;
    moe_status status = MOE_OK;
    text_append(out, g->before.data, g->before.length);
    if (g->verbatim) {
        put_verbatim(g, out);
    } else {
        text_bytes *t = &g->translation;
        text_clear(t);
        status = text_decode(f, h->ids, h->n_ids, t, error);
        if (status) return status;
        text_append(t, "", 0);
        const size_t lost = text_undo_variant(variant, t, 0);
        if (text_decode_begins(f, h->ids, h->n_ids, &g->places, error) == MOE_ERROR_MEMORY)
            return text_out_of_memory(error);
        if (g->places.length != h->n_ids) g->places.length = 0;
        for (size_t j = 0; j < g->places.length; j++) {
            uint32_t *at = &g->places.data[j];
            *at = (uint32_t)least(*at - least(*at, lost), t->length);
        }
        g->capitals = shout;
        if (shout) text_upper_case(t->data, t->length);
        status = find_edits(g, h, error);
        if (!status) apply_edits(g, out);
    }
    text_append(out, g->after.data, g->after.length);
    return status || !out->failed ? status : text_out_of_memory(error);
}
