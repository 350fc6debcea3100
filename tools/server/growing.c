/* growing.c - POST /live: texts that grow or change at their end (moetext_live).
 *
 * Contents
 *   1. Sessions  a live text between the requests of a client
 *   2. Events
 *   3. Requests
 *
 * A request gives the whole text so far, and its answer is a stream of events with what to show. At most one request of
 * a session works on the text. A newer request only hands its text to the working one, which then translates it;
 * a final text takes over.
 */
#define _DEFAULT_SOURCE /* getentropy */
#define _DARWIN_C_SOURCE
#include "tools/server/server.h"

#include <stdlib.h>
#include <string.h>
#ifdef __APPLE__
#include <sys/random.h> /* getentropy */
#endif
#include <unistd.h>

enum {
    MOST_SESSIONS = 64,
    MOST_BYTES = 1 << 14, /* of a live text */
    IDLE_SECONDS = 600
};

/* ==== 1. Sessions ======================================================================================= */

/* Everything is guarded by live_sessions.lock. It may be taken while server.lock is held, but not the reverse. */
struct live_session {
    char id[33], source[36], target[36];
    moetext_live *live; /* NULL if the session is free */
    uint64_t owner;     /* the client: the number of its API key or its address key */
    request *working;   /* the request that translates; may be NULL */
    double used;
};

struct live_sessions {
    pthread_mutex_t lock;
    live_session all[MOST_SESSIONS];
};

static uint64_t owner_of(const request *req) {
    return req->account ? (uintptr_t)req->account->usage : address_key(&req->address);
}

static void session_end(live_session *x) {
    moetext_live_free(x->live);
    *x = (live_session){ 0 };
}

void live_drop_old(server *s) {
    pthread_mutex_lock(&s->lock);
    live_sessions *l = s->live;
    pthread_mutex_unlock(&s->lock);
    if (!l) return;
    const double now = program_seconds();
    pthread_mutex_lock(&l->lock);
    for (live_session *x = l->all; x < l->all + MOST_SESSIONS; x++)
        if (x->live && !x->working && now - x->used > (double)IDLE_SECONDS) session_end(x);
    pthread_mutex_unlock(&l->lock);
}

void live_free(server *s) {
    for (live_session *x = s->live ? s->live->all : NULL; x && x < s->live->all + MOST_SESSIONS; x++) session_end(x);
    free(s->live);
}

/* Return the sessions, which the first request makes; NULL if out of memory. */
static live_sessions *sessions_of(server *s) {
    pthread_mutex_lock(&s->lock);
    if (!s->live && (s->live = calloc(1, sizeof *s->live))) pthread_mutex_init(&s->live->lock, NULL);
    live_sessions *l = s->live;
    pthread_mutex_unlock(&s->lock);
    return l;
}

static live_session *find(live_sessions *l, const request *req) {
    for (live_session *x = l->all; x < l->all + MOST_SESSIONS; x++)
        if (x->live && x->owner == owner_of(req) && strcmp(x->id, req->live_id) == 0) return x;
    return NULL;
}

/* Return a free session. If all are in use, end the longest unused one of the client with the most sessions. */
static live_session *find_free(live_sessions *l) {
    live_session *found = NULL;
    size_t most = 0;
    for (live_session *x = l->all; x < l->all + MOST_SESSIONS; x++) {
        size_t n = 0;
        if (!x->live) return x;
        for (const live_session *y = l->all; y < l->all + MOST_SESSIONS; y++) n += y->owner == x->owner;
        if (x->working || (found && (n < most || (n == most && x->used >= found->used)))) continue;
        found = x, most = n;
    }
    if (found) session_end(found);
    return found;
}

/* Begin a session, or begin it again if its languages have changed. Return 0 after refusing the request. */
static int session_begin(live_session *x, request *req) {
    unsigned char random[16];
    moetext_live *live;
    if ((!x->id[0] && getentropy(random, sizeof random)) || moetext_live_new(&live, NULL)) return refuse_memory(req), 0;
    moetext_live_free(x->live);
    x->live = live;
    for (size_t i = 0; i < sizeof random && !x->id[2 * i]; i++) snprintf(x->id + 2 * i, 3, "%02x", random[i]);
    x->owner = owner_of(req);
    memcpy(x->source, req->source, sizeof x->source);
    memcpy(x->target, req->target, sizeof x->target);
    return 1;
}

/* Return the session of a request, or NULL after refusing the request. */
static live_session *session_of(live_sessions *l, request *req) {
    live_session *x = req->live_id[0] ? find(l, req) : find_free(l);
    if (!x && req->live_id[0])
        refuse(req, MHD_HTTP_NOT_FOUND, "session not found; sessions end after ten minutes without requests");
    else if (!x) refuse(req, MHD_HTTP_TOO_MANY_REQUESTS, "too many live texts; try again");
    if (!x) return NULL;
    const int same = x->live && strcmp(x->source, req->source) == 0 && strcmp(x->target, req->target) == 0;
    if (!same && x->working) moe_request_drop(&x->working->drop), x->working = NULL;
    return same || session_begin(x, req) ? x : NULL;
}

/* ==== 2. Events ========================================================================================= */

static void put_view(const live_session *x, text_bytes *out) {
    const moetext_live_view v = moetext_live_shown(x->live);
    json j = { .out = out };
    json_open(&j, NULL, '{');
    json_text(&j, "session", x->id);
    json_string(&j, "translation", v.text, v.length);
    json_string(&j, "stable", v.text, v.stable);
    json_bool(&j, "final", v.final);
    json_close(&j, '}');
}

static void put_event(request *req, const char *data, size_t length) {
    text_append_string(&req->lines, "data: ");
    text_append(&req->lines, data, length);
    text_append_string(&req->lines, "\n\n");
}

/* Write the last event of a stream (lock held). */
static void event_end(server *s, request *req, const text_item *item) {
    (void)s;
    if (item && !item->status) {
        put_event(req, item->answer.data ? item->answer.data : "{}", item->answer.length);
        req->started = 1;
        return;
    }
    const char *why = !item ? requests_why(req) : item->answer.data ? item->answer.data : "out of memory";
    text_bytes error = { 0 };
    json j = { .out = &error };
    json_open(&j, NULL, '{');
    json_clean(&j, "error", why, strlen(why));
    json_close(&j, '}');
    if (!error.failed) put_event(req, error.data, error.length);
    text_bytes_free(&error);
}

/* ==== 3. Requests ======================================================================================= */

static void take_live(request *req, const char *name, const char *value, size_t length) {
    static const char *const states[] = { "growing", "paused", "final" };
    char word[16];
    if (strcmp(name, "session") == 0) take_word(req->live_id, sizeof req->live_id, value, length);
    if (strcmp(name, "state") != 0) return;
    take_word(word, sizeof word, value, length);
    for (req->live_state = 0; req->live_state < 3 && strcmp(word, states[req->live_state]) != 0;) req->live_state++;
    if (req->live_state == 3) bad_request(req, "Invalid request: state must be growing, paused or final");
}

/* Replace the text of a request by the part to translate next, or by nothing. */
static void replace_text(request *req, const moetext_request *asked) {
    text_item *item = &req->items[0];
    char *text = asked ? text_copy(asked->text, asked->length) : NULL;
    if (!asked) {
        items_free(req->items, 1);
        req->items = NULL, req->n_items = 0;
    } else if (text) {
        free(item->text);
        item->text = text, item->length = asked->length;
        req->live_quick = asked->quick;
    } else refuse_memory(req);
}

/* Give the session the text, and work on it unless another request does. */
static void check_live(server *s, request *req) {
    live_sessions *l = sessions_of(s);
    moetext_request asked = { 0 };
    text_bytes event = { 0 };
    moe_error e;
    req->stream = 1;
    if (!l) refuse_memory(req);
    else if (req->n_items != 1 || req->is_list) bad_request(req, "Invalid request: q must be one text");
    else if (req->items[0].length > MOST_BYTES)
        refuse(req, MHD_HTTP_CONTENT_TOO_LARGE, "a live text has at most %d bytes", (int)MOST_BYTES);
    if (!req->refusal) check_languages(req);
    if (req->refusal) return;
    const text_item *item = &req->items[0];
    pthread_mutex_lock(&l->lock);
    live_session *x = session_of(l, req);
    if (x && moetext_live_give(x->live, item->text, item->length, (moetext_live_state)req->live_state, &e)) {
        if (e.code == MOE_ERROR_MEMORY) refuse_memory(req);
        else bad_request(req, "%s", e.message);
    }
    if (x && !req->refusal) {
        x->used = program_seconds();
        if (x->working && req->live_state == MOETEXT_FINAL) moe_request_drop(&x->working->drop), x->working = NULL;
        const int works = !x->working && moetext_live_next(x->live, &asked);
        if (works) x->working = req, req->live = x;
        else put_view(x, &event);
        replace_text(req, works ? &asked : NULL);
    }
    pthread_mutex_unlock(&l->lock);
    if (event.length) put_event(req, event.data, event.length), req->started = 1;
    text_bytes_free(&event);
}

static void begin_live(server *s, text_item *item, moetext_request *next) {
    translation_begin(s, item, next);
    next->quick = item->request->live_quick;
}

/* Write an event, and queue the next text to translate. Return 0 if the request has ended. */
static int work_on(server *s, text_item *item, char *text, size_t length) {
    request *req = item->request;
    pthread_mutex_lock(&s->lock);
    if (req->state == REQUEST_WAITING) {
        put_event(req, item->answer.data, item->answer.length);
        req->started = 1;
        request_wake(req);
    }
    pthread_mutex_unlock(&s->lock);
    text_clear(&item->answer);
    quota_add(s, req, text_utf8_count(text, length));
    if (requests_retry(s, item, text, length)) return 1;
    free(text);
    return 0;
}

/* Return 1 if a failure ends the request; the failure of a quick translation is skipped. */
static int is_failure(const request *req, const moetext_result *r) {
    return r->status && (!req->live_quick || r->status == MOE_ERROR_CANCELLED || r->status == MOE_ERROR_ARGUMENT);
}

/* Take a translation, and return a copy of the next text to translate, or NULL (lock of the sessions held). */
static char *next_text(live_session *x, text_item *item, const moetext_result *r, size_t *length) {
    request *req = item->request;
    const moetext_hypothesis *best = r->status || !r->n_hypotheses ? NULL : &r->hypotheses[0];
    moetext_request asked = { 0 };
    item->status = moetext_live_take(x->live, best ? best->text : NULL, best ? best->length : 0, NULL);
    item->untranslated = (r->flags & MOETEXT_KEPT) != 0;
    put_view(x, &item->answer);
    if (item->status || !moetext_live_next(x->live, &asked)) return NULL;
    char *text = text_copy(asked.text, asked.length);
    if (!text) item->status = MOE_ERROR_MEMORY;
    req->live_quick = asked.quick;
    return *length = asked.length, text;
}

static int live_done(server *s, text_item *item, const moetext_result *r) {
    request *req = item->request;
    live_session *x = req->live;
    char *text = NULL;
    size_t length = 0;
    pthread_mutex_lock(&s->live->lock);
    if (x->working != req) { /* the session may belong to another client by now */
        item->status = MOE_OK;
        text_append_string(&item->answer, "{\"superseded\":true}");
    } else {
        if (is_failure(req, r)) text_append_string(&item->answer, r->message);
        else text = next_text(x, item, r, &length);
        if (!text) x->working = NULL;
    }
    pthread_mutex_unlock(&s->live->lock);
    return !text || !work_on(s, item, text, length);
}

static void live_leave(request *req) {
    live_session *x = req->live;
    if (!x) return;
    live_sessions *l = req->server->live;
    pthread_mutex_lock(&l->lock);
    if (x->working == req) x->working = NULL;
    pthread_mutex_unlock(&l->lock);
}

static const dialect live = { .texts = "q",
                              .source = "source",
                              .target = "target",
                              .stream_type = "text/event-stream",
                              .take = take_live,
                              .check = check_live,
                              .begin = begin_live,
                              .done = live_done,
                              .end = event_end,
                              .free = live_leave };

const route live_routes[] = {
    { "POST", "/live", NEEDS_BODY | NEEDS_KEY, answer_translate, &live },
    { 0 },
};
