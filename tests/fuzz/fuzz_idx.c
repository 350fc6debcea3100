/* fuzz_idx.c - fuzzes how moe-classify reads images, labels and rows of numbers. The input is the file to classify; its
 * last bytes may become the label file. */
#define main moe_classify_main
#include "tools/programs/moe-classify.c"
#undef main

#include "tests/engine/model_writer.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    mw_model *m = mw_classifier(MW_F32, 1);
    mw_image image = mw_build(m);
    (void)argc, (void)argv;
    fuzz_make_folder();
    fuzz_write(fuzz_path("classifier.bin"), image.data, image.bytes);
    free(image.data);
    mw_free(m);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const offsets[] = { "0,0", "1,2", "3,0", "2147483647,1" };
    uint64_t r = fuzz_hash(size, data, size);
    const size_t labels = size ? fuzz_below(&r, size < 40 ? size : 40) : 0;
    char model[256], input[256], right[256], offset[16];
    char *words[20] = { fuzz_word("moe-classify"), fuzz_word("-m"), model,
                        fuzz_word("--threads"),    fuzz_word("1"),  fuzz_word("-o"),
                        fuzz_word("/dev/null"),    fuzz_word("-q") };
    int n = 8, status;
    snprintf(model, sizeof model, "%s", fuzz_path("classifier.bin"));
    snprintf(input, sizeof input, "%s", fuzz_path("input"));
    snprintf(right, sizeof right, "%s", fuzz_path("labels"));
    snprintf(offset, sizeof offset, "%s", offsets[fuzz_below(&r, 4)]);
    if (fuzz_one_in(&r, 2)) words[n++] = fuzz_word("--json");
    if (fuzz_one_in(&r, 3)) words[n++] = fuzz_word("--top"), words[n++] = fuzz_word("3");
    if (fuzz_one_in(&r, 3)) words[n++] = fuzz_word("--offset"), words[n++] = offset;
    if (fuzz_one_in(&r, 2)) words[n++] = fuzz_word("--batch"), words[n++] = fuzz_word("2");
    if (fuzz_one_in(&r, 2)) words[n++] = fuzz_word("--labels"), words[n++] = right;
    words[n++] = input;
    if (fuzz_one_in(&r, 4)) words[n++] = input;
    fuzz_write(input, data, size - labels * (size_t)fuzz_one_in(&r, 2));
    fuzz_write(right, data + size - labels, labels);
    optind = 0;
    status = moe_classify_main(n, words);
    FUZZ_CHECK(status >= EXIT_DONE && status <= EXIT_INPUT_OUTPUT, "status %d", status);
    return 0;
}
