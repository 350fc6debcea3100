/* test_gating.c - tests gates in sessions: independence from other rows, noise, overrides, routing, saved thresholds,
 * models without an encoder, files with invalid gates. test_golden.c checks the values of gates. */
#include "moe.c"

#include "tests/test.h"

#include "tests/engine/model_writer.h"

/* Models written by tests/golden/make_golden.py. */
#define GOLDEN "tests/golden/model-"
static const char *const translators[] = { GOLDEN "hierarchy-topk.bin", GOLDEN "hierarchy-threshold.bin",
                                           GOLDEN "base.bin" };
static const char *const language_models[] = { GOLDEN "language.bin", GOLDEN "language-hierarchy.bin" };
static const char *const classifiers[] = { GOLDEN "deep.bin", GOLDEN "deep-sparse.bin" };

static moe_model *open_model(const char *path) {
    moe_model *m = NULL;
    moe_error e = { MOE_OK, "", "" };
    CHECK(moe_model_open(path, NULL, &m, &e) == MOE_OK, "%s: %s", path, e.message);
    return m;
}

static moe_session *new_session(const moe_model *m, const moe_session_params *p) {
    moe_session *s = NULL;
    moe_error e = { MOE_OK, "", "" };
    CHECK(moe_session_new(m, p, &s, &e) == MOE_OK, "%s: %s", e.where, e.message);
    return s;
}

static moe_session_params params_for(const moe_model *m) {
    moe_session_params p = moe_session_params_default(m);
    p.threads = p.batch = 1;
    p.isa = "portable";
    p.max_source = p.max_target = 64;
    if (moe_model_language_count(m))
        p.target_tag = moe_model_language_tag(m, "de") >= 0 ? moe_model_language_tag(m, "de") : 4;
    return p;
}

/* ---- Sentences, their results, and the routes of their tokens ---- */

enum { SENTENCES = 24, LONGEST = 12, MOST = 40, ROUTES = 6000 };

/* Experts that a mixture selected for a token. Tests compare the struct's bytes. */
typedef struct route {
    size_t sentence, position, n;
    int32_t token;
    int empty;
    char layer[16];
    uint32_t experts[16];
    float weights[16];
} route;

/* Results of all sentences. Tests compare the struct's bytes, so it must be zeroed before use. */
typedef struct outcome {
    size_t n_ids[SENTENCES];
    int32_t ids[SENTENCES][MOST];
    float logprobs[SENTENCES][MOST + 1], score[SENTENCES];
} outcome;

typedef struct script {
    int32_t source[SENTENCES][LONGEST], target[SENTENCES][MOST];
    size_t n_source[SENTENCES], n_target[SENTENCES];
    int scoring;
    size_t next;
    outcome *outcome;
    route *routes; /* NULL to record no routes */
    size_t n_routes;
} script;

static script *new_script(const moe_model *m, uint64_t seed) {
    script *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->outcome = calloc(1, sizeof *s->outcome);
    assert_non_null(s->outcome);
    s->scoring = moe_model_kind(m) == MOE_MODEL_LANGUAGE;
    for (size_t i = 0; i < SENTENCES; i++) {
        s->n_source[i] = s->scoring ? 0 : 1 + i % (LONGEST - 1);
        s->n_target[i] = i % 11;
        for (size_t k = 0; k < LONGEST; k++) {
            seed = moe_hash(seed);
            s->source[i][k] = 6 + (int32_t)(seed % (uint64_t)(moe_model_vocabulary(m) - 6));
            s->target[i][k] = 6 + (int32_t)((seed >> 32) % (uint64_t)(moe_model_vocabulary(m) - 6));
        }
    }
    return s;
}

static void free_script(script *s) {
    free(s->outcome);
    free(s->routes);
    free(s);
}

static int pull(void *user, int wait, moe_request *r) {
    script *s = user;
    const size_t i = s->next;
    (void)wait;
    if (i == SENTENCES) return MOE_PULL_END;
    s->next++;
    r->source = s->n_source[i] ? s->source[i] : NULL;
    r->n_source = s->n_source[i];
    if (s->scoring) r->target = s->target[i], r->n_target = s->n_target[i];
    r->user = &s->n_source[i];
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *r) {
    script *s = user;
    const size_t i = (size_t)((size_t *)r->user - s->n_source);
    const moe_hypothesis *h = r->hypotheses;
    CHECK(r->status == MOE_OK, "sentence %zu: %s", i, r->message);
    assert_true(h->n_ids < MOST);
    s->outcome->n_ids[i] = h->n_ids;
    s->outcome->score[i] = h->score;
    if (h->n_ids) memcpy(s->outcome->ids[i], h->ids, h->n_ids * sizeof *h->ids);
    if (h->n_ids + (size_t)h->finished)
        memcpy(s->outcome->logprobs[i], h->token_logprobs, (h->n_ids + (size_t)h->finished) * sizeof(float));
}

static void keep_route(void *user, const moe_routing *r) {
    script *s = user;
    route *to = &s->routes[s->n_routes++];
    assert_true(s->n_routes <= ROUTES && r->n <= 16);
    to->sentence = r->user ? (size_t)((size_t *)r->user - s->n_source) : 0;
    to->position = r->position, to->n = r->n, to->token = r->token, to->empty = r->empty;
    snprintf(to->layer, sizeof to->layer, "%s", r->layer);
    if (r->n)
        memcpy(to->experts, r->experts, r->n * sizeof *r->experts),
            memcpy(to->weights, r->weights, r->n * sizeof *r->weights);
}

static void run(const moe_model *m, const moe_session_params *params, script *s) {
    moe_session_params p = *params;
    moe_session *session;
    moe_error e = { MOE_OK, "", "" };
    if (s->routes) p.routing = keep_route, p.routing_user = s;
    session = new_session(m, &p);
    memset(s->outcome, 0, sizeof *s->outcome);
    if (s->routes) memset(s->routes, 0, ROUTES * sizeof *s->routes);
    s->next = s->n_routes = 0;
    CHECK(moe_translate(session, pull, done, s, &e) == MOE_OK, "%s", e.message);
    moe_session_free(session);
}

static void watch_routes(script *s) {
    s->routes = calloc(ROUTES, sizeof *s->routes);
    assert_non_null(s->routes);
}

static int by_place(const void *a, const void *b) {
    const route *x = a, *y = b;
    const int layer = strcmp(x->layer, y->layer);
    if (x->sentence != y->sentence) return x->sentence < y->sentence ? -1 : 1;
    if (layer) return layer;
    return x->position < y->position ? -1 : x->position > y->position;
}

/* ---- The same bytes everywhere ---- */

/* Check that results and routes do not depend on the batch, threads or instruction set. */
static void compare_everywhere(const char *path, int noise) {
    moe_model *m = open_model(path);
    script *first = new_script(m, 5), *other = new_script(m, 5);
    moe_session_params p = params_for(m);
    p.noise = noise;
    p.noise_seed = 3;
    p.beam = 1; /* with a larger beam, routes depend on where hypotheses end */
    watch_routes(first), watch_routes(other);
    run(m, &p, first);
    qsort(first->routes, first->n_routes, sizeof *first->routes, by_place);
    assert_true(first->n_routes > SENTENCES);
    for (int i = 0; i < 3; i++)
        for (size_t isa = 0; isa < MOE_COUNT(moe_isas); isa++) {
            p.batch = i == 0 ? 1 : i == 1 ? 5 : 32;
            p.threads = 3 - i;
            p.isa = moe_isas[isa]->name;
            if (!moe_isa_available(p.isa)) continue;
            run(m, &p, other);
            CHECK(memcmp(first->outcome, other->outcome, sizeof *first->outcome) == 0,
                  "%s: batch %d, %s: other results", path, p.batch, p.isa);
            qsort(other->routes, other->n_routes, sizeof *other->routes, by_place);
            assert_int_equal(first->n_routes, other->n_routes);
            assert_memory_equal(first->routes, other->routes, first->n_routes * sizeof *first->routes);
        }
    free_script(first), free_script(other);
    moe_model_close(m);
}

TEST(results_do_not_depend_on_the_batch) {
    for (size_t i = 0; i < MOE_COUNT(translators); i++) compare_everywhere(translators[i], 0);
    for (size_t i = 0; i < MOE_COUNT(language_models); i++) compare_everywhere(language_models[i], 0);
}

TEST(routes_are_sorted_and_sum_to_one) {
    size_t empty = 0, several = 0;
    for (size_t i = 0; i < MOE_COUNT(translators) + MOE_COUNT(language_models); i++) {
        moe_model *m =
            open_model(i < MOE_COUNT(translators) ? translators[i] : language_models[i - MOE_COUNT(translators)]);
        script *s = new_script(m, 9);
        const moe_session_params p = params_for(m);
        size_t tokens = 0;
        watch_routes(s);
        s->scoring = 1; /* scoring routes one row per position */
        run(m, &p, s);
        for (size_t k = 0; k < s->n_routes; k++) {
            const route *r = &s->routes[k];
            float sum = 0;
            for (size_t e = 0; e < r->n; e++) {
                sum += r->weights[e];
                assert_true(r->weights[e] > 0 && (e == 0 || r->experts[e] > r->experts[e - 1]));
            }
            /* The weights add up to one, unless a group with an empty mask loses its weight. */
            CHECK(r->empty ? sum < 1.00001f : fabs((double)sum - 1) < 1e-5, "%s: weights of %s add up to %g",
                  moe_model_mixture(m, 0).layer, r->layer, (double)sum);
            empty += (size_t)r->empty;
            several += r->n > 1;
        }
        for (size_t x = 0; x < SENTENCES; x++) tokens += s->n_target[x] + 1;
        for (size_t x = 0; x < moe_model_mixture_count(m); x++) { /* the decoder's mixtures route every token once */
            size_t seen = 0;
            for (size_t k = 0; k < s->n_routes; k++) {
                const route *r = &s->routes[k];
                if (strcmp(r->layer, moe_model_mixture(m, x).layer) != 0) continue;
                seen++;
                if (strncmp(r->layer, "decoder", 7) == 0 && r->position)
                    assert_int_equal(r->token, s->target[r->sentence][r->position - 1]);
            }
            if (strncmp(moe_model_mixture(m, x).layer, "decoder", 7) == 0) assert_int_equal(seen, tokens);
            else assert_true(seen > 0);
        }
        free_script(s);
        moe_model_close(m);
    }
    assert_true(empty > 0 && several > 0);
}

/* ---- Noise ---- */

/* Return the cumulative distribution function of the standard normal distribution. */
static double phi(double x) { return 0.5 * erfc(-x / sqrt(2.0)); }

TEST(noise_is_normal) {
    const size_t n = 200000;
    double sum = 0, squares = 0, fourth = 0, worst = 0;
    size_t below[7] = { 0 };
    for (size_t i = 0; i < n; i++) {
        const uint64_t key = moe_hash(i / 50);
        const double x = (double)moe_normal(key, i % 50),
                     u = ((double)(uint32_t)(moe_hash(key + i % 50) >> 41) + 0.5) / 8388608.0;
        sum += x, squares += x * x, fourth += x * x * x * x;
        worst = fmax(worst, fabs(phi(x) - u));
        for (int b = 0; b < 7; b++) below[b] += x < b - 3;
    }
    assert_true(worst < 1e-6); /* x is the quantile of the uniform number u */
    CHECK(fabs(sum / (double)n) < 0.01 && fabs(squares / (double)n - 1) < 0.015 && fabs(fourth / (double)n - 3) < 0.1,
          "mean %g, variance %g, kurtosis %g", sum / (double)n, squares / (double)n, fourth / (double)n);
    for (int b = 0; b < 7; b++)
        CHECK(fabs((double)below[b] / (double)n - phi(b - 3)) < 0.004, "%zu of %zu below %d", below[b], n, b - 3);
    for (float x = -30; x < 30; x += 0.37f)
        CHECK(fabs((double)moe_softplus(x) - log1p(exp((double)x))) < 1e-6 * (1 + fabs((double)x)), "softplus(%g)",
              (double)x);
}

/* With noise, results depend only on the seed and on the previous tokens. */
TEST(noise_depends_on_its_seed_but_not_on_the_batch) {
    moe_model *m = open_model(GOLDEN "language.bin");
    script *quiet = new_script(m, 5), *noisy = new_script(m, 5), *other = new_script(m, 5);
    moe_session_params p = params_for(m);
    size_t differ = 0;
    compare_everywhere(GOLDEN "language.bin", 1);
    run(m, &p, quiet);
    p.noise = 1;
    p.noise_seed = 3;
    memcpy(noisy->target[1], noisy->target[2], sizeof noisy->target[1]); /* the targets have a common start */
    run(m, &p, noisy);
    assert_true(memcmp(quiet->outcome, noisy->outcome, sizeof *quiet->outcome) != 0);
    assert_memory_equal(noisy->outcome->logprobs[1], noisy->outcome->logprobs[2], sizeof(float));
    p.noise_seed = 4;
    run(m, &p, other);
    for (size_t i = 0; i < SENTENCES; i++)
        differ +=
            memcmp(noisy->outcome->logprobs[i], other->outcome->logprobs[i], sizeof noisy->outcome->logprobs[i]) != 0;
    assert_true(differ > SENTENCES / 2);
    free_script(quiet), free_script(noisy), free_script(other);
    moe_model_close(m);
}

/* ---- Overrides ---- */

static void refuse_session(const moe_model *m, const moe_session_params *p, moe_status status, const char *where,
                           const char *word) {
    moe_session *s = NULL;
    moe_error e = { MOE_OK, "", "" };
    assert_int_equal(moe_session_new(m, p, &s, &e), status);
    assert_null(s);
    assert_string_equal(e.where, where);
    CHECK(strstr(e.message, word), "'%s' lacks '%s'", e.message, word);
}

static void never_called(void *user, const moe_attention *attention) {
    (void)user, (void)attention;
    fail_msg("a classifier has attention");
}

TEST(unsupported_overrides_are_refused) {
    moe_model *m = open_model(GOLDEN "hierarchy-topk.bin"), *deep = open_model(GOLDEN "deep.bin");
    moe_session_params p = params_for(m);
    p.gating = "threshold";
    refuse_session(m, &p, MOE_ERROR_UNSUPPORTED, "gating", "encoder.1");
    p.gating = "random";
    refuse_session(m, &p, MOE_ERROR_ARGUMENT, "gating", "'random'");
    p.gating = NULL;
    p.noise = 1; /* the encoder's mixture has no noise weights */
    refuse_session(m, &p, MOE_ERROR_UNSUPPORTED, "noise", "encoder.1");
    p = params_for(deep);
    p.gating = "topk"; /* a dense mixture does not specify k */
    refuse_session(deep, &p, MOE_ERROR_UNSUPPORTED, "gating", "network.0");
    p.gating = "softmax";
    moe_session_free(new_session(deep, &p));
    p.attention = never_called;
    refuse_session(deep, &p, MOE_ERROR_UNSUPPORTED, "attention", "no attention");
    moe_model_close(m), moe_model_close(deep);
}

/* Overriding gates with the file's own kind changes nothing; other kinds change results. */
TEST(an_override_replaces_the_files_gate) {
    moe_model *m = open_model(GOLDEN "hierarchy-threshold.bin");
    script *s = new_script(m, 5), *t = new_script(m, 5);
    moe_session_params p = params_for(m);
    run(m, &p, s);
    p.gating = "threshold";
    run(m, &p, t);
    assert_memory_equal(s->outcome, t->outcome, sizeof *s->outcome);
    p.gating = "topk";
    run(m, &p, t);
    assert_true(memcmp(s->outcome, t->outcome, sizeof *s->outcome) != 0);
    p.gating = "softmax";
    p.routing = NULL;
    watch_routes(t);
    run(m, &p, t);
    for (size_t i = 0; i < t->n_routes; i++) assert_int_equal(t->routes[i].n, t->routes[i].layer[0] == 'e' ? 8 : 12);
    free_script(s), free_script(t);
    moe_model_close(m);
}

/* Data for a trace that checks that batchwise gates give every expert at least m rows. */
typedef struct columns {
    const moe_model *model;
    size_t gates;
} columns;

static void count_columns(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    columns *c = user;
    size_t m, selected = 0, single = 0, k = 0;
    if (!strstr(name, ".gate") || strstr(name, "logits") || strstr(name, "probabilities")) return;
    for (size_t i = 0; i < moe_model_mixture_count(c->model); i++)
        if (strncmp(name, moe_model_mixture(c->model, i).layer, strlen(name) - 5) == 0)
            k = moe_model_mixture(c->model, i).k;
    m = k * rows / cols > 1 ? k * rows / cols : 1;
    for (size_t e = 0; e < cols; e++) {
        size_t count = 0;
        for (size_t r = 0; r < rows; r++) count += data[r * stride + e] != 0.0f;
        CHECK(count >= m, "%s: expert %zu has %zu of %zu rows, not %zu", name, e, count, rows, m);
        selected += count;
    }
    for (size_t r = 0; r < rows; r++) {
        size_t count = 0;
        for (size_t e = 0; e < cols; e++) count += data[r * stride + e] != 0.0f;
        single += count == 1;
    }
    assert_true(selected - m * cols <= single); /* the gate adds only rows that no expert had selected */
    c->gates++;
}

TEST(batchwise_gives_each_expert_the_same_number_of_rows) {
    moe_model *m = open_model(GOLDEN "base.bin");
    script *s = new_script(m, 5), *t = new_script(m, 5);
    moe_session_params p = params_for(m);
    columns seen = { m, 0 };
    p.gating = "batchwise";
    p.batch = 8;
    run(m, &p, s);
    p.trace = count_columns;
    p.trace_user = &seen;
    run(m, &p, t);
    assert_true(seen.gates > 4);
    assert_memory_equal(s->outcome, t->outcome, sizeof *s->outcome); /* tracing does not change results */
    p.trace = NULL;
    p.threads = 3;
    p.isa = NULL;
    run(m, &p, t);
    assert_memory_equal(s->outcome, t->outcome, sizeof *s->outcome); /* results do not depend on threads or kernels */
    free_script(s), free_script(t);
    moe_model_close(m);
}

/* ---- Saved thresholds ---- */

static moe_model *saved_with(const moe_model *m, const moe_meta_entry *entries, size_t n_entries,
                             const moe_vector_entry *vectors, size_t n_vectors, moe_status want, moe_error *e) {
    char path[] = "/tmp/moe-gating-XXXXXX"; /* template for mkdtemp */
    char file[64];
    const moe_save_params p = { .type = MOE_TYPE_F32,
                                .experts = MOE_TYPE_F32,
                                .entries = entries,
                                .n_entries = n_entries,
                                .vectors = vectors,
                                .n_vectors = n_vectors };
    moe_model *out = NULL;
    moe_status status;
    assert_non_null(mkdtemp(path));
    snprintf(file, sizeof file, "%s/m.bin", path);
    CHECK(moe_model_save(m, file, &p, e) == MOE_OK, "%s", e->message);
    status = moe_model_open(file, &(moe_model_params){ .verify = 1 }, &out, e);
    assert_int_equal(status, want);
    remove(file);
    rmdir(path);
    return out;
}

static moe_meta_entry text_entry(const char *key, const char *text) {
    return (moe_meta_entry){ .key = key, .kind = MOE_META_TEXT, .text = { text, strlen(text) } };
}

TEST(thresholds_can_be_added_and_replaced) {
    moe_model *m = open_model(GOLDEN "language.bin"), *calibrated, *again;
    const moe_mixture mixture = moe_model_mixture(m, 0);
    float t[16], *low = t;
    const moe_meta_entry gate = text_entry("decoder.1.gate", "threshold");
    moe_vector_entry v = { "decoder.1.gate.threshold", t, mixture.experts };
    script *s = new_script(m, 5);
    moe_session_params p = params_for(m);
    moe_error e;
    assert_true(mixture.experts <= 16 && mixture.gate == MOE_GATE_TOPK);
    for (size_t i = 0; i < 16; i++) t[i] = 0.99f;
    calibrated = saved_with(m, &gate, 1, &v, 1, MOE_OK, &e);
    assert_int_equal(moe_model_mixture(calibrated, 0).gate, MOE_GATE_THRESHOLD);
    assert_int_equal(moe_model_tensor_count(calibrated), moe_model_tensor_count(m) + 1);
    watch_routes(s);
    run(calibrated, &p, s);
    for (size_t i = 0; i < s->n_routes; i++) assert_true(s->routes[i].n == 1);
    for (size_t i = 0; i < 16; i++) low[i] = 0;
    again = saved_with(calibrated, NULL, 0, &v, 1, MOE_OK, &e);
    assert_int_equal(moe_model_tensor_count(again), moe_model_tensor_count(calibrated));
    run(again, &p, s);
    for (size_t i = 0; i < s->n_routes; i++) assert_int_equal(s->routes[i].n, mixture.experts);
    free_script(s);
    moe_model_close(m), moe_model_close(calibrated), moe_model_close(again);
}

TEST(vectors_that_do_not_fit_are_refused) {
    moe_model *m = open_model(GOLDEN "language.bin");
    const float t[8] = { 0 };
    const moe_vector_entry bad[][2] = { { { NULL, t, 8 } },         { { "decoder.1.gate.threshold", NULL, 8 } },
                                        { { "x", t, 0 } },          { { "embedding.weight", t, 8 } },
                                        { { "Not A Name", t, 8 } }, { { "x", t, 8 }, { "x", t, 8 } } };
    for (size_t i = 0; i < MOE_COUNT(bad); i++) {
        const moe_save_params p = { .type = MOE_TYPE_F32,
                                    .experts = MOE_TYPE_F32,
                                    .vectors = bad[i],
                                    .n_vectors = i == 5 ? 2 : 1 };
        moe_error e;
        assert_int_equal(moe_model_save(m, "/tmp/moe-gating-never", &p, &e), MOE_ERROR_ARGUMENT);
        assert_string_equal(e.where, i == 2 ? "tensor x" : i == 5 ? "tensor directory" : "vectors");
        assert_int_not_equal(access("/tmp/moe-gating-never", F_OK), 0);
    }
    moe_model_close(m);
}

/* ---- Headers with invalid gates ---- */

static void refuse_entry(const char *path, const char *key, const char *text, int64_t value, const char *word) {
    moe_model *m = open_model(path);
    moe_meta_entry entry = { .key = key, .kind = MOE_META_INT, .integer = value };
    moe_error e = { MOE_OK, "", "" };
    if (text) entry = text_entry(key, text);
    assert_null(saved_with(m, &entry, 1, NULL, 0, MOE_ERROR_FORMAT, &e));
    CHECK(strstr(e.where, key) && strstr(e.message, word), "%s = %s %lld: '%s' at '%s'", key, text ? text : "",
          (long long)value, e.message, e.where);
    moe_model_close(m);
}

TEST(impossible_gates_are_refused_by_their_field) {
    static const char hierarchy[] = GOLDEN "hierarchy-topk.bin", language[] = GOLDEN "language.bin",
                      deep[] = GOLDEN "deep.bin";
    refuse_entry(hierarchy, "encoder.1.groups", NULL, 5, "divisor");
    refuse_entry(hierarchy, "encoder.1.groups", NULL, 13, "must be");
    refuse_entry(hierarchy, "encoder.1.groups", NULL, -1, "must be");
    refuse_entry(hierarchy, "encoder.1.k", NULL, 0, "must be");
    refuse_entry(hierarchy, "encoder.1.k", NULL, 5, "must be");        /* a group has 4 experts */
    refuse_entry(hierarchy, "encoder.1.parent.k", NULL, 4, "must be"); /* there are 3 groups */
    refuse_entry(hierarchy, "encoder.1.parent.k", NULL, 0, "must be");
    refuse_entry(hierarchy, "encoder.1.gate", "noisy", 0, "unknown value");
    refuse_entry(hierarchy, "encoder.1.gate", "batchwise", 0, "unknown value");
    refuse_entry(hierarchy, "encoder.1.parent.gate", "expert choice", 0, "unknown value");
    refuse_entry(hierarchy, "encoder.1.parent.empty", "random", 0, "unknown value");
    refuse_entry(hierarchy, "encoder.1.gate.relu", NULL, 2, "must be");
    refuse_entry(hierarchy, "encoder.1.expert", "quadratic", 0, "unknown value");
    refuse_entry(hierarchy, "encoder.1.activation", "none", 0, "relu");
    refuse_entry(language, "decoder.0.context", "previous", 0, "none");
    refuse_entry(deep, "network.0.kind", "lstm", 0, "not supported in the network");
    refuse_entry(deep, "network.layers", NULL, 0, "must be");
}

/* A missing or non-finite threshold is reported with the name of its tensor. */
TEST(missing_and_broken_thresholds_are_refused_by_name) {
    moe_model *m = open_model(GOLDEN "hierarchy-topk.bin");
    moe_meta_entry gate = text_entry("encoder.1.gate", "threshold");
    float t[12] = { 0 };
    moe_vector_entry v[2] = { { "encoder.1.gate.threshold", t, 12 }, { "encoder.1.parent.threshold", t, 3 } };
    const struct {
        const char *key;
        int64_t value;
        const char *tensor;
    } others[] = { { "encoder.1.gate.hidden", 7, "encoder.1.gate.hidden.weight" },
                   { "encoder.1.groups", 6, "encoder.1.parent.weight" } };
    moe_error e = { MOE_OK, "", "" };
    assert_null(saved_with(m, &gate, 1, NULL, 0, MOE_ERROR_FORMAT, &e));
    assert_non_null(strstr(e.message, "encoder.1.gate.threshold is missing"));
    assert_null(saved_with(m, &gate, 1, v, 1, MOE_ERROR_FORMAT, &e)); /* the parent is a threshold gate too */
    assert_non_null(strstr(e.message, "encoder.1.parent.threshold is missing"));
    moe_model_close(saved_with(m, &gate, 1, v, 2, MOE_OK, &e));
    v[0].n = 11;
    assert_null(saved_with(m, &gate, 1, v, 2, MOE_ERROR_FORMAT, &e));
    assert_non_null(strstr(e.where, "encoder.1.gate.threshold"));
    v[0].n = 12;
    t[2] = moe_from_bits(0x7fc00000u);
    assert_null(saved_with(m, &gate, 1, v, 2, MOE_ERROR_FORMAT, &e));
    assert_non_null(strstr(e.message, "is not finite"));
    for (size_t i = 0; i < MOE_COUNT(others); i++) {
        const moe_meta_entry other = { .key = others[i].key, .kind = MOE_META_INT, .integer = others[i].value };
        assert_null(saved_with(m, &other, 1, NULL, 0, MOE_ERROR_FORMAT, &e));
        CHECK(strstr(e.where, others[i].tensor), "%s: '%s'", others[i].key, e.message);
    }
    moe_model_close(m);
}

/* ---- Models without an encoder ---- */

TEST(a_language_model_scores_and_does_not_translate) {
    moe_model *m = open_model(GOLDEN "language.bin");
    const moe_session_params p = params_for(m);
    moe_session *session = new_session(m, &p);
    script *s = new_script(m, 5);
    moe_error e = { MOE_OK, "", "" };
    int32_t class_of;
    float logprob, x[64] = { 0 };
    run(m, &p, s);
    for (size_t i = 0; i < SENTENCES; i++) {
        float sum = 0;
        for (size_t k = 0; k <= s->n_target[i]; k++) {
            assert_true(s->outcome->logprobs[i][k] < 0);
            sum += s->outcome->logprobs[i][k];
        }
        assert_int_equal(s->outcome->n_ids[i], s->n_target[i]);
        assert_true(sum < 0);
    }
    assert_int_equal(moe_classify(session, x, 1, &class_of, &logprob, &e), MOE_ERROR_ARGUMENT);
    moe_session_free(session);
    free_script(s);
    moe_model_close(m);
}

static void refused(void *user, const moe_result *r) {
    assert_int_equal(r->status, MOE_ERROR_ARGUMENT);
    assert_non_null(strstr(r->message, "language model"));
    ++*(size_t *)user;
}
/* Pull two invalid requests: one with a source, one with the start of a text. */
static int pull_what_is_refused(void *user, int wait, moe_request *r) {
    static const int32_t ids[] = { 7, 8 };
    const size_t before = *(size_t *)user;
    (void)wait;
    if (before == 2) return MOE_PULL_END;
    if (before == 0) r->source = ids, r->n_source = 2;
    else r->target = ids, r->n_target = 2, r->prefix = 1;
    return MOE_PULL_REQUEST;
}

TEST(language_models_accept_no_source_and_no_prefix) {
    moe_model *m = open_model(GOLDEN "language.bin");
    const moe_session_params p = params_for(m);
    moe_session *session = new_session(m, &p);
    moe_error e;
    size_t count = 0;
    assert_int_equal(moe_translate(session, pull_what_is_refused, refused, &count, &e), MOE_OK);
    assert_int_equal(count, 2);
    moe_session_free(session);
    moe_model_close(m);
}

TEST(classes_do_not_depend_on_batch_threads_or_memory) {
    enum { ROWS = 41 };
    for (size_t c = 0; c < MOE_COUNT(classifiers); c++) {
        moe_model *m = open_model(classifiers[c]);
        const size_t width = moe_model_width(m);
        float *x = calloc(ROWS * width, sizeof *x), first[ROWS * 3], got[ROWS * 3];
        int32_t first_classes[ROWS * 3], classes[ROWS * 3];
        uint64_t random = 3;
        moe_error e = { MOE_OK, "", "" };
        assert_non_null(x);
        for (size_t i = 0; i < ROWS * width; i++) x[i] = (float)((random = moe_hash(random)) >> 40) / 8388608.0f - 1.0f;
        for (int round = 0; round < 5; round++)
            for (size_t isa = 0; isa < MOE_COUNT(moe_isas); isa++) {
                moe_session_params p = params_for(m);
                moe_session *s;
                p.batch = round ? 11 * round : 1;
                p.threads = 1 + round % 3;
                p.nbest = p.beam = 3;
                p.isa = moe_isas[isa]->name;
                if (!moe_isa_available(p.isa)) continue;
                s = new_session(m, &p);
                assert_int_equal(moe_classify(s, x, ROWS, classes, got, &e), MOE_OK);
                if (!round && !isa) memcpy(first, got, sizeof got), memcpy(first_classes, classes, sizeof classes);
                assert_memory_equal(first, got, sizeof got);
                assert_memory_equal(first_classes, classes, sizeof classes);
                assert_int_equal(moe_session_stats(s).sentences, ROWS);
                x[7 * width] = moe_from_bits(0x7fc00000u);
                assert_int_equal(moe_classify(s, x, ROWS, classes, got, &e), MOE_ERROR_NUMERIC);
                assert_non_null(strstr(e.message, "row 7 "));
                x[7 * width] = 0.25f;
                if (!round && !isa) { /* the inputs have changed since the first run */
                    assert_int_equal(moe_classify(s, x, ROWS, first_classes, first, &e), MOE_OK);
                }
                moe_session_free(s);
            }
        free(x);
        moe_model_close(m);
    }
}

int main(void) { return run_all_tests(NULL, NULL); }
