/* experts.c - find the experts that the tokens of a text and its translation used, one result at a time. */
#include "tools/server/server.h"
#include "tools/text/settings.h"

#include <stdlib.h>
#include <string.h>

enum { SIDE, PART, POSITION, LAYER, ORDERS }; /* SIDE is 0 for the encoder and 1 for the decoder */

typedef struct routed { /* the experts of a token in one mixture */
    size_t order[ORDERS];
    int32_t token;     /* id of the token that the encoder read or the decoder wrote */
    size_t at, length; /* position of the JSON list in experts.lists */
} routed;

struct experts {
    const moetext_model *model;
    const moe_model *engine;
    moe_session *session;
    size_t n_layers, n_encoder; /* number of mixtures in the model and in its encoder */
    routed *tokens;             /* [n_tokens] entries of the current result */
    size_t n_tokens, capacity;
    text_bytes lists;

    moe_request request; /* the part to score; `source` is NULL once the request has been pulled */
    size_t part;
    moe_status status;
};

/* Store the experts and weights of a token as JSON. */
static void keep(void *user, const moe_routing *r) {
    experts *x = user;
    size_t layer = 0;
    while (layer < x->n_layers && strcmp(moe_model_mixture(x->engine, layer).layer, r->layer) != 0) layer++;
    const int writes = layer >= x->n_encoder;
    if (writes && r->position >= x->request.n_target) return; /* skip the end token */
    json j = { .out = &x->lists };
    const size_t begin = x->lists.length;
    json_open(&j, NULL, '[');
    for (size_t i = 0; i < r->n; i++) {
        json_open(&j, NULL, '[');
        json_whole(&j, NULL, r->experts[i]);
        json_digits(&j, NULL, r->weights[i], 4);
        json_close(&j, ']');
    }
    json_close(&j, ']');
    const routed one = { .order = { (size_t)writes, x->part, r->position, layer },
                         .token = writes ? x->request.target[r->position] : r->token,
                         .at = begin,
                         .length = x->lists.length - begin };
    x->lists.failed |= text_add(&x->tokens, &x->n_tokens, &x->capacity, &one, 1, sizeof one, NULL) != MOE_OK;
}

static moe_session *new_session(experts *x, const char *settings) {
    moe_session *session = NULL;
    text_settings wanted = text_settings_none();
    moe_session_params p = moe_session_params_default(x->engine);
    if (text_settings_parse(&wanted, settings, NULL)) return NULL;
    text_settings_apply(&wanted, &p);
    /* Score one sentence, as moe-translate --routing does. */
    p.threads = p.batch = p.beam = p.nbest = 1;
    p.batch_tokens = p.min_target = 0;
    p.device = "cpu";
    p.rules = MOE_RULES_PAPER;
    p.prune = p.coverage_penalty = p.rerank = 0;
    p.routing = keep, p.routing_user = x;
    p.max_target++; /* room for the end token of a cut translation, if the model has a position for it */
    if (moe_session_new(x->engine, &p, &session, NULL) != MOE_ERROR_ARGUMENT) return session;
    p.max_target--;
    return moe_session_new(x->engine, &p, &session, NULL) ? NULL : session;
}

experts *experts_open(const moetext_model *model, const char *settings) {
    const moe_model *engine = moetext_model_engine(model);
    const size_t n = engine ? moe_model_mixture_count(engine) : 0;
    experts *x = n ? calloc(1, sizeof *x) : NULL;
    if (!x) return NULL;
    x->model = model, x->engine = engine, x->n_layers = n;
    while (x->n_encoder < n && strncmp(moe_model_mixture(engine, x->n_encoder).layer, "encoder.", 8) == 0)
        x->n_encoder++;
    if ((x->session = new_session(x, settings))) return x;
    return experts_close(x), NULL;
}

void experts_close(experts *x) {
    if (!x) return;
    moe_session_free(x->session);
    free(x->tokens);
    text_bytes_free(&x->lists);
    free(x);
}

static int pull(void *user, int wait, moe_request *next) {
    experts *x = user;
    (void)wait;
    if (!x->request.source) return MOE_PULL_END;
    next->source = x->request.source, next->n_source = x->request.n_source;
    next->target = x->request.target, next->n_target = x->request.n_target;
    if (x->request.source_tag >= 0) next->source_tag = x->request.source_tag;
    if (x->request.target_tag >= 0) next->target_tag = x->request.target_tag;
    x->request.source = NULL;
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *result) { ((experts *)user)->status = result->status; }

static int32_t tag_of(const experts *x, const char *code) {
    const ptrdiff_t i = code ? moetext_model_language_find(x->model, code) : -1;
    return i < 0 ? -1 : moe_model_language_tag_at(x->engine, (size_t)i);
}

static int in_order(const void *a, const void *b) {
    const size_t *x = ((const routed *)a)->order, *y = ((const routed *)b)->order;
    int i = 0;
    while (i < ORDERS - 1 && x[i] == y[i]) i++;
    return x[i] < y[i] ? -1 : x[i] > y[i];
}

/* Write a token with the lists of all its layers. Return the next token. */
static const routed *put_token(const experts *x, json *j, const routed *token) {
    size_t length;
    const char *piece = token->order[SIDE] ? moetext_model_piece(x->model, token->token, &length)
                                           : moetext_model_source_piece(x->model, token->token, &length);
    const routed *at = token, *end = x->tokens + x->n_tokens;
    json_open(j, NULL, '{');
    json_clean(j, "token", piece, length);
    json_open(j, "experts", '[');
    for (; at < end && memcmp(at->order, token->order, LAYER * sizeof *at->order) == 0; at++) {
        if (at > token) text_append(j->out, ",", 1);
        text_append(j->out, x->lists.data + at->at, at->length);
    }
    json_close(j, ']');
    json_close(j, '}');
    return at;
}

/* Write the layers and tokens of the encoder (side 0) or decoder (side 1). Return the first token of the next side. */
static const routed *put_side(const experts *x, json *j, size_t side, const routed *token) {
    json_open(j, side ? "target" : "source", '{');
    json_open(j, "layers", '[');
    for (size_t i = side ? x->n_encoder : 0; i < (side ? x->n_layers : x->n_encoder); i++) {
        const moe_mixture layer = moe_model_mixture(x->engine, i);
        json_open(j, NULL, '{');
        json_text(j, "layer", layer.layer);
        json_whole(j, "experts", (int64_t)layer.experts);
        json_close(j, '}');
    }
    json_close(j, ']');
    json_open(j, "tokens", '[');
    while (token < x->tokens + x->n_tokens && token->order[SIDE] == side) token = put_token(x, j, token);
    json_close(j, ']');
    json_close(j, '}');
    return token;
}

int experts_write(experts *x, const char *source, const char *target, const moetext_result *result, text_bytes *out) {
    const moetext_hypothesis *h = result->hypotheses;
    json j = { .out = out };
    x->n_tokens = 0;
    text_clear(&x->lists);
    for (x->part = 0; x->part < result->n_parts; x->part++) {
        const size_t i = x->part, from = i ? result->part_ends[i - 1] : 0, begin = i ? h->part_ends[i - 1] : 0;
        x->request = (moe_request){ .source = result->source_ids + from,
                                    .n_source = result->part_ends[i] - from,
                                    .target = h->ids + begin,
                                    .n_target = h->part_ends[i] - begin,
                                    .source_tag = tag_of(x, source),
                                    .target_tag = tag_of(x, target) };
        if (!x->request.n_source || !x->request.n_target) continue;
        if (moe_translate(x->session, pull, done, x, NULL) || x->status || x->lists.failed) return 0;
    }
    if (x->n_tokens) qsort(x->tokens, x->n_tokens, sizeof *x->tokens, in_order);
    json_open(&j, NULL, '{');
    put_side(x, &j, 1, put_side(x, &j, 0, x->tokens));
    json_close(&j, '}');
    return 1;
}
