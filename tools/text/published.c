/* published.c - see published.h. */
#define _GNU_SOURCE      /* getentropy on Linux */
#define _DARWIN_C_SOURCE /* the same on macOS */

#include "tools/text/published.h"
#include "tools/convert/convert.h"
#include "tools/convert/packed.h"
#include "tools/get/sha256.h"
#include "tools/text/places.h"
#include "tools/text/system.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __APPLE__
#include <sys/random.h> /* getentropy */
#endif

enum { PATH_BYTES = 4096, NAME = 64, HASH = 16 };

int text_is_published(const char *path) { return convert_guess(path) != CONVERT_NONE; }

/* ---- The name of a conversion ---- */

typedef struct conversion {
    char folder[PATH_BYTES]; /* CACHE/files */
    char prefix[NAME + HASH + 8], path[PATH_BYTES + 2 * NAME];
} conversion;

/* Set the path of the conversion of a source. */
static moe_status name_conversion(const char *path, conversion *c, moe_error *error) {
    char place[SHA256_TEXT], source[SHA256_TEXT], name[NAME];
    char *real = realpath(path, NULL);
    sha256 s;
    if (!real) return text_fail(error, MOE_ERROR_IO, "", "cannot open %.160s: %s", path, strerror(errno));
    moe_status status = text_place_of_models(1, c->folder, sizeof c->folder - 8, error);
    if (!status) snprintf(c->folder + strlen(c->folder), 8, "/files");
    sha256_begin(&s);
    sha256_add(&s, real, strlen(real));
    sha256_end(&s, place);
    snprintf(name, sizeof name, "%s", packed_base(real));
    for (char *p = name; *p; p++)
        if (!strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-", *p)) *p = '_';
    if (*name == '.') *name = '_';
    if (!status) status = convert_identify(real, source, error);
    free(real);
    if (status) return status;
    snprintf(c->prefix, sizeof c->prefix, "%s-%.*s-", name, HASH, place);
    snprintf(c->path, sizeof c->path, "%s/%s%.*s.bin", c->folder, c->prefix, HASH, source);
    return MOE_OK;
}

/* Create a folder and its parents. */
static moe_status make_folder(const char *path, moe_error *error) {
    char part[PATH_BYTES];
    snprintf(part, sizeof part, "%s", path);
    for (char *p = part + 1; *p; p++) {
        if (*p != '/') continue;
        *p = 0;
        mkdir(part, 0777);
        *p = '/';
    }
    if (mkdir(part, 0777) == 0 || errno == EEXIST) return MOE_OK;
    return text_fail(error, MOE_ERROR_IO, "", "cannot create %.160s: %s; --no-cache converts without it", path,
                     strerror(errno));
}

/* Remove earlier conversions of the same source, also unfinished ones. */
static void remove_others(const conversion *c) {
    packed_names names = { 0 };
    char path[PATH_BYTES + 256];
    if (packed_list(c->folder, &names, NULL)) return;
    for (size_t i = 0; i < names.n; i++) {
        const char *name = names.data[i];
        const size_t length = strlen(name);
        if (!text_begins_with(name, length, c->prefix)) continue;
        if (snprintf(path, sizeof path, "%s/%s", c->folder, name) < (int)sizeof path && strcmp(path, c->path) != 0)
            unlink(path);
    }
    packed_names_free(&names);
}

/* ---- Opening ---- */

typedef struct report {
    const char *path, *folder; /* folder: of the conversion */
    int cached;
} report;

static void print_note(void *user, const char *message) {
    const report *r = user;
    fprintf(stderr, "%s: %s\n", r->path, message);
}

static void print_begin(void *user, uint64_t bytes, uint64_t source) {
    const report *r = user;
    char larger[64] = "";
    if (bytes > source) snprintf(larger, sizeof larger, ", larger than the published %.0f MB", (double)source / 1e6);
    fprintf(stderr, "converting %s %s %s, to %.0f MB%s\n", r->path, r->cached ? "once, in" : "for this run, in",
            r->folder, (double)bytes / 1e6, larger);
}

/* Remove the name of the source from an error: the caller writes it. Files in a folder remain. */
static moe_status without_name(const char *path, moe_status status, moe_error *error) {
    const char *name = packed_base(path);
    const size_t length = strlen(name);
    if (!status || !error) return status;
    error->where[0] = 0;
    if (strncmp(error->message, name, length) == 0 && strncmp(error->message + length, ": ", 2) == 0)
        memmove(error->message, error->message + length + 2, strlen(error->message + length + 2) + 1);
    return status;
}

static moe_status convert(const char *path, const char *out, const char *folder, int cached, moe_error *error) {
    report r = { path, folder, cached };
    const convert_options options = { .path = path,
                                      .type = MOE_TYPE_KEEP,
                                      .experts = MOE_TYPE_KEEP,
                                      .note = print_note,
                                      .begin = print_begin,
                                      .user = &r,
                                      .resume = cached };
    return without_name(path, convert_model(&options, out, error), error);
}

/* Convert to a file with a random name, and remove the name once the model is open. */
static moe_status open_once(const char *path, const moe_model_params *params, moe_model **out, moe_error *error) {
    const char *folder = getenv(SYSTEM_TEMPORARY);
    moe_model_params once = *params;
    unsigned char random[16];
    char name[PATH_BYTES], digest[SHA256_TEXT];
    sha256 s;
    if (getentropy(random, sizeof random))
        return text_fail(error, MOE_ERROR_IO, "", "cannot get random bytes: %s", strerror(errno));
    if (!folder || !*folder) folder = SYSTEM_TEMPORARY_DEFAULT;
    once.copy |= SYSTEM_IS_WINDOWS; /* which does not remove a mapped file */
    sha256_begin(&s);
    sha256_add(&s, random, sizeof random);
    sha256_end(&s, digest);
    if (snprintf(name, sizeof name, "%s/moe-%.32s.bin", folder, digest) >= (int)sizeof name)
        return text_fail(error, MOE_ERROR_IO, "", "the path in " SYSTEM_TEMPORARY " is too long");
    moe_status status = convert(path, name, folder, 0, error);
    if (status) return status;
    status = moe_model_open(name, &once, out, error);
    unlink(name);
    return status;
}

/* Open an earlier conversion. Set *out to NULL if it is missing or damaged; a damaged one is removed. */
static moe_status open_earlier(const char *path, const moe_model_params *params, moe_model **out, moe_error *error) {
    *out = NULL;
    if (access(path, R_OK) != 0) return MOE_OK;
    moe_status status = moe_model_open(path, params, out, error);
    if (!status && params->verify >= 0 && moe_model_file_bytes(*out) <= MOE_VERIFY_BYTES &&
        (status = moe_model_verify(*out, error)))
        moe_model_close(*out);
    if (status) *out = NULL;
    if (status == MOE_ERROR_FORMAT) unlink(path);
    return status == MOE_ERROR_MEMORY ? status : MOE_OK;
}

moe_status text_published_open(const char *path, int cached, const moe_model_params *params, moe_model **out,
                               moe_error *error) {
    conversion c;
    if (!cached) return open_once(path, params, out, error);
    moe_status status = name_conversion(path, &c, error);
    if (!status) status = open_earlier(c.path, params, out, error);
    if (!status && *out) return MOE_OK;
    if (!status) status = make_folder(c.folder, error);
    if (!status) status = convert(path, c.path, c.folder, 1, error);
    if (!status) status = moe_model_open(c.path, params, out, error);
    if (!status) remove_others(&c);
    return status;
}
