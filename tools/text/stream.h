/* stream.h - cuts texts into jobs and translates them with moe_translate. Part of moetext.c, the only user.
 *
 * A sentence that is longer than the model's limit is translated in parts: clauses, or words if there are none. If a
 * translation was truncated, repeats itself, or lost names of a list or signs between words (lost.h), its text is
 * halved; a word that cannot be translated is copied, with a note. A text becomes one or more consecutive jobs; all
 * but the last have `more` set. The user owns the jobs.
 */
#ifndef TEXT_STREAM_H
#define TEXT_STREAM_H

#include "tools/text/jobs.h"
#include "tools/text/messages.h"

/* A position in a text that is translated in parts. All zero at the beginning of a text, or without a text. */
typedef struct text_cursor {
    text_line rest;        /* the rest of a text that is split; points into the text of `next` */
    int framed;            /* 1 if the text has ICU messages and is cut into their pieces */
    text_message message;  /* the position in the messages */
    size_t piece;          /* bytes up to the end of the current piece */
    size_t cell;           /* bytes up to the end of the current cell */
    int sentences;         /* 1 if sentences are translated one by one */
    size_t sentence;       /* bytes up to the end of the current sentence */
    int divided, reported; /* the sentence is too long and translated in parts; the user was notified */
    int verbatim;          /* 1 if the current part contains no language */
} text_cursor;

typedef struct text_stream text_stream;
struct text_stream {
    /* Set by the user. The functions may set `trouble`, which ends the run; but if memory runs out for one job, the job
     * is finished with MOE_ERROR_MEMORY. */
    const text_front *front;
    text_options options;
    size_t split;  /* longer texts, in characters, are split into sentences; 0 never splits */
    int blank_too; /* 1 to request blank texts too */
    /* Called before each part; returns the same values as moe_pull_fn. Sets `at` to the cursor of the next text, and
     * `options` and `split` to its settings. */
    int (*turn)(text_stream *stream, int wait);
    /* Get the next text for a cursor that has no text. The text must remain valid while its cursor has a `rest`, or
     * until the next call. */
    void (*next)(text_stream *stream, text_line *line);
    /* Return a blank job, or NULL if out of memory; the user must then have dropped the text and cleared its cursor's
     * `rest`. */
    text_job *(*add)(text_stream *stream, const text_line *line, int more);
    text_job *(*insert)(text_stream *stream, text_job *before, size_t at);     /* a blank job for the second half */
    void (*request)(text_stream *stream, text_job *job, moe_request *request); /* fill the request */
    void (*finish)(text_stream *stream, text_job *job,
                   const moe_result *result);            /* result is NULL if the job was not requested */
    void (*partial)(text_stream *stream, text_job *job); /* called for requests with text_stream_partial */
    /* Append the non-blank lines that precede a text, each with a line break, to show them to the model. */
    void (*before)(text_stream *stream, const text_line *line, size_t lines, text_bytes *out);

    /* Find a text in the translation memory, as text_recall_find does; NULL without one. */
    moe_status (*recall)(text_stream *stream, moe_span text, text_match *match, text_bytes *out, moe_error *error);

    text_bytes context;              /* earlier lines for the current line */
    text_match match;                /* of the current line, if it has `recalled` set */
    text_bytes recalled;             /* its translation */
    uint64_t pieces, unknown_pieces; /* statistics of requested ids */
    moe_error trouble;               /* its code is set after a failure that ends the run */
    text_cursor *at;                 /* cursor of the current text */
    text_job *retries;               /* jobs that wait for another request */
    size_t requested;                /* jobs in progress */
    int ended;                       /* 1 if no texts remain */
    text_suspicions doubts;          /* all zero before the first run */
};

/* Find a text in the translation memory, and set match and recalled. Return 1 for an exact match, or unless `exactly`
 * is 1, for an adapted one. Errors are in `trouble`. */
int text_stream_recalls(text_stream *stream, moe_span text, int exactly);

/* Add new output to a job (text_job_grow) and call `partial`. A callback for moe_request.partial. */
void text_stream_partial(void *stream, void *job, const int32_t *ids, size_t n);

/* Append the separator between a part and the next part: the white space of the source, a space after a script without
 * spaces, or nothing next to ICU message syntax. */
void text_stream_join(const text_job *before, text_bytes *out);

/* Run until the texts end. Return the status of `trouble` or of moe_translate. */
moe_status text_stream_run(text_stream *stream, moe_session *session, moe_error *error);
void text_stream_free(text_stream *stream); /* frees caches */

#endif
