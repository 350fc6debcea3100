#include "tools/server/experts.h"
#include "tools/text/json.h"
#include "tools/text/settings.h"

#include <stdlib.h>
#include <string.h>

typedef struct routed {            /* a token in a mixture */
    size_t layer, position, at, n; /* experts and weights [at .. at + n) */
    int32_t token;
} routed;

struct experts {
    const moetext_model *model;
    moe_session *session;
    size_t n_layers, n_encoder; /* mixtures of the model; those of its encoder */
    routed *tokens;             /* [n_tokens] of the part being scored */
    uint32_t *experts;
    float *weights;
    size_t n_tokens, n, token_capacity, expert_capacity, weight_capacity;
    int failed;

    moe_request request; /* the part to score; source NULL after it was pulled */
    moe_status status;
};

static const char *layer_name(const experts *x, size_t i) {
    return moe_model_mixture(moetext_model_engine(x->model), i).layer;
}

static void keep(void *user, const moe_routing *r) {
    experts *x = user;
    size_t layer = 0;
    while (layer < x->n_layers && strcmp(layer_name(x, layer), r->layer) != 0) layer++;
    routed *tokens = text_grown(x->tokens, &x->token_capacity, x->n_tokens + 1, sizeof *tokens);
    uint32_t *numbers = text_grown(x->experts, &x->expert_capacity, x->n + r->n, sizeof *numbers);
    float *weights = text_grown(x->weights, &x->weight_capacity, x->n + r->n, sizeof *weights);
    if (tokens) x->tokens = tokens;
    if (numbers) x->experts = numbers;
    if (weights) x->weights = weights;
    x->failed |= !tokens || !numbers || !weights;
    if (x->failed) return;
    x->tokens[x->n_tokens++] = (routed){ layer, r->position, x->n, r->n, r->token };
    if (r->n) memcpy(x->experts + x->n, r->experts, r->n * sizeof *r->experts);
    if (r->n) memcpy(x->weights + x->n, r->weights, r->n * sizeof *r->weights);
    x->n += r->n;
}

static moe_status make_session(experts *x, const char *settings, moe_error *error) {
    const moe_model *engine = moetext_model_engine(x->model);
    text_settings wanted = text_settings_none();
    moe_session_params p = moe_session_params_default(engine);
    moe_status status = text_settings_parse(&wanted, settings, error);
    if (status) return status;
    text_settings_apply(&wanted, &p);
    /* One sentence, scored as moe-translate --routing does. */
    p.threads = p.batch = p.beam = p.nbest = 1;
    p.batch_tokens = p.min_target = 0;
    p.device = "cpu";
    p.rules = MOE_RULES_PAPER;
    p.prune = p.coverage_penalty = p.rerank = 0;
    p.routing = keep;
    p.routing_user = x;
    p.max_target++; /* room for the end of a cut translation */
    status = moe_session_new(engine, &p, &x->session, error);
    p.max_target--; /* some models have no room for it */
    return status == MOE_ERROR_ARGUMENT ? moe_session_new(engine, &p, &x->session, error) : status;
}

moe_status experts_open(const moetext_model *model, const char *settings, experts **out, moe_error *error) {
    const size_t n = moe_model_mixture_count(moetext_model_engine(model));
    experts *x = n ? calloc(1, sizeof *x) : NULL;
    if (!x) {
        if (error) *error = (moe_error){ .code = n ? MOE_ERROR_MEMORY : MOE_ERROR_UNSUPPORTED };
        return n ? MOE_ERROR_MEMORY : MOE_ERROR_UNSUPPORTED;
    }
    x->model = model, x->n_layers = n;
    for (size_t i = 0; i < n; i++) x->n_encoder += strncmp(layer_name(x, i), "encoder.", 8) == 0;
    const moe_status status = make_session(x, settings, error);
    if (!status) return *out = x, MOE_OK;
    experts_close(x);
    return status;
}

void experts_close(experts *x) {
    if (!x) return;
    moe_session_free(x->session);
    free(x->tokens), free(x->experts), free(x->weights);
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
}

static int32_t tag_of(const experts *x, const char *code) {
    const ptrdiff_t i = code ? moetext_model_language_find(x->model, code) : -1;
    return i < 0 ? -1
                 : moe_model_language_tag(moetext_model_engine(x->model), moetext_model_language(x->model, (size_t)i));
}

static int by_position_and_layer(const void *a, const void *b) {
    const routed *x = a, *y = b;
    if (x->position != y->position) return x->position < y->position ? -1 : 1;
    return x->layer < y->layer ? -1 : x->layer > y->layer;
}

/* Write the tokens of one side of a part. written: [n] tokens that the decoder's steps wrote; NULL: the encoder's. */
static void put_tokens(const experts *x, json *j, const int32_t *written, size_t n) {
    size_t position = SIZE_MAX;
    for (size_t i = 0; i < x->n_tokens; i++) {
        const routed *e = &x->tokens[i];
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
            json_whole(j, NULL, x->experts[k]);
            json_digits(j, NULL, x->weights[k], 4);
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
        put_layers(x, &j[side], side ? x->n_encoder : 0, side ? x->n_layers : x->n_encoder);
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
        x->n_tokens = x->n = 0, x->failed = 0;
        status = moe_translate(x->session, pull, done, x, error);
        if (!status) status = x->failed ? MOE_ERROR_MEMORY : x->status;
        if (!status && x->n_tokens) qsort(x->tokens, x->n_tokens, sizeof *x->tokens, by_position_and_layer);
        if (!status) put_tokens(x, &j[0], NULL, 0), put_tokens(x, &j[1], h->ids + begin, n);
    }
    for (int side = 0; side < 2; side++) json_close(&j[side], ']'), json_close(&j[side], '}');
    if (!status && (sides[0].failed || sides[1].failed)) status = MOE_ERROR_MEMORY;
    if (!status) text_printf(out, "{\"source\":"), text_append(out, sides[0].data, sides[0].length);
    if (!status) text_printf(out, ",\"target\":"), text_append(out, sides[1].data, sides[1].length);
    if (!status) text_printf(out, "}");
    text_bytes_free(&sides[0]), text_bytes_free(&sides[1]);
    return status;
}
