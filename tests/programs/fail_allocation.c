/* fail_allocation.c - LD_PRELOAD library for test_allocations.py that makes allocations fail. tests/text/test_memory.c
 * includes it with FAIL_WITHIN defined, and sets `at`, `above` and `counting` itself.
 *
 *   FAIL_AT=N         only the Nth allocation after the start of main fails
 *   FAIL_ABOVE=BYTES  allocations fail if more than BYTES bytes allocated since the start of main would be live
 *   FAIL_FD=FD        a byte is written to this descriptor for each failed allocation
 *
 * Allocations before main succeed because the constructors of the C++ libraries cannot handle failures.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *memory);

static atomic_int counting;
static atomic_llong count, failed, blocks, live, at = -1, above = -1;
static int report = -1;

#pragma GCC visibility push(default)

static int fails(size_t bytes) {
    if (!counting) return 0;
    if (atomic_fetch_add(&count, 1) + 1 != at && (above < 0 || live + (long long)bytes <= above)) return 0;
    atomic_fetch_add(&failed, 1);
    const int kept = errno;
    if (report >= 0 && write(report, "x", 1) < 0) _exit(99);
    errno = kept;
    return 1;
}

static void *counted(void *memory) {
    if (memory && counting) atomic_fetch_add(&live, (long long)malloc_usable_size(memory));
    if (!memory) errno = ENOMEM;
    else atomic_fetch_add(&blocks, 1);
    return memory;
}

void *malloc(size_t bytes) { return counted(fails(bytes) ? NULL : __libc_malloc(bytes)); }

void *calloc(size_t n, size_t bytes) { return counted(fails(n * bytes) ? NULL : __libc_calloc(n, bytes)); }

void *realloc(void *old, size_t bytes) {
    if (fails(bytes)) return errno = ENOMEM, NULL;
    if (old && counting) atomic_fetch_sub(&live, (long long)malloc_usable_size(old));
    if (old) atomic_fetch_sub(&blocks, 1);
    return counted(__libc_realloc(old, bytes));
}

void *memalign(size_t alignment, size_t bytes) {
    return counted(fails(bytes) ? NULL : __libc_memalign(alignment, bytes));
}

void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    void *memory = memalign(alignment, bytes);
    if (memory) *out = memory;
    return memory ? 0 : ENOMEM;
}

void free(void *memory) {
    if (memory && counting) atomic_fetch_sub(&live, (long long)malloc_usable_size(memory));
    if (memory) atomic_fetch_sub(&blocks, 1);
    __libc_free(memory);
}

void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (fails(0)) return errno = ENOMEM, MAP_FAILED; /* mappings do not count as live bytes */
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, fd, offset);
}

#pragma GCC visibility pop

#ifndef FAIL_WITHIN
static int (*real_main)(int, char **, char **);

static long long number(const char *name) {
    const char *text = getenv(name);
    return text ? atoll(text) : -1;
}

static int counted_main(int argc, char **argv, char **environment) {
    at = number("FAIL_AT"), above = number("FAIL_ABOVE"), report = (int)number("FAIL_FD");
    counting = 1;
    const int status = real_main(argc, argv, environment);
    counting = 0;
    return status;
}

int __libc_start_main(int (*begin)(int, char **, char **), int argc, char **argv, void (*init)(void),
                      void (*fini)(void), void (*rtld_fini)(void), void *stack_end);

int __libc_start_main(int (*begin)(int, char **, char **), int argc, char **argv, void (*init)(void),
                      void (*fini)(void), void (*rtld_fini)(void), void *stack_end) {
    __typeof__(&__libc_start_main) start;
    *(void **)&start = dlsym(RTLD_NEXT, "__libc_start_main");
    real_main = begin;
    return start(counted_main, argc, argv, init, fini, rtld_fini, stack_end);
}
#endif
