/* builder.h - the layers and tensors of a model file, made of rows of a checkpoint's tensors. */
#ifndef CONVERT_BUILDER_H
#define CONVERT_BUILDER_H

#include "tools/convert/stored.h"

struct decoder;

enum { BUILT_NAME = 160 };

/* `rows` rows of a stored tensor from row `first` on; rows count through all matrices of the tensor. Without an item,
 * zeros. */
typedef struct built_part {
    const stored *item;
    uint64_t first, rows;
} built_part;

/* A tensor of the model file. */
typedef struct built {
    const char *name;
    /* Computes a row of a table, which has no parts; or NULL. */
    void (*make)(const void *from, size_t row, float *out, size_t cols);
    const void *made_from;
    int changed; /* 1 if the numbers of a vector become (x + offset) * scale */
    float offset, scale;
    size_t kernel;     /* columns of the rows of a vector that is stored column by column; 0 for other tensors */
    int log_rate;      /* 1 if a vector stores log(-x) */
    built_part *parts; /* of experts: their matrices, expert by expert */
    size_t n_parts, rows, cols, experts; /* cols 0: a vector; experts: rows is their hidden width */
    int f32;
} built;

/* Zero all members that are not set. */
typedef struct builder {
    making *m;
    const char *file;        /* that describes the network, for messages */
    const struct decoder *d; /* used by decoder.c only */
    stored_list *list;
    built *tensors;
    size_t n, capacity;
    moe_type type, experts;
    int gated;     /* 1 if experts have a gate matrix */
    int layers[3]; /* number of sub-layers of encoder, decoder and predictor */
} builder;

void builder_free(builder *b);

/* Add a tensor with room for `parts` parts; NULL after an error. */
built *builder_tensor(builder *b, const char *name, size_t rows, size_t cols, size_t parts);
/* Return a tensor of the checkpoint after checking its shape; dims[] ends with 0. NULL after an error. */
const stored *builder_take(builder *b, const char *name, const uint64_t dims[4]);
void builder_part(built *t, const stored *item, uint64_t first, uint64_t rows); /* item NULL: an error before */
/* Add a tensor that is stored as it is, with the given name; cols 0: a vector. NULL after an error. */
built *builder_one(builder *b, const char *name, const char *source, int64_t rows, int64_t cols);
/* Reject tensors that were not taken, except those whose names end in `ignored`. */
int builder_all_taken(builder *b, const char *ignored);

/* Begin a sub-layer of `side`: write its name, such as decoder.3, to name[24]. Then put its settings. */
void builder_layer(builder *b, const char *side, const char *kind, char *name);
void builder_key(builder *b, const char *layer, const char *key, int64_t value);
void builder_word(builder *b, const char *layer, const char *key, const char *value);
void builder_real(builder *b, const char *layer, const char *key, double value);

/* Write the file from files of `source` bytes. Q8 keeps codes with a scale per row. */
int builder_write(builder *b, uint64_t source);

#endif
