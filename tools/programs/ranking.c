/* ranking.c - rank experts by importance; documented in ranking.h. */
#include "tools/programs/ranking.h"

#include <math.h>
#include <stdlib.h>

const char *const rank_names[RANKS + 1] = { "first", "mass", "output" };

expert_rank rank_default(int has_encoder) { return has_encoder ? RANK_FIRST : RANK_MASS; }

int expert_use_begin(expert_use *u, size_t experts) {
    *u = (expert_use){ .first = calloc(experts, sizeof *u->first),
                       .weight = calloc(experts, sizeof *u->weight),
                       .sum = calloc(experts, sizeof *u->sum),
                       .output = calloc(experts, sizeof *u->output),
                       .measured = calloc(experts, sizeof *u->measured) };
    if (u->first && u->weight && u->sum && u->output && u->measured) return 1;
    expert_use_end(u);
    return 0;
}

void expert_use_end(expert_use *u) {
    free(u->first), free(u->weight), free(u->sum), free(u->output), free(u->measured);
    *u = (expert_use){ .first = NULL };
}

ranked_expert rank_expert(const expert_use *u, expert_rank by, size_t expert) {
    const double first = (double)u->first[expert], measured = (double)u->measured[expert];
    ranked_expert r = { .sum = u->sum[expert], .expert = expert };
    if (by == RANK_FIRST) r.importance = first > 0 ? first * exp(u->weight[expert] / first) : 0;
    if (by == RANK_MASS) r.importance = r.sum;
    if (by == RANK_OUTPUT) r.importance = measured > 0 ? u->output[expert] / measured : 0;
    return r;
}

static int by_importance(const void *a, const void *b) {
    const ranked_expert *x = a, *y = b;
    if (x->importance != y->importance) return x->importance > y->importance ? -1 : 1;
    if (x->sum != y->sum) return x->sum > y->sum ? -1 : 1;
    return x->expert < y->expert ? -1 : x->expert > y->expert;
}

void rank_sort(ranked_expert *all, size_t n) { qsort(all, n, sizeof *all, by_importance); }
