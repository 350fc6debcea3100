/* server.h - the files of moe-server and their common structs.
 *
 *   moe-server.c   options, models, main
 *   libre.c ...    the interfaces, each with a table of routes and its `dialect`s
 *   translate.c    what the interfaces share: checks, languages, HTML, streams, answers
 *   http.c         connections: limits, keys, replies
 *   reading.c      parse requests: JSON, forms and multipart
 *   requests.c     queue the texts of all requests; the decoder's thread
 *   log.c          one line per request
 *   experts.c      the experts that tokens used
 *   address.c      addresses of clients, trusted proxies
 *   stops.c        stop sequences
 *
 * A file calls only files that follow it in this list.
 *
 * Threads. libmicrohttpd has threads that read and write; the decoder's thread runs one moetext_translate until the
 * server ends. A request is parsed, its texts are queued for its client, and its connection is suspended. Whenever a
 * slot is free, the decoder takes a sentence from the next client, so texts of all clients share its batches. The last
 * result of a request resumes its connection; for a stream, the first successful one does. `server.lock` guards the
 * queues, all requests in state REQUEST_WAITING, and the statistics.
 */
#ifndef SERVER_SERVER_H
#define SERVER_SERVER_H

#include "moe.h"
#include "tools/programs/console.h"
#include "tools/server/address.h"
#include "tools/text/bytes.h"
#include "tools/text/detect.h"
#include "tools/text/json.h"
#include "tools/text/moetext.h"

#include <cjson/cJSON.h>
#include <microhttpd.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/types.h>

/* ---- Options ------------------------------------------------------------------------------------------- */

typedef struct options {
    const char *model, *host, *keys, *origin, *log;
    const char *path;    /* Unix domain socket that replaces host and port, or NULL */
    const char **models; /* [n_models] arguments of -m and --models */
    size_t n_models;
    int several;         /* 1: open them as one model */
    text_bytes settings; /* options of libmoetext */
    network *proxies;    /* [n_proxies] trusted to set X-Forwarded-For */
    size_t n_proxies;
    int port, max_body, max_texts, max_queue, max_client, max_client_texts, timeout, grace, rate, quiet;
    int max_connections, max_address, max_bodies, read_timeout;
} options;

/* ---- Requests ------------------------------------------------------------------------------------------
 * A request lives from its first header until its connection is closed or reused and the decoder holds none of its
 * texts. */

typedef struct server server;
typedef struct request request;
typedef struct route route;
typedef struct chat chat;       /* of openai.c */
typedef struct experts experts; /* of experts.c; one thread at a time may use it */

typedef enum request_state {
    REQUEST_READING, /* receiving its body                                              */
    REQUEST_WAITING, /* its texts are queued or decoding; its connection may be suspended */
    REQUEST_DONE     /* its answer can be sent                                          */
} request_state;

enum { CLIENT_GONE = 499 };               /* request.cut: the client closed the connection */
enum { FETCHED = 160, KEPT_FILES = 100 }; /* bytes of a translated file's name; number of files kept */

typedef struct client {             /* an API key or an address, while requests of it wait */
    struct client *next, *previous; /* ring of all clients */
    size_t key;                     /* number of the key from 1; 0: identified by its address */
    uint64_t address;
    request *turn;       /* in the ring of its requests: the next one */
    size_t texts, bytes; /* of its requests in state REQUEST_WAITING */
} client;

typedef struct text_item { /* one text of a request */
    request *request;
    struct text_item *next; /* in request.retries */
    void *place;            /* moetext_request.place */
    char *text;             /* [length] */
    size_t length;
    moe_status status;
    text_bytes answer;  /* its translation, or the error message */
    text_bytes *others; /* [n_others] other translations */
    size_t n_others;
    text_bytes details, experts; /* JSON objects */
    size_t page;                 /* HTML: index of its document */
    int pieces;                  /* HTML: 1 if its text is the pieces of a segment that lost its markup, one per line */
    const char *source;          /* detected language, or NULL */
} text_item;

typedef struct page { /* a document of HTML or XML; its segments are items of the request */
    moetext_html *document;
    char *text; /* [length] */
    size_t length;
    size_t first;      /* index of its first segment */
    size_t unfinished; /* segments */
} page;

typedef enum markup { MARKUP_NONE, MARKUP_HTML, MARKUP_XML } markup;

struct request {
    server *server;
    struct MHD_Connection *connection; /* NULL after it was closed */
    struct MHD_PostProcessor *form;
    request *next, *previous; /* in server.waiting or server.orphans */
    _Atomic request_state state;
    const route *route; /* NULL if the path is unknown, or its methods, `allow`, are others */
    int suspended;
    address address;     /* of the client: if a trusted proxy sent the request, the one it names */
    const char *allow;   /* methods allowed for the path */
    const char *refused; /* why the request is refused after its headers and the connection closed */
    unsigned refusal;    /* status of a request that is refused after its body, or 0 */
    char why[160];
    _Atomic unsigned cut;    /* HTTP status that says why its texts were not finished, or 0 */
    int is_counted;          /* in server.under_way */
    int socket;              /* of the connection, while the request waits */
    text_bytes body, out;    /* out: of the answer, unless it is a stream */
    int too_large, too_many; /* body: exceeds its own limit, or that of all bodies */
    size_t counted;          /* bytes of it in server.body_bytes */
    double begin;

    /* For the log */
    char *path, method[16];
    unsigned status;   /* sent to the client, or 0 */
    size_t read, sent; /* bytes of the bodies */

    /* Texts */
    text_item *items;
    size_t n_items, n_done, n_taken;    /* n_taken: held by the decoder */
    size_t n_begun, n_queued;           /* items taken at least once, in order; items still to take */
    size_t bytes;                       /* size of everything to translate */
    client *client;                     /* NULL if nothing is queued */
    request *next_turn, *previous_turn; /* in the ring of the client */
    text_item *retries, *open;          /* items to decode again; the item of which the decoder takes more parts */
    moe_drop drop;                      /* no result is needed any more */
    char source[36], target[36], key[132];
    size_t key_number;   /* from 1; 0: no API keys are needed */
    uint64_t characters; /* counted against the quota */
    text_bytes terms;    /* of a glossary: each source and target, ended by NUL */
    size_t n_terms;
    moetext_glossary *glossary; /* NULL: the translator's */
    text_bytes context;         /* text that precedes the texts */
    page *pages;                /* [n_pages] of HTML and XML */
    size_t n_pages;
    int is_list, stream, has_texts; /* has_texts: the body contains some, so those of the URL do not count */
    markup markup;

    /* Parameters of single interfaces */
    int alternatives, details, experts; /* LibreTranslate */
    int billed, targets;                /* DeepL: report characters; list target languages */
    text_bytes file;                    /* name of an uploaded file */
    char fetched[FETCHED];              /* rest of the path after a route that ends in '/' */
    chat *chat;                         /* OpenAI */

    text_bytes lines; /* output of a stream, from byte lines_from */
    size_t lines_from;
    _Atomic int started; /* 1: the stream contains a result, not only an error */
};

/* ---- Server -------------------------------------------------------------------------------------------- */

enum { RATES = 512, RATE_WAYS = 8 }; /* sets of counters, and counters per set */

typedef struct rate { /* requests of an address in this minute */
    uint64_t key;
    int n; /* 0: free */
} rate;

typedef struct http_connection {
    struct http_connection *next, *previous;
    uint64_t peer, client; /* address keys. A trusted proxy counts for the client of its request, and else for nobody */
    MHD_socket socket;
    double until; /* deadline for the request or for taking the answer; 0: neither, the answer is being computed */
    size_t body;  /* bytes of the body being received */
    int slow;     /* 1: closed after its deadline */
} http_connection;

typedef struct api_key {
    text_bytes text;
    uint64_t characters, limit; /* used, and allowed (0: unlimited) */
} api_key;

typedef struct shared_data { /* of a file; freed with its last holder */
    server *server;
    size_t holders; /* its slot, and answers being sent */
    text_bytes bytes;
} shared_data;

typedef struct kept_file { /* all zero: free */
    char name[FETCHED];
    shared_data *data;
    uint64_t owner; /* number of a key, or key of an address */
    double since;
} kept_file;

struct server {
    options options;
    const route *const *interfaces; /* tables, ended by NULL */
    moetext_model *model;
    moetext *translator;
    experts *experts;            /* the decoder's; NULL until needed */
    int no_experts;              /* 1: they cannot be observed */
    int aligned;                 /* 1: results contain word links */
    int answers;                 /* 1: the model answers chat messages */
    size_t max_prompt;           /* tokens of such messages */
    moe_session_params sampling; /* defaults for them */
    int samples;                 /* 1: requests may set other sampling parameters */
    _Atomic uint64_t n_answers;
    time_t began;
    text_detector *detector; /* NULL: languages cannot be detected */
    pthread_mutex_t detecting;
    int64_t minute; /* of `rates` */
    rate rates[RATES][RATE_WAYS];
    uint64_t salt; /* random, per process */
    dev_t device;  /* of the file options.path */
    ino_t inode;
    api_key *keys; /* [n_keys] */
    size_t n_keys;
    uint64_t characters; /* used by all; guarded by `lock`, as are those of each key */

    kept_file files[KEPT_FILES]; /* guarded by `lock` */
    size_t file_bytes;           /* of all data with holders */

    pthread_mutex_t connections_lock; /* guards the next two; no other lock is taken while it is held */
    http_connection *connections;
    size_t body_bytes; /* of bodies being received */

    int log;                          /* descriptor, or 0 */
    _Atomic int log_torn, log_failed; /* the last line is incomplete; lines are missing and an error was reported */

    pthread_mutex_t lock;
    pthread_cond_t filled; /* a text was queued, or `ending` set */
    client *clients;       /* in the ring: the next one */
    size_t busy, calm; /* sentences in the batch: with `busy` (0: never) its clients must wait, until it has `calm` */
    int holding;       /* 1: they wait */
    size_t n_queued;   /* texts not yet taken by the decoder */
    int decoded;       /* the decoder's thread has ended */
    request *waiting;
    _Atomic size_t under_way; /* requests not yet answered to the last byte */
    request *orphans;         /* without connection, but with texts held by the decoder */
    _Atomic int ending;       /* accept no new requests */
    int ended;                /* requests under way have been cut */
    _Atomic int broken;       /* the translator failed */

    _Atomic uint64_t n_left; /* requests that ended */
    uint64_t trimmed_at;     /* the same when memory was last returned to the system, */
    double trimmed;          /* the time of that, */
    int trims;               /* and how often to repeat it */

    /* Statistics, for /metrics */
    uint64_t requests[6], texts, failed_texts, bytes_in, bytes_out; /* requests by the first digit of their status */
    uint64_t seconds_below[8], seconds_count;
    double seconds_sum;
    moe_stats stats;
};

/* ---- Interfaces ---------------------------------------------------------------------------------------- */

/* Names and forms of one interface. TRANSLATES sets the functions of one that translates texts. */
typedef struct dialect {
    const char *texts, *source, *target;          /* names of parameters, or NULL */
    const char *error;                            /* member with the error message; NULL: "error" */
    unsigned quota, denied;                       /* statuses for a spent quota (0: 429) and a wrong key (0: 403) */
    const char *stream_type;                      /* Content-Type of streams */
    void (*read)(request *req, const cJSON *all); /* parse the whole JSON body; NULL: use `take` */
    void (*take)(request *req, const char *name, const char *value, size_t length); /* another parameter; may be NULL */
    void (*check)(server *s, request *req);                                         /* after parsing; may be NULL */
    void (*begin)(server *s, text_item *item, moetext_request *next); /* fill what the decoder is to do (lock held) */
    moetext_partial_fn partial;                                       /* may be NULL */
    int (*done)(server *s, text_item *item,
                const moetext_result *result);                   /* store a result; 0: the item was requeued */
    void (*end)(server *s, request *req, const text_item *item); /* add a finished item to a stream, or with item NULL
                                                                    the reason of request.cut (lock held) */
    enum MHD_Result (*send)(server *s, request *req);            /* answer when all items are done */
    void (*put_error)(const request *req, json *j, const char *message, unsigned status); /* NULL: `error` alone */
    void (*free)(request *req);                                                           /* may be NULL */
} dialect;

enum { NEEDS_BODY = 1, NEEDS_KEY = 2, ALWAYS = 4 }; /* ALWAYS: exempt from limits per client */

struct route {                 /* a table of them ends with a NULL method */
    const char *method, *path; /* a path that ends in '/' matches everything below it */
    int flags;
    enum MHD_Result (*answer)(server *s, request *req); /* called again when a waiting request is done */
    const dialect *dialect;                             /* NULL if no body is read */
};

extern const route libre_routes[], file_routes[], deepl_routes[], openai_routes[], status_routes[];

extern const char *const file_endings[]; /* that files.c translates, ended by NULL */
void files_drop_old(server *s);
void files_free(server *s);

/* ---- translate.c --------------------------------------------------------------------------------------- */

#define TRANSLATES \
    .stream_type = "application/x-ndjson", .begin = translation_begin, .done = translation_done, .end = translation_end
void translation_begin(server *s, text_item *item, moetext_request *next);
int translation_done(server *s, text_item *item, const moetext_result *result);
void translation_end(server *s, request *req, const text_item *item);

/* Check a request, queue its texts, and let its dialect send the answer when they are done. */
enum MHD_Result answer_translate(server *s, request *req);
size_t request_count(const request *req); /* number of texts or documents */
/* The translation of text or document `i`, or alternative k from 1. Valid until the next call with this document. NULL:
 * out of memory. */
const char *request_text(const request *req, size_t i, size_t k, size_t *length);
/* Append request_text as a string. */
void put_text(const request *req, json *j, const char *key, size_t i, size_t k);
/* Detect the language of text or document `i`: -1 if unknown. *confidence: 0 to 1. */
ptrdiff_t request_language(server *s, const request *req, size_t i, float *confidence);
/* The same for its stated language, if there is one. */
ptrdiff_t request_source(server *s, const request *req, size_t i);
/* Return 1 if an item failed because of the client's text. */
int is_client_error(const text_item *item);

/* ---- http.c -------------------------------------------------------------------------------------------- */

/* Listen at the port or socket. NULL after an error message. */
struct MHD_Daemon *http_listen(server *s);
/* Remove the socket's file unless another server has replaced it. */
void http_unlink(const server *s);
/* Close connections that exceeded the time to send a request or to take an answer. */
void http_end_slow(server *s);
/* Set the client's deadline for taking an answer of `bytes`, now complete. */
void http_answered(server *s, const request *req, size_t bytes);
/* Characters used with the request's key, and their limit. */
void quota_of(server *s, const request *req, uint64_t *characters, uint64_t *limit);
/* Count the characters of a request. Return 0 if they exceed the limit. */
int quota_take(server *s, request *req);
void quota_give_back(server *s, request *req);
/* Read the file of --api-keys. Return -1, or an exit status after an error message. */
int http_read_keys(server *s);
enum MHD_Result send_response(server *s, request *req, unsigned status, const char *type, struct MHD_Response *r);
/* Send req->out. */
enum MHD_Result send_bytes(server *s, request *req, unsigned status, const char *type);
/* Send it as JSON with status 200, after adding a line break. */
enum MHD_Result send_json(server *s, request *req);
enum MHD_Result send_error(server *s, request *req, unsigned status, const char *message);

/* ---- reading.c ----------------------------------------------------------------------------------------- */

PROGRAM_PRINTF(3, 4) void refuse(request *req, unsigned status, const char *format, ...);
#define bad_request(req, ...) refuse(req, MHD_HTTP_BAD_REQUEST, __VA_ARGS__)
void refuse_memory(request *req);
/* Copy a short parameter, cut if it is too long: then it equals no valid value. */
void take_word(char *out, size_t size, const char *value, size_t length);
/* Add a text to a request. Return 0 without memory. */
int add_text(request *req, const char *text, size_t length);
void items_free(text_item *items, size_t n);
/* Parse req->body: texts and parameters. More texts than --max-texts are refused before they are stored. */
void read_body(request *req);

/* ---- requests.c ---------------------------------------------------------------------------------------- */

/* The decoder's thread; `closure` is the server. */
void *requests_decode(void *closure);
/* Cut requests that exceed the timeout, and those of closed connections. */
void requests_look(server *s);
/* Accept no new requests. */
void requests_end(server *s);
/* Cut all requests under way and return their number. */
size_t requests_cut(server *s);
/* The reason of request.cut in words. */
const char *requests_why(const request *req);
/* Resume the connection of a request (lock held). */
void request_wake(request *req);
/* Queue the texts of a request and suspend its connection. */
void requests_enqueue(server *s, request *req);
/* Queue an item again with another text, which it takes over. Return 0 if the request has ended. */
int requests_retry(server *s, text_item *item, char *text, size_t length);
/* The connection has finished a request or was closed. */
void requests_leave(server *s, request *req);

/* ---- experts.c ----------------------------------------------------------------------------------------- */

/* Observe the experts of the model, with the translator's settings. NULL if it has none, or for lack of memory. */
experts *experts_open(const moetext_model *model, const char *settings);
void experts_close(experts *experts); /* NULL is fine */
/* Score the best translation of a result again and append a JSON object:
 *
 *   {"source":{"layers":[{"layer":"encoder.2","experts":32}],
 *              "tokens":[{"token":"\u2581Where","experts":[[[3,0.61],[17,0.39]]]}]},
 *    "target":{...}}
 *
 * A token has a list for each layer: its experts in ascending order, and their weights. Source tokens include those
 * that the model adds. A target token has the experts of the step that wrote it. source, target: language codes, as in
 * moetext_request. Return 0 on failure: *out is unchanged. */
int experts_write(experts *experts, const char *source, const char *target, const moetext_result *result,
                  text_bytes *out);

/* ---- log.c --------------------------------------------------------------------------------------------- */

/* Open or reopen the file of --log. Return -1, or an exit status after an error message. */
int log_open(server *s);
/* Write the line of a request that ended. cut: the status that says why its answer is incomplete, or 0. */
void log_write(server *s, const request *req, unsigned cut);

#endif
