/* moe-get - fetch published models by name. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/convert/convert.h"
#include "tools/convert/decoder.h"
#include "tools/convert/gguf.h"
#include "tools/convert/prompts.h"
#include "tools/get/fetch.h"
#include "tools/get/sources.h"
#include "tools/get/store.h"
#include "tools/programs/console.h"
#include "tools/programs/options.h"
#include "tools/text/bytes.h"
#include "tools/text/json.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

typedef struct options {
    int list, accept, small, quiet, dry_run, no_convert, json, timeout, retries;
    const char *search;
} options;

static const option_row own_rows[] = {
    { "list", NULL, "list fetched models", .group = "Lists", .letter = 'l', OPTION_FLAG(list) },
    { "search", "WORD", "list models with WORD in their names or descriptions", .group = "Lists",
      OPTION_MEMBER(ROW_WORD, search), .more = ", such as a language code" },
    { "json", NULL, "print --list and --search as JSON", .group = "Lists", OPTION_FLAG(json) },
    { "accept-licence", NULL, "accept a licence that does not permit commercial use", .group = "Fetching",
      OPTION_FLAG(accept) },
    { "small", NULL, "prefer Firefox's smallest model of a pair to the best one", .group = "Fetching",
      OPTION_FLAG(small) },
    { "dry-run", NULL, "print size, licence and files; fetch none", .group = "Fetching", .letter = 'n',
      OPTION_FLAG(dry_run) },
    { "no-convert", NULL, "do not convert the model", .group = "Fetching", OPTION_FLAG(no_convert) },
    { "quiet", NULL, "print only errors and the path of the model", .group = "Fetching", .letter = 'q',
      OPTION_FLAG(quiet) },
    { "timeout", "SECONDS", "give up a connection that delivers less than 1 KB/s for this long (default 60)",
      .group = "Network", OPTION_INT(timeout, 1, 3600) },
    { "retries", "N", "attempts to continue a broken download without progress (default 5)", .group = "Network",
      OPTION_INT(retries, 0, 100) },
    { 0 },
};

static const option_program program = {
    .name = "moe-get",
    .usage = "[OPTION]... MODEL...\nrm MODEL...\n--list\n--search WORD",
    .about = "Fetch published models, verify their checksums, and print where they are. An interrupted download "
             "continues when you repeat the command. Without a command of yours no program here uses the network.\n"
             "\n"
             "MODEL:\n"
             "  en-pt            a pair of languages: Firefox's model, or else OPUS-MT's\n"
             "  nllb, hy-mt2, marco-mini and others: --search '' lists them\n"
             "  OWNER/NAME       a repository of Hugging Face, at OWNER/NAME@REVISION,\n"
             "  OWNER/NAME/FILE  or one file of it, such as a GGUF",
    OPTION_LISTS(OPTION_OWN),
    .notes = "Models are in $XDG_DATA_HOME/moe (~/.local/share/moe), their conversions in $XDG_CACHE_HOME/moe "
             "(~/.cache/moe).\n"
             "\n"
             "Environment: HF_TOKEN (or the file ~/.cache/huggingface/token) for models with terms that you accepted, "
             "HF_ENDPOINT for a mirror of Hugging Face, HF_HUB_OFFLINE=1 to forbid the network, MOE_FIREFOX_INDEX for "
             "another index of Firefox's models, https_proxy, no_proxy, SSL_CERT_FILE.\n"
             "\n"
             "Exit status: 0 done, 2 usage error or licence not accepted, 3 no such model, damaged, or out of memory, "
             "4 network or file error, 128 + N stopped by signal N.\n",
    .examples = "  moe-get en-pt\n"
                "  moe-get --accept-licence nllb-600m\n"
                "  moe-get --dry-run Helsinki-NLP/opus-mt-de-fr\n"
                "  moe-get rm en-pt\n",
    .exclusions = (const char *const[]){ "list search dry-run small accept-licence",
                                         "search dry-run small "
                                         "accept-licence",
                                         NULL },
    .least = 0,
    .most = 1000,
};

/* What a run shares among the models that it fetches. */
typedef struct getter {
    const options *o;
    fetch *net;   /* NULL until it is needed */
    cJSON *index; /* Firefox's, NULL until it is needed */
    char *index_url;
    char token[512];
    size_t file, files; /* progress: the current file, from 1, and all */
    int terminal;
    double begin, shown, rate; /* seconds, seconds, bytes per second */
    uint64_t seen;             /* bytes of the current file when the rate was measured; SOURCE_UNKNOWN before */
} getter;

/* ---- 1. Signals, progress and messages ----------------------------------------------------------------- */

static volatile sig_atomic_t stop_signal;

static void on_signal(int number) {
    if (stop_signal) signal(number, SIG_DFL), raise(number); /* the second signal ends the program */
    stop_signal = number;
}

/* Note signals, or let them end the program again: the converter then stops and removes its file. */
static void handle_signals(int note) {
    static const int numbers[] = { SIGINT, SIGTERM, SIGHUP };
    struct sigaction action = { .sa_handler = note ? on_signal : SIG_DFL }, before;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (sigaction(numbers[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(numbers[i], &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

/* Format a number of bytes, such as 17.1 MB. */
static const char *megabytes(uint64_t bytes, char out[32]) {
    const double d = (double)bytes;
    if (bytes < 1000) snprintf(out, 32, "%d bytes", (int)bytes);
    else
        snprintf(out, 32,
                 d >= 1e9   ? "%.1f GB"
                 : d >= 1e6 ? "%.1f MB"
                            : "%.1f kB",
                 d * (d >= 1e9   ? 1e-9
                      : d >= 1e6 ? 1e-6
                                 : 1e-3));
    return out;
}

static void measure_rate(getter *g, uint64_t bytes, double now) {
    if (g->seen == SOURCE_UNKNOWN || bytes < g->seen) g->rate = 0;
    else if (now > g->shown) {
        const double current = (double)(bytes - g->seen) / (now - g->shown);
        g->rate = g->rate > 0 ? 0.8 * g->rate + 0.2 * current : current;
    }
    g->seen = bytes, g->shown = now;
}

static void on_progress(void *user, const char *name, uint64_t bytes, uint64_t all) {
    getter *g = user;
    char line[512], done[32], whole[32], rate[32];
    const double now = program_seconds();
    if (!g->terminal || (g->seen != SOURCE_UNKNOWN && now - g->shown < 0.25)) return;
    measure_rate(g, bytes, now);
    const char *cut = strlen(name) > 16 ? "..." : ""; /* the line fits 80 columns */
    int n = snprintf(line, sizeof line, "[%zu/%zu] %.*s%s  %s", g->file, g->files, *cut ? 13 : 16, name, cut,
                     megabytes(bytes, done));
    if (all != SOURCE_UNKNOWN)
        n += snprintf(line + n, sizeof line - (size_t)n, " of %s (%.0f%%)", megabytes(all, whole),
                      all ? 100 * (double)bytes / (double)all : 100.0);
    if (g->rate > 0) n += snprintf(line + n, sizeof line - (size_t)n, ", %s/s", megabytes((uint64_t)g->rate, rate));
    if (g->rate > 0 && all != SOURCE_UNKNOWN && all >= bytes) {
        const unsigned long long left = (unsigned long long)((double)(all - bytes) / g->rate);
        snprintf(line + n, sizeof line - (size_t)n, ", %llu:%02llu:%02llu left", left / 3600, left / 60 % 60,
                 left % 60);
    }
    program_show_line(line, strlen(line));
}

static void on_note(void *user, const char *message) {
    const getter *g = user;
    if (!g->o->quiet) program_error("%s", message);
}

static void on_waiting(long process) {
    program_error("waiting for process %ld, which fetches or removes the same model", process);
}

static int failed(const moe_error *e) {
    program_progress_hide();
    if (e->code != MOE_ERROR_CANCELLED) return program_failed(e);
    program_error("%s", e->message);
    return 128 + (stop_signal ? (int)stop_signal : SIGINT);
}

/* ---- 2. Network ---------------------------------------------------------------------------------------- */

static int is_offline(void) {
    static const char *const yes[] = { "1", "true", "yes", "on" };
    const char *value = getenv("HF_HUB_OFFLINE");
    for (size_t i = 0; value && i < sizeof yes / sizeof *yes; i++)
        if (strcasecmp(value, yes[i]) == 0) return 1;
    return 0;
}

/* Read the first line of a file. Return 0 if it has none. */
static int read_token(const char *folder, const char *name, char *out, size_t size) {
    char path[STORE_PATH];
    if (!folder || !*folder || snprintf(path, sizeof path, "%s%s", folder, name) >= (int)sizeof path) return 0;
    FILE *file = fopen(path, "r");
    const int read = file && fgets(out, (int)size, file);
    if (file) fclose(file);
    return read;
}

/* Find the token for Hugging Face, which may be missing. */
static moe_status find_token(char *out, size_t size, moe_error *error) {
    const char *given = getenv("HF_TOKEN");
    out[0] = 0;
    if (given && *given && strlen(given) < size) snprintf(out, size, "%s", given);
    else if ((!given || !*given) && !read_token(getenv("HF_TOKEN_PATH"), "", out, size) &&
             !read_token(getenv("HF_HOME"), "/token", out, size) &&
             !read_token(getenv("XDG_CACHE_HOME"), "/huggingface/token", out, size))
        read_token(getenv("HOME"), "/.cache/huggingface/token", out, size);
    for (size_t n = strlen(out); n && strchr(" \t\r\n", out[n - 1]);) out[--n] = 0;
    for (const char *at = out; *at; at++)
        if (*at <= ' ' || *at > '~') given = at, out[0] = 0;
    return *out || !given || !*given ? MOE_OK
                                     : text_fail(error, MOE_ERROR_IO, "HF_TOKEN",
                                                 "HF_TOKEN or its file is not a token: it has a space, a control "
                                                 "character, or is too long");
}

static moe_status connect_net(getter *g, moe_error *error) {
    const fetch_settings settings = { g->o->timeout, g->o->retries, &stop_signal, on_progress, on_note, g };
    if (g->net) return MOE_OK;
    if (is_offline())
        return text_fail(error, MOE_ERROR_IO, "network",
                         "HF_HUB_OFFLINE forbids the network: unset it to fetch models");
    const moe_status status = find_token(g->token, sizeof g->token, error);
    return status ? status : fetch_open(&settings, &g->net, error);
}

static const char *token_of(const getter *g, source_kind kind) {
    return kind == SOURCE_HUB && *g->token ? g->token : NULL;
}

/* Fetch JSON; the caller frees `url`. */
static moe_status fetch_json(getter *g, char *url, source_kind kind, const char *what, cJSON **out, moe_error *error) {
    text_bytes body = { 0 };
    moe_status status = url ? connect_net(g, error) : text_out_of_memory(error);
    const fetch_from from = { url, token_of(g, kind), what };
    if (!status) status = fetch_text(g->net, &from, SOURCE_JSON_BYTES, &body, error);
    if (!status && !(*out = source_json(body.data ? body.data : "", body.length)))
        status = text_fail(error, MOE_ERROR_FORMAT, "network", "%.120s is not valid JSON, or is too large; check %s",
                           what, kind == SOURCE_HUB ? "HF_ENDPOINT" : "MOE_FIREFOX_INDEX");
    text_bytes_free(&body);
    return status;
}

static moe_status load_index(getter *g, moe_error *error) {
    if (g->index) return MOE_OK;
    if (!g->index_url) g->index_url = source_index_url();
    const moe_status status =
        fetch_json(g, g->index_url, SOURCE_FIREFOX, "the index of Firefox's models", &g->index, error);
    return status == MOE_ERROR_ARGUMENT ? error->code = MOE_ERROR_IO : status; /* does not mean a missing pair */
}

/* Find the licence in the model card, or else among known models. */
static moe_status find_licence(getter *g, source_model *m, moe_error *error) {
    text_bytes card = { 0 };
    moe_status status = MOE_OK;
    char *url = m->has_card && !*m->licence ? source_card_url(m) : NULL;
    const fetch_from from = { url, token_of(g, SOURCE_HUB), "the model card" };
    if (url && !(status = fetch_text(g->net, &from, (size_t)1 << 20, &card, error)))
        source_card_licence(card.data ? card.data : "", card.length, m->licence);
    if (!*m->licence) snprintf(m->licence, sizeof m->licence, "%s", source_known_licence(&m->name));
    text_bytes_free(&card);
    free(url);
    return status;
}

static moe_status resolve_hub(getter *g, const source_name *name, source_model *out, moe_error *error) {
    char what[SOURCE_NAME + 16], *url = source_hub_url(name);
    cJSON *description = NULL;
    snprintf(what, sizeof what, "%s", name->id);
    moe_status status = fetch_json(g, url, SOURCE_HUB, what, &description, error);
    free(url);
    if (!status) status = source_from_hub(description, name, out, error);
    cJSON_Delete(description);
    if (!status && (status = find_licence(g, out, error))) source_model_free(out);
    return status;
}

static moe_status resolve(getter *g, const source_name *name, source_model *out, moe_error *error) {
    if (name->kind == SOURCE_HUB) return resolve_hub(g, name, out, error);
    const moe_status status = load_index(g, error);
    return status ? status : source_from_index(g->index, g->index_url, name, g->o->small, out, error);
}

/* ---- 3. Readers ---------------------------------------------------------------------------------------- */

enum { WHY = 160, SMALL_FILE = 4 << 20, LEAST_HEADER = 1 << 16, MOST_HEADER = 1 << 23 };

/* Fetch a small file of a model into memory. Leave *out empty if the model does not have it. */
static moe_status fetch_small(getter *g, const source_model *m, const char *name, text_bytes *out, moe_error *error) {
    char what[2 * SOURCE_NAME + 8];
    snprintf(what, sizeof what, "%s of %s", name, m->name.id);
    for (size_t i = 0; i < m->n; i++) {
        const fetch_from from = { m->files[i].url, token_of(g, m->name.kind), what };
        if (strcmp(m->files[i].name, name) == 0) return fetch_text(g->net, &from, SMALL_FILE, out, error);
    }
    return MOE_OK;
}

static const char *text_member(const cJSON *object, const char *key) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsString(value) ? value->valuestring : NULL;
}

/* Return 1 if the reader in C knows the chat template, or if there is none. */
static moe_status knows_template(getter *g, const source_model *m, const char *family, int *known, moe_error *error) {
    text_bytes data = { 0 };
    moe_span text = { NULL, 0 };
    cJSON *settings = NULL;
    moe_status status = fetch_small(g, m, "chat_template.jinja", &data, error);
    if (!status && data.length) text = (moe_span){ data.data, data.length };
    else if (!status) {
        status = fetch_small(g, m, "tokenizer_config.json", &data, error);
        settings = status || !data.length ? NULL : source_json(data.data, data.length);
        const char *found = text_member(settings, "chat_template");
        if (found) text = (moe_span){ found, strlen(found) };
    }
    const char *name = strrchr(m->name.repository, '/');
    *known = !text.data || prompts_known(text, (prompt_model){ family, name ? name + 1 : m->name.repository });
    cJSON_Delete(settings);
    text_bytes_free(&data);
    return status;
}

/* Check the first bytes of a GGUF file, or of the first part of a split one: its chat template follows its tokens. */
static moe_status check_gguf(getter *g, const source_model *m, char why[WHY], int *python, moe_error *error) {
    const source_file *f = NULL;
    text_bytes begin = { 0 };
    char what[2 * SOURCE_NAME + 16];
    for (size_t i = 0; i < m->n; i++)
        if (text_ends_with(m->files[i].name, strlen(m->files[i].name), ".gguf") &&
            (!f || strstr(m->files[i].name, "-00001-of-")))
            f = &m->files[i];
    if (!f || !f->bytes) return MOE_OK;
    uint64_t most = f->bytes == SOURCE_UNKNOWN ? 0 : f->bytes / 64;
    most = most < LEAST_HEADER ? LEAST_HEADER : most > MOST_HEADER ? MOST_HEADER : most;
    snprintf(what, sizeof what, "the beginning of %s", f->name);
    const fetch_from from = { f->url, token_of(g, m->name.kind), what };
    const moe_status status = fetch_begin(g->net, &from, (size_t)most, &begin, error);
    if (!status) *python = gguf_check((moe_span){ begin.data, begin.length }, f->name, why, WHY);
    text_bytes_free(&begin);
    return status && fetch_status(g->net) >= 400 && fetch_status(g->net) < 500 ? MOE_OK : status;
}

/* Explain why the model has no reader in C, or write "". Set *python to 1 if the Python converter may read it. */
static moe_status find_reader(getter *g, const source_model *m, char why[WHY], int *python, moe_error *error) {
    int safetensors = 0, known = 1;
    text_bytes data = { 0 };
    why[0] = '\0';
    *python = 1;
    if (m->name.kind == SOURCE_FIREFOX) return MOE_OK;
    if (*m->name.file) return check_gguf(g, m, why, python, error);
    for (size_t i = 0; i < m->n; i++)
        safetensors |= text_ends_with(m->files[i].name, strlen(m->files[i].name), ".safetensors");
    moe_status status = fetch_small(g, m, "config.json", &data, error);
    if (status && fetch_status(g->net) >= 400 && fetch_status(g->net) < 500) /* the download explains it */
        return text_bytes_free(&data), MOE_OK;
    cJSON *config = status || !data.length ? NULL : source_json(data.data, data.length);
    const char *family = text_member(config, "model_type");
    if (!family || !source_safe_name(family)) family = "unknown"; /* it is printed */
    *python = decoder_family_named(family) || text_is_listed(decoder_python_types, family, strlen(family));
    if (!*python) snprintf(why, WHY, "models of type %.40s are not supported", family);
    else if (!safetensors) snprintf(why, WHY, "it has no *.safetensors");
    else if (!decoder_family_named(family)) snprintf(why, WHY, "models of type %.40s have no reader in C", family);
    else if (!status && !(status = knows_template(g, m, family, &known, error)) && !known)
        snprintf(why, WHY, "its chat template is unknown here");
    cJSON_Delete(config);
    text_bytes_free(&data);
    return status;
}

/* ---- 4. Fetching a model ------------------------------------------------------------------------------- */

/* Return the model's origin: the page of a repository, or the index. */
static char *origin_of(const getter *g, const source_model *m) {
    return m->name.kind == SOURCE_HUB ? source_page_url(&m->name) : source_shown_url(g->index_url);
}

static void print_metrics(const source_model *m) {
    if (*m->variant) fprintf(stderr, ", %s", m->variant);
    if (m->comet >= 0) fprintf(stderr, ", COMET %.4g", m->comet);
    if (m->bleu >= 0) fprintf(stderr, ", BLEU %.3g", m->bleu);
}

/* Print size, licence, source and folder of a model. */
static void announce(const getter *g, const source_model *m, const char *folder, const char *origin, const char *why,
                     int python) {
    int least;
    char size[32];
    const uint64_t bytes = source_bytes(m, &least);
    if (g->o->quiet && !g->o->dry_run) return;
    fprintf(stderr, "%s", m->name.id);
    print_metrics(m);
    fprintf(stderr, "\n  licence: %s", *m->licence ? m->licence : "not stated");
    if (!*m->licence || strcmp(m->licence, "other") == 0) fprintf(stderr, "; read it at %s", origin);
    fprintf(stderr, "\n  size:    %s%s, %zu files\n", least ? "at least " : "", megabytes(bytes, size), m->n);
    fprintf(stderr, "  source:  %s\n  folder:  %s\n", origin, folder);
    if (*why)
        fprintf(stderr, "  %s: %s\n",
                python ? "to use it, the Python converter is needed (tools/convert/convert.py)"
                       : "no converter reads it",
                why);
    for (size_t i = 0; i < m->n && g->o->dry_run; i++) {
        const source_file *f = &m->files[i];
        const uint64_t one = f->bytes != SOURCE_UNKNOWN ? f->bytes : f->unpacked;
        fprintf(stderr, "    %s  %s%s\n", f->name, one != SOURCE_UNKNOWN ? megabytes(one, size) : "unknown size",
                *f->sha256 ? "" : ", no published checksum");
    }
}

/* Ask for a yes if the licence needs one. Return -1 or an exit status. */
static int accept_licence(const getter *g, const source_model *m) {
    char answer[16];
    if (!source_is_restricted(m->licence) || g->o->accept || g->o->dry_run) return -1;
    if (!g->o->quiet && isatty(STDIN_FILENO) && isatty(STDERR_FILENO)) {
        fprintf(stderr, "The licence %s does not permit commercial use. Accept it? (y/N) ", m->licence);
        const int given = fgets(answer, sizeof answer, stdin) != NULL;
        if (stop_signal) return 128 + (int)stop_signal;
        if (given && (strcasecmp(answer, "y\n") == 0 || strcasecmp(answer, "yes\n") == 0)) return -1;
    }
    program_error("%s has the licence %s, which does not permit commercial use; to accept it, add --accept-licence",
                  m->name.id, m->licence);
    return EXIT_USAGE;
}

static moe_status fetch_files(getter *g, const source_model *m, const char *folder, const char *origin,
                              char (*names)[SOURCE_NAME], char (*hashes)[SHA256_TEXT], moe_error *error) {
    moe_status status = MOE_OK;
    g->files = m->n;
    for (size_t i = 0; i < m->n && !status; i++) {
        char what[2 * SOURCE_NAME + 8];
        snprintf(what, sizeof what, "%s of %s", m->files[i].name, m->name.id);
        const fetch_from from = { m->files[i].url, token_of(g, m->name.kind), what };
        g->file = i + 1, g->seen = SOURCE_UNKNOWN;
        status = fetch_file(g->net, &from, &m->files[i], folder, names[i], hashes[i], error);
        if (status == MOE_ERROR_ARGUMENT) error->code = status = MOE_ERROR_IO; /* the model exists, but not the file */
        const long code = fetch_status(g->net);
        if (status && m->name.kind == SOURCE_HUB && (code == 401 || code == 403))
            text_fail(error, status, "network", "%.70s is gated (%ld): accept its terms at %.100s, then set HF_TOKEN",
                      m->name.id, code, origin);
    }
    program_progress_hide();
    return status;
}

/* Fetch the files of a model, with its folder locked. */
static moe_status fetch_locked(getter *g, const source_model *m, const char *folder, const char *origin,
                               moe_error *error) {
    int least;
    store_model there;
    store_read(folder, m->name.id, &there);
    if (there.complete) return MOE_OK; /* by the process that had the lock */
    moe_status status = store_check_room(folder, source_bytes(m, &least), error);
    if (!status) status = store_plan(folder, m, error);
    if (status) return status;
    char (*names)[SOURCE_NAME] = calloc(m->n, sizeof *names), (*hashes)[SHA256_TEXT] = calloc(m->n, sizeof *hashes);
    status = names && hashes ? fetch_files(g, m, folder, origin, names, hashes, error) : text_out_of_memory(error);
    if (!status) status = store_record(folder, m, origin, names, hashes, error);
    free(names), free(hashes);
    return status;
}

static void on_converter_note(void *user, const char *message) { on_note(user, message); }

/* Convert a fetched model. Return -1, or an exit status; a model that has no reader in C is left alone. */
static int convert(getter *g, const store_model *model, const char *path, const char *out) {
    moe_error e;
    const convert_options how = { .path = path,
                                  .licence = *model->licence ? model->licence : NULL,
                                  .type = MOE_TYPE_KEEP,
                                  .experts = MOE_TYPE_KEEP,
                                  .note = on_converter_note,
                                  .user = g,
                                  .resume = 1 };
    if (!g->o->quiet) program_error("converting %s", model->id);
    handle_signals(0);
    const moe_status status = convert_model(&how, out, &e);
    handle_signals(1);
    if (status == MOE_ERROR_FORMAT) {
        char reason[sizeof e.message];
        snprintf(reason, sizeof reason, "%s", e.message);
        text_fail(&e, status, "", "%.150s; to fetch it again, first run: moe-get rm %.60s", reason, model->id);
    }
    if (status && status != MOE_ERROR_UNSUPPORTED) return failed(&e);
    if (status && !g->o->quiet) program_error("%s", e.message);
    return -1;
}

/* Return 1 if a conversion exists and can be used. A damaged one is made again. */
static int is_usable(const char *path) {
    moe_model *model;
    if (access(path, R_OK) != 0 || moe_model_open(path, NULL, &model, NULL)) return 0; /* verifies small files */
    moe_model_close(model);
    return 1;
}

/* Print the path of a usable model: its conversion, or else its folder and the command that converts it. */
static int report(getter *g, const source_name *name) {
    char folder[STORE_PATH], converted[STORE_PATH], path[STORE_PATH + SOURCE_NAME];
    const char *types, *from = source_converter(name, &types);
    store_model there;
    moe_error e;
    if (store_folder(name->id, folder, &e) || store_converted(name->id, converted, &e)) return failed(&e);
    if (is_usable(converted)) return puts(converted), -1;
    if (g->o->no_convert) return puts(folder), -1;
    if (store_make_parent(converted, &e)) return failed(&e);
    store_read(folder, name->id, &there);
    unlink(converted); /* if it is damaged */
    snprintf(path, sizeof path, "%s%s%s", folder, *name->file ? "/" : "", name->file);
    const int status = convert(g, &there, path, converted);
    if (status >= 0) return status;
    if (access(converted, R_OK) == 0) return puts(converted), -1;
    if (!g->o->quiet)
        fprintf(stderr, "To use it, convert it:\n  tools/convert/convert.py %s'%s' -o '%s'%s\n", from, path, converted,
                types);
    return puts(folder), -1;
}

/* Return 1 if the source has published checksums of all files. */
static int are_published(const source_model *m) {
    size_t n = 0;
    while (n < m->n && *m->files[n].sha256) n++;
    return n == m->n;
}

/* Fetch a model from the source that has it. */
static int fetch_model(getter *g, const source_model *m) {
    char folder[STORE_PATH], size[32], why[WHY], *origin = origin_of(g, m);
    int lock, python, status = -1;
    moe_error e;
    if (!origin) return text_out_of_memory(&e), failed(&e);
    if (store_folder(m->name.id, folder, &e) || find_reader(g, m, why, &python, &e)) return free(origin), failed(&e);
    announce(g, m, folder, origin, why, python);
    status = g->o->dry_run ? EXIT_DONE : accept_licence(g, m);
    if (status < 0 && store_lock(folder, &stop_signal, g->o->quiet ? NULL : on_waiting, &lock, &e)) status = failed(&e);
    else if (status < 0) {
        const double begin = program_seconds();
        if (fetch_locked(g, m, folder, origin, &e)) status = failed(&e);
        store_unlock(folder, lock);
        store_model there;
        store_read(folder, m->name.id, &there);
        if (status < 0 && !g->o->quiet)
            program_error("%s: %s in %.0f s, %s", m->name.id, megabytes(there.bytes, size), program_seconds() - begin,
                          are_published(m) ? "verified" : "verified as far as checksums are published");
        if (status < 0) status = report(g, &m->name);
    }
    free(origin);
    return status;
}

/* Return the first of the candidates that has been fetched, or NULL. */
static const source_name *find_fetched(const source_name *names, size_t n, int complete) {
    char folder[STORE_PATH];
    store_model there;
    for (size_t i = 0; i < n; i++) {
        if (store_folder(names[i].id, folder, NULL) || access(folder, F_OK) != 0) continue;
        store_read(folder, names[i].id, &there);
        if (there.complete || !complete) return &names[i];
    }
    return NULL;
}

/* Report that no source has a pair of languages. */
static int not_found(const getter *g, const char *word, const source_name *names, size_t n, const moe_error *last) {
    char both[2 * SOURCE_NAME] = "";
    if (n < 2) return failed(last);
    source_pivot(g->index, &names[0], both, sizeof both);
    program_error("neither Firefox nor OPUS-MT has a model for %s; %s%s", word,
                  *both ? "fetch two instead: moe-get " : "moe-get --search WORD lists models", both);
    return EXIT_MODEL;
}

/* Fetch what a word names. Return -1 or an exit status. */
static int get(getter *g, const char *word) {
    source_name names[SOURCE_CANDIDATES];
    source_model model;
    size_t n;
    moe_error e;
    if (source_parse(word, names, &n, &e)) return program_usage_error("%s", e.message);
    const source_name *there = find_fetched(names, n, 1);
    if (there && !g->o->dry_run) {
        if (!g->o->quiet)
            program_error("%s is here already%s", there->id, g->o->small ? "; for --small, remove it first" : "");
        return report(g, there);
    }
    for (size_t i = 0; i < n; i++) {
        const moe_status status = resolve(g, &names[i], &model, &e);
        if (status == MOE_ERROR_ARGUMENT) continue; /* this source does not have it */
        if (status) return failed(&e);
        const int result = fetch_model(g, &model);
        source_model_free(&model);
        return result;
    }
    return not_found(g, word, names, n, &e);
}

/* ---- 5. Lists and removal ------------------------------------------------------------------------------ */

/* A row of a list. `about` may be "". */
typedef struct row {
    const char *name, *licence, *about;
    uint64_t bytes;     /* SOURCE_UNKNOWN if unknown */
    double comet, bleu; /* negative if unknown */
    int incomplete;
} row;

typedef struct rows {
    json j; /* the list of --json */
    text_bytes text;
    size_t n;
    int as_json;
} rows;

static void begin_rows(rows *r, int as_json) {
    *r = (rows){ .as_json = as_json };
    r->j.out = &r->text;
    if (as_json) json_open(&r->j, NULL, '[');
}

static void put_row(rows *r, const row *m) {
    char size[32], line[1024];
    r->n++;
    if (!r->as_json) {
        const int n = snprintf(line, sizeof line, "%-44s %10s  %-14s %s", m->name,
                               m->bytes == SOURCE_UNKNOWN ? "" : megabytes(m->bytes, size),
                               *m->licence ? m->licence : "-", m->incomplete ? "incomplete" : m->about);
        text_append_clean(&r->text, line, n > 0 ? strlen(line) : 0);
        text_append(&r->text, "\n", 1);
        return;
    }
    json_open(&r->j, NULL, '{');
    json_clean(&r->j, "name", m->name, strlen(m->name));
    if (m->bytes != SOURCE_UNKNOWN) json_whole(&r->j, "bytes", (int64_t)m->bytes);
    json_clean(&r->j, "licence", m->licence, strlen(m->licence));
    json_clean(&r->j, "about", m->about, strlen(m->about));
    if (m->comet >= 0) json_digits(&r->j, "comet", m->comet, 6);
    if (m->bleu >= 0) json_digits(&r->j, "bleu", m->bleu, 6);
    if (m->incomplete) json_bool(&r->j, "incomplete", 1);
    json_close(&r->j, '}');
}

/* Return the exit status. */
static int end_rows(rows *r) {
    if (r->as_json) json_close(&r->j, ']');
    const int failed = r->text.failed;
    if (r->text.length && !failed) printf("%s%s", r->text.data, r->as_json ? "\n" : "");
    text_bytes_free(&r->text);
    return failed ? (program_error("out of memory"), EXIT_MODEL) : program_printed();
}

static int list_fetched(const options *o) {
    store_model *models;
    size_t n;
    moe_error e;
    char folder[STORE_PATH];
    rows list;
    if (store_data(folder, &e) || store_list(&models, &n, &e)) return failed(&e);
    begin_rows(&list, o->json);
    for (size_t i = 0; i < n; i++)
        put_row(&list, &(row){ models[i].id, models[i].licence, models[i].variant, models[i].bytes, models[i].comet,
                               models[i].bleu, !models[i].complete });
    if (!n && !o->json)
        program_error("no models in %s; moe-get en-pt fetches one, moe-get --search WORD lists some", folder);
    free(models);
    return end_rows(&list);
}

/* Add Firefox's models for matching pairs. */
static void search_index(getter *g, const char *word, rows *list) {
    const cJSON *pair;
    cJSON_ArrayForEach(pair, cJSON_GetObjectItemCaseSensitive(g->index, "models")) {
        source_name names[SOURCE_CANDIDATES];
        source_model m;
        size_t n;
        int least;
        moe_error e;
        if (!pair->string || !source_matches(pair->string, word) || source_parse(pair->string, names, &n, &e) ||
            names[0].kind != SOURCE_FIREFOX ||
            source_from_index(g->index, g->index_url, &names[0], g->o->small, &m, &e))
            continue;
        put_row(list, &(row){ names[0].id + 8, m.licence, m.variant, source_bytes(&m, &least), m.comet, m.bleu, 0 });
        source_model_free(&m);
    }
}

static int search(getter *g, const char *word) {
    const char *names, *repository, *about, *licence;
    moe_error e;
    rows list;
    begin_rows(&list, g->o->json);
    for (size_t i = 0; (names = source_known(i, &repository, &licence, &about)); i++) {
        char name[64], text[160];
        if (!source_matches(names, word) && !source_matches(repository, word) && !source_matches(about, word)) continue;
        snprintf(name, sizeof name, "%.*s", (int)strcspn(names, " "), names);
        snprintf(text, sizeof text, "%s (%s)", about, repository);
        put_row(&list, &(row){ name, licence, text, SOURCE_UNKNOWN, -1, -1, 0 });
    }
    const int status = load_index(g, &e) ? failed(&e) : EXIT_DONE;
    if (status == EXIT_DONE) search_index(g, word, &list);
    if (!list.n && status == EXIT_DONE && !g->o->json)
        program_error(
            "nothing matches '%s' here; OPUS-MT has more pairs: moe-get SOURCE-TARGET, and OWNER/NAME names any "
            "repository of Hugging Face",
            word);

    const int printed = end_rows(&list);
    return status != EXIT_DONE ? status : printed;
}

static int remove_model(const options *o, const char *word) {
    source_name names[SOURCE_CANDIDATES];
    size_t n;
    int left;
    moe_error e;
    if (source_parse(word, names, &n, &e)) return program_usage_error("%s", e.message);
    const source_name *there = find_fetched(names, n, 0);
    if (!there) {
        program_error("%s has not been fetched; moe-get --list lists fetched models", word);
        return EXIT_MODEL;
    }
    if (store_remove(there->id, &stop_signal, o->quiet ? NULL : on_waiting, &left, &e)) return failed(&e);
    if (left || !o->quiet)
        program_error("removed %s%s", there->id, left ? ", except files that moe-get did not fetch" : "");
    return -1;
}

int main(int argc, char **argv) {
    options o = { .timeout = 60, .retries = 5 };
    getter g = { .o = &o, .seen = SOURCE_UNKNOWN };
    int status = program_begin("moe-get");
    if (status < 0) status = option_parse(&program, argc, argv, &o);
    if (status >= 0) return status;
    const int n = argc - optind, removing = n > 0 && strcmp(argv[optind], "rm") == 0;
    if (o.json && !o.list && !o.search) return program_usage_error("--json requires --list or --search");
    if ((o.list || o.search) && n) return program_usage_error("unexpected argument '%s'", argv[optind]);
    if (removing && o.dry_run) return program_usage_error("--dry-run cannot be combined with rm");
    if (!o.list && !o.search && n == removing) return program_usage_error("no model is named");
    g.terminal = !o.quiet && isatty(STDERR_FILENO);
    handle_signals(1);
    if (o.list) return list_fetched(&o);
    if (o.search) status = search(&g, o.search);
    for (int i = optind + removing; i < argc && (status < 0 || status == EXIT_DONE); i++)
        status = removing ? remove_model(&o, argv[i]) : get(&g, argv[i]);
    fetch_close(g.net);
    cJSON_Delete(g.index);
    free(g.index_url);
    const int printed = program_printed();
    return status > 0 ? status : printed;
}
