/* glossary.h - terms that a translation must use: read from a file, found in a text. */
#ifndef TEXT_GLOSSARY_H
#define TEXT_GLOSSARY_H

#include "moe.h"
#include "tools/text/text.h"

enum { TEXT_TERM_CHARACTERS = 800 }; /* most of a term, taken apart */

typedef struct text_term {
    char *target;        /* ended by a NUL */
    int32_t *characters; /* [n_characters] of the source, composed */
    size_t n_characters;
    int stays;     /* both are the same: a name */
    int inflected; /* its last word may have an ending */
    text_ids ids;  /* of the target */
} text_term;

/* Never changes: any number of threads may share it. */
typedef struct text_glossary text_glossary;

/* All of a file of terms, appended to *data. Errors: MOE_ERROR_IO (the message names the file), MOE_ERROR_MEMORY. */
moe_status text_glossary_load(const char *path, text_bytes *data, moe_error *error);
/* Lines "source TAB target"; a line without a TAB is a name, which stays as it is; a blank one, or one that begins with
 * #, says nothing. Or CSV, where `name` ends in .csv, or no line has a TAB and each has one comma or each one
 * semicolon. `targets`: what the targets are encoded with; it must outlive the glossary. Errors: MOE_ERROR_ARGUMENT
 * (`where` says which line), MOE_ERROR_MEMORY. */
moe_status text_glossary_read(const text_front *targets, const char *name, const char *data, size_t length,
                              text_glossary **out, moe_error *error);
/* The same of `n` terms that are given: sources[i] must become targets[i]. `where` says which term it was. */
moe_status text_glossary_of(const text_front *targets, const char *const *sources, const char *const *translations,
                            size_t n, text_glossary **out, moe_error *error);
size_t text_glossary_count(const text_glossary *glossary); /* of its terms */
const char *text_glossary_target(const text_glossary *glossary, size_t i);
void text_glossary_free(text_glossary *glossary); /* NULL is fine */

/* The longest term at text[at], where a word or sign begins, and its bytes in the text; of several an exact one, then
 * the last. NULL: none. The text may have capital letters where the term has small ones; composed and decomposed
 * characters are equal; a last word of three letters or more may have a regular ending: -s, -es, -x, -'s, and where it
 * has a capital first letter, as German nouns have, -e, -n, -en, -er, -ern, -em: then *inflected is 1. */
const text_term *text_glossary_find(const text_glossary *glossary, const char *text, size_t length, size_t at,
                                    size_t *bytes, int *inflected);

/* Whether some bytes are a regular ending that the target of a term may have. */
int text_term_ends(const text_term *term, const char *ending, size_t length);

/* Whether a text that is the term is in capitals where the term is not. */
int text_term_is_capitals(const text_term *term, const char *text, size_t length);
/* Append that text with the capitals of the term alone. */
void text_term_lower_case(const text_term *term, const char *text, size_t length, text_bytes *out);

/* The bytes of the word, or of the sign, at text[at]. */
size_t text_word_length(const char *text, size_t length, size_t at);

#endif
