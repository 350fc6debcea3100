/* glossary.h - reads from a file the terms that translations must use, and finds them in a text. */
#ifndef TEXT_GLOSSARY_H
#define TEXT_GLOSSARY_H

#include "moe.h"
#include "tools/text/text.h"

enum { TEXT_TERM_CHARACTERS = 800 }; /* maximum characters of a decomposed term */

typedef struct text_term {
    char *source, *target; /* NUL-terminated */
    int32_t *characters;   /* [n_characters] characters of the source, or of one of its plurals, in NFC */
    size_t n_characters;
    size_t number; /* index of the term in the glossary */
    int plural;    /* 1 if `characters` are a plural, such as companies; the other members are the term's */
    int stays;     /* 1 if source and target are equal (a name) */
    int inflected; /* 1 if the last word can have an ending */
    text_ids ids;  /* token ids of the target */
} text_term;

/* How often a term occurred in the texts, and in their translations. */
typedef struct text_term_count {
    uint64_t asked, kept;
} text_term_count;

/* Immutable, so threads may share it, except for the counts, which one thread at a time may change. */
typedef struct text_glossary text_glossary;

/* Append a file of terms to *data. Errors: MOE_ERROR_IO (the message names the file), MOE_ERROR_MEMORY. */
moe_status text_glossary_load(const char *path, text_bytes *data, moe_error *error);
/* Read lines "source TAB target". A line without a TAB is a name, which is copied; blank lines and lines that start
 * with # are ignored, and so is a first line that names the columns (heading.h). CSV is recognised by `name` ending in
 * .csv, or if no line has a TAB and every line has one comma or every line one semicolon. `targets` encodes the targets
 * and must outlive the glossary. Errors: MOE_ERROR_ARGUMENT
 * (`where` names the line), MOE_ERROR_MEMORY. */
moe_status text_glossary_read(const text_front *targets, const char *name, const char *data, size_t length,
                              text_glossary **out, moe_error *error);
/* Make a glossary of `n` terms: sources[i] becomes translations[i]. Errors are as in text_glossary_read. */
moe_status text_glossary_of(const text_front *targets, const char *const *sources, const char *const *translations,
                            size_t n, text_glossary **out, moe_error *error);
size_t text_glossary_count(const text_glossary *glossary); /* number of terms */
const text_term *text_glossary_term(const text_glossary *glossary, size_t i);
text_term_count *text_glossary_counts(const text_glossary *glossary, size_t i);
const char *text_glossary_heading(const text_glossary *glossary); /* the ignored first line, or "" */
void text_glossary_free(text_glossary *glossary);                 /* may be NULL */

/* Return the longest term at text[at], which must be the start of a word or sign, and set *bytes to its length; return
 * NULL if no term matches. An exact match has priority, then the last term. A lower-case letter of a term matches a
 * capital, and composed characters match decomposed ones. If the last word has three letters or more, it may have a
 * regular ending (-s, -es, -x, -'s, and after a capital, as in German nouns, -e, -n, -en, -er, -ern, -em) or another
 * regular plural (companies, Häuser, bases de données); *inflected is then 1. */
const text_term *text_glossary_find(const text_glossary *glossary, const char *text, size_t length, size_t at,
                                    size_t *bytes, int *inflected);

/* Return 1 if `ending` is a regular ending that the target of the term can have. */
int text_term_ends(const text_term *term, const char *ending, size_t length);

/* Return 1 if a text that matches the term is in capitals and the term is not. */
int text_term_is_capitals(const text_term *term, const char *text, size_t length);
/* Append a text that matches the term, with capitals only where the term has them. */
void text_term_lower_case(const text_term *term, const char *text, size_t length, text_bytes *out);

/* Return the length of the word or sign at text[at]. */
size_t text_word_length(const char *text, size_t length, size_t at);

#endif
