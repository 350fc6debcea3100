/* reliability.h - fit the table of tools/text/confidence.h on pairs, for moe-calibrate --confidence.
 *
 * The model translates the sources with its own search. A translation is right if its chrF against the reference is at
 * least 60. Lines with odd numbers fit the table: logistic regression on the features, then the share of right
 * translations in groups of equal size, made rising by pooling neighbours (isotonic regression). Lines with even
 * numbers only test it.
 */
#ifndef RELIABILITY_H
#define RELIABILITY_H

#include "tools/programs/program.h"

/* Fit a table on the file `pairs` (lines of source language TAB target language TAB source TAB reference), print its
 * reliability and write the model with the table to o->output. Return the exit status. */
int reliability_fit(program_common *o, const char *pairs);

/* Return sacreBLEU's chrF of a translation, 0 to 100; -1 if out of memory. */
double reliability_chrf(const char *text, size_t length, const char *reference, size_t reference_length);

#endif
