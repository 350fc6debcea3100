/* strategy.h - strategies for translating a text with a model. */
#ifndef TEXT_STRATEGY_H
#define TEXT_STRATEGY_H

#include "tools/text/jobs.h"

struct text_strategy {
    int prompts; /* 1 if earlier lines can be shown and long lines are split by tokens */
    int answers; /* 1 if the job is a whole prompt, whose answer keeps line breaks */
    /* Return the maximum number of tokens in a text. */
    size_t (*room)(const text_front *front, const text_options *options);
    /* Fill source_ids for the job's attempt. `source` has no ICU message syntax. */
    moe_status (*prepare)(const text_front *front, text_job *job, moe_span source, moe_error *error);
    /* Complete a request, and decide whether partial results are final. */
    moe_status (*request)(const text_front *front, text_job *job, moe_request *request, moe_error *error);
    /* Find problems in a result. A failed result without reasons fails the job. */
    moe_status (*judge)(const text_front *front, text_suspicions *suspicions, text_job *job, const moe_result *result,
                        text_verdict *verdict, moe_error *error);
    /* Append the translation, in upper case if `shout` is 1. *sound is 1 if all protected spans are intact. */
    moe_status (*write)(const text_front *front, const text_job *job, int shout, const moe_hypothesis *h,
                        text_bytes *out, int *sound, moe_error *error);
    /* Append the printable part of a partial result. */
    void (*show)(const text_front *front, const text_job *job, text_bytes *out);
};

extern const struct text_strategy text_guarded;  /* protects spans with placeholders, constraints and retries */
extern const struct text_strategy text_prompted; /* puts the text into a prompt */
extern const struct text_strategy text_answered; /* sends the job as a whole prompt */

/* Choose the strategy for lines of text, ids or pieces. */
static inline const struct text_strategy *text_strategy_of(const text_front *front, const text_options *options) {
    return front->prompt && !options->ids && !options->pretokenized ? &text_prompted : &text_guarded;
}

/* Append a partial result excluding trailing white space and incomplete characters. */
void text_show_partial(const text_front *front, const text_partial *partial, size_t begin, text_bytes *out);

#endif
