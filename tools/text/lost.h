/* lost.h - whether a translation went astray, told from the two texts alone. */
#ifndef TEXT_LOST_H
#define TEXT_LOST_H

#include "moe.h"

/* Whether a translation repeats something in a row far more often than its source does, or repeats itself to more than
 * twice the length of a source that does. Time is linear in both. */
int text_loops(moe_span source, moe_span target);

typedef enum text_names {
    TEXT_NO_NAMES,    /* this is no list, or most of its words are others in the translation: they have one */
    TEXT_NAMES,       /* each of them is in the translation */
    TEXT_NAMES_COUNT, /* this is a list, and the translation has more items, or fewer */
    TEXT_NAMES_LOST,  /* most of the words are in the translation, and some are not */
    TEXT_NAMES_MEMORY
} text_names;

/* Of a list: items with commas between, of words that all begin with a capital. Time is n log n. */
text_names text_names_kept(moe_span source, moe_span target);

/* Whether a translation has as many signs between words as its source (text_sign of sentences.h); a / without spaces
 * counts too. */
int text_signs_kept(moe_span source, moe_span target);

#endif
