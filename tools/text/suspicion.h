/* suspicion.h - detects answers of prompted models that may not be translations, by comparing them with the text.
 *
 * The result is only reported to the user. Of 61,000 human translations between de, en, es and fr, 8 are suspicious
 * (MOE_TEST_PAIRS of tests/text/test_text.c).
 */
#ifndef TEXT_SUSPICION_H
#define TEXT_SUSPICION_H

#include "moe.h"

/* A language detector, used by one thread at a time, all zero before its first use. */
typedef struct text_suspicions {
    struct text_words *words;
    int failed; /* 1 if memory ran out, so that languages are not detected */
} text_suspicions;

void text_suspicions_free(text_suspicions *suspicions);

/* Return why an answer may not be a translation, or NULL. An answer is suspicious if it refuses, mentions or explains
 * the translation, equals, starts with or ends with the text, has the wrong script or language, is far longer or
 * shorter than the text, or has several lines (`lines` is 1). `suspicions` may be NULL. `language` is the code of the
 * target and may be empty. */
const char *text_suspicious_reason(text_suspicions *suspicions, moe_span language, moe_span source, moe_span target,
                                   int lines);

#endif
