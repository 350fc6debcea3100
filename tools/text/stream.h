/* stream.h - texts through moe_translate: each is prepared, cut into sentences, asked and answered.
 *
 * moetext.c and the programs with lines in and out (program_flow) are its two users, and so cut, calm and shout alike.
 * A sentence that is longer than the model reads goes in parts: clauses, else words; what has no words stays as it is.
 * So does what the model could not translate as a whole: its translation was cut, repeats itself, or lost names of a
 * list or signs between words (lost.h). It is tried again by halves; a word that cannot be translated stays, with a
 * note. A text is one job, or several in a row whose `more` is set but for the last. The user owns the jobs and says
 * what becomes of them.
 */
#ifndef TEXT_STREAM_H
#define TEXT_STREAM_H

#include "tools/text/jobs.h"
#include "tools/text/messages.h"

/* How far a text is that goes in parts. All zero: at its beginning, or at none. */
typedef struct text_cursor {
    text_line rest;        /* of a text that is split; it lies where `next` has it */
    int framed;            /* it has ICU messages: it goes in their pieces */
    text_message message;  /* where in it */
    size_t piece;          /* bytes of it up to the end of the piece at hand */
    size_t cell;           /* the same of the cell */
    int sentences;         /* its sentences go one by one */
    size_t sentence;       /* bytes up to the end of the sentence at hand */
    int divided, reported; /* which is longer than the model reads: it goes in parts; that was said */
    int verbatim;          /* the part at hand is no language */
} text_cursor;

typedef struct text_stream text_stream;
struct text_stream {
    /* The user's; all functions may set `trouble`, which ends the run. With `goes_on` a job that memory runs out for is
     * finished with that status instead. */
    const text_front *front;
    text_options options;
    size_t split;  /* texts of more characters than this go sentence by sentence; 0: every text stays whole */
    int blank_too; /* a blank text is a request as well */
    int goes_on;
    /* Before each part: an answer of moe_pull_fn. It may set `at` to the cursor of the text whose turn it is, and
     * `options` and `split` to what that text needs. NULL: every text goes whole before the next one is begun. */
    int (*turn)(text_stream *stream, int wait);
    /* The next text, for a cursor that is at none: an answer of moe_pull_fn. The text stays valid while its cursor has
     * a `rest`, or until the next call. */
    int (*next)(text_stream *stream, int wait, text_line *line);
    void (*seen)(text_stream *stream, const text_line *line); /* a whole text, before its parts; may be NULL */
    /* A blank job; NULL: no memory. With `goes_on` the user has dropped the text then, and its cursor's `rest`. */
    text_job *(*add)(text_stream *stream, const text_line *line, int more);
    text_job *(*insert)(text_stream *stream, text_job *before, size_t at); /* another, behind one whose text is cut */
    void (*ask)(text_stream *stream, text_job *job, moe_request *request); /* fill the request: ids and all else */
    void (*finish)(text_stream *stream, text_job *job, const moe_result *result); /* result NULL: it was not asked */
    void (*grown)(text_stream *stream, text_job *job); /* a job whose request has text_stream_grow; may be NULL */

    /* The earlier lines of a text that a model is shown with a new one, but for blank ones: appended to *out, each with
     * a line break. NULL: the lines of all texts, which are kept here. */
    void (*before)(text_stream *stream, const text_line *line, size_t lines, text_bytes *out);

    text_bytes earlier;              /* those lines */
    text_bytes context;              /* of the line at hand */
    uint64_t pieces, unknown_pieces; /* of the ids that were asked for */
    moe_error trouble;               /* code set: memory ran out, or worse */
    text_cursor *at, own;            /* of the text at hand; of all texts, without `turn` */
    text_job *retries;               /* jobs that wait for another request */
    size_t asked;                    /* jobs under way */
    int ended;                       /* no texts are left */
    text_suspicions doubts;          /* all zero before the first run */
};

int text_stream_is_blank(const char *data, size_t length); /* of a line: white space alone */

/* For moe_request.partial: what the model writes for a job is kept as it comes (text_job_show), and `grown` called. */
void text_stream_grow(void *stream, void *job, const int32_t *ids, size_t n);

/* Append what stands between a part and the next one: the white space of the source, or a space where a script without
 * spaces had none; nothing at the frame of a message. */
void text_stream_join(const text_job *before, text_bytes *out);

/* Until the end of the texts. Trouble is returned like any failure of moe_translate. */
moe_status text_stream_run(text_stream *stream, moe_session *session, moe_error *error);
void text_stream_free(text_stream *stream); /* what runs have left in it */

#endif
