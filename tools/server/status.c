/* status.c - send the web page, the state and metrics.
 *
 * Contents
 *   1. State      the page, /health, /ready
 *   2. Metrics
 */
#include "tools/server/server.h"
#include <string.h>

#include "server-html.inc" /* server_html[]: the lines of server.html, made by the Makefile */

/* Send the page to browsers. If a page of another origin links to it, it does not translate the text in its URL by
 * itself. */
static enum MHD_Result answer_page(server *s, request *req) {
    const char *accept = MHD_lookup_connection_value(req->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_ACCEPT);
    if (accept && !strstr(accept, "text/html")) { /* clients of Ollama look for it here */
        text_append_string(&req->out, "Ollama is running");
        return send_bytes(s, req, MHD_HTTP_OK, "text/plain; charset=utf-8");
    }
    for (size_t i = 0; i < sizeof server_html / sizeof *server_html; i++) {
        text_append_string(&req->out, server_html[i]);
        if (!i && hosts_is_foreign(req)) text_append_string(&req->out, "<meta name=\"foreign\">\n");
    }
    return send_bytes(s, req, MHD_HTTP_OK, "text/html; charset=utf-8");
}

/* ==== 1. State ========================================================================================== */

static enum MHD_Result send_state(server *s, request *req, const char *state, unsigned status) {
    json j = { .out = &req->out };
    json_open(&j, NULL, '{');
    json_text(&j, "status", state);
    json_text(&j, "version", moetext_version());
    json_close(&j, '}');
    text_append(&req->out, "\n", 1);
    return send_bytes(s, req, status, "application/json");
}

/* Return "ok", or why the server does not translate. */
static const char *state_of(const server *s) {
    const int broken = s->broken, ending = s->ending || s->draining;
    return broken ? "failed" : ending ? "ending" : "ok";
}

static enum MHD_Result answer_health(server *s, request *req) {
    const char *state = state_of(s);
    return send_state(s, req, state, strcmp(state, "ok") == 0 ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE);
}

/* Choose a direction to test: the last that failed, or else the first. Return 0 if no test is needed or possible. */
static int choose_test(server *s, request *req) {
    const moetext_model *model = req->backend->model;
    const size_t n = moetext_model_language_count(model);
    pthread_mutex_lock(&s->lock);
    const int failed = s->failing.target[0] != 0, recent = program_seconds() - s->failing.succeeded < 10;
    if (failed) {
        take_word(req->source, sizeof req->source, s->failing.source, strlen(s->failing.source));
        take_word(req->target, sizeof req->target, s->failing.target, strlen(s->failing.target));
    }
    pthread_mutex_unlock(&s->lock);
    for (size_t i = 0; !failed && !recent && i < n * n && !req->target[0]; i++)
        if (i / n != i % n && moetext_model_hops(model, i / n, i % n)) {
            const char *from = moetext_model_language(model, i / n), *to = moetext_model_language(model, i % n);
            take_word(req->source, sizeof req->source, from, strlen(from));
            take_word(req->target, sizeof req->target, to, strlen(to));
        }
    return req->target[0] != 0;
}

/* Report whether translation works: translate a word, unless a translation has succeeded recently. */
static enum MHD_Result answer_ready(server *s, request *req) {
    const char *state = state_of(s);
    if (req->state == REQUEST_WAITING) return MHD_YES;
    if (req->state == REQUEST_READING && strcmp(state, "ok") == 0 && choose_test(s, req)) {
        if (!add_text(req, "Hello.", 6)) refuse_memory(req);
        else requests_enqueue(s, req);
        if (!req->refusal) return MHD_YES;
    }
    const int failed = req->refusal || req->cut || (req->n_items && req->items[0].status != MOE_OK);
    if (strcmp(state, "ok") == 0) state = failed ? "failed" : "ready";
    return send_state(s, req, state, strcmp(state, "ready") == 0 ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE);
}

/* ==== 2. Metrics ======================================================================================== */

static void put_head(text_bytes *out, const char *name, const char *kind, const char *help) {
    text_printf(out, "# HELP moe_%s %s\n# TYPE moe_%s %s\n", name, help, name, kind);
}

static void put_one(text_bytes *out, const char *name, const char *kind, const char *help, uint64_t value) {
    put_head(out, name, kind, help);
    text_printf(out, "moe_%s %llu\n", name, (unsigned long long)value);
}

/* Append a label: NAME="VALUE". */
static void put_label(text_bytes *out, const char *name, const char *value) {
    text_printf(out, "%s=\"", name);
    text_bytes clean = { 0 };
    text_append_clean(&clean, value, strlen(value));
    for (size_t i = 0; i < clean.length; i++) {
        if (strchr("\"\\", clean.data[i])) text_append(out, "\\", 1);
        text_append(out, clean.data + i, 1);
    }
    out->failed |= clean.failed;
    text_bytes_free(&clean);
    text_append(out, "\"", 1);
}

/* Append the translator's statistics under their names in moe_stats; some metrics keep older names. */
static void put_stats(text_bytes *out, const moe_stats *stats) {
    static const char *const older[][2] = {
        { "steps", "decoder_steps" },
        { "rows", "decoder_rows" },
        { "bytes", "session_bytes" },
        { "expert_fetch_bytes", "expert_fetched_bytes" },
        { "expert_wait_ns", "expert_wait_seconds" },
        { "expert_ahead", "experts_ahead" },
        { "expert_ahead_used", "experts_ahead_used" },
    };
    const moe_stat *x;
    for (size_t i = 0; (x = moe_stat_at(i)); i++) {
        char name[80];
        if (x->text) continue;
        const uint64_t value = *(const uint64_t *)(const void *)((const char *)stats + x->offset);
        const char *plain = x->name, *kind = x->sum ? "counter" : "gauge";
        for (size_t k = 0; k < sizeof older / sizeof *older; k++)
            if (strcmp(plain, older[k][0]) == 0) plain = older[k][1];
        snprintf(name, sizeof name, "%s%s", plain, x->sum ? "_total" : "");
        if (x->offset != offsetof(moe_stats, expert_wait_ns)) put_one(out, name, kind, x->meaning, value);
        else {
            put_head(out, name, kind, "time that decoder steps waited for experts, in seconds");
            text_printf(out, "moe_%s %.6f\n", name, (double)value * 1e-9);
        }
    }
}

static void put_responses(text_bytes *out, const server *s) {
    put_head(out, "requests_total", "counter", "answers by status class");
    for (int i = 2; i < 6; i++) {
        uint64_t n = 0;
        for (int code = 100 * i; code < 100 * (i + 1); code++) n += s->responses[code];
        text_printf(out, "moe_requests_total{status=\"%dxx\"} %llu\n", i, (unsigned long long)n);
    }
    put_head(out, "responses_total", "counter", "answers by status");
    for (int code = 0; code < 600; code++)
        if (s->responses[code])
            text_printf(out, "moe_responses_total{code=\"%d\"} %llu\n", code, (unsigned long long)s->responses[code]);
}

static void put_keys(text_bytes *out, const setup *u) {
    static const char *const names[] = { "key_requests_total", "key_characters_total", "key_characters_limit" };
    static const char *const help[] = { "requests with an API key", "characters that count against a key's limit",
                                        "limit of an API key, in characters" };
    for (size_t k = 0; k < 3 && u->n_keys; k++) {
        put_head(out, names[k], k < 2 ? "counter" : "gauge", help[k]);
        for (size_t i = 0; i < u->n_keys; i++) {
            const api_key *key = &u->keys[i];
            const uint64_t values[] = { key->usage->requests, key->usage->characters, key->limit };
            if (k == 2 && !key->limit) continue;
            text_printf(out, "moe_%s{line=\"%zu\",", names[k], key->line);
            put_label(out, "key", key->name.data);
            text_printf(out, "} %llu\n", (unsigned long long)values[k]);
        }
    }
}

static void put_directions(text_bytes *out, const server *s) {
    static const char *const names[] = { "model_texts_total", "model_texts_failed_total" };
    static const char *const help[] = { "finished texts by model and direction",
                                        "failed texts by model and direction" };
    for (size_t k = 0; k < 2 && s->n_directions; k++) {
        put_head(out, names[k], "counter", help[k]);
        for (size_t i = 0; i < s->n_directions; i++) {
            const direction *d = &s->directions[i];
            text_printf(out, "moe_%s{", names[k]);
            put_label(out, "model", d->model), text_append(out, ",", 1);
            put_label(out, "source", d->source), text_append(out, ",", 1);
            put_label(out, "target", d->target);
            text_printf(out, "} %llu\n", (unsigned long long)(k ? d->failed : d->texts));
        }
    }
}

static void put_durations(text_bytes *out, const server *s) {
    static const char *const bounds[] = { "0.01", "0.03", "0.1", "0.3", "1", "3", "10", "30" };
    put_head(out, "request_seconds", "histogram", "time from the first header of a request to its answer");
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++)
        text_printf(out, "moe_request_seconds_bucket{le=\"%s\"} %llu\n", bounds[i],
                    (unsigned long long)s->seconds_below[i]);
    text_printf(out, "moe_request_seconds_bucket{le=\"+Inf\"} %llu\n", (unsigned long long)s->seconds_count);
    text_printf(out, "moe_request_seconds_sum %.6f\nmoe_request_seconds_count %llu\n", s->seconds_sum,
                (unsigned long long)s->seconds_count);
}

static enum MHD_Result answer_metrics(server *s, request *req) {
    text_bytes *out = &req->out;
    size_t open = 0, queued = 0, backends = 0;
    put_head(out, "build_info", "gauge", "version of moe-server");
    text_printf(out, "moe_build_info{version=\"%s\"} 1\n", moetext_version());
    pthread_mutex_lock(&s->lock);
    const backend *b = s->backend;
    do {
        backends++;
        queued += b->n_queued;
        for (const request *other = b->waiting; other; other = other->next) open++;
    } while ((b = b->previous));
    const struct {
        const char *name, *kind, *help;
        uint64_t value;
    } rows[] = {
        { "texts_total", "counter", "finished texts", s->texts },
        { "texts_failed_total", "counter", "failed texts", s->failed_texts },
        { "source_bytes_total", "counter", "bytes of finished texts", s->bytes_in },
        { "translation_bytes_total", "counter", "bytes of translations", s->bytes_out },
        { "characters_total", "counter", "characters of texts, contexts and chat answers", s->characters },
        { "requests_open", "gauge", "requests with unfinished texts", open },
        { "texts_waiting", "gauge", "texts that the decoder has not taken yet", queued },
        { "connections", "gauge", "open connections", s->n_connections },
        { "translators", "gauge", "translators: 1, or more while requests from before a reload are in progress",
          backends },
        { "reloads_total", "counter", "reloads", s->reloads[0] },
        { "reloads_failed_total", "counter", "failed reloads, which changed nothing", s->reloads[1] },
        { "start_time_seconds", "gauge", "time when the models were opened, in seconds since 1970",
          (uint64_t)s->backend->began },
    };
    put_responses(out, s);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        put_one(out, rows[i].name, rows[i].kind, rows[i].help, rows[i].value);
    put_keys(out, s->setup);
    put_directions(out, s);
    put_stats(out, &s->backend->stats);
    put_durations(out, s);
    pthread_mutex_unlock(&s->lock);
    return send_bytes(s, req, MHD_HTTP_OK, "text/plain; version=0.0.4; charset=utf-8");
}

static const dialect probe = { .source = "source", .target = "target", TRANSLATES };

const route status_routes[] = {
    { "GET", "/health", ALWAYS, answer_health, NULL },
    { "GET", "/ready", ALWAYS, answer_ready, &probe },
    { "GET", "/metrics", NEEDS_KEY, answer_metrics, NULL },
    { "GET", "/", 0, answer_page, NULL },
    { 0 },
};
