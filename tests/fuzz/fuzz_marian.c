/* fuzz_marian.c - fuzzes the conversion of Marian's files. The input is a folder: files follow each other, each as a
 * number (its name), its size in three bytes, and its contents. Most mutations change a part of one file and preserve
 * the others. The checksum of a shortlist is corrected. */
#define _GNU_SOURCE /* mkdtemp, dprintf */

#include "moe.h"
#include "tests/fuzz/fuzz.h"
#include "tools/convert/marian.h"

#include <dirent.h>
#include <sys/stat.h>

static const char *const names[] = { "model.bin",    "vocab.enpt.spm", "lex.enpt.s2t.bin", "decoder.yml",
                                     "vocab.yml",    "LICENSE",        "model.bin.gz",     "srcvocab.enpt.spm.gz",
                                     "trgvocab.spm", "srcvocab.yml",   "trgvocab.yml",     "source.spm",
                                     "target.spm" };
enum { NAMES = sizeof names / sizeof *names, LIST = 2 };

static char in[128], out_folder[128], out[160];

static size_t files_in(const char *folder) {
    DIR *d = opendir(folder);
    size_t n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

static uint64_t word_at(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static void write_list(const char *path, const uint8_t *data, size_t size) {
    uint8_t *copy = malloc(size + 1);
    uint64_t hash = 0;
    if (!copy) abort();
    memcpy(copy, data, size);
    for (size_t at = 16; at + 8 <= size; at += 8) hash ^= word_at(copy + at) + 0x9e3779b9u + (hash << 6) + (hash >> 2);
    if (size >= 16) memcpy(copy + 8, &hash, 8);
    fuzz_write(path, copy, size);
    free(copy);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    fuzz_make_folder();
    snprintf(in, sizeof in, "%s", fuzz_path("in"));
    snprintf(out_folder, sizeof out_folder, "%s", fuzz_path("out"));
    snprintf(out, sizeof out, "%s/model.bin", out_folder);
    if (mkdir(in, 0700) || mkdir(out_folder, 0700)) abort();
    return 0;
}

/* Return the end of the file at `at`, and its size in *bytes. */
static size_t file_end(const uint8_t *data, size_t size, size_t at, size_t *bytes) {
    *bytes = data[at + 1] | (size_t)data[at + 2] << 8 | (size_t)data[at + 3] << 16;
    if (*bytes > size - at - 4) *bytes = size - at - 4;
    return at + 4 + *bytes;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    static uint8_t part[512];
    uint64_t r = seed;
    size_t begin = 0, end, bytes, chosen = 0, files = 0;
    if (fuzz_one_in(&r, 20)) return LLVMFuzzerMutate(data, size, max_size);
    for (size_t at = 0; size - at >= 4; at = file_end(data, size, at, &bytes))
        if (fuzz_one_in(&r, ++files)) chosen = at;
    if (!files) return LLVMFuzzerMutate(data, size, max_size);
    end = file_end(data, size, chosen, &bytes);
    begin = chosen + 4;
    if (fuzz_one_in(&r, 2)) begin += fuzz_below(&r, bytes + 1);                      /* else the header of the file */
    else if (fuzz_one_in(&r, 2) && bytes > 2000) begin = end - fuzz_below(&r, 2000); /* the settings of a model */
    if (end - begin > sizeof part / 2) end = begin + 1 + fuzz_below(&r, sizeof part / 2);
    memcpy(part, data + begin, end - begin);
    const size_t n = LLVMFuzzerMutate(part, end - begin, sizeof part), after = bytes - (end - begin) + n;
    const size_t whole = fuzz_splice(data, size, max_size, begin, end, part, n);
    if (whole != size || n == end - begin)
        for (int i = 0; i < 3; i++) data[chosen + 1 + (size_t)i] = (uint8_t)(after >> (8 * i));
    return whole;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const moe_type types[] = { MOE_TYPE_Q8, MOE_TYPE_Q8, MOE_TYPE_F32, MOE_TYPE_Q4 };
    uint64_t r = fuzz_hash(size, data, size < 64 ? size : 64);
    char name[64];
    moe_error e = { MOE_OK, "", "" };
    for (size_t i = 0; i < NAMES; i++) {
        snprintf(name, sizeof name, "in/%s", names[i]);
        remove(fuzz_path(name));
    }
    for (size_t at = 0; size - at >= 4;) {
        const size_t which = data[at] % NAMES;
        size_t bytes;
        const size_t end = file_end(data, size, at, &bytes);
        snprintf(name, sizeof name, "in/%s", names[which]);
        if (which == LIST) write_list(fuzz_path(name), data + at + 4, bytes);
        else fuzz_write(fuzz_path(name), data + at + 4, bytes);
        at = end;
    }
    remove(out);
    const marian_files files = { .path = in, .type = types[fuzz_below(&r, 4)] };
    const moe_status status = marian_convert(&files, out, &e);
    FUZZ_CHECK(files_in(out_folder) == (status ? 2 : 3), "status %d and %zu files", status, files_in(out_folder) - 2);
    FUZZ_CHECK(!status || (e.code == status && e.message[0]), "no message for status %d", status);
    if (status == MOE_OK) {
        moe_model *model = NULL;
        const moe_status opened = moe_model_open(out, NULL, &model, &e);
        FUZZ_CHECK(opened == MOE_OK, "the engine rejects the file: %s", e.message);
        moe_model_close(model);
    }
    return 0;
}
