/* fuzz_bpe.c - fuzzes BPE tokenisers. The input is a tokeniser as packed in model files; the texts to encode
 * are derived from its bytes.
 *
 * Checks: errors have a one-line message; ids are in range; positions ascend; decoding gives valid UTF-8, and the same
 * text whether at once or id by id; without a normaliser, texts whose bytes all have tokens are restored. */
#define _GNU_SOURCE

#include "tools/text/bpe.h"

#include "tests/fuzz/fuzz.h"
#include "tests/text/small_bpe.h"

enum { MOST_TEXT = 300 };

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    return 0;
}

/* Write a valid tokeniser with a few random changes, or mutate bytes. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    static const char *const expressions[] = { "\\p{N}{1,3}", "a+b?",         "(?i:'s|'t)|\\p{L}+",
                                               "[^a]*?b",     "(a|b)(?!\\1)", "\\s+(?!\\S)",
                                               "(?=a)",       "(?<=a)b",      "(?R)?a",
                                               "x\\Ky",       "(?:a|aa)+c",   "." };
    uint64_t r = seed;
    if (fuzz_below(&r, 3)) return LLVMFuzzerMutate(data, size, max_size);
    recipe made = usual();
    for (size_t i = 0; i < made.n_expressions; i++)
        made.expressions[i] = expressions[fuzz_below(&r, sizeof expressions / sizeof *expressions)];
    made.nfc = (uint32_t)fuzz_below(&r, 2);
    made.n_expressions = fuzz_below(&r, 3);
    if (fuzz_one_in(&r, 2)) made = spaced((uint32_t)fuzz_below(&r, 16) * BPE_PREFIX);
    made.merges[fuzz_below(&r, made.n_merges)][fuzz_below(&r, 3)] = (uint32_t)fuzz_below(&r, IDS + 2);
    if (fuzz_one_in(&r, 4)) made.added[fuzz_below(&r, 2)].id = (uint32_t)fuzz_below(&r, 600);
    made.added[0].flags = (uint32_t)fuzz_below(&r, 8);
    text_bytes b = made_of(&made);
    if (b.length <= max_size) memcpy(data, b.data, size = b.length);
    text_bytes_free(&b);
    return size;
}

static size_t some_text(const uint8_t *data, size_t size, uint64_t *r, char *out) {
    static const char *const words[] = {
        "the",  " the",       "abab",     "<end>",        "<end>er",          "1234",
        "  ",   "\n",         "\xC3\xA9", "e\xCC\x81",    "\xCC\x81\xCC\xA3", "\xF0\x9F\x98\x80",
        "\xFF", "aaaaaaaaaa", "he h",     "\xE2\x96\x81h"
    };
    return fuzz_text(words, sizeof words / sizeof *words, 20, data, size, r, out, MOST_TEXT);
}

/* Return 1 if the text has only bytes for which every tokeniser has a token (see bpe.h). */
static int is_spelt(const char *text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const unsigned char byte = (unsigned char)text[i];
        if (byte < 0x20 || byte == 0x7F || byte > 0xF0) return 0;
    }
    return 1;
}

/* `normalised`: 1 if the tokeniser changes texts. `first`: 1 if it may put a space before them, at the same offset. */
static void use(const bpe *t, const uint8_t *data, size_t size, int normalised, unsigned first, uint64_t *r) {
    char text[MOST_TEXT], why[200] = "";
    text_ids ids = { 0 };
    text_offsets begins = { 0 };
    text_bytes once = { 0 }, bit = { 0 };
    for (int round = 0; round < 8; round++) {
        const size_t n = some_text(data, size, r, text);
        const int how = (int)fuzz_below(r, 8), added = how & BPE_ADDED;
        bpe_stream a = { 0 }, b = { 0 };
        if (bpe_encode(t, text, n, how, &ids, &begins, why, sizeof why)) {
            FUZZ_CHECK(why[0] && !strchr(why, '\n'), "failed without a valid message");
            continue;
        }
        text_clear(&once), text_clear(&bit);
        for (size_t i = 0; i < ids.length; i++) {
            FUZZ_CHECK(ids.data[i] >= 0 && ids.data[i] < bpe_size(t), "id %d of %d", (int)ids.data[i],
                       (int)bpe_size(t));
            FUZZ_CHECK(!i || begins.data[i] + first >= begins.data[i - 1] + 1, "token %zu begins at %u", i,
                       begins.data[i]);
            bpe_decode(t, &b, &ids.data[i], 1, &bit);
            FUZZ_CHECK(text_utf8_valid(bit.data, bit.length) == bit.length, "decoding splits a character");
        }
        bpe_decode(t, &a, ids.data, ids.length, &once);
        bpe_decode_end(&a, &once);
        bpe_decode_end(&b, &bit);
        FUZZ_CHECK(once.length == bit.length && memcmp(once.data, bit.data, bit.length) == 0,
                   "streamed decoding differs");
        if (!normalised && !added && text_utf8_valid(text, n) == n && is_spelt(text, n))
            FUZZ_CHECK(once.length == n && memcmp(once.data, text, n) == 0, "%zu bytes encoded, %zu decoded", n,
                       once.length);
    }
    for (int32_t id = -2; id < bpe_size(t) + 2; id++) {
        size_t length;
        const char *piece = bpe_piece(t, id, &length);
        fuzz_read(piece, length);
        bpe_is_special(t, id), bpe_continues(t, id);
        FUZZ_CHECK(bpe_token_bytes(t, id) <= length, "the length of id %d exceeds its piece", (int)id);
    }
    free(ids.data), free(begins.data);
    text_bytes_free(&once), text_bytes_free(&bit);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint64_t r = fuzz_hash(size, data, size);
    char why[200] = "";
    bpe *t = bpe_new(data, size, why, sizeof why);
    FUZZ_CHECK(t || (why[0] && !strchr(why, '\n')), "failed without a valid message");
    if (t) use(t, data, size, data[12] != 0 && data[12] != BPE_WHOLE, data[12] & BPE_CHARACTERS ? 1 : 0, &r);
    bpe_free(t);
    return 0;
}
