/* decoder.h - decoder-only models: what their files describe, and the model file made of it.
 *
 * hub.c and gguf.c read the files of a checkpoint into these structs; decoder_put and decoder_write make the model
 * file. decoder.inc contains the families and names.
 */
#ifndef CONVERT_DECODER_H
#define CONVERT_DECODER_H

#include "tools/convert/bpe_pack.h"
#include "tools/convert/builder.h"
#include "tools/convert/prompts.h"

enum {
    DECODER_MAX_LAYERS = 256,
    DECODER_MAX_ENDS = 8,
    DECODER_POSITIONS = 1 << 15, /* rows of a position table: translations are shorter than published contexts */
    DECODER_SAMPLING = 5
};
enum { DECODER_QWEN = 1, DECODER_LARA };
enum { DECODER_GEMMA = 1, DECODER_GEMMA_1 };

typedef struct decoder_family {
    const char *name, *class, *architecture, *head_norm;
    int tied;
    double epsilon;
    int dense;  /* 1 if no layer is a mixture */
    int biased; /* 1 if queries, keys and values have biases */
    int windowed;
    int gemma;  /* DECODER_GEMMA (see decoder.inc), DECODER_GEMMA_1 (without norms after functions), or 0 */
    int delta;  /* DECODER_QWEN, DECODER_LARA, or 0 */
    int cohere; /* 1 for Cohere's layers, 2 for those with windows, see decoder.inc */
} decoder_family;

/* Return the family of a model_type, or of GGUF's architecture for a file with or without experts; NULL if unknown. */
const decoder_family *decoder_family_named(const char *name);
const decoder_family *decoder_family_of(const char *name, size_t length, int sparse);
extern const char decoder_python_types[]; /* model types that only convert.py reads, separated by spaces */
/* List all model types, of which X stands for X_text too, or GGUF's architectures, for messages. */
const char *decoder_families(making *m, int architectures);

/* The configuration of a network. */
typedef struct decoder {
    const decoder_family *family;
    const char *file; /* that describes it, for messages */
    int64_t width, layers, heads, keys, head, vocabulary, ffn, context, bos;
    int64_t window; /* positions that attention reaches; 0: all */
    double epsilon;
    int tied;
    unsigned char sparse[DECODER_MAX_LAYERS]; /* 1 for mixtures */
    int64_t experts, chosen, hidden, shared;  /* shared: units */
    double scale;
    const char *weights;     /* chosen, all, sigmoid */
    int64_t turned;          /* columns of a head that rotary positions turn */
    double *frequencies;     /* [turned / 2] of rotary positions */
    uint64_t scale_block[2]; /* rows and columns of a block of FP8 that has a scale */
    /* Gemma: */
    int64_t windows[DECODER_MAX_LAYERS + 1]; /* of each layer's attention; 0: all positions */
    double *local_frequencies;               /* of layers with a window; else NULL */
    double query_scale;
    int norm_offset;    /* added to the weights of norms */
    double logit_scale; /* Cohere: multiplies the last norm */
    /* Qwen3.5 and Lara: */
    unsigned char linear[DECODER_MAX_LAYERS + 1]; /* 1 for Gated DeltaNet */
    int64_t values, value_keys;                   /* value heads, key heads of Gated DeltaNet */
    int64_t value, key, kernel;                   /* columns of these heads; tokens that the convolution reads */
    int tiled, log_rate;                          /* see moe_delta_op; 1 if rates are stored as log(-rate) */
} decoder;

/* Return 1 if norms are stored without the 1 that is added to their weights. */
int decoder_lacks_1(const decoder *d);

/* The decoding defaults. */
typedef struct decoder_search {
    int64_t ends[DECODER_MAX_ENDS + 1]; /* tokens that end an answer, without duplicates */
    size_t n_ends;
    int64_t beam, pad; /* pad -1: none */
    int64_t max_new;   /* of generation_config.json; 0 if missing */
    const char *file;  /* that states it, for messages */
    double length_penalty;
    int early_stopping;
    double sample[DECODER_SAMPLING]; /* NaN if missing */
} decoder_search;

/* The tokeniser and prompts. */
typedef struct decoder_tokens {
    int found; /* 0: the model accepts ids only */
    pack_parts parts;
    text_bytes blob;
    prompt_pieces pieces;
    const char *name; /* of the model, which selects its wordings */
    moe_span *named;  /* [n_named] languages that the authors name */
    size_t n_named;
    int begins; /* 1 if each text begins with the bos token */
} decoder_tokens;

/* Check the configuration as a whole, after all members except `frequencies` were set. */
int decoder_check(making *m, const decoder *d);
/* Return the frequencies of default rotary positions; NULL after an error. */
double *decoder_frequencies(making *m, const decoder *d, double theta);
/* Divide frequencies with fewer than `low` turns within the original training length by `factor`, as in Llama 3; keep
 * those with more than `high`, and interpolate in between. */
void decoder_slow_down(const decoder *d, double *frequencies, double factor, double low, double high, double length);
/* Mark the rows of queries and keys whose halves are interleaved per head. */
void decoder_interleaved(const decoder *d, stored *t);
/* Set the windows of layers: all but each `pattern`-th have one. */
void decoder_set_windows(decoder *d, int64_t window, int64_t pattern);
/* Let each text begin with the token `start` unless a template precedes it. */
void decoder_begin_with(making *m, decoder *d, decoder_tokens *t, int64_t start, const char *file);

/* Rename tensors as transformers does, and drop extra layers except one that predicts further tokens. */
int decoder_rename(making *m, const decoder *d, stored_list *list);
/* Put all metadata except general.*, and write the file from files of `source` bytes. `quantised` names number formats
 * for a note, or is empty. */
int decoder_write(making *m, const decoder *d, decoder_search *search, decoder_tokens *tokens, stored_list *list,
                  moe_type type, moe_type experts, const char *quantised, uint64_t source);

#endif
