/* Fused elementwise kernels of tools/train.py, which compiles this file at first use and calls it through ctypes.

   All arrays are dense row-major float32. Sequences are packed: the rows of step 0 of all sentences, then those of step 1,
   and so on, sentences by falling length, so that step t holds the first count(t) sentences and nothing is padding. */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* ---- Elementary functions: branch-free, so that loops over them become vector code ------------------------------------ */

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
    union { int32_t i; float f; } power = { ((int32_t)n + 127) << 23 };
    return p * power.f;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }
static inline float tanh_(float x) { return 2.0f / (1.0f + fast_exp(-2.0f * x)) - 1.0f; }

/* ---- LSTM cell, gate order i f g o ------------------------------------------------------------------------------------ */

/* z [n, 4H] holds the products without the bias and receives the activations; c, h [n, H] are written.
   previous [p, H]: cell state of the step before, for the first p rows; the other rows start at zero. */
void cell_forward(float *z, const float *bias, const float *previous, float *c, float *h, int64_t n, int64_t p, int64_t H)
{
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

/* z: activations in, gradient of the products out. carry [>= n, H]: gradient of c, replaced by that of `previous`. */
void cell_backward(float *z, const float *previous, const float *c, const float *dh, float *carry, int64_t n, int64_t p,
                   int64_t H)
{
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

/* ---- Additive attention of one decoder step over the packed source ---------------------------------------------------- */

/* Target row r looks at sentence column[r] of the source, which has length[r] positions; position s lies in row
   offset[s] + column[r] of key [*, a] and memory [*, d]. p [n, S] receives the probabilities; row r of the context goes
   to context + r * stride. */
void attention_forward(const float *query, const float *key, const float *memory, const float *v, const int32_t *column,
                       const int32_t *length, const int32_t *offset, float *p, float *context, int64_t n, int64_t S,
                       int64_t a, int64_t d, int64_t stride)
{
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t r = 0; r < n; r++) {
        const float *q = query + r * a;
        float *prob = p + r * S, *out = context + r * stride, top = -1e30f, sum = 0.0f;
        int count = length[r];
        for (int s = 0; s < count; s++) {
            const float *k = key + (int64_t)(offset[s] + column[r]) * a;
            float score = 0.0f;
#pragma omp simd reduction(+ : score)
            for (int64_t j = 0; j < a; j++)
                score += v[j] * tanh_(k[j] + q[j]);
            prob[s] = score;
            top = score > top ? score : top;
        }
        for (int s = 0; s < count; s++) {
            prob[s] = fast_exp(prob[s] - top);
            sum += prob[s];
        }
        memset(out, 0, d * sizeof *out);
        for (int s = 0; s < count; s++) {
            const float *m = memory + (int64_t)(offset[s] + column[r]) * d;
            float weight = prob[s] /= sum;
#pragma omp simd
            for (int64_t j = 0; j < d; j++)
                out[j] += weight * m[j];
        }
        for (int64_t s = count; s < S; s++)
            prob[s] = 0.0f;
    }
}

/* dcontext: gradient, row r at dcontext + r * stride. dquery [n, a] is written; dkey, dmemory and dv [threads, a] are
   added to (each thread its own row of dv; a source sentence belongs to one target row, so nothing else is shared). */
void attention_backward(const float *dcontext, const float *query, const float *key, const float *memory, const float *v,
                        const int32_t *column, const int32_t *length, const int32_t *offset, const float *p, float *dquery,
                        float *dkey, float *dmemory, float *dv, int64_t n, int64_t S, int64_t a, int64_t d, int64_t stride)
{
    extern int omp_get_thread_num(void);
#pragma omp parallel
    {
        float *own = dv + omp_get_thread_num() * a;
#pragma omp for schedule(dynamic, 4)
        for (int64_t r = 0; r < n; r++) {
            const float *q = query + r * a, *prob = p + r * S, *up = dcontext + r * stride;
            float *dq = dquery + r * a, mean = 0.0f, dp[length[r]];
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
#pragma omp simd
                for (int64_t j = 0; j < a; j++) {
                    float t = tanh_(k[j] + q[j]), g = ds * v[j] * (1.0f - t * t);
                    dk[j] += g;
                    dq[j] += g;
                    own[j] += ds * t;
                }
            }
        }
    }
}

/* ---- Softmax cross-entropy with label smoothing ----------------------------------------------------------------------- */

/* logits [n, V] are replaced by their gradient times `scale`; loss[r] is the plain negative log-likelihood in nats. */
void cross_entropy(float *logits, const int64_t *target, float *loss, int64_t n, int64_t V, float smoothing, float scale)
{
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < n; r++) {
        float *z = logits + r * V, top = -1e30f, sum = 0.0f, right = z[target[r]];
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < V; j++)
            top = z[j] > top ? z[j] : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < V; j++) {
            z[j] = fast_exp(z[j] - top);
            sum += z[j];
        }
        loss[r] = top + logf(sum) - right;
        float factor = scale / sum, floor = scale * smoothing / V;
#pragma omp simd
        for (int64_t j = 0; j < V; j++)
            z[j] = z[j] * factor - floor;
        z[target[r]] -= scale * (1.0f - smoothing);
    }
}

/* ---- Dropout with residual -------------------------------------------------------------------------------------------- */

static inline uint32_t hash(uint32_t x)
{
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    return x;
}

/* y = x + kept * factor * u; x may be null (0). The mask is a hash of seed and position, so backward repeats it. */
void dropout_add(const float *x, const float *u, float *y, int64_t n, uint32_t seed, uint32_t limit, float factor)
{
    uint32_t key = hash(seed);
#pragma omp parallel for simd schedule(static)
    for (int64_t j = 0; j < n; j++)
        y[j] = (x ? x[j] : 0.0f) + (hash((uint32_t)j ^ key) >= limit ? u[j] * factor : 0.0f);
}

/* ---- Rows: embedding and experts -------------------------------------------------------------------------------------- */

/* y[r] = factor * x[index[r]] */
void gather(const float *x, const int64_t *index, float *y, int64_t n, int64_t d, float factor)
{
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < n; r++) {
        const float *from = x + index[r] * d;
#pragma omp simd
        for (int64_t j = 0; j < d; j++)
            y[r * d + j] = factor * from[j];
    }
}

/* y[index[r]] += weight[r] * factor * x[r] (weight may be null: 1). Threads share the columns, so rows may repeat. */
void scatter_add(const float *x, const int64_t *index, const float *weight, float *y, int64_t n, int64_t d, float factor)
{
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < 2; block++) {
        int64_t first = block * d / 2, last = (block + 1) * d / 2;
        for (int64_t r = 0; r < n; r++) {
            float w = weight ? weight[r] * factor : factor;
            float *to = y + index[r] * d;
#pragma omp simd
            for (int64_t j = first; j < last; j++)
                to[j] += w * x[r * d + j];
        }
    }
}

/* The backward of y[index[r]] += weight[r] * x[r]: dx[r] = weight[r] * dy[index[r]], dweight[r] = x[r] . dy[index[r]]. */
void scatter_backward(const float *dy, const float *x, const int64_t *index, const float *weight, float *dx, float *dweight,
                      int64_t n, int64_t d)
{
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

/* dx = where(y > 0, dx, 0) */
void relu_backward(const float *y, float *dx, int64_t n)
{
#pragma omp parallel for simd schedule(static)
    for (int64_t j = 0; j < n; j++)
        dx[j] = y[j] > 0.0f ? dx[j] : 0.0f;
}

/* ---- Optimizer -------------------------------------------------------------------------------------------------------- */

double sum_of_squares(const float *x, int64_t n)
{
    double sum = 0.0;
#pragma omp parallel for reduction(+ : sum) schedule(static)
    for (int64_t block = 0; block < (n + 4095) / 4096; block++) {
        int64_t last = block * 4096 + 4096 < n ? block * 4096 + 4096 : n;
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t j = block * 4096; j < last; j++)
            part += x[j] * x[j];
        sum += part;
    }
    return sum;
}

/* One step of Adam over n values; the gradient is scaled by `clip` and left at zero. c1, c2: 1 - beta^t. */
void adam(float *w, float *g, float *m, float *v, int64_t n, float rate, float b1, float b2, float eps, float c1, float c2,
          float clip)
{
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

/* g += other, other = 0 */
void collect(float *g, float *other, int64_t n)
{
#pragma omp parallel for simd schedule(static)
    for (int64_t j = 0; j < n; j++) {
        g[j] += other[j];
        other[j] = 0.0f;
    }
}

/* average += rate * (w - average) */
void average(float *average, const float *w, int64_t n, float rate)
{
#pragma omp parallel for simd schedule(static)
    for (int64_t j = 0; j < n; j++)
        average[j] += rate * (w[j] - average[j]);
}
