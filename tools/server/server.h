/* server.h - structs and functions shared by the source files of moe-server.
 *
 *   moe-server.c   options, reloading, main
 *   backend.c      models and their translators
 *   libre.c ...    HTTP interfaces, each with a table of routes and its `dialect`s
 *   fetching.c     local and available models; runs moe-get
 *   growing.c      live texts
 *   openai.c       OpenAI's API; ollama.c: Ollama's
 *   chat.c         answer messages, for both
 *   shape.c        messages whose lines are translated one by one
 *   schema.c       answers in JSON of a schema
 *   translate.c    common code of the interfaces: checks, languages, HTML, streams, answers
 *   http.c         connections: limits, keys, replies
 *   hosts.c        check host names and origins of web pages
 *   reading.c      parse requests: JSON, forms and multipart
 *   requests.c     queue the texts of all requests; run the decoder's thread
 *   listen.c       sockets and new connections
 *   process.c      supervisor, pid file
 *   log.c          one line per request
 *   experts.c      collect the experts that tokens used
 *   address.c      addresses of clients, trusted proxies
 *   stops.c        stop sequences
 *
 * A file calls only functions of files that follow it in this list.
 *
 * Threads. Threads of libmicrohttpd read requests and write answers; a backend's decoder thread runs one call of
 * moetext_translate until it ends. A request is parsed, its texts are queued for its client, and its connection is
 * suspended.
 * Whenever a slot is free, the decoder takes a sentence from the next client, so all clients share its batches. The
 * last result of a request, or the first result of a stream, resumes the connection. `server.lock` guards the queues,
 * all requests in state REQUEST_WAITING, and the statistics.
 */
#ifndef SERVER_SERVER_H
#define SERVER_SERVER_H

#include "moe.h"
#include "tools/programs/console.h"
#include "tools/programs/options.h"
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

typedef struct word_list { /* values of a repeated option */
    const char **at;       /* [n] */
    size_t n;
    int from_file; /* 1 if the values come from the --config file; those of the command line replace them */
} word_list;

typedef struct options {
    option_file config;
    const char *model, *host, *keys, *log, *pid_file;
    word_list origins;      /* origins of web pages that may use the server */
    word_list names;        /* names of the server */
    const char *prefix;     /* path at which a proxy serves this server, such as /translate, or "" */
    const char *path;       /* Unix domain socket to use instead of host and port, or NULL */
    word_list models;       /* arguments of -m and --models, or all local models */
    moetext_choice *choice; /* the local models; NULL if -m, --models or MOE_MODEL names the models */
    int allow_get;          /* 1 if clients may fetch models */
    int several;            /* 1 to open all of `models` as one model */
    text_bytes settings;    /* options of libmoetext */
    network *proxies;       /* [n_proxies] proxies trusted to set X-Forwarded-For */
    size_t n_proxies;
    int port, max_body, max_texts, max_queue, max_client, max_client_texts, timeout, grace, rate, quiet;
    int reuse_port, reload;
    int max_connections, max_address, max_bodies, read_timeout;
} options;

/* ---- Requests ------------------------------------------------------------------------------------------
 * A request lives from its first header until its connection is closed or reused and the decoder holds none of its
 * texts. */

typedef struct server server;
typedef struct request request;
typedef struct backend backend;
typedef struct route route;
typedef struct chat chat;                   /* defined in chat.h */
typedef struct experts experts;             /* defined in experts.c */
typedef struct fetching fetching;           /* defined in fetching.c */
typedef struct live_session live_session;   /* defined in growing.c */
typedef struct live_sessions live_sessions; /* defined in growing.c */

typedef enum request_state {
    REQUEST_READING, /* the body is being received                                             */
    REQUEST_WAITING, /* the texts are queued or being decoded; the connection may be suspended */
    REQUEST_DONE     /* the answer can be sent                                                 */
} request_state;

enum { CLIENT_GONE = 499 };               /* value of request.cut if the client closed the connection */
enum { FETCHED = 160, KEPT_FILES = 100 }; /* maximum bytes of a file's name; maximum number of stored files */

typedef struct client {             /* an API key or an address that has waiting requests */
    struct client *next, *previous; /* ring of all clients */
    const struct key_usage *key;    /* of the API key, or NULL if `address` identifies the client */
    uint64_t address;
    request *turn;       /* next request in the ring of the client's requests */
    size_t texts, bytes; /* totals of the client's requests in state REQUEST_WAITING */
} client;

typedef struct text_item { /* one text of a request */
    request *request;
    struct text_item *next; /* next item in request.retries */
    void *place;            /* moetext_request.place */
    char *text;             /* [length] */
    size_t length;
    moe_status status;
    int untranslated;   /* 1 if the translation remains untranslated, at least in part */
    int finished;       /* 1 if the text is translated; the translation is final */
    int pieces;         /* 1 if `text` contains the pieces of a segment that lost its markup, one per line */
    text_bytes answer;  /* translation or error message */
    text_bytes *others; /* [n_others] other translations */
    size_t n_others;
    text_bytes details, experts; /* JSON objects */
    struct experts *collected;   /* experts of the parts so far; may be NULL */
    size_t page;                 /* index of the document that contains the segment */
    const char *source;          /* detected language, or NULL */
} text_item;

typedef struct page { /* an HTML or XML document; its segments are items of the request */
    moetext_html *document;
    char *text; /* [length] */
    size_t length;
    size_t first;      /* index of the document's first segment */
    size_t unfinished; /* number of unfinished segments */
} page;

typedef enum markup { MARKUP_NONE, MARKUP_HTML, MARKUP_XML } markup;

struct request {
    server *server;
    struct MHD_Connection *connection; /* NULL after the connection was closed */
    struct MHD_PostProcessor *form;
    backend *backend;         /* NULL until the body has been received */
    request *next, *previous; /* neighbours in backend.waiting or backend.orphans */
    _Atomic request_state state;
    const route *route;           /* NULL if the path is unknown, or the method is not one of `allow` */
    const struct dialect *errors; /* format of error messages, or NULL */
    int redirect;                 /* 1 if the path is --url-prefix without the final slash */
    int suspended;
    address peer;        /* address of the connection */
    address address;     /* address of the client, which a trusted proxy may have forwarded */
    const char *allow;   /* methods allowed for the path */
    const char *refused; /* reason to refuse the request after its headers and close the connection, or NULL */
    unsigned refusal;    /* HTTP status for refusing the request after its body, or 0 */
    char why[160];
    _Atomic unsigned cut;    /* HTTP status if the texts were not finished, or 0 */
    int is_counted;          /* 1 if server.under_way includes the request */
    int socket;              /* socket of the connection, while the request waits */
    text_bytes body, out;    /* bodies of the request and of the answer, unless the answer is a stream */
    int too_large, too_many; /* 1 if this body is too large; 1 if all bodies together exceed --max-bodies */
    size_t counted;          /* bytes of the body included in server.body_bytes */
    double begin, progress;  /* times of the first header and of the last token of a chat */

    /* For the log */
    char *path, method[16];
    unsigned status;   /* HTTP status sent to the client, or 0 */
    size_t read, sent; /* bytes of the request body and of the answer body */

    /* Texts */
    text_item *items;
    size_t n_items, n_done, n_taken;    /* all items; finished items; items held by the decoder */
    size_t n_begun, n_queued;           /* items taken at least once, in order; items yet to be taken */
    size_t bytes, prompt;               /* size of everything to translate; tokens of a chat's prompt */
    client *client;                     /* NULL if nothing is queued */
    request *next_turn, *previous_turn; /* neighbours in the ring of the client's requests */
    text_item *retries, *open;          /* items to decode again; item with parts that the decoder has not taken yet */
    moe_drop drop;                      /* tells the decoder that results are no longer needed */
    char source[36], target[36], key[132];
    const struct api_key *account; /* NULL if the server needs no keys */
    uint64_t characters;           /* number of characters counted against the quota */
    text_bytes terms;              /* terms of a glossary; each source and each target ends with NUL */
    size_t n_terms;
    moetext_glossary *glossary; /* NULL to use the translator's glossary */
    text_bytes confirmed;       /* pairs of the client's translation memory, as in `terms` */
    size_t n_confirmed;
    moetext_memory *memory; /* of these pairs; may be NULL */
    text_bytes context;     /* context that precedes the texts */
    page *pages;            /* [n_pages] HTML or XML documents */
    size_t n_pages;
    size_t untranslated; /* number of finished texts or segments that remain untranslated, at least in part */
    int is_list, stream, has_texts; /* has_texts: 1 if the body has texts; texts in the URL are then ignored */
    markup markup;

    /* Parameters of individual interfaces */
    int alternatives, details, experts; /* LibreTranslate */
    char ignored[128];                  /* DeepL: names of tags whose contents must not be translated */
    int billed, targets;                /* DeepL: 1 to report characters; 1 to list target languages */
    text_bytes file;                    /* name of an uploaded file */
    char fetched[FETCHED];              /* part of the path after a route that ends in '/' */
    chat *chat;                         /* OpenAI */
    char live_id[36];                   /* a live text: its session, or "" */
    int live_state, live_quick;         /* moetext_live_state; 1 if a quick translation is under way */
    live_session *live;                 /* session on whose text this request works; may be NULL */

    text_bytes lines; /* output of a stream, starting at byte lines_from */
    size_t lines_from;
    _Atomic int started; /* 1 if the stream contains a result and not only an error */
};

/* ---- Server -------------------------------------------------------------------------------------------- */

enum { RATES = 512, RATE_WAYS = 8 }; /* number of sets of counters, and of counters per set */

typedef struct rate { /* number of requests from an address in the current minute */
    uint64_t key;
    int n; /* 0 if the counter is free */
} rate;

typedef struct http_connection {
    struct http_connection *next, *previous;
    uint64_t peer, client; /* keys of addresses; if the peer is a trusted proxy, peer is ADDRESS_NOBODY */
    MHD_socket socket;
    double until; /* deadline for sending the request or taking the answer; 0 while the answer is computed */
    size_t body;  /* bytes of the body being received */
    int slow;     /* 1 if the connection was closed after its deadline */
    int idle;     /* 1 between an answer and the next request */
} http_connection;

typedef struct key_usage { /* an API key's counts, kept across reloads; guarded by `lock` */
    uint64_t characters, requests;
} key_usage;

typedef struct api_key {
    text_bytes text, name; /* name for metrics */
    size_t line;           /* line in the file */
    uint64_t limit;        /* characters allowed, 0 for no limit */
    key_usage *usage;      /* shared with the same key in earlier setups */
    int first;             /* 1 if no earlier setup has the key */
} api_key;

typedef struct setup { /* settings and keys, immutable; a reload makes a new setup and keeps the old ones until exit */
    struct setup *previous;
    options options;
    api_key *keys; /* [n_keys] */
    size_t n_keys;
} setup;

struct backend { /* models and their translator. A reload that changes them makes a new backend for new requests; the
                    previous one ends with its last request */
    backend *previous;
    server *server;
    const char *name;       /* of the first model file */
    uint64_t stamp;         /* hash of the settings and files */
    _Atomic size_t holders; /* number of requests */
    int closing;            /* 1 after a reload; guarded by `lock` */
    moetext_model *model;
    moetext *translator;
    text_bytes settings;         /* options of libmoetext */
    int routed;                  /* 1 if results can contain experts */
    int answers;                 /* 1 if the model answers chat messages */
    size_t max_prompt;           /* maximum number of tokens of chat messages */
    moe_session_params sampling; /* default parameters for chat messages */
    int greedy;                  /* 1 if chats are greedy by default */
    int guided;                  /* 1 if answers can be in JSON of a schema */
    text_bytes token_bytes;      /* bytes of all tokens, made when first needed; guarded by `detecting` */
    uint32_t *token_ends;        /* [vocabulary] ends of the tokens in token_bytes; NULL before */
    int samples;                 /* 1 if requests may set sampling parameters */
    time_t began;
    unsigned char *named;    /* [languages] 1 for languages to list; NULL for all */
    text_detector *detector; /* NULL if languages cannot be detected */
    pthread_t decoder;

    /* Guarded by server.lock */
    pthread_cond_t filled; /* signalled when a text has been queued, or no more will be */
    client *clients;       /* next client in the ring of clients */
    size_t busy, calm;     /* at `busy` sentences (0 for no limit), clients in the batch wait until `calm` remain */
    int holding;           /* 1 while clients in the batch wait */
    size_t n_queued;       /* number of texts that the decoder has not taken yet */
    int decoded;           /* 1 after the decoder's thread has ended */
    enum { NOT_SAVING, WILL_SAVE, SAVING } saving; /* whether the decoder pauses to save computed prompts */
    request *waiting;
    request *orphans; /* requests without a connection whose texts the decoder holds */
    moe_stats stats;
};

typedef struct shared_data { /* contents of a file, freed by the last holder */
    server *server;
    size_t holders; /* number of holders: the file's slot and the answers being sent */
    text_bytes bytes;
} shared_data;

typedef struct kept_file { /* slot for a file; all members are zero if the slot is free */
    char name[FETCHED];
    shared_data *data;
    uint64_t owner; /* the owner's API key number or address key */
    double since;
} kept_file;

typedef struct direction { /* numbers of texts that a model translated from one language into another */
    char model[64], source[36], target[36];
    uint64_t texts, failed;
} direction;

enum { DIRECTIONS = 256 }; /* maximum number of counted directions */

struct server {
    setup *_Atomic setup;
    fetching *fetching;             /* NULL before the first use; guarded by `lock` */
    live_sessions *live;            /* NULL before the first use; guarded by `lock` */
    int wants_reload;               /* 1 after a model was fetched; guarded by `lock` */
    backend *backend;               /* the current one, followed by those that are ending; guarded by `lock` */
    const route *const *interfaces; /* tables of routes, ended by NULL */
    _Atomic uint64_t n_answers;
    pthread_mutex_t detecting;
    int64_t minute; /* minute for which `rates` counts */
    rate rates[RATES][RATE_WAYS];
    uint64_t salt; /* random number of this process */
    struct {
        int socket, wake[2]; /* the listening socket; a pipe that wakes the thread */
        int shared;          /* 1 if other servers can accept connections at the same address */
        pthread_t thread;
        struct MHD_Daemon *daemon;
        dev_t device; /* device and inode of the file options.path */
        ino_t inode;
    } listening;
    uint64_t characters; /* characters used by all clients; guarded by `lock` */

    kept_file files[KEPT_FILES]; /* guarded by `lock` */
    size_t file_bytes;           /* bytes of all shared_data that has holders */

    pthread_mutex_t connections_lock; /* guards connections and body_bytes; no other lock is taken while it is held */
    http_connection *connections;
    size_t body_bytes; /* memory of all bodies being received */
    _Atomic size_t n_connections;

    _Atomic int log; /* file descriptor, or 0 */
    int log_file;    /* file descriptor of a file, or 0 */
    char pid_path[1024];
    int pid_file;                     /* locked file descriptor, or 0 */
    _Atomic int log_torn, log_failed; /* 1 if the last line is incomplete; 1 after a reported write error */

    pthread_mutex_t lock;
    _Atomic size_t under_way; /* number of requests without a completely sent answer */
    _Atomic int draining;     /* 1 if connections are closed after their next answer */
    _Atomic int ending;       /* 1 if no new requests are accepted */
    int ended;                /* 1 after the requests under way were cut */
    _Atomic int broken;       /* 1 if the translator failed */

    _Atomic uint64_t n_left; /* number of requests that ended */
    uint64_t trimmed_at;     /* value of n_left when memory was last returned to the system */
    double trimmed;          /* time when memory was last returned to the system */
    double told;             /* time when a failed translation was last reported */
    int trims;               /* remaining times to return memory if no more requests end */

    /* Statistics, for /metrics */
    uint64_t responses[600], texts, failed_texts, bytes_in, bytes_out; /* responses by status */
    uint64_t reloads[2];                                               /* successful and failed reloads */
    direction directions[DIRECTIONS];
    size_t n_directions;
    struct {
        double succeeded;            /* time of the last translation */
        char source[36], target[36]; /* direction of the last text that failed on the server, or "" */
    } failing;
    uint64_t seconds_below[8], seconds_count;
    double seconds_sum;
};

/* ---- Interfaces ---------------------------------------------------------------------------------------- */

/* Names and functions of an HTTP interface. TRANSLATES sets the functions of an interface that translates texts. */
typedef struct dialect {
    const char *texts, *source, *target; /* names of parameters, or NULL */
    const char *error;                   /* member with the error message; NULL for "error" */
    unsigned quota, denied;              /* statuses for a spent quota (0 for 429) and a wrong key (0 for 403) */
    const char *stream_type;             /* Content-Type of streams */
    void (*read)(request *req, const cJSON *all); /* parse the whole JSON body; NULL to call `take` for each member */
    void (*take)(request *req, const char *name, const char *value, size_t length); /* read a parameter; may be NULL */
    void (*check)(server *s, request *req);                           /* check the parsed request; may be NULL */
    void (*begin)(server *s, text_item *item, moetext_request *next); /* fill the decoder's request (lock held) */
    moetext_partial_fn partial;                                       /* may be NULL */
    int (*done)(server *s, text_item *item,
                const moetext_result *result);                   /* store a result; return 0 if the item was requeued */
    void (*end)(server *s, request *req, const text_item *item); /* add a finished item to a stream or, if item is NULL,
                                                                    the reason for request.cut (lock held) */
    enum MHD_Result (*send)(server *s, request *req);            /* send the answer when all items are done */
    void (*put_error)(const request *req, json *j, const char *message, unsigned status); /* may be NULL */
    void (*put_finished)(request *req, json *j); /* add the finished texts to a timeout's error; may be NULL */
    void (*free)(request *req);                  /* may be NULL */
} dialect;

enum { NEEDS_BODY = 1, NEEDS_KEY = 2, ALWAYS = 4 }; /* ALWAYS exempts a route from the limits per client */

struct route {                 /* a table of routes ends with a NULL method */
    const char *method, *path; /* a path that ends in '/' matches everything below it */
    int flags;
    enum MHD_Result (*answer)(server *s, request *req); /* called again when a waiting request is done */
    const dialect *dialect;                             /* NULL if no body is read */
};

extern const route libre_routes[], file_routes[], deepl_routes[], openai_routes[], ollama_routes[], live_routes[],
    fetching_routes[], status_routes[];

/* Collect the output of moe-get; set wants_reload after it has fetched a model. */
void fetching_look(server *s);
/* Stop moe-get, and free everything. */
void fetching_end(server *s);

/* End sessions that were not used for some time. */
void live_drop_old(server *s);
void live_free(server *s);

extern const char *const file_endings[]; /* extensions of the files that files.c translates, ended by NULL */
void files_drop_old(server *s);
void files_free(server *s);

/* ---- translate.c --------------------------------------------------------------------------------------- */

#define TRANSLATES \
    .stream_type = "application/x-ndjson", .begin = translation_begin, .done = translation_done, .end = translation_end
void translation_begin(server *s, text_item *item, moetext_request *next);
int translation_done(server *s, text_item *item, const moetext_result *result);
void translation_end(server *s, request *req, const text_item *item);

/* Refuse a request whose languages are not supported. */
void check_languages(request *req);
/* Check a request, queue its texts, and let its dialect send the answer when all texts are done. */
enum MHD_Result answer_translate(server *s, request *req);
size_t request_count(const request *req); /* return the number of texts or documents */
/* Return the translation of text or document `i` (k = 0) or its alternative k. The result is valid until the next call
 * with the same document. Return NULL if out of memory. */
const char *request_text(const request *req, size_t i, size_t k, size_t *length);
/* Write the result of request_text as a JSON string. */
void put_text(const request *req, json *j, const char *key, size_t i, size_t k);
/* Detect the language of text or document `i`. Return -1 if it is unknown. Set *confidence to a value from 0 to 1. */
ptrdiff_t request_language(server *s, const request *req, size_t i, float *confidence);
/* Return 1 if interfaces list a language, and if they list a direction. */
int lists_language(const backend *b, size_t language);
int lists_direction(const backend *b, size_t source, size_t target);
/* Return the source language of text or document `i`, as stated by the client or else as detected. */
ptrdiff_t request_source(server *s, const request *req, size_t i);

/* ---- http.c -------------------------------------------------------------------------------------------- */

/* Start libmicrohttpd and accept connections. Return NULL after an error message. */
struct MHD_Daemon *http_start(server *s);
/* Return the number of connections; exclude idle ones if `busy` is 1. */
size_t http_connections(server *s, int busy);
/* Close connections that missed the deadline for sending a request or taking an answer. */
void http_end_slow(server *s);
/* Set the client's deadline for taking a complete answer of `bytes` bytes. */
void http_answered(server *s, const request *req, size_t bytes);
/* Get the number of characters used with the request's API key, and the key's limit. */
void quota_of(server *s, const request *req, uint64_t *characters, uint64_t *limit);
/* Count the characters of a request. Return 0 if they exceed the limit. */
int quota_take(server *s, request *req);
/* Count more characters without checking the limit. */
void quota_add(server *s, request *req, uint64_t n);
void quota_give_back(server *s, request *req);
/* Read the --api-keys file. Return -1, or an exit status after an error message. */
int http_read_keys(setup *u);
enum MHD_Result send_response(server *s, request *req, unsigned status, const char *type, struct MHD_Response *r);
/* Send req->out. */
enum MHD_Result send_bytes(server *s, request *req, unsigned status, const char *type);
/* Add a line break to req->out and send it as JSON with status 200. */
enum MHD_Result send_json(server *s, request *req);
enum MHD_Result send_error(server *s, request *req, unsigned status, const char *message);
/* Return 1 if a request came from a trusted proxy. */
int http_is_proxied(const server *s, const request *req);

/* ---- hosts.c ------------------------------------------------------------------------------------------- */

/* Check the Host and Origin headers of a request. Return 0, or a status after setting req->refused. */
unsigned hosts_check(const server *s, request *req, const char *method);
int hosts_is_foreign(const request *req); /* 1 if a browser says that a page of another origin caused the request */
/* Add the headers that let pages of allowed origins read the answer. */
void hosts_answer(const server *s, const request *req, struct MHD_Response *r);

/* ---- reading.c ----------------------------------------------------------------------------------------- */

PROGRAM_PRINTF(3, 4) void refuse(request *req, unsigned status, const char *format, ...);
#define bad_request(req, ...) refuse(req, MHD_HTTP_BAD_REQUEST, __VA_ARGS__)
void refuse_memory(request *req);
/* Copy a short parameter. Truncate a parameter that is too long, so that it differs from all valid values. */
void take_word(char *out, size_t size, const char *value, size_t length);
/* Add a text to a request. Return 0 if out of memory. */
int add_text(request *req, const char *text, size_t length);
/* Add a text unless the request has too many texts. Return 0 if the request is refused. */
int take_text(request *req, const char *text, size_t length);
/* Parse a text that is JSON as a whole. Return NULL if it is not, or after refusing a request with too many values. */
cJSON *parse_text(request *req, const char *data, size_t length);
void items_free(text_item *items, size_t n);
/* Prepare this process for read_body. */
void reading_begin(void);
/* Parse the texts and parameters in req->body. Refuse a request with more than --max-texts texts. */
void read_body(request *req);

/* ---- requests.c ---------------------------------------------------------------------------------------- */

/* Run the decoder thread of a backend, `closure`. */
void *requests_decode(void *closure);
/* Cut requests that exceed the timeout or whose connection was closed. */
void requests_look(server *s);
/* Stop accepting new requests. */
void requests_end(server *s);
/* Cut all requests under way and return their number. */
size_t requests_cut(server *s);
/* Return the HTTP status of a failed item. */
unsigned failure_status(const text_item *item);
/* Return a message for request.cut. */
const char *requests_why(const request *req);
/* Resume the connection of a request (lock held). */
void request_wake(request *req);
/* Queue the texts of a request and suspend its connection. */
void requests_enqueue(server *s, request *req);
/* Queue an item again with a new text, which then belongs to the item. Return 0 if the request has ended. */
int requests_retry(server *s, text_item *item, char *text, size_t length);
/* Release a request that the connection has finished, or whose connection was closed. */
void requests_leave(server *s, request *req);

/* ---- backend.c ----------------------------------------------------------------------------------------- */

/* Open models and their translator. Return -1, or an exit status after an error message. */
int backend_open(server *s, const options *o, backend **out);
void backend_free(backend *b); /* may be NULL */
/* Return 1 if a backend has these settings and its files have not changed. */
int backend_is_current(const backend *b, const options *o);
/* Start the decoder. Return -1, or an exit status after an error message. */
int backend_start(backend *b);
/* Save the computed prompts of a running backend for the next one. Texts in progress are finished first, for up to
 * `seconds`; meanwhile other texts wait. Do nothing without the option prompt-cache. */
void backend_save(backend *b, double seconds);
/* Use a backend for new requests. The previous one ends with its last request. */
void backends_replace(server *s, backend *b);
/* Free backends that have ended. */
void backends_tidy(server *s);
/* Wait for all decoders to stop. */
void backends_end(server *s);
/* Free all backends, the oldest first: the newest saves its computed prompts last. */
void backends_free(server *s);

/* ---- listen.c ------------------------------------------------------------------------------------------ */

/* Open the listening socket, or use the supervisor's. Return 0 after an error message. */
int listen_open(server *s);
/* Pass new connections to libmicrohttpd in a thread. Return 0 after an error message. */
int listen_start(server *s, struct MHD_Daemon *daemon);
/* Stop accepting connections, after accepting those pending on a shared socket. */
void listen_stop(server *s);
/* Return the server's address for messages. */
const char *listen_address(const server *s, char *out, size_t size);
int listen_port(const server *s);        /* return the port, or -1 for a Unix domain socket */
int listen_is_loopback(const server *s); /* 1 if only this machine can connect */

/* ---- process.c ----------------------------------------------------------------------------------------- */

/* Report a state to systemd or another supervisor that has set NOTIFY_SOCKET (see sd_notify(3)). */
void process_notify(const char *state);
/* Write the pid file. Return -1, or an exit status after an error message. */
int process_write_pid(server *s, int port);
void process_drop_pid(server *s);
/* Report the result of a reload to a waiting moe-server --reload. */
void process_reloaded(const server *s, int failed);
/* Make the server with these options reload, and wait for it. Return the exit status. */
int process_reload(const options *o);

/* ---- experts.c ----------------------------------------------------------------------------------------- */

/* Collect the experts of the next part of a text, unless the text has too many parts. */
void experts_begin(const backend *b, text_item *item, moetext_request *next);
void experts_free(experts *experts); /* may be NULL */
/* Free the collected experts of a translated text and write them to item->experts as a JSON object, or null:
 *
 *   {"source":{"layers":[{"layer":"encoder.2","experts":32}],
 *              "tokens":[{"token":"\u2581Where","experts":[[[3,0.61],[17,0.39]]]}]},
 *    "target":{...}}
 *
 * Each token has a list of experts with weights for each layer, in ascending order of experts. Source tokens include
 * those that an encoder adds, but not those of a prompt. A target token has the experts of the step that wrote it. */
void experts_write(const backend *b, text_item *item, size_t n_parts);

/* ---- log.c --------------------------------------------------------------------------------------------- */

/* Open or reopen the --log file; NULL for no log. Return -1, or an exit status after an error message. */
int log_open(server *s, const char *path);
/* Write the log line of a request that ended. `cut` is the status that explains why its answer is incomplete, or 0. */
void log_write(server *s, const request *req, unsigned cut);

#endif
