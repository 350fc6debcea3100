/* decoder.c - see decoder.h */
#include "tools/convert/decoder.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 64, LIMIT = 512, MAX_SOURCES = 3, NAME = BUILT_NAME, WIDEST = 1 << 20 };

/* ---- Tables ---- */

static const decoder_family families[] = {
#define FAMILY(name, class, architecture, head_norm, tied, epsilon, dense, biased, windowed, gemma, delta, cohere) \
    { name, class, architecture, head_norm, tied, epsilon, dense, biased, windowed, gemma, delta, cohere },
#include "tools/convert/decoder.inc"
};
enum { FAMILIES = sizeof families / sizeof *families };

static const char *const sampling_names[DECODER_SAMPLING] = {
#define SAMPLING(key, kind, least, most) key,
#include "tools/convert/decoder.inc"
};
enum { real, whole };
static const int sampling_kinds[DECODER_SAMPLING] = {
#define SAMPLING(key, kind, least, most) kind,
#include "tools/convert/decoder.inc"
};

enum { one, width, queries, ffn, shared, values, kernel, DIMENSIONS };
typedef struct tensor_row {
    const char *kind, *name, *sources, *rows;
    int columns;
    const char *when;
} tensor_row;
static const tensor_row tensor_rows[] = {
#define TENSOR(kind, name, sources, rows, columns, when) { kind, name, sources, rows, columns, when },
#include "tools/convert/decoder.inc"
};

static const struct {
    const char *published, *own;
} spellings[] = {
#define SPELLING(published, own) { published, own },
#include "tools/convert/decoder.inc"
};

static const struct {
    const char *published, *own;
} predicted[] = {
#define PREDICTED(published, own) { published, own },
#include "tools/convert/decoder.inc"
};

static const struct {
    const char *name, *source;
    int columns;
} predictor_rows[] = {
#define PREDICTOR(name, source, columns) { name, source, columns },
#include "tools/convert/decoder.inc"
};
enum { PREDICTOR_ROWS = sizeof predictor_rows / sizeof *predictor_rows };

static const struct {
    const char *what, *prefixes;
} skipped_rows[] = {
#define SKIPPED(what, prefixes) { what, prefixes },
#include "tools/convert/decoder.inc"
};
enum { SKIPPED_ROWS = sizeof skipped_rows / sizeof *skipped_rows };

const char decoder_python_types[] =
#define PYTHON(types) types " "
#include "tools/convert/decoder.inc"
    "";

const decoder_family *decoder_family_named(const char *name) {
    for (size_t i = 0; i < FAMILIES; i++)
        if (strcmp(families[i].name, name) == 0) return &families[i];
    return NULL;
}

const decoder_family *decoder_family_of(const char *name, size_t length, int sparse) {
    const decoder_family *found = NULL;
    for (size_t i = 0; i < FAMILIES; i++)
        if (*families[i].architecture && text_is(name, length, families[i].architecture) &&
            (!found || (sparse && found->dense)))
            found = &families[i];
    return found;
}

/* Return 1 if the previous row has this architecture, or a later one is the outer type of a type NAME_text. */
static int is_repeated(size_t i, int architectures) {
    const char *name = families[i].name;
    const size_t length = strlen(name);
    if (architectures)
        return !*families[i].architecture || (i && strcmp(families[i].architecture, families[i - 1].architecture) == 0);
    for (size_t k = i + 1; k < FAMILIES; k++)
        if (text_ends_with(name, length, "_text") && text_is(name, length - 5, families[k].name)) return 1;
    return 0;
}

const char *decoder_families(making *m, int architectures) {
    text_bytes out = { 0 };
    for (size_t i = 0; i < FAMILIES; i++) {
        if (is_repeated(i, architectures)) continue;
        text_append_string(&out, architectures ? families[i].architecture : families[i].name);
        text_append_string(&out, " ");
    }
    if (!architectures) text_append_string(&out, decoder_python_types);
    while (out.length && out.data[out.length - 1] == ' ') out.data[--out.length] = 0;
    const char *list = making_keep(m, out.failed ? "" : out.data, out.failed ? 0 : out.length);
    text_bytes_free(&out);
    return list ? list : "";
}

/* ---- Configuration ---- */

int decoder_check(making *m, const decoder *d) {
    if (d->heads % d->keys)
        return making_refuse(m, d->file,
                             "the number of key heads, %" PRId64 ", does not divide that of heads, %" PRId64, d->keys,
                             d->heads);
    if (d->head % 2) return making_refuse(m, d->file, "heads of %" PRId64 " columns: must be even", d->head);
    return 1;
}

int decoder_lacks_1(const decoder *d) { return d->family->gemma || d->family->delta == DECODER_QWEN; }

double *decoder_frequencies(making *m, const decoder *d, double theta) {
    const size_t half = (size_t)d->turned / 2;
    double *frequencies = making_keep(m, NULL, half * sizeof *frequencies);
    for (size_t i = 0; frequencies && i < half; i++) frequencies[i] = pow(theta, -2.0 * (double)i / (double)d->turned);
    return frequencies;
}

void decoder_slow_down(const decoder *d, double *frequencies, double factor, double low, double high, double length) {
    static const double pi = 3.141592653589793;
    for (int64_t i = 0; i < d->turned / 2; i++) {
        const double turns = length * frequencies[i] / (2 * pi), x = (turns - low) / (high - low);
        const double fast = x < 0 ? 0 : x > 1 ? 1 : x;
        frequencies[i] *= fast + (1 - fast) / factor;
    }
}

void decoder_set_windows(decoder *d, int64_t window, int64_t pattern) {
    for (int64_t i = 0; i < d->layers; i++) d->windows[i] = (i + 1) % pattern ? window : 0;
}

void decoder_begin_with(making *m, decoder *d, decoder_tokens *t, int64_t start, const char *file) {
    if (t->pieces.texts[PROMPT_PREFIX] && !t->pieces.bare) return;
    d->bos = start;
    t->begins = 1;
    making_note(m, "each text begins with the bos token %" PRId64 ", as %s requires", start, file);
}

/* Return the number of positions of the model file. A window changes nothing up to its length. Gemma has two tables and
 * wide heads. */
static int64_t positions(const decoder *d) {
    const int64_t n = d->window && d->window < d->context ? d->window : d->context;
    const int64_t most = d->family->gemma ? DECODER_POSITIONS / 4 : DECODER_POSITIONS;
    return n < most ? n : most;
}

static int any_sparse(const decoder *d) {
    for (int64_t i = 0; i < d->layers; i++)
        if (d->sparse[i]) return 1;
    return 0;
}

/* ---- Names ---- */

/* Return the number of the layer that a tensor belongs to, or -1. Sets *rest to the text after the number. */
static int64_t layer_of(const char *name, const char **rest) {
    static const char begin[] = "model.layers.";
    char *end;
    if (!text_begins_with(name, strlen(name), begin) || name[sizeof begin - 1] < '0' || name[sizeof begin - 1] > '9')
        return -1;
    const long long i = strtoll(name + sizeof begin - 1, &end, 10);
    *rest = end;
    return *end == '.' ? i : -1;
}

/* Return a name with all published spellings replaced. NULL after an error. */
static const char *own_spelling(making *m, const char *name) {
    for (size_t i = 0; name && i < sizeof spellings / sizeof *spellings; i++) {
        const char *at = strstr(name, spellings[i].published);
        const size_t old = strlen(spellings[i].published), new = strlen(spellings[i].own);
        if (!at) continue;
        char *copy = making_keep(m, NULL, strlen(name) + new);
        if (copy) snprintf(copy, strlen(name) + new, "%.*s%s%s", (int)(at - name), name, spellings[i].own, at + old);
        name = copy;
    }
    return name;
}

void decoder_interleaved(const decoder *d, stored *t) {
    static const char *const ends[] = { ".self_attn.q_proj.weight", ".self_attn.k_proj.weight" };
    const size_t length = strlen(t->name);
    if (t->n_dims == 2 && t->dims[0] % (uint64_t)d->head == 0 &&
        (text_ends_with(t->name, length, ends[0]) || text_ends_with(t->name, length, ends[1])))
        t->heads = (uint64_t)d->head;
}

/* Write transformers' name of a tensor of the layer that predicts the token after the next one. Returns 0 for tensors
 * outside this layer. */
static int predicted_name(const decoder *d, const char *name, char out[NAME]) {
    const char *rest = name, *own = "";
    const int inside = layer_of(name, &rest) == d->layers;
    int found = inside;
    if (inside) rest++;
    else rest = name;
    for (size_t i = 0; i < sizeof predicted / sizeof *predicted; i++) {
        const size_t n = strlen(predicted[i].published);
        if (strncmp(rest, predicted[i].published, n) != 0) continue;
        rest += n, own = predicted[i].own;
        found |= d->family->delta == DECODER_QWEN;
    }
    return found && snprintf(out, NAME, "model.layers.%" PRId64 ".%s%s", d->layers, own, rest) < NAME;
}

/* Return 1 if the tensors contain a complete layer that predicts the token after the next one. */
static int has_predictor(const decoder *d, const stored_list *list) {
    char wanted[NAME], name[NAME];
    size_t found = 0;
    for (size_t r = 0; r < PREDICTOR_ROWS; r++) {
        snprintf(wanted, sizeof wanted, "model.layers.%" PRId64 ".%s", d->layers, predictor_rows[r].source);
        for (size_t i = 0; i < list->n && found == r; i++)
            found += (size_t)(predicted_name(d, list->items[i].name, name) && strcmp(name, wanted) == 0);
    }
    return found == PREDICTOR_ROWS;
}

/* Return 1 if such a layer repeats the embedding or the output matrix. */
static int is_repetition(const char *name) {
    const size_t length = strlen(name);
    return text_ends_with(name, length, ".embed_tokens.weight") ||
           text_ends_with(name, length, ".shared_head.head.weight");
}

/* Reject layers after the last one unless they predict further tokens. */
static int check_skipped(making *m, const decoder *d, const stored_list *list, int64_t layer, const stored *first) {
    for (size_t i = 0; i < list->n; i++) {
        const char *rest = "";
        if (layer_of(list->items[i].name, &rest) == layer && strstr(rest, "eh_proj")) {
            making_note(m, "skipping layer %" PRId64 ", which predicts further tokens", layer);
            return 1;
        }
    }
    return making_refuse(m, first->file,
                         "tensor %.60s: the model has %" PRId64 " layers, and only layers with eh_proj, which predict "
                         "further tokens, may follow",
                         first->own, d->layers);
}

/* Return the row of SKIPPED for a tensor that texts do not need, or SKIPPED_ROWS. */
static size_t skipped_row(const decoder *d, const char *name) {
    for (size_t i = 0; i < SKIPPED_ROWS && decoder_lacks_1(d); i++)
        for (const char *p = skipped_rows[i].prefixes; *p; p += strspn(p, " ")) {
            const size_t n = strcspn(p, " ");
            if (strncmp(name, p, n) == 0) return i;
            p += n;
        }
    return SKIPPED_ROWS;
}

int decoder_rename(making *m, const decoder *d, stored_list *list) {
    stored_list out = { 0 };
    size_t skipped[SKIPPED_ROWS + 1] = { 0 };
    const int predicts = has_predictor(d, list);
    int64_t last = -1;
    int good = 1;
    for (size_t i = 0; i < list->n && good; i++) {
        stored t = list->items[i];
        const char *rest;
        char name[NAME];
        const int64_t layer = layer_of(t.name, &rest);
        const int kept = predicts && predicted_name(d, t.name, name);
        if (kept && is_repetition(name)) continue;
        if (kept) t.name = making_keep(m, name, strlen(name));
        if (!t.name) good = 0;
        if (!kept && layer >= d->layers) {
            if (layer != last) good = check_skipped(m, d, list, layer, &t);
            last = layer;
            continue;
        }
        const size_t skips = kept || !good ? SKIPPED_ROWS : skipped_row(d, t.name);
        skipped[skips]++;
        if (skips < SKIPPED_ROWS) continue;
        const size_t length = t.name ? strlen(t.name) : 0;
        t.name = own_spelling(m, t.name);
        const stored *other = t.name ? stored_find(&out, t.name) : NULL;
        if (d->family->cohere && t.name) decoder_interleaved(d, &t);
        if (other)
            good = making_refuse(m, t.file, "tensors %.60s and %.60s are the same tensor under two names", t.own,
                                 other->own);
        else good = t.name && length && stored_add(m, &out, &t);
    }
    if (predicts && good)
        making_note(m, "keeping the layer that predicts the token after the next one, which saves time");
    for (size_t i = 0; i < SKIPPED_ROWS; i++)
        if (skipped[i]) making_note(m, "skipping %zu %s", skipped[i], skipped_rows[i].what);
    stored_free(list);
    *list = out;
    return good && stored_connect_scales(m, list, d->scale_block);
}

/* ---- Tensors ---- */

/* Return the size that a word of TENSOR stands for. */
static int64_t size_named(const decoder *d, const char *word, size_t n) {
    if (text_is(word, n, "width")) return d->width;
    if (text_is(word, n, "head")) return d->head;
    if (text_is(word, n, "queries")) return d->heads * d->head;
    if (text_is(word, n, "keys")) return d->keys * d->head;
    if (text_is(word, n, "ffn")) return d->ffn;
    if (text_is(word, n, "experts")) return d->experts;
    if (text_is(word, n, "row")) return 1;
    if (text_is(word, n, "shared")) return d->shared;
    if (text_is(word, n, "kernel")) return d->kernel;
    const int64_t all = d->values * d->value, convolved = 2 * d->value_keys * d->key + all;
    if (text_is(word, n, "gates")) return d->values;
    if (text_is(word, n, "value")) return d->value;
    if (text_is(word, n, "values")) return all;
    return text_is(word, n, "convolved") ? convolved : convolved + all + 2 * d->values;
}

static int64_t size_of(const decoder *d, int dimension) {
    static const char *const words[DIMENSIONS] = { "", "width", "queries", "ffn", "shared", "values", "kernel" };
    return dimension == one ? 0 : size_named(d, words[dimension], strlen(words[dimension]));
}

static int is_wanted(const decoder *d, const char *when) {
    if (strcmp(when, "head_norm") == 0) return strcmp(d->family->head_norm, "none") != 0;
    if (strcmp(when, "biased") == 0) return d->family->biased;
    if (strcmp(when, "gemma") == 0) return d->family->gemma == DECODER_GEMMA;
    if (strcmp(when, "cohere") == 0) return d->family->cohere;
    if (strcmp(when, "plain") == 0) return d->family->gemma != DECODER_GEMMA && !d->family->cohere;
    if (strcmp(when, "gated") == 0) return d->family->delta == DECODER_QWEN;
    if (strcmp(when, "ungated") == 0) return d->family->delta != DECODER_QWEN;
    if (strcmp(when, "fused") == 0) return d->family->delta == DECODER_LARA;
    if (strcmp(when, "apart") == 0) return d->family->delta != DECODER_LARA;
    if (strcmp(when, "choice") == 0) return strcmp(d->weights, "sigmoid") == 0;
    return strcmp(when, "shared") != 0 || d->shared > 0;
}

/* Add the 1 that Gemma and Qwen3.5 omit to the weights of a norm, and multiply them by `scale`. */
static void change_norm(const decoder *d, built *t, double scale) {
    const int offset = decoder_lacks_1(d);
    if (!offset && !(scale < 1 || scale > 1)) return;
    t->changed = 1;
    t->offset = offset ? (float)d->norm_offset : 0;
    t->scale = (float)scale;
}

/* Add `rows` rows of a source in layer `i`: with + or - before its name, the first or second half of each head's. */
static void add_source(builder *b, built *t, int64_t i, const char *s, size_t length, int64_t rows, int64_t cols) {
    char source[NAME];
    const int64_t head = b->d->head, half = *s == '+' || *s == '-', may_lack = *s == '?';
    uint64_t dims[4] = { (uint64_t)(rows << half), (uint64_t)cols };
    if (t->kernel) dims[1] = 1, dims[2] = t->kernel;
    const int64_t skip = half + may_lack;
    snprintf(source, sizeof source, "model.layers.%" PRId64 ".%.*s", i, (int)(length - (size_t)skip), s + skip);
    const stored *item = may_lack && !stored_find(b->list, source) ? NULL : builder_take(b, source, dims);
    for (int64_t at = 0; half && at < rows; at += head)
        builder_part(t, item, (uint64_t)(2 * at + (*s == '-' ? head : 0)), (uint64_t)head);
    if (may_lack && !item) t->parts[t->n_parts++] = (built_part){ NULL, 0, (uint64_t)rows };
    else if (!half) builder_part(t, item, 0, (uint64_t)rows);
    t->rows += (size_t)rows;
}

/* Add the tensors of a sub-layer of layer `i`, except experts. */
static void put_tensors(builder *b, const char *kind, const char *name, int64_t i) {
    char full[NAME];
    for (size_t r = 0; r < sizeof tensor_rows / sizeof *tensor_rows; r++) {
        const tensor_row *row = &tensor_rows[r];
        if (strcmp(row->kind, kind) != 0 || !is_wanted(b->d, row->when)) continue;
        snprintf(full, sizeof full, "%s.%s", name, row->name);
        const int convolves = row->columns == kernel;
        const int64_t cols = convolves ? 0 : size_of(b->d, row->columns);
        built *t = builder_tensor(b, full, 0, (size_t)cols, MAX_SOURCES + 2 * (size_t)b->d->heads);
        const char *s = row->sources, *n = row->rows;
        if (t && convolves) t->kernel = (size_t)b->d->kernel;
        while (t && *s) {
            const size_t length = strcspn(s, " "), letters = strcspn(n, " ");
            add_source(b, t, i, s, length, size_named(b->d, n, letters), cols);
            s += length + strspn(s + length, " ");
            n += letters + strspn(n + letters, " ");
        }
        if (t && convolves) t->rows *= t->kernel;
        if (t) t->log_rate = b->d->log_rate && strcmp(row->name, "rate") == 0;
        if (t && text_ends_with(row->name, strlen(row->name), "norm.weight") &&
            strcmp(row->name, "head_norm.weight") != 0)
            change_norm(b->d, t,
                        b->d->family->gemma && strcmp(row->name, "q_norm.weight") == 0 ? b->d->query_scale : 1);
        if (t)
            t->f32 = strcmp(kind, "moe") == 0 &&
                     (strcmp(row->name, "gate.weight") == 0 || strcmp(row->name, "shared.scale.weight") == 0);
    }
}

/* Add the experts: as published, one tensor per expert and matrix; gate on top of up in one tensor for all experts; or,
 * in GGUF, a tensor for all experts per matrix. */
static void put_experts(builder *b, const char *name, int64_t i) {
    static const char *const parts[] = { "gate", "up", "down" };
    const decoder *d = b->d;
    const uint64_t e = (uint64_t)d->experts, f = (uint64_t)d->hidden, w = (uint64_t)d->width;
    const uint64_t shapes[3][2] = { { f, w }, { f, w }, { w, f } };
    char full[NAME], source[NAME], both[NAME];
    snprintf(full, sizeof full, "%s.experts", name);
    snprintf(both, sizeof both, "model.layers.%" PRId64 ".mlp.experts.gate_up_proj", i);
    built *t = builder_tensor(b, full, (size_t)f, (size_t)w, 3 * (size_t)e);
    if (!t) return;
    t->experts = (size_t)e;
    t->n_parts = 3 * (size_t)e;
    const int fused = stored_find(b->list, both) != NULL;
    for (size_t k = 0; k < 3; k++) {
        const uint64_t rows = shapes[k][0], cols = shapes[k][1];
        const char *dot = fused ? "" : "*";
        snprintf(source, sizeof source, "model.layers.%" PRId64 ".mlp.experts.%s%s_proj", i, dot, parts[k]);
        const stored *all = NULL;
        const uint64_t stacked = fused && k < 2 ? 2 * f : rows;
        if (fused && k < 2) all = builder_take(b, both, (const uint64_t[4]){ e, 2 * f, w });
        else if (fused || stored_find(b->list, source))
            all = builder_take(b, source, (const uint64_t[4]){ e, rows, cols });
        for (size_t x = 0; x < (size_t)e && b->m->status == MOE_OK; x++) {
            const stored *item = all;
            const uint64_t first = x * stacked + (fused && k == 1 ? f : 0);
            snprintf(source, sizeof source, "model.layers.%" PRId64 ".mlp.experts.%zu.%s_proj.weight", i, x, parts[k]);
            if (!item) item = builder_take(b, source, (const uint64_t[4]){ rows, cols });
            t->parts[3 * x + k] = (built_part){ item, all ? first : 0, rows };
        }
    }
}

/* ---- Layers ---- */

static void put_norm(builder *b, const char *name, int inside) {
    const int cohere = b->d->family->cohere;
    if (inside) {
        builder_key(b, name, "residual", 1);
        builder_word(b, name, "norm", b->d->family->gemma == DECODER_GEMMA ? "both" : "before");
    }
    builder_word(b, name, "norm.kind", cohere ? "layer" : "rms");
    builder_real(b, name, "epsilon", b->d->epsilon);
}

/* Return the side of layer `i`. */
static const char *side_of(const decoder *d, int64_t i) { return i < d->layers ? "decoder" : "predict"; }

static void put_mixture(builder *b, int64_t i) {
    const decoder *d = b->d;
    char name[24];
    builder_layer(b, side_of(d, i), "moe", name);
    builder_key(b, name, "experts", d->experts);
    builder_key(b, name, "k", d->chosen);
    builder_key(b, name, "hidden", d->hidden);
    builder_word(b, name, "gate", "topk");
    builder_word(b, name, "weights", d->weights);
    builder_word(b, name, "expert", "gated");
    builder_word(b, name, "output", "none");
    builder_real(b, name, "scale", d->scale);
    builder_key(b, name, "shared", d->shared);
    put_norm(b, name, 1);
    put_tensors(b, "moe", name, i);
    put_experts(b, name, i);
}

static void put_delta(builder *b, int64_t i) {
    const decoder *d = b->d;
    char name[24];
    builder_layer(b, "decoder", "delta", name);
    builder_key(b, name, "heads", d->values);
    builder_key(b, name, "key_heads", d->value_keys);
    builder_key(b, name, "head.size", d->value);
    builder_key(b, name, "key.size", d->key);
    builder_key(b, name, "kernel", d->kernel);
    builder_key(b, name, "tiled", d->tiled);
    put_norm(b, name, 1);
    put_tensors(b, "delta", name, i);
}

/* Return the number of a layer's table of rotary positions; 0 for none. */
static int table_of(const decoder *d, int64_t i) {
    if (d->linear[i]) return 0;
    if (d->family->delta == DECODER_LARA || d->family->cohere == 2) return d->windows[i] > 0;
    return d->windows[i] ? 2 : 1;
}

static void put_attention(builder *b, int64_t i) {
    const decoder *d = b->d;
    char name[24];
    builder_layer(b, side_of(d, i), "attention", name);
    builder_key(b, name, "heads", d->heads);
    builder_key(b, name, "kv_heads", d->keys);
    builder_key(b, name, "head.size", d->head);
    builder_key(b, name, "rotary", table_of(d, i));
    builder_word(b, name, "head.norm", d->family->head_norm);
    if (d->windows[i]) builder_key(b, name, "window", d->windows[i]);
    if (d->family->delta == DECODER_QWEN) builder_key(b, name, "gated", 1);
    put_norm(b, name, 1);
    put_tensors(b, "attention", name, i);
}

static void put_layer(builder *b, int64_t i) {
    const decoder *d = b->d;
    char name[24], gate[64];
    snprintf(gate, sizeof gate, "model.layers.%" PRId64 ".mlp.gate.weight", i);
    if (d->linear[i]) put_delta(b, i);
    else put_attention(b, i);
    if (i < d->layers ? d->sparse[i] : any_sparse(d) && stored_find(b->list, gate)) {
        put_mixture(b, i);
        return;
    }
    builder_layer(b, side_of(d, i), "ffn", name);
    builder_key(b, name, "hidden", d->ffn);
    builder_word(b, name, "activation", d->family->gemma ? "gelu_tanh" : "swish");
    builder_key(b, name, "gated", 1);
    if (d->family->cohere) builder_key(b, name, "parallel", 1);
    put_norm(b, name, 1);
    put_tensors(b, "ffn", name, i);
}

/* Write a row of a table of rotary positions with these frequencies. */
static void make_positions(const void *frequencies, size_t row, float *out, size_t cols) {
    const size_t half = cols / 2;
    for (size_t i = 0; i < half; i++) {
        const double angle = (double)row * ((const double *)frequencies)[i];
        out[i] = (float)cos(angle);
        out[half + i] = (float)sin(angle);
    }
}

static void put_positions(builder *b, const char *name, const double *frequencies) {
    built *t = builder_tensor(b, name, (size_t)positions(b->d), (size_t)b->d->turned, 1);
    if (!t) return;
    t->make = make_positions;
    t->made_from = frequencies;
    t->f32 = 1;
}

/* Add the embedding, and check that a tied output matrix equals it. */
static void put_embedding(builder *b) {
    static const char *const names[] = { "model.embed_tokens.weight", "lm_head.weight" };
    const decoder *d = b->d;
    const uint64_t shape[4] = { (uint64_t)d->vocabulary, (uint64_t)d->width };
    const int tied = d->tied && stored_find(b->list, names[1]), alone = tied && !stored_find(b->list, names[0]);
    const stored *first = builder_take(b, names[alone], shape),
                 *second = tied && !alone ? builder_take(b, names[1], shape) : NULL;
    built *t = builder_tensor(b, "embedding.weight", (size_t)shape[0], (size_t)shape[1], 1);
    if (first && second && first->data != second->data &&
        (first->format != second->format || first->scales || second->scales ||
         memcmp(first->data, second->data, (size_t)stored_bytes(first)) != 0))
        making_refuse(b->m, first->file, "tensors %.60s and %.60s should be tied, but differ", first->own, second->own);
    builder_part(t, first, 0, shape[0]);
    int used = 0;
    for (int64_t i = 0; i < d->layers; i++) used |= table_of(d, i);
    if (used & 1) put_positions(b, "rotary.weight", d->frequencies);
    if (used & 2) put_positions(b, "rotary.local.weight", d->local_frequencies);
}

/* Put the bias of the last norm, zero if the file lacks it. */
static void put_last_bias(builder *b, const char *name) {
    static const char bias[] = "model.norm.bias";
    char full[NAME];
    snprintf(full, sizeof full, "%s.norm.bias", name);
    built *t = builder_tensor(b, full, (size_t)b->d->width, 0, 1);
    const uint64_t shape[4] = { (uint64_t)b->d->width };
    if (stored_find(b->list, bias)) builder_part(t, builder_take(b, bias, shape), 0, shape[0]);
    else if (t) t->parts[t->n_parts++] = (built_part){ NULL, 0, shape[0] };
}

/* Add the layer that predicts the token after the next one, if the checkpoint has one. */
static void put_predictor(builder *b) {
    const decoder *d = b->d;
    char name[24], source[64];
    for (size_t r = 0; r < PREDICTOR_ROWS; r++) {
        const int columns = predictor_rows[r].columns, last = r + 1 == PREDICTOR_ROWS;
        snprintf(source, sizeof source, "model.layers.%" PRId64 ".%s", d->layers, predictor_rows[r].source);
        if (!r && !stored_find(b->list, source)) return;
        if (!r) making_put_real(b->m, "predict.epsilon", d->epsilon);
        if (!r) making_put_int(b->m, "predict.layers", 3);
        if (last) put_layer(b, d->layers);
        if (last) builder_layer(b, "predict", "norm", name);
        if (last) put_norm(b, name, 0);
        built *t = builder_one(b, predictor_rows[r].name, source, d->width, columns * d->width);
        if (t && !columns) change_norm(d, t, 1);
    }
}

/* Put the layers in the metadata and all tensors in file order, and reject tensors that the configuration lacks. */
static int put_model(builder *b) {
    static const char frequencies[] = "rotary_emb.inv_freq";
    const decoder *d = b->d;
    const size_t count_at = b->m->n_entries;
    char name[24], full[NAME];
    making_put_int(b->m, "decoder.layers", 0);
    put_embedding(b);
    for (int64_t i = 0; i < d->layers && b->m->status == MOE_OK; i++) put_layer(b, i);
    builder_layer(b, "decoder", "norm", name);
    put_norm(b, name, 0);
    snprintf(full, sizeof full, "%s.norm.weight", name);
    builder_one(b, full, "model.norm.weight", d->width, 0);
    if (b->m->status == MOE_OK) change_norm(d, &b->tensors[b->n - 1], d->family->cohere ? d->logit_scale : 1);
    if (d->family->cohere) put_last_bias(b, name);
    if (!d->tied) builder_one(b, "output.weight", "lm_head.weight", d->vocabulary, d->width);
    if (b->m->status == MOE_OK) put_predictor(b);
    if (b->m->status) return 0;
    b->m->entries[count_at].integer = b->layers[1];
    return builder_all_taken(b, frequencies);
}

/* ---- Metadata ---- */

/* Add the token that the chat template puts after an answer to those that end an answer. */
static void add_end(making *m, decoder_search *s, const decoder_tokens *t) {
    const char *text = t->pieces.texts[PROMPT_ANSWER_END];
    if (!text) text = t->pieces.texts[PROMPT_END];
    if (!text || !t->found) return;
    while (*text && strchr(" \t\n\v\f\r", *text)) text++;
    const pack_added *end = pack_added_at(&t->parts, text);
    for (size_t i = 0; end && i < s->n_ends; i++)
        if (s->ends[i] == end->id) return;
    if (!end) return;
    s->ends[s->n_ends++] = end->id;
    making_note(m, "answers also end with token %" PRId64 ", '%.*s', which follows answers in the chat template",
                end->id, (int)end->content.length, end->content.data);
}

static void put_search(making *m, const decoder *d, decoder_search *s, const decoder_tokens *t) {
    const int64_t half = positions(d) / 2, limit = half < LIMIT ? half : LIMIT;
    const size_t published = s->n_ends;
    char key[48];
    if (s->max_new > limit)
        making_note(m,
                    "%s: max_new_tokens is %" PRId64 ", but answers have up to %" PRId64
                    " tokens (--max-len raises the limit)",
                    s->file, s->max_new, limit);
    making_put_int(m, "token.bos", d->bos);
    making_put_int(m, "token.eos", s->ends[0]);
    making_put_text(m, "decode.rules", "hf");
    making_put_int(m, "decode.beam", s->beam);
    making_put_real(m, "decode.length_penalty", s->length_penalty);
    making_put_real(m, "decode.length_constant", 0);
    making_put_int(m, "decode.early_stopping", s->early_stopping);
    making_put_int(m, "decode.max_new", s->max_new && s->max_new < limit ? s->max_new : limit);
    making_put_int(m, "limit.source", limit);
    making_put_int(m, "limit.target", limit);
    for (size_t i = 0; i < DECODER_SAMPLING; i++) {
        if (isnan(s->sample[i])) continue;
        const double value = s->sample[i] < 0 ? 0 : s->sample[i]; /* top_k -1 means no limit */
        snprintf(key, sizeof key, "sample.%s", sampling_names[i]);
        if (sampling_kinds[i] == whole) making_put_int(m, key, (int64_t)value);
        else making_put_real(m, key, value);
    }
    add_end(m, s, t);
    if (published > 1) making_put_ints(m, "token.ends", s->ends + 1, s->n_ends - 1);
    if (s->pad >= 0) making_put_int(m, "token.pad", s->pad);
    if (published == 1 && s->n_ends > 1) making_put_ints(m, "token.ends", s->ends + 1, s->n_ends - 1);
}

static void put_tokens(making *m, const decoder *d, const decoder_tokens *t) {
    making_put_text(m, "tokenizer.kind", t->found ? "byte-bpe" : "none");
    if (t->found) making_put_span(m, "tokenizer.model", MOE_META_BYTES, t->blob.data, t->blob.length);
    if (t->pieces.texts[PROMPT_PREFIX])
        prompts_put(m, &t->pieces, (prompt_model){ d->family->name, t->name }, t->named, t->n_named);
    if (t->begins) making_put_int(m, "source.bos", 1);
}

/* ---- Writing ---- */

/* Reject sizes that the engine does not support. */
static int check_sizes(making *m, const decoder *d, const decoder_search *s) {
    const int64_t sizes[] = { d->width,
                              d->heads,
                              d->head,
                              d->ffn,
                              d->experts,
                              d->hidden,
                              d->shared,
                              d->values * d->value,
                              d->value_keys * d->key };
    int64_t largest = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) largest = sizes[i] > largest ? sizes[i] : largest;
    if (largest > WIDEST)
        return making_refuse(m, d->file, "a width of %" PRId64 " is not supported; the limit is %d", largest, WIDEST);
    if (2 * d->layers + 1 > MOE_MAX_LAYERS)
        return making_refuse(m, d->file, "%" PRId64 " layers are not supported; the limit is %d", d->layers,
                             (MOE_MAX_LAYERS - 1) / 2);
    return s->n_ends <= DECODER_MAX_ENDS ||
           making_refuse(m, d->file, "%zu tokens end an answer; the limit is %d", s->n_ends, DECODER_MAX_ENDS);
}

int decoder_write(making *m, const decoder *d, decoder_search *search, decoder_tokens *tokens, stored_list *list,
                  moe_type type, moe_type experts, const char *quantised, uint64_t source) {
    builder b = { .m = m, .file = d->file, .d = d, .list = list, .type = type, .experts = experts, .gated = 1 };
    making_put_int(m, "vocab.size", d->vocabulary);
    making_put_int(m, "model.width", d->width);
    if (d->family->gemma) making_put_real(m, "embedding.scale", sqrt((double)d->width));
    if (d->turned != d->head) making_put_int(m, "rotary.size", d->turned);
    making_put_int(m, "rotary.positions", positions(d));
    making_put_int(m, "activation.block", BLOCK);
    put_tokens(m, d, tokens);
    put_search(m, d, search, tokens);
    if (positions(d) < d->context)
        making_note(m, "limiting positions to %" PRId64 " of the model's %" PRId64, positions(d), d->context);
    const int good = m->status == MOE_OK && check_sizes(m, d, search) && put_model(&b);
    if (good && *quantised && (type == MOE_TYPE_Q4 || (experts == MOE_TYPE_Q4 && any_sparse(d))))
        making_note(m,
                    "converting %s to Q4 quantises twice and loses precision; use --type q8b or q4m to preserve "
                    "precision",
                    quantised);
    const int written = good && builder_write(&b, source);
    builder_free(&b);
    return written;
}
