/* ranking.h - rank the experts of a mixture by their importance to a language, for moe-prune and moe-routing. */
#ifndef RANKING_H
#define RANKING_H

#include <stddef.h>
#include <stdint.h>

typedef enum expert_rank {
    RANK_FIRST,  /* share of tokens that choose the expert first, times e to its mean weight there */
    RANK_MASS,   /* sum of weights */
    RANK_OUTPUT, /* mean of weight times norm of the output, over its tokens */
    RANKS
} expert_rank;

extern const char *const rank_names[RANKS + 1];

/* First choices of a decoder-only model are not reliable. */
expert_rank rank_default(int has_encoder);

/* Use of a mixture's experts by one language: the source in an encoder, else the target. */
typedef struct expert_use {
    uint64_t *first;      /* [experts] tokens that chose it first; NULL before expert_use_begin */
    double *weight, *sum; /* [experts] sum of its weights as first choice, and of all its weights */
    double *output;       /* [experts] sum of weight times norm of the output */
    uint64_t *measured;   /* [experts] number of tokens in `output` */
} expert_use;

int expert_use_begin(expert_use *use, size_t experts); /* zeroed. Returns 0 if out of memory */
void expert_use_end(expert_use *use);

typedef struct ranked_expert {
    double importance, sum; /* ties are broken by the sum of weights, then by number */
    size_t expert;
} ranked_expert;

ranked_expert rank_expert(const expert_use *use, expert_rank by, size_t expert);
void rank_sort(ranked_expert *all, size_t n); /* most important first */

#endif /* RANKING_H */
