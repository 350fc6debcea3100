/* prompt.h - prompts of decoder-only models.
 *
 * The model file contains the pieces of its chat template around the user's turn, wordings of that turn, and names of
 * languages (tools/convert/prompts.py). Text is never encoded as special tokens, even if it spells one.
 */
#ifndef TEXT_PROMPT_H
#define TEXT_PROMPT_H

#include "tools/text/glossary.h"
#include "tools/text/moetext.h"
#include "tools/text/text.h"

/* Immutable, so threads may share it. */
typedef struct text_prompt text_prompt;

enum {
    TEXT_PROMPT_WHOLE = 256,   /* maximum tokens of a line in one request; longer lines are split into sentences */
    TEXT_PROMPT_CONTEXT = 16,  /* maximum number of earlier lines */
    TEXT_PROMPT_BACK = 1 << 15 /* maximum bytes of earlier lines */
};

/* Return the first of n earlier lines to show, given a limit of `context` lines. It moves in steps: the number of lines
 * grows from half of `context` to `context`, so that prompts of consecutive lines begin alike and the engine computes
 * their beginning once. */
size_t text_prompt_first(size_t n, size_t context);

/* Options that apply to all translations. May be all zero. */
typedef struct text_prompt_options {
    const char *style;   /* such as "formal"; NULL or "" for none */
    const char *wording; /* the user's own wording, with {source_text} and perhaps other marks of prompt.c, or
                            "delimiters", "structured" or "structured:JSON" for a wording of the model; NULL or "" for
                            the model's default */
    size_t context;      /* earlier lines to show, up to TEXT_PROMPT_CONTEXT */
    size_t extra;        /* maximum tokens of a prompt without text, context and terms; set by text_prompt_check */
} text_prompt_options;

/* A text to translate. */
typedef struct text_prompt_request {
    moe_span text, original;       /* `original` is the text in which terms are found */
    moe_span context;              /* contains earlier lines with line breaks; may be empty */
    int32_t source, target;        /* indices of languages; source is -1 if unknown */
    const text_glossary *glossary; /* may be NULL */
    const char *example[2];        /* a similar text and its translation; NULL if none */
    int strictly;                  /* use the wording that insists on markup, if the model has one */
} text_prompt_request;

/* Read a model's prompts; *out is NULL if each text is a whole prompt. Errors: MOE_ERROR_FORMAT, MOE_ERROR_MEMORY. */
moe_status text_prompt_new(const text_front *front, text_prompt **out, moe_error *error);
void text_prompt_free(text_prompt *prompt); /* may be NULL */
/* Return 1 if a wording that the options may select names the source language; `wishes` may be NULL. Does not need the
 * tokeniser. */
int text_prompt_names_source(const moe_model *model, const text_prompt_options *wishes);
size_t text_prompt_extra(const text_prompt *prompt); /* value of text_prompt_options.extra if no other option is set */

/* Check that the model supports the options, and set `extra`. `plain` is 1 if lines are ids or pieces. Errors:
 * MOE_ERROR_ARGUMENT, MOE_ERROR_UNSUPPORTED, MOE_ERROR_MEMORY. */
moe_status text_prompt_check(const text_front *front, text_prompt_options *wishes, int plain, moe_error *error);

/* Build the ids of a whole prompt. The example is an earlier turn, or without a place for one, the first term. To fit
 * into `room` tokens, drop the example, then the earliest lines, then terms; *left is the number of dropped terms.
 * Errors: MOE_ERROR_ARGUMENT, MOE_ERROR_MEMORY. */
moe_status text_prompt_ids(const text_front *front, const text_prompt_options *wishes, const text_prompt_request *asked,
                           size_t room, text_ids *out, size_t *left, moe_error *error);

/* Build the ids of moetext_model_prompt (moetext.h). */
moe_status text_prompt_answer(const text_front *front, const moetext_message *messages, size_t n, text_ids *out,
                              moe_error *error);

/* Return 1 if a text has a letter outside markup, placeholders and addresses. */
int text_has_language(const char *data, size_t length);
/* Return the first markup, placeholder or address that occurs less often in the translation, or the last tag if tags
 * are no longer nested. Empty if nothing is missing. */
moe_span text_prompt_missing(moe_span source, moe_span target);
/* Find the first number that the translation lacks, in digits of any script and with any separators; *lost is empty if
 * none is missing. Ignore numbers of fewer than three digits, trailing zeros, times and dates, which differ between
 * languages. Errors: MOE_ERROR_MEMORY. */
moe_status text_prompt_missing_number(moe_span source, moe_span target, moe_span *lost, moe_error *error);

/* Constraints on an answer. Free with text_ids_free(&bound->ids). */
typedef struct text_constraints {
    moe_constraint each[MOE_MAX_CONSTRAINTS]; /* [n] */
    size_t n;
    text_ids ids;
} text_constraints;
/* Make constraints, of up to `room` tokens, from all markup, placeholders and addresses of a source and the numbers
 * that the translation lacks. Errors: MOE_ERROR_MEMORY and those of the tokeniser. */
moe_status text_prompt_bind(const text_front *front, moe_span source, moe_span target, size_t room,
                            text_constraints *bound, moe_error *error);

#endif
