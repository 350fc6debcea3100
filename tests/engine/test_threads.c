/* test_threads.c - tests moe.h's guarantees to multithreaded programs: any number of threads can share a model, each
 * with its own session. A session can have its own threads, and any thread can cancel the session. `make tsan` runs
 * these tests under the thread sanitizer, which detects races even if the results are correct. */
#define _POSIX_C_SOURCE 200809L /* nanosleep */

#include "moe.h"

#include "model_writer.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include "tests/test.h"

enum { THREADS = 8, SENTENCES = 12, LONGEST = 40, KINDS = 4 };

/* ---- Models and their results with one thread ---- */

typedef struct result {
    size_t delivered;
    moe_status status;
    int32_t ids[LONGEST];
    size_t n_ids;
    float logprob;
} result;

typedef struct fixture {
    mw_image image;
    moe_model *model;
    result expected[SENTENCES];
} fixture;

typedef struct feed {
    const fixture *f;
    result *results; /* [SENTENCES] */
    int32_t source[SENTENCES][8];
    size_t next;
    moe_session *cancelled; /* cancel after the second result, from its callback */
} feed;

static fixture fixtures[KINDS];

static int pull(void *user, int wait, moe_request *r) {
    feed *x = user;
    const size_t i = x->next;
    (void)wait;
    if (i == SENTENCES) return MOE_PULL_END;
    for (size_t k = 0; k < 8; k++) x->source[i][k] = 6 + (int32_t)((7 * i + 5 * k + i * k) % (MW_VOCABULARY - 6));
    if (moe_model_kind(x->f->model) == MOE_MODEL_LANGUAGE) r->target = x->source[i], r->n_target = 1 + i % 8;
    else r->source = x->source[i], r->n_source = 1 + i % 8;
    r->user = &x->results[x->next++];
    return MOE_PULL_REQUEST;
}

/* Store a result. Several threads call this function, so tests compare the results later instead of asserting here. */
static void done(void *user, const moe_result *r) {
    feed *x = user;
    result *to = r->user;
    to->delivered++;
    to->status = r->status;
    if (!r->n_hypotheses) return;
    to->n_ids = r->hypotheses[0].n_ids;
    to->logprob = r->hypotheses[0].logprob;
    if (to->n_ids && to->n_ids <= LONGEST) memcpy(to->ids, r->hypotheses[0].ids, to->n_ids * sizeof *to->ids);
    if (x->cancelled && x->results[1].delivered) moe_session_cancel(x->cancelled);
}

static moe_session_params params_of(const fixture *f, int threads, int batch) {
    moe_session_params p = moe_session_params_default(f->model);
    p.threads = threads;
    p.batch = batch;
    p.beam = 3;
    p.max_source = 20, p.max_target = 20;
    p.target_tag = MW_TAG_DE, p.source_tag = MW_TAG_EN;
    p.device = "cpu";
    return p;
}

/* Translate; return 1 if the status and all results equal those of a single thread. */
static int translates_as_expected(const fixture *f, moe_session *s) {
    result results[SENTENCES];
    feed x = { .f = f, .results = results };
    memset(results, 0, sizeof results);
    return moe_translate(s, pull, done, &x, NULL) == MOE_OK && memcmp(results, f->expected, sizeof results) == 0;
}

static moe_session *session_of(const fixture *f, int threads, int batch) {
    const moe_session_params p = params_of(f, threads, batch);
    moe_session *s = NULL;
    return moe_session_new(f->model, &p, &s, NULL) == MOE_OK ? s : NULL;
}

FIXTURE(make_fixtures) {
    mw_model *models[KINDS] = { mw_small(MW_GNMT, MW_Q8, 3), mw_transformer(MW_NLLB, MW_F32, 3),
                                mw_language_model(MW_F16, 3), mw_hierarchical(MW_F32, 3) };
    for (int i = 0; i < KINDS; i++) {
        fixture *f = &fixtures[i];
        feed x = { .f = f, .results = f->expected };
        moe_session *s;
        f->image = mw_build(models[i]);
        mw_free(models[i]);
        if (moe_model_open_memory(f->image.data, f->image.bytes, NULL, &f->model, NULL)) return -1;
        s = session_of(f, 1, 1);
        if (!s || moe_translate(s, pull, done, &x, NULL)) return -1;
        moe_session_free(s);
    }
    return 0;
}

FIXTURE(drop_fixtures) {
    for (int i = 0; i < KINDS; i++) {
        moe_model_close(fixtures[i].model);
        free(fixtures[i].image.data);
    }
    return 0;
}

/* ---- One session ---- */

typedef struct shared {
    feed feed; /* first member, because `pull` and `done` get a pointer to it */
    moe_session *session;
    moe_status inner;
    moe_error error;
    atomic_int waits, goes_on;
} shared;

static void translate_within(void *user, const moe_result *r) {
    shared *x = user;
    done(&x->feed, r);
    x->inner = moe_translate(x->session, pull, done, &x->feed, &x->error);
}

/* A callback that translates with its own session gets an error; the outer call is unaffected. */
TEST(a_call_within_a_callback_is_refused) {
    for (int i = 0; i < KINDS; i++) {
        result results[SENTENCES] = { 0 };
        shared x = { .feed = { .f = &fixtures[i], .results = results }, .session = session_of(&fixtures[i], 2, 3) };
        assert_non_null(x.session);
        assert_int_equal(moe_translate(x.session, pull, translate_within, &x, NULL), MOE_OK);
        assert_int_equal(x.inner, MOE_ERROR_ARGUMENT);
        assert_non_null(strstr(x.error.message, "in use by another call"));
        assert_memory_equal(results, fixtures[i].expected, sizeof results);
        assert_int_equal(translates_as_expected(&fixtures[i], x.session), 1);
        moe_session_free(x.session);
    }
}

static int pull_and_hold(void *user, int wait, moe_request *r) {
    shared *x = user;
    atomic_store(&x->waits, 1);
    while (!atomic_load(&x->goes_on)) {}
    return pull(&x->feed, wait, r);
}

static void *hold_session(void *user) {
    shared *x = user;
    x->inner = moe_translate(x->session, pull_and_hold, done, x, NULL);
    return NULL;
}

TEST(a_second_thread_in_a_session_is_refused) {
    result results[SENTENCES] = { 0 };
    shared x = { .feed = { .f = &fixtures[0], .results = results }, .session = session_of(&fixtures[0], 2, 3) };
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, hold_session, &x), 0);
    while (!atomic_load(&x.waits)) {}
    for (int i = 0; i < 100; i++) assert_int_equal(translates_as_expected(&fixtures[0], x.session), 0);
    atomic_store(&x.goes_on, 1);
    pthread_join(thread, NULL);
    assert_int_equal(x.inner, MOE_OK);
    assert_memory_equal(results, fixtures[0].expected, sizeof results);
    moe_session_free(x.session);
}

/* ---- Threads ---- */

typedef struct job {
    int number;
    size_t rounds, wrong; /* wrong: number of failed rounds */
    atomic_int *running;
    moe_session *session;
} job;

/* Run `body` in THREADS threads and add up the failures. */
static size_t in_threads(void *(*body)(void *), size_t rounds) {
    pthread_t threads[THREADS];
    job jobs[THREADS];
    size_t wrong = 0;
    for (int i = 0; i < THREADS; i++) {
        jobs[i] = (job){ .number = i, .rounds = mw_slow() ? 1 : rounds };
        assert_int_equal(pthread_create(&threads[i], NULL, body, &jobs[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        wrong += jobs[i].wrong;
    }
    return wrong;
}

/* Create and free sessions while other threads compute, and query each model continuously. */
static void *use_shared_models(void *arg) {
    job *j = arg;
    for (size_t round = 0; round < j->rounds; round++) {
        const fixture *f = &fixtures[((size_t)j->number + round) % KINDS];
        const moe_session_params p = params_of(f, 1 + j->number % 2, 1 + j->number);
        moe_session *s = session_of(f, p.threads, p.batch);
        size_t bytes = 0;
        int good = s && moe_session_bytes(f->model, &p, &bytes, NULL) == MOE_OK;
        good = good && moe_session_stats(s).bytes == bytes && moe_isa_available("portable");
        good = good && moe_model_meta_find(f->model, "vocab.size") >= 0 && moe_model_layer(f->model, 0).name;
        good = good && translates_as_expected(f, s) && translates_as_expected(f, s);
        moe_session_free(s);
        j->wrong += !good;
    }
    return NULL;
}

TEST(eight_threads_share_models) { assert_int_equal(in_threads(use_shared_models, 4), 0); }

/* Open, save and close the thread's own model, whose bytes are shared. */
static void *open_and_close(void *arg) {
    job *j = arg;
    for (size_t round = 0; round < j->rounds; round++) {
        fixture f = fixtures[((size_t)j->number + round) % KINDS];
        moe_session *s;
        f.model = NULL;
        if (moe_model_open_memory(f.image.data, f.image.bytes, NULL, &f.model, NULL) == MOE_OK) {
            s = session_of(&f, 1, 2);
            j->wrong += !s || !translates_as_expected(&f, s);
            moe_session_free(s);
        } else {
            j->wrong++;
        }
        moe_model_close(f.model);
    }
    return NULL;
}

TEST(models_open_and_close_concurrently) { assert_int_equal(in_threads(open_and_close, 4), 0); }

/* A session has the same results with any batch and two to eight threads. */
TEST(one_session_with_eight_threads) {
    for (int i = 0; i < KINDS; i++)
        for (int threads = THREADS; threads > 1; threads -= 3) {
            moe_session *s = session_of(&fixtures[i], threads, threads);
            assert_non_null(s);
            for (int round = 0; round < 3; round++) assert_true(translates_as_expected(&fixtures[i], s));
            moe_session_free(s);
        }
}

/* Translate with a session that is passed from thread to thread. */
static void *translate_once(void *arg) {
    job *j = arg;
    j->wrong = !translates_as_expected(&fixtures[0], j->session);
    return NULL;
}

TEST(sessions_can_move_between_threads) {
    moe_session *s = session_of(&fixtures[0], 3, 4);
    assert_non_null(s);
    for (int i = 0; i < THREADS; i++) {
        job j = { .session = s };
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, translate_once, &j), 0);
        pthread_join(thread, NULL);
        assert_int_equal(j.wrong, 0);
    }
    moe_session_free(s);
}

/* ---- Cancelling ---- */

static void *cancel_now_and_then(void *arg) {
    job *j = arg;
    const struct timespec pause = { 0, 300000 * (1 + j->number % 4) };
    while (atomic_load(j->running)) {
        moe_session_cancel(j->session);
        nanosleep(&pause, NULL);
    }
    return NULL;
}

/* While several threads cancel a session repeatedly, a call either completes with all results or reports cancellation.
 * All delivered results are correct. */
TEST(other_threads_can_cancel_a_session) {
    moe_session *s = session_of(&fixtures[0], 3, 4);
    atomic_int running = 1;
    pthread_t threads[3];
    job jobs[3];
    size_t whole = 0, cancelled = 0;
    assert_non_null(s);
    for (int i = 0; i < 3; i++) {
        jobs[i] = (job){ .number = i, .running = &running, .session = s };
        assert_int_equal(pthread_create(&threads[i], NULL, cancel_now_and_then, &jobs[i]), 0);
    }
    for (int round = 0; (round < 60 || !cancelled) && round < 5000; round++) {
        result results[SENTENCES];
        feed x = { .f = &fixtures[0], .results = results };
        moe_error e = { MOE_OK, "", "" };
        memset(results, 0, sizeof results);
        const moe_status status = moe_translate(s, pull, done, &x, &e);
        if (status == MOE_OK) whole++;
        else assert_int_equal(status, MOE_ERROR_CANCELLED), cancelled++;
        for (size_t i = 0; i < SENTENCES; i++)
            if (status == MOE_OK || results[i].delivered)
                assert_memory_equal(&results[i], &fixtures[0].expected[i], sizeof results[i]);
    }
    atomic_store(&running, 0);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    assert_true(cancelled > 0);
    (void)moe_translate(s, pull, done, &(feed){ .f = &fixtures[0], .results = (result[SENTENCES]){ { 0 } } }, NULL);
    assert_true(translates_as_expected(&fixtures[0], s)); /* no cancellation is pending */
    moe_session_free(s);
    print_message("# %zu calls completed, %zu cancelled\n", whole, cancelled);
}

/* A cancellation from a callback ends only the current call. */
TEST(a_result_callback_can_cancel_its_session) {
    moe_session *s = session_of(&fixtures[1], THREADS, 2);
    result results[SENTENCES];
    feed x = { .f = &fixtures[1], .results = results, .cancelled = s };
    assert_non_null(s);
    memset(results, 0, sizeof results);
    assert_int_equal(moe_translate(s, pull, done, &x, NULL), MOE_ERROR_CANCELLED);
    assert_int_equal(results[SENTENCES - 1].delivered, 0);
    assert_true(translates_as_expected(&fixtures[1], s));
    moe_session_free(s);
}

int main(void) { return run_all_tests(make_fixtures, drop_fixtures); }
