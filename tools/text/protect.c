/* protect.c - protect.h says what this is and has the contracts.
 *
 * Contents
 *   1. Rules      what is kept
 *   2. Showing    the text that the model sees
 *   3. Binding    constraints
 *   4. Placing    where markup belongs in the translation
 *   5. Restoring  edits of the translation
 */
#define _POSIX_C_SOURCE 200809L
#include "tools/text/protect.h"
#include "tools/text/glossary.h"
#include "tools/text/spans.h"
#include "tools/text/words.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum {
    MAX_WORD = 200,   /* bytes of a word that is looked up in the vocabulary */
    MOST_ASKED = 4,   /* bytes of what has no language that the model is asked for: the answer does not matter */
    MOST_KEPT = 4000, /* of one text; one with more is no language */
    MOST_ASIDE = 16,  /* pairs of tags of which the words are translated by themselves */
    ASIDE_BYTES = 100,
    ASIDE_WORDS = 12 /* of such a translation */
};

static int is_space(char c) { return c == ' ' || c == '\t'; }

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static size_t most(size_t a, size_t b) { return a > b ? a : b; }

/* ==== 1. Rules ========================================================================================== */

struct text_rules {
    const text_front *front;
    text_front targets;
    int spans;
    int derived;               /* `characters` are those of other rules */
    text_glossary *glossary;   /* NULL: none */
    unsigned char *characters; /* a bit for each that stands in a piece of the vocabulary; NULL: not known */
    int bytes;                 /* the vocabulary spells others by their bytes, which models copy where they are ASCII */
};

/* Whether each character of some bytes stands in a piece of the vocabulary as it is; letters and digits of ASCII, and
 * what is spelt by bytes there, count as if they did. */
static int is_listed(const text_rules *r, const char *text, size_t length) {
    utf8proc_int32_t c;
    utf8proc_ssize_t bytes;
    for (size_t at = 0; at < length; at += (size_t)bytes) {
        c = text[at], bytes = 1;
        if (c & 0x80)
            bytes = utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)(length - at), &c);
        if (bytes < 1) return 1;
        if (!r->characters || r->characters[c / 8] >> c % 8 & 1) continue;
        if (c >= 0x80 || (!r->bytes && c > ' ' && !text_is_wordlike(text, length, at))) return 0;
    }
    return 1;
}

/* Note the characters of all pieces that are text. 0: no memory. Few pieces have one that none had before: only they
 * are looked at closely, so that a program starts without delay. */
static int find_characters(text_rules *r) {
    const text_front *f = r->front;
    if (!f->tokeniser) return 1;
    r->characters = calloc(0x110000 / 8, 1);
    for (int32_t id = 0, n = spm_size(f->tokeniser); r->characters && id < n; id++) {
        const char *piece = spm_piece(f->tokeniser, id);
        const size_t length = strlen(piece);
        utf8proc_int32_t c;
        utf8proc_ssize_t bytes;
        const int byte = strncmp(piece, "<0x", 3) == 0 && spm_is_byte(f->tokeniser, id); /* all are spelt so */
        r->bytes |= byte;
        if (byte || is_listed(r, piece, length) || spm_is_control(f->tokeniser, id) ||
            spm_is_unknown(f->tokeniser, id) || (f->map.ids && f->map.ids[id] < 0))
            continue;
        for (size_t at = 0; at < length; at += (size_t)bytes) {
            bytes = utf8proc_iterate((const utf8proc_uint8_t *)piece + at, (utf8proc_ssize_t)(length - at), &c);
            if (bytes < 1) break;
            r->characters[c / 8] = (unsigned char)(r->characters[c / 8] | 1 << c % 8);
        }
    }
    return r->characters != NULL;
}

moe_status text_rules_new(const text_front *front, int spans, const char *glossary, text_rules **out,
                          moe_error *error) {
    text_bytes data = { 0 };
    moe_status status = glossary ? text_glossary_load(glossary, &data, error) : MOE_OK;
    if (!status) status = text_rules_read(front, spans, glossary, &data, out, error);
    text_bytes_free(&data);
    return status;
}

moe_status text_rules_read(const text_front *front, int spans, const char *glossary, const text_bytes *data,
                           text_rules **out, moe_error *error) {
    text_rules *r = calloc(1, sizeof *r);
    if (!r) return text_out_of_memory(error);
    r->front = front;
    r->targets = text_front_of_targets(front);
    r->spans = spans;
    if (spans && !find_characters(r)) return text_rules_free(r), text_out_of_memory(error);
    const moe_status status =
        glossary ? text_glossary_read(&r->targets, glossary, data->data, data->length, &r->glossary, error) : MOE_OK;
    if (status) return text_rules_free(r), status;
    *out = r;
    return MOE_OK;
}

moe_status text_rules_with(const text_rules *base, const char *const *sources, const char *const *translations,
                           size_t n, text_rules **out, moe_error *error) {
    text_rules *r = malloc(sizeof *r);
    if (!r) return text_out_of_memory(error);
    *r = *base;
    r->derived = 1, r->glossary = NULL;
    const moe_status status = text_glossary_of(&base->targets, sources, translations, n, &r->glossary, error);
    if (status) return text_rules_free(r), status;
    *out = r;
    return MOE_OK;
}

int text_rules_spans(const text_rules *r) { return r->spans; }
const text_glossary *text_rules_glossary(const text_rules *r) { return r->glossary; }
size_t text_rules_terms(const text_rules *r) { return text_glossary_count(r->glossary); }
const char *text_rules_target(const text_rules *r, size_t i) { return text_glossary_target(r->glossary, i); }

void text_rules_free(text_rules *r) {
    if (!r) return;
    text_glossary_free(r->glossary);
    if (!r->derived) free(r->characters);
    free(r);
}

/* ==== 2. Showing ======================================================================================== */

/* What is kept of a text. */
typedef struct kept {
    text_span_kind kind;
    size_t source, length; /* its bytes in the text; of a term, in the shown text */
    size_t at, shown;      /* its bytes in the shown text; markup has none there */
    size_t partner;        /* OPEN: its CLOSE */
    int number;            /* WORD: N of the stand-in XN */
    int before, after;     /* white space stood there, or an end of the text */
    size_t first, n;       /* its tokens, once they are bound */
    int runs_on;           /* the last one has signs behind it, too: "2008." can be a piece */
    const text_term *term; /* of the glossary; NULL: none */
    int inflected;         /* the text has it with an ending: so may a FREE translation */
    size_t from, to;       /* of markup: where it belongs in the translation */
} kept;

/* What stands between a pair of tags, translated by itself. */
typedef struct aside {
    size_t source;        /* of the pair's first tag */
    size_t begin, length; /* in text_guard.asides */
} aside;

/* A change of the translation: its bytes [at, at + length) become kept `what`; SIZE_MAX: nothing. */
typedef struct edit {
    size_t at, length, what, order;
} edit;

struct text_guard {
    int shouted;        /* the translation is in capitals */
    int used, verbatim; /* verbatim: there is no language in the text */
    int calm;           /* terms in capitals are shown as the glossary has them */
    int attempt;        /* 1: the second, with other stand-ins */
    text_message_text message;
    text_terms terms;         /* what becomes of its terms */
    text_bytes free, old;     /* the FREE translation; its words where terms are missing, each ended by a NUL */
    size_t enough;            /* words of a translation in which those terms were only added to it */
    float cost;               /* of the BOUND one */
    text_bytes text, shown;   /* the text without white space at both ends */
    text_bytes before, after; /* that white space */
    kept *kept;
    size_t n, capacity;
    moe_constraint *constraints;
    size_t *begins; /* [constraints] of its ids in `ids` */
    size_t n_constraints, constraint_capacity, begin_capacity;
    text_ids ids, scratch;
    size_t room;       /* for `ids` */
    uint32_t *offsets; /* [n_offsets] where each token of the shown text begins */
    size_t n_offsets, offset_capacity;
    text_bytes translation;
    uint32_t *places; /* [n_places] where each token of the translation begins */
    size_t n_places, place_capacity;
    edit *edits;
    size_t n_edits, edit_capacity;
    aside *aside;
    size_t n_asides, aside_capacity;
    text_bytes asides;
};

void text_guard_clear(text_guard *g) {
    if (!g) return;
    g->used = 0;
    g->n_asides = 0;
    text_clear(&g->asides);
}

int text_guard_used(const text_guard *g) { return g && g->used; }

size_t text_guard_plain(const text_guard *g) {
    if (!text_guard_used(g)) return 0;
    for (size_t i = 0; i < g->n; i++)
        if (g->kept[i].kind == TEXT_SPAN_WORD || (g->kept[i].kind != TEXT_SPAN_NUMBER && !g->kept[i].term))
            return SIZE_MAX;
    return g->shown.length == g->text.length && !g->verbatim && !g->calm ? g->before.length : SIZE_MAX;
}

void text_guard_free(text_guard *g) {
    if (!g) return;
    text_bytes *const all[] = { &g->text,        &g->shown,  &g->before, &g->after,
                                &g->translation, &g->asides, &g->free,   &g->old };
    text_bytes_free_all(all, sizeof all / sizeof *all);
    free(g->aside);
    text_ids_free(&g->ids);
    text_ids_free(&g->scratch);
    free(g->kept);
    free(g->constraints);
    free(g->begins);
    free(g->offsets);
    free(g->places);
    free(g->edits);
    free(g);
}

static kept *add_kept(text_guard *g, text_span_kind kind, size_t source, size_t length) {
    kept *larger = text_grown(g->kept, &g->capacity, g->n + 1, sizeof *larger);
    if (!larger) return NULL;
    g->kept = larger;
    kept *k = &larger[g->n++];
    *k = (kept){ .kind = kind, .source = source, .length = length, .at = g->shown.length, .partner = SIZE_MAX };
    k->before = !source || is_space(g->text.data[source - 1]);
    k->after = source + length == g->text.length || is_space(g->text.data[source + length]);
    return k;
}

static size_t character_begin(const text_bytes *t, size_t at) {
    while (at && ((unsigned char)t->data[at] & 0xC0) == 0x80) at--;
    return at;
}

/* The largest N of a stand-in XN that is written in the text. */
static int largest_taken(const text_guard *g) {
    int largest = 0;
    for (size_t i = 0; i < g->text.length; i++) {
        int number = 0;
        if (g->text.data[i] != 'X' && g->text.data[i] != '[') continue;
        for (size_t at = i + 1; at < g->text.length && g->text.data[at] >= '0' && g->text.data[at] <= '9'; at++)
            number = number < 100000 ? 10 * number + (g->text.data[at] - '0') : number;
        if (number > largest) largest = number;
    }
    return largest;
}

static void show_word(text_guard *g, kept *k, int *number) {
    const char *text = g->text.data;
    const size_t end = k->source + k->length;
    k->number = ++*number;
    if (g->shown.length && !is_space(g->shown.data[g->shown.length - 1])) text_append(&g->shown, " ", 1);
    k->at = g->shown.length;
    const int counts = g->message == TEXT_MESSAGE_PLURAL && k->length == 1 && text[k->source] == '#';
    text_printf(&g->shown, g->attempt ? "[%d]" : counts ? "2%d" : "X%d", k->number); /* it is read as a number */
    k->shown = g->shown.length - k->at;
    if (text_is_wordlike(text, g->text.length, end)) text_append(&g->shown, " ", 1);
}

static size_t character_bytes(const char *text, size_t length, size_t at) {
    size_t end = at + 1;
    while (end < length && ((unsigned char)text[end] & 0xC0) == 0x80) end++;
    return end - at;
}

/* The term of the glossary at byte `at` of the text, where a word or sign begins, if it is longer than what stands
 * there otherwise; NULL: none. */
static const text_term *term_at(const text_rules *r, const text_guard *g, size_t at, text_span_kind kind, size_t *bytes,
                                int *inflected) {
    const text_bytes *t = &g->text;
    size_t found;
    if (!r->glossary || (kind != TEXT_SPAN_NONE && kind != TEXT_SPAN_NUMBER && kind != TEXT_SPAN_WORD)) return NULL;
    if (at && text_is_wordlike(t->data, t->length, at) &&
        text_is_wordlike(t->data, t->length, text_utf8_cut(t->data, t->length, at - 1)))
        return NULL;
    const text_term *term = text_glossary_find(r->glossary, t->data, t->length, at, &found, inflected);
    if (!term || (kind != TEXT_SPAN_NONE && found < *bytes)) return NULL;
    *bytes = found;
    return term;
}

static int is_letter(const char *text, size_t length, size_t at) {
    utf8proc_int32_t c;
    if (utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)(length - at), &c) < 1) return 0;
    return utf8proc_category(c) >= UTF8PROC_CATEGORY_LU && utf8proc_category(c) <= UTF8PROC_CATEGORY_LO;
}

/* Whether an id is one byte of a character that has no piece. */
static int is_byte(const text_front *front, int32_t id) {
    const moe_span piece = text_source_piece(front, id);
    return piece.length == 6 && memcmp(piece.data, "<0x", 3) == 0 && piece.data[5] == '>';
}

/* The bytes of the word or sign at text[at] if the vocabulary cannot spell it; else 0. Frequent words are no names: a
 * model has learned to read them without the letters that its vocabulary lacks. */
static size_t unspelt(const text_rules *r, text_guard *g, size_t at, int *failed) {
    const char *text = g->text.data;
    const size_t length = g->text.length;
    size_t bytes = text_word_length(text, length, at);
    moe_error ignored;
    if (text_is_unspaced(text, length, at)) {
        for (bytes = 1; at + bytes < length && ((unsigned char)text[at + bytes] & 0xC0) == 0x80; bytes++) {}
    }
    if (bytes > MAX_WORD || is_listed(r, text + at, bytes) || text_word_is_common(text + at, bytes)) return 0;
    const moe_status status = text_encode(r->front, text + at, bytes, &g->scratch, &ignored);
    if (status == MOE_ERROR_MEMORY) return *failed = 1, 0;
    for (size_t i = 0; !status && i < g->scratch.length; i++)
        if (text_is_unknown(r->front, g->scratch.data[i]) || is_byte(r->front, g->scratch.data[i])) return bytes;
    return status ? bytes : 0;
}

/* The bytes of a run of writing without spaces, if the vocabulary cannot spell a fourth of its characters: the model
 * does not know the writing, and would tear the run apart around stand-ins for some of them. Else 0. *end: of the run.
 */
static size_t unspelt_run(const text_rules *r, text_guard *g, size_t at, size_t *end, int *failed) {
    const char *text = g->text.data;
    const size_t length = g->text.length;
    size_t all = 0, strange = 0, to = at;
    for (; to < length && text_is_unspaced(text, length, to) && text_is_wordlike(text, length, to);
         to += character_bytes(text, length, to), all++)
        strange += unspelt(r, g, to, failed) > 0;
    *end = to;
    return strange && 4 * strange >= all ? to - at : 0;
}

/* Show what is kept of a kind. */
static void show_kept(text_guard *g, kept *k, int *number) {
    const char *text = g->text.data;
    const size_t end = k->source + k->length;
    const char last = g->shown.length ? g->shown.data[g->shown.length - 1] : ' ';
    if (k->kind == TEXT_SPAN_WORD) {
        show_word(g, k, number);
    } else if (k->term && g->calm && text_term_is_capitals(k->term, text + k->source, k->length)) {
        text_term_lower_case(k->term, text + k->source, k->length, &g->shown);
        k->shown = g->shown.length - k->at;
    } else if (k->kind == TEXT_SPAN_NUMBER || k->term) {
        text_append(&g->shown, text + k->source, k->length);
        k->shown = k->length;
    } else if (!is_space(last) && text_is_wordlike(text, g->text.length, end) &&
               (strchr(".!?,;:", last) ||
                text_is_wordlike(g->shown.data, g->shown.length, character_begin(&g->shown, g->shown.length - 1)))) {
        text_append(&g->shown, " ", 1);
    }
}

/* Walk over the text: what is kept, and what is shown. Returns whether there is language in it; -1: no memory. */
static int show(const text_rules *r, text_guard *g) {
    const char *text = g->text.data;
    int number = largest_taken(g), language = 0, failed = 0;
    size_t bytes, word = 0, run = 0; /* of those that were looked at: the end of a word, of a run without spaces */
    text_scan scan = text_scan_begin(text, g->text.length);
    scan.message = g->message;
    for (size_t at = 0; at < g->text.length; at += bytes) {
        text_span_kind kind = text_span_next(&scan, at, &bytes);
        if (!r->spans) kind = TEXT_SPAN_NONE, bytes = character_bytes(text, g->text.length, at);
        int inflected = 0;
        const text_term *term = term_at(r, g, at, kind, &bytes, &inflected);
        if (term) kind = g->terms == TEXT_TERMS_REPLACED ? TEXT_SPAN_WORD : TEXT_SPAN_NONE;
        if (kind == TEXT_SPAN_HYPHEN) {
            g->used = 1;
            continue;
        }
        if (kind == TEXT_SPAN_NONE && !term && r->spans && at >= word) {
            const int wordlike = text_is_wordlike(text, g->text.length, at);
            size_t strange =
                at >= run && text_is_unspaced(text, g->text.length, at) ? unspelt_run(r, g, at, &run, &failed) : 0;
            if (!strange) strange = unspelt(r, g, at, &failed);
            word =
                at + (text_is_unspaced(text, g->text.length, at) ? bytes : text_word_length(text, g->text.length, at));
            if (strange) kind = wordlike ? TEXT_SPAN_WORD : TEXT_SPAN_LONE, bytes = strange;
        }
        if (kind == TEXT_SPAN_NUMBER && !is_listed(r, text + at, bytes)) kind = TEXT_SPAN_WORD;
        if (kind == TEXT_SPAN_NONE && !term) {
            language |= is_letter(text, g->text.length, at);
            text_append(&g->shown, text + at, bytes);
            continue;
        }
        kept *k = add_kept(g, kind, at, bytes);
        if (!k || failed) return -1;
        k->term = term;
        k->inflected = inflected && g->terms == TEXT_TERMS_FREE;
        show_kept(g, k, &number);
        if (g->shown.failed) return -1;
    }
    return g->shown.failed || failed ? -1 : language && g->n <= MOST_KEPT;
}

/* Terms in capitals, in a text that is not, are shown as the glossary has them: few models have learned capitals. */
static int show_calm(const text_rules *r, text_guard *g) {
    int shouted = 0, language = show(r, g);
    if (language < 0 || text_is_capitals(g->shown.data, g->shown.length)) return language;
    for (size_t i = 0; i < g->n && !shouted; i++) {
        const kept *k = &g->kept[i];
        shouted = k->term && text_term_is_capitals(k->term, g->text.data + k->source, k->length);
    }
    if (!shouted) return language;
    g->calm = 1;
    g->n = g->shown.length = 0;
    return show(r, g);
}

/* Match the tags that belong together; one without a partner stands alone. */
static void pair_tags(text_guard *g) {
    for (size_t i = 0; i < g->n; i++) {
        if (g->kept[i].kind != TEXT_SPAN_CLOSE) continue;
        const char *name, *other;
        const size_t length = text_tag_name(g->text.data + g->kept[i].source, g->kept[i].length, &name);
        for (size_t j = i; j-- > 0;) {
            kept *open = &g->kept[j];
            if (open->kind != TEXT_SPAN_OPEN || open->partner != SIZE_MAX) continue;
            if (text_tag_name(g->text.data + open->source, open->length, &other) == length &&
                memcmp(name, other, length) == 0) {
                open->partner = i;
                g->kept[i].partner = j;
                for (size_t inner = j + 1; inner < i; inner++) /* those between were never closed */
                    if (g->kept[inner].partner == SIZE_MAX && g->kept[inner].kind == TEXT_SPAN_OPEN)
                        g->kept[inner].kind = TEXT_SPAN_LONE;
                break;
            }
        }
        if (g->kept[i].partner == SIZE_MAX) g->kept[i].kind = TEXT_SPAN_LONE;
    }
    for (size_t i = 0; i < g->n; i++)
        if (g->kept[i].kind == TEXT_SPAN_OPEN && g->kept[i].partner == SIZE_MAX) g->kept[i].kind = TEXT_SPAN_LONE;
}

moe_status text_guard_begin(const text_rules *r, const char *text, size_t length, int more, int attempt,
                            text_message_text message, text_terms terms, text_guard **guard, moe_span *shown,
                            moe_error *error) {
    text_guard *g = *guard;
    size_t begin = 0, end = length;
    *shown = (moe_span){ text, length };
    if (!g) *guard = g = calloc(1, sizeof *g);
    if (!g) return text_out_of_memory(error);
    g->used = g->verbatim = g->calm = 0;
    g->attempt = attempt;
    g->message = message;
    g->terms = terms;
    g->n = g->n_constraints = g->ids.length = 0;
    text_bytes *const all[] = { &g->text, &g->shown, &g->before, &g->after };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) text_clear(all[i]), text_append(all[i], "", 0);
    while (begin < length && is_space(text[begin])) begin++;
    while (end > begin && is_space(text[end - 1])) end--;
    if (begin == end) return MOE_OK;
    if (r->spans) {
        text_append(&g->before, text, begin);
        if (!more || memchr(text + end, '\t', length - end)) text_append(&g->after, text + end, length - end);
    }
    text_append(&g->text, text + begin, end - begin);
    int language = 1;
    if (g->text.failed || g->before.failed || g->after.failed) return text_out_of_memory(error);
    if (r->spans || r->glossary) language = show_calm(r, g);
    else text_append(&g->shown, g->text.data, g->text.length);
    if (language < 0 || g->shown.failed) return text_out_of_memory(error);
    if (g->n || g->before.length || g->after.length || !language) g->used = 1;
    if (!g->used) return MOE_OK;
    g->verbatim = !language;
    if (g->n <= MOST_KEPT) pair_tags(g);
    *shown = g->verbatim ? (moe_span){ g->text.data, text_utf8_cut(g->text.data, g->text.length, MOST_ASKED) }
                         : (moe_span){ g->shown.data, g->shown.length };
    return MOE_OK;
}

void text_guard_put_placeholders(const text_guard *g, char *calm) {
    for (size_t i = 0; !g->verbatim && i < g->n; i++)
        if (g->kept[i].shown && (!g->kept[i].term || g->kept[i].kind == TEXT_SPAN_WORD))
            memcpy(calm + g->kept[i].at, g->shown.data + g->kept[i].at, g->kept[i].shown);
}

/* ==== 3. Binding ======================================================================================== */

/* The tokens of shown bytes [at, at + length), into k->first and k->n; n 0: they are not known. *token: the first one
 * that is not before them; what is kept comes in the order of the text. */
static void find_tokens(const text_guard *g, const char *encoded, kept *k, size_t *token) {
    const size_t end = k->at + k->shown;
    k->first = k->n = 0;
    k->runs_on = 0;
    for (size_t *i = token; *i < g->n_offsets; ++*i) {
        size_t begin = g->offsets[*i];
        while (begin < g->shown.length && is_space(encoded[begin])) begin++; /* a token begins with the space before */
        if (begin < k->at) continue;
        if (begin >= end) break;
        if (!k->n) k->first = *i;
        k->n = *i + 1 - k->first;
        k->runs_on = end < (*i + 1 < g->n_offsets ? g->offsets[*i + 1] : g->shown.length);
    }
}

/* The translation must have these tokens. */
static moe_status add_constraint(text_guard *g, const kept *k, const text_ids *ids, moe_error *error) {
    if (g->n_constraints == MOE_MAX_CONSTRAINTS || g->ids.length + ids->length >= g->room) return MOE_OK;
    moe_constraint *larger = text_grown(g->constraints, &g->constraint_capacity, g->n_constraints + 1, sizeof *larger);
    if (larger) g->constraints = larger;
    size_t *begins = text_grown(g->begins, &g->begin_capacity, g->n_constraints + 1, sizeof *begins);
    if (begins) g->begins = begins;
    if (!larger || !begins) return text_out_of_memory(error);
    begins[g->n_constraints] = g->ids.length;
    larger[g->n_constraints++] = (moe_constraint){ .n_ids = ids->length,
                                                   .first = k->first,
                                                   .n_source = k->n,
                                                   .once = k->kind == TEXT_SPAN_WORD || (k->term && k->term->stays) };
    return text_ids_append(&g->ids, ids->data, ids->length, error);
}

moe_status text_guard_bind(const text_rules *r, text_guard *g, const char *encoded, size_t length, const text_ids *ids,
                           size_t room, moe_error *error) {
    const text_front *f = r->front;
    char why[128];
    size_t token = 0;
    moe_status status = MOE_OK;
    g->n_offsets = 0;
    if (g->verbatim || !text_cuts(f)) return MOE_OK;
    const int failed =
        text_encode_begins(f, encoded, length, &g->offsets, &g->offset_capacity, &g->n_offsets, why, sizeof why);
    if (failed == SPM_NO_MEMORY) return text_out_of_memory(error);
    if (g->n_offsets != ids->length) g->n_offsets = 0;
    g->room = room;
    for (size_t i = 0; i < g->n && !status; i++) {
        kept *k = &g->kept[i];
        if (!k->shown) continue;
        find_tokens(g, encoded, k, &token);
        if (k->kind == TEXT_SPAN_NUMBER && !(k->at == 0 || is_space(encoded[k->at - 1]))) continue;
        /* A model with the piece "2008." writes that. It would write no sign after 2008, were it bound to that. */
        if (k->runs_on && !k->term && !g->attempt) continue;
        if (k->term && g->terms != TEXT_TERMS_REPLACED) {
            if (g->terms != TEXT_TERMS_FREE) status = add_constraint(g, k, &k->term->ids, error);
            continue;
        }
        status = text_encode(&r->targets, g->shown.data + k->at, k->shown, &g->scratch, error);
        if (!status) status = add_constraint(g, k, &g->scratch, error);
    }
    for (size_t c = 0; c < g->n_constraints; c++) g->constraints[c].ids = g->ids.data + g->begins[c];
    return status;
}

void text_guard_constrain(const text_guard *g, moe_request *request) {
    if (!text_guard_used(g) || g->verbatim) return;
    request->constraints = g->constraints;
    request->n_constraints = g->n_constraints;
}

int text_guard_has_constraints(const text_guard *g) { return text_guard_used(g) && !g->verbatim && g->n_constraints; }

/* ==== 4. Placing ======================================================================================== */

/* Where the next word's first character begins, from the character at `at` on; `end` where there is none before. */
static size_t next_word(const text_bytes *t, size_t at, size_t end) {
    for (; at < end; at++) {
        const int inside = ((unsigned char)t->data[at] & 0xC0) == 0x80; /* a character */
        if (!inside && text_is_wordlike(t->data, t->length, at)) break;
    }
    return at;
}

/* Where the word begins whose character begins at `at`. */
static size_t word_begin(const text_bytes *t, size_t at) {
    while (at && text_is_wordlike(t->data, t->length, at)) {
        const size_t before = character_begin(t, at - 1);
        if (!text_is_wordlike(t->data, t->length, before)) break;
        at = before;
    }
    return at;
}

static size_t word_end(const text_bytes *t, size_t at) {
    while (at < t->length && text_is_wordlike(t->data, t->length, at)) at += text_word_length(t->data, t->length, at);
    return at;
}

/* Without the signs at both ends, if there is a word between them. */
static void trim(const text_bytes *t, size_t *from, size_t *to) {
    size_t begin = next_word(t, *from, *to), end = *to;
    while (end > begin && !text_is_wordlike(t->data, t->length, character_begin(t, end - 1))) end--;
    if (begin < end) *from = begin, *to = end;
}

/* The bytes of token j of the translation, without white space, in whole words. 0: it has none. */
static int token_bytes(const text_guard *g, size_t j, size_t *begin, size_t *end) {
    const text_bytes *t = &g->translation;
    *begin = g->places[j];
    *end = j + 1 < g->n_places ? g->places[j + 1] : t->length;
    while (*begin < *end && is_space(t->data[*begin])) ++*begin;
    while (*end > *begin && is_space(t->data[*end - 1])) --*end;
    if (*begin == *end) return 0;
    *begin = word_begin(t, character_begin(t, *begin));
    *end = most(*end, word_end(t, character_begin(t, *end - 1)));
    return *end > *begin;
}

/* The bytes of the translation that were written with a look at source tokens [first, end). 0: there are none. */
static int find_written(const text_guard *g, const moe_hypothesis *h, size_t first, size_t end, size_t *from,
                        size_t *to) {
    int found = 0;
    for (size_t j = 0; h->sources && j < g->n_places; j++) {
        size_t begin, stop;
        if (h->sources[j] < (int32_t)first || h->sources[j] >= (int32_t)end || !token_bytes(g, j, &begin, &stop))
            continue;
        *from = found ? least(*from, begin) : begin;
        *to = found ? most(*to, stop) : stop;
        found = 1;
    }
    return found;
}

/* The first token of the shown text that begins at byte `at` or behind it. */
static size_t token_at(const text_guard *g, size_t at) {
    size_t i = 0;
    for (; i < g->n_offsets; i++) {
        size_t begin = g->offsets[i];
        while (begin < g->shown.length && is_space(g->shown.data[begin])) begin++;
        if (begin >= at && begin < g->shown.length) break;
    }
    return i;
}

static int has_word(const text_bytes *t, size_t at, size_t end) { return next_word(t, at, end) < end; }

/* The place in the translation for something at byte `at` of the shown text, behind the word before it (`left`) or
 * before the one that follows. */
static size_t find_place(const text_guard *g, const moe_hypothesis *h, size_t at, int left) {
    const text_bytes *t = &g->translation;
    const size_t token = token_at(g, at);
    size_t from, to;
    if (!has_word(&g->shown, 0, at)) return 0;
    if (!has_word(&g->shown, at, g->shown.length)) { /* the signs at the end are the same, or nearly so */
        size_t end = t->length;
        while (at < g->shown.length && end && !text_is_wordlike(t->data, t->length, character_begin(t, end - 1)))
            end = character_begin(t, end - 1);
        return end;
    }
    if (!g->n_offsets || !h->sources) { /* as far into the text, between two words */
        size_t guess = (size_t)((double)at / (double)g->shown.length * (double)t->length);
        for (guess = least(guess, t->length); guess < t->length && !is_space(t->data[guess]); guess++) {}
        return !left && guess < t->length ? guess + 1 : guess;
    }
    for (size_t i = token; left && i-- > 0;)
        if (find_written(g, h, i, i + 1, &from, &to)) return to;
    for (size_t i = token; i < g->n_offsets; i++)
        if (find_written(g, h, i, i + 1, &from, &to)) return from;
    return t->length;
}

/* What was glued to a word stands behind that one, or before it; what had a space at both sides, at a space. */
static void place_lone(const text_guard *g, const moe_hypothesis *h, kept *k) {
    const text_bytes *t = &g->translation;
    const int left = !k->before;
    size_t at = find_place(g, h, k->at, left);
    if (has_word(&g->shown, 0, k->at) && has_word(&g->shown, k->at, g->shown.length) && k->before && k->after)
        while (at && at < t->length && !is_space(t->data[at - 1])) at--;
    k->from = k->to = at;
}

/* Whether all words of the text stand between a pair: it stands around the whole translation then, but for the signs
 * that it did not stand around. */
static int is_around_all(const text_guard *g, const kept *k) {
    const kept *close = &g->kept[k->partner];
    return !has_word(&g->shown, 0, k->at) && !has_word(&g->shown, close->at, g->shown.length);
}

static void place_around_all(const text_guard *g, kept *k) {
    const text_bytes *t = &g->translation;
    const kept *close = &g->kept[k->partner];
    size_t bytes;
    k->from = 0, k->to = t->length;
    for (size_t at = 0; at < k->at && k->from < t->length; at += bytes) { /* signs before it */
        bytes = text_word_length(g->shown.data, g->shown.length, at);
        if (text_is_wordlike(t->data, t->length, k->from)) break;
        k->from += text_word_length(t->data, t->length, k->from);
    }
    for (size_t at = close->at; at < g->shown.length && k->to > k->from; at += bytes) { /* signs behind it */
        const size_t last = character_begin(t, k->to - 1);
        bytes = text_word_length(g->shown.data, g->shown.length, at);
        if (text_is_wordlike(t->data, t->length, last)) break;
        k->to = last;
    }
}

/* Nothing was written with a look at the bytes up to `end` that a pair stands around: it stands around a word near. Of
 * two words that were written for the one before it, that is the second. */
static void find_word(const text_guard *g, const moe_hypothesis *h, kept *k, size_t end) {
    const text_bytes *t = &g->translation;
    const size_t before = token_at(g, k->at);
    size_t from, to;
    k->from = k->to = find_place(g, h, k->at, 1);
    if (end == k->at || !t->length) return;
    if (before && find_written(g, h, before - 1, before, &from, &to)) {
        while (to > from && !text_is_wordlike(t->data, t->length, character_begin(t, to - 1))) to--;
        const size_t last = to > from ? word_begin(t, character_begin(t, to - 1)) : to;
        if (last > from) {
            k->from = last, k->to = to;
            return;
        }
    }
    k->from = next_word(t, k->from, t->length);
    if (k->from == t->length) { /* none follows: the last one */
        while (k->from && !text_is_wordlike(t->data, t->length, character_begin(t, k->from - 1))) k->from--;
        k->to = k->from;
        k->from = k->from ? word_begin(t, character_begin(t, k->from - 1)) : 0;
    } else {
        k->to = word_end(t, k->from);
    }
}

/* What a pair of tags stands around, if it is to be translated by itself: a few words, nothing that is kept among them;
 * length 0: it is not. */
static moe_span words_between(const text_guard *g, size_t i) {
    const kept *k = &g->kept[i];
    const moe_span nothing = { "", 0 };
    if (k->kind != TEXT_SPAN_OPEN || is_around_all(g, k)) return nothing;
    size_t begin = k->at, end = g->kept[k->partner].at;
    for (size_t j = i + 1; j < k->partner; j++)
        if (g->kept[j].shown) return nothing;
    while (begin < end && is_space(g->shown.data[begin])) begin++;
    while (end > begin && is_space(g->shown.data[end - 1])) end--;
    if (end - begin > ASIDE_BYTES || !has_word(&g->shown, begin, end)) return nothing;
    return (moe_span){ g->shown.data + begin, end - begin };
}

moe_span text_guard_phrase(const text_guard *g, size_t n, size_t *source, int *small) {
    moe_span words = { "", 0 };
    size_t pairs = 0;
    *small = 0;
    if (!text_guard_used(g) || g->verbatim || g->n > MOST_KEPT) return words;
    for (size_t i = 0; i < g->n && pairs < MOST_ASIDE; i++) {
        words = words_between(g, i);
        if (!words.length) continue;
        pairs++;
        *source = g->kept[i].source;
        if (n-- == 0) return words;
        if (text_is_short(words.data, words.length) < 2) continue;
        *small = 1;
        if (n-- == 0) return words;
        *small = 0;
    }
    return (moe_span){ "", 0 };
}

int text_guard_add_phrase(text_guard *g, size_t source, const char *text, size_t length) {
    aside *larger = text_grown(g->aside, &g->aside_capacity, g->n_asides + 1, sizeof *larger);
    if (!larger) return 0;
    g->aside = larger;
    g->aside[g->n_asides++] = (aside){ source, g->asides.length, length };
    text_append(&g->asides, text, length);
    return !g->asides.failed;
}

/* How alike two words are: 3, the same but for the case of the first letter; 2, they begin alike and may be forms of
 * one word; else 0. */
static int likeness(moe_span a, moe_span b) {
    char first[2][8] = { { 0 } };
    size_t bytes = character_bytes(a.data, a.length, 0), same;
    const size_t longer = most(a.length, b.length);
    if (bytes != character_bytes(b.data, b.length, 0) || bytes >= sizeof first[0]) return 0;
    memcpy(first[0], a.data, bytes), memcpy(first[1], b.data, bytes);
    text_lower_first(first[0], bytes), text_lower_first(first[1], bytes);
    if (memcmp(first[0], first[1], bytes) != 0) return 0;
    for (same = bytes; same < least(a.length, b.length) && a.data[same] == b.data[same]; same++) {}
    return same == longer ? 3 : same >= 4 && 3 * same >= 2 * longer ? 2 : 0;
}

/* The words of a text from *at on; how many, `room` at most. */
static size_t read_words(const char *text, size_t length, size_t *at, moe_span *words, size_t room) {
    size_t n = 0;
    for (size_t bytes; *at < length && n < room; *at += bytes) {
        bytes = text_word_length(text, length, *at);
        if (text_is_wordlike(text, length, *at)) words[n++] = (moe_span){ text + *at, bytes };
    }
    return n;
}

/* Whether a word is as short as articles and prepositions are. */
static int is_little(moe_span word) {
    size_t i = word.length && word.data[0] >= 'A' && word.data[0] <= 'Z';
    while (i < word.length && word.data[i] >= 'a' && word.data[i] <= 'z') i++;
    return i == word.length && i <= 3;
}

/* Whether a word may stand at an end of what a pair stands around: a little one only where the aside has it, too. Else
 * it belongs to what is beside. */
static int may_end_pair(moe_span word, moe_span of_aside) { return !is_little(word) || likeness(word, of_aside) == 3; }

/* How well the words there[n] are those of an aside; 0: too few of them are, or only little ones. */
static int fit_of(const moe_span *there, size_t n, const moe_span *words, size_t n_words) {
    int fit = 0;
    size_t found = 0, little = 0, little_found = 0;
    for (size_t i = 0; i < n_words; i++) {
        int best = 0;
        for (size_t j = 0; j < n; j++) {
            const int l = likeness(words[i], there[j]);
            best = l > best ? l : best;
        }
        fit += best;
        found += best > 0;
        little += (size_t)is_little(words[i]);
        little_found += best && is_little(words[i]);
    }
    for (size_t j = 0; j < n; j++) { /* others among them */
        int best = 0;
        for (size_t i = 0; i < n_words; i++) best |= likeness(words[i], there[j]);
        if (!best) fit -= 2;
    }
    return 2 * found >= n_words && (found > little_found || little == n_words) ? fit : 0;
}

/* Where in the translation an aside stands as it is, or nearly so: the place that fits best, of several the one nearest
 * to byte `near`. *fit: what was found before; it is replaced by a better one. */
static void find_aside(const text_guard *g, const aside *a, size_t near, int *fit, size_t *from, size_t *to) {
    const text_bytes *t = &g->translation;
    moe_span words[ASIDE_WORDS + 1], there[ASIDE_WORDS + 2];
    size_t at = 0, n_there = 0;
    const size_t n = read_words(g->asides.data + a->begin, a->length, &at, words, ASIDE_WORDS + 1);
    if (!n || n > ASIDE_WORDS) return;
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

/* Places for all markup. A pair stands around what was written with a look at what it stands around in the text, and
 * around the pairs inside; pairs side by side do not overlap. */
static void place_markup(text_guard *g, const moe_hypothesis *h) {
    for (size_t i = g->n; i-- > 0;) { /* an inner pair comes before the outer one */
        kept *k = &g->kept[i];
        if (k->kind == TEXT_SPAN_LONE) place_lone(g, h, k);
        if (k->kind != TEXT_SPAN_OPEN) continue;
        const size_t end = g->kept[k->partner].at;
        if (end > k->at && is_around_all(g, k)) {
            place_around_all(g, k);
            continue;
        }
        if (!find_written(g, h, token_at(g, k->at), token_at(g, end), &k->from, &k->to)) find_word(g, h, k, end);
        const size_t near = k->from;
        int fit = 0;
        for (size_t a = 0; a < g->n_asides; a++)
            if (g->aside[a].source == k->source) find_aside(g, &g->aside[a], near, &fit, &k->from, &k->to);
        trim(&g->translation, &k->from, &k->to);
        for (size_t j = i + 1; j < k->partner; j++)
            if (g->kept[j].kind == TEXT_SPAN_OPEN)
                k->from = least(k->from, g->kept[j].from), k->to = most(k->to, g->kept[j].to);
    }
    for (size_t i = 0; i < g->n; i++) { /* an outer pair comes before the inner ones */
        kept *k = &g->kept[i];
        if (k->kind != TEXT_SPAN_OPEN && k->kind != TEXT_SPAN_LONE) continue;
        for (size_t j = 0; j < i; j++) {
            const kept *o = &g->kept[j];
            if (o->kind != TEXT_SPAN_OPEN) continue;
            if (o->partner > i) { /* inside it */
                k->from = least(most(k->from, o->from), o->to);
                k->to = least(most(k->to, o->from), o->to);
            } else if (k->from < o->to && k->to > o->from) { /* beside it */
                if (k->kind == TEXT_SPAN_OPEN && k->from < o->from) k->to = o->from;
                else k->from = o->to, k->to = most(k->to, o->to);
            }
        }
        if (k->kind == TEXT_SPAN_OPEN) g->kept[k->partner].from = g->kept[k->partner].to = k->to;
    }
}

/* ==== 5. Restoring ====================================================================================== */

static moe_status add_edit(text_guard *g, size_t at, size_t length, size_t what, size_t order, moe_error *error) {
    edit *larger = text_grown(g->edits, &g->edit_capacity, g->n_edits + 1, sizeof *larger);
    if (!larger) return text_out_of_memory(error);
    g->edits = larger;
    size_t i = g->n_edits++;
    const edit e = { at, length, what, order };
    for (; i > 0 && (e.at < larger[i - 1].at || (e.at == larger[i - 1].at && e.order < larger[i - 1].order)); i--)
        larger[i] = larger[i - 1];
    larger[i] = e;
    return MOE_OK;
}

/* The next place from `at` on where the translation has these bytes, with no letter or digit at either side; its
 * length: nowhere. */
static size_t find_bytes(const text_bytes *t, const char *bytes, size_t length, size_t at) {
    for (; at + length <= t->length; at++)
        if (memcmp(t->data + at, bytes, length) == 0 &&
            !(at && text_is_wordlike(t->data, t->length, at - 1) && text_is_wordlike(bytes, length, 0)) &&
            !(at + length < t->length && t->data[at + length] >= '0' && t->data[at + length] <= '9'))
            return at;
    return t->length;
}

/* Whether the white space before a stand-in at t->data[at] was none in the text: a bracket or quote stands there. */
static int is_glued(const text_guard *g, const kept *k, size_t at) {
    static const char *const opening[] = { "\xE2\x80\x9E", "\xE2\x80\x9C", "\xE2\x80\x98", "\"", "'", "(", "[",
                                           "\xC2\xBF",     "\xC2\xA1" };
    const text_bytes *t = &g->translation;
    if (at < 2 || t->data[at - 1] != ' ' || k->before || !k->source) return 0;
    if (t->data[at - 2] == g->text.data[k->source - 1]) return 1;
    for (size_t i = 0; i < sizeof opening / sizeof *opening; i++) {
        const size_t length = strlen(opening[i]);
        if (length < at && memcmp(t->data + at - 1 - length, opening[i], length) == 0) return 1;
    }
    return 0;
}

/* The stand-in of what is kept: its first place gets the original, others nothing. */
static moe_status restore_word(text_guard *g, size_t i, const moe_hypothesis *h, moe_error *error) {
    const text_bytes *t = &g->translation;
    kept *k = &g->kept[i];
    const char *name = g->shown.data + k->at;
    moe_status status = MOE_OK;
    size_t at = find_bytes(t, name, k->shown, 0);
    if (at == t->length) { /* it is not there: it stands alone, like markup */
        at = find_place(g, h, k->at, 0);
        return add_edit(g, at, 0, i, g->n + i, error);
    }
    for (size_t what = i; at < t->length && !status; at = find_bytes(t, name, k->shown, at + k->shown)) {
        const size_t space = what == SIZE_MAX ? at && t->data[at - 1] == ' ' : (size_t)is_glued(g, k, at);
        status = add_edit(g, at - space, k->shown + space, what, g->n + i, error);
        what = SIZE_MAX;
    }
    return status;
}

/* How many terms with the target of number i there are up to it; in all for one with an ending, which may stand for
 * others. */
static size_t terms_alike(const text_guard *g, size_t i) {
    const kept *k = &g->kept[i];
    size_t n = 0;
    for (size_t j = 0; j < (k->inflected ? g->n : i + 1); j++)
        n += g->kept[j].term && (k->inflected || !g->kept[j].inflected) &&
             strcmp(g->kept[j].term->target, k->term->target) == 0;
    return n;
}

/* Whether a sentence of the translation begins at this byte. */
static int begins_sentence(const text_bytes *t, size_t at) {
    while (at && !text_is_wordlike(t->data, t->length, character_begin(t, at - 1))) {
        at = character_begin(t, at - 1);
        if (strchr(".!?", t->data[at])) return 1;
    }
    return !at;
}

/* Whether the rest of a word behind a term may stand there: none, or an ending. */
static int may_end(const text_bytes *t, const kept *k, size_t at, size_t end) {
    return at == end || (k->inflected && text_term_ends(k->term, t->data + at, end - at));
}

/* Whether the target of a term stands at this byte of the translation as a word of its own, which may have the capital
 * first letter of a sentence. */
static int stands_at(const text_bytes *t, size_t at, const kept *k) {
    const char *target = k->term->target;
    const size_t length = strlen(target);
    char first[4];
    const size_t bytes = character_bytes(target, length, 0), last = text_utf8_cut(target, length, length - 1);
    memcpy(first, target, bytes);
    text_upper_case(first, bytes);
    if (at + length > t->length || memcmp(t->data + at + bytes, target + bytes, length - bytes) != 0 ||
        (memcmp(t->data + at, target, bytes) != 0 &&
         (memcmp(t->data + at, first, bytes) != 0 || !begins_sentence(t, at))))
        return 0;
    return !(text_is_wordlike(target, length, 0) && word_begin(t, at) < at) &&
           !(text_is_wordlike(target, length, last) &&
             !may_end(t, k, at + length, most(at + length, word_end(t, at + last))));
}

/* How often it stands in the translation. */
static size_t count_standing(const text_bytes *t, const kept *k) {
    const size_t length = strlen(k->term->target);
    size_t n = 0;
    for (size_t at = 0; at + length <= t->length; at++)
        if (stands_at(t, at, k)) n++, at += length - 1;
    return n;
}

/* Whether a term that begins a sentence gets a capital letter: none that stays, or has capitals of its own. */
static int can_rise(const text_term *term) {
    for (const char *c = term->target; *c; c++)
        if (*c >= 'A' && *c <= 'Z') return 0;
    return !term->stays;
}

/* The capital letter of a term that begins the translation, where the text begins with one. */
static void raise_first(text_guard *g, const kept *k) {
    text_bytes *t = &g->translation;
    const size_t at = next_word(t, 0, t->length), from = next_word(&g->shown, 0, g->shown.length);
    char small[4];
    if (from == g->shown.length || !can_rise(k->term) || !stands_at(t, at, k)) return;
    const size_t bytes = character_bytes(g->shown.data, g->shown.length, from);
    memcpy(small, g->shown.data + from, bytes);
    text_lower_first(small, bytes);
    if (memcmp(small, g->shown.data + from, bytes) == 0) return;
    text_upper_case(t->data + at, character_bytes(t->data, t->length, at));
}

/* The search wrote a term's tokens. Where they became a part of a longer word, the term takes its place. */
static moe_status restore_term(text_guard *g, size_t i, moe_error *error) {
    const text_bytes *t = &g->translation;
    const char *target = g->kept[i].term->target;
    const size_t length = strlen(target);
    size_t wanted = terms_alike(g, i), inside = t->length, begin, end;
    if (g->shouted) return MOE_OK;
    for (size_t at = 0; at + length <= t->length && wanted; at++) {
        if (memcmp(t->data + at, target, length) != 0) continue;
        begin = text_is_wordlike(target, length, 0) ? word_begin(t, at) : at;
        end = text_is_wordlike(target, length, text_utf8_cut(target, length, length - 1))
                  ? word_end(t, text_utf8_cut(t->data, t->length, at + length - 1))
                  : at + length;
        int free = 1;
        for (size_t e = 0; e < g->n_edits; e++)
            free &= g->edits[e].at + g->edits[e].length <= begin || g->edits[e].at >= end;
        if (begin == at && end == at + length) wanted--;
        else if (free && inside == t->length) inside = at;
    }
    if (!wanted || inside == t->length) return MOE_OK;
    begin = word_begin(t, inside);
    end = word_end(t, text_utf8_cut(t->data, t->length, inside + length - 1));
    return add_edit(g, begin, most(end, inside + length) - begin, i, g->n + i, error);
}

/* Whether the translation has these bytes as often as the shown text has kept numbers like it, up to number i. */
static int has_number(const text_guard *g, size_t i) {
    const kept *k = &g->kept[i];
    const char *bytes = g->shown.data + k->at;
    size_t wanted = 0;
    for (size_t j = 0; j <= i; j++)
        wanted += g->kept[j].kind == TEXT_SPAN_NUMBER && g->kept[j].shown == k->shown &&
                  memcmp(g->shown.data + g->kept[j].at, bytes, k->shown) == 0;
    for (size_t at = 0; wanted; wanted--, at += k->shown)
        if ((at = find_bytes(&g->translation, bytes, k->shown, at)) == g->translation.length) return 0;
    return 1;
}

/* A number that is not there takes the place of what the model wrote for it, where that has a digit, or else of
 * nothing. */
static moe_status restore_number(text_guard *g, size_t i, const moe_hypothesis *h, moe_error *error) {
    const text_bytes *t = &g->translation;
    kept *k = &g->kept[i];
    size_t from, to;
    if (has_number(g, i)) return MOE_OK;
    if (k->n && find_written(g, h, k->first, k->first + k->n, &from, &to)) {
        int digits = 0, free = 1;
        for (size_t at = from; at < to; at++) digits |= t->data[at] >= '0' && t->data[at] <= '9';
        for (size_t e = 0; e < g->n_edits; e++)
            free &= g->edits[e].at + g->edits[e].length <= from || g->edits[e].at >= to;
        for (size_t at = from; at < to; at++) free &= !is_space(t->data[at]);
        if (digits && free) return add_edit(g, from, to - from, i, g->n + i, error);
        return add_edit(g, from, 0, i, g->n + i, error);
    }
    return add_edit(g, find_place(g, h, k->at, 0), 0, i, g->n + i, error);
}

/* Markup in the middle of a number or stand-in moves behind it: all of it, so that its order stays. */
static void leave_whole(text_guard *g) {
    const text_bytes *t = &g->translation;
    for (size_t i = 0; i < g->n; i++) {
        const kept *k = &g->kept[i];
        const char *bytes = g->shown.data + k->at;
        if (k->kind != TEXT_SPAN_NUMBER && k->kind != TEXT_SPAN_WORD) continue;
        for (size_t at = 0; (at = find_bytes(t, bytes, k->shown, at)) < t->length; at += k->shown)
            for (size_t j = 0; j < g->n; j++) {
                kept *m = &g->kept[j];
                if (m->kind != TEXT_SPAN_OPEN && m->kind != TEXT_SPAN_CLOSE && m->kind != TEXT_SPAN_LONE) continue;
                if (m->from > at && m->from < at + k->shown) m->from = at + k->shown;
                if (m->to > at && m->to < at + k->shown) m->to = at + k->shown;
            }
    }
}

static moe_status find_edits(text_guard *g, const moe_hypothesis *h, moe_error *error) {
    moe_status status = MOE_OK;
    g->n_edits = 0;
    place_markup(g, h);
    leave_whole(g);
    for (size_t i = 0; i < g->n && !status; i++)
        if (g->kept[i].kind == TEXT_SPAN_WORD) status = restore_word(g, i, h, error);
    for (size_t i = 0; i < g->n && !status; i++) {
        const kept *k = &g->kept[i];
        if (k->term && k->kind != TEXT_SPAN_WORD && g->terms != TEXT_TERMS_FREE) {
            status = restore_term(g, i, error);
            raise_first(g, k);
        } else if (k->kind == TEXT_SPAN_NUMBER) status = restore_number(g, i, h, error);
        else if (k->kind == TEXT_SPAN_OPEN || k->kind == TEXT_SPAN_CLOSE || k->kind == TEXT_SPAN_LONE)
            status = add_edit(g, k->from, 0, i, i, error);
    }
    return status;
}

/* Append the target of a term; `begins`: a sentence, where a term without capital letters gets one. */
static void put_term(const text_term *term, int begins, text_bytes *out) {
    const size_t begin = out->length;
    text_append_string(out, term->target);
    if (out->failed || !begins || !can_rise(term)) return;
    text_upper_case(out->data + begin, character_bytes(out->data, out->length, begin));
}

/* Append what is kept. It has the white space around it that it had in the text. Returns whether a space that follows
 * in the translation belongs to nothing: what is kept joins two words. */
static int put_kept(const text_guard *g, const edit *e, size_t begin, text_bytes *out) {
    const kept *k = &g->kept[e->what];
    const text_bytes *t = &g->translation;
    const int beside = k->kind == TEXT_SPAN_LONE || (!e->length && k->shown);
    const int word = k->kind == TEXT_SPAN_WORD || k->kind == TEXT_SPAN_NUMBER;
    const int spaced = out->length == begin || is_space(out->data[out->length - 1]);
    const size_t next = e->at + e->length;
    const size_t end = k->source + k->length;
    const int joins = !k->before && !k->after && text_is_wordlike(g->text.data, g->text.length, end) &&
                      (k->kind == TEXT_SPAN_LONE || word);
    if (!spaced &&
        ((beside && k->before) ||
         (word && text_is_wordlike(out->data, out->length, character_begin(out, out->length - 1)) &&
          (k->before || !text_is_wordlike(g->text.data, g->text.length, character_begin(&g->text, k->source - 1))))))
        text_append(out, " ", 1);
    if (k->term) put_term(k->term, begins_sentence(t, e->at), out);
    else text_append(out, g->text.data + k->source, k->length);
    if (next >= t->length || is_space(t->data[next])) return joins;
    const int wordlike = text_is_wordlike(t->data, t->length, next);
    if ((beside && k->after && (!e->at || wordlike)) ||
        (word && wordlike && !text_is_wordlike(g->text.data, g->text.length, end)))
        text_append(out, " ", 1);
    return 0;
}

/* Append a part of the translation, in which a space does not follow a space. */
static void put_text(const char *text, size_t length, size_t begin, text_bytes *out) {
    for (size_t i = 0; i < length; i++)
        if (text[i] != ' ' || out->length == begin || out->data[out->length - 1] != ' ') text_append(out, text + i, 1);
}

static void apply_edits(const text_guard *g, text_bytes *out) {
    const text_bytes *t = &g->translation;
    const size_t begin = out->length;
    size_t at = 0;
    for (size_t i = 0; i < g->n_edits; i++) {
        const edit *e = &g->edits[i];
        if (e->at > at) put_text(t->data + at, e->at - at, begin, out), at = e->at;
        const int joins = e->what != SIZE_MAX && put_kept(g, e, begin, out);
        at = most(at, e->at + e->length);
        if (joins && at < t->length && t->data[at] == ' ') at++;
    }
    if (at < t->length) put_text(t->data + at, t->length - at, begin, out);
}

/* How often U+FFFD stands in a text: what a model spelt in bytes that are no character. */
static size_t count_broken(const text_bytes *t) {
    size_t n = 0;
    for (size_t i = 0; i + 3 <= t->length; i++) n += memcmp(t->data + i, "\xEF\xBF\xBD", 3) == 0;
    return n;
}

/* How often a part of a stand-in stands in a text: X, X 1, x2, XC, or a bracket of [1] and a number. */
static size_t count_parts(const text_guard *g, const text_bytes *t) {
    size_t n = 0;
    for (size_t i = 0; i < t->length; i++) {
        const char c = t->data[i];
        if (g->attempt && c >= '0' && c <= '9' && !(i && t->data[i - 1] >= '0' && t->data[i - 1] <= '9')) n++;
        if (g->attempt && (c == '[' || c == ']')) n++;
        if ((c != 'X' && c != 'x') || (i && text_is_wordlike(t->data, t->length, character_begin(t, i - 1)))) continue;
        size_t end = i + 1;
        while (end < t->length && t->data[end] >= '0' && t->data[end] <= '9') end++;
        const int other = !g->attempt && end < t->length && t->data[end] >= 'A' && t->data[end] <= 'Z'; /* XC for X4 */
        n += (size_t)(end > i + 1 || end == t->length || (c == 'X' && other) ||
                      !text_is_wordlike(t->data, t->length, end));
    }
    return n;
}

static size_t count_words(const char *text, size_t length) {
    size_t n = 0;
    for (size_t at = 0; at < length; at += text_word_length(text, length, at))
        n += (size_t)text_is_wordlike(text, length, at);
    return n;
}

/* How often a word stands in a translation. */
static size_t count_word(const text_bytes *t, const char *word, size_t length) {
    size_t n = 0;
    for (size_t at = 0, bytes; at < t->length; at += bytes) {
        bytes = text_word_length(t->data, t->length, at);
        n += (size_t)(bytes == length && memcmp(t->data + at, word, length) == 0);
    }
    return n;
}

/* Note the words of the FREE translation that the model wrote while it looked at a term that is missing. */
static void note_old(text_guard *g, const kept *k, const moe_hypothesis *h) {
    const text_bytes *t = &g->translation;
    for (size_t j = 0; h->sources && j < g->n_places; j++) {
        size_t at, end, bytes;
        if (h->sources[j] < (int32_t)k->first || h->sources[j] >= (int32_t)(k->first + k->n)) continue;
        if (!token_bytes(g, j, &at, &end)) continue;
        for (at = next_word(t, at, end); at < end; at = next_word(t, at + bytes, end)) {
            bytes = text_word_length(t->data, t->length, at);
            text_append(&g->old, t->data + at, bytes);
            text_append(&g->old, "", 1);
        }
    }
}

/* What part of those words a translation still has; `unknown`: there are none. */
static float part_left(const text_guard *g, float unknown) {
    size_t n = 0, left = 0;
    for (size_t at = 0; at < g->old.length; n++) {
        const char *word = g->old.data + at;
        const size_t length = strlen(word);
        left += count_word(&g->translation, word, length) >= count_word(&g->free, word, length);
        at += length + 1;
    }
    return n ? (float)left / (float)n : unknown;
}

/* Whether bytes of the translation belong to a term, or to its stand-in. */
static int is_of_term(const text_guard *g, size_t begin, size_t end) {
    const text_bytes *t = &g->translation;
    for (size_t i = 0; i < g->n; i++) {
        const kept *k = &g->kept[i];
        if (!k->term) continue;
        const int named = k->kind == TEXT_SPAN_WORD;
        const size_t length = named ? k->shown : strlen(k->term->target);
        for (size_t at = begin > length ? begin - length + 1 : 0; at < end && at + length <= t->length; at++)
            if (at + length > begin &&
                (named ? memcmp(t->data + at, g->shown.data + k->at, length) == 0 : stands_at(t, at, k)))
                return 1;
    }
    return 0;
}

/* How improbable the translation is to the model, by token, but for its terms, which it did not choose. */
static float cost_of(const text_guard *g, const moe_hypothesis *h) {
    const text_bytes *t = &g->translation;
    float sum = 0.0f;
    size_t n = 0;
    for (size_t j = 0; j < h->n_ids + (size_t)(h->finished != 0); j++) {
        size_t begin = j < g->n_places ? g->places[j] : t->length;
        const size_t end = j + 1 < g->n_places ? g->places[j + 1] : t->length;
        while (begin < end && is_space(t->data[begin])) begin++;
        if (begin < end && is_of_term(g, begin, end)) continue;
        sum -= h->token_logprobs[j];
        n++;
    }
    return n ? sum / (float)n : 0.0f;
}

/* Whether a hyphen at this byte joins what is before it to a word. */
static int joins(const text_bytes *t, size_t at) {
    return at < t->length && t->data[at] == '-' && text_is_wordlike(t->data, t->length, at + 1);
}

/* Whether each stand-in of a term is a word of its own, and no part of one with a hyphen where the text has none. */
static int names_stand(const text_guard *g) {
    const text_bytes *t = &g->translation;
    for (size_t i = 0; i < g->n; i++) {
        const kept *k = &g->kept[i];
        if (!k->term || k->kind != TEXT_SPAN_WORD) continue;
        const size_t end = find_bytes(t, g->shown.data + k->at, k->shown, 0) + k->shown;
        if (end > t->length || text_is_wordlike(t->data, t->length, end)) return 0;
        if (joins(t, end) && !joins(&g->shown, k->at + k->shown)) return 0;
    }
    return 1;
}

/* Terms that do not stand in the translation, with their words in *words; `h` not NULL: note what stands for them. */
static size_t missing_terms(text_guard *g, const moe_hypothesis *h, size_t *words) {
    size_t missing = 0;
    *words = 0;
    for (size_t i = 0; i < g->n; i++) {
        const kept *k = &g->kept[i];
        if (!k->term || k->kind == TEXT_SPAN_WORD || count_standing(&g->translation, k) >= terms_alike(g, i)) continue;
        missing++;
        *words += count_words(k->term->target, strlen(k->term->target));
        if (h) note_old(g, k, h);
    }
    return missing;
}

int text_guard_lacks_term(text_guard *g) {
    size_t words;
    return !g->verbatim && missing_terms(g, NULL, &words) > 0;
}

/* Whether a word of the FREE translation may have stayed beside a term of this BOUND one. What that costs was found
 * with the 200 terms of tests/bench/glossary_terms.py. */
static int is_doubtful(text_guard *g, const moe_hypothesis *h) {
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
        text_append(&g->free, t->data, t->length);
        if (missing_terms(g, h, &words)) *next = TEXT_TERMS_BOUND;
        g->enough = count_words(t->data, t->length) + words;
    } else if (g->terms == TEXT_TERMS_BOUND) {
        if (is_doubtful(g, h)) *next = TEXT_TERMS_REPLACED;
    } else if (g->terms == TEXT_TERMS_REPLACED) {
        if (!sound || !names_stand(g) || cost_of(g, h) >= g->cost) *next = TEXT_TERMS_REBOUND;
    }
    return g->old.failed || g->free.failed ? text_out_of_memory(error) : MOE_OK;
}

int text_guard_is_intact(const text_guard *g) {
    const text_bytes *t = &g->translation;
    size_t words = 0;
    if (!text_guard_used(g) || g->verbatim) return 1;
    if (count_broken(t) > count_broken(&g->shown)) return 0;
    for (size_t i = 0; i < g->n; i++) {
        const kept *k = &g->kept[i];
        if (k->kind != TEXT_SPAN_WORD) continue;
        const char *name = g->shown.data + k->at;
        const size_t at = find_bytes(t, name, k->shown, 0);
        if (at == t->length || find_bytes(t, name, k->shown, at + k->shown) < t->length) return 0;
        words++;
    }
    return !words || count_parts(g, t) <= count_parts(g, &g->shown);
}

/* A text without language comes back as it is, but for its terms. */
static void put_verbatim(const text_guard *g, text_bytes *out) {
    size_t at = 0;
    for (size_t i = 0; i < g->n; i++) {
        const kept *k = &g->kept[i];
        if (!k->term) continue;
        text_append(out, g->text.data + at, k->source - at);
        put_term(k->term, 0, out);
        at = k->source + k->length;
    }
    text_append(out, g->text.data + at, g->text.length - at);
}

moe_status text_guard_restore(const text_rules *r, text_guard *g, const moe_hypothesis *h, text_variant manner,
                              int shout, text_bytes *out, moe_error *error) {
    const text_front *f = r->front;
    char why[128];
    moe_status status = MOE_OK;
    text_append(out, g->before.data, g->before.length);
    if (g->verbatim) {
        put_verbatim(g, out);
    } else {
        text_bytes *t = &g->translation;
        int failed;
        text_clear(t);
        status = text_decode(f, h->ids, h->n_ids, t, error);
        if (status) return status;
        text_append(t, "", 0);
        const size_t lost = text_undo_variant(manner, t, 0);
        g->n_places = 0;
        failed = text_decode_begins(f, h->ids, h->n_ids, &g->places, &g->place_capacity, &g->n_places, why, sizeof why);
        if (failed == SPM_NO_MEMORY) return text_out_of_memory(error);
        if (g->n_places != h->n_ids) g->n_places = 0;
        for (size_t j = 0; j < g->n_places; j++)
            g->places[j] = (uint32_t)least(g->places[j] - least(g->places[j], lost), t->length);
        g->shouted = shout;
        if (shout) text_upper_case(t->data, t->length);
        status = find_edits(g, h, error);
        if (!status) apply_edits(g, out);
    }
    text_append(out, g->after.data, g->after.length);
    return status || !out->failed ? status : text_out_of_memory(error);
}
