/* jobs.h - prepares, requests, judges and writes a text.
 *
 *   text_job     a text with its ids and its current attempt.
 *   text_sample  a file of texts for measurements.
 *
 * stream.c calls text_job_prepare -> text_job_request -> moe_translate -> text_job_next, and then text_job_request
 * again or text_job_write.
 */
#ifndef TEXT_JOBS_H
#define TEXT_JOBS_H

#include "moe.h"
#include "tools/text/attempt.h"
#include "tools/text/suspicion.h"
#include "tools/text/prompt.h"
#include "tools/text/protect.h"
#include "tools/text/recall.h"
#include "tools/text/text.h"

#include <stddef.h>
#include <stdint.h>

/* ---- 1. Jobs ------------------------------------------------------------------------------------------- */

typedef struct text_options {
    const char *option;             /* precedes an option's name in messages; NULL means "--" */
    int ids, pretokenized;          /* 1 if texts are token ids; 1 if they are pieces of the model's vocabulary */
    int target_ids, target_pieces;  /* 1 if targets and translations are token ids; 1 if they are pieces */
    int pairs;                      /* 1 if lines have a target (text_line.given) */
    int begins;                     /* 1 if the target is a prefix of the translation */
    int truncate;                   /* truncate a text that is too long or damaged instead of rejecting the line */
    const struct text_rules *rules; /* protected spans and terms (protect.h); NULL if nothing is protected */
    int quick;                      /* moetext_request.quick */
    int variants;                   /* try each text_variant of short texts without a final punctuation mark */
    int lower_case; /* encode text in capitals in lower case, because few models have learned capitals */
    const struct text_prompt_options *prompt; /* options of a prompted model; may be NULL */
    size_t max_source;                    /* limit in tokens, including source_extra; max_target for language models */
    size_t max_target;                    /* limit in tokens, including the end token */
    const struct text_strategy *strategy; /* the way to translate texts (strategy.h); set by text_stream_run */
} text_options;

/* The partial output of a model. */
typedef struct text_partial {
    text_bytes text;
    text_ids ids;
    bpe_stream decoding;
    int final; /* 1 if the job will not be retried */
} text_partial;

typedef struct text_repair text_repair;

/* State of adding terms that a prompted model's answer lacks (prompted.c). */
typedef struct text_placing {
    int stage;
    const text_term *terms[TEXT_MAX_PLACED]; /* [n] */
    size_t n, written;                       /* the first `written` of them replace their sources in the prompt */
    size_t lacks;                            /* occurrences of the last written term that `answer_ids` lack */
    size_t missing, bytes;                   /* number of terms that `answer_ids` lack; length of their text */
    size_t place;                            /* offset of the last written term in the text */
} text_placing;

typedef struct text_job {
    /* Buffers, which text_job_clear keeps. "prompted" and "guarded" name the strategies (strategy.h) that use them. */
    text_bytes source, target; /* the input, truncated if necessary */
    text_bytes gap;            /* white space, and a comma or other punctuation, before the next part of the line */
    text_bytes context;        /* (prompted) earlier lines to show the model */
    text_bytes shown;          /* (prompted) the trimmed text */
    text_bytes written;        /* the translation of `written_of`, which text_job_lost has written */
    text_bytes recalled;       /* the translation, if `match` is exact, adapted or repaired */
    text_ids source_ids, target_ids;
    text_ids prompt;                /* (prompted) the whole prompt; empty if source_ids are the input */
    text_ids phrase_ids;            /* (guarded) a phrase that is translated separately; may be empty */
    text_ids draft_ids;             /* tokens that the translation may contain (drafts.h) */
    text_ids resumed_ids;           /* for TEXT_RESUME, the output before the repetition */
    text_ids answer_ids, logprobs;  /* (prompted) an answer that lacks terms; its log-probabilities, times LOG_UNIT */
    text_ids begun_ids, edited_ids; /* (prompted) its beginning with a term; all of it with a term */
    text_ids term_uses;             /* terms in the source (text_terms_check) */
    struct text_guard *guard;       /* (guarded) protected spans (protect.h); may be NULL */
    struct text_constraints *bound; /* (prompted) constraints of a second answer (prompt.h); may be NULL */
    text_repair *repair;            /* (guarded) the repair of a fuzzy match (repair.h); may be NULL */
    text_partial partial;

    struct text_job *retry; /* next job of text_stream.retries */
    text_options options;   /* options passed to text_job_prepare */
    text_attempt attempt;   /* current or final attempt */
    const moe_hypothesis *written_of;
    text_match match;       /* in the translation memory */
    int32_t language, from; /* (prompted) tags of the request */
    text_placing placing;   /* (prompted) for TEXT_PLACE_TERMS */
    int capitals;           /* 1 if the source is in capitals, so the translation must be in capitals */
    int title;              /* 1 if the source is a title; its words are encoded in lower case */
    int of_capitals;        /* 1 if the job is part of a text in capitals */
    int divided;            /* 1 if the job is a half of a text */
    int divisible;          /* 1 to halve the job if it cannot be translated as a whole */
    int name_list; /* part of a list of names: 1 to keep all names if some are lost, 2 to always keep all names */
    text_message_text message; /* kind of text in an ICU message */
    int blank;                 /* 1 if there is nothing to translate, and the output is empty or white space */
    int verbatim;              /* 1 if the output is the source, which contains no language */
    int cut;                   /* 1 if `note` describes a truncation */
    int noted;                 /* 1 if `note` is a remark */
    int failed;                /* 1 if the job failed, with the reason in `note` */
    moe_status status;         /* status of the failure */
    char note[256];
    int joined; /* 1 if the next part of the line follows without a space */
    int more;   /* set by the caller if the next job continues the line */
} text_job;

/* Return 1 if the output is the source because no translation was usable. */
int text_job_keeps_source(const text_job *job);
/* Add to a job's note and set one of its flags. The first cut or failure wins; later ones do not change the note. */
void text_job_note(text_job *job, int *flag, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 3, 4)))
#endif
    ;
int text_keeps_spans(const text_options *options);

/* Fill source, target and ids from a line; set blank, cut and note. An unusable line sets `failed` and returns MOE_OK.
 * Errors: MOE_ERROR_MEMORY. */
moe_status text_job_prepare(const text_front *front, const text_options *options, const text_line *line, text_job *job,
                            moe_error *error);
/* Encode a text into source_ids; set `failed` if the text cannot be encoded. Errors: MOE_ERROR_MEMORY. */
moe_status text_job_encode(const text_front *front, text_job *job, const text_bytes *text, moe_error *error);

/* Complete the request of a job's attempt. The caller must have set everything except the source. */
moe_status text_job_request(const text_front *front, text_job *job, moe_request *request, moe_error *error);
/* Copy the hypotheses of a result to `ranked`, and if the job has a fuzzy match, sort them again: add to each score
 * TEXT_RECALL_WEIGHT times its similarity to the match's translation. Errors: MOE_ERROR_MEMORY and those of the
 * tokeniser. */
moe_status text_job_rank(const text_front *front, text_job *job, const moe_result *result,
                         moe_hypothesis ranked[MOE_MAX_BEAM], moe_error *error);
/* Judge a result and prepare the next attempt. If the step of the attempt is final, the job is done. Otherwise request
 * the job again; if the step is TEXT_HALVE, split it first (text_job_divide). Errors: MOE_ERROR_MEMORY and those of the
 * tokeniser. */
moe_status text_job_next(const text_front *front, text_suspicions *suspicions, text_job *job, const moe_result *result,
                         moe_error *error);
/* Split a job into halves that are ready for requests. Errors: MOE_ERROR_MEMORY. */
moe_status text_job_divide(const text_front *front, text_job *job, text_job *second, moe_error *error);
/* Add reasons of TEXT_LOST to the verdict if the translation does not cover the whole source, or has other numbers or
 * brackets. */
moe_status text_job_lost(const text_front *front, text_job *job, const moe_hypothesis *h, text_verdict *verdict,
                         moe_error *error);
/* Return 1 if a translation starts with the target prefix, or all tokens of the prefix were given to the model. */
int text_job_begins(const text_job *job, const char *text, size_t length);
/* Append a translation in the form that the options set: pieces, ids, or text with protected spans and capitals
 * restored. */
moe_status text_job_write(const text_front *front, const text_job *job, const moe_hypothesis *h, text_bytes *out,
                          moe_error *error);

/* Add output of the model to the partial result. If memory runs out, the job has no partial result. */
void text_job_grow(const text_front *front, text_job *job, const int32_t *ids, size_t n);
/* Append the text of partial output in whole characters, or nothing if protected spans are placed only at the end.
 * Return the number of final bytes. */
size_t text_job_show(const text_front *front, const text_job *job, text_bytes *out);

void text_job_clear(text_job *job); /* reset, keeping buffers */
void text_job_free(text_job *job);  /* free the contents, not the job */

/* ---- 2. Samples ---------------------------------------------------------------------------------------- */

typedef struct text_pair {
    uint64_t line;
    int32_t source_tag, tag; /* language tags; -1 if the model has none */
    text_ids source, target; /* a prompted source is a whole prompt; the text of a language model is a target */
    int has_target;
} text_pair;

typedef struct text_sample { /* all zero if empty */
    text_pair *pairs;
    size_t count, capacity;
} text_sample;

/* Read a file. For a translation model each line has a source language, a target language, a source and a target,
 * separated by TABs; an unknown source language is accepted. For a language model each line is a text; blank lines are
 * skipped. If `targets_wanted` is 0, the last field may be missing or empty. Only the options ids and pretokenized
 * matter. An error's `where` names the line. */
moe_status text_sample_read(const text_front *front, const text_options *options, const char *path, int targets_wanted,
                            text_sample *sample, moe_error *error);
void text_sample_free(text_sample *sample);

#endif
