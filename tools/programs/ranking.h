/* ranking.h - rank the experts of a mixture by their importance to a language, for moe-prune and moe-routing. */
#ifndef RANKING_H
#define RANKING_H

#include <stddef.h>
#include <stdint.h>

typedef enum expert_rank {
    RANK_FIRST,  /* share of tokens with the expert as first choice, times exp(its mean weight for these tokens) */
    RANK_MASS,   /* sum of weights */
    RANK_OUTPUT, /* mean of weight times output norm over the expert's tokens */
    RANKS
} expert_rank;

extern const char *const rank_names[RANKS + 1];

/* Return RANK_FIRST for encoder-decoder models. First choices are not reliable in decoder-only models. */
expert_rank rank_default(int has_encoder);

/* Use of a mixture's experts by one language: in an encoder the source language, otherwise the target language. */
typedef struct expert_use {
    uint64_t *first;      /* [experts] tokens with the expert as first choice; NULL before expert_use_begin */
    double *weight, *sum; /* [experts] sum of the expert's weights as first choice; sum of all its weights */
    double *output;       /* [experts] sum of weight times output norm */
    uint64_t *measured;   /* [experts] number of tokens in `output` */
} expert_use;

int expert_use_begin(expert_use *use, size_t experts); /* allocate and zero; return 0 if out of memory */
void expert_use_end(expert_use *use);

typedef struct ranked_expert {
    double importance, sum; /* ties are broken by `sum`, the sum of weights, then by index */
    size_t expert;
} ranked_expert;

ranked_expert rank_expert(const expert_use *use, expert_rank by, size_t expert);
void rank_sort(ranked_expert *all, size_t n); /* sort by descending importance */

#endif /* RANKING_H */
