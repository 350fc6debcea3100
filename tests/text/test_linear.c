/* test_linear.c - checks that text scanners take linear time.
 *
 * A trigger is a mark or a pair of marks, repeated to fill a text of a given size. Each scanner reads each trigger
 * after each of three prefixes, at three sizes that double. The test counts steps: the basic blocks of the sources (the
 * Makefile builds them as *-counted.o) and the bytes that C library calls read. Steps do not depend on the machine or
 * its load. Doubling the text may multiply the steps by at most GROWTH.
 *
 * MOE_TEST_LINEAR=262144 build/test_linear starts at 262144 bytes instead of 16384. An argument such as "html*" selects
 * scanners. Smaller sizes mislead: a scanner that looks 1,000 bytes ahead at each byte takes three times the steps for
 * 2,000 bytes. tests/bench/growth.py sets MOE_TEST_TRIGGER: "7 1" runs the seventh trigger after the first prefix once,
 * at the first size, and "all" runs every trigger and prefix at that size.
 *
 *   1. Triggers
 *   2. Scanners
 *   3. Growth
 */
#define _GNU_SOURCE /* posix_memalign */

#include "tools/server/address.h"
#include "tools/server/stops.h"
#include "tools/text/align.h"
#include "tools/text/bpe.h"
#include "tools/text/suspicion.h"
#include "tools/text/glossary.h"
#include "tools/text/json.h"
#include "tools/text/lost.h"
#include "tools/text/open.h"
#include "tools/text/prompt.h"
#include "tools/text/protect.h"
#include "tools/text/sentences.h"
#include "tools/text/spans.h"
#include "tools/text/words.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

#include "tests/text/small_prompted.h"

#define GROWTH 2.3
#define LINEAR 2.02 /* skip the third size if the second takes fewer than this many times the steps of the first */
enum { SIZES = 3, LEAST = 16384, FEW = 20000 }; /* LEAST: first size in bytes; FEW: negligible number of steps */

unsigned long long counted_steps;
void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) { counted_steps++; }

/* ==== 1. Triggers ======================================================================================= */

static const char *const texts[] = { " ",
                                     "a",
                                     "a ",
                                     "a. ",
                                     ".",
                                     "..",
                                     ". ",
                                     "?!",
                                     ",",
                                     "a, ",
                                     ";",
                                     "-",
                                     "--",
                                     "- ",
                                     "_",
                                     "/",
                                     "//",
                                     "a/",
                                     "a/b ",
                                     "\\",
                                     "\\n",
                                     "%",
                                     "%%",
                                     "%s",
                                     "%s ",
                                     "%(",
                                     "%(a)",
                                     "%(a)s ",
                                     "%<",
                                     "{",
                                     "}",
                                     "{}",
                                     "{a}",
                                     "{ ",
                                     "{{",
                                     "{{a",
                                     "{{a}} ",
                                     "${",
                                     "${a}",
                                     "$",
                                     "$a",
                                     "$a$ ",
                                     "$$",
                                     "$x_{",
                                     "#",
                                     "#a",
                                     "#{",
                                     "##",
                                     "@",
                                     "@a",
                                     "a@",
                                     "a@b",
                                     "a@b.c ",
                                     ":",
                                     ":a",
                                     ":a: ",
                                     "::",
                                     "http",
                                     "http://",
                                     "http://a ",
                                     "https://a/",
                                     "www.",
                                     "www.a",
                                     "mailto:",
                                     "a:",
                                     "~",
                                     "~/",
                                     "C:\\",
                                     "`",
                                     "`a`",
                                     "``",
                                     "```",
                                     "\"",
                                     "'",
                                     "''",
                                     "'{",
                                     "(",
                                     ")",
                                     "()",
                                     "(a) ",
                                     "[",
                                     "]",
                                     "[]",
                                     "[[",
                                     "[a](",
                                     "[a](b) ",
                                     "<",
                                     ">",
                                     "<>",
                                     "<a",
                                     "<a>",
                                     "</a>",
                                     "<a>b</a> ",
                                     "<a b=\"",
                                     "<a b='c' ",
                                     "<!--",
                                     "<!-- -->",
                                     "<code>",
                                     "<code>a",
                                     "<x/>",
                                     "&",
                                     "&a",
                                     "&amp",
                                     "&amp;",
                                     "&#",
                                     "&#1;",
                                     "1",
                                     "12",
                                     "1 ",
                                     "1.",
                                     "1,",
                                     "1.2",
                                     "1/",
                                     "1:",
                                     "1:2 ",
                                     "1-",
                                     "+1",
                                     "1e",
                                     "1e6 ",
                                     "\xC2\xB2",
                                     "\xC2\xBD",
                                     "a\xC2\xB2",
                                     "\xC2\xA0",
                                     "\xC2\xAD",
                                     "a\xC2\xAD",
                                     "\t",
                                     "\n",
                                     "\r\n",
                                     "*",
                                     "**",
                                     "*a* ",
                                     "**a",
                                     "|",
                                     "|a",
                                     "=",
                                     "==",
                                     "A",
                                     "AB ",
                                     "A. ",
                                     "A.B.",
                                     "Mr. ",
                                     "z. B. ",
                                     "i.e. ",
                                     "Ann, ",
                                     "Ann Lee, ",
                                     "\xF0\x9F\x98\x80",
                                     "\xE2\x80\x94",
                                     "\xE2\x80\x8B",
                                     "\xE3\x80\x82",
                                     "\xC2\xAB",
                                     "\xC2\xBB",
                                     "\xCC\x81",
                                     "{n, plural, ",
                                     "{n, plural, a {",
                                     "{n, plural, other {a}} ",
                                     "{n, select, a {{m, plural, other {",
                                     "{n, plural,\n",
                                     "{n, plural, other {a\n\n",
                                     "{n, plural, other {a}}\n",
                                     "}}",
                                     "%1$s",
                                     "%-10.3f",
                                     "%n$",
                                     "<%",
                                     "<%= x %>",
                                     "<?",
                                     "<?php",
                                     "?>",
                                     "X1",
                                     "X1 ",
                                     "{1}",
                                     "{1",
                                     "0x",
                                     "a-",
                                     "a-b ",
                                     "ab'",
                                     "l'a ",
                                     "..\\",
                                     "../" };

static const char *const markup[] = { "<b>",
                                      "<b>x",
                                      "x<b>",
                                      "<b>x</b>",
                                      "<p>",
                                      "<p>x",
                                      "<p>x</p>",
                                      "</p>",
                                      "<div>",
                                      "<div></div>",
                                      "<!",
                                      "<a href=",
                                      "<a href=\"",
                                      "<a b ",
                                      "<sup>",
                                      "<sup>2</sup>",
                                      "x<sup>2</sup>",
                                      "x<sub>2",
                                      "<script>",
                                      "<script>x</script>",
                                      "<style>",
                                      "<textarea>",
                                      "<title>",
                                      "<wbr>",
                                      "x<wbr>",
                                      " <wbr>",
                                      "<br>",
                                      "x<br>",
                                      "<span>x",
                                      "<span>@x</span>",
                                      "<a>@x</a> ",
                                      "<svg>",
                                      "<math>",
                                      "<pre>x</pre>",
                                      "<li>x",
                                      "<td>",
                                      "<tr><td>",
                                      "<option>x",
                                      "<table>",
                                      "</table>",
                                      "<img alt=\"a dog\">",
                                      "x <img alt='a &amp; dog' title=\"x\"> ",
                                      "<a title='x'>x</a> ",
                                      "<?php x > ",
                                      "<?= x ?>",
                                      "<![CDATA[",
                                      "<x/>x",
                                      "<html lang=\"en\">",
                                      "<b><p>",
                                      "<p><b>",
                                      "<b><i></b></i>",
                                      "<i></b>",
                                      "<a><a>",
                                      "<ruby>x<rt>y",
                                      "<img>",
                                      "<img alt=x>",
                                      "x<img>",
                                      "]]>",
                                      "<![CDATA[",
                                      "<b translate=no>x</b>",
                                      "<b> </b>",
                                      "<b>x</b> <i>y</i>",
                                      "x <b></b>",
                                      "<a> </a>",
                                      "<u>x</u>y",
                                      "<kbd>a</kbd>b ",
                                      "<a>http://x</a>",
                                      "1<sup>st</sup> ",
                                      "<noscript>",
                                      "<iframe>",
                                      "<template>",
                                      "<select><option>",
                                      "<h1>x",
                                      "<dt>x<dd>y",
                                      "<!--x--!>",
                                      "<!----!>",
                                      "<!-->",
                                      "<!--->",
                                      "<!--x-- >",
                                      "<!DOCTYPE ",
                                      "<!DOCTYPE x>",
                                      "<![CDATA[x]]>",
                                      "<![CDATA[x>",
                                      "<?x",
                                      "<?x?>",
                                      "</script",
                                      "<script></",
                                      "<title></t",
                                      "<textarea></textarea",
                                      "<p translate=no>",
                                      "<p translate=no>x</p>",
                                      "<b translate=no>",
                                      "<li translate=no><ul>",
                                      "<b class='",
                                      "<b class='a a' ",
                                      "<b a='a' a='b' ",
                                      "<a/",
                                      "<a =",
                                      "<a\n",
                                      "</",
                                      "</ ",
                                      "<xmp>",
                                      "<plaintext>",
                                      "<iframe></",
                                      "&#1",
                                      "&#x1",
                                      "&nosuch; ",
                                      "<input type=submit value='a &amp; b'>",
                                      "<meta name=keywords content='x'>",
                                      "x<sub>2</sub>",
                                      "<b><b><b>x" };

/* Each \1 is replaced with the repetition number. */
static const char *const numbers[] = { "{\1}",         "{\1} ",           "{\1} x ",
                                       "&a\1; ",       "&a\1; {\1} ",     "<b>{\1}</b>",
                                       "<p>&a\1;</p>", "<a x\1='y'>{\1}", "<img alt='&a\1;'> " };

/* Lines of glossary files (`lists`) and parts of X-Forwarded-For headers (`forwarded`). */
static const char *const lists[] = { "a",
                                     "a\n",
                                     "a b\n",
                                     "a\tb\n",
                                     "a,b\n",
                                     "a;b\n",
                                     "\"a\",b\n",
                                     "\"a\"\"\",b\n",
                                     "\"a\nb\",\"c\"\n",
                                     "\"",
                                     "\"\"",
                                     ",",
                                     "\t",
                                     "\n",
                                     "#\n",
                                     "# a\n",
                                     " ",
                                     "\r\n",
                                     "\1\tb\n",
                                     "a \1\tb\n",
                                     "a a a \1\tb\n",
                                     "\1 a\tb \1\n",
                                     "\1,b\n",
                                     "\"\1\",b\n",
                                     "a\tb\tc\n",
                                     "<?xml",
                                     "a \xCC\x81\tb\n",
                                     "A\ta\n",
                                     "a\n\1\tb\n" };
static const char *const forwarded[] = { ",",  " ",    "1.2.3.4,", "1.2.3.4, ",  "1.2.3.4:5,", "::1,", "[::1]:5,",
                                         "a,", "1.2.", "1:",       "[",          "\t",         "1",    "2001:db8::7, ",
                                         ":",  ".",    ", ,",      "1.2.3.4 x,", "]" };

static const char *const before[] = { "", "<p>x <kbd>z</kbd> <b>y", " " }; /* the spaces fill half of the text */
enum { AROUND = sizeof before / sizeof *before };

/* Write prefix `around` and repetitions of `unit`, at most n bytes, and a NUL; return the length. */
static size_t fill(char *out, size_t n, const char *unit, size_t around) {
    size_t length = strlen(before[around]), step = strlen(unit);
    memcpy(out, before[around], length);
    if (around == AROUND - 1) {
        memset(out, ' ', n / 2);
        out[length = n / 2] = 'x', length++;
    }
    if (!strchr(unit, 1)) /* write units in pairs, because some scanners compare the halves of the text */
        for (; length + 2 * step <= n; length += 2 * step)
            memcpy(out + length, unit, step), memcpy(out + length + step, unit, step);
    else
        for (size_t number = 1; length + step + 16 <= n; number++)
            for (size_t i = 0; i < step; i++) {
                if (unit[i] == 1) length += (size_t)snprintf(out + length, 8, "%zu", number);
                else out[length++] = unit[i];
            }
    out[length] = 0;
    return length;
}

/* ==== 2. Scanners ======================================================================================= */

static void walk(const char *data, size_t length) {
    text_scan scan = text_scan_begin(data, length);
    for (size_t at = 0, n = 0; at < length; at += n) {
        text_span_next(&scan, at, &n);
        assert_true(n > 0);
    }
}

static void cut_sentences(const char *data, size_t length) {
    for (size_t at = 0; at < length;) at += text_sentence(data + at, length - at);
}

static void cut_clauses(const char *data, size_t length) {
    int verbatim;
    for (size_t at = 0; at < length;) at += text_clause(data + at, length - at, 400, 1, &verbatim);
}

static void halve(const char *data, size_t length) { (void)text_half(data, length, 1); }

static void cut_cells(const char *data, size_t length) {
    int separates;
    for (size_t at = 0; at < length;) at += text_cell(data + at, length - at, 1, &separates);
}

static void find_signs(const char *data, size_t length) {
    const moe_span source = { data, length / 2 }, target = { data + length / 2, length - length / 2 };
    (void)text_signs_kept(source, target);
}

static void find_messages(const char *data, size_t length) {
    int open;
    (void)text_has_message(data, length, &open);
    (void)text_message_is(data, length);
}

static void show_messages(const char *data, size_t length) {
    text_bytes out = { 0 };
    text_message_show(TEXT_MESSAGE_PLURAL, data, length, &out);
    (void)text_message_repair(TEXT_MESSAGE_PLURAL, data, length, 0, &out);
    text_bytes_free(&out);
}

/* Split a text into lines and messages of several lines, as moe-translate does. */
static void read_message_lines(const char *data, size_t length) {
    for (size_t at = 0, line, unclosed = 0; at < length; at += line + 1) {
        const char *end = memchr(data + at, '\n', length - at);
        line = end ? (size_t)(end - data) - at : length - at;
        if (at < unclosed) continue;
        int open;
        const size_t all = text_message_lines(data + at, length - at, line, &open);
        if (all > line && !open && text_message_is(data + at, all)) line = all;
        else if (all > line) unclosed = at + all;
    }
}

static void find_names(const char *data, size_t length) {
    const moe_span source = { data, length / 2 }, target = { data + length / 2, length - length / 2 };
    assert_int_not_equal(text_names_kept(source, target), TEXT_NAMES_MEMORY);
}

static text_suspicions doubts;

static void check_answers(const char *data, size_t length) {
    const moe_span source = { data, length / 2 }, target = { data + length / 2, length - length / 2 };
    (void)text_has_language(data, length);
    (void)text_prompt_missing(source, target);
    moe_span number;
    assert_int_equal(text_prompt_missing_number(source, target, &number, NULL), MOE_OK);
    /* Pass half of the text as the answer, because the check for copies would report the whole text at once. */
    (void)text_suspicious_reason(&doubts, (moe_span){ "de", 2 }, (moe_span){ data, length }, source, 0);
}

static void find_loops(const char *data, size_t length) {
    const moe_span source = { data, length / 2 }, target = { data + length / 2, length - length / 2 };
    (void)text_loops(source, target);
}

static text_words *words;

static void detect(const char *data, size_t length) {
    float confidence;
    (void)text_words_detect(words, data, length, &confidence);
}

static void guard(const char *data, size_t length) {
    const text_front front = { .special = { -1, -1, -1 } };
    text_rules *rules;
    text_guard *kept = NULL;
    moe_span shown;
    moe_error e;
    assert_int_equal(text_rules_new(&front, 1, NULL, NULL, &rules, &e), MOE_OK);
    const moe_status status =
        text_guard_begin(rules, data, length, 0, 0, TEXT_MESSAGE_NONE, TEXT_TERMS_FREE, &kept, &shown, &e);
    assert_true(status == MOE_OK || status == MOE_ERROR_ARGUMENT);
    text_guard_free(kept);
    text_rules_free(rules);
}

/* The front end and the rules for scanners that need a tokeniser. */
static text_front front;
static text_rules *rules;

static void bind_with(const text_rules *with, text_terms terms, const char *data, size_t length) {
    text_guard *kept = NULL;
    text_ids ids = { 0 };
    moe_span shown;
    moe_error e;
    assert_int_equal(text_guard_begin(with, data, length, 0, 0, TEXT_MESSAGE_NONE, terms, &kept, &shown, &e), MOE_OK);
    if (text_guard_used(kept)) {
        assert_int_equal(text_encode(&front, shown.data, shown.length, &ids, &e), MOE_OK);
        assert_int_equal(text_guard_bind(with, kept, shown.data, shown.length, &ids, 512, &e), MOE_OK);
    }
    text_ids_free(&ids);
    text_guard_free(kept);
}

static void bind_kept(const char *data, size_t length) { bind_with(rules, TEXT_TERMS_FREE, data, length); }

static void name_terms(const char *data, size_t length) {
    static const char *const terms[] = { "a", "a b", "a a a a a a a a", "Ann", "Ann Lee", "1.2", "-", "b" };
    text_rules *with;
    moe_error e;
    assert_int_equal(text_rules_with(rules, terms, terms, sizeof terms / sizeof *terms, &with, &e), MOE_OK);
    bind_with(with, TEXT_TERMS_REPLACED, data, length);
    text_rules_free(with);
}

static void read_terms(const char *data, size_t length) {
    text_glossary *g = NULL;
    moe_error e;
    if (!text_glossary_read(&front, "terms", data, length, &g, &e)) assert_true(text_glossary_count(g) > 0);
    text_glossary_free(g);
}

static void change_case(const char *data, size_t length) {
    char *copy = malloc(length + 1);
    assert_non_null(copy);
    memcpy(copy, data, length + 1);
    if (text_is_capitals(copy, length)) text_lower_case(copy, length);
    text_lower_case(copy, length);
    text_upper_case(copy, length);
    assert_int_equal(strlen(copy), length);
    free(copy);
}

static void read_lines(const char *data, size_t length) {
    text_reader reader;
    text_line line;
    char why[128];
    size_t all = 0;
    text_reader_init(&reader, -1, NULL, -1);
    assert_true(text_reader_take(&reader, data));
    while (text_reader_next(&reader, 0, &line) == TEXT_READ_LINE) all += text_line_usable(&line, why, sizeof why);
    assert_true(all <= length);
    text_reader_free(&reader);
}

static void find_client(const char *data, size_t length) {
    network trusted[2];
    assert_true(network_read("0.0.0.0/0", &trusted[0]) && network_read("::/0", &trusted[1]));
    const address peer = address_of(NULL);
    const address found = address_forwarded(trusted, 2, &peer, data, length);
    assert_true(address_key(&found) != ADDRESS_NOBODY);
}

static void write_json(const char *data, size_t length) {
    text_bytes out = { 0 };
    json j = { .out = &out, .script = 1 };
    json_open(&j, NULL, '{');
    json_string(&j, "text", data, length);
    json_clean(&j, "clean", data, length);
    json_close(&j, '}');
    assert_false(out.failed);
    text_bytes_free(&out);
}

/* Return links that map each word to itself. */
static text_links linked(const char *data, size_t length) {
    text_links links = { .data = malloc((length / 2 + 1) * sizeof(moetext_link)) };
    assert_non_null(links.data);
    for (size_t at = 0, end; at < length; at = end + 1) {
        for (end = at; end < length && data[end] != ' '; end++) {}
        if (end > at) links.data[links.n++] = (moetext_link){ at, end, at, end };
    }
    return links;
}

static void link_through(const char *data, size_t length) {
    text_links links = linked(data, length), through = { 0 };
    moe_error e;
    assert_int_equal(text_links_through(links.data, links.n, links.data, links.n, &through, &e), MOE_OK);
    assert_int_equal(through.n, links.n);
    free(through.data);
    free(links.data);
}

static const char *nothing(void *user, size_t segment, size_t *length) {
    (void)segment;
    *length = strlen(user);
    return user;
}

static void cut_markup(const char *data, size_t length, moetext_html_tags tags, int xml) {
    char word[] = "x";
    const moetext_html_options options = { .tags = tags, .xml = xml, .target = "de" };
    moetext_html *document;
    size_t n, all;
    assert_int_equal(moetext_html_new(data, length, &options, &document, NULL), MOE_OK);
    for (size_t i = 0; i < moetext_html_count(document); i++) {
        const char *source = moetext_html_source(document, i, &n);
        char *text = text_copy(source, n);
        text_links links = linked(source, n);
        moetext_html_place(document, i, text, n, links.data, links.n, &all);
        text[n - 1] = '.'; /* make the text differ from the source */
        moetext_html_place(document, i, text, n, links.data, links.n, &all);
        free(links.data), free(text);
        text = text_copy(moetext_html_pieces(document, i, &n), n);
        assert_non_null(moetext_html_place_pieces(document, i, text, n, &all));
        free(text);
    }
    assert_non_null(moetext_html_write(document, NULL, NULL, &n));
    assert_non_null(moetext_html_write(document, nothing, word, &n));
    moetext_html_free(document);
}

static void cut_html(const char *data, size_t length) {
    cut_markup(data, length, MOETEXT_TAGS_LINKED, 0);
    cut_markup(data, length, MOETEXT_TAGS_MARKED, 0);
}
static void cut_xml(const char *data, size_t length) { cut_markup(data, length, MOETEXT_TAGS_LINKED, 1); }

/* ==== 3. Growth ========================================================================================= */

static void grow(void (*scan)(const char *, size_t), const char *const *units, size_t n_units) {
    const char *given = getenv("MOE_TEST_LINEAR"), *one = getenv("MOE_TEST_TRIGGER");
    const size_t first = given ? (size_t)strtoull(given, NULL, 10) : LEAST;
    const size_t n_sizes = one ? 1 : SIZES;
    char *text = malloc((first << (SIZES - 1)) + 64);
    unsigned long long most = 0;
    size_t most_unit = 0, most_around = 0;
    unsigned long long steepest_steps[SIZES] = { 0 };
    size_t steepest_unit = 0, steepest_around = 0;
    double steepest = 0.0;
    int steep = 0;
    assert_non_null(text);
    if (first < LEAST) fail_msg("MOE_TEST_LINEAR is a number of bytes, %d or more", LEAST);
    if (one && strcmp(one, "all") != 0) {
        char *end;
        const size_t unit = (size_t)strtoul(one, &end, 10), around = (size_t)strtoul(end, NULL, 10);
        assert_true(unit && unit <= n_units && around && around <= AROUND);
        scan(text, fill(text, first, units[unit - 1], around - 1));
        free(text);
        return;
    }
    for (size_t u = 0; u < n_units; u++)
        for (size_t around = 0; around < AROUND; around++) {
            unsigned long long steps[SIZES] = { 0 };
            double steeper = steepest;
            for (size_t i = 0; i < n_sizes; i++) {
                const size_t length = fill(text, first << i, units[u], around);
                counted_steps = 0;
                scan(text, length);
                steps[i] = counted_steps;
                assert_true(steps[i] > 0);
                if (i == n_sizes / 2 && steps[i] > most) most = steps[i], most_unit = u + 1, most_around = around + 1;
                const double growth = i && steps[i] > FEW ? (double)steps[i] / (double)steps[i - 1] : 0.0;
                if (growth > steeper) steeper = growth;
                if (i && growth <= LINEAR && !given) break;
                if (growth <= GROWTH) continue;
                print_message("\"%s\" after \"%s\": %llu steps, %llu for twice the text\n", units[u], before[around],
                              steps[i - 1], steps[i]);
                steep++;
                break;
            }
            if (steeper <= steepest) continue;
            steepest = steeper, steepest_unit = u + 1, steepest_around = around + 1;
            memcpy(steepest_steps, steps, sizeof steps);
        }
    free(text);
    print_message("most steps for %zu bytes: %llu, by trigger %zu %zu\n", first << (n_sizes / 2), most, most_unit,
                  most_around);
    print_message("most growth for twice the text: %.3f, by trigger %zu %zu:", steepest, steepest_unit,
                  steepest_around);
    for (size_t i = 0; i < n_sizes; i++) print_message(" %llu", steepest_steps[i]);
    print_message(" steps\n");
    assert_int_equal(steep, 0);
}

static void with_tokeniser(void (*scan)(const char *, size_t), const char *const *units, size_t n_units) {
    moe_error e;
    assert_int_equal(text_open("models/en-de-fr-es.bin", TEXT_REQUIRED, NULL, &front, &e), MOE_OK);
    assert_int_equal(text_rules_new(&front, 1, NULL, NULL, &rules, &e), MOE_OK);
    grow(scan, units, n_units);
    text_rules_free(rules);
    text_close(&front);
}

#define SCANNER(name, run, scan, units)                            \
    TEST(name) { run(scan, units, sizeof units / sizeof *units); }
SCANNER(spans, grow, walk, texts)
SCANNER(sentences, grow, cut_sentences, texts)
SCANNER(clauses, grow, cut_clauses, texts)
SCANNER(halves, grow, halve, texts)
SCANNER(cells, grow, cut_cells, texts)
SCANNER(signs, grow, find_signs, texts)
SCANNER(messages, grow, find_messages, texts)
SCANNER(messages_shown, grow, show_messages, texts)
SCANNER(message_lines, grow, read_message_lines, texts)
SCANNER(loops, grow, find_loops, texts)
SCANNER(names, grow, find_names, texts)
SCANNER(links, grow, link_through, texts)
SCANNER(guards, grow, guard, texts)
SCANNER(constraints, with_tokeniser, bind_kept, texts)
SCANNER(terms, with_tokeniser, name_terms, texts)
SCANNER(glossaries, with_tokeniser, read_terms, lists)
SCANNER(cases, grow, change_case, texts)
SCANNER(lines, grow, read_lines, texts)
SCANNER(json_strings, grow, write_json, texts)
SCANNER(addresses, grow, find_client, forwarded)
SCANNER(html_of_texts, grow, cut_html, texts)
SCANNER(html_of_markup, grow, cut_html, markup)
SCANNER(html_of_numbers, grow, cut_html, numbers)
SCANNER(xml_of_markup, grow, cut_xml, markup)

/* Return the steps to build a prompt with `lines` preceding lines or `terms` terms, most of which do not fit. */
static unsigned long long shorten(const text_front *asked, size_t lines, size_t terms) {
    static const text_prompt_options options = { .context = 1 };
    text_bytes context = { 0 }, text = { 0 }, list = { 0 };
    text_glossary *glossary = NULL;
    text_ids ids = { 0 };
    size_t left;
    moe_error e;
    for (size_t i = 0; i < lines; i++) text_printf(&context, "line %zu\n", i);
    text_append(&list, "zz=zz\n", 6);
    for (size_t i = 0; i < terms; i++) {
        text_printf(&text, "t%zu ", i);
        text_printf(&list, "t%zu\tu%zu\n", i, i);
    }
    text_append(&text, "he", 2);
    assert_int_equal(text_glossary_read(asked, "x.tsv", list.data, list.length, &glossary, &e), MOE_OK);
    const moe_span said = { text.data, text.length };
    const text_prompt_request q = { .text = said,
                                    .original = said,
                                    .context = { context.data, context.length },
                                    .source = -1,
                                    .glossary = glossary };
    counted_steps = 0;
    const size_t room = text.length + 200;
    assert_int_equal(text_prompt_ids(asked, &options, &q, room, &ids, &left, &e), MOE_OK);
    const unsigned long long steps = counted_steps;
    assert_true(ids.length <= room && ids.length > room - 60);
    assert_true(terms ? left > terms / 4 && left < terms : left == 0);
    text_glossary_free(glossary);
    text_ids_free(&ids);
    text_bytes *const all[] = { &context, &text, &list };
    text_bytes_free_all(all, 3);
    return steps;
}

TEST(prompts) {
    static const char path[] = "build/test-linear-asked.bin";
    text_front asked;
    moe_error e;
    write_prompted(path);
    assert_int_equal(text_open(path, TEXT_REQUIRED, NULL, &asked, &e), MOE_OK);
    const unsigned long long lines = shorten(&asked, 1000, 0), more_lines = shorten(&asked, 2000, 0),
                             terms = shorten(&asked, 0, 1000), more_terms = shorten(&asked, 0, 2000);
    print_message("%llu steps, %llu for twice the lines; %llu, %llu for twice the terms\n", lines, more_lines, terms,
                  more_terms);
    assert_true((double)more_lines <= GROWTH * (double)lines && (double)more_terms <= GROWTH * (double)terms);
    text_close(&asked);
    remove(path);
}

TEST(languages) {
    static const char *const names[] = { "de", "en", "es", "fr" };
    words = text_words_open(names, 4);
    assert_non_null(words);
    grow(detect, texts, sizeof texts / sizeof *texts);
    text_words_close(words);
}

TEST(answers) {
    grow(check_answers, texts, sizeof texts / sizeof *texts);
    text_suspicions_free(&doubts);
}

/* Pass an answer in pieces. No stop text occurs, since each is a prefix of the answer with its last byte changed. */
static void find_stops(const char *data, size_t length) {
    char ends[STOPS_MOST][STOPS_LONGEST + 1];
    stops s = { .n = STOPS_MOST, .longest = STOPS_LONGEST };
    text_bytes answer = { 0 };
    for (size_t i = 0; i < STOPS_MOST; i++) {
        const size_t n = STOPS_LONGEST - i * i; /* all stop texts differ in length */
        snprintf(ends[i], sizeof ends[i], "%.*s\1", (int)n - 1, data);
        s.texts[i] = ends[i];
    }
    for (size_t at = 0, n; at < length; at += n) {
        n = length - at < 16 ? length - at : 16;
        if (stops_add(&s, &answer, data + at, n)) break;
        (void)stops_held(&s, &answer);
    }
    text_bytes_free(&answer);
}

TEST(stop_texts) {
    static const char *const units[] = {
        "a", "ab", "aab", "a ", "\n", "\xC3\xA9"
    }; /* only a few units, because `texts` would take minutes */
    grow(find_stops, units, sizeof units / sizeof *units);
}

/* The tokeniser to measure. Steps inside PCRE2 are not counted. */
static const bpe *tokeniser;

static void encode(const char *data, size_t length) {
    text_ids ids = { 0 };
    text_bytes out = { 0 };
    bpe_stream stream = { 0 };
    assert_int_equal(bpe_encode(tokeniser, data, length, 1, &ids, NULL, NULL, 0), 0);
    bpe_decode(tokeniser, &stream, ids.data, ids.length, &out);
    assert_true(out.length > 0);
    free(ids.data);
    text_bytes_free(&out);
}

TEST(tokens) {
    static const char *const units[] = { "a",         "ab",       "the",      "the ", "<end>", "<end>er",
                                         "<",         "<en",      "\xCC\x81", "1",    "\xFF",  "\xCC\x81\xCC\xA3",
                                         "e\xCC\x81", "\xF0\x9F", " ",        "\n" };
    for (int whole = 0; whole < 2; whole++) { /* 0 to split the text with expressions, 1 to keep it whole */
        recipe r = usual();
        r.nfc = 1;
        if (whole) r.n_expressions = 0;
        text_bytes bytes = made_of(&r);
        bpe *made = bpe_new(bytes.data, bytes.length, NULL, 0);
        assert_non_null(made);
        tokeniser = made;
        grow(encode, units, sizeof units / sizeof *units);
        grow(encode, texts, sizeof texts / sizeof *texts);
        bpe_free(made);
        text_bytes_free(&bytes);
    }
}

static void squared(const char *data, size_t length) {
    for (size_t i = 0; i < length; i += 64) counted_steps += length - i + (size_t)(data[i] == 0);
}

TEST(quadratic_growth_is_detected) {
    char *longer = calloc(2, 65536);
    assert_non_null(longer);
    counted_steps = 0;
    squared(longer, 65536);
    const unsigned long long one = counted_steps;
    counted_steps = 0;
    squared(longer, 131072);
    assert_true((double)counted_steps > GROWTH * (double)one);
    free(longer);
}

int main(int argc, char **argv) {
    if (argc > 1) cmocka_set_test_filter(argv[1]); /* names of scanners, such as "html*" */
    return run_all_tests(NULL, NULL);
}
