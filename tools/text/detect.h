/* detect.h - which of a few languages a text is in, by their words (words.h), or libexttextcat's fingerprints. */
#ifndef TEXT_DETECT_H
#define TEXT_DETECT_H

#include "moe.h"

typedef struct moetext_detector text_detector; /* one thread at a time may use it */

/* Choose among the `n` languages whose codes begin with ISO 639-1 or 639-3 names ("de", "deu_Latn"): by words if all of
 * them have word lists, else by libexttextcat, which never finds languages without a fingerprint. Errors:
 * MOE_ERROR_UNSUPPORTED (it has none of the languages, or its data files are not installed), MOE_ERROR_IO,
 * MOE_ERROR_MEMORY. */
moe_status text_detector_open(const char *const *codes, size_t n, text_detector **out, moe_error *error);
/* The same for the languages of a model. */
moe_status text_detector_of_model(const moe_model *model, text_detector **out, moe_error *error);
void text_detector_close(text_detector *detector); /* NULL is fine */

/* The number of the language that `text` is in, -1 if it has no letters. *confidence: from 0 to 1; by words the
 * probability of the language, by fingerprints how far the next likely one is, low for a word or two. */
ptrdiff_t text_detect(text_detector *detector, const char *text, size_t length, float *confidence);

/* The same; each[n], of all languages: by words their probabilities, by fingerprints 0 but for the one found. */
ptrdiff_t text_detect_each(text_detector *detector, const char *text, size_t length, float *each);

/* With a detector of a model, the tag of the language that `text` seems to be in; of a text without letters that of the
 * model's first language. It depends on nothing but the text. */
int32_t text_detect_tag(text_detector *detector, const char *text, size_t length);

#endif
