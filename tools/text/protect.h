/* protect.h - the protected parts of a text: spans (spans.h), terms of a glossary, white space at both ends.
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
#include "tools/text/messages.h"
#include "tools/text/text.h"

/* Never changes: any number of threads may share it. */
typedef struct text_rules text_rules;
typedef struct text_guard text_guard;

/* `spans`: keep them. `glossary`: a file of lines "source TAB target", or NULL. A line without a TAB is a name, which
 * stays as it is; a blank one, or one that begins with #, says nothing. Errors: MOE_ERROR_IO, MOE_ERROR_ARGUMENT (a
 * line; `where` says which), MOE_ERROR_MEMORY. */
moe_status text_rules_new(const text_front *front, int spans, const char *glossary, text_rules **out, moe_error *error);
/* The same with what is in the file of the glossary. */
moe_status text_rules_read(const text_front *front, int spans, const char *glossary, const text_bytes *data,
                           text_rules **out, moe_error *error);
/* The same rules with these terms instead; `rules` must outlive them. Errors: MOE_ERROR_ARGUMENT, MOE_ERROR_MEMORY. */
moe_status text_rules_with(const text_rules *rules, const char *const *sources, const char *const *translations,
                           size_t n, text_rules **out, moe_error *error);
void text_rules_free(text_rules *rules);                                  /* NULL is fine */
int text_rules_spans(const text_rules *rules);                            /* whether spans are kept */
const struct text_glossary *text_rules_glossary(const text_rules *rules); /* NULL: none */
size_t text_rules_terms(const text_rules *rules);                         /* of the glossary */
const char *text_rules_target(const text_rules *rules, size_t i);         /* of a term */

/* What becomes of the terms in a text: each try has its own. */
typedef enum text_terms {
    TEXT_TERMS_FREE,     /* nothing: the model may write them by itself */
    TEXT_TERMS_BOUND,    /* constraints: these have each term, but the model's own word may stand beside it */
    TEXT_TERMS_REPLACED, /* stand-ins take their places: the model does not see the words that it would translate */
    TEXT_TERMS_REBOUND   /* constraints, as those were better than stand-ins */
} text_terms;

/* *guard: NULL, or one that is used again. `attempt`: 0, or 1 for other
 * stand-ins, where those of 0 did not come through. `message`: what of an ICU message the text is (messages.h). `more`:
 * the text goes on behind a space, and the white space at its end is left out. *shown: what the model is to be shown;
 * it lives in the guard. Where nothing is to be kept, it is `text`. */
moe_status text_guard_begin(const text_rules *rules, const char *text, size_t length, int more, int attempt,
                            text_message_text message, text_terms terms, text_guard **guard, moe_span *shown,
                            moe_error *error);
/* `calm`: the shown text in small letters, in which stand-ins get back theirs. */
void text_guard_put_placeholders(const text_guard *guard, char *calm);
/* `encoded` [length]: what `ids` are the tokens of, at the offsets of the shown text. `room`: all constraints have
 * fewer tokens; some may be left out. */
moe_status text_guard_bind(const text_rules *rules, text_guard *guard, const char *encoded, size_t length,
                           const text_ids *ids, size_t room, moe_error *error);
/* The constraints of a request, which must not outlive them. */
void text_guard_constrain(const text_guard *guard, moe_request *request);
int text_guard_has_constraints(const text_guard *guard); /* whether there are any */
/* Append the translation that a hypothesis of the shown text, in this manner, is. `shout`: in capitals, but for what is
 * kept. */
moe_status text_guard_restore(const text_rules *rules, text_guard *guard, const moe_hypothesis *h, text_variant manner,
                              int shout, text_bytes *out, moe_error *error);
/* Whether the translation that was restored last has each stand-in once, no part of one, and no broken character. */
int text_guard_is_intact(const text_guard *guard);
void text_guard_clear(text_guard *guard); /* of a job that is used again; NULL is fine */
/* What is to be tried after the translation that was restored last, of this hypothesis; the same once more: nothing, it
 * is the one. Where a term does not stand in the FREE one as a word of its own, BOUND comes; where that looks as if a
 * word of the FREE one stayed beside the term, NAMED; where the model finds that one less probable, LAST. A `sound` one
 * is such for all that is kept. Errors: MOE_ERROR_MEMORY. */
moe_status text_guard_next_terms(text_guard *guard, const moe_hypothesis *h, int sound, text_terms *next,
                                 moe_error *error);
/* Whether a term without a stand-in does not stand in the translation that was restored last as a word of its own. */
int text_guard_lacks_term(text_guard *guard);
/* What pairs of tags stand around is asked for by itself, so that it is found in the translation: the words of question
 * n, and where in the text their pair is; `*small`: with a small first letter. Length 0: there are no more. */
moe_span text_guard_phrase(const text_guard *guard, size_t n, size_t *source, int *small);
/* The answer: their translation. 0: no memory. */
int text_guard_add_phrase(text_guard *guard, size_t source, const char *text, size_t length);
int text_guard_used(const text_guard *guard); /* 0: NULL, or nothing is kept */
/* Bytes of white space before the text, if all of it but the white space at both ends was shown; else SIZE_MAX. */
size_t text_guard_plain(const text_guard *guard);
void text_guard_free(text_guard *guard); /* NULL is fine */

#endif
