/* fuzz.h - helpers for the fuzz targets: assertions, random numbers, a temporary folder. */
#ifndef FUZZ_H
#define FUZZ_H

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerCustomCrossOver(const uint8_t *data1, size_t size1, const uint8_t *data2, size_t size2, uint8_t *out,
                                 size_t max_out, unsigned seed);

/* A copy of standard error for findings, because -close_fd_mask closes the original. */
static int fuzz_out = STDERR_FILENO;

__attribute__((constructor)) static void fuzz_keep_stderr(void) { fuzz_out = dup(STDERR_FILENO); }

/* Report a finding and abort, so that libFuzzer keeps the input. */
#define FUZZ_CHECK(condition, ...)                                    \
    do {                                                              \
        if (!(condition)) {                                           \
            dprintf(fuzz_out, "FINDING %s:%d: ", __FILE__, __LINE__); \
            dprintf(fuzz_out, __VA_ARGS__);                           \
            dprintf(fuzz_out, "\n");                                  \
            abort();                                                  \
        }                                                             \
    } while (0)

/* ---- Random numbers ---- */

static inline uint64_t fuzz_next(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static inline size_t fuzz_below(uint64_t *state, size_t n) { return n ? (size_t)(fuzz_next(state) % n) : 0; }
static inline int fuzz_one_in(uint64_t *state, size_t n) { return fuzz_below(state, n) == 0; }

static inline uint64_t fuzz_hash(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 0x100000001b3u;
    return hash;
}

/* Write random text: fewer than `parts` words or pieces of the input, at most `most` bytes. Return the length. */
static inline size_t fuzz_text(const char *const *words, size_t n, size_t parts, const uint8_t *data, size_t size,
                               uint64_t *r, char *out, size_t most) {
    size_t bytes = 0;
    for (size_t k = fuzz_below(r, parts); k; k--) {
        const char *word = words[fuzz_below(r, n)];
        size_t length = strlen(word), at = fuzz_below(r, size);
        if (fuzz_one_in(r, 3) && size) {
            length = 1 + fuzz_below(r, 12);
            if (length > size - at) length = size - at;
            word = (const char *)data + at;
        }
        if (bytes + length > most) break;
        memcpy(out + bytes, word, length);
        bytes += length;
    }
    return bytes;
}

/* Read every byte, so that sanitizers can detect invalid memory. */
static inline void fuzz_read(const void *data, size_t bytes) {
    const volatile unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++) (void)p[i];
}

/* Cast away const for argv; callers do not modify the string. */
static inline char *fuzz_word(const char *word) {
    union {
        const char *in;
        char *out;
    } u = { word };
    return u.out;
}

/* ---- Mutation ---- */

/* Replace bytes [from, to) by the `n` bytes of `with` if the result has at most `most` bytes. Return the new size. */
static inline size_t fuzz_splice(uint8_t *data, size_t size, size_t most, size_t from, size_t to, const void *with,
                                 size_t n) {
    if (size - (to - from) + n > most) return size;
    memmove(data + from + n, data + to, size - to);
    if (n) memcpy(data + from, with, n);
    return size - (to - from) + n;
}

/* ---- Files, in memory if possible ---- */

static char fuzz_folder[64];

static inline void fuzz_remove_folder(void) {
    char command[96];
    snprintf(command, sizeof command, "rm -rf '%s'", fuzz_folder);
    if (fuzz_folder[0] && system(command) != 0) fprintf(stderr, "cannot remove %s\n", fuzz_folder);
}

static inline void fuzz_make_folder(void) {
    snprintf(fuzz_folder, sizeof fuzz_folder, "%s/moe-fuzz-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(fuzz_folder)) abort();
    atexit(fuzz_remove_folder);
}

/* Return the path of a file in fuzz_folder. The path is valid during the next seven calls. */
static inline const char *fuzz_path(const char *name) {
    static char paths[8][256];
    static unsigned next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", fuzz_folder, name);
    return path;
}

static inline void fuzz_write(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0) abort();
}

#endif /* FUZZ_H */
