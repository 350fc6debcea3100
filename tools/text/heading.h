/* heading.h - recognises the header row of a glossary file. */
#ifndef TEXT_HEADING_H
#define TEXT_HEADING_H

#include "moe.h"

/* Return 1 if two cells name columns: "English", "Deutsch"; "source", "target"; "en-GB", "de (AT)"; "Term EN",
 * "Translation". Cells that name the same language ("German", "Deutsch") or the same side ("source", "Quelle") are
 * terms. A code such as "it" counts only if it is a language of `model`, which may be NULL. */
int text_is_heading(const moe_model *model, moe_span source, moe_span target);

/* Return the two-letter code, which other text follows, of the language that a word names ("German", "Deutsch"), or
 * NULL. */
const char *text_language_named(const char *word, size_t length);

#endif
