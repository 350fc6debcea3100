/* test_contract.c - tests guarantees of moe.h other than results: versions, lifetimes, moe_translate_ids. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */

#include "moe.h"

#include "model_writer.h"

#include <math.h>
#include "tests/test.h"

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

TEST(the_version_number_matches_the_version_string) {
    int major = -1, minor = -1, patch = -1;
    assert_int_equal(sscanf(MOE_VERSION, "%d.%d.%d", &major, &minor, &patch), 3);
    assert_int_equal(MOE_VERSION_NUMBER, major * 1000000 + minor * 1000 + patch);
    assert_int_equal(moe_version_number(), MOE_VERSION_NUMBER);
}

/* ---- The simple call ---- */

static const int32_t source[] = { 7, 9, 11, 8, 12, 13 };

typedef struct seen {
    int sent;
    int32_t ids[100];
    size_t n;
    int finished, looped;
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
    x->finished = r->hypotheses[0].finished, x->looped = r->hypotheses[0].looped;
    memcpy(x->ids, r->hypotheses[0].ids, x->n * sizeof *x->ids);
}

TEST(the_simple_call_equals_a_session) {
    fixture *f = open_model();
    moe_session *s = session_of(f);
    seen x = { 0 };
    int32_t ids[20], few[20];
    size_t n = 99;
    moe_error e = { MOE_OK, "", "" };
    assert_int_equal(moe_translate(s, pull, done, &x, NULL), MOE_OK);
    assert_true(x.n > 2);
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, 20, &n, &e), MOE_OK);
    assert_int_equal(n, x.n);
    assert_memory_equal(ids, x.ids, n * sizeof *ids);
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, x.n, &n, &e), MOE_OK); /* the capacity suffices */
    memset(few, 0x55, sizeof few);
    memset(ids, 0x55, sizeof ids);
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), few, x.n - 1, &n, &e), MOE_ERROR_LIMIT);
    assert_int_equal(n, x.n);
    assert_memory_equal(few, ids, sizeof few);
    assert_string_equal(e.where, "capacity");
    assert_int_equal(moe_translate_ids(s, NULL, 0, NULL, 0, &n, &e),
                     MOE_OK); /* an empty source has an empty translation */
    assert_int_equal(n, 0);
    moe_session_free(s);
    moe_model_close(f->model);
    drop(f);
}

TEST(the_simple_call_reports_errors) {
    fixture *f = open_model();
    moe_session *s = session_of(f);
    const int32_t unknown[] = { MW_VOCABULARY };
    int32_t ids[20], longest[21];
    size_t n = 77;
    moe_error e = { MOE_OK, "", "" };
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

/* An incomplete translation is an error, but its tokens are stored. */
TEST(the_simple_call_reports_incomplete_translations) {
    static const struct {
        int min_target, max_target, stop_loops;
        const char *where;
    } cases[] = { { 5, 20, 0, "" },
                  { 4, 4, 0, "max_target" },
                  { 90, 95, 0, "max_target" },
                  { 90, 95, 1, "stop_loops" } };
    fixture *f = open_model();
    for (size_t i = 0; i < COUNT(cases); i++) {
        const moe_status wanted = *cases[i].where ? MOE_ERROR_LIMIT : MOE_OK;
        moe_session_params p = moe_session_params_default(f->model);
        moe_session *s = NULL;
        moe_error e = { MOE_OK, "", "" };
        seen x = { 0 };
        int32_t ids[100];
        size_t n = 0;
        p.threads = p.batch = p.beam = p.nbest = 1;
        p.max_source = 20, p.max_len_factor = 100, p.target_tag = MW_TAG_DE;
        p.min_target = cases[i].min_target, p.max_target = cases[i].max_target, p.stop_loops = cases[i].stop_loops;
        assert_int_equal(moe_session_new(f->model, &p, &s, NULL), MOE_OK);
        assert_int_equal(moe_translate(s, pull, done, &x, NULL), MOE_OK);
        assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, COUNT(ids), &n, &e), wanted);
        assert_string_equal(e.where, cases[i].where);
        assert_true(n == x.n && n > 3 && !x.finished == !!wanted && x.looped == !strcmp(e.where, "stop_loops"));
        assert_memory_equal(ids, x.ids, n * sizeof *ids);
        assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, n - 1, &n, &e), MOE_ERROR_LIMIT);
        assert_string_equal(e.where, "capacity");
        moe_session_free(s);
    }
    moe_model_close(f->model);
    drop(f);
}

TEST(a_late_cancel_can_be_revoked) {
    fixture *f = open_model();
    moe_session *s = session_of(f);
    int32_t ids[20];
    size_t n;
    moe_session_cancel(s);
    moe_session_uncancel(s);
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, 20, &n, NULL), MOE_OK);
    moe_session_uncancel(s); /* no cancellation is pending */
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, 20, &n, NULL), MOE_OK);
    moe_session_free(s);
    moe_model_close(f->model);
    drop(f);
}

/* ---- Lifetimes ---- */

TEST(a_model_lives_until_its_last_session_is_freed) {
    fixture *f = open_model();
    moe_session *one = session_of(f), *other = session_of(f), *failed = NULL;
    moe_session_params p = moe_session_params_default(f->model);
    int32_t before[20], after[20];
    size_t n, m;
    f->heap.fail_at = f->heap.calls + 2; /* a session that cannot be created must not keep the model open */
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

/* Parameters in version 0.2.0, which had fewer members. Unrelated data follows the struct. */
typedef struct older_params {
    size_t size;
    int threads, batch, batch_tokens, max_source, max_target, min_target;
    int32_t target_tag;
    int beam;
} older_params;

/* ---- Parameters by number ---- */

static size_t number_of(const char *name) {
    size_t i = 0;
    while (strcmp(moe_param_at(i)->name, name) != 0) i++;
    return i;
}

TEST(parameters_are_listed_with_their_limits) {
    fixture *f = open_model();
    const moe_session_params good = moe_session_params_default(f->model);
    size_t n = 0, bytes;
    for (const moe_param *x; (x = moe_param_at(n)); n++) {
        moe_session_params p = good;
        moe_error e = { MOE_OK, "", "" };
        char option[64];
        snprintf(option, sizeof option, "%s", x->name);
        for (char *c = option; *c; c++) *c = (char)(*c == '_' ? '-' : *c);
        assert_string_equal(option, x->option);
        assert_true(*x->values && *x->help && x->least < x->most);
        for (size_t i = 0; i < n; i++) assert_string_not_equal(moe_param_at(i)->name, x->name);
        assert_true(moe_param_get(&good, n) >= x->least && moe_param_get(&good, n) <= x->most);
        assert_int_equal(moe_param_set(&p, n, x->least - 1) + moe_param_set(&p, n, x->most * 2), 0);
        assert_int_equal(moe_param_set(&p, n, (double)NAN), 0);
        assert_memory_equal(&p, &good, sizeof p);
        assert_int_equal(moe_param_set(&p, n, x->least), 1);
        assert_true(moe_param_get(&p, n) <= x->least && moe_param_get(&p, n) >= x->least);
        CHECK(moe_session_bytes(f->model, &p, &bytes, &e) == MOE_OK || strcmp(x->name, "nbest") == 0, "%s: %s", x->name,
              e.message);
    }
    assert_true(n >= 11);
    assert_null(moe_param_at(SIZE_MAX));
    assert_int_equal(moe_param_set(&(moe_session_params){ .size = sizeof good }, n, 1),
                     0); /* parameters are numbered from 0 to n - 1 */
    moe_model_close(f->model);
    drop(f);
}

TEST(parameters_by_number_are_members_of_the_struct) {
    fixture *f = open_model();
    moe_session_params p = moe_session_params_default(f->model);
    older_params old = { .size = sizeof old };
    assert_int_equal(moe_param_set(&p, number_of("beam"), 3), 1);
    assert_int_equal(p.beam, 3);
    assert_int_equal(moe_param_set(&p, number_of("min_target"), 7), 1);
    assert_int_equal(p.min_target, 7);
    assert_int_equal(moe_param_set(&p, number_of("prune"), 0.5), 1);
    assert_true(p.prune == 0.5f);
    p.max_len_factor = 1.25f;
    assert_true(moe_param_get(&p, number_of("max_len_factor")) == 1.25);
    /* The older struct has no member `prune`. */
    assert_int_equal(moe_param_set((moe_session_params *)(void *)&old, number_of("beam"), 3), 1);
    assert_int_equal(moe_param_set((moe_session_params *)(void *)&old, number_of("prune"), 1), 0);
    assert_true(moe_param_get((moe_session_params *)(void *)&old, number_of("prune")) == 0);
    assert_int_equal(old.beam, 3);
    moe_model_close(f->model);
    drop(f);
}

/* ---- Programs compiled with another moe.h ---- */

typedef struct newer_params {
    moe_session_params known;
    int more[3];
} newer_params;

/* Parameters in version 0.1.0, which had no member `size`. */
typedef struct first_params {
    int threads, batch, batch_tokens, max_source, max_target, min_target;
    int32_t target_tag;
    int beam, nbest, rest[60];
} first_params;

enum { GUARD = 64 };

static void assert_untouched(const unsigned char *guard) {
    for (size_t i = 0; i < GUARD; i++) assert_int_equal(guard[i], 0x55);
}

TEST(older_programs_work_and_are_not_overwritten) {
    fixture *f = open_model();
    union {
        older_params p;
        unsigned char bytes[sizeof(older_params) + GUARD];
    } old;
    const moe_session_params now = moe_session_params_default(f->model);
    moe_session *s = NULL;
    int32_t ids[20], same[20];
    size_t n, m, bytes = 0;
    assert_int_equal(now.size, sizeof now);
    assert_int_equal(offsetof(older_params, beam), offsetof(moe_session_params, beam));
    memset(&old, 0x55, sizeof old);
    moe_session_params_init((moe_session_params *)(void *)&old, sizeof old.p, f->model);
    assert_int_equal(old.p.size, sizeof old.p);
    assert_int_equal(old.p.beam, now.beam);
    assert_untouched(old.bytes + sizeof old.p);
    assert_int_equal(moe_session_params_preset((moe_session_params *)(void *)&old, "tf"), 1);
    assert_int_equal(old.p.beam, 10);
    assert_untouched(old.bytes + sizeof old.p);
    old.p.threads = 1, old.p.batch = 2, old.p.beam = now.beam, old.p.target_tag = MW_TAG_DE, old.p.min_target = 5;
    old.p.max_source = old.p.max_target = 20;
    assert_int_equal(moe_session_bytes(f->model, (moe_session_params *)(void *)&old, &bytes, NULL), MOE_OK);
    assert_int_equal(moe_session_new(f->model, (moe_session_params *)(void *)&old, &s, NULL), MOE_OK);
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), ids, 20, &n, NULL), MOE_OK);
    moe_session_free(s);
    s = session_of(f); /* members that the old struct lacks have their defaults */
    assert_int_equal(moe_translate_ids(s, source, COUNT(source), same, 20, &m, NULL), MOE_OK);
    assert_int_equal(m, n);
    assert_memory_equal(ids, same, n * sizeof *ids);
    moe_session_free(s);
    moe_model_close(f->model);
    drop(f);
}

TEST(newer_programs_are_refused_if_they_set_unknown_parameters) {
    fixture *f = open_model();
    newer_params p;
    moe_session *s = NULL;
    moe_error e = { MOE_OK, "", "" };
    memset(&p, 0x55, sizeof p);
    moe_session_params_init(&p.known, sizeof p, f->model);
    for (size_t i = 0; i < COUNT(p.more); i++) assert_int_equal(p.more[i], 0);
    p.known.target_tag = MW_TAG_DE, p.known.threads = 1;
    assert_int_equal(moe_session_new(f->model, &p.known, &s, &e), MOE_OK);
    moe_session_free(s);
    p.more[2] = 1;
    s = NULL;
    assert_int_equal(moe_session_new(f->model, &p.known, &s, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "moe_session_params");
    assert_non_null(strstr(e.message, "another moe.h"));
    assert_null(s);
    moe_model_close(f->model);
    drop(f);
}

TEST(programs_for_version_0_1_are_refused) {
    fixture *f = open_model();
    first_params p = { .threads = 1, .batch = 1, .max_source = 20, .max_target = 20, .beam = 4, .nbest = 1 },
                 before = p;
    moe_session_params empty = { 0 };
    moe_session *s = NULL;
    moe_error e = { MOE_OK, "", "" };
    assert_int_equal(moe_session_new(f->model, (moe_session_params *)(void *)&p, &s, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "moe_session_params");
    moe_session_params_preset((moe_session_params *)(void *)&p, "tf");
    assert_memory_equal(&p, &before, sizeof p);
    assert_int_equal(moe_session_new(f->model, &empty, &s, &e), MOE_ERROR_ARGUMENT); /* not initialised */
    moe_model_close(f->model);
    drop(f);
}

TEST(statistics_are_listed) {
    const moe_stat *x;
    size_t at = 0, n = 0;
    for (; (x = moe_stat_at(n)); n++, at += 8)
        assert_true(x->offset == at && *x->name && *x->meaning && x->sum + x->text < 2);
    assert_int_equal(at, sizeof(moe_stats));
    assert_true(moe_stat_at(0)->sum && moe_stat_at(6)->text && !moe_stat_at(8)->sum && n == 23);
}

/* Functions fill a caller's struct up to the given size, with zeros after the members that the library knows. */
TEST(results_have_the_callers_size) {
    fixture *f = open_model();
    moe_session *s = session_of(f);
    const moe_stats stats = moe_session_stats(s);
    const moe_tensor_info tensor = moe_model_tensor(f->model, 0);
    const moe_mixture mixture = moe_model_mixture(f->model, 0);
    const moe_layer_info layer = moe_model_layer(f->model, 0);
    const struct {
        const void *whole;
        size_t size;
    } cases[] = { { &stats, sizeof stats },
                  { &tensor, sizeof tensor },
                  { &mixture, sizeof mixture },
                  { &layer, sizeof layer } };
    for (size_t i = 0; i < COUNT(cases); i++)
        for (size_t size = 8; size <= cases[i].size + 16; size += 8) {
            unsigned char out[512];
            const size_t known = size < cases[i].size ? size : cases[i].size;
            memset(out, 0x55, sizeof out);
            if (i == 0) moe_session_stats_sized(s, (moe_stats *)(void *)out, size);
            if (i == 1) moe_model_tensor_sized(f->model, 0, (moe_tensor_info *)(void *)out, size);
            if (i == 2) moe_model_mixture_sized(f->model, 0, (moe_mixture *)(void *)out, size);
            if (i == 3) moe_model_layer_sized(f->model, 0, (moe_layer_info *)(void *)out, size);
            assert_memory_equal(out, cases[i].whole, known);
            for (size_t k = known; k < size; k++) assert_int_equal(out[k], 0);
            assert_untouched(out + size);
        }
    moe_session_free(s);
    moe_model_close(f->model);
    drop(f);
}

TEST(parameters_of_models_are_read_up_to_their_size) {
    fixture *f = open_model();
    struct {
        moe_model_params known;
        int more;
    } newer = { .known.verify = 1, .more = 0 };
    moe_save_params save = { .type = MOE_TYPE_F32 };
    struct {
        moe_write_params known;
        size_t more;
    } write = { .more = 1 };
    moe_model *m = NULL;
    moe_error e = { MOE_OK, "", "" };
    assert_int_equal(moe_model_open_memory_sized(f->image.data, f->image.bytes, &newer.known, sizeof newer, &m, &e),
                     MOE_OK);
    moe_model_close(m);
    newer.more = 1;
    assert_int_equal(moe_model_open_memory_sized(f->image.data, f->image.bytes, &newer.known, sizeof newer, &m, &e),
                     MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "moe_model_params");
    assert_int_equal(moe_model_open_sized("/none", &newer.known, sizeof newer, &m, &e), MOE_ERROR_ARGUMENT);
    assert_int_equal(moe_model_save_sized(f->model, "/none/x", &save, 1 << 20, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "moe_save_params");
    assert_int_equal(moe_model_write_sized("/none/x", &write.known, sizeof write, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "moe_write_params");
    moe_model_close(f->model);
    drop(f);
}

int main(void) { return run_all_tests(NULL, NULL); }
