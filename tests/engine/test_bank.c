/* test_bank.c - tests streamed experts: results do not depend on the memory limit, the limit is respected, and failing
 * reads are handled. `make tsan` runs these tests under the thread sanitizer, with slow reads. */
#if !defined(_POSIX_C_SOURCE) && !defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- A layer between moe.c and the file ---- */

static struct {
    atomic_int armed;       /* 1 to count reads, and to slow them down or make them fail */
    atomic_int reads;       /* number of counted reads */
    int fail_at, code;      /* index of the read that fails; its errno, or 0 for end-of-file */
    int pieces, interrupts; /* 1: reads return part of the data; 1: every second read fails with EINTR */
    int delay_us;           /* maximum delay of a read */
    int refuse, garbage;    /* 1: opening with O_DIRECT fails; 1: direct reads return garbage */
    atomic_int direct;      /* 1 while reads are direct */
    int cancel_at;
} odd;
static void (*at_cancel)(void);

static ssize_t watched_pread(int fd, void *to, size_t n, off_t at) {
    if (odd.garbage && atomic_load(&odd.direct)) return memset(to, 7, n), (ssize_t)n;
    if (!atomic_load(&odd.armed)) return pread(fd, to, n, at);
    const int read = atomic_fetch_add(&odd.reads, 1) + 1;
    if (odd.delay_us)
        nanosleep(&(struct timespec){ 0, (long)((unsigned)read * 2654435761u % (unsigned)odd.delay_us) * 1000 }, NULL);
    if (read == odd.cancel_at) at_cancel();
    if (odd.fail_at && read >= odd.fail_at && read < odd.fail_at + 1) {
        errno = odd.code;
        return odd.code ? -1 : 0;
    }
    if (odd.interrupts && read % 2) return errno = EINTR, -1;
    return pread(fd, to, odd.pieces ? (n > 1024 ? 512 : n) : n, at);
}

static int watched_flags(int fd, int command, int flags) {
    if (command == F_SETFL && odd.refuse) return errno = EINVAL, -1;
    if (command == F_SETFL && odd.garbage) return atomic_store(&odd.direct, !atomic_load(&odd.direct)), 0;
    return fcntl(fd, command, flags);
}
#define WATCHED_FLAGS(fd, command, flags, ...) watched_flags(fd, command, flags)
#define fcntl(...) WATCHED_FLAGS(__VA_ARGS__, 0, 0)
#define pread(fd, to, n, at) watched_pread(fd, to, n, at)
#include "watched.h"
#undef pread
#undef fcntl

/* ---- Models in files ---- */

enum { SENTENCES = 10, LONGEST = 40, SLAB = 4096 };
enum { GNMT, LEVELS, NLLB, PROMPTED, DELTA, WIDE, DENSE, LANGUAGE, RERANKED, KINDS };
static const char *const kind_names[] = { "gnmt", "two levels", "nllb",           "prompted", "delta",
                                          "wide", "dense",      "language model", "reranked" };
static float rerank; /* parameter `rerank` of new sessions */

static void replace_mixture(mw_model *m, size_t n, size_t k, size_t hidden, const char *gate) {
    mw_drop_tensor(m, "decoder.1.gate.weight");
    mw_drop_tensor(m, "decoder.1.experts");
    mw_moe(m, "decoder.1.", n, k, hidden, gate);
}

static mw_model *model_of(int kind, uint32_t type) {
    mw_model *m = kind == LEVELS     ? mw_hierarchical(type, 5)
                  : kind == NLLB     ? mw_transformer(MW_NLLB, type, 7)
                  : kind == PROMPTED ? mw_decoder(type, 7)
                  : kind == DELTA    ? mw_delta_decoder(type, 7)
                  : kind == LANGUAGE ? mw_language_model(type, 7)
                                     : mw_small(MW_GNMT, type, 7);
    if (kind == WIDE) replace_mixture(m, 48, 2, 12, "topk");
    if (kind == DENSE) replace_mixture(m, 60, 0, 12, "softmax");
    return m;
}

typedef struct on_disk {
    char path[64];
    size_t bytes;
} on_disk;

static on_disk write_image(mw_model *m) {
    on_disk d = { "/tmp/test-bank-XXXXXX", 0 };
    const int fd = mkstemp(d.path);
    mw_image image = mw_build(m);
    assert_true(fd >= 0);
    for (size_t at = 0; at < image.bytes;) {
        const ssize_t n = write(fd, image.data + at, image.bytes - at);
        assert_true(n > 0);
        at += (size_t)n;
    }
    close(fd);
    d.bytes = image.bytes;
    free(image.data);
    mw_free(m);
    return d;
}

static moe_model *open_file(const char *path, moe_model_params p) {
    moe_model *m = NULL;
    moe_error e = { MOE_OK, "", "" };
    CHECK(moe_model_open(path, &p, &m, &e) == MOE_OK, "%s: %s", e.where, e.message);
    return m;
}

/* Write a model to a file; moe.c converts it to types that model_writer.h lacks. */
static on_disk write_kind(int kind, uint32_t type) {
    on_disk d = write_image(model_of(kind, type > MW_Q8 ? MW_F32 : type));
    if (type <= MW_Q8) return d;
    moe_error e;
    moe_model *m = open_file(d.path, (moe_model_params){ .verify = 0 });
    on_disk q4 = { "/tmp/test-bank-XXXXXX", 0 };
    close(mkstemp(q4.path));
    CHECK(moe_model_save(m, q4.path, &(moe_save_params){ .type = MOE_TYPE_Q8, .experts = (moe_type)type }, &e) ==
              MOE_OK,
          "%s: %s", e.where, e.message);
    q4.bytes = (size_t)moe_model_file_bytes(m);
    moe_model_close(m);
    unlink(d.path);
    return q4;
}

/* ---- Results of a session ---- */

typedef struct outcome {
    size_t delivered;
    moe_status status;
    int32_t ids[LONGEST];
    float logprobs[LONGEST + 1];
    size_t n_ids;
    float score, reverse;
} outcome;

typedef struct feed {
    outcome *out;
    int scores; /* 1 to score sentences with a language model */
    size_t next;
    int32_t source[LONGEST];
} feed;

static int pull(void *user, int wait, moe_request *r) {
    feed *f = user;
    const size_t i = f->next;
    (void)wait;
    if (i == SENTENCES) return MOE_PULL_END;
    r->n_source = 1 + (7 * i + 3) % 13;
    for (size_t k = 0; k < r->n_source; k++)
        f->source[k] = 6 + (int32_t)((11 * i + 5 * k + i * k) % (MW_VOCABULARY - 6));
    r->source = f->source;
    if (f->scores) r->target = f->source, r->n_target = r->n_source, r->source = NULL, r->n_source = 0;
    r->user = &f->out[f->next++];
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *r) {
    outcome *h = r->user;
    (void)user;
    h->delivered++;
    h->status = r->status;
    if (!r->n_hypotheses) return;
    const moe_hypothesis *best = &r->hypotheses[0];
    h->n_ids = best->n_ids;
    h->score = best->score, h->reverse = best->reverse;
    if (best->n_ids) memcpy(h->ids, best->ids, best->n_ids * sizeof *h->ids);
    memcpy(h->logprobs, best->token_logprobs, (best->n_ids + (size_t)best->finished) * sizeof *h->logprobs);
}

static moe_session_params params_of(const moe_model *m, int threads, int batch, size_t memory) {
    moe_session_params p = moe_session_params_default(m);
    p.threads = threads;
    p.batch = batch;
    p.beam = moe_model_kind(m) == MOE_MODEL_LANGUAGE ? 1 : 3;
    p.rerank = rerank;
    p.max_source = 20, p.max_target = 20;
    p.target_tag = MW_TAG_DE, p.source_tag = MW_TAG_EN;
    p.device = "cpu";
    p.expert_memory = memory;
    return p;
}

static moe_session *session_of(const moe_model *m, const moe_session_params *p) {
    moe_session *s = NULL;
    moe_error e = { MOE_OK, "", "" };
    CHECK(moe_session_new(m, p, &s, &e) == MOE_OK, "%s: %s", e.where, e.message);
    return s;
}

static moe_status translate(moe_session *s, outcome *out, moe_error *e) {
    feed f = { .out = out, .scores = moe_model_kind(s->model) == MOE_MODEL_LANGUAGE };
    memset(out, 0, SENTENCES * sizeof *out);
    return moe_translate(s, pull, done, &f, e);
}

static void expect(moe_session *s, const outcome *wanted, const char *what) {
    outcome out[SENTENCES];
    moe_error e = { MOE_OK, "", "" };
    CHECK(translate(s, out, &e) == MOE_OK, "%s: %s: %s", what, e.where, e.message);
    for (size_t i = 0; i < SENTENCES; i++)
        CHECK(memcmp(&out[i], &wanted[i], sizeof *out) == 0, "%s: sentence %zu differs", what, i);
}

static void mapped(const on_disk *d, outcome *out) {
    moe_model *m = open_file(d->path, (moe_model_params){ .verify = 0 });
    const moe_session_params p = params_of(m, 1, 1, 0);
    moe_session *s = session_of(m, &p);
    moe_error e;
    assert_int_equal(translate(s, out, &e), MOE_OK);
    for (size_t i = 0; i < SENTENCES; i++) CHECK(out[i].delivered == 1 && !out[i].status, "sentence %zu", i);
    moe_session_free(s);
    moe_model_close(m);
}

static size_t experts_of(const moe_model *m) {
    size_t n = 0;
    for (size_t i = 0; i < moe_model_tensor_count(m); i++) {
        const moe_tensor_info t = moe_model_tensor(m, i);
        if (t.experts) n += (size_t)t.dims[0];
    }
    return n;
}

static moe_model *streamed(const on_disk *d) { return open_file(d->path, (moe_model_params){ .stream = 1 }); }

/* ---- Tests ---- */

TEST(results_equal_those_of_the_mapped_file) {
    static const uint32_t types[] = {
        MW_F32, MW_Q8, MOE_TYPE_Q4, MOE_TYPE_Q4M, MOE_TYPE_Q8B, MOE_TYPE_Q3, MOE_TYPE_Q2
    };
    static const int threads[] = { 1, 2, 8 }, batches[] = { 1, 8, 32 };
    for (int kind = 0; kind < KINDS; kind++)
        for (size_t t = 0; t < MOE_COUNT(types); t++) {
            const on_disk d = write_kind(kind, types[t]);
            outcome wanted[SENTENCES];
            rerank = kind == RERANKED ? 0.7f : 0;
            mapped(&d, wanted);
            CHECK((wanted[0].reverse != 0) == (kind == RERANKED), "%s: %g", kind_names[kind],
                  (double)wanted[0].reverse);
            moe_model *m = streamed(&d);
            const size_t n = experts_of(m), slots[] = { 2, 3, n - 1, n };
            for (size_t i = 0; i < 36; i++) {
                char what[96];
                if ((kind > NLLB || t > 2 || mw_slow()) && i % 7) continue;
                const moe_session_params p =
                    params_of(m, threads[i % 3], batches[i / 3 % 3], slots[i / 9] * SLAB + i % 2 * 100);
                moe_session *s = session_of(m, &p);
                snprintf(what, sizeof what, "%s, type %u, %zu of %zu slots, %d threads, batch %d", kind_names[kind],
                         types[t], slots[i / 9], n, p.threads, p.batch);
                expect(s, wanted, what);
                const moe_stats stats = moe_session_stats(s);
                CHECK(stats.experts == n && stats.experts_held == slots[i / 9], "%s: %llu of %llu", what,
                      (unsigned long long)stats.experts_held, (unsigned long long)stats.experts);
                CHECK(stats.expert_fetch_bytes == stats.expert_fetches * SLAB, "%s: bytes fetched", what);
                CHECK(kind == RERANKED || kind == LANGUAGE ? stats.expert_fetches >= slots[i / 9]
                      : slots[i / 9] < n - 1               ? stats.expert_fetches > slots[i / 9]
                                                           : stats.expert_fetches <= 9 * n,
                      "%s: %llu experts were fetched", what, (unsigned long long)stats.expert_fetches);
                moe_session_free(s);
            }
            moe_model_close(m);
            unlink(d.path);
        }
    rerank = 0;
}

/* The classifier has one-level and two-level mixtures, dense gates, thresholds, and experts with a single matrix. */
TEST(classes_equal_those_of_the_mapped_file) {
    enum { ROWS = 50 };
    static const uint32_t types[] = { MW_F32, MW_Q8 };
    float inputs[ROWS * MW_INPUTS], wanted[ROWS], logprobs[ROWS];
    int32_t right[ROWS], classes[ROWS];
    uint64_t random = 5;
    moe_error e = { MOE_OK, "", "" };
    for (size_t i = 0; i < ROWS * MW_INPUTS; i++) inputs[i] = mw_uniform(&random, -1, 1);
    for (size_t t = 0; t < MOE_COUNT(types); t++) {
        const on_disk d = write_image(mw_classifier(types[t], 3));
        moe_model *m = open_file(d.path, (moe_model_params){ .verify = 0 });
        for (size_t slots = 0; slots <= 19; slots += slots ? 1 : 2) { /* 0 if the file is mapped */
            moe_session_params p = moe_session_params_default(m);
            p.batch = 1 + (int)slots * 3, p.threads = 1 + (int)slots % 3, p.device = "cpu";
            p.expert_memory = slots * SLAB;
            moe_session *s = session_of(m, &p);
            CHECK(moe_classify(s, inputs, ROWS, slots ? classes : right, slots ? logprobs : wanted, &e) == MOE_OK,
                  "%s: %s", e.where, e.message);
            if (slots) {
                assert_memory_equal(classes, right, sizeof right);
                assert_memory_equal(logprobs, wanted, sizeof wanted);
                CHECK(moe_session_stats(s).expert_fetches > 0, "nothing was read");
            }
            moe_session_free(s);
            if (slots) continue;
            moe_model_close(m);
            m = streamed(&d);
        }
        moe_model_close(m);
        unlink(d.path);
    }
}

TEST(a_model_without_its_experts_is_small) {
    const on_disk d = write_kind(WIDE, MW_F32);
    moe_model *m = streamed(&d);
    size_t experts = 0;
    for (size_t i = 0; i < moe_model_tensor_count(m); i++)
        if (moe_model_tensor(m, i).experts) experts += (size_t)moe_model_tensor(m, i).bytes;
    const uint64_t held = moe_model_held_bytes(m), all = moe_model_file_bytes(m);
    CHECK(held + experts <= all && held + experts + 65536 > all, "%llu of %llu bytes are held, experts have %zu",
          (unsigned long long)held, (unsigned long long)all, experts);
    moe_model_close(m);
    m = open_file(d.path, (moe_model_params){ .verify = 0 });
    assert_int_equal(moe_model_held_bytes(m), d.bytes);
    moe_model_close(m);
    unlink(d.path);
}

TEST(the_session_uses_the_predicted_memory) {
    const on_disk d = write_kind(WIDE, MW_Q8);
    mw_heap heap = { 0 };
    moe_model *m =
        open_file(d.path,
                  (moe_model_params){ { mw_heap_allocate, mw_heap_reallocate, mw_heap_release, &heap }, .stream = 1 });
    const size_t before = heap.bytes;
    size_t last = 0;
    for (size_t slots = 2; slots <= 52; slots += 10) {
        const moe_session_params p = params_of(m, 2, 8, slots * SLAB);
        size_t bytes;
        moe_error e;
        assert_int_equal(moe_session_bytes(m, &p, &bytes, &e), MOE_OK);
        moe_session *s = session_of(m, &p);
        assert_int_equal(heap.bytes - before, bytes);
        assert_int_equal(moe_session_stats(s).bytes, bytes);
        if (last) CHECK(bytes >= last + 10 * SLAB && bytes < last + 11 * SLAB, "%zu bytes after %zu", bytes, last);
        last = bytes;
        outcome out[SENTENCES];
        const size_t calls = heap.calls;
        assert_int_equal(translate(s, out, &e), MOE_OK);
        assert_int_equal(heap.calls, calls);
        moe_session_free(s);
    }
    assert_int_equal(heap.bytes, before);
    moe_model_close(m);
    assert_int_equal(heap.blocks, 0);
    assert_int_equal(heap.wrong_sizes, 0);
    unlink(d.path);
}

TEST(too_little_memory_is_refused_with_numbers) {
    const on_disk d = write_kind(WIDE, MW_F32);
    moe_model *m = streamed(&d);
    const size_t few[] = { 0, 1, SLAB, 2 * SLAB - 1 }, n = experts_of(m);
    char least[64], all[64];
    moe_error e;
    size_t bytes;
    moe_session *s;
    snprintf(least, sizeof least, "too small: 2 experts need %d bytes", 2 * SLAB);
    snprintf(all, sizeof all, "all %zu need %zu bytes", n, n * SLAB);
    for (size_t i = 0; i < MOE_COUNT(few); i++) {
        const moe_session_params p = params_of(m, 1, 1, few[i]);
        assert_int_equal(moe_session_bytes(m, &p, &bytes, &e), MOE_ERROR_MEMORY);
        assert_int_equal(moe_session_new(m, &p, &s, &e), MOE_ERROR_MEMORY);
        assert_string_equal(e.where, "expert_memory");
        CHECK(strstr(e.message, least) && strstr(e.message, all), "%s", e.message);
    }
    for (size_t i = 0; i < 2; i++) { /* 1 TB, then the machine's memory; all experts fit in either */
        const moe_session_params p = params_of(m, 1, 1, i ? SIZE_MAX : (size_t)1 << 40);
        s = session_of(m, &p);
        assert_int_equal(moe_session_stats(s).experts_held, n);
        moe_session_free(s);
    }
    moe_model_close(m);
    m = open_file(d.path, (moe_model_params){ .verify = 0 });
    const moe_session_params p = params_of(m, 1, 1, 4 * SLAB);
    assert_int_equal(moe_session_new(m, &p, &s, &e), MOE_ERROR_UNSUPPORTED);
    assert_string_equal(e.where, "expert_memory");
    moe_model_close(m);
    mw_model *dense = mw_transformer(MW_PLAIN, MW_F32, 7);
    const on_disk no_experts = write_image(dense);
    m = streamed(&no_experts);
    assert_int_equal(moe_session_new(m, &p, &s, &e), MOE_ERROR_UNSUPPORTED);
    CHECK(strstr(e.message, "no experts"), "%s", e.message);
    moe_model_close(m);
    unlink(no_experts.path);
    unlink(d.path);
}

TEST(unsupported_operations_on_streams_are_refused) {
    const on_disk d = write_kind(GNMT, MW_F32);
    mw_model *old = model_of(GNMT, MW_F32);
    moe_model *m = streamed(&d), *other = NULL;
    moe_error e;
    assert_int_equal(moe_model_save(m, "/tmp/nothing", &(moe_save_params){ .n_entries = 0 }, &e),
                     MOE_ERROR_UNSUPPORTED);
    assert_int_equal(access("/tmp/nothing", F_OK), -1);
    moe_model_close(m);
    old->version = 1;
    const on_disk version_1 = write_image(old);
    assert_int_equal(moe_model_open(version_1.path, &(moe_model_params){ .stream = 1 }, &other, &e),
                     MOE_ERROR_UNSUPPORTED);
    moe_model_close(open_file(version_1.path, (moe_model_params){ .stream = 1, .verify = -1 }));
    mw_model *again = model_of(GNMT, MW_F32);
    mw_image image = mw_build(again);
    assert_int_equal(moe_model_open_memory(image.data, image.bytes, &(moe_model_params){ .stream = 1 }, &other, &e),
                     MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "stream");
    free(image.data);
    mw_free(again);
    unlink(version_1.path);
    unlink(d.path);
}

/* ---- Reads ---- */

static void no_oddities(void) { memset(&odd, 0, sizeof odd); }

TEST(reads_can_be_short_slow_and_interrupted) {
    const on_disk d = write_kind(WIDE, MW_Q8);
    outcome wanted[SENTENCES];
    mapped(&d, wanted);
    for (int i = 0; i < 5; i++) {
        no_oddities();
        odd.refuse = i == 0 || i == 3; /* pieces of 512 bytes are too small for O_DIRECT */
        odd.garbage = i == 1;
        moe_model *m = streamed(&d);
        const int direct = m->file.direct;
        CHECK(i > 1 || !direct, "%d: O_DIRECT is not available", i);
        atomic_store(&odd.direct, 0);
        odd.garbage = 0;
        odd.interrupts = i == 2;
        odd.pieces = i == 3;
        odd.delay_us = i == 4 ? 3000 : 0;
        atomic_store(&odd.armed, 1);
        for (int threads = 1; threads <= 4; threads += 3) {
            const moe_session_params p = params_of(m, threads, 8, (size_t)(2 + 11 * (threads > 1)) * SLAB);
            moe_session *s = session_of(m, &p);
            expect(s, wanted, "odd reads");
            moe_session_free(s);
        }
        moe_model_close(m);
    }
    no_oddities();
    unlink(d.path);
}

TEST(failing_reads_are_reported_and_the_session_continues) {
    const on_disk d = write_kind(WIDE, MW_F32);
    outcome wanted[SENTENCES], out[SENTENCES];
    mapped(&d, wanted);
    moe_model *m = streamed(&d);
    for (int threads = 1; threads <= 4; threads += 3) {
        const moe_session_params p = params_of(m, threads, 4, 12 * SLAB);
        moe_session *s = session_of(m, &p);
        for (int n = 1; n < 200; n += n < 20 ? 1 : 37) {
            moe_error e = { MOE_OK, "", "" };
            no_oddities();
            odd.fail_at = n;
            odd.code = n % 2 ? EIO : 0;
            atomic_store(&odd.armed, 1);
            const moe_status status = translate(s, out, &e);
            const int reads = atomic_load(&odd.reads);
            no_oddities();
            CHECK(status == (reads < n ? MOE_OK : MOE_ERROR_IO), "read %d: status %d", n, status);
            if (status) {
                const char *why = n % 2 ? strerror(EIO) : "the file is truncated at byte";
                const char *of = strstr(e.message, ": ") + 2; /* the path of the model precedes it */
                CHECK(strstr(of, "coder.1 expert ") == of + 2 && strstr(of, why) &&
                          strncmp(of, e.where, strlen(e.where)) == 0 && strstr(e.message, d.path) == e.message,
                      "read %d: %s: %s", n, e.where, e.message);
            }
            for (size_t i = 0; i < SENTENCES; i++)
                CHECK(!out[i].delivered || memcmp(&out[i], &wanted[i], sizeof *out) == 0,
                      "read %d: sentence %zu differs", n, i);
            expect(s, wanted, "after a failure");
        }
        moe_session_free(s);
    }
    moe_model_close(m);
    unlink(d.path);
}

TEST(changed_files_are_detected) {
    for (int cut = 0; cut < 2; cut++) {
        const on_disk d = write_kind(WIDE, MW_F32);
        moe_model *m = streamed(&d);
        const moe_session_params p = params_of(m, 2, 4, 6 * SLAB);
        moe_session *s = session_of(m, &p);
        outcome out[SENTENCES];
        moe_error e = { MOE_OK, "", "" };
        assert_int_equal(translate(s, out, &e), MOE_OK);
        if (cut) assert_int_equal(truncate(d.path, (off_t)d.bytes / 2), 0);
        else assert_int_equal(utimensat(AT_FDCWD, d.path, (struct timespec[2]){ { 1, 0 }, { 1, 0 } }, 0), 0);
        for (int i = 0; i < 2; i++) assert_int_equal(translate(s, out, &e), MOE_ERROR_IO);
        moe_session_free(s);
        moe_model_close(m);
        unlink(d.path);
    }
}

TEST(a_damaged_expert_is_named) {
    const on_disk d = write_kind(WIDE, MW_F32);
    moe_model *m = streamed(&d), *none = NULL;
    moe_error e = { MOE_OK, "", "" };
    size_t at = 0;
    for (size_t i = 0; i < moe_model_tensor_count(m); i++)
        if (moe_model_tensor(m, i).experts && moe_model_tensor(m, i).dims[0] == 48)
            at = (size_t)moe_model_tensor(m, i).offset;
    assert_int_equal(moe_model_verify(m, &e), MOE_OK);
    moe_model_close(m);
    const int fd = open(d.path, O_WRONLY);
    for (off_t i = 0; i < 48; i++) assert_int_equal(pwrite(fd, "\x99\x99\x99", 3, (off_t)at + i * SLAB + 64), 3);
    close(fd);
    assert_int_equal(moe_model_open(d.path, &(moe_model_params){ .stream = 1 }, &none, &e), MOE_ERROR_FORMAT);
    CHECK(strstr(e.message, "expert 0 of decoder.1.experts"), "%s", e.message);
    m = open_file(d.path, (moe_model_params){ .stream = 1, .verify = 2 });
    assert_int_equal(moe_model_verify(m, &e), MOE_ERROR_FORMAT);
    const moe_session_params p = params_of(m, 2, 4, 6 * SLAB);
    moe_session *s = session_of(m, &p);
    outcome out[SENTENCES];
    for (int i = 0; i < 2; i++) {
        assert_int_equal(translate(s, out, &e), MOE_ERROR_FORMAT);
        CHECK(strstr(e.message, " of decoder.1.experts: the file is damaged"), "%s", e.message);
    }
    moe_session_free(s);
    moe_model_close(m);
    unlink(d.path);
}

static moe_session *to_cancel;
static void cancel_it(void) { moe_session_cancel(to_cancel); }

TEST(a_session_can_be_cancelled_while_it_waits) {
    const on_disk d = write_kind(WIDE, MW_F32);
    outcome wanted[SENTENCES], out[SENTENCES];
    mapped(&d, wanted);
    moe_model *m = streamed(&d);
    const moe_session_params p = params_of(m, 3, 4, 4 * SLAB);
    to_cancel = session_of(m, &p);
    at_cancel = cancel_it;
    for (int n = 1; n < 60; n += 4) {
        moe_error e;
        no_oddities();
        odd.cancel_at = n;
        odd.delay_us = 200;
        atomic_store(&odd.armed, 1);
        assert_int_equal(translate(to_cancel, out, &e), MOE_ERROR_CANCELLED);
        no_oddities();
        expect(to_cancel, wanted, "after a cancel");
    }
    moe_session_free(to_cancel);
    moe_model_close(m);
    unlink(d.path);
}

TEST(failing_allocations_are_reported) {
    const on_disk d = write_kind(GNMT, MW_Q8);
    for (size_t n = 1;; n++) {
        mw_heap heap = { .fail_at = n };
        moe_model *m = NULL;
        moe_session *s = NULL;
        moe_error e = { MOE_OK, "", "" };
        moe_status status =
            moe_model_open(d.path,
                           &(moe_model_params){ { mw_heap_allocate, mw_heap_reallocate, mw_heap_release, &heap },
                                                .stream = 1 },
                           &m, &e);
        if (!status) {
            const moe_session_params p = params_of(m, 2, 2, 3 * SLAB);
            status = moe_session_new(m, &p, &s, &e);
        }
        moe_session_free(s);
        moe_model_close(m);
        assert_int_equal(heap.blocks, 0);
        if (!status) break;
        CHECK(status == MOE_ERROR_MEMORY && *e.message, "allocation %zu: %d: %s", n, status, e.message);
    }
    unlink(d.path);
}

/* ---- Residency ---- */

/* Run several translations and return the statistics of the last, since only frequently used experts are prefetched. */
static moe_stats second_pass(const on_disk *d, size_t slots, int batch) {
    moe_model *m = streamed(d);
    const moe_session_params p = params_of(m, 1, batch, slots * SLAB);
    moe_session *s = session_of(m, &p);
    outcome out[SENTENCES];
    moe_error e;
    moe_stats before, after;
    for (int i = 0; i < 12; i++) {
        before = moe_session_stats(s);
        assert_int_equal(translate(s, out, &e), MOE_OK);
    }
    after = moe_session_stats(s);
    after.expert_hits -= before.expert_hits;
    after.expert_visits -= before.expert_visits;
    after.expert_fetches -= before.expert_fetches;
    after.expert_fetch_bytes -= before.expert_fetch_bytes;
    moe_session_free(s);
    moe_model_close(m);
    return after;
}

TEST(more_memory_means_fewer_reads) {
    static const size_t slots[] = { 2, 6, 12, 24, 36, 48, 52 };
    const on_disk d = write_kind(WIDE, MW_F32);
    uint64_t last = UINT64_MAX;
    for (size_t i = 0; i < MOE_COUNT(slots); i++) {
        const moe_stats s = second_pass(&d, slots[i], 8);
        CHECK(s.expert_fetch_bytes < last || !last, "%zu slots: %llu bytes, with fewer slots %llu", slots[i],
              (unsigned long long)s.expert_fetch_bytes, (unsigned long long)last);
        last = s.expert_fetch_bytes;
    }
    assert_int_equal(last, 0); /* all experts are resident after the first pass */
    unlink(d.path);
}

/* Return the bytes that this process has read from disk. */
static uint64_t read_from_disk(void) {
    char line[64];
    unsigned long long bytes = 0;
    FILE *f = fopen("/proc/self/io", "r");
    while (f && fgets(line, sizeof line, f)) sscanf(line, "read_bytes: %llu", &bytes);
    if (f) fclose(f);
    return bytes;
}

TEST(experts_are_read_once_if_memory_suffices) {
    const on_disk d = write_kind(DENSE, MW_F32);
    moe_model *m = streamed(&d);
    const moe_session_params p = params_of(m, 2, 8, 64 * SLAB);
    const uint64_t before = read_from_disk();
    moe_session *s = session_of(m, &p);
    outcome out[SENTENCES];
    moe_error e;
    assert_int_equal(translate(s, out, &e), MOE_OK);
    const uint64_t first = read_from_disk();
    for (int i = 0; i < 3; i++) assert_int_equal(translate(s, out, &e), MOE_OK);
    const uint64_t after = read_from_disk(), all = 64 * SLAB;
    assert_int_equal(moe_session_stats(s).expert_fetches, 64);
    assert_int_equal(after, first);
    if (m->file.direct && before + all > first) printf("# /tmp is not on a disk: its reads are not counted\n");
    moe_session_free(s);
    moe_model_close(m);
    unlink(d.path);
}

TEST(scans_of_all_experts_hit_resident_ones) {
    static const size_t slots[] = { 16, 32, 48, 60 };
    const on_disk d = write_kind(DENSE, MW_F32); /* every run uses 60 of 64 experts */
    for (size_t i = 0; i < MOE_COUNT(slots); i++) {
        const moe_stats s = second_pass(&d, slots[i], 32);
        const double hits = (double)s.expert_hits / (double)s.expert_visits;
        CHECK(hits >= 0.9 * (double)slots[i] / 64, "%zu slots of 64: %.3f of visits are hits", slots[i], hits);
        CHECK(s.expert_ahead > 0 && s.expert_ahead_used > 0 && s.expert_ahead_used <= s.expert_ahead,
              "%zu slots: %llu prefetched, %llu of them used", slots[i], (unsigned long long)s.expert_ahead,
              (unsigned long long)s.expert_ahead_used);
    }
    unlink(d.path);
}

/* ---- Limits enforced by the system ---- */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(__APPLE__)
enum { CAPPED = 0 }; /* sanitizers map large areas */
#else
enum { CAPPED = 1 };
#endif

/* Return the size of this process's address space. */
static size_t space(void) {
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%lu", &pages) != 1) pages = 0;
    if (f) fclose(f);
    return (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
}

static int capped_child(const char *path, size_t budget, const outcome *wanted) {
    moe_model *m = NULL;
    moe_session *s = NULL;
    outcome out[SENTENCES];
    moe_error e = { MOE_OK, "", "" };
    size_t bytes = 0;
    struct rlimit limit = { space() + ((size_t)64 << 20), RLIM_INFINITY };
    if (moe_model_open(path, &(moe_model_params){ .stream = 1, .verify = -1 }, &m, &e)) return 2;
    const moe_session_params p = params_of(m, 2, 8, budget);
    if (moe_session_bytes(m, &p, &bytes, &e)) return 3;
    limit.rlim_cur += bytes + (size_t)moe_model_held_bytes(m);
    if (moe_model_file_bytes(m) < 4 * (limit.rlim_cur - space())) return 4;
    moe_model_close(m);
    limit.rlim_max = limit.rlim_cur;
    if (setrlimit(RLIMIT_AS, &limit)) return 5;
    if (moe_model_open(path, &(moe_model_params){ .verify = -1 }, &m, &e) != MOE_ERROR_IO) return 6; /* too large */
    if (moe_model_open(path, &(moe_model_params){ .stream = 1, .verify = -1 }, &m, &e)) return 7;
    if (moe_session_new(m, &p, &s, &e)) return 8;
    if (translate(s, out, &e)) return 9;
    moe_session_free(s);
    moe_model_close(m);
    return memcmp(out, wanted, sizeof out) == 0 ? 0 : 10;
}

TEST(a_model_four_times_the_limit_translates) {
    enum { EXPERTS = 1200, HIDDEN = 2048 };
    if (!CAPPED || mw_slow()) return;
    mw_model *m = mw_small(MW_GNMT, MW_F32, 7);
    replace_mixture(m, EXPERTS, 2, HIDDEN, "topk");
    const on_disk d = write_image(m);
    outcome wanted[SENTENCES];
    mapped(&d, wanted);
    const pid_t child = fork();
    if (!child) _exit(capped_child(d.path, 20 * mw_slab_stride(MW_F32, HIDDEN, MW_WIDTH), wanted));
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    unlink(d.path);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %d", status);
}

int main(void) {
    cmocka_set_message_output(CM_OUTPUT_TAP);
    return run_all_tests(NULL, NULL);
}
