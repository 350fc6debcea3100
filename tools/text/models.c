/* models.c - models.h says what this is and has the contracts.
 *
 * Contents
 *   1. Files       what a file translates; folders
 *   2. Ways        from one language to another
 *   3. Opening     and closing
 */
#define _POSIX_C_SOURCE 200809L

#include "tools/text/models.h"
#include "tools/text/open.h"
#include "tools/text/text.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MOST_LANGUAGES = 1024, MOST_FILES = 4096 }; /* of a set; of a folder: ways are looked for between all of them */

/* ==== 1. Files ========================================================================================== */

typedef struct model_file {
    char *path;
    char **sources, **targets; /* codes, until all files are known */
    size_t n_sources, n_targets;
    unsigned char *reads, *writes; /* [languages] */
    uint64_t bytes;
    moetext_model *model; /* NULL: it is not open */
    size_t users;
} model_file;

struct text_set {
    model_file *files;
    size_t n, capacity;
    char **languages;
    size_t n_languages, language_capacity;
    unsigned char *hops; /* [languages, languages] */
    text_bytes words;    /* text_set_says */
    text_settings settings;
    pthread_mutex_t opening; /* of model and users */
};

static void free_codes(char **codes, size_t n) {
    for (size_t i = 0; codes && i < n; i++) free(codes[i]);
    free(codes);
}

/* The languages of one side of a model. */
static int codes_of_model(const moe_model *m, int target, char ***codes, size_t *n) {
    const text_codes found = text_languages_of(m, target);
    if (!(*codes = calloc(found.n + 1, sizeof **codes))) return 0;
    for (; *n < found.n; ++*n) {
        const moe_span code = text_code_at(&found, *n);
        if (!((*codes)[*n] = text_copy(code.data, code.length))) return 0;
    }
    return 1;
}

/* Whether data[length] is written like the code of a language: de, deu, deu_Latn. */
static int is_code(const char *data, size_t length) {
    size_t small = 0;
    while (small < length && data[small] >= 'a' && data[small] <= 'z') small++;
    if (small < 2 || small > 3) return 0;
    return small == length ||
           (length == small + 5 && data[small] == '_' && data[small + 1] >= 'A' && data[small + 1] <= 'Z');
}

/* The languages in the name of a file: the last two parts of opus-mt-en-de.bin. */
static int codes_of_name(const char *path, char ***sources, char ***targets) {
    const char *name = strrchr(path, '/'), *last = NULL, *before = NULL;
    name = name ? name + 1 : path;
    const size_t length = strcspn(name, ".");
    for (size_t i = 0; i < length; i++)
        if (name[i] == '-') before = last, last = name + i;
    const char *first = before ? before + 1 : name;
    if (!last || !is_code(first, (size_t)(last - first)) || !is_code(last + 1, (size_t)(name + length - last - 1)))
        return 1;
    *sources = calloc(2, sizeof **sources), *targets = calloc(2, sizeof **targets);
    if (!*sources || !*targets) return 0;
    return ((*sources)[0] = text_copy(first, (size_t)(last - first))) != NULL &&
           ((*targets)[0] = text_copy(last + 1, (size_t)(name + length - last - 1))) != NULL;
}

/* What a file translates. */
static moe_status read_directions(const moe_model *m, model_file *f, moe_error *error) {
    int fine = codes_of_model(m, 0, &f->sources, &f->n_sources) && codes_of_model(m, 1, &f->targets, &f->n_targets);
    if (fine && !f->n_sources && !f->n_targets) {
        free(f->sources), free(f->targets);
        f->sources = f->targets = NULL;
        fine = codes_of_name(f->path, &f->sources, &f->targets);
        f->n_sources = f->sources && f->sources[0], f->n_targets = f->targets && f->targets[0];
    }
    if (!fine) return text_out_of_memory(error);
    if (f->n_sources && f->n_targets) return MOE_OK;
    return text_fail(error, MOE_ERROR_ARGUMENT, f->path,
                     "it does not say between which languages it translates; name it by them, such as en-de.bin");
}

/* The error of a file names it. */
static moe_status of_file(const char *path, const moe_error *e, moe_error *error) {
    const size_t length = strlen(path), most = sizeof error->where - 1;
    if (!error) return e->code;
    *error = *e;
    if (strcmp(e->where, path) == 0) return e->code;
    if (e->where[0] && e->code != MOE_ERROR_IO && strlen(e->where) + strlen(e->message) + 2 < sizeof e->message)
        text_fail(error, e->code, "", "%s: %s", e->where, e->message);
    snprintf(error->where, sizeof error->where, "%s", length > most ? path + length - most : path);
    return e->code;
}

static void file_free(model_file *f) {
    free_codes(f->sources, f->n_sources);
    free_codes(f->targets, f->n_targets);
    free(f->reads);
    free(f->writes);
    free(f->path);
}

/* A file of the set. `in_folder`: one that is no translation model is passed over. */
static moe_status add_file(text_set *s, const char *path, int in_folder, moe_error *error) {
    const moe_model_params look = { .verify = -1 };
    moe_error e = { .code = MOE_OK };
    text_front front;
    model_file *larger = text_grown(s->files, &s->capacity, s->n + 1, sizeof *larger);
    if (!larger) return text_out_of_memory(error);
    s->files = larger;
    if (text_open(path, TEXT_IDS_ONLY, &look, &front, &e)) return of_file(path, &e, error);
    model_file f = { .path = text_copy(path, strlen(path)), .bytes = moe_model_file_bytes(front.model) };
    const int translates = moe_model_kind(front.model) == MOE_MODEL_TRANSLATION;
    moe_status status = MOE_OK;
    if (!f.path) status = text_out_of_memory(&e);
    else if (!translates && !in_folder)
        status = text_fail(&e, MOE_ERROR_UNSUPPORTED, path, "this is no translation model");
    else if (translates) status = read_directions(front.model, &f, &e);
    text_close(&front);
    if (!status && translates) larger[s->n++] = f;
    else file_free(&f);
    return status ? of_file(path, &e, error) : MOE_OK;
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* The names in a folder that end in .bin, in order. */
static moe_status list_folder(const char *folder, char ***names, size_t *n, moe_error *error) {
    size_t capacity = 0;
    DIR *dir = opendir(folder);
    if (!dir) return text_fail(error, MOE_ERROR_IO, folder, "%.80s: %s", folder, strerror(errno));
    moe_status status = MOE_OK;
    for (struct dirent *entry; !status && (entry = readdir(dir));) {
        if (entry->d_name[0] == '.' || !text_ends_with(entry->d_name, strlen(entry->d_name), ".bin")) continue;
        if (*n == MOST_FILES) {
            status =
                text_fail(error, MOE_ERROR_UNSUPPORTED, folder, "more than %d models (*.bin) in a folder", MOST_FILES);
            break;
        }
        char **larger = text_grown(*names, &capacity, *n + 1, sizeof *larger);
        if (larger) *names = larger;
        if (!larger || !(larger[*n] = text_copy(entry->d_name, strlen(entry->d_name))))
            status = text_out_of_memory(error);
        else ++*n;
    }
    closedir(dir);
    if (*n) qsort(*names, *n, sizeof **names, by_name);
    return status;
}

static moe_status add_folder(text_set *s, const char *folder, moe_error *error) {
    char **names = NULL;
    size_t n = 0;
    const size_t before = s->n;
    moe_status status = list_folder(folder, &names, &n, error);
    for (size_t i = 0; i < n && !status; i++) {
        text_bytes path = { 0 };
        text_append_string(&path, folder);
        if (!text_ends_with(folder, strlen(folder), "/")) text_append_string(&path, "/");
        text_append_string(&path, names[i]);
        status = path.failed ? text_out_of_memory(error) : add_file(s, path.data, 1, error);
        text_bytes_free(&path);
    }
    free_codes(names, n);
    if (status || s->n > before) return status;
    text_fail(error, MOE_ERROR_ARGUMENT, folder, "there is no translation model (*.bin) in this folder");
    text_say_how_to_convert(folder, error);
    return MOE_ERROR_ARGUMENT;
}

/* ==== 2. Ways =========================================================================================== */

static ptrdiff_t language_of(const text_set *s, const char *code, int loose) {
    return text_language_among((const char *const *)s->languages, s->n_languages, code, loose);
}

ptrdiff_t text_set_language(const text_set *s, const char *code) { return language_of(s, code, 1); }
const char *text_set_spelling(const text_set *s, const moetext_model *m, size_t language) {
    for (size_t i = 0; i < moetext_model_language_count(m); i++)
        if (language_of(s, moetext_model_language(m, i), 0) == (ptrdiff_t)language) return moetext_model_language(m, i);
    return NULL;
}

/* The languages of the files, each once: pt and pt_BR are two. */
static moe_status add_languages(text_set *s, const char *path, char *const *codes, size_t n, moe_error *error) {
    for (size_t i = 0; i < n; i++) {
        if (language_of(s, codes[i], 0) >= 0) continue;
        if (s->n_languages == MOST_LANGUAGES)
            return text_fail(error, MOE_ERROR_UNSUPPORTED, path,
                             "%.120s: with this file the models have more than %d languages", path, MOST_LANGUAGES);
        char **larger = text_grown(s->languages, &s->language_capacity, s->n_languages + 1, sizeof *larger);
        if (!larger) return text_out_of_memory(error);
        s->languages = larger;
        if (!(larger[s->n_languages] = text_copy(codes[i], strlen(codes[i])))) return text_out_of_memory(error);
        s->n_languages++;
    }
    return MOE_OK;
}

/* A byte for each language of the set: whether it is one of the codes. */
static unsigned char *marks_of(const text_set *s, char *const *codes, size_t n) {
    unsigned char *marks = calloc(s->n_languages + 1, 1);
    for (size_t i = 0; marks && i < n; i++) marks[language_of(s, codes[i], 0)] = 1;
    return marks;
}

static unsigned char *hops_from(const text_set *s, size_t source) { return s->hops + source * s->n_languages; }

/* All ways: what one file translates, then what two do. */
static moe_status find_ways(text_set *s, moe_error *error) {
    moe_status status = MOE_OK;
    for (size_t i = 0; i < s->n && !status; i++) {
        const model_file *f = &s->files[i];
        status = add_languages(s, f->path, f->sources, f->n_sources, error);
        if (!status) status = add_languages(s, f->path, f->targets, f->n_targets, error);
    }
    const size_t n = s->n_languages;
    if (status) return status;
    if (!(s->hops = calloc(n * n + 1, 1))) return text_out_of_memory(error);
    for (size_t i = 0; i < s->n; i++) {
        model_file *f = &s->files[i];
        f->reads = marks_of(s, f->sources, f->n_sources), f->writes = marks_of(s, f->targets, f->n_targets);
        if (!f->reads || !f->writes) return text_out_of_memory(error);
        for (size_t from = 0; from < n; from++)
            for (size_t to = 0; f->reads[from] && to < n; to++)
                if (f->writes[to] && to != from) hops_from(s, from)[to] = 1;
    }
    for (size_t from = 0; from < n; from++)
        for (size_t between = 0; between < n; between++)
            for (size_t to = 0; hops_from(s, from)[between] == 1 && to < n; to++)
                if (hops_from(s, between)[to] == 1 && to != from && !hops_from(s, from)[to]) hops_from(s, from)[to] = 2;
    return MOE_OK;
}

const char *const *text_set_languages(const text_set *s, size_t *n) {
    *n = s->n_languages;
    return (const char *const *)s->languages;
}

/* The first file that translates from one language into another; `n`: there is none. */
static size_t file_of(const text_set *s, size_t source, size_t target) {
    size_t i = 0;
    while (i < s->n && !(s->files[i].reads[source] && s->files[i].writes[target])) i++;
    return i;
}

/* The languages from which there is a way to `to`, or those that `from` has one to, of this length at the most. */
static void list_languages(const text_set *s, const size_t *from, const size_t *to, int longest, text_bytes *out) {
    for (size_t i = 0; i < s->n_languages; i++) {
        const int hops = from ? hops_from(s, *from)[i] : to ? hops_from(s, i)[*to] : 1;
        if (!hops || hops > longest) continue;
        if (out->length) text_append(out, " ", 1);
        text_append_clean(out, s->languages[i], strlen(s->languages[i]));
    }
    if (!out->length) text_append_string(out, "nothing");
}

moe_status text_set_find(const text_set *s, const char *code, size_t *language, moe_error *error) {
    const ptrdiff_t found = text_set_language(s, code);
    if (found >= 0) return *language = (size_t)found, MOE_OK;
    text_bytes known = { 0 }, asked = { 0 };
    list_languages(s, NULL, NULL, 1, &known);
    text_append_clean(&asked, code, strlen(code));
    const moe_status status =
        known.failed || asked.failed
            ? text_out_of_memory(error)
            : text_fail(error, MOE_ERROR_ARGUMENT, "language",
                        "no model here has the language '%.20s'; they have: %.150s", asked.data, known.data);
    text_bytes_free(&known), text_bytes_free(&asked);
    return status;
}

static moe_status no_way(const text_set *s, size_t source, size_t target, moe_error *error) {
    text_bytes from = { 0 }, to = { 0 };
    list_languages(s, &source, NULL, 2, &from);
    list_languages(s, NULL, &target, 2, &to);
    const moe_status status =
        from.failed || to.failed
            ? text_out_of_memory(error)
            : text_fail(error, MOE_ERROR_ARGUMENT, "target",
                        "no model, and no two, lead from %.20s to %.20s; from %.20s: %.60s; to %.20s: %.60s",
                        s->languages[source], s->languages[target], s->languages[source], from.data,
                        s->languages[target], to.data);
    text_bytes_free(&from), text_bytes_free(&to);
    return status;
}

moe_status text_set_way(const text_set *s, size_t source, size_t target, text_way *way, moe_error *error) {
    const int hops = hops_from(s, source)[target];
    if (!hops) return no_way(s, source, target, error);
    if (hops == 1) {
        *way = (text_way){ 1, { file_of(s, source, target), 0 }, { source, target, 0 } };
        return MOE_OK;
    }
    size_t between = 0;
    const ptrdiff_t english = text_set_language(s, "en");
    if (english >= 0 && hops_from(s, source)[english] == 1 && hops_from(s, (size_t)english)[target] == 1)
        between = (size_t)english;
    else
        while (hops_from(s, source)[between] != 1 || hops_from(s, between)[target] != 1) between++;
    *way = (text_way){ 2, { file_of(s, source, between), file_of(s, between, target) }, { source, between, target } };
    return MOE_OK;
}

int text_set_hops(const text_set *s, size_t source, size_t target) {
    return source < s->n_languages && target < s->n_languages ? hops_from(s, source)[target] : 0;
}

/* "en to de fr; de to en" */
static moe_status describe(text_set *s, moe_error *error) {
    text_append(&s->words, "", 0);
    for (size_t from = 0; from < s->n_languages; from++) {
        text_bytes to = { 0 };
        list_languages(s, &from, NULL, 2, &to);
        if (memchr(hops_from(s, from), 1, s->n_languages)) {
            if (s->words.length) text_append_string(&s->words, "; ");
            text_append_clean(&s->words, s->languages[from], strlen(s->languages[from]));
            text_append_string(&s->words, " to ");
            text_append(&s->words, to.data, to.length);
        }
        s->words.failed |= to.failed;
        text_bytes_free(&to);
    }
    return s->words.failed ? text_out_of_memory(error) : MOE_OK;
}

const char *text_set_says(const text_set *s) { return s->words.data; }

ptrdiff_t text_set_only_source(const text_set *s, size_t target) {
    ptrdiff_t only = -1;
    for (size_t i = 0; i < s->n_languages; i++) {
        if (!hops_from(s, i)[target]) continue;
        if (only >= 0) return -1;
        only = (ptrdiff_t)i;
    }
    return only;
}

int text_set_needs_source(const text_set *s) {
    for (size_t i = 0; i < s->n_languages; i++) {
        int sources = 0;
        for (size_t from = 0; from < s->n_languages; from++) sources += hops_from(s, from)[i] > 0;
        if (sources > 1) return 1;
    }
    return 0;
}

/* ==== 3. Opening ======================================================================================== */

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
        status = is_folder ? add_folder(s, paths[i], error) : add_file(s, paths[i], 0, error);
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
    for (size_t i = 0; i < s->n; i++) {
        moetext_model_close(s->files[i].model);
        file_free(&s->files[i]);
    }
    free(s->files);
    free_codes(s->languages, s->n_languages);
    free(s->hops);
    text_bytes_free(&s->words);
    pthread_mutex_destroy(&s->opening);
    free(s);
}

size_t text_set_count(const text_set *s) { return s->n; }
int text_set_form(const text_set *s) { return s->settings.form; }
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
