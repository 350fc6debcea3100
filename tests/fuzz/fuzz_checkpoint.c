/* fuzz_checkpoint.c - fuzzes the conversion of decoder-only models, folders in Hugging Face's layout and GGUF files,
 * and of CTranslate2's models and Argos's packages. */
#define _GNU_SOURCE /* mkdtemp, dprintf */

#include "tests/fuzz/folder.h"
#include "tools/convert/convert.h"

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
                                     "x-00002-of-00002.gguf",
                                     "tokenizer.model",
                                     "added_tokens.json",
                                     "hy.tiktoken",
                                     "model.bin",
                                     "shared_vocabulary.json",
                                     "source_vocabulary.txt",
                                     "target_vocabulary.txt",
                                     "sentencepiece.model",
                                     "README.md",
                                     "package.argosmodel" };
enum { NAMES = sizeof names / sizeof *names };
static char package[256]; /* path of the package, if there is one */

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    fuzz_make_folders();
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    return fuzz_mutate_folder(data, size, max_size, seed, 0);
}

static void write_file(size_t which, const char *path, const uint8_t *data, size_t size) {
    fuzz_write(path, data, size);
    if (which == NAMES - 1) snprintf(package, sizeof package, "%s", path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const moe_type types[] = { MOE_TYPE_KEEP, MOE_TYPE_KEEP, MOE_TYPE_F32, MOE_TYPE_Q8 };
    uint64_t r = fuzz_hash(size, data, size < 64 ? size : 64);
    moe_error e = { MOE_OK, "", "" };
    *package = 0;
    fuzz_write_folder(data, size, names, NAMES, write_file);
    remove(fuzz_converted);
    const convert_options options = { .path = *package ? package : fuzz_in,
                                      .type = types[fuzz_below(&r, 4)],
                                      .experts = MOE_TYPE_KEEP,
                                      .ids_only = (int)fuzz_below(&r, 2) };
    const moe_status status = convert_model(&options, fuzz_converted, &e);
    fuzz_check_conversion(status, &e);
    if (status) convert_check(fuzz_in, &e);
    return 0;
}
