/* deepl.c - HTTP interfaces of DeepL and immersive-translate.
 *
 * Contents
 *   1. Languages    DeepL's codes
 *   2. Parameters   parse supported parameters, refuse others
 *   3. Answers
 */
#include "tools/server/server.h"

#include <string.h>

/* ==== 1. Languages ====================================================================================== */

static const char *const languages[][2] = {
    { "AR", "Arabic" },     { "BG", "Bulgarian" },
    { "CS", "Czech" },      { "DA", "Danish" },
    { "DE", "German" },     { "EL", "Greek" },
    { "EN", "English" },    { "ES", "Spanish" },
    { "ET", "Estonian" },   { "FI", "Finnish" },
    { "FR", "French" },     { "HE", "Hebrew" },
    { "HU", "Hungarian" },  { "ID", "Indonesian" },
    { "IT", "Italian" },    { "JA", "Japanese" },
    { "KO", "Korean" },     { "LT", "Lithuanian" },
    { "LV", "Latvian" },    { "NB", "Norwegian" },
    { "NL", "Dutch" },      { "PL", "Polish" },
    { "PT", "Portuguese" }, { "RO", "Romanian" },
    { "RU", "Russian" },    { "SK", "Slovak" },
    { "SL", "Slovenian" },  { "SV", "Swedish" },
    { "TH", "Thai" },       { "TR", "Turkish" },
    { "UK", "Ukrainian" },  { "VI", "Vietnamese" },
    { "ZH", "Chinese" },    { "ZH-HANT", "Chinese (traditional)" },
};
enum { N_LANGUAGES = sizeof languages / sizeof *languages };

/* Variants that replace a language in the list of target languages. */
static const char *const variants[][3] = {
    { "EN", "EN-GB", "English (British)" },
    { "EN", "EN-US", "English (American)" },
    { "PT", "PT-PT", "Portuguese (European)" },
    { "PT", "PT-BR", "Portuguese (Brazilian)" },
};

/* Find the index of each DeepL language in the model, or -1. */
static void find_languages(const backend *b, ptrdiff_t found[N_LANGUAGES]) {
    for (size_t i = 0; i < N_LANGUAGES; i++) found[i] = moetext_model_language_find(b->model, languages[i][0]);
}

/* Return the row of a model's language in `languages`, or N_LANGUAGES. */
static size_t row_of(const ptrdiff_t found[N_LANGUAGES], ptrdiff_t language) {
    size_t i = 0;
    while (i < N_LANGUAGES && found[i] != language) i++;
    return i;
}

/* Write DeepL's code for a model's language, or the model's own code in capitals. */
static void put_code(const backend *b, const ptrdiff_t found[N_LANGUAGES], json *j, const char *key,
                     ptrdiff_t language) {
    const char *code = language < 0 ? NULL : moetext_model_language(b->model, (size_t)language);
    const size_t row = language < 0 ? N_LANGUAGES : row_of(found, language);
    char capitals[64];
    size_t n = 0;
    for (; code && code[n] && n + 1 < sizeof capitals; n++)
        capitals[n] = (char)(code[n] >= 'a' && code[n] <= 'z' ? code[n] - 32 : code[n] == '_' ? '-' : code[n]);
    capitals[n] = 0;
    json_text(j, key, row < N_LANGUAGES ? languages[row][0] : code ? capitals : "EN");
}

static void put_language(json *j, const char *code, const char *name, int as_target) {
    json_open(j, NULL, '{');
    json_text(j, "language", code);
    json_text(j, "name", name);
    if (as_target) json_bool(j, "supports_formality", 0);
    json_close(j, '}');
}

/* Return 1 if the model translates from a language or, if as_target is 1, into the language. */
static int has_ways(const backend *b, size_t language, int as_target) {
    const size_t n = moetext_model_language_count(b->model);
    for (size_t i = 0; i < n; i++)
        if (as_target ? lists_direction(b, i, language) : lists_direction(b, language, i)) return 1;
    return 0;
}

static enum MHD_Result send_languages(server *s, request *req) {
    const backend *b = req->backend;
    ptrdiff_t found[N_LANGUAGES];
    json j = { .out = &req->out };
    find_languages(b, found);
    json_open(&j, NULL, '[');
    for (size_t i = 0; i < moetext_model_language_count(b->model); i++) {
        if (!has_ways(b, i, req->targets)) continue;
        const size_t row = row_of(found, (ptrdiff_t)i);
        const char *own = moetext_model_language(b->model, i);
        const char *code = row < N_LANGUAGES ? languages[row][0] : own;
        int varies = 0;
        for (size_t k = 0; req->targets && k < sizeof variants / sizeof *variants; k++)
            if (strcmp(variants[k][0], code) == 0) put_language(&j, variants[k][1], variants[k][2], 1), varies = 1;
        if (!varies) put_language(&j, code, row < N_LANGUAGES ? languages[row][1] : own, req->targets);
    }
    json_close(&j, ']');
    return send_json(s, req);
}

/* ==== 2. Parameters ===================================================================================== */

/* Parameters that would change translations but are not supported; other unknown parameters are ignored. */
static const struct {
    const char *name;
    const char *values; /* accepted values, each between spaces; NULL accepts only an empty value */
    const char *message;
} parameters[] = {
    { "tag_handling", " html xml ", "Value for '%s' not supported; use html or xml." },
    { "split_sentences", " 0 1 nonewlines true false ", "Value for '%s' not supported." },
    { "formality", " default prefer_more prefer_less ", "'%s' is not supported for given 'target_lang'." },
    { "type", " source target ", "Value for '%s' not supported; use source or target." },
    { "glossary_id", NULL, "'%s' is not supported: the server stores no glossaries." },
    { "glossary_ids", NULL, "'%s' is not supported: the server stores no glossaries." },
    { "style_id", NULL, "'%s' is not supported." },
    { "custom_instructions", NULL, "'%s' is not supported." },
    { "translation_memory_id", NULL, "'%s' is not supported." },
};

static int is_listed(const char *values, const char *value) {
    char spaced[44];
    snprintf(spaced, sizeof spaced, " %s ", value);
    return !*value || (values && !strchr(value, ' ') && strstr(values, spaced));
}

/* Add names of tags, separated by commas, to ignore_tags (page_ignores). */
static void take_ignored(request *req, const char *value, size_t length) {
    char *list = req->ignored;
    const size_t n = strlen(list);
    if (n + length + 2 > sizeof req->ignored) {
        bad_request(req, "Value for '%s' not supported: too many tags.", "ignore_tags");
        return;
    }
    memcpy(list + n, value, length);
    memcpy(list + n + length, " ", 2);
    for (char *comma; (comma = strchr(list, ','));) *comma = ' ';
}

static void take_deepl(request *req, const char *name, const char *value, size_t length) {
    char word[40];
    take_word(word, sizeof word, value, length);
    for (size_t i = 0; i < sizeof parameters / sizeof *parameters; i++)
        if (strcmp(name, parameters[i].name) == 0 && !is_listed(parameters[i].values, word))
            bad_request(req, parameters[i].message, name); /* NOLINT: constant formats */
    if (strcmp(name, "ignore_tags") == 0) take_ignored(req, value, length);
    else if (strcmp(name, "auth_key") == 0) take_word(req->key, sizeof req->key, value, length);
    else if (strcmp(name, "tag_handling") == 0)
        req->markup = strcmp(word, "xml") == 0 ? MARKUP_XML : *word ? MARKUP_HTML : MARKUP_NONE;
    else if (strcmp(name, "type") == 0) req->targets = strcmp(word, "target") == 0;
    else if (strcmp(name, "show_billed_characters") == 0) req->billed = *word == 't' || *word == '1';
}

static void take_immersive(request *req, const char *name, const char *value, size_t length) {
    if (strcmp(name, "token") == 0) take_word(req->key, sizeof req->key, value, length);
}

/* ==== 3. Answers ======================================================================================== */

enum { QUOTA_EXCEEDED = 456 }; /* a status that only DeepL uses */

/* Return text or document `i` as the client sent it. */
static const char *source_text(const request *req, size_t i, size_t *length) {
    *length = req->markup ? req->pages[i].length : req->items[i].length;
    return req->markup ? req->pages[i].text : req->items[i].text;
}

/* Send the translations. `member` is the name for each text's language. Use DeepL's language codes if is_deepl is 1. */
static enum MHD_Result send_list(server *s, request *req, const char *member, int is_deepl) {
    const backend *b = req->backend;
    ptrdiff_t found[N_LANGUAGES];
    json j = { .out = &req->out };
    find_languages(b, found);
    json_open(&j, NULL, '{');
    json_open(&j, "translations", '[');
    for (size_t i = 0; i < request_count(req); i++) {
        size_t length;
        const char *source = source_text(req, i, &length);
        const ptrdiff_t language = request_source(s, req, i);
        json_open(&j, NULL, '{');
        if (is_deepl) put_code(b, found, &j, member, language);
        else json_text(&j, member, language < 0 ? "en" : moetext_model_language(b->model, (size_t)language));
        put_text(req, &j, "text", i, 0);
        if (req->billed) json_whole(&j, "billed_characters", (int64_t)text_utf8_count(source, length));
        json_close(&j, '}');
    }
    json_close(&j, ']');
    json_close(&j, '}');
    return send_json(s, req);
}

static enum MHD_Result send_deepl(server *s, request *req) { return send_list(s, req, "detected_source_language", 1); }

static enum MHD_Result send_immersive(server *s, request *req) { return send_list(s, req, "detected_source_lang", 0); }

static enum MHD_Result send_usage(server *s, request *req) {
    json j = { .out = &req->out };
    uint64_t count, limit;
    quota_of(s, req, &count, &limit);
    json_open(&j, NULL, '{');
    json_whole(&j, "character_count", (int64_t)count);
    json_whole(&j, "character_limit", (int64_t)limit);
    json_close(&j, '}');
    return send_json(s, req);
}

static const dialect deepl = { .texts = "text",
                               .source = "source_lang",
                               .target = "target_lang",
                               .error = "message",
                               .quota = QUOTA_EXCEEDED,
                               .take = take_deepl,
                               .send = send_deepl,
                               TRANSLATES };
static const dialect immersive = { .texts = "text_list",
                                   .source = "source_lang",
                                   .target = "target_lang",
                                   .take = take_immersive,
                                   .send = send_immersive,
                                   TRANSLATES };
static const dialect parameters_alone = { .error = "message", .quota = QUOTA_EXCEEDED, .take = take_deepl };

const route deepl_routes[] = {
    { "POST", "/v2/translate", NEEDS_BODY | NEEDS_KEY, answer_translate, &deepl },
    { "GET", "/v2/languages", NEEDS_BODY | NEEDS_KEY, send_languages, &parameters_alone },
    { "POST", "/v2/languages", NEEDS_BODY | NEEDS_KEY, send_languages, &parameters_alone },
    { "POST", "/imme", NEEDS_BODY | NEEDS_KEY, answer_translate, &immersive },
    { "GET", "/v2/usage", NEEDS_BODY | NEEDS_KEY, send_usage, &parameters_alone },
    { "POST", "/v2/usage", NEEDS_BODY | NEEDS_KEY, send_usage, &parameters_alone },
    { 0 },
};
