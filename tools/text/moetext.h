/* moetext.h - translate text: the engine of moe.h and the tokeniser inside a model file behind one C interface.
 *
 * Build:   cc app.c $(pkg-config --cflags --libs moetext)
 *
 * libmoetext holds all of libmoe: link one of them. moe.h has what is said there once: moe_status, moe_error, the
 * answers of a pull function, "the same bytes everywhere".
 *
 * Objects and lifetimes
 *   moetext_model   a model file and its tokeniser. It never changes after it was opened. Any number of threads and
 *                   translators share it. Close it after its last translator was freed.
 *   moetext         a translator: the settings, threads and memory of a session. One thread at a time may use it; only
 *                   moetext_cancel may be called from anywhere. Separate translators are independent of each other.
 *   Text is UTF-8 without NUL bytes, given with its length. It may have several lines and any length.
 *
 * Processes
 *   There is no global state. A child of fork() may use the models of its parent, whose memory it shares, and makes
 *   translators of its own: those of its parent have threads that it does not have, so it must not even free them.
 *
 * Errors
 *   Every function that can fail returns a moe_status and fills the caller's moe_error, which may be NULL. Outputs are
 *   untouched on failure unless stated otherwise. A text that cannot be translated has a status of its own in its
 *   result and does not disturb the others. The library never aborts, exits, prints or leaks.
 *
 * The smallest program:
 *
 *     int main(void) {
 *         const char *const texts[] = { "Good morning!", "Where is my book?" };
 *         moe_error e; moetext_model *m; moetext *t; moetext_rows rows;
 *         if (moetext_model_open("model.bin", NULL, &m, &e) || moetext_new(m, "target=de", &t, &e) ||
 *             moetext_translate_strings(t, texts, 2, NULL, NULL, &rows, &e))
 *             return fprintf(stderr, "%s\n", e.message), 1;
 *         for (size_t i = 0; i < rows.n; i++) puts(rows.strings[i]);
 *         moetext_free(t); moetext_model_close(m);
 *     }
 */
#ifndef MOETEXT_H
#define MOETEXT_H

#include "moe.h"

#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version and options ------------------------------------------------------------------------------- */

const char *moetext_version(void);           /* of this library: MOE_VERSION when it was built */
const char *moetext_tokeniser_version(void); /* of SentencePiece: "0.1.97", or "unknown" */

/* Options are given by name in one string: "target=de;beam=4;threads=2". Spaces around names and values do not count,
 * nor do empty parts, and '_' is as good as '-'. The names are those of moe-translate's options. The same string may be
 * given to moetext_model_open and to moetext_new: each checks all of it and takes what is its own. An unknown name, a
 * bad value or a name given twice is MOE_ERROR_ARGUMENT, with the option's name in moe_error.where. */
typedef struct moetext_option_info {
    const char *name;   /* "beam"; NULL behind the last option */
    const char *values; /* what it can be: "1 to 64", "text, pieces or ids" */
    const char *help;   /* one line: what it does, and its default */
    int of_model;       /* 1: moetext_model_open takes it, 0: moetext_new does */
} moetext_option_info;

moetext_option_info moetext_option(size_t i); /* number `i`, from 0; all zero if out of range */

/* ---- Model --------------------------------------------------------------------------------------------- */

typedef struct moetext_model moetext_model;

/* The path of the model that is used where none is named, into path[size]: $MOE_MODEL; else the one that was installed
 * with this library or program; else that in the folder models beside it, as in the repository; else one that was
 * installed where programs are found ($PATH, /usr/local, /usr). MOE_ERROR_IO: there is none; MOE_ERROR_ARGUMENT: `size`
 * is too small. */
moe_status moetext_default_model(char *path, size_t size, moe_error *error);

/* Open a translation model. `path` NULL: moetext_default_model. `options` NULL: none. Errors: those of moe_model_open;
 * MOE_ERROR_ARGUMENT (options); MOE_ERROR_UNSUPPORTED (a model of another kind, or without a tokeniser, unless the
 * options say form=ids or form=pieces). */
moe_status moetext_model_open(const char *path, const char *options, moetext_model **out, moe_error *error);
void moetext_model_close(moetext_model *model); /* NULL is fine */

/* What moe.h knows of the model: metadata, layers, sizes. It lives as long as the model. */
const moe_model *moetext_model_engine(const moetext_model *model);

/* The text of a metadata key, such as general.name, general.description, general.licence, general.attribution; ended by
 * a NUL, and lives as long as the model. Of a list, and where there is no such key: "". */
const char *moetext_model_meta(const moetext_model *model, const char *key);

/* The codes of the languages that the model knows, as it writes them: "de", "deu_Latn". */
size_t moetext_model_language_count(const moetext_model *model);
const char *moetext_model_language(const moetext_model *model, size_t i); /* NULL if out of range */
/* The number of a language. Its code may be written as others do: "DE", "de_DE", "deu" and "deu_Latn" find "de". -1:
 * the model does not know it. */
ptrdiff_t moetext_model_language_find(const moetext_model *model, const char *code);
/* 1 if every text needs a source language too (NLLB-200, M2M-100). */
int moetext_model_needs_source(const moetext_model *model);

/* The piece that a token id stands for, and its length: no NUL ends it. It lives as long as the model. "" where there
 * is none. */
const char *moetext_model_piece(const moetext_model *model, int32_t id, size_t *length);
/* The same of an id of a source, where those have pieces of their own (some models of OPUS-MT). */
const char *moetext_model_source_piece(const moetext_model *model, int32_t id, size_t *length);

/* The ids that the tokeniser cuts a text into, as that of a source, or with `as_target` of a translation; none that
 * begins or ends it is added. With form=pieces or ids they are read. The first `capacity` are written to `ids`, and
 * *count is how many there are. Errors: MOE_ERROR_ARGUMENT (no UTF-8, a NUL in it), MOE_ERROR_MEMORY. */
moe_status moetext_model_encode(const moetext_model *model, const char *text, size_t length, int as_target,
                                int32_t *ids, size_t capacity, size_t *count, moe_error *error);
/* The other way: the text that ids of a translation stand for, as form asks for. The first `capacity` bytes are written
 * to `text`, and *length is how many there are; no NUL ends them. Errors: MOE_ERROR_ARGUMENT (an id that the model does
 * not have), MOE_ERROR_MEMORY. */
moe_status moetext_model_decode(const moetext_model *model, const int32_t *ids, size_t count, char *text,
                                size_t capacity, size_t *length, moe_error *error);

/* ---- Language of a text -------------------------------------------------------------------------------- */

typedef struct moetext_detector moetext_detector; /* one thread at a time may use it */

/* Tells the languages of a model apart. It needs the model no longer. Errors: MOE_ERROR_UNSUPPORTED (it knows none of
 * them, or its data files are not installed), MOE_ERROR_IO, MOE_ERROR_MEMORY. */
moe_status moetext_detector_new(const moetext_model *model, moetext_detector **out, moe_error *error);
void moetext_detector_free(moetext_detector *detector); /* NULL is fine */

/* The number of the language that `text` is in, -1 if it has no letters. `confidences`, NULL or as many as the model
 * has languages: by words the probability of each; by fingerprints 0, but of the likeliest how far the next one is
 * behind, from 0 to 1. Not more than the first 1000 bytes are looked at. */
ptrdiff_t moetext_detect(moetext_detector *detector, const char *text, size_t length, float *confidences);

/* ---- Translator ---------------------------------------------------------------------------------------- */

typedef struct moetext moetext;

/* Make a translator. `options` NULL: the model's defaults. Errors: those of moe_session_new; MOE_ERROR_ARGUMENT. */
moe_status moetext_new(const moetext_model *model, const char *options, moetext **out, moe_error *error);
void moetext_free(moetext *translator); /* NULL is fine */

/* Stop from another thread or from a signal handler: it only sets a flag. The call that is running returns
 * MOE_ERROR_CANCELLED after the decoder step at hand, and drops the texts under way. Where none is running, the next
 * one does so; moetext_forgive takes that back. The translator can be used again. */
void moetext_cancel(moetext *translator);
void moetext_forgive(moetext *translator); /* of its user's thread, between two calls */

/* So far; without alignments. */
void moetext_stats_sized(const moetext *translator, moe_stats *out, size_t size);
static inline moe_stats moetext_stats(const moetext *translator) {
    moe_stats stats;
    moetext_stats_sized(translator, &stats, sizeof stats);
    return stats;
}
/* Parts of texts that were taken and are not decoded yet: for pull functions that keep room for who comes next. */
size_t moetext_under_way(const moetext *translator);

/* ---- Glossaries ---------------------------------------------------------------------------------------- */

/* Terms for some of the texts of a translator; its option `glossary` is for all. Never changes. */
typedef struct moetext_glossary moetext_glossary;

/* `n` terms, each ended by a NUL: sources[i] must become translations[i], and stays as it is where both are the same.
 * Any thread may make one, whatever the translator is doing, which must outlive it. Errors: MOE_ERROR_ARGUMENT (`where`
 * says which term), MOE_ERROR_MEMORY; MOE_ERROR_UNSUPPORTED (the translator keeps nothing: option protect=0, ids or
 * pieces). */
moe_status moetext_glossary_new(const moetext *translator, const char *const *sources, const char *const *translations,
                                size_t n, moetext_glossary **out, moe_error *error);
void moetext_glossary_free(moetext_glossary *glossary); /* NULL is fine */

/* ---- Streaming ----------------------------------------------------------------------------------------- */

typedef enum moetext_task {
    MOETEXT_TRANSLATE = 0, /* `given` is not looked at */
    MOETEXT_PREFIX,        /* the translation begins with `given` */
    MOETEXT_SCORE          /* how probable the translation `given` is; nothing is translated */
} moetext_task;

/* One text to translate. Before the pull function is called, the translator presets every field to 0. All that it
 * points to must stay valid until the pull function is called again, or the call returns; with a `place`, until the
 * result has come. */
typedef struct moetext_request {
    const char *text; /* [length] it need not end in NUL */
    size_t length;
    const char *source, *target; /* codes of languages; NULL: the translator's options. source "auto": find it out */
    moetext_task task;
    const char *given; /* [given_length] */
    size_t given_length;
    const moetext_glossary *glossary; /* of MOETEXT_TRANSLATE, instead of the translator's, and valid until the result
                                         has come; NULL: the translator's */
    void *user;                       /* handed back with the result */

    /* For turns between texts that have many parts (see below). NULL: all parts of this text are taken before the pull
     * function is called again. Otherwise *place is NULL at first, and only the next part is taken: while *place is not
     * NULL then, others are left, and whenever it is this text's turn, the pull function gives the same request once
     * more. Where it answers MOE_PULL_END before, the text is dropped. */
    void **place;

    /* Where something else than 0 stands as soon as nobody wants the result any more; NULL: that will not be. What is
     * under way of the text is dropped before the decoder's next step then, and the rest when it is given once more:
     * its status is MOE_ERROR_CANCELLED. Another thread may write it, as an atomic. */
    const int *dropped;
} moetext_request;

/* Bytes of the source that belong to bytes of the translation: a word of each, the space between them left out. A word
 * can have several links or none. */
typedef struct moetext_link {
    size_t source_begin, source_end; /* in moetext_request.text */
    size_t target_begin, target_end; /* in moetext_hypothesis.text */
} moetext_link;

typedef struct moetext_hypothesis {
    const char *text; /* [length], and a NUL behind it */
    size_t length;
    float score;   /* what hypotheses are ordered by, as in moe_hypothesis */
    float logprob; /* the sum of token_logprobs */
    float reverse; /* log-probability of the source given this translation where it was reranked, else 0 */
    int finished;  /* 0: cut at the length limit */
    size_t n_ids;
    const int32_t *ids; /* [n_ids] tokens without the end */
    size_t n_logprobs;
    const float *token_logprobs; /* [n_logprobs] natural logarithms; the end of every sentence counts as a token */
    size_t n_links;
    const moetext_link *links; /* [n_links] with the option alignment=1, by source_begin; none where markup is kept */
    const size_t *part_ends;   /* [n_parts] of the result: where the tokens of each part end in `ids` */
} moetext_hypothesis;

/* What happened to a text. */
enum {
    MOETEXT_SPLIT = 1,      /* it was translated in parts: see below                                       */
    MOETEXT_CUT = 2,        /* the best translation was cut at the length limit                            */
    MOETEXT_TRUNCATED = 4,  /* only the beginning of the text was used (option truncate)                   */
    MOETEXT_INCOMPLETE = 8, /* status is not MOE_OK, and the hypotheses lack the parts that could not be   */
    MOETEXT_BLANK = 16      /* there was nothing to translate: one hypothesis, the white space        */
};

/* A text of several lines, or with a line longer than the option `split` allows, is translated in parts: line by line,
 * and such a line sentence by sentence. Line breaks and white space stay as they are. A sentence of more tokens than
 * the model reads goes in parts as well, and the message says so; what has no words in it, such as base64, stays. Of
 * such a text ids and logarithms are those of all parts in a row, and scores are sums. */
typedef struct moetext_result {
    void *user;          /* of the request */
    moe_status status;   /* MOE_OK, or why the text, or a part of it, is not translated */
    const char *message; /* one line that says more; "" where there is nothing to say */
    unsigned flags;      /* MOETEXT_SPLIT | ... */
    size_t n_parts;
    size_t n_source_ids;
    const int32_t *source_ids;            /* [n_source_ids] tokens of the text */
    const size_t *part_ends;              /* [n_parts] where the tokens of each part end in source_ids */
    size_t n_hypotheses;                  /* at most the option nbest, best first; 0 where nothing was translated */
    const moetext_hypothesis *hypotheses; /* valid during the call only, with all that they point to */
} moetext_result;

/* Gives the next text: MOE_PULL_REQUEST, MOE_PULL_END, MOE_PULL_LATER or MOE_PULL_CANCEL (stop and drop all work). With
 * `wait` 0 others are under way: answer MOE_PULL_LATER rather than block. */
typedef int (*moetext_pull_fn)(void *user, int wait, moetext_request *request);

/* Takes a result as soon as it is final. Texts finish in another order than they were pulled in: user tells them apart.
 */
typedef void (*moetext_done_fn)(void *user, const moetext_result *result);

/* Pull texts until MOE_PULL_END and hand over their results. Texts are decoded together, and a new one joins as soon as
 * there is room; what shares its batch changes no byte of a result. Both functions are called in the caller's thread.
 * Where memory runs out for a text, MOE_ERROR_MEMORY is its status, and the others go on. Statuses as with
 * moe_translate. */
moe_status moetext_translate(moetext *translator, moetext_pull_fn pull, moetext_done_fn done, void *user,
                             moe_error *error);

/* ---- Many texts at once -------------------------------------------------------------------------------- */

/* The best translation of every text, in order. Valid until the translator's next call. The layout is Arrow's
 * (LargeString): row i is bytes[offsets[i]] to bytes[offsets[i + 1]]. */
typedef struct moetext_rows {
    size_t n;
    const char *bytes;
    const int64_t *offsets;      /* [n + 1] */
    const uint8_t *statuses;     /* [n] moe_status of each; a row that failed is empty, or lacks parts */
    const char *const *messages; /* [n] "" where there is nothing to say */
    const float *scores;         /* [n] of the best hypothesis; 0 where there is none */
    const char *const *strings;  /* [n] the rows once more, each ended by a NUL; NULL after moetext_translate_rows */
} moetext_rows;

/* Translate `n` texts that lie one behind the other: text i is bytes[offsets[i]] to bytes[offsets[i + 1]]. `source` and
 * `target` are codes of languages for all of them; NULL: the translator's options. Where `valid` is not NULL, a text
 * whose bit i (least significant first, as in Arrow) is 0 is passed over: its row is empty, its status MOE_OK. After
 * MOE_ERROR_CANCELLED *out has what is finished, and the other rows have that status. Errors: those of
 * moetext_translate; MOE_ERROR_ARGUMENT (offsets that fall, an unknown language). */
moe_status moetext_translate_rows(moetext *translator, const char *bytes, const int64_t *offsets, size_t n,
                                  const uint8_t *valid, const char *source, const char *target, moetext_rows *out,
                                  moe_error *error);

/* The same with `n` strings that end in NUL. */
moe_status moetext_translate_strings(moetext *translator, const char *const *texts, size_t n, const char *source,
                                     const char *target, moetext_rows *out, moe_error *error);

#ifdef __cplusplus
}
#endif
#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#endif /* MOETEXT_H */
