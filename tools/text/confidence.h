/* confidence.h - the probability that a translation is right.
 *
 * "Right" means a chrF of at least 60 against a reference. moe-calibrate --confidence fits a table on pairs and stores
 * it in the model file as "confidence.table": a linear function of the features below, and a rising table that maps its
 * value to a probability. All numbers are integers, so that every machine gives the same probability. Readers
 * that do not know the key ignore it.
 *
 * The table: TEXT_CONFIDENCE_FORM; the number of points n; for results with and without a reverse score, a weight per
 * feature, n values of the function, n probabilities, and a number for each of the directions in
 * "confidence.directions" ("en-de"), which is added to the value. All are millionths. Between two points the
 * probability is linear. If the source language is unknown, the mean of the target's directions is added.
 */
#ifndef TEXT_CONFIDENCE_H
#define TEXT_CONFIDENCE_H

#include "tools/text/moetext.h"

#define TEXT_CONFIDENCE_KEY "confidence.table"
#define TEXT_CONFIDENCE_DIRECTIONS "confidence.directions"

enum {
    TEXT_CONFIDENCE_FORM = 1,
    TEXT_CONFIDENCE_ONE = 1000000,
    TEXT_CONFIDENCE_POINTS = 64, /* maximum number */
    TEXT_CONFIDENCE_FEATURES = 9
};

/* Write the features of the best hypothesis, in millionths. Return 0 if the model has not generated it, 1, or 2 if it
 * has no reverse score. */
int text_confidence_features(const moetext_result *result, int64_t out[TEXT_CONFIDENCE_FEATURES]);
/* Return the value of the linear function. */
int64_t text_confidence_value(const int64_t *weights, const int64_t features[TEXT_CONFIDENCE_FEATURES]);
/* Return the probability of a value in millionths. `values` ascend. */
int64_t text_confidence_at(const int64_t *values, const int64_t *probabilities, size_t n, int64_t value);

#endif
