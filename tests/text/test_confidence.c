/* test_confidence.c - the numbers behind moetext_confidence: features, table, chrF. */
#include "tools/programs/reliability.h"
#include "tools/text/confidence.h"

#include <math.h>
#include <string.h>

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

int main(void) { return run_all_tests(NULL, NULL); }
