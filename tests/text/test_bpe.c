/* test_bpe.c - tests tools/text/bpe.c: ids and texts of a small tokeniser, streams, limits, and damaged files.
 *
 *   1. A tokeniser     a small one; test_byte_bpe.py compares large ones with the published package
 *   2. Ids and texts
 *   3. Streams
 *   4. Long texts
 *   5. Damaged files
 *   6. In a model file
 */
#define _POSIX_C_SOURCE 200809L

#include "tools/text/bpe.h"
#include "tools/text/open.h"

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/test.h"

#include "tests/engine/model_writer.h"
#include "tests/text/small_bpe.h"

/* ==== 1. A tokeniser ==================================================================================== */

/* A tokeniser and the bytes that it refers to. */
typedef struct made {
    text_bytes bytes;
    bpe *t;
} made;

static made make(const recipe *r) {
    made m = { .bytes = made_of(r) };
    char why[200] = "";
    m.t = bpe_new(m.bytes.data, m.bytes.length, why, sizeof why);
    CHECK(m.t != NULL, "%s", why);
    return m;
}

static void discard(made *m) {
    bpe_free(m->t);
    text_bytes_free(&m->bytes);
}

/* ==== 2. Ids and texts ================================================================================== */

/* Assert the ids of a text and their byte offsets: "ID@OFFSET ID@OFFSET". */
static void assert_encoding(const bpe *t, const char *text, size_t length, int added, const char *wanted) {
    text_ids ids = { 0 };
    text_offsets begins = { 0 };
    text_bytes out = { 0 };
    char why[200] = "";
    CHECK(bpe_encode(t, text, length, added, &ids, &begins, why, sizeof why) == 0, "%s", why);
    for (size_t i = 0; i < ids.length; i++)
        text_printf(&out, i ? " %d@%u" : "%d@%u", (int)ids.data[i], (unsigned)begins.data[i]);
    text_append(&out, "", 0);
    CHECK(strcmp(out.data, wanted) == 0, "'%s': %s, wanted %s", text, out.data, wanted);
    free(ids.data);
    free(begins.data);
    text_bytes_free(&out);
}

static void assert_ids(const bpe *t, const char *text, const char *wanted) {
    assert_encoding(t, text, strlen(text), 0, wanted);
}

TEST(texts_are_encoded) {
    const recipe r = usual();
    made m = make(&r);
    assert_int_equal(bpe_size(m.t), IDS);
    assert_ids(m.t, "", "");
    assert_ids(m.t, "the", "257@0");
    assert_ids(m.t, "the the", "257@0 258@3");
    assert_ids(m.t, "t he", "116@0 32@1 256@2"); /* merges do not cross pieces */
    assert_ids(m.t, "abababa", "260@0 259@4 97@6");
    assert_ids(m.t, "1234", "49@0 50@1 51@2 52@3");
    assert_encoding(m.t, "a\0b", 3, 0, "97@0 0@1 98@2");
    discard(&m);
}

TEST(the_lowest_rank_is_merged_first) {
    recipe r = usual();
    made m = make(&r);
    assert_ids(m.t, "ababab", "260@0 259@4"); /* the leftmost pair is merged first */
    discard(&m);
    const uint32_t last[2][3] = { { AB, AB, ABAB }, { 'a', 'b', AB } }; /* ABAB ranks lower than AB */
    memcpy(r.merges[3], last, sizeof last);
    m = make(&r);
    assert_ids(m.t, "ababab", "260@0 259@4"); /* merging AB creates a pair of lower rank */
    discard(&m);
}

/* Assert the ids of a text after `how`, and the text that they decode to. */
static void assert_spaced(uint32_t flags, int how, const char *text, const char *wanted, const char *decoded) {
    recipe r = spaced(flags);
    r.added[1].flags = 4; /* <end>er is also matched in texts */
    made m = make(&r);
    text_ids ids = { 0 };
    text_bytes out = { 0 };
    bpe_stream stream = { 0 };
    char why[200];
    assert_encoding(m.t, text, strlen(text), how, wanted);
    assert_int_equal(bpe_encode(m.t, text, strlen(text), how, &ids, NULL, why, sizeof why), 0);
    for (size_t i = 0; i < ids.length; i++) bpe_decode(m.t, &stream, &ids.data[i], 1, &out);
    bpe_decode_end(&stream, &out);
    CHECK(strcmp(out.data, decoded) == 0, "'%s' is decoded as '%s'", text, out.data);
    free(ids.data);
    text_bytes_free(&out);
    discard(&m);
}

TEST(characters_without_a_token_become_bytes) {
    assert_spaced(0, 0, "", "", "");
    assert_spaced(0, 0, "he h", "260@0 258@2", "he h");
    assert_spaced(0, 0, "ah\xC3\xA9 ", "97@0 257@1 195@2 169@3 256@4", "ah\xC3\xA9 ");
    assert_spaced(0, 0, "\xE2\x96\x81h", "258@0", " h"); /* a literal mark is a space */
    assert_spaced(0, 0, "h<end>er<end>", "257@0 262@1 60@8 259@9 110@10 100@11 62@12", "h<end>er<end>");
    assert_spaced(0, BPE_ADDED, "h<end>h", "257@0 261@1 257@6", "h<end>h");
}

TEST(spaces_precede_texts) {
    const uint32_t always = BPE_PREFIX | BPE_TRIMMED, first = BPE_FIRST | BPE_TRIMMED;
    assert_spaced(always, 0, "h", "258@0", "h");
    assert_spaced(always, 0, "e", "256@0 259@0", "e");
    assert_spaced(always, 0, " h", "256@0 258@0", " h");
    assert_spaced(always, BPE_LATER, "h", "258@0", "h");
    assert_spaced(always, BPE_BARE, "h", "257@0", "h");
    assert_spaced(always, BPE_ADDED, "h<end>h", "258@0 261@1 258@6", "h<end> h");
    assert_spaced(always | BPE_UNLESS, 0, " h", "258@0", "h");
    assert_spaced(BPE_PREFIX, 0, "h", "258@0", " h");
    assert_spaced(first, 0, "h<end>er", "258@0 262@1", "h<end>er");
    assert_spaced(first, BPE_ADDED, "h<end>h", "258@0 261@1 257@6", "h<end>h");
    assert_spaced(first, BPE_ADDED, "<end>h", "261@0 257@5", "<end>h");
    assert_spaced(first, BPE_LATER, "h", "257@0", "h");
}

TEST(tokens_of_characters_have_lengths) {
    const recipe r = spaced(BPE_TRIMMED);
    made m = make(&r);
    assert_int_equal(bpe_token_bytes(m.t, MARK_H), 2);
    assert_int_equal(bpe_token_bytes(m.t, 0xE9), 1);
    assert_int_equal(bpe_is_trimmed(m.t, MARK_H), 1);
    assert_int_equal(bpe_is_trimmed(m.t, H_E), 0);
    assert_int_equal(bpe_continues(m.t, 0xA9), 1);
    assert_int_equal(bpe_continues(m.t, 0xC3), 0);
    discard(&m);
}

TEST(whole_pieces_need_no_merges) {
    recipe r = usual();
    r.n_merges = 0;
    made m = make(&r);
    assert_ids(m.t, "the", "116@0 104@1 101@2");
    discard(&m);
    r.nfc = 2;
    m = make(&r);
    assert_ids(m.t, "the the theab 1 abab",
               "257@0 258@3 32@7 116@8 104@9 101@10 97@11 98@12 32@13 49@14 32@15 97@16 "
               "98@17 97@18 98@19"); /* only whole pieces are looked up */
    assert_ids(m.t, "abab", "260@0");
    discard(&m);
}

TEST(bytes_without_a_token_are_skipped) {
    recipe r = usual();
    r.without = 4;
    r.expressions[1] = "[^ ]+| +";
    made m = make(&r);
    assert_ids(m.t, "\4", "");
    assert_ids(m.t, "\4t\4\4he\4", "257@1"); /* "t" and "he" become adjacent */
    assert_ids(m.t, "a\4\4", "97@0");
    discard(&m);
}

TEST(invalid_utf8_is_replaced) {
    const recipe r = usual();
    made m = make(&r);
    assert_ids(m.t, "a\xFFz", "97@0 239@1 191@2 189@3 122@4");
    assert_ids(m.t, "\xE4\xBD", "239@0 191@1 189@2");
    assert_ids(m.t, "\xED\xA0\x80", "239@0 191@1 189@2 239@3 191@4 189@5 239@6 191@7 189@8");
    discard(&m);
}

TEST(added_tokens_are_found_in_templates_only) {
    recipe r = usual();
    made m = make(&r);
    assert_ids(m.t, "<end>", "60@0 101@1 110@2 100@3 62@4"); /* added tokens are not parsed in user text */
    assert_encoding(m.t, "the<end>the", 11, 1, "257@0 261@3 257@8");
    assert_encoding(m.t, "<end>er<end>e<en", 16, 1, "262@0 261@7 101@12 60@13 101@14 110@15"); /* longest match wins */
    assert_true(bpe_is_special(m.t, END));
    assert_false(bpe_is_special(m.t, THINK));
    assert_false(bpe_is_special(m.t, HE) || bpe_is_special(m.t, -1) || bpe_is_special(m.t, IDS));
    discard(&m);
    r.nfc = 1, r.added[0].flags = 3, r.added[0].text = "\xC3\xA9"; /* the token is found after NFC */
    m = make(&r);
    assert_encoding(m.t, "ae\xCC\x81the", 7, 1, "97@0 261@1 257@3");
    discard(&m);
}

TEST(texts_are_normalised_to_nfc) {
    recipe r = usual();
    r.nfc = 1;
    made m = make(&r);
    assert_ids(m.t, "e\xCC\x81", "195@0 169@1");
    assert_ids(m.t, "a\xCC\x81\xCC\xA3", "225@0 186@1 161@2 204@3 129@4"); /* NFC sorts the marks */
    assert_ids(m.t, "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", "234@0 176@1 129@2");
    discard(&m);
}

TEST(ids_and_pieces_are_converted) {
    const recipe r = usual();
    made m = make(&r);
    size_t length;
    for (int32_t id = -1; id <= IDS; id++) {
        const char *piece = bpe_piece(m.t, id, &length);
        assert_int_equal(piece != NULL, id >= 0 && id < IDS);
        if (piece) assert_int_equal(bpe_id(m.t, piece, length), id);
        assert_int_equal(bpe_token_bytes(m.t, id), id < 0 || id >= IDS    ? 0
                                                   : id < BYTES           ? 1
                                                   : id == HE || id == AB ? 2
                                                   : id == THE            ? 3
                                                   : id == END            ? 5
                                                   : id == THINK          ? 7
                                                                          : 4);
        assert_int_equal(bpe_continues(m.t, id), id >= 0x80 && id < 0xC0);
    }
    assert_int_equal(bpe_id(m.t, "hex", 3), -1);
    discard(&m);
}

/* ==== 3. Streams ======================================================================================== */

/* Decode every text of one to four bytes from `choice`, one byte at a time, and compare with Python's decode("utf-8",
 * "replace"): valid characters are kept, and each longest prefix of a character becomes one U+FFFD. */
TEST(streams_hold_back_incomplete_characters) {
    static const unsigned char choice[] = { 'a', 0x80, 0xA0, 0xBF, 0xC2, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0xFF };
    enum { N = sizeof choice };
    const recipe r = usual();
    made m = make(&r);
    text_bytes out = { 0 }, wanted = { 0 };
    for (size_t k = 0; k < N * N * N * N; k++) {
        const unsigned char b[6] = { choice[k % N], choice[k / N % N], choice[k / N / N % N], choice[k / N / N / N] };
        bpe_stream stream = { 0 };
        text_clear(&out), text_clear(&wanted);
        for (size_t i = 0; i < 4; i++) {
            const int32_t id = b[i];
            bpe_decode(m.t, &stream, &id, 1, &out);
            assert_true(stream.n < 4);
            assert_int_equal(text_utf8_valid(out.data, out.length), out.length);
        }
        bpe_decode_end(&stream, &out);
        for (size_t i = 0, n; i < 4; i += n) {
            const char *at = (const char *)b + i;
            for (n = 1; n < 4 - i && text_utf8_valid(at, n) < n;) n++;
            if (text_utf8_valid(at, n) == n || (n = text_utf8_valid(at, 4 - i)) > 0) {
                text_append(&wanted, at, n);
                continue;
            }
            n = 1; /* length of the longest prefix of a valid character */
            for (size_t more = 2; more <= 3 && more <= 4 - i; more++) {
                char whole[4] = { at[0], at[1], at[2], '\x80' };
                if (more == 2) whole[2] = '\x80';
                const size_t need = b[i] >= 0xF0 ? 4 : b[i] >= 0xE0 ? 3 : 2;
                if (need > more && text_utf8_valid(whole, need) == need) n = more;
            }
            text_append_string(&wanted, "\xEF\xBF\xBD");
        }
        CHECK(out.length == wanted.length && memcmp(out.data, wanted.data, out.length) == 0,
              "%02x %02x %02x %02x: %s, wanted %s", b[0], b[1], b[2], b[3], out.data, wanted.data);
    }
    text_bytes_free(&out);
    text_bytes_free(&wanted);
    discard(&m);
}

TEST(streams_equal_a_single_call) {
    static const int32_t ids[] = { 0xF0, 0x9F, 0x98, 0x80, SPACE_THE, END, 0xC3, THE, -1, IDS, 0xC3, 0xA9, 0xE4 };
    const recipe r = usual();
    made m = make(&r);
    text_bytes once = { 0 }, bit = { 0 };
    bpe_stream a = { 0 }, b = { 0 };
    bpe_decode(m.t, &a, ids, sizeof ids / sizeof *ids, &once);
    bpe_decode_end(&a, &once);
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) bpe_decode(m.t, &b, &ids[i], 1, &bit);
    bpe_decode_end(&b, &bit);
    assert_string_equal(once.data, "\xF0\x9F\x98\x80 the<end>\xEF\xBF\xBDthe\xC3\xA9\xEF\xBF\xBD");
    assert_string_equal(bit.data, once.data);
    text_bytes_free(&once);
    text_bytes_free(&bit);
    discard(&m);
}

/* ==== 4. Long texts ===================================================================================== */

TEST(long_pieces_take_linear_time) {
    enum { LONG = 1 << 20 };
    recipe r = usual();
    char *text = malloc(LONG), why[200] = "";
    text_ids ids = { 0 };
    assert_non_null(text);
    r.nfc = 1;
    made m = make(&r);
    for (size_t i = 0; i < LONG; i++) text[i] = "ab"[i % 2];
    assert_int_equal(bpe_encode(m.t, text, LONG, 0, &ids, NULL, why, sizeof why), 0);
    assert_int_equal(ids.length, LONG / 4);
    for (size_t i = 0; i < ids.length; i++) assert_int_equal(ids.data[i], ABAB);
    for (size_t i = 0; i < LONG; i++) text[i] = ' ';
    assert_int_equal(bpe_encode(m.t, text, LONG, 0, &ids, NULL, why, sizeof why), 0);
    assert_int_equal(ids.length, LONG);
    for (size_t i = 0; i < LONG; i += 4)
        memcpy(text + i, "\xCC\x81\xCC\xA3", 4); /* NFC must sort these alternating marks */
    assert_int_equal(bpe_encode(m.t, text, LONG, 0, &ids, NULL, why, sizeof why), 0);
    assert_int_equal(ids.length, LONG);
    for (size_t i = 0; i < LONG; i += 2) assert_int_equal(ids.data[i + 1], i < LONG / 2 ? 0xA3 : 0x81);
    assert_int_equal(bpe_encode(m.t, text, BPE_MAX_TEXT + 1, 0, &ids, NULL, why, sizeof why), -1);
    assert_string_equal(why, "the text is longer than 16 MiB");
    assert_int_equal(ids.length, 0);
    free(ids.data);
    free(text);
    discard(&m);
}

TEST(exponential_expressions_are_stopped) {
    recipe r = usual();
    char why[200] = "", text[64];
    text_ids ids = { 0 };
    r.expressions[0] = "(?:a|aa|a.)+[cd]"; /* backtracks exponentially */
    made m = make(&r);
    memset(text, 'a', sizeof text);
    assert_int_equal(bpe_encode(m.t, "z", 1, 0, &ids, NULL, why, sizeof why), 0);
    assert_int_equal(ids.length, 1);
    assert_int_equal(bpe_encode(m.t, text, sizeof text, 0, &ids, NULL, why, sizeof why), -1);
    assert_string_equal(why, "an expression of the tokeniser takes too many steps");
    assert_int_equal(ids.length, 0);
    free(ids.data);
    discard(&m);
}

/* ==== 5. Damaged files ================================================================================== */

static void refused(const text_bytes *b, const char *said) {
    char why[200] = "", *copy = malloc(b->length + 1); /* exact size, so that sanitizers detect reads past the end */
    assert_non_null(copy);
    memcpy(copy, b->data, b->length);
    errno = 0;
    bpe *t = bpe_new(copy, b->length, why, sizeof why);
    CHECK(!t && strstr(why, said) && errno == EINVAL, "'%s', wanted '%s'", why, said);
    bpe_free(t);
    free(copy);
}

static void recipe_is_refused(const recipe *r, const char *said) {
    text_bytes b = made_of(r);
    refused(&b, said);
    text_bytes_free(&b);
}

TEST(invalid_tokenisers_are_refused) {
    recipe r = usual();
#define REFUSED(change, said)        \
    do {                             \
        r = usual();                 \
        change;                      \
        recipe_is_refused(&r, said); \
    } while (0)
    REFUSED(r.version = 2, "unsupported version");
    REFUSED(r.nfc = 128, "unsupported flags");
    REFUSED(r.nfc = BPE_CHARACTERS | BPE_NFC, "unsupported flags");
    REFUSED(r.nfc = BPE_PREFIX, "unsupported flags");
    REFUSED(r.expressions[0] = "(", "PCRE2 rejects");
    REFUSED(r.expressions[0] = "\\C", "PCRE2 rejects");
    REFUSED(r.expressions[0] = "(?:(?:(?:a{999}){999}){999})", "PCRE2 rejects");
    REFUSED(r.expressions[0] = "a*", "matches the empty string");
    REFUSED(r.expressions[0] = "", "matches the empty string");
    REFUSED(r.expressions[0] = "\xFF", "not valid UTF-8");
    REFUSED(r.he = "hq", "does not join two tokens");
    REFUSED(r.he = "", "does not join two tokens");
    REFUSED(r.he = "e", "two tokens for one byte");
    REFUSED(r.without = 0xEF, "not have a token for every byte");
    REFUSED(r.without = '~', "not have a token for every byte");
    REFUSED(r.merges[0][0] = ABAB + 1, "does not join two tokens");
    REFUSED(r.merges[0][2] = UINT32_MAX, "does not join two tokens");
    REFUSED((r.merges[0][0] = HE, r.merges[0][2] = HE), "does not join two tokens"); /* a merge that makes HE from HE */
    REFUSED(memcpy(r.merges[1], r.merges[0], sizeof r.merges[0]), "duplicate merge");
    REFUSED(r.added[0].id = HE, "as another token");
    REFUSED(r.added[0].id = THINK, "have the same id");
    REFUSED(r.added[0].id = BPE_MAX_TOKENS, "too large");
    REFUSED(r.added[0].text = "<end>er", "duplicate added token");
    REFUSED(r.added[0].text = "", "malformed added token");
    REFUSED(r.added[0].flags = 8, "malformed added token");
    REFUSED((r = spaced(0), r.without = 4), "not have a token for every byte");
    REFUSED((r = spaced(0), r.he = ""), "not have a token for a space");
    REFUSED((r = spaced(BPE_WHOLE)), "unsupported flags");
#undef REFUSED
}

TEST(damaged_tokenisers_are_refused_or_usable) {
    const recipe r = usual();
    text_bytes b = made_of(&r);
    uint64_t random = 47;
    for (size_t n = 0; n < b.length; n++) { /* truncate at every byte */
        text_bytes cut = { .data = b.data, .length = n };
        refused(&cut, "the tokeniser");
    }
    text_append(&b, "x", 1);
    refused(&b, "trailing bytes");
    b.length--;
    for (size_t at = 12; at < 32; at += 4) { /* make each count too large */
        char kept[4];
        memcpy(kept, b.data + at, 4);
        memset(b.data + at, 0xFF, 4);
        refused(&b, "the tokeniser has");
        memcpy(b.data + at, kept, 4);
    }
    for (size_t k = 0; k < mw_rounds(20000); k++) { /* change one random byte */
        const size_t at = mw_below(&random, b.length);
        const char kept = b.data[at];
        char why[200] = "";
        b.data[at] = (char)mw_next(&random);
        bpe *t = bpe_new(b.data, b.length, why, sizeof why);
        if (t) {
            text_ids ids = { 0 };
            text_bytes out = { 0 };
            bpe_stream stream = { 0 };
            if (!bpe_encode(t, "the<end>\xC3\xA9 12abab", 16, 1, &ids, NULL, why, sizeof why)) {
                for (size_t i = 0; i < ids.length; i++) assert_in_range(ids.data[i], 0, bpe_size(t) - 1);
                bpe_decode(t, &stream, ids.data, ids.length, &out);
            }
            free(ids.data);
            text_bytes_free(&out);
        } else assert_true(why[0] && !strchr(why, '\n'));
        bpe_free(t);
        b.data[at] = kept;
    }
    text_bytes_free(&b);
    refused(&(text_bytes){ .data = (char[]){ 0 } }, "not byte-level BPE");
    assert_null(bpe_new(NULL, 0, NULL, 0));
}

/* ==== 6. In a model file ================================================================================ */

static text_front opened(const text_bytes *b, int64_t vocabulary, const char *said) {
    char path[] = "/tmp/moe-bpe-XXXXXX", text[400];
    mw_model *m = mw_zeros(sizeof *m);
    text_front front;
    moe_error e = { MOE_OK, "", "" };
    m->random = 7;
    mw_text(m, "general.architecture", "moe-lm");
    mw_int(m, "vocab.size", vocabulary);
    mw_int(m, "model.width", 1);
    mw_int(m, "token.bos", 0);
    mw_int(m, "token.eos", END);
    mw_int(m, "decoder.layers", 1);
    mw_lstm(m, "decoder.0.", 1, 1, 0, 0);
    mw_random_matrix(m, "embedding.weight", MW_F32, (size_t)vocabulary, 1, 1);
    mw_text(m, "tokenizer.kind", "byte-bpe");
    if (b) mw_blob(m, "tokenizer.model", MW_BYTES, b->data, b->length);
    const mw_image image = mw_build(m);
    const int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, image.data, image.bytes) == (ssize_t)image.bytes);
    close(fd);
    const moe_status status = text_open(path, TEXT_REQUIRED, NULL, &front, &e);
    CHECK(status == (said ? MOE_ERROR_FORMAT : MOE_OK), "%s", text_file_error(path, &e, text, sizeof text));
    if (said) CHECK(strstr(e.message, said) && strcmp(e.where, "tokenizer.model") == 0, "%s: %s", e.where, e.message);
    unlink(path);
    free(image.data);
    mw_free(m);
    return front;
}

TEST(a_front_encodes_and_decodes) {
    static const int32_t given[] = { THE, END, SPACE_THE, THINK, 0, 0xC3, '\n', 0xC3, 0xA9 };
    const recipe r = usual();
    text_bytes b = made_of(&r), out = { 0 };
    text_front front = opened(&b, 300, NULL);
    text_ids ids = { 0 };
    moe_error e;
    text_offsets begins = { 0 };
    assert_true(text_cuts(&front));
    assert_int_equal(text_encode(&front, "the <end> the", 13, &ids, &e), MOE_OK);
    assert_int_equal(ids.length, 8); /* <end> is parsed as ordinary text */
    assert_int_equal(ids.data[7], SPACE_THE);
    assert_int_equal(text_encode_as(&front, BPE_ADDED, "the <end> the", 13, &ids, &e), MOE_OK);
    assert_int_equal(ids.length, 4);
    assert_int_equal(ids.data[2], END);
    assert_int_equal(text_encode_begins(&front, "the <end> the", 13, &begins, &e), MOE_OK);
    assert_int_equal(begins.length, 8);
    assert_int_equal(begins.data[7], 9);
    assert_int_equal(text_decode(&front, given, 9, &out, &e), MOE_OK); /* drops control tokens; '\n' becomes a space */
    assert_string_equal(out.data, "the the<end>er\xEF\xBF\xBD \xC3\xA9");
    assert_int_equal(text_decode_begins(&front, given, 9, &begins, &e), MOE_OK);
    assert_int_equal(begins.length, 9);
    assert_int_equal(begins.data[1], 3);
    assert_int_equal(begins.data[3], 7);
    text_clear(&out);
    assert_int_equal(text_join_pieces(&front, given, 3, &out, &e), MOE_OK);
    assert_string_equal(out.data, "the <end> \xC4\xA0the");
    assert_int_equal(text_parse_pieces(&front, out.data, out.length, &ids, &e), MOE_OK);
    assert_int_equal(ids.length, 3);
    assert_memory_equal(ids.data, given, 3 * sizeof *given);
    assert_int_equal(text_parse_pieces(&front, "xyz", 3, &ids, &e), MOE_ERROR_ARGUMENT);
    text_ids_free(&ids);
    free(begins.data);
    text_close(&front);
    front = opened(&b, IDS - 1, "ids up to 262, but the model has only 262 tokens");
    front = opened(NULL, 300, "not byte-level BPE");
    text_bytes_free(&out);
    text_bytes_free(&b);
}

int main(void) { return run_all_tests(NULL, NULL); }
