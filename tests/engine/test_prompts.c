/* test_prompts.c - saved prompts: later sessions load them; hostile and damaged files change nothing. */
#include "opened.h"

#include <sys/stat.h>

enum { PROMPTS = 6, LENGTH = 50, COMMON = 40, ANSWER = 6 };

typedef struct moe_prompts_head moe_prompts_head;

static mw_model *model_of(int delta, uint32_t type, uint64_t seed) {
    return (delta ? mw_delta_decoder : mw_decoder)(type, seed);
}

static void drop(fixture *f) {
    moe_model_close(f->model);
    assert_int_equal(f->heap.blocks, 0);
    free(f->image.data);
    mw_free(f->m);
    free(f);
}

static moe_session_params params_for(const fixture *f) {
    moe_session_params p = moe_session_params_default(f->model);
    p.threads = p.batch = p.beam = p.nbest = 1;
    p.max_source = LENGTH, p.max_target = p.max_len_offset = ANSWER, p.context_memory = 1;
    p.isa = "portable";
    return p;
}

static moe_session *new_session(const fixture *f, const moe_session_params *p) {
    moe_session *s = NULL;
    moe_error e = { MOE_OK, "", "" };
    CHECK(moe_session_new(f->model, p, &s, &e) == MOE_OK, "%s: %s", e.where, e.message);
    return s;
}

/* Translations of prompts, in pairs with the same first COMMON tokens. */
typedef struct run {
    size_t first, n, pulled;
    int32_t source[LENGTH];
    int32_t ids[PROMPTS][ANSWER];
    float logprobs[PROMPTS][ANSWER + 1];
} run;

static int pull(void *user, int wait, moe_request *q) {
    run *r = user;
    const size_t k = r->first + r->pulled;
    (void)wait;
    if (r->pulled++ == r->n) return MOE_PULL_END;
    for (size_t t = 0; t < LENGTH; t++)
        r->source[t] = (int32_t)(8 + (t < COMMON ? (k / 2 + 1) * (t + 3) : 5 * t + k) % (MW_VOCABULARY - 8));
    q->source = r->source, q->n_source = LENGTH, q->raw = 1;
    q->user = (void *)(uintptr_t)k;
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *result) {
    run *r = user;
    const size_t k = (size_t)(uintptr_t)result->user;
    const moe_hypothesis *h = result->hypotheses;
    CHECK(result->status == MOE_OK, "%s", result->message);
    memset(r->ids[k], 0, sizeof r->ids[k]), memset(r->logprobs[k], 0, sizeof r->logprobs[k]);
    memcpy(r->ids[k], h->ids, h->n_ids * sizeof *h->ids);
    memcpy(r->logprobs[k], h->token_logprobs, (h->n_ids + (size_t)h->finished) * sizeof(float));
}

/* Translate `n` prompts and return the rows that were loaded from a file. */
static size_t translate(moe_session *s, size_t first, size_t n, run *r) {
    moe_error e = { MOE_OK, "", "" };
    const size_t before = moe_session_stats(s).loaded_rows;
    r->first = first, r->n = n, r->pulled = 0;
    CHECK(moe_translate(s, pull, done, r, &e) == MOE_OK, "%s: %s", e.where, e.message);
    return moe_session_stats(s).loaded_rows - before;
}

static void assert_same(const run *a, const run *b) {
    assert_memory_equal(a->ids, b->ids, sizeof a->ids);
    assert_memory_equal(a->logprobs, b->logprobs, sizeof a->logprobs);
}

/* ---- Files ---- */

static char folder[] = "/tmp/moe-prompts-XXXXXX", file[64], other[64];

static int make_folder(void **state) {
    (void)state;
    if (!mkdtemp(folder)) return -1;
    snprintf(file, sizeof file, "%s/a", folder);
    snprintf(other, sizeof other, "%s/b", folder);
    return 0;
}

static int remove_folder(void **state) {
    (void)state;
    remove(file), remove(other);
    return rmdir(folder); /* fails if a temporary file remains */
}

static unsigned char *read_file(const char *path, size_t *bytes) {
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    unsigned char *data = mw_zeros((size_t)st.st_size + 1);
    FILE *in = fopen(path, "rb");
    *bytes = (size_t)st.st_size;
    assert_int_equal(fread(data, 1, *bytes, in), *bytes);
    fclose(in);
    return data;
}

static void write_file(const char *path, const void *data, size_t bytes) {
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, bytes, out), bytes);
    assert_int_equal(fclose(out), 0);
}

static void save(moe_session *s, const char *path) {
    moe_error e = { MOE_OK, "", "" };
    CHECK(moe_session_save_prompts(s, path, &e) == MOE_OK, "%s: %s", e.where, e.message);
}

static void load(moe_session *s, const char *path) {
    moe_error e = { MOE_OK, "", "" };
    CHECK(moe_session_load_prompts(s, path, &e) == MOE_OK, "%s: %s", e.where, e.message);
}

/* Check that a file is refused with a message that contains `words` and begins with the path. */
static void refuse(moe_session *s, const char *path, moe_status status, const char *words) {
    moe_error e = { MOE_OK, "", "" };
    const moe_status got = moe_session_load_prompts(s, path, &e);
    CHECK(got == status && strstr(e.message, words) && *e.where, "%d, %s: %s", (int)got, e.where, e.message);
    assert_int_equal(moe_session_load_prompts(s, path, NULL), status);
    assert_int_equal(s->n_idle, 0);
    assert_int_equal(s->serials, 0);
    for (size_t i = 0; i < s->n_kept; i++) assert_int_equal(s->kept[i].serial, 0);
}

/* Save a file of the first `n` prompts, and return its contents. */
static unsigned char *saved(const fixture *f, const moe_session_params *p, size_t n, size_t *bytes) {
    run r = { 0 };
    moe_session *s = new_session(f, p);
    translate(s, 0, n, &r);
    save(s, file);
    moe_session_free(s);
    return read_file(file, bytes);
}

/* ---- Tests ---- */

/* Sessions with any batch, threads and kernels load the prompts of an earlier one. Saving them again writes the same
 * bytes. Neither allocates memory. */
TEST(later_sessions_find_prompts) {
    for (int i = 0; i < 12; i++) {
        const int delta = i % 2, bits = i / 4 == 0 ? 32 : i / 4 == 1 ? 16 : 8;
        fixture *f = open_model(model_of(delta, i / 2 % 2 ? MW_Q8 : MW_F32, 3));
        moe_session_params p = params_for(f);
        run wanted = { 0 }, found = { 0 };
        size_t bytes, again;
        p.kv_bits = bits;
        for (size_t k = 0; k < PROMPTS; k++) {
            moe_session *s = new_session(f, &p);
            assert_int_equal(translate(s, k, 1, &wanted), 0);
            moe_session_free(s);
        }
        p.batch = 8;
        unsigned char *data = saved(f, &p, PROMPTS, &bytes), *same;
        for (int batch = 1; batch <= 8; batch += batch < 5 ? 4 : 3) {
            p.batch = batch, p.threads = batch > 1 ? 2 : 1, p.isa = batch > 1 ? NULL : "portable", p.piece = 7 * batch;
            moe_session *s = new_session(f, &p);
            const size_t calls = f->heap.calls, direct = direct_allocations;
            load(s, file);
            if (batch == 8) {
                save(s, other);
                same = read_file(other, &again);
                assert_int_equal(again, bytes);
                assert_memory_equal(same, data, bytes);
                free(same);
            }
            assert_int_equal(f->heap.calls, calls);
            assert_int_equal(direct_allocations, direct);
            const size_t rows = translate(s, 0, PROMPTS, &found);
            assert_same(&wanted, &found);
            if (batch == 8) assert_true(rows >= 2 * 32); /* at least the last group's beginning */
            CHECK(rows <= moe_session_stats(s).shared_rows && (rows || batch == 1), "batch %d: %zu rows", batch, rows);
            save(s, other);
            moe_session_free(s);
            s = new_session(f, &p);
            load(s, other); /* saved by a session that had loaded prompts */
            assert_true(translate(s, PROMPTS - 1, 1, &found) > 0);
            assert_same(&wanted, &found);
            moe_session_free(s);
        }
        free(data);
        drop(f);
    }
}

/* If not all pages and states fit into memory, the most recently used are loaded. */
TEST(what_fits_is_the_most_recent) {
    for (int delta = 0; delta < 2; delta++) {
        fixture *f = open_model(model_of(delta, MW_Q8, 3));
        moe_session_params p = params_for(f);
        run r = { 0 };
        size_t bytes;
        p.batch = 8;
        free(saved(f, &p, PROMPTS, &bytes));
        p.batch = 1;
        moe_session *s = new_session(f, &p);
        load(s, file);
        assert_int_equal(s->n_idle, moe_most_idle(s));
        assert_true(s->n_idle < LENGTH / MOE_PAGE);
        assert_true(translate(s, PROMPTS - 1, 1, &r) > 0 || delta);
        assert_int_equal(translate(s, 0, 1, &r), 0);
        moe_session_free(s);
        drop(f);
    }
}

/* A session refuses a file with a changed byte or missing bytes, and can load the intact file afterwards. */
TEST(damaged_files_are_refused) {
    for (int delta = 0; delta < 2; delta++) {
        fixture *f = open_model(model_of(delta, MW_Q8, 3));
        moe_session_params p = params_for(f);
        run wanted = { 0 }, found = { 0 };
        size_t bytes;
        p.batch = 3, p.kv_bits = 8;
        unsigned char *data = saved(f, &p, 2, &bytes);
        moe_session *s = new_session(f, &p);
        for (size_t at = 0; at < bytes; at += at < 600 ? 1 : 37) {
            data[at] ^= (unsigned char)(1 + at % 255);
            write_file(other, data, bytes);
            refuse(s, other, at < 8 ? MOE_ERROR_ARGUMENT : MOE_ERROR_FORMAT,
                   at < 8 ? "does not contain saved prompts" : "is damaged: delete it");
            data[at] ^= (unsigned char)(1 + at % 255);
        }
        for (size_t at = 0; at < bytes; at += at < 100 ? 1 : 41) {
            write_file(other, data, at);
            refuse(s, other, at < sizeof(moe_prompts_head) ? MOE_ERROR_ARGUMENT : MOE_ERROR_FORMAT,
                   at < sizeof(moe_prompts_head) ? "does not contain saved prompts" : "is truncated");
        }
        load(s, file);
        assert_true(translate(s, 0, 2, &found) > 0);
        moe_session_free(s);
        s = new_session(f, &p);
        assert_int_equal(translate(s, 0, 2, &wanted), 0);
        assert_same(&wanted, &found);
        moe_session_free(s);
        free(data);
        drop(f);
    }
}

/* Correct the checksums of the head and of `n` records of `each` bytes, so that only the numbers are wrong. */
static void seal(unsigned char *data, size_t n, const size_t *begins) {
    moe_prompts_head h;
    memcpy(&h, data, sizeof h);
    h.sum = moe_crc32(0, &h.model, sizeof h - offsetof(moe_prompts_head, model));
    memcpy(data, &h, sizeof h);
    for (size_t i = 0; i < n; i++) {
        const uint64_t begin = begins[i];
        const uint32_t sum = moe_crc32(moe_crc32(h.sum, &begin, sizeof begin), data + begin, begins[i + 1] - begin - 4);
        memcpy(data + begins[i + 1] - 4, &sum, sizeof sum);
    }
}

/* A session checks counts, ids and serials even if the checksums are valid. */
TEST(hostile_files_are_refused_or_harmless) {
    for (int delta = 0; delta < 2; delta++) {
        fixture *f = open_model(model_of(delta, MW_Q8, 3));
        moe_session_params p = params_for(f);
        run wanted = { 0 }, found = { 0 };
        size_t bytes, begins[32] = { sizeof(moe_prompts_head) }, n = 0;
        moe_prompts_head h;
        unsigned char *data = saved(f, &p, 2, &bytes), *copy = mw_zeros(bytes);
        moe_session *s = new_session(f, &p);
        const size_t page = 84 + MOE_PAGE * moe_carried_bytes(s, MOE_BY_TOKEN);
        memcpy(&h, data, sizeof h);
        assert_int_equal(h.n_states, delta);
        for (; n < h.n_states + h.n_pages; n++)
            begins[n + 1] = begins[n] + (n < h.n_states ? 12 + moe_carried_bytes(s, MOE_BY_STATE) : page);
        assert_int_equal(begins[n], bytes);
        translate(s, 0, 2, &wanted);
        moe_session_free(s);
        for (int i = 0; i < 10; i++) {
            uint64_t serials[2];
            moe_prompts_head hostile = h;
            unsigned char *first = copy + begins[h.n_states];
            memcpy(copy, data, bytes);
            memcpy(serials, first, sizeof serials);
            if (i == 0) hostile.n_pages = UINT64_MAX;
            if (i == 1) hostile.n_states = UINT32_MAX;
            if (i == 2) hostile.serials = UINT64_MAX;
            if (i == 3) hostile.serials = serials[0] - 1;
            if (i == 4) serials[0] = 0;
            if (i == 5) serials[1] = serials[0];
            if (i == 6) serials[0] = UINT64_MAX;
            if (i == 7) memset(first + 16, 0x80, 64);                             /* ids */
            if (i == 8) memcpy(copy + begins[n - 1], copy + begins[n - 2], page); /* the same page twice */
            if (i == 9) memset(first + 80, 0xff, begins[h.n_states + 1] - begins[h.n_states] - 84); /* NaN */
            memcpy(copy, &hostile, sizeof hostile);
            if (i != 8) memcpy(first, serials, sizeof serials);
            seal(copy, n, begins);
            write_file(other, copy, bytes);
            s = new_session(f, &p);
            if (i == 0) { /* pages that do not fit are not read, so the file may end before them */
                const moe_status status = moe_session_load_prompts(s, other, NULL);
                assert_true(status == MOE_OK || status == MOE_ERROR_FORMAT);
            } else if (i < 7) {
                refuse(s, other, MOE_ERROR_FORMAT, i == 1 && delta ? "is " : "is damaged");
            } else load(s, other);
            if (i < 9) translate(s, 0, 2, &found), assert_same(&wanted, &found);
            moe_session_free(s);
        }
        free(data), free(copy);
        drop(f);
    }
}

static void trace(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    (void)user, (void)name, (void)data, (void)rows, (void)cols, (void)stride;
}

TEST(files_of_other_sessions_are_refused) {
    fixture *f = open_model(model_of(0, MW_Q8, 3)), *g = open_model(model_of(0, MW_Q8, 4));
    fixture *with_encoder = open_model(mw_transformer(MW_NLLB, MW_Q8, 7));
    const moe_session_params p = params_for(f);
    moe_session_params q = p;
    run r = { 0 };
    size_t bytes;
    free(saved(f, &p, 2, &bytes));
    moe_session *s = new_session(g, &p);
    refuse(s, file, MOE_ERROR_FORMAT, "is of another model: delete it or name another file");
    refuse(s, "/nonexistent/file", MOE_ERROR_IO, "cannot open /nonexistent/file");
    refuse(s, folder, MOE_ERROR_IO, "cannot read");
    assert_int_equal(moe_session_save_prompts(s, "/nonexistent/file", NULL), MOE_ERROR_IO);
    write_file(other, "my diary", 8);
    refuse(s, other, MOE_ERROR_ARGUMENT, "does not contain saved prompts");
    moe_session_free(s);
    q.kv_bits = 8;
    s = new_session(f, &q);
    refuse(s, file, MOE_ERROR_FORMAT, "is of another version, kv_bits or gating");
    moe_session_free(s);
    q = p, q.gating = "softmax";
    s = new_session(f, &q);
    refuse(s, file, MOE_ERROR_FORMAT, "is of another version, kv_bits or gating");
    moe_session_free(s);
    q = p, q.trace = trace;
    s = new_session(f, &q);
    refuse(s, file, MOE_ERROR_UNSUPPORTED, "support saved prompts");
    moe_session_free(s);
    q = moe_session_params_default(with_encoder->model), q.batch = 1;
    s = new_session(with_encoder, &q);
    refuse(s, file, MOE_ERROR_UNSUPPORTED, "only decoder-only models on device cpu support saved prompts");
    assert_int_equal(moe_session_save_prompts(s, other, NULL), MOE_ERROR_UNSUPPORTED);
    moe_session_free(s);
    s = new_session(f, &p);
    save(s, other); /* no prompts yet */
    load(s, other);
    load(s, file);
    moe_error e;
    assert_int_equal(moe_session_load_prompts(s, file, &e), MOE_ERROR_ARGUMENT);
    assert_non_null(strstr(e.message, "has already translated"));
    assert_true(translate(s, 0, 1, &r) > 0);
    atomic_store(&s->busy, 1);
    assert_int_equal(moe_session_save_prompts(s, file, &e), MOE_ERROR_ARGUMENT);
    atomic_store(&s->busy, 0);
    moe_session_free(s);
    drop(f), drop(g), drop(with_encoder);
}

int main(void) { return run_all_tests(make_folder, remove_folder); }
