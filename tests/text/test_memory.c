/* test_memory.c - tests libmoetext when memory runs out, with the shipped model and a prompted model.
 *
 * Each allocation of a request fails in turn; then all allocations larger than a limit fail. A text gets its usual
 * translation, or the status MOE_ERROR_MEMORY with a message. Afterwards the translator works as usual, and no memory
 * is leaked. Allocations by C++'s operator new and by the libraries fail too.
 */
#define _GNU_SOURCE

#include "tests/text/small_prompted.h"
#include "tools/text/detect.h"
#include "tools/text/moetext.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

#define FAIL_WITHIN
#include "tests/programs/fail_allocation.c"

enum { TEXTS = 4, ROOM = 1 << 14, MOST = 2000, LEAST = 10000 };

static const char glossary_file[] = "build/test-memory-glossary.tsv", asked_file[] = "build/test-memory-asked.bin";

typedef struct request_case {
    const char *name, *form, *options;
    moetext_task task;
    const char *texts[TEXTS], *given;
} request_case;

#define FAST "target=de;threads=1;batch=2;"
#define NAMES "<b>Tom</b> has 3 dogs. He saw https://example.org/a?b=1 and {name}, \xE2\x98\x83!"

static const request_case cases[] = {
    { "plain", "text", FAST "beam=1;rerank=0", 0, { "Good day.", "A dog." }, NULL },
    { "nbest", "text", FAST "beam=3;rerank=0;nbest=3", 0, { "Good day." }, NULL },
    { "rerank", "text", FAST "beam=2;rerank=0.5", 0, { "Good day.", "Two dogs." }, NULL },
    { "protection", "text", FAST "beam=2;rerank=0", 0, { NAMES, "| a | <i>b</i> |" }, NULL },
    { "unprotected", "text", FAST "beam=1;rerank=0;protect=0", 0, { "A  dog\there." }, NULL },
    { "alignment",
      "text",
      FAST "beam=2;rerank=0;alignment=1;nbest=2",
      0,
      { "Good day, 3 dogs.", "GOOD OLD DOG DAY" },
      NULL },
    { "glossary",
      "text",
      FAST "beam=2;rerank=0;glossary=build/test-memory-glossary.tsv",
      0,
      { "The HOUND saw Acme." },
      NULL },
    { "lines",
      "text",
      FAST "beam=1;rerank=0",
      0,
      { "One dog. Two dogs.\r\n\n  A day.\tA \xE2\x98\x83 cat.", "Yes." },
      NULL },
    { "parts",
      "text",
      FAST "beam=1;rerank=0;max-len=12",
      0,
      { "The old dog and the young cat, who went to the house, saw the man and the woman and a horse in the rain." },
      NULL },
    { "score", "text", FAST "rerank=0", MOETEXT_SCORE, { "Good day." }, "Guten Tag." },
    { "prefix", "text", FAST "beam=2;rerank=0;alignment=1", MOETEXT_PREFIX, { "Good day." }, "Guten" },
    { "bad", "text", FAST "beam=1;rerank=0", 0, { "A \xff dog.", "{n, plural, one {a} other {b}}", " ", "dog" }, NULL },
    { "pieces",
      "pieces",
      FAST "beam=1;rerank=0",
      0,
      { "\xE2\x96\x81"
        "A \xE2\x96\x81"
        "dog ." },
      NULL },
    { "ids", "ids", FAST "beam=1;rerank=0", 0, { "40 50 60" }, NULL },
    { "asked",
      "text",
      FAST "beam=1;context=2;glossary=build/test-memory-glossary.tsv;max-len=8",
      0,
      { "the HOUND, the hound dog\nhe <b>abab</b> the", "ab {name}", "12", "the 50 tokens of this text are too many" },
      NULL },
};

/* The result of a text as bytes. */
typedef struct outcome {
    size_t times, length, hypotheses;
    moe_status status;
    char message[256], bytes[ROOM];
} outcome;

typedef struct feed {
    const request_case *of;
    size_t next;
    outcome *outcomes;
} feed;

static int pull(void *user, int wait, moetext_request *request) {
    feed *f = user;
    (void)wait;
    if (f->next == TEXTS || !f->of->texts[f->next]) return MOE_PULL_END;
    request->text = f->of->texts[f->next];
    request->length = strlen(request->text);
    request->task = f->of->task;
    request->given = f->of->given;
    request->given_length = f->of->given ? strlen(f->of->given) : 0;
    request->user = &f->outcomes[f->next++];
    return MOE_PULL_REQUEST;
}

static void keep(outcome *o, const void *bytes, size_t length) {
    if (length > ROOM - o->length) abort();
    if (length) memcpy(o->bytes + o->length, bytes, length);
    o->length += length;
}

static void done(void *user, const moetext_result *r) {
    outcome *o = r->user;
    (void)user;
    o->times++;
    o->status = r->status;
    o->hypotheses = r->n_hypotheses;
    snprintf(o->message, sizeof o->message, "%s", r->message);
    keep(o, &r->flags, sizeof r->flags);
    keep(o, &r->n_parts, sizeof r->n_parts);
    keep(o, r->source_ids, r->n_source_ids * sizeof *r->source_ids);
    for (size_t k = 0; k < r->n_hypotheses; k++) {
        const moetext_hypothesis *h = &r->hypotheses[k];
        keep(o, h->text, h->length + 1);
        keep(o, &h->score, sizeof h->score);
        keep(o, &h->reverse, sizeof h->reverse);
        keep(o, &h->finished, sizeof h->finished);
        keep(o, h->ids, h->n_ids * sizeof *h->ids);
        keep(o, h->token_logprobs, h->n_logprobs * sizeof *h->token_logprobs);
        keep(o, h->links, h->n_links * sizeof *h->links);
    }
}

static outcome wanted[TEXTS], got[TEXTS];

static moe_status run(moetext *t, const request_case *c, outcome *out, moe_error *error) {
    feed f = { .of = c, .outcomes = out };
    memset(out, 0, TEXTS * sizeof *out);
    *error = (moe_error){ .code = MOE_OK };
    return moetext_translate(t, pull, done, &f, error);
}

static int is_same(const outcome *a, const outcome *b) {
    return a->times == b->times && a->status == b->status && a->length == b->length &&
           strcmp(a->message, b->message) == 0 && memcmp(a->bytes, b->bytes, a->length) == 0;
}

static moetext *translator(const moetext_model *model, const char *options) {
    moetext *t = NULL;
    moe_error e = { .code = MOE_OK };
    if (moetext_new(model, options, &t, &e)) fail_msg("%s: %s", options, e.message);
    return t;
}

/* Run and check a request while the `nth` allocation or all above `limit` bytes fail. Count the failures in *hits. */
static void run_short(moetext *t, const request_case *c, long long nth, long long limit, long long *hits) {
    moe_error e;
    count = failed = live = 0;
    at = nth;
    above = limit;
    counting = 1;
    const moe_status status = run(t, c, got, &e);
    counting = 0;
    *hits = failed;
    at = above = -1;
    if (status) fail_msg("%s, %lld, %lld: status %d, '%s'", c->name, nth, limit, (int)status, e.message);
    size_t lost = 0;
    for (size_t i = 0; i < TEXTS && c->texts[i]; i++) {
        const outcome *o = &got[i];
        if (is_same(o, &wanted[i])) continue;
        if (!*hits || o->times != 1 || o->status != MOE_ERROR_MEMORY || o->hypotheses || !*o->message)
            fail_msg("%s, %lld, %lld: text %zu: %zu times, status %d, '%s', %zu hypotheses, '%s'", c->name, nth, limit,
                     i, o->times, (int)o->status, o->message, o->hypotheses, o->bytes);
        lost++;
    }
    /* A failure affects only one text, unless links, which are computed for several texts at once, are requested. */
    if (nth > 0 && lost > 1 && !strstr(c->options, "alignment"))
        fail_msg("%s, %lld: %zu texts lost", c->name, nth, lost);
}

static void run_well(moetext *t, const request_case *c, const char *after, long long n) {
    moe_error e;
    const moe_status status = run(t, c, got, &e);
    if (status) fail_msg("%s, after %s %lld: %s", c->name, after, n, e.message);
    for (size_t i = 0; i < TEXTS; i++)
        if (!is_same(&got[i], &wanted[i]))
            fail_msg("%s, after %s %lld: text %zu: %d '%s'", c->name, after, n, i, (int)got[i].status, got[i].message);
}

/* Measure a new translator's first request: number of allocations and peak memory in bytes. */
static void measure(const moetext_model *model, const request_case *c, long long *allocations, long long *most) {
    moetext *t = translator(model, c->options);
    long long hits, low = 0, high = 1 << 26;
    moe_error e;
    assert_int_equal(run(t, c, wanted, &e), MOE_OK);
    moetext_free(t);
    t = translator(model, c->options);
    run_short(t, c, -1, -1, &hits);
    *allocations = count;
    moetext_free(t);
    while (high - low > 1024) { /* search for the smallest limit without failures */
        const long long middle = (low + high) / 2;
        t = translator(model, c->options);
        run_short(t, c, -1, middle, &hits);
        moetext_free(t);
        if (hits) low = middle;
        else high = middle;
    }
    *most = high;
}

static long long all_hits;

static void run_case(const request_case *c) {
    moetext_model *model;
    moe_error e = { .code = MOE_OK };
    char form[32];
    long long allocations, most, hits, total = 0;
    snprintf(form, sizeof form, "form=%s", c->form);
    const char *path = strcmp(c->name, "asked") == 0 ? asked_file : "models/en-de-fr-es.bin";
    if (moetext_model_open(path, form, &model, &e)) fail_msg("%s: %s", e.where, e.message);
    measure(model, c, &allocations, &most);
    const long long step = allocations / MOST + 1;
    const long long before = blocks;
    for (long long n = 1; n <= allocations; n += step) {
        moetext *t = translator(model, c->options);
        run_short(t, c, n, -1, &hits);
        total += hits;
        run_short(t, c, n, -1, &hits); /* the second run allocates less because it reuses buffers */
        total += hits;
        run_well(t, c, "allocation", n);
        moetext_free(t);
        if (blocks != before) fail_msg("%s, %lld: %lld blocks leak", c->name, n, blocks - before);
    }
    for (long long limit = 0; limit < most; limit += most / 64 + 1) {
        moetext *t = translator(model, c->options);
        run_short(t, c, -1, limit, &hits);
        total += hits;
        run_well(t, c, "limit", limit);
        moetext_free(t);
        if (blocks != before) fail_msg("%s, limit %lld: %lld blocks leak", c->name, limit, blocks - before);
    }
    print_message("%s: %lld allocations, %lld bytes, %lld failures\n", c->name, allocations, most, total);
    assert_true(total > 64);
    all_hits += total;
    moetext_model_close(model);
}

TEST(each_allocation_of_a_request_can_fail) {
    FILE *file = fopen(glossary_file, "w");
    assert_non_null(file);
    fputs("hound\tJagdhund\nAcme\n", file);
    assert_int_equal(fclose(file), 0);
    write_prompted(asked_file);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) run_case(&cases[i]);
    remove(asked_file);
    print_message("%lld failures\n", all_hits);
    assert_true(all_hits >= LEAST);
    remove(glossary_file);
}

TEST(each_allocation_of_a_detector_can_fail) {
    static const char *const codes[] = { "de", "en", "es", "fr" };
    static const char text[] = "Der Hund ist im Haus.";
    const long long before = blocks;
    long long hits = 1;
    float confidence;
    for (long long n = 1; hits; n++) {
        text_detector *d = NULL;
        moe_error e = { .code = MOE_OK };
        count = failed = 0;
        at = n;
        counting = 1;
        const moe_status status = text_detector_open(codes, 4, &d, &e);
        const ptrdiff_t found = status ? -1 : text_detect(d, text, strlen(text), &confidence);
        counting = 0;
        at = -1;
        hits = failed;
        if (status) assert_true(status == MOE_ERROR_MEMORY && *e.message);
        else assert_int_equal(found, 0);
        text_detector_close(status ? NULL : d);
        assert_true(blocks == before);
    }
}

/* libexttextcat, which serves languages without word lists, does not check its allocations: the detector fails first.
 */
TEST(memory_for_fingerprints_can_run_out) {
    static const char *const codes[] = { "pl", "cs", "ru", "fi" };
    static const char text[] = "Pies jest w domu, a kot siedzi na dachu.";
    float confidence;
    long long before = blocks;
    size_t opened = 0, classified = 0, refused = 0;
    for (long long limit = 0; limit < 4 << 20; limit += 10007) {
        text_detector *d = NULL;
        moe_error e = { .code = MOE_OK };
        count = failed = live = 0;
        above = limit;
        counting = 1;
        const moe_status status = text_detector_open(codes, 4, &d, &e);
        ptrdiff_t found[3] = { -1, -1, -1 };
        for (int i = 0; i < 3 && !status; i++) {
            if (i == 1) above = live; /* nothing is left but the reserve */
            found[i] = text_detect(d, text, strlen(text), &confidence);
        }
        counting = 0;
        above = -1;
        if (status == MOE_ERROR_UNSUPPORTED) skip(); /* no data files */
        if (status) assert_true(status == MOE_ERROR_MEMORY && *e.message);
        for (int i = 0; i < 3 && !status; i++) {
            assert_true(found[i] == 0 || found[i] == TEXT_DETECT_MEMORY);
            classified += found[i] == 0, refused += found[i] != 0;
        }
        opened += !status;
        text_detector_close(status ? NULL : d);
        if (limit == 0) before = blocks;
        if (blocks != before) fail_msg("%lld: %lld blocks leak", limit, blocks - before);
    }
    print_message("opened %zu times, %zu texts classified, %zu refused\n", opened, classified, refused);
    assert_true(opened > 100 && classified > 100);
}

TEST(each_allocation_of_a_glossary_can_fail) {
    static const char *const sources[] = { "hound", "hound dog", "Acme", "acme", "h", "hound" };
    static const char *const translations[] = { "Jagdhund", "Hund", "Acme", "Spitze", "H", "Bracke" };
    moetext_model *model;
    moe_error e = { .code = MOE_OK };
    if (moetext_model_open("models/en-de-fr-es.bin", NULL, &model, &e)) fail_msg("%s", e.message);
    moetext *t = translator(model, FAST "beam=1;rerank=0");
    const long long before = blocks;
    long long hits = 1, total = 0;
    for (long long n = 1; hits; n++) {
        moetext_glossary *g = NULL;
        count = failed = 0;
        at = n;
        counting = 1;
        const moe_status status = moetext_glossary_new(t, sources, translations, 6, &g, &e);
        counting = 0;
        at = -1;
        hits = failed, total += hits;
        if (status) assert_true(hits && status == MOE_ERROR_MEMORY && *e.message && !g);
        else moetext_glossary_free(g);
        if (blocks != before) fail_msg("%lld: %lld blocks leak", n, blocks - before);
    }
    print_message("glossary: %lld failures\n", total);
    assert_true(total > 20);
    moetext_free(t);
    moetext_model_close(model);
}

/* Let a text grow; return the first error. */
static moe_status let_grow(moetext_live *text, moe_error *e) {
    static const char whole[] = "Yes. One two three four.\nFive six seven eight nine";
    moetext_request q = { 0 };
    for (size_t length = 4; length <= strlen(whole); length += 5) {
        const int last = length + 5 > strlen(whole);
        if (moetext_live_give(text, whole, length, last ? MOETEXT_FINAL : MOETEXT_GROWING, e)) return e->code;
        while (moetext_live_next(text, &q))
            if (moetext_live_take(text, q.text, q.length, e)) return e->code;
    }
    return moetext_live_shown(text).final ? MOE_OK : MOE_ERROR_MEMORY; /* without memory nothing is asked */
}

TEST(each_allocation_of_a_live_text_can_fail) {
    const long long before = blocks;
    long long hits = 1, total = 0;
    for (long long n = 1; hits; n++) {
        moetext_live *text = NULL;
        moe_error e = { .code = MOE_OK };
        count = failed = 0;
        at = n;
        counting = 1;
        moe_status status = moetext_live_new(&text, &e);
        if (!status) status = let_grow(text, &e);
        counting = 0;
        at = -1;
        hits = failed, total += hits;
        if (status) assert_true(hits && status == MOE_ERROR_MEMORY);
        if (text) assert_int_equal(let_grow(text, &e), MOE_OK); /* with memory it works again */
        moetext_live_free(text);
        if (blocks != before) fail_msg("%lld: %lld blocks leak", n, blocks - before);
    }
    print_message("live text: %lld failures\n", total);
    assert_true(total > 20);
}

int main(void) {
    if (getenv("VALGRIND")) return 0; /* valgrind replaces malloc */
    return run_all_tests(NULL, NULL);
}

#else /* this platform or sanitizer does not allow replacing malloc */

int main(void) { return 0; }

#endif
