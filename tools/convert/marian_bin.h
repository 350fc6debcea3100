/* marian_bin.h - the items of a Marian .bin file, version 1 */
#ifndef CONVERT_MARIAN_BIN_H
#define CONVERT_MARIAN_BIN_H

#include "tools/convert/packed.h"

enum { BIN_MAX_ITEMS = 1 << 16, BIN_MAX_DIMENSIONS = 4, BIN_MAX_TEXT = 1 << 24 };

typedef enum bin_kind { BIN_FLOAT = 0x404, BIN_CODES8 = 0x4101, BIN_CODES16 = 0x4102, BIN_TEXT = 0x101 } bin_kind;

/* A tensor. Codes are followed by a float multiplier; a weight is code / multiplier. */
typedef struct bin_item {
    const char *name;
    bin_kind kind;
    uint32_t n_dims, dims[BIN_MAX_DIMENSIONS]; /* as stated by the file: [in, out] except embeddings */
    size_t elements;
    const uint8_t *data; /* not aligned */
    int taken;           /* 1: used, set by the caller */
} bin_item;

typedef struct bin_file {
    bin_item *items; /* in file order */
    size_t n;
    text_index index;
    moe_span settings; /* the text of special:model.yml; data NULL if missing */
} bin_file;

/* Read the header, checking all names, types, shapes and lengths. `name`: the file's name, for messages. */
moe_status bin_read(const packed_file *file, const char *name, bin_file *bin, moe_error *error);
void bin_free(bin_file *bin);
bin_item *bin_find(const bin_file *bin, const char *name); /* NULL if missing */

/* Check that all numbers of an item are valid. */
moe_status bin_check(const bin_item *item, const char *name, moe_error *error);
/* Read `n` numbers that are `step` apart, from number `at` on. */
void bin_numbers(const bin_item *item, size_t at, size_t step, float *out, size_t n);
float bin_scale(const bin_item *item); /* 1 / multiplier of codes */

#endif
