/* recall.h - a translation memory: finds earlier texts that are equal or similar to a text.
 *
 * A text is compared without the white space at its ends. Languages are compared by their codes: en matches en-GB but
 * not de, and pt-BR does not match pt-PT; an unknown language matches every language.
 */
#ifndef TEXT_RECALL_H
#define TEXT_RECALL_H

#include "tools/text/bytes.h"

/* Any number of threads may use it. Pairs stay valid until it is freed, also those that were replaced. */
typedef struct text_recall text_recall;

typedef enum text_match_kind {
    TEXT_MATCH_NONE,
    TEXT_MATCH_FUZZY,    /* at least TEXT_FUZZY similar */
    TEXT_MATCH_REPAIRED, /* fuzzy, with a translation that a model has repaired (repair.h) */
    TEXT_MATCH_ADAPTED,  /* equal except for spans that the translation has too, the final mark or white space */
    TEXT_MATCH_EXACT
} text_match_kind;

#define TEXT_FUZZY 0.7f
#define TEXT_RECALL_WEIGHT 4.0f /* of the similarity to a fuzzy match, in scores of translations */

typedef struct text_match {
    text_match_kind kind;
    float similarity;            /* 1 - edit distance / number of words of the longer text; 1 if exact */
    const char *source, *target; /* the pair, NUL-terminated */
} text_match;

enum {
    TEXT_RECALL_BYTES = 1 << 16, /* maximum of a source or translation */
    TEXT_RECALL_WORDS = 256,     /* longer texts have only exact matches */
    TEXT_RECALL_MOST = 1 << 24,  /* maximum number of pairs */
    TEXT_RECALL_FILE = 1 << 30   /* maximum bytes of a file */
};

/* Errors: MOE_ERROR_MEMORY. */
moe_status text_recall_new(text_recall **out, moe_error *error);
void text_recall_free(text_recall *recall); /* may be NULL */

/* Add a pair, which replaces an earlier one with the same source and languages. Pairs with a blank text are ignored. A
 * translation of one line has one line. Errors: MOE_ERROR_ARGUMENT (not UTF-8, too long), MOE_ERROR_LIMIT,
 * MOE_ERROR_MEMORY. */
moe_status text_recall_add(text_recall *recall, moe_span source_language, moe_span target_language, moe_span source,
                           moe_span target, moe_error *error);
/* Add the pairs of a file's content (units.h); longer pairs than TEXT_RECALL_BYTES are left out. */
moe_status text_recall_read(text_recall *recall, const char *data, size_t length, moe_error *error);
/* Read a file, and add its content to the hash. Errors: MOE_ERROR_IO, those of text_recall_read; messages begin with
 * the path. */
moe_status text_recall_load(text_recall *recall, const char *path, moe_error *error);

size_t text_recall_count(text_recall *recall); /* number of pairs, without replaced ones */
/* Return the SHA-256 of the files, in hexadecimal; "" without a file. With several files, of their hashes. */
const char *text_recall_hash(text_recall *recall);

/* Find the best match; match->kind is TEXT_MATCH_NONE if there is none. An exact one is the last that was added; among
 * equally similar ones, the last added wins. If it is exact or adapted, append to *out the translation, with the text's
 * white space at both ends. Languages may be NULL or "" if unknown. Errors: MOE_ERROR_MEMORY. */
moe_status text_recall_find(text_recall *recall, moe_span text, const char *source, const char *target,
                            text_match *match, text_bytes *out, moe_error *error);

/* Find the words, signs and protected spans of valid UTF-8: offset and end of each. Errors: MOE_ERROR_MEMORY. */
moe_status text_recall_words(moe_span text, text_offsets *words, moe_error *error);
/* Return how similar two texts are, 0 to 1: the share of common character trigrams. Errors: MOE_ERROR_MEMORY. */
moe_status text_recall_compare(moe_span a, moe_span b, float *similarity, moe_error *error);

#endif
