/* replay.c - runs a fuzz target on all files in folders, without libFuzzer: replay [-mutations=N] FOLDER...
 * With -mutations, also runs it on N variants of each file, made with fixed seeds by the target's mutator if it has
 * one. For `make fuzz-coverage` and tests/cross/targets.py. */
#define _POSIX_C_SOURCE 200809L

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((weak)) int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
__attribute__((weak)) size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

/* Change a few bytes. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size) {
    static uint32_t random = 1;
    (void)max_size;
    for (int i = 0; i < 3 && size; i++) {
        random = random * 1664525u + 1013904223u;
        data[(random >> 8) % size] ^= (uint8_t)(1u << (random >> 29));
    }
    return size;
}

int main(int argc, char **argv) {
    static const char mutations[] = "-mutations=";
    static uint8_t data[1 << 20], mutated[1 << 20];
    size_t files = 0, size;
    unsigned number = 0;
    if (LLVMFuzzerInitialize) LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], mutations, sizeof mutations - 1) == 0) {
            number = (unsigned)strtoul(argv[i] + sizeof mutations - 1, NULL, 10);
            continue;
        }
        DIR *folder = opendir(argv[i]);
        for (struct dirent *entry; folder && (entry = readdir(folder));) {
            char path[1024];
            FILE *file;
            if (entry->d_name[0] == '.') continue;
            snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
            file = fopen(path, "rb");
            if (!file) continue;
            size = fread(data, 1, sizeof data, file);
            fclose(file);
            LLVMFuzzerTestOneInput(data, size);
            for (unsigned seed = 1; seed <= number; seed++) {
                memcpy(mutated, data, size);
                const size_t bytes = LLVMFuzzerCustomMutator
                                         ? LLVMFuzzerCustomMutator(mutated, size, sizeof mutated, seed)
                                         : LLVMFuzzerMutate(mutated, size, sizeof mutated);
                LLVMFuzzerTestOneInput(mutated, bytes);
            }
            files++;
        }
        if (folder) closedir(folder);
    }
    printf(files ? "ok %zu inputs\n" : "FAIL %zu inputs: run make fuzz SECONDS=N first\n", files);
    return !files;
}
