/* status.c - the web page, health and metrics. */
#include "tools/server/server.h"

#include "server-html.inc" /* server_html[]: the lines of server.html, made by the Makefile */

static enum MHD_Result answer_page(server *s, request *req) {
    text_bytes out = { 0 };
    for (size_t i = 0; i < sizeof server_html / sizeof *server_html; i++) text_append_string(&out, server_html[i]);
    return send_bytes(s, req, MHD_HTTP_OK, "text/html; charset=utf-8", &out);
}

static enum MHD_Result answer_health(server *s, request *req) {
    pthread_mutex_lock(&s->lock);
    const char *state = s->broken ? "failed" : s->ending ? "ending" : "ok";
    const int well = !s->broken && !s->ending;
    pthread_mutex_unlock(&s->lock);
    text_bytes out = { 0 };
    text_printf(&out, "{\"status\":\"%s\"}\n", state);
    return send_bytes(s, req, well ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE, "application/json", &out);
}

static enum MHD_Result answer_metrics(server *s, request *req) {
    static const char *const bounds[] = { "0.01", "0.03", "0.1", "0.3", "1", "3", "10", "30" };
    text_bytes out = { 0 };
    pthread_mutex_lock(&s->lock);
    text_append_string(&out, "# TYPE moe_requests_total counter\n");
    for (int i = 2; i < 6; i++)
        text_printf(&out, "moe_requests_total{status=\"%dxx\"} %llu\n", i, (unsigned long long)s->requests[i]);
    size_t open = 0;
    for (const request *other = s->waiting; other; other = other->next) open++;
    const struct {
        const char *name;
        uint64_t value;
        int gauge;
    } rows[] = {
        { "texts_total", s->texts, 0 },
        { "texts_failed_total", s->failed_texts, 0 },
        { "source_bytes_total", s->bytes_in, 0 },
        { "translation_bytes_total", s->bytes_out, 0 },
        { "source_tokens_total", s->stats.source_tokens, 0 },
        { "target_tokens_total", s->stats.target_tokens, 0 },
        { "decoder_steps_total", s->stats.steps, 0 },
        { "decoder_rows_total", s->stats.rows, 0 },
        { "expert_visits_total", s->stats.expert_visits, 0 },
        { "expert_hits_total", s->stats.expert_hits, 0 },
        { "expert_fetches_total", s->stats.expert_fetches, 0 },
        { "expert_fetched_bytes_total", s->stats.expert_fetch_bytes, 0 },
        { "experts_ahead_total", s->stats.expert_ahead, 0 },
        { "experts_ahead_used_total", s->stats.expert_ahead_used, 0 },
        { "experts", s->stats.experts, 1 },
        { "experts_held", s->stats.experts_held, 1 },
        { "requests_open", open, 1 },
        { "texts_waiting", s->n_queued, 1 },
        { "session_bytes", s->stats.bytes, 1 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        text_printf(&out, "# TYPE moe_%s %s\nmoe_%s %llu\n", rows[i].name, rows[i].gauge ? "gauge" : "counter",
                    rows[i].name, (unsigned long long)rows[i].value);
    text_printf(&out, "# TYPE moe_expert_wait_seconds_total counter\nmoe_expert_wait_seconds_total %.6f\n",
                (double)s->stats.expert_wait_ns * 1e-9);
    text_append_string(&out, "# TYPE moe_request_seconds histogram\n");
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++)
        text_printf(&out, "moe_request_seconds_bucket{le=\"%s\"} %llu\n", bounds[i],
                    (unsigned long long)s->seconds_below[i]);
    text_printf(&out, "moe_request_seconds_bucket{le=\"+Inf\"} %llu\n", (unsigned long long)s->seconds_count);
    text_printf(&out, "moe_request_seconds_sum %.6f\nmoe_request_seconds_count %llu\n", s->seconds_sum,
                (unsigned long long)s->seconds_count);
    pthread_mutex_unlock(&s->lock);
    return send_bytes(s, req, MHD_HTTP_OK, "text/plain; version=0.0.4", &out);
}

const route status_routes[] = {
    { "GET", "/health", ALWAYS, answer_health, NULL },
    { "GET", "/metrics", NEEDS_KEY, answer_metrics, NULL },
    { "GET", "/", 0, answer_page, NULL },
    { 0 },
};
