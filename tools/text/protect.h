/* protect.h - what a translation keeps as it is: spans (spans.h), terms of a glossary, white space at both ends.
 *
 * A text_rules says what is kept; a text_guard does it for one text:
 *
 *   text_guard_begin    takes out markup and emoji; a stand-in (X1, X2...) takes the place of a placeholder or address
 *   text_guard_bind     makes constraints (moe.h) of stand-ins, numbers and terms, once the rest has token ids
 *   text_guard_restore  puts all of it into the translation: markup around the words that the model wrote while it
 *                       looked at those that it stood around
 */
#ifndef TEXT_PROTECT_H
#define TEXT_PROTECT_H

#include "moe.h"
#include "tools/text/text.h"

/* Never changes: any number of threads may share it. */
typedef struct text_rules text_rules;
typedef struct text_guard text_guard;

/* `spans`: keep them. `glossary`: a file of lines "source TAB target", or NULL. A line without a TAB is a name, which
 * stays as it is; a blank one, or one that begins with #, says nothing. Errors: MOE_ERROR_IO, MOE_ERROR_ARGUMENT (a
 * line; `where` says which), MOE_ERROR_MEMORY. */
moe_status text_rules_new(const text_front *front, int spans, const char *glossary, text_rules **out, moe_error *error);
void text_rules_free(text_rules *rules); /* NULL is fine */

/* *guard: NULL, or one that is used again. `attempt`: 0, or 1 for other
 * stand-ins, where those of 0 did not come through. `more`: the text goes on behind a space, and the white space at its
 * end is left out. *shown: what the model is to be shown; it lives in the guard. Where nothing is to be kept, it is
 * `text`. */
moe_status text_guard_begin(const text_rules *rules, const char *text, size_t length, int more, int attempt,
                            text_guard **guard, moe_span *shown, moe_error *error);
/* `calm`: the shown text in small letters, in which stand-ins get back theirs. */
void text_guard_recall(const text_guard *guard, char *calm);
/* `encoded` [length]: what `ids` are the tokens of, at the offsets of the shown text. `room`: all constraints have
 * fewer tokens; some may be left out. */
moe_status text_guard_bind(const text_rules *rules, text_guard *guard, const char *encoded, size_t length,
                           const text_ids *ids, size_t room, moe_error *error);
/* The constraints of a request, which must not outlive them. */
void text_guard_ask(const text_guard *guard, moe_request *request);
/* Append the translation that a hypothesis of the shown text is. `shout`: in capitals, but for what is kept. */
moe_status text_guard_restore(const text_rules *rules, text_guard *guard, const moe_hypothesis *h, int shout,
                              text_bytes *out, moe_error *error);
/* Whether the translation that was restored last has each stand-in once, no part of one, and no broken character. */
int text_guard_sound(const text_guard *guard);
int text_guard_used(const text_guard *guard); /* 0: NULL, or nothing is kept */
/* Bytes of white space before the text, if all of it but the white space at both ends was shown; else SIZE_MAX. */
size_t text_guard_plain(const text_guard *guard);
void text_guard_free(text_guard *guard); /* NULL is fine */

#endif
