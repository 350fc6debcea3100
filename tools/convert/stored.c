/* stored.c - see stored.h. Blocks of GGUF are decoded with the operations of the Python package `gguf`, in the same
 * order, so that all bits are equal. */
#include "tools/convert/stored.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SCALES = 12 };

static float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t u16_at(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }

static float half_at(const uint8_t *p) {
    const uint32_t h = u16_at(p), sign = h >> 15 << 31, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) return from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    const float x = (float)mantissa * 0x1p-24f;
    return sign ? -x : x;
}

/* ---- Blocks ---- */

static void decode_f32(const uint8_t *p, float *out) { *out = from_bits(u16_at(p) | u16_at(p + 2) << 16); }
static void decode_f16(const uint8_t *p, float *out) { *out = half_at(p); }
static void decode_bf16(const uint8_t *p, float *out) { *out = from_bits(u16_at(p) << 16); }

static void decode_q8_0(const uint8_t *p, float *out) {
    const float d = half_at(p);
    for (int i = 0; i < 32; i++) out[i] = (float)(int8_t)p[2 + i] * d;
}

static void decode_q4_0(const uint8_t *p, float *out) {
    const float d = half_at(p);
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)((p[2 + i] & 15) - 8);
        out[16 + i] = d * (float)((p[2 + i] >> 4) - 8);
    }
}

static void decode_q4_1(const uint8_t *p, float *out) {
    const float d = half_at(p), m = half_at(p + 2);
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)(p[4 + i] & 15) + m;
        out[16 + i] = d * (float)(p[4 + i] >> 4) + m;
    }
}

static int bit(uint32_t bits, int i) { return (int)(bits >> i & 1) << 4; }

static void decode_q5_0(const uint8_t *p, float *out) {
    const float d = half_at(p);
    const uint32_t high = u16_at(p + 2) | u16_at(p + 4) << 16;
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)(((p[6 + i] & 15) | bit(high, i)) - 16);
        out[16 + i] = d * (float)(((p[6 + i] >> 4) | bit(high, 16 + i)) - 16);
    }
}

static void decode_q5_1(const uint8_t *p, float *out) {
    const float d = half_at(p), m = half_at(p + 2);
    const uint32_t high = u16_at(p + 4) | u16_at(p + 6) << 16;
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)((p[8 + i] & 15) | bit(high, i)) + m;
        out[16 + i] = d * (float)((p[8 + i] >> 4) | bit(high, 16 + i)) + m;
    }
}

static void decode_q2_k(const uint8_t *p, float *out) {
    const float d = half_at(p + 80), least = half_at(p + 82);
    for (int i = 0; i < 256; i++) {
        const uint8_t scale = p[i / 16];
        const float step = d * (float)(scale & 15), low = least * (float)(scale >> 4);
        out[i] = step * (float)(p[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) - low;
    }
}

static void decode_q3_k(const uint8_t *p, float *out) {
    const uint8_t *scales = p + 96;
    const float d = half_at(p + 108);
    for (int i = 0; i < 256; i++) {
        const int s = i / 16, low = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
        const float step = d * (float)((low | (scales[8 + s % 4] >> s / 4 * 2 & 3) << 4) - 32);
        const int high = p[i % 32] >> i / 32 & 1 ? 0 : 4;
        out[i] = step * (float)((p[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) - high);
    }
}

/* Unpack the 6-bit scale and minimum of 32 numbers of Q4_K and Q5_K. */
static void unpack_scale(const uint8_t *p, int s, float *scale, float *least) {
    const int low = s < 4 ? p[s] & 63 : (p[s + 4] & 15) | (p[s - 4] >> 2 & 48);
    const int minimum = s < 4 ? p[s + 4] & 63 : p[s + 4] >> 4 | (p[s] >> 2 & 48);
    *scale = (float)low;
    *least = (float)minimum;
}

static void decode_q4_k(const uint8_t *p, float *out) {
    const float d = half_at(p), least = half_at(p + 2);
    for (int s = 0; s < 8; s++) {
        float scale, minimum;
        unpack_scale(p + 4, s, &scale, &minimum);
        const float step = d * scale, low = least * minimum;
        const uint8_t *q = p + 4 + SCALES + s / 2 * 32;
        for (int i = 0; i < 32; i++) out[s * 32 + i] = step * (float)(q[i] >> s % 2 * 4 & 15) - low;
    }
}

static void decode_q5_k(const uint8_t *p, float *out) {
    const float d = half_at(p), least = half_at(p + 2);
    for (int s = 0; s < 8; s++) {
        float scale, minimum;
        unpack_scale(p + 4, s, &scale, &minimum);
        const float step = d * scale, low = least * minimum;
        const uint8_t *high = p + 4 + SCALES, *q = high + 32 + s / 2 * 32;
        for (int i = 0; i < 32; i++)
            out[s * 32 + i] = step * (float)((q[i] >> s % 2 * 4 & 15) | (high[i] >> s & 1) << 4) - low;
    }
}

static void decode_q6_k(const uint8_t *p, float *out) {
    const uint8_t *low = p, *high = p + 128, *scales = p + 192;
    const float d = half_at(p + 208);
    for (int i = 0; i < 256; i++) {
        const float step = d * (float)(int8_t)scales[i / 16];
        const int l = low[i / 128 * 64 + i % 64] >> i % 128 / 64 * 4 & 15;
        const int h = high[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        out[i] = step * (float)((l | h << 4) - 32);
    }
}

static const int8_t iq4_values[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

/* Decode 32 four-bit indices of a table. */
static void look_up(const uint8_t *q, const int8_t values[16], float step, float *out) {
    for (int i = 0; i < 16; i++) {
        out[i] = step * (float)values[q[i] & 15];
        out[16 + i] = step * (float)values[q[i] >> 4];
    }
}

static void decode_iq4_nl(const uint8_t *p, float *out) { look_up(p + 2, iq4_values, half_at(p), out); }

static void decode_iq4_xs(const uint8_t *p, float *out) {
    const float d = half_at(p);
    for (int s = 0; s < 8; s++) {
        const int low = p[4 + s / 2] >> s % 2 * 4 & 15, high = (int)(u16_at(p + 2) >> 2 * s & 3);
        look_up(p + 8 + 16 * s, iq4_values, d * (float)((low | high << 4) - 32), out + 32 * s);
    }
}

static void decode_mxfp4(const uint8_t *p, float *out) {
    static const int8_t doubled[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
    look_up(p + 1, doubled, from_bits(*p < 2 ? 0x200000u << *p : (*p - 1u) << 23), out);
}

static void decode_e4m3(const uint8_t *p, float *out) {
    const int sign = *p >> 7, exponent = *p >> 3 & 15, mantissa = *p & 7;
    float x = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    if (exponent == 15 && mantissa == 7) x = NAN; /* there is no infinity */
    *out = sign ? -x : x;
}

static void decode_e5m2(const uint8_t *p, float *out) { *out = half_at((const uint8_t[]){ 0, *p }); }

static const stored_format formats[] = { { "F32", 0, 1, 4, decode_f32 },
                                         { "F16", 1, 1, 2, decode_f16 },
                                         { "BF16", 30, 1, 2, decode_bf16 },
                                         { "Q4_0", 2, 32, 18, decode_q4_0 },
                                         { "Q4_1", 3, 32, 20, decode_q4_1 },
                                         { "Q5_0", 6, 32, 22, decode_q5_0 },
                                         { "Q5_1", 7, 32, 24, decode_q5_1 },
                                         { "Q8_0", 8, 32, 34, decode_q8_0 },
                                         { "Q2_K", 10, 256, 84, decode_q2_k },
                                         { "Q3_K", 11, 256, 110, decode_q3_k },
                                         { "Q4_K", 12, 256, 144, decode_q4_k },
                                         { "Q5_K", 13, 256, 176, decode_q5_k },
                                         { "Q6_K", 14, 256, 210, decode_q6_k },
                                         { "IQ4_NL", 20, 32, 18, decode_iq4_nl },
                                         { "IQ4_XS", 23, 256, 136, decode_iq4_xs },
                                         { "MXFP4", 39, 32, 17, decode_mxfp4 },
                                         { "IQ1_S", 19, 256, 50, NULL },
                                         { "IQ1_M", 29, 256, 56, NULL },
                                         { "IQ2_XXS", 16, 256, 66, NULL },
                                         { "IQ2_XS", 17, 256, 74, NULL },
                                         { "IQ2_S", 22, 256, 82, NULL },
                                         { "IQ3_XXS", 18, 256, 98, NULL },
                                         { "IQ3_S", 21, 256, 110, NULL },
                                         { "TQ1_0", 34, 256, 54, NULL },
                                         { "TQ2_0", 35, 256, 66, NULL },
                                         { "F64", 28, 1, 8, NULL },
                                         { "I64", 27, 1, 8, NULL },
                                         { "I32", 26, 1, 4, NULL },
                                         { "I16", 25, 1, 2, NULL },
                                         { "I8", 24, 1, 1, NULL },
                                         { "U8", -1, 1, 1, NULL },
                                         { "BOOL", -1, 1, 1, NULL },
                                         { "F8_E4M3", -1, 1, 1, decode_e4m3 },
                                         { "F8_E5M2", -1, 1, 1, decode_e5m2 },
                                         { "U16", -1, 1, 2, NULL },
                                         { "U32", -1, 1, 4, NULL },
                                         { "U64", -1, 1, 8, NULL } };
enum { FORMATS = sizeof formats / sizeof *formats, PLAIN = 3 };

static void decode_int8(const uint8_t *p, float *out) { *out = (float)(int8_t)*p; }
static void decode_int16(const uint8_t *p, float *out) { *out = (float)(int16_t)(uint16_t)u16_at(p); }
static void decode_int32(const uint8_t *p, float *out) { *out = (float)(int32_t)(u16_at(p) | u16_at(p + 2) << 16); }

const stored_format stored_int8 = { "int8", -1, 1, 1, decode_int8 };
const stored_format stored_int16 = { "int16", -1, 1, 2, decode_int16 };
const stored_format stored_int32 = { "int32", -1, 1, 4, decode_int32 };

const stored_format *stored_format_named(const char *name) {
    for (size_t i = 0; i < FORMATS; i++)
        if (strcmp(formats[i].name, name) == 0) return &formats[i];
    return NULL;
}

const stored_format *stored_format_ggml(uint32_t number) {
    for (size_t i = 0; i < FORMATS; i++)
        if (formats[i].ggml >= 0 && (uint32_t)formats[i].ggml == number) return &formats[i];
    return NULL;
}

int stored_is_plain(const stored_format *format) {
    for (size_t i = 0; i < PLAIN; i++)
        if (format == &formats[i]) return 1;
    return 0;
}

/* ---- Tensors ---- */

uint64_t stored_elements(const stored *t) {
    uint64_t n = 1;
    for (uint32_t d = 0; d < t->n_dims; d++) {
        if (!t->dims[d] || t->dims[d] >= STORED_LARGEST || n > (STORED_LARGEST - 1) / t->dims[d]) return 0;
        n *= t->dims[d];
    }
    return n;
}

uint64_t stored_bytes(const stored *t) { return stored_elements(t) / t->format->numbers * t->format->bytes; }

stored *stored_find(const stored_list *list, const char *name) {
    size_t at = 0;
    for (uint32_t i, hash = text_hash(name, strlen(name)); (i = text_index_next(&list->index, hash, &at)) != TEXT_NONE;)
        if (strcmp(list->items[i].name, name) == 0) return &list->items[i];
    return NULL;
}

int stored_add(making *m, stored_list *list, const stored *t) {
    if (!making_failed(m, text_add(&list->items, &list->n, &list->capacity, t, 1, sizeof *t, m->error))) return 0;
    return text_index_add(&list->index, text_hash(t->name, strlen(t->name)), list->n - 1) || making_no_memory(m);
}

void stored_free(stored_list *list) {
    free(list->items);
    text_index_free(&list->index);
    *list = (stored_list){ 0 };
}

/* ---- FP8 ---- */

static void multiply_by_scales(const stored *t, uint64_t row, float *out, size_t cols) {
    const uint64_t per_row = (cols - 1) / t->scale_block[1] + 1;
    const uint8_t *scales = t->scales + row / t->scale_block[0] * per_row * t->scale_format->bytes;
    float scale = 1;
    for (size_t i = 0; i < cols; i++) {
        if (i % t->scale_block[1] == 0)
            t->scale_format->decode(scales + i / t->scale_block[1] * t->scale_format->bytes, &scale);
        out[i] *= scale;
    }
}

/* Connect a matrix with its scales. */
static int connect(making *m, stored *t, const stored *scales, const uint64_t block[2]) {
    const uint64_t n = stored_elements(scales), rows = t->dims[0], cols = t->dims[1];
    char shape[64];
    if (t->n_dims != 2 || !rows || !cols)
        return making_refuse(m, t->file, "tensor %.80s %s: only matrices are supported in FP8", t->own,
                             stored_shape(t, shape, sizeof shape));
    if (!stored_is_plain(scales->format))
        return making_refuse(m, scales->file, "number format %s of tensor %.80s is not supported", scales->format->name,
                             scales->own);
    if (n == 1) t->scale_block[0] = rows, t->scale_block[1] = cols;
    else if (n == rows && scales->dims[0] == rows) t->scale_block[0] = 1, t->scale_block[1] = cols;
    else if (scales->n_dims == 2 && scales->dims[0] == (rows - 1) / block[0] + 1 &&
             scales->dims[1] == (cols - 1) / block[1] + 1)
        t->scale_block[0] = block[0], t->scale_block[1] = block[1];
    else
        return making_refuse(m, scales->file,
                             "tensor %.80s has shape %s: expected one scale, one per row, or one per %" PRIu64
                             " x %" PRIu64 " numbers",
                             scales->own, stored_shape(scales, shape, sizeof shape), block[0], block[1]);
    t->scales = scales->data;
    t->scale_format = scales->format;
    return 1;
}

int stored_connect_scales(making *m, stored_list *list, const uint64_t block[2]) {
    static const char *const unused[] = { ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale" };
    static const char *const suffixes[] = { "_scale", "_scale_inv" };
    int noted = 0;
    for (size_t i = 0; i < list->n; i++) {
        stored *t = &list->items[i], *scales = NULL;
        const size_t length = strlen(t->name);
        for (size_t k = 0; k < sizeof unused / sizeof *unused; k++) {
            if (!text_ends_with(t->name, length, unused[k])) continue;
            t->taken = 1;
            if (!noted++) making_note(m, "ignoring the scales of activations, which are not in FP8 here");
        }
        if (strncmp(t->format->name, "F8_", 3) != 0) continue;
        char *name = making_keep(m, NULL, length + sizeof "_scale_inv");
        if (!name) return 0;
        for (size_t k = 0; k < 2 && !scales; k++) {
            snprintf(name, length + sizeof "_scale_inv", "%s%s", t->name, suffixes[k]);
            scales = stored_find(list, name);
        }
        if (!scales)
            return making_refuse(m, t->file, "tensor %.80s is in FP8 and has no scale (%.60s_scale); download it again",
                                 t->own, t->own);
        scales->taken = 1;
        if (!connect(m, t, scales, block)) return 0;
    }
    return 1;
}

int stored_row(const stored *t, uint64_t row, float *out, size_t cols) {
    const stored_format *f = t->format;
    int finite = 1;
    if (t->heads) { /* rows 2i and 2i + 1 of a head are rows i and i + heads / 2 of transformers */
        const uint64_t in = row % t->heads, half = t->heads / 2;
        row += (in < half ? 2 * in : 2 * (in - half) + 1) - in;
    }
    const uint8_t *p = t->data + row * (cols / f->numbers * f->bytes);
    for (size_t i = 0; i < cols; i += f->numbers, p += f->bytes) f->decode(p, out + i);
    if (t->scales) multiply_by_scales(t, row, out, cols);
    for (size_t i = 0; i < cols; i++) finite &= isfinite(out[i]) != 0;
    return finite;
}

int stored_has_codes(const stored *t) {
    return t->format == &stored_int8 && t->scales && t->n_dims == 2 && t->scale_block[0] == 1 &&
           t->scale_block[1] == t->dims[1];
}

void stored_codes(const stored *t, uint64_t row, int8_t *codes, size_t cols, float *scale) {
    memcpy(codes, t->data + row * cols, cols);
    t->scale_format->decode(t->scales + row * t->scale_format->bytes, scale);
}

const char *stored_shape(const stored *t, char *out, size_t size) {
    size_t n = (size_t)snprintf(out, size, "[");
    for (uint32_t d = 0; d < t->n_dims && n < size; d++)
        n += (size_t)snprintf(out + n, size - n, "%s%llu", d ? ", " : "", (unsigned long long)t->dims[d]);
    if (n < size) snprintf(out + n, size - n, "]");
    return out;
}
