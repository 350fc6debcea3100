/* folder.h - inputs that are folders: files follow each other, each as a number (its name), its size in three bytes,
 * and its contents. Most mutations change a part of one file and preserve the others. */
#ifndef FUZZ_FOLDER_H
#define FUZZ_FOLDER_H

#include "moe.h"
#include "tests/fuzz/fuzz.h"

#include <dirent.h>
#include <sys/stat.h>

/* Return the number of entries in a folder. */
static inline size_t fuzz_files_in(const char *folder) {
    DIR *d = opendir(folder);
    size_t n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* Return the end of the file at `at`, and its size in *bytes. */
static inline size_t fuzz_file_end(const uint8_t *data, size_t size, size_t at, size_t *bytes) {
    *bytes = data[at + 1] | (size_t)data[at + 2] << 8 | (size_t)data[at + 3] << 16;
    if (*bytes > size - at - 4) *bytes = size - at - 4;
    return at + 4 + *bytes;
}

/* Mutate a part of a file. `tail`: size of a part at the end that is mutated more often. */
static inline size_t fuzz_mutate_folder(uint8_t *data, size_t size, size_t max_size, unsigned seed, size_t tail) {
    static uint8_t part[512];
    uint64_t r = seed;
    size_t begin = 0, end, bytes, chosen = 0, files = 0;
    if (fuzz_one_in(&r, 20)) return LLVMFuzzerMutate(data, size, max_size);
    for (size_t at = 0; size - at >= 4; at = fuzz_file_end(data, size, at, &bytes))
        if (fuzz_one_in(&r, ++files)) chosen = at;
    if (!files) return LLVMFuzzerMutate(data, size, max_size);
    end = fuzz_file_end(data, size, chosen, &bytes);
    begin = chosen + 4;
    if (fuzz_one_in(&r, 2)) begin += fuzz_below(&r, bytes + 1); /* else the header of the file */
    else if (tail && fuzz_one_in(&r, 2) && bytes > tail) begin = end - fuzz_below(&r, tail);
    if (end - begin > sizeof part / 2) end = begin + 1 + fuzz_below(&r, sizeof part / 2);
    memcpy(part, data + begin, end - begin);
    const size_t n = LLVMFuzzerMutate(part, end - begin, sizeof part), after = bytes - (end - begin) + n;
    const size_t whole = fuzz_splice(data, size, max_size, begin, end, part, n);
    if (whole != size || n == end - begin)
        for (int i = 0; i < 3; i++) data[chosen + 1 + (size_t)i] = (uint8_t)(after >> (8 * i));
    return whole;
}

/* Write the files of an input to the folder in/. */
static inline void fuzz_write_folder(const uint8_t *data, size_t size, const char *const *names, size_t n,
                                     void (*write)(size_t which, const char *path, const uint8_t *data, size_t size)) {
    char name[96];
    for (size_t i = 0; i < n; i++) {
        snprintf(name, sizeof name, "in/%s", names[i]);
        remove(fuzz_path(name));
    }
    for (size_t at = 0; size - at >= 4;) {
        const size_t which = data[at] % n;
        size_t bytes;
        const size_t end = fuzz_file_end(data, size, at, &bytes);
        snprintf(name, sizeof name, "in/%s", names[which]);
        write(which, fuzz_path(name), data + at + 4, bytes);
        at = end;
    }
}

/* The folder of the input, and the file that a conversion writes to a folder of its own. */
static char fuzz_in[128], fuzz_out_folder[128], fuzz_converted[160];

static inline void fuzz_make_folders(void) {
    fuzz_make_folder();
    snprintf(fuzz_in, sizeof fuzz_in, "%s", fuzz_path("in"));
    snprintf(fuzz_out_folder, sizeof fuzz_out_folder, "%s", fuzz_path("out"));
    snprintf(fuzz_converted, sizeof fuzz_converted, "%s/model.bin", fuzz_out_folder);
    if (mkdir(fuzz_in, 0700) || mkdir(fuzz_out_folder, 0700)) abort();
}

/* Check that a conversion has written a file which the engine opens, or nothing and a message. */
static inline void fuzz_check_conversion(moe_status status, moe_error *e) {
    const size_t files = fuzz_files_in(fuzz_out_folder) - 2;
    FUZZ_CHECK(files == (status == MOE_OK), "status %d and %zu files", status, files);
    FUZZ_CHECK(!status || (e->code == status && e->message[0]), "no message for status %d", status);
    if (status != MOE_OK) return;
    moe_model *model = NULL;
    const moe_status opened = moe_model_open(fuzz_converted, NULL, &model, e);
    FUZZ_CHECK(opened == MOE_OK, "the engine rejects the file: %s", e->message);
    moe_model_close(model);
}

#endif
