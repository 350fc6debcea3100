/* status.c - send the web page, the health status and metrics. */
#include "tools/server/server.h"
#include <string.h>

#include "server-html.inc" /* server_html[]: the lines of server.html, made by the Makefile */

static enum MHD_Result answer_page(server *s, request *req) {
    for (size_t i = 0; i < sizeof server_html / sizeof *server_html; i++) text_append_string(&req->out, server_html[i]);
    return send_bytes(s, req, MHD_HTTP_OK, "text/html; charset=utf-8");
}

static enum MHD_Result answer_health(server *s, request *req) {
    const int broken = s->broken, ending = s->ending;
    const char *state = broken ? "failed" : ending ? "ending" : "ok";
    text_printf(&req->out, "{\"status\":\"%s\"}\n", state);
    return send_bytes(s, req, broken || ending ? MHD_HTTP_SERVICE_UNAVAILABLE : MHD_HTTP_OK, "application/json");
}

/* Append the translator's statistics under their names in moe_stats; some metrics keep older names. */
static void append_stats(text_bytes *out, const moe_stats *stats) {
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
        if (x->text) continue;
        const uint64_t value = *(const uint64_t *)(const void *)((const char *)stats + x->offset);
        const char *name = x->name, *total = x->sum ? "_total" : "";
        for (size_t k = 0; k < sizeof older / sizeof *older; k++)
            if (strcmp(name, older[k][0]) == 0) name = older[k][1];
        text_printf(out, "# TYPE moe_%s%s %s\nmoe_%s%s ", name, total, x->sum ? "counter" : "gauge", name, total);
        if (x->offset == offsetof(moe_stats, expert_wait_ns)) text_printf(out, "%.6f\n", (double)value * 1e-9);
        else text_printf(out, "%llu\n", (unsigned long long)value);
    }
}

static enum MHD_Result answer_metrics(server *s, request *req) {
    static const char *const bounds[] = { "0.01", "0.03", "0.1", "0.3", "1", "3", "10", "30" };
    pthread_mutex_lock(&s->lock);
    text_append_string(&req->out, "# TYPE moe_requests_total counter\n");
    for (int i = 2; i < 6; i++)
        text_printf(&req->out, "moe_requests_total{status=\"%dxx\"} %llu\n", i, (unsigned long long)s->requests[i]);
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
        { "requests_open", open, 1 },
        { "texts_waiting", s->n_queued, 1 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        text_printf(&req->out, "# TYPE moe_%s %s\nmoe_%s %llu\n", rows[i].name, rows[i].gauge ? "gauge" : "counter",
                    rows[i].name, (unsigned long long)rows[i].value);
    append_stats(&req->out, &s->stats);
    text_append_string(&req->out, "# TYPE moe_request_seconds histogram\n");
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++)
        text_printf(&req->out, "moe_request_seconds_bucket{le=\"%s\"} %llu\n", bounds[i],
                    (unsigned long long)s->seconds_below[i]);
    text_printf(&req->out, "moe_request_seconds_bucket{le=\"+Inf\"} %llu\n", (unsigned long long)s->seconds_count);
    text_printf(&req->out, "moe_request_seconds_sum %.6f\nmoe_request_seconds_count %llu\n", s->seconds_sum,
                (unsigned long long)s->seconds_count);
    pthread_mutex_unlock(&s->lock);
    return send_bytes(s, req, MHD_HTTP_OK, "text/plain; version=0.0.4");
}

const route status_routes[] = {
    { "GET", "/health", ALWAYS, answer_health, NULL },
    { "GET", "/metrics", NEEDS_KEY, answer_metrics, NULL },
    { "GET", "/", 0, answer_page, NULL },
    { 0 },
};
