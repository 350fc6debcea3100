/* sources.c - see sources.h. */
#define _POSIX_C_SOURCE 200809L

#include "tools/get/sources.h"

#include <ctype.h>
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- 1. Addresses and names ---------------------------------------------------------------------------- */

/* All addresses of services. A variable of the environment replaces an address. */
static const struct {
    const char *variable, *address;
} firefox = { "MOE_FIREFOX_INDEX",
              "https://storage.googleapis.com/moz-fx-translations-data--303e-prod-translations-data/db/models.json" },
  hub = { "HF_ENDPOINT", "https://huggingface.co" };
static const char hub_description[] = "/api/models/%s/revision/%s?blobs=true", /* OWNER/NAME, revision */
    hub_file[] = "/%s/resolve/%s/%s",                                          /* OWNER/NAME, commit, file */
    hub_page[] = "/%s";
static const char firefox_licence[] = "MPL-2.0", opus_owner[] = "Helsinki-NLP/";
static const char *const opus[] = { "Helsinki-NLP/opus-mt-", "Helsinki-NLP/opus-mt-tc-big-" }; /* followed by a pair */

/* Models with short names. `licence` is used if the repository does not state one; `options` are the converter's. */
static const struct known {
    const char *names, *repository, *licence, *options, *about;
} known[] = {
    { "nllb nllb-600m nllb-200-distilled-600m", "facebook/nllb-200-distilled-600M", "cc-by-nc-4.0", " --type q8",
      "202 languages, not for commercial use" },
    { "nllb-1.3b nllb-200-distilled-1.3b", "facebook/nllb-200-distilled-1.3B", "cc-by-nc-4.0", " --type q8",
      "202 languages, not for commercial use" },
    { "nllb-3.3b nllb-200-3.3b", "facebook/nllb-200-3.3B", "cc-by-nc-4.0", " --type q8",
      "202 languages, not for commercial use" },
    { "nllb-moe nllb-moe-54b", "facebook/nllb-moe-54b", "cc-by-nc-4.0", " --type q8 --experts q4 --resume",
      "202 languages, a mixture, not for commercial use" },
    { "m2m-100 m2m100 m2m-100-418m m2m100-418m", "facebook/m2m100_418M", "mit", " --type q8", "100 languages" },
    { "m2m-100-1.2b m2m100-1.2b", "facebook/m2m100_1.2B", "mit", " --type q8", "100 languages" },
    { "hy-mt2 hy-mt2-1.8b", "tencent/Hy-MT2-1.8B", "", "", "38 languages, prompted" },
    { "hy-mt2-7b", "tencent/Hy-MT2-7B", "", "", "38 languages, prompted" },
    { "hy-mt2-30b hy-mt2-30b-a3b", "tencent/Hy-MT2-30B-A3B", "", " --resume", "38 languages, prompted, a mixture" },
    { "marco-nano marco-nano-instruct", "AIDC-AI/Marco-Nano-Instruct", "", "", "29 languages, prompted, a mixture" },
    { "marco-mini marco-mini-instruct", "AIDC-AI/Marco-Mini-Instruct", "", "", "29 languages, prompted, a mixture" },
};
enum { N_KNOWN = sizeof known / sizeof *known };

static const char *address(const char *variable, const char *usual) {
    const char *given = getenv(variable);
    return given && *given ? given : usual;
}

char *source_index_url(void) {
    const char *url = address(firefox.variable, firefox.address);
    return text_copy(url, strlen(url));
}

static char *finished(text_bytes *url) {
    if (!url->failed) return url->data;
    text_bytes_free(url);
    return NULL;
}

static char *hub_url(const char *format, const char *id, const char *revision, const char *file) {
    const char *endpoint = address(hub.variable, hub.address), *const words[] = { id, revision, file };
    size_t n = strlen(endpoint);
    text_bytes url = { 0 };
    while (n && strchr("/ \t\r\n", endpoint[n - 1])) n--;
    text_append(&url, endpoint, n);
    for (size_t i = 0; *format; format++) /* without text_printf's limit on the length */
        if (format[0] == '%' && format[1] == 's') text_append_string(&url, words[i++]), format++;
        else text_append(&url, format, 1);
    return finished(&url);
}

char *source_hub_url(const source_name *name) { return hub_url(hub_description, name->repository, name->revision, ""); }
char *source_card_url(const source_model *m) { return hub_url(hub_file, m->name.repository, m->version, "README.md"); }

char *source_shown_url(const char *url) {
    const char *begin = strstr(url, "://"), *at = begin ? begin + 3 : url;
    const char *end = at + strcspn(at, "/?#"), *name = end;
    text_bytes out = { 0 };
    while (name > at && name[-1] != '@') name--;
    text_append(&out, url, (size_t)(at - url));
    text_append_string(&out, name);
    return finished(&out);
}

char *source_page_url(const source_name *name) {
    char *url = hub_url(hub_page, name->repository, "", ""), *shown = url ? source_shown_url(url) : NULL;
    free(url);
    return shown;
}

int source_allowed_url(const char *url, int encrypted) {
    return strncasecmp(url, "https://", 8) == 0 || (!encrypted && strncasecmp(url, "http://", 7) == 0);
}

const char *source_known(size_t i, const char **repository, const char **licence, const char **about) {
    if (i >= N_KNOWN) return NULL;
    *repository = known[i].repository, *licence = known[i].licence, *about = known[i].about;
    return known[i].names;
}

/* ---- 2. Words of the user ------------------------------------------------------------------------------ */

/* Copy in lower case, with "-" for "_". Return 0 if it does not fit. */
static int normalised(const char *word, char out[SOURCE_NAME]) {
    const size_t n = strlen(word);
    if (n >= SOURCE_NAME) return 0;
    for (size_t i = 0; i <= n; i++) out[i] = word[i] == '_' ? '-' : (char)tolower((unsigned char)word[i]);
    return 1;
}

int source_matches(const char *text, const char *word) {
    char a[SOURCE_NAME], b[SOURCE_NAME];
    return normalised(text, a) && normalised(word, b) && strstr(a, b);
}

/* Return the length of a language at `at`: 2 or 3 letters, and perhaps "-" and 4 letters of a script; 0 if none. */
static size_t language(const char *at) {
    const char letters[] = "abcdefghijklmnopqrstuvwxyz";
    const size_t n = strspn(at, letters);
    if (n != 2 && n != 3) return 0;
    return at[n] == '-' && strspn(at + n + 1, letters) == 4 && strchr("-", at[n + 5]) ? n + 5 : n;
}

/* Return 1 for a normalised pair of languages, such as en-pt or en-zh-hant. */
static int is_pair(const char *word) {
    const size_t source = language(word);
    if (!source || word[source] != '-') return 0;
    const size_t target = language(word + source + 1);
    return target && !word[source + 1 + target];
}

int source_safe_name(const char *name) {
    const size_t n = strlen(name);
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)name[i]) && !strchr("._+-@=~", name[i])) return 0;
    return n && n <= 200 && name[0] != '.' && name[0] != '-' && !strstr(name, "..") &&
           !text_ends_with(name, n, ".partial") && !text_ends_with(name, n, ".etag") &&
           strcmp(name, "moe-get.json") != 0;
}

static int safe_part(const char *data, size_t length, char out[SOURCE_NAME]) {
    if (length >= SOURCE_NAME) return 0;
    memcpy(out, data, length), out[length] = 0;
    return source_safe_name(out);
}

static source_name *add_name(source_name *out, size_t *n, source_kind kind, const char *begin, const char *id) {
    source_name *name = &out[(*n)++];
    memset(name, 0, sizeof *name);
    name->kind = kind;
    snprintf(name->id, sizeof name->id, "%s%s", begin, id);
    if (kind == SOURCE_HUB) snprintf(name->repository, sizeof name->repository, "%s", name->id);
    snprintf(name->revision, sizeof name->revision, "main");
    return name;
}

/* Parse OWNER/NAME, OWNER/NAME@REVISION or OWNER/NAME/FILE. */
static int parse_repository(const char *word, source_name *out) {
    char owner[SOURCE_NAME], name[SOURCE_NAME], id[SOURCE_NAME];
    const char *first = strchr(word, '/');
    if (!first) return 0;
    const size_t length = strcspn(first + 1, "/@");
    const char *end = first + 1 + length;
    size_t n = 0;
    if (!safe_part(word, (size_t)(first - word), owner) || !safe_part(first + 1, length, name) || length > 96 ||
        strlen(owner) > 96)
        return 0;
    snprintf(id, sizeof id, "%.96s/%.96s", owner, name);
    add_name(out, &n, SOURCE_HUB, "", id);
    if (!*end) return 1;
    /* A version or a file of a repository has a folder of its own. */
    return safe_part(end + 1, strlen(end + 1), *end == '@' ? out->revision : out->file) &&
           snprintf(out->id, sizeof out->id, "%s%c%.200s", id, *end == '@' ? '@' : '+', end + 1) < SOURCE_NAME &&
           source_safe_name(strchr(out->id, '/') + 1);
}

moe_status source_parse(const char *word, source_name out[SOURCE_CANDIDATES], size_t *n, moe_error *error) {
    char name[SOURCE_NAME];
    *n = 0;
    if (!normalised(word, name)) name[0] = 0;
    for (size_t i = 0; i < N_KNOWN; i++)
        if (text_is_listed(known[i].names, name, strlen(name)) || strcasecmp(word, known[i].repository) == 0)
            return add_name(out, n, SOURCE_HUB, "", known[i].repository), MOE_OK;
    if (strncmp(name, "firefox/", 8) == 0 && is_pair(name + 8))
        return add_name(out, n, SOURCE_FIREFOX, "", name), MOE_OK;
    if (is_pair(name)) {
        add_name(out, n, SOURCE_FIREFOX, "firefox/", name);
        for (size_t i = 0; i < sizeof opus / sizeof *opus; i++) add_name(out, n, SOURCE_HUB, opus[i], name);
        return MOE_OK;
    }
    if (strncmp(name, "opus-mt-", 8) == 0 && source_safe_name(word))
        return add_name(out, n, SOURCE_HUB, opus_owner, word), MOE_OK;
    if (strncmp(name, "firefox/", 8) != 0 && parse_repository(word, out)) return *n = 1, MOE_OK;
    return text_fail(error, MOE_ERROR_ARGUMENT, "name",
                     "unknown model '%.60s': name a pair such as en-pt, a model such as nllb, or OWNER/NAME of a "
                     "repository; moe-get --search WORD lists models",
                     word);
}

/* ---- 3. Values from the network ------------------------------------------------------------------------ */

enum { MOST_VALUES = 200000 }; /* about 100 bytes of memory each */

cJSON *source_json(const char *data, size_t length) {
    size_t values = 1;
    for (size_t i = 0; i < length; i++) values += data[i] == ',' || data[i] == '[' || data[i] == '{';
    return values > MOST_VALUES ? NULL : cJSON_ParseWithLength(data, length);
}

static const cJSON *member(const cJSON *object, const char *key) {
    return cJSON_IsObject(object) ? cJSON_GetObjectItemCaseSensitive(object, key) : NULL;
}

static const char *string(const cJSON *object, const char *key) {
    const cJSON *value = member(object, key);
    return cJSON_IsString(value) && value->valuestring ? value->valuestring : NULL;
}

/* Return a number of bytes, or SOURCE_UNKNOWN. */
static uint64_t size_of(const cJSON *object, const char *key) {
    const cJSON *value = member(object, key);
    if (!cJSON_IsNumber(value)) return SOURCE_UNKNOWN;
    const double d = value->valuedouble;
    return d >= 0 && d <= 9007199254740992.0 && floor(d) == d ? (uint64_t)d : SOURCE_UNKNOWN;
}

/* Return a finite number, or NaN. */
static double number(const cJSON *object, const char *key) {
    const cJSON *value = member(object, key);
    return cJSON_IsNumber(value) && isfinite(value->valuedouble) ? value->valuedouble : NAN;
}

/* Copy a hash in lower case. Return 0 if it is not one of `digits` hexadecimal digits. */
static int take_hash(const char *text, size_t digits, char *out) {
    if (!text || strlen(text) != digits || strspn(text, "0123456789abcdefABCDEF") != digits) return 0;
    for (size_t i = 0; i <= digits; i++) out[i] = (char)tolower((unsigned char)text[i]);
    return 1;
}

/* Copy a licence or an architecture, if it is a short word. */
static void take_word(const char *text, char out[64]) {
    size_t n = 0;
    out[0] = 0;
    if (!text) return;
    while (n < 63 && (isalnum((unsigned char)text[n]) || (text[n] && strchr(" .+-_", text[n])))) n++;
    if (!text[n]) memcpy(out, text, n + 1);
}

/* Append a file. Return NULL after an error: out of memory, too many files, or two files with one name. */
static source_file *add_file(source_model *m, const char *name, char *url, moe_error *error) {
    moe_status status = url ? MOE_OK : text_out_of_memory(error);
    for (size_t i = 0; i < m->n && !status; i++)
        if (strcasecmp(m->files[i].name, name) == 0)
            status =
                text_fail(error, MOE_ERROR_FORMAT, "files",
                          "%.80s lists two files named %.80s: refused; report it to its publisher", m->name.id, name);
    if (!status && m->n == SOURCE_FILES)
        status = text_fail(error, MOE_ERROR_UNSUPPORTED, "files", "%.80s has more than %d files, which is the limit",
                           m->name.id, SOURCE_FILES);
    if (!status) status = text_reserve(&m->files, &m->capacity, m->n + 1, sizeof *m->files, error);
    if (status) return free(url), NULL;
    source_file *f = &m->files[m->n++];
    memset(f, 0, sizeof *f);
    snprintf(f->name, sizeof f->name, "%s", name);
    f->url = url;
    f->bytes = f->unpacked = SOURCE_UNKNOWN;
    f->packed = text_ends_with(name, strlen(name), ".gz");
    return f;
}

void source_model_free(source_model *m) {
    for (size_t i = 0; i < m->n; i++) free(m->files[i].url);
    free(m->files);
    memset(m, 0, sizeof *m);
}

static void begin_model(source_model *m, const source_name *name) {
    memset(m, 0, sizeof *m);
    m->name = *name;
    m->comet = m->bleu = -1;
}

uint64_t source_bytes(const source_model *m, int *least) {
    uint64_t sum = 0;
    *least = 0;
    for (size_t i = 0; i < m->n; i++) {
        const source_file *f = &m->files[i];
        const uint64_t bytes = f->bytes != SOURCE_UNKNOWN ? f->bytes : f->unpacked;
        if (bytes == SOURCE_UNKNOWN || bytes > SOURCE_UNKNOWN - 1 - sum) *least = 1;
        else sum += bytes;
    }
    return sum;
}

/* ---- 4. Firefox's index -------------------------------------------------------------------------------- */

/* Files of an entry. The model needs one vocabulary or one for each side. */
static const char *const entry_files[] = { "model", "vocab", "srcVocab", "trgVocab", "lexicalShortlist" };
enum { N_ENTRY_FILES = sizeof entry_files / sizeof *entry_files };

enum { KEY_RELEASED, KEY_SMALL, KEY_COMET, KEY_BLEU, KEY_ARCHITECTURE, KEY_SIZE, N_KEYS };

typedef struct candidate {
    const cJSON *entry;
    double keys[N_KEYS]; /* higher is better; NaN if unknown */
} candidate;

/* Return the path of an entry's file if each of its parts is safe, otherwise NULL. */
static const char *file_path(const cJSON *entry, const char *role) {
    const char *path = string(member(member(entry, "files"), role), "path");
    char part[SOURCE_NAME];
    for (const char *at = path; at;) {
        const size_t n = strcspn(at, "/");
        if (!safe_part(at, n, part)) return NULL;
        at = at[n] ? at + n + 1 : NULL;
    }
    return path;
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int is_released(const cJSON *entry) {
    const char *status = string(entry, "releaseStatus");
    return status && strncmp(status, "Release", 7) == 0;
}

/* Return the rank of an architecture in a list that begins with the best. */
static double rank(const char *architecture, int small) {
    static const char *const lists[2][4] = { { "base-memory", "base", "tiny", NULL },
                                             { "tiny", "base-memory", "base", NULL } };
    size_t i = 0;
    while (lists[small][i] && (!architecture || strcmp(lists[small][i], architecture) != 0)) i++;
    return -(double)i;
}

static int is_usable(const cJSON *entry) {
    return file_path(entry, "model") &&
           (file_path(entry, "vocab") || (file_path(entry, "srcVocab") && file_path(entry, "trgVocab")));
}

static void set_keys(candidate *c, int small) {
    const cJSON *metrics = member(member(c->entry, "metrics"), "flores200-plus");
    const uint64_t bytes = size_of(member(member(c->entry, "files"), "model"), "uncompressedSize");
    const char *architecture = string(c->entry, "architecture");
    c->keys[KEY_RELEASED] = is_released(c->entry);
    c->keys[KEY_SMALL] = small ? rank(architecture, 1) : 0;
    c->keys[KEY_COMET] = number(metrics, "comet22");
    c->keys[KEY_BLEU] = number(metrics, "bleu");
    c->keys[KEY_ARCHITECTURE] = rank(architecture, small);
    c->keys[KEY_SIZE] = bytes == SOURCE_UNKNOWN ? NAN : -(double)bytes;
}

/* Keep the candidates with the best value of a key. Return 1 if all candidates had one. */
static int keep_best(candidate *list, size_t *n, int key) {
    double best = -INFINITY;
    size_t kept = 0;
    for (size_t i = 0; i < *n; i++)
        if (isnan(list[i].keys[key])) return 0;
        else if (list[i].keys[key] > best) best = list[i].keys[key];
    for (size_t i = 0; i < *n; i++)
        if (list[i].keys[key] >= best) list[kept++] = list[i];
    *n = kept;
    return 1;
}

/* Return the best usable entry, independently of their order, or NULL. */
static const cJSON *choose(const cJSON *entries, int small) {
    candidate list[64];
    size_t n = 0;
    const cJSON *entry;
    cJSON_ArrayForEach(entry, entries) {
        if (n == sizeof list / sizeof *list || !is_usable(entry)) continue;
        list[n].entry = entry;
        set_keys(&list[n++], small);
    }
    for (int key = 0; key < N_KEYS && n; key++)
        if (keep_best(list, &n, key) && key == KEY_COMET) key++; /* COMET, or else BLEU */
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (strcmp(file_path(list[i].entry, "model"), file_path(list[best].entry, "model")) < 0) best = i;
    return n ? list[best].entry : NULL;
}

/* Find a pair in the index, which may write it en-zh_hant or en-zh-Hant. */
static const cJSON *find_pair(const cJSON *index, const char *pair) {
    const cJSON *entries;
    char key[SOURCE_NAME];
    cJSON_ArrayForEach(entries, member(index, "models")) if (entries->string && normalised(entries->string, key) &&
                                                             strcmp(key, pair) == 0) return entries;
    return NULL;
}

void source_pivot(const cJSON *index, const source_name *name, char *out, size_t size) {
    const char *pair = name->id + strlen("firefox/");
    const int n = (int)language(pair);
    char first[SOURCE_NAME], second[SOURCE_NAME];
    out[0] = 0;
    snprintf(first, sizeof first, "%.*s-en", n, pair);
    snprintf(second, sizeof second, "en-%.200s", pair + n + 1);
    if (find_pair(index, first) && find_pair(index, second)) snprintf(out, size, "%s %s", first, second);
}

static moe_status add_entry_file(source_model *m, const cJSON *entry, const char *role, const char *base,
                                 moe_error *error) {
    const char *path = file_path(entry, role);
    const cJSON *file = member(member(entry, "files"), role);
    const char *hash = string(file, "uncompressedHash");
    text_bytes url = { 0 };
    if (!path) return MOE_OK;
    text_append_string(&url, base);
    text_append(&url, "/", base[strlen(base) - 1] != '/');
    text_append_string(&url, path);
    source_file *f = add_file(m, base_name(path), finished(&url), error);
    if (!f) return error->code;
    f->unpacked = size_of(file, "uncompressedSize");
    if (!f->packed) f->bytes = f->unpacked;
    if (hash && !take_hash(hash, SHA256_TEXT - 1, f->sha256))
        return text_fail(error, MOE_ERROR_FORMAT, "index",
                         "the index has an invalid hash for %.100s: refused; check MOE_FIREFOX_INDEX", f->name);
    return MOE_OK;
}

moe_status source_from_index(const cJSON *index, const char *index_url, const source_name *name, int small,
                             source_model *out, moe_error *error) {
    const char *pair = name->id + strlen("firefox/"), *base = string(index, "baseUrl");
    const cJSON *entries = find_pair(index, pair);
    begin_model(out, name);
    if (!cJSON_IsObject(member(index, "models")) || !base || !*base)
        return text_fail(error, MOE_ERROR_FORMAT, "index",
                         "Firefox's index has no models or no baseUrl; check MOE_FIREFOX_INDEX, or try again later");
    if (!source_allowed_url(base, source_allowed_url(index_url, 1)))
        return text_fail(error, MOE_ERROR_FORMAT, "index",
                         "the files of Firefox's index have the address '%.80s': refused, because it is not HTTPS; "
                         "check MOE_FIREFOX_INDEX",
                         base);
    if (!entries)
        return text_fail(error, MOE_ERROR_ARGUMENT, "name",
                         "Firefox has no model %.40s; moe-get --search WORD lists its models", pair);
    const cJSON *entry = cJSON_IsArray(entries) ? choose(entries, small) : NULL;
    if (!entry)
        return text_fail(error, MOE_ERROR_UNSUPPORTED, "index",
                         "no entry for %.40s in Firefox's index has a model and a vocabulary with valid names; "
                         "try moe-get %s%.40s",
                         pair, opus[0], pair);
    const char *architecture = string(entry, "architecture"), *released = string(entry, "releaseStatus");
    char words[2][64];
    take_word(architecture, words[0]), take_word(released, words[1]);
    snprintf(out->variant, sizeof out->variant, "%.25s%s%.25s", words[0], *words[0] && *words[1] ? ", " : "", words[1]);
    snprintf(out->version, sizeof out->version, "%s", file_path(entry, "model"));
    snprintf(out->licence, sizeof out->licence, "%s", firefox_licence);
    const cJSON *metrics = member(member(entry, "metrics"), "flores200-plus");
    const double comet = number(metrics, "comet22"), bleu = number(metrics, "bleu");
    out->comet = isnan(comet) ? -1 : comet, out->bleu = isnan(bleu) ? -1 : bleu;
    const int shared = file_path(entry, "vocab") != NULL;
    for (size_t i = 0; i < N_ENTRY_FILES; i++) {
        if (shared && strstr(entry_files[i], "Vocab")) continue;
        const moe_status status = add_entry_file(out, entry, entry_files[i], base, error);
        if (status) return source_model_free(out), status;
    }
    return MOE_OK;
}

/* ---- 5. Hugging Face's repositories -------------------------------------------------------------------- */

static const char *const small_files[] = { "config.json",
                                           "generation_config.json",
                                           "tokenizer.json",
                                           "tokenizer_config.json",
                                           "special_tokens_map.json",
                                           "added_tokens.json",
                                           "chat_template*",
                                           "vocab.json",
                                           "vocab.txt",
                                           "merges.txt",
                                           "*.spm",
                                           "*.model",
                                           "*.tiktoken",
                                           "LICEN[SC]E*",
                                           "NOTICE*",
                                           "README.md",
                                           NULL };
/* Layouts of weights, the best first; a repository may have several. */
static const char *const weights[] = { "model-[0-9]*-of-[0-9]*.safetensors", "model.safetensors",
                                       "pytorch_model-[0-9]*-of-[0-9]*.bin", "pytorch_model.bin" };
static const char *const indexes[] = { "model.safetensors.index.json", "", "pytorch_model.bin.index.json", "" };
enum { N_WEIGHTS = sizeof weights / sizeof *weights };

static int fits(const char *pattern, const char *name) { return fnmatch(pattern, name, FNM_PATHNAME) == 0; }

static int is_small_file(const char *name) {
    for (size_t i = 0; small_files[i]; i++)
        if (fits(small_files[i], name)) return 1;
    return 0;
}

static int has_file(const cJSON *siblings, const char *pattern) {
    const cJSON *sibling;
    cJSON_ArrayForEach(sibling, siblings) {
        const char *name = string(sibling, "rfilename");
        if (name && fits(pattern, name)) return 1;
    }
    return 0;
}

/* Return the layout of the weights, or N_WEIGHTS. */
static size_t layout_of(const cJSON *siblings) {
    size_t i = 0;
    while (i < N_WEIGHTS && !has_file(siblings, weights[i])) i++;
    return i;
}

static const char gguf_part[] = "*-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].gguf";

/* Return 1 if a GGUF file is a part of the same split file. */
static int is_part_with(const char *name, const char *other) {
    const size_t n = strlen(name), stem = n - strlen("00001-of-00002.gguf");
    return fits(gguf_part, name) && fits(gguf_part, other) && strlen(other) == n && strncmp(name, other, stem) == 0 &&
           strcmp(name + stem + 5, other + stem + 5) == 0;
}

static int is_wanted(const char *name, const source_name *wanted, size_t layout) {
    if (*wanted->file)
        return strcmp(name, wanted->file) == 0 || is_part_with(name, wanted->file) || fits("LICEN[SC]E*", name) ||
               fits("README.md", name);
    return is_small_file(name) ||
           (layout < N_WEIGHTS && (fits(weights[layout], name) || (*name && strcmp(indexes[layout], name) == 0)));
}

/* Check that all shards ("-00001-of-00002.TYPE") are listed. */
static moe_status check_shards(const source_model *m, size_t layout, moe_error *error) {
    const char *pattern = layout < N_WEIGHTS ? weights[layout] : gguf_part;
    size_t n = 0, all = 0;
    for (size_t i = 0; i < m->n; i++) {
        const char *of = NULL;
        for (const char *at = m->files[i].name; (at = strstr(at, "-of-")); at++) of = at;
        if (!of || !fits(pattern, m->files[i].name)) continue;
        const size_t said = strtoul(of + 4, NULL, 10);
        n++;
        if (all && said != all)
            return text_fail(error, MOE_ERROR_FORMAT, "files",
                             "%.80s has files of two models; try another revision: %.80s@REVISION", m->name.id,
                             m->name.repository);
        all = said;
    }
    if (n == all) return MOE_OK;
    return text_fail(error, MOE_ERROR_FORMAT, "files",
                     "%.80s has only %zu of %zu files of weights; try another revision: %.80s@REVISION", m->name.id, n,
                     all, m->name.repository);
}

static moe_status add_sibling(source_model *m, const cJSON *sibling, const char *name, moe_error *error) {
    const cJSON *lfs = member(sibling, "lfs");
    if (!source_safe_name(name))
        return text_fail(error, MOE_ERROR_FORMAT, "files",
                         "%.80s has a file with the unsafe name '%.80s': refused; report it to its publisher",
                         m->name.id, name);
    source_file *f = add_file(m, name, hub_url(hub_file, m->name.repository, m->version, name), error);
    if (!f) return error->code;
    f->packed = 0; /* fetched as it is */
    f->bytes = size_of(cJSON_IsObject(lfs) ? lfs : sibling, "size");
    if (f->bytes == SOURCE_UNKNOWN && !is_small_file(name))
        return text_fail(error, MOE_ERROR_FORMAT, "files", "%.80s states no size for %.80s: refused; check HF_ENDPOINT",
                         m->name.id, name);
    if (cJSON_IsObject(lfs) && !take_hash(string(lfs, "sha256"), SHA256_TEXT - 1, f->sha256))
        return text_fail(error, MOE_ERROR_FORMAT, "files",
                         "%.80s states no valid SHA-256 for %.80s: refused; check HF_ENDPOINT", m->name.id, name);
    return MOE_OK;
}

static moe_status add_siblings(source_model *m, const cJSON *siblings, size_t layout, moe_error *error) {
    const cJSON *sibling;
    moe_status status = MOE_OK;
    cJSON_ArrayForEach(sibling, siblings) {
        const char *name = string(sibling, "rfilename");
        if (!name || !is_wanted(name, &m->name, layout)) continue;
        if ((status = add_sibling(m, sibling, name, error))) return status;
        m->has_card |= strcmp(name, "README.md") == 0;
    }
    return check_shards(m, layout, error);
}

/* Set the licence from the description: cardData.license, or a tag "license:NAME". */
static void take_licence(const cJSON *description, source_model *m) {
    const cJSON *tag;
    take_word(string(member(description, "cardData"), "license"), m->licence);
    cJSON_ArrayForEach(tag, member(description, "tags")) if (!*m->licence && cJSON_IsString(tag) &&
                                                             strncmp(tag->valuestring, "license:", 8) == 0)
        take_word(tag->valuestring + 8, m->licence);
}

static const struct known *known_of(const char *repository) {
    for (size_t i = 0; i < N_KNOWN; i++)
        if (strcasecmp(known[i].repository, repository) == 0) return &known[i];
    return NULL;
}

/* Explain that a repository has no weights of a known layout. */
static moe_status no_weights(const cJSON *siblings, const source_name *name, moe_error *error) {
    const cJSON *sibling;
    if (*name->file) {
        char *page = source_page_url(name);
        text_fail(error, MOE_ERROR_ARGUMENT, "files", "%.80s has no file %.80s; see %.140s", name->repository,
                  name->file, page ? page : "its page");
        free(page);
        return MOE_ERROR_ARGUMENT;
    }
    cJSON_ArrayForEach(sibling, siblings) {
        const char *file = string(sibling, "rfilename");
        if (file && fits("*.gguf", file) && source_safe_name(file))
            return text_fail(error, MOE_ERROR_UNSUPPORTED, "files",
                             "%.60s has only GGUF files: name one, such as moe-get %.60s/%.80s", name->id, name->id,
                             file);
    }
    return text_fail(error, MOE_ERROR_UNSUPPORTED, "files",
                     "%.80s has no weights in a known layout (config.json with *.safetensors or pytorch_model.bin); "
                     "OWNER/NAME/FILE fetches one file",
                     name->id);
}

moe_status source_from_hub(const cJSON *description, const source_name *name, source_model *out, moe_error *error) {
    const cJSON *siblings = member(description, "siblings");
    const size_t layout = *name->file ? N_WEIGHTS : layout_of(siblings);
    begin_model(out, name);
    if (!cJSON_IsArray(siblings) || !take_hash(string(description, "sha"), 40, out->version))
        return text_fail(error, MOE_ERROR_FORMAT, "files",
                         "the description of %.80s has no commit or no files; check HF_ENDPOINT", name->id);
    if (*name->file ? !has_file(siblings, name->file) : layout == N_WEIGHTS || !has_file(siblings, "config.json"))
        return no_weights(siblings, name, error);
    take_licence(description, out);
    const moe_status status = add_siblings(out, siblings, layout, error);
    if (status) source_model_free(out);
    return status;
}

/* ---- 6. Licences and conversion ------------------------------------------------------------------------ */

void source_card_licence(const char *card, size_t length, char out[64]) {
    const char *end = card + length;
    out[0] = 0;
    if (!text_begins_with(card, length, "---")) return;
    for (const char *line = memchr(card, '\n', length); line && ++line < end;
         line = memchr(line, '\n', (size_t)(end - line))) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        size_t n = (size_t)((stop ? stop : end) - line);
        if (text_begins_with(line, n, "---")) return;
        if (!text_begins_with(line, n, "license:")) continue;
        char word[64] = "";
        const char *value = line + 8;
        n -= 8;
        while (n && strchr(" \t\"'", *value)) value++, n--;
        while (n && strchr(" \t\r\"'", value[n - 1])) n--;
        if (n < sizeof word) memcpy(word, value, n);
        take_word(word, out);
        return;
    }
}

int source_is_restricted(const char *licence) {
    char word[SOURCE_NAME];
    return normalised(licence, word) && (strstr(word, "-nc") || strstr(word, "noncommercial") ||
                                         strstr(word, "non-commercial") || strstr(word, "research"));
}

const char *source_known_licence(const source_name *name) {
    const struct known *k = known_of(name->repository);
    return k ? k->licence : "";
}

const char *source_converter(const source_name *name, const char **options) {
    const struct known *k = known_of(name->repository);
    if (name->kind == SOURCE_FIREFOX) return *options = " --type q8", "--from marian ";
    *options = k ? k->options : strncmp(name->repository, opus_owner, strlen(opus_owner)) == 0 ? " --type q8" : "";
    return *name->file ? "--from gguf " : "--from hf ";
}
