/* fuzz_kernels.c - compares the release kernels of every instruction set of this machine with the portable kernels, on
 * shapes and numbers from the input. Inaccessible pages after all buffers detect overruns.
 *
 * The kernels are not instrumented, so extra counters tell libFuzzer about new combinations of kernel, instruction set
 * and size. Weights are packed as usual; invalid weights serve only to find memory errors. */
#include "moe.c"

#include "tests/engine/model_writer.h"
#include "tests/fuzz/fuzz.h"

enum { AREAS = 16, AREA_BYTES = 1 << 21, PAGE = 4096, GUARD = 0x7fedcba9 };

__attribute__((section("__libfuzzer_extra_counters"), used)) static uint8_t counters[1 << 14];

typedef struct bytes {
    const uint8_t *data;
    size_t size, at;
    uint64_t random;
    int kind;     /* kind of random numbers that number() returns */
    char **areas; /* [AREAS] blocks of AREA_BYTES between inaccessible pages */
    size_t taken;
} bytes;

/* ---- Values from the input ---- */

static size_t take(bytes *b, size_t below) {
    size_t v = 0;
    for (int i = 0; i < 2; i++) v = v << 8 | (b->at < b->size ? b->data[b->at++] : 0);
    return v % below;
}

/* Return a number of kind 0 (typical of networks), 1 (large), 2 (including infinities and NaNs) or 3 (raw input bytes).
 * */
static float number(bytes *b) {
    static const uint32_t odd[] = { 0,           0x80000000u, 1,           0x807fffffu, 0x00800000u, 0x7f7fffffu,
                                    0xff7fffffu, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu };
    const uint64_t roll = fuzz_next(&b->random);
    uint32_t raw = (uint32_t)roll;
    if (b->kind == 0) return mw_uniform(&b->random, -3, 3);
    if (b->kind == 1) return roll % 4 ? mw_uniform(&b->random, -120, 120) : moe_from_bits(odd[roll / 4 % 7]);
    if (b->kind == 2) return roll % 16 ? mw_uniform(&b->random, -3, 3) : moe_from_bits(odd[roll / 16 % MOE_COUNT(odd)]);
    for (int i = 0; i < 4 && b->at < b->size; i++) raw = raw << 8 | b->data[b->at++];
    return moe_from_bits(raw);
}

/* Allocate `size` bytes, padded to `align`, between guard values and an inaccessible page. */
static void *room_for(bytes *b, size_t size, size_t align) {
    char *area = b->areas[b->taken % AREAS];
    const size_t padded = moe_round_up(size ? size : 1, align);
    if (b->taken++ >= AREAS || padded + PAGE > AREA_BYTES) abort(); /* only a bug in this file can exhaust the areas */
    for (size_t i = 0; i < PAGE / 4; i++) {
        const uint32_t guard = GUARD;
        memcpy(area + AREA_BYTES - padded - PAGE + 4 * i, &guard, 4);
    }
    memset(area + AREA_BYTES - padded, 0, padded);
    return area + AREA_BYTES - padded;
}

static float *floats(bytes *b, size_t n) {
    float *x = room_for(b, n * sizeof *x, 4);
    for (size_t i = 0; i < n; i++) x[i] = number(b);
    return x;
}

static float *guarded(bytes *b, size_t n) {
    float *y = room_for(b, n * sizeof *y, 4);
    for (size_t i = 0; i < n; i++) y[i] = moe_from_bits(GUARD);
    return y;
}

/* ---- Comparison ---- */

static int is_nan(float f) { return (moe_to_bits(f) & 0x7fffffffu) > 0x7f800000u; }

/* Check that results are equal. Treat all NaNs as equal, because requests whose results contain NaNs fail anyway. */
static void same(const moe_kernels *isa, const char *kernel, const float *a, const float *b, size_t n, size_t before) {
    for (size_t i = 0; i < n; i++)
        FUZZ_CHECK(moe_to_bits(a[i]) == moe_to_bits(b[i]) || (is_nan(a[i]) && is_nan(b[i])),
                   "%s %s, %zu of %zu: %a, portable %a", isa->name, kernel, i, n, (double)b[i], (double)a[i]);
    for (size_t i = 1; i <= before; i++)
        FUZZ_CHECK(moe_to_bits(b[-(ptrdiff_t)i]) == GUARD, "%s %s wrote before its result", isa->name, kernel);
}

static const moe_kernels *some_isa(bytes *b) {
    const size_t first = take(b, MOE_COUNT(moe_isas));
    for (size_t i = 0; i < MOE_COUNT(moe_isas); i++) {
        const moe_kernels *isa = moe_isas[(first + i) % MOE_COUNT(moe_isas)];
        if (isa != &moe_kernels_portable && isa->available()) return isa;
    }
    return &moe_kernels_portable;
}

static size_t size_class(size_t n) {
    return n < 4 ? n : 4 + (size_t)((n % 16 == 0) + 2 * (n % 64 == 0) + (n > 64) + (n > 512));
}

static void note(const moe_kernels *isa, size_t op, size_t a, size_t b) {
    const size_t key[] = { op, size_class(a), size_class(b) };
    const uint64_t hash = fuzz_hash(fuzz_hash(14695981039346656037u, isa->name, strlen(isa->name)), key, sizeof key);
    counters[(hash ^ hash >> 32) % sizeof counters] = 1;
}

/* ---- Linear ---- */

static void fill_blob(bytes *b, moe_type type, size_t out, size_t in, char *blob, int invalid) {
    float *row = mw_zeros(in * sizeof *row);
    int8_t *scratch = mw_zeros(3 * moe_round_up(in, MOE_Q8_COLS));
    const int kind = b->kind;
    if (moe_type_quantised(type)) b->kind = 0; /* only finite rows can be quantised */
    for (size_t r = 0; r < out; r++) {
        for (size_t c = 0; c < in; c++) row[c] = number(b);
        moe_pack_row(type, out, in, r, row, blob, scratch);
    }
    b->kind = kind;
    for (size_t n = 0; invalid && n < 64; n++)
        blob[fuzz_below(&b->random, (size_t)moe_matrix_bytes(type, out, in))] = (char)fuzz_next(&b->random);
    free(row);
    free(scratch);
}

static void try_linear(bytes *b, const moe_kernels *isa) {
    const moe_type type = (moe_type)take(b, MOE_TYPE_COUNT);
    const size_t rows = 1 + take(b, 40), in = 1 + take(b, take(b, 8) ? 300 : 1200), out = 1 + take(b, 120);
    const size_t x_stride = in + take(b, 3), y_stride = out + take(b, 4), add_stride = out + take(b, 3);
    const size_t row0 = take(b, rows), row1 = row0 + 1 + take(b, rows - row0), blocks = moe_divide_up(out, 16);
    const size_t block0 = take(b, blocks), block1 = block0 + 1 + take(b, blocks - block0), addend = take(b, 3);
    const int quantised = moe_type_quantised(type), invalid = quantised && take(b, 8) == 0;
    const size_t n = (rows - 1) * y_stride + out;
    char *blob = room_for(b, (size_t)moe_matrix_bytes(type, out, in), 64);
    moe_matrix matrix = moe_matrix_view(type, out, in, blob);
    moe_linear l = { .w = &matrix, .relu = (int)take(b, 2), .y_stride = y_stride, .x_stride = x_stride };
    const float *x = floats(b, (rows - 1) * x_stride + in);
    float *y[2];
    note(isa, 100 + (size_t)type * 4 + addend, in, out * 1000 + rows);
    fill_blob(b, type, out, in, blob, invalid);
    if (quantised) {
        float *scales = room_for(b, rows * sizeof *scales, 4);
        int8_t *codes = room_for(b, rows * moe_code_bytes(in), 64);
        const int by_block = (int)take(b, 2);
        for (size_t r = 0; r < rows; r++)
            if (by_block)
                moe_quantise_blocks(moe_quantise_portable, x + r * x_stride, in, codes + r * moe_code_bytes(in));
            else scales[r] = moe_quantise_portable(x + r * x_stride, in, codes + r * moe_code_bytes(in));
        l.scales = by_block ? NULL : scales, l.codes = codes;
    } else {
        l.x = x;
    }
    if (addend == 1) l.bias = floats(b, out);
    if (addend == 2) l.add = floats(b, (rows - 1) * add_stride + out), l.add_stride = add_stride;
    if (take(b, 2)) l.next = blob;
    for (int i = 0; i < 2; i++) {
        l.y = y[i] = guarded(b, n);
        (i ? isa : &moe_kernels_portable)->linear(&l, row0, row1, block0, block1);
    }
    for (size_t i = 0; i < n; i++) {
        const size_t r = i / y_stride, j = i % y_stride;
        const int wanted = r >= row0 && r < row1 && j < out && j >= block0 * 16 && j < block1 * 16;
        FUZZ_CHECK(wanted || (moe_to_bits(y[0][i]) == GUARD && moe_to_bits(y[1][i]) == GUARD),
                   "%s %s wrote outside its result, at row %zu column %zu", isa->name, moe_type_name(type), r, j);
    }
    if (!invalid) same(isa, moe_type_name(type), y[0], y[1], n, PAGE / 4);
}

/* ---- The other kernels ---- */

static void try_quantise(bytes *b, const moe_kernels *isa, size_t n) {
    const float *x = floats(b, n);
    int8_t *q[2];
    float scale[2];
    for (int i = 0; i < 2; i++) {
        q[i] = room_for(b, moe_code_bytes(n), 64);
        scale[i] = (i ? isa : &moe_kernels_portable)->quantise(x, n, q[i]);
    }
    FUZZ_CHECK(memcmp(q[0], q[1], moe_code_bytes(n)) == 0, "%s quantises %zu numbers differently", isa->name, n);
    same(isa, "scale", &scale[0], &scale[1], 1, 0);
}

static void try_cell(bytes *b, const moe_kernels *isa, size_t n) {
    const float *z = floats(b, 4 * n), bias = number(b);
    const int in_place = take(b, 2) != 0;
    float *c = floats(b, n), *h[2], *c_out[2];
    for (int i = 0; i < 2; i++) {
        h[i] = guarded(b, n);
        c_out[i] = i && in_place ? c : guarded(b, n);
        (i ? isa : &moe_kernels_portable)->lstm_cell(z, c, n, bias, h[i], c_out[i]);
    }
    same(isa, "lstm_cell h", h[0], h[1], n, PAGE / 4);
    same(isa, "lstm_cell c", c_out[0], c_out[1], n, 0);
}

/* Compare attention for several queries that share some keys and values. */
static void try_heads(bytes *b, const moe_kernels *isa, size_t n) {
    enum { ROWS = 4, PLACES = 12, STRIDE = 16 };
    const size_t width = 1 + n % 130, share = 1 + take(b, 3), keys = 1 + take(b, 5), heads = keys * share;
    const size_t cols = heads * width, pair = 2 * keys * width, count = 1 + take(b, ROWS);
    const float *query = floats(b, count * cols), *data = floats(b, PLACES * pair), scale = number(b);
    const float *rows[ROWS][PLACES];
    float *y[2], *scores = room_for(b, ROWS * heads * STRIDE * sizeof *scores, 4);
    moe_heads h[ROWS];
    for (size_t r = 0; r < count; r++) {
        h[r] = (moe_heads){ .query = query + r * cols,
                            .rows = rows[r],
                            .n = 1 + take(b, PLACES),
                            .heads = heads,
                            .share = share,
                            .width = width,
                            .values = pair / 2,
                            .scale = scale,
                            .scores = scores + r * heads * STRIDE,
                            .stride = STRIDE,
                            .parts = MOE_HEADS_ALL };
        for (size_t i = 0; i < h[r].n; i++) rows[r][i] = data + (take(b, 2) ? i : take(b, PLACES)) * pair;
    }
    for (int i = 0; i < 2; i++) {
        y[i] = guarded(b, count * cols);
        for (size_t r = 0; r < count; r++) h[r].y = y[i] + r * cols;
        (i ? isa : &moe_kernels_portable)->heads(h, count);
    }
    same(isa, "heads", y[0], y[1], count * cols, PAGE / 4);
}

static void try_sums(bytes *b, const moe_kernels *isa, size_t n) {
    const float *x = floats(b, n), *key = floats(b, n), *v = floats(b, n), a = number(b), shift = number(b);
    float *e[2], *u[2], *t[2], *y[2], sums[2][4];
    for (int i = 0; i < 2; i++) {
        const moe_kernels *k = i ? isa : &moe_kernels_portable;
        u[i] = guarded(b, n), t[i] = guarded(b, n), e[i] = guarded(b, n), y[i] = room_for(b, n * sizeof **y, 4);
        memcpy(y[i], key, n * sizeof *key);
        k->axpy(a, x, n, y[i]);
        k->unary(MOE_UNARY_SIGMOID, x, n, u[i]);
        k->unary(MOE_UNARY_TANH, x, n, t[i]);
        sums[i][0] = k->dot(x, key, n);
        sums[i][1] = k->score_additive(key, x, v, n);
        sums[i][2] = k->max(x, n);
        sums[i][3] = k->exp_sum(x, n, shift, a > 0 ? e[i] : NULL);
    }
    same(isa, "sums", sums[0], sums[1], 4, 0);
    same(isa, "axpy", y[0], y[1], n, PAGE / 4);
    same(isa, "sigmoid", u[0], u[1], n, PAGE / 4);
    same(isa, "tanh", t[0], t[1], n, PAGE / 4);
    same(isa, "exp", e[0], e[1], n, PAGE / 4);
}

/* ---- One input ---- */

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    return 0;
}

static void map_areas(char **areas) {
    for (size_t i = 0; i < AREAS; i++) {
        char *p = mmap(NULL, AREA_BYTES + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED || mprotect(p, PAGE, PROT_NONE) || mprotect(p + PAGE + AREA_BYTES, PAGE, PROT_NONE))
            abort();
        areas[i] = p + PAGE;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char *areas[AREAS];
    bytes b = { .data = data, .size = size, .random = fuzz_hash(size, data, size) };
    if (!areas[0]) map_areas(areas);
    b.areas = areas;
    const moe_kernels *isa = some_isa(&b);
    const size_t op = take(&b, 8);
    b.kind = (int)take(&b, 4);
    if (op < 4) {
        try_linear(&b, isa);
        return 0;
    }
    const size_t n = 1 + take(&b, take(&b, 4) ? 130 : 2000);
    note(isa, op * 4 + (size_t)b.kind, n, 0);
    if (op == 4) try_quantise(&b, isa, n);
    else if (op == 5) try_cell(&b, isa, n);
    else if (op == 6) try_heads(&b, isa, n);
    else try_sums(&b, isa, n);
    return 0;
}
