/* json.c - see json.h. */
#include "tools/text/json.h"

#include <math.h>
#include <string.h>

/* Return the length of the character at `at` if it must be escaped, otherwise 0. */
static size_t escaped_bytes(const json *j, const char *data, size_t length, size_t at) {
    const unsigned char c = (unsigned char)data[at];
    if (c < 0x20 || c == '"' || c == '\\') return 1;
    if (!j->script) return 0;
    if (c == 0x7F || strchr("<>&'", c)) return 1;
    return length - at >= 3 && memcmp(data + at, "\xE2\x80", 2) == 0 && ((unsigned char)data[at + 2] & 0xFE) == 0xA8
               ? 3 /* U+2028 and U+2029 end a line for JavaScript */
               : 0;
}

static void put_escape(json *j, const char *data, size_t bytes) {
    static const char known[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    const char *short_form = j->script || !*data ? NULL : strchr(known, *data);
    if (short_form) text_printf(j->out, "\\%c", letters[short_form - known]);
    else text_printf(j->out, "\\u%04x", bytes == 3 ? 0x2028u + ((unsigned char)data[2] & 1) : (unsigned char)*data);
}

static void put_string(json *j, const char *data, size_t length) {
    size_t begin = 0;
    text_append(j->out, "\"", 1);
    for (size_t at = 0; at < length;) {
        const size_t bytes = escaped_bytes(j, data, length, at);
        if (!bytes && ++at) continue;
        text_append(j->out, data + begin, at - begin);
        put_escape(j, data + at, bytes);
        begin = at += bytes;
    }
    text_append(j->out, data + begin, length - begin);
    text_append(j->out, "\"", 1);
}

static void new_line(json *j) {
    text_append(j->out, "\n", 1);
    for (int i = 0; j->pretty && i < j->depth; i++) text_append(j->out, "\t", 1);
}

/* Write the separator and the key before a value. */
static void begin(json *j, const char *key) {
    if (j->more) text_append_string(j->out, j->pretty && !key ? ", " : ",");
    if (j->line || (j->pretty && key)) new_line(j);
    if (key) {
        put_string(j, key, strlen(key));
        text_append_string(j->out, j->pretty ? ":\t" : ":");
    }
    j->more = 1;
    j->line = 0;
}

void json_open(json *j, const char *key, char bracket) {
    begin(j, key);
    text_append(j->out, &bracket, 1);
    j->depth++;
    j->more = 0;
}

void json_close(json *j, char bracket) {
    j->depth--;
    if (j->pretty && bracket == '}') new_line(j);
    text_append(j->out, &bracket, 1);
    j->more = 1;
    j->line = 0;
}

void json_break(json *j) { j->line = 1; }

static void put_word(json *j, const char *key, const char *word) {
    begin(j, key);
    text_append_string(j->out, word);
}

void json_null(json *j, const char *key) { put_word(j, key, "null"); }

void json_bool(json *j, const char *key, int value) { put_word(j, key, value ? "true" : "false"); }

void json_whole(json *j, const char *key, int64_t value) {
    begin(j, key);
    text_printf(j->out, "%lld", (long long)value);
}

void json_float(json *j, const char *key, float value) {
    put_word(j, key, isfinite(value) ? "" : "null");
    if (isfinite(value)) text_append_float(j->out, value);
}

static void put_number(json *j, const char *key, const char *format, int digits, double value) {
    put_word(j, key, isfinite(value) ? "" : "null");
    if (isfinite(value)) text_printf(j->out, format, digits, value);
}

void json_digits(json *j, const char *key, double value, int digits) { put_number(j, key, "%.*g", digits, value); }

void json_fixed(json *j, const char *key, double value, int decimals) { put_number(j, key, "%.*f", decimals, value); }

void json_ids(json *j, const char *key, const int32_t *ids, size_t n) {
    json_open(j, key, '[');
    for (size_t i = 0; i < n; i++) json_whole(j, NULL, ids[i]);
    json_close(j, ']');
}

void json_string(json *j, const char *key, const char *data, size_t length) {
    begin(j, key);
    put_string(j, data, length);
}

void json_text(json *j, const char *key, const char *text) { json_string(j, key, text, strlen(text)); }

void json_clean(json *j, const char *key, const char *data, size_t length) {
    text_bytes clean = { 0 };
    text_append_clean(&clean, data, length);
    j->out->failed |= clean.failed;
    json_string(j, key, clean.failed ? "" : clean.data, clean.failed ? 0 : clean.length);
    text_bytes_free(&clean);
}
