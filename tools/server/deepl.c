/* deepl.c - the interfaces of DeepL and of immersive-translate: other names for what LibreTranslate's has.
 *
 * Contents
 *   1. Languages    as DeepL writes them
 *   2. Parameters   and those that would change a translation in a way that is not to be had
 *   3. Answers
 *   4. Immersive
 */
#include "tools/server/server.h"

#include <string.h>

/* ==== 1. Languages ====================================================================================== */

static const struct {
    const char *code, *name;
    const char *as_target[4]; /* code and name of each that there is in its place; NULL: itself */
} languages[] = {
    { "AR", "Arabic", { NULL } },
    { "BG", "Bulgarian", { NULL } },
    { "CS", "Czech", { NULL } },
    { "DA", "Danish", { NULL } },
    { "DE", "German", { NULL } },
    { "EL", "Greek", { NULL } },
    { "EN", "English", { "EN-GB", "English (British)", "EN-US", "English (American)" } },
    { "ES", "Spanish", { NULL } },
    { "ET", "Estonian", { NULL } },
    { "FI", "Finnish", { NULL } },
    { "FR", "French", { NULL } },
    { "HE", "Hebrew", { NULL } },
    { "HU", "Hungarian", { NULL } },
    { "ID", "Indonesian", { NULL } },
    { "IT", "Italian", { NULL } },
    { "JA", "Japanese", { NULL } },
    { "KO", "Korean", { NULL } },
    { "LT", "Lithuanian", { NULL } },
    { "LV", "Latvian", { NULL } },
    { "NB", "Norwegian", { NULL } },
    { "NL", "Dutch", { NULL } },
    { "PL", "Polish", { NULL } },
    { "PT", "Portuguese", { "PT-PT", "Portuguese (European)", "PT-BR", "Portuguese (Brazilian)" } },
    { "RO", "Romanian", { NULL } },
    { "RU", "Russian", { NULL } },
    { "SK", "Slovak", { NULL } },
    { "SL", "Slovenian", { NULL } },
    { "SV", "Swedish", { NULL } },
    { "TH", "Thai", { NULL } },
    { "TR", "Turkish", { NULL } },
    { "UK", "Ukrainian", { NULL } },
    { "VI", "Vietnamese", { NULL } },
    { "ZH", "Chinese", { NULL } },
    { "ZH-HANT", "Chinese (traditional)", { NULL } },
};
enum { N_LANGUAGES = sizeof languages / sizeof *languages };

/* The number of each of them in the model. */
static void find_languages(const server *s, ptrdiff_t found[N_LANGUAGES]) {
    for (size_t i = 0; i < N_LANGUAGES; i++) found[i] = moetext_model_language_find(s->model, languages[i].code);
}

/* The row of a language of the model, or N_LANGUAGES. */
static size_t row_of(const ptrdiff_t found[N_LANGUAGES], ptrdiff_t language) {
    size_t i = 0;
    while (i < N_LANGUAGES && found[i] != language) i++;
    return i;
}

/* The code of a language of the model: DeepL's, or the model's in capitals. */
static void put_code(const server *s, const ptrdiff_t found[N_LANGUAGES], json *j, const char *key,
                     ptrdiff_t language) {
    const char *code = language < 0 ? NULL : moetext_model_language(s->model, (size_t)language);
    const size_t row = language < 0 ? N_LANGUAGES : row_of(found, language);
    char capitals[64];
    size_t n = 0;
    for (; code && code[n] && n + 1 < sizeof capitals; n++)
        capitals[n] = (char)(code[n] >= 'a' && code[n] <= 'z' ? code[n] - 32 : code[n] == '_' ? '-' : code[n]);
    capitals[n] = 0;
    json_text(j, key, row < N_LANGUAGES ? languages[row].code : code ? capitals : "EN");
}

static void put_language(json *j, const char *code, const char *name, int as_target) {
    json_open(j, NULL, '{');
    json_text(j, "language", code);
    json_text(j, "name", name);
    if (as_target) json_bool(j, "supports_formality", 0);
    json_close(j, '}');
}

/* Whether there is a language to translate into it from, or from it into. */
static int has_ways(const server *s, size_t language, int as_target) {
    const size_t n = moetext_model_language_count(s->model);
    for (size_t i = 0; i < n; i++)
        if (as_target ? moetext_model_hops(s->model, i, language) : moetext_model_hops(s->model, language, i)) return 1;
    return 0;
}

enum MHD_Result deepl_languages(server *s, ask *a) {
    ptrdiff_t found[N_LANGUAGES];
    text_bytes out = { 0 };
    json j = { .out = &out };
    find_languages(s, found);
    json_open(&j, NULL, '[');
    for (size_t i = 0; i < moetext_model_language_count(s->model); i++) {
        if (!has_ways(s, i, a->targets)) continue;
        const size_t row = row_of(found, (ptrdiff_t)i);
        const char *const *targets = row < N_LANGUAGES && a->targets ? languages[row].as_target : NULL;
        const char *code = moetext_model_language(s->model, i);
        if (row == N_LANGUAGES) put_language(&j, code, code, a->targets);
        else if (!targets || !targets[0]) put_language(&j, languages[row].code, languages[row].name, a->targets);
        else
            for (size_t k = 0; k < 4 && targets[k]; k += 2) put_language(&j, targets[k], targets[k + 1], 1);
    }
    json_close(&j, ']');
    text_append_string(&out, "\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

/* ==== 2. Parameters ===================================================================================== */

/* What would make other translations and cannot be done is refused; what does not change them is passed over. */
static const struct {
    const char *name;
    const char *values; /* that are taken, a space before and behind each; NULL: none but an empty one */
    const char *message;
} parameters[] = {
    { "tag_handling", " html xml ", "Value for '%s' not supported: html and xml are." },
    { "split_sentences", " 0 1 nonewlines true false ", "Value for '%s' not supported." },
    { "formality", " default prefer_more prefer_less ", "'%s' is not supported for given 'target_lang'." },
    { "type", " source target ", "Value for '%s' not supported: source and target are." },
    { "glossary_id", NULL, "'%s' is not supported: no glossaries are kept here." },
    { "glossary_ids", NULL, "'%s' is not supported: no glossaries are kept here." },
    { "style_id", NULL, "'%s' is not supported." },
    { "custom_instructions", NULL, "'%s' is not supported." },
    { "translation_memory_id", NULL, "'%s' is not supported." },
    { "ignore_tags", NULL, "'%s' is not supported: say translate=\"no\" in the tags." },
};

static int is_listed(const char *values, const char *value) {
    char spaced[44];
    snprintf(spaced, sizeof spaced, " %s ", value);
    return !*value || (values && !strchr(value, ' ') && strstr(values, spaced));
}

static void take_deepl(ask *a, const char *name, const char *value, size_t length, refusal *r) {
    char word[40];
    take_word(word, sizeof word, value, length);
    for (size_t i = 0; i < sizeof parameters / sizeof *parameters; i++)
        if (strcmp(name, parameters[i].name) == 0 && !is_listed(parameters[i].values, word))
            refuse(r, MHD_HTTP_BAD_REQUEST, parameters[i].message, name);
    if (strcmp(name, "auth_key") == 0) take_word(a->key, sizeof a->key, value, length);
    else if (strcmp(name, "tag_handling") == 0) a->html = strcmp(word, "xml") == 0 ? HTML_XML : *word != 0;
    else if (strcmp(name, "type") == 0) a->targets = strcmp(word, "target") == 0;
    else if (strcmp(name, "show_billed_characters") == 0) a->billed = *word == 't' || *word == '1';
}

/* ==== 3. Answers ======================================================================================== */

enum { QUOTA_EXCEEDED = 456 }; /* DeepL's own */

/* What each text was asked as. */
static const char *source_text(const ask *a, size_t i, size_t *length) {
    *length = a->html ? a->pages[i].length : a->items[i].length;
    return a->html ? a->pages[i].text : a->items[i].text;
}

static enum MHD_Result send_list(server *s, ask *a) {
    const int deepl = api_routes[a->route].speaks == &deepl_texts;
    ptrdiff_t found[N_LANGUAGES];
    text_bytes out = { 0 };
    json j = { .out = &out };
    find_languages(s, found);
    json_open(&j, NULL, '{');
    json_open(&j, "translations", '[');
    for (size_t i = 0; i < ask_count(a); i++) {
        float confidence;
        size_t length;
        const char *source = source_text(a, i, &length);
        const ptrdiff_t language =
            a->source[0] ? moetext_model_language_find(s->model, a->source) : ask_detect(s, a, i, &confidence);
        json_open(&j, NULL, '{');
        if (deepl) put_code(s, found, &j, "detected_source_language", language);
        else
            json_text(&j, "detected_source_lang",
                      language < 0 ? "en" : moetext_model_language(s->model, (size_t)language));
        put_text(a, &j, "text", i, 0);
        if (a->billed) json_whole(&j, "billed_characters", (int64_t)text_utf8_count(source, length));
        json_close(&j, '}');
    }
    json_close(&j, ']');
    json_close(&j, '}');
    text_append_string(&out, "\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

const dialect deepl_texts = { .texts = "text",
                              .source = "source_lang",
                              .target = "target_lang",
                              .error = "message",
                              .beyond = QUOTA_EXCEEDED,
                              .take = take_deepl,
                              .send = send_list };
const dialect deepl_parameters = { .error = "message", .beyond = QUOTA_EXCEEDED, .take = take_deepl };

enum MHD_Result deepl_usage(server *s, ask *a) {
    text_bytes out = { 0 };
    json j = { .out = &out };
    uint64_t count, limit;
    quota_of(s, a, &count, &limit);
    json_open(&j, NULL, '{');
    json_whole(&j, "character_count", (int64_t)count);
    json_whole(&j, "character_limit", (int64_t)limit);
    json_close(&j, '}');
    text_append_string(&out, "\n");
    return send_bytes(s, a, MHD_HTTP_OK, "application/json", &out);
}

/* ==== 4. Immersive ====================================================================================== */

static void take_immersive(ask *a, const char *name, const char *value, size_t length, refusal *r) {
    (void)r;
    if (strcmp(name, "token") == 0) take_word(a->key, sizeof a->key, value, length);
}

const dialect immersive_texts = { .texts = "text_list",
                                  .source = "source_lang",
                                  .target = "target_lang",
                                  .error = "error",
                                  .beyond = MHD_HTTP_TOO_MANY_REQUESTS,
                                  .take = take_immersive,
                                  .send = send_list };
