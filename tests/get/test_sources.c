/* Test the parts of moe-get that need no network: names, the choice of files, hashes, ranges, and the store. */
#define _POSIX_C_SOURCE 200809L
#include "tests/test.h"

#include "tools/get/fetch.h"
#include "tools/get/sources.h"
#include "tools/get/store.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[] = "/tmp/test_sources-XXXXXX";

/* ---- 1. Hashes and ranges ------------------------------------------------------------------------------ */

static void hash_of(const char *text, size_t times, size_t step, char out[SHA256_TEXT]) {
    const size_t n = strlen(text) * times;
    char *data = malloc(n + 1);
    sha256 s;
    for (size_t i = 0; i < times; i++) memcpy(data + i * strlen(text), text, strlen(text));
    sha256_begin(&s);
    for (size_t at = 0; at < n; at += step) sha256_add(&s, data + at, n - at < step ? n - at : step);
    sha256_end(&s, out);
    free(data);
}

TEST(sha256_of_known_texts) {
    static const struct {
        const char *text;
        size_t times;
        const char *hash;
    } cases[] = {
        { "", 0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" },
        { "abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" },
        { "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1,
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1" },
        { "a", 1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0" },
    };
    char out[SHA256_TEXT];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (size_t step = 1; step < 200; step += 9) {
            hash_of(cases[i].text, cases[i].times, step, out);
            assert_string_equal(out, cases[i].hash);
        }
}

TEST(hashes_of_all_lengths_do_not_depend_on_pieces) {
    char whole[SHA256_TEXT], parts[SHA256_TEXT];
    for (size_t n = 1; n < 200; n++) {
        hash_of("x", n, n, whole), hash_of("x", n, 7, parts);
        assert_string_equal(whole, parts);
    }
}

TEST(content_ranges) {
    uint64_t first, last, all;
    assert_true(fetch_content_range("bytes 5-9/10", &first, &last, &all));
    assert_true(first == 5 && last == 9 && all == 10);
    assert_true(fetch_content_range("Bytes 0-0/*", &first, &last, &all));
    assert_true(first == 0 && last == 0 && all == SOURCE_UNKNOWN);
    static const char *const wrong[] = { "",
                                         "bytes",
                                         "bytes */10",
                                         "bytes 9-5/10",
                                         "bytes 5-10/10",
                                         "bytes 5-9/10 ",
                                         "bytes -9/10",
                                         "bytes 5-/10",
                                         "bytes 5-9",
                                         "items 5-9/10",
                                         "bytes 5-9/",
                                         "bytes 5-9/99999999999999999999",
                                         "bytes 0x5-9/10",
                                         "bytes +5-9/10" };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_false(fetch_content_range(wrong[i], &first, &last, &all));
}

TEST(a_token_is_for_one_origin) {
    assert_true(fetch_same_origin("https://huggingface.co/a", "https://HuggingFace.co:443/b?c"));
    assert_false(fetch_same_origin("https://huggingface.co/a", "https://cdn.huggingface.co/a"));
    assert_false(fetch_same_origin("https://huggingface.co/a", "http://huggingface.co/a"));
    assert_false(fetch_same_origin("http://localhost:8000/a", "http://localhost:8001/a"));
    assert_false(fetch_same_origin("https://huggingface.co/a", "https://huggingface.co@example.org/a"));
    assert_false(fetch_same_origin("not an address", "not an address"));
}

/* ---- 2. Names ------------------------------------------------------------------------------------------ */

TEST(words_name_models) {
    static const struct {
        const char *word, *id, *revision, *file;
        size_t n;
    } cases[] = {
        { "en-pt", "firefox/en-pt", "main", "", 3 },
        { "EN_PT", "firefox/en-pt", "main", "", 3 },
        { "en-zh_Hant", "firefox/en-zh-hant", "main", "", 3 },
        { "firefox/en-pt", "firefox/en-pt", "main", "", 1 },
        { "nllb", "facebook/nllb-200-distilled-600M", "main", "", 1 },
        { "Hy-MT2-7B", "tencent/Hy-MT2-7B", "main", "", 1 },
        { "marco-nano", "AIDC-AI/Marco-Nano-Instruct", "main", "", 1 },
        { "Marco-Mini-Instruct", "AIDC-AI/Marco-Mini-Instruct", "main", "", 1 },
        { "m2m100_418M", "facebook/m2m100_418M", "main", "", 1 },
        { "facebook/NLLB-moe-54b", "facebook/nllb-moe-54b", "main", "", 1 },
        { "opus-mt-de-fr", "Helsinki-NLP/opus-mt-de-fr", "main", "", 1 },
        { "owner/name", "owner/name", "main", "", 1 },
        { "owner/name@v1.0", "owner/name@v1.0", "v1.0", "", 1 },
        { "owner/name/a.gguf", "owner/name+a.gguf", "main", "a.gguf", 1 },
    };
    source_name names[SOURCE_CANDIDATES];
    size_t n;
    moe_error e;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(source_parse(cases[i].word, names, &n, &e), MOE_OK);
        assert_int_equal(n, cases[i].n);
        assert_string_equal(names[0].id, cases[i].id);
        assert_string_equal(names[0].revision, cases[i].revision);
        assert_string_equal(names[0].file, cases[i].file);
    }
    assert_int_equal(source_parse("en-pt", names, &n, &e), MOE_OK);
    assert_string_equal(names[1].id, "Helsinki-NLP/opus-mt-en-pt");
    assert_string_equal(names[2].id, "Helsinki-NLP/opus-mt-tc-big-en-pt");
}

TEST(other_words_name_nothing) {
    static const char *const words[] = { "",          "en",           "english", "en-",    "-pt",         "en--pt",
                                         "../x",      "a/..",         "a/b/..",  "a/../b", "/etc/passwd", "a//b",
                                         "a/b/c/d",   "a/b@",         "a/b@x/y", "a/.git", "a/-b",        "firefox/..",
                                         "firefox/x", "opus-mt-../x", "a/b\n",   "a\\b/c", "a/b.partial" };
    source_name names[SOURCE_CANDIDATES];
    char longer[2000] = "a/";
    size_t n;
    moe_error e;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        assert_int_equal(source_parse(words[i], names, &n, &e), MOE_ERROR_ARGUMENT);
        assert_non_null(strstr(e.message, "--search"));
    }
    memset(longer + 2, 'b', sizeof longer - 3), longer[sizeof longer - 1] = 0;
    assert_int_equal(source_parse(longer, names, &n, &e), MOE_ERROR_ARGUMENT);
}

/* ---- 3. Firefox's index -------------------------------------------------------------------------------- */

#define HASH "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
#define ENTRY(architecture, status, name, size, metrics)                                                  \
    "{\"architecture\": " architecture ", \"releaseStatus\": " status                                     \
    ", \"files\": {\"model\": {\"path\": \"models/" name "/model.bin.gz\", \"uncompressedHash\": \"" HASH \
    "\", \"uncompressedSize\": " size "}, \"vocab\": {\"path\": \"models/" name                           \
    "/vocab.spm.gz\"}, \"lexicalShortlist\": null}, \"metrics\": " metrics "}"
#define METRICS(comet, bleu) "{\"flores200-plus\": {\"comet22\": " comet ", \"bleu\": " bleu "}}"

static moe_status choose(const char *entries, const char *base, const char *from, int small, source_model *m,
                         moe_error *e) {
    source_name names[SOURCE_CANDIDATES];
    size_t n;
    char text[8192];
    snprintf(text, sizeof text, "{\"baseUrl\": \"%s\", \"models\": {\"xx-yy\": [], \"en-pt\": %s}}", base, entries);
    cJSON *index = source_json(text, strlen(text));
    assert_non_null(index);
    assert_int_equal(source_parse("en-pt", names, &n, NULL), MOE_OK);
    const moe_status status = source_from_index(index, from, &names[0], small, m, e);
    cJSON_Delete(index);
    return status;
}

/* Expect the entry `name`, in this order of entries and in reverse. */
static void expect_choice(const char *a, const char *b, int small, const char *name) {
    char both[4096], wanted[256];
    source_model m;
    moe_error e;
    snprintf(wanted, sizeof wanted, "http://base/models/%s/model.bin.gz", name);
    for (int i = 0; i < 2; i++) {
        snprintf(both, sizeof both, "[%s, null, %s]", i ? a : b, i ? b : a);
        assert_int_equal(choose(both, "http://base", "http://base/db", small, &m, &e), MOE_OK);
        assert_string_equal(m.files[0].url, wanted);
        source_model_free(&m);
    }
}

TEST(released_then_metrics_then_architecture) {
    const char *const good = ENTRY("\"tiny\"", "\"Release\"", "good", "17", METRICS("0.9", "40"));
    expect_choice(good, ENTRY("\"base\"", "\"Nightly\"", "nightly", "60", METRICS("0.95", "50")), 0, "good");
    expect_choice(good, ENTRY("\"base\"", "null", "null", "60", METRICS("0.95", "50")), 0, "good");
    expect_choice(good, ENTRY("\"base\"", "\"Release Desktop\"", "desktop", "60", METRICS("0.95", "30")), 0, "desktop");
    expect_choice(good, ENTRY("\"base\"", "\"Release\"", "worse", "60", METRICS("0.85", "50")), 0, "good");
    expect_choice(good, ENTRY("\"base-memory\"", "\"Release\"", "bleu", "60", METRICS("null", "50")), 0, "bleu");
    expect_choice(good, ENTRY("\"base-memory\"", "\"Release\"", "none", "60", "null"), 0, "none");
    expect_choice(good, ENTRY("\"base-memory\"", "\"Release\"", "big", "60", METRICS("0.95", "50")), 1, "good");
    expect_choice(good, ENTRY("\"tiny\"", "\"Release\"", "smaller", "16", METRICS("0.9", "40")), 0, "smaller");
    expect_choice(good, ENTRY("null", "\"Release\"", "b", "17", METRICS("0.9", "40")), 0, "good");
    expect_choice(good, ENTRY("\"tiny\"", "\"Release\"", "alike", "17", METRICS("0.9", "40")), 0, "alike");
}

TEST(an_entry_gives_files_with_sizes_and_hashes) {
    source_model m;
    moe_error e;
    int least;
    assert_int_equal(choose("[" ENTRY("\"tiny\"", "\"Release\"", "a", "17000000", METRICS("0.9", "40")) "]",
                            "https://base/", "https://index", 0, &m, &e),
                     MOE_OK);
    assert_int_equal(m.n, 2);
    assert_string_equal(m.files[0].name, "model.bin.gz");
    assert_string_equal(m.files[0].url, "https://base/models/a/model.bin.gz");
    assert_string_equal(m.files[0].sha256, HASH);
    assert_true(m.files[0].packed && m.files[0].unpacked == 17000000 && m.files[0].bytes == SOURCE_UNKNOWN);
    assert_string_equal(m.files[1].name, "vocab.spm.gz");
    assert_true(m.files[1].unpacked == SOURCE_UNKNOWN && !*m.files[1].sha256);
    assert_string_equal(m.licence, "MPL-2.0");
    assert_string_equal(m.variant, "tiny, Release");
    assert_true(m.comet == 0.9 && m.bleu == 40);
    assert_true(source_bytes(&m, &least) == 17000000 && least);
    source_model_free(&m);
}

TEST(two_vocabularies) {
    source_model m;
    moe_error e;
    assert_int_equal(
        choose("[{\"files\": {\"model\": {\"path\": \"m/model.bin\"}, \"srcVocab\": {\"path\": \"m/src.spm\"}, "
               "\"trgVocab\": {\"path\": \"m/trg.spm\"}, \"lexicalShortlist\": {\"path\": \"m/lex.bin\"}}}]",
               "http://base", "http://index", 0, &m, &e),
        MOE_OK);
    assert_int_equal(m.n, 4);
    assert_string_equal(m.files[2].name, "trg.spm");
    assert_false(m.files[0].packed);
    source_model_free(&m);
}

TEST(unsafe_entries_are_refused) {
    static const char *const entries[] = {
        "[]",
        "null",
        "{}",
        "[1, null, \"x\"]",
        "[{\"files\": null}]",
        "[{\"files\": {\"model\": {\"path\": \"m/model.bin\"}}}]",
        "[{\"files\": {\"model\": {\"path\": \"m/model.bin\"}, \"srcVocab\": {\"path\": \"m/s\"}}}]",
        "[{\"files\": {\"model\": {\"path\": \"../model.bin\"}, \"vocab\": {\"path\": \"m/v\"}}}]",
        "[{\"files\": {\"model\": {\"path\": \"m/../../model.bin\"}, \"vocab\": {\"path\": \"m/v\"}}}]",
        "[{\"files\": {\"model\": {\"path\": \"/model.bin\"}, \"vocab\": {\"path\": \"m/v\"}}}]",
        "[{\"files\": {\"model\": {\"path\": \"m/\"}, \"vocab\": {\"path\": \"m/v\"}}}]",
        "[{\"files\": {\"model\": {\"path\": \"m/a b?c\"}, \"vocab\": {\"path\": \"m/v\"}}}]",
        "[{\"files\": {\"model\": {\"path\": \"m/.profile\"}, \"vocab\": {\"path\": \"m/v\"}}}]",
        "[{\"files\": {\"model\": {\"path\": 5}, \"vocab\": {\"path\": \"m/v\"}}}]",
        "[{\"files\": {\"model\": {\"path\": \"m/same\"}, \"vocab\": {\"path\": \"n/SAME\"}}}]",
        "[{\"files\": {\"model\": {\"path\": \"m/a\", \"uncompressedHash\": \"12\"}, \"vocab\": {\"path\": \"m/v\"}}}]",
    };
    source_model m;
    moe_error e;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        assert_true(choose(entries[i], "http://base", "http://index", 0, &m, &e) >= MOE_ERROR_FORMAT);
    const char *const good = "[" ENTRY("\"tiny\"", "\"Release\"", "a", "17", "null") "]";
    assert_int_equal(choose(good, "http://base", "https://index", 0, &m, &e), MOE_ERROR_FORMAT); /* downgrade */
    assert_int_equal(choose(good, "file:///etc", "http://index", 0, &m, &e), MOE_ERROR_FORMAT);
    assert_int_equal(choose(good, "", "http://index", 0, &m, &e), MOE_ERROR_FORMAT);
}

TEST(too_many_values_are_refused) {
    const size_t n = 1 << 20;
    char *text = malloc(n + 1);
    memset(text, ',', n), text[n] = 0;
    for (size_t i = 0; i < n; i += 2) text[i] = '1';
    text[0] = '[', text[n - 1] = ']';
    assert_null(source_json(text, n));
    free(text);
    assert_null(source_json("", 0));
}

/* ---- 4. Repositories ----------------------------------------------------------------------------------- */

#define COMMIT "0123456789abcdef0123456789abcdef01234567"

static moe_status describe(const char *siblings, const char *word, source_model *m, moe_error *e) {
    source_name names[SOURCE_CANDIDATES];
    size_t n;
    char text[8192];
    snprintf(text, sizeof text, "{\"sha\": \"" COMMIT "\", \"tags\": [\"x\", \"license:mit\"], \"siblings\": [%s]}",
             siblings);
    cJSON *description = source_json(text, strlen(text));
    assert_non_null(description);
    assert_int_equal(source_parse(word, names, &n, NULL), MOE_OK);
    const moe_status status = source_from_hub(description, &names[0], m, e);
    cJSON_Delete(description);
    return status;
}

#define LFS(name, size)                                                                                          \
    "{\"rfilename\": \"" name "\", \"size\": " size ", \"lfs\": {\"sha256\": \"" HASH "\", \"size\": " size "}}"
#define PLAIN(name) "{\"rfilename\": \"" name "\", \"size\": 7}"

static int has(const source_model *m, const char *name) {
    for (size_t i = 0; i < m->n; i++)
        if (strcmp(m->files[i].name, name) == 0) return 1;
    return 0;
}

TEST(safetensors_rather_than_pickles) {
    source_model m;
    moe_error e;
    setenv("HF_ENDPOINT", "http://mirror:8000//", 1);
    assert_int_equal(describe(PLAIN("config.json") ", " PLAIN(".gitattributes") ", " PLAIN("README.md") ", " LFS(
                                  "model.safetensors",
                                  "100") ", " LFS("pytorch_model.bin",
                                                  "100") ", " LFS("onnx/model.onnx",
                                                                  "9") ", " LFS("tf_model.h5",
                                                                                "9") ", " PLAIN("tokenizer.json"),
                              "owner/name", &m, &e),
                     MOE_OK);
    assert_int_equal(m.n, 4);
    assert_true(has(&m, "config.json") && has(&m, "model.safetensors") && has(&m, "tokenizer.json") && m.has_card);
    assert_string_equal(m.files[2].url, "http://mirror:8000/owner/name/resolve/" COMMIT "/model.safetensors");
    assert_string_equal(m.files[2].sha256, HASH);
    assert_true(m.files[2].bytes == 100 && !m.files[2].packed);
    assert_string_equal(m.licence, "mit");
    source_model_free(&m);
    assert_int_equal(describe(PLAIN("config.json") ", " LFS("pytorch_model.bin", "100"), "owner/name", &m, &e), MOE_OK);
    assert_true(has(&m, "pytorch_model.bin"));
    source_model_free(&m);
    unsetenv("HF_ENDPOINT");
}

TEST(shards_must_be_complete) {
    source_model m;
    moe_error e;
    const char *const one = PLAIN("config.json") ", " PLAIN("model.safetensors.index.json") ", " LFS(
                          "model-00001-of-00002.safetensors", "100"),
                      *const two = ", " LFS("model-00002-of-00002.safetensors", "50");
    char both[2048];
    int least;
    assert_int_equal(describe(one, "owner/name", &m, &e), MOE_ERROR_FORMAT);
    snprintf(both, sizeof both, "%s%s", one, two);
    assert_int_equal(describe(both, "owner/name", &m, &e), MOE_OK);
    assert_true(source_bytes(&m, &least) == 164 && !least);
    source_model_free(&m);
}

TEST(all_parts_of_a_gguf_are_fetched) {
    source_model m;
    moe_error e;
    const char *const parts = LFS("best-of-q4-00001-of-00003.gguf",
                                  "10") ", " LFS("best-of-q4-00002-of-00003.gguf",
                                                 "20") ", " LFS("best-of-q8-00001-of-00003.gguf",
                                                                "40") ", " LFS("best-of-q4-00001-of-00002.gguf", "80");
    char all[2048];
    int least;
    const char *const word = "owner/name/best-of-q4-00001-of-00003.gguf";
    assert_int_equal(describe(parts, word, &m, &e), MOE_ERROR_FORMAT);
    snprintf(all, sizeof all, "%s, %s", parts, LFS("best-of-q4-00003-of-00003.gguf", "5"));
    assert_int_equal(describe(all, word, &m, &e), MOE_OK);
    assert_true(m.n == 3 && source_bytes(&m, &least) == 35);
    source_model_free(&m);
    assert_int_equal(describe(LFS("a.gguf", "1"), "owner/name/a.gguf", &m, &e), MOE_OK);
    source_model_free(&m);
}

static void shows(const char *url, const char *shown) {
    char *out = source_shown_url(url);
    assert_string_equal(out, shown);
    free(out);
}

TEST(passwords_are_not_shown) {
    source_name name = { .repository = "owner/name" };
    shows("https://me:secret@mirror.example/x@y?a=b@c", "https://mirror.example/x@y?a=b@c");
    shows("http://a@b:c@d:8000", "http://d:8000");
    shows("https://huggingface.co", "https://huggingface.co");
    shows("me:secret@host/x", "host/x");
    shows("", "");
    char endpoint[700];
    snprintf(endpoint, sizeof endpoint, "https://me:secret@host/%0600d/\n", 0); /* is not cut off */
    setenv("HF_ENDPOINT", endpoint, 1);
    char *page = source_page_url(&name), *url = source_hub_url(&name);
    assert_true(!strstr(page, "secret") && strlen(page) == strlen("https://host/") + 600 + strlen("/owner/name"));
    assert_non_null(strstr(url, "0/api/models/owner/name/revision/"));
    free(page), free(url);
    unsetenv("HF_ENDPOINT");
}

TEST(unusable_repositories_are_refused) {
    source_model m;
    moe_error e;
    assert_int_equal(describe("", "owner/name", &m, &e), MOE_ERROR_UNSUPPORTED);
    assert_int_equal(describe(LFS("model.safetensors", "1"), "owner/name", &m, &e), MOE_ERROR_UNSUPPORTED);
    assert_int_equal(describe(LFS("a.gguf", "1"), "owner/name", &m, &e), MOE_ERROR_UNSUPPORTED);
    assert_non_null(strstr(e.message, "moe-get owner/name/a.gguf"));
    assert_int_equal(describe(LFS("a.gguf", "1"), "owner/name/a.gguf", &m, &e), MOE_OK);
    assert_int_equal(m.n, 1);
    source_model_free(&m);
    assert_int_equal(describe(LFS("a.gguf", "1"), "owner/name/b.gguf", &m, &e), MOE_ERROR_ARGUMENT);
    assert_int_equal(describe(PLAIN("config.json") ", {\"rfilename\": \"model.safetensors\", \"size\": null}",
                              "owner/name", &m, &e),
                     MOE_ERROR_FORMAT);
    assert_int_equal(describe(PLAIN("config.json") ", {\"rfilename\": \"model.safetensors\", \"size\": 1, \"lfs\": "
                                                   "{\"sha256\": \"xyz\", \"size\": 1}}",
                              "owner/name", &m, &e),
                     MOE_ERROR_FORMAT);
    assert_int_equal(describe(PLAIN("config.json") ", " LFS("model.safetensors", "-5"), "owner/name", &m, &e),
                     MOE_ERROR_FORMAT);
    assert_int_equal(describe(PLAIN("config.json") ", " LFS("model.safetensors", "1e30"), "owner/name", &m, &e),
                     MOE_ERROR_FORMAT);
    assert_int_equal(describe(PLAIN("config.json") ", " PLAIN("..\\\\x.spm") ", " LFS("model.safetensors", "5"),
                              "owner/name", &m, &e),
                     MOE_ERROR_FORMAT);
    assert_int_equal(describe(PLAIN("config.json") ", " PLAIN("../x.spm") ", " LFS("model.safetensors", "5"),
                              "owner/name", &m, &e),
                     MOE_OK); /* files in folders are not needed */
    assert_int_equal(m.n, 2);
    source_model_free(&m);
}

TEST(licences) {
    static const struct {
        const char *card, *licence;
    } cases[] = {
        { "---\nlanguage: en\nlicense: cc-by-nc-4.0\n---\ntext", "cc-by-nc-4.0" },
        { "---\r\nlicense: \"apache-2.0\"\r\n---\r\n", "apache-2.0" },
        { "---\n---\nlicense: mit\n", "" },
        { "license: mit\n", "" },
        { "", "" },
        { "---", "" },
        { "---\nlicense:", "" },
        { "---\nlicense: \x1b[31mred\n---\n", "" },
    };
    char out[64];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        source_card_licence(cases[i].card, strlen(cases[i].card), out);
        assert_string_equal(out, cases[i].licence);
    }
    assert_true(source_is_restricted("cc-by-nc-4.0") && source_is_restricted("CC-BY-NC-SA-4.0"));
    assert_false(source_is_restricted("apache-2.0") || source_is_restricted("MPL-2.0") || source_is_restricted(""));
}

/* ---- 5. The store -------------------------------------------------------------------------------------- */

static void write_file(const char *in, const char *name, const char *text) {
    char path[STORE_PATH + 300];
    snprintf(path, sizeof path, "%s/%s", in, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static int exists(const char *in, const char *name) {
    char path[STORE_PATH + 300];
    snprintf(path, sizeof path, "%s/%s", in, name);
    return access(path, F_OK) == 0;
}

TEST(a_record_makes_a_model_complete) {
    char at[STORE_PATH], converted[STORE_PATH], names[1][SOURCE_NAME] = { "config.json" },
                                                hashes[1][SHA256_TEXT] = { HASH };
    source_model m = { .comet = 0.5, .bleu = -1, .n = 1, .licence = "mit" };
    store_model there, *list;
    size_t n;
    int left;
    moe_error e;
    snprintf(m.name.id, sizeof m.name.id, "owner/name");
    assert_int_equal(store_folder("owner/name", at, &e), MOE_OK);
    assert_int_equal(store_converted("owner/name", converted, &e), MOE_OK);
    assert_int_equal(store_make_folder(at, &e), MOE_OK);
    write_file(at, "config.json", "{}");
    write_file(at, "mine.txt", "mine");
    store_read(at, "owner/name", &there);
    assert_false(there.complete);
    assert_int_equal(store_record(at, &m, "https://x", names, hashes, &e), MOE_OK);
    store_read(at, "owner/name", &there);
    assert_true(there.complete && there.comet == 0.5 && there.bleu < 0);
    assert_int_equal(store_list(&list, &n, &e), MOE_OK);
    assert_int_equal(n, 1);
    assert_string_equal(list[0].id, "owner/name");
    free(list);
    write_file(at, "config.json", "{ }"); /* another size */
    store_read(at, "owner/name", &there);
    assert_false(there.complete);
    write_file(at, "moe-get.json", "{\"files\": [{\"name\": \"../../x\", \"bytes\": 0}]}");
    store_read(at, "owner/name", &there);
    assert_false(there.complete);
    assert_int_equal(store_make_parent(converted, &e), MOE_OK);
    *strrchr(converted, '/') = 0;
    write_file(converted, "name.bin", "x");
    assert_int_equal(store_record(at, &m, "https://x", names, hashes, &e), MOE_OK);
    assert_false(exists(converted, "name.bin")); /* a conversion of the earlier version */
    assert_int_equal(store_make_folder(converted, &e), MOE_OK);
    write_file(converted, "name.bin", "x");
    assert_int_equal(store_remove("owner/name", NULL, NULL, &left, &e), MOE_OK);
    assert_true(left && exists(at, "mine.txt") && !exists(at, "config.json") && !exists(at, "moe-get.json"));
    assert_false(exists(converted, "name.bin"));
    assert_int_equal(store_remove("owner/name", NULL, NULL, &left, &e), MOE_OK);
    assert_true(left && exists(at, "mine.txt"));
}

TEST(only_planned_files_are_removed) {
    char at[STORE_PATH], names[4][24] = { "model.bin.gz", "model.bin", "b.spm.gz.etag", "b.spm.gz.partial" };
    source_file files[] = { { .name = "model.bin.gz" }, { .name = "b.spm.gz" } };
    source_model m = { .n = 2, .files = files };
    int lock, left;
    moe_error e;
    assert_int_equal(store_folder("owner/planned", at, &e), MOE_OK);
    assert_int_equal(store_lock(at, NULL, NULL, &lock, &e), MOE_OK);
    assert_int_equal(store_plan(at, &m, &e), MOE_OK);
    store_unlock(at, lock); /* nothing was fetched */
    assert_false(exists(at, ""));
    assert_int_equal(store_lock(at, NULL, NULL, &lock, &e), MOE_OK);
    assert_int_equal(store_plan(at, &m, &e), MOE_OK);
    for (size_t i = 0; i < 4; i++) write_file(at, names[i], "x");
    write_file(at, "thesis.partial", "mine");
    store_unlock(at, lock);
    m.n = 1; /* another version does not have b.spm.gz */
    assert_int_equal(store_plan(at, &m, &e), MOE_OK);
    for (size_t i = 0; i < 4; i++) assert_int_equal(exists(at, names[i]), i < 2);
    assert_int_equal(store_remove("owner/planned", NULL, NULL, &left, &e), MOE_OK);
    assert_true(left && exists(at, "thesis.partial") && !exists(at, "model.bin.gz") && !exists(at, ".plan"));
    unlink(strcat(at, "/thesis.partial"));
}

TEST(only_one_process_has_the_lock) {
    char at[STORE_PATH];
    int lock, first, status;
    const volatile sig_atomic_t stop = 1;
    moe_error e;
    assert_int_equal(store_folder("owner/locked", at, &e), MOE_OK);
    assert_int_equal(store_lock(at, NULL, NULL, &first, &e), MOE_OK);
    const pid_t child = fork();
    if (!child) _exit(store_lock(at, &stop, NULL, &lock, &e) == MOE_ERROR_CANCELLED ? 0 : 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    store_unlock(at, first);
    assert_false(exists(at, ".lock"));
    assert_int_equal(store_lock(at, NULL, NULL, &first, &e), MOE_OK);
    store_unlock(at, first);
}

TEST(folders_come_from_the_environment) {
    char out[STORE_PATH];
    moe_error e;
    unsetenv("XDG_DATA_HOME");
    setenv("HOME", "/home/x", 1);
    assert_int_equal(store_data(out, &e), MOE_OK);
    assert_string_equal(out, "/home/x/.local/share/moe");
    setenv("XDG_DATA_HOME", "relative", 1);
    assert_int_equal(store_data(out, &e), MOE_OK);
    assert_string_equal(out, "/home/x/.local/share/moe");
    setenv("HOME", "", 1);
    assert_int_equal(store_data(out, &e), MOE_ERROR_IO);
}

FIXTURE(begin) {
    char path[256];
    if (!mkdtemp(folder)) return 1;
    snprintf(path, sizeof path, "%s/data", folder), setenv("XDG_DATA_HOME", path, 1);
    snprintf(path, sizeof path, "%s/cache", folder), setenv("XDG_CACHE_HOME", path, 1);
    return 0;
}

FIXTURE(end) {
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

int main(void) { return run_all_tests(begin, end); }
