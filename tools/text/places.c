/* places.c - places.h says what this is; moetext_default_model is declared in moetext.h. */
#define _GNU_SOURCE      /* dladdr on Linux */
#define _DARWIN_C_SOURCE /* and on macOS    */

#include "tools/text/places.h"
#include "tools/text/moetext.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The folder of the program or library that holds this code; 0: it cannot be told. `out` [size] */
static int own_folder(char *out, size_t size) {
    Dl_info info;
    char *path = NULL;
    if (dladdr((const void *)(uintptr_t)moetext_default_model, &info) && info.dli_fname && strchr(info.dli_fname, '/'))
        path = realpath(info.dli_fname, NULL);
    if (!path) path = realpath("/proc/self/exe", NULL); /* a program that was found on PATH */
    char *end = path ? strrchr(path, '/') : NULL;
    const int fits = end && (size_t)(end - path) < size;
    if (fits) memcpy(out, path, (size_t)(end - path)), out[end - path] = '\0';
    free(path);
    return fits;
}

static int is_there(const char *folder, const char *place, const char *name, char *path, size_t size) {
    char written[4096 + 64];
    const int length = snprintf(written, sizeof written, "%s/%s%s", folder, place, name);
    if (length < 0 || (size_t)length >= sizeof written || access(written, R_OK)) return 0;
    char *found = realpath(written, NULL); /* messages name it: without bin/.. */
    const size_t n = found ? strlen(found) : size;
    if (n < size) memcpy(path, found, n + 1);
    free(found);
    return n < size;
}

/* Beside the code: installed into bin or lib, into lib/TRIPLET, or built in a repository or a package of Python, whose
 * own folder for `name` is `here`. */
static int is_beside(const char *here, const char *name, char *path, size_t size) {
    char folder[4096];
    const char *const places[] = { "../share/moe/", "../../share/moe/", here };
    if (!own_folder(folder, sizeof folder)) return 0;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (is_there(folder, places[i], name, path, size)) return 1;
    return 0;
}

/* A program that has the library inside it, or one in a virtual environment, may lie anywhere: what was installed for
 * everybody, or for whoever calls it, is where the installed programs are found. */
static int is_installed(const char *name, char *path, size_t size) {
    static const char usual[] = "/usr/local/bin:/usr/bin";
    const char *const lists[] = { getenv("PATH"), usual };
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (const char *at = lists[i]; at && *at;) {
            const size_t length = strcspn(at, ":");
            char folder[4096];
            if (*at == '/' && length < sizeof folder) { /* never below the folder that it happens to run in */
                memcpy(folder, at, length), folder[length] = '\0';
                if (is_there(folder, "../share/moe/", name, path, size)) return 1;
            }
            at += length + (at[length] == ':');
        }
    return 0;
}

int text_place_of_data(const char *name, char *path, size_t size) { return is_beside("", name, path, size); }

static moe_status refuse(moe_error *error, moe_status code, const char *message) {
    if (!error) return code;
    *error = (moe_error){ .code = code, .where = "model" };
    snprintf(error->message, sizeof error->message, "%s", message);
    return code;
}

moe_status moetext_default_model(char *path, size_t size, moe_error *error) {
    static const char name[] = "en-de-fr-es.bin";
    const char *named = getenv("MOE_MODEL");
    char found[8192];
    if (named && *named) snprintf(found, sizeof found, "%s", named);
    else if (!is_beside("models/", name, found, sizeof found) && !is_installed(name, found, sizeof found))
        return refuse(error, MOE_ERROR_IO,
                      "no model was named, and none is installed: name one, set MOE_MODEL to the path of one, or run "
                      "`make install` in the repository of moe");
    const size_t length = strlen(named && *named ? named : found);
    if (length >= size || length >= sizeof found)
        return refuse(error, MOE_ERROR_ARGUMENT, "the path of the default model is too long");
    memcpy(path, found, length + 1);
    return MOE_OK;
}
