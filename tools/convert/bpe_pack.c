/* bpe_pack.c - see bpe_pack.h */
#include "tools/convert/bpe_pack.h"
#include "tools/text/bpe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VERSION = 1, SPECIAL = 1, NORMALISED = 2, IN_TEXT = 4, SHORT = 48 };

static const struct {
    const char *name, *text;
} expression_rows[] = {
#define EXPRESSION(name, text) { name, text },
#include "tools/convert/decoder.inc"
};
enum { EXPRESSIONS = sizeof expression_rows / sizeof *expression_rows };

const char *pack_expression(const char *name, size_t length) {
    for (size_t i = 0; i < EXPRESSIONS; i++)
        if (text_is(name, length, expression_rows[i].name)) return expression_rows[i].text;
    return NULL;
}

const char *pack_expression_like(const char *text) {
    for (size_t i = 0; i < EXPRESSIONS; i++)
        if (strcmp(text, expression_rows[i].text) == 0) return expression_rows[i].text;
    return NULL;
}

typedef struct packing {
    making *m;
    const pack_parts *parts;
    text_bytes *out;
    text_index tokens, pairs;
    uint32_t (*ids)[3]; /* [n_merges] of left, right and both; the last duplicate of a pair is kept */
    unsigned char *dropped;
    size_t n_kept;
} packing;

static int refuse(packing *p, const char *what, moe_span text, const char *problem) {
    text_bytes word = { 0 };
    text_append_clean(&word, text.data, text.length < SHORT ? text.length : SHORT);
    making_refuse(p->m, p->parts->file, "%s %s: %s", what, word.failed || !word.data ? "" : word.data, problem);
    text_bytes_free(&word);
    return 0;
}

static void put_u32(text_bytes *out, uint32_t v) {
    const char bytes[4] = { (char)v, (char)(v >> 8), (char)(v >> 16), (char)(v >> 24) };
    text_append(out, bytes, 4);
}

/* Append a text after its length in two bytes. */
static int put_text(packing *p, const char *what, moe_span text, size_t longest) {
    const char length[2] = { (char)text.length, (char)(text.length >> 8) };
    if (!text.length || text.length > longest || !text_is_usable(text.data, text.length))
        return refuse(p, what, text, "must be UTF-8 without NUL, of limited length");
    text_append(p->out, length, 2);
    text_append(p->out, text.data, text.length);
    return 1;
}

/* Append an expression. Oniguruma's \s differs from that of PCRE2, which also matches U+180E. */
static int put_expression(packing *p, const char *text) {
    static const char space[] = "\\t-\\r\\x{85}\\p{Z}";
    text_bytes e = { 0 };
    int inside = 0;
    for (; *text; text++) {
        if (*text == '\\' && (text[1] == 's' || (text[1] == 'S' && !inside))) {
            text_append_string(&e, inside ? "" : text[1] == 's' ? "[" : "[^");
            text_append_string(&e, space);
            text_append_string(&e, inside ? "" : "]");
            text++;
        } else if (*text == '\\' && text[1]) {
            text_append(&e, text++, 2);
        } else {
            inside = *text == '[' ? 1 : *text == ']' ? 0 : inside;
            text_append(&e, text, 1);
        }
    }
    const int done = e.failed ? making_no_memory(p->m)
                              : put_text(p, "expression", (moe_span){ e.data, e.length }, BPE_MAX_EXPRESSION);
    text_bytes_free(&e);
    return done;
}

static int same(moe_span a, moe_span b) { return a.length == b.length && memcmp(a.data, b.data, a.length) == 0; }

/* Return the id of a token, or -1. */
static int64_t id_of(const packing *p, moe_span text) {
    size_t at = 0;
    for (uint32_t i, hash = text_hash(text.data, text.length);
         (i = text_index_next(&p->tokens, hash, &at)) != TEXT_NONE;)
        if (same(p->parts->tokens[i], text)) return i;
    return -1;
}

static int index_tokens(packing *p) {
    const pack_parts *parts = p->parts;
    for (size_t i = 0; i < parts->n_tokens; i++) {
        const moe_span t = parts->tokens[i];
        if (!t.data) continue;
        if (id_of(p, t) >= 0) return refuse(p, "the tokeniser's token", t, "has two ids");
        if (!text_index_add(&p->tokens, text_hash(t.data, t.length), i)) return making_no_memory(p->m);
    }
    return 1;
}

/* Check that a tokeniser of characters has tokens for all bytes and for a space. */
static int check_characters(packing *p) {
    char text[8];
    for (unsigned byte = 0; byte < 256; byte++) {
        snprintf(text, sizeof text, "<0x%02X>", byte);
        if (id_of(p, (moe_span){ text, 6 }) < 0)
            return making_refuse(p->m, p->parts->file, "the tokeniser has no token for the byte %02x", byte);
    }
    return id_of(p, (moe_span){ "\xE2\x96\x81", 3 }) >= 0 ||
           making_refuse(p->m, p->parts->file, "the tokeniser has no token for a space, U+2581");
}

/* Check that all bytes have tokens, except those that are rare in texts: control characters, C0, C1, F1 to FF. */
static int check_bytes(packing *p) {
    uint32_t next = 0x100;
    if (p->parts->flags & BPE_CHARACTERS) return check_characters(p);
    for (uint32_t byte = 0; byte < 256; byte++) {
        const int printable = (byte >= 0x21 && byte < 0x7f) || (byte >= 0xa1 && byte != 0xad);
        const uint32_t c = printable ? byte : next++;
        const int rare = byte < 0x20 || byte == 0x7f || byte == 0xc0 || byte == 0xc1 || byte >= 0xf1;
        const char text[2] = { (char)(c < 0x80 ? c : 0xc0 | c >> 6), (char)(0x80 | (c & 63)) };
        if (!rare && id_of(p, (moe_span){ text, c < 0x80 ? 1 : 2 }) < 0)
            return making_refuse(p->m, p->parts->file, "the tokeniser has no token for the byte %02x", (unsigned)byte);
    }
    return 1;
}

/* Return 1 if a text is a special token of a tokeniser of characters: texts and merges must not yield these. */
static int is_special(const packing *p, moe_span text) {
    for (size_t i = 0; p->parts->flags & BPE_CHARACTERS && i < p->parts->n_added; i++)
        if (p->parts->added[i].special && same(p->parts->added[i].content, text)) return 1;
    return 0;
}

/* Look up the ids of merge `i`. */
static int read_merge(packing *p, size_t i, text_bytes *both) {
    const pack_merge *merge = &p->parts->merges[i];
    text_clear(both);
    text_append(both, merge->left.data, merge->left.length);
    text_append(both, merge->right.data, merge->right.length);
    if (both->failed) return making_no_memory(p->m);
    const moe_span texts[3] = { merge->left, merge->right, { both->data, both->length } };
    for (int k = 0; k < 3; k++) {
        const int64_t id = texts[k].length ? id_of(p, texts[k]) : -1;
        if (id < 0 && is_special(p, texts[k])) return p->dropped[i] = 1;
        if (id < 0) return refuse(p, "a merge of the tokeniser uses", texts[k], "not a token");
        p->ids[i][k] = (uint32_t)id;
    }
    const uint32_t hash = text_hash((const char *)p->ids[i], 8);
    size_t at = 0;
    for (uint32_t k; (k = text_index_next(&p->pairs, hash, &at)) != TEXT_NONE;)
        if (memcmp(p->ids[k], p->ids[i], 8) == 0 && !p->dropped[k]) p->dropped[k] = 1, p->n_kept--;
    p->n_kept++;
    return text_index_add(&p->pairs, hash, i) || making_no_memory(p->m);
}

static int read_merges(packing *p) {
    text_bytes both = { 0 };
    const size_t n = p->parts->n_merges;
    int good = 1;
    p->ids = malloc((n + 1) * sizeof *p->ids);
    p->dropped = calloc(n + 1, 1);
    if (!p->ids || !p->dropped) return making_no_memory(p->m);
    for (size_t i = 0; i < n && good; i++) good = read_merge(p, i, &both);
    text_bytes_free(&both);
    return good;
}

static int put_added(packing *p, size_t i) {
    const pack_parts *parts = p->parts;
    const pack_added *a = &parts->added[i];
    if (a->id < 0 || a->id >= PACK_MAX_TOKENS) return refuse(p, "added token", a->content, "invalid id");
    for (size_t k = 0; k < i; k++)
        if (parts->added[k].id == a->id || same(parts->added[k].content, a->content))
            return refuse(p, "added token", a->content, "duplicate");
    const moe_span *held = (size_t)a->id < parts->n_tokens ? &parts->tokens[a->id] : NULL;
    const int64_t id = a->content.length ? id_of(p, a->content) : -1;
    if ((held && held->data && !same(*held, a->content)) || (id >= 0 && id != a->id))
        return refuse(p, "added token", a->content, "its id contradicts the vocabulary");
    put_u32(p->out, (uint32_t)a->id);
    put_u32(p->out, (a->special ? SPECIAL : 0) | (a->normalised ? NORMALISED : 0) | (a->in_text ? IN_TEXT : 0));
    return put_text(p, "added token", a->content, BPE_MAX_PIECE);
}

static int put_all(packing *p) {
    const pack_parts *parts = p->parts;
    text_append(p->out, "MOE-BPE", 8);
    const uint32_t head[] = { VERSION,
                              parts->flags,
                              (uint32_t)parts->n_expressions,
                              (uint32_t)parts->n_tokens,
                              (uint32_t)p->n_kept,
                              (uint32_t)parts->n_added };
    for (size_t i = 0; i < sizeof head / sizeof *head; i++) put_u32(p->out, head[i]);
    for (size_t i = 0; i < parts->n_expressions; i++)
        if (!put_expression(p, parts->expressions[i])) return 0;
    for (size_t i = 0; i < parts->n_tokens; i++) {
        if (!parts->tokens[i].data) text_append(p->out, "\0", 2);
        else if (!put_text(p, "token", parts->tokens[i], BPE_MAX_PIECE)) return 0;
    }
    for (size_t i = 0; i < parts->n_merges; i++)
        for (int k = 0; k < 3 && !p->dropped[i]; k++) put_u32(p->out, p->ids[i][k]);
    for (size_t i = 0; i < parts->n_added; i++)
        if (!put_added(p, i)) return 0;
    if (p->out->failed) return making_no_memory(p->m);
    return p->out->length <= BPE_MAX_MODEL ||
           making_refuse(p->m, parts->file, "the tokeniser takes %zu bytes; the limit is %d", p->out->length,
                         BPE_MAX_MODEL);
}

/* A merge that was derived, with what orders merges. */
typedef struct derived {
    float score;
    size_t left_characters, characters;
    uint32_t left, right, both;
} derived;

static int by_score(const void *a, const void *b) {
    const derived *x = a, *y = b;
    if (x->score > y->score || x->score < y->score) return x->score > y->score ? -1 : 1;
    if (x->left_characters != y->left_characters) return x->left_characters > y->left_characters ? -1 : 1;
    if (x->characters != y->characters) return x->characters > y->characters ? -1 : 1;
    if (x->both != y->both) return x->both < y->both ? -1 : 1;
    return x->left < y->left ? -1 : x->left > y->left;
}

/* Add the merges that make token `i`. */
static int derive(packing *p, uint32_t i, float score, derived **out, size_t *n, size_t *capacity) {
    const moe_span t = p->parts->tokens[i];
    const size_t all = text_utf8_count(t.data, t.length);
    size_t before = 1;
    for (size_t at = text_utf8_next(t.data, t.length, 0); at < t.length; before++) {
        const int64_t left = id_of(p, (moe_span){ t.data, at }),
                      right = id_of(p, (moe_span){ t.data + at, t.length - at });
        const derived found = { score, before, all, (uint32_t)left, (uint32_t)right, i };
        if (left >= 0 && right >= 0 && *n == PACK_MAX_TOKENS)
            return making_refuse(p->m, p->parts->file, "the tokeniser has more than %d merges", PACK_MAX_TOKENS);
        if (left >= 0 && right >= 0 &&
            !making_failed(p->m, text_add(out, n, capacity, &found, 1, sizeof found, p->m->error)))
            return 0;
        at = text_utf8_next(t.data, t.length, at);
    }
    return 1;
}

int pack_derive_merges(making *m, pack_parts *parts, const float *scores) {
    packing p = { .m = m, .parts = parts };
    derived *all = NULL;
    size_t n = 0, capacity = 0;
    int good = m->status == MOE_OK && index_tokens(&p);
    for (size_t i = 0; i < parts->n_tokens && good; i++) {
        const moe_span t = parts->tokens[i];
        if (!t.data || !t.length || t.length > BPE_MAX_PIECE) continue;
        good = text_is_usable(t.data, t.length) ? derive(&p, (uint32_t)i, scores[i], &all, &n, &capacity)
                                                : refuse(&p, "the tokeniser's token", t, "is not valid UTF-8");
    }
    pack_merge *merges = good ? making_keep(m, NULL, (n + 1) * sizeof *merges) : NULL;
    if (merges && n) qsort(all, n, sizeof *all, by_score);
    for (size_t i = 0; i < n && merges; i++)
        merges[i] = (pack_merge){ parts->tokens[all[i].left], parts->tokens[all[i].right] };
    parts->merges = merges;
    parts->n_merges = merges ? n : 0;
    text_index_free(&p.tokens);
    free(all);
    return merges != NULL;
}

int pack_tokeniser(making *m, const pack_parts *parts, text_bytes *blob) {
    packing p = { .m = m, .parts = parts, .out = blob };
    if (m->status) return 0;
    if (parts->n_added > PACK_MAX_ADDED || !parts->n_tokens || parts->n_tokens > PACK_MAX_TOKENS ||
        parts->n_merges > PACK_MAX_TOKENS)
        return making_refuse(m, parts->file, "the tokeniser has no tokens, or too many tokens, merges or added tokens");
    const int good = index_tokens(&p) && check_bytes(&p) && read_merges(&p) && put_all(&p);
    text_index_free(&p.tokens);
    text_index_free(&p.pairs);
    free(p.ids);
    free(p.dropped);
    return good;
}

const pack_added *pack_added_at(const pack_parts *parts, const char *text) {
    const size_t length = strlen(text);
    const pack_added *found = NULL;
    for (size_t i = 0; i < parts->n_added; i++) {
        const moe_span c = parts->added[i].content;
        if (c.length <= length && memcmp(c.data, text, c.length) == 0 && (!found || c.length > found->content.length))
            found = &parts->added[i];
    }
    return found;
}
