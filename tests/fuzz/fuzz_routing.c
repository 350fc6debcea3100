/* fuzz_routing.c - runs moe-routing's main on the input, with options derived from its bytes. */
#define _GNU_SOURCE /* mkdtemp, dprintf */
#define main moe_routing_main
#include "tools/programs/moe-routing.c"
#undef main

#include "tests/fuzz/fuzz.h"

/* ---- Mutation of lines and values ---- */

static size_t line_at(const uint8_t *data, size_t size, size_t number, size_t *begin) {
    size_t at = 0, lines = 0;
    for (size_t i = 0; i < size; i++) lines += data[i] == '\n';
    number = lines ? number % lines : 0;
    for (; number && at < size; at++) number -= data[at] == '\n';
    *begin = at;
    while (at < size && data[at] != '\n') at++;
    return at < size ? at + 1 : size;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    static const char *const words[] = { "0",   "-1",    "1e999",         "4294967296",  "9007199254740993",
                                         "1.5", "true",  "null",          "\"\"",        "[]",
                                         "{}",  "[0,0]", "\"\\u0000\"",   "\"\\ud800\"", "\"</script>\"",
                                         "0.3", "3",     "\"encoder.1\"", "1e-320",      "-0" };
    uint64_t r = seed;
    size_t from, to, other, end;
    char copy[512];
    const char *word = words[fuzz_below(&r, sizeof words / sizeof *words)];
    if (fuzz_one_in(&r, 3)) return LLVMFuzzerMutate(data, size, max_size);
    to = line_at(data, size, (size_t)fuzz_next(&r), &from);
    end = line_at(data, size, (size_t)fuzz_next(&r), &other);
    switch (fuzz_below(&r, 4)) {
    case 0: return fuzz_splice(data, size, max_size, from, to, NULL, 0);
    case 1:
        if (end - other > sizeof copy) return LLVMFuzzerMutate(data, size, max_size);
        memcpy(copy, data + other, end - other);
        return fuzz_splice(data, size, max_size, from, from, copy, end - other);
    default: /* replace a value, which ends at a comma, bracket or line break */
        for (size_t skip = fuzz_below(&r, 20); from < to; from++)
            if (strchr(":,[", data[from]) && !skip--) break;
        if (from >= to) return LLVMFuzzerMutate(data, size, max_size);
        for (other = ++from; other < to && !strchr(",]}\n", data[other]);) other++;
        return fuzz_splice(data, size, max_size, from, other, word, strlen(word));
    }
}

/* ---- One input ---- */

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    fuzz_make_folder();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint64_t r = fuzz_hash(size, data, size);
    const char *page = fuzz_one_in(&r, 16) ? fuzz_path("page.html") : "/dev/null";
    char name[256], top[8], few[8];
    char *summary[] = { fuzz_word("moe-routing"), name, fuzz_word("--json"), fuzz_word("-o"),
                        fuzz_word("/dev/null"),   NULL };
    char *whole[] = { fuzz_word("moe-routing"),
                      name,
                      fuzz_word("-o"),
                      fuzz_word(page),
                      fuzz_word("--top"),
                      top,
                      fuzz_word("--experts"),
                      few,
                      fuzz_word("--sentences"),
                      few,
                      fuzz_word("--min-count"),
                      fuzz_word("1"),
                      NULL };
    int status;
    snprintf(name, sizeof name, "%s", fuzz_path("routing.jsonl"));
    snprintf(top, sizeof top, "%zu", fuzz_below(&r, 4) * 3);
    snprintf(few, sizeof few, "%zu", fuzz_below(&r, 4) * 2);
    fuzz_write(name, data, size);
    unlink(fuzz_path("page.html"));
    optind = 0;
    status = fuzz_one_in(&r, 3) ? moe_routing_main(5, summary) : moe_routing_main(12, whole);
    FUZZ_CHECK(status == EXIT_DONE || status == EXIT_MODEL, "status %d", status);
    FUZZ_CHECK(status == EXIT_DONE || access(fuzz_path("page.html"), F_OK) != 0, "wrote a page despite the error");
    return 0;
}
