/* Fused kernels for tools/train/train.py, which compiles this file at first use and calls it through ctypes.

   Unless stated otherwise, arrays are dense row-major float32. Sequences are packed: the rows of step 0 of all
   sentences precede those of step 1, and so on. Sentences are in order of descending length, so step t has rows of the
   first count(t) sentences, without padding. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- Elementary functions: branch-free, for vectorisation -------------------------------------------------------- */

static inline float fast_exp(float x) /* relative error about 1e-7 */
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = __builtin_floorf(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        int32_t i;
        float f;
    } power = { ((int32_t)n + 127) << 23 };
    return p * power.f;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }
static inline float tanh_(float x) { return 2.0f / (1.0f + fast_exp(-2.0f * x)) - 1.0f; }

/* ---- LSTM cell; gates in order i f g o --------------------------------------------------------------------------- */

/* Compute cell states c [n, H] and outputs h [n, H]. z [n, 4H] contains the products without the bias and receives the
   activations. previous [p, H] has the first p rows' cell states of the previous step; other rows start with 0. */
void cell_forward(float *z, const float *bias, const float *previous, float *c, float *h, int64_t n, int64_t p,
                  int64_t H) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < n; r++) {
        float *zi = z + r * 4 * H, *zf = zi + H, *zg = zf + H, *zo = zg + H;
        const float *before = previous + r * H;
        int has = r < p;
#pragma omp simd
        for (int64_t j = 0; j < H; j++) {
            float i = sigmoid(zi[j] + bias[j]), f = sigmoid(zf[j] + bias[H + j]);
            float g = tanh_(zg[j] + bias[2 * H + j]), o = sigmoid(zo[j] + bias[3 * H + j]);
            float state = i * g + (has ? f * before[j] : 0.0f);
            zi[j] = i, zf[j] = f, zg[j] = g, zo[j] = o;
            c[r * H + j] = state;
            h[r * H + j] = o * tanh_(state);
        }
    }
}

/* Replace z with the gradient of the products, and carry [>= n, H], the gradient of c, with that of `previous`. */
void cell_backward(float *z, const float *previous, const float *c, const float *dh, float *carry, int64_t n, int64_t p,
                   int64_t H) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < n; r++) {
        float *zi = z + r * 4 * H, *zf = zi + H, *zg = zf + H, *zo = zg + H;
        const float *before = previous + r * H;
        int has = r < p;
#pragma omp simd
        for (int64_t j = 0; j < H; j++) {
            float i = zi[j], f = zf[j], g = zg[j], o = zo[j], t = tanh_(c[r * H + j]), d = dh[r * H + j];
            float dc = carry[r * H + j] + d * o * (1.0f - t * t);
            zo[j] = d * t * o * (1.0f - o);
            zi[j] = dc * g * i * (1.0f - i);
            zg[j] = dc * i * (1.0f - g * g);
            zf[j] = (has ? dc * before[j] : 0.0f) * f * (1.0f - f);
            carry[r * H + j] = dc * f;
        }
    }
}

/* ---- Attention of one decoder step over the packed source -------------------------------------------------------- */

/* Target row r attends to source sentence column[r], which has length[r] positions. Position s is row offset[s] +
   column[r] of key [*, a] and memory [*, d]. Write the probabilities to p [n, S], and row r of the context to context +
   r * stride. A score is the sum of v tanh(key + query) or, with `product`, of v key tanh(query). */
void attention_forward(const float *query, const float *key, const float *memory, const float *v, const int32_t *column,
                       const int32_t *length, const int32_t *offset, float *p, float *context, int64_t n, int64_t S,
                       int64_t a, int64_t d, int64_t stride, int64_t product) {
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t r = 0; r < n; r++) {
        const float *q = query + r * a;
        float *prob = p + r * S, *out = context + r * stride, top = -1e30f, sum = 0.0f, asked[a];
        int count = length[r];
        for (int64_t j = 0; j < a; j++) asked[j] = product ? v[j] * tanh_(q[j]) : q[j];
        for (int s = 0; s < count; s++) {
            const float *k = key + (int64_t)(offset[s] + column[r]) * a;
            float score = 0.0f;
            if (product) {
#pragma omp simd reduction(+ : score)
                for (int64_t j = 0; j < a; j++) score += k[j] * asked[j];
            } else {
#pragma omp simd reduction(+ : score)
                for (int64_t j = 0; j < a; j++) score += v[j] * tanh_(k[j] + asked[j]);
            }
            prob[s] = score;
            top = score > top ? score : top;
        }
        for (int s = 0; s < count; s++) sum += prob[s] = fast_exp(prob[s] - top);
        memset(out, 0, d * sizeof *out);
        for (int s = 0; s < count; s++) {
            const float *m = memory + (int64_t)(offset[s] + column[r]) * d;
            float weight = prob[s] /= sum;
#pragma omp simd
            for (int64_t j = 0; j < d; j++) out[j] += weight * m[j];
        }
        for (int64_t s = count; s < S; s++) prob[s] = 0.0f;
    }
}

/* Row r of the context's gradient is at dcontext + r * stride. Write dquery [n, a]; accumulate dkey, dmemory and dv
   [threads, a]. Threads need no locks: each has its own row of dv, and each source sentence has only one target row. */
void attention_backward(const float *dcontext, const float *query, const float *key, const float *memory,
                        const float *v, const int32_t *column, const int32_t *length, const int32_t *offset,
                        const float *p, float *dquery, float *dkey, float *dmemory, float *dv, int64_t n, int64_t S,
                        int64_t a, int64_t d, int64_t stride, int64_t product) {
    extern int omp_get_thread_num(void);
#pragma omp parallel
    {
        float *own = dv + omp_get_thread_num() * a;
#pragma omp for schedule(dynamic, 4)
        for (int64_t r = 0; r < n; r++) {
            const float *q = query + r * a, *prob = p + r * S, *up = dcontext + r * stride;
            float *dq = dquery + r * a, mean = 0.0f, dp[length[r]], t_q[a];
            for (int64_t j = 0; product && j < a; j++) t_q[j] = tanh_(q[j]);
            for (int s = 0; s < length[r]; s++) {
                int64_t row = offset[s] + column[r];
                const float *m = memory + row * d;
                float *dm = dmemory + row * d, dot = 0.0f, weight = prob[s];
#pragma omp simd reduction(+ : dot)
                for (int64_t j = 0; j < d; j++) {
                    dot += up[j] * m[j];
                    dm[j] += weight * up[j];
                }
                dp[s] = dot;
                mean += weight * dot;
            }
            memset(dq, 0, a * sizeof *dq);
            for (int s = 0; s < length[r]; s++) {
                int64_t row = offset[s] + column[r];
                const float *k = key + row * a;
                float *dk = dkey + row * a, ds = prob[s] * (dp[s] - mean);
                if (product) {
#pragma omp simd
                    for (int64_t j = 0; j < a; j++) {
                        dk[j] += ds * v[j] * t_q[j];
                        dq[j] += ds * k[j]; /* gradient of v tanh(query), converted below */
                    }
                    continue;
                }
#pragma omp simd
                for (int64_t j = 0; j < a; j++) {
                    float t = tanh_(k[j] + q[j]), g = ds * v[j] * (1.0f - t * t);
                    dk[j] += g;
                    dq[j] += g;
                    own[j] += ds * t;
                }
            }
            for (int64_t j = 0; product && j < a; j++) {
                own[j] += dq[j] * t_q[j];
                dq[j] *= v[j] * (1.0f - t_q[j] * t_q[j]);
            }
        }
    }
}

/* ---- Softmax cross-entropy with label smoothing ------------------------------------------------------------------ */

/* Replace logits [n, V] with their gradient times `scale`. loss[r]: negative log-likelihood in nats, unsmoothed. */
void cross_entropy(float *logits, const int64_t *target, float *loss, int64_t n, int64_t V, float smoothing,
                   float scale) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < n; r++) {
        float *z = logits + r * V, top = -1e30f, sum = 0.0f, right = z[target[r]];
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < V; j++) top = z[j] > top ? z[j] : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < V; j++) sum += z[j] = fast_exp(z[j] - top);
        loss[r] = top + logf(sum) - right;
        float factor = scale / sum, floor = scale * smoothing / V;
#pragma omp simd
        for (int64_t j = 0; j < V; j++) z[j] = z[j] * factor - floor;
        z[target[r]] -= scale * (1.0f - smoothing);
    }
}

/* ---- Dropout with residual --------------------------------------------------------------------------------------- */

static inline uint32_t hash(uint32_t x) {
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    return x;
}

/* Compute y = x + mask * factor * u; a null x means 0. The mask is a hash of seed and index in both passes. */
void dropout_add(const float *x, const float *u, float *y, int64_t n, uint32_t seed, uint32_t limit, float factor) {
    uint32_t key = hash(seed);
#pragma omp parallel for simd schedule(static)
    for (int64_t j = 0; j < n; j++)
        y[j] = (x ? x[j] : 0.0f) + (hash((uint32_t)j ^ key) >= limit ? u[j] * factor : 0.0f);
}

/* ---- Rows: embedding and experts --------------------------------------------------------------------------------- */

/* Compute y[r] = factor * x[index[r]]. */
void gather(const float *x, const int64_t *index, float *y, int64_t n, int64_t d, float factor) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < n; r++)
#pragma omp simd
        for (int64_t j = 0; j < d; j++) y[r * d + j] = factor * x[index[r] * d + j];
}

/* Compute y[index[r]] += weight[r] * factor * x[r] (null weights are 1). Threads split columns, as rows may repeat. */
void scatter_add(const float *x, const int64_t *index, const float *weight, float *y, int64_t n, int64_t d,
                 float factor) {
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < 2; block++) {
        int64_t first = block * d / 2, last = (block + 1) * d / 2;
        for (int64_t r = 0; r < n; r++) {
            float w = weight ? weight[r] * factor : factor;
            float *to = y + index[r] * d;
#pragma omp simd
            for (int64_t j = first; j < last; j++) to[j] += w * x[r * d + j];
        }
    }
}

/* Compute the gradients of scatter_add: dx[r] = weight[r] * dy[index[r]], dweight[r] = x[r] . dy[index[r]]. */
void scatter_backward(const float *dy, const float *x, const int64_t *index, const float *weight, float *dx,
                      float *dweight, int64_t n, int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < n; r++) {
        const float *from = dy + index[r] * d;
        float dot = 0.0f, w = weight[r];
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < d; j++) {
            dot += from[j] * x[r * d + j];
            dx[r * d + j] = w * from[j];
        }
        dweight[r] = dot;
    }
}

/* Set dx to 0 where y <= 0. */
void relu_backward(const float *y, float *dx, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t j = 0; j < n; j++) dx[j] = y[j] > 0.0f ? dx[j] : 0.0f;
}

/* ---- Products in bfloat16 ---------------------------------------------------------------------------------------- */

/* The products and layers below require AVX-512 BF16; has_products returns 1 if the CPU supports this. */
#if defined(__AVX512BF16__)
#include <immintrin.h>

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

int has_products(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0; }

enum { PANEL = 32, DEPTH = 32 }; /* the summed dimension is zero-padded to a multiple of DEPTH */
#else
int has_products(void) { return 1; }

enum { PANEL = 32, DEPTH = 2, ROWS = 12 };
#endif

/* Factors are packed into panels of 32 rows (first factor) or 32 columns (second factor). For each pair of values along
   the summed dimension, a panel has 32 words of two bfloat16 values; with AMX, pack_first packs the first factor into
   tiles. Packing rounds float32 values to bfloat16; sums and results are float32. */
static int64_t padded(int64_t K) { return (K + DEPTH - 1) / DEPTH * DEPTH; }

/* Return the size of a packed factor in words. */
int64_t factor_words(int64_t rows, int64_t K) { return (rows + PANEL - 1) / PANEL * PANEL * (padded(K) / 2); }

static uint32_t *room(int64_t words) { return aligned_alloc(64, (words * 4 + 63) / 64 * 64); }

static inline __mmask16 first(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

static inline void transpose16(__m512i x[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), b = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88),
                d = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
        y[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        y[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        y[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    memcpy(x, y, sizeof y);
}

/* Load 32 values from each of sixteen rows of x, row i into words[i]. */
static inline void take_rows(__m512i words[16], const float *x, int64_t row, int64_t rows, int64_t K) {
    __mmask16 low = first(K), high = first(K - 16);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++, x += row) {
        __mmask16 inside = i < rows ? 0xffff : 0;
        words[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high & inside, x + 16),
                                                _mm512_maskz_loadu_ps(low & inside, x));
    }
}

/* Load two values, `column` apart, from each of sixteen adjacent rows. */
static inline __m512i take_pair(const float *x, int64_t column, int64_t rows, int64_t K) {
    __m512 even = _mm512_maskz_loadu_ps(K > 0 ? first(rows) : 0, x);
    __m512 odd = _mm512_maskz_loadu_ps(K > 1 ? first(rows) : 0, x + column);
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

/* Pack x [rows, K], whose element (r, k) is x[r * row + k * column]; one of the strides is 1. */
static void pack(uint32_t *to, const float *x, int64_t row, int64_t column, int64_t rows, int64_t K) {
    int64_t pairs = padded(K) / 2;
    if (column == 1) {
        for (int64_t r = 0; r < rows; r += 16)
            for (int64_t k = 0; k < K; k += 32) {
                uint32_t *panel = to + (r / PANEL * pairs + k / 2) * PANEL + r % PANEL;
                __m512i words[16];
                take_rows(words, x + r * row + k, row, rows - r, K - k);
                transpose16(words);
                for (int64_t i = 0; i < 16 && k / 2 + i < pairs; i++) _mm512_store_si512(panel + i * PANEL, words[i]);
            }
        return;
    }
    for (int64_t top = 0; top < rows; top += 128) { /* read long parts of rows, but write to few panels at a time */
        int64_t bottom = top + 128 < rows ? top + 128 : rows;
        for (int64_t k = 0; k < 2 * pairs; k += 2)
            for (int64_t r = top; r < bottom; r += 16)
                _mm512_store_si512(to + (r / PANEL * pairs + k / 2) * PANEL + r % PANEL,
                                   take_pair(x + r + k * column, column, rows - r, K - k));
    }
}

#ifdef __AMX_BF16__
/* Pack the first factor into tiles of 16 rows by 32 values (64 bytes per row). Tiles of the same rows are adjacent. */
static void pack_first(uint32_t *to, const float *x, int64_t row, int64_t column, int64_t rows, int64_t K) {
    int64_t tiles = padded(K) / DEPTH;
    for (int64_t top = 0; top < rows; top += 128) {
        int64_t bottom = top + 128 < rows ? top + 128 : rows;
        for (int64_t k = 0; k < K; k += DEPTH)
            for (int64_t r = top; r < bottom; r += 16) {
                __m512i words[16];
                if (column == 1) take_rows(words, x + r * row + k, row, rows - r, K - k);
                else {
                    for (int i = 0; i < 16; i++)
                        words[i] = take_pair(x + r + (k + 2 * i) * column, column, rows - r, K - k - 2 * i);
                    transpose16(words);
                }
                uint32_t *tile = to + (r / 16 * tiles + k / DEPTH) * 256;
                for (int i = 0; i < 16; i++) _mm512_store_si512(tile + 16 * i, words[i]);
            }
    }
}

/* Compute a block c [rows, columns], at most [32, 32]: two rows of tiles times a panel. */
static void block(const uint32_t *a, const uint32_t *b, float *c, int64_t stride, int64_t tiles, int64_t rows,
                  int64_t columns, int add) {
    float part[32 * 32] __attribute__((aligned(64)));
    int whole = rows == 32 && columns == 32, low = rows > 16, right = columns > 16;
    float *to = whole ? c : part;
    int64_t to_row = whole ? stride : 32;
    const uint32_t *second = a + tiles * 256;
    if (whole && add) {
        _tile_loadd(0, c, stride * 4);
        _tile_loadd(1, c + 16, stride * 4);
        _tile_loadd(2, c + 16 * stride, stride * 4);
        _tile_loadd(3, c + 16 * stride + 16, stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t t = 0; t < tiles; t++, a += 256, second += 256, b += 16 * PANEL) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, PANEL * 4);
        _tile_dpbf16ps(0, 4, 6);
        if (right) {
            _tile_loadd(7, b + 16, PANEL * 4);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (low) {
            _tile_loadd(5, second, 64);
            _tile_dpbf16ps(2, 5, 6);
            if (right) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, to, to_row * 4);
    _tile_stored(1, to + 16, to_row * 4);
    _tile_stored(2, to + 16 * to_row, to_row * 4);
    _tile_stored(3, to + 16 * to_row + 16, to_row * 4);
    if (whole) return;
    for (int64_t r = 0; r < rows; r++, c += stride)
        for (int64_t j = 0; j < columns; j += 16) {
            __mmask16 inside = first(columns - j);
            __m512 sum = _mm512_load_ps(part + 32 * r + j);
            if (add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(inside, c + j));
            _mm512_mask_storeu_ps(c + j, inside, sum);
        }
}

/* Compute c [M, N] = a b, or c += a b with `add`, from packed factors. Row r of c is at c + r * stride. */
static void multiply(const uint32_t *a, const uint32_t *b, float *c, int64_t stride, int64_t M, int64_t N, int64_t K,
                     int add) {
    static const struct {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = { .palette = 1,
                 .bytes = { 64, 64, 64, 64, 64, 64, 64, 64 },
                 .rows = { 16, 16, 16, 16, 16, 16, 16, 16 } };
    int64_t depth = padded(K);
    _tile_loadconfig(&config);
    for (int64_t i = 0; i < M; i += 32)
        for (int64_t j = 0; j < N; j += PANEL)
            block(a + i * depth / 2, b + j * depth / 2, c + i * stride + j, stride, depth / DEPTH,
                  M - i < 32 ? M - i : 32, N - j < PANEL ? N - j : PANEL, add);
    _tile_release();
}
#else
#define pack_first pack

/* Compute a block c [rows, 32]: `rows` rows of a panel of the first factor times a panel of the second. */
static inline __attribute__((always_inline)) void block(const int rows, const uint32_t *a, const uint32_t *b, float *c,
                                                        int64_t stride, int64_t pairs, __mmask16 left, __mmask16 right,
                                                        int add) {
    __m512 sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        sum[r][0] = sum[r][1] = _mm512_setzero_ps();
        __builtin_prefetch(c + r * stride, 1); /* fetch c during the summation */
        __builtin_prefetch(c + r * stride + 16, 1);
    }
    for (int64_t k = 0; k < pairs; k++, a += PANEL, b += PANEL) {
        __m512bh b0 = (__m512bh)_mm512_load_si512(b), b1 = (__m512bh)_mm512_load_si512(b + 16);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[r]);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], x, b0);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], x, b1);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++, c += stride) {
        if (add) {
            sum[r][0] = _mm512_add_ps(sum[r][0], _mm512_maskz_loadu_ps(left, c));
            sum[r][1] = _mm512_add_ps(sum[r][1], _mm512_maskz_loadu_ps(right, c + 16));
        }
        _mm512_mask_storeu_ps(c, left, sum[r][0]);
        _mm512_mask_storeu_ps(c + 16, right, sum[r][1]);
    }
}

/* Compute c [M, N] = a b, or c += a b with `add`, from packed factors. Row r of c is at c + r * stride. */
static void multiply(const uint32_t *a, const uint32_t *b, float *c, int64_t stride, int64_t M, int64_t N, int64_t K,
                     int add) {
    int64_t pairs = (K + 1) / 2;
    for (int64_t i = 0; i < M; i += PANEL)
        for (int64_t j = 0; j < N; j += PANEL) {
            __mmask16 left = first(N - j), right = first(N - j - 16);
            int64_t rows = M - i < PANEL ? M - i : PANEL, n;
            for (int64_t r = 0; r < rows; r += n) {
                n = rows - r < ROWS ? rows - r : ROWS;
#define CASE(x)                                                                                                \
    case x:                                                                                                    \
        block(x, a + i * pairs + r, b + j * pairs, c + (i + r) * stride + j, stride, pairs, left, right, add); \
        break;
                switch (n) {
                    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
                }
#undef CASE
            }
        }
}
#endif

/* Pack a first or second factor that train.py uses in many products. */
void factor(uint32_t *to, const float *x, int64_t row, int64_t column, int64_t rows, int64_t K, int64_t second) {
    (second ? pack : pack_first)(to, x, row, column, rows, K);
}

/* Compute c [M, N] = a b, or c += a b with `add`. One of the two strides of a factor must be 1; both are 0 for a packed
   factor. Row r of c is at c + r * stride. */
void product(const float *a, const float *b, float *c, int64_t a_row, int64_t a_column, int64_t b_row, int64_t b_column,
             int64_t stride, int64_t M, int64_t N, int64_t K, int64_t add) {
    uint32_t *scratch = room(factor_words(M, K) + factor_words(N, K)), *second = scratch + factor_words(M, K);
    if (a_row) pack_first(scratch, a, a_row, a_column, M, K);
    if (b_row) pack(second, b, b_column, b_row, N, K);
    multiply(a_row ? scratch : (const uint32_t *)a, b_row ? second : (const uint32_t *)b, c, stride, M, N, K, (int)add);
    free(scratch);
}

/* Compute c = a b, or c += a b with `add`, from dense a [M, K] and packed b. `scratch` has room for packed a. */
static void times(const float *a, const uint32_t *b, float *c, int64_t M, int64_t N, int64_t K, int add,
                  uint32_t *scratch) {
    pack_first(scratch, a, K, 1, M, K);
    multiply(scratch, b, c, N, M, N, K, add);
}

/* ---- Layers with bfloat16 products ------------------------------------------------------------------------------- */

/* All steps run in one call, because Python's global lock would make the trainer's threads wait for each other. A step
   has n rows from row `at`. Its first `rows` rows continue those from row `last` in the previous step. Weights have the
   layout of the checkpoint. z contains the products of the input and its weights. */
struct step {
    int64_t at, n, last, rows;
};

static int64_t widest(const struct step *steps, int64_t count) {
    int64_t n = 0;
    for (int64_t t = 0; t < count; t++) n = steps[t].n > n ? steps[t].n : n;
    return n;
}

void lstm_forward(float *z, const float *bias, const float *w_r, const float *w_proj, float *c, float *h, float *y,
                  const struct step *steps, int64_t count, int64_t H, int64_t P) {
    int64_t n = widest(steps, count), words = factor_words(n, P > H ? P : H);
    uint32_t *scratch = room(words + factor_words(4 * H, P) + factor_words(P, H));
    uint32_t *recurrent = scratch + words, *project = recurrent + factor_words(4 * H, P);
    pack(recurrent, w_r, P, 1, 4 * H, P);
    pack(project, w_proj, H, 1, P, H);
    for (const struct step *s = steps; s < steps + count; s++) {
        float *now = z + s->at * 4 * H;
        times(y + s->last * P, recurrent, now, s->rows, 4 * H, P, 1, scratch);
        cell_forward(now, bias, c + s->last * H, c + s->at * H, h + s->at * H, s->n, s->rows, H);
        times(h + s->at * H, project, y + s->at * P, s->n, P, H, 0, scratch);
    }
    free(scratch);
}

/* Replace the activations in z with the gradient of the products. Add the gradients of the recurrence to dy. */
void lstm_backward(float *z, const float *w_r, const float *w_proj, const float *c, float *dy, const struct step *steps,
                   int64_t count, int64_t H, int64_t P) {
    int64_t n = widest(steps, count), words = factor_words(n, 4 * H > P ? 4 * H : P);
    uint32_t *scratch = room(words + factor_words(P, 4 * H) + factor_words(H, P));
    uint32_t *recurrent = scratch + words, *project = recurrent + factor_words(P, 4 * H);
    float *dh = calloc(2 * n * H, sizeof *dh), *carry = dh + n * H;
    pack(recurrent, w_r, 1, P, P, 4 * H);
    pack(project, w_proj, 1, H, H, P);
    for (const struct step *s = steps + count; s-- > steps;) {
        float *now = z + s->at * 4 * H;
        times(dy + s->at * P, project, dh, s->n, H, P, 0, scratch);
        cell_backward(now, c + s->last * H, c + s->at * H, dh, carry, s->n, s->rows, H);
        times(now, recurrent, dy + s->last * P, s->rows, P, 4 * H, 1, scratch);
    }
    free(scratch), free(dh);
}

/* Run the layer with attention. w [4H, d + P] contains the context part of w_x, then w_r. s [*, d + P] contains the
   context and output of the previous step; the caller sets the rows of the first step. q receives the queries. */
void attentive_forward(float *z, const float *bias, const float *w, const float *w_proj, const float *w_query, float *c,
                       float *h, float *y, float *s, float *q, float *context, const float *key, const float *memory,
                       const float *v, const int32_t *column, const int32_t *length, const int32_t *offset, float *p,
                       const struct step *steps, int64_t count, int64_t H, int64_t P, int64_t d, int64_t a, int64_t S,
                       int64_t product) {
    int64_t n = widest(steps, count), D = d + P, words = factor_words(n, D > H ? D : H);
    uint32_t *scratch = room(words + factor_words(4 * H, D) + factor_words(P, H) + factor_words(a, P));
    uint32_t *both = scratch + words, *project = both + factor_words(4 * H, D), *ask = project + factor_words(P, H);
    pack(both, w, D, 1, 4 * H, D);
    pack(project, w_proj, H, 1, P, H);
    pack(ask, w_query, P, 1, a, P);
    for (const struct step *t = steps; t < steps + count; t++) {
        float *now = z + t->at * 4 * H, *input = s + t->at * D, *output = y + t->at * P, *query = q + t->at * a;
        for (int64_t r = 0; r < t->rows; r++) {
            memcpy(input + r * D, context + (t->last + r) * d, d * sizeof *context);
            memcpy(input + r * D + d, y + (t->last + r) * P, P * sizeof *y);
        }
        times(input, both, now, t->n, 4 * H, D, 1, scratch);
        cell_forward(now, bias, c + t->last * H, c + t->at * H, h + t->at * H, t->n, t->rows, H);
        times(h + t->at * H, project, output, t->n, P, H, 0, scratch);
        times(output, ask, query, t->n, a, P, 0, scratch);
        attention_forward(query, key, memory, v, column, length, offset, p + t->at * S, context + t->at * d, t->n, S, a,
                          d, d, product);
    }
    free(scratch);
}

/* Replace the activations in z with the gradient of the products. Add the gradients of the recurrence to dy and
   dcontext. dfirst [n, d] receives the gradient of the first step's context. */
void attentive_backward(float *z, const float *w, const float *w_proj, const float *w_query, const float *c, float *dy,
                        float *dcontext, float *dfirst, const float *q, float *dq, const float *key, float *dkey,
                        const float *memory, float *dmemory, const float *v, float *dv, const int32_t *column,
                        const int32_t *length, const int32_t *offset, const float *p, const struct step *steps,
                        int64_t count, int64_t H, int64_t P, int64_t d, int64_t a, int64_t S, int64_t product) {
    int64_t n = widest(steps, count), D = d + P, longest = 4 * H > P ? 4 * H : P;
    int64_t words = factor_words(n, a > longest ? a : longest);
    uint32_t *scratch = room(words + factor_words(D, 4 * H) + factor_words(H, P) + factor_words(P, a));
    uint32_t *both = scratch + words, *project = both + factor_words(D, 4 * H), *ask = project + factor_words(H, P);
    float *dh = calloc(2 * n * H, sizeof *dh), *carry = dh + n * H, *ds = malloc(n * D * sizeof *ds);
    pack(both, w, 1, D, D, 4 * H);
    pack(project, w_proj, 1, H, H, P);
    pack(ask, w_query, 1, P, P, a);
    for (const struct step *t = steps + count; t-- > steps;) {
        float *now = z + t->at * 4 * H, *back = dy + t->last * P, *read = dcontext + t->last * d;
        attention_backward(dcontext + t->at * d, q + t->at * a, key, memory, v, column, length, offset, p + t->at * S,
                           dq + t->at * a, dkey, dmemory, dv, t->n, S, a, d, d, product);
        times(dq + t->at * a, ask, dy + t->at * P, t->n, P, a, 1, scratch);
        times(dy + t->at * P, project, dh, t->n, H, P, 0, scratch);
        cell_backward(now, c + t->last * H, c + t->at * H, dh, carry, t->n, t->rows, H);
        times(now, both, ds, t->n, D, 4 * H, 0, scratch);
        for (int64_t r = 0; r < t->rows; r++) {
            for (int64_t j = 0; j < d; j++) read[r * d + j] += ds[r * D + j];
            for (int64_t j = 0; j < P; j++) back[r * P + j] += ds[r * D + d + j];
        }
        for (int64_t r = t->rows; r < t->n; r++) memcpy(dfirst + r * d, ds + r * D, d * sizeof *ds);
    }
    free(scratch), free(dh), free(ds);
}

/* Compute u = relu(taken w_up[e]) [*, h] and v = u w_down[e]. taken [*, d] has counts[e] rows per expert, in order. */
void experts_forward(const float *taken, const float *w_up, const float *w_down, float *u, float *v,
                     const int64_t *counts, int64_t experts, int64_t d, int64_t h) {
    for (int64_t e = 0; e < experts; e++) {
        int64_t n = counts[e];
        product(taken, w_up, u, d, 1, h, 1, h, n, h, d, 0);
#pragma omp simd
        for (int64_t j = 0; j < n * h; j++) u[j] = u[j] > 0.0f ? u[j] : 0.0f;
        product(u, w_down, v, h, 1, d, 1, d, n, d, h, 0);
        taken += n * d, u += n * h, v += n * d, w_up += d * h, w_down += d * h;
    }
}

/* Compute dtaken from dv [*, d], and accumulate the gradients of the weights. */
void experts_backward(const float *taken, const float *w_up, const float *w_down, const float *u, const float *dv,
                      float *dtaken, float *dw_up, float *dw_down, const int64_t *counts, int64_t experts, int64_t d,
                      int64_t h) {
    for (int64_t e = 0; e < experts; e++) {
        int64_t n = counts[e];
        float *du = malloc(n * h * sizeof *du);
        product(dv, w_down, du, d, 1, 1, d, h, n, h, d, 0);
        relu_backward(u, du, n * h);
        product(u, dv, dw_down, 1, h, d, 1, d, h, d, n, 1);
        product(taken, du, dw_up, 1, d, h, 1, h, d, h, n, 1);
        product(du, w_up, dtaken, h, 1, 1, h, d, n, d, h, 0);
        free(du);
        taken += n * d, u += n * h, dv += n * d, dtaken += n * d;
        w_up += d * h, w_down += d * h, dw_up += d * h, dw_down += d * h;
    }
}

/* ---- Products of Muon in float32 --------------------------------------------------------------------------------- */

/* Compute c [n, n] = a^T b for dense a and b [K, n]. The product must be symmetric, because only half of it is
   computed. n must be a multiple of 32. */
void symmetric(const float *a, const float *b, float *c, int64_t n, int64_t K) {
    for (int64_t i = 0; i < n; i += 8)
        for (int64_t j = i / 32 * 32; j < n; j += 32) {
            __m512 sum[8][2];
            for (int r = 0; r < 8; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
            for (int64_t k = 0; k < K; k++) {
                __m512 b0 = _mm512_loadu_ps(b + k * n + j), b1 = _mm512_loadu_ps(b + k * n + j + 16);
#pragma GCC unroll 8
                for (int r = 0; r < 8; r++) {
                    __m512 x = _mm512_set1_ps(a[k * n + i + r]);
                    sum[r][0] = _mm512_fmadd_ps(x, b0, sum[r][0]);
                    sum[r][1] = _mm512_fmadd_ps(x, b1, sum[r][1]);
                }
            }
            for (int r = 0; r < 8; r++) {
                _mm512_storeu_ps(c + (i + r) * n + j, sum[r][0]);
                _mm512_storeu_ps(c + (i + r) * n + j + 16, sum[r][1]);
            }
        }
    for (int64_t i = 0; i < n; i += 16)
        for (int64_t j = (i + 32) / 32 * 32; j < n; j += 16) {
            __m512i x[16];
            for (int r = 0; r < 16; r++) x[r] = _mm512_loadu_si512(c + (i + r) * n + j);
            transpose16(x);
            for (int r = 0; r < 16; r++) _mm512_storeu_si512(c + (j + r) * n + i, x[r]);
        }
}

#else
int has_products(void) { return 0; }
#endif

/* ---- Optimizer --------------------------------------------------------------------------------------------------- */

double sum_of_squares(const float *x, int64_t n) {
    double sum = 0.0;
#pragma omp parallel for reduction(+ : sum) schedule(static)
    for (int64_t block = 0; block < (n + 4095) / 4096; block++) {
        int64_t last = block * 4096 + 4096 < n ? block * 4096 + 4096 : n;
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t j = block * 4096; j < last; j++) part += x[j] * x[j];
        sum += part;
    }
    return sum;
}

/* Update n values with one step of Adam. Scale the gradient by `clip`, then zero it. c1 and c2 are 1 - beta^t. */
void adam(float *w, float *g, float *m, float *v, int64_t n, float rate, float b1, float b2, float eps, float c1,
          float c2, float clip) {
    float step = rate / c1, root = 1.0f / sqrtf(c2);
#pragma omp parallel for simd schedule(static)
    for (int64_t j = 0; j < n; j++) {
        float d = g[j] * clip;
        m[j] += (1.0f - b1) * (d - m[j]);
        v[j] += (1.0f - b2) * (d * d - v[j]);
        w[j] -= step * m[j] / (sqrtf(v[j]) * root + eps);
        g[j] = 0.0f;
    }
}

/* Add `other` to g, then zero `other`. */
void collect(float *g, float *other, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t j = 0; j < n; j++) g[j] += other[j], other[j] = 0.0f;
}

/* Compute average += rate * (w - average). */
void average(float *average, const float *w, int64_t n, float rate) {
#pragma omp parallel for simd schedule(static)
    for (int64_t j = 0; j < n; j++) average[j] += rate * (w[j] - average[j]);
}
