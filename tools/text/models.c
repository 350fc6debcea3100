/* models.c - see models.h. */
#define _POSIX_C_SOURCE 200809L

#include "tools/text/models.h"
#include "tools/text/published.h"
#include "tools/text/open.h"
#include "tools/text/system.h"
#include "tools/text/text.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MOST_LANGUAGES = 1024, MOST_FILES = 4096 }; /* limits, because finding pairs of files takes quadratic time */

typedef struct model_file {
    char *path;
    unsigned char reads[MOST_LANGUAGES], writes[MOST_LANGUAGES]; /* 1 if a language is a source; 1 if it is a target */
    uint64_t bytes;
    moetext_model *model; /* NULL if closed */
    size_t users;
} model_file;

struct text_set {
    model_file *files;
    size_t n, capacity;
    char **languages;
    size_t n_languages, language_capacity;
    unsigned char *hops; /* [languages, languages] */
    text_bytes ways;     /* text_set_ways */
    text_settings settings;
    pthread_mutex_t opening; /* guards model and users */
};

/* ---- 1. Ways ------------------------------------------------------------------------------------------- */

static ptrdiff_t language_of(const text_set *s, const char *code, int loose) {
    return text_language_among((const char *const *)s->languages, s->n_languages, code, loose);
}

ptrdiff_t text_set_language(const text_set *s, const char *code) { return language_of(s, code, 1); }

const char *text_set_spelling(const text_set *s, const moetext_model *m, size_t language) {
    for (size_t i = 0; i < moetext_model_language_count(m); i++)
        if (language_of(s, moetext_model_language(m, i), 0) == (ptrdiff_t)language) return moetext_model_language(m, i);
    return NULL;
}

static unsigned char *hops_from(const text_set *s, size_t source) { return s->hops + source * s->n_languages; }

/* Add the ways through one of the first `files` files, then through two of them, where no way is known. */
static void add_ways(text_set *s, size_t files) {
    const size_t n = s->n_languages;
    for (const model_file *f = s->files; f < s->files + files; f++)
        for (size_t from = 0; from < n; from++)
            for (size_t to = 0; f->reads[from] && to < n; to++)
                if (f->writes[to] && to != from && !hops_from(s, from)[to]) hops_from(s, from)[to] = 1;
    for (size_t from = 0; from < n; from++)
        for (size_t between = 0; between < n; between++)
            for (size_t to = 0; hops_from(s, from)[between] == 1 && to < n; to++)
                if (hops_from(s, between)[to] == 1 && to != from && !hops_from(s, from)[to]) hops_from(s, from)[to] = 2;
}

static moe_status find_ways(text_set *s, moe_error *error) {
    const size_t n = s->n_languages, last = s->settings.last_resort;
    if (!(s->hops = calloc(n * n + 1, 1))) return text_out_of_memory(error);
    if (last && last < s->n) add_ways(s, s->n - last);
    add_ways(s, s->n);
    return MOE_OK;
}

const char *const *text_set_languages(const text_set *s, size_t *n) {
    *n = s->n_languages;
    return (const char *const *)s->languages;
}

/* Return the first file that translates from one language to another, or `n` if no file does. */
static size_t file_of(const text_set *s, size_t source, size_t target) {
    size_t i = 0;
    while (i < s->n && !(s->files[i].reads[source] && s->files[i].writes[target])) i++;
    return i;
}

/* List the targets of `from`, the sources of `to`, or all languages. */
static void list_languages(const text_set *s, const size_t *from, const size_t *to, text_bytes *out) {
    for (size_t i = 0; i < s->n_languages; i++) {
        if (from ? !hops_from(s, *from)[i] : to && !hops_from(s, i)[*to]) continue;
        if (out->length) text_append(out, " ", 1);
        text_append_clean(out, s->languages[i], strlen(s->languages[i]));
    }
    if (!out->length) text_append_string(out, "nothing");
}

moe_status text_set_find(const text_set *s, const char *code, size_t *language, moe_error *error) {
    const ptrdiff_t found = text_set_language(s, code);
    if (found >= 0) return *language = (size_t)found, MOE_OK;
    text_bytes known = { 0 }, wanted = { 0 };
    list_languages(s, NULL, NULL, &known);
    text_append_clean(&wanted, code, strlen(code));
    const moe_status status =
        known.failed || wanted.failed
            ? text_out_of_memory(error)
            : text_fail(error, MOE_ERROR_ARGUMENT, "language", "no model has the language '%.20s'; available: %.150s",
                        wanted.data, known.data);
    text_bytes_free(&known), text_bytes_free(&wanted);
    return status;
}

static moe_status no_way(const text_set *s, size_t source, size_t target, moe_error *error) {
    text_bytes from = { 0 }, to = { 0 };
    list_languages(s, &source, NULL, &from);
    list_languages(s, NULL, &target, &to);
    const moe_status status =
        from.failed || to.failed
            ? text_out_of_memory(error)
            : text_fail(error, MOE_ERROR_ARGUMENT, "target",
                        "no model or pair of models translates from %.20s to %.20s; from %.20s: %.60s; to %.20s: %.60s",
                        s->languages[source], s->languages[target], s->languages[source], from.data,
                        s->languages[target], to.data);
    text_bytes_free(&from), text_bytes_free(&to);
    return status;
}

static int leads(const text_set *s, size_t source, size_t between, size_t target) {
    return hops_from(s, source)[between] == 1 && hops_from(s, between)[target] == 1;
}

moe_status text_set_way(const text_set *s, size_t source, size_t target, text_way *way, moe_error *error) {
    const int hops = hops_from(s, source)[target];
    if (!hops) return no_way(s, source, target, error);
    if (hops == 1) {
        *way = (text_way){ 1, { file_of(s, source, target), 0 }, { source, target, 0 } };
        return MOE_OK;
    }
    const ptrdiff_t english = text_set_language(s, "en");
    size_t between = english >= 0 && leads(s, source, (size_t)english, target) ? (size_t)english : 0;
    while (!leads(s, source, between, target)) between++;
    *way = (text_way){ 2, { file_of(s, source, between), file_of(s, between, target) }, { source, between, target } };
    return MOE_OK;
}

int text_set_hops(const text_set *s, size_t source, size_t target) {
    return source < s->n_languages && target < s->n_languages ? hops_from(s, source)[target] : 0;
}

static moe_status describe(text_set *s, moe_error *error) {
    text_append(&s->ways, "", 0);
    for (size_t from = 0; from < s->n_languages; from++) {
        text_bytes to = { 0 };
        list_languages(s, &from, NULL, &to);
        if (memchr(hops_from(s, from), 1, s->n_languages)) {
            if (s->ways.length) text_append_string(&s->ways, "; ");
            text_append_clean(&s->ways, s->languages[from], strlen(s->languages[from]));
            text_append_string(&s->ways, " to ");
            text_append(&s->ways, to.data, to.length);
        }
        s->ways.failed |= to.failed;
        text_bytes_free(&to);
    }
    return s->ways.failed ? text_out_of_memory(error) : MOE_OK;
}

const char *text_set_ways(const text_set *s) { return s->ways.data; }

/* Count the languages that have a way to `target`; set *last to the last of these languages. */
static size_t count_sources(const text_set *s, size_t target, size_t *last) {
    size_t n = 0;
    for (size_t i = 0; i < s->n_languages; i++)
        if (hops_from(s, i)[target]) n++, *last = i;
    return n;
}

ptrdiff_t text_set_only_source(const text_set *s, size_t target) {
    size_t last = 0;
    return count_sources(s, target, &last) == 1 ? (ptrdiff_t)last : -1;
}

int text_set_needs_source(const text_set *s) {
    for (size_t i = 0, last; i < s->n_languages; i++)
        if (count_sources(s, i, &last) > 1) return 1;
    return 0;
}

/* ---- 2. Files ------------------------------------------------------------------------------------------ */

/* Return 1 if a code looks like de, deu or deu_Latn. */
static int is_code(moe_span code) {
    size_t small = 0;
    while (small < code.length && code.data[small] >= 'a' && code.data[small] <= 'z') small++;
    if (small < 2 || small > 3) return 0;
    return small == code.length || (code.length == small + 5 && code.data[small] == '_' &&
                                    code.data[small + 1] >= 'A' && code.data[small + 1] <= 'Z');
}

/* Find the languages in the name of a file, such as en and de in opus-mt-en-de.bin. */
static int codes_of_name(const char *path, moe_span codes[2]) {
    const char *begin = system_name(path), *last = NULL;
    const char *end = begin + strcspn(begin, ".");
    for (const char *at = begin; at < end; at++)
        if (*at == '-') begin = last ? last + 1 : begin, last = at;
    if (!last) return 0;
    codes[0] = (moe_span){ begin, (size_t)(last - begin) };
    codes[1] = (moe_span){ last + 1, (size_t)(end - last - 1) };
    return is_code(codes[0]) && is_code(codes[1]);
}

/* Mark a language of a file. Add it to the set if it is new. pt and pt_BR are different languages. */
static moe_status add_language(text_set *s, const char *path, moe_span code, unsigned char *marks, moe_error *error) {
    char *name = text_copy(code.data, code.length);
    ptrdiff_t language = name ? language_of(s, name, 0) : -1;
    moe_status status = name ? MOE_OK : text_out_of_memory(error);
    if (!status && language < 0 && s->n_languages == MOST_LANGUAGES)
        status = text_fail(error, MOE_ERROR_UNSUPPORTED, "",
                           "%.120s: with this file the models have more than %d languages", path, MOST_LANGUAGES);
    if (!status && language < 0) {
        language = (ptrdiff_t)s->n_languages;
        status = text_add(&s->languages, &s->n_languages, &s->language_capacity, &name, 1, sizeof name, error);
        if (!status) name = NULL; /* owned by the set */
    }
    if (!status) marks[language] = 1;
    free(name);
    return status;
}

/* Add the languages of a file. */
static moe_status add_languages(text_set *s, const moe_model *m, model_file *f, moe_error *error) {
    const text_codes listed[2] = { text_languages_of(m, 0), text_languages_of(m, 1) };
    moe_span named[2];
    const int none = !listed[0].n && !listed[1].n;
    if (none ? !codes_of_name(f->path, named) : !listed[0].n || !listed[1].n)
        return text_fail(error, MOE_ERROR_ARGUMENT, "",
                         "the file does not specify its languages; put them into its name, e.g. en-de.bin");
    moe_status status = MOE_OK;
    for (int side = 0; side < 2; side++)
        for (size_t i = 0; i < (none ? 1 : listed[side].n) && !status; i++)
            status = add_language(s, f->path, none ? named[side] : text_code_at(&listed[side], i),
                                  side ? f->writes : f->reads, error);
    return status;
}

/* Add the name of a file to an error. */
static moe_status of_file(const char *path, const moe_error *e, moe_error *error) {
    const size_t length = strlen(path), most = sizeof error->where - 1;
    if (!error) return e->code;
    *error = *e;
    if (strcmp(e->where, path) == 0) return e->code;
    const char *message = text_without_file(path, e->message);
    if (e->where[0] && e->code != MOE_ERROR_IO && strlen(e->where) + strlen(message) + 2 < sizeof e->message)
        text_fail(error, e->code, "", "%s: %s", e->where, message);
    text_name_error(path, e->code, error);
    snprintf(error->where, sizeof error->where, "%s", length > most ? path + length - most : path);
    return e->code;
}

/* Add a file. Skip files of folders (`in_folder`) that are not translation models. */
static moe_status add_file(text_set *s, const char *path, int in_folder, moe_error *error) {
    const moe_model_params look = { .verify = -1 };
    moe_error e = { .code = MOE_OK };
    text_front front;
    moe_status status = text_reserve(&s->files, &s->capacity, s->n + 1, sizeof *s->files, error);
    if (status) return status;
    if (text_open(path, TEXT_IDS_ONLY | (s->settings.cache ? 0 : TEXT_NO_CACHE), &look, &front, &e))
        return of_file(path, &e, error);
    model_file *f = &s->files[s->n];
    *f = (model_file){ .path = text_copy(path, strlen(path)), .bytes = moe_model_file_bytes(front.model) };
    const int translates = moe_model_kind(front.model) == MOE_MODEL_TRANSLATION;
    if (!f->path) status = text_out_of_memory(&e);
    else if (translates) status = add_languages(s, front.model, f, &e);
    else if (!in_folder) status = text_fail(&e, MOE_ERROR_UNSUPPORTED, path, "not a translation model");
    text_close(&front);
    if (!status && translates) s->n++;
    else free(f->path);
    return status ? of_file(path, &e, error) : MOE_OK;
}

static int is_model(const struct dirent *entry) {
    return entry->d_name[0] != '.' && text_ends_with(entry->d_name, strlen(entry->d_name), ".bin");
}

static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }

static moe_status add_folder(text_set *s, const char *folder, moe_error *error) {
    struct dirent **entries = NULL;
    const size_t before = s->n;
    const int n = scandir(folder, &entries, is_model, by_name);
    if (n < 0 && errno == ENOMEM) return text_out_of_memory(error);
    if (n < 0) return text_fail(error, MOE_ERROR_IO, folder, "%.80s: %s", folder, strerror(errno));
    moe_status status = MOE_OK;
    if (n > MOST_FILES)
        status = text_fail(error, MOE_ERROR_UNSUPPORTED, folder, "more than %d models (*.bin) in a folder", MOST_FILES);
    for (int i = 0; i < n; i++) {
        text_bytes path = { 0 };
        text_append_string(&path, folder);
        if (!text_ends_with(folder, strlen(folder), "/")) text_append_string(&path, "/");
        text_append_string(&path, entries[i]->d_name);
        if (!status) status = path.failed ? text_out_of_memory(error) : add_file(s, path.data, 1, error);
        text_bytes_free(&path);
        free(entries[i]);
    }
    free(entries);
    if (status || s->n > before) return status;
    text_fail(error, MOE_ERROR_ARGUMENT, folder, "no translation model (*.bin) in this folder");
    text_say_how_to_convert(folder, error);
    return MOE_ERROR_ARGUMENT;
}

/* ---- 3. Sets ------------------------------------------------------------------------------------------- */

moe_status text_set_open(const char *const *paths, size_t n, const text_settings *settings, text_set **out,
                         moe_error *error) {
    text_set *s = calloc(1, sizeof *s);
    struct stat kind;
    if (!s) return text_out_of_memory(error);
    if (pthread_mutex_init(&s->opening, NULL)) return free(s), text_out_of_memory(error);
    s->settings = *settings;
    moe_status status = MOE_OK;
    for (size_t i = 0; i < n && !status; i++) {
        const int is_folder = !stat(paths[i], &kind) && S_ISDIR(kind.st_mode);
        const int many = is_folder && !text_is_published(paths[i]);
        status = many ? add_folder(s, paths[i], error) : add_file(s, paths[i], 0, error);
    }
    if (!status && !s->n) status = text_fail(error, MOE_ERROR_ARGUMENT, "models", "no model was named");
    if (!status) status = find_ways(s, error);
    if (!status) status = describe(s, error);
    if (status) return text_set_close(s), status;
    *out = s;
    return MOE_OK;
}

void text_set_close(text_set *s) {
    if (!s) return;
    for (size_t i = 0; i < s->n; i++) moetext_model_close(s->files[i].model), free(s->files[i].path);
    for (size_t i = 0; i < s->n_languages; i++) free(s->languages[i]);
    free(s->files);
    free(s->languages);
    free(s->hops);
    text_bytes_free(&s->ways);
    pthread_mutex_destroy(&s->opening);
    free(s);
}

size_t text_set_count(const text_set *s) { return s->n; }
int text_set_reads(const text_set *s, size_t file, size_t language) { return s->files[file].reads[language]; }
int text_set_writes(const text_set *s, size_t file, size_t language) { return s->files[file].writes[language]; }
int text_set_form(const text_set *s) { return s->settings.form < 0 ? TEXT_FORM_TEXT : s->settings.form; }
const char *text_set_path(const text_set *s, size_t file) { return s->files[file].path; }
uint64_t text_set_bytes(const text_set *s, size_t file) { return s->files[file].bytes; }

moe_status text_set_acquire(text_set *s, size_t file, const moetext_model **out, moe_error *error) {
    model_file *f = &s->files[file];
    moe_error e;
    pthread_mutex_lock(&s->opening);
    const moe_status status = f->model ? MOE_OK : text_model_open(f->path, &s->settings, &f->model, &e);
    if (!status) f->users++, *out = f->model;
    pthread_mutex_unlock(&s->opening);
    return status ? of_file(f->path, &e, error) : MOE_OK;
}

void text_set_release(text_set *s, size_t file) {
    model_file *f = &s->files[file];
    pthread_mutex_lock(&s->opening);
    moetext_model *last = --f->users ? NULL : f->model;
    if (last) f->model = NULL;
    pthread_mutex_unlock(&s->opening);
    moetext_model_close(last);
}
