/* align.h - word alignment of a text and its translation, from a model's attention. */
#ifndef TEXT_ALIGN_H
#define TEXT_ALIGN_H

#include "tools/text/moetext.h"

/* A text or its translation, as tokens and words. */
typedef struct text_side {
    const int32_t *word; /* [tokens] index of the word that contains the token, or -1 */
    size_t tokens, words;
} text_side;

/* Reusable buffers, which must be all zero at first. */
typedef struct text_aligner {
    float *fit;
    size_t capacity;
} text_aligner;

typedef moe_status (*text_link_fn)(void *user, size_t source_word, size_t target_word, moe_error *error);

/* Link words by attention. `forward` [target tokens, source tokens] is the attention of the written target to the
 * source; `back` [source tokens, target tokens] (may be NULL) is the attention of the written source to the target.
 * Multiply both weights and link two words unless one of them fits another word more than 1 / share times better.
 * Links are sorted by source word, then by target word. */
moe_status text_align(text_aligner *aligner, const text_side *source, const text_side *target, const float *forward,
                      const float *back, float share, text_link_fn link, void *user, moe_error *error);
void text_aligner_free(text_aligner *aligner);

/* Links, sorted as in moetext.h. */
typedef struct text_links {
    moetext_link *data;
    size_t n, capacity;
} text_links;

/* Compose the links of two consecutive models, and append the result. Takes n log n time. Errors: MOE_ERROR_MEMORY. */
moe_status text_links_through(const moetext_link *first, size_t n_first, const moetext_link *second, size_t n_second,
                              text_links *out, moe_error *error);

#endif
