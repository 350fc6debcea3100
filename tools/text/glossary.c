/* glossary.c - glossary.h says what this is and has the contracts. */
#define _POSIX_C_SOURCE 200809L
#include "tools/text/glossary.h"
#include "tools/text/spans.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TERM = 200 }; /* bytes of either side */

static moe_status fail(moe_error *error, moe_status code, const char *where, const char *message) {
    if (!error) return code;
    error->code = code;
    snprintf(error->where, sizeof error->where, "%s", where);
    snprintf(error->message, sizeof error->message, "%s", message);
    return code;
}

static moe_status out_of_memory(moe_error *error) { return fail(error, MOE_ERROR_MEMORY, "", "out of memory"); }

/* The array with room for one element more; NULL: no memory, and it is as it was. */
static void *room_for(void *array, size_t n, size_t *capacity, size_t size) {
    if (n < *capacity) return array;
    const size_t wanted = *capacity ? 2 * *capacity : 8;
    void *larger = realloc(array, wanted * size);
    if (larger) *capacity = wanted;
    return larger;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

struct text_glossary {
    const text_front *targets;
    text_term *terms;
    size_t n_terms, capacity;
    text_index index; /* terms by the hash of their first word */
};

/* The bytes of the word, or of the sign, at text[at]. */
size_t text_word_length(const char *text, size_t length, size_t at) {
    size_t end = at;
    while (text_is_wordlike(text, length, end)) {
        end++;
        while (end < length && ((unsigned char)text[end] & 0xC0) == 0x80) end++;
    }
    if (end > at) return end - at;
    for (end = at + 1; end < length && ((unsigned char)text[end] & 0xC0) == 0x80; end++) {}
    return end - at;
}

/* The hash of a word with a small first letter: a term is found at the beginning of a sentence as well. */
static uint32_t word_hash(const char *word, size_t length) {
    char small[MAX_TERM];
    length = least(length, sizeof small);
    memcpy(small, word, length);
    text_calm_first(small, length);
    return text_hash(small, length);
}

static moe_status add_term(text_glossary *g, const char *line, size_t length, moe_error *error) {
    const char *tab = memchr(line, '\t', length);
    const char *other = tab ? tab + 1 : line;
    const size_t source = tab ? (size_t)(tab - line) : length, target = tab ? length - source - 1 : length;
    if (!source || !target || source > MAX_TERM || target > MAX_TERM || memchr(other, '\t', target) ||
        text_utf8_valid(line, length) < length || memchr(line, '\0', length))
        return fail(error, MOE_ERROR_ARGUMENT, "",
                    "a term is source TAB target, or a name that stays, in UTF-8, each of at most 200 bytes");
    text_term *larger = room_for(g->terms, g->n_terms, &g->capacity, sizeof *larger);
    if (!larger) return out_of_memory(error);
    g->terms = larger;
    text_term *t = &g->terms[g->n_terms];
    *t = (text_term){ .length = source, .stays = source == target && memcmp(line, other, source) == 0 };
    t->source = strndup(line, source);
    t->target = strndup(other, target);
    g->n_terms++;
    if (!t->source || !t->target ||
        !text_index_add(&g->index, word_hash(line, text_word_length(line, source, 0)), g->n_terms - 1))
        return out_of_memory(error);
    const moe_status status = text_encode(g->targets, t->target, target, &t->ids, error);
    if (!status && !t->ids.length) return fail(error, MOE_ERROR_ARGUMENT, "", "the target of a term is blank");
    return status;
}

static moe_status read_glossary(text_glossary *g, const char *path, moe_error *error) {
    FILE *file = fopen(path, "r");
    char *line = NULL, why[200];
    size_t capacity = 0, number = 0;
    ssize_t length;
    moe_status status = MOE_OK;
    if (!file) {
        snprintf(why, sizeof why, "cannot open %.100s: %.60s", path, strerror(errno));
        return fail(error, MOE_ERROR_IO, "glossary", why);
    }
    while (!status && (length = getline(&line, &capacity, file)) >= 0) {
        char *begin = line;
        if (!number++ && length >= 3 && memcmp(line, "\xEF\xBB\xBF", 3) == 0) begin += 3, length -= 3;
        while (length && strchr(" \r\n", begin[length - 1])) length--;
        if (!length || *begin == '#') continue;
        status = add_term(g, begin, (size_t)length, error);
        if (status && error) snprintf(error->where, sizeof error->where, "glossary, line %zu", number);
    }
    if (!status && ferror(file)) status = fail(error, MOE_ERROR_IO, "glossary", strerror(errno));
    free(line);
    fclose(file);
    return status;
}

moe_status text_glossary_open(const text_front *targets, const char *path, text_glossary **out, moe_error *error) {
    text_glossary *g = calloc(1, sizeof *g);
    if (!g) return out_of_memory(error);
    g->targets = targets;
    const moe_status status = read_glossary(g, path, error);
    if (status) return text_glossary_free(g), status;
    *out = g;
    return MOE_OK;
}

void text_glossary_free(text_glossary *g) {
    if (!g) return;
    for (size_t i = 0; i < g->n_terms; i++) {
        free(g->terms[i].source);
        free(g->terms[i].target);
        text_ids_free(&g->terms[i].ids);
    }
    free(g->terms);
    text_index_free(&g->index);
    free(g);
}

/* The longest term at text[at], as it is written or with a capital first letter; of several the last. NULL: none. */
const text_term *text_glossary_find(const text_glossary *g, const char *text, size_t length, size_t at, size_t *bytes) {
    const text_term *best = NULL;
    if (!g->n_terms) return NULL;
    const uint32_t hash = word_hash(text + at, text_word_length(text, length, at));
    uint32_t entry;
    for (size_t i = 0; (entry = text_index_next(&g->index, hash, &i)) != TEXT_NONE;) {
        const text_term *t = &g->terms[entry];
        char first[MAX_TERM + 1];
        if (t->length > length - at || (best && t->length < best->length)) continue;
        memcpy(first, text + at, t->length);
        if (memcmp(first, t->source, t->length) != 0) text_calm_first(first, t->length);
        if (memcmp(first, t->source, t->length) == 0 &&
            !(text_is_wordlike(text, length, at + t->length) && text_is_wordlike(t->source, t->length, t->length - 1)))
            best = t;
    }
    if (best) *bytes = best->length;
    return best;
}
