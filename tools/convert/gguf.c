/* gguf.c - see gguf.h. Integers are little-endian:
 *   "GGUF", u32 version, u64 tensors, u64 keys; keys: text name, u32 type, value; tensors: text name, u32 dimensions,
 * u64 each, u32 number format, u64 offset from the aligned end of the header; texts: u64 length, bytes */
#define _POSIX_C_SOURCE 200809L

#include "tools/convert/gguf.h"
#include "tools/convert/decoder.h"
#include "tools/convert/packed.h"
#include "tools/text/bpe.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_KEYS = 4096, MAX_TENSORS = 1 << 16, MAX_PARTS = 1000, MAX_NAME = 1024, MAX_TEXT = 1 << 26, ALIGNMENT = 32 };
enum { LARGEST_TEMPLATE = 1 << 18, SHORT = 64, KEY = 128 };
enum { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 };
enum { NORMAL = 1, UNKNOWN_KIND, CONTROL, USER, UNUSED }; /* token types */
static const uint64_t largest_file = (uint64_t)1 << 44;
static const unsigned sizes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

#define NONE INT64_MIN /* a required integer */

/* ---- The file ---- */

typedef struct value {
    const char *key;
    uint32_t type, kind; /* kind: of the elements of an array */
    int64_t integer;     /* also of BOOL */
    double real;
    moe_span text;
    uint64_t count;
    const uint8_t *data; /* the elements of an array */
    int asked;
} value;

typedef struct header {
    making *m;
    const char *file; /* its name */
    const uint8_t *data;
    size_t size, at;
    value *values;
    size_t n_values;
} header;

static int damaged(header *h, const char *what) {
    return making_refuse(h->m, h->file, "file ends within %.100s: truncated or damaged", what);
}

static uint64_t number_at(const uint8_t *p, size_t bytes) {
    uint64_t v = 0;
    for (size_t i = bytes; i-- > 0;) v = v << 8 | p[i];
    return v;
}

static const uint8_t *take(header *h, uint64_t bytes, const char *what) {
    const uint8_t *p = h->data + h->at;
    if (h->m->status || bytes > h->size - h->at) return damaged(h, what), NULL;
    h->at += (size_t)bytes;
    return p;
}

static uint64_t take_number(header *h, size_t bytes, const char *what) {
    const uint8_t *p = take(h, bytes, what);
    return p ? number_at(p, bytes) : 0;
}

/* Read a text, which is valid UTF-8; data NULL after an error. */
static moe_span take_text(header *h, const char *what, uint64_t longest) {
    const uint64_t length = take_number(h, 8, what);
    moe_span text = { NULL, (size_t)length };
    if (length > longest)
        return making_refuse(h->m, h->file, "%.100s is too long (%" PRIu64 " bytes): damaged", what, length), text;
    text.data = (const char *)take(h, length, what);
    if (text.data && text_utf8_valid(text.data, text.length) < text.length)
        return making_refuse(h->m, h->file, "%.100s is not UTF-8", what), (moe_span){ NULL, 0 };
    return text;
}

/* Return the double with the shortest decimal of a float, as Python reads it. */
static double shortest(float x) {
    text_bytes text = { 0 };
    text_append_float(&text, x);
    const double found = text.data && isfinite(x) ? strtod(text.data, NULL) : (double)x;
    text_bytes_free(&text);
    return found;
}

/* Decode a number into v->integer or v->real. Integers above INT64_MAX become it. */
static void decode_number(value *v, uint32_t type, const uint8_t *p) {
    const uint64_t raw = number_at(p, sizes[type]);
    const uint32_t bits = (uint32_t)raw;
    float f;
    v->type = type;
    v->integer = raw > INT64_MAX && type == U64 ? INT64_MAX : (int64_t)raw;
    if (type == I8) v->integer = (int8_t)raw;
    if (type == I16) v->integer = (int16_t)raw;
    if (type == I32) v->integer = (int32_t)raw;
    if (type == BOOL) v->integer = raw != 0;
    memcpy(&f, &bits, sizeof f);
    if (type == F32) v->real = shortest(f);
    if (type == F64) memcpy(&v->real, &raw, sizeof raw);
}

static int is_real(uint32_t type) { return type == F32 || type == F64; }
static int is_whole(uint32_t type) {
    return type <= I64 && type != BOOL && type != STRING && type != ARRAY && !is_real(type);
}

static int take_array(header *h, value *v) {
    v->kind = (uint32_t)take_number(h, 4, v->key);
    v->count = take_number(h, 8, v->key);
    v->data = h->data + h->at;
    if (h->m->status) return 0;
    if (v->kind == STRING && v->count <= (h->size - h->at) / 8) {
        for (uint64_t i = 0; i < v->count && h->m->status == MOE_OK; i++) take_text(h, v->key, MAX_TEXT);
        return h->m->status == MOE_OK;
    }
    if (v->kind > F64 || !sizes[v->kind])
        return making_refuse(h->m, h->file,
                             "%.80s is an array of %" PRIu64 " values of type %" PRIu32 ": damaged or not supported",
                             v->key, v->count, v->kind);
    if (v->count > (h->size - h->at) / sizes[v->kind]) return damaged(h, v->key);
    return take(h, v->count * sizes[v->kind], v->key) != NULL;
}

static value *find_value(const header *h, const char *key) {
    for (size_t i = 0; i < h->n_values; i++)
        if (strcmp(h->values[i].key, key) == 0) {
            h->values[i].asked = 1;
            return &h->values[i];
        }
    return NULL;
}

static int take_value(header *h, size_t number) {
    value v = { 0 };
    char what[32];
    snprintf(what, sizeof what, "key %zu", number + 1);
    const moe_span key = take_text(h, what, MAX_NAME);
    if (!key.data) return 0;
    v.key = making_keep(h->m, key.data, key.length);
    if (!v.key) return 0;
    if (strlen(v.key) != key.length || find_value(h, v.key))
        return making_refuse(h->m, h->file, "duplicate or invalid key %.80s", v.key);
    v.type = (uint32_t)take_number(h, 4, v.key);
    if (h->m->status) return 0;
    if (v.type == STRING) {
        v.text = take_text(h, v.key, MAX_TEXT);
    } else if (v.type == ARRAY) {
        take_array(h, &v);
    } else if (v.type <= F64) {
        const uint8_t *p = take(h, sizes[v.type], v.key);
        if (p) decode_number(&v, v.type, p);
    } else {
        making_refuse(h->m, h->file, "%.100s has unknown type %" PRIu32 ": damaged", v.key, v.type);
    }
    h->values[h->n_values++] = v;
    return h->m->status == MOE_OK;
}

typedef struct entry {
    stored t;
    uint64_t offset;
} entry;

static int take_entry(header *h, size_t number, entry *e) {
    char what[48];
    uint64_t dims[STORED_DIMENSIONS];
    snprintf(what, sizeof what, "the name of tensor %zu", number + 1);
    const moe_span name = take_text(h, what, MAX_NAME);
    if (!name.data) return 0;
    stored *t = &e->t;
    t->name = t->own = making_keep(h->m, name.data, name.length);
    t->file = h->file;
    t->n_dims = (uint32_t)take_number(h, 4, "the tensors");
    if (h->m->status) return 0;
    if (t->n_dims < 1 || t->n_dims > STORED_DIMENSIONS || strlen(t->name) != name.length)
        return making_refuse(h->m, h->file, "tensor %.100s has an invalid name or %" PRIu32 " dimensions: damaged",
                             t->own, t->n_dims);
    for (uint32_t d = 0; d < t->n_dims; d++) dims[d] = take_number(h, 8, "the tensors");
    for (uint32_t d = 0; d < t->n_dims; d++)
        t->dims[d] = dims[t->n_dims - 1 - d]; /* the file lists the fastest first */
    const uint32_t format = (uint32_t)take_number(h, 4, "the tensors");
    e->offset = take_number(h, 8, "the tensors");
    if (h->m->status) return 0;
    if (!stored_elements(t)) return making_refuse(h->m, h->file, "tensor %.100s has an invalid shape: damaged", t->own);
    t->format = stored_format_ggml(format);
    if (!t->format)
        return making_refuse(h->m, h->file,
                             "tensor %.80s has unknown number format %" PRIu32 ": expected Q8_0 or another known one",
                             t->own, format);
    if (!t->format->decode && t->format->numbers > 1)
        return making_unsupported(h->m, h->file, "number format %s of tensor %.80s has no reader in C", t->format->name,
                                  t->own);
    if (t->dims[t->n_dims - 1] % t->format->numbers)
        return making_refuse(h->m, h->file,
                             "tensor %.80s: row length is not a multiple of %" PRIu32 ", the block size of %s", t->own,
                             t->format->numbers, t->format->name);
    return 1;
}

/* Place the tensors after the header. */
static int place_entries(header *h, const entry *entries, size_t n, stored_list *list) {
    const value *v = find_value(h, "general.alignment");
    const int64_t alignment = !v ? ALIGNMENT : is_whole(v->type) ? v->integer : 0;
    if (alignment < 8 || alignment > 1 << 16 || alignment & (alignment - 1))
        return making_refuse(h->m, h->file, "general.alignment is not supported");
    const uint64_t step = (uint64_t)alignment, start = (h->at + step - 1) / step * step;
    uint64_t expected = 0;
    for (size_t i = 0; i < n; i++) {
        stored t = entries[i].t;
        const uint64_t bytes = stored_bytes(&t);
        if (start > h->size || entries[i].offset != expected || expected > h->size - start ||
            bytes > h->size - start - expected)
            return making_refuse(h->m, h->file, "tensor %.100s has an invalid offset or size: truncated or damaged",
                                 t.own);
        if (stored_find(list, t.name))
            return making_refuse(h->m, h->file, "tensor %.100s is in the file, or in two parts, twice", t.own);
        t.data = h->data + start + expected;
        expected = (expected + bytes + step - 1) / step * step;
        if (!stored_add(h->m, list, &t)) return 0;
    }
    return 1;
}

/* Read the header of a file and append its tensors, checking every length and offset. */
static int read_header(making *m, const packed_file *file, const char *name, header *h, stored_list *list) {
    *h = (header){ .m = m, .file = name, .data = file->data, .size = file->size };
    const uint8_t *magic = take(h, 4, "the magic number");
    if (!magic) return 0;
    if (memcmp(magic, "GGUF", 4) != 0) return making_refuse(m, name, "not a GGUF file");
    const uint32_t version = (uint32_t)take_number(h, 4, "the version");
    if (m->status) return 0;
    if (version != 2 && version != 3)
        return making_refuse(m, name, "GGUF version %" PRIu32 " is not supported%s: expected 2 or 3",
                             version & 0xffff ? version & 0xffff : version >> 16,
                             version & 0xffff ? "" : " (big-endian)");
    const uint64_t tensors = take_number(h, 8, "the counts"), keys = take_number(h, 8, "the counts");
    if (m->status) return 0;
    if (tensors > MAX_TENSORS || keys > MAX_KEYS)
        return making_refuse(m, name,
                             "%" PRIu64 " tensors and %" PRIu64 " keys: damaged, or above the limits of %d and %d",
                             tensors, keys, MAX_TENSORS, MAX_KEYS);
    h->values = making_keep(m, NULL, (size_t)keys * sizeof *h->values);
    entry *entries = calloc((size_t)tensors + 1, sizeof *entries);
    int good = h->values && entries;
    if (!entries) making_no_memory(m);
    for (size_t i = 0; i < keys && good; i++) good = take_value(h, i);
    for (size_t i = 0; i < tensors && good; i++) good = take_entry(h, i, &entries[i]);
    good = good && place_entries(h, entries, (size_t)tensors, list);
    free(entries);
    return good;
}

/* ---- Keys ---- */

typedef struct gguf {
    making *m;
    const convert_options *options;
    packed_file *files; /* [n_files] */
    size_t n_files;
    header h; /* of the first part */
    char architecture[64];
    stored_list list;
    decoder d;
    decoder_search search;
    decoder_tokens tokens;
    int64_t *kinds; /* [n_texts] types of tokens; NULL if the file lacks them */
    moe_span *texts;
    size_t n_texts;
    int64_t ids[16]; /* as in id_names; -1 if missing */
} gguf;

/* Find a key; one that starts with a dot is preceded by the architecture. */
static value *find(gguf *g, const char *key) {
    char whole[KEY];
    snprintf(whole, sizeof whole, "%s%s", *key == '.' ? g->architecture : "", key);
    return find_value(&g->h, whole);
}

/* Write a value for a message. */
static const char *shown(const value *v, char out[SHORT]) {
    if (is_real(v->type)) snprintf(out, SHORT, "%.9g", v->real);
    else if (v->type == BOOL) snprintf(out, SHORT, "%s", v->integer ? "True" : "False");
    else if (v->type == ARRAY) snprintf(out, SHORT, "an array of %" PRIu64 " values", v->count);
    else if (v->type != STRING) snprintf(out, SHORT, "%" PRId64, v->integer);
    else {
        text_bytes text = { 0 };
        text_append_clean(&text, v->text.data, v->text.length < 40 ? v->text.length : 40);
        snprintf(out, SHORT, "'%s'", text.data && !text.failed ? text.data : "");
        text_bytes_free(&text);
    }
    return out;
}

static int refuse_value(gguf *g, const value *v, const char *more) {
    char text[SHORT];
    return making_refuse(g->m, g->h.file, "%.80s is %s, which is not supported%.80s", v->key, shown(v, text), more);
}

/* Return the value of a key, or the first of a list of equal values, one per layer. NULL if missing, or after an error.
 */
static const value *find_scalar(gguf *g, const char *key, value *first) {
    const value *v = find(g, key);
    if (!v || v->type != ARRAY || *key != '.' || v->kind == STRING) return v;
    const size_t size = sizes[v->kind];
    for (uint64_t i = 1; i < v->count; i++)
        if (memcmp(v->data, v->data + i * size, size) != 0)
            return making_refuse(g->m, g->h.file, "%.80s differs between layers, which is not supported", v->key), NULL;
    if (!v->count) return refuse_value(g, v, ""), NULL;
    *first = *v;
    decode_number(first, v->kind, v->data);
    return first;
}

static int missing(gguf *g, const char *key) {
    return making_refuse(g->m, g->h.file, "%s%s is missing", *key == '.' ? g->architecture : "", key);
}

/* Read an integer from `least` to `most`. */
static int64_t whole_key(gguf *g, const char *key, int64_t otherwise, int64_t least, int64_t most) {
    value first;
    char more[80];
    const value *v = find_scalar(g, key, &first);
    if (!v && otherwise == NONE) return missing(g, key), least;
    if (!v) return otherwise;
    if (is_whole(v->type) && v->integer >= least && v->integer <= most) return v->integer;
    snprintf(more, sizeof more, ": expected %" PRId64 " to %" PRId64, least, most);
    return refuse_value(g, v, more), least; /* callers multiply it before they look at the status */
}

/* Read a number; a NaN as `otherwise` makes the key required. */
static double real_key(gguf *g, const char *key, double otherwise, double least, double most) {
    value first;
    const value *v = find_scalar(g, key, &first);
    if (!v && isnan(otherwise)) missing(g, key);
    if (!v) return otherwise;
    const double x = is_whole(v->type) ? (double)v->integer : v->real;
    if ((!is_whole(v->type) && !is_real(v->type)) || !(x >= least && x <= most)) refuse_value(g, v, "");
    return x;
}

static int flag_key(gguf *g, const char *key, int otherwise) {
    value first;
    const value *v = find_scalar(g, key, &first);
    if (v && v->type != BOOL) refuse_value(g, v, "");
    return v ? v->integer != 0 : otherwise;
}

/* Reject an integer other than `one` and `other`; a missing key is accepted. */
static void must_be(gguf *g, const char *key, int64_t first, int64_t second) {
    value copy;
    char more[80];
    const value *v = find_scalar(g, key, &copy);
    snprintf(more, sizeof more, second == first ? ": expected %" PRId64 : ": expected %" PRId64 " or %" PRId64, first,
             second);
    if (v && (!is_whole(v->type) || (v->integer != first && v->integer != second))) refuse_value(g, v, more);
}

/* ---- Names of tensors ---- */

static const struct {
    int where;
    const char *theirs, *own;
} name_rows[] = {
#define outside 0
#define inside 1
#define gemma 2
#define mixed 3
#define GGUF(where, theirs, own) { where, theirs, own },
#include "tools/convert/decoder.inc"
#undef outside
#undef inside
#undef gemma
#undef mixed
};
enum { NAME_ROWS = sizeof name_rows / sizeof *name_rows };

static const char *own_name(int where, const char *name, size_t length) {
    for (size_t i = 0; i < NAME_ROWS; i++)
        if (name_rows[i].where == where && text_is(name, length, name_rows[i].theirs)) return name_rows[i].own;
    return NULL;
}

/* Split "blk.N.PART.weight". Returns N, or -1 for other names. */
static int64_t split_name(const char *name, moe_span *part, const char **tail) {
    if (strncmp(name, "blk.", 4) != 0 || !isdigit((unsigned char)name[4])) return -1;
    char *end;
    const long layer = strtol(name + 4, &end, 10);
    if (*end != '.' || end - name > 8) return -1;
    const size_t length = strlen(++end), weight = text_ends_with(end, length, ".weight") ? 7 : 0,
                 bias = text_ends_with(end, length, ".bias") ? 5 : 0;
    *part = (moe_span){ end, length - weight - bias };
    *tail = end + part->length;
    for (size_t i = 0; i < part->length; i++)
        if (!islower((unsigned char)end[i]) && !isdigit((unsigned char)end[i]) && end[i] != '_' && end[i] != '.')
            return -1;
    return part->length ? layer : -1;
}

/* Return the name of an experts' tensor after its layer; NULL if it is none. */
static const char *experts_name(const stored_list *list, int64_t layer, moe_span part, char out[64]) {
    static const char *const parts[] = { "gate", "up", "down", "gate_up" };
    char both[64], name[32];
    snprintf(both, sizeof both, "blk.%" PRId64 ".ffn_gate_up_exps.weight", layer);
    for (size_t i = 0; i < 4; i++) {
        snprintf(name, sizeof name, "ffn_%s_exps", parts[i]);
        if (!text_is(part.data, part.length, name)) continue;
        snprintf(out, 64, "mlp.experts.%s%s_proj", stored_find(list, both) ? "" : "*", parts[i]);
        return out;
    }
    return NULL;
}

/* Give a tensor of Qwen3.5 the dimensions of 1 that transformers has. */
static void shape(stored *t, moe_span part) {
    if (t->n_dims == 2 && text_is(part.data, part.length, "ssm_conv1d")) {
        t->dims[2] = t->dims[1];
        t->dims[1] = 1;
        t->n_dims = 3;
    }
    if (t->n_dims == 1 && text_is(part.data, part.length, "ffn_gate_inp_shexp")) {
        t->dims[1] = t->dims[0];
        t->dims[0] = 1;
        t->n_dims = 2;
    }
}

/* Give a tensor its name in transformers. */
static int rename_tensor(gguf *g, const stored_list *list, stored *t) {
    moe_span part;
    const char *tail = "", *own;
    char name[2 * MAX_NAME], buffer[64];
    const int64_t layer = split_name(t->own, &part, &tail);
    if (layer < 0) {
        own = own_name(0, t->own, strlen(t->own));
        if (own) t->name = own;
        return 1;
    }
    const char *experts = strcmp(tail, ".weight") == 0 ? experts_name(list, layer, part, buffer) : NULL;
    const size_t n = (size_t)snprintf(name, sizeof name, "model.layers.%" PRId64 ".", layer);
    own = g->d.family->gemma   ? own_name(2, part.data, part.length)
          : g->d.family->delta ? own_name(3, part.data, part.length)
                               : NULL;
    if (g->d.family->delta) shape(t, part);
    if (!own) own = own_name(1, part.data, part.length);
    if (layer > g->d.layers) snprintf(name + n, sizeof name - n, "%s", t->own);
    else if (text_is(part.data, part.length, "exp_probs_b"))
        snprintf(name + n, sizeof name - n, "mlp.e_score_correction_bias");
    else if (experts) snprintf(name + n, sizeof name - n, "%s", experts);
    else if (own) snprintf(name + n, sizeof name - n, "%s%s", own, tail);
    else snprintf(name + n, sizeof name - n, "%.*s%s", (int)part.length, part.data, tail);
    t->name = making_keep(g->m, name, strlen(name));
    return t->name != NULL;
}

static int rename_all(gguf *g) {
    stored_list out = { 0 };
    int good = 1;
    const int interleaved = strcmp(g->architecture, "llama") == 0;
    for (size_t i = 0; i < g->list.n && good; i++) {
        stored t = g->list.items[i];
        good = rename_tensor(g, &g->list, &t);
        const stored *other = good ? stored_find(&out, t.name) : NULL;
        if (other) good = making_refuse(g->m, t.file, "tensors %.80s and %.80s are the same tensor", other->own, t.own);
        if (good && interleaved) decoder_interleaved(&g->d, &t);
        good = good && stored_add(g->m, &out, &t);
    }
    stored_free(&g->list);
    g->list = out;
    return good;
}

/* ---- Configuration ---- */

static const struct {
    const char *tensor;
    int first, axis;
    const char *keys;
} dimensions[] = {
#define DIMENSION(tensor, first, axis, keys) { tensor, first, axis, keys },
#include "tools/convert/decoder.inc"
};

/* Return the first tensor of this name, in any layer or only in the first one. */
static const stored *first_tensor(const gguf *g, const char *name, int first) {
    for (size_t i = 0; i < g->list.n; i++) {
        moe_span part;
        const char *tail = "";
        const stored *t = &g->list.items[i];
        const int64_t layer = split_name(t->own, &part, &tail);
        const size_t length = strlen(name);
        if (layer < 0 ? strncmp(t->own, name, length) == 0 && strcmp(t->own + length, ".weight") == 0
                      : text_is(part.data, part.length, name) && strcmp(tail, ".weight") == 0 && (!first || !layer))
            return t;
    }
    return NULL;
}

/* Reject keys that contradict the tensors. */
static void check_dimensions(gguf *g) {
    for (size_t i = 0; i < sizeof dimensions / sizeof *dimensions; i++) {
        const stored *t = first_tensor(g, dimensions[i].tensor, dimensions[i].first);
        const char *key = dimensions[i].keys;
        char name[KEY], shape[64];
        uint64_t product = 1;
        while (t && *key) {
            const size_t length = strcspn(key, " ");
            snprintf(name, sizeof name, ".%.*s", (int)length, key);
            const int64_t size = whole_key(g, name, 0, INT64_MIN, INT64_MAX);
            product = size <= 0 || size >= 1 << 24 ? 0 : product * (uint64_t)size;
            key += length + strspn(key + length, " ");
        }
        if (t && product && (uint32_t)dimensions[i].axis < t->n_dims && product != t->dims[dimensions[i].axis])
            making_refuse(g->m, g->h.file, "%s.(%s) contradict tensor %s %s", g->architecture, dimensions[i].keys,
                          t->own, stored_shape(t, shape, sizeof shape));
    }
}

/* Reject layers that neither the network nor the prediction of further tokens uses. */
static void check_layers(gguf *g, int64_t all) {
    char name[64];
    for (size_t i = 0; i < g->list.n; i++) {
        moe_span part;
        const char *tail;
        const char *own = g->list.items[i].own;
        const int64_t layer = strncmp(own, "blk.", 4) == 0 ? split_name(own, &part, &tail) : -1;
        if (layer >= all)
            making_refuse(g->m, g->h.file, "%s.block_count is %" PRId64 ", but the file has layer %" PRId64,
                          g->architecture, all, layer);
        snprintf(name, sizeof name, "blk.%" PRId64 ".nextn.eh_proj.weight", layer);
        if (layer >= g->d.layers && !stored_find(&g->list, name))
            making_refuse(g->m, g->h.file, "layer %" PRId64 " of %" PRId64 " has no tensor nextn.eh_proj", layer, all);
    }
}

/* Return the factor by which positions are divided. Reject factors except in Gemma's files; rope_freqs.weight contains
 * the factors of Llama 3. */
static double check_positions(gguf *g) {
    static const char *const keys[] = { ".rope.scale_linear", ".rope.scaling.factor" };
    double found = 1.0;
    const value *v = find(g, ".rope.scaling.type");
    const int linear = !v || (v->type == STRING && text_is(v->text.data, v->text.length, "linear"));
    if (v && !linear && (v->type != STRING || !text_is(v->text.data, v->text.length, "none")))
        refuse_value(g, v, ": expected linear or none");
    for (size_t i = 0; i < 2; i++) {
        const double factor = real_key(g, keys[i], 1.0, -INFINITY, INFINITY);
        if (!linear || !(factor < 0 || factor > 0) || !(factor < 1 || factor > 1)) continue;
        if (!g->d.family->gemma || !(factor >= 1 && factor <= 1e6)) refuse_value(g, find(g, keys[i]), "");
        found = factor;
    }
    return found;
}

/* Set the windows of layers. The pattern is a period, or a list with 1 for layers with a window. */
static void read_pattern(gguf *g, int64_t window, int64_t period) {
    static const char key[] = ".attention.sliding_window_pattern";
    const value *v = find(g, key);
    if (!v || v->type != ARRAY) {
        const int64_t pattern = whole_key(g, key, period, 1, 1 << 24);
        if (g->m->status == MOE_OK) decoder_set_windows(&g->d, window, pattern);
        return;
    }
    int good = v->count == (uint64_t)g->d.layers && (v->kind == BOOL || is_whole(v->kind));
    for (int64_t i = 0; i < g->d.layers && good; i++) {
        value kind;
        decode_number(&kind, v->kind, v->data + (size_t)i * sizes[v->kind]);
        good = kind.integer == 0 || kind.integer == 1;
        g->d.windows[i] = kind.integer ? window : 0;
    }
    if (!good) refuse_value(g, v, ": expected 0 or 1 per layer");
}

/* Read Gemma's windows and positions. */
static int read_windows(gguf *g, double theta, double factor) {
    enum { LAYERS_27B = 62 }; /* llama.cpp knows Gemma 3 27B, which has a query scale of its own, by its layers */
    decoder *d = &g->d;
    const int64_t window = whole_key(g, ".attention.sliding_window", 0, 0, 1 << 20);
    const double local = real_key(g, ".rope.freq_base_swa", 1e4, 1.0, 1e12);
    const int64_t scalar = d->layers == LAYERS_27B ? d->width / d->heads : d->head;
    if (g->m->status == MOE_OK) read_pattern(g, window, 6);
    if (g->m->status) return 0;
    d->query_scale = sqrt((double)d->head / (double)scalar);
    d->local_frequencies = decoder_frequencies(g->m, d, local);
    d->frequencies = decoder_frequencies(g->m, d, theta);
    for (int64_t i = 0; d->frequencies && i < d->head / 2; i++) d->frequencies[i] /= factor;
    return d->local_frequencies && d->frequencies;
}

/* Read Cohere's windows and its factor of logits. */
static void read_cohere(gguf *g) {
    const double scale = real_key(g, ".logit_scale", 1.0, 0.0, 1e6);
    g->d.logit_scale = scale > 0 ? scale : 1.0; /* 0 disables it */
    if (g->d.family->cohere == 1) return;
    const int64_t window = whole_key(g, ".attention.sliding_window", NONE, 1, 1 << 20);
    if (g->m->status == MOE_OK) read_pattern(g, window, 4);
}

/* Read the kinds of Qwen3.5's layers and the sizes of Gated DeltaNet. */
static void read_delta(gguf *g) {
    decoder *d = &g->d;
    char name[64];
    for (int64_t i = 0; i < d->layers; i++) {
        snprintf(name, sizeof name, "blk.%" PRId64 ".ssm_a", i);
        d->linear[i] = stored_find(&g->list, name) != NULL;
    }
    d->values = whole_key(g, ".ssm.time_step_rank", NONE, 1, 1 << 16);
    d->value_keys = whole_key(g, ".ssm.group_count", NONE, 1, 1 << 16);
    d->key = whole_key(g, ".ssm.state_size", NONE, 1, 1 << 16);
    d->kernel = whole_key(g, ".ssm.conv_kernel", NONE, 1, 64);
    const int64_t inner = whole_key(g, ".ssm.inner_size", NONE, 1, 1 << 20);
    if (g->m->status) return;
    d->value = inner / d->values;
    if (inner % d->values) refuse_value(g, find(g, ".ssm.inner_size"), ": not a multiple of ssm.time_step_rank");
    else if (d->values % d->value_keys)
        refuse_value(g, find(g, ".ssm.group_count"), ": does not divide the value heads");
    else if (d->turned % 2) refuse_value(g, find(g, ".rope.dimension_count"), ": expected an even number");
    d->tiled = d->values != d->value_keys; /* llama.cpp's order of value heads */
}

static void read_mixture(gguf *g) {
    decoder *d = &g->d;
    const int sigmoid = strcmp(d->family->name, "hy_v3") == 0, old = strcmp(d->family->name, "hunyuan_v1_moe") == 0;
    const stored *shared = NULL;
    must_be(g, ".expert_gating_func", sigmoid ? 2 : 1, 0);
    if (!flag_key(g, ".expert_weights_norm", 1)) refuse_value(g, find(g, ".expert_weights_norm"), ": expected True");
    const double scale = real_key(g, ".expert_weights_scale", 1.0, 0.0, 1e6);
    d->scale = scale > 0 ? scale : 1.0; /* 0 disables it */
    if (!sigmoid && (d->scale < 1 || d->scale > 1)) refuse_value(g, find(g, ".expert_weights_scale"), ": expected 1.0");
    d->hidden = whole_key(g, ".expert_feed_forward_length", d->ffn, 1, 1 << 20);
    d->experts = whole_key(g, ".expert_count", NONE, 2, 1 << 16);
    d->chosen = whole_key(g, ".expert_used_count", NONE, 1, d->experts);
    d->weights = sigmoid ? "sigmoid" : "chosen";
    for (size_t i = 0; i < g->list.n && !shared; i++)
        if (text_ends_with(g->list.items[i].own, strlen(g->list.items[i].own), ".ffn_gate_shexp.weight"))
            shared = &g->list.items[i];
    const int64_t units = shared ? (int64_t)shared->dims[0] : 0;
    const int64_t each = old ? d->ffn : d->family->delta ? (units ? units : 1) : d->hidden;
    if (g->m->status) return;
    if (units % each) making_refuse(g->m, g->h.file, "the number of shared units is not a multiple of %" PRId64, each);
    if (units / each > 64 || (old && !units))
        making_refuse(g->m, g->h.file, "%" PRId64 " shared experts are not supported", units / each);
    must_be(g, ".expert_shared_count", units / each, units ? units / each : 0);
    must_be(g, ".expert_shared_feed_forward_length", units, 0);
    if (sigmoid || old || d->family->delta) d->shared = units;
    for (int64_t i = 0; i < d->layers && old; i++) d->sparse[i] = 1;
}

/* Read the network's configuration; messages quote the file's keys. */
static int read_config(gguf *g) {
    decoder *d = &g->d;
    const int64_t largest = 1 << 24;
    const stored *embedding = stored_find(&g->list, "token_embd.weight");
    int64_t first = -1;
    char name[64];
    d->file = g->h.file;
    const int64_t all = whole_key(g, ".block_count", NONE, 1, largest);
    if (g->m->status) return 0;
    d->layers = all - whole_key(g, ".nextn_predict_layers", 0, 0, all - 1);
    d->width = whole_key(g, ".embedding_length", NONE, 1, 1 << 20);
    d->heads = whole_key(g, ".attention.head_count", NONE, 1, 1 << 16);
    if (!embedding) return making_refuse(g->m, g->h.file, "tensor token_embd.weight is missing");
    if (g->m->status || d->heads < 1) return 0;
    if (d->layers > DECODER_MAX_LAYERS) return refuse_value(g, find(g, ".block_count"), "");
    d->head = whole_key(g, ".attention.key_length", d->width / d->heads, 2, 1 << 16);
    d->keys = whole_key(g, ".attention.head_count_kv", d->heads, 1, d->heads);
    check_layers(g, all);
    check_dimensions(g);
    must_be(g, ".attention.value_length", d->head, d->head);
    d->turned = whole_key(g, ".rope.dimension_count", d->head, 1, d->head);
    if (!d->family->delta) must_be(g, ".rope.dimension_count", d->head, d->head);
    d->query_scale = 1;
    const double factor = check_positions(g);
    for (int64_t i = 0; i < d->layers; i++) {
        snprintf(name, sizeof name, "blk.%" PRId64 ".ffn_gate_inp.weight", i);
        d->sparse[i] = stored_find(&g->list, name) != NULL;
        if (d->sparse[i] && first < 0) first = i;
    }
    must_be(g, ".leading_dense_block_count", first < 0 ? d->layers : first, first < 0 ? 0 : first);
    d->vocabulary = (int64_t)embedding->dims[0];
    d->ffn =
        whole_key(g, ".feed_forward_length", whole_key(g, ".expert_feed_forward_length", 1, 1, largest), 1, largest);
    d->epsilon = real_key(g, d->family->cohere ? ".attention.layer_norm_epsilon" : ".attention.layer_norm_rms_epsilon",
                          NAN, 0.0, 1.0);
    const double theta = real_key(g, ".rope.freq_base", 1e4, 1.0, 1e12);
    d->context = whole_key(g, ".context_length", NONE, 4, largest);
    d->tied = stored_find(&g->list, "output.weight") == NULL;
    if (g->m->status) return 0;
    if (d->head < 2 || d->vocabulary < 4 || d->vocabulary > largest)
        return making_refuse(g->m, g->h.file, "heads of %" PRId64 " columns and %" PRId64 " tokens are not supported",
                             d->head, d->vocabulary);
    if (first < 0 && !d->family->dense) return missing(g, ".expert_count");
    if (first >= 0 && d->family->dense)
        return making_refuse(g->m, g->h.file, "experts are not supported in '%s' models", g->architecture);
    if (first >= 0) read_mixture(g);
    if (d->family->delta) read_delta(g);
    if (d->family->cohere) read_cohere(g);
    if (g->m->status || !decoder_check(g->m, d)) return 0;
    if (d->family->gemma) return read_windows(g, theta, factor);
    return (d->frequencies = decoder_frequencies(g->m, d, theta)) != NULL;
}

/* Divide the frequencies by the factors of Llama 3, and remove their tensor. */
static int read_factors(gguf *g) {
    stored *t = stored_find(&g->list, "rope_freqs.weight");
    const size_t half = (size_t)g->d.head / 2;
    if (!t) return 1;
    if (t->n_dims != 1 || t->dims[0] != half || !stored_is_plain(t->format))
        return making_refuse(g->m, t->file, "rope_freqs.weight must contain %zu factors", half);
    float *factors = making_keep(g->m, NULL, half * sizeof *factors);
    if (!factors) return 0;
    int good = stored_row(t, 0, factors, half);
    for (size_t i = 0; i < half; i++) {
        g->d.frequencies[i] /= (double)factors[i];
        good &= isfinite(g->d.frequencies[i]) && g->d.frequencies[i] >= 0;
    }
    t->taken = 1;
    t->name = "rotary_emb.inv_freq"; /* not a tensor of the network */
    return good || making_refuse(g->m, t->file, "tensor rope_freqs.weight contains invalid factors");
}

static const struct {
    const char *keys, *values;
} unread_rows[] = {
#define UNREAD(keys, values) { keys, values },
#include "tools/convert/decoder.inc"
};
enum { UNREAD_ROWS = sizeof unread_rows / sizeof *unread_rows };

/* Compile the expression of a row of UNREAD. */
static int compile(const gguf *g, const char *keys, regex_t *out) {
    text_bytes e = { 0 };
    text_append_string(&e, "^(");
    for (const char *p = keys; *p; p++) {
        if (strncmp(p, "ARCH", 4) == 0) text_append_string(&e, g->architecture), p += 3;
        else if (*p == '.') text_append_string(&e, "\\.");
        else if (*p == '*') text_append_string(&e, ".*");
        else text_append(&e, p, 1);
    }
    text_append_string(&e, ")$");
    const int good = !e.failed && regcomp(out, e.data, REG_EXTENDED | REG_NOSUB) == 0;
    text_bytes_free(&e);
    return good || making_no_memory(g->m);
}

/* Return 1 if a value is in a JSON list. */
static int is_listed(const value *v, const char *list) {
    cJSON *values = cJSON_Parse(list);
    const cJSON *x;
    int found = 0;
    cJSON_ArrayForEach(x, values) {
        if (v->type == STRING) found |= cJSON_IsString(x) && text_is(v->text.data, v->text.length, x->valuestring);
        else if (v->type == BOOL) found |= cJSON_IsBool(x) && cJSON_IsTrue(x) == (v->integer != 0);
        else if (v->type != ARRAY && cJSON_IsNumber(x)) {
            const double is = is_real(v->type) ? v->real : (double)v->integer;
            found |= is >= x->valuedouble && is <= x->valuedouble;
        }
    }
    cJSON_Delete(values);
    return found;
}

/* Reject keys that were not read and may change the computation. */
static int check_unread(gguf *g) {
    regex_t rows[UNREAD_ROWS];
    size_t n = 0;
    while (n < UNREAD_ROWS && compile(g, unread_rows[n].keys, &rows[n])) n++;
    for (size_t i = 0; i < g->h.n_values && n == UNREAD_ROWS; i++) {
        const value *v = &g->h.values[i];
        size_t row = 0;
        while (!v->asked && row + 1 < n && regexec(&rows[row], v->key, 0, NULL, 0) != 0) row++;
        if (!v->asked && *unread_rows[row].values && !is_listed(v, unread_rows[row].values)) refuse_value(g, v, "");
    }
    while (n) regfree(&rows[--n]);
    return g->m->status == MOE_OK;
}

/* ---- The tokeniser ---- */

static const char end_names[] =
#define ENDS(names) names
#include "tools/convert/decoder.inc"
    " bos padding unknown";
static const char spelled[] =
#define SPELLED(texts) texts " "
#include "tools/convert/decoder.inc"
    "";
enum { BOS, PADDING, UNKNOWN_TOKEN, SPECIALS };

static const struct {
    const char *name, *expressions;
    int nfc, whole, begin;
} pre_rows[] = {
#define PRE(name, expressions, nfc, whole, begin) { name, expressions, nfc, whole, begin },
#include "tools/convert/decoder.inc"
};
enum { PRE_ROWS = sizeof pre_rows / sizeof *pre_rows };
static const char pre_names[] =
#define PRE(name, ...) " " name
#include "tools/convert/decoder.inc"
    ;

/* Return the number of words in end_names before "bos". */
static size_t count_ends(void) {
    size_t n = 1;
    for (const char *p = end_names; *p; p++) n += *p == ' ';
    return n - SPECIALS;
}

/* Read the ids of named tokens into g->ids: those that end answers, then bos, padding, unknown. */
static void read_ids(gguf *g) {
    size_t n = 0;
    char key[KEY];
    for (const char *p = end_names; *p && n < sizeof g->ids / sizeof *g->ids; n++) {
        const size_t length = strcspn(p, " ");
        snprintf(key, sizeof key, "tokenizer.ggml.%.*s_token_id", (int)length, p);
        g->ids[n] = find(g, key) ? whole_key(g, key, NONE, 0, g->d.vocabulary - 1) : -1;
        p += length + strspn(p + length, " ");
    }
}

static int64_t special(const gguf *g, int which) { return g->ids[count_ends() + (size_t)which]; }

/* Return the text of a token, or an empty span. */
static moe_span text_of(const gguf *g, int64_t id) {
    return id >= 0 && (uint64_t)id < g->n_texts ? g->texts[id] : (moe_span){ NULL, 0 };
}

/* Read the texts of a list of strings. */
static moe_span *read_texts(gguf *g, const value *v) {
    moe_span *texts = making_keep(g->m, NULL, ((size_t)v->count + 1) * sizeof *texts);
    const uint8_t *p = v->data;
    for (size_t i = 0; texts && i < v->count; i++) {
        texts[i] = (moe_span){ (const char *)p + 8, (size_t)number_at(p, 8) };
        p += 8 + texts[i].length;
    }
    return texts;
}

/* Read the texts and types of tokens. Both may be missing. */
static int read_token_lists(gguf *g) {
    const value *texts = find(g, "tokenizer.ggml.tokens"), *kinds = find(g, "tokenizer.ggml.token_type");
    if (texts && texts->type == ARRAY && texts->kind == STRING && texts->count <= (uint64_t)g->d.vocabulary) {
        g->texts = read_texts(g, texts);
        g->n_texts = g->texts ? (size_t)texts->count : 0;
    }
    if (kinds && (kinds->type != ARRAY || !is_whole(kinds->kind) || (g->texts && kinds->count != g->n_texts)))
        return making_refuse(g->m, g->h.file, "tokenizer.ggml.token_type must list the type of every token");
    if (!kinds || !g->texts) return g->m->status == MOE_OK;
    g->kinds = making_keep(g->m, NULL, (g->n_texts + 1) * sizeof *g->kinds);
    for (size_t i = 0; g->kinds && i < g->n_texts; i++) {
        value v = { 0 };
        decode_number(&v, kinds->kind, kinds->data + i * sizes[kinds->kind]);
        g->kinds[i] = v.integer;
    }
    return g->m->status == MOE_OK;
}

static int read_merges(gguf *g) {
    const value *v = find(g, "tokenizer.ggml.merges");
    if (!v || v->type != ARRAY || v->kind != STRING)
        return making_refuse(g->m, g->h.file, "tokenizer.ggml.merges must be a list of texts");
    moe_span *texts = read_texts(g, v);
    pack_merge *merges = making_keep(g->m, NULL, ((size_t)v->count + 1) * sizeof *merges);
    if (!texts || !merges) return 0;
    for (size_t i = 0; i < v->count; i++) {
        const char *space = memchr(texts[i].data, ' ', texts[i].length);
        const size_t left = space ? (size_t)(space - texts[i].data) : 0;
        if (!space || memchr(space + 1, ' ', texts[i].length - left - 1))
            return making_refuse(g->m, g->h.file, "merge %zu is not a pair of tokens", i + 1);
        merges[i] = (pack_merge){ { texts[i].data, left }, { space + 1, texts[i].length - left - 1 } };
    }
    g->tokens.parts.merges = merges;
    g->tokens.parts.n_merges = (size_t)v->count;
    return 1;
}

static int is_text(const value *v, const char *text) {
    return v && v->type == STRING && text_is(v->text.data, v->text.length, text);
}

/* Choose the flags and expressions of the tokeniser. Returns whether texts begin with bos by default, or -1. */
static int read_pre(gguf *g) {
    const value *model = find(g, "tokenizer.ggml.model"), *pre = find(g, "tokenizer.ggml.pre");
    pack_parts *parts = &g->tokens.parts;
    char text[SHORT];
    size_t row = 0;
    if (is_text(model, "llama")) {
        const int spaced = flag_key(g, "tokenizer.ggml.add_space_prefix", 1);
        parts->flags = BPE_CHARACTERS | (spaced ? BPE_PREFIX | BPE_TRIMMED : 0);
        return !pre || is_text(pre, "default") ? 1 : (refuse_value(g, pre, ": expected 'default'"), -1);
    }
    if (!is_text(model, "gpt2"))
        return refuse_value(g, model, ": expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)"), -1;
    if (flag_key(g, "tokenizer.ggml.add_space_prefix", 0))
        refuse_value(g, find(g, "tokenizer.ggml.add_space_prefix"), ": prompts would differ");
    while (row < PRE_ROWS && !is_text(pre, pre_rows[row].name)) row++;
    if (row == PRE_ROWS && !pre) return missing(g, "tokenizer.ggml.pre"), -1;
    if (row == PRE_ROWS)
        return making_refuse(g->m, g->h.file, "tokenizer.ggml.pre is %s, which is not supported: expected%s",
                             shown(pre, text), pre_names),
               -1;
    for (const char *p = pre_rows[row].expressions; *p;) {
        const size_t length = strcspn(p, " ");
        parts->expressions[parts->n_expressions++] = pack_expression(p, length);
        p += length + strspn(p + length, " ");
    }
    parts->flags = (pre_rows[row].nfc ? BPE_NFC : 0u) | (pre_rows[row].whole ? BPE_WHOLE : 0u);
    return pre_rows[row].begin;
}

/* Find the pieces of the chat template. */
static int read_prompts(gguf *g) {
    const value *v = find(g, "tokenizer.chat_template"), *name = find(g, "general.name");
    const char *tokens[PROMPT_TOKENS] = { NULL };
    const int64_t ids[] = { special(g, BOS), g->ids[0], special(g, PADDING), special(g, UNKNOWN_TOKEN) };
    text_bytes all = { 0 };
    if (v && (v->type != STRING || v->text.length > LARGEST_TEMPLATE)) return refuse_value(g, v, "");
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        const moe_span text = text_of(g, ids[i]);
        tokens[i] = text.data ? making_keep(g->m, text.data, text.length) : NULL;
    }
    text_append_string(&all, g->h.file);
    if (name && name->type == STRING) text_append(&all, " ", 1), text_append(&all, name->text.data, name->text.length);
    g->tokens.name = all.failed ? NULL : making_keep(g->m, all.data, all.length);
    text_bytes_free(&all);
    if (!g->tokens.name) return making_no_memory(g->m);
    const value *named = find(g, "general.languages");
    if (named && named->type == ARRAY && named->kind == STRING) {
        g->tokens.named = read_texts(g, named);
        g->tokens.n_named = g->tokens.named ? (size_t)named->count : 0;
    } else if (named && named->type == STRING) {
        g->tokens.named = making_keep(g->m, &named->text, sizeof named->text);
        g->tokens.n_named = g->tokens.named != NULL;
    }
    const prompt_model model = { g->d.family->name, g->tokens.name };
    if (!prompts_find(g->m, g->h.file, v ? v->text : (moe_span){ NULL, 0 }, tokens, model, &g->tokens.pieces)) return 0;
    if (!g->tokens.pieces.texts[PROMPT_PREFIX])
        making_note(g->m, "no prompt: %.100s has no tokenizer.chat_template. Each input line must be a whole prompt",
                    g->h.file);
    return 1;
}

/* Return 1 if a merge makes a text. `index` contains the merges by their results. */
static int is_made(const gguf *g, const text_index *index, moe_span text) {
    size_t at = 0;
    for (uint32_t i, hash = text_hash(text.data, text.length); (i = text_index_next(index, hash, &at)) != TEXT_NONE;) {
        const pack_merge *x = &g->tokens.parts.merges[i];
        if (x->left.length + x->right.length == text.length && memcmp(x->left.data, text.data, x->left.length) == 0 &&
            memcmp(x->right.data, text.data + x->left.length, x->right.length) == 0)
            return 1;
    }
    return 0;
}

static int index_merges(gguf *g, text_index *index) {
    const pack_parts *parts = &g->tokens.parts;
    text_bytes both = { 0 };
    int good = 1;
    for (size_t i = 0; i < parts->n_merges && good; i++) {
        text_clear(&both);
        text_append(&both, parts->merges[i].left.data, parts->merges[i].left.length);
        text_append(&both, parts->merges[i].right.data, parts->merges[i].right.length);
        good = (!both.failed && text_index_add(index, text_hash(both.data, both.length), i)) || making_no_memory(g->m);
    }
    text_bytes_free(&both);
    return good;
}

/* Return 1 if the chat template writes a token, or a key names it. */
static int is_used(const gguf *g, size_t token) {
    const moe_span text = g->texts[token];
    for (size_t i = 0; i <= count_ends(); i++)
        if (g->ids[i] == (int64_t)token) return 1;
    for (size_t i = 0; i < PROMPT_PIECES && text.length && !memchr(text.data, 0, text.length); i++) {
        const char *piece = g->tokens.pieces.texts[i];
        for (const char *at = piece; at && (at = strchr(at, text.data[0])); at++)
            if (strncmp(at, text.data, text.length) == 0) return 1;
    }
    return 0;
}

/* Type tokens that the chat template spells, and named ones, as special if no merges can produce them. */
static int retype(gguf *g) {
    text_index made = { 0 };
    int good = index_merges(g, &made);
    for (size_t i = 0; i < g->n_texts && good; i++) {
        const moe_span t = g->texts[i];
        if (g->kinds[i] == CONTROL || g->kinds[i] == USER || !t.length || text_utf8_count(t.data, t.length) < 2 ||
            !is_used(g, i) || is_made(g, &made, t))
            continue;
        g->kinds[i] = CONTROL;
        making_note(g->m,
                    "token %zu, '%.*s', is typed as text, but named by a key or spelled by the chat template: using it "
                    "as a special token",
                    i, (int)(t.length < 40 ? t.length : 40), t.data);
    }
    text_index_free(&made);
    return good;
}

/* Type tokens of a SentencePiece model as special that users' texts must not yield: the unknown token, and user-defined
 * ones such as <start_of_turn> that the chat template spells, or keys name. */
static void retype_users(gguf *g) {
    for (size_t i = 0; i < g->n_texts; i++) {
        const moe_span t = g->texts[i];
        const char first = t.length > 2 ? t.data[0] : 0, last = first ? t.data[t.length - 1] : 0;
        const int tagged = (first == '<' && last == '>') || (first == '[' && last == ']');
        if (g->kinds[i] == UNKNOWN_KIND || (g->kinds[i] == USER && tagged && is_used(g, i))) g->kinds[i] = CONTROL;
    }
}

/* Derive the merges of a SentencePiece model from the scores of its tokens. */
static int derive_merges(gguf *g) {
    const value *v = find(g, "tokenizer.ggml.scores");
    pack_parts *parts = &g->tokens.parts;
    if (!v || v->type != ARRAY || v->kind != F32 || v->count != g->n_texts)
        return making_refuse(g->m, g->h.file, "tokenizer.ggml.scores must list the score of every token");
    float *scores = making_keep(g->m, NULL, (g->n_texts + 1) * sizeof *scores);
    parts->tokens = making_keep(g->m, NULL, (g->n_texts + 1) * sizeof *parts->tokens);
    if (!scores || !parts->tokens) return 0;
    parts->n_tokens = g->n_texts;
    for (size_t i = 0; i < g->n_texts; i++) {
        value score = { 0 };
        decode_number(&score, F32, v->data + 4 * i);
        scores[i] = (float)score.real;
        if (!isfinite(scores[i])) return making_refuse(g->m, g->h.file, "the score of token %zu is not finite", i);
        parts->tokens[i] = g->kinds[i] == NORMAL || g->kinds[i] == USER ? g->texts[i] : (moe_span){ NULL, 0 };
    }
    const int good = pack_derive_merges(g->m, parts, scores);
    parts->n_tokens = 0;
    return good;
}

/* Split the texts into tokens and added tokens. User-defined tokens of characters are both: merges can make them. */
static int split_tokens(gguf *g) {
    pack_parts *parts = &g->tokens.parts;
    const int of_characters = (parts->flags & BPE_CHARACTERS) != 0;
    parts->tokens = making_keep(g->m, NULL, (g->n_texts + 1) * sizeof *parts->tokens);
    if (!parts->tokens) return 0;
    for (size_t i = 0; i < g->n_texts; i++) {
        const int is_user = g->kinds[i] == USER, is_added = g->kinds[i] == CONTROL || is_user;
        const pack_added a = { (int64_t)i, g->texts[i], !is_user, 0, of_characters && is_user };
        parts->tokens[i] = (moe_span){ NULL, 0 };
        if ((!is_added || (of_characters && is_user)) && g->kinds[i] != UNUSED)
            parts->tokens[i] = g->texts[i], parts->n_tokens = i + 1;
        if (is_added && !making_failed(g->m, text_add(&parts->added, &parts->n_added, &parts->added_capacity, &a, 1,
                                                      sizeof a, g->m->error)))
            return 0;
    }
    return 1;
}

/* Let prompts begin with the bos token, as in llama.cpp. */
static int begin(gguf *g) {
    static const int prefixes[] = { PROMPT_PREFIX, PROMPT_SYSTEM };
    const moe_span bos = text_of(g, special(g, BOS));
    if (!bos.data)
        return making_refuse(g->m, g->h.file, "tokenizer.ggml.add_bos_token is true, but bos_token_id is missing");
    const char *text = making_keep(g->m, bos.data, bos.length);
    for (size_t i = 0; i < 2 && text; i++) {
        char **piece = &g->tokens.pieces.texts[prefixes[i]];
        if (!*piece || g->tokens.pieces.bare || text_begins_with(*piece, strlen(*piece), text)) continue;
        making_note(g->m, "prompt.%sprefix begins with '%.*s': tokenizer.ggml.add_bos_token is true",
                    i ? "system." : "", (int)bos.length, bos.data);
        char *longer = making_keep(g->m, NULL, bos.length + strlen(*piece));
        if (!longer) return 0;
        memcpy(longer, bos.data, bos.length);
        memcpy(longer + bos.length, *piece, strlen(*piece) + 1);
        *piece = longer;
    }
    decoder_begin_with(g->m, &g->d, &g->tokens, special(g, BOS), g->h.file);
    return g->m->status == MOE_OK;
}

static int read_tokeniser(gguf *g) {
    const int begins = read_pre(g);
    if (begins < 0) return 0;
    if (!g->texts)
        return making_refuse(g->m, g->h.file, "tokenizer.ggml.tokens must be a list of at most %" PRId64 " tokens",
                             g->d.vocabulary);
    if (!g->kinds) {
        g->kinds = making_keep(g->m, NULL, (g->n_texts + 1) * sizeof *g->kinds);
        for (size_t i = 0; g->kinds && i < g->n_texts; i++) g->kinds[i] = NORMAL;
    }
    if (flag_key(g, "tokenizer.ggml.add_eos_token", 0))
        refuse_value(g, find(g, "tokenizer.ggml.add_eos_token"), ": prompts would differ");
    g->tokens.found = 1;
    g->tokens.parts.file = g->h.file;
    if (g->m->status || !read_prompts(g)) return 0;
    if (g->tokens.parts.flags & BPE_CHARACTERS) retype_users(g);
    if (!(g->tokens.parts.flags & BPE_CHARACTERS ? derive_merges(g) : read_merges(g))) return 0;
    if (!retype(g) || !split_tokens(g)) return 0;
    if (!pack_tokeniser(g->m, &g->tokens.parts, &g->tokens.blob)) return 0;
    return !flag_key(g, "tokenizer.ggml.add_bos_token", begins) ? g->m->status == MOE_OK : begin(g);
}

/* Add an id that ends an answer. */
static void add_end(gguf *g, int64_t found[], size_t *n, size_t most, int64_t id) {
    for (size_t i = 0; i < *n; i++)
        if (found[i] == id) return;
    if (*n < most) found[(*n)++] = id;
    else making_refuse(g->m, g->h.file, "too many tokens end an answer");
}

static int is_plain(const gguf *g, int64_t id) {
    return g->kinds && (uint64_t)id < g->n_texts && g->kinds[id] == NORMAL;
}

/* Read the ids that end an answer: end of text and of turn, by key and, as in llama.cpp, by spelling. Files of
 * Hunyuan's 7B models also list an ordinary token, which is skipped. */
static int read_ends(gguf *g) {
    int64_t found[64];
    size_t n = 0, plain = 0, first = 0;
    for (size_t i = 0; i < count_ends(); i++)
        if (g->ids[i] >= 0) add_end(g, found, &n, 64, g->ids[i]);
    for (size_t i = 0; g->kinds && i < g->n_texts; i++)
        if (g->kinds[i] == CONTROL && g->texts[i].length &&
            text_is_listed(spelled, g->texts[i].data, g->texts[i].length))
            add_end(g, found, &n, 64, (int64_t)i);
    for (size_t i = n; i-- > 0;)
        if (is_plain(g, found[i])) plain++, first = i;
    if (plain && plain < n)
        making_note(g->m, "ignoring end token %" PRId64 ", which is an ordinary piece of text", found[first]);
    for (size_t i = 0; i < n; i++)
        if (plain == n || !is_plain(g, found[i]))
            add_end(g, g->search.ends, &g->search.n_ends, DECODER_MAX_ENDS, found[i]);
    if (!g->search.n_ends)
        making_refuse(g->m, g->h.file, "no token ends an answer: tokenizer.ggml.eos_token_id is missing");
    return g->m->status == MOE_OK;
}

/* ---- The model ---- */

static const struct {
    const char *theirs;
    const char *own;
} sampling_rows[] = {
#define RECOMMENDED(theirs, own) { theirs, own },
#include "tools/convert/decoder.inc"
};
static const struct {
    const char *key, *values;
} other_sampling[] = {
#define OTHER_SAMPLING(key, values) { key, values },
#include "tools/convert/decoder.inc"
};
enum { real, whole };
static const struct {
    const char *key;
    int kind;
    double least, most;
} sampling_limits[DECODER_SAMPLING] = {
#define SAMPLING(key, kind, least, most) { key, kind, least, most },
#include "tools/convert/decoder.inc"
};

static void read_sampling(gguf *g) {
    char key[KEY], text[SHORT];
    for (size_t i = 0; i < DECODER_SAMPLING; i++) {
        const char *theirs = "";
        for (size_t k = 0; k < sizeof sampling_rows / sizeof *sampling_rows; k++)
            if (strcmp(sampling_rows[k].own, sampling_limits[i].key) == 0) theirs = sampling_rows[k].theirs;
        snprintf(key, sizeof key, "general.sampling.%s", theirs);
        const double least = sampling_limits[i].least, most = sampling_limits[i].most;
        g->search.sample[i] = NAN;
        if (!find(g, key)) continue;
        if (sampling_limits[i].kind == whole)
            g->search.sample[i] = (double)whole_key(g, key, NONE, (int64_t)least, (int64_t)most);
        else g->search.sample[i] = real_key(g, key, NAN, least, most);
    }
    for (size_t i = 0; i < sizeof other_sampling / sizeof *other_sampling; i++) {
        snprintf(key, sizeof key, "general.sampling.%s", other_sampling[i].key);
        const value *v = find(g, key);
        if (v && !is_listed(v, other_sampling[i].values))
            making_note(g->m, "ignoring %s %s, which is not supported", key, shown(v, text));
    }
}

/* Read all parts of a split file. */
static int read_parts(gguf *g, const char *path) {
    const char *name = packed_base(path);
    const size_t length = strlen(path), tail = strlen("-00001-of-00001.gguf");
    packed_file file = { 0 };
    header h;
    int good = making_failed(g->m, packed_open(path, largest_file, "a model", g->m->out, &file, g->m->error)) &&
               read_header(g->m, &file, name, &h, &g->list);
    const value *v = good ? find_value(&h, "split.count") : NULL;
    const int64_t count = !v ? 1 : is_whole(v->type) ? v->integer : -1;
    g->files = making_keep(g->m, NULL, MAX_PARTS * sizeof *g->files);
    if (!g->files || count < 0 || count > MAX_PARTS || count <= 1) {
        if (g->files) g->files[g->n_files++] = file;
        else packed_close(&file);
        g->h = h;
        return good && (count >= 0 && count <= MAX_PARTS ? g->files != NULL
                                                         : making_refuse(g->m, name, "split.count is not supported"));
    }
    char end[32];
    packed_close(&file);
    stored_free(&g->list);
    snprintf(end, sizeof end, "-of-%05u.gguf", (unsigned)count % 100000u);
    if (length < tail || !text_ends_with(path, length, end) || path[length - tail] != '-')
        return making_refuse(g->m, name,
                             "split.count is %" PRId64 ", so the names of the parts must end with -00001%s etc.", count,
                             end);
    for (int64_t i = 0; i < count; i++) {
        char *part = making_keep(g->m, path, length);
        if (!part) return 0;
        snprintf(part + length - tail + 1, tail, "%05u-of-%05u.gguf", (unsigned)(i + 1) % 100000u,
                 (unsigned)count % 100000u);
        if (!packed_exists(part))
            return making_refuse(g->m, packed_base(part), "missing: %s is one of %" PRId64 " parts", name, count);
        if (!making_failed(g->m,
                           packed_open(part, largest_file, "a model", g->m->out, &g->files[g->n_files], g->m->error)))
            return 0;
        g->n_files++;
        if (!read_header(g->m, &g->files[i], packed_base(part), &h, &g->list)) return 0;
        const value *number = find_value(&h, "split.no"), *all = find_value(&h, "split.count");
        if (!number || !all || !is_whole(number->type) || number->integer != i || all->integer != count)
            return making_refuse(g->m, packed_base(part),
                                 "split.no and split.count do not match the name: expected %" PRId64 " and %" PRId64, i,
                                 count);
        if (i == 0) g->h = h;
    }
    v = find_value(&g->h, "split.tensors.count");
    return !v || (is_whole(v->type) && v->integer == (int64_t)g->list.n) ||
           making_refuse(g->m, name, "split.tensors.count differs from %zu, the tensors of the parts", g->list.n);
}

/* List the number formats that are not plain, sorted. */
static void list_formats(const gguf *g, char *out, size_t size) {
    const char *last = "";
    size_t n = 0;
    out[0] = 0;
    for (;;) {
        const char *next = NULL;
        for (size_t i = 0; i < g->list.n; i++) {
            const stored_format *f = g->list.items[i].format;
            if (!stored_is_plain(f) && strcmp(f->name, last) > 0 && (!next || strcmp(f->name, next) < 0))
                next = f->name;
        }
        if (!next || n >= size) return;
        n += (size_t)snprintf(out + n, size - n, "%s%s", n ? ", " : "", next);
        last = next;
    }
}

static int put_general(gguf *g) {
    const convert_options *o = g->options;
    const value *licence = find(g, "general.license");
    making_put_text(g->m, "general.architecture", "decoder");
    making_put_text(g->m, "general.name", o->name ? o->name : making_default_name(g->m, o->path, 0));
    making_put_text(g->m, "general.description", o->description);
    if (licence && licence->type == STRING && !(o->licence && *o->licence))
        making_put_span(g->m, "general.licence", MOE_META_TEXT, licence->text.data, licence->text.length);
    else making_put_text(g->m, "general.licence", o->licence);
    making_put_text(g->m, "general.attribution", o->attribution);
    return g->m->status == MOE_OK;
}

static int has_experts(const gguf *g) {
    for (size_t i = 0; i < g->list.n; i++)
        if (strstr(g->list.items[i].own, ".ffn_gate_inp.weight")) return 1;
    return 0;
}

static int read_family(gguf *g) {
    const value *v = find(g, "general.architecture");
    char text[SHORT];
    g->d.family = v && v->type == STRING ? decoder_family_of(v->text.data, v->text.length, has_experts(g)) : NULL;
    if (!g->d.family)
        return making_refuse(g->m, g->h.file, "unknown general.architecture %s: expected %s",
                             v ? shown(v, text) : "(missing)", decoder_families(g->m, 1));
    snprintf(g->architecture, sizeof g->architecture, "%s", g->d.family->architecture);
    return 1;
}

/* Reject a file without a tokeniser; name the parts of one that it has. `missing`: 1 the model, 2 the tokens, 3 both.
 */
static int no_tokeniser(gguf *g, int missing) {
    static const char *const keys[] = { "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges",
                                        "tokenizer.huggingface.json" };
    char text[96], there[128] = "";
    size_t n = 0;
    snprintf(text, sizeof text, "%s%s%s %s missing", missing & 1 ? keys[0] : "", missing == 3 ? " and " : "",
             missing & 2 ? keys[1] : "", missing == 3 ? "are" : "is");
    for (size_t i = 0; i < 4; i++)
        if (find(g, keys[i])) n += (size_t)snprintf(there + n, sizeof there - n, "%s%s", n ? " and " : "", keys[i]);
    return making_refuse(g->m, g->h.file,
                         "no tokeniser: %s%s%s. To convert a model that accepts token ids only, use "
                         "tools/convert/convert.py --ids-only",
                         text, n ? "; found only " : "", there);
}

/* Mark the keys of the tokeniser as read. */
static void skip_tokeniser(gguf *g) {
    for (size_t i = 0; i < g->h.n_values; i++)
        if (text_begins_with(g->h.values[i].key, strlen(g->h.values[i].key), "tokenizer.")) find(g, g->h.values[i].key);
}

static int read_tokens(gguf *g) {
    read_ids(g);
    if (g->m->status || !read_token_lists(g)) return 0;
    g->d.bos = 0;
    const int missing = !find(g, "tokenizer.ggml.model") + 2 * !find(g, "tokenizer.ggml.tokens");
    if (g->options->ids_only) skip_tokeniser(g);
    else if (missing ? !no_tokeniser(g, missing) : !read_tokeniser(g)) return 0;
    if (special(g, BOS) >= 0) g->d.bos = special(g, BOS);
    g->search.pad = special(g, PADDING);
    g->search.beam = 1;
    g->search.length_penalty = 1.0;
    read_sampling(g);
    return read_ends(g) && check_unread(g);
}

/* ---- The first bytes of a file ---- */

/* A key is a u64 length and the key, the u32 type 8 (text), a u64 length and the text. */
moe_span gguf_text(moe_span begin, const char *key) {
    const size_t length = strlen(key);
    const unsigned char *data = (const unsigned char *)begin.data;
    for (size_t at = 8; at + length + 12 <= begin.length; at++) {
        const unsigned char *u = data + at + length;
        if (data[at] != (unsigned char)*key || data[at - 8] != length || memcmp(data + at, key, length) != 0) continue;
        const uint64_t n = u[4] | (uint64_t)u[5] << 8 | (uint64_t)u[6] << 16 | (uint64_t)u[7] << 24;
        if (u[0] == STRING && n <= begin.length - at - length - 12)
            return (moe_span){ (const char *)u + 12, (size_t)n };
    }
    return (moe_span){ NULL, 0 };
}

static int not_supported(const char *what, moe_span name, char *why, size_t size) {
    char shown[41];
    size_t n = 0;
    for (; n < name.length && n < sizeof shown - 1; n++)
        shown[n] = (char)(name.data[n] > ' ' && name.data[n] < 0x7f ? name.data[n] : '?');
    shown[n] = 0;
    snprintf(why, size, "its %s %s is not supported", what, shown);
    return 0;
}

int gguf_check(moe_span begin, const char *file, char *why, size_t size) {
    const moe_span architecture = gguf_text(begin, "general.architecture"),
                   model = gguf_text(begin, "tokenizer.ggml.model"), pre = gguf_text(begin, "tokenizer.ggml.pre"),
                   template = gguf_text(begin, "tokenizer.chat_template"), own = gguf_text(begin, "general.name");
    char name[512];
    size_t row = 0;
    int known = 0;
    *why = 0;
    if (!architecture.data) return 1;
    snprintf(name, sizeof name, "%.250s %.*s", file, (int)(own.length < 250 ? own.length : 250),
             own.data ? own.data : "");
    for (int sparse = 0; sparse < 2; sparse++) {
        const decoder_family *family = decoder_family_of(architecture.data, architecture.length, sparse);
        known |=
            family ? 1 | (!template.data || prompts_known(template, (prompt_model){ family->name, name }) ? 2 : 0) : 0;
    }
    const int characters = model.data && text_is(model.data, model.length, "llama");
    while (row < PRE_ROWS && !(pre.data && text_is(pre.data, pre.length, pre_rows[row].name))) row++;
    if (!known) return not_supported("architecture", architecture, why, size);
    if (model.data && !characters && !text_is(model.data, model.length, "gpt2"))
        return not_supported("tokeniser", model, why, size);
    if (pre.data && (characters ? !text_is(pre.data, pre.length, "default") : row == PRE_ROWS))
        return not_supported("tokeniser", pre, why, size);
    if (known == 1) snprintf(why, size, "its chat template is unknown here");
    return 1;
}

int gguf_convert(making *m, const convert_options *options) {
    gguf g = { .m = m, .options = options };
    char formats[128];
    uint64_t source = 0;
    const moe_type type = options->type == MOE_TYPE_KEEP ? MOE_TYPE_Q8B : options->type;
    const moe_type experts = options->experts != MOE_TYPE_KEEP ? options->experts
                             : options->type == MOE_TYPE_KEEP  ? MOE_TYPE_Q4
                                                               : options->type;
    int good = read_parts(&g, options->path) && read_family(&g) && read_config(&g) && rename_all(&g) &&
               read_factors(&g) && read_tokens(&g) && put_general(&g);
    list_formats(&g, formats, sizeof formats);
    for (size_t i = 0; i < g.n_files; i++) source += g.files[i].size;
    good = good && decoder_rename(m, &g.d, &g.list) &&
           decoder_write(m, &g.d, &g.search, &g.tokens, &g.list, type, experts, formats, source);
    for (size_t i = 0; i < g.n_files; i++) packed_close(&g.files[i]);
    stored_free(&g.list);
    free(g.tokens.parts.added);
    text_bytes_free(&g.tokens.blob);
    return good;
}
