/* fuzz_units.c - reads the input as a translation memory (TMX, XLIFF, PO, TSV) and as a glossary (TSV, CSV).
 *
 * Checks: pairs are valid UTF-8; errors name a line of the file; a memory in UTF-16 has the same pairs; the terms of a
 * glossary are found in their own sources. */
#define _GNU_SOURCE /* mkdtemp, dprintf */

#include "tools/text/glossary.h"
#include "tools/text/text.h"
#include "tools/text/units.h"

#include "tests/fuzz/fuzz.h"
#define fail_msg(...) FUZZ_CHECK(0, __VA_ARGS__)
#include "tests/text/letters.h"

enum { FEW = 64 }; /* terms that are searched for */

static text_front front;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    front = (text_front){ .tokeniser = letters(), .special = { -1, -1, -1 } };
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    static const char *const words[] = {
        "<tmx><body>",
        "<tu>",
        "</tu>",
        "<tuv xml:lang=\"en\">",
        "</tuv>",
        "<seg>",
        "</seg>",
        "</tmx>",
        "<bpt i=\"1\">&lt;b&gt;</bpt>",
        "<xliff version=\"1.2\"><file source-language=\"en\" target-language=\"de\">",
        "<trans-unit id=\"1\">",
        "</trans-unit>",
        "<unit><segment>",
        "<source>",
        "</source>",
        "<target state=\"new\">",
        "</target>",
        "</xliff>",
        "<![CDATA[",
        "]]>",
        "<!--",
        "-->",
        "<!DOCTYPE a [",
        "&#x1F600;",
        "&#xD800;",
        "&amp;",
        "<?xml version=\"1.0\"?>",
        "msgid \"",
        "msgid_plural \"",
        "msgstr \"",
        "msgstr[0] \"",
        "msgctxt \"",
        "#, fuzzy\n",
        "#~ ",
        "\"\n",
        "\\n",
        "\"Language: de\\n\"\n",
        "\t",
        "\n",
        "\r\n",
        "source\ttarget\n",
        ",",
        ";",
        "\"\"",
        "\xEF\xBB\xBF",
    };
    uint64_t r = seed;
    if (fuzz_one_in(&r, 2)) return LLVMFuzzerMutate(data, size, max_size);
    const char *word = words[fuzz_below(&r, sizeof words / sizeof *words)];
    const size_t from = fuzz_below(&r, size + 1), cut = fuzz_one_in(&r, 3) ? fuzz_below(&r, size - from + 1) : 0;
    return fuzz_splice(data, size, max_size, from, from + cut, word, strlen(word));
}

typedef struct sums {
    size_t pairs;
    uint64_t hash;
} sums;

static moe_status see(void *user, moe_span source_language, moe_span target_language, moe_span source, moe_span target,
                      moe_error *error) {
    const moe_span all[] = { source_language, target_language, source, target };
    sums *s = user;
    (void)error;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        fuzz_read(all[i].data, all[i].length);
        FUZZ_CHECK(i < 2 || text_is_usable(all[i].data, all[i].length), "part %zu of pair %zu is not text", i,
                   s->pairs);
        s->hash = fuzz_hash(s->hash, &all[i].length, sizeof all[i].length);
        s->hash = fuzz_hash(s->hash, all[i].data, all[i].length);
    }
    s->pairs++;
    return MOE_OK;
}

static void check_error(moe_status status, const moe_error *e, const uint8_t *data, size_t size) {
    const char *where = strstr(e->where, "line ");
    size_t lines = 1, line = 0;
    if (!status) return;
    for (size_t i = 0; i < size; i++) lines += data[i] == '\n';
    FUZZ_CHECK(status == MOE_ERROR_ARGUMENT && *e->message, "status %d, %s", status, e->message);
    FUZZ_CHECK(where && sscanf(where, "line %zu", &line) == 1 && line && line <= lines, "\"%s\" of %zu lines: %s",
               e->where, lines, e->message);
}

static void read_memory(const uint8_t *data, size_t size) {
    sums plain = { 0, 0 }, wide = { 0, 0 };
    moe_error e = { .code = MOE_OK };
    size_t n = 0;
    const moe_status status = text_units_read((const char *)data, size, see, &plain, &e);
    check_error(status, &e, data, size);
    for (size_t i = 0; i < size; i++)
        if (!data[i] || data[i] > 0x7E) return;
    uint8_t *copy = malloc(2 * size + 2);
    if (!copy) abort();
    copy[n++] = 0xFF, copy[n++] = 0xFE;
    for (size_t i = 0; i < size; i++) copy[n++] = data[i], copy[n++] = 0;
    FUZZ_CHECK(text_units_read((const char *)copy, n, see, &wide, &e) == status, "UTF-16: %s", e.message);
    FUZZ_CHECK(plain.pairs == wide.pairs && plain.hash == wide.hash, "%zu pairs, %zu in UTF-16", plain.pairs,
               wide.pairs);
    free(copy);
}

static void read_glossary(const char *name, const uint8_t *data, size_t size) {
    moe_error e = { .code = MOE_OK };
    text_glossary *g = NULL;
    const moe_status status = text_glossary_read(&front, name, (const char *)data, size, &g, &e);
    check_error(status, &e, data, size);
    if (status) return;
    for (size_t i = 0; i < text_glossary_count(g) && i < FEW; i++) {
        const text_term *t = text_glossary_term(g, i);
        const size_t length = strlen(t->source);
        size_t bytes = 0;
        int inflected;
        FUZZ_CHECK(text_is_usable(t->source, length) && text_is_usable(t->target, strlen(t->target)),
                   "term %zu is not text", i);
        FUZZ_CHECK(text_glossary_find(g, t->source, length, 0, &bytes, &inflected) && bytes <= length,
                   "term %zu, %s, is not found", i, t->source);
    }
    text_glossary_free(g);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    read_memory(data, size);
    read_glossary("x.csv", data, size);
    read_glossary("x.tsv", data, size);
    return 0;
}
