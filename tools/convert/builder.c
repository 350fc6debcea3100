/* builder.c - see builder.h */
#include "tools/convert/builder.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void builder_free(builder *b) {
    free(b->tensors);
    b->tensors = NULL;
}

/* ---- Tensors ---- */

built *builder_tensor(builder *b, const char *name, size_t rows, size_t cols, size_t parts) {
    built t = { .rows = rows, .cols = cols };
    t.name = making_keep(b->m, name, strlen(name));
    t.parts = making_keep(b->m, NULL, parts * sizeof *t.parts);
    if (!t.name || !t.parts) return NULL;
    if (!making_failed(b->m, text_add(&b->tensors, &b->n, &b->capacity, &t, 1, sizeof t, b->m->error))) return NULL;
    return &b->tensors[b->n - 1];
}

const stored *builder_take(builder *b, const char *name, const uint64_t dims[4]) {
    stored *t = stored_find(b->list, name);
    char shape[64], own[64];
    stored wanted = { .n_dims = 0 };
    if (b->m->status) return NULL;
    while (wanted.n_dims < 3 && dims[wanted.n_dims]) wanted.dims[wanted.n_dims] = dims[wanted.n_dims], wanted.n_dims++;
    stored_shape(&wanted, shape, sizeof shape);
    if (!t)
        return making_refuse(b->m, b->file,
                             "tensor %.90s is missing: the configuration requires shape %s; download it again", name,
                             shape),
               NULL;
    if (!t->format->decode)
        return making_refuse(b->m, t->file,
                             "number format %s of tensor %.80s is not supported: expected F32, F16 or BF16",
                             t->format->name, t->own),
               NULL;
    if (t->n_dims != wanted.n_dims || memcmp(t->dims, wanted.dims, t->n_dims * sizeof *t->dims) != 0)
        return making_refuse(b->m, t->file, "tensor %.80s has shape %s: the configuration requires %s", t->own,
                             stored_shape(t, own, sizeof own), shape),
               NULL;
    t->taken = 1;
    return t;
}

void builder_part(built *t, const stored *item, uint64_t first, uint64_t rows) {
    if (t && item) t->parts[t->n_parts++] = (built_part){ item, first, rows };
}

built *builder_one(builder *b, const char *name, const char *source, int64_t rows, int64_t cols) {
    built *t = builder_tensor(b, name, (size_t)rows, (size_t)cols, 1);
    builder_part(t, builder_take(b, source, (const uint64_t[4]){ (uint64_t)rows, (uint64_t)cols }), 0, (uint64_t)rows);
    return b->m->status ? NULL : t;
}

int builder_all_taken(builder *b, const char *ignored) {
    char shape[64];
    for (size_t i = 0; i < b->list->n && b->m->status == MOE_OK; i++) {
        const stored *t = &b->list->items[i];
        if (!t->taken && !text_ends_with(t->name, strlen(t->name), ignored))
            return making_refuse(b->m, t->file, "unexpected tensor %.80s %s: not described by the configuration",
                                 t->own, stored_shape(t, shape, sizeof shape));
    }
    return b->m->status == MOE_OK;
}

/* ---- Layers ---- */

void builder_key(builder *b, const char *layer, const char *key, int64_t value) {
    char all[96];
    snprintf(all, sizeof all, "%s.%s", layer, key);
    making_put_int(b->m, all, value);
}

void builder_word(builder *b, const char *layer, const char *key, const char *value) {
    char all[96];
    snprintf(all, sizeof all, "%s.%s", layer, key);
    making_put_text(b->m, all, value);
}

void builder_real(builder *b, const char *layer, const char *key, double value) {
    char all[96];
    snprintf(all, sizeof all, "%s.%s", layer, key);
    making_put_real(b->m, all, value);
}

void builder_layer(builder *b, const char *side, const char *kind, char *name) {
    const int which = strcmp(side, "decoder") == 0 ? 1 : strcmp(side, "predict") == 0 ? 2 : 0;
    snprintf(name, 24, "%s.%d", side, b->layers[which]++);
    builder_word(b, name, "kind", kind);
}

/* ---- Writing ---- */

/* Stop moe_model_write, which rejects this number. */
static void stop_at(builder *b, const built *t, const stored *item, const char *problem, float *out) {
    const char *own = item && !t->experts ? item->own : NULL;
    making_refuse(b->m, item ? item->file : "", "tensor %.80s %s", own ? own : t->name, problem);
    out[0] = NAN;
}

/* Return 1 if Q8 can represent a row. */
static int fits_q8(const float *row, size_t cols) {
    float largest = 0;
    for (size_t i = 0; i < cols; i++) largest = fabsf(row[i]) > largest ? fabsf(row[i]) : largest;
    return !(largest > 0) || !isinf(127.0f / largest);
}

/* Read rows column by column, as the engine needs the weights of a convolution. */
static void fill_columns(builder *b, const built *t, float *out) {
    const size_t rows = t->rows / t->kernel;
    for (size_t i = 0; i < rows; i++) {
        float row[64];
        if (!stored_row(t->parts->item, i, row, t->kernel)) {
            stop_at(b, t, t->parts->item, "contains values that are not finite", out);
            return;
        }
        for (size_t k = 0; k < t->kernel; k++) out[k * rows + i] = row[k];
    }
}

/* Read a vector, which may have several parts. */
static void fill_vector(builder *b, const built *t, float *out) {
    if (t->kernel) {
        fill_columns(b, t, out);
        return;
    }
    for (size_t i = 0, at = 0; i < t->n_parts; at += (size_t)t->parts[i++].rows) {
        const built_part *p = &t->parts[i];
        if (!p->item) memset(out + at, 0, (size_t)p->rows * sizeof *out);
        else if (!stored_row(p->item, p->first, out + at, (size_t)p->rows))
            stop_at(b, t, p->item, "contains values that are not finite", out);
    }
    if (t->changed)
        for (size_t i = 0; i < t->rows; i++) out[i] = (out[i] + t->offset) * t->scale;
    for (size_t i = 0; i < t->rows && t->log_rate; i++) {
        if (!(out[i] < 88)) {
            stop_at(b, t, t->parts->item, "contains a value that is too large", out);
            return;
        }
        out[i] = (float)-exp((double)out[i]);
    }
}

/* Return the part of a matrix with row *row, and set *row to the row in it. */
static const built_part *part_of(const built *t, size_t *row) {
    const built_part *p = t->parts;
    while (*row >= p->rows) *row -= (size_t)p++->rows;
    return p;
}

static void fill(void *user, size_t index, size_t piece, size_t row, float *out, size_t cols) {
    builder *b = user;
    const built *t = &b->tensors[index];
    const built_part *p;
    if (t->make) {
        t->make(t->made_from, row, out, cols);
        return;
    }
    if (!t->cols) {
        fill_vector(b, t, out);
        return;
    }
    if (t->experts) {
        const size_t matrices = b->gated ? 3 : 2, k = row / t->rows < matrices ? row / t->rows : matrices - 1;
        p = &t->parts[matrices * piece + k];
        row -= k * t->rows;
    } else {
        p = part_of(t, &row);
    }
    if (!p->item) memset(out, 0, cols * sizeof *out);
    else if (!stored_row(p->item, p->first + row, out, cols))
        stop_at(b, t, p->item, "contains values that are not finite", out);
    else if ((t->experts ? b->experts : b->type) == MOE_TYPE_Q8 && !t->f32 && !fits_q8(out, cols))
        stop_at(b, t, p->item, "has a row whose largest weight is too small to quantise (below 4e-37)", out);
}

/* Copy the codes of a row if all parts of its tensor have codes with a scale per row. */
static int fill_codes(void *user, size_t index, size_t row, int8_t *codes, size_t cols, float *scale) {
    const built *t = &((const builder *)user)->tensors[index];
    int coded = !t->make && !t->experts && t->cols;
    for (size_t i = 0; coded && i < t->n_parts; i++) coded = !t->parts[i].item || stored_has_codes(t->parts[i].item);
    if (!coded) return 0;
    const built_part *p = part_of(t, &row);
    *scale = 0.0f;
    memset(codes, 0, cols);
    if (p->item) stored_codes(p->item, p->first + row, codes, cols, scale);
    return 1;
}

int builder_write(builder *b, uint64_t source) {
    moe_tensor_spec *specs = making_keep(b->m, NULL, b->n * sizeof *specs);
    if (!specs) return 0;
    for (size_t i = 0; i < b->n; i++) {
        const built *t = &b->tensors[i];
        specs[i] =
            (moe_tensor_spec){ .name = t->name,
                               .type = t->experts           ? b->experts
                                       : t->cols && !t->f32 ? b->type
                                                            : MOE_TYPE_F32,
                               .n_dims = t->experts ? 3
                                         : t->cols  ? 2
                                                    : 1,
                               .dims = { t->experts ? t->experts : t->rows, t->experts ? t->rows : t->cols, t->cols } };
    }
    const moe_write_params params = { .entries = b->m->entries,
                                      .n_entries = b->m->n_entries,
                                      .tensors = specs,
                                      .n_tensors = b->n,
                                      .fill = fill,
                                      .codes = fill_codes,
                                      .user = b,
                                      .gated = b->gated };
    return making_write(b->m, &params, source);
}
