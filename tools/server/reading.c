/* reading.c - what a request says: JSON, forms and multipart become the texts and parameters of an ask. */
#include "tools/server/server.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

void refuse(refusal *r, unsigned status, const char *format, const char *what) {
    r->status = status;
    snprintf(r->message, sizeof r->message, format, what); /* the formats are constants */
}

void take_word(char *out, size_t size, const char *value, size_t length) {
    if (length > size - 1) length = size - 1;
    memcpy(out, value, length);
    out[length] = 0;
}

int add_text(ask *a, const char *text, size_t length) {
    if (!(a->n_items & (a->n_items + 1)) || !a->items) { /* a power of two less one: the room is full */
        text_item *more = realloc(a->items, (2 * a->n_items + 2) * sizeof *more);
        if (!more) return 0;
        a->items = more;
    }
    text_item *item = &a->items[a->n_items];
    *item = (text_item){ .of = a, .length = length, .text = malloc(length + 1) };
    if (!item->text) return 0;
    memcpy(item->text, text, length);
    item->text[length] = 0;
    a->n_items++;
    return 1;
}

/* What a request is read by. */
typedef struct reader {
    ask *a;
    refusal *r;
    const dialect *speaks;
    size_t max_texts;
    int has_texts; /* the body has some */
} reader;

static int is_texts(const reader *read, const char *name) {
    return read->speaks->texts && strcmp(name, read->speaks->texts) == 0;
}

static int is_context(const reader *read, const char *name) {
    return read->speaks->texts && strcmp(name, "context") == 0;
}

/* A part of what stands before the texts; 0: no memory. */
static int take_context(reader *read, const char *value, size_t length) {
    enum { MOST = 1 << 16 };
    text_bytes *context = &read->a->context;
    if (context->length + length > MOST)
        refuse(read->r, MHD_HTTP_CONTENT_TOO_LARGE, "the %s is too large: at most 64 KB", "context");
    else text_append(context, value, length);
    return !context->failed;
}

/* A parameter by name, but for the texts. */
static void take_parameter(reader *read, const char *name, const char *value, size_t length) {
    const dialect *d = read->speaks;
    ask *a = read->a;
    if (d->source && strcmp(name, d->source) == 0) take_word(a->source, sizeof a->source, value, length);
    else if (d->target && strcmp(name, d->target) == 0) take_word(a->target, sizeof a->target, value, length);
    else if (strcmp(name, "api_key") == 0) take_word(a->key, sizeof a->key, value, length);
    else if (d->texts && strcmp(name, "glossary") == 0)
        refuse(read->r, MHD_HTTP_BAD_REQUEST, "Invalid request: %s is an object of terms, in JSON", name);
    else if (is_context(read, name)) take_context(read, value, length);
    else if (!read->r->status) d->take(a, name, value, length, read->r);
}

static void too_many(reader *read) {
    char number[24];
    snprintf(number, sizeof number, "%zu", read->max_texts);
    refuse(read->r, MHD_HTTP_CONTENT_TOO_LARGE, "too many texts in one request: at most %s", number);
}

/* One more text, if that is not too many and there is memory. */
static int take_text(reader *read, const char *text, size_t length) {
    if (read->r->status) return 0;
    if (read->a->n_items == read->max_texts) return too_many(read), 0;
    if (add_text(read->a, text, length)) return 1;
    refuse(read->r, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory%s", "");
    return 0;
}

static enum MHD_Result take_field(void *closure, enum MHD_ValueKind kind, const char *name, const char *file,
                                  const char *type, const char *encoding, const char *data, uint64_t offset,
                                  size_t size) {
    reader *read = closure;
    ask *a = read->a;
    (void)kind, (void)type, (void)encoding;
    if (!name) return MHD_YES;
    if (is_context(read, name)) return take_context(read, data, size) ? MHD_YES : MHD_NO;
    if (!is_texts(read, name)) {
        if (!offset) take_parameter(read, name, data, size);
        return MHD_YES;
    }
    read->has_texts = 1;
    if (file && !offset && !a->file.length) text_append(&a->file, file, strlen(file));
    if (!offset) return take_text(read, data, size) ? MHD_YES : MHD_NO;
    text_item *item = &a->items[a->n_items - 1]; /* a later part of the same value */
    char *more = realloc(item->text, item->length + size + 1);
    if (!more) return MHD_NO;
    item->text = more;
    memcpy(item->text + item->length, data, size);
    item->text[item->length += size] = 0;
    return MHD_YES;
}

/* A parameter of the address; texts count where a form has none. */
static enum MHD_Result take_argument(void *closure, enum MHD_ValueKind kind, const char *name, size_t name_size,
                                     const char *value, size_t size) {
    reader *read = closure;
    (void)kind, (void)name_size;
    if (!value) return MHD_YES;
    if (!is_texts(read, name)) take_parameter(read, name, value, size);
    else if (!read->has_texts && !take_text(read, value, size)) return MHD_NO;
    return MHD_YES;
}

static void read_form(reader *read) {
    ask *a = read->a;
    refusal *r = read->r;
    if (a->body.length) {
        a->form = MHD_create_post_processor(a->connection, 1024, take_field, read);
        if (!a->form) {
            refuse(r, MHD_HTTP_UNSUPPORTED_MEDIA_TYPE, "send JSON, a form or multipart/form-data%s", "");
            return;
        }
        if (MHD_post_process(a->form, a->body.data, a->body.length) != MHD_YES && !r->status)
            refuse(r, MHD_HTTP_BAD_REQUEST, "this is no form that can be read%s", "");
        MHD_destroy_post_processor(a->form); /* it hands over what it still holds */
        a->form = NULL;
    }
    MHD_get_connection_values_n(a->connection, MHD_GET_ARGUMENT_KIND, take_argument, read);
    a->is_list = a->n_items > 1;
}

/* How many values JSON can hold: the commas and opening brackets outside its texts, and one. */
static size_t count_values(const text_bytes *body) {
    size_t n = 1;
    int inside = 0;
    for (size_t i = 0; body->data && i < body->length; i++) {
        if (inside && body->data[i] == '\\') i++;
        else if (body->data[i] == '"') inside = !inside;
        else n += !inside && (body->data[i] == ',' || body->data[i] == '[' || body->data[i] == '{');
    }
    return n;
}

/* Whether JSON writes U+0000 somewhere, behind which cJSON loses the rest of a text. */
static int names_nul(const text_bytes *body) {
    for (size_t i = 0; body->data && i + 6 <= body->length; i++) {
        if (body->data[i] != '\\') continue;
        if (memcmp(body->data + i, "\\u0000", 6) == 0) return 1;
        i++; /* what is escaped begins nothing */
    }
    return 0;
}

/* Whether nothing but white space is left of JSON. */
static int at_end(const char *at, const char *end) {
    while (at < end && strchr(" \t\r\n", *at)) at++;
    return at == end;
}

enum {
    MOST_MEMBERS = 100, /* of a request's object, beside its texts */
    MOST_TERMS = 1000,  /* of its glossary, */
    TERM_BYTES = 65536, /* and of them together */
    MOST_VALUES = 10000 /* of an interface that has no such texts: 1000 messages of some parts each */
};

/* A member of the request's object, but for the texts; a list of words is the words with commas. */
static void take_member(reader *read, const cJSON *member) {
    text_bytes words = { 0 };
    const cJSON *word;
    char number[32];
    /* As it is: what is no whole number, or none of a size that can be meant, must not look like one. */
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
    if (words.failed) refuse(read->r, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory%s", "");
    else take_parameter(read, member->string, words.data, words.length);
    text_bytes_free(&words);
}

/* A glossary: {term: translation}. */
static void take_glossary(reader *read, const cJSON *glossary) {
    const cJSON *term;
    cJSON_ArrayForEach(term, glossary) {
        if (!cJSON_IsString(term))
            refuse(read->r, MHD_HTTP_BAD_REQUEST, "Invalid request: %s has a translation that is no text", "glossary");
        else if (read->a->n_terms == MOST_TERMS)
            refuse(read->r, MHD_HTTP_CONTENT_TOO_LARGE, "too many terms in one %s: at most 1000", "glossary");
        if (read->r->status) return;
        const size_t bytes = strlen(term->string) + strlen(term->valuestring) + 2;
        if (read->a->terms.length + bytes > TERM_BYTES)
            refuse(read->r, MHD_HTTP_CONTENT_TOO_LARGE, "the %s is too large: at most 64 KB", "glossary");
        if (read->r->status) return;
        text_append(&read->a->terms, term->string, strlen(term->string) + 1);
        text_append(&read->a->terms, term->valuestring, strlen(term->valuestring) + 1);
        read->a->n_terms++;
    }
    if (read->a->terms.failed) refuse(read->r, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory%s", "");
}

/* The texts: one, or a list of them. */
static void take_texts(reader *read, const cJSON *texts) {
    const cJSON *text;
    read->a->is_list = cJSON_IsArray(texts);
    if (cJSON_IsString(texts)) take_text(read, texts->valuestring, strlen(texts->valuestring));
    else if (read->a->is_list) cJSON_ArrayForEach(text, texts) {
            if (read->r->status) break;
            if (!cJSON_IsString(text))
                refuse(read->r, MHD_HTTP_BAD_REQUEST, "Invalid request: %s holds what is no text", read->speaks->texts);
            else take_text(read, text->valuestring, strlen(text->valuestring));
        }
}

/* The texts and parameters of an object. */
static void take_members(reader *read, const cJSON *all) {
    const dialect *d = read->speaks;
    const cJSON *member;
    cJSON_ArrayForEach(member, all) {
        if (!member->string || read->r->status || cJSON_IsNull(member) || is_texts(read, member->string)) continue;
        if (d->texts && cJSON_IsObject(member) && strcmp(member->string, "glossary") == 0) take_glossary(read, member);
        else if (is_context(read, member->string) && !cJSON_IsString(member))
            refuse(read->r, MHD_HTTP_BAD_REQUEST, "Invalid request: %s is no text", "context");
        else take_member(read, member);
    }
    if (!read->r->status && d->texts) take_texts(read, cJSON_GetObjectItemCaseSensitive(all, d->texts));
}

static void read_json(reader *read) {
    ask *a = read->a;
    refusal *r = read->r;
    const char *data = a->body.data ? a->body.data : "", *behind = data;
    const int raw_nul = memchr(data, 0, a->body.length) != NULL; /* where cJSON would end a text */
    const size_t n_values = count_values(&a->body);              /* before one of 2 bytes takes 64 of memory */
    if (read->speaks->read && n_values > MOST_VALUES)
        refuse(r, MHD_HTTP_CONTENT_TOO_LARGE, "too many values in one request: at most 10000%s", "");
    else if (!read->speaks->read && n_values > read->max_texts + MOST_MEMBERS + MOST_TERMS) too_many(read);
    if (r->status) return;
    read->has_texts = 1;
    if (!read->speaks->read) MHD_get_connection_values_n(a->connection, MHD_GET_ARGUMENT_KIND, take_argument, read);
    cJSON *all = raw_nul ? NULL : cJSON_ParseWithLengthOpts(data, a->body.length, &behind, 0);
    if (raw_nul) refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: a NUL byte in JSON%s", "");
    else if (!cJSON_IsObject(all)) refuse(r, MHD_HTTP_BAD_REQUEST, "the request is no JSON object%s", "");
    else if (!at_end(behind, data + a->body.length))
        refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: something stands behind the JSON object%s", "");
    else if (names_nul(&a->body)) refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: a text holds U+0000%s", "");
    else if (read->speaks->read) read->speaks->read(a, all, r);
    else take_members(read, all);
    cJSON_Delete(all);
}

void read_body(ask *a, size_t max_texts, refusal *r) {
    const dialect *d = api_routes[a->route].speaks;
    reader read = { .a = a, .r = r, .speaks = d, .max_texts = max_texts };
    const char *type = MHD_lookup_connection_value(a->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_TYPE);
    if (d->read || (type && strncasecmp(type, "application/json", 16) == 0)) read_json(&read);
    else read_form(&read);
    text_bytes_free(&a->body);
    a->body = (text_bytes){ 0 };
    if (!r->status && d->texts && !a->n_items && !a->is_list)
        refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: missing %s parameter", d->texts);
    if (!r->status && a->context.length &&
        (text_utf8_valid(a->context.data, a->context.length) < a->context.length ||
         memchr(a->context.data, '\0', a->context.length)))
        refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: %s is not UTF-8, or has a NUL byte", "context");
    if (!r->status && a->context.failed) refuse(r, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory%s", "");
    for (size_t i = 0; i < a->n_items && !r->status; i++)
        if (text_utf8_valid(a->items[i].text, a->items[i].length) != a->items[i].length)
            refuse(r, MHD_HTTP_BAD_REQUEST, "Invalid request: %s is not UTF-8", d->texts);
}
