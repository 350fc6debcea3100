/* web.c - the functions of moe.wasm that moe.mjs calls, for one model and its translator. Strings are NUL-terminated
 * UTF-8. web_open, web_prepare and web_translate return a moe_status; web_message describes the failure. */
#define _POSIX_C_SOURCE 200809L

#include "moe.h"
#include "tools/text/moetext.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT(name) __attribute__((export_name(#name), used)) name

typedef struct web {
    moetext_model *model;
    moetext *translator;
    char *options; /* that the translator has */
    void *file;    /* [bytes] the model, which the engine uses in place */
    size_t bytes;
    char *text; /* [length] the last translation, with a NUL */
    size_t length;
    moe_error error;
} web;

typedef struct web_job {
    moetext_request request;
    int pulled;
    web *w;
    moe_status status;
} web_job;

web *EXPORT(web_new)(void) { return calloc(1, sizeof(web)); }

void EXPORT(web_free)(web *w) {
    if (!w) return;
    moetext_free(w->translator);
    moetext_model_close(w->model);
    free(w->options), free(w->file), free(w->text), free(w);
}

/* Return memory for the `bytes` bytes of a model file, or NULL. */
void *EXPORT(web_reserve)(web *w, size_t bytes) {
    w->bytes = bytes;
    return w->file = bytes < SIZE_MAX / 2 ? aligned_alloc(64, (bytes + 64) / 64 * 64) : NULL;
}

void *EXPORT(web_allocate)(size_t bytes) { return malloc(bytes); }
void EXPORT(web_release)(void *memory) { free(memory); }
const char *EXPORT(web_message)(const web *w) { return w->error.message; }
const char *EXPORT(web_text)(const web *w) { return w->text; }
size_t EXPORT(web_length)(const web *w) { return w->length; }
const char *EXPORT(web_version)(void) { return moetext_version(); }

int EXPORT(web_open)(web *w, const char *name, const char *options) {
    const moe_source source = { .name = name, .data = w->file, .bytes = w->bytes };
    return (int)moetext_model_open_source(&source, options, &w->model, &w->error);
}

/* Return the code of language `i`, or NULL after the last. */
const char *EXPORT(web_language)(const web *w, size_t i) { return moetext_model_language(w->model, i); }
const char *EXPORT(web_meta)(const web *w, const char *key) { return moetext_model_meta(w->model, key); }
int EXPORT(web_needs_source)(const web *w) { return moetext_model_needs_source(w->model); }

/* Return the name of option `i` and whether it belongs to the model, or NULL after the last. */
const char *EXPORT(web_option)(size_t i) { return moetext_option(i).name; }
int EXPORT(web_option_of_model)(size_t i) { return moetext_option(i).of_model; }

/* Create the translator for these options, unless the current one has them. */
int EXPORT(web_prepare)(web *w, const char *options) {
    if (w->translator && !strcmp(w->options, options)) return MOE_OK;
    char *copy = strdup(options);
    moetext_free(w->translator); /* first, because a session may need most of the memory */
    w->translator = NULL;
    free(w->options);
    w->options = copy;
    if (copy) return (int)moetext_new(w->model, options, &w->translator, &w->error);
    strcpy(w->error.message, "out of memory");
    return MOE_ERROR_MEMORY;
}

static int web_pull(void *user, int wait, moetext_request *request) {
    web_job *job = user;
    (void)wait;
    if (job->pulled++) return MOE_PULL_END;
    *request = job->request;
    return MOE_PULL_REQUEST;
}

static void web_done(void *user, const moetext_result *result) {
    web_job *job = user;
    web *w = job->w;
    const moetext_hypothesis *best = result->hypotheses;
    job->status = result->status;
    if (result->status) {
        strncpy(w->error.message, result->message, sizeof w->error.message - 1);
        return;
    }
    w->length = result->n_hypotheses ? best->length : 0;
    w->text = malloc(w->length + 1);
    if (!w->text) {
        strcpy(w->error.message, "out of memory");
        job->status = MOE_ERROR_MEMORY;
        return;
    }
    if (w->length) memcpy(w->text, best->text, w->length);
    w->text[w->length] = 0;
}

/* Translate a text. Languages that are NULL are taken from the options. web_text and web_length return the result. */
int EXPORT(web_translate)(web *w, const char *text, size_t length, const char *source, const char *target) {
    web_job job = { { .text = text, .length = length, .source = source, .target = target }, 0, w, MOE_OK };
    free(w->text);
    w->text = NULL, w->length = 0;
    const moe_status status = moetext_translate(w->translator, web_pull, web_done, &job, &w->error);
    return (int)(status ? status : job.status);
}
