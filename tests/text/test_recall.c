/* test_recall.c - translation memories.
 *
 *   1. Files     TSV, PO, TMX, XLIFF; damaged ones
 *   2. Matches   exact, fuzzy, adapted; languages; the last one wins
 *   3. Search    compares with a naive search, and measures a lookup in 100,000 pairs
 */
#define _POSIX_C_SOURCE 200809L /* mkstemp */
#include "tools/text/recall.h"
#include "tools/text/text.h"
#include "tools/text/units.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/test.h"

/* ==== 1. Files ========================================================================================== */

/* Append "from>to|source=target;" for each pair. */
static moe_status note(void *user, moe_span from, moe_span to, moe_span source, moe_span target, moe_error *error) {
    text_bytes *out = user;
    (void)error;
    text_append(out, from.data, from.length), text_append(out, ">", 1), text_append(out, to.data, to.length);
    text_append(out, "|", 1), text_append(out, source.data, source.length), text_append(out, "=", 1);
    text_append(out, target.data, target.length), text_append(out, ";", 1);
    return MOE_OK;
}

static void check_bytes(const char *data, size_t length, const char *wanted) {
    text_bytes out = { 0 };
    moe_error e = { 0 };
    char *exact = malloc(length + 1); /* a sanitizer sees reads beyond the end */
    assert_non_null(exact);
    memcpy(exact, data, length);
    char *copy = realloc(exact, length ? length : 1);
    const moe_status status = text_units_read(copy, length, note, &out, &e);
    text_append(&out, "", 0);
    if (status) text_printf(&out, "! %s: %s", e.where, e.message);
    if (strncmp(out.data, wanted, strlen(wanted)) != 0 || (!status && strcmp(out.data, wanted) != 0))
        fail_msg("'%s', not '%s'", out.data, wanted);
    text_bytes_free(&out);
    free(copy);
}

static void check(const char *data, const char *wanted) { check_bytes(data, strlen(data), wanted); }

TEST(tsv) {
    check("a\tb\n", ">|a=b;");
    check("\xEF\xBB\xBF"
          "a b \t c\r\n\n# no\nd\te",
          ">|a b=c;>|d=e;");
    check("English\tDeutsch\nyes\tja\n", ">|yes=ja;");
    check("# a\tcomment\nyes\tja\n", ">|yes=ja;");
    check("a\t\n\tb\n", "");
    check("", "");
    check("a\tb\nno tab\n", ">|a=b;! line 2: expected source TAB translation");
    check("a\tb\tc\n", "! line 1: expected two columns");
    check("a\t\xFF\n", "! line 1: not valid UTF-8");
    check_bytes("a\0c\tb\n", 6, "! line 1: not valid UTF-8, or contains a NUL byte");
}

TEST(po) {
    check("msgid \"\"\nmsgstr \"\"\n\"Language: de\\n\"\n\"X: y\\n\"\n\n#: a.c:1\n#, c-format\nmsgid \"open %s\\n\"\n"
          "msgstr \"%s \"\n\"\\\"\\303\\266\"\n",
          "! line 10: the string is not closed, or has an unknown escape"); /* no octal escapes */
    check("msgid \"\"\nmsgstr \"Language: de\\n\"\n\n#, c-format\nmsgid \"a\\n\"\n\"b\"\nmsgstr \"c\\t\\\"\\\\\"\n"
          "#, fuzzy\nmsgid \"d\"\nmsgstr \"e\"\n#~ msgid \"f\"\n#~ msgstr \"g\"\n\nmsgctxt \"x\"\nmsgid \"h\"\n"
          "msgstr \"i\"\nmsgid \"j\"\nmsgid_plural \"k\"\nmsgstr[0] \"l\"\nmsgstr[1] \"m\"\nmsgstr[2] \"n\"\n"
          "\nmsgid \"o\"\nmsgstr \"\"\n",
          ">de|a\nb=c\t\"\\;>de|h=i;>de|j=l;>de|k=m;");
    check("msgid \"j\"\nmsgid_plural \"k\"\nmsgstr[0] \"l\"\n", ">|j=l;>|k=l;");
    check("msgid \"a\"\n\nmsgid \"b\"\nmsgstr \"c\"\n", "! line 1: a msgid without msgstr");
    check("msgid \"a\nmsgstr \"b\"\n", "! line 1: the string is not closed");
    check("msgid \"a\"\nmsgstr \"b\"\nmsgfoo \"c\"\n", "! line 3: expected msgid");
    check("msgid \"a\"\nmsgstr b\n", "! line 2: expected msgid, msgstr or a string in quotes");
}

#define TMX(body) "<?xml version=\"1.0\"?>\n<!DOCTYPE tmx SYSTEM \"tmx14.dtd\">\n<tmx version='1.4'><body>" body

TEST(tmx) {
    check(TMX("<tu><note>n</note><tuv xml:lang=\"en-US\"><seg>a &amp; <bpt i='1'>&lt;b&gt;</bpt>b<ept/></seg></tuv>\n"
              "<tuv lang='de'><seg>&#xE4;&#8364;<![CDATA[<x>]]></seg></tuv></tu></body></tmx>"),
          "en-US>de|a & <b>b=ä€<x>;de>en-US|ä€<x>=a & <b>b;");
    check(TMX("<tu><tuv xml:lang='en'><seg>a</seg></tuv><tuv xml:lang='de'><seg/></tuv></tu></body></tmx>"), "");
    check(TMX("<tu><tuv><seg>a</seg></tuv></tu></body></tmx>"), "! line 3: a <tuv> has no xml:lang");
    check(TMX("<tu><tuv xml:lang='en'><seg>a"), "! line 3: the file ends inside a text");
    check(TMX("\n\n</body>"), "! line 5: the file ends before </tmx>");
    check(TMX("<tu"), "! line 3: a tag is not closed");
    check(TMX("<!-- x"), "! line 3: a comment is not closed");
    check("<html></html>", "! line 1: expected TMX or XLIFF");
    static const char wide[] = "\xFF\xFE<\0t\0m\0x\0/\0>\0";
    check_bytes(wide, sizeof wide - 1, "! line 1: the file ends before </tmx>");
    check_bytes("\xFE\xFF\0a\0\t\0\xE4\xD8\x3D\xDE\x00\0\n", 14, ">|a=ä😀;");
    check_bytes("\xFF\xFE"
                "a",
                3, "! line 1: damaged UTF-16");
}

TEST(xliff) {
    check("<xliff version='1.2' xmlns='urn'><file source-language='en' target-language='de'><body>"
          "<trans-unit id='1'><source>a <g id='1'>b</g></source><target>c <g id='1'>d</g></target>"
          "<alt-trans><source>x</source><target>y</target></alt-trans></trans-unit>"
          "<trans-unit id='2'><source>e</source><target state='needs-translation'>f</target></trans-unit>"
          "<trans-unit id='3'><source>g</source></trans-unit></body></file></xliff>",
          "en>de|a <g id='1'>b</g>=c <g id='1'>d</g>;");
    check("<xliff version='2.0' srcLang='en' trgLang='fr'><file id='f'><unit id='u'><segment><source>a"
          "<mrk id='m'>b</mrk></source><target>c</target></segment><segment state='initial'><source>d</source>"
          "<target>e</target></segment></unit></file></xliff>",
          "en>fr|ab=c;");
    check("<xliff><file><trans-unit><source>a</source><target>b</xliff>", "! line 1: the file ends inside a text");
}

/* Every beginning of a file gives pairs or an error, and no read beyond its end. */
TEST(cut_files) {
    static const char *const files[] = {
        TMX("<tu><tuv xml:lang=\"en\"><seg>a&#x41;</seg></tuv><tuv lang='de'><seg>c</seg></tuv></tu></body></tmx>"),
        "msgid \"\"\nmsgstr \"Language: de\\n\"\n\n#, fuzzy\nmsgid \"a\"\nmsgid_plural \"b\"\nmsgstr[0] \"c\"\n",
        "<xliff><file source-language='en'><trans-unit><source>a<x/></source><target>b</target></trans-unit></xliff>",
        "a\tb\r\n#\nc\td\n"
    };
    for (size_t f = 0; f < sizeof files / sizeof *files; f++)
        for (size_t n = 0; n <= strlen(files[f]); n++) {
            text_bytes out = { 0 };
            char *copy = malloc(n ? n : 1);
            assert_non_null(copy);
            memcpy(copy, files[f], n);
            moe_error e = { 0 };
            const moe_status status = text_units_read(copy, n, note, &out, &e);
            assert_true(status == MOE_OK || (status == MOE_ERROR_ARGUMENT && strncmp(e.where, "line ", 5) == 0));
            text_bytes_free(&out);
            free(copy);
        }
}

/* ==== 2. Matches ======================================================================================== */

static text_recall *memory_of(const char *tsv) {
    text_recall *r;
    moe_error e;
    assert_int_equal(text_recall_new(&r, &e), MOE_OK);
    if (text_recall_read(r, tsv, strlen(tsv), &e)) fail_msg("%s: %s", e.where, e.message);
    return r;
}

static text_match find_as(text_recall *r, const char *from, const char *to, const char *text, text_bytes *out) {
    text_match m;
    text_clear(out);
    assert_int_equal(text_recall_find(r, (moe_span){ text, strlen(text) }, from, to, &m, out, NULL), MOE_OK);
    text_append(out, "", 0);
    return m;
}

static void expect(text_recall *r, const char *text, text_match_kind kind, const char *wanted) {
    text_bytes out = { 0 };
    const text_match m = find_as(r, "en", "de", text, &out);
    if (m.kind != kind || strcmp(kind >= TEXT_MATCH_ADAPTED ? out.data : m.target ? m.target : "", wanted) != 0)
        fail_msg("%s: %d '%s' '%s', not %d '%s'", text, (int)m.kind, out.data, m.target ? m.target : "", (int)kind,
                 wanted);
    text_bytes_free(&out);
}

TEST(exact) {
    text_recall *r = memory_of("Open the file.\tÖffne die Datei.\nsame thing\teins\nsame thing\tzwei\n");
    expect(r, "Open the file.", TEXT_MATCH_EXACT, "Öffne die Datei.");
    expect(r, "  Open the file.\t", TEXT_MATCH_EXACT, "  Öffne die Datei.\t");
    expect(r, "same thing", TEXT_MATCH_EXACT, "zwei");
    expect(r, "Same thing", TEXT_MATCH_ADAPTED, "Zwei");
    expect(r, "other", TEXT_MATCH_NONE, "");
    expect(r, "", TEXT_MATCH_NONE, "");
    assert_int_equal(text_recall_count(r), 2);
    assert_string_equal(text_recall_hash(r), "");
    text_recall_free(r);
}

TEST(adapted) {
    text_recall *r = memory_of("cannot open %s for user %d\t%s kann für Benutzer %d nicht geöffnet werden\n"
                               "Version 22.04 is old.\tVersion 22.04 ist alt.\n"
                               "Delete 3 files now\tJetzt 3 Dateien löschen\n"
                               "No branch named '%s'.\tBranch '%s' nicht vorhanden.\n"
                               "Save all changes\tAlle Änderungen speichern!\n"
                               "copy %s to %s again\t%s nochmal nach %s kopieren\n"
                               "Read <b>all</b> of it\tLies <b>alles</b>\n");
    expect(r, "cannot open %ju for user %s", TEXT_MATCH_ADAPTED, "%ju kann für Benutzer %s nicht geöffnet werden");
    expect(r, "Version 24.10 is old.", TEXT_MATCH_ADAPTED, "Version 24.10 ist alt.");
    expect(r, "Delete 1 files now", TEXT_MATCH_FUZZY, "Jetzt 3 Dateien löschen"); /* numbers may change words */
    expect(r, "No branch named '%s'", TEXT_MATCH_ADAPTED, "Branch '%s' nicht vorhanden");
    expect(r, "no branch named '%ju'", TEXT_MATCH_ADAPTED, "Branch '%ju' nicht vorhanden");
    expect(r, "No branch named '%s'?", TEXT_MATCH_FUZZY, "Branch '%s' nicht vorhanden.");
    expect(r, "Save all changes.", TEXT_MATCH_FUZZY, "Alle Änderungen speichern!");    /* its own mark differs */
    expect(r, "copy %s to %d again", TEXT_MATCH_FUZZY, "%s nochmal nach %s kopieren"); /* which %s is it? */
    expect(r, "copy %d to %d again", TEXT_MATCH_ADAPTED, "%d nochmal nach %d kopieren");
    expect(r, "copy  %s  to %s again", TEXT_MATCH_ADAPTED, "%s nochmal nach %s kopieren");
    expect(r, "Read <i>all</i> of it", TEXT_MATCH_ADAPTED, "Lies <i>alles</i>");
    expect(r, "cannot close %s for user %d", TEXT_MATCH_FUZZY, "%s kann für Benutzer %d nicht geöffnet werden");
    text_recall_free(r);
}

TEST(languages) {
    text_recall *r;
    text_bytes out = { 0 };
    const moe_span text = { "word", 4 };
    static const char *const codes[][2] = { { "en", "pt-BR" }, { "en", "pt-PT" }, { "eng_Latn", "deu_Latn" } };
    assert_int_equal(text_recall_new(&r, NULL), MOE_OK);
    for (size_t i = 0; i < 3; i++) {
        const moe_span from = { codes[i][0], strlen(codes[i][0]) }, to = { codes[i][1], strlen(codes[i][1]) };
        assert_int_equal(text_recall_add(r, from, to, text, to, NULL), MOE_OK);
    }
    assert_string_equal(find_as(r, "en", "pt-BR", "word", &out).target, "pt-BR");
    assert_string_equal(find_as(r, "en-GB", "pt_PT", "word", &out).target, "pt-PT");
    assert_string_equal(find_as(r, "en", "pt", "word", &out).target, "pt-PT"); /* the last one */
    assert_string_equal(find_as(r, "en", "de-AT", "word", &out).target, "deu_Latn");
    assert_string_equal(find_as(r, NULL, "de", "word", &out).target, "deu_Latn");
    assert_int_equal(find_as(r, "en", "fr", "word", &out).kind, TEXT_MATCH_NONE);
    assert_int_equal(find_as(r, "de", "pt", "word", &out).kind, TEXT_MATCH_NONE);
    text_bytes_free(&out);
    text_recall_free(r);
}

TEST(lines_and_limits) {
    text_recall *r = memory_of("");
    char *large = calloc(1, TEXT_RECALL_BYTES + 2);
    text_bytes out = { 0 };
    moe_error e;
    assert_non_null(large);
    memset(large, 'a', TEXT_RECALL_BYTES + 1);
    const moe_span none = { "", 0 }, lines = { "a\nb", 3 }, one = { "one", 3 };
    assert_int_equal(text_recall_add(r, none, none, lines, (moe_span){ "c\nd", 3 }, &e), MOE_OK);
    assert_int_equal(text_recall_add(r, none, none, one, (moe_span){ "e\nf \r\ng", 7 }, &e), MOE_OK);
    expect(r, "a\nb\n", TEXT_MATCH_EXACT, "c\nd\n");
    expect(r, "one", TEXT_MATCH_EXACT, "e f g");
    assert_int_equal(text_recall_add(r, none, none, (moe_span){ large, TEXT_RECALL_BYTES + 1 }, one, &e),
                     MOE_ERROR_ARGUMENT);
    assert_int_equal(text_recall_add(r, none, none, (moe_span){ "\xFF", 1 }, one, &e), MOE_ERROR_ARGUMENT);
    assert_int_equal(text_recall_add(r, none, none, (moe_span){ " ", 1 }, one, &e), MOE_OK);
    for (size_t i = 0; i < TEXT_RECALL_BYTES; i++) large[i] = i % 2 ? ' ' : 'b'; /* more words than are indexed */
    large[TEXT_RECALL_BYTES] = '\0';
    assert_int_equal(text_recall_add(r, none, none, (moe_span){ large, TEXT_RECALL_BYTES }, one, &e), MOE_OK);
    expect(r, large, TEXT_MATCH_EXACT, "one ");
    large[0] = 'c';
    expect(r, large, TEXT_MATCH_NONE, "");
    assert_int_equal(text_recall_count(r), 3);
    text_bytes_free(&out);
    free(large);
    text_recall_free(r);
}

TEST(load) {
    char path[] = "/tmp/test_recall.XXXXXX";
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *file = fdopen(fd, "w");
    assert_non_null(file);
    fputs("a\tb\n", file);
    fclose(file);
    text_recall *r = memory_of("");
    moe_error e;
    assert_int_equal(text_recall_load(r, path, &e), MOE_OK);
    assert_string_equal(text_recall_hash(r), "5dd1197866f479824d9b483e1b7ae9ad3e518f3b4fd447c6b92d127dda6178c5");
    file = fopen(path, "w");
    assert_non_null(file);
    fputs("a\tb\nbroken\n", file);
    fclose(file);
    assert_int_equal(text_recall_load(r, path, &e), MOE_ERROR_ARGUMENT);
    assert_non_null(strstr(e.message, path));
    assert_non_null(strstr(e.message, ": line 2: expected"));
    remove(path);
    assert_int_equal(text_recall_load(r, path, &e), MOE_ERROR_IO);
    assert_non_null(strstr(e.message, path));
    text_recall_free(r);
}

/* ==== 3. Search ========================================================================================= */

static uint32_t seed = 7;
static uint32_t random_below(uint32_t n) {
    seed = seed * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)seed * n) >> 32);
}

enum { LONGEST = 12 };

/* Return the number of words; frequent words have small numbers. */
static size_t random_text(int words[LONGEST], uint32_t vocabulary, char *out) {
    const size_t n = 1 + random_below(LONGEST);
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        words[i] = (int)random_below(1 + random_below(vocabulary));
        at += (size_t)sprintf(out + at, "%sw%c%c%c", i ? " " : "", 'a' + words[i] / 676 % 26, 'a' + words[i] / 26 % 26,
                              'a' + words[i] % 26);
    }
    return n;
}

static size_t distance(const int *a, size_t n, const int *b, size_t m) {
    size_t rows[LONGEST + 1][LONGEST + 1];
    for (size_t i = 0; i <= n; i++)
        for (size_t k = 0; k <= m; k++) {
            size_t d = !i ? k : !k ? i : rows[i - 1][k - 1] + (a[i - 1] != b[k - 1]);
            if (i && rows[i - 1][k] + 1 < d) d = rows[i - 1][k] + 1;
            if (k && rows[i][k - 1] + 1 < d) d = rows[i][k - 1] + 1;
            rows[i][k] = d;
        }
    return rows[n][m];
}

/* The best match is that of a naive search, the last of equal ones. */
TEST(like_naive) {
    enum { PAIRS = 400, QUERIES = 2000 };
    static int words[PAIRS][LONGEST], query[LONGEST];
    static size_t lengths[PAIRS];
    char text[LONGEST * 6], number[8];
    text_bytes out = { 0 };
    text_recall *r = memory_of("");
    size_t fuzzy = 0;
    for (size_t i = 0; i < PAIRS; i++) {
        lengths[i] = random_text(words[i], 30, text);
        const int n = sprintf(number, "%zu", i);
        assert_int_equal(text_recall_add(r, (moe_span){ "", 0 }, (moe_span){ "", 0 }, (moe_span){ text, strlen(text) },
                                         (moe_span){ number, (size_t)n }, NULL),
                         MOE_OK);
    }
    for (size_t q = 0; q < QUERIES; q++) {
        size_t n = random_text(query, 30, text);
        if (q % 2) { /* a text with one word less */
            const size_t of = random_below(PAIRS);
            n = lengths[of] - (lengths[of] > 1);
            text[0] = '\0';
            for (size_t i = 0; i < n; i++) {
                query[i] = words[of][i];
                sprintf(text + strlen(text), "%sw%c%c%c", i ? " " : "", 'a' + query[i] / 676 % 26,
                        'a' + query[i] / 26 % 26, 'a' + query[i] % 26);
            }
        }
        size_t best = SIZE_MAX, d = 0, longer = 1;
        for (size_t i = 0; i < PAIRS; i++) {
            const size_t own = distance(query, n, words[i], lengths[i]), most = n > lengths[i] ? n : lengths[i];
            if (10 * own > 3 * most || (best != SIZE_MAX && own * longer > d * most)) continue;
            best = i, d = own, longer = most;
        }
        const text_match m = find_as(r, "", "", text, &out);
        if (best == SIZE_MAX) assert_int_equal(m.kind, TEXT_MATCH_NONE);
        else assert_int_equal(strtol(m.kind ? m.target : "-1", NULL, 10), (long)best);
        fuzzy += m.kind == TEXT_MATCH_FUZZY;
    }
    assert_true(fuzzy > 100);
    text_bytes_free(&out);
    text_recall_free(r);
}

TEST(large) {
    enum { PAIRS = 100000, QUERIES = 1000 };
    int words[LONGEST];
    char text[LONGEST * 6];
    text_bytes out = { 0 };
    text_recall *r = memory_of("");
    for (size_t i = 0; i < PAIRS; i++) {
        random_text(words, 5000, text);
        const moe_span both = { text, strlen(text) };
        assert_int_equal(text_recall_add(r, (moe_span){ "", 0 }, (moe_span){ "", 0 }, both, both, NULL), MOE_OK);
    }
    const clock_t begin = clock();
    for (size_t q = 0; q < QUERIES; q++) {
        random_text(words, 5000, text);
        find_as(r, "", "", text, &out);
    }
    const double each = (double)(clock() - begin) / CLOCKS_PER_SEC / QUERIES * 1e3;
    printf("%.3f ms per lookup in %zu pairs\n", each, text_recall_count(r));
    assert_true(each < 10); /* 0.1 ms; a sanitizer or a busy machine takes longer */
    text_bytes_free(&out);
    text_recall_free(r);
}

TEST(compare) {
    float s;
    assert_int_equal(text_recall_compare((moe_span){ "abcd", 4 }, (moe_span){ "abcd", 4 }, &s, NULL), MOE_OK);
    assert_true(s == 1);
    assert_int_equal(text_recall_compare((moe_span){ "abcd", 4 }, (moe_span){ "abce", 4 }, &s, NULL), MOE_OK);
    assert_true(s == 0.5f);
    assert_int_equal(text_recall_compare((moe_span){ "", 0 }, (moe_span){ "a", 1 }, &s, NULL), MOE_OK);
    assert_true(s == 0);
}

int main(void) { return run_all_tests(NULL, NULL); }
