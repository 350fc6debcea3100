/* shape.c - see shape.h.
 *
 * Contents
 *   1. Languages   names in the instruction
 *   2. Frame       the answer without its translations
 *   3. Text        separators between lines
 *   4. JSON
 *   5. Message     find the instruction and the lines
 */
#define _GNU_SOURCE /* memmem */

#include "tools/server/shape.h"
#include "tools/text/heading.h"
#include "tools/text/spans.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MOST_TERMS = 1000, TERM_BYTES = 1 << 16, CONTEXT_BYTES = 1 << 16 };

static int is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

/* A part of the message. */
typedef moe_span span;

static span trimmed(span s) {
    while (s.length && is_space(*s.data)) s.data++, s.length--;
    while (s.length && is_space(s.data[s.length - 1])) s.length--;
    return s;
}

/* Return the first line of *s, without its line break, and remove the line from *s. */
static span next_line(span *s) {
    const char *end = memchr(s->data, '\n', s->length);
    const span line = { s->data, end ? (size_t)(end - s->data) : s->length };
    const size_t n = line.length + (end != NULL);
    s->data += n, s->length -= n;
    return line;
}

/* ==== 1. Languages ====================================================================================== */

typedef enum role { LOOSE, SOURCE, WEAK, TARGET } role; /* what a preposition makes of the next language */

static role role_of(const char *word, size_t n) {
    static const char *const lists[] = { "", "from source aus", "in ins auf nach vers", "to into target" };
    char lower[8] = "";
    for (size_t i = 0; i < n && n < sizeof lower; i++) lower[i] = (char)(word[i] | 32);
    for (role r = SOURCE; r <= TARGET && n < sizeof lower; r++)
        if (text_is_listed(lists[r], lower, n)) return r;
    return LOOSE;
}

/* Find a language's code: by its name or, if `codes` is 1, by a code of the model that is not an English word. A run of
 * Chinese or Japanese characters may end with the name. */
static int take_language(const backend *b, const char *word, size_t n, int codes, char code[36]) {
    const char *name = text_language_named(word, n);
    for (size_t i = 0; !name && i < n && (word[0] & 0x80) && n - i <= 30; i = text_utf8_next(word, n, i))
        name = text_language_named(word + i, n - i);
    if (name) return take_word(code, 36, name, 2), 1;
    if (!codes || n < 2 || n > 3 || (word[0] & 0x80) ||
        text_is_listed("it is no he as am so my or be hi the a", word, n))
        return 0;
    take_word(code, 36, word, n);
    return moetext_model_language_find(b->model, code) >= 0;
}

/* Names of languages in a text, from left to right. */
typedef struct finder {
    const backend *b;
    shape *out;
    role role, found; /* of the next language; of the target found so far */
    int age, named;   /* words since the preposition; 1 if a target was found */
    char last[36];    /* the language before `gap` */
    size_t last_end;
} finder;

/* Use a language between `at` and `end`. In "English to German", "English-German" or "English → German" the first one
 * is the source. */
static void use_language(finder *f, span s, size_t at, size_t end, const char *code) {
    const span gap = trimmed((span){ s.data + f->last_end, at - f->last_end });
    const int pair = f->last[0] && gap.length && text_is_listed("to into - -> > \xe2\x86\x92", gap.data, gap.length);
    const role r = f->age <= 3 ? f->role : LOOSE;
    if (pair && !f->out->source[0]) take_word(f->out->source, sizeof f->out->source, f->last, strlen(f->last));
    if (r == SOURCE && !f->out->source[0]) take_word(f->out->source, sizeof f->out->source, code, strlen(code));
    else if (r != SOURCE && (!f->named || r > f->found || (pair && f->found < TARGET))) {
        take_word(f->out->target, sizeof f->out->target, code, strlen(code));
        f->named = 1, f->found = pair ? TARGET : r;
    }
    take_word(f->last, sizeof f->last, code, strlen(code));
    f->last_end = end;
    f->role = LOOSE;
}

static void find_languages(finder *f, span s) {
    static const char *const verbs[] = { "translat", "traduc",       "tradui",      "traduz",
                                         "bersetz",  "\xe7\xbf\xbb", "\xe8\xaf\x91" };
    for (size_t at = 0, end; at < s.length; at = end) {
        char code[36];
        end = text_word_end(s.data, s.length, at);
        if (end == at) {
            if (s.data[at] == '.') f->role = LOOSE;
            end = text_utf8_next(s.data, s.length, at);
            continue;
        }
        const size_t n = end - at;
        const role r = role_of(s.data + at, n);
        for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
            for (size_t k = 0; k + strlen(verbs[i]) <= n; k++)
                f->out->translates |= strncasecmp(s.data + at + k, verbs[i], strlen(verbs[i])) == 0;
        if (r) f->role = r, f->age = 0;
        else if (take_language(f->b, s.data + at, n, f->role > LOOSE, code)) use_language(f, s, at, end, code);
        else f->age++;
    }
    f->last[0] = 0, f->last_end = 0, f->role = LOOSE;
}

/* Add a pair of texts, unless it has a known source or exceeds the limits. */
static void add_pair(text_bytes *out, size_t *n, span source, span target) {
    const size_t bytes = source.length + target.length + 2;
    if (!source.length || !target.length || *n == MOST_TERMS || out->length + bytes > TERM_BYTES) return;
    const char *known = out->data;
    for (size_t i = 0; i < *n; i++, known += strlen(known) + 1, known += strlen(known) + 1)
        if (text_is(source.data, source.length, known)) return;
    text_append(out, source.data, source.length), text_append(out, "", 1);
    text_append(out, target.data, target.length), text_append(out, "", 1);
    ++*n;
}

static void add_term(request *req, span source, span target) {
    if (source.length <= 100 && target.length <= 200) add_pair(&req->terms, &req->n_terms, source, target);
}

/* Remove quotation marks around a text, and what follows them. */
static span unquoted(span s) {
    const char *end = s.length > 2 && *s.data == '"' ? memchr(s.data + 1, '"', s.length - 1) : NULL;
    return end ? (span){ s.data + 1, (size_t)(end - s.data) - 1 } : s;
}

/* Read a list item after its bullet: "term → translation  [comment]"; both may have quotation marks. */
static int read_arrow(span item, span *source, span *target) {
    static const char arrow[] = "\xe2\x86\x92", comment[] = "  [";
    const char *sign = memmem(item.data, item.length, arrow, sizeof arrow - 1);
    if (!sign) return 0;
    const char *const rest = sign + sizeof arrow - 1, *end = item.data + item.length;
    const char *note = memmem(rest, (size_t)(end - rest), comment, sizeof comment - 1);
    *source = unquoted(trimmed((span){ item.data, (size_t)(sign - item.data) }));
    *target = unquoted(trimmed((span){ rest, (size_t)((note ? note : end) - rest) }));
    return !text_language_named(source->data, source->length) || !text_language_named(target->data, target->length);
}

/* Read a term: "term = translation", the two separated by a TAB, or a list item with an arrow. */
static int read_term(span line, span *source, span *target) {
    line = trimmed(line);
    if (line.length > 2 && strchr("-*", *line.data) && line.data[1] == ' ') {
        line = trimmed((span){ line.data + 2, line.length - 2 });
        if (read_arrow(line, source, target)) return source->length && target->length;
    }
    const char *sign = memchr(line.data, '=', line.length);
    if (!sign) sign = memchr(line.data, '\t', line.length);
    if (!sign) return 0;
    *source = trimmed((span){ line.data, (size_t)(sign - line.data) });
    *target = trimmed((span){ sign + 1, (size_t)(line.data + line.length - sign - 1) });
    return source->length && target->length && !memchr(target->data, '=', target->length) &&
           !memchr(source->data, '"', source->length) && !memchr(source->data, '{', source->length);
}

static void take_terms(request *req, span lines) {
    span source, target;
    while (lines.length)
        if (read_term(next_line(&lines), &source, &target)) add_term(req, source, target);
}

/* Return 1 if a paragraph is a glossary: a line with a colon at its end that announces terms, then only terms. */
static int is_glossary(span paragraph) {
    span rest = paragraph, source, target;
    const span heading = trimmed(next_line(&rest));
    int announced = 0;
    for (size_t i = 0; i + 4 < heading.length; i++) {
        const char *at = heading.data + i;
        announced |= strncasecmp(at, "term", 4) == 0 || (i + 7 < heading.length && strncasecmp(at, "glossar", 7) == 0);
    }
    if (!announced || heading.data[heading.length - 1] != ':' || !trimmed(rest).length) return 0;
    while (rest.length)
        if (!read_term(next_line(&rest), &source, &target)) return 0;
    return 1;
}

/* Take glossaries from the first and the last paragraph of a text, and return the rest. */
static span take_glossaries(request *req, span s) {
    s = trimmed(s);
    const char *end = memmem(s.data, s.length, "\n\n", 2);
    if (end && is_glossary((span){ s.data, (size_t)(end - s.data) })) {
        take_terms(req, (span){ s.data, (size_t)(end - s.data) });
        s = trimmed((span){ end, (size_t)(s.data + s.length - end) });
    }
    size_t last = s.length;
    while (last > 1 && memcmp(s.data + last - 2, "\n\n", 2) != 0) last--;
    if (last > 1 && is_glossary((span){ s.data + last, s.length - last })) {
        take_terms(req, (span){ s.data + last, s.length - last });
        s = trimmed((span){ s.data, last });
    }
    return s;
}

/* ==== 2. Frame ========================================================================================== */

static void put(shape *l, const char *data, size_t n) { text_append(&l->frame, data, n); }

static void put_item(request *req, shape *l, const char *text, size_t n) {
    if (!take_text(req, text, n)) return;
    if (text_reserve(&l->cuts, &l->capacity, l->n + 1, sizeof *l->cuts, NULL)) refuse_memory(req);
    else l->cuts[l->n++] = l->frame.length;
}

static void put_string(text_bytes *out, const char *data, size_t n) {
    json j = { .out = out };
    json_string(&j, NULL, data, n);
}

/* Put the part of the frame before translation i, or after the last one. */
static void write_frame(const shape *l, size_t i, text_bytes *out) {
    const size_t from = i ? l->cuts[i - 1] : 0, to = i < l->n ? l->cuts[i] : l->frame.length;
    if (l->frame.data) text_append(out, l->frame.data + from, to - from);
}

void shape_write(const shape *l, const request *req, size_t first, size_t last, text_bytes *out) {
    for (size_t i = first; i < last; i++) {
        const text_bytes *answer = &req->items[i].answer;
        const char *text = answer->data ? answer->data : "";
        write_frame(l, i, out);
        const size_t at = out->length;
        if (!l->json) text_append(out, text, answer->length);
        else put_string(out, text, answer->length);
        if (!l->json || out->failed) continue;
        out->length -= 2; /* the frame has the quotation marks */
        memmove(out->data + at, out->data + at + 1, out->length - at);
    }
    if (last == l->n) write_frame(l, last, out);
    text_append(out, "", 0);
}

void shape_free(shape *l) {
    text_bytes_free(&l->frame);
    free(l->cuts);
    *l = (shape){ .json = 0 };
}

void shape_wrap(shape *l, const char *key) {
    text_bytes all = { 0 };
    text_append(&all, "{", 1);
    put_string(&all, key, strlen(key));
    text_append(&all, ":", 1);
    for (size_t i = 0; i < l->n; i++) l->cuts[i] += all.length;
    text_append(&all, l->frame.data ? l->frame.data : "", l->frame.length);
    text_append(&all, "}", 1);
    all.failed |= l->frame.failed;
    text_bytes_free(&l->frame);
    l->frame = all;
}

/* ==== 3. Text =========================================================================================== */

/* Put a run of text between separators. White space at its ends belongs to the frame. */
static void put_run(request *req, shape *l, const char *from, const char *to) {
    const span all = { from, (size_t)(to - from) }, text = trimmed(all);
    if (!text.length || req->refusal) {
        put(l, from, all.length);
        return;
    }
    put(l, from, (size_t)(text.data - from));
    put_item(req, l, text.data, text.length);
    l->structured |= memchr(text.data, '\n', text.length) != NULL;
    put(l, text.data + text.length, (size_t)(to - text.data) - text.length);
}

/* Return 1 for a line that separates paragraphs: %%, %% Paragraph 2, ==PART==. */
static int is_separator(span line) {
    line = trimmed(line);
    if (line.length >= 2 && memcmp(line.data, "%%", 2) == 0)
        return line.length == 2 ||
               (line.length > 12 && line.length < 32 && strncasecmp(line.data, "%% paragraph ", 13) == 0);
    if (line.length < 5 || line.length > 40 || memcmp(line.data, "==", 2) != 0 ||
        memcmp(line.data + line.length - 2, "==", 2) != 0)
        return 0;
    for (size_t i = 2; i < line.length - 2; i++)
        if (!strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZ_", line.data[i])) return 0;
    return 1;
}

/* Return the length of a number at the beginning of a line ("12. ", "3) "), with the spaces around it, or 0. */
static size_t number_of(span line, long *number) {
    size_t at = 0;
    while (at < line.length && (line.data[at] == ' ' || line.data[at] == '\t')) at++;
    const size_t digits = at;
    *number = 0;
    while (at < line.length && line.data[at] >= '0' && line.data[at] <= '9' && at - digits < 7)
        *number = 10 * *number + (line.data[at++] - '0');
    if (at == digits || at == line.length || !strchr(".):", line.data[at])) return 0;
    at++;
    if (at < line.length && !is_space(line.data[at])) return 0;
    while (at < line.length && is_space(line.data[at])) at++;
    return at;
}

/* Return the first number of numbered lines: 1, or any number that is followed by a line with the next one; or -1. */
static long first_number(span s) {
    long first = -1, number;
    while (s.length) {
        const span line = next_line(&s);
        if (!trimmed(line).length) continue;
        const size_t n = number_of(line, &number);
        if (first < 0 && !n) return -1;
        if (first < 0) first = number;
        else if (n && number == first + 1) return first;
    }
    return first == 1 ? first : -1;
}

/* Return the length of a tag that separates texts: <br />, <p ...>, an element with an id, or its end; else 0. `name`
 * is the last element with an id. */
static size_t tag_of(span s, char name[16]) {
    const char *end = memchr(s.data, '>', s.length < 200 ? s.length : 200);
    const size_t n = end ? (size_t)(end - s.data) + 1 : 0, at = n > 1 && s.data[1] == '/' ? 2 : 1;
    size_t letters = 0;
    char own[16] = "";
    if (!n || memchr(s.data + 1, '<', n - 1)) return 0;
    while (at + letters < n && letters < sizeof own - 1 &&
           ((s.data[at + letters] | 32) >= 'a' && (s.data[at + letters] | 32) <= 'z'))
        own[letters] = (char)(s.data[at + letters] | 32), letters++;
    if (!letters || !strchr(" \t/>", s.data[at + letters])) return 0;
    const int has_id = at == 1 && memmem(s.data, n, " id=", 4);
    if (has_id) memcpy(name, own, sizeof own);
    return has_id || strcmp(own, "br") == 0 || strcmp(own, "p") == 0 || (at == 2 && strcmp(own, name) == 0) ? n : 0;
}

/* Return the length of the separator at the beginning of `s`, which is inside a line, or 0. */
static size_t separator_of(span s, char name[16]) {
    if (*s.data == '<') return tag_of(s, name);
    return s.length >= 3 && memcmp(s.data, "|||", 3) == 0 ? 3 : 0;
}

static void take_plain(request *req, span s, shape *l) {
    long next = first_number(s), number;
    char name[16] = "";
    const char *run = s.data; /* the text since the last separator */
    for (span rest = s; rest.length && !req->refusal;) {
        const span line = next_line(&rest);
        size_t at = 0, skip = is_separator(line) ? line.length : 0;
        if (!skip && line.length) skip = separator_of(line, name);
        if (!skip && next >= 0 && (skip = number_of(line, &number)) > 0)
            skip = number == next ? skip : 0, next += skip > 0;
        while (at < line.length && !req->refusal) {
            if (skip) {
                l->structured = 1;
                put_run(req, l, run, line.data + at);
                put(l, line.data + at, skip);
                run = line.data + (at += skip);
            } else at++;
            skip = at < line.length ? separator_of((span){ line.data + at, line.length - at }, name) : 0;
        }
    }
    put_run(req, l, run, s.data + s.length);
}

/* ==== 4. JSON =========================================================================================== */

static const cJSON *member(const cJSON *object, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

/* Return the member with the text of an object that describes a line, and set *name to its name in the answer. */
static const cJSON *text_member(const cJSON *object, const char **name) {
    static const char *const names[][2] = { { "src", "dst" }, { "source", "translation" }, { "text", "text" } };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const cJSON *text = member(object, names[i][0]);
        *name = names[i][1];
        if (cJSON_IsString(text)) return text;
    }
    return NULL;
}

/* Put a value unchanged. */
static void put_value(request *req, shape *l, const cJSON *value) {
    if (cJSON_IsNumber(value) && fabs(value->valuedouble) > 0x1p53)
        bad_request(req, "a number in the message exceeds 2^53; send it as a string");
    char *text = cJSON_PrintUnformatted(value);
    if (!text) refuse_memory(req);
    else put(l, text, strlen(text));
    cJSON_free(text);
}

static void put_text_of(request *req, shape *l, const char *text) {
    const size_t n = strlen(text);
    if (!trimmed((span){ text, n }).length) { /* white space is its own translation */
        put_string(&l->frame, text, n);
        return;
    }
    put(l, "\"", 1);
    put_item(req, l, text, n);
    put(l, "\"", 1);
}

static void put_key(shape *l, const char *key, int first) {
    if (!first) put(l, ",", 1);
    put_string(&l->frame, key, strlen(key));
    put(l, ":", 1);
}

static void refuse_twice(request *req, const cJSON *object) {
    const cJSON *one, *other;
    cJSON_ArrayForEach(one, object) for (other = one->next; other && !req->refusal;
                                         other = other->next) if (strcmp(one->string, other->string) == 0)
        bad_request(req, "the key \"%.40s\" occurs twice in the message; every line needs its own key", one->string);
}

/* Put a value with its strings as lines. Of an object with a text, only the text is translated. */
static void take_value(request *req, shape *l, const cJSON *value) {
    const char *name = NULL;
    const cJSON *text = cJSON_IsObject(value) ? text_member(value, &name) : NULL, *one;
    const int is_object = cJSON_IsObject(value);
    if (req->refusal) return;
    if (cJSON_IsString(value)) put_text_of(req, l, value->valuestring);
    else if (!is_object && !cJSON_IsArray(value)) put_value(req, l, value);
    else {
        if (is_object) refuse_twice(req, value);
        put(l, is_object ? "{" : "[", 1);
        cJSON_ArrayForEach(one, value) {
            if (is_object) put_key(l, one == text ? name : one->string, one == value->child);
            else if (one != value->child) put(l, ",", 1);
            if (text && one != text) put_value(req, l, one);
            else take_value(req, l, one);
        }
        put(l, is_object ? "}" : "]", 1);
    }
}

/* Print the number of a line as a key. Return 0 if it has none. */
static int key_of(const cJSON *line, char out[64]) {
    const cJSON *n = member(line, "n");
    const int is_text = cJSON_IsString(n) && strlen(n->valuestring) < 64;
    if (is_text) memcpy(out, n->valuestring, strlen(n->valuestring) + 1);
    else if (cJSON_IsNumber(n) && fabs(n->valuedouble) <= 0x1p53 && floor(n->valuedouble) == n->valuedouble)
        snprintf(out, 64, "%.0f", n->valuedouble);
    else return 0;
    return cJSON_IsString(member(line, "text"));
}

static int is_subtitles(const cJSON *all) {
    const cJSON *rows = member(all, "lines"), *one;
    char key[64];
    int n = 0;
    if (!cJSON_IsObject(all) || !cJSON_IsArray(rows)) return 0;
    cJSON_ArrayForEach(one, rows) n += !key_of(one, key);
    return !n;
}

/* Use the sources of earlier lines as context, without the first ones if there are too many. */
static void take_history(request *req, const cJSON *history) {
    const cJSON *one;
    size_t bytes = 0;
    cJSON_ArrayForEach(one, history) if (cJSON_IsString(member(one, "source"))) bytes +=
        strlen(member(one, "source")->valuestring) + 1;
    cJSON_ArrayForEach(one, history) {
        const cJSON *source = member(one, "source");
        const size_t n = cJSON_IsString(source) ? strlen(source->valuestring) : 0;
        if (n && bytes <= CONTEXT_BYTES) {
            text_append(&req->context, source->valuestring, n);
            text_append(&req->context, "\n", 1);
        }
        bytes -= cJSON_IsString(source) ? n + 1 : 0;
    }
}

/* Put SubtitleEdit's lines: {"12": "..."}. */
static void take_subtitles(request *req, shape *l, const cJSON *all) {
    const cJSON *rows = member(all, "lines"), *one;
    char key[64], other[64];
    take_history(req, member(all, "history"));
    put(l, "{", 1);
    cJSON_ArrayForEach(one, rows) {
        if (req->refusal) break;
        key_of(one, key);
        for (const cJSON *before = rows->child; before != one && !req->refusal; before = before->next)
            if (key_of(before, other) && strcmp(key, other) == 0)
                bad_request(req, "two lines have the number %.40s; every line needs its own", key);
        put_key(l, key, one == rows->child);
        put_text_of(req, l, member(one, "text")->valuestring);
    }
    put(l, "}", 1);
}

static span text_of(const cJSON *object, const char *name) {
    const cJSON *text = member(object, name);
    return cJSON_IsString(text) ? trimmed((span){ text->valuestring, strlen(text->valuestring) }) : (span){ "", 0 };
}

/* Return 1 for Weblate's {"source_language", "target_language", "glossary", "strings": [{"source"}]}. */
static int is_weblate(const cJSON *all) {
    const cJSON *rows = member(all, "strings"), *one;
    int n = 0;
    if (!cJSON_IsObject(all) || !cJSON_IsArray(rows) || !text_of(all, "target_language").length) return 0;
    cJSON_ArrayForEach(one, rows) n += !cJSON_IsString(member(one, "source"));
    return !n;
}

static void take_code(char code[36], span name) {
    if (name.length) take_word(code, 36, name.data, name.length);
}

/* Put Weblate's strings as ["..."]. Other members of a string only describe it. */
static void take_weblate(request *req, shape *l, const cJSON *all) {
    const cJSON *rows = member(all, "strings"), *one;
    cJSON_ArrayForEach(one, member(all, "glossary")) add_term(req, text_of(one, "source"), text_of(one, "target"));
    put(l, "[", 1);
    cJSON_ArrayForEach(one, rows) {
        if (one != rows->child) put(l, ",", 1);
        if (!req->refusal) put_text_of(req, l, member(one, "source")->valuestring);
    }
    put(l, "]", 1);
}

static int has_strings(const cJSON *value) {
    const cJSON *one;
    cJSON_ArrayForEach(one, value) if (has_strings(one)) return 1;
    return cJSON_IsString(value);
}

/* Parse the JSON at the end of a message, possibly in a fence: the whole message, or what follows an instruction, whose
 * length *begin receives. Return NULL if there is none. */
static cJSON *find_json(request *req, span s, size_t *begin) {
    enum { TRIES = 16 };
    const char *const data = s.data;
    finder f = { .b = req->backend, .out = &(shape){ .json = 0 } };
    s = trimmed(s);
    if (s.length >= 3 && memcmp(s.data + s.length - 3, "```", 3) == 0) s.length -= 3;
    s = trimmed(s);
    if (!s.length || !strchr("]}", s.data[s.length - 1])) return NULL;
    for (int i = 0; i < TRIES && s.length && !req->refusal;) {
        cJSON *all = strchr("[{", *s.data) ? (i++, parse_text(req, s.data, s.length)) : NULL;
        *begin = (size_t)(s.data - data);
        if (all && *begin && !text_begins_with(data, *begin, "```") && has_strings(all)) {
            find_languages(&f, (span){ data, *begin });
            if (f.out->translates) return all;
        } else if (all && (!*begin || *data == '`')) return all;
        cJSON_Delete(all);
        next_line(&s);
    }
    return NULL;
}

/* Take the strings of Weblate's message and their translations in the answer, if both have the same number. */
static int take_example(request *req, const cJSON *all, const cJSON *answer) {
    const cJSON *rows = member(all, "strings");
    if (!is_weblate(all) || !cJSON_IsArray(answer) || cJSON_GetArraySize(rows) != cJSON_GetArraySize(answer)) return 0;
    const cJSON *one = rows->child, *other = answer->child;
    for (; one && other; one = one->next, other = other->next) {
        const char *text = cJSON_IsString(other) ? other->valuestring : "";
        add_pair(&req->confirmed, &req->n_confirmed, text_of(one, "source"), trimmed((span){ text, strlen(text) }));
    }
    return 1;
}

int shape_examples(request *req, const moetext_message *messages, size_t n) {
    int found = n > 0 && n % 2 == 0;
    for (size_t i = 0; i < n && found && !req->refusal; i += 2) {
        size_t begin;
        const int asks = messages[i].role == MOETEXT_USER && messages[i + 1].role == MOETEXT_ASSISTANT;
        cJSON *all = asks ? find_json(req, (span){ messages[i].text, messages[i].length }, &begin) : NULL;
        cJSON *answer = all ? parse_text(req, messages[i + 1].text, messages[i + 1].length) : NULL;
        found = answer && take_example(req, all, answer);
        cJSON_Delete(all);
        cJSON_Delete(answer);
    }
    if (req->confirmed.failed) refuse_memory(req);
    if (!found) text_clear(&req->confirmed), req->n_confirmed = 0;
    return found && !req->refusal;
}

/* ==== 5. Message ======================================================================================== */

/* Return 1 if the first words of a text ask for a translation: "Please translate ..." */
static int asks_first(const backend *b, span s) {
    finder f = { .b = b, .out = &(shape){ .json = 0 } };
    size_t at = 0;
    for (int words = 0; at < s.length && words < 3; at++) words += is_space(s.data[at]);
    find_languages(&f, (span){ s.data, at });
    return f.out->translates;
}

/* Return the length of the instruction at the beginning of a message: its first paragraph, or the text before a colon,
 * that asks for a translation and names a language. If the system message already does (`known`), only a text that
 * begins with the request is an instruction. */
static size_t instruction_of(const backend *b, span s, int known) {
    const char *const paragraph = memmem(s.data, s.length, "\n\n", 2);
    const char *const colon = memchr(s.data, ':', s.length < 300 ? s.length : 300);
    const size_t ends[] = { paragraph ? (size_t)(paragraph - s.data) : 0, colon ? (size_t)(colon - s.data) + 1 : 0 };
    for (size_t i = 0; i < 2; i++) {
        finder f = { .b = b, .out = &(shape){ .json = 0 } };
        const span text = { s.data, ends[i] };
        if (!ends[i] || ends[i] > 4000 || ((known || i) && !asks_first(b, text))) continue;
        find_languages(&f, text);
        if (f.out->translates && f.out->target[0]) return ends[i];
    }
    return 0;
}

void shape_languages(request *req, const char *system, size_t system_length, const char *message, size_t length,
                     shape *out) {
    const span all = { message, length };
    span rest = { system, system_length };
    finder f = { .b = req->backend, .out = out };
    cJSON *values = find_json(req, all, &out->begin);
    find_languages(&f, rest);
    if (!values) out->begin = instruction_of(req->backend, all, out->translates && out->target[0]);
    out->json = values != NULL;
    find_languages(&f, (span){ message, out->begin });
    if (is_weblate(values)) { /* ignore the instruction, which explains the form with examples */
        take_code(out->source, text_of(values, "source_language"));
        take_code(out->target, text_of(values, "target_language"));
        out->translates = 1, rest.length = 0;
    }
    cJSON_Delete(values);
    take_terms(req, rest);
    out->end = length;
    if (!out->json) {
        const span text = take_glossaries(req, (span){ message + out->begin, length - out->begin });
        out->begin = (size_t)(text.data - message), out->end = out->begin + text.length;
    }
    if (req->terms.failed) refuse_memory(req);
}

void shape_read(request *req, const char *message, size_t length, shape *out) {
    const span all = { message, length };
    cJSON *values = out->json ? find_json(req, all, &out->begin) : NULL;
    out->json = out->structured = values != NULL;
    if (values && is_subtitles(values)) take_subtitles(req, out, values);
    else if (values && is_weblate(values)) take_weblate(req, out, values);
    else if (values) take_value(req, out, values);
    else if (!req->refusal) take_plain(req, (span){ message + out->begin, out->end - out->begin }, out);
    cJSON_Delete(values);
    if (out->frame.failed || req->context.failed || req->terms.failed) refuse_memory(req);
}
