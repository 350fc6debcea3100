/* test_confidence.c - the numbers behind moetext_confidence: features, table, chrF; damaged tables. */
#define _POSIX_C_SOURCE 200809L /* unlink, getpid */
#include "tools/programs/reliability.h"
#include "tools/text/confidence.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/test.h"

TEST(features_are_those_of_the_best_translation) {
    const float logprobs[] = { -1.5F, -0.5F, -0.25F, 0.0F };
    moetext_hypothesis h = { .logprob = -2.25F, .reverse = -8.0F, .finished = 1, .n_logprobs = 4 };
    h.token_logprobs = logprobs;
    moetext_result r = { .n_hypotheses = 1, .hypotheses = &h, .n_source_ids = 9 };
    int64_t f[TEXT_CONFIDENCE_FEATURES];
    /* 1; -2.25 / 4; -8 / 9; -2.25 / 8; -8 / 8; least; sqrt(9); 4 * 4 / 13; doubts */
    const int64_t wanted[] = { 1000000, -562500, -888888, -281250, -1000000, -1500000, 3000000, 1230769, 0 };
    assert_int_equal(text_confidence_features(&r, f), 1);
    for (size_t i = 0; i < TEXT_CONFIDENCE_FEATURES; i++)
        if (f[i] != wanted[i]) fail_msg("feature %zu is %lld, not %lld", i, (long long)f[i], (long long)wanted[i]);
    h.looped = 1, h.reverse = 0;
    assert_int_equal(text_confidence_features(&r, f), 2);
    assert_int_equal(f[8], 1000000);
    h.logprob = -INFINITY; /* limits */
    r.n_source_ids = 100;
    assert_int_equal(text_confidence_features(&r, f), 2);
    assert_int_equal(f[1], -8000000);
    assert_int_equal(f[6], 8000000);
    r.flags = MOETEXT_BLANK;
    assert_int_equal(text_confidence_features(&r, f), 0);
    r.flags = 0, r.status = MOE_ERROR_LIMIT;
    assert_int_equal(text_confidence_features(&r, f), 0);
}

TEST(probabilities_are_linear_between_points) {
    static const int64_t values[] = { -1000, 0, 500 }, probabilities[] = { 100000, 200000, 900000 };
    static const struct {
        int64_t value, p;
    } cases[] = { { -5000, 100000 }, { -1000, 100000 }, { -500, 150000 }, { 0, 200000 },
                  { 250, 550000 },   { 499, 898600 },   { 500, 900000 },  { 7000, 900000 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(text_confidence_at(values, probabilities, 3, cases[i].value), cases[i].p);
    int64_t weights[TEXT_CONFIDENCE_FEATURES] = { 500000, 2000000 }, f[TEXT_CONFIDENCE_FEATURES] = { 1000000, -750000 };
    assert_int_equal(text_confidence_value(weights, f), -1000000);
}

TEST(chrf_equals_sacrebleu) {
    static const struct {
        const char *text, *reference;
        double chrf;
    } cases[] = { { "Hallo Welt. Wie seid ihr?", "Hallo Welt, wie geht es euch?", 37.92035541476305 },
                  { "Das Haus ist groß.", "Das Haus ist groß.", 100 },
                  { "a", "b", 0 },
                  { "Ça va ?", "Ça va bien ?", 30.90948254016522 },
                  { "abc", "abcdefghij", 25.587524708983082 },
                  { "Die Katze sitzt auf der Matte.", "Auf der Matte sitzt eine Katze.", 62.26047125392873 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const double found =
            reliability_chrf(cases[i].text, strlen(cases[i].text), cases[i].reference, strlen(cases[i].reference));
        if (fabs(found - cases[i].chrf) > 1e-9) fail_msg("%s: %.12f, not %.12f", cases[i].text, found, cases[i].chrf);
    }
}

/* Write a small model with a table; return the confidence of a result with these languages. */
static double confidence_with(const int64_t *table, size_t n, const char *directions, const char *source,
                              const char *target) {
    const float logprobs[] = { -1, -2 };
    const moetext_hypothesis h = { .logprob = -3, .finished = 1, .n_logprobs = 2, .token_logprobs = logprobs };
    const moe_meta_entry entries[] = {
        { .key = TEXT_CONFIDENCE_KEY, .kind = MOE_META_INTS, .text = { (const char *)table, n * sizeof *table } },
        { .key = TEXT_CONFIDENCE_DIRECTIONS, .kind = MOE_META_TEXTS, .text = { directions, strlen(directions) } }
    };
    const moe_save_params params = { .type = MOE_TYPE_KEEP,
                                     .experts = MOE_TYPE_KEEP,
                                     .entries = entries,
                                     .n_entries = *directions ? 2 : 1 };
    char path[64];
    moe_error e;
    moe_model *model;
    moetext_model *opened;
    snprintf(path, sizeof path, "/tmp/moe-confidence-%ld.bin", (long)getpid());
    if (moe_model_open("tests/golden/model-base.bin", NULL, &model, &e)) fail_msg("%s", e.message);
    if (moe_model_save(model, path, &params, &e)) fail_msg("%s", e.message);
    moe_model_close(model);
    if (moetext_model_open(path, "form=ids", &opened, &e)) fail_msg("%s", e.message);
    const moetext_result r = { .n_hypotheses = 1,
                               .hypotheses = &h,
                               .n_source_ids = 4,
                               .model = opened,
                               .source_language = source,
                               .target_language = target };
    const double found = moetext_confidence(&r);
    moetext_model_close(opened);
    unlink(path);
    return found;
}

TEST(damaged_tables_are_ignored) {
    enum { N = 2 + 2 * (TEXT_CONFIDENCE_FEATURES + 2 * 2 + 2), ROW = 2 + (N - 2) / 2 };
    int64_t t[N] = { TEXT_CONFIDENCE_FORM, 2 };
    int64_t *row = t + ROW, *values = row + TEXT_CONFIDENCE_FEATURES; /* without a reverse score */
    row[1] = 1000000;                                                 /* -3 / 2 */
    t[2 + TEXT_CONFIDENCE_FEATURES + 1] = 1; /* the other row must be used for results with a reverse score only */
    values[0] = -2000000, values[1] = 0, values[2] = 0, values[3] = 800000;
    values[4] = 500000, values[5] = -500000;
    const char *const both = "en-de\nfr-de";
    assert_float_equal(confidence_with(t, N, both, "es", "de"), 0.2, 1e-9);
    assert_float_equal(confidence_with(t, N, both, "en", "de"), 0.4, 1e-9);
    assert_float_equal(confidence_with(t, N, both, "fr", "de"), 0, 1e-9);
    assert_float_equal(confidence_with(t, N, both, "", "de"), 0.2, 1e-9);
    assert_float_equal(confidence_with(t, N, both, "en", NULL), 0.2, 1e-9);
    assert_float_equal(confidence_with(t, N - 4, "", NULL, NULL), -1, 1e-9); /* the rows begin elsewhere */
    const struct {
        size_t at;
        int64_t value;
    } wrong[] = { { 0, 2 },
                  { 1, 1 },
                  { 1, 3 },
                  { 1, INT64_MIN },
                  { 1, 65 },
                  { ROW, INT64_MAX },
                  { ROW, INT64_MIN },
                  { ROW + TEXT_CONFIDENCE_FEATURES + 1, -2000000 },
                  { ROW + TEXT_CONFIDENCE_FEATURES, INT64_MIN },
                  { ROW + TEXT_CONFIDENCE_FEATURES + 2, -1 },
                  { ROW + TEXT_CONFIDENCE_FEATURES + 3, 1000001 } };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const int64_t old = t[wrong[i].at];
        t[wrong[i].at] = wrong[i].value;
        if (confidence_with(t, N, both, "en", "de") >= 0) fail_msg("damage %zu", i);
        t[wrong[i].at] = old;
    }
    assert_float_equal(confidence_with(t, N - 1, both, "en", "de"), -1, 1e-9);
    assert_float_equal(confidence_with(t, 1, both, "en", "de"), -1, 1e-9);
    values[4] = INT64_MAX; /* an offset out of range does not count */
    assert_float_equal(confidence_with(t, N, both, "en", "de"), 0.2, 1e-9);
}

int main(void) { return run_all_tests(NULL, NULL); }
