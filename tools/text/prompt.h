/* prompt.h - how a decoder-only model is asked for a translation.
 *
 * Its file says it (tools/convert/prompts.py): what its chat template puts around the user's turn, wordings of that
 * turn, and what they call the languages. A text is never read for tokens, whatever it spells.
 */
#ifndef TEXT_PROMPT_H
#define TEXT_PROMPT_H

#include "tools/text/glossary.h"
#include "tools/text/moetext.h"
#include "tools/text/text.h"

/* Never changes: any number of threads may share it. */
typedef struct text_prompt text_prompt;

enum {
    TEXT_PROMPT_WHOLE = 256,   /* tokens of a line that is one request; a longer one goes by sentences */
    TEXT_PROMPT_CONTEXT = 16,  /* most earlier lines */
    TEXT_PROMPT_BACK = 1 << 15 /* most bytes of those: the ones before them are not shown */
};

/* What a user wishes of all translations. All zero: nothing. */
typedef struct text_prompt_options {
    const char *style;   /* "formal"; NULL or "": none */
    const char *wording; /* one's own, with {source_text}, or "delimiters", "structured" or "structured:JSON" of the
                            model's; NULL or "": the model's for the case at hand */
    size_t context;      /* earlier lines that are shown, at most TEXT_PROMPT_CONTEXT */
    size_t extra;        /* tokens around a text at most, without context and terms: text_prompt_check sets it */
} text_prompt_options;

/* One request. */
typedef struct text_prompt_request {
    moe_span text, context;        /* context: earlier lines, ended by line breaks; empty: none */
    int32_t source, target;        /* numbers of languages; source -1: not known */
    const text_glossary *glossary; /* NULL: none */
    int strictly;                  /* signs were lost: the wording that asks for them */
} text_prompt_request;

/* The prompts of the model of a front whose tokeniser is open; *out NULL: each text is a whole prompt. Errors:
 * MOE_ERROR_FORMAT, MOE_ERROR_MEMORY. */
moe_status text_prompt_new(const text_front *front, text_prompt **out, moe_error *error);
void text_prompt_free(text_prompt *prompt);              /* NULL is fine */
size_t text_prompt_extra(const text_prompt *prompt);     /* text_prompt_options.extra where nothing is wished */
const char *text_prompt_name(const text_prompt *prompt); /* of the wordings, ended by a NUL */

/* Whether the model has what is wished, and how long that is. `plain`: lines are ids or pieces. Errors:
 * MOE_ERROR_ARGUMENT, MOE_ERROR_UNSUPPORTED, MOE_ERROR_MEMORY. */
moe_status text_prompt_check(const text_front *front, text_prompt_options *wishes, int plain, moe_error *error);

/* The ids of a whole prompt, at most `room` if fewer earlier lines and then fewer terms make that possible; *left terms
 * are left out. Errors: MOE_ERROR_ARGUMENT, MOE_ERROR_MEMORY. */
moe_status text_prompt_ids(const text_front *front, const text_prompt_options *wishes, const text_prompt_request *asked,
                           size_t room, text_ids *out, size_t *left, moe_error *error);

/* The ids of moetext_model_prompt (moetext.h), of a model that has prompts. */
moe_status text_prompt_answer(const text_front *front, const moetext_message *messages, size_t n, text_ids *out,
                              moe_error *error);

/* Whether there is language in a text: a letter outside of markup, placeholders, addresses. */
int text_has_language(const char *data, size_t length);
/* The first markup, placeholder or address of a source that its translation has fewer times, or the last tag if those
 * of the translation are no pairs any more; length 0: none. */
moe_span text_prompt_missing(moe_span source, moe_span target);
/* The first number of a source whose digits its translation lacks, in whatever script and with whatever signs between
 * them; length 0: none. Numbers of less than three digits, and zeros at their ends, are not looked for, nor times and
 * dates: languages write them in their own ways. Errors: MOE_ERROR_MEMORY. */
moe_status text_prompt_missing_number(moe_span source, moe_span target, moe_span *lost, moe_error *error);

/* What the search must write. Free with text_ids_free(&bound->ids). */
typedef struct text_constraints {
    moe_constraint each[MOE_MAX_CONSTRAINTS]; /* [n] */
    size_t n;
    text_ids ids;
} text_constraints;
/* All markup, placeholders and addresses of a source, and the numbers that this translation of it has lost: as many as
 * have at most `room` tokens. Errors: MOE_ERROR_MEMORY and those of the tokeniser. */
moe_status text_prompt_bind(const text_front *front, moe_span source, moe_span target, size_t room,
                            text_constraints *bound, moe_error *error);

#endif
