/* test_cache.c - tests the expert cache: which experts remain resident if memory cannot hold all experts. */
#include "moe.c"

#include "model_writer.h"

#include "tests/test.h"

enum { LAYERS = 12, EACH = 32, EXPERTS = LAYERS * EACH };

typedef struct bank {
    moe_cache cache;
    moe_cache_layer layer[LAYERS];
    int32_t memory[2 * EXPERTS + 3 * EXPERTS];
    int32_t wanted[EACH], place[EACH]; /* experts and bays of the last run */
} bank;

static void begin(bank *b, size_t bays, size_t transit) {
    CHECK(moe_cache_bytes(EXPERTS, bays) <= sizeof b->memory, "%zu bays", bays);
    memset(b, 0x55, sizeof *b); /* moe_cache_begin must not rely on zeroed memory */
    moe_cache_begin(&b->cache, b->memory, EXPERTS, bays, transit);
    for (size_t i = 0; i < LAYERS; i++) b->layer[i] = (moe_cache_layer){ i * EACH, EACH, 0 };
}

static size_t plan(bank *b, size_t layer, size_t n) {
    return moe_cache_plan(&b->cache, &b->layer[layer], b->wanted, n, b->place);
}

static void want_all(bank *b) {
    for (int32_t e = 0; e < EACH; e++) b->wanted[e] = e;
}

/* Request experts of a layer; check the order in which they are computed, and their bays. */
static void expect(bank *b, size_t layer, const char *wanted, size_t here, const char *order, const char *place) {
    const size_t n = strlen(wanted);
    size_t got;
    for (size_t i = 0; i < n; i++) b->wanted[i] = wanted[i] - '0';
    got = plan(b, layer, n);
    CHECK(got == here, "layer %zu, %s: %zu are resident, not %zu", layer, wanted, got, here);
    for (size_t i = 0; i < n; i++)
        CHECK(b->wanted[i] == order[i] - '0' && b->place[i] == place[i] - '0',
              "layer %zu, %s, number %zu in order: expert %d in bay %d, not %c in %c", layer, wanted, i, b->wanted[i],
              b->place[i], order[i], place[i]);
}

/* Three bays, one of them for transit. The expected values were computed by hand. */
TEST(the_policy_matches_its_description) {
    static bank b;
    begin(&b, 3, 1);
    expect(&b, 0, "0123", 0, "0123", "0122"); /* experts 0 and 1 become resident; 2 and 3, of equal value, use bay 2 */
    expect(&b, 0, "134", 2, "134", "122");    /* expert 3 is still in the transit bay; expert 4 has no value yet */
    expect(&b, 0, "0", 1, "0", "0");
    expect(&b, 0, "2", 0, "2", "2");
    expect(&b, 0, "3", 0, "3", "2"); /* experts 3 and 1 have the same value, so 1 remains */
    expect(&b, 0, "3", 1, "3", "2");
    expect(&b, 0, "2", 0, "2", "2"); /* expert 2 had a value of .0524 and expert 1 of .0508, so 2 and 0 remain */
    expect(&b, 0, "3", 0, "3", "1"); /* expert 3 has a value of .105; expert 0 has the lowest value */
    expect(&b, 0, "0", 1, "0", "0"); /* expert 0 has not been overwritten yet */
    assert_int_equal(b.cache.hits, 2 + 1 + 1 + 1);
    assert_int_equal(b.cache.fetches, 4 + 1 + 1 + 1 + 1 + 1);
    assert_int_equal(b.layer[0].runs, 9);
}

/* Both layers need their expert 0 in every run, but layer 0 runs ten times as often as layer 1. */
TEST(layers_that_run_more_often_have_priority) {
    static bank b;
    for (size_t first = 0; first < 2; first++) {
        begin(&b, 2, 1);
        for (size_t run = 0; run < 100; run++) {
            b.wanted[0] = 0;
            if (run % 10 == first * 9) plan(&b, 1, 1);
            plan(&b, 0, 1);
        }
        b.wanted[0] = 0;
        assert_int_equal(plan(&b, 0, 1), 1);
        CHECK(b.cache.fetches <= 1 + 10 + 1, "%d fetches: layer 0 is evicted", (int)b.cache.fetches);
    }
}

/* All layers need all experts in cycles. Resident experts remain and yield hits; an LRU cache would have no hits. */
TEST(repeated_scans_hit_resident_experts) {
    static const size_t bays[] = { 20, 33, 64, 100, 200, 383, 384 };
    static bank b;
    for (size_t s = 0; s < MOE_COUNT(bays); s++) {
        const size_t transit = moe_max(1, bays[s] / 16);
        char resident[2][EXPERTS] = { { 0 } };
        begin(&b, bays[s], transit);
        for (size_t cycle = 0; cycle < 2000; cycle++) {
            size_t hits = 0;
            for (size_t l = 0; l < LAYERS; l++) {
                want_all(&b);
                hits += plan(&b, l, EACH);
            }
            if (cycle < 3) continue;
            CHECK(10 * hits >= 9 * bays[s], "%zu bays, cycle %zu: %zu hits", bays[s], cycle, hits);
            memset(resident[cycle % 2], 0, EXPERTS);
            for (size_t i = transit; i < bays[s]; i++) resident[cycle % 2][b.cache.expert[b.cache.order[i]]] = 1;
            CHECK(cycle < 4 || memcmp(resident[0], resident[1], EXPERTS) == 0, "%zu bays, cycle %zu: residents changed",
                  bays[s], cycle);
        }
    }
}

/* Layers need their experts in cycles, but every 28th cycle omits some, as at the start of sentences. Experts
 * of earlier layers must not evict residents. */
TEST(scans_with_gaps_hit_resident_experts) {
    static bank b;
    uint64_t random = 5;
    size_t hits = 0;
    begin(&b, 100, 6);
    for (size_t cycle = 0; cycle < 600; cycle++)
        for (size_t l = 0; l < LAYERS; l++) {
            size_t n = 0;
            for (int32_t e = 0; e < EACH; e++)
                if (cycle % 28 || mw_below(&random, 100) < 87) b.wanted[n++] = e;
            const size_t here = plan(&b, l, n);
            hits += cycle < 300 ? 0 : here;
        }
    CHECK(hits >= 300 * 90, "%zu hits in 300 cycles, 94 experts are resident", hits);
}

/* Eight popular experts of a layer get most visits and remain resident; then eight other experts become popular. */
TEST(popular_experts_remain_resident) {
    enum { POPULAR = 8, RUNNING = 4 };
    static bank b;
    uint64_t random = 7;
    begin(&b, POPULAR * RUNNING + 2, 2);
    for (size_t phase = 0; phase < 2; phase++)
        for (size_t run = 0; run < 300; run++) {
            if (run == 150) b.cache.hits = b.cache.fetches = 0;
            for (size_t l = 0; l < RUNNING; l++) {
                size_t n = 0;
                for (int32_t e = 0; e < EACH; e++)
                    if (mw_below(&random, 100) < (e / POPULAR == (int32_t)phase ? 90 : 6)) b.wanted[n++] = e;
                plan(&b, l, n);
            }
            if (run < 299) continue;
            for (size_t l = 0; l < RUNNING; l++)
                for (size_t e = 0; e < POPULAR; e++)
                    CHECK(b.cache.bay[l * EACH + phase * POPULAR + e] >= 0, "phase %zu: expert %zu of layer %zu", phase,
                          e, l);
            /* Popular experts are visited 8 x .9 times per run on average, the others 24 x .06 times. */
            CHECK(b.cache.hits > 4 * b.cache.fetches, "phase %zu: %d hits, %d fetches", phase, (int)b.cache.hits,
                  (int)b.cache.fetches);
        }
}

/* State of a simple implementation of the policy: tables indexed by expert, without a heap. */
typedef struct naive {
    float frequency[EXPERTS], value[EXPERTS], before[EXPERTS]; /* before: value before the current run */
    int32_t where[EXPERTS], transit[EXPERTS];                  /* transit: bays for transit, used in turn */
    int resident[EXPERTS], wanted[EXPERTS];
    size_t turn;
} naive;

static int32_t naive_bay(naive *m, const bank *b, size_t expert) {
    int32_t *transit = &m->transit[m->turn++ % b->cache.transit], bay = *transit;
    float least = FLT_MAX;
    int32_t from = -1;
    for (int e = 0; e < EXPERTS; e++) m->where[e] = m->where[e] == bay ? -1 : m->where[e];
    m->where[expert] = bay;
    for (int32_t s = 0; s < (int32_t)b->cache.bays; s++) { /* find the resident with the lowest value */
        int who = -1, is_transit = 0;
        for (size_t i = 0; i < b->cache.transit; i++) is_transit |= m->transit[i] == s;
        for (int e = 0; e < EXPERTS; e++) who = m->where[e] == s ? e : who;
        if (is_transit || (who >= 0 && m->wanted[who])) continue;
        if ((who < 0 ? -1.0f : m->value[who]) < least) least = who < 0 ? -1.0f : m->value[who], from = s;
    }
    if (from >= 0 && m->before[expert] > least) *transit = from;
    return bay;
}

TEST(random_runs_equal_a_simple_implementation) {
    static bank b;
    static naive m;
    uint64_t random = 3;
    for (size_t round = 0; round < 40; round++) {
        const size_t bays = 1 + mw_below(&random, round % 4 ? 24 : 100), transit = 1 + mw_below(&random, bays);
        const size_t layers = 1 + mw_below(&random, 5);
        begin(&b, bays, transit);
        memset(&m, 0, sizeof m);
        for (int e = 0; e < EXPERTS; e++) m.where[e] = -1;
        for (size_t i = 0; i < transit; i++) m.transit[i] = (int32_t)i;
        for (size_t run = 0; run < 60; run++) {
            const size_t layer = mw_below(&random, layers), first = layer * EACH, share = mw_below(&random, 5);
            int32_t order[EACH], wanted[EACH];
            size_t n = 0, here = 0, got;
            for (int32_t e = 0; e < EACH; e++)
                if (mw_below(&random, 4) < share) wanted[n++] = e;
            memset(m.wanted, 0, sizeof m.wanted);
            for (size_t i = 0; i < n; i++) m.wanted[first + (size_t)wanted[i]] = 1;
            for (size_t e = first; e < first + EACH; e++) {
                m.frequency[e] = 0.97f * m.frequency[e];
                m.before[e] = m.frequency[e] * (float)(b.layer[layer].runs + 1);
                m.frequency[e] += m.wanted[e] ? 0.03f : 0.0f;
                m.value[e] = m.frequency[e] * (float)(b.layer[layer].runs + 1);
            }
            for (size_t there = 2, at = 0; there-- > 0;)
                for (size_t i = 0; i < n; i++)
                    if ((m.where[first + (size_t)wanted[i]] >= 0) == (int)there) order[at++] = wanted[i], here += there;
            memcpy(b.wanted, wanted, sizeof wanted);
            got = plan(&b, layer, n);
            CHECK(got == here, "round %zu, run %zu: %zu are resident, not %zu", round, run, got, here);
            for (size_t i = 0; i < n; i++) {
                const size_t e = first + (size_t)order[i];
                const int32_t bay = i < here ? m.where[e] : naive_bay(&m, &b, e);
                CHECK(b.wanted[i] == order[i] && b.place[i] == bay,
                      "round %zu, run %zu, number %zu: expert %d in bay %d, not %d in %d", round, run, i, b.wanted[i],
                      b.place[i], order[i], bay);
            }
        }
    }
}

int main(void) { return run_all_tests(NULL, NULL); }
