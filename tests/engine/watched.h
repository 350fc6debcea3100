/* watched.h - includes moe.c in a test program and counts direct calls to malloc by moe.c, which must not occur with a
 * custom allocator. */
#ifndef WATCHED_H
#define WATCHED_H

#if !defined(_POSIX_C_SOURCE) && !defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE /* as in moe.c, which this file includes after system headers */
#endif
#if defined(__APPLE__)
#define _DARWIN_C_SOURCE
#endif
#include <stdatomic.h>
#include <stdlib.h>

static atomic_size_t direct_allocations;
static void *direct_malloc(size_t n) {
    atomic_fetch_add(&direct_allocations, 1);
    return malloc(n);
}
static inline void *direct_realloc(void *p, size_t n) {
    atomic_fetch_add(&direct_allocations, 1);
    return realloc(p, n);
}
#define malloc(n) direct_malloc(n)
#define realloc(p, n) direct_realloc(p, n)
#include "moe.c"
#undef malloc
#undef realloc

#include "model_writer.h"

#include "tests/test.h"

#endif /* WATCHED_H */
