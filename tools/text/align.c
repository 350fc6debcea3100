/* align.c - see align.h. */
#include "tools/text/align.h"
#include "tools/text/text.h"

#include <stdlib.h>
#include <string.h>

/* Set fit [words of `written`, words of `read`]: the attention between two words is the largest weight among their
 * tokens, divided by the sum over all words of `read`. */
static void look_of_words(const text_side *written, const text_side *read, const float *weights, float *fit) {
    memset(fit, 0, written->words * read->words * sizeof *fit);
    for (size_t j = 0; j < written->tokens; j++)
        for (size_t i = 0; i < read->tokens && written->word[j] >= 0; i++) {
            if (read->word[i] < 0) continue;
            float *at = &fit[(size_t)written->word[j] * read->words + (size_t)read->word[i]];
            if (weights[j * read->tokens + i] > *at) *at = weights[j * read->tokens + i];
        }
    for (size_t j = 0; j < written->words; j++) {
        float sum = 0.0f;
        for (size_t i = 0; i < read->words; i++) sum += fit[j * read->words + i];
        for (size_t i = 0; i < read->words && sum > 0.0f; i++) fit[j * read->words + i] /= sum;
    }
}

moe_status text_align(text_aligner *a, const text_side *source, const text_side *target, const float *forward,
                      const float *back, float share, text_link_fn link, void *user, moe_error *error) {
    const size_t n = source->words, m = target->words;
    if (!n || !m) return MOE_OK;
    if (m > SIZE_MAX / sizeof(float) / 4 / n) return text_out_of_memory(error);
    moe_status status = text_reserve(&a->fit, &a->capacity, 2 * n * m + n + m, sizeof *a->fit, error);
    if (status) return status;
    float *fit = a->fit, *other = fit + n * m,      /* [m, n], [n, m] */
                             *best = other + n * m; /* [n] for source words, [m] for target words */
    look_of_words(target, source, forward, fit);
    if (back) look_of_words(source, target, back, other);
    memset(best, 0, (n + m) * sizeof *best);
    for (size_t j = 0; j < m; j++)
        for (size_t i = 0; i < n; i++) {
            float *at = &fit[j * n + i];
            if (back) *at *= other[i * m + j];
            if (*at > best[i]) best[i] = *at;
            if (*at > best[n + j]) best[n + j] = *at;
        }
    for (size_t i = 0; i < n && !status; i++)
        for (size_t j = 0; j < m && !status; j++) {
            const float at = fit[j * n + i];
            if (at > 0.0f && !(at < share * best[i]) && !(at < share * best[n + j])) status = link(user, i, j, error);
        }
    return status;
}

void text_aligner_free(text_aligner *a) {
    free(a->fit);
    *a = (text_aligner){ 0 };
}

/* Return the first link whose source ends after byte `at`; links are sorted and do not overlap. */
static const moetext_link *link_behind(const moetext_link *links, size_t n, size_t at) {
    size_t low = 0, high = n;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (links[middle].source_end <= at) low = middle + 1;
        else high = middle;
    }
    return links + low;
}

moe_status text_links_through(const moetext_link *first, size_t n_first, const moetext_link *second, size_t n_second,
                              text_links *out, moe_error *error) {
    size_t word = out->n; /* first link of the current word */
    for (const moetext_link *a = first; a < first + n_first; a++) {
        if (a > first && a->source_begin != a[-1].source_begin) word = out->n;
        const moetext_link *b = link_behind(second, n_second, a->target_begin);
        for (; b < second + n_second && b->source_begin < a->target_end; b++) {
            const moetext_link link = { a->source_begin, a->source_end, b->target_begin, b->target_end };
            size_t j = word;
            while (j < out->n && memcmp(&out->data[j], &link, sizeof link) != 0) j++;
            if (j < out->n) continue;
            const moe_status status = text_add(&out->data, &out->n, &out->capacity, &link, 1, sizeof link, error);
            if (status) return status;
        }
    }
    return MOE_OK;
}
