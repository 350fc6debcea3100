/* libre.c - HTTP interface of LibreTranslate.
 *
 * Contents
 *   1. Translate
 *   2. Detect
 *   3. Languages and settings
 */
#include "tools/server/server.h"
#include "tools/text/choice.h"
#include "tools/text/several.h"

#include "spec-json.inc" /* spec_json[]: the lines of spec.json, made by the Makefile */

#include <stdlib.h>
#include <string.h>

enum { MOST_OTHERS = 64 }; /* maximum number of alternatives */

/* ==== 1. Translate ====================================================================================== */

static void put_alternatives(const request *req, json *j, size_t i) {
    const page *p = req->markup ? &req->pages[i] : NULL;
    const size_t first = p ? p->first : i, n_items = p ? moetext_html_count(p->document) : 1;
    size_t n = 0;
    for (size_t k = first; k < first + n_items; k++)
        if (req->items[k].n_others > n) n = req->items[k].n_others;
    json_open(j, req->is_list ? NULL : "alternatives", '[');
    for (size_t k = 1; k <= n; k++) put_text(req, j, NULL, i, k);
    json_close(j, ']');
}

/* Write a member with the JSON object of each text, or null for documents and failed texts. */
static void put_members(request *req, const char *key, size_t member) {
    text_bytes *out = &req->out;
    text_printf(out, ",\"%s\":%s", key, req->is_list ? "[" : "");
    for (size_t i = 0; i < request_count(req); i++) {
        const text_bytes *value = req->markup ? NULL : (const void *)((const char *)&req->items[i] + member);
        if (i) text_append(out, ",", 1);
        if (value && value->length) text_append(out, value->data, value->length);
        else text_append_string(out, "null");
    }
    if (req->is_list) text_append(out, "]", 1);
}

static void put_language(const backend *b, json *j, const char *key, ptrdiff_t language, double confidence) {
    const char *code = language < 0 ? NULL : moetext_model_language(b->model, (size_t)language);
    json_open(j, key, '{');
    json_digits(j, "confidence", 100 * confidence, 3);
    json_text(j, "language", code ? code : "en");
    json_close(j, '}');
}

static void put_detected(server *s, request *req, json *j) {
    if (req->is_list) json_open(j, "detectedLanguage", '[');
    for (size_t i = 0; i < request_count(req); i++) {
        float confidence;
        const ptrdiff_t language = request_language(s, req, i, &confidence);
        put_language(req->backend, j, req->is_list ? NULL : "detectedLanguage", language, (double)confidence);
    }
    if (req->is_list) json_close(j, ']');
}

static enum MHD_Result send_translations(server *s, request *req) {
    json j = { .out = &req->out };
    const size_t n = request_count(req);
    json_open(&j, NULL, '{');
    if (req->is_list) json_open(&j, "translatedText", '[');
    for (size_t i = 0; i < n; i++) put_text(req, &j, req->is_list ? NULL : "translatedText", i, 0);
    if (req->is_list) json_close(&j, ']');
    if (req->alternatives && req->is_list) json_open(&j, "alternatives", '[');
    for (size_t i = 0; i < n && req->alternatives; i++) put_alternatives(req, &j, i);
    if (req->alternatives && req->is_list) json_close(&j, ']');
    if (req->details) put_members(req, "details", offsetof(text_item, details));
    if (req->experts) put_members(req, "experts", offsetof(text_item, experts));
    if (!req->source[0]) put_detected(s, req, &j);
    json_close(&j, '}');
    return send_json(s, req);
}

/* Add the texts finished before a timeout: {"error": "...", "translatedText": ["...", null]}. */
static void put_finished(request *req, json *j) {
    pthread_mutex_lock(&req->server->lock);
    if (req->is_list) json_open(j, "translatedText", '[');
    for (size_t i = 0; i < request_count(req); i++) {
        const size_t first = req->markup ? req->pages[i].first : i;
        const size_t n = req->markup ? moetext_html_count(req->pages[i].document) : 1;
        size_t k = 0;
        while (k < n && req->items[first + k].finished) k++;
        if (k == n) put_text(req, j, req->is_list ? NULL : "translatedText", i, 0);
        else if (req->is_list) json_null(j, NULL);
    }
    if (req->is_list) json_close(j, ']');
    pthread_mutex_unlock(&req->server->lock);
}

static void take_truth(request *req, int *out, const char *name, const char *word) {
    *out = strcmp(word, "true") == 0 || strcmp(word, "1") == 0;
    if (!*out && *word && strcmp(word, "false") != 0 && strcmp(word, "0") != 0)
        bad_request(req, "Invalid request: %s parameter must be true or false", name);
}

/* Read a parameter of LibreTranslate, or an extension of moe-server: details, experts, stream. */
static void take_libre(request *req, const char *name, const char *value, size_t length) {
    char word[40];
    take_word(word, sizeof word, value, length);
    if (strcmp(name, "details") == 0) take_truth(req, &req->details, name, word);
    else if (strcmp(name, "experts") == 0) take_truth(req, &req->experts, name, word);
    else if (strcmp(name, "stream") == 0) take_truth(req, &req->stream, name, word);
    else if (strcmp(name, "format") == 0) {
        req->markup = strcmp(word, "html") == 0 ? MARKUP_HTML : MARKUP_NONE;
        if (!req->markup && *word && strcmp(word, "text") != 0) bad_request(req, "%.40s format is not supported", word);
    } else if (strcmp(name, "alternatives") == 0) {
        char *end;
        const double n = strtod(word, &end);
        if (end == word || *end || length >= sizeof word)
            bad_request(req, "Invalid request: %s parameter is not a number", name);
        else if (!(n >= 0 && n <= (double)MOST_OTHERS) || (double)(int)n < n)
            bad_request(req, "Invalid request: %s parameter must be a whole number from 0 to 64", name);
        else req->alternatives = (int)n;
    }
}

static const dialect libre = { .texts = "q",
                               .source = "source",
                               .target = "target",
                               .take = take_libre,
                               .send = send_translations,
                               .put_finished = put_finished,
                               TRANSLATES };

/* ==== 2. Detect ========================================================================================= */

typedef struct candidate { /* a detected language */
    ptrdiff_t language;
    double confidence, bytes; /* sums over the texts in this language */
    size_t n;
} candidate;

static int by_weight(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    const double p = x->confidence / (double)x->n * x->bytes, q = y->confidence / (double)y->n * y->bytes;
    return p < q ? 1 : p > q ? -1 : x->language < y->language ? -1 : x->language > y->language;
}

/* Send one list for all texts. The list has each detected language once, in descending order of total text length. */
static enum MHD_Result answer_detect(server *s, request *req) {
    const backend *b = req->backend;
    if (!b->detector) return send_error(s, req, MHD_HTTP_NOT_IMPLEMENTED, "language detection is not installed");
    const size_t n_languages = moetext_model_language_count(b->model);
    candidate *found = calloc(n_languages + 1, sizeof *found); /* the last candidate is the unknown language */
    if (!found) return send_error(s, req, MHD_HTTP_SERVICE_UNAVAILABLE, "out of memory; try again");
    size_t n = 0;
    for (size_t i = 0; i < req->n_items; i++) {
        float confidence;
        const ptrdiff_t language = request_language(s, req, i, &confidence);
        candidate *c = &found[language < 0 ? n_languages : (size_t)language];
        c->language = language;
        c->confidence += (double)confidence, c->bytes += (double)req->items[i].length;
        c->n++;
    }
    for (size_t i = 0; i <= n_languages; i++)
        if (found[i].n) found[n++] = found[i];
    qsort(found, n, sizeof *found, by_weight);
    json j = { .out = &req->out };
    json_open(&j, NULL, '[');
    for (size_t i = 0; i < n; i++)
        put_language(req->backend, &j, NULL, found[i].language, found[i].confidence / (double)found[i].n);
    json_close(&j, ']');
    free(found);
    return send_json(s, req);
}

/* ==== 3. Languages and settings ========================================================================= */

static const char *language_name(const char *code) {
    static const char *const names[][2] = {
        { "en", "English" },       { "de", "German" },       { "fr", "French" },       { "es", "Spanish" },
        { "it", "Italian" },       { "pt", "Portuguese" },   { "nl", "Dutch" },        { "pl", "Polish" },
        { "ru", "Russian" },       { "zh", "Chinese" },      { "ja", "Japanese" },     { "ar", "Arabic" },
        { "eng_Latn", "English" }, { "deu_Latn", "German" }, { "fra_Latn", "French" }, { "spa_Latn", "Spanish" },
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(code, names[i][0]) == 0) return names[i][1];
    return code;
}

static void put_named(json *j, const char *key, const char *code, const char *name) {
    json_open(j, key, '{');
    json_text(j, "code", code);
    json_text(j, "name", name);
}

enum {
    MOST_TARGETS = 1000, /* a single model with more languages lists targets only for its first language */
    MOST_NAMED = 200     /* with more languages, several models are not named for each direction */
};

/* Write the names of the models that translate from language `i`: "model", or "models" by targets. */
static void put_models(const backend *b, json *j, size_t i, size_t n) {
    const text_set *set = text_set_of(b->translator);
    char names[2][256];
    text_way way;
    if (!set) json_clean(j, "model", text_model_name(b->name, names[0], sizeof names[0]), strlen(names[0]));
    if (!set || n > MOST_NAMED) return;
    json_open(j, "models", '{');
    for (size_t t = 0; t < n; t++) {
        if (!text_set_hops(set, i, t) || text_set_way(set, i, t, &way, NULL)) continue;
        text_bytes all = { 0 };
        for (size_t k = 0; k < way.n; k++) {
            if (k) text_append_string(&all, " + ");
            text_append_string(&all, text_model_name(text_set_path(set, way.files[k]), names[k], sizeof names[k]));
        }
        json_clean(j, moetext_model_language(b->model, t), all.data ? all.data : "", all.length);
        j->out->failed |= all.failed;
        text_bytes_free(&all);
    }
    json_close(j, '}');
}

static enum MHD_Result answer_languages(server *s, request *req) {
    const backend *b = req->backend;
    json j = { .out = &req->out };
    size_t n = moetext_model_language_count(b->model);
    json_open(&j, NULL, '[');
    for (size_t i = 0; i < n; i++) {
        if (!lists_language(b, i)) continue;
        const char *code = moetext_model_language(b->model, i);
        put_named(&j, NULL, code, language_name(code));
        if (!i || n <= MOST_TARGETS || !moetext_model_engine(b->model)) {
            json_open(&j, "targets", '[');
            for (size_t t = 0; t < n; t++)
                if (lists_direction(b, i, t)) json_text(&j, NULL, moetext_model_language(b->model, t));
            json_close(&j, ']');
        }
        put_models(b, &j, i, n);
        json_close(&j, '}');
    }
    json_close(&j, ']');
    return send_json(s, req);
}

/* Return the first language that is a target of any language, preferably not language 0. */
static size_t first_target(const backend *b, size_t n) {
    for (size_t target = n > 1; target < n; target++)
        for (size_t from = 0; from < n; from++)
            if (lists_direction(b, from, target)) return target;
    return b->named || n < 2 ? 0 : 1;
}

static enum MHD_Result answer_settings(server *s, request *req) {
    const backend *b = req->backend;
    json j = { .out = &req->out };
    size_t n = moetext_model_language_count(b->model);
    const char *target = n ? moetext_model_language(b->model, first_target(b, n)) : "";
    json_open(&j, NULL, '{');
    json_bool(&j, "apiKeys", s->setup->n_keys > 0);
    json_whole(&j, "charLimit", 1024 * (int64_t)s->setup->options.max_body);
    json_bool(&j, "filesTranslation", 1);
    json_whole(&j, "frontendTimeout", 500);
    json_bool(&j, "keyRequired", s->setup->n_keys > 0);
    json_open(&j, "language", '{');
    put_named(&j, "source", "auto", "Auto Detect");
    json_close(&j, '}');
    put_named(&j, "target", target, language_name(target));
    json_close(&j, '}');
    json_close(&j, '}');
    json_bool(&j, "suggestions", 0);
    json_open(&j, "supportedFilesFormat", '[');
    for (size_t i = 0; file_endings[i]; i++) json_text(&j, NULL, file_endings[i]);
    json_close(&j, ']');
    json_close(&j, '}');
    return send_json(s, req);
}

static enum MHD_Result answer_spec(server *s, request *req) {
    for (size_t i = 0; i < sizeof spec_json / sizeof *spec_json; i++) text_append_string(&req->out, spec_json[i]);
    return send_bytes(s, req, MHD_HTTP_OK, "application/json");
}

static enum MHD_Result answer_suggest(server *s, request *req) {
    return send_error(s, req, MHD_HTTP_FORBIDDEN, "Suggestions are disabled on this server.");
}

const route libre_routes[] = {
    { "POST", "/translate", NEEDS_BODY | NEEDS_KEY, answer_translate, &libre },
    { "POST", "/detect", NEEDS_BODY | NEEDS_KEY, answer_detect, &libre },
    { "GET", "/languages", 0, answer_languages, NULL },
    { "GET", "/frontend/settings", 0, answer_settings, NULL },
    { "GET", "/spec", 0, answer_spec, NULL },
    { "POST", "/suggest", 0, answer_suggest, NULL },
    { 0 },
};
