/* moetext.h - translate text: the engine of moe.h with the tokeniser of a model file.
 *
 * Build:   cc app.c $(pkg-config --cflags --libs moetext)
 *
 * libmoetext contains libmoe, so link only one of the two. moe.h describes moe_status, moe_error, the return values of
 * a pull function, and the promise that all machines give the same bytes.
 *
 * Objects and lifetimes
 *   moetext_model   a model file and its tokeniser. It never changes after it is opened. Any number of threads and
 *                   translators can share it. It may be closed while translators use it; the last translator frees it.
 *   moetext         a translator: the settings, threads and memory of a session. One thread at a time may use it: a
 *                   call that translates while another one runs returns MOE_ERROR_ARGUMENT and changes nothing. Only
 *                   moetext_cancel may be called from any thread. Separate translators are independent of each other.
 *   Text is UTF-8 without NUL bytes, given with its length. It may have several lines and any length.
 *
 * Processes
 *   The library has no global state. A child of fork() shares its parent's models, but must make its own translators.
 *   It must not use or free its parent's translators, because their threads do not exist in the child.
 *
 * Errors
 *   Every function that can fail returns a moe_status and fills the caller's moe_error, which may be NULL. Outputs are
 *   untouched on failure unless stated otherwise. A text that cannot be translated has its own status in its result and
 *   does not affect other texts. The library never aborts, exits, prints or leaks.
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

const char *moetext_version(void);           /* MOE_VERSION when this library was built */
const char *moetext_tokeniser_version(void); /* version of SentencePiece: "0.1.97", or "unknown" */

/* Options are given by name in one string: "target=de;beam=4;threads=2". Empty parts and spaces around names and
 * values are ignored, and '_' is equivalent to '-'. The names are those of moe-translate's options. The same string
 * may be given to moetext_model_open and to moetext_new: each checks the whole string and uses its own options.
 * Unknown, invalid and repeated options are MOE_ERROR_ARGUMENT, with the option's name in moe_error.where. */
typedef struct moetext_option_info {
    const char *name;   /* such as "beam"; NULL after the last option */
    const char *values; /* allowed values, such as "1 to 64" or "text, pieces or ids" */
    const char *help;   /* effect and default, in one line */
    int of_model;       /* 1 for an option of moetext_model_open, 0 for one of moetext_new */
} moetext_option_info;

moetext_option_info moetext_option(size_t i); /* option `i`; all zero if out of range */

/* ---- Model --------------------------------------------------------------------------------------------- */

typedef struct moetext_model moetext_model;

/* Write the path of the default model to path[size]. It is the first of $MOE_MODEL, the model that was installed with
 * this library or program, the model in a folder `models` next to it (as in the repository), and a model installed
 * under the prefix of a folder in $PATH, /usr/local or /usr. Errors: MOE_ERROR_IO (no model found), MOE_ERROR_ARGUMENT
 * (`size` is too small). */
moe_status moetext_default_model(char *path, size_t size, moe_error *error);

/* A translation model on this machine. */
typedef struct moetext_local {
    const char *name;   /* such as "firefox/en-pt" */
    const char *path;   /* of the model file */
    const char *ways;   /* directions, such as "en to pt" */
    uint64_t bytes;     /* size of the file */
    double comet, bleu; /* published scores; negative if unknown */
    int shipped;        /* 1 for the model that is installed with moe, 0 for one that moe-get has fetched */
} moetext_local;

/* The models on this machine, and those that were chosen for a direction. */
typedef struct moetext_choice {
    const moetext_local *const *local; /* [n_local] fetched models, the best first, then the shipped one */
    size_t n_local;
    const char *const *paths; /* [n_paths] model files, for moetext_model_open or moetext_models_open */
    size_t n_paths;
    const char *name; /* names of the chosen models: "firefox/de-en + firefox/en-pt" */
    int named;        /* 1 if MOE_MODEL has named the model */
} moetext_choice;

/* Choose the models that translate between two languages: MOE_MODEL, or else fetched models, or else the shipped one.
 * Among fetched models, one model is preferred to two with a language between them, then the better COMET, or BLEU (if
 * both have it), then the smaller file. `source` may be NULL if the fetched models for the target have one source, and
 * "auto" chooses all models. Without a target, only MOE_MODEL and the shipped model are considered if there is one.
 * Errors: MOE_ERROR_ARGUMENT (no model, or several sources; the message names the command or option that helps),
 * MOE_ERROR_IO (no target and no model), MOE_ERROR_MEMORY. */
moe_status moetext_choose(const char *source, const char *target, moetext_choice **out, moe_error *error);
void moetext_choice_free(moetext_choice *choice); /* may be NULL */

/* Open a translation model, or a language model with the option kind=language. If `path` is NULL, moetext_choose
 * chooses the model for the options source and target, and may choose several. `options` may be NULL. Errors: those of
 * moe_model_open; MOE_ERROR_ARGUMENT (options); MOE_ERROR_UNSUPPORTED (a model of another kind, or without a tokeniser,
 * which only form=ids and form=pieces allow).
 */
moe_status moetext_model_open(const char *path, const char *options, moetext_model **out, moe_error *error);
/* Open a model from a file, part of a file, memory or a callback: moe_source in moe.h describes these sources. Error
 * messages begin with the source's name. With the option copy=1, its bytes need no alignment and are not used after the
 * call. */
moe_status moetext_model_open_source_sized(const moe_source *source, size_t size, const char *options,
                                           moetext_model **out, moe_error *error);
static inline moe_status moetext_model_open_source(const moe_source *source, const char *options, moetext_model **out,
                                                   moe_error *error) {
    return moetext_model_open_source_sized(source, sizeof *source, options, out, error);
}
void moetext_model_close(moetext_model *model); /* may be NULL; translators remain usable */

/* Open several models as one. `paths` are model files, or folders, from which all translation models with names ending
 * in .bin are used. A text is translated by the first file that has its pair of languages, or else by two files with a
 * language between them, English if possible, like two translators connected by a pipe. The languages of a file are the
 * lists languages.sources and languages.targets in its metadata, else its languages in all pairs, else those in its
 * name: opus-mt-en-de.bin.
 *
 * A translator opens a file when a text first needs it. With the option models-memory it closes the least recently used
 * files. A text must have a source language if several languages can be translated into its target. A text that is
 * already in its target language is copied.
 *
 * If a text needs two models, both protect markup, placeholders and terms of a glossary; word links are composed; the
 * first model gets the context, the second model gets `given`; MOETEXT_SCORE is refused. Scores, ids and n-best lists
 * are those of the second model, which translates moetext_result.between; messages, notes and flags are those of both
 * models. alignment=1 applies to the models that support it. With force or another form than text, all texts have the
 * languages of the options: the first model reads ids or pieces, and the second model writes ids or pieces. Routing is
 * not supported.
 *
 * `options` are those of moetext_model_open. Errors: those of moetext_model_open, with the path in the message and its
 * end in `where`; MOE_ERROR_ARGUMENT (a folder without models, a file without languages). */
moe_status moetext_models_open(const char *const *paths, size_t n, const char *options, moetext_model **out,
                               moe_error *error);
/* Return the number of models needed to translate from one language to another, 1 or 2; 0 if no models can. For a
 * single model, return 1, or 0 if the lists of languages in its file (languages.sources, .targets) lack one of them. */
int moetext_model_hops(const moetext_model *model, size_t source, size_t target);

/* Return the moe_model for the functions of moe.h (metadata, layers, sizes), valid as long as the model; NULL for
 * several. */
const moe_model *moetext_model_engine(const moetext_model *model);

/* Return the text of a metadata key, such as general.name, general.description, general.licence, general.attribution.
 * It is NUL-terminated and valid as long as the model. Return "" for several models, for missing keys and for lists. */
const char *moetext_model_meta(const moetext_model *model, const char *key);

/* Return the number of languages, and a language's code as the model file spells it: "de", "deu_Latn". */
size_t moetext_model_language_count(const moetext_model *model);
const char *moetext_model_language(const moetext_model *model, size_t i); /* NULL if out of range */
/* Return the index of a language, or -1. Other spellings match too: "DE", "de_DE", "deu" and "deu_Latn" for "de". */
ptrdiff_t moetext_model_language_find(const moetext_model *model, const char *code);
/* Return 1 if every text needs a source language (NLLB-200, M2M-100, several models, prompts that name it). */
int moetext_model_needs_source(const moetext_model *model);

/* Return the piece of a token id, which is not NUL-terminated, and its length. It is valid as long as the model; "" if
 * unknown. */
const char *moetext_model_piece(const moetext_model *model, int32_t id, size_t *length);
/* Return the piece of a source id, for models with separate pieces for sources (some OPUS-MT models). */
const char *moetext_model_source_piece(const moetext_model *model, int32_t id, size_t *length);

/* Convert a source, or a translation if `as_target` is 1, to token ids without begin and end tokens. With form=pieces
 * or form=ids, parse the text as pieces or ids. Write the first `capacity` ids to `ids` and their total number to
 * *count. Errors: MOE_ERROR_ARGUMENT (not UTF-8, or with a NUL), MOE_ERROR_MEMORY. */
moe_status moetext_model_encode(const moetext_model *model, const char *text, size_t length, int as_target,
                                int32_t *ids, size_t capacity, size_t *count, moe_error *error);
/* Convert the token ids of a translation to text, pieces or ids, depending on the option `form`. Write the first
 * `capacity` bytes to `text`, without a final NUL, and their total number to *length. Errors: MOE_ERROR_ARGUMENT (an id
 * that the model does not have), MOE_ERROR_MEMORY, MOE_ERROR_UNSUPPORTED (several models; also for
 * moetext_model_encode). */
moe_status moetext_model_decode(const moetext_model *model, const int32_t *ids, size_t count, char *text,
                                size_t capacity, size_t *length, moe_error *error);

/* A conversation with a decoder-only model, formatted by its chat template. */
typedef enum moetext_role { MOETEXT_SYSTEM, MOETEXT_USER, MOETEXT_ASSISTANT } moetext_role;
typedef struct moetext_message {
    moetext_role role;
    const char *text; /* [length] never encoded as special tokens */
    size_t length;
} moetext_message;

/* Build the prompt for an answer to messages: an optional system message, then alternating messages of the user and
 * the assistant, of which the first and the last are the user's. Write the first `capacity` ids to `ids` and their
 * total number to *count. If the template has no place for a system message, its text and a blank line precede the
 * user's first message. Errors: MOE_ERROR_ARGUMENT (messages in another order, or not UTF-8), MOE_ERROR_UNSUPPORTED
 * (the model does not answer messages, or only a single one), MOE_ERROR_MEMORY. */
moe_status moetext_model_prompt(const moetext_model *model, const moetext_message *messages, size_t n, int32_t *ids,
                                size_t capacity, size_t *count, moe_error *error);

/* ---- Language of a text -------------------------------------------------------------------------------- */

typedef struct moetext_detector moetext_detector; /* one thread at a time may use it */

/* Make a detector for a model's languages. The model may be closed afterwards. Errors: MOE_ERROR_UNSUPPORTED (no
 * language is supported, or the data files are not installed), MOE_ERROR_IO, MOE_ERROR_MEMORY. */
moe_status moetext_detector_new(const moetext_model *model, moetext_detector **out, moe_error *error);
void moetext_detector_free(moetext_detector *detector); /* may be NULL */

/* Return the index of the language of `text`, -1 if it has no letters, or -2 if out of memory. Only the first 1000
 * bytes are used. `confidences` (may be NULL) has an element per language of the model. If all languages have word
 * lists, they are probabilities; otherwise 0, except for the likeliest language, which gets its distance from the next
 * one (0 to 1). */
ptrdiff_t moetext_detect(moetext_detector *detector, const char *text, size_t length, float *confidences);

/* ---- Translator ---------------------------------------------------------------------------------------- */

typedef struct moetext moetext;

/* Make a translator. `options` may be NULL. Errors: those of moe_session_new; MOE_ERROR_ARGUMENT. */
moe_status moetext_new(const moetext_model *model, const char *options, moetext **out, moe_error *error);
void moetext_free(moetext *translator); /* may be NULL */

/* Stop a translator from another thread or a signal handler. This only sets a flag: the running call, or else the next
 * one, returns MOE_ERROR_CANCELLED after the current decoder step and drops the texts in progress. moetext_uncancel
 * clears the flag. The translator can be used again. */
void moetext_cancel(moetext *translator);
void moetext_uncancel(moetext *translator); /* call it in the thread that uses the translator, between two calls */

/* Return statistics since the translator was made. Word alignment is not included. */
void moetext_stats_sized(const moetext *translator, moe_stats *out, size_t size);
static inline moe_stats moetext_stats(const moetext *translator) {
    moe_stats stats;
    moetext_stats_sized(translator, &stats, sizeof stats);
    return stats;
}
/* Save the computed prompts to the file of the option prompt-cache. moetext_new loads them, so the first texts of a new
 * translator are faster. Does nothing without the option, or if no text has been translated since the last call. In a
 * folder, each model has its own file; several models require a folder. moetext_new ignores a damaged file, or one of
 * another model, version or setting; this function replaces it. Errors: those of moe_session_save_prompts. */
moe_status moetext_save_prompts(moetext *translator, moe_error *error);
/* Return 1 if all texts may have a context. This requires a single prompted model whose prompt has a place for context.
 * With several models, the first model of each text decides. */
int moetext_takes_context(const moetext *translator);
/* Return the number of pulled parts not decoded yet. Pull functions can use it to reserve capacity for later texts. */
size_t moetext_under_way(const moetext *translator);

/* ---- Glossaries ---------------------------------------------------------------------------------------- */

/* Terms for individual texts of a translator. (The option `glossary` applies to all texts.) Immutable. */
typedef struct moetext_glossary moetext_glossary;

/* Make a glossary of `n` NUL-terminated terms: sources[i] becomes translations[i]. Any thread may call this, even while
 * the translator runs. The translator must outlive the glossary. Errors: MOE_ERROR_ARGUMENT (`where` names the term),
 * MOE_ERROR_MEMORY, MOE_ERROR_UNSUPPORTED (with protect=0, form=ids or form=pieces). */
moe_status moetext_glossary_new(const moetext *translator, const char *const *sources, const char *const *translations,
                                size_t n, moetext_glossary **out, moe_error *error);
void moetext_glossary_free(moetext_glossary *glossary); /* may be NULL */

/* A term of the option `glossary`, with the number of its occurrences in the texts translated so far, and of those that
 * the translations contain as a separate word in place of the model's own word. */
typedef struct moetext_term {
    const char *source, *target; /* NULL if out of range; valid as long as the translator */
    uint64_t asked, kept;
} moetext_term;
/* Return term `i`. With several models, only those opened so far provide terms. */
moetext_term moetext_term_at(const moetext *translator, size_t i);
/* Return the first line of the glossary if it was ignored because it names the columns, such as "English, Deutsch",
 * else "". */
const char *moetext_glossary_heading(const moetext *translator);

/* ---- Translation memories ------------------------------------------------------------------------------ */

/* Texts with their translations, by a person or confirmed by one. Any number of threads may use a memory, and one can
 * add to it while translators use it. A text that equals a source (apart from white space at its ends) gets the
 * translation as it is; so do a line and a sentence of a text. If a text differs from the most similar source only in
 * protected spans (numbers, placeholders, markup, addresses), its final mark, the case of its first letter or white
 * space, the translation is adapted. Any other text that is at least 0.7 similar (1 - word edit distance / words of the
 * longer text) is translated by the model. A prompted model receives the pair as an example. Other models repair the
 * pair's translation: they replace the words that the difference affects and keep the others. With a glossary, or if at
 * least half of the words would change, they instead add 4 times (option memory) a hypothesis's similarity to the
 * pair's translation to its score, among the hypotheses of the beam, or those that the option nbest requests.
 * The result of a text depends only on the text and on the pairs when the text is pulled. Languages are compared
 * loosely (de, de-AT, deu_Latn), and unknown ones match all. */
typedef struct moetext_memory moetext_memory;

/* Make a memory of a TMX, XLIFF, PO or TSV file (source TAB translation), or an empty one if `path` is NULL. Of equal
 * sources the last one counts. Translations that are marked as unfinished (fuzzy in PO) are ignored. Errors:
 * MOE_ERROR_IO, MOE_ERROR_ARGUMENT (the message names path and line), MOE_ERROR_MEMORY. */
moe_status moetext_memory_new(const char *path, moetext_memory **out, moe_error *error);
void moetext_memory_free(moetext_memory *memory); /* may be NULL; translators must have returned the texts' results */

/* Add a pair, which counts for every text that is pulled afterwards, and replaces one with the same source and
 * languages. `source_language` and `target_language` may be NULL if unknown. Errors: MOE_ERROR_ARGUMENT (not UTF-8,
 * more than 64 KiB), MOE_ERROR_LIMIT (more than 2^24 pairs), MOE_ERROR_MEMORY. */
moe_status moetext_memory_add(moetext_memory *memory, const char *source_language, const char *target_language,
                              const char *source, size_t source_length, const char *target, size_t target_length,
                              moe_error *error);
size_t moetext_memory_count(const moetext_memory *memory);
const char *moetext_memory_hash(const moetext_memory *memory); /* SHA-256 of the file; "" without a file */
/* Return the memory of the option `memory`, to which pairs can be added; NULL without that option. */
moetext_memory *moetext_memory_of(const moetext *translator);

/* How a part of a text was found in a memory. */
typedef enum moetext_recall { MOETEXT_FUZZY = 1, MOETEXT_REPAIRED, MOETEXT_ADAPTED, MOETEXT_EXACT } moetext_recall;
typedef struct moetext_match {
    size_t part; /* number of the part, from 0 */
    moetext_recall recall;
    float similarity;            /* 0.7 to 1 */
    const char *source, *target; /* the pair; valid as long as the memory */
} moetext_match;

/* A link from a word of the source to a word of the translation. A word can have any number of links. */
typedef struct moetext_link {
    size_t source_begin, source_end; /* byte offsets in moetext_request.text */
    size_t target_begin, target_end; /* byte offsets in moetext_hypothesis.text */
} moetext_link;

/* ---- HTML ---------------------------------------------------------------------------------------------- */

/* Translate the text of a page and the attributes that readers see, and copy every other byte:
 *
 *     moetext_html_new(page, length, &options, &html, &error);
 *     for each segment i: translate moetext_html_source(html, i), and moetext_html_place the translation
 *     moetext_html_write(html, translation_of, user, &length);
 *
 * A segment is the text between two block tags, without the markup and the white space at its ends. A link without
 * words around it is a separate segment. Code, names and formulas are not translated; the source has a mark such as {1}
 * in their place. Every tag is written exactly once, and tags are well nested. */
typedef struct moetext_html moetext_html; /* one thread at a time may use it */

typedef enum moetext_html_tags {
    MOETEXT_TAGS_SPLIT = 0, /* split sentences at tags: each text between two tags is a segment */
    MOETEXT_TAGS_LINKED,    /* the source has no tags; tags are placed by word links (option alignment=1) */
    MOETEXT_TAGS_MARKED     /* the source has marks <x1>...</x1> and <x2/>, which the translation must contain */
} moetext_html_tags;

typedef struct moetext_html_options {
    moetext_html_tags tags;
    int xml;                     /* 1 for XML, where element names have no meaning and attributes are not translated */
    const char *source, *target; /* language codes; may be NULL. <html lang=source> becomes lang=target. If `source` is
                                    NULL or "", any language is replaced */
} moetext_html_options;

/* Cut a page into segments. The text, which is UTF-8, and the languages must remain valid until moetext_html_free.
 * Errors: MOE_ERROR_MEMORY. */
moe_status moetext_html_new(const char *text, size_t length, const moetext_html_options *options, moetext_html **out,
                            moe_error *error);
void moetext_html_free(moetext_html *html);          /* may be NULL */
size_t moetext_html_count(const moetext_html *html); /* number of segments */
const char *moetext_html_source(const moetext_html *html, size_t segment, size_t *length);

/* The functions below return *length bytes, which are valid until the next call with this page, or NULL if memory runs
 * out. A segment with its markup can contain the numbers of attribute segments, each between two bytes 0xff;
 * moetext_html_write replaces them. */

/* Insert the markup of a segment into its translation. Return NULL also if the translation lacks a mark or the words
 * between a pair of tags; in this case, translate the pieces. */
const char *moetext_html_place(moetext_html *html, size_t segment, const char *text, size_t length,
                               const moetext_link *links, size_t n_links, size_t *out_length);
/* Return the texts between the tags of a segment, one per line, and build the segment from the lines of their
 * translation. A piece whose line is empty remains untranslated; all do if the number of lines differs. */
const char *moetext_html_pieces(moetext_html *html, size_t segment, size_t *length);
const char *moetext_html_place_pieces(moetext_html *html, size_t segment, const char *text, size_t length,
                                      size_t *out_length);
/* Return the page with the placed segments that `translation` returns. If `translation` is NULL, insert segment numbers
 * between two bytes 0xff instead. */
const char *moetext_html_write(moetext_html *html,
                               const char *(*translation)(void *user, size_t segment, size_t *length), void *user,
                               size_t *length);

/* ---- Streaming ----------------------------------------------------------------------------------------- */

typedef enum moetext_task {
    MOETEXT_TRANSLATE = 0, /* `given` is ignored */
    MOETEXT_PREFIX,        /* the translation begins with `given`; it completes the last word unless a space follows */
    MOETEXT_SCORE, /* compute the probability of the translation `given`. The only task for language models: to score
                      the text itself */
    MOETEXT_ANSWER /* continue the prompt `ids`, and keep line breaks in the output */
} moetext_task;

/* New text of a translation in progress. */
typedef struct moetext_partial {
    void *user;       /* moetext_request.user */
    const char *text; /* [length] final characters, which continue those of earlier calls */
    size_t length;
    const char *after;          /* [after_length] a preview of the following text, which may change */
    size_t after_length, n_ids; /* n_ids is the number of tokens so far */
} moetext_partial;

/* Called after decoder steps, in the thread that called moetext_translate, with its `user`. A part may be translated
 * again before it is final (if markup or names are lost, or the translation is truncated or repeats itself). Tokens are
 * final earlier with MOETEXT_PREFIX and MOETEXT_ANSWER, and with split=0 in texts without protected spans. With a beam,
 * the text has the tokens on which all hypotheses agree. On a GPU, the function is called only for finished parts. */
typedef void (*moetext_partial_fn)(void *user, const moetext_partial *partial);

/* The experts of one token in one mixture. */
typedef struct moetext_routing {
    void *user;                 /* moetext_request.user */
    size_t begin;               /* byte offset of the token's part in the text */
    const moe_routing *routing; /* see moe.h; ignore its `user` */
    int32_t written; /* id of the token that this decoder step wrote; -1 in encoders and prompts, and for language
                        tags and the end token */
} moetext_routing;

/* Called for every token and mixture of the best or scored translation, before its result, in the thread that called
 * moetext_translate, with its `user`. A truncated translation has no end token. The order of texts is undefined. The
 * pointers are valid during the call. */
typedef void (*moetext_routing_fn)(void *user, const moetext_routing *routing);

/* One text to translate. The translator sets every field to 0 before it calls the pull function. All pointers must
 * remain valid until the pull function is called again or moetext_translate returns; with a `place`, until the done
 * function receives the result. */
typedef struct moetext_request {
    const char *text; /* [length]; need not be NUL-terminated */
    size_t length;
    const char *source, *target; /* language codes, or "auto" as source; NULL for the translator's options */
    moetext_task task;
    const char *given; /* [given_length] */
    size_t given_length;
    const moetext_glossary *glossary; /* for MOETEXT_TRANSLATE, valid until the result; NULL for the default */
    void *user;                       /* passed back with the result */

    /* Set `place` to alternate between texts with many parts (see below), with *place initially NULL. Each pull then
     * takes only the next part. While *place is not NULL afterwards, the pull function must return this request again
     * for each remaining part. The text is dropped if the pull function returns MOE_PULL_END before the last part. If
     * `place` is NULL, all parts are taken before the next pull. */
    void **place;

    /* moe_request_drop with this object drops parts in progress before the next decoder step, and other parts when the
     * pull function returns the request again. The status is then MOE_ERROR_CANCELLED. May be NULL; must remain valid
     * until the result. */
    const moe_drop *drop;

    /* [context_length] earlier text in the same language. A prompted model receives it before the earlier lines of the
     * text: of all these lines the last N, the option context, or 16 if the option is 0. If a text needs two models,
     * only the first one receives the context. If that model does not support a context, the status of the text is
     * MOE_ERROR_UNSUPPORTED or MOE_ERROR_ARGUMENT, with a reason in the message. */
    const char *context;
    size_t context_length;

    moetext_partial_fn partial;         /* NULL if no partial results are wanted */
    const int32_t *ids;                 /* [n_ids] the whole prompt of MOETEXT_ANSWER, instead of text and languages */
    size_t n_ids, limit;                /* limit of an answer in tokens; 0 for the translator's limit */
    const moe_session_params *sampling; /* moe_request.sampling of an answer; its repetition_penalty applies too */
    moetext_routing_fn routing;         /* called with the option routing=1; may be NULL, also from a later part on */

    /* [draft_length] a text that the translation may resemble, such as the translation of an older version, with a line
     * for each line of the text. It saves time and changes no byte of the result (moe_request.draft). */
    const char *draft;
    size_t draft_length;
    moetext_memory *memory; /* for MOETEXT_TRANSLATE: searched before the option's; its pairs win. May be NULL; must
                               remain valid until the result */
    moe_next_token_fn next_token; /* for answers to schemas, in moe-server; NULL for others */
    int quick; /* for MOETEXT_TRANSLATE: 1 for the beginning of a sentence, which will be translated again: a beam of 1,
                  and no other attempts if a number or bracket is lost */
} moetext_request;

typedef struct moetext_hypothesis {
    const char *text; /* [length], followed by a NUL */
    size_t length;
    float score;   /* sort key, as in moe_hypothesis */
    float logprob; /* sum of token_logprobs */
    float reverse; /* log-probability of the source given this translation; 0 without reranking */
    int finished;  /* 0 if truncated at the length limit */
    size_t n_ids;
    const int32_t *ids; /* [n_ids] token ids without the end token */
    size_t n_logprobs;
    const float *token_logprobs; /* [n_logprobs] natural logarithms, including those of end tokens */
    size_t n_links;
    const moetext_link *links; /* [n_links] with alignment=1, sorted by source_begin; none in parts with markup */
    const size_t *part_ends;   /* [n_parts of the result] end of each part in `ids` */
    int looped;                /* 1 if truncated where the translation began to repeat itself */
} moetext_hypothesis;

/* A remark on a part of a text, or the reason why the part is not translated. */
typedef struct moetext_note {
    size_t part;         /* number of the part, from 0 */
    moe_status status;   /* MOE_OK for a remark */
    const char *message; /* one line */
} moetext_note;

/* A part of a text: a line, or a sentence of a long line. */
typedef struct moetext_part {
    size_t begin, end;      /* of its best translation, in the text of the best hypothesis */
    size_t logprobs_end;    /* end of the part in token_logprobs of the best hypothesis */
    float logprob, reverse; /* as in moetext_hypothesis */
    int looped;             /* as in moetext_hypothesis */
    unsigned flags;         /* MOETEXT_CUT | MOETEXT_TRUNCATED | MOETEXT_KEPT | MOETEXT_BLANK */
} moetext_part;

/* An occurrence of a glossary's term in a text. */
typedef struct moetext_term_use {
    size_t part; /* number of the part, from 0 */
    const char *source, *target;
    int kept; /* 1 if the translation of the part has it as a separate word */
} moetext_term_use;

/* Flags of a result. */
enum {
    MOETEXT_SPLIT = 1,      /* the text was translated in parts (see below) */
    MOETEXT_CUT = 2,        /* the best translation was truncated at the length limit */
    MOETEXT_TRUNCATED = 4,  /* only the beginning of the text was used (option truncate) */
    MOETEXT_INCOMPLETE = 8, /* status is not MOE_OK; failed parts are missing from the hypotheses */
    MOETEXT_BLANK = 16,     /* the text and its only hypothesis are white space */
    MOETEXT_KEPT = 32       /* a part was left untranslated, because markup, numbers, signs or words were lost */
};

/* The result of one text. Texts are translated line by line, and lines longer than the option `split` sentence by
 * sentence. Line breaks and white space are preserved. A sentence that exceeds the model's limit is also split, with a
 * remark; parts without words, such as base64, are copied. Ids and logarithms of all parts are concatenated, and
 * scores are added. */
typedef struct moetext_result {
    void *user;          /* moetext_request.user */
    moe_status status;   /* MOE_OK, or the reason why the text, or a part of it, is not translated */
    const char *message; /* the first failure, else the first remark, or "" */
    unsigned flags;      /* MOETEXT_SPLIT | ... */
    size_t n_parts;
    size_t n_source_ids;
    const int32_t *source_ids;            /* [n_source_ids] token ids of the text */
    const size_t *part_ends;              /* [n_parts] end of each part in source_ids */
    size_t n_hypotheses;                  /* at most option nbest, best first, with different texts; 0 if nothing was
                                             translated */
    const moetext_hypothesis *hypotheses; /* like all pointers here, valid only during the call */
    const moetext_model *model;           /* model to which the ids belong; NULL if no model translated the text */
    /* With two models, the output of the first, [between_length] and a NUL, and its language. All other members except
     * the links describe the translation of this text by the second model. NULL with one model. */
    const char *between;
    size_t between_length;
    const char *between_language;
    size_t n_notes;
    const moetext_note *notes; /* [n_notes] notes on all parts, from both models */
    const char *model_path;    /* file of `model`; NULL if it has no path of its own */
    const char *between_path;  /* with two models, the file of the first */
    size_t n_matches;
    const moetext_match *matches;                  /* [n_matches] of the parts that were found in a memory */
    const char *source_language, *target_language; /* as requested or detected; NULL or "" if unknown */
    const moetext_part *parts;                     /* [n_parts]; NULL if no model translated the text */
    size_t n_terms;
    const moetext_term_use *terms; /* [n_terms] in the parts that a model translated; none with two models */
} moetext_result;

/* Return the probability, 0 to 1 in thousandths, that the best translation of a result is right: that its chrF against
 * a reference would be at least 60. Return -1 if nothing was translated, if two models translated, or if the model file
 * has no table for it (moe-calibrate --confidence). */
double moetext_confidence(const moetext_result *result);
/* Return the same for one part of the text. */
double moetext_part_confidence(const moetext_result *result, size_t part);

/* Fill *request with the next text, and return MOE_PULL_REQUEST, MOE_PULL_END, MOE_PULL_LATER or MOE_PULL_CANCEL (stop
 * and drop all work). If `wait` is 0, other texts are in progress, so return MOE_PULL_LATER rather than block. */
typedef int (*moetext_pull_fn)(void *user, int wait, moetext_request *request);

/* Called with each result as soon as it is final, in any order. The result's `user` identifies the text. */
typedef void (*moetext_done_fn)(void *user, const moetext_result *result);

/* Pull texts until MOE_PULL_END and deliver their results. Texts are decoded together, and a new text starts when the
 * batch has a free slot. The other texts of a batch never change a result. Both functions are called in the caller's
 * thread. If memory runs out for a text, its status is MOE_ERROR_MEMORY, and the others continue. Returns the same
 * statuses as moe_translate. */
moe_status moetext_translate(moetext *translator, moetext_pull_fn pull, moetext_done_fn done, void *user,
                             moe_error *error);

/* ---- Many texts at once -------------------------------------------------------------------------------- */

/* The best translations of all texts in order, valid until the next call on the translator. The layout is Arrow's
 * (LargeString): row i is bytes[offsets[i]] to bytes[offsets[i + 1]]. */
typedef struct moetext_rows {
    size_t n;
    const char *bytes;
    const int64_t *offsets;      /* [n + 1] */
    const uint8_t *statuses;     /* [n] moe_status of each row; a failed row is empty or lacks parts */
    const char *const *messages; /* [n] details in one line, or "" */
    const float *scores;         /* [n] scores of the best hypotheses; 0 for a row without a hypothesis */
    const char *const *strings;  /* [n] the rows as NUL-terminated strings; NULL after moetext_translate_rows */
} moetext_rows;

/* Translate `n` consecutive texts: text i is bytes[offsets[i]] to bytes[offsets[i + 1]]. `source` and `target` are the
 * languages of all texts; NULL for the translator's options. `valid` (may be NULL) has a bit for each text, least
 * significant first, as in Arrow; if the bit is 0, the row is empty with status MOE_OK. After MOE_ERROR_CANCELLED *out
 * contains the finished rows, and all other rows have that status. Errors: those of moetext_translate;
 * MOE_ERROR_ARGUMENT (decreasing offsets, an unknown language). */
moe_status moetext_translate_rows(moetext *translator, const char *bytes, const int64_t *offsets, size_t n,
                                  const uint8_t *valid, const char *source, const char *target, moetext_rows *out,
                                  moe_error *error);

/* Translate `n` NUL-terminated strings, like moetext_translate_rows. */
moe_status moetext_translate_strings(moetext *translator, const char *const *texts, size_t n, const char *source,
                                     const char *target, moetext_rows *out, moe_error *error);

/* ---- Live text ----------------------------------------------------------------------------------------- */

/* The translation of a text that grows, or changes at its end, such as captions of speech or a text that someone types.
 * What was shown changes as little as possible: words appear a little later, and then mostly stay. When the text is
 * final, so is its translation, with the same bytes as any translation of this text.
 *
 *     moetext_live_give(live, text, length, MOETEXT_GROWING, &error);      the whole text so far
 *     while (moetext_live_next(live, &request)) {                          in the pull function
 *         translate request.text, then moetext_live_take(live, translation, length, &error);
 *         show moetext_live_shown(live);
 *     }
 *
 * A newer text may be given at any time, also between moetext_live_next and moetext_live_take. Give only the newest one
 * if texts come faster than their translations. */
typedef struct moetext_live moetext_live; /* one thread at a time may use it */

typedef enum moetext_live_state {
    MOETEXT_GROWING = 0,
    MOETEXT_PAUSED, /* no input for a moment: translate all words and show them, although the sentence is not complete
                     */
    MOETEXT_FINAL
} moetext_live_state;

/* What to show; valid until the next call. */
typedef struct moetext_live_view {
    const char *text; /* [length], followed by a NUL */
    size_t length;
    size_t stable; /* bytes in finished sentences, which change only if their sources do, or rarely when the text is
                      final */
    int final;     /* 1 for the translation of a final text */
} moetext_live_view;

moe_status moetext_live_new(moetext_live **out, moe_error *error);
void moetext_live_free(moetext_live *live); /* may be NULL */
/* Give the whole text, of any number of lines. Errors: MOE_ERROR_ARGUMENT (not UTF-8), MOE_ERROR_LIMIT (longer than
 * 1 MiB), MOE_ERROR_MEMORY. */
moe_status moetext_live_give(moetext_live *live, const char *text, size_t length, moetext_live_state state,
                             moe_error *error);
/* Set text, draft and quick of a request, which are valid until the next call. Return 0 if nothing is to be translated
 * until the next text, also if memory runs out; the view is then not final. */
int moetext_live_next(moetext_live *live, moetext_request *request);
/* Take the translation of the last request; NULL if it failed. Ignore it if its sentence has changed meanwhile. */
moe_status moetext_live_take(moetext_live *live, const char *text, size_t length, moe_error *error);
moetext_live_view moetext_live_shown(const moetext_live *live);

#ifdef __cplusplus
}
#endif
#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#endif /* MOETEXT_H */
