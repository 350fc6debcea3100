/* choice.c - see choice.h.
 *
 * Contents
 *   1. Names
 *   2. Local models  find fetched models, and sort them
 *   3. The choice
 *   4. Memory        the choice of the last run
 *   5. Opening
 */
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE

#include "tools/text/choice.h"
#include "tools/text/bytes.h"
#include "tools/text/contained.h"
#include "tools/text/models.h"
#include "tools/text/places.h"
#include "tools/text/several.h"
#include "tools/text/system.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_BYTES = 4096, NAME_BYTES = 256, RECORD_BYTES = 1 << 20, MOST_FETCHED = 1024 };

static const char record_name[] = "moe-get.json", memory_name[] = "choices";

typedef struct choice {
    moetext_choice shown;
    moetext_local *models; /* [n] fetched ones, the best first, then the shipped one */
    size_t n, capacity;
    const moetext_local **local; /* [n] */
    const char **paths;          /* [n + 1] */
    const char **all;            /* [n] */
    text_set *set;               /* of all models */
    text_bytes name;
    char *named; /* MOE_MODEL */
    size_t idle; /* number of fetched models that cannot be used: not converted, or damaged */
    char first_idle[NAME_BYTES];
    moe_error damaged; /* why the shipped model cannot be used; code 0 if it can */
} choice;

/* ==== 1. Names ========================================================================================== */

const char *text_model_name(const char *path, char *out, size_t size) {
    char folder[PATH_BYTES];
    const char *name = system_name(path);
    text_contained contained;
    if (text_find_contained(path, &contained)) return snprintf(out, size, "%s", contained.name), out;
    const size_t n = text_place_of_models(1, folder, sizeof folder, NULL) ? 0 : strlen(folder);
    if (n && strncmp(path, folder, n) == 0 && path[n] == '/') name = path + n + 1;
    const size_t length = strlen(name), end = text_ends_with(name, length, ".bin") ? 4 : 0;
    snprintf(out, size, "%.*s", (int)(length - end), name);
    return out;
}

/* Return 1 for a name that moe-get may have given to a folder. */
static int is_name(const char *name) { return name[0] != '.' && strlen(name) < NAME_BYTES / 2 - 8; }

/* ==== 2. Local models =================================================================================== */

/* Return the number of a member of moe-get's record, which has a line for each member; negative if it is missing. */
static double number_of(const char *record, const char *key) {
    char member[64];
    snprintf(member, sizeof member, "\n\t\"%s\":", key);
    const char *at = strstr(record, member);
    double value = 0, unit = 1;
    if (!at) return -1;
    at += strlen(member);
    at += strspn(at, " \t");
    if (!isdigit((unsigned char)*at)) return -1;
    for (; isdigit((unsigned char)*at); at++) value = 10 * value + (*at - '0'); /* strtod depends on the locale */
    for (at += *at == '.'; isdigit((unsigned char)*at); at++) {
        value = 10 * value + (*at - '0');
        unit *= 10;
    }
    return value / unit;
}

/* Open a file for reading, but not a pipe, which could block. */
static FILE *open_regular(const char *path) {
    struct stat about;
    return stat(path, &about) == 0 && S_ISREG(about.st_mode) ? fopen(path, "rb") : NULL;
}

/* Read a record. Return NULL if it is missing. */
static char *read_record(const char *folder, const char *name) {
    text_bytes path = { 0 };
    text_append_string(&path, folder);
    text_append(&path, "/", 1), text_append_string(&path, name);
    text_append(&path, "/", 1), text_append_string(&path, record_name);
    FILE *file = path.failed ? NULL : open_regular(path.data);
    char *data = file ? malloc(RECORD_BYTES + 1) : NULL;
    if (data) data[fread(data, 1, RECORD_BYTES, file)] = '\0';
    if (file) fclose(file);
    text_bytes_free(&path);
    return data;
}

static void free_local(moetext_local *m) {
    free((char *)(uintptr_t)m->name), free((char *)(uintptr_t)m->path), free((char *)(uintptr_t)m->ways);
}

/* Add a model if its file can be used. Its metrics are those of `record`, which may be NULL. */
static moe_status add_model(choice *c, const char *name, const char *path, const char *record, moe_error *error) {
    const text_settings settings = text_settings_none();
    moetext_local m = { .comet = record ? number_of(record, "comet") : -1,
                        .bleu = record ? number_of(record, "bleu") : -1,
                        .shipped = !record };
    text_set *set = NULL;
    moe_error e;
    moe_status status = text_set_open(&path, 1, &settings, &set, &e);
    if (status == MOE_ERROR_MEMORY) return text_out_of_memory(error);
    if (status) {
        if (record && !c->idle++) snprintf(c->first_idle, sizeof c->first_idle, "%s", name);
        if (!record) c->damaged = e;
        return MOE_OK;
    }
    const char *ways = text_set_ways(set);
    m.bytes = text_set_bytes(set, 0);
    m.name = text_copy(name, strlen(name)), m.path = text_copy(path, strlen(path)),
    m.ways = text_copy(ways, strlen(ways));
    text_set_close(set);
    status = m.name && m.path && m.ways ? MOE_OK : text_out_of_memory(error);
    if (!status) status = text_add(&c->models, &c->n, &c->capacity, &m, 1, sizeof m, error);
    if (status) free_local(&m);
    return status;
}

/* Add the fetched models of an owner. */
static moe_status add_owner(choice *c, const char *data, const char *cache, const char *owner, moe_error *error) {
    char folder[PATH_BYTES], path[2 * PATH_BYTES], name[NAME_BYTES];
    moe_status status = MOE_OK;
    if ((size_t)snprintf(folder, sizeof folder, "%s/%s", data, owner) >= sizeof folder) return MOE_OK;
    DIR *list = opendir(folder);
    for (struct dirent *entry; list && !status && c->n < MOST_FETCHED && (entry = readdir(list));) {
        char *record = is_name(entry->d_name) ? read_record(folder, entry->d_name) : NULL;
        if (!record) continue;
        if ((size_t)snprintf(name, sizeof name, "%s/%s", owner, entry->d_name) < sizeof name) {
            snprintf(path, sizeof path, "%s/%s.bin", cache, name);
            status = add_model(c, name, path, record, error);
        }
        free(record);
    }
    if (list) closedir(list);
    return status;
}

/* Return 1 if a model is preferred to another: COMET, or BLEU if both have it, then size, then name. */
static int is_better(const moetext_local *a, const moetext_local *b) {
    if (a->comet >= 0 && b->comet >= 0 && (a->comet > b->comet || a->comet < b->comet)) return a->comet > b->comet;
    if (a->bleu >= 0 && b->bleu >= 0 && (a->bleu > b->bleu || a->bleu < b->bleu)) return a->bleu > b->bleu;
    if (a->bytes != b->bytes) return a->bytes < b->bytes;
    return strcmp(a->name, b->name) < 0;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const moetext_local *)a)->name, ((const moetext_local *)b)->name);
}

/* Sort by preference. The order of readdir has no influence, although some models lack a metric. */
static void sort(moetext_local *m, size_t n) {
    if (n) qsort(m, n, sizeof *m, by_name);
    for (size_t i = 1; i < n; i++)
        for (size_t k = i; k && is_better(&m[k], &m[k - 1]); k--) {
            const moetext_local swap = m[k];
            m[k] = m[k - 1], m[k - 1] = swap;
        }
}

/* Find the fetched models. */
static moe_status find_fetched(choice *c, moe_error *error) {
    char data[PATH_BYTES], cache[PATH_BYTES];
    moe_status status = MOE_OK;
    if (text_place_of_models(0, data, sizeof data, NULL) || text_place_of_models(1, cache, sizeof cache, NULL))
        return MOE_OK;
    DIR *list = opendir(data);
    for (struct dirent *entry; list && !status && (entry = readdir(list));)
        if (is_name(entry->d_name)) status = add_owner(c, data, cache, entry->d_name, error);
    if (list) closedir(list);
    sort(c->models, c->n);
    return status;
}

/* List all models, and open them as a set. */
static moe_status find_local(choice *c, moe_error *error) {
    char path[PATH_BYTES], name[NAME_BYTES];
    text_settings settings = text_settings_none();
    moe_status status = find_fetched(c, error);
    if (!status && text_place_of_shipped(path, sizeof path))
        status = add_model(c, text_model_name(path, name, sizeof name), path, NULL, error);
    c->local = calloc(c->n + 1, sizeof *c->local);
    c->all = calloc(c->n + 1, sizeof *c->all), c->paths = calloc(c->n + 2, sizeof *c->paths);
    if (!status && !(c->local && c->all && c->paths)) status = text_out_of_memory(error);
    for (size_t i = 0; i < c->n && !status; i++) c->local[i] = &c->models[i], c->all[i] = c->models[i].path;
    c->shown.local = c->local, c->shown.n_local = status ? 0 : c->n;
    settings.last_resort = c->n && c->models[c->n - 1].shipped;
    return status || !c->n ? status : text_set_open(c->all, c->n, &settings, &c->set, error);
}

/* ==== 3. The choice ===================================================================================== */

static int is_language(const char *code) {
    const size_t n = strspn(code, "abcdefghijklmnopqrstuvwxyz");
    return (n == 2 || n == 3) && !code[n];
}

static int has_way(const choice *c, const char *source, const char *target) {
    if (!c->set) return 0;
    const ptrdiff_t from = text_set_language(c->set, source), to = text_set_language(c->set, target);
    return from >= 0 && to >= 0 && text_set_hops(c->set, (size_t)from, (size_t)to) > 0;
}

/* Write a language as moe-get names it: pt for PT or pt_BR. zh-TW and codes of scripts remain, which are not those of
 * zh.
 */
static void write_code(const char *code, char out[64]) {
    size_t n = strcspn(code, "-_"), region = code[n] ? strlen(code + n + 1) : 0;
    snprintf(out, 64, "%s", code);
    if ((n != 2 && n != 3) || (region && (region > 3 || (n == 2 && strncasecmp(code, "zh", 2) == 0)))) return;
    for (size_t i = 0; i < n; i++) out[i] = (char)(isupper((unsigned char)code[i]) ? code[i] + 32 : code[i]);
    out[n] = 0;
}

/* Write the command that fetches a missing model. */
static void write_command(const choice *c, const char *source_code, const char *target_code, char out[160]) {
    char source[64] = "", target[64];
    write_code(target_code, target);
    if (source_code) write_code(source_code, source);
    const char *from = *source ? source : "en", *to = target;
    if (*source && strcmp(source, "en") != 0 && strcmp(target, "en") != 0) { /* through English? */
        if (has_way(c, source, "en")) from = "en";
        else if (has_way(c, "en", target)) to = "en";
    }
    if (!is_language(from) || !is_language(to)) {
        const size_t length = strcspn(target, "-_");
        snprintf(out, 160, "moe-get --search %.*s lists models", (int)(length < 60 ? length : 60), target);
    } else if (strcmp(from, to) == 0) snprintf(out, 160, "moe-get XX-%s fetches a model that translates from XX", to);
    else snprintf(out, 160, "fetch one: moe-get %s-%s", from, to);
    const size_t n = strlen(out);
    if (c->idle) snprintf(out + n, 160 - n, " (not converted: %.80s)", c->first_idle);
}

static moe_status no_model(const choice *c, const char *source, const char *target, moe_error *error) {
    char command[160];
    if (!c->n && c->damaged.code) return text_fail(error, c->damaged.code, "model", "%s", c->damaged.message);
    write_command(c, source, target, command);
    if (!c->n && !c->idle)
        return text_fail(error, MOE_ERROR_ARGUMENT, "model",
                         "no model is installed: name one, set MOE_MODEL to the path of one, or %s", command);
    return text_fail(error, MOE_ERROR_ARGUMENT, "target", "no model translates %s%.20s%sto %.20s; %s",
                     source ? "from " : "", source ? source : "", source ? " " : "", target, command);
}

static void take(choice *c, size_t file) {
    c->paths[c->shown.n_paths++] = c->all[file];
    if (c->shown.n_paths > 1) text_append_string(&c->name, " + ");
    text_append_string(&c->name, c->models[file].name);
}

/* Return the only source of a file for a target, or -1. */
static ptrdiff_t only_source(const choice *c, size_t file, size_t target) {
    ptrdiff_t found = -1;
    size_t n;
    text_set_languages(c->set, &n);
    for (size_t i = 0; i < n; i++) {
        if (i == target || !text_set_reads(c->set, file, i)) continue;
        if (found >= 0) return -1;
        found = (ptrdiff_t)i;
    }
    return found;
}

/* Choose a model for an unknown source. Fetched models of one direction must agree on the source. */
static moe_status choose_target(choice *c, size_t target, moe_error *error) {
    size_t n, first = SIZE_MAX;
    ptrdiff_t source = -1;
    const char *const *codes = text_set_languages(c->set, &n);
    for (size_t i = 0; i < c->n; i++) {
        if (!text_set_writes(c->set, i, target) || c->models[i].shipped) continue;
        const ptrdiff_t only = only_source(c, i, target);
        if (only >= 0 && source >= 0 && only != source)
            return text_fail(
                error, MOE_ERROR_ARGUMENT, "source",
                "models translate to %.20s from %.20s, %.20s and perhaps others; name the source language: "
                "-s %.20s",
                codes[target], codes[source], codes[only], codes[source]);
        if (only >= 0) source = only;
        if (first == SIZE_MAX) first = i;
    }
    if (first == SIZE_MAX && text_set_writes(c->set, c->n - 1, target)) first = c->n - 1; /* the shipped model */
    if (first == SIZE_MAX) return no_model(c, NULL, codes[target], error);
    return take(c, first), MOE_OK;
}

/* Choose all models that a text in an unknown language may need. */
static void choose_all(choice *c) {
    for (size_t i = 0; i < c->n; i++) take(c, i);
}

static moe_status choose(choice *c, const char *source, const char *target, moe_error *error) {
    const int automatic = source && strcmp(source, "auto") == 0;
    const ptrdiff_t to = c->set ? text_set_language(c->set, target) : -1;
    text_way way;
    if (automatic) source = NULL;
    if (to < 0) return no_model(c, source, target, error);
    if (automatic) return choose_all(c), MOE_OK;
    if (!source) return choose_target(c, (size_t)to, error);
    const ptrdiff_t from = text_set_language(c->set, source);
    if (from == to) return choose_target(c, (size_t)to, error); /* the translator reports it */
    if (from < 0 || text_set_way(c->set, (size_t)from, (size_t)to, &way, NULL))
        return no_model(c, source, target, error);
    for (size_t i = 0; i < way.n; i++) take(c, way.files[i]);
    return MOE_OK;
}

/* Use the model of MOE_MODEL, or without a target the default model. Return 0 if there is none. */
static int choose_default(choice *c, const char *target) {
    const char *named = getenv("MOE_MODEL");
    char name[NAME_BYTES];
    if (named && *named) {
        if ((c->named = text_copy(named, strlen(named)))) c->paths[c->shown.n_paths++] = c->named;
        text_append_string(&c->name, text_model_name(named, name, sizeof name));
        c->name.failed |= !c->named;
        return c->shown.named = 1;
    }
    if (target || !c->n) return 0;
    take(c, c->models[c->n - 1].shipped ? c->n - 1 : 0);
    return 1;
}

moe_status moetext_choose(const char *source, const char *target, moetext_choice **out, moe_error *error) {
    choice *c = calloc(1, sizeof *c);
    if (!c) return text_out_of_memory(error);
    if (source && !*source) source = NULL;
    if (target && !*target) target = NULL;
    moe_status status = find_local(c, error);
    if (!status && !choose_default(c, target)) {
        if (target) status = choose(c, source, target, error);
        else
            status = text_fail(error, MOE_ERROR_IO, "model",
                               "no model was named, and none is installed: name one, set MOE_MODEL to the path of one, "
                               "or fetch one: moe-get en-de");
    }
    if (!status && c->name.failed) status = text_out_of_memory(error);
    c->shown.paths = c->paths, c->shown.name = c->name.data;
    if (status) moetext_choice_free(&c->shown);
    else *out = &c->shown;
    return status;
}

void moetext_choice_free(moetext_choice *shown) {
    choice *c = (choice *)shown; /* its first member */
    if (!c) return;
    for (size_t i = 0; i < c->n; i++) free_local(&c->models[i]);
    text_set_close(c->set);
    free(c->models), free(c->local), free(c->all), free(c->paths), free(c->named);
    text_bytes_free(&c->name);
    free(c);
}

/* ==== 4. Memory ========================================================================================= */

/* Read all remembered choices: lines "SOURCE TARGET NAME". */
static void read_memory(const char *path, text_bytes *out) {
    char data[4096];
    FILE *file = open_regular(path);
    for (size_t n; file && out->length < RECORD_BYTES && (n = fread(data, 1, sizeof data, file));)
        text_append(out, data, n);
    if (file) fclose(file);
    text_append(out, "", 0);
}

/* Find the line of a direction. Return its name's offset and length, or 0. */
static size_t find_line(const text_bytes *all, const text_bytes *head, size_t *length) {
    for (size_t at = 0; at < all->length;) {
        const char *end = memchr(all->data + at, '\n', all->length - at);
        const size_t n = end ? (size_t)(end - all->data) - at : all->length - at;
        if (n > head->length && memcmp(all->data + at, head->data, head->length) == 0)
            return *length = n - head->length, at + head->length;
        at += n + 1;
    }
    return *length = 0;
}

/* Replace or add a line. A failure has no consequence other than a message that is repeated or missing. */
static void write_memory(const char *path, const text_bytes *all, const text_bytes *head, const char *name) {
    char partial[PATH_BYTES + 32];
    size_t length;
    text_bytes out = { 0 };
    const size_t at = find_line(all, head, &length), begin = length ? at - head->length : all->length,
                 end = length ? at + length + (at + length < all->length) : all->length;
    text_append(&out, all->data, begin);
    text_append(&out, all->data + end, all->length - end);
    text_append(&out, head->data, head->length);
    text_append_string(&out, name), text_append(&out, "\n", 1);
    snprintf(partial, sizeof partial, "%s.%ld", path, (long)getpid());
    const int fd = out.failed ? -1 : open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd >= 0) {
        const int done = write(fd, out.data, out.length) == (ssize_t)out.length;
        if ((close(fd) | !done) || rename(partial, path)) unlink(partial);
    }
    text_bytes_free(&out);
}

/* Return the name of the shipped model if it translates between these languages, or NULL. */
static const char *shipped_name(const choice *c, const char *source, const char *target) {
    const moetext_local *last = c->n ? &c->models[c->n - 1] : NULL;
    const ptrdiff_t from = last && source ? text_set_language(c->set, source) : -1,
                    to = last ? text_set_language(c->set, target) : -1;
    if (to < 0 || !last->shipped || !text_set_writes(c->set, c->n - 1, (size_t)to)) return NULL;
    return from < 0 || text_set_reads(c->set, c->n - 1, (size_t)from) ? last->name : NULL;
}

const char *text_choice_changed(const moetext_choice *shown, const char *source, const char *target, char *out,
                                size_t size) {
    const choice *c = (const choice *)shown;
    char folder[PATH_BYTES], path[PATH_BYTES + 16];
    text_bytes all = { 0 }, head = { 0 };
    size_t length;
    out[0] = '\0';
    if (shown->named || !target || !*target || !c->n || c->models[0].shipped ||
        text_place_of_models(1, folder, sizeof folder, NULL))
        return out;
    snprintf(path, sizeof path, "%s/%s", folder, memory_name);
    text_printf(&head, "%s %s ", source && *source ? source : "-", target);
    read_memory(path, &all);
    const size_t at = head.failed || all.failed ? 0 : find_line(&all, &head, &length);
    const char *usual = shipped_name(c, source, target), *before = at ? all.data + at : usual;
    const size_t n = at ? length : usual ? strlen(usual) : 0;
    const int same = before && text_is(before, n, shown->name);
    if (before && !same)
        snprintf(out, size, "translating with %s instead of %.*s; -m FILE or MOE_MODEL selects another model",
                 shown->name, (int)n, before);
    if (!same && !head.failed && !all.failed) write_memory(path, &all, &head, shown->name);
    text_bytes_free(&all), text_bytes_free(&head);
    return out;
}

/* ==== 5. Opening ======================================================================================== */

const char *const *text_choice_all(const moetext_choice *shown, size_t *n) {
    const choice *c = (const choice *)shown;
    return *n = c->n, c->all;
}

moe_status text_choice_open(const moetext_choice *shown, int all, const text_settings *given, moetext_model **out,
                            moe_error *error) {
    const choice *c = (const choice *)shown;
    text_settings settings = *given;
    const char *const *paths = all ? c->all : c->paths;
    const size_t n = all ? c->n : shown->n_paths;
    if (n == 1) return text_model_open(paths[0], &settings, out, error);
    settings.last_resort = n && n == c->n && c->models[n - 1].shipped;
    return text_models_open(paths, n, &settings, out, error);
}

moe_status moetext_model_open(const char *path, const char *options, moetext_model **out, moe_error *error) {
    text_settings settings = text_settings_none();
    moetext_choice *chosen = NULL;
    moe_status status = text_settings_parse(&settings, options, error);
    if (!status && path) return text_model_open(path, &settings, out, error);
    if (!status) status = moetext_choose(settings.source, settings.target, &chosen, error);
    if (!status) status = text_choice_open(chosen, 0, &settings, out, error);
    moetext_choice_free(chosen);
    return status;
}
