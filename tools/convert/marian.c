/* marian.c - see marian.h. marian.inc contains the names of files, options and tensors.
 *
 * A conversion is a sequence of steps, each of which returns 1, or 0 after an error was stored in the job.
 */
#define _POSIX_C_SOURCE 200809L

#include "tools/convert/marian.h"
#include "tools/convert/making.h"
#include "tools/convert/marian_bin.h"
#include "tools/convert/pieces.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { SOURCES = 512, TARGETS = 1024 }; /* maximum tokens of models with computed positions */
enum { MAX_POSITIONS = 1 << 16, MAX_VOCABULARY = INT32_MAX / 2, MAX_PARTS = 3, MULTIPLE = 8 };
static const uint64_t largest_model = (uint64_t)1 << 36;

/* ---- Settings ---- */

typedef struct settings {
#define CHOICE(field, ...) int field;
#define NUMBER(field, ...) int64_t field;
#define FLAG(field, ...) int field;
#define REAL(field, ...) double field;
#include "tools/convert/marian.inc"
    int64_t beam;
    int unknown; /* 1: <unk> may be generated */
    int before;  /* 1: norms precede the sub-layers */
    int raw;     /* 1: keys and values use inputs without norm */
    int top, first;
    int64_t aligns;   /* decoder layer, from 1, that aligns words */
    int64_t tied[64]; /* [decoder_layers] number of the layer in the file */
    moe_span version;
    size_t sources, targets, positions;
    int shared; /* 1: source and target share a vocabulary */
} settings;

enum { SELF_ATTENTION, SSRU, AVERAGE };
static const char *const decoders[] = { "self-attention", "rnn", "average-attention" };
static const char *const activations[] = { "swish", "relu", "gelu" };

/* ---- Job ---- */

/* Rows [rows] of a matrix or numbers of a vector; item NULL: zeros. */
typedef struct part {
    const bin_item *item;
    size_t rows;
    int as_shown; /* 1: the shape that the file states is [out, in] */
} part;

typedef struct tensor {
    char name[48];
    enum { FROM_PARTS, FROM_POSITIONS, FROM_OFFSETS, FROM_IDS } from;
    part parts[MAX_PARTS];
    size_t n_parts, rows, cols; /* cols 0: a vector */
    int coded;                  /* 1: all parts are intgemm8 or zeros */
    int f32;
} tensor;

typedef struct shortlist {
    packed_file file;
    uint64_t first, n_offsets, n_ids;
} shortlist;

typedef struct job {
    making *m;
    const convert_options *given;
    char *folder;
    packed_names names;
    const char *config, *list, *model, *vocabularies[2], *model_name; /* paths; NULL if absent */
    packed_file config_file, model_file, spm[2];
    yaml_map config_map, model_map;
    bin_file bin;
    settings s;
    pieces pieces[2]; /* of sources and targets; a shared vocabulary is only in the second */
    shortlist lists;
    tensor *tensors;
    size_t n_tensors, tensor_capacity;
    int layers[2];      /* number of sub-layers in encoder and decoder */
    float *frequencies; /* [width / 2] of positions */
} job;

static const char *const sides[] = { "encoder", "decoder" };

/* ---- Folders ---- */

typedef struct file_row {
    const char *names, *excluded;
} file_row;

enum {
#define FILES(what, names, excluded) FILE_##what,
#include "tools/convert/marian.inc"
};
static const file_row file_rows[] = {
#define FILES(what, names, excluded) { names, excluded },
#include "tools/convert/marian.inc"
};

/* Find the only file of a kind. Sets *path to NULL if the folder has none. */
static int find(job *j, int kind, const char **path) {
    const char *found = NULL;
    *path = NULL;
    for (size_t i = 0; i < j->names.n; i++) {
        char *name = j->names.data[i];
        const size_t length = strlen(name);
        const size_t tail = text_ends_with(name, length, ".gz") ? 3 : text_ends_with(name, length, ".zst") ? 4 : 0;
        const char kept = name[length - tail];
        name[length - tail] = 0;
        const int fits = packed_matches(file_rows[kind].names, name);
        name[length - tail] = kept;
        if (!fits || packed_matches(file_rows[kind].excluded, name)) continue;
        if (found)
            return making_refuse(j->m, j->folder, "contains %.60s and %.60s: keep one or specify the model file", found,
                                 name);
        found = name;
    }
    if (found) *path = making_join(j->m, j->folder, found);
    return j->m->status == MOE_OK;
}

/* Find a file that the settings name; it may be compressed. NULL without an error if it is missing. */
static const char *find_named(job *j, moe_span name) {
    static const char *const tails[] = { "", ".gz", ".zst" };
    char *text = making_keep(j->m, name.data, name.length), *path = NULL;
    if (!text || strlen(text) != name.length) return NULL;
    for (size_t i = 0; i < 3; i++) {
        char *whole = making_keep(j->m, NULL, name.length + 4);
        if (!whole) return NULL;
        snprintf(whole, name.length + 5, "%s%s", packed_base(text), tails[i]);
        path = making_join(j->m, j->folder, whole);
        if (path && packed_exists(path)) return path;
    }
    return NULL;
}

static int named(job *j, moe_span name, const char **path) {
    char word[64];
    *path = find_named(j, name);
    if (*path || j->m->status) return j->m->status == MOE_OK;
    return making_refuse(j->m, packed_base(j->config), "%s is missing: the decoder's settings require it",
                         yaml_short(name, word, sizeof word));
}

/* ---- decoder.yml ---- */

/* Return the number of texts of a key. */
static size_t texts(const yaml_map *map, const char *key, const moe_span **first) {
    const yaml_entry *e = yaml_find(map, key);
    *first = e ? map->texts + e->first : NULL;
    return e ? e->count : 0;
}

static int text_span_is(moe_span text, const char *other) { return text_is(text.data, text.length, other); }

/* Open and parse a file of settings. */
static int open_config(job *j) {
    const char *name;
    if (!find(j, FILE_decoder, &j->config) || (!j->config && !find(j, FILE_config, &j->config))) return 0;
    if (!j->config) return 1;
    name = packed_base(j->config);
    return making_failed(j->m,
                         packed_open(j->config, BIN_MAX_TEXT, "a text", j->m->out, &j->config_file, j->m->error)) &&
           making_failed(j->m, yaml_parse(&j->config_map, j->config_file.data ? (const char *)j->config_file.data : "",
                                          j->config_file.size, name, j->m->error));
}

static int find_shortlist(job *j) {
    const moe_span *name;
    char word[64];
    if (!j->config) return find(j, FILE_shortlist, &j->list);
    if (!texts(&j->config_map, "shortlist", &name)) return 1;
    j->list = find_named(j, name[0]);
    if (!j->list && j->m->status == MOE_OK)
        making_note(j->m, "%s: %s is missing: continuing without a shortlist", packed_base(j->config),
                    yaml_short(name[0], word, sizeof word));
    return j->m->status == MOE_OK;
}

/* Read the settings of searches. Without a file, they are Firefox's. */
static int read_search(job *j) {
    const yaml_map *map = &j->config_map;
    const moe_span *weights, *models;
    settings *s = &j->s;
    if (!j->config) {
        making_note(j->m, "no decoder.yml or config*.yml: using beam 1, normalize 1 and factor 2, as in Firefox");
        s->beam = 1;
        s->normalize = 1;
        s->factor = 2;
        return 1;
    }
    if (!making_failed(j->m, yaml_whole(map, "beam-size", "12", 1, MOE_MAX_BEAM, &s->beam, j->m->error))) return 0;
#define REAL(field, key, otherwise, least, most)                                                             \
    if (!making_failed(j->m, yaml_real(map, key, otherwise, least, most, &s->field, j->m->error))) return 0;
#include "tools/convert/marian.inc"
    const int penalised = s->word_penalty < 0 || s->word_penalty > 0;
    if (penalised && (s->normalize < 1 || s->normalize > 1))
        return making_refuse(j->m, map->where,
                             "word-penalty %g is supported only with normalize 1, not %g: set it to 0, and compare "
                             "translations",
                             s->word_penalty, s->normalize);
    if (penalised) /* (sum - penalty * length) / length: the same order of hypotheses */
        making_note(j->m, "word-penalty %g is left out: with normalize 1 it only lowers all scores by %g",
                    s->word_penalty, s->word_penalty);
    const size_t n = texts(map, "weights", &weights);
    if (n > 1 || (n && !text_span_is(*weights, "1") && !text_span_is(*weights, "1.0")) ||
        texts(map, "models", &models) > 1)
        return making_refuse(j->m, map->where, "ensembles are not supported");
    if (!making_failed(j->m, yaml_choice(map, "allow-unk", "false true", &s->unknown, j->m->error))) return 0;
#define UNUSED(keys) yaml_ignore(map, keys);
#include "tools/convert/marian.inc"
    return making_failed(j->m, yaml_reject_rest(map, j->m->error));
}

/* Choose the model and its vocabularies. */
static int find_files(job *j) {
    const moe_span *names;
    size_t n;
    if (!j->model && texts(&j->config_map, "models", &names)) {
        if (!named(j, names[0], &j->model)) return 0;
    } else if (!j->model && !find(j, FILE_model, &j->model)) {
        return 0;
    }
    if (!j->model)
        return making_refuse(j->m, j->folder, "contains no Marian model (.npz or .bin): copy the model's whole folder");
    j->model_name = packed_base(j->model);
    if ((n = texts(&j->config_map, "vocabs", &names)) > 0) {
        for (size_t i = 0; i < n && i < 2; i++)
            if (!named(j, names[i], &j->vocabularies[i])) return 0;
    } else {
        if (!find(j, FILE_vocabulary, &j->vocabularies[0])) return 0;
        j->vocabularies[1] = j->vocabularies[0];
        for (int i = 0; i < 2 && !j->vocabularies[1]; i++)
            if (!find(j, i ? FILE_target_vocabulary : FILE_source_vocabulary, &j->vocabularies[i])) return 0;
        n = (size_t)(j->vocabularies[0] != NULL) + (j->vocabularies[1] != NULL);
    }
    if (n != 2) return making_refuse(j->m, j->folder, "found %zu vocabularies, expected two", n);
    return 1;
}

/* ---- special:model.yml ---- */

/* Return the value of a number of up to three digits from 1 to `most`, or 0. */
static int64_t layer_number(moe_span text, int64_t most) {
    int64_t value = 0;
    for (size_t i = 0; i < text.length; i++) {
        if (text.length > 3 || text.data[i] < '0' || text.data[i] > '9') return 0;
        value = value * 10 + (text.data[i] - '0');
    }
    return value <= most ? value : 0;
}

/* Read an option that lists operations: n norm, a add; d, dropout, is ignored. */
static int read_operations(job *j, const char *key, const char *otherwise, char out[3]) {
    moe_span text;
    size_t n = 0;
    if (!making_failed(j->m, yaml_text(&j->model_map, key, otherwise, &text, j->m->error))) return 0;
    for (size_t i = 0; i < text.length; i++)
        if (text.data[i] != 'd') out[n < 2 ? n : 0] = n < 2 ? text.data[i] : '?', n += n < 2;
    out[n] = 0;
    return 1;
}

static int read_norms(job *j) {
    char pre[3], post[3], top[3], first[3];
    if (!read_operations(j, "transformer-preprocess", "", pre) ||
        !read_operations(j, "transformer-postprocess", "dan", post) ||
        !read_operations(j, "transformer-postprocess-top", "", top) ||
        !read_operations(j, "transformer-postprocess-emb", "d", first))
        return 0;
    j->s.before = strcmp(pre, "n") == 0 && strcmp(post, "a") == 0;
    j->s.top = strcmp(top, "n") == 0;
    j->s.first = strcmp(first, "n") == 0;
    if ((j->s.before || (!*pre && strcmp(post, "an") == 0)) && (j->s.top || !*top) && (j->s.first || !*first)) return 1;
    return making_refuse(
        j->m, j->model_map.where,
        "unsupported transformer-preprocess, -postprocess, -postprocess-top or -postprocess-emb: norms must "
        "precede or follow every layer");
}

/* Read a version, vMAJOR.MINOR.PATCH and more, with numbers of at most four digits. */
static int parse_version(const char *text, long numbers[3]) {
    for (int i = 0; i < 3; i++) {
        const size_t digits = *text == (i ? '.' : 'v') ? strspn(text + 1, "0123456789") : 0;
        if (digits < 1 || digits > 4) return 0;
        numbers[i] = strtol(text + 1, NULL, 10);
        text += 1 + digits;
    }
    return 1;
}

/* Read the version, which determines the inputs of keys and values. */
static int read_version(job *j) {
    settings *s = &j->s;
    long numbers[3] = { 0 };
    char copy[48];
    moe_span v;
    if (!making_failed(j->m, yaml_text(&j->model_map, "version", "", &v, j->m->error))) return 0;
    snprintf(copy, sizeof copy, "%.*s", (int)(v.length < sizeof copy ? v.length : sizeof copy - 1), v.data);
    const int valid = parse_version(copy, numbers);
    if (s->before && !valid)
        return making_refuse(
            j->m, j->model_map.where,
            "invalid version '%.40s': transformer-preprocess n requires the version, because keys have been "
            "normalised since v1.10.28",
            copy);
    s->raw = s->before &&
             (numbers[0] < 1 || (numbers[0] == 1 && (numbers[1] < 10 || (numbers[1] == 10 && numbers[2] < 28))));
    while (v.length && strchr(" \t\n\v\f\r\x1c\x1d\x1e\x1f", *v.data) && *v.data) v.data++, v.length--;
    while (v.length && strchr(" \t\n\v\f\r\x1c\x1d\x1e\x1f", v.data[v.length - 1]) && v.data[v.length - 1]) v.length--;
    s->version = v;
    return 1;
}

static int read_layers(job *j) {
    const yaml_map *map = &j->model_map;
    settings *s = &j->s;
    const moe_span *numbers;
    moe_span aligns;
    if (!making_failed(j->m, yaml_text(map, "transformer-guided-alignment-layer", "last", &aligns, j->m->error)))
        return 0;
    s->aligns = text_span_is(aligns, "last") ? s->decoder_layers : layer_number(aligns, s->decoder_layers);
    if (!s->aligns) return making_failed(j->m, yaml_refuse(map, "transformer-guided-alignment-layer", j->m->error));
    const size_t n = texts(map, "transformer-tied-layers", &numbers);
    for (size_t i = 0; i < (size_t)s->decoder_layers; i++) {
        s->tied[i] = n ? i < n ? layer_number(numbers[i], s->decoder_layers) : 0 : (int64_t)i + 1;
        if (!s->tied[i] || n > (size_t)s->decoder_layers)
            return making_failed(j->m, yaml_refuse(map, "transformer-tied-layers", j->m->error));
    }
    return 1;
}

static int read_fixed(job *j, const char *key, const char *value) {
    const yaml_entry *e = yaml_find(&j->model_map, key);
    if (!e || (e->list && !e->count) ||
        (!e->list && text_span_is(j->model_map.texts[e->first], value) && *value != '['))
        return 1;
    return making_failed(j->m, yaml_refuse(&j->model_map, key, j->m->error));
}

/* Return 1 if a row of marian.inc is for this decoder. */
static int is_for(const settings *s, const char *when) { return !*when || strcmp(when, decoders[s->decoder]) == 0; }

static int read_settings(job *j) {
    const yaml_map *map = &j->model_map;
    settings *s = &j->s;
    moe_span cell;
#define FIXED(key, value)                     \
    if (!read_fixed(j, key, value)) return 0;
#define CHOICE(field, key, values, when)                                                                          \
    if (is_for(s, when) && !making_failed(j->m, yaml_choice(map, key, values, &s->field, j->m->error))) return 0;
#define NUMBER(field, key, otherwise, least, most, when)                                                             \
    if (is_for(s, when) && !making_failed(j->m, yaml_whole(map, key, *(otherwise) ? (otherwise) : NULL, least, most, \
                                                           &s->field, j->m->error)))                                 \
        return 0;
#define FLAG(field, key)                                                                             \
    if (!making_failed(j->m, yaml_choice(map, key, "false true", &s->field, j->m->error))) return 0;
#include "tools/convert/marian.inc"
    if (s->width % s->heads || s->width % 2)
        return making_failed(j->m, yaml_refuse(map, "transformer-heads", j->m->error));
    if (s->decoder_products == 1)
        return making_failed(j->m, yaml_refuse(map, "transformer-decoder-ffn-depth", j->m->error));
    if (!s->decoder_hidden) s->decoder_hidden = s->encoder_hidden;
    if (s->decoder == SSRU) {
        if (!making_failed(j->m, yaml_text(map, "dec-cell", NULL, &cell, j->m->error))) return 0;
        if (!text_span_is(cell, "ssru")) return making_failed(j->m, yaml_refuse(map, "dec-cell", j->m->error));
    }
    if (!read_norms(j) || !read_version(j) || !read_layers(j)) return 0;
    s->shared = s->all_tied || s->source_tied;
#define IGNORED(keys) yaml_ignore(map, keys);
#include "tools/convert/marian.inc"
    return making_failed(j->m, yaml_reject_rest(map, j->m->error));
}

static int open_model(job *j) {
    const char *name = j->model_name;
    if (packed_matches("*.npz *.npz.gz *.npz.zst", name)) {
        text_fail(j->m->error, MOE_ERROR_UNSUPPORTED, name, "%.80s: .npz archives have no reader in C", name);
        return making_failed(j->m, MOE_ERROR_UNSUPPORTED);
    }
    if (!making_failed(j->m, packed_open(j->model, largest_model, "a model", j->m->out, &j->model_file, j->m->error)) ||
        !making_failed(j->m, bin_read(&j->model_file, name, &j->bin, j->m->error)))
        return 0;
    if (!j->bin.settings.data)
        return making_refuse(j->m, name, "special:model.yml, the model's description, is missing");
    const size_t length = strlen(name) + strlen(": special:model.yml");
    char *where = making_keep(j->m, NULL, length);
    if (!where) return 0;
    snprintf(where, length + 1, "%s: special:model.yml", name);
    return making_failed(j->m,
                         yaml_parse(&j->model_map, j->bin.settings.data, j->bin.settings.length, where, j->m->error)) &&
           read_settings(j);
}

/* ---- Metadata ---- */

static int put_licence(job *j, moe_span *licence) {
    static const char none[] = "Unknown: the converted files state no licence.";
    const char *path;
    packed_file file = { 0 };
    *licence = (moe_span){ none, strlen(none) };
    if (j->given->licence && *j->given->licence)
        return *licence = (moe_span){ j->given->licence, strlen(j->given->licence) }, 1;
    if (!find(j, FILE_licence, &path)) return 0;
    if (!path) {
        making_note(j->m, "unknown licence: look up the licence of the model");
        return 1;
    }
    if (!making_failed(j->m, packed_open(path, BIN_MAX_TEXT, "a text", j->m->out, &file, j->m->error))) return 0;
    const char *data = file.data ? (const char *)file.data : "";
    char *copy = making_keep(j->m, NULL, file.size);
    size_t n = 0;
    for (size_t i = 0; copy && i < file.size; i++)
        if (!(data[i] == '\r' && i + 1 < file.size && data[i + 1] == '\n')) copy[n++] = data[i];
    if (copy && text_utf8_valid(copy, n) < n) making_refuse(j->m, packed_base(path), "not UTF-8");
    packed_close(&file);
    *licence = (moe_span){ copy, n };
    return j->m->status == MOE_OK;
}

/* Put the metadata before the layers. */
static int put_general(job *j, int from_folder) {
    const convert_options *given = j->given;
    const settings *s = &j->s;
    const int64_t start = (int64_t)s->targets;
    char digest[65];
    moe_span licence;
    making_put_text(j->m, "general.architecture", "transformer");
    making_put_text(j->m, "general.name",
                    given->name ? given->name : making_default_name(j->m, given->path, from_folder));
    making_put_text(j->m, "general.description", given->description);
    if (!put_licence(j, &licence)) return 0;
    making_put_span(j->m, "general.licence", MOE_META_TEXT, licence.data, licence.length);
    making_put_text(j->m, "general.attribution", given->attribution);
    if (j->m->status || !making_failed(j->m, packed_digest(j->model, digest, j->m->error))) return 0;
    making_put_text(j->m, "origin.file", j->model_name);
    making_put_span(j->m, "origin.sha256", MOE_META_TEXT, making_keep(j->m, digest, 64), 64);
    making_put_span(j->m, "origin.version", MOE_META_TEXT, s->version.data, s->version.length);
    making_put_int(j->m, "vocab.size", start + 1);
    making_put_int(j->m, "model.width", s->width);
    making_put_real(j->m, "embedding.scale", s->trained ? 1.0 : sqrt((double)s->width));
    making_put_int(j->m, "token.bos", start);
    making_put_ints(j->m, "token.never", &start, 1);
    making_put_int(j->m, "source.bos", 0);
    making_put_int(j->m, "source.eos", 1);
    making_put_int(j->m, "limit.source", s->positions < SOURCES ? (int64_t)s->positions : SOURCES);
    making_put_int(j->m, "limit.target", (int64_t)s->positions);
    if (!s->unknown) making_put_ints(j->m, "token.suppressed", &(int64_t){ j->pieces[1].unk }, 1);
    return j->m->status == MOE_OK;
}

static void put_search(job *j) {
    making_put_text(j->m, "decode.rules", "marian");
    making_put_real(j->m, "decode.length_constant", 0);
    making_put_int(j->m, "decode.max_len_offset", 0);
    making_put_int(j->m, "decode.beam", j->s.beam);
    making_put_real(j->m, "decode.length_penalty", j->s.normalize);
    making_put_real(j->m, "decode.max_len_factor", j->s.factor);
}

/* ---- Tensors ---- */

enum {
#define TENSOR(what, name) TENSOR_##what,
#include "tools/convert/marian.inc"
};
static const char *const tensor_names[] = {
#define TENSOR(what, name) name,
#include "tools/convert/marian.inc"
};

/* Add a tensor to fill in; NULL after an error. */
static tensor *add_tensor(job *j, const char *name, size_t rows, size_t cols) {
    tensor t = { .rows = rows, .cols = cols };
    snprintf(t.name, sizeof t.name, "%s", name);
    if (j->m->status ||
        !making_failed(j->m, text_add(&j->tensors, &j->n_tensors, &j->tensor_capacity, &t, 1, sizeof t, j->m->error)))
        return NULL;
    return &j->tensors[j->n_tensors - 1];
}

/* Return 1 if Marian may store the tensor as codes: names that end in _W and at most one character, or in Wemb. */
static int may_be_coded(const char *name) {
    const size_t n = strlen(name);
    if (text_ends_with(name, n, "Wemb")) return 1;
    return (text_ends_with(name, n, "_W") || (n > 2 && text_begins_with(name + n - 3, 3, "_W"))) &&
           !text_ends_with(name, n, "_Wt");
}

/* Append the item `name` to a tensor, with `rows` of its rows. */
static void take(job *j, tensor *t, const char *name, size_t rows, int as_shown) {
    bin_item *item = bin_find(&j->bin, name);
    if (j->m->status || !t) return;
    const size_t shape[2] = { !t->cols   ? 1
                              : as_shown ? rows
                                         : t->cols,
                              t->cols && !as_shown ? rows
                              : t->cols            ? t->cols
                                                   : rows };
    if (!item) {
        making_refuse(j->m, j->model_name,
                      "tensor %.80s is missing: the settings require shape [%zu, %zu]; download it again", name,
                      shape[0], shape[1]);
    } else if (item->n_dims != 2 || item->dims[0] != shape[0] || item->dims[1] != shape[1]) {
        making_refuse(j->m, j->model_name, "tensor %.80s has a shape other than [%zu, %zu], which the settings require",
                      name, shape[0], shape[1]);
    } else if (item->kind != BIN_FLOAT && (!t->cols || !may_be_coded(name))) {
        making_refuse(j->m, j->model_name, "number format of tensor %.80s is not supported", name);
    } else if (making_failed(j->m, bin_check(item, j->model_name, j->m->error))) {
        item->taken = 1;
        t->coded = item->kind == BIN_CODES8 && (!t->n_parts || t->coded);
        t->parts[t->n_parts++] = (part){ item, rows, as_shown };
    }
}

/* Append a row, or a number, of zeros. */
static void take_zeros(job *j, tensor *t) {
    if (j->m->status == MOE_OK && t) t->parts[t->n_parts++] = (part){ NULL, 1, 1 };
}

typedef struct sublayer_row {
    const char *kind, *block, *after, *before;
} sublayer_row;
typedef struct linear_row {
    const char *kind, *part, *sources;
    int bias, rows_hidden, columns_hidden; /* 1: hidden units, 0: width */
} linear_row;

enum { width, hidden };
static const sublayer_row sublayer_rows[] = {
#define SUBLAYER(kind, block, after, before) { kind, block, after, before },
#include "tools/convert/marian.inc"
};
static const linear_row linear_rows[] = {
#define LINEAR(kind, part, sources, bias, rows, columns) { kind, part, sources, bias, rows, columns },
#include "tools/convert/marian.inc"
};

/* Add PART.weight and PART.bias of a sub-layer, which stack the matrices and biases with these suffixes. */
static void put_linear(job *j, const char *name, const char *prefix, const char *part_name, const char *suffixes,
                       int bias, size_t rows, size_t cols) {
    char whole[48], item[96];
    size_t n = 1;
    for (const char *p = suffixes; *p; p++) n += *p == ' ';
    for (int k = 0; k <= bias; k++) {
        snprintf(whole, sizeof whole, "%s.%s.%s", name, part_name, k ? "bias" : "weight");
        tensor *t = add_tensor(j, whole, n * rows, k ? 0 : cols);
        for (const char *p = suffixes; *p; p += strspn(p, " ")) {
            const size_t length = strcspn(p, " ");
            snprintf(item, sizeof item, "%s_%c%.*s", prefix, k ? 'b' : 'W', *p == '-' ? 0 : (int)length, p);
            take(j, t, item, rows, 0);
            p += length;
        }
    }
}

static void put_norm(job *j, const char *name, const char *prefix, int before) {
    static const char *const parts[2][2] = { { "weight", "scale" }, { "bias", "bias" } };
    char whole[48], item[96];
    for (size_t i = 0; i < 2; i++) {
        snprintf(whole, sizeof whole, "%s.norm.%s", name, parts[i][0]);
        snprintf(item, sizeof item, "%s_ln_%s%s", prefix, parts[i][1], before ? "_pre" : "");
        take(j, add_tensor(j, whole, (size_t)j->s.width, 0), item, (size_t)j->s.width, 0);
    }
}

/* Put a setting of a sub-layer. */
static void put_key(job *j, const char *layer, const char *key, int64_t value, const char *text) {
    char whole[64];
    snprintf(whole, sizeof whole, "%s.%s", layer, key);
    if (text) making_put_text(j->m, whole, text);
    else making_put_int(j->m, whole, value);
}
static void put_epsilon(job *j, const char *layer) {
    char whole[64];
    snprintf(whole, sizeof whole, "%s.epsilon", layer);
    making_put_real(j->m, whole, 1e-6);
}

/* Begin a sub-layer: write its name, such as decoder.3, to name[24]. */
static void begin_layer(job *j, int side, const char *kind, char *name) {
    snprintf(name, 24, "%s.%d", sides[side], j->layers[side]++);
    put_key(j, name, "kind", 0, kind);
}

static void put_norm_layer(job *j, int side, const char *suffix, int before) {
    char name[24], prefix[32];
    begin_layer(j, side, "norm", name);
    put_epsilon(j, name);
    snprintf(prefix, sizeof prefix, "%s%s", sides[side], suffix);
    put_norm(j, name, prefix, before);
}

/* Add the stacked products of average attention. */
static void put_average(job *j, const char *name, const char *prefix) {
    const settings *s = &j->s;
    size_t cols = (size_t)s->width;
    char part_name[16], suffix[16];
    for (int i = 1; i < s->average_depth; i++) {
        snprintf(part_name, sizeof part_name, "up.%d", i - 1);
        snprintf(suffix, sizeof suffix, "%d", i);
        put_linear(j, name, prefix, part_name, suffix, 1, (size_t)s->average_hidden, cols);
        cols = (size_t)s->average_hidden;
    }
    snprintf(suffix, sizeof suffix, "%d", (int)s->average_depth);
    if (cols != (size_t)s->width) put_linear(j, name, prefix, "down", suffix, 1, (size_t)s->width, cols);
}

/* Put the settings of a sub-layer that precede its norm. */
static void put_layer_keys(job *j, const char *name, int side, const char *kind) {
    const settings *s = &j->s;
    if (strcmp(kind, "ffn") == 0) {
        put_key(j, name, "hidden", side ? s->decoder_hidden : s->encoder_hidden, NULL);
        put_key(j, name, "activation", 0, activations[s->activation]);
    } else if (strcmp(kind, "average") == 0) {
        put_key(j, name, "hidden", s->average_hidden, NULL);
        put_key(j, name, "depth", s->average_depth, NULL);
        put_key(j, name, "activation", 0, activations[s->average_activation]);
        put_key(j, name, "gated", !s->average_plain, NULL);
    } else if (strcmp(kind, "ssru") != 0) {
        put_key(j, name, "heads", s->heads, NULL);
        if (strcmp(kind, "raw") == 0) put_key(j, name, "raw", 1, NULL);
    }
}

/* Add a sub-layer of layer `number` of a side. */
static void put_sublayer(job *j, int side, int64_t number, const char *kind) {
    const settings *s = &j->s;
    const size_t units[2] = { (size_t)s->width, (size_t)(side ? s->decoder_hidden : s->encoder_hidden) };
    const sublayer_row *row = sublayer_rows;
    char name[24], prefix[48], norm[56];
    while (strcmp(row->kind, kind) != 0) row++;
    begin_layer(j, side, strcmp(kind, "raw") == 0 ? "attention" : kind, name);
    put_layer_keys(j, name, side, kind);
    put_key(j, name, "norm", 0, s->before ? "before" : "after");
    put_epsilon(j, name);
    put_key(j, name, "residual", 1, NULL);
    snprintf(prefix, sizeof prefix, "%s_l%d_%s", sides[side], (int)number, row->block);
    snprintf(norm, sizeof norm, "%s%s", prefix, s->before ? row->before : row->after);
    put_norm(j, name, norm, s->before);
    if (strcmp(kind, "average") == 0) put_average(j, name, prefix);
    for (size_t i = 0; i < sizeof linear_rows / sizeof *linear_rows; i++) {
        const linear_row *l = &linear_rows[i];
        if (strcmp(l->kind, kind) != 0 || (strcmp(kind, "average") == 0 && s->average_plain)) continue;
        put_linear(j, name, prefix, l->part, l->sources, l->bias, units[l->rows_hidden], units[l->columns_hidden]);
    }
}

static void put_side(job *j, int side) {
    static const char *const kinds[] = { "attention", "ssru", "average" };
    const settings *s = &j->s;
    const int64_t n = side ? s->decoder_layers : s->encoder_layers;
    const char *own = side ? kinds[s->decoder] : kinds[0];
    const size_t count_at = j->m->n_entries;
    char key[32];
    snprintf(key, sizeof key, "%s.layers", sides[side]);
    making_put_int(j->m, key, 0);
    if (s->first) put_norm_layer(j, side, "_emb", 1);
    for (int64_t i = 0; i < n && j->m->status == MOE_OK; i++) {
        const int64_t number = side ? s->tied[i] : i + 1;
        put_sublayer(j, side, number, s->raw && own == kinds[0] ? "raw" : own);
        if (side) put_sublayer(j, side, number, "cross");
        if (side && i + 1 == s->aligns) { /* Marian aligns words by head 0 of this layer */
            making_put_int(j->m, "align.layer", j->layers[1] - 1);
            making_put_int(j->m, "align.heads", 1);
        }
        put_sublayer(j, side, number, "ffn");
    }
    if (s->top) put_norm_layer(j, side, "_top", 0);
    if (j->m->status == MOE_OK) j->m->entries[count_at].integer = j->layers[side];
}

/* Set the sizes of the vocabularies and of the table of positions. */
static int read_sizes(job *j) {
    settings *s = &j->s;
    size_t *const sizes[] = { &s->sources, &s->targets };
    for (int i = 0; i < 2; i++) {
        const char *name = tensor_names[s->shared ? TENSOR_shared : i ? TENSOR_target : TENSOR_source];
        const bin_item *item = bin_find(&j->bin, name);
        if (!item || item->n_dims != 2 || item->dims[0] < 4 || item->dims[0] >= MAX_VOCABULARY)
            return making_refuse(j->m, j->model_name, "tensor %s is missing or not an embedding matrix", name);
        *sizes[i] = item->dims[0];
    }
    const bin_item *item = bin_find(&j->bin, tensor_names[TENSOR_positions]);
    s->positions = !s->trained ? TARGETS : item && item->n_dims ? item->dims[0] : 0;
    if (s->positions < 2 || s->positions > MAX_POSITIONS)
        return making_refuse(j->m, j->model_name, "tensor %s is missing or not a matrix of positions",
                             tensor_names[TENSOR_positions]);
    return 1;
}

/* The start token follows the target tokens; its rows are zeros. */
static void put_embeddings(job *j) {
    const settings *s = &j->s;
    const size_t d = (size_t)s->width;
    if (!s->shared)
        take(j, add_tensor(j, "source.embedding.weight", s->sources, d), tensor_names[TENSOR_source], s->sources, 1);
    tensor *t = add_tensor(j, s->shared ? "embedding.weight" : "target.embedding.weight", s->targets + 1, d);
    take(j, t, tensor_names[s->shared ? TENSOR_shared : TENSOR_target], s->targets, 1);
    take_zeros(j, t);
    if (!(t = add_tensor(j, "positions.weight", s->positions, d))) return;
    t->f32 = 1;
    if (s->trained) take(j, t, tensor_names[TENSOR_positions], s->positions, 1);
    else t->from = FROM_POSITIONS;
}

static void put_output(job *j) {
    const settings *s = &j->s;
    char turned[64];
    tensor *t;
    snprintf(turned, sizeof turned, "%st", tensor_names[TENSOR_output]);
    if (!s->all_tied && !s->output_tied) {
        const int there = bin_find(&j->bin, turned) != NULL;
        t = add_tensor(j, "output.weight", s->targets + 1, (size_t)s->width);
        take(j, t, there ? turned : tensor_names[TENSOR_output], s->targets, there);
        take_zeros(j, t);
    }
    if (s->no_bias) return;
    t = add_tensor(j, "output.bias", s->targets + 1, 0);
    take(j, t, tensor_names[TENSOR_output_bias], s->targets, 0);
    take_zeros(j, t);
}

/* Put the layers in the metadata and all tensors in file order, and reject tensors that the settings do not describe.
 */
static int put_model(job *j) {
    put_embeddings(j);
    for (int side = 0; side < 2; side++) put_side(j, side);
    put_output(j);
    for (size_t i = 0; i < j->bin.n && j->m->status == MOE_OK; i++)
        if (!j->bin.items[i].taken)
            making_refuse(j->m, j->model_name, "unexpected tensor %.80s: not described by the settings",
                          j->bin.items[i].name);
    return j->m->status == MOE_OK;
}

/* ---- Vocabularies ---- */

static int read_vocabularies(job *j) {
    const settings *s = &j->s;
    const char *const *paths = j->vocabularies;
    const size_t sizes[2] = { s->sources, s->targets };
    if (s->shared && strcmp(paths[0], paths[1]) != 0)
        return making_refuse(j->m, packed_base(paths[1]), "source and target share an embedding, but not a vocabulary");
    if (pieces_is_spm(paths[0]) != pieces_is_spm(paths[1]))
        return making_refuse(j->m, packed_base(paths[1]), "one vocabulary is a SentencePiece model, the other is not");
    for (int i = s->shared; i < 2; i++)
        if (!making_failed(j->m, pieces_read(paths[i], packed_base(paths[i]), sizes[i], j->m->out, &j->pieces[i],
                                             j->m->error)))
            return 0;
    return 1;
}

static const pieces *source_pieces(const job *j) { return &j->pieces[j->s.shared]; }

/* Find the SentencePiece models of source and target: the vocabularies, or the files next to vocabularies in YAML. */
static int find_models(job *j, const packed_file *models[2]) {
    const char *paths[2];
    models[0] = &source_pieces(j)->file;
    models[1] = &j->pieces[1].file;
    if (models[1]->data && !j->given->ids_only) return 1;
    models[0] = models[1] = NULL;
    if (j->given->ids_only) return 1;
    if (!find(j, FILE_source_pieces, &paths[0]) || !find(j, FILE_target_pieces, &paths[1])) return 0;
    if (!paths[0] || !paths[1]) {
        const char *unread = paths[0] ? "source.spm" : paths[1] ? "target.spm" : NULL;
        const char *missing = paths[0] ? "target.spm is" : paths[1] ? "source.spm is" : "source.spm and target.spm are";
        for (size_t i = 0; i < j->names.n && !unread; i++)
            if (text_ends_with(j->names.data[i], strlen(j->names.data[i]), ".bpe")) unread = j->names.data[i];
        return making_refuse(j->m, j->folder,
                             "no tokeniser: %s missing%s%.80s. To convert a model that accepts token ids only, use "
                             "tools/convert/convert.py --ids-only",
                             missing, unread ? "; found only " : "", unread ? unread : "");
    }
    for (int i = 0; i < 2; i++) {
        if (!making_failed(j->m, pieces_open_spm(paths[i], j->m->out, &j->spm[i], j->m->error))) return 0;
        models[i] = &j->spm[i];
    }
    return 1;
}

/* Return the code in a piece such as >>fra<<, or an empty span. */
static moe_span code_of(moe_span piece) {
    if (piece.length < 5 || memcmp(piece.data, ">>", 2) != 0 || memcmp(piece.data + piece.length - 2, "<<", 2) != 0)
        return (moe_span){ NULL, 0 };
    const moe_span code = { piece.data + 2, piece.length - 4 };
    for (size_t i = 0; i < code.length; i++)
        if (code.data[i] == '<' || code.data[i] == '>') return (moe_span){ NULL, 0 };
    return code;
}

/* Put the target languages of a model with several. Returns their number. */
static size_t put_codes(job *j) {
    const pieces *p = source_pieces(j);
    size_t n = 0;
    for (size_t i = 0; i < p->n; i++) n += code_of(p->names[i]).length > 0;
    moe_span *codes = n ? making_keep(j->m, NULL, n * sizeof *codes) : NULL;
    int64_t *ids = n ? making_keep(j->m, NULL, n * sizeof *ids) : NULL;
    if (!codes || !ids) return 0;
    n = 0;
    for (size_t i = 0; i < p->n; i++) {
        const moe_span code = code_of(p->names[i]);
        if (code.length) codes[n] = code, ids[n++] = (int64_t)i;
    }
    making_put_texts(j->m, "languages.codes", codes, n, 0);
    making_put_ints(j->m, "languages.tags", ids, n);
    return n;
}

/* Return the pair of languages in Firefox's names, such as vocab.enpt.spm or lex.50.50.enpt.s2t.bin; NULL if none. */
static const char *pair_of(const char *name) {
    static const char *const begins[] = { "vocab.", "srcvocab.", "trgvocab." };
    const size_t length = strlen(name);
    size_t from = 0, to = 0;
    for (size_t i = 0; i < 3; i++)
        if (text_begins_with(name, length, begins[i])) from = to = strlen(begins[i]);
    if (text_begins_with(name, length, "lex.")) from = 5, to = length; /* the last pair after `lex.` */
    for (size_t at = to < length ? to : length; from && at >= from; at--) {
        size_t n = 0;
        while (n < 4 && at + n < length && name[at + n] >= 'a' && name[at + n] <= 'z') n++;
        if (n == 4 && name[at + 4] == '.' && name[at - 1] == '.') return name + at;
    }
    return NULL;
}

/* Put the languages that the file names state; they are needed for pivot translation. */
static void put_pair(job *j) {
    const char *found = NULL;
    for (size_t i = 0; i < j->names.n; i++) {
        const char *pair = pair_of(j->names.data[i]);
        if (pair && found && memcmp(pair, found, 4) != 0) return;
        if (pair) found = pair;
    }
    if (!found) return;
    making_put_texts(j->m, "languages.sources", &(moe_span){ found, 2 }, 1, 0);
    making_put_texts(j->m, "languages.targets", &(moe_span){ found + 2, 2 }, 1, 0);
}

static int put_tokens(job *j) {
    const settings *s = &j->s;
    const pieces *source = source_pieces(j), *target = &j->pieces[1];
    const int plain = s->shared && target->file.data; /* the ids are those of the SentencePiece model */
    const packed_file *models[2];
    if (!find_models(j, models)) return 0;
    making_put_int(j->m, "token.eos", target->eos);
    making_put_int(j->m, "token.unk", target->unk);
    const size_t tag_at = j->m->n_entries;
    making_put_int(j->m, "source.tag", 0);
    making_put_text(j->m, "tokenizer.kind", models[0] ? "sentencepiece" : "none");
    if (models[0]) making_put_span(j->m, "tokenizer.model", MOE_META_BYTES, models[0]->data, models[0]->size);
    if (models[0] &&
        (models[0]->size != models[1]->size || memcmp(models[0]->data, models[1]->data, models[0]->size) != 0))
        making_put_span(j->m, "tokenizer.target_model", MOE_META_BYTES, models[1]->data, models[1]->size);
    for (int i = 0; i < 2 && !plain; i++) {
        const size_t n = i ? s->sources : s->targets + 1;
        if (i && s->shared) break;
        if (n > MOE_MAX_TEXTS)
            return making_refuse(j->m, packed_base(j->vocabularies[!i]), "%zu tokens; the limit of a model file is %d",
                                 n, MOE_MAX_TEXTS);
        if (i) {
            making_put_int(j->m, "source.vocab.size", (int64_t)s->sources);
            making_put_int(j->m, "source.token.eos", source->eos);
            making_put_int(j->m, "source.token.unk", source->unk);
        }
        making_put_texts(j->m, i ? "source.pieces" : "vocabulary.pieces", i ? source->names : target->names,
                         i ? s->sources : s->targets, i ? 0 : 1);
    }
    if (put_codes(j) && j->m->status == MOE_OK) j->m->entries[tag_at].integer = 1;
    else put_pair(j);
    return j->m->status == MOE_OK;
}

/* ---- Shortlists: shortlist.py describes the format ---- */

enum { LIST_HEADER = 48, LIST_LIMIT = 1 << 24, LARGEST_LIST = 1 << 28 };
static const uint64_t list_magic = 0xf11a48d5013417f5u;

static uint64_t word_at(const uint8_t *p, size_t bytes) {
    uint64_t v = 0;
    for (size_t i = bytes; i-- > 0;) v = v << 8 | p[i];
    return v;
}

/* Return the offset of the list of a token. Files may lack a list for the start token. */
static uint64_t list_begin(const shortlist *l, size_t i) {
    return i < l->n_offsets ? word_at(l->file.data + LIST_HEADER + 8 * i, 8) : l->n_ids;
}
static uint64_t list_id(const shortlist *l, size_t i) {
    return word_at(l->file.data + LIST_HEADER + 8 * l->n_offsets + 4 * i, 4);
}

static int check_list(job *j, const char *name, size_t tokens) {
    const shortlist *l = &j->lists;
    const size_t last = j->s.targets;
    if (!l->n_ids || l->n_ids >= LIST_LIMIT || l->first > last + 1)
        return making_refuse(j->m, name, "the shortlist has %llu ids or %llu first tokens, which do not fit the model",
                             (unsigned long long)l->n_ids, (unsigned long long)l->first);
    if (list_begin(l, 0) != 0 || list_begin(l, tokens) != l->n_ids)
        return making_refuse(j->m, name, "the shortlist's offsets do not ascend from 0 to %llu",
                             (unsigned long long)l->n_ids);
    for (size_t i = 0; i < tokens; i++) {
        const uint64_t begin = list_begin(l, i), end = list_begin(l, i + 1);
        if (begin > end || end > l->n_ids)
            return making_refuse(j->m, name, "the shortlist's offsets do not ascend from 0 to %llu",
                                 (unsigned long long)l->n_ids);
        for (uint64_t k = begin; k < end; k++)
            if (list_id(l, (size_t)k) > last || (k > begin && list_id(l, (size_t)k) <= list_id(l, (size_t)k - 1)))
                return making_refuse(j->m, name, "the shortlist's ids do not ascend or are out of range (0 to %zu)",
                                     last);
    }
    return 1;
}

static int read_list(job *j) {
    shortlist *l = &j->lists;
    const size_t tokens = j->s.shared ? j->s.targets + 1 : j->s.sources;
    uint64_t hash = 0;
    if (!j->list) return 1;
    const char *name = packed_base(j->list);
    if (!making_failed(j->m, packed_open(j->list, LARGEST_LIST, "a shortlist", j->m->out, &l->file, j->m->error)))
        return 0;
    const uint8_t *data = l->file.data;
    const size_t size = l->file.size;
    if (size < 8 || word_at(data, 8) != list_magic) {
        text_fail(j->m->error, MOE_ERROR_UNSUPPORTED, name,
                  "%.80s: not a binary shortlist; shortlists in text have no reader in C", name);
        return making_failed(j->m, MOE_ERROR_UNSUPPORTED);
    }
    if (size < LIST_HEADER) return making_refuse(j->m, name, "the shortlist ends within its header");
    l->first = word_at(data + 16, 8);
    l->n_offsets = word_at(data + 32, 8);
    l->n_ids = word_at(data + 40, 8);
    if (l->n_offsets > size || l->n_ids > size || size != LIST_HEADER + 8 * l->n_offsets + 4 * l->n_ids)
        return making_refuse(j->m, name, "the size of %zu bytes does not match %llu offsets and %llu ids", size,
                             (unsigned long long)l->n_offsets, (unsigned long long)l->n_ids);
    for (size_t at = 16; at + 8 <= size; at += 8)
        hash ^= word_at(data + at, 8) + 0x9e3779b9u + (hash << 6) + (hash >> 2);
    if (hash != word_at(data + 8, 8)) return making_refuse(j->m, name, "shortlist checksum mismatch: damaged");
    if (l->n_offsets != tokens && l->n_offsets != tokens + 1)
        return making_refuse(j->m, name, "the shortlist has %llu offsets, but the model has %zu source tokens",
                             (unsigned long long)l->n_offsets, tokens);
    return check_list(j, name, tokens);
}

static void put_list(job *j) {
    const size_t tokens = j->s.shared ? j->s.targets + 1 : j->s.sources;
    if (!j->list) return;
    making_put_int(j->m, "shortlist.entries", (int64_t)j->lists.n_ids);
    making_put_int(j->m, "shortlist.first", (int64_t)j->lists.first);
    making_put_int(j->m, "shortlist.shared", j->s.shared);
    making_put_int(j->m, "shortlist.multiple", MULTIPLE);
    tensor *t = add_tensor(j, "shortlist.offsets", tokens + 1, 0);
    if (t) t->from = FROM_OFFSETS;
    t = add_tensor(j, "shortlist.ids", (size_t)j->lists.n_ids, 0);
    if (t) t->from = FROM_IDS;
}

/* ---- Writing ---- */

/* Compute the frequencies of Marian's positions in float32, each operation rounded once, as hf.py does. */
static int make_frequencies(job *j) {
    const size_t half = (size_t)j->s.width / 2;
    const float step = (float)(log(10000) / (double)(half - 1));
    j->frequencies = making_keep(j->m, NULL, half * sizeof *j->frequencies);
    for (size_t i = 0; j->frequencies && i < half; i++) j->frequencies[i] = (float)exp((double)((float)i * -step));
    return j->frequencies != NULL;
}

static void fill_positions(const job *j, size_t row, float *out, size_t cols) {
    for (size_t i = 0; i < cols / 2; i++) {
        const double angle = (double)((float)row * j->frequencies[i]);
        out[i] = (float)sin(angle);
        out[cols / 2 + i] = (float)cos(angle);
    }
}

/* Return the part of a tensor with row *row, and set *row to the row in it. */
static const part *part_of(const tensor *t, size_t *row) {
    const part *p = t->parts;
    while (*row >= p->rows) *row -= p++->rows;
    return p;
}

/* Fill in a row of a matrix or a whole vector. */
static void fill_parts(const tensor *t, size_t row, float *out, size_t cols) {
    for (size_t i = 0; !t->cols && i < t->n_parts; out += t->parts[i++].rows) {
        if (t->parts[i].item) bin_numbers(t->parts[i].item, 0, 1, out, t->parts[i].rows);
        else *out = 0;
    }
    if (!t->cols) return;
    const part *p = part_of(t, &row);
    if (!p->item) memset(out, 0, cols * sizeof *out);
    else if (p->as_shown || p->item->kind != BIN_FLOAT) bin_numbers(p->item, row * cols, 1, out, cols);
    else bin_numbers(p->item, row, p->rows, out, cols);
}

static void fill(void *user, size_t index, size_t piece, size_t row, float *out, size_t cols) {
    job *j = user;
    const tensor *t = &j->tensors[index];
    float largest = 0;
    (void)piece;
    switch (t->from) {
    case FROM_POSITIONS: fill_positions(j, row, out, cols); return;
    case FROM_OFFSETS:
        for (size_t i = 0; i < cols; i++) out[i] = (float)list_begin(&j->lists, i);
        return;
    case FROM_IDS:
        for (size_t i = 0; i < cols; i++) out[i] = (float)list_id(&j->lists, i);
        return;
    case FROM_PARTS: fill_parts(t, row, out, cols); break;
    }
    if (j->given->type != MOE_TYPE_Q8 || !t->cols || t->f32) return;
    for (size_t i = 0; i < cols; i++) largest = fabsf(out[i]) > largest ? fabsf(out[i]) : largest;
    if (largest > 0 && isinf(127.0f / largest)) {
        making_refuse(j->m, j->model_name,
                      "tensor %.40s: a row's largest weight is too small to quantise (below 4e-37)", t->name);
        out[0] = NAN; /* moe_model_write stops */
    }
}

/* Copy the codes of a row if all parts of its tensor have codes. */
static int fill_codes(void *user, size_t index, size_t row, int8_t *codes, size_t cols, float *scale) {
    const tensor *t = &((const job *)user)->tensors[index];
    if (!t->coded) return 0;
    const part *p = part_of(t, &row);
    *scale = p->item ? bin_scale(p->item) : 0.0f;
    if (p->item) memcpy(codes, p->item->data + row * cols, cols);
    else memset(codes, 0, cols);
    return 1;
}

static int write_model(job *j) {
    moe_tensor_spec *specs = making_keep(j->m, NULL, j->n_tensors * sizeof *specs);
    if (!specs) return 0;
    for (size_t i = 0; i < j->n_tensors; i++) {
        const tensor *t = &j->tensors[i];
        specs[i] = (moe_tensor_spec){ .name = t->name,
                                      .type = t->cols && !t->f32 ? j->given->type : MOE_TYPE_F32,
                                      .n_dims = t->cols ? 2 : 1,
                                      .dims = { t->rows, t->cols } };
    }
    const moe_write_params params = { .entries = j->m->entries,
                                      .n_entries = j->m->n_entries,
                                      .tensors = specs,
                                      .n_tensors = j->n_tensors,
                                      .fill = fill,
                                      .codes = fill_codes,
                                      .user = j };
    return making_write(j->m, &params, j->model_file.size);
}

static int convert(job *j) {
    const char *path = j->given->path;
    const size_t length = (size_t)(packed_base(path) - path);
    struct stat about;
    if (stat(path, &about) != 0)
        return making_failed(j->m, text_fail(j->m->error, MOE_ERROR_IO, packed_base(path), "cannot open %.160s: %s",
                                             path, strerror(errno)));
    const int from_folder = S_ISDIR(about.st_mode);
    j->folder = from_folder ? making_keep(j->m, path, strlen(path))
                : length    ? making_keep(j->m, path, length > 1 ? length - 1 : 1)
                            : making_keep(j->m, ".", 1);
    if (!from_folder) j->model = path;
    if (!from_folder && packed_matches("*.yml *.yaml *.json *.spm", path))
        return making_refuse(j->m, packed_base(path), "not a Marian model: name its folder, or the .bin");
    return j->folder && making_failed(j->m, packed_list(j->folder, &j->names, j->m->error)) && open_config(j) &&
           find_shortlist(j) && read_search(j) && find_files(j) && open_model(j) && read_sizes(j) &&
           read_vocabularies(j) && read_list(j) && put_general(j, from_folder) && put_model(j) &&
           (put_search(j), put_tokens(j)) && (put_list(j), 1) && make_frequencies(j) && write_model(j);
}

int marian_convert(making *m, const convert_options *options) {
    convert_options given = *options;
    job j = { .m = m, .given = &given };
    if (given.type == MOE_TYPE_KEEP) given.type = MOE_TYPE_Q8;
    const int good = convert(&j);
    packed_names_free(&j.names);
    packed_close(&j.config_file);
    packed_close(&j.model_file);
    packed_close(&j.lists.file);
    yaml_free(&j.config_map);
    yaml_free(&j.model_map);
    bin_free(&j.bin);
    for (int i = 0; i < 2; i++) {
        packed_close(&j.spm[i]);
        pieces_free(&j.pieces[i]);
    }
    free(j.tensors);
    return good;
}
