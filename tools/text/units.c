/* units.c - see units.h.
 *
 * Contents
 *   1. Reading  what all forms share
 *   2. TSV
 *   3. PO
 *   4. XML      TMX and XLIFF
 *   5. Forms
 */
#include "tools/text/units.h"
#include "tools/text/heading.h"
#include "tools/text/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLANKS " \t\r\n"

/* ---- 1. Reading ---------------------------------------------------------------------------------------- */

typedef struct reader {
    const char *data;
    size_t length, at;
    size_t line; /* number of the line at `at`, from 1 */
    text_unit_fn add;
    void *user;
    moe_status status;
    moe_error *error;
} reader;

static moe_span span_of(const text_bytes *b) { return (moe_span){ b->data ? b->data : "", b->length }; }

static int is_blank(moe_span s) { return !text_trimmed(s.data, s.length, BLANKS).length; }

static void refuse(reader *r, const char *why) {
    if (r->status) return;
    r->status = text_fail(r->error, MOE_ERROR_ARGUMENT, "", "%s", why);
    if (r->error) snprintf(r->error->where, sizeof r->error->where, "line %zu", r->line);
}

static void lose(reader *r) {
    if (!r->status) r->status = text_out_of_memory(r->error);
}

static void give(reader *r, moe_span source_language, moe_span target_language, moe_span source, moe_span target) {
    if (r->status || is_blank(source) || is_blank(target)) return;
    if (!text_is_usable(source.data, source.length) || !text_is_usable(target.data, target.length)) {
        refuse(r, "not valid UTF-8, or contains a NUL byte; save the file as UTF-8");
        return;
    }
    r->status = r->add(r->user, source_language, target_language, source, target, r->error);
    if (r->status && r->error) snprintf(r->error->where, sizeof r->error->where, "line %zu", r->line);
}

/* Take the next line without its end; return 0 after the last line. */
static int next_line(reader *r, moe_span *line) {
    if (r->at >= r->length) return 0;
    const char *begin = r->data + r->at, *end = memchr(begin, '\n', r->length - r->at);
    size_t n = end ? (size_t)(end - begin) : r->length - r->at;
    r->at += n + (end != NULL);
    r->line++;
    while (n && begin[n - 1] == '\r') n--;
    *line = (moe_span){ begin, n };
    return 1;
}

/* ---- 2. TSV -------------------------------------------------------------------------------------------- */

static void read_tsv(reader *r) {
    const moe_span none = { "", 0 };
    moe_span line;
    int first = 1;
    r->line = 0;
    while (!r->status && next_line(r, &line)) {
        const char *tab = memchr(line.data, '\t', line.length);
        if (!tab && (is_blank(line) || *line.data == '#')) continue;
        if (!tab) {
            refuse(r, "expected source TAB translation");
            return;
        }
        const moe_span source = text_trimmed(line.data, (size_t)(tab - line.data), BLANKS);
        const size_t rest = line.length - (size_t)(tab + 1 - line.data);
        const moe_span target = text_trimmed(tab + 1, rest, BLANKS);
        if (memchr(target.data, '\t', target.length)) refuse(r, "expected two columns: source TAB translation");
        else if (*line.data != '#' && !(first && text_is_heading(NULL, source, target)))
            give(r, none, none, source, target);
        first = 0;
    }
}

/* ---- 3. PO --------------------------------------------------------------------------------------------- */

enum { CONTEXT, SOURCE, SOURCES, TARGET, TARGETS, IGNORED, FIELDS }; /* singular and plural sources and targets */

typedef struct message {
    text_bytes fields[FIELDS];
    text_bytes language; /* of the header */
    int fuzzy, field;    /* `field` continues on the next line; -1 if none does */
    int has_source, has_target;
    size_t line;
} message;

/* Append a string of C at the beginning of `s`, which must end the line. Return 0 if it is damaged. */
static int put_string(moe_span s, text_bytes *out) {
    static const char codes[] = "n\nt\tr\ra\ab\bf\fv\v\"\"\\\\";
    s = text_trimmed(s.data, s.length, BLANKS);
    if (s.length < 2 || s.data[0] != '"' || s.data[s.length - 1] != '"') return 0;
    for (size_t i = 1; i + 1 < s.length; i++) {
        char c = s.data[i];
        if (c == '"') return 0;
        if (c == '\\') {
            const char *code = i + 2 < s.length ? codes : NULL;
            for (i++; code && *code && *code != s.data[i];) code += 2;
            if (!code || !*code) return 0;
            c = code[1];
        }
        text_append(out, &c, 1);
    }
    return 1;
}

/* Take the language from the header, the translation of the empty message. */
static void take_header(message *m) {
    const moe_span all = span_of(&m->fields[TARGET]);
    for (size_t at = 0; at < all.length; at++) {
        const char *end = memchr(all.data + at, '\n', all.length - at);
        const size_t n = (end ? (size_t)(end - all.data) : all.length) - at;
        if (text_begins_with(all.data + at, n, "Language:")) {
            const moe_span code = text_trimmed(all.data + at + 9, n - 9, BLANKS);
            text_append(&m->language, code.data, code.length);
        }
        at += n;
    }
}

/* Finish a message. With plurals, the first and the second form translate the singular and the plural. */
static void end_message(reader *r, message *m) {
    const moe_span none = { "", 0 }, to = span_of(&m->language);
    const moe_span source = span_of(&m->fields[SOURCE]), target = span_of(&m->fields[TARGET]);
    const size_t line = r->line;
    for (int i = 0; i < FIELDS; i++)
        if (m->fields[i].failed) lose(r);
    if (m->has_source) r->line = m->line;
    if (m->has_source && !m->has_target) refuse(r, "a msgid without msgstr");
    else if (m->has_source && !source.length) take_header(m);
    else if (m->has_source && !m->fuzzy) {
        const moe_span plural = span_of(&m->fields[TARGETS]);
        give(r, none, to, source, target);
        if (m->fields[SOURCES].length) give(r, none, to, span_of(&m->fields[SOURCES]), plural.length ? plural : target);
    }
    r->line = line;
    for (int i = 0; i < FIELDS; i++) text_clear(&m->fields[i]);
    m->fuzzy = m->has_source = m->has_target = 0, m->field = -1;
}

static void take_keyword(reader *r, message *m, moe_span line) {
    static const struct {
        const char *word;
        int field;
    } words[] = { { "msgctxt", CONTEXT },   { "msgid_plural", SOURCES }, { "msgid", SOURCE },  { "msgstr[0]", TARGET },
                  { "msgstr[1]", TARGETS }, { "msgstr[", IGNORED },      { "msgstr", TARGET }, { "domain", IGNORED } };
    size_t i = 0;
    while (i < sizeof words / sizeof *words && !text_begins_with(line.data, line.length, words[i].word)) i++;
    const char *quote = memchr(line.data, '"', line.length);
    if (i == sizeof words / sizeof *words || !quote) {
        refuse(r, "expected msgid, msgstr or a string in quotes");
        return;
    }
    const int field = words[i].field;
    if (field == CONTEXT || (field == SOURCE && m->has_source)) {
        const int fuzzy = m->fuzzy && !m->has_target;
        if (m->has_source) end_message(r, m);
        m->fuzzy |= fuzzy;
    }
    if (field == SOURCE) m->has_source = 1, m->line = r->line;
    m->has_target |= field == TARGET;
    m->field = field;
    if (!put_string((moe_span){ quote, line.length - (size_t)(quote - line.data) }, &m->fields[field]))
        refuse(r, "the string is not closed, or has an unknown escape");
}

static void read_po(reader *r) {
    message m = { .field = -1 };
    moe_span line;
    r->line = 0;
    while (!r->status && next_line(r, &line)) {
        const moe_span text = text_trimmed(line.data, line.length, BLANKS);
        if (!text.length) {
            if (m.has_target) end_message(r, &m);
        } else if (*text.data == '#') {
            if (m.has_target) end_message(r, &m);
            if (text.length > 1 && text.data[1] == ',')
                for (size_t i = 0; i + 5 <= text.length; i++) m.fuzzy |= memcmp(text.data + i, "fuzzy", 5) == 0;
        } else if (*text.data != '"') {
            take_keyword(r, &m, text);
        } else if (m.field < 0 || !put_string(text, &m.fields[m.field])) {
            refuse(r,
                   m.field < 0 ? "a string outside a message" : "the string is not closed, or has an unknown escape");
        }
    }
    if (!r->status) end_message(r, &m);
    for (int i = 0; i < FIELDS; i++) text_bytes_free(&m.fields[i]);
    text_bytes_free(&m.language);
}

/* ---- 4. XML -------------------------------------------------------------------------------------------- */

typedef enum event { END, TEXT, OPEN, CLOSE } event;

/* A tag or a text. An empty element is an OPEN and a CLOSE event. */
typedef struct token {
    event kind;
    moe_span name; /* of a tag, without the prefix of its name space */
    moe_span rest; /* attributes of an OPEN tag; a text */
    int raw;       /* 1 for a text without entities (CDATA) */
    int empty;     /* 1 for the OPEN event of an empty element */
} token;

/* Skip up to the end of `sign`. Return the length of the bytes before it. */
static size_t skip_past(reader *r, const char *sign, const char *why) {
    const size_t begin = r->at, n = strlen(sign);
    for (; r->at + n <= r->length; r->at++) {
        if (memcmp(r->data + r->at, sign, n) == 0) {
            r->at += n;
            return r->at - n - begin;
        }
        r->line += r->data[r->at] == '\n';
    }
    refuse(r, why);
    return 0;
}

/* Skip a DOCTYPE with its declarations. They are not read: only predefined and numeric entities are known. */
static void skip_doctype(reader *r) {
    for (int depth = 0; r->at < r->length; r->at++) {
        const char c = r->data[r->at];
        r->line += c == '\n';
        depth += (c == '[') - (c == ']');
        if (c == '>' && !depth) {
            r->at++;
            return;
        }
    }
    refuse(r, "a DOCTYPE is not closed");
}

/* Read a tag, whose < is at `at`. */
static void take_tag(reader *r, token *t) {
    size_t i = r->at + 1;
    const int closes = i < r->length && r->data[i] == '/';
    const size_t begin = i += (size_t)closes;
    size_t lines = 0;
    char quote = 0;
    while (i < r->length && !strchr(" \t\r\n/>", r->data[i])) i++;
    t->name = (moe_span){ r->data + begin, i - begin };
    const char *colon = memchr(t->name.data, ':', t->name.length);
    if (colon) t->name.length -= (size_t)(colon + 1 - t->name.data), t->name.data = colon + 1;
    const size_t attributes = i;
    for (; i < r->length && (quote || r->data[i] != '>'); i++) {
        const char c = r->data[i];
        lines += c == '\n';
        if (quote ? c == quote : c == '"' || c == '\'') quote = quote ? 0 : c;
        if (!quote && c == '<') break;
    }
    if (i >= r->length || r->data[i] != '>' || !t->name.length) {
        refuse(r, "a tag is not closed");
        return;
    }
    t->kind = closes ? CLOSE : OPEN;
    t->empty = !closes && i > attributes && r->data[i - 1] == '/';
    t->rest = (moe_span){ r->data + attributes, i - attributes - (size_t)t->empty };
    r->at = i + 1;
    r->line += lines;
}

/* Return the next tag or text; END also after an error. */
static token next_token(reader *r) {
    static const char begins[] = "<![CDATA[";
    token t = { .kind = END };
    while (!r->status && r->at < r->length) {
        const char *rest = r->data + r->at;
        const size_t n = r->length - r->at;
        if (*rest != '<') {
            const char *end = memchr(rest, '<', n);
            t.kind = TEXT, t.rest = (moe_span){ rest, end ? (size_t)(end - rest) : n };
            for (size_t i = 0; i < t.rest.length; i++) r->line += rest[i] == '\n';
            r->at += t.rest.length;
            return t;
        }
        if (text_begins_with(rest, n, "<!--")) skip_past(r, "-->", "a comment is not closed");
        else if (text_begins_with(rest, n, "<?")) skip_past(r, "?>", "a processing instruction is not closed");
        else if (text_begins_with(rest, n, begins)) {
            r->at += sizeof begins - 1;
            t.kind = TEXT, t.raw = 1, t.rest.data = r->data + r->at;
            t.rest.length = skip_past(r, "]]>", "a CDATA section is not closed");
            if (r->status) t.kind = END;
            return t;
        } else if (text_begins_with(rest, n, "<!")) skip_doctype(r);
        else {
            take_tag(r, &t);
            if (r->status) t.kind = END;
            return t;
        }
    }
    return t;
}

/* Append a character of a numeric reference such as &#xE4; Return 0 if it is none. */
static int put_number(moe_span name, text_bytes *out) {
    char digits[12], *end, bytes[4];
    const int hex = name.length > 1 && (name.data[1] == 'x' || name.data[1] == 'X');
    if (name.length < 2 || *name.data != '#' || name.length - 1 - (size_t)hex >= sizeof digits) return 0;
    snprintf(digits, sizeof digits, "%.*s", (int)(name.length - 1 - (size_t)hex), name.data + 1 + hex);
    const unsigned long c = strtoul(digits, &end, hex ? 16 : 10);
    if (*end || !*digits || !c || c > 0x10FFFF || (c >= 0xD800 && c < 0xE000)) return 0;
    const size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned leads[] = { 0, 0, 0xC0, 0xE0, 0xF0 };
    for (size_t i = n; i--;) {
        const unsigned long part = c >> (6 * (n - 1 - i));
        bytes[i] = (char)(i ? 0x80 | (part & 0x3F) : leads[n] | part);
    }
    text_append(out, bytes, n);
    return 1;
}

/* Append text with its entities replaced; an unknown entity stays as it is. */
static void put_text(moe_span s, int raw, text_bytes *out) {
    static const char *const names[] = { "amp", "lt", "gt", "quot", "apos" };
    static const char signs[] = "&<>\"'";
    for (size_t i = 0; i < s.length; i++) {
        const char *end = s.data[i] == '&' && !raw ? memchr(s.data + i, ';', s.length - i) : NULL;
        const moe_span name = { s.data + i + 1, end ? (size_t)(end - s.data) - i - 1 : 0 };
        int known = end && name.length < 12 && put_number(name, out);
        for (size_t k = 0; k < 5 && end && !known; k++)
            if ((known = text_is(name.data, name.length, names[k]))) text_append(out, signs + k, 1);
        if (known) i += name.length + 1;
        else text_append(out, s.data + i, 1);
    }
}

/* Append the value of an attribute, whatever its name space. */
static int put_attribute(moe_span all, const char *name, text_bytes *out) {
    const size_t n = strlen(name);
    for (size_t i = 1; i + n + 2 < all.length; i++) {
        if (memcmp(all.data + i, name, n) != 0 || !strchr(" \t\r\n:", all.data[i - 1])) continue;
        size_t at = i + n;
        while (at < all.length && strchr(BLANKS, all.data[at])) at++;
        if (at + 1 >= all.length || all.data[at] != '=') continue;
        for (at++; at < all.length && strchr(BLANKS, all.data[at]);) at++;
        const char quote = at < all.length ? all.data[at++] : 0;
        const char *end = quote == '"' || quote == '\'' ? memchr(all.data + at, quote, all.length - at) : NULL;
        if (!end) return 0;
        put_text((moe_span){ all.data + at, (size_t)(end - all.data) - at }, 0, out);
        return 1;
    }
    return 0;
}

static int is(const token *t, const char *name) { return text_is(t->name.data, t->name.length, name); }

/* Append a tag of XLIFF as it is. */
static void put_tag(const token *t, text_bytes *out) {
    text_append_string(out, t->kind == CLOSE ? "</" : "<");
    text_append(out, t->name.data, t->name.length);
    if (t->kind == OPEN) text_append(out, t->rest.data, t->rest.length);
    text_append_string(out, t->empty ? "/>" : ">");
}

/* Read the text of an element up to its end. Tags inside it are kept if `tags` is 1, except <mrk>. */
static void take_content(reader *r, const token *of, int tags, text_bytes *out) {
    const moe_span name = of->name;
    size_t depth = 1;
    text_clear(out);
    if (of->empty) return;
    while (!r->status) {
        const token t = next_token(r);
        if (t.kind == END) refuse(r, "the file ends inside a text");
        if (t.kind == TEXT) put_text(t.rest, t.raw, out);
        if (t.kind < OPEN) continue;
        if (text_same(t.name, name)) depth += t.kind == OPEN ? !t.empty : (size_t)-1;
        if (!depth) break;
        if (tags && !is(&t, "mrk")) put_tag(&t, out);
    }
    if (out->failed) lose(r);
}

/* A text of a TMX unit. */
typedef struct variant {
    text_bytes language, text;
} variant;

enum { MOST_VARIANTS = 64 };

/* Give each pair of variants in different languages. */
static void give_variants(reader *r, const variant *all, size_t n) {
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < n; k++)
            if (k != i)
                give(r, span_of(&all[i].language), span_of(&all[k].language), span_of(&all[i].text),
                     span_of(&all[k].text));
}

static void read_tmx(reader *r) {
    variant all[MOST_VARIANTS] = { 0 };
    size_t n = 0;
    int ended = 0, inside = 0;
    while (!r->status) {
        const token t = next_token(r);
        if (t.kind == END) break;
        if (t.kind == TEXT) continue;
        if (is(&t, "tu")) {
            if (t.kind == CLOSE) give_variants(r, all, n);
            inside = t.kind == OPEN && !t.empty, n = 0;
        } else if (is(&t, "tuv") && t.kind == OPEN && inside) {
            if (n == MOST_VARIANTS) refuse(r, "a unit has more than 64 languages");
            if (r->status) break;
            text_clear(&all[n].language), text_clear(&all[n].text);
            if (!put_attribute(t.rest, "lang", &all[n].language)) refuse(r, "a <tuv> has no xml:lang");
            n++;
        } else if (is(&t, "seg") && t.kind == OPEN && n) {
            take_content(r, &t, 0, &all[n - 1].text);
        }
        ended |= is(&t, "tmx") && t.kind == CLOSE;
    }
    if (!ended) refuse(r, "the file ends before </tmx>");
    for (size_t i = 0; i < MOST_VARIANTS; i++) text_bytes_free(&all[i].language), text_bytes_free(&all[i].text);
}

/* Return 1 for the state of a target that is no translation yet. */
static int is_unfinished(moe_span attributes) {
    text_bytes state = { 0 };
    const int found = put_attribute(attributes, "state", &state);
    const int is_new =
        found && text_is_listed("new initial needs-translation", state.data ? state.data : "", state.length);
    text_bytes_free(&state);
    return is_new;
}

static void read_xliff(reader *r, token t) {
    text_bytes languages[2] = { 0 }, texts[2] = { 0 };
    int ended = 0, unfinished = 0, other = 0; /* `other`: inside <alt-trans> or <glossary> */
    for (; t.kind != END && !r->status; t = next_token(r)) {
        if (t.kind == TEXT) continue;
        const int opens = t.kind == OPEN;
        if (is(&t, "alt-trans") || is(&t, "glossary") || is(&t, "matches")) other = opens && !t.empty;
        else if (opens && (is(&t, "xliff") || is(&t, "file"))) {
            static const char *const names[2][2] = { { "source-language", "target-language" },
                                                     { "srcLang", "trgLang" } };
            for (int i = 0; i < 4; i++) {
                text_bytes code = { 0 };
                text_bytes *to = &languages[i % 2];
                if (put_attribute(t.rest, names[i / 2][i % 2], &code)) {
                    text_clear(to);
                    text_append(to, code.data, code.length);
                }
                text_bytes_free(&code);
            }
        } else if (opens && (is(&t, "trans-unit") || is(&t, "segment") || is(&t, "ignorable"))) {
            text_clear(&texts[0]), text_clear(&texts[1]);
            unfinished = is_unfinished(t.rest) || is(&t, "ignorable");
        } else if (opens && !other && is(&t, "source")) take_content(r, &t, 1, &texts[0]);
        else if (opens && !other && is(&t, "target")) {
            unfinished |= is_unfinished(t.rest);
            take_content(r, &t, 1, &texts[1]);
        } else if (!opens && (is(&t, "trans-unit") || is(&t, "segment")) && !unfinished)
            give(r, span_of(&languages[0]), span_of(&languages[1]), span_of(&texts[0]), span_of(&texts[1]));
        ended |= is(&t, "xliff") && !opens;
    }
    if (!ended) refuse(r, "the file ends before </xliff>");
    for (int i = 0; i < 2; i++) text_bytes_free(&languages[i]), text_bytes_free(&texts[i]);
}

/* ---- 5. Forms ------------------------------------------------------------------------------------------ */

/* Convert UTF-16 to UTF-8. Return 0 if it is damaged. */
static int from_utf16(const char *data, size_t length, int big, text_bytes *out) {
    for (size_t i = 2; i + 1 < length; i += 2) {
        const unsigned char *b = (const unsigned char *)data + i;
        unsigned long c = big ? (unsigned)b[0] << 8 | b[1] : (unsigned)b[1] << 8 | b[0];
        char number[16];
        if (c >= 0xD800 && c < 0xDC00 && i + 3 < length) {
            const unsigned low = big ? (unsigned)b[2] << 8 | b[3] : (unsigned)b[3] << 8 | b[2];
            if (low < 0xDC00 || low > 0xDFFF) return 0;
            c = 0x10000 + ((c - 0xD800) << 10 | (low - 0xDC00)), i += 2;
        }
        const char ascii = (char)c;
        if (c < 0x80) text_append(out, &ascii, 1);
        else {
            const int n = snprintf(number, sizeof number, "#%lu", c);
            if (!put_number((moe_span){ number, (size_t)n }, out)) return 0;
        }
    }
    return length % 2 == 0;
}

static void read_xml(reader *r) {
    token t = next_token(r);
    while (t.kind == TEXT && is_blank(t.rest)) t = next_token(r);
    if (t.kind == OPEN && is(&t, "tmx")) read_tmx(r);
    else if (t.kind == OPEN && is(&t, "xliff")) read_xliff(r, t);
    else refuse(r, "expected TMX or XLIFF: the root element is neither <tmx> nor <xliff>");
}

/* Return 1 if the first line that is not a comment is a keyword of PO. */
static int is_po(reader r) {
    moe_span line;
    while (next_line(&r, &line)) {
        const moe_span s = text_trimmed(line.data, line.length, BLANKS);
        if (!s.length || *s.data == '#') continue;
        return text_prefix("msgid msgctxt domain", s.data, s.length) && memchr(s.data, '"', s.length) != NULL;
    }
    return 0;
}

moe_status text_units_read(const char *data, size_t length, text_unit_fn add, void *user, moe_error *error) {
    text_bytes converted = { 0 };
    reader r = { .data = data, .length = length, .line = 1, .add = add, .user = user, .error = error };
    const int wide = text_begins_with(data, length, "\xFF\xFE")   ? 1
                     : text_begins_with(data, length, "\xFE\xFF") ? 2
                                                                  : 0;
    if (wide) {
        if (!from_utf16(data, length, wide == 2, &converted)) refuse(&r, "damaged UTF-16");
        if (converted.failed) lose(&r);
        r.data = converted.data ? converted.data : "", r.length = converted.length;
    } else if (text_begins_with(data, length, "\xEF\xBB\xBF")) r.at = 3;
    const moe_span rest = text_trimmed(r.data + r.at, r.length - r.at, BLANKS);
    if (r.status) {
    } else if (rest.length && *rest.data == '<') read_xml(&r);
    else if (is_po(r)) read_po(&r);
    else read_tsv(&r);
    text_bytes_free(&converted);
    return r.status;
}
