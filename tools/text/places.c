/* places.c - see places.h, and moetext.h for moetext_default_model. */
#define _GNU_SOURCE      /* dladdr on Linux */
#define _DARWIN_C_SOURCE /* dladdr on macOS */

#include "tools/text/places.h"
#include "tools/text/bytes.h"
#include "tools/text/contained.h"
#include "tools/text/moetext.h"
#include "tools/text/system.h"

#include <dlfcn.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int text_place_of_self(char *out, size_t size) {
    Dl_info info;
    char *path = NULL;
    if (dladdr((const void *)(uintptr_t)moetext_default_model, &info) && info.dli_fname && strchr(info.dli_fname, '/'))
        path = realpath(info.dli_fname, NULL);
    if (!path) path = realpath("/proc/self/exe", NULL); /* for a program found on PATH */
#ifdef __linux__
    const char *started = path ? NULL : (const char *)(uintptr_t)getauxval(AT_EXECFN); /* there may be no /proc */
    if (started && strchr(started, '/')) path = realpath(started, NULL);
#endif
    const size_t n = path ? strlen(path) : size;
    if (n < size) memcpy(out, path, n + 1);
    free(path);
    return n < size;
}

/* Set `out` to the folder of the program or library that contains this code. Return 0 if unknown. */
static int own_folder(char *out, size_t size) {
    char *end = text_place_of_self(out, size) ? strrchr(out, '/') : NULL;
    if (end) *end = '\0';
    return end != NULL;
}

/* Find the program that contains a model and all programs (tools/dist). */
static int is_whole(char *path, size_t size) {
    text_contained model;
    return text_place_of_self(path, size) && text_find_contained(path, &model);
}

static int exists(const char *folder, const char *place, const char *name, char *path, size_t size) {
    char written[4096 + 64];
    const int length = snprintf(written, sizeof written, "%s/%s%s", folder, place, name);
    if (length < 0 || (size_t)length >= sizeof written || access(written, R_OK)) return 0;
    char *found = realpath(written, NULL); /* resolve bin/.. for messages */
    const size_t n = found ? strlen(found) : size;
    if (n < size) memcpy(path, found, n + 1);
    free(found);
    return n < size;
}

/* Find a file near this code, which may be installed in bin, lib or lib/TRIPLET, or in a repository or Python package
 * with the file in the folder `here`. */
static int is_near(const char *here, const char *name, char *path, size_t size) {
    char folder[4096];
    const char *const places[] = { "../share/moe/", "../../share/moe/", here };
    if (!own_folder(folder, sizeof folder)) return 0;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (exists(folder, places[i], name, path, size)) return 1;
    return 0;
}

/* Find a file in `place` relative to the folders of programs, for a program that contains the library or is in a
 * virtual environment. */
static int is_installed(const char *place, const char *name, char *path, size_t size) {
    static const char usual[] = "/usr/local/bin:/usr/bin";
    const char *const lists[] = { getenv("PATH"), usual };
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (const char *at = lists[i]; at && *at;) {
            const size_t length = strcspn(at, SYSTEM_LIST);
            char folder[4096];
            if (system_is_absolute(at) && length < sizeof folder) {
                memcpy(folder, at, length), folder[length] = '\0';
                if (exists(folder, place, name, path, size)) return 1;
            }
            at += length + (at[length] != '\0');
        }
    return 0;
}

int text_place_of_data(const char *name, char *path, size_t size) { return is_near("", name, path, size); }

moe_status text_place_of_models(int converted, char *path, size_t size, moe_error *error) {
    const char *variable = converted ? "XDG_CACHE_HOME" : "XDG_DATA_HOME";
    const char *base = getenv(variable), *home = getenv(SYSTEM_HOME);
    int length = -1;
    if (base && system_is_absolute(base))
        length = snprintf(path, size, "%s/moe", base); /* relative paths are invalid */
    else if (home && system_is_absolute(home))
        length = snprintf(path, size, "%s/%s", home, converted ? SYSTEM_CACHE : SYSTEM_DATA);
    else
        return text_fail(error, MOE_ERROR_IO, "store",
                         "no folder for models: set " SYSTEM_HOME " or %s to an absolute path", variable);
    if (length > 0 && (size_t)length < size) return system_use_slashes(path), MOE_OK;
    return text_fail(error, MOE_ERROR_IO, "store", "the path of the folder for models is too long");
}

int text_place_of_shipped(char *path, size_t size) {
    static const char name[] = "en-de-fr-es.bin";
    text_contained model;
    return is_whole(path, size) || is_near("models/", name, path, size) ||
           is_installed("../share/moe/", name, path, size) ||
           (is_installed("", "moe" SYSTEM_PROGRAM, path, size) && text_find_contained(path, &model));
}

int text_place_of_program(const char *program, char *path, size_t size) {
    char folder[4096], name[256];
    snprintf(name, sizeof name, "%s" SYSTEM_PROGRAM, program);
    const int known = own_folder(folder, sizeof folder);
    return (known && (exists(folder, "", name, path, size) || exists(folder, "../bin/", name, path, size))) ||
           is_whole(path, size) || is_installed("", name, path, size);
}

moe_status moetext_default_model(char *path, size_t size, moe_error *error) {
    const char *named = getenv("MOE_MODEL");
    char found[8192];
    if (named && *named) snprintf(found, sizeof found, "%s", named);
    else if (!text_place_of_shipped(found, sizeof found))
        return text_fail(
            error, MOE_ERROR_IO, "model",
            "no model was named, and none is installed: name one, set MOE_MODEL to the path of one, or run "
            "`make install` in the repository of moe");
    const size_t length = strlen(named && *named ? named : found);
    if (length >= size || length >= sizeof found)
        return text_fail(error, MOE_ERROR_ARGUMENT, "model", "the path of the default model is too long");
    memcpy(path, found, length + 1);
    return MOE_OK;
}
