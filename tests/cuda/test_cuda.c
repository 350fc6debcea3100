/* test_cuda.c - runs moe-cuda.cu on the processor with cuda_emu.h. Kernels are compared with portable kernels, and
 * models with the CPU backend, bit by bit except that all NaNs are equal. Every CUDA call fails once. */
#include "moe.c"

#include "cuda_emu.h"
#include "tests/engine/model_writer.h"

#include "tests/test.h"

static int is_nan(float f) { return (moe_to_bits(f) & 0x7fffffffu) > 0x7f800000u; }
static int same(float a, float b) { return moe_to_bits(a) == moe_to_bits(b) || (is_nan(a) && is_nan(b)); }

static void defaults(void) {
    emu_reset(1);
    emu_fail(0, 0, 0);
    emu_few_rows = 32;
    emu_pairs = 1 << 14;
    emu_sums = 1 << 24;
    emu_memory = (size_t)1 << 30;
}

/* Return a typical number, occasionally a tiny one or, if `broken`, a huge, infinite or NaN one. */
static float number(uint64_t *random, int broken) {
    static const uint32_t odd[] = { 0,           0x80000000u, 1,           0x807fffffu, 0x00800000u,
                                    0x7f7fffffu, 0xff7fffffu, 0x7f800000u, 0xff800000u, 0x7fc00000u };
    const size_t roll = mw_below(random, 64);
    if (roll == 0) return moe_from_bits(odd[mw_below(random, broken ? MOE_COUNT(odd) : 5)]);
    return roll < 60 ? mw_uniform(random, -3, 3) : mw_uniform(random, -120, 120);
}

static float *numbers(uint64_t *random, size_t n, int broken) {
    float *x = mw_zeros(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = number(random, broken);
    return x;
}

/* ---- Graphs of a few nodes on both backends ---- */

/* Traced rows of every node, in node order. */
typedef struct journal {
    float *rows[32];
    char name[32][48];
    size_t count, at;
    size_t n[32], cols[32];
} journal;

/* Return 1 for the norms of experts' outputs, which only the CPU backend traces. */
static int are_sizes(const char *name) { return strlen(name) > 6 && strcmp(name + strlen(name) - 6, ".sizes") == 0; }

static void record(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    journal *j = user;
    float *copy;
    if (are_sizes(name)) return;
    copy = mw_zeros(rows * cols * sizeof *copy + 1);
    for (size_t r = 0; r < rows; r++) memcpy(copy + r * cols, data + r * stride, cols * sizeof *copy);
    snprintf(j->name[j->count], sizeof j->name[0], "%s", name);
    j->n[j->count] = rows;
    j->cols[j->count] = cols;
    j->rows[j->count++] = copy;
}

static void compare(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    journal *j = user;
    const size_t i = j->at++;
    CHECK(i < j->count && strcmp(j->name[i], name) == 0 && j->cols[i] == cols, "node %zu is %s", i, name);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++)
            CHECK(same(j->rows[i][r * cols + c], data[r * stride + c]),
                  "%s, row %zu of %zu, column %zu of %zu: %a, the CPU has %a", name, r, rows, c, cols,
                  (double)data[r * stride + c], (double)j->rows[i][r * cols + c]);
}

static void forget(journal *j) {
    for (size_t i = 0; i < j->count; i++) free(j->rows[i]);
    memset(j, 0, sizeof *j);
}

typedef struct bench {
    size_t rows, capacity;             /* capacity: 0 means `rows` */
    size_t sentences, max_source, top; /* 0 means 1 */
    size_t max_target;
    moe_frame frame;
    void (*build)(moe_graph *g, void *user, void *states);
    void *user;
    const void *states; /* initial states */
    size_t state_bytes;
    moe_frame frames[2];
    /* 1 to use frames[0] on the processor and frames[1] on the device, with different buffers for results */
    int two_frames;
    size_t most_bytes; /* limit of device memory; 0 if unlimited */
} bench;

static moe_graph bench_graph(const bench *b, moe_node *nodes, size_t capacity, void *states, int on_device) {
    moe_graph g = { .nodes = nodes,
                    .capacity = capacity,
                    .rows = b->capacity ? b->capacity : b->rows,
                    .threads = 1,
                    .sentences = moe_max(b->sentences, 1),
                    .max_source = moe_max(b->max_source, 1),
                    .max_target = b->max_target,
                    .top = moe_max(b->top, 1),
                    .traced = 1,
                    .on_device = on_device };
    moe_error e;
    b->build(&g, b->user, states);
    CHECK(moe_graph_plan(&g, &e) == MOE_OK, "%s", e.message);
    return g;
}

/* Compare all nodes and the final states of a graph on the processor and, as graph `which`, on the device. */
static void run_both(const bench *b, int which) {
    static moe_pool pool;
    moe_node nodes[32];
    journal j = { .count = 0 };
    moe_error e = { MOE_OK, "", "" };
    const moe_allocator a = moe_allocator_or_default(NULL);
    const moe_device_params params = { .allocator = a };
    const moe_device_api *api = moe_cuda();
    char *states = mw_zeros(b->state_bytes + 1), *arena;
    moe_device *device;
    moe_graph graphs[MOE_GRAPHS], g;
    moe_run run;
    void *memory;
    uint64_t bytes;
    pool.count = 1;
    if (b->state_bytes) memcpy(states, b->states, b->state_bytes);
    g = bench_graph(b, nodes, 32, states, 0);
    arena = mw_zeros(g.bytes);
    moe_graph_place(&g, arena);
    run = (moe_run){ &moe_kernels_portable, &pool, &g, b->two_frames ? &b->frames[0] : &b->frame, 0 };
    moe_graph_run(&run, record, &j);
    free(arena);

    CHECK(api->open(&params, &device, &e) == MOE_OK, "%s", e.message);
    CHECK(api->allocate(device, b->state_bytes, "states", &memory, &e) == MOE_OK, "%s", e.message);
    if (b->state_bytes) memcpy(memory, b->states, b->state_bytes);
    g = bench_graph(b, nodes, 32, memory, 1);
    CHECK(api->allocate(device, g.bytes, "arena", (void **)&arena, &e) == MOE_OK, "%s", e.message);
    moe_graph_place(&g, arena);
    memset(graphs, 0, sizeof graphs);
    graphs[which] = g;
    graphs[!which].top = graphs[!which].max_source = graphs[!which].rows = 1;
    CHECK(api->bind(device, graphs, NULL, &e) == MOE_OK, "%s: %s", e.where, e.message);
    CHECK(api->run(device, which, b->two_frames ? &b->frames[1] : &b->frame, compare, &j, &e) == MOE_OK, "%s: %s",
          e.where, e.message);
    CHECK(j.at == j.count, "%zu nodes of %zu", j.at, j.count);
    api->describe(device, &bytes);
    CHECK(!b->most_bytes || bytes < b->most_bytes, "%llu bytes of device memory are used", (unsigned long long)bytes);
    for (size_t i = 0; i < b->state_bytes / sizeof(float); i++)
        CHECK(same(((float *)memory)[i], ((float *)(void *)states)[i]), "number %zu of the states", i);
    api->close(device);
    free(states);
    forget(&j);
    assert_int_equal(emu_live(), 0);
}

static void pack_rows(moe_type type, size_t rows, size_t cols, const float *x, void *to) {
    int8_t *scratch = mw_zeros(2 * moe_round_up(cols, 64));
    for (size_t r = 0; r < rows; r++) moe_pack_row(type, rows, cols, r, x + r * cols, to, scratch);
    free(scratch);
}

static void *aligned_zeros(size_t to, size_t bytes) {
    void *memory;
    if (posix_memalign(&memory, to, bytes)) abort();
    memset(memory, 0, bytes);
    return memory;
}

/* Pack floats into a matrix of any type. The caller must free *blob. */
static moe_matrix pack(moe_type type, size_t rows, size_t cols, const float *x, void **blob) {
    *blob = aligned_zeros(64, moe_matrix_bytes(type, rows, cols));
    pack_rows(type, rows, cols, x, *blob);
    return moe_matrix_view(type, rows, cols, *blob);
}

/* Pack an expert: up [hidden, width], followed by down [width, hidden]. */
static void pack_slab(moe_type type, size_t hidden, size_t width, const float *x, char *to) {
    uint64_t down = 0;
    moe_slab_bytes(type, 1, hidden, width, &down);
    pack_rows(type, hidden, width, x, to);
    pack_rows(type, width, hidden, x + hidden * width, to + down);
}

/* Graph: embed -> linear with bias, with and without relu -> linear -> sigmoid, tanh, swish, gelu,
 * norm, add, concat, view */
typedef struct linears {
    moe_matrix table, first, second, positions;
    const float *bias;
} linears;

static void build_linears(moe_graph *g, void *user, void *states) {
    linears *l = user;
    moe_node *x = moe_op_embed(g, &l->table, 1.0f, "x"), *y, *z;
    const moe_norm_op norm = { l->bias, l->bias + l->first.rows, 1e-5f, 0 };
    (void)states;
    if (l->positions.rows) x->embed.positions = &l->positions;
    y = moe_op_linear(g, &l->first, x, l->bias, "y");
    moe_op_linear(g, &l->first, x, l->bias, "relu")->linear.relu = 1;
    z = moe_op_linear(g, &l->second, x, NULL, "z");
    moe_op_unary(g, MOE_UNARY_SWISH, moe_op_norm(g, &norm, z, "norm"), "swish of norm");
    moe_op_unary(g, MOE_UNARY_SWISH, z, "swish");
    moe_op_unary(g, MOE_UNARY_GELU, z, "gelu");
    moe_op_unary(g, MOE_UNARY_GELU_TANH, z, "gelu_tanh");
    z = moe_op_concat(g, moe_op_unary(g, MOE_UNARY_SIGMOID, z, "sigmoid"), moe_op_unary(g, MOE_UNARY_TANH, y, "tanh"),
                      "concat");
    z = moe_op_view(g, z, y->cols / 2, y->cols, "view");
    moe_op_pointwise(g, z, y, 0, "add");
}

static void rows_of_ids(int32_t *ids, size_t rows, size_t n, uint64_t *random) {
    for (size_t i = 0; i < rows; i++) ids[i] = (int32_t)mw_below(random, n);
}

TEST(products_and_rows_equal_the_cpu) {
    static const moe_type types[] = { MOE_TYPE_Q8, MOE_TYPE_Q4,  MOE_TYPE_Q4M, MOE_TYPE_Q8B, MOE_TYPE_Q3,
                                      MOE_TYPE_Q2, MOE_TYPE_F32, MOE_TYPE_F16, MOE_TYPE_BF16 };
    static const size_t shapes[][3] = { { 1, 1, 1 },    { 2, 17, 16 },   { 7, 64, 33 },  { 8, 63, 100 },
                                        { 9, 130, 15 }, { 16, 513, 48 }, { 33, 31, 70 }, { 45, 200, 64 } };
    uint64_t random = 5;
    defaults();
    for (size_t t = 0; t < MOE_COUNT(types); t++)
        for (size_t s = 0; s < MOE_COUNT(shapes); s++) {
            const size_t rows = shapes[s][0], cols = shapes[s][1], out = shapes[s][2], vocabulary = 19;
            float *x = numbers(&random, vocabulary * cols, s % 2), *w = numbers(&random, 2 * out * cols, 0),
                  *bias = numbers(&random, 2 * out, 0);
            void *blobs[3];
            int32_t ids[64], positions[64];
            linears l = { pack(s % 3 ? MOE_TYPE_F32 : types[t], vocabulary, cols, x, &blobs[0]),
                          pack(types[t], out, cols, w, &blobs[1]), pack(types[t], out, cols, w + out * cols, &blobs[2]),
                          moe_matrix_view(MOE_TYPE_F32, s % 2 ? vocabulary : 0, cols, x), bias };
            bench b = { .rows = rows, .capacity = rows + s % 3, .build = build_linears, .user = &l };
            rows_of_ids(ids, rows, vocabulary, &random);
            rows_of_ids(positions, rows, vocabulary, &random);
            b.frame = (moe_frame){ .rows = rows, .ids = ids, .positions = positions };
            emu_few_rows = s % 2 ? 4 : 32;
            emu_sums = s == 6 ? 1 : 1 << 24; /* compute products in slices of rows */
            run_both(&b, 0);
            for (int i = 0; i < 3; i++) free(blobs[i]);
            free(x), free(w), free(bias);
        }
}

/* Graph: gathers -> an LSTM step -> stores */
static void build_step(moe_graph *g, void *user, void *states) {
    const moe_cell *cell = user;
    const size_t hidden = cell->hidden, width = cell->w_x.cols;
    float *r_state = states, *c_state = r_state + g->rows * hidden, *x_state = c_state + g->rows * hidden;
    moe_node *r = moe_op_gather(g, r_state, hidden, "r"), *c = moe_op_gather(g, c_state, hidden, "c");
    moe_node *both = moe_op_lstm_step(g, cell, moe_op_gather(g, x_state, width, "x"), r, c, "cell");
    moe_op_store(g, moe_op_view(g, both, 0, hidden, "h"), MOE_BY_PARENT, r_state, "store_r");
    moe_op_store(g, moe_op_view(g, both, hidden, hidden, "c_next"), MOE_BY_PARENT, c_state, "store_c");
}

TEST(states_and_steps_equal_the_cpu) {
    static const moe_type types[] = { MOE_TYPE_Q8, MOE_TYPE_Q4, MOE_TYPE_Q4M, MOE_TYPE_Q8B,
                                      MOE_TYPE_Q3, MOE_TYPE_Q2, MOE_TYPE_F32, MOE_TYPE_BF16 };
    uint64_t random = 6;
    defaults();
    for (size_t s = 0; s < 8; s++) {
        const size_t rows = 5, hidden = s < 4 ? 1 + 71 * s : 16 * (s - 3), width = 24 + 31 * s;
        const moe_type x_type = types[s % 4], r_type = types[(s + s / 4) % 4];
        float *w_x = numbers(&random, 4 * hidden * width, 0), *w_r = numbers(&random, 4 * hidden * hidden, 0),
              *bias = numbers(&random, 4 * hidden, 0), *values = numbers(&random, rows * (2 * hidden + width), s % 2);
        void *blobs[2];
        moe_cell cell = { .w_x = pack(x_type, 4 * hidden, width, w_x, &blobs[0]),
                          .w_r = pack(r_type, 4 * hidden, hidden, w_r, &blobs[1]),
                          .bias = bias,
                          .hidden = hidden,
                          .state = hidden,
                          .forget_bias = 0.75f };
        int32_t parents[5] = { 3, -1, 0, 3, 2 };
        bench b = { .rows = rows,
                    .build = build_step,
                    .user = &cell,
                    .states = values,
                    .state_bytes = rows * (2 * hidden + width) * sizeof *values,
                    .frame = { .rows = rows, .beam = { .parents = parents } } };
        run_both(&b, 0);
        free(blobs[0]), free(blobs[1]);
        free(w_x), free(w_r), free(bias), free(values);
    }
}

/* Return one level of gates. Kinds: 0 softmax, 1 top k, 2 and 3 threshold with either policy, 4 sigmoid. */
static moe_gating level(int kind, size_t n, size_t k, const float *threshold) {
    const moe_gate kinds[] = { MOE_GATE_SOFTMAX, MOE_GATE_TOPK, MOE_GATE_THRESHOLD, MOE_GATE_THRESHOLD,
                               MOE_GATE_SIGMOID };
    return (moe_gating){ .kind = kinds[kind], .level = n, .k = k, .empty_zero = kind == 3, .threshold = threshold };
}

static moe_experts row_of_slabs(moe_type type, size_t n, size_t hidden, size_t width, const void *slabs, float scale) {
    moe_experts e = { .count = n, .hidden = hidden, .scale = scale };
    uint64_t down = 0;
    e.stride = (size_t)moe_slab_bytes(type, 1, hidden, width, &down);
    e.up = moe_matrix_view(type, hidden, width, slabs);
    e.down = moe_matrix_view(type, width, hidden, (const char *)slabs + down);
    return e;
}

/* Mixture whose gate logits are the rows of a table. */
typedef struct mixture {
    moe_gating gate;
    moe_experts experts;
    moe_matrix logits, x;
} mixture;

static void build_mixture(moe_graph *g, void *user, void *states) {
    mixture *m = user;
    moe_node *logits = moe_op_embed(g, &m->logits, 1.0f, "logits"), *x = moe_op_embed(g, &m->x, 1.0f, "x");
    (void)states;
    moe_op_experts(g, &m->experts, x, moe_op_gate(g, &m->gate, logits, NULL, 0, NULL, "gate"), "experts");
}

TEST(mixtures_equal_the_cpu) {
    static const moe_type types[] = { MOE_TYPE_Q8, MOE_TYPE_Q4, MOE_TYPE_Q4M, MOE_TYPE_Q8B,
                                      MOE_TYPE_Q3, MOE_TYPE_Q2, MOE_TYPE_F32, MOE_TYPE_BF16 };
    static const size_t shapes[][5] = {
        /* rows, experts, k, hidden, width */
        { 1, 1, 1, 3, 5 },    { 4, 5, 2, 40, 16 }, { 5, 130, 3, 17, 70 },
        { 40, 6, 2, 33, 24 }, { 7, 300, 5, 4, 8 }, { 36, 3, 3, 65, 64 },
    };
    uint64_t random = 7;
    for (size_t i = 0; i < MOE_COUNT(types) * MOE_COUNT(shapes) * 4; i++) {
        const size_t *shape = shapes[i / 4 % MOE_COUNT(shapes)], rows = shape[0], n = shape[1], hidden = shape[3],
                     width = shape[4], vocabulary = 13;
        const moe_type type = types[i / 4 / MOE_COUNT(shapes)];
        const int kind = i % 8 == 4 ? 4 : (int)(i % 4);
        float *x = numbers(&random, vocabulary * width, 0), *logits = numbers(&random, vocabulary * n, 0),
              *w = numbers(&random, 2 * hidden * width, 0);
        float *threshold = mw_zeros(n * sizeof *threshold), *biases = numbers(&random, n * (hidden + width), 0);
        uint64_t down;
        const size_t slab = (size_t)moe_slab_bytes(type, 1, hidden, width, &down);
        char *slabs;
        void *blobs[2];
        int32_t ids[64];
        mixture m = { .logits = pack(MOE_TYPE_F32, vocabulary, n, logits, &blobs[0]),
                      .x = pack(MOE_TYPE_F32, vocabulary, width, x, &blobs[1]) };
        bench b = { .rows = rows, .build = build_mixture, .user = &m };
        if (n * hidden > 2000 && type != MOE_TYPE_Q8) { /* test large shapes with one type */
            free(x), free(logits), free(w), free(threshold), free(biases), free(blobs[0]), free(blobs[1]);
            continue;
        }
        defaults();
        emu_few_rows = i % 3 ? 2 : 1000;
        emu_pairs = i % 2 ? 1 << 14 : n + 3;
        emu_sums = i % 5 ? 1 << 24 : 1;
        slabs = aligned_zeros(4096, n * slab);
        for (size_t e = 0; e < n; e++) {
            for (size_t k = 0; k < 8; k++) w[mw_below(&random, 2 * hidden * width)] = number(&random, 0);
            pack_slab(type, hidden, width, w, slabs + e * slab);
        }
        for (size_t r = 0; r < vocabulary; r++) /* rows with ties, and rows in which no expert or group passes */
            for (size_t e = 0; e < n; e++)
                logits[r * n + e] = r % 3 == 1 ? (float)(e % 4) : r % 3 == 2 ? 1.0f : logits[r * n + e] * 0.05f;
        if (i % 5 == 4) /* a NaN in a random place */
            for (size_t r = 0; r < vocabulary; r++)
                logits[r * n + mw_below(&random, 2 * n) % n] = moe_from_bits(0x7fc00000u);
        memcpy(blobs[0], logits, vocabulary * n * sizeof *logits);
        for (size_t e = 0; e < n; e++) threshold[e] = mw_uniform(&random, 0.8f, 1.8f) / (float)n;
        m.gate = level(kind, n, shape[2], threshold);
        m.experts = row_of_slabs(type, n, hidden, width, slabs, i % 7 ? 0.75f : 1.0f);
        if (i / 4 % 4 & 1) m.experts.up_bias = biases;
        if (i / 4 % 4 & 2) m.experts.down_bias = biases + n * hidden;
        rows_of_ids(ids, rows, vocabulary, &random);
        b.frame = (moe_frame){ .rows = rows, .ids = ids };
        run_both(&b, 0);
        free(x), free(logits), free(w), free(threshold), free(biases), free(slabs), free(blobs[0]), free(blobs[1]);
    }
}

/* Two-level mixture with a gate over groups, whose logits are in a table, gates inside the groups over features, and
 * both kinds of experts. */
typedef struct hierarchy {
    moe_gating parent, gate;
    moe_experts experts;
    moe_matrix logits, features, stack;
    const float *features_bias, *stack_bias;
} hierarchy;

static void build_hierarchy(moe_graph *g, void *user, void *states) {
    hierarchy *h = user;
    const moe_experts *e = &h->experts;
    moe_node *logits = moe_op_embed(g, &h->logits, 1.0f, "logits"), *x = moe_op_input(g, e->up.cols, "x"),
             *features = x, *gate;
    (void)states;
    if (h->features.rows) {
        features = moe_op_linear(g, &h->features, x, h->features_bias, "features");
        features->linear.relu = 1;
    }
    gate = moe_op_gate(g, &h->parent, logits, NULL, 0, NULL, "parent");
    gate = moe_op_gate(g, &h->gate, features, gate, 1, NULL, "gate");
    moe_op_experts(g, e, x, gate, "experts");
    moe_op_mix(g, e->hidden, e->scale, moe_op_linear(g, &h->stack, x, h->stack_bias, "stack"), gate, "mix");
}

TEST(two_levels_equal_the_cpu) {
    static const size_t shapes[][8] = {
        /* rows, groups, selected groups, experts per group, selected experts, units, hidden, width */
        { 1, 1, 1, 1, 1, 0, 3, 5 },
        { 9, 3, 2, 5, 2, 7, 6, 8 },
        { 6, 4, 1, 70, 3, 0, 2, 33 },
        { 40, 130, 4, 3, 1, 40, 1, 6 },
    };
    uint64_t random = 17;
    for (size_t i = 0; i < MOE_COUNT(shapes) * 16; i++) {
        const size_t *shape = shapes[i / 16], rows = shape[0], groups = shape[1], each = shape[3], n = groups * each;
        const size_t units = shape[5], hidden = shape[6], width = shape[7], in = units ? units : width, vocabulary = 6;
        const moe_type type = i % 3 ? MOE_TYPE_F32 : MOE_TYPE_Q8;
        float *logits = numbers(&random, vocabulary * groups, 0), *weight = numbers(&random, n * in, 0),
              *bias = numbers(&random, n, i % 7 == 6), *features = numbers(&random, units * width, 0),
              *feature_bias = numbers(&random, units, 0), *stack = numbers(&random, n * hidden * width, 0),
              *stack_bias = numbers(&random, n * hidden, 0), *inputs = numbers(&random, rows * width, i % 7 == 5),
              *up = numbers(&random, n * 2 * hidden * width, 0);
        float *thresholds = mw_zeros((groups + n) * sizeof *thresholds);
        uint64_t down;
        const size_t slab = (size_t)moe_slab_bytes(type, 1, hidden, width, &down);
        char *slabs;
        void *blobs[4] = { NULL };
        int32_t ids[64];
        hierarchy h;
        bench b = { .rows = rows, .capacity = rows + i % 2, .build = build_hierarchy, .user = &h };
        defaults();
        emu_few_rows = i % 5 ? 2 : 1000;
        emu_pairs = i % 2 ? 1 << 14 : n + 3;
        emu_sums = i % 3 ? 1 << 24 : 1; /* in the last shape, logits are computed for a few rows at a time */
        for (size_t e = 0; e < groups; e++) thresholds[e] = mw_uniform(&random, 0.8f, 1.8f) / (float)groups;
        for (size_t e = 0; e < n; e++) thresholds[groups + e] = mw_uniform(&random, 0.8f, 1.8f) / (float)each;
        for (size_t r = 0; r < vocabulary; r++) /* rows with ties, and rows in which no expert or group passes */
            for (size_t e = 0; e < groups; e++)
                logits[r * groups + e] = r % 3 == 1   ? (float)(e % 4)
                                         : r % 3 == 2 ? 1.0f
                                                      : logits[r * groups + e] * 0.05f;
        for (size_t e = 1; e < n; e++) { /* expert gates with ties and near thresholds */
            for (size_t c = 0; c < in; c++)
                weight[e * in + c] = e % 3 == 1 ? weight[(e - 1) * in + c] : weight[e * in + c] * 0.02f;
            bias[e] = e % 3 == 1 ? bias[e - 1] : bias[e] * 0.1f;
        }
        slabs = aligned_zeros(4096, n * slab);
        for (size_t e = 0; e < n; e++) pack_slab(type, hidden, width, up + e * 2 * hidden * width, slabs + e * slab);
        h.logits = pack(MOE_TYPE_F32, vocabulary, groups, logits, &blobs[0]);
        h.experts = row_of_slabs(type, n, hidden, width, slabs, i % 7 ? 0.75f : 1.0f);
        h.stack_bias = i % 4 < 2 ? stack_bias : NULL;
        h.parent = level(i % 5 == 2 ? 4 : (int)(i / 4 % 4), groups, shape[2], thresholds);
        h.gate = level(i % 5 == 3 ? 4 : (int)(i % 4), each, shape[4], thresholds + groups);
        h.gate.relu = i / 8 % 2;
        h.gate.weight = pack(MOE_TYPE_F32, n, in, weight, &blobs[1]);
        h.gate.bias = (i + i / 4) % 4 ? bias : NULL;
        h.stack = pack(type, n * hidden, width, stack, &blobs[2]);
        h.features = (moe_matrix){ .rows = 0 };
        if (units) h.features = pack(MOE_TYPE_F32, units, width, features, &blobs[3]);
        h.features_bias = i % 2 ? feature_bias : NULL;
        rows_of_ids(ids, rows, vocabulary, &random);
        b.frame = (moe_frame){ .rows = rows, .ids = ids, .inputs = inputs };
        run_both(&b, 0);
        for (int k = 0; k < 4; k++) free(blobs[k]);
        free(logits), free(weight), free(bias), free(features), free(feature_bias), free(stack), free(stack_bias);
        free(inputs), free(up), free(thresholds), free(slabs);
    }
}

/* Build the paper's largest mixture with tiny experts: device memory must not grow with rows times experts. */
static void build_many(moe_graph *g, void *user, void *states) {
    hierarchy *h = user;
    moe_node *x = moe_op_input(g, h->experts.up.cols, "x"), *gate;
    (void)states;
    gate = moe_op_gate(g, &h->parent, moe_op_embed(g, &h->logits, 1.0f, "logits"), NULL, 0, NULL, "parent");
    moe_op_experts(g, &h->experts, x, moe_op_gate(g, &h->gate, x, gate, 1, NULL, "gate"), "experts");
}

TEST(many_experts_take_little_memory) {
    enum { GROUPS = 512, EACH = 256, EXPERTS = GROUPS * EACH, WIDTH = 3, ROWS = 3, CAPACITY = 2048, IDS = 4 };
    uint64_t random = 18;
    float *logits = numbers(&random, IDS * GROUPS, 0), *weight = numbers(&random, EXPERTS * WIDTH, 0),
          *inputs = numbers(&random, ROWS * WIDTH, 0), slab[2 * WIDTH] = { 1, -2, 3, -4, 5, 6 };
    int32_t ids[ROWS] = { 2, 0, 3 };
    void *blobs[2];
    hierarchy h;
    bench b = { .rows = ROWS,
                .capacity = CAPACITY,
                .build = build_many,
                .user = &h,
                .frame = { .rows = ROWS, .ids = ids, .inputs = inputs },
                .most_bytes = (size_t)CAPACITY * EXPERTS * sizeof(float) / 16 };
    defaults();
    emu_sums = 1 << 20;
    h.logits = pack(MOE_TYPE_F32, IDS, GROUPS, logits, &blobs[0]);
    h.parent = level(1, GROUPS, 2, NULL);
    h.gate = level(1, EACH, 2, NULL);
    h.experts = (moe_experts){ .count = EXPERTS, .hidden = 1, .scale = 1 }; /* all experts share a slab */
    h.experts.up = moe_matrix_view(MOE_TYPE_F32, 1, WIDTH, slab);
    h.experts.down = moe_matrix_view(MOE_TYPE_F32, WIDTH, 1, slab + WIDTH);
    h.gate.weight = pack(MOE_TYPE_F32, EXPERTS, WIDTH, weight, &blobs[1]);
    run_both(&b, 0);
    free(logits), free(weight), free(inputs), free(blobs[0]), free(blobs[1]);
}

/* Attention over sentences of all lengths. A first context may be zero; the contexts of other rows may be given. */
typedef struct attending {
    moe_attention_op op;
    moe_matrix queries, before;
    size_t tokens, width;
} attending;

static void build_attention(moe_graph *g, void *user, void *states) {
    attending *a = user;
    a->op.keys = states;
    a->op.values = a->op.keys + a->tokens * a->queries.cols;
    moe_op_attention(g, &a->op, moe_op_embed(g, &a->queries, 1.0f, "query"),
                     a->before.rows ? moe_op_embed(g, &a->before, 1.0f, "before") : NULL, a->width, "context");
}

TEST(attention_equals_the_cpu) {
    uint64_t random = 8;
    defaults();
    for (int i = 0; i < 8; i++) {
        enum { ROWS = 6, TOKENS = 200, LONGEST_SOURCE = 150 };
        static int32_t ids[ROWS] = { 0, 1, 2, 3, 1, 0 }, parents[ROWS] = { 0, -1, 3, -1, 2, 2 };
        size_t segment[ROWS] = { 0, 7, 49, 0, 100, 199 }, length[ROWS] = { 7, 42, LONGEST_SOURCE, 1, 17, 1 };
        const size_t size = i % 2 ? 20 : 133, width = i < 4 ? 9 : 140;
        float *queries = numbers(&random, 4 * size, 0), *v = numbers(&random, size, 0),
              *states = numbers(&random, TOKENS * (size + width), 0), *contexts = numbers(&random, 4 * width, 0);
        float weights[ROWS * LONGEST_SOURCE] = { 0 };
        int32_t want[ROWS] = { 0 };
        float logprobs[ROWS];
        void *blob, *before = NULL;
        attending a = { .tokens = TOKENS, .width = width, .queries = pack(MOE_TYPE_F32, 4, size, queries, &blob) };
        bench b = { .rows = ROWS,
                    .max_source = LONGEST_SOURCE,
                    .build = build_attention,
                    .user = &a,
                    .states = states,
                    .state_bytes = TOKENS * (size + width) * sizeof *states,
                    .frame = { .rows = ROWS,
                               .ids = ids,
                               .beam = { .parents = parents,
                                         .segment = segment,
                                         .length = length,
                                         .want = want,
                                         .want_logprob = logprobs,
                                         .attention = weights } } };
        a.op = (moe_attention_op){ .product = i / 2 % 2, .start_zero = i % 3 == 0, .v = v };
        if (i % 4 == 1) a.before = pack(MOE_TYPE_F32, 4, width, contexts, &before);
        run_both(&b, 1);
        free(queries), free(v), free(states), free(contexts), free(blob), free(before);
    }
}

/* Multi-head attention within packed sentences, within the tokens of a hypothesis, or over a source. */
typedef struct heads {
    size_t heads, cols;
    int within, packed;
    size_t window;
    moe_matrix table; /* queries, followed by keys and values if `within` */
} heads;

static void build_heads(moe_graph *g, void *user, void *states) {
    const heads *h = user;
    moe_node *x = moe_op_embed(g, &h->table, 1.0f, "x");
    if (h->within && !h->packed)
        moe_op_store(g, moe_op_view(g, x, h->cols, 2 * h->cols, "kv"), MOE_BY_TOKEN, states, "carried");
    x = moe_op_heads(g, h->heads, 1, h->within, h->packed ? NULL : states, x, h->cols, "heads");
    x->heads.window = h->window;
}

TEST(heads_equal_the_cpu) {
    enum { ROWS = 6, TOKENS = 300, LONGEST_SENTENCE = 150, IDS = 90 };
    static const size_t shapes[][2] = { { 1, 1 }, { 1, 20 }, { 3, 33 }, { 2, 64 }, { 4, 280 } }; /* heads, columns */
    static int32_t positions[ROWS] = { 0, LONGEST_SENTENCE - 1, 2, 31, 32, 140 };
    size_t segment[ROWS] = { 0, 7, 49, 0, 100, 299 }, length[ROWS] = { 7, 42, LONGEST_SENTENCE, 1, 33, 1 };
    uint64_t random = 28;
    for (size_t i = 0; i < 3 * 2 * MOE_COUNT(shapes); i++) {
        const size_t cols = shapes[i / 6][1], kind = i % 3;
        const int packed = kind == 0, within = kind < 2;
        float *table = numbers(&random, IDS * 3 * cols, i % 6 > 2),
              *states = numbers(&random, TOKENS * 2 * cols, i % 6 > 2), logprobs[ROWS];
        int32_t *chain = mw_zeros(ROWS * LONGEST_SENTENCE * sizeof *chain), want[ROWS] = { 0 }, ids[IDS], at[IDS];
        size_t live[40], first[40], rows = packed ? 0 : ROWS;
        void *blob;
        heads h = { shapes[i / 6][0],
                    cols,
                    within,
                    packed,
                    kind == 1 && i % 2 ? 33 : 0,
                    pack(MOE_TYPE_F32, IDS, (within ? 3 : 1) * cols, table, &blob) };
        bench b = { .sentences = 5,
                    .max_source = LONGEST_SENTENCE,
                    .max_target = LONGEST_SENTENCE,
                    .build = build_heads,
                    .user = &h,
                    .states = states,
                    .state_bytes = TOKENS * 2 * cols * sizeof *states };
        defaults();
        emu_sums = i % 2 ? 1 : 1 << 24;                          /* process some rows at a time, or all */
        for (size_t p = 0; packed && p < MOE_COUNT(live); p++) { /* sentences have 40, 37, 6, 6, 1 tokens */
            live[p] = p < 1 ? 5 : p < 6 ? 4 : p < 37 ? 2 : 1;
            first[p] = rows;
            for (size_t k = 0; k < live[p]; k++) at[rows++] = (int32_t)p;
        }
        for (size_t k = 0; k < ROWS * LONGEST_SENTENCE; k++) chain[k] = (int32_t)mw_below(&random, TOKENS - ROWS);
        for (size_t r = 0; r < ROWS; r++)
            chain[r * LONGEST_SENTENCE + (size_t)positions[r]] = (int32_t)(TOKENS - ROWS + r);
        rows_of_ids(ids, rows, IDS, &random);
        b.rows = b.capacity = rows;
        b.frame = (moe_frame){ .rows = rows, .ids = ids, .positions = packed ? at : positions };
        if (packed) b.frame.packed = (moe_packed){ .steps = MOE_COUNT(live), .live = live, .first = first };
        else
            b.frame.beam = (moe_beam){ .segment = segment,
                                       .length = length,
                                       .chain = chain,
                                       .want = want,
                                       .want_logprob = logprobs };
        run_both(&b, !packed);
        free(table), free(states), free(chain), free(blob);
    }
}

/* Output over several chunks of a vocabulary: ties, tokens that are never generated or suppressed, scoring, NaN. */
typedef struct choosing {
    moe_matrix w;
    moe_output_op op;
    moe_matrix x;
} choosing;

static void build_output(moe_graph *g, void *user, void *states) {
    choosing *c = user;
    (void)states;
    moe_op_output(g, &c->op, moe_op_embed(g, &c->x, 1.0f, "x"));
}

TEST(outputs_equal_the_cpu) {
    static const size_t vocabularies[] = { 3, 1023, 1024, 1025, 2600 };
    uint64_t random = 9;
    for (size_t i = 0; i < 2 * MOE_COUNT(vocabularies); i++) {
        enum { ROWS = 10, TABLE = 10 };
        const size_t n = vocabularies[i / 2], cols = 20, top = moe_min(n, i % 2 ? 5 : 65);
        int32_t ids[ROWS], want[ROWS], *tops[2];
        const int32_t never[] = { (int32_t)n / 3, 0, (int32_t)n - 1, (int32_t)n / 2 }; /* the last token is the end */
        char hold[ROWS];
        float *x = numbers(&random, TABLE * cols, 0), *w = numbers(&random, n * cols, 0),
              *bias = numbers(&random, n, 0), *logprobs[2], wanted[2][ROWS];
        void *blobs[2];
        choosing c = { .x = pack(MOE_TYPE_F32, TABLE, cols, x, &blobs[0]) };
        bench b = { .rows = ROWS, .top = top, .build = build_output, .user = &c };
        defaults();
        emu_few_rows = i % 4 == 1 ? 2 : 32;
        emu_sums = i % 4 == 1 ? 1 : 1 << 24;
        for (size_t r = 1; r < n; r++) /* ties within a chunk and across chunks */
            if (r % 7 == 1) memcpy(w + r * cols, w + (r - 1) * cols, cols * sizeof *w), bias[r] = bias[r - 1];
        for (size_t k = 0; k < cols; k++)
            ((float *)blobs[0])[3 * cols + k] = k == 5 ? moe_from_bits(0x7fc00000u) : 1.0f,
                                           ((float *)blobs[0])[4 * cols + k] = 0;
        c.w = pack(i % 2 ? MOE_TYPE_Q8 : MOE_TYPE_F32, n, cols, w, &blobs[1]);
        c.op = (moe_output_op){ .w = &c.w, .bias = i % 3 ? bias : NULL, .eos = (int32_t)n / 2, .never = never };
        c.op.n_never = i % 4 ? 3 + (i / 4) % 2 : 0;
        c.op.n_suppressed = i % 4 > 1 ? i % 4 : 0;
        for (int side = 0; side < 2; side++) {
            tops[side] = mw_zeros(ROWS * top * sizeof **tops);
            logprobs[side] = mw_zeros(ROWS * top * sizeof **logprobs);
        }
        for (size_t r = 0; r < ROWS; r++) {
            ids[r] = (int32_t)(r % TABLE);
            want[r] = r == 6 ? 0 : r % 4 == 2 ? (int32_t)mw_below(&random, n) : -1;
            hold[r] = r % 3 == 1;
        }
        b.frame = (moe_frame){ .rows = ROWS, .ids = ids, .beam = { .want = want, .hold = hold } };
        b.frames[0] = b.frames[1] = b.frame;
        for (int side = 0; side < 2; side++) {
            b.frames[side].beam.top_ids = tops[side];
            b.frames[side].beam.top_logprobs = logprobs[side];
            b.frames[side].beam.want_logprob = wanted[side];
        }
        b.two_frames = 1;
        run_both(&b, 1);
        for (size_t r = 0; r < ROWS; r++) {
            if (want[r] >= 0)
                CHECK(same(wanted[0][r], wanted[1][r]), "vocabulary %zu, row %zu: wanted %a, the CPU has %a", n, r,
                      (double)wanted[1][r], (double)wanted[0][r]);
            for (size_t k = 0; want[r] < 0 && k < top; k++)
                CHECK(tops[0][r * top + k] == tops[1][r * top + k] &&
                          same(logprobs[0][r * top + k], logprobs[1][r * top + k]),
                      "vocabulary %zu, row %zu, place %zu: token %d, %a; the CPU has %d, %a", n, r, k,
                      (int)tops[1][r * top + k], (double)logprobs[1][r * top + k], (int)tops[0][r * top + k],
                      (double)logprobs[0][r * top + k]);
        }
        for (int side = 0; side < 2; side++) free(tops[side]), free(logprobs[side]), free(blobs[side]);
        free(x), free(w), free(bias);
    }
}

/* ---- Whole models ---- */

typedef struct fixture {
    mw_model *m;
    mw_image image;
    moe_model *model;
} fixture;

static fixture open_model(mw_model *m) {
    fixture f = { .m = m };
    moe_error e = { MOE_OK, "", "" };
    f.image = mw_build(m);
    CHECK(moe_model_open_memory(f.image.data, f.image.bytes, NULL, &f.model, &e) == MOE_OK, "%s: %s", e.where,
          e.message);
    return f;
}

static void drop(fixture *f) {
    moe_model_close(f->model);
    if (f->image.data) free(f->image.data);
    if (f->m) mw_free(f->m);
}

/* Convert a fixture's model to another number format by saving it to a file. */
static fixture converted(const fixture *f, moe_type type) {
    const moe_save_params params = { .type = type, .experts = type };
    char path[] = "/tmp/moe-cuda-XXXXXX";
    fixture g = { .m = NULL };
    moe_error e = { MOE_OK, "", "" };
    const int fd = mkstemp(path);
    CHECK(fd >= 0, "no temporary file");
    close(fd);
    CHECK(moe_model_save(f->model, path, &params, &e) == MOE_OK, "%s", e.message);
    CHECK(moe_model_open(path, NULL, &g.model, &e) == MOE_OK, "%s", e.message);
    remove(path);
    return g;
}

enum { SENTENCES = 7, LONGEST = 40, MOST = 5 };

typedef struct answer {
    moe_status status;
    size_t place; /* position in the order of results, from 1; 0 without a result */
    size_t n, n_ids[MOST];
    int finished[MOST];
    int32_t ids[MOST][LONGEST], sources[MOST][LONGEST];
    uint32_t score[MOST], reverse[MOST], logprob[MOST], token_logprobs[MOST][LONGEST + 1];
} answer;

typedef struct feed {
    size_t next, most, scored; /* most: number of sentences. Sentence i is scored if i % 5 == scored, and */
                               /* starts with given tokens if i % 5 == scored + 1 */
    size_t answered;
    int cancelled;   /* index of the request at which to cancel; 0 to never cancel */
    int language;    /* 1 for a language model: requests have only a target */
    int forces;      /* every third sentence starts with a forced token */
    int constrained; /* every second sentence has two constraints */
    int drawn;       /* every third sentence has sampling parameters from `own` */
    moe_session_params own[2];
    int32_t ids[LONGEST], target[LONGEST], words[3];
    moe_constraint constraints[2];
    uint64_t random;
    answer answers[SENTENCES];
    moe_stats stats;
} feed;

static int pull(void *user, int wait, moe_request *r) {
    feed *f = user;
    (void)wait;
    if (f->next == f->most) return MOE_PULL_END;
    if (f->cancelled && f->next == (size_t)f->cancelled) return MOE_PULL_CANCEL;
    r->n_source = f->language ? 0 : 1 + mw_below(&f->random, 14);
    for (size_t i = 0; i < r->n_source; i++) f->ids[i] = 6 + (int32_t)mw_below(&f->random, MW_VOCABULARY - 6);
    r->source = f->ids;
    if (f->next % 5 == f->scored || f->next % 5 == f->scored + 1 || f->language) {
        r->prefix = !f->language && f->next % 5 != f->scored;
        r->n_target = mw_below(&f->random, 6);
        for (size_t i = 0; i < r->n_target; i++) f->target[i] = 6 + (int32_t)mw_below(&f->random, MW_VOCABULARY - 6);
        r->target = f->target;
    }
    if (f->forces && f->next % 3 == 1) r->force = 6 + (int32_t)mw_below(&f->random, MW_VOCABULARY - 6);
    if (f->constrained && f->next % 2) {
        for (size_t i = 0; i < 3; i++) f->words[i] = 6 + (int32_t)(i + 3 * mw_below(&f->random, 11));
        f->constraints[0] = (moe_constraint){ f->words, 2, mw_below(&f->random, r->n_source), 1, 1 };
        f->constraints[1] = (moe_constraint){ f->words + 2, 1, 0, f->next % 4 == 1, 0 };
        r->constraints = f->constraints;
        r->n_constraints = 2;
    }
    if (f->drawn && f->next % 3 == 1) r->sampling = &f->own[f->next / 3 % 2];
    r->user = &f->answers[f->next++];
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moe_result *r) {
    feed *f = user;
    answer *a = r->user;
    a->status = r->status;
    a->place = ++f->answered;
    CHECK(r->n_hypotheses <= MOST, "%zu hypotheses", r->n_hypotheses);
    a->n = moe_min(MOST, r->n_hypotheses);
    for (size_t h = 0; h < a->n; h++) {
        const moe_hypothesis *from = &r->hypotheses[h];
        a->n_ids[h] = from->n_ids;
        a->finished[h] = from->finished;
        a->score[h] = moe_to_bits(from->score);
        a->reverse[h] = moe_to_bits(from->reverse);
        a->logprob[h] = moe_to_bits(from->logprob);
        memcpy(a->ids[h], from->ids, from->n_ids * sizeof *from->ids);
        if (from->sources) memcpy(a->sources[h], from->sources, from->n_ids * sizeof *from->sources);
        memcpy(a->token_logprobs[h], from->token_logprobs,
               (from->n_ids + (size_t)from->finished) * sizeof *from->token_logprobs);
    }
}

static moe_session_params params_for(const moe_model *model, const char *device, int batch, int beam) {
    moe_session_params p = moe_session_params_default(model);
    p.device = device;
    p.isa = "portable";
    p.threads = 1;
    p.batch = batch;
    p.beam = p.nbest = beam;
    p.target_tag = MW_TAG_EN;
    if (model->source_tag == 2) p.source_tag = MW_TAG_DE;
    return p;
}

static feed *make_feed(const moe_model *model) {
    feed *f = mw_zeros(sizeof *f);
    f->random = 3;
    f->most = SENTENCES;
    f->scored = 3;
    f->language = moe_model_kind(model) == MOE_MODEL_LANGUAGE;
    f->forces = model->kind == MOE_MODEL_TRANSLATION && !model->attention;
    return f;
}

static feed *translate(const moe_model *model, const moe_session_params *p) {
    feed *f = make_feed(model);
    moe_session *s;
    moe_error e = { MOE_OK, "", "" };
    CHECK(moe_session_new(model, p, &s, &e) == MOE_OK, "%s: %s", e.where, e.message);
    assert_string_equal(moe_session_stats(s).device, p->device[1] == 'u' ? "cuda:0 emulated" : "cpu");
    f->constrained = p->max_constraints > 0;
    f->drawn = p->sample;
    f->own[0] = f->own[1] = *p;
    f->own[0].temperature = 0, f->own[1].temperature = 1.5f, f->own[1].top_k = 20;
    CHECK(moe_translate(s, pull, done, f, &e) == MOE_OK, "%s: %s", e.where, e.message);
    f->stats = moe_session_stats(s);
    moe_session_free(s);
    return f;
}

static size_t allowed; /* device_memory of both sessions in assert_sides_agree */

static void assert_same_answers(const feed *cpu, const feed *gpu, const moe_session_params *p, const char *what) {
    for (size_t i = 0; i < SENTENCES; i++)
        CHECK(memcmp(&cpu->answers[i], &gpu->answers[i], sizeof(answer)) == 0,
              "%s, batch %d, beam %d, rules %d: sentence %zu differs", what, p->batch, p->beam, (int)p->rules, i);
}

static void assert_same_counts(const moe_stats *cpu, const moe_stats *gpu, const moe_session_params *p,
                               const char *what) {
    const struct {
        const char *name;
        uint64_t cpu, gpu;
    } counts[] = {
        { "sentences", cpu->sentences, gpu->sentences },
        { "source tokens", cpu->source_tokens, gpu->source_tokens },
        { "target tokens", cpu->target_tokens, gpu->target_tokens },
        { "steps", cpu->steps, gpu->steps },
        { "rows", cpu->rows, gpu->rows },
        { "pairs of rows and experts", cpu->expert_pairs, gpu->expert_pairs },
    };
    for (size_t i = 0; i < MOE_COUNT(counts); i++)
        CHECK(counts[i].cpu == counts[i].gpu, "%s, batch %d, beam %d: %llu %s, the CPU has %llu", what, p->batch,
              p->beam, (unsigned long long)counts[i].gpu, counts[i].name, (unsigned long long)counts[i].cpu);
    CHECK(emu_pairs < 100 || cpu->expert_visits >= gpu->expert_visits, /* the CPU may use smaller chunks of rows */
          "%s, batch %d, beam %d: %llu expert visits, the CPU has %llu", what, p->batch, p->beam,
          (unsigned long long)gpu->expert_visits, (unsigned long long)cpu->expert_visits);
}

/* Check that both backends give the same answers and counts. Return the answers. */
static feed *assert_sides_agree(const moe_model *model, const moe_session_params *params, const char *what) {
    moe_session_params p = *params;
    feed *cpu, *gpu;
    p.device = "cpu";
    cpu = translate(model, &p);
    p.device = "cuda";
    p.device_memory = allowed;
    gpu = translate(model, &p);
    assert_same_answers(cpu, gpu, &p, what);
    assert_same_counts(&cpu->stats, &gpu->stats, &p, what);
    CHECK(emu_live() == 0, "%s: %zu objects have leaked", what, emu_live());
    free(gpu);
    return cpu;
}


static void assert_models_agree(const moe_model *model, int batch, int beam, float coverage, int min_target,
                                const char *gating, const char *what) {
    moe_session_params p = params_for(model, "cpu", batch, beam);
    p.coverage_penalty = coverage;
    p.min_target = min_target;
    p.gating = gating;
    free(assert_sides_agree(model, &p, what));
}

TEST(models_equal_the_cpu) {
    static const int batches[] = { 1, 3, 8 }, beams[] = { 1, 4 };
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        fixture f32 = open_model(mw_small(variant, MW_F32, 11)), others[3];
        static const char *const names[] = { "f32", "q8", "q4", "bf16" }, *const runs[] = { "03", "01235", "145", "2" };
        others[0] = converted(&f32, MOE_TYPE_Q8);
        others[1] = converted(&f32, MOE_TYPE_Q4);
        others[2] = converted(&f32, MOE_TYPE_BF16);
        for (int t = 0; t < 4; t++)
            for (int i = 0; i < 6; i++) {
                char what[64];
                if (!strchr(runs[t], '0' + i)) continue;
                snprintf(what, sizeof what, "variant %d, %s", variant, names[t]);
                defaults();
                emu_few_rows = i % 2 ? 2 : 32; /* use cuBLAS, or the kernel */
                emu_pairs = i % 3 ? 1 << 14 : 6;
                assert_models_agree(t ? others[t - 1].model : f32.model, batches[i / 2], beams[i % 2],
                                    i % 3 == 1 ? 0.2f : 0.0f, i == 4 ? 3 : 0, NULL, what);
                if (i % 2 == 0) CHECK(emu_graph_launches() > 0, "no step was a CUDA graph");
                if (i % 2 && (t == 1 || t == 2))
                    CHECK(emu_gemms() > 1, "cuBLAS was not used"); /* opening a device computes a product */
            }
        for (int t = 0; t < 3; t++) drop(&others[t]);
        drop(&f32);
    }
}

/* cuBLAS cannot sum by block, so the device's own kernel computes products that have a scale for each block. */
TEST(models_with_scales_by_block_equal_the_cpu) {
    for (int which = 0; which < 3; which++) {
        mw_model *m =
            which ? mw_transformer(which == 1 ? MW_NLLB : MW_STUDENT, MW_F32, 11) : mw_small(MW_GNMT, MW_F32, 11);
        fixture f32, quantised;
        mw_int(m, "activation.block", 64);
        f32 = open_model(m);
        quantised = converted(&f32, which ? MOE_TYPE_Q4 : MOE_TYPE_Q8);
        for (int batch = 1; batch <= 8; batch += 7) {
            char what[64];
            snprintf(what, sizeof what, "model %d with scales by block", which);
            defaults();
            emu_few_rows = 2;
            assert_models_agree(quantised.model, batch, 4, 0, 0, NULL, what);
            CHECK(emu_gemms() <= 1, "cuBLAS was used"); /* opening a device computes a product */
        }
        drop(&quantised), drop(&f32);
    }
}

static void keep_line(void *user, const char *message) { snprintf(user, 256, "%s", message); }

/* If cuBLAS does not start, lacks int8 or returns wrong sums, the device's own kernels compute all products, and the
 * log says so once. */
TEST(a_device_without_cublas_gives_the_same_bytes) {
    fixture f = open_model(mw_small(MW_GNMT, MW_Q8, 11));
    static const char *const reasons[] = { "NOT_INITIALIZED", "NOT_SUPPORTED", "sums are wrong" };
    for (int refused = 0; refused <= 3; refused++) {
        moe_session_params p = params_for(f.model, "cuda", 8, 4);
        moe_error e = { MOE_OK, "", "" };
        moe_session *s = NULL;
        char line[256] = "";
        defaults();
        emu_few_rows = 2;
        emu_refuse_blas(refused);
        p.log = keep_line, p.log_user = line;
        CHECK(moe_session_new(f.model, &p, &s, &e) == MOE_OK, "%s", e.message);
        moe_session_free(s);
        p.log = NULL;
        assert_models_agree(f.model, 8, 4, 0.2f, 0, NULL, "without cuBLAS");
        if (refused) CHECK(emu_gemms() == (refused == 3 ? 2 : 0), "%zu products of cuBLAS", emu_gemms());
        else CHECK(emu_gemms() > 2, "cuBLAS was not used");
        CHECK(emu_live() == 0, "%zu objects have leaked", emu_live());
    }
    for (int refused = 1; refused <= 3; refused++) {
        moe_device_params p = { .allocator = moe_allocator_or_default(NULL), .log = keep_line };
        moe_device *d = NULL;
        char line[256] = "";
        defaults();
        emu_refuse_blas(refused);
        p.log_user = line;
        assert_int_equal(moe_cuda()->open(&p, &d, NULL), MOE_OK);
        CHECK(strstr(line, "cuBLAS is not usable") && strstr(line, reasons[refused - 1]), "the log says '%s'", line);
        moe_cuda()->close(d);
    }
    drop(&f);
}

/* Forced and suppressed tokens, hidden tags and incomplete results equal those on the CPU, even if not all experts fit
 * and missing ones are fetched with their biases. */
TEST(transformers_equal_the_cpu) {
    static const moe_type types[] = { MOE_TYPE_F32, MOE_TYPE_Q8, MOE_TYPE_Q4, MOE_TYPE_Q4M,
                                      MOE_TYPE_Q8B, MOE_TYPE_Q3, MOE_TYPE_Q2, MOE_TYPE_BF16 };
    size_t finished = 0, cut = 0, hidden = 0;
    for (int variant = 0; variant < MW_TRANSFORMERS; variant++) {
        fixture f32 = open_model(mw_transformer(variant, MW_F32, 11));
        for (size_t t = 0; t < MOE_COUNT(types); t++) {
            fixture f = converted(&f32, types[t]);
            for (int i = 0; i < 4; i++) {
                moe_session_params p = params_for(f.model, "cpu", i / 2 ? 5 : 1, i % 2 ? 4 : 1);
                feed *got;
                char what[64];
                if (t > 1 && i % 3) continue;
                snprintf(what, sizeof what, "Transformer %d, %s", variant, moe_type_name(types[t]));
                defaults();
                emu_few_rows = ((size_t)i + t) % 2 ? 2 : 32; /* use cuBLAS, or the kernel */
                emu_pairs = i % 3 ? 1 << 14 : 6;
                emu_sums = i == 2 ? 1 : 1 << 24;
                p.min_target = i == 3 ? 3 : 0;
                got = assert_sides_agree(f.model, &p, what);
                if (emu_few_rows > 2) CHECK(emu_graph_launches() > 0, "%s: no step was a CUDA graph", what);
                for (size_t k = 0; k < SENTENCES; k++)
                    for (size_t h = 0; h < got->answers[k].n; h++) {
                        finished += (size_t)got->answers[k].finished[h];
                        cut += (size_t)!got->answers[k].finished[h];
                        hidden +=
                            variant == MW_NLLB && got->answers[k].n_ids[h] && got->answers[k].ids[h][0] != MW_TAG_EN;
                    }
                free(got);
            }
            drop(&f);
        }
        drop(&f32);
    }
    CHECK(finished > 100 && cut > 50 && hidden > 50, "%zu hypotheses are finished, %zu are cut, %zu have a hidden tag",
          finished, cut, hidden);
}

/* Alignment heads determine the coverage penalty and where constraints start. Rows run in slices or all at once. */
TEST(alignment_heads_equal_the_cpu) {
    static const int variants[] = { MW_NLLB, MW_STUDENT };
    for (size_t k = 0; k < 4 * MOE_COUNT(variants); k++) {
        fixture f = open_model(mw_transformer(variants[k / 4], MW_F32, 11));
        moe_session_params p = params_for(f.model, "cpu", k % 2 ? 5 : 1, 1 + 3 * (int)(k / 2 % 2));
        size_t looks = 0;
        feed *got;
        defaults();
        emu_sums = k % 2 ? 1 : 1 << 24;
        p.rules = MOE_RULES_PAPER;
        p.max_constraints = 2;
        p.coverage_penalty = 0.3f;
        got = assert_sides_agree(f.model, &p, "heads that align");
        for (size_t i = 0; i < SENTENCES; i++)
            for (size_t t = 0; got->answers[i].n && t < got->answers[i].n_ids[0]; t++)
                looks += got->answers[i].sources[0][t] > 0;
        CHECK(looks > SENTENCES, "%zu tokens attend to another one than the first", looks);
        free(got);
        drop(&f);
    }
}

/* A sentence has the same shortlist alone and in a batch. An end token in no list has the score of a token that is
 * never generated. */
TEST(shortlists_equal_the_cpu) {
    const int64_t never[] = { 0, 1, MW_EOS, 4, 5 };
    for (size_t k = 0; k < 4; k++) {
        mw_model *m = mw_small(MW_GNMT, k % 2 ? MW_Q8 : MW_F32, 11);
        mw_random_shortlist(m);
        if (k / 2) mw_ints(m, "token.never", never, 5);
        fixture f = open_model(m);
        moe_session_params p = params_for(f.model, "cpu", 5, 1 + 3 * (int)(k / 2));
        defaults();
        free(assert_sides_agree(f.model, &p, "lists"));
        drop(&f);
    }
}

/* Sampled tokens equal those on the CPU with all rules, shortlists, constraints and penalties. */
TEST(samples_equal_the_cpu) {
    size_t different = 0;
    for (size_t k = 0; k < 4 * MOE_RULE_SETS; k++) {
        mw_model *m = mw_small(k % 3 ? MW_GNMT : MW_FROM_ENCODER, k % 2 ? MW_Q8 : MW_F32, 11);
        if (k % 4 == 1) mw_random_shortlist(m);
        fixture f = open_model(m);
        moe_session_params p = params_for(f.model, "cpu", k % 4 ? 5 : 1, 1);
        feed *drawn, *best;
        defaults();
        emu_few_rows = k % 2 ? 2 : 32;
        p.rules = (moe_rules)(k / 4);
        best = assert_sides_agree(f.model, &p, "the best tokens");
        p.sample = 1, p.seed = (int)k, p.temperature = 0.8f;
        if (k % 4 > 1) p.top_k = 7, p.min_p = 0.03f;
        if (k % 4 != 2) p.top_p = 0.8f;
        if (k % 4 == 3 && moe_rule_sets[p.rules].constrains) p.max_constraints = 2, p.repetition_penalty = 1.3f;
        drawn = assert_sides_agree(f.model, &p, "draws");
        for (size_t i = 0; i < SENTENCES; i++)
            different +=
                memcmp(drawn->answers[i].ids[0], best->answers[i].ids[0], sizeof drawn->answers[i].ids[0]) != 0;
        free(drawn), free(best);
        drop(&f);
    }
    CHECK(different > MOE_RULE_SETS * SENTENCES, "%zu sampled tokens differ from the best ones", different);
}

/* ---- The search ---- */

/* Test all rules with all beams and all pairs of the other settings: penalty, number of results, minimum length and,
 * if the rules support it, pruning. Batches and limits alternate. */
TEST(searches_equal_the_cpu) {
    static const int batches[] = { 1, 3, 8 }, beams[] = { 1, 2, 5 };
    fixture models[] = { open_model(mw_small(MW_GNMT, MW_F32, 11)), open_model(mw_small(MW_FROM_ENCODER, MW_F32, 12)) };
    size_t finished[MOE_RULE_SETS] = { 0 }, cut[MOE_RULE_SETS] = { 0 }, several = 0;
    defaults();
    for (int i = 0; i < 2; i++) /* raise the bias of the end token, so that some hypotheses finish */
        mw_put32(models[i].image.data + mw_find_tensor(models[i].m, "output.bias")->offset + 4 * MW_EOS,
                 moe_to_bits(3.0f));
    for (size_t k = 0; k < MOE_RULE_SETS * 3 * 16; k++) {
        const int rules = (int)(k / 48), coverage = k % 2 != 0, prune = k / 2 % 2 != 0, odd = (int)(k / 4 + k / 8) % 2;
        const moe_model *model = models[(k + k / 16) % 2].model;
        moe_session_params p = params_for(model, "cpu", batches[(k + k / 8) % 3], beams[k / 16 % 3]);
        feed *f;
        char what[64];
        if ((rules != MOE_RULES_PAPER && prune) || (rules >= MOE_RULES_TF && coverage)) continue;
        if (rules == MOE_RULES_PAPER && (coverage + prune + odd) % 2) continue;
        snprintf(what, sizeof what, "case %zu", k);
        p.rules = (moe_rules)rules;
        p.coverage_penalty = coverage ? 0.3f : 0.0f;
        p.prune = prune ? 2.5f : 0.0f;
        p.nbest = k / 4 % 2 ? p.beam : 1;
        p.min_target = k / 8 % 2 ? 3 : 0;
        p.length_penalty = k % 3 ? 0.6f : 0.0f;
        if (k % 5 > 2) p.max_len_factor = 0.5f, p.max_len_offset = 1;
        if (k % 7 == 6) p.max_target = 6;
        p.early_stopping = odd;
        if ((rules == MOE_RULES_PAPER || rules >= MOE_RULES_HF) && k % 3 == 1) p.max_constraints = 2;
        f = assert_sides_agree(model, &p, what);
        for (size_t i = 0; i < SENTENCES; i++)
            for (size_t h = 0; h < f->answers[i].n; h++) {
                finished[rules] += (size_t)f->answers[i].finished[h];
                cut[rules] += (size_t)!f->answers[i].finished[h];
                several += f->answers[i].n > 2;
            }
        free(f);
    }
    for (int rules = 0; rules < MOE_RULE_SETS; rules++)
        CHECK(finished[rules] > 20 && cut[rules] > 20, "rules %d: %zu hypotheses are finished, %zu are cut", rules,
              finished[rules], cut[rules]);
    CHECK(several > 100, "%zu sentences had several hypotheses", several);
    drop(&models[0]), drop(&models[1]);
}

/* Reranking downloads hypotheses and uploads the requests that score them. */
TEST(reranking_equals_the_cpu) {
    static const int batches[] = { 1, 3, 8 };
    fixture f = open_model(mw_small(MW_GNMT, MW_F32, 11));
    size_t reranked = 0;
    defaults();
    for (int k = 0; k < 12; k++) {
        moe_session_params p = params_for(f.model, "cpu", batches[k % 3], k % 2 ? 4 : 2);
        feed *got;
        p.rerank = 0.7f;
        p.max_constraints = k % 2 ? 4 : 0;
        p.source_tag = k % 4 < 2 ? -1 : MW_TAG_DE;
        p.max_source = 48;
        p.nbest = k / 6 ? p.beam : 1;
        p.coverage_penalty = k / 3 % 2 ? 0.3f : 0.0f;
        got = assert_sides_agree(f.model, &p, "reranking");
        for (size_t i = 0; i < SENTENCES; i++) reranked += got->answers[i].n && got->answers[i].reverse[0];
        free(got);
    }
    assert_true(reranked > 6 * SENTENCES);
    drop(&f);
}

/* Language models only score; the scores depend on the rules. */
TEST(language_models_equal_the_cpu) {
    fixture f = open_model(mw_language_model(MW_F32, 13));
    defaults();
    for (int rules = 0; rules < 4; rules++) {
        moe_session_params p = params_for(f.model, "cpu", 1 + 2 * rules, 1 + rules);
        p.rules = (moe_rules)rules;
        free(assert_sides_agree(f.model, &p, "language model"));
    }
    drop(&f);
}

/* If embeddings of tokens contain NaN, exactly the sentences with these tokens fail, on both backends. */
TEST(failed_sentences_equal_the_cpu) {
    fixture f = open_model(mw_small(MW_PRODUCT, MW_F32, 11));
    const mw_tensor *table = mw_find_tensor(f.m, "source.embedding.weight");
    defaults();
    mw_put32(f.image.data + table->offset + 4 * (11 * MW_WIDTH + 3), 0x7fc00000u);
    mw_put32(f.image.data + table->offset + 4 * (12 * MW_WIDTH + 3), 0x7fc00000u);
    for (int rules = 0; rules < 4; rules++)
        for (int beam = 1; beam < 5; beam += 3) {
            moe_session_params p = params_for(f.model, "cpu", 3, beam);
            size_t broken = 0;
            feed *answers;
            p.rules = (moe_rules)rules;
            p.coverage_penalty = rules < MOE_RULES_TF ? 0.2f : 0.0f;
            answers = assert_sides_agree(f.model, &p, "broken");
            for (size_t i = 0; i < SENTENCES; i++) {
                CHECK((answers->answers[i].status == MOE_ERROR_NUMERIC) == (answers->answers[i].n == 0), "sentence %zu",
                      i);
                broken += answers->answers[i].n == 0;
            }
            CHECK(broken > 0 && broken < SENTENCES, "%zu sentences are broken", broken);
            free(answers);
        }
    drop(&f);
}

/* Cancelling a call drops its active sentences: the next call returns the same results as a new session. */
TEST(cancelled_sentences_are_removed) {
    fixture f = open_model(mw_small(MW_FROM_ENCODER, MW_F32, 11));
    defaults();
    for (int cancelled = 1; cancelled < SENTENCES; cancelled++) {
        moe_session_params p = params_for(f.model, "cuda", 3, 2);
        feed *wanted, *got = make_feed(f.model);
        moe_error e = { MOE_OK, "", "" };
        moe_session *s;
        p.coverage_penalty = 0.2f;
        wanted = translate(f.model, &p);
        CHECK(moe_session_new(f.model, &p, &s, &e) == MOE_OK, "%s", e.message);
        got->cancelled = cancelled;
        CHECK(moe_translate(s, pull, done, got, &e) == MOE_ERROR_CANCELLED, "%s", e.message);
        free(got);
        got = make_feed(f.model);
        CHECK(moe_translate(s, pull, done, got, &e) == MOE_OK, "%s", e.message);
        assert_same_answers(wanted, got, &p, "after a cancelled call");
        moe_session_free(s);
        assert_int_equal(emu_live(), 0);
        free(wanted), free(got);
    }
    drop(&f);
}

/* Since frames, hypotheses and results are on the device, host memory does not grow with the beam, and barely grows
 * with target lengths. */
TEST(sessions_use_little_host_memory) {
    fixture f = open_model(mw_small(MW_GNMT, MW_F32, 11));
    moe_session_params p = params_for(f.model, "cuda", 64, 1);
    size_t narrow = 0, wide = 0, cpu = 0;
    moe_error e = { MOE_OK, "", "" };
    defaults();
    p.coverage_penalty = 0.2f;
    CHECK(moe_session_bytes(f.model, &p, &narrow, &e) == MOE_OK, "%s", e.message);
    p.beam = 8;
    CHECK(moe_session_bytes(f.model, &p, &wide, &e) == MOE_OK, "%s", e.message);
    p.device = "cpu";
    CHECK(moe_session_bytes(f.model, &p, &cpu, &e) == MOE_OK, "%s", e.message);
    CHECK(wide == narrow && wide < cpu / 4, "beam 1: %zu bytes, beam 8: %zu, on the processor %zu", narrow, wide, cpu);
    drop(&f);
}

/* ---- Classifiers ---- */

enum { EXAMPLES = 21, BEST = 3 };

typedef struct verdicts {
    moe_status status;
    int32_t classes[EXAMPLES * BEST];
    uint32_t logprobs[EXAMPLES * BEST];
} verdicts;

static moe_status classify(moe_session *s, verdicts *v, moe_error *e) {
    float inputs[EXAMPLES * MW_INPUTS], logprobs[EXAMPLES * BEST] = { 0 };
    uint64_t random = 4;
    for (size_t i = 0; i < MOE_COUNT(inputs); i++) inputs[i] = mw_uniform(&random, -2, 2);
    v->status = moe_classify(s, inputs, EXAMPLES, v->classes, logprobs, e);
    memcpy(v->logprobs, logprobs, sizeof logprobs);
    return v->status;
}

static void assert_classifiers_agree(const moe_model *model, int batch, const char *gating, const char *what) {
    moe_session_params p = params_for(model, "cpu", batch, BEST);
    verdicts sides[2];
    memset(sides, 0, sizeof sides);
    p.target_tag = -1;
    p.gating = gating;
    p.device_memory = allowed;
    for (int side = 0; side < 2; side++) {
        moe_session *s;
        moe_error e = { MOE_OK, "", "" };
        p.device = side ? "cuda" : "cpu";
        CHECK(moe_session_new(model, &p, &s, &e) == MOE_OK, "%s: %s", e.where, e.message);
        CHECK(classify(s, &sides[side], &e) == MOE_OK, "%s: %s", what, e.message);
        CHECK(strncmp(moe_session_stats(s).device, p.device, 3) == 0, "%s", moe_session_stats(s).device);
        moe_session_free(s);
    }
    CHECK(memcmp(&sides[0], &sides[1], sizeof sides[0]) == 0, "%s, batch %d: classes or their probabilities differ",
          what, batch);
    CHECK(emu_live() == 0, "%s: %zu objects have leaked", what, emu_live());
}

static mw_model *family(int which) {
    return which == 0   ? mw_hierarchical(MW_F32, 11)
           : which == 1 ? mw_language_model(MW_F32, 11)
                        : mw_classifier(MW_F32, 11);
}

/* Compare two-level gates, MLP gates and linear experts, models without an encoder, and gates other than the file's. */
TEST(gating_equals_the_cpu) {
    static const char *const models[] = { "two levels", "language model", "classifier" }, *const gatings[] = {
        NULL, "softmax", "topk"
    };
    static const moe_type types[] = {
        MOE_TYPE_Q8, MOE_TYPE_F32, MOE_TYPE_Q4, MOE_TYPE_Q4M, MOE_TYPE_Q8B, MOE_TYPE_BF16
    };
    static const int batches[] = { 1, 3, 8 };
    for (int which = 0; which < 3; which++) {
        fixture f32 = open_model(family(which));
        for (size_t t = 0; t < MOE_COUNT(types); t++) {
            fixture other = converted(&f32, types[t]);
            for (int i = 0; i < (t < 2 ? 6 : 2); i++) {
                const char *gating = gatings[i % 3];
                char what[96];
                snprintf(what, sizeof what, "%s, %s, gates %s", models[which], moe_type_name(types[t]),
                         gating ? gating : "of the file");
                defaults();
                emu_few_rows = i % 2 ? 2 : 32; /* use cuBLAS, or the kernel */
                emu_pairs = i % 3 ? 1 << 14 : 6;
                emu_sums = i % 2 ? 1 : 1 << 24;
                if (which == 2) assert_classifiers_agree(other.model, batches[i % 3], gating, what);
                else assert_models_agree(other.model, batches[(i + 1) % 3], 1 + 2 * (i / 3), 0.0f, 0, gating, what);
                if (i == 2) CHECK(emu_graph_launches() > 0, "%s: no step was a CUDA graph", what);
            }
            drop(&other);
        }
        drop(&f32);
    }
}

/* Trace: one entry for every tensor of every step, with its name, size and checksum. */
typedef struct lines {
    struct {
        char name[64];
        size_t rows, cols;
        uint64_t sum;
    } line[8192];
    size_t n;
} lines;

static void write_line(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    lines *l = user;
    uint64_t sum = 0;
    if (are_sizes(name)) return;
    CHECK(l->n < MOE_COUNT(l->line), "more lines than expected");
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++) sum = moe_hash(sum ^ moe_to_bits(data[r * stride + c]));
    snprintf(l->line[l->n].name, sizeof l->line[0].name, "%s", name);
    l->line[l->n].rows = rows;
    l->line[l->n].cols = cols;
    l->line[l->n++].sum = sum;
}

TEST(traces_equal_the_cpu) {
    for (int which = 0; which < 4; which++) {
        fixture f = open_model(which < 3 ? family(which) : mw_transformer(MW_NLLB, MW_F32, 11));
        moe_session_params p = params_for(f.model, "cpu", 2, 2);
        lines *sides[2] = { mw_zeros(sizeof(lines)), mw_zeros(sizeof(lines)) };
        size_t probabilities = 0;
        defaults();
        p.trace = write_line;
        for (int side = 0; side < 2; side++) {
            moe_session *s;
            moe_error e = { MOE_OK, "", "" };
            p.device = side ? "cuda" : "cpu";
            p.trace_user = sides[side];
            if (which != 2) {
                free(translate(f.model, &p));
            } else {
                verdicts v;
                CHECK(moe_session_new(f.model, &p, &s, &e) == MOE_OK && classify(s, &v, &e) == MOE_OK, "%s", e.message);
                moe_session_free(s);
            }
        }
        CHECK(sides[0]->n == sides[1]->n, "%zu tensors, the CPU has %zu", sides[1]->n, sides[0]->n);
        for (size_t i = 0; i < sides[0]->n; i++) {
            CHECK(memcmp(&sides[0]->line[i], &sides[1]->line[i], sizeof sides[0]->line[0]) == 0,
                  "tensor %zu is %s, for the CPU %s", i, sides[1]->line[i].name, sides[0]->line[i].name);
            probabilities += strstr(sides[0]->line[i].name, ".probabilities") != NULL;
        }
        CHECK(probabilities > 0, "no gate was seen");
        assert_int_equal(emu_live(), 0);
        free(sides[0]), free(sides[1]);
        drop(&f);
    }
}

/* ---- Experts that do not fit ---- */

static size_t room_of(moe_type type, size_t rows, size_t cols) { /* Return the device memory that a matrix needs. */
    if (type == MOE_TYPE_Q8 || type == MOE_TYPE_Q4 || type >= MOE_TYPE_Q3)
        return moe_round_up(rows, 16) * (moe_round_up(cols, 64) + 4);
    if (type == MOE_TYPE_Q4M || type == MOE_TYPE_Q8B)
        return moe_round_up(rows, 16) * (moe_round_up(cols, 64) / 64 * 68 + 4);
    return moe_round_up(rows * cols * (type == MOE_TYPE_F32 ? 4 : 2), 64);
}

/* Return the i-th layer whose experts can be fetched, starting in the encoder, or NULL after the last. */
static const moe_layer *layer_of(const moe_model *m, size_t i) {
    for (size_t at = 0; at < m->n_layers; at++) {
        const moe_layer *l = &m->layers[at];
        if (l->type == &moe_mixture_type && l->mixture.kind != MOE_EXPERT_LINEAR && i-- == 0) return l;
    }
    return NULL;
}

/* Device memory with all experts and with none; bytes of the largest expert; number of experts. */
typedef struct sizes {
    size_t all, fixed, largest, experts;
} sizes;

static sizes measure(const moe_model *m, moe_session_params p) {
    sizes s = { 0, 0, 0, 0 };
    moe_session *session;
    moe_error e = { MOE_OK, "", "" };
    const moe_layer *l;
    p.device_memory = 0;
    CHECK(moe_session_new(m, &p, &session, &e) == MOE_OK, "%s", e.message);
    s.all = s.fixed = moe_session_stats(session).device_bytes;
    for (size_t i = 0; (l = layer_of(m, i)); i++) {
        const moe_type type = l->mixture.experts.up.type;
        const moe_experts *x = &l->mixture.experts;
        const size_t biases =
            (x->up_bias ? moe_round_up(4 * l->hidden, 64) : 0) + (x->down_bias ? moe_round_up(4 * l->out, 64) : 0);
        const size_t bytes = room_of(type, l->hidden, l->out) + room_of(type, l->out, l->hidden) + biases;
        s.fixed -= l->mixture.experts.count * bytes;
        s.experts += l->mixture.experts.count;
        s.largest = moe_max(s.largest, bytes);
    }
    CHECK(moe_session_stats(session).experts == s.experts && moe_session_stats(session).experts_held == s.experts,
          "all fit");
    CHECK(moe_session_stats(session).expert_fetches == 0 && moe_session_stats(session).expert_fetch_bytes == 0,
          "none are fetched");
    moe_session_free(session);
    s.fixed += 2 * 4096; /* uploads use two buffers of MOE_STAGE_BYTES, which remain allocated only when fetching */
    return s;
}

static size_t budget(const sizes *s, size_t bays) { return s->fixed + bays * s->largest; }

/* Simulated expert cache, fed with the visits in a trace. */
typedef struct simulation {
    const moe_model *model;
    moe_cache cache;
    moe_cache_layer layer[4];
    int32_t memory[2 * 64 + 3 * 64];
    uint64_t pairs, visits, bytes;
} simulation;

static void start_simulation(simulation *s, const moe_model *model, size_t experts, size_t bays) {
    const moe_layer *l;
    memset(s, 0, sizeof *s);
    s->model = model;
    CHECK(moe_cache_bytes(experts, bays) <= sizeof s->memory, "%zu experts, %zu bays", experts, bays);
    moe_cache_begin(&s->cache, s->memory, experts, bays, moe_max(bays / 16, 1));
    for (size_t i = 0, first = 0; (l = layer_of(model, i)); first += s->layer[i++].count)
        s->layer[i] = (moe_cache_layer){ first, l->mixture.experts.count, 0 };
}

static uint64_t fetched_bytes(const moe_layer *l) { /* bytes to fetch one expert */
    const moe_type type = l->mixture.experts.up.type;
    uint64_t up = moe_round_up(l->hidden, 16) * moe_round_up(l->out, 64);
    uint64_t down = moe_round_up(l->out, 16) * moe_round_up(l->hidden, 64);
    if (type == MOE_TYPE_F32) return 2 * l->hidden * l->out * 4;
    return (type == MOE_TYPE_Q4 ? (up + down) / 2 + (up + down) / 32 : up + down) +
           (moe_round_up(l->hidden, 16) + moe_round_up(l->out, 16)) * 4;
}

static void simulate(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    simulation *s = user;
    const moe_layer *l;
    char gate[64];
    for (size_t i = 0; (l = layer_of(s->model, i)); i++) {
        int32_t wanted[64], place[64];
        size_t n = 0;
        snprintf(gate, sizeof gate, "%s.gate", l->name);
        if (strcmp(name, gate) != 0) continue;
        for (size_t e = 0; e < cols; e++) {
            size_t pairs = 0;
            for (size_t r = 0; r < rows; r++) pairs += data[r * stride + e] > 0;
            if (pairs) wanted[n++] = (int32_t)e;
            s->pairs += pairs;
        }
        s->visits += n;
        s->bytes += (n - moe_cache_plan(&s->cache, &s->layer[i], wanted, n, place)) * fetched_bytes(l);
    }
}

TEST(fetches_equal_a_simulation) {
    static const moe_type types[] = { MOE_TYPE_F32, MOE_TYPE_Q8, MOE_TYPE_Q4 };
    size_t replaced = 0;
    for (int which = 0; which < 3; which++) { /* one level, two levels, experts of one shape on both sides */
        fixture f32 = open_model(which == 1 ? mw_hierarchical(MW_F32, 11)
                                            : mw_small(which ? MW_CARRIED_QUERY : MW_GNMT, MW_F32, 11));
        for (size_t t = 0; t < MOE_COUNT(types); t++) {
            fixture f = converted(&f32, types[t]);
            moe_session_params p = params_for(f.model, "cuda", 3, 2);
            sizes size;
            defaults();
            size = measure(f.model, p);
            for (size_t bays = 1; bays * size.largest < size.all + 2 * 4096 - size.fixed; bays += 1 + bays / 2) {
                simulation sim;
                moe_stats s;
                feed *answers;
                emu_few_rows = bays % 2 ? 2 : 32; /* use cuBLAS, or the kernel */
                start_simulation(&sim, f.model, size.experts, bays);
                p.trace = simulate;
                p.trace_user = &sim;
                p.device_memory = budget(&size, bays);
                answers = translate(f.model, &p);
                s = answers->stats;
                free(answers);
                CHECK(s.experts == size.experts && s.experts_held == bays, "%zu bays: %d of %d", bays,
                      (int)s.experts_held, (int)s.experts);
                if (size.all > p.device_memory) CHECK(s.device_bytes <= p.device_memory, "the budget is exceeded");
                CHECK(s.expert_pairs == sim.pairs && s.expert_visits == sim.visits,
                      "%d pairs, %d visits; the trace shows %d, %d", (int)s.expert_pairs, (int)s.expert_visits,
                      (int)sim.pairs, (int)sim.visits);
                CHECK(s.expert_hits == sim.cache.hits && s.expert_fetches == sim.cache.fetches &&
                          s.expert_fetch_bytes == sim.bytes,
                      "model %d, type %zu, %zu bays: %d hits, %d fetches, %d bytes; expected %d, %d, %d", which, t,
                      bays, (int)s.expert_hits, (int)s.expert_fetches, (int)s.expert_fetch_bytes, (int)sim.cache.hits,
                      (int)sim.cache.fetches, (int)sim.bytes);
                replaced += s.expert_fetches > bays;
            }
            drop(&f);
        }
        drop(&f32);
    }
    CHECK(replaced > 10, "experts were replaced %zu times", replaced);
}

/* Results depend neither on the number of bays, batches and chunks of rows nor on whether cuBLAS computes products. */
TEST(fetching_equals_the_cpu) {
    static const moe_type types[] = { MOE_TYPE_Q8, MOE_TYPE_F32, MOE_TYPE_Q4M, MOE_TYPE_Q8B,
                                      MOE_TYPE_Q4, MOE_TYPE_F16, MOE_TYPE_Q3,  MOE_TYPE_Q2 };
    static const int batches[] = { 1, 8, 3 };
    for (int which = 0; which < 5; which++) {
        fixture f32 = open_model(which < 2   ? mw_small(which ? MW_BOTH_CONTEXTS : MW_GNMT, MW_F32, 11)
                                 : which < 4 ? family(which == 3 ? 2 : 0)
                                             : mw_transformer(MW_NLLB, MW_F32, 11));
        for (size_t t = 0; t < MOE_COUNT(types); t++) {
            fixture f = converted(&f32, types[t]);
            for (int i = 0; i < 5; i++) {
                moe_session_params p = params_for(f.model, "cuda", batches[i % 3], BEST);
                sizes size;
                char what[96];
                if (which == 3) p.target_tag = -1;
                defaults();
                emu_few_rows = i % 2 ? 2 : 1000; /* use cuBLAS, or the kernel */
                emu_pairs = i == 2 || i == 3 ? 6 : 1 << 14;
                emu_sums = i == 3 ? 1 : 1 << 24;
                size = measure(f.model, p);
                allowed = budget(&size, i == 0 ? 1 : i < 4 ? 2 + (size_t)i : size.experts);
                snprintf(what, sizeof what, "model %d, %s, budget %zu", which, moe_type_name(types[t]), allowed);
                if (which == 3) assert_classifiers_agree(f.model, batches[i % 3], NULL, what);
                else assert_models_agree(f.model, batches[i % 3], BEST, 0.0f, 0, NULL, what);
                if (which != 3 && i == 4) CHECK(emu_graph_launches() > 0, "all fit: no step was a CUDA graph");
                allowed = 0;
            }
            drop(&f);
        }
        drop(&f32);
    }
}

static size_t megabytes(const char *message, const char *before) {
    const char *at = strstr(message, before);
    CHECK(at, "'%s' is missing in: %s", before, message);
    return strtoul(at + strlen(before), NULL, 10);
}

/* A wire with a single rank. */
static moe_status agree_alone(void *user, int64_t *values, size_t n, moe_error *error) {
    (void)user, (void)values, (void)n, (void)error;
    return MOE_OK;
}

static moe_status count_alone(void *user, const uint32_t *send, uint32_t *recv, size_t each, moe_error *error) {
    (void)user, (void)error;
    memcpy(recv, send, each * sizeof *recv);
    return MOE_OK;
}

static moe_status swap_alone(void *user, const void *send, const size_t *send_bytes, void *recv,
                             const size_t *recv_bytes, moe_error *error) {
    (void)user, (void)recv_bytes, (void)error;
    memcpy(recv, send, *send_bytes);
    return MOE_OK;
}

TEST(ranks_are_refused_and_fall_back_to_the_cpu) {
    const moe_wire wire = { NULL, 0, 1, agree_alone, count_alone, swap_alone };
    fixture f = open_model(mw_small(MW_GNMT, MW_Q8, 11));
    moe_session_params p = params_for(f.model, "cuda", 4, 2);
    moe_session *s = NULL;
    moe_error e = { MOE_OK, "", "" };
    defaults();
    p.wire = &wire;
    CHECK(moe_session_new(f.model, &p, &s, &e) == MOE_ERROR_UNSUPPORTED && strstr(e.message, "a wire between ranks"),
          "%s", e.message);
    p.device = NULL;
    CHECK(moe_session_new(f.model, &p, &s, &e) == MOE_OK, "%s", e.message);
    assert_string_equal(moe_session_stats(s).device, "cpu");
    moe_session_free(s);
    drop(&f);
}

/* The memory that a message names is sufficient; less memory is not. Without a budget, free memory is the limit. */
TEST(messages_name_the_required_memory) {
    fixture f = open_model(mw_small(MW_GNMT, MW_Q8, 11));
    moe_session_params p = params_for(f.model, "cuda", 200, 2); /* some megabytes of states */
    moe_session *s = NULL;
    moe_error e = { MOE_OK, "", "" };
    sizes size;
    size_t least;
    defaults();
    size = measure(f.model, p);
    least = (budget(&size, 1) >> 20) + 1;
    /* The first lacks memory for an expert, the next ones also for weights and scratch memory, the last for cuBLAS. */
    const size_t allowances[] = { budget(&size, 1) - 1, size.fixed - 12000, size.fixed - 24000,
                                  size.fixed / 2,       size.fixed / 4,     100 };
    for (int i = 0; i < 6; i++) {
        p.device_memory = allowances[i];
        CHECK(moe_session_new(f.model, &p, &s, &e) == MOE_ERROR_MEMORY && strstr(e.message, "allow more") &&
                  strstr(e.message, "--device cpu") && strstr(e.message, "to hold all experts"),
              "%d: %s", i, e.message);
        CHECK(megabytes(e.message, "needs at least ") == least, "%d: %zu MB: %s", i, least, e.message);
    }
    p.device_memory = least << 20;
    CHECK(moe_session_new(f.model, &p, &s, &e) == MOE_OK, "%s", e.message);
    moe_session_free(s);
    p.device_memory = 0;
    emu_memory =
        budget(&size, 0) + (7 * size.largest / 2) * 8 / 7; /* an eighth of the remaining free memory is not used */
    CHECK(moe_session_new(f.model, &p, &s, &e) == MOE_OK, "%s", e.message);
    CHECK(moe_session_stats(s).experts_held == 3, "%d of %zu experts are held", (int)moe_session_stats(s).experts_held,
          size.experts);
    moe_session_free(s);
    emu_memory = budget(&size, 0) + 64;
    CHECK(moe_session_new(f.model, &p, &s, &e) == MOE_ERROR_MEMORY && strstr(e.message, "free") &&
              strstr(e.message, "--device cpu"),
          "%s", e.message);
    CHECK(megabytes(e.message, "needs at least ") == least, "%zu MB: %s", least, e.message);
    defaults();
    assert_int_equal(emu_live(), 0);
    drop(&f);
}

/* ---- Failures ---- */

/* Make every CUDA call fail once. Opening or translating then fails, nothing leaks, and earlier results are correct.
 * `held` is the number of experts on the device, 0 for any. If `few` is 0, most launches are skipped; otherwise there
 * must be few sentences, with two steps each. */
static void sweep(const moe_model *model, const feed *wanted, const moe_session_params *p, size_t held, int code,
                  int stay, int few) {
    size_t opened = 0, calls = 0, step = 1;
    for (size_t nth = 1;; nth += step) {
        feed *feeding = make_feed(model);
        moe_error e = { MOE_OK, "", "" };
        moe_session *s = NULL;
        moe_status status;
        size_t answered = 0;
        feeding->most = wanted->most;
        feeding->scored = wanted->scored;
        defaults();
        emu_fail(nth, code, stay);
        status = moe_session_new(model, p, &s, &e);
        if (status == MOE_OK) {
            opened++;
            if (!few) step = 1 + nth / 16; /* skip most of the thousands of launches */
            status = moe_translate(s, pull, done, feeding, &e);
            for (size_t i = 0; i < feeding->most; i++)
                if (feeding->answers[i].place) {
                    CHECK(memcmp(&feeding->answers[i], &wanted->answers[i], sizeof(answer)) == 0,
                          "call %zu fails: answer %zu", nth, i);
                    answered++;
                }
            if (status != MOE_OK) {
                moe_error again = { MOE_OK, "", "" };
                feeding->next = 0;
                CHECK(moe_translate(s, pull, done, feeding, &again) == status && strcmp(again.message, e.message) == 0,
                      "after call %zu has failed: '%s', then '%s'", nth, e.message, again.message);
                CHECK(feeding->answered == answered, "answers after call %zu has failed", nth);
            }
            CHECK(!held || moe_session_stats(s).experts_held == held, "experts held");
            moe_session_free(s);
        }
        calls = emu_calls();
        CHECK(emu_live() == 0, "call %zu fails: %zu objects have leaked", nth, emu_live());
        free(feeding);
        if (nth > calls) { /* the run made fewer calls */
            CHECK(status == MOE_OK && answered == wanted->most, "%zu answers, %s", answered, e.message);
            break;
        }
        if (status == MOE_OK) continue; /* failures of CUDA graphs and of querying free memory are harmless */
        CHECK(strstr(e.message, code == EMU_LOST         ? "failure"
                                : code == EMU_OLD_DRIVER ? "driver"
                                                         : "memory") ||
                  strstr(e.message, "CUBLAS"),
              "call %zu: %s", nth, e.message);
        CHECK(strstr(e.message, "--device cpu"), "call %zu gives no advice: %s", nth, e.message);
    }
    CHECK(opened > 0 && calls > 100, "%zu calls, %zu sessions", calls, opened);
}

/* Failures leak nothing, whether all experts or only two are on the device. */
TEST(failures_leak_nothing) {
    static const struct {
        int code, stay;
    } failures[] = { { EMU_OUT_OF_MEMORY, 0 }, { EMU_LOST, 1 }, { EMU_OLD_DRIVER, 0 } };
    fixture f = open_model(mw_small(MW_GNMT, MW_Q8, 11));
    moe_session_params p = params_for(f.model, "cuda", 3, 2);
    feed *wanted;
    sizes size;
    defaults();
    p.coverage_penalty = 0.2f;
    size = measure(f.model, p);
    wanted = translate(f.model, &p);
    for (size_t k = 0; k < 2 * MOE_COUNT(failures); k++) {
        p.device_memory = k % 2 ? budget(&size, 2) : 0;
        sweep(f.model, wanted, &p, k % 2 ? 2 : size.experts, failures[k / 2].code, failures[k / 2].stay, 0);
    }
    free(wanted);
    drop(&f);
}

/* Every call fails once while a sentence is translated and another one is scored. */
TEST(failures_of_steps_are_detected) {
    fixture f = open_model(mw_small(MW_PRODUCT, MW_Q8, 11));
    for (int rules = 0; rules < 2; rules++) {
        moe_session_params p = params_for(f.model, "cuda", 2, 2);
        moe_error e = { MOE_OK, "", "" };
        feed *wanted = make_feed(f.model);
        moe_session *s;
        defaults();
        p.rules = (moe_rules)rules;
        p.coverage_penalty = 0.2f;
        p.max_len_factor = 0;
        p.max_len_offset = 2;
        wanted->most = 2;
        wanted->scored = 1;
        CHECK(moe_session_new(f.model, &p, &s, &e) == MOE_OK, "%s", e.message);
        CHECK(moe_translate(s, pull, done, wanted, &e) == MOE_OK, "%s", e.message);
        moe_session_free(s);
        sweep(f.model, wanted, &p, 0, rules ? EMU_LOST : EMU_OUT_OF_MEMORY, rules, 1);
        free(wanted);
    }
    drop(&f);
}

static void look(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    (void)user, (void)name, (void)data, (void)rows, (void)cols, (void)stride;
}

/* Calls to a classifier fail on the device, or in the host's allocator, with and without a trace. */
TEST(classifiers_leak_nothing) {
    mw_model *m = mw_classifier(MW_Q8, 11);
    mw_image image = mw_build(m);
    for (int traced = 0; traced < 2; traced++)
        for (int host = 0; host < 2; host++) {
            size_t reached = 1, worked = 0;
            for (size_t nth = 1; nth <= reached + 1; nth++) {
                mw_heap heap = { .fail_at = host ? nth : 0 };
                const moe_model_params counted = { .allocator = { mw_heap_allocate, mw_heap_reallocate, mw_heap_release,
                                                                  &heap } };
                moe_error e = { MOE_OK, "", "" };
                moe_session *s = NULL;
                moe_model *model = NULL;
                moe_status status = moe_model_open_memory(image.data, image.bytes, &counted, &model, &e);
                if (status == MOE_OK) {
                    moe_session_params p = params_for(model, "cuda", 8, BEST);
                    verdicts v;
                    p.target_tag = -1;
                    if (traced) p.trace = look;
                    defaults();
                    emu_fail(host ? 0 : nth, EMU_OUT_OF_MEMORY, 0);
                    status = moe_session_new(model, &p, &s, &e);
                    if (status == MOE_OK) status = classify(s, &v, &e);
                    moe_session_free(s);
                }
                moe_model_close(model);
                worked += status == MOE_OK;
                reached = host ? heap.calls : emu_calls();
                if (status != MOE_OK)
                    CHECK(strstr(e.message, "memory") || strstr(e.message, "CUBLAS"), "call %zu: %s", nth, e.message);
                CHECK(emu_live() == 0, "call %zu fails: %zu objects have leaked on the device", nth, emu_live());
                CHECK(heap.blocks == 0 && heap.wrong_sizes == 0,
                      "call %zu fails: %zu blocks have leaked, %zu were released with a wrong size", nth, heap.blocks,
                      heap.wrong_sizes);
                if (nth > reached) CHECK(status == MOE_OK, "%s", e.message);
            }
            CHECK(worked > 0 && reached > 3, "%zu calls", reached);
        }
    free(image.data);
    mw_free(m);
}

static moe_status try_device(const fixture *f, const char *device, size_t memory, moe_error *e, char name[64]) {
    moe_session_params p = params_for(f->model, device, 2, 2);
    moe_session *s;
    moe_status status;
    p.device_memory = memory;
    status = moe_session_new(f->model, &p, &s, e);
    if (status != MOE_OK) return status;
    snprintf(name, 64, "%s", moe_session_stats(s).device);
    CHECK((moe_session_stats(s).device_bytes > 0) == (strncmp(name, "cuda", 4) == 0), "device_bytes");
    moe_session_free(s);
    return MOE_OK;
}

TEST(devices_are_selected_by_parameter) {
    fixture f = open_model(mw_small(MW_GNMT, MW_Q8, 11));
    moe_error e = { MOE_OK, "", "" };
    char name[64] = "";
    defaults();
    unsetenv("MOE_DEVICE");
    CHECK(try_device(&f, NULL, 0, &e, name) == MOE_OK && strcmp(name, "cuda:0 emulated") == 0, "automatic: %s", name);
    CHECK(try_device(&f, "auto", 0, &e, name) == MOE_OK && strcmp(name, "cuda:0 emulated") == 0, "auto: %s", name);
    CHECK(try_device(&f, "cuda:0", 0, &e, name) == MOE_OK && strcmp(name, "cuda:0 emulated") == 0, "cuda:0: %s", name);
    CHECK(try_device(&f, "cpu", 0, &e, name) == MOE_OK && strcmp(name, "cpu") == 0, "cpu: %s", name);
    CHECK(try_device(&f, "cuda:1", 0, &e, name) == MOE_ERROR_UNSUPPORTED && strstr(e.message, "no device cuda:1"), "%s",
          e.message);
    CHECK(try_device(&f, "cuda:x", 0, &e, name) == MOE_ERROR_ARGUMENT, "%s", e.message);
    CHECK(try_device(&f, "cuda:", 0, &e, name) == MOE_ERROR_ARGUMENT, "%s", e.message);
    CHECK(try_device(&f, "cudas", 0, &e, name) == MOE_ERROR_ARGUMENT, "%s", e.message);
    CHECK(try_device(&f, "tpu", 0, &e, name) == MOE_ERROR_ARGUMENT, "%s", e.message);
    CHECK(try_device(&f, "cuda", 1 << 14, &e, name) == MOE_ERROR_MEMORY && strstr(e.message, "allowed"), "%s",
          e.message);
    CHECK(try_device(&f, NULL, 1 << 14, &e, name) == MOE_OK && strcmp(name, "cpu") == 0,
          "the processor is used instead");
    for (int i = 0; i < 2; i++) { /* only the processor has batchwise gates */
        moe_session_params p = params_for(f.model, i ? NULL : "cuda", 2, 2);
        moe_session *s = NULL;
        p.gating = "batchwise";
        CHECK(moe_session_new(f.model, &p, &s, &e) == (i ? MOE_OK : MOE_ERROR_UNSUPPORTED), "batchwise: %s", e.message);
        CHECK(i ? strcmp(moe_session_stats(s).device, "cpu") == 0 : strstr(e.message, "batchwise") != NULL, "%s",
              e.message);
        moe_session_free(s);
    }
    setenv("MOE_DEVICE", "cpu", 1);
    CHECK(try_device(&f, NULL, 0, &e, name) == MOE_OK && strcmp(name, "cpu") == 0, "MOE_DEVICE");
    unsetenv("MOE_DEVICE");
    emu_reset(0);
    CHECK(try_device(&f, "cuda", 0, &e, name) == MOE_ERROR_UNSUPPORTED && strstr(e.message, "no GPU") &&
              strstr(e.message, "nvidia-smi"),
          "%s", e.message);
    CHECK(try_device(&f, NULL, 0, &e, name) == MOE_OK && strcmp(name, "cpu") == 0, "no GPU: the processor");
    defaults();
    emu_fail(1, EMU_OLD_DRIVER, 1);
    CHECK(try_device(&f, "cuda", 0, &e, name) == MOE_ERROR_UNSUPPORTED && strstr(e.message, "update the NVIDIA driver"),
          "%s", e.message);
    CHECK(try_device(&f, NULL, 0, &e, name) == MOE_OK && strcmp(name, "cpu") == 0, "old driver: the processor");
    assert_int_equal(emu_live(), 0);
    drop(&f);
}

int main(int argc, char **argv) {
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return run_all_tests(NULL, NULL);
}
