/* test_unigram.c - compares unigram.c with SentencePiece, in texts of many scripts and under all settings.
 *
 * The tokenisers are the shipped model's and small ones made here. Appending fields extends a protocol buffer: the last
 * value of a setting counts, and pieces are added. */
#include "moe.h"
#include "tools/text/spm.h"

#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t seed = 7;

static uint32_t below(uint32_t n) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return n ? (uint32_t)(seed >> 33) % n : 0;
}

/* ---- Models ---- */

static void put_field(text_bytes *to, unsigned number, const char *data, size_t length) {
    const uint64_t numbers[] = { number << 3 | 2, length };
    for (size_t i = 0; i < 2; i++) {
        uint64_t v = numbers[i];
        for (; v > 127; v >>= 7) text_append(to, &(char){ (char)(v | 128) }, 1);
        text_append(to, &(char){ (char)v }, 1);
    }
    text_append(to, data, length);
}

/* Append a setting of the trainer (message 2) or of the normaliser (3). */
static void put_setting(text_bytes *to, unsigned message, unsigned number, int value) {
    char body[3] = { (char)(number << 3), 0, 0 };
    size_t n = 1;
    if (number > 15) body[0] = (char)(128 | (number << 3 & 127)), body[n++] = (char)(number >> 4);
    body[n++] = (char)value;
    put_field(to, message, body, n);
}

static void put_piece(text_bytes *to, const char *text, float score, int kind) {
    text_bytes body = { 0 };
    char rest[7] = { 2 << 3 | 5 };
    memcpy(rest + 1, &score, sizeof score);
    rest[5] = 3 << 3, rest[6] = (char)kind;
    put_field(&body, 1, text, strlen(text));
    text_append(&body, rest, sizeof rest);
    put_field(to, 1, body.data, body.length);
    text_bytes_free(&body);
}

static void put_bytes(text_bytes *to) {
    for (unsigned i = 0; i < 256; i++) {
        char piece[8];
        snprintf(piece, sizeof piece, "<0x%02X>", i);
        put_piece(to, piece, 0, 6);
    }
    put_setting(to, 2, 35, 1);
}

/* A small model with ties: scores are multiples of 1/4. */
static void put_small(text_bytes *to) {
    static const char *const words[] = { "a",
                                         "b",
                                         "c",
                                         "ab",
                                         "bc",
                                         "abc",
                                         "ca",
                                         "\xE2\x96\x81",
                                         "\xE2\x96\x81z",
                                         "aa",
                                         "aaa",
                                         "\xC3\xA9",
                                         "e",
                                         "\xF0\x9F\x98\x80",
                                         ".",
                                         "\xE2\x96\x81\xE2\x96\x81" };
    put_piece(to, "<unk>", 0, 2);
    put_piece(to, "<s>", 0, 3);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        put_piece(to, words[i], -0.25f * (float)(4 + below(12)), 1);
}

/* ---- Texts ---- */

static const char *const parts[] = {
    "The ",
    "Haus",
    " na\xC3\xAFve",
    "e\xCC\x81",
    "\xE2\x96\x81",
    "\xEF\xBC\xA1\xEF\xBC\xA2",
    "\xEF\xAC\x81",
    "  ",
    "\t",
    "\n",
    "\xE3\x80\x80",
    "\xC2\xA0",
    "\xE4\xBD\xA0\xE5\xA5\xBD",
    "\xE3\x81\x93\xE3\x82\x93",
    "\xF0\x9F\x98\x80",
    "\xF0\x9F\x91\xA8\xE2\x80\x8D",
    "\xD9\x85\xD8\xB1",
    "\xE0\xA4\xA8\xE0\xA4\xAE",
    "\xED\x95\x9C",
    "\xD0\x9F\xD1\x80",
    "\x80",
    "\xC3",
    "\xE2\x96",
    "\xF0\x9F",
    "\xED\xA0\x80",
    "\xC0\xAF",
    "\x01",
    "\x7F",
    "\xEF\xBF\xBD",
    "aaa",
    "abcabc",
    "1999",
    "<unk>",
    "<s>",
    "<0x41>",
    "<ab>",
    "<abc>",
    "http://x.y/z",
    "...",
    "\xE2\x80\xA6",
    " .",
    "-",
    "\xC2\xAD",
    "\xE2\x80\x8B",
    "\xEF\xBB\xBF",
    "a",
    "b",
    " c",
};

static size_t some_text(char *out, size_t most) {
    size_t n = 0;
    for (uint32_t left = below(14); left--;) {
        const char *part = parts[below(sizeof parts / sizeof *parts)];
        const size_t length = strlen(part);
        if (n + length >= most) break;
        memcpy(out + n, part, length);
        n += length;
        if (!below(40)) out[n - 1] = (char)(1 + below(255));
    }
    return out[n] = '\0', n;
}

/* ---- Comparison ---- */

typedef struct result {
    text_ids ids;
    text_offsets begins, places; /* in the text, and in the decoded text */
    text_bytes pieces, text, joined;
} result;

static void compute(const spm *t, const char *text, size_t n, const int32_t *ids, size_t n_ids, result *r) {
    char why[200] = "";
    assert_int_equal(spm_encode(t, text, n, &r->ids, why, sizeof why), 0);
    assert_int_equal(spm_encode_begins(t, text, n, &r->begins, why, sizeof why), 0);
    assert_int_equal(spm_encode_pieces(t, text, n, &r->pieces, why, sizeof why), 0);
    if (!ids) ids = r->ids.data, n_ids = r->ids.length;
    assert_int_equal(spm_decode(t, ids, n_ids, &r->text, why, sizeof why), 0);
    assert_int_equal(spm_decode_begins(t, ids, n_ids, &r->places, why, sizeof why), 0);
    assert_int_equal(spm_decode_pieces(t, r->pieces.data ? r->pieces.data : "", r->pieces.length, &r->joined, why,
                                       sizeof why),
                     0);
}

static void free_result(result *r) {
    text_bytes *const all[] = { &r->pieces, &r->text, &r->joined };
    free(r->ids.data), free(r->begins.data), free(r->places.data);
    text_bytes_free_all(all, 3);
}

static int same(const void *a, size_t n, const void *b, size_t m, size_t size) {
    return n == m && (!n || memcmp(a, b, n * size) == 0);
}

#define SAME(member) same(x.member.data, x.member.length, y.member.data, y.member.length, sizeof *x.member.data)

static void compare_text(const spm *own, const spm *library, const char *text, size_t n, const int32_t *ids,
                         size_t n_ids) {
    result x = { 0 }, y = { 0 };
    compute(own, text, n, ids, n_ids, &x);
    compute(library, text, n, ids, n_ids, &y);
    if (!SAME(ids) || !SAME(begins) || !SAME(places) || !SAME(pieces) || !SAME(text) || !SAME(joined))
        fail_msg("'%s': ids %d, begins %d, places %d, pieces %d, text %d, joined %d", text, SAME(ids), SAME(begins),
                 SAME(places), SAME(pieces), SAME(text), SAME(joined));
    free_result(&x), free_result(&y);
}

static void compare(const text_bytes *model, int rounds) {
    char why[200] = "", text[512];
    int32_t ids[12];
    spm *own = spm_new(model->data, model->length, why, sizeof why);
    spm *library = spm_new_by_library(model->data, model->length, why, sizeof why);
    if (!own || !library) fail_msg("%s", why);
    const int32_t size = spm_size(library);
    assert_int_equal(spm_size(own), size);
    assert_int_equal(spm_unk(own), spm_unk(library));
    for (int32_t id = -1; id <= size; id++) {
        assert_string_equal(spm_piece(own, id), spm_piece(library, id));
        assert_int_equal(spm_id(own, spm_piece(own, id)), spm_id(library, spm_piece(library, id)));
        assert_int_equal(spm_is_unknown(own, id), spm_is_unknown(library, id));
        assert_int_equal(spm_is_control(own, id), spm_is_control(library, id));
        assert_int_equal(spm_is_byte(own, id), spm_is_byte(library, id));
    }
    for (int i = 0; i < rounds; i++) {
        const uint32_t n_ids = below(12);
        for (uint32_t j = 0; j < n_ids; j++)
            ids[j] = (int32_t)below((uint32_t)(below(2) ? size : size < 300 ? size : 300));
        const size_t n = some_text(text, sizeof text);
        compare_text(own, library, text, n, i % 2 ? ids : NULL, n_ids);
    }
    spm_free(own), spm_free(library);
}

/* ---- Tests ---- */

TEST(shipped_tokeniser) {
    const moe_model_params params = { 0 };
    text_bytes tokeniser = { 0 };
    moe_model *model = NULL;
    moe_error e = { MOE_OK, "", "" };
    assert_int_equal(moe_model_open("models/en-de-fr-es.bin", &params, &model, &e), MOE_OK);
    const ptrdiff_t at = moe_model_meta_find(model, "tokenizer.model");
    assert_true(at >= 0);
    const moe_span bytes = moe_model_meta_text(model, (size_t)at, 0);
    text_append(&tokeniser, bytes.data, bytes.length);
    moe_model_close(model);
    compare(&tokeniser, 3000);
    /* its settings: add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces */
    for (int settings = 0; settings < 8; settings++) {
        text_bytes changed = { 0 };
        text_append(&changed, tokeniser.data, tokeniser.length);
        for (unsigned i = 0; i < 3; i++) put_setting(&changed, 3, 3 + i, settings >> i & 1);
        compare(&changed, 300);
        text_bytes_free(&changed);
    }
    /* user-defined pieces, unused pieces */
    put_piece(&tokeniser, "<ab>", 0, 4);
    put_piece(&tokeniser, "<abc>", 0, 4);
    put_piece(&tokeniser, "\xEF\xBC\xA1\xEF\xBC\xA2", 0, 4); /* the normaliser keeps it */
    put_piece(&tokeniser, "1999", -1, 5);
    compare(&tokeniser, 1000);
    text_bytes_free(&tokeniser);
}

TEST(small_tokenisers_with_ties) {
    for (int i = 0; i < 200; i++) {
        text_bytes model = { 0 };
        put_small(&model);
        if (i & 1) put_bytes(&model);
        if (i & 2) put_piece(&model, "abca", 0, 4), put_piece(&model, "abcab", 0, 4 + (i & 4) / 4);
        for (unsigned j = 0; j < 3; j++) put_setting(&model, 3, 3 + j, (i >> (3 + j) & 1) == 0);
        if (i % 7 == 0) put_field(&model, 2, "\xE2\x02\x03 ? ", 6); /* the text of the unknown token */
        compare(&model, 100);
        text_bytes_free(&model);
    }
}

/* Models that unigram.c rejects are left to the library. */
TEST(unusual_models_are_left_to_the_library) {
    text_bytes two = { 0 };
    put_small(&two);
    put_piece(&two, "<s>", -1, 1); /* the text of a control token */
    compare(&two, 50);
    text_bytes_free(&two);
}

int main(void) { return run_all_tests(NULL, NULL); }
