/* lost.h - detects bad translations by comparing them with their sources. */
#ifndef TEXT_LOST_H
#define TEXT_LOST_H

#include "moe.h"
#include "tools/text/bytes.h"

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

/* Return 1 if the target has as many dashes and slashes as join words in its source (joints of text_half_at_joint). */
int text_joints_kept(moe_span target, const size_t joints[2]);

/* Return 1 if the target is empty or has a letter outside spans, or if the source has no word of four letters outside
 * spans. Takes linear time. */
int text_words_kept(moe_span source, moe_span target);

/* Return 1 if the target has the brackets of its source (those that adjoin a word, as in "file(s)", may be missing) and
 * as few unpaired brackets and quotation marks. Takes linear time. */
int text_brackets_kept(moe_span source, moe_span target);

/* Return 1 if a translation has more of the signs * _ ^ | \ @ ~ < > than its source, or more $ or # if the source has
 * any. Such signs are fragments of placeholders, or noise. */
int text_signs_added(moe_span source, moe_span target);

typedef enum text_figures {
    TEXT_FIGURES_KEPT,
    TEXT_FIGURES_LOST, /* a number is missing, occurs more often than in the source, or is extended (1 to 1:3) */
    TEXT_FIGURES_ADDED /* the target has a number of its own, which may be a placeholder's */
} text_figures;

/* Compare the numbers of a source and its translation, which may write them as its language does: 1,000.5 as 1.000,5,
 * 9pm as 21 Uhr, 3rd in words. `digits` has a bit for each digit of the placeholders that the model read. *figures is
 * the result. Takes n log n time. Errors: MOE_ERROR_MEMORY. */
moe_status text_figures_compare(moe_span source, moe_span target, unsigned digits, text_figures *figures,
                                moe_error *error);

/* Return the digit at `at` in any script, 0 to 9, or -1, and the length of the character. */
int text_digit(moe_span s, size_t at, size_t *bytes);

#endif
