/* detect.h - detects which of a few languages a text is in, by words (words.h) or by libexttextcat's fingerprints. */
#ifndef TEXT_DETECT_H
#define TEXT_DETECT_H

#include "moe.h"

typedef struct moetext_detector text_detector; /* used by one thread at a time */

/* Open a detector for `n` languages with codes that start with ISO 639-1 or 639-3 names ("de", "deu_Latn"). It uses
 * words if all languages have word lists, otherwise libexttextcat, which never finds languages without a fingerprint.
 * Errors: MOE_ERROR_UNSUPPORTED (no language is known, or the data files are not installed), MOE_ERROR_IO,
 * MOE_ERROR_MEMORY. */
moe_status text_detector_open(const char *const *codes, size_t n, text_detector **out, moe_error *error);
/* Open a detector for a model's languages. */
moe_status text_detector_of_model(const moe_model *model, text_detector **out, moe_error *error);
void text_detector_close(text_detector *detector); /* may be NULL */

enum { TEXT_DETECT_MEMORY = -2 }; /* result if out of memory */

/* Return the index of the language of `text`, or -1 if it has no letters. Set *confidence, from 0 to 1, to the
 * probability if words are used, otherwise to the distance from the next language, small for one or two words. */
ptrdiff_t text_detect(text_detector *detector, const char *text, size_t length, float *confidence);

/* Detect like text_detect, and set each[n] to the probabilities of all languages. With fingerprints, they are 0 except
 * for the result. */
ptrdiff_t text_detect_each(text_detector *detector, const char *text, size_t length, float *each);

/* With a model's detector, return the tag of the language of `text`, or of the model's first language if the text has
 * no letters; -1 if out of memory. The result depends only on the text. */
int32_t text_detect_tag(text_detector *detector, const char *text, size_t length);

#endif
