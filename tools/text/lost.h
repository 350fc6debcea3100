/* lost.h - detects bad translations by comparing them with their sources. */
#ifndef TEXT_LOST_H
#define TEXT_LOST_H

#include "moe.h"

/* Return 1 if a translation has far more consecutive repetitions than its source, or if both have repetitions and the
 * translation is more than twice as long. Takes time linear in both lengths. */
int text_loops(moe_span source, moe_span target);

typedef enum text_names {
    TEXT_NO_NAMES,    /* the text is not a list, or most of its words are translated */
    TEXT_NAMES,       /* all names of the list are in the translation */
    TEXT_NAMES_COUNT, /* the translation has more or fewer items than the list */
    TEXT_NAMES_LOST,  /* most words of the list are in the translation, but not all */
    TEXT_NAMES_MEMORY
} text_names;

/* Compare lists of names, separated by commas, whose words start with capitals. Takes n log n time. */
text_names text_names_kept(moe_span source, moe_span target);

/* Return 1 if the translation has at least as many signs between words (text_sign of sentences.h) as its source. A /
 * without spaces counts too. */
int text_signs_kept(moe_span source, moe_span target);

#endif
