/* fuzz_marian.c - fuzzes the conversion of Marian's files in a folder. The checksum of a shortlist is corrected. */
#define _GNU_SOURCE /* mkdtemp, dprintf */

#include "tests/fuzz/folder.h"
#include "tools/convert/marian.h"

static const char *const names[] = { "model.bin",    "vocab.enpt.spm", "lex.enpt.s2t.bin", "decoder.yml",
                                     "vocab.yml",    "LICENSE",        "model.bin.gz",     "srcvocab.enpt.spm.gz",
                                     "trgvocab.spm", "srcvocab.yml",   "trgvocab.yml",     "source.spm",
                                     "target.spm" };
enum { NAMES = sizeof names / sizeof *names, LIST = 2 };

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
    fuzz_make_folders();
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    return fuzz_mutate_folder(data, size, max_size, seed, 2000); /* the settings of a model are at its end */
}

static void write_file(size_t which, const char *path, const uint8_t *data, size_t size) {
    if (which == LIST) write_list(path, data, size);
    else fuzz_write(path, data, size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const moe_type types[] = { MOE_TYPE_Q8, MOE_TYPE_Q8, MOE_TYPE_F32, MOE_TYPE_Q4 };
    uint64_t r = fuzz_hash(size, data, size < 64 ? size : 64);
    moe_error e = { MOE_OK, "", "" };
    fuzz_write_folder(data, size, names, NAMES, write_file);
    remove(fuzz_converted);
    const convert_options options = { .path = fuzz_in,
                                      .type = types[fuzz_below(&r, 4)],
                                      .ids_only = (int)fuzz_below(&r, 2) };
    making m = { .out = fuzz_converted, .error = &e };
    if (!marian_convert(&m, &options) && !m.status) making_no_memory(&m);
    making_free(&m);
    fuzz_check_conversion(m.status, &e);
    return 0;
}
