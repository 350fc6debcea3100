/* safetensors.c - see safetensors.h. A file is a u64 length, that many bytes of JSON, and the data:
 *   {"NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [BEGIN, END]}, ..., "__metadata__": {...}} */
#define _POSIX_C_SOURCE 200809L

#include "tools/convert/safetensors.h"
#include "tools/convert/conf.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST_HEADER = 1 << 25, MAX_SHARDS = 4096 };
static const uint64_t largest_file = (uint64_t)1 << 44;
static const char index_name[] = "model.safetensors.index.json";

static uint64_t number_at(const uint8_t *p) {
    uint64_t v = 0;
    for (size_t i = 8; i-- > 0;) v = v << 8 | p[i];
    return v;
}

/* Return a size that JSON states, or UINT64_MAX. */
static uint64_t size_of(const cJSON *x) {
    const double d = cJSON_IsNumber(x) ? x->valuedouble : -1;
    return d >= 0 && d < (double)STORED_LARGEST && floor(d) >= d ? (uint64_t)d : UINT64_MAX;
}

typedef struct span {
    uint64_t begin, end;
    const char *name;
} span;

static int by_place(const void *a, const void *b) {
    const span *x = a, *y = b;
    return x->begin != y->begin ? (x->begin > y->begin) - (x->begin < y->begin) : (x->end > y->end) - (x->end < y->end);
}

/* Read the entry of a tensor. `data`: the file's bytes after the header. */
static int read_entry(making *m, const char *file, const cJSON *x, const uint8_t *data, uint64_t size, stored *t,
                      span *at) {
    const cJSON *kind = cJSON_GetObjectItemCaseSensitive(x, "dtype"),
                *shape = cJSON_GetObjectItemCaseSensitive(x, "shape"),
                *place = cJSON_GetObjectItemCaseSensitive(x, "data_offsets"), *n;
    uint64_t elements = 1;
    *t = (stored){ .file = file, .name = making_keep(m, x->string, strlen(x->string)) };
    t->own = t->name;
    if (!t->name) return 0;
    *at = (span){ size_of(cJSON_GetArrayItem(place, 0)), size_of(cJSON_GetArrayItem(place, 1)), t->name };
    int good = cJSON_IsObject(x) && cJSON_IsArray(shape) && cJSON_IsArray(place) && cJSON_GetArraySize(place) == 2 &&
               cJSON_IsString(kind) && at->begin != UINT64_MAX && at->end != UINT64_MAX;
    if (good && cJSON_GetArraySize(shape) > STORED_DIMENSIONS)
        return making_refuse(m, file, "tensor %.80s has more than %d dimensions: download it again", t->own,
                             STORED_DIMENSIONS);
    if (good) cJSON_ArrayForEach(n, shape) {
            const uint64_t d = size_of(n);
            t->dims[t->n_dims++] = d;
            good &= d != UINT64_MAX;
            elements = !good || (d && elements > (STORED_LARGEST - 1) / d) ? STORED_LARGEST : elements * d;
        }
    if (!good)
        return making_refuse(m, file, "tensor %.80s lacks a valid dtype, shape or data_offsets: download it again",
                             t->own);
    t->format = stored_format_named(kind->valuestring);
    if (!t->format || t->format->numbers != 1)
        return making_refuse(
            m, file,
            "tensor %.80s has number format '%.20s', which is not supported: use the model in FP8, as GGUF, "
            "or unquantised",
            t->own, kind->valuestring);
    if (at->end < at->begin || elements >= STORED_LARGEST || at->end - at->begin != elements * t->format->bytes)
        return making_refuse(m, file, "tensor %.80s has an invalid offset or size: download it again", t->own);
    if (at->end <= size) t->data = data + at->begin;
    return 1;
}

/* Check that the tensors follow each other up to the end of the file. */
static int check_places(making *m, const char *file, span *spans, size_t n, uint64_t size, uint64_t before) {
    uint64_t at = 0;
    if (n) qsort(spans, n, sizeof *spans, by_place);
    for (size_t i = 0; i < n; at = spans[i++].end)
        if (spans[i].begin != at)
            return making_refuse(m, file, "tensor %.80s overlaps another, or follows a gap: download it again",
                                 spans[i].name);
    return size == at ||
           making_refuse(m, file, "%s: %" PRIu64 " bytes, but its tensors end at %" PRIu64 "; download it again",
                         size < at ? "truncated" : "damaged", before + size, before + at);
}

/* Read the header of a file and append its tensors. */
static int read_file(making *m, const char *file, const packed_file *mapped, stored_list *list) {
    const uint64_t size = mapped->size, length = size >= 8 ? number_at(mapped->data) : 0;
    if (size >= 8 && length > size - 8 && length <= LARGEST_HEADER)
        return making_refuse(m, file,
                             "truncated: %" PRIu64 " bytes, but its header alone has %" PRIu64 "; download it again",
                             size, length);
    if (length < 2 || length > LARGEST_HEADER)
        return making_refuse(m, file, "not a safetensors file: download it again");
    cJSON *header = conf_parse(m, file, mapped->data + 8, (size_t)length);
    const cJSON *x;
    size_t n = 0, begin = list->n;
    if (!header) return 0;
    span *spans = malloc(((size_t)cJSON_GetArraySize(header) + 1) * sizeof *spans);
    int good = spans && cJSON_IsObject(header);
    if (!spans) making_no_memory(m);
    else if (!good) making_refuse(m, file, "the header is not an object: download it again");
    if (good) cJSON_ArrayForEach(x, header) {
            stored t;
            if (!good || strcmp(x->string, "__metadata__") == 0) continue;
            good = read_entry(m, file, x, mapped->data + 8 + length, size - 8 - length, &t, &spans[n++]);
            const stored *other = good ? stored_find(list, t.name) : NULL;
            if (other && (size_t)(other - list->items) >= begin)
                good = making_refuse(m, file, "duplicate tensor %.80s", t.name);
            else if (other) good = making_refuse(m, file, "tensor %.80s is in several shards", t.name);
            good = good && stored_add(m, list, &t);
        }
    good = good && check_places(m, file, spans, n, size - 8 - length, 8 + length);
    free(spans);
    cJSON_Delete(header);
    return good;
}

static int open_file(making *m, const char *folder, const char *name, shards *out, stored_list *list) {
    const char *path = making_join(m, folder, name);
    const char *kept = making_keep(m, name, strlen(name));
    if (!path || !kept) return 0;
    if (!making_failed(m, packed_open(path, largest_file, "a model", m->out, &out->files[out->n], m->error))) return 0;
    return read_file(m, kept, &out->files[out->n++], list);
}

/* ---- Shards ---- */

/* Check that the tensors of an index are in the files that it lists. */
static int check_map(making *m, const cJSON *map, stored_list *list) {
    const cJSON *x;
    cJSON_ArrayForEach(x, map) {
        stored *t = stored_find(list, x->string);
        if (!t)
            return making_refuse(m, x->valuestring, "tensor %.80s is missing: %s lists it there", x->string,
                                 index_name);
        if (strcmp(t->file, x->valuestring) != 0)
            return making_refuse(m, t->file, "tensor %.60s is here, but %s lists %.60s", x->string, index_name,
                                 x->valuestring);
        if (t->taken) return making_refuse(m, index_name, "duplicate key %.80s", x->string);
        t->taken = 1;
    }
    for (size_t i = 0; i < list->n; i++) {
        stored *t = &list->items[i];
        if (!t->taken)
            making_note(m, "%s does not list tensor %.80s: using the one in %.80s", index_name, t->own, t->file);
        t->taken = 0;
    }
    return 1;
}

static int read_shards(making *m, const char *folder, const char *path, shards *out, stored_list *list) {
    const char *file;
    cJSON *index = conf_read(m, path, &file);
    const cJSON *map = index ? cJSON_GetObjectItemCaseSensitive(index, "weight_map") : NULL, *x;
    text_index seen = { 0 };
    const char **names = making_keep(m, NULL, MAX_SHARDS * sizeof *names);
    int good = index && names;
    if (good && (!cJSON_IsObject(map) || !cJSON_GetArraySize(map)))
        good = making_refuse(m, file, "no weight_map from tensors to files in this folder: download it again");
    if (good) cJSON_ArrayForEach(x, map) {
            size_t at = 0, known = 0;
            const char *name = cJSON_IsString(x) ? x->valuestring : "";
            if (!*name || strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
                good = making_refuse(m, file, "no weight_map from tensors to files in this folder: download it again");
                break;
            }
            const uint32_t hash = text_hash(name, strlen(name));
            for (uint32_t i; (i = text_index_next(&seen, hash, &at)) != TEXT_NONE;)
                known |= strcmp(names[i], name) == 0;
            if (known) continue;
            const char *whole = making_join(m, folder, name);
            if (out->n == MAX_SHARDS) good = making_refuse(m, file, "more than %d shards", MAX_SHARDS);
            else if (whole && !packed_exists(whole))
                good = making_refuse(m, name, "this shard is missing: %s lists it for %.80s", file, x->string);
            names[out->n] = name;
            good = good && whole && (text_index_add(&seen, hash, out->n) || making_no_memory(m)) &&
                   open_file(m, folder, name, out, list);
            if (!good) break;
        }
    good = good && check_map(m, map, list);
    text_index_free(&seen);
    cJSON_Delete(index);
    return good;
}

/* ---- Folders ---- */

/* Other files with weights, and what to do with them; NULL for files of the Python converter. */
static const struct {
    const char *patterns, *advice;
} elsewhere[] = { { "model-*-of-*.safetensors", "copy its index too, model.safetensors.index.json" },
                  { "*.gguf", "name that file" },
                  { "pytorch_model*.bin", NULL },
                  { "*.npz", "name that file" },
                  { "*.safetensors", "rename it to model.safetensors if it holds all weights" } };

static int no_weights(making *m, const char *folder) {
    packed_names names = { 0 };
    making_failed(m, packed_list(folder, &names, m->error));
    for (size_t row = 0; row < sizeof elsewhere / sizeof *elsewhere; row++)
        for (size_t i = 0; i < names.n && m->status == MOE_OK; i++)
            if (!packed_matches(elsewhere[row].patterns, names.data[i])) continue;
            else if (elsewhere[row].advice)
                making_refuse(m, packed_base(folder), "no model.safetensors, but %.60s: %s", names.data[i],
                              elsewhere[row].advice);
            else
                making_unsupported(m, packed_base(folder), "no model.safetensors; %.60s has no reader in C",
                                   names.data[i]);
    if (m->status == MOE_OK)
        making_refuse(m, packed_base(folder),
                      "contains neither model.safetensors nor %s: copy the model's whole folder", index_name);
    packed_names_free(&names);
    return 0;
}

int safetensors_open(making *m, const char *folder, shards *out, stored_list *list) {
    const char *whole = making_join(m, folder, "model.safetensors"), *index = making_join(m, folder, index_name),
               *adapter = making_join(m, folder, "adapter_config.json");
    out->files = making_keep(m, NULL, MAX_SHARDS * sizeof *out->files);
    if (m->status) return 0;
    if (packed_exists(adapter))
        return making_refuse(m, "adapter_config.json",
                             "adapters are not supported: merge it into the model, and save that");
    if (packed_exists(whole)) return open_file(m, folder, "model.safetensors", out, list);
    if (packed_exists(index)) return read_shards(m, folder, index, out, list);
    return no_weights(m, folder);
}

void safetensors_close(shards *s) {
    for (size_t i = 0; i < s->n; i++) packed_close(&s->files[i]);
    s->n = 0;
}
