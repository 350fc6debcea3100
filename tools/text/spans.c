/* spans.c - spans.h says what this is and has the contracts. Each function below tells how many bytes of its kind a
 * text begins with; 0: none. */
#include "tools/text/spans.h"

#include <string.h>

enum { LONGEST = 1000 }; /* bytes of a tag or placeholder: beyond that a bracket is just a bracket */

static int is_digit(char c) { return c >= '0' && c <= '9'; }
static int is_small(char c) { return c >= 'a' && c <= 'z'; }
static int is_letter(char c) { return is_small(c) || (c >= 'A' && c <= 'Z'); }
static int is_alnum(char c) { return is_letter(c) || is_digit(c); }
static int is_beyond_ascii(char c) { return (unsigned char)c >= 0x80; }
static int is_space(char c) { return c == ' ' || c == '\t'; }

/* The character at data[at], and its bytes. */
static unsigned long character(const char *data, size_t length, size_t at, size_t *bytes) {
    const unsigned char c = (unsigned char)data[at];
    unsigned long code = c < 0x80 ? c : c < 0xE0 ? c & 0x1Fu : c < 0xF0 ? c & 0x0Fu : c & 0x07u;
    *bytes = c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    if (*bytes > length - at) *bytes = length - at;
    for (size_t i = 1; i < *bytes; i++) code = code << 6 | ((unsigned char)data[at + i] & 0x3Fu);
    return code;
}

int text_is_wordlike(const char *data, size_t length, size_t at) {
    size_t bytes;
    if (at >= length) return 0;
    if (!is_beyond_ascii(data[at])) return is_alnum(data[at]) || data[at] == '_';
    const unsigned long c = character(data, length, at, &bytes);
    return c >= 0xC0 && (c < 0x2000 || c > 0x206F) && (c < 0x3000 || c > 0x3003);
}

/* ---- Markup ---- */

static size_t tag(const char *s, size_t n, text_span_kind *kind) {
    static const char *const empty[] = { "area", "br",   "col",    "embed", "hr",  "img", "input",
                                         "link", "meta", "source", "track", "wbr", "x",   "ph" };
    size_t at = 1, length;
    char quote = 0;
    const char *name;
    if (n > 7 && memcmp(s, "<!--", 4) == 0) {
        for (at = 4; at + 3 <= n && at < LONGEST; at++)
            if (memcmp(s + at, "-->", 3) == 0) return *kind = TEXT_SPAN_LONE, at + 3;
        return 0;
    }
    *kind = TEXT_SPAN_OPEN;
    if (n > 1 && s[1] == '/') at = 2, *kind = TEXT_SPAN_CLOSE;
    if (at >= n || !(is_letter(s[at]) || (is_digit(s[at]) && n > at + 1))) return 0;
    for (; at < n && at < LONGEST; at++) {
        if (quote) quote = s[at] == quote ? 0 : quote;
        else if ((s[at] == '"' || s[at] == '\'') && s[at - 1] == '=') quote = s[at];
        else if (s[at] == '<') return 0;
        else if (s[at] == '>') break;
    }
    if (at >= n || at == LONGEST) return 0;
    length = text_tag_name(s, at + 1, &name);
    if (s[at - 1] == '/') *kind = TEXT_SPAN_LONE;
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++)
        if (length == strlen(empty[i]) && memcmp(name, empty[i], length) == 0) *kind = TEXT_SPAN_LONE;
    return at + 1;
}

size_t text_tag_name(const char *s, size_t n, const char **name) {
    size_t at = n > 1 && s[1] == '/' ? 2 : 1, begin = at;
    while (at < n && (is_alnum(s[at]) || s[at] == '-' || s[at] == ':' || s[at] == '_')) at++;
    *name = s + begin;
    return at - begin;
}

/* &amp; &#8211; &#x2013; */
static size_t entity(const char *s, size_t n) {
    size_t at = 1;
    if (at < n && s[at] == '#') at++;
    while (at < n && at < 32 && is_alnum(s[at])) at++;
    return at > 2 && at < n && s[at] == ';' ? at + 1 : 0;
}

/* ---- Placeholders ---- */

/* {name}, {{x}}, { count, plural, one {# file} }: to the bracket that closes the first one. */
static size_t braces(const char *s, size_t n) {
    size_t depth = 0;
    for (size_t at = 0; at < n && at < LONGEST; at++) {
        if (s[at] == '{') depth++;
        if (s[at] == '}' && --depth == 0) return at + 1;
    }
    return 0;
}

/* %s %-5.2f %1$s %(name)s %{name} %name% %@ */
static size_t percent(const char *s, size_t n) {
    size_t at = 1, end;
    if (at < n && s[at] == '{') return (end = braces(s + 1, n - 1)) ? end + 1 : 0;
    if (at < n && s[at] == '(') {
        while (at < n && at < LONGEST && s[at] != ')') at++;
        if (at < n && s[at] == ')') at++;
    }
    for (end = at; end < n && (is_alnum(s[end]) || s[end] == '_'); end++) {}
    if (at == 1 && end > at + 1 && end < n && s[end] == '%' && is_letter(s[1])) return end + 1;
    while (at < n && (is_digit(s[at]) || strchr("$-+#.*'", s[at]))) at++;
    while (at < n && strchr("hlqjzt", s[at]) && at + 1 < n && is_letter(s[at + 1])) at++;
    if (at >= n || !strchr("diouxXeEfFgGaAcspn@", s[at]) || !s[at]) return 0;
    at++;
    return at < n && (is_alnum(s[at]) || is_beyond_ascii(s[at])) ? 0 : at;
}

/* ${x} $name #{x} */
static size_t dollar(const char *s, size_t n) {
    size_t at = 1, end;
    if (at < n && s[at] == '{') return (end = braces(s + 1, n - 1)) ? end + 1 : 0;
    if (s[0] != '$' || at >= n || !(is_letter(s[at]) || s[at] == '_')) return 0;
    while (at < n && (is_alnum(s[at]) || s[at] == '_')) at++;
    return at;
}

/* `code` */
static size_t code(const char *s, size_t n) {
    size_t ticks = 0, at;
    while (ticks < n && s[ticks] == '`') ticks++;
    for (at = ticks; at + ticks <= n && at < LONGEST; at++)
        if (s[at] == '`' && memcmp(s + at, s, ticks) == 0) return at > ticks ? at + ticks : 0;
    return 0;
}

/* ---- Addresses ---- */

/* Without the signs at its end that belong to the sentence. */
static size_t without_end(const char *s, size_t n) {
    while (n && strchr(".,;:!?'\"", s[n - 1])) n--;
    if (n && s[n - 1] == ')' && !memchr(s, '(', n)) return without_end(s, n - 1);
    return n;
}

static size_t address(const char *s, size_t n) {
    size_t at = 0, end;
    while (at < n && (is_letter(s[at]) || (at && strchr("+-.", s[at])))) at++;
    if (at > 1 && n - at > 3 && memcmp(s + at, "://", 3) == 0) at += 3;
    else if (at > 6 && n - at > 1 && s[at] == ':' && memcmp(s, "mailto", 6) == 0) at++;
    else if (n > 5 && memcmp(s, "www.", 4) == 0) at = 4;
    else return 0;
    for (end = at; end < n && !is_space(s[end]) && !strchr("<>\"`{}|\\^", s[end]); end++) {}
    for (size_t i = at; i + 1 < end; i++) /* the quotes and full stops of other languages end it as well */
        if ((s[i] == '\xC2' && s[i + 1] == '\xBB') || (s[i] == '\xE2' && s[i + 1] == '\x80')) end = i;
    end = without_end(s, end);
    return end > at ? end : 0;
}

/* name@example.org, @name */
static size_t mail(const char *s, size_t n) {
    size_t at = 0, end, dot = 0;
    while (at < n && (is_alnum(s[at]) || strchr("._%+-", s[at]))) at++;
    if (at >= n || s[at] != '@') return 0;
    for (end = at + 1; end < n && (is_alnum(s[end]) || strchr(".-_", s[end])); end++)
        if (s[end] == '.') dot = end;
    if (!at) return (end = without_end(s, end)) > 1 ? end : 0;
    end = without_end(s, end);
    return dot && end > at + 3 ? end : 0;
}

/* /usr/lib, ./a, ~/b, C:\x, src/main.c, report.pdf, some_name */
static size_t path(const char *s, size_t n) {
    size_t end = 0, slashes = 0, joints = 0;
    if (n > 2 && is_letter(s[0]) && s[1] == ':' && s[2] == '\\') {
        for (end = 3; end < n && !is_space(s[end]) && !strchr("<>\"|?*", s[end]); end++) {}
        return without_end(s, end);
    }
    for (; end < n && (is_alnum(s[end]) || strchr("._-/~+", s[end])); end++) {}
    if (end < n && is_beyond_ascii(s[end]) && text_is_wordlike(s, n, end)) return 0;
    end = without_end(s, end);
    for (size_t i = 0; i < end; i++) {
        slashes += s[i] == '/';
        if (s[i] == '_' && i && i + 1 < end && is_alnum(s[i - 1]) && is_alnum(s[i + 1])) joints++;
        if (s[i] == '.' && i > 1 && i + 1 < end && is_alnum(s[i - 1]) && is_alnum(s[i - 2]) && is_small(s[i + 1]) &&
            !is_digit(s[i - 1]))
            joints++;
    }
    if (end > 3 && (s[0] == '/' || memcmp(s, "./", 2) == 0 || memcmp(s, "~/", 2) == 0 || memcmp(s, "../", 3) == 0) &&
        (slashes > 1 || s[0] != '/'))
        return end;
    return (joints && is_alnum(s[0])) || slashes > 2 ? end : 0;
}

/* ---- Numbers ---- */

/* Units that all languages write alike; the short ones only without a space. */
static size_t unit(const char *s, size_t n) {
    static const char units[] = "km/h kWh kHz MHz GHz km cm mm kg mg kB KB MB GB TB Hz kW MW ml cl dl ha px pt "
                                "\xC2\xB0"
                                "C \xC2\xB0"
                                "F \xC2\xB0 % \xE2\x80\xB0 \xE2\x82\xAC $ \xC2\xA3 \xC2\xA5 m g l s h V W A K";
    const int spaced = n && s[0] == ' ';
    if (spaced) s++, n--;
    for (const char *u = units; *u;) {
        const size_t length = strcspn(u, " ");
        if ((length > 1 || !spaced || !is_letter(*u)) && length <= n && memcmp(s, u, length) == 0 &&
            !text_is_wordlike(s, n, length))
            return length + (size_t)spaced;
        u += length + (u[length] == ' ');
    }
    return 0;
}

/* 3 1,234.50 12:30 2024-05-01 $5 85.5 kg A320 COVID-19; not 21st, 1990s, which are language. */
static size_t number(const char *s, size_t n) {
    size_t at = 0, end;
    while (at < n && is_letter(s[at])) at++;
    if (at) { /* a word with digits */
        if (at < n && s[at] == '-') at++;
        if (at >= n || !is_digit(s[at])) return 0;
        while (at < n && is_alnum(s[at])) at++;
        return text_is_wordlike(s, n, at) ? 0 : at;
    }
    if (n > 1 && strchr("$+-#", s[0])) at = 1;
    else if (n > 3 && memcmp(s, "\xE2\x82\xAC", 3) == 0) at = 3;
    else if (n > 2 && (memcmp(s, "\xC2\xA3", 2) == 0 || memcmp(s, "\xC2\xA5", 2) == 0)) at = 2;
    if (at >= n || !is_digit(s[at])) return 0;
    for (end = at; end < n; end++)
        if (!is_digit(s[end]) && !(strchr(".,:/-'", s[end]) && s[end] && end + 1 < n && is_digit(s[end + 1]))) break;
    at = end + unit(s + end, n - end);
    return text_is_wordlike(s, n, at) && at == end ? 0 : at;
}

/* ---- Signs ---- */

static int is_pictogram(unsigned long c) {
    return (c >= 0x1F000 && c <= 0x1FAFF) || (c >= 0x2600 && c <= 0x27BF) || (c >= 0x2B00 && c <= 0x2BFF) ||
           (c >= 0x2190 && c <= 0x23FF) || c == 0xA9 || c == 0xAE || c == 0x2122;
}

/* Pictograms one behind the other, with what joins and changes them. */
static size_t emoji(const char *s, size_t n) {
    size_t at = 0, bytes = 0;
    if (n > 6 && strchr("0123456789#*", s[0]) && memcmp(s + 1, "\xEF\xB8\x8F\xE2\x83\xA3", 6) == 0) return 7;
    while (at < n && is_beyond_ascii(s[at])) {
        const unsigned long c = character(s, n, at, &bytes);
        if (!is_pictogram(c) && !(at && (c == 0x200D || c == 0xFE0F || c == 0x20E3 || (c >= 0xE0020 && c <= 0xE007F))))
            break;
        at += bytes;
    }
    return at;
}

/* ---- All ---- */

text_span_kind text_span_at(const char *data, size_t length, size_t at, size_t *bytes) {
    const char *s = data + at, c = *s;
    const size_t n = length - at;
    size_t before = at;
    while (before && (before == at || ((unsigned char)data[before] & 0xC0) == 0x80)) before--;
    const int within = at && text_is_wordlike(data, length, before);
    text_span_kind kind = TEXT_SPAN_NONE;
    if (c == '<' && (*bytes = tag(s, n, &kind))) return kind;
    if (c == '\t' && (*bytes = 1)) return TEXT_SPAN_LONE;
    if (c == '&' && (*bytes = entity(s, n))) return TEXT_SPAN_WORD;
    if (c == '{' && (*bytes = braces(s, n)) > 2) return TEXT_SPAN_WORD;
    if (c == '%' && !(at && is_digit(data[at - 1])) && (*bytes = percent(s, n))) return TEXT_SPAN_WORD;
    if ((c == '$' || c == '#') && (*bytes = dollar(s, n))) return TEXT_SPAN_WORD;
    if (c == '`' && (*bytes = code(s, n))) return TEXT_SPAN_WORD;
    if (c == '\\' && n > 1 && strchr("nrt", s[1]) && (*bytes = 2)) return TEXT_SPAN_LONE;
    if (c == '\xC2' && n > 1 && s[1] == '\xAD' && (*bytes = 2)) return TEXT_SPAN_HYPHEN;
    if ((*bytes = emoji(s, n))) return TEXT_SPAN_LONE;
    if (!within && ((*bytes = address(s, n)) || (*bytes = mail(s, n)) || (*bytes = path(s, n)))) return TEXT_SPAN_WORD;
    if (!within && (*bytes = number(s, n))) return TEXT_SPAN_NUMBER;
    character(s, n, 0, bytes);
    return TEXT_SPAN_NONE;
}
