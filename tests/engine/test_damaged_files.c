/* test_damaged_files.c - tests files with random damage, including damaged checksums. Each file is rejected or gives
 * the same results as the intact file. No damage causes wrong results, crashes, excessive time or memory. Damage is a
 * changed bit or byte, a range of noise, zeros or other data, a truncated or extended end, or bytes lost or duplicated
 * in the middle. Each file is opened twice: once to verify all tensors on opening, once to verify them before use.
 * MOE_DAMAGED_FILES=10000 tests 10,000 files. File n is the same in every run; MOE_DAMAGED_FIRST=n starts with it. */
#if !defined(_POSIX_C_SOURCE) && !defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE
#endif
#include "moe.h"

#include "model_writer.h"

#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#include "tests/test.h"

static const char *const names[] = { "translation", "transformer", "language", "classifier" };
enum { KINDS = sizeof names / sizeof *names, REQUESTS = 5, LONGEST = 40, ROWS = 4, BEFORE_USE = 2 };

/* Limits on additional memory: FACTOR times the file's size plus MORE bytes. The library may allocate this much
 * before it detects a false length. */
enum { FACTOR = 16, MORE = 1 << 20 };
static const double most_seconds = 2;

/* ---- Results of a file ---- */

typedef struct outcome {
    moe_status opened, made, ran;
    moe_error error;
    size_t delivered; /* number of results without errors; bit mask of their requests */
    unsigned which;
    unsigned char bytes[REQUESTS][8 + LONGEST * 8];
} outcome;

typedef struct work {
    const moe_model *model;
    size_t next;
    int32_t ids[8];
    outcome *out;
} work;

static int pull(void *user, int wait, moe_request *r) {
    work *w = user;
    (void)wait;
    if (w->next == REQUESTS) return MOE_PULL_END;
    for (size_t k = 0; k < 8; k++) w->ids[k] = 6 + (int32_t)((7 * w->next + 5 * k) % 30);
    if (moe_model_kind(w->model) == MOE_MODEL_LANGUAGE) r->target = w->ids, r->n_target = 1 + w->next;
    else r->source = w->ids, r->n_source = 1 + w->next;
    r->user = w->out->bytes[w->next++];
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *r) {
    outcome *o = ((work *)user)->out;
    unsigned char *at = r->user;
    if (r->status != MOE_OK || !r->n_hypotheses) return;
    for (size_t i = 0; i < REQUESTS; i++)
        if (at == o->bytes[i]) o->which |= 1u << i;
    o->delivered++;
    memcpy(at, &r->hypotheses[0].logprob, 4);
    memcpy(at + 4, r->hypotheses[0].ids, (r->hypotheses[0].n_ids < LONGEST ? r->hypotheses[0].n_ids : LONGEST) * 4);
    memcpy(at + 4 + LONGEST * 4, r->hypotheses[0].token_logprobs,
           (r->hypotheses[0].n_ids < LONGEST ? r->hypotheses[0].n_ids : LONGEST) * 4);
}

static moe_status run(moe_session *session, const moe_model *model, outcome *o) {
    work w = { .model = model, .out = o };
    float inputs[ROWS * 64];
    moe_status status;
    if (moe_model_kind(model) != MOE_MODEL_CLASSIFIER) return moe_translate(session, pull, done, &w, &o->error);
    CHECK(moe_model_width(model) <= 64, "wider than the test's inputs");
    for (size_t i = 0; i < ROWS * moe_model_width(model); i++) inputs[i] = (float)(i % 7) / 4 - 1;
    status =
        moe_classify(session, inputs, ROWS, (int32_t *)(void *)o->bytes[0], (float *)(void *)o->bytes[1], &o->error);
    o->which = status == MOE_OK ? 3 : 0;
    o->delivered = status == MOE_OK;
    return status;
}

static void use_file(const char *path, int verify, int copy, mw_heap *heap, outcome *o) {
    const moe_model_params params = { .allocator = { mw_heap_allocate, mw_heap_reallocate, mw_heap_release, heap },
                                      .verify = verify,
                                      .copy = copy };
    moe_model *model = NULL;
    moe_session *session = NULL;
    moe_session_params p;
    memset(o, 0, sizeof *o);
    o->made = o->ran = MOE_ERROR_ARGUMENT;
    o->opened = moe_model_open(path, &params, &model, &o->error);
    if (o->opened == MOE_OK) {
        p = moe_session_params_default(model);
        p.threads = 1, p.batch = 3, p.device = "cpu";
        if (moe_model_kind(model) != MOE_MODEL_CLASSIFIER) p.max_source = 20, p.max_target = 20;
        if (moe_model_language_count(model)) p.target_tag = p.source_tag = MW_TAG_DE;
        o->made = moe_session_new(model, &p, &session, &o->error);
    }
    if (o->made == MOE_OK) o->ran = run(session, model, o);
    moe_session_free(session);
    moe_model_close(model);
}

/* ---- Damage ---- */

typedef struct bytes {
    unsigned char *data;
    size_t n;
} bytes;

static bytes read_whole(const char *path) {
    bytes b = { NULL, 0 };
    FILE *file = fopen(path, "rb");
    CHECK(file, "cannot read %s: run the tests in the root of the repository", path);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    b.n = (size_t)ftell(file);
    b.data = malloc(b.n);
    assert_non_null(b.data);
    rewind(file);
    assert_int_equal(fread(b.data, 1, b.n, file), b.n);
    fclose(file);
    return b;
}

static void write_whole(const char *path, const unsigned char *data, size_t n) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

/* Choose a random range in `whole` bytes, often at sector and page boundaries. Return its length. */
static size_t range(size_t whole, uint64_t *r, size_t *at) {
    const size_t unit = (size_t)1 << (mw_below(r, 2) ? 0 : 6 + mw_below(r, 7));
    size_t n = 1 + mw_below(r, (size_t)1 << mw_below(r, 13));
    *at = mw_below(r, whole) / unit * unit;
    if (unit > 1 && mw_below(r, 2)) n = unit;
    return n < whole - *at ? n : whole - *at;
}

/* Write a damaged copy of a file to `to`, which has room for 8192 more bytes. Return its length. */
static size_t damage(bytes from, unsigned char *to, uint64_t *r) {
    size_t at, n = range(from.n, r, &at), other = mw_below(r, from.n - n + 1);
    memcpy(to, from.data, from.n);
    switch (mw_below(r, 9)) {
    case 0: to[at] ^= (unsigned char)(1u << mw_below(r, 8)); break;
    case 1: to[at] = (unsigned char)mw_next(r); break;
    case 2:
        for (size_t i = 0; i < n; i++) to[at + i] = (unsigned char)mw_next(r);
        break;
    case 3: memset(to + at, mw_below(r, 4) ? 0 : 0xff, n); break;
    case 4: memcpy(to + at, from.data + other, n); break;
    case 5: return at;                              /* truncated */
    case 6: memset(to + at, 0, from.n - at); break; /* the rest was not written */
    case 7:
        for (size_t i = 0; i < n; i++) to[from.n + i] = (unsigned char)mw_next(r); /* noise is appended */
        return from.n + n;
    default:
        if (mw_below(r, 2)) { /* bytes are lost or duplicated */
            memmove(to + at, from.data + at + n, from.n - at - n);
            return from.n - n;
        }
        memmove(to + at + n, from.data + at, from.n - at);
        return from.n + n;
    }
    return from.n;
}

/* ---- The test ---- */

static size_t number_from(const char *variable, size_t otherwise) {
    const char *text = getenv(variable);
    return text && *text ? (size_t)strtoull(text, NULL, 10) : otherwise;
}

static double processor_seconds(void) { /* CPU time, since the machine may be shared */
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct tally {
    size_t at_opening, later, equal, intact;
    double longest;
    size_t most; /* peak memory in bytes */
} tally;

/* Use a file that is verified when opened or before use; check the outcome. `same` is 1 if the file is intact. */
static void judge(const char *path, size_t number, int verify, int same, const outcome *wanted, size_t memory,
                  tally *sum) {
    mw_heap heap = { .fail_at = 0 };
    const double begin = processor_seconds();
    outcome o;
    double took;
    use_file(path, verify, (int)(number / KINDS % 2), &heap, &o);
    took = processor_seconds() - begin;
    CHECK(took <= most_seconds, "file %zu took %.1f s", number, took);
    CHECK(heap.peak <= memory, "file %zu took %zu bytes of memory", number, heap.peak);
    CHECK(!heap.blocks && !heap.wrong_sizes, "file %zu left %zu blocks", number, heap.blocks);
    for (size_t i = 0; i < REQUESTS; i++)
        CHECK(!(o.which >> i & 1) || memcmp(o.bytes[i], wanted->bytes[i], sizeof o.bytes[i]) == 0,
              "file %zu has different results, status %d", number, (int)o.ran);
    if (o.ran == MOE_OK) {
        CHECK(o.which == wanted->which, "file %zu has %zu of %zu results, but no error", number, o.delivered,
              wanted->delivered);
        sum->equal++;
    } else {
        CHECK(!same, "file %zu is intact, but rejected: %s", number, o.error.message);
        CHECK(o.error.code != MOE_ERROR_MEMORY && o.error.message[0] && o.error.where[0],
              "file %zu is rejected without a good message", number);
        *(o.opened == MOE_OK ? &sum->later : &sum->at_opening) += 1;
    }
    sum->intact += (size_t)same;
    if (took > sum->longest) sum->longest = took;
    if (heap.peak > sum->most) sum->most = heap.peak;
}

TEST(damaged_files_are_refused_or_give_the_same_results) {
    const size_t files = mw_rounds(number_from("MOE_DAMAGED_FILES", 2000)), first = number_from("MOE_DAMAGED_FIRST", 0);
    char path[] = "/tmp/moe-damaged-XXXXXX", name[64];
    static outcome wanted[KINDS];
    tally sums[2] = { { 0 }, { 0 } };
    bytes whole[KINDS];
    size_t memory[KINDS], largest = 0;
    unsigned char *damaged;
    struct rusage usage;
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    for (size_t k = 0; k < KINDS; k++) {
        mw_heap heap = { .fail_at = 0 };
        snprintf(name, sizeof name, "tests/golden/version-2-%s.bin", names[k]);
        whole[k] = read_whole(name);
        use_file(name, 1, 0, &heap, &wanted[k]);
        CHECK(wanted[k].ran == MOE_OK && wanted[k].delivered, "%s: %s", name, wanted[k].error.message);
        memory[k] = heap.peak + FACTOR * whole[k].n + MORE;
        if (whole[k].n > largest) largest = whole[k].n;
    }
    damaged = malloc(largest + 8192);
    assert_non_null(damaged);
    for (size_t i = first; i < first + files; i++) {
        const size_t k = i % KINDS;
        uint64_t random = i;
        const size_t n = damage(whole[k], damaged, &random);
        const int same = n == whole[k].n && memcmp(damaged, whole[k].data, n) == 0;
        write_whole(path, damaged, n);
        judge(path, i, 0, same, &wanted[k], memory[k], &sums[0]);
        judge(path, i, BEFORE_USE, same, &wanted[k], memory[k], &sums[1]);
    }
    getrusage(RUSAGE_SELF, &usage);
    for (int way = 0; way < 2; way++)
        print_message("# %zu files verified %s: %zu rejected at opening, %zu later, %zu with the intact file's results "
                      "(%zu were intact); at most %.3f s and %zu bytes\n",
                      files, way ? "before use" : "at opening", sums[way].at_opening, sums[way].later, sums[way].equal,
                      sums[way].intact, sums[way].longest, sums[way].most);
    print_message("# peak memory of the process: %ld KB\n", usage.ru_maxrss);
    for (size_t k = 0; k < KINDS; k++) free(whole[k].data);
    free(damaged);
    unlink(path);
}

int main(void) { return run_all_tests(NULL, NULL); }
