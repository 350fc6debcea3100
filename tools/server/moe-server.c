/* moe-server - translate over HTTP. server.h lists the source files.
 *
 * Contents
 *   1. Options    the command line
 *   2. Main       open the models and serve requests until a signal
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/options.h"
#include "tools/server/server.h"
#include "tools/text/settings.h"

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

/* Append NAME=VALUE, or the argument to --set, to the settings for libmoetext. */
static int add_setting(void *user, const option_row *row, const char *value) {
    options *o = user;
    text_settings checked = text_settings_none();
    moe_error e;
    const int named = strcmp(row->name, "set") != 0;
    if (named && strchr(value, ';')) return program_usage_error("invalid value '%.60s' for --%s", value, row->name);
    if (o->settings.length) text_append_string(&o->settings, ";");
    if (named) text_printf(&o->settings, "%s=", row->name);
    text_append_string(&o->settings, value);
    if (o->settings.failed) return program_error("out of memory"), EXIT_MODEL;
    return text_settings_parse(&checked, o->settings.data, &e) ? program_usage_error("%s", e.message) : -1;
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

/* Add a model from -m or a folder from --models. */
static int add_model(void *user, const option_row *row, const char *path) {
    options *o = user;
    const char **more = realloc(o->models, (o->n_models + 1) * sizeof *more);
    if (!more) return program_error("out of memory"), EXIT_MODEL;
    o->models = more;
    o->models[o->n_models++] = path;
    o->model = o->models[0];
    o->several |= o->n_models > 1 || !row->letter;
    return -1;
}

static int take_path(void *user, const option_row *row, const char *text) {
    const size_t most = sizeof((struct sockaddr_un *)0)->sun_path - 1, length = strlen(text);
    if (strncmp(text, "unix:", 5) != 0 || length == 5 || length - 5 > most)
        return program_usage_error("invalid value '%s' for --%s: expected unix:PATH with a path of at most %zu bytes",
                                   text, row->name, most);
    return ((options *)user)->path = text + 5, -1;
}

static const option_row own_rows[] = {
    { "model", "FILE", "model file (default: MOE_MODEL, else the installed model, else the one in the repository)",
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
    { "threads", "N", "number of translation threads (default: one per processor)", .group = GROUP_MODEL,
      .kind = ROW_CALL, .take = add_setting },
    { "set", "NAME=VALUE", "set a moe-translate option, e.g. beam=4, rerank=0, batch=64; may be repeated",
      .group = "Translation", .kind = ROW_CALL, .take = add_setting, .repeated = 1 },
    { "host", "ADDRESS", "address to listen on (default: 127.0.0.1, this machine only)", .group = "Network",
      OPTION_MEMBER(ROW_WORD, host) },
    { "port", "N", "port to listen on; 0 chooses a free one (default: 5000)", .group = "Network",
      OPTION_INT(port, 0, 65535) },
    { "listen", "unix:PATH",
      "listen on a Unix domain socket (owner and group only) instead of a host and port; replace a stale socket",
      .group = "Network", .kind = ROW_CALL, .take = take_path },
    { "api-keys", "FILE",
      "accept only requests with a key from this file, as api_key or Bearer token; others get status 403",
      .more = ". Each line contains a key, optionally followed by TAB and a character limit; requests that exceed it "
              "get status 429 or 456",
      .group = "Network", OPTION_MEMBER(ROW_WORD, keys) },
    { "allow-origin", "URL",
      "accept requests from web pages with this origin; * accepts all (default: only the server's page)",
      .group = "Network", OPTION_MEMBER(ROW_WORD, origin) },
    { "trust-proxy", "ADDRESS[/BITS]",
      "use X-Forwarded-For from this proxy; its last untrusted address is the client's",
      .more = ". The proxy must set this header itself. unix trusts all clients of --listen; may be repeated",
      .group = "Network", .kind = ROW_CALL, .take = add_proxy, .repeated = 1 },
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
    { "rate", "N", "maximum number of requests per minute per address, excluding /health (default: 0, no limit)",
      .more = "; further requests get status 429", .group = "Limits", OPTION_INT(rate, 0, 1 << 20) },
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
        "its texts are dropped.\n"
        "\n"
        "Exit status: 0 ended by a signal, 2 usage error, 3 model or memory error, 4 cannot listen on the port.\n",
    .examples = "  moe-server --port 8080\n"
                "  moe-server --models models --models-memory 2G --set beam=2\n",
    OPTION_EXCLUSIONS("listen host port"),
    .version = version,
};

static int read_options(options *o, int argc, char **argv) {
    *o = (options){ .host = "127.0.0.1", .port = 5000, .timeout = 60, .read_timeout = 30, .grace = 5 };
    o->max_body = 1024, o->max_texts = 1000, o->max_queue = 10000, o->max_client = 4096, o->max_client_texts = 4000;
    o->max_bodies = 65536, o->max_connections = 1000, o->max_address = 100;
    const int status = option_parse(&program, argc, argv, o);
    return status < 0 ? program_default_model(&o->model) : status;
}

/* ==== 2. Main =========================================================================================== */

static int has_mixtures(const moetext_model *model) {
    const moe_model *engine =
        moetext_model_engine(model); /* NULL for several models, which have no experts in common */
    return engine && moe_model_mixture_count(engine);
}

/* Reserve a quarter of the batch for clients with no texts in it. Otherwise a new client would have to wait for other
 * clients' sentences, which start together and end at about the same time, after reranking. */
static void reserve_slots(server *s) {
    const moe_model *engine = moetext_model_engine(s->model);
    text_settings wanted = text_settings_none();
    moe_session_params p = { .batch = 32 }; /* default for several models, none of which may be open yet */
    if (engine) p = moe_session_params_default(engine);
    if (text_settings_parse(&wanted, s->options.settings.data, NULL)) return;
    text_settings_apply(&wanted, &p);
    s->routed = wanted.routing > 0 && has_mixtures(s->model);
    s->max_prompt = (size_t)p.max_source;
    s->samples = p.sample && p.beam == 1;
    s->sampling = p;
    if (p.temperature == 0 && engine) /* greedy by default; requests that sample use the model's temperature */
        s->sampling.sample = 0, s->sampling.temperature = moe_session_params_default(engine).temperature;
    if (p.batch < 4) return;
    s->busy = (size_t)p.batch * 3 / 4;
    s->calm = s->busy - (size_t)p.batch / 4; /* wait for a gap: the encoder works on groups of sentences */
}

static int answers_messages(const moetext_model *model) {
    const moetext_message hello = { .role = MOETEXT_USER, .text = "" };
    size_t n;
    return moetext_model_prompt(model, &hello, 1, NULL, 0, &n, NULL) == MOE_OK;
}

/* Open the models and the translator. By default, enable alternatives, word links and experts for the web page. */
static int open_translator(server *s) {
    moe_error error = { 0 };
    const options *o = &s->options;
    if (o->several ? moetext_models_open(o->models, o->n_models, o->settings.data, &s->model, &error)
                   : moetext_model_open(o->model, o->settings.data, &s->model, &error)) {
        program_file_error(o->several ? NULL : o->model, &error);
        return error.code == MOE_ERROR_ARGUMENT ? EXIT_USAGE : EXIT_MODEL;
    }
    static const char *const extras[] = {
        /* use the first entry that the beam, the model and the memory allow, with routing=1 if possible */
        ";nbest=3;alignment=1", ";nbest=2;alignment=1", ";alignment=1", ";nbest=3", ";nbest=2", ""
    };
    const size_t n = sizeof extras / sizeof *extras;
    text_settings given = text_settings_none();
    text_settings_parse(&given, o->settings.data, NULL); /* cannot fail: the model was opened with the same settings */
    int sampled = !isnan(text_settings_param(&given, "sample"));
    s->answers = answers_messages(s->model);
    for (size_t i = 0; moe_param_at(i); i++) sampled |= moe_param_at(i)->sampling && !isnan(given.params[i]);
    if (s->answers && !sampled) text_append_string(&s->options.settings, ";sample=1;temperature=0");
    size_t length = s->options.settings.length;
    const int chosen = s->answers || !isnan(text_settings_param(&given, "nbest")) || given.alignment >= 0;
    const int routed = given.routing < 0 && has_mixtures(s->model);
    for (size_t i = chosen ? 2 * n - 2 : 0; i < 2 * n; i++) {
        s->options.settings.length = length;
        text_append_string(&s->options.settings, extras[i / 2]);
        if (i % 2 == 0 && !routed) continue;
        if (i % 2 == 0) text_append_string(&s->options.settings, ";routing=1");
        if (s->options.settings.failed) break;
        if (moetext_new(s->model, s->options.settings.data, &s->translator, &error)) continue;
        s->began = time(NULL);
        reserve_slots(s);
        return -1;
    }
    program_error("%s%s%s", error.where, error.where[0] ? ": " : "",
                  error.message[0] ? error.message : "out of memory");
    return error.code == MOE_ERROR_ARGUMENT ? EXIT_USAGE : EXIT_MODEL;
}

static void open_detector(server *s) {
    size_t n = moetext_model_language_count(s->model);
    const char **codes = calloc(n + 1, sizeof *codes);
    for (size_t i = 0; codes && i < n; i++) codes[i] = moetext_model_language(s->model, i);
    moe_error error = { 0 };
    if (codes && text_detector_open(codes, n, &s->detector, &error) && !s->options.quiet)
        program_error("language detection is not available: %s", error.message);
    free(codes);
}

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

/* Install the signal handlers. SIGHUP reopens the log file, if any; otherwise it stops the server unless ignored. */
static void handle_signals(const options *o) {
    const int logged = o->log && strcmp(o->log, "-") != 0;
    struct sigaction stop = { .sa_flags = SA_RESTART }, hangup = stop, before;
    stop.sa_handler = on_stop;
    hangup.sa_handler = logged ? on_hangup : on_stop;
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    if (logged || (!sigaction(SIGHUP, NULL, &before) && before.sa_handler != SIG_IGN)) sigaction(SIGHUP, &hangup, NULL);
    signal(SIGPIPE, SIG_IGN); /* makes write() fail if the pipe is closed */
}

/* Report the state to systemd or another supervisor that has set NOTIFY_SOCKET (see sd_notify(3)). */
static void notify(const char *state) {
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    const size_t length = path ? strlen(path) : 0;
    if (!length || length >= sizeof to.sun_path) return;
    memcpy(to.sun_path, path, length);
    if (path[0] == '@') to.sun_path[0] = 0; /* a socket name that is not a file */
    const int out = socket(AF_UNIX, SOCK_DGRAM, 0);
    const socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    if (out < 0 || sendto(out, state, strlen(state), 0, (const struct sockaddr *)(const void *)&to, size) < 0)
        program_error("NOTIFY_SOCKET %s: %s", path, strerror(errno));
    if (out >= 0) close(out);
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

/* Do the periodic work of the main thread. */
static void on_tick(server *s) {
    requests_look(s);
    files_drop_old(s);
    http_end_slow(s);
    trim_memory(s);
    if (hung_up) hung_up = 0, log_open(s);
}

static void print_address(const server *s, struct MHD_Daemon *daemon) {
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT);
    const int six = strchr(s->options.host, ':') != NULL; /* IPv6 */
    if (!s->options.quiet && s->options.path)
        fprintf(stderr, "moe-server: %s at unix:%s\n", s->options.model, s->options.path);
    else if (!s->options.quiet)
        fprintf(stderr, "moe-server: %s at http://%s%s%s:%d/\n", s->options.model, six ? "[" : "", s->options.host,
                six ? "]" : "", info ? info->port : 0);
    notify("READY=1");
}

/* Serve requests until a signal arrives, then answer the remaining requests within the grace period. */
static int serve(server *s) {
    pthread_t decoder;
    struct MHD_Daemon *daemon = http_listen(s);
    if (!daemon) return EXIT_INPUT_OUTPUT;
    if (pthread_create(&decoder, NULL, requests_decode, s)) {
        MHD_stop_daemon(daemon);
        http_unlink(s);
        program_error("cannot start a thread");
        return EXIT_MODEL;
    }
    print_address(s, daemon);
    const struct timespec tick = { .tv_nsec = 50000000 };
    while (!stopping && !s->broken) nanosleep(&tick, NULL), on_tick(s);
    failed = s->broken;
    const int grace = failed ? 0 : s->options.grace;
    signal(SIGALRM, end_now);
    alarm((unsigned)grace + 1);
    const MHD_socket listening = MHD_quiesce_daemon(daemon);
    if (listening != MHD_INVALID_SOCKET) shutdown(listening, SHUT_RD); /* not closed: threads poll the socket */
    http_unlink(s);
    notify("STOPPING=1");
    requests_end(s);
    const double end = program_seconds() + grace;
    while (s->under_way && program_seconds() < end && !s->broken) nanosleep(&tick, NULL), on_tick(s);
    const size_t cut = requests_cut(s);
    if (cut && !s->broken) program_error("%zu requests did not finish within %d seconds", cut, grace);
    moetext_cancel(s->translator);
    pthread_join(decoder, NULL);
    for (int i = 0; i < 10 && s->under_way; i++) nanosleep(&tick, NULL); /* wait for answers that are being sent */
    nanosleep(&tick, NULL);
    MHD_stop_daemon(daemon);
    if (listening != MHD_INVALID_SOCKET) close(listening);
    return s->broken ? EXIT_MODEL : EXIT_DONE;
}

static const route *const interfaces[] = {
    libre_routes, file_routes, deepl_routes, openai_routes, status_routes, NULL
};

int main(int argc, char **argv) {
    server s = { .interfaces = interfaces,
                 .lock = PTHREAD_MUTEX_INITIALIZER,
                 .filled = PTHREAD_COND_INITIALIZER,
                 .connections_lock = PTHREAD_MUTEX_INITIALIZER,
                 .detecting = PTHREAD_MUTEX_INITIALIZER };
    limit_retained_memory();
    int status = program_begin("moe-server");
    if (status < 0) status = read_options(&s.options, argc, argv);
    if (status < 0) status = http_read_keys(&s);
    if (status < 0) status = log_open(&s);
    if (status < 0) handle_signals(&s.options);
    if (status < 0) status = open_translator(&s);
    if (status < 0) {
        open_detector(&s);
        status = serve(&s);
    }
    text_detector_close(s.detector);
    moetext_free(s.translator);
    moetext_model_close(s.model);
    for (size_t i = 0; i < s.n_keys; i++) text_bytes_free(&s.keys[i].text);
    free(s.keys);
    files_free(&s);
    free(s.options.proxies);
    free(s.options.models);
    if (s.log > STDERR_FILENO) close(s.log);
    text_bytes_free(&s.options.settings);
    return status;
}
