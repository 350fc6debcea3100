/* ct2.c - see ct2.h.
 *
 * model.bin, versions 1 to 6; all integers are little-endian, and a text is u16 length with NUL, bytes:
 *   u32 version; from version 2: text name and u32 revision of the specification; u32 n;
 *   n x { text name; u8 dimensions; u32 each; u8 type, u32 bytes (before version 4: u8 width, u32 numbers); data };
 *   from version 3: u32 n; n x { text alias; text name }
 * Matrices of int8 and int16 have NAME_scale: a code is weight * scale. */
#define _POSIX_C_SOURCE 200809L

#include "tools/convert/ct2.h"
#include "tools/convert/archive.h"
#include "tools/convert/builder.h"
#include "tools/convert/conf.h"
#include "tools/convert/hub.h"
#include "tools/convert/pieces.h"
#include "tools/text/spm.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OLDEST = 1, NEWEST = 6, LONGEST_NAME = 256, MAX_VARIABLES = 1 << 16, LARGEST_VOCABULARY = 1 << 26 };
enum { POSITIONS = 1024, MAX_NEW = 256, MAX_LAYERS = 256, MAX_REACH = 1 << 12, WIDEST = 1 << 20, MAX_TOKENS = 1 << 24 };
static const uint64_t largest_model = (uint64_t)1 << 40;
static const char model_name[] = "model.bin";
static const char *const sides[] = { "encoder", "decoder" };

/* The tokens of a side, and their ids. */
typedef struct tokens {
    const char *file;
    packed_file text;
    cJSON *json;
    moe_span *all; /* [n] */
    size_t n;
    text_index ids;
} tokens;

typedef struct ct2 {
    making *m;
    const convert_options *given;
    archive files;
    const char *folder; /* of model.bin in `files`: "" or "model/" */
    packed_file model, spm[2];
    const char *spm_names[2];
    packed_file bpe;  /* bpe.model of subword-nmt */
    moe_span *merges; /* [n_merges] "left right" */
    moe_span bpe_version;
    size_t n_merges;
    stored_list list;
    const char *spec;
    uint32_t version;
    cJSON *json, *package_json;
    conf config, package; /* package: metadata.json of Argos */
    int is_package;
    tokens vocabularies[2]; /* of sources and targets; a shared one is only in the second */
    int shared;
    builder b;
    int64_t width;
    int codes; /* 1 if matrices are int8 */
    int norms; /* 1 if norms have no beta, 2 if they have one; 0 at first */
    int before[2];
    int64_t heads[2], layers[2];
    const char *activation[2];
} ct2;

/* ---- model.bin ---- */

typedef struct reader {
    making *m;
    const packed_file *file;
    size_t at;
} reader;

static uint32_t number(const uint8_t *p, size_t bytes) {
    uint32_t v = 0;
    for (size_t i = bytes; i-- > 0;) v = v << 8 | p[i];
    return v;
}

static int truncated(making *m) { return making_refuse(m, model_name, "truncated: fetch it again"); }

/* Return the next bytes; NULL after an error. */
static const uint8_t *take(reader *r, uint64_t bytes) {
    const uint8_t *p = r->file->data + r->at;
    if (r->m->status) return NULL;
    if (bytes > r->file->size - r->at) return truncated(r->m), NULL;
    r->at += (size_t)bytes;
    return p;
}

static uint32_t take_number(reader *r, size_t bytes) {
    const uint8_t *p = take(r, bytes);
    return p ? number(p, bytes) : 0;
}

/* Return the next text; NULL after an error. */
static const char *take_text(reader *r) {
    const uint32_t length = take_number(r, 2);
    const uint8_t *p = take(r, length);
    int valid = p && length > 1 && length <= LONGEST_NAME && !p[length - 1];
    for (uint32_t i = 0; valid && i + 1 < length; i++) valid = p[i] >= 0x20 && p[i] <= 0x7e;
    if (p && !valid) making_refuse(r->m, model_name, "invalid name at byte %zu: damaged", r->at - length);
    return valid ? (const char *)p : NULL;
}

static const stored_format *format_of(uint32_t type, int old) {
    static const char *const floats[] = { "F32", "", "", "", "F16", "BF16" };
    if (old)
        return type == 4 ? stored_format_named("F32") : type == 2 ? &stored_int16 : type == 1 ? &stored_int8 : NULL;
    return type == 1   ? &stored_int8
           : type == 2 ? &stored_int16
           : type == 3 ? &stored_int32
           : type < 6  ? stored_format_named(floats[type])
                       : NULL;
}

static int add_variable(ct2 *c, const stored *t) {
    if (stored_find(&c->list, t->name)) return making_refuse(c->m, model_name, "duplicate variable %.100s", t->name);
    return stored_add(c->m, &c->list, t);
}

/* Return the name of a variable in version 1, that of OpenNMT-tf, as version 2 spells it. NULL after an error. */
static const char *new_name(ct2 *c, const char *old) {
    static const char *const parts[][2] = { { "transformer/", "" },
                                            { ":0", "" },
                                            { "w_embs", "embeddings/weight" },
                                            { "kernel", "weight" },
                                            { "LayerNorm", "layer_norm" },
                                            { "dense", "projection" },
                                            { "conv1d_", "linear_" },
                                            { "conv1d", "linear_0" },
                                            { "masked_multi_head", "self_attention" },
                                            { "multi_head", "attention" } };
    char *name = making_keep(c->m, NULL, LONGEST_NAME + 64), copy[LONGEST_NAME + 64];
    if (!name) return NULL;
    snprintf(name, sizeof copy, "%s", old);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const char *at = strstr(name, parts[i][0]);
        if (!at) continue;
        const char *before = strstr(name, "encoder") && strcmp(parts[i][1], "attention") == 0 ? "self_" : "";
        snprintf(copy, sizeof copy, "%.*s%s%s%s", (int)(at - name), name, before, parts[i][1],
                 at + strlen(parts[i][0]));
        memcpy(name, copy, sizeof copy);
    }
    return name;
}

static int read_variable(ct2 *c, reader *r) {
    stored t = { .file = model_name, .own = take_text(r) };
    t.n_dims = take_number(r, 1);
    if (c->m->status) return 0;
    t.name = c->version > 1 ? t.own : new_name(c, t.own);
    if (!t.name) return 0;
    if (t.n_dims > STORED_DIMENSIONS)
        return making_refuse(c->m, model_name, "%.100s has %u dimensions: damaged", t.own, (unsigned)t.n_dims);
    for (uint32_t i = 0; i < t.n_dims; i++) t.dims[i] = take_number(r, 4);
    const uint32_t type = take_number(r, 1);
    uint64_t bytes = take_number(r, 4);
    if (c->m->status) return 0;
    t.format = format_of(type, c->version < 4);
    const uint64_t n = stored_elements(&t);
    if (!t.format) return making_refuse(c->m, model_name, "%.100s has the unknown type %u", t.own, (unsigned)type);
    if (c->version < 4) bytes *= t.format->bytes;
    if (!n || bytes != n * t.format->bytes)
        return making_refuse(c->m, model_name, "%.100s has %" PRIu64 " bytes, which do not match its shape: damaged",
                             t.own, bytes);
    t.data = take(r, bytes);
    return t.data && add_variable(c, &t);
}

/* Read an alias, which also names the scale of the variable. */
static int read_alias(ct2 *c, reader *r) {
    static const char scale[] = "_scale";
    const char *names[2] = { take_text(r), take_text(r) };
    if (c->m->status) return 0;
    for (int k = 0; k < 2; k++) {
        char *both[2] = { 0 };
        for (int i = 0; i < 2; i++) {
            const size_t length = strlen(names[i]);
            both[i] = making_keep(c->m, NULL, length + sizeof scale);
            if (both[i]) snprintf(both[i], length + sizeof scale, "%s%s", names[i], k ? scale : "");
        }
        if (!both[0] || !both[1]) return 0;
        const stored *found = stored_find(&c->list, both[1]);
        if (!found && k) return 1;
        if (!found) return making_refuse(c->m, model_name, "alias of a missing variable %.100s: damaged", both[1]);
        stored t = *found;
        t.name = t.own = both[0];
        if (!add_variable(c, &t)) return 0;
    }
    return 1;
}

/* Connect a matrix of codes with its scales, inverted. */
static int connect_scales(ct2 *c, stored *t) {
    const size_t length = strlen(t->name);
    char *name = making_keep(c->m, NULL, length + 8);
    if (!name) return 0;
    snprintf(name, length + 8, "%s_scale", t->name);
    stored *s = stored_find(&c->list, name);
    const uint64_t n = s ? stored_elements(s) : 1;
    const int fixed = !s && c->version == 1;
    if (!fixed && (!s || s->format != stored_format_named("F32") || (n != 1 && (s->n_dims != 1 || n != t->dims[0]))))
        return making_refuse(c->m, model_name, "%.100s has no scale per row or tensor: damaged", t->name);
    if (s) s->taken = 1;
    float *inverse = making_keep(c->m, NULL, (size_t)n * sizeof *inverse);
    if (!inverse) return 0;
    for (uint64_t i = 0; i < n; i++) {
        float x = 1000; /* in version 1 */
        if (s) s->format->decode(s->data + 4 * i, &x);
        inverse[i] = 1.0f / x;
        if (!(x > 0) || !isfinite(x) || !isfinite(inverse[i]))
            return making_refuse(c->m, model_name, "%.100s contains an invalid scale", name);
    }
    if (t->format == &stored_int8 && memchr(t->data, 0x80, (size_t)stored_elements(t)))
        return making_refuse(c->m, model_name, "%.100s contains a code out of range: damaged", t->name);
    t->scales = (const uint8_t *)inverse;
    t->scale_format = stored_format_named("F32");
    t->scale_block[0] = n == 1 ? t->dims[0] : 1;
    t->scale_block[1] = t->dims[1];
    c->codes |= stored_has_codes(t);
    return 1;
}

static int read_model(ct2 *c) {
    char *path = making_join(c->m, c->folder, model_name);
    const char *in_archive = *c->folder ? path : model_name;
    reader r = { c->m, &c->model, 0 };
    if (!path) return 0;
    if (!archive_has(c->m, &c->files, in_archive))
        return making_refuse(c->m, model_name, "missing: copy the model's whole folder");
    if (!archive_read(c->m, &c->files, in_archive, largest_model, "a model", &c->model)) return 0;
    if (!c->model.data) return truncated(c->m);
    c->version = take_number(&r, 4);
    if (c->m->status == MOE_OK && (c->version < OLDEST || c->version > NEWEST))
        return making_refuse(c->m, model_name, "version %u is not supported: expected %d to %d", (unsigned)c->version,
                             OLDEST, NEWEST);
    c->spec = c->version > 1 ? take_text(&r) : "TransformerBase";
    if (c->version > 1) take_number(&r, 4); /* revision */
    uint32_t n = take_number(&r, 4);
    if (n > MAX_VARIABLES) return making_refuse(c->m, model_name, "%u variables: damaged", (unsigned)n);
    for (uint32_t i = 0; i < n && c->m->status == MOE_OK; i++) read_variable(c, &r);
    n = c->version < 3 ? 0 : take_number(&r, 4);
    for (uint32_t i = 0; i < n && c->m->status == MOE_OK; i++) read_alias(c, &r);
    if (c->m->status == MOE_OK && r.at != c->model.size)
        return making_refuse(c->m, model_name, "%zu bytes after the last variable: damaged", c->model.size - r.at);
    for (size_t i = 0; i < c->list.n && c->m->status == MOE_OK; i++) {
        stored *t = &c->list.items[i];
        if (t->n_dims == 2 && (t->format == &stored_int8 || t->format == &stored_int16)) connect_scales(c, t);
    }
    return c->m->status == MOE_OK;
}

/* ---- Variables ---- */

typedef struct ct2_name {
    char text[LONGEST_NAME];
} ct2_name;

#ifdef __GNUC__
__attribute__((format(printf, 1, 2)))
#endif
static ct2_name
name_of(const char *format, ...) {
    ct2_name p;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(p.text, sizeof p.text, format, arguments);
    va_end(arguments);
    return p;
}

#define NAME(...) name_of(__VA_ARGS__).text

static int has(const ct2 *c, const char *name) { return stored_find(&c->list, name) != NULL; }

/* Return the number in a variable, or `otherwise`. */
static double value(ct2 *c, const char *name, double otherwise) {
    stored *t = stored_find(&c->list, name);
    float x = 0;
    if (!t) return otherwise;
    t->taken = 1;
    if (stored_elements(t) != 1) making_refuse(c->m, model_name, "%.100s is not a number", name);
    else t->format->decode(t->data, &x);
    return (double)x;
}

/* Return an integer, which is in [least, most] also after an error. */
static int64_t whole(ct2 *c, const char *name, int64_t otherwise, int64_t least, int64_t most) {
    const double x = value(c, name, (double)otherwise);
    if (x >= (double)least && x <= (double)most && floor(x) >= x) return (int64_t)x;
    making_refuse(c->m, model_name, "%.100s is %g, which is not supported", name, x);
    return least;
}

/* Reject a number unless it is `only` or missing. */
static void must_be(ct2 *c, const char *name, double only) {
    const double x = value(c, name, only);
    if (x < only || x > only) making_refuse(c->m, model_name, "%.100s is %g, which is not supported", name, x);
}

/* Return 1 if two variables are the same or equal. */
static int are_equal(const stored *a, const stored *b) {
    if (!a || !b) return 0;
    if (a->data == b->data) return 1;
    if (a->format != b->format || a->n_dims != b->n_dims || memcmp(a->dims, b->dims, sizeof a->dims) != 0) return 0;
    if (memcmp(a->data, b->data, (size_t)stored_bytes(a)) != 0 || !a->scales != !b->scales) return 0;
    if (!a->scales) return 1;
    const uint64_t n = a->dims[0] / a->scale_block[0];
    return a->scale_block[0] == b->scale_block[0] && memcmp(a->scales, b->scales, (size_t)n * sizeof(float)) == 0;
}

/* Return the number of rows of a matrix, which has `cols` columns unless it is 0; 1 after an error. */
static int64_t rows_of(ct2 *c, const char *name, int64_t cols) {
    const stored *t = stored_find(&c->list, name);
    if (t && t->n_dims == 2 && t->dims[0] <= MAX_TOKENS && (!cols || t->dims[1] == (uint64_t)cols))
        return (int64_t)t->dims[0];
    making_refuse(c->m, model_name, "%.100s is missing, or not a matrix of %" PRId64 " columns", name, cols);
    return 1;
}

static int64_t count_layers(const ct2 *c, const char *side) {
    int64_t n = 0;
    while (n <= MAX_LAYERS && has(c, NAME("%s/layer_%" PRId64 "/self_attention/linear_0/weight", side, n))) n++;
    return n;
}

/* Return the epsilon of norms, with beta or without. */
static double epsilon(ct2 *c, int beta) {
    return conf_real(&c->config, "layer_norm_epsilon", beta ? 1e-5 : 1e-6, 0.0, 1.0);
}

/* ---- Layers of encoders and decoders ---- */

/* Put the settings of a norm, which is `place` ("before", "after"), or NULL for a layer of its own. */
static void put_norm(ct2 *c, const char *layer, const char *from, const char *place) {
    const int beta = has(c, NAME("%s/beta", from));
    if (c->norms && c->norms != 1 + beta)
        making_refuse(c->m, model_name, "%.100s/beta is %s: other norms have %s", from, beta ? "unexpected" : "missing",
                      beta ? "none" : "one");
    c->norms = 1 + beta;
    if (place) {
        builder_key(&c->b, layer, "residual", 1);
        builder_word(&c->b, layer, "norm", place);
    }
    builder_word(&c->b, layer, "norm.kind", beta ? "layer" : "rms");
    builder_real(&c->b, layer, "epsilon", epsilon(c, beta));
    built *t = builder_one(&c->b, NAME("%s.norm.weight", layer), NAME("%s/gamma", from), c->width, 0);
    const int offset = value(c, NAME("%s/layer_norm_use_residual", from), 0) > 0;
    if (t && offset) t->changed = 1, t->offset = 1, t->scale = 1;
    if (beta) builder_one(&c->b, NAME("%s.norm.bias", layer), NAME("%s/beta", from), c->width, 0);
}

static void put_norm_layer(ct2 *c, const char *side, const char *from) {
    char name[24];
    if (!has(c, NAME("%s/gamma", from))) return;
    builder_layer(&c->b, side, "norm", name);
    put_norm(c, name, from, NULL);
}

static void put_linear(ct2 *c, const char *layer, const char *part, const char *from, int64_t rows, int64_t cols) {
    builder_one(&c->b, NAME("%s.%s.weight", layer, part), NAME("%s/weight", from), rows, cols);
    if (has(c, NAME("%s/bias", from)))
        builder_one(&c->b, NAME("%s.%s.bias", layer, part), NAME("%s/bias", from), rows, 0);
}

/* Return the bucket of a distance, key minus query, as in T5. */
static int64_t bucket_of(int64_t distance, int64_t buckets, int64_t most, int both) {
    int64_t first = 0, d = distance < 0 ? -distance : both ? distance : 0;
    if (both) buckets /= 2, first = distance > 0 ? buckets : 0;
    const int64_t exact = buckets / 2;
    if (d < exact) return first + d;
    const float x = (float)log((double)((float)d / (float)exact)), y = (float)log((double)most / (double)exact);
    d = exact + (int64_t)(x / y * (float)(buckets - exact));
    return first + (d < buckets ? d : buckets - 1);
}

/* Put a table of biases per distance and head, made of biases per bucket. */
static void put_bias(ct2 *c, const char *layer, const char *from, int both, int64_t heads) {
    const ct2_name source = name_of("%s/relative_attention_bias", from);
    const int64_t buckets = rows_of(c, source.text, heads);
    const int64_t most = whole(c, NAME("%s/relative_attention_max_distance", from), 128, 1, MAX_REACH);
    if (c->m->status) return;
    if (buckets < 4 || most <= buckets / 2) {
        making_refuse(c->m, model_name, "%" PRId64 " buckets for distances up to %" PRId64 " are not supported",
                      buckets, most);
        return;
    }
    built *t = builder_tensor(&c->b, NAME("%s.distance.bias", layer), (size_t)(2 * most + 1), (size_t)heads,
                              (size_t)(2 * most + 1));
    const stored *item = builder_take(&c->b, source.text, (const uint64_t[4]){ (uint64_t)buckets, (uint64_t)heads });
    builder_key(&c->b, layer, "reach", most);
    for (int64_t d = -most; d <= most; d++) builder_part(t, item, (uint64_t)bucket_of(d, buckets, most, both), 1);
    if (t) t->f32 = 1;
}

/* Put what depends on the distance of a key from the query. */
static void put_distances(ct2 *c, const char *layer, const char *from, int both, int64_t heads, int64_t head) {
    static const char *const parts[] = { "keys", "values" };
    if (has(c, NAME("%s/relative_attention_bias", from))) {
        put_bias(c, layer, from, both, heads);
        return;
    }
    if (!has(c, NAME("%s/relative_position_keys", from))) return;
    const int64_t rows = rows_of(c, NAME("%s/relative_position_keys", from), head);
    if (rows < 3 || rows % 2 == 0 || rows > 2 * MAX_REACH + 1)
        making_refuse(c->m, model_name, "%.60s/relative_position_keys has %" PRId64 " rows: expected an odd number",
                      from, rows);
    builder_key(&c->b, layer, "reach", rows / 2);
    for (int i = 0; i < 2 && has(c, NAME("%s/relative_position_%s", from, parts[i])); i++) {
        built *t = builder_one(&c->b, NAME("%s.distance.%s", layer, parts[i]),
                               NAME("%s/relative_position_%s", from, parts[i]), rows, head);
        if (t) t->f32 = 1;
    }
}

static void put_attention(ct2 *c, int side, const char *from, int cross) {
    char name[24];
    const int64_t heads = c->heads[side];
    const int64_t keys =
        value(c, NAME("%s/multi_query", from), 0) > 0 ? 1 : whole(c, NAME("%s/num_heads_kv", from), heads, 1, heads);
    const int64_t rows = rows_of(c, NAME("%s/linear_0/weight", from), c->width),
                  parts = cross ? heads : heads + 2 * keys;
    const int64_t head = rows / parts;
    if (c->m->status) return;
    if (heads % keys || rows % parts || head > WIDEST) {
        making_refuse(c->m, model_name, "%.80s: %" PRId64 " rows do not match %" PRId64 " heads", from, rows, heads);
        return;
    }
    must_be(c, NAME("%s/head_dim", from), (double)head);
    must_be(c, NAME("%s/sliding_window", from), 0);
    const double scale = value(c, NAME("%s/queries_scale", from), 0);
    builder_layer(&c->b, sides[side], cross ? "cross" : "attention", name);
    builder_key(&c->b, name, "heads", heads);
    if (keys != heads) builder_key(&c->b, name, "kv_heads", keys);
    if (heads * head != c->width) builder_key(&c->b, name, "head.size", head);
    if (fabs(scale) > 0 && fabs(scale - 1 / sqrt((double)head)) > 1e-7) builder_real(&c->b, name, "scale", scale);
    put_norm(c, name, NAME("%s/layer_norm", from), c->before[side] ? "before" : "after");
    if (!cross) put_distances(c, name, from, !side, heads, head);
    put_linear(c, name, cross ? "q" : "qkv", NAME("%s/linear_0", from), rows, c->width);
    if (cross) put_linear(c, name, "kv", NAME("%s/linear_1", from), 2 * keys * head, c->width);
    put_linear(c, name, "out", NAME("%s/linear_%d", from, 1 + cross), c->width, heads * head);
}

static void put_ffn(ct2 *c, int side, const char *from) {
    char name[24];
    const int64_t hidden = rows_of(c, NAME("%s/linear_0/weight", from), c->width);
    const int gated = has(c, NAME("%s/linear_0_noact/weight", from));
    builder_layer(&c->b, sides[side], "ffn", name);
    builder_key(&c->b, name, "hidden", hidden);
    builder_word(&c->b, name, "activation", c->activation[side]);
    if (gated) builder_key(&c->b, name, "gated", 1);
    put_norm(c, name, NAME("%s/layer_norm", from), c->before[side] ? "before" : "after");
    put_linear(c, name, "up", NAME(gated ? "%s/linear_0_noact" : "%s/linear_0", from), hidden, c->width);
    put_linear(c, name, "down", NAME("%s/linear_1", from), c->width, hidden);
    if (gated) put_linear(c, name, "gate", NAME("%s/linear_0", from), hidden, c->width);
}

static void put_side(ct2 *c, int side) {
    const char *s = sides[side];
    const size_t count_at = c->m->n_entries;
    making_put_int(c->m, side ? "decoder.layers" : "encoder.layers", 0);
    put_norm_layer(c, s, NAME("%s/layernorm_embedding", s));
    for (int64_t i = 0; i < c->layers[side] && c->m->status == MOE_OK; i++) {
        const ct2_name layer = name_of("%s/layer_%" PRId64, s, i);
        put_attention(c, side, NAME("%s/self_attention", layer.text), 0);
        if (side) put_attention(c, side, NAME("%s/attention", layer.text), 1);
        put_ffn(c, side, NAME("%s/ffn", layer.text));
    }
    put_norm_layer(c, s, NAME("%s/layer_norm", s));
    if (c->m->status == MOE_OK) c->m->entries[count_at].integer = c->b.layers[side];
}

/* Read the settings of a side. */
static int read_side(ct2 *c, int side) {
    static const char *const activations[] = { "relu", "gelu_tanh", "swish", "gelu" };
    const char *s = sides[side];
    const int old = !has(c, NAME("%s/num_heads", s)); /* older files have settings for both sides */
    const int64_t usual = strcmp(c->spec, "TransformerBig") == 0 ? 16 : 8;
    c->heads[side] = whole(c, old ? "num_heads" : NAME("%s/num_heads", s), usual, 1, 1 << 16);
    c->before[side] = value(c, has(c, NAME("%s/pre_norm", s)) ? NAME("%s/pre_norm", s) : "pre_norm", 1) > 0;
    const int64_t a = whole(c, has(c, NAME("%s/activation", s)) ? NAME("%s/activation", s) : "activation", 0, 0, 6);
    if (a > 3)
        return making_refuse(c->m, model_name, "%s/activation is %" PRId64 ": expected ReLU, GELU or Swish (0 to 3)", s,
                             a);
    c->activation[side] = activations[a];
    c->layers[side] = count_layers(c, s);
    if (!c->layers[side] || 3 * c->layers[side] + 2 > MOE_MAX_LAYERS)
        return making_refuse(c->m, model_name, "%" PRId64 " layers of the %s are not supported", c->layers[side], s);
    return c->m->status == MOE_OK;
}

/* ---- Embeddings ---- */

/* Return the factor of a side's embeddings. */
static double embedding_scale(ct2 *c, const char *side) {
    const ct2_name new = name_of("%s/scale_embeddings", side),
                   old = name_of("%s/embeddings/multiply_by_sqrt_depth", side);
    const char *name = has(c, new.text) ? new.text : old.text;
    const stored *t = stored_find(&c->list, name);
    const double x = value(c, name, 1);
    if (!t || (t->format == &stored_int8 && x > 0)) return sqrt((double)c->width);
    return t->format == &stored_int8 ? 1 : x;
}

/* Compute the positions of OpenNMT-tf, which start at 1, with each operation rounded to float32. */
static void make_sinusoids(const void *from, size_t row, float *out, size_t cols) {
    const size_t half = cols / 2;
    const float step = (float)log(10000) / (float)(half - 1);
    (void)from;
    for (size_t i = 0; i < half; i++) {
        const float angle = (float)(row + 1) * (float)exp((double)(-step * (float)i));
        out[i] = (float)sin((double)angle);
        out[half + i] = (float)cos((double)angle);
    }
}

static int put_positions(ct2 *c) {
    static const char *const names[] = { "encoder/position_encodings/encodings",
                                         "decoder/position_encodings/encodings" };
    const stored *own[2] = { stored_find(&c->list, names[0]), stored_find(&c->list, names[1]) };
    const char *first = "encoder/layer_0/self_attention";
    if (has(c, NAME("%s/relative_position_keys", first)) || has(c, NAME("%s/relative_attention_bias", first))) return 1;
    if (has(c, NAME("%s/rotary_dim", first)))
        return making_refuse(c->m, model_name, "rotary positions in an encoder are not supported");
    if (!own[0] && !own[1]) {
        if (c->width % 2 || c->width < 4) return making_refuse(c->m, model_name, "an odd width is not supported");
        built *t = builder_tensor(&c->b, "positions.weight", POSITIONS, (size_t)c->width, 1);
        if (t) t->make = make_sinusoids, t->f32 = 1;
        return t != NULL;
    }
    const int64_t rows = rows_of(c, names[0], c->width);
    if (!are_equal(own[0], own[1]))
        return making_refuse(c->m, model_name, "encoder and decoder have different positions, which is not supported");
    const int64_t kept = rows < POSITIONS ? rows : POSITIONS;
    built *t = builder_tensor(&c->b, "positions.weight", (size_t)kept, (size_t)c->width, 1);
    const uint64_t dims[4] = { (uint64_t)rows, (uint64_t)c->width };
    builder_take(&c->b, names[1], dims);
    builder_part(t, builder_take(&c->b, names[0], dims), 0, (uint64_t)kept);
    if (t) t->f32 = 1;
    return t != NULL;
}

static int64_t positions(const ct2 *c) {
    for (size_t i = 0; i < c->b.n; i++)
        if (strcmp(c->b.tensors[i].name, "positions.weight") == 0) return (int64_t)c->b.tensors[i].rows;
    return POSITIONS;
}

/* Add a matrix with a row per token, and `more` rows of zeros. */
static void put_rows(ct2 *c, const char *name, const char *source, int64_t rows, int64_t more) {
    static const char bias[] = ".bias";
    const int64_t cols = text_ends_with(name, strlen(name), bias) ? 0 : c->width;
    built *t = builder_tensor(&c->b, name, (size_t)(rows + more), (size_t)cols, 2);
    builder_part(t, builder_take(&c->b, source, (const uint64_t[4]){ (uint64_t)rows, (uint64_t)cols }), 0,
                 (uint64_t)rows);
    if (t && more && c->m->status == MOE_OK) t->parts[t->n_parts++] = (built_part){ NULL, 0, (uint64_t)more };
}

static const char *const target_name = "decoder/embeddings/weight";

/* Return the name of the sources' embedding. */
static const char *source_name(const ct2 *c) {
    return has(c, "encoder/embeddings_0/weight") ? "encoder/embeddings_0/weight" : "encoder/embeddings/weight";
}

/* Put the embeddings; the start token, if it is the zero vector, follows the target tokens. */
static void put_embeddings(ct2 *c, int64_t sources, int64_t targets, int64_t start) {
    const stored *source = stored_find(&c->list, source_name(c)), *target = stored_find(&c->list, target_name);
    if (c->shared && are_equal(source, target)) {
        builder_take(&c->b, source_name(c), (const uint64_t[4]){ (uint64_t)sources, (uint64_t)c->width });
        put_rows(c, "embedding.weight", target_name, targets, start);
        return;
    }
    put_rows(c, "source.embedding.weight", source_name(c), sources, c->shared ? start : 0);
    put_rows(c, "target.embedding.weight", target_name, targets, start);
}

static void put_output(ct2 *c, int64_t targets, int64_t start) {
    static const char name[] = "decoder/projection/weight";
    stored *output = stored_find(&c->list, name);
    const stored *target = stored_find(&c->list, target_name);
    if (are_equal(output, target)) output->taken = 1;
    else put_rows(c, "output.weight", name, targets, start);
    if (has(c, "decoder/projection/bias")) put_rows(c, "output.bias", "decoder/projection/bias", targets, start);
}

/* Multiply the last norm by the factor of the output layer's input. */
static void scale_output(ct2 *c) {
    const double scale = value(c, "decoder/scale_outputs", 1);
    char last[32];
    if (c->m->status || !(scale < 1 || scale > 1)) return;
    snprintf(last, sizeof last, "decoder.%d.norm.weight", c->b.layers[1] - 1);
    for (size_t i = 0; i < c->b.n; i++) {
        built *t = &c->b.tensors[i];
        if (strcmp(t->name, last) != 0 || !has(c, "decoder/layer_norm/gamma") || has(c, "decoder/layer_norm/beta"))
            continue;
        t->changed = 1;
        t->scale = (float)scale;
        return;
    }
    making_refuse(c->m, model_name, "decoder/scale_outputs is %g, which requires an RMS norm before the output", scale);
}

/* ---- Vocabularies ---- */

/* Return the id of a token, or -1. */
static int64_t id_of(const tokens *t, const char *text, size_t length) {
    size_t at = 0;
    for (uint32_t i; (i = text_index_next(&t->ids, text_hash(text, length), &at)) != TEXT_NONE;)
        if (t->all[i].length == length && memcmp(t->all[i].data, text, length) == 0) return i;
    return -1;
}

/* Split a text into lines, which end in CR LF if all do. */
static size_t split_lines(const char *text, size_t size, moe_span *out) {
    size_t n = 0;
    int returns = 1;
    for (size_t at = 0; at < size;) {
        const char *end = memchr(text + at, '\n', size - at);
        const size_t length = end ? (size_t)(end - text) - at : size - at;
        returns &= length && text[at + length - 1] == '\r';
        out[n++] = (moe_span){ text + at, length };
        at += length + 1;
    }
    for (size_t i = 0; returns && i < n; i++) out[i].length--;
    return n;
}

/* Read NAME.json or NAME.txt. Returns 1 in *found if there is one. */
static int read_vocabulary(ct2 *c, const char *name, tokens *t, int *found) {
    const ct2_name files[] = { name_of("%s%s.json", c->folder, name), name_of("%s%s.txt", c->folder, name) };
    const int text = !archive_has(c->m, &c->files, files[0].text);
    t->file = making_keep(c->m, files[text].text, strlen(files[text].text));
    *found = t->file && archive_has(c->m, &c->files, t->file);
    if (!*found) return c->m->status == MOE_OK;
    if (!archive_read(c->m, &c->files, t->file, LARGEST_VOCABULARY, "a vocabulary", &t->text)) return 0;
    const char *data = t->text.data ? (const char *)t->text.data : "";
    if (!text && !(t->json = conf_parse(c->m, t->file, data, t->text.size))) return 0;
    if (text && text_utf8_valid(data, t->text.size) != t->text.size)
        return making_refuse(c->m, t->file, "not valid UTF-8");
    t->all = making_keep(c->m, NULL, (t->text.size + 1) * sizeof *t->all);
    if (!t->all) return 0;
    if (text) t->n = split_lines(data, t->text.size, t->all);
    const cJSON *x;
    cJSON_ArrayForEach(x, t->json) {
        if (!cJSON_IsArray(t->json) || !cJSON_IsString(x)) return making_refuse(c->m, t->file, "not a list of tokens");
        t->all[t->n++] = (moe_span){ x->valuestring, strlen(x->valuestring) };
    }
    if (!t->n || t->n > MAX_TOKENS) return making_refuse(c->m, t->file, "contains no tokens, or too many");
    for (size_t i = 0; i < t->n; i++) {
        const moe_span s = t->all[i];
        if (id_of(t, s.data, s.length) < 0 && !text_index_add(&t->ids, text_hash(s.data, s.length), i))
            return making_no_memory(c->m);
    }
    return 1;
}

static int read_vocabularies(ct2 *c) {
    if (!read_vocabulary(c, "shared_vocabulary", &c->vocabularies[1], &c->shared)) return 0;
    if (c->shared) return 1;
    int found[2];
    if (!read_vocabulary(c, "source_vocabulary", &c->vocabularies[0], &found[0]) ||
        !read_vocabulary(c, "target_vocabulary", &c->vocabularies[1], &found[1]))
        return 0;
    if (found[0] && found[1]) return 1;
    return making_refuse(c->m, packed_base(c->given->path),
                         "shared_vocabulary.json, or source_vocabulary.json and target_vocabulary.json, are missing: "
                         "copy the model's whole folder");
}

static const tokens *source_tokens(const ct2 *c) { return &c->vocabularies[c->shared]; }

/* Check that a vocabulary fits the rows of an embedding, of which some may have no token. */
static int check_size(ct2 *c, const tokens *t, int64_t rows) {
    return (int64_t)t->n <= rows ||
           making_refuse(c->m, t->file, "%zu tokens, but the model has %" PRId64 ": copy the model's whole folder",
                         t->n, rows);
}

/* Return the id of a special token that config.json names, or that older files name in a variable. */
static int64_t special(ct2 *c, const tokens *t, const char *key, const char *otherwise) {
    const char *text = conf_text(&c->config, key);
    stored *v = stored_find(&c->list, key);
    size_t length = text ? strlen(text) : 0;
    if (!text && v && v->format == &stored_int8) {
        v->taken = 1;
        text = (const char *)v->data;
        length = (size_t)stored_elements(v);
    }
    if (!text) text = otherwise, length = strlen(text);
    return id_of(t, text, length);
}

/* Return a flag of config.json, or of a variable in older files. */
static int flag(ct2 *c, const char *key, const char *old) {
    const int is_old = value(c, old, 0) > 0;
    return conf_flag(&c->config, key, is_old);
}

/* ---- Languages ---- */

enum { SHORT_CODES, SCRIPT_CODES, LONG_CODES, ALL_CODES };

static int is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

/* Return 1 for a language code: 2 or 3 letters; 3 letters and a script; 2 or 3 letters and more; any text. */
static int is_code(moe_span code, int kind) {
    size_t letters = 0, more = 0;
    while (letters < code.length && code.data[letters] >= 'a' && code.data[letters] <= 'z') letters++;
    for (size_t i = letters; i < code.length; i++) {
        if (kind == ALL_CODES && (code.data[i] == '<' || code.data[i] == '>')) return 0;
        more += is_letter(code.data[i]) || code.data[i] == '_' || code.data[i] == '-';
    }
    const int is_short = letters == 2 || letters == 3;
    if (kind == ALL_CODES) return 1;
    if (kind == SHORT_CODES) return is_short && letters == code.length;
    if (kind == LONG_CODES) return is_short && letters + more == code.length;
    return letters == 3 && code.length == 8 && more == 5 && code.data[3] == '_' && code.data[4] >= 'A' &&
           code.data[4] <= 'Z';
}

/* Kinds of language tokens, and where they stand: 1 if sources begin with the target, 2 with the source language. */
static const struct {
    const char *before, *after;
    int codes, source, forced; /* forced: 1 if targets begin with the target language */
} language_rows[] = { { "__", "__", SHORT_CODES, 2, 1 },
                      { "", "", SCRIPT_CODES, 2, 1 },
                      { "<2", ">", LONG_CODES, 1, 0 },
                      { ">>", "<<", ALL_CODES, 1, 0 } };
enum { LANGUAGE_ROWS = sizeof language_rows / sizeof *language_rows };

/* Return the code in a token of a kind, or an empty span. */
static moe_span code_of(moe_span s, size_t row) {
    const char *before = language_rows[row].before, *after = language_rows[row].after;
    const size_t a = strlen(before), b = strlen(after);
    const moe_span none = { NULL, 0 };
    if (s.length <= a + b || memcmp(s.data, before, a) != 0 || memcmp(s.data + s.length - b, after, b) != 0)
        return none;
    const moe_span code = { s.data + a, s.length - a - b };
    return is_code(code, language_rows[row].codes) ? code : none;
}

/* Put the languages of a model with several. Returns the row of their kind, or LANGUAGE_ROWS. */
static size_t put_languages(ct2 *c) {
    const tokens *t = source_tokens(c);
    moe_span *codes = making_keep(c->m, NULL, t->n * sizeof *codes);
    int64_t *ids = making_keep(c->m, NULL, t->n * sizeof *ids);
    for (size_t row = 0; row < LANGUAGE_ROWS && ids && codes; row++) {
        size_t n = 0;
        for (size_t i = 0; i < t->n; i++) {
            const moe_span code = code_of(t->all[i], row);
            if (code.length) codes[n] = code, ids[n++] = (int64_t)i;
        }
        if (n < 2 && !(n && language_rows[row].codes == ALL_CODES)) continue;
        making_put_texts(c->m, "languages.codes", codes, n, 0);
        making_put_ints(c->m, "languages.tags", ids, n);
        return row;
    }
    return LANGUAGE_ROWS;
}

/* Put the languages of a package. */
static int put_pair(ct2 *c) {
    static const char *const keys[][2] = { { "from_code", "languages.sources" }, { "to_code", "languages.targets" } };
    const char *prefix = conf_text(&c->package, "target_prefix");
    if (prefix && *prefix)
        return making_refuse(c->m, "metadata.json",
                             "target_prefix %.40s is not supported: only packages of one pair are", prefix);
    for (int i = 0; i < 2; i++) {
        const char *code = conf_text(&c->package, keys[i][0]);
        if (!code || !*code) return making_refuse(c->m, "metadata.json", "%s is missing", keys[i][0]);
        making_put_texts(c->m, keys[i][1], &(moe_span){ code, strlen(code) }, 1, 0);
    }
    return c->m->status == MOE_OK;
}

/* ---- Tokenisers ---- */

static int open_spm(ct2 *c, int i, const char *name) {
    char why[160];
    if (!archive_read(c->m, &c->files, name, SPM_MAX_MODEL, "a SentencePiece model", &c->spm[i])) return 0;
    spm *s = spm_new(c->spm[i].data ? (const char *)c->spm[i].data : "", c->spm[i].size, why, sizeof why);
    c->spm_names[i] = name;
    if (!s) return making_refuse(c->m, name, "not a SentencePiece model, or damaged: %s", why);
    spm_free(s);
    return 1;
}

/* Read subword-nmt's codes: an optional line "#version: 0.2", then a merge per line. */
static int read_codes(ct2 *c, const char *name) {
    if (!archive_read(c->m, &c->files, name, LARGEST_VOCABULARY, "a list of merges", &c->bpe)) return 0;
    const char *text = c->bpe.data ? (const char *)c->bpe.data : "";
    if (text_utf8_valid(text, c->bpe.size) != c->bpe.size) return making_refuse(c->m, name, "not valid UTF-8");
    c->merges = making_keep(c->m, NULL, (c->bpe.size + 1) * sizeof *c->merges);
    if (!c->merges) return 0;
    const size_t n = split_lines(text, c->bpe.size, c->merges);
    for (size_t i = 0; i < n; i++) {
        moe_span line = c->merges[i];
        while (line.length && strchr("\r ", line.data[line.length - 1])) line.length--;
        const char *space = memchr(line.data, ' ', line.length), *end = line.data + line.length;
        if (!i && text_begins_with(line.data, line.length, "#version:")) {
            const char *version = space ? space + 1 : end;
            c->bpe_version = (moe_span){ version, (size_t)(end - version) };
        } else if (!space || space == line.data || memchr(space + 1, ' ', (size_t)(end - space - 1))) {
            if (line.length || i + 1 < n)
                return making_refuse(c->m, name, "line %zu is not a merge of two pieces: damaged", i + 1);
        } else {
            c->merges[c->n_merges++] = line;
        }
    }
    if (!c->n_merges || c->n_merges > MOE_MAX_TEXTS)
        return making_refuse(c->m, name, "%zu merges: expected 1 to %d", c->n_merges, MOE_MAX_TEXTS);
    if (!c->bpe_version.length) c->bpe_version = (moe_span){ "0.1", 3 };
    return c->m->status == MOE_OK;
}

/* Find the SentencePiece models: one per side, or one for both; else Argos's list of merges. */
static int find_spm(ct2 *c) {
    static const char any[] = "sentencepiece*.model spiece.model tokenizer.model *spm*.model *.spm";
    static const char other[] = "*.bpe bpe.codes* tokenizer.json vocab.json merges.txt", codes_name[] = "bpe.model";
    const char *folders[] = { "", c->folder };
    if (c->given->ids_only) return 1;
    for (int i = 0; i < 2; i++) {
        const ct2_name both[] = { name_of("%ssource.spm", folders[i]), name_of("%starget.spm", folders[i]) };
        const int n = archive_has(c->m, &c->files, both[0].text) + archive_has(c->m, &c->files, both[1].text);
        if (n == 2)
            return open_spm(c, 0, making_keep(c->m, both[0].text, strlen(both[0].text))) &&
                   open_spm(c, 1, making_keep(c->m, both[1].text, strlen(both[1].text)));
        const char *found = archive_match(c->m, &c->files, folders[i], any, 0);
        const char *second = found ? archive_match(c->m, &c->files, folders[i], any, 1) : NULL;
        if (n == 1 || second)
            return making_refuse(c->m, packed_base(c->given->path),
                                 "%s: keep sentencepiece.model, or source.spm and target.spm",
                                 second ? "contains several SentencePiece models"
                                        : "contains only one of source.spm and target.spm");
        if (found) return open_spm(c, 0, found);
        if (c->m->status || !*c->folder) break;
    }
    if (archive_has(c->m, &c->files, codes_name)) return read_codes(c, codes_name);
    const char *found = archive_match(c->m, &c->files, "", other, 0);
    if (c->m->status) return 0;
    return making_refuse(
        c->m, packed_base(c->given->path),
        "no tokeniser: copy sentencepiece.model, or source.spm and target.spm, from the model that was "
        "converted%s%.60s%s",
        found ? " (found only " : "", found ? found : "", found ? ", which is not supported)" : "");
}

/* Put the ids of the tokeniser's pieces. */
static int put_ids(ct2 *c, int64_t unknown) {
    const tokens *t = &c->vocabularies[1];
    pieces_bpe all;
    if (!c->shared || c->spm[1].data)
        return making_refuse(c->m, t->file, "%zu tokens; the limit with two vocabularies or tokenisers is %d", t->n,
                             MOE_MAX_TEXTS);
    if (!making_failed(c->m, pieces_list(c->spm[0].data, c->spm[0].size, c->spm_names[0], &all, c->m->error))) return 0;
    int64_t *ids = making_keep(c->m, NULL, all.n * sizeof *ids);
    size_t known = 0;
    for (size_t i = 0; i < all.n && ids; i++) {
        ids[i] = all.all[i].kind == PIECE_UNKNOWN ? unknown : id_of(t, all.all[i].text.data, all.all[i].text.length);
        known += ids[i] >= 0;
    }
    if (ids) making_put_ints(c->m, "tokenizer.ids", ids, all.n);
    if (ids && known < all.n / 2) making_refuse(c->m, c->spm_names[0], "does not match %s", t->file);
    pieces_free_bpe(&all);
    return c->m->status == MOE_OK;
}

/* Put the pieces of a vocabulary of `rows` ids. */
static void put_pieces(ct2 *c, const char *key, const tokens *t, int64_t rows) {
    making_put_texts(c->m, key, t->all, t->n, (size_t)rows - t->n);
}

/* Return 1 if a tokeniser's pieces are tokens of the vocabulary: more than half of them. */
static int fits(ct2 *c, int i, const tokens *t) {
    pieces_bpe all;
    size_t known = 0;
    if (!making_failed(c->m, pieces_list(c->spm[i].data, c->spm[i].size, c->spm_names[i], &all, c->m->error))) return 0;
    for (size_t k = 0; k < all.n; k++) known += id_of(t, all.all[k].text.data, all.all[k].text.length) >= 0;
    const int good = 2 * known >= all.n || 2 * known >= t->n;
    pieces_free_bpe(&all);
    return good || making_refuse(c->m, c->spm_names[i], "does not match %s", t->file);
}

/* Put the merges, which moses-bpe.py applies to the words that Moses's tokeniser finds. */
static void put_merges(ct2 *c) {
    making_put_texts(c->m, "tokenizer.merges", c->merges, c->n_merges, 0);
    making_put_span(c->m, "tokenizer.bpe_version", MOE_META_TEXT, c->bpe_version.data, c->bpe_version.length);
    making_put_text(c->m, "tokenizer.separator", "@@");
    making_put_text(c->m, "tokenizer.source_language", conf_text(&c->package, "from_code"));
    making_put_text(c->m, "tokenizer.target_language", conf_text(&c->package, "to_code"));
    making_put_int(c->m, "tokenizer.punctuation", c->is_package);
}

static int put_tokeniser(ct2 *c, int64_t sources, int64_t targets, int64_t unknown) {
    const int two = c->spm[1].data != NULL;
    making_put_text(c->m, "tokenizer.kind", c->spm[0].data ? "sentencepiece" : c->n_merges ? "bpe" : "none");
    if (c->n_merges) put_merges(c);
    if (c->spm[0].data) making_put_span(c->m, "tokenizer.model", MOE_META_BYTES, c->spm[0].data, c->spm[0].size);
    if (two && (!c->spm[0].data || c->spm[0].size != c->spm[1].size ||
                memcmp(c->spm[0].data, c->spm[1].data, c->spm[0].size) != 0))
        making_put_span(c->m, "tokenizer.target_model", MOE_META_BYTES, c->spm[1].data, c->spm[1].size);
    if (c->spm[0].data && (!fits(c, 0, source_tokens(c)) || (two && !fits(c, 1, &c->vocabularies[1])))) return 0;
    if (sources > MOE_MAX_TEXTS || targets > MOE_MAX_TEXTS) return !c->spm[0].data || put_ids(c, unknown);
    put_pieces(c, "vocabulary.pieces", &c->vocabularies[1], targets);
    if (!c->shared) put_pieces(c, "source.pieces", &c->vocabularies[0], sources);
    return c->m->status == MOE_OK;
}

/* ---- Encoder and decoder ---- */

/* Put the format of sources and targets. */
static int put_format(ct2 *c, int64_t sources, int64_t start, int zero) {
    const tokens *target = &c->vocabularies[1], *source = source_tokens(c);
    const int64_t eos = special(c, target, "eos_token", "</s>"), unk = special(c, target, "unk_token", "<unk>");
    const int64_t source_eos = special(c, source, "eos_token", "</s>");
    int begins = flag(c, "add_source_bos", "with_source_bos"), ends = flag(c, "add_source_eos", "with_source_eos");
    if (eos < 0 || start < 0)
        return making_refuse(c->m, target->file, "the end token or decoder_start_token is missing");
    making_put_int(c->m, "token.bos", start);
    making_put_int(c->m, "token.eos", eos);
    if (unk >= 0) making_put_int(c->m, "token.unk", unk);
    if (zero) making_put_ints(c->m, "token.never", &start, 1);
    const size_t row = put_languages(c);
    const int several = row < LANGUAGE_ROWS;
    /* Tokenisers of transformers, not CTranslate2, add the end token in these models. */
    ends |= several || zero || has(c, "encoder/layer_0/self_attention/relative_attention_bias");
    making_put_int(c->m, "source.tag", several ? language_rows[row].source : 0);
    if (several && language_rows[row].forced) making_put_int(c->m, "target.tag", 1);
    if (begins && special(c, source, "bos_token", "<s>") != start)
        return making_refuse(c->m, "config.json",
                             "add_source_bos is not supported unless bos_token starts targets too");
    if (!c->shared && begins) return making_refuse(c->m, "config.json", "add_source_bos is not supported here");
    making_put_int(c->m, "source.bos", begins);
    making_put_int(c->m, "source.eos", ends);
    if (!c->shared) {
        if (source_eos < 0 && ends) return making_refuse(c->m, source->file, "the end token is missing");
        making_put_int(c->m, "source.vocab.size", sources);
        making_put_int(c->m, "source.token.eos", source_eos < 0 ? 0 : source_eos);
        const int64_t source_unk = special(c, source, "unk_token", "<unk>");
        if (source_unk >= 0) making_put_int(c->m, "source.token.unk", source_unk);
    }
    return c->is_package ? put_pair(c) : c->m->status == MOE_OK;
}

/* Put the defaults of translate_batch, or those of Argos Translate. */
static void put_search(ct2 *c, int64_t longest) {
    making_put_text(c->m, "decode.rules", "hf");
    making_put_int(c->m, "decode.beam", c->is_package ? 4 : 2);
    making_put_real(c->m, "decode.length_penalty", c->is_package ? 0.2 : 1.0);
    making_put_real(c->m, "decode.length_constant", 0);
    making_put_int(c->m, "decode.early_stopping", 1);
    making_put_int(c->m, "decode.max_new", longest < MAX_NEW ? longest : MAX_NEW);
    making_put_int(c->m, "limit.source", longest);
    making_put_int(c->m, "limit.target", longest);
}

/* Ignore settings without effect, and reject variants of the decoder. */
static void check_rest(ct2 *c) {
    static const char *const ignored[] = { "encoder/embeddings_merge",
                                           "embeddings_merge",
                                           "encoder/multi_query_attention",
                                           "decoder/alignment_layer",
                                           "decoder/alignment_heads",
                                           "alignment_layer",
                                           "alignment_heads",
                                           "with_target_bos",
                                           "user_decoder_start_tokens",
                                           "decoder/alibi_use_positive_positions",
                                           "decoder/scale_alibi" };
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) value(c, ignored[i], 0);
    must_be(c, "decoder/alibi", 0);
}

/* Return the id of the start token; the zero vector follows the tokens. */
static int64_t start_of(ct2 *c, int64_t targets, int zero) {
    const tokens *t = &c->vocabularies[1];
    const cJSON *given = cJSON_GetObjectItemCaseSensitive(c->config.object, "decoder_start_token");
    if (zero) return targets;
    if (c->version < NEWEST && value(c, "with_target_bos", 1) <= 0) return special(c, t, "eos_token", "</s>");
    if (given && cJSON_IsNull(given)) return special(c, t, "eos_token", "</s>"); /* fairseq */
    return special(c, t, given ? "decoder_start_token" : "bos_token", "<s>");
}

static int convert_transformer(ct2 *c) {
    making *m = c->m;
    if (!read_vocabularies(c) || !find_spm(c)) return 0;
    const stored *embedding = stored_find(&c->list, target_name);
    c->width = embedding && embedding->n_dims == 2 ? (int64_t)embedding->dims[1] : 0;
    if (c->width < 1 || c->width > WIDEST) return making_refuse(m, model_name, "%s is missing", target_name);
    const int64_t sources = rows_of(c, source_name(c), c->width), targets = rows_of(c, target_name, c->width);
    const int zero = value(c, "decoder/start_from_zero_embedding", 0) > 0;
    if (m->status || !check_size(c, source_tokens(c), sources) || !check_size(c, &c->vocabularies[1], targets))
        return 0;
    if (c->shared && sources != targets) return making_refuse(m, model_name, "the embeddings have different sizes");
    const double scale = embedding_scale(c, sides[0]), other = embedding_scale(c, sides[1]);
    if (scale < other || scale > other)
        return making_refuse(m, model_name, "encoder and decoder scale embeddings differently");
    making_put_text(m, "general.architecture", "transformer");
    making_put_text(m, "general.name", c->given->name ? c->given->name : making_default_name(m, c->given->path, 1));
    making_put_text(m, "general.description", c->given->description);
    making_put_text(m, "general.licence", c->given->licence);
    making_put_text(m, "general.attribution", c->given->attribution);
    making_put_int(m, "vocab.size", targets + zero);
    making_put_int(m, "model.width", c->width);
    making_put_real(m, "embedding.scale", scale);
    if (!put_format(c, sources + (c->shared ? zero : 0), start_of(c, targets, zero), zero)) return 0;
    put_embeddings(c, sources, targets, zero);
    if (!put_positions(c)) return 0;
    put_search(c, positions(c));
    if (!put_tokeniser(c, sources + (c->shared ? zero : 0), targets + zero,
                       special(c, &c->vocabularies[1], "unk_token", "<unk>")))
        return 0;
    check_rest(c);
    for (int side = 0; side < 2; side++)
        if (read_side(c, side)) put_side(c, side);
    scale_output(c);
    put_output(c, targets, zero);
    return builder_all_taken(&c->b, "\n") && builder_write(&c->b, c->model.size);
}

/* ---- Decoder-only models: the tensors get the names of transformers ---- */

enum { DECODER_CONTEXT = 8192, LLAMA_3 = 2 };

/* Give rows of a variable another name, with their scales. */
static void rename_rows(ct2 *c, stored_list *out, const char *from, const char *to, int64_t first, int64_t rows) {
    stored *item = stored_find(&c->list, from);
    if (c->m->status || !item) return;
    item->taken = 1;
    stored t = *item;
    t.taken = 0;
    t.name = making_keep(c->m, to, strlen(to));
    const uint64_t row = stored_bytes(&t) / t.dims[0];
    t.data += (uint64_t)first * row;
    t.dims[0] = (uint64_t)rows;
    if (t.scales && t.scale_block[0] == 1) t.scales += (uint64_t)first * t.scale_format->bytes;
    if (t.name) stored_add(c->m, out, &t);
}

static void rename_all(ct2 *c, stored_list *out, const char *from, const char *to) {
    const stored *t = stored_find(&c->list, from);
    if (t && t->n_dims) rename_rows(c, out, from, to, 0, (int64_t)t->dims[0]);
}

/* Rename the tensors of layer `i`, and split those of queries, keys and values. */
static void rename_layer(ct2 *c, const decoder *d, stored_list *out, int64_t i) {
    static const char *const names[][3] = {
        /* theirs; those of layers with norms before and after each function, and of others */
        { "self_attention/layer_norm/gamma", NULL, "input_layernorm.weight" },
        { "input_layer_norm/gamma", "input_layernorm.weight", NULL },
        { "post_attention_layer_norm/gamma", "post_attention_layernorm.weight", NULL },
        { "pre_feedforward_layer_norm/gamma", "pre_feedforward_layernorm.weight", NULL },
        { "post_feedforward_layer_norm/gamma", "post_feedforward_layernorm.weight", NULL },
        { "ffn/layer_norm/gamma", NULL, "post_attention_layernorm.weight" },
        { "self_attention/q_norm/gamma", "self_attn.q_norm.weight", "self_attn.q_norm.weight" },
        { "self_attention/k_norm/gamma", "self_attn.k_norm.weight", "self_attn.k_norm.weight" },
        { "self_attention/linear_1/weight", "self_attn.o_proj.weight", "self_attn.o_proj.weight" },
        { "ffn/linear_0/weight", "mlp.gate_proj.weight", "mlp.gate_proj.weight" },
        { "ffn/linear_0_noact/weight", "mlp.up_proj.weight", "mlp.up_proj.weight" },
        { "ffn/linear_1/weight", "mlp.down_proj.weight", "mlp.down_proj.weight" }
    };
    static const char *const parts[] = { "weight", "bias" };
    const int64_t q = d->heads * d->head, k = d->keys * d->head;
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        const char *to = names[n][d->family->gemma == DECODER_GEMMA ? 1 : 2];
        if (to)
            rename_all(c, out, NAME("decoder/layer_%" PRId64 "/%s", i, names[n][0]),
                       NAME("model.layers.%" PRId64 ".%s", i, to));
    }
    for (int part = 0; part < 2; part++) {
        const ct2_name from = name_of("decoder/layer_%" PRId64 "/self_attention/linear_0/%s", i, parts[part]);
        rename_rows(c, out, from.text, NAME("model.layers.%" PRId64 ".self_attn.q_proj.%s", i, parts[part]), 0, q);
        rename_rows(c, out, from.text, NAME("model.layers.%" PRId64 ".self_attn.k_proj.%s", i, parts[part]), q, k);
        rename_rows(c, out, from.text, NAME("model.layers.%" PRId64 ".self_attn.v_proj.%s", i, parts[part]), q + k, k);
    }
}

/* Rotary positions of a layer. type: 0 divides frequencies by factor, 2 only slow ones, as in Llama 3; -1: none. */
typedef struct rotation {
    double base, type, factor, low, high, length;
} rotation;

/* Read the positions and the window of a layer. */
static rotation read_rotation(ct2 *c, decoder *d, int64_t i) {
    const ct2_name at = name_of("decoder/layer_%" PRId64 "/self_attention", i);
    const double dim = value(c, NAME("%s/rotary_dim", at.text), -1);
    if (dim < 0 || (dim > 0 && dim != (double)d->head))
        making_refuse(c->m, model_name, "%.60s/rotary_dim is %g: expected all columns of a head", at.text, dim);
    must_be(c, NAME("%s/rotary_interleave", at.text), 0);
    must_be(c, NAME("%s/num_heads_kv", at.text), (double)d->keys);
    must_be(c, NAME("%s/head_dim", at.text), (double)d->head);
    d->windows[i] = whole(c, NAME("%s/sliding_window", at.text), 0, 0, 1 << 20);
    const rotation r = { value(c, NAME("%s/rotary_base", at.text), 10000),
                         value(c, NAME("%s/rotary_scaling_type", at.text), -1),
                         value(c, NAME("%s/rotary_scaling_factor", at.text), 1),
                         value(c, NAME("%s/rotary_low_freq_factor", at.text), 1),
                         value(c, NAME("%s/rotary_high_freq_factor", at.text), 4),
                         value(c, NAME("%s/original_max_position_embeddings", at.text), 0) };
    if (r.type > 0 && (r.type < (double)LLAMA_3 || r.type > (double)LLAMA_3))
        making_refuse(c->m, model_name,
                      "%.60s/rotary_scaling_type is %g, which is not supported here: convert the "
                      "model that CTranslate2 converted",
                      at.text, r.type);
    if (r.type > 0 && !(r.low > 0 && r.high > r.low && r.factor >= 1 && r.length >= 0))
        making_refuse(c->m, model_name, "%.60s has invalid rotary factors: damaged", at.text);
    return r;
}

static double *frequencies(ct2 *c, const decoder *d, const rotation *r) {
    double *f = c->m->status ? NULL : decoder_frequencies(c->m, d, r->base);
    if (f && r->type > 0) decoder_slow_down(d, f, r->factor, r->low, r->high, r->length);
    for (int64_t i = 0; f && i < d->head / 2 && r->type >= 0 && r->type <= 0; i++) f[i] /= r->factor;
    return f;
}

static int same_rotation(const rotation *a, const rotation *b) {
    return a->base == b->base && a->type == b->type && a->factor == b->factor && a->low == b->low &&
           a->high == b->high && a->length == b->length;
}

/* Read all layers' positions. Layers with a window may have others. */
static int read_rotations(ct2 *c, decoder *d) {
    rotation all[2] = { { .base = 1e6 }, { .base = 0 } };
    int found[2] = { 0 };
    for (int64_t i = 0; i < d->layers && c->m->status == MOE_OK; i++) {
        const rotation own = read_rotation(c, d, i);
        const int local = d->windows[i] > 0;
        if (found[local]++ && !same_rotation(&own, &all[local]))
            return making_refuse(c->m, model_name, "layers with different rotations are not supported");
        all[local] = own;
    }
    if (all[0].type > 0 && (!(all[0].length > 0) || !(all[0].factor > 1)))
        making_note(c->m,
                    "%s: CTranslate2's converter omitted the factor of Llama 3's positions and their original "
                    "number, so positions are not scaled, as in CTranslate2: long texts get worse. Convert the "
                    "published model instead",
                    model_name);
    if (found[1]) d->local_frequencies = frequencies(c, d, &all[1]);
    if (!d->family->gemma && found[1]) { /* Mistral: one window for all layers */
        if (found[0]) return making_refuse(c->m, model_name, "windows in some layers only are not supported");
        d->window = d->windows[0];
        d->frequencies = d->local_frequencies;
        d->local_frequencies = NULL;
        for (int64_t i = 0; i < d->layers; i++) d->windows[i] = 0;
    } else {
        d->frequencies = frequencies(c, d, &all[0]);
    }
    return c->m->status == MOE_OK;
}

/* Gemma's earlier versions, which only this layout has: CTranslate2 ignores the soft caps of version 2. */
static const decoder_family gemma_1 = { .name = "gemma", .head_norm = "none", .dense = 1, .gemma = DECODER_GEMMA_1 },
                            gemma_2 = { .name = "gemma2", .head_norm = "none", .dense = 1, .gemma = DECODER_GEMMA };

/* Return the family with these parts. */
static const decoder_family *family_of(const ct2 *c) {
    static const char at[] = "decoder/layer_0";
    const int norms = has(c, NAME("%s/self_attention/q_norm/gamma", at));
    if (has(c, NAME("%s/pre_feedforward_layer_norm/gamma", at)))
        return norms ? decoder_family_named("gemma3_text") : &gemma_2;
    if (has(c, NAME("%s/self_attention/layer_norm/layer_norm_use_residual", at))) return &gemma_1;
    if (norms) return decoder_family_named("qwen3");
    if (has(c, NAME("%s/self_attention/linear_0/bias", at))) return decoder_family_named("qwen2");
    return decoder_family_named(has(c, NAME("%s/self_attention/sliding_window", at)) ? "mistral" : "llama");
}

/* Read the sizes and settings of a decoder-only model. */
static int read_decoder(ct2 *c, decoder *d) {
    static const char at[] = "decoder/layer_0";
    d->family = family_of(c);
    d->file = model_name;
    d->heads = whole(c, "decoder/num_heads", 8, 1, 1 << 16);
    d->layers = count_layers(c, "decoder");
    if (!d->layers || d->layers > DECODER_MAX_LAYERS || !d->family)
        return making_refuse(c->m, model_name,
                             "this kind of decoder is not supported: expected Llama, Mistral, Qwen 2, "
                             "Qwen 3 or Gemma");
    const stored *embedding = stored_find(&c->list, target_name);
    d->width = embedding && embedding->n_dims == 2 ? (int64_t)embedding->dims[1] : 0;
    c->width = d->width;
    d->vocabulary = rows_of(c, target_name, d->width);
    d->keys = whole(c, NAME("%s/self_attention/num_heads_kv", at), d->heads, 1, d->heads);
    d->head = rows_of(c, NAME("%s/self_attention/linear_0/weight", at), d->width) / (d->heads + 2 * d->keys);
    d->turned = d->head;
    d->ffn = rows_of(c, NAME("%s/ffn/linear_0/weight", at), d->width);
    d->context = DECODER_CONTEXT;
    d->weights = "";
    d->query_scale = 1;
    d->norm_offset = value(c, NAME("%s/layer_norm_use_residual", "decoder/layer_norm"), 0) > 0;
    if (d->family == &gemma_2)
        making_note(c->m,
                    "%s: CTranslate2's converter omitted the soft caps of Gemma 2, so scores and long texts "
                    "differ from those of the published model, as in CTranslate2",
                    model_name);
    d->epsilon = epsilon(c, 0);
    must_be(c, "decoder/activation", d->family->gemma ? 1 : 2);
    must_be(c, "decoder/pre_norm", 1);
    must_be(c, "decoder/start_from_zero_embedding", 0);
    value(c, "decoder/sliding_window", 0);
    value(c, "decoder/embeddings/multiply_by_sqrt_depth", 0);
    const double scale = embedding_scale(c, "decoder"), wanted = d->family->gemma ? sqrt((double)d->width) : 1;
    if (c->m->status == MOE_OK && fabs(scale - wanted) > 1e-3 * wanted)
        making_refuse(c->m, model_name, "decoder/scale_embeddings is %g, which is not supported", scale);
    const stored *output = stored_find(&c->list, "decoder/projection/weight");
    d->tied = are_equal(output, embedding);
    return c->m->status == MOE_OK && d->head >= 2 && decoder_check(c->m, d) && read_rotations(c, d);
}

static int convert_decoder(ct2 *c) {
    decoder d = { .family = NULL };
    decoder_search search = { .beam = 1, .pad = -1, .file = "config.json", .length_penalty = 1 };
    stored_list out = { 0 };
    tokens *t = &c->vocabularies[1];
    int found = 0, good = 0;
    if (c->is_package || c->files.file.data) return making_refuse(c->m, model_name, "not a translation model");
    if (!read_vocabulary(c, "vocabulary", t, &found) || !read_decoder(c, &d)) return 0;
    if (!found) return making_refuse(c->m, "vocabulary.json", "missing: copy the model's whole folder");
    search.ends[search.n_ends++] = special(c, t, "eos_token", "</s>");
    d.bos = special(c, t, "bos_token", "<s>");
    if (d.bos < 0) d.bos = 0;
    if (search.ends[0] < 0 || search.ends[0] >= d.vocabulary || d.bos >= d.vocabulary)
        return making_refuse(c->m, t->file, "the end token is missing");
    for (size_t i = 0; i < DECODER_SAMPLING; i++) search.sample[i] = NAN;
    rename_all(c, &out, target_name, "model.embed_tokens.weight");
    rename_all(c, &out, "decoder/layer_norm/gamma", "model.norm.weight");
    if (d.tied) stored_find(&c->list, "decoder/projection/weight")->taken = 1;
    else rename_all(c, &out, "decoder/projection/weight", "lm_head.weight");
    for (int64_t i = 0; i < d.layers; i++) rename_layer(c, &d, &out, i);
    check_rest(c);
    for (size_t i = 0; i < c->list.n; i++) /* flags of norms, which are equal in all layers */
        c->list.items[i].taken |= text_ends_with(c->list.items[i].name, strlen(c->list.items[i].name), "_use_residual");
    if (builder_all_taken(&c->b, "\n"))
        good = hub_convert_read(c->m, c->given, &d, &search, &out,
                                c->given->type != MOE_TYPE_KEEP ? c->given->type
                                : c->codes                      ? MOE_TYPE_Q8
                                                                : MOE_TYPE_Q8B,
                                c->model.size);
    stored_free(&out);
    return good;
}

/* ---- The whole ---- */

int ct2_is_model(const char *path) {
    uint8_t begin[16] = { 0 };
    const size_t n = packed_begin(path, begin, sizeof begin);
    const int at = number(begin, 4) == OLDEST ? 8 : 4;
    const uint32_t length = number(begin + at, 2);
    int is_name =
        n == sizeof begin && number(begin, 4) >= OLDEST && number(begin, 4) < 256 && length > 4 && length < 64;
    for (int i = at + 2; i < at + 6; i++) is_name &= begin[i] >= 'A' && begin[i] <= 'z';
    return is_name;
}

/* Open the folder or the package. */
static int open_files(ct2 *c) {
    static const char metadata[] = "metadata.json";
    packed_file f;
    if (!archive_open(c->m, c->given->path, metadata, &c->files)) return 0;
    c->folder = "";
    c->is_package = archive_has(c->m, &c->files, metadata) && !archive_has(c->m, &c->files, model_name);
    if (c->is_package) {
        c->folder = "model/";
        if (!archive_read(c->m, &c->files, metadata, CONF_LARGEST, "a JSON file", &f)) return 0;
        c->package_json = conf_parse(c->m, metadata, f.data ? (const char *)f.data : "", f.size);
        packed_close(&f);
        if (!conf_begin(c->m, metadata, c->package_json, &c->package)) return 0;
        const char *type = conf_text(&c->package, "type");
        if (type && strcmp(type, "translate") != 0)
            return making_refuse(c->m, metadata, "type %.40s is not supported: expected translate", type);
    }
    const ct2_name config = name_of("%sconfig.json", c->folder);
    if (!archive_has(c->m, &c->files, config.text)) return conf_begin(c->m, "config.json", NULL, &c->config);
    if (!archive_read(c->m, &c->files, config.text, CONF_LARGEST, "a JSON file", &f)) return 0;
    c->json = conf_parse(c->m, "config.json", f.data ? (const char *)f.data : "", f.size);
    packed_close(&f);
    return c->json && conf_begin(c->m, "config.json", c->json, &c->config);
}

static int convert(ct2 *c) {
    static const char *const known[] = { "TransformerSpec", "TransformerBase", "TransformerBig" };
    if (!open_files(c) || !read_model(c)) return 0;
    if (c->version >= NEWEST && !c->config.object)
        return making_refuse(c->m, "config.json", "missing: copy the model's whole folder");
    const cJSON *packing = conf_raw(&c->config, "quantization_type");
    if (packing && !conf_is_listed(packing, "[0]"))
        return making_refuse(c->m, "config.json", "weights in AWQ are not supported: convert the model without it");
    if (c->b.type == MOE_TYPE_KEEP) c->b.type = MOE_TYPE_Q8;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(c->spec, known[i]) == 0) return convert_transformer(c);
    if (strcmp(c->spec, "TransformerDecoderSpec") == 0) return convert_decoder(c);
    return making_refuse(
        c->m, model_name,
        "%.40s is not supported: expected TransformerSpec or TransformerDecoderSpec; models for speech "
        "and for classification are not",
        c->spec);
}

int ct2_convert(making *m, const convert_options *options) {
    ct2 c = { .m = m, .given = options };
    c.b = (builder){ .m = m, .file = model_name, .list = &c.list, .type = options->type, .experts = options->experts };
    const int good = convert(&c);
    archive_close(&c.files);
    packed_close(&c.model);
    packed_close(&c.bpe);
    conf_free(&c.config);
    conf_free(&c.package);
    cJSON_Delete(c.json);
    cJSON_Delete(c.package_json);
    for (int i = 0; i < 2; i++) {
        packed_close(&c.spm[i]);
        packed_close(&c.vocabularies[i].text);
        cJSON_Delete(c.vocabularies[i].json);
        text_index_free(&c.vocabularies[i].ids);
    }
    stored_free(&c.list);
    builder_free(&c.b);
    return good;
}
