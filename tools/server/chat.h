/* chat.h - answers to chat messages, for the interfaces of OpenAI and Ollama.
 *
 * A message whose lines are translated one by one (shape.h) is answered by translate.c; other messages are answered by
 * the model itself. They are not protected, split or retried, unlike the texts of /translate.
 */
#ifndef SERVER_CHAT_H
#define SERVER_CHAT_H

#include "tools/server/shape.h"
#include "tools/server/stops.h"

#include <time.h>

/* How an interface writes answers. */
typedef struct chat_format {
    /* Write an event with a part of the answer, which is UTF-8. `text` may be NULL. In the last event `finish` is the
     * reason why the answer ended. */
    void (*event)(request *req, const char *text, size_t length, const char *finish);
    void (*error)(request *req, const char *message, unsigned status); /* write an error after events */
    void (*whole)(request *req, const char *text, size_t length);      /* write a whole answer to req->out */
} chat_format;

struct chat {
    const chat_format *format;
    moetext_message *messages; /* [n] messages, which point into the item's text */
    size_t n;
    int32_t *ids; /* [n_ids] tokens of the prompt */
    size_t n_ids, limit;
    stops stops;
    int usage;                   /* OpenAI: 1 if a stream ends with token counts */
    int generates;               /* Ollama: 1 for /api/generate */
    moe_session_params sampling; /* sampling parameters */
    float penalty;               /* repetition penalty, or 0 for the server's */
    uint64_t sampled;            /* bit i is 1 if the request sets parameter i */
    char source[36], target[36]; /* languages that the request names apart from the messages, or "" */
    char model[160];             /* name of the model in the request, or "" */
    cJSON *schema;               /* schema of the answer, `true` for any JSON object, or NULL */
    struct grammar *grammar;     /* of the answer, or NULL */
    shape *lines;                /* NULL if the model answers */
    time_t created;
    uint64_t number;
    const char *code; /* code of an error, or NULL */

    /* Owned by the decoder's thread; item.answer holds the answer generated so far */
    size_t tokens, sent; /* tokens generated; bytes (with `lines`: translations) already sent in events */
    const char *finish;  /* reason why the answer ended, or NULL */
    int failed;          /* 1 after an event with an error */
};

/* Make req->chat. Return NULL after refusing the request. */
chat *chat_new(request *req, const chat_format *format);
/* Read messages; parameters under the names of OpenAI, llama.cpp and Ollama; a Boolean member. */
void chat_take_messages(request *req, const cJSON *messages);
void chat_take_parameters(request *req, const cJSON *all);
int chat_take_truth(request *req, const cJSON *all, const char *name);
/* Read the members model, source and target. */
void chat_take_names(request *req, const cJSON *all);
/* Return 1 if a value is missing, null, false, 0 or empty. */
int chat_is_false(const cJSON *x);
/* Require an answer in JSON of a schema, which is copied. */
void chat_take_schema(request *req, const cJSON *schema);
const char *chat_model_name(const backend *b);

/* Members of a dialect. */
void chat_check(server *s, request *req);
void chat_begin(server *s, text_item *item, moetext_request *next);
void chat_partial(void *closure, const moetext_partial *partial);
int chat_done(server *s, text_item *item, const moetext_result *result);
void chat_end(server *s, request *req, const text_item *item);
enum MHD_Result chat_send(server *s, request *req);
void chat_free(request *req);
#define CHATS                                                                                              \
    .texts = "messages", .source = "source", .target = "target", .check = chat_check, .begin = chat_begin, \
    .partial = chat_partial, .done = chat_done, .end = chat_end, .send = chat_send, .free = chat_free

#endif
