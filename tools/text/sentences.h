/* sentences.h - ends of cells and sentences, and places to cut a long sentence. */
#ifndef TEXT_SENTENCES_H
#define TEXT_SENTENCES_H

#include "tools/text/spans.h"

/* Return the length of the text excluding trailing spaces, TABs, and line and page separators (U+2028, form feed).
 */
size_t text_before_blanks(const char *data, size_t length);

/* Return the bytes at the start of a text that are not language: white space, list markers (a) (iv) - o [x]), dashes
 * of speech, and > of quoted email. *after is the white space at its end. Brackets around all the rest are included. */
size_t text_frame(const char *data, size_t length, size_t *after);

/* Return the end of the first cell of valid UTF-8, including white space, or `length` if the text is a single cell. A
 * cell ends after TABs and separators of lines or, if `spans` is 1, before a separator that does not occur in sentences
 * (Home | About us), outside brackets, quotes and protected spans (spans.h). If the text starts with separators,
 * *separates is 1 and the result is their end. Takes time linear in the result. */
size_t text_cell(const char *data, size_t length, int spans, int *separates);

/* Return the end of the first sentence of valid UTF-8 including white space, or `length` if there is only one. A
 * sentence ends at . ! ? and similar signs with closing quotes and brackets, before white space and anything but a
 * lower-case letter. It does not end at initials, ordinals and abbreviations of several languages, unless the next
 * word often starts sentences. The language need not be known. Takes time linear in the result. */
size_t text_sentence(const char *data, size_t length);

/* Return the offset of the next sign between words, and its length in *bytes; after the last sign, return the length
 * of the text. Signs are cell separators and signs that also occur in sentences, such as > or / (Settings > Privacy),
 * outside protected spans. `at` must be 0 or the end of the previous sign. */
size_t text_sign(text_scan *scan, size_t at, size_t *bytes);

/* Return the end of the first part of a sentence, at most `limit` bytes: after its last clause (; : , or a dash), word
 * or character, including white space. If `spans` is 1, protected spans are not cut. A long run of bytes without a
 * space, such as base64, is a single part regardless of its length, and sets *verbatim. */
size_t text_clause(const char *data, size_t length, size_t limit, int spans, int *verbatim);

/* Return the length of a dash or slash at data[at] that joins two words without spaces (word--word, he/she), or 0. */
size_t text_joint(const char *data, size_t length, size_t at);

/* Return the length of a part without the separator at its end (white space, a comma or semicolon, or a sign between
 * words), which models would lose. */
size_t text_before_mark(const char *data, size_t length);

/* Return the place nearest to the middle of a text where words in brackets or quotation marks begin or end, or 0. */
size_t text_half_at_bracket(const char *data, size_t length);
/* Return the end of the joint (text_joint) nearest to the middle of a text outside protected spans, or 0. joints[0] is
 * the number of dashes, joints[1] of slashes. */
size_t text_half_at_joint(const char *data, size_t length, size_t joints[2]);

/* Return the end of the first half of a text, after a sign between words or where text_clause cuts; 0 for one word. */
size_t text_half(const char *data, size_t length, int spans);

#endif
