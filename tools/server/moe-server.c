/* moe-server - translate over HTTP. server.h lists the source files.
 *
 * Contents
 *   1. Options    the command line
 *   2. Main       open the models, serve requests until a signal, reload
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/options.h"
#include "tools/server/server.h"
#include "tools/text/choice.h"
#include "tools/text/settings.h"
#include "tools/text/system.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

/* ==== 1. Options ======================================================================================== */

/* Remove a setting that the command line replaces. */
static void drop_setting(text_bytes *settings, const char *name, size_t length) {
    if (!settings->length) return;
    for (char *at = settings->data; *at;) {
        char *end = at + strcspn(at, ";");
        if (strncmp(at, name, length) != 0 || at[length] != '=') at = end + (*end == ';');
        else {
            end += *end == ';';
            memmove(at, end, strlen(end) + 1);
            settings->length = strlen(settings->data);
        }
    }
    if (settings->length && settings->data[settings->length - 1] == ';') settings->data[--settings->length] = 0;
}

/* Append NAME=VALUE, or the argument to --set, to the settings for libmoetext. */
static int add_setting(void *user, const option_row *row, const char *value) {
    options *o = user;
    text_settings checked = text_settings_none();
    moe_error e;
    const int named = strcmp(row->name, "set") != 0;
    if (named && strchr(value, ';')) return program_usage_error("invalid value '%.60s' for --%s", value, row->name);
    if (o->config.done)
        drop_setting(&o->settings, named ? row->name : value,
                     strlen(named ? row->name : value) - (named ? 0 : strlen(value) - strcspn(value, "=")));
    if (o->settings.length) text_append_string(&o->settings, ";");
    if (named) text_printf(&o->settings, "%s=", row->name);
    text_append_string(&o->settings, value);
    if (o->settings.failed) return program_error("out of memory"), EXIT_MODEL;
    return text_settings_parse(&checked, o->settings.data, &e) ? program_usage_error("%s", e.message) : -1;
}

static int drop_conversions(void *user, const option_row *row, const char *value) {
    (void)row, (void)value;
    return add_setting(user, &(option_row){ .name = "cache" }, "0");
}

static int add_proxy(void *user, const option_row *row, const char *text) {
    options *o = user;
    network *more = realloc(o->proxies, (o->n_proxies + 1) * sizeof *more);
    if (!more) return program_error("out of memory"), EXIT_MODEL;
    o->proxies = more;
    if (network_read(text, &o->proxies[o->n_proxies])) return o->n_proxies++, -1;
    return program_usage_error("invalid value '%s' for --%s: expected ADDRESS or ADDRESS/BITS, such as 10.0.0.0/8",
                               text, row->name);
}

static int add_word(const options *o, word_list *w, const char *word) {
    if (w->from_file && o->config.done) w->n = 0;
    w->from_file = !o->config.done;
    const char **more = realloc(w->at, (w->n + 1) * sizeof *more);
    if (!more) return program_error("out of memory"), EXIT_MODEL;
    w->at = more;
    return w->at[w->n++] = word, -1;
}

static int add_name(void *user, const option_row *row, const char *name) {
    return *name && !strpbrk(name, " \t/:") ? add_word(user, &((options *)user)->names, name)
                                            : program_usage_error("invalid value '%s' for --%s: expected a host name "
                                                                  "without port, such as translate.example.org",
                                                                  name, row->name);
}

static int add_origin(void *user, const option_row *row, const char *origin) {
    const char *host = strstr(origin, "://");
    if (strcmp(origin, "*") != 0 && strcmp(origin, "null") != 0 && (!host || !host[3] || strchr(host + 3, '/')))
        return program_usage_error("invalid value '%s' for --%s: expected an origin without a path, such as "
                                   "https://example.org",
                                   origin, row->name);
    return add_word(user, &((options *)user)->origins, origin);
}

/* Add a model from -m or a folder from --models. */
static int add_model(void *user, const option_row *row, const char *path) {
    options *o = user;
    if (o->models.from_file && o->config.done) o->several = 0;
    const int status = add_word(o, &o->models, path);
    if (status >= 0) return status;
    o->model = o->models.at[0];
    o->several |= o->models.n > 1 || !row->letter;
    return -1;
}

static int take_path(void *user, const option_row *row, const char *text) {
    const size_t most = sizeof((struct sockaddr_un *)0)->sun_path - 1, length = strlen(text);
    if (strncmp(text, "unix:", 5) != 0 || length == 5 || length - 5 > most)
        return program_usage_error("invalid value '%s' for --%s: expected unix:PATH with a path of at most %zu bytes",
                                   text, row->name, most);
    return ((options *)user)->path = text + 5, -1;
}

static int take_prefix(void *user, const option_row *row, const char *text) {
    const size_t length = strlen(text);
    for (size_t i = 0; i < length; i++)
        if (text[0] != '/' || (text[i] == '/' && (i + 1 == length || text[i + 1] == '/')) || text[i] <= ' ' ||
            strchr("?#%\"<>\\", text[i]))
            return program_usage_error("invalid value '%s' for --%s: expected a path such as /translate", text,
                                       row->name);
    return ((options *)user)->prefix = text, -1;
}

static const option_row own_rows[] = {
    { "model", "FILE", "model file (default: MOE_MODEL, else all fetched models and the installed one)",
      .more = ". If repeated, the server offers all directions of the models, direct or through a pivot language",
      .letter = 'm', .group = GROUP_MODEL, .kind = ROW_CALL, .take = add_model, .repeated = 1 },
    { "models", "DIR", "use all models (*.bin) in a directory; each is opened when first needed", .group = GROUP_MODEL,
      .kind = ROW_CALL, .take = add_model, .repeated = 1 },
    { "models-memory", "SIZE", "limit memory for open models, e.g. 512M; the least recently used is closed first",
      .group = GROUP_MODEL, .kind = ROW_CALL, .take = add_setting },
    { "max-memory", "SIZE",
      "limit the translator's memory, e.g. 512M: fail if more is needed, otherwise allocate it at startup",
      .more = ". Mapped models and requests do not count", .group = GROUP_MODEL, .kind = ROW_CALL,
      .take = add_setting },
    { "prompt-cache", "DIR", "save the computed prompts of a model in this folder when it is closed or the server ends",
      .more = ". A model that opens again loads them; see moe-translate. A file instead of a folder serves one model",
      .group = GROUP_MODEL, .kind = ROW_CALL, .take = add_setting },
    { "threads", "N", "number of translation threads (default: one per available processor)", .group = GROUP_MODEL,
      .kind = ROW_CALL, .take = add_setting },
    OPTION_NO_CACHE(.kind = ROW_CALL, .take = drop_conversions),
    { "allow-get", NULL, "let clients fetch models with moe-get, which uses the network and the disk",
      .group = GROUP_MODEL, OPTION_FLAG(allow_get) },
    { "set", "NAME=VALUE", "set a moe-translate option, e.g. beam=4, rerank=0, batch=64; may be repeated",
      .group = "Translation", .kind = ROW_CALL, .take = add_setting, .repeated = 1 },
    { "host", "ADDRESS", "address to listen on (default: 127.0.0.1, this machine only)", .group = "Network",
      OPTION_MEMBER(ROW_WORD, host) },
    { "port", "N", "port to listen on; 0 chooses a free one (default: 5000)", .group = "Network",
      OPTION_INT(port, 0, 65535) },
    { "listen", "unix:PATH",
      "listen on a Unix domain socket (owner and group only) instead of a host and port; replace a stale socket",
      .group = "Network", .kind = ROW_CALL, .take = take_path },
    { "reuse-port", NULL, "share the port with another server, which takes over when this one ends", .group = "Network",
      OPTION_FLAG(reuse_port) },
    { "api-keys", "FILE",
      "accept only requests with a key from this file, as api_key or Bearer token; others get status 403",
      .more = ". Each line contains a key, optionally followed by TAB and a character limit; requests that exceed it "
              "get status 429 or 456",
      .group = "Network", OPTION_MEMBER(ROW_WORD, keys) },
    { "allow-origin", "URL",
      "accept requests from web pages with this origin; * accepts all (default: only the server's page)",
      .more = "; may be repeated", .group = "Network", .kind = ROW_CALL, .take = add_origin, .repeated = 1 },
    { "server-name", "NAME", "accept requests with this name in the Host header; * accepts all names; may be repeated",
      .more = ". Names without dots, such as localhost, and addresses are always accepted (from this machine, loopback "
              "addresses only). Without this option, other machines may use any name",
      .group = "Network", .kind = ROW_CALL, .take = add_name, .repeated = 1 },
    { "trust-proxy", "ADDRESS[/BITS]",
      "use X-Forwarded-For from this proxy; its last untrusted address is the client's",
      .more = ". The proxy must set this header itself. unix trusts all clients of --listen; may be repeated",
      .group = "Network", .kind = ROW_CALL, .take = add_proxy, .repeated = 1 },
    { "url-prefix", "/PATH", "path at which a proxy serves this server; the proxy may remove it from requests",
      .group = "Network", .kind = ROW_CALL, .take = take_prefix },
    { "max-body", "KB", "maximum size of a request (default: 1024); larger requests get status 413", .group = "Limits",
      OPTION_INT(max_body, 1, 1 << 20) },
    { "max-texts", "N", "maximum number of texts per request (default: 1000); larger requests get status 413",
      .group = "Limits", OPTION_INT(max_texts, 1, 1 << 20) },
    { "max-queue", "N", "maximum number of waiting texts (default: 10000); further requests get status 429",
      .more = ", or 413 if a single request exceeds the limit", .group = "Limits", OPTION_INT(max_queue, 1, 1 << 24) },
    { "max-client", "KB", "maximum size of a client's waiting texts (default: 4096); further requests get status 429",
      .more = ". A client is an API key or an address; its first request is always accepted", .group = "Limits",
      OPTION_INT(max_client, 1, 1 << 24) },
    { "max-client-texts", "N",
      "maximum number of queued texts per client (default: 4000); further requests get status 429", .group = "Limits",
      OPTION_INT(max_client_texts, 1, 1 << 24) },
    { "timeout", "SECONDS", "maximum time to answer a request (default: 60); slower requests get status 504",
      .more = ". Each 64 KB and each 1,000 tokens of a chat's prompt add this time; each step of a chat restarts it",
      .group = "Limits", OPTION_INT(timeout, 1, 86400) },
    { "read-timeout", "SECONDS", "maximum time to receive a request, and to send each MB of a response (default: 30)",
      .group = "Limits", OPTION_INT(read_timeout, 1, 86400) },
    { "grace", "SECONDS", "time to finish requests after a signal (default: 5)", .group = "Limits",
      OPTION_INT(grace, 0, 86400) },
    { "max-bodies", "KB", "maximum total size of incoming requests (default: 65536); further requests get status 503",
      .more = ". No address can use more memory than remains free; requests larger than half the limit get status 413",
      .group = "Limits", OPTION_INT(max_bodies, 1, 1 << 24) },
    { "max-connections", "N", "maximum number of connections (default: 1000); further connections wait",
      .group = "Limits", OPTION_INT(max_connections, 2, 1 << 20) },
    { "max-address", "N", "maximum number of connections per address (default: 100); further connections are closed",
      .more = ". IPv6 addresses with the same first 64 bits count as one", .group = "Limits",
      OPTION_INT(max_address, 1, 1 << 20) },
    { "rate", "N", "maximum number of requests per minute per address (default: 0, no limit)",
      .more = "; further requests get status 429. /health and /ready do not count", .group = "Limits",
      OPTION_INT(rate, 0, 1 << 20) },
    { "config", "FILE", "read options from FILE, one NAME = VALUE per line; # begins a comment",
      .more = ". Options on the command line replace those in the file", .group = GROUP_OTHER,
      OPTION_MEMBER(ROW_WORD, config.path) },
    { "reload", NULL, "make the server at --port reload its options, keys and changed models, and wait for the result",
      .more = ". If anything is invalid, nothing changes. Key usage, connections and requests in progress are kept. "
              "SIGHUP also reloads",
      .group = GROUP_OTHER, OPTION_FLAG(reload) },
    { "pid-file", "FILE", "write the process ID to FILE, where --reload finds it",
      .more = " (default: moe-server-PORT.pid in RUNTIME_DIRECTORY, XDG_RUNTIME_DIR or, for root, /run)",
      .group = GROUP_OTHER, OPTION_MEMBER(ROW_WORD, pid_file) },
    { "log", "FILE", "write one line of JSON per request to FILE, or to standard error if it is -; SIGHUP reopens FILE",
      .group = GROUP_OTHER, OPTION_MEMBER(ROW_WORD, log) },
    { "quiet", NULL, "print errors only", .letter = 'q', .group = GROUP_OTHER, OPTION_FLAG(quiet) },
    { 0 },
};

static const char *version(void) {
    static char text[128];
    snprintf(text, sizeof text, "%s, SentencePiece %s", moetext_version(), moetext_tokeniser_version());
    return text;
}

static const option_program program = {
    .name = "moe-server",
    .usage = "[OPTION]...",
    .about =
        "Translate over HTTP, with LibreTranslate's API and a web page.\n"
        "\n"
        "GET /spec describes the API. The server also accepts clients of DeepL, OpenAI (with a decoder-only model) "
        "and others; tools/server/README.md lists all addresses. Texts of all clients are decoded together.",
    OPTION_LISTS(OPTION_OWN),
    .notes =
        "After SIGTERM or SIGINT the server accepts no connections or requests; requests in progress are answered for "
        "--grace seconds, then fail. A second signal ends the server at once. If a client closes its connection, "
        "its texts are dropped. With --reuse-port, or a socket from LISTEN_FDS, requests on open connections are "
        "answered first.\n"
        "\n"
        "Exit status: 0 ended by a signal, 2 usage error, 3 model or memory error, 4 cannot listen on the port.\n",
    .examples = "  moe-server --port 8080\n"
                "  moe-server --models models --models-memory 2G --set beam=2\n",
    OPTION_EXCLUSIONS("listen host port", "reuse-port listen"),
    .config = offsetof(options, config) + 1,
    .version = version,
};

/* Use all local models, unless one is named. */
static int choose_models(options *o) {
    size_t n = 0;
    const int status = program_choose(&o->model, "", "", &o->choice);
    const char *const *all = status < 0 && o->choice ? text_choice_all(o->choice, &n) : NULL;
    for (size_t i = 0; i < n && n > 1; i++)
        if (add_word(o, &o->models, all[i]) >= 0) return EXIT_MODEL;
    o->several |= n > 1;
    return status;
}

/* Refuse options that this system does not support. */
static int check_system(const options *o) {
    const char *name = o->path         ? "listen"
                       : o->reuse_port ? "reuse-port"
                       : o->reload     ? "reload"
                       : o->pid_file   ? "pid-file"
                                       : NULL;
    return name && SYSTEM_IS_WINDOWS ? program_usage_error("--%s is not supported on Windows", name) : -1;
}

static int read_options(options *o, int argc, char **argv) {
    *o = (options){ .host = "127.0.0.1", .port = 5000, .prefix = "", .timeout = 60, .read_timeout = 30, .grace = 5 };
    o->max_body = 1024, o->max_texts = 1000, o->max_queue = 10000, o->max_client = 4096, o->max_client_texts = 4000;
    o->max_bodies = 65536, o->max_connections = 1000, o->max_address = 100;
    int status = option_parse(&program, argc, argv, o);
    if (status < 0) status = check_system(o);
    return status < 0 && !o->reload ? choose_models(o) : status;
}

/* ==== 2. Main =========================================================================================== */

static volatile sig_atomic_t stopping, hung_up, failed; /* global, for the signal handlers */

/* Exit at the end of the grace period even if a thread is stuck. */
static void end_now(int number) {
    (void)number;
    _exit(failed ? EXIT_MODEL : EXIT_DONE);
}

/* Ask the server to stop; a second signal ends the process immediately. */
static void on_stop(int number) {
    if (stopping) signal(number, SIG_DFL), raise(number);
    stopping = number;
}

static void on_hangup(int number) { hung_up = number; }

static void handle_signals(void) {
    struct sigaction stop = { .sa_flags = SA_RESTART }, hangup = stop;
    stop.sa_handler = on_stop, hangup.sa_handler = on_hangup;
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGHUP, &hangup, NULL);
    signal(SIGPIPE, SIG_IGN); /* makes write() fail if the pipe is closed */
}

/* Let glibc return large freed blocks to the system. By default, freeing the first large block raises the thresholds,
 * and glibc then allocates large blocks among small ones and keeps them. */
static void limit_retained_memory(void) {
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 128 << 10);
    mallopt(M_TRIM_THRESHOLD, 128 << 10);
#endif
}

/* Return free memory between used blocks to the system. Each thread has a heap, which held 20 MB after a minute of
 * abusive requests. Repeat this every two seconds while requests end, and three times after the last request. */
static void trim_memory(server *s) {
#ifdef __GLIBC__
    const double now = program_seconds();
    if (now - s->trimmed < 2) return;
    const uint64_t left = s->n_left;
    if (left != s->trimmed_at) s->trims = 3;
    s->trimmed = now, s->trimmed_at = left;
    if (s->trims && s->trims--) malloc_trim(128 << 10);
#else
    (void)s;
#endif
}

/* ---- Settings ---- */

static void setup_free(setup *u) {
    for (setup *previous; u; u = previous) {
        previous = u->previous;
        for (size_t i = 0; i < u->n_keys; i++) {
            text_bytes_free(&u->keys[i].text), text_bytes_free(&u->keys[i].name);
            if (u->keys[i].first) free(u->keys[i].usage);
        }
        free(u->keys);
        free(u->options.proxies);
        moetext_choice_free(u->options.choice);
        free(u->options.models.at), free(u->options.origins.at), free(u->options.names.at);
        free(u->options.config.text);
        text_bytes_free(&u->options.settings);
        free(u);
    }
}

/* Read the options and the keys. Return -1, or an exit status, usually after an error message. */
static int setup_read(setup *previous, int argc, char **argv, setup **out) {
    setup *u = calloc(1, sizeof *u);
    if (!u) return program_error("out of memory"), EXIT_MODEL;
    u->previous = previous;
    int status = read_options(&u->options, argc, argv);
    if (status < 0) status = http_read_keys(u);
    if (status < 0) return *out = u, -1;
    u->previous = NULL;
    setup_free(u);
    return status;
}

/* Return the name of an option that differs and cannot change while the server runs, or NULL. */
static const char *fixed_option(const options *a, const options *b) {
    static const struct {
        const char *name;
        size_t at;
        int is_text;
    } rows[] = { { "host", offsetof(options, host), 1 },
                 { "listen", offsetof(options, path), 1 },
                 { "pid-file", offsetof(options, pid_file), 1 },
                 { "port", offsetof(options, port), 0 },
                 { "reuse-port", offsetof(options, reuse_port), 0 },
                 { "max-connections", offsetof(options, max_connections), 0 } };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const void *x = (const char *)a + rows[i].at, *y = (const char *)b + rows[i].at;
        const char *const *p = x, *const *q = y;
        if (rows[i].is_text ? strcmp(*p ? *p : "", *q ? *q : "") != 0 : *(const int *)x != *(const int *)y)
            return rows[i].name;
    }
    return NULL;
}

/* ---- Reloading ---- */

typedef struct reloading {
    server *server;
    int argc;
    char **argv;
    pthread_t thread;
    int running;      /* 1 if the thread must be joined */
    _Atomic int done; /* 1 after the thread has finished */
} reloading;

/* Reload settings, keys and changed models. Change nothing if anything fails. */
static int reload(const reloading *r) {
    server *s = r->server;
    setup *u = NULL;
    backend *b = NULL;
    int status = setup_read(s->setup, r->argc, r->argv, &u);
    if (status >= 0) return status;
    const char *fixed = fixed_option(&s->setup->options, &u->options);
    if (fixed) program_error("--%s cannot change while the server runs", fixed), status = EXIT_USAGE;
    const int changed = status < 0 && !backend_is_current(s->backend, &u->options);
    if (changed && !stopping) backend_save(s->backend, 5);
    if (changed) status = backend_open(s, &u->options, &b);
    if (status < 0) status = log_open(s, u->options.log);
    if (b && status < 0) status = backend_start(b);
    if (status >= 0) {
        u->previous = NULL;
        setup_free(u);
        backend_free(b);
        return status;
    }
    s->setup = u;
    if (b) backends_replace(s, b);
    if (!u->options.quiet) fprintf(stderr, "moe-server: reloaded%s\n", b ? ", with models" : "");
    return -1;
}

static void *reload_thread(void *closure) {
    reloading *r = closure;
    struct timespec now;
    char state[64];
    clock_gettime(CLOCK_MONOTONIC, &now);
    snprintf(state, sizeof state, "RELOADING=1\nMONOTONIC_USEC=%lld",
             (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000);
    process_notify(state);
    const int status = reload(r);
    if (status >= 0) program_error("the reload failed: the previous settings remain");
    process_notify("READY=1");
    pthread_mutex_lock(&r->server->lock);
    r->server->reloads[status >= 0]++;
    pthread_mutex_unlock(&r->server->lock);
    process_reloaded(r->server, status >= 0);
    r->done = 1;
    return NULL;
}

static void look_for_reload(reloading *r) {
    if (r->running && r->done) pthread_join(r->thread, NULL), r->running = 0;
    if (r->running) return;
    pthread_mutex_lock(&r->server->lock);
    const int wanted = hung_up || r->server->wants_reload;
    r->server->wants_reload = 0;
    pthread_mutex_unlock(&r->server->lock);
    if (!wanted) return;
    hung_up = 0, r->done = 0;
    r->running = !pthread_create(&r->thread, NULL, reload_thread, r);
    if (!r->running) program_error("the reload failed: cannot start a thread"), process_reloaded(r->server, 1);
}

/* ---- Serving ---- */

/* Do the periodic work of the main thread. */
static void on_tick(server *s) {
    const struct timespec tick = { .tv_nsec = 50000000 };
    nanosleep(&tick, NULL);
    requests_look(s);
    fetching_look(s);
    files_drop_old(s);
    live_drop_old(s);
    http_end_slow(s);
    trim_memory(s);
    backends_tidy(s);
}

/* Tell the user and the supervisor that the server is ready. Return -1, or an exit status after an error message. */
static int announce(server *s) {
    const options *o = &s->setup->options;
    char at[1100];
    const int status = process_write_pid(s, listen_port(s));
    if (status >= 0) return status;
    listen_address(s, at, sizeof at);
    if (!o->quiet && o->choice && o->several) fprintf(stderr, "moe-server: %zu models at %s\n", o->models.n, at);
    else if (!o->quiet) fprintf(stderr, "moe-server: %s at %s\n", o->model, at);
    if (!o->quiet && !listen_is_loopback(s) && !s->setup->n_keys)
        program_error("warning: any machine that can reach %s can use this server; see --api-keys", at);
    process_notify("READY=1");
    return -1;
}

/* Hand over to another server: answer requests on open connections until all are idle or the time is up. */
static void drain(server *s, double end) {
    const double least = program_seconds() + 0.5;
    s->draining = 1;
    while (http_connections(s, program_seconds() > least) && program_seconds() < end && !s->broken) on_tick(s);
}

/* Stop accepting connections, and answer the remaining requests within the grace period. */
static void finish(server *s, int grace) {
    const double end = program_seconds() + grace;
    listen_stop(s);
    process_notify("STOPPING=1");
    if (s->listening.shared) drain(s, end);
    requests_end(s);
    while (s->under_way && program_seconds() < end && !s->broken) on_tick(s);
    const size_t cut = requests_cut(s);
    if (cut && !s->broken) program_error("%zu requests did not finish within %d seconds", cut, grace);
    backends_end(s);
    const struct timespec tick = { .tv_nsec = 50000000 };
    for (int i = 0; i < 10 && s->under_way; i++) nanosleep(&tick, NULL); /* wait for answers that are being sent */
    nanosleep(&tick, NULL);
}

/* Serve requests until a signal arrives. */
static int serve(reloading *r) {
    server *s = r->server;
    struct MHD_Daemon *daemon = http_start(s);
    if (!daemon) return EXIT_INPUT_OUTPUT;
    int status = backend_start(s->backend);
    if (status < 0) status = announce(s);
    while (status < 0 && !stopping && !s->broken) on_tick(s), look_for_reload(r);
    failed = s->broken || status >= 0;
    const int grace = failed ? 0 : s->setup->options.grace;
    signal(SIGALRM, end_now);
    alarm((unsigned)grace + 1);
    if (r->running) pthread_join(r->thread, NULL);
    process_drop_pid(s);
    finish(s, grace);
    MHD_stop_daemon(daemon);
    return status >= 0 ? status : s->broken ? EXIT_MODEL : EXIT_DONE;
}

static const route *const interfaces[] = { libre_routes, file_routes,     deepl_routes,  openai_routes, ollama_routes,
                                           live_routes,  fetching_routes, status_routes, NULL };

int main(int argc, char **argv) {
    server s = { .interfaces = interfaces,
                 .lock = PTHREAD_MUTEX_INITIALIZER,
                 .connections_lock = PTHREAD_MUTEX_INITIALIZER,
                 .detecting = PTHREAD_MUTEX_INITIALIZER };
    reloading r = { .server = &s, .argc = argc, .argv = argv };
    setup *u = NULL;
    limit_retained_memory();
    reading_begin();
    int status = program_begin("moe-server");
    if (status < 0) status = setup_read(NULL, argc, argv, &u);
    s.setup = u;
    if (status < 0 && u->options.reload) status = process_reload(&u->options);
    if (status < 0) status = log_open(&s, u->options.log);
    if (status < 0) handle_signals();
    if (status < 0) status = backend_open(&s, &u->options, &s.backend);
    if (status < 0) status = serve(&r);
    if (u && u->options.settings.length && strstr(u->options.settings.data, "prompt-cache="))
        alarm(60); /* time to write it */
    backends_free(&s);
    files_free(&s);
    live_free(&s);
    fetching_end(&s);
    setup_free(s.setup);
    if (s.log_file) close(s.log_file);
    return status;
}
