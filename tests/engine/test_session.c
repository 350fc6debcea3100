/* test_session.c - sessions: parameters, requests, reproducible results, beam search, memory, invalid weights. */
#include "opened.h"

#include <limits.h>

/* ---- Helpers: models ---- */

enum {
    NLLB = MW_VARIANTS + MW_NLLB,
    MARIAN = MW_VARIANTS + MW_MARIAN,
    STUDENT = MW_VARIANTS + MW_STUDENT,
    AVERAGE = MW_VARIANTS + MW_AVERAGE
};

enum { LISTED = 64, BLOCKS = 128 }; /* flags of a model with a shortlist, with scales by block */

static mw_model *small_model(int variant, uint32_t type) {
    const int plain = variant & ~(LISTED | BLOCKS);
    mw_model *m = plain < MW_VARIANTS ? mw_small(plain, type, 7) : mw_transformer(plain - MW_VARIANTS, type, 7);
    if (variant & LISTED) mw_random_shortlist(m);
    if (variant & BLOCKS) mw_int(m, "activation.block", 64);
    return m;
}

static fixture *small(int variant, uint32_t type) { return open_model(small_model(variant, type)); }

static void drop(fixture *f) {
    moe_model_close(f->model);
    assert_int_equal(f->heap.blocks, 0);
    assert_int_equal(f->heap.wrong_sizes, 0);
    free(f->image.data);
    mw_free(f->m);
    free(f);
}

static void poke(fixture *f, const char *tensor, size_t index, uint32_t bits) {
    const mw_tensor *t = mw_find_tensor(f->m, tensor);
    assert_non_null(t);
    mw_put32(f->image.data + t->offset + 4 * index, bits);
}

/* ---- Helpers: requests and their results ---- */

enum { LONGEST = 40, MOST = 16 };

typedef struct ask {
    int32_t source[LONGEST], target[LONGEST];
    size_t n_source, n_target;
    int scoring, prefix;           /* 1 to score the target; 1 if the target is the start of the translation */
    int raw;                       /* 1 if the source includes its tag, begin and end tokens */
    int32_t tag, source_tag;       /* 0: use the session's tag */
    moe_constraint constraints[3]; /* tokens are in constraint_ids */
    int32_t constraint_ids[3][3];
    size_t n_constraints;
    const moe_session_params *sampling;
    int32_t draft[LONGEST + 8];
    size_t n_draft;
} ask;

typedef struct outcome_hypothesis {
    int32_t ids[LONGEST];
    float logprobs[LONGEST + 1];
    size_t n_ids;
    float logprob, score, reverse;
    int finished;
    int32_t sources[LONGEST];
} outcome_hypothesis;

/* Results of a request. Tests compare the struct's bytes, so it must be zeroed before use. */
typedef struct outcome {
    size_t delivered;
    moe_status status;
    char message[160];
    size_t n;
    outcome_hypothesis hypotheses[MOST];
} outcome;

typedef struct request_feed {
    const ask *asks;
    const size_t *order; /* order of the requests; NULL for 0 to n - 1 */
    size_t n, next;
    outcome *outcome;
    uint64_t random;
    int later;              /* 1 to occasionally return MOE_PULL_LATER */
    size_t cancel_after;    /* cancel after this number of requests; 0 to never cancel */
    size_t limit;           /* length limit of every request */
    int beam;               /* beam of every request or, if negative, of every second one; 0: the session's */
    moe_session *cancelled; /* session to cancel; NULL to cancel through the return value of pull */
    moe_constraint constraints[3];
    int32_t scratch[LONGEST], target_scratch[LONGEST], draft_scratch[LONGEST + 8]; /* valid only until the next pull */
    struct partials *partials; /* [n], or NULL without a callback for partial results */
} request_feed;

/* Partial results of a request. */
typedef struct partials {
    int32_t ids[LONGEST];
    size_t n;
} partials;

static void partial(void *user, void *request, const int32_t *ids, size_t n) {
    const request_feed *f = user;
    const outcome *h = request;
    partials *t = &f->partials[h - f->outcome];
    CHECK(n && t->n + n <= LONGEST && !h->delivered, "%zu tokens after %zu", n, t->n);
    memcpy(t->ids + t->n, ids, n * sizeof *ids);
    t->n += n;
}

static int pull(void *user, int wait, moe_request *r) {
    request_feed *f = user;
    const ask *a;
    size_t which;
    (void)wait;
    memset(f->scratch, 0x55, sizeof f->scratch);
    memset(f->target_scratch, 0x55, sizeof f->target_scratch);
    if (f->cancel_after && f->next >= f->cancel_after && !f->cancelled) return MOE_PULL_CANCEL;
    if (f->cancel_after && f->next >= f->cancel_after) moe_session_cancel(f->cancelled);
    if (f->later && mw_below(&f->random, 3) == 0) return MOE_PULL_LATER;
    if (f->next == f->n) return MOE_PULL_END;
    which = f->order ? f->order[f->next] : f->next;
    f->next++;
    a = &f->asks[which];
    memcpy(f->scratch, a->source, sizeof f->scratch);
    memcpy(f->target_scratch, a->target, sizeof f->target_scratch);
    r->source = a->n_source ? f->scratch : NULL;
    r->n_source = a->n_source;
    if (a->scoring || a->prefix) {
        r->target = f->target_scratch;
        r->n_target = a->n_target;
        r->prefix = !a->scoring;
    }
    for (size_t c = 0; c < a->n_constraints; c++) {
        f->constraints[c] = a->constraints[c];
        f->constraints[c].ids = a->constraint_ids[c];
    }
    r->constraints = a->n_constraints ? f->constraints : NULL;
    r->n_constraints = a->n_constraints;
    memcpy(f->draft_scratch, a->draft, sizeof f->draft_scratch);
    r->draft = a->n_draft ? f->draft_scratch : NULL;
    r->n_draft = a->n_draft;
    r->raw = a->raw;
    r->sampling = a->sampling;
    if (a->tag) r->target_tag = a->tag;
    if (a->source_tag) r->source_tag = a->source_tag;
    r->user = &f->outcome[which];
    if (f->partials) r->partial = partial;
    r->limit = f->limit;
    r->beam = f->beam > 0 ? f->beam : f->beam < 0 && which % 2 ? -f->beam : 0;
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *r) {
    outcome *h = r->user;
    (void)user;
    h->delivered++;
    h->status = r->status;
    assert_non_null(r->message);
    snprintf(h->message, sizeof h->message, "%s", r->message);
    h->n = r->n_hypotheses;
    for (size_t i = 0; i < r->n_hypotheses && i < MOST; i++) {
        const moe_hypothesis *from = &r->hypotheses[i];
        outcome_hypothesis *to = &h->hypotheses[i];
        CHECK(from->n_ids <= LONGEST, "a hypothesis of %zu tokens", from->n_ids);
        if (from->n_ids) memcpy(to->ids, from->ids, from->n_ids * sizeof *to->ids);
        if (from->n_ids + (size_t)from->finished)
            memcpy(to->logprobs, from->token_logprobs, (from->n_ids + (size_t)from->finished) * sizeof *to->logprobs);
        to->n_ids = from->n_ids;
        to->logprob = from->logprob;
        to->score = from->score;
        to->reverse = from->reverse;
        to->finished = from->finished;
        if (from->sources && from->n_ids) memcpy(to->sources, from->sources, from->n_ids * sizeof *to->sources);
    }
}

/* Store a result after checking that all its hypotheses start with the partial result. */
static void done_and_told(void *user, const moe_result *r) {
    const request_feed *f = user;
    const partials *t = &f->partials[(const outcome *)r->user - f->outcome];
    for (size_t i = 0; i < r->n_hypotheses; i++)
        CHECK(t->n <= r->hypotheses[i].n_ids &&
                  (!t->n || memcmp(t->ids, r->hypotheses[i].ids, t->n * sizeof *t->ids) == 0),
              "hypothesis %zu of %zu tokens does not start with the %zu reported", i, r->hypotheses[i].n_ids, t->n);
    done(user, r);
}

/* Return n random sentences with all lengths up to the models' limits. Some include the start of the translation. */
static ask *random_asks(uint64_t seed, size_t n) {
    ask *asks = mw_zeros(n * sizeof *asks);
    for (size_t i = 0; i < n; i++) {
        asks[i].n_source = i % 5 == 4 ? 20 - i % 3 : 1 + mw_below(&seed, 14);
        for (size_t k = 0; k < asks[i].n_source; k++)
            asks[i].source[k] = 6 + (int32_t)mw_below(&seed, MW_VOCABULARY - 6);
        asks[i].tag = i % 3 == 0 ? MW_TAG_DE : 0;
        asks[i].prefix = i % 4 == 2;
        asks[i].n_target = asks[i].prefix ? i / 4 : 0;
        for (size_t k = 0; k < asks[i].n_target; k++)
            asks[i].target[k] = 6 + (int32_t)mw_below(&seed, MW_VOCABULARY - 6);
    }
    return asks;
}

static moe_session_params params_for(const moe_model *model) {
    moe_session_params p = moe_session_params_default(model);
    p.threads = 1;
    p.batch = 1;
    p.target_tag = MW_TAG_EN;
    p.isa = "portable";
    return p;
}

static moe_session *new_session(const fixture *f, const moe_session_params *p) {
    moe_session *s = NULL;
    moe_error e = { MOE_OK, "", "" };
    CHECK(moe_session_new(f->model, p, &s, &e) == MOE_OK, "%s: %s", e.where, e.message);
    return s;
}

static void translate_with(moe_session *s, const ask *asks, size_t n, const size_t *order, int later, outcome *out) {
    request_feed feed = { .asks = asks,
                          .n = n,
                          .order = order,
                          .outcome = out,
                          .random = 1 + (uint64_t)later,
                          .later = later,
                          .partials = mw_zeros((n + 1) * sizeof(partials)) };
    moe_error e = { MOE_OK, "", "" };
    memset(out, 0, n * sizeof *out);
    CHECK(moe_translate(s, pull, done_and_told, &feed, &e) == MOE_OK, "%s: %s", e.where, e.message);
    free(feed.partials);
    for (size_t i = 0; i < n; i++) CHECK(out[i].delivered == 1, "request %zu has %zu results", i, out[i].delivered);
}

static outcome *translate(const fixture *f, const moe_session_params *p, const ask *asks, size_t n) {
    outcome *out = mw_zeros(n * sizeof *out);
    moe_session *s = new_session(f, p);
    translate_with(s, asks, n, NULL, 0, out);
    moe_session_free(s);
    return out;
}

static void assert_same(const outcome *a, const outcome *b, size_t n, const char *what) {
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof a[i]) != 0)
            fail_msg("%s changes the result of sentence %zu: %zu ids, score %a; before %zu ids, score %a", what, i,
                     b[i].hypotheses[0].n_ids, (double)b[i].hypotheses[0].score, a[i].hypotheses[0].n_ids,
                     (double)a[i].hypotheses[0].score);
}

/* Define a test that has a model `f` and its default parameters `p`. */
#define MODEL_TEST(name, variant, type)                        \
    static void name##_with(fixture *f, moe_session_params p); \
    TEST(name) {                                               \
        fixture *f = small(variant, type);                     \
        name##_with(f, params_for(f->model));                  \
        drop(f);                                               \
    }                                                          \
    static void name##_with(fixture *f, moe_session_params p)

/* ---- The same bytes everywhere ---- */

enum { SENTENCES = 26 };

typedef struct setting {
    int variant;
    uint32_t type;
    int beam; /* beam size, or DRAWN for sampling */
    moe_rules rules;
} setting;

enum { DRAWN = 0 };

/* The first FEW are varied: sanitizers and valgrind are too slow for more. */
static const setting settings[] = {
    { MW_GNMT, MW_F32, 1, 0 },
    { MW_GNMT, MW_F32, 4, 0 },
    { MW_PRODUCT, MW_Q8, 1, 0 },
    { MW_BOTH_CONTEXTS, MW_Q8, 4, MOE_RULES_NVIDIA },
    { MW_CARRIED_QUERY, MW_F16, 8, 0 },
    { MW_FROM_ENCODER, MW_Q8, 4, MOE_RULES_TF },
    { NLLB, MW_F32, 4, MOE_RULES_HF },
    { MARIAN | LISTED, MW_BF16, 3, MOE_RULES_HF },
    { STUDENT, MW_Q8, 3, MOE_RULES_MARIAN },
    { AVERAGE, MW_F32, 4, MOE_RULES_MARIAN },
    { MW_GNMT | BLOCKS, MW_Q8, 4, 0 },
    { STUDENT, MW_F32, DRAWN, MOE_RULES_MARIAN },
    { MW_GNMT, MW_Q8, 2, 0 },
    { MW_GNMT, MW_Q8, 8, 0 },
    { MW_GNMT, MW_F16, 4, 0 },
    { MW_GNMT, MW_BF16, 2, 0 },
    { MW_PRODUCT, MW_F32, 2, 0 },
    { MW_PRODUCT, MW_Q8, 4, 0 },
    { MW_BOTH_CONTEXTS, MW_F32, 8, 0 },
    { MW_BOTH_CONTEXTS, MW_Q8, 4, 0 },
    { MW_BOTH_CONTEXTS, MW_BF16, 1, 0 },
    { MW_CARRIED_QUERY, MW_F32, 4, 0 },
    { MW_CARRIED_QUERY, MW_Q8, 2, 0 },
    { MW_FROM_ENCODER, MW_F32, 3, 0 },
    { MW_PRODUCT, MW_F32, 6, MOE_RULES_NVIDIA },
    { MW_FROM_ENCODER, MW_F32, 5, MOE_RULES_MLPERF },
    { MARIAN, MW_Q8, 2, MOE_RULES_HF },
    { STUDENT, MW_F32, 4, MOE_RULES_HF },
    { AVERAGE, MW_Q8, 2, MOE_RULES_HF },
    { MW_GNMT | LISTED, MW_Q8, 4, 0 },
    { STUDENT | LISTED, MW_F32, 1, MOE_RULES_MARIAN },
    { MARIAN | BLOCKS, MW_Q8, 4, MOE_RULES_HF },
    { MW_GNMT, MW_Q8, DRAWN, 0 },
    { MW_PRODUCT, MW_F32, DRAWN, MOE_RULES_NVIDIA },
    { MW_FROM_ENCODER, MW_F32, DRAWN, MOE_RULES_TF },
    { NLLB, MW_Q8, DRAWN, MOE_RULES_HF },
    { MARIAN | LISTED, MW_BF16, DRAWN, MOE_RULES_HF },
    { MW_GNMT, MW_Q8, 6, 0 },
    { MW_CARRIED_QUERY, MW_F32, 4, 0 },
    { MW_GNMT | LISTED, MW_F32, 3, 0 }, /* settings with reranking */
};
enum { FEW = 12 };
enum { RERANKED = 37 }; /* index of the reranked settings */

/* Results of single sentences, with one thread and portable kernels. All other runs must give the same results. */
static fixture *models[MOE_COUNT(settings)];
static outcome *baselines[MOE_COUNT(settings)];
static ask *sentences;

static moe_session_params setting_params(size_t i) {
    moe_session_params p = params_for(models[i]->model);
    p.sample = settings[i].beam == DRAWN;
    p.beam = p.nbest = p.sample ? 1 : settings[i].beam;
    p.rules = settings[i].rules;
    if (p.sample) p.seed = (int)i, p.temperature = 0.6f + 0.1f * (float)(i % 4);
    if (p.sample && i % 3 == 0) p.top_k = 9, p.top_p = 0.95f;
    if (p.sample && i % 3 == 1) p.top_p = 0.7f, p.min_p = 0.05f;
    if (p.sample && moe_rule_sets[p.rules].penalises) p.repetition_penalty = 1.2f;
    if (p.rules == MOE_RULES_NVIDIA || (!p.rules && i % 2)) p.coverage_penalty = 0.2f;
    if (!p.rules && i % 3 == 2) p.prune = 3;
    if (settings[i].variant == NLLB) p.source_tag = MW_TAG_DE;
    if (i >= RERANKED) {
        p.rerank = 0.7f;
        p.source_tag = i % 2 ? MW_TAG_DE : -1;
        p.max_source = 48; /* must exceed the length of all translations */
    }
    return p;
}

/* Return the number of forced tokens before every translation. */
static size_t forced(size_t i) { return settings[i].variant == NLLB; }

static size_t settings_in_use(void) { return !mw_slow() ? MOE_COUNT(settings) : FEW; }

FIXTURE(make_baselines) {
    sentences = random_asks(11, SENTENCES);
    for (size_t i = 0; i < settings_in_use(); i++) {
        moe_session_params p;
        models[i] = small(settings[i].variant, settings[i].type);
        p = setting_params(i);
        baselines[i] = translate(models[i], &p, sentences, SENTENCES);
    }
    return 0;
}

FIXTURE(drop_baselines) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        drop(models[i]);
        free(baselines[i]);
    }
    free(sentences);
    return 0;
}

/* Return a modifiable copy of the sentences. */
static ask *copied_sentences(void) {
    ask *asks = mw_zeros(SENTENCES * sizeof *asks);
    memcpy(asks, sentences, SENTENCES * sizeof *asks);
    return asks;
}

/* Give the k-th sentence a target of n tokens that every model can generate. */
static void give_target(ask *asks, size_t k, size_t n) {
    asks[k].n_target = n;
    for (size_t x = 0; x < n; x++) asks[k].target[x] = 8 + (int32_t)((5 * k + 3 * x) % (MW_VOCABULARY - 8));
}

/* Return the instruction set of comparison i. Portable kernels are slow, so only half of the comparisons use them. */
static const char *isa_of(size_t i) { return i % 2 ? NULL : "portable"; }

static void compare_setting(size_t i, const moe_session_params *p, const size_t *order, int later, const char *what) {
    outcome *out = mw_zeros(SENTENCES * sizeof *out);
    moe_session *s = new_session(models[i], p);
    translate_with(s, sentences, SENTENCES, order, later, out);
    assert_same(baselines[i], out, SENTENCES, what);
    if (!p->isa) {
        translate_with(s, sentences, SENTENCES, order, 0, out);
        assert_same(baselines[i], out, SENTENCES, "using the session again");
    }
    moe_session_free(s);
    free(out);
}

/* Comparisons prove little if all baselines are equal. */
TEST(baselines_are_varied) {
    const size_t least = mw_slow() ? 3 : 20;
    size_t finished = 0, cut = 0, several = 0, long_ones = 0, different = 0;
    for (size_t i = 0; i < settings_in_use(); i++)
        for (size_t k = 0; k < SENTENCES; k++) {
            const outcome *h = &baselines[i][k];
            assert_int_equal(h->status, MOE_OK);
            assert_string_equal(h->message, "");
            assert_true(h->n >= 1);
            several += h->n > 1;
            for (size_t j = 0; j < h->n; j++) h->hypotheses[j].finished ? finished++ : cut++;
            long_ones += h->hypotheses[0].n_ids > 5;
            different +=
                k > 0 && memcmp(h->hypotheses[0].ids, h[-1].hypotheses[0].ids, sizeof h->hypotheses[0].ids) != 0;
        }
    print_message(
        "# hypotheses: %zu finished, %zu cut; sentences: %zu with several, %zu long, %zu unlike the previous one\n",
        finished, cut, several, long_ones, different);
    assert_true(finished > least && cut > least && several > least && long_ones > least && different > least);
}

TEST(batch_does_not_change_a_bit) {
    static const int batches[] = { 2, 7, 32 };
    for (size_t i = 0; i < settings_in_use(); i++)
        for (size_t b = 0; b < MOE_COUNT(batches); b++) {
            moe_session_params p = setting_params(i);
            p.batch = batches[b];
            p.batch_tokens = b == 1 ? 1 + (int)i : 0;
            p.isa = isa_of(i + b);
            compare_setting(i, &p, NULL, 0, "the batch");
        }
}

TEST(threads_do_not_change_a_bit) {
    for (size_t i = 0; i < settings_in_use(); i++)
        for (int threads = 2; threads <= 3; threads++) {
            moe_session_params p = setting_params(i);
            p.threads = threads;
            p.batch = threads == 2 ? 7 : 2;
            p.isa = threads == 2 ? NULL : isa_of(i / 2);
            if (threads == 3 && i % 2) continue;
            compare_setting(i, &p, NULL, 0, "the number of threads");
        }
}

TEST(instruction_sets_do_not_change_a_bit) {
    for (size_t i = 0; i < settings_in_use(); i++)
        for (size_t isa = 1; isa < MOE_COUNT(moe_isas); isa++) {
            moe_session_params p = setting_params(i);
            if (!moe_isa_available(moe_isas[isa]->name)) continue;
            p.isa = moe_isas[isa]->name;
            compare_setting(i, &p, NULL, 0, "the instruction set");
            p.batch = 7;
            compare_setting(i, &p, NULL, 0, "the instruction set in batches");
        }
}

TEST(order_and_pauses_do_not_change_a_bit) {
    uint64_t random = 5;
    size_t order[SENTENCES];
    for (size_t i = 0; i < settings_in_use(); i++)
        for (int round = 0; round < 3; round++) {
            moe_session_params p = setting_params(i);
            for (size_t k = 0; k < SENTENCES; k++) order[k] = k;
            for (size_t k = SENTENCES; k-- > 1;) {
                const size_t other = mw_below(&random, k + 1), swap = order[k];
                order[k] = order[other];
                order[other] = swap;
            }
            p.batch = round ? 5 : 1;
            p.threads = round == 2 ? 2 : 1;
            p.isa = round ? NULL : isa_of(i);
            compare_setting(i, &p, order, round + 1, "the order");
        }
}

/* Larger session limits do not change its results. */
TEST(limits_of_the_session_do_not_change_a_bit) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        moe_session_params p = setting_params(i);
        p.max_source = 47;
        p.batch = 3;
        p.isa = isa_of(i);
        compare_setting(i, &p, NULL, 0, "max_source");
    }
}

static void *translate_in_thread(void *user) {
    const size_t i = *(const size_t *)user;
    outcome *out = mw_zeros(SENTENCES * sizeof *out);
    moe_session_params p = setting_params(i);
    moe_session *s = NULL;
    moe_error e;
    p.threads = 2;
    p.batch = 6;
    p.isa = NULL;
    if (moe_session_new(models[i]->model, &p, &s, &e) == MOE_OK) {
        request_feed feed = { .asks = sentences, .n = SENTENCES, .outcome = out };
        moe_translate(s, pull, done, &feed, &e);
        moe_session_free(s);
    }
    return out;
}

TEST(two_sessions_of_one_model_run_in_two_threads) {
    for (size_t i = 0; i < settings_in_use(); i += 3) {
        /* the fixture's counting allocator is not thread-safe, so open the model again with the default allocator */
        moe_model *counted = models[i]->model, *plain = NULL;
        pthread_t threads[2];
        moe_error e;
        assert_int_equal(moe_model_open_memory(models[i]->image.data, models[i]->image.bytes, NULL, &plain, &e),
                         MOE_OK);
        models[i]->model = plain;
        for (size_t k = 0; k < 2; k++) assert_int_equal(pthread_create(&threads[k], NULL, translate_in_thread, &i), 0);
        for (size_t k = 0; k < 2; k++) {
            void *out = NULL;
            assert_int_equal(pthread_join(threads[k], &out), 0);
            assert_same(baselines[i], out, SENTENCES, "a second session");
            free(out);
        }
        models[i]->model = counted;
        moe_model_close(plain);
    }
}

/* ---- Hypotheses ---- */

static float length_penalty(const moe_session_params *p, size_t tokens) {
    return (float)pow((double)(p->length_constant + (float)tokens) / (double)(p->length_constant + 1),
                      (double)p->length_penalty);
}

static int is_never(const moe_model *m, int32_t id) { return id != m->eos && !moe_can_generate(m, id); }

TEST(hypotheses_are_consistent_and_sorted) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        const moe_session_params p = setting_params(i);
        for (size_t k = 0; k < SENTENCES; k++) {
            const outcome *h = &baselines[i][k];
            const size_t wanted = (size_t)(p.max_len_factor * (float)sentences[k].n_source) + (size_t)p.max_len_offset;
            const size_t limit = moe_min((size_t)p.max_target, wanted) - forced(i);
            assert_true(h->n <= (size_t)p.nbest);
            for (size_t j = 0; j < h->n; j++) {
                const outcome_hypothesis *y = &h->hypotheses[j];
                const size_t tokens = y->n_ids + (size_t)y->finished;
                float sum = 0;
                for (size_t t = 0; t < tokens; t++) {
                    sum = sum + y->logprobs[t];
                    CHECK(y->logprobs[t] <= 0, "log-probability %g", (double)y->logprobs[t]);
                }
                CHECK(moe_to_bits(sum) == moe_to_bits(y->logprob), "the log-probabilities add up to %a, not %a",
                      (double)sum, (double)y->logprob);
                CHECK(tokens <= limit, "%zu tokens exceed the limit of %zu", tokens, limit);
                CHECK(y->finished || y->n_ids == limit, "cut at %zu instead of %zu", y->n_ids, limit);
                CHECK(!j || y[-1].score >= y->score || (!p.rules && y[-1].finished > y->finished),
                      "a worse hypothesis precedes a better one");
                for (size_t t = 0; t < y->n_ids; t++) {
                    CHECK(y->ids[t] != MW_EOS, "the end token is among the ids");
                    CHECK(!is_never(models[i]->model, y->ids[t]), "token %d must never be generated", (int)y->ids[t]);
                }
                if (p.rules) continue; /* test_gnmt.py compares the order of scores with that of another program */
                if (p.coverage_penalty == 0 && p.rerank == 0)
                    CHECK(fabsf(y->score - y->logprob / length_penalty(&p, tokens)) < 1e-5f * (1 + fabsf(y->score)),
                          "score %g of log-probability %g", (double)y->score, (double)y->logprob);
                else CHECK(y->score <= y->logprob / length_penalty(&p, tokens) + 1e-4f, "a penalty above zero");
                CHECK((p.rerank == 0) == (y->reverse == 0), "the source has log-probability %g", (double)y->reverse);
                if (j) {
                    const outcome_hypothesis *before = y - 1;
                    CHECK(before->finished >= y->finished, "a cut hypothesis precedes a finished one");
                    CHECK(before->finished != y->finished || before->score >= y->score,
                          "a worse hypothesis precedes a better one");
                    CHECK(before->n_ids != y->n_ids || before->finished != y->finished ||
                              memcmp(before->ids, y->ids, y->n_ids * 4) != 0,
                          "the same hypothesis twice");
                }
            }
        }
    }
}

TEST(more_hypotheses_do_not_change_the_best) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        moe_session_params p = setting_params(i);
        outcome *one;
        p.nbest = 1;
        p.isa = NULL;
        one = translate(models[i], &p, sentences, SENTENCES);
        for (size_t k = 0; k < SENTENCES; k++) {
            assert_int_equal(one[k].n, 1);
            CHECK(one[k].hypotheses[0].finished == baselines[i][k].hypotheses[0].finished, "sentence %zu", k);
            assert_memory_equal(&one[k].hypotheses[0], &baselines[i][k].hypotheses[0], sizeof one[k].hypotheses[0]);
        }
        free(one);
    }
}

/* Scoring a hypothesis, alone or in a batch, gives the same log-probabilities as generating it. */
TEST(scoring_gives_the_same_bits_as_translating) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        moe_session_params p = setting_params(i);
        ask *asks = mw_zeros(SENTENCES * 8 * sizeof *asks);
        const outcome_hypothesis **wanted = mw_zeros(SENTENCES * 8 * sizeof *wanted);
        size_t n = 0;
        for (size_t k = 0; k < SENTENCES; k++)
            for (size_t j = 0; j < baselines[i][k].n; j++) {
                const outcome_hypothesis *y = &baselines[i][k].hypotheses[j];
                if (forced(i) + y->n_ids + 1 > (size_t)p.max_target) continue; /* no room for an end token */
                asks[n] = sentences[k];
                asks[n].scoring = 1;
                asks[n].n_target = y->n_ids;
                memcpy(asks[n].target, y->ids, y->n_ids * sizeof *y->ids);
                wanted[n++] = y;
            }
        for (int round = 0; round < 2; round++) {
            outcome *out;
            p.batch = round ? 9 : 1;
            p.beam = p.nbest = round && settings[i].beam != DRAWN ? settings[i].beam : 1;
            p.isa = round ? NULL : "portable";
            out = translate(models[i], &p, asks, n);
            for (size_t k = 0; k < n; k++) {
                const outcome_hypothesis *y = &out[k].hypotheses[0];
                assert_int_equal(out[k].status, MOE_OK);
                assert_int_equal(out[k].n, 1);
                assert_true(y->finished);
                assert_int_equal(y->n_ids, wanted[k]->n_ids);
                assert_memory_equal(y->ids, wanted[k]->ids, sizeof y->ids);
                assert_memory_equal(y->logprobs, wanted[k]->logprobs, y->n_ids * 4);
                if (!wanted[k]->finished || !(wanted[k]->logprobs[y->n_ids] < 0))
                    continue; /* truncated at the limit, with a forced end */
                assert_true(settings[i].rules || i >= RERANKED ||
                            moe_to_bits(y->score) ==
                                moe_to_bits(wanted[k]->score)); /* with other rules, the score depends on the beam */
                out[k].hypotheses[0].score = wanted[k]->score;
                out[k].hypotheses[0].reverse = wanted[k]->reverse;
                assert_memory_equal(y, wanted[k], sizeof *y);
            }
            free(out);
        }
        free(asks);
        free(wanted);
    }
}

/* Given the start of its own result, a greedy search returns the same result. Given another start, it continues
 * from there, and scoring reports the same log-probabilities. */
TEST(translations_continue_their_prefixes) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        moe_session_params p = setting_params(i);
        ask *asks = copied_sentences();
        outcome *free_ones, *led, *scored;
        p.isa = NULL;
        p.batch = 6;
        p.beam = p.nbest = 1;
        for (size_t k = 0; k < SENTENCES; k++) asks[k].prefix = 0;
        free_ones = translate(models[i], &p, asks, SENTENCES);
        for (size_t k = 0; k < SENTENCES; k++) {
            const outcome_hypothesis *y = &free_ones[k].hypotheses[0];
            asks[k].prefix = 1;
            asks[k].n_target =
                moe_min(k, y->n_ids - (size_t)(y->n_ids && !y->finished)); /* a truncated one may fill the limit */
            memcpy(asks[k].target, y->ids, sizeof y->ids);
        }
        led = translate(models[i], &p, asks, SENTENCES);
        assert_same(free_ones, led, SENTENCES, "its own start");
        free(led), free(free_ones);

        p.beam = p.nbest = settings[i].beam == DRAWN ? 1 : settings[i].beam;
        for (size_t k = 0; k < SENTENCES; k++)
            give_target(asks, k, k == 7 ? (size_t)p.max_target - 1 - forced(i) : k % 6);
        led = translate(models[i], &p, asks, SENTENCES);
        for (size_t k = 0; k < SENTENCES; k++) asks[k].scoring = 1;
        scored = translate(models[i], &p, asks, SENTENCES);
        for (size_t k = 0; k < SENTENCES; k++) {
            CHECK(led[k].status == MOE_OK && led[k].n >= 1, "setting %zu, sentence %zu: %s", i, k, led[k].message);
            for (size_t h = 0; h < led[k].n; h++) {
                const outcome_hypothesis *y = &led[k].hypotheses[h];
                assert_in_range(y->n_ids, asks[k].n_target, p.max_target);
                assert_memory_equal(y->ids, asks[k].target, asks[k].n_target * sizeof *y->ids);
                assert_memory_equal(y->logprobs, scored[k].hypotheses[0].logprobs,
                                    asks[k].n_target * sizeof *y->logprobs);
            }
        }
        free(led), free(scored), free(asks);
    }
}

TEST(scoring_and_translating_share_a_batch) {
    fixture *f = models[1];
    moe_session_params p = setting_params(1);
    ask *asks = copied_sentences();
    outcome *out;
    p.batch = 8;
    for (size_t k = 0; k < SENTENCES; k++) {
        const outcome_hypothesis *y = &baselines[1][k].hypotheses[0];
        if (k % 2 == 0 || y->n_ids + 1 > (size_t)p.max_target) continue;
        asks[k].scoring = 1;
        asks[k].n_target = y->n_ids;
        memcpy(asks[k].target, y->ids, sizeof asks[k].target);
    }
    out = translate(f, &p, asks, SENTENCES);
    for (size_t k = 0; k < SENTENCES; k++)
        if (!asks[k].scoring) assert_memory_equal(&out[k], &baselines[1][k], sizeof out[k]);
        else
            assert_memory_equal(out[k].hypotheses[0].logprobs, baselines[1][k].hypotheses[0].logprobs,
                                out[k].hypotheses[0].n_ids * 4);
    free(out);
    free(asks);
}

typedef struct seen_routing {
    size_t n;
    struct {
        char layer[16];
        size_t position, n;
        int32_t token;
        uint32_t experts[8];
        float weights[8];
    } each[2 * LONGEST];
} seen_routing;

/* Record the routing of the decoder's mixtures. */
static void keep_routing(void *user, const moe_routing *r) {
    seen_routing *seen = user;
    if (r->layer[0] != 'd') return;
    assert_true(seen->n < MOE_COUNT(seen->each) && r->n <= MOE_COUNT(seen->each[0].experts));
    snprintf(seen->each[seen->n].layer, sizeof seen->each[0].layer, "%s", r->layer);
    seen->each[seen->n].position = r->position;
    seen->each[seen->n].token = r->token;
    seen->each[seen->n].n = r->n;
    memcpy(seen->each[seen->n].experts, r->experts, r->n * sizeof *r->experts);
    memcpy(seen->each[seen->n++].weights, r->weights, r->n * sizeof *r->weights);
}

/* Run a single request. Return its result, its statistics, and the routing of its tokens. */
static outcome *run_alone(const fixture *f, moe_session_params p, const ask *asked, moe_stats *stats,
                          seen_routing *seen) {
    outcome *out = mw_zeros(sizeof *out);
    moe_session *s;
    memset(seen, 0, sizeof *seen);
    p.routing = keep_routing;
    p.routing_user = seen;
    s = new_session(f, &p);
    translate_with(s, asked, 1, NULL, 0, out);
    *stats = moe_session_stats(s);
    moe_session_free(s);
    return out;
}

typedef struct reports {
    size_t routing, attention;
    uint64_t sum; /* order-independent checksum of the reports */
} reports;

static uint64_t crc_of(const void *data, size_t n) { return mw_crc(data, n); }

static void sum_routing(void *user, const moe_routing *r) {
    reports *seen = user;
    seen->routing++;
    seen->sum += (crc_of(&r->position, sizeof r->position) << 16) + crc_of(&r->token, sizeof r->token) +
                 crc_of(r->weights, r->n * sizeof *r->weights) + crc_of(r->layer, strlen(r->layer));
}

static void sum_attention(void *user, const moe_attention *a) {
    reports *seen = user;
    seen->attention++;
    seen->sum += (crc_of(&a->position, sizeof a->position) << 16) + crc_of(a->weights, a->n * sizeof *a->weights);
}

/* When memory for keys and values is short, sentences wait, or release their rows and are recomputed. Results do not
 * change, and routing and attention are reported once. Dropped requests and cancelled runs also release their rows. */
TEST(a_limited_context_does_not_change_results) {
    enum { N = 20 };
    for (int i = 0; i < 2; i++) {
        fixture *f = small(NLLB, MW_Q8);
        moe_session_params p = params_for(f->model);
        ask *asks = random_asks(5, N);
        outcome *wanted, found[N];
        if (i) poke(f, "output.bias", MW_EOS, moe_to_bits(-20.0f)); /* translations never end by themselves */
        p.source_tag = MW_TAG_DE;
        p.batch = 16, p.beam = 12, p.max_target = p.max_len_offset = LONGEST, p.threads = 2;
        wanted = translate(f, &p, asks, N);
        for (size_t k = 0; k < N; k++) assert_int_equal(wanted[k].status, MOE_OK);
        reports once = { 0 }, seen = { 0 };
        p.routing = sum_routing, p.attention = sum_attention;
        p.routing_user = p.attention_user = &once;
        moe_session *s = new_session(f, &p);
        translate_with(s, asks, N, NULL, 0, found);
        const moe_stats plenty = moe_session_stats(s);
        moe_session_free(s);
        p.context_memory = 1;
        p.routing_user = p.attention_user = &seen;
        s = new_session(f, &p);
        for (int round = 0; round < 2; round++) {
            moe_error e;
            request_feed feed = { .asks = asks, .n = N, .outcome = found, .random = 1, .cancel_after = 18 };
            assert_int_equal(moe_translate(s, pull, done, &feed, &e), MOE_ERROR_CANCELLED);
            const size_t rows = moe_session_stats(s).rows;
            seen = (reports){ 0 };
            translate_with(s, asks, N, NULL, round, found);
            assert_same(wanted, found, N, "a limited context");
            CHECK(seen.routing == once.routing && seen.attention == once.attention && seen.sum == once.sum,
                  "%zu and %zu reports, %zu and %zu with room", seen.routing, seen.attention, once.routing,
                  once.attention);
            CHECK(moe_session_stats(s).rows - rows >= plenty.rows, "rows");
            if (i && !round)
                CHECK(moe_session_stats(s).rows - rows > plenty.rows + plenty.rows / 20,
                      "%zu rows, with room %zu: no rows were recomputed", (size_t)(moe_session_stats(s).rows - rows),
                      (size_t)plenty.rows);
        }
        CHECK(moe_session_stats(s).bytes + (1 << 19) < plenty.bytes, "%zu bytes, with room %zu",
              (size_t)moe_session_stats(s).bytes, (size_t)plenty.bytes);
        moe_session_free(s);
        free(wanted), free(asks);
        drop(f);
    }
}

/* ---- Drafts ---- */

/* Make drafts from translations. `kind` 0: the same; 1: every second token replaced; 2: tokens left out and inserted;
 * 3: noise; 4: the translation after other text, as if copied from a source. */
static void make_drafts(ask *asks, const outcome *wanted, int kind) {
    uint64_t random = 3 + (uint64_t)kind;
    for (size_t k = 0; k < SENTENCES; k++) {
        const outcome_hypothesis *h = &wanted[k].hypotheses[0];
        const size_t given = asks[k].prefix ? asks[k].n_target : 0; /* a draft continues the given tokens */
        size_t n = 0;
        for (size_t i = 0; kind == 4 && i < 4; i++) asks[k].draft[n++] = 8 + (int32_t)mw_below(&random, 20);
        for (size_t i = given; i < h->n_ids; i++) {
            const int32_t other = 8 + (int32_t)mw_below(&random, MW_VOCABULARY - 8);
            if (kind == 2 && i % 7 == 3) continue;
            if (kind == 2 && i % 7 == 5) asks[k].draft[n++] = other;
            asks[k].draft[n++] = kind == 3 || (kind == 1 && i % 2) ? other : h->ids[i];
        }
        asks[k].n_draft = n;
    }
}

TEST(drafts_do_not_change_a_bit) {
    static const int variants[] = { NLLB, MARIAN, MARIAN | LISTED, MW_GNMT, STUDENT };
    for (size_t i = 0; i < 4 * MOE_COUNT(variants); i++) {
        const int variant = variants[i / 4], together = variant != MW_GNMT;
        fixture *f = small(variant, i % 2 ? MW_Q8 : MW_F32);
        moe_session_params p = params_for(f->model);
        p.beam = p.nbest = 1;
        p.rules = together ? MOE_RULES_HF : 0, p.source_tag = variant == NLLB ? MW_TAG_DE : -1;
        if (i % 4 > 1) p.sample = 1, p.temperature = 0.7f, p.top_p = 0.9f;
        if (i % 2 && together) p.repetition_penalty = 1.2f, p.min_target = 6;
        poke(f, "output.bias", MW_EOS, moe_to_bits(-3.0f)); /* longer translations */
        ask *asks = copied_sentences();
        outcome *wanted = translate(f, &p, asks, SENTENCES), found[SENTENCES];
        for (int kind = 0; kind < 5; kind++) {
            make_drafts(asks, wanted, kind);
            p.batch = kind % 2 ? 5 : 1, p.threads = 1 + kind % 2, p.isa = isa_of(i + (size_t)kind);
            moe_session *s = new_session(f, &p);
            translate_with(s, asks, SENTENCES, NULL, kind == 2, found);
            assert_same(wanted, found, SENTENCES, "a draft");
            const moe_stats stats = moe_session_stats(s);
            CHECK(stats.draft_rows >= stats.draft_tokens && stats.rows >= stats.draft_rows, "%zu of %zu guesses",
                  (size_t)stats.draft_tokens, (size_t)stats.draft_rows);
            if (!together) assert_int_equal(stats.draft_rows, 0);
            CHECK(!together || kind > 2 || stats.draft_tokens > 0, "%zu %d: %zu of %zu", i, kind,
                  (size_t)stats.draft_tokens, (size_t)stats.draft_rows);
            moe_session_free(s);
        }
        free(asks), free(wanted);
        drop(f);
    }
}

/* Only guesses that the translation contains change the states of Gated DeltaNet. */
TEST(drafts_change_no_state) {
    for (int i = 0; i < 8; i += mw_slow() ? 5 : 1) {
        fixture *f = open_model(mw_delta_decoder(i % 2 ? MW_Q8 : MW_F32, 5));
        moe_session_params p = params_for(f->model);
        ask *asks = mw_zeros(SENTENCES * sizeof *asks);
        poke(f, "output.bias", MW_EOS, moe_to_bits(-3.0f)); /* longer translations */
        p.beam = p.nbest = 1, p.max_source = 24, p.max_target = p.max_len_offset = 30, p.kv_bits = i % 3 ? 16 : 8;
        if (i == 2 || i == 3) p.sample = 1, p.temperature = 0.6f, p.top_p = 0.9f;
        for (size_t k = 0; k < SENTENCES; k++) {
            asks[k].n_source = 1 + 7 * k % 22;
            for (size_t t = 0; t < asks[k].n_source; t++)
                asks[k].source[t] = 8 + (int32_t)((t < 16 ? 3 * t : k * t) % (MW_VOCABULARY - 8));
            if (k % 4 == 3) asks[k].prefix = 1, give_target(asks, k, k % 6);
        }
        outcome *wanted = translate(f, &p, asks, SENTENCES), found[SENTENCES];
        p.beam = i > 3 ? 3 : 1;
        for (int kind = 0; kind < 5; kind++) {
            make_drafts(asks, wanted, kind);
            p.batch = kind % 2 ? 5 : 1, p.threads = 1 + kind % 2, p.isa = isa_of((size_t)(i + kind));
            p.piece = kind ? 2 + i : 0, p.context_memory = i % 2;
            moe_session *s = new_session(f, &p);
            for (int round = 0; round < 2; round++) {
                request_feed feed = { .asks = asks, .n = SENTENCES, .outcome = found, .later = round, .beam = 1 };
                moe_error e;
                memset(found, 0, sizeof found);
                assert_int_equal(moe_translate(s, pull, done, &feed, &e), MOE_OK);
                assert_same(wanted, found, SENTENCES, "a draft");
            }
            const moe_stats stats = moe_session_stats(s);
            CHECK(kind > 2 || stats.draft_tokens > 0, "%d %d: %zu of %zu", i, kind, (size_t)stats.draft_tokens,
                  (size_t)stats.draft_rows);
            moe_session_free(s);
        }
        free(asks), free(wanted);
        drop(f);
    }
}

/* Replace the measured times: a run of the decoder takes a second, its rows and the predictor hardly any time. */
static void pretend_times(void *user, const moe_node *t, int after) {
    moe_session *s = user;
    if (t != s->graphs[MOE_DECODER].nodes || after) return;
    const moe_pace none = { .mixed = s->pace.mixed };
    s->pace = s->predicting = none;
    for (int i = 0; i < 60; i++) moe_pace_add(&s->pace, 1 + i % 9, 1), moe_pace_add(&s->predicting, 1 + i % 9, 0.02);
}

static ask *prompted_asks(void) {
    ask *asks = mw_zeros(SENTENCES * sizeof *asks);
    for (size_t k = 0; k < SENTENCES; k++) {
        asks[k].n_source = 1 + 7 * k % 22;
        for (size_t t = 0; t < asks[k].n_source; t++)
            asks[k].source[t] = 8 + (int32_t)((t < 16 ? 3 * t : k * t) % (MW_VOCABULARY - 8));
        if (k % 4 == 3) asks[k].prefix = 1, give_target(asks, k, k % 6);
    }
    return asks;
}

/* A predictor, right or not, changes no byte. A right one saves runs; a wrong one that costs too much is not run. */
TEST(predictions_do_not_change_a_bit) {
    for (int i = 0; i < 12; i += mw_slow() ? 5 : 1) {
        const int chain = i % 3 > 0;
        const uint32_t type = i % 2 ? MW_Q8 : MW_F32;
        fixture *plain = open_model(mw_predictor(type, 5, chain, 0)), *f = open_model(mw_predictor(type, 5, chain, 1));
        moe_session_params p = params_for(f->model);
        ask *asks = prompted_asks();
        poke(plain, "output.bias", MW_EOS, moe_to_bits(-3.0f)), poke(f, "output.bias", MW_EOS, moe_to_bits(-3.0f));
        p.beam = p.nbest = 1, p.max_source = 24, p.max_target = p.max_len_offset = 30, p.kv_bits = i % 5 ? 16 : 8;
        if (i % 4 > 1) p.sample = 1, p.temperature = 0.3f, p.top_p = 0.9f, p.repetition_penalty = i % 8 > 3 ? 1.1f : 0;
        outcome *wanted = translate(plain, &p, asks, SENTENCES), found[SENTENCES];
        for (int kind = 0; kind < 4; kind++) {
            p.batch = kind % 2 ? 5 : 1, p.threads = 1 + kind % 2, p.isa = isa_of((size_t)(i + kind));
            p.piece = kind ? 2 + i : 0, p.context_memory = kind == 3;
            moe_session *before = new_session(plain, &p), *s = new_session(f, &p);
            s->graphs[MOE_DECODER].watch = pretend_times, s->graphs[MOE_DECODER].watcher = s;
            for (int round = 0; round < 2; round++) {
                translate_with(before, asks, SENTENCES, NULL, round, found);
                translate_with(s, asks, SENTENCES, NULL, round, found);
                assert_same(wanted, found, SENTENCES, "a predictor");
            }
            const moe_stats stats = moe_session_stats(s);
            const size_t steps = stats.steps, without = moe_session_stats(before).steps;
            CHECK(chain || stats.draft_rows < stats.steps, "%d %d: the predictor does not end", i, kind);
            CHECK(stats.draft_rows > 0 && (!chain || stats.draft_tokens > (p.sample ? 0 : stats.draft_rows * 3 / 4)),
                  "%d %d: %zu of %zu", i, kind, (size_t)stats.draft_tokens, (size_t)stats.draft_rows);
            CHECK(!chain || p.sample || 8 * steps < 7 * without, "%d %d: %zu runs, without %zu", i, kind, steps,
                  without);
            moe_session_free(s), moe_session_free(before);
        }
        free(asks), free(wanted);
        drop(f), drop(plain);
    }
}

/* A beam, constraints and callbacks disable drafts; invalid ids are errors. */
TEST(drafts_that_cannot_be_followed) {
    fixture *f = small(NLLB, MW_Q8);
    moe_session_params p = params_for(f->model);
    ask *asks = copied_sentences();
    reports seen = { 0 };
    p.rules = MOE_RULES_HF, p.source_tag = MW_TAG_DE, p.max_constraints = 1;
    for (int kind = 0; kind < 4; kind++) {
        p.beam = kind == 1 ? 3 : 1;
        p.routing = kind == 2 ? sum_routing : NULL, p.routing_user = &seen;
        for (size_t k = 0; k < SENTENCES; k++) {
            asks[k].n_draft = 0, asks[k].n_constraints = kind == 3 && !asks[k].prefix;
            asks[k].constraint_ids[0][0] = 20, asks[k].constraints[0] = (moe_constraint){ .n_ids = 1 };
        }
        outcome *wanted = translate(f, &p, asks, SENTENCES), found[SENTENCES];
        make_drafts(asks, wanted, 0);
        moe_session *s = new_session(f, &p);
        translate_with(s, asks, SENTENCES, NULL, 0, found);
        assert_same(wanted, found, SENTENCES, "a draft");
        assert_true((moe_session_stats(s).draft_rows == 0) == (kind == 1 || kind == 2));
        if (kind == 0) {
            asks[1].draft[1] = MW_VOCABULARY, asks[2].draft[0] = -1;
            translate_with(s, asks, SENTENCES, NULL, 0, found);
            assert_int_equal(found[1].status, MOE_ERROR_ARGUMENT);
            assert_string_equal(found[1].message, "draft token 40 is outside the vocabulary (0 to 39)");
            assert_int_equal(found[2].status, MOE_ERROR_ARGUMENT);
            assert_int_equal(found[3].status, MOE_OK);
        }
        moe_session_free(s);
        free(wanted);
    }
    free(asks);
    drop(f);
}

/* Guessed rows are worth it while the next guess raises the tokens per second. */
TEST(number_of_guesses) {
    moe_session s = { .search = { .n_ends = 1, .ends = { 2 } } };
    int32_t draft[64];
    moe_slot slot = { .draft = draft, .n_draft = 64, .right = 1, .task = { .limit = 100 } };
    double more;
    for (size_t i = 0; i < 64; i++) draft[i] = 5;
    assert_int_equal(moe_guesses(&s, &slot, 0.01, 1), 64); /* the cost of a row is below that of a run */
    assert_int_equal(moe_guesses(&s, &slot, 1.5, 1), 0);
    slot.right = 0.5f;
    assert_int_equal(moe_guesses(&s, &slot, 0.1, 1),
                     2); /* .5 * 1 > .125 * 1, .25 * 1.1 > .125 * 1.5, .125 * 1.2 < .125 * 1.75 */
    slot.right = 1, draft[3] = 2;
    assert_int_equal(moe_guesses(&s, &slot, 0.01, 1), 3); /* an end token */
    slot.steps = 98;
    assert_int_equal(moe_guesses(&s, &slot, 0.01, 1), 1); /* the length limit */
    slot.steps = 0, slot.task.n_target = 1;
    assert_int_equal(moe_guesses(&s, &slot, 0.01, 1), 0); /* tokens are given */
    for (int i = 0; i < 200; i++) moe_pace_add(&s.pace, 1 + i % 4, 0.5 + 0.1 * (1 + i % 4));
    CHECK(fabs(moe_pace_of(&s.pace, 2, &more) - 0.7) < 0.01 && fabs(more - 0.1) < 0.02, "%f", more);
}

/* ---- The choice of the next token ---- */

typedef struct chooser {
    const outcome *first; /* results; the `user` of a request points to its result */
    size_t calls, rows;
    uint64_t sum;                    /* depends on the order of the calls */
    int32_t ids[SENTENCES][LONGEST]; /* tokens of the best hypothesis in the last call */
    size_t n_ids[SENTENCES];
    const char *banned;       /* [vocabulary] */
    const int32_t *forced;    /* [n_forced] tokens that follow */
    size_t n_forced, stop_at; /* stop_at: 1 + number of tokens of the results; 0 to never stop */
    float bad;                /* replaces all logits unless 0 */
    int kills;                /* 1: bans all tokens of the best of several hypotheses */
} chooser;

static int choose(void *user, const moe_next_token *next) {
    chooser *c = user;
    const size_t which = (size_t)((const outcome *)next->user - c->first);
    c->calls++;
    c->rows += next->rows;
    assert_true(next->rows >= 1 && which < SENTENCES && next->n_ids <= LONGEST && next->vocabulary == MW_VOCABULARY);
    c->sum = c->sum * 31 + which;
    c->n_ids[which] = next->n_ids;
    if (next->n_ids) memcpy(c->ids[which], next->ids[0], next->n_ids * sizeof **next->ids);
    for (size_t r = 0; r < next->rows; r++) {
        float *x = next->logits + r * next->stride;
        c->sum = c->sum * 31 + crc_of(x, next->vocabulary * sizeof *x) +
                 crc_of(next->ids[r], next->n_ids * sizeof **next->ids);
        for (size_t i = 0; i < next->vocabulary; i++) {
            if (c->banned && c->banned[i]) x[i] = -INFINITY;
            if (c->n_forced && (int32_t)i != (next->n_ids < c->n_forced ? c->forced[next->n_ids] : MW_EOS))
                x[i] = -INFINITY;
            if (c->bad != 0.0f) x[i] = c->bad;
            if (c->kills && r == 0 && next->rows > 1) x[i] = -INFINITY;
        }
    }
    return c->stop_at && next->n_ids + 1 >= c->stop_at;
}

/* Translate all sentences of a setting with a callback. */
static void choose_all(size_t i, moe_session_params p, chooser *c, outcome *out) {
    c->first = out;
    p.next_token = choose, p.next_token_user = c;
    moe_session *s = new_session(models[i], &p);
    translate_with(s, sentences, SENTENCES, NULL, 0, out);
    moe_session_free(s);
}

/* A callback without changes leaves results bit-identical, and gets the same logits with any number of threads. */
TEST(a_callback_for_the_next_token_changes_no_bit) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        uint64_t sum = 0;
        for (int threads = 1; threads <= 3; threads += 2) {
            chooser *c = mw_zeros(sizeof *c);
            outcome *out = mw_zeros(SENTENCES * sizeof *out);
            moe_session_params p = setting_params(i);
            p.threads = threads;
            p.batch = 5;
            p.isa = isa_of(i);
            choose_all(i, p, c, out);
            assert_same(baselines[i], out, SENTENCES, "a callback");
            CHECK(c->calls >= SENTENCES && c->rows >= c->calls, "setting %zu: %zu calls", i, c->calls);
            CHECK(threads == 1 || c->sum == sum, "setting %zu: threads change the calls", i);
            sum = c->sum;
            /* the last call precedes the last token */
            for (size_t k = 0; k < SENTENCES && p.beam == 1 && p.rules != MOE_RULES_NVIDIA; k++) {
                const outcome_hypothesis *h = &out[k].hypotheses[0];
                const size_t n = c->n_ids[k];
                const size_t given = sentences[k].prefix ? sentences[k].n_target : 0;
                if (h->n_ids <= given) continue; /* no token was chosen */
                CHECK(n + (size_t)!h->finished == h->n_ids && memcmp(c->ids[k], h->ids, n * sizeof *h->ids) == 0,
                      "setting %zu, sentence %zu: %zu tokens before the last call, %zu in the result", i, k, n,
                      h->n_ids);
            }
            free(out), free(c);
        }
    }
}

TEST(banned_tokens_are_never_generated) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        chooser *c = mw_zeros(sizeof *c);
        outcome *out = mw_zeros(SENTENCES * sizeof *out);
        char banned[MW_VOCABULARY] = { 0 };
        moe_session_params p = setting_params(i);
        p.batch = 4, p.rerank = 0;
        for (int32_t id = 0; id < MW_VOCABULARY; id++) banned[id] = id != MW_EOS && id % 3 == 0;
        c->banned = banned;
        choose_all(i, p, c, out);
        for (size_t k = 0; k < SENTENCES; k++)
            for (size_t h = 0; h < out[k].n; h++)
                for (size_t x = sentences[k].prefix ? sentences[k].n_target + forced(i) : 0;
                     x < out[k].hypotheses[h].n_ids; x++)
                    CHECK(!banned[out[k].hypotheses[h].ids[x]], "setting %zu, sentence %zu: token %d", i, k,
                          (int)out[k].hypotheses[h].ids[x]);
        free(out), free(c);
    }
}

/* With all other tokens banned, the result is the forced one, with probability 1. */
TEST(a_callback_can_force_every_token) {
    static const int32_t tokens[] = { 9, 30, 30, 12, 9 };
    for (size_t i = 0; i < settings_in_use(); i++) {
        chooser *c = mw_zeros(sizeof *c);
        outcome *out = mw_zeros(SENTENCES * sizeof *out);
        moe_session_params p = setting_params(i);
        p.batch = 3, p.shortlist = 0, p.rerank = 0, p.max_len_factor = 0, p.max_len_offset = 20;
        c->forced = tokens, c->n_forced = 5;
        choose_all(i, p, c, out);
        for (size_t k = 0; k < SENTENCES; k++) {
            const outcome_hypothesis *h = &out[k].hypotheses[0];
            if (sentences[k].prefix) continue;
            CHECK(out[k].n && h->finished && h->n_ids == 5 && memcmp(h->ids, tokens, sizeof tokens) == 0 &&
                      h->logprob == 0.0f,
                  "setting %zu, sentence %zu: %zu tokens, %g, %s", i, k, h->n_ids, (double)h->logprob, out[k].message);
        }
        free(out), free(c);
    }
}

/* Stopping ends a translation before its next token; the hypotheses in the beam become the results. */
TEST(a_callback_can_stop) {
    for (size_t i = 0; i < settings_in_use(); i++)
        for (size_t most = 0; most <= 4; most += 2) {
            chooser *c = mw_zeros(sizeof *c);
            outcome *out = mw_zeros(SENTENCES * sizeof *out);
            moe_session_params p = setting_params(i);
            p.batch = 4;
            c->stop_at = most + 1;
            choose_all(i, p, c, out);
            for (size_t k = 0; k < SENTENCES; k++) {
                const size_t given = sentences[k].prefix ? sentences[k].n_target : 0;
                CHECK(out[k].status == MOE_OK && out[k].n, "setting %zu, sentence %zu: %s", i, k, out[k].message);
                for (size_t h = 0; h < out[k].n; h++) {
                    const outcome_hypothesis *x = &out[k].hypotheses[h];
                    CHECK(isfinite(x->score), "setting %zu, sentence %zu: score %g", i, k, (double)x->score);
                    CHECK(x->n_ids <= moe_max(most, given) && (x->finished || x->n_ids == moe_max(most, given) ||
                                                               baselines[i][k].hypotheses[0].n_ids <= x->n_ids),
                          "setting %zu, sentence %zu: %zu tokens, not %zu", i, k, x->n_ids, most);
                    if (p.beam == 1)
                        assert_memory_equal(x->ids, baselines[i][k].hypotheses[0].ids, x->n_ids * sizeof *x->ids);
                }
            }
            free(out), free(c);
        }
}

/* A hypothesis without a next token leaves the beam; the others go on. */
TEST(a_callback_can_remove_a_hypothesis) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        chooser *c = mw_zeros(sizeof *c);
        outcome *out = mw_zeros(SENTENCES * sizeof *out);
        moe_session_params p = setting_params(i);
        p.batch = 4, p.rerank = 0;
        c->kills = 1;
        choose_all(i, p, c, out);
        for (size_t k = 0; k < SENTENCES; k++)
            CHECK(out[k].status == MOE_OK && out[k].n, "setting %zu, sentence %zu: %s", i, k, out[k].message);
        if (p.beam == 1) assert_same(baselines[i], out, SENTENCES, "a beam of one");
        free(out), free(c);
    }
}

MODEL_TEST(a_callback_that_leaves_no_token_is_numeric, MW_GNMT, MW_F32) {
    const float bad[] = { -INFINITY, INFINITY, NAN };
    for (int k = 0; k < 3; k++) {
        chooser *c = mw_zeros(sizeof *c);
        outcome *out = mw_zeros(SENTENCES * sizeof *out);
        c->first = out;
        c->bad = bad[k];
        p.next_token = choose, p.next_token_user = c;
        moe_session *s = new_session(f, &p);
        translate_with(s, sentences, SENTENCES, NULL, 0, out);
        for (size_t i = 0; i < SENTENCES; i++) {
            assert_int_equal(out[i].status, MOE_ERROR_NUMERIC);
            assert_non_null(strstr(out[i].message, "next_token"));
        }
        moe_session_free(s);
        free(out), free(c);
    }
}

/* With a beam of one, every token is reported immediately; with larger beams, tokens are reported once all hypotheses
 * agree. A request's limit ends its translation. */
TEST(tokens_are_reported_before_the_result) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        moe_session_params p = setting_params(i);
        size_t reported = 0, all = 0;
        moe_session *s = new_session(models[i], &p);
        outcome out[SENTENCES];
        partials parts[SENTENCES];
        request_feed feed = { .asks = sentences, .n = SENTENCES, .outcome = out, .partials = parts };
        moe_error e;
        memset(out, 0, sizeof out), memset(parts, 0, sizeof parts);
        assert_int_equal(moe_translate(s, pull, done_and_told, &feed, &e), MOE_OK);
        assert_same(baselines[i], out, SENTENCES, "listening");
        for (size_t k = 0; k < SENTENCES; k++) {
            const outcome_hypothesis *best = &out[k].hypotheses[0];
            reported += parts[k].n, all += best->n_ids;
            if (p.beam > 1 || p.rules == MOE_RULES_HF) continue;
            const size_t last = !best->finished && best->n_ids; /* the last token is reported with the result */
            CHECK(parts[k].n + last == best->n_ids, "%zu of %zu tokens were reported", parts[k].n, best->n_ids);
        }
        CHECK(reported && reported <= all, "setting %zu: %zu of %zu tokens were reported", i, reported, all);
        feed = (request_feed){ .asks = sentences, .n = SENTENCES, .outcome = out, .limit = 3 };
        memset(out, 0, sizeof out);
        assert_int_equal(moe_translate(s, pull, done, &feed, &e), MOE_OK);
        for (size_t k = 0; k < SENTENCES; k++) {
            const outcome_hypothesis *now = &out[k].hypotheses[0], *best = &baselines[i][k].hypotheses[0];
            const size_t given = sentences[k].prefix ? sentences[k].n_target : 0, most = given < 3 ? 3 : given + 1;
            CHECK(now->n_ids + (size_t)now->finished + forced(i) <= most + forced(i), "%zu tokens", now->n_ids);
            if (p.beam == 1 && !p.rules) assert_memory_equal(now->ids, best->ids, now->n_ids * sizeof *now->ids);
        }
        moe_session_free(s);
    }
}

/* A request with a narrower beam than its session has the results of a session with that beam, whatever the beams of
 * the other requests in its batch. */
TEST(requests_choose_their_beam) {
    size_t tried = 0;
    for (size_t i = 0; i < settings_in_use(); i++) {
        const moe_session_params p = setting_params(i);
        for (int beam = 1; beam < p.beam; beam++) {
            moe_session_params narrow = p;
            outcome wanted[SENTENCES], found[SENTENCES];
            moe_error e;
            narrow.beam = beam, narrow.nbest = p.nbest < beam ? p.nbest : beam, narrow.stop_loops = p.stop_loops;
            if (beam == 1) narrow.rerank = 0;
            moe_session *s = new_session(models[i], &narrow);
            request_feed feed = { .asks = sentences, .n = SENTENCES, .outcome = wanted };
            memset(wanted, 0, sizeof wanted);
            assert_int_equal(moe_translate(s, pull, done, &feed, &e), MOE_OK);
            moe_session_free(s);
            s = new_session(models[i], &p);
            for (int mixed = 0; mixed < 2; mixed++) {
                feed =
                    (request_feed){ .asks = sentences, .n = SENTENCES, .outcome = found, .beam = mixed ? -beam : beam };
                memset(found, 0, sizeof found);
                assert_int_equal(moe_translate(s, pull, done, &feed, &e), MOE_OK);
                for (size_t k = 0; k < SENTENCES; k++)
                    assert_same(mixed && k % 2 == 0 ? &baselines[i][k] : &wanted[k], &found[k], 1, "beam");
            }
            moe_session_free(s);
            tried++;
        }
    }
    assert_true(tried > 10);
}

/* Prompts with a common first page have the same results as in separate sessions, but a batch computes the page only
 * once. Pages of finished sentences are evicted when memory is short. A trace reports all rows. */
TEST(prompts_share_common_prefixes) {
    enum { N = 40, LENGTH = 20 };
    for (int i = 0; i < 5; i++) {
        fixture *f = open_model((i > 2 ? mw_delta_decoder : mw_decoder)(i ? MW_Q8 : MW_F32, 3));
        moe_session_params p = params_for(f->model);
        ask *asks = mw_zeros(N * sizeof *asks);
        outcome *wanted = mw_zeros(N * sizeof *wanted), found[N];
        size_t alone = 0;
        poke(f, "output.bias", MW_EOS, moe_to_bits(-20.0f)); /* translations never end by themselves */
        p.beam = i == 2 || i == 4 ? 3 : 1, p.max_source = 24, p.max_target = p.max_len_offset = 10;
        for (size_t k = 0; k < N; k++) {
            asks[k].n_source = LENGTH - k % 7;
            for (size_t t = 0; t < asks[k].n_source; t++)
                asks[k].source[t] = (int32_t)(8 + (t < 16 ? (k / 2 % 3 + 1) * t : k * t) % (MW_VOCABULARY - 8));
        }
        for (size_t k = 0; k < N; k++) {
            moe_session *s = new_session(f, &p);
            translate_with(s, &asks[k], 1, NULL, 0, &wanted[k]);
            assert_int_equal(wanted[k].status, MOE_OK);
            alone += moe_session_stats(s).rows;
            moe_session_free(s);
        }
        for (int batch = 1; batch <= 30; batch = 2 * batch + 1) {
            p.batch = batch;
            p.piece = batch == 7 ? 1 : batch;
            moe_session *s = new_session(f, &p);
            for (int round = 0; round < 3; round++) {
                const size_t rows = moe_session_stats(s).rows;
                translate_with(s, asks, N, NULL, round, found);
                assert_same(wanted, found, N, "shared starts");
                CHECK(moe_session_stats(s).rows - rows + 5 * N < alone || batch == 1, "%zu rows, alone %zu",
                      (size_t)(moe_session_stats(s).rows - rows), alone);
            }
            moe_session_free(s);
        }
        free(wanted), free(asks);
        drop(f);
    }
}

/* A prompt of LONGEST tokens: the first `common` depend only on the group, the others also on `tail`. */
static ask prompt_of(size_t group, size_t common, size_t tail) {
    ask a = { .n_source = LONGEST };
    for (size_t t = 0; t < LONGEST; t++)
        a.source[t] = (int32_t)(8 + (t < common    ? (group + 1) * (t + 3)
                                     : t == common ? tail
                                                   : 5 * t + tail) %
                                        (MW_VOCABULARY - 8));
    return a;
}

/* Translate `n` prompts of a group in one call, compare them with results of sessions of their own, and return the
 * number of rows that sharing saved. */
static size_t saved_rows(moe_session *s, const fixture *f, size_t group, size_t common, size_t tail, size_t n) {
    moe_session_params p = s->params;
    const size_t before = moe_session_stats(s).rows;
    size_t rows = 0;
    ask asks[8];
    outcome found[8];
    p.size = sizeof p, p.batch = 1, p.piece = 7;
    for (size_t k = 0; k < n; k++) asks[k] = prompt_of(group, common, tail + k);
    translate_with(s, asks, n, NULL, 0, found);
    for (size_t k = 0; k < n; k++) {
        outcome wanted;
        moe_session *alone = new_session(f, &p);
        translate_with(alone, &asks[k], 1, NULL, 0, &wanted);
        assert_same(&wanted, &found[k], 1, "kept states");
        rows += moe_session_stats(alone).rows;
        moe_session_free(alone);
    }
    return rows - (moe_session_stats(s).rows - before);
}

/* Gated DeltaNet starts from states, which are kept after the last common page of two prompts: of a batch, or of an
 * earlier and a later request. Five are kept in a batch of 32. */
TEST(states_are_kept_where_prompts_part) {
    enum { BATCH = 32, KEPT = 1 + BATCH / 8, COMMON = 35, SHARED = 32 };
    for (int i = 0; i < 4; i++) {
        fixture *f = open_model(mw_delta_decoder(i % 2 ? MW_Q8 : MW_F32, 3));
        moe_session_params p = params_for(f->model);
        poke(f, "output.bias", MW_EOS, moe_to_bits(-20.0f)); /* translations never end by themselves */
        p.beam = i < 2 ? 1 : 3, p.batch = BATCH, p.max_source = LONGEST, p.max_target = p.max_len_offset = 6;
        p.piece = i == 1 ? 5 : 0, p.kv_bits = i == 3 ? 8 : 32, p.context_memory = 1;
        moe_session *s = new_session(f, &p);
        assert_int_equal(s->n_kept, KEPT);
        for (size_t tail = 0; tail < 4; tail++) /* one after the other: the second one keeps its states */
            assert_int_equal(saved_rows(s, f, 0, COMMON, tail, 1), tail < 2 ? 0 : SHARED);
        for (size_t group = 1; group < KEPT; group++) /* together: the first one */
            assert_int_equal(saved_rows(s, f, group, COMMON, 0, 3), 2 * SHARED);
        for (size_t group = 0; group < KEPT; group++) assert_int_equal(saved_rows(s, f, group, COMMON, 5, 1), SHARED);
        assert_int_equal(saved_rows(s, f, KEPT, COMMON, 0, 2), SHARED); /* evicts the states of group 0 */
        assert_int_equal(saved_rows(s, f, 1, COMMON, 6, 1), SHARED);
        assert_int_equal(saved_rows(s, f, 0, COMMON, 6, 1), 0); /* but not its pages: states are kept again */
        assert_int_equal(saved_rows(s, f, 0, COMMON, 7, 1), SHARED);
        assert_int_equal(saved_rows(s, f, 2, COMMON, 7, 1), 0);

        /* A shorter beginning keeps other states, and the longer one remains. */
        assert_int_equal(saved_rows(s, f, 0, 20, 0, 1), 0);
        assert_int_equal(saved_rows(s, f, 0, 20, 1, 1), 16);
        assert_int_equal(saved_rows(s, f, 0, COMMON, 8, 2), 2 * SHARED);

        /* A partial page is not shared. */
        for (size_t tail = 0; tail < 3; tail++) assert_int_equal(saved_rows(s, f, 20, 15, tail, 1), 0);
        assert_int_equal(saved_rows(s, f, 21, 15, 0, 4), 0);
        assert_int_equal(saved_rows(s, f, 22, 16, 0, 4), 3 * 16);

        /* Pages after shared ones are found, too. */
        for (size_t tail = 0; tail < 3; tail++)
            assert_int_equal(saved_rows(s, f, 22, COMMON, tail, 1), tail < 2 ? 16 : SHARED);

        /* The pages of these prompts have evicted those of group 0, without which its states are useless. */
        for (size_t tail = 9; tail < 12; tail++)
            assert_int_equal(saved_rows(s, f, 0, COMMON, tail, 1), tail < 11 ? 0 : SHARED);
        moe_session_free(s);
        drop(f);
    }
}

/* A decoder that is recurrent but does not multiply by its state, or that uses averages, scores its own output in one
 * or two runs and reproduces the log-probabilities. */
TEST(given_tokens_of_a_student_run_in_one_batch) {
    enum { TOKENS = LONGEST - 2, N = 3 };
    for (int i = 0; i < 4; i++) {
        fixture *f = small(i / 2 ? AVERAGE : STUDENT, i % 2 ? MW_Q8 : MW_F32);
        moe_session_params p = params_for(f->model);
        ask *asks = random_asks(5, N);
        outcome *wrote, *scored;
        moe_session *s;
        poke(f, "output.bias", MW_EOS, moe_to_bits(-20.0f)); /* translations never end by themselves */
        p.beam = 1, p.batch = N, p.max_target = p.max_len_offset = TOKENS;
        wrote = translate(f, &p, asks, N);
        for (size_t k = 0; k < N; k++) {
            assert_int_equal(wrote[k].hypotheses[0].n_ids, TOKENS);
            asks[k].scoring = 1;
            asks[k].n_target = TOKENS;
            memcpy(asks[k].target, wrote[k].hypotheses[0].ids, TOKENS * sizeof *asks[k].target);
        }
        p.max_target++; /* room for the end token */
        scored = mw_zeros(N * sizeof *scored);
        s = new_session(f, &p);
        translate_with(s, asks, N, NULL, 0, scored);
        CHECK(moe_session_stats(s).steps <= 3, "%zu steps", (size_t)moe_session_stats(s).steps);
        moe_session_free(s);
        for (size_t k = 0; k < N; k++)
            assert_memory_equal(scored[k].hypotheses[0].logprobs, wrote[k].hypotheses[0].logprobs,
                                TOKENS * sizeof(float));
        free(wrote), free(scored), free(asks);
        drop(f);
    }
}

/* The first tokens of a raw request index tables with one entry per token, so they must be checked. */
MODEL_TEST(a_raw_request_forces_no_token_outside_the_vocabulary, NLLB, MW_F32) {
    static const int32_t tags[] = { MW_VOCABULARY, INT32_MAX, INT32_MIN, -2, MW_VOCABULARY - 1, -1 };
    ask asks[MOE_COUNT(tags)] = { { .n_source = 0 } };
    outcome *out;
    p.source_tag = MW_TAG_DE;
    for (size_t k = 0; k < MOE_COUNT(tags); k++)
        asks[k] = (ask){ .source = { 9, 17, 8 }, .n_source = 3, .raw = 1, .tag = tags[k] };
    out = translate(f, &p, asks, MOE_COUNT(tags));
    for (size_t k = 0; k < MOE_COUNT(tags); k++) {
        const int good = tags[k] >= -1 && tags[k] < MW_VOCABULARY;
        CHECK(out[k].status == (good ? MOE_OK : MOE_ERROR_ARGUMENT), "tag %d: %s", (int)tags[k], out[k].message);
        assert_true(good || strstr(out[k].message, "forced token"));
    }
    assert_int_equal(out[4].hypotheses[0].ids[0], MW_VOCABULARY - 1);
    free(out);
}

/* Given tokens run one by one, as in greedy search, or together: up to 32 per sentence of `batch`, in addition to one
 * row per sentence. */
MODEL_TEST(given_tokens_of_a_transformer_run_together, NLLB, MW_Q8) {
    enum { TOKENS = LONGEST - 2, GIVEN = 17 };
    ask asked = { .source = { 9, 17, 8, 30, 12 }, .n_source = 5, .tag = MW_TAG_EN, .source_tag = MW_TAG_DE };
    seen_routing slowly, seen;
    moe_stats stats;
    outcome *free_one, *out;
    poke(f, "output.bias", MW_EOS, moe_to_bits(-20.0f)); /* translations never end by themselves */
    p.beam = 1;
    p.max_target = p.max_len_offset = TOKENS + 1; /* TOKENS and the forced tag */
    free_one = run_alone(f, p, &asked, &stats, &slowly);
    assert_int_equal(free_one->hypotheses[0].n_ids, TOKENS);
    assert_int_equal(stats.steps, TOKENS); /* the tag runs together with the first token */
    assert_int_equal(stats.rows, TOKENS + 1);
    assert_int_equal(slowly.n, TOKENS + 1);

    asked.n_target = TOKENS;
    memcpy(asked.target, free_one->hypotheses[0].ids, TOKENS * sizeof *asked.target);
    asked.scoring = 1;
    p.max_target++; /* room for the end token */
    for (int batch = 1; batch <= 2; batch++) {
        p.batch = batch;
        out = run_alone(f, p, &asked, &stats, &seen);
        assert_int_equal(out->hypotheses[0].n_ids, TOKENS);
        assert_memory_equal(out->hypotheses[0].logprobs, free_one->hypotheses[0].logprobs, TOKENS * sizeof(float));
        assert_int_equal(stats.steps, batch == 1 ? 2 : 1);
        assert_int_equal(stats.rows, TOKENS + 2);
        assert_int_equal(seen.n, TOKENS + 2);
        assert_memory_equal(seen.each, slowly.each, (TOKENS + 1) * sizeof *seen.each);
        free(out);
    }

    asked.scoring = 0;
    asked.prefix = 1;
    asked.n_target = GIVEN;
    p.max_target--;
    out = run_alone(f, p, &asked, &stats, &seen);
    assert_memory_equal(out, free_one, sizeof *out);
    assert_int_equal(stats.steps, TOKENS - GIVEN);
    assert_memory_equal(&seen, &slowly, sizeof seen);
    free(out), free(free_one);
}

/* ---- Reranking ---- */

/* Score the source, in language `tag`, given each hypothesis; store log P(source | hypothesis) in `out`. */
static void score_back(const fixture *f, moe_session_params p, const ask *asked, const outcome *translated, int32_t tag,
                       float *out) {
    ask back[MOST];
    outcome *h;
    memset(back, 0, sizeof back);
    for (size_t j = 0; j < translated->n; j++) {
        const outcome_hypothesis *y = &translated->hypotheses[j];
        back[j].n_source = y->n_ids;
        memcpy(back[j].source, y->ids, sizeof back[j].source);
        back[j].scoring = 1;
        back[j].n_target = asked->n_source;
        memcpy(back[j].target, asked->source, sizeof back[j].target);
        back[j].tag = tag;
    }
    p.rerank = 0;
    p.coverage_penalty = 0;
    p.min_target = 0;
    h = translate(f, &p, back, translated->n);
    for (size_t j = 0; j < translated->n; j++) {
        assert_int_equal(h[j].status, MOE_OK);
        out[j] = h[j].hypotheses[0].logprob;
    }
    free(h);
}

/* Rerank the results of a search in place, without the engine. Return 1 if the best hypothesis changes. */
static int rerank_by_hand(const fixture *f, const moe_session_params *p, const ask *asked, outcome *translated) {
    const outcome before = *translated;
    const moe_search search = { .alpha = p->length_penalty, .constant = p->length_constant };
    float back[2][MOST];
    int language = p->source_tag < 0 ? -1 : p->source_tag == MW_TAG_DE;
    score_back(f, *p, asked, &before, MW_TAG_EN, back[0]);
    score_back(f, *p, asked, &before, MW_TAG_DE, back[1]);
    if (language < 0) language = back[1][0] > back[0][0];
    translated->n = 0;
    for (size_t j = 0; j < before.n; j++) {
        outcome_hypothesis y = before.hypotheses[j];
        size_t at = translated->n++;
        y.reverse = back[language][j];
        y.score = y.score + p->rerank * (y.reverse / moe_length_penalty(&search, asked->n_source + 1));
        for (; at > 0 && translated->hypotheses[at - 1].finished == y.finished &&
               translated->hypotheses[at - 1].score < y.score;
             at--)
            translated->hypotheses[at] = translated->hypotheses[at - 1];
        translated->hypotheses[at] = y;
    }
    return memcmp(translated->hypotheses[0].ids, before.hypotheses[0].ids, sizeof before.hypotheses[0].ids) != 0;
}

TEST(reranking_equals_scoring_in_the_reverse_direction) {
    size_t changed = 0, both[2] = { 0, 0 };
    for (size_t i = RERANKED; i < settings_in_use(); i++)
        for (int32_t tag = -1; tag <= MW_TAG_DE; tag += tag < 0 ? MW_TAG_EN + 1 : 1) {
            moe_session_params p = setting_params(i), plain;
            outcome *wanted, *got;
            p.source_tag = tag;
            p.isa = NULL;
            p.batch = 4;
            plain = p;
            plain.rerank = 0;
            wanted = translate(models[i], &plain, sentences, SENTENCES);
            for (size_t k = 0; k < SENTENCES; k++)
                changed += (size_t)rerank_by_hand(models[i], &p, &sentences[k], &wanted[k]);
            got = translate(models[i], &p, sentences, SENTENCES);
            assert_same(wanted, got, SENTENCES, "reranking");
            free(got);
            p.nbest = 1; /* fewer hypotheses are scored */
            got = translate(models[i], &p, sentences, SENTENCES);
            for (size_t k = 0; k < SENTENCES; k++) {
                assert_int_equal(got[k].n, 1);
                assert_memory_equal(&got[k].hypotheses[0], &wanted[k].hypotheses[0], sizeof got[k].hypotheses[0]);
            }
            for (size_t k = 0; tag < 0 && k < SENTENCES; k++) {
                float back[2];
                outcome one = got[k];
                score_back(models[i], p, &sentences[k], &one, MW_TAG_EN, &back[0]);
                score_back(models[i], p, &sentences[k], &one, MW_TAG_DE, &back[1]);
                both[0] += moe_to_bits(back[0]) == moe_to_bits(one.hypotheses[0].reverse);
                both[1] += moe_to_bits(back[1]) == moe_to_bits(one.hypotheses[0].reverse);
            }
            free(got), free(wanted);
        }
    if (settings_in_use() > RERANKED) assert_true(changed > 20 && both[0] > 5 && both[1] > 5);
}

/* With a large weight hypotheses lose near the end of their sources, so few rows are saved. */
MODEL_TEST(scores_of_hypotheses_that_cannot_win_are_abandoned, MW_GNMT, MW_F32) {
    static const struct {
        float weight;
        int nbest;
    } runs[] = { { 0.2f, 4 }, { 0.2f, 1 }, { 10, 1 } };
    ask *asks = random_asks(24, SENTENCES);
    outcome *out[3];
    uint64_t rows[3];
    p.beam = 4, p.batch = 4, p.max_source = 48, p.source_tag = MW_TAG_EN;
    for (int i = 0; i < 3; i++) {
        p.rerank = runs[i].weight, p.nbest = runs[i].nbest;
        moe_session *s = new_session(f, &p);
        out[i] = mw_zeros(SENTENCES * sizeof *out[i]);
        translate_with(s, asks, SENTENCES, NULL, 0, out[i]);
        rows[i] = moe_session_stats(s).rows;
        moe_session_free(s);
    }
    for (size_t k = 0; k < SENTENCES; k++)
        assert_memory_equal(&out[1][k].hypotheses[0], &out[0][k].hypotheses[0], sizeof out[1][k].hypotheses[0]);
    assert_true(rows[1] < rows[0] && rows[1] < rows[2] - rows[2] / 25);
    free(out[0]), free(out[1]), free(out[2]), free(asks);
}

/* Requests can set their source tag; an invalid tag is an error. */
MODEL_TEST(a_request_can_say_what_language_it_is_in, MW_GNMT, MW_F32) {
    ask *asks = random_asks(21, 12);
    outcome *german, out[12];
    p.beam = 4, p.rerank = 1, p.max_source = 48, p.batch = 3;
    p.source_tag = MW_TAG_DE;
    german = translate(f, &p, asks, 12);
    p.source_tag = MW_TAG_EN;
    for (size_t k = 0; k < 12; k++) asks[k].source_tag = k == 5 ? MW_VOCABULARY : MW_TAG_DE;
    moe_session *s = new_session(f, &p);
    translate_with(s, asks, 12, NULL, 0, out);
    for (size_t k = 0; k < 12; k++)
        if (k == 5) assert_int_equal(out[k].status, MOE_ERROR_ARGUMENT);
        else assert_memory_equal(&out[k], &german[k], sizeof out[k]);
    moe_session_free(s);
    free(german), free(asks);
}

/* Hypotheses are not reranked if the source cannot be a target or a translation cannot be a source. */
MODEL_TEST(what_does_not_fit_stays_as_it_was, MW_GNMT, MW_F32) {
    ask *asks = random_asks(22, 24);
    outcome *plain, *out;
    size_t reranked = 0, kept = 0;
    p.beam = p.nbest = 4, p.batch = 5, p.max_source = 24, p.max_target = 20;
    asks[1].source[0] = 1; /* the unknown token is never generated */
    asks[3].source[0] = MW_EOS;
    plain = translate(f, &p, asks, 24);
    p.rerank = 1;
    out = translate(f, &p, asks, 24);
    for (size_t k = 0; k < 24; k++) {
        int fits = asks[k].n_source + 1 <= 20 && k != 1 && k != 3;
        for (size_t j = 0; j < plain[k].n; j++) fits &= plain[k].hypotheses[j].n_ids + 2 <= 24;
        if (fits) assert_true(out[k].n > 0 && out[k].hypotheses[0].reverse < 0);
        else assert_memory_equal(&out[k], &plain[k], sizeof out[k]);
        fits ? reranked++ : kept++;
    }
    assert_true(reranked > 5 && kept > 2);
    free(plain), free(out), free(asks);
}

typedef struct routed_tokens {
    size_t encoder[SENTENCES];
    const outcome *outcome;
} routed_tokens;

static void count_routing(void *user, const moe_routing *r) {
    routed_tokens *t = user;
    const size_t k = (size_t)((const outcome *)r->user - t->outcome);
    assert_true(k < SENTENCES);
    if (strncmp(r->layer, "encoder", 7) == 0) t->encoder[k]++;
}

/* Routing and statistics exclude the requests that reranking adds. */
MODEL_TEST(questions_are_not_shown, MW_GNMT, MW_F32) {
    ask *asks = random_asks(23, SENTENCES);
    outcome *out = mw_zeros(SENTENCES * sizeof *out);
    routed_tokens counted = { .outcome = out };
    moe_stats stats;
    uint64_t source = 0, target = 0;
    moe_session *s;
    p.beam = 4, p.batch = 4, p.rerank = 0.5f, p.max_source = 48;
    p.routing = count_routing, p.routing_user = &counted;
    s = new_session(f, &p);
    translate_with(s, asks, SENTENCES, NULL, 0, out);
    for (size_t k = 0; k < SENTENCES; k++) {
        assert_true(out[k].hypotheses[0].reverse < 0);
        assert_int_equal(counted.encoder[k], asks[k].n_source + 2);
        source += asks[k].n_source + 2;
        target += out[k].hypotheses[0].n_ids + (size_t)out[k].hypotheses[0].finished;
    }
    stats = moe_session_stats(s);
    assert_int_equal(stats.sentences, SENTENCES);
    assert_int_equal(stats.source_tokens, source);
    assert_int_equal(stats.target_tokens, target);
    moe_session_free(s);
    free(out), free(asks);
}

static void refuse_params(const moe_model *model, const moe_session_params *p, const char *name, moe_status want);

TEST(reranking_requires_models_that_translate_back) {
    fixture *one_way = small(MW_PRODUCT, MW_F32), *both_ways = small(MW_GNMT, MW_F32);
    moe_session_params p = params_for(one_way->model);
    outcome *plain, *out;
    ask *asks = random_asks(24, 8);
    p.rerank = 0.5f;
    refuse_params(one_way->model, &p, "rerank", MOE_ERROR_UNSUPPORTED);
    p = params_for(both_ways->model);
    p.rerank = 0.5f, p.rules = MOE_RULES_TF;
    refuse_params(both_ways->model, &p, "rerank", MOE_ERROR_ARGUMENT);
    p = params_for(both_ways->model);
    p.beam = 1;
    plain = translate(both_ways, &p, asks, 8);
    p.rerank = 0.5f; /* has no effect on a single hypothesis */
    out = translate(both_ways, &p, asks, 8);
    assert_same(plain, out, 8, "reranking one hypothesis");
    free(plain), free(out), free(asks);
    drop(one_way), drop(both_ways);
}

/* ---- Beam search against the written rules ---- */

typedef struct logits_log {
    float last[MW_VOCABULARY]; /* logits of row 0 in the last step */
    size_t rows;
} logits_log;

static void keep_logits(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    logits_log *log = user;
    (void)stride;
    if (strcmp(name, "decoder.logits") != 0) return;
    assert_int_equal(cols, MW_VOCABULARY);
    memcpy(log->last, data, cols * 4);
    log->rows = rows;
}

typedef struct path {
    int32_t ids[LONGEST];
    size_t n; /* number of tokens, excluding the end token */
    double logprob, score;
    int finished;
    size_t order;
} path;

typedef struct candidate {
    double logprob;
    size_t rank;
    int32_t id;
} candidate;

static int by_logprob(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->logprob != y->logprob) return x->logprob < y->logprob ? 1 : -1;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

static int by_score(const void *a, const void *b) {
    const path *x = a, *y = b;
    if (x->finished != y->finished) return y->finished - x->finished;
    if (x->score != y->score) return x->score < y->score ? 1 : -1;
    return (x->order > y->order) - (x->order < y->order);
}

/* Search without optimisations: score every prefix from its start. Return the number of hypotheses. */
static size_t plain_beam_search(const fixture *f, moe_session *scorer, logits_log *log, const moe_session_params *p,
                                const ask *a, path *out) {
    static candidate candidates[8 * MW_VOCABULARY];
    path live[8], next[8];
    size_t n_live = 1, n_out = 0, order = 0;
    const size_t given = a->prefix ? a->n_target : 0, beam = (size_t)p->beam;
    const size_t limit =
        moe_max(given + 1, moe_min((size_t)p->max_target,
                                   (size_t)(p->max_len_factor * (float)a->n_source) + (size_t)p->max_len_offset));
    memset(live, 0, sizeof live);
    for (size_t step = 1;; step++) {
        size_t n = 0, n_next = 0;
        for (size_t h = 0; h < n_live; h++) {
            ask prefix = *a;
            outcome ignored;
            double sum = 0, max = -1e30;
            prefix.scoring = 1;
            prefix.n_target = live[h].n;
            memcpy(prefix.target, live[h].ids, sizeof prefix.target);
            translate_with(scorer, &prefix, 1, NULL, 0, &ignored);
            assert_int_equal(log->rows, 1);
            for (int32_t v = 0; v < MW_VOCABULARY; v++)
                if (!is_never(f->model, v) && (double)log->last[v] > max) max = (double)log->last[v];
            for (int32_t v = 0; v < MW_VOCABULARY; v++)
                if (!is_never(f->model, v)) sum += exp((double)log->last[v] - max);
            for (int32_t v = 0; v < MW_VOCABULARY; v++)
                if (!is_never(f->model, v))
                    candidates[n++] =
                        (candidate){ live[h].logprob + (double)log->last[v] - max - log1p(sum - 1), h, v };
        }
        qsort(candidates, n, sizeof *candidates, by_logprob);
        for (size_t c = 0; c < n && n_next < beam; c++) {
            path y = live[candidates[c].rank];
            if (step <= given && candidates[c].id != a->target[step - 1]) continue;
            if (p->prune > 0 && candidates[c].logprob < candidates[0].logprob - (double)p->prune && step > given) break;
            y.logprob = candidates[c].logprob;
            if (candidates[c].id != MW_EOS) {
                y.ids[y.n++] = candidates[c].id;
                next[n_next++] = y;
            } else if (c < beam) {
                y.finished = 1;
                y.order = order++;
                y.score = y.logprob / (double)length_penalty(p, step);
                out[n_out++] = y;
            }
        }
        memcpy(live, next, sizeof live);
        n_live = n_next;
        qsort(out, n_out, sizeof *out, by_score);
        while (p->prune > 0 && n_out && out[n_out - 1].score < out[0].score - (double)p->prune) n_out--;
        if (n_out >= beam || n_live == 0) break;
        if (step >= limit) {
            for (size_t h = 0; h < n_live; h++) {
                live[h].order = order++;
                live[h].score = live[h].logprob / (double)length_penalty(p, step);
                out[n_out++] = live[h];
            }
            qsort(out, n_out, sizeof *out, by_score);
            break;
        }
        if (n_out >= (size_t)p->nbest && out[0].score >= live[0].logprob / (double)length_penalty(p, limit)) break;
    }
    return moe_min(n_out, (size_t)p->nbest);
}

/* Compare searches with the reference; return the number of hypotheses compared. */
static size_t compare_with_the_rules(fixture *f, int variant) {
    static const struct {
        int beam, nbest;
        float alpha, prune;
    } cases[] = { { 1, 1, 0.6f, 0 }, { 2, 1, 0.6f, 0 }, { 4, 4, 0.6f, 0 },   { 4, 2, 0, 0 },
                  { 8, 3, 1.2f, 0 }, { 4, 4, 0.6f, 2 }, { 4, 1, 0.2f, 0.5f } };
    size_t hypotheses = 0;
    logits_log log;
    moe_session_params sp = params_for(f->model);
    moe_session *scorer;
    ask *asks = random_asks(91 + (uint64_t)variant, 40);
    sp.trace = keep_logits;
    sp.trace_user = &log;
    sp.isa = NULL;
    scorer = new_session(f, &sp);
    for (size_t c = 0; c < MOE_COUNT(cases); c++) {
        moe_session_params p = params_for(f->model);
        outcome *got;
        p.beam = cases[c].beam, p.nbest = cases[c].nbest, p.length_penalty = cases[c].alpha, p.prune = cases[c].prune;
        p.batch = 4;
        p.max_target = 12;
        got = translate(f, &p, asks, mw_rounds(3));
        for (size_t k = 0; k < mw_rounds(3); k++) {
            path want[32];
            const size_t n = plain_beam_search(f, scorer, &log, &p, &asks[k], want);
            CHECK(got[k].n == n, "variant %d case %zu sentence %zu: %zu hypotheses, by the rules %zu", variant, c, k,
                  got[k].n, n);
            for (size_t j = 0; j < n; j++, hypotheses++) {
                const outcome_hypothesis *y = &got[k].hypotheses[j];
                CHECK(y->n_ids == want[j].n && memcmp(y->ids, want[j].ids, y->n_ids * 4) == 0,
                      "variant %d case %zu sentence %zu: other ids in rank %zu", variant, c, k, j);
                CHECK(y->finished == want[j].finished, "variant %d case %zu sentence %zu rank %zu: finished %d",
                      variant, c, k, j, y->finished);
                CHECK(fabs((double)y->logprob - want[j].logprob) < 1e-3, "log-probability %g, by the rules %g",
                      (double)y->logprob, want[j].logprob);
                CHECK(fabs((double)y->score - want[j].score) < 1e-3, "score %g, by the rules %g", (double)y->score,
                      want[j].score);
            }
        }
        free(got);
    }
    moe_session_free(scorer);
    free(asks);
    return hypotheses;
}

TEST(beam_search_follows_the_written_rules) {
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        fixture *f = small(variant, MW_F32);
        assert_true(compare_with_the_rules(f, variant) >= 7);
        drop(f);
    }
}

/* Tokens 6 and 7, 8 and 9 etc. have equal weights, so every second candidate ties with the previous one. */
TEST(ties_go_to_the_better_rank_and_the_lower_token) {
    static const char *const tensors[] = { "source.embedding.weight", "target.embedding.weight", "output.weight",
                                           "output.bias" };
    mw_model *m = mw_small(MW_PRODUCT, MW_F32, 7);
    fixture *f;
    for (size_t t = 0; t < MOE_COUNT(tensors); t++) {
        mw_tensor *tensor = mw_find_tensor(m, tensors[t]);
        const size_t row = tensor->bytes / MW_VOCABULARY;
        for (size_t v = 6; v < MW_VOCABULARY; v += 2) memcpy(tensor->data + (v + 1) * row, tensor->data + v * row, row);
    }
    f = open_model(m);
    assert_true(compare_with_the_rules(f, MW_PRODUCT) >= 7);
    drop(f);
}

TEST(a_wide_pruning_margin_does_not_change_results) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        moe_session_params p = setting_params(i);
        outcome *out;
        if (p.prune > 0 || p.rules) continue;
        p.prune = 1e6f;
        p.isa = NULL;
        out = translate(models[i], &p, sentences, SENTENCES);
        assert_same(baselines[i], out, SENTENCES, "a wide pruning margin");
        free(out);
    }
}

TEST(pruned_hypotheses_are_within_the_margin) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        moe_session_params p = setting_params(i);
        outcome *out;
        if (p.rules || p.rerank > 0) continue;
        p.prune = 0.25f;
        out = translate(models[i], &p, sentences, SENTENCES);
        for (size_t k = 0; k < SENTENCES; k++) {
            assert_int_equal(out[k].status, MOE_OK);
            assert_true(out[k].n >= 1);
            for (size_t j = 1; j < out[k].n && out[k].hypotheses[j].finished; j++)
                CHECK(out[k].hypotheses[j].score >= out[k].hypotheses[0].score - p.prune,
                      "a hypothesis outside the margin");
        }
        free(out);
    }
}

/* ---- Constraints ---- */

/* Return random requests with constraints of one to three tokens, some of them without source tokens. Constraints of
 * one request have no tokens in common. */
static ask *constrained_asks(uint64_t seed, size_t n) {
    ask *asks = random_asks(seed, n);
    for (size_t i = 0; i < n; i++) {
        asks[i].n_constraints = mw_below(&seed, 4);
        for (size_t c = 0; c < asks[i].n_constraints; c++) {
            moe_constraint *k = &asks[i].constraints[c];
            k->n_ids = 1 + mw_below(&seed, 3);
            for (size_t t = 0; t < k->n_ids; t++)
                asks[i].constraint_ids[c][t] = 6 + (int32_t)(c + 3 * mw_below(&seed, 11));
            k->first = mw_below(&seed, asks[i].n_source);
            k->n_source = i % 3 == 0 ? 0 : 1 + mw_below(&seed, asks[i].n_source - k->first);
            k->once = i % 2;
        }
    }
    return asks;
}

static size_t count_of(const outcome_hypothesis *h, const int32_t *ids, size_t n) {
    size_t found = 0;
    for (size_t at = 0; at + n <= h->n_ids; at++) found += memcmp(h->ids + at, ids, n * sizeof *ids) == 0;
    return found;
}

/* All hypotheses contain all constraints of their request. Scores and log-probabilities follow the usual rules. */
TEST(constraints_are_met_by_every_search) {
    static const struct {
        int variant, beam, nbest, rules, max_target;
        float prune, coverage, rerank;
        int sample;
    } cases[] = {
        { MW_GNMT, 1, 1, 0, 30, 0, 0, 0, 0 },           { MW_GNMT, 1, 1, 0, 30, 2, 0, 0, 1 },
        { NLLB, 1, 1, MOE_RULES_HF, 30, 0, 0, 0, 1 },   { STUDENT, 1, 1, MOE_RULES_MARIAN, 30, 0, 0, 0, 1 },
        { MW_GNMT, 4, 4, 0, 30, 0, 0, 0, 0 },           { MW_PRODUCT, 8, 3, 0, 24, 2, 0.2f, 0, 0 },
        { MW_GNMT, 4, 2, 0, 30, 0, 0, 0.5f, 0 },        { MW_CARRIED_QUERY, 3, 3, MOE_RULES_HF, 30, 0, 0, 0, 0 },
        { MW_FROM_ENCODER, 2, 2, 0, 20, 0.5f, 0, 0, 0 }
    };
    enum { N = 40 };
    size_t constraints = 0, repeated = 0;
    for (size_t i = 0; i < MOE_COUNT(cases); i++) {
        fixture *f = small(cases[i].variant, MW_F32);
        moe_session_params p = params_for(f->model);
        ask *asks = constrained_asks(5 + i, N);
        outcome *got;
        p.beam = cases[i].beam, p.nbest = cases[i].nbest, p.rules = (moe_rules)cases[i].rules;
        p.max_target = cases[i].max_target, p.prune = cases[i].prune, p.coverage_penalty = cases[i].coverage;
        p.rerank = cases[i].rerank, p.max_constraints = 3, p.batch = 8, p.isa = NULL;
        p.sample = cases[i].sample, p.source_tag = MW_TAG_DE;
        got = translate(f, &p, asks, N);
        for (size_t k = 0; k < N; k++) {
            CHECK(got[k].status == MOE_OK && got[k].n >= 1, "case %zu request %zu: %s", i, k, got[k].message);
            for (size_t j = 0; j < got[k].n; j++)
                for (size_t c = 0; c < asks[k].n_constraints; c++, constraints++) {
                    const outcome_hypothesis *h = &got[k].hypotheses[j];
                    const size_t n = asks[k].constraints[c].n_ids, found = count_of(h, asks[k].constraint_ids[c], n);
                    CHECK(found >= 1, "case %zu request %zu hypothesis %zu lacks constraint %zu", i, k, j, c);
                    repeated += found > 1 && asks[k].constraints[c].once && !asks[k].prefix;
                }
        }
        free(got);
        free(asks);
        drop(f);
    }
    CHECK(constraints > 300 && repeated * 50 < constraints, "%zu constraints, %zu repeated", constraints, repeated);
}

/* Given all tokens before the second constraint of its own result, greedy search continues with this constraint. */
TEST(constraints_start_after_given_tokens) {
    static const int variants[] = { MW_GNMT, NLLB, MARIAN };
    size_t given = 0;
    enum { N = 12 };
    for (size_t v = 0; v < MOE_COUNT(variants); v++) {
        fixture *f = small(variants[v], MW_F32);
        moe_session_params p = params_for(f->model);
        ask *asks = random_asks(31, N);
        outcome *free_ones, *led;
        p.beam = 1, p.batch = 4, p.max_constraints = 2, p.source_tag = MW_TAG_DE;
        p.max_target = p.max_len_offset = 24;
        for (size_t k = 0; k < N; k++) {
            asks[k].prefix = 0;
            for (size_t c = asks[k].n_constraints = 2; c-- > 0;) {
                asks[k].constraints[c] = (moe_constraint){ .n_ids = 1 + c, .first = 0, .n_source = 1 };
                asks[k].constraint_ids[c][0] = (int32_t)(8 + k + 14 * c);
                asks[k].constraint_ids[c][1] = 38;
            }
        }
        free_ones = translate(f, &p, asks, N);
        for (size_t k = 0; k < N; k++) {
            const outcome_hypothesis *y = &free_ones[k].hypotheses[0];
            size_t last = 0;
            for (size_t c = 0, at; c < 2; c++, last = moe_max(last, at)) {
                for (at = 0; at < y->n_ids && y->ids[at] != asks[k].constraint_ids[c][0];) at++;
                CHECK(at < y->n_ids, "request %zu lacks constraint %zu", k, c);
            }
            if (last + 5 > (size_t)p.max_target) continue; /* rejected, since constraints might not fit */
            given += last > 0;
            asks[k].prefix = 1;
            asks[k].n_target = last;
            memcpy(asks[k].target, y->ids, last * sizeof *y->ids);
        }
        led = translate(f, &p, asks, N);
        assert_same(free_ones, led, N, "its own start");
        free(led), free(free_ones), free(asks);
        drop(f);
    }
    CHECK(given > 15, "%zu requests had given tokens", given);
}

TEST(constrained_results_do_not_depend_on_the_batch) {
    enum { N = 30 };
    static const int variants[] = { MW_GNMT, MW_GNMT, NLLB, STUDENT };
    for (size_t i = 0; i < MOE_COUNT(variants); i++) {
        const int reranked = i == 1;
        fixture *f = small(variants[i], MW_Q8);
        moe_session_params p = params_for(f->model);
        ask *asks = constrained_asks(17, N);
        outcome *one, *many;
        size_t looks = 0;
        p.beam = 4, p.nbest = 2, p.max_constraints = 3, p.max_target = 30, p.rerank = reranked ? 0.5f : 0;
        p.source_tag = MW_TAG_DE;
        one = translate(f, &p, asks, N);
        p.batch = 16, p.threads = 3, p.isa = NULL;
        many = translate(f, &p, asks, N);
        assert_same(one, many, N, "a batch");
        for (size_t k = 0; k < N; k++)
            for (size_t t = 0; t < one[k].hypotheses[0].n_ids; t++) {
                assert_in_range(one[k].hypotheses[0].sources[t] + 1, 0, asks[k].n_source);
                looks += one[k].hypotheses[0].sources[t] > 0;
            }
        CHECK(looks > N, "variant %d: %zu tokens attend to another one than the first", variants[i], looks);
        free(one);
        free(many);
        free(asks);
        drop(f);
    }
}

/* Tokens of a decoder-only model's prompt do not meet constraints. The prompt runs in pieces. */
TEST(constraints_start_after_the_prompt) {
    enum { N = 40 };
    for (int i = 0; i < 4; i++) {
        fixture *f = open_model(mw_decoder(i ? MW_Q8 : MW_F32, 3));
        moe_session_params p = params_for(f->model);
        ask *asks = constrained_asks(23, N), *free_ones = constrained_asks(23, N);
        outcome *one, *many, *none, *room;
        size_t given = 0, steps[2];
        p.beam = i == 2 ? 3 : 1, p.nbest = p.beam, p.sample = i == 3, p.max_source = 24;
        p.max_target = p.max_len_offset = 24;
        for (size_t k = 0; k < N; k++) {
            const size_t n = asks[k].n_constraints ? asks[k].constraints[0].n_ids : 0;
            asks[k].tag = free_ones[k].tag = 0;
            memcpy(asks[k].source, asks[k].constraint_ids[0],
                   n * sizeof *asks[k].source); /* the prompt contains the constraint */
            memcpy(free_ones[k].source, asks[k].source, sizeof asks[k].source);
            asks[k].n_source = free_ones[k].n_source = moe_max(asks[k].n_source, n);
            if (k % 8 == 2 && n == 3) memcpy(asks[k].target, asks[k].constraint_ids[0], 2 * sizeof *asks[k].target);
            if (k % 8 == 2 && n == 3) asks[k].n_target = 2, given++; /* the given tokens start the constraint */
            for (size_t c = 0; c < asks[k].n_constraints; c++) asks[k].constraints[c].n_source = 0;
            free_ones[k].n_constraints = 0;
        }
        none = translate(f, &p, free_ones, N);
        p.max_constraints = 3;
        room = translate(f, &p, free_ones, N);
        assert_same(none, room, N, "room for constraints");
        one = translate(f, &p, asks, N);
        for (size_t k = 0; k < N; k++) {
            CHECK(one[k].status == MOE_OK && one[k].n >= 1, "request %zu: %s", k, one[k].message);
            for (size_t j = 0; j < one[k].n; j++)
                for (size_t c = 0; c < asks[k].n_constraints; c++)
                    CHECK(count_of(&one[k].hypotheses[j], asks[k].constraint_ids[c], asks[k].constraints[c].n_ids),
                          "request %zu hypothesis %zu lacks constraint %zu", k, j, c);
        }
        for (int batch = 3; batch <= 32; batch = 2 * batch + 1) {
            p.batch = batch, p.threads = 1 + batch % 3, p.piece = batch == 7 ? 1 : batch, p.isa = NULL;
            p.context_memory = batch == 15;
            many = translate(f, &p, asks, N);
            assert_same(one, many, N, "a batch");
            free(many);
        }
        p.batch = 1, p.context_memory = 0;
        for (int small = 0; small < 2; small++) {
            p.piece = small ? 1 : 512;
            moe_session *s = new_session(f, &p);
            many = mw_zeros(N * sizeof *many);
            translate_with(s, asks, N, NULL, 0, many);
            steps[small] = moe_session_stats(s).steps;
            moe_session_free(s), free(many);
        }
        CHECK(steps[0] + 5 * N / 2 < steps[1], "%zu steps, with pieces of one row %zu", steps[0], steps[1]);
        CHECK(given > 0, "%zu given", given);
        free(one), free(none), free(room), free(asks), free(free_ones);
        drop(f);
    }
}

/* A session's capacity for constraints does not affect requests without constraints. */
MODEL_TEST(a_request_without_constraints_is_searched_as_ever, MW_GNMT, MW_F32) {
    enum { N = 30 };
    ask *asks = random_asks(23, N);
    outcome *with, *without;
    p.beam = 4, p.nbest = 4;
    without = translate(f, &p, asks, N);
    p.max_constraints = MOE_MAX_CONSTRAINTS;
    with = translate(f, &p, asks, N);
    for (size_t i = 0; i < N; i++)
        for (size_t j = 0; j < MOST; j++)
            memset(with[i].hypotheses[j].sources, 0, sizeof with[i].hypotheses[j].sources);
    assert_same(without, with, N, "room for constraints");
    free(with);
    free(without);
    free(asks);
}

MODEL_TEST(constraints_that_cannot_be_kept_are_refused, MW_GNMT, MW_F32) {
    ask *asks = constrained_asks(3, 6);
    outcome *got;
    p.max_constraints = 2, p.max_target = 8;
    for (size_t i = 0; i < 6; i++) {
        asks[i].prefix = 0, asks[i].n_constraints = 1, asks[i].n_source = 5;
        asks[i].constraints[0] = (moe_constraint){ .n_ids = 3 };
        for (size_t t = 0; t < 3; t++) asks[i].constraint_ids[0][t] = asks[i].constraint_ids[1][t] = 6;
    }
    asks[0].n_constraints = 3;
    asks[1].constraints[0].n_ids = 0;
    asks[2].constraints[0].first = 4, asks[2].constraints[0].n_source = 2;
    asks[3].constraint_ids[0][1] = MW_EOS;
    asks[4].n_constraints = 2, asks[4].constraints[1].n_ids = 3, asks[4].prefix = 1, asks[4].n_target = 2;
    got = translate(f, &p, asks, 6);
    for (size_t i = 0; i < 5; i++) CHECK(got[i].status == MOE_ERROR_ARGUMENT, "request %zu: %s", i, got[i].message);
    assert_int_equal(got[5].status, MOE_OK);
    p.rules = MOE_RULES_NVIDIA;
    refuse_params(f->model, &p, "max_constraints", MOE_ERROR_ARGUMENT);
    free(got);
    free(asks);
}

/* Keys and queries from the trace, to compute the coverage of GNMT eq 14 in double precision. */
typedef struct attention_log {
    double keys[LONGEST][12], queries[LONGEST][12];
    size_t tokens, steps;
} attention_log;

static void keep_attention(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    attention_log *log = user;
    if (strcmp(name, "encoder.keys") == 0) {
        log->tokens = rows;
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < cols; c++) log->keys[r][c] = (double)data[r * stride + c];
    } else if (strcmp(name, "decoder.query") == 0) {
        for (size_t c = 0; c < cols; c++) log->queries[log->steps][c] = (double)data[c];
        log->steps++;
    }
}

/* Attention that a session reports for a request. */
typedef struct attention_shown {
    size_t n, tokens;
    float weights[LONGEST][LONGEST];
} attention_shown;

typedef struct attention_watch {
    const outcome *first; /* the user pointers of requests point into this array */
    attention_shown *shown;
} attention_watch;

static void watch_attention(void *user, const moe_attention *a) {
    const attention_watch *watch = user;
    attention_shown *shown = &watch->shown[(const outcome *)a->user - watch->first];
    assert_in_range(a->n, 1, LONGEST);
    assert_true(a->position < LONGEST && a->position == shown->tokens);
    shown->n = a->n;
    shown->tokens++;
    memcpy(shown->weights[a->position], a->weights, a->n * sizeof *a->weights);
}

/* The coverage of a Transformer includes all previous tokens, whether generated or given. */
MODEL_TEST(given_tokens_are_covered, NLLB, MW_F32) {
    enum { N = 8 };
    ask *asks = random_asks(46, N);
    outcome *found, *led;
    size_t several = 0;
    p.source_tag = MW_TAG_DE;
    p.rules = MOE_RULES_PAPER;
    p.beam = 1;
    p.coverage_penalty = 0.4f;
    found = translate(f, &p, asks, N);
    for (size_t k = 0; k < N; k++) {
        const outcome_hypothesis *y = &found[k].hypotheses[0];
        asks[k].prefix = 1;
        asks[k].n_target = y->n_ids / 2;
        memcpy(asks[k].target, y->ids, sizeof y->ids);
        several += asks[k].n_target > 2;
    }
    led = translate(f, &p, asks, N);
    for (size_t k = 0; k < N; k++)
        CHECK(moe_to_bits(led[k].hypotheses[0].score) == moe_to_bits(found[k].hypotheses[0].score),
              "sentence %zu: %g, not %g", k, (double)led[k].hypotheses[0].score, (double)found[k].hypotheses[0].score);
    CHECK(several > 1, "%zu translations have several tokens", several);
    free(found);
    free(led);
    free(asks);
}

MODEL_TEST(coverage_penalty_is_that_of_eq_14, MW_GNMT, MW_F32) {
    ask *asks = random_asks(44, 6);
    attention_log log;
    attention_shown shown;
    attention_watch watch = { NULL, &shown };
    moe_session *s;
    float v[12];
    memcpy(v, mw_find_tensor(f->m, "attention.v")->data, sizeof v);
    p.coverage_penalty = 0.4f;
    p.trace = keep_attention;
    p.trace_user = &log;
    p.attention = watch_attention;
    p.attention_user = &watch;
    s = new_session(f, &p);
    for (size_t k = 0; k < 6; k++) {
        outcome h;
        watch.first = &h;
        memset(&shown, 0, sizeof shown);
        double coverage[LONGEST] = { 0 }, penalty = 0;
        asks[k].scoring = 1;
        asks[k].n_target = 1 + 3 * k;
        for (size_t t = 0; t < asks[k].n_target; t++) asks[k].target[t] = 6 + (int32_t)(7 * t + k) % 30;
        memset(&log, 0, sizeof log);
        translate_with(s, &asks[k], 1, NULL, 0, &h);
        assert_int_equal(log.steps, asks[k].n_target + 1);
        assert_int_equal(log.tokens, asks[k].n_source + 2);
        assert_true(shown.tokens == log.steps && shown.n == asks[k].n_source);
        for (size_t t = 0; t < log.steps; t++) {
            double scores[LONGEST], sum = 0;
            for (size_t i = 0; i < log.tokens; i++) {
                scores[i] = 0;
                for (size_t d = 0; d < 12; d++) scores[i] += (double)v[d] * tanh(log.keys[i][d] + log.queries[t][d]);
                sum += exp(scores[i]);
            }
            for (size_t i = 0; i < log.tokens; i++) coverage[i] += exp(scores[i]) / sum;
            for (size_t i = 0; i < shown.n; i++) /* the tag's weight is not reported */
                CHECK(fabs((double)shown.weights[t][i] - exp(scores[i + 1]) / sum) < 1e-5,
                      "sentence %zu, token %zu: weight %zu", k, t, i);
        }
        for (size_t i = 0; i < log.tokens; i++) penalty += log1p((coverage[i] < 1 ? coverage[i] : 1) - 1);
        penalty *= (double)p.coverage_penalty;
        CHECK(fabs((double)h.hypotheses[0].score - (double)(h.hypotheses[0].logprob / length_penalty(&p, log.steps)) -
                   penalty) < 1e-4,
              "score %g, log-probability %g, penalty %g", (double)h.hypotheses[0].score,
              (double)h.hypotheses[0].logprob, penalty);
    }
    moe_session_free(s);
    free(asks);
}

/* Attention weights do not depend on the batch or the threads. */
TEST(attention_does_not_depend_on_the_batch) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        attention_shown *shown[2];
        ask *asks;
        if ((settings[i].variant & ~(LISTED | BLOCKS)) == MARIAN) continue; /* no alignment heads in the file */
        asks = copied_sentences();
        for (size_t k = 0; k < SENTENCES; k++) {
            asks[k].scoring = 1;
            give_target(asks, k, k % 9);
        }
        for (int round = 0; round < 2; round++) {
            outcome *out = mw_zeros(SENTENCES * sizeof *out);
            attention_watch watch = { out, shown[round] = mw_zeros(SENTENCES * sizeof **shown) };
            moe_session_params p = setting_params(i);
            moe_session *s;
            p.isa = round ? NULL : "portable";
            p.batch = round ? 7 : 1;
            p.threads = 1 + 2 * round;
            p.attention = watch_attention;
            p.attention_user = &watch;
            s = new_session(models[i], &p);
            translate_with(s, asks, SENTENCES, NULL, round, out);
            moe_session_free(s);
            free(out);
        }
        assert_memory_equal(shown[0], shown[1], SENTENCES * sizeof **shown);
        for (size_t k = 0; k < SENTENCES; k++)
            assert_true(shown[0][k].tokens == asks[k].n_target + 1 && shown[0][k].n == asks[k].n_source);
        free(shown[0]), free(shown[1]), free(asks);
    }
}

/* Keys and queries of a Transformer's cross-attention, from the trace. */
typedef struct heads_log {
    double keys[LONGEST][MW_WIDTH], queries[LONGEST][MW_WIDTH];
    size_t tokens, steps;
} heads_log;

static void keep_heads(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    heads_log *log = user;
    const int keys = strcmp(name, "decoder.1.kv") == 0;
    (void)cols;
    for (size_t r = 0; r < rows && (keys || strcmp(name, "decoder.1.q") == 0); r++) {
        double *to = keys ? log->keys[log->tokens++] : log->queries[log->steps++];
        for (size_t c = 0; c < MW_WIDTH; c++) to[c] = (double)data[r * stride + c];
    }
}

/* A session reports the mean of heads 0 and 3, which align.heads selects, but not the weights of the forced tag. */
MODEL_TEST(a_transformer_shows_the_heads_that_align, NLLB, MW_F32) {
    enum { HEADS = 4, HEAD = MW_WIDTH / HEADS };
    ask *asks = random_asks(45, 6);
    heads_log log;
    attention_shown shown;
    attention_watch watch = { NULL, &shown };
    moe_session *s;
    p.trace = keep_heads, p.trace_user = &log;
    p.attention = watch_attention, p.attention_user = &watch;
    p.source_tag = MW_TAG_DE;
    s = new_session(f, &p);
    for (size_t k = 0; k < 6; k++) {
        outcome h;
        watch.first = &h;
        memset(&shown, 0, sizeof shown);
        memset(&log, 0, sizeof log);
        asks[k].scoring = 1;
        asks[k].n_target = 1 + k;
        for (size_t t = 0; t < asks[k].n_target; t++) asks[k].target[t] = 6 + (int32_t)(7 * t + k) % 30;
        translate_with(s, &asks[k], 1, NULL, 0, &h);
        assert_int_equal(h.status, MOE_OK);
        assert_int_equal(log.steps, asks[k].n_target + 2);
        assert_int_equal(log.tokens, asks[k].n_source + 2);
        assert_true(shown.tokens == log.steps - 1 && shown.n == asks[k].n_source);
        for (size_t t = 0; t < shown.tokens; t++) {
            double weights[LONGEST] = { 0 };
            for (size_t at = 0; at < MW_WIDTH; at += 3 * HEAD) {
                double scores[LONGEST] = { 0 }, sum = 0;
                for (size_t i = 0; i < log.tokens; i++) {
                    for (size_t d = at; d < at + HEAD; d++) scores[i] += log.keys[i][d] * log.queries[t + 1][d];
                    sum += scores[i] = exp(scores[i] / sqrt(HEAD));
                }
                for (size_t i = 0; i < log.tokens; i++) weights[i] += scores[i] / sum / 2;
            }
            for (size_t i = 0; i < shown.n; i++) /* the tag's weight is not reported */
                CHECK(fabs((double)shown.weights[t][i] - weights[i + 1]) < 1e-5, "sentence %zu, token %zu: weight %zu",
                      k, t, i);
        }
    }
    moe_session_free(s);
    free(asks);
}

/* A raw request contains the tag and the end token, so their weights are reported too. */
MODEL_TEST(attention_on_a_raw_request_covers_all_of_its_tokens, MW_GNMT, MW_F32) {
    ask asks[2] = { { .source = { 9, 17, 8 }, .n_source = 3, .target = { 11, 12 }, .n_target = 2, .scoring = 1 },
                    { .source = { MW_TAG_EN, 9, 17, 8, MW_EOS },
                      .n_source = 5,
                      .target = { 11, 12 },
                      .n_target = 2,
                      .scoring = 1,
                      .raw = 1 } };
    outcome out[2];
    attention_shown shown[2] = { { .n = 0 } };
    attention_watch watch = { out, shown };
    moe_session *s;
    p.attention = watch_attention;
    p.attention_user = &watch;
    s = new_session(f, &p);
    translate_with(s, asks, 2, NULL, 0, out);
    assert_int_equal(shown[0].n, 3);
    assert_int_equal(shown[1].n, 5);
    assert_int_equal(shown[1].tokens, 3);
    for (size_t t = 0; t < shown[1].tokens; t++) {
        double sum = 0;
        for (size_t i = 0; i < 5; i++) sum += (double)shown[1].weights[t][i];
        CHECK(fabs(sum - 1) < 1e-5, "weights of token %zu add up to %g", t, sum);
        assert_memory_equal(shown[1].weights[t] + 1, shown[0].weights[t], 3 * sizeof(float));
    }
    moe_session_free(s);
}

/* ---- Shortlists ---- */

/* Mark the tokens that a sentence may use: those listed for its source tokens, tag and end, and given tokens. */
static void list_by_hand(mw_model *m, const ask *a, int32_t tag, char listed[MW_VOCABULARY]) {
    const float *offsets = (const float *)(const void *)mw_find_tensor(m, "shortlist.offsets")->data;
    const float *ids = (const float *)(const void *)mw_find_tensor(m, "shortlist.ids")->data;
    size_t n = 0, more = 4;
    memset(listed, 0, MW_VOCABULARY);
    memset(listed, 1, 4);
    for (size_t i = 0; i < a->n_source + 2; i++) {
        const int32_t id = i == 0 ? tag : i <= a->n_source ? a->source[i - 1] : MW_EOS;
        listed[id] = 1;
        for (size_t k = (size_t)offsets[id]; k < (size_t)offsets[id + 1]; k++) listed[(size_t)ids[k]] = 1;
    }
    for (size_t i = 0; i < MW_VOCABULARY; i++) n += (size_t)listed[i];
    for (; n % 4 && more < MW_VOCABULARY; more++) n += (size_t)!listed[more], listed[more] = 1;
    for (size_t i = 0; i < a->n_target; i++) listed[a->target[i]] = 1;
    for (size_t c = 0; c < a->n_constraints; c++)
        for (size_t i = 0; i < a->constraints[c].n_ids; i++) listed[a->constraint_ids[c][i]] = 1;
}

/* A softmax over a shortlist equals a softmax that excludes all other tokens by "token.never". */
MODEL_TEST(a_list_leaves_out_all_other_tokens, MW_GNMT | LISTED, MW_F32) {
    enum { N = 40 };
    ask *asks = constrained_asks(23, N);
    size_t smaller = 0, outside = 0;
    p.beam = p.nbest = 4, p.max_constraints = 3, p.max_target = 30;
    for (size_t k = 0; k < N; k++) asks[k].scoring = k % 5 == 0, asks[k].n_target = k % 5 ? asks[k].n_target : 3;
    for (size_t k = 0; k < N; k += 5) give_target(asks, k, 3), asks[k].prefix = 0, asks[k].n_constraints = 0;
    outcome *got = translate(f, &p, asks, N);
    for (size_t k = 0; k < N; k++) {
        static const int64_t always[] = { 0, 1, 2, 4, 5 };
        char listed[MW_VOCABULARY], without[MW_VOCABULARY];
        int64_t never[MW_VOCABULARY + 5];
        ask source_only = asks[k];
        size_t n = 0;
        source_only.n_target = source_only.n_constraints = 0;
        list_by_hand(f->m, &asks[k], asks[k].tag ? asks[k].tag : MW_TAG_EN, listed);
        list_by_hand(f->m, &source_only, asks[k].tag ? asks[k].tag : MW_TAG_EN, without);
        outside += memcmp(listed, without, sizeof listed) != 0;
        for (int i = 0; i < 5; i++) listed[always[i]] = 0;
        for (int64_t i = 0; i < MW_VOCABULARY; i++)
            if (!listed[i]) never[n++] = i;
        smaller += n > 8;
        mw_model *m = small_model(MW_GNMT, MW_F32);
        mw_ints(m, "token.never", never, n);
        fixture *all = open_model(m);
        p.shortlist = 0;
        outcome *want = translate(all, &p, &asks[k], 1);
        CHECK(got[k].status == want->status && got[k].n == want->n, "request %zu: %s, %s", k, got[k].message,
              want->message);
        for (size_t h = 0; h < want->n; h++) {
            const outcome_hypothesis *a = &got[k].hypotheses[h], *b = &want->hypotheses[h];
            CHECK(a->n_ids == b->n_ids && memcmp(a->ids, b->ids, a->n_ids * sizeof *a->ids) == 0 &&
                      fabsf(a->score - b->score) < 1e-5f && fabsf(a->logprob - b->logprob) < 1e-4f,
                  "request %zu hypothesis %zu: %g, %g", k, h, (double)a->score, (double)b->score);
        }
        free(want);
        drop(all);
    }
    CHECK(smaller > 20 && outside > 10, "%zu lists are short, %zu requests have tokens outside", smaller, outside);
    free(asks);
    free(got);
}

/* If a shortlist omits an end token that is never generated, the token must not have the score of another sentence. */
TEST(an_excluded_end_scores_minus_infinity) {
    const int64_t never[] = { 0, 1, MW_EOS, 4, 5 };
    for (int variant = MW_GNMT; variant <= (MW_GNMT | LISTED); variant += LISTED) {
        mw_model *m = small_model(variant, MW_Q8);
        mw_ints(m, "token.never", never, 5);
        fixture *f = open_model(m);
        moe_session_params p = params_for(f->model);
        ask *asks = random_asks(5, 12);
        for (size_t k = 0; k < 12; k++) asks[k].scoring = 1, asks[k].prefix = 0, give_target(asks, k, 1 + k % 4);
        outcome *got = translate(f, &p, asks, 12);
        for (size_t k = 0; k < 12; k++) {
            const outcome_hypothesis *h = got[k].hypotheses;
            assert_int_equal(got[k].n, 1);
            for (size_t i = 0; i < h->n_ids; i++) assert_true(h->logprobs[i] >= -FLT_MAX);
            assert_true(h->logprobs[h->n_ids] < -FLT_MAX);
        }
        free(got), free(asks);
        drop(f);
    }
}

TEST(without_its_list_a_model_uses_all_tokens) {
    fixture *listed = small(MW_GNMT | LISTED, MW_Q8), *plain = small(MW_GNMT, MW_Q8);
    moe_session_params p = params_for(listed->model), q = params_for(plain->model);
    ask *asks = random_asks(3, 20);
    moe_session *s = NULL;
    moe_error e = { MOE_OK, "", "" };
    assert_int_equal(p.shortlist, 1);
    assert_int_equal(q.shortlist, 0);
    p.shortlist = 0;
    outcome *a = translate(listed, &p, asks, 20), *b = translate(plain, &q, asks, 20);
    assert_same(a, b, 20, "an unused list");
    q.shortlist = 1;
    assert_int_equal(moe_session_new(plain->model, &q, &s, &e), MOE_ERROR_UNSUPPORTED);
    assert_string_equal(e.where, "shortlist");
    free(a), free(b), free(asks);
    drop(listed), drop(plain);
}

TEST(invalid_lists_are_refused) {
    static const struct {
        const char *tensor, *where;
        size_t at;
        float value;
    } errors[] = { { "shortlist.offsets", "tensor shortlist.ids", 0, 1 },
                   { "shortlist.offsets", "tensor shortlist.ids", 5, 0 },
                   { "shortlist.offsets", "tensor shortlist.ids", 7, 1e9f },
                   { "shortlist.offsets", "tensor shortlist.ids", 7, 2.5f },
                   { "shortlist.offsets", "tensor shortlist.ids", MW_VOCABULARY, 3 },
                   { "shortlist.offsets", "tensor shortlist.offsets", 3, INFINITY },
                   { "shortlist.ids", "tensor shortlist.ids", 2, -1 },
                   { "shortlist.ids", "tensor shortlist.ids", 2, MW_VOCABULARY },
                   { "shortlist.ids", "tensor shortlist.ids", 2, 7.5f },
                   { "shortlist.ids", "tensor shortlist.ids", 1, 0 },
                   { "shortlist.ids", "tensor shortlist.ids", 1, NAN } };
    static const struct {
        const char *key;
        int64_t value;
    } keys[] = { { "shortlist.first", -1 },   { "shortlist.first", MW_VOCABULARY + 1 },
                 { "shortlist.multiple", 0 }, { "shortlist.multiple", 2000 },
                 { "shortlist.shared", 2 },   { "shortlist.entries", 1 << 24 } };
    for (size_t i = 0; i < MOE_COUNT(errors) + MOE_COUNT(keys) + 1; i++) {
        float offsets[MW_VOCABULARY + 1];
        const float ids[] = { 3, 8, 11, 2 }; /* token 0 has three ids, token 1 has one, all others have none */
        mw_model *m = small_model(MW_GNMT, MW_F32);
        moe_model *model = NULL;
        moe_error e = { MOE_OK, "", "" };
        const size_t key = i - MOE_COUNT(errors);
        for (size_t t = 0; t <= MW_VOCABULARY; t++) offsets[t] = t == 0 ? 0 : t == 1 ? 3 : 4;
        mw_shortlist(m, MW_VOCABULARY, offsets, ids, 4, 4);
        if (i < MOE_COUNT(errors))
            memcpy(mw_find_tensor(m, errors[i].tensor)->data + 4 * errors[i].at, &errors[i].value, 4);
        else if (key < MOE_COUNT(keys)) mw_int(m, keys[key].key, keys[key].value);
        mw_image image = mw_build(m);
        const moe_status status = moe_model_open_memory(image.data, image.bytes, NULL, &model, &e);
        const char *where = i < MOE_COUNT(errors) ? errors[i].where : key < MOE_COUNT(keys) ? keys[key].key : "";
        CHECK(status == (*where ? MOE_ERROR_FORMAT : MOE_OK) && strcmp(e.where, where) == 0, "%zu: %s: %s", i, e.where,
              e.message);
        moe_model_close(model);
        free(image.data);
        mw_free(m);
    }
}

/* Values are checked in blocks. The first invalid value is named, wherever it is in its block. */
TEST(the_first_invalid_number_is_named) {
    enum { ALL = 15 * MW_VOCABULARY };
    static const size_t places[] = { 0, 255, 256, 300, 511, 512, ALL - 1, ALL };
    for (size_t i = 0; i < MOE_COUNT(places); i++) {
        float offsets[MW_VOCABULARY + 1], ids[ALL];
        char wanted[80];
        mw_model *m = small_model(MW_GNMT, MW_F32);
        moe_model *model = NULL;
        moe_error e = { MOE_OK, "", "" };
        for (size_t t = 0; t <= MW_VOCABULARY; t++) offsets[t] = (float)(15 * t);
        for (size_t k = 0; k < ALL; k++) ids[k] = k < places[i] ? (float)(k % 15) : k % 2 ? INFINITY : NAN;
        mw_shortlist(m, MW_VOCABULARY, offsets, ids, ALL, 4);
        mw_image image = mw_build(m);
        const moe_status status = moe_model_open_memory(image.data, image.bytes, NULL, &model, &e);
        snprintf(wanted, sizeof wanted, "is not finite at element %zu", places[i]);
        if (places[i] == ALL) assert_int_equal(status, MOE_OK);
        else assert_non_null(strstr(e.message, wanted));
        moe_model_close(model);
        free(image.data);
        mw_free(m);
    }
}

/* ---- Limits ---- */

TEST(target_is_cut_at_the_length_limit) {
    static const struct {
        float factor;
        int offset, max_target;
        size_t limit; /* limit for a source of five tokens */
    } cases[] = { { 0, 3, 30, 3 },   { 0, 0, 30, 1 },      { 0.5f, 0, 30, 2 }, { 1.9f, 1, 30, 10 },
                  { 1e6f, 5, 7, 7 }, { 1, 1 << 20, 9, 9 }, { 0, 2, 2, 2 } };
    fixture *f = small(MW_GNMT, MW_F32);
    ask *asks = random_asks(6, 12);
    for (size_t k = 0; k < 12; k++) asks[k].n_source = 5, asks[k].n_target = moe_min(1, asks[k].n_target);
    for (size_t c = 0; c < MOE_COUNT(cases); c++)
        for (int beam = 1; beam <= 4; beam += 3) {
            moe_session_params p = params_for(f->model);
            outcome *out;
            size_t cut = 0;
            p.beam = p.nbest = beam;
            p.max_len_factor = cases[c].factor, p.max_len_offset = cases[c].offset, p.max_target = cases[c].max_target;
            out = translate(f, &p, asks, 12);
            for (size_t k = 0; k < 12; k++)
                for (size_t j = 0; j < out[k].n; j++) {
                    const outcome_hypothesis *y = &out[k].hypotheses[j];
                    const size_t limit =
                        moe_max(cases[c].limit, asks[k].n_target + 1); /* one token after the given tokens */
                    CHECK(y->n_ids + (size_t)y->finished <= limit, "case %zu: %zu tokens", c, y->n_ids);
                    CHECK(y->finished || y->n_ids == limit, "case %zu: cut at %zu", c, y->n_ids);
                    cut += !y->finished;
                }
            CHECK(cut > 0, "case %zu: no translation was cut", c);
            free(out);
        }
    free(asks);
    drop(f);
}

TEST(translations_have_the_minimum_length) {
    fixture *f = small(MW_GNMT, MW_F32);
    ask *asks = random_asks(6, 12);
    size_t shorter = 0;
    for (int beam = 1; beam <= 4; beam += 3)
        for (int least = 0; least <= 9; least += 3) {
            moe_session_params p = params_for(f->model);
            outcome *out;
            p.beam = p.nbest = beam;
            p.max_len_factor = 0, p.max_len_offset = 9, p.max_target = 20;
            p.min_target = least;
            out = translate(f, &p, asks, 12);
            for (size_t k = 0; k < 12; k++)
                for (size_t j = 0; j < out[k].n; j++) {
                    const outcome_hypothesis *y = &out[k].hypotheses[j];
                    CHECK(y->n_ids >= (size_t)least, "%zu tokens instead of at least %d", y->n_ids, least);
                    CHECK(least < 9 || (y->n_ids == 9 && !y->finished), "%zu tokens instead of the forced 9", y->n_ids);
                    shorter += least == 0 && y->n_ids < 6;
                }
            free(out);
        }
    assert_true(shorter > 0);
    free(asks);
    drop(f);
}

/* Sampled tokens have the probability that scoring returns, whether or not the end token was allowed. */
TEST(a_minimum_length_does_not_change_probabilities) {
    for (int suppressed = 0; suppressed < 2; suppressed++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        const int64_t never[] = { 9, 11 };
        fixture *f;
        ask *asks = random_asks(6, 12), *again = mw_zeros(12 * sizeof *again);
        outcome *out, *scored;
        moe_session_params p;
        if (suppressed) mw_ints(m, "token.suppressed", never, 2);
        f = open_model(m);
        p = params_for(f->model);
        p.max_len_factor = 0, p.max_len_offset = 9, p.max_target = 20;
        p.min_target = 6;
        out = translate(f, &p, asks, 12);
        for (size_t k = 0; k < 12; k++) {
            again[k] = asks[k];
            again[k].scoring = 1;
            again[k].n_target = out[k].hypotheses[0].n_ids;
            memcpy(again[k].target, out[k].hypotheses[0].ids, sizeof again[k].target);
        }
        scored = translate(f, &p, again, 12);
        for (size_t k = 0; k < 12; k++) {
            const outcome_hypothesis *y = &out[k].hypotheses[0];
            assert_true(y->n_ids >= 6);
            assert_memory_equal(y->logprobs, scored[k].hypotheses[0].logprobs, y->n_ids * sizeof *y->logprobs);
        }
        free(out), free(scored), free(asks), free(again);
        drop(f);
    }
}

TEST(sources_beyond_max_source_are_refused) {
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        fixture *f = small(variant, MW_Q8);
        ask asks[30];
        outcome out[30], alone[30];
        moe_session_params p = params_for(f->model);
        const size_t extra =
            variant == MW_BOTH_CONTEXTS || variant == MW_FROM_ENCODER ? 1 : 2; /* tag or begin token, and end token */
        moe_session *s;
        uint64_t random = 8;
        memset(asks, 0, sizeof asks);
        for (size_t k = 0; k < 30; k++) {
            asks[k].n_source = 30 - extra + (k % 3 == 2 ? 1 + k % 2 : 0);
            for (size_t i = 0; i < asks[k].n_source; i++)
                asks[k].source[i] = 6 + (int32_t)mw_below(&random, MW_VOCABULARY - 6);
        }
        p.max_source = 30;
        p.beam = 2;
        s = new_session(f, &p);
        translate_with(s, asks, 30, NULL, 0, alone);
        moe_session_free(s);
        p.batch = 9;
        s = new_session(f, &p);
        translate_with(s, asks, 30, NULL, 0, out);
        moe_session_free(s);
        for (size_t k = 0; k < 30; k++) {
            const int too_long = k % 3 == 2;
            CHECK(out[k].status == (too_long ? MOE_ERROR_LIMIT : MOE_OK), "sentence %zu: %s", k, out[k].message);
            if (too_long) {
                char number[16];
                snprintf(number, sizeof number, "%zu", asks[k].n_source + extra);
                assert_non_null(strstr(out[k].message, number));
                assert_non_null(strstr(out[k].message, "30"));
                assert_int_equal(out[k].n, 0);
            }
            assert_memory_equal(&out[k], &alone[k], sizeof out[k]);
        }
        drop(f);
    }
}

MODEL_TEST(targets_up_to_max_target_are_taken_and_longer_ones_refused, MW_GNMT, MW_F32) {
    ask *asks = random_asks(9, 3);
    outcome *out;
    p.max_target = 12;
    for (int scoring = 0; scoring <= 1; scoring++) {
        for (size_t k = 0; k < 3; k++) {
            asks[k].scoring = scoring, asks[k].prefix = !scoring;
            asks[k].n_target = 10 + k;
            for (size_t i = 0; i < 12; i++) asks[k].target[i] = 7;
        }
        out = translate(f, &p, asks, 3);
        assert_int_equal(out[0].status, MOE_OK);
        assert_int_equal(out[1].status, MOE_OK);
        assert_in_range(out[1].hypotheses[0].n_ids, 11, scoring ? 11 : 12);
        assert_int_equal(out[2].status, MOE_ERROR_LIMIT);
        assert_non_null(strstr(out[2].message, "13"));
        free(out);
    }
    free(asks);
}

/* ---- Requests ---- */

TEST(invalid_requests_fail_separately) {
    fixture *f = models[1];
    ask *asks = copied_sentences();
    moe_session_params p = setting_params(1);
    outcome *out;
    asks[1].source[0] = -1;
    asks[3].source[asks[3].n_source - 1] = MW_VOCABULARY;
    asks[4].n_source = LONGEST;
    asks[6].scoring = 1, asks[6].n_target = 2, asks[6].target[0] = 7, asks[6].target[1] = MW_VOCABULARY;
    asks[7].scoring = 1, asks[7].n_target = 1, asks[7].target[0] = -7;
    asks[9].tag = -1;
    asks[10].tag = MW_VOCABULARY;
    asks[12].scoring = 1, asks[12].n_target = 1, asks[12].target[0] = MW_EOS;
    asks[13].prefix = 1, asks[13].n_target = 1, asks[13].target[0] = MW_TAG_DE; /* this token is never generated */
    asks[15].source[0] = INT32_MAX;
    asks[16].source[0] = INT32_MIN;
    for (size_t i = 0; i < LONGEST; i++)
        if (asks[4].source[i] == 0) asks[4].source[i] = 9;
    for (int batch = 1; batch <= 8; batch += 7) {
        p.batch = batch;
        out = translate(f, &p, asks, SENTENCES);
        for (size_t k = 0; k < SENTENCES; k++) {
            static const struct {
                size_t at;
                moe_status status;
                const char *says;
            } broken[] = { { 1, MOE_ERROR_ARGUMENT, "-1" },
                           { 3, MOE_ERROR_ARGUMENT, "40" },
                           { 4, MOE_ERROR_LIMIT, "42" },
                           { 6, MOE_ERROR_ARGUMENT, "40" },
                           { 7, MOE_ERROR_ARGUMENT, "-7" },
                           { 9, MOE_ERROR_ARGUMENT, "tag" },
                           { 10, MOE_ERROR_ARGUMENT, "tag" },
                           { 12, MOE_ERROR_ARGUMENT, "3" },
                           { 13, MOE_ERROR_ARGUMENT, "5" },
                           { 15, MOE_ERROR_ARGUMENT, "2147483647" },
                           { 16, MOE_ERROR_ARGUMENT, "-2147483648" } };
            size_t b = 0;
            while (b < MOE_COUNT(broken) && broken[b].at != k) b++;
            if (b == MOE_COUNT(broken)) {
                assert_memory_equal(&out[k], &baselines[1][k], sizeof out[k]);
            } else {
                CHECK(out[k].status == broken[b].status, "request %zu: %s, %s", k, moe_status_name(out[k].status),
                      out[k].message);
                CHECK(strstr(out[k].message, broken[b].says) != NULL, "request %zu: '%s' does not say %s", k,
                      out[k].message, broken[b].says);
                assert_int_equal(out[k].n, 0);
            }
        }
        free(out);
    }
    free(asks);
}

TEST(requests_without_a_required_tag_are_refused) {
    fixture *f = small(MW_GNMT, MW_F32);
    moe_session_params p = params_for(f->model);
    ask *asks = random_asks(3, 2);
    outcome *out;
    p.target_tag = -1;
    asks[0].tag = MW_TAG_DE;
    asks[1].tag = 0;
    out = translate(f, &p, asks, 2);
    assert_int_equal(out[0].status, MOE_OK);
    assert_int_equal(out[1].status, MOE_ERROR_ARGUMENT);
    assert_non_null(strstr(out[1].message, "tag"));
    free(out);
    drop(f);
    f = small(MW_PRODUCT, MW_F32); /* this model has no tags, so requests need none */
    p = params_for(f->model);
    p.target_tag = -1;
    asks[0].tag = 0;
    out = translate(f, &p, asks, 2);
    assert_int_equal(out[0].status, MOE_OK);
    assert_int_equal(out[1].status, MOE_OK);
    free(out);
    free(asks);
    drop(f);
}

MODEL_TEST(the_tag_chooses_the_language, MW_GNMT, MW_F32) {
    ask *asks = random_asks(3, 10);
    outcome *a, *b, *c;
    size_t different = 0;
    for (size_t k = 0; k < 10; k++) asks[k].tag = MW_TAG_DE;
    a = translate(f, &p, asks, 10);
    for (size_t k = 0; k < 10; k++) asks[k].tag = 0;
    b = translate(f, &p, asks, 10);
    p.target_tag = MW_TAG_DE;
    c = translate(f, &p, asks, 10);
    for (size_t k = 0; k < 10; k++) different += memcmp(&a[k], &b[k], sizeof a[k]) != 0;
    assert_true(different > 5);
    assert_same(a, c, 10, "the position of the tag");
    free(a), free(b), free(c), free(asks);
}

TEST(an_empty_source_gives_an_empty_translation) {
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        fixture *f = small(variant, MW_F32);
        moe_session_params p = params_for(f->model);
        ask asks[3];
        outcome *out;
        memset(asks, 0, sizeof asks);
        asks[1].n_source = 1;
        asks[1].source[0] = 9;
        p.nbest = p.beam = 4;
        out = translate(f, &p, asks, 3);
        for (size_t k = 0; k < 3; k += 2) {
            assert_int_equal(out[k].status, MOE_OK);
            assert_int_equal(out[k].n, 1);
            assert_int_equal(out[k].hypotheses[0].n_ids, 0);
        }
        assert_true(out[1].n >= 1);
        free(out);
        drop(f);
    }
}

TEST(an_empty_source_and_an_empty_target_can_be_scored) {
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        fixture *f = small(variant, MW_F32);
        moe_session_params p = params_for(f->model);
        ask asks[3];
        outcome *out;
        memset(asks, 0, sizeof asks);
        for (size_t k = 0; k < 3; k++) asks[k].scoring = 1;
        asks[0].n_target = 2, asks[0].target[0] = 8, asks[0].target[1] = 9;
        asks[2].n_source = 2, asks[2].source[0] = 8, asks[2].source[1] = 9;
        out = translate(f, &p, asks, 3);
        for (size_t k = 0; k < 3; k++) {
            assert_int_equal(out[k].status, MOE_OK);
            assert_int_equal(out[k].n, 1);
            assert_int_equal(out[k].hypotheses[0].n_ids, asks[k].n_target);
            assert_true(out[k].hypotheses[0].finished && out[k].hypotheses[0].logprob < 0);
        }
        free(out);
        drop(f);
    }
}

MODEL_TEST(no_requests_at_all_is_fine, MW_GNMT, MW_F32) {
    moe_session *s = new_session(f, &p);
    request_feed feed = { .n = 0 };
    moe_error e;
    assert_int_equal(moe_translate(s, pull, done, &feed, &e), MOE_OK);
    assert_int_equal(moe_translate(s, pull, done, &feed, NULL), MOE_OK);
    moe_session_free(s);
    moe_session_free(NULL);
}

TEST(a_cancelled_session_can_be_used_again) {
    for (size_t i = 0; i < settings_in_use(); i += 3)
        for (size_t after = 1; after < 20; after += 3) {
            moe_session_params p = setting_params(i);
            moe_session *s;
            outcome *out = mw_zeros(SENTENCES * sizeof *out);
            request_feed feed = { .asks = sentences,
                                  .n = SENTENCES,
                                  .outcome = out,
                                  .cancel_after = after,
                                  .later = after % 2 == 0 };
            moe_error e;
            p.batch = 5;
            p.threads = 2;
            p.isa = NULL;
            s = new_session(models[i], &p);
            if (after % 2) feed.cancelled = s;
            memset(&e, 0, sizeof e);
            assert_int_equal(moe_translate(s, pull, done, &feed, &e), MOE_ERROR_CANCELLED);
            assert_int_equal(e.code, MOE_ERROR_CANCELLED);
            for (size_t k = 0; k < SENTENCES; k++) {
                assert_true(out[k].delivered <= (k < after || feed.cancelled));
                if (out[k].delivered) assert_memory_equal(&out[k], &baselines[i][k], sizeof out[k]);
            }
            translate_with(s, sentences, SENTENCES, NULL, 0, out);
            assert_same(baselines[i], out, SENTENCES, "a cancelled run");
            moe_session_free(s);
            free(out);
        }
}

/* Trace that cancels a session after `after` nodes and counts the nodes that follow. */
typedef struct cancel_in_graph {
    moe_session *session;
    size_t after, seen, late;
} cancel_in_graph;

static void cancel_after_node(void *user, const char *name, const float *data, size_t rows, size_t cols,
                              size_t stride) {
    cancel_in_graph *c = user;
    (void)data, (void)rows, (void)cols, (void)stride;
    if (strstr(name, ".probabilities") || strstr(name, ".sizes")) return; /* traced together with a gate or experts */
    c->late += c->seen > c->after;
    if (c->seen++ == c->after) moe_session_cancel(c->session);
}

TEST(a_call_can_end_within_a_graph) {
    for (size_t i = 0; i < settings_in_use(); i += 4)
        for (size_t after = 0; after < 400; after = after * 3 / 2 + 1) {
            moe_session_params p = setting_params(i);
            cancel_in_graph c = { .after = after };
            outcome *out = mw_zeros(SENTENCES * sizeof *out);
            request_feed feed = { .asks = sentences, .n = SENTENCES, .outcome = out };
            p.threads = 1 + (int)(i / 4) % 2;
            p.isa = NULL;
            p.trace = cancel_after_node;
            p.trace_user = &c;
            moe_session *s = c.session = new_session(models[i], &p);
            assert_int_equal(moe_translate(s, pull, done, &feed, NULL), MOE_ERROR_CANCELLED);
            CHECK(!c.late, "setting %zu: %zu nodes were run after a cancel at node %zu", i, c.late, after);
            for (size_t k = 0; k < SENTENCES; k++)
                if (out[k].delivered) assert_memory_equal(&out[k], &baselines[i][k], sizeof out[k]);
            c.seen = SIZE_MAX / 2, c.after = SIZE_MAX;
            translate_with(s, sentences, SENTENCES, NULL, 0, out);
            assert_same(baselines[i], out, SENTENCES, "a run that ended in a graph");
            moe_session_free(s);
            free(out);
        }
}

/* A thread that cancels at random times, even within a task. The run ends or completes, and later runs are
 * unaffected. */
typedef struct canceller {
    moe_session *session;
    unsigned microseconds;
} canceller;

static void *cancel_later(void *user) {
    const canceller *c = user;
    const struct timespec t = { 0, (long)c->microseconds * 1000 };
    nanosleep(&t, NULL);
    moe_session_cancel(c->session);
    return NULL;
}

TEST(another_thread_can_cancel_at_any_moment) {
    size_t cancelled = 0;
    for (size_t i = 1; i < settings_in_use(); i += 6) {
        moe_session_params p = setting_params(i);
        p.threads = 2;
        p.isa = NULL;
        moe_session *s = new_session(models[i], &p);
        outcome *out = mw_zeros(SENTENCES * sizeof *out);
        for (unsigned round = 0; round < 12; round++) {
            canceller c = { s, 200 * round };
            request_feed feed = { .asks = sentences, .n = SENTENCES, .outcome = out };
            pthread_t thread;
            memset(out, 0, SENTENCES * sizeof *out);
            assert_int_equal(pthread_create(&thread, NULL, cancel_later, &c), 0);
            const moe_status status = moe_translate(s, pull, done, &feed, NULL);
            assert_int_equal(pthread_join(thread, NULL), 0);
            assert_true(status == MOE_OK || status == MOE_ERROR_CANCELLED);
            cancelled += status == MOE_ERROR_CANCELLED;
            for (size_t k = 0; k < SENTENCES; k++)
                if (out[k].delivered) assert_memory_equal(&out[k], &baselines[i][k], sizeof out[k]);
            feed = (request_feed){ .outcome = out };
            if (!status) assert_int_equal(moe_translate(s, pull, done, &feed, NULL), MOE_ERROR_CANCELLED);
        }
        translate_with(s, sentences, SENTENCES, NULL, 0, out);
        assert_same(baselines[i], out, SENTENCES, "runs that another thread cancelled");
        moe_session_free(s);
        free(out);
    }
    assert_true(cancelled > 0);
}

/* A session continues while its caller has no requests: it delivers a result even if no other request follows. */
typedef struct slow_feed {
    request_feed feed;
    size_t waits, laters, returned_at;
} slow_feed;

static int slow_pull(void *user, int wait, moe_request *r) {
    slow_feed *s = user;
    if (wait) s->waits++;
    if (s->feed.next == 1 && !s->feed.outcome[0].delivered) {
        CHECK(!wait, "asked to wait while a sentence is active");
        s->laters++;
        return MOE_PULL_LATER;
    }
    return pull(&s->feed, wait, r);
}

TEST(work_continues_while_the_caller_has_no_requests) {
    moe_session_params p = setting_params(1);
    moe_session *s;
    outcome out[3];
    slow_feed slow = { .feed = { .asks = sentences, .n = 3, .outcome = out } };
    moe_error e;
    memset(out, 0, sizeof out);
    p.batch = 4;
    s = new_session(models[1], &p);
    assert_int_equal(moe_translate(s, slow_pull, done, &slow, &e), MOE_OK);
    assert_true(slow.laters > 1 && slow.waits >= 1);
    assert_same(baselines[1], out, 3, "waiting");
    moe_session_free(s);
}

/* ---- Parameters ---- */

static void refuse_params(const moe_model *model, const moe_session_params *p, const char *name, moe_status want) {
    char untouched;
    moe_session *s = (moe_session *)(void *)&untouched;
    size_t bytes = 12345;
    moe_error e;
    memset(&e, 0, sizeof e);
    CHECK(moe_session_new(model, p, &s, &e) == want, "%s: %s", name, moe_status_name(e.code));
    assert_ptr_equal(s, (void *)&untouched);
    assert_string_equal(e.where, name);
    assert_true(strlen(e.message) > 0);
    assert_int_equal(e.code, want);
    assert_int_equal(moe_session_bytes(model, p, &bytes, &e), want);
    assert_int_equal(bytes, 12345);
    assert_int_equal(moe_session_new(model, p, &s, NULL), want);
}

TEST(invalid_parameters_are_refused_by_name) {
    fixture *f = small(MW_GNMT, MW_F32);
    const moe_session_params good = params_for(f->model);
    moe_session_params p;
    const float bad[] = { -1, NAN, INFINITY, -INFINITY, 1e9f };
#define REFUSE(field, value) (p = good, p.field = (value), refuse_params(f->model, &p, #field, MOE_ERROR_ARGUMENT))
    REFUSE(threads, -1);
    REFUSE(threads, MOE_MAX_THREADS + 1);
    REFUSE(batch, 0);
    REFUSE(batch, -5);
    REFUSE(batch, INT_MAX);
    REFUSE(batch_tokens, -1);
    REFUSE(batch_tokens, INT_MAX);
    REFUSE(min_target, -1);
    REFUSE(min_target, INT_MAX);
    REFUSE(max_source, 1);
    REFUSE(max_source, -1);
    REFUSE(max_source, INT_MAX);
    REFUSE(max_target, 1);
    REFUSE(max_target, INT_MIN);
    REFUSE(max_target, INT_MAX);
    REFUSE(target_tag, -2);
    REFUSE(target_tag, MW_VOCABULARY);
    REFUSE(source_tag, -2);
    REFUSE(source_tag, MW_VOCABULARY);
    REFUSE(beam, 0);
    REFUSE(beam, -1);
    REFUSE(beam, MOE_MAX_BEAM + 1);
    REFUSE(nbest, 0);
    REFUSE(nbest, 5);
    REFUSE(max_len_offset, -1);
    REFUSE(max_len_offset, INT_MAX);
    for (size_t i = 0; i < MOE_COUNT(bad); i++) {
        REFUSE(length_penalty, bad[i]);
        REFUSE(length_constant, bad[i]);
        REFUSE(coverage_penalty, bad[i]);
        REFUSE(prune, bad[i]);
        REFUSE(rerank, bad[i]);
        REFUSE(max_len_factor, bad[i]);
        REFUSE(temperature, bad[i]);
        REFUSE(top_p, bad[i]);
        REFUSE(min_p, bad[i]);
    }
    REFUSE(sample, 2);
    REFUSE(top_k, -1);
    REFUSE(seed, -1);
    REFUSE(isa, "pentium");
    REFUSE(device, "gpu");
    REFUSE(device, "cuda1");
    REFUSE(device, "cuda:");
    REFUSE(device, "cuda:-1");
    REFUSE(device, "cuda:1x");
    REFUSE(device, "cuda:99999999999999999999");
#undef REFUSE
    drop(f);
}

/* The rules of other programs lack some of the paper's features, and their presets disable these features. */
MODEL_TEST(rules_refuse_what_they_do_not_know, MW_GNMT, MW_F32) {
    static const char *const known[] = { "paper", "nvidia", "tf", "mlperf", "hf", "marian" };
    moe_session *s;
    assert_int_equal(moe_session_params_preset(&p, "none"), 0);
    assert_int_equal(moe_session_params_preset(&p, NULL), 0);
    for (size_t i = 0; i < MOE_COUNT(known); i++) {
        s = NULL;
        p = params_for(f->model);
        p.prune = p.coverage_penalty = p.rerank = 1;
        assert_int_equal(moe_session_params_preset(&p, known[i]), 1);
        assert_int_equal(p.rules, i);
        assert_true(p.rerank == 0 && p.beam > 1 && (p.prune == 0) == (i > 0));
        p.max_len_offset = 5;
        p.repetition_penalty = 1; /* 1 disables the penalty */
        assert_int_equal(moe_session_new(f->model, &p, &s, NULL), MOE_OK);
        moe_session_free(s);
        p.repetition_penalty = 1.5f;
        if (i >= 1 && i <= 3) refuse_params(f->model, &p, "repetition_penalty", MOE_ERROR_ARGUMENT);
        p.repetition_penalty = 0, p.sample = 1;
        refuse_params(f->model, &p, "sample", MOE_ERROR_ARGUMENT); /* sampling requires a beam of 1 */
        p.sample = 0;
        if (!i) continue;
        p.prune = 1;
        refuse_params(f->model, &p, "prune", MOE_ERROR_ARGUMENT);
        p.prune = 0, p.rerank = 1;
        refuse_params(f->model, &p, "rerank", MOE_ERROR_ARGUMENT);
        p.rerank = 0, p.coverage_penalty = 1;
        if (i >= 2) refuse_params(f->model, &p, "coverage_penalty", MOE_ERROR_ARGUMENT);
    }
}

MODEL_TEST(parameters_at_their_limits_work, MW_GNMT, MW_Q8) {
    ask *asks = random_asks(2, 3);
    outcome *out;
    p.beam = MOE_MAX_BEAM; /* exceeds the size of the vocabulary */
    p.nbest = MOST;
    p.batch = 2;
    out = translate(f, &p, asks, 3);
    for (size_t k = 0; k < 3; k++) assert_true(out[k].status == MOE_OK && out[k].n >= 1);
    free(out);
    p = params_for(f->model);
    p.max_source = 2; /* only the tag and the end token fit */
    p.max_target = 2;
    asks[1].n_source = 0;
    out = translate(f, &p, asks, 2);
    assert_int_equal(out[0].status, MOE_ERROR_LIMIT);
    assert_int_equal(out[1].status, MOE_OK);
    free(out);
    free(asks);
}

TEST(defaults_come_from_the_file) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    fixture *f;
    moe_session_params p;
    mw_int(m, "decode.beam", 3);
    mw_real(m, "decode.length_penalty", 0.25);
    mw_int(m, "decode.length_constant", 4); /* an integer is accepted as a real */
    mw_real(m, "decode.coverage_penalty", 0.125);
    mw_real(m, "decode.prune", 2.5);
    mw_real(m, "decode.rerank", 0.75);
    mw_real(m, "decode.max_len_factor", 1.5);
    mw_int(m, "decode.max_len_offset", 6);
    mw_real(m, "sample.temperature", 0.75);
    mw_int(m, "sample.top_k", 20);
    mw_real(m, "sample.top_p", 0.625);
    mw_real(m, "sample.min_p", 0.0625);
    mw_real(m, "sample.repetition_penalty", 1.5);
    mw_int(m, "limit.source", 33);
    mw_int(m, "limit.target", 44);
    f = open_model(m);
    p = moe_session_params_default(f->model);
    assert_true(p.beam == 3 && p.nbest == 1 && p.max_source == 33 && p.max_target == 44 && p.max_len_offset == 6);
    assert_true(p.length_penalty == 0.25f && p.length_constant == 4 && p.coverage_penalty == 0.125f &&
                p.prune == 2.5f && p.max_len_factor == 1.5f);
    assert_true(p.temperature == 0.75f && p.top_k == 20 && p.top_p == 0.625f && p.min_p == 0.0625f && p.seed == 0 &&
                !p.sample && p.repetition_penalty == 0);
    assert_true(p.rerank == 0.75f && p.source_tag == -1 && p.target_tag == -1 && p.isa == NULL && p.log == NULL &&
                p.trace == NULL && p.threads == 0);
    {
        moe_session *s = NULL;
        moe_error e;
        assert_int_equal(moe_session_new(f->model, NULL, &s, &e), MOE_OK); /* NULL selects the defaults */
        moe_session_free(s);
    }
    drop(f);
    m = mw_small(MW_GNMT, MW_F32, 1);
    mw_drop(m, "limit.source");
    mw_drop(m, "limit.target");
    mw_drop(m, "decode.max_len_factor");
    mw_drop(m, "decode.max_len_offset");
    f = open_model(m);
    p = moe_session_params_default(f->model);
    assert_true(p.beam == 4 && p.max_source == 512 && p.max_target == 512 && p.max_len_offset == 10);
    assert_true(p.length_penalty == 0.6f && p.length_constant == 5 && p.coverage_penalty == 0 && p.prune == 0 &&
                p.max_len_factor == 2);
    assert_true(p.rerank == 0 && p.temperature == 1 && p.top_k == 0 && p.top_p == 1 && p.min_p == 0);
    drop(f);
}

/* A model's recommended repetition penalty applies only to sampling, and explicit parameters override it. */
TEST(a_recommended_penalty_applies_to_sampling) {
    enum { N = 12, CASES = 4 };
    static const struct {
        int sample, top_k; /* with top_k 1, sampling returns the most probable token */
        float penalty, same_as;
    } cases[CASES] = { { 0, 0, 0, 1 }, { 1, 1, 0, 3 }, { 1, 1, 1, 1 }, { 1, 1, 2, 2 } };
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    ask *asks = random_asks(3, N);
    mw_real(m, "sample.repetition_penalty", 3);
    fixture *f = open_model(m);
    outcome *greedy[4] = { NULL };
    for (size_t i = 0; i < CASES; i++)
        for (int plain = 1; plain >= 0; plain--) {
            moe_session_params p = params_for(f->model);
            p.beam = 1, p.repetition_penalty = plain ? cases[i].same_as : cases[i].penalty;
            if (!plain) p.sample = cases[i].sample, p.top_k = cases[i].top_k;
            outcome *got = translate(f, &p, asks, N);
            if (plain) greedy[i] = got;
            else assert_same(greedy[i], got, N, "a penalty"), free(got);
        }
    assert_memory_not_equal(greedy[0], greedy[1], N * sizeof **greedy);
    assert_memory_not_equal(greedy[1], greedy[3], N * sizeof **greedy);
    for (size_t i = 0; i < CASES; i++) free(greedy[i]);
    free(asks);
    drop(f);
}

/* A request with its own sampling parameters has the same result as in a session with these parameters, in any batch.
 * Sessions without sampling reject such requests. */
TEST(requests_can_have_sampling_settings) {
    enum { N = 24, WAYS = 5 };
    static const struct {
        float temperature, top_p, min_p;
        int top_k, seed;
    } ways[WAYS] = { { 0, 1, 0, 0, 0 },
                     { 1, 1, 0, 0, 7 },
                     { 0.7f, 0.8f, 0, 0, 7 },
                     { 1.5f, 1, 0.1f, 5, 3 },
                     { 1, 1, 0, 0, 8 } };
    fixture *f = small(MW_GNMT, MW_F32);
    ask *asks = random_asks(3, N);
    moe_session_params p = params_for(f->model), own[WAYS];
    outcome *alone[WAYS], *found = mw_zeros(N * sizeof *found);
    size_t different = 0;
    p.beam = p.nbest = 1;
    for (size_t i = 0; i < WAYS; i++) {
        own[i] = p;
        own[i].sample = 1, own[i].seed = ways[i].seed, own[i].top_k = ways[i].top_k;
        own[i].temperature = ways[i].temperature, own[i].top_p = ways[i].top_p, own[i].min_p = ways[i].min_p;
        alone[i] = translate(f, &own[i], asks, N);
        different += i && memcmp(alone[i], alone[i - 1], N * sizeof **alone) != 0;
    }
    CHECK(different == WAYS - 1, "%zu ways differ from the previous one", different);
    for (size_t i = 0; i < N; i++) asks[i].sampling = i % 6 ? &own[i % 6 - 1] : NULL;
    for (int drawn = 0; drawn < 2; drawn++) { /* requests without parameters use the session's */
        moe_session_params shared = own[2 * drawn];
        shared.batch = 7, shared.threads = 2, shared.isa = NULL;
        moe_session *s = new_session(f, &shared);
        for (int later = 0; later < 2; later++) {
            translate_with(s, asks, N, NULL, later, found);
            for (size_t i = 0; i < N; i++)
                assert_same(&alone[i % 6 ? i % 6 - 1 : 2 * (size_t)drawn][i], &found[i], 1, "sampling in a batch");
        }
        moe_session_free(s);
    }
    const char *const wrong[] = { "temperature", "top_p", "min_p", "top_k", "seed", "sample" };
    for (size_t i = 0; i <= MOE_COUNT(wrong); i++) {
        moe_session_params bad[] = { own[1], own[1], own[1], own[1], own[1], own[1], own[1] };
        bad[0].temperature = -1, bad[1].top_p = 1.5f, bad[2].min_p = NAN, bad[3].top_k = -1, bad[4].seed = -1;
        bad[5].sample = 2;
        asks[0].sampling = &bad[i];
        p.sample = i < MOE_COUNT(wrong);
        outcome *got = translate(f, &p, asks, 1);
        const char *wanted = p.sample ? wrong[i] : "a session with sample 1";
        assert_int_equal(got->status, MOE_ERROR_ARGUMENT);
        CHECK(strstr(got->message, wanted) != NULL, "%s: %s", wanted, got->message);
        free(got);
    }
    for (size_t i = 0; i < WAYS; i++) free(alone[i]);
    free(found), free(asks);
    drop(f);
}

TEST(unusual_defaults_in_the_file_are_accepted) {
    static const double odd[] = { (double)NAN, (double)INFINITY, -1, 1e300, 0 };
    static const char *const keys[] = {
        "decode.beam",  "decode.length_penalty", "decode.length_constant", "decode.coverage_penalty",
        "decode.prune", "decode.rerank",         "decode.max_len_factor",  "decode.max_len_offset",
        "limit.source", "limit.target"
    };
    for (size_t k = 0; k < MOE_COUNT(keys); k++)
        for (size_t i = 0; i < MOE_COUNT(odd); i++) {
            mw_model *m = mw_small(MW_PRODUCT, MW_F32, 1);
            moe_session_params p;
            moe_session *s = NULL;
            moe_model *model = NULL;
            mw_image image;
            moe_error e = { MOE_OK, "", "" };
            mw_real(m, keys[k], odd[i]);
            image = mw_build(m);
            if (moe_model_open_memory(image.data, image.bytes, NULL, &model, &e) ==
                MOE_OK) { /* rejecting the model would also be correct */
                p = moe_session_params_default(model);
                p.threads = 1, p.batch = 1;
                CHECK(moe_session_new(model, &p, &s, &e) == MOE_OK, "%s = %g: %s", keys[k], odd[i], e.message);
                moe_session_free(s);
                moe_model_close(model);
            } else {
                assert_non_null(strstr(e.message, keys[k]));
            }
            free(image.data);
            mw_free(m);
        }
}

MODEL_TEST(isa_is_chosen_by_parameter_then_environment, MW_GNMT, MW_F32) {
    moe_session *s;
    char *old = getenv("MOE_ISA"), saved[64];
    snprintf(saved, sizeof saved, "%s", old ? old : "");
    assert_int_equal(setenv("MOE_ISA", "portable", 1), 0);
    p.isa = NULL;
    s = new_session(f, &p);
    assert_string_equal(moe_session_stats(s).isa, "portable");
    moe_session_free(s);
    setenv("MOE_ISA", "pentium", 1);
    refuse_params(f->model, &p, "isa", MOE_ERROR_ARGUMENT);
    p.isa = "portable";
    s = new_session(f, &p);
    moe_session_free(s);
    p.isa = "auto";
    s = new_session(f, &p);
    assert_true(moe_isa_available(moe_session_stats(s).isa));
    moe_session_free(s);
    if (old) setenv("MOE_ISA", saved, 1);
    else unsetenv("MOE_ISA");
}


static char logged[300];
static size_t log_calls;
static void keep_log(void *user, const char *message) {
    assert_ptr_equal(user, &log_calls);
    log_calls++;
    snprintf(logged, sizeof logged, "%s", message);
}
MODEL_TEST(log_tells_one_line_about_the_session, MW_GNMT, MW_F32) {
    p.log = keep_log;
    p.log_user = &log_calls;
    moe_session_free(new_session(f, &p));
    assert_true(log_calls >= 1);
    assert_non_null(strstr(logged, "portable"));
    assert_null(strchr(logged, '\n'));
}

/* ---- Memory ---- */

TEST(translating_does_not_allocate) {
    for (size_t i = 0; i < settings_in_use(); i++) {
        moe_session_params p = setting_params(i);
        moe_session *s;
        outcome *out = mw_zeros(SENTENCES * sizeof *out);
        size_t calls, bytes;
        p.batch = 6;
        p.threads = 2;
        p.isa = NULL;
        direct_allocations = 0;
        s = new_session(models[i], &p);
        calls = models[i]->heap.calls;
        bytes = models[i]->heap.bytes;
        translate_with(s, sentences, SENTENCES, NULL, 1, out);
        translate_with(s, sentences, SENTENCES, NULL, 0, out);
        assert_int_equal(models[i]->heap.calls, calls);
        assert_int_equal(models[i]->heap.bytes, bytes);
        assert_int_equal(direct_allocations, 0);
        moe_session_free(s);
        free(out);
    }
}

TEST(session_bytes_equal_the_allocated_bytes) {
    uint64_t random = 12;
    for (int variant = 0; variant < MW_VARIANTS; variant++)
        for (uint32_t type = 0; type < 4; type += 3) {
            fixture *f = small(variant, type);
            for (size_t round = 0; round < mw_rounds(20); round++) {
                moe_session_params p = params_for(f->model);
                const size_t before = f->heap.bytes, blocks = f->heap.blocks;
                size_t bytes = 0;
                moe_session *s;
                moe_error e;
                p.batch = 1 + (int)mw_below(&random, 40), p.beam = 1 + (int)mw_below(&random, 10),
                p.nbest = 1 + (int)mw_below(&random, (size_t)p.beam);
                p.max_source = 2 + (int)mw_below(&random, 100), p.max_target = 2 + (int)mw_below(&random, 100);
                p.threads = 1 + (int)mw_below(&random, 3);
                p.coverage_penalty = mw_below(&random, 2) ? 0.1f : 0;
                p.max_constraints = mw_below(&random, 2) ? 5 : 0;
                if (variant == MW_GNMT && mw_below(&random, 2)) p.rerank = 1;
                assert_int_equal(moe_session_bytes(f->model, &p, &bytes, &e), MOE_OK);
                assert_int_equal(f->heap.blocks, blocks);
                s = new_session(f, &p);
                assert_int_equal(f->heap.bytes - before, bytes);
                assert_int_equal(moe_session_stats(s).bytes, bytes);
                moe_session_free(s);
                assert_int_equal(f->heap.bytes, before);
                assert_int_equal(f->heap.blocks, blocks);
            }
            drop(f);
        }
}

/* A dense gate selects every expert for every row. Memory remains small, and results do not depend on the batch. */
TEST(dense_gates_process_rows_in_chunks) {
    mw_model *m = mw_small(MW_PRODUCT, MW_Q8, 3);
    ask *asks = random_asks(7, 12);
    outcome *alone, *together;
    fixture *f;
    moe_session_params p;
    size_t dense = 0, sparse = 0;
    mw_int(m, "decoder.layers", 3);
    mw_mixture(m, "decoder.2.", MW_WIDTH, 1000, 2, "topk", 0, 0, "", 0, 0, 4);
    f = open_model(m);
    p = params_for(f->model);
    p.batch = 12, p.beam = p.nbest = 4, p.max_source = LONGEST;
    assert_int_equal(moe_session_bytes(f->model, &p, &sparse, NULL), MOE_OK);
    p.gating = "softmax";
    assert_int_equal(moe_session_bytes(f->model, &p, &dense, NULL), MOE_OK);
    CHECK(dense < sparse + (4 << 20), "%zu bytes, with top-k %zu", dense,
          sparse); /* 48 * 1000 pairs of rows and experts need over 6 MB */
    together = translate(f, &p, asks, 12);
    p.batch = 1;
    alone = translate(f, &p, asks, 12);
    for (size_t k = 0; k < 12; k++) assert_memory_equal(&together[k], &alone[k], sizeof alone[k]);
    free(alone), free(together), free(asks);
    drop(f);
}

MODEL_TEST(session_bytes_does_not_allocate_what_it_counts, MW_GNMT, MW_F32) {
    size_t bytes = 0;
    moe_error e;
    p.batch = 256, p.beam = 8, p.max_source = 1000, p.max_target = 1000;
    p.coverage_penalty = 0.1f;
    f->heap.peak = f->heap.bytes;
    assert_int_equal(moe_session_bytes(f->model, &p, &bytes, &e), MOE_OK);
    CHECK(f->heap.peak - f->heap.bytes < bytes / 4, "%zu bytes were allocated to measure %zu",
          f->heap.peak - f->heap.bytes, bytes);
}

TEST(session_new_survives_the_failure_of_every_allocation) {
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        fixture *f = small(variant, MW_Q8);
        moe_session_params p = params_for(f->model);
        const size_t bytes = f->heap.bytes, blocks = f->heap.blocks;
        p.threads = 2;
        for (size_t n = 1;; n++) {
            moe_session *s = NULL;
            moe_error e;
            moe_status status;
            memset(&e, 0, sizeof e);
            f->heap.calls = 0;
            f->heap.fail_at = n;
            status = moe_session_new(f->model, &p, &s, &e);
            if (f->heap.calls < n) { /* this run has fewer allocations */
                assert_int_equal(status, MOE_OK);
                moe_session_free(s);
                assert_true(n > 2);
                break;
            }
            assert_int_equal(status, MOE_ERROR_MEMORY);
            assert_int_equal(e.code, MOE_ERROR_MEMORY);
            assert_string_equal(e.where, "session");
            assert_null(s);
            assert_int_equal(f->heap.bytes, bytes);
            assert_int_equal(f->heap.blocks, blocks);
        }
        f->heap.calls = 0;
        for (size_t n = 1; n < 5; n++) {
            size_t out = 12345;
            moe_error e;
            f->heap.calls = 0;
            f->heap.fail_at = n;
            if (moe_session_bytes(f->model, &p, &out, &e) != MOE_OK) {
                assert_int_equal(e.code, MOE_ERROR_MEMORY);
                assert_int_equal(out, 12345);
            }
            assert_int_equal(f->heap.bytes, bytes);
        }
        f->heap.fail_at = 0;
        assert_int_equal(f->heap.wrong_sizes, 0);
        drop(f);
    }
}

MODEL_TEST(absurd_sessions_are_refused_not_attempted, MW_GNMT, MW_F32) {
    moe_session *s = NULL;
    moe_error e;
    moe_status status;
    f->heap.calls = 0;
    f->heap.fail_at = 1; /* moe_session_bytes must not allocate */
    p.batch = 1 << 16, p.beam = MOE_MAX_BEAM, p.max_source = 1 << 20, p.max_target = 1 << 20;
    p.coverage_penalty = 1;
    status = moe_session_new(f->model, &p, &s, &e);
    assert_true(status == MOE_ERROR_MEMORY || status == MOE_ERROR_ARGUMENT);
    assert_null(s);
    assert_true(strlen(e.message) > 0);
    f->heap.fail_at = 0;
}

/* Keys and values of all tokens of all hypotheses are numbered with 32-bit integers. */
TEST(token_counts_beyond_32_bits_are_refused) {
    mw_model *m = mw_transformer(MW_MARIAN, MW_F32, 7);
    fixture *f;
    moe_session_params p;
    size_t bytes;
    moe_error e;
    mw_drop_tensor(m, "positions.weight");
    mw_random_matrix(m, "positions.weight", MW_F32, 512, MW_WIDTH, 0.8f);
    f = open_model(m);
    p = params_for(f->model);
    p.batch = 1 << 16, p.beam = MOE_MAX_BEAM, p.max_target = 511;
    assert_int_equal(moe_session_bytes(f->model, &p, &bytes, &e), MOE_OK);
    p.max_target = 512;
    assert_int_equal(moe_session_bytes(f->model, &p, &bytes, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "batch");
    drop(f);
}

/* ---- Trace and statistics ---- */

typedef struct names_log {
    char names[256][48];
    size_t n;
    size_t calls;
} names_log;

static void keep_names(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    names_log *log = user;
    size_t i = 0;
    log->calls++;
    CHECK(rows > 0 && cols > 0 && stride >= cols, "%s: %zu rows, %zu columns, stride %zu", name, rows, cols, stride);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++) CHECK(data[r * stride + c] == data[r * stride + c], "%s is NaN", name);
    if (strstr(name, ".gate") && !strstr(name, "logits"))
        for (size_t r = 0; r < rows; r++) {
            double sum = 0;
            for (size_t c = 0; c < cols; c++) sum += (double)data[r * stride + c];
            CHECK(fabs(sum - 1) < 1e-5 || sum == 0, "%s: weights add up to %g", name, sum);
        }
    while (i < log->n && strcmp(log->names[i], name) != 0) i++;
    if (i == log->n && i < 256) snprintf(log->names[log->n++], 48, "%s", name);
}

TEST(trace_sees_every_node_by_name) {
    static const char *const names[] = { "encoder.embedding", "encoder.0.fwd",         "encoder.0.bwd",
                                         "encoder.0.merged",  "encoder.1.gate.logits", "encoder.1.gate",
                                         "encoder.1.experts", "encoder.1.output",      "encoder.2.output",
                                         "encoder.keys",      "decoder.embedding",     "decoder.query",
                                         "decoder.context",   "decoder.0.r_next",      "decoder.1.gate",
                                         "decoder.1.experts", "decoder.2.output",      "decoder.logits" };
    for (uint32_t type = 0; type < 4; type += 3) {
        fixture *f = small(MW_GNMT, type);
        moe_session_params p = params_for(f->model);
        ask *asks = random_asks(14, 5);
        outcome *plain = translate(f, &p, asks, 5), *traced;
        static names_log log;
        memset(&log, 0, sizeof log);
        p.trace = keep_names;
        p.trace_user = &log;
        p.batch = 3;
        traced = translate(f, &p, asks, 5);
        assert_same(plain, traced, 5, "tracing");
        for (size_t k = 0; k < MOE_COUNT(names); k++) {
            size_t i = 0;
            while (i < log.n && strcmp(log.names[i], names[k]) != 0) i++;
            CHECK(i < log.n, "%s is never traced", names[k]);
        }
        free(plain), free(traced), free(asks);
        drop(f);
    }
}

MODEL_TEST(statistics_count_what_happened, MW_GNMT, MW_F32) {
    ask *asks = random_asks(15, 8);
    outcome out[8];
    moe_session *s;
    moe_stats stats;
    uint64_t source = 0, target = 0;
    asks[3].source[0] = -1; /* request 3 fails and is not counted */
    p.batch = 3;
    s = new_session(f, &p);
    stats = moe_session_stats(s);
    assert_true(stats.sentences == 0 && stats.steps == 0 && stats.rows == 0 && stats.target_tokens == 0 &&
                stats.source_tokens == 0);
    assert_string_equal(stats.isa, "portable");
    translate_with(s, asks, 8, NULL, 0, out);
    for (size_t k = 0; k < 8; k++)
        if (k != 3) {
            source += asks[k].n_source + 2;
            target += out[k].hypotheses[0].n_ids + (size_t)out[k].hypotheses[0].finished;
        }
    stats = moe_session_stats(s);
    assert_int_equal(stats.sentences, 7);
    assert_int_equal(stats.source_tokens, source);
    assert_int_equal(stats.target_tokens, target);
    assert_true(stats.steps > 0 && stats.rows >= stats.steps);
    moe_session_free(s);
    free(asks);
}

/* ---- Broken weights ---- */

static const uint32_t not_numbers[] = { 0x7fc00000u, 0xffc00000u, 0x7fc00001u, 0x7f800001u,
                                        0x7fffffffu, 0xffffffffu, 0xff923456u };

MODEL_TEST(a_nan_in_a_question_is_numeric, MW_GNMT, MW_F32) {
    ask *asks = random_asks(25, 12);
    outcome *plain, out[12];
    moe_session *s;
    for (size_t k = 0; k < 12; k++) asks[k].tag = 0; /* translate into English: only reranking uses German */
    p.beam = 4, p.batch = 3, p.max_source = 48;
    poke(f, "embedding.weight", MW_TAG_DE * MW_WIDTH + 3, not_numbers[0]);
    plain = translate(f, &p, asks, 12);
    p.rerank = 1;
    s = new_session(f, &p);
    for (int round = 0; round < 2; round++) {
        translate_with(s, asks, 12, NULL, round, out);
        for (size_t k = 0; k < 12; k++) {
            assert_int_equal(plain[k].status, MOE_OK);
            assert_int_equal(out[k].status, MOE_ERROR_NUMERIC);
            assert_int_equal(out[k].n, 0);
        }
    }
    moe_session_free(s);
    free(plain), free(asks);
}

/* Only sentences with the damaged token fail. */
TEST(a_nan_in_an_embedding_affects_only_its_sentences) {
    for (size_t b = 0; b < MOE_COUNT(not_numbers); b++)
        for (int beam = 1; beam <= 4; beam += 3) {
            fixture *f = small(MW_PRODUCT, MW_F32);
            moe_session_params p = params_for(f->model);
            ask *asks = random_asks(16, 12);
            outcome *good, out[12];
            moe_session *s;
            for (size_t k = 0; k < 12; k++)
                for (size_t i = 0; i < asks[k].n_source; i++)
                    if (asks[k].source[i] == 11) asks[k].source[i] = 12;
            p.beam = beam;
            p.batch = 5;
            good = translate(f, &p, asks, 12);
            for (size_t k = 0; k < 12; k += 3) asks[k].source[asks[k].n_source / 2] = 11;
            asks[6].scoring = 1, asks[6].n_target = 2, asks[6].target[0] = asks[6].target[1] = 9;
            poke(f, "source.embedding.weight", 11 * MW_WIDTH + 3, not_numbers[b]);
            s = new_session(f, &p);
            for (int round = 0; round < 2; round++) { /* the session must still be usable in round 1 */
                translate_with(s, asks, 12, NULL, round, out);
                for (size_t k = 0; k < 12; k++) {
                    if (k % 3) {
                        assert_memory_equal(&out[k], &good[k], sizeof out[k]);
                        continue;
                    }
                    CHECK(out[k].status == MOE_ERROR_NUMERIC, "NaN %08x, sentence %zu: %s", not_numbers[b], k,
                          moe_status_name(out[k].status));
                    assert_int_equal(out[k].n, 0);
                    assert_true(strlen(out[k].message) > 0);
                }
            }
            moe_session_free(s);
            free(good), free(asks);
            drop(f);
        }
}

TEST(a_nan_in_any_matrix_is_a_numeric_error) {
    static const char *const tensors[] = { "encoder.0.fwd.w_x", "encoder.0.bwd.w_r", "encoder.0.fwd.w_proj",
                                           "encoder.2.w_x",     "decoder.0.w_x",     "decoder.2.w_x",
                                           "attention.w_key",   "attention.w_query", "output.weight" };
    for (size_t t = 0; t < MOE_COUNT(tensors); t++)
        for (size_t b = 0; b < MOE_COUNT(not_numbers); b++) {
            const int tied = strcmp(tensors[t], "output.weight") == 0; /* damage an unused token of a tied matrix */
            fixture *f = small(tied ? MW_PRODUCT : MW_GNMT, MW_F32);
            moe_session_params p = params_for(f->model);
            ask *asks = random_asks(17, 6);
            outcome *out;
            const mw_tensor *tensor = mw_find_tensor(f->m, tensors[t]);
            p.beam = 3;
            p.isa = b % 2 ? NULL : "portable";
            /* Damage the whole tensor, which affects every row. In the output matrix, one damaged token suffices. */
            for (size_t i = 0; i < tensor->bytes / 4; i++)
                if (!tied || i == 22 * MW_WIDTH) poke(f, tensors[t], i, not_numbers[b]);
            asks[0].scoring = 1, asks[0].n_target = 2, asks[0].target[0] = 8, asks[0].target[1] = 9;
            out = translate(f, &p, asks, 6);
            for (size_t k = 0; k < 6; k++)
                CHECK(out[k].status == MOE_ERROR_NUMERIC, "NaN %08x in %s: sentence %zu is %s", not_numbers[b],
                      tensors[t], k, moe_status_name(out[k].status));
            free(out), free(asks);
            drop(f);
        }
}

TEST(infinite_and_huge_weights_do_not_crash) {
    static const uint32_t large[] = { 0x7f800000u, 0xff800000u, 0x7f7fffffu, 0xff7fffffu, 0x7e000000u };
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        mw_model *probe = mw_small(variant, MW_F32, 7);
        for (size_t t = 0; t < probe->n_tensors; t++) {
            fixture *f;
            moe_session_params p;
            ask *asks = random_asks(18, 3);
            outcome *out;
            if (probe->tensors[t].n_dims == 1 || strstr(probe->tensors[t].name, "gate.weight") ||
                (mw_slow() && t % 5)) {
                free(asks);
                continue;
            }
            f = small(variant, MW_F32);
            p = params_for(f->model);
            p.beam = 4;
            p.prune = 1;
            p.coverage_penalty = 0.2f;
            for (size_t i = 0; i < 5; i++) poke(f, probe->tensors[t].name, i * 7, large[i]);
            out = translate(f, &p, asks, 3);
            for (size_t k = 0; k < 3; k++) {
                assert_true(out[k].status == MOE_OK || out[k].status == MOE_ERROR_NUMERIC);
                for (size_t j = 0; j < out[k].n; j++) assert_true(out[k].hypotheses[j].logprob <= 0);
            }
            free(out), free(asks);
            drop(f);
        }
        mw_free(probe);
    }
}

/* Opening a file checks the scales of Q8 matrices other than experts, whose scales are spread over the file. */
MODEL_TEST(a_nan_scale_of_a_q8_expert_is_numeric, MW_GNMT, MW_Q8) {
    const mw_tensor *t = mw_find_tensor(f->m, "encoder.1.experts");
    ask *asks = random_asks(19, 4);
    outcome *out;
    for (size_t e = 0; e < 4; e++) {
        const size_t slab = t->offset + e * mw_slab_stride(MW_Q8, 20, MW_WIDTH);
        mw_put32(f->image.data + slab + mw_slab_down(MW_Q8, 20, MW_WIDTH) + mw_up(MW_WIDTH, 16) * 64, 0x7fc00000u);
    }
    out = translate(f, &p, asks, 4);
    for (size_t k = 0; k < 4; k++) assert_int_equal(out[k].status, MOE_ERROR_NUMERIC);
    free(out), free(asks);
}

TEST(models_without_allowed_tokens_are_numeric_errors) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 7);
    int64_t all[MW_VOCABULARY];
    fixture *f;
    moe_session_params p;
    ask *asks = random_asks(20, 2);
    outcome *out;
    for (int i = 0; i < MW_VOCABULARY; i++) all[i] = i;
    mw_ints(m, "token.never", all, MW_VOCABULARY);
    f = open_model(m);
    p = params_for(f->model);
    out = translate(f, &p, asks, 2);
    assert_int_equal(out[0].status, MOE_ERROR_NUMERIC);
    assert_int_equal(out[1].status, MOE_ERROR_NUMERIC);
    free(out);
    drop(f);
    m = mw_small(MW_GNMT, MW_F32, 7); /* only one token can be generated, so the translation never ends */
    mw_ints(m, "token.never", all, MW_VOCABULARY - 1);
    f = open_model(m);
    p = params_for(f->model);
    out = translate(f, &p, asks, 2);
    for (size_t k = 0; k < 2; k++) {
        assert_int_equal(out[k].status, MOE_OK);
        assert_int_equal(out[k].n, 1);
        assert_false(out[k].hypotheses[0].finished);
        for (size_t i = 0; i < out[k].hypotheses[0].n_ids; i++)
            assert_int_equal(out[k].hypotheses[0].ids[i], MW_VOCABULARY - 1);
        assert_true(out[k].hypotheses[0].logprob == 0);
    }
    free(out), free(asks);
    drop(f);
}

int main(void) { return run_all_tests(make_baselines, drop_baselines); }
