/* bank_reads.c - counts the reads of moe.c's expert bank for a trace, without a model; for tests/bench/belady.py.
 *
 * The input is numbers separated by white space: slots, threads, mixtures, encoder mixtures, experts of each mixture,
 * and runs. A run is a mixture, a number of experts, and the index and rows of each expert. Mixture -1 resets the
 * counts. Prints the numbers of visits, reads, prefetches (which are also reads) and transit slots.
 *
 * The bank plans slots and prefetches as usual, but all reads complete before the next run, without reader threads.
 */
#include "moe.c"

enum { MOST = 64, SLAB = 64 };

static size_t next(void) {
    long n;
    if (scanf("%ld", &n) == 1 && n >= 0) return (size_t)n;
    fputs("bank_reads: expected a number\n", stderr);
    exit(2);
}

static void open_bank(moe_bank *b, moe_graph *graphs, size_t slots, size_t threads) {
    moe_layout at = { NULL, 0, 0 };
    moe_error e;
    if (moe_bank_measure(b, graphs, slots * SLAB, &e)) exit((fprintf(stderr, "bank_reads: %s\n", e.message), 2));
    moe_bank_layout(b, graphs, threads, &at);
    at = (moe_layout){ calloc(at.used, 1), 0, 0 };
    if (!at.base) exit(3);
    moe_bank_layout(b, graphs, threads, &at);
    pthread_mutex_init(&b->mutex, NULL);
    pthread_cond_init(&b->changed, NULL);
}

/* Complete all planned reads and use the experts; return the number of reads. */
static size_t finish(moe_bank *b) {
    const size_t reads = b->issued - b->claimed;
    for (; b->claimed < b->issued; b->claimed++) b->reads[b->claimed % b->capacity].done = 1;
    for (size_t i = 0; i < b->slots; i++) atomic_store(&b->done[i], b->planned[i]);
    return reads;
}

int main(void) {
    static moe_experts experts[MOST];
    static moe_node nodes[MOST];
    moe_graph graphs[MOE_GRAPHS] = { { .nodes = nodes } };
    moe_bank b = { .file = NULL };
    const size_t slots = next(), threads = next(), n = next(), encoders = next();
    size_t visits = 0, reads = 0, ahead = 0;
    long layer;
    if (n > MOST || encoders > n) return 2;
    for (size_t i = 0; i < n; i++) {
        experts[i] = (moe_experts){ .count = next(), .stride = SLAB };
        nodes[i] = (moe_node){ .op = MOE_OP_EXPERTS, .experts = &experts[i] };
    }
    graphs[MOE_ENCODER].count = encoders;
    graphs[MOE_DECODER] = (moe_graph){ .nodes = nodes + encoders, .count = n - encoders };
    open_bank(&b, graphs, slots, threads);
    size_t *first = calloc(b.longest + 1, sizeof *first), *rows = calloc(b.longest, sizeof *rows);
    int32_t *wanted = calloc(b.longest, sizeof *wanted);
    if (!first || !rows || !wanted) return 3;
    while (scanf("%ld", &layer) == 1) {
        if (layer < 0) {
            visits = reads = 0;
            ahead = b.ahead;
            continue;
        }
        const size_t wants = next();
        if ((size_t)layer >= n || wants > experts[layer].count) return 2;
        memset(rows, 0, b.longest * sizeof *rows);
        for (size_t i = 0; i < wants; i++) {
            wanted[i] = (int32_t)next();
            if ((size_t)wanted[i] >= experts[layer].count) return 2;
            rows[wanted[i]] = next();
        }
        for (size_t i = 0; i < experts[layer].count; i++) first[i + 1] = first[i] + rows[i];
        moe_bank_plan(&b, &experts[layer], wanted, wants, first, 1);
        visits += wants;
        reads += finish(&b);
    }
    printf("%zu %zu %zu %zu\n", visits, reads, (size_t)b.ahead - ahead, b.cache.transit);
    return 0;
}
