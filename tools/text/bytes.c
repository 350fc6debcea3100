/* bytes.c - see bytes.h. The sections have the same numbers. */
#include "tools/text/bytes.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- 1. Errors and arrays ------------------------------------------------------------------------------ */

moe_status text_fail(moe_error *error, moe_status code, const char *where, const char *format, ...) {
    if (!error) return code;
    error->code = code;
    snprintf(error->where, sizeof error->where, "%s", where);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    text_clean(error->where);
    text_clean(error->message);
    return code;
}

moe_status text_reserve(void *array, size_t *capacity, size_t n, size_t size, moe_error *error) {
    void *block; /* copied, because a T * must not be accessed as a void * */
    memcpy(&block, array, sizeof block);
    if (!(block = text_grown(block, capacity, n, size))) return text_out_of_memory(error);
    memcpy(array, &block, sizeof block);
    return MOE_OK;
}

moe_status text_add(void *array, size_t *n, size_t *capacity, const void *from, size_t count, size_t size,
                    moe_error *error) {
    char *block;
    const moe_status status = count ? text_reserve(array, capacity, *n + count, size, error) : MOE_OK;
    if (status || !count) return status;
    memcpy(&block, array, sizeof block);
    memcpy(block + *n * size, from, count * size);
    *n += count;
    return MOE_OK;
}

/* ---- 2. Growable bytes --------------------------------------------------------------------------------- */

int text_room(text_bytes *bytes, size_t more) {
    if (bytes->failed) return 0;
    size_t need = bytes->length + more + 1;
    if (need <= more) return bytes->failed = 1, 0;
    if (need <= bytes->capacity) return 1;
    size_t wanted = bytes->capacity + bytes->capacity / 2;
    if (wanted < need) wanted = need;
    if (wanted < 64) wanted = 64;
    char *data = realloc(bytes->data, wanted);
    if (!data) return bytes->failed = 1, 0;
    bytes->data = data;
    bytes->capacity = wanted;
    return 1;
}

void text_append(text_bytes *bytes, const char *data, size_t length) {
    if (!text_room(bytes, length)) return;
    if (length) memcpy(bytes->data + bytes->length, data, length);
    bytes->length += length;
    bytes->data[bytes->length] = '\0'; /* append a NUL, which is not counted */
}

void text_append_string(text_bytes *bytes, const char *string) { text_append(bytes, string, strlen(string)); }

void text_printf(text_bytes *bytes, const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (n > 0) text_append(bytes, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
}

void text_append_float(text_bytes *bytes, float value) {
    char digits[32];
    for (int precision = 6; precision <= 9; precision++) {
        snprintf(digits, sizeof digits, "%.*g", precision, (double)value);
        if (strtof(digits, NULL) == value) break;
    }
    text_append_string(bytes, digits);
}

/* Return the length of a control (C1 is C2 80 .. C2 9F), line end or bidirectional control, all unsafe for a terminal,
 * or 0. */
static size_t unfit(const unsigned char *s) {
    if (s[0] < 0x20 || s[0] == 0x7F) return 1;
    if (s[0] == 0xC2) return s[1] < 0xA0 ? 2 : 0;
    if (s[0] != 0xE2) return 0;
    const int lines_and_overrides = s[1] == 0x80 && s[2] >= 0xA8 && s[2] <= 0xAE; /* U+2028 .. U+202E */
    const int isolates = s[1] == 0x81 && s[2] >= 0xA6 && s[2] <= 0xA9;            /* U+2066 .. U+2069 */
    return lines_and_overrides || isolates ? 3 : 0;
}

size_t text_fit(const char *data, size_t length, size_t *skip, const char **instead) {
    enum { WINDOW = 64 }; /* enough, because callers continue after each unsafe character */
    *instead = "\xEF\xBF\xBD";
    for (size_t run = 0, good; run < length;) {
        good = text_utf8_valid(data + run, length - run < WINDOW ? length - run : WINDOW);
        if (!good) return *skip = 1, run;
        for (const size_t end = run + good; run < end; run++) {
            if (!(*skip = unfit((const unsigned char *)data + run))) continue;
            if (data[run] == '\n' || data[run] == '\t') *instead = " ";
            return run;
        }
    }
    *skip = 0;
    return length;
}

void text_append_clean(text_bytes *bytes, const char *data, size_t length) {
    const char *instead;
    for (size_t i = 0, skip; i < length; i += skip) {
        const size_t run = text_fit(data + i, length - i, &skip, &instead);
        text_append(bytes, data + i, run);
        if (skip) text_append_string(bytes, instead);
        i += run;
    }
    text_append(bytes, "", 0);
}

void text_clean(char *text) {
    const char *instead;
    for (size_t at = 0, skip = 1, length = strlen(text); at < length && skip; at += skip) {
        at += text_fit(text + at, length - at, &skip, &instead);
        memset(text + at, *instead == ' ' ? ' ' : '?', skip);
    }
}

void text_clear(text_bytes *bytes) { bytes->length = 0, bytes->failed = 0; }

void text_bytes_free(text_bytes *bytes) {
    free(bytes->data);
    *bytes = (text_bytes){ 0 };
}

void text_bytes_free_all(text_bytes *const *all, size_t n) {
    for (size_t i = 0; i < n; i++) text_bytes_free(all[i]);
}

void *text_grown(void *block, size_t *capacity, size_t n, size_t size) {
    if (block && n <= *capacity) return block;
    const size_t wanted = n + n / 2 + 1;
    void *larger = wanted < n || wanted > SIZE_MAX / size ? NULL : realloc(block, wanted * size);
    if (larger) *capacity = wanted;
    return larger;
}

/* ---- 3. UTF-8 ------------------------------------------------------------------------------------------ */

int text_utf8_lead(unsigned char c, unsigned char *low, unsigned char *high) {
    *low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;  /* smaller bytes are overlong */
    *high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF; /* greater bytes encode surrogates or exceed U+10FFFF */
    return c < 0x80 ? 0 : c < 0xC2 ? -1 : c < 0xE0 ? 1 : c < 0xF0 ? 2 : c < 0xF5 ? 3 : -1;
}

size_t text_utf8_valid(const char *data, size_t length) {
    const unsigned char *s = (const unsigned char *)data;
    for (size_t i = 0, k; i < length; i += k) {
        unsigned char low, high;
        k = 1;
        if (s[i] < 0x80) continue;
        const int more = text_utf8_lead(s[i], &low, &high);
        if (more < 0 || length - i <= (size_t)more) return i;
        for (; k <= (size_t)more; k++, low = 0x80, high = 0xBF)
            if (s[i + k] < low || s[i + k] > high) return i;
    }
    return length;
}

int text_is_usable(const char *data, size_t length) {
    return text_utf8_valid(data, length) == length && !(length && memchr(data, '\0', length));
}

size_t text_utf8_cut(const char *data, size_t length, size_t limit) {
    if (limit >= length) return length;
    while (limit && ((unsigned char)data[limit] & 0xC0) == 0x80) limit--;
    return limit;
}

size_t text_utf8_count(const char *data, size_t length) {
    size_t count = 0;
    for (size_t i = 0; i < length; i++) count += ((unsigned char)data[i] & 0xC0) != 0x80;
    return count;
}

uint32_t text_utf8_decode(const char *data, size_t length, size_t at, size_t *bytes) {
    const unsigned char c = (unsigned char)data[at];
    uint32_t code = c < 0x80 ? c : c < 0xE0 ? c & 0x1Fu : c < 0xF0 ? c & 0x0Fu : c & 0x07u;
    *bytes = c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    if (*bytes > length - at) *bytes = length - at;
    for (size_t i = 1; i < *bytes; i++) code = code << 6 | ((unsigned char)data[at + i] & 0x3Fu);
    return code;
}

size_t text_utf8_next(const char *data, size_t length, size_t at) {
    do at++;
    while (at < length && ((unsigned char)data[at] & 0xC0) == 0x80);
    return at;
}

/* ---- 4. Words ------------------------------------------------------------------------------------------ */

char *text_copy(const char *data, size_t length) {
    char *copy = malloc(length + 1);
    if (!copy) return NULL;
    if (length) memcpy(copy, data, length);
    copy[length] = '\0';
    return copy;
}

int text_is(const char *s, size_t length, const char *other) {
    return length == strlen(other) && (!length || memcmp(s, other, length) == 0);
}

int text_begins_with(const char *s, size_t length, const char *begin) {
    const size_t n = strlen(begin);
    return length >= n && memcmp(s, begin, n) == 0;
}

int text_ends_with(const char *s, size_t length, const char *end) {
    const size_t n = strlen(end);
    return length >= n && memcmp(s + length - n, end, n) == 0;
}

/* Return how many bytes of the first word of `list` a text begins with. */
static size_t common(const char *list, const char *s, size_t length) {
    size_t n = 0;
    while (n < length && list[n] == s[n] && list[n] && list[n] != ' ') n++;
    return n;
}

static int ends_word(char c) { return !c || c == ' '; }

static const char *next_word(const char *list) {
    while (!ends_word(*list)) list++;
    return list + (*list == ' ');
}

size_t text_prefix(const char *list, const char *s, size_t length) {
    for (; *list; list = next_word(list)) {
        const size_t n = common(list, s, length);
        if (ends_word(list[n])) return n;
    }
    return 0;
}

int text_is_listed(const char *list, const char *word, size_t length) {
    for (; *list; list = next_word(list))
        if (common(list, word, length) == length && ends_word(list[length])) return 1;
    return 0;
}

/* ---- 5. Index ------------------------------------------------------------------------------------------ */

uint32_t text_hash(const char *data, size_t length) { /* FNV-1a, halves xored */
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < length; i++) h = (h ^ (unsigned char)data[i]) * UINT64_C(0x100000001b3);
    return (uint32_t)(h ^ h >> 32);
}

uint32_t text_index_next(const text_index *index, uint32_t hash, size_t *at) {
    while (index->size) {
        const text_slot *slot = &index->slots[(hash + (*at)++) & (index->size - 1)];
        if (!slot->entry) break;
        if (slot->hash == hash) return slot->entry - 1;
    }
    return TEXT_NONE;
}

static void index_put(text_index *index, text_slot slot) {
    size_t at = slot.hash & (index->size - 1);
    while (index->slots[at].entry) at = (at + 1) & (index->size - 1);
    index->slots[at] = slot;
}

int text_index_add(text_index *index, uint32_t hash, size_t entry) {
    if (entry >= TEXT_NONE) return 0;
    if (2 * (index->count + 1) > index->size) { /* at least half of the slots are free, so searches are short */
        text_index grown = { .size = index->size ? 2 * index->size : 64 };
        if (!(grown.slots = calloc(grown.size, sizeof *grown.slots))) return 0;
        for (size_t i = 0; i < index->size; i++)
            if (index->slots[i].entry) index_put(&grown, index->slots[i]);
        grown.count = index->count;
        free(index->slots);
        *index = grown;
    }
    index_put(index, (text_slot){ hash, (uint32_t)entry + 1 });
    index->count++;
    return 1;
}

void text_index_free(text_index *index) {
    free(index->slots);
    *index = (text_index){ 0 };
}
