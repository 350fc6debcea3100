/* strategy.h - the ways to translate a text with a model. */
#ifndef TEXT_STRATEGY_H
#define TEXT_STRATEGY_H

#include "tools/text/jobs.h"

struct text_strategy {
    int prompts; /* earlier lines may be shown, and long lines are split by tokens */
    int answers; /* the job is a whole prompt, whose answer is passed on with its line breaks */
    /* Tokens that a text may have. */
    size_t (*room)(const text_front *front, const text_options *options);
    /* Fill source_ids for the job's attempt. `source`: without the syntax of an ICU message. */
    moe_status (*prepare)(const text_front *front, text_job *job, moe_span source, moe_error *error);
    /* Complete a request, and decide whether partial results are final. */
    moe_status (*request)(const text_front *front, text_job *job, moe_request *request, moe_error *error);
    /* Find what is wrong with a result. No reasons with a status: the job fails. */
    moe_status (*judge)(const text_front *front, text_suspicions *doubts, text_job *job, const moe_result *result,
                        text_verdict *verdict, moe_error *error);
    /* Append the translation; *sound: it has all that is kept. `shout`: in capitals. */
    moe_status (*write)(const text_front *front, const text_job *job, int shout, const moe_hypothesis *h,
                        text_bytes *out, int *sound, moe_error *error);
    /* Append what can be shown of a partial result. */
    void (*show)(const text_front *front, const text_job *job, text_bytes *out);
};

extern const struct text_strategy text_guarded;  /* placeholders, constraints and retries protect what is no language */
extern const struct text_strategy text_prompted; /* the model is asked through a prompt */
extern const struct text_strategy text_answered; /* the job is a prompt itself */

/* The strategy for lines of text, ids or pieces. */
static inline const struct text_strategy *text_strategy_of(const text_front *front, const text_options *options) {
    return front->prompt && !options->ids && !options->pretokenized ? &text_prompted : &text_guarded;
}

/* Append a partial result without white space at its end, or a character that may become whole. */
void text_show_partial(const text_front *front, const text_partial *partial, size_t begin, text_bytes *out);
moe_span text_blanks_before(const text_bytes *source); /* its white space */
moe_span text_blanks_after(const text_bytes *source);

#endif
