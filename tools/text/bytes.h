/* bytes.h - errors, arrays, growable bytes, UTF-8, and a hash index.
 *
 * Nothing here prints, exits or calls the engine.
 */
#ifndef TEXT_BYTES_H
#define TEXT_BYTES_H

#include "moe.h"

#include <stddef.h>
#include <stdint.h>

/* ---- 1. Errors and arrays ------------------------------------------------------------------------------ */

/* Fill an error (may be NULL) and return its code. */
moe_status text_fail(moe_error *error, moe_status code, const char *where, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 4, 5)))
#endif
    ;
static inline moe_status text_out_of_memory(moe_error *error) {
    text_fail(error, MOE_ERROR_MEMORY, "", "out of memory");
    return MOE_ERROR_MEMORY;
}
/* Grow an array to at least `n` elements of `size` bytes. `array` points to its pointer; nothing changes on failure. */
moe_status text_reserve(void *array, size_t *capacity, size_t n, size_t size, moe_error *error);
/* Append `count` elements to an array of *n elements. */
moe_status text_add(void *array, size_t *n, size_t *capacity, const void *from, size_t count, size_t size,
                    moe_error *error);

/* ---- 2. Growable bytes --------------------------------------------------------------------------------- */

/* Growable bytes, all zero if empty. `data` is malloc'ed. After a failed allocation, `failed` is set and writes do
 * nothing, so a sequence of writes needs one check at its end; text_clear resets `failed`. */
typedef struct text_bytes {
    char *data;
    size_t length, capacity;
    int failed;
} text_bytes;

int text_room(text_bytes *bytes, size_t more); /* reserve `more` bytes and a final NUL; 0 if out of memory */
void text_append(text_bytes *bytes, const char *data, size_t length);
void text_append_string(text_bytes *bytes, const char *string);
void text_printf(text_bytes *bytes, const char *format, ...) /* appends at most 511 bytes */
#ifdef __GNUC__
    __attribute__((format(printf, 2, 3)))
#endif
    ;
void text_append_float(text_bytes *bytes, float value); /* the shortest decimal that parses to this float */
/* Append text that is safe for terminals: replace controls and invalid UTF-8 with U+FFFD, line ends and TABs with
 * spaces. */
void text_append_clean(text_bytes *bytes, const char *data, size_t length);
void text_clean(char *text); /* the same in place, with ? instead of U+FFFD */
/* Find the first unsafe bytes. Return the number of safe bytes before them. Set *skip to the number of unsafe bytes (0
 * if none) and *instead to their replacement. */
size_t text_fit(const char *data, size_t length, size_t *skip, const char **instead);
void text_clear(text_bytes *bytes);
void text_bytes_free(text_bytes *bytes);
void text_bytes_free_all(text_bytes *const *all, size_t n);

/* Token ids, and offsets of tokens in a text, all zero if empty. `data` is malloc'ed. */
typedef struct text_ids {
    int32_t *data;
    size_t length, capacity;
} text_ids;

typedef struct text_offsets {
    uint32_t *data;
    size_t length, capacity;
} text_offsets;

/* Grow a block to at least `n` elements of `size` bytes. Return NULL and keep the block if out of memory. */
void *text_grown(void *block, size_t *capacity, size_t n, size_t size);

/* ---- 3. UTF-8 ------------------------------------------------------------------------------------------ */

/* Return the offset of the first byte that is not well-formed UTF-8 (no surrogates, not overlong), or `length`. */
size_t text_utf8_valid(const char *data, size_t length);
int text_is_usable(const char *data, size_t length); /* 1 for valid UTF-8 without NUL; NULL is an empty text */
/* Return how many bytes follow the first byte of a character, or -1. The next byte must be in [*low, *high]. */
int text_utf8_lead(unsigned char c, unsigned char *low, unsigned char *high);
/* Return the largest offset <= limit that does not split a character of valid UTF-8. */
size_t text_utf8_cut(const char *data, size_t length, size_t limit);
size_t text_utf8_count(const char *data, size_t length); /* number of characters in valid UTF-8 */
/* Return the character at `at` in valid UTF-8, and set *bytes to its length. */
uint32_t text_utf8_decode(const char *data, size_t length, size_t at, size_t *bytes);
size_t text_utf8_next(const char *data, size_t length, size_t at); /* the end of the character at `at` */

/* ---- 4. Words ------------------------------------------------------------------------------------------ */

char *text_copy(const char *data, size_t length); /* NUL-terminated; NULL if out of memory */
int text_is(const char *data, size_t length, const char *other);
int text_begins_with(const char *data, size_t length, const char *begin);
int text_ends_with(const char *data, size_t length, const char *end);
/* Return the length of the first word of `list` (separated by spaces) that is a prefix of the text, or 0. */
size_t text_prefix(const char *list, const char *data, size_t length);
int text_is_listed(const char *list, const char *word, size_t length);

/* ---- 5. Index ------------------------------------------------------------------------------------------ */

/* An index of entries by the hash of their keys, all zero if empty. The caller stores entries and compares keys. */
typedef struct text_slot {
    uint32_t hash, entry; /* entry + 1; 0 if free */
} text_slot;

typedef struct text_index {
    text_slot *slots;
    size_t size, count; /* size is a power of two, or 0 */
} text_index;

#define TEXT_NONE UINT32_MAX

uint32_t text_hash(const char *data, size_t length);
/* Return the next entry with this hash, or TEXT_NONE after the last one. *at must be 0 in the first call. */
uint32_t text_index_next(const text_index *index, uint32_t hash, size_t *at);
int text_index_add(text_index *index, uint32_t hash, size_t entry); /* 0 if out of memory, or at 2^32 - 1 entries */
void text_index_free(text_index *index);

#endif
