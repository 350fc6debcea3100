/* calibration.h - measure the gate thresholds or expert loads of a model on a text, for moe-calibrate and moe-prune.
 *
 * The closed form. An expert that competes with n-1 others for k places should get m = k X / n of X rows (rounded down,
 * at least 1): the rows with its m largest probabilities. Its threshold is therefore its (m+1)-th largest probability,
 * and a batchwise gate (eq 18) becomes a threshold gate (eq 19). If the m-th and (m+1)-th largest are equal, neither
 * row is selected. In a mixture with groups, X counts the rows that selected the expert's group.
 *
 * Memory. Every expert stores m + 1 probabilities, so a gate needs k X + n numbers. m must be known in advance. Without
 * groups, the lengths of the lines determine the number of rows; with groups, a separate pass counts the rows.
 */
#ifndef CALIBRATION_H
#define CALIBRATION_H

#include "tools/programs/passes.h"

/* A gate over the experts of a mixture, or over its groups. */
typedef struct level {
    char name[40];          /* name of the threshold tensor without suffix: "encoder.2.gate", "encoder.2.parent" */
    char probabilities[56]; /* name in the trace */
    char k_key[40];         /* metadata key like "encoder.2.k" or "encoder.2.parent.k" */
    size_t n, compete, k;   /* experts: total; competing in each of `blocks` blocks; to be selected */
    size_t blocks;
    int k_given;           /* 1 if k must be written, because it is absent from the file or too large */
    uint64_t *rows, *seen; /* [blocks] assumed number of competing rows; number counted in this pass */
    size_t *first;         /* [n + 1] */
    size_t *count;         /* [n] */
    float *kept;           /* min-heaps; the one at first[i] holds the m + 1 largest probabilities of expert i */
    float *threshold;      /* [n] */
    float *old;            /* [n] thresholds in the file, or NULL if absent */
    size_t unseen;         /* number of experts that never competed */
} level;

/* The experts of one line in one mixture: for each token, their number and their indices. */
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
    level *gate, *parent; /* `parent` is NULL without groups */
    tally of[2];          /* counts for IN and OUT */
    uint64_t same;        /* number of (token, expert) pairs that IN and OUT share */
} calibrated;

typedef struct calibration { /* the caller sets the first five members and zeroes the rest */
    const program_common *common;
    const moe_model *model;
    int k;     /* number of experts for softmax gates; -1 if not given */
    int masks; /* 1 to calibrate only threshold gates, 0 for all gates */
    int loads; /* 1 to record the rows of each expert instead of calibrating gates */
    passes text;
    calibrated *mixtures;
    size_t n_mixtures;
    level *levels;
    size_t n_levels;
    picks *picks; /* [lines, mixtures] experts that IN used; not stored for softmax gates, which use all */
    int which;    /* 0 for IN, 1 for OUT */
} calibration;

/* Return 1 if each expert has its own matrices, which ranks can distribute. */
int calibration_shares(const moe_model *model, const moe_mixture *mixture);
/* Collect the gates of IN; read existing thresholds from `file`. Errors: MOE_ERROR_ARGUMENT (nothing to calibrate, or
 * `k` is missing), MOE_ERROR_IO, MOE_ERROR_MEMORY. */
moe_status calibration_find(calibration *c, int file, moe_error *error);
/* Compute the thresholds from c->text, filled by passes_read. See text_front for `source_extra`. */
moe_status calibration_measure(calibration *c, size_t source_extra, moe_error *error);
/* Write IN with the new thresholds or loads. Errors: those of moe_model_save. */
moe_status calibration_save(const calibration *c, const char *path, moe_error *error);
/* Run OUT on c->text and count the experts that OUT and IN use. */
moe_status calibration_compare(calibration *c, const moe_model *out, moe_error *error);
void calibration_free(calibration *c);

#endif
