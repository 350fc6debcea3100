/* test_contract.c - what moe.h promises to programs beside results: versions, lifetimes, the simple call. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */

#include "moe.h"

#include "model_writer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

typedef struct fixture {
    mw_heap heap;
    mw_image image;
    moe_model *model;
} fixture;

static fixture *open_model(void) {
    fixture *f = mw_zeros(sizeof *f);
    moe_model_params params = { .allocator = { mw_heap_allocate, mw_heap_reallocate, mw_heap_release, &f->heap } };
    mw_model *m = mw_small(MW_GNMT, MW_Q8, 7);
    f->image = mw_build(m);
    mw_free(m);
    assert_int_equal(moe_model_open_memory(f->image.data, f->image.bytes, &params, &f->model, NULL), MOE_OK);
    return f;
}

static void drop(fixture *f) {
    assert_int_equal(f->heap.blocks, 0);
    assert_int_equal(f->heap.wrong_sizes, 0);
    free(f->image.data);
    free(f);
}

static moe_session *session_of(const fixture *f) {
    moe_session_params p = moe_session_params_default(f->model);
    moe_session *s = NULL;
    p.threads = 1, p.batch = 2;
    p.max_source = p.max_target = 20;
    p.min_target = 5;
    p.target_tag = MW_TAG_DE;
    assert_int_equal(moe_session_new(f->model, &p, &s, NULL), MOE_OK);
    return s;
}

static void the_number_of_the_version_is_that_of_its_name(void **state) {
    int major = -1, minor = -1, patch = -1;
    (void)state;
    assert_int_equal(sscanf(MOE_VERSION, "%d.%d.%d", &major, &minor, &patch), 3);
    assert_int_equal(MOE_VERSION_NUMBER, major * 1000000 + minor * 1000 + patch);
    assert_int_equal(moe_version_number(), MOE_VERSION_NUMBER);
}

/* ---- The simple call ---- */

static const int32_t source[] = { 7, 9, 11, 8 };

typedef struct seen {
    int sent;
    int32_t ids[20];
    size_t n;
} seen;

static int pull(void *user, int wait, moe_request *r) {
    seen *x = user;
    (void)wait;
    r->source = source, r->n_source = COUNT(source);
    return x->sent++ ? MOE_PULL_END : MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *r) {
    seen *x = user;
    assert_int_equal(r->status, MOE_OK);
    x->n = r->hypotheses[0].n_ids;
    memcpy(x->ids, r->hypotheses[0].ids, x->n * sizeof *x->ids);
}

static void the_simple_call_gives_what_the_other_gives(void **state) {
    fixture *f = open_model();
    moe_session *s = session_of(f);
    seen x = { 0 };
    int32_t ids[20], few[20];
    size_t n = 99;
    moe_error e = { MOE_OK, "", "" };
    (void)state;
    assert_int_equal(moe_translate(s, pull, done, &x, NULL), MOE_OK);
    assert_true(x.n > 2);
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, 20, &n, &e), MOE_OK);
    assert_int_equal(n, x.n);
    assert_memory_equal(ids, x.ids, n * sizeof *ids);
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, x.n, &n, &e), MOE_OK); /* just enough room */
    memset(few, 0x55, sizeof few);
    memset(ids, 0x55, sizeof ids);
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), few, x.n - 1, &n, &e), MOE_ERROR_LIMIT);
    assert_int_equal(n, x.n);
    assert_memory_equal(few, ids, sizeof few);
    assert_string_equal(e.where, "capacity");
    assert_int_equal(moe_translate_ids(s, NULL, 0, NULL, 0, &n, &e), MOE_OK); /* nothing is an empty translation */
    assert_int_equal(n, 0);
    moe_session_free(s);
    moe_model_close(f->model);
    drop(f);
}

static void the_simple_call_says_why_it_fails(void **state) {
    fixture *f = open_model();
    moe_session *s = session_of(f);
    const int32_t unknown[] = { MW_VOCABULARY };
    int32_t ids[20], longest[21];
    size_t n = 77;
    moe_error e = { MOE_OK, "", "" };
    (void)state;
    for (size_t i = 0; i < COUNT(longest); i++) longest[i] = 7;
    assert_int_equal(moe_translate_ids(s, unknown, 1, ids, 20, &n, &e), MOE_ERROR_ARGUMENT);
    assert_non_null(strstr(e.message, "outside the vocabulary"));
    assert_int_equal(e.code, MOE_ERROR_ARGUMENT);
    assert_int_equal(moe_translate_ids(s, longest, COUNT(longest), ids, 20, &n, &e), MOE_ERROR_LIMIT);
    assert_int_equal(moe_translate_ids(s, unknown, 1, ids, 20, &n, NULL), MOE_ERROR_ARGUMENT);
    moe_session_cancel(s);
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, 20, &n, &e), MOE_ERROR_CANCELLED);
    assert_int_equal(n, 77);
    moe_session_free(s);
    moe_model_close(f->model);
    drop(f);
}

static void a_late_cancel_can_be_taken_back(void **state) {
    fixture *f = open_model();
    moe_session *s = session_of(f);
    int32_t ids[20];
    size_t n;
    (void)state;
    moe_session_cancel(s);
    moe_session_uncancel(s);
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, 20, &n, NULL), MOE_OK);
    moe_session_uncancel(s); /* there is none */
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, 20, &n, NULL), MOE_OK);
    moe_session_free(s);
    moe_model_close(f->model);
    drop(f);
}

/* ---- Lifetimes ---- */

static void a_model_stays_until_its_last_session_is_freed(void **state) {
    fixture *f = open_model();
    moe_session *one = session_of(f), *other = session_of(f), *failed = NULL;
    moe_session_params p = moe_session_params_default(f->model);
    int32_t before[20], after[20];
    size_t n, m;
    (void)state;
    f->heap.fail_at = f->heap.calls + 3; /* a session that cannot be made holds nothing */
    assert_int_equal(moe_session_new(f->model, &p, &failed, NULL), MOE_ERROR_MEMORY);
    assert_int_equal(moe_translate_ids(one, source, COUNT(source), before, 20, &n, NULL), MOE_OK);
    moe_model_close(f->model);
    moe_session_free(one);
    assert_int_equal(moe_translate_ids(other, source, COUNT(source), after, 20, &m, NULL), MOE_OK);
    assert_int_equal(m, n);
    assert_memory_equal(before, after, n * sizeof *after);
    assert_true(f->heap.blocks > 0);
    moe_session_free(other);
    drop(f);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_number_of_the_version_is_that_of_its_name),
        cmocka_unit_test(the_simple_call_gives_what_the_other_gives),
        cmocka_unit_test(the_simple_call_says_why_it_fails),
        cmocka_unit_test(a_late_cancel_can_be_taken_back),
        cmocka_unit_test(a_model_stays_until_its_last_session_is_freed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
