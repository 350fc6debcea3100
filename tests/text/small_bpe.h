/* small_bpe.h - writes a small BPE tokeniser in the format of bpe.h. For test_bpe.c, test_linear.c and
 * fuzz_bpe.c. Tests modify the recipe and may make it invalid.
 */
#ifndef SMALL_BPE_H
#define SMALL_BPE_H

#include "tools/text/bpe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 256, HE = 256, THE, SPACE_THE, AB, ABAB, END, THINK, IDS };

static inline void put(text_bytes *b, uint32_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        const char byte = (char)(value >> 8 * i & 0xFF);
        text_append(b, &byte, 1);
    }
}

static inline void put_text(text_bytes *b, const char *text) {
    put(b, (uint32_t)strlen(text), 2);
    text_append_string(b, text);
}

/* Return the character that represents a byte in GPT-2's alphabet. The byte is also the id of its token. */
static inline const char *character_of(unsigned byte, char out[3]) {
    const int printable = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
    const unsigned c = printable ? byte : byte < 0x21 ? 0x100 + byte : byte == 0xAD ? 0x143 : 0x121 + byte - 0x7F;
    if (c < 0x80) out[0] = (char)c, out[1] = 0;
    else out[0] = (char)(0xC0 | c >> 6), out[1] = (char)(0x80 | (c & 0x3F)), out[2] = 0;
    return out;
}


typedef struct recipe {
    uint32_t version, nfc, merges[6][3];
    uint32_t without;                /* a byte without a token; 0 if every byte has one */
    const char *expressions[3], *he; /* spelling of the token HE */
    size_t n_expressions, n_merges, n_added;
    struct {
        uint32_t id, flags;
        const char *text;
    } added[3];
} recipe;

static inline recipe usual(void) {
    return (recipe){
        .version = 1,
        .merges = { { 'h', 'e', HE }, { 't', HE, THE }, { ' ', THE, SPACE_THE }, { 'a', 'b', AB }, { AB, AB, ABAB } },
        .expressions = { "[0-9]{1,3}", " ?\\p{L}+| ?[^ \\p{L}]+| +(?! )| +" },
        .he = "he",
        .n_expressions = 2,
        .n_merges = 5,
        .n_added = 2,
        .added = { { END, 1, "<end>" }, { THINK, 0, "<end>er" } }
    };
}

/* Tokens of characters, with the ids HE to ABAB. */
static const char *const of_characters[] = { "\xE2\x96\x81", "h", "\xE2\x96\x81h", "e", "he" };
enum { MARK = HE, H, MARK_H, E, H_E };

/* Return a tokeniser of characters; `flags` are added to BPE_CHARACTERS. */
static inline recipe spaced(uint32_t flags) {
    recipe r = usual();
    r.nfc = BPE_CHARACTERS | flags;
    r.n_expressions = 0;
    const uint32_t merges[][3] = { { MARK, H, MARK_H }, { H, E, H_E } };
    memcpy(r.merges, merges, sizeof merges);
    r.n_merges = 2;
    return r;
}

static inline text_bytes made_of(const recipe *r) {
    text_bytes b = { 0 };
    char text[3];
    text_append(&b, "MOE-BPE", 8);
    put(&b, r->version, 4), put(&b, r->nfc, 4), put(&b, (uint32_t)r->n_expressions, 4), put(&b, ABAB + 1, 4);
    put(&b, (uint32_t)r->n_merges, 4), put(&b, (uint32_t)r->n_added, 4);
    for (size_t i = 0; i < r->n_expressions; i++) put_text(&b, r->expressions[i]);
    for (unsigned byte = 0; byte < BYTES; byte++) {
        char spelled[8];
        snprintf(spelled, sizeof spelled, "<0x%02X>", byte);
        if (byte && byte == r->without) put_text(&b, "");
        else put_text(&b, r->nfc & BPE_CHARACTERS ? spelled : character_of(byte, text));
    }
    for (size_t i = 0; i < 5 && r->nfc & BPE_CHARACTERS; i++) put_text(&b, i || *r->he ? of_characters[i] : "");
    if (!(r->nfc & BPE_CHARACTERS)) {
        put_text(&b, r->he), put_text(&b, "the"), put_text(&b, "\xC4\xA0the");
        put_text(&b, "ab"), put_text(&b, "abab");
    }
    for (size_t i = 0; i < r->n_merges; i++)
        for (size_t k = 0; k < 3; k++) put(&b, r->merges[i][k], 4);
    for (size_t i = 0; i < r->n_added; i++)
        put(&b, r->added[i].id, 4), put(&b, r->added[i].flags, 4), put_text(&b, r->added[i].text);
    if (b.failed) abort();
    return b;
}

#endif
