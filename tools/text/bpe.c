/* bpe.c - see bpe.h. */
#define PCRE2_CODE_UNIT_WIDTH 8

#include "tools/text/bpe.h"

#include <errno.h>
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { ALL_BITS = 127, ONLY_CHARACTERS = BPE_PREFIX | BPE_FIRST | BPE_UNLESS | BPE_TRIMMED };
enum { SPECIAL = 1, NORMALISED = 2, IN_TEXT = 4, ADDED = 8 }; /* of a token */
static const char mark[] = "\xE2\x96\x81";                    /* U+2581, a space in tokens of characters */
enum { MARK = sizeof mark - 1 };

typedef struct merge {
    uint32_t right, rank, both;
} merge;

typedef struct added_token {
    const char *text;
    uint32_t length, id, flags;
} added_token;

struct bpe {
    const char *bytes;
    pcre2_code *expressions[BPE_MAX_EXPRESSIONS];
    size_t n_expressions, n_added;
    uint32_t size, n_merges;
    unsigned bits;            /* flags of the file */
    int in_text;              /* 1 if an added token is matched in all texts */
    int32_t space;            /* BPE_CHARACTERS: the token of a space */
    text_index tokens;        /* ids by hash. BPE_WHOLE: of their bytes; BPE_CHARACTERS: of tokens with one character */
    uint32_t *at;             /* [size] offset in `bytes` of an id's text, which follows its length; 0 if unused */
    unsigned char *flags;     /* [size] flags of added tokens */
    uint32_t *first;          /* [ids without added tokens + 1] the first merge with this left token */
    merge *merges;            /* [n_merges] sorted by left, then by right token */
    added_token *added;       /* [n_added] sorted by text */
    uint32_t added_from[257]; /* index of the first added token that starts with this byte or a greater byte */
    int32_t bytes_ids[256];
};

/* ---- 1. Bytes: GPT-2's alphabet, UTF-8 ----------------------------------------------------------------- */

/* Return the byte that the character at text[*at] represents in GPT-2's alphabet, or -1. Advance *at. */
static int stand_in(const char *text, size_t length, size_t *at) {
    const unsigned char *s = (const unsigned char *)text + *at;
    const int wide = s[0] >= 0x80 && s[0] < 0xE0 && length - *at > 1;
    const unsigned c = wide ? (s[0] & 0x1Fu) << 6 | (s[1] & 0x3Fu) : s[0] < 0x80 ? s[0] : 0x200;
    *at += wide ? 2 : 1;
    if ((c > 0x20 && c < 0x7F) || (c > 0xA0 && c < 0x100 && c != 0xAD)) return (int)c;
    if (c < 0x100 || c > 0x143) return -1; /* U+0100 .. U+0143 represent the bytes 00 .. 20, 7F .. A0, AD */
    return c <= 0x120 ? (int)c - 0x100 : c <= 0x142 ? (int)c - 0x121 + 0x7F : 0xAD;
}

/* Return 1 if a text is in GPT-2's alphabet. Other texts are taken literally, as in the published package. */
static int is_stand_ins(const char *text, size_t length) {
    for (size_t at = 0; at < length;)
        if (stand_in(text, length, &at) < 0) return 0;
    return 1;
}

static void put_bad(bpe_stream *s, text_bytes *out) {
    if (s->n) text_append(out, "\xEF\xBF\xBD", 3);
    s->n = s->wanted = 0;
}

static void put_byte(bpe_stream *s, unsigned char c, text_bytes *out) {
    if (s->wanted && (c < s->least || c > s->most)) put_bad(s, out);
    s->held[s->n++] = c;
    if (s->wanted) {
        s->wanted--, s->least = 0x80, s->most = 0xBF;
    } else if (c >= 0x80) {
        const int more = text_utf8_lead(c, &s->least, &s->most);
        s->wanted = (unsigned char)(more > 0 ? more : 0);
        if (!s->wanted) put_bad(s, out);
    }
    if (s->n && !s->wanted) text_append(out, (const char *)s->held, s->n), s->n = 0;
}

/* ---- 2. The file, untrusted ---------------------------------------------------------------------------- */

typedef struct reader {
    const unsigned char *data;
    size_t size, at;
    const char *why; /* NULL if no error occurred */
    int no_memory;
} reader;

static void refuse(reader *r, const char *why) {
    if (!r->why) r->why = why;
}

static void *cleared(reader *r, size_t n, size_t size) {
    void *block = r->why ? NULL : calloc(n ? n : 1, size);
    if (!block && !r->why) r->no_memory = 1, refuse(r, "out of memory in the tokeniser");
    return block;
}

static uint32_t take(reader *r, size_t bytes) {
    uint32_t value = 0;
    if (bytes > r->size - r->at) return refuse(r, "the tokeniser is truncated"), 0;
    for (size_t i = 0; i < bytes; i++) value |= (uint32_t)r->data[r->at++] << 8 * i;
    return value;
}

/* Read the number of items that follow, each at least `least` bytes long. */
static uint32_t take_count(reader *r, uint32_t most, size_t least, const char *why) {
    const uint32_t n = take(r, 4);
    if (n <= most && n <= r->size / least) return n;
    return refuse(r, why), 0;
}

/* Read a length and a text. */
static const char *take_text(reader *r, size_t most, size_t *length) {
    *length = take(r, 2);
    const char *text = (const char *)r->data + r->at;
    if (*length > r->size - r->at) refuse(r, "the tokeniser is truncated");
    else if (*length > most) refuse(r, "a string in the tokeniser is too long");
    else if (!text_is_usable(text, *length))
        refuse(r, "a string in the tokeniser is not valid UTF-8 or contains a NUL byte");
    if (r->why) return *length = 0, "";
    r->at += *length;
    return text;
}

static pcre2_code *take_expression(reader *r) {
    const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C;
    size_t length, where;
    int code = 0;
    uint32_t empty = 0;
    const char *text = take_text(r, BPE_MAX_EXPRESSION, &length);
    pcre2_code *made = r->why ? NULL : pcre2_compile((PCRE2_SPTR)text, length, options, &code, &where, NULL);
    if (r->why) return NULL;
    if (!made && code == PCRE2_ERROR_NOMEMORY) return r->no_memory = 1, refuse(r, "out of memory"), NULL;
    if (!made) return refuse(r, "PCRE2 rejects a regular expression in the tokeniser"), NULL;
    if (pcre2_pattern_info(made, PCRE2_INFO_MATCHEMPTY, &empty) || empty)
        refuse(r, "a regular expression in the tokeniser matches the empty string");
    return made;
}

/* Return the byte that a token stands for, or -1. */
static int byte_of(const bpe *t, const char *text, size_t length) {
    static const char digits[] = "0123456789ABCDEF";
    size_t end = 0;
    if (t->bits & BPE_CHARACTERS) {
        const char *high =
                       length == 6 && memcmp(text, "<0x", 3) == 0 && text[5] == '>' ? strchr(digits, text[3]) : NULL,
                   *low = high ? strchr(digits, text[4]) : NULL;
        return low ? (int)(16 * (high - digits) + (low - digits)) : -1;
    }
    const int byte = stand_in(text, length, &end);
    return end < length ? -1 : byte;
}

/* Return 1 if the tokeniser may lack a token for a byte, which is rare in texts. */
static int is_rare(int byte) { return byte < 0x20 || byte > 0xF0 || byte == 0x7F || byte == 0xC0 || byte == 0xC1; }

static void take_tokens(reader *r, bpe *t, uint32_t n) {
    t->space = -1;
    for (int b = 0; b < 256; b++) t->bytes_ids[b] = -1;
    for (uint32_t id = 0; id < n && !r->why; id++) {
        size_t length;
        const char *text = take_text(r, BPE_MAX_PIECE, &length);
        if (!length) continue;
        t->at[id] = (uint32_t)(text - t->bytes);
        if (length == MARK && memcmp(text, mark, MARK) == 0) t->space = (int32_t)id;
        const int byte = byte_of(t, text, length);
        if (byte < 0) continue;
        if (t->bytes_ids[byte] >= 0) refuse(r, "the tokeniser has two tokens for one byte");
        t->bytes_ids[byte] = (int32_t)id;
    }
    for (int b = 0; b < 256; b++)
        if (t->bytes_ids[b] < 0 && (t->bits & BPE_CHARACTERS || !is_rare(b)))
            refuse(r, "the tokeniser does not have a token for every byte");
    if (t->bits & BPE_CHARACTERS && t->space < 0) refuse(r, "the tokeniser does not have a token for a space");
}

static int by_right(const void *a, const void *b) {
    const uint32_t x = ((const merge *)a)->right, y = ((const merge *)b)->right;
    return (x > y) - (x < y);
}

/* Return 1 if the text of `both` is the text of `left` followed by the text of `right`. This rejects tokens that could
 * contain themselves. */
static int is_join(const bpe *t, uint32_t left, uint32_t right, uint32_t both) {
    size_t a, b, ab;
    const char *x = bpe_piece(t, (int32_t)left, &a), *y = bpe_piece(t, (int32_t)right, &b);
    const char *xy = bpe_piece(t, (int32_t)both, &ab);
    return x && y && xy && ab == a + b && memcmp(xy, x, a) == 0 && memcmp(xy + a, y, b) == 0;
}

static void take_merges(reader *r, bpe *t) {
    const size_t begin = r->at;
    for (uint32_t i = 0; i < t->n_merges && !r->why; i++) {
        const uint32_t left = take(r, 4), right = take(r, 4), both = take(r, 4);
        if (left >= t->size || right >= t->size || both >= t->size || !is_join(t, left, right, both))
            refuse(r, "a merge in the tokeniser does not join two tokens into one");
        if (!r->why) t->first[left + 1]++;
    }
    if (r->why) return;
    for (uint32_t id = 0; id < t->size; id++) t->first[id + 1] += t->first[id];
    r->at = begin;
    for (uint32_t i = 0; i < t->n_merges; i++) { /* first[left] is the next free index */
        const uint32_t left = take(r, 4), right = take(r, 4), both = take(r, 4);
        t->merges[t->first[left]++] = (merge){ right, i, both };
    }
    for (uint32_t id = t->size; id; id--) t->first[id] = t->first[id - 1];
    t->first[0] = 0;
    for (uint32_t id = 0; id < t->size; id++) {
        const uint32_t from = t->first[id], to = t->first[id + 1];
        if (to - from > 1) qsort(t->merges + from, to - from, sizeof(merge), by_right);
        for (uint32_t i = from; i + 1 < to; i++)
            if (t->merges[i].right == t->merges[i + 1].right) refuse(r, "the tokeniser has a duplicate merge");
    }
}

static int by_text(const void *a, const void *b) {
    const added_token *x = a, *y = b;
    const int order = memcmp(x->text, y->text, x->length < y->length ? x->length : y->length);
    return order ? order : (x->length > y->length) - (x->length < y->length);
}

static void take_added(reader *r, bpe *t, uint32_t n_tokens) {
    for (size_t i = 0; i < t->n_added && !r->why; i++) {
        added_token *a = &t->added[i];
        size_t length, known;
        a->id = take(r, 4);
        a->flags = take(r, 4);
        a->text = take_text(r, BPE_MAX_PIECE, &length);
        a->length = (uint32_t)length;
        if (!length || a->flags > (SPECIAL | NORMALISED | IN_TEXT))
            refuse(r, "the tokeniser has a malformed added token");
        t->in_text |= (a->flags & IN_TEXT) != 0;
        if (a->id >= BPE_MAX_TOKENS) refuse(r, "an added token in the tokeniser has an id that is too large");
        if (r->why) return;
        const char *there = a->id < n_tokens ? bpe_piece(t, (int32_t)a->id, &known) : NULL;
        if (there && (known != length || memcmp(there, a->text, length) != 0))
            refuse(r, "an added token in the tokeniser has the same id as another token");
        if (a->id >= t->size) t->size = a->id + 1;
    }
    if (!r->why && t->n_added) qsort(t->added, t->n_added, sizeof *t->added, by_text);
    for (size_t i = t->n_added; i-- && !r->why;) t->added_from[(unsigned char)t->added[i].text[0] + 1]++;
    for (int b = 0; b < 256; b++) t->added_from[b + 1] += t->added_from[b];
    for (size_t i = 1; i < t->n_added && !r->why; i++)
        if (by_text(&t->added[i - 1], &t->added[i]) == 0) refuse(r, "the tokeniser has a duplicate added token");
}

/* Read added tokens, whose ids may exceed those of the vocabulary. */
static void place_added(reader *r, bpe *t, uint32_t n_tokens) {
    uint32_t *at = r->why || t->size == n_tokens ? NULL : realloc(t->at, t->size * sizeof *at);
    if (!r->why && t->size > n_tokens) {
        if (!at) r->no_memory = 1, refuse(r, "out of memory in the tokeniser");
        else memset(at + n_tokens, 0, (t->size - n_tokens) * sizeof *at), t->at = at;
    }
    t->flags = cleared(r, t->size, 1);
    for (size_t i = 0; i < t->n_added && !r->why; i++) {
        const added_token *a = &t->added[i];
        if (t->flags[a->id]) refuse(r, "two added tokens in the tokeniser have the same id");
        t->at[a->id] = (uint32_t)(a->text - t->bytes);
        t->flags[a->id] = (unsigned char)(a->flags | ADDED);
    }
}

/* Index the tokens by their bytes, except added tokens, which texts cannot contain. */
static void index_tokens(reader *r, bpe *t, uint32_t n) {
    char bytes[BPE_MAX_PIECE];
    for (uint32_t id = 0; id < n && t->bits & (BPE_WHOLE | BPE_CHARACTERS) && !r->why; id++) {
        size_t length, count = 0;
        const char *text = bpe_piece(t, (int32_t)id, &length);
        if (!text || t->flags[id]) continue;
        if (t->bits & BPE_CHARACTERS) {
            if (length > 4 || text_utf8_count(text, length) != 1) continue;
            memcpy(bytes, text, count = length);
        } else {
            if (!is_stand_ins(text, length)) continue;
            for (size_t at = 0; at < length;) bytes[count++] = (char)stand_in(text, length, &at);
        }
        if (!text_index_add(&t->tokens, text_hash(bytes, count), id))
            r->no_memory = 1, refuse(r, "out of memory in the tokeniser");
    }
}

static void read_file(reader *r, bpe *t) {
    static const char magic[8] = "MOE-BPE";
    if (r->size > BPE_MAX_MODEL) refuse(r, "the tokeniser is larger than 64 MiB");
    if (r->size < 8 || memcmp(r->data, magic, 8) != 0) refuse(r, "the tokeniser is not byte-level BPE");
    r->at = r->size < 8 ? r->size : 8;
    if (take(r, 4) != 1) refuse(r, "the tokeniser has an unsupported version");
    const uint32_t bits = t->bits = take(r, 4);
    if (bits > ALL_BITS || (bits & BPE_CHARACTERS ? bits & (BPE_NFC | BPE_WHOLE) : bits & ONLY_CHARACTERS))
        refuse(r, "the tokeniser has unsupported flags");
    const uint32_t expressions = take_count(r, BPE_MAX_EXPRESSIONS, 3, "the tokeniser has too many expressions");
    const uint32_t tokens = take_count(r, BPE_MAX_TOKENS, 2, "the tokeniser has too many tokens");
    t->n_merges = take_count(r, BPE_MAX_TOKENS, 12, "the tokeniser has too many merges");
    t->n_added = take_count(r, BPE_MAX_ADDED, 10, "the tokeniser has too many added tokens");
    for (; t->n_expressions < expressions && !r->why; t->n_expressions++)
        t->expressions[t->n_expressions] = take_expression(r);
    t->size = tokens;
    t->at = cleared(r, tokens, sizeof *t->at);
    t->first = cleared(r, (size_t)tokens + 1, sizeof *t->first);
    t->merges = cleared(r, t->n_merges, sizeof *t->merges);
    t->added = cleared(r, t->n_added, sizeof *t->added);
    take_tokens(r, t, tokens);
    take_merges(r, t);
    take_added(r, t, tokens);
    if (!r->why && r->at < r->size) refuse(r, "trailing bytes after the tokeniser");
    place_added(r, t, tokens);
    index_tokens(r, t, tokens);
}

bpe *bpe_new(const void *bytes, size_t size, char *error, size_t error_size) {
    reader r = { .data = bytes, .size = bytes ? size : 0 };
    bpe *t = cleared(&r, 1, sizeof *t);
    if (t) t->bytes = bytes, read_file(&r, t);
    if (!r.why) return t;
    if (error && error_size) snprintf(error, error_size, "%s", r.why);
    bpe_free(t);
    errno = r.no_memory ? ENOMEM : EINVAL;
    return NULL;
}

void bpe_free(bpe *t) {
    if (!t) return;
    for (size_t i = 0; i < BPE_MAX_EXPRESSIONS; i++) pcre2_code_free(t->expressions[i]);
    free(t->at);
    free(t->flags);
    free(t->first);
    free(t->merges);
    free(t->added);
    text_index_free(&t->tokens);
    free(t);
}

/* ---- 3. Pieces ----------------------------------------------------------------------------------------- */

int32_t bpe_size(const bpe *t) { return (int32_t)t->size; }

const char *bpe_piece(const bpe *t, int32_t id, size_t *length) {
    const uint32_t at = id >= 0 && (uint32_t)id < t->size ? t->at[id] : 0;
    const unsigned char *text = (const unsigned char *)t->bytes + at;
    *length = at ? (size_t)(text[-2] | text[-1] << 8) : 0;
    return at ? (const char *)text : NULL;
}

int32_t bpe_id(const bpe *t, const char *piece, size_t length) {
    size_t known;
    for (int32_t id = 0; id < (int32_t)t->size; id++) {
        const char *text = bpe_piece(t, id, &known);
        if (text && known == length && memcmp(text, piece, length) == 0) return id;
    }
    return -1;
}

int bpe_is_special(const bpe *t, int32_t id) {
    return id >= 0 && (uint32_t)id < t->size && (t->flags[id] & SPECIAL) != 0;
}

/* How a token is spelled: as itself, in GPT-2's alphabet, with marks for spaces, or as <0xHH>. */
typedef enum spelling { LITERAL, STAND_INS, MARKED, BYTE } spelling;

static spelling spelling_of(const bpe *t, int32_t id, const char *text, size_t length) {
    if (!(t->bits & BPE_CHARACTERS)) return is_stand_ins(text, length) ? STAND_INS : LITERAL;
    const int byte = byte_of(t, text, length);
    return byte >= 0 && t->bytes_ids[byte] == id ? BYTE : MARKED;
}

/* Return the next byte of a token's text, and advance *at, the offset in its spelling. */
static unsigned char next_byte(const bpe *t, spelling how, const char *text, size_t length, size_t *at) {
    if (how == STAND_INS) return (unsigned char)stand_in(text, length, at);
    if (how == BYTE) return *at = length, (unsigned char)byte_of(t, text, length);
    if (how == MARKED && length - *at >= MARK && memcmp(text + *at, mark, MARK) == 0) return *at += MARK, ' ';
    return (unsigned char)text[(*at)++];
}

/* Return the first byte of an id's text; 0 if it has none. */
static unsigned char first_byte(const bpe *t, int32_t id) {
    size_t length, at = 0;
    const char *text = bpe_piece(t, id, &length);
    return text ? next_byte(t, spelling_of(t, id, text, length), text, length, &at) : 0;
}

int bpe_continues(const bpe *t, int32_t id) {
    const unsigned char byte = first_byte(t, id);
    return byte >= 0x80 && byte < 0xC0;
}

int bpe_is_trimmed(const bpe *t, int32_t id) { return t->bits & BPE_TRIMMED && first_byte(t, id) == ' '; }

size_t bpe_token_bytes(const bpe *t, int32_t id) {
    size_t length, n = 0;
    const char *text = bpe_piece(t, id, &length);
    if (!text) return 0;
    const spelling how = spelling_of(t, id, text, length);
    for (size_t at = 0; at < length; n++) next_byte(t, how, text, length, &at);
    return n;
}

/* ---- 4. NFC in linear time ----------------------------------------------------------------------------- */
/* utf8proc sorts combining marks by exchanges, in quadratic time for long runs. Sort them by counting. */

enum { CLASSES = 256 };
static const utf8proc_option_t nfc = UTF8PROC_STABLE | UTF8PROC_COMPOSE;

static int class_of(int32_t c) { return (unsigned char)utf8proc_get_property(c)->combining_class; }

/* Sort combining marks stably by class. `spare` has n elements. */
static void sort_marks(int32_t *marks, size_t n, int32_t *spare) {
    size_t begins[CLASSES + 1] = { 0 };
    for (size_t i = 0; i < n; i++) begins[class_of(marks[i]) + 1]++;
    for (int k = 0; k < CLASSES; k++) begins[k + 1] += begins[k];
    for (size_t i = 0; i < n; i++) spare[begins[class_of(marks[i])]++] = marks[i];
    memcpy(marks, spare, n * sizeof *marks);
}

static void order_marks(int32_t *text, size_t n, int32_t *spare) {
    for (size_t i = 0, end; i < n; i = end + 1) {
        int sorted = 1, last = 0;
        for (end = i; end < n; end++) {
            const int class = class_of(text[end]);
            if (!class) break;
            sorted &= last <= class;
            last = class;
        }
        if (!sorted) sort_marks(text + i, end - i, spare);
    }
}

/* Append the NFC of valid UTF-8. Return 0, or SPM_NO_MEMORY. */
static int compose(const char *text, size_t length, text_bytes *out) {
    enum { MOST = 8 }; /* a decomposition has at most 4 characters */
    int32_t *all = NULL;
    size_t n = 0, capacity = 0;
    for (size_t at = 0; at < length;) {
        int32_t c, *grown = text_grown(all, &capacity, n + MOST, sizeof *all);
        if (!grown) return free(all), SPM_NO_MEMORY;
        all = grown;
        at += (size_t)utf8proc_iterate((const uint8_t *)text + at, (ptrdiff_t)(length - at), &c);
        n += (size_t)utf8proc_decompose_char(c, all + n, MOST, nfc, NULL);
    }
    int32_t *spare = malloc((n + 1) * sizeof *spare);
    if (spare) {
        order_marks(all, n, spare);
        const ptrdiff_t composed = all ? utf8proc_normalize_utf32(all, (ptrdiff_t)n, nfc) : 0;
        for (ptrdiff_t i = 0; i < composed; i++) {
            uint8_t bytes[4];
            text_append(out, (const char *)bytes, (size_t)utf8proc_encode_char(all[i], bytes));
        }
    }
    free(all);
    free(spare);
    return spare && !out->failed ? 0 : SPM_NO_MEMORY;
}

/* Return 1 if all characters are below U+0300, which NFC does not change. */
static int is_composed(const char *text, size_t length) {
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)text[i] >= 0xCC) return 0;
    return 1;
}

/* ---- 5. Merging one piece ------------------------------------------------------------------------------ */

#define NONE UINT32_MAX

/* A part of a piece, stored at its first byte. `id` is -1 if it was merged into the previous part or has no token. */
typedef struct part {
    int32_t id;
    uint32_t before, behind;
} part;

/* The state of a call to bpe_encode. */
typedef struct encoder {
    const bpe *t;
    int how;
    int space; /* 1 if the next piece gets a space before it */
    text_ids *ids;
    text_offsets *begins; /* may be NULL */
    size_t base;          /* bytes before the text being split */
    part *parts;
    uint64_t *heap; /* ranks and positions of possible merges, smallest first */
    size_t part_capacity, heap_capacity, n_heap;
    pcre2_match_context *limits;
    pcre2_match_data *found[BPE_MAX_EXPRESSIONS];
    const char *why;
} encoder;

static int no_memory(encoder *e) { return e->why = "out of memory in the tokeniser", SPM_NO_MEMORY; }

static int give(encoder *e, int32_t id, uint32_t begin) {
    text_ids *ids = e->ids;
    text_offsets *begins = e->begins;
    if (text_add(&ids->data, &ids->length, &ids->capacity, &id, 1, sizeof id, NULL) ||
        (begins && text_add(&begins->data, &begins->length, &begins->capacity, &begin, 1, sizeof begin, NULL)))
        return no_memory(e);
    return 0;
}

static const merge *find_merge(const bpe *t, int32_t left, int32_t right) {
    uint32_t low = t->first[left], high = t->first[left + 1];
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (t->merges[middle].right < (uint32_t)right) low = middle + 1;
        else high = middle;
    }
    return low < t->first[left + 1] && t->merges[low].right == (uint32_t)right ? &t->merges[low] : NULL;
}

/* Push the pair at `place` if it can be merged. */
static void push_pair(encoder *e, uint32_t place) {
    const part *p = &e->parts[place];
    const merge *m = p->behind == NONE ? NULL : find_merge(e->t, p->id, e->parts[p->behind].id);
    if (!m) return;
    const uint64_t key = (uint64_t)m->rank << 32 | place;
    size_t at = e->n_heap++;
    for (; at && e->heap[(at - 1) / 2] > key; at = (at - 1) / 2) e->heap[at] = e->heap[(at - 1) / 2];
    e->heap[at] = key;
}

static uint64_t pop_pair(encoder *e) {
    const uint64_t least = e->heap[0], last = e->heap[--e->n_heap];
    size_t at = 0;
    for (size_t next = 1; next < e->n_heap; next = 2 * at + 1) {
        if (next + 1 < e->n_heap && e->heap[next + 1] < e->heap[next]) next++;
        if (e->heap[next] >= last) break;
        e->heap[at] = e->heap[next];
        at = next;
    }
    e->heap[at] = last;
    return least;
}

/* Return the token of a character, or -1. */
static int32_t character_token(const bpe *t, const char *text, size_t length) {
    uint32_t id;
    if (*text == ' ') return t->space;
    for (size_t at = 0; (id = text_index_next(&t->tokens, text_hash(text, length), &at)) != TEXT_NONE;) {
        size_t size;
        const char *piece = bpe_piece(t, (int32_t)id, &size);
        if (size == length && memcmp(piece, text, length) == 0) return (int32_t)id;
    }
    return -1;
}

/* Set the first tokens of a piece's parts: of its bytes, or of its characters after `space` parts for a space. */
static void set_parts(const encoder *e, const char *text, size_t length, size_t space) {
    const bpe *t = e->t;
    part *parts = e->parts;
    if (space) parts[0].id = t->space;
    for (size_t i = 0, n = 1; i < length; i += n) {
        int32_t id = -1;
        if (t->bits & BPE_CHARACTERS) {
            n = text_utf8_next(text, length, i) - i;
            id = character_token(t, text + i, n);
        }
        for (size_t k = 0; k < n; k++)
            parts[space + i + k].id = id < 0 ? t->bytes_ids[(unsigned char)text[i + k]] : k ? -1 : id;
    }
}

/* Repeatedly merge the pair with the lowest rank (the leftmost, if several have it) until no pair can be merged. */
static int join_parts(encoder *e, const char *text, size_t length, size_t space) {
    const uint32_t n = (uint32_t)(length + space);
    if (text_reserve(&e->parts, &e->part_capacity, n, sizeof *e->parts, NULL) ||
        text_reserve(&e->heap, &e->heap_capacity, 2 * (size_t)n, sizeof *e->heap, NULL)) /* 2 pairs per merge */
        return no_memory(e);
    part *parts = e->parts;
    e->n_heap = 0;
    set_parts(e, text, length, space);
    for (uint32_t i = 0, last = NONE; i < n; i++) {
        parts[i].before = last;
        parts[i].behind = NONE;
        if (parts[i].id < 0) continue;
        if (last != NONE) parts[last].behind = i;
        last = i;
    }
    for (uint32_t i = 0; i < n; i++)
        if (parts[i].id >= 0) push_pair(e, i);
    while (e->n_heap) {
        const uint64_t key = pop_pair(e);
        const uint32_t place = (uint32_t)key;
        part *p = &parts[place];
        if (p->id < 0 || p->behind == NONE) continue;
        part *gone = &parts[p->behind];
        const merge *m = find_merge(e->t, p->id, gone->id);
        if (!m || m->rank != key >> 32) continue; /* the pair at this place has changed */
        p->id = (int32_t)m->both;
        p->behind = gone->behind;
        gone->id = -1;
        if (p->behind != NONE) parts[p->behind].before = place;
        if (p->before != NONE) push_pair(e, p->before);
        push_pair(e, place);
    }
    return 0;
}

/* Return the token with exactly these bytes, or -1. */
static int32_t whole_token(const bpe *t, const char *text, size_t length) {
    const uint32_t hash = text_hash(text, length);
    uint32_t id;
    for (size_t at = 0; (id = text_index_next(&t->tokens, hash, &at)) != TEXT_NONE;) {
        size_t size, from = 0, same = 0;
        const char *piece = bpe_piece(t, (int32_t)id, &size);
        while (from < size && same < length && stand_in(piece, size, &from) == (unsigned char)text[same]) same++;
        if (from == size && same == length) return (int32_t)id;
    }
    return -1;
}

static int merge_piece(encoder *e, const char *text, size_t length, size_t begin) {
    const int32_t whole = e->t->bits & BPE_WHOLE ? whole_token(e->t, text, length) : -1;
    if (whole >= 0) return give(e, whole, (uint32_t)begin);
    const int spaced = *text == ' ' || text_begins_with(text, length, mark);
    const uint32_t space = e->space && !(e->t->bits & BPE_UNLESS && spaced);
    int failed = join_parts(e, text, length, space);
    uint32_t i = 0;
    e->space = 0;
    while (!failed && i < length + space && e->parts[i].id < 0) i++;
    for (i = i < length + space ? i : NONE; i != NONE && !failed; i = e->parts[i].behind)
        failed = give(e, e->parts[i].id, (uint32_t)(begin + i - (i ? space : 0)));
    return failed;
}

/* ---- 6. Added tokens and expressions ------------------------------------------------------------------- */

/* Split a text with the expressions starting at `level`, and encode the matches and the text between matches. */
static int cut(encoder *e, size_t level, const char *text, size_t length, size_t begin) {
    if (level == e->t->n_expressions) return length ? merge_piece(e, text, length, begin) : 0;
    const pcre2_code *code = e->t->expressions[level];
    const size_t *span = pcre2_get_ovector_pointer(e->found[level]);
    int failed = 0;
    for (size_t at = 0; at < length && !failed;) {
        const int n = pcre2_match(code, (PCRE2_SPTR)text, length, at, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY,
                                  e->found[level], e->limits);
        if (n == PCRE2_ERROR_NOMEMORY) return no_memory(e);
        if (n < 0 && n != PCRE2_ERROR_NOMATCH)
            return e->why = "an expression of the tokeniser takes too many steps", -1;
        const size_t from = n < 0 ? length : span[0], to = n < 0 ? length : span[1];
        if (from < at || to < from || (to == at && n >= 0))
            return e->why = "an expression of the tokeniser matches out of order", -1;
        failed = cut(e, level + 1, text + at, from - at, begin + at);
        if (!failed) failed = cut(e, level + 1, text + from, to - from, begin + from);
        at = to;
    }
    return failed;
}

/* Return the longest added token at the beginning of a text, of all or of those that texts can contain, or NULL. */
static const added_token *added_at(const bpe *t, const char *text, size_t length, unsigned normalised, int all) {
    const unsigned char byte = (unsigned char)text[0];
    const uint32_t from = t->added_from[byte];
    added_token key = { .text = text, .length = (uint32_t)(length < BPE_MAX_PIECE ? length : BPE_MAX_PIECE) };
    while (key.length) { /* find the last token that is not greater than the key: all prefixes of the key precede it */
        uint32_t low = from, high = t->added_from[byte + 1], same = 0;
        while (low < high) {
            const uint32_t middle = low + (high - low) / 2;
            if (by_text(&t->added[middle], &key) <= 0) low = middle + 1;
            else high = middle;
        }
        if (low == from) return NULL;
        const added_token *a = &t->added[low - 1];
        while (same < a->length && same < key.length && a->text[same] == text[same]) same++;
        if (same == a->length && (a->flags & NORMALISED) == normalised && (all || a->flags & IN_TEXT)) return a;
        key.length = same == a->length ? same - 1 : same; /* any other prefix has at most this length */
    }
    return NULL;
}

/* Split off the literal (or `normalised`) added tokens, and encode the text between them. */
static int cut_added(encoder *e, unsigned normalised, const char *text, size_t length);

static int cut_between(encoder *e, unsigned normalised, const char *text, size_t length) {
    const int first = !e->base && !(e->how & BPE_LATER);
    if (!normalised && !(e->how & BPE_BARE))
        e->space = (e->t->bits & (first ? BPE_PREFIX | BPE_FIRST : BPE_PREFIX)) != 0;
    if (normalised) {
        const int failed = cut(e, 0, text, length, e->base);
        e->base += length;
        return failed;
    }
    if (!(e->t->bits & BPE_NFC) || is_composed(text, length)) return cut_added(e, NORMALISED, text, length);
    text_bytes composed = { 0 };
    int failed = compose(text, length, &composed);
    failed = failed ? no_memory(e) : cut_added(e, NORMALISED, composed.data, composed.length);
    text_bytes_free(&composed);
    return failed;
}

static int cut_added(encoder *e, unsigned normalised, const char *text, size_t length) {
    size_t begin = 0;
    int failed = 0;
    const int all = e->how & BPE_ADDED;
    for (size_t i = 0; (all || e->t->in_text) && i < length && !failed;) {
        const added_token *a = added_at(e->t, text + i, length - i, normalised, all);
        if (!a) {
            i++;
            continue;
        }
        failed = cut_between(e, normalised, text + begin, i - begin);
        if (!failed) failed = give(e, (int32_t)a->id, (uint32_t)e->base);
        e->base += a->length;
        begin = i += a->length;
    }
    return failed ? failed : cut_between(e, normalised, text + begin, length - begin);
}

/* ---- 7. Text and ids ----------------------------------------------------------------------------------- */

/* Limit a match to 64 MiB and to linearly many steps, which suffices for all published expressions. */
static int set_limits(encoder *e, size_t length) {
    e->limits = pcre2_match_context_create(NULL);
    if (!e->limits) return no_memory(e);
    pcre2_set_match_limit(e->limits, (uint32_t)(10000 + 16 * length));
    pcre2_set_depth_limit(e->limits, (uint32_t)(10000 + 16 * length));
    pcre2_set_heap_limit(e->limits, 64 << 10);
    for (size_t i = 0; i < e->t->n_expressions; i++)
        if (!(e->found[i] = pcre2_match_data_create(1, NULL))) return no_memory(e);
    return 0;
}

int bpe_encode(const bpe *t, const char *text, size_t length, int how, text_ids *ids, text_offsets *begins, char *error,
               size_t error_size) {
    encoder e = { .t = t, .ids = ids, .begins = begins, .how = how };
    text_bytes mended = { 0 };
    int failed = 0;
    ids->length = 0;
    if (begins) begins->length = 0;
    if (length > BPE_MAX_TEXT) e.why = "the text is longer than 16 MiB", failed = -1;
    if (!failed && text_utf8_valid(text, length) < length) {
        bpe_stream stream = { 0 };
        for (size_t i = 0; i < length; i++) put_byte(&stream, (unsigned char)text[i], &mended);
        bpe_decode_end(&stream, &mended);
        text = mended.data;
        length = mended.length;
        if (mended.failed) failed = no_memory(&e);
    }
    if (!failed) failed = set_limits(&e, length);
    if (!failed) failed = cut_added(&e, 0, text, length);
    for (size_t i = 0; i < t->n_expressions; i++) pcre2_match_data_free(e.found[i]);
    pcre2_match_context_free(e.limits);
    free(e.parts);
    free(e.heap);
    text_bytes_free(&mended);
    if (!failed) return 0;
    ids->length = 0;
    if (begins) begins->length = 0;
    if (error && error_size) snprintf(error, error_size, "%s", e.why);
    return failed;
}

void bpe_find_added(const bpe *t, const char *text, size_t length, size_t *begin, size_t *end) {
    *begin = *end = length;
    for (size_t i = 0; i < length;) {
        const added_token *literal = added_at(t, text + i, length - i, 0, 1),
                          *a = literal ? literal : added_at(t, text + i, length - i, NORMALISED, 1);
        if (a && *begin == length) *begin = i;
        i += a ? a->length : 1;
        if (a) *end = i;
    }
}

void bpe_decode(const bpe *t, bpe_stream *stream, const int32_t *ids, size_t count, text_bytes *out) {
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char *text = bpe_piece(t, ids[i], &length);
        if (!text) continue;
        const spelling how = spelling_of(t, ids[i], text, length);
        for (size_t at = 0; at < length; stream->begun = 1) {
            const unsigned char byte = next_byte(t, how, text, length, &at);
            if (stream->begun || byte != ' ' || !(t->bits & BPE_TRIMMED)) put_byte(stream, byte, out);
        }
    }
    text_append(out, "", 0);
}

void bpe_decode_end(bpe_stream *stream, text_bytes *out) {
    put_bad(stream, out);
    text_append(out, "", 0);
}
