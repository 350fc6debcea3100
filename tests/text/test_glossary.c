/* test_glossary.c - finds glossary terms in a text.
 *
 *   1. One by one  compares with a naive search for every term at every position
 *   2. Growth      counts steps for 1 to 100,000 terms as in test_linear.c
 */
#include "tools/text/glossary.h"
#include "tools/text/heading.h"
#include "tools/text/plurals.h"
#include "tools/text/spans.h"
#include "tools/text/terms.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "tests/test.h"

#include "tests/text/letters.h"
#include "tools/text/protect.h"

unsigned long long counted_steps;
void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) { counted_steps++; }

static text_front front;

FIXTURE(open_front) {
    front = (text_front){ .tokeniser = letters(), .special = { -1, -1, -1 } };
    return 0;
}

FIXTURE(close_front) {
    spm_free(front.tokeniser);
    return 0;
}

static text_glossary *glossary_of(const char *const *sources, size_t n) {
    text_glossary *g = NULL;
    moe_error e = { .code = MOE_OK };
    char (*targets)[24] = malloc((n + 1) * sizeof *targets);
    const char **pointers = malloc((n + 1) * sizeof *pointers);
    assert_true(targets && pointers);
    for (size_t i = 0; i < n; i++) {
        snprintf(targets[i], sizeof targets[i], "%zu", i);
        pointers[i] = targets[i];
    }
    if (text_glossary_of(&front, sources, pointers, n, &g, &e)) fail_msg("%s: %s", e.where, e.message);
    free(pointers);
    free(targets);
    return g;
}

/* Return the index of the term found at text[at], or -1. */
static long found_at(const text_glossary *g, const char *text, size_t length, size_t at, size_t *bytes,
                     int *inflected) {
    const text_term *t = text_glossary_find(g, text, length, at, bytes, inflected);
    return t ? strtol(t->target, NULL, 10) : -1;
}

/* ==== 1. One by one ===================================================================================== */

enum { MOST = 800 };

/* Convert to NFC; return the number of characters. */
static size_t composed(const char *text, size_t length, utf8proc_int32_t *out) {
    const utf8proc_ssize_t n =
        utf8proc_decompose((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)length, out, MOST, UTF8PROC_DECOMPOSE);
    assert_true(n >= 0 && n <= MOST);
    return n ? (size_t)utf8proc_normalize_utf32(out, n, UTF8PROC_COMPOSE) : 0;
}

static int is(utf8proc_int32_t c, utf8proc_category_t kind) { return utf8proc_category(c) == kind; }

/* Return 1 if the characters `rest` can be an inflectional ending of the term's last word. */
static int may_end(const utf8proc_int32_t *term, size_t n, const utf8proc_int32_t *rest, size_t n_rest) {
    static const char *const endings[] = { "s", "es", "x", "'s", "e", "n", "en", "er", "ern", "em" };
    size_t small = 0, word = n;
    char ending[8] = "";
    while (small < n && is(term[n - 1 - small], UTF8PROC_CATEGORY_LL)) small++;
    if (small < n && is(term[n - 1 - small], UTF8PROC_CATEGORY_LU)) {
        if (small + 1 < n && term[n - 2 - small] != ' ') return 0;
        small += small > 0;
    }
    if (small < 3 || n_rest > 3) return 0;
    while (word && term[word - 1] != ' ') word--;
    for (size_t i = 0; i < n_rest; i++) {
        const utf8proc_int32_t c = rest[i] == 0x2019 ? '\'' : utf8proc_tolower(rest[i]);
        ending[i] = c < 0x80 ? (char)c : '?';
    }
    for (size_t i = 0; i < (is(term[word], UTF8PROC_CATEGORY_LU) ? 10 : 4); i++)
        if (strcmp(ending, endings[i]) == 0) return 1;
    return 0;
}

enum { NAIVE = 60 };

/* The plurals of all terms (plurals.h), then the terms, in order of priority. */
typedef struct entries {
    char text[NAIVE * (TEXT_PLURALS + 1)][TEXT_PLURAL_BYTES];
    long term[NAIVE * (TEXT_PLURALS + 1)];
    size_t n, n_plurals;
} entries;

static void fill_entries(entries *e, const char *const *sources, size_t n) {
    e->n = 0;
    for (size_t i = 0; i < n; i++) {
        utf8proc_int32_t term[MOST], ending = 's';
        const size_t c = composed(sources[i], strlen(sources[i]), term), before = e->n;
        if (may_end(term, c, &ending, 1)) /* a term without endings has no plurals */
            e->n += text_plurals(sources[i], strlen(sources[i]), e->text + e->n);
        for (size_t k = before; k < e->n; k++) e->term[k] = (long)i;
    }
    e->n_plurals = e->n;
    for (size_t i = 0; i < n; i++, e->n++) {
        snprintf(e->text[e->n], sizeof e->text[e->n], "%s", sources[i]);
        e->term[e->n] = (long)i;
    }
}

static long one_by_one(const entries *all, const char *text, size_t length, size_t at, size_t *bytes, int *inflected) {
    utf8proc_int32_t here[MOST], term[MOST];
    size_t before = 0;
    long best = -1;
    for (size_t end = at; end < length;) { /* each iteration extends the match by a word and its combining marks */
        end += text_word_length(text, length, end);
        for (utf8proc_int32_t c = 0; end < length;) {
            const utf8proc_ssize_t mark =
                utf8proc_iterate((const utf8proc_uint8_t *)text + end, (utf8proc_ssize_t)(length - end), &c);
            if (mark < 1 || !utf8proc_get_property(c)->combining_class) break;
            end += (size_t)mark;
        }
        if (end - at > 200) break;
        const size_t count = composed(text + at, end - at, here);
        int exact = 0;
        for (size_t i = 0; i < all->n; i++) {
            const size_t c = composed(all->text[i], strlen(all->text[i]), term);
            size_t same = 0;
            while (same < c && same < count && (here[same] == term[same] || utf8proc_tolower(here[same]) == term[same]))
                same++;
            if (same < c || c <= before) continue;
            if (c < count && (exact || !may_end(term, c, here + c, count - c))) continue;
            exact = c == count;
            best = all->term[i], *bytes = end - at, *inflected = !exact || i < all->n_plurals;
        }
        before = count;
    }
    return best;
}

static uint32_t seed;

static size_t any(size_t n) {
    seed = seed * 1664525u + 1013904223u;
    return (size_t)((uint64_t)seed * n >> 32);
}

static void write_any(char *out, size_t parts) {
    static const char *const some[] = { "a",         "a",
                                        "b",         "b",
                                        "A",         "B",
                                        "s",         "es",
                                        "en",        "n",
                                        " ",         " ",
                                        "'",         "\xE2\x80\x99",
                                        "-",         "\xC3\xA9",
                                        "e\xCC\x81", "\xC3\x89",
                                        "E\xCC\x81", "\xC4\xB0",
                                        "\xC7\x85",  "\xC7\x84",
                                        "\xC3\x9F",  "\xCC\x81",
                                        "1",         "ab",
                                        "aab",       "Aab",
                                        "aab aab",   "\xF0\x9F\x98\x80" };
    *out = 0;
    for (size_t i = 0; i < parts; i++) strcat(out, some[any(sizeof some / sizeof *some)]);
}

/* Write a random term without a space at either end; the reader of glossary files trims terms. */
static void write_term(char *out) {
    do { write_any(out, 1 + any(8)); } while (*out == ' ' || out[strlen(out) - 1] == ' ');
}

/* Write random terms, some in capitals or with an ending, and text between them. */
static void write_text(char *out, const char *const *sources, size_t n) {
    static const char *const behind[] = { " ", " ", "s ", "es ", "n ", "'s ", "\xE2\x80\x99s ", "ern, ", "ab", "" };
    *out = 0;
    for (size_t i = any(6); i--;) {
        char *end = out + strlen(out);
        if (any(4) == 0) write_any(end, any(6));
        else strcpy(end, sources[any(n)]);
        for (; any(3) == 0 && *end; end++) *end = (char)(*end >= 'a' && *end <= 'z' ? *end - 32 : *end);
        strcat(out, behind[any(sizeof behind / sizeof *behind)]);
    }
}

TEST(terms_equal_those_of_a_naive_search) {
    enum { TERMS = NAIVE };
    static entries all_entries;
    const int rounds = getenv("VALGRIND") ? 40 : 2000;
    long all = 0, others = 0;
    for (int round = 0; round < rounds; round++) {
        char terms[TERMS][100], text[800];
        const char *sources[TERMS];
        seed = (uint32_t)round;
        const size_t n = 1 + any(TERMS);
        for (size_t i = 0; i < n; i++) {
            if (i && any(4) == 0) strcpy(terms[i], terms[any(i)]);
            else write_term(terms[i]);
            sources[i] = terms[i];
        }
        text_glossary *g = glossary_of(sources, n);
        fill_entries(&all_entries, sources, n);
        write_text(text, sources, n);
        const size_t length = strlen(text);
        for (size_t at = 0; at < length; at += text_word_length(text, length, at)) {
            size_t bytes[2] = { 0, 0 };
            int inflected[2] = { 0, 0 };
            const long got = found_at(g, text, length, at, &bytes[0], &inflected[0]);
            const long wanted = one_by_one(&all_entries, text, length, at, &bytes[1], &inflected[1]);
            if (got != wanted || bytes[0] != bytes[1] || inflected[0] != inflected[1])
                fail_msg("round %d: '%s' at %zu: %ld, %zu bytes, %d, not %ld, %zu bytes, %d", round, text, at, got,
                         bytes[0], inflected[0], wanted, bytes[1], inflected[1]);
            all += got >= 0, others += inflected[0];
        }
        text_glossary_free(g);
    }
    print_message("%ld terms, %ld of them inflected\n", all, others);
    assert_true(all > rounds && others > rounds / 20);
}

TEST(matching_rules_are_applied) {
    static const struct {
        const char *terms[4], *text;
        long found;
        size_t bytes;
        int inflected;
    } cases[] = {
        { { "a" }, "a b", 0, 1, 0 }, /* a single letter matches as a word */
        { { "C" }, "C, C.", 0, 1, 0 },
        { { "+" }, "+ 1", 0, 1, 0 },
        { { "dog", "dog house" }, "dog house.", 1, 9, 0 },
        { { "dog", "dog house boat" }, "dog house.", 0, 3, 0 },
        { { "dog", "dogs" }, "dogs", 1, 4, 0 },
        { { "dogs", "dog" }, "dogs", 0, 4, 0 },
        { { "dog", "dog" }, "dog", 1, 3, 0 },
        { { "dog" }, "dogs run", 0, 4, 1 },
        { { "dog" }, "DOGS", 0, 4, 1 },
        { { "dog" }, "dogged", -1, 0, 0 },
        { { "Hund" }, "Hunden", 0, 6, 1 },
        { { "hund" }, "hunden", -1, 0, 0 },
        { { "Hund" }, "hund", -1, 0, 0 },
        { { "dog", "Dog", "DOG" }, "Dog", 1, 3, 0 },
        { { "DOG", "Dog", "dog" }, "DOG", 2, 3, 0 },
        { { "DOG", "dog", "Dog" }, "dOg", 1, 3, 0 },
        { { "hous", "house" }, "houses", 1, 6, 1 }, /* matches "house" with the ending "s" */
        { { "house", "hous" }, "houses", 1, 6, 1 },
        { { "caf\xC3\xA9" }, "cafe\xCC\x81s", 0, 7, 1 },
        { { "cafe\xCC\x81" }, "CAF\xC3\x89", 0, 5, 0 },
        { { "a>\xCC\x8C b" }, "a>\xCC\x8C b", 0, 6, 0 }, /* a sign has its marks, too */
        { { "a>" }, "a>\xCC\x8C b", -1, 0, 0 },
        { { "dog's", "dog" }, "dog's", 0, 5, 0 },
        { { "the dog" }, "the dog\xE2\x80\x99s", 0, 7, 0 }, /* U+2019 is an apostrophe */
        { { "company" }, "companies", 0, 9, 1 },
        { { "company" }, "COMPANIES", 0, 9, 1 },
        { { "company", "companies" }, "companies", 1, 9, 0 },
        { { "companies", "company" }, "companies", 0, 9, 0 },
        { { "half" }, "halves", 0, 6, 1 },
        { { "woman" }, "women", 0, 5, 1 },
        { { "analysis" }, "analyses", 0, 8, 1 },
        { { "point of sale" }, "points of sale", 0, 14, 1 },
        { { "joint key" }, "joint keys", 0, 10, 1 },
        { { "journal" }, "journaux", 0, 8, 1 },
        { { "base de donn\xC3\xA9"
            "es" },
          "bases de donn\xC3\xA9"
          "es",
          0,
          17,
          1 },
        { { "fichier joint" }, "fichiers joints", 0, 15, 1 },
        { { "voz" }, "voces", 0, 5, 1 },
        { { "canci\xC3\xB3n" }, "canciones", 0, 9, 1 },
        { { "Haus" }, "H\xC3\xA4usern", 0, 8, 1 },
        { { "Haus" }, "Hauses", 0, 6, 1 },
        { { "Vertrag" }, "Vertr\xC3\xA4ge", 0, 9, 1 },
        { { "Ergebnis" }, "Ergebnisse", 0, 10, 1 },
        { { "Datum" }, "Daten", 0, 5, 1 },
        { { "neuer Vertrag" }, "neuen Vertrags", 0, 14, 1 },
        { { "user name" }, "use name", -1, 0, 0 },
        { { "freund" }, "fr\xC3\xBCnd", -1, 0, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t n = 0, bytes = 0;
        int inflected = 0;
        while (n < 4 && cases[i].terms[n]) n++;
        text_glossary *g = glossary_of(cases[i].terms, n);
        const long found = found_at(g, cases[i].text, strlen(cases[i].text), 0, &bytes, &inflected);
        if (found != cases[i].found || bytes != cases[i].bytes || inflected != cases[i].inflected)
            fail_msg("%zu: '%s': %ld, %zu bytes, %d", i, cases[i].text, found, bytes, inflected);
        text_glossary_free(g);
    }
}

TEST(headings_are_recognised) {
    static const struct {
        const char *source, *target;
        int heading;
    } cases[] = {
        { "English", "Deutsch", 1 },
        { "source", "target", 1 },
        { "Source", "Target", 1 },
        { "en", "de", 1 },
        { "EN-GB", "de_AT", 1 },
        { "eng", "deu", 1 },
        { "ENGLISH", "French", 1 },
        { "anglais",
          "fran\xC3\xA7"
          "ais",
          1 },
        { "Ingl\xC3\xA9s", "Espa\xC3\xB1ol", 1 },
        { "English (United Kingdom)", "German (DE)", 1 },
        { "English term", "German translation", 1 },
        { "Term", "Translation", 1 },
        { "source text", "Zieltext", 1 },
        { "source_language", "target_language", 1 },
        { "Term EN", "Term DE", 1 },
        { "Quelle", "Ziel", 1 },
        { "from", "to", 1 },
        { "English",
          "\xC3\x9C"
          "bersetzung",
          1 },
        { "Russian", "\xE6\x97\xA5\xE6\x9C\xAC\xE8\xAA\x9E", 1 },
        { "Original:", "\"Target\"", 1 },
        { "German", "Deutsch", 0 },
        { "English", "Englisch", 0 },
        { "source", "Quelle", 0 },
        { "target", "Ziel", 0 },
        { "translation",
          "\xC3\x9C"
          "bersetzung",
          0 },
        { "term", "Begriff", 0 },
        { "text", "Text", 0 },
        { "tenant", "Mandant", 0 },
        { "English tenant", "Deutsch", 0 },
        { "target", "source", 0 },
        { "en", "en", 0 },
        { "no", "nein", 0 },
        { "source", "", 0 },
        { "", "target", 0 },
        { "language model", "Sprachmodell", 0 },
        { "42", "target", 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const moe_span a = { cases[i].source, strlen(cases[i].source) },
                       b = { cases[i].target, strlen(cases[i].target) };
        if (text_is_heading(NULL, a, b) != cases[i].heading)
            fail_msg("'%s', '%s': not %d", cases[i].source, cases[i].target, cases[i].heading);
    }
}

static const char *old_word;

static const char *old_words(const void *user, const text_term *term, size_t n) {
    (void)user, (void)term;
    return n ? NULL : old_word;
}

TEST(terms_are_verified_in_translations) {
    static const char file[] = "Source\tTarget\ntenant\tMandant\ndata base\tDatenbank\nroom\tRaum\ncluster\tVerbund\n"
                               "elastic cluster\telastischer Verbund\nMaria\ncity\tStadt\nflat\tRaum\n";
    static const struct {
        const char *source, *target, *without, *old, *message; /* message: its ending, or "" if all terms are kept */
        unsigned asked, kept;
    } cases[] = {
        { "The tenant pays.", "Der Mandant zahlt.", "", NULL, "", 1, 1 },
        { "The tenant pays.", "Der Mieter zahlt.", "", NULL, "'Mandant' for 'tenant' is missing", 1, 0 },
        { "Tenants pay.", "Mandanten zahlen.", "", NULL, "", 1, 1 },
        { "A tenant pays.", "Ein Mandanten zahlt.", "", NULL, "is missing", 1, 0 },
        { "TENANTS PAY", "MANDANTEN ZAHLEN", "", NULL, "", 1, 1 },
        { "Some cities grow.", "Einige Stadt wachsen.", "", NULL, "", 1, 1 },
        { "The <b>data</b> base", "Die <b>Datenbank</b>", "", NULL, "", 1, 1 },
        { "The da<x1>ta</x1> ba<x2/>se", "Die Datenbank", "", NULL, "", 0, 0 },
        { "The data<x1/>base", "Die Daten<x1/>bank", "", NULL, "'Datenbank' for 'data base' is missing", 1, 0 },
        { "The <x1>data </x1> base", "Die <x1>Daten</x1>bank", "", NULL, "", 1, 1 },
        { "data<p>base", "Datenbank", "", NULL, "", 0, 0 },
        { "A ten\xC2\xAD"
          "ant",
          "Ein Mandant", "", NULL, "", 1, 1 },
        { "tenant tenant", "Mandant und Mandant", "", NULL, "", 2, 2 },
        { "tenant tenant", "Mandant", "", NULL, "is missing", 2, 1 },
        { "A room in a flat", "Raum, Raum", "", NULL, "", 2, 2 },
        { "A room in a flat", "Raum", "", NULL, "is missing", 2, 1 },
        { "An elastic cluster", "Ein elastischer Verbund", "", NULL, "", 1, 1 },
        { "An elastic cluster, a cluster", "Ein elastischer Verbund", "", NULL, "'Verbund' for 'cluster' is missing", 2,
          1 },
        { "Maria", "Maria", "", NULL, "", 1, 1 },
        { "Maria", "Marie", "", NULL, "'Maria' for 'Maria' is missing", 1, 0 },
        { "The tenant", "Der Mandant Mandant", "Der Mieter", NULL, "is repeated", 1, 1 },
        { "The tenant", "Der Mandant Mandant", "Der Mandant", NULL, "", 1, 1 },
        { "The tenant", "Der Mandant Mieter", "Der Mieter", "Mieter", "is next to 'Mieter', which it should replace", 1,
          0 },
        { "The tenant", "Der Mandant", "Der Mieter", "Mieter", "", 1, 1 },
        { "The tenant", "Der Mieter Mandant", "Der Mieter", NULL, "replaces no word", 1, 0 },
        { "The tenant", "Mandant der Mieter", "Der Mieter", NULL, "replaces no word", 1, 0 },
        { "The tenant rents a room", "Ein Zimmer", "", NULL,
          "'Mandant' for 'tenant' is missing; glossary: 'Raum' for 'room' is missing", 2, 0 },
        { "Codes {tenant} and www.tenant.com", "Codes {tenant} und www.tenant.com", "", NULL, "", 0, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        text_glossary *g;
        const char *source = cases[i].source, *target = cases[i].target, *without = cases[i].without;
        const text_terms_known known = { .spans = 1,
                                         .without = { without, strlen(without) },
                                         .old_word = (old_word = cases[i].old) ? old_words : NULL };
        text_bytes message = { 0 };
        unsigned asked = 0, kept = 0;
        assert_int_equal(text_glossary_read(&front, "x", file, sizeof file - 1, &g, NULL), MOE_OK);
        assert_string_equal(text_glossary_heading(g), "Source, Target");
        assert_int_equal(text_terms_check(g, (moe_span){ source, strlen(source) }, (moe_span){ target, strlen(target) },
                                          &known, NULL, &message, NULL),
                         MOE_OK);
        for (size_t k = 0; k < text_glossary_count(g); k++)
            asked += (unsigned)text_glossary_counts(g, k)->asked, kept += (unsigned)text_glossary_counts(g, k)->kept;
        if (asked != cases[i].asked || kept != cases[i].kept || (message.length > 0) != (*cases[i].message > 0) ||
            (message.length && !text_ends_with(message.data, message.length, cases[i].message)))
            fail_msg("%zu: '%s': %u, %u, %s", i, source, asked, kept, message.length ? message.data : "");
        text_bytes_free(&message);
        text_glossary_free(g);
    }
}

/* ==== 2. Growth ========================================================================================= */

enum { SIZES = 3, TERM = 24 };
static const size_t sizes[SIZES] = { 1, 1000, 100000 };

typedef struct family {
    const char *name, *text; /* the text contains prefixes of the terms */
    void (*term)(char *out, size_t i, size_t n);
} family;

static void numbered(char *out, size_t i, size_t n) { (void)n, snprintf(out, TERM, "aa b%06zu", i); }

/* Write a word of eight letters, different for each i. */
static void spelt(char *out, size_t i, size_t n) {
    (void)n;
    for (size_t k = 0, rest = i * 7919; k < 8; k++, rest /= 20) out[k] = "aeioutrnslmdpbgkvfhc"[rest % 20];
    out[8] = 0;
}

static void equal(char *out, size_t i, size_t n) { (void)i, (void)n, strcpy(out, "aa b"); }

/* Write one of eight terms, each of which is a prefix of the next. */
static void nested(char *out, size_t i, size_t n) {
    (void)n;
    const size_t words = i % 8;
    strcpy(out, "aa");
    for (size_t k = 0; k < words; k++) strcat(out, " c");
}

static const family families[] = {
    { "common prefix", "aa b aa c aab ", numbered },
    { "words", "tree aeiou lamp ab nose a rose ", spelt },
    { "the same", "aa b aa c ", equal },
    { "nested", "aa c c c c c ", nested },
};

static unsigned long long steps_of(const text_glossary *g, const char *unit) {
    char text[4000];
    for (size_t i = 0; i < sizeof text; i++) text[i] = unit[i % strlen(unit)];
    counted_steps = 0;
    for (size_t at = 0; at < sizeof text; at += text_word_length(text, sizeof text, at)) {
        size_t bytes;
        int inflected;
        (void)text_glossary_find(g, text, sizeof text, at, &bytes, &inflected);
    }
    return counted_steps;
}

/* A text is not halved inside a term. A pair that ends inside a term and one that begins there split it. */
TEST(terms_are_not_divided) {
    static const char *const source = "a b", *const target = "x";
    static const struct {
        const char *text;
        size_t at, outside;
    } cases[] = {
        { "go a b now", 5, 3 },
        { "go a b now", 3, 3 },
        { "go a b now", 7, 7 },
        { "a b now", 2, 4 },
        { "a b", 2, 0 },
        { "(go a b now)", 6, 4 },
        { "go a", 3, 3 },
        { "go <b>a <i>b</i></b> now", 10, 6 },
        { "go <b>a</b> <i>b</i> now", 12, 12 },
    };
    text_rules *spans, *rules;
    moe_error e;
    assert_int_equal(text_rules_new(&front, 1, NULL, NULL, &spans, &e), MOE_OK);
    assert_int_equal(text_rules_with(spans, &source, &target, 1, &rules, &e), MOE_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        text_guard *guard = NULL;
        moe_span shown;
        assert_int_equal(text_guard_begin(rules, cases[i].text, strlen(cases[i].text), 0, 0, TEXT_MESSAGE_NONE,
                                          TEXT_TERMS_BOUND, &guard, &shown, &e),
                         MOE_OK);
        const size_t outside = text_guard_outside_term(guard, cases[i].at);
        if (outside != cases[i].outside) fail_msg("%s: %zu is %zu", cases[i].text, cases[i].at, outside);
        text_guard_free(guard);
    }
    text_rules_free(rules);
    text_rules_free(spans);
}

TEST(search_steps_do_not_depend_on_the_number_of_terms) {
    char *terms = malloc(sizes[SIZES - 1] * TERM);
    const char **sources = malloc(sizes[SIZES - 1] * sizeof *sources);
    const size_t n_sizes = getenv("VALGRIND") ? 2 : SIZES;
    assert_true(terms && sources);
    for (size_t f = 0; f < sizeof families / sizeof *families; f++) {
        unsigned long long steps[SIZES] = { 0 }, built[SIZES] = { 0 };
        for (size_t s = 0; s < n_sizes; s++) {
            for (size_t i = 0; i < sizes[s]; i++) {
                families[f].term(terms + i * TERM, i, sizes[s]);
                sources[i] = terms + i * TERM;
            }
            counted_steps = 0;
            text_glossary *g = glossary_of(sources, sizes[s]);
            built[s] = counted_steps;
            steps[s] = steps_of(g, families[f].text);
            text_glossary_free(g);
        }
        print_message("%s: %llu, %llu, %llu steps to look; %llu, %llu, %llu to build\n", families[f].name, steps[0],
                      steps[1], steps[2], built[0], built[1], built[2]);
        for (size_t s = 1; s < n_sizes; s++) {
            if (steps[s] > 3 * steps[0])
                fail_msg("%s: %llu steps with one term, %llu with %zu", families[f].name, steps[0], steps[s], sizes[s]);
            if (s > 1 && built[s] > 150 * built[s - 1]) /* building a glossary takes n log n steps */
                fail_msg("%s: %llu steps to build %zu", families[f].name, built[s], sizes[s]);
        }
    }
    free(sources);
    free(terms);
}

/* The terms are long and differ only in their last characters. */
TEST(terms_with_long_common_prefixes_take_linear_time) {
    enum { N = 1000 };
    char (*terms)[200] = malloc(sizeof *terms * 4 * N);
    const char **sources = malloc(sizeof *sources * 4 * N);
    unsigned long long built[3] = { 0 };
    assert_true(terms && sources);
    for (size_t i = 0; i < 4 * N; i++) {
        memset(terms[i], 'a', sizeof terms[i]);
        snprintf(terms[i] + 190, 10, "%05zu", i * 7919 % 10007);
        sources[i] = terms[i];
    }
    for (size_t s = 0; s < 3; s++) {
        counted_steps = 0;
        text_glossary_free(glossary_of(sources, (size_t)N << s));
        built[s] = counted_steps;
        if (s && (double)built[s] > 2.3 * (double)built[s - 1])
            fail_msg("%llu steps, %llu for twice as many terms", built[s - 1], built[s]);
    }
    free(sources);
    free(terms);
}

int main(void) { return run_all_tests(open_front, close_front); }
