/* fuzz_checkpoint.c - fuzzes the conversion of decoder-only models: folders in Hugging Face's layout and GGUF files. */
#define _GNU_SOURCE /* mkdtemp, dprintf */

#include "moe.h"
#include "tests/fuzz/folder.h"
#include "tools/convert/convert.h"

#include <sys/stat.h>

static const char *const names[] = { "config.json",
                                     "generation_config.json",
                                     "tokenizer.json",
                                     "tokenizer_config.json",
                                     "special_tokens_map.json",
                                     "chat_template.jinja",
                                     "model.safetensors",
                                     "model.safetensors.index.json",
                                     "model-00001-of-00002.safetensors",
                                     "model-00002-of-00002.safetensors",
                                     "x.gguf",
                                     "x-00001-of-00002.gguf",
                                     "x-00002-of-00002.gguf" };
enum { NAMES = sizeof names / sizeof *names };

static char in[128], out_folder[128], out[160];

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    fuzz_make_folder();
    snprintf(in, sizeof in, "%s", fuzz_path("in"));
    snprintf(out_folder, sizeof out_folder, "%s", fuzz_path("out"));
    snprintf(out, sizeof out, "%s/model.bin", out_folder);
    if (mkdir(in, 0700) || mkdir(out_folder, 0700)) abort();
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    return fuzz_mutate_folder(data, size, max_size, seed, 0);
}

static void write_file(size_t which, const char *path, const uint8_t *data, size_t size) {
    (void)which;
    fuzz_write(path, data, size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const moe_type types[] = { MOE_TYPE_KEEP, MOE_TYPE_KEEP, MOE_TYPE_F32, MOE_TYPE_Q8 };
    uint64_t r = fuzz_hash(size, data, size < 64 ? size : 64);
    moe_error e = { MOE_OK, "", "" };
    fuzz_write_folder(data, size, names, NAMES, write_file);
    remove(out);
    const convert_options options = { .path = in, .type = types[fuzz_below(&r, 4)], .experts = MOE_TYPE_KEEP };
    const moe_status status = convert_model(&options, out, &e);
    const size_t files = fuzz_files_in(out_folder) - 2;
    FUZZ_CHECK(files == (status == MOE_OK), "status %d and %zu files", status, files);
    FUZZ_CHECK(!status || (e.code == status && e.message[0]), "no message for status %d", status);
    if (status == MOE_OK) {
        moe_model *model = NULL;
        const moe_status opened = moe_model_open(out, NULL, &model, &e);
        FUZZ_CHECK(opened == MOE_OK, "the engine rejects the file: %s", e.message);
        moe_model_close(model);
    } else {
        convert_check(in, &e);
    }
    return 0;
}
