/* routing.c - routing.h says what this is and has the format and the contracts. */
#define _POSIX_C_SOURCE 200809L

#include "tools/programs/routing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static moe_status no_memory(moe_error *error) {
    *error = (moe_error){ .code = MOE_ERROR_MEMORY, .message = "out of memory" };
    return MOE_ERROR_MEMORY;
}

/* A JSON string. */
static void append_string(text_bytes *out, const char *data, size_t length) {
    text_bytes clean = { 0 };
    text_append_clean(&clean, data, length); /* no control character is left */
    out->failed |= clean.failed;
    text_append(out, "\"", 1);
    for (size_t i = 0; !clean.failed && i < clean.length; i++) {
        if (clean.data[i] == '"' || clean.data[i] == '\\') text_append(out, "\\", 1);
        text_append(out, clean.data + i, 1);
    }
    text_append(out, "\"", 1);
    text_bytes_free(&clean);
}

static moe_status flush_text(routing_file *f, moe_error *error) {
    if (f->text.failed) return no_memory(error);
    const moe_status status = moe_output_write(f->out, f->text.data, f->text.length, error);
    f->text.length = 0;
    return status;
}

/* How many of `n` competing experts or groups are wanted, where the file says `k`. */
static size_t wanted(size_t k, size_t n) { return k ? k : n; }

static void append_header(routing_file *f, const char *gating) {
    const moe_model *m = f->front->model;
    ptrdiff_t name = moe_model_meta_find(m, "general.name");
    moe_span s = name < 0 ? (moe_span){ "", 0 } : moe_model_meta_text(m, (size_t)name, 0);
    text_append_string(&f->text, "{\"model\":");
    append_string(&f->text, s.data, s.length);
    text_append_string(&f->text, ",\"layers\":[");
    for (size_t i = 0; i < f->n_layers; i++) {
        moe_mixture x = moe_model_mixture(m, i);
        size_t k = x.groups ? wanted(x.parent_k, x.groups) * wanted(x.k, x.experts / x.groups) : wanted(x.k, x.experts);
        text_append_string(&f->text, i ? ",{\"layer\":" : "{\"layer\":");
        append_string(&f->text, x.layer, strlen(x.layer));
        text_printf(&f->text, ",\"experts\":%zu,\"groups\":%zu,\"k\":%zu,\"gate\":\"%s\"}", x.experts, x.groups, k,
                    gating ? gating : moe_gate_name(x.gate));
    }
    text_append_string(&f->text, "]}\n");
}

moe_status routing_open(routing_file *f, const text_front *front, const char *path, const char *gating,
                        moe_error *error) {
    size_t n = moe_model_mixture_count(front->model);
    moe_status status = MOE_OK;
    *f = (routing_file){ .front = front, .n_layers = n };
    f->layers = malloc((n + 1) * sizeof *f->layers);
    if (!f->layers) status = no_memory(error);
    for (size_t i = 0; !status && i < n; i++) f->layers[i] = moe_model_mixture(front->model, i).layer;
    if (!status) status = moe_output_open(path, NULL, &f->out, error);
    if (!status) append_header(f, gating);
    if (!status) status = flush_text(f, error);
    if (status) routing_close(f, 0, NULL);
    return status;
}

routing_sentence *routing_begin(routing_file *f, uint64_t line) {
    routing_sentence *s = f->spare;
    if (s) {
        f->spare = s->next;
    } else {
        s = calloc(1, sizeof *s);
        if (!s) return NULL;
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

/* Room for `need` elements. */
static int room_for(void *array, size_t *capacity, size_t need, size_t element) {
    void *old, *grown;
    size_t wanted_now = *capacity + *capacity / 2 + 64;
    if (need <= *capacity) return 1;
    if (wanted_now < need) wanted_now = need;
    memcpy(&old, array, sizeof old);
    if (!(grown = realloc(old, wanted_now * element))) return 0;
    memcpy(array, &grown, sizeof grown);
    *capacity = wanted_now;
    return 1;
}

void routing_keep(routing_sentence *s, const moe_routing *r) {
    size_t layer = 0, same = s->capacity;
    while (layer < s->file->n_layers && strcmp(s->file->layers[layer], r->layer) != 0) layer++;
    if (s->failed || (r->position >= s->steps && strncmp(r->layer, "decoder.", 8) == 0)) return;
    if (!room_for(&s->entries, &s->entries_capacity, s->n_entries + 1, sizeof *s->entries) ||
        !room_for(&s->experts, &same, s->n + r->n, sizeof *s->experts) ||
        !room_for(&s->weights, &s->capacity, s->n + r->n, sizeof *s->weights)) {
        s->failed = 1;
        return;
    }
    s->entries[s->n_entries++] = (routing_entry){ (uint32_t)layer, r->token, r->position, s->n, r->n, r->empty };
    if (!r->n) return;
    memcpy(s->experts + s->n, r->experts, r->n * sizeof *s->experts);
    memcpy(s->weights + s->n, r->weights, r->n * sizeof *s->weights);
    s->n += r->n;
}

void routing_keep_of_job(void *ignored, const moe_routing *r) {
    const text_job *job = r->user;
    (void)ignored;
    if (job->extra) routing_keep(job->extra, r);
}

static int by_layer_and_position(const void *a, const void *b) {
    const routing_entry *x = a, *y = b;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

static void append_entry(routing_file *f, const routing_sentence *s, const routing_entry *e) {
    text_bytes *out = &f->text;
    text_printf(out, "{\"line\":%llu,\"layer\":\"%s\",\"position\":%zu", (unsigned long long)s->line,
                f->layers[e->layer], e->position);
    if (e->token >= 0) {
        moe_span piece = text_piece(f->front, e->token);
        text_printf(out, ",\"id\":%d", (int)e->token);
        if (piece.data) {
            text_append_string(out, ",\"token\":");
            append_string(out, piece.data, piece.length);
        }
    }
    text_append_string(out, ",\"experts\":[");
    for (size_t i = 0; i < e->n; i++) text_printf(out, i ? ",%u" : "%u", (unsigned)s->experts[e->at + i]);
    text_append_string(out, "],\"weights\":[");
    for (size_t i = 0; i < e->n; i++) {
        if (i) text_append(out, ",", 1);
        if (isfinite(s->weights[e->at + i])) text_append_float(out, s->weights[e->at + i]);
        else text_append_string(out, "null");
    }
    text_append_string(out, e->empty ? "],\"empty\":true}\n" : "],\"empty\":false}\n");
}

moe_status routing_put(routing_file *f, routing_sentence *s, moe_error *error) {
    moe_status status = s->failed ? no_memory(error) : MOE_OK;
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
    const moe_status status = moe_output_close(f->out, keep, error);
    for (routing_sentence *s = f->made, *next; s; s = next) {
        next = s->next_made;
        free(s->entries), free(s->experts), free(s->weights), free(s);
    }
    free(f->layers);
    text_bytes_free(&f->text);
    *f = (routing_file){ 0 };
    return status;
}
