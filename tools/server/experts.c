#include "tools/server/experts.h"
#include "tools/programs/routing.h"
#include "tools/text/json.h"
#include "tools/text/settings.h"

#include <stdlib.h>
#include <string.h>

struct experts {
    const moetext_model *model;
    moe_session *session;
    routing_file layers; /* it only knows their names: nothing is written */
    routing_sentence *sentence;
    size_t n_encoder; /* mixtures that the source goes through */

    moe_request request; /* the part at hand; its source NULL: it was taken */
    moe_status status;
    char message[128];
};

static void keep(void *user, const moe_routing *routing) {
    experts *x = user;
    routing_keep(x->sentence, routing);
}

static moe_status make_session(experts *x, const char *settings, moe_error *error) {
    const moe_model *engine = moetext_model_engine(x->model);
    text_settings wishes = text_settings_none();
    moe_session_params p = moe_session_params_default(engine);
    moe_status status = text_settings_parse(&wishes, settings, error);
    if (status) return status;
    text_settings_apply(&wishes, &p);
    /* One sentence, scored as moe-translate --routing does it. */
    p.threads = p.batch = p.beam = p.nbest = 1;
    p.batch_tokens = p.min_target = 0;
    p.device = "cpu";
    p.rules = MOE_RULES_PAPER;
    p.prune = p.coverage_penalty = p.rerank = 0;
    p.routing = keep;
    p.routing_user = x;
    p.max_target++; /* for the end of what was cut */
    status = moe_session_new(engine, &p, &x->session, error);
    p.max_target--; /* some models cannot write more */
    return status == MOE_ERROR_ARGUMENT ? moe_session_new(engine, &p, &x->session, error) : status;
}

moe_status experts_open(const moetext_model *model, const char *settings, experts **out, moe_error *error) {
    const moe_model *engine = moetext_model_engine(model);
    const size_t n = moe_model_mixture_count(engine);
    experts *x = calloc(1, sizeof *x);
    if (x) x->layers.layers = calloc(n + 1, sizeof *x->layers.layers);
    moe_status status = !x || !x->layers.layers ? MOE_ERROR_MEMORY : n ? MOE_OK : MOE_ERROR_UNSUPPORTED;
    if (status && error) {
        *error = (moe_error){ .code = status };
        snprintf(error->message, sizeof error->message, "%s", n ? "out of memory" : "no layer has experts");
    }
    for (size_t i = 0; !status && i < n; i++) {
        x->layers.layers[i] = moe_model_mixture(engine, i).layer;
        x->n_encoder += strncmp(x->layers.layers[i], "encoder.", 8) == 0;
    }
    if (x) x->model = model, x->layers.n_layers = n;
    if (!status) status = make_session(x, settings, error);
    if (!status) return *out = x, MOE_OK;
    experts_close(x);
    return status;
}

void experts_close(experts *x) {
    if (!x) return;
    moe_session_free(x->session);
    routing_close(&x->layers, 0, NULL);
    free(x);
}

static int pull(void *user, int wait, moe_request *request) {
    experts *x = user;
    (void)wait;
    if (!x->request.source) return MOE_PULL_END;
    request->source = x->request.source, request->n_source = x->request.n_source;
    request->target = x->request.target, request->n_target = x->request.n_target;
    if (x->request.source_tag >= 0) request->source_tag = x->request.source_tag;
    if (x->request.target_tag >= 0) request->target_tag = x->request.target_tag;
    x->request.source = NULL;
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *result) {
    experts *x = user;
    x->status = result->status;
    snprintf(x->message, sizeof x->message, "%.120s", result->status ? result->message : "");
}

static int32_t tag_of(const experts *x, const char *code) {
    const ptrdiff_t i = code ? moetext_model_language_find(x->model, code) : -1;
    return i < 0 ? -1
                 : moe_model_language_tag(moetext_model_engine(x->model), moetext_model_language(x->model, (size_t)i));
}

static int by_position_and_layer(const void *a, const void *b) {
    const routing_entry *x = a, *y = b;
    if (x->position != y->position) return x->position < y->position ? -1 : 1;
    return x->layer < y->layer ? -1 : x->layer > y->layer;
}

/* Tokens of one side of a part. `written` [n]: those that the steps of a decoder wrote; NULL: an encoder's. */
static void put_tokens(const experts *x, json *j, const int32_t *written, size_t n) {
    const routing_sentence *s = x->sentence;
    size_t position = SIZE_MAX;
    for (size_t i = 0; i < s->n_entries; i++) {
        const routing_entry *e = &s->entries[i];
        if ((e->layer < x->n_encoder) != !written || (written && e->position >= n)) continue;
        if (e->position != position) {
            if (position != SIZE_MAX) json_close(j, ']'), json_close(j, '}');
            size_t length;
            const char *piece = written ? moetext_model_piece(x->model, written[e->position], &length)
                                        : moetext_model_source_piece(x->model, e->token, &length);
            json_open(j, NULL, '{');
            json_clean(j, "token", piece, length);
            json_open(j, "experts", '[');
        }
        position = e->position;
        json_open(j, NULL, '[');
        for (size_t k = e->at; k < e->at + e->n; k++) {
            json_open(j, NULL, '[');
            json_whole(j, NULL, s->experts[k]);
            json_digits(j, NULL, s->weights[k], 4);
            json_close(j, ']');
        }
        json_close(j, ']');
    }
    if (position != SIZE_MAX) json_close(j, ']'), json_close(j, '}');
}

static void put_layers(const experts *x, json *j, size_t first, size_t last) {
    json_open(j, "layers", '[');
    for (size_t i = first; i < last; i++) {
        const moe_mixture layer = moe_model_mixture(moetext_model_engine(x->model), i);
        json_open(j, NULL, '{');
        json_text(j, "layer", layer.layer);
        json_whole(j, "experts", (int64_t)layer.experts);
        json_close(j, '}');
    }
    json_close(j, ']');
    json_open(j, "tokens", '[');
}

moe_status experts_write(experts *x, const char *source, const char *target, const moetext_result *result,
                         text_bytes *out, moe_error *error) {
    text_bytes sides[2] = { { 0 }, { 0 } };
    json j[2] = { { .out = &sides[0] }, { .out = &sides[1] } };
    const moetext_hypothesis *h = result->hypotheses;
    moe_status status = MOE_OK;
    for (int side = 0; side < 2; side++) {
        json_open(&j[side], NULL, '{');
        put_layers(x, &j[side], side ? x->n_encoder : 0, side ? x->layers.n_layers : x->n_encoder);
    }
    for (size_t i = 0; i < result->n_parts && result->n_hypotheses && !status; i++) {
        const size_t from = i ? result->part_ends[i - 1] : 0, begin = i ? h->part_ends[i - 1] : 0;
        const size_t n = h->part_ends[i] - begin;
        if (result->part_ends[i] == from || !n) continue;
        x->request = (moe_request){ .source = result->source_ids + from,
                                    .n_source = result->part_ends[i] - from,
                                    .target = h->ids + begin,
                                    .n_target = n,
                                    .source_tag = tag_of(x, source),
                                    .target_tag = tag_of(x, target) };
        x->sentence = routing_begin(&x->layers, 1);
        status = x->sentence ? moe_translate(x->session, pull, done, x, error) : MOE_ERROR_MEMORY;
        if (!status) status = x->sentence->failed ? MOE_ERROR_MEMORY : x->status;
        if (!status && x->sentence->n_entries)
            qsort(x->sentence->entries, x->sentence->n_entries, sizeof *x->sentence->entries, by_position_and_layer);
        if (!status) put_tokens(x, &j[0], NULL, 0), put_tokens(x, &j[1], h->ids + begin, n);
        if (x->sentence) x->sentence->next = x->layers.spare, x->layers.spare = x->sentence;
    }
    for (int side = 0; side < 2; side++) json_close(&j[side], ']'), json_close(&j[side], '}');
    if (!status && (sides[0].failed || sides[1].failed)) status = MOE_ERROR_MEMORY;
    if (!status) text_printf(out, "{\"source\":"), text_append(out, sides[0].data, sides[0].length);
    if (!status) text_printf(out, ",\"target\":"), text_append(out, sides[1].data, sides[1].length);
    if (!status) text_printf(out, "}");
    text_bytes_free(&sides[0]), text_bytes_free(&sides[1]);
    return status;
}
