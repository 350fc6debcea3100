/* words.h - detects the language of a short text by frequent words and by spelling. */
#ifndef TEXT_WORDS_H
#define TEXT_WORDS_H

#include <stddef.h>

typedef struct text_words text_words; /* word statistics of `n` languages; only one thread may use them at a time */

const char *text_words_known(const char *language); /* the name of a word list such as "de", or NULL */

/* Load the data of distinct known languages. Return NULL if out of memory. */
text_words *text_words_open(const char *const *languages, size_t n);
void text_words_close(text_words *words); /* may be NULL */

/* Return the most probable language, or -1 if the text has no letters. *confidence is its probability. */
ptrdiff_t text_words_detect(text_words *words, const char *text, size_t length, float *confidence);

/* Return the probability of a language for the last text with letters. */
float text_words_confidence(const text_words *words, size_t language);

/* Return 1 if a word with non-ASCII letters (in any case) is frequent in a known language and not a name. */
int text_word_is_common(const char *word, size_t length);

/* Return 1 if a text of three or more words is written like an English title, with capitals that are not names: Welcome
 * To Our New House. */
int text_is_title(const char *text, size_t length);
/* Convert the words of a title in place to lower case, except the first word and names. */
void text_lower_title(char *text, size_t length);

#endif
