/* glossary.h - terms that a translation must use: read from a file, found in a text. */
#ifndef TEXT_GLOSSARY_H
#define TEXT_GLOSSARY_H

#include "moe.h"
#include "tools/text/text.h"

typedef struct text_term {
    char *source, *target; /* each ended by a NUL */
    size_t length;         /* of the source */
    int stays;             /* both are the same: a name */
    text_ids ids;          /* of the target */
} text_term;

/* Never changes: any number of threads may share it. */
typedef struct text_glossary text_glossary;

/* A file of lines "source TAB target". A line without a TAB is a name, which stays as it is; a blank one, or one that
 * begins with #, says nothing. `targets`: what the targets are encoded with. Errors: MOE_ERROR_IO, MOE_ERROR_ARGUMENT
 * (a line; `where` says which), MOE_ERROR_MEMORY. */
moe_status text_glossary_open(const text_front *targets, const char *path, text_glossary **out, moe_error *error);
void text_glossary_free(text_glossary *glossary); /* NULL is fine */

/* The longest term at text[at], where a word begins, as it is written or with a capital first letter, and its bytes in
 * the text; of several the last. NULL: none. */
const text_term *text_glossary_find(const text_glossary *glossary, const char *text, size_t length, size_t at,
                                    size_t *bytes);

/* The bytes of the word, or of the sign, at text[at]. */
size_t text_word_length(const char *text, size_t length, size_t at);

#endif
