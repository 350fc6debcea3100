/* backend.c - open the models and a translator, and run its decoder until a reload replaces it. */
#define _GNU_SOURCE      /* st_mtim on Linux */
#define _DARWIN_C_SOURCE /* st_mtimespec on macOS */

#include "tools/server/server.h"
#include "tools/text/choice.h"
#include "tools/text/settings.h"
#include "tools/text/several.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#ifdef __APPLE__
#define st_mtim st_mtimespec
#endif

/* ---- Files --------------------------------------------------------------------------------------------- */

static uint64_t hash_number(uint64_t h, uint64_t number) { return (h ^ number) * UINT64_C(0x100000001b3); } /* FNV-1a */

static uint64_t hash_bytes(uint64_t h, const char *data, size_t n) {
    for (size_t i = 0; i < n; i++) h = hash_number(h, (unsigned char)data[i]);
    return h;
}

static uint64_t hash_text(uint64_t h, const char *text) { return hash_bytes(h, text, strlen(text) + 1); }

/* Hash the name, identity, size and time of a file, if it exists. */
static uint64_t hash_file(uint64_t h, const char *path) {
    struct stat found;
    h = hash_text(h, path);
    if (stat(path, &found)) return h;
    const int64_t marks[] = { (int64_t)found.st_dev, (int64_t)found.st_ino, (int64_t)found.st_size,
                              (int64_t)found.st_mtim.tv_sec, (int64_t)found.st_mtim.tv_nsec };
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) h = hash_number(h, (uint64_t)marks[i]);
    return h;
}

/* Hash the files of a folder in any order. */
static uint64_t hash_folder(uint64_t h, const char *path) {
    DIR *folder = opendir(path);
    uint64_t sum = 0;
    for (const struct dirent *entry; folder && (entry = readdir(folder));) {
        text_bytes file = { 0 };
        text_printf(&file, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.' && !file.failed) sum += hash_file(h, file.data);
        text_bytes_free(&file);
    }
    if (folder) closedir(folder);
    return hash_number(h, sum);
}

/* Hash a backend's inputs: the settings, the files they name (such as a glossary) and the models. */
static uint64_t stamp_of(const options *o) {
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (const char *at = o->settings.data; at && *at; at += strcspn(at, ";"), at += *at == ';') {
        char value[4096];
        const size_t length = strcspn(at, ";"), name = strcspn(at, "=");
        h = hash_bytes(h, at, length);
        if (name >= length || length - name > sizeof value || strncmp(at, "prompt", 6) == 0) continue;
        take_word(value, sizeof value, at + name + 1, length - name - 1);
        h = hash_file(h, value);
    }
    for (size_t i = 0; i < o->models.n; i++) h = hash_folder(hash_file(h, o->models.at[i]), o->models.at[i]);
    return o->models.n ? h : hash_file(h, o->model);
}

int backend_is_current(const backend *b, const options *o) { return b->stamp == stamp_of(o); }

/* ---- Models -------------------------------------------------------------------------------------------- */

static int has_mixtures(const moetext_model *model) {
    const moe_model *engine =
        moetext_model_engine(model); /* NULL for several models, which have no experts in common */
    return engine && moe_model_mixture_count(engine);
}

/* Reserve a quarter of the batch for clients with no texts in it. Otherwise a new client would have to wait for other
 * clients' sentences, which start together and end at about the same time, after reranking. */
static moe_status reserve_slots(backend *b) {
    const moe_model *engine = moetext_model_engine(b->model);
    text_settings wanted = text_settings_none();
    moe_session_params p = { .batch = 32 }; /* default for several models, none of which may be open yet */
    if (engine) p = moe_session_params_default(engine);
    const moe_status status = text_settings_parse(&wanted, b->settings.data, NULL);
    if (status) return status;
    text_settings_apply(&wanted, &p);
    b->routed = wanted.routing > 0 && has_mixtures(b->model);
    b->max_prompt = (size_t)p.max_source;
    b->samples = p.sample && p.beam == 1;
    b->sampling = p;
    b->greedy = p.temperature == 0;
    if (b->greedy && engine) /* requests that sample use the model's temperature */
        b->sampling.sample = 0, b->sampling.temperature = moe_session_params_default(engine).temperature;
    if (p.batch < 4) return MOE_OK;
    b->busy = (size_t)p.batch * 3 / 4;
    b->calm = b->busy - (size_t)p.batch / 4; /* free several slots at once: the encoder works on groups of sentences */
    return MOE_OK;
}

/* Set *answers to 1 if the model answers chat messages. */
static moe_status answers_messages(const moetext_model *model, int *answers, moe_error *error) {
    const moetext_message hello = { .role = MOETEXT_USER, .text = "" };
    size_t n;
    const moe_status status = moetext_model_prompt(model, &hello, 1, NULL, 0, &n, error);
    *answers = status == MOE_OK;
    return status == MOE_ERROR_MEMORY ? status : MOE_OK;
}

static int failed(const moe_error *error) {
    program_error("%s%s%s", error->where, error->where[0] ? ": " : "",
                  error->message[0] ? error->message : "out of memory");
    return error->code == MOE_ERROR_ARGUMENT ? EXIT_USAGE : EXIT_MODEL;
}

/* Make the translator. By default, enable alternatives, word links and experts for the web page. */
static int open_translator(backend *b) {
    static const char *const extras[] = {
        /* use the first entry that the beam and the model allow, with routing=1 if possible */
        ";nbest=3;alignment=1", ";nbest=2;alignment=1", ";alignment=1", ";nbest=3", ";nbest=2", ""
    };
    const size_t n = sizeof extras / sizeof *extras;
    moe_error error = { 0 };
    text_settings given = text_settings_none();
    text_settings_parse(&given, b->settings.data, NULL); /* cannot fail: the model was opened with the same settings */
    int sampled = !isnan(text_settings_param(&given, "sample"));
    for (size_t i = 0; moe_param_at(i); i++) sampled |= moe_param_at(i)->sampling && !isnan(given.params[i]);
    moe_status status = answers_messages(b->model, &b->answers, &error);
    if (b->answers && !sampled) text_append_string(&b->settings, ";sample=1;temperature=0");
    const size_t length = b->settings.length;
    const int chosen = b->answers || !isnan(text_settings_param(&given, "nbest")) || given.alignment >= 0;
    const int routed = given.routing < 0 && has_mixtures(b->model);
    b->guided = b->answers && !given.draft[0]; /* drafts and guided answers exclude each other */
    for (size_t i = chosen ? 2 * n - 2 : 0; i < 2 * n && status != MOE_ERROR_MEMORY; i++) {
        b->settings.length = length;
        text_append_string(&b->settings, extras[i / 2]);
        if (i % 2 == 0 && !routed) continue;
        if (i % 2 == 0) text_append_string(&b->settings, ";routing=1");
        if (b->settings.failed) break;
        text_settings all = text_settings_none();
        status = text_settings_parse(&all, b->settings.data, &error);
        all.guided = b->guided;
        all.warn = b->server->setup->options.quiet ? NULL : program_log;
        if (!status) status = text_translator_new(b->model, &all, &b->translator, &error);
        if (status) continue; /* without memory the loop ends: never answer with weaker settings */
        status = reserve_slots(b);
        if (!status) return -1;
        if (b->guided && i + 1 == 2 * n) b->guided = 0, i = chosen ? 2 * n - 3 : SIZE_MAX; /* a GPU: try again */
    }
    return failed(&error);
}

/* Open the language detector, if it is installed. Return -1, or an exit status after an error message. */
static int open_detector(backend *b) {
    size_t n = moetext_model_language_count(b->model);
    const char **codes = calloc(n + 1, sizeof *codes);
    for (size_t i = 0; codes && i < n; i++) codes[i] = moetext_model_language(b->model, i);
    moe_error error = { 0 };
    const moe_status status = codes ? text_detector_open(codes, n, &b->detector, &error) : MOE_ERROR_MEMORY;
    free(codes);
    if (status == MOE_ERROR_MEMORY) return program_error("out of memory"), EXIT_MODEL;
    if (status && !b->server->setup->options.quiet)
        program_error("language detection is not available: %s", error.message);
    return -1;
}

/* Find the languages that the authors of a chat model name. The model may be asked for others, which its prompts name,
 * but no interface lists them. Return -1, or an exit status after an error message. */
static int find_named(backend *b) {
    const char *at = moetext_model_meta(b->model, "languages.named");
    b->named = *at ? calloc(moetext_model_language_count(b->model) + 1, 1) : NULL;
    if (*at && !b->named) return program_error("out of memory"), EXIT_MODEL;
    size_t n_found = 0;
    for (size_t n; *at; at += n + strspn(at + n, " ")) {
        char code[36];
        n = strcspn(at, " ");
        take_word(code, sizeof code, at, n);
        const ptrdiff_t language = moetext_model_language_find(b->model, code);
        if (language >= 0) b->named[language] = 1, n_found++;
    }
    if (!n_found) free(b->named), b->named = NULL;
    return -1;
}

static moe_status open_models(backend *b, const options *o, moe_error *error) {
    text_settings settings = text_settings_none();
    if (!o->several) return moetext_model_open(o->model, b->settings.data, &b->model, error);
    if (!o->choice) return moetext_models_open(o->models.at, o->models.n, b->settings.data, &b->model, error);
    const moe_status status = text_settings_parse(&settings, b->settings.data, error);
    return status ? status : text_choice_open(o->choice, 1, &settings, &b->model, error);
}

int backend_open(server *s, const options *o, backend **out) {
    moe_error error = { 0 };
    backend *b = calloc(1, sizeof *b);
    if (!b) return program_error("out of memory"), EXIT_MODEL;
    b->server = s, b->name = o->model, b->began = time(NULL), b->stamp = stamp_of(o);
    pthread_cond_init(&b->filled, NULL);
    text_append(&b->settings, o->settings.data ? o->settings.data : "", o->settings.length);
    int status = -1;
    if (open_models(b, o, &error)) {
        program_file_error(o->several ? NULL : o->model, &error);
        status = error.code == MOE_ERROR_ARGUMENT ? EXIT_USAGE : EXIT_MODEL;
    }
    if (status < 0) status = open_translator(b);
    if (status < 0) status = open_detector(b);
    if (status < 0) status = find_named(b);
    if (status < 0) return *out = b, -1;
    backend_free(b);
    return status;
}

void backend_free(backend *b) {
    if (!b) return;
    moe_error e;
    if (b->translator && moetext_save_prompts(b->translator, &e)) program_error("%s", e.message);
    text_detector_close(b->detector);
    moetext_free(b->translator);
    moetext_model_close(b->model);
    text_bytes_free(&b->settings);
    free(b->named);
    text_bytes_free(&b->token_bytes);
    free(b->token_ends);
    pthread_cond_destroy(&b->filled);
    free(b);
}

void backends_free(server *s) {
    backend *oldest = NULL;
    for (backend *b = s->backend, *previous; b; b = previous) previous = b->previous, b->previous = oldest, oldest = b;
    for (backend *b = oldest, *next; b; b = next) next = b->previous, backend_free(b);
    s->backend = NULL;
}

/* ---- Decoder ------------------------------------------------------------------------------------------- */

int backend_start(backend *b) {
    if (!pthread_create(&b->decoder, NULL, requests_decode, b)) return -1;
    return program_error("cannot start a thread"), EXIT_MODEL;
}

void backend_save(backend *b, double seconds) {
    const double end = program_seconds() + seconds;
    const struct timespec tick = { .tv_nsec = 10000000 };
    if (!b->settings.data || !strstr(b->settings.data, "prompt-cache=")) return;
    pthread_mutex_lock(&b->server->lock);
    if (!b->decoded) b->saving = WILL_SAVE;
    pthread_cond_broadcast(&b->filled);
    while (b->saving == SAVING || (b->saving && program_seconds() < end)) {
        pthread_mutex_unlock(&b->server->lock);
        nanosleep(&tick, NULL);
        pthread_mutex_lock(&b->server->lock);
    }
    b->saving = NOT_SAVING;
    pthread_cond_broadcast(&b->filled);
    pthread_mutex_unlock(&b->server->lock);
}

void backends_replace(server *s, backend *b) {
    pthread_mutex_lock(&s->lock);
    b->previous = s->backend;
    if (b->previous) b->previous->closing = 1;
    s->backend = b;
    s->failing.target[0] = 0;
    pthread_mutex_unlock(&s->lock);
}

void backends_tidy(server *s) {
    backend *ended = NULL;
    pthread_mutex_lock(&s->lock);
    for (backend **at = s->backend ? &s->backend->previous : &ended; *at;) {
        backend *b = *at;
        if (!b->holders) pthread_cond_broadcast(&b->filled);
        if (b->holders || !b->decoded) at = &b->previous;
        else *at = b->previous, b->previous = ended, ended = b;
    }
    pthread_mutex_unlock(&s->lock);
    for (backend *next; ended; ended = next) {
        next = ended->previous;
        pthread_join(ended->decoder, NULL);
        backend_free(ended);
    }
}

void backends_end(server *s) {
    for (backend *b = s->backend; b; b = b->previous) moetext_cancel(b->translator);
    for (backend *b = s->backend; b; b = b->previous) pthread_join(b->decoder, NULL);
}
