/* spans.c - see spans.h.
 *
 * Functions of (s, n) return the length of a span of their kind at the beginning of s, or 0. If they fail, they have
 * read at most LONGEST bytes, or have stopped where another span of their kind begins, so scans take linear time for
 * any text.
 */
#include "tools/text/spans.h"
#include "tools/text/bytes.h"

#include <stdint.h>
#include <string.h>

/* LONGEST: maximum bytes of a tag or placeholder. SHORT: bytes of a path to examine. DEEPEST: levels of brackets. */
enum { LONGEST = 1000, MESSAGE = 1 << 14, SHORT = 200, MOST_DIGITS = 80, DEEPEST = 16 };

/* ---- 1. Characters ------------------------------------------------------------------------------------- */

static int is_digit(char c) { return c >= '0' && c <= '9'; }
static int is_small(char c) { return c >= 'a' && c <= 'z'; }
static int is_letter(char c) { return is_small(c) || (c >= 'A' && c <= 'Z'); }
static int is_alnum(char c) { return is_letter(c) || is_digit(c); }
static int is_beyond_ascii(char c) { return (unsigned char)c >= 0x80; }
static int is_space(char c) { return c == ' ' || c == '\t'; }
static int is_one_of(char c, const char *list) { return c && strchr(list, c); }

int text_is_wordlike(const char *data, size_t length, size_t at) {
    size_t bytes;
    if (at >= length) return 0;
    if (!is_beyond_ascii(data[at])) return is_alnum(data[at]) || data[at] == '_';
    const uint32_t c = text_utf8_decode(data, length, at, &bytes);
    return c >= 0xC0 && (c < 0x2000 || c > 0x206F) && (c < 0x3000 || c > 0x3003);
}

int text_is_wordlike_before(const char *data, size_t length, size_t at) {
    return at && text_is_wordlike(data, length, text_utf8_cut(data, length, at - 1));
}

/* Return 1 for superscripts and subscripts, which normalisation would turn into plain digits or letters. */
static int is_raised(uint32_t c) {
    return c == 0xB2 || c == 0xB3 || c == 0xB9 || (c >= 0x2070 && c <= 0x209C && c != 0x2071 && c != 0x207F);
}

static int is_composed(uint32_t c) {
    return (c >= 0xBC && c <= 0xBE) || (c >= 0x2100 && c <= 0x218B && c != 0x2122) || (c >= 0x2460 && c <= 0x24FF) ||
           (c >= 0x2776 && c <= 0x2793) || (c >= 0x3200 && c <= 0x33FF);
}

static int is_pictogram(uint32_t c) {
    return (c >= 0x1F000 && c <= 0x1FAFF) || (c >= 0x2600 && c <= 0x27BF) || (c >= 0x2B00 && c <= 0x2BFF) ||
           (c >= 0x2190 && c <= 0x23FF) || c == 0xA9 || c == 0xAE || c == 0x2122;
}

static int is_mark_of_trade(uint32_t c) { return c == 0xAE || c == 0x2122 || c == 0x2120; }

size_t text_word_end(const char *data, size_t length, size_t at) {
    while (text_is_wordlike(data, length, at)) at = text_utf8_next(data, length, at);
    return at;
}

/* ---- 2. Markup ----------------------------------------------------------------------------------------- */

size_t text_tag_name(const char *s, size_t n, const char **name) {
    size_t at = n > 1 && s[1] == '/' ? 2 : 1, begin = at;
    if (!n || s[0] != '<') return *name = s, 0;
    while (at < n && (is_alnum(s[at]) || s[at] == '-' || s[at] == ':' || s[at] == '_')) at++;
    *name = s + begin;
    return at - begin;
}

/* Match an element that stands for a word, with its tags, such as <code>a.txt</code>. */
static size_t whole_element(const char *s, size_t n, size_t at) {
    static const char whole[] =
        "code kbd samp tt math svg script style command literal filename envar varname userinput "
        "computeroutput constant function parameter classname refentrytitle manvolnum";
    const char *name, *other;
    const size_t length = text_tag_name(s, at, &name);
    if (!text_is_listed(whole, name, length)) return 0;
    for (; at < n && at < LONGEST; at++) {
        if (s[at] != '<' || text_tag_name(s + at, n - at, &other) != length || memcmp(name, other, length) != 0)
            continue;
        if (s[at + 1] != '/') return 0;
        at += length + 2;
        return at < n && s[at] == '>' ? at + 1 : 0;
    }
    return 0;
}

static size_t tag(const char *s, size_t n, text_span_kind *kind) {
    static const char empty[] = "area br col embed hr img input link meta source track wbr x ph";
    size_t at = 1, length, whole;
    char quote = 0;
    const char *name;
    *kind = TEXT_SPAN_OPEN;
    if (n > 1 && s[1] == '/') at = 2, *kind = TEXT_SPAN_CLOSE;
    if (at >= n || !(is_letter(s[at]) || (is_digit(s[at]) && n > at + 1))) return 0;
    for (; at < n && at < LONGEST; at++) {
        if (quote) quote = s[at] == quote ? 0 : quote;
        else if (is_one_of(s[at], "\"'") && s[at - 1] == '=') quote = s[at];
        else if (s[at] == '<') return 0;
        else if (s[at] == '>') break;
    }
    if (at >= n || at == LONGEST) return 0;
    length = text_tag_name(s, at + 1, &name);
    if (s[at - 1] == '/' || text_is_listed(empty, name, length)) *kind = TEXT_SPAN_LONE;
    if (*kind == TEXT_SPAN_OPEN && (whole = whole_element(s, n, at + 1))) return *kind = TEXT_SPAN_WORD, whole;
    return at + 1;
}

/* Match an entity such as &amp; or &#8211; or &#x2013; */
static size_t entity(const char *s, size_t n) {
    size_t at = 1;
    if (n < 3 || s[0] != '&') return 0;
    if (s[at] == '#') at++;
    while (at < n && at < 32 && is_alnum(s[at])) at++;
    return at > 2 && at < n && s[at] == ';' ? at + 1 : 0;
}

/* Return 1 for an entity that stands for punctuation or a space, 0 for a letter. */
static int is_sign_entity(const char *s, size_t n) {
    static const char signs[] =
        "quot lt gt nbsp ensp emsp thinsp ldquo rdquo lsquo laquo raquo bdquo sbquo hellip mdash "
        "ndash bull middot larr rarr uarr darr times #34 #x22 #160 #xA0 #xa0 #171 #187 #8211 "
        "#8212 #8216 #8220 #8221 #8222 #8230";
    const size_t bytes = entity(s, n);
    return bytes && text_is_listed(signs, s + 1, bytes - 2);
}

/* ---- 3. Placeholders ----------------------------------------------------------------------------------- */

/* Match the part after % in %s, %-5.2f, %1$s, %lld. If `named` is 1, a name in brackets precedes it. A conversion with
 * a space flag, or without a name and with a letter unknown to printf, must end a word ("50 % der" is text). */
static size_t conversion(const char *s, size_t n, int named) {
    size_t at = 0;
    const int spaced = n && s[0] == ' ';
    while (at < n && at < 32 && (is_digit(s[at]) || is_one_of(s[at], "$-+#.*' "))) {
        if (s[at] == ' ' && at) return 0;
        at++;
    }
    if (at >= n) return 0;
    const size_t size = text_prefix("I64 I32 hh ll h l q j z Z t L I", s + at, n - at);
    if (at + size < n && is_one_of(s[at + size], "diouxXeEfFgGaAcspn")) at += size;
    const int ends = at + 1 >= n || !(is_alnum(s[at + 1]) || is_beyond_ascii(s[at + 1]) || is_one_of(s[at + 1], "_'"));
    if (spaced) return is_one_of(s[at], "diufFeEgGxX") && ends ? at + 1 : 0;
    if (is_one_of(s[at], "diouxXeEfFgGaAcsSpnrbBm@")) return at + 1;
    return is_letter(s[at]) && (ends || named) ? at + 1 : 0; /* %Y, %H */
}

static size_t directive(const char *s, size_t n) {
    const size_t bytes = conversion(s + 1, n - 1, 0);
    return bytes ? bytes + 1 : 0;
}

/* Match %name%. */
static size_t percent_name(const char *s, size_t n) {
    size_t at = 1;
    while (at < n && at < 64 && (is_alnum(s[at]) || is_one_of(s[at], "_.-"))) at++;
    return at > 2 && at < n && s[at] == '%' && is_letter(s[1]) ? at + 1 : 0;
}

/* Match Qt's %1 and %L2. */
static size_t percent_place(const char *s, size_t n) {
    size_t at = n > 1 && s[1] == 'L' ? 2 : 1;
    const size_t begin = at;
    while (at < n && at < begin + 2 && is_digit(s[at])) at++;
    return at > begin && s[begin] != '0' && !(at < n && is_digit(s[at])) ? at : 0;
}

/* Match a name or command in GNU's quotation marks: `make install'. Set *quotes to 1 if the text has such marks, even
 * around something else. */
static size_t gnu_quoted(const char *s, size_t n, int *quotes) {
    size_t at = 1, end = 0, marks = 0;
    int name = n > 2 && (!is_letter(s[1]) || is_small(s[1]) || !is_small(s[2]));
    for (; at < n && at < LONGEST && s[at] != '`'; at++) {
        if (s[at] == '\'' && !text_is_wordlike(s, n, at + 1)) end = end ? end : at, marks++;
        if (!end) name &= is_alnum(s[at]) || is_one_of(s[at], "_-+./*=$% ");
    }
    *quotes = marks == 1 && end > 1 && !is_space(s[end - 1]) && !(end + 1 == at && at < n && s[at] == '`');
    return *quotes && name ? end + 1 : 0;
}

/* Match `code` with the same number of backticks on both sides, or `code'. */
static size_t code(const char *s, size_t n) {
    size_t ticks = 0, at;
    int quotes = 0;
    while (ticks < n && ticks < 9 && s[ticks] == '`') ticks++;
    const size_t quoted = ticks == 1 ? gnu_quoted(s, n, &quotes) : 0;
    if (quotes) return quoted;
    for (at = ticks; ticks < 9 && at + ticks <= n && at < LONGEST; at++)
        if (s[at] == '`' && memcmp(s + at, s, ticks) == 0) return at > ticks ? at + ticks : 0;
    return 0;
}

/* Match $x_1$ but not "$5 and $10": a formula is a single word or has signs that text lacks. */
static size_t formula(const char *s, size_t n) {
    size_t at = 1, spaces = 0, signs = 0;
    if (n < 3 || is_space(s[1]) || s[1] == '$') return 0;
    for (; at < n && at < LONGEST && s[at] != '$'; at++) {
        if (is_space(s[at])) spaces++;
        if (is_one_of(s[at], "\\^_={<>")) signs++;
        if (s[at] == '\\' && at + 1 < n) at++;
    }
    if (at >= n || s[at] != '$' || is_space(s[at - 1]) || (at + 1 < n && is_digit(s[at + 1]))) return 0;
    if (at + 1 < n && (is_letter(s[at + 1]) || s[at + 1] == '{')) return 0; /* $a$b is two names */
    if (!signs && (spaces || is_digit(s[1]) || is_one_of(s[at - 1], "/-:,.(\"'"))) return 0;
    return at + 1;
}

/* Match $name, $HOME, and $LINK_START$ of browser extensions; $HOME$PATH is two names. */
static size_t dollar_name(const char *s, size_t n) {
    size_t at = 1, small = 0;
    if (n < 2 || !(is_letter(s[1]) || s[1] == '_')) return 0;
    for (; at < n && (is_alnum(s[at]) || s[at] == '_'); at++) small |= (size_t)is_small(s[at]);
    if (small || at < 3 || at >= n || s[at] != '$') return at;
    return at + 1 < n && (s[at + 1] == '_' || (is_letter(s[at + 1]) && !is_small(s[at + 1]))) ? at : at + 1;
}

/* Match an emoji code such as :heart: or :+1: */
static size_t shortcode(const char *s, size_t n) {
    size_t at = 1, letters = 0;
    for (; at < n && at < 64 && (is_alnum(s[at]) || is_one_of(s[at], "_+-")); at++) letters |= (size_t)is_alnum(s[at]);
    return letters && at < n && s[at] == ':' && !(at + 1 < n && is_alnum(s[at + 1])) ? at + 1 : 0;
}

/* Match :name as in Rails, Laravel and SQL. */
static size_t colon_name(const char *s, size_t n) {
    size_t at = 1;
    if (n < 3 || !(is_small(s[1]) || s[1] == '_')) return 0;
    while (at < n && (is_alnum(s[at]) || s[at] == '_')) at++;
    return at > 2 && !(at < n && (text_is_wordlike(s, n, at) || s[at] == ':')) ? at : 0;
}

/* Match __name__. */
static size_t underscores(const char *s, size_t n) {
    size_t at = 2;
    while (at < n && at < 64 && (is_alnum(s[at]) || (s[at] == '_' && !text_begins_with(s + at, n - at, "__")))) at++;
    return at > 2 && text_begins_with(s + at, n - at, "__") ? at + 2 : 0;
}

/* Match [_1], [quant,_2,file,files] and [*,_1,item] of Perl's Maketext, where ~ escapes a character. */
static size_t maketext(const char *s, size_t n) {
    int argument = 0;
    size_t at = 1;
    for (; at + 1 < n && at < LONGEST && !is_one_of(s[at], "[]"); at += s[at] == '~' ? 2 : 1)
        argument |= s[at] == '_' && is_one_of(s[at - 1], "[,") && (is_digit(s[at + 1]) || is_one_of(s[at + 1], "*-"));
    return argument && at < n && s[at] == ']' ? at + 1 : 0;
}

static size_t placeholder(const char *data, size_t length, size_t at, text_span_kind *kind);

/* Match # and the placeholder of a number: #%d. */
static size_t numbered(const char *s, size_t n) {
    text_span_kind kind;
    const size_t bytes = n > 2 && s[1] != '#' ? placeholder(s + 1, n - 1, 0, &kind) : 0;
    return bytes && kind == TEXT_SPAN_WORD ? bytes + 1 : 0;
}

typedef enum body {
    BODY_ANY,      /* anything except the opening delimiter */
    BODY_NAME,     /* letters, digits and name separators, up to 64 bytes */
    BODY_WORDS,    /* like BODY_NAME, with spaces */
    BODY_BALANCED, /* nested brackets */
    BODY_PRINTF    /* a name, with a conversion after the closing bracket */
} body;

enum { /* restrictions on the text before the placeholder */
       NOT_IN_WORD = 1,
       NOT_AT_NUMBER = 2 /* not after a number, as in "50 %" */
};

typedef struct form {
    const char *open, *close; /* close is NULL if `rest` parses the placeholder */
    body body;
    text_span_kind kind;
    int context;
    size_t (*rest)(const char *s, size_t n); /* parses the text from the opening delimiter on */
} form;

/* For forms with the same beginning, earlier rows have priority. */
static const form forms[] = {
    { "<!--", "-->", BODY_ANY, TEXT_SPAN_LONE, 0, NULL },
    { "<%", "%>", BODY_ANY, TEXT_SPAN_WORD, 0, NULL },
    { "<?", "?>", BODY_ANY, TEXT_SPAN_LONE, 0, NULL },
    { "<<", ">>", BODY_WORDS, TEXT_SPAN_WORD, 0, NULL },
    { "{%", "%}", BODY_ANY, TEXT_SPAN_LONE, 0, NULL },
    { "{#", "#}", BODY_ANY, TEXT_SPAN_LONE, 0, NULL },
    { "{", "}", BODY_BALANCED, TEXT_SPAN_WORD, 0, NULL },
    { "[[", "]]", BODY_NAME, TEXT_SPAN_WORD, 0, NULL },
    { "[%", "%]", BODY_ANY, TEXT_SPAN_WORD, 0, NULL },
    { "[", NULL, BODY_ANY, TEXT_SPAN_WORD, 0, maketext },
    { "%{", "}", BODY_BALANCED, TEXT_SPAN_WORD, 0, NULL },
    { "%(", ")", BODY_PRINTF, TEXT_SPAN_WORD, 0, NULL },
    { "%<", ">", BODY_PRINTF, TEXT_SPAN_WORD, 0, NULL },
    { "%%", "%%", BODY_NAME, TEXT_SPAN_WORD, 0, NULL },
    { "%%", NULL, BODY_ANY, TEXT_SPAN_WORD, 0, NULL },
    { "%", NULL, BODY_ANY, TEXT_SPAN_WORD, NOT_AT_NUMBER, percent_name },
    { "%", NULL, BODY_ANY, TEXT_SPAN_WORD, NOT_AT_NUMBER, directive },
    { "%", NULL, BODY_ANY, TEXT_SPAN_WORD, NOT_AT_NUMBER, percent_place },
    { "$$", "$$", BODY_ANY, TEXT_SPAN_WORD, 0, NULL },
    { "${", "}", BODY_BALANCED, TEXT_SPAN_WORD, 0, NULL },
    { "$(", ")", BODY_BALANCED, TEXT_SPAN_WORD, 0, NULL },
    { "$", NULL, BODY_ANY, TEXT_SPAN_WORD, NOT_IN_WORD, formula },
    { "$", NULL, BODY_ANY, TEXT_SPAN_WORD, 0, dollar_name },
    { "#{", "}", BODY_BALANCED, TEXT_SPAN_WORD, 0, NULL },
    { "#", "#", BODY_NAME, TEXT_SPAN_WORD, NOT_IN_WORD, NULL },
    { "#", NULL, BODY_ANY, TEXT_SPAN_WORD, NOT_IN_WORD, numbered },
    { "@{", "}", BODY_BALANCED, TEXT_SPAN_WORD, 0, NULL },
    { "@@", "@@", BODY_NAME, TEXT_SPAN_WORD, NOT_IN_WORD, NULL },
    { "\\(", "\\)", BODY_ANY, TEXT_SPAN_WORD, 0, NULL },
    { "\\[", "\\]", BODY_ANY, TEXT_SPAN_WORD, 0, NULL },
    { "`", NULL, BODY_ANY, TEXT_SPAN_WORD, 0, code },
    { "&lt;", "&gt;", BODY_ANY, TEXT_SPAN_LONE, 0, NULL },
    { "&", NULL, BODY_ANY, TEXT_SPAN_WORD, 0, entity },
    { ":", NULL, BODY_ANY, TEXT_SPAN_WORD, NOT_IN_WORD, shortcode },
    { ":", NULL, BODY_ANY, TEXT_SPAN_WORD, NOT_IN_WORD, colon_name },
    { "__", NULL, BODY_ANY, TEXT_SPAN_WORD, NOT_IN_WORD, underscores },
};

/* Return the length up to the bracket that closes s[0], or 0. In an ICU `message`, quoted brackets do not count. */
static size_t balanced(const char *s, size_t n, char open, char close, int message) {
    size_t depth = 0, deepest = 0, bytes;
    const size_t most = message ? MESSAGE : LONGEST;
    if (n > most) n = most;
    for (size_t at = 0; at < n && deepest <= DEEPEST; at += bytes) {
        bytes = message && s[at] == '\'' ? text_message_quote(s + at, n - at, TEXT_MESSAGE_PLAIN) : 1;
        if (!bytes) return 0;
        if (s[at] == open && ++depth > deepest) deepest = depth;
        if (s[at] == close && depth && --depth == 0) return at + 1;
    }
    return 0;
}

static int belongs(const form *f, char c) {
    switch (f->body) {
    case BODY_NAME: return is_alnum(c) || is_one_of(c, "_.-:");
    case BODY_WORDS: return is_alnum(c) || is_one_of(c, "_.-: ");
    case BODY_PRINTF: return !is_one_of(c, "()<>%{}");
    default: return 1;
    }
}

/* Return the length of a placeholder, including its opening and closing delimiters. */
static size_t closed(const form *f, const char *s, size_t n) {
    const size_t open = strlen(f->open), close = strlen(f->close);
    const size_t most = f->body == BODY_ANY ? LONGEST : 64;
    const int doubles = strcmp(f->open, f->close) == 0;
    for (size_t at = open; at + close <= n && at < most; at++) {
        if (memcmp(s + at, f->close, close) == 0) {
            const size_t end = at + close;
            if (at == open) return 0;
            if (f->body != BODY_PRINTF || text_begins_with(s + open, n - open, "PRI")) return end;
            const size_t more = conversion(s + end, n - end, 1);
            return more ? end + more : 0;
        }
        if ((!doubles && text_begins_with(s + at, n - at, f->open)) || !belongs(f, s[at])) return 0;
    }
    return 0;
}

static int fits(const form *f, const char *data, size_t length, size_t at) {
    if ((f->context & NOT_IN_WORD) && at && (text_is_wordlike_before(data, length, at) || data[at - 1] == ':'))
        return 0;
    if (!(f->context & NOT_AT_NUMBER) || !at) return 1;
    const char next = at + 1 < length ? data[at + 1] : ' ', other = at > 1 ? data[at - 2] : ' ';
    if (data[at - 1] == ' ') return !is_digit(other) || is_letter(next);
    if (!is_digit(data[at - 1])) return 1;
    return data[at - 1] == '0' && !is_one_of(other, "0123456789.,") && is_one_of(next, "oxXl"); /* 0%o */
}

/* Return the length of the placeholder or other form at data[at], or 0. */
static size_t placeholder(const char *data, size_t length, size_t at, text_span_kind *kind) {
    const char *s = data + at;
    const size_t n = length - at;
    size_t bytes;
    if (is_alnum(*s) || !is_one_of(*s, "<{[%$#@\\`&:_")) return 0;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const form *f = &forms[i];
        const size_t open = strlen(f->open);
        if (*f->open != *s || !text_begins_with(s, n, f->open) || !fits(f, data, length, at)) continue;
        if (f->rest) bytes = f->rest(s, n);
        else if (!f->close) bytes = open;
        else if (f->body == BODY_BALANCED) bytes = balanced(s + open - 1, n - open + 1, s[open - 1], *f->close, 0);
        else bytes = closed(f, s, n);
        if (bytes && f->body == BODY_BALANCED) bytes += open - 1;
        if (bytes) return *kind = f->kind, bytes;
    }
    return 0;
}

/* Return the length of a placeholder that stands for a word, or 0. */
static size_t word_placeholder(const text_scan *t, size_t at) {
    text_span_kind kind;
    const size_t bytes = at < t->length ? placeholder(t->data, t->length, at, &kind) : 0;
    return bytes && kind == TEXT_SPAN_WORD ? bytes : 0;
}

/* ---- 4. Addresses -------------------------------------------------------------------------------------- */

/* Return the length of a span without final punctuation, which belongs to the sentence. */
static size_t without_end(const char *s, size_t n) {
    const int opened = n && memchr(s, '(', n) != NULL, squared = n && memchr(s, '[', n) != NULL;
    while (n && (is_one_of(s[n - 1], ".,;:!?'\"") || (s[n - 1] == ')' && !opened) || (s[n - 1] == ']' && !squared)))
        n--;
    return n;
}

/* Return the end of an address starting at s[at], including placeholders in it. */
static size_t address_end(const char *s, size_t n, size_t at) {
    text_span_kind kind;
    size_t bytes;
    for (; at < n && !is_space(s[at]); at += bytes) {
        if (is_one_of(s[at], "{%$<") && !(s[at] == '%' && at + 2 < n && is_alnum(s[at + 1]) && is_alnum(s[at + 2])) &&
            (bytes = placeholder(s, n, at, &kind)) && kind == TEXT_SPAN_WORD)
            continue;
        bytes = 1;
        if (is_one_of(s[at], "<>\"`{}|\\^")) break;
        if (text_begins_with(s + at, n - at, "\xC2\xBB") || text_begins_with(s + at, n - at, "\xE2\x80"))
            break; /* quotes, full stops */
    }
    return at;
}

static size_t address(const char *s, size_t n) {
    size_t at = 0;
    while (at < n && at < 32 && (is_letter(s[at]) || (at && is_one_of(s[at], "+-.")))) at++;
    if (at > 1 && text_begins_with(s + at, n - at, "://")) at += 3;
    else if (text_begins_with(s, n, "mailto:")) at = 7;
    else if (n > 5 && text_begins_with(s, n, "www.")) at = 4;
    else return 0;
    const size_t end = without_end(s, address_end(s, n, at));
    return end > at ? end : 0;
}

/* Match name@example.org and @name. */
static size_t mail(const char *s, size_t n) {
    size_t at = 0, end, dot = 0;
    while (at < n && at < 65 && (is_alnum(s[at]) || is_one_of(s[at], "._%+-"))) at++;
    if (at >= n || s[at] != '@') return 0;
    for (end = at + 1; end < n && end < at + 256 && (is_alnum(s[end]) || is_one_of(s[end], ".-_")); end++)
        if (s[end] == '.') dot = end;
    end = without_end(s, end);
    if (!at) return end > 1 ? end : 0;
    return dot && end > at + 3 ? end : 0;
}

static int is_of_path(char c) { return is_alnum(c) || is_one_of(c, "._-/~+"); }

/* Match POD: B<-l>, C<$x = 1>, L<perlre(1)>, E<lt>. Words in B<> and I<> are translated. */
static size_t pod(const char *s, size_t n) {
    size_t at = 2;
    if (n < 4 || !is_one_of(s[0], "BCEFILSXZ") || s[1] != '<') return 0;
    for (; at < n && at < SHORT && s[at] != '>' && s[at] != '<'; at++)
        if (is_space(s[at]) && is_one_of(s[0], "BIS")) return 0;
    return at < n && s[at] == '>' && at > 2 ? at + 1 : 0;
}

/* Match R&D, AT&T, C# and F#, and the choice [y/N]. */
static size_t sign_name(const char *s, size_t n) {
    size_t at = 0;
    if (n > 4 && s[0] == '[' && is_letter(s[1]) && s[2] == '/' && is_letter(s[3]) && s[4] == ']') return 5;
    while (at < n && at < 4 && is_letter(s[at]) && !is_small(s[at])) at++;
    if (at == 1 && n > 1 && s[1] == '#' && !text_is_wordlike(s, n, 2)) return 2;
    if (!at || at + 1 >= n || s[at] != '&' || !is_letter(s[at + 1]) || is_small(s[at + 1])) return 0;
    for (at++; at < n && is_letter(s[at]) && !is_small(s[at]); at++) {}
    return text_is_wordlike(s, n, at) ? 0 : at;
}

/* Return 1 for a wildcard in a path: after a slash or _, or before an ending as in data*.csv. */
static int is_wildcard(const char *s, size_t n, size_t at) {
    if (s[at] != '*' || !at) return 0;
    return is_one_of(s[at - 1], "/*_") || (at + 2 < n && s[at + 1] == '.' && is_small(s[at + 2]));
}

/* Match a path or file name: /usr/lib, ./a, ~/b, C:\x, src/main.c, report.pdf, some_name, data*.csv. */
static size_t path(const char *s, size_t n) {
    size_t end = 0, slashes = 0, joints = 0;
    const int drive = n > 2 && is_letter(s[0]) && s[1] == ':' && s[2] == '\\',
              share = n > 2 && s[0] == '\\' && s[1] == '\\' && is_alnum(s[2]);
    if (drive || share) {
        for (end = 3; end < n && !is_space(s[end]) && !is_one_of(s[end], "<>\"|?*"); end++) {}
        return without_end(s, end);
    }
    while (end < n && end < SHORT && (is_of_path(s[end]) || is_wildcard(s, n, end))) end++;
    if (end < n && is_beyond_ascii(s[end]) && text_is_wordlike(s, n, end)) return 0;
    const int whole = end < SHORT;
    end = without_end(s, end);
    for (size_t i = 0; i < end; i++) {
        slashes += s[i] == '/';
        if (s[i] == '_' && i && i + 1 < end && is_alnum(s[i - 1]) && is_alnum(s[i + 1])) joints++;
        if (s[i] == '.' && i > 1 && i + 1 < end && is_alnum(s[i - 1]) && is_alnum(s[i - 2]) && is_small(s[i + 1]) &&
            !is_digit(s[i - 1]))
            joints++;
        joints += i && s[i] == '*' && (s[i - 1] == '_' || (i + 1 < end && s[i + 1] == '.'));
    }
    const int rooted = end > 3 && (s[0] == '/' ? slashes > 1 : text_prefix("./ ~/ ../", s, end) > 0);
    if (!rooted && !(joints && is_alnum(s[0])) && slashes <= 2) return 0;
    if (whole) return end;
    while (end < n && is_of_path(s[end])) end++;
    return without_end(s, end);
}

/* Match ranges of letters: A-Z, a-zA-Z0-9. */
static size_t range(const char *s, size_t n) {
    size_t at = 0, letters = 0;
    for (size_t sign; at < n && is_alnum(s[at]) && (sign = text_prefix("- \xE2\x80\x93", s + at + 1, n - at - 1));) {
        if (at + 1 + sign >= n || !is_alnum(s[at + 1 + sign])) break;
        letters += is_letter(s[at]) && is_letter(s[at + 1 + sign]);
        at += 2 + sign;
    }
    return letters && !text_is_wordlike(s, n, at) && !(at < n && s[at] == '-') ? at : 0;
}

/* Match a function: writeObject(), a.b(). */
static size_t function_name(const char *s, size_t n) {
    size_t at = 0;
    while (at < n && at < 64 && (is_alnum(s[at]) || is_one_of(s[at], "_.:"))) at++;
    return at > 1 && text_begins_with(s + at, n - at, "()") ? at + 2 : 0;
}

/* Match the name of a manual page: make(1), fs.h(7posix), Foo::Bar(3pm). Other names with capitals may have notes, as
 * in Word(1). */
static size_t manual_page(const char *s, size_t n) {
    size_t at = 0;
    int capitals = 0, joined = 0; /* `joined` is 1 if the name has a colon */
    for (; at < n && at < 64 && (is_alnum(s[at]) || (at && is_one_of(s[at], "_-.+:"))); at++)
        joined |= s[at] == ':', capitals |= is_letter(s[at]) && !is_small(s[at]);
    if (capitals && !joined) return 0;
    if (at < 2 || at + 2 >= n || s[at] != '(' || s[at + 1] < '1' || s[at + 1] > '9') return 0;
    for (at += 2; at < n && at < 80 && is_small(s[at]); at++) {}
    return at < n && s[at] == ')' ? at + 1 : 0;
}

/* Match a command of TeX: \section, \newpage. Names that \n, \r or \t and a word may also begin are listed. */
static size_t tex_command(const char *s, size_t n) {
    static const char listed[] = "newcommand newline newpage noindent nocite normalsize numberwithin raggedright ref "
                                 "renewcommand right tableofcontents textbf textit textsc texttt textwidth title tiny "
                                 "today";
    size_t at = 1;
    while (at < n && at < 64 && is_small(s[at])) at++;
    if (at < 4 || text_is_wordlike(s, n, at)) return 0;
    return is_one_of(s[1], "nrt") && !text_is_listed(listed, s + 1, at - 1) ? 0 : at;
}

/* Match groups of repeated letters: YYYY, XXX, YYYY-MM-DD, hh:mm tt, YYYYMMDD. */
static size_t pattern(const char *s, size_t n) {
    static const char date[] = "YyMDdHhmsS";
    size_t at = 0, groups = 0, longest = 0;
    for (size_t end; at < n && at < 64 && is_letter(s[at]); at = end) {
        for (end = at; end < n && end < 64 && s[end] == s[at]; end++) {}
        if (end - at < 2) return 0;
        if (!is_small(s[at]) && end - at > longest) longest = end - at;
        groups++;
        if (end + 1 < n && is_one_of(s[end], "-/:._") && is_letter(s[end + 1])) end++;
        else if (end < n && is_one_of(s[at], date) && is_one_of(s[end], date)) continue;
        else if (text_is_wordlike(s, n, end)) return 0;
        else if (groups == 1) return longest > 2 ? end : 0;
        else return text_begins_with(s + end, n - end, " tt") && !text_is_wordlike(s, n, end + 3) ? end + 3 : end;
    }
    return 0;
}

/* Match the value of an option or variable up to a space: X, "a b", {name}. */
static size_t value(const char *s, size_t n) {
    size_t at = 0;
    if (n && is_one_of(s[0], "\"'")) {
        for (at = 1; at < n && at < 64 && s[at] != s[0]; at++) {}
        return at < n && s[at] == s[0] ? at + 1 : 0;
    }
    while (at < n && at < SHORT && !is_space(s[at]) && !is_one_of(s[at], "\"'`<>()[]|,;")) at++;
    return without_end(s, at);
}

/* Return 1 if a text has a --long option or mentions options, so that -long is one too. */
static int has_options(text_scan *t) {
    static const char *const signs[] = { " --", "'--", "(--", "ption", "opci", "rgument", "switch", "flag" };
    for (size_t at = 0; !t->options && at < t->length; at++)
        for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) {
            const size_t end = at + strlen(signs[i]);
            if (t->data[at] != *signs[i] || !text_begins_with(t->data + at, t->length - at, signs[i])) continue;
            if (i > 2 || (end < t->length && is_letter(t->data[end]))) t->options = 1;
        }
    if (!t->options) t->options = -1;
    return t->options > 0;
}

/* Match --long, --long=X, --color[=WHEN], --[no-]x, -v, -j8, -DX=1; -long only if `certain`, because a dash may also
 * begin speech. `begins` is 1 at the beginning of a sentence. */
static size_t dash_option(const char *s, size_t n, int certain, int begins) {
    const size_t dashes = n > 1 && s[1] == '-' ? 2 : 1;
    size_t at = dashes, strong = 0;
    if (text_begins_with(s, n, "--[no-]")) at = 7;
    const size_t begin = at;
    if (at >= n || !(dashes == 2 ? is_small(s[at]) : is_letter(s[at]))) return 0;
    for (; at < n && at < 64 && (is_alnum(s[at]) || is_one_of(s[at], "-_")); at++)
        strong |= (size_t)(at > begin && (is_digit(s[at]) || s[at] == '_' || (s[at] < 'a' && is_letter(s[at]))));
    while (s[at - 1] == '-') at--;
    if (text_is_wordlike(s, n, at) || (at + 1 < n && s[at] == '\'' && is_letter(s[at + 1]))) return 0;
    const size_t more = at + 1 < n && s[at] == '=' ? value(s + at + 1, n - at - 1) : 0;
    if (dashes == 1 && at > 2 && !strong && !certain && !more) return 0;
    if (dashes == 1 && at == 2 && begins && at + 1 < n && s[at] == ' ' && is_letter(s[at + 1]) &&
        is_one_of(s[1], "AIOYaoy"))
        return 0; /* -I am here */
    if (more) return at + 1 + more;
    const char *close = text_begins_with(s + at, n - at, "[=") ? memchr(s + at, ']', n - at < 64 ? n - at : 64) : NULL;
    return close ? (size_t)(close - s) + 1 : at;
}

/* Match /help, /etc and /S. */
static size_t slash_option(const char *s, size_t n) {
    size_t at = 1;
    while (at < n && at < 32 && (is_alnum(s[at]) || is_one_of(s[at], "-_?"))) at++;
    const int name = at > 3 && is_letter(s[1]) && !text_is_listed("/and /und /oder", s, at);
    const int one = at == 2 && ((is_letter(s[1]) && !is_small(s[1])) || s[1] == '?');
    if (at < n && (s[at] == '/' || text_is_wordlike(s, n, at))) return 0;
    return name || one ? at : 0;
}

/* Match .bashrc, *.txt and NAME=value. */
static size_t other_name(const char *s, size_t n) {
    size_t at = s[0] == '*' ? 2 : 1, begin = at;
    if (is_one_of(s[0], ".*")) {
        if (s[0] == '*' && (n < 3 || s[1] != '.')) return 0;
        while (at < n && at < 64 && (is_alnum(s[at]) || is_one_of(s[at], "._-"))) at++;
        at = without_end(s, at);
        return at > begin + (s[0] == '.') && is_small(s[begin]) && !text_is_wordlike(s, n, at) ? at : 0;
    }
    for (at = 0; at < n && at < 64 && (s[at] == '_' || (is_alnum(s[at]) && !is_small(s[at]))); at++) {}
    if (at < 2 || at + 1 >= n || s[at] != '=' || !is_letter(s[0])) return 0;
    const size_t bytes = value(s + at + 1, n - at - 1);
    return bytes ? at + 1 + bytes : 0;
}

/* Match an option or name that begins with a sign and follows a space, a bracket or a quotation mark. */
static size_t option(text_scan *t, size_t at) {
    const char *s = t->data + at;
    const size_t n = t->length - at;
    size_t back = at;
    const char before = at ? s[-1] : ' ';
    const int quoted = is_one_of(before, "([{\"'`|") || is_beyond_ascii(before);
    if (!quoted && !is_one_of(before, " \t,=>/")) return 0;
    if (*s == '/') return before == '/' ? 0 : slash_option(s, n);
    if (*s != '-') return is_one_of(*s, ".*") || (is_letter(*s) && !is_small(*s)) ? other_name(s, n) : 0;
    while (back && is_space(t->data[back - 1])) back--;
    const int begins = !back || is_one_of(t->data[back - 1], ".!?:\"-");
    return dash_option(s, n, quoted || (n > 2 && is_small(s[2]) && has_options(t)), begins);
}

/* Match a command with options in quotation marks: 'ls --help', "%s -v FILE". */
static size_t quoted_command(const char *s, size_t n) {
    static const char *const marks[][2] = { { "'", "'" },
                                            { "`", "'" },
                                            { "\"", "\"" },
                                            { "\xE2\x80\x98", "\xE2\x80\x99" },
                                            { "\xE2\x80\x9C", "\xE2\x80\x9D" } };
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        size_t at = strlen(marks[i][0]), options = 0;
        if (!text_begins_with(s, n, marks[i][0]) || at >= n || !(is_small(s[at]) || is_one_of(s[at], "%{$./")))
            continue;
        for (; at < n && at < SHORT && !text_begins_with(s + at, n - at, marks[i][1]) && !is_one_of(s[at], ";!?"); at++)
            options += text_begins_with(s + at, n - at, " -") && at + 3 < n &&
                       (s[at + 2] == '-' || (is_letter(s[at + 2]) && !is_small(s[at + 3])));
        if (options && text_begins_with(s + at, n - at, marks[i][1])) return at + strlen(marks[i][1]);
    }
    return 0;
}

/* ---- 5. Numbers ---------------------------------------------------------------------------------------- */

/* Match a unit that is the same in all languages. A short unit must follow its number without a space. */
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
            !text_is_wordlike(s, n, length) && !(*u == '%' && n > 1 && is_one_of(s[1], "%({<")) &&
            !(*u == '%' && spaced && n > 1 && is_letter(s[1])))
            return length + (size_t)spaced;
        u += length + (u[length] == ' ');
    }
    return 0;
}

/* Match a separator between two digits: , . : / - ' # a dash or a non-breaking space. */
static size_t between_digits(const char *s, size_t n) {
    static const char signs[] =
        ", . : / - ' # \xE2\x80\x93 \xE2\x80\x94 \xC2\xA0 \xE2\x80\xAF \xE2\x81\x84 \xC3\x97 \xE2\x88\x92";
    const size_t length = text_prefix(signs, s, n);
    return length < n && is_digit(s[length]) ? length : 0;
}

/* Match letters after digits that belong to a number: e-6 in 1e-6, x1F in 0x1F, rc1 in 2.0rc1. */
static size_t digits_in_letters(const char *s, size_t n) {
    size_t at = 0, digits = 0;
    if (n > 2 && is_one_of(s[0], "eE") && is_one_of(s[1], "+-") && is_digit(s[2])) at = 2;
    for (; at < n && at < 64 && is_alnum(s[at]); at++) digits |= (size_t)is_digit(s[at]);
    if (!digits || (s[0] == 'h' && at <= 3) || text_is_wordlike(s, n, at)) return 0; /* as in 12h30 */
    return at;
}

/* Match 3, 1,234.50, 12:30, 2024-05-01, $5, 85.5 kg, A320, COVID-19, v1.2.3; but not 21st and 1990s, which are
 * language. */
static size_t number(const char *s, size_t n, text_span_kind *kind) {
    static const char signs[] =
        "$ + - # ~ \xC2\xA3 \xC2\xA5 \xC2\xB1 \xE2\x82\xAC \xE2\x88\x92 \xE2\x89\xA4 \xE2\x89\xA5 "
        "\xE2\x89\x88";
    size_t at = 0, end, more;
    *kind = TEXT_SPAN_NUMBER;
    while (at < n && is_letter(s[at])) at++;
    if (at) { /* a word with digits */
        if (at < n && s[at] == '-') at++;
        if (at >= n || !is_digit(s[at])) return 0;
        while (at < n && at < 64 && (is_alnum(s[at]) || (is_one_of(s[at], ".-") && at + 1 < n && is_digit(s[at + 1]))))
            at++;
        return text_is_wordlike(s, n, at) ? 0 : at;
    }
    at = text_prefix(signs, s, n);
    if (at >= n || !is_digit(s[at])) return 0;
    for (end = at; end < n && end < MOST_DIGITS; end += more)
        if (!(more = is_digit(s[end]) ? 1 : between_digits(s + end, n - end))) break;
    if (end < n && is_letter(s[end]) && (more = digits_in_letters(s + end, n - end)))
        return *kind = TEXT_SPAN_WORD, end + more;
    size_t points = 0, groups = 0;
    for (size_t i = at; i < end; i++) { /* a dash or # that a model would replace */
        if (is_beyond_ascii(s[i]) || (s[i] == '#' && i > at)) *kind = TEXT_SPAN_WORD;
        points += s[i] == '.';
        groups += s[i] == '.' && i + 2 < end && s[i + 1] == '0' && is_digit(s[i + 2]);
    }
    if (points == 3 && !groups) *kind = TEXT_SPAN_WORD; /* 10.0.0.0/8, but not 1.000.000.000 */
    at = end + unit(s + end, n - end);
    return text_is_wordlike(s, n, at) && at == end ? 0 : at;
}

/* Match a telephone number: +49 (0)30 1234-5678, (555) 123-4567, 030 1234 5678. */
static size_t telephone(const char *s, size_t n) {
    size_t at = n && s[0] == '+', digits = 0, brackets = 0, signs = 0, end = 0;
    const int plus = at > 0;
    if (!n || !is_one_of(s[0], "+(0")) return 0;
    while (at < n && at < 32) {
        if (is_digit(s[at])) digits++, end = ++at;
        else if (s[at] == '(' && at + 1 < n && is_digit(s[at + 1])) {
            for (at++; at < n && is_digit(s[at]); at++) digits++;
            if (at >= n || s[at] != ')' || brackets++) break;
            end = ++at;
        } else {
            const size_t sign = text_prefix("\xC2\xA0 - . /", s + at, n - at);
            if (!sign && s[at] != ' ') break;
            at += sign ? sign : 1;
            signs += sign != 1 || s[at - 1] != '.';
            if (at >= n || !(is_digit(s[at]) || s[at] == '(')) break;
        }
    }
    if (text_is_wordlike(s, n, end) || digits < 7 || digits > 15) return 0;
    return plus || brackets || (signs && digits >= 9) ? end : 0;
}

/* Match inches and feet after a number: " and ' 2". A " may also close a quotation. */
static size_t inches(const text_scan *t, size_t at) {
    const char *s = t->data;
    size_t end = at;
    if (at < t->length && s[at] == '\'') {
        for (end++; end < t->length && (is_space(s[end]) || is_digit(s[end])) && end < at + 5; end++) {}
        if (end == at + 1 || !is_digit(s[end - 1])) return 0;
    }
    return end < t->length && s[end] == '"' && !t->quoted && !text_is_wordlike(s, t->length, end + 1) ? end + 1 - at
                                                                                                      : 0;
}

/* Match a sign from the list `all` after a space and before a space or punctuation. */
static size_t between_spaces(const char *all, const text_scan *t, size_t at) {
    const size_t bytes = at && !is_space(t->data[at - 1]) ? 0 : text_prefix(all, t->data + at, t->length - at);
    return bytes && (at + bytes == t->length || is_one_of(t->data[at + bytes], " \t.,!?")) ? bytes : 0;
}

/* Match a word with signs whose position matters: 10^6, x^2, m², H₂O, 3½, ½, ①. */
static size_t with_signs(const char *s, size_t n, int within) {
    size_t at = 0, bytes, letters = 0, strange = 0;
    for (; at < n && at < 64; at += bytes) {
        const uint32_t c = text_utf8_decode(s, n, at, &bytes);
        if (is_raised(c)) {
            if (letters > 3 || (within && !at)) return 0; /* a footnote sign */
            strange++;
        } else if (is_composed(c)) {
            strange++;
        } else if (c == '^' && at && at + 1 < n && (is_alnum(s[at + 1]) || is_one_of(s[at + 1], "-+{("))) {
            size_t closing = is_one_of(s[at + 1], "{(")
                                 ? balanced(s + at + 1, n - at - 1, s[at + 1], s[at + 1] == '{' ? '}' : ')', 0)
                                 : 1;
            if (!closing) break;
            bytes += closing, strange++;
        } else if (is_one_of((char)(c < 0x80 ? c : 0), ".,=/*+-") && strange && at + bytes < n && is_alnum(s[at + 1])) {
            continue;
        } else if (is_one_of((char)(c < 0x80 ? c : 0), ".,=") && at && at + 1 < n && is_alnum(s[at + 1])) {
            letters = 0;
        } else if (text_is_wordlike(s, n, at)) {
            letters += !is_digit(s[at]);
        } else {
            break;
        }
    }
    return strange ? at : 0;
}

/* Match consecutive pictograms with joiners and modifiers. */
static size_t emoji(const char *s, size_t n) {
    size_t at = 0, bytes = 0;
    if (n > 6 && is_one_of(s[0], "0123456789#*") && memcmp(s + 1, "\xEF\xB8\x8F\xE2\x83\xA3", 6) == 0) return 7;
    while (at < n && is_beyond_ascii(s[at])) {
        const uint32_t c = text_utf8_decode(s, n, at, &bytes);
        if (!is_pictogram(c) && !(at && (c == 0x200D || c == 0xFE0F || c == 0x20E3 || (c >= 0xE0020 && c <= 0xE007F))))
            break;
        at += bytes;
    }
    return at;
}

/* ---- 6. Text glued to spans ---------------------------------------------------------------------------- */

/* Match ™ or <sup>2</sup> after a word. */
static size_t raised(const text_scan *t, size_t at) {
    const char *s = t->data + at;
    const size_t n = t->length - at;
    size_t bytes, end = 5;
    if (!n) return 0;
    if (is_beyond_ascii(*s) && is_mark_of_trade(text_utf8_decode(t->data, t->length, at, &bytes))) return bytes;
    if (!text_begins_with(s, n, "<sup>") && !text_begins_with(s, n, "<sub>")) return 0;
    while (end < n && end < 12 &&
           (is_digit(s[end]) || is_one_of(s[end], "+-n") || text_begins_with(s + end, n - end, "\xE2\x88\x92")))
        end += is_beyond_ascii(s[end]) ? 3 : 1;
    if (end == 5 || n < end + 6 || s[end] != '<' || s[end + 1] != '/' || memcmp(s + end + 2, s + 1, 4) != 0) return 0;
    return end + 6;
}

/* Return the end of the text glued to a WORD span that ends at byte `at`. */
static size_t glued(const text_scan *t, size_t at) {
    const char *s = t->data;
    size_t bytes;
    while (at < t->length && at != t->closer) {
        if (is_sign_entity(s + at, t->length - at)) break;
        if ((bytes = word_placeholder(t, at)) || (bytes = raised(t, at))) at += bytes;
        else if (text_is_wordlike(s, t->length, at)) at = text_word_end(s, t->length, at);
        else if (at + 1 < t->length &&
                 ((is_one_of(s[at], "/._@=~\\#&") && is_alnum(s[at + 1])) ||
                  (is_one_of(s[at], "/-:.=,+*@#&|~^\\") && (is_digit(s[at + 1]) || word_placeholder(t, at + 1)))))
            at++;
        else if (text_begins_with(s + at, t->length - at, "%%")) at += 2;
        else break;
    }
    return at;
}

/* Return the end of a word, or of words joined by path separators, if a placeholder adjoins it. */
static size_t glued_ahead(text_scan *t, size_t at) {
    const char *s = t->data;
    size_t end = at, bytes = 1;
    int plain = 1;
    if (at < t->quiet) return 0;
    for (; end < t->length && end < at + 200; end += bytes) {
        bytes = 1;
        if (is_beyond_ascii(s[end]) && is_mark_of_trade(text_utf8_decode(s, t->length, end, &bytes))) break;
        if (text_is_wordlike(s, t->length, end)) text_utf8_decode(s, t->length, end, &bytes), plain &= is_digit(s[end]);
        else if (!is_one_of(s[end], "._/@=~+-:\\")) break;
    }
    if (end == at || end == t->closer || is_sign_entity(s + end, t->length - end) ||
        !(word_placeholder(t, end) || (raised(t, end) && text_is_wordlike_before(s, t->length, end)))) {
        t->quiet = end;
        return 0;
    }
    if (text_is_wordlike_before(s, t->length, end) || is_one_of(s[end - 1], "/_@=~\\") || plain) return end;
    return 0;
}

/* Return 1 if another placeholder closes the one at [begin, end), as in %(link)ssign in%(end)s, &quot;Hello&quot;. */
static int opens(text_scan *t, size_t begin, size_t end) {
    const char *s = t->data;
    size_t bytes = 1, word = text_word_end(s, t->length, end);
    text_span_kind kind;
    if (word == end || is_digit(s[end]) || text_is_wordlike_before(s, t->length, begin)) return 0;
    if (begin && !is_space(s[begin - 1]) && !is_one_of(s[begin - 1], "(\"'>")) return 0;
    if (unit(s + end, t->length - end) || !word_placeholder(t, begin)) return 0;
    for (size_t at = word; at < t->length && at < end + 300; at += bytes) {
        bytes = placeholder(s, t->length, at, &kind);
        if (!bytes) bytes = 1, kind = TEXT_SPAN_NONE;
        if (kind != TEXT_SPAN_WORD) continue;
        const int left = !is_space(s[at - 1]), right = text_is_wordlike(s, t->length, at + bytes);
        if (right || s[at] != s[begin]) return 0;
        if (left && s[at - 1] != '(') return t->closer = at, 1;
    }
    return 0;
}

/* ---- 7. All spans -------------------------------------------------------------------------------------- */

text_scan text_scan_begin(const char *data, size_t length) {
    return (text_scan){ .data = data, .length = length, .closer = SIZE_MAX };
}

/* Look up the form at `at`, including glued text. */
static text_span_kind form_at(text_scan *t, size_t at, size_t *bytes) {
    text_span_kind kind;
    const char *s = t->data + at;
    if (!(*bytes = placeholder(t->data, t->length, at, &kind)) || kind != TEXT_SPAN_WORD) return *bytes ? kind : 0;
    const size_t end = at + *bytes;
    if (at == t->closer) return t->closer = SIZE_MAX, TEXT_SPAN_CLOSE;
    if (t->closer == SIZE_MAX && opens(t, at, end)) return TEXT_SPAN_OPEN;
    if (is_sign_entity(s, t->length - at))
        return text_is_wordlike(t->data, t->length, end) || text_is_wordlike_before(t->data, t->length, at)
                   ? TEXT_SPAN_LONE
                   : kind;
    *bytes = glued(t, end) - at;
    return kind;
}

/* Find a span that can start only outside a word, or at its beginning. */
static text_span_kind beside_word(text_scan *t, size_t at, size_t *bytes) {
    const char *s = t->data + at;
    const size_t n = t->length - at;
    text_span_kind kind = TEXT_SPAN_WORD;
    size_t end;
    if (!is_alnum(*s) && at && is_one_of(t->data[at - 1], "._-/~+") && is_of_path(*s)) return TEXT_SPAN_NONE;
    if ((*bytes = address(s, n))) return kind;
    if ((end = glued_ahead(t, at))) return *bytes = glued(t, end) - at, kind;
    if ((*bytes = pod(s, n)) || (*bytes = sign_name(s, n))) return kind;
    if ((*bytes = function_name(s, n)) || (*bytes = manual_page(s, n)) || (*bytes = mail(s, n))) return kind;
    if ((*bytes = path(s, n)) || (*bytes = with_signs(s, n, 0))) return kind;
    if (!(at && t->data[at - 1] == '-') && ((*bytes = range(s, n)) || (*bytes = pattern(s, n)))) return kind;
    if ((*bytes = option(t, at)) || (*bytes = telephone(s, n))) return *bytes = glued(t, at + *bytes) - at, kind;
    if (!(*bytes = number(s, n, &kind))) return TEXT_SPAN_NONE;
    end = at + *bytes; /* the number is not scanned again */
    if ((end += inches(t, end)) > at + *bytes) return *bytes = end - at, TEXT_SPAN_WORD;
    if (kind == TEXT_SPAN_NUMBER && (end == t->length || !(word_placeholder(t, end) || raised(t, end)))) return kind;
    if (kind == TEXT_SPAN_NUMBER && glued(t, end) == end) return kind;
    *bytes = glued(t, end) - at;
    return TEXT_SPAN_WORD;
}

size_t text_message_quote(const char *s, size_t n, text_message_text kind) {
    if (n > 1 && s[1] == '\'') return 2;
    if (n < 2 || !(is_one_of(s[1], "{}") || (s[1] == '#' && kind == TEXT_MESSAGE_PLURAL)))
        return 1; /* a plain apostrophe */
    for (size_t at = 2; at < n; at++) {
        if (s[at] != '\'') continue;
        if (at + 1 == n || s[at + 1] != '\'') return at + 1;
        at++;
    }
    return 0;
}

/* Match spans of an ICU message other than placeholders: # of a plural, and '{quotations}'. */
static size_t of_message(const text_scan *t, size_t at) {
    const char c = t->data[at];
    if (c == '#' && t->message == TEXT_MESSAGE_PLURAL) return glued(t, at + 1) - at;
    const size_t bytes = c == '\'' ? text_message_quote(t->data + at, t->length - at, t->message) : 0;
    return bytes > 2 ? bytes : 0;
}

text_span_kind text_span_next(text_scan *t, size_t at, size_t *bytes) {
    static const char smileys[] = ":-) :) ;-) ;) :-( :( :-D :D :-P :P :-/ :'( <3",
                      arrows[] = "--> -> <-- <-> <- => <= >= != ==";
    const char *s = t->data + at, c = *s;
    const size_t n = t->length - at;
    const int within = text_is_wordlike_before(t->data, t->length, at);
    text_span_kind kind;
    if (c == '`' && at && t->data[at - 1] == '`') return *bytes = 1, TEXT_SPAN_NONE;
    if (t->message && (*bytes = of_message(t, at))) return TEXT_SPAN_WORD;
    if ((kind = form_at(t, at, bytes))) return kind;
    if (c == '<' && (*bytes = tag(s, n, &kind))) {
        if (kind == TEXT_SPAN_WORD) *bytes = glued(t, at + *bytes) - at;
        return kind;
    }
    if ((*bytes = text_prefix("\t \v \f \xC2\x85 \xE2\x80\xA8 \xE2\x80\xA9", s, n))) return TEXT_SPAN_LONE;
    if (c == '\\' && !within && (*bytes = tex_command(s, n)))
        return *bytes = glued(t, at + *bytes) - at, TEXT_SPAN_WORD;
    if (c == '\\' && n > 1 && is_one_of(s[1], "nrt") && (*bytes = 2)) return TEXT_SPAN_LONE;
    if (c == '\xC2' && n > 1 && s[1] == '\xAD' && (*bytes = 2)) return TEXT_SPAN_HYPHEN;
    if ((*bytes = emoji(s, n)) || (*bytes = between_spaces(smileys, t, at))) return TEXT_SPAN_LONE;
    if ((*bytes = between_spaces(arrows, t, at))) return TEXT_SPAN_WORD;
    if (c == 'E' && within && (*bytes = pod(s, n))) return TEXT_SPAN_WORD; /* fileE<gt> */
    if (!within && (*bytes = quoted_command(s, n))) return TEXT_SPAN_WORD;
    if (!within && (kind = beside_word(t, at, bytes))) return kind;
    t->quoted ^= c == '"';
    const uint32_t code = text_utf8_decode(s, n, 0, bytes);
    return within && is_raised(code) ? TEXT_SPAN_LONE : TEXT_SPAN_NONE;
}

/* Return the length of white space, a word and a comma of an ICU message, or 0. *word is the word, which has *letters
 * bytes. */
static size_t message_field(const char *s, size_t n, const char **word, size_t *letters) {
    size_t begin = 0, end;
    if (n > 100) n = 100;
    while (begin < n && is_space(s[begin])) begin++;
    for (end = begin; end < n && !is_space(s[end]) && !is_one_of(s[end], "{},'#\""); end++) {}
    *word = s + begin, *letters = end - begin;
    while (end < n && is_space(s[end])) end++;
    return *letters && end < n && s[end] == ',' ? end + 1 : 0;
}

size_t text_message_begin(const char *s, size_t n, int *plural) {
    const char *word;
    size_t letters, name, type;
    if (!n || *s != '{' || !(name = message_field(s + 1, n - 1, &word, &letters))) return 0;
    if (!(type = message_field(s + 1 + name, n - 1 - name, &word, &letters))) return 0;
    if (!text_is_listed("select plural selectordinal", word, letters)) return 0;
    *plural = !text_is(word, letters, "select");
    return 1 + name + type;
}

/* Return the offset of the first blank line after data[at], at most `at` + MESSAGE. */
static size_t paragraph_bytes(const char *data, size_t length, size_t at) {
    const size_t most = length - at > MESSAGE ? at + MESSAGE : length;
    while (at < most) {
        size_t next = at + 1; /* start of the next line */
        while (next < most && (data[next] == ' ' || data[next] == '\t' || data[next] == '\r')) next++;
        if (next == most || data[next] == '\n') break;
        const char *end = memchr(data + next, '\n', most - next);
        at = end ? (size_t)(end - data) : most;
    }
    return at;
}

size_t text_message_lines(const char *data, size_t length, size_t line, int *open) {
    size_t end = line, bytes;
    int plural;
    *open = 0;
    for (size_t at = 0; at < end; at += bytes) {
        const char *brace = memchr(data + at, '{', end - at);
        if (!brace) break;
        at = (size_t)(brace - data);
        bytes = 1;
        if (!text_message_begin(brace, length - at, &plural)) continue;
        if (!(bytes = balanced(brace, length - at, '{', '}', 1))) return *open = 1, paragraph_bytes(data, length, end);
        if (at + bytes <= end) continue;
        const char *next = memchr(data + at + bytes, '\n', length - at - bytes);
        end = next ? (size_t)(next - data) : length;
    }
    return end;
}

int text_has_message(const char *data, size_t length, int *open) {
    const char *at = data, *const end = data + length;
    int found = *open = 0, plural;
    for (; at < end && (at = memchr(at, '{', (size_t)(end - at))); at++)
        if (text_message_begin(at, (size_t)(end - at), &plural))
            found = 1, *open |= !balanced(at, (size_t)(end - at), '{', '}', 0);
    return found;
}
