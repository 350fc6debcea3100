/* words.h - the language of a short text, by the frequent words of a few languages and how their words are spelled. */
#ifndef TEXT_WORDS_H
#define TEXT_WORDS_H

#include <stddef.h>

typedef struct text_words text_words; /* what it learned of `n` languages; one thread at a time may look */

int text_words_know(const char *language); /* whether there are words of a language, "de" */

/* `languages`: names that are known, each at most once. NULL: no memory. */
text_words *text_words_open(const char *const *languages, size_t n);
void text_words_close(text_words *words); /* NULL is fine */

/* The number of the likeliest language, -1 where `text` has no letters. *confidence: the probability of it, beside the
 * others and a language that is none of them. */
ptrdiff_t text_words_detect(text_words *words, const char *text, size_t length, float *confidence);

/* The probability of each language, of the text that was last looked at and had letters. */
float text_words_confidence(const text_words *words, size_t language);

/* Whether a word with letters that are not ASCII is a frequent one of these languages, and no name. Capitals count as
 * small letters. */
int text_word_is_common(const char *word, size_t length);

#endif
