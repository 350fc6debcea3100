/* sentences.h - ends of cells and sentences, and places to cut a long sentence. */
#ifndef TEXT_SENTENCES_H
#define TEXT_SENTENCES_H

#include "tools/text/spans.h"

/* Return the end of the first cell of valid UTF-8: after TABs, or, with `spans`, before a separator that occurs in no
 * sentence (Home | About us), outside brackets, quotes and protected spans (spans.h). Return `length` if there is only
 * one cell. *separates: the text starts with separators, and these end here. White space is included. Time is linear in
 * the result. */
size_t text_cell(const char *data, size_t length, int spans, int *separates);

/* Return the end of the first sentence of valid UTF-8 including white space, or `length` if there is only one. A
 * sentence ends at . ! ? and the like with closing quotes and brackets, before white space and anything but a lower-
 * case letter. It does not end at initials, ordinals and abbreviations of several languages, unless a word follows that
 * starts sentences; the language need not be known. Time is linear in the result. */
size_t text_sentence(const char *data, size_t length);

/* Return the offset of the next sign between words: a separator of cells, or one that sentences contain too, such as >
 * or / (Settings > Privacy), outside protected spans. Return the length of the text after the last one. *bytes: of the
 * sign. Start at 0 or after the previous sign. */
size_t text_sign(text_scan *scan, size_t at, size_t *bytes);

/* Return the end of the first part of a sentence, at most `limit` bytes: after its last clause (; : , or a dash), word
 * or character, including white space. With `spans`, protected spans are not cut. A run of more than a line of bytes
 * without a space, such as base64, is a part however long it is, and sets *verbatim. */
size_t text_clause(const char *data, size_t length, size_t limit, int spans, int *verbatim);

/* Return the length of a part without what separates it from the next one, which models would lose: white space, a
 * comma or semicolon, or a sign between words. */
size_t text_before_mark(const char *data, size_t length);

/* Return the end of the first of two halves, after a sign between words or as text_clause cuts; 0 for one word. */
size_t text_half(const char *data, size_t length, int spans);

#endif
