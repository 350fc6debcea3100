/* model_writer.h - builds small model files in memory for tests. It follows the description of the format and shares no
 * code with moe.c, so that tests detect errors in moe.c. It also provides random numbers and a counting allocator.
 *
 *     mw_model *m = mw_small(MW_GNMT, MW_F32, 1);       a random encoder-decoder, which can be modified
 *     mw_int(m, "decode.beam", 2);                      set a key
 *     mw_image image = mw_build(m);                     image.data, image.bytes; offsets are in m->tensors[i].at
 */
#ifndef MODEL_WRITER_H
#define MODEL_WRITER_H

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Fail the test with a formatted message if the condition is false. Requires cmocka.h. */
#define CHECK(condition, ...)                    \
    do {                                         \
        if (!(condition)) fail_msg(__VA_ARGS__); \
    } while (0)

enum { MW_F32 = 0, MW_F16 = 1, MW_BF16 = 2, MW_Q8 = 3 };
enum { MW_INT = 1, MW_REAL, MW_TEXT, MW_BYTES, MW_INTS, MW_REALS, MW_TEXTS };
enum { MW_GNMT, MW_PRODUCT, MW_BOTH_CONTEXTS, MW_CARRIED_QUERY, MW_FROM_ENCODER, MW_VARIANTS };
enum { MW_VOCABULARY = 40, MW_WIDTH = 16, MW_BOS = 2, MW_EOS = 3, MW_TAG_EN = 4, MW_TAG_DE = 5 };

/* ---- Random numbers ---- */

static inline uint64_t mw_next(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline size_t mw_below(uint64_t *state, size_t n) { return (size_t)(mw_next(state) % n); }

static inline float mw_uniform(uint64_t *state, float low, float high) {
    return low + (high - low) * ((float)(mw_next(state) >> 40) / 16777216.0f);
}

/* Return 1 if VALGRIND is set: valgrind and sanitizers are so slow that tests run fewer rounds. */
static inline int mw_slow(void) {
    const char *slow = getenv("VALGRIND");
    return slow && *slow;
}
static inline size_t mw_rounds(size_t n) { return mw_slow() ? n / 20 + 1 : n; }

/* ---- Allocator that counts, checks sizes and fails on demand ---- */

typedef struct mw_heap {
    size_t calls;   /* number of calls to allocate and reallocate */
    size_t fail_at; /* number of the call that fails, from 1; 0 if none */
    size_t blocks, bytes, peak;
    size_t wrong_sizes; /* number of releases with a wrong size */
} mw_heap;

static inline void *mw_heap_allocate(void *user, size_t bytes) {
    mw_heap *heap = user;
    unsigned char *p;
    if (++heap->calls == heap->fail_at) return NULL;
    p = malloc(bytes + 16);
    if (!p) return NULL;
    memset(p, 0xa5, bytes + 16); /* callers must not rely on zeroed memory */
    memcpy(p, &bytes, sizeof bytes);
    heap->blocks++;
    heap->bytes += bytes;
    if (heap->bytes > heap->peak) heap->peak = heap->bytes;
    return p + 16;
}

static inline void mw_heap_release(void *user, void *old, size_t bytes) {
    mw_heap *heap = user;
    unsigned char *p = (unsigned char *)old - 16;
    size_t real;
    memcpy(&real, p, sizeof real);
    if (real != bytes) heap->wrong_sizes++;
    heap->blocks--;
    heap->bytes -= real;
    free(p);
}

static inline void *mw_heap_reallocate(void *user, void *old, size_t old_bytes, size_t bytes) {
    void *p = mw_heap_allocate(user, bytes);
    if (p && old) {
        memcpy(p, old, old_bytes < bytes ? old_bytes : bytes);
        mw_heap_release(user, old, old_bytes);
    }
    return p;
}

/* ---- A model to write ---- */

typedef struct mw_meta {
    char key[64];
    uint32_t kind;
    unsigned char *value; /* data after the key, including lengths, without the final padding */
    size_t bytes;
    size_t at; /* offset of the entry in the image */
} mw_meta;

typedef struct mw_tensor {
    char name[64];
    uint32_t type, layout, n_dims;
    uint64_t dims[4];
    unsigned char *data;
    size_t bytes;
    size_t at;     /* offset of the directory entry in the image */
    size_t offset; /* offset of the data in the image */
} mw_tensor;

typedef struct mw_model {
    mw_meta meta[128];
    size_t n_meta;
    mw_tensor tensors[80];
    size_t n_tensors;
    uint64_t random;
    uint32_t type;       /* number format of matrices */
    uint32_t version;    /* format version of the file; 0 for the one that its number formats require */
    size_t header_bytes; /* set by mw_build */
} mw_model;

typedef struct mw_image {
    unsigned char *data;
    size_t bytes;
} mw_image;

static inline size_t mw_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static inline void *mw_zeros(size_t bytes) {
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) abort();
    return p;
}

/* ---- Metadata ---- */

static inline mw_meta *mw_find_meta(mw_model *m, const char *key) {
    for (size_t i = 0; i < m->n_meta; i++)
        if (strcmp(m->meta[i].key, key) == 0) return &m->meta[i];
    return NULL;
}

/* Set or replace a metadata entry. */
static inline mw_meta *mw_set(mw_model *m, const char *key, uint32_t kind, const void *value, size_t bytes) {
    mw_meta *e = mw_find_meta(m, key);
    if (!e) e = &m->meta[m->n_meta++];
    free(e->value);
    memset(e, 0, sizeof *e);
    snprintf(e->key, sizeof e->key, "%s", key);
    e->kind = kind;
    e->value = mw_zeros(bytes);
    e->bytes = bytes;
    if (bytes) memcpy(e->value, value, bytes);
    return e;
}

static inline void mw_int(mw_model *m, const char *key, int64_t v) { mw_set(m, key, MW_INT, &v, 8); }
static inline void mw_real(mw_model *m, const char *key, double v) { mw_set(m, key, MW_REAL, &v, 8); }

static inline void mw_blob(mw_model *m, const char *key, uint32_t kind, const void *data, uint64_t bytes) {
    unsigned char *value = mw_zeros(8 + (size_t)bytes);
    memcpy(value, &bytes, 8);
    memcpy(value + 8, data, (size_t)bytes);
    mw_set(m, key, kind, value, 8 + (size_t)bytes);
    free(value);
}

static inline void mw_text(mw_model *m, const char *key, const char *text) {
    mw_blob(m, key, MW_TEXT, text, strlen(text));
}

static inline void mw_ints(mw_model *m, const char *key, const int64_t *v, uint64_t n) {
    unsigned char *value = mw_zeros(8 + 8 * (size_t)n);
    memcpy(value, &n, 8);
    if (n) memcpy(value + 8, v, 8 * (size_t)n);
    mw_set(m, key, MW_INTS, value, 8 + 8 * (size_t)n);
    free(value);
}

static inline void mw_texts(mw_model *m, const char *key, const char *const *texts, uint64_t n) {
    size_t at = 8;
    unsigned char *value;
    for (uint64_t i = 0; i < n; i++) at += 8 + mw_up(strlen(texts[i]), 8);
    value = mw_zeros(at);
    memcpy(value, &n, 8);
    at = 8;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t length = strlen(texts[i]);
        memcpy(value + at, &length, 8);
        memcpy(value + at + 8, texts[i], (size_t)length);
        at += 8 + mw_up((size_t)length, 8);
    }
    mw_set(m, key, MW_TEXTS, value, at);
    free(value);
}

static inline void mw_drop(mw_model *m, const char *key) {
    mw_meta *e = mw_find_meta(m, key);
    if (!e) return;
    free(e->value);
    *e = m->meta[--m->n_meta];
    memset(&m->meta[m->n_meta], 0, sizeof *e);
}

/* ---- Tensors ---- */

static inline mw_tensor *mw_find_tensor(mw_model *m, const char *name) {
    for (size_t i = 0; i < m->n_tensors; i++)
        if (strcmp(m->tensors[i].name, name) == 0) return &m->tensors[i];
    return NULL;
}

static inline void mw_drop_tensor(mw_model *m, const char *name) {
    mw_tensor *t = mw_find_tensor(m, name);
    if (!t) return;
    free(t->data);
    for (; t + 1 < m->tensors + m->n_tensors; t++) t[0] = t[1];
    memset(&m->tensors[--m->n_tensors], 0, sizeof *t);
}

/* Return the F16 or BF16 bits for v, computed slowly and simply. */
static inline uint16_t mw_half(float v, int bf16) {
    const int mantissa = bf16 ? 7 : 10, bias = bf16 ? 127 : 15;
    const double a = fabs((double)v);
    int exponent = 0;
    double unit, steps;
    uint16_t code;
    if (a == 0) return signbit(v) ? 0x8000 : 0;
    frexp(a, &exponent);
    exponent--; /* a = 1.x * 2^exponent */
    if (exponent < 1 - bias) exponent = 1 - bias;
    unit = ldexp(1.0, exponent - mantissa);
    steps = nearbyint(a / unit); /* the division is exact, then round half to even */
    if (steps >= ldexp(1.0, mantissa)) code = (uint16_t)(((exponent + bias - 1) << mantissa) + (int)steps);
    else code = (uint16_t)steps;
    return (uint16_t)(code | (signbit(v) ? 0x8000 : 0));
}

static inline size_t mw_matrix_bytes(uint32_t type, size_t rows, size_t cols) {
    if (type == MW_Q8) return mw_up(rows, 16) * mw_up(cols, 64) + 8 * mw_up(rows, 16);
    if (type == 4) return mw_up(rows, 16) * (mw_up(cols, 64) / 2 + mw_up(cols, 64) / 32 + 8);     /* Q4, size only */
    if (type == 5) return mw_up(rows, 16) * (mw_up(cols, 64) / 2 + mw_up(cols, 64) / 64 * 6 + 8); /* Q4M, size only */
    if (type == 6) return mw_up(rows, 16) * (mw_up(cols, 64) + mw_up(cols, 64) / 32 + 8);         /* Q8B, size only */
    if (type > 6) return mw_up(rows, 16) * (mw_up(cols, 64) / 64 * (type == 7 ? 26 : 18) + 8); /* Q3, Q2, size only */
    return rows * cols * (type == MW_F32 ? 4 : 2);
}

/* Write a matrix to `out`, which must be zeroed, in the layout of the matrix's number format. */
static inline void mw_pack(uint32_t type, size_t rows, size_t cols, const float *w, unsigned char *out) {
    if (type == MW_F32) {
        memcpy(out, w, rows * cols * 4);
    } else if (type != MW_Q8) {
        for (size_t i = 0; i < rows * cols; i++) {
            uint16_t h = mw_half(w[i], type == MW_BF16);
            memcpy(out + 2 * i, &h, 2);
        }
    } else {
        const size_t np = mw_up(rows, 16), kp = mw_up(cols, 64);
        for (size_t r = 0; r < rows; r++) {
            float amax = 0, scale = 0, inverse;
            int32_t sum = 0;
            for (size_t c = 0; c < cols; c++)
                if (fabsf(w[r * cols + c]) > amax) amax = fabsf(w[r * cols + c]);
            if (amax > 0) {
                scale = amax / 127.0f;
                inverse = 127.0f / amax;
                for (size_t c = 0; c < cols; c++) {
                    volatile float product = w[r * cols + c] * inverse;
                    int code = (int)nearbyintf(product);
                    if (code > 127) code = 127;
                    if (code < -127) code = -127;
                    out[((r / 16) * (kp / 4) + c / 4) * 64 + (r % 16) * 4 + c % 4] = (unsigned char)(int8_t)code;
                    sum += code;
                }
            }
            memcpy(out + np * kp + 4 * r, &scale, 4);
            memcpy(out + np * kp + 4 * np + 4 * r, &sum, 4);
        }
    }
}

static inline mw_tensor *mw_add_tensor(mw_model *m, const char *name, uint32_t type, uint32_t layout, size_t bytes) {
    mw_tensor *t = &m->tensors[m->n_tensors++];
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%s", name);
    t->type = type;
    t->layout = layout;
    t->data = mw_zeros(bytes);
    t->bytes = bytes;
    return t;
}

static inline mw_tensor *mw_matrix(mw_model *m, const char *name, uint32_t type, size_t rows, size_t cols,
                                   const float *w) {
    mw_tensor *t = mw_add_tensor(m, name, type, 0, mw_matrix_bytes(type, rows, cols));
    t->n_dims = 2;
    t->dims[0] = rows;
    t->dims[1] = cols;
    mw_pack(type, rows, cols, w, t->data);
    return t;
}

static inline float *mw_random_values(mw_model *m, size_t n, float amplitude) {
    float *w = mw_zeros(n * sizeof *w);
    for (size_t i = 0; i < n; i++) w[i] = mw_uniform(&m->random, -amplitude, amplitude);
    return w;
}

static inline mw_tensor *mw_random_matrix(mw_model *m, const char *name, uint32_t type, size_t rows, size_t cols,
                                          float amplitude) {
    float *w = mw_random_values(m, rows * cols, amplitude);
    mw_tensor *t = mw_matrix(m, name, type, rows, cols, w);
    free(w);
    return t;
}

static inline mw_tensor *mw_random_vector(mw_model *m, const char *name, size_t n, float low, float high) {
    mw_tensor *t = mw_add_tensor(m, name, MW_F32, 0, n * 4);
    t->n_dims = 1;
    t->dims[0] = n;
    for (size_t i = 0; i < n; i++) {
        float v = mw_uniform(&m->random, low, high);
        memcpy(t->data + 4 * i, &v, 4);
    }
    return t;
}

static inline size_t mw_slab_down(uint32_t type, size_t hidden, size_t width) {
    return mw_up(mw_matrix_bytes(type, hidden, width), 64);
}
static inline size_t mw_slab_stride(uint32_t type, size_t hidden, size_t width) {
    return mw_up(mw_slab_down(type, hidden, width) + mw_matrix_bytes(type, width, hidden), 4096);
}

static inline mw_tensor *mw_random_experts(mw_model *m, const char *name, uint32_t type, size_t n, size_t hidden,
                                           size_t width, float amplitude) {
    const size_t stride = mw_slab_stride(type, hidden, width);
    mw_tensor *t = mw_add_tensor(m, name, type, 1, n * stride);
    t->n_dims = 3;
    t->dims[0] = n;
    t->dims[1] = hidden;
    t->dims[2] = width;
    for (size_t e = 0; e < n; e++) {
        float *up = mw_random_values(m, hidden * width, amplitude),
              *down = mw_random_values(m, hidden * width, amplitude);
        mw_pack(type, hidden, width, up, t->data + e * stride);
        mw_pack(type, width, hidden, down, t->data + e * stride + mw_slab_down(type, hidden, width));
        free(up);
        free(down);
    }
    return t;
}

/* ---- Writing ---- */

#ifndef MW_CRC
#define MW_CRC mw_crc /* tests/fuzz defines a faster function */
#endif

static inline uint32_t mw_crc(const unsigned char *p, size_t n) {
    static uint32_t table[256];
    uint32_t crc = 0xffffffffu;
    if (!table[1])
        for (uint32_t i = 0; i < 256; i++) {
            table[i] = i;
            for (int bit = 0; bit < 8; bit++) table[i] = table[i] & 1 ? table[i] >> 1 ^ 0xedb88320u : table[i] >> 1;
        }
    for (size_t i = 0; i < n; i++) crc = crc >> 8 ^ table[(crc ^ p[i]) & 255];
    return ~crc;
}

static inline void mw_put32(unsigned char *p, uint32_t v) { memcpy(p, &v, 4); }
static inline void mw_put64(unsigned char *p, uint64_t v) { memcpy(p, &v, 8); }
static inline uint32_t mw_get32(const unsigned char *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}
static inline uint64_t mw_get64(const unsigned char *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

/* Update the header's checksum if the header's size is plausible. */
static inline void mw_seal(mw_image image) {
    uint64_t n = image.bytes >= 24 ? mw_get64(image.data + 16) : 0;
    if (n >= 16 && n <= image.bytes) mw_put32(image.data + 12, MW_CRC(image.data + 16, (size_t)n - 16));
}

static inline mw_image mw_allocate_image(size_t bytes) {
    mw_image image = { NULL, bytes };
    void *p = NULL;
    if (posix_memalign(&p, 4096, bytes ? bytes : 1)) abort();
    image.data = p;
    memset(p, 0, bytes);
    return image;
}

/* Offsets of the fields that follow the dimensions in a tensor's directory entry. */
static inline size_t mw_at_offset(const mw_tensor *t) { return t->at + 16 + 8 * t->n_dims; }
static inline size_t mw_at_bytes(const mw_tensor *t) { return t->at + 24 + 8 * t->n_dims; }
static inline size_t mw_at_name(const mw_tensor *t) { return t->at + 40 + 8 * t->n_dims; }
static inline size_t mw_at_slabs(const mw_tensor *t) { return t->at + mw_up(40 + 8 * t->n_dims + strlen(t->name), 8); }

/* Return the number of slabs with their own checksums, or 0 if a damaged tensor has fewer bytes than slabs. */
static inline size_t mw_slabs(const mw_tensor *t, uint32_t version) {
    return version > 1 && t->layout && t->dims[0] <= t->bytes ? (size_t)t->dims[0] : 0;
}

/* Return the checksum in a tensor's directory entry and write the checksums of its slabs, if any, to `slabs`. */
static inline uint32_t mw_checksums(const mw_tensor *t, uint32_t version, unsigned char *slabs) {
    const size_t n = mw_slabs(t, version);
    for (size_t i = 0; i < n; i++) mw_put32(slabs + 4 * i, MW_CRC(t->data + i * (t->bytes / n), t->bytes / n));
    return n ? MW_CRC(slabs, 4 * n) : MW_CRC(t->data, t->bytes);
}

static inline mw_image mw_build(mw_model *m) {
    uint32_t version = m->version ? m->version : 2;
    size_t at = 64, header, end;
    mw_image image;
    for (size_t i = 0; i < m->n_tensors && !m->version; i++)
        if (m->tensors[i].type == MOE_TYPE_Q3 || m->tensors[i].type == MOE_TYPE_Q2) version = 3;
    for (size_t i = 0; i < m->n_meta; i++) {
        m->meta[i].at = at;
        at += mw_up(8 + strlen(m->meta[i].key), 8) + mw_up(m->meta[i].bytes, 8);
    }
    for (size_t i = 0; i < m->n_tensors; i++) {
        m->tensors[i].at = at;
        at = mw_at_slabs(&m->tensors[i]) + mw_up(4 * mw_slabs(&m->tensors[i], version), 8);
    }
    header = end = at;
    m->header_bytes = header;
    for (size_t i = 0; i < m->n_tensors; i++) {
        m->tensors[i].offset = mw_up(end, m->tensors[i].layout ? 4096 : 64);
        end = m->tensors[i].offset + m->tensors[i].bytes;
    }
    image = mw_allocate_image(end);
    memcpy(image.data, "MOEMODEL", 8);
    mw_put32(image.data + 8, version);
    mw_put64(image.data + 16, header);
    mw_put64(image.data + 24, end);
    mw_put32(image.data + 32, (uint32_t)m->n_meta);
    mw_put32(image.data + 36, (uint32_t)m->n_tensors);
    for (size_t i = 0; i < m->n_meta; i++) {
        const mw_meta *e = &m->meta[i];
        unsigned char *p = image.data + e->at;
        mw_put32(p, e->kind);
        mw_put32(p + 4, (uint32_t)strlen(e->key));
        memcpy(p + 8, e->key, strlen(e->key));
        memcpy(p + mw_up(8 + strlen(e->key), 8), e->value, e->bytes);
    }
    for (size_t i = 0; i < m->n_tensors; i++) {
        const mw_tensor *t = &m->tensors[i];
        unsigned char *p = image.data + t->at;
        mw_put32(p, t->type);
        mw_put32(p + 4, t->layout);
        mw_put32(p + 8, t->n_dims);
        mw_put32(p + 12, (uint32_t)strlen(t->name));
        p += 16;
        for (size_t d = 0; d < t->n_dims; d++, p += 8) mw_put64(p, t->dims[d]);
        mw_put64(p, t->offset);
        mw_put64(p + 8, t->bytes);
        mw_put32(p + 16, mw_checksums(t, version, image.data + mw_at_slabs(t)));
        memcpy(p + 24, t->name, strlen(t->name));
        memcpy(image.data + t->offset, t->data, t->bytes);
    }
    mw_seal(image);
    return image;
}

static inline void mw_free(mw_model *m) {
    for (size_t i = 0; i < m->n_meta; i++) free(m->meta[i].value);
    for (size_t i = 0; i < m->n_tensors; i++) free(m->tensors[i].data);
    free(m);
}

/* Return the offset of a metadata value in the image. */
static inline size_t mw_at_value(const mw_meta *e) { return e->at + mw_up(8 + strlen(e->key), 8); }

/* Add a lexical shortlist: the tokens of source token t are ids[offsets[t]] to ids[offsets[t + 1] - 1]. */
static inline void mw_shortlist(mw_model *m, size_t tokens, const float *offsets, const float *ids, size_t n,
                                int first) {
    const float *const parts[] = { offsets, ids };
    const size_t counts[] = { tokens + 1, n };
    for (int i = 0; i < 2; i++) {
        mw_tensor *t = mw_add_tensor(m, i ? "shortlist.ids" : "shortlist.offsets", MW_F32, 0, counts[i] * 4);
        t->n_dims = 1;
        t->dims[0] = counts[i];
        memcpy(t->data, parts[i], counts[i] * 4);
    }
    mw_int(m, "shortlist.entries", (int64_t)n);
    mw_int(m, "shortlist.first", first);
    mw_int(m, "shortlist.multiple", 4);
}

/* Add a shortlist with up to three random tokens for each source token. */
static inline void mw_random_shortlist(mw_model *m) {
    float offsets[MW_VOCABULARY + 1], ids[3 * MW_VOCABULARY];
    size_t n = 0;
    offsets[0] = 0;
    for (size_t t = 0; t < MW_VOCABULARY; t++) {
        for (size_t id = mw_below(&m->random, 12), k = 0; k < 3 && id < MW_VOCABULARY; k++) {
            ids[n++] = (float)id;
            id += 1 + mw_below(&m->random, 20);
        }
        offsets[t + 1] = (float)n;
    }
    mw_shortlist(m, MW_VOCABULARY, offsets, ids, n, 4);
    mw_int(m, "shortlist.shared", 1);
}

/* ---- Random encoder-decoders ---- */

static inline const char *mw_name(const char *prefix, const char *rest) {
    static char names[8][64];
    static unsigned next;
    char name[64]; /* temporary, because `prefix` may point into `names` */
    snprintf(name, sizeof name, "%s%s", prefix, rest);
    return memcpy(names[next++ % 8], name, sizeof name);
}

/* Add the tensors of an LSTM. `tensors` is the prefix of their names: "encoder.0." or "encoder.0.fwd." */
static inline void mw_lstm_tensors(mw_model *m, const char *tensors, size_t in, size_t hidden, size_t proj) {
    const size_t state = proj ? proj : hidden;
    mw_random_matrix(m, mw_name(tensors, "w_x"), m->type, 4 * hidden, in, 0.6f);
    mw_random_matrix(m, mw_name(tensors, "w_r"), m->type, 4 * hidden, state, 0.6f);
    mw_random_vector(m, mw_name(tensors, "bias"), 4 * hidden, -0.3f, 0.3f);
    if (proj) mw_random_matrix(m, mw_name(tensors, "w_proj"), m->type, proj, hidden, 0.7f);
}

static inline void mw_lstm(mw_model *m, const char *prefix, size_t in, size_t hidden, size_t proj, int residual) {
    mw_text(m, mw_name(prefix, "kind"), "lstm");
    mw_int(m, mw_name(prefix, "hidden"), (int64_t)hidden);
    if (proj) mw_int(m, mw_name(prefix, "proj"), (int64_t)proj);
    if (residual) mw_int(m, mw_name(prefix, "residual"), 1);
    mw_lstm_tensors(m, prefix, in, hidden, proj);
}

static inline void mw_bidirectional(mw_model *m, const char *prefix, size_t in, size_t hidden, size_t proj,
                                    const char *merge) {
    mw_text(m, mw_name(prefix, "kind"), "lstm");
    mw_int(m, mw_name(prefix, "hidden"), (int64_t)hidden);
    mw_int(m, mw_name(prefix, "proj"), (int64_t)proj);
    mw_int(m, mw_name(prefix, "bidirectional"), 1);
    mw_text(m, mw_name(prefix, "merge"), merge);
    mw_lstm_tensors(m, mw_name(prefix, "fwd."), in, hidden, proj);
    mw_lstm_tensors(m, mw_name(prefix, "bwd."), in, hidden, proj);
}

static inline void mw_moe(mw_model *m, const char *prefix, size_t n, size_t k, size_t hidden, const char *gate) {
    mw_text(m, mw_name(prefix, "kind"), "moe");
    mw_int(m, mw_name(prefix, "experts"), (int64_t)n);
    mw_int(m, mw_name(prefix, "k"), (int64_t)k);
    mw_int(m, mw_name(prefix, "hidden"), (int64_t)hidden);
    mw_text(m, mw_name(prefix, "gate"), gate);
    mw_random_matrix(m, mw_name(prefix, "gate.weight"), MW_F32, n, MW_WIDTH, 0.8f);
    if (strcmp(gate, "threshold") == 0)
        mw_random_vector(m, mw_name(prefix, "gate.threshold"), n, 0.5f / (float)n, 1.4f / (float)n);
    mw_random_experts(m, mw_name(prefix, "experts"), m->type, n, hidden, MW_WIDTH, 0.6f);
}

static inline void mw_attention(mw_model *m, const char *kind, const char *query, const char *start, size_t memory,
                                size_t width, int bias) {
    mw_text(m, "attention.kind", kind);
    mw_int(m, "attention.size", 12);
    mw_text(m, "attention.query", query);
    mw_text(m, "attention.start", start);
    mw_random_matrix(m, "attention.w_key", m->type, 12, memory, 0.8f);
    mw_random_matrix(m, "attention.w_query", m->type, 12, width, 0.8f);
    mw_random_vector(m, "attention.v", 12, -1, 1);
    if (bias) mw_random_vector(m, "attention.bias", 12, -0.3f, 0.3f);
}

/* Create a model over tokens that has no layers yet. Token ids: 0 pad, 1 unknown, 2 begin, 3 end. In models with
 * languages, 4 and 5 are the tags of English and German. */
static inline mw_model *mw_begin(const char *architecture, uint32_t type, uint64_t random) {
    mw_model *m = mw_zeros(sizeof *m);
    m->random = random;
    m->type = type;
    mw_text(m, "general.architecture", architecture);
    mw_text(m, "general.name", "small random model");
    mw_int(m, "vocab.size", MW_VOCABULARY);
    mw_int(m, "model.width", MW_WIDTH);
    mw_int(m, "token.bos", MW_BOS);
    mw_int(m, "token.eos", MW_EOS);
    mw_int(m, "limit.source", 24);
    mw_int(m, "limit.target", 30);
    return m;
}

static inline void mw_languages(mw_model *m) {
    static const char *const codes[] = { "en", "de" };
    static const int64_t tags[] = { MW_TAG_EN, MW_TAG_DE };
    mw_texts(m, "languages.codes", codes, 2);
    mw_ints(m, "languages.tags", tags, 2);
}

static inline mw_model *mw_small(int variant, uint32_t type, uint64_t seed) {
    static const int64_t never[] = { 0, 1, 2, 4, 5 };
    const int languages = variant == MW_GNMT || variant == MW_CARRIED_QUERY;
    mw_model *m = mw_begin("gnmt-moe", type, seed * 77 + (uint64_t)variant);
    mw_real(m, "decode.max_len_factor", 2);
    mw_int(m, "decode.max_len_offset", 4);
    if (languages) {
        mw_languages(m);
        mw_ints(m, "token.never", never, 5);
    }
    if (variant == MW_GNMT) {
        mw_random_matrix(m, "embedding.weight", type, MW_VOCABULARY, MW_WIDTH, 1);
        mw_real(m, "embedding.scale", 1.5);
        mw_int(m, "encoder.layers", 3);
        mw_bidirectional(m, "encoder.0.", MW_WIDTH, 12, 8, "concat");
        mw_moe(m, "encoder.1.", 4, 2, 20, "threshold");
        mw_lstm(m, "encoder.2.", MW_WIDTH, 16, 0, 1);
        mw_int(m, "decoder.layers", 3);
        mw_lstm(m, "decoder.0.", MW_WIDTH + 16, 20, 16, 0);
        mw_text(m, "decoder.0.context", "previous");
        mw_real(m, "decoder.0.forget_bias", 1);
        mw_moe(m, "decoder.1.", 5, 2, 12, "topk");
        mw_real(m, "decoder.1.scale", 0.5);
        mw_text(m, "decoder.1.output", "none");
        mw_lstm(m, "decoder.2.", MW_WIDTH + 16, 16, 0, 1);
        mw_text(m, "decoder.2.context", "previous");
        mw_attention(m, "additive", "state", "query", 16, 16, 1);
    } else if (variant == MW_PRODUCT) {
        mw_random_matrix(m, "source.embedding.weight", type, MW_VOCABULARY, MW_WIDTH, 1);
        mw_random_matrix(m, "target.embedding.weight", type, MW_VOCABULARY, MW_WIDTH, 1);
        mw_int(m, "source.bos", 1);
        mw_int(m, "encoder.layers", 2);
        mw_bidirectional(m, "encoder.0.", MW_WIDTH, 14, 16, "sum");
        mw_moe(m, "encoder.1.", 3, 0, 8, "softmax");
        mw_text(m, "encoder.1.output", "none");
        mw_int(m, "encoder.1.residual", 0);
        mw_int(m, "decoder.layers", 2);
        mw_lstm(m, "decoder.0.", MW_WIDTH, 16, 0, 1);
        mw_lstm(m, "decoder.1.", MW_WIDTH + 16, 18, 16, 1);
        mw_text(m, "decoder.1.context", "current");
        mw_attention(m, "product", "output", "query", 16, 16, 0);
        mw_random_matrix(m, "output.weight", type, MW_VOCABULARY, MW_WIDTH, 1.5f);
    } else if (variant == MW_BOTH_CONTEXTS) {
        mw_random_matrix(m, "embedding.weight", type, MW_VOCABULARY, MW_WIDTH, 1);
        mw_int(m, "encoder.layers", 1);
        mw_lstm(m, "encoder.0.", MW_WIDTH, 22, 0, 0);
        mw_int(m, "decoder.layers", 3);
        mw_lstm(m, "decoder.0.", MW_WIDTH + 22, 16, 0, 0);
        mw_text(m, "decoder.0.context", "previous");
        mw_lstm(m, "decoder.1.", 16 + 22, 16, 0, 1);
        mw_text(m, "decoder.1.context", "current");
        mw_moe(m, "decoder.2.", 6, 1, 16, "threshold");
        mw_text(m, "decoder.2.empty", "zero");
        mw_attention(m, "additive", "state", "zero", 22, 16, 0);
        mw_random_matrix(m, "output.weight", type, MW_VOCABULARY, MW_WIDTH, 1.5f);
    } else if (variant == MW_FROM_ENCODER) {
        mw_random_matrix(m, "embedding.weight", type, MW_VOCABULARY, MW_WIDTH, 1);
        mw_text(m, "decoder.init", "encoder");
        mw_int(m, "encoder.layers", 3);
        mw_bidirectional(m, "encoder.0.", MW_WIDTH, 20, 16, "concat");
        mw_lstm(m, "encoder.1.", 32, 16, 0, 0);
        mw_moe(m, "encoder.2.", 3, 2, 8, "topk");
        mw_int(m, "decoder.layers", 3);
        mw_moe(m, "decoder.0.", 3, 2, 8, "topk");
        mw_lstm(m, "decoder.1.", MW_WIDTH + 16, 20, 16, 0);
        mw_text(m, "decoder.1.context", "previous");
        mw_lstm(m, "decoder.2.", 16 + 16, 16, 0, 1);
        mw_text(m, "decoder.2.context", "current");
        mw_attention(m, "additive", "state", "query", 16, 16, 1);
        mw_int(m, "attention.layer", 1);
        mw_random_matrix(m, "output.weight", type, MW_VOCABULARY, MW_WIDTH, 1.5f);
    } else {
        mw_random_matrix(m, "embedding.weight", type, MW_VOCABULARY, MW_WIDTH, 1);
        mw_int(m, "encoder.layers", 2);
        mw_lstm(m, "encoder.0.", MW_WIDTH, 16, 0, 1);
        mw_moe(m, "encoder.1.", 4, 4, 8, "topk");
        mw_int(m, "decoder.layers", 2);
        mw_lstm(m, "decoder.0.", MW_WIDTH + 16, 16, 0, 1);
        mw_text(m, "decoder.0.context", "previous");
        mw_lstm(m, "decoder.1.", MW_WIDTH, 16, 0, 1);
        mw_attention(m, "product", "output", "zero", 16, 16, 1);
        mw_random_matrix(m, "output.weight", type, MW_VOCABULARY, MW_WIDTH, 1.5f);
    }
    mw_random_vector(m, "output.bias", MW_VOCABULARY, -0.5f, 0.5f);
    return m;
}


/* ---- The gating family, and models without encoder ---- */

static inline void mw_random_gate(mw_model *m, const char *prefix, const char *part, const char *gate, size_t n,
                                  size_t level, size_t in) {
    const char *names = mw_name(prefix, part);
    mw_random_matrix(m, mw_name(names, ".weight"), MW_F32, n, in, 0.8f);
    mw_random_vector(m, mw_name(names, ".bias"), n, -0.5f, 0.5f);
    if (strcmp(gate, "threshold") == 0)
        mw_random_vector(m, mw_name(names, ".threshold"), n, 0.7f / (float)level, 1.5f / (float)level);
}

/* Add a mixture over `in` columns. It has two levels if `groups` is not 0, and an MLP gate if `units` is not 0. Its
 * experts are single matrices (`linear`) or have a hidden layer. All gates have biases. */
static inline void mw_mixture(mw_model *m, const char *prefix, size_t in, size_t n, size_t k, const char *gate,
                              size_t groups, size_t parent_k, const char *parent, size_t units, int linear,
                              size_t hidden) {
    const size_t features = units ? units : in;
    mw_text(m, mw_name(prefix, "kind"), "moe");
    mw_int(m, mw_name(prefix, "experts"), (int64_t)n);
    mw_int(m, mw_name(prefix, "k"), (int64_t)k);
    mw_int(m, mw_name(prefix, "hidden"), (int64_t)hidden);
    mw_text(m, mw_name(prefix, "gate"), gate);
    mw_random_gate(m, prefix, "gate", gate, n, groups ? n / groups : n, features);
    if (groups) {
        mw_int(m, mw_name(prefix, "groups"), (int64_t)groups);
        mw_text(m, mw_name(prefix, "parent.gate"), parent);
        mw_int(m, mw_name(prefix, "parent.k"), (int64_t)parent_k);
        mw_random_gate(m, prefix, "parent", parent, groups, groups, features);
    }
    if (units) {
        mw_int(m, mw_name(prefix, "gate.hidden"), (int64_t)units);
        mw_random_matrix(m, mw_name(prefix, "gate.hidden.weight"), MW_F32, units, in, 0.8f);
        mw_random_vector(m, mw_name(prefix, "gate.hidden.bias"), units, -0.3f, 0.3f);
    }
    if (linear) {
        mw_text(m, mw_name(prefix, "expert"), "linear");
        mw_random_matrix(m, mw_name(prefix, "experts.weight"), m->type, n * hidden, in, 0.6f);
        mw_random_vector(m, mw_name(prefix, "experts.bias"), n * hidden, -0.3f, 0.3f);
    } else {
        mw_random_experts(m, mw_name(prefix, "experts"), m->type, n, hidden, in, 0.6f);
    }
}

/* Return an encoder-decoder with two-level mixtures on both sides. */
static inline mw_model *mw_hierarchical(uint32_t type, uint64_t seed) {
    mw_model *m = mw_small(MW_PRODUCT, type, seed);
    mw_drop_tensor(m, "encoder.1.gate.weight");
    mw_drop_tensor(m, "encoder.1.experts");
    mw_mixture(m, "encoder.1.", MW_WIDTH, 12, 2, "threshold", 3, 1, "topk", 0, 0, 20);
    mw_int(m, "decoder.layers", 4);
    mw_mixture(m, "decoder.2.", MW_WIDTH, 8, 2, "topk", 4, 2, "threshold", 0, 0, 12);
    mw_text(m, "decoder.2.parent.empty", "zero");
    mw_mixture(m, "decoder.3.", MW_WIDTH, 6, 1, "softmax", 2, 1, "topk", 9, 1, MW_WIDTH);
    mw_int(m, "decoder.3.gate.relu", 1);
    return m;
}

static inline mw_model *mw_language_model(uint32_t type, uint64_t seed) {
    static const int64_t never[] = { 0, 1, 2 };
    mw_model *m = mw_begin("moe-lm", type, seed * 77 + 101);
    mw_ints(m, "token.never", never, 3);
    mw_random_matrix(m, "embedding.weight", type, MW_VOCABULARY, MW_WIDTH, 1);
    mw_int(m, "decoder.layers", 4);
    mw_lstm(m, "decoder.0.", MW_WIDTH, 20, 16, 1);
    mw_mixture(m, "decoder.1.", MW_WIDTH, 12, 2, "topk", 3, 2, "topk", 0, 0, 10);
    mw_lstm(m, "decoder.2.", MW_WIDTH, 16, 0, 1);
    mw_mixture(m, "decoder.3.", MW_WIDTH, 5, 2, "threshold", 0, 0, "", 6, 1, MW_WIDTH);
    mw_random_matrix(m, "output.weight", type, MW_VOCABULARY, MW_WIDTH, 1.5f);
    return m;
}

enum { MW_INPUTS = 9, MW_CLASSES = 5 };

static inline mw_model *mw_classifier(uint32_t type, uint64_t seed) {
    mw_model *m = mw_zeros(sizeof *m);
    m->random = seed * 77 + 102;
    m->type = type;
    mw_text(m, "general.architecture", "deep-moe");
    mw_int(m, "vocab.size", MW_CLASSES);
    mw_int(m, "model.width", MW_INPUTS);
    mw_int(m, "network.layers", 3);
    mw_mixture(m, "network.0.", MW_INPUTS, 4, 2, "softmax", 0, 0, "", 7, 1, 12);
    mw_int(m, "network.0.gate.relu", 1);
    mw_text(m, "network.0.output", "none");
    mw_int(m, "network.0.residual", 0);
    mw_mixture(m, "network.1.", 12, 9, 1, "threshold", 3, 1, "threshold", 0, 0, 6);
    mw_text(m, "network.1.empty", "zero");
    mw_mixture(m, "network.2.", 12, 6, 1, "topk", 2, 1, "softmax", 0, 1, 8);
    mw_text(m, "network.2.activation", "none");
    mw_real(m, "network.2.scale", 0.5);
    mw_int(m, "network.2.residual", 0);
    mw_random_matrix(m, "output.weight", type, MW_CLASSES, 8, 1.5f);
    mw_random_vector(m, "output.bias", MW_CLASSES, -0.5f, 0.5f);
    return m;
}


/* ---- Transformers ---- */

/* Add a layer of any kind and its norm, which `place` puts "before" or "after" the layer; "none" omits it. */
static inline void mw_sublayer(mw_model *m, const char *prefix, const char *kind, const char *place) {
    mw_text(m, mw_name(prefix, "kind"), kind);
    if (strcmp(kind, "norm") != 0) mw_int(m, mw_name(prefix, "residual"), 1);
    if (strcmp(kind, "norm") != 0) mw_text(m, mw_name(prefix, "norm"), place);
    if (strcmp(place, "none") == 0) return;
    mw_random_vector(m, mw_name(prefix, "norm.weight"), MW_WIDTH, 0.5f, 1.5f);
    mw_random_vector(m, mw_name(prefix, "norm.bias"), MW_WIDTH, -0.3f, 0.3f);
}

static inline void mw_linear(mw_model *m, const char *prefix, const char *name, size_t out, size_t in, int bias) {
    const char *names = mw_name(prefix, name);
    mw_random_matrix(m, mw_name(names, ".weight"), m->type, out, in, 0.6f);
    if (bias) mw_random_vector(m, mw_name(names, ".bias"), out, -0.4f, 0.4f);
}

/* Add an attention layer. Kind "raw" is self-attention that normalises queries, but not keys and values. */
static inline void mw_heads(mw_model *m, const char *prefix, const char *kind, size_t heads, const char *place,
                            int bias) {
    const int raw = strcmp(kind, "raw") == 0, apart = raw || strcmp(kind, "cross") == 0;
    mw_sublayer(m, prefix, raw ? "attention" : kind, place);
    mw_int(m, mw_name(prefix, "heads"), (int64_t)heads);
    if (raw) mw_int(m, mw_name(prefix, "raw"), 1);
    mw_linear(m, prefix, apart ? "q" : "qkv", apart ? MW_WIDTH : 3 * MW_WIDTH, MW_WIDTH, bias);
    if (apart) mw_linear(m, prefix, "kv", 2 * MW_WIDTH, MW_WIDTH, bias);
    mw_linear(m, prefix, "out", MW_WIDTH, MW_WIDTH, bias);
}

static inline void mw_ffn(mw_model *m, const char *prefix, size_t hidden, const char *activation, const char *place,
                          int bias) {
    mw_sublayer(m, prefix, "ffn", place);
    mw_int(m, mw_name(prefix, "hidden"), (int64_t)hidden);
    mw_text(m, mw_name(prefix, "activation"), activation);
    mw_linear(m, prefix, "up", hidden, MW_WIDTH, bias);
    mw_linear(m, prefix, "down", MW_WIDTH, hidden, bias);
}

static inline void mw_biased_moe(mw_model *m, const char *prefix, size_t n, size_t hidden, const char *place) {
    mw_moe(m, prefix, n, 2, hidden, "topk");
    mw_sublayer(m, prefix, "moe", place);
    mw_text(m, mw_name(prefix, "output"), "none");
    mw_random_vector(m, mw_name(prefix, "experts.up_bias"), n * hidden, -0.4f, 0.4f);
    mw_random_vector(m, mw_name(prefix, "experts.down_bias"), n * MW_WIDTH, -0.4f, 0.4f);
}

static inline void mw_ssru(mw_model *m, const char *prefix, const char *place) {
    mw_sublayer(m, prefix, "ssru", place);
    mw_linear(m, prefix, "input", MW_WIDTH, MW_WIDTH, 0);
    mw_linear(m, prefix, "forget", MW_WIDTH, MW_WIDTH, 1);
}

static inline void mw_average(mw_model *m, const char *prefix, size_t hidden, size_t depth, int gated,
                              const char *place) {
    static const char *const ups[] = { "up.0", "up.1", "up.2" };
    size_t cols = MW_WIDTH;
    mw_sublayer(m, prefix, "average", place);
    mw_int(m, mw_name(prefix, "hidden"), (int64_t)hidden);
    mw_int(m, mw_name(prefix, "depth"), (int64_t)depth);
    mw_int(m, mw_name(prefix, "gated"), gated);
    mw_text(m, mw_name(prefix, "activation"), gated ? "swish" : "relu");
    for (size_t i = 0; i + 1 < depth; i++, cols = hidden) mw_linear(m, prefix, ups[i], hidden, cols, 1);
    if (cols != MW_WIDTH) mw_linear(m, prefix, "down", MW_WIDTH, cols, 1);
    if (gated) mw_linear(m, prefix, "input", MW_WIDTH, MW_WIDTH, 1);
    if (gated) mw_linear(m, prefix, "forget", MW_WIDTH, MW_WIDTH, 1);
}

/* MW_NLLB resembles NLLB-MoE: norms before layers, mixtures, forced tags. MW_MARIAN resembles Marian: norms after
 * layers, swish, suppressed tokens, a forced end. MW_PLAIN has no norms or biases, but GELU and early stopping.
 * MW_STUDENT resembles Marian's students: a recurrent decoder and a gated feed-forward layer with an RMS norm.
 * MW_AVERAGE has average attention, and norms before layers except for keys and values of self-attention. */
enum { MW_NLLB, MW_MARIAN, MW_PLAIN, MW_STUDENT, MW_AVERAGE, MW_TRANSFORMERS };

static inline mw_model *mw_transformer(int variant, uint32_t type, uint64_t seed) {
    static const char *const activations[] = { "relu", "swish", "gelu", "swish", "relu" };
    static const int64_t unwanted[] = { 0, MW_BOS, 7 };
    const int average = variant == MW_AVERAGE;
    const char *place = variant == MW_NLLB || average ? "before" : variant == MW_PLAIN ? "none" : "after";
    const char *self = average ? "raw" : "attention";
    const size_t heads = variant == MW_NLLB ? 4 : variant == MW_MARIAN ? 2 : 1;
    const int bias = variant != MW_PLAIN;
    mw_model *m = mw_begin("transformer", type, seed * 77 + (uint64_t)variant + 201);
    mw_int(m, "decode.max_new", 12);
    mw_real(m, "embedding.scale", variant == MW_PLAIN ? 1 : 4);
    if (variant == MW_NLLB) {
        mw_languages(m);
        mw_int(m, "source.tag", 2);
        mw_int(m, "target.tag", 1);
    } else {
        mw_ints(m, variant == MW_MARIAN ? "token.suppressed" : "token.never", unwanted, 3);
        mw_int(m, variant == MW_MARIAN ? "decode.force_end" : "decode.early_stopping", 1);
    }
    mw_random_matrix(m, "embedding.weight", type, MW_VOCABULARY, MW_WIDTH, 0.6f);
    mw_random_matrix(m, "positions.weight", MW_F32, 48, MW_WIDTH, 0.8f);
    mw_int(m, "encoder.layers", variant == MW_NLLB ? 4 : 3);
    mw_heads(m, "encoder.0.", self, heads, place, bias);
    mw_ffn(m, "encoder.1.", 20, activations[variant], place, bias);
    mw_heads(m, "encoder.2.", self, 2 * heads, place, bias);
    if (variant == MW_NLLB) mw_biased_moe(m, "encoder.3.", 5, 12, place);
    mw_int(m, "decoder.layers", variant == MW_NLLB || average ? 6 : 4);
    if (variant == MW_STUDENT) mw_ssru(m, "decoder.0.", place);
    else if (average) mw_average(m, "decoder.0.", 20, 3, 1, place);
    else mw_heads(m, "decoder.0.", "attention", 2 * heads, place, bias);
    mw_heads(m, "decoder.1.", "cross", heads, place, bias);
    mw_ffn(m, "decoder.2.", 24, activations[variant], place, bias);
    if (variant == MW_STUDENT) {
        mw_ssru(m, "decoder.3.", "before");
        mw_int(m, "decoder.2.gated", 1);
        mw_linear(m, "decoder.2.", "gate", 24, MW_WIDTH, 0);
        mw_text(m, "decoder.2.norm.kind", "rms");
        mw_drop_tensor(m, "decoder.2.norm.bias");
    } else {
        mw_heads(m, "decoder.3.", self, heads, place, bias);
    }
    if (average) {
        mw_average(m, "decoder.4.", MW_WIDTH, 2, 0, "after");
        mw_sublayer(m, "decoder.5.", "norm", place);
    }
    if (variant == MW_NLLB || variant == MW_STUDENT || average) {
        mw_int(m, "align.layer", 1);
        mw_int(m, "align.heads", variant == MW_NLLB ? 9 : 1);
    }
    if (variant == MW_NLLB) {
        mw_biased_moe(m, "decoder.4.", 6, 8, place);
        mw_sublayer(m, "decoder.5.", "norm", place);
    }
    mw_random_vector(m, "output.bias", MW_VOCABULARY, -0.5f, 0.5f);
    return m;
}

/* Return a decoder-only model. */
static inline mw_model *mw_decoder(uint32_t type, uint64_t seed) {
    mw_model *m = mw_begin("decoder", type, seed * 77 + 301);
    mw_real(m, "embedding.scale", 1);
    mw_random_matrix(m, "embedding.weight", type, MW_VOCABULARY, MW_WIDTH, 0.6f);
    mw_random_matrix(m, "positions.weight", MW_F32, 60, MW_WIDTH, 0.8f);
    mw_int(m, "decoder.layers", 3);
    mw_heads(m, "decoder.0.", "attention", 2, "before", 1);
    mw_biased_moe(m, "decoder.1.", 5, 12, "before");
    mw_heads(m, "decoder.2.", "attention", 4, "before", 1);
    mw_random_vector(m, "output.bias", MW_VOCABULARY, -0.5f, 0.5f);
    return m;
}

/* Return a decoder-only model whose last layer is Gated DeltaNet. */
static inline mw_model *mw_delta_decoder(uint32_t type, uint64_t seed) {
    enum { KEYS = 2, HEADS = 4, KEY = 5, VALUE = 6, CONV = 2 * KEYS * KEY + HEADS * VALUE };
    mw_model *m = mw_decoder(type, seed + 7);
    mw_int(m, "decoder.layers", 4);
    mw_sublayer(m, "decoder.3.", "delta", "before");
    mw_int(m, "decoder.3.heads", HEADS);
    mw_int(m, "decoder.3.key_heads", KEYS);
    mw_int(m, "decoder.3.head.size", VALUE);
    mw_int(m, "decoder.3.key.size", KEY);
    mw_int(m, "decoder.3.kernel", 3);
    mw_int(m, "decoder.3.tiled", 1);
    mw_linear(m, "decoder.3.", "in", CONV + HEADS * VALUE + 2 * HEADS, MW_WIDTH, 0);
    mw_linear(m, "decoder.3.", "out", MW_WIDTH, HEADS * VALUE, 0);
    mw_random_vector(m, "decoder.3.conv", 3 * CONV, -0.7f, 0.7f);
    mw_random_vector(m, "decoder.3.rate", HEADS, -1, -0.1f);
    mw_random_vector(m, "decoder.3.shift", HEADS, -1, 1);
    mw_random_vector(m, "decoder.3.head_norm.weight", VALUE, 0.5f, 1.5f);
    return m;
}

/* Return a decoder-only model with a predictor or, with `predicts` 0, without. With `chain`, the layers do nothing, so
 * a token depends only on the token before, and the predictor's best token is the decoder's. */
static inline mw_model *mw_predictor(uint32_t type, uint64_t seed, int chain, int predicts) {
    static const char *const silent[] = {
        "positions.weight",     "decoder.0.out.weight",  "decoder.0.out.bias",          "decoder.1.experts",
        "decoder.2.out.weight", "decoder.2.out.bias",    "decoder.1.experts.down_bias", "predict.0.out.weight",
        "predict.0.out.bias",   "predict.1.down.weight", "predict.1.down.bias"
    };
    static const char *const same[] = { "weight", "bias" };
    mw_model *m = mw_decoder(type, seed);
    float join[MW_WIDTH * 2 * MW_WIDTH] = { 0 };
    mw_int(m, "decoder.layers", 4);
    mw_sublayer(m, "decoder.3.", "norm", "before");
    mw_random_matrix(m, "output.weight", type, MW_VOCABULARY, MW_WIDTH, 0.6f);
    if (predicts) {
        for (size_t i = 0; i < MW_WIDTH; i++) join[i * 2 * MW_WIDTH + i] = 1;
        mw_int(m, "predict.layers", 3);
        mw_random_vector(m, "predict.embedding.norm.weight", MW_WIDTH, 1, chain ? 1 : 1.5f);
        mw_random_vector(m, "predict.hidden.norm.weight", MW_WIDTH, 0.5f, 1.5f);
        if (chain) mw_matrix(m, "predict.join.weight", type, MW_WIDTH, 2 * MW_WIDTH, join);
        else mw_random_matrix(m, "predict.join.weight", type, MW_WIDTH, 2 * MW_WIDTH, 0.5f);
        mw_heads(m, "predict.0.", "attention", 2, "before", 1);
        mw_ffn(m, "predict.1.", 24, "relu", "before", 1);
        mw_sublayer(m, "predict.2.", "norm", "before");
    }
    for (size_t i = 0; chain && i < sizeof silent / sizeof *silent; i++) {
        mw_tensor *t = mw_find_tensor(m, silent[i]);
        if (t) memset(t->data, 0, t->bytes);
    }
    for (size_t i = 0; chain && predicts && i < 2; i++)
        memcpy(mw_find_tensor(m, mw_name("predict.2.norm.", same[i]))->data,
               mw_find_tensor(m, mw_name("decoder.3.norm.", same[i]))->data, MW_WIDTH * sizeof(float));
    return m;
}

#endif /* MODEL_WRITER_H */
