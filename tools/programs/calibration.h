/* calibration.h - thresholds for the gates of a model, or loads of its experts, from a text: moe-calibrate, and
 * moe-prune where experts go.
 *
 * The closed form. An expert that competes with n-1 others for k places should get m = k X / n of X rows (rounded down,
 * at least 1): the rows with its m largest probabilities. These lie above its (m+1)-th largest probability, which
 * therefore is its threshold, and eq 18 becomes eq 19. Where the m-th and the (m+1)-th are equal, neither is selected.
 * With two levels each group has an X of its own: the rows that selected the group.
 *
 * Memory. Every expert keeps m + 1 probabilities: k X + n numbers for a gate, however many experts there are. m must be
 * known before. With one level the lengths of the lines tell the rows; with groups a pass of its own counts them.
 */
#ifndef CALIBRATION_H
#define CALIBRATION_H

#include "tools/programs/passes.h"

/* One gate: that over the experts of a mixture, or that over its groups. */
typedef struct level {
    char name[40];          /* "encoder.2.gate", "encoder.2.parent": of the threshold tensor without its end */
    char probabilities[56]; /* as the trace calls them */
    char k_key[40];         /* "encoder.2.k", "encoder.2.parent.k" */
    size_t n, compete, k;   /* in all; of which so many compete, `blocks` times; wanted */
    size_t blocks;
    int k_given;           /* the file does not say k, or too much: it must be written */
    uint64_t *rows, *seen; /* [blocks] that competed: as assumed, and in this pass */
    size_t *first;         /* [n + 1] */
    size_t *count;         /* [n] */
    float *kept;           /* of expert i the m + 1 largest at first[i]: a heap, the least one on top */
    float *threshold;      /* [n] */
    float *old;            /* [n] or NULL */
    size_t unseen;         /* experts that never competed */
} level;

/* The experts of one line in one mixture: for each token, how many and which. */
typedef struct picks {
    uint32_t *data;
    size_t length, capacity, read;
} picks;

typedef struct tally {
    uint64_t rows, pairs, empty;
    uint64_t *load; /* [experts] */
} tally;

typedef struct calibrated {
    moe_mixture about;
    level *gate, *parent; /* NULL: no groups */
    tally of[2];          /* IN, OUT */
    uint64_t same;        /* pairs of OUT that IN has too */
} calibrated;

typedef struct calibration { /* the first five are the caller's, the rest is zero at first */
    const program_common *common;
    const moe_model *model;
    int k;     /* of softmax gates, which have none; -1: not given */
    int masks; /* 1: threshold gates alone; 0: all gates */
    int loads; /* 1: no gate; instead of thresholds OUT gets how many rows went to each expert */
    passes text;
    calibrated *mixtures;
    size_t n_mixtures;
    level *levels;
    size_t n_levels;
    picks *picks; /* [lines, mixtures] of IN, but for softmax gates, which pick everybody */
    int which;    /* 0 IN, 1 OUT */
} calibration;

/* Whether the experts of a mixture have matrices of their own, which ranks can share out. */
int calibration_shares(const moe_model *model, const moe_mixture *mixture);
/* The gates of IN, whose thresholds, if it has any, are read from `file`. Errors: MOE_ERROR_ARGUMENT (there is nothing
 * to calibrate, or no `k`), MOE_ERROR_IO, MOE_ERROR_MEMORY. */
moe_status calibration_find(calibration *c, int file, moe_error *error);
/* New thresholds, from c->text, which passes_read has read. `source_extra` as in text_front. */
moe_status calibration_measure(calibration *c, size_t source_extra, moe_error *error);
/* Write IN with them. Errors: those of moe_model_save. */
moe_status calibration_save(const calibration *c, const char *path, moe_error *error);
/* The same text through OUT. */
moe_status calibration_compare(calibration *c, const moe_model *out, moe_error *error);
void calibration_free(calibration *c);

#endif
