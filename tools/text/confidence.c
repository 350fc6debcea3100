/* confidence.c - see confidence.h. */
#include "tools/text/confidence.h"

#include <math.h>
#include <string.h>

enum { MOST_WEIGHT = 1000000000, ROWS = 2 };
#define MOST_VALUE (INT64_C(1000000000000))

/* Convert a number to millionths, within [-most, most]. */
static int64_t millionths(double x, double most) {
    if (!(x > -most)) x = -most;
    if (x > most) x = most;
    return (int64_t)(x * (double)TEXT_CONFIDENCE_ONE);
}

int text_confidence_features(const moetext_result *r, int64_t out[TEXT_CONFIDENCE_FEATURES]) {
    const moetext_hypothesis *h = r->n_hypotheses ? r->hypotheses : NULL;
    if (r->status || !h || !h->n_logprobs || !r->n_source_ids || r->flags & MOETEXT_BLANK) return 0;
    const double target = (double)h->n_logprobs, source = (double)r->n_source_ids;
    float least = 0;
    for (size_t i = 0; i < h->n_logprobs; i++)
        if (h->token_logprobs[i] < least) least = h->token_logprobs[i];
    const int doubtful = r->n_notes || h->looped || r->flags & (MOETEXT_CUT | MOETEXT_TRUNCATED | MOETEXT_KEPT);
    const double features[TEXT_CONFIDENCE_FEATURES] = { 1,
                                                        (double)h->logprob / target,
                                                        (double)h->reverse / source,
                                                        (double)h->logprob / 8,
                                                        (double)h->reverse / 8,
                                                        (double)least,
                                                        sqrt(source),
                                                        4 * target / (source + target),
                                                        doubtful };
    for (size_t i = 0; i < TEXT_CONFIDENCE_FEATURES; i++) out[i] = millionths(features[i], 8);
    return h->reverse != 0.0f ? 1 : 2;
}

int64_t text_confidence_value(const int64_t *weights, const int64_t features[TEXT_CONFIDENCE_FEATURES]) {
    int64_t sum = 0;
    for (size_t i = 0; i < TEXT_CONFIDENCE_FEATURES; i++) sum += weights[i] * features[i] / TEXT_CONFIDENCE_ONE;
    return sum;
}

int64_t text_confidence_at(const int64_t *values, const int64_t *probabilities, size_t n, int64_t value) {
    size_t i = 0;
    while (i < n && values[i] <= value) i++;
    if (i == 0 || i == n) return probabilities[i ? n - 1 : 0];
    const int64_t rise = probabilities[i] - probabilities[i - 1], run = values[i] - values[i - 1];
    return probabilities[i - 1] + rise * (value - values[i - 1]) / run;
}

/* A row of a model's table. */
typedef struct table {
    const moe_model *model;
    size_t entry, begin, n;          /* begin: index of the first weight; n: number of points */
    size_t directions, n_directions; /* entry of the directions, if any */
    int64_t weights[TEXT_CONFIDENCE_FEATURES], values[TEXT_CONFIDENCE_POINTS], probabilities[TEXT_CONFIDENCE_POINTS];
} table;

/* Read a row. Return 0 if the model has no valid table. */
static int read_table(const moe_model *m, size_t row, table *t) {
    const ptrdiff_t found = m ? moe_model_meta_find(m, TEXT_CONFIDENCE_KEY) : -1;
    const ptrdiff_t named = found < 0 ? -1 : moe_model_meta_find(m, TEXT_CONFIDENCE_DIRECTIONS);
    if (found < 0 || moe_model_meta_kind(m, (size_t)found) != MOE_META_INTS) return 0;
    const size_t at = (size_t)found, length = moe_model_meta_length(m, at);
    const int64_t points = length > 2 ? moe_model_meta_int(m, at, 1) : 0;
    if (points < 2 || points > TEXT_CONFIDENCE_POINTS || moe_model_meta_int(m, at, 0) != TEXT_CONFIDENCE_FORM) return 0;
    *t = (table){ .model = m, .entry = at, .n = (size_t)points };
    if (named >= 0 && moe_model_meta_kind(m, (size_t)named) == MOE_META_TEXTS)
        t->directions = (size_t)named, t->n_directions = moe_model_meta_length(m, t->directions);
    const size_t size = TEXT_CONFIDENCE_FEATURES + 2 * t->n + t->n_directions;
    if (t->n_directions > length || length != 2 + ROWS * size) return 0;
    t->begin = 2 + row * size;
    for (size_t i = 0; i < TEXT_CONFIDENCE_FEATURES; i++) {
        t->weights[i] = moe_model_meta_int(m, at, t->begin + i);
        if (t->weights[i] < -MOST_WEIGHT || t->weights[i] > MOST_WEIGHT) return 0;
    }
    for (size_t i = 0; i < t->n; i++) {
        t->values[i] = moe_model_meta_int(m, at, t->begin + TEXT_CONFIDENCE_FEATURES + i);
        t->probabilities[i] = moe_model_meta_int(m, at, t->begin + TEXT_CONFIDENCE_FEATURES + t->n + i);
        if (t->values[i] < -MOST_VALUE || t->values[i] > MOST_VALUE || (i && t->values[i] <= t->values[i - 1]) ||
            t->probabilities[i] < 0 || t->probabilities[i] > TEXT_CONFIDENCE_ONE)
            return 0;
    }
    return 1;
}

/* Return the number that a table adds for a direction; 0 if it is unknown. */
static int64_t offset_of(const table *t, const char *source, const char *target) {
    const size_t begin = t->begin + TEXT_CONFIDENCE_FEATURES + 2 * t->n, from = source ? strlen(source) : 0,
                 to = target ? strlen(target) : 0;
    int64_t sum = 0, n = 0;
    for (size_t i = 0; i < t->n_directions && to; i++) {
        const moe_span name = moe_model_meta_text(t->model, t->directions, i);
        const int64_t offset = moe_model_meta_int(t->model, t->entry, begin + i);
        if (offset < -MOST_WEIGHT || offset > MOST_WEIGHT || name.length < to + 2 ||
            name.data[name.length - to - 1] != '-' || memcmp(name.data + name.length - to, target, to) != 0)
            continue;
        if (from && name.length == from + 1 + to && memcmp(name.data, source, from) == 0) return offset;
        sum += offset, n++;
    }
    return n && !from ? sum / n : 0;
}

double moetext_confidence(const moetext_result *r) {
    int64_t features[TEXT_CONFIDENCE_FEATURES];
    table t;
    const int row = r->model && !r->between ? text_confidence_features(r, features) : 0;
    if (!row || !read_table(moetext_model_engine(r->model), (size_t)row - 1, &t)) return -1;
    const int64_t value =
        text_confidence_value(t.weights, features) + offset_of(&t, r->source_language, r->target_language);
    const int64_t thousandths = (text_confidence_at(t.values, t.probabilities, t.n, value) + 500) / 1000;
    return (double)thousandths / 1000;
}

double moetext_part_confidence(const moetext_result *r, size_t i) {
    if (!r->parts || i >= r->n_parts || !r->n_hypotheses) return -1;
    const moetext_part *p = &r->parts[i];
    const moetext_hypothesis *best = r->hypotheses;
    const size_t ids = i ? r->part_ends[i - 1] : 0, logprobs = i ? p[-1].logprobs_end : 0;
    const moetext_hypothesis own = { .logprob = p->logprob,
                                     .reverse = p->reverse,
                                     .looped = p->looped,
                                     .n_logprobs = p->logprobs_end - logprobs,
                                     .token_logprobs = best->token_logprobs + logprobs };
    moetext_result one = *r;
    one.status = MOE_OK, one.flags = p->flags;
    one.n_source_ids = r->part_ends[i] - ids;
    one.hypotheses = &own, one.n_hypotheses = 1;
    one.n_notes = 0;
    for (size_t k = 0; k < r->n_notes; k++) one.n_notes += r->notes[k].part == i;
    return moetext_confidence(&one);
}
