/* replay.c - runs a fuzz target on all files in folders, without libFuzzer; for `make fuzz-coverage`. */
#define _POSIX_C_SOURCE 200809L

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size) { /* unused */
    (void)data, (void)max_size;
    return size;
}

int main(int argc, char **argv) {
    static uint8_t data[1 << 20];
    size_t files = 0;
    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++) {
        DIR *folder = opendir(argv[i]);
        for (struct dirent *entry; folder && (entry = readdir(folder));) {
            char path[1024];
            FILE *file;
            if (entry->d_name[0] == '.') continue;
            snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
            file = fopen(path, "rb");
            if (!file) continue;
            LLVMFuzzerTestOneInput(data, fread(data, 1, sizeof data, file));
            fclose(file);
            files++;
        }
        if (folder) closedir(folder);
    }
    printf(files ? "ok %zu inputs\n" : "FAIL %zu inputs: run make fuzz-model SECONDS=N first\n", files);
    return !files;
}
