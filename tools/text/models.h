/* models.h - uses several model files as one, and finds those that translate from one language to another.
 *
 * A file is opened on demand and closed when its last user releases it. Its languages are the first available of these:
 *   - the lists of codes languages.sources and languages.targets in its metadata,
 *   - the model's languages, in all pairs,
 *   - the languages in its name, such as opus-mt-en-de.bin or en-de.bin.
 * Any number of threads can share a set.
 */
#ifndef TEXT_MODELS_H
#define TEXT_MODELS_H

#include "tools/text/moetext.h"
#include "tools/text/settings.h"
#include "tools/text/open.h"

typedef struct text_set text_set;

/* Open files, and in folders all translation models whose names end in .bin. `settings` are those of
 * moetext_model_open. Errors: those of moe_model_open, with the file in `where`; MOE_ERROR_ARGUMENT (a file without
 * languages, a folder without models); MOE_ERROR_UNSUPPORTED (not a translation model, too many languages or files). */
moe_status text_set_open(const char *const *paths, size_t n, const text_settings *settings, text_set **out,
                         moe_error *error);
void text_set_close(text_set *set); /* may be NULL; all files must be released */

/* Return the languages of all files, each once in the spelling of the first file that has it. */
const char *const *text_set_languages(const text_set *set, size_t *n);
ptrdiff_t text_set_language(const text_set *set, const char *code); /* the index of a language, or -1 */
/* Set *language to the index of a language. If it is unknown, the error lists the languages of the set. */
moe_status text_set_find(const text_set *set, const char *code, size_t *language, moe_error *error);

/* Return a model's spelling of a language, or NULL if the model lacks the language. */
const char *text_set_spelling(const text_set *set, const moetext_model *model, size_t language);

/* A way: the one or two files that translate a text. Two files are connected by an intermediate language. */
typedef struct text_way {
    size_t n, files[2], languages[3]; /* [n + 1] source, intermediate language if n is 2, target */
} text_way;

/* Find the first way in the order of the files: one file, or else two files, with English as intermediate language if
 * possible. The last settings.last_resort files are used only if the others have no way. Errors: MOE_ERROR_ARGUMENT (no
 * way; the message lists the targets of the source, and the sources of the target). */
moe_status text_set_way(const text_set *set, size_t source, size_t target, text_way *way, moe_error *error);
int text_set_hops(const text_set *set, size_t source, size_t target); /* number of files; 0 if there is no way */
/* Return the only language with a way to `target`, or -1. */
ptrdiff_t text_set_only_source(const text_set *set, size_t target);
int text_set_needs_source(const text_set *set); /* 1 if a target has several sources */
/* Return all pairs of languages with a way, as in "en to de fr; de to en"; valid until the set is closed. */
const char *text_set_ways(const text_set *set);

size_t text_set_count(const text_set *set);
int text_set_reads(const text_set *set, size_t file, size_t language);  /* 1 if it is a source of the file */
int text_set_writes(const text_set *set, size_t file, size_t language); /* 1 if it is a target of the file */
int text_set_form(const text_set *set);                                 /* the text_form of the option form */
const char *text_set_path(const text_set *set, size_t file);
uint64_t text_set_bytes(const text_set *set, size_t file); /* size of the file */
/* Get the model of a file, and open it if necessary. Errors: those of moetext_model_open, with the file in `where`. */
moe_status text_set_acquire(text_set *set, size_t file, const moetext_model **out, moe_error *error);
void text_set_release(text_set *set, size_t file);

/* Open a model like moetext_model_open, with parsed options. */
moe_status text_model_open(const char *path, const text_settings *settings, moetext_model **out, moe_error *error);

/* Open a model; a thread loads its tokeniser. The model is complete after text_model_wait, which moetext_new calls;
 * until then only one thread may use it. The caller must refuse a model whose kind is not settings->kind; such a model
 * is opened without a tokeniser. */
moe_status text_model_begin(const char *path, const text_settings *settings, text_level level, moetext_model **out,
                            moe_error *error);
moe_status text_model_wait(const moetext_model *model, moe_error *error);
const text_front *text_front_of(const moetext_model *model);

#endif
