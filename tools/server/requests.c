/* requests.c - the texts of all requests, and the thread that translates them.
 *
 * Contents
 *   1. Asks       their life
 *   2. Turns      clients, and whose text is next
 *   3. Decoder    the thread that translates: all texts of all clients are one stream
 */
#define _GNU_SOURCE      /* POLLRDHUP on Linux */
#define _DARWIN_C_SOURCE /* and what macOS has */

#include "tools/server/server.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static server *the_server(void *closure) { return closure; }

/* ==== 1. Asks =========================================================================================== */

void items_free(text_item *items, size_t n) {
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
    for (size_t i = 0; i < a->n_pages; i++) moetext_html_free(a->pages[i].document), free(a->pages[i].text);
    free(a->pages);
    if (a->form) MHD_destroy_post_processor(a->form);
    text_bytes_free(&a->body);
    text_bytes_free(&a->lines);
    text_bytes_free(&a->file);
    text_bytes_free(&a->terms);
    text_bytes_free(&a->context);
    moetext_glossary_free(a->glossary);
    chat_free(a->chat);
    free(a);
}

void ask_wake(ask *a) {
    if (!a->suspended) return;
    a->suspended = 0;
    MHD_resume_connection(a->connection);
}

static void ask_link(ask **list, ask *a) {
    a->next = *list, a->before = NULL;
    if (a->next) a->next->before = a;
    *list = a;
}

static void ask_unlink(ask **list, ask *a) {
    if (a->before) a->before->next = a->next;
    else *list = a->next;
    if (a->next) a->next->before = a->before;
    a->next = a->before = NULL;
}

/* With the lock held: `a` has no texts for the decoder any more. Its client goes with its last ask. */
static void turns_leave(server *s, ask *a) {
    guest *c = a->of;
    if (!c) return;
    a->of = NULL, a->open = NULL;
    c->turn = a->turn_after == a ? NULL : c->turn == a ? a->turn_after : c->turn;
    a->turn_before->turn_after = a->turn_after;
    a->turn_after->turn_before = a->turn_before;
    if (c->turn) return;
    s->guests = c->next == c ? NULL : s->guests == c ? c->next : s->guests;
    c->before->next = c->next;
    c->next->before = c->before;
    free(c);
}

/* With the lock held: all that `a` asked for is there, or never will be. */
static void ask_finish(server *s, ask *a) {
    if (a->state != ASK_WAITING) return;
    a->state = ASK_DONE;
    ask_unlink(&s->waiting, a);
    s->n_queued -= a->n_queued;
    if (a->of) a->of->texts -= a->n_items, a->of->bytes -= a->bytes;
    a->n_queued = 0;
    if (!a->open) turns_leave(s, a); /* else when the decoder has been told */
    ask_wake(a);
    if (s->ending) pthread_cond_broadcast(&s->filled);
}

const char *requests_why(const ask *a) {
    switch (a->cut) {
    case MHD_HTTP_GATEWAY_TIMEOUT: return "this took too long; send less at once";
    case MHD_HTTP_SERVICE_UNAVAILABLE: return "the server is ending";
    default: return "the translator failed";
    }
}

/* With the lock held: what `a` asked for will never be there. A stream says so in its last line. */
static void ask_cut(server *s, ask *a, unsigned why) {
    a->cut = why;
    __atomic_store_n(&a->dropped, 1, __ATOMIC_RELAXED);
    if (a->stream && a->chat && why != CLIENT_GONE) chat_error(a, requests_why(a), why);
    else if (a->stream && why != CLIENT_GONE) {
        json j = { .out = &a->lines };
        json_open(&j, NULL, '{');
        json_text(&j, "error", requests_why(a));
        json_close(&j, '}');
        text_append(&a->lines, "\n", 1);
    }
    ask_finish(s, a);
}

/* With the lock held: the client of an ask; NULL: nothing else of it waits. */
static guest *guest_of(const server *s, const ask *a) {
    const uint64_t key = address_key(&a->client);
    guest *c = s->guests;
    for (int first = 1; c && (first || c != s->guests); c = c->next, first = 0)
        if (a->known ? c->known == a->known : !c->known && c->address == key) return c;
    return NULL;
}

/* With the lock held: a client whose turn comes last; NULL: no memory. */
static guest *guest_new(server *s, const ask *a) {
    guest *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->known = a->known, c->address = address_key(&a->client);
    if (!s->guests) return c->next = c->before = s->guests = c;
    c->next = s->guests, c->before = s->guests->before;
    return c->before->next = c->next->before = c;
}

/* With the lock held: what is wrong with as many texts as `a` has. A client that has nothing waiting may ask for what
 * one request may hold. */
static void check_limits(const server *s, const guest *c, const ask *a, refusal *r) {
    const options *o = &s->options;
    char what[112] = "";
    if (a->n_items > (size_t)o->max_queue) {
        snprintf(what, sizeof what, "%zu texts are more than %d, which may wait", a->n_items, o->max_queue);
        refuse(r, MHD_HTTP_CONTENT_TOO_LARGE, "%s at all: send less at once", what);
    } else if (s->n_queued + a->n_items > (size_t)o->max_queue)
        refuse(r, MHD_HTTP_TOO_MANY_REQUESTS, "too many texts are waiting; try again%s", "");
    else if (c && c->texts && c->texts + a->n_items > (size_t)o->max_client_texts)
        snprintf(what, sizeof what, "%zu of your texts are waiting, and %d may", c->texts, o->max_client_texts);
    else if (c && c->texts && c->bytes + a->bytes > 1024 * (size_t)o->max_client)
        snprintf(what, sizeof what, "%zu KB of your texts are waiting, and %d may", c->bytes >> 10, o->max_client);
    else return;
    if (!r->status) refuse(r, MHD_HTTP_TOO_MANY_REQUESTS, "%s: wait for answers, or send less at once", what);
}

/* With the lock held: the texts of `a` are for the decoder. */
static void enqueue(server *s, ask *a, guest *c) {
    c->texts += a->n_items, c->bytes += a->bytes;
    a->of = c;
    a->turn_after = a->turn_before = a;
    if (c->turn) { /* it comes last */
        a->turn_after = c->turn, a->turn_before = c->turn->turn_before;
        a->turn_before->turn_after = a->turn_after->turn_before = a;
    } else c->turn = a;
    s->n_queued += a->n_queued = a->n_items;
    a->state = ASK_WAITING;
    a->socket = MHD_get_connection_info(a->connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    ask_link(&s->waiting, a);
    a->is_counted = 1, s->under_way++;
    a->suspended = 1, MHD_suspend_connection(a->connection);
    pthread_cond_signal(&s->filled);
}

/* What was sent to be translated: a document counts with its tags, which take more memory than its words. */
static size_t bytes_of(const ask *a) {
    size_t bytes = a->context.length + a->terms.length;
    for (size_t i = 0; i < a->n_pages; i++) bytes += a->pages[i].length;
    for (size_t i = 0; i < a->n_items && !a->html; i++) bytes += a->items[i].length;
    return bytes;
}

void requests_enqueue(server *s, ask *a, refusal *r) {
    a->bytes = bytes_of(a);
    pthread_mutex_lock(&s->lock);
    if (s->broken) refuse(r, MHD_HTTP_INTERNAL_SERVER_ERROR, "the translator failed%s", "");
    else if (s->ending) refuse(r, MHD_HTTP_SERVICE_UNAVAILABLE, "the server is ending%s", "");
    else if (!a->n_items) a->state = ASK_DONE;
    else {
        guest *c = guest_of(s, a);
        check_limits(s, c, a, r);
        if (!r->status && !c && !(c = guest_new(s, a)))
            refuse(r, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory%s", "");
        if (!r->status) enqueue(s, a, c);
    }
    pthread_mutex_unlock(&s->lock);
}

void requests_leave(server *s, ask *a) {
    pthread_mutex_lock(&s->lock);
    a->suspended = 0;
    if (a->state == ASK_WAITING) ask_finish(s, a);
    a->connection = NULL;
    s->under_way -= (size_t)a->is_counted, s->n_left++;
    const int idle = !a->n_taken || s->decoded;
    if (idle) turns_leave(s, a);
    else ask_link(&s->left, a);
    __atomic_store_n(&a->dropped, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&s->lock);
    if (idle) ask_free(a); /* else item_finish does */
}

/* Whether the other side has closed the connection: whoever has asked and sends no more does not wait for an answer.
 * libmicrohttpd does not look at a connection that is suspended. */
static int is_gone(int socket) {
#ifdef POLLRDHUP
    struct pollfd p = { .fd = socket, .events = POLLRDHUP };
    return poll(&p, 1, 0) > 0;
#else
    char byte;
    return recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
#endif
}

void requests_look(server *s) {
    double now = program_seconds();
    pthread_mutex_lock(&s->lock);
    for (ask *a = s->waiting, *next; a; a = next) {
        next = a->next;
        if (now - a->begin > s->options.timeout) ask_cut(s, a, MHD_HTTP_GATEWAY_TIMEOUT);
        else if (is_gone(a->socket)) ask_cut(s, a, CLIENT_GONE);
    }
    pthread_mutex_unlock(&s->lock);
}

void requests_end(server *s) {
    pthread_mutex_lock(&s->lock);
    s->ending = 1;
    pthread_cond_broadcast(&s->filled);
    pthread_mutex_unlock(&s->lock);
}

size_t requests_cut(server *s) {
    pthread_mutex_lock(&s->lock);
    size_t n = 0;
    s->ended = 1;
    for (; s->waiting; n++) ask_cut(s, s->waiting, MHD_HTTP_SERVICE_UNAVAILABLE);
    pthread_mutex_unlock(&s->lock);
    return n;
}

size_t requests_under_way(server *s) {
    pthread_mutex_lock(&s->lock);
    const size_t n = s->under_way;
    pthread_mutex_unlock(&s->lock);
    return n;
}

/* ==== 2. Turns ==========================================================================================
 * Each client has a turn, and of its asks each in turn has one part of a text: a sentence or line. So a client gets its
 * share of the batch whatever the others ask for, and each of its asks a share of that. What a text becomes does not
 * depend on it. */

/* With the lock held: the text of an ask that is next: the one that is begun, one that is tried again, or a new one. */
static text_item *next_item(server *s, ask *a) {
    if (a->open && a->open->place) return a->open;
    a->open = NULL;
    if (a->state != ASK_WAITING) return NULL;
    text_item *item = a->again;
    if (item) a->again = item->next;
    else if (a->n_begun < a->n_items) item = &a->items[a->n_begun++];
    else return NULL;
    a->n_queued--, s->n_queued--;
    item->taken = 1, a->n_taken++;
    return a->open = item;
}

/* With the lock held: whether the decoder has a text of a client. */
static int is_served(const guest *c) {
    const ask *a = c->turn;
    do
        if (a->n_taken) return 1;
    while ((a = a->turn_after) != c->turn);
    return 0;
}

/* With the lock held: the text whose turn it is; NULL: there is none. Clients and asks that had a turn come last.
 * `under_way`: sentences in the batch. */
static text_item *next_turn(server *s, size_t under_way) {
    s->holding = s->busy && (under_way >= s->busy || (s->holding && under_way > s->calm));
    guest *const last = s->guests ? s->guests->before : NULL;
    for (guest *c = s->guests, *after; c; c = after) {
        const int is_last = c == last;
        after = is_last ? NULL : c->next;
        if (s->holding && is_served(c)) continue;
        ask *const last_ask = c->turn->turn_before;
        for (ask *a = c->turn, *behind; a; a = behind) {
            behind = a == last_ask ? NULL : a->turn_after;
            text_item *item = next_item(s, a);
            if (item) {
                c->turn = a->turn_after;
                s->guests = c->next;
                return item;
            }
            if (a->state != ASK_WAITING) turns_leave(s, a); /* and maybe the guest */
        }
    }
    return NULL;
}

/* ==== 3. Decoder ========================================================================================
 * Owns the translator. */

/* With the lock held: no text will come any more, not even one that is tried again. */
static int is_over(const server *s) { return s->ending && !s->waiting; }

static int pull_text(void *closure, int wait, moetext_request *request) {
    server *s = the_server(closure);
    pthread_mutex_lock(&s->lock);
    text_item *item = next_turn(s, wait ? 0 : moetext_under_way(s->translator));
    for (; wait && !item && !is_over(s); item = next_turn(s, 0)) pthread_cond_wait(&s->filled, &s->lock);
    const int answer = item ? MOE_PULL_REQUEST : is_over(s) ? MOE_PULL_END : MOE_PULL_LATER;
    s->stats = moetext_stats(s->translator);
    if (item) {
        request->text = item->text, request->length = item->length;
        request->source = item->of->source[0] ? item->of->source : item->source;
        request->target = item->of->target;
        request->glossary = item->of->glossary;
        if (moetext_takes_context(s->translator)) /* others do not know the parameter */
            request->context = item->of->context.data, request->context_length = item->of->context.length;
        if (item->of->chat) chat_ask(item, request);
        request->place = &item->place;
        request->dropped = &item->of->dropped;
        request->user = item;
    }
    pthread_mutex_unlock(&s->lock);
    return answer;
}

/* Tells how many characters of UTF-8 are before a byte, without counting all of them each time. */
typedef struct ruler {
    const char *text;
    uint32_t *marks; /* characters before every 64th byte; NULL: no memory */
} ruler;

static ruler ruler_of(const char *text, size_t length) {
    ruler r = { text, malloc((length / 64 + 1) * sizeof *r.marks) };
    uint32_t n = 0;
    for (size_t i = 0; r.marks && i <= length / 64; i++) {
        r.marks[i] = n;
        if (i < length / 64) n += (uint32_t)text_utf8_count(text + 64 * i, 64);
    }
    return r;
}

static int64_t characters(const ruler *r, size_t at) {
    return r->marks[at / 64] + (int64_t)text_utf8_count(r->text + at / 64 * 64, at % 64);
}

/* {"score": ..., "alignment": [[begin, end, begin, end], ...]}: characters of source and translation. */
static void write_details(text_item *item, const moetext_hypothesis *best) {
    json j = { .out = &item->details };
    const ruler source = ruler_of(item->text, item->length), target = ruler_of(best->text, best->length);
    const int known = source.marks && target.marks;
    item->details.failed |= !known;
    json_open(&j, NULL, '{');
    json_float(&j, "score", best->score);
    json_open(&j, "alignment", '[');
    for (size_t i = 0; known && i < best->n_links; i++) {
        const moetext_link *link = &best->links[i];
        json_open(&j, NULL, '[');
        json_whole(&j, NULL, characters(&source, link->source_begin));
        json_whole(&j, NULL, characters(&source, link->source_end));
        json_whole(&j, NULL, characters(&target, link->target_begin));
        json_whole(&j, NULL, characters(&target, link->target_end));
        json_close(&j, ']');
    }
    json_close(&j, ']');
    json_close(&j, '}');
    free(source.marks), free(target.marks);
}

static size_t segment_of(const text_item *item) {
    return (size_t)(item - item->of->items) - item->of->pages[item->page].first;
}

/* Append a translation, with its markup if it is a segment of HTML. Return 0 if the markup cannot be placed. */
static int write_translation(const text_item *item, const moetext_hypothesis *h, text_bytes *out) {
    moetext_html *of = item->of->html ? item->of->pages[item->page].document : NULL;
    const char *text = h->text;
    size_t length = h->length;
    if (of && item->pieces) text = moetext_html_place_pieces(of, segment_of(item), h->text, h->length, &length);
    else if (of) text = moetext_html_place(of, segment_of(item), h->text, h->length, h->links, h->n_links, &length);
    text_append(out, text ? text : "", text ? length : 0); /* an empty text is an answer too */
    return text != NULL;
}

/* Queue the texts of a segment one by one. Return 0 if the request has ended: the segment remains untranslated. */
static int try_pieces(server *s, text_item *item) {
    moetext_html *of = item->of->pages[item->page].document;
    size_t length;
    const char *pieces = moetext_html_pieces(of, segment_of(item), &length);
    char *text = pieces && length ? text_copy(pieces, length) : NULL;
    item->pieces = 1;
    pthread_mutex_lock(&s->lock);
    ask *a = item->of;
    const int again = text && !s->ended && a->connection && a->state == ASK_WAITING;
    if (again) {
        free(item->text);
        item->text = text, item->length = length;
        item->taken = 0, a->n_taken--;
        if (a->open == item) a->open = NULL;
        item->next = a->again, a->again = item;
        a->n_queued++, s->n_queued++;
    }
    pthread_mutex_unlock(&s->lock);
    if (again) return 1;
    free(text);
    const char *whole = moetext_html_place_pieces(of, segment_of(item), "", 0, &length);
    text_append(&item->answer, whole ? whole : "", whole ? length : 0);
    item->answer.failed |= !whole;
    return 0;
}

static void write_others(text_item *item, const moetext_result *result) {
    const size_t asked = (size_t)item->of->alternatives, all = result->n_hypotheses - 1;
    const size_t n = asked < all ? asked : all;
    item->others = n ? calloc(n, sizeof *item->others) : NULL;
    if (n && !item->others) item->status = MOE_ERROR_MEMORY;
    for (; item->others && item->n_others < n; item->n_others++) {
        text_bytes *other = &item->others[item->n_others];
        if (!write_translation(item, &result->hypotheses[item->n_others + 1], other)) /* use the best one */
            text_append(other, item->answer.data, item->answer.length);
        if (item->others[item->n_others].failed) item->status = MOE_ERROR_MEMORY;
    }
}

/* Alternative k of a document has alternative k of each segment that has one; 0 is what it is translated as. */
typedef struct choice {
    const ask *of;
    size_t first, k;
} choice;

static const char *chosen(void *user, size_t segment, size_t *length) {
    const choice *c = user;
    const text_item *item = &c->of->items[c->first + segment];
    const text_bytes *text =
        c->k && item->n_others ? &item->others[c->k <= item->n_others ? c->k - 1 : item->n_others - 1] : &item->answer;
    *length = text->length;
    return text->data ? text->data : "";
}

const char *ask_text(const ask *a, size_t i, size_t k, size_t *length) {
    choice c = { a, a->html ? a->pages[i].first : i, k };
    return a->html ? moetext_html_write(a->pages[i].document, chosen, &c, length) : chosen(&c, 0, length);
}

/* {"index": 3, "translatedText": "..."} and a line break: a finished text of a stream, or document. `failed`: the item
 * that is the reason why there is none, whose message is in `text`. */
static void write_line(ask *a, size_t index, int failed, const char *text, size_t length) {
    json j = { .out = &a->lines };
    a->said |= !failed;
    json_open(&j, NULL, '{');
    json_whole(&j, "index", (int64_t)index);
    json_string(&j, failed ? "error" : "translatedText", text, length);
    json_close(&j, '}');
    text_append(&a->lines, "\n", 1);
}

void write_page_line(ask *a, size_t index) {
    size_t length;
    const char *text = ask_text(a, index, 0, &length);
    if (text) write_line(a, index, 0, text, length);
    else a->lines.failed = 1;
}

/* A document is finished with its last segment, or with the first one that failed. */
static void write_item(ask *a, const text_item *item) {
    page *p = a->html ? &a->pages[item->page] : NULL;
    if (!p || (item->status && p->unfinished))
        write_line(a, p ? item->page : (size_t)(item - a->items), item->status != 0,
                   item->answer.data ? item->answer.data : "", item->answer.length);
    else if (p->unfinished == 1) write_page_line(a, item->page);
    if (p) p->unfinished = item->status || !p->unfinished ? 0 : p->unfinished - 1;
}

/* With the lock held: a text is finished. Whoever asked for it may be gone. */
static void item_finish(server *s, text_item *item) {
    ask *a = item->of;
    a->n_taken--, a->n_done++;
    if (a->open == item) a->open = NULL;
    if (item->status != MOE_ERROR_CANCELLED) { /* else it was dropped */
        s->texts++;
        s->failed_texts += item->status != MOE_OK;
        s->bytes_in += item->length, s->bytes_out += item->answer.length;
    }
    if (!a->connection) {
        if (a->n_taken) return;
        ask_unlink(&s->left, a);
        turns_leave(s, a);
        ask_free(a);
        return;
    }
    if (a->state != ASK_WAITING) return;
    if (a->stream && a->chat) chat_end(s, a);
    else if (a->stream) write_item(a, item);
    if (a->stream && a->said) ask_wake(a);
    if (a->n_done == a->n_items) ask_finish(s, a);
}

enum { MOST_SEEN = 32 }; /* parts of a text whose experts are looked at, one part after the other, while others wait */

/* null where they cannot be seen. */
static void write_experts(server *s, text_item *item, const moetext_result *result) {
    moe_error error = { 0 };
    if (!moetext_model_engine(s->model)) s->no_experts = 1; /* there are several models */
    if (!s->experts && !s->no_experts)
        s->no_experts = experts_open(s->model, s->options.settings.data, &s->experts, &error) != MOE_OK;
    const char *source = item->of->source[0] ? item->of->source : item->source;
    if (s->no_experts || result->n_parts > MOST_SEEN ||
        experts_write(s->experts, source, item->of->target, result, &item->experts, &error))
        text_append_string(&item->experts, "null");
}

static void text_done(void *closure, const moetext_result *result) {
    server *s = the_server(closure);
    text_item *item = result->user;
    item->status = result->status;
    if (item->of->chat) chat_done(item, result);
    else if (result->status || !result->n_hypotheses)
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
    s->decoded = 1;
    while (s->guests) turns_leave(s, s->guests->turn);
    for (ask *a = s->left, *next; a; a = next) next = a->next, ask_free(a);
    s->left = NULL;
    while (s->waiting)
        ask_cut(s, s->waiting, s->broken ? MHD_HTTP_INTERNAL_SERVER_ERROR : MHD_HTTP_SERVICE_UNAVAILABLE);
}

void *requests_decode(void *closure) {
    server *s = the_server(closure);
    moe_error error = { 0 };
    const moe_status status = moetext_translate(s->translator, pull_text, text_done, s, &error);
    pthread_mutex_lock(&s->lock);
    s->broken = status && !(s->ended && status == MOE_ERROR_CANCELLED);
    if (s->broken) program_complain("the translator failed: %s", error.message);
    fail_all(s);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}
