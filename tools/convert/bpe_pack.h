/* bpe_pack.h - packs a BPE tokeniser in the format of tools/text/bpe.h; the same bytes as byte_bpe.py. */
#ifndef CONVERT_BPE_PACK_H
#define CONVERT_BPE_PACK_H

#include "tools/convert/making.h"

enum { PACK_MAX_EXPRESSIONS = 16, PACK_MAX_TOKENS = 1 << 20, PACK_MAX_ADDED = 16384 };

typedef struct pack_added { /* a token that is matched before the text is split */
    int64_t id;
    moe_span content;
    int special, normalised, in_text; /* in_text: also matched in users' texts */
} pack_added;

typedef struct pack_merge {
    moe_span left, right;
} pack_merge;

typedef struct pack_parts {
    const char *file; /* for messages */
    moe_span *tokens; /* [n_tokens] by id; data NULL if unused */
    size_t n_tokens;
    pack_merge *merges; /* by descending priority */
    size_t n_merges;
    pack_added *added;
    size_t n_added, added_capacity;
    const char *expressions[PACK_MAX_EXPRESSIONS]; /* texts of rows EXPRESSION */
    size_t n_expressions;
    unsigned flags; /* BPE_NFC ... of bpe.h */
} pack_parts;

/* Return the text of the row EXPRESSION with this name, or with this text; NULL if there is none. */
const char *pack_expression(const char *name, size_t length);
const char *pack_expression_like(const char *text);

/* Derive the merges of a SentencePiece model from the scores of its tokens, as transformers does: all pairs of tokens
 * that join to a token, ordered by its score. */
int pack_derive_merges(making *m, pack_parts *parts, const float *scores);
/* Append the packed tokeniser to `blob`. */
int pack_tokeniser(making *m, const pack_parts *parts, text_bytes *blob);
/* Return the longest added token that a text starts with, or NULL. */
const pack_added *pack_added_at(const pack_parts *parts, const char *text);

#endif
