/* text.h - the front end that programs with text in and text out share: lines in, token ids to the library, lines out.
 *
 *   text_front   a model with its tokeniser. Immutable after opening, shared by any number of threads.
 *   text_reader  cuts a file descriptor into lines. One per input, used by one thread.
 *   text_job     one line on its way: what was read, its ids, the finished output.
 *   text_queue   jobs in the order of their lines, whatever the order in which they finish.
 *   text_sample  a text that is read whole, to measure with.
 *
 * A program's loop is: text_reader_next -> text_queue_add -> text_job_prepare -> moe_translate's pull and done ->
 * text_job.output -> text_queue_first. stream.c is that loop.
 *
 * Nothing here prints or exits. Functions that return moe_status fill the caller's moe_error.
 */
#ifndef TEXT_H
#define TEXT_H

#include "moe.h"
#include "tools/text/bytes.h"
#include "tools/text/spm.h"

#include <signal.h> /* sig_atomic_t */
#include <stddef.h>
#include <stdint.h>

/* ---- 1. Ids -------------------------------------------------------------------------------------------- */

typedef struct text_ids {
    int32_t *data;
    size_t length, capacity;
} text_ids;

void text_append_ids(text_bytes *bytes, const int32_t *ids, size_t count); /* separated by spaces */
void text_ids_free(text_ids *ids);
moe_status text_ids_append(text_ids *ids, const int32_t *from, size_t count, moe_error *error);
moe_status text_ids_set(text_ids *ids, const int32_t *from, size_t count, moe_error *error); /* a copy of `from` */

/* ---- 2. Capitals --------------------------------------------------------------------------------------- */

/* Whether valid UTF-8 is in capitals: three words or more of two letters or more, and no small letter. */
int text_is_shouted(const char *data, size_t length);
/* Valid UTF-8 in small letters, but for those that begin a sentence; in capitals. In place: a letter of which the other
 * case takes more or fewer bytes stays what it is. */
void text_calm(char *data, size_t length);
void text_calm_first(char *data, size_t length); /* the first letter alone */
void text_shout(char *data, size_t length);

/* How a short text without a sign at its end is written for the model: few models have learned those. */
typedef enum text_manner {
    TEXT_AS_IT_IS,
    TEXT_CLOSED, /* with a full stop, which the translation loses again */
    TEXT_SMALL,  /* its first letter small; that of the translation is a capital then */
    TEXT_MANNERS
} text_manner;

/* Whether a text is one: five words at most, a letter at its end. 2: it begins with the one capital of its word. */
int text_is_brief(const char *data, size_t length);
void text_put_manner(text_manner manner, text_bytes *text);
/* The translation out[begin ..) as the text has it. Returns the bytes that it lost at its beginning. */
size_t text_take_manner(text_manner manner, text_bytes *out, size_t begin);

/* ---- 3. Model and tokeniser ---------------------------------------------------------------------------- */

/* A vocabulary that the model file lists piece by piece, without SentencePiece. All zero: none. */
typedef struct text_vocabulary {
    moe_span *pieces; /* [count] by id; they lie in the model file */
    size_t count;
    text_index index; /* ids by the hash of their piece */
} text_vocabulary;

/* Where a model's ids are not SentencePiece's own: of each of its pieces the model's id, and the other way; -1: none.
 * NULL: they are, or texts of pieces are looked up in the vocabulary. */
typedef struct text_map {
    int32_t *ids;    /* [spm_size] */
    int32_t *pieces; /* [vocabulary of the model] */
} text_map;

typedef struct text_front {
    moe_model *model;
    spm *tokeniser; /* NULL: no text, but ids, and pieces where there is a vocabulary */
    spm *joiner;    /* of what the model writes; NULL: the same */
    text_map map;
    text_vocabulary vocabulary;
    text_vocabulary sources;         /* of sources, where those have ids of their own; count 0: the same */
    int of_targets;                  /* what is cut and looked up is a target: text_front_of_targets */
    int32_t special[3];              /* ids that are no text: begin, end, padding */
    int32_t unknown, target_unknown; /* ids of pieces that are not in the vocabulary; -1: there is none */
    size_t
        source_extra; /* tokens that the session adds to a source: tag, begin, end; to a language model's text: end */
    struct text_loading *loading; /* a tokeniser that was begun */
} text_front;

/* "FILE: WHERE: MESSAGE" for a file that could not be used; messages about input and output name the file themselves.
 */
const char *text_file_error(const char *file, const moe_error *error, char *out, size_t size);

typedef enum text_level {
    TEXT_IDS_ONLY, /* leave the tokeniser alone       */
    TEXT_REQUIRED, /* a model without one is an error */
    TEXT_PIECES,   /* a tokeniser or a list of pieces is required */
    TEXT_IF_THERE
} text_level;

/* Open a model (`params` may be NULL) and the tokeniser inside it. *front is all zero on failure. */
moe_status text_open(const char *path, text_level level, const moe_model_params *params, text_front *front,
                     moe_error *error);
void text_close(text_front *front);
/* The tokeniser later, for a model that was opened with TEXT_IDS_ONLY. *front can be closed in any case. */
moe_status text_open_tokeniser(text_front *front, text_level level, moe_error *error);
/* The same in a thread of its own, while the caller makes a session. Until text_wait_tokeniser has returned, the caller
 * may look at the model alone, and *front must stay where it is. Without a thread to be had, text_begin_tokeniser does
 * all the work. */
moe_status text_begin_tokeniser(text_front *front, text_level level, moe_error *error);
moe_status text_wait_tokeniser(text_front *front, moe_error *error); /* MOE_OK where nothing was begun */

/* The same front end for what the model writes: targets may be cut otherwise than sources, and have other ids. It is
 * borrowed: not to be closed. */
text_front text_front_of_targets(const text_front *front);

/* Sets *tag of a language's code, which may be written as the model has it or as other models do: "de" finds "deu_Latn"
 * and "pt-BR" finds "pt". An unknown language is MOE_ERROR_ARGUMENT, with the known ones in the message. */
moe_status text_language(const text_front *front, const char *code, int32_t *tag, moe_error *error);
/* "de en es fr" */
void text_languages(const text_front *front, text_bytes *out);
/* The error that an answer of spm.h's other than 0 is: MOE_ERROR_MEMORY, or MOE_ERROR_ARGUMENT. */
moe_status text_spm_failed(int answer, const char *where, const char *why, moe_error *error);
moe_status text_encode(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error);
/* Appends to *out. The result holds no line break and no TAB, whatever the pieces say: they become spaces. */
moe_status text_decode(const text_front *front, const int32_t *ids, size_t count, text_bytes *out, moe_error *error);
/* "A@@ long word": pieces of the model's own vocabulary separated by spaces; unknown ones become the unknown token. */
moe_status text_parse_pieces(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error);
/* The other way, appended to *out. No line break and no TAB, as with text_decode. */
moe_status text_join_pieces(const text_front *front, const int32_t *ids, size_t count, text_bytes *out,
                            moe_error *error);
/* What the vocabulary calls an id of a target, and of a source; `data` NULL: there is none, or no vocabulary. */
moe_span text_piece(const text_front *front, int32_t id);
moe_span text_source_piece(const text_front *front, int32_t id);
/* 1 if the id stands for a piece that the vocabulary does not know. */
int text_is_unknown(const text_front *front, int32_t id);
/* "12 7 350": decimal ids separated by spaces. Every id must be in the model's vocabulary of sources, or of targets. */
moe_status text_parse_ids(const text_front *front, const char *text, size_t length, text_ids *ids, moe_error *error);

/* ---- 4. Lines in --------------------------------------------------------------------------------------- */

enum { TEXT_MAX_LINE = 1 << 20 }; /* bytes of a line that are kept */

typedef enum text_read {
    TEXT_READ_LINE,
    TEXT_READ_LATER, /* nothing there yet                                 */
    TEXT_READ_END,
    TEXT_READ_STOP, /* *stop became non-zero while waiting               */
    TEXT_READ_ERROR /* errno says why                                    */
} text_read;

typedef struct text_line {
    const char *data; /* valid until the next call; without its "\n" or "\r\n" */
    size_t length;
    uint64_t number;   /* 1 for the first                                */
    int too_long;      /* more than TEXT_MAX_LINE bytes: the rest is gone */
    int kept;          /* it is of an ICU message that goes over several lines, and stays as it is */
    const char *given; /* [given_length] the target, NULL: there is none, or it is in `data` (text_options.pairs) */
    size_t given_length;
} text_line;

typedef struct text_reader {
    int fd;
    const volatile sig_atomic_t *stop; /* may be NULL */
    text_bytes buffer;                 /* bytes read and not handed out: buffer.data[begin .. length) */
    size_t begin, searched;            /* no line break before `searched` */
    uint64_t lines;
    int at_end, skipping; /* skipping: inside the rest of a line that is too long */
} text_reader;

/* The descriptor stays the caller's. */
void text_reader_init(text_reader *reader, int fd, const volatile sig_atomic_t *stop);
/* Lines of a text, which is copied, in place of those of a descriptor; 0: no memory. */
int text_reader_take(text_reader *reader, const char *text);
/* The next line. `wait` 0 never blocks. A last line without a line break counts; a byte order mark at the very
 * beginning does not. Lines may hold NUL bytes. */
text_read text_reader_next(text_reader *reader, int wait, text_line *line);
/* How many bytes of a line come before the first trouble: a NUL byte, what is no UTF-8, or that it is too long. `why`
 * [size] says which, and is empty where there is none. */
size_t text_line_usable(const text_line *line, char *why, size_t size);
void text_reader_free(text_reader *reader);

/* ---- 5. Jobs ------------------------------------------------------------------------------------------- */

typedef struct text_options {
    const char *option;             /* what messages write before an option's name; NULL: "--" */
    int ids;                        /* lines are token ids                                                */
    int pretokenized;               /* lines are pieces of the model's vocabulary                         */
    const char *pairs;              /* lines are source TAB target, as this option asks for; NULL: they are not */
    int truncate;                   /* cut what cannot be used whole, and say so, rather than refuse it    */
    const struct text_rules *rules; /* what is kept as it is (protect.h); NULL: nothing */
    int brief;                      /* short texts without a sign at their end are tried in each text_manner */
    int calm;          /* what is written in capitals is encoded as in small letters: few models have learned those */
    size_t max_source; /* tokens, source_extra included: moe_session_params; of a language model its max_target */
    size_t max_target; /* tokens, end included                                                */
} text_options;

typedef struct text_job {
    struct text_job *next;  /* the queue's */
    struct text_job *again; /* the stream's */
    uint64_t line;
    text_bytes source, target; /* as read, cut if so */
    text_ids source_ids, target_ids;
    int blank;                /* nothing to translate: the output is empty, or the white space where it is kept */
    int shouted;              /* it was in capitals, so should its translation be */
    struct text_guard *guard; /* what is kept of it (protect.h); NULL: nothing ever was */
    text_ids aside_ids;       /* words that are asked for by themselves (text_guard_aside); length 0: none are */
    size_t asides;            /* how many were */
    int cut;                  /* `note` says what was cut */
    int attempt;              /* 1: the second, as stand-ins of the first did not come through */
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
    text_bytes gap;    /* white space, and a comma, between it and the next part of the line */
    int failed;        /* `note` says why there is no output */
    moe_status status; /* why it failed */
    char note[256];
    text_bytes output; /* the caller's, without line break */
    int finished;      /* the caller sets it when `output` is final */
    int more;          /* the caller's: its line goes on with the next job */
    void *extra;       /* the caller's; NULL in a new job           */
} text_job;

/* Fill source, target and ids from a line; sets blank, cut and note. A line that cannot be used is `failed`, never a
 * status: what is returned is MOE_OK or MOE_ERROR_MEMORY. */
moe_status text_job_prepare(const text_front *front, const text_options *options, const text_line *line, text_job *job,
                            moe_error *error);

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
/* The bytes of a part without the comma or semicolon at its end, which stays between the parts: models lose it. */
size_t text_before_mark(const char *data, size_t length);
void text_job_keep(text_job *job); /* its translation is the source, with a note */
/* What the model wrote for a job, appended to *out in the form of its line: text in the capitals of the line and with
 * what is kept of it, pieces or ids. */
moe_status text_job_write(const text_front *front, const text_options *options, const text_job *job,
                          const moe_hypothesis *h, text_bytes *out, moe_error *error);
void text_job_clear(text_job *job); /* blank again, with the memory that it has */
void text_job_free(text_job *job);  /* what it holds, not the job */

/* Lines out, in order. All zero is empty. Jobs are used again: a long run allocates for its widest moment only. */
typedef struct text_queue {
    text_job *first, *last, *spare;
} text_queue;

text_job *text_queue_add(text_queue *queue);                      /* at the end, blank; NULL if memory ran out */
text_job *text_queue_insert(text_queue *queue, text_job *before); /* the same, behind one that is there */
text_job *text_queue_first(text_queue *queue);                    /* the first if it is finished, else NULL    */
void text_queue_remove(text_queue *queue);                        /* the first                                 */
void text_queue_free(text_queue *queue);

/* ---- 6. Samples ---------------------------------------------------------------------------------------- */

typedef struct text_pair {
    uint64_t line;
    int32_t tag;             /* of the target language; -1 where the model knows no languages */
    text_ids source, target; /* a language model's text is a target */
    int has_target;
} text_pair;

typedef struct text_sample { /* all zero is empty */
    text_pair *pairs;
    size_t count, capacity;
} text_sample;

/* Read all of a file. Lines are source language TAB target language TAB source TAB target for a translation model (what
 * language the source has is not looked at), text for a language model, whose blank lines are passed over.
 * `targets_wanted` 0: the last field may be missing or empty. Of the options ids and pretokenized count. An error's
 * `where` says which line it was. */
moe_status text_sample_read(const text_front *front, const text_options *options, const char *path, int targets_wanted,
                            text_sample *sample, moe_error *error);
void text_sample_free(text_sample *sample);

#endif /* TEXT_H */
