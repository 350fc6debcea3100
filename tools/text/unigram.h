/* unigram.h - SentencePiece's Unigram models: text to token ids and back.
 *
 * Gives the same results as SentencePiece 0.1.97 to 0.2.0, even among segmentations of equal score, so ids do not
 * depend on a machine's library. A model opens in a few milliseconds, because it needs no sorted trie.
 *
 * A unigram is immutable, so threads may share it. Model: Kudo 2018, "Subword Regularization", arXiv 1804.10959.
 */
#ifndef TEXT_UNIGRAM_H
#define TEXT_UNIGRAM_H

#ifdef __cplusplus
extern "C" {
#endif

#include "tools/text/bytes.h"

/* The types of pieces in a .model file. */
typedef enum unigram_kind {
    UNIGRAM_NORMAL = 1,
    UNIGRAM_UNKNOWN,
    UNIGRAM_CONTROL,
    UNIGRAM_USER_DEFINED, /* always chosen where the text contains it */
    UNIGRAM_UNUSED,
    UNIGRAM_BYTE /* spelled <0xHH> */
} unigram_kind;

typedef struct unigram_piece {
    const char *text; /* without NUL bytes */
    size_t length;    /* at least 1 */
    float score;      /* log-probability; finite */
    uint64_t kind;    /* unigram_kind */
} unigram_piece;

/* A checked .model file: strings without NUL bytes, and a character map whose trie stays within its bounds. */
typedef struct unigram_model {
    const unigram_piece *pieces;
    size_t n_pieces;
    const char *map; /* the normaliser's character map */
    size_t map_bytes;
    const char *unknown; /* the text of the unknown token */
    size_t unknown_bytes;
    int prefix;   /* 1: add a space before the text (add_dummy_prefix) */
    int collapse; /* 1: merge adjacent spaces (remove_extra_whitespaces) */
    int escape;   /* 1: replace spaces by U+2581 (escape_whitespaces) */
    int fallback; /* 1: split unknown characters into bytes (byte_fallback) */
} unigram_model;

typedef struct unigram unigram;

/* Create a unigram from a copy of a model. Return NULL with errno ENOMEM, or EINVAL if SentencePiece may interpret the
 * model differently: duplicate texts, no or several unknown tokens, missing bytes, unknown types. */
unigram *unigram_new(const unigram_model *model);
void unigram_free(unigram *u); /* may be NULL */

int32_t unigram_size(const unigram *u);
int32_t unigram_unknown(const unigram *u);                              /* the id of the unknown token */
const char *unigram_text(const unigram *u, int32_t id, size_t *length); /* NUL-terminated; the id must be valid */
unigram_kind unigram_kind_of(const unigram *u, int32_t id);             /* the id must be valid */
int32_t unigram_id(const unigram *u, const char *piece, size_t length); /* -1 if unknown */

/* Tokens of a text. Outputs may be NULL; the others are replaced. */
typedef struct unigram_tokens {
    text_ids *ids;
    text_offsets *begins; /* offset of each token in the text */
    text_bytes *pieces;   /* NUL-terminated texts of the tokens, for unknown tokens their characters */
} unigram_tokens;

/* Encode a text of at most 2^28 bytes, without NUL bytes. Invalid UTF-8 becomes U+FFFD. Return 0 if out of memory. */
int unigram_encode(const unigram *u, const char *text, size_t length, const unigram_tokens *out);

/* Decode `n` NUL-terminated pieces or, if `pieces` is NULL, valid ids. Replace *text and *begins, the offset of each
 * token in the text, which may be NULL. Return 0 if out of memory. */
int unigram_decode(const unigram *u, const int32_t *ids, const char *pieces, size_t n, text_bytes *text,
                   text_offsets *begins);

#ifdef __cplusplus
}
#endif
#endif
