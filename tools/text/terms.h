/* terms.h - finds glossary terms in a text with markup, and verifies them in the translation. */
#ifndef TEXT_TERMS_H
#define TEXT_TERMS_H

#include "tools/text/glossary.h"
#include "tools/text/spans.h"

/* A text without the markup inside sentences, such as <b>, <x1> and soft hyphens. All zero if empty. */
typedef struct text_plain {
    text_bytes text;
    uint32_t *from; /* [text.length] offset of each byte in the text with markup */
    size_t capacity;
} text_plain;

/* Return 1 if a span at data[at] is markup inside a sentence, over which a term may continue. */
int text_is_hidden(const char *data, size_t at, text_span_kind kind, size_t bytes);
/* Fill `plain` from valid UTF-8; `spans` is 0 to copy the text. Errors: MOE_ERROR_MEMORY. */
moe_status text_plain_set(text_plain *plain, moe_span text, int spans, text_message_text message, moe_error *error);
void text_plain_free(text_plain *plain);

/* Find the term at a word or sign of a plain text, where a scan found a span of `kind` and *bytes. Return NULL if none
 * matches, or if the span is longer; else set *bytes and *inflected as text_glossary_find does. */
const text_term *text_term_at(const text_glossary *glossary, const text_bytes *plain, size_t at, text_span_kind kind,
                              size_t *bytes, int *inflected);

/* What is known about a translation. */
typedef struct text_terms_known {
    int spans;                 /* 1 if spans are protected */
    text_message_text message; /* kind of ICU message text */
    int inflects;              /* 1 if all terms may have regular endings, which the model chooses */
    /* For terms that the model did not write by itself, otherwise empty: */
    moe_span without; /* the translation without the glossary */
    /* Return the n-th word of that translation which a term should replace, NULL if unknown; may be NULL. */
    const char *(*old_word)(const void *user, const text_term *term, size_t n);
    const void *user;
} text_terms_known;

/* Count the glossary terms in a text, and those that its translation has as separate words. Append to `uses` (may be
 * NULL), for each occurrence, 2 * the number of the term, + 1 if the translation has it. Append a message about each
 * term that is missing, repeated, next to the word that it should replace, or replaces none. Errors: MOE_ERROR_MEMORY.
 */
moe_status text_terms_check(const text_glossary *glossary, moe_span source, moe_span target,
                            const text_terms_known *known, text_ids *uses, text_bytes *message, moe_error *error);

/* Find up to `most` terms that a translation lacks, in the order of the source; set *n. Errors: MOE_ERROR_MEMORY. */
moe_status text_terms_missing(const text_glossary *glossary, moe_span source, moe_span target,
                              const text_terms_known *known, const text_term **found, size_t most, size_t *n,
                              moe_error *error);

/* Append a source with `n` of its terms replaced by their targets. Markup inside a term follows its target. Set
 * *first to the offset of the last one of `terms` in the source. Errors: MOE_ERROR_MEMORY. */
moe_status text_terms_write(const text_glossary *glossary, moe_span source, const text_terms_known *known,
                            const text_term *const *terms, size_t n, text_bytes *out, size_t *first, moe_error *error);

#endif
