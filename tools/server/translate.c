/* translate.c - translate texts, for all interfaces except chat.
 *
 * Contents
 *   1. Texts       get the texts, documents and languages of a request
 *   2. Decoder     fill requests for the decoder and store its results
 *   3. Streams     write a line for each result
 *   4. Requests    check requests, split documents, detect languages, answer
 */
#include "tools/server/server.h"

#include <stdlib.h>
#include <string.h>

/* ==== 1. Texts ========================================================================================== */

size_t request_count(const request *req) { return req->markup ? req->n_pages : req->n_items; }

/* Alternative k of a document consists of alternative k of each segment, or its last alternative if it has fewer. */
typedef struct choice {
    const request *request;
    size_t first, k;
} choice;

static const char *chosen(void *user, size_t segment, size_t *length) {
    const choice *c = user;
    const text_item *item = &c->request->items[c->first + segment];
    const size_t k = c->k < item->n_others ? c->k : item->n_others;
    const text_bytes *text = k ? &item->others[k - 1] : &item->answer;
    *length = text->length;
    return text->data ? text->data : "";
}

const char *request_text(const request *req, size_t i, size_t k, size_t *length) {
    const page *p = req->markup ? &req->pages[i] : NULL;
    choice c = { req, p ? p->first : i, k };
    return p ? moetext_html_write(p->document, chosen, &c, length) : chosen(&c, 0, length);
}

void put_text(const request *req, json *j, const char *key, size_t i, size_t k) {
    size_t length;
    const char *text = request_text(req, i, k, &length);
    json_string(j, key, text ? text : "", text ? length : 0);
    j->out->failed |= !text;
}

/* Return the first item of text or document `i`, and set *n to the number of its items. */
static text_item *items_of(const request *req, size_t i, size_t *n) {
    *n = req->markup ? moetext_html_count(req->pages[i].document) : 1;
    return req->items + (req->markup ? req->pages[i].first : i);
}

ptrdiff_t request_language(server *s, const request *req, size_t i, float *confidence) {
    text_bytes text = { 0 };
    size_t n;
    const text_item *items = items_of(req, i, &n);
    for (size_t k = 0; k < n && text.length < 1000; k++) {
        if (k) text_append(&text, " ", 1);
        text_append(&text, items[k].text, items[k].length);
    }
    *confidence = 0;
    pthread_mutex_lock(&s->detecting);
    const ptrdiff_t language =
        req->backend->detector ? text_detect(req->backend->detector, text.data, text.length, confidence) : -1;
    pthread_mutex_unlock(&s->detecting);
    text_bytes_free(&text);
    return language;
}

int lists_language(const backend *b, size_t language) { return !b->named || b->named[language]; }

int lists_direction(const backend *b, size_t source, size_t target) {
    return lists_language(b, source) && lists_language(b, target) && moetext_model_hops(b->model, source, target);
}

ptrdiff_t request_source(server *s, const request *req, size_t i) {
    float confidence;
    return req->source[0] ? moetext_model_language_find(req->backend->model, req->source)
                          : request_language(s, req, i, &confidence);
}

/* ==== 2. Decoder ======================================================================================== */

static const char *source_of(const text_item *item) {
    return item->request->source[0] ? item->request->source : item->source;
}

void translation_begin(server *s, text_item *item, moetext_request *next) {
    const request *req = item->request;
    (void)s;
    next->text = item->text, next->length = item->length;
    next->source = source_of(item);
    next->target = req->target;
    next->glossary = req->glossary;
    next->memory = req->memory;
    if (moetext_takes_context(req->backend->translator))
        next->context = req->context.data, next->context_length = req->context.length;
    if (req->experts && !req->markup && !req->stream) experts_begin(req->backend, item, next);
}

/* Return the document of an item, or NULL for plain text, and set *segment to the index of the item's segment. */
static moetext_html *document_of(const text_item *item, size_t *segment) {
    const page *p = item->request->markup ? &item->request->pages[item->page] : NULL;
    *segment = p ? (size_t)(item - item->request->items) - p->first : 0;
    return p ? p->document : NULL;
}

/* Append a translation, with its markup if the item is a segment. Return 0 if the markup cannot be placed. */
static int write_translation(const text_item *item, const moetext_hypothesis *h, text_bytes *out) {
    size_t segment, length = h->length;
    moetext_html *document = document_of(item, &segment);
    const char *text = h->text;
    if (document && item->pieces) text = moetext_html_place_pieces(document, segment, h->text, h->length, &length);
    else if (document) text = moetext_html_place(document, segment, h->text, h->length, h->links, h->n_links, &length);
    text_append(out, text ? text : "", text ? length : 0); /* an empty answer is valid */
    return text != NULL;
}

/* Queue the pieces of a segment. Return 0 if the request has ended and the segment remains untranslated. */
static int try_pieces(server *s, text_item *item) {
    size_t segment, length;
    moetext_html *document = document_of(item, &segment);
    const char *pieces = moetext_html_pieces(document, segment, &length);
    char *text = pieces && length ? text_copy(pieces, length) : NULL;
    item->pieces = 1;
    if (text && requests_retry(s, item, text, length)) return 1;
    free(text);
    text_append(&item->answer, "", 0);
    const char *original = moetext_html_place_pieces(document, segment, "", 0, &length);
    text_append(&item->answer, original ? original : "", original ? length : 0);
    item->answer.failed |= !original;
    return 0;
}

static void write_others(text_item *item, const moetext_result *result) {
    const size_t wanted = (size_t)item->request->alternatives, all = result->n_hypotheses - 1;
    const size_t n = wanted < all ? wanted : all;
    item->others = n ? calloc(n, sizeof *item->others) : NULL;
    if (n && !item->others) item->status = MOE_ERROR_MEMORY;
    for (; item->others && item->n_others < n; item->n_others++) {
        text_bytes *other = &item->others[item->n_others];
        if (!write_translation(item, &result->hypotheses[item->n_others + 1], other)) /* use the best translation */
            text_append(other, item->answer.data, item->answer.length);
        if (other->failed) item->status = MOE_ERROR_MEMORY;
    }
}

/* An index of UTF-8 text for counting the characters before a byte without scanning the whole text. */
typedef struct ruler {
    const char *text;
    uint32_t *marks; /* number of characters before every 64th byte; NULL if out of memory */
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

/* Write [[begin, end, confidence], ...] of the parts, with character positions in the translation. */
static void write_parts(json *j, const ruler *target, const moetext_result *result) {
    json_open(j, "parts", '[');
    for (size_t i = 0; i < result->n_parts; i++) {
        const double confidence = moetext_part_confidence(result, i);
        if (confidence < 0) continue;
        json_open(j, NULL, '[');
        json_whole(j, NULL, characters(target, result->parts[i].begin));
        json_whole(j, NULL, characters(target, result->parts[i].end));
        json_digits(j, NULL, confidence, 3);
        json_close(j, ']');
    }
    json_close(j, ']');
}

/* Write {"score": ..., "confidence": ..., "parts": [...], "terms": [...], "alignment": [[begin, end, begin, end], ...]}
 * with character positions in both texts. */
static void write_details(text_item *item, const moetext_result *result) {
    const moetext_hypothesis *best = &result->hypotheses[0];
    const double confidence = moetext_confidence(result);
    json j = { .out = &item->details };
    const ruler source = ruler_of(item->text, item->length), target = ruler_of(best->text, best->length);
    const int known = source.marks && target.marks;
    item->details.failed |= !known;
    json_open(&j, NULL, '{');
    json_float(&j, "score", best->score);
    if (confidence >= 0) json_digits(&j, "confidence", confidence, 3);
    if (confidence >= 0 && known) write_parts(&j, &target, result);
    if (result->n_terms) json_open(&j, "terms", '[');
    for (size_t i = 0; i < result->n_terms; i++) {
        json_open(&j, NULL, '{');
        json_text(&j, "source", result->terms[i].source);
        json_text(&j, "target", result->terms[i].target);
        json_bool(&j, "kept", result->terms[i].kept);
        json_close(&j, '}');
    }
    if (result->n_terms) json_close(&j, ']');
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

int translation_done(server *s, text_item *item, const moetext_result *result) {
    const request *req = item->request;
    if (result->status || !result->n_hypotheses) {
        text_append_string(&item->answer, result->status ? result->message : "");
        return 1;
    }
    const moetext_hypothesis *best = &result->hypotheses[0];
    if (!write_translation(item, best, &item->answer) && try_pieces(s, item)) return 0;
    item->untranslated = (result->flags & MOETEXT_KEPT) != 0;
    item->request->untranslated += (size_t)item->untranslated;
    if (req->alternatives) write_others(item, result);
    if (req->details) write_details(item, result);
    if (item->collected) experts_write(req->backend, item, result->n_parts);
    return 1;
}

/* ==== 3. Streams ======================================================================================== */

/* Write a line like {"index": 3, "translatedText": "..."} or {"index": 3, "error": "..."}. */
static void write_line(request *req, int64_t index, const char *key, const char *text, size_t length) {
    json j = { .out = &req->lines };
    json_open(&j, NULL, '{');
    if (index >= 0) json_whole(&j, "index", index);
    json_string(&j, key, text, length);
    json_close(&j, '}');
    text_append(&req->lines, "\n", 1);
}

static void write_finished(request *req, size_t index) {
    size_t length;
    const char *text = request_text(req, index, 0, &length);
    req->started = 1;
    if (text) write_line(req, (int64_t)index, "translatedText", text, length);
    else req->lines.failed = 1;
}

/* Write the line of a finished text or document. A document is finished after its last segment or its first failure. */
void translation_end(server *s, request *req, const text_item *item) {
    page *p = item && req->markup ? &req->pages[item->page] : NULL;
    (void)s;
    if (!item) write_line(req, -1, "error", requests_why(req), strlen(requests_why(req)));
    const size_t index = p ? item->page : item ? (size_t)(item - req->items) : 0;
    if (item && item->status && (!p || p->unfinished))
        write_line(req, (int64_t)index, "error", item->answer.data ? item->answer.data : "", item->answer.length);
    else if (item && !item->status && (!p || p->unfinished == 1)) write_finished(req, index);
    if (p) p->unfinished = item->status || !p->unfinished ? 0 : p->unfinished - 1;
}

/* Copy the bytes of a stream from `position`, or suspend the connection until more bytes are available. Drop sent bytes
 * only when they exceed half of the buffer; moving the rest each time would take quadratic time with the lock held. */
static ssize_t stream_lines(void *closure, uint64_t position, char *out, size_t capacity) {
    request *req = closure;
    server *s = req->server;
    pthread_mutex_lock(&s->lock);
    size_t from = (size_t)position - req->lines_from;
    if (from > req->lines.length - from) {
        memmove(req->lines.data, req->lines.data + from, req->lines.length -= from);
        req->lines_from += from, from = 0;
    }
    const size_t n = req->lines.length - from < capacity ? req->lines.length - from : capacity;
    ssize_t result = (ssize_t)n;
    if (n) {
        memcpy(out, req->lines.data + from, n);
        req->sent = (size_t)position + n;
    } else if (req->state == REQUEST_DONE) { /* a truncated stream must not end like a complete one */
        result = req->cut || req->lines.failed ? MHD_CONTENT_READER_END_WITH_ERROR : MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        req->suspended = 1;
        MHD_suspend_connection(req->connection);
    }
    const size_t whole = req->state == REQUEST_DONE ? req->lines_from + req->lines.length : 0;
    pthread_mutex_unlock(&s->lock);
    if (whole) http_answered(s, req, whole);
    return result;
}

static enum MHD_Result send_stream(server *s, request *req) {
    struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 4096, stream_lines, req, NULL);
    if (r) MHD_add_response_header(r, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
    return send_response(s, req, MHD_HTTP_OK, req->route->dialect->stream_type, r);
}

/* ==== 4. Requests ======================================================================================= */

/* Return 1 if texts can be translated from one language into the other, or if both languages are equal. */
static int leads(const backend *b, const char *source, const char *target) {
    const ptrdiff_t from = moetext_model_language_find(b->model, source);
    const ptrdiff_t to = moetext_model_language_find(b->model, target);
    return from == to || moetext_model_hops(b->model, (size_t)from, (size_t)to);
}

void check_languages(request *req) {
    const dialect *d = req->route->dialect;
    const backend *b = req->backend;
    const int known = moetext_model_language_count(b->model) > 0;
    if (!req->target[0]) bad_request(req, "Invalid request: missing %s parameter", d->target);
    else if (known && moetext_model_language_find(b->model, req->target) < 0)
        bad_request(req, "%s is not supported", req->target);
    else if (known && req->source[0] && moetext_model_language_find(b->model, req->source) < 0)
        bad_request(req, "%s is not supported", req->source);
    else if (!req->source[0] && moetext_model_needs_source(b->model) && !b->detector)
        bad_request(req, "Invalid request: missing %s parameter", d->source);
    else if (known && req->source[0] && !leads(b, req->source, req->target))
        bad_request(req, "%s to %s is not supported: GET /languages lists the targets of each language", req->source,
                    req->target);
}

/* Create a glossary from the terms of a request. */
static void open_glossary(request *req) {
    moe_error error = { 0 };
    const char **terms = req->n_terms ? calloc(2 * req->n_terms, sizeof *terms) : NULL;
    const char *at = req->terms.data;
    if (!req->n_terms) return;
    for (size_t i = 0; terms && i < 2 * req->n_terms; i++, at += strlen(at) + 1)
        terms[i % 2 * req->n_terms + i / 2] = at;
    const moe_status status = terms ? moetext_glossary_new(req->backend->translator, terms, terms + req->n_terms,
                                                           req->n_terms, &req->glossary, &error)
                                    : MOE_ERROR_MEMORY;
    free(terms);
    if (status == MOE_ERROR_MEMORY) refuse_memory(req);
    else if (status) bad_request(req, "%s: %s", error.where, error.message);
}

/* Create a translation memory from the pairs of a request. */
static void open_memory(request *req) {
    moe_error error = { 0 };
    const char *at = req->confirmed.data;
    moe_status status = req->n_confirmed ? moetext_memory_new(NULL, &req->memory, &error) : MOE_OK;
    for (size_t i = 0; i < req->n_confirmed && !status; i++) {
        const char *target = at + strlen(at) + 1;
        status = moetext_memory_add(req->memory, NULL, req->target, at, strlen(at), target, strlen(target), &error);
        at = target + strlen(target) + 1;
    }
    if (status == MOE_ERROR_MEMORY) refuse_memory(req);
    else if (status) bad_request(req, "%s: %s", error.where, error.message);
}

/* Refuse contents in the tags of `ignored`. Empty tags, such as Weblate's placeholders <x id="1"></x>, have nothing to
 * ignore. */
static void check_ignored(request *req, const char *text, size_t length) {
    for (const char *at = text, *end = text + length; req->ignored[0] && (at = memchr(at, '<', (size_t)(end - at)));) {
        const char *const name = ++at, *const close = memchr(at, '>', (size_t)(end - at));
        const size_t n = close ? strcspn(name, " \t\r\n/>") : 0;
        if (!close) return;
        at = close + 1;
        if (!n || close[-1] == '/' || !text_is_listed(req->ignored, name, n)) continue;
        if ((size_t)(end - at) < n + 2 || memcmp(at, "</", 2) != 0 || memcmp(at + 2, name, n) != 0)
            bad_request(req, "'ignore_tags' is only supported for empty tags: use translate=\"no\" in <%.*s>.",
                        n < 40 ? (int)n : 40, name);
        if (req->refusal) return;
    }
}

/* Replace texts that are documents with their segments. */
static void cut_pages(request *req) {
    text_item *texts = req->items;
    const size_t n = req->n_items;
    const moetext_html_options o = { .tags = MOETEXT_TAGS_MARKED,
                                     .xml = req->markup == MARKUP_XML,
                                     .source = req->source,
                                     .target = req->target };
    req->items = NULL, req->n_items = 0;
    req->pages = calloc(n + 1, sizeof *req->pages);
    int failed = !req->pages;
    for (size_t i = 0; i < n && !failed; i++) {
        page *p = &req->pages[req->n_pages++];
        p->first = req->n_items;
        p->text = texts[i].text, texts[i].text = NULL;
        p->length = texts[i].length;
        check_ignored(req, p->text, p->length);
        failed = moetext_html_new(p->text, p->length, &o, &p->document, NULL) != MOE_OK;
        p->unfinished = failed ? 0 : moetext_html_count(p->document);
        for (size_t k = 0; k < p->unfinished && !failed; k++) {
            size_t length;
            const char *source = moetext_html_source(p->document, k, &length);
            failed = !add_text(req, source, length);
            if (!failed) req->items[req->n_items - 1].page = i;
        }
        if (!failed && !p->unfinished && req->stream) write_finished(req, i);
    }
    items_free(texts, n);
    if (failed) refuse_memory(req);
}

/* Detect the language of each text if the model needs the language. Use any language for a text without letters. */
static void find_sources(server *s, request *req) {
    const backend *b = req->backend;
    if (req->source[0] || !moetext_model_needs_source(b->model)) return;
    for (size_t i = 0; i < request_count(req); i++) {
        size_t n;
        text_item *items = items_of(req, i, &n);
        const ptrdiff_t language = request_source(s, req, i);
        const char *code = language >= 0                    ? moetext_model_language(b->model, (size_t)language)
                           : moetext_model_engine(b->model) ? moetext_model_language(b->model, 0)
                                                            : req->target;
        for (size_t k = 0; k < n; k++) items[k].source = code;
    }
}

static enum MHD_Result send_failure(server *s, request *req, const text_item *item) {
    text_bytes message = { 0 };
    if (req->is_list)
        text_printf(&message, "%s[%zu]: ", req->route->dialect->texts,
                    req->markup ? item->page : (size_t)(item - req->items));
    text_append(&message, item->answer.data ? item->answer.data : "", item->answer.length);
    const enum MHD_Result result =
        send_error(s, req, failure_status(item), message.data ? message.data : "out of memory");
    text_bytes_free(&message);
    return result;
}

static enum MHD_Result send_finished(server *s, request *req) {
    for (size_t i = 0; i < req->n_items; i++)
        if (req->items[i].status != MOE_OK) {
            quota_give_back(s, req);
            return send_failure(s, req, &req->items[i]);
        }
    return req->route->dialect->send(s, req);
}

enum MHD_Result answer_translate(server *s, request *req) {
    const dialect *d = req->route->dialect;
    const request_state state = req->state;
    if (state == REQUEST_DONE && req->cut == CLIENT_GONE) return MHD_NO;
    if (req->stream && req->started) return send_stream(s, req); /* earlier failures are sent as an HTTP status */
    if (state == REQUEST_WAITING) return MHD_YES;
    if (state == REQUEST_DONE && !req->cut) return send_finished(s, req);
    if (state == REQUEST_DONE) { /* work done before a timeout counts against the quota */
        if (req->cut != MHD_HTTP_GATEWAY_TIMEOUT) quota_give_back(s, req);
        return send_error(s, req, req->cut, requests_why(req));
    }
    if (strcmp(req->source, "auto") == 0) req->source[0] = 0;
    if (d->check) d->check(s, req);
    if (!req->refusal && d->target && !req->prompt && req->n_items) check_languages(req);
    if (!req->refusal) open_glossary(req);
    if (!req->refusal) open_memory(req);
    if (!req->refusal && !quota_take(s, req))
        refuse(req, d->quota ? d->quota : MHD_HTTP_TOO_MANY_REQUESTS, "the key's character limit has been reached");
    if (!req->refusal && req->markup) cut_pages(req);
    if (!req->refusal) find_sources(s, req);
    if (!req->refusal) requests_enqueue(s, req);
    if (req->refusal) {
        quota_give_back(s, req);
        return send_error(s, req, req->refusal, req->why);
    }
    /* A queued request may already be done; libmicrohttpd calls this function again in any case. */
    return req->n_items ? MHD_YES : req->stream ? send_stream(s, req) : send_finished(s, req);
}
