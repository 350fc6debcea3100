/* moe-server - translation over HTTP, with LibreTranslate's interface: see usage() below, or --help.
 *
 * Contents
 *   1. Options    the command line
 *   2. Asks       one HTTP request and the texts in it
 *   3. Decoder    the thread that translates: all texts of all clients are one stream
 *   4. Guards     keys, rates
 *   5. Replies    JSON out
 *   6. Reading    JSON, forms and multipart in
 *   7. Routes     what each address answers
 *   8. Main
 *
 * Threads. libmicrohttpd has threads that read and write; the decoder's thread runs one moetext_translate for as long
 * as the server lives. A request is parsed, its texts go into one queue, and its connection is suspended. The decoder
 * takes texts whenever it has room, so that texts of all clients share its batches. The last result of a request
 * resumes its connection. `server.lock` guards the queue, all asks in state ASK_WAITING, and the figures.
 */
#define _GNU_SOURCE      /* getopt_long on Linux */
#define _DARWIN_C_SOURCE /* and on macOS         */

#include "moe.h"
#include "tools/programs/program.h"
#include "tools/server/experts.h"
#include "tools/server/html.h"
#include "tools/text/bytes.h"
#include "tools/text/detect.h"
#include "tools/text/json.h"
#include "tools/text/moetext.h"

#include "server-html.inc" /* server_html[]: the lines of tools/server/server.html, made by the Makefile */

#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* ==== 1. Options ======================================================================================== */

typedef struct options {
    const char *model, *host, *keys, *origin;
    text_bytes settings; /* of libmoetext */
    int port, threads, max_body, max_texts, max_queue, timeout, rate, quiet;
} options;

static void usage(FILE *to) {
    fputs("Usage: moe-server [OPTION]...\n"
          "Translates over HTTP, with LibreTranslate's interface, and one page to try it:\n"
          "POST /translate, /detect; GET /languages, /health, /frontend/settings,\n"
          "/metrics, /. All clients are decoded together.\n"
          "\n" PROGRAM_HELP_MODEL "      --host ADDRESS        address to listen at (default: 127.0.0.1, this\n"
          "                            machine only)\n"
          "      --port N              port; 0: any that is free (default: 5000)\n"
          "      --set NAME=VALUE      a setting of the translator, as moe-translate has\n"
          "                            it: beam=4, rerank=0, batch=64. May be repeated\n"
          "      --threads N           threads that translate (default: one per processor)\n"
          "      --max-memory SIZE     do not begin where the translator needs more than\n"
          "                            SIZE, such as 512M, and take all of it at once. A\n"
          "                            mapped model and requests do not count\n"
          "\n"
          "Limits\n"
          "      --max-body KB         largest request (default: 1024); beyond: 413\n"
          "      --max-texts N         texts in one request (default: 1000); beyond: 413\n"
          "      --max-queue N         texts that wait (default: 10000); beyond: 429\n"
          "      --timeout SECONDS     longest answer (default: 60); beyond: 504\n"
          "      --rate N              requests a minute from one address; beyond: 429\n"
          "                            (default: 0, no limit)\n"
          "      --api-keys FILE       a key a line; /translate and /detect then need one\n"
          "                            as api_key, else 403\n"
          "      --allow-origin URL    web pages of this origin may ask; * is all\n"
          "                            (default: none but the server's own page)\n"
          "\n"
          "  -q, --quiet               say nothing but errors\n"
          "  -h, --help                this text\n"
          "  -V, --version             version of moe and of SentencePiece\n"
          "\n"
          "SIGTERM and SIGINT: no new requests; those under way are answered; a second\n"
          "signal ends at once.\n"
          "Exit status: 0 ended by a signal as it should, 2 usage, 3 model or memory,\n"
          "4 the port cannot be had.\n",
          to);
}

enum {
    OPTION_HOST = 1000,
    OPTION_PORT,
    OPTION_SET,
    OPTION_THREADS,
    OPTION_MEMORY,
    OPTION_BODY,
    OPTION_TEXTS,
    OPTION_QUEUE,
    OPTION_TIMEOUT,
    OPTION_RATE,
    OPTION_KEYS,
    OPTION_ORIGIN
};

static const struct option long_options[] = {
    { "model", required_argument, NULL, 'm' },
    { "host", required_argument, NULL, OPTION_HOST },
    { "port", required_argument, NULL, OPTION_PORT },
    { "set", required_argument, NULL, OPTION_SET },
    { "threads", required_argument, NULL, OPTION_THREADS },
    { "max-memory", required_argument, NULL, OPTION_MEMORY },
    { "max-body", required_argument, NULL, OPTION_BODY },
    { "max-texts", required_argument, NULL, OPTION_TEXTS },
    { "max-queue", required_argument, NULL, OPTION_QUEUE },
    { "timeout", required_argument, NULL, OPTION_TIMEOUT },
    { "rate", required_argument, NULL, OPTION_RATE },
    { "api-keys", required_argument, NULL, OPTION_KEYS },
    { "allow-origin", required_argument, NULL, OPTION_ORIGIN },
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

/* Takes one option: -1, or the exit status. */
static int take_option(options *o, int c) {
    switch (c) {
    case 'm': o->model = optarg; return -1;
    case 'q': o->quiet = 1; return -1;
    case 'h': usage(stdout); return program_printed();
    case 'V':
        printf("moe-server %s, SentencePiece %s\n", moetext_version(), moetext_tokeniser_version());
        return program_printed();
    case OPTION_HOST: o->host = optarg; return -1;
    case OPTION_KEYS: o->keys = optarg; return -1;
    case OPTION_ORIGIN: o->origin = optarg; return -1;
    case OPTION_PORT: return program_int("port", optarg, 0, 65535, &o->port);
    case OPTION_THREADS: return program_int("threads", optarg, 1, MOE_MAX_THREADS, &o->threads);
    case OPTION_BODY: return program_int("max-body", optarg, 1, 1 << 20, &o->max_body);
    case OPTION_TEXTS: return program_int("max-texts", optarg, 1, 1 << 20, &o->max_texts);
    case OPTION_QUEUE: return program_int("max-queue", optarg, 1, 1 << 24, &o->max_queue);
    case OPTION_TIMEOUT: return program_int("timeout", optarg, 1, 86400, &o->timeout);
    case OPTION_RATE: return program_int("rate", optarg, 0, 1 << 20, &o->rate);
    case OPTION_MEMORY: return add_setting(o, "max-memory=", optarg);
    case OPTION_SET: return add_setting(o, "", optarg);
    default: fputs("Try moe-server --help\n", stderr); return EXIT_USAGE; /* getopt said why */
    }
}

static int read_options(options *o, int argc, char **argv) {
    *o = (options){ .host = "127.0.0.1",
                    .port = 5000,
                    .max_body = 1024,
                    .max_texts = 1000,
                    .max_queue = 10000,
                    .timeout = 60 };
    uint64_t given = 0;
    for (int c; (c = program_next_option(argc, argv, "m:qhV", long_options, OPTION_SET, &given)) != -1;) {
        int status = take_option(o, c);
        if (status >= 0) return status;
    }
    if (optind < argc) return program_usage_error("'%s': moe-server takes no arguments", argv[optind]);
    const int status = program_default_model(&o->model);
    if (status >= 0) return status;
    if (o->threads) {
        if (o->settings.length) text_append_string(&o->settings, ";");
        text_printf(&o->settings, "threads=%d", o->threads);
    }
    return -1;
}

/* ==== 2. Asks ===========================================================================================
 * An ask lives from its first header until its connection is done with it and none of its texts is with the decoder. */

typedef enum ask_state {
    ASK_READING, /* its body comes in                                                */
    ASK_WAITING, /* its texts are with the decoder, its connection may be suspended */
    ASK_DONE     /* its answer can be sent                                           */
} ask_state;

typedef struct ask ask;

typedef struct text_item { /* one text of an ask */
    ask *of;
    struct text_item *next; /* in the queue */
    char *text;             /* [length] */
    size_t length;
    int taken; /* the decoder has it */
    moe_status status;
    text_bytes answer;  /* its translation, or the message that says why there is none */
    text_bytes *others; /* [n_others] other translations */
    size_t n_others;
    text_bytes details; /* a JSON object */
    text_bytes experts; /* the same */
    size_t page;        /* of an ask for HTML: the document that it is a segment of */
    int pieces;         /* the same: its text is the segment's texts, a line each, since as a whole it lost something */
    const char *source; /* the language that it was found to be in; NULL: none was looked for */
} text_item;

typedef struct page { /* a document of an ask for HTML */
    html *document;
    char *text;        /* that it lies in */
    size_t first;      /* item of its first segment */
    size_t unfinished; /* segments */
} page;

struct ask {
    struct MHD_Connection *connection; /* NULL: it is gone */
    struct MHD_PostProcessor *form;
    ask *next, *before; /* all asks in state ASK_WAITING */
    ask_state state;
    int route, suspended, timed_out, failed; /* failed: the decoder ended before its texts were finished */
    text_bytes body;
    int too_large;
    double begin;

    /* What is asked for */
    text_item *items;
    size_t n_items, n_done, n_taken;
    char source[36], target[36], key[132];
    int is_list, alternatives, details, experts, stream, html;
    page *pages; /* [n_pages] of an ask for HTML, whose items are segments of them */
    size_t n_pages;

    text_bytes lines; /* of a stream: what is finished and not sent yet */
};

enum { RATES = 4096 }; /* addresses whose requests are counted; some share a place and a limit */

typedef struct server {
    options options;
    moetext_model *model;
    moetext *translator;
    experts *experts;        /* the decoder's; NULL: nobody has asked yet, or see no_experts */
    int no_experts;          /* they cannot be seen */
    int aligned;             /* its results have links between words */
    text_detector *detector; /* NULL: languages cannot be told */
    pthread_mutex_t detecting;
    int64_t minute; /* that `rates` is of */
    int rates[RATES];
    text_bytes *keys; /* [n_keys] */
    size_t n_keys;

    pthread_mutex_t lock;
    pthread_cond_t filled; /* the queue has a text, or `ending` is set */
    text_item *first, *last;
    size_t n_queued;
    ask *waiting;
    int ending, broken;

    /* Figures, for /metrics */
    uint64_t requests[6], texts, failed_texts, bytes_in, bytes_out; /* requests by hundreds of their status */
    uint64_t seconds_below[8], seconds_count;
    double seconds_sum;
    moe_stats stats;
} server;

static server *the_server(void *closure) { return closure; }

static void items_free(text_item *items, size_t n) {
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < items[i].n_others; k++) text_bytes_free(&items[i].others[k]);
        free(items[i].others);
        free(items[i].text);
        text_bytes_free(&items[i].answer);
        text_bytes_free(&items[i].details);
        text_bytes_free(&items[i].experts);
    }
    free(items);
}

static void ask_free(ask *a) {
    items_free(a->items, a->n_items);
    for (size_t i = 0; i < a->n_pages; i++) html_free(a->pages[i].document), free(a->pages[i].text);
    free(a->pages);
    if (a->form) MHD_destroy_post_processor(a->form);
    text_bytes_free(&a->body);
    text_bytes_free(&a->lines);
    free(a);
}

/* With the lock held: let the connection go on, if it waits. */
static void ask_wake(ask *a) {
    if (!a->suspended) return;
    a->suspended = 0;
    MHD_resume_connection(a->connection);
}

static void ask_link(server *s, ask *a) {
    a->next = s->waiting, a->before = NULL;
    if (a->next) a->next->before = a;
    s->waiting = a;
}

static void ask_unlink(server *s, ask *a) {
    if (a->before) a->before->next = a->next;
    else s->waiting = a->next;
    if (a->next) a->next->before = a->before;
    a->next = a->before = NULL;
}

/* With the lock held: take the texts of `a` that the decoder has not got out of the queue. */
static void queue_drop(server *s, const ask *a) {
    text_item *last = NULL;
    for (text_item **at = &s->first; *at;) {
        if ((*at)->of == a) *at = (*at)->next, s->n_queued--;
        else last = *at, at = &(*at)->next;
    }
    s->last = last;
}

/* With the lock held: all that `a` asked for is there, or never will be. */
static void ask_finish(server *s, ask *a) {
    if (a->state != ASK_WAITING) return;
    a->state = ASK_DONE;
    ask_unlink(s, a);
    queue_drop(s, a);
    ask_wake(a);
}

/* ==== 3. Decoder ========================================================================================
 * Owns the translator. It sees texts in the order in which they came, whoever sent them. */

static int pull_text(void *closure, int wait, moetext_request *request) {
    server *s = the_server(closure);
    pthread_mutex_lock(&s->lock);
    while (wait && !s->first && !s->ending) pthread_cond_wait(&s->filled, &s->lock);
    text_item *item = s->first;
    int answer = item ? MOE_PULL_REQUEST : s->ending ? MOE_PULL_END : MOE_PULL_LATER;
    if (item) {
        s->first = item->next;
        if (!s->first) s->last = NULL;
        s->n_queued--;
        item->taken = 1, item->of->n_taken++;
        request->text = item->text, request->length = item->length;
        request->source = item->of->source[0] ? item->of->source : item->source;
        request->target = item->of->target;
        request->user = item;
    }
    pthread_mutex_unlock(&s->lock);
    return answer;
}

/* Characters before byte `at` of UTF-8. */
static int64_t characters(const char *text, size_t at) { return (int64_t)text_utf8_count(text, at); }

/* {"score": ..., "alignment": [[begin, end, begin, end], ...]}: characters of source and translation. */
static void write_details(text_item *item, const moetext_hypothesis *best) {
    json j = { .out = &item->details };
    json_open(&j, NULL, '{');
    json_float(&j, "score", best->score);
    json_open(&j, "alignment", '[');
    for (size_t i = 0; i < best->n_links; i++) {
        const moetext_link *link = &best->links[i];
        json_open(&j, NULL, '[');
        json_whole(&j, NULL, characters(item->text, link->source_begin));
        json_whole(&j, NULL, characters(item->text, link->source_end));
        json_whole(&j, NULL, characters(best->text, link->target_begin));
        json_whole(&j, NULL, characters(best->text, link->target_end));
        json_close(&j, ']');
    }
    json_close(&j, ']');
    json_close(&j, '}');
}

/* A translation as it is answered: HTML of a segment has its tags. 0: they cannot be put into it. */
static int write_translation(const text_item *item, const moetext_hypothesis *h, text_bytes *out) {
    const page *of = item->of->html ? &item->of->pages[item->page] : NULL;
    const size_t segment = of ? (size_t)(item - item->of->items) - of->first : 0;
    text_append(out, "", 0); /* what is empty is a text too */
    if (!of) text_append(out, h->text, h->length);
    else if (item->pieces) html_place_pieces(of->document, segment, h->text, h->length, out);
    else return html_place(of->document, segment, h->text, h->length, h->links, h->n_links, out);
    return 1;
}

/* The item again, its texts one by one. 0: nobody waits for it, or the server ends: it stays untranslated. */
static int try_pieces(server *s, text_item *item) {
    const page *of = &item->of->pages[item->page];
    const size_t segment = (size_t)(item - item->of->items) - of->first;
    text_bytes text = { 0 };
    html_pieces(of->document, segment, &text);
    item->pieces = 1;
    item->answer.length = 0;
    pthread_mutex_lock(&s->lock);
    ask *a = item->of;
    const int again = !text.failed && text.length && !s->ending && a->connection && a->state == ASK_WAITING;
    if (again) {
        free(item->text);
        item->text = text.data, item->length = text.length;
        item->taken = 0, a->n_taken--;
        item->next = NULL;
        if (s->last) s->last->next = item;
        else s->first = item;
        s->last = item;
        s->n_queued++;
    }
    pthread_mutex_unlock(&s->lock);
    if (again) return 1;
    text_bytes_free(&text);
    html_place_pieces(of->document, segment, "", 0, &item->answer);
    return 0;
}

static void write_others(text_item *item, const moetext_result *result) {
    const size_t asked = (size_t)item->of->alternatives, all = result->n_hypotheses - 1;
    const size_t n = asked < all ? asked : all;
    item->others = n ? calloc(n, sizeof *item->others) : NULL;
    if (n && !item->others) item->status = MOE_ERROR_MEMORY;
    for (; item->others && item->n_others < n; item->n_others++) {
        text_bytes *other = &item->others[item->n_others];
        if (!write_translation(item, &result->hypotheses[item->n_others + 1], other)) /* it is the best one then */
            text_append(other, item->answer.data, item->answer.length);
        if (item->others[item->n_others].failed) item->status = MOE_ERROR_MEMORY;
    }
}

/* Alternative k of a document has alternative k of each segment that has one; 0 is what it is translated as. */
typedef struct choice {
    const ask *of;
    size_t first, k;
} choice;

static const text_bytes *chosen(const void *user, size_t segment) {
    const choice *c = user;
    const text_item *item = &c->of->items[c->first + segment];
    return c->k && item->n_others ? &item->others[c->k <= item->n_others ? c->k - 1 : item->n_others - 1]
                                  : &item->answer;
}

static void write_page(const ask *a, const page *p, size_t k, text_bytes *out) {
    const choice c = { a, p->first, k };
    text_append(out, "", 0);
    html_write(p->document, chosen, &c, out);
}

/* {"index": 3, "translatedText": "..."} and a line break: a finished text of a stream, or document. `failed`: the item
 * that is the reason why there is none, whose message is in `text`. */
static void write_line(ask *a, size_t index, int failed, const text_bytes *text) {
    json j = { .out = &a->lines };
    json_open(&j, NULL, '{');
    json_whole(&j, "index", (int64_t)index);
    json_string(&j, failed ? "error" : "translatedText", text->data ? text->data : "", text->length);
    json_close(&j, '}');
    text_append(&a->lines, "\n", 1);
}

static void write_page_line(ask *a, size_t index) {
    text_bytes whole = { 0 };
    write_page(a, &a->pages[index], 0, &whole);
    write_line(a, index, 0, &whole);
    a->lines.failed |= whole.failed;
    text_bytes_free(&whole);
}

/* A document is finished with its last segment, or with the first one that failed. */
static void write_item(ask *a, const text_item *item) {
    page *p = a->html ? &a->pages[item->page] : NULL;
    if (!p || (item->status && p->unfinished))
        write_line(a, p ? item->page : (size_t)(item - a->items), item->status != 0, &item->answer);
    else if (p->unfinished == 1) write_page_line(a, item->page);
    if (p) p->unfinished = item->status || !p->unfinished ? 0 : p->unfinished - 1;
}

/* With the lock held: a text is finished. Whoever asked for it may be gone. */
static void item_finish(server *s, text_item *item) {
    ask *a = item->of;
    a->n_taken--, a->n_done++;
    s->texts++;
    s->failed_texts += item->status != MOE_OK;
    s->bytes_in += item->length, s->bytes_out += item->answer.length;
    if (!a->connection) {
        if (!a->n_taken) ask_free(a);
        return;
    }
    if (a->state != ASK_WAITING) return;
    if (a->stream) write_item(a, item), ask_wake(a);
    if (a->n_done == a->n_items) ask_finish(s, a);
}

/* null where they cannot be seen. */
static void write_experts(server *s, text_item *item, const moetext_result *result) {
    moe_error error = { 0 };
    if (!s->experts && !s->no_experts)
        s->no_experts = experts_open(s->model, s->options.settings.data, &s->experts, &error) != MOE_OK;
    const char *source = item->of->source[0] ? item->of->source : item->source;
    if (s->no_experts || experts_write(s->experts, source, item->of->target, result, &item->experts, &error))
        text_append_string(&item->experts, "null");
}

static void text_done(void *closure, const moetext_result *result) {
    server *s = the_server(closure);
    text_item *item = result->user;
    item->status = result->status;
    if (result->status || !result->n_hypotheses)
        text_append_string(&item->answer, result->status ? result->message : "");
    else {
        const moetext_hypothesis *best = &result->hypotheses[0];
        if (!write_translation(item, best, &item->answer) && try_pieces(s, item)) return;
        if (item->of->alternatives) write_others(item, result);
        if (item->of->details) write_details(item, best);
        if (item->of->experts) write_experts(s, item, result);
    }
    if (item->answer.failed || item->details.failed || item->experts.failed) item->status = MOE_ERROR_MEMORY;
    moe_stats stats = moetext_stats(s->translator);
    pthread_mutex_lock(&s->lock);
    s->stats = stats;
    item_finish(s, item);
    pthread_mutex_unlock(&s->lock);
}

/* With the lock held: the decoder is gone, and nothing will be answered any more. */
static void fail_all(server *s) {
    s->broken = 1;
    while (s->waiting) {
        ask *a = s->waiting;
        for (size_t i = 0; i < a->n_items; i++)
            if (a->items[i].taken && !a->items[i].answer.length) a->items[i].status = MOE_ERROR_DEVICE;
        a->n_taken = 0, a->failed = 1;
        ask_finish(s, a);
    }
}

static void *decode(void *closure) {
    server *s = the_server(closure);
    moe_error error = { 0 };
    if (moetext_translate(s->translator, pull_text, text_done, s, &error)) {
        program_complain("the translator failed: %s", error.message);
        kill(getpid(), SIGTERM);
    }
    pthread_mutex_lock(&s->lock);
    fail_all(s);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ==== 4. Guards ========================================================================================= */

static uint32_t address_hash(const struct sockaddr *address) {
    if (address && address->sa_family == AF_INET) {
        const struct sockaddr_in *four = (const void *)address;
        return text_hash((const char *)&four->sin_addr, sizeof four->sin_addr);
    }
    if (address && address->sa_family == AF_INET6) { /* one customer has 64 bits of addresses */
        const struct sockaddr_in6 *six = (const void *)address;
        return text_hash((const char *)&six->sin6_addr, 8);
    }
    return 0;
}

/* 1 if this address has asked often enough in this minute. */
static int too_often(server *s, struct MHD_Connection *connection) {
    if (!s->options.rate) return 0;
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    uint32_t place = address_hash(info ? info->client_addr : NULL) % RATES;
    int64_t minute = (int64_t)(program_seconds() / 60);
    pthread_mutex_lock(&s->lock);
    if (s->minute != minute) memset(s->rates, 0, sizeof s->rates), s->minute = minute;
    int over = ++s->rates[place] > s->options.rate;
    pthread_mutex_unlock(&s->lock);
    return over;
}

/* Compares without telling by its time how much of a key is right. */
static int same_key(const text_bytes *key, const char *given) {
    size_t length = strlen(given);
    unsigned char differs = length != key->length;
    for (size_t i = 0; i < key->length; i++) differs |= (unsigned char)(key->data[i] ^ given[length ? i % length : 0]);
    return !differs;
}

static int key_is_known(const server *s, const char *given) {
    int known = 0;
    for (size_t i = 0; i < s->n_keys; i++) known |= same_key(&s->keys[i], given);
    return known || !s->n_keys;
}

/* A key a line; -1, or a complaint and the exit status. */
static int read_keys(server *s) {
    if (!s->options.keys) return -1;
    FILE *file = fopen(s->options.keys, "r");
    if (!file) {
        program_complain("%s: %s", s->options.keys, strerror(errno));
        return EXIT_INPUT_OUTPUT;
    }
    char line[256];
    int status = -1;
    while (status < 0 && fgets(line, sizeof line, file)) {
        size_t length = strcspn(line, "\r\n");
        if (!length) continue;
        text_bytes *more = length < sizeof((ask *)0)->key ? realloc(s->keys, (s->n_keys + 1) * sizeof *more) : NULL;
        if (!more) {
            program_complain("%s: a key longer than 131 bytes, or out of memory", s->options.keys);
            status = EXIT_USAGE;
            break;
        }
        s->keys = more;
        s->keys[s->n_keys] = (text_bytes){ 0 };
        text_append(&s->keys[s->n_keys++], line, length);
    }
    fclose(file);
    if (status < 0 && !s->n_keys) {
        program_complain("%s: there is no key in it", s->options.keys);
        status = EXIT_USAGE;
    }
    return status;
}

/* ==== 5. Replies ======================================================================================== */

static enum MHD_Result send_response(server *s, ask *a, unsigned status, const char *type, struct MHD_Response *r) {
    if (!r) return MHD_NO;
    MHD_add_response_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    if (s->options.origin) MHD_add_response_header(r, MHD_HTTP_HEADER_ACCESS_CONTROL_ALLOW_ORIGIN, s->options.origin);
    if (s->options.origin && a->route < 0)
        MHD_add_response_header(r, "Access-Control-Allow-Headers", MHD_HTTP_HEADER_CONTENT_TYPE);
    if (status == MHD_HTTP_TOO_MANY_REQUESTS) MHD_add_response_header(r, MHD_HTTP_HEADER_RETRY_AFTER, "5");
    enum MHD_Result result = MHD_queue_response(a->connection, status, r);
    MHD_destroy_response(r);
    double seconds = program_seconds() - a->begin;
    pthread_mutex_lock(&s->lock);
    s->requests[status / 100 < 6 ? status / 100 : 5]++;
    static const double bounds[] = { 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30 };
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) s->seconds_below[i] += seconds <= bounds[i];
    s->seconds_count++, s->seconds_sum += seconds;
    pthread_mutex_unlock(&s->lock);
    return result;
}

/* Takes over what `bytes` holds. */
static enum MHD_Result send_bytes(server *s, ask *a, unsigned status, const char *type, text_bytes *bytes) {
    if (bytes->failed) {
        text_bytes_free(bytes);
        return MHD_NO;
    }
    return send_response(s, a, status, type,
                         MHD_create_response_from_buffer(bytes->length, bytes->data, MHD_RESPMEM_MUST_FREE));
}

static enum MHD_Result send_error(server *s, ask *a, unsigned status, const char *message) {
    text_bytes out = { 0 };
    json j = { .out = &out };
    json_open(&j, NULL, '{');
    json_clean(&j, "error", message, strlen(message));
    json_close(&j, '}');
    text_append(&out, "\n", 1);
    return send_bytes(s, a, status, "application/json", &out);
}

/* Texts or documents of an ask. */
static size_t ask_count(const ask *a) { return a->html ? a->n_pages : a->n_items; }

static void put_alternatives(const ask *a, json *j, size_t i) {
    const page *p = a->html ? &a->pages[i] : NULL;
    size_t n = p ? 0 : a->items[i].n_others;
    for (size_t k = 0; p && k < html_count(p->document); k++)
        if (a->items[p->first + k].n_others > n) n = a->items[p->first + k].n_others;
    json_open(j, a->is_list ? NULL : "alternatives", '[');
    for (size_t k = 0; k < n; k++) {
        text_bytes whole = { 0 };
        if (a->html) write_page(a, &a->pages[i], k + 1, &whole);
        const text_bytes *text = a->html ? &whole : &a->items[i].others[k];
        json_string(j, NULL, text->data ? text->data : "", text->length);
        j->out->failed |= whole.failed;
        text_bytes_free(&whole);
    }
    json_close(j, ']');
}

static void put_translation(const ask *a, json *j, size_t i) {
    text_bytes whole = { 0 };
    if (a->html) write_page(a, &a->pages[i], 0, &whole);
    const text_bytes *text = a->html ? &whole : &a->items[i].answer;
    json_string(j, a->is_list ? NULL : "translatedText", text->data ? text->data : "", text->length);
    j->out->failed |= whole.failed;
    text_bytes_free(&whole);
}

/* A member for each text, which is a JSON object; of documents and of what failed it is null. */
static void put_members(const ask *a, text_bytes *out, const char *key, size_t member) {
    text_printf(out, ",\"%s\":%s", key, a->is_list ? "[" : "");
    for (size_t i = 0; i < ask_count(a); i++) {
        const text_bytes *value = a->html ? NULL : (const void *)((const char *)&a->items[i] + member);
        if (i) text_append(out, ",", 1);
        if (value && value->length) text_append(out, value->data, value->length);
        else text_append_string(out, "null");
    }
    if (a->is_list) text_append(out, "]", 1);
}

static void put_detected(server *s, json *j, const char *key, const char *text, size_t length, int percent) {
    float confidence = 0;
    pthread_mutex_lock(&s->detecting);
    ptrdiff_t language = s->detector ? text_detect(s->detector, text, length, &confidence) : -1;
    pthread_mutex_unlock(&s->detecting);
    const char *code = language < 0 ? NULL : moetext_model_language(s->model, (size_t)language);
    json_open(j, key, '{');
    json_digits(j, "confidence", percent ? 100 * confidence : confidence, 3);
    json_text(j, "language", code ? code : "en");
    json_close(j, '}');
}

/* What a text says, or the words of a document, as much as detection looks at. */
static void sample(const ask *a, size_t i, text_bytes *out) {
    const size_t first = a->html ? a->pages[i].first : i, n = a->html ? html_count(a->pages[i].document) : 1;
    for (size_t k = first; a->items && k < first + n && out->length < 1000; k++) {
        text_append(out, a->items[k].text, a->items[k].length);
        if (k + 1 < first + n) text_append(out, " ", 1);
    }
}

/* The languages that "auto" found, as LibreTranslate says them. */
static void put_all_detected(server *s, ask *a, json *j) {
    if (a->is_list) json_open(j, "detectedLanguage", '[');
    for (size_t i = 0; i < ask_count(a); i++) {
        text_bytes text = { 0 };
        sample(a, i, &text);
        put_detected(s, j, a->is_list ? NULL : "detectedLanguage", text.data, text.length, 1);
        text_bytes_free(&text);
    }
    if (a->is_list) json_close(j, ']');
}

static enum MHD_Result send_translations(server *s, ask *a) {
    for (size_t i = 0; i < a->n_items; i++) {
        const text_item *item = &a->items[i];
        if (item->status == MOE_OK) continue;
        text_bytes message = { 0 };
        if (a->is_list) text_printf(&message, "q[%zu]: ", i);
        text_append(&message, item->answer.data ? item->answer.data : "", item->answer.length);
        enum MHD_Result result = send_error(s, a,
                                            item->status == MOE_ERROR_ARGUMENT || item->status == MOE_ERROR_LIMIT
                                                ? MHD_HTTP_BAD_REQUEST
                                                : MHD_HTTP_INTERNAL_SERVER_ERROR,
                                            message.data ? message.data : "out of memory");
        text_bytes_free(&message);
        return result;
    }
    text_bytes out = { 0 };
    json j = { .out = &out };
    const size_t n = ask_count(a);
    json_open(&j, NULL, '{');
    if (a->is_list) json_open(&j, "translatedText", '[');
    for (size_t i = 0; i < n; i++) put_translation(a, &j, i);
    if (a->is_list) json_close(&j, ']');
    if (a->alternatives && a->is_list) json_open(&j, "alternatives", '[');
    for (size_t i = 0; i < n && a->alternatives; i++) put_alternatives(a, &j, i);
    if (a->alternatives && a->is_list) json_close(&j, ']');
    if (a->details) put_members(a, &out, "details", offsetof(text_item, details));
    if (a->experts) put_members(a, &out, "experts", offsetof(text_item, experts));
    if (!a->source[0]) put_all_detected(s, a, &j);
    text_append_string(&out, "}\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

/* ==== 6. Reading ======================================================================================== */

/* What is wrong with a request: its status, and the message; status 0: nothing. */
typedef struct refusal {
    unsigned status;
    char message[160];
} refusal;

static void refuse(refusal *r, unsigned status, const char *format, const char *what) {
    r->status = status;
    snprintf(r->message, sizeof r->message, format, what); /* the formats are this file's own */
}

/* A short parameter; too long ones are cut, and then known to nobody. */
static void take_word(char *out, size_t size, const char *value, size_t length) {
    if (length > size - 1) length = size - 1;
    memcpy(out, value, length);
    out[length] = 0;
}

static int add_text(ask *a, const char *text, size_t length) {
    if (!(a->n_items & (a->n_items + 1)) || !a->items) { /* a power of two less one: the room is full */
        text_item *more = realloc(a->items, (2 * a->n_items + 2) * sizeof *more);
        if (!more) return 0;
        a->items = more;
    }
    text_item *item = &a->items[a->n_items];
    *item = (text_item){ .of = a, .length = length, .text = malloc(length + 1) };
    if (!item->text) return 0;
    memcpy(item->text, text, length);
    item->text[length] = 0;
    a->n_items++;
    return 1;
}

/* A parameter by name, but for q. */
static void take_parameter(ask *a, const char *name, const char *value, size_t length) {
    char number[12];
    take_word(number, sizeof number, value, length);
    int truth = strcmp(number, "true") == 0 || strcmp(number, "1") == 0;
    if (strcmp(name, "source") == 0) take_word(a->source, sizeof a->source, value, length);
    else if (strcmp(name, "target") == 0) take_word(a->target, sizeof a->target, value, length);
    else if (strcmp(name, "api_key") == 0) take_word(a->key, sizeof a->key, value, length);
    else if (strcmp(name, "alternatives") == 0) a->alternatives = (int)strtol(number, NULL, 10);
    else if (strcmp(name, "details") == 0) a->details = truth;
    else if (strcmp(name, "experts") == 0) a->experts = truth;
    else if (strcmp(name, "stream") == 0) a->stream = truth;
    else if (strcmp(name, "format") == 0)
        a->html = strcmp(number, "html") == 0 ? 1 : strcmp(number, "text") == 0 ? 0 : -1;
}

static enum MHD_Result take_field(void *closure, enum MHD_ValueKind kind, const char *name, const char *file,
                                  const char *type, const char *encoding, const char *data, uint64_t offset,
                                  size_t size) {
    ask *a = closure;
    (void)kind, (void)file, (void)type, (void)encoding;
    if (!name) return MHD_YES;
    if (strcmp(name, "q") != 0) {
        if (!offset) take_parameter(a, name, data, size);
        return MHD_YES;
    }
    if (!offset) return add_text(a, data, size) ? MHD_YES : MHD_NO;
    text_item *item = &a->items[a->n_items - 1]; /* a later part of the same value */
    char *more = realloc(item->text, item->length + size + 1);
    if (!more) return MHD_NO;
    item->text = more;
    memcpy(item->text + item->length, data, size);
    item->text[item->length += size] = 0;
    return MHD_YES;
}

static void read_form(ask *a, refusal *r) {
    a->form = MHD_create_post_processor(a->connection, 1024, take_field, a);
    if (!a->form) {
        refuse(r, MHD_HTTP_UNSUPPORTED_MEDIA_TYPE, "send JSON, a form or multipart/form-data%s", "");
        return;
    }
    if (a->body.length && MHD_post_process(a->form, a->body.data, a->body.length) != MHD_YES)
        refuse(r, MHD_HTTP_BAD_REQUEST, "this is no form that can be read%s", "");
    MHD_destroy_post_processor(a->form); /* it hands over what it still holds */
    a->form = NULL;
    a->is_list = a->n_items > 1;
}

/* Whether JSON writes U+0000 somewhere, behind which cJSON loses the rest of a text. */
static int names_nul(const text_bytes *body) {
    for (size_t i = 0; body->data && i + 6 <= body->length; i++) {
        if (body->data[i] != '\\') continue;
        if (memcmp(body->data + i, "\\u0000", 6) == 0) return 1;
        i++; /* what is escaped begins nothing */
    }
    return 0;
}

static void read_json(ask *a, refusal *r) {
    cJSON *all = cJSON_ParseWithLength(a->body.data ? a->body.data : "", a->body.length);
    const cJSON *q = cJSON_GetObjectItemCaseSensitive(all, "q"), *member;
    if (!cJSON_IsObject(all)) refuse(r, MHD_HTTP_BAD_REQUEST, "the request is no JSON object%s", "");
    else if (names_nul(&a->body)) refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: a text holds U+0000%s", "");
    cJSON_ArrayForEach(member, all) {
        if (!member->string || r->status) continue;
        char number[24];
        snprintf(number, sizeof number, "%.0f", cJSON_IsNumber(member) ? member->valuedouble : 0);
        const char *value = cJSON_IsString(member) ? member->valuestring : cJSON_IsTrue(member) ? "true" : number;
        take_parameter(a, member->string, value, strlen(value));
    }
    a->is_list = cJSON_IsArray(q);
    if (cJSON_IsString(q) && !add_text(a, q->valuestring, strlen(q->valuestring)))
        refuse(r, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory%s", "");
    if (a->is_list) cJSON_ArrayForEach(member, q) {
            if (r->status) break;
            if (!cJSON_IsString(member))
                refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: q holds what is no text%s", "");
            else if (!add_text(a, member->valuestring, strlen(member->valuestring)))
                refuse(r, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory%s", "");
        }
    cJSON_Delete(all);
}

static void read_body(ask *a, refusal *r) {
    const char *type = MHD_lookup_connection_value(a->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_TYPE);
    if (type && strncasecmp(type, "application/json", 16) == 0) read_json(a, r);
    else read_form(a, r);
    text_bytes_free(&a->body);
    a->body = (text_bytes){ 0 };
    if (!r->status && !a->n_items && !a->is_list)
        refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: missing %s parameter", "q");
    for (size_t i = 0; i < a->n_items && !r->status; i++)
        if (text_utf8_valid(a->items[i].text, a->items[i].length) != a->items[i].length)
            refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: q is not UTF-8%s", "");
}

/* Languages and limits of a request to translate. */
static void check_translation(const server *s, ask *a, refusal *r) {
    if (strcmp(a->source, "auto") == 0) a->source[0] = 0;
    if (!a->target[0]) refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: missing %s parameter", "target");
    else if (moetext_model_language_count(s->model) && moetext_model_language_find(s->model, a->target) < 0)
        refuse(r, MHD_HTTP_BAD_REQUEST, "%s is not supported", a->target);
    else if (a->source[0] && moetext_model_language_count(s->model) &&
             moetext_model_language_find(s->model, a->source) < 0)
        refuse(r, MHD_HTTP_BAD_REQUEST, "%s is not supported", a->source);
    else if (a->html < 0) refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: format is text or html%s", "");
    else if (!a->source[0] && moetext_model_needs_source(s->model) && !s->detector)
        refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: missing %s parameter", "source");
    if (a->alternatives < 0) a->alternatives = 0;
}

/* Documents in the place of their texts, and segments of them as what is to be translated. */
static void cut_pages(const server *s, ask *a, refusal *r) {
    text_item *texts = a->items;
    const size_t n = a->n_items;
    a->items = NULL, a->n_items = 0;
    a->pages = calloc(n + 1, sizeof *a->pages);
    int failed = !a->pages;
    for (size_t i = 0; i < n && !failed; i++) {
        page *p = &a->pages[a->n_pages++];
        p->first = a->n_items;
        p->text = texts[i].text, texts[i].text = NULL;
        p->document = html_read(p->text, texts[i].length, s->aligned);
        failed = !p->document;
        p->unfinished = failed ? 0 : html_count(p->document);
        for (size_t k = 0; k < p->unfinished && !failed; k++) {
            size_t length;
            const char *source = html_source(p->document, k, &length);
            failed = !add_text(a, source, length);
            if (!failed) a->items[a->n_items - 1].page = i;
        }
        if (!failed && !p->unfinished && a->stream) write_page_line(a, i);
    }
    items_free(texts, n);
    if (failed) refuse(r, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory%s", "");
}

/* A model that reads the language of its source gets the one that each text seems to be in. */
static void find_sources(server *s, ask *a) {
    if (a->source[0] || !moetext_model_needs_source(s->model)) return;
    for (size_t i = 0; i < ask_count(a); i++) {
        text_bytes text = { 0 };
        float confidence;
        sample(a, i, &text);
        pthread_mutex_lock(&s->detecting);
        ptrdiff_t language = text_detect(s->detector, text.data, text.length, &confidence);
        pthread_mutex_unlock(&s->detecting);
        const char *code = moetext_model_language(s->model, language < 0 ? 0 : (size_t)language);
        const size_t n = a->html ? html_count(a->pages[i].document) : 1, first = a->html ? a->pages[i].first : i;
        for (size_t k = first; a->items && k < first + n; k++) a->items[k].source = code;
        text_bytes_free(&text);
    }
}

/* ==== 7. Routes ========================================================================================= */

enum { NEEDS_BODY = 1, NEEDS_KEY = 2 };

typedef struct route {
    const char *method, *path;
    int flags;
    enum MHD_Result (*answer)(server *s, ask *a);
} route;

/* Hand the texts of a request to the decoder and let its connection wait. */
static void enqueue(server *s, ask *a, refusal *r) {
    pthread_mutex_lock(&s->lock);
    if (s->ending || s->broken) refuse(r, MHD_HTTP_SERVICE_UNAVAILABLE, "the server is ending%s", "");
    else if (s->n_queued + a->n_items > (size_t)s->options.max_queue)
        refuse(r, MHD_HTTP_TOO_MANY_REQUESTS, "too many texts are waiting; try again%s", "");
    else if (!a->n_items) a->state = ASK_DONE;
    else {
        for (size_t i = 0; i < a->n_items; i++) {
            if (s->last) s->last->next = &a->items[i];
            else s->first = &a->items[i];
            s->last = &a->items[i];
        }
        s->n_queued += a->n_items;
        a->state = ASK_WAITING;
        ask_link(s, a);
        if (!a->stream) a->suspended = 1, MHD_suspend_connection(a->connection);
        pthread_cond_signal(&s->filled);
    }
    pthread_mutex_unlock(&s->lock);
}

/* The next bytes of a stream; suspends the connection until there are some. */
static ssize_t stream_lines(void *closure, uint64_t position, char *out, size_t room) {
    ask *a = ((void **)closure)[0];
    server *s = ((void **)closure)[1];
    (void)position;
    pthread_mutex_lock(&s->lock);
    size_t n = a->lines.length < room ? a->lines.length : room;
    ssize_t result = (ssize_t)n;
    if (n) {
        memcpy(out, a->lines.data, n);
        memmove(a->lines.data, a->lines.data + n, a->lines.length - n);
        a->lines.length -= n;
    } else if (a->state == ASK_DONE) {
        result = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        a->suspended = 1;
        MHD_suspend_connection(a->connection);
    }
    pthread_mutex_unlock(&s->lock);
    return result;
}

static enum MHD_Result send_stream(server *s, ask *a) {
    void **closure = malloc(2 * sizeof *closure);
    if (!closure) return MHD_NO;
    closure[0] = a, closure[1] = s;
    return send_response(s, a, MHD_HTTP_OK, "application/x-ndjson",
                         MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 4096, stream_lines, closure, free));
}

static enum MHD_Result answer_translate(server *s, ask *a) {
    refusal r = { 0 };
    if (a->state == ASK_DONE && a->timed_out)
        return send_error(s, a, MHD_HTTP_GATEWAY_TIMEOUT, "this took too long; send less at once");
    if (a->state == ASK_DONE)
        return a->failed ? send_error(s, a, MHD_HTTP_INTERNAL_SERVER_ERROR, "the translator failed")
                         : send_translations(s, a);
    check_translation(s, a, &r);
    if (!r.status && a->html) cut_pages(s, a, &r);
    if (!r.status) find_sources(s, a);
    if (!r.status) enqueue(s, a, &r);
    if (r.status) return send_error(s, a, r.status, r.message);
    if (a->stream) return send_stream(s, a);
    return a->state == ASK_DONE ? send_translations(s, a) : MHD_YES;
}

static enum MHD_Result answer_detect(server *s, ask *a) {
    if (!s->detector) return send_error(s, a, MHD_HTTP_NOT_IMPLEMENTED, "language detection is not installed");
    text_bytes out = { 0 };
    json j = { .out = &out };
    json_open(&j, NULL, '[');
    for (size_t i = 0; i < a->n_items; i++) {
        if (a->is_list) json_open(&j, NULL, '[');
        put_detected(s, &j, NULL, a->items[i].text, a->items[i].length, 0);
        if (a->is_list) json_close(&j, ']');
    }
    json_close(&j, ']');
    text_append_string(&out, "\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

static const char *language_name(const char *code) {
    static const char *const names[][2] = {
        { "en", "English" },       { "de", "German" },       { "fr", "French" },       { "es", "Spanish" },
        { "it", "Italian" },       { "pt", "Portuguese" },   { "nl", "Dutch" },        { "pl", "Polish" },
        { "ru", "Russian" },       { "zh", "Chinese" },      { "ja", "Japanese" },     { "ar", "Arabic" },
        { "eng_Latn", "English" }, { "deu_Latn", "German" }, { "fra_Latn", "French" }, { "spa_Latn", "Spanish" },
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(code, names[i][0]) == 0) return names[i][1];
    return code;
}

static enum MHD_Result answer_languages(server *s, ask *a) {
    text_bytes out = { 0 };
    json j = { .out = &out };
    size_t n = moetext_model_language_count(s->model);
    json_open(&j, NULL, '[');
    for (size_t i = 0; i < n; i++) {
        const char *code = moetext_model_language(s->model, i);
        json_open(&j, NULL, '{');
        json_text(&j, "code", code);
        json_text(&j, "name", language_name(code));
        json_open(&j, "targets", '[');
        for (size_t t = 0; t < n; t++) json_text(&j, NULL, moetext_model_language(s->model, t));
        json_close(&j, ']');
        json_close(&j, '}');
    }
    json_close(&j, ']');
    text_append_string(&out, "\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

static enum MHD_Result answer_settings(server *s, ask *a) {
    text_bytes out = { 0 };
    json j = { .out = &out };
    size_t n = moetext_model_language_count(s->model);
    const char *target = n ? moetext_model_language(s->model, n > 1) : "";
    json_open(&j, NULL, '{');
    json_bool(&j, "apiKeys", s->n_keys > 0);
    json_whole(&j, "charLimit", 1024 * (int64_t)s->options.max_body);
    json_bool(&j, "filesTranslation", 0);
    json_whole(&j, "frontendTimeout", 500);
    json_bool(&j, "keyRequired", s->n_keys > 0);
    json_open(&j, "language", '{');
    json_open(&j, "source", '{');
    json_text(&j, "code", "auto");
    json_text(&j, "name", "Auto Detect");
    json_close(&j, '}');
    json_open(&j, "target", '{');
    json_text(&j, "code", target);
    json_text(&j, "name", language_name(target));
    json_close(&j, '}');
    json_close(&j, '}');
    json_bool(&j, "suggestions", 0);
    json_open(&j, "supportedFilesFormat", '[');
    json_close(&j, ']');
    json_close(&j, '}');
    text_append_string(&out, "\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

static enum MHD_Result answer_health(server *s, ask *a) {
    pthread_mutex_lock(&s->lock);
    int well = !s->broken && !s->ending;
    pthread_mutex_unlock(&s->lock);
    text_bytes out = { 0 };
    text_append_string(&out, well ? "{\"status\":\"ok\"}\n" : "{\"status\":\"ending\"}\n");
    return send_bytes(s, a, well ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE, "application/json", &out);
}

static enum MHD_Result answer_metrics(server *s, ask *a) {
    static const char *const bounds[] = { "0.01", "0.03", "0.1", "0.3", "1", "3", "10", "30" };
    text_bytes out = { 0 };
    pthread_mutex_lock(&s->lock);
    text_append_string(&out, "# TYPE moe_requests_total counter\n");
    for (int i = 2; i < 6; i++)
        text_printf(&out, "moe_requests_total{status=\"%dxx\"} %llu\n", i, (unsigned long long)s->requests[i]);
#define COUNTER(name, value)                                                                           \
    text_printf(&out, "# TYPE moe_" name " counter\nmoe_" name " %llu\n", (unsigned long long)(value))
    COUNTER("texts_total", s->texts);
    COUNTER("texts_failed_total", s->failed_texts);
    COUNTER("source_bytes_total", s->bytes_in);
    COUNTER("translation_bytes_total", s->bytes_out);
    COUNTER("source_tokens_total", s->stats.source_tokens);
    COUNTER("target_tokens_total", s->stats.target_tokens);
    COUNTER("decoder_steps_total", s->stats.steps);
    COUNTER("decoder_rows_total", s->stats.rows);
#undef COUNTER
    size_t open = 0;
    for (const ask *other = s->waiting; other; other = other->next) open++;
    text_printf(&out, "# TYPE moe_requests_open gauge\nmoe_requests_open %zu\n", open);
    text_printf(&out, "# TYPE moe_texts_waiting gauge\nmoe_texts_waiting %zu\n", s->n_queued);
    text_printf(&out, "# TYPE moe_session_bytes gauge\nmoe_session_bytes %llu\n", (unsigned long long)s->stats.bytes);
    text_append_string(&out, "# TYPE moe_request_seconds histogram\n");
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++)
        text_printf(&out, "moe_request_seconds_bucket{le=\"%s\"} %llu\n", bounds[i],
                    (unsigned long long)s->seconds_below[i]);
    text_printf(&out, "moe_request_seconds_bucket{le=\"+Inf\"} %llu\n", (unsigned long long)s->seconds_count);
    text_printf(&out, "moe_request_seconds_sum %.6f\nmoe_request_seconds_count %llu\n", s->seconds_sum,
                (unsigned long long)s->seconds_count);
    pthread_mutex_unlock(&s->lock);
    return send_bytes(s, a, MHD_HTTP_OK, "text/plain; version=0.0.4", &out);
}

static enum MHD_Result answer_page(server *s, ask *a) {
    text_bytes out = { 0 };
    for (size_t i = 0; i < sizeof server_html / sizeof *server_html; i++) text_append_string(&out, server_html[i]);
    return send_bytes(s, a, MHD_HTTP_OK, "text/html; charset=utf-8", &out);
}

static const route routes[] = {
    { "POST", "/translate", NEEDS_BODY | NEEDS_KEY, answer_translate },
    { "POST", "/detect", NEEDS_BODY | NEEDS_KEY, answer_detect },
    { "GET", "/languages", 0, answer_languages },
    { "GET", "/frontend/settings", 0, answer_settings },
    { "GET", "/health", 0, answer_health },
    { "GET", "/metrics", 0, answer_metrics },
    { "GET", "/", 0, answer_page },
};

/* The number of the route; -1: the path is known, with another method; -2: it is not. */
static int find_route(const char *method, const char *path) {
    int found = -2;
    if (strcmp(method, "HEAD") == 0) method = "GET";
    for (int i = 0; i < (int)(sizeof routes / sizeof *routes); i++) {
        if (strcmp(path, routes[i].path) != 0) continue;
        if (strcmp(method, routes[i].method) == 0) return i;
        found = -1;
    }
    return found;
}

/* A request is here as a whole. */
static enum MHD_Result answer_whole(server *s, ask *a) {
    const route *to = &routes[a->route];
    refusal r = { 0 };
    if (too_often(s, a->connection))
        return send_error(s, a, MHD_HTTP_TOO_MANY_REQUESTS, "too many requests; wait a minute");
    if (to->flags & NEEDS_BODY) read_body(a, &r);
    if (!r.status && a->n_items > (size_t)s->options.max_texts)
        refuse(&r, MHD_HTTP_CONTENT_TOO_LARGE, "too many texts in one request%s", "");
    if (!r.status && (to->flags & NEEDS_KEY) && !key_is_known(s, a->key))
        refuse(&r, MHD_HTTP_FORBIDDEN, "Invalid API key%s", "");
    return r.status ? send_error(s, a, r.status, r.message) : to->answer(s, a);
}

static enum MHD_Result on_request(void *closure, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *data, size_t *size, void **mine) {
    server *s = the_server(closure);
    ask *a = *mine;
    (void)version;
    if (!a) {
        a = *mine = calloc(1, sizeof *a);
        if (!a) return MHD_NO;
        a->connection = connection;
        a->begin = program_seconds();
        a->route = find_route(method, url);
        return MHD_YES;
    }
    if (*size) {
        if (a->body.length + *size > 1024 * (size_t)s->options.max_body) a->too_large = 1, a->body.length = 0;
        if (!a->too_large && a->route >= 0) text_append(&a->body, data, *size);
        *size = 0;
        return MHD_YES;
    }
    if (a->route == -1 && strcmp(method, "OPTIONS") == 0) {
        text_bytes none = { 0 };
        text_append(&none, "", 0);
        return send_bytes(s, a, MHD_HTTP_NO_CONTENT, "text/plain", &none);
    }
    if (a->route == -1) return send_error(s, a, MHD_HTTP_METHOD_NOT_ALLOWED, "this address knows another method");
    if (a->route < 0) return send_error(s, a, MHD_HTTP_NOT_FOUND, "there is nothing at this address");
    if (a->too_large || a->body.failed) return send_error(s, a, MHD_HTTP_CONTENT_TOO_LARGE, "the request is too large");
    if (a->state == ASK_WAITING) return MHD_YES;
    return a->state == ASK_DONE ? routes[a->route].answer(s, a) : answer_whole(s, a);
}

/* The connection is done with a request, or gone. */
static void on_end(void *closure, struct MHD_Connection *connection, void **mine, enum MHD_RequestTerminationCode why) {
    server *s = the_server(closure);
    ask *a = *mine;
    (void)connection, (void)why;
    if (!a) return;
    *mine = NULL;
    pthread_mutex_lock(&s->lock);
    a->suspended = 0;
    if (a->state == ASK_WAITING) ask_finish(s, a);
    a->connection = NULL;
    int idle = !a->n_taken;
    pthread_mutex_unlock(&s->lock);
    if (idle) ask_free(a); /* else item_finish does */
}

/* ==== 8. Main =========================================================================================== */

/* Requests that have waited too long are answered so. */
static void end_late(server *s) {
    double now = program_seconds();
    pthread_mutex_lock(&s->lock);
    for (ask *a = s->waiting, *next; a; a = next) {
        next = a->next;
        if (now - a->begin > s->options.timeout) a->timed_out = 1, ask_finish(s, a);
    }
    pthread_mutex_unlock(&s->lock);
}

static int is_given(const options *o, const char *name) {
    size_t length = strlen(name);
    for (const char *at = o->settings.length ? o->settings.data : ""; *at;) {
        if (strncmp(at, name, length) == 0 && at[length] == '=') return 1;
        at += strcspn(at, ";");
        at += *at == ';';
    }
    return 0;
}

/* The translator, by default with what the page shows: other translations, and which words belong together. */
static int open_translator(server *s) {
    moe_error error = { 0 };
    if (moetext_model_open(s->options.model, s->options.settings.data, &s->model, &error)) {
        program_file_error(s->options.model, &error);
        return error.code == MOE_ERROR_ARGUMENT ? EXIT_USAGE : EXIT_MODEL;
    }
    static const char *const extras[] = {
        /* what a narrow beam or a model without attention has, as much as goes */
        ";nbest=3;alignment=1", ";nbest=2;alignment=1", ";alignment=1", ";nbest=3", ";nbest=2", ""
    };
    const size_t n = sizeof extras / sizeof *extras;
    size_t length = s->options.settings.length;
    int asked = is_given(&s->options, "nbest") || is_given(&s->options, "alignment");
    for (size_t i = asked ? n - 1 : 0; i < n; i++) {
        s->options.settings.length = length;
        text_append_string(&s->options.settings, extras[i]);
        if (s->options.settings.failed) break;
        if (moetext_new(s->model, s->options.settings.data, &s->translator, &error)) continue;
        s->aligned = strstr(s->options.settings.data, "alignment=1") != NULL;
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

static struct MHD_Daemon *listen_at(server *s) {
    struct addrinfo wanted = { .ai_flags = AI_PASSIVE | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM }, *found = NULL;
    char port[8];
    snprintf(port, sizeof port, "%d", s->options.port);
    int failed = getaddrinfo(s->options.host, port, &wanted, &found);
    if (failed) {
        program_complain("--host %s: %s", s->options.host, gai_strerror(failed));
        return NULL;
    }
    unsigned flags = MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD | MHD_ALLOW_SUSPEND_RESUME;
    if (found->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
    errno = 0;
    struct MHD_Daemon *daemon =
        MHD_start_daemon(flags, (uint16_t)s->options.port, NULL, NULL, on_request, s, MHD_OPTION_SOCK_ADDR,
                         found->ai_addr, MHD_OPTION_NOTIFY_COMPLETED, on_end, s, MHD_OPTION_CONNECTION_TIMEOUT,
                         (unsigned)30, MHD_OPTION_THREAD_POOL_SIZE, (unsigned)2, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
                         (size_t)(64 << 10), MHD_OPTION_END);
    freeaddrinfo(found);
    if (!daemon)
        program_complain("port %d of %s cannot be had: %s", s->options.port, s->options.host,
                         errno ? strerror(errno) : "another program may have it");
    return daemon;
}

/* Serve until a signal; then answer what is under way. */
static int serve(server *s) {
    pthread_t decoder;
    struct MHD_Daemon *daemon = listen_at(s);
    if (!daemon) return EXIT_INPUT_OUTPUT;
    if (pthread_create(&decoder, NULL, decode, s)) {
        MHD_stop_daemon(daemon);
        program_complain("no thread could be started");
        return EXIT_MODEL;
    }
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT);
    const int six = strchr(s->options.host, ':') != NULL; /* an address of IPv6 */
    if (!s->options.quiet)
        fprintf(stderr, "moe-server: %s at http://%s%s%s:%d/\n", s->options.model, six ? "[" : "", s->options.host,
                six ? "]" : "", info ? info->port : 0);
    const struct timespec tick = { .tv_nsec = 50000000 };
    while (!program_signal) nanosleep(&tick, NULL), end_late(s);
    MHD_socket listening = MHD_quiesce_daemon(daemon);
    if (listening != MHD_INVALID_SOCKET) close(listening);
    pthread_mutex_lock(&s->lock);
    s->ending = 1;
    pthread_cond_broadcast(&s->filled);
    int busy = s->waiting != NULL;
    pthread_mutex_unlock(&s->lock);
    while (busy) {
        nanosleep(&tick, NULL), end_late(s);
        pthread_mutex_lock(&s->lock);
        busy = s->waiting != NULL;
        pthread_mutex_unlock(&s->lock);
    }
    pthread_join(decoder, NULL);
    for (int i = 0; i < 10; i++) nanosleep(&tick, NULL); /* answers that are being sent */
    MHD_stop_daemon(daemon);
    return s->broken && !s->ending ? EXIT_MODEL : EXIT_DONE;
}

int main(int argc, char **argv) {
    server s = { .lock = PTHREAD_MUTEX_INITIALIZER,
                 .filled = PTHREAD_COND_INITIALIZER,
                 .detecting = PTHREAD_MUTEX_INITIALIZER };
    int status = program_begin("moe-server");
    if (status < 0) status = read_options(&s.options, argc, argv);
    if (status < 0) status = read_keys(&s);
    if (status < 0) program_handle_signals();
    if (status < 0) status = open_translator(&s);
    if (status < 0) {
        open_detector(&s);
        status = serve(&s);
    }
    text_detector_close(s.detector);
    experts_close(s.experts);
    moetext_free(s.translator);
    moetext_model_close(s.model);
    for (size_t i = 0; i < s.n_keys; i++) text_bytes_free(&s.keys[i]);
    free(s.keys);
    text_bytes_free(&s.options.settings);
    return status;
}
