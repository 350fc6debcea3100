/* sentences.h - where cells and sentences end, and where a long one can be cut. */
#ifndef TEXT_SENTENCES_H
#define TEXT_SENTENCES_H

#include "tools/text/spans.h"

/* Where the first cell of valid UTF-8 ends: behind TABs, or, with `spans`, before a sign between words that belongs to
 * no sentence (Home | About us), in no brackets or quotes and in nothing that is kept (spans.h); `length` if there is
 * no other one. *separates: the text begins with such signs, and these end there. White space is included. Time is
 * linear in what is returned. */
size_t text_cell(const char *data, size_t length, int spans, int *separates);

/* Where the first sentence of valid UTF-8 ends, white space behind it included; `length` if there is no other one. A
 * sentence ends at . ! ? or the like, with what closes quotes and brackets, before white space and something else than
 * a small letter; not behind initials, ordinals and the abbreviations of several languages (the source need not be
 * known), unless what follows is a word that begins sentences. Time is linear in what is returned. */
size_t text_sentence(const char *data, size_t length);

/* Where the next sign is that stands between words: one of those above or, as sentences have them too, > or / and the
 * like (Settings > Privacy), in nothing that is kept; the text's length: there is none. *bytes of it. The walk goes on
 * from 0 or from behind the last one. */
size_t text_sign(text_scan *scan, size_t at, size_t *bytes);

/* Where the first part of a sentence ends that has at most `limit` bytes: behind its last clause (; : , or a dash),
 * else behind its last word, else behind a character; white space behind it included. Nothing that is kept (spans.h) is
 * cut, if `spans`. A run of more than a line's bytes without a space, such as base64, is a part of its own, however
 * long, and *verbatim: it is no language. */
size_t text_clause(const char *data, size_t length, size_t limit, int spans, int *verbatim);

/* The bytes of a part without what stays between it and the next one, since models lose it: white space, a comma or
 * semicolon, a sign as above. */
size_t text_before_mark(const char *data, size_t length);

/* Where the first of two parts ends, of about the same length, cut behind a sign as above, else as text_clause does; 0:
 * this is one word. */
size_t text_half(const char *data, size_t length, int spans);

#endif
