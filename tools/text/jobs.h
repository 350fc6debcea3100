/* jobs.h - lines of the programs: preparing, retrying, writing.
 *
 *   text_job     one line: its text, its ids, the finished output.
 *   text_queue   jobs in the order of their lines; they may finish in another order.
 *   text_sample  a text that is read whole, to measure with.
 *
 * A program's loop is: text_reader_next -> text_queue_add -> text_job_prepare -> moe_translate's pull and done ->
 * text_job.output -> text_queue_first. stream.c is that loop.
 */
#ifndef TEXT_JOBS_H
#define TEXT_JOBS_H

#include "moe.h"
#include "tools/text/attempt.h"
#include "tools/text/suspicion.h"
#include "tools/text/prompt.h"
#include "tools/text/protect.h"
#include "tools/text/text.h"

#include <stddef.h>
#include <stdint.h>

/* ---- 1. Jobs ------------------------------------------------------------------------------------------- */

typedef struct text_options {
    const char *option;             /* what messages write before an option's name; NULL: "--" */
    int ids;                        /* lines are token ids                                                */
    int pretokenized;               /* lines are pieces of the model's vocabulary                         */
    const char *pairs;              /* lines are source TAB target, as this option asks for; NULL: they are not */
    int truncate;                   /* cut what cannot be used whole, and say so, rather than refuse it    */
    const struct text_rules *rules; /* what is kept as it is (protect.h); NULL: nothing */
    int variants;                   /* short texts without a sign at their end are tried in each text_variant */
    int lower_case; /* what is written in capitals is encoded as in small letters: few models have learned those */
    const struct text_prompt_options *prompt; /* of a model that is asked in words; NULL: none */
    size_t max_source; /* tokens, source_extra included: moe_session_params; of a language model its max_target */
    size_t max_target; /* tokens, end included                                                */
    const struct text_strategy *strategy; /* how texts are translated (strategy.h); text_stream_run sets it */
} text_options;

/* What a model has written so far. */
typedef struct text_partial {
    text_bytes text;
    text_ids ids;
    bpe_stream decoding;
    int final; /* the job is not retried, whatever comes */
} text_partial;

typedef struct text_job {
    /* memory, which text_job_clear keeps */
    text_bytes source, target; /* as read, cut if so */
    text_bytes gap;            /* white space, and a comma or sign, between it and the next part of the line */
    text_bytes context;        /* prompted: the earlier lines that the model is shown */
    text_bytes shown;          /* prompted: the text, without white space at both ends */
    text_bytes output;         /* the caller's, without line break */
    text_ids source_ids, target_ids;
    text_ids prompt;                /* prompted: what the model is given; length 0: source_ids */
    text_ids phrase_ids;            /* guarded: a phrase that is translated separately; length 0: none */
    text_ids resumed_ids;           /* TEXT_RESUME: what the model wrote before the repetition */
    struct text_guard *guard;       /* guarded: what is kept of it (protect.h); NULL: nothing ever was */
    struct text_constraints *bound; /* prompted: what the second answer must have (prompt.h); NULL: nothing ever was */
    text_partial partial;

    struct text_job *next;  /* the queue's */
    struct text_job *retry; /* the stream's */
    uint64_t line;
    text_options options;   /* when it was prepared */
    text_attempt attempt;   /* what is tried, or how it ended */
    int32_t language, from; /* prompted: of the request */
    int capitals;           /* it was in capitals, so should its translation be */
    int of_capitals;        /* it is a part of what was in capitals */
    int divisible;          /* it may be halved if it cannot be translated as a whole */
    int name_list;          /* it is of a long list of names: 1, those that are lost are looked for; 2, all stay */
    int message;            /* text_message_text of messages.h: it is of a line with an ICU message */
    int blank;              /* nothing to translate: the output is empty, or the white space where it is kept */
    int verbatim;           /* the source is the output: it is no language */
    int cut;                /* `note` says what was cut */
    int noted;              /* `note` says that a sentence goes in parts, or that a message stays */
    int failed;             /* `note` says why there is no output */
    moe_status status;      /* why it failed */
    char note[256];
    int joined;  /* the next part of the line follows directly */
    int32_t tag; /* the caller's: the language it is in; tagged 0: not known */
    int tagged;
    int finished; /* the caller sets it when `output` is final */
    int more;     /* the caller's: its line goes on with the next job */
    void *extra;  /* the caller's; NULL in a new job */
} text_job;

/* Whether the source is the output, since no translation of it could be used. */
int text_job_keeps_source(const text_job *job);
/* Add to a job's note and set one of its flags; what was cut, or why it failed, is said once. */
void text_job_note(text_job *job, int *flag, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 3, 4)))
#endif
    ;
int text_keeps_spans(const text_options *options);

/* Fill source, target and ids from a line; sets blank, cut and note. A line that cannot be used is `failed`, never a
 * status: what is returned is MOE_OK or MOE_ERROR_MEMORY. */
moe_status text_job_prepare(const text_front *front, const text_options *options, const text_line *line, text_job *job,
                            moe_error *error);
/* Encode a text as a source of the job, which fails if it cannot be. Errors: MOE_ERROR_MEMORY. */
moe_status text_job_encode(const text_front *front, text_job *job, const text_bytes *text, moe_error *error);

/* Fill the request of a job's attempt; the caller has set all but its source. */
moe_status text_job_request(const text_front *front, text_job *job, moe_request *request, moe_error *error);
/* Judge a result and prepare the next attempt. If its step is final, the job is done; otherwise it is to be requested
 * again, after TEXT_HALVE as two jobs (text_job_divide). Errors: MOE_ERROR_MEMORY and those of the tokeniser. */
moe_status text_job_next(const text_front *front, text_suspicions *doubts, text_job *job, const moe_result *result,
                         moe_error *error);
/* Both halves of a job, ready to be requested. Errors: MOE_ERROR_MEMORY. */
moe_status text_job_divide(const text_front *front, text_job *job, text_job *second, moe_error *error);
/* The reason why a translation is not one of all of the source: TEXT_PART_LOST or TEXT_WORD_LOST; or 0. */
moe_status text_job_lost(const text_front *front, text_job *job, const moe_hypothesis *h, text_verdict *verdict,
                         moe_error *error);
/* What the model wrote for a job, appended to *out in the form of its line: text in the capitals of the line and with
 * what is kept of it, pieces or ids. */
moe_status text_job_write(const text_front *front, const text_job *job, const moe_hypothesis *h, text_bytes *out,
                          moe_error *error);

/* More of what the model writes for a job. Without memory for it, nothing is shown. */
void text_job_grow(const text_front *front, text_job *job, const int32_t *ids, size_t n);
/* What text_job_write would make of that, appended to *out, in whole characters; nothing, where what is kept is not in
 * place before the end. Returns how many bytes of it are final. */
size_t text_job_show(const text_front *front, const text_job *job, text_bytes *out);

void text_job_clear(text_job *job); /* blank again, with the memory that it has */
void text_job_free(text_job *job);  /* what it holds, not the job */

/* ---- 2. The queue --------------------------------------------------------------------------------------- */

/* Lines out, in order. All zero is empty. Jobs are used again: a long run allocates for its widest moment only. */
typedef struct text_queue {
    text_job *first, *last, *spare;
} text_queue;

text_job *text_queue_add(text_queue *queue);                      /* at the end, blank; NULL if memory ran out */
text_job *text_queue_insert(text_queue *queue, text_job *before); /* the same, behind one that is there */
text_job *text_queue_first(text_queue *queue);                    /* the first if it is finished, else NULL    */
void text_queue_remove(text_queue *queue);                        /* the first                                 */
void text_queue_free(text_queue *queue);

/* ---- 3. Samples ---------------------------------------------------------------------------------------- */

typedef struct text_pair {
    uint64_t line;
    int32_t source_tag, tag; /* of the languages; -1: the model has no tag for it */
    text_ids source, target; /* a source as it is asked for; a language model's text is a target */
    int has_target;
} text_pair;

typedef struct text_sample { /* all zero is empty */
    text_pair *pairs;
    size_t count, capacity;
} text_sample;

/* Read all of a file. Lines are source language TAB target language TAB source TAB target for a translation model (a
 * source language that the model does not know does no harm), text for a language model, whose blank lines are passed
 * over.
 * `targets_wanted` 0: the last field may be missing or empty. Of the options ids and pretokenized count. An error's
 * `where` says which line it was. */
moe_status text_sample_read(const text_front *front, const text_options *options, const char *path, int targets_wanted,
                            text_sample *sample, moe_error *error);
void text_sample_free(text_sample *sample);

#endif
