/* draft_bench.c - measures how drafts change the speed of a decoder-only model: those of requests (moe_request.draft)
 * or, if the model has a layer that predicts further tokens, those of this layer.
 *
 *     make build/draft_bench
 *     build/draft_bench MODEL [BATCHES [TOKENS [ROUNDS [THREADS [SHARE [SOURCES]]]]]]     default: 1,8,32 48 3 2
 *
 * The sources are SOURCES texts of random tokens, by default a batch. The drafts are the model's own translations with
 * a share of right tokens, SHARE, and random tokens in place of the others; a negative SHARE measures 0, 0.5, 0.9 and
 * 1. A predictor computes its tokens, which are then replaced, so that a share of them is right. Runs without and with
 * drafts alternate, and all results must have the same bytes. Prints a JSON line for each
 * batch and share: the median of the ratios, and how many of the computed guesses were right.
 */
#define _POSIX_C_SOURCE 200809L

#include "moe.c"

enum { SOURCE = 32, MOST = 2048, LONGEST = 512, ROUNDS = 32 };

static const double shares[] = { 0, 0.5, 0.9, 1 };

typedef struct bench {
    int32_t sources[MOST][SOURCE], targets[MOST][LONGEST], drafts[MOST][LONGEST];
    float scores[MOST];
    size_t lengths[MOST], n, sent, tokens;
    double share;
    uint32_t random;
    int predicts, drafted, changed; /* drafted: 1 to send drafts; changed: results that differ from those without */
} bench;

static bench bench_of;

static int pull(void *user, int wait, moe_request *q) {
    bench *b = user;
    (void)wait;
    if (b->sent == b->n) return MOE_PULL_END;
    q->source = b->sources[b->sent];
    q->n_source = SOURCE;
    q->draft = b->drafted && !b->predicts ? b->drafts[b->sent] : NULL;
    q->n_draft = q->draft ? b->lengths[b->sent] : 0;
    q->user = b->lengths + b->sent++;
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *r) {
    bench *b = user;
    const size_t i = (size_t)((size_t *)r->user - b->lengths);
    if (r->status) exit((fprintf(stderr, "draft_bench: %s\n", r->message), 1));
    const moe_hypothesis *h = r->hypotheses;
    b->tokens += h->n_ids;
    if (b->drafted)
        b->changed += h->n_ids != b->lengths[i] || h->score != b->scores[i] ||
                      memcmp(h->ids, b->targets[i], h->n_ids * sizeof *h->ids) != 0;
    if (b->drafted) return;
    memcpy(b->targets[i], h->ids, h->n_ids * sizeof *h->ids);
    b->lengths[i] = h->n_ids;
    b->scores[i] = h->score;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Translate all sources; return tokens per second. */
static double turn(moe_session *s, bench *b, int drafted) {
    moe_error e;
    const double begin = seconds();
    b->sent = b->tokens = 0, b->drafted = drafted;
    if (moe_translate(s, pull, done, b, &e)) exit((fprintf(stderr, "draft_bench: %s\n", e.message), 1));
    return (double)b->tokens / (seconds() - begin);
}

static int ascending(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double median(double *x, size_t n) {
    qsort(x, n, sizeof *x, ascending);
    return x[n / 2];
}

static uint32_t draw(uint32_t *random) { return (*random = *random * 1664525 + 1013904223) >> 8; }

/* Replace the predictor's tokens. */
static void teach(void *user, const moe_node *t, int after) {
    const moe_session *s = user;
    if (t->op != MOE_OP_OUTPUT || !after) return;
    for (size_t k = 0; k < s->n_slots; k++) {
        const moe_slot *slot = &s->slots[k];
        if (!slot->active || slot->waits || !slot->asks) continue;
        const size_t i = (size_t)((size_t *)s->tickets[k].request.user - bench_of.lengths),
                     at = slot->n_tokens - slot->task.prompt - slot->shown;
        const int right = draw(&bench_of.random) % 1000 < (uint32_t)(1000 * bench_of.share);
        s->frames[MOE_PREDICTOR].beam.top_ids[slot->live[0].row] =
            right && at < bench_of.lengths[i] ? bench_of.targets[i][at] : (int32_t)(300 + draw(&bench_of.random) % 200);
    }
}

static void measure(const moe_model *m, moe_session_params p, int batch, size_t n, size_t rounds, double only,
                    const char *name) {
    bench *const b = &bench_of;
    moe_error e;
    moe_session *plain, *drafting;
    uint32_t random = 1;
    p.batch = batch;
    b->n = n ? n : batch < 2 ? 2 : (size_t)batch;
    if (moe_session_new(m, &p, &plain, &e) || moe_session_new(m, &p, &drafting, &e))
        exit((fprintf(stderr, "draft_bench: %s\n", e.message), 1));
    b->predicts = m->n_predictor > 0, plain->predicts = 0;
    drafting->graphs[MOE_PREDICTOR].watch = teach, drafting->graphs[MOE_PREDICTOR].watcher = drafting;
    const uint32_t vocabulary = (uint32_t)moe_model_vocabulary(m);
    for (size_t i = 0; i < b->n; i++)
        for (size_t k = 0; k < SOURCE; k++) b->sources[i][k] = (int32_t)(300 + draw(&random) % (vocabulary / 2));
    for (size_t share = 0; share < sizeof shares / sizeof *shares; share++) {
        double ratios[ROUNDS], without[ROUNDS], with[ROUNDS];
        if (only >= 0 && only != shares[share]) continue;
        b->share = shares[share], b->random = 1;
        turn(plain, b, 0);
        for (size_t i = 0; i < b->n; i++)
            for (size_t k = 0; k < b->lengths[i]; k++)
                b->drafts[i][k] = draw(&random) % 1000 < (uint32_t)(1000 * shares[share])
                                      ? b->targets[i][k]
                                      : (int32_t)(300 + draw(&random) % (vocabulary / 2));
        turn(drafting, b, 1);
        const moe_stats before = moe_session_stats(drafting);
        for (size_t i = 0; i < rounds; i++) {
            without[i] = turn(plain, b, 0), with[i] = turn(drafting, b, 1);
            ratios[i] = with[i] / without[i];
        }
        const moe_stats after = moe_session_stats(drafting);
        const double ratio = median(ratios, rounds); /* sorts them */
        printf("{\"model\":\"%s\",\"batch\":%d,\"right\":%.1f,\"tok_s\":%.2f,\"draft_tok_s\":%.2f,\"ratio\":%.3f,"
               "\"ratio_min\":%.3f,\"ratio_max\":%.3f,\"guesses\":%llu,\"guesses_right\":%llu,\"changed\":%d}\n",
               name, batch, shares[share], median(without, rounds), median(with, rounds), ratio, ratios[0],
               ratios[rounds - 1], (unsigned long long)(after.draft_rows - before.draft_rows),
               (unsigned long long)(after.draft_tokens - before.draft_tokens), b->changed);
        fflush(stdout);
    }
    moe_session_free(plain);
    moe_session_free(drafting);
    if (b->changed) exit(1);
}

int main(int argc, char **argv) {
    moe_model *m;
    moe_error e;
    if (argc < 2)
        return fputs("usage: draft_bench MODEL [BATCHES [TOKENS [ROUNDS [THREADS [SHARE [SOURCES]]]]]]\n", stderr), 2;
    const char *batches = argc > 2 ? argv[2] : "1,8,32";
    const int tokens = argc > 3 ? atoi(argv[3]) : 48, rounds = argc > 4 ? atoi(argv[4]) : 3;
    const int n = argc > 7 ? atoi(argv[7]) : 0;
    if (n < 0 || n > MOST || tokens < 1 || tokens > LONGEST || rounds < 1 || rounds > ROUNDS) return 2;
    if (moe_model_open(argv[1], NULL, &m, &e)) return fprintf(stderr, "draft_bench: %s\n", e.message), 1;
    moe_session_params p = moe_session_params_default(m);
    p.beam = p.nbest = 1, p.threads = argc > 5 ? atoi(argv[5]) : 2;
    p.max_target = p.min_target = p.max_len_offset = tokens, p.max_len_factor = 0, p.stop_loops = 0;
    p.max_source = 2 * SOURCE;
    for (const char *at = batches; *at;) {
        char *end;
        const long batch = strtol(at, &end, 10);
        if (end == at || batch < 1 || batch > MOST) return fputs("draft_bench: invalid batch\n", stderr), 2;
        measure(m, p, (int)batch, (size_t)n, (size_t)rounds, argc > 6 ? atof(argv[6]) : -1, argv[1]);
        at = end + (*end == ',');
    }
    moe_model_close(m);
    return 0;
}
