/* live.h - words of live texts, for live.c and its tests. moetext.h documents moetext_live. */
#ifndef TEXT_LIVE_H
#define TEXT_LIVE_H

#include "tools/text/moetext.h"

enum {
    TEXT_LIVE_STRIDE = 3, /* new words that an unfinished sentence needs before it is translated again */
    TEXT_LIVE_SHARE = 8,  /* long sentences need one new word per this many words, which bounds the work */
    TEXT_LIVE_MASK = 1    /* last words of an unfinished sentence's translation, which are not shown */
};

/* Return the end of the word after `at`, or `length`. Each character of a script without spaces is a word. */
size_t text_live_word(const char *data, size_t length, size_t at);
size_t text_live_words(const char *data, size_t length); /* number of words */
/* Return the length of the words that two texts begin with in common, and set *words to their number. */
size_t text_live_common(const char *a, size_t a_length, const char *b, size_t b_length, size_t *words);
int text_live_ended(const char *data, size_t length); /* 1 if a text ends with a sentence, whatever follows */

#endif
