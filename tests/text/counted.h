/* counted.h - counts the bytes that some C library functions read. test_linear.c measures scanners that
 * are compiled with this header, and with -fsanitize-coverage=trace-pc, which counts basic blocks.
 */
#ifndef TESTS_COUNTED_H
#define TESTS_COUNTED_H

#define _GNU_SOURCE /* memmem */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#undef _DEFAULT_SOURCE /* <features.h> defines this macro, and some sources define it again */

extern unsigned long long counted_steps;

static inline size_t counted(size_t bytes) {
    counted_steps += bytes / 8;
    return bytes;
}

static inline void *counted_memchr(const void *s, int c, size_t n) {
    const char *found = memchr(s, c, n);
    counted(found ? (size_t)(found - (const char *)s) : n);
    return (void *)found;
}

static inline void *counted_memmem(const void *s, size_t n, const void *word, size_t length) {
    const char *found = memmem(s, n, word, length);
    counted(found ? (size_t)(found - (const char *)s) : n);
    return (void *)found;
}

static inline int counted_memcmp(const void *a, const void *b, size_t n) {
    size_t same = 0;
    while (same < n && ((const char *)a)[same] == ((const char *)b)[same]) same++;
    counted(same);
    return memcmp(a, b, n);
}

static inline char *counted_strstr(const char *s, const char *word) {
    const char *found = strstr(s, word);
    counted(found ? (size_t)(found - s) : (strlen)(s));
    return (char *)(uintptr_t)found;
}

static inline size_t counted_strcspn(const char *s, const char *reject) { return counted(strcspn(s, reject)); }

#define memchr(s, c, n) counted_memchr(s, c, n)
#define memmem(s, n, word, length) counted_memmem(s, n, word, length)
#define strstr(s, word) counted_strstr(s, word)
#define memcmp(a, b, n) counted_memcmp(a, b, n)
#define memcpy(to, from, n) memcpy(to, from, counted(n))
#define memmove(to, from, n) memmove(to, from, counted(n))
#define memset(to, c, n) memset(to, c, counted(n))
#define strlen(s) counted(strlen(s))
#define strcspn(s, reject) counted_strcspn(s, reject)
#define realloc(block, n) realloc(block, counted(n))

#endif
