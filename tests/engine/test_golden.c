/* test_golden.c - compares the engine with values that tools/convert/reference.py computed in float64 (written by
 * tests/golden/make_golden.py). Every op runs with its graph builder, planner and executor, on every instruction set of
 * this machine. Tolerances are 1e-5 for an op and 2e-4 for a whole model: random weights magnify rounding more than
 * trained weights, for which tests/engine/parity.py uses 1e-4. Selected experts and translations must be equal. */
#include "moe.c"

#include <stddef.h>
#include "tests/test.h"

#define GOLDEN "tests/golden/"

static const double op_tolerance = 1e-5, model_tolerance = 2e-4;

/* ---- Reading the files ---- */

typedef struct golden {
    moe_file file;
    moe_allocator allocator;
    void *memory, *data;
} golden;

static golden open_golden(const char *path) {
    golden g = { .allocator = moe_allocator_or_default(NULL) };
    moe_error error;
    FILE *in = fopen(path, "rb");
    long bytes;
    if (!in) fail_msg("cannot open %s: run the tests in the root of the repository", path);
    fseek(in, 0, SEEK_END);
    bytes = ftell(in);
    rewind(in);
    g.memory = malloc((size_t)bytes + 64);
    assert_non_null(g.memory);
    g.data = (char *)g.memory + (64 - (uintptr_t)g.memory % 64) % 64;
    assert_int_equal(fread(g.data, 1, (size_t)bytes, in), bytes);
    fclose(in);
    if (moe_file_parse(&g.file, g.data, (size_t)bytes, (size_t)bytes, &g.allocator, &error) != MOE_OK)
        fail_msg("%s: %s", path, error.message);
    return g;
}

static void close_golden(golden *g) {
    moe_file_free(&g->file, &g->allocator);
    free(g->memory);
}

/* Data and shape of tensor CASE.NAME or, without a name, tensor CASE; data is NULL if the tensor is missing. */
typedef struct part {
    float *data;
    size_t rows, cols;
    const moe_tensor_info *info;
} part;

static part find_part(const golden *g, const char *prefix, const char *name) {
    char key[128];
    const moe_tensor_info *t;
    assert_true(snprintf(key, sizeof key, "%s%s%s", prefix, name ? "." : "", name ? name : "") < (int)sizeof key);
    t = moe_find_tensor(&g->file, key);
    if (!t) return (part){ NULL, 0, 0, NULL };
    return (part){ (float *)(void *)((char *)g->data + t->offset), t->n_dims > 1 ? (size_t)t->dims[0] : 1,
                   (size_t)t->dims[t->n_dims - 1], t };
}

static part need_part(const golden *g, const char *prefix, const char *name) {
    part p = find_part(g, prefix, name);
    if (!p.data) fail_msg("%s.%s is missing", prefix, name ? name : "");
    return p;
}

static const moe_meta *find_value(const golden *g, const char *prefix, const char *name) {
    char key[160];
    snprintf(key, sizeof key, "%s.%s", prefix, name);
    return moe_find_meta(&g->file, key);
}

static const moe_meta *need_value(const golden *g, const char *prefix, const char *name) {
    const moe_meta *m = find_value(g, prefix, name);
    if (!m) fail_msg("%s.%s is missing", prefix, name);
    return m;
}

static int value_is(const golden *g, const char *prefix, const char *name, const char *text) {
    const moe_meta *m = find_value(g, prefix, name);
    return m && moe_span_is(moe_meta_text(m, 0), text);
}

static moe_matrix matrix(part p) { return moe_matrix_view(MOE_TYPE_F32, p.rows, p.cols, p.data); }

static void expect_close(const char *what, const float *got, const float *wanted, size_t n, double tolerance) {
    for (size_t i = 0; i < n; i++) {
        double difference = (double)got[i] - (double)wanted[i];
        if (got[i] == wanted[i]) continue; /* the difference of equal infinities is 0 */
        if (!(difference <= tolerance && difference >= -tolerance))
            fail_msg("%s: element %zu is %.9g, the reference has %.9g", what, i, (double)got[i], (double)wanted[i]);
    }
}

/* ---- Running one graph ---- */

enum { MAX_ROWS = 64, MAX_FLOATS = 1 << 16 };

typedef struct bench {
    moe_graph graph;
    moe_node nodes[64];
    moe_frame frame;
    moe_builder builder;
    moe_carried carried[1][MOE_CARRIES];
    int32_t parents[MAX_ROWS];
    size_t live[MAX_ROWS], first[MAX_ROWS];
    moe_pool *pool;
    void *arena;
    float out[MAX_FLOATS];
} bench;

static bench *new_bench(size_t rows, size_t sentences) {
    bench *b = calloc(1, sizeof *b);
    assert_non_null(b);
    assert_true(rows <= MAX_ROWS);
    b->graph = (moe_graph){ .nodes = b->nodes,
                            .capacity = MOE_COUNT(b->nodes),
                            .rows = rows,
                            .threads = 2,
                            .sentences = sentences,
                            .max_source = MAX_ROWS,
                            .traced = 1 };
    for (size_t r = 0; r < rows; r++) b->parents[r] = (int32_t)r;
    b->frame.rows = rows;
    b->frame.beam.parents = b->parents;
    return b;
}

/* Return a builder for the nodes of a layer. */
static moe_builder *builder(bench *b, const moe_layer *layer) {
    b->builder = (moe_builder){ .g = &b->graph, .layers = layer, .carried = b->carried };
    return &b->builder;
}

/* Add a node with the rows of `data`. */
static moe_node *input(bench *b, const float *data, size_t cols) {
    return moe_op_gather(&b->graph, (float *)(uintptr_t)data, cols, "input");
}

/* Traced tensors, each with its name and the rows of all runs. */
enum { MAX_SEEN = 16 };

typedef struct seen_list {
    struct {
        char name[80];
        size_t rows, cols;
        float data[1 << 14];
    } entries[MAX_SEEN];
    size_t count;
} seen_list;

/* Trace function that records weights and probabilities of gates on both levels. */
static void keep_gates(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    static const char *const ends[] = { ".gate", ".parent", ".gate.probabilities", ".parent.probabilities" };
    seen_list *s = user;
    size_t i = 0, end = 0;
    for (; end < MOE_COUNT(ends); end++)
        if (strlen(name) > strlen(ends[end]) && strcmp(name + strlen(name) - strlen(ends[end]), ends[end]) == 0) break;
    if (end == MOE_COUNT(ends)) return;
    while (i < s->count && strcmp(s->entries[i].name, name) != 0) i++;
    assert_true(i < MAX_SEEN);
    if (i == s->count) {
        snprintf(s->entries[s->count].name, sizeof s->entries[i].name, "%s", name);
        s->entries[s->count].rows = 0;
        s->entries[s->count++].cols = cols;
    }
    assert_true((s->entries[i].rows + rows) * cols <= MOE_COUNT(s->entries[i].data));
    for (size_t r = 0; r < rows; r++)
        memcpy(s->entries[i].data + s->entries[i].rows++ * cols, data + r * stride, cols * sizeof *data);
}

/* Return the rows that keep_gates recorded under `name`. */
static float *seen(seen_list *s, const char *name, size_t rows, size_t cols) {
    for (size_t i = 0; i < s->count; i++)
        if (strcmp(s->entries[i].name, name) == 0 && s->entries[i].rows == rows && s->entries[i].cols == cols)
            return s->entries[i].data;
    fail_msg("the trace has no %s of %zu x %zu", name, rows, cols);
    return NULL;
}

/* Plan and run the graph. The rows of `result` are stored in b->out, gate outputs in `gates` (may be NULL). */
static void run_traced(bench *b, moe_node *result, const moe_kernels *kernels, seen_list *gates) {
    moe_run run = { kernels, NULL, &b->graph, &b->frame, 0 };
    moe_error error;
    if (result) moe_op_store(&b->graph, result, MOE_BY_PARENT, b->out, "output");
    if (moe_graph_plan(&b->graph, &error) != MOE_OK) fail_msg("%s", error.message);
    b->arena = aligned_alloc(64, moe_round_up(b->graph.bytes + 64, 64));
    b->pool = calloc(1, sizeof *b->pool);
    assert_true(b->arena && b->pool);
    memset(b->arena, 0xa5, b->graph.bytes); /* results must not depend on the memory's previous contents */
    assert_int_equal(moe_pool_start(b->pool, 2, &error), MOE_OK);
    run.pool = b->pool;
    moe_graph_place(&b->graph, b->arena);
    if (gates) gates->count = 0;
    moe_graph_run(&run, gates ? keep_gates : NULL, gates);
    moe_pool_free(b->pool, b->pool->count);
}

static void run_bench(bench *b, moe_node *result, const moe_kernels *kernels) { run_traced(b, result, kernels, NULL); }

static void free_bench(bench *b) {
    free(b->arena);
    free(b->pool);
    free(b);
}

/* ---- Ops ---- */

typedef void (*case_fn)(const golden *g, const char *name, const moe_kernels *kernels);

static void check_linear(const golden *g, const char *name, const moe_kernels *kernels) {
    part x = need_part(g, name, "x"), w = need_part(g, name, "w"), bias = find_part(g, name, "bias"),
         y = need_part(g, name, "y");
    moe_matrix m = matrix(w);
    bench *b = new_bench(x.rows, 1);
    run_bench(b, moe_op_linear(&b->graph, &m, input(b, x.data, x.cols), bias.data, "y"), kernels);
    expect_close(name, b->out, y.data, y.rows * y.cols, op_tolerance);
    free_bench(b);
}

static void check_embedding(const golden *g, const char *name, const moe_kernels *kernels) {
    part w = need_part(g, name, "w"), y = need_part(g, name, "y");
    const moe_meta *ids = need_value(g, name, "ids");
    int32_t id[MAX_ROWS];
    moe_matrix m = matrix(w);
    bench *b = new_bench(ids->count, 1);
    for (size_t i = 0; i < ids->count; i++) id[i] = (int32_t)moe_meta_int(ids, i);
    b->frame.ids = id;
    run_bench(b, moe_op_embed(&b->graph, &m, (float)moe_meta_real(need_value(g, name, "scale"), 0), "y"), kernels);
    expect_close(name, b->out, y.data, y.rows * y.cols, op_tolerance);
    free_bench(b);
}

static moe_cell lstm_cell(const golden *g, const char *name, const char *weights) {
    const moe_meta *forget = find_value(g, name, "forget_bias");
    part w_proj = find_part(g, weights, "w_proj");
    moe_cell cell = { .w_x = matrix(need_part(g, weights, "w_x")),
                      .w_r = matrix(need_part(g, weights, "w_r")),
                      .bias = need_part(g, weights, "bias").data,
                      .forget_bias = forget ? (float)moe_meta_real(forget, 0) : 0 };
    if (w_proj.data) cell.w_proj = matrix(w_proj);
    cell.hidden = cell.w_r.rows / 4;
    cell.state = cell.w_r.cols;
    return cell;
}

static void check_lstm_step(const golden *g, const char *name, const moe_kernels *kernels) {
    part x = need_part(g, name, "x"), r = need_part(g, name, "r"), c = need_part(g, name, "c");
    part r_out = need_part(g, name, "r_out"), c_out = need_part(g, name, "c_out");
    const moe_cell cell = lstm_cell(g, name, name);
    for (int next_c = 0; next_c < 2; next_c++) {
        bench *b = new_bench(x.rows, 1);
        moe_node *in = input(b, x.data, x.cols), *before = input(b, r.data, r.cols), *y;
        y = moe_op_lstm_step(&b->graph, &cell, in, before, input(b, c.data, c.cols), "cell");
        y = moe_op_view(&b->graph, y, next_c ? cell.hidden : 0, cell.hidden, "part");
        if (!next_c && cell.w_proj.rows) y = moe_op_linear(&b->graph, &cell.w_proj, y, NULL, "r");
        run_bench(b, y, kernels);
        expect_close(name, b->out, next_c ? c_out.data : r_out.data,
                     next_c ? c_out.rows * c_out.cols : r_out.rows * r_out.cols, op_tolerance);
        free_bench(b);
    }
}

/* Pack rows like the engine: by time step, longest sentence first. row_of[packed row] is the row in the golden file. */
static void pack(bench *b, const moe_meta *lengths, size_t *row_of) {
    size_t order[MAX_ROWS], start[MAX_ROWS], total = 0;
    for (size_t i = 0; i < lengths->count; i++) {
        size_t at = i;
        start[i] = total;
        total += (size_t)moe_meta_int(lengths, i);
        for (; at > 0 && moe_meta_int(lengths, order[at - 1]) < moe_meta_int(lengths, i); at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    b->frame.packed.steps = (size_t)moe_meta_int(lengths, order[0]);
    b->frame.packed.live = b->live;
    b->frame.packed.first = b->first;
    for (size_t t = 0, row = 0; t < b->frame.packed.steps; t++) {
        b->first[t] = row;
        for (size_t i = 0; i < lengths->count && (size_t)moe_meta_int(lengths, order[i]) > t; i++, b->live[t]++)
            row_of[row++] = start[order[i]] + t;
    }
}

static void permute(const float *from, size_t rows, size_t cols, const size_t *row_of, float *to, int back) {
    for (size_t r = 0; r < rows; r++)
        memcpy(to + (back ? row_of[r] : r) * cols, from + (back ? r : row_of[r]) * cols, cols * sizeof *to);
}

static void check_lstm_layer(const golden *g, const char *name, const moe_kernels *kernels) {
    part x = need_part(g, name, "x");
    const moe_meta *lengths = need_value(g, name, "lengths");
    const moe_cell cell = lstm_cell(g, name, name);
    size_t row_of[MAX_ROWS];
    float *packed = malloc(x.rows * x.cols * sizeof *packed), unpacked[4096];
    for (int backward = 0; backward < 2; backward++) {
        part y = need_part(g, name, backward ? "backward" : "forward");
        bench *b = new_bench(x.rows, lengths->count);
        pack(b, lengths, row_of);
        permute(x.data, x.rows, x.cols, row_of, packed, 0);
        run_bench(b,
                  moe_op_lstm_layer(&b->graph, &cell, backward,
                                    moe_op_linear(&b->graph, &cell.w_x, input(b, packed, x.cols), cell.bias, "zx"),
                                    "layer"),
                  kernels);
        permute(b->out, y.rows, y.cols, row_of, unpacked, 1);
        expect_close(name, unpacked, y.data, y.rows * y.cols, op_tolerance);
        free_bench(b);
    }
    free(packed);
}

static void check_bidirectional(const golden *g, const char *name, const moe_kernels *kernels) {
    part x = need_part(g, name, "x"), y = need_part(g, name, "y");
    const moe_meta *lengths = need_value(g, name, "lengths");
    char side[128];
    size_t row_of[MAX_ROWS];
    float *packed = malloc(x.rows * x.cols * sizeof *packed), unpacked[4096];
    moe_layer layer = { .type = &moe_lstm_type,
                        .name = "layer",
                        .lstm = { .bidirectional = 1, .merge_sum = value_is(g, name, "merge", "sum") } };
    bench *b = new_bench(x.rows, lengths->count);
    snprintf(side, sizeof side, "%s.fwd", name);
    layer.lstm.cell[0] = lstm_cell(g, name, side);
    snprintf(side, sizeof side, "%s.bwd", name);
    layer.lstm.cell[1] = lstm_cell(g, name, side);
    layer.hidden = layer.lstm.cell[0].hidden;
    pack(b, lengths, row_of);
    permute(x.data, x.rows, x.cols, row_of, packed, 0);
    run_bench(b, moe_build_layer(builder(b, &layer), &layer, input(b, packed, x.cols)), kernels);
    permute(b->out, y.rows, y.cols, row_of, unpacked, 1);
    expect_close(name, unpacked, y.data, y.rows * y.cols, op_tolerance);
    free(packed);
    free_bench(b);
}

static void check_attention(const golden *g, const char *name, const moe_kernels *kernels) {
    part memory = need_part(g, name, "memory"), query = need_part(g, name, "query"),
         w_key = need_part(g, name, "w_key");
    part w_query = need_part(g, name, "w_query"), bias = find_part(g, name, "bias"),
         context = need_part(g, name, "context");
    part weights = need_part(g, name, "weights");
    const moe_meta *lengths = need_value(g, name, "lengths"), *sentence = need_value(g, name, "sentence");
    static float keys[4096], attention[MAX_ROWS * MAX_ROWS];
    size_t segment[MAX_ROWS], length[MAX_ROWS], at = 0;
    const moe_layer layer = { .type = &moe_attention_type,
                              .out = memory.cols,
                              .attention = { .product = value_is(g, name, "kind", "product"),
                                             .size = w_key.rows,
                                             .w_key = matrix(w_key),
                                             .w_query = matrix(w_query),
                                             .v = need_part(g, name, "v").data,
                                             .bias = bias.data } };
    bench *b = new_bench(memory.rows, 1);
    moe_node *t;
    t = moe_op_linear(&b->graph, &layer.attention.w_key, input(b, memory.data, memory.cols), NULL, "keys");
    if (layer.attention.product) t = moe_op_unary(&b->graph, MOE_UNARY_TANH, t, "tanh");
    run_bench(b, t, kernels);
    memcpy(keys, b->out, memory.rows * w_key.rows * sizeof *keys);
    free_bench(b);
    b = new_bench(query.rows, 1);
    for (size_t r = 0; r < query.rows; r++) {
        size_t s = (size_t)moe_meta_int(sentence, r);
        segment[r] = 0;
        for (size_t i = 0; i < s; i++) segment[r] += (size_t)moe_meta_int(lengths, i);
        length[r] = (size_t)moe_meta_int(lengths, s);
    }
    b->frame.beam.segment = segment;
    b->frame.beam.length = length;
    b->frame.beam.attention = attention;
    moe_builder *of = builder(b, &layer);
    b->carried[0][MOE_ATTENTION_KEYS].rows = keys;
    b->carried[0][MOE_ATTENTION_VALUES].rows = memory.data;
    run_bench(b, moe_build_context(of, &layer, input(b, query.data, query.cols), NULL), kernels);
    expect_close(name, b->out, context.data, context.rows * context.cols, op_tolerance);
    for (size_t r = 0; r < query.rows; at += length[r++])
        expect_close(name, attention + r * MAX_ROWS, weights.data + at, length[r], op_tolerance);
    assert_int_equal(at, weights.cols);
    free_bench(b);
}

/* Set up a layer with the gate of a case. Return 0 for training-only gates, which the gating cases cover. */
static int gate_layer(const golden *g, const char *name, const char *prefix, moe_layer *layer) {
    char key[128];
    const moe_meta *k = find_value(g, name, "k");
    moe_mixture_layer *m = &layer->mixture;
    memset(layer, 0, sizeof *layer);
    snprintf(layer->name, sizeof layer->name, "layer");
    snprintf(key, sizeof key, "%s%s", name, prefix);
    layer->type = &moe_mixture_type;
    m->gate.weight = matrix(need_part(g, key, "weight"));
    m->experts.count = m->gate.level = m->gate.weight.rows;
    layer->in = layer->out = m->gate.weight.cols;
    m->gate.threshold = find_part(g, key, "threshold").data;
    m->gate.k = k ? (size_t)moe_meta_int(k, 0) : 0;
    m->experts.scale = 1;
    m->gate.empty_zero = value_is(g, name, "empty", "zero");
    if (value_is(g, name, "gate", "softmax")) m->gate.kind = MOE_GATE_SOFTMAX;
    else if (value_is(g, name, "gate", "sigmoid")) m->gate.kind = MOE_GATE_SIGMOID;
    else if (value_is(g, name, "gate", "topk")) m->gate.kind = MOE_GATE_TOPK;
    else if (value_is(g, name, "gate", "threshold")) m->gate.kind = MOE_GATE_THRESHOLD;
    else return 0;
    return 1;
}

static void expect_same_experts(const char *name, const float *got, const float *wanted, size_t n) {
    for (size_t i = 0; i < n; i++)
        if ((got[i] != 0) != (wanted[i] != 0))
            fail_msg("%s: element %zu: the engine %s this expert", name, i,
                     got[i] != 0 ? "selects" : "does not select");
}

static void expect_gate(const char *name, seen_list *gates, const char *tensor, part wanted) {
    const float *got = seen(gates, tensor, wanted.rows, wanted.cols);
    expect_same_experts(name, got, wanted.data, wanted.rows * wanted.cols);
    expect_close(name, got, wanted.data, wanted.rows * wanted.cols, op_tolerance);
}

static seen_list gates;

/* By eq 19, thresholds equal to a row's probabilities select no experts; slightly lower thresholds select all. */
static void check_strictness(moe_layer layer, part x, const moe_kernels *kernels) {
    const size_t n = layer.mixture.gate.level;
    float threshold[64], *dense;
    layer.mixture.gate.threshold = threshold;
    for (int below = 0; below < 2; below++) {
        bench *b = new_bench(x.rows, 1);
        size_t selected = 0;
        for (size_t i = 0; i < n && !below; i++) threshold[i] = seen(&gates, "layer.gate.probabilities", x.rows, n)[i];
        for (size_t i = 0; i < n && below; i++) threshold[i] = nextafterf(threshold[i], 0.0f);
        moe_build_gate(builder(b, &layer), &layer, input(b, x.data, x.cols));
        run_traced(b, NULL, kernels, &gates);
        dense = seen(&gates, "layer.gate", x.rows, n);
        for (size_t i = 0; i < n; i++) selected += dense[i] != 0;
        assert_int_equal(selected, below ? n : !layer.mixture.gate.empty_zero);
        free_bench(b);
    }
}

static void check_gate(const golden *g, const char *name, const moe_kernels *kernels) {
    part x = need_part(g, name, "x"), wanted = need_part(g, name, "g");
    moe_layer layer;
    bench *b;
    if (!gate_layer(g, name, "", &layer)) return;
    b = new_bench(x.rows, 1);
    moe_build_gate(builder(b, &layer), &layer, input(b, x.data, x.cols));
    run_traced(b, NULL, kernels, &gates);
    expect_gate(name, &gates, "layer.gate", wanted);
    free_bench(b);
    if (layer.mixture.gate.kind == MOE_GATE_THRESHOLD) check_strictness(layer, x, kernels);
}

static void bind_experts(const golden *g, const char *name, moe_layer *layer) {
    part slabs = need_part(g, name, "experts");
    moe_error error;
    moe_reader r = { .file = &g->file, .error = &error };
    assert_true(slabs.info->experts);
    snprintf(layer->name, sizeof layer->name, "%s", name);
    layer->mixture.experts.count = (size_t)slabs.info->dims[0];
    layer->hidden = (size_t)slabs.info->dims[1];
    layer->in = layer->out = (size_t)slabs.info->dims[2];
    moe_bind_experts(&r, layer);
    layer->mixture.experts.file = NULL; /* disables verifying before use */
    if (r.status != MOE_OK) fail_msg("%s: %s", name, error.message);
}

/* Convert dense gate weights to rows of selections. */
static uint32_t *selected(const part *gate) {
    const size_t n = gate->cols, stride = 2 + 2 * n;
    uint32_t *words = calloc(gate->rows * stride, sizeof *words);
    assert_non_null(words);
    for (size_t r = 0; r < gate->rows; r++)
        for (size_t i = 0; i < n; i++) {
            uint32_t *row = words + r * stride;
            if (gate->data[r * n + i] == 0) continue;
            row[2 + row[0]] = (uint32_t)i;
            memcpy(&row[2 + n + row[0]++], &gate->data[r * n + i], 4);
        }
    return words;
}

static void check_experts(const golden *g, const char *name, const moe_kernels *kernels) {
    part x = need_part(g, name, "x"), gate = need_part(g, name, "g"), y = need_part(g, name, "y");
    moe_layer layer = { .type = &moe_mixture_type, .name = "layer" };
    bench *b = new_bench(x.rows, 1);
    moe_gating gating;
    moe_node *selections;
    uint32_t *words;
    bind_experts(g, name, &layer);
    gating = (moe_gating){ .kind = MOE_GATE_TOPK, .level = layer.mixture.experts.count, .k = 1 };
    layer.mixture.experts.scale = (float)moe_meta_real(need_value(g, name, "scale"), 0);
    words = selected(&gate);
    b->frame.inputs = (const float *)(const void *)words;
    selections = moe_op_input(&b->graph, 2 + 2 * gate.cols, "selections");
    selections->gate = (moe_gate_op){ &gating, MOE_GATE_TOPK, 0, gate.cols, NULL };
    run_bench(b, moe_op_experts(&b->graph, &layer.mixture.experts, input(b, x.data, x.cols), selections, "experts"),
              kernels);
    expect_close(name, b->out, y.data, y.rows * y.cols, op_tolerance);
    free_bench(b);
    free(words);
}

static void check_moe(const golden *g, const char *name, const moe_kernels *kernels) {
    part x = need_part(g, name, "x"), y = need_part(g, name, "y");
    moe_layer layer;
    bench *b = new_bench(x.rows, 1);
    assert_true(gate_layer(g, name, ".gate", &layer));
    bind_experts(g, name, &layer);
    layer.mixture.sigmoid = value_is(g, name, "output", "sigmoid");
    layer.residual = (int)moe_meta_int(need_value(g, name, "residual"), 0);
    layer.mixture.experts.scale = (float)moe_meta_real(need_value(g, name, "scale"), 0);
    run_bench(b, moe_build_layer(builder(b, &layer), &layer, input(b, x.data, x.cols)), kernels);
    expect_close(name, b->out, y.data, y.rows * y.cols, op_tolerance);
    free_bench(b);
}

/* Read the layer of a gating case as if from a model file. Cases with `gates_only` lack the experts, which are bound
 * last. */
static void read_mixture(const golden *g, const char *name, size_t in, int gates_only, moe_layer *layer) {
    moe_error error = { 0 };
    moe_reader r = { .file = &g->file, .error = &error };
    char missing[160];
    memset(layer, 0, sizeof *layer);
    layer->type = &moe_mixture_type;
    snprintf(layer->name, sizeof layer->name, "%s", name);
    layer->in = layer->out = in;
    moe_read_keys(&r, layer);
    if (r.status != MOE_OK) fail_msg("%s: %s", name, error.message);
    moe_bind_mixture(&r, layer);
    layer->mixture.experts.file = NULL; /* disables verifying before use */
    snprintf(missing, sizeof missing, "tensor %s.experts is missing", name);
    if (gates_only) assert_string_equal(error.message, missing);
    else if (r.status != MOE_OK) fail_msg("%s: %s", name, error.message);
}

/* Set a gate's bias to the noise of eq 4 for one row. The case provides the normal numbers. */
static void add_noise(moe_gating *gating, const float *x, const float *normal, const moe_kernels *kernels,
                      float *bias) {
    const moe_run run = { kernels, NULL, NULL, NULL, 0 };
    const size_t n = gating->weight.rows;
    moe_gate_product(&run, &gating->noise, NULL, 0, n, 0, x, bias);
    for (size_t i = 0; i < n; i++) bias[i] = normal[i] * moe_softplus(bias[i]);
    gating->bias = bias;
}

/* Return a logit by eq 4: x W_g + StandardNormal() softplus(x W_noise). An expert's normal number depends on the
 * session's seed, the gate's name and the row's key. */
static double noisy_logit(const moe_gating *gating, const char *gate, uint64_t seed, uint64_t row_key, size_t expert,
                          const float *x) {
    const size_t width = gating->weight.cols;
    const float *w = (const float *)gating->weight.data + expert * width;
    const float *w_noise = (const float *)gating->noise.data + expert * width;
    double logit = 0, noise = 0;
    for (size_t i = 0; i < width; i++) logit += (double)x[i] * (double)w[i], noise += (double)x[i] * (double)w_noise[i];
    for (; *gate; gate++) seed = moe_hash(seed ^ (unsigned char)*gate);
    return logit + (double)moe_normal(seed ^ row_key, expert) * log1p(exp(noise));
}

/* Compute a level of gates from logits by eq 3, 5, 16 and 19 in double precision; `factor` multiplies weights. */
static void expected_level(const moe_gating *gating, size_t first, const double *logits, float factor, float *weights,
                           float *probabilities) {
    const size_t n = gating->level;
    double sum = 0, chosen = 0;
    size_t best = 0;
    for (size_t i = 0; i < n; i++) {
        sum += exp(logits[i]);
        if (logits[i] > logits[best]) best = i;
    }
    for (size_t i = 0; i < n; i++) {
        size_t larger = 0;
        int is_chosen;
        for (size_t j = 0; j < n; j++) larger += logits[j] > logits[i];
        probabilities[i] = (float)(exp(logits[i]) / sum);
        is_chosen =
            gating->kind == MOE_GATE_TOPK ? larger < gating->k : probabilities[i] > gating->threshold[first + i];
        weights[i] = is_chosen ? probabilities[i] : 0;
        chosen += (double)weights[i];
    }
    if (chosen == 0) chosen = 1, weights[best] = 1;
    for (size_t i = 0; i < n; i++) weights[i] = factor * (float)((double)weights[i] / chosen);
}

/* Check every logit of a case with noise weights, using the engine's own noise. */
static void check_noise(const moe_layer *layer, part x, const moe_kernels *kernels) {
    enum { SEED = 5 };
    const moe_mixture_layer *m = &layer->mixture;
    static float weights[2][MAX_ROWS * 64], probabilities[2][MAX_ROWS * 64]; /* [0] for the gate, [1] for the parent */
    uint64_t keys[MAX_ROWS];
    const size_t groups = m->groups ? m->groups : 1, inside = m->gate.level;
    bench *b = new_bench(x.rows, 1);
    memset(weights, 0, sizeof weights);
    memset(probabilities, 0, sizeof probabilities);
    b->graph.noise = 1;
    b->graph.noise_seed = SEED;
    b->frame.keys = keys;
    for (size_t r = 0; r < x.rows; r++) {
        const float *row = x.data + r * x.cols;
        double logits[64];
        char name[128];
        keys[r] = moe_hash(1000 + r);
        snprintf(name, sizeof name, "%s.parent", layer->name);
        for (size_t i = 0; m->groups && i < groups; i++)
            logits[i] = noisy_logit(&m->parent, name, SEED, keys[r], i, row);
        if (m->groups) expected_level(&m->parent, 0, logits, 1, weights[1] + r * groups, probabilities[1] + r * groups);
        snprintf(name, sizeof name, "%s.gate", layer->name);
        for (size_t i = 0; i < m->experts.count; i++) logits[i] = noisy_logit(&m->gate, name, SEED, keys[r], i, row);
        for (size_t i = 0; i < groups; i++) {
            const float factor = m->groups ? weights[1][r * groups + i] : 1;
            const size_t at = r * m->experts.count + i * inside;
            if (factor != 0)
                expected_level(&m->gate, i * inside, logits + i * inside, factor, weights[0] + at,
                               probabilities[0] + at);
        }
    }
    moe_build_gate(builder(b, layer), layer, input(b, x.data, x.cols));
    run_traced(b, NULL, kernels, &gates);
    for (size_t i = 0; i < (m->groups ? 2 : 1); i++) {
        char tensor[128];
        snprintf(tensor, sizeof tensor, "%s.%s", layer->name, i ? "parent" : "gate");
        expect_gate(tensor, &gates, tensor, (part){ weights[i], x.rows, i ? groups : m->experts.count, NULL });
        strcat(tensor, ".probabilities");
        expect_gate(tensor, &gates, tensor, (part){ probabilities[i], x.rows, i ? groups : m->experts.count, NULL });
    }
    free_bench(b);
}

static void check_routing(const golden *g, const char *name, const moe_kernels *kernels) {
    static const char *const shown[] = { "gate", "gate.probabilities", "parent", "parent.probabilities" };
    const part x = need_part(g, name, "x"), normal = find_part(g, name, "normal.gate"),
               above = find_part(g, name, "normal.parent");
    moe_layer layer;
    moe_mixture_layer *m = &layer.mixture;
    float bias[2][64];
    read_mixture(g, name, x.cols, 1, &layer);
    assert_true(m->experts.count <= 64 && !(normal.data && (m->gate.bias || m->parent.bias)));
    if (normal.data) check_noise(&layer, x, kernels);
    for (size_t row = 0; row < (normal.data ? x.rows : 1); row++) { /* all rows at once, or one by one with noise */
        const size_t rows = normal.data ? 1 : x.rows;
        bench *b = new_bench(rows, 1);
        if (moe_meta_int(need_value(g, name, "batchwise"), 0)) b->graph.gating = 1 + MOE_GATE_BATCHWISE;
        if (normal.data) add_noise(&m->gate, x.data + row * x.cols, normal.data + row * normal.cols, kernels, bias[0]);
        if (above.data) add_noise(&m->parent, x.data + row * x.cols, above.data + row * above.cols, kernels, bias[1]);
        moe_build_gate(builder(b, &layer), &layer, input(b, x.data + row * x.cols, x.cols));
        run_traced(b, NULL, kernels, &gates);
        for (size_t i = 0; i < (m->groups ? 4 : 2); i++) {
            char key[64], tensor[128];
            part wanted;
            snprintf(key, sizeof key, "wanted.%s", shown[i]);
            snprintf(tensor, sizeof tensor, "%s.%s", name, shown[i]);
            wanted = need_part(g, name, key);
            assert_int_equal(wanted.rows, x.rows);
            wanted.data += row * wanted.cols;
            wanted.rows = rows;
            expect_gate(name, &gates, tensor, wanted);
        }
        free_bench(b);
    }
}

static void check_layer(const golden *g, const char *name, const moe_kernels *kernels) {
    const part x = need_part(g, name, "x"), y = need_part(g, name, "y");
    moe_layer layer;
    char tensor[128];
    bench *b = new_bench(x.rows, 1);
    read_mixture(g, name, x.cols, 0, &layer);
    run_traced(b, moe_build_layer(builder(b, &layer), &layer, input(b, x.data, x.cols)), kernels, &gates);
    expect_close(name, b->out, y.data, y.rows * y.cols, op_tolerance);
    snprintf(tensor, sizeof tensor, "%s.gate", name);
    expect_gate(name, &gates, tensor, need_part(g, name, "wanted.gate"));
    free_bench(b);
}

/* Run a decoder layer on `rows` rows of x, with recurrent rows in `carried`. */
static void run_any_layer(const moe_layer *layer, const float *x, const int32_t *parents, int32_t *positions,
                          size_t rows, float *carried, const moe_kernels *kernels, float *y) {
    bench *b = new_bench(rows, 1);
    moe_builder *of = builder(b, layer);
    memcpy(b->parents, parents, rows * sizeof *parents);
    b->frame.positions = positions;
    b->carried[0][0].rows = carried;
    moe_build_gathers(of, layer);
    b->frame.inputs = x;
    run_bench(b, moe_build_layer(of, layer, moe_op_input(&b->graph, layer->in, "x")), kernels);
    memcpy(y, b->out, rows * layer->out * sizeof *y);
    free_bench(b);
}

/* Check a layer of any kind, which is read as from a model file. Running all rows at once and row by row must
 * give identical results. */
static void check_any_layer(const golden *g, const char *name, const moe_kernels *kernels) {
    const part x = need_part(g, name, "x"), y = need_part(g, name, "y");
    const moe_meta *lengths = need_value(g, name, "lengths");
    static const int32_t begins = -1, goes_on = 0;
    static float carried[MAX_ROWS * 64], all[MAX_ROWS * 64], one[64];
    int32_t parents[MAX_ROWS], positions[MAX_ROWS];
    moe_layer layer = { .residual = 0 };
    moe_error error = { 0 };
    moe_reader r = { .file = &g->file, .error = &error };
    const char *dot = strchr(name, '.');
    char side[32];
    size_t row = 0;
    snprintf(side, sizeof side, "%.*s", (int)(dot - name), name);
    moe_read_layer(&r, &layer, side, (size_t)atoi(dot + 1), MOE_IN_DECODER, x.cols, 0);
    if (r.status != MOE_OK) fail_msg("%s: %s", name, error.message);
    for (size_t i = 0; i < lengths->count; i++)
        for (int32_t k = 0; k < moe_meta_int(lengths, i); k++, row++)
            parents[row] = k ? MOE_ROW_ABOVE : -1, positions[row] = k;
    assert_int_equal(row, x.rows);
    run_any_layer(&layer, x.data, parents, positions, x.rows, carried, kernels, all);
    expect_close(name, all, y.data, y.rows * y.cols, op_tolerance);
    for (row = 0; row < x.rows; row++) {
        run_any_layer(&layer, x.data + row * x.cols, parents[row] == -1 ? &begins : &goes_on, &positions[row], 1,
                      carried, kernels, one);
        assert_memory_equal(one, all + row * y.cols, y.cols * sizeof *one);
    }
}

/* Run log-softmax and top with the decoder's output op. The identity matrix turns the inputs `logits` into logits. */
static void run_top(part logits, const int32_t *never, size_t n_never, size_t n_suppressed, size_t k, int32_t *want,
                    int32_t *ids, float *logprobs, float *want_logprob, const moe_kernels *kernels) {
    float *identity = calloc(logits.cols * logits.cols, sizeof *identity);
    const moe_matrix w = moe_matrix_view(MOE_TYPE_F32, logits.cols, logits.cols, identity);
    const moe_output_op output = { .w = &w, .never = never, .n_never = n_never, .n_suppressed = n_suppressed };
    bench *b = new_bench(logits.rows, 1);
    float *finite = calloc(logits.rows * logits.cols, sizeof *finite); /* infinity times zero would be NaN */
    for (size_t i = 0; i < logits.cols; i++) identity[i * logits.cols + i] = 1;
    for (size_t i = 0; i < logits.rows * logits.cols; i++)
        finite[i] = logits.data[i] < -1e30f ? -1e30f : logits.data[i];
    b->frame.beam.want = want;
    b->frame.beam.want_logprob = want_logprob;
    b->graph.top = k;
    b->frame.beam.top_ids = ids;
    b->frame.beam.top_logprobs = logprobs;
    moe_op_output(&b->graph, &output, input(b, finite, logits.cols));
    run_bench(b, NULL, kernels);
    free_bench(b);
    free(identity);
    free(finite);
}

static void check_log_softmax(const golden *g, const char *name, const moe_kernels *kernels) {
    part logits = need_part(g, name, "logits"), logp = need_part(g, name, "logp");
    const moe_meta *never = need_value(g, name, "never");
    int32_t want[MAX_ROWS], excluded[MAX_ROWS];
    float got[MAX_ROWS];
    assert_true(never->count <= MOE_COUNT(excluded));
    for (size_t i = 0; i < never->count; i++) excluded[i] = (int32_t)moe_meta_int(never, i);
    for (size_t v = 0; v < logits.cols; v++) {
        for (size_t r = 0; r < logits.rows; r++) want[r] = (int32_t)v;
        run_top(logits, excluded, never->count, 0, 1, want, NULL, NULL, got, kernels);
        for (size_t r = 0; r < logits.rows; r++)
            expect_close(name, &got[r], &logp.data[r * logp.cols + v], 1, op_tolerance);
    }
}

static void check_top(const golden *g, const char *name, const moe_kernels *kernels) {
    part logp = need_part(g, name, "logp"), values = need_part(g, name, "values");
    const moe_meta *ids = need_value(g, name, "ids");
    const size_t k = (size_t)moe_meta_int(need_value(g, name, "k"), 0);
    int32_t want[MAX_ROWS], got[MAX_ROWS * 16];
    float logprobs[MAX_ROWS * 16];
    for (size_t r = 0; r < logp.rows; r++) want[r] = -1;
    run_top(logp, NULL, 0, 0, k, want, got, logprobs, NULL, kernels);
    for (size_t i = 0; i < ids->count; i++) assert_int_equal(got[i], moe_meta_int(ids, i));
    expect_close(name, logprobs, values.data, values.rows * values.cols, op_tolerance);
}

/* Suppressed tokens keep their probability and do not hide other tokens, even with the largest logits of a block. */
TEST(suppressed_tokens_hide_no_others) {
    static const int32_t never[] = { 10, 20 }, best[] = { 200, 130, 70 };
    static float logits[300];
    static const float values[] = { 3.0f, 2.0f, 1.0f };
    int32_t want = -1, ids[3];
    float logprobs[3];
    double sum = exp(9) + exp(8) + 295;
    logits[10] = 9, logits[20] = 8;
    for (int i = 0; i < 3; i++) logits[best[i]] = values[i], sum += exp((double)values[i]);
    for (size_t set = 0; set < MOE_COUNT(moe_isas); set++) {
        if (!moe_isas[set]->available()) continue;
        run_top((part){ .data = logits, .rows = 1, .cols = 300 }, never, 2, 2, 3, &want, ids, logprobs, NULL,
                moe_isas[set]);
        assert_memory_equal(ids, best, sizeof ids);
        for (int i = 0; i < 3; i++) assert_true(fabs(logprobs[i] - ((double)values[i] - log(sum))) < 1e-5);
    }
}

static void check_score(const golden *g, const char *name, const moe_kernels *kernels) {
    part coverage = need_part(g, name, "coverage");
    const double logprob = moe_meta_real(need_value(g, name, "logprob"), 0),
                 wanted = moe_meta_real(need_value(g, name, "score"), 0);
    const size_t length = (size_t)moe_meta_int(need_value(g, name, "length"), 0);
    const moe_search s = { .beam = 1,
                           .rules = moe_rule_sets[MOE_RULES_PAPER],
                           .nbest = 1,
                           .alpha = (float)moe_meta_real(need_value(g, name, "alpha"), 0),
                           .constant = (float)moe_meta_real(need_value(g, name, "constant"), 0),
                           .beta = (float)moe_meta_real(need_value(g, name, "beta"), 0) };
    const moe_slot slot = { .task.length = coverage.cols };
    const moe_live live = { .logprob = (float)logprob, .weighed = (float)logprob, .tokens = length - 1, .ended = 1 };
    const float expected = (float)wanted, score = moe_score(&s, &slot, &live, coverage.data);
    (void)kernels;
    expect_close(name, &score, &expected, 1, op_tolerance);
}

static void check_cases(const char *list, size_t least) {
    static const struct {
        const char *op;
        case_fn check;
    } checks[] = {
        { "linear", check_linear },
        { "embedding", check_embedding },
        { "lstm-step", check_lstm_step },
        { "lstm-layer", check_lstm_layer },
        { "bidirectional", check_bidirectional },
        { "attention", check_attention },
        { "gate", check_gate },
        { "experts", check_experts },
        { "moe", check_moe },
        { "log-softmax", check_log_softmax },
        { "top", check_top },
        { "score", check_score },
        { "routing", check_routing },
        { "layer", check_layer },
        { "any-layer", check_any_layer },
    };
    golden g = open_golden(GOLDEN "ops.bin");
    const moe_meta *cases = moe_find_meta(&g.file, list);
    assert_non_null(cases);
    assert_true(cases->count >= least);
    for (size_t isa = 0; isa < MOE_COUNT(moe_isas); isa++) {
        if (!moe_isa_available(moe_isas[isa]->name)) continue;
        for (size_t i = 0; i < cases->count; i++) {
            moe_span span = moe_meta_text(cases, i);
            char name[128];
            size_t c = 0;
            snprintf(name, sizeof name, "%.*s", (int)span.length, span.data);
            while (c < MOE_COUNT(checks) && !value_is(&g, name, "op", checks[c].op)) c++;
            if (c == MOE_COUNT(checks)) fail_msg("no check for the op of case %s", name);
            checks[c].check(&g, name, moe_isas[isa]);
        }
    }
    close_golden(&g);
}

TEST(test_ops) { check_cases("cases", 30); }
TEST(test_gating) { check_cases("gating.cases", 30); }

/* ---- Whole models ---- */

enum { MAX_IDS = 64, MAX_SENTENCES = 16, MAX_HYPOTHESES = 16 };

typedef struct sentence {
    int32_t source[MAX_IDS], target[MAX_IDS];
    size_t n_source, n_target;
    int32_t tag;
    size_t n_hypotheses;
    struct {
        int32_t ids[MAX_IDS];
        float logprobs[MAX_IDS + 1], logprob, score, reverse;
        size_t n_ids;
        int finished;
    } hypotheses[MAX_HYPOTHESES];
} sentence;

typedef struct script {
    const golden *expect;
    sentence sentences[MAX_SENTENCES];
    size_t count, next;
    int scoring, alone;
    int traced; /* 1 if the golden file contains gate outputs */
    /* Traced values of the current sentence: */
    float encoder[MAX_FLOATS], logits[MAX_FLOATS];
    size_t encoder_rows, logit_rows;
    char last_encoder[48];
    seen_list gates;
} script;

static size_t parse_ids(moe_span text, int32_t *ids) {
    char buffer[1024];
    size_t n = 0;
    assert_true(text.length < sizeof buffer);
    memcpy(buffer, text.data, text.length);
    buffer[text.length] = 0;
    for (char *at = buffer, *end; n < MAX_IDS; at = end) {
        long id = strtol(at, &end, 10);
        if (at == end) break;
        ids[n++] = (int32_t)id;
    }
    return n;
}

static int script_pull(void *user, int wait, moe_request *request) {
    script *s = user;
    sentence *at;
    if (s->next == s->count) return MOE_PULL_END;
    if (s->alone && !wait) return MOE_PULL_LATER;
    at = &s->sentences[s->next++];
    request->source = at->source;
    request->n_source = at->n_source;
    if (s->scoring) {
        request->target = at->target;
        request->n_target = at->n_target;
    }
    request->target_tag = at->tag;
    request->user = at;
    return MOE_PULL_REQUEST;
}

static void script_compare(script *s, size_t index) {
    char key[32], trace[32];
    part encoder, forced;
    snprintf(key, sizeof key, "%zu", index);
    snprintf(trace, sizeof trace, "trace.%zu", index);
    encoder = find_part(s->expect, "encoder", key);
    forced = need_part(s->expect, "forced", key);
    assert_int_equal(s->encoder_rows, encoder.data ? encoder.rows : 0);
    assert_int_equal(s->logit_rows, forced.rows);
    if (encoder.data)
        expect_close("encoder output", s->encoder, encoder.data, encoder.rows * encoder.cols, model_tolerance);
    expect_close("logits", s->logits, forced.data, forced.rows * forced.cols, model_tolerance);
    for (size_t i = 0; i < s->gates.count && s->traced; i++) {
        const part wanted = need_part(s->expect, trace, s->gates.entries[i].name);
        const float *got = seen(&s->gates, s->gates.entries[i].name, wanted.rows, wanted.cols);
        expect_same_experts(s->gates.entries[i].name, got, wanted.data, wanted.rows * wanted.cols);
        expect_close(s->gates.entries[i].name, got, wanted.data, wanted.rows * wanted.cols, model_tolerance);
    }
    assert_true(s->gates.count > 0 || !s->traced);
    s->encoder_rows = s->logit_rows = s->gates.count = 0;
}

static void script_done(void *user, const moe_result *result) {
    script *s = user;
    sentence *at = result->user;
    if (result->status != MOE_OK) fail_msg("%s", result->message);
    assert_true(result->n_hypotheses <= MAX_HYPOTHESES);
    at->n_hypotheses = result->n_hypotheses;
    for (size_t h = 0; h < result->n_hypotheses; h++) {
        const moe_hypothesis *from = &result->hypotheses[h];
        assert_true(from->n_ids <= MAX_IDS);
        at->hypotheses[h].n_ids = from->n_ids;
        at->hypotheses[h].logprob = from->logprob;
        at->hypotheses[h].score = from->score;
        at->hypotheses[h].reverse = from->reverse;
        at->hypotheses[h].finished = from->finished;
        memcpy(at->hypotheses[h].ids, from->ids, from->n_ids * sizeof *from->ids);
        memcpy(at->hypotheses[h].logprobs, from->token_logprobs,
               (from->n_ids + (size_t)from->finished) * sizeof(float));
    }
    if (s->alone) script_compare(s, (size_t)(at - s->sentences));
}

static void script_trace(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    script *s = user;
    const int encoder = strcmp(name, s->last_encoder) == 0, logits = strcmp(name, "decoder.logits") == 0;
    float *to = encoder ? s->encoder : s->logits;
    size_t *count = encoder ? &s->encoder_rows : &s->logit_rows;
    keep_gates(&s->gates, name, data, rows, cols, stride);
    if (!encoder && !logits) return;
    for (size_t r = 0; r < rows; r++) memcpy(to + (*count)++ * cols, data + r * stride, cols * sizeof *to);
}

static void check_run(const moe_model *model, script *s, const char *run, const char *isa, int batch, int threads) {
    moe_session_params p = moe_session_params_default(model);
    moe_session *session;
    moe_error error;
    const moe_meta *owner = need_value(s->expect, run, "sentence"), *ids = need_value(s->expect, run, "ids");
    const moe_meta *scores = need_value(s->expect, run, "score"), *logprobs = need_value(s->expect, run, "logprob");
    const moe_meta *reverses = need_value(s->expect, run, "reverse");
    const moe_meta *finished = need_value(s->expect, run, "finished"),
                   *tokens = need_value(s->expect, run, "token_logprobs");
    size_t seen[MAX_SENTENCES] = { 0 }, token = 0;
    p.isa = isa;
    p.batch = batch;
    p.threads = threads;
    p.beam = (int)moe_meta_int(need_value(s->expect, run, "beam"), 0);
    p.nbest = (int)moe_meta_int(need_value(s->expect, run, "nbest"), 0);
    p.length_penalty = (float)moe_meta_real(need_value(s->expect, run, "length_penalty"), 0);
    p.length_constant = (float)moe_meta_real(need_value(s->expect, run, "length_constant"), 0);
    p.coverage_penalty = (float)moe_meta_real(need_value(s->expect, run, "coverage_penalty"), 0);
    p.prune = (float)moe_meta_real(need_value(s->expect, run, "prune"), 0);
    p.rerank = (float)moe_meta_real(need_value(s->expect, run, "rerank"), 0);
    p.max_len_factor = (float)moe_meta_real(need_value(s->expect, run, "max_len_factor"), 0);
    p.max_len_offset = (int)moe_meta_int(need_value(s->expect, run, "max_len_offset"), 0);
    if (moe_session_new(model, &p, &session, &error) != MOE_OK) fail_msg("%s: %s", run, error.message);
    s->next = 0;
    s->scoring = s->alone = 0;
    if (moe_translate(session, script_pull, script_done, s, &error) != MOE_OK) fail_msg("%s: %s", run, error.message);
    moe_session_free(session);
    for (size_t i = 0; i < owner->count; i++) {
        sentence *at = &s->sentences[moe_meta_int(owner, i)];
        const size_t h = seen[at - s->sentences]++;
        int32_t wanted[MAX_IDS];
        const size_t n = parse_ids(moe_meta_text(ids, i), wanted);
        float score = (float)moe_meta_real(scores, i), logprob = (float)moe_meta_real(logprobs, i),
              reverse = (float)moe_meta_real(reverses, i);
        if (h >= at->n_hypotheses)
            fail_msg("%s: sentence %d has %zu hypotheses, the reference has more", run, (int)moe_meta_int(owner, i),
                     at->n_hypotheses);
        assert_int_equal(at->hypotheses[h].finished, moe_meta_int(finished, i));
        assert_int_equal(at->hypotheses[h].n_ids, n);
        assert_memory_equal(at->hypotheses[h].ids, wanted, n * sizeof *wanted);
        /* Errors add up over tokens, and the logarithm of a position with little attention magnifies the rounding of
         * its weight. */
        expect_close(run, &at->hypotheses[h].score, &score, 1, (double)(n + 1) * model_tolerance);
        expect_close(run, &at->hypotheses[h].logprob, &logprob, 1, (double)(n + 1) * model_tolerance);
        expect_close(run, &at->hypotheses[h].reverse, &reverse, 1, (double)(at->n_source + 1) * model_tolerance);
        for (size_t k = 0; k < n + (size_t)at->hypotheses[h].finished; k++, token++) {
            float wanted_logprob = (float)moe_meta_real(tokens, token);
            expect_close(run, &at->hypotheses[h].logprobs[k], &wanted_logprob, 1, model_tolerance);
        }
    }
    for (size_t i = 0; i < s->count; i++) assert_int_equal(s->sentences[i].n_hypotheses, seen[i]);
    assert_int_equal(token, tokens->count);
}

static void run_forced(const moe_model *model, script *s, const char *isa) {
    moe_session_params p = moe_session_params_default(model);
    const moe_graph *encoder;
    moe_session *session;
    moe_error error;
    p.isa = isa;
    p.batch = 1;
    p.trace = script_trace;
    p.trace_user = s;
    assert_int_equal(moe_session_new(model, &p, &session, &error), MOE_OK);
    encoder = &session->graphs[MOE_ENCODER];
    /* Find the last node before the encoder's output is stored. */
    for (size_t i = 0; i < encoder->count; i++)
        if (encoder->nodes[i].op == MOE_OP_STORE) {
            snprintf(s->last_encoder, sizeof s->last_encoder, "%s", encoder->nodes[i].src[0]->name);
            break;
        }
    s->next = s->encoder_rows = s->logit_rows = s->gates.count = 0;
    s->scoring = s->alone = 1;
    assert_int_equal(moe_translate(session, script_pull, script_done, s, &error), MOE_OK);
    moe_session_free(session);
}

static void check_forced(const moe_model *model, script *s, const char *isa) {
    const moe_meta *wanted = need_value(s->expect, "forced", "logprob");
    run_forced(model, s, isa);
    for (size_t i = 0; i < s->count; i++) {
        float logprob = (float)moe_meta_real(wanted, i);
        assert_int_equal(s->sentences[i].n_hypotheses, 1);
        assert_int_equal(s->sentences[i].hypotheses[0].n_ids, s->sentences[i].n_target);
        expect_close("score of a given target", &s->sentences[i].hypotheses[0].logprob, &logprob, 1, model_tolerance);
    }
}

static moe_model *open_model(const char *name, golden *expect) {
    char path[128];
    moe_model *model;
    moe_error error;
    snprintf(path, sizeof path, GOLDEN "model-%s.expect.bin", name);
    *expect = open_golden(path);
    snprintf(path, sizeof path, GOLDEN "model-%s.bin", name);
    if (moe_model_open(path, &(moe_model_params){ .verify = 1 }, &model, &error) != MOE_OK)
        fail_msg("%s: %s", path, error.message);
    return model;
}

static void check_model(const char *name, int traced) {
    static script s;
    const moe_meta *sources, *targets, *tags, *runs;
    golden expect;
    moe_model *model = open_model(name, &expect);
    memset(&s, 0, sizeof s);
    s.traced = traced;
    s.expect = &expect;
    sources = moe_find_meta(&expect.file, "sources");
    targets = moe_find_meta(&expect.file, "targets");
    tags = moe_find_meta(&expect.file, "tags");
    runs = moe_find_meta(&expect.file, "runs");
    assert_true(sources && targets && tags && runs && runs->count >= 5);
    s.count = sources->count;
    for (size_t i = 0; i < s.count; i++) {
        s.sentences[i].n_source = parse_ids(moe_meta_text(sources, i), s.sentences[i].source);
        s.sentences[i].n_target = parse_ids(moe_meta_text(targets, i), s.sentences[i].target);
        s.sentences[i].tag = (int32_t)moe_meta_int(tags, i);
    }
    for (size_t set = 0; set < MOE_COUNT(moe_isas); set++) {
        const char *isa = moe_isas[set]->name;
        if (!moe_isa_available(isa)) continue;
        check_forced(model, &s, isa);
        for (size_t i = 0; i < runs->count; i++) {
            moe_span run = moe_meta_text(runs, i);
            char run_name[32];
            snprintf(run_name, sizeof run_name, "%.*s", (int)run.length, run.data);
            check_run(model, &s, run_name, isa, 1, 1);
            check_run(model, &s, run_name, isa, 4, 3);
        }
    }
    moe_model_close(model);
    close_golden(&expect);
}

/* Check log-probabilities, logits and gates of a language model. */
static void check_language(const char *name) {
    static script s;
    golden expect;
    moe_model *model = open_model(name, &expect);
    const moe_meta *texts = moe_find_meta(&expect.file, "texts"), *logprobs = moe_find_meta(&expect.file, "logprobs");
    assert_true(texts && logprobs && texts->count >= 4);
    assert_int_equal(moe_model_kind(model), MOE_MODEL_LANGUAGE);
    memset(&s, 0, sizeof s);
    s.expect = &expect;
    s.traced = 1;
    s.count = texts->count;
    for (size_t i = 0; i < s.count; i++)
        s.sentences[i].n_target = parse_ids(moe_meta_text(texts, i), s.sentences[i].target);
    for (size_t isa = 0; isa < MOE_COUNT(moe_isas); isa++) {
        size_t token = 0;
        if (!moe_isa_available(moe_isas[isa]->name)) continue;
        run_forced(model, &s, moe_isas[isa]->name);
        for (size_t i = 0; i < s.count; i++)
            for (size_t k = 0; k <= s.sentences[i].n_target; k++, token++) {
                const float wanted = (float)moe_meta_real(logprobs, token);
                expect_close(name, &s.sentences[i].hypotheses[0].logprobs[k], &wanted, 1, model_tolerance);
            }
        assert_int_equal(token, logprobs->count);
    }
    moe_model_close(model);
    close_golden(&expect);
}

static void check_classifier(const char *name) {
    golden expect;
    moe_model *model = open_model(name, &expect);
    const part x = need_part(&expect, "x", NULL), logprobs = need_part(&expect, "logprobs", NULL);
    moe_error error;
    assert_int_equal(moe_model_kind(model), MOE_MODEL_CLASSIFIER);
    assert_int_equal(moe_model_width(model), x.cols);
    for (size_t isa = 0; isa < MOE_COUNT(moe_isas); isa++)
        for (int batch = 1; batch < 20; batch += 6) { /* batches of 1, 7, 13 and 19 */
            moe_session_params p = moe_session_params_default(model);
            moe_session *session;
            int32_t classes[MAX_ROWS * 8];
            float got[MAX_ROWS * 8];
            p.isa = moe_isas[isa]->name;
            if (!moe_isa_available(p.isa)) continue;
            p.batch = batch;
            p.beam = p.nbest = (int)logprobs.cols;
            p.trace = keep_gates;
            p.trace_user = &gates;
            gates.count = 0;
            assert_int_equal(moe_session_new(model, &p, &session, &error), MOE_OK);
            assert_int_equal(moe_classify(session, x.data, x.rows, classes, got, &error), MOE_OK);
            for (size_t i = 0; i < x.rows * logprobs.cols; i++) {
                expect_close(name, &got[i], &logprobs.data[i / logprobs.cols * logprobs.cols + (size_t)classes[i]], 1,
                             model_tolerance);
                if (i % logprobs.cols) assert_true(got[i] <= got[i - 1]);
            }
            assert_true(gates.count > 0);
            for (size_t i = 0; i < gates.count; i++)
                expect_gate(name, &gates, gates.entries[i].name, need_part(&expect, "trace", gates.entries[i].name));
            assert_int_not_equal(moe_translate(session, script_pull, script_done, NULL, &error), MOE_OK);
            moe_session_free(session);
        }
    moe_model_close(model);
    close_golden(&expect);
}

TEST(test_model_base) { check_model("base", 0); }
TEST(test_model_untied) { check_model("untied", 0); }
TEST(test_model_product) { check_model("product", 0); }
TEST(test_model_zero) { check_model("zero", 0); }
TEST(test_model_both) { check_model("both", 0); }
TEST(test_model_begun) { check_model("begun", 0); }
TEST(test_model_gnmt) { check_model("gnmt", 0); }
TEST(test_model_gnmt_8) { check_model("gnmt-8", 0); }
TEST(test_model_second) { check_model("second", 0); }
TEST(test_hierarchy_topk) { check_model("hierarchy-topk", 1); }
TEST(test_hierarchy_threshold) { check_model("hierarchy-threshold", 1); }
TEST(test_language) { check_language("language"); }
TEST(test_language_hierarchy) { check_language("language-hierarchy"); }
TEST(test_deep) { check_classifier("deep"); }
TEST(test_deep_sparse) { check_classifier("deep-sparse"); }

int main(void) { return run_all_tests(NULL, NULL); }
