/* models.h - several model files as one: their languages, and the way from one language to another.
 *
 * A file is opened when it is first asked for, and closed when its last user has released it. What a file translates:
 *   languages.sources, languages.targets   lists of codes in its metadata;
 *   else the model's languages, each of them into each other;
 *   else, of a model without languages, its name: opus-mt-en-de.bin or en-de.bin.
 * Any number of threads may share a set.
 */
#ifndef TEXT_MODELS_H
#define TEXT_MODELS_H

#include "tools/text/moetext.h"
#include "tools/text/settings.h"
#include "tools/text/open.h"

typedef struct text_set text_set;

/* Open a set of files and folders; of a folder all translation models that end in .bin. `settings`: those of
 * moetext_model_open, for each file. Errors: those of moe_model_open, `where` being the file; MOE_ERROR_ARGUMENT (a
 * file that is no translation model, or whose languages nobody says; a folder without models). */
moe_status text_set_open(const char *const *paths, size_t n, const text_settings *settings, text_set **out,
                         moe_error *error);
void text_set_close(text_set *set); /* NULL is fine; all files were released */

/* Each language once, as the first file that has it spells it, and the number of one; -1: no file has it. */
const char *const *text_set_languages(const text_set *set, size_t *n);
ptrdiff_t text_set_language(const text_set *set, const char *code);
/* The same; an error names those that there are. */
moe_status text_set_find(const text_set *set, const char *code, size_t *language, moe_error *error);

/* A language as one of the models spells it; NULL: the model does not name it. */
const char *text_set_spelling(const text_set *set, const moetext_model *model, size_t language);

/* The files that a text goes through: one if there is one, else two with a language between them. */
typedef struct text_way {
    size_t n, files[2], languages[3]; /* languages[n + 1]: source, the one between, target */
} text_way;

/* Of several ways the first: by the order of the files, and English between them where that goes. Errors:
 * MOE_ERROR_ARGUMENT (there is none; the message says what there is from the source, and into the target). */
moe_status text_set_way(const text_set *set, size_t source, size_t target, text_way *way, moe_error *error);
/* Its length: 0, there is none; 1; 2. */
int text_set_hops(const text_set *set, size_t source, size_t target);
/* The only language from which there is a way to `target`; -1: there are several, or none. */
ptrdiff_t text_set_only_source(const text_set *set, size_t target);

/* 1 if there is a language into which there are several. */
int text_set_needs_source(const text_set *set);

/* "en to de fr; de to en": what the files translate, alone and two by two; until the set is closed. */
const char *text_set_says(const text_set *set);

size_t text_set_count(const text_set *set);
int text_set_form(const text_set *set); /* the option form of its models; -1 if not given */
const char *text_set_path(const text_set *set, size_t file);
uint64_t text_set_bytes(const text_set *set, size_t file); /* of the file */
/* The model of a file, opened if nobody else has it. Errors: those of moetext_model_open, `where` being the file. */
moe_status text_set_acquire(text_set *set, size_t file, const moetext_model **out, moe_error *error);
void text_set_release(text_set *set, size_t file);

/* moetext_model_open, whose options are settings. */
moe_status text_model_open(const char *path, const text_settings *settings, moetext_model **out, moe_error *error);

/* The same with a tokeniser that a thread loads meanwhile. Only text_model_wait, which moetext_new includes, makes the
 * model complete; one thread may use it until then. A model of another kind than settings->kind has no tokeniser, and
 * the caller must refuse it. */
moe_status text_model_begin(const char *path, const text_settings *settings, text_level level, moetext_model **out,
                            moe_error *error);
moe_status text_model_wait(const moetext_model *model, moe_error *error);
const text_front *text_front_of(const moetext_model *model);

#endif
