/* glossary.h - terms that a translation must use: read from a file, found in a text. */
#ifndef TEXT_GLOSSARY_H
#define TEXT_GLOSSARY_H

#include "moe.h"
#include "tools/text/text.h"

enum { TEXT_TERM_CHARACTERS = 800 }; /* most characters of a decomposed term */

typedef struct text_term {
    char *target;        /* ended by a NUL */
    int32_t *characters; /* [n_characters] of the source, in NFC */
    size_t n_characters;
    int stays;     /* source and target are equal: a name */
    int inflected; /* the last word can have an ending */
    text_ids ids;  /* of the target */
} text_term;

/* Immutable, so threads may share it. */
typedef struct text_glossary text_glossary;

/* Append a file of terms to *data. Errors: MOE_ERROR_IO (the message names the file), MOE_ERROR_MEMORY. */
moe_status text_glossary_load(const char *path, text_bytes *data, moe_error *error);
/* Read lines "source TAB target". A line without a TAB is a name, which is copied; blank lines and lines that start
 * with # are ignored. CSV is recognised by `name` ending in .csv, or if no line has a TAB and every line has one comma
 * or every line one semicolon. `targets` encodes the targets and must outlive the glossary. Errors: MOE_ERROR_ARGUMENT
 * (`where` names the line), MOE_ERROR_MEMORY. */
moe_status text_glossary_read(const text_front *targets, const char *name, const char *data, size_t length,
                              text_glossary **out, moe_error *error);
/* The same with `n` given terms: sources[i] must become targets[i]. `where` names the term. */
moe_status text_glossary_of(const text_front *targets, const char *const *sources, const char *const *translations,
                            size_t n, text_glossary **out, moe_error *error);
size_t text_glossary_count(const text_glossary *glossary); /* number of terms */
const char *text_glossary_target(const text_glossary *glossary, size_t i);
void text_glossary_free(text_glossary *glossary); /* NULL is fine */

/* Return the longest term at text[at], the start of a word or sign, and its bytes; of several an exact one, then the
 * last one; otherwise NULL. A lower-case letter of a term matches a capital, and composed characters match
 * decomposed ones. A last word of three letters or more may have a regular ending: -s, -es, -x, -'s, and if it is
 * capitalised, like German nouns, -e, -n, -en, -er, -ern, -em; then *inflected is 1. */
const text_term *text_glossary_find(const text_glossary *glossary, const char *text, size_t length, size_t at,
                                    size_t *bytes, int *inflected);

/* Return 1 if some bytes are a regular ending that the target of a term can have. */
int text_term_ends(const text_term *term, const char *ending, size_t length);

/* Return 1 if a text that is the term is in capitals and the term is not. */
int text_term_is_capitals(const text_term *term, const char *text, size_t length);
/* Append that text with only the capitals of the term. */
void text_term_lower_case(const text_term *term, const char *text, size_t length, text_bytes *out);

/* Return the bytes of the word or sign at text[at]. */
size_t text_word_length(const char *text, size_t length, size_t at);

#endif
