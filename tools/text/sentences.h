/* sentences.h - where sentences end, and where a long one can be cut. */
#ifndef TEXT_SENTENCES_H
#define TEXT_SENTENCES_H

#include <stddef.h>

/* Where the first sentence of valid UTF-8 ends, white space behind it included; `length` if there is no other one. A
 * sentence ends at . ! ? or the like, with what closes quotes and brackets, before white space and something else than
 * a small letter; not behind initials, ordinals and the abbreviations of several languages (the source need not be
 * known), unless what follows is a word that begins sentences. Time is linear in what is returned. */
size_t text_sentence(const char *data, size_t length);

/* Where the first part of a sentence ends that has at most `limit` bytes: behind its last clause (; : , or a dash),
 * else behind its last word, else behind a character; white space behind it included. Nothing that is kept (spans.h) is
 * cut, if `spans`. A run of more than a line's bytes without a space, such as base64, is a part of its own, however
 * long, and *verbatim: it is no language. */
size_t text_clause(const char *data, size_t length, size_t limit, int spans, int *verbatim);

/* Where the first of two parts ends, of about the same length, cut as text_clause does; 0: this is one word. */
size_t text_half(const char *data, size_t length, int spans);

#endif
