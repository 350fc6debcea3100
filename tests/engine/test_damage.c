/* test_damage.c - tests policies of moe.h: damaged files, files that change while in use, threads and processes,
 * file limits. */
#if !defined(_POSIX_C_SOURCE) && !defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE
#endif
#include "moe.h"

#include "model_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "tests/test.h"

/* ---- Helpers ---- */

static char directory[64], path_buffer[4][128];

static const char *in_directory(const char *name) {
    static int next;
    char *path = path_buffer[next++ % 4];
    snprintf(path, sizeof *path_buffer, "%s/%s", directory, name);
    return path;
}

/* Write all bytes, even if short_io.so shortens every write. */
static void write_at(int fd, const void *data, size_t bytes, uint64_t at) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = pwrite(fd, (const char *)data + done, bytes - done, (off_t)(at + done));
        if (n > 0) done += (size_t)n;
        else assert_int_equal(errno, EINTR);
    }
}

static void write_file(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

/* Results of all sentences, serialised for comparison. */
typedef struct outcome {
    moe_status status;
    moe_error error;
    size_t delivered, length;
    unsigned char bytes[4096];
} outcome;

typedef struct work {
    size_t next, n;
    outcome *out;
    void (*waiting)(void); /* called before the last request; may be NULL */
} work;

static const int32_t sentences[][5] = { { 6, 7, 8, 9, 10 }, { 11 }, { 30, 31, 32 }, { 20, 21, 22, 23 }, { 39, 6 } };
static const size_t lengths[] = { 5, 1, 3, 4, 2 };
enum { SENTENCES = sizeof lengths / sizeof *lengths };

static int pull(void *user, int wait, moe_request *r) {
    work *w = user;
    (void)wait;
    if (w->next == w->n) return MOE_PULL_END;
    if (w->next + 1 == w->n && w->waiting) w->waiting();
    r->source = sentences[w->next];
    r->n_source = lengths[w->next];
    r->user = (void *)(uintptr_t)w->next++;
    return MOE_PULL_REQUEST;
}

/* Store the result of a sentence at the sentence's offset, since sentences finish in any order. */
static void done(void *user, const moe_result *r) {
    outcome *o = ((work *)user)->out;
    unsigned char *at = o->bytes + sizeof o->bytes / SENTENCES * (size_t)(uintptr_t)r->user;
    o->delivered++;
    if (r->status != MOE_OK || !r->n_hypotheses) return;
    memcpy(at, &r->hypotheses[0].logprob, 4);
    memcpy(at + 4, r->hypotheses[0].ids, r->hypotheses[0].n_ids * 4);
    o->length += r->hypotheses[0].n_ids;
}

static moe_session_params parameters(const moe_model *model, int threads) {
    moe_session_params p = moe_session_params_default(model);
    p.threads = threads;
    p.batch = 3;
    p.beam = 2;
    p.device = "cpu";
    p.target_tag = moe_model_language_tag(model, "de");
    return p;
}

static outcome translate_with(moe_session *session, size_t n) {
    outcome o;
    work w = { 0, n, &o, NULL };
    memset(&o, 0, sizeof o);
    o.status = moe_translate(session, pull, done, &w, &o.error);
    return o;
}

/* Translate n sentences in a new session. Return the outcome, including a failure to create the session. */
static outcome translate(const moe_model *model, size_t n, int threads) {
    const moe_session_params p = parameters(model, threads);
    moe_session *session = NULL;
    outcome o;
    memset(&o, 0, sizeof o);
    o.status = moe_session_new(model, &p, &session, &o.error);
    if (o.status == MOE_OK) o = translate_with(session, n);
    moe_session_free(session);
    return o;
}

static void assert_same(const outcome *a, const outcome *b) {
    CHECK(a->status == MOE_OK, "%s", a->error.message);
    CHECK(b->status == MOE_OK, "%s", b->error.message);
    assert_int_equal(a->delivered, b->delivered);
    assert_true(a->length > 0);
    assert_memory_equal(a->bytes, b->bytes, sizeof a->bytes);
}

static moe_model *open_as(mw_image image, int verify) {
    const moe_model_params params = { .verify = verify };
    moe_model *model = NULL;
    moe_error e = { MOE_OK, "", "" };
    CHECK(moe_model_open_memory(image.data, image.bytes, &params, &model, &e) == MOE_OK, "%s", e.message);
    return model;
}

static moe_model *open_path(const char *path, int verify, int copy) {
    const moe_model_params params = { .verify = verify, .copy = copy };
    moe_model *model = NULL;
    moe_error e = { MOE_OK, "", "" };
    CHECK(moe_model_open(path, &params, &model, &e) == MOE_OK, "%s", e.message);
    return model;
}

enum { AT_OPENING = 1, BEFORE_USE = 2, NEVER = -1 };

/* ---- Damage, verified before first use ---- */

TEST(opening_reads_no_tensors_if_use_verifies_them) {
    for (uint32_t version = 1; version <= 2; version++) {
        mw_model *m = mw_small(MW_GNMT, MW_Q8, 1);
        mw_image image;
        m->version = version;
        image = mw_build(m);
        for (size_t i = 0; i < m->n_tensors; i++) {
            const mw_tensor *t = &m->tensors[i];
            const moe_model_params params = { .verify = AT_OPENING };
            moe_model *model;
            moe_error e;
            image.data[t->offset + t->bytes / 3] ^= 1;
            assert_int_equal(moe_model_open_memory(image.data, image.bytes, &params, &model, &e), MOE_ERROR_FORMAT);
            assert_non_null(strstr(e.where, t->name));
            model = open_as(image, BEFORE_USE);
            assert_int_equal(moe_model_verify(model, &e), MOE_ERROR_FORMAT);
            assert_non_null(strstr(e.message, t->name));
            moe_model_close(model);
            moe_model_close(open_as(image, NEVER));
            image.data[t->offset + t->bytes / 3] ^= 1;
        }
        free(image.data);
        mw_free(m);
    }
}

/* Creating a session verifies the tensors that every run reads; in version 1 it verifies all tensors. */
TEST(sessions_with_damaged_tensors_are_refused) {
    for (uint32_t version = 1; version <= 2; version++)
        for (int threads = 1; threads <= 3; threads += 2) {
            mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
            mw_image image;
            m->version = version;
            image = mw_build(m);
            for (size_t i = 0; i < m->n_tensors; i++) {
                const mw_tensor *t = &m->tensors[i];
                moe_model *model = open_as(image, BEFORE_USE);
                outcome o;
                image.data[t->offset + t->bytes - 2] ^= 0x10;
                o = translate(model, 0, threads);
                if (t->layout && version == 2) {
                    assert_int_equal(o.status, MOE_OK); /* no row has selected the expert */
                } else {
                    assert_int_equal(o.status, MOE_ERROR_FORMAT);
                    assert_non_null(strstr(o.error.message, t->name));
                    assert_non_null(strstr(o.error.message, "checksum"));
                }
                moe_model_close(model);
                image.data[t->offset + t->bytes - 2] ^= 0x10;
            }
            free(image.data);
            mw_free(m);
        }
}

TEST(damaged_slabs_are_reported_on_first_use) {
    size_t refused = 0, unused = 0;
    for (uint32_t type = 0; type < 4; type += 3)
        for (int threads = 1; threads <= 3; threads += 2) {
            mw_model *m = mw_small(MW_GNMT, type, 1);
            mw_image image;
            moe_model *model;
            outcome wanted[SENTENCES + 1];
            for (int side = 0; side < 2; side++) { /* select one expert per token, leaving some unused */
                mw_text(m, side ? "decoder.1.gate" : "encoder.1.gate", "topk");
                mw_int(m, side ? "decoder.1.k" : "encoder.1.k", 1);
            }
            image = mw_build(m);
            model = open_as(image, BEFORE_USE);
            for (size_t n = 1; n <= SENTENCES; n++) wanted[n] = translate(model, n, threads);
            moe_model_close(model);
            for (size_t i = 0; i < m->n_tensors; i++) {
                const mw_tensor *t = &m->tensors[i];
                const size_t stride = t->layout ? t->bytes / (size_t)t->dims[0] : 0;
                for (size_t x = 0; t->layout && x < t->dims[0]; x++)
                    for (size_t n = 1; n <= SENTENCES; n += SENTENCES - 1) {
                        unsigned char *byte = image.data + t->offset + x * stride + stride / 5;
                        moe_session *session = NULL;
                        moe_session_params p;
                        moe_error e;
                        outcome o;
                        char name[64];
                        model = open_as(image, BEFORE_USE);
                        p = parameters(model, threads);
                        *byte ^= 4;
                        assert_int_equal(moe_session_new(model, &p, &session, &e), MOE_OK);
                        o = translate_with(session, n);
                        if (o.status == MOE_OK) {
                            assert_same(&o, &wanted[n]);
                            unused++;
                        } else {
                            assert_int_equal(o.status, MOE_ERROR_FORMAT);
                            snprintf(name, sizeof name, "expert %zu of %s: ", x, t->name);
                            CHECK(strstr(o.error.message, name), "'%s' lacks '%s'", o.error.message, name);
                            o = translate_with(session, n); /* the second call fails too */
                            assert_int_equal(o.status, MOE_ERROR_FORMAT);
                            *byte ^= 4;
                            o = translate_with(session, n);
                            assert_same(&o, &wanted[n]);
                            *byte ^= 4;
                            refused++;
                        }
                        *byte ^= 4;
                        moe_session_free(session);
                        moe_model_close(model);
                    }
            }
            free(image.data);
            mw_free(m);
        }
    print_message("# %zu damaged slabs refused, %zu were not used\n", refused, unused);
    assert_true(refused > 20 && unused > 0);
}

TEST(nan_scales_of_experts_are_damage) {
    mw_model *m = mw_small(MW_GNMT, MW_Q8, 1);
    const float wrong = -1;
    mw_image image;
    moe_model *model;
    outcome o;
    for (size_t i = 0; i < m->n_tensors; i++) {
        mw_tensor *t = &m->tensors[i];
        const size_t rows = (size_t)t->dims[1], cols = (size_t)t->dims[2];
        for (size_t x = 0; t->layout && x < t->dims[0]; x++)
            memcpy(t->data + x * (t->bytes / t->dims[0]) + mw_up(rows, 16) * mw_up(cols, 64), &wrong, 4);
    }
    image = mw_build(m); /* the checksums are correct */
    model = open_as(image, BEFORE_USE);
    o = translate(model, SENTENCES, 2);
    assert_int_equal(o.status, MOE_ERROR_FORMAT);
    assert_non_null(strstr(o.error.message, "invalid scale in expert"));
    moe_model_close(model);
    free(image.data);
    mw_free(m);
}

/* A model verifies its data only once. */
TEST(valid_data_is_not_verified_again) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    mw_image image = mw_build(m);
    moe_model *model = open_as(image, BEFORE_USE);
    outcome first, o;
    first = translate(model, SENTENCES, 2);
    o = translate(model, SENTENCES, 2);
    assert_same(&first, &o);
    for (size_t i = 0; i < m->n_tensors; i++) /* damage the last byte of padding, which no product reads */
        if (m->tensors[i].layout) image.data[m->tensors[i].offset + m->tensors[i].bytes - 1] ^= 1;
    moe_model_close(model);
    model = open_as(image, NEVER);
    o = translate(model, SENTENCES, 2);
    assert_same(&first, &o);
    moe_model_close(model);
    model = open_as(image, BEFORE_USE);
    o = translate(model, SENTENCES, 2);
    assert_int_equal(o.status, MOE_ERROR_FORMAT); /* the first use verifies the data */
    for (size_t i = 0; i < m->n_tensors; i++)
        if (m->tensors[i].layout) image.data[m->tensors[i].offset + m->tensors[i].bytes - 1] ^= 1;
    assert_int_equal(moe_model_verify(model, NULL), MOE_OK);
    for (size_t i = 0; i < m->n_tensors; i++)
        if (m->tensors[i].layout) image.data[m->tensors[i].offset + m->tensors[i].bytes - 1] ^= 1;
    o = translate(model, SENTENCES, 2); /* verified data is not checked again */
    assert_same(&first, &o);
    moe_model_close(model);
    free(image.data);
    mw_free(m);
}

TEST(damaged_slab_checksums_are_refused) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    mw_image image = mw_build(m);
    moe_model *model = NULL;
    moe_error e;
    for (size_t i = 0; i < m->n_tensors; i++) {
        const mw_tensor *t = &m->tensors[i];
        if (!t->layout) continue;
        image.data[mw_at_slabs(t) + 5] ^= 1;
        mw_seal(image);
        assert_int_equal(moe_model_open_memory(image.data, image.bytes, NULL, &model, &e), MOE_ERROR_FORMAT);
        assert_non_null(strstr(e.where, t->name));
        image.data[mw_at_slabs(t) + 5] ^= 1;
    }
    mw_seal(image);
    moe_model_close(open_as(image, 0));
    free(image.data);
    mw_free(m);
}

/* ---- Threads and processes ---- */

typedef struct worker {
    const moe_model *model;
    outcome out[8];
} worker;

static void *work_in_thread(void *user) {
    worker *w = user;
    for (size_t i = 0; i < 8; i++) w->out[i] = translate(w->model, SENTENCES, 1 + (int)i % 2);
    return NULL;
}

/* Several threads verify parts of the same model before the first use of each part. */
TEST(threads_share_a_model_that_use_verifies) {
    mw_model *m = mw_small(MW_GNMT, MW_Q8, 1);
    mw_image image = mw_build(m);
    moe_model *model = open_as(image, BEFORE_USE);
    static worker workers[4];
    pthread_t threads[4];
    moe_model *checked = open_as(image, AT_OPENING);
    const outcome wanted = translate(checked, SENTENCES, 1);
    for (size_t i = 0; i < 4; i++) {
        workers[i].model = model;
        assert_int_equal(pthread_create(&threads[i], NULL, work_in_thread, &workers[i]), 0);
    }
    assert_int_equal(moe_model_verify(model, NULL), MOE_OK); /* concurrently with the threads */
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        for (size_t k = 0; k < 8; k++) assert_same(&workers[i].out[k], &wanted);
    }
    moe_model_close(model);
    moe_model_close(checked);
    free(image.data);
    mw_free(m);
}

/* A child process inherits its parent's model and creates its own sessions. */
TEST(a_child_process_uses_the_model_of_its_parent) {
    mw_model *m = mw_small(MW_GNMT, MW_Q8, 1);
    mw_image image = mw_build(m);
    moe_model *model;
    moe_session *session = NULL;
    moe_session_params p;
    moe_error e;
    outcome wanted, o;
    int result = 0;
    pid_t child;
    write_file(in_directory("model.bin"), image.data, image.bytes);
    model = open_path(in_directory("model.bin"), BEFORE_USE, 0);
    p = parameters(model, 3);
    assert_int_equal(moe_session_new(model, &p, &session, &e), MOE_OK);
    wanted = translate_with(session, SENTENCES);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        o = translate(model, SENTENCES, 2);
        /* End with exec, since valgrind would otherwise report the parent's memory as leaked. */
        if (o.status == MOE_OK && memcmp(o.bytes, wanted.bytes, sizeof o.bytes) == 0)
            execl("/bin/sh", "sh", "-c", "exit 0", (char *)NULL);
        _exit(1);
    }
    o = translate_with(session, SENTENCES);
    assert_same(&o, &wanted);
    while (waitpid(child, &result, 0) < 0) assert_int_equal(errno, EINTR);
    assert_int_equal(result, 0);
    moe_session_free(session);
    moe_model_close(model);
    free(image.data);
    mw_free(m);
}

/* ---- Files that change ---- */

typedef enum change { CUT, GROWN, OVERWRITTEN, REPLACED, REMOVED, CHANGES } change;

static void change_file(const char *path, change what, mw_image image) {
    const int fd = what == REMOVED || what == REPLACED ? -1 : open(path, O_WRONLY);
    const struct timespec moment = { 0, 20000000 };
    nanosleep(&moment, NULL); /* the resolution of file times may be 10 ms */
    if (what == CUT) assert_int_equal(ftruncate(fd, 4096), 0);
    if (what == GROWN) assert_int_equal(ftruncate(fd, (off_t)image.bytes + 4096), 0);
    if (what == OVERWRITTEN) write_at(fd, image.data, 64, 0);
    if (what == REMOVED) assert_int_equal(unlink(path), 0);
    if (what == REPLACED) {
        write_file(in_directory("other"), "another file", 12);
        assert_int_equal(rename(in_directory("other"), path), 0);
    }
    if (fd >= 0) assert_int_equal(close(fd), 0);
}

/* If a model file in use is overwritten or resized, the next step fails, but no signal is raised. Replacing or removing
 * the file is harmless. Models that were read into memory are not affected. */
TEST(changed_mapped_files_are_errors_and_copies_are_unaffected) {
    mw_model *m = mw_small(MW_GNMT, MW_Q8, 1);
    mw_image image = mw_build(m);
    const char *path = "model.bin";
    for (int what = 0; what < CHANGES; what++)
        for (int copy = 0; copy < 2; copy++) {
            const int harm = !copy && what != REPLACED && what != REMOVED;
            moe_model *model;
            moe_session *session = NULL;
            moe_session_params p;
            moe_error e;
            outcome wanted, o;
            write_file(in_directory(path), image.data, image.bytes);
            model = open_path(in_directory(path), BEFORE_USE, copy);
            p = parameters(model, 2);
            assert_int_equal(moe_session_new(model, &p, &session, &e), MOE_OK);
            wanted = translate_with(session, SENTENCES);
            change_file(in_directory(path), (change)what, image);
            o = translate_with(session, SENTENCES);
            if (harm) {
                assert_int_equal(o.status, MOE_ERROR_IO);
                CHECK(strstr(o.error.message, "modified or cut off"), "%s", o.error.message);
                assert_int_equal(o.delivered, 0);
                assert_int_equal(moe_model_verify(model, &e), MOE_ERROR_IO);
                assert_int_equal(moe_session_new(model, &p, &(moe_session *){ NULL }, &e), MOE_ERROR_IO);
                assert_int_equal(moe_model_save(model, in_directory("saved.bin"), &(moe_save_params){ .n_vectors = 0 },
                                                &e),
                                 MOE_ERROR_IO);
            } else {
                assert_same(&o, &wanted);
                assert_int_equal(moe_model_verify(model, &e), MOE_OK);
            }
            moe_session_free(session);
            moe_model_close(model);
            unlink(in_directory(path));
        }
    free(image.data);
    mw_free(m);
}

static struct {
    const char *path;
    change what;
    mw_image image;
} later;

static void change_later(void) { change_file(later.path, later.what, later.image); }

/* If a file changes while the session waits for a request, nothing of it is read before the error. Shortlists are read
 * when a request is admitted, all other numbers in the next step. */
TEST(files_that_change_between_requests_are_errors) {
    for (int listed = 0; listed < 2; listed++)
        for (int batch = 1; batch <= SENTENCES; batch += SENTENCES - 1)
            for (int what = CUT; what <= OVERWRITTEN; what++) {
                mw_model *m = mw_small(MW_GNMT, MW_Q8, 1);
                if (listed) mw_random_shortlist(m);
                mw_image image = mw_build(m);
                const char *path = in_directory("waits.bin");
                moe_session *session = NULL;
                outcome o = { .status = MOE_OK };
                work w = { 0, SENTENCES, &o, change_later };
                moe_error e;
                write_file(path, image.data, image.bytes);
                moe_model *model = open_path(path, BEFORE_USE, 0);
                moe_session_params p = parameters(model, 2);
                p.batch = batch;
                assert_int_equal(moe_session_new(model, &p, &session, &e), MOE_OK);
                later.path = path, later.what = (change)what, later.image = image;
                o.status = moe_translate(session, pull, done, &w, &o.error);
                assert_int_equal(o.status, MOE_ERROR_IO);
                CHECK(strstr(o.error.message, path) && strstr(o.error.message, "modified or cut off"), "%s",
                      o.error.message);
                assert_true(o.delivered < SENTENCES);
                moe_session_free(session);
                moe_model_close(model);
                unlink(path);
                free(image.data);
                mw_free(m);
            }
}

/* ---- Limits ---- */

static double seconds(void) { /* CPU time, since the machine may be shared */
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Return the minimum time in seconds to read all languages and texts of a model with n languages. */
static double look_at_languages(size_t n) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    const char **codes = mw_zeros(n * sizeof *codes);
    char *names = mw_zeros(n * 24);
    int64_t *tags = mw_zeros(n * sizeof *tags);
    mw_image image;
    double least = 1e9;
    for (size_t i = 0; i < n; i++) {
        snprintf(names + 24 * i, 24, "x%zu", i);
        codes[i] = names + 24 * i;
        tags[i] = MW_TAG_DE;
    }
    mw_texts(m, "languages.codes", codes, n);
    mw_ints(m, "languages.tags", tags, n);
    image = mw_build(m);
    for (int round = 0; round < 5; round++) {
        const double begin = seconds();
        moe_model *model = open_as(image, NEVER);
        const ptrdiff_t list = moe_model_meta_find(model, "languages.codes");
        char last[16];
        size_t length = 0;
        assert_int_equal(moe_model_language_count(model), n);
        for (size_t i = 0; i < n; i++) {
            length += moe_model_language(model, i).length;
            length -= moe_model_meta_text(model, (size_t)list, i).length;
        }
        assert_int_equal(length, 0);
        snprintf(last, sizeof last, "x%zu", n - 1);
        assert_int_equal(moe_model_language_tag(model, last), MW_TAG_DE);
        moe_model_close(model);
        if (seconds() - begin < least) least = seconds() - begin;
    }
    free(image.data), free(codes), free(names), free(tags);
    mw_free(m);
    return least;
}

TEST(reading_all_languages_takes_linear_time) {
    const double few = look_at_languages(4096), many = look_at_languages(65536);
    print_message("# 65,536 languages: %.1f ms\n", 1e3 * many);
    CHECK(many < 64 * few, "16 times the languages take %.0f times as long",
          many / few); /* quadratic algorithms would take 256 times as long */
}

/* Header fields that exceed the limits in moe.h are rejected. */
TEST(headers_beyond_the_limits_are_refused) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    mw_image image = mw_build(m);
    moe_model *model = NULL;
    moe_error e;
    const uint64_t beyond = (uint64_t)MOE_MAX_HEADER + 8;
    int fd = open(in_directory("header.bin"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    mw_put64(image.data + 16, beyond);
    mw_put64(image.data + 24, beyond);
    write_at(fd, image.data, 64, 0);
    assert_int_equal(ftruncate(fd, (off_t)beyond), 0);
    assert_int_equal(moe_model_open(in_directory("header.bin"), NULL, &model, &e), MOE_ERROR_UNSUPPORTED);
    assert_non_null(strstr(e.message, "header"));
    close(fd);
    unlink(in_directory("header.bin"));
    free(image.data);
    image = mw_allocate_image(64 + 24 * ((size_t)MOE_MAX_ENTRIES + 2));
    memcpy(image.data, "MOEMODEL", 8);
    mw_put32(image.data + 8, 2);
    mw_put64(image.data + 16, image.bytes);
    mw_put64(image.data + 24, image.bytes);
    for (size_t field = 32; field <= 36; field += 4) {
        mw_put32(image.data + field, MOE_MAX_ENTRIES + 1);
        mw_seal(image);
        assert_int_equal(moe_model_open_memory(image.data, image.bytes, NULL, &model, &e), MOE_ERROR_FORMAT);
        assert_string_equal(e.where, "offset 32");
        mw_put32(image.data + field, 0);
    }
    free(image.data);
    mw_free(m);
}

/* The first tensor is 5 GB, stored as a hole in the file; all other tensors follow. */
TEST(offsets_beyond_4_gigabytes_are_read) {
    const uint64_t rows = (uint64_t)5 << 18, bytes = rows * 4096; /* f32 [rows, 1024] */
    mw_model *plain = mw_small(MW_GNMT, MW_Q8, 1), *m = mw_small(MW_GNMT, MW_Q8, 1);
    mw_image image = mw_build(plain), small;
    moe_model *model = open_as(image, AT_OPENING);
    const outcome wanted = translate(model, SENTENCES, 2);
    mw_tensor *spare;
    outcome o;
    int fd = open(in_directory("large.bin"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    moe_model_close(model);
    free(image.data);
    spare = mw_add_tensor(m, "spare", MW_F32, 0, 4096);
    spare->n_dims = 2, spare->dims[0] = 1, spare->dims[1] = 1024;
    {
        const mw_tensor last = *spare;
        memmove(m->tensors + 1, m->tensors, (m->n_tensors - 1) * sizeof *m->tensors);
        m->tensors[0] = last;
    }
    small = mw_build(m);
    mw_put64(small.data + m->tensors[0].at + 16, rows);
    mw_put64(small.data + mw_at_bytes(&m->tensors[0]), bytes);
    mw_put64(small.data + 24, small.bytes + bytes - 4096);
    for (size_t i = 1; i < m->n_tensors; i++)
        mw_put64(small.data + mw_at_offset(&m->tensors[i]), m->tensors[i].offset + bytes - 4096);
    mw_seal(small);
    write_at(fd, small.data, m->header_bytes, 0);
    for (size_t i = 1; i < m->n_tensors; i++) {
        const mw_tensor *t = &m->tensors[i];
        write_at(fd, t->data, t->bytes, t->offset + bytes - 4096);
    }
    close(fd);
    model = open_path(in_directory("large.bin"), NEVER, 0);
    assert_true(moe_model_file_bytes(model) > (uint64_t)1 << 32);
    o = translate(model, SENTENCES, 2);
    assert_same(&o, &wanted);
    moe_model_close(model);
    unlink(in_directory("large.bin"));
    free(small.data);
    mw_free(m);
    mw_free(plain);
}

FIXTURE(make_directory) {
    snprintf(directory, sizeof directory, "/tmp/moe-damage-XXXXXX");
    return mkdtemp(directory) ? 0 : -1;
}

FIXTURE(remove_directory) {
    unlink(in_directory("model.bin"));
    return rmdir(directory);
}

int main(void) { return run_all_tests(make_directory, remove_directory); }
