/* open.c - see open.h. */
#define _GNU_SOURCE /* memmem */

#include "tools/text/open.h"
#include "tools/convert/convert.h"
#include "tools/convert/gguf.h"
#include "tools/convert/packed.h"
#include "tools/text/contained.h"
#include "tools/text/places.h"
#include "tools/text/prompt.h"
#include "tools/text/published.h"
#include "tools/text/system.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int64_t text_meta_int(const moe_model *model, const char *key, int64_t otherwise) {
    const ptrdiff_t i = moe_model_meta_find(model, key);
    return i < 0 ? otherwise : moe_model_meta_int(model, (size_t)i, 0);
}

/* Read a list of pieces; a model without one has an empty vocabulary. */
static moe_status open_list(const text_front *front, const char *key, int32_t size, text_vocabulary *v,
                            moe_error *error) {
    ptrdiff_t list = moe_model_meta_find(front->model, key);
    if (list < 0) return MOE_OK;
    v->count = moe_model_meta_length(front->model, (size_t)list);
    if (moe_model_meta_kind(front->model, (size_t)list) != MOE_META_TEXTS || v->count != (size_t)size)
        return text_fail(error, MOE_ERROR_FORMAT, key, "must be a list of %d texts, one per token", (int)size);
    v->pieces = malloc(v->count * sizeof *v->pieces);
    if (!v->pieces) return text_out_of_memory(error);
    moe_model_meta_texts(front->model, (size_t)list, v->pieces, v->count);
    for (size_t i = 0; i < v->count; i++) {
        const moe_span s = v->pieces[i];
        if (s.length && text_vocabulary_find(v, s.data, s.length) < 0 &&
            !text_index_add(&v->index, text_hash(s.data, s.length), i))
            return text_out_of_memory(error);
    }
    return MOE_OK;
}

/* Read the lists of target pieces and, if sources have their own ids, of source pieces. */
static moe_status open_vocabulary(text_front *front, moe_error *error) {
    const moe_model *m = front->model;
    moe_status status = open_list(front, "vocabulary.pieces", moe_model_vocabulary(m), &front->vocabulary, error);
    if (!status && moe_model_meta_find(m, "source.vocab.size") >= 0)
        status = open_list(front, "source.pieces", moe_model_source_vocabulary(m), &front->sources, error);
    if (!status && moe_model_meta_find(m, "source.vocab.size") >= 0 && front->vocabulary.count && !front->sources.count)
        return text_fail(error, MOE_ERROR_FORMAT, "source.pieces", "missing texts of source token ids");
    return status;
}

/* Map SentencePiece's pieces to the model's ids, if the file lists them. */
static moe_status open_map(text_front *front, moe_error *error) {
    const ptrdiff_t list = moe_model_meta_find(front->model, "tokenizer.ids");
    const int32_t vocabulary = moe_model_vocabulary(front->model), size = spm_size(front->tokeniser);
    if (list < 0) return MOE_OK;
    if (moe_model_meta_kind(front->model, (size_t)list) != MOE_META_INTS ||
        moe_model_meta_length(front->model, (size_t)list) != (size_t)size)
        return text_fail(error, MOE_ERROR_FORMAT, "tokenizer.ids", "must be a list of %d ids, one per piece",
                         (int)size);
    front->map.ids = malloc((size_t)size * sizeof(int32_t));
    front->map.pieces = malloc((size_t)vocabulary * sizeof(int32_t));
    if (!front->map.ids || !front->map.pieces) return text_out_of_memory(error);
    for (int32_t i = 0; i < vocabulary; i++) front->map.pieces[i] = -1;
    for (int32_t i = 0; i < size; i++) {
        const int64_t id = moe_model_meta_int(front->model, (size_t)list, (size_t)i);
        if (id < -1 || id >= vocabulary)
            return text_fail(error, MOE_ERROR_FORMAT, "tokenizer.ids", "piece %d has an id outside the vocabulary",
                             (int)i);
        front->map.ids[i] = (int32_t)id;
        if (id >= 0 && front->map.pieces[id] < 0) front->map.pieces[id] = i;
    }
    return MOE_OK;
}

static moe_span meta_text(const moe_model *m, const char *key) {
    const ptrdiff_t at = moe_model_meta_find(m, key);
    return at < 0 ? (moe_span){ NULL, 0 } : moe_model_meta_text(m, (size_t)at, 0);
}

/* Report a tokeniser error; errno indicates whether memory ran out. */
static moe_status not_made(const char *key, const char *why, moe_error *error) {
    return text_fail(error, errno == ENOMEM ? MOE_ERROR_MEMORY : MOE_ERROR_FORMAT, key, "%s", why);
}

/* Open the SentencePiece model stored under a metadata key. */
static moe_status open_spm(const text_front *front, const char *key, spm **out, moe_error *error) {
    const moe_span bytes = meta_text(front->model, key);
    char why[200] = "";
    *out = spm_new(bytes.data, bytes.length, why, sizeof why);
    return *out ? MOE_OK : not_made(key, why, error);
}

static moe_status open_bpe(text_front *front, moe_error *error) {
    const moe_span bytes = meta_text(front->model, "tokenizer.model");
    char why[200] = "";
    front->unknown = front->target_unknown = -1; /* bytes are tokens, so no piece is unknown */
    front->bpe = bpe_new(bytes.data, bytes.length, why, sizeof why);
    if (!front->bpe) return not_made("tokenizer.model", why, error);
    if (bpe_size(front->bpe) <= moe_model_vocabulary(front->model))
        return text_prompt_new(front, &front->prompt, error);
    return text_fail(error, MOE_ERROR_FORMAT, "tokenizer.model",
                     "the tokeniser has ids up to %d, but the model has only %d tokens", (int)bpe_size(front->bpe) - 1,
                     (int)moe_model_vocabulary(front->model));
}

moe_status text_open_tokeniser(text_front *front, text_level level, moe_error *error) {
    if (level == TEXT_IDS_ONLY) return MOE_OK;
    const moe_span kind = meta_text(front->model, "tokenizer.kind");
    const int64_t unknown = text_meta_int(front->model, "token.unk", -1),
                  of_sources = text_meta_int(front->model, "source.token.unk", unknown);
    front->unknown =
        of_sources >= 0 && of_sources < moe_model_source_vocabulary(front->model) ? (int32_t)of_sources : -1;
    front->target_unknown = unknown >= 0 && unknown < moe_model_vocabulary(front->model) ? (int32_t)unknown : -1;
    front->special[0] = (int32_t)text_meta_int(front->model, "token.bos", -1);
    front->special[1] = (int32_t)text_meta_int(front->model, "token.eos", -1);
    front->special[2] = (int32_t)text_meta_int(front->model, "token.pad", -1);
    if (text_is(kind.data, kind.length, "byte-bpe")) return open_bpe(front, error);
    if (!text_is(kind.data, kind.length, "sentencepiece") || moe_model_meta_find(front->model, "tokenizer.model") < 0) {
        moe_status status = open_vocabulary(front, error);
        if (status || level == TEXT_IF_THERE || (level == TEXT_PIECES && front->vocabulary.count)) return status;
        return text_fail(error, MOE_ERROR_UNSUPPORTED, "tokenizer.kind",
                         front->vocabulary.count ? "this model needs Moses and BPE: use tools/convert/moses-bpe.py and "
                                                   "--pretokenized"
                                                 : "this model contains no tokeniser: use --ids with token ids");
    }
    moe_status status = open_spm(front, "tokenizer.model", &front->tokeniser, error);
    if (!status && moe_model_meta_find(front->model, "tokenizer.target_model") >= 0)
        status = open_spm(front, "tokenizer.target_model", &front->joiner, error);
    if (!status) status = open_vocabulary(front, error);
    if (!status) status = open_map(front, error);
    if (status || front->vocabulary.count || front->map.ids) return status;
    if (spm_size(front->tokeniser) > moe_model_vocabulary(front->model))
        return text_fail(error, MOE_ERROR_FORMAT, "tokenizer.model",
                         "the tokeniser has %d pieces, but the model has only %d tokens",
                         (int)spm_size(front->tokeniser), (int)moe_model_vocabulary(front->model));
    front->unknown = front->target_unknown = spm_unk(front->tokeniser);
    return MOE_OK;
}

struct text_loading {
    pthread_t thread;
    text_front *front;
    text_level level;
    moe_status status;
    moe_error error;
};

static void *load_tokeniser(void *user) {
    struct text_loading *l = user;
    l->status = text_open_tokeniser(l->front, l->level, &l->error);
    return NULL;
}

moe_status text_begin_tokeniser(text_front *front, text_level level, moe_error *error) {
    struct text_loading *l = level == TEXT_IDS_ONLY ? NULL : calloc(1, sizeof *l);
    pthread_attr_t stack;
    if (!l || pthread_attr_init(&stack)) {
        free(l);
        return text_open_tokeniser(front, level, error);
    }
    l->front = front;
    l->level = level;
    pthread_attr_setstacksize(&stack, 4 << 20); /* SentencePiece uses stack in proportion to its longest piece */
    if (pthread_create(&l->thread, &stack, load_tokeniser, l)) free(l);
    else front->loading = l;
    pthread_attr_destroy(&stack);
    return front->loading ? MOE_OK : text_open_tokeniser(front, level, error);
}

moe_status text_wait_tokeniser(text_front *front, moe_error *error) {
    struct text_loading *l = front->loading;
    if (!l) return MOE_OK;
    pthread_join(l->thread, NULL);
    const moe_status status = l->status;
    if (status && error) *error = l->error;
    free(l);
    front->loading = NULL;
    return status;
}

const char *text_without_file(const char *file, const char *message) {
    const size_t length = strlen(file), cut = strncmp(message, "...", 3) == 0 ? 3 : 0;
    for (const char *at = message + cut; (at = strstr(at, ": ")); at++) {
        const size_t n = (size_t)(at - message) - cut;
        if (n <= length && (cut || n == length) && memcmp(file + length - n, message + cut, n) == 0) return at + 2;
    }
    return message;
}

moe_status text_name_error(const char *file, moe_status status, moe_error *error) {
    enum { LEAST = 24 }; /* bytes for the name; the message is more important */
    char message[sizeof error->message];
    if (!status || !error || !file || text_without_file(file, error->message) > error->message) return status;
    snprintf(message, sizeof message, "%s", error->message);
    const size_t length = strlen(file), said = strlen(message),
                 room = sizeof message - (said < sizeof message - LEAST ? said : sizeof message - LEAST) - 6;
    const int n = snprintf(error->message, sizeof message, "%s%s: ", length > room ? "..." : "",
                           length > room ? file + length - room : file);
    snprintf(error->message + n, sizeof message - (size_t)n, "%s", message);
    return status;
}

const char *text_file_error(const char *file, const moe_error *error, char *out, size_t size) {
    const char *message = text_without_file(file ? file : error->where, error->message);
    if (error->code == MOE_ERROR_IO) snprintf(out, size, "%s", error->message);
    else
        snprintf(out, size, "%s%s%s%s%s", file ? file : "", file ? ": " : "", error->where, error->where[0] ? ": " : "",
                 message);
    return out;
}

/* Model files of other programs: part of the name, layout and options for convert.py, 1 if the model is a folder, and
 * the file's first bytes. */
static const struct {
    const char *part, *layout, *type;
    int folder;
    moe_span begin;
} foreign[] = { { ".npz", "marian", " --type q8", 0, { "PK", 2 } },
                { ".intgemm", "marian", " --type q8", 0, { "\1\0\0\0\0\0\0\0", 8 } },
                { "lex.", "marian", " --type q8", 1, { "", 0 } },
                { "chat_template.", "hf", "", 1, { "", 0 } }, /* default layout of decoder-only models */
                { ".safetensors", "hf", " --type q8 --experts q4", 1, { "", 0 } },
                { "pytorch_model", "hf", " --type q8 --experts q4", 1, { "", 0 } },
                { ".gguf", "gguf", "", 0, { "GGUF", 4 } } };
enum { FOREIGN = sizeof foreign / sizeof *foreign, GGUF = FOREIGN - 1, BEGIN = 1 << 16 };

/* Keys of config.json or of a GGUF file, and the values that the converter supports, separated by spaces. */
static const char types[] =
#define FAMILY(name, class, architecture, ...) name " "
#define PYTHON(types) types
#include "tools/convert/decoder.inc"
    ;
static const char architectures[] =
#define FAMILY(name, class, architecture, ...) architecture " "
#include "tools/convert/decoder.inc"
    ;
static const char pre[] =
#define PRE(name, ...) name " "
#include "tools/convert/decoder.inc"
    "default";
static const struct {
    const char *layout, *key, *values;
    int required;
} supported[] = { { "hf", "model_type", types, 1 },
                  { "gguf", "general.architecture", architectures, 1 },
                  { "gguf", "tokenizer.ggml.model", "gpt2 llama", 0 },
                  { "gguf", "tokenizer.ggml.pre", pre, 0 } };
enum { SUPPORTED = sizeof supported / sizeof *supported };

static size_t foreign_of(const char *name) {
    size_t i = 0;
    while (i < FOREIGN && !strstr(name, foreign[i].part)) i++;
    return i;
}

/* Return the first row of `foreign` that matches a file in a folder; set *name to the first such file. */
static size_t foreign_in(DIR *dir, text_bytes *name) {
    size_t found = FOREIGN;
    for (struct dirent *entry; (entry = readdir(dir));) {
        const size_t i = foreign_of(entry->d_name);
        if (i == FOREIGN || i > found || (i == found && strcmp(entry->d_name, name->data) > 0)) continue;
        found = i;
        text_clear(name);
        text_append_string(name, entry->d_name);
    }
    return found;
}

/* Read the first bytes of a regular file. Return their number, or 0 on failure. */
static size_t read_begin(const char *folder, size_t length, const char *name, char *out) {
    text_bytes path = { 0 };
    text_append(&path, folder, length);
    if (*name) text_append_string(&path, "/"), text_append_string(&path, name);
    const size_t size = path.failed || !path.length ? 0 : packed_begin(path.data, out, BEGIN);
    text_bytes_free(&path);
    return size;
}

/* Return the text of a key of the outermost JSON object, which may be truncated. */
static moe_span json_value(moe_span data, const char *key) {
    const size_t length = strlen(key);
    int depth = 0, named = 0;
    for (size_t at = 0; at < data.length; at++) {
        const char c = data.data[at];
        if (c == ',') named = 0;
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        if (c != '"') continue;
        const size_t from = at + 1;
        for (at = from; at < data.length && data.data[at] != '"'; at++) at += data.data[at] == '\\';
        if (at >= data.length) break;
        if (named) return (moe_span){ data.data + from, at - from };
        named = depth == 1 && at - from == length && memcmp(data.data + from, key, length) == 0;
    }
    return (moe_span){ NULL, 0 };
}

/* Append to a message what fits in it whole. */
static void say(moe_error *error, const char *format, ...) {
    const size_t said = strlen(error->message), room = sizeof error->message - said;
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(error->message + said, room, format, arguments) >= (int)room) error->message[said] = 0;
    va_end(arguments);
    text_clean(error->message);
}

/* Return 1 if the converter supports a model, given the start of its file or config.json. Otherwise append the reason.
 */
static int can_convert(size_t row, moe_span data, moe_error *error) {
    const moe_span begin = foreign[row].begin;
    if (data.length < begin.length || memcmp(data.data, begin.data, begin.length) != 0)
        return say(error, "; not a valid %s file: truncated or damaged", foreign[row].part), 0;
    for (size_t i = 0; i < SUPPORTED; i++) {
        const char *key = supported[i].key;
        if (strcmp(supported[i].layout, foreign[row].layout) != 0) continue;
        const moe_span value = row == GGUF ? gguf_text(data, key) : json_value(data, key);
        if (!value.data && supported[i].required)
            return say(error, "; it cannot be converted without %s in %s", key,
                       row == GGUF ? "its header" : "config.json"),
                   0;
        if (!value.data || text_is_listed(supported[i].values, value.data, value.length)) continue;
        if (strstr(error->message, key)) return 0; /* the converter in C has said so */
        say(error, "; the converter does not support its %s %.*s", key, (int)(value.length < 40 ? value.length : 40),
            value.data);
        say(error, ": expected one of %s", supported[i].values);
        return 0;
    }
    return 1;
}

/* Append the command that converts a file, or a file in a folder, that matches row `found`. */
static void say_command(size_t found, const char *path, size_t length, const char *file, moe_error *error) {
    static const char form[] = "; convert it first: tools/convert/convert.py --from %s %.*s%s%s -o model.bin%s";
    const char *type = foreign[found].type, *joint = *file && path[length - 1] != '/' ? "/" : "";
    if (strlen(error->message) + strlen(form) + length + strlen(file) + strlen(type) >= sizeof error->message)
        path = "PATH", length = 4, file = joint = "";
    say(error, form, foreign[found].layout, (int)length, path, joint, file, type);
}

void text_say_how_to_convert(const char *path, moe_error *error) {
    const char *slash = system_slash(path), *impostor = NULL;
    char why[160], *data = error ? malloc(BEGIN + 1) : NULL;
    size_t length = strlen(path), found = FOREIGN;
    DIR *dir = data ? opendir(path) : NULL;
    text_bytes name = { 0 };
    if (dir && !text_is_published(path)) {
        if (convert_explain(path, why, sizeof why)) say(error, "; %s", why);
        closedir(dir);
        free(data);
        return;
    }
    if (dir) {
        found = foreign_in(dir, &name);
        closedir(dir);
    } else if (data && (error->code == MOE_ERROR_FORMAT || error->code == MOE_ERROR_UNSUPPORTED)) {
        found = foreign_of(slash ? slash + 1 : path);
    }
    const char *file = name.length ? name.data : "";
    size_t size = data && (found < FOREIGN || !dir) ? read_begin(path, length, file, data) : 0;
    if (found < FOREIGN && foreign[found].folder && !dir) {
        if (!slash) path = ".";
        length = slash && slash > path ? (size_t)(slash - path) : 1;
    }
    if (data) data[size] = 0;
    if (size && (impostor = packed_impostor(data))) {
        say(error, "; %s", impostor);
    } else if (!dir && packed_matches(packed_unfinished, path)) {
        say(error, "; an unfinished download: finish it");
    } else if (found < FOREIGN) {
        if (strcmp(foreign[found].layout, "hf") == 0) size = read_begin(path, length, "config.json", data);
        if (can_convert(found, (moe_span){ data, size }, error))
            say_command(found, path, length, found == GGUF ? file : "", error);
    }
    text_bytes_free(&name);
    free(data);
}

/* Say that a folder is not a model, or name the fetched model that a missing file may mean: firefox/en-pt or en-pt;
 * else say how to fetch one. */
static void say_what_is_there(const char *path, moe_error *error) {
    static const char *const owners[] = { "", "firefox/" };
    char folder[2048], found[4096];
    struct stat about;
    if (error && stat(path, &about) == 0 && S_ISDIR(about.st_mode) && !strchr(error->message, ';'))
        say(error, "; the folder contains no published model");
    if (!error || *path == '/' || *path == '.' || access(path, F_OK) == 0 ||
        text_place_of_models(1, folder, sizeof folder, NULL))
        return;
    for (size_t i = 0; i < sizeof owners / sizeof *owners; i++) {
        snprintf(found, sizeof found, "%s/%s%.255s.bin", folder, owners[i], path);
        if (access(found, R_OK) == 0) {
            say(error, "; the fetched model is %s", found);
            return;
        }
    }
    if (!path[strcspn(path, "./\\")]) say(error, "; if that is a model's name, fetch it first: moe-get %.100s", path);
}

moe_status text_open_source(const moe_source *given, int level, const moe_model_params *params, text_front *front,
                            moe_error *error) {
    moe_source part = *given;
    text_contained contained;
    const moe_source *source = &part;
    if (part.path && !part.offset && !part.bytes && text_find_contained(part.path, &contained))
        part.offset = contained.offset, part.bytes = contained.bytes;
    *front = (text_front){ .unknown = -1, .target_unknown = -1 };
    moe_status status = moe_model_open_source(source, params, &front->model, error);
    const int published = status && source->path && text_is_published(source->path);
    if (published) status = text_published_open(source->path, !(level & TEXT_NO_CACHE), params, &front->model, error);
    if (status && source->path && error && (!published || status == MOE_ERROR_UNSUPPORTED)) {
        const char *message = text_without_file(source->path, error->message);
        const int named = message > error->message;
        memmove(error->message, message, strlen(message) + 1);
        text_say_how_to_convert(source->path, error);
        say_what_is_there(source->path, error);
        if (named) text_name_error(source->path, status, error);
    }
    if (status) return status;
    front->source_extra = moe_model_source_extra(front->model);
    status = text_open_tokeniser(front, (text_level)(level & ~TEXT_NO_CACHE), error);
    if (status) text_close(front);
    return text_name_error(source->name ? source->name : source->path, status, error);
}

moe_status text_open(const char *path, int level, const moe_model_params *params, text_front *front, moe_error *error) {
    return text_open_source(&(moe_source){ .path = path }, level, params, front, error);
}

void text_close(text_front *front) {
    text_wait_tokeniser(front, NULL);
    spm_free(front->tokeniser);
    spm_free(front->joiner);
    text_prompt_free(front->prompt);
    bpe_free(front->bpe);
    free(front->map.ids);
    free(front->map.pieces);
    free(front->vocabulary.pieces);
    text_index_free(&front->vocabulary.index);
    free(front->sources.pieces);
    text_index_free(&front->sources.index);
    moe_model_close(front->model);
    *front = (text_front){ 0 };
}
