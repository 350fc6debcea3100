/* default_model.c - where the model lies that is used when none is named. */
#define _GNU_SOURCE      /* dladdr on Linux */
#define _DARWIN_C_SOURCE /* and on macOS    */

#include "tools/text/moetext.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The folder of the program or library that holds this code; 0: it cannot be told. `out` [PATH_MAX] */
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

moe_status moetext_default_model(char *path, size_t size, moe_error *error) {
    static const char *const places[] = { "../share/moe", "../../share/moe",
                                          "models" }; /* bin, lib/TRIPLET, repository */
    const char *named = getenv("MOE_MODEL");
    char folder[4096];
    if (named && *named && (size_t)snprintf(path, size, "%s", named) < size) return MOE_OK;
    if (!(named && *named) && own_folder(folder, sizeof folder))
        for (size_t i = 0; i < sizeof places / sizeof *places; i++)
            if ((size_t)snprintf(path, size, "%s/%s/en-de-fr-es.bin", folder, places[i]) < size && !access(path, R_OK))
                return MOE_OK;
    if (!error) return MOE_ERROR_IO;
    *error = (moe_error){ .code = MOE_ERROR_IO, .where = "MOE_MODEL" };
    snprintf(error->message, sizeof error->message,
             "there is no default model here: name one, or set the environment's MOE_MODEL to its path");
    return MOE_ERROR_IO;
}
