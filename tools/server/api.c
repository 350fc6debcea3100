/* api.c - what each address answers.
 *
 * Contents
 *   1. Asks         what was asked for, and what it has become
 *   2. Answers      translations as JSON, as LibreTranslate has them
 *   3. Translate    checks, documents, languages, streams
 *   4. Addresses    and the table of them
 */
#include "tools/server/server.h"

#include "server-html.inc" /* server_html[]: the lines of tools/server/server.html, made by the Makefile */
#include "spec-json.inc"   /* spec_json[]: of tools/server/spec.json */

#include <stdlib.h>
#include <string.h>

enum { MOST_OTHERS = 64 }; /* alternatives that can be asked for; there are never more than the beam has */

/* ==== 1. Asks =========================================================================================== */

size_t ask_count(const ask *a) { return a->html ? a->n_pages : a->n_items; }

void put_text(const ask *a, json *j, const char *key, size_t i, size_t k) {
    size_t length;
    const char *text = ask_text(a, i, k, &length);
    json_string(j, key, text ? text : "", text ? length : 0);
    j->out->failed |= !text;
}

/* What a text says, or the words of a document, as much as detection looks at. */
static void sample(const ask *a, size_t i, text_bytes *out) {
    const size_t first = a->html ? a->pages[i].first : i, n = a->html ? moetext_html_count(a->pages[i].document) : 1;
    for (size_t k = first; a->items && k < first + n && out->length < 1000; k++) {
        text_append(out, a->items[k].text, a->items[k].length);
        if (k + 1 < first + n) text_append(out, " ", 1);
    }
}

ptrdiff_t ask_detect(server *s, const ask *a, size_t i, float *confidence) {
    text_bytes text = { 0 };
    sample(a, i, &text);
    *confidence = 0;
    pthread_mutex_lock(&s->detecting);
    const ptrdiff_t language = s->detector ? text_detect(s->detector, text.data, text.length, confidence) : -1;
    pthread_mutex_unlock(&s->detecting);
    text_bytes_free(&text);
    return language;
}

const char *api_error_name(const ask *a) {
    return a->route >= 0 && api_routes[a->route].speaks ? api_routes[a->route].speaks->error : "error";
}

/* ==== 2. Answers ======================================================================================== */

static void put_alternatives(const ask *a, json *j, size_t i) {
    const page *p = a->html ? &a->pages[i] : NULL;
    size_t n = p ? 0 : a->items[i].n_others;
    for (size_t k = 0; p && k < moetext_html_count(p->document); k++)
        if (a->items[p->first + k].n_others > n) n = a->items[p->first + k].n_others;
    json_open(j, a->is_list ? NULL : "alternatives", '[');
    for (size_t k = 1; k <= n; k++) put_text(a, j, NULL, i, k);
    json_close(j, ']');
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

static void put_language(const server *s, json *j, const char *key, ptrdiff_t language, double confidence) {
    const char *code = language < 0 ? NULL : moetext_model_language(s->model, (size_t)language);
    json_open(j, key, '{');
    json_digits(j, "confidence", 100 * confidence, 3);
    json_text(j, "language", code ? code : "en");
    json_close(j, '}');
}

/* The languages that "auto" found. */
static void put_all_detected(server *s, ask *a, json *j) {
    if (a->is_list) json_open(j, "detectedLanguage", '[');
    for (size_t i = 0; i < ask_count(a); i++) {
        float confidence;
        const ptrdiff_t language = ask_detect(s, a, i, &confidence);
        put_language(s, j, a->is_list ? NULL : "detectedLanguage", language, (double)confidence);
    }
    if (a->is_list) json_close(j, ']');
}

static enum MHD_Result send_translations(server *s, ask *a) {
    text_bytes out = { 0 };
    json j = { .out = &out };
    const size_t n = ask_count(a);
    json_open(&j, NULL, '{');
    if (a->is_list) json_open(&j, "translatedText", '[');
    for (size_t i = 0; i < n; i++) put_text(a, &j, a->is_list ? NULL : "translatedText", i, 0);
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

static void take_truth(int *out, const char *name, const char *word, refusal *r) {
    *out = strcmp(word, "true") == 0 || strcmp(word, "1") == 0;
    if (!*out && *word && strcmp(word, "false") != 0 && strcmp(word, "0") != 0)
        refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: %s parameter is neither true nor false", name);
}

/* The parameters of LibreTranslate beside texts and languages, and three of our own. */
static void take_libre(ask *a, const char *name, const char *value, size_t length, refusal *r) {
    char word[40];
    take_word(word, sizeof word, value, length);
    if (strcmp(name, "details") == 0) take_truth(&a->details, name, word, r);
    else if (strcmp(name, "experts") == 0) take_truth(&a->experts, name, word, r);
    else if (strcmp(name, "stream") == 0) take_truth(&a->stream, name, word, r);
    else if (strcmp(name, "format") == 0) {
        a->html = strcmp(word, "html") == 0;
        if (!a->html && *word && strcmp(word, "text") != 0)
            refuse(r, MHD_HTTP_BAD_REQUEST, "%.40s format is not supported", word);
    } else if (strcmp(name, "alternatives") == 0) {
        char *end;
        const double n = strtod(word, &end);
        if (end == word || *end || length >= sizeof word)
            refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: %s parameter is not a number", name);
        else if (!(n >= 0 && n <= (double)MOST_OTHERS) || (double)(int)n < n)
            refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: %s parameter must be a whole number from 0 to 64", name);
        else a->alternatives = (int)n;
    }
}

static const dialect libre_texts = { .texts = "q",
                                     .source = "source",
                                     .target = "target",
                                     .error = "error",
                                     .beyond = MHD_HTTP_TOO_MANY_REQUESTS,
                                     .take = take_libre,
                                     .send = send_translations };

/* ==== 3. Translate ====================================================================================== */

/* Whether texts in one language can become texts in another one, or stay what they are. */
static int leads(const server *s, const char *source, const char *target) {
    const ptrdiff_t from = moetext_model_language_find(s->model, source);
    const ptrdiff_t to = moetext_model_language_find(s->model, target);
    return from == to || moetext_model_hops(s->model, (size_t)from, (size_t)to);
}

/* Languages and limits of a request to translate. */
static void check_translation(server *s, ask *a, refusal *r) {
    const dialect *d = api_routes[a->route].speaks;
    const int known = moetext_model_language_count(s->model) > 0;
    if (strcmp(a->source, "auto") == 0) a->source[0] = 0;
    if (d->check) d->check(s, a, r);
    if (r->status || d->read) return;
    if (!a->target[0]) refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: missing %s parameter", d->target);
    else if (known && moetext_model_language_find(s->model, a->target) < 0)
        refuse(r, MHD_HTTP_BAD_REQUEST, "%s is not supported", a->target);
    else if (known && a->source[0] && moetext_model_language_find(s->model, a->source) < 0)
        refuse(r, MHD_HTTP_BAD_REQUEST, "%s is not supported", a->source);
    else if (!a->source[0] && moetext_model_needs_source(s->model) && !s->detector)
        refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: missing %s parameter", d->source);
    else if (known && a->source[0] && !leads(s, a->source, a->target)) {
        text_bytes way = { 0 };
        text_printf(&way, "%s to %s", a->source, a->target);
        refuse(r, MHD_HTTP_BAD_REQUEST, "%s is not supported: /languages has the targets of each language",
               way.failed ? "this" : way.data);
        text_bytes_free(&way);
    }
}

/* The terms of a request become its glossary. */
static void open_glossary(const server *s, ask *a, refusal *r) {
    moe_error error = { 0 };
    const char **terms = a->n_terms ? calloc(2 * a->n_terms, sizeof *terms) : NULL;
    const char *at = a->terms.data;
    if (!a->n_terms) return;
    for (size_t i = 0; terms && i < 2 * a->n_terms; i++, at += strlen(at) + 1) terms[i % 2 * a->n_terms + i / 2] = at;
    const moe_status status =
        terms ? moetext_glossary_new(s->translator, terms, terms + a->n_terms, a->n_terms, &a->glossary, &error)
              : MOE_ERROR_MEMORY;
    free(terms);
    if (!status) return;
    text_bytes why = { 0 };
    text_printf(&why, "%s: %s", error.where, status == MOE_ERROR_MEMORY ? "out of memory" : error.message);
    refuse(r, status == MOE_ERROR_MEMORY ? MHD_HTTP_INTERNAL_SERVER_ERROR : MHD_HTTP_BAD_REQUEST, "%s",
           why.failed ? "out of memory" : why.data);
    text_bytes_free(&why);
}

/* Documents in the place of their texts, and segments of them as what is to be translated. */
static void cut_pages(const server *s, ask *a, refusal *r) {
    text_item *texts = a->items;
    const size_t n = a->n_items;
    const moetext_html_options o = { .tags = s->aligned ? MOETEXT_TAGS_LINKED : MOETEXT_TAGS_SPLIT,
                                     .xml = a->html == HTML_XML,
                                     .source = a->source,
                                     .target = a->target };
    a->items = NULL, a->n_items = 0;
    a->pages = calloc(n + 1, sizeof *a->pages);
    int failed = !a->pages;
    for (size_t i = 0; i < n && !failed; i++) {
        page *p = &a->pages[a->n_pages++];
        p->first = a->n_items;
        p->text = texts[i].text, texts[i].text = NULL;
        p->length = texts[i].length;
        failed = moetext_html_new(p->text, p->length, &o, &p->document, NULL) != MOE_OK;
        p->unfinished = failed ? 0 : moetext_html_count(p->document);
        for (size_t k = 0; k < p->unfinished && !failed; k++) {
            size_t length;
            const char *source = moetext_html_source(p->document, k, &length);
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
        float confidence;
        const ptrdiff_t language = ask_detect(s, a, i, &confidence);
        const char *code = language >= 0                    ? moetext_model_language(s->model, (size_t)language)
                           : moetext_model_engine(s->model) ? moetext_model_language(s->model, 0)
                                                            : a->target; /* without letters: it stays */
        const size_t n = a->html ? moetext_html_count(a->pages[i].document) : 1,
                     first = a->html ? a->pages[i].first : i;
        for (size_t k = first; a->items && k < first + n; k++) a->items[k].source = code;
    }
}
/* The bytes of a stream from `position` on; suspends the connection until there are some. Those before it are dropped
 * when they are the larger part: moved for each block, a long answer would take time with its square, and the lock with
 * it. */
static ssize_t stream_lines(void *closure, uint64_t position, char *out, size_t room) {
    ask *a = ((void **)closure)[0];
    server *s = ((void **)closure)[1];
    pthread_mutex_lock(&s->lock);
    size_t from = (size_t)position - a->lines_from;
    if (from > a->lines.length - from) {
        memmove(a->lines.data, a->lines.data + from, a->lines.length -= from);
        a->lines_from += from, from = 0;
    }
    const size_t n = a->lines.length - from < room ? a->lines.length - from : room;
    ssize_t result = (ssize_t)n;
    if (n) {
        memcpy(out, a->lines.data + from, n);
        a->sent = (size_t)position + n;
    } else if (a->state == ASK_DONE) { /* what is cut does not end like what is whole */
        result = a->cut || a->lines.failed ? MHD_CONTENT_READER_END_WITH_ERROR : MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        a->suspended = 1;
        MHD_suspend_connection(a->connection);
    }
    const size_t whole = a->state == ASK_DONE ? a->lines_from + a->lines.length : 0;
    pthread_mutex_unlock(&s->lock);
    if (whole) http_answered(s, a, whole);
    return result;
}

static enum MHD_Result send_stream(server *s, ask *a) {
    void **closure = malloc(2 * sizeof *closure);
    if (!closure) return MHD_NO;
    closure[0] = a, closure[1] = s;
    struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 4096, stream_lines, closure, free);
    if (r) MHD_add_response_header(r, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
    return send_response(s, a, MHD_HTTP_OK, a->chat ? "text/event-stream" : "application/x-ndjson", r);
}

/* The first text that could not be translated, and why. NULL: there is none. */
static const text_item *failed_item(const ask *a) {
    for (size_t i = 0; i < a->n_items; i++)
        if (a->items[i].status != MOE_OK) return &a->items[i];
    return NULL;
}

int is_theirs(const text_item *item) { return item->status == MOE_ERROR_ARGUMENT || item->status == MOE_ERROR_LIMIT; }

static enum MHD_Result send_failure(server *s, ask *a, const text_item *item) {
    text_bytes message = { 0 };
    if (a->is_list)
        text_printf(&message, "%s[%zu]: ", api_routes[a->route].speaks->texts,
                    a->html ? item->page : (size_t)(item - a->items));
    text_append(&message, item->answer.data ? item->answer.data : "", item->answer.length);
    const enum MHD_Result result =
        send_error(s, a, is_theirs(item) ? MHD_HTTP_BAD_REQUEST : MHD_HTTP_INTERNAL_SERVER_ERROR,
                   message.data ? message.data : "out of memory");
    text_bytes_free(&message);
    return result;
}

static enum MHD_Result send_finished(server *s, ask *a) {
    const text_item *failed = failed_item(a);
    if (failed) quota_give_back(s, a);
    return failed ? send_failure(s, a, failed) : api_routes[a->route].speaks->send(s, a);
}

/* Whether a stream may begin. What fails before has a status of its own. */
static int is_begun(server *s, const ask *a) {
    pthread_mutex_lock(&s->lock);
    const int begun = a->stream && a->said;
    pthread_mutex_unlock(&s->lock);
    return begun;
}

enum MHD_Result answer_translate(server *s, ask *a) {
    refusal r = { 0 };
    if (a->state == ASK_DONE && a->cut == CLIENT_GONE) return MHD_NO;
    if (is_begun(s, a)) return send_stream(s, a);
    if (a->state == ASK_WAITING) return MHD_YES;
    if (a->state == ASK_DONE && !a->cut) return send_finished(s, a);
    if (a->state == ASK_DONE) { /* what took too long was translated in part, and counts */
        if (a->cut != MHD_HTTP_GATEWAY_TIMEOUT) quota_give_back(s, a);
        return send_error(s, a, a->cut, requests_why(a));
    }
    check_translation(s, a, &r);
    if (!r.status) open_glossary(s, a, &r);
    if (!r.status && !quota_take(s, a))
        refuse(&r, api_routes[a->route].speaks->beyond, "this key has no characters left for that%s", "");
    if (!r.status && a->html) cut_pages(s, a, &r);
    if (!r.status) find_sources(s, a);
    if (!r.status) requests_enqueue(s, a, &r);
    if (r.status) {
        quota_give_back(s, a);
        return send_error(s, a, r.status, r.message);
    }
    /* One that waits may be answered already, or given up: libmicrohttpd comes back with it. */
    return a->n_items ? MHD_YES : a->stream ? send_stream(s, a) : send_finished(s, a);
}

/* ==== 4. Addresses ====================================================================================== */

typedef struct candidate { /* a language that texts seem to be in */
    ptrdiff_t language;
    double confidence, bytes; /* the first a sum */
    size_t n;
} candidate;

static int by_weight(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    const double p = x->confidence / (double)x->n * x->bytes, q = y->confidence / (double)y->n * y->bytes;
    return p < q ? 1 : p > q ? -1 : x->language < y->language ? -1 : x->language > y->language;
}

/* One list for all texts: each language once, the one that most is in first. */
static enum MHD_Result answer_detect(server *s, ask *a) {
    if (!s->detector) return send_error(s, a, MHD_HTTP_NOT_IMPLEMENTED, "language detection is not installed");
    const size_t n_languages = moetext_model_language_count(s->model);
    candidate *found = calloc(n_languages + 1, sizeof *found); /* the last: none could be told */
    if (!found) return send_error(s, a, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory");
    size_t n = 0;
    for (size_t i = 0; i < a->n_items; i++) {
        float confidence;
        const ptrdiff_t language = ask_detect(s, a, i, &confidence);
        candidate *c = &found[language < 0 ? n_languages : (size_t)language];
        c->language = language;
        c->confidence += (double)confidence, c->bytes += (double)a->items[i].length;
        c->n++;
    }
    for (size_t i = 0; i <= n_languages; i++)
        if (found[i].n) found[n++] = found[i];
    qsort(found, n, sizeof *found, by_weight);
    text_bytes out = { 0 };
    json j = { .out = &out };
    json_open(&j, NULL, '[');
    for (size_t i = 0; i < n; i++)
        put_language(s, &j, NULL, found[i].language, found[i].confidence / (double)found[i].n);
    json_close(&j, ']');
    text_append_string(&out, "\n");
    free(found);
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

const char *language_name(const char *code) {
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

enum { MOST_TARGETS = 1000 }; /* languages that each have a list of all: with more of them it is in the first alone */

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
        if (!i || n <= MOST_TARGETS || !moetext_model_engine(s->model)) {
            json_open(&j, "targets", '[');
            for (size_t t = 0; t < n; t++)
                if (moetext_model_hops(s->model, i, t)) json_text(&j, NULL, moetext_model_language(s->model, t));
            json_close(&j, ']');
        }
        json_close(&j, '}');
    }
    json_close(&j, ']');
    text_append_string(&out, "\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

/* The first language but one, if there is a way to it. */
static size_t first_target(const server *s, size_t n) {
    size_t target = n > 1, from = 0;
    for (; target < n; target++, from = 0) {
        while (from < n && !moetext_model_hops(s->model, from, target)) from++;
        if (from < n) return target;
    }
    return n > 1;
}

static enum MHD_Result answer_settings(server *s, ask *a) {
    text_bytes out = { 0 };
    json j = { .out = &out };
    size_t n = moetext_model_language_count(s->model);
    const char *target = n ? moetext_model_language(s->model, first_target(s, n)) : "";
    json_open(&j, NULL, '{');
    json_bool(&j, "apiKeys", s->n_keys > 0);
    json_whole(&j, "charLimit", 1024 * (int64_t)s->options.max_body);
    json_bool(&j, "filesTranslation", 1);
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
    for (size_t i = 0; file_endings[i]; i++) json_text(&j, NULL, file_endings[i]);
    json_close(&j, ']');
    json_close(&j, '}');
    text_append_string(&out, "\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

static enum MHD_Result answer_health(server *s, ask *a) {
    pthread_mutex_lock(&s->lock);
    const char *state = s->broken ? "failed" : s->ending ? "ending" : "ok";
    const int well = !s->broken && !s->ending;
    pthread_mutex_unlock(&s->lock);
    text_bytes out = { 0 };
    text_printf(&out, "{\"status\":\"%s\"}\n", state);
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
    COUNTER("expert_visits_total", s->stats.expert_visits);
    COUNTER("expert_hits_total", s->stats.expert_hits);
    COUNTER("expert_fetches_total", s->stats.expert_fetches);
    COUNTER("expert_fetched_bytes_total", s->stats.expert_fetch_bytes);
    COUNTER("experts_ahead_total", s->stats.expert_ahead);
    COUNTER("experts_ahead_used_total", s->stats.expert_ahead_used);
#undef COUNTER
    text_printf(&out,
                "# TYPE moe_expert_wait_seconds_total counter\nmoe_expert_wait_seconds_total %.6f\n"
                "# TYPE moe_experts gauge\nmoe_experts %llu\n# TYPE moe_experts_held gauge\nmoe_experts_held %llu\n",
                (double)s->stats.expert_wait_ns * 1e-9, (unsigned long long)s->stats.experts,
                (unsigned long long)s->stats.experts_held);
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

static enum MHD_Result answer_spec(server *s, ask *a) {
    text_bytes out = { 0 };
    for (size_t i = 0; i < sizeof spec_json / sizeof *spec_json; i++) text_append_string(&out, spec_json[i]);
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

/* It keeps nothing of what it is told. */
static enum MHD_Result answer_suggest(server *s, ask *a) {
    return send_error(s, a, MHD_HTTP_FORBIDDEN, "Suggestions are disabled on this server.");
}

const route api_routes[] = {
    { "POST", "/translate", NEEDS_BODY | NEEDS_KEY, answer_translate, &libre_texts },
    { "POST", "/detect", NEEDS_BODY | NEEDS_KEY, answer_detect, &libre_texts },
    { "POST", "/translate_file", NEEDS_BODY | NEEDS_KEY, answer_translate, &file_texts },
    { "GET", "/download_file/", 0, answer_file, NULL },
    { "GET", "/languages", 0, answer_languages, NULL },
    { "GET", "/frontend/settings", 0, answer_settings, NULL },
    { "POST", "/suggest", 0, answer_suggest, NULL },
    { "GET", "/spec", 0, answer_spec, NULL },
    { "POST", "/v2/translate", NEEDS_BODY | NEEDS_KEY, answer_translate, &deepl_texts },
    { "GET", "/v2/languages", NEEDS_BODY | NEEDS_KEY, deepl_languages, &deepl_parameters },
    { "POST", "/v2/languages", NEEDS_BODY | NEEDS_KEY, deepl_languages, &deepl_parameters },
    { "GET", "/v2/usage", NEEDS_BODY | NEEDS_KEY, deepl_usage, &deepl_parameters },
    { "POST", "/v2/usage", NEEDS_BODY | NEEDS_KEY, deepl_usage, &deepl_parameters },
    { "POST", "/imme", NEEDS_BODY | NEEDS_KEY, answer_translate, &immersive_texts },
    { "POST", "/v1/chat/completions", NEEDS_BODY | NEEDS_KEY, answer_translate, &openai_chat },
    { "GET", "/v1/models", NEEDS_KEY, openai_list, &openai_models },
    { "GET", "/v1/models/", NEEDS_KEY, openai_model, &openai_models },
    { "GET", "/health", ALWAYS, answer_health, NULL },
    { "GET", "/metrics", NEEDS_KEY, answer_metrics, NULL },
    { "GET", "/", 0, answer_page, NULL },
};
const size_t api_route_count = sizeof api_routes / sizeof *api_routes;
