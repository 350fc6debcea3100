/* hub.c - see hub.h */
#define _POSIX_C_SOURCE 200809L

#include "tools/convert/hub.h"
#include "tools/convert/conf.h"
#include "tools/convert/decoder.h"
#include "tools/convert/pieces.h"
#include "tools/convert/tiktoken.h"
#include "tools/convert/safetensors.h"
#include "tools/text/bpe.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { LARGEST_TEMPLATE = 1 << 18, MAX_ID = 999999999, CARD = 1 << 16 };

/* ---- Tables ---- */

typedef struct list_row {
    const char *families, *key, *values;
} list_row;
static const list_row only_rows[] = {
#define ONLY(families, key, values) { families, key, values },
#include "tools/convert/decoder.inc"
};
static const list_row generation_rows[] = {
#define GENERATION(key, values) { "", key, values },
#define DECODER_GENERATION(key, values) { "", key, values },
#include "tools/convert/decoder.inc"
};
static const char accepted[] =
#define ACCEPTED(keys) keys " "
#include "tools/convert/decoder.inc"
    "";

enum { config, decoder_, dense, generation, decoder_generation, used_generation, rope, settings };
static const struct {
    int where;
    const char *keys;
} ignored_rows[] = {
#define decoder decoder_
#define IGNORED(where, keys) { where, keys },
#include "tools/convert/decoder.inc"
#undef decoder
};
enum { model = settings + 1, spaced, unspaced, split, added, pieces_, whole_file };
static const struct {
    int part;
    const char *key, *values;
} setting_rows[] = {
#define pieces pieces_
#define SETTING(part, key, values) { part, key, values },
#include "tools/convert/decoder.inc"
#undef pieces
};
static const struct {
    int part;
    const char *keys;
} known_rows[] = {
#define whole whole_file
#define KNOWN(part, keys) { part, keys },
#include "tools/convert/decoder.inc"
#undef whole
};
enum { real, whole };
static const struct {
    const char *key;
    int kind;
    double least, most;
} sampling_rows[DECODER_SAMPLING] = {
#define SAMPLING(key, kind, least, most) { key, kind, least, most },
#include "tools/convert/decoder.inc"
};
static const struct {
    const char *families, *key, *value;
} default_rows[] = {
#define DEFAULT(families, key, value) { families, key, value },
#include "tools/convert/decoder.inc"
};
static const struct {
    const char *class, *name, *text;
} special_rows[] = {
#define SPECIALS(class, name, text) { class, name, text },
#include "tools/convert/decoder.inc"
};
static const struct {
    const char *family, *class;
} class_rows[] = {
#define CLASS(family, class) { family, class },
#include "tools/convert/decoder.inc"
};
#define ROWS(table) (sizeof(table) / sizeof *(table))

static int is_ignored(int where, const char *key) {
    for (size_t i = 0; i < ROWS(ignored_rows); i++)
        if (ignored_rows[i].where == where && text_is_listed(ignored_rows[i].keys, key, strlen(key))) return 1;
    return 0;
}

static int is_known(int part, const char *key) {
    for (size_t i = 0; i < ROWS(known_rows); i++)
        if (known_rows[i].part == part && text_is_listed(known_rows[i].keys, key, strlen(key))) return 1;
    return 0;
}

/* Return 1 if a value is in a JSON list; unlike conf_is_listed, 0 is not false. */
static int is_one_of(const cJSON *value, const char *values) {
    cJSON *list = cJSON_Parse(values);
    const cJSON *x;
    int found = 0;
    cJSON_ArrayForEach(x, list) found |= cJSON_Compare(value, x, 1) != 0;
    cJSON_Delete(list);
    return found;
}

/* Reject settings of a part that are not supported; unlike conf_only, null must be listed. */
static int check_settings(conf *c, int part, const char *what) {
    for (size_t i = 0; i < ROWS(setting_rows); i++) {
        const char *key = setting_rows[i].key;
        const cJSON *x = setting_rows[i].part == part ? cJSON_GetObjectItemCaseSensitive(c->object, key) : NULL;
        char text[96];
        conf_raw(c, key);
        if (x && !is_one_of(x, setting_rows[i].values))
            return making_refuse(c->m, c->file, "%s of the %.60s is not supported: %s", key, what,
                                 conf_short(x, text, sizeof text));
    }
    return 1;
}

typedef struct hub {
    making *m;
    const convert_options *options;
    decoder d;
    decoder_search search;
    decoder_tokens tokens;
    shards shards;
    stored_list list;
    cJSON *files[6]; /* config, generation, tokenizer, settings, specials, added; deleted at the end */
    pieces_bpe pieces;
    conf config, generation, settings, specials;
    int has_generation;
} hub;
enum { CONFIG, GENERATION_CONFIG, TOKENISER, SETTINGS, SPECIALS_MAP, ADDED_TOKENS };

/* Read a file of the folder into h->files; *found is 0 if it does not exist. */
static int read_json(hub *h, int which, const char *name, conf *out, int *found) {
    const char *path = making_join(h->m, h->options->path, name), *file = name;
    if (!path) return 0;
    *found = packed_exists(path);
    if (*found && !(h->files[which] = conf_read(h->m, path, &file))) return 0;
    return !out || conf_begin(h->m, name, h->files[which], out);
}

/* ---- config.json ---- */

/* Return the value of a key with two names, which must be equal. */
static int64_t first_of(conf *c, const char *key, const char *other, int64_t otherwise, int64_t least, int64_t most) {
    const int64_t a = conf_raw(c, key) || !conf_raw(c, other) ? conf_whole(c, key, otherwise, least, most) : 0;
    const int64_t b = conf_raw(c, other) ? conf_whole(c, other, otherwise, least, most) : a;
    if (conf_raw(c, key) && a != b)
        making_refuse(c->m, c->file, "%s %" PRId64 " and %s %" PRId64 " differ", key, a, other, b);
    return b;
}

/* Divide slow frequencies, as in Llama 3. */
static void slow_down(hub *h, conf *c) {
    const double factor = conf_real(c, "factor", NAN, 1.0, 1e6), low = conf_real(c, "low_freq_factor", NAN, 1e-3, 1e6),
                 high = conf_real(c, "high_freq_factor", NAN, 1e-3, 1e6);
    const double length = (double)conf_whole(c, "original_max_position_embeddings", CONF_NONE, 1, 1 << 24);
    if (h->m->status) return;
    if (high <= low)
        making_refuse(c->m, c->file, "high_freq_factor %g must be greater than low_freq_factor %g", high, low);
    else decoder_slow_down(&h->d, h->d.frequencies, factor, low, high, length);
}

/* Merge rope_scaling and rope_parameters, which takes precedence; the caller deletes the result. */
static cJSON *merge_rope(hub *h, conf *outer) {
    const cJSON *new = conf_raw(outer, "rope_parameters"), *old = conf_raw(outer, "rope_scaling"), *x;
    cJSON *all = cJSON_CreateObject();
    if (new && !cJSON_IsObject(new)) conf_refuse(outer, "rope_parameters", new, ": expected an object");
    if (old && !cJSON_IsObject(old)) conf_refuse(outer, "rope_scaling", old, ": expected an object");
    cJSON_ArrayForEach(x, new) cJSON_AddItemToObject(all, x->string, cJSON_Duplicate(x, 1));
    cJSON_ArrayForEach(x, old) if (!cJSON_GetObjectItemCaseSensitive(new, x->string))
        cJSON_AddItemToObject(all, x->string, cJSON_Duplicate(x, 1));
    if (!all) making_no_memory(h->m);
    return all;
}

static int known_rope(const void *user, const char *key) {
    (void)user;
    return is_ignored(rope, key) ||
           text_is_listed("type rope_type rope_theta alpha partial_rotary_factor", key, strlen(key));
}

/* Return the kind of rotary positions; NULL after an error. */
static const char *rope_kind(conf *c) {
    const char *type = conf_text(c, "type"), *rope_type = conf_text(c, "rope_type");
    if (type && rope_type && strcmp(type, rope_type) != 0)
        making_refuse(c->m, c->file, "type %.40s and rope_type %.40s differ", type, rope_type);
    return c->m->status ? NULL : type ? type : rope_type ? rope_type : "default";
}

/* Set the frequencies, as changed by Hunyuan's alpha, Llama 3.1's factors or Gemma's factor. */
static int rotate(hub *h, conf *outer, conf *c) {
    decoder *d = &h->d;
    conf *given = conf_raw(c, "rope_theta") ? c : outer;
    const int llama = strcmp(d->family->name, "llama") == 0;
    double theta = conf_real(given, "rope_theta", llama ? 1e4 : NAN, 1.0, 1e12);
    const cJSON *alpha = conf_raw(c, "alpha");
    const char *kind = rope_kind(c);
    if (!kind) return 0;
    const int llama3 = llama && strcmp(kind, "llama3") == 0;
    const int linear = d->family->gemma && strcmp(kind, "linear") == 0;
    if (strcmp(kind, "dynamic") == 0 && strncmp(d->family->name, "hunyuan", 7) == 0 && alpha) {
        if (d->head < 4)
            return making_refuse(h->m, c->file, "head_dim %" PRId64 " is not supported with alpha", d->head);
        theta *= pow(conf_real(c, "alpha", NAN, 1.0, 1e9), (double)d->head / (double)(d->head - 2));
    } else if (strcmp(kind, "default") != 0 && !llama3 && !linear) {
        return making_refuse(h->m, c->file,
                             "rope type '%.40s'%s: only 'default', Hunyuan's 'dynamic' with alpha, Llama's 'llama3' "
                             "and Gemma's 'linear' are supported",
                             kind, alpha ? " with alpha" : "");
    } else if (alpha && !conf_is_listed(alpha, "[1.0]")) {
        return conf_refuse(c, "alpha", alpha, "");
    }
    const cJSON *outside = conf_raw(outer, "rope_theta");
    if (given == c && outside && !cJSON_Compare(outside, conf_raw(c, "rope_theta"), 1))
        conf_refuse(outer, "rope_theta", outside, ": rope_parameters has another");
    if (d->family->delta != DECODER_QWEN) conf_only(c, "partial_rotary_factor", "[1.0]");
    const double factor = linear ? conf_real(c, "factor", NAN, 1.0, 1e6) : 1;
    if (h->m->status || !(d->frequencies = decoder_frequencies(h->m, d, theta))) return 0;
    if (llama3) slow_down(h, c);
    for (int64_t i = 0; i < d->turned / 2; i++) d->frequencies[i] /= factor;
    return conf_end(c, known_rope, NULL);
}

static int read_rope(hub *h, conf *outer) {
    cJSON *all = merge_rope(h, outer);
    conf c = { 0 };
    const int good =
        h->m->status == MOE_OK && conf_begin(h->m, "config.json: rope_parameters", all, &c) && rotate(h, outer, &c);
    conf_free(&c);
    cJSON_Delete(all);
    return good;
}

/* Read the positions of one kind of Gemma's layers. */
static int read_rope_of(hub *h, const cJSON *parameters) {
    cJSON *object = cJSON_CreateObject();
    conf outer = { 0 };
    if (parameters) cJSON_AddItemToObject(object, "rope_parameters", cJSON_Duplicate(parameters, 1));
    const int good = conf_begin(h->m, "config.json", object, &outer) && read_rope(h, &outer);
    conf_free(&outer);
    cJSON_Delete(object);
    return good;
}

static const char sliding[] = "sliding_attention", full[] = "full_attention";

/* Read the positions of both kinds of Gemma's layers. */
static int read_both_ropes(hub *h) {
    conf *c = &h->config;
    const cJSON *both = conf_raw(c, "rope_parameters"), *global = cJSON_GetObjectItemCaseSensitive(both, full);
    const double theta = conf_real(c, "rope_local_base_freq", 1e4, 1.0, 1e12);
    cJSON *made = cJSON_CreateObject();
    const cJSON *local = global ? cJSON_GetObjectItemCaseSensitive(both, sliding) : made;
    cJSON_AddNumberToObject(made, "rope_theta", theta);
    if (global && (!local || cJSON_GetArraySize(both) != 2)) conf_refuse(c, "rope_parameters", both, "");
    conf_raw(c, "rope_theta");
    int good = h->m->status == MOE_OK && read_rope_of(h, local);
    h->d.local_frequencies = h->d.frequencies;
    good = good && (global ? read_rope_of(h, global) : read_rope(h, c));
    cJSON_Delete(made);
    return good;
}

/* Read the windows of layers: of all but each `period`-th, unless the configuration has a period or a list. */
static int read_kinds(hub *h, int64_t period) {
    decoder *d = &h->d;
    conf *c = &h->config;
    const int64_t pattern = first_of(c, "sliding_window_pattern", "_sliding_window_pattern", period, 1, INT32_MAX);
    const cJSON *kinds = conf_raw(c, "layer_types"), *x;
    const int64_t window = conf_whole(c, "sliding_window", CONF_NONE, 1, 1 << 20);
    if (h->m->status) return 0;
    decoder_set_windows(d, window, pattern);
    if (kinds && (!cJSON_IsArray(kinds) || cJSON_GetArraySize(kinds) != d->layers))
        return conf_refuse(c, "layer_types", kinds, "");
    int64_t i = 0;
    cJSON_ArrayForEach(x, kinds) {
        const int slides = cJSON_IsString(x) && strcmp(x->valuestring, sliding) == 0;
        if (!slides && !(cJSON_IsString(x) && strcmp(x->valuestring, full) == 0))
            return conf_refuse(c, "layer_types", kinds, "");
        d->windows[i++] = slides ? window : 0;
    }
    return 1;
}

/* Read Gemma's windows and positions. */
static int read_windows(hub *h) {
    decoder *d = &h->d;
    const double scalar = conf_real(&h->config, "query_pre_attn_scalar", NAN, 1.0, 1e6);
    if (h->m->status || !read_kinds(h, 6)) return 0;
    d->query_scale = sqrt((double)d->head / scalar);
    d->norm_offset = 1;
    return read_both_ropes(h);
}

/* Read Cohere's windows, positions and factor of logits. */
static int read_cohere(hub *h) {
    conf *c = &h->config;
    h->d.logit_scale = conf_real(c, "logit_scale", NAN, 1e-6, 1e6);
    if (h->d.family->cohere == 2) conf_only(c, "layer_switch", "[4]");
    return h->m->status == MOE_OK && (h->d.family->cohere == 1 || read_kinds(h, 4)) && read_rope(h, c);
}

/* Read the share of a head's columns that rotary positions turn. */
static int read_turned(hub *h) {
    decoder *d = &h->d;
    const cJSON *inside = conf_raw(&h->config, "rope_parameters");
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(inside, "partial_rotary_factor");
    double share = conf_real(&h->config, "partial_rotary_factor", 0.25, 0.0, 1.0);
    if (x && !cJSON_IsNull(x)) share = cJSON_IsNumber(x) ? x->valuedouble : NAN;
    if (h->m->status) return 0;
    d->turned = share >= 0 && share <= 1 ? (int64_t)((double)d->head * share) : 0;
    if (d->turned >= 2 && d->turned % 2 == 0) return 1;
    return making_refuse(h->m, h->config.file,
                         "rope_parameters: partial_rotary_factor: %" PRId64 " of %" PRId64
                         " columns; expected an even number",
                         d->turned, d->head);
}

/* Read the kinds of Qwen3.5's and Lara's layers, and the sizes of Gated DeltaNet. */
static int read_delta(hub *h) {
    static const char *const period[] = { "linear", "sliding", "linear", "full", "sliding" };
    decoder *d = &h->d;
    conf *c = &h->config;
    const int lara = d->family->delta == DECODER_LARA;
    const int64_t every = conf_whole(c, "full_attention_interval", 4, 1, 1 << 24),
                  window = lara ? conf_whole(c, "sliding_window", CONF_NONE, 1, 1 << 20) : 0;
    const cJSON *kinds = conf_raw(c, "layer_types"), *x = kinds ? kinds->child : NULL;
    if (kinds && (!cJSON_IsArray(kinds) || cJSON_GetArraySize(kinds) != d->layers))
        return conf_refuse(c, "layer_types", kinds, "");
    for (int64_t i = 0; i < d->layers; i++, x = x ? x->next : NULL) {
        char kind[24];
        snprintf(kind, sizeof kind, "%s_attention", lara ? period[i % 5] : (i + 1) % every ? "linear" : "full");
        const char *found = !x ? kind : cJSON_IsString(x) ? x->valuestring : "";
        d->linear[i] = strcmp(found, "linear_attention") == 0;
        d->windows[i] = lara && strcmp(found, sliding) == 0 ? window : 0;
        if (!d->linear[i] && !d->windows[i] && strcmp(found, full) != 0)
            return conf_refuse(c, "layer_types", kinds, "");
    }
    d->values = conf_whole(c, "linear_num_value_heads", CONF_NONE, 1, 1 << 16);
    d->value_keys = conf_whole(c, "linear_num_key_heads", CONF_NONE, 1, 1 << 16);
    d->value = conf_whole(c, "linear_value_head_dim", CONF_NONE, 1, 1 << 16);
    d->key = conf_whole(c, "linear_key_head_dim", CONF_NONE, 1, 1 << 16);
    d->kernel = conf_whole(c, "linear_conv_kernel_dim", CONF_NONE, 1, 64);
    if (h->m->status) return 0;
    if (d->values % d->value_keys)
        return making_refuse(h->m, c->file,
                             "linear_num_key_heads %" PRId64 " does not divide linear_num_value_heads %" PRId64,
                             d->value_keys, d->values);
    d->norm_offset = d->log_rate = 1;
    d->query_scale = 1;
    return (lara || read_turned(h)) && read_rope(h, c);
}

static void read_sparse_hy(hub *h) {
    decoder *d = &h->d;
    const cJSON *kinds = conf_raw(&h->config, "mlp_layer_types"), *x;
    int64_t i = 0;
    if (!kinds) {
        const int64_t first = conf_whole(&h->config, "first_k_dense_replace", 1, 0, INT32_MAX);
        for (; i < d->layers; i++) d->sparse[i] = i >= first;
        return;
    }
    if (!cJSON_IsArray(kinds) || cJSON_GetArraySize(kinds) != d->layers) {
        conf_refuse(&h->config, "mlp_layer_types", kinds, "");
        return;
    }
    cJSON_ArrayForEach(x, kinds) {
        const char *kind = cJSON_IsString(x) ? x->valuestring : "";
        d->sparse[i++] = strcmp(kind, "sparse") == 0;
        if (strcmp(kind, "sparse") != 0 && strcmp(kind, "dense") != 0)
            conf_refuse(&h->config, "mlp_layer_types", kinds, ": expected 'sparse' or 'dense' per layer");
    }
}

/* Decide which layers are mixtures. */
static void read_sparse(hub *h) {
    decoder *d = &h->d;
    if (d->family->dense) return;
    if (d->family->delta) memset(d->sparse, 1, (size_t)d->layers);
    if (strcmp(d->family->name, "hy_v3") == 0) read_sparse_hy(h);
    if (d->family->delta || strcmp(d->family->name, "hy_v3") == 0) return;
    const cJSON *only = conf_raw(&h->config, "mlp_only_layers"), *x;
    const int64_t step = conf_whole(&h->config, "decoder_sparse_step", 1, 1, INT32_MAX);
    if (only && !cJSON_IsArray(only)) conf_refuse(&h->config, "mlp_only_layers", only, "");
    for (int64_t i = 0; i < d->layers && h->m->status == MOE_OK; i++) d->sparse[i] = (i + 1) % step == 0;
    cJSON_ArrayForEach(x, only) {
        const double i = cJSON_IsNumber(x) ? x->valuedouble : NAN;
        if (!(floor(i) >= i)) conf_refuse(&h->config, "mlp_only_layers", only, "");
        if (i >= 0 && i < (double)d->layers) d->sparse[(int64_t)i] = 0;
    }
}

/* Return a number, which Hunyuan's mixtures may store as a list of equal numbers, one per layer. */
static int64_t same_in_all(hub *h, const char *key, int64_t most) {
    const cJSON *list = conf_raw(&h->config, key), *x, *first = cJSON_GetArrayItem(list, 0);
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) < h->d.layers)
        return conf_whole(&h->config, key, CONF_NONE, 1, most);
    cJSON_ArrayForEach(x, list) if (!cJSON_Compare(x, first, 1)) return conf_refuse(&h->config, key, list, ""), 1;
    const double d = cJSON_IsNumber(first) ? first->valuedouble : NAN;
    if (!(d >= 1 && d <= (double)most && floor(d) >= d)) return conf_refuse(&h->config, key, list, ""), 1;
    return (int64_t)d;
}

static void read_mixture(hub *h) {
    decoder *d = &h->d;
    conf *c = &h->config;
    d->experts = first_of(c, "num_experts", "num_local_experts", CONF_NONE, 2, 1 << 16);
    d->scale = 1.0;
    d->weights = "chosen";
    if (strcmp(d->family->name, "hunyuan_v1_moe") == 0) {
        d->chosen = same_in_all(h, "moe_topk", d->experts);
        d->hidden = same_in_all(h, "moe_intermediate_size", 1 << 20);
        d->shared = d->ffn * same_in_all(h, "num_shared_expert", 64);
        return;
    }
    d->chosen = conf_whole(c, "num_experts_per_tok", CONF_NONE, 1, d->experts);
    const int mixtral = strcmp(d->family->name, "mixtral") == 0;
    d->hidden = first_of(c, "moe_intermediate_size", "expert_hidden_dim", mixtral ? d->ffn : CONF_NONE, 1, 1 << 20);
    if (strcmp(d->family->name, "hy_v3") == 0) {
        d->weights = "sigmoid";
        d->scale = conf_real(c, "router_scaling_factor", 1.0, 0.0, 1e6);
        d->shared = d->hidden * conf_whole(c, "num_shared_experts", 1, 0, 64);
    } else {
        if (!conf_flag(c, "norm_topk_prob", mixtral || d->family->delta)) d->weights = "all";
        if (d->family->delta) d->shared = conf_whole(c, "shared_expert_intermediate_size", d->hidden, 1, 1 << 20);
    }
}

/* Move the members of text_config to config.json's own, except those that name the model, which must be `named`. */
static int use_text_config(hub *h, const char *named) {
    cJSON *root = h->files[CONFIG], *inner = cJSON_DetachItemFromObjectCaseSensitive(root, "text_config"), *x;
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(inner, "model_type");
    conf unique = { 0 };
    int good = cJSON_IsObject(inner) && (!type || (cJSON_IsString(type) && strcmp(type->valuestring, named) == 0));
    if (!good) conf_refuse(&h->config, "text_config", inner, "");
    good = good && conf_begin(h->m, "config.json: text_config", inner, &unique);
    conf_free(&unique);
    while (good && (x = cJSON_DetachItemFromArray(inner, 0))) {
        if (text_is_listed("model_type architectures", x->string, strlen(x->string))) {
            cJSON_Delete(x);
            continue;
        }
        cJSON_DeleteItemFromObjectCaseSensitive(root, x->string);
        cJSON_AddItemToArray(root, x);
    }
    cJSON_Delete(inner);
    return good;
}

/* Read a model's text part, and add the values that published files omit. */
static int read_text_part(hub *h) {
    cJSON *root = h->files[CONFIG];
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(root, "model_type");
    const char *name = cJSON_IsString(type) ? type->valuestring : "";
    char text[64];
    snprintf(text, sizeof text, "%.40s_text", name);
    if (decoder_family_named(text) && !use_text_config(h, text)) return 0;
    for (size_t i = 0; i < ROWS(default_rows); i++) {
        const char *key = default_rows[i].key;
        const cJSON *x = cJSON_GetObjectItemCaseSensitive(root, key);
        if (!text_is_listed(default_rows[i].families, name, strlen(name)) || (x && !cJSON_IsNull(x))) continue;
        cJSON_DeleteItemFromObjectCaseSensitive(root, key);
        cJSON_AddItemToObject(root, key, cJSON_Parse(default_rows[i].value));
    }
    conf_free(&h->config);
    return conf_begin(h->m, "config.json", root, &h->config);
}

static int read_family(hub *h) {
    conf *c = &h->config;
    const char *type = conf_text(c, "model_type");
    if (h->m->status) return 0;
    h->d.family = type ? decoder_family_named(type) : NULL;
    if (!h->d.family && type && text_is_listed(decoder_python_types, type, strlen(type)))
        return making_unsupported(h->m, c->file, "model_type %s has no reader in C", type);
    if (!h->d.family)
        return making_refuse(h->m, c->file, "model_type '%.16s': expected %s", type ? type : "",
                             decoder_families(h->m, 0));
    const cJSON *classes = conf_raw(c, "architectures"), *x = cJSON_GetArrayItem(classes, 0);
    if (classes && !(cJSON_IsArray(classes) && cJSON_GetArraySize(classes) == 1 && cJSON_IsString(x) &&
                     strcmp(x->valuestring, h->d.family->class) == 0)) {
        char more[64];
        snprintf(more, sizeof more, ": expected %.50s", h->d.family->class);
        return conf_refuse(c, "architectures", classes, more);
    }
    for (size_t i = 0; i < ROWS(only_rows); i++)
        if (!*only_rows[i].families || text_is_listed(only_rows[i].families, type, strlen(type)))
            conf_only(c, only_rows[i].key, only_rows[i].values);
    return h->m->status == MOE_OK;
}

/* Read quantization_config, which may describe FP8. The tensors' types show which are in FP8. */
static int read_quantization(hub *h) {
    const cJSON *about = conf_raw(&h->config, "quantization_config"), *x;
    const cJSON *method = cJSON_GetObjectItemCaseSensitive(about, "quant_method"),
                *format = cJSON_GetObjectItemCaseSensitive(about, "format"),
                *block = cJSON_GetObjectItemCaseSensitive(about, "weight_block_size");
    const int packed = format && !conf_is_listed(format, "[null, \"float-quantized\", \"naive-quantized\"]");
    uint64_t *sizes = h->d.scale_block;
    int at = 0;
    char text[80];
    sizes[0] = sizes[1] = 128;
    if (about && (!method || !conf_is_listed(method, "[\"fp8\", \"compressed-tensors\"]") || packed))
        return making_refuse(h->m, h->config.file,
                             "quantization_config: %s %s is not supported: use the model in FP8, as GGUF, or "
                             "unquantised",
                             packed ? "format" : "quant_method",
                             conf_short(packed ? format : method, text, sizeof text));
    if (!about || !block || cJSON_IsNull(block)) return 1;
    cJSON_ArrayForEach(x, block) {
        const double size = cJSON_IsNumber(x) ? x->valuedouble : 0;
        if (at < 2 && size >= 1 && size <= 65536 && floor(size) >= size) sizes[at++] = (uint64_t)size;
        else at = 3;
    }
    return at == 2 || making_refuse(h->m, h->config.file, "quantization_config: weight_block_size %s is not supported",
                                    conf_short(block, text, sizeof text));
}

static int read_config(hub *h) {
    decoder *d = &h->d;
    conf *c = &h->config;
    if (!read_text_part(h) || !read_family(h) || !read_quantization(h)) return 0;
    d->file = c->file;
    d->width = conf_whole(c, "hidden_size", CONF_NONE, 1, 1 << 20);
    d->layers = conf_whole(c, "num_hidden_layers", CONF_NONE, 1, DECODER_MAX_LAYERS);
    d->heads = conf_whole(c, "num_attention_heads", CONF_NONE, 1, 1 << 16);
    d->vocabulary = conf_whole(c, "vocab_size", CONF_NONE, 4, 1 << 24);
    d->ffn = conf_whole(c, "intermediate_size", CONF_NONE, 1, 1 << 24);
    d->epsilon = conf_real(c, d->family->cohere ? "layer_norm_eps" : "rms_norm_eps", d->family->epsilon, 0.0, 1.0);
    if (h->m->status) return 0;
    d->keys = conf_whole(c, "num_key_value_heads", d->heads, 1, d->heads);
    d->head = first_of(c, "head_dim", "attention_head_dim", d->width / d->heads, 2, 1 << 16);
    if (d->head < 2) return making_refuse(h->m, c->file, "head_dim is %" PRId64 ", which is not supported", d->head);
    if (d->head % 2) return making_refuse(h->m, c->file, "head_dim %" PRId64 " must be even", d->head);
    if (h->m->status || !decoder_check(h->m, d)) return 0;
    d->turned = d->head;
    if (!(d->family->gemma    ? read_windows(h)
          : d->family->delta  ? read_delta(h)
          : d->family->cohere ? read_cohere(h)
                              : read_rope(h, c)))
        return 0;
    d->tied = conf_flag(c, "tie_word_embeddings", d->family->tied);
    d->context = conf_whole(c, "max_position_embeddings", CONF_NONE, 4, 1 << 24);
    if (d->family->cohere) d->context = conf_whole(c, "model_max_length", d->context, 4, 1 << 24); /* as trained */
    if (d->family->windowed) d->window = conf_whole(c, "sliding_window", d->context, 4, 1 << 24);
    read_sparse(h);
    d->weights = "";
    for (int64_t i = 0, read = 0; i < d->layers && h->m->status == MOE_OK && !read; i++)
        if (d->sparse[i]) read = 1, read_mixture(h);
    d->bos = conf_whole(c, "bos_token_id", 0, 0, d->vocabulary - 1);
    return h->m->status == MOE_OK;
}

/* ---- generation_config.json ---- */

static int add_end(hub *h, const cJSON *x) {
    decoder_search *s = &h->search;
    const double id = cJSON_IsNumber(x) ? x->valuedouble : NAN;
    if (!(id >= 0 && id < (double)h->d.vocabulary && floor(id) >= id)) return 0;
    for (size_t i = 0; i < s->n_ends; i++)
        if (s->ends[i] == (int64_t)id) return 1;
    if (s->n_ends == DECODER_MAX_ENDS) return 0;
    s->ends[s->n_ends++] = (int64_t)id;
    return 1;
}

static int known_generation(const void *user, const char *key) {
    (void)user;
    return is_ignored(generation, key) || is_ignored(decoder_generation, key);
}

static int read_search(hub *h) {
    conf *c = h->has_generation ? &h->generation : &h->config;
    decoder_search *s = &h->search;
    for (size_t i = 0; i < ROWS(generation_rows); i++) {
        const list_row *row = &generation_rows[i];
        if (!text_is_listed(accepted, row->key, strlen(row->key))) conf_only(c, row->key, row->values);
    }
    const cJSON *ends = conf_raw(c, "eos_token_id"), *x, *pad = conf_raw(c, "pad_token_id");
    if (!ends) ends = conf_raw(&h->config, "eos_token_id");
    int good = !cJSON_IsArray(ends) ? add_end(h, ends) : cJSON_GetArraySize(ends) <= DECODER_MAX_ENDS;
    if (cJSON_IsArray(ends)) cJSON_ArrayForEach(x, ends) good = good && add_end(h, x);
    if (!good || !s->n_ends) return conf_refuse(c, "eos_token_id", ends, ": expected tokens of the model, at most 8");
    s->beam = conf_whole(c, "num_beams", 1, 1, MOE_MAX_BEAM);
    s->length_penalty = conf_real(c, "length_penalty", 1.0, 0.0, 100.0);
    s->early_stopping = conf_flag(c, "early_stopping", 0);
    s->max_new = conf_whole(c, "max_new_tokens", INT32_MAX, 1, INT32_MAX);
    s->max_new = conf_raw(c, "max_new_tokens") ? s->max_new : 0;
    s->file = c->file;
    for (size_t i = 0; i < DECODER_SAMPLING; i++) {
        const char *key = sampling_rows[i].key;
        const double least = sampling_rows[i].least, most = sampling_rows[i].most;
        s->sample[i] = NAN;
        if (!conf_raw(c, key)) continue;
        if (sampling_rows[i].kind == whole) s->sample[i] = (double)conf_whole(c, key, 0, (int64_t)least, (int64_t)most);
        else s->sample[i] = conf_real(c, key, NAN, least, most);
    }
    if (!pad) pad = conf_raw(&h->config, "pad_token_id");
    s->pad = -1;
    if (cJSON_IsNumber(pad) && pad->valuedouble >= 0 && pad->valuedouble < (double)h->d.vocabulary &&
        floor(pad->valuedouble) >= pad->valuedouble)
        s->pad = (int64_t)pad->valuedouble;
    return h->m->status == MOE_OK && (!h->has_generation || conf_end(c, known_generation, NULL));
}

/* ---- tokenizer.json ---- */

static const char *type_of(const cJSON *x) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(x, "type");
    return !x || cJSON_IsNull(x) ? "none" : cJSON_IsString(type) ? type->valuestring : "unknown";
}

static const char tokeniser_file[] = "tokenizer.json";

static int refuse_part(hub *h, const char *what, const cJSON *x, const char *expected) {
    char text[96];
    return making_refuse(h->m, tokeniser_file, "%s %s is not supported: expected %s", what,
                         conf_short(x, text, sizeof text), expected);
}

/* Return the first element of a Sequence, or the part itself; the following ones are its `next`. NULL if there is none.
 */
static const cJSON *first_part(hub *h, const cJSON *x, const char *key) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(x, key), *part;
    if (strcmp(type_of(x), "none") == 0) return NULL;
    if (strcmp(type_of(x), "Sequence") != 0) return x;
    if (!cJSON_IsArray(list)) refuse_part(h, key, list, "a list");
    cJSON_ArrayForEach(part, list) if (strcmp(type_of(part), "Sequence") == 0)
        refuse_part(h, "nested Sequence", part, "none");
    return list ? list->child : NULL;
}

/* Return the next element of a Sequence. */
static const cJSON *next_part(const cJSON *whole_part, const cJSON *part) {
    return part == whole_part ? NULL : part->next;
}

static void add_expression(hub *h, const char *text, const char *published) {
    pack_parts *parts = &h->tokens.parts;
    if (!text) making_unsupported(h->m, tokeniser_file, "unknown regular expression %.60s", published);
    else if (parts->n_expressions == PACK_MAX_EXPRESSIONS)
        making_refuse(h->m, tokeniser_file, "more than %d splits", PACK_MAX_EXPRESSIONS);
    else parts->expressions[parts->n_expressions++] = text;
}

/* Return 1 if a member is true, or missing and `otherwise`. */
static int is_true(const cJSON *x, const char *key, int otherwise) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(x, key);
    return value ? !cJSON_IsFalse(value) : otherwise;
}

static void read_split(hub *h, const cJSON *part) {
    const cJSON *pattern = cJSON_GetObjectItemCaseSensitive(part, "pattern"),
                *regex = cJSON_GetObjectItemCaseSensitive(pattern, "Regex");
    conf c;
    if (conf_begin(h->m, tokeniser_file, part, &c)) check_settings(&c, split, "Split");
    conf_free(&c);
    if (cJSON_IsString(regex)) add_expression(h, pack_expression_like(regex->valuestring), regex->valuestring);
    else refuse_part(h, "Split pattern", pattern, "a Regex");
}

static int read_splits(hub *h, const cJSON *all) {
    const char *last = "";
    for (const cJSON *x = first_part(h, all, "pretokenizers"); x && h->m->status == MOE_OK; x = next_part(all, x)) {
        if (strcmp(last, "ByteLevel") == 0) refuse_part(h, "a pre-tokeniser after ByteLevel", x, "none");
        last = type_of(x);
        if (strcmp(last, "Split") == 0) {
            read_split(h, x);
        } else if (strcmp(last, "Digits") == 0) {
            const int one = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(x, "individual_digits"));
            add_expression(h, one ? pack_expression("digit", 5) : pack_expression("digits", 6), "");
        } else if (strcmp(last, "ByteLevel") == 0) {
            if (is_true(x, "add_prefix_space", 1)) refuse_part(h, "add_prefix_space in", x, "false");
            if (is_true(x, "use_regex", 1)) add_expression(h, pack_expression("gpt2", 4), "");
        } else {
            refuse_part(h, "pre-tokeniser", x, "Split, Digits or ByteLevel");
        }
    }
    if (strcmp(last, "ByteLevel") != 0) refuse_part(h, "pre-tokeniser", all, "ByteLevel at its end");
    return h->m->status == MOE_OK;
}

static int read_normaliser(hub *h, const cJSON *all) {
    for (const cJSON *x = first_part(h, all, "normalizers"); x && h->m->status == MOE_OK; x = next_part(all, x)) {
        if (strcmp(type_of(x), "NFC") != 0) refuse_part(h, "normaliser", x, "NFC");
        h->tokens.parts.flags |= BPE_NFC;
    }
    return h->m->status == MOE_OK;
}

/* Return 1 if a value equals this JSON text. */
static int is_json(const cJSON *x, const char *text) {
    cJSON *wanted = cJSON_Parse(text);
    const int same = wanted && cJSON_Compare(x, wanted, 1);
    cJSON_Delete(wanted);
    return same;
}

/* Return the flags of a pre-tokeniser of a tokeniser that merges characters. */
static unsigned read_metaspace(hub *h, const cJSON *x) {
    static const struct {
        const char *name;
        unsigned flags;
    } schemes[] = { { "always", BPE_PREFIX | BPE_UNLESS }, { "first", BPE_FIRST | BPE_UNLESS }, { "never", 0 } };
    const cJSON *scheme = cJSON_GetObjectItemCaseSensitive(x, "prepend_scheme"),
                *mark = cJSON_GetObjectItemCaseSensitive(x, "replacement");
    const char *name = cJSON_IsString(scheme)              ? scheme->valuestring
                       : scheme                            ? ""
                       : is_true(x, "add_prefix_space", 1) ? "always"
                                                           : "never";
    const int whole_texts = cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(x, "split")) && is_json(mark, "\"▁\"");
    for (size_t i = 0; i < ROWS(schemes) && whole_texts && strcmp(type_of(x), "Metaspace") == 0; i++)
        if (strcmp(name, schemes[i].name) == 0) return schemes[i].flags;
    if (!is_json(x, "{\"type\": \"Split\", \"pattern\": {\"String\": \" \"}, \"behavior\": \"MergedWithPrevious\", "
                    "\"invert\": false}"))
        refuse_part(h, "pre-tokeniser", x, "Metaspace without split");
    return 0; /* spaces were replaced before */
}

/* Read the flags of a tokeniser that merges characters, as in Llama 2, Mistral and Gemma. */
static int read_characters(hub *h, conf *c) {
    static const char *const steps[] = {
        "{\"type\": \"Replace\", \"pattern\": {\"String\": \"▁\"}, \"content\": \" \"}", "{\"type\": \"ByteFallback\"}",
        "{\"type\": \"Fuse\"}", "{\"type\": \"Strip\", \"content\": \" \", \"start\": 1, \"stop\": 0}"
    };
    const cJSON *all = conf_raw(c, "normalizer"), *joiner = conf_raw(c, "decoder");
    unsigned *flags = &h->tokens.parts.flags;
    size_t n = 0;
    *flags = BPE_CHARACTERS;
    for (const cJSON *x = first_part(h, all, "normalizers"); x && h->m->status == MOE_OK; x = next_part(all, x)) {
        if (is_json(x, "{\"type\": \"Prepend\", \"prepend\": \"▁\"}")) *flags |= BPE_PREFIX;
        else if (!is_json(x, "{\"type\": \"Replace\", \"pattern\": {\"String\": \" \"}, \"content\": \"▁\"}"))
            refuse_part(h, "normaliser", x, "Prepend or Replace with ▁");
    }
    all = conf_raw(c, "pre_tokenizer");
    for (const cJSON *x = first_part(h, all, "pretokenizers"); x && h->m->status == MOE_OK; x = next_part(all, x))
        *flags |= read_metaspace(h, x);
    for (const cJSON *x = first_part(h, joiner, "decoders"); x && n <= ROWS(steps); x = next_part(joiner, x))
        n = n < ROWS(steps) && is_json(x, steps[n]) ? n + 1 : ROWS(steps) + 1;
    if (n != ROWS(steps) && n != ROWS(steps) - 1)
        refuse_part(h, "decoder", joiner, "Replace, ByteFallback, Fuse and Strip");
    if (n == ROWS(steps)) *flags |= BPE_TRIMMED;
    return h->m->status == MOE_OK;
}

/* Return 1 for an object whose first member has this name. */
static int is_named(const cJSON *x, const char *name) {
    return cJSON_IsObject(x) && x->child && strcmp(x->child->string, name) == 0;
}

/* Return the id of the only special token that a TemplateProcessing puts before a text, or -1. */
static int64_t read_template(hub *h, const cJSON *x) {
    const cJSON *single = cJSON_GetObjectItemCaseSensitive(x, "single"), *first = cJSON_GetArrayItem(single, 0);
    const int n = cJSON_IsArray(single) ? cJSON_GetArraySize(single) : 0;
    const cJSON *last = n ? cJSON_GetArrayItem(single, n - 1) : NULL;
    const int one = n == 2 && is_named(first, "SpecialToken");
    if ((n == 1 || one) && is_named(last, "Sequence")) {
        if (n == 1) return -1;
        const cJSON *id = cJSON_GetObjectItemCaseSensitive(first->child, "id"),
                    *tokens = cJSON_GetObjectItemCaseSensitive(x, "special_tokens"),
                    *about = cJSON_IsString(id) ? cJSON_GetObjectItemCaseSensitive(tokens, id->valuestring) : NULL,
                    *ids = cJSON_GetObjectItemCaseSensitive(about, "ids"), *value = cJSON_GetArrayItem(ids, 0);
        if (cJSON_IsArray(ids) && cJSON_GetArraySize(ids) == 0) return -1;
        if (cJSON_IsArray(ids) && cJSON_GetArraySize(ids) == 1 && cJSON_IsNumber(value) && value->valuedouble >= 0 &&
            value->valuedouble <= (double)MAX_ID && floor(value->valuedouble) >= value->valuedouble)
            return (int64_t)value->valuedouble;
    }
    refuse_part(h, "TemplateProcessing", single, "at most one token before the text");
    return -1;
}

/* Return the id that the post-processor puts before a text, or -1. */
static int64_t read_start(hub *h, const cJSON *all) {
    int64_t found = -1;
    for (const cJSON *x = first_part(h, all, "processors"); x && h->m->status == MOE_OK; x = next_part(all, x)) {
        if (strcmp(type_of(x), "TemplateProcessing") == 0) found = read_template(h, x);
        else if (strcmp(type_of(x), "ByteLevel") != 0)
            refuse_part(h, "post_processor", x, "ByteLevel or TemplateProcessing");
    }
    return found;
}

/* Add an added token with this id and description. */
static int put_added(hub *h, const char *file, double id, const cJSON *x) {
    pack_parts *parts = &h->tokens.parts;
    const cJSON *content = cJSON_GetObjectItemCaseSensitive(x, "content");
    char text[96];
    conf c;
    if (!cJSON_IsObject(x) || !cJSON_IsString(content) || !(id >= 0 && id <= (double)MAX_ID && floor(id) >= id))
        return making_refuse(h->m, file, "invalid added token %s: expected its id and content",
                             conf_short(x, text, sizeof text));
    snprintf(text, sizeof text, "added token %.60s", content->valuestring);
    const int good = conf_begin(h->m, file, x, &c) && check_settings(&c, added, text);
    conf_free(&c);
    const size_t length = strlen(content->valuestring);
    const int is_special = is_true(x, "special", 0), of_characters = (parts->flags & BPE_CHARACTERS) != 0;
    const pack_added a = { (int64_t)id,
                           { making_keep(h->m, content->valuestring, length), length },
                           is_special,
                           !of_characters && is_true(x, "normalized", !is_special),
                           of_characters && !is_special };
    return good && a.content.data &&
           making_failed(h->m, text_add(&parts->added, &parts->n_added, &parts->added_capacity, &a, 1, sizeof a,
                                        h->m->error));
}

static int read_added(hub *h, const cJSON *rows) {
    const cJSON *x;
    char text[96];
    if (rows && !cJSON_IsNull(rows) && !cJSON_IsArray(rows))
        return making_refuse(h->m, tokeniser_file, "invalid added_tokens %s: expected a list",
                             conf_short(rows, text, sizeof text));
    cJSON_ArrayForEach(x, rows) {
        const cJSON *id = cJSON_GetObjectItemCaseSensitive(x, "id");
        if (!put_added(h, tokeniser_file, cJSON_IsNumber(id) ? id->valuedouble : -1, x)) return 0;
    }
    return 1;
}

/* Add the tokens that only tokenizer_config.json lists. */
static int read_more_added(hub *h) {
    static const char file[] = "tokenizer_config.json";
    pack_parts *parts = &h->tokens.parts;
    const cJSON *more = conf_raw(&h->settings, "added_tokens_decoder"), *x;
    const size_t known = parts->n_added;
    char text[96];
    if (more && !cJSON_IsObject(more)) return conf_refuse(&h->settings, "added_tokens_decoder", more, "");
    cJSON_ArrayForEach(x, more) {
        const size_t digits = strspn(x->string, "0123456789");
        if (!digits || digits > 9 || x->string[digits])
            return making_refuse(h->m, file, "invalid id %.60s in added_tokens_decoder", x->string);
        if (!put_added(h, file, strtod(x->string, NULL), x)) return 0;
        const pack_added *a = &parts->added[parts->n_added - 1];
        for (size_t i = 0; i + 1 < parts->n_added; i++) {
            if (strcmp(parts->added[i].content.data, a->content.data) != 0) continue;
            if (parts->added[i].id != a->id)
                return making_refuse(h->m, file, "added token %s has id %" PRId64 ", but %" PRId64 " in tokenizer.json",
                                     conf_short(cJSON_GetObjectItemCaseSensitive(x, "content"), text, sizeof text),
                                     a->id, parts->added[i].id);
            if (i < known) {
                parts->n_added--;
                break;
            }
        }
    }
    return 1;
}

/* Read the vocabulary: {token: id}. */
static int read_vocabulary(hub *h, const cJSON *vocabulary) {
    pack_parts *parts = &h->tokens.parts;
    const cJSON *x;
    if (!cJSON_IsObject(vocabulary)) return refuse_part(h, "vocab", vocabulary, "tokens with their ids");
    cJSON_ArrayForEach(x, vocabulary) {
        const double id = cJSON_IsNumber(x) ? x->valuedouble : -1;
        if (!(id >= 0 && id < (double)PACK_MAX_TOKENS && floor(id) >= id))
            return making_refuse(h->m, tokeniser_file, "the vocabulary must map tokens to ids below %d",
                                 PACK_MAX_TOKENS);
        if ((size_t)id >= parts->n_tokens) parts->n_tokens = (size_t)id + 1;
    }
    parts->tokens = making_keep(h->m, NULL, parts->n_tokens * sizeof *parts->tokens);
    if (!parts->tokens) return 0;
    for (size_t i = 0; i < parts->n_tokens; i++) parts->tokens[i] = (moe_span){ NULL, 0 };
    cJSON_ArrayForEach(x, vocabulary) {
        moe_span *t = &parts->tokens[(size_t)x->valuedouble];
        if (t->data) return making_refuse(h->m, tokeniser_file, "two tokens have the id %.0f", x->valuedouble);
        *t = (moe_span){ x->string, strlen(x->string) };
    }
    return 1;
}

/* Read the merges: "left right" or, in newer files, ["left", "right"]. */
static int read_merges(hub *h, const cJSON *all) {
    pack_parts *parts = &h->tokens.parts;
    const cJSON *x;
    if (!cJSON_IsArray(all)) return refuse_part(h, "merges", all, "a list");
    parts->merges = making_keep(h->m, NULL, ((size_t)cJSON_GetArraySize(all) + 1) * sizeof *parts->merges);
    if (!parts->merges) return 0;
    cJSON_ArrayForEach(x, all) {
        const cJSON *left = cJSON_IsArray(x) ? x->child : NULL, *right = left ? left->next : NULL;
        pack_merge merge = { { NULL, 0 }, { NULL, 0 } };
        const char *space = cJSON_IsString(x) ? strchr(x->valuestring, ' ') : NULL;
        if (space && !strchr(space + 1, ' ')) {
            merge.left = (moe_span){ x->valuestring, (size_t)(space - x->valuestring) };
            merge.right = (moe_span){ space + 1, strlen(space + 1) };
        } else if (right && !right->next && cJSON_IsString(left) && cJSON_IsString(right)) {
            merge.left = (moe_span){ left->valuestring, strlen(left->valuestring) };
            merge.right = (moe_span){ right->valuestring, strlen(right->valuestring) };
        } else {
            return refuse_part(h, "merge", x, "a pair of tokens");
        }
        parts->merges[parts->n_merges++] = merge;
    }
    return 1;
}

/* Remove the special tokens from a vocabulary of characters; merges must not make them. */
static void drop_specials(pack_parts *parts) {
    for (size_t i = 0; i < parts->n_added && parts->flags & BPE_CHARACTERS; i++) {
        const pack_added *a = &parts->added[i];
        moe_span *t = (size_t)a->id < parts->n_tokens ? &parts->tokens[a->id] : NULL;
        if (a->special && t && t->data && text_is(t->data, t->length, a->content.data)) *t = (moe_span){ NULL, 0 };
    }
    while (parts->tokens && parts->n_tokens && !parts->tokens[parts->n_tokens - 1].data) parts->n_tokens--;
}

static int known_setting(const void *user, const char *key) {
    (void)user;
    return is_ignored(settings, key);
}
static int known_whole(const void *user, const char *key) {
    (void)user;
    return is_known(whole_file, key);
}
static int known_model(const void *user, const char *key) {
    (void)user;
    return is_known(model, key);
}

/* Return the text of a token, which is a string or an object with `content`; NULL for anything else. */
static const char *content_of(const cJSON *x) {
    const cJSON *text = cJSON_IsObject(x) ? cJSON_GetObjectItemCaseSensitive(x, "content") : x;
    return cJSON_IsString(text) ? text->valuestring : NULL;
}

static const char gemma_class[] = "GemmaTokenizer";

/* Return the name of transformers' class of the tokeniser, with or without "Fast". */
static const char *class_of(hub *h) {
    const cJSON *own = conf_raw(&h->settings, "tokenizer_class"), *more = conf_raw(&h->config, "tokenizer_class");
    if (cJSON_IsString(own) && *own->valuestring) return own->valuestring;
    if (cJSON_IsString(more) && *more->valuestring) return more->valuestring;
    for (size_t i = 0; i < ROWS(class_rows); i++)
        if (strcmp(class_rows[i].family, h->d.family->name) == 0) return class_rows[i].class;
    return "";
}

/* Return the token that precedes texts, or -1: the post-processor's, `start`, unless `name` is one of transformers'
 * classes that replace it. */
static int64_t start_of(hub *h, const char *name, int64_t start) {
    static const struct {
        const char *name, *bos;
    } classes[] = { { "LlamaTokenizer", "<s>" },
                    { "CodeLlamaTokenizer", "<s>" },
                    { gemma_class, "<bos>" },
                    { "CohereTokenizer", "<BOS_TOKEN>" } };
    const pack_parts *parts = &h->tokens.parts;
    const cJSON *add = cJSON_GetObjectItemCaseSensitive(h->settings.object, "add_bos_token");
    const char *text = content_of(conf_raw(&h->settings, "bos_token"));
    size_t k = 0;
    while (k < ROWS(classes) && strncmp(name, classes[k].name, strlen(classes[k].name)) != 0) k++;
    if (k == ROWS(classes)) return start;
    if (add && (cJSON_IsFalse(add) || cJSON_IsNull(add) ||
                (cJSON_IsNumber(add) && !(add->valuedouble < 0) && !(add->valuedouble > 0))))
        return -1;
    if (!text) text = classes[k].bos;
    for (size_t i = 0; i < parts->n_tokens; i++)
        if (parts->tokens[i].data && text_is(parts->tokens[i].data, parts->tokens[i].length, text)) return (int64_t)i;
    for (size_t i = parts->n_added; i-- > 0;)
        if (strcmp(parts->added[i].content.data, text) == 0) return parts->added[i].id;
    return -1;
}

static int check_ids(hub *h, int64_t start) {
    const pack_parts *parts = &h->tokens.parts;
    int64_t last = start > (int64_t)parts->n_tokens - 1 ? start : (int64_t)parts->n_tokens - 1;
    for (size_t i = 0; i < parts->n_added; i++)
        if (parts->added[i].id > last) last = parts->added[i].id;
    return last < h->d.vocabulary || making_refuse(h->m, parts->file,
                                                   "token id %" PRId64 " exceeds the model's vocabulary "
                                                   "of %" PRId64,
                                                   last, h->d.vocabulary);
}

/* Pack the tokeniser. Returns the id that it puts before each text, or -1. */
static int64_t read_tokeniser(hub *h) {
    conf c = { 0 }, inner = { 0 };
    pack_parts *parts = &h->tokens.parts;
    int found;
    int64_t start = -1;
    parts->file = tokeniser_file;
    if (!read_json(h, TOKENISER, tokeniser_file, &c, &found)) return -1;
    const cJSON *about = conf_raw(&c, "model"), *joiner = conf_raw(&c, "decoder");
    int good =
        strcmp(type_of(about), "BPE") == 0 ||
        making_refuse(h->m, tokeniser_file, "tokeniser type %.40s is not supported: expected BPE", type_of(about));
    good = good && conf_begin(h->m, tokeniser_file, about, &inner) && check_settings(&inner, model, "model");
    const int of_characters = good && cJSON_IsTrue(conf_raw(&inner, "byte_fallback")),
              whole_pieces = good && cJSON_IsTrue(conf_raw(&inner, "ignore_merges"));
    if (of_characters && whole_pieces)
        good = conf_refuse(&inner, "ignore_merges", conf_raw(&inner, "ignore_merges"), "");
    if (of_characters) good = good && read_characters(h, &c);
    else good = good && (strcmp(type_of(joiner), "ByteLevel") == 0 || refuse_part(h, "decoder", joiner, "ByteLevel"));
    good = good && conf_end(&c, known_whole, NULL) && conf_end(&inner, known_model, NULL);
    if (good) start = read_start(h, conf_raw(&c, "post_processor"));
    if (whole_pieces) parts->flags |= BPE_WHOLE;
    good = good && h->m->status == MOE_OK && read_added(h, conf_raw(&c, "added_tokens")) &&
           check_settings(&h->settings, settings, "tokeniser") &&
           check_settings(&h->settings, parts->flags & (BPE_PREFIX | BPE_FIRST) ? spaced : unspaced, "tokeniser") &&
           conf_end(&h->settings, known_setting, NULL) && read_vocabulary(h, conf_raw(&inner, "vocab")) &&
           read_more_added(h);
    if (good) {
        const cJSON *class = conf_raw(&h->settings, "tokenizer_class");
        start = start_of(h, cJSON_IsString(class) ? class->valuestring : "", start);
    }
    if (good) drop_specials(parts);
    good = good && check_ids(h, start) && read_merges(h, conf_raw(&inner, "merges")) &&
           (of_characters ||
            (read_splits(h, conf_raw(&c, "pre_tokenizer")) && read_normaliser(h, conf_raw(&c, "normalizer")))) &&
           pack_tokeniser(h->m, parts, &h->tokens.blob);
    h->tokens.found = good;
    conf_free(&c);
    conf_free(&inner);
    cJSON_Delete(h->files[TOKENISER]); /* large, and no longer needed */
    h->files[TOKENISER] = NULL;
    return start;
}

/* ---- tokenizer.model: a SentencePiece model, converted as by transformers' class for Llama or Gemma ---- */

static const char model_file[] = "tokenizer.model", ranks_file[] = "hy.tiktoken";

/* Return 1 if a file of special tokens names this text. */
static int is_named_special(const conf *c, const char *text) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(c->object, "additional_special_tokens"), *x;
    cJSON_ArrayForEach(x, c->object) if (content_of(x) && strcmp(content_of(x), text) == 0) return 1;
    if (cJSON_IsArray(list))
        cJSON_ArrayForEach(x, list) if (content_of(x) && strcmp(content_of(x), text) == 0) return 1;
    return 0;
}

/* Return 1 if added_tokens_decoder describes this text. */
static int is_described(const cJSON *more, moe_span text) {
    const cJSON *x;
    cJSON_ArrayForEach(x, more) if (content_of(x) && text_is(text.data, text.length, content_of(x))) return 1;
    return 0;
}

/* Add the tokens of added_tokens.json; those that other files name are special. */
static int read_added_map(hub *h, const cJSON *map) {
    const cJSON *x;
    cJSON_ArrayForEach(x, map) {
        cJSON *about = cJSON_CreateObject();
        const int is_special = is_named_special(&h->settings, x->string) || is_named_special(&h->specials, x->string);
        int good = about && cJSON_AddStringToObject(about, "content", x->string) &&
                   cJSON_AddBoolToObject(about, "special", is_special);
        good = good ? put_added(h, "added_tokens.json", cJSON_IsNumber(x) ? x->valuedouble : -1, about)
                    : making_no_memory(h->m);
        cJSON_Delete(about);
        if (!good) return 0;
    }
    return 1;
}

/* Return 1 for a special token of Gemma that its models call user-defined. */
static int is_turn(moe_span text) {
    return text_is(text.data, text.length, "<start_of_turn>") || text_is(text.data, text.length, "<end_of_turn>");
}

/* Add the special and user-defined pieces, and the tokens of the other files, which take precedence. */
static int read_added_pieces(hub *h, int gemma) {
    pack_parts *parts = &h->tokens.parts;
    const cJSON *more = conf_raw(&h->settings, "added_tokens_decoder");
    conf map = { 0 };
    int found;
    if (!more && !read_json(h, ADDED_TOKENS, "added_tokens.json", &map, &found)) return 0;
    for (size_t i = 0; i < h->pieces.n && h->m->status == MOE_OK; i++) {
        const piece_of_bpe *p = &h->pieces.all[i];
        const int is_user = p->kind == PIECE_USER && !(gemma && is_turn(p->text));
        const char *text = making_keep(h->m, p->text.data, p->text.length);
        const pack_added a = { (int64_t)i, { text, p->text.length }, !is_user, 0, is_user };
        if (!text || (p->kind != PIECE_USER && p->kind != PIECE_UNKNOWN && p->kind != PIECE_CONTROL)) continue;
        if (more ? is_described(more, p->text) : cJSON_GetObjectItemCaseSensitive(map.object, text) != NULL) continue;
        making_failed(h->m,
                      text_add(&parts->added, &parts->n_added, &parts->added_capacity, &a, 1, sizeof a, h->m->error));
    }
    const int good = h->m->status == MOE_OK && (more ? read_more_added(h) : read_added_map(h, map.object));
    conf_free(&map);
    return good;
}

/* Set the tokens of pieces: if `merged`, those that merges make, else all but special ones. */
static void put_pieces(hub *h, int merged) {
    pack_parts *parts = &h->tokens.parts;
    parts->n_tokens = h->pieces.n;
    for (size_t i = 0; i < h->pieces.n; i++) {
        const piece_of_bpe *p = &h->pieces.all[i];
        const int is_text = p->kind == PIECE_NORMAL || p->kind == PIECE_USER || (p->kind == PIECE_BYTE && !merged);
        parts->tokens[i] = is_text ? p->text : (moe_span){ NULL, 0 };
    }
}

static int derive_merges(hub *h) {
    pack_parts *parts = &h->tokens.parts;
    float *scores = making_keep(h->m, NULL, (h->pieces.n + 1) * sizeof *scores);
    parts->tokens = making_keep(h->m, NULL, (h->pieces.n + 1) * sizeof *parts->tokens);
    for (size_t i = 0; i < h->pieces.n && scores; i++) scores[i] = h->pieces.all[i].score;
    if (!scores || !parts->tokens) return 0;
    put_pieces(h, 1);
    const int good = pack_derive_merges(h->m, parts, scores);
    put_pieces(h, 0);
    return good;
}

/* Set the flags. Reject a model and settings that disagree on the space before texts. */
static int read_spaces(hub *h, int gemma) {
    const int without = gemma || cJSON_IsFalse(conf_raw(&h->settings, "add_prefix_space")),
              later = cJSON_IsFalse(conf_raw(&h->settings, "legacy"));
    if (!without && !h->pieces.spaced)
        return making_refuse(h->m, model_file,
                             "the model puts no space before texts, but add_prefix_space is not false");
    if (gemma && h->pieces.spaced)
        return making_refuse(h->m, model_file, "the model puts a space before texts, but %s does not", gemma_class);
    h->tokens.parts.flags = BPE_CHARACTERS;
    if (!without) h->tokens.parts.flags |= BPE_TRIMMED | (later ? BPE_FIRST | BPE_UNLESS : BPE_PREFIX);
    return check_settings(&h->settings, settings, "tokeniser") &&
           check_settings(&h->settings, without ? unspaced : spaced, "tokeniser") &&
           check_settings(&h->settings, pieces_, "tokeniser") && conf_end(&h->settings, known_setting, NULL);
}

/* Pack the tokeniser. Returns the id that it puts before each text, or -1. */
static int64_t read_model(hub *h) {
    const char *path = making_join(h->m, h->options->path, model_file), *class = class_of(h);
    int64_t start = -1;
    h->tokens.parts.file = model_file;
    const int gemma = strcmp(class, gemma_class) == 0 || strcmp(class, "GemmaTokenizerFast") == 0;
    if (!gemma && strcmp(class, "LlamaTokenizer") != 0 && strcmp(class, "LlamaTokenizerFast") != 0)
        return making_unsupported(h->m, model_file,
                                  "tokenizer_class %.60s with this file is not supported: expected LlamaTokenizer or "
                                  "%s",
                                  class, gemma_class),
               -1;
    int good = path && making_failed(h->m, pieces_read_bpe(path, h->m->out, &h->pieces, h->m->error)) &&
               read_spaces(h, gemma) && read_added_pieces(h, gemma) && derive_merges(h);
    if (good) start = start_of(h, class, -1);
    good = good && check_ids(h, start);
    if (good) drop_specials(&h->tokens.parts);
    h->tokens.found = good && pack_tokeniser(h->m, &h->tokens.parts, &h->tokens.blob);
    return start;
}

/* Pack the tokeniser of hy.tiktoken. */
static void read_ranks(hub *h, const char *path) {
    h->tokens.parts.file = ranks_file;
    h->tokens.found = tiktoken_read(h->m, path, &h->tokens.parts) && check_ids(h, -1) &&
                      pack_tokeniser(h->m, &h->tokens.parts, &h->tokens.blob);
}

/* ---- Prompts ---- */

/* Find the chat template; data NULL if the folder has none. `file` receives the name of its file. */
static moe_span find_template(hub *h, const char **file, packed_file *mapped) {
    const moe_span none = { NULL, 0 };
    const char *alone = making_join(h->m, h->options->path, "chat_template.jinja");
    const cJSON *x = conf_raw(&h->settings, "chat_template"), *row;
    *file = "chat_template.jinja";
    if (!alone) return none;
    if (packed_exists(alone)) {
        if (!making_failed(h->m,
                           packed_open(alone, LARGEST_TEMPLATE, "a chat template", h->m->out, mapped, h->m->error)))
            return none;
        return (moe_span){ mapped->data ? (const char *)mapped->data : "", mapped->size };
    }
    *file = "tokenizer_config.json";
    if (cJSON_IsArray(x)) { /* several templates: [{name, template}] */
        const cJSON *list = x;
        x = NULL;
        cJSON_ArrayForEach(row, list) {
            const cJSON *name = cJSON_GetObjectItemCaseSensitive(row, "name");
            if (cJSON_IsString(name) && strcmp(name->valuestring, "default") == 0)
                x = cJSON_GetObjectItemCaseSensitive(row, "template");
        }
        if (!x) return making_refuse(h->m, *file, "chat_template has several templates, but no default"), none;
    } else if (cJSON_IsObject(x)) {
        x = cJSON_GetObjectItemCaseSensitive(x, "default");
        if (!x) return making_refuse(h->m, *file, "chat_template has several templates, but no default"), none;
    }
    if (!x || cJSON_IsNull(x)) return none;
    if (!cJSON_IsString(x) || strlen(x->valuestring) > LARGEST_TEMPLATE)
        return conf_refuse(&h->settings, "chat_template", x, ""), none;
    return (moe_span){ x->valuestring, strlen(x->valuestring) };
}

/* Find the special tokens that transformers passes to templates. */
static void find_specials(hub *h, const char *tokens[PROMPT_TOKENS]) {
    const int ignore = cJSON_GetObjectItemCaseSensitive(h->settings.object, "added_tokens_decoder") != NULL;
    char name[64];
    snprintf(name, sizeof name, "%s", class_of(h));
    if (text_ends_with(name, strlen(name), "Fast")) name[strlen(name) - 4] = 0;
    for (size_t k = 0; k < PROMPT_TOKENS; k++) {
        const char *key = prompt_token_names[k];
        const cJSON *own = cJSON_GetObjectItemCaseSensitive(h->settings.object, key),
                    *more = ignore ? NULL : cJSON_GetObjectItemCaseSensitive(h->specials.object, key);
        tokens[k] = NULL;
        for (size_t i = 0; i < ROWS(special_rows); i++)
            if (strcmp(special_rows[i].class, name) == 0 && strcmp(special_rows[i].name, key) == 0)
                tokens[k] = special_rows[i].text;
        if (own || more) tokens[k] = content_of(more ? more : own);
        if (tokens[k] && !*tokens[k]) tokens[k] = NULL;
    }
}

/* Reject special tokens in prompts that the tokeniser would split, because its files do not add them. */
static int check_specials(hub *h, const char *file, const char *const tokens[PROMPT_TOKENS]) {
    const pack_parts *parts = &h->tokens.parts;
    for (size_t k = 0; k < PROMPT_TOKENS; k++) {
        int written = 0, known = 0;
        for (int i = 0; tokens[k] && i < PROMPT_END; i++)
            written |= h->tokens.pieces.texts[i] && strstr(h->tokens.pieces.texts[i], tokens[k]) != NULL;
        for (size_t i = 0; written && i < parts->n_added; i++)
            known |= strstr(parts->added[i].content.data, tokens[k]) != NULL;
        if (written && !known)
            return making_refuse(h->m, file, "the chat template writes %s %.60s, which %s does not add as a token",
                                 prompt_token_names[k], tokens[k], parts->file);
    }
    return 1;
}

/* Return 1 for letters, digits, _ and -; other characters than ASCII count as letters. */
static int is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
           (unsigned char)c >= 0x80;
}

/* Read the words of `language` in the YAML at the beginning of the folder's README.md. */
static void read_card(hub *h) {
    const char *path = making_join(h->m, h->options->path, "README.md");
    char *text = making_keep(h->m, NULL, CARD);
    struct stat about;
    size_t n = 0, length = 0;
    FILE *file = path && text && stat(path, &about) == 0 && S_ISREG(about.st_mode) ? fopen(path, "rb") : NULL;
    if (!file) return;
    n = fread(text, 1, CARD, file);
    fclose(file);
    for (size_t i = 0; i < n; i++) /* line ends as in Python's text files */
        if (text[i] != '\n' || !i || text[i - 1] != '\r') text[length++] = (char)(text[i] == '\r' ? '\n' : text[i]);
    text[length] = 0;
    char *end = strncmp(text, "---\n", 4) == 0 ? strstr(text + 4, "\n---") : NULL, *line = text + 4;
    if (!end) return;
    end[1] = 0;
    while (*line && strncmp(line, "language:", 9) != 0) line += strcspn(line, "\n") + 1;
    if (!*line) return;
    line += 9;
    h->tokens.named = making_keep(h->m, NULL, (strlen(line) / 2 + 1) * sizeof *h->tokens.named);
    for (int first = 1; h->tokens.named && *line; first = 0) {
        const size_t indent = strspn(line, " \t"), end_of = strcspn(line, "\n"), used = strcspn(line, "#\n");
        if (!first && line[indent] != '-') break;
        for (size_t at = line[indent] == '-' ? indent + 1 : 0; at < used;) {
            size_t word = 0;
            while (at + word < used && is_word(line[at + word])) word++;
            if (word) h->tokens.named[h->tokens.n_named++] = (moe_span){ line + at, word };
            at += word ? word : 1;
        }
        line += end_of + (line[end_of] == '\n');
    }
}

static int read_prompts(hub *h) {
    const char *file, *tokens[PROMPT_TOKENS];
    packed_file mapped = { 0 };
    const moe_span template = find_template(h, &file, &mapped);
    h->tokens.name = making_default_name(h->m, h->options->path, 1);
    int good = h->m->status == MOE_OK && h->tokens.name;
    if (good) {
        find_specials(h, tokens);
        read_card(h);
        good = prompts_find(h->m, file, template, tokens, (prompt_model){ h->d.family->name, h->tokens.name },
                            &h->tokens.pieces) &&
               (!h->tokens.found || check_specials(h, file, tokens));
    }
    if (good && !h->tokens.pieces.texts[PROMPT_PREFIX])
        making_note(h->m, "no prompt: %.200s has no chat template. Each input line must be a whole prompt",
                    h->options->path);
    packed_close(&mapped);
    return good;
}

/* Reject a folder without a tokeniser; name the first part of one that it has. */
static int no_tokeniser(hub *h) {
    static const char *const patterns[] = { "*vocab*.json",   "*vocab*.txt",           "*vocab*.yml", "merges.txt",
                                            "*spiece*.model", "*sentencepiece*.model", "*.spm",       "*.bpe" };
    packed_names names = { 0 };
    const char *found = NULL;
    if (!making_failed(h->m, packed_list(h->options->path, &names, h->m->error))) return 0;
    for (size_t i = 0; i < names.n && !found; i++)
        for (size_t k = 0; k < ROWS(patterns) && !found; k++)
            if (fnmatch(patterns[k], names.data[i], 0) == 0) found = names.data[i];
    making_refuse(h->m, tokeniser_file,
                  "missing%s%.60s. To convert a model that accepts token ids only, use tools/convert/convert.py "
                  "--ids-only",
                  found ? "; found only " : "", found ? found : "");
    packed_names_free(&names);
    return 0;
}

static int read_tokens(hub *h) {
    int found;
    const char *path = making_join(h->m, h->options->path, tokeniser_file),
               *ranks = making_join(h->m, h->options->path, ranks_file);
    char where[256];
    if (h->m->status || h->options->ids_only) return h->m->status == MOE_OK;
    if (!read_json(h, SETTINGS, "tokenizer_config.json", &h->settings, &found) ||
        !read_json(h, SPECIALS_MAP, "special_tokens_map.json", &h->specials, &found))
        return 0;
    const char *model_path = making_join(h->m, h->options->path, model_file);
    int64_t start = -1;
    if (!model_path) return 0;
    if (packed_exists(path)) start = read_tokeniser(h);
    else if (packed_exists(ranks)) read_ranks(h, ranks);
    else if (packed_exists(model_path)) start = read_model(h);
    else return no_tokeniser(h);
    if (h->m->status || !read_prompts(h)) return 0;
    snprintf(where, sizeof where, "%.200s/%s", h->options->path, h->tokens.parts.file);
    if (start >= 0) decoder_begin_with(h->m, &h->d, &h->tokens, start, where);
    return h->m->status == MOE_OK;
}

/* ---- The model ---- */

static int known_config(const void *user, const char *key) {
    const hub *h = user;
    for (size_t i = 0; i < ROWS(generation_rows); i++)
        if (strcmp(generation_rows[i].key, key) == 0) return 1;
    for (size_t i = 0; i < DECODER_SAMPLING; i++)
        if (strcmp(sampling_rows[i].key, key) == 0) return 1;
    return is_ignored(config, key) || is_ignored(decoder_, key) || (h->d.family->dense && is_ignored(dense, key)) ||
           is_ignored(generation, key) || is_ignored(decoder_generation, key) || is_ignored(used_generation, key);
}

/* Read all files; without `weights`, only those that describe the model. */
static int read_all(hub *h, int weights) {
    int found;
    if (!read_json(h, CONFIG, "config.json", &h->config, &found)) return 0;
    if (!found)
        return making_refuse(h->m, packed_base(h->options->path),
                             "config.json is missing: copy the model's whole folder");
    return read_json(h, GENERATION_CONFIG, "generation_config.json", &h->generation, &h->has_generation) &&
           read_config(h) && (!weights || safetensors_open(h->m, h->options->path, &h->shards, &h->list)) &&
           read_tokens(h) && read_search(h) && (!weights || decoder_rename(h->m, &h->d, &h->list)) &&
           conf_end(&h->config, known_config, h);
}

static int put_general(hub *h) {
    const convert_options *o = h->options;
    making_put_text(h->m, "general.architecture", "decoder");
    making_put_text(h->m, "general.name", o->name ? o->name : making_default_name(h->m, o->path, 1));
    making_put_text(h->m, "general.description", o->description);
    making_put_text(h->m, "general.licence", o->licence);
    making_put_text(h->m, "general.attribution", o->attribution);
    return h->m->status == MOE_OK;
}

static void close_all(hub *h) {
    safetensors_close(&h->shards);
    stored_free(&h->list);
    conf_free(&h->config);
    conf_free(&h->generation);
    conf_free(&h->settings);
    conf_free(&h->specials);
    for (size_t i = 0; i < sizeof h->files / sizeof *h->files; i++) cJSON_Delete(h->files[i]);
    pieces_free_bpe(&h->pieces);
    free(h->tokens.parts.added);
    text_bytes_free(&h->tokens.blob);
}

int hub_convert(making *m, const convert_options *options) {
    hub h = { .m = m, .options = options };
    const moe_type type = options->type == MOE_TYPE_KEEP ? MOE_TYPE_Q8B : options->type;
    const moe_type experts = options->experts != MOE_TYPE_KEEP ? options->experts
                             : options->type == MOE_TYPE_KEEP  ? MOE_TYPE_Q4
                                                               : options->type;
    uint64_t source = 0;
    int good = read_all(&h, 1) && put_general(&h);
    for (size_t i = 0; i < h.shards.n; i++) source += h.shards.files[i].size;
    good = good && decoder_write(m, &h.d, &h.search, &h.tokens, &h.list, type, experts, "", source);
    close_all(&h);
    return good;
}

int hub_convert_read(making *m, const convert_options *options, const decoder *d, const decoder_search *search,
                     stored_list *list, moe_type type, uint64_t source) {
    hub h = { .m = m, .options = options, .d = *d, .search = *search };
    const int good = conf_begin(m, "config.json", NULL, &h.config) && read_tokens(&h) && put_general(&h) &&
                     decoder_write(m, &h.d, &h.search, &h.tokens, list, type, type, "", source);
    close_all(&h);
    return good;
}

int hub_check(making *m, const convert_options *options) {
    hub h = { .m = m, .options = options };
    const int good = read_all(&h, 0);
    close_all(&h);
    return good;
}
