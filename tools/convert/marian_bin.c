/* marian_bin.c - see marian_bin.h. All integers are little-endian:
 *   u64 version, u64 n; n x { u64 name length with NUL, u64 type, u64 dimensions, u64 bytes }; names; shapes, int32
 * each; u64 padding, so that the data starts at a multiple of 256; data of the items in order */
#include "tools/convert/marian_bin.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST_NAME = 256, ALIGNMENT = 256, HEAD_BYTES = 32 };
static const char settings_name[] = "special:model.yml", multiplier_name[] = "_QuantMultA";

typedef struct reader {
    const packed_file *file;
    const char *name;
    size_t at;
    moe_error *error;
} reader;

#define DAMAGED(r, ...) text_fail((r)->error, MOE_ERROR_FORMAT, (r)->name, __VA_ARGS__)

static const uint8_t *take(reader *r, uint64_t bytes) {
    const uint8_t *p = r->file->data + r->at;
    if (bytes > r->file->size - r->at) return NULL;
    r->at += (size_t)bytes;
    return p;
}

static uint64_t number(const uint8_t *p, size_t bytes) {
    uint64_t v = 0;
    for (size_t i = bytes; i-- > 0;) v = v << 8 | p[i];
    return v;
}

/* Return the first item with this name after *at, or NULL. */
static bin_item *next_item(const bin_file *bin, const char *name, size_t *at) {
    for (uint32_t i, hash = text_hash(name, strlen(name)); (i = text_index_next(&bin->index, hash, at)) != TEXT_NONE;)
        if (strcmp(bin->items[i].name, name) == 0) return &bin->items[i];
    return NULL;
}

bin_item *bin_find(const bin_file *bin, const char *name) {
    size_t at = 0;
    return next_item(bin, name, &at);
}

/* Read the name of item `i`. */
static moe_status read_name(reader *r, bin_file *bin, size_t i, uint64_t length, uint64_t n_dims) {
    if (length < 2 || length > LONGEST_NAME || n_dims > BIN_MAX_DIMENSIONS)
        return DAMAGED(r, "%.100s: invalid item: name of %llu bytes, %llu dimensions: damaged", r->name,
                       (unsigned long long)length, (unsigned long long)n_dims);
    const char *name = (const char *)take(r, length);
    if (!name) return DAMAGED(r, "%.100s: the header is truncated", r->name);
    int valid = !name[length - 1];
    for (size_t k = 0; k + 1 < length; k++) valid &= name[k] >= 0x20 && name[k] <= 0x7e;
    if (!valid) return DAMAGED(r, "%.100s: invalid name of item %zu: damaged", r->name, i);
    if (bin_find(bin, name)) return DAMAGED(r, "%.80s: duplicate name %.80s: damaged", r->name, name);
    bin->items[i].name = name;
    bin->items[i].n_dims = (uint32_t)n_dims;
    return text_index_add(&bin->index, text_hash(name, (size_t)length - 1), i) ? MOE_OK : text_out_of_memory(r->error);
}

/* Read the shape of an item. Its number of elements is at most SIZE_MAX / 8, which no file has. */
static moe_status read_shape(reader *r, bin_item *item) {
    const uint8_t *p = take(r, 4 * item->n_dims);
    if (!p) return DAMAGED(r, "%.100s: the header is truncated", r->name);
    item->elements = 1;
    for (uint32_t d = 0; d < item->n_dims; d++) {
        const uint64_t n = number(p + 4 * d, 4);
        if (!n || n > INT32_MAX) return DAMAGED(r, "%.80s: %.80s has an invalid shape: damaged", r->name, item->name);
        item->dims[d] = (uint32_t)n;
        item->elements = item->elements > SIZE_MAX / 8 / n ? SIZE_MAX / 8 : item->elements * (size_t)n;
    }
    return MOE_OK;
}

/* Read the data of an item with this type and length. Returns 1 in *kept if the item is a tensor to convert. */
static moe_status read_data(reader *r, bin_file *bin, bin_item *item, uint64_t kind, uint64_t length, int *kept) {
    const char *name = item->name;
    item->data = take(r, length);
    if (!name || !item->data) return DAMAGED(r, "%.80s: %.80s is truncated", r->name, name ? name : "an item");
    if (strcmp(name, settings_name) == 0) {
        if (kind != BIN_TEXT || length != item->elements || length > BIN_MAX_TEXT)
            return DAMAGED(r, "%.80s: %s is not text: damaged", r->name, name);
        bin->settings = (moe_span){ (const char *)item->data, (size_t)length };
        return MOE_OK;
    }
    if (kind != BIN_FLOAT && kind != BIN_CODES8 && kind != BIN_CODES16)
        return DAMAGED(r,
                       "%.60s: %.60s has unsupported type %#llx; expected float32, intgemm8 or intgemm16 (CPU-specific "
                       "packed formats are unsupported)",
                       r->name, name, (unsigned long long)kind);
    const uint64_t wanted = kind == BIN_FLOAT    ? 4 * (uint64_t)item->elements
                            : kind == BIN_CODES8 ? (uint64_t)item->elements + 4
                                                 : 2 * (uint64_t)item->elements + 4;
    if (length < wanted || length >= wanted + ALIGNMENT)
        return DAMAGED(r, "%.80s: %.80s has %llu bytes, not %llu + padding: damaged", r->name, name,
                       (unsigned long long)length, (unsigned long long)wanted);
    item->kind = (bin_kind)kind;
    *kept = !text_ends_with(name, strlen(name), multiplier_name);
    return MOE_OK;
}

static moe_status read_items(reader *r, bin_file *bin, size_t n, const uint8_t *heads) {
    moe_status status = MOE_OK;
    for (size_t i = 0; i < n && status == MOE_OK; i++)
        status = read_name(r, bin, i, number(heads + i * HEAD_BYTES, 8), number(heads + i * HEAD_BYTES + 16, 8));
    for (size_t i = 0; i < n && status == MOE_OK; i++) status = read_shape(r, &bin->items[i]);
    if (status) return status;
    const uint8_t *p = take(r, 8);
    const uint64_t padding = p ? number(p, 8) : UINT64_MAX;
    if (!p || !take(r, padding) || r->at % ALIGNMENT)
        return DAMAGED(r, "%.100s: the data is not aligned to %d bytes: damaged", r->name, ALIGNMENT);
    for (size_t i = 0; i < n; i++) { /* the others are marked as taken */
        int kept = 0;
        const uint8_t *head = heads + i * HEAD_BYTES;
        if ((status = read_data(r, bin, &bin->items[i], number(head + 8, 8), number(head + 24, 8), &kept)))
            return status;
        bin->items[i].taken = !kept;
    }
    if (r->at != r->file->size)
        return DAMAGED(r, "%.100s: %zu bytes after the last item: damaged", r->name, r->file->size - r->at);
    return MOE_OK;
}

moe_status bin_read(const packed_file *file, const char *name, bin_file *bin, moe_error *error) {
    reader r = { file, name, 0, error };
    const uint8_t *start = file->size >= 64 ? take(&r, 16) : NULL;
    *bin = (bin_file){ 0 };
    if (!start) return DAMAGED(&r, "%.100s: not a Marian .bin file, or truncated", name);
    const uint64_t version = number(start, 8), n = number(start + 8, 8);
    if (version != 1 || n < 1 || n > BIN_MAX_ITEMS)
        return DAMAGED(&r, "%.100s: not a Marian model: expected a .bin of version 1", name);
    const uint8_t *heads = take(&r, n * HEAD_BYTES);
    if (!heads) return DAMAGED(&r, "%.100s: the header is truncated", name);
    bin->n = (size_t)n;
    bin->items = calloc(bin->n, sizeof *bin->items);
    return bin->items ? read_items(&r, bin, bin->n, heads) : text_out_of_memory(error);
}

void bin_free(bin_file *bin) {
    free(bin->items);
    text_index_free(&bin->index);
    *bin = (bin_file){ 0 };
}

/* ---- Numbers ---- */

static float float_at(const uint8_t *p) {
    const uint32_t bits = (uint32_t)number(p, 4);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static int16_t short_at(const uint8_t *p) { return (int16_t)(uint16_t)(p[0] | p[1] << 8); }

float bin_scale(const bin_item *item) {
    return 1.0f / float_at(item->data + item->elements * (item->kind == BIN_CODES8 ? 1 : 2));
}

moe_status bin_check(const bin_item *item, const char *name, moe_error *error) {
    int valid = 1;
    if (item->kind == BIN_FLOAT) {
        for (size_t i = 0; i < item->elements && valid; i++) valid = isfinite(float_at(item->data + 4 * i)) != 0;
        if (valid) return MOE_OK;
        return text_fail(error, MOE_ERROR_FORMAT, name, "%.80s: tensor %.80s contains values that are not finite", name,
                         item->name);
    }
    const float multiplier = float_at(item->data + item->elements * (item->kind == BIN_CODES8 ? 1 : 2));
    valid = isfinite(multiplier) && multiplier > 1e-30;
    if (item->kind == BIN_CODES8) valid &= memchr(item->data, 0x80, item->elements) == NULL;
    for (size_t i = 0; item->kind == BIN_CODES16 && i < item->elements && valid; i++)
        valid = short_at(item->data + 2 * i) != INT16_MIN;
    if (valid) return MOE_OK;
    return text_fail(error, MOE_ERROR_FORMAT, name,
                     "%.80s: tensor %.80s has an invalid multiplier %g or a code out of range: damaged", name,
                     item->name, (double)multiplier);
}

void bin_numbers(const bin_item *item, size_t at, size_t step, float *out, size_t n) {
    const float scale = item->kind == BIN_FLOAT ? 1.0f : bin_scale(item);
    const uint8_t *p = item->data;
    for (size_t i = 0; i < n; i++, at += step)
        out[i] = item->kind == BIN_FLOAT    ? float_at(p + 4 * at)
                 : item->kind == BIN_CODES8 ? (float)(int8_t)p[at] * scale
                                            : (float)short_at(p + 2 * at) * scale;
}
