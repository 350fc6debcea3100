/* lost.h - detects bad translations by comparing them with their sources. */
#ifndef TEXT_LOST_H
#define TEXT_LOST_H

#include "moe.h"

/* Return 1 if a translation repeats something in a row far more often than its source, or if both repeat themselves and
 * the translation is more than twice as long. Takes time linear in both. */
int text_loops(moe_span source, moe_span target);

typedef enum text_names {
    TEXT_NO_NAMES,    /* not a list, or most of its words are translated */
    TEXT_NAMES,       /* all names of the list are in the translation */
    TEXT_NAMES_COUNT, /* a list whose translation has more or fewer items */
    TEXT_NAMES_LOST,  /* most of the words are in the translation, some are not */
    TEXT_NAMES_MEMORY
} text_names;

/* Compare lists of names, separated by commas, whose words start with capitals. Takes n log n time. */
text_names text_names_kept(moe_span source, moe_span target);

/* Return 1 if the translation has at least as many signs between words (text_sign of sentences.h) as its source. A /
 * without spaces counts too. */
int text_signs_kept(moe_span source, moe_span target);

#endif
