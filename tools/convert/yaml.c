/* yaml.c - see yaml.h. marian.py parses the same subset. */
#define _POSIX_C_SOURCE 200809L

#include "tools/convert/yaml.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LINES = 1 << 18, LONGEST_LINE = 4096 };

const char *yaml_short(moe_span text, char *out, size_t size) {
    text_bytes clean = { 0 };
    text_append_clean(&clean, text.data, text.length < 4 * size ? text.length : 4 * size);
    const int whole = !clean.failed && clean.length + 3 <= size && text.length < 4 * size;
    const size_t room = whole ? clean.length : size > 6 ? size - 6 : 0;
    const size_t kept = clean.failed ? 0 : text_utf8_cut(clean.data ? clean.data : "", clean.length, room);
    snprintf(out, size, "'%.*s%s'", (int)kept, clean.data ? clean.data : "", whole ? "" : "...");
    text_bytes_free(&clean);
    return out;
}

/* ---- Characters ---- */

/* Return the length of the Unicode whitespace at `p`, or 0. */
static size_t space_at(const char *p, const char *end) {
    static const char *const wide[] = { "\xc2\x85",     "\xc2\xa0",     "\xe1\x9a\x80", "\xe2\x80\xa8",
                                        "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80" };
    const unsigned char *c = (const unsigned char *)p;
    if (p >= end) return 0;
    if (*c < 0x80) return *c == ' ' || (*c >= 9 && *c <= 13) || (*c >= 0x1c && *c <= 0x1f);
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        const size_t n = strlen(wide[i]);
        if ((size_t)(end - p) >= n && memcmp(p, wide[i], n) == 0) return n;
    }
    return end - p >= 3 && c[0] == 0xe2 && c[1] == 0x80 && c[2] >= 0x80 && c[2] <= 0x8a ? 3 : 0;
}

static void skip_space(yaml_map *y) {
    for (size_t n; (n = space_at(y->at, y->end)) > 0;) y->at += n;
}

/* Remove trailing whitespace. */
static void trim(const char *begin, const char **end) {
    for (;;) {
        const char *p = *end;
        while (p > begin && ((unsigned char)*--p & 0xc0) == 0x80) continue;
        if (*end == begin || space_at(p, *end) != (size_t)(*end - p)) return;
        *end = p;
    }
}

static int one_of(char c, const char *set) { return c && strchr(set, c) != NULL; }

/* ---- Scalars ---- */

static void put(yaml_map *y, const char *data, size_t length) {
    memcpy(y->bytes + y->used, data, length); /* yaml_parse has reserved the space */
    y->used += length;
}

static void put_code(yaml_map *y, uint32_t code) {
    char out[4];
    size_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    out[0] = (char)code;
    for (size_t i = n; n > 1 && i-- > 1; code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    if (n > 1) out[0] = (char)((0xf00 >> n & 0xff) | code);
    put(y, out, n);
}

/* Parse an escape after its backslash. Returns 0 if it is invalid. */
static int put_escape(yaml_map *y) {
    static const struct {
        char name, length;
        uint32_t code;
    } escapes[] = { { '0', 0, 0 },    { 'a', 0, 7 },     { 'b', 0, 8 },   { 't', 0, 9 },    { 'n', 0, 10 },
                    { 'v', 0, 11 },   { 'f', 0, 12 },    { 'r', 0, 13 },  { 'e', 0, 27 },   { '"', 0, '"' },
                    { '/', 0, '/' },  { '\\', 0, '\\' }, { ' ', 0, ' ' }, { 'N', 0, 0x85 }, { '_', 0, 0xa0 },
                    { 'L', 0, 8232 }, { 'P', 0, 8233 },  { 'x', 2, 0 },   { 'u', 4, 0 },    { 'U', 8, 0 } };
    for (size_t i = 0; i < sizeof escapes / sizeof *escapes; i++) {
        if (y->at == y->end || escapes[i].name != *y->at) continue;
        uint32_t code = escapes[i].code;
        y->at++;
        if (y->end - y->at < escapes[i].length) return 0;
        for (int k = 0; k < escapes[i].length; k++) {
            static const char digits[] = "0123456789abcdef";
            const char c = *y->at++, *digit = c ? strchr(digits, c >= 'A' && c <= 'F' ? c + 32 : c) : NULL;
            if (!digit) return 0;
            code = code << 4 | (uint32_t)(digit - digits);
        }
        if ((code >= 0xd800 && code < 0xe000) || code > 0x10ffff) return 0;
        put_code(y, code);
        return 1;
    }
    return 0;
}

/* Find the end of a plain scalar, which may include spaces; NULL if none begins here. */
static const char *plain_end(const yaml_map *y) {
    const char *p = y->at, *end = y->end;
    if (p == end || space_at(p, end) || one_of(*p, ",[]{}#&*!|>'\"%@`")) return NULL;
    if (one_of(*p, "-?:") && (p + 1 == end || space_at(p + 1, end))) return NULL;
    for (p++; p < end;) {
        const char *next = p + 1;
        if (*p == ' ' || *p == '\t') {
            while (next < end && (*next == ' ' || *next == '\t')) next++;
            if (next == end || space_at(next, end) || *next == '#') break;
        } else if (space_at(p, end) || (*p == ':' && (next == end || space_at(next, end)))) {
            break;
        }
        p = next;
    }
    return p;
}

/* Parse a scalar. Returns 0 if it is invalid. */
static int parse_scalar(yaml_map *y, moe_span *out) {
    const char quote = y->at < y->end && one_of(*y->at, "'\"") ? *y->at++ : 0;
    const size_t first = y->used;
    if (!quote) {
        const char *end = plain_end(y), *kept = end;
        if (!end) return 0;
        trim(y->at, &kept);
        put(y, y->at, (size_t)(kept - y->at));
        y->at = end;
    }
    while (quote) {
        if (y->at == y->end) return 0;
        const char c = *y->at++;
        if (c == quote && (quote == '"' || y->at == y->end || *y->at != quote)) break;
        if (c == '\\' && quote == '"') {
            if (!put_escape(y)) return 0;
            continue;
        }
        y->at += c == quote; /* '' in single quotes */
        put(y, &c, 1);
    }
    *out = (moe_span){ y->bytes + first, y->used - first };
    return 1;
}

/* ---- Lines ---- */

static moe_status add_text(yaml_map *y, moe_span text, moe_error *error) {
    y->entries[y->n - 1].count++;
    return text_add(&y->texts, &y->n_texts, &y->text_capacity, &text, 1, sizeof text, error);
}

/* Return 1 if only a comment follows. */
static int line_ends(yaml_map *y) {
    const char *begin = y->at;
    skip_space(y);
    return y->at == y->end || (y->at > begin && *y->at == '#');
}

/* Parse the list after `[`. */
static moe_status parse_list(yaml_map *y, int *valid, moe_error *error) {
    moe_status status = MOE_OK;
    *valid = 0;
    for (size_t n = 0; status == MOE_OK; n++) {
        moe_span text;
        skip_space(y);
        if (y->at < y->end && *y->at == ']') break;
        if (n && (y->at == y->end || *y->at++ != ',')) return MOE_OK;
        skip_space(y);
        const char *begin = y->at;
        while (y->at < y->end && !space_at(y->at, y->end) && !one_of(*y->at, ",[]{}\"'#")) y->at++;
        text = (moe_span){ y->bytes + y->used, (size_t)(y->at - begin) };
        if (y->at > begin) put(y, begin, text.length);
        else if (!parse_scalar(y, &text)) return MOE_OK;
        status = add_text(y, text, error);
    }
    y->at++;
    *valid = line_ends(y);
    return status;
}

/* Parse the value of the last entry, which may be absent: then it is a list whose items follow. */
static moe_status parse_value(yaml_map *y, int *valid, int *items, moe_error *error) {
    yaml_entry *e = &y->entries[y->n - 1];
    moe_span text;
    skip_space(y);
    trim(y->at, &y->end);
    *items = e->list = y->at == y->end || *y->at == '#';
    *valid = 1;
    if (*items) return MOE_OK;
    e->list = *y->at == '[';
    if (e->list) return y->at++, parse_list(y, valid, error);
    *valid = parse_scalar(y, &text) && line_ends(y);
    return *valid ? add_text(y, text, error) : MOE_OK;
}

/* Parse the key of a line and add an entry. */
static moe_status add_entry(yaml_map *y, moe_span key, moe_error *error) {
    const yaml_entry e = { .key = key, .first = y->n_texts };
    const uint32_t hash = text_hash(key.data, key.length);
    size_t at = 0;
    for (uint32_t i; (i = text_index_next(&y->index, hash, &at)) != TEXT_NONE;)
        if (y->entries[i].key.length == key.length && memcmp(y->entries[i].key.data, key.data, key.length) == 0) {
            char word[64];
            return text_fail(error, MOE_ERROR_FORMAT, y->where, "%.100s: duplicate key %s", y->where,
                             yaml_short(key, word, sizeof word));
        }
    if (!text_index_add(&y->index, hash, y->n)) return text_out_of_memory(error);
    return text_add(&y->entries, &y->n, &y->entry_capacity, &e, 1, sizeof e, error);
}

static int line_is(const yaml_map *y, const char *text) { return text_is(y->at, (size_t)(y->end - y->at), text); }

/* Parse the line [at, end). `items`: the last entry's list continues; `key`: introduced by `?` (data NULL if none). */
static moe_status parse_line(yaml_map *y, int *items, moe_span *key, int *valid, moe_error *error) {
    const char *bare = y->at, *bare_end = y->end;
    while (bare < bare_end && *bare == ' ') bare++;
    while (bare < bare_end && bare_end[-1] == ' ') bare_end--;
    *valid = 1;
    if (bare == bare_end || *bare == '#' || line_is(y, "---") || line_is(y, "...") || *y->at == '%') return MOE_OK;
    if (*items && *bare == '-' && space_at(bare + 1, bare_end)) {
        moe_span text;
        y->at = bare + 1;
        y->end = bare_end;
        skip_space(y);
        trim(y->at, &y->end);
        *valid = y->at < y->end && *y->at != '#' && *y->at != '[' && parse_scalar(y, &text) && line_ends(y);
        return *valid ? add_text(y, text, error) : MOE_OK;
    }
    if (*items && *y->at == ' ' && text_is(bare, (size_t)(bare_end - bare), "[]") && !y->entries[y->n - 1].count)
        return *items = 0, MOE_OK;
    const int asks = y->end - y->at >= 2 && memcmp(y->at, "? ", 2) == 0;
    moe_span name = *key;
    *valid = 0;
    if (key->data && (y->end - y->at < 2 || memcmp(y->at, ": ", 2) != 0)) return MOE_OK;
    if (!key->data) {
        y->at += 2 * asks;
        if (!parse_scalar(y, &name)) return MOE_OK;
    }
    skip_space(y);
    if (asks && y->at == y->end) return *valid = 1, *key = name, MOE_OK;
    if (y->at == y->end || *y->at++ != ':' || (y->at < y->end && !space_at(y->at, y->end))) return MOE_OK;
    key->data = NULL;
    moe_status status = add_entry(y, name, error);
    return status ? status : parse_value(y, valid, items, error);
}

moe_status yaml_parse(yaml_map *map, const void *data, size_t length, const char *where, moe_error *error) {
    const char *p = data, *end = p + length;
    moe_span key = { NULL, 0 };
    moe_status status = MOE_OK;
    int items = 0, valid = 1;
    size_t number = 0;
    char word[64];
    *map = (yaml_map){ .where = where };
    if (text_utf8_valid(p, length) < length)
        return text_fail(error, MOE_ERROR_FORMAT, where, "%.100s is not UTF-8", where);
    if (!(map->bytes = malloc(length + length / 2 + 8))) return text_out_of_memory(error); /* "\L" becomes 3 bytes */
    if (length && end[-1] == 0) end--;
    if (end - p >= 3 && memcmp(p, "\xef\xbb\xbf", 3) == 0) p += 3;
    while (p < end && status == MOE_OK && valid) {
        const char *line = p, *stop = memchr(p, '\n', (size_t)(end - p));
        p = stop ? stop + 1 : end;
        if (!stop) stop = end;
        if (stop > line && stop[-1] == '\r') stop--;
        map->at = line;
        map->end = stop;
        valid = ++number <= MAX_LINES && text_utf8_count(line, (size_t)(stop - line)) <= LONGEST_LINE;
        if (valid) status = parse_line(map, &items, &key, &valid, error);
        if (!valid && status == MOE_OK)
            status = text_fail(error, MOE_ERROR_FORMAT, where, "%.100s: line %zu is not valid in Marian's YAML: %s",
                               where, number, yaml_short((moe_span){ line, (size_t)(stop - line) }, word, sizeof word));
    }
    if (status == MOE_OK && key.data)
        status = text_fail(error, MOE_ERROR_FORMAT, where, "%.100s: line %zu: key without a value", where, number);
    return status;
}

void yaml_free(yaml_map *map) {
    free(map->entries);
    free(map->texts);
    free(map->bytes);
    text_index_free(&map->index);
    *map = (yaml_map){ 0 };
}

/* ---- Options ---- */

yaml_entry *yaml_find(const yaml_map *map, const char *key) {
    size_t at = 0;
    for (uint32_t i, hash = text_hash(key, strlen(key)); (i = text_index_next(&map->index, hash, &at)) != TEXT_NONE;)
        if (text_is(map->entries[i].key.data, map->entries[i].key.length, key))
            return map->entries[i].asked = 1, &map->entries[i];
    return NULL;
}

moe_status yaml_refuse(const yaml_map *map, const char *key, moe_error *error) {
    const yaml_entry *e = yaml_find(map, key);
    char word[64];
    if (!e) return text_fail(error, MOE_ERROR_FORMAT, map->where, "%.100s: %s is missing", map->where, key);
    return text_fail(error, MOE_ERROR_FORMAT, map->where, "%.100s: %s %s%s is not supported", map->where, key,
                     e->count ? yaml_short(map->texts[e->first], word, sizeof word) : "[]", e->count > 1 ? "..." : "");
}

moe_status yaml_text(const yaml_map *map, const char *key, const char *otherwise, moe_span *text, moe_error *error) {
    const yaml_entry *e = yaml_find(map, key);
    if (e ? e->list : !otherwise) return yaml_refuse(map, key, error);
    *text = e ? map->texts[e->first] : (moe_span){ otherwise, strlen(otherwise) };
    return MOE_OK;
}

/* Copy a number of at most 31 characters from `set` and convert it by `read`. */
static int read_number(moe_span text, const char *set, double *value) {
    char copy[32], *end;
    if (!text.length || text.length >= sizeof copy) return 0;
    memcpy(copy, text.data, text.length);
    copy[text.length] = 0;
    *value = strtod(copy, &end);
    return strspn(copy, set) == text.length && !*end;
}

moe_status yaml_real(const yaml_map *map, const char *key, const char *otherwise, double least, double most,
                     double *value, moe_error *error) {
    moe_span text = { NULL, 0 };
    const moe_status status = yaml_text(map, key, otherwise, &text, error);
    if (status) return status;
    if (text_is(text.data, text.length, "true")) text = (moe_span){ "1", 1 };
    if (text_is(text.data, text.length, "false")) text = (moe_span){ "0", 1 };
    if (read_number(text, "0123456789+-.eE", value) && *value >= least && *value <= most) return MOE_OK;
    return yaml_refuse(map, key, error);
}

moe_status yaml_whole(const yaml_map *map, const char *key, const char *otherwise, int64_t least, int64_t most,
                      int64_t *value, moe_error *error) {
    moe_span text = { NULL, 0 };
    double number;
    const moe_status status = yaml_text(map, key, otherwise, &text, error);
    if (status) return status;
    if (!read_number(text, "0123456789+-", &number) || !(number >= (double)least && number <= (double)most))
        return yaml_refuse(map, key, error);
    *value = (int64_t)number;
    return MOE_OK;
}

moe_status yaml_choice(const yaml_map *map, const char *key, const char *choices, int *value, moe_error *error) {
    moe_span text = { choices, strcspn(choices, " ") };
    const yaml_entry *e = yaml_find(map, key);
    if (e && e->list) return yaml_refuse(map, key, error);
    if (e) text = map->texts[e->first];
    *value = 0;
    for (const char *p = choices; *p; p += strspn(p, " "), ++*value) {
        const size_t n = strcspn(p, " ");
        if (n == text.length && memcmp(p, text.data, n) == 0) return MOE_OK;
        p += n;
    }
    return yaml_refuse(map, key, error);
}

void yaml_ignore(const yaml_map *map, const char *keys) {
    char pattern[64], name[64];
    for (const char *p = keys; *p; p += strcspn(p, " "), p += strspn(p, " ")) {
        snprintf(pattern, sizeof pattern, "%.*s", (int)strcspn(p, " "), p);
        for (size_t i = 0; i < map->n; i++) {
            yaml_entry *e = &map->entries[i];
            snprintf(name, sizeof name, "%.*s", (int)e->key.length, e->key.data);
            if (strlen(name) == e->key.length && fnmatch(pattern, name, 0) == 0) e->asked = 1;
        }
    }
}

moe_status yaml_reject_rest(const yaml_map *map, moe_error *error) {
    char key[64], value[64];
    for (size_t i = 0; i < map->n; i++) {
        const yaml_entry *e = &map->entries[i];
        if (!e->asked)
            return text_fail(error, MOE_ERROR_FORMAT, map->where, "%.80s: unknown option %s with value %s", map->where,
                             yaml_short(e->key, key, sizeof key),
                             e->count ? yaml_short(map->texts[e->first], value, sizeof value) : "[]");
    }
    return MOE_OK;
}
