/* protect.h - protects the parts of a text that a model must not change: spans (spans.h), glossary terms, and white
 * space at both ends.
 *
 * text_rules describe what to protect, and a text_guard protects it in one text:
 *
 *   text_guard_begin    removes markup and emoji, and replaces placeholders and addresses with X1, X2...
 *   text_guard_bind     makes constraints (moe.h) from placeholders, numbers and terms, once the text has token ids
 *   text_guard_restore  restores everything in the translation, and places markup around the words that the model
 *                       wrote while attending to the words inside the markup
 */
#ifndef TEXT_PROTECT_H
#define TEXT_PROTECT_H

#include "moe.h"
#include "tools/text/glossary.h"
#include "tools/text/messages.h"
#include "tools/text/text.h"

/* Immutable, so threads may share it. */
typedef struct text_rules text_rules;
typedef struct text_guard text_guard;

/* Make rules that protect spans (if `spans` is 1) and the terms in the file `glossary` (text_glossary_read; may be
 * NULL). `contents` is the content of the file, or NULL to read it. Errors: MOE_ERROR_IO, MOE_ERROR_ARGUMENT (`where`
 * names the line), MOE_ERROR_MEMORY. */
moe_status text_rules_new(const text_front *front, int spans, const char *glossary, const text_bytes *contents,
                          text_rules **out, moe_error *error);
/* Copy rules with other terms; `rules` must outlive the copy. Errors: MOE_ERROR_ARGUMENT, MOE_ERROR_MEMORY. */
moe_status text_rules_with(const text_rules *rules, const char *const *sources, const char *const *translations,
                           size_t n, text_rules **out, moe_error *error);
void text_rules_free(text_rules *rules);                                  /* may be NULL */
int text_rules_spans(const text_rules *rules);                            /* 1 if spans are protected */
const struct text_glossary *text_rules_glossary(const text_rules *rules); /* may be NULL */

/* Bits of an attempt's placeholder kind; 0 is X1, with numbers that the model reads. */
enum {
    TEXT_IN_BRACKETS = 1, /* [1] */
    TEXT_FOR_NUMBERS = 2  /* also for numbers and adjoining letters */
};

/* Treatment of glossary terms in an attempt. */
typedef enum text_terms {
    TEXT_TERMS_FREE,     /* no treatment; the model may write the terms anyway */
    TEXT_TERMS_BOUND,    /* constraints; every term appears, but the model may add its own word */
    TEXT_TERMS_REPLACED, /* placeholders; the model does not see the terms */
    TEXT_TERMS_REBOUND,  /* constraints again, because placeholders were worse */
    TEXT_TERMS_EDITED    /* the FREE translation with the terms in place of the model's words */
} text_terms;

/* Begin a text. *guard is NULL or reused. `placeholders` is a set of text_placeholders. `message` is the kind of ICU
 * message text. If `more` is 1, the line continues after a space, so white space at the end is dropped. *shown is the
 * text for the model, owned by the guard, or `text` itself if nothing is protected. */
moe_status text_guard_begin(const text_rules *rules, const char *text, size_t length, int more, int placeholders,
                            text_message_text message, text_terms terms, text_guard **guard, moe_span *shown,
                            moe_error *error);
/* Restore the case of placeholders in `lower`, the shown text in lower case. */
void text_guard_put_placeholders(const text_guard *guard, char *lower);
/* Make the constraints. `encoded` is the text of `ids`, as long as the shown text. Constraints that exceed `room`
 * tokens together are dropped. */
moe_status text_guard_bind(const text_rules *rules, text_guard *guard, const char *encoded, size_t length,
                           const text_ids *ids, size_t room, moe_error *error);
/* Set the constraints of a request. They remain valid until the guard begins another text. */
void text_guard_constrain(const text_guard *guard, moe_request *request);
int text_guard_has_constraints(const text_guard *guard); /* 1 if there are constraints */
/* Append the translation of the shown text in this variant, in upper case except protected spans if `shout` is 1. */
moe_status text_guard_restore(const text_rules *rules, text_guard *guard, const moe_hypothesis *h, text_variant variant,
                              int shout, text_bytes *out, moe_error *error);
/* Return 1 if the last restored translation contains each placeholder once, and no fragments or broken characters. */
int text_guard_is_intact(const text_guard *guard);
int text_guard_has_signs(const text_guard *guard); /* 1 if a term of the text has digits or other signs (H2O, A/B) */
/* Return a bit set of the digits in placeholders. */
unsigned text_guard_digits(const text_guard *guard);
void text_guard_clear(text_guard *guard); /* reset for reuse; may be NULL */
/* Choose the next treatment of terms after the last restored translation; the current treatment means that no more
 * attempts are needed. BOUND follows if a term is not a separate word in the FREE translation, REPLACED if a word of
 * the FREE translation may remain next to the term, REBOUND if the REPLACED translation is less probable. `sound` is 1
 * if all protected spans are intact. Errors: MOE_ERROR_MEMORY. */
moe_status text_guard_next_terms(text_guard *guard, const moe_hypothesis *h, int sound, text_terms *next,
                                 moe_error *error);
/* Return 1 if a term without a placeholder is not a separate word in the last restored translation. */
int text_guard_lacks_term(text_guard *guard);
/* Return the source of the n-th term that the FREE translation lacks, empty after the last one. */
moe_span text_guard_missing_term(const text_guard *guard, size_t n);
/* Find the model's words for this term in the FREE translation: those of `text`, the translation of the term alone.
 * Return 0 if out of memory. */
int text_guard_look_up(text_guard *guard, size_t n, const char *text, size_t length);
/* Set *free to the FREE translation; return 0 if it is the last restored one. */
int text_guard_knows_free(const text_guard *guard, moe_span *free);
/* Return the n-th word of the FREE translation that text_guard_look_up found for a term, or NULL. If it found none,
 * word 0 is one that the model wrote while attending to the term, or a compound of the word that was looked up. The
 * last restored translation still has all of these words, or this one near the term. */
const char *text_guard_old_word(const text_guard *guard, const text_term *term, size_t n);
/* Return 1 if the model's own word remained next to a term, where text_terms EDITED can replace it. */
int text_guard_has_remaining(const text_guard *guard);
/* Return phrase `n` of the text between pairs of tags, empty after the last one. Phrases are translated separately to
 * find them in the translation, with the first letter in lower case if *lower is 1. *source is the offset of the pair.
 */
moe_span text_guard_phrase(const text_guard *guard, size_t n, size_t *source, int *lower);
/* Store the translation of a phrase; return 0 if out of memory. */
int text_guard_add_phrase(text_guard *guard, size_t source, const char *text, size_t length);
int text_guard_used(const text_guard *guard); /* 0 if NULL or if nothing is protected */
/* Return `at`, or the beginning of the term that contains byte `at` of the text, or the end of a first term; 0 if
 * nothing follows it. */
size_t text_guard_outside_term(const text_guard *guard, size_t at);
/* Return the length of the leading white space if the rest was shown unchanged, otherwise SIZE_MAX. */
size_t text_guard_plain(const text_guard *guard);
void text_guard_free(text_guard *guard); /* may be NULL */

#endif
