/* stored.h - the tensors of a checkpoint, by name, and their number formats. */
#ifndef CONVERT_STORED_H
#define CONVERT_STORED_H

#include "tools/convert/making.h"

enum { STORED_DIMENSIONS = 4 };
#define STORED_LARGEST ((uint64_t)1 << 40) /* limit of a dimension and of the numbers of a tensor */

/* A number format: blocks of `numbers` numbers in `bytes` bytes. */
typedef struct stored_format {
    const char *name; /* as in GGUF and safetensors */
    int ggml;         /* number in GGUF; -1: only in safetensors */
    uint32_t numbers, bytes;
    void (*decode)(const uint8_t *block, float *out); /* NULL: not supported */
} stored_format;

const stored_format *stored_format_named(const char *name); /* NULL if unknown */
const stored_format *stored_format_ggml(uint32_t number);
int stored_is_plain(const stored_format *format); /* 1 for F32, F16 and BF16 */
/* Integers of CTranslate2, which have a scale per row or per tensor. Other files cannot name these formats. */
extern const stored_format stored_int8, stored_int16, stored_int32;

typedef struct stored {
    const char *name; /* transformers' name */
    const char *own;  /* its name in the file */
    const char *file; /* name of the file, for messages */
    const stored_format *format;
    uint32_t n_dims;
    uint64_t dims[STORED_DIMENSIONS];
    const uint8_t *data;   /* mapped */
    uint64_t heads;        /* rows per head if the halves of each head are interleaved, else 0 */
    int taken;             /* 1: used */
    const uint8_t *scales; /* of FP8, in scale_format; NULL: none */
    const stored_format *scale_format;
    uint64_t scale_block[2]; /* rows and columns that share a scale */
} stored;

/* All zero if empty. */
typedef struct stored_list {
    stored *items;
    size_t n, capacity;
    text_index index;
} stored_list;

/* Return the number of elements; 0 if a dimension is 0 or their product is STORED_LARGEST or more. A tensor without
 * dimensions has one element. */
uint64_t stored_elements(const stored *t);
uint64_t stored_bytes(const stored *t); /* of a tensor whose rows are whole blocks */

int stored_add(making *m, stored_list *list, const stored *t);
stored *stored_find(const stored_list *list, const char *name); /* NULL if missing */
void stored_free(stored_list *list);
/* Connect matrices in FP8, NAME, with their scales, NAME_scale or NAME_scale_inv: one, one per row, or one per block of
 * `block` rows and columns. Mark scales as taken, also those of activations and caches, which are not in FP8 here. */
int stored_connect_scales(making *m, stored_list *list, const uint64_t block[2]);

/* Read a row of `cols` numbers, which are a whole number of blocks; `row` counts rows of the last dimension. Return 0
 * if a number is not finite. */
int stored_row(const stored *t, uint64_t row, float *out, size_t cols);
/* Check if a matrix has codes of 8 bits with a scale per row, and copy the codes and the scale of a row. */
int stored_has_codes(const stored *t);
void stored_codes(const stored *t, uint64_t row, int8_t *codes, size_t cols, float *scale);
/* Write a shape as [1, 2] to out[size]. Return out. */
const char *stored_shape(const stored *t, char *out, size_t size);

#endif
