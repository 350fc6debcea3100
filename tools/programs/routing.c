/* routing.c - write routing files; interface and format are documented in routing.h. */
#define _POSIX_C_SOURCE 200809L

#include "tools/programs/routing.h"
#include "tools/text/json.h"

#include <stdlib.h>
#include <string.h>

static moe_status flush_text(routing_file *f, moe_error *error) {
    if (f->text.failed) return text_out_of_memory(error);
    if (!f->out) return MOE_OK; /* another process writes f->text */
    const moe_status status = output_write(f->out, f->text.data, f->text.length, error);
    f->text.length = 0;
    return status;
}

/* Return how many of `n` experts or groups are selected; `k` is the value in the file, 0 if absent. */
static size_t wanted(size_t k, size_t n) { return k ? k : n; }

/* Append the given language as the model spells it. If none is given, append the model's only language on this side. */
static void append_language(json *j, const char *key, const moe_model *m, const char *named, int target) {
    const text_codes all = text_languages_of(m, target);
    const moe_span code = named        ? text_language_spelled(m, named, target)
                          : all.n == 1 ? text_code_at(&all, 0)
                                       : (moe_span){ NULL, 0 };
    if (code.data) json_clean(j, key, code.data, code.length);
}

static void append_header(routing_file *f, const char *gating, const char *const languages[2]) {
    const moe_model *m = f->front->model;
    json j = { .out = &f->text };
    ptrdiff_t name = moe_model_meta_find(m, "general.name");
    moe_span s = name < 0 ? (moe_span){ "", 0 } : moe_model_meta_text(m, (size_t)name, 0);
    json_open(&j, NULL, '{');
    json_clean(&j, "model", s.data, s.length);
    append_language(&j, "source", m, languages[0], 0);
    append_language(&j, "target", m, languages[1], 1);
    json_open(&j, "layers", '[');
    for (size_t i = 0; i < f->n_layers; i++) {
        moe_mixture x = moe_model_mixture(m, i);
        size_t k = x.groups ? wanted(x.parent_k, x.groups) * wanted(x.k, x.experts / x.groups) : wanted(x.k, x.experts);
        json_open(&j, NULL, '{');
        json_text(&j, "layer", x.layer);
        json_whole(&j, "experts", (int64_t)x.experts);
        json_whole(&j, "groups", (int64_t)x.groups);
        json_whole(&j, "k", (int64_t)k);
        json_text(&j, "gate", gating ? gating : moe_gate_name(x.gate));
        json_close(&j, '}');
    }
    json_close(&j, ']');
    json_close(&j, '}');
    text_append(&f->text, "\n", 1);
}

moe_status routing_open(routing_file *f, const text_front *front, const char *path, const char *gating,
                        const char *const languages[2], moe_error *error) {
    size_t n = moe_model_mixture_count(front->model);
    *f = (routing_file){ .front = front, .n_layers = n };
    f->layers = malloc((n + 1) * sizeof *f->layers);
    moe_status status = f->layers ? MOE_OK : text_out_of_memory(error);
    for (size_t i = 0; !status && i < n; i++) f->layers[i] = moe_model_mixture(front->model, i).layer;
    if (!status && path) status = output_open(path, &f->out, error);
    if (!status && path) append_header(f, gating, languages);
    if (!status) status = flush_text(f, error);
    if (status) routing_close(f, 0, NULL);
    return status;
}

routing_sentence *routing_begin(routing_file *f, uint64_t line) {
    routing_sentence *s = f->spare;
    if (s) f->spare = s->next;
    else {
        if (!(s = calloc(1, sizeof *s))) return NULL;
        s->file = f;
        s->next_made = f->made;
        f->made = s;
    }
    s->next = NULL;
    s->line = line;
    s->steps = SIZE_MAX;
    s->n_entries = s->n = 0;
    s->failed = 0;
    return s;
}

void routing_keep(routing_sentence *s, const moe_routing *r) {
    size_t layer = 0, same = s->capacity;
    while (layer < s->file->n_layers && strcmp(s->file->layers[layer], r->layer) != 0) layer++;
    if (s->failed || (r->position >= s->steps && strncmp(r->layer, "decoder.", 8) == 0)) return;
    s->failed = text_reserve(&s->entries, &s->entries_capacity, s->n_entries + 1, sizeof *s->entries, NULL) ||
                text_reserve(&s->experts, &same, s->n + r->n, sizeof *s->experts, NULL) ||
                text_reserve(&s->weights, &s->capacity, s->n + r->n, sizeof *s->weights, NULL);
    if (s->failed) return;
    s->entries[s->n_entries++] = (routing_entry){ (uint32_t)layer, r->token, r->position, s->n, r->n, r->empty };
    if (!r->n) return;
    memcpy(s->experts + s->n, r->experts, r->n * sizeof *s->experts);
    memcpy(s->weights + s->n, r->weights, r->n * sizeof *s->weights);
    s->n += r->n;
}

moe_status routing_add(routing_file *f, const char *text, size_t length, moe_error *error) {
    text_append(&f->text, text, length);
    return flush_text(f, error);
}

static int by_layer_and_position(const void *a, const void *b) {
    const routing_entry *x = a, *y = b;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

static void append_entry(routing_file *f, const routing_sentence *s, const routing_entry *e) {
    json j = { .out = &f->text };
    json_open(&j, NULL, '{');
    json_whole(&j, "line", (int64_t)s->line);
    json_text(&j, "layer", f->layers[e->layer]);
    json_whole(&j, "position", (int64_t)e->position);
    if (e->token >= 0) {
        const int source = f->layers[e->layer][0] == 'e'; /* encoder.0 */
        moe_span piece = source ? text_source_piece(f->front, e->token) : text_piece(f->front, e->token);
        json_whole(&j, "id", e->token);
        if (piece.data) json_clean(&j, "token", piece.data, piece.length);
    }
    json_open(&j, "experts", '[');
    for (size_t i = 0; i < e->n; i++) json_whole(&j, NULL, s->experts[e->at + i]);
    json_close(&j, ']');
    json_open(&j, "weights", '[');
    for (size_t i = 0; i < e->n; i++) json_float(&j, NULL, s->weights[e->at + i]);
    json_close(&j, ']');
    json_bool(&j, "empty", e->empty);
    json_close(&j, '}');
    text_append(&f->text, "\n", 1);
}

moe_status routing_put(routing_file *f, routing_sentence *s, moe_error *error) {
    moe_status status = s->failed ? text_out_of_memory(error) : MOE_OK;
    if (s->n_entries) qsort(s->entries, s->n_entries, sizeof *s->entries, by_layer_and_position);
    for (size_t i = 0; !status && i < s->n_entries; i++) {
        append_entry(f, s, &s->entries[i]);
        if (f->text.length > 1 << 16 || i + 1 == s->n_entries) status = flush_text(f, error);
    }
    s->next = f->spare;
    f->spare = s;
    return status;
}

moe_status routing_close(routing_file *f, int keep, moe_error *error) {
    const moe_status status = f->out ? output_close(f->out, keep, error) : MOE_OK;
    for (routing_sentence *s = f->made, *next; s; s = next) {
        next = s->next_made;
        free(s->entries), free(s->experts), free(s->weights), free(s);
    }
    free(f->layers);
    text_bytes_free(&f->text);
    *f = (routing_file){ 0 };
    return status;
}
