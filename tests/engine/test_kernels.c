/* test_kernels.c - number formats, elementary functions, kernels of every instruction set compared with portable
 * kernels, thread pool, planner. Values are compared bit by bit, except that all NaNs are equal: a request that yields
 * NaN fails, so callers never see its payload. */
#include "moe.c"

#include "model_writer.h"

#include "tests/test.h"

/* ---- Helpers ---- */

static int is_nan(float f) { return (moe_to_bits(f) & 0x7fffffffu) > 0x7f800000u; }

static int same(float a, float b) { return moe_to_bits(a) == moe_to_bits(b) || (is_nan(a) && is_nan(b)); }

/* Number kinds: typical values; zeros and subnormals; huge values; infinities and NaNs; a mixture of all kinds. */
enum { PLAIN, TINY, HUGE_NUMBERS, BROKEN, MIXED, KINDS };

static float number(uint64_t *random, int kind) {
    static const uint32_t tiny[] = { 0,           0x80000000u, 1,           0x80000001u, 0x007fffffu,
                                     0x807fffffu, 0x00800000u, 0x80800000u, 0x00400000u };
    static const uint32_t broken[] = { 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u,
                                       0x7fc00001u, 0x7fffffffu, 0xffffffffu, 0x7f800001u };
    const size_t roll = mw_below(random, 16);
    if (kind == MIXED) kind = (int)mw_below(random, BROKEN);
    if (kind == TINY && roll < 12) return moe_from_bits(tiny[mw_below(random, MOE_COUNT(tiny))]);
    if (kind == HUGE_NUMBERS && roll < 4) return roll & 1 ? FLT_MAX : -FLT_MAX;
    if (kind == HUGE_NUMBERS && roll < 8) return mw_uniform(random, -1e30f, 1e30f);
    if (kind == BROKEN && roll < 1) return moe_from_bits(broken[mw_below(random, MOE_COUNT(broken))]);
    return roll < 14 ? mw_uniform(random, -3, 3) : mw_uniform(random, -120, 120);
}

/* Return a block of exactly n random floats, so that sanitizers detect reads past its end. */
static float *numbers(uint64_t *random, size_t n, int kind) {
    float *x = mw_zeros(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = number(random, kind);
    return x;
}

static float *copy_of(const float *x, size_t n) {
    float *y = mw_zeros(n * sizeof *y);
    if (n) memcpy(y, x, n * sizeof *y);
    return y;
}

/* Return the i-th width that all kernel tests use. */
static size_t width_at(size_t i) {
    static const size_t large[] = { 96, 127, 128, 256, 511, 1000 };
    return i < 70 ? i + 1 : large[i - 70];
}
enum { WIDTHS = 76 };

/* Return the i-th non-portable set of kernels that this machine supports, or NULL after the last. */
static const moe_kernels *isa_at(size_t i) {
    for (size_t r = 1; r < MOE_COUNT(moe_isas); r++) {
        const moe_kernels *isa = moe_isas[r];
        for (; isa && moe_isa_available(isa->name); isa = isa->small)
            if (i-- == 0) return isa;
    }
    return NULL;
}

static const moe_kernels *const oracle = &moe_kernels_portable;

/* ---- Number formats ---- */

/* Return the value of a 16-bit float, computed in double precision. */
static double half_value(uint16_t h, int mantissa_bits) {
    const int exponent_bits = 15 - mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (h & 0x7fff) >> mantissa_bits, mantissa = h & ((1 << mantissa_bits) - 1);
    double v;
    if (exponent == (1 << exponent_bits) - 1) v = mantissa ? (double)NAN : (double)INFINITY;
    else if (exponent == 0) v = ldexp(mantissa, 1 - bias - mantissa_bits);
    else v = ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    return h & 0x8000 ? -v : v;
}

static void check_every_pattern(float (*from)(uint16_t), uint16_t (*to)(float), int mantissa_bits) {
    const uint32_t infinity = (0x7fffu >> mantissa_bits) << mantissa_bits;
    for (uint32_t h = 0; h < 65536; h++) {
        const double want = half_value((uint16_t)h, mantissa_bits);
        const float got = from((uint16_t)h);
        if (want != want) {
            CHECK(is_nan(got), "%04x is not a NaN", h);
            CHECK((to(got) & 0x7fffu) > infinity, "NaN %04x is converted to a number", h);
            CHECK(mantissa_bits != 10 || (to(got) & 0x8000) == (h & 0x8000), "NaN %04x loses its sign", h);
            continue;
        }
        CHECK((double)got == want && !signbit(got) == !signbit(want), "%04x is %g, not %g", h, (double)got, want);
        CHECK(to(got) == h, "%04x is converted to %04x", h, to(got));
    }
}

TEST(halves_have_the_right_values_and_round_trip) {
    check_every_pattern(moe_f16_to_f32, moe_f32_to_f16, 10);
    check_every_pattern(moe_bf16_to_f32, moe_f32_to_bf16, 7);
}

/* Check that the midpoint of two neighbours rounds to even, and that numbers next to the midpoint round to nearest. */
static void rounds_midpoints_to_even(uint16_t (*to)(float), int mantissa_bits) {
    const uint32_t infinity = (0x7fffu >> mantissa_bits) << mantissa_bits;
    for (uint32_t h = 0; h + 1 < infinity; h++) {
        const float midpoint =
            (float)((half_value((uint16_t)h, mantissa_bits) + half_value((uint16_t)(h + 1), mantissa_bits)) / 2);
        const uint32_t even = h & 1 ? h + 1 : h, bits = moe_to_bits(midpoint);
        const uint32_t below = to(moe_from_bits(bits - 1)), above = to(moe_from_bits(bits + 1));
        if ((half_value((uint16_t)h, mantissa_bits) + half_value((uint16_t)(h + 1), mantissa_bits)) / 2 !=
            (double)midpoint)
            continue;
        CHECK(to(midpoint) == even, "%d bits: midpoint above %04x rounds to %04x", mantissa_bits, h, to(midpoint));
        CHECK(to(-midpoint) == (even | 0x8000), "%d bits: midpoint below -%04x rounds to %04x", mantissa_bits, h,
              to(-midpoint));
        CHECK(below == h, "%d bits: just below the midpoint above %04x rounds to %04x", mantissa_bits, h, below);
        CHECK(above == h + 1, "%d bits: just above the midpoint above %04x rounds to %04x", mantissa_bits, h, above);
    }
}

TEST(f16_rounds_half_to_even) {
    rounds_midpoints_to_even(moe_f32_to_f16, 10);
    assert_int_equal(moe_f32_to_f16(65519.996f), 0x7bff);
    assert_int_equal(moe_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(moe_f32_to_f16(-65520.0f), 0xfc00);
    assert_int_equal(moe_f32_to_f16(FLT_MAX), 0x7c00);
    assert_int_equal(moe_f32_to_f16(INFINITY), 0x7c00);
    assert_int_equal(moe_f32_to_f16(0x1p-25f), 0); /* half the smallest subnormal rounds to zero, which is even */
    assert_int_equal(moe_f32_to_f16(0x1.000002p-25f), 1);
    assert_int_equal(moe_f32_to_f16(-FLT_MIN), 0x8000);
    assert_int_equal(moe_f32_to_f16(moe_from_bits(1)), 0);
}

TEST(bf16_rounds_half_to_even) {
    rounds_midpoints_to_even(moe_f32_to_bf16, 7);
    assert_int_equal(moe_f32_to_bf16(FLT_MAX), 0x7f80);
    assert_int_equal(moe_f32_to_bf16(-INFINITY), 0xff80);
    assert_true((moe_f32_to_bf16(moe_from_bits(0x7f800001u)) & 0x7fff) >
                0x7f80); /* NaNs with small payloads must not become infinity */
}

TEST(halves_agree_with_the_slow_conversion) {
    uint64_t random = 5;
    for (size_t i = 0; i < mw_rounds(200000); i++) {
        float f = moe_from_bits((uint32_t)mw_next(&random));
        if (is_nan(f)) continue;
        if (fabsf(f) < 65520.0f)
            CHECK(moe_f32_to_f16(f) == mw_half(f, 0), "f16 of %a is %04x, not %04x", (double)f, moe_f32_to_f16(f),
                  mw_half(f, 0));
        if (fabsf(f) < 3.3e38f)
            CHECK(moe_f32_to_bf16(f) == mw_half(f, 1), "bf16 of %a is %04x, not %04x", (double)f, moe_f32_to_bf16(f),
                  mw_half(f, 1));
    }
}

TEST(packed_rows_match_the_format) {
    static const size_t shapes[][2] = { { 1, 1 }, { 3, 70 }, { 16, 64 }, { 17, 65 }, { 33, 5 }, { 40, 130 } };
    static const uint32_t types[] = { MW_F32, MW_F16, MW_BF16, MW_Q8 };
    uint64_t random = 9;
    for (size_t s = 0; s < MOE_COUNT(shapes); s++)
        for (size_t k = 0; k < MOE_COUNT(types); k++) {
            const size_t rows = shapes[s][0], cols = shapes[s][1], bytes = mw_matrix_bytes(types[k], rows, cols);
            float *w = numbers(&random, rows * cols, PLAIN), *back = mw_zeros(cols * 4);
            unsigned char *want = mw_zeros(bytes), *got = mw_zeros(bytes);
            int8_t *scratch = mw_zeros(mw_up(cols, 64));
            moe_matrix m;
            assert_int_equal(moe_matrix_bytes((moe_type)types[k], rows, cols), bytes);
            if (rows > 2) memset(w + cols, 0, cols * 4); /* a row of zeros */
            mw_pack(types[k], rows, cols, w, want);
            for (size_t r = 0; r < rows; r++)
                moe_pack_row((moe_type)types[k], rows, cols, r, w + r * cols, got, scratch);
            CHECK(memcmp(want, got, bytes) == 0, "type %u, %zux%zu: bytes differ from the format's description",
                  types[k], rows, cols);
            m = moe_matrix_view((moe_type)types[k], rows, cols, got);
            for (size_t r = 0; r < rows; r++) {
                moe_matrix_row(&m, r, back);
                for (size_t c = 0; c < cols; c++) {
                    const double error = fabs((double)back[c] - (double)w[r * cols + c]),
                                 size = fabs((double)w[r * cols + c]);
                    const double allowed = types[k] == MW_F32    ? 0
                                           : types[k] == MW_F16  ? size / 2048 + 1e-7
                                           : types[k] == MW_BF16 ? size / 256
                                                                 : 120.0 / 254 * 1.001;
                    CHECK(error <= allowed, "type %u: %g became %g", types[k], (double)w[r * cols + c],
                          (double)back[c]);
                }
            }
            free(w), free(back), free(want), free(got), free(scratch);
        }
}

TEST(matrix_sizes_do_not_wrap_around) {
    assert_int_equal(moe_matrix_bytes(MOE_TYPE_F32, UINT64_MAX, 2), 0);
    assert_int_equal(moe_matrix_bytes(MOE_TYPE_F32, (uint64_t)1 << 62, 1), 0);
    assert_int_equal(moe_matrix_bytes(MOE_TYPE_F16, (uint64_t)1 << 32, (uint64_t)1 << 31), 0);
    assert_int_equal(moe_matrix_bytes(MOE_TYPE_Q8, UINT64_MAX, 1), 0);
    assert_int_equal(moe_matrix_bytes(MOE_TYPE_Q8, 1, UINT64_MAX - 3), 0);
    assert_int_equal(moe_matrix_bytes(MOE_TYPE_Q8, (uint64_t)1 << 33, (uint64_t)1 << 31), 0);
    assert_int_equal(moe_matrix_bytes(MOE_TYPE_Q8, 17, 65), 32 * (128 + 8));
    {
        uint64_t down = 0;
        assert_int_equal(moe_slab_bytes(MOE_TYPE_F32, 1, (uint64_t)1 << 31, (uint64_t)1 << 30, &down), 0);
        assert_int_equal(moe_slab_bytes(MOE_TYPE_F32, 1, 3, 5, &down), 4096);
        assert_int_equal(down, 64);
    }
}

TEST(type_names_parse_back) {
    moe_type t;
    char names[100] = "";
    for (uint32_t k = 0; k < MOE_TYPE_COUNT; k++) {
        assert_true(moe_type_parse(moe_type_name((moe_type)k), &t));
        assert_int_equal(t, k);
        strcat(strcat(names, k ? ", " : ""), moe_type_name(t));
    }
    assert_string_equal(names, MOE_TYPE_NAMES);
    assert_false(moe_type_parse("i32", &t));
    assert_false(moe_type_parse("", &t));
    assert_false(moe_type_parse("f32 ", &t));
    assert_string_equal(moe_type_name((moe_type)77), "?");
    assert_string_equal(moe_status_name((moe_status)77), "unknown");
    for (int s = MOE_OK; s <= MOE_ERROR_CANCELLED; s++)
        assert_string_not_equal(moe_status_name((moe_status)s), "unknown");
}

/* ---- Quantising ---- */

TEST(quantise_rounds_half_to_even_within_127) {
    int8_t q[128];
    float x[16] = { 127,     0.5f,   1.5f, 2.5f,        -0.5f, -1.5f, -2.5f, 126.5f,
                    -126.5f, 125.5f, -127, 0.49999997f, -0.0f, 3.5f,  4.5f,  -3.5f };
    static const int want[16] = { 127, 0, 2, 2, 0, -2, -2, 126, -126, 126, -127, 0, 0, 4, 4, -4 };
    for (size_t r = 0; r < MOE_COUNT(moe_isas); r++) {
        if (!moe_isa_available(moe_isas[r]->name)) continue;
        memset(q, 99, sizeof q);
        assert_true(moe_isas[r]->quantise(x, 16, q) == 1.0f);
        for (size_t i = 0; i < 16; i++) CHECK(q[i] == want[i], "%g becomes %d", (double)x[i], q[i]);
        for (size_t i = 16; i < 64; i++) CHECK(q[i] == 0, "padding column %zu is %d", i, q[i]);
        assert_int_equal(moe_code_bytes(16), 128);
        assert_int_equal(moe_code_sums(q, 64)[0], 130);
        for (size_t i = 1; i < 32; i++) assert_int_equal(moe_code_sums(q, 64)[i], 0);
    }
}

TEST(quantise_codes_are_the_nearest_ones) {
    uint64_t random = 3;
    for (size_t round = 0; round < mw_rounds(400); round++) {
        const size_t n = width_at(mw_below(&random, WIDTHS)), padded = mw_up(n, 64);
        int sum = 0;
        float *x = numbers(&random, n, PLAIN);
        int8_t *q = mw_zeros(moe_code_bytes(n));
        const float scale = moe_quantise_portable(x, n, q);
        for (size_t i = 0; i < n; i++) {
            CHECK(q[i] >= -127, "code %d", q[i]);
            CHECK(fabs((double)x[i] - (double)q[i] * (double)scale) <= 0.5001 * (double)scale, "%g became %d of %g",
                  (double)x[i], q[i], (double)scale);
        }
        for (size_t i = 0; i < padded; i++) {
            sum = i % 32 ? sum + q[i] : q[i];
            if (i % 32 == 31) assert_int_equal(moe_code_sums(q, padded)[i / 32], sum);
        }
        free(x), free(q);
    }
}

TEST(quantise_keeps_damage_visible) {
    static const uint32_t damage[] = { 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu };
    int8_t q[192];
    float x[70];
    for (size_t r = 0; r < MOE_COUNT(moe_isas); r++) {
        if (!moe_isa_available(moe_isas[r]->name)) continue;
        for (size_t n = 1; n <= 70; n++)
            for (size_t k = 0; k < MOE_COUNT(damage); k++)
                for (size_t at = 0; at < n; at += n > 20 ? 7 : 1) {
                    for (size_t i = 0; i < n; i++) x[i] = (float)i - 20.5f;
                    x[at] = moe_from_bits(damage[k]);
                    memset(q, 99, sizeof q);
                    CHECK(is_nan(moe_isas[r]->quantise(x, n, q)), "%08x at %zu of %zu is lost", damage[k], at, n);
                    for (size_t i = 0; i < moe_code_bytes(n); i++) CHECK(q[i] == 0, "an invalid row has code %d", q[i]);
                }
        memset(x, 0, sizeof x);
        memset(q, 99, sizeof q);
        assert_true(moe_to_bits(moe_isas[r]->quantise(x, 70, q)) == 0);
        for (size_t i = 0; i < moe_code_bytes(70); i++) assert_int_equal(q[i], 0);
    }
}

TEST(quantise_is_the_same_on_every_isa) {
    uint64_t random = 4;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t w = 0; w < WIDTHS; w++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t n = width_at(w), bytes = moe_code_bytes(n);
                float *x = numbers(&random, n, kind), s0, s1;
                int8_t *q0 = mw_zeros(bytes), *q1 = mw_zeros(bytes);
                memset(q0, 1, bytes), memset(q1, 2, bytes);
                s0 = oracle->quantise(x, n, q0);
                s1 = isa_at(isa)->quantise(x, n, q1);
                CHECK(same(s0, s1), "%s, %zu columns, kind %d: scale %a, portable %a", isa_at(isa)->name, n, kind,
                      (double)s1, (double)s0);
                CHECK(memcmp(q0, q1, bytes) == 0, "%s, %zu columns, kind %d: other codes", isa_at(isa)->name, n, kind);
                free(x), free(q0), free(q1);
            }
}

/* ---- Elementary functions ---- */

TEST(exp_is_within_3e_7_relative) {
    double worst = 0;
    const double step = 174.0 / (double)mw_rounds(3000000);
    for (double at = -87; at <= 87; at += step) {
        const float x = (float)at;
        const double want = exp((double)x), error = fabs((double)moe_expf(x) - want) / want;
        if (x < -87 || x > 87) continue;
        if (error > worst) worst = error;
        CHECK(error < 3e-7, "exp(%a) is %a, off by %g", (double)x, (double)moe_expf(x), error);
    }
    assert_true(moe_expf(0.0f) == 1.0f && moe_expf(-0.0f) == 1.0f);
    print_message("# exp: worst relative error %.3g\n", worst);
}

TEST(exp_limits_are_as_documented) {
    assert_true(moe_to_bits(moe_expf(-INFINITY)) == 0);
    assert_true(moe_to_bits(moe_expf(-FLT_MAX)) == 0);
    assert_true(moe_to_bits(moe_expf(moe_from_bits(moe_to_bits(-87.0f) + 1))) == 0);
    assert_true(moe_expf(-87.0f) >= FLT_MIN); /* results are never subnormal */
    assert_true(same(moe_expf(INFINITY), moe_expf(87.0f)));
    assert_true(same(moe_expf(FLT_MAX), moe_expf(87.0f)));
    assert_true(moe_expf(87.0f) < INFINITY);
    assert_true(moe_expf(moe_from_bits(1)) == 1.0f);
}

TEST(log_is_within_3e_7_relative) {
    double worst = 0;
    const uint32_t step = 1 + 0x7f000000u / (uint32_t)mw_rounds(3000000);
    for (uint32_t bits = 0x00800000u; bits < 0x7f800000u; bits += step) {
        const float x = moe_from_bits(bits);
        const double want = log((double)x),
                     error = want == 0 ? (double)moe_logf(x) : fabs((double)moe_logf(x) - want) / fabs(want);
        if (error > worst) worst = error;
        CHECK(error < 3e-7, "log(%a) is %a, off by %g", (double)x, (double)moe_logf(x), error);
    }
    for (uint32_t bits = 0x3f700000u; bits < 0x3f900000u; bits += 37) { /* arguments near 1 */
        const float x = moe_from_bits(bits);
        const double want = log((double)x);
        CHECK(fabs((double)moe_logf(x) - want) <= 3e-7 * fabs(want), "log(%a) is %a, not %a", (double)x,
              (double)moe_logf(x), want);
    }
    assert_true(moe_to_bits(moe_logf(1.0f)) == 0);
    assert_true(moe_logf(0.0f) == -INFINITY && moe_logf(-0.0f) == -INFINITY);
    assert_true(is_nan(moe_logf(-1.0f)) && is_nan(moe_logf(NAN)) && is_nan(moe_logf(-INFINITY)));
    assert_true(moe_logf(INFINITY) == INFINITY);
    print_message("# log: worst relative error %.3g\n", worst);
}

TEST(tanh_and_sigmoid_are_within_2e_7_absolute) {
    double worst_tanh = 0, worst_sigmoid = 0;
    const double step = 200.0 / (double)mw_rounds(3000000);
    for (double at = -100; at <= 100; at += step) {
        const float x = (float)at;
        const double t = fabs((double)moe_tanhf(x) - tanh((double)x)),
                     s = fabs((double)moe_sigmoidf(x) - 1 / (1 + exp(-(double)x)));
        if (t > worst_tanh) worst_tanh = t;
        if (s > worst_sigmoid) worst_sigmoid = s;
        CHECK(t < 2e-7, "tanh(%a) is off by %g", (double)x, t);
        CHECK(s < 2e-7, "sigmoid(%a) is off by %g", (double)x, s);
        CHECK(same(moe_tanhf(-x), -moe_tanhf(x)), "tanh(%a) is not odd", (double)x);
        CHECK(moe_tanhf(x) >= -1 && moe_tanhf(x) <= 1 && moe_sigmoidf(x) >= 0 && moe_sigmoidf(x) <= 1,
              "%a leaves the range", (double)x);
    }
    assert_true(moe_tanhf(INFINITY) == 1.0f && moe_tanhf(-INFINITY) == -1.0f);
    assert_true(moe_sigmoidf(INFINITY) == 1.0f && moe_sigmoidf(-FLT_MAX) < 1e-37f);
    assert_true(moe_to_bits(moe_tanhf(0.0f)) == 0 && moe_to_bits(moe_tanhf(-0.0f)) == 0x80000000u);
    print_message("# tanh: worst error %.3g, sigmoid: %.3g\n", worst_tanh, worst_sigmoid);
}

TEST(gelu_by_tanh_is_within_5e_7) {
    double worst = 0;
    for (double at = -30; at <= 30; at += 60.0 / (double)mw_rounds(1000000)) {
        const float x = (float)at;
        const double d = (double)x, wanted = d / 2 * (1 + tanh(sqrt(2 / acos(-1)) * (d + 0.044715 * d * d * d))),
                     off = fabs((double)moe_gelu_tanhf(x) - wanted) / (fabs(d) > 1 ? fabs(d) : 1);
        if (off > worst) worst = off;
        CHECK(off < 5e-7, "gelu(%a) is off by %g", d, off);
    }
    assert_true(moe_gelu_tanhf(1e20f) == 1e20f && moe_gelu_tanhf(-1e4f) <= 0.0f && moe_gelu_tanhf(-1e4f) > -1e-30f);
    print_message("# gelu: worst error %.3g\n", worst);
}

/* If exp turned a NaN into a number, invalid weights would not cause MOE_ERROR_NUMERIC. */
TEST(functions_propagate_every_nan) {
    for (uint32_t payload = 0; payload < 0x400; payload++)
        for (uint32_t sign = 0; sign < 2; sign++)
            for (uint32_t quiet = 0; quiet < 2; quiet++) {
                const uint32_t bits = sign << 31 | 0x7f800000u | quiet << 22 | payload | (payload ? 0 : quiet ^ 1);
                const float x = moe_from_bits(bits);
                CHECK(is_nan(moe_expf(x)), "exp of NaN %08x is %a", bits, (double)moe_expf(x));
                CHECK(is_nan(moe_tanhf(x)), "tanh of NaN %08x is %a", bits, (double)moe_tanhf(x));
                CHECK(is_nan(moe_sigmoidf(x)), "sigmoid of NaN %08x is %a", bits, (double)moe_sigmoidf(x));
                for (size_t r = 0; r < MOE_COUNT(moe_isas); r++)
                    if (moe_isa_available(moe_isas[r]->name)) {
                        const moe_kernels *k = moe_isas[r];
                        float in[9] = { x, x, x, x, x, x, x, x, x }, out[9];
                        k->unary(MOE_UNARY_SIGMOID, in, 9, out);
                        for (int i = 0; i < 9; i++)
                            CHECK(is_nan(out[i]), "%s: sigmoid of NaN %08x is %a", k->name, bits, (double)out[i]);
                        k->unary(MOE_UNARY_TANH, in, 9, out);
                        for (int i = 0; i < 9; i++)
                            CHECK(is_nan(out[i]), "%s: tanh of NaN %08x is %a", k->name, bits, (double)out[i]);
                        CHECK(is_nan(k->exp_sum(in, 9, 0, out)), "%s: exp_sum loses NaN %08x", k->name, bits);
                    }
            }
}

TEST(rounding_is_to_even_in_the_whole_range) {
    uint64_t random = 11;
    for (int32_t i = -4000; i <= 4000; i++)
        for (int q = 0; q < 8; q++) {
            const float x = (float)i + (float)q / 8;
            assert_int_equal(moe_round(x), (int32_t)nearbyint((double)x));
        }
    for (size_t i = 0; i < mw_rounds(100000); i++) {
        const float x = mw_uniform(&random, -4194303, 4194303);
        assert_int_equal(moe_round(x), (int32_t)nearbyint((double)x));
    }
}

/* ---- Portable kernels against their definitions ---- */

TEST(portable_sums_run_over_16_lanes_in_the_fixed_tree) {
    uint64_t random = 21;
    for (size_t w = 0; w < WIDTHS; w++) {
        const size_t n = width_at(w);
        float *a = numbers(&random, n, PLAIN), *b = numbers(&random, n, PLAIN), lane[16] = { 0 };
        double exact = 0, size = 0;
        for (size_t l = 0; l < 16; l++)
            for (size_t k = l; k < n; k += 16) {
                volatile float product = a[k] * b[k];
                lane[l] = lane[l] + product;
            }
        for (size_t k = 0; k < n; k++) exact += (double)a[k] * (double)b[k], size += fabs((double)a[k] * (double)b[k]);
        for (size_t half = 8; half; half /= 2)
            for (size_t l = 0; l < half; l++) lane[l] = lane[l] + lane[l + half];
        CHECK(same(lane[0], oracle->dot(a, b, n)), "dot of %zu: %a, by definition %a", n, (double)oracle->dot(a, b, n),
              (double)lane[0]);
        CHECK(fabs((double)lane[0] - exact) <= 1e-5 * size, "dot of %zu: %g, exactly %g", n, (double)lane[0], exact);
        free(a), free(b);
    }
}

TEST(portable_lstm_cell_follows_its_formula_in_gate_order_ifgo) {
    uint64_t random = 22;
    for (size_t n = 1; n <= 40; n++) {
        float *z = numbers(&random, 4 * n, PLAIN), *c = numbers(&random, n, PLAIN), *h = mw_zeros(n * 4),
              *out = mw_zeros(n * 4);
        oracle->lstm_cell(z, c, n, 0.75f, h, out);
        for (size_t j = 0; j < n; j++) {
            const double i = 1 / (1 + exp(-(double)z[j])), f = 1 / (1 + exp(-(double)z[n + j] - 0.75)),
                         g = tanh((double)z[2 * n + j]);
            const double o = 1 / (1 + exp(-(double)z[3 * n + j])), want = f * (double)c[j] + i * g;
            CHECK(fabs((double)out[j] - want) < 1e-6 * (1 + fabs((double)c[j])), "c is %g, not %g", (double)out[j],
                  want);
            CHECK(fabs((double)h[j] - o * tanh(want)) < 1e-5, "h is %g, not %g", (double)h[j], o * tanh(want));
        }
        free(z), free(c), free(h), free(out);
    }
}

TEST(portable_scores_and_softmax_sums_follow_their_formulas) {
    uint64_t random = 23;
    for (size_t n = 1; n <= 70; n++) {
        float *key = numbers(&random, n, PLAIN), *query = numbers(&random, n, PLAIN), *v = numbers(&random, n, PLAIN),
              *e = mw_zeros(n * 4);
        float max = oracle->max(key, n), sum = oracle->exp_sum(key, n, max, e), best = key[0];
        double score = 0, size = 0, total = 0;
        for (size_t i = 0; i < n; i++) {
            score += (double)v[i] * tanh((double)key[i] + (double)query[i]);
            size += fabs((double)v[i]);
            total += exp((double)key[i] - (double)max);
            if (key[i] > best) best = key[i];
            CHECK(same(e[i], moe_expf(key[i] - max)), "exp_sum does not write exp");
        }
        assert_true(same(best, max));
        CHECK(fabs((double)oracle->score_additive(key, query, v, n) - score) < 1e-5 * size + 1e-6, "score of %zu", n);
        CHECK(fabs((double)sum - total) < 1e-5 * total, "sum of exponentials of %zu", n);
        free(key), free(query), free(v), free(e);
    }
    assert_true(oracle->max(NULL, 0) == -INFINITY);
    assert_true(oracle->dot(NULL, NULL, 0) == 0.0f);
}

/* ---- Instruction sets against portable ---- */

TEST(dot_is_the_same_on_every_isa) {
    uint64_t random = 31;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t w = 0; w < WIDTHS; w++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t n = width_at(w);
                float *a = numbers(&random, n, kind), *b = numbers(&random, n, kind == BROKEN ? PLAIN : kind);
                const float x = oracle->dot(a, b, n), y = isa_at(isa)->dot(a, b, n);
                CHECK(same(x, y), "%s, n %zu, kind %d: %a, portable %a", isa_at(isa)->name, n, kind, (double)y,
                      (double)x);
                free(a), free(b);
            }
}

TEST(axpy_is_the_same_on_every_isa) {
    uint64_t random = 32;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t w = 0; w < WIDTHS; w++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t n = width_at(w);
                float *x = numbers(&random, n, kind), *y0 = numbers(&random, n, kind), *y1 = copy_of(y0, n),
                      a = number(&random, kind);
                oracle->axpy(a, x, n, y0);
                isa_at(isa)->axpy(a, x, n, y1);
                for (size_t i = 0; i < n; i++)
                    CHECK(same(y0[i], y1[i]), "%s, n %zu, kind %d, %zu: %a, portable %a", isa_at(isa)->name, n, kind, i,
                          (double)y1[i], (double)y0[i]);
                free(x), free(y0), free(y1);
            }
}

/* Run attention in blocks of keys, then in blocks of values. */
static void heads_in_blocks(const moe_kernels *isa, moe_heads *h, size_t rows, size_t block) {
    static const int parts[] = { MOE_HEADS_SCORES, MOE_HEADS_SOFTMAX, MOE_HEADS_BLEND };
    size_t n[4], longest = 0;
    for (size_t r = 0; r < rows; r++) {
        n[r] = h[r].n;
        longest = n[r] > longest ? n[r] : longest;
    }
    for (size_t part = 0; part < MOE_COUNT(parts); part++)
        for (size_t first = 0, end; first < longest; first = end) {
            end = parts[part] == MOE_HEADS_SOFTMAX ? longest : first + block;
            for (size_t r = 0; r < rows; r++) {
                h[r].parts = parts[part], h[r].first = first;
                h[r].n = moe_max(first, moe_min(n[r], end));
            }
            isa->heads(h, rows);
        }
    for (size_t r = 0; r < rows; r++) h[r].n = n[r];
}

/* Stored rows do not depend on the instruction set and contain the nearest numbers of their type. */
TEST(cached_rows_are_the_same_on_every_isa) {
    static const size_t widths[] = { 1, 7, 16, 20, 64, 128, 130 };
    static const moe_type types[] = { MOE_TYPE_F32, MOE_TYPE_F16, MOE_TYPE_Q8 };
    uint64_t random = 133;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t round = 0; round < MOE_COUNT(widths) * KINDS * MOE_COUNT(types) * 2; round++) {
            const size_t width = widths[round % MOE_COUNT(widths)], groups = 1 + mw_below(&random, 6);
            const moe_keep keep = { types[round % MOE_COUNT(types)], groups * width, width };
            const int kind = (int)(round / MOE_COUNT(widths) % KINDS);
            const size_t bytes = moe_keep_bytes(&keep), from = mw_below(&random, groups);
            float *x = numbers(&random, keep.cols, kind), *y = numbers(&random, keep.cols, kind);
            char *row = mw_zeros(bytes);
            CHECK(bytes == (keep.type == MOE_TYPE_F32   ? 4 * keep.cols
                            : keep.type == MOE_TYPE_F16 ? (2 * keep.cols + 3) / 4 * 4
                                                        : 4 * groups + (keep.cols + 3) / 4 * 4),
                  "%zu bytes", bytes);
            for (size_t g = 0; g < groups; g++) moe_keep_group(&keep, x + g * width, g, row);
            if (keep.type != MOE_TYPE_F32) isa_at(isa)->unpack(&keep, row, from * width, keep.cols - from * width, y);
            for (size_t c = 0; c < keep.cols; c++) {
                const float kept = moe_kept(&keep, row, c), most = moe_largest(x + c / width * width, width);
                if (keep.type != MOE_TYPE_F32 && c >= from * width)
                    CHECK(same(y[c - from * width], kept), "%s, type %d, kind %d, %zu: %a, portable %a",
                          isa_at(isa)->name, (int)keep.type, kind, c, (double)y[c - from * width], (double)kept);
                if (keep.type == MOE_TYPE_F32) CHECK(same(kept, x[c]), "%a", (double)kept);
                else if (keep.type == MOE_TYPE_F16) CHECK(same(kept, moe_f16_to_f32(moe_f32_to_f16(x[c]))), "%zu", c);
                else if (most != most) CHECK(kept != kept, "%zu: %a", c, (double)kept);
                else if (most >= 1e-30f && most <= 1e38f) /* otherwise the largest numbers may become infinite */
                    CHECK(fabs((double)kept - (double)x[c]) <= (double)most / 253, "%zu: %a of %a", c, (double)kept,
                          (double)x[c]);
            }
            free(x), free(y), free(row);
        }
}

/* Kernels process one to four rows at a time, some of which share keys and values at arbitrary positions. */
TEST(heads_are_the_same_on_every_isa) {
    enum { ROWS = 4, LONGEST = 40, STRIDE = 48, PLACES = 60 };
    static const size_t widths[] = { 1, 7, 16, 20, 32, 64, 100, 128, 130 };
    uint64_t random = 131;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t round = 0; round < MOE_COUNT(widths) * KINDS * 6; round++) {
            const size_t width = widths[round % MOE_COUNT(widths)], share = mw_below(&random, 2) ? 1 : 1 + round % 4;
            const size_t heads = (1 + mw_below(&random, 12 / share)) * share;
            const size_t cols = heads * width, count = 1 + mw_below(&random, ROWS);
            const int kind = (int)(round / MOE_COUNT(widths) % KINDS);
            float *query = numbers(&random, ROWS * cols, kind), *carried = numbers(&random, PLACES * 2 * cols, kind);
            float *y = numbers(&random, ROWS * cols, kind), *y0 = mw_zeros(cols * sizeof *y0);
            float *scores = mw_zeros(ROWS * heads * STRIDE * sizeof *scores);
            const float *rows[ROWS][LONGEST];
            moe_heads h[ROWS];
            for (size_t r = 0; r < count; r++) {
                h[r] = (moe_heads){ .query = query + r * cols,
                                    .rows = rows[r],
                                    .n = 1 + mw_below(&random, LONGEST),
                                    .heads = heads,
                                    .share = share,
                                    .width = width,
                                    .scale = 0.3f,
                                    .y = y + r * cols,
                                    .values = cols / share,
                                    .scores = scores + r * heads * STRIDE,
                                    .stride = STRIDE,
                                    .parts = MOE_HEADS_ALL };
                for (size_t i = 0; i < h[r].n; i++)
                    rows[r][i] = carried + (mw_below(&random, 2) ? i : mw_below(&random, PLACES)) * 2 * cols / share;
            }
            heads_in_blocks(isa_at(isa), h, count, mw_below(&random, 2) ? LONGEST : 16);
            for (size_t r = 0; r < count; r++) {
                moe_heads one = h[r];
                one.scores = scores, one.y = y0, one.first = 0, one.parts = MOE_HEADS_ALL;
                oracle->heads(&one, 1);
                for (size_t c = 0; c < cols; c++)
                    CHECK(same(y0[c], h[r].y[c]),
                          "%s, kind %d: row %zu of %zu, %zu / %zu heads of %zu columns, %zu keys, %zu: %a, portable %a",
                          isa_at(isa)->name, kind, r, count, heads, share, width, h[r].n, c, (double)h[r].y[c],
                          (double)y0[c]);
            }
            free(query), free(carried), free(y), free(y0), free(scores);
        }
}

TEST(norm_is_the_same_on_every_isa) {
    uint64_t random = 132;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t w = 0; w < WIDTHS; w++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t n = width_at(w);
                float *x = numbers(&random, n, kind), *weight = numbers(&random, n, kind);
                float *bias = numbers(&random, n, kind), *y0 = mw_zeros(n * 4), *y1 = mw_zeros(n * 4);
                const moe_norm_op norm = { weight, n % 3 ? bias : NULL, 1e-5f, (int)(n % 2) };
                oracle->norm(&norm, x, n, y0);
                isa_at(isa)->norm(&norm, x, n, y1);
                for (size_t i = 0; i < n; i++)
                    CHECK(same(y0[i], y1[i]), "%s, n %zu, kind %d, %zu: %a, portable %a", isa_at(isa)->name, n, kind, i,
                          (double)y1[i], (double)y0[i]);
                free(x), free(weight), free(bias), free(y0), free(y1);
            }
}

TEST(max_is_the_same_on_every_isa) {
    uint64_t random = 33;
    for (size_t isa = 0; isa_at(isa); isa++) {
        for (size_t w = 0; w < WIDTHS; w++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t n = width_at(w);
                float *x = numbers(&random, n, kind);
                const float a = oracle->max(x, n), b = isa_at(isa)->max(x, n);
                CHECK(same(a, b) || (a == 0 && b == 0), "%s, n %zu, kind %d: %a, portable %a", isa_at(isa)->name, n,
                      kind, (double)b, (double)a);
                free(x);
            }
        assert_true(isa_at(isa)->max(NULL, 0) == -INFINITY);
    }
}

/* Log-probabilities contain max and max - max, so the sign of a zero must not depend on the instruction set. */
TEST(max_of_mixed_zeros_has_the_same_sign_on_every_isa) {
    uint64_t random = 34;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t n = 1; n <= 70; n++)
            for (int round = 0; round < 20; round++) {
                float *x = mw_zeros(n * 4), a, b;
                for (size_t i = 0; i < n; i++)
                    x[i] = mw_below(&random, 3) == 0 ? -1.0f : mw_below(&random, 2) ? 0.0f : -0.0f;
                a = oracle->max(x, n);
                b = isa_at(isa)->max(x, n);
                CHECK(moe_to_bits(a) == moe_to_bits(b), "%s, n %zu: %08x, portable %08x", isa_at(isa)->name, n,
                      moe_to_bits(b), moe_to_bits(a));
                free(x);
            }
}

TEST(max_ignores_nan_on_every_isa) {
    for (size_t r = 0; r < MOE_COUNT(moe_isas); r++)
        if (moe_isa_available(moe_isas[r]->name))
            for (size_t n = 1; n <= 40; n++)
                for (size_t at = 0; at < n; at++) {
                    float x[40];
                    for (size_t i = 0; i < n; i++) x[i] = (float)i;
                    x[at] = NAN;
                    assert_true(moe_isas[r]->max(x, n) == (n == 1        ? -INFINITY
                                                           : at == n - 1 ? (float)n - 2
                                                                         : (float)n - 1));
                }
}

TEST(exp_sum_is_the_same_on_every_isa) {
    uint64_t random = 35;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t w = 0; w < WIDTHS; w++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t n = width_at(w);
                float *x = numbers(&random, n, kind), *y0 = mw_zeros(n * 4), *y1 = mw_zeros(n * 4), a, b;
                const float shift = mw_below(&random, 4) ? oracle->max(x, n) : number(&random, kind);
                a = oracle->exp_sum(x, n, shift, y0);
                b = isa_at(isa)->exp_sum(x, n, shift, y1);
                CHECK(same(a, b), "%s, n %zu, kind %d: %a, portable %a", isa_at(isa)->name, n, kind, (double)b,
                      (double)a);
                for (size_t i = 0; i < n; i++)
                    CHECK(same(y0[i], y1[i]), "%s, n %zu, kind %d: element %zu", isa_at(isa)->name, n, kind, i);
                CHECK(same(a, isa_at(isa)->exp_sum(x, n, shift, NULL)), "%s: a different sum without output",
                      isa_at(isa)->name);
                CHECK(same(a, oracle->exp_sum(x, n, shift, NULL)), "portable: a different sum without output");
                CHECK(same(a, isa_at(isa)->exp_sum(x, n, shift, x)), "%s: a different sum in place", isa_at(isa)->name);
                for (size_t i = 0; i < n; i++)
                    CHECK(same(y0[i], x[i]), "%s, n %zu: element %zu in place", isa_at(isa)->name, n, i);
                free(x), free(y0), free(y1);
            }
}

TEST(delta_is_the_same_on_every_isa) {
    enum { STRIDE = 400, TOKENS = 3, KEYS = 19, MOST = 80 };
    uint64_t random = 38;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t w = 0; w < WIDTHS && width_at(w) <= MOST; w++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t n = width_at(w), states = (n + 15) / 16 * 16 * KEYS;
                float *rows[2] = { numbers(&random, STRIDE * TOKENS, kind), mw_zeros(STRIDE * TOKENS * 4) };
                float *memory[2] = { mw_zeros(states * 4), mw_zeros(states * 4) };
                memcpy(rows[1], rows[0], STRIDE * TOKENS * 4);
                for (size_t i = 0; i < 2; i++) {
                    const moe_delta d = {
                        rows[i],         STRIDE, TOKENS, 0,        KEYS, 2 * KEYS, 2 * KEYS + MOST, 2 * KEYS + MOST + 1,
                        3 * KEYS + MOST, KEYS,   n,      memory[i]
                    };
                    (i ? isa_at(isa) : oracle)->delta(&d);
                }
                for (size_t i = 0; i < STRIDE * TOKENS; i++)
                    CHECK(same(rows[0][i], rows[1][i]), "%s, n %zu, kind %d: element %zu", isa_at(isa)->name, n, kind,
                          i);
                for (size_t i = 0; i < states; i++) /* columns after the last one are not used */
                    CHECK(i / (16 * KEYS) * 16 + i % 16 >= n || same(memory[0][i], memory[1][i]),
                          "%s, n %zu, kind %d: state %zu", isa_at(isa)->name, n, kind, i);
                free(rows[0]), free(rows[1]), free(memory[0]), free(memory[1]);
            }
}

TEST(unary_is_the_same_on_every_isa) {
    static const moe_unary what[] = { MOE_UNARY_RELU,      MOE_UNARY_GELU, MOE_UNARY_SWISH,
                                      MOE_UNARY_GELU_TANH, MOE_UNARY_TANH, MOE_UNARY_SIGMOID };
    uint64_t random = 36;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t u = 0; u < MOE_COUNT(what); u++)
            for (size_t w = 0; w < WIDTHS; w++)
                for (int kind = 0; kind < KINDS; kind++) {
                    const size_t n = width_at(w);
                    float *x = numbers(&random, n, kind), *y0 = mw_zeros(n * 4), *y1 = mw_zeros(n * 4);
                    oracle->unary(what[u], x, n, y0);
                    isa_at(isa)->unary(what[u], x, n, y1);
                    for (size_t i = 0; i < n; i++)
                        CHECK(same(y0[i], y1[i]), "%s, unary %zu of %a: %a, portable %a", isa_at(isa)->name, u,
                              (double)x[i], (double)y1[i], (double)y0[i]);
                    isa_at(isa)->unary(what[u], x, n, x);
                    for (size_t i = 0; i < n; i++)
                        CHECK(same(y0[i], x[i]), "%s, unary %zu: element %zu in place", isa_at(isa)->name, u, i);
                    free(x), free(y0), free(y1);
                }
}

/* Apply every vector function to every 8191st float. */
TEST(unary_is_the_same_over_all_exponents) {
    const uint32_t step = 8191 * (uint32_t)(!mw_slow() ? 1 : 20);
    float x[64], y0[64], y1[64];
    uint64_t bits = 0;
    while (bits < UINT32_MAX) {
        for (int i = 0; i < 64; i++, bits += step) x[i] = moe_from_bits((uint32_t)bits);
        for (size_t isa = 0; isa_at(isa); isa++)
            for (int u = MOE_UNARY_RELU; u <= MOE_UNARY_SIGMOID; u++) {
                oracle->unary((moe_unary)u, x, 64, y0);
                isa_at(isa)->unary((moe_unary)u, x, 64, y1);
                for (int i = 0; i < 64; i++)
                    CHECK(same(y0[i], y1[i]), "%s, unary %d of %08x: %a, portable %a", isa_at(isa)->name, u,
                          moe_to_bits(x[i]), (double)y1[i], (double)y0[i]);
            }
    }
}

TEST(score_additive_is_the_same_on_every_isa) {
    uint64_t random = 37;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t w = 0; w < WIDTHS; w++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t n = width_at(w);
                float *key = numbers(&random, n, kind), *query = numbers(&random, n, kind),
                      *v = numbers(&random, n, kind);
                const float a = oracle->score_additive(key, query, v, n),
                            b = isa_at(isa)->score_additive(key, query, v, n);
                CHECK(same(a, b), "%s, n %zu, kind %d: %a, portable %a", isa_at(isa)->name, n, kind, (double)b,
                      (double)a);
                free(key), free(query), free(v);
            }
}

TEST(lstm_cell_is_the_same_on_every_isa_also_in_place) {
    uint64_t random = 38;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t w = 0; w < WIDTHS; w++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t n = width_at(w);
                const float bias = mw_below(&random, 2) ? 1.0f : 0.0f;
                float *z = numbers(&random, 4 * n, kind), *c = numbers(&random, n, kind);
                float *h0 = mw_zeros(n * 4), *h1 = mw_zeros(n * 4), *c0 = mw_zeros(n * 4), *c1 = mw_zeros(n * 4);
                oracle->lstm_cell(z, c, n, bias, h0, c0);
                isa_at(isa)->lstm_cell(z, c, n, bias, h1, c1);
                for (size_t i = 0; i < n; i++)
                    CHECK(same(h0[i], h1[i]) && same(c0[i], c1[i]), "%s, H %zu, kind %d: unit %zu", isa_at(isa)->name,
                          n, kind, i);
                isa_at(isa)->lstm_cell(z, c, n, bias, h1, c);
                for (size_t i = 0; i < n; i++)
                    CHECK(same(c0[i], c[i]), "%s, H %zu: unit %zu in place", isa_at(isa)->name, n, i);
                free(z), free(c), free(h0), free(h1), free(c0), free(c1);
            }
}

/* ---- Linear ---- */

typedef struct linear_case {
    size_t rows, in, out, x_stride, y_stride, add_stride;
    moe_type type;
    float *x, *w, *bias, *add, *scales;
    int8_t *codes;
    void *blob;
    moe_matrix matrix;
    moe_linear linear;
} linear_case;

enum { GUARD = 0x7fedcba9 }; /* bits of a NaN that no computation yields */

/* Quantise the inputs with one scale per row, or one per 64 columns (`blocks`). */
static void quantise_linear(linear_case *c, int blocks) {
    for (size_t r = 0; r < c->rows; r++) {
        const float *x = c->x + r * c->x_stride;
        int8_t *codes = c->codes + r * moe_code_bytes(c->in);
        if (blocks) moe_quantise_blocks(moe_quantise_portable, x, c->in, codes);
        else c->scales[r] = moe_quantise_portable(x, c->in, codes);
    }
    c->linear.scales = blocks ? NULL : c->scales;
}

/* Return a random case with buffers of exactly the required size. `addend` is 0 for none, 1 for a bias, 2 for an added
 * node. Half of the cases have a rectifier, and half have scales by block. */
static linear_case make_linear(uint64_t *random, moe_type type, size_t rows, size_t in, size_t out, int addend,
                               int kind) {
    linear_case c = { .rows = rows, .in = in, .out = out, .type = type };
    int8_t *scratch = mw_zeros(2 * mw_up(in, 64));
    c.x_stride = in + mw_below(random, 3);
    c.y_stride = out + mw_below(random, 4);
    c.add_stride = out + mw_below(random, 3);
    c.w = numbers(random, out * in, moe_type_quantised(type) ? kind == BROKEN ? PLAIN : kind : kind);
    c.blob = mw_zeros((size_t)moe_matrix_bytes(type, out, in));
    for (size_t r = 0; r < out; r++) moe_pack_row(type, out, in, r, c.w + r * in, c.blob, scratch);
    c.matrix = moe_matrix_view(type, out, in, c.blob);
    c.linear = (moe_linear){ .w = &c.matrix, .relu = (int)mw_below(random, 2), .y_stride = c.y_stride };
    c.x = numbers(random, (rows - 1) * c.x_stride + in, kind);
    if (moe_type_quantised(type)) {
        c.codes = mw_zeros(rows * moe_code_bytes(in));
        c.scales = mw_zeros(rows * 4);
        c.linear.codes = c.codes;
        quantise_linear(&c, (int)mw_below(random, 2));
    } else {
        c.linear.x = c.x;
        c.linear.x_stride = c.x_stride;
    }
    if (addend == 1) c.linear.bias = c.bias = numbers(random, out, kind);
    if (addend == 2) {
        c.linear.add = c.add = numbers(random, (rows - 1) * c.add_stride + out, kind);
        c.linear.add_stride = c.add_stride;
    }
    free(scratch);
    return c;
}

static void free_linear(linear_case *c) {
    free(c->x), free(c->w), free(c->bias), free(c->add), free(c->scales), free(c->codes), free(c->blob);
}

static float *guarded(size_t n) {
    float *y = mw_zeros(n * 4);
    for (size_t i = 0; i < n; i++) y[i] = moe_from_bits(GUARD);
    return y;
}

static void compare_linear(const moe_kernels *isa, linear_case *c, size_t row0, size_t row1, size_t block0,
                           size_t block1) {
    const size_t n =
        (c->rows - 1) * c->y_stride + c->out; /* the buffer ends with the last row, to detect writes after it */
    float *y0 = guarded(n), *y1 = guarded(n);
    moe_linear l = c->linear;
    l.w = &c->matrix;
    l.y = y0;
    oracle->linear(&l, row0, row1, block0, block1);
    l.y = y1;
    isa->linear(&l, row0, row1, block0, block1);
    for (size_t i = 0; i < n; i++) {
        const size_t r = i / c->y_stride, j = i % c->y_stride;
        if (r < row0 || r >= row1 || j >= c->out || j < block0 * 16 || j >= block1 * 16)
            CHECK(moe_to_bits(y0[i]) == GUARD && moe_to_bits(y1[i]) == GUARD,
                  "%s %s wrote out of bounds, at row %zu column %zu", isa->name, moe_type_name(c->type), r, j);
        else
            CHECK(same(y0[i], y1[i]) && moe_to_bits(y1[i]) != GUARD,
                  "%s %s [%zu, %zu] x %zu rows, output %zu of row %zu: %a, portable %a", isa->name,
                  moe_type_name(c->type), c->out, c->in, c->rows, j, r, (double)y1[i], (double)y0[i]);
    }
    free(y0), free(y1);
}

static void linear_on_isas(moe_type type, uint64_t seed) {
    static const size_t outs[] = { 1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 33, 48, 63, 64, 81, 100 };
    uint64_t random = seed;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t w = 0; w < WIDTHS; w++)
            for (int addend = 0; addend < 3; addend++)
                for (int kind = 0; kind < KINDS; kind++) {
                    const size_t in = width_at(w), out = outs[mw_below(&random, MOE_COUNT(outs))];
                    const size_t rows = mw_below(&random, 4) ? 1 + mw_below(&random, 9) : 1 + mw_below(&random, 67);
                    linear_case c;
                    if (mw_slow() && mw_below(&random, 8)) continue;
                    c = make_linear(&random, type, rows, in, out, addend, kind);
                    compare_linear(isa_at(isa), &c, 0, rows, 0, moe_divide_up(out, 16));
                    free_linear(&c);
                }
}

TEST(linear_is_the_same_on_every_isa) {
    static const uint32_t types[] = { MOE_TYPE_F32, MOE_TYPE_F16, MOE_TYPE_BF16, MOE_TYPE_Q8, MOE_TYPE_Q4,
                                      MOE_TYPE_Q4M, MOE_TYPE_Q8B, MOE_TYPE_Q3,   MOE_TYPE_Q2 };
    for (size_t i = 0; i < MOE_COUNT(types); i++) linear_on_isas(types[i], 41 + i);
}

/* Tiling depends on the number of rows, and in Q4 also on whether a matrix fits in the buffer. */
TEST(linear_quantised_is_the_same_at_every_row_count_and_width) {
    static const size_t ins[] = { 1, 33, 63, 65, 127, 191, 511 }, wide[] = { 1023, 1089, 2111, 4160 },
                        heights[] = { 1, 5, 16, 17, 33, 67 };
    uint64_t random = 52;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (uint32_t any = MOE_TYPE_Q8; any < MOE_TYPE_COUNT; any++) {
            const moe_type type = (moe_type)any;
            for (size_t i = 0; i < 67 + MOE_COUNT(heights) * MOE_COUNT(wide); i++) {
                const size_t rows = i < 67 ? i + 1 : heights[(i - 67) / MOE_COUNT(wide)],
                             out = 1 + mw_below(&random, 100);
                const size_t in = i < 67 ? ins[mw_below(&random, MOE_COUNT(ins))] : wide[(i - 67) % MOE_COUNT(wide)];
                linear_case c;
                if (mw_slow() && mw_below(&random, 8)) continue;
                c = make_linear(&random, type, rows, in, out, (int)mw_below(&random, 3), MIXED);
                compare_linear(isa_at(isa), &c, 0, rows, 0, moe_divide_up(out, 16));
                free_linear(&c);
            }
        }
}

/* With four rows, kernels use a different reading order for a matrix that exceeds all caches. */
TEST(linear_q8_of_a_large_matrix_is_the_same_on_every_isa) {
    const size_t in = 2110, out = 4090, rows = 4;
    uint64_t random = 61;
    if (mw_slow()) return;
    for (int addend = 0; addend < 3; addend++) {
        linear_case c = make_linear(&random, addend % 2 ? MOE_TYPE_Q8B : MOE_TYPE_Q8, rows, in, out, addend, MIXED);
        assert_true(moe_matrix_bytes(MOE_TYPE_Q8, out, in) > 8 << 20);
        for (int blocks = 0; blocks < 2; blocks++) {
            quantise_linear(&c, blocks);
            for (size_t isa = 0; isa_at(isa); isa++)
                compare_linear(isa_at(isa), &c, 0, rows, 3, moe_divide_up(out, 16) - 2);
        }
        free_linear(&c);
    }
}

static moe_linear_fn expanded_for;
static void linear_by_expansion(const moe_linear *l, size_t row0, size_t row1, size_t block0, size_t block1) {
    moe_linear_ranges(l, row0, row1, block0, block1, expanded_for, 1);
}

/* Formats without their own kernels are expanded to Q8. Test this for all formats, on all instruction sets. */
TEST(linear_of_expanded_codes_is_the_same_on_every_isa) {
    uint64_t random = 55;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (uint32_t type = MOE_TYPE_Q4; type < MOE_TYPE_COUNT; type++)
            for (size_t round = 0; moe_formats[type].bits < 8 && round < mw_rounds(100); round++) {
                const size_t rows = 1 + mw_below(&random, round % 8 ? 20 : 140), out = 1 + mw_below(&random, 60);
                const size_t in = 1 + mw_below(&random, round % 4 ? 200 : 3000), blocks = moe_divide_up(out, 16);
                const size_t row0 = mw_below(&random, rows), block0 = mw_below(&random, blocks);
                linear_case c = make_linear(&random, (moe_type)type, rows, in, out, (int)mw_below(&random, 3), MIXED);
                moe_kernels kernels = *isa_at(isa);
                expanded_for = kernels.linear;
                kernels.linear = linear_by_expansion;
                compare_linear(&kernels, &c, row0, row0 + 1 + mw_below(&random, rows - row0), block0,
                               block0 + 1 + mw_below(&random, blocks - block0));
                free_linear(&c);
            }
}

TEST(expanded_codes_equal_those_of_the_matrix) {
    uint64_t random = 56;
    for (uint32_t type = MOE_TYPE_Q4; type < MOE_TYPE_COUNT; type++) {
        if (moe_formats[type].bits == 8) continue;
        for (size_t round = 0; round < mw_rounds(100); round++) {
            const size_t in = 1 + mw_below(&random, 300), out = 1 + mw_below(&random, 60), block = (out - 1) / 16;
            linear_case c = make_linear(&random, (moe_type)type, 1, in, out, 0, MIXED);
            const size_t cols = c.matrix.cols_padded, k0 = mw_below(&random, cols / 64) * 64;
            int8_t *line = mw_zeros((cols - k0) * 16);
            moe_expand(&c.matrix, block, k0, cols, line);
            for (size_t k = k0; k < cols; k++)
                for (size_t j = 0; j < 16; j++)
                    CHECK(line[moe_q8_index(cols - k0, j, k - k0)] == moe_matrix_code(&c.matrix, block * 16 + j, k),
                          "%s: column %zu of output %zu is %d", moe_type_name((moe_type)type), k, block * 16 + j,
                          line[moe_q8_index(cols - k0, j, k - k0)]);
            free(line), free_linear(&c);
        }
    }
}

#if MOE_AMX
MOE_AMX_TARGET static void expand(const moe_matrix *m, size_t block, size_t k0, size_t k1, int8_t *out) {
    moe_amx_expand(m, block, k0, k1, out, m->bits);
}

/* The vector code around AMX tiles uses AVX-512 if available, and plain C under emulation. */
TEST(amx_expands_and_finishes_like_portable) {
    static const moe_type types[] = { MOE_TYPE_Q4, MOE_TYPE_Q4M, MOE_TYPE_Q3, MOE_TYPE_Q2 };
    uint64_t random = 54;
#ifndef ISA_EMU_H
    if (!moe_avx512vnni_available()) skip();
#endif
    for (size_t round = 0; round < mw_rounds(200); round++) {
        const size_t rows = 1 + mw_below(&random, 16), in = 1 + mw_below(&random, 300), out = 1 + mw_below(&random, 60),
                     block = (out - 1) / 16;
        const moe_type type = types[round / 2 % 4];
        linear_case c = make_linear(&random, type, rows, in, out, (int)(round % 3), round % 2 ? MIXED : BROKEN);
        const size_t cols = c.matrix.cols_padded, k0 = mw_below(&random, cols / 64) * 64,
                     n = (rows - 1) * c.y_stride + out;
        const int blocks = c.linear.scales == NULL || type == MOE_TYPE_Q4M;
        float *floats = (float *)(void *)mw_zeros(rows * 64);
        int8_t *line = aligned_alloc(64, (cols - k0) * 16); /* 64 columns of 16 rows have 1024 bytes */
        int32_t *sums = mw_zeros(rows * 64);
        float *y = guarded(n);
        assert_non_null(line);
        expand(&c.matrix, block, k0, cols, line);
        for (size_t k = k0; k < cols; k++)
            for (size_t j = 0; j < 16; j++)
                CHECK(line[moe_q8_index(cols - k0, j, k - k0)] == moe_matrix_code(&c.matrix, block * 16 + j, k),
                      "column %zu of output %zu is %d", k, block * 16 + j, line[moe_q8_index(cols - k0, j, k - k0)]);
        for (size_t i = 0; i < rows * 16; i++) sums[i] = (int32_t)mw_next(&random) >> mw_below(&random, 30);
        for (size_t i = 0; i < rows * 16; i++) floats[i] = number(&random, MIXED);
        c.linear.w = &c.matrix;
        c.linear.y = y;
        MOE_NAME(moe_finish_, MOE_AMX_REST)
        (&c.linear, 0, block, rows, 1, blocks ? (const void *)floats : (const void *)sums);
        for (size_t i = 0; i < n; i++) {
            const size_t r = i / c.y_stride, j = i % c.y_stride;
            if (j >= block * 16 && j < out) {
                const float product = blocks ? floats[r * 16 + j % 16] * c.matrix.scales[j]
                                             : (float)sums[r * 16 + j % 16] * (c.scales[r] * c.matrix.scales[j]);
                const float want = product + moe_linear_addend(&c.linear, r, j);
                CHECK(same(y[i], c.linear.relu ? moe_reluf(want) : want), "output %zu of row %zu: %a", j, r,
                      (double)y[i]);
            } else {
                CHECK(moe_to_bits(y[i]) == GUARD, "wrote out of bounds, at row %zu column %zu", r, j);
            }
        }
        free(line), free(sums), free(floats), free(y), free_linear(&c);
    }
}
#endif

#ifdef ISA_EMU_H /* only in test_kernels-emulated (Makefile) */
TEST(amx_linear_configures_once_multiplies_minimally_and_releases) {
    uint64_t random = 53;
    for (size_t rows = 1; rows <= 67; rows++)
        for (uint32_t type = MOE_TYPE_Q8; type < MOE_TYPE_COUNT; type++) {
            const size_t in = 1 + mw_below(&random, 200), out = 1 + mw_below(&random, 150),
                         blocks = moe_divide_up(out, 16);
            linear_case c = make_linear(&random, (moe_type)type, rows, in, out, 0, PLAIN);
            const size_t least = c.matrix.bits == 8 ? MOE_AMX_ROWS : MOE_AMX_ROWS_Q4;
            const size_t tiles = rows < least ? 0 : rows <= 16 ? 1 : rows <= 32 ? 2 : rows <= 64 ? 4 : 6;
            const size_t configurations = amx.configurations, products = amx.products;
            compare_linear(&moe_kernels_amx, &c, 0, rows, 0, blocks);
            CHECK(amx.palette == 0, "%zu rows: tiles were not released", rows);
            CHECK(amx.configurations - configurations == (tiles > 0), "%zu rows: %zu configurations", rows,
                  amx.configurations - configurations);
            CHECK(amx.products - products == tiles * blocks * c.matrix.cols_padded / 64,
                  "%zu rows, %zu blocks, %zu columns: %zu products", rows, blocks, c.matrix.cols_padded,
                  amx.products - products);
            free_linear(&c);
        }
}

static void set_tile(moe_tile_config *config, int t, size_t rows, size_t colsb) {
    config->rows[t] = (uint8_t)rows;
    config->colsb[t] = (uint16_t)colsb;
}

/* The emulator must fault and multiply like a processor. */
TEST(amx_emulation_follows_the_manual) {
    static const struct {
        int tile;
        size_t rows, colsb;
    } bad[] = { { 0, 17, 64 }, { 7, 16, 65 }, { 3, 0, 64 }, { 3, 5, 0 }, { 8, 16, 64 }, { 15, 1, 4 } };
    moe_tile_config config = { .palette = 1 };
    uint8_t bytes[16 * 64], back[16 * 64];
    int32_t sum;
#define FAULTS(statement)                                              \
    do {                                                               \
        const size_t faults_before = amx.faults;                       \
        amx.expect_fault = 1;                                          \
        statement;                                                     \
        amx.expect_fault = 0;                                          \
        CHECK(amx.faults > faults_before, "no fault: %s", #statement); \
    } while (0)
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(i * 7 + 3);
    amx_release();
    FAULTS(amx_zero(0));
    FAULTS(amx_loadd(0, bytes, 64));
    for (size_t i = 0; i < MOE_COUNT(bad); i++) {
        moe_tile_config broken = config;
        set_tile(&broken, bad[i].tile, bad[i].rows, bad[i].colsb);
        FAULTS(amx_loadconfig(&broken));
    }
    config.palette = 2;
    FAULTS(amx_loadconfig(&config));
    config.palette = 1;
    config.reserved[13] = 1;
    FAULTS(amx_loadconfig(&config));
    config.reserved[13] = 0;
    set_tile(&config, 0, 3, 8);  /* C has 3 rows of 2 numbers */
    set_tile(&config, 1, 3, 12); /* A has 3 rows of 12 bytes */
    set_tile(&config, 2, 3, 8);  /* B has 3 groups of 4 rows, 2 columns */
    set_tile(&config, 3, 2, 12);
    set_tile(&config, 4, 3, 10);
    amx_loadconfig(&config);
    FAULTS(amx_zero(5));
    FAULTS(amx_dpbssd(0, 1, 5));
    FAULTS(amx_dpbssd(0, 1, 1));
    FAULTS(amx_dpbssd(0, 0, 2));
    FAULTS(amx_dpbssd(0, 3, 2)); /* A has 2 rows, C has 3 */
    FAULTS(amx_dpbssd(0, 2, 1)); /* A has 2 groups of columns, B has 3 */
    FAULTS(amx_dpbssd(1, 1, 2));
    FAULTS(amx_dpbssd(4, 1, 2)); /* rows of 10 bytes */
    amx_zero(0);
    amx_loadd(1, bytes, 64);
    amx_loadd(2, bytes + 512, 16);
    amx_dpbssd(0, 1, 2);
    amx_dpbssd(0, 1, 2);
    memset(back, 0x55, sizeof back);
    amx_stored(0, back, 32);
    for (size_t m = 0; m < 3; m++)
        for (size_t n = 0; n < 2; n++) {
            int32_t want = 0;
            for (size_t k = 0; k < 12; k++)
                want += 2 * (int8_t)bytes[m * 64 + k] * (int8_t)bytes[512 + k / 4 * 16 + 4 * n + k % 4];
            memcpy(&sum, back + m * 32 + 4 * n, 4);
            assert_int_equal(sum, want);
        }
    for (size_t i = 0; i < sizeof back; i++) assert_true((i < 96 && i % 32 < 8) || back[i] == 0x55);
    amx_release();
#undef FAULTS
}
#endif

static float largest(const float *x, size_t n) {
    float most = 0;
    for (size_t i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    return most;
}

/* Return the part (F16 scale) of a block of 64 columns in a row, as described in section Number formats. */
static float part_of(const moe_matrix *m, size_t row, size_t col) {
    const size_t sides = m->type == MOE_TYPE_Q4M ? 6 : 2;
    const unsigned char *side = (const unsigned char *)m->data;
    side += mw_up(m->rows, 16) * m->cols_padded / (m->type == MOE_TYPE_Q4M ? 2 : 1);
    side += ((row / 16 * (m->cols_padded / 64) + col / 64) * sides + sides - 2) * 16 + row % 16;
    return moe_f16_to_f32((uint16_t)(side[0] + 256 * side[16]));
}

/* Check the layout of Q4, Q4M and Q8B against the start of section Number formats, with a separate decoder. */
static void layout(uint32_t type, uint64_t *random) {
    const size_t out = 1 + mw_below(random, 40), in = 1 + mw_below(random, 150), rows = mw_up(out, 16),
                 cols = mw_up(in, 64), sides = type == MOE_TYPE_Q4M ? 6 : 2,
                 codes = type == MOE_TYPE_Q8B ? rows * cols : rows * cols / 2, bytes = rows * cols / 64 * sides;
    float *w = numbers(random, out * in, PLAIN), *back = mw_zeros(in * 4);
    int8_t *scratch = mw_zeros(2 * cols), *blob = mw_zeros((size_t)moe_matrix_bytes(type, out, in));
    int8_t *side = blob + codes;
    const float *scales = (const float *)(const void *)(side + bytes);
    const int32_t *sums = (const int32_t *)(const void *)(scales + rows);
    const moe_matrix m = moe_matrix_view(type, out, in, blob);
    assert_int_equal(moe_matrix_bytes(type, out, in), codes + bytes + 8 * rows);
    for (size_t r = 0; r < out; r++) moe_pack_row(type, out, in, r, w + r * in, blob, scratch);
    for (size_t r = 0; r < out; r++) {
        int exponent;
        int32_t sum = 0;
        if (type == MOE_TYPE_Q8B) assert_true(frexpf(scales[r], &exponent) == 0.5f);
        else assert_true(scales[r] == largest(w + r * in, in) / (type == MOE_TYPE_Q4 ? 120.0f : 16.0f));
        moe_matrix_row(&m, r, back);
        for (size_t c = 0; c < cols; c++) {
            const int8_t *at = side + ((r / 16 * (cols / 64) + c / 64) * sides + c / 32 % 2) * 16 + r % 16;
            const unsigned char byte = (unsigned char)blob[(r / 16 * (cols / 8) + c / 8) * 64 + r % 16 * 4 + c % 4];
            const int nibble = ((c % 8 < 4 ? byte : byte >> 4) & 15) - 8,
                      code = type == MOE_TYPE_Q8B  ? blob[(r / 16 * (cols / 4) + c / 4) * 64 + r % 16 * 4 + c % 4]
                             : type == MOE_TYPE_Q4 ? nibble * at[0]
                                                   : nibble * at[0] + at[32];
            const float step = scales[r] * (type == MOE_TYPE_Q4 ? 1 : part_of(&m, r, c));
            /* In Q4, the error is at most one step of the largest sub (15), since codes range from -8 to 7. In Q4M,
             * rounding the sub adds .5 per step for up to 8 steps. In Q8B, rounding down 127 steps adds .06. */
            const float most = type == MOE_TYPE_Q8B ? 0.57f : type == MOE_TYPE_Q4 ? 15.1f : (float)at[0] * 0.51f + 4.6f;
            assert_true(code >= -127 && code <= 127);
            if (type == MOE_TYPE_Q4) assert_true(at[0] >= -15 && at[0] <= 15 && (c < in || nibble == 0));
            if (type == MOE_TYPE_Q4M) assert_true(at[0] >= 0 && at[0] <= 16);
            if (type == MOE_TYPE_Q8B && c < in) {
                const float amax = largest(w + r * in + c / 64 * 64, moe_min(64, in - c / 64 * 64));
                assert_true(fabsf(step - amax / 127.0f) <= amax / 127.0f / 2048.0f);
            }
            sum += code;
            if (c >= in) continue;
            assert_true(back[c] == (float)code * step);
            CHECK(fabsf(back[c] - w[r * in + c]) <= most * step, "type %u, row %zu, column %zu: %g became %g", type, r,
                  c, (double)w[r * in + c], (double)back[c]);
        }
        assert_int_equal(sums[r], sum);
    }
    for (int high = 0x7c; type != MOE_TYPE_Q4 && high < 256; high += 4) { /* infinity, then a negative number */
        assert_int_equal(moe_broken_scale(&m), high == 0x7c ? out : out / 2);
        side[((out / 2 / 16 * (cols / 64) + cols / 64 - 1) * sides + sides - 1) * 16 + out / 2 % 16] = (int8_t)high;
        assert_int_equal(moe_broken_scale(&m), out / 2);
    }
    free(w), free(back), free(scratch), free(blob);
}

TEST(quantised_rows_match_their_description) {
    static const uint32_t types[] = { MOE_TYPE_Q4, MOE_TYPE_Q4M, MOE_TYPE_Q8B };
    uint64_t random = 49;
    for (size_t round = 0; round < 3 * mw_rounds(60); round++) layout(types[round % 3], &random);
}

/* Numbers that had a scale and a minimum per 32 columns keep their codes, even if not all codes occur. Errors are less
 * than half a step, and their mean square is less than a tenth of 1/12, that of rounding to whole steps. */
TEST(q4m_keeps_the_codes_of_a_scale_and_a_minimum) {
    uint64_t random = 62;
    double squares = 0;
    const size_t rounds = 200;
    for (size_t round = 0; round < rounds; round++) {
        float w[64], back[64], step[2], low = 0;
        int8_t scratch[128];
        unsigned char *blob = mw_zeros((size_t)moe_matrix_bytes(MOE_TYPE_Q4M, 1, 64));
        const moe_matrix m = moe_matrix_view(MOE_TYPE_Q4M, 1, 64, blob);
        for (size_t c = 0; c < 64; c++) {
            if (c % 32 == 0) {
                step[c / 32] = (1.0f + (float)mw_below(&random, 1024) / 1024.0f) / 256.0f;
                low = -step[c / 32] * (5.0f + (float)mw_below(&random, 1024) / 256.0f);
            }
            w[c] = low + step[c / 32] * (float)(c % 32 < 4 ? c % 32 : 1 + mw_below(&random, 13));
        }
        moe_pack_row(MOE_TYPE_Q4M, 1, 64, 0, w, blob, scratch);
        moe_matrix_row(&m, 0, back);
        for (size_t c = 0; c < 64; c++) {
            const double error = ((double)back[c] - (double)w[c]) / (double)step[c / 32];
            squares += error * error / (double)(64 * rounds);
            CHECK(fabs(error) < 0.5, "round %zu, column %zu: %g became %g, a step is %g", round, c, (double)w[c],
                  (double)back[c], (double)step[c / 32]);
        }
        free(blob);
    }
    CHECK(squares < 1.0 / 120, "the mean squared error is %g of a step", squares);
}

/* Numbers that were codes times an F16 scale are exact. In the last block, whose second half had a smaller scale,
 * errors are at most half a step. Blocks of zeros, or of numbers too small for an F16 scale, become zeros. */
TEST(q8b_keeps_the_codes_of_an_f16_scale) {
    enum { COLS = 5 * 64 };
    uint64_t random = 65;
    for (size_t round = 0; round < 200; round++) {
        float w[COLS], back[COLS], step = 0;
        int8_t scratch[2 * COLS];
        unsigned char *blob = mw_zeros((size_t)moe_matrix_bytes(MOE_TYPE_Q8B, 1, COLS));
        const moe_matrix m = moe_matrix_view(MOE_TYPE_Q8B, 1, COLS, blob);
        for (size_t c = 0; c < COLS; c++) {
            if (c % 64 == 0) step = moe_f16_to_f32((uint16_t)(0x1800 + mw_below(&random, 0x1000)));
            if (c == COLS - 32) step = moe_f16_to_f32(0x1400);
            w[c] = step * (float)(c % 64 ? (int)mw_below(&random, 255) - 127 : 127);
            if (c / 64 == 2) w[c] = round % 2 ? 0.0f : step * 0x1p-60f;
        }
        moe_pack_row(MOE_TYPE_Q8B, 1, COLS, 0, w, blob, scratch);
        moe_matrix_row(&m, 0, back);
        for (size_t c = 0; c < COLS; c++) {
            const float step_of_block = w[c / 64 * 64] / 127.0f;
            if (c / 64 == 2) assert_true(back[c] == 0.0f);
            else if (c < COLS - 32) assert_true(back[c] == w[c]);
            else assert_true(fabsf(back[c] - w[c]) <= 0.5f * step_of_block);
        }
        free(blob);
    }
}

/* Decode Q3 and Q2 as described in section Number formats, and search the best sub of a group with other code. */
static void low_layout(int bits, uint64_t *random) {
    static const int eight[] = { -4, -3, -2, -1, 0, 1, 2, 3 }, four[] = { -8, -3, 1, 6 };
    const int *levels = bits == 3 ? eight : four, most = bits == 3 ? 30 : 15;
    const moe_type type = bits == 3 ? MOE_TYPE_Q3 : MOE_TYPE_Q2;
    const size_t out = 1 + mw_below(random, 40), in = 1 + mw_below(random, 150), rows = mw_up(out, 16),
                 cols = mw_up(in, 64), codes = rows * cols * (size_t)bits / 8;
    float *w = mw_zeros(out * in * 4), *back = mw_zeros(in * 4);
    for (size_t i = 0; i < out * in; i++) { /* nearly a normal distribution: outliers would need smaller subs */
        const float x = mw_uniform(random, -1, 1);
        w[i] = x * x * x;
    }
    int8_t *scratch = mw_zeros(2 * cols), *blob = mw_zeros((size_t)moe_matrix_bytes(type, out, in));
    const int8_t *subs = blob + codes;
    const float *scales = (const float *)(const void *)(subs + rows * cols / 32);
    const int32_t *sums = (const int32_t *)(const void *)(scales + rows);
    const moe_matrix m = moe_matrix_view(type, out, in, blob);
    assert_int_equal(moe_matrix_bytes(type, out, in), codes + rows * cols / 32 + 8 * rows);
    for (size_t r = 0; r < out; r++) moe_pack_row(type, out, in, r, w + r * in, blob, scratch);
    for (size_t r = 0; r < out; r++) {
        int32_t sum = 0;
        assert_true(scales[r] == largest(w + r * in, in) / 120.0f);
        moe_matrix_row(&m, r, back);
        for (size_t group = 0; group < cols; group += 32) {
            const size_t at = r / 16 * (cols / 32) + group / 32;
            const unsigned char *bytes = (const unsigned char *)blob + at * 64 * (size_t)bits + r % 16 * 4;
            const int sub = subs[at * 16 + r % 16];
            double error = 0, least = 1e30;
            assert_true(sub >= -most && sub <= most && (group < in || sub == 0));
            for (size_t c = 0; c < 32; c++) {
                const size_t i = c % 4, unit = c / 4;
                const int index = bits == 2  ? bytes[unit / 4 * 64 + i] >> unit % 4 * 2 & 3
                                  : unit < 6 ? bytes[unit / 2 * 64 + i] >> unit % 2 * 3 & 7
                                             : bytes[(unit - 6) * 64 + i] >> 6 | (bytes[128 + i] >> unit & 1) << 2,
                          code = levels[index] * sub;
                sum += code;
                if (group + c >= in) continue;
                assert_true(back[group + c] == (float)code * scales[r]);
                error += pow((double)back[group + c] - (double)w[r * in + group + c], 2);
            }
            for (int s = -most; s <= most; s++) {
                double sums_of = 0;
                for (size_t c = group; c < moe_min(in, group + 32); c++) {
                    double best = 1e30;
                    for (int i = 0; i < 1 << bits; i++)
                        best = fmin(best, fabs(levels[i] * s * (double)scales[r] - (double)w[r * in + c]));
                    sums_of += best * best;
                }
                least = fmin(least, sums_of);
            }
            if (group + 32 <= in) /* padding counts as zeros, which Q2 lacks */
                CHECK(error <= least * 1.01, "q%d, row %zu: error %g, but %g is possible", bits, r, error, least);
        }
        assert_int_equal(sums[r], sum);
    }
    free(w), free(back), free(scratch), free(blob);
}

TEST(q3_and_q2_match_their_description_and_the_best_subs) {
    static const moe_type types[] = { MOE_TYPE_Q4, MOE_TYPE_Q3, MOE_TYPE_Q2 };
    static const uint32_t wanted[] = { 0x26275b10u, 0xec6bb63du, 0x717f3041u }; /* CRC-32 of a matrix in these types */
    uint64_t random = 72;
    float *w = numbers(&random, 20 * 150, PLAIN);
    for (size_t i = 0; i < MOE_COUNT(types); i++) {
        int8_t scratch[2 * 192];
        const size_t bytes = (size_t)moe_matrix_bytes(types[i], 20, 150);
        unsigned char *blob = mw_zeros(bytes);
        for (size_t r = 0; r < 20; r++) moe_pack_row(types[i], 20, 150, r, w + r * 150, blob, scratch);
        CHECK(moe_crc32(0, blob, bytes) == wanted[i], "%s: 0x%08xu", moe_type_name(types[i]),
              (unsigned)moe_crc32(0, blob, bytes));
        free(blob);
    }
    free(w);
    for (size_t round = 0; round < 2 * mw_rounds(40); round++) low_layout(2 + (int)round % 2, &random);
}

/* Subs in a hostile file may be unlike those of any quantiser. Results are arbitrary, but memory accesses are valid. */
TEST(linear_q4_survives_hostile_subs) {
    uint64_t random = 50;
    for (size_t isa = 0; isa < 1 || isa_at(isa); isa++)
        for (size_t rows = 1; rows < 40; rows += 12) {
            const moe_type type = rows % 24 == 1 ? MOE_TYPE_Q4 : MOE_TYPE_Q4M;
            linear_case c = make_linear(&random, type, rows, 2048, 32, 0, PLAIN);
            int8_t *subs = (int8_t *)c.blob + 32 * 2048 / 2;
            float *y = guarded(rows * c.y_stride);
            for (size_t i = 0; i < 32 * 2048 / 64 * c.matrix.sides; i++) subs[i] = (int8_t)mw_below(&random, 256);
            c.linear.w = &c.matrix;
            c.linear.y = y;
            (isa_at(isa) ? isa_at(isa) : oracle)->linear(&c.linear, 0, rows, 0, 2);
            for (size_t i = 0; i < rows; i++) assert_true(moe_to_bits(y[i * c.y_stride + 31]) != GUARD);
            free(y), free_linear(&c);
        }
}

TEST(linear_writes_only_its_rows_and_blocks) {
    uint64_t random = 45;
    for (size_t isa = 0; isa < 1 || isa_at(isa); isa++)
        for (uint32_t type = 0; type < MOE_TYPE_COUNT; type++)
            for (size_t round = 0; round < mw_rounds(100); round++) {
                const size_t rows = 1 + mw_below(&random, 40), in = 1 + mw_below(&random, 90),
                             out = 1 + mw_below(&random, 90);
                const size_t blocks = moe_divide_up(out, 16), row0 = mw_below(&random, rows),
                             block0 = mw_below(&random, blocks);
                linear_case c = make_linear(&random, (moe_type)type, rows, in, out, (int)mw_below(&random, 3), PLAIN);
                compare_linear(isa_at(isa) ? isa_at(isa) : oracle, &c, row0, row0 + 1 + mw_below(&random, rows - row0),
                               block0, block0 + 1 + mw_below(&random, blocks - block0));
                free_linear(&c);
            }
}

/* Results of portable kernels are close to exact results. */
TEST(portable_linear_computes_wx_plus_addend) {
    uint64_t random = 46;
    for (uint32_t type = 0; type < MOE_TYPE_COUNT; type++)
        for (size_t round = 0; round < mw_rounds(150); round++) {
            const size_t rows = 1 + mw_below(&random, 9), in = 1 + mw_below(&random, 200),
                         out = 1 + mw_below(&random, 60);
            const int addend = (int)mw_below(&random, 3);
            linear_case c = make_linear(&random, (moe_type)type, rows, in, out, addend, PLAIN);
            float *y = guarded(rows * c.y_stride), *w = mw_zeros(in * 4);
            c.linear.w = &c.matrix;
            c.linear.y = y;
            oracle->linear(&c.linear, 0, rows, 0, moe_divide_up(out, 16));
            for (size_t j = 0; j < out; j++) {
                moe_matrix_row(&c.matrix, j, w);
                for (size_t r = 0; r < rows; r++) {
                    const int8_t *codes = c.codes ? c.codes + r * moe_code_bytes(in) : NULL;
                    double want = addend == 1   ? (double)c.bias[j]
                                  : addend == 2 ? (double)c.add[r * c.add_stride + j]
                                                : 0,
                           size = fabs(want);
                    for (size_t k = 0; k < in; k++) {
                        const float scale = c.linear.scales ? c.scales[r]
                                            : codes ? moe_block_scale(codes + moe_scales_at(&c.linear) + k / 64 * 4)
                                                    : 1.0f;
                        const double x = moe_type_quantised((moe_type)type) ? (double)codes[k] * (double)scale
                                                                            : (double)c.x[r * c.x_stride + k];
                        want += x * (double)w[k];
                        size += fabs(x * (double)w[k]);
                    }
                    if (c.linear.relu && want < 0) want = 0;
                    CHECK(fabs((double)y[r * c.y_stride + j] - want) <= 2e-6 * size + 1e-30, "%s: %g, exactly %g",
                          moe_type_name((moe_type)type), (double)y[r * c.y_stride + j], want);
                }
            }
            free(y), free(w), free_linear(&c);
        }
}

/* Scales by block follow the description of moe_linear: each block is quantised like a row, its sum is exact, and the
 * floats are added from the first block to the last. */
TEST(linear_adds_blocks_in_order) {
    uint64_t random = 58;
    for (uint32_t type = MOE_TYPE_Q8; type < MOE_TYPE_COUNT; type++)
        for (size_t round = 0; round < mw_rounds(60); round++) {
            const size_t in = 1 + mw_below(&random, 400), out = 1 + mw_below(&random, 40), rows = 3;
            linear_case c = make_linear(&random, (moe_type)type, rows, in, out, (int)(round % 3), MIXED);
            float *y = guarded((rows - 1) * c.y_stride + out);
            quantise_linear(&c, 1);
            c.linear.w = &c.matrix;
            c.linear.y = y;
            oracle->linear(&c.linear, 0, rows, 0, moe_divide_up(out, 16));
            for (size_t r = 0; r < rows; r++)
                for (size_t j = 0; j < out; j++) {
                    float want = 0.0f;
                    for (size_t k = 0; k < in; k += 64) {
                        const size_t n = moe_min(64, in - k);
                        int8_t block[128] __attribute__((aligned(4)));
                        const float scale = moe_quantise_portable(c.x + r * c.x_stride + k, n, block);
                        int32_t sum = 0;
                        for (size_t i = 0; i < n; i++) sum += block[i] * moe_matrix_code(&c.matrix, j, k + i);
                        want = want + (float)sum * (c.matrix.parts ? scale * part_of(&c.matrix, j, k) : scale);
                    }
                    want = want * c.matrix.scales[j] + moe_linear_addend(&c.linear, r, j);
                    if (c.linear.relu) want = moe_reluf(want);
                    CHECK(same(y[r * c.y_stride + j], want), "%s [%zu, %zu], output %zu of row %zu: %a, by hand %a",
                          moe_type_name((moe_type)type), out, in, j, r, (double)y[r * c.y_stride + j], (double)want);
                }
            free(y), free_linear(&c);
        }
}

TEST(quantise_blocks_is_the_same_on_every_isa) {
    uint64_t random = 59;
    for (size_t isa = 0; isa_at(isa); isa++)
        for (size_t w = 0; w < WIDTHS; w++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t n = width_at(w), bytes = moe_code_bytes(n);
                float *x = numbers(&random, n, kind);
                int8_t *a = mw_zeros(bytes), *b = mw_zeros(bytes);
                moe_quantise_blocks(oracle->quantise, x, n, a);
                moe_quantise_blocks(isa_at(isa)->quantise, x, n, b);
                CHECK(memcmp(a, b, bytes) == 0, "%s, n %zu, kind %d: other codes, sums or scales", isa_at(isa)->name, n,
                      kind);
                free(x), free(a), free(b);
            }
}

/* Products of extreme codes are exact, including those of -128, which no quantiser writes. */
TEST(linear_q8_never_saturates) {
    static const int8_t extremes[] = { -128, -127, 127, 0 };
    for (size_t isa = 0; isa < 1 || isa_at(isa); isa++)
        for (size_t a = 0; a < MOE_COUNT(extremes); a++)
            for (int b = -127; b <= 127; b += 254) {
                const size_t in = 1024, out = 16;
                unsigned char *blob = mw_zeros(mw_matrix_bytes(MW_Q8, out, in));
                int8_t *codes = mw_zeros(moe_code_bytes(in));
                float scale = 1, y[16], *scales = (float *)(void *)(blob + in * out);
                moe_matrix m = moe_matrix_view(MOE_TYPE_Q8, out, in, blob);
                moe_linear l = { .w = &m, .codes = codes, .scales = &scale, .y = y, .y_stride = 16 };
                for (size_t i = 0; i < in * out; i++) blob[i] = (unsigned char)extremes[a];
                for (size_t i = 0; i < in; i++) codes[i] = (int8_t)b;
                for (size_t i = 0; i < in / 32; i++) moe_code_sums(codes, in)[i] = (int16_t)(32 * b);
                for (size_t i = 0; i < out; i++) scales[i] = 1;
                (isa_at(isa) ? isa_at(isa) : oracle)->linear(&l, 0, 1, 0, 1);
                for (size_t i = 0; i < 16; i++) assert_true(y[i] == (float)((int)in * b * extremes[a]));
                free(blob), free(codes);
            }
}

/* The result of a row must depend neither on other rows of the batch nor on how threads split a job. */
TEST(linear_rows_do_not_depend_on_other_rows) {
    uint64_t random = 47;
    for (size_t isa = 0; isa < 1 || isa_at(isa); isa++)
        for (uint32_t type = 0; type < MOE_TYPE_COUNT; type++)
            for (size_t round = 0; round < mw_rounds(30); round++) {
                const size_t rows = 9, in = 1 + mw_below(&random, 90), out = 1 + mw_below(&random, 40),
                             blocks = moe_divide_up(out, 16);
                linear_case c = make_linear(&random, (moe_type)type, rows, in, out, 2, PLAIN);
                const moe_kernels *k = isa_at(isa) ? isa_at(isa) : oracle;
                float *whole = guarded(rows * c.y_stride), *parts = guarded(rows * c.y_stride);
                c.linear.w = &c.matrix;
                c.linear.y = whole;
                k->linear(&c.linear, 0, rows, 0, blocks);
                c.linear.y = parts;
                for (size_t r = 0; r < rows; r++)
                    for (size_t b = 0; b < blocks; b++) k->linear(&c.linear, r, r + 1, b, b + 1);
                assert_memory_equal(whole, parts, rows * c.y_stride * 4);
                free(whole), free(parts), free_linear(&c);
            }
}

TEST(isas_are_listed_named_and_chosen) {
    const moe_kernels *k = NULL;
    moe_error e;
    char names[64] = "";
    for (size_t i = 0; i < MOE_COUNT(moe_isas); i++) {
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? " " : "", moe_isas[i]->name);
        assert_ptr_equal(moe_kernels_for(moe_isas[i], 0), moe_isas[i]);
        assert_ptr_equal(moe_kernels_for(moe_isas[i], 48 << 10), moe_isas[i]);
        k = moe_kernels_for(moe_isas[i], 32 << 10);
        assert_true(k == (moe_isas[i]->small ? moe_isas[i]->small : moe_isas[i]));
        assert_string_equal(k->name, moe_isas[i]->name);
        if (moe_isa_available(moe_isas[i]->name)) {
            assert_int_equal(moe_choose_kernels(moe_isas[i]->name, &k, &e), MOE_OK);
            assert_ptr_equal(k, moe_kernels_for(moe_isas[i], moe_l1_bytes()));
        } else {
            assert_int_equal(moe_choose_kernels(moe_isas[i]->name, &k, &e), MOE_ERROR_UNSUPPORTED);
            assert_string_equal(e.where, "isa");
        }
    }
    assert_string_equal(names, moe_isa_names());
    assert_int_equal(moe_choose_kernels(NULL, &k, &e), MOE_OK);
    assert_int_equal(moe_choose_kernels("auto", &k, &e), MOE_OK);
    assert_int_equal(moe_choose_kernels("", &k, &e), MOE_OK);
    assert_int_equal(moe_choose_kernels("avx9", &k, &e), MOE_ERROR_ARGUMENT);
    assert_non_null(strstr(e.message, "avx9"));
    assert_non_null(strstr(e.message, "portable"));
    assert_false(moe_isa_available("avx9"));
    assert_false(moe_isa_available(""));
}

/* ---- Threads ---- */

typedef struct pool_check {
    atomic_uint runs[600];
    atomic_uint bad_thread;
    size_t threads;
} pool_check;

static void pool_task(void *arg, size_t task, size_t thread) {
    pool_check *check = arg;
    atomic_fetch_add(&check->runs[task], 1);
    if (thread >= check->threads) atomic_fetch_add(&check->bad_thread, 1);
}

static moe_pool *start_pool(size_t threads) {
    moe_pool *pool = mw_zeros(sizeof *pool);
    moe_error e;
    assert_int_equal(moe_pool_start(pool, MOE_WASM ? 1 : threads, &e), MOE_OK);
    return pool;
}

static void stop_pool(moe_pool *pool) {
    moe_pool_free(pool, pool->count);
    free(pool);
}

TEST(pool_runs_every_task_exactly_once) {
    uint64_t random = 51;
    static pool_check check;
    for (size_t threads = 1; threads <= 8; threads++) {
        moe_pool *pool = start_pool(threads);
        check.threads = threads;
        for (size_t round = 0; round < mw_rounds(300); round++) {
            const size_t tasks = mw_below(&random, 8) ? mw_below(&random, 20) : mw_below(&random, 600);
            memset(&check.runs, 0, sizeof check.runs);
            moe_pool_run(pool, tasks, pool_task, &check);
            for (size_t i = 0; i < 600; i++)
                CHECK(check.runs[i] == (i < tasks), "%zu threads, task %zu of %zu ran %u times", threads, i, tasks,
                      check.runs[i]);
        }
        assert_int_equal(check.bad_thread, 0);
        stop_pool(pool);
    }
}

static void pool_task_sum(void *arg, size_t task, size_t thread) {
    (void)thread;
    atomic_fetch_add((atomic_size_t *)arg, task + 1);
}

/* Workers that wake late must run neither tasks of a finished job nor tasks of the next job with the old function. */
TEST(pool_survives_thousands_of_tiny_jobs) {
    const size_t jobs = mw_rounds(20000);
    for (size_t threads = 2; threads <= 8; threads += 3) {
        moe_pool *pool = start_pool(threads);
        atomic_size_t sums[2];
        atomic_init(&sums[0], 0);
        atomic_init(&sums[1], 0);
        for (size_t i = 0; i < jobs; i++) moe_pool_run(pool, 2 + i % 3, pool_task_sum, &sums[i % 2]);
        size_t want[2] = { 0, 0 };
        for (size_t i = 0; i < jobs; i++) want[i % 2] += (2 + i % 3) * (3 + i % 3) / 2;
        assert_int_equal(atomic_load(&sums[0]), want[0]);
        assert_int_equal(atomic_load(&sums[1]), want[1]);
        stop_pool(pool);
    }
}

TEST(pool_wakes_sleepers_and_stops_while_they_sleep) {
    static pool_check check;
    const struct timespec pause = { 0, 2000000 };
    for (size_t threads = 2; threads <= 8; threads += 2) {
        moe_pool *pool = start_pool(threads);
        check.threads = threads;
        for (int round = 0; round < 8; round++) {
            nanosleep(&pause, NULL); /* exceeds the time that workers spin */
            memset(&check.runs, 0, sizeof check.runs);
            moe_pool_run(pool, 40, pool_task, &check);
            for (size_t i = 0; i < 600; i++) assert_int_equal(check.runs[i], i < 40);
        }
        if (threads & 2) nanosleep(&pause, NULL);
        stop_pool(pool);
    }
    for (int round = 0; round < 100; round++) stop_pool(start_pool(4)); /* stop a pool before any worker has started */
}

/* ---- Planner ---- */

enum { GRAPH_NODES = 160 };

typedef struct graph_case {
    moe_graph graph;
    moe_node nodes[GRAPH_NODES];
    moe_matrix matrices[8];
    void *blobs[8];
    float *states[4];
    moe_cell cells[2];
    moe_gating gating;
    moe_experts experts[2];
    moe_attention_op attention;
} graph_case;

/* Return a random graph. `runnable` restricts it to ops that run without a model. */
static graph_case *random_graph(uint64_t *random, size_t rows, size_t nodes, int runnable) {
    static const size_t widths[] = { 5, 16, 40 };
    graph_case *c = mw_zeros(sizeof *c);
    moe_graph *g = &c->graph;
    moe_node *readable[GRAPH_NODES];
    size_t n = 0;
    g->nodes = c->nodes;
    g->capacity = GRAPH_NODES;
    g->rows = rows;
    g->threads = 3;
    g->sentences = 4;
    g->max_source = 10;
    for (size_t i = 0; i < 8; i++) { /* matrices of four shapes, each in F32 and Q8 */
        const moe_type type = i % 2 ? MOE_TYPE_Q8 : MOE_TYPE_F32;
        const size_t out = i < 2 ? 5 : i < 4 ? 16 : 40, in = i < 6 ? 16 : 5;
        int8_t scratch[64];
        c->blobs[i] = mw_zeros((size_t)moe_matrix_bytes(type, out, in));
        for (size_t r = 0; r < out; r++) {
            float *w = numbers(random, in, PLAIN);
            moe_pack_row(type, out, in, r, w, c->blobs[i], scratch);
            free(w);
        }
        c->matrices[i] = moe_matrix_view(type, out, in, c->blobs[i]);
    }
    for (size_t i = 0; i < 4; i++) c->states[i] = mw_zeros(rows * 200 * 4);
    for (size_t i = 0; i < 2; i++) {
        const moe_type type = i ? MOE_TYPE_Q8 : MOE_TYPE_F32;
        c->cells[i] = (moe_cell){ .w_x = { .type = type }, .hidden = 12, .state = 12 };
        c->experts[i] = (moe_experts){ .count = 5, .hidden = 12, .up = { .type = type, .rows = 12, .cols = 16 } };
    }
    c->gating = (moe_gating){ .kind = MOE_GATE_TOPK, .level = 5, .k = 2 };
    readable[n++] = moe_op_embed(g, &c->matrices[2], 1.0f, "embed");
    while (g->count + 4 < nodes) {
        moe_node *a = readable[mw_below(random, n)], *b = readable[mw_below(random, n)], *made = NULL;
        switch (mw_below(random, runnable ? 7 : 10)) {
        case 0: made = moe_op_gather(g, c->states[0], widths[mw_below(random, 3)], "gather"); break;
        case 1:
            if (a->cols == 16 || a->cols == 5) {
                const size_t which = a->cols == 16 ? mw_below(random, 6) : 6 + mw_below(random, 2);
                made = moe_op_linear(g, &c->matrices[which], a, NULL, "linear");
            }
            break;
        case 2:
            if (a->cols == b->cols) made = moe_op_pointwise(g, a, b, 0, "add");
            break;
        case 3:
            if (a->cols + b->cols < 200) made = moe_op_concat(g, a, b, "concat");
            break;
        case 4: made = moe_op_unary(g, (moe_unary)mw_below(random, 5), a, "unary"); break;
        case 5: {
            const size_t cols = a->cols >= 16 ? 16 : 5;
            if (a->cols >= cols) made = moe_op_view(g, a, mw_below(random, a->cols - cols + 1), cols, "view");
            break;
        }
        case 6:
            if (mw_below(random, 3) == 0)
                moe_op_store(g, a, MOE_BY_PARENT, c->states[1 + mw_below(random, 3)], "store");
            break;
        case 7:
            if (a->cols == 40) made = moe_op_lstm_layer(g, &c->cells[0], 0, a, "layer");
            else
                made = moe_op_lstm_step(g, &c->cells[mw_below(random, 2)], a, b, readable[mw_below(random, n)], "cell");
            break;
        case 8:
            if (a->cols == 5) made = moe_op_gate(g, &c->gating, a, NULL, 0, "layer", "gate");
            break;
        default:
            if (a->cols == 16 && b->op == MOE_OP_GATE)
                made = moe_op_experts(g, &c->experts[mw_below(random, 2)], a, b, "experts");
            else made = moe_op_attention(g, &c->attention, a, NULL, 16, "attention");
            break;
        }
        if (made) readable[n++] = made;
        if (n > 6 && mw_below(random, 3) == 0) readable[0] = readable[--n]; /* end the lifetime of some nodes */
    }
    return c;
}

static void free_graph(graph_case *c) {
    for (size_t i = 0; i < 8; i++) free(c->blobs[i]);
    for (size_t i = 0; i < 4; i++) free(c->states[i]);
    free(c);
}

/* Return the last node that reads node i, directly or through views, following the definition. */
static size_t last_reader(const moe_graph *g, size_t i) {
    size_t last = i;
    for (size_t r = i + 1; r < g->count; r++)
        for (size_t s = 0; s < MOE_COUNT(g->nodes[r].src); s++)
            if (g->nodes[r].src[s] == &g->nodes[i]) {
                const size_t through = g->nodes[r].op == MOE_OP_VIEW ? last_reader(g, r) : r;
                if (through > last) last = through;
            }
    return last;
}

static size_t needed_bytes(const moe_graph *g, const moe_node *t) {
    if (t->op == MOE_OP_VIEW || t->op == MOE_OP_STORE || !t->stride) return 0;
    return moe_is_codes(t) ? g->rows * moe_code_bytes(t->cols) + g->rows * 4 : g->rows * t->stride * 4;
}

typedef struct piece {
    size_t from, to, begin, end; /* first and last node; first byte, last byte + 1 */
} piece;

static void check_plan(const moe_graph *g) {
    piece *pieces = mw_zeros(2 * g->count * sizeof *pieces);
    size_t n = 0;
    for (size_t i = 0; i < g->count; i++) {
        const moe_node *t = &g->nodes[i];
        const size_t bytes = needed_bytes(g, t);
        if (bytes) pieces[n++] = (piece){ i, last_reader(g, i), t->offset, t->offset + bytes };
        if (t->work_bytes) pieces[n++] = (piece){ i, i, t->work_offset, t->work_offset + t->work_bytes };
    }
    for (size_t a = 0; a < n; a++) {
        CHECK(pieces[a].begin % 64 == 0, "a piece of node %zu starts at %zu", pieces[a].from, pieces[a].begin);
        CHECK(pieces[a].end <= g->bytes, "a piece of node %zu ends outside the arena", pieces[a].from);
        for (size_t b = a + 1; b < n; b++)
            CHECK(pieces[a].to < pieces[b].from || pieces[b].to < pieces[a].from || pieces[a].end <= pieces[b].begin ||
                      pieces[b].end <= pieces[a].begin,
                  "nodes %zu and %zu share memory while both live", pieces[a].from, pieces[b].from);
    }
    free(pieces);
}

TEST(planner_never_overlaps_live_tensors) {
    uint64_t random = 61;
    for (size_t round = 0; round < mw_rounds(400); round++) {
        graph_case *c = random_graph(&random, 1 + mw_below(&random, 20), 10 + mw_below(&random, 120), 0);
        moe_error e;
        assert_int_equal(moe_graph_plan(&c->graph, &e), MOE_OK);
        check_plan(&c->graph);
        free_graph(c);
    }
}

TEST(planner_reuses_memory_of_dead_tensors) {
    static moe_node nodes[64];
    float row[16] = { 0 };
    moe_matrix m = moe_matrix_view(MOE_TYPE_F32, 16, 16, row);
    moe_graph g = { .nodes = nodes, .capacity = 64, .rows = 10, .threads = 1 };
    moe_node *t = moe_op_embed(&g, &m, 1, "embed"), *first = t;
    moe_error e;
    for (int i = 0; i < 30; i++) t = moe_op_unary(&g, MOE_UNARY_TANH, t, "unary");
    assert_int_equal(moe_graph_plan(&g, &e), MOE_OK);
    assert_int_equal(g.bytes, 2 * 640); /* a chain needs memory for two nodes */
    check_plan(&g);
    moe_op_pointwise(&g, first, t, 0, "end"); /* keep the first node live until the end */
    assert_int_equal(moe_graph_plan(&g, &e), MOE_OK);
    assert_int_equal(g.bytes, 3 * 640);
    check_plan(&g);
}

/* In a chain, planning time per node must not grow with the number of preceding nodes. A planner that revisits all
 * preceding nodes would need 10^10 or even 10^15 visits here. */
TEST(planner_handles_long_chains) {
    enum { SCRATCHED = 1600, LONG = 100000, BYTES = 640 };
    float row[16 * 16] = { 0 };
    const moe_attention_op attention = { .v = row };
    moe_matrix m = moe_matrix_view(MOE_TYPE_F32, 16, 16, row);
    moe_graph g = { .nodes = mw_zeros(LONG * sizeof(moe_node)), .rows = 10, .threads = 2, .max_source = 100 };
    moe_node *t;
    moe_error e;
    g.capacity = LONG;
    t = moe_op_embed(&g, &m, 1, "embed");
    while (g.count < SCRATCHED) t = moe_op_attention(&g, &attention, t, NULL, 16, "attention");
    assert_int_equal(moe_graph_plan(&g, &e), MOE_OK);
    for (size_t i = 1; i < g.count; i++) assert_true(g.nodes[i].work_bytes > 0);
    check_plan(&g);
    assert_int_equal(g.bytes, 2 * BYTES + g.nodes[1].work_bytes); /* two nodes of the chain, scratch memory for one */
    g.count = 0;
    t = moe_op_embed(&g, &m, 1, "embed");
    while (g.count < LONG) t = moe_op_unary(&g, MOE_UNARY_TANH, t, "unary");
    assert_int_equal(moe_graph_plan(&g, &e), MOE_OK);
    assert_int_equal(g.bytes, 2 * BYTES);
    for (size_t i = 0; i < g.count; i++) assert_int_equal(g.nodes[i].offset, i % 2 * BYTES);
    free(g.nodes);
}

TEST(planner_refuses_graphs_with_too_many_nodes) {
    moe_node nodes[4];
    moe_matrix m = { .type = MOE_TYPE_F32, .rows = 16, .cols = 16, .cols_padded = 16 };
    moe_graph g = { .nodes = nodes, .capacity = 4, .rows = 10, .threads = 1 };
    moe_node *t = moe_op_embed(&g, &m, 1, "embed");
    moe_error e;
    for (int i = 0; i < 4; i++) t = moe_op_unary(&g, MOE_UNARY_TANH, t, "unary");
    for (int i = 0; i < 4; i++) t = moe_op_view(&g, t, 0, 8, "view"); /* a view of itself, because the graph is full */
    assert_int_equal(moe_graph_plan(&g, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "plan");
}

typedef struct trace_log {
    float *data;
    size_t used, capacity;
} trace_log;

static void trace_into(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    trace_log *log = user;
    (void)name;
    for (size_t r = 0; r < rows; r++) {
        if (log->used + cols > log->capacity) {
            log->capacity = 2 * log->capacity + cols;
            log->data = realloc(log->data, log->capacity * 4);
        }
        memcpy(log->data + log->used, data + r * stride, cols * 4);
        log->used += cols;
    }
}

/* A graph has the same results in the planned arena and with separate memory for each node. */
TEST(planned_graphs_equal_unplanned_ones) {
    uint64_t random = 62;
    for (size_t round = 0; round < mw_rounds(200); round++) {
        const size_t rows = 1 + mw_below(&random, 12);
        graph_case *c = random_graph(&random, rows, 10 + mw_below(&random, 100), 1);
        moe_pool *pool = start_pool(1 + round % 3);
        int32_t ids[12], parents[12];
        moe_frame frame = { .rows = rows, .ids = ids, .beam = { .parents = parents } };
        moe_run run = {
            moe_isas[round % 2 && moe_isa_available(moe_isas[MOE_COUNT(moe_isas) - 1]->name) ? MOE_COUNT(moe_isas) - 1
                                                                                             : 0],
            pool, &c->graph, &frame, 0
        };
        trace_log logs[2] = { { NULL, 0, 0 }, { NULL, 0, 0 } };
        void *own[GRAPH_NODES] = { NULL }, *arena = NULL;
        moe_error e;
        for (size_t i = 0; i < 12; i++)
            ids[i] = (int32_t)mw_below(&random, 16), parents[i] = (int32_t)mw_below(&random, rows + 1) - 1;
        assert_int_equal(moe_graph_plan(&c->graph, &e), MOE_OK);
        arena = mw_allocate_image(c->graph.bytes).data;
        moe_graph_place(&c->graph, arena);
        moe_graph_run(&run, trace_into, &logs[0]);
        for (size_t i = 0; i < 4; i++) memset(c->states[i], 0, rows * 200 * 4);
        for (size_t i = 0; i < c->graph.count; i++) {
            moe_node *t = &c->nodes[i];
            if (t->op == MOE_OP_VIEW) {
                t->data = (float *)t->src[0]->data + t->column;
                continue;
            }
            t->data = own[i] = mw_allocate_image(needed_bytes(&c->graph, t) + 64).data;
            if (moe_is_codes(t)) t->scales = (float *)(void *)((char *)t->data + mw_up(rows * t->stride, 64));
        }
        moe_graph_run(&run, trace_into, &logs[1]);
        assert_int_equal(logs[0].used, logs[1].used);
        for (size_t i = 0; i < logs[0].used; i++)
            CHECK(same(logs[0].data[i], logs[1].data[i]), "number %zu differs", i);
        for (size_t i = 0; i < c->graph.count; i++) free(own[i]);
        free(arena), free(logs[0].data), free(logs[1].data);
        stop_pool(pool);
        free_graph(c);
    }
}

TEST(every_op_has_a_name_and_is_computed) {
    for (size_t op = 0; op < MOE_OP_COUNT; op++) {
        CHECK(moe_ops[op].name && *moe_ops[op].name, "op %zu has no name", op);
        CHECK(!moe_ops[op].compute != !moe_ops[op].row || op == MOE_OP_VIEW, "op %s is not computed", moe_ops[op].name);
        CHECK(!moe_ops[op].row == !moe_ops[op].cost, "op %s costs nothing", moe_ops[op].name);
        for (size_t other = 0; other < op; other++)
            CHECK(strcmp(moe_ops[op].name, moe_ops[other].name) != 0, "two ops are called %s", moe_ops[op].name);
    }
}

/* ---- Gates and experts ---- */

typedef struct moe_case {
    moe_gating gating;
    moe_experts experts;
    size_t slab_down; /* offset of the second matrix in a slab */
    moe_node nodes[8];
    moe_graph graph;
    moe_node *logits, *gate, *x, *y;
    float *gate_state, *x_state;
    unsigned char *slabs;
    float *threshold;
    void *arena;
} moe_case;

/* Pack a matrix with model_writer.h, or with the engine for types after Q8, whose packing is tested separately. */
static void pack(uint32_t type, size_t rows, size_t cols, const float *w, unsigned char *out) {
    int8_t *scratch;
    if (type <= MOE_TYPE_Q8) {
        mw_pack(type, rows, cols, w, out);
        return;
    }
    scratch = mw_zeros(2 * mw_up(cols, 64));
    for (size_t r = 0; r < rows; r++) moe_pack_row((moe_type)type, rows, cols, r, w + r * cols, out, scratch);
    free(scratch);
}

/* LSTM cells give the same results as separate products and portable cells, with few or many rows, whether or not the
 * units can be split into groups. */
TEST(lstm_steps_equal_their_parts_in_any_split) {
    static const uint32_t types[] = { MOE_TYPE_Q8, MOE_TYPE_Q4, MOE_TYPE_F32, MOE_TYPE_BF16 };
    static const size_t shapes[][4] = { { 1, 8, 16, 3 },     { 3, 40, 24, 24 },    { 1, 64, 512, 64 },
                                        { 70, 33, 208, 96 }, { 300, 16, 160, 32 }, { 90, 20, 107, 50 },
                                        { 17, 70, 336, 40 } }; /* rows, inputs, units, columns of w_r */
    uint64_t random = 63;
    for (size_t s = 0; s < MOE_COUNT(shapes) * MOE_COUNT(types); s++) {
        const size_t *shape = shapes[s / MOE_COUNT(types)], rows = shape[0], width = shape[1], hidden = shape[2],
                     cols = shape[3];
        const uint32_t type = types[s % MOE_COUNT(types)],
                       r_type = types[(s + s / MOE_COUNT(types)) % MOE_COUNT(types)];
        float *x = numbers(&random, rows * width, PLAIN), *r = numbers(&random, rows * cols, PLAIN),
              *c = numbers(&random, rows * hidden, PLAIN);
        float *w_x = numbers(&random, 4 * hidden * width, PLAIN), *w_r = numbers(&random, 4 * hidden * cols, PLAIN);
        float *bias = numbers(&random, 4 * hidden, PLAIN), *z = mw_zeros(rows * 4 * hidden * 4),
              *want = mw_zeros(rows * 2 * hidden * 4);
        int8_t *codes[2] = { mw_zeros(rows * moe_code_bytes(width)), mw_zeros(rows * moe_code_bytes(cols)) };
        float *scales[2] = { mw_zeros(rows * 4), mw_zeros(rows * 4) };
        unsigned char *blobs[2] = {
            mw_allocate_image((size_t)moe_matrix_bytes((moe_type)type, 4 * hidden, width)).data,
            mw_allocate_image((size_t)moe_matrix_bytes((moe_type)r_type, 4 * hidden, cols)).data
        };
        moe_cell cell = { .hidden = hidden, .state = cols, .forget_bias = 0.5f };
        int32_t *parents = mw_zeros(rows * 4);
        moe_linear l = { .y = z, .y_stride = 4 * hidden };
        pack(type, 4 * hidden, width, w_x, blobs[0]);
        pack(r_type, 4 * hidden, cols, w_r, blobs[1]);
        cell.w_x = moe_matrix_view((moe_type)type, 4 * hidden, width, blobs[0]);
        cell.w_r = moe_matrix_view((moe_type)r_type, 4 * hidden, cols, blobs[1]);
        cell.bias = bias;
        for (size_t i = 0; i < rows; i++) {
            parents[i] = (int32_t)i;
            scales[0][i] = oracle->quantise(x + i * width, width, codes[0] + i * moe_code_bytes(width));
            scales[1][i] = oracle->quantise(r + i * cols, cols, codes[1] + i * moe_code_bytes(cols));
        }
        l.w = &cell.w_x, l.bias = bias, l.x = x, l.x_stride = width, l.codes = codes[0], l.scales = scales[0];
        oracle->linear(&l, 0, rows, 0, moe_divide_up(4 * hidden, 16));
        l.w = &cell.w_r, l.bias = NULL, l.x = r, l.x_stride = cols, l.codes = codes[1], l.scales = scales[1];
        l.add = z, l.add_stride = 4 * hidden;
        oracle->linear(&l, 0, rows, 0, moe_divide_up(4 * hidden, 16));
        for (size_t i = 0; i < rows; i++)
            oracle->lstm_cell(z + i * 4 * hidden, c + i * hidden, hidden, 0.5f, want + i * 2 * hidden,
                              want + i * 2 * hidden + hidden);
        for (size_t isa = 0; isa < MOE_COUNT(moe_isas); isa++)
            for (size_t threads = 1; threads < 4; threads++) {
                moe_node nodes[8], *y;
                moe_graph g = { .nodes = nodes, .capacity = 8, .rows = rows + s % 3, .threads = threads };
                moe_frame frame = { .rows = rows, .beam = { .parents = parents } };
                moe_pool *pool = start_pool(threads);
                moe_run run = { moe_isas[isa], pool, &g, &frame, 0 };
                moe_error e;
                void *arena;
                if (!moe_isas[isa]->available()) {
                    stop_pool(pool);
                    continue;
                }
                y = moe_op_gather(&g, r, cols, "r");
                y = moe_op_lstm_step(&g, &cell, moe_op_gather(&g, x, width, "x"), y, moe_op_gather(&g, c, hidden, "c"),
                                     "cell");
                assert_int_equal(moe_graph_plan(&g, &e), MOE_OK);
                arena = mw_allocate_image(g.bytes).data;
                moe_graph_place(&g, arena);
                moe_graph_run(&run, NULL, NULL);
                for (size_t i = 0; i < rows * 2 * hidden; i++)
                    CHECK(same(((float *)y->data)[i / (2 * hidden) * y->stride + i % (2 * hidden)], want[i]),
                          "%s, %zu threads, shape %zu: number %zu differs", moe_isas[isa]->name, threads, s, i);
                free(arena);
                stop_pool(pool);
            }
        for (int i = 0; i < 2; i++) free(codes[i]), free(scales[i]), free(blobs[i]);
        free(x), free(r), free(c), free(w_x), free(w_r), free(bias), free(z), free(want), free(parents);
    }
}

/* Return a graph with a gate over given logits and an expert layer over given inputs. */
static moe_case *make_moe(uint64_t *random, moe_gate gate, size_t experts, size_t k, size_t hidden, size_t width,
                          size_t rows, uint32_t type) {
    moe_case *c = mw_zeros(sizeof *c);
    moe_experts *e = &c->experts;
    moe_error error;
    uint64_t down;
    c->gating = (moe_gating){ .kind = gate, .level = experts, .k = k };
    *e = (moe_experts){ .count = experts, .hidden = hidden, .scale = 1 };
    e->stride = (size_t)moe_slab_bytes((moe_type)type, 1, hidden, width, &down);
    c->slab_down = (size_t)down;
    assert_int_equal(e->stride, mw_slab_stride(type, hidden, width));
    assert_int_equal(c->slab_down, mw_slab_down(type, hidden, width));
    c->slabs = mw_allocate_image(experts * e->stride).data;
    e->up = moe_matrix_view((moe_type)type, hidden, width, c->slabs);
    e->down = moe_matrix_view((moe_type)type, width, hidden, c->slabs + c->slab_down);
    for (size_t i = 0; i < experts; i++) {
        float *up = numbers(random, hidden * width, PLAIN), *low = numbers(random, hidden * width, PLAIN);
        pack(type, hidden, width, up, c->slabs + i * e->stride);
        pack(type, width, hidden, low, c->slabs + i * e->stride + c->slab_down);
        free(up), free(low);
    }
    c->threshold = mw_zeros(experts * 4);
    for (size_t i = 0; i < experts; i++) c->threshold[i] = 0.8f / (float)experts;
    c->gating.threshold = c->threshold;
    c->gate_state = numbers(random, rows * experts, PLAIN);
    c->x_state = numbers(random, rows * width, PLAIN);
    c->graph = (moe_graph){ .nodes = c->nodes, .capacity = 8, .rows = rows, .threads = 3, .traced = 1 };
    c->logits = moe_op_gather(&c->graph, c->gate_state, experts, "logits");
    c->x = moe_op_gather(&c->graph, c->x_state, width, "x");
    c->gate = moe_op_gate(&c->graph, &c->gating, c->logits, NULL, 0, "moe", "moe.gate");
    c->y = moe_op_experts(&c->graph, e, c->x, c->gate, "moe.experts");
    assert_int_equal(moe_graph_plan(&c->graph, &error), MOE_OK);
    check_plan(&c->graph);
    c->arena = mw_allocate_image(c->graph.bytes).data;
    moe_graph_place(&c->graph, c->arena);
    return c;
}

static void run_moe(moe_case *c, moe_pool *pool, const moe_kernels *kernels, int32_t *rows_of, size_t rows,
                    trace_log *log) {
    moe_frame frame = { .rows = rows, .beam = { .parents = rows_of } };
    moe_run run = { kernels, pool, &c->graph, &frame, 0 };
    moe_graph_run(&run, trace_into, log);
}

static void free_moe(moe_case *c) {
    free(c->slabs), free(c->threshold), free(c->gate_state), free(c->x_state), free(c->arena), free(c);
}

/* Traced rows of gate and experts; a graph may overwrite a node's rows later. */
typedef struct gate_rows {
    float gate[16 * 16], y[16 * 40];
} gate_rows;

static void gate_trace(void *user, const char *name, const float *data, size_t rows, size_t cols, size_t stride) {
    gate_rows *out = user;
    for (size_t r = 0; r < rows; r++) {
        if (strcmp(name, "moe.gate") == 0) memcpy(out->gate + r * cols, data + r * stride, cols * 4);
        if (strcmp(name, "moe.experts") == 0) memcpy(out->y + r * cols, data + r * stride, cols * 4);
    }
}

TEST(gates_follow_the_equations) {
    uint64_t random = 71;
    moe_pool *pool = start_pool(2);
    for (size_t round = 0; round < mw_rounds(200); round++) {
        const size_t n = 1 + mw_below(&random, 9), k = 1 + mw_below(&random, n), rows = 1 + mw_below(&random, 9);
        const moe_gate kind = (moe_gate)(round % MOE_GATE_BATCHWISE);
        moe_case *c = make_moe(&random, kind, n, k, 5, 7, rows, MW_F32);
        gate_rows out;
        int32_t parents[16];
        moe_frame frame = { .rows = rows, .beam = { .parents = parents } };
        moe_run run = { oracle, pool, &c->graph, &frame, 0 };
        for (size_t r = 0; r < 16; r++) parents[r] = (int32_t)r;
        c->gating.empty_zero = round % 2;
        if (round % 5 == 0)
            for (size_t i = 0; i < n; i++) c->threshold[i] = 2; /* no expert passes */
        moe_graph_run(&run, gate_trace, &out);
        for (size_t r = 0; r < rows; r++) {
            const float *l = c->gate_state + r * n, *g = out.gate + r * n;
            double sum = 0, kept = 0, p[16];
            int on[16] = { 0 }, any = 0;
            size_t best = 0;
            for (size_t i = 0; i < n; i++) sum += exp((double)l[i]);
            for (size_t i = 0; i < n; i++) {
                size_t better = 0;
                p[i] = exp((double)l[i]) / sum;
                if (p[i] > p[best]) best = i;
                for (size_t j = 0; j < n; j++) better += l[j] > l[i] || (l[j] == l[i] && j < i);
                on[i] = moe_gate_is_dense(kind) ||
                        (kind == MOE_GATE_TOPK ? better < k : p[i] > (double)c->threshold[i]);
                any |= on[i];
            }
            if (!any && !c->gating.empty_zero) on[best] = 1;
            for (size_t i = 0; i < n; i++) {
                if (kind == MOE_GATE_SIGMOID) p[i] = 1 / (1 + exp(-(double)l[i]));
                kept += kind == MOE_GATE_SIGMOID ? 1.0 / (double)n : on[i] ? p[i] : 0;
            }
            for (size_t i = 0; i < n; i++) {
                CHECK(fabs((double)g[i] - (on[i] ? p[i] / kept : 0)) < 1e-6, "gate %d, expert %zu: %g, not %g",
                      (int)kind, i, (double)g[i], on[i] ? p[i] / kept : 0);
                CHECK(on[i] || moe_to_bits(g[i]) == 0, "an unselected expert has a weight");
            }
            for (size_t j = 0; j < 7; j++) { /* y = sum over i of g_i * down_i relu(up_i x) */
                double want = 0, size = 1e-3;
                for (size_t i = 0; i < n; i++) {
                    const float *up = (const float *)(const void *)(c->slabs + i * c->experts.stride);
                    const float *down = (const float *)(const void *)(c->slabs + i * c->experts.stride + c->slab_down);
                    for (size_t h = 0; h < 5; h++) {
                        double unit = 0, magnitude = 0;
                        for (size_t q = 0; q < 7; q++) {
                            unit += (double)up[h * 7 + q] * (double)c->x_state[r * 7 + q];
                            magnitude += fabs((double)up[h * 7 + q] * (double)c->x_state[r * 7 + q]);
                        }
                        want += (double)g[i] * (double)down[j * 5 + h] * (unit > 0 ? unit : 0);
                        size += (double)g[i] * fabs((double)down[j * 5 + h]) * magnitude;
                    }
                }
                CHECK(fabs((double)out.y[r * 7 + j] - want) <= 1e-5 * size, "experts return %g, not %g",
                      (double)out.y[r * 7 + j], want);
            }
        }
        free_moe(c);
    }
    stop_pool(pool);
}

/* Threshold gates may select more experts than planned. Rows are then processed in chunks, with the same results. */
TEST(experts_do_not_depend_on_chunks_batches_threads_or_isas) {
    uint64_t random = 72;
    for (uint32_t type = 0; type < MOE_TYPE_COUNT; type++)
        for (size_t round = 0; round < mw_rounds(25); round++) {
            const size_t rows = 40, n = 2 + mw_below(&random, 12), hidden = 1 + mw_below(&random, 40),
                         width = 1 + mw_below(&random, 40);
            moe_case *c = make_moe(&random, MOE_GATE_THRESHOLD, n, 1, hidden, width, rows, type);
            trace_log whole = { NULL, 0, 0 };
            int32_t parents[40];
            moe_pool *pools[3] = { start_pool(1), start_pool(2), start_pool(3) };
            for (size_t r = 0; r < rows; r++) parents[r] = (int32_t)r;
            for (size_t i = 0; i < n; i++)
                c->threshold[i] = round % 3 == 0 ? 0 : round % 3 == 1 ? 0.5f / (float)n : 0.9f;
            run_moe(c, pools[0], oracle, parents, rows, &whole);
            for (size_t p = 0; p < 3; p++)
                for (size_t isa = 0; isa < MOE_COUNT(moe_isas); isa++) {
                    trace_log log = { NULL, 0, 0 };
                    if (!moe_isa_available(moe_isas[isa]->name)) continue;
                    run_moe(c, pools[p], moe_isas[isa], parents, rows, &log);
                    assert_int_equal(log.used, whole.used);
                    assert_memory_equal(log.data, whole.data, whole.used * 4);
                    free(log.data);
                }
            for (size_t r = 0; r < rows; r += 7) { /* a single row has the same gates, outputs and output sizes */
                trace_log log = { NULL, 0, 0 };
                run_moe(c, pools[1], oracle, &parents[r], 1, &log);
                assert_memory_equal(log.data, whole.data + r * n, n * 4);
                assert_memory_equal(log.data + log.used - n - width,
                                    whole.data + whole.used - rows * n - (rows - r) * width, width * 4);
                assert_memory_equal(log.data + log.used - n, whole.data + whole.used - (rows - r) * n, n * 4);
                free(log.data);
            }
            free(whole.data);
            for (size_t p = 0; p < 3; p++) stop_pool(pools[p]);
            free_moe(c);
        }
}

TEST(all_checksum_implementations_agree) {
    uint8_t bytes[5000];
    uint64_t random = 7;
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)mw_next(&random);
    for (size_t n = 0; n < sizeof bytes - 16; n += n < 400 ? 1 : 97)
        for (size_t from = 0; from < 16; from += 5) {
            const uint32_t begin = (uint32_t)mw_next(&random), want = moe_crc_bits(begin, bytes + from, n);
            const size_t part = n ? mw_below(&random, n) : 0;
            assert_int_equal(moe_crc_portable(begin, bytes + from, n), want);
            assert_int_equal(~moe_crc32(~begin, bytes + from, n), want);
            assert_int_equal(~moe_crc32(moe_crc32(~begin, bytes + from, part), bytes + from + part, n - part), want);
#if MOE_X86
            if (n >= 64 && __builtin_cpu_supports("pclmul"))
                assert_int_equal(moe_crc_clmul(begin, bytes + from, n), want);
#endif
        }
}

int main(void) { return run_all_tests(NULL, NULL); }
