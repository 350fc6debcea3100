/* experts.c - collect the experts that the tokens of a text and its translation used. */
#include "tools/server/server.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_PARTS = 32 };                     /* maximum number of parts per text: observing them delays other texts */
enum { SIDE, PART, POSITION, LAYER, ORDERS }; /* SIDE is 0 for the encoder and 1 for the decoder */

typedef struct routed { /* the experts of a token in one mixture */
    size_t order[ORDERS];
    int32_t token;     /* id of the token that the encoder read or the decoder wrote */
    size_t at, length; /* position of the JSON list in experts.lists */
} routed;

struct experts {
    size_t n_parts;
    routed *tokens; /* [n_tokens] */
    size_t n_tokens, capacity;
    text_bytes lists;
};

void experts_free(experts *x) {
    if (!x) return;
    free(x->tokens);
    text_bytes_free(&x->lists);
    free(x);
}

static size_t side_of(const char *layer) { return strncmp(layer, "decoder.", 8) == 0; }

/* Store the experts and weights of a token as JSON. */
static void collect(void *user, const moetext_routing *routing) {
    const moe_model *engine = moetext_model_engine(((const backend *)user)->model);
    experts *x = ((text_item *)routing->user)->collected;
    const moe_routing *r = routing->routing;
    const size_t side = side_of(r->layer);
    size_t layer = 0;
    if (!x || (side && routing->written < 0)) return;
    while (strcmp(moe_model_mixture(engine, layer).layer, r->layer) != 0) layer++;
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
    const routed one = { .order = { side, routing->begin, r->position, layer },
                         .token = side ? routing->written : r->token,
                         .at = begin,
                         .length = x->lists.length - begin };
    x->lists.failed |= text_add(&x->tokens, &x->n_tokens, &x->capacity, &one, 1, sizeof one, NULL) != MOE_OK;
}

void experts_begin(const backend *b, text_item *item, moetext_request *next) {
    if (!item->place || (item->collected && item->collected->n_parts == MOST_PARTS))
        experts_free(item->collected), item->collected = NULL;
    if (!item->place && b->routed) item->collected = calloc(1, sizeof *item->collected);
    if (!item->collected) return;
    item->collected->n_parts++;
    next->routing = collect;
}

static int in_order(const void *a, const void *b) {
    const size_t *x = ((const routed *)a)->order, *y = ((const routed *)b)->order;
    int i = 0;
    while (i < ORDERS - 1 && x[i] == y[i]) i++;
    return x[i] < y[i] ? -1 : x[i] > y[i];
}

/* Write a token with the lists of all its layers. Return the next token. */
static const routed *put_token(const backend *b, const experts *x, json *j, const routed *token) {
    size_t length;
    const char *piece =
        (token->order[SIDE] ? moetext_model_piece : moetext_model_source_piece)(b->model, token->token, &length);
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

/* Write the layers and tokens of a side, whose first token is `token`. Return the first token of the next side. */
static const routed *put_side(const backend *b, const experts *x, json *j, size_t side, const routed *token) {
    const moe_model *engine = moetext_model_engine(b->model);
    json_open(j, side ? "target" : "source", '{');
    json_open(j, "layers", '[');
    for (size_t i = 0; i < moe_model_mixture_count(engine); i++) {
        const moe_mixture layer = moe_model_mixture(engine, i);
        if (side_of(layer.layer) != side) continue;
        json_open(j, NULL, '{');
        json_text(j, "layer", layer.layer);
        json_whole(j, "experts", (int64_t)layer.experts);
        json_close(j, '}');
    }
    json_close(j, ']');
    json_open(j, "tokens", '[');
    while (token < x->tokens + x->n_tokens && token->order[SIDE] == side) token = put_token(b, x, j, token);
    json_close(j, ']');
    json_close(j, '}');
    return token;
}

void experts_write(const backend *b, text_item *item, size_t n_parts) {
    experts *x = item->collected;
    json j = { .out = &item->experts };
    item->collected = NULL;
    if (n_parts <= MOST_PARTS && !x->lists.failed) {
        if (x->n_tokens) qsort(x->tokens, x->n_tokens, sizeof *x->tokens, in_order);
        json_open(&j, NULL, '{');
        put_side(b, x, &j, 1, put_side(b, x, &j, 0, x->tokens));
        json_close(&j, '}');
    }
    experts_free(x);
}
