/* prompts.c - see prompts.h */
#include "tools/convert/prompts.h"
#include "tools/get/sha256.h"

#include "prompts-json.inc" /* prompts.json, made by the Makefile */

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST_PIECE = 1 << 14 };

const char *const prompt_token_names[PROMPT_TOKENS] = { "bos_token", "eos_token", "pad_token", "unk_token",
                                                        "sep_token", "cls_token", "mask_token" };
static const char *const piece_names[PROMPT_PIECES] = {
    "prefix", "suffix", "system.prefix", "system.suffix", "answer.prefix", "answer.suffix", "end"
};

/* Parse prompts.json; NULL if out of memory. */
static cJSON *open_data(void) {
    text_bytes text = { 0 };
    for (size_t i = 0; i < sizeof prompts_json / sizeof *prompts_json; i++) text_append_string(&text, prompts_json[i]);
    cJSON *data = text.failed ? NULL : cJSON_ParseWithLength(text.data, text.length);
    text_bytes_free(&text);
    return data;
}

static const char *string(const cJSON *object, const char *key) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsString(value) ? value->valuestring : "";
}

static const cJSON *member(const cJSON *object, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

/* Return 1 if a list of texts is empty or contains the text. */
static int fits(const cJSON *list, const char *text) {
    const cJSON *x;
    if (!cJSON_GetArraySize(list)) return 1;
    cJSON_ArrayForEach(x, list) if (cJSON_IsString(x) && strcmp(x->valuestring, text) == 0) return 1;
    return 0;
}

/* Return 1 if a text begins with a word, which is in lower case, ignoring case. */
static int begins_with(const char *text, const char *word) {
    for (; *word; text++, word++)
        if ((*text >= 'A' && *text <= 'Z' ? *text + 32 : *text) != *word) return 0;
    return 1;
}

/* Return 1 if the name contains a word of the list, ignoring case, or if the list is empty. */
static int has_word(const cJSON *words, const char *name) {
    const cJSON *word;
    if (!cJSON_GetArraySize(words)) return 1;
    for (const char *at = name; *at; at++)
        cJSON_ArrayForEach(word, words) if (cJSON_IsString(word) && *word->valuestring &&
                                            begins_with(at, word->valuestring)) return 1;
    return 0;
}

/* Return the row of a model. */
static const cJSON *row_of(const cJSON *data, prompt_model model) {
    const cJSON *row;
    cJSON_ArrayForEach(row, member(data, "rows")) if (fits(member(row, "families"), model.family) &&
                                                      has_word(member(row, "words"), model.name)) return row;
    return NULL;
}

/* Return the row of a template, or NULL. Settings in a model's row change what its template renders. */
static const cJSON *find_row(const cJSON *data, moe_span template, prompt_model model) {
    const cJSON *own = row_of(data, model);
    const char *name = member(own, "settings") ? string(own, "name") : "";
    char hash[SHA256_TEXT];
    sha256 s;
    const cJSON *row;
    sha256_begin(&s);
    sha256_add(&s, template.data, template.length);
    sha256_end(&s, hash);
    cJSON_ArrayForEach(row, member(data, "templates")) if (strcmp(string(row, "sha256"), hash) == 0 &&
                                                           fits(member(row, "families"), model.family) &&
                                                           strcmp(string(row, "row"), name) == 0) return row;
    return NULL;
}

int prompts_known(moe_span template, prompt_model model) {
    cJSON *data = open_data();
    const int known = data && (member(row_of(data, model), "pieces") || find_row(data, template, model));
    cJSON_Delete(data);
    return known;
}

/* Copy a piece, with the texts of special tokens in place of their names in braces. NULL after an error. */
static char *fill_in(making *m, const char *file, const char *piece, const char *const tokens[PROMPT_TOKENS]) {
    text_bytes out = { 0 };
    for (const char *at = piece; *at;) {
        size_t k = 0, length = 0;
        for (; *at == '{' && k < PROMPT_TOKENS; k++) {
            length = strlen(prompt_token_names[k]);
            if (strncmp(at + 1, prompt_token_names[k], length) == 0 && at[1 + length] == '}') break;
        }
        if (*at != '{' || k == PROMPT_TOKENS) {
            text_append(&out, at++, 1);
        } else if (!tokens[k]) {
            making_unsupported(m, file, "the prompt contains %s, which is undefined", prompt_token_names[k]);
            break;
        } else {
            text_append_string(&out, tokens[k]);
            at += length + 2;
        }
    }
    if (out.failed) making_no_memory(m);
    if (out.length > LONGEST_PIECE) making_refuse(m, file, "a special token of the chat template is too long");
    char *copy = making_keep(m, out.length ? out.data : "", out.length);
    text_bytes_free(&out);
    return copy;
}

int prompts_find(making *m, const char *file, moe_span template, const char *const tokens[PROMPT_TOKENS],
                 prompt_model model, prompt_pieces *out) {
    cJSON *data = open_data();
    const cJSON *row = data ? row_of(data, model) : NULL;
    if (!data) return making_no_memory(m);
    out->bare = !*string(member(row, "pieces"), "prefix") && member(row, "pieces");
    if (!member(row, "pieces")) {
        row = template.data ? find_row(data, template, model) : NULL;
        if (template.data && text_utf8_valid(template.data, template.length) < template.length)
            making_refuse(m, file, "not valid UTF-8: download it again");
        else if (!row && template.data) making_unsupported(m, file, "unknown chat template");
    }
    for (int i = 0; row && i < PROMPT_PIECES; i++) {
        const cJSON *piece = member(member(row, "pieces"), piece_names[i]);
        if (cJSON_IsString(piece)) out->texts[i] = fill_in(m, file, piece->valuestring, tokens);
    }
    cJSON_Delete(data);
    return m->status == MOE_OK;
}

static void put_list(making *m, const cJSON *list, const char *key, int column) {
    const size_t n = (size_t)cJSON_GetArraySize(list);
    moe_span *texts = making_keep(m, NULL, n * sizeof *texts);
    const cJSON *x;
    size_t i = 0;
    if (!texts) return;
    cJSON_ArrayForEach(x, list) {
        const cJSON *text = column < 0 ? x : cJSON_GetArrayItem(x, column);
        if (!text) text = cJSON_GetArrayItem(x, 1); /* the English name */
        const char *data = cJSON_IsString(text) ? text->valuestring : "";
        texts[i++] = (moe_span){ data, strlen(data) };
    }
    making_put_texts(m, key, texts, n, 0);
}

static void put_copy(making *m, const char *key, const char *text) {
    making_put_text(m, key, making_keep(m, text, strlen(text)));
}

static void put_row(making *m, const cJSON *data, const cJSON *row) {
    const cJSON *wording, *own = member(row, "languages"), *languages = own ? own : member(data, "languages");
    char key[64];
    const size_t n = (size_t)cJSON_GetArraySize(languages);
    int64_t *tags = making_keep(m, NULL, n * sizeof *tags);
    put_copy(m, "prompt.name", string(row, "name"));
    cJSON_ArrayForEach(wording, member(row, "wordings")) {
        snprintf(key, sizeof key, "prompt.%.50s", wording->string);
        put_copy(m, key, cJSON_IsString(wording) ? wording->valuestring : "");
    }
    put_list(m, member(data, "chinese"), "prompt.chinese", -1);
    put_list(m, languages, "languages.codes", 0);
    for (size_t i = 0; tags && i < n; i++) tags[i] = (int64_t)i;
    making_put_ints(m, "languages.tags", tags, n);
    making_put_int(m, "source.tag", 0);
    put_list(m, languages, "languages.english", 1);
    put_list(m, languages, "languages.chinese", 2);
}

/* Return the number of letters at the beginning of a text. */
static size_t letters(moe_span text) {
    size_t n = 0;
    while (n < text.length &&
           ((text.data[n] >= 'a' && text.data[n] <= 'z') || (text.data[n] >= 'A' && text.data[n] <= 'Z')))
        n++;
    return n;
}

/* Return 1 if a text looks like de, deu, pt-BR or deu_Latn. */
static int is_code(moe_span text) {
    const size_t n = letters(text);
    if (n < 2 || n > 3 || text.length == n) return n == text.length && n >= 2 && n <= 3;
    const moe_span rest = { text.data + n + 1, text.length - n - 1 };
    return (text.data[n] == '-' || text.data[n] == '_') && rest.length >= 2 && rest.length <= 4 &&
           letters(rest) == rest.length;
}

/* Put the languages that the authors of a general model name; "multilingual" is not a code. */
static void put_named(making *m, const moe_span *named, size_t n) {
    text_bytes all = { 0 };
    for (size_t i = 0; i < n; i++) {
        if (!is_code(named[i])) n = 0;
        if (i) text_append(&all, " ", 1);
        text_append(&all, named[i].data, named[i].length);
    }
    const char *copy = n && !all.failed ? making_keep(m, all.data, all.length) : NULL;
    if (all.failed) making_no_memory(m);
    if (copy) making_put_text(m, "languages.named", copy);
    text_bytes_free(&all);
}

int prompts_put(making *m, const prompt_pieces *pieces, prompt_model model, const moe_span *named, size_t n_named) {
    char key[64];
    cJSON *data = open_data();
    const cJSON *found = data ? row_of(data, model) : NULL;
    if (!data) making_no_memory(m);
    for (int i = 0; i < PROMPT_PIECES; i++) {
        if (!pieces->texts[i]) continue;
        snprintf(key, sizeof key, "prompt.%s", piece_names[i]);
        making_put_text(m, key, pieces->texts[i]);
    }
    if (found) put_row(m, data, found);
    if (found && strcmp(string(found, "name"), "general") == 0) put_named(m, named, n_named);
    cJSON_Delete(data);
    return m->status == MOE_OK;
}
