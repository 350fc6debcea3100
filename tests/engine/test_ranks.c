/* test_ranks.c - ranks that share the experts of a model. Each rank is a thread, connected to the others by a wire. The
 * tests compare results with those of one process, and cover ranks without sentences, experts that a rank must not
 * read, and failures of one rank. `make tsan` runs the tests under the thread sanitizer. */
#include "watched.h"

#include <sys/stat.h>

/* Check a condition in a thread, where cmocka's checks cannot be used. */
#define REQUIRE(condition, ...)                                     \
    do {                                                            \
        if (condition) break;                                       \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);             \
        fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), abort(); \
    } while (0)
#define OK(call) REQUIRE((call) == MOE_OK, "%s", #call)

enum { MOST_RANKS = 7, SENTENCES = 23, LONGEST = 40, NBEST = 2 };

/* ---- A wire between threads ---- */

typedef struct world {
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int ranks, waiting;
    unsigned round;
    const void *send[MOST_RANKS];
    const size_t *bytes[MOST_RANKS];
    size_t size[MOST_RANKS];
    int calls, fail_at;       /* number of calls; number of the call that fails on all ranks, or 0 */
    size_t chunks;            /* number of calls to `counts` */
    int strange, call, place; /* rank `strange` alters value `place` in its `call`-th agreement */
} world;

typedef struct rank {
    world *w;
    int number, agreed;
    size_t pairs; /* pairs received for the mixture with the most experts */
    size_t each;  /* experts per rank in this mixture, plus 1 */
} rank;

static void meet(world *w) {
    pthread_mutex_lock(&w->mutex);
    const unsigned round = w->round;
    if (++w->waiting == w->ranks) {
        w->waiting = 0;
        w->round++;
        pthread_cond_broadcast(&w->wake);
    }
    while (w->round == round) pthread_cond_wait(&w->wake, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
}

/* Publish the data that this rank sends, and wait for all ranks. Return 0 if the call fails. */
static int begin(rank *r, const void *send, const size_t *bytes, size_t size) {
    world *w = r->w;
    w->send[r->number] = send;
    w->bytes[r->number] = bytes;
    w->size[r->number] = size;
    if (r->number == 0) w->calls++;
    meet(w);
    return w->calls != w->fail_at;
}

static moe_status end(rank *r, int fine, moe_error *error) {
    meet(r->w);
    if (!fine) snprintf(error->message, sizeof error->message, "cable cut");
    return fine ? MOE_OK : MOE_ERROR_IO;
}

static moe_status agree(void *user, int64_t *values, size_t n, moe_error *error) {
    rank *r = user;
    const world *w = r->w;
    int64_t largest[128];
    REQUIRE(n <= 128, "%zu values", n);
    if (++r->agreed == w->call && w->strange == r->number) values[2 * w->place]++, values[2 * w->place + 1]--;
    const int fine = begin(r, values, NULL, n);
    for (size_t i = 0; i < n; i++) {
        largest[i] = values[i];
        for (int from = 0; from < w->ranks; from++) {
            const int64_t *theirs = w->send[from];
            REQUIRE(w->size[from] == n, "ranks agree on %zu and %zu values", n, w->size[from]);
            if (theirs[i] > largest[i]) largest[i] = theirs[i];
        }
    }
    const moe_status status = end(r, fine, error);
    memcpy(values, largest, n * sizeof *values);
    return status;
}

static moe_status counts(void *user, const uint32_t *send, uint32_t *recv, size_t each, moe_error *error) {
    rank *r = user;
    const world *w = r->w;
    const int fine = begin(r, send, NULL, each);
    if (r->number == 0) r->w->chunks++;
    if (each > r->each) r->each = each, r->pairs = 0;
    for (int from = 0; from < w->ranks; from++) {
        REQUIRE(w->size[from] == each, "ranks count %zu and %zu experts", each, w->size[from]);
        memcpy(recv + (size_t)from * each, (const uint32_t *)w->send[from] + (size_t)r->number * each,
               each * sizeof *recv);
        for (size_t i = 0; i + 1 < each && each == r->each; i++) r->pairs += recv[(size_t)from * each + i];
    }
    return end(r, fine, error);
}

static moe_status swap(void *user, const void *send, const size_t *send_bytes, void *recv, const size_t *recv_bytes,
                       moe_error *error) {
    rank *r = user;
    const world *w = r->w;
    const int fine = begin(r, send, send_bytes, 0);
    char *to = recv;
    for (int from = 0; from < w->ranks; to += recv_bytes[from++]) {
        const char *piece = w->send[from];
        const size_t bytes = w->bytes[from][r->number];
        for (int before = 0; before < r->number; before++) piece += w->bytes[from][before];
        REQUIRE(bytes == recv_bytes[from], "rank %d sends %zu bytes, rank %d expects %zu", from, bytes, r->number,
                recv_bytes[from]);
        if (bytes) memcpy(to, piece, bytes);
    }
    return end(r, fine, error);
}

static moe_wire wire_of(rank *r) { return (moe_wire){ r, r->number, r->w->ranks, agree, counts, swap }; }

/* ---- Models ---- */

enum { GNMT, LEVELS, NLLB, PROMPTED, DELTA, DENSE, BLOCKS, LANGUAGE, LOADS, LOADS_LEVELS, LOADS_DENSE, KINDS };
static const char *const kind_names[] = { "gnmt",   "two levels", "nllb",  "prompted",          "delta",       "dense",
                                          "blocks", "language",   "loads", "loads, two levels", "loads, dense" };

/* Add random loads for all experts, some of them equal, some 0. Every rank gets experts from the whole range, but if
 * 7 ranks share 5 experts, some ranks get none. */
static mw_model *loaded(mw_model *m) {
    const size_t n = m->n_tensors;
    for (size_t i = 0; i < n; i++) {
        if (!m->tensors[i].layout) continue;
        mw_tensor *t = mw_random_vector(m, mw_name(m->tensors[i].name, ".load"), m->tensors[i].dims[0], -2, 6);
        for (size_t e = 0; e < t->dims[0]; e++) {
            float v;
            memcpy(&v, t->data + 4 * e, 4);
            v = v < 0 ? 0 : floorf(v);
            memcpy(t->data + 4 * e, &v, 4);
        }
    }
    return m;
}

static mw_model *model_of(int kind, uint32_t type) {
    if (kind >= LOADS) return loaded(model_of(kind == LOADS ? NLLB : kind == LOADS_LEVELS ? LEVELS : DENSE, type));
    mw_model *m = kind == LEVELS     ? mw_hierarchical(type, 5)
                  : kind == NLLB     ? mw_transformer(MW_NLLB, type, 7)
                  : kind == PROMPTED ? mw_decoder(type, 7)
                  : kind == DELTA    ? mw_delta_decoder(type, 7)
                  : kind == LANGUAGE ? mw_language_model(type, 7)
                                     : mw_small(MW_GNMT, type, 7);
    if (kind == BLOCKS) mw_int(m, "activation.block", 64);
    if (kind != DENSE) return m;
    mw_drop_tensor(m, "decoder.1.gate.weight");
    mw_drop_tensor(m, "decoder.1.experts");
    mw_moe(m, "decoder.1.", 9, 1, 12, "threshold"); /* selects more experts than planned, in several chunks */
    mw_drop_tensor(m, "encoder.1.gate.weight");
    mw_drop_tensor(m, "encoder.1.experts");
    mw_drop_tensor(m, "encoder.1.gate.threshold");
    mw_moe(m, "encoder.1.", 60, 0, 12, "softmax");
    return m;
}

/* Assign n experts evenly to ranks. Without loads, ranks get consecutive experts. With loads, the busiest experts are
 * assigned first, each to the rank with the least load that still has room. */
static void owners(const float *loads, size_t n, size_t ranks, size_t *owner) {
    double sum[MOST_RANKS] = { 0 };
    size_t has[MOST_RANKS] = { 0 };
    for (size_t e = 0; e < n; e++) owner[e] = ranks;
    for (size_t i = 0; i < n; i++) {
        size_t expert = n, best = ranks;
        for (size_t e = 0; e < n; e++)
            if (owner[e] == ranks && (expert == n || (loads && loads[e] > loads[expert]))) expert = e;
        for (size_t r = 0; r < ranks; r++)
            if (has[r] < (r + 1) * n / ranks - r * n / ranks && (best == ranks || sum[r] < sum[best])) best = r;
        owner[expert] = best;
        has[best]++;
        sum[best] += loads ? (double)loads[expert] : 0;
    }
}

/* Return the loads of a tensor's experts in a file, or NULL if the file has none. */
static const float *loads_of(const moe_model *model, mw_image image, const moe_tensor_info *experts) {
    char name[80];
    const int length = snprintf(name, sizeof name, "%.*s.load", (int)experts->name.length, experts->name.data);
    for (size_t i = 0; i < moe_model_tensor_count(model); i++) {
        const moe_tensor_info t = moe_model_tensor(model, i);
        if (t.name.length == (size_t)length && memcmp(t.name.data, name, t.name.length) == 0)
            return (const float *)(const void *)((const char *)image.data + t.offset);
    }
    return NULL;
}

/* Copy a file to memory in which only the experts of rank `number` are accessible, or all experts if `ranks` is 0. */
static char *copy_of(mw_image image, int number, size_t ranks) {
    char *data = mmap(NULL, image.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    moe_model *model = NULL;
    REQUIRE(data != MAP_FAILED, "no memory");
    memcpy(data, image.data, image.bytes);
    if (!ranks || sysconf(_SC_PAGESIZE) != 4096) return data;
    OK(moe_model_open_memory(image.data, image.bytes, NULL, &model, NULL));
    for (size_t i = 0; i < moe_model_tensor_count(model); i++) {
        const moe_tensor_info t = moe_model_tensor(model, i);
        const size_t n = t.experts ? (size_t)t.dims[0] : 0;
        size_t owner[64];
        REQUIRE(n <= MOE_COUNT(owner), "%zu experts", n);
        owners(n ? loads_of(model, image, &t) : NULL, n, ranks, owner);
        for (size_t e = 0; e < n; e++)
            if (owner[e] != (size_t)number)
                REQUIRE(!mprotect(data + t.offset + e * (t.bytes / n), t.bytes / n, PROT_NONE), "mprotect");
    }
    moe_model_close(model);
    return data;
}

/* ---- Translating ---- */

typedef struct outcome {
    size_t delivered;
    moe_status status;
    size_t n;
    struct {
        int32_t ids[LONGEST];
        float logprobs[LONGEST + 1];
        size_t n_ids;
        float score, reverse;
    } best[NBEST];
} outcome;

typedef struct feed {
    const moe_model *model;
    int number, ranks, idle; /* idle: the rank without sentences */
    size_t next, cancel_at;  /* cancel_at: sentence at which to cancel `session` or, if NULL, the call */
    moe_session *session;
    outcome *outcome; /* [SENTENCES] results of all ranks */
    int32_t source[LONGEST];
} feed;

/* Return the rank that translates sentence i. */
static int rank_of(const feed *f, size_t i) {
    int number = f->ranks > 1 ? (int)((i * i + i / 3) % (size_t)f->ranks) : 0;
    if (f->ranks > 1 && number == f->idle) number = (number + 1) % f->ranks;
    return number;
}

static int pull(void *user, int wait, moe_request *q) {
    feed *f = user;
    (void)wait;
    if (f->cancel_at && f->next >= f->cancel_at && !f->session) return MOE_PULL_CANCEL;
    if (f->cancel_at && f->next >= f->cancel_at) moe_session_cancel(f->session);
    while (f->next < SENTENCES && rank_of(f, f->next) != f->number) f->next++;
    if (f->next == SENTENCES) return MOE_PULL_END;
    const size_t i = f->next++, begins = moe_model_prompted(f->model) && i % 3 ? 16 : 0; /* tokens of other prompts */
    const size_t n = begins ? 17 + i % 4 : 1 + (i * 5 + i * i) % 14;
    for (size_t k = 0; k < n; k++) {
        const size_t seed = k < begins ? i % 3 : i;
        f->source[k] = 6 + (int32_t)((7 * seed + 5 * k + seed * k * k) % (MW_VOCABULARY - 6));
    }
    if (moe_model_kind(f->model) == MOE_MODEL_LANGUAGE) q->target = f->source, q->n_target = n;
    else q->source = f->source, q->n_source = n;
    q->user = &f->outcome[i];
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *r) {
    outcome *to = r->user;
    (void)user;
    to->delivered++;
    to->status = r->status;
    to->n = r->n_hypotheses;
    for (size_t i = 0; i < r->n_hypotheses && i < NBEST; i++) {
        const moe_hypothesis *h = &r->hypotheses[i];
        if (h->n_ids) memcpy(to->best[i].ids, h->ids, h->n_ids * sizeof *h->ids);
        if (h->n_ids + (size_t)h->finished)
            memcpy(to->best[i].logprobs, h->token_logprobs, (h->n_ids + (size_t)h->finished) * sizeof(float));
        to->best[i].n_ids = h->n_ids;
        to->best[i].score = h->score;
        to->best[i].reverse = h->reverse;
    }
}

/* A rank, which opens its copy of the file, creates a session, and translates its sentences once or several times. */
typedef struct part {
    rank rank;
    mw_image image;
    moe_session_params params;
    feed feed;
    int guarded, times, verify;
    size_t damage; /* offset of a byte to change in the rank's copy after opening it; 0 if none */
    moe_status made, status[3];
    moe_error error[3];
    moe_stats stats;
    pthread_t thread;
} part;

static void *work(void *arg) {
    part *p = arg;
    const moe_model_params open = { .verify = p->verify ? p->verify : -1 };
    char *data = copy_of(p->image, p->rank.number, p->guarded ? (size_t)p->rank.w->ranks : 0);
    moe_wire wire = wire_of(&p->rank);
    moe_model *model = NULL;
    moe_session *s = NULL;
    OK(moe_model_open_memory(data, p->image.bytes, &open, &model, NULL));
    if (p->damage) data[p->damage] ^= 1;
    p->params.wire = &wire;
    p->made = moe_session_new(model, &p->params, &s, &p->error[0]);
    memset(&wire, 0, sizeof wire); /* the session has its own copy */
    const size_t cancel_at = p->feed.cancel_at;
    for (int i = 0; i < p->times && s; i++) {
        p->feed.model = model;
        p->feed.next = 0;
        p->feed.cancel_at = i ? 0 : cancel_at;
        if (p->feed.session) p->feed.session = s;
        p->status[i] = moe_translate(s, pull, done, &p->feed, &p->error[i]);
        p->stats = moe_session_stats(s);
    }
    moe_session_free(s);
    moe_model_close(model);
    munmap(data, p->image.bytes);
    return NULL;
}

/* ---- Runs ---- */

typedef struct run {
    world world;
    part parts[MOST_RANKS];
    outcome outcome[SENTENCES];
} run;

/* Return the session parameters for a model. */
static moe_session_params tuned(const moe_model *model, int kind, int batch, int beam, int threads) {
    moe_session_params p = moe_session_params_default(model);
    p.batch = batch;
    p.beam = kind == LANGUAGE ? 1 : beam;
    p.nbest = p.beam > 1 ? NBEST : 1;
    p.threads = threads;
    p.max_source = 20, p.max_target = 16;
    p.device = "cpu";
    if (moe_model_language_count(model)) p.target_tag = MW_TAG_DE, p.source_tag = MW_TAG_EN;
    if (kind == GNMT && beam > 1) p.rerank = 0.5f;
    return p;
}

static run *prepare(mw_image image, int kind, int ranks, int batch, int beam, int threads) {
    run *r = mw_zeros(sizeof *r);
    moe_model *model = NULL;
    OK(moe_model_open_memory(image.data, image.bytes, NULL, &model, NULL));
    pthread_mutex_init(&r->world.mutex, NULL);
    pthread_cond_init(&r->world.wake, NULL);
    r->world.ranks = ranks;
    r->world.strange = -1;
    for (int i = 0; i < ranks; i++)
        r->parts[i] = (part){ .rank = { .w = &r->world, .number = i },
                              .image = image,
                              .params = tuned(model, kind, batch, beam, threads),
                              .feed = { .number = i, .ranks = ranks, .idle = ranks - 1, .outcome = r->outcome },
                              .times = 1 };
    moe_model_close(model);
    return r;
}

static void go(run *r) {
    alarm(mw_slow() ? 600 : 60);
    for (int i = 0; i < r->world.ranks; i++)
        REQUIRE(!pthread_create(&r->parts[i].thread, NULL, work, &r->parts[i]), "no thread");
    for (int i = 0; i < r->world.ranks; i++) pthread_join(r->parts[i].thread, NULL);
    alarm(0);
}

static void drop(run *r) {
    pthread_mutex_destroy(&r->world.mutex);
    pthread_cond_destroy(&r->world.wake);
    free(r);
}

/* Translate with a single session. */
static void alone(mw_image image, int kind, int batch, int beam, outcome *out, moe_stats *stats) {
    moe_model *model = NULL;
    moe_session *s = NULL;
    OK(moe_model_open_memory(image.data, image.bytes, NULL, &model, NULL));
    const moe_session_params p = tuned(model, kind, batch, beam, 1);
    feed f = { .model = model, .ranks = 1, .outcome = out };
    memset(out, 0, SENTENCES * sizeof *out);
    OK(moe_session_new(model, &p, &s, NULL));
    OK(moe_translate(s, pull, done, &f, NULL));
    *stats = moe_session_stats(s);
    moe_session_free(s);
    moe_model_close(model);
}

/* ---- The same bytes ---- */

/* Return the image of a model. For types after Q8, the engine converts an F32 image. */
static mw_image image_of(int kind, int type) {
    mw_model *m = model_of(kind, type > MOE_TYPE_Q8 ? MW_F32 : (uint32_t)type);
    mw_image image = mw_build(m);
    mw_free(m);
    if (type <= MOE_TYPE_Q8) return image;
    char path[] = "/tmp/test_ranks.XXXXXX";
    struct stat info;
    moe_model *model = NULL;
    const moe_save_params save = { .type = (moe_type)type, .experts = (moe_type)type };
    int fd = mkstemp(path);
    REQUIRE(fd >= 0 && !close(fd), "no file");
    OK(moe_model_open_memory(image.data, image.bytes, NULL, &model, NULL));
    OK(moe_model_save(model, path, &save, NULL));
    moe_model_close(model);
    free(image.data);
    fd = open(path, O_RDONLY);
    REQUIRE(fd >= 0 && !fstat(fd, &info), "no file");
    image = mw_allocate_image((size_t)info.st_size);
    REQUIRE(read(fd, image.data, image.bytes) == (ssize_t)image.bytes, "a short file");
    close(fd);
    unlink(path);
    return image;
}

static void one_like_alone(mw_image image, int kind, int ranks, int batch, int beam, int threads, const char *what) {
    outcome expected[SENTENCES];
    moe_stats stats;
    uint64_t pairs = 0, rows = 0;
    alone(image, kind, batch, beam, expected, &stats);
    run *r = prepare(image, kind, ranks, batch, beam, threads);
    for (int i = 0; i < ranks; i++) r->parts[i].guarded = 1;
    go(r);
    for (int i = 0; i < ranks; i++) {
        const part *p = &r->parts[i];
        CHECK(!p->made && !p->status[0], "%s: rank %d: %s", what, i, p->error[0].message);
        CHECK(ranks == 1 || i < ranks - 1 || !p->stats.sentences, "%s: the last rank has sentences", what);
        pairs += p->stats.expert_pairs;
        rows += p->stats.rows;
    }
    for (size_t i = 0; i < SENTENCES; i++)
        CHECK(memcmp(&expected[i], &r->outcome[i], sizeof *expected) == 0, "%s: sentence %zu differs", what, i);
    if (kind == PROMPTED || kind == DELTA)
        pairs *= stats.rows, stats.expert_pairs *= rows; /* fewer prompts are alike */
    CHECK(pairs == stats.expert_pairs, "%s: %zu pairs, %zu alone", what, (size_t)pairs, (size_t)stats.expert_pairs);
    const size_t runs = (size_t)r->parts[0].rank.agreed / 2; /* number of runs of a graph with one mixture */
    CHECK((kind != DENSE && kind != LOADS_DENSE) || batch < 8 || r->world.chunks > runs,
          "%s: %zu exchanges in %zu runs", what, r->world.chunks, runs);
    drop(r);
}

TEST(ranks_give_the_same_bytes_as_one_process) {
    static const int numbers[] = { 1, 2, 3, 4, 7 }, types[] = { MOE_TYPE_F32, MOE_TYPE_Q8, MOE_TYPE_Q4, MOE_TYPE_Q4M,
                                                                MOE_TYPE_Q8B, MOE_TYPE_Q3, MOE_TYPE_Q2 };
    for (int kind = 0; kind < KINDS; kind++)
        for (size_t type = 0; type < MOE_COUNT(types); type++) {
            const mw_image image = image_of(kind, types[type]);
            for (size_t i = 0; i < MOE_COUNT(numbers); i++) {
                char what[96];
                if (type > 2 && i % 3 != 2) continue; /* only 3 ranks */
                const int batch = i % 2 ? 3 : 8, beam = (int)(1 + (i + type) % 3), threads = (int)(1 + i % 2);
                snprintf(what, sizeof what, "%s, %s, %d ranks, batch %d, beam %d, %d threads", kind_names[kind],
                         moe_type_name((moe_type)types[type]), numbers[i], batch, beam, threads);
                one_like_alone(image, kind, numbers[i], batch, beam, threads, what);
                if (mw_slow()) break;
            }
            free(image.data);
        }
}

/* Number of rows per expert. */
typedef struct counted {
    char layers[8][64];
    float rows[8][64];
    size_t n;
} counted;

static void count_rows(void *user, const moe_routing *r) {
    counted *c = user;
    size_t i = 0;
    while (i < c->n && strcmp(c->layers[i], r->layer) != 0) i++;
    REQUIRE(i < MOE_COUNT(c->layers), "too many layers");
    if (i == c->n) snprintf(c->layers[c->n++], sizeof *c->layers, "%s", r->layer);
    for (size_t k = 0; k < r->n; k++) c->rows[i][r->experts[k]]++;
}

/* Return the load of the busiest rank in the mixture with the most experts, as a multiple of the mean. */
static double busiest(mw_image image, int kind, int ranks) {
    double most = 0, sum = 0;
    run *r = prepare(image, kind, ranks, 8, 1, 1);
    go(r);
    for (int i = 0; i < ranks; i++) {
        const double pairs = (double)r->parts[i].rank.pairs;
        CHECK(!r->parts[i].made && !r->parts[i].status[0], "rank %d: %s", i, r->parts[i].error[0].message);
        sum += pairs;
        if (pairs > most) most = pairs;
    }
    drop(r);
    return most / sum * ranks;
}

/* Experts with lower numbers are used more. Without loads in the file, the first rank has the busiest experts. */
TEST(busy_experts_are_distributed) {
    enum { EXPERTS = 24 };
    counted counts = { .n = 0 };
    double before = 0;
    for (int with = 0; with < 2; with++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 7);
        mw_drop_tensor(m, "decoder.1.gate.weight");
        mw_drop_tensor(m, "decoder.1.experts");
        mw_moe(m, "decoder.1.", EXPERTS, 2, 12, "topk");
        mw_tensor *bias = mw_random_vector(m, "decoder.1.gate.bias", EXPERTS, 0, 0);
        for (size_t e = 0; e < EXPERTS; e++) memcpy(bias->data + 4 * e, &(float){ -(float)e / 8 }, 4);
        for (size_t i = 0; i < counts.n && with; i++) {
            const size_t n = mw_find_tensor(m, mw_name(counts.layers[i], ".experts"))->dims[0];
            mw_tensor *t = mw_random_vector(m, mw_name(counts.layers[i], ".experts.load"), n, 0, 0);
            memcpy(t->data, counts.rows[i], n * sizeof(float));
        }
        const mw_image image = mw_build(m);
        mw_free(m);
        const double most = busiest(image, GNMT, 4);
        printf("the busiest of 4 ranks computes %.2f of the mean\n", most);
        if (!with) {
            moe_model *model = NULL;
            moe_session *s = NULL;
            outcome *out = mw_zeros(SENTENCES * sizeof *out);
            OK(moe_model_open_memory(image.data, image.bytes, NULL, &model, NULL));
            moe_session_params p = tuned(model, GNMT, 8, 1, 1);
            feed f = { .model = model, .ranks = 1, .outcome = out };
            p.routing = count_rows, p.routing_user = &counts;
            OK(moe_session_new(model, &p, &s, NULL));
            OK(moe_translate(s, pull, done, &f, NULL));
            moe_session_free(s);
            moe_model_close(model);
            free(out);
            before = most;
        }
        /* The busiest expert alone exceeds a rank's share. */
        CHECK(with ? most - 1 < (before - 1) / 2 : most > 1.4, "%.2f of the mean, before %.2f", most, before);
        free(image.data);
    }
}

TEST(invalid_loads_are_refused) {
    static const char *const words[] = { "is negative at element 2", "is not finite at element 2",
                                         "decoder.1.experts.load" };
    for (int way = 0; way < 3; way++) {
        mw_model *m = model_of(GNMT, MW_F32);
        const size_t n = mw_find_tensor(m, "decoder.1.experts")->dims[0];
        mw_tensor *t = mw_random_vector(m, "decoder.1.experts.load", way == 2 ? n - 1 : n, 1, 2);
        if (way < 2) memcpy(t->data + 8, &(float){ way ? NAN : -1 }, 4);
        const mw_image image = mw_build(m);
        moe_model *model = NULL;
        moe_error e = { .code = MOE_OK };
        mw_free(m);
        assert_int_equal(moe_model_open_memory(image.data, image.bytes, NULL, &model, &e), MOE_ERROR_FORMAT);
        CHECK(strstr(e.message, words[way]) && strstr(e.message, "decoder.1.experts.load"), "%s", e.message);
        assert_null(model);
        free(image.data);
    }
}

/* Inputs of a classifier, split between ranks. */
typedef struct classifying {
    rank rank;
    mw_image image;
    size_t rows;
    float *inputs;
    int32_t *classes;
    float *logprobs;
    moe_status status;
    pthread_t thread;
} classifying;

static void *classify(void *arg) {
    classifying *c = arg;
    const moe_wire wire = { &c->rank, c->rank.number, c->rank.w ? c->rank.w->ranks : 0, agree, counts, swap };
    moe_model *model = NULL;
    moe_session *s = NULL;
    OK(moe_model_open_memory(c->image.data, c->image.bytes, NULL, &model, NULL));
    moe_session_params p = moe_session_params_default(model);
    p.batch = 4, p.threads = 1, p.device = "cpu";
    if (c->rank.w) p.wire = &wire;
    OK(moe_session_new(model, &p, &s, NULL));
    c->status = moe_classify(s, c->inputs, c->rows, c->classes, c->logprobs, NULL);
    moe_session_free(s);
    moe_model_close(model);
    return NULL;
}

TEST(ranks_classify) {
    enum { ROWS = 30, RANKS = 3 };
    mw_model *m = mw_classifier(MW_F32, 3);
    const mw_image image = mw_build(m);
    float inputs[ROWS * MW_INPUTS], logprobs[2][ROWS];
    int32_t classes[2][ROWS];
    uint64_t random = 5;
    run *r = mw_zeros(sizeof *r);
    classifying c[RANKS], one = { .image = image, .rows = ROWS, .inputs = inputs, .classes = classes[0] };
    mw_free(m);
    one.logprobs = logprobs[0];
    for (size_t i = 0; i < ROWS * MW_INPUTS; i++) inputs[i] = mw_uniform(&random, -1, 1);
    classify(&one);
    pthread_mutex_init(&r->world.mutex, NULL);
    pthread_cond_init(&r->world.wake, NULL);
    r->world.ranks = RANKS;
    r->world.strange = -1;
    alarm(60);
    for (int i = 0; i < RANKS; i++) { /* ranks have 7, 0 and 23 rows */
        const size_t first = i ? 7 : 0, rows = i == 0 ? 7 : i == 1 ? 0 : ROWS - 7;
        c[i] = (classifying){ .rank = { .w = &r->world, .number = i },
                              .image = image,
                              .rows = rows,
                              .inputs = inputs + first * MW_INPUTS,
                              .classes = classes[1] + first,
                              .logprobs = logprobs[1] + first };
        REQUIRE(!pthread_create(&c[i].thread, NULL, classify, &c[i]), "no thread");
    }
    for (int i = 0; i < RANKS; i++) pthread_join(c[i].thread, NULL);
    alarm(0);
    for (int i = 0; i < RANKS; i++) assert_int_equal(c[i].status, MOE_OK);
    assert_memory_equal(classes[0], classes[1], sizeof classes[0]);
    assert_memory_equal(logprobs[0], logprobs[1], sizeof logprobs[0]);
    drop(r);
    free(image.data);
}

/* ---- Failures ---- */

/* Check that all ranks return this status, with `words` in the message. */
static void expect(const run *r, int time, moe_status status, const char *words) {
    for (int i = 0; i < r->world.ranks; i++) {
        const part *p = &r->parts[i];
        const moe_status got = p->made ? p->made : p->status[time];
        CHECK(got == status && strstr(p->error[time].message, words), "rank %d: %s: %s", i, moe_status_name(got),
              p->error[time].message);
    }
}

TEST(errors_of_one_rank_fail_all) {
    const mw_image image = image_of(NLLB, MOE_TYPE_Q8);
    outcome expected[SENTENCES];
    moe_stats stats;
    alone(image, NLLB, 4, 2, expected, &stats);
    for (int way = 0; way < 3; way++) {
        run *r = prepare(image, NLLB, 3, 4, 2, 2);
        part *p = &r->parts[1];
        char words[64] = "rank 1: ";
        moe_status status = MOE_ERROR_CANCELLED;
        if (way < 2) p->feed.cancel_at = 9;
        if (way == 0) snprintf(words, sizeof words, "rank 1: cancelled by the caller");
        if (way == 1) p->feed.session = (moe_session *)1; /* work() sets this to the session */
        if (way == 2) {                                   /* damage a slab that only this rank reads */
            moe_model *model = NULL;
            OK(moe_model_open_memory(image.data, image.bytes, NULL, &model, NULL));
            for (size_t i = 0; i < moe_model_tensor_count(model); i++) {
                const moe_tensor_info t = moe_model_tensor(model, i);
                if (t.experts) p->damage = t.offset + (t.dims[0] / 3 + 1) * (t.bytes / t.dims[0]);
            }
            moe_model_close(model);
            status = MOE_ERROR_FORMAT;
        }
        for (int i = 0; i < 3; i++) r->parts[i].verify = 2, r->parts[i].times = way == 2 ? 1 : 2;
        go(r);
        expect(r, 0, status, words);
        for (int i = 0; i < 3 && way < 2; i++) assert_int_equal(r->parts[i].status[1], MOE_OK);
        for (size_t i = 0; i < SENTENCES && way < 2; i++) { /* the sessions remain usable */
            r->outcome[i].delivered = 1;
            CHECK(memcmp(&expected[i], &r->outcome[i], sizeof *expected) == 0, "sentence %zu differs", i);
        }
        drop(r);
    }
    free(image.data);
}

TEST(mismatched_ranks_are_refused) {
    const mw_image image = image_of(GNMT, MOE_TYPE_F32);
    mw_model *m = model_of(GNMT, MW_F32);
    mw_text(m, "general.name", "another model");
    const mw_image other = mw_build(m);
    mw_free(m);
    for (int way = 0; way < 6; way++) {
        static const char *const words[] = { "different builds", "different model files",
                                             "differ in batch",  "differ in batch",
                                             "rank 2: ",         "" };
        run *r = prepare(image, GNMT, 3, 4, 2, 1);
        if (way == 0) r->world.strange = 1, r->world.call = 1, r->world.place = 0;
        if (way == 1) r->parts[2].image = other;
        if (way == 2) r->parts[0].params.batch = 5;
        if (way == 3) r->world.strange = 2, r->world.call = 3, r->world.place = 1;
        if (way == 4) r->parts[2].params.beam = 0;
        go(r);
        /* Ranks of different builds may misread each other's later messages, so this failure must end the exchange. */
        if (way == 0) CHECK(r->world.calls == 1, "%d calls of another build", r->world.calls);
        if (way == 5) CHECK(!r->parts[0].made, "%s", r->parts[0].error[0].message);
        else expect(r, 0, MOE_ERROR_ARGUMENT, words[way]);
        drop(r);
    }
    free(other.data);
    free(image.data);
}

TEST(failing_connections_end_all_ranks) {
    const mw_image image = image_of(GNMT, MOE_TYPE_F32);
    for (int at = 1; at < 200; at = at < 30 ? at + 1 : at + 17) {
        run *r = prepare(image, GNMT, 3, 4, 2, 1);
        r->world.fail_at = at;
        for (int i = 0; i < 3; i++) r->parts[i].times = 2;
        go(r);
        expect(r, 0, MOE_ERROR_IO, "cable cut");
        if (!r->parts[0].made) expect(r, 1, MOE_ERROR_IO, "cable cut");
        drop(r);
    }
    free(image.data);
}

TEST(invalid_connections_and_memory_are_refused) {
    const mw_image image = image_of(GNMT, MOE_TYPE_F32);
    world w = { .ranks = 2, .strange = -1 };
    rank r = { .w = &w };
    const moe_wire good = wire_of(&r);
    moe_model *model = NULL;
    moe_error e;
    OK(moe_model_open_memory(image.data, image.bytes, NULL, &model, NULL));
    for (int way = 0; way < 7; way++) {
        moe_wire wire = good;
        moe_session_params p = tuned(model, GNMT, 4, 2, 1);
        moe_session *s = NULL;
        size_t bytes = 0;
        p.wire = &wire;
        if (way == 0) wire.ranks = 0;
        if (way == 1) wire.ranks = MOE_MAX_RANKS + 1;
        if (way == 2) wire.rank = -1;
        if (way == 3) wire.rank = 2;
        if (way == 4) wire.agree = NULL;
        if (way == 5) wire.counts = NULL;
        if (way == 6) wire.swap = NULL;
        assert_int_equal(moe_session_new(model, &p, &s, &e), MOE_ERROR_ARGUMENT);
        assert_string_equal(e.where, "wire");
        assert_int_equal(moe_session_bytes(model, &p, &bytes, &e), MOE_ERROR_ARGUMENT);
        assert_null(s);
    }
    moe_model_close(model);

    /* Streamed models are not supported with a wire. This wire has a single rank. */
    char path[] = "/tmp/test_ranks.XXXXXX";
    const int fd = mkstemp(path);
    const moe_model_params stream = { .stream = 1 };
    world one = { .ranks = 1, .strange = -1 };
    rank self = { .w = &one };
    const moe_wire wire = wire_of(&self);
    moe_session *s = NULL;
    pthread_mutex_init(&one.mutex, NULL);
    pthread_cond_init(&one.wake, NULL);
    REQUIRE(fd >= 0 && write(fd, image.data, image.bytes) == (ssize_t)image.bytes && !close(fd), "no file");
    OK(moe_model_open(path, &stream, &model, NULL));
    moe_session_params p = tuned(model, GNMT, 4, 2, 1);
    p.expert_memory = 1 << 20;
    p.wire = &wire;
    assert_int_equal(moe_session_new(model, &p, &s, &e), MOE_ERROR_UNSUPPORTED);
    assert_string_equal(e.where, "wire");
    moe_model_close(model);
    unlink(path);
    free(image.data);
}

int main(void) { return run_all_tests(NULL, NULL); }
