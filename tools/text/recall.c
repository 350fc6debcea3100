/* recall.c - see recall.h.
 *
 * Contents
 *   1. Words      of a text, with their hashes
 *   2. Pairs
 *   3. Files
 *   4. Adapting   a translation of a text that differs only in spans and marks
 *   5. Finding
 *   6. Comparing
 */
#include "tools/text/recall.h"
#include "tools/get/sha256.h"
#include "tools/text/spans.h"
#include "tools/text/text.h"
#include "tools/text/units.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLANKS " \t\r\n"

/* A word, sign or protected span. */
typedef struct word {
    uint32_t exact, alike; /* hashes of the bytes; of what similar words share: letters of any case, kinds of spans */
    uint32_t begin, length;
    text_span_kind kind;
} word;

typedef struct word_list {
    word *each;
    size_t n, capacity;
} word_list;

typedef struct pair {
    char *source, *target;
    uint32_t *words; /* [2 * n] exact and alike of each word; NULL if only exact matches are found */
    uint32_t n;
    uint16_t languages[2];
    int replaced;
} pair;

/* The pairs that have a word. */
typedef struct posting {
    uint32_t *pairs;
    size_t n, capacity;
} posting;

struct text_recall {
    pthread_mutex_t lock; /* guards everything below */
    pair *pairs;
    size_t n, capacity, live;
    text_index sources; /* pairs by the hash of their source */
    char **languages;   /* [n_languages]; the first is "" */
    size_t n_languages, language_capacity;
    text_index words; /* postings by the hash `alike`, which is their whole key */
    posting *postings;
    size_t n_postings, posting_capacity;
    uint32_t *seen; /* [seen_capacity] by pair: `searches` when a search saw the pair */
    size_t seen_capacity;
    uint32_t searches;
    char hash[SHA256_TEXT];

    word_list found; /* words of the text that is added or searched */
    uint32_t *rows;  /* two rows of edit distances */
};

/* ---- 1. Words ------------------------------------------------------------------------------------------ */

static moe_span trimmed(moe_span s) { return text_trimmed(s.data, s.length, BLANKS); }

static uint32_t alike_of(const char *data, size_t length, text_span_kind kind) {
    char copy[64];
    const char code = (char)kind;
    if (kind) return text_hash(&code, 1);
    if (length > sizeof copy) return text_hash(data, length);
    memcpy(copy, data, length);
    text_lower_first(copy, length);
    return text_hash(copy, length);
}

/* Return the number of bytes of the word or sign at `at`, where the scan has found no span. */
static size_t word_bytes(text_scan *scan, size_t at, size_t bytes) {
    if (!text_is_wordlike(scan->data, scan->length, at) || text_is_unspaced(scan->data, scan->length, at)) return bytes;
    for (size_t end = at + bytes, more; end < scan->length; end += more) {
        if (!text_is_wordlike(scan->data, scan->length, end) || text_is_unspaced(scan->data, scan->length, end) ||
            text_span_next(scan, end, &more) != TEXT_SPAN_NONE)
            return end - at;
    }
    return scan->length - at;
}

/* Find the words of valid UTF-8. Return 0 if out of memory. */
static int find_words(moe_span text, word_list *out) {
    text_scan scan = text_scan_begin(text.data, text.length);
    out->n = 0;
    for (size_t at = 0, bytes; at < text.length; at += bytes) {
        const text_span_kind kind = text_span_next(&scan, at, &bytes);
        if (kind == TEXT_SPAN_HYPHEN || (!kind && strchr(BLANKS, text.data[at]))) continue;
        if (!kind) bytes = word_bytes(&scan, at, bytes);
        const char *data = text.data + at;
        const word w = { text_hash(data, bytes), alike_of(data, bytes, kind), (uint32_t)at, (uint32_t)bytes, kind };
        if (text_add(&out->each, &out->n, &out->capacity, &w, 1, sizeof w, NULL)) return 0;
    }
    return 1;
}

moe_status text_recall_words(moe_span text, text_offsets *words, moe_error *error) {
    word_list list = { 0 };
    moe_status status = find_words(text, &list) ? MOE_OK : text_out_of_memory(error);
    words->length = 0;
    for (size_t i = 0; i < list.n && !status; i++) {
        const uint32_t edges[] = { list.each[i].begin, list.each[i].begin + list.each[i].length };
        status = text_add(&words->data, &words->length, &words->capacity, edges, 2, sizeof *edges, error);
    }
    free(list.each);
    return status;
}

/* ---- 2. Pairs ------------------------------------------------------------------------------------------ */

moe_status text_recall_new(text_recall **out, moe_error *error) {
    text_recall *r = calloc(1, sizeof *r);
    char *none = text_copy("", 0);
    if (!r || pthread_mutex_init(&r->lock, NULL)) return free(r), free(none), text_out_of_memory(error);
    r->rows = malloc(2 * (TEXT_RECALL_WORDS + 1) * sizeof *r->rows);
    if (!none || !r->rows ||
        text_add(&r->languages, &r->n_languages, &r->language_capacity, &none, 1, sizeof none, NULL))
        return free(none), text_recall_free(r), text_out_of_memory(error);
    return *out = r, MOE_OK;
}

void text_recall_free(text_recall *r) {
    if (!r) return;
    for (size_t i = 0; i < r->n; i++) free(r->pairs[i].source), free(r->pairs[i].target), free(r->pairs[i].words);
    for (size_t i = 0; i < r->n_languages; i++) free(r->languages[i]);
    for (size_t i = 0; i < r->n_postings; i++) free(r->postings[i].pairs);
    text_index_free(&r->sources);
    text_index_free(&r->words);
    free(r->pairs), free(r->languages), free(r->postings), free(r->seen), free(r->found.each), free(r->rows);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

/* Find or add a language; return -1 if out of memory. */
static long language_of(text_recall *r, moe_span code) {
    for (size_t i = 0; i < r->n_languages; i++)
        if (text_is(code.data, code.length, r->languages[i])) return (long)i;
    char *name = r->n_languages < UINT16_MAX ? text_copy(code.data, code.length) : NULL;
    if (!name || text_add(&r->languages, &r->n_languages, &r->language_capacity, &name, 1, sizeof name, NULL))
        return free(name), -1;
    return (long)r->n_languages - 1;
}

/* Add a pair to the list of each of its words. Return 0 if out of memory. */
static int index_words(text_recall *r, uint32_t number) {
    for (size_t i = 0; i < r->found.n; i++) {
        const uint32_t alike = r->found.each[i].alike;
        size_t at = 0;
        uint32_t k = text_index_next(&r->words, alike, &at);
        if (k == TEXT_NONE) {
            if (text_add(&r->postings, &r->n_postings, &r->posting_capacity, &(posting){ 0 }, 1, sizeof(posting), NULL))
                return 0;
            k = (uint32_t)r->n_postings - 1;
            if (!text_index_add(&r->words, alike, k)) return r->n_postings--, 0;
        }
        posting *p = &r->postings[k];
        if (p->n && p->pairs[p->n - 1] == number) continue;
        if (text_add(&p->pairs, &p->n, &p->capacity, &number, 1, sizeof number, NULL)) return 0;
    }
    return 1;
}

/* Copy a translation; if the source has one line, so has the copy. */
static char *copy_target(moe_span source, moe_span target) {
    char *copy = text_copy(target.data, target.length);
    size_t n = 0;
    if (!copy || memchr(source.data, '\n', source.length)) return copy;
    for (size_t i = 0; copy[i]; i++) {
        const int breaks = copy[i] == '\n' || copy[i] == '\r';
        if (breaks && n && copy[n - 1] == ' ') continue;
        copy[n++] = breaks ? ' ' : copy[i];
    }
    copy[n] = '\0';
    return copy;
}

/* Find the words of a pair without line breaks, for fuzzy matches. Return 0 if out of memory. */
static int take_words(text_recall *r, moe_span source, pair *p) {
    r->found.n = 0;
    if (memchr(source.data, '\n', source.length)) return 1;
    if (!find_words(source, &r->found)) return 0;
    if (!r->found.n || r->found.n > TEXT_RECALL_WORDS) return r->found.n = 0, 1;
    if (!(p->words = malloc(2 * r->found.n * sizeof *p->words))) return 0;
    p->n = (uint32_t)r->found.n;
    for (size_t i = 0; i < r->found.n; i++)
        p->words[2 * i] = r->found.each[i].exact, p->words[2 * i + 1] = r->found.each[i].alike;
    return 1;
}

static int is_same(const pair *p, const pair *q) {
    return !p->replaced && p->languages[0] == q->languages[0] && p->languages[1] == q->languages[1] &&
           strcmp(p->source, q->source) == 0;
}

static int add_pair(text_recall *r, moe_span codes[2], moe_span source, moe_span target) {
    const long from = language_of(r, codes[0]), to = language_of(r, codes[1]);
    const uint32_t hash = text_hash(source.data, source.length), number = (uint32_t)r->n;
    pair p = { .source = text_copy(source.data, source.length),
               .target = copy_target(source, target),
               .languages = { (uint16_t)from, (uint16_t)to } };
    uint32_t old = TEXT_NONE, at_old;
    if (from < 0 || to < 0 || !p.source || !p.target || !take_words(r, source, &p) ||
        text_reserve(&r->seen, &r->seen_capacity, r->n + 1, sizeof *r->seen, NULL) ||
        text_reserve(&r->pairs, &r->capacity, r->n + 1, sizeof *r->pairs, NULL))
        return free(p.source), free(p.target), free(p.words), 0;
    for (size_t at = 0; (at_old = text_index_next(&r->sources, hash, &at)) != TEXT_NONE;)
        if (is_same(&r->pairs[at_old], &p)) old = at_old;
    /* A pair that is only partly in the lists is found less often; it is still correct. */
    r->pairs[number] = p, r->seen[number] = r->searches, r->n++;
    if (!text_index_add(&r->sources, hash, number)) return r->pairs[number].replaced = 1, 0;
    r->live++;
    if (old != TEXT_NONE) r->pairs[old].replaced = 1, r->live--;
    return index_words(r, number);
}

moe_status text_recall_add(text_recall *r, moe_span source_language, moe_span target_language, moe_span source,
                           moe_span target, moe_error *error) {
    moe_span codes[2] = { source_language, target_language };
    source = trimmed(source), target = trimmed(target);
    if (!text_is_usable(source.data, source.length) || !text_is_usable(target.data, target.length))
        return text_fail(error, MOE_ERROR_ARGUMENT, "memory", "a text is not valid UTF-8 or contains a NUL byte");
    if (source.length > TEXT_RECALL_BYTES || target.length > TEXT_RECALL_BYTES)
        return text_fail(error, MOE_ERROR_ARGUMENT, "memory", "a text has more than %d bytes", (int)TEXT_RECALL_BYTES);
    if (!source.length || !target.length) return MOE_OK;
    pthread_mutex_lock(&r->lock);
    const int full = r->n >= TEXT_RECALL_MOST, added = !full && add_pair(r, codes, source, target);
    pthread_mutex_unlock(&r->lock);
    if (full)
        return text_fail(error, MOE_ERROR_LIMIT, "memory", "the translation memory has more than %d pairs",
                         (int)TEXT_RECALL_MOST);
    return added ? MOE_OK : text_out_of_memory(error);
}

size_t text_recall_count(text_recall *r) {
    pthread_mutex_lock(&r->lock);
    const size_t n = r->live;
    pthread_mutex_unlock(&r->lock);
    return n;
}

/* ---- 3. Files ------------------------------------------------------------------------------------------ */

static moe_status add_unit(void *user, moe_span source_language, moe_span target_language, moe_span source,
                           moe_span target, moe_error *error) {
    if (source.length > TEXT_RECALL_BYTES || target.length > TEXT_RECALL_BYTES) return MOE_OK;
    return text_recall_add(user, source_language, target_language, source, target, error);
}

moe_status text_recall_read(text_recall *r, const char *data, size_t length, moe_error *error) {
    return text_units_read(data, length, add_unit, r, error);
}

static moe_status read_file(const char *path, text_bytes *data, moe_error *error) {
    FILE *file = fopen(path, "rb");
    int reason = file ? 0 : errno;
    while (file && !reason && data->length <= TEXT_RECALL_FILE && text_room(data, 1 << 16)) {
        const size_t n = fread(data->data + data->length, 1, 1 << 16, file);
        if (ferror(file)) reason = errno ? errno : EIO;
        if (!n) break;
        data->length += n;
    }
    if (file) fclose(file);
    if (reason || data->length > TEXT_RECALL_FILE)
        return text_fail(error, MOE_ERROR_IO, "memory", "cannot read %.100s: %.60s", path,
                         reason ? strerror(reason) : "larger than 1 GiB");
    return data->failed ? text_out_of_memory(error) : MOE_OK;
}

static void add_hash(text_recall *r, const text_bytes *data) {
    sha256 s;
    char own[SHA256_TEXT];
    sha256_begin(&s);
    sha256_add(&s, data->data ? data->data : "", data->length);
    sha256_end(&s, own);
    if (*r->hash) { /* a hash of both hashes */
        sha256_begin(&s);
        sha256_add(&s, r->hash, SHA256_TEXT - 1);
        sha256_add(&s, own, SHA256_TEXT - 1);
        sha256_end(&s, own);
    }
    pthread_mutex_lock(&r->lock);
    memcpy(r->hash, own, sizeof own);
    pthread_mutex_unlock(&r->lock);
}

moe_status text_recall_load(text_recall *r, const char *path, moe_error *error) {
    text_bytes data = { 0 };
    moe_error e;
    moe_status status = read_file(path, &data, error);
    if (!status && (status = text_recall_read(r, data.data ? data.data : "", data.length, &e)))
        text_fail(error, status, "memory", "%.120s: %.40s%s%.120s", path, e.where, *e.where ? ": " : "", e.message);
    if (!status) add_hash(r, &data);
    text_bytes_free(&data);
    return status;
}

const char *text_recall_hash(text_recall *r) { return r->hash; }

/* ---- 4. Adapting --------------------------------------------------------------------------------------- */

/* Return the number of words before the final marks. */
static size_t before_marks(const char *text, const word_list *w) {
    static const char marks[] = ". : ! \xE2\x80\xA6"; /* a question mark changes more than the mark */
    size_t n = w->n;
    while (n > 1 && !w->each[n - 1].kind && text_is_listed(marks, text + w->each[n - 1].begin, w->each[n - 1].length))
        n--;
    return n;
}

static moe_span span_at(const char *text, const word *w) { return (moe_span){ text + w->begin, w->length }; }

/* Return the text of the final marks from word `n` on. */
static moe_span marks_of(moe_span text, const word_list *w, size_t n) {
    const size_t begin = n < w->n ? w->each[n].begin : text.length;
    return (moe_span){ text.data + begin, text.length - begin };
}

/* Return 1 if a number may be replaced: it has a sign inside, such as a version, or no word follows that may agree with
 * it in number. */
static int is_free(const char *text, const word_list *w, size_t i) {
    const moe_span number = span_at(text, &w->each[i]);
    for (size_t k = 0; k < number.length; k++)
        if (number.data[k] == '.' || number.data[k] == ':') return 1;
    const word *next = i + 1 < w->n ? &w->each[i + 1] : NULL;
    return !next || (!next->kind && !text_is_wordlike(text + next->begin, next->length, 0));
}

/* A span of the pair's source and its replacement. */
typedef struct change {
    moe_span from, to;
    size_t n; /* number of times in the source */
} change;

typedef struct changes {
    change each[16];
    size_t n;
} changes;

/* Collect the spans that differ. Return 0 if anything else differs. */
static int find_changes(moe_span text, const word_list *to, const char *source, const word_list *from, size_t n,
                        changes *out) {
    out->n = 0;
    for (size_t i = 0; i < n; i++) {
        const word *a = &from->each[i], *b = &to->each[i];
        const moe_span old = span_at(source, a), new = span_at(text.data, b);
        const int spans = a->kind == b->kind && a->kind;
        size_t k = 0;
        while (k < out->n && !text_same(out->each[k].from, old)) k++;
        if (k < out->n && !text_same(out->each[k].to, new)) return 0;
        if (!spans && !text_same(old, new) && (i || a->alike != b->alike)) return 0; /* the first letter may differ */
        if (!spans) continue;
        if (a->kind == TEXT_SPAN_NUMBER && !text_same(old, new) &&
            (!is_free(source, from, i) || !is_free(text.data, to, i)))
            return 0;
        if (k == out->n && out->n == sizeof out->each / sizeof *out->each) return 0;
        if (k == out->n) out->each[out->n++] = (change){ old, new, 0 };
        out->each[k].n++;
    }
    return 1;
}

/* Append a translation with the changes made. Return 0 if a changed span occurs more or less often than in the source.
 */
static int make_changes(const char *target, const word_list *w, size_t n, changes *c, text_bytes *out) {
    size_t at = 0, counts[sizeof c->each / sizeof *c->each] = { 0 };
    for (size_t i = 0; i < n; i++) {
        const moe_span old = span_at(target, &w->each[i]);
        for (size_t k = 0; k < c->n; k++) {
            if (!text_same(old, c->each[k].from)) continue;
            text_append(out, target + at, w->each[i].begin - at);
            text_append(out, c->each[k].to.data, c->each[k].to.length);
            at = w->each[i].begin + w->each[i].length;
            counts[k]++;
        }
    }
    for (size_t k = 0; k < c->n; k++)
        if (counts[k] != c->each[k].n && !text_same(c->each[k].from, c->each[k].to)) return 0;
    const size_t end = n ? w->each[n - 1].begin + w->each[n - 1].length : 0;
    if (end > at) text_append(out, target + at, end - at);
    return 1;
}

/* Adapt a pair's translation to a text with the words `to`. *made is 0 if this is not possible. */
static int adapt(moe_span text, const word_list *to, const pair *p, text_bytes *out, int *made) {
    const moe_span source = { p->source, strlen(p->source) }, target = { p->target, strlen(p->target) };
    word_list from = { 0 }, in = { 0 };
    changes c;
    *made = 0;
    const int fine = find_words(source, &from) && find_words(target, &in);
    const size_t n = before_marks(text.data, to);
    if (fine && to->each && from.each && in.each && n == before_marks(source.data, &from) &&
        find_changes(text, to, source.data, &from, n, &c)) {
        const size_t at = out->length, end = before_marks(target.data, &in);
        const moe_span old = marks_of(source, &from, n), new = marks_of(text, to, n), own = marks_of(target, &in, end);
        const int same = text_same(old, new);
        if ((same || text_same(own, old) || text_same(own, new)) && make_changes(target.data, &in, end, &c, out)) {
            const moe_span mark = same ? own : new;
            text_append(out, mark.data, mark.length);
            const int raises = n && to->each[0].exact != from.each[0].exact && !to->each[0].kind;
            char first[8] = "";
            const size_t bytes = text_utf8_next(text.data, text.length, 0);
            if (raises && bytes < sizeof first) memcpy(first, text.data, bytes), text_lower_first(first, bytes);
            if (raises && memcmp(first, text.data, bytes) != 0 && !out->failed) /* the text begins with a capital */
                text_upper_case(out->data + at, text_utf8_next(out->data + at, out->length - at, 0));
            *made = 1;
        } else out->length = at;
    }
    free(from.each), free(in.each);
    return fine;
}

/* ---- 5. Finding ---------------------------------------------------------------------------------------- */

static int has_languages(const text_recall *r, const pair *p, const char *source, const char *target) {
    return text_codes_agree(r->languages[p->languages[0]], source) &&
           text_codes_agree(r->languages[p->languages[1]], target);
}

static const pair *find_exact(const text_recall *r, moe_span text, const char *source, const char *target) {
    const uint32_t hash = text_hash(text.data, text.length);
    const pair *best = NULL;
    uint32_t i;
    for (size_t at = 0; (i = text_index_next(&r->sources, hash, &at)) != TEXT_NONE;) {
        const pair *p = &r->pairs[i];
        if (!p->replaced && (!best || p > best) && text_is(text.data, text.length, p->source) &&
            has_languages(r, p, source, target))
            best = p;
    }
    return best;
}

/* Return the edit distance of a text and a pair: 2 for a word that is added, left out or replaced, 1 for one with
 * another case of its first letter, or another span of the same kind. Return more than `limit` if the distance is
 * larger. */
static uint32_t distance_to(const text_recall *r, const pair *p, uint32_t limit) {
    const word *a = r->found.each;
    const size_t n = r->found.n, m = p->n, band = limit / 2 + 1;
    uint32_t *before = r->rows, *now = r->rows + TEXT_RECALL_WORDS + 1;
    const uint32_t far = limit + 1;
    for (size_t k = 0; k <= m; k++) before[k] = k <= band ? (uint32_t)(2 * k) : far;
    for (size_t i = 1; i <= n; i++) {
        const size_t low = i > band ? i - band : 1, high = i + band < m ? i + band : m;
        uint32_t least = now[low - 1] = low == 1 && i <= band ? (uint32_t)(2 * i) : far;
        for (size_t k = low; k <= high; k++) {
            const uint32_t *w = p->words + 2 * (k - 1);
            uint32_t cost = before[k - 1] + (a[i - 1].exact == w[0] ? 0 : a[i - 1].alike == w[1] ? 1 : 2);
            if (before[k] + 2 < cost) cost = before[k] + 2;
            if (now[k - 1] + 2 < cost) cost = now[k - 1] + 2;
            now[k] = cost;
            if (cost < least) least = cost;
        }
        if (high < m) now[high + 1] = far;
        if (least > limit) return far;
        uint32_t *swap = before;
        before = now, now = swap;
    }
    return before[m];
}

/* The best pair so far. */
typedef struct best {
    const pair *pair;
    uint32_t distance, words; /* `words` of the longer text */
} best;

/* Return the largest distance that is at least as similar as the best pair, and as TEXT_FUZZY. */
static uint32_t limit_of(const best *b, uint32_t words) {
    const uint32_t fuzzy = 6 * words / 10;
    const uint32_t equal = b->pair ? (uint32_t)((uint64_t)b->distance * words / b->words) : fuzzy;
    return equal < fuzzy ? equal : fuzzy;
}

static void consider(const text_recall *r, uint32_t number, const char *source, const char *target, best *b) {
    const pair *p = &r->pairs[number];
    const uint32_t n = (uint32_t)r->found.n, longer = p->n > n ? p->n : n, shorter = p->n > n ? n : p->n;
    const uint32_t limit = limit_of(b, longer);
    if (p->replaced || 2 * (longer - shorter) > limit || !has_languages(r, p, source, target)) return;
    const uint32_t distance = distance_to(r, p, limit);
    if (distance > limit) return;
    const uint64_t own = (uint64_t)distance * (b->pair ? b->words : 1),
                   other = b->pair ? (uint64_t)b->distance * longer : UINT64_MAX;
    if (own < other || (own == other && p > b->pair)) *b = (best){ p, distance, longer };
}

static int compare_postings(const void *a, const void *b) {
    const posting *x = *(const posting *const *)a, *y = *(const posting *const *)b;
    const size_t i = x ? x->n : 0, k = y ? y->n : 0;
    return i < k ? -1 : i > k;
}

/* Find the most similar pair. A similar text shares all but three tenths of the words, so it has one of any larger set
 * of them: search the rarest. */
static best find_similar(text_recall *r, const char *source, const char *target) {
    const posting *of[TEXT_RECALL_WORDS];
    best b = { 0 };
    const size_t n = r->found.n;
    for (size_t i = 0; i < n; i++) {
        size_t at = 0;
        const uint32_t k = text_index_next(&r->words, r->found.each[i].alike, &at);
        of[i] = k == TEXT_NONE ? NULL : &r->postings[k];
    }
    qsort(of, n, sizeof *of, compare_postings);
    if (!++r->searches) memset(r->seen, 0, r->n * sizeof *r->seen), r->searches = 1;
    for (size_t i = 0; i < 3 * n / 10 + 1; i++)
        for (size_t k = 0; of[i] && k < of[i]->n; k++) {
            const uint32_t number = of[i]->pairs[k];
            if (r->seen[number] == r->searches) continue;
            r->seen[number] = r->searches;
            consider(r, number, source, target, &b);
        }
    return b;
}

static moe_status find(text_recall *r, moe_span text, const char *source, const char *target, text_match *match,
                       text_bytes *out, moe_error *error) {
    const pair *exact = find_exact(r, text, source, target);
    int made = 0;
    if (exact) {
        *match = (text_match){ TEXT_MATCH_EXACT, 1, exact->source, exact->target };
        text_append_string(out, exact->target);
        return MOE_OK;
    }
    if (text.length > TEXT_RECALL_BYTES || memchr(text.data, '\n', text.length)) return MOE_OK;
    if (!find_words(text, &r->found)) return text_out_of_memory(error);
    if (!r->found.n || r->found.n > TEXT_RECALL_WORDS) return MOE_OK;
    const best b = find_similar(r, source, target);
    if (!b.pair) return MOE_OK;
    const float similarity = 1 - (float)b.distance / (2 * (float)b.words);
    *match = (text_match){ TEXT_MATCH_FUZZY, similarity, b.pair->source, b.pair->target };
    if (!adapt(text, &r->found, b.pair, out, &made)) return text_out_of_memory(error);
    if (made) match->kind = TEXT_MATCH_ADAPTED;
    return MOE_OK;
}

moe_status text_recall_find(text_recall *r, moe_span text, const char *source, const char *target, text_match *match,
                            text_bytes *out, moe_error *error) {
    const moe_span core = trimmed(text);
    const size_t at = out->length, before = core.length ? (size_t)(core.data - text.data) : 0;
    *match = (text_match){ .kind = TEXT_MATCH_NONE };
    if (!core.length || !text_is_usable(core.data, core.length)) return MOE_OK;
    text_append(out, text.data, before);
    pthread_mutex_lock(&r->lock);
    const moe_status status = find(r, core, source ? source : "", target ? target : "", match, out, error);
    pthread_mutex_unlock(&r->lock);
    if (match->kind >= TEXT_MATCH_ADAPTED)
        text_append(out, core.data + core.length, text.length - before - core.length);
    else out->length = at;
    return status || !out->failed ? status : text_out_of_memory(error);
}

/* ---- 6. Comparing -------------------------------------------------------------------------------------- */

static int compare_hashes(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Return the sorted hashes of the trigrams of bytes, in a malloc'ed array. */
static uint32_t *trigrams(moe_span s, size_t *n) {
    *n = s.length > 2 ? s.length - 2 : 0;
    uint32_t *all = malloc((*n + 1) * sizeof *all);
    for (size_t i = 0; all && i < *n; i++)
        all[i] = (uint32_t)(unsigned char)s.data[i] << 16 | (uint32_t)(unsigned char)s.data[i + 1] << 8 |
                 (unsigned char)s.data[i + 2];
    if (all) qsort(all, *n, sizeof *all, compare_hashes);
    return all;
}

moe_status text_recall_compare(moe_span a, moe_span b, float *similarity, moe_error *error) {
    size_t n, m, same = 0;
    uint32_t *x = trigrams(a, &n), *y = trigrams(b, &m);
    const int fine = x && y;
    for (size_t i = 0, k = 0; fine && i < n && k < m;) {
        same += x[i] == y[k];
        if (x[i] == y[k]) i++, k++;
        else if (x[i] < y[k]) i++;
        else k++;
    }
    *similarity = n + m ? 2 * (float)same / (float)(n + m) : (float)text_same(a, b);
    free(x), free(y);
    return fine ? MOE_OK : text_out_of_memory(error);
}
