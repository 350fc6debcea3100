/* ranking.h - which experts of a mixture matter most to a language: moe-prune keeps these, moe-routing lists them, both
 * in this order. */
#ifndef RANKING_H
#define RANKING_H

#include <stddef.h>
#include <stdint.h>

typedef enum expert_rank {
    RANK_FIRST,  /* share of tokens whose first choice it is, times e to the mean weight that it then has */
    RANK_MASS,   /* sum of weights */
    RANK_OUTPUT, /* mean of weight times norm of the output, over the tokens that it gets */
    RANKS
} expert_rank;

extern const char *const rank_names[RANKS + 1];

/* A model without an encoder has no first choices that can be trusted. */
expert_rank rank_default(int has_encoder);

/* What a mixture's experts did for one language: of the source in an encoder, else of the target. */
typedef struct expert_use {
    uint64_t *first;      /* [experts] tokens whose first choice it was; NULL: expert_use_begin was not called */
    double *weight, *sum; /* [experts] sums of its weights, when first and in all */
    double *output;       /* [experts] sum of weight times norm of the output */
    uint64_t *measured;   /* [experts] tokens of that sum */
} expert_use;

int expert_use_begin(expert_use *use, size_t experts); /* all 0. 0: memory ran out, and there is nothing to free */
void expert_use_end(expert_use *use);

typedef struct ranked_expert {
    double importance, sum; /* experts of the same importance are ordered by the sum of weights, then by number */
    size_t expert;
} ranked_expert;

ranked_expert rank_expert(const expert_use *use, expert_rank by, size_t expert);
void rank_sort(ranked_expert *all, size_t n); /* the most important first */

#endif /* RANKING_H */
