/* doubt.h - whether what a model answered may be no translation, told from the two texts alone.
 *
 * For models that are asked in words. What is found is said, and changes nothing. Of 61,000 human translations between
 * de, en, es and fr it doubts 8 (MOE_TEST_PAIRS of tests/text/test_text.c).
 */
#ifndef TEXT_DOUBT_H
#define TEXT_DOUBT_H

#include "moe.h"

/* Tells languages; one thread at a time may look. All zero: it has not looked yet. */
typedef struct text_suspicions {
    struct text_words *words;
    int failed; /* no memory for them: languages are not told apart by words */
} text_suspicions;

void text_suspicions_free(text_suspicions *doubts);

/* Why an answer may be none, or NULL: it refuses, speaks of the translation or explains it, is the text or begins or
 * ends with it, is not written as its language is, is in another one that `doubts` (NULL: none) knows, is far longer or
 * shorter than the text, has several lines (`lines`). `language`: its code as the file has it; length 0: none. */
const char *text_suspicious_reason(text_suspicions *doubts, moe_span language, moe_span source, moe_span target,
                                   int lines);

#endif
