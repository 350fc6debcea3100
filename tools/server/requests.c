/* requests.c - queue the texts of all requests and decode them in a thread.
 *
 * Contents
 *   1. Requests   create, queue, finish and free requests
 *   2. Turns      choose the client and the text to decode next
 *   3. Decoder    run the thread that decodes the texts of all clients
 */
#define _GNU_SOURCE      /* POLLRDHUP on Linux */
#define _DARWIN_C_SOURCE /* MSG_DONTWAIT on macOS */

#include "tools/server/server.h"
#include "tools/text/system.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* ==== 1. Requests ======================================================================================= */

static void request_free(request *req) {
    items_free(req->items, req->n_items);
    for (size_t i = 0; i < req->n_pages; i++) moetext_html_free(req->pages[i].document), free(req->pages[i].text);
    free(req->pages);
    if (req->form) MHD_destroy_post_processor(req->form);
    text_bytes *const all[] = { &req->body,  &req->out,     &req->lines,    &req->file,
                                &req->terms, &req->context, &req->confirmed };
    text_bytes_free_all(all, sizeof all / sizeof *all);
    moetext_glossary_free(req->glossary);
    moetext_memory_free(req->memory);
    if (req->route && req->route->dialect && req->route->dialect->free) req->route->dialect->free(req);
    if (req->backend) req->backend->holders--;
    free(req);
}

void request_wake(request *req) {
    if (!req->suspended) return;
    req->suspended = 0;
    MHD_resume_connection(req->connection);
}

static void request_link(request **list, request *req) {
    req->next = *list, req->previous = NULL;
    if (req->next) req->next->previous = req;
    *list = req;
}

static void request_unlink(request **list, request *req) {
    if (req->previous) req->previous->next = req->next;
    else *list = req->next;
    if (req->next) req->next->previous = req->previous;
    req->next = req->previous = NULL;
}

/* Remove a request from the ring of its client; free a client without requests (lock held). */
static void turns_leave(request *req) {
    backend *b = req->backend;
    client *c = req->client;
    if (!c) return;
    req->client = NULL, req->open = NULL;
    c->turn = req->next_turn == req ? NULL : c->turn == req ? req->next_turn : c->turn;
    req->previous_turn->next_turn = req->next_turn;
    req->next_turn->previous_turn = req->previous_turn;
    if (c->turn) return;
    b->clients = c->next == c ? NULL : b->clients == c ? c->next : b->clients;
    c->previous->next = c->next;
    c->next->previous = c->previous;
    free(c);
}

/* Mark a request as done when its texts are finished or dropped (lock held). */
static void request_finish(request *req) {
    backend *b = req->backend;
    if (req->state != REQUEST_WAITING) return;
    req->state = REQUEST_DONE;
    request_unlink(&b->waiting, req);
    b->n_queued -= req->n_queued;
    if (req->client) req->client->texts -= req->n_items, req->client->bytes -= req->bytes;
    req->n_queued = 0;
    if (!req->open) turns_leave(req); /* otherwise next_turn removes the request after the open item */
    request_wake(req);
    if (req->server->ending) pthread_cond_broadcast(&b->filled);
}

const char *requests_why(const request *req) {
    const unsigned cut = req->cut; /* clang 14 does not support switch on an atomic */
    switch (cut) {
    case MHD_HTTP_GATEWAY_TIMEOUT: return "the request took too long; send smaller requests, or raise --timeout";
    case MHD_HTTP_SERVICE_UNAVAILABLE: return "the server is shutting down";
    default: return "the translator failed";
    }
}

/* End a request before its texts are done (lock held). A stream reports the reason in its last line. */
static void request_cut(request *req, unsigned why) {
    req->cut = why;
    moe_request_drop(&req->drop);
    if (req->stream && why != CLIENT_GONE) req->route->dialect->end(req->server, req, NULL);
    request_finish(req);
}

/* Find the client of a request (lock held); NULL if it has no other requests. */
static client *client_of(const request *req) {
    const backend *b = req->backend;
    const uint64_t key = address_key(&req->address);
    client *c = b->clients;
    for (int first = 1; c && (first || c != b->clients); c = c->next, first = 0)
        if (req->account ? c->key == req->account->usage : !c->key && c->address == key) return c;
    return NULL;
}

/* Add a client at the end of the ring (lock held). Return NULL if out of memory. */
static client *client_new(const request *req) {
    backend *b = req->backend;
    client *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->key = req->account ? req->account->usage : NULL, c->address = address_key(&req->address);
    if (!b->clients) return c->next = c->previous = b->clients = c;
    c->next = b->clients, c->previous = b->clients->previous;
    return c->previous->next = c->next->previous = c;
}

/* Check the limits for waiting texts (lock held). The limits per client apply only to clients with waiting texts. */
static void check_limits(const server *s, const client *c, request *req) {
    const options *o = &s->setup->options;
    if (req->n_items > (size_t)o->max_queue)
        refuse(req, MHD_HTTP_CONTENT_TOO_LARGE, "%zu texts exceed the queue limit of %d; send fewer texts per request",
               req->n_items, o->max_queue);
    else if (req->backend->n_queued + req->n_items > (size_t)o->max_queue)
        refuse(req, MHD_HTTP_TOO_MANY_REQUESTS, "too many texts are waiting; try again");
    else if (c && c->texts && c->texts + req->n_items > (size_t)o->max_client_texts)
        refuse(req, MHD_HTTP_TOO_MANY_REQUESTS,
               "%zu of your texts are waiting; the limit is %d: wait for responses or send smaller requests", c->texts,
               o->max_client_texts);
    else if (c && c->texts && c->bytes + req->bytes > 1024 * (size_t)o->max_client)
        refuse(req, MHD_HTTP_TOO_MANY_REQUESTS,
               "%zu KB of your texts are waiting; the limit is %d KB: wait for responses or send smaller requests",
               c->bytes >> 10, o->max_client);
}

/* Queue the texts of a request (lock held). */
static void enqueue(server *s, request *req, client *c) {
    backend *b = req->backend;
    c->texts += req->n_items, c->bytes += req->bytes;
    req->client = c;
    req->next_turn = req->previous_turn = req;
    if (c->turn) { /* insert the request at the end of the ring */
        req->next_turn = c->turn, req->previous_turn = c->turn->previous_turn;
        req->previous_turn->next_turn = req->next_turn->previous_turn = req;
    } else c->turn = req;
    b->n_queued += req->n_queued = req->n_items;
    req->state = REQUEST_WAITING;
    req->socket = (int)MHD_get_connection_info(req->connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    request_link(&b->waiting, req);
    req->is_counted = 1, s->under_way++;
    req->suspended = 1, MHD_suspend_connection(req->connection);
    pthread_cond_signal(&b->filled);
}

/* Return the size of everything to translate, including document tags, which take more memory than words. */
static size_t bytes_of(const request *req) {
    size_t bytes = req->context.length + req->terms.length + req->confirmed.length;
    for (size_t i = 0; i < req->n_pages; i++) bytes += req->pages[i].length;
    for (size_t i = 0; i < req->n_items && !req->markup; i++) bytes += req->items[i].length;
    return bytes;
}

void requests_enqueue(server *s, request *req) {
    req->bytes = bytes_of(req);
    pthread_mutex_lock(&s->lock);
    if (s->broken) refuse(req, MHD_HTTP_INTERNAL_SERVER_ERROR, "the translator failed");
    else if (s->ending) refuse(req, MHD_HTTP_SERVICE_UNAVAILABLE, "the server is shutting down");
    else if (!req->n_items) req->state = REQUEST_DONE;
    else {
        client *c = client_of(req);
        check_limits(s, c, req);
        if (!req->refusal && !c && !(c = client_new(req))) refuse_memory(req);
        if (!req->refusal) enqueue(s, req, c);
    }
    pthread_mutex_unlock(&s->lock);
}

int requests_retry(server *s, text_item *item, char *text, size_t length) {
    request *req = item->request;
    pthread_mutex_lock(&s->lock);
    const int again = !s->ended && req->connection && req->state == REQUEST_WAITING;
    if (again) {
        free(item->text);
        item->text = text, item->length = length;
        req->n_taken--;
        if (req->open == item) req->open = NULL;
        item->next = req->retries, req->retries = item;
        req->n_queued++, req->backend->n_queued++;
    }
    pthread_mutex_unlock(&s->lock);
    return again;
}

void requests_leave(server *s, request *req) {
    pthread_mutex_lock(&s->lock);
    req->suspended = 0;
    if (req->state == REQUEST_WAITING) request_finish(req);
    req->connection = NULL;
    s->under_way -= (size_t)req->is_counted;
    s->n_left++;
    const int idle = !req->n_taken || req->backend->decoded;
    if (idle) turns_leave(req);
    else request_link(&req->backend->orphans, req);
    moe_request_drop(&req->drop);
    pthread_mutex_unlock(&s->lock);
    if (idle) request_free(req); /* otherwise item_finish frees the request */
}

/* Return 1 if the client closed the connection or its sending side, and therefore expects no answer. libmicrohttpd does
 * not watch suspended connections. */
static int is_gone(int socket) {
#ifdef POLLRDHUP
    struct pollfd p = { .fd = socket, .events = POLLRDHUP };
    return poll(&p, 1, 0) > 0;
#else
    char byte;
    return recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
#endif
}

/* Return the time when a request times out: --timeout seconds, plus as long for every 64 KB and every 1,000 tokens of a
 * prompt, after it began or after the last step of a chat. */
static double deadline(const server *s, const request *req) {
    const double begin = req->progress > req->begin ? req->progress : req->begin;
    return begin + s->setup->options.timeout * (1 + (double)(req->bytes >> 16) + (double)req->prompt / 1000);
}

void requests_look(server *s) {
    double now = program_seconds();
    pthread_mutex_lock(&s->lock);
    for (const backend *b = s->backend; b; b = b->previous)
        for (request *req = b->waiting, *next; req; req = next) {
            next = req->next;
            if (now > deadline(s, req)) request_cut(req, MHD_HTTP_GATEWAY_TIMEOUT);
            else if (is_gone(req->socket)) request_cut(req, CLIENT_GONE);
        }
    pthread_mutex_unlock(&s->lock);
}

void requests_end(server *s) {
    pthread_mutex_lock(&s->lock);
    s->ending = 1;
    for (backend *b = s->backend; b; b = b->previous) pthread_cond_broadcast(&b->filled);
    pthread_mutex_unlock(&s->lock);
}

size_t requests_cut(server *s) {
    pthread_mutex_lock(&s->lock);
    size_t n = 0;
    s->ended = 1;
    for (const backend *b = s->backend; b; b = b->previous)
        for (; b->waiting; n++) request_cut(b->waiting, MHD_HTTP_SERVICE_UNAVAILABLE);
    pthread_mutex_unlock(&s->lock);
    return n;
}

/* ==== 2. Turns ==========================================================================================
 * Clients take turns. In a turn, the decoder takes one part of a text (a sentence or line) from the client's next
 * request. Every client thus gets its share of the batch, whatever other clients send, and each of its requests gets a
 * part of this share. Translations do not depend on the order. */

/* Return the next text of a request (lock held): the open text, a retry or a new text; NULL if none is left. */
static text_item *next_item(request *req) {
    if (req->open && req->open->place) return req->open;
    req->open = NULL;
    if (req->state != REQUEST_WAITING || req->backend->saving) return NULL;
    text_item *item = req->retries;
    if (item) req->retries = item->next;
    else if (req->n_begun < req->n_items) item = &req->items[req->n_begun++];
    else return NULL;
    req->n_queued--, req->backend->n_queued--;
    req->n_taken++;
    return req->open = item;
}

/* Return 1 if the decoder holds a text of a client (lock held). */
static int is_served(const client *c) {
    const request *req = c->turn;
    do
        if (req->n_taken) return 1;
    while ((req = req->next_turn) != c->turn);
    return 0;
}

/* Return the next text to decode, or NULL (lock held). Move its client and its request to the end of their rings.
 * `under_way` is the number of sentences in the batch. */
static text_item *next_turn(backend *b, size_t under_way) {
    b->holding = b->busy && (under_way >= b->busy || (b->holding && under_way > b->calm));
    client *const last = b->clients ? b->clients->previous : NULL;
    for (client *c = b->clients, *next; c; c = next) {
        next = c == last ? NULL : c->next;
        if (b->holding && is_served(c)) continue;
        request *const last_turn = c->turn->previous_turn;
        for (request *req = c->turn, *following; req; req = following) {
            following = req == last_turn ? NULL : req->next_turn;
            text_item *item = next_item(req);
            if (item) {
                c->turn = req->next_turn;
                b->clients = c->next;
                return item;
            }
            if (req->state != REQUEST_WAITING) turns_leave(req); /* may free the client */
        }
    }
    return NULL;
}

/* ==== 3. Decoder ========================================================================================
 * These functions run in the decoder's thread, which owns the translator. */

/* Return 1 if there will be no more texts or retries (lock held). */
static int is_over(const backend *b) { return (b->closing && !b->holders) || (b->server->ending && !b->waiting); }

/* Restart the time limits of chats in the batch (lock held). Unlike tokens, steps that read a prompt have no callback.
 */
static void note_step(backend *b) {
    const double now = program_seconds();
    for (request *req = b->waiting; req && b->answers; req = req->next)
        if (req->prompt && req->n_taken) req->progress = now;
}

static int pull_text(void *closure, int wait, moetext_request *next) {
    backend *b = closure;
    server *s = b->server;
    pthread_mutex_lock(&s->lock);
    note_step(b);
    text_item *item = next_turn(b, wait ? 0 : moetext_under_way(b->translator));
    for (; wait && !item && !is_over(b) && !b->saving; item = next_turn(b, 0)) pthread_cond_wait(&b->filled, &s->lock);
    const int ends = is_over(b) || wait; /* a save waits until no text is in progress */
    const int answer = item ? MOE_PULL_REQUEST : ends ? MOE_PULL_END : MOE_PULL_LATER;
    b->stats = moetext_stats(b->translator);
    if (item) {
        const dialect *d = item->request->route->dialect;
        next->place = &item->place;
        next->drop = &item->request->drop;
        next->user = item;
        next->partial = d->partial;
        d->begin(s, item, next);
    }
    pthread_mutex_unlock(&s->lock);
    return answer;
}

/* Count a text by model and direction, and remember a direction that fails (lock held). */
static void count_direction(server *s, const text_item *item) {
    const request *req = item->request;
    const char *model = system_name(req->backend->name);
    const char *source = req->source[0] ? req->source : item->source ? item->source : "";
    const int failed = item->status != MOE_OK && failure_status(item) != MHD_HTTP_BAD_REQUEST;
    size_t i = 0;
    direction d = { .texts = 0 };
    take_word(d.model, sizeof d.model, model, strlen(model));
    take_word(d.source, sizeof d.source, source, strlen(source));
    take_word(d.target, sizeof d.target, req->target, strlen(req->target));
    while (i < s->n_directions && memcmp(&s->directions[i], &d, offsetof(direction, texts)) != 0) i++;
    if (i == s->n_directions && i < DIRECTIONS) s->directions[s->n_directions++] = d;
    if (i < DIRECTIONS) s->directions[i].texts++, s->directions[i].failed += item->status != MOE_OK;
    const int same = strcmp(s->failing.source, d.source) == 0 && strcmp(s->failing.target, d.target) == 0;
    if (item->status == MOE_OK) s->failing.succeeded = program_seconds();
    if (item->status == MOE_OK && same) s->failing.target[0] = 0;
    if (!failed) return;
    memcpy(s->failing.source, d.source, sizeof d.source);
    memcpy(s->failing.target, d.target, sizeof d.target);
}

/* Record that the decoder has finished a text (lock held). The client may have closed the connection. */
static void item_finish(server *s, text_item *item) {
    request *req = item->request;
    req->n_taken--, req->n_done++;
    if (req->open == item) req->open = NULL;
    item->finished = item->status == MOE_OK;
    if (item->status != MOE_ERROR_CANCELLED) {
        s->texts++;
        count_direction(s, item);
        s->failed_texts += item->status != MOE_OK;
        s->bytes_in += item->length, s->bytes_out += item->answer.length;
    }
    if (!req->connection) {
        if (req->n_taken) return;
        request_unlink(&req->backend->orphans, req);
        turns_leave(req);
        request_free(req);
        return;
    }
    if (req->state != REQUEST_WAITING) return;
    if (req->stream) req->route->dialect->end(s, req, item);
    if (req->stream && req->started) request_wake(req);
    if (req->n_done == req->n_items) request_finish(req);
}

static int is_client_error(const text_item *item) {
    return item->status == MOE_ERROR_ARGUMENT || item->status == MOE_ERROR_LIMIT;
}

unsigned failure_status(const text_item *item) {
    return is_client_error(item)              ? MHD_HTTP_BAD_REQUEST
           : item->status == MOE_ERROR_MEMORY ? MHD_HTTP_SERVICE_UNAVAILABLE
                                              : MHD_HTTP_INTERNAL_SERVER_ERROR;
}

/* Print why a text failed, at most once a second (lock held), and give the client a message without paths. */
static void hide_reason(server *s, text_item *item) {
    const double now = program_seconds();
    if (item->status == MOE_OK || item->status == MOE_ERROR_CANCELLED || is_client_error(item)) return;
    if (now - s->told > 1) {
        s->told = now;
        program_error("a translation failed: %s", item->answer.data ? item->answer.data : "out of memory");
    }
    text_clear(&item->answer);
    text_append_string(&item->answer, item->status == MOE_ERROR_MEMORY
                                          ? "out of memory; try again"
                                          : "the translation failed; the server's log has the reason");
}

static void text_done(void *closure, const moetext_result *result) {
    backend *b = closure;
    server *s = b->server;
    text_item *item = result->user;
    item->status = result->status;
    if (!item->request->route->dialect->done(s, item, result)) return;
    if (item->answer.failed || item->details.failed || item->experts.failed) item->status = MOE_ERROR_MEMORY;
    moe_stats stats = moetext_stats(b->translator);
    pthread_mutex_lock(&s->lock);
    hide_reason(s, item);
    b->stats = stats;
    item_finish(s, item);
    pthread_mutex_unlock(&s->lock);
}

/* End all requests after the decoder has ended (lock held). */
static void fail_all(backend *b, int broken) {
    b->decoded = 1;
    while (b->clients) turns_leave(b->clients->turn);
    for (request *req = b->orphans, *next; req; req = next) next = req->next, request_free(req);
    b->orphans = NULL;
    while (b->waiting) request_cut(b->waiting, broken ? MHD_HTTP_INTERNAL_SERVER_ERROR : MHD_HTTP_SERVICE_UNAVAILABLE);
}

/* Save the computed prompts if a reload waits for them (lock held). */
static void save_prompts(backend *b) {
    moe_error error;
    if (!b->saving) return;
    b->saving = SAVING;
    pthread_mutex_unlock(&b->server->lock);
    if (moetext_save_prompts(b->translator, &error)) program_error("%s", error.message);
    pthread_mutex_lock(&b->server->lock);
    b->saving = NOT_SAVING;
}

void *requests_decode(void *closure) {
    backend *b = closure;
    server *s = b->server;
    moe_error error = { 0 };
    moe_status status;
    pthread_mutex_lock(&s->lock);
    do {
        pthread_mutex_unlock(&s->lock);
        status = moetext_translate(b->translator, pull_text, text_done, b, &error);
        pthread_mutex_lock(&s->lock);
        save_prompts(b);
    } while (!status && !is_over(b));
    const int broken = status && !(s->ended && status == MOE_ERROR_CANCELLED);
    s->broken |= broken && !b->closing;
    if (broken) program_error("the translator failed: %s", error.message);
    fail_all(b, broken);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}
