/* conf.c - see conf.h */
#include "tools/convert/conf.h"
#include "tools/convert/packed.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Limits of the numbers of values and containers, and of the characters of a number, as in hf_json.py. */
enum { FREE = 1 << 16, VALUE_BYTES = 6, CONTAINER_BYTES = 16, LONGEST_NUMBER = 40, SHORT = 80 };

static size_t digits(const char *p, size_t n) {
    size_t i = 0;
    while (i < n && p[i] >= '0' && p[i] <= '9') i++;
    return i;
}

/* Return the length of the number at `p`, or 0 if it is not one of JSON. */
static size_t number_length(const char *p, size_t n) {
    size_t i = (size_t)(*p == '-'), whole = digits(p + i, n - i), more = 1;
    if (!whole || (whole > 1 && p[i] == '0')) return 0;
    i += whole;
    if (i < n && p[i] == '.') i += 1 + (more = digits(p + i + 1, n - i - 1));
    if (!more) return 0;
    if (i < n && (p[i] == 'e' || p[i] == 'E')) {
        i += 1u + (size_t)(i + 1 < n && (p[i + 1] == '+' || p[i + 1] == '-'));
        if (i >= n || !(more = digits(p + i, n - i))) return 0;
        i += more;
    }
    return i > LONGEST_NUMBER || (i < n && strchr("+-.0123456789eE", p[i]) && p[i]) ? 0 : i;
}

/* Return the length of the escape at `p`, or 0 if it is not one of JSON. */
static size_t escape_length(const char *p, size_t n) {
    if (n < 2 || !p[1] || !strchr("\"\\/bfnrtu", p[1])) return 0;
    if (p[1] != 'u') return 2;
    for (size_t i = 2; i < 6; i++)
        if (i >= n || !p[i] || !strchr("0123456789abcdefABCDEF", p[i])) return 0;
    return 6;
}

/* Check what cJSON accepts, unlike JSON: other forms of numbers and escapes, and control characters. */
static int is_strict(const char *text, size_t length) {
    int inside = 0; /* a string */
    for (size_t i = 0, n; i < length; i++) {
        const char c = text[i];
        if ((unsigned char)c < 0x20 && (inside || !strchr("\t\r\n", c) || !c)) return 0;
        if (c == '"') inside = !inside;
        else if (inside ? c == '\\' : c == '-' || (c >= '0' && c <= '9')) {
            n = inside ? escape_length(text + i, length - i) : number_length(text + i, length - i);
            if (!n) return 0;
            i += n - 1;
        }
    }
    return 1;
}

/* Check that the keys of an object are unique. */
static int check_keys(making *m, const char *file, const cJSON *object) {
    text_index keys = { 0 };
    const cJSON *x, **members = NULL;
    size_t n = 0;
    cJSON_ArrayForEach(x, object) n++;
    if (n < 2) return 1;
    if (!(members = malloc(n * sizeof *members))) return making_no_memory(m);
    n = 0;
    cJSON_ArrayForEach(x, object) {
        const uint32_t hash = text_hash(x->string, strlen(x->string));
        size_t at = 0;
        for (uint32_t i; m->status == MOE_OK && (i = text_index_next(&keys, hash, &at)) != TEXT_NONE;)
            if (strcmp(members[i]->string, x->string) == 0) making_refuse(m, file, "duplicate key %.80s", x->string);
        members[n++] = x;
        if (m->status == MOE_OK && !text_index_add(&keys, hash, n - 1)) making_no_memory(m);
    }
    text_index_free(&keys);
    free(members);
    return m->status == MOE_OK;
}

/* Check the numbers and keys of a value, whose depth cJSON limits. */
static int check_value(making *m, const char *file, const cJSON *value) {
    const cJSON *x;
    if (cJSON_IsNumber(value) && !isfinite(value->valuedouble))
        return making_refuse(m, file, "not valid JSON: a number is too large");
    if (cJSON_IsObject(value) && !check_keys(m, file, value)) return 0;
    cJSON_ArrayForEach(x, value) if (!check_value(m, file, x)) return 0;
    return 1;
}

cJSON *conf_parse(making *m, const char *file, const void *data, size_t length) {
    static const char nul[] = "\\u0000"; /* cJSON ends the text there */
    const char *text = data, *end = NULL;
    size_t containers = 0, commas = 0, n = 0;
    if (m->status) return NULL;
    for (size_t i = 0; i < length; i++) {
        containers += text[i] == '[' || text[i] == '{';
        commas += text[i] == ',';
        n = text[i] == nul[n] ? n + 1 : text[i] == nul[0];
        if (n + 1 == sizeof nul) return making_unsupported(m, file, "a NUL character in JSON has no reader in C"), NULL;
    }
    cJSON *found = NULL;
    if (containers <= FREE + length / CONTAINER_BYTES && containers + commas <= FREE + length / VALUE_BYTES && length &&
        text_utf8_valid(text, length) == length && is_strict(text, length))
        found = cJSON_ParseWithLengthOpts(text, length, &end, 0);
    while (found && end < text + length && strchr(" \t\r\n", *end) && *end) end++;
    if (found && end == text + length && check_value(m, file, found)) return found;
    cJSON_Delete(found);
    making_refuse(m, file, "not valid JSON, or too many values for its size: download it again");
    return NULL;
}

cJSON *conf_read(making *m, const char *path, const char **file) {
    packed_file f = { 0 };
    *file = packed_base(path);
    if (m->status || !making_failed(m, packed_open(path, CONF_LARGEST, "a JSON file", m->out, &f, m->error)))
        return NULL;
    cJSON *found = conf_parse(m, *file, f.data ? (const char *)f.data : "", f.size);
    packed_close(&f);
    if (found && !cJSON_IsObject(found)) {
        cJSON_Delete(found);
        return making_refuse(m, *file, "not a JSON object"), NULL;
    }
    return found;
}

int conf_begin(making *m, const char *file, const cJSON *object, conf *out) {
    *out = (conf){ .m = m, .file = file, .object = object };
    if (object && !cJSON_IsObject(object)) return making_refuse(m, file, "expected an object, not another value");
    return m->status == MOE_OK;
}

void conf_free(conf *c) {
    free(c->asked);
    c->asked = NULL;
}

const cJSON *conf_raw(conf *c, const char *key) {
    const cJSON *x = c->object ? cJSON_GetObjectItemCaseSensitive(c->object, key) : NULL;
    if (!x || cJSON_IsNull(x)) return NULL;
    for (size_t i = 0; i < c->n_asked; i++)
        if (c->asked[i] == x) return x;
    making_failed(c->m, text_add(&c->asked, &c->n_asked, &c->capacity, &x, 1, sizeof x, c->m->error));
    return x;
}

const char *conf_short(const cJSON *value, char *out, size_t size) {
    text_bytes clean = { 0 };
    char *text = value ? cJSON_PrintUnformatted(value) : NULL;
    const size_t length = text ? strlen(text) : 0;
    if (text) text_append_clean(&clean, text, text_utf8_cut(text, length, length < SHORT ? length : SHORT));
    snprintf(out, size, "%s", clean.failed || !clean.data ? "null" : clean.data);
    cJSON_free(text);
    text_bytes_free(&clean);
    return out;
}

int conf_refuse(conf *c, const char *key, const cJSON *value, const char *more) {
    char text[SHORT + 8];
    return making_refuse(c->m, c->file, "%.60s is %s, which is not supported%.60s", key,
                         conf_short(value, text, sizeof text), more);
}

static int missing(conf *c, const char *key) { return making_refuse(c->m, c->file, "%.80s is missing", key); }

int64_t conf_whole(conf *c, const char *key, int64_t otherwise, int64_t least, int64_t most) {
    const cJSON *x = conf_raw(c, key);
    if (!x && otherwise == CONF_NONE) return missing(c, key), least;
    if (!x) return otherwise;
    const double d = cJSON_IsNumber(x) ? x->valuedouble : NAN;
    char more[64];
    if (d >= (double)least && d <= (double)most && floor(d) >= d) return (int64_t)d;
    snprintf(more, sizeof more, ": expected %" PRId64 " to %" PRId64, least, most);
    return conf_refuse(c, key, x, more), least;
}

double conf_real(conf *c, const char *key, double otherwise, double least, double most) {
    const cJSON *x = conf_raw(c, key);
    if (!x && isnan(otherwise)) missing(c, key);
    if (!x) return otherwise;
    const double d = cJSON_IsNumber(x) ? x->valuedouble : NAN;
    char more[64];
    snprintf(more, sizeof more, ": expected %g to %g", least, most);
    if (!isfinite(d) || !(d >= least && d <= most)) conf_refuse(c, key, x, more);
    return d;
}

int conf_flag(conf *c, const char *key, int otherwise) {
    const cJSON *x = conf_raw(c, key);
    if (x && !cJSON_IsBool(x)) conf_refuse(c, key, x, ": expected true or false");
    return x ? cJSON_IsTrue(x) != 0 : otherwise;
}

const char *conf_text(conf *c, const char *key) {
    const cJSON *x = conf_raw(c, key);
    if (x && !cJSON_IsString(x)) conf_refuse(c, key, x, ": expected a text");
    return x && cJSON_IsString(x) ? x->valuestring : NULL;
}

/* Return a number, or a boolean as one, like Python. */
static int as_number(const cJSON *x, double *out) {
    *out = cJSON_IsBool(x) ? cJSON_IsTrue(x) != 0 : x->valuedouble;
    return cJSON_IsBool(x) || cJSON_IsNumber(x);
}

int conf_is_listed(const cJSON *value, const char *values) {
    cJSON *list = cJSON_Parse(values);
    const cJSON *x;
    int found = 0;
    cJSON_ArrayForEach(x, list) {
        double a, b;
        if (as_number(value, &a) && as_number(x, &b)) found |= a >= b && a <= b;
        else found |= cJSON_Compare(value, x, 1) != 0;
    }
    cJSON_Delete(list);
    return found;
}

int conf_only(conf *c, const char *key, const char *values) {
    const cJSON *x = conf_raw(c, key);
    char more[64];
    if (!x || conf_is_listed(x, values)) return c->m->status == MOE_OK;
    snprintf(more, sizeof more, ": expected one of %.40s", values);
    return conf_refuse(c, key, x, more);
}

int conf_end(conf *c, int (*known)(const void *user, const char *key), const void *user) {
    const cJSON *x;
    char text[SHORT + 8];
    cJSON_ArrayForEach(x, c->object) {
        int asked = cJSON_IsNull(x);
        for (size_t i = 0; i < c->n_asked && !asked; i++) asked = c->asked[i] == x;
        if (!asked && !known(user, x->string))
            return making_refuse(c->m, c->file,
                                 "unknown key %.60s with value %s: remove it if the model does not depend on it",
                                 x->string, conf_short(x, text, sizeof text));
    }
    return c->m->status == MOE_OK;
}
