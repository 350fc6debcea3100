/* server.h - the files of moe-server, and their common structs.
 *
 *   moe-server.c   options, the model, main
 *   http.c         connections: limits, keys, what is sent
 *   address.c      addresses of clients, trusted proxies
 *   log.c          a line for each request
 *   requests.c     the texts of all requests, and the thread that translates them
 *   reading.c      parsing requests: JSON, forms and multipart
 *   api.c          the answers of all addresses; their table is api_routes
 *   deepl.c        the interfaces of DeepL and of immersive-translate
 *   openai.c       the interface of OpenAI's chat, for models that answer messages
 *   stops.c        texts at which an answer stops
 *   files.c        files that are translated, and kept until they are fetched
 *
 * Threads. libmicrohttpd has threads that read and write; the decoder's thread runs one moetext_translate for as long
 * as the server lives. A request is parsed, its texts wait in its client's ring, and its connection is suspended. The
 * decoder takes a sentence of each client in turn whenever a slot is free, so that texts of all clients share its
 * batches. The last result of a request resumes its connection, of a stream the first one that is no error.
 * `server.lock` guards the rings, all asks in state ASK_WAITING, and the figures.
 */
#ifndef SERVER_SERVER_H
#define SERVER_SERVER_H

#include "moe.h"
#include "tools/programs/program.h"
#include "tools/server/address.h"
#include "tools/server/experts.h"
#include "tools/text/bytes.h"
#include "tools/text/detect.h"
#include "tools/text/json.h"
#include "tools/text/moetext.h"

#include <cjson/cJSON.h>
#include <microhttpd.h>
#include <pthread.h>
#include <sys/types.h>

/* ---- Options ------------------------------------------------------------------------------------------- */

typedef struct options {
    const char *model, *host, *keys, *origin, *log;
    const char *path;    /* of a Unix domain socket, in the place of host and port; NULL: none */
    const char **models; /* [n_models] of -m and --models */
    size_t n_models;
    int several;         /* they are a translator of several */
    text_bytes settings; /* of libmoetext */
    network *proxies;    /* [n_proxies] whose X-Forwarded-For is believed */
    size_t n_proxies;
    int port, max_body, max_texts, max_queue, max_client, max_client_texts, timeout, grace, rate, quiet;
    int max_connections, max_address, max_bodies, read_timeout;
} options;

/* ---- Asks ----------------------------------------------------------------------------------------------
 * An ask lives from its first header until its connection is done with it and none of its texts is with the decoder. */

typedef enum ask_state {
    ASK_READING, /* its body comes in                                                */
    ASK_WAITING, /* its texts are with the decoder, its connection may be suspended */
    ASK_DONE     /* its answer can be sent                                           */
} ask_state;

enum { CLIENT_GONE = 499 }; /* why an ask was cut: its client is gone */

enum { FETCHED = 160, KEPT_FILES = 100 }; /* bytes of a translated file's name; how many are kept */

enum { HTML_XML = 2 }; /* ask.html of XML */

typedef struct ask ask;
typedef struct chat chat; /* what an ask for an answer to messages has beside; its one item has the answer */

typedef struct guest { /* a client: an API key or an address. One lives while the decoder has texts to come from it */
    struct guest *next, *before; /* in a ring */
    size_t known;                /* number of the key, from 1; 0: it is told by its address */
    uint64_t address;
    ask *turn;           /* in the ring of its asks, whose turn is next */
    size_t texts, bytes; /* of its asks in state ASK_WAITING */
} guest;

typedef struct text_item { /* one text of an ask */
    ask *of;
    struct text_item *next; /* of those that are tried again */
    void *place;            /* the translator's: moetext_request */
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
    moetext_html *document;
    char *text; /* [length] that it lies in */
    size_t length;
    size_t first;      /* item of its first segment */
    size_t unfinished; /* segments */
} page;

struct ask {
    struct MHD_Connection *connection; /* NULL: it is gone */
    struct MHD_PostProcessor *form;
    ask *next, *before; /* all asks in state ASK_WAITING; or those that are left */
    ask_state state;
    int route, suspended;
    address client;      /* the client; a trusted proxy names its own client */
    const char *allow;   /* methods of a path that was asked for with another */
    const char *refused; /* why nothing but the headers is read, and the connection closed */
    unsigned cut;        /* the HTTP status that says why its texts were never finished; 0: they were */
    int is_counted;      /* in server.under_way */
    int socket;          /* of the connection, while it waits */
    text_bytes body;
    int too_large, too_many; /* body: this one is; all are together */
    size_t counted;          /* of server.body_bytes */
    double begin;

    /* For the log */
    char *path, method[16];
    unsigned status;   /* that was sent; 0: none yet */
    size_t read, sent; /* bytes of the bodies */

    /* What is asked for */
    text_item *items;
    size_t n_items, n_done, n_taken;
    size_t n_begun, n_queued;      /* items that the decoder has got, in order; that it is still to get */
    size_t bytes;                  /* of all that was sent to be translated */
    guest *of;                     /* NULL: the decoder has nothing to get from it */
    ask *turn_after, *turn_before; /* in the ring of the client */
    text_item *again, *open;       /* that are tried again; of which the decoder may have to get more parts */
    int dropped;                   /* 1: no client waits any more; atomic, since the decoder reads it too */
    char source[36], target[36], key[132];
    uint64_t characters; /* that were counted */
    size_t known;        /* number of the key, from 1; 0: there are none */
    text_bytes terms;    /* of a glossary: each, and its translation, ended by NULs */
    size_t n_terms;
    moetext_glossary *glossary; /* NULL: none of its own */
    text_bytes context;         /* what stands before the texts */
    int is_list, alternatives, details, experts, stream, html;
    page *pages; /* [n_pages] of an ask for HTML, whose items are segments of them */
    size_t n_pages;
    chat *chat;            /* NULL: it is none of openai.c */
    int billed;            /* how many characters each text has is asked for */
    int targets;           /* languages as targets */
    text_bytes file;       /* the name of a file that is to be translated */
    char fetched[FETCHED]; /* what of the address names one that was */

    text_bytes lines;  /* of a stream: what is finished and may not be sent yet, */
    size_t lines_from; /* from this byte of all on */
    int said;          /* it has had something that is no error */
};

enum { RATES = 512, RATE_WAYS = 8 }; /* places for addresses whose requests are counted, and addresses in each */

typedef struct rate {
    uint64_t key;
    int n; /* requests in this minute; 0: free */
} rate;

typedef struct visitor { /* a connection */
    struct visitor *next, *before;
    uint64_t peer, client; /* keys of its address: a trusted proxy has none, but its clients have while they ask */
    MHD_socket socket;
    double until; /* when its request must be here, or its answer taken; 0: its request is here, its answer is not */
    size_t body;  /* memory that its body takes */
    int slow;     /* it was closed for that */
} visitor;

typedef struct api_key {
    text_bytes text;
    uint64_t characters, limit; /* that were asked for with it, and may be; 0: any number */
} api_key;

typedef struct shared_data { /* of a file: it is freed with its last holder */
    struct server *of;
    size_t holders; /* its place among the files, and answers that are being sent */
    text_bytes bytes;
} shared_data;

typedef struct kept_file { /* all zero: none */
    char name[FETCHED];
    shared_data *data;
    uint64_t owner; /* number of a key, or an address */
    double since;
} kept_file;

typedef struct server {
    options options;
    moetext_model *model;
    moetext *translator;
    experts *experts;            /* the decoder's; NULL: not needed yet, or see no_experts */
    int no_experts;              /* they cannot be seen */
    int aligned;                 /* its results have links between words */
    int answers;                 /* the model answers messages, */
    size_t max_prompt;           /* of so many tokens at most, */
    moe_session_params sampling; /* drawn like this, */
    int draws;                   /* or as they ask for */
    uint64_t n_answers;          /* that were begun; atomic */
    time_t began;
    text_detector *detector; /* NULL: languages cannot be told */
    pthread_mutex_t detecting;
    int64_t minute; /* that `rates` is of */
    rate rates[RATES][RATE_WAYS];
    uint64_t salt; /* of this process */
    dev_t device;  /* of the file of options.path */
    ino_t inode;
    api_key *keys; /* [n_keys] */
    size_t n_keys;
    uint64_t characters; /* that were asked for; guarded by `lock`, as are those of each key */

    kept_file files[KEPT_FILES]; /* that were translated; guarded by `lock` */
    size_t file_bytes;           /* of all data that is held, whether it is still one of the files or not */

    pthread_mutex_t doors; /* of the visitors; nothing else is locked meanwhile */
    visitor *visitors;
    size_t body_bytes; /* of requests that are coming in */

    int log;                          /* descriptor of the log; 0: there is none */
    _Atomic int log_torn, log_failed; /* its last line has no end; lines are missing, which was said */

    pthread_mutex_t lock;
    pthread_cond_t filled; /* there is a text, or `ending` is set */
    guest *guests;         /* in the ring, whose turn is next */
    size_t busy;           /* sentences in the batch, from which on clients who have some there wait (0: never), */
    size_t calm;           /* until there are no more than this */
    int holding;           /* they do */
    size_t n_queued;       /* texts that the decoder has not begun */
    int decoded;           /* its thread has ended */
    ask *waiting;
    size_t under_way; /* requests to translate that are not yet answered to their last byte */
    ask *left;        /* asks of clients that are gone, while the decoder has texts of theirs */
    int ending;       /* no new requests */
    int ended;        /* and those under way are cut */
    int broken;       /* the translator failed */

    uint64_t n_left, trimmed_at; /* requests that have ended; when memory was given back last, */
    double trimmed;              /* at that time; */
    int trims;                   /* how often that is still to be done */

    /* Figures, for /metrics */
    uint64_t requests[6], texts, failed_texts, bytes_in, bytes_out; /* requests by hundreds of their status */
    uint64_t seconds_below[8], seconds_count;
    double seconds_sum;
    moe_stats stats;
} server;

/* What is wrong with a request: its status, and the message; status 0: nothing. */
typedef struct refusal {
    unsigned status;
    char message[160];
} refusal;

/* ---- http.c -------------------------------------------------------------------------------------------- */

/* Opens the port, or the socket. NULL: it was said why it cannot be had. */
struct MHD_Daemon *http_listen(server *s);
/* The socket's file goes, unless another server has put its own there. */
void http_unlink(const server *s);
/* Connections are closed whose request has been coming in, or whose answer has been going out, for too long. */
void http_end_slow(server *s);
/* An answer of so many bytes is there as a whole: its client must take it in time. */
void http_answered(server *s, const ask *a, size_t bytes);
/* How many characters were asked for with the ask's key, and how many may be. */
void quota_of(server *s, const ask *a, uint64_t *characters, uint64_t *limit);
/* Counts those of an ask. 0: there would be too many. */
int quota_take(server *s, ask *a);
void quota_give_back(server *s, ask *a); /* it was refused for another reason */
/* A key a line, of --api-keys; -1, or a complaint and the exit status. */
int http_read_keys(server *s);
enum MHD_Result send_response(server *s, ask *a, unsigned status, const char *type, struct MHD_Response *r);
/* Takes over what `bytes` holds. */
enum MHD_Result send_bytes(server *s, ask *a, unsigned status, const char *type, text_bytes *bytes);
enum MHD_Result send_error(server *s, ask *a, unsigned status, const char *message);

/* ---- log.c --------------------------------------------------------------------------------------------- */

/* Opens the file of --log, or opens it anew. -1, or a complaint and the exit status. */
int log_open(server *s);
/* A line for a request that has ended; `cut`: the status that says why its answer is not whole, 0 where it is. */
void log_write(server *s, const ask *a, unsigned cut);

/* ---- requests.c ---------------------------------------------------------------------------------------- */

/* The decoder's thread; `closure` is the server. */
void *requests_decode(void *closure);
/* Answer asks that have waited too long with a timeout, and drop asks of clients that are gone. */
void requests_look(server *s);
/* No new requests from here on. */
void requests_end(server *s);
/* Those under way are cut: the number of them. */
size_t requests_cut(server *s);
size_t requests_under_way(server *s);
/* Why an ask was cut, in words. */
const char *requests_why(const ask *a);
/* With the lock held: let the connection of a request go on, if it waits. */
void ask_wake(ask *a);
/* Hand the texts of a request to the decoder and let its connection wait. */
void requests_enqueue(server *s, ask *a, refusal *r);
/* The connection is done with a request, or gone. */
void requests_leave(server *s, ask *a);
void items_free(text_item *items, size_t n);
/* The answer of text or document `i`: its translation, or alternative k from 1. Valid until the next call with this
 * document. NULL: out of memory. */
const char *ask_text(const ask *a, size_t i, size_t k, size_t *length);
/* A finished document of a stream. */
void write_page_line(ask *a, size_t index);

/* ---- reading.c ----------------------------------------------------------------------------------------- */

void refuse(refusal *r, unsigned status, const char *format, const char *what);
/* A short parameter; one that is too long is cut, and then equals no valid value. */
void take_word(char *out, size_t size, const char *value, size_t length);
/* Adds a text to an ask. 0: out of memory. */
int add_text(ask *a, const char *text, size_t length);
/* What the body of a request says becomes the ask's texts and parameters. */
void read_body(ask *a, size_t max_texts, refusal *r); /* more texts: refused before they are kept */

/* ---- api.c --------------------------------------------------------------------------------------------- */

/* The forms of requests and answers of one interface. */
typedef struct dialect {
    const char *texts, *source, *target; /* names of parameters; NULL: there is none */
    const char *error;                   /* the member with the error */
    unsigned beyond;                     /* the status where the quota of a key is spent */
    void (*take)(ask *a, const char *name, const char *value, size_t length, refusal *r); /* other parameters */
    void (*check)(server *s, ask *a, refusal *r);       /* all is read; NULL: there is nothing to be looked at */
    enum MHD_Result (*send)(server *s, ask *a);         /* all that was asked for is translated */
    void (*read)(ask *a, const cJSON *all, refusal *r); /* the JSON of a body, in the place of `take` */
    void (*put_error)(const ask *a, json *j, const char *message, unsigned status); /* in the place of `error` */
} dialect;

enum { NEEDS_BODY = 1, NEEDS_KEY = 2, ALWAYS = 4 }; /* ALWAYS: limits of its client do not count */

typedef struct route {
    const char *method, *path; /* a path that ends in / is a folder: what stands behind it is ask.fetched */
    int flags;
    enum MHD_Result (*answer)(server *s, ask *a); /* again when an ask that waited is done */
    const dialect *speaks;                        /* where a body is read */
} route;

extern const route api_routes[];
extern const size_t api_route_count;

/* Whether an item failed because of what was asked. */
int is_theirs(const text_item *item);
/* The name of the member with the error of an ask. */
const char *api_error_name(const ask *a);
size_t ask_count(const ask *a); /* number of texts or documents */
/* Append ask_text as a string. */
void put_text(const ask *a, json *j, const char *key, size_t i, size_t k);
/* The language that one seems to be in, or -1; and how sure that is, 0 to 1. */
ptrdiff_t ask_detect(server *s, const ask *a, size_t i, float *confidence);
/* The languages that a request names are checked, its texts are translated, and then its dialect sends them. */
enum MHD_Result answer_translate(server *s, ask *a);
/* A language in words. */
const char *language_name(const char *code);

/* ---- deepl.c ------------------------------------------------------------------------------------------- */

extern const dialect deepl_texts, deepl_parameters, immersive_texts;
enum MHD_Result deepl_languages(server *s, ask *a);
enum MHD_Result deepl_usage(server *s, ask *a);

/* ---- openai.c ------------------------------------------------------------------------------------------ */

extern const dialect openai_chat, openai_models;
enum MHD_Result openai_list(server *s, ask *a);
enum MHD_Result openai_model(server *s, ask *a);
void chat_free(chat *c); /* NULL is fine */
/* In the decoder's thread: what it is asked; that it has more, or all, of an answer. */
void chat_ask(const text_item *item, moetext_request *request);
void chat_partial(void *closure, const moetext_partial *partial);
void chat_done(text_item *item, const moetext_result *result);
/* With the lock held: the last events of a stream; or that it failed. */
void chat_end(const server *s, ask *a);
void chat_error(ask *a, const char *message, unsigned status);

/* ---- files.c ------------------------------------------------------------------------------------------- */

extern const dialect file_texts;
extern const char *const file_endings[]; /* NULL behind the last */
enum MHD_Result answer_file(server *s, ask *a);
void files_drop_old(server *s);
void files_free(server *s);

#endif
