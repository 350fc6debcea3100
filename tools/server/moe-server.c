/* moe-server - translation over HTTP, with LibreTranslate's interface: see usage() below, or --help.
 * server.h says which file has what.
 *
 * Contents
 *   1. Options    the command line
 *   2. Main       the model; serve until a signal
 */
#define _GNU_SOURCE      /* getopt_long on Linux */
#define _DARWIN_C_SOURCE /* and on macOS         */

#include "tools/server/server.h"
#include "tools/text/settings.h"

#include <errno.h>
#include <getopt.h>
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

static void usage(FILE *to) {
    fputs("Usage: moe-server [OPTION]...\n"
          "Translates over HTTP, with LibreTranslate's interface, and one page to try it:\n"
          "POST /translate, /translate_file, /detect; GET /languages, /health, /metrics,\n"
          "/frontend/settings, /spec, /; DeepL's /v2/translate, /v2/languages, /v2/usage;\n"
          "immersive-translate's /imme; OpenAI's /v1/chat/completions, /v1/models with\n"
          "a decoder-only model. All clients are decoded together.\n"
          "\n" PROGRAM_HELP_MODEL "                            May be repeated: all directions that the models\n"
          "                            give, alone or two with a language between them\n"
          "      --models DIR          the same with all models (*.bin) of a folder, each\n"
          "                            opened when a text first needs it\n"
          "      --models-memory SIZE  close models so that those open, with their\n"
          "                            sessions, take no more, such as 512M; the one not\n"
          "                            used for the longest time goes first\n"
          "      --host ADDRESS        address to listen at (default: 127.0.0.1, this\n"
          "                            machine only)\n"
          "      --port N              port; 0: any free port (default: 5000)\n"
          "      --listen unix:PATH    a Unix domain socket instead of host and port, for\n"
          "                            the owner and the group; a stale one is replaced\n"
          "      --set NAME=VALUE      a setting of the translator, an option of\n"
          "                            moe-translate: beam=4, rerank=0, batch=64. May be\n"
          "                            repeated\n"
          "      --threads N           threads that translate (default: one per processor)\n"
          "      --max-memory SIZE     refuse to start if the translator needs more than\n"
          "                            SIZE, such as 512M, and allocate all of it at\n"
          "                            once. A mapped model and requests do not count\n"
          "\n",
          to);
    fputs("Limits\n"
          "      --max-body KB         largest request (default: 1024); beyond: 413\n"
          "      --max-texts N         texts in one request (default: 1000); beyond: 413\n"
          "      --max-queue N         waiting texts (default: 10000); beyond: 429, or\n"
          "                            413 if one request has more\n"
          "      --max-client KB       waiting texts of one client (API key or address;\n"
          "                            default: 4096); beyond, if some wait already: 429\n"
          "      --max-client-texts N  number of these texts (default: 4000); beyond: 429\n"
          "      --timeout SECONDS     longest time of an answer (default: 60); beyond:\n"
          "                            504\n"
          "      --grace SECONDS       time after a signal for requests under way\n"
          "                            (default: 5)\n"
          "      --max-bodies KB       size of all incoming requests (default: 65536);\n"
          "                            one address gets no more than the free part;\n"
          "                            beyond: 503, or 413 for one larger than half\n"
          "      --max-connections N   connections of all clients (default: 1000); others\n"
          "                            wait\n"
          "      --max-address N       connections of one address (default: 100; for IPv6\n"
          "                            of the same first 64 bits); others are closed\n"
          "      --read-timeout SECONDS\n"
          "                            longest time to receive a request, and for a\n"
          "                            client to take each MB of an answer (default: 30)\n"
          "      --rate N              requests per minute from one address; beyond: 429\n"
          "                            (default: 0, no limit); /health does not count\n"
          "      --api-keys FILE       one key per line, with an optional TAB and number\n"
          "                            of characters to translate; requests need a key as\n"
          "                            api_key or Bearer, else 403; beyond: 429 or 456\n"
          "      --allow-origin URL    web pages of this origin may send requests; *: all\n"
          "                            (default: only the server's own page)\n"
          "      --trust-proxy ADDRESS[/BITS]\n"
          "                            a trusted proxy. Its requests count for the last\n"
          "                            untrusted address in X-Forwarded-For, a header\n"
          "                            that the proxy must write itself. May be repeated;\n"
          "                            unix: all clients of --listen\n"
          "      --log FILE            one line of JSON per request; -: to standard\n"
          "                            error. SIGHUP reopens FILE\n"
          "\n"
          "  -q, --quiet               report only errors\n"
          "  -h, --help                this text\n"
          "  -V, --version             version of moe and of SentencePiece\n"
          "\n"
          "SIGTERM and SIGINT: no new connections or requests; requests under way are\n"
          "answered for --grace seconds, then end with an error; a second signal ends the\n"
          "server at once. Texts of a client that closes its connection are dropped.\n"
          "Exit status: 0 ended by a signal, 2 usage, 3 model or memory, 4 the port\n"
          "cannot be opened.\n",
          to);
}

enum {
    OPTION_HOST = 1000,
    OPTION_PORT,
    OPTION_LISTEN,
    OPTION_SET,
    OPTION_THREADS,
    OPTION_MEMORY,
    OPTION_MODELS,
    OPTION_MODELS_MEMORY,
    OPTION_BODY,
    OPTION_TEXTS,
    OPTION_QUEUE,
    OPTION_CLIENT,
    OPTION_CLIENT_TEXTS,
    OPTION_TIMEOUT,
    OPTION_GRACE,
    OPTION_RATE,
    OPTION_BODIES,
    OPTION_CONNECTIONS,
    OPTION_ADDRESS,
    OPTION_READ,
    OPTION_KEYS,
    OPTION_ORIGIN,
    OPTION_PROXY,
    OPTION_LOG
};

static const struct option long_options[] = {
    { "model", required_argument, NULL, 'm' },
    { "host", required_argument, NULL, OPTION_HOST },
    { "port", required_argument, NULL, OPTION_PORT },
    { "listen", required_argument, NULL, OPTION_LISTEN },
    { "set", required_argument, NULL, OPTION_SET },
    { "threads", required_argument, NULL, OPTION_THREADS },
    { "max-memory", required_argument, NULL, OPTION_MEMORY },
    { "models", required_argument, NULL, OPTION_MODELS },
    { "models-memory", required_argument, NULL, OPTION_MODELS_MEMORY },
    { "max-body", required_argument, NULL, OPTION_BODY },
    { "max-texts", required_argument, NULL, OPTION_TEXTS },
    { "max-queue", required_argument, NULL, OPTION_QUEUE },
    { "max-client", required_argument, NULL, OPTION_CLIENT },
    { "max-client-texts", required_argument, NULL, OPTION_CLIENT_TEXTS },
    { "timeout", required_argument, NULL, OPTION_TIMEOUT },
    { "grace", required_argument, NULL, OPTION_GRACE },
    { "max-bodies", required_argument, NULL, OPTION_BODIES },
    { "max-connections", required_argument, NULL, OPTION_CONNECTIONS },
    { "max-address", required_argument, NULL, OPTION_ADDRESS },
    { "read-timeout", required_argument, NULL, OPTION_READ },
    { "rate", required_argument, NULL, OPTION_RATE },
    { "api-keys", required_argument, NULL, OPTION_KEYS },
    { "allow-origin", required_argument, NULL, OPTION_ORIGIN },
    { "trust-proxy", required_argument, NULL, OPTION_PROXY },
    { "log", required_argument, NULL, OPTION_LOG },
    { "quiet", no_argument, NULL, 'q' },
    { "help", no_argument, NULL, 'h' },
    { "version", no_argument, NULL, 'V' },
    { NULL, 0, NULL, 0 },
};

static int add_setting(options *o, const char *name, const char *value) {
    if (o->settings.length) text_append_string(&o->settings, ";");
    text_append_string(&o->settings, name);
    text_append_string(&o->settings, value);
    return o->settings.failed ? EXIT_MODEL : -1;
}

static int add_proxy(options *o, const char *text) {
    network *more = realloc(o->proxies, (o->n_proxies + 1) * sizeof *more);
    if (!more) return EXIT_MODEL;
    o->proxies = more;
    if (network_read(text, &o->proxies[o->n_proxies])) return o->n_proxies++, -1;
    return program_usage_error("--trust-proxy expects ADDRESS or ADDRESS/BITS, such as 10.0.0.0/8, not '%s'", text);
}

/* A model of -m, or a folder of --models. */
static int add_model(options *o, const char *path) {
    const char **more = realloc(o->models, (o->n_models + 1) * sizeof *more);
    if (!more) return program_complain("out of memory"), EXIT_MODEL;
    o->models = more;
    o->models[o->n_models++] = path;
    o->model = o->models[0];
    return -1;
}

static int take_path(options *o, const char *text) {
    const size_t most = sizeof((struct sockaddr_un *)0)->sun_path - 1, length = strlen(text);
    if (strncmp(text, "unix:", 5) != 0 || length == 5 || length - 5 > most)
        return program_usage_error("--listen expects unix:PATH, of a path that a socket can have, not '%s'", text);
    return o->path = text + 5, -1;
}

/* Takes one option: -1, or the exit status. */
static int take_option(options *o, int c) {
    switch (c) {
    case 'm': o->several |= o->n_models > 0; return add_model(o, optarg);
    case OPTION_MODELS: o->several = 1; return add_model(o, optarg);
    case 'q': o->quiet = 1; return -1;
    case 'h': usage(stdout); return program_printed();
    case 'V':
        printf("moe-server %s, SentencePiece %s\n", moetext_version(), moetext_tokeniser_version());
        return program_printed();
    case OPTION_HOST: o->host = optarg; return -1;
    case OPTION_KEYS: o->keys = optarg; return -1;
    case OPTION_ORIGIN: o->origin = optarg; return -1;
    case OPTION_LOG: o->log = optarg; return -1;
    case OPTION_PROXY: return add_proxy(o, optarg);
    case OPTION_LISTEN: return take_path(o, optarg);
    case OPTION_PORT: return program_int("port", optarg, 0, 65535, &o->port);
    case OPTION_THREADS: return program_int("threads", optarg, 1, MOE_MAX_THREADS, &o->threads);
    case OPTION_BODY: return program_int("max-body", optarg, 1, 1 << 20, &o->max_body);
    case OPTION_TEXTS: return program_int("max-texts", optarg, 1, 1 << 20, &o->max_texts);
    case OPTION_QUEUE: return program_int("max-queue", optarg, 1, 1 << 24, &o->max_queue);
    case OPTION_CLIENT: return program_int("max-client", optarg, 1, 1 << 24, &o->max_client);
    case OPTION_CLIENT_TEXTS: return program_int("max-client-texts", optarg, 1, 1 << 24, &o->max_client_texts);
    case OPTION_TIMEOUT: return program_int("timeout", optarg, 1, 86400, &o->timeout);
    case OPTION_GRACE: return program_int("grace", optarg, 0, 86400, &o->grace);
    case OPTION_BODIES: return program_int("max-bodies", optarg, 1, 1 << 24, &o->max_bodies);
    case OPTION_CONNECTIONS: return program_int("max-connections", optarg, 2, 1 << 20, &o->max_connections);
    case OPTION_ADDRESS: return program_int("max-address", optarg, 1, 1 << 20, &o->max_address);
    case OPTION_READ: return program_int("read-timeout", optarg, 1, 86400, &o->read_timeout);
    case OPTION_RATE: return program_int("rate", optarg, 0, 1 << 20, &o->rate);
    case OPTION_MODELS_MEMORY: return add_setting(o, "models-memory=", optarg);
    case OPTION_MEMORY: return add_setting(o, "max-memory=", optarg);
    case OPTION_SET: return add_setting(o, "", optarg);
    default: fputs("Try moe-server --help\n", stderr); return EXIT_USAGE; /* getopt said why */
    }
}

static int read_options(options *o, int argc, char **argv) {
    static const char here[] = "127.0.0.1";
    *o = (options){ .host = here,
                    .port = 5000,
                    .max_body = 1024,
                    .max_texts = 1000,
                    .max_queue = 10000,
                    .max_client = 4096,
                    .max_client_texts = 4000,
                    .timeout = 60,
                    .grace = 5,
                    .max_bodies = 65536,
                    .max_connections = 1000,
                    .max_address = 100,
                    .read_timeout = 30 };
    static const int repeated[] = { OPTION_SET, OPTION_PROXY, OPTION_MODELS, 'm', 0 };
    uint64_t given = 0;
    for (int c; (c = program_next_option(argc, argv, "m:qhV", long_options, repeated, &given)) != -1;) {
        int status = take_option(o, c);
        if (status >= 0) return status;
    }
    if (optind < argc) return program_usage_error("'%s': moe-server takes no arguments", argv[optind]);
    if (o->path && (o->host != here || o->port != 5000))
        return program_usage_error("--listen is in the place of %s", "--host and --port");
    const int status = program_default_model(&o->model);
    if (status >= 0) return status;
    if (o->threads) {
        if (o->settings.length) text_append_string(&o->settings, ";");
        text_printf(&o->settings, "threads=%d", o->threads);
    }
    return -1;
}

/* ==== 2. Main =========================================================================================== */

static int is_given(const options *o, const char *name) {
    size_t length = strlen(name);
    for (const char *at = o->settings.length ? o->settings.data : ""; *at;) {
        if (strncmp(at, name, length) == 0 && at[length] == '=') return 1;
        at += strcspn(at, ";");
        at += *at == ';';
    }
    return 0;
}

/* Who has texts in the batch already leaves a quarter of it to those who have none: else they would wait until as many
 * of the others' sentences, which began together, end together, and what is asked to rerank those. */
static void keep_room(server *s) {
    const moe_model *engine = moetext_model_engine(s->model);
    text_settings wishes = text_settings_none();
    moe_session_params p = { .batch = 32 }; /* of several models, none of which may be open */
    moe_error error;
    if (engine) p = moe_session_params_default(engine);
    if (text_settings_parse(&wishes, s->options.settings.data, &error)) return;
    text_settings_apply(&wishes, &p);
    s->max_prompt = (size_t)p.max_source;
    s->draws = p.sample && p.beam == 1;
    s->sampling = p;
    if (p.temperature == 0 && engine) /* unless an answer asks for draws, and then as the model's authors recommend */
        s->sampling.sample = 0, s->sampling.temperature = moe_session_params_default(engine).temperature;
    if (p.batch < 4) return;
    s->busy = (size_t)p.batch * 3 / 4;
    s->calm = s->busy - (size_t)p.batch / 4; /* the encoder takes sentences in groups */
}

static int answers_messages(const moetext_model *model) {
    const moetext_message hello = { .role = MOETEXT_USER, .text = "" };
    size_t n;
    return moetext_model_prompt(model, &hello, 1, NULL, 0, &n, NULL) == MOE_OK;
}

/* The translator, by default with what the page shows: other translations, and which words belong together. */
static int open_translator(server *s) {
    moe_error error = { 0 };
    const options *o = &s->options;
    if (o->several ? moetext_models_open(o->models, o->n_models, o->settings.data, &s->model, &error)
                   : moetext_model_open(o->model, o->settings.data, &s->model, &error)) {
        program_file_error(o->model, &error);
        return error.code == MOE_ERROR_ARGUMENT ? EXIT_USAGE : EXIT_MODEL;
    }
    static const char *const extras[] = {
        /* what a narrow beam or a model without attention has, as much as goes */
        ";nbest=3;alignment=1", ";nbest=2;alignment=1", ";alignment=1", ";nbest=3", ";nbest=2", ""
    };
    static const char *const draws[] = { "sample", "temperature", "top_k", "top_p", "min_p", "seed" };
    const size_t n = sizeof extras / sizeof *extras;
    int sampled = 0;
    s->answers = answers_messages(s->model); /* which are greedy, as moe-translate is with such a model */
    for (size_t i = 0; i < sizeof draws / sizeof *draws; i++) sampled |= is_given(&s->options, draws[i]);
    if (s->answers && !sampled) text_append_string(&s->options.settings, ";sample=1;temperature=0");
    size_t length = s->options.settings.length;
    const int asked = s->answers || is_given(&s->options, "nbest") || is_given(&s->options, "alignment");
    for (size_t i = asked ? n - 1 : 0; i < n; i++) {
        s->options.settings.length = length;
        text_append_string(&s->options.settings, extras[i]);
        if (s->options.settings.failed) break;
        if (moetext_new(s->model, s->options.settings.data, &s->translator, &error)) continue;
        s->began = time(NULL);
        s->aligned = strstr(s->options.settings.data, "alignment=1") != NULL;
        keep_room(s);
        return -1;
    }
    program_complain("%s%s%s", error.where, error.where[0] ? ": " : "",
                     error.message[0] ? error.message : "out of memory");
    return error.code == MOE_ERROR_ARGUMENT ? EXIT_USAGE : EXIT_MODEL;
}

static void open_detector(server *s) {
    size_t n = moetext_model_language_count(s->model);
    const char **codes = calloc(n + 1, sizeof *codes);
    for (size_t i = 0; codes && i < n; i++) codes[i] = moetext_model_language(s->model, i);
    moe_error error = { 0 };
    if (codes && text_detector_open(codes, n, &s->detector, &error) && !s->options.quiet)
        program_complain("languages cannot be detected: %s", error.message);
    free(codes);
}

static int has_failed(server *s) {
    pthread_mutex_lock(&s->lock);
    const int failed = s->broken;
    pthread_mutex_unlock(&s->lock);
    return failed;
}

/* Whatever a thread is stuck in, the end comes when it was promised. */
static void end_now(int number) {
    (void)number;
    _exit(EXIT_DONE);
}

static void end_failed(int number) {
    (void)number;
    _exit(EXIT_MODEL);
}

static volatile sig_atomic_t hung_up; /* global: a signal handler can reach nothing else */

static void on_hangup(int number) { hung_up = number; }

/* Programs that move logs away say so by SIGHUP. Where there is no file, it ends the server as it ends any program. */
static void handle_hangup(const options *o) {
    struct sigaction anew = { .sa_flags = SA_RESTART };
    anew.sa_handler = on_hangup;
    if (o->log && strcmp(o->log, "-") != 0) sigaction(SIGHUP, &anew, NULL);
}

/* Says to systemd, or what else started this and set NOTIFY_SOCKET, how far it is (sd_notify(3)). */
static void notify(const char *state) {
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    const size_t length = path ? strlen(path) : 0;
    if (!length || length >= sizeof to.sun_path) return;
    memcpy(to.sun_path, path, length);
    if (path[0] == '@') to.sun_path[0] = 0; /* a name without a file */
    const int out = socket(AF_UNIX, SOCK_DGRAM, 0);
    const socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    if (out < 0 || sendto(out, state, strlen(state), 0, (const struct sockaddr *)(const void *)&to, size) < 0)
        program_complain("NOTIFY_SOCKET %s: %s", path, strerror(errno));
    if (out >= 0) close(out);
}

/* What requests took goes back to the system when they are gone. glibc learns otherwise: after the first large body
 * that is freed it has others among the small blocks, and keeps what is below the last of those. */
static void give_memory_back(void) {
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 128 << 10);
    mallopt(M_TRIM_THRESHOLD, 128 << 10);
#endif
}

/* And so does what is free between blocks that stay, of which every thread has its own: 20 MB after a minute of abuse.
 * Now and then while there are requests, and some times after the last one, whose memory may go later than it. */
static void give_gaps_back(server *s) {
#ifdef __GLIBC__
    const double now = program_seconds();
    if (now - s->trimmed < 2) return;
    pthread_mutex_lock(&s->lock);
    const uint64_t left = s->n_left;
    pthread_mutex_unlock(&s->lock);
    if (left != s->trimmed_at) s->trims = 3;
    s->trimmed = now, s->trimmed_at = left;
    if (s->trims && s->trims--) malloc_trim(128 << 10);
#else
    (void)s;
#endif
}

/* What is to be done at every tick. */
static void look(server *s) {
    requests_look(s);
    files_drop_old(s);
    http_end_slow(s);
    give_gaps_back(s);
    if (hung_up) hung_up = 0, log_open(s);
}

static void say_where(const server *s, struct MHD_Daemon *daemon) {
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT);
    const int six = strchr(s->options.host, ':') != NULL; /* an address of IPv6 */
    if (!s->options.quiet && s->options.path)
        fprintf(stderr, "moe-server: %s at unix:%s\n", s->options.model, s->options.path);
    else if (!s->options.quiet)
        fprintf(stderr, "moe-server: %s at http://%s%s%s:%d/\n", s->options.model, six ? "[" : "", s->options.host,
                six ? "]" : "", info ? info->port : 0);
    notify("READY=1");
}

/* Serve until a signal; then answer what is under way, for some seconds. */
static int serve(server *s) {
    pthread_t decoder;
    struct MHD_Daemon *daemon = http_listen(s);
    if (!daemon) return EXIT_INPUT_OUTPUT;
    if (pthread_create(&decoder, NULL, requests_decode, s)) {
        MHD_stop_daemon(daemon);
        http_unlink(s);
        program_complain("no thread could be started");
        return EXIT_MODEL;
    }
    say_where(s, daemon);
    const struct timespec tick = { .tv_nsec = 50000000 };
    while (!program_signal && !has_failed(s)) nanosleep(&tick, NULL), look(s);
    const int grace = has_failed(s) ? 0 : s->options.grace;
    signal(SIGALRM, has_failed(s) ? end_failed : end_now);
    alarm((unsigned)grace + 1);
    const MHD_socket listening = MHD_quiesce_daemon(daemon);
    if (listening != MHD_INVALID_SOCKET) shutdown(listening, SHUT_RD); /* closed last: threads still look at it */
    http_unlink(s);
    notify("STOPPING=1");
    requests_end(s);
    const double end = program_seconds() + grace;
    while (requests_under_way(s) && program_seconds() < end && !has_failed(s)) nanosleep(&tick, NULL), look(s);
    const size_t cut = requests_cut(s);
    if (cut && !has_failed(s)) program_complain("%zu requests were not finished within %d seconds", cut, grace);
    moetext_cancel(s->translator);
    pthread_join(decoder, NULL);
    for (int i = 0; i < 10 && requests_under_way(s); i++) nanosleep(&tick, NULL); /* answers that are being sent */
    nanosleep(&tick, NULL);
    MHD_stop_daemon(daemon);
    if (listening != MHD_INVALID_SOCKET) close(listening);
    return s->broken ? EXIT_MODEL : EXIT_DONE;
}

int main(int argc, char **argv) {
    server s = { .lock = PTHREAD_MUTEX_INITIALIZER,
                 .filled = PTHREAD_COND_INITIALIZER,
                 .doors = PTHREAD_MUTEX_INITIALIZER,
                 .detecting = PTHREAD_MUTEX_INITIALIZER };
    give_memory_back();
    int status = program_begin("moe-server");
    if (status < 0) status = read_options(&s.options, argc, argv);
    if (status < 0) status = http_read_keys(&s);
    if (status < 0) status = log_open(&s);
    if (status < 0) program_handle_signals(), handle_hangup(&s.options);
    if (status < 0) status = open_translator(&s);
    if (status < 0) {
        open_detector(&s);
        status = serve(&s);
    }
    text_detector_close(s.detector);
    experts_close(s.experts);
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
