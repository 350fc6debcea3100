/* reading.c - parse requests: JSON, forms and multipart become texts and parameters. */
#include "tools/server/server.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

void refuse(request *req, unsigned status, const char *format, ...) {
    va_list arguments;
    req->refusal = status;
    va_start(arguments, format);
    vsnprintf(req->why, sizeof req->why, format, arguments);
    va_end(arguments);
}

void refuse_memory(request *req) { refuse(req, MHD_HTTP_SERVICE_UNAVAILABLE, "out of memory; try again"); }

void take_word(char *out, size_t size, const char *value, size_t length) {
    if (length > size - 1) length = size - 1;
    memcpy(out, value, length);
    out[length] = 0;
}

int add_text(request *req, const char *text, size_t length) {
    if (!(req->n_items & (req->n_items + 1)) || !req->items) { /* the array, which has 2^n - 1 items, is full */
        text_item *more = realloc(req->items, (2 * req->n_items + 2) * sizeof *more);
        if (!more) return 0;
        req->items = more;
    }
    text_item *item = &req->items[req->n_items];
    *item = (text_item){ .request = req, .length = length, .text = text_copy(text, length) };
    req->n_items += item->text != NULL;
    return item->text != NULL;
}

void items_free(text_item *items, size_t n) {
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < items[i].n_others; k++) text_bytes_free(&items[i].others[k]);
        free(items[i].others);
        free(items[i].text);
        text_bytes_free(&items[i].answer);
        text_bytes_free(&items[i].details);
        text_bytes_free(&items[i].experts);
        experts_free(items[i].collected);
    }
    free(items);
}

static int is_texts(const request *req, const char *name) {
    return req->route->dialect->texts && strcmp(name, req->route->dialect->texts) == 0;
}

static int is_context(const request *req, const char *name) {
    return req->route->dialect->texts && strcmp(name, "context") == 0;
}

/* Append to the context that precedes the texts. Return 0 if out of memory. */
static int take_context(request *req, const char *value, size_t length) {
    enum { MOST = 1 << 16 };
    text_bytes *context = &req->context;
    if (context->length + length > MOST)
        refuse(req, MHD_HTTP_CONTENT_TOO_LARGE, "the context is too large; the limit is 64 KB");
    else text_append(context, value, length);
    return !context->failed;
}

/* Read a parameter other than the texts. */
static void take_parameter(request *req, const char *name, const char *value, size_t length) {
    const dialect *d = req->route->dialect;
    if (d->source && strcmp(name, d->source) == 0) take_word(req->source, sizeof req->source, value, length);
    else if (d->target && strcmp(name, d->target) == 0) take_word(req->target, sizeof req->target, value, length);
    else if (strcmp(name, "api_key") == 0) take_word(req->key, sizeof req->key, value, length);
    else if (d->texts && (strcmp(name, "glossary") == 0 || strcmp(name, "memory") == 0))
        bad_request(req, "Invalid request: %s must be a JSON object of %s", name, *name == 'g' ? "terms" : "texts");
    else if (is_context(req, name)) take_context(req, value, length);
    else if (!req->refusal && d->take) d->take(req, name, value, length);
}

static void too_many(request *req) {
    refuse(req, MHD_HTTP_CONTENT_TOO_LARGE, "too many texts in one request; the limit is %d",
           req->server->setup->options.max_texts);
}

int take_text(request *req, const char *text, size_t length) {
    if (req->refusal) return 0;
    if (req->n_items == (size_t)req->server->setup->options.max_texts) too_many(req);
    else if (!add_text(req, text, length)) refuse_memory(req);
    return !req->refusal;
}

static enum MHD_Result take_field(void *closure, enum MHD_ValueKind kind, const char *name, const char *file,
                                  const char *type, const char *encoding, const char *data, uint64_t offset,
                                  size_t size) {
    request *req = closure;
    (void)kind, (void)type, (void)encoding;
    if (!name) return MHD_YES;
    if (is_context(req, name)) return take_context(req, data, size) ? MHD_YES : MHD_NO;
    if (!is_texts(req, name)) {
        if (!offset) take_parameter(req, name, data, size);
        return MHD_YES;
    }
    req->has_texts = 1;
    if (file && !offset && !req->file.length) text_append(&req->file, file, strlen(file));
    if (!offset) return take_text(req, data, size) ? MHD_YES : MHD_NO;
    text_item *item = &req->items[req->n_items - 1]; /* `data` continues the last text */
    char *more = realloc(item->text, item->length + size + 1);
    if (!more) return MHD_NO;
    item->text = more;
    memcpy(item->text + item->length, data, size);
    item->text[item->length += size] = 0;
    return MHD_YES;
}

/* Read a URL parameter; texts in the URL are used only if the body has none. */
static enum MHD_Result take_argument(void *closure, enum MHD_ValueKind kind, const char *name, size_t name_size,
                                     const char *value, size_t size) {
    request *req = closure;
    (void)kind, (void)name_size;
    if (!value) return MHD_YES;
    if (!is_texts(req, name)) take_parameter(req, name, value, size);
    else if (!req->has_texts && !take_text(req, value, size)) return MHD_NO;
    return MHD_YES;
}

static void read_form(request *req) {
    if (req->body.length) {
        req->form = MHD_create_post_processor(req->connection, 1024, take_field, req);
        if (!req->form) {
            refuse(req, MHD_HTTP_UNSUPPORTED_MEDIA_TYPE,
                   "unsupported content type: send JSON, a form or multipart/form-data");
            return;
        }
        if (MHD_post_process(req->form, req->body.data, req->body.length) != MHD_YES && !req->refusal)
            bad_request(req, "the form cannot be parsed");
        MHD_destroy_post_processor(req->form); /* passes buffered data to take_field */
        req->form = NULL;
    }
    MHD_get_connection_values_n(req->connection, MHD_GET_ARGUMENT_KIND, take_argument, req);
    req->is_list = req->n_items > 1;
}

/* Return an upper bound on the number of values in JSON: 1, plus the commas and opening brackets outside strings. Set
 * *has_nul to 1 if a string contains an escaped U+0000, where cJSON would truncate the string. */
static size_t count_values(const text_bytes *body, int *has_nul) {
    size_t n = 1;
    int inside = 0;
    for (size_t i = 0; body->data && i < body->length; i++) {
        if (inside && body->data[i] == '\\') {
            *has_nul |= i + 6 <= body->length && memcmp(body->data + i, "\\u0000", 6) == 0;
            i++; /* skip the escaped character */
        } else if (body->data[i] == '"') inside = !inside;
        else n += !inside && (body->data[i] == ',' || body->data[i] == '[' || body->data[i] == '{');
    }
    return n;
}

/* Return 1 if only white space remains. */
static int at_end(const char *at, const char *end) {
    while (at < end && strchr(" \t\r\n", *at)) at++;
    return at == end;
}

enum {
    MOST_MEMBERS = 100, /* maximum members of a request, excluding texts */
    MOST_TERMS = 1000,  /* maximum terms of a glossary */
    TERM_BYTES = 65536, /* maximum bytes of all terms */
    MOST_VALUES = 10000 /* maximum values of a chat request: 1000 messages of several parts */
};

/* Read a member other than the texts. Join a list of words with commas. */
static void take_member(request *req, const cJSON *member) {
    text_bytes words = { 0 };
    const cJSON *word;
    char number[32];
    /* Print all digits, so that a fraction or a huge number does not look like a valid integer. */
    snprintf(number, sizeof number, "%.17g", cJSON_IsNumber(member) ? member->valuedouble : 0);
    text_append(&words, "", 0);
    if (cJSON_IsArray(member)) cJSON_ArrayForEach(word, member) {
            if (!cJSON_IsString(word)) continue;
            if (words.length) text_append(&words, ",", 1);
            text_append_string(&words, word->valuestring);
        }
    else
        text_append_string(&words, cJSON_IsString(member)   ? member->valuestring
                                   : cJSON_IsTrue(member)   ? "true"
                                   : cJSON_IsObject(member) ? "{}"
                                                            : number);
    if (words.failed) refuse_memory(req);
    else take_parameter(req, member->string, words.data, words.length);
    text_bytes_free(&words);
}

/* Read a glossary or a translation memory: an object {"text": "translation", ...}. */
static void take_pairs(request *req, const cJSON *pairs, text_bytes *texts, size_t *n) {
    const cJSON *term;
    cJSON_ArrayForEach(term, pairs) {
        const size_t bytes = cJSON_IsString(term) ? strlen(term->string) + strlen(term->valuestring) + 2 : 0;
        if (!bytes) bad_request(req, "Invalid request: the translations of %s must be texts", pairs->string);
        else if (*n == MOST_TERMS)
            refuse(req, MHD_HTTP_CONTENT_TOO_LARGE, "too many terms in one %s; the limit is 1000", pairs->string);
        else if (texts->length + bytes > TERM_BYTES)
            refuse(req, MHD_HTTP_CONTENT_TOO_LARGE, "the %s is too large; the limit is 64 KB", pairs->string);
        if (req->refusal) return;
        text_append(texts, term->string, strlen(term->string) + 1);
        text_append(texts, term->valuestring, strlen(term->valuestring) + 1);
        ++*n;
    }
    if (texts->failed) refuse_memory(req);
}

/* Read the texts: a string or a list of strings. */
static void take_texts(request *req, const cJSON *texts) {
    const cJSON *text;
    req->is_list = cJSON_IsArray(texts);
    if (cJSON_IsString(texts)) take_text(req, texts->valuestring, strlen(texts->valuestring));
    else if (req->is_list) cJSON_ArrayForEach(text, texts) {
            if (req->refusal) break;
            if (!cJSON_IsString(text))
                bad_request(req, "Invalid request: %s must contain only texts", req->route->dialect->texts);
            else take_text(req, text->valuestring, strlen(text->valuestring));
        }
}

/* Read the members of the request. */
static void take_members(request *req, const cJSON *all) {
    const dialect *d = req->route->dialect;
    const cJSON *member;
    cJSON_ArrayForEach(member, all) {
        if (!member->string || req->refusal || cJSON_IsNull(member) || is_texts(req, member->string)) continue;
        if (d->texts && cJSON_IsObject(member) && strcmp(member->string, "glossary") == 0)
            take_pairs(req, member, &req->terms, &req->n_terms);
        else if (d->texts && cJSON_IsObject(member) && strcmp(member->string, "memory") == 0)
            take_pairs(req, member, &req->confirmed, &req->n_confirmed);
        else if (is_context(req, member->string) && !cJSON_IsString(member))
            bad_request(req, "Invalid request: context must be a string");
        else take_member(req, member);
    }
    if (!req->refusal && d->texts) take_texts(req, cJSON_GetObjectItemCaseSensitive(all, d->texts));
}

static _Thread_local int no_memory; /* 1 if cJSON ran out of memory, which it reports as a syntax error */

static void *json_malloc(size_t size) {
    void *block = malloc(size);
    no_memory |= !block;
    return block;
}

void reading_begin(void) { cJSON_InitHooks(&(cJSON_Hooks){ json_malloc, free }); }

static void read_json(request *req) {
    const dialect *d = req->route->dialect;
    const char *data = req->body.data ? req->body.data : "", *end = data;
    const int raw_nul = memchr(data, 0, req->body.length) != NULL; /* cJSON would truncate the string */
    int has_nul = 0;
    const size_t n_values =
        count_values(&req->body, &has_nul); /* count before parsing: cJSON needs 64 bytes for a value of 2 bytes */
    if (d->read && n_values > MOST_VALUES)
        refuse(req, MHD_HTTP_CONTENT_TOO_LARGE, "too many values in one request; the limit is 10000");
    else if (!d->read && n_values > (size_t)req->server->setup->options.max_texts + MOST_MEMBERS + 2 * MOST_TERMS)
        too_many(req);
    if (req->refusal) return;
    req->has_texts = 1;
    if (!d->read) MHD_get_connection_values_n(req->connection, MHD_GET_ARGUMENT_KIND, take_argument, req);
    no_memory = 0;
    cJSON *all = raw_nul ? NULL : cJSON_ParseWithLengthOpts(data, req->body.length, &end, 0);
    if (raw_nul) bad_request(req, "Invalid request: a NUL byte in JSON");
    else if (!all && no_memory) refuse_memory(req);
    else if (!cJSON_IsObject(all)) bad_request(req, "the request is not a JSON object");
    else if (!at_end(end, data + req->body.length))
        bad_request(req, "Invalid request: unexpected data after the JSON object");
    else if (has_nul) bad_request(req, "Invalid request: a text contains U+0000");
    else if (d->read) d->read(req, all);
    else take_members(req, all);
    cJSON_Delete(all);
}

cJSON *parse_text(request *req, const char *data, size_t length) {
    const text_bytes text = { (char *)(uintptr_t)data, length, 0, 0 };
    const char *end = data;
    int has_nul = 0;
    if (count_values(&text, &has_nul) > MOST_VALUES)
        refuse(req, MHD_HTTP_CONTENT_TOO_LARGE, "too many values in the JSON of a message; the limit is 10000");
    if (has_nul || req->refusal) return NULL;
    no_memory = 0;
    cJSON *all = cJSON_ParseWithLengthOpts(data, length, &end, 0);
    if (!all && no_memory) refuse_memory(req);
    if (all && at_end(end, data + length)) return all;
    cJSON_Delete(all);
    return NULL;
}

/* Return 1 for application/json, with or without parameters. JSON is accepted only with this type, which pages of other
 * origins cannot send without permission. */
static int is_json(const char *type) {
    static const char json_type[] = "application/json";
    const size_t n = sizeof json_type - 1;
    return type && strncasecmp(type, json_type, n) == 0 && (!type[n] || strchr("; \t", type[n]));
}

void read_body(request *req) {
    const dialect *d = req->route->dialect;
    const char *type = MHD_lookup_connection_value(req->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_TYPE);
    if (d->read && type && !is_json(type))
        refuse(req, MHD_HTTP_UNSUPPORTED_MEDIA_TYPE,
               "unsupported content type: send JSON with the header Content-Type: application/json");
    else if (d->read || (is_json(type) && req->body.length)) read_json(req);
    else read_form(req);
    if (!req->refusal && d->texts && !req->n_items && !req->is_list)
        bad_request(req, "Invalid request: missing %s parameter", d->texts);
    if (!req->refusal && !text_is_usable(req->context.data, req->context.length))
        bad_request(req, "Invalid request: context is not valid UTF-8 or contains a NUL byte");
    if (!req->refusal && req->context.failed) refuse_memory(req);
    for (size_t i = 0; i < req->n_items && !req->refusal; i++)
        if (text_utf8_valid(req->items[i].text, req->items[i].length) != req->items[i].length)
            bad_request(req, "Invalid request: %s is not valid UTF-8", d->texts);
}
