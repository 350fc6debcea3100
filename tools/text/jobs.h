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
#include "tools/text/doubt.h"
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
    int brief;                      /* short texts without a sign at their end are tried in each text_manner */
    int calm; /* what is written in capitals is encoded as in small letters: few models have learned those */
    const struct text_wishes *wishes; /* of a model that is asked in words; NULL: none */
    size_t max_source; /* tokens, source_extra included: moe_session_params; of a language model its max_target */
    size_t max_target; /* tokens, end included                                                */
} text_options;

typedef struct text_job {
    struct text_job *next;  /* the queue's */
    struct text_job *again; /* the stream's */
    uint64_t line;
    text_bytes source, target; /* as read, cut if so */
    text_ids source_ids, target_ids;
    text_bytes shown;         /* of a model that is asked in words: the text, without white space at both ends */
    text_bytes context;       /* the earlier lines that it is shown */
    text_ids prompt;          /* what it is given; length 0: source_ids */
    int32_t language, from;   /* that it was asked for; that it is in */
    int blank;                /* nothing to translate: the output is empty, or the white space where it is kept */
    int shouted;              /* it was in capitals, so should its translation be */
    struct text_guard *guard; /* what is kept of it (protect.h); NULL: nothing ever was */
    text_ids aside_ids;       /* words that are asked for by themselves (text_guard_aside); length 0: none are */
    size_t asides;            /* how many were */
    int cut;                  /* `note` says what was cut */
    int attempt;              /* 1: the second, as stand-ins of the first did not come through; of a model that is
                                 asked in words 2, if only numbers did not */
    struct text_bound *bound; /* what the second answer of such a model must have (prompt.h); NULL: nothing ever was */
    int loops;                /* how many translations were stopped because they repeat themselves */
    text_ids sound_ids;       /* of the last one of these, up to there */
    int terms;                /* what becomes of those of a glossary: text_terms (protect.h) */
    int stays;                /* nor did those of the second: what is written is the source */
    int brief;                /* text_is_brief: it is tried in each manner; 0: it is not, or the best is known */
    text_manner manner, best; /* the one at hand; that with the best translation so far, which has this score */
    float best_score;
    int divided;   /* `note` says that a sentence goes in parts, or that a message stays */
    int dividable; /* a text that may go in parts, if it cannot be translated as a whole */
    int names;     /* it is of a long list of names: 1, those that are lost are looked for; 2, all stay */
    int loud;      /* it is a part of what was in capitals */
    const struct text_rules *rules; /* by which it was prepared */
    int calm;
    int32_t tag; /* the caller's: the language it is in; tagged 0: not known */
    int tagged;
    int verbatim;      /* the source is the output: it is no language */
    int message;       /* text_message_text of messages.h: it is of a line with an ICU message */
    int joined;        /* the next part of the line follows directly */
    text_bytes gap;    /* white space, and a comma or sign, between it and the next part of the line */
    int failed;        /* `note` says why there is no output */
    moe_status status; /* why it failed */
    char note[256];
    text_bytes output; /* the caller's, without line break */
    int finished;      /* the caller sets it when `output` is final */
    int pair;          /* its target was given (text_options.pairs) */
    int answers;       /* source_ids are a whole prompt, and what the model writes stays as it is */
    text_bytes begun;  /* what it has written so far (text_job_grow), */
    text_ids begun_ids;
    bpe_stream decoding;
    int steady;  /* which stays: the job is not tried again, whatever comes */
    int more;    /* the caller's: its line goes on with the next job */
    void *extra; /* the caller's; NULL in a new job           */
} text_job;

/* Fill source, target and ids from a line; sets blank, cut and note. A line that cannot be used is `failed`, never a
 * status: what is returned is MOE_OK or MOE_ERROR_MEMORY. */
moe_status text_job_prepare(const text_front *front, const text_options *options, const text_line *line, text_job *job,
                            moe_error *error);

/* Tokens that a text may have. */
size_t text_job_room(const text_front *front, const text_options *options);
/* Whether a text is asked for in words: `prompt` of its job. */
int text_job_is_asked(const text_front *front, const text_options *options);
/* The prompt of a job for a request, which then has it as its source. */
moe_status text_job_ask(const text_front *front, const text_options *options, text_job *job, moe_request *request,
                        moe_error *error);
/* A translation that was stopped because it repeats itself goes on from there with a penalty (text_job_go_on), twice.
 * If it still does, a note says that it was cut. Errors: MOE_ERROR_MEMORY. */
enum { TEXT_LOOPS = 2 };
moe_status text_job_loops(text_job *job, const moe_hypothesis *h, int *again, moe_error *error);
void text_job_go_on(const text_job *job, moe_request *request);
void text_job_say_looped(text_job *job);

/* Of such a job: whether its translation lacks what is kept, so that it is asked for once more; after that its text
 * stays, with a note. Where it lacks nothing, a note says what may be wrong with it; nothing at all is no translation,
 * and the job has failed. Errors: MOE_ERROR_MEMORY. */
moe_status text_job_look(const text_front *front, const text_options *options, text_job *job, const moe_hypothesis *h,
                         text_doubts *doubts, int *again, moe_error *error);

/* Whether the search must write what is kept of such a job. */
int text_job_is_bound(const text_job *job);

/* For the sake of the terms of a glossary a job may be tried four times (text_terms in protect.h). Then: whether all
 * that is kept of a job comes through this translation of it. If not, text_job_again prepares a second try
 * of the job; after that one, or where it cannot be, it sets `stays`, with a note, and returns 0 in *again. Errors:
 * MOE_ERROR_MEMORY. */
moe_status text_job_again(const text_front *front, const text_options *options, text_job *job, const moe_hypothesis *h,
                          int *again, moe_error *error);
/* The same where the search found nothing: no translation has all that a job with constraints must have. */
moe_status text_job_refused(const text_front *front, const text_options *options, text_job *job, int *again,
                            moe_error *error);
/* aside_ids of the next words that are asked for by themselves, after what the model made of the last ones (NULL: there
 * were none). Errors: MOE_ERROR_MEMORY. */
moe_status text_job_aside(const text_front *front, const text_options *options, text_job *job, const moe_hypothesis *h,
                          moe_error *error);
/* The same for a job that is `brief`, of a translation that is one of all of the source (`fits`): the next manner, or
 * the best one again. `fits` in: what the caller found. */
moe_status text_job_vary(const text_front *front, const text_options *options, text_job *job, const moe_hypothesis *h,
                         int fits, int *again, moe_error *error);
/* Both parts of a job whose source is cut behind `at` bytes (text_half), ready to be asked for. Errors:
 * MOE_ERROR_MEMORY. */
moe_status text_job_divide(const text_front *front, const text_options *options, text_job *job, text_job *second,
                           size_t at, moe_error *error);
void text_job_keep(text_job *job); /* its translation is the source, with a note */
/* What the model wrote for a job, appended to *out in the form of its line: text in the capitals of the line and with
 * what is kept of it, pieces or ids. */
moe_status text_job_write(const text_front *front, const text_options *options, const text_job *job,
                          const moe_hypothesis *h, text_bytes *out, moe_error *error);

/* More of what the model writes for a job comes in; before the first of it, text_job_begin. Without memory for it,
 * nothing is shown. */
void text_job_begin(const text_front *front, const text_options *options, text_job *job);
void text_job_grow(const text_front *front, const text_options *options, text_job *job, const int32_t *ids, size_t n);
/* What text_job_write would make of that, appended to *out, in whole characters; nothing, where what is kept is not in
 * place before the end. Returns how many bytes of it are there at the end too, whatever comes; the others look so. */
size_t text_job_show(const text_front *front, const text_options *options, const text_job *job, text_bytes *out);

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
