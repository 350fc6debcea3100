/* test_moetext.c - tests libmoetext through its public header, with the shipped model.
 *
 *   1. Options      names, values, errors
 *   2. Models       metadata, tokens, rejected files, folders
 *   3. Texts        lines, sentences, capitals, invalid UTF-8
 *   4. Results      hypotheses, scores, prefixes, links
 *   5. Rows         many texts in one call
 *   6. Stopping     cancelling from a thread and from callbacks
 *   7. Turns        interleaved texts; dropped texts
 *   8. Processes    threads and forks
 */
#define _POSIX_C_SOURCE 200809L

#include "tools/text/moetext.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/test.h"

#define FAST "beam=2;rerank=0;threads=2"

static moetext_model *model;

FIXTURE(open_model) {
    moe_error e;
    if (!moetext_model_open("models/en-de-fr-es.bin", NULL, &model, &e)) return 0;
    fprintf(stderr, "%s\n", e.message);
    return -1;
}

FIXTURE(close_model) {
    moetext_model_close(model);
    return 0;
}

static moetext *translator(const char *options) {
    moetext *t = NULL;
    moe_error e = { .code = MOE_OK };
    if (moetext_new(model, options, &t, &e)) fail_msg("%s: %s", options, e.message);
    return t;
}

/* The reported experts of a text. */
typedef struct routes {
    size_t n, decoder, written;
    double weights;   /* sum of all weights */
    int32_t ids[256]; /* [written] tokens that the decoder generated, by position */
} routes;

/* The result of a text. */
typedef struct outcome {
    size_t times, n, parts, n_ids, n_links, n_source_ids;
    moe_status status;
    unsigned flags;
    char message[256], texts[4][512];
    float score[4], logprob[4];
    float sum; /* sum of the best hypothesis's token_logprobs */
    int32_t ids[256];
    moetext_link links[256];
    routes routes;
} outcome;

typedef struct feed {
    const moetext_request *requests;
    size_t n, next;
    outcome *outcomes;
    moetext *cancel;    /* translator to cancel after the first result; may be NULL */
    char copy[1 << 16]; /* copy of the text; the next pull overwrites it */
} feed;

static int pull(void *user, int wait, moetext_request *request) {
    feed *f = user;
    (void)wait;
    memset(f->copy, 0xff, sizeof f->copy);
    if (f->next == f->n) return MOE_PULL_END;
    *request = f->requests[f->next];
    if (request->length && request->length <= sizeof f->copy)
        request->text = memcpy(f->copy, request->text, request->length);
    request->user = &f->outcomes[f->next++];
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moetext_result *r) {
    feed *f = user;
    outcome *h = r->user;
    h->times++;
    h->status = r->status;
    h->flags = r->flags;
    h->parts = r->n_parts;
    h->n = r->n_hypotheses;
    h->n_source_ids = r->n_source_ids;
    snprintf(h->message, sizeof h->message, "%s", r->message);
    for (size_t k = 0; k < r->n_hypotheses && k < 4; k++) {
        const moetext_hypothesis *from = &r->hypotheses[k];
        assert_int_equal(from->text[from->length], 0);
        assert_int_equal(strlen(from->text), from->length);
        snprintf(h->texts[k], sizeof h->texts[k], "%s", from->text);
        h->score[k] = from->score;
        h->logprob[k] = from->logprob;
    }
    if (r->n_hypotheses) {
        const moetext_hypothesis *best = &r->hypotheses[0];
        h->n_ids = best->n_ids;
        h->n_links = best->n_links;
        h->sum = 0;
        for (size_t i = 0; i < best->n_logprobs; i++) h->sum += best->token_logprobs[i];
        for (size_t i = 0; i < best->n_ids && i < 256; i++) h->ids[i] = best->ids[i];
        for (size_t i = 0; i < best->n_links && i < 256; i++) h->links[i] = best->links[i];
    }
    if (f->cancel) moetext_cancel(f->cancel);
}

static moe_status run(moetext *t, const moetext_request *requests, size_t n, outcome *out) {
    static feed f;
    f = (feed){ .requests = requests, .n = n, .outcomes = out };
    memset(out, 0, n * sizeof *out);
    return moetext_translate(t, pull, done, &f, NULL);
}

static moetext_request text_of(const char *text) { return (moetext_request){ .text = text, .length = strlen(text) }; }

static outcome run_request(moetext *t, moetext_request q) {
    outcome h;
    assert_int_equal(run(t, &q, 1, &h), MOE_OK);
    assert_int_equal(h.times, 1);
    return h;
}

static outcome run_one(moetext *t, const char *text) { return run_request(t, text_of(text)); }

/* ==== 1. Options ======================================================================================== */

TEST(options_are_listed_once) {
    size_t n = 0;
    for (moetext_option_info o; (o = moetext_option(n)).name; n++) {
        assert_true(*o.values && *o.help && strlen(o.help) < 100 && !strchr(o.help, '\n'));
        for (size_t i = 0; i < n; i++) assert_string_not_equal(moetext_option(i).name, o.name);
    }
    assert_true(n > 20);
    assert_null(moetext_option(SIZE_MAX).name);
}

TEST(every_engine_parameter_is_an_option) {
    size_t found = 0, n = 0;
    for (const moe_param *p; (p = moe_param_at(n)); n++)
        for (size_t i = 0; moetext_option(i).name; i++)
            found += strcmp(moetext_option(i).name, p->option) == 0 && strcmp(moetext_option(i).values, p->values) == 0;
    assert_true(n > 8);
    assert_int_equal(found, n);
}

TEST(invalid_options_are_named) {
    static const char *const bad[][2] = {
        { "bem=3", "bem" },
        { "beam=0", "beam" },
        { "beam=65", "beam" },
        { "beam=", "beam" },
        { "beam=4x", "beam" },
        { "beam", "beam" },
        { "rerank=-1", "rerank" },
        { "rerank=nan", "rerank" },
        { "share=1.5", "share" },
        { "form=words", "form" },
        { "form=1", "form" },
        { "preset=best", "preset" },
        { "min-target=-1", "min-target" },
        { "max_len_factor=x", "max-len-factor" },
        { "min_target=2;min-target=2", "min-target" },
        { "gating=none", "gating" },
        { "target=xx", "target" },
        { "source=", "source" },
        { "beam=4;beam=5", "beam" },
        { "max_len=4;max-len=4", "max-len" },
        { "nbest=5;beam=4", "nbest" },
        { "isa=z80", "isa" },
        { "verify=2", "verify" },
        { "=4", "" },
        { "form=ids", "form" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        moetext *t = NULL;
        moe_error e = { .code = MOE_OK };
        const moe_status status = moetext_new(model, bad[i][0], &t, &e);
        if (status != MOE_ERROR_ARGUMENT && strcmp(bad[i][1], "isa") != 0) fail_msg("%s: %s", bad[i][0], e.message);
        assert_int_equal(status, e.code);
        assert_string_equal(e.where, bad[i][1]);
        assert_true(*e.message && !strchr(e.message, '\n'));
        assert_null(t);
        assert_int_equal(moetext_new(model, bad[i][0], &t, NULL), status);
    }
}

TEST(option_strings_are_parsed_leniently) {
    moetext *a = translator(" target = de ;; beam=2 ; rerank=0;threads=1;copy=1;max_len=40; "),
            *b = translator("threads=1;target=de;beam=2;rerank=0;max-len=40");
    assert_string_equal(run_one(a, "Good morning!").texts[0], run_one(b, "Good morning!").texts[0]);
    moetext_free(a);
    moetext_free(b);
}

/* ==== 2. Models ========================================================================================= */

TEST(a_model_reports_its_languages_and_metadata) {
    size_t length;
    assert_int_equal(moetext_model_language_count(model), 4);
    assert_string_equal(moetext_model_language(model, 1), "de");
    assert_null(moetext_model_language(model, 4));
    assert_int_equal(moetext_model_language_find(model, "de"), 1);
    assert_int_equal(moetext_model_language_find(model, "DE"), 1);
    assert_int_equal(moetext_model_language_find(model, "de_DE"), 1);
    assert_int_equal(moetext_model_language_find(model, "deu_Latn"), 1);
    assert_int_equal(moetext_model_language_find(model, "xx"), -1);
    assert_int_equal(moetext_model_needs_source(model), 0);
    assert_true(strlen(moetext_model_meta(model, "general.name")) > 0);
    assert_true(strstr(moetext_model_meta(model, "general.licence"), "CC") != NULL);
    assert_string_equal(moetext_model_meta(model, "no.such.key"), "");
    assert_string_equal(moetext_model_meta(model, "decode.beam"), ""); /* the value is a number, not a string */
    assert_int_equal(moe_model_kind(moetext_model_engine(model)), MOE_MODEL_TRANSLATION);
    assert_memory_equal(moetext_model_piece(model, 1964, &length),
                        "\xE2\x96\x81"
                        "G",
                        4);
    assert_true(length >= 4);
    moetext_model_piece(model, -1, &length);
    assert_int_equal(length, 0);
    assert_string_equal(moetext_version(), MOE_VERSION);
    assert_true(*moetext_tokeniser_version());
}

TEST(texts_are_encoded_and_decoded) {
    static const char text[] = "Good morning, my friend.";
    int32_t ids[64];
    char back[64];
    size_t n = 0, length = 0;
    moe_error e;
    assert_int_equal(moetext_model_encode(model, text, sizeof text - 1, 0, ids, 2, &n, &e), MOE_OK);
    assert_int_equal(n, 7);
    assert_int_equal(moetext_model_encode(model, text, sizeof text - 1, 1, ids, 64, &n, &e), MOE_OK);
    static const int32_t wanted[] = { 1964, 1587, 3734, 266, 576, 3042, 264 };
    assert_int_equal(n, 7);
    assert_memory_equal(ids, wanted, sizeof wanted);
    assert_int_equal(moetext_model_decode(model, ids, n, NULL, 0, &length, &e), MOE_OK);
    assert_int_equal(length, sizeof text - 1);
    memset(back, 'x', sizeof back);
    assert_int_equal(moetext_model_decode(model, ids, n, back, 4, &length, &e), MOE_OK);
    assert_memory_equal(back, "Goodx", 5);
    assert_int_equal(moetext_model_decode(model, ids, n, back, sizeof back, &length, &e), MOE_OK);
    assert_memory_equal(back, text, length);
    assert_int_equal(moetext_model_encode(model, "", 0, 0, NULL, 0, &n, &e), MOE_OK);
    assert_int_equal(n, 0);
    assert_int_equal(moetext_model_decode(model, NULL, 0, NULL, 0, &length, &e), MOE_OK);
    assert_int_equal(length, 0);
    assert_int_equal(moetext_model_encode(model, "a\0b", 3, 0, ids, 64, &n, &e), MOE_ERROR_ARGUMENT);
    assert_int_equal(moetext_model_encode(model, "a\xFF", 2, 0, ids, 64, &n, &e), MOE_ERROR_ARGUMENT);
    assert_int_equal(moetext_model_encode(model, text, 4, 0, NULL, 0, &n, NULL), MOE_OK);
    ids[1] = 1 << 20;
    assert_int_equal(moetext_model_decode(model, ids, 7, back, 64, &length, &e), MOE_ERROR_ARGUMENT);
    ids[1] = -1;
    assert_int_equal(moetext_model_decode(model, ids, 7, back, 64, &length, NULL), MOE_ERROR_ARGUMENT);

    moetext_model *other = NULL;
    assert_int_equal(moetext_model_open("models/en-de-fr-es.bin", "form=pieces", &other, &e), MOE_OK);
    assert_int_equal(moetext_model_encode(other, "\xE2\x96\x81Go ,", 7, 0, ids, 64, &n, &e), MOE_OK);
    assert_int_equal(n, 2);
    assert_int_equal(ids[0], 1964);
    assert_int_equal(moetext_model_decode(other, ids, n, back, 64, &length, &e), MOE_OK);
    assert_int_equal(length, 7);
    assert_memory_equal(back, "\xE2\x96\x81Go ,", 7);
    assert_memory_equal(moetext_model_source_piece(other, 266, &length), ",", 1);
    assert_int_equal(length, 1);
    moetext_model_close(other);
    assert_int_equal(moetext_model_open("models/en-de-fr-es.bin", "form=ids", &other, &e), MOE_OK);
    assert_int_equal(moetext_model_encode(other, " 12  7 350", 10, 0, ids, 64, &n, &e), MOE_OK);
    assert_int_equal(n, 3);
    assert_int_equal(moetext_model_decode(other, ids, n, back, 64, &length, &e), MOE_OK);
    assert_int_equal(length, 8);
    assert_memory_equal(back, "12 7 350", 8);
    moetext_model_close(other);
}

TEST(unsupported_models_are_refused) {
    static const struct {
        const char *path, *options, *message;
        moe_status status;
    } cases[] = { { "models/lm-en.bin", NULL, "", MOE_ERROR_UNSUPPORTED },
                  { "models/digits.bin", NULL, "", MOE_ERROR_UNSUPPORTED },
                  { "tests/golden/model-base.bin", NULL, "form=ids", MOE_ERROR_UNSUPPORTED },
                  { "no/such/file", NULL, "", MOE_ERROR_IO },
                  { "Makefile", NULL, "", MOE_ERROR_FORMAT },
                  { "models/en-de-fr-es.bin", "beam=x", "", MOE_ERROR_ARGUMENT } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moetext_model *m = NULL;
        moe_error e;
        assert_int_equal(moetext_model_open(cases[i].path, cases[i].options, &m, &e), cases[i].status);
        if (!strstr(e.message, cases[i].message)) fail_msg("%s: %s", cases[i].path, e.message);
        assert_null(m);
    }
    moetext_model_close(NULL);
    moetext_free(NULL);
}

static void write_begun(const char *path, const char *begin, size_t size, const char *data) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(begin, 1, size, file), size);
    assert_true(fputs(data, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void write_file(const char *path, const char *data) { write_begun(path, "", 0, data); }

/* The header of a GGUF file with an architecture of 5 letters, and a Git LFS pointer. */
#define GGUF_OF(name)       \
    "GGUF\3\0\0\0"          \
    "0000000011111111"      \
    "\24\0\0\0\0\0\0\0"     \
    "general.architecture"  \
    "\10\0\0\0"             \
    "\5\0\0\0\0\0\0\0" name
#define POINTER "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"

static moe_error refused(const char *path, int several) {
    moetext_model *m = NULL;
    moe_error e = { .code = MOE_OK };
    const char *const paths[] = { path };
    const moe_status status =
        several ? moetext_models_open(paths, 1, NULL, &m, &e) : moetext_model_open(path, NULL, &m, &e);
    assert_true(status && status == e.code);
    assert_null(m);
    return e;
}

TEST(files_of_other_programs_get_a_conversion_command) {
    char folder[] = "/tmp/moetext-XXXXXX", path[300], wanted[512];
    assert_non_null(mkdtemp(folder));
    /* file, layout, options, then the problems that C's converter finds in the folder and in the file; NULL if it does
     * not read them, so that the message contains the command */
    static const char *const names[][5] = {
        { "model.npz", "marian", " --type q8", "found 0 vocabularies", "found 0 vocabularies" },
        { "model.intgemm8.bin", "marian", " --type q8", "found 0 vocabularies", "found 0 vocabularies" },
        { "x-Q8_0.gguf", "gguf", "", " keys: damaged", " keys: damaged" },
        { "lex.50.50.ende.s2t.bin", "marian", " --type q8", "contains no Marian model", NULL },
        { "model.safetensors", "hf", " --type q8 --experts q4", NULL, NULL },
        { "pytorch_model.bin", "hf", " --type q8 --experts q4", NULL, NULL }
    };
    static const char *const begins[] = { "PK\3\4", "\1\0\0\0\0\0\0", GGUF_OF("llama"), "", "", "" };
    static const size_t begin_sizes[] = { 4, 8, sizeof GGUF_OF("llama") - 1, 0, 0, 0 };
    char config[300];
    snprintf(config, sizeof config, "%s/config.json", folder);
    assert_null(strstr(refused(folder, 0).message, "convert"));
    assert_null(strstr(refused(folder, 1).message, "convert"));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i][0]);
        assert_null(strstr(refused(path, 0).message, "convert")); /* no such file */
        write_begun(path, begins[i], begin_sizes[i],
                    "a model of another program, which is longer than the header of one of this engine's would be");
        if (strcmp(names[i][1], "hf") == 0)
            write_file(config, "{\"a\": {\"model_type\": 1}, \"model_type\": \"marian\"}");
        const char *of_folder = strcmp(names[i][1], "gguf") == 0 ? path : folder;
        snprintf(wanted, sizeof wanted, "; convert it first: tools/convert/convert.py --from %s %s", names[i][1],
                 of_folder);
        for (int several = 0; several < 2; several++) /* the message names the folder or a file in it */
            assert_non_null(strstr(refused(folder, several).message, names[i][3] ? names[i][3] : wanted));
        snprintf(wanted + strlen(wanted), sizeof wanted - strlen(wanted), " -o model.bin%s", names[i][2]);
        if (!names[i][3]) assert_string_equal(strchr(refused(folder, 0).message, ';'), wanted);
        snprintf(wanted, sizeof wanted,
                 "offset 0: not a moe model file: it does not start with MOEMODEL; convert it first: "
                 "tools/convert/convert.py --from %s %s -o model.bin%s",
                 names[i][1], i < 3 ? path : folder, names[i][2]);
        if (!strstr(refused(path, 1).message, names[i][4] ? names[i][4] : wanted))
            fail_msg("%s", refused(path, 1).message);
        assert_non_null(strstr(refused(path, 0).message, names[i][4] ? names[i][4] : strchr(wanted, ';')));
        unlink(path);
    }
    char inner[400], inner_config[400];
    snprintf(path, sizeof path, "%s/%0140d", folder, 0); /* a path too long for the message */
    snprintf(inner, sizeof inner, "%s/pytorch_model.bin", path);
    snprintf(inner_config, sizeof inner_config, "%s/config.json", path);
    assert_int_equal(mkdir(path, 0700), 0);
    write_file(inner, "x"), write_file(inner_config, "{\"model_type\": \"marian\"}");
    assert_non_null(strstr(refused(inner, 0).message, "--from hf PATH -o model.bin --type q8"));
    unlink(inner), unlink(inner_config), rmdir(path);
    static const char *const decoder[] = { "chat_template.jinja", "model.safetensors" };
    for (int i = 0; i < 2; i++) snprintf(path, sizeof path, "%s/%s", folder, decoder[i]), write_file(path, "x");
    snprintf(wanted, sizeof wanted, "; convert it first: tools/convert/convert.py --from hf %s -o model.bin", folder);
    assert_string_equal(strchr(refused(folder, 0).message, ';'), wanted);
    for (int i = 0; i < 2; i++) snprintf(path, sizeof path, "%s/%s", folder, decoder[i]), unlink(path);
    unlink(config);
    rmdir(folder);
}

TEST(files_that_cannot_be_converted_are_reported_instead) {
    static const struct {
        const char *name, *text, *config, *wanted;
        size_t size;
    } cases[] = {
        { "model.safetensors", "x", "{\"model_type\": \"bert\"}",
          "truncated; the converter does not support its model_type bert", 1 },
        { "model.safetensors", "x", "{\"text_config\": {\"model_type\": \"llama\"}}", "without model_type in config",
          1 },
        { "model.safetensors", "x", "{\"model_type\": 3, \"x\": \"llama\"}", "without model_type in config.json", 1 },
        { "pytorch_model.bin", "x", NULL, "without model_type in config.json", 1 },
        { "pytorch_model.bin", POINTER, "{\"model_type\": \"marian\"}", "Git LFS pointer", sizeof POINTER - 1 },
        { "model.bin", POINTER, NULL, "Git LFS pointer", sizeof POINTER - 1 },
        { "x.gguf", "<page>", NULL, "not a valid .gguf file", 6 },
        { "x.gguf", "<html>", NULL, "a web page, not the file itself", 6 },
        { "x.gguf.part", "GGUF", NULL, "an unfinished download", 4 },
        { "x.gguf", "GGUF\3", NULL, "file ends within the version", 5 },
        { "x.gguf", GGUF_OF("gemma"), NULL, " keys: damaged", sizeof GGUF_OF("gemma") - 1 },
        { "x.npz", "text", NULL, "found 0 vocabularies", 4 }
    };
    char folder[] = "/tmp/moetext-XXXXXX", path[300], config[300];
    assert_non_null(mkdtemp(folder));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, cases[i].name);
        snprintf(config, sizeof config, "%s/config.json", folder);
        write_begun(path, cases[i].text, cases[i].size, "");
        if (cases[i].config) write_file(config, cases[i].config);
        const moe_error e = refused(path, 1);
        if (!strstr(e.message, cases[i].wanted) || strstr(e.message, "convert.py")) fail_msg("%zu: %s", i, e.message);
        unlink(path), unlink(config);
    }
    rmdir(folder);
}

static int read_bytes(void *user, void *out, size_t bytes, uint64_t offset) {
    memcpy(out, (const char *)user + offset, bytes);
    return 0;
}

/* A model opened from memory at any address, a descriptor, part of a file or a callback translates identically. */
TEST(models_open_without_a_path_of_their_own) {
    enum { AT = 3 * 64 };
    FILE *file = fopen("models/en-de-fr-es.bin", "rb"), *archive = tmpfile();
    assert_true(file && archive && !fseek(file, 0, SEEK_END));
    const size_t bytes = (size_t)ftell(file);
    char *all = malloc(bytes + AT);
    assert_non_null(all);
    rewind(file);
    assert_int_equal(fread(all + AT, 1, bytes, file), bytes);
    memset(all, 1, AT);
    assert_int_equal(fwrite(all, 1, bytes + AT, archive), bytes + AT);
    assert_int_equal(fflush(archive), 0);
    const struct {
        moe_source source;
        const char *options, *says; /* says: part of the error message */
    } cases[] = {
        { { .name = "asset", .data = all + 1, .offset = AT - 1, .bytes = bytes }, "copy=1", NULL },
        { { .name = "asset", .data = all + 1, .offset = AT, .bytes = bytes }, "", "asset: the model must be aligned" },
        { { .fd = fileno(file) }, "", NULL },
        { { .fd = fileno(archive), .offset = AT, .bytes = bytes }, "", NULL },
        { { .fd = fileno(archive), .offset = AT }, "expert-memory=64M", NULL },
        { { .name = "asset", .read = read_bytes, .user = all, .offset = AT, .bytes = bytes }, "", NULL },
        { { .name = "a.zip, m.bin", .fd = fileno(archive), .bytes = bytes }, "", "a.zip, m.bin: not a moe model file" },
        { { .path = "models/lm-en.bin" }, "", "models/lm-en.bin: not a translation model" },
        { { .name = "base", .path = "tests/golden/model-base.bin" }, "", "base: this model has no tokeniser" }
    };
    moetext *t = translator("target=de;" FAST);
    const outcome wanted = run_request(t, text_of("Where is my book?"));
    moetext_free(t);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moetext_model *m = NULL;
        moe_error e = { .code = MOE_OK };
        const moe_status status = moetext_model_open_source(&cases[i].source, cases[i].options, &m, &e);
        if (!status != !cases[i].says || (status && !strstr(e.message, cases[i].says)))
            fail_msg("%zu: %s", i, e.message);
        if (status) continue;
        char options[100];
        snprintf(options, sizeof options, "target=de;" FAST ";%s", *cases[i].options == 'e' ? cases[i].options : "");
        assert_int_equal(moetext_new(m, options, &t, NULL), MOE_OK);
        assert_string_equal(run_request(t, text_of("Where is my book?")).texts[0], wanted.texts[0]);
        moetext_free(t);
        moetext_model_close(m);
    }
    /* a program that was compiled with a later moe.h, and does not set the members that this library lacks */
    struct {
        moe_source known;
        char later[16];
    } newer = { .known = { .fd = fileno(file) } };
    for (int set = 0; set < 2; set++) {
        moetext_model *m = NULL;
        newer.later[9] = (char)set;
        const moe_status status = moetext_model_open_source_sized(&newer.known, sizeof newer, NULL, &m, NULL);
        assert_int_equal(status, set ? MOE_ERROR_ARGUMENT : MOE_OK);
        moetext_model_close(m);
    }
    fclose(file), fclose(archive), free(all);
}

TEST(a_model_without_a_tokeniser_takes_ids) {
    moetext_model *m;
    moetext *t;
    moetext_rows rows;
    static const char *const texts[] = { "5 6 7", "5 six" };
    assert_int_equal(moetext_model_open("tests/golden/model-base.bin", "form=ids", &m, NULL), MOE_OK);
    assert_int_equal(moetext_new(m, "form=ids;threads=1", &t, NULL), MOE_OK);
    assert_int_equal(moetext_translate_strings(t, texts, 2, NULL, moetext_model_language(m, 0), &rows, NULL), MOE_OK);
    assert_int_equal(rows.statuses[0], MOE_OK);
    assert_true(strspn(rows.strings[0], "0123456789 ") == strlen(rows.strings[0]) && *rows.strings[0]);
    assert_int_equal(rows.statuses[1], MOE_ERROR_ARGUMENT);
    moetext_free(t);
    moetext_model_close(m);
}

/* The folder models/ contains only one translation model. */
TEST(a_folder_of_models_is_one_model) {
    static const char *const folder[] = { "models" }, *const other[] = { "models/lm-en.bin" };
    static const char *const text[] = { "Where is my book?", "", "Good morning. It rains." };
    moetext_model *several = NULL;
    moetext *both = NULL;
    moetext_rows rows, alone;
    moe_error e;
    size_t length = 7;
    assert_int_equal(moetext_models_open(folder, 1, "models-memory=1G", &several, &e), MOE_OK);
    assert_int_equal(moetext_model_language_count(several), 4);
    assert_true(moetext_model_engine(several) == NULL);
    assert_string_equal(moetext_model_meta(several, "general.name"), "");
    assert_string_equal(moetext_model_piece(several, 5, &length), "");
    assert_int_equal(length, 0);
    assert_int_equal(moetext_model_needs_source(several), 1);
    const size_t en = (size_t)moetext_model_language_find(several, "eng_Latn");
    const size_t de = (size_t)moetext_model_language_find(several, "de");
    assert_int_equal(moetext_model_hops(several, en, de), 1);
    assert_int_equal(moetext_model_hops(several, de, de), 0);
    assert_int_equal(moetext_model_hops(several, en, 4), 0);
    assert_int_equal(moetext_model_hops(model, 0, 0), 1);
    assert_int_equal(moetext_new(several, FAST ";target=xx", &both, &e), MOE_ERROR_ARGUMENT);
    assert_int_equal(moetext_new(several, FAST ";form=ids", &both, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.message, "option form differs from that of the models");
    assert_int_equal(moetext_new(several, FAST ";form=text", &both, &e), MOE_OK); /* the default form */
    moetext_free(both);
    assert_int_equal(moetext_new(several, FAST ";source=en;target=de", &both, &e), MOE_OK);
    assert_int_equal(moetext_translate_strings(both, text, 3, NULL, NULL, &rows, &e), MOE_OK);
    moetext_model_close(several); /* the translator still holds a reference to the models */
    moetext *one = translator(FAST ";source=en;target=de");
    assert_int_equal(moetext_translate_strings(one, text, 3, NULL, NULL, &alone, &e), MOE_OK);
    for (size_t i = 0; i < 3; i++) assert_string_equal(rows.strings[i], alone.strings[i]);
    assert_int_equal(moetext_stats(both).target_tokens, moetext_stats(one).target_tokens);
    assert_int_equal(moetext_translate_strings(both, text, 1, NULL, "pt", &rows, &e), MOE_ERROR_ARGUMENT);
    moetext_cancel(both);
    assert_int_equal(moetext_translate_strings(both, text, 3, NULL, NULL, &rows, &e), MOE_ERROR_CANCELLED);
    assert_int_equal(moetext_translate_strings(both, text, 3, NULL, NULL, &rows, &e), MOE_OK);
    moetext_free(both);
    moetext_free(one);
    assert_int_equal(moetext_models_open(other, 1, NULL, &several, &e), MOE_ERROR_UNSUPPORTED);
    assert_int_equal(moetext_models_open(folder, 0, NULL, &several, &e), MOE_ERROR_ARGUMENT);
    assert_int_equal(moetext_models_open(folder, 1, "form=ids", &several, &e), MOE_OK);
    assert_int_equal(moetext_new(several, FAST ";target=de", &both, &e), MOE_ERROR_ARGUMENT); /* ambiguous source */
    assert_int_equal(moetext_new(several, FAST ";source=en;target=de", &both, &e), MOE_OK);
    moetext_free(both);
    moetext_model_close(several);
}

/* ==== 3. Texts ========================================================================================== */

static const char *const sentences[] = { "Where is my book?", "Thank you!", "She is reading a book.",
                                         "I have lost my keys." };
enum { SENTENCES = sizeof sentences / sizeof *sentences };

TEST(line_breaks_are_preserved) {
    char text[512], expected[2048];
    moetext *t = translator(FAST ";target=de");
    outcome alone[SENTENCES];
    for (size_t i = 0; i < SENTENCES; i++) alone[i] = run_one(t, sentences[i]);
    snprintf(text, sizeof text, "\n%s\r\n\n  \n%s\n", sentences[0], sentences[1]);
    snprintf(expected, sizeof expected, "\n%s\r\n\n  \n%s\n", alone[0].texts[0], alone[1].texts[0]);
    outcome h = run_one(t, text);
    assert_string_equal(h.texts[0], expected);
    assert_int_equal(h.flags, MOETEXT_SPLIT);
    assert_int_equal(h.parts, 6);
    assert_int_equal(h.n_ids, alone[0].n_ids + alone[1].n_ids);
    assert_true(fabsf(h.score[0] - alone[0].score[0] - alone[1].score[0]) < 1e-4f);
    moetext_free(t);
}

TEST(long_lines_are_split_into_sentences) {
    char text[512] = "", expected[2048] = "";
    moetext *t = translator(FAST ";target=de;split=30"), *whole = translator(FAST ";target=de;split=0");
    for (size_t i = 0; i < SENTENCES; i++) {
        snprintf(text + strlen(text), sizeof text - strlen(text), i ? "  %s" : "%s", sentences[i]);
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), i ? "  %s" : "%s",
                 run_one(t, sentences[i]).texts[0]);
    }
    outcome h = run_one(t, text);
    assert_string_equal(h.texts[0], expected);
    assert_int_equal(h.parts, SENTENCES);
    assert_int_equal(h.flags, MOETEXT_SPLIT);
    h = run_one(whole, text);
    assert_int_equal(h.parts, 1);
    assert_int_equal(h.flags, 0);
    moetext_free(t);
    moetext_free(whole);
}

TEST(overlong_sentences_are_split) {
    enum { RUN = 20000 };
    static char text[RUN + 3000];
    moetext *t = translator(FAST ";target=de;max-len=60");
    memset(text, 'Q', RUN);
    for (int i = 0; i < 20; i++) strcat(text, i ? ", and the house is very old" : " The house is red");
    const moetext_request requests[] = { text_of(text), text_of(sentences[0]) };
    outcome h[2];
    assert_int_equal(run(t, requests, 2, h), MOE_OK);
    assert_int_equal(h[0].status, MOE_OK);
    assert_true(h[0].parts > 3 && !(h[0].flags & (MOETEXT_TRUNCATED | MOETEXT_INCOMPLETE)));
    assert_non_null(strstr(h[0].message, "limit of 58 tokens"));
    assert_memory_equal(h[0].texts[0], text, sizeof h[0].texts[0] - 1); /* `outcome` stores only 511 bytes */
    assert_string_equal(h[1].message, "");
    moetext_free(t);
}

TEST(capitals_are_preserved) {
    moetext *t = translator(FAST ";target=de"), *plain = translator(FAST ";target=de;capitals=0");
    assert_string_equal(run_one(t, "WHERE IS MY BOOK?").texts[0], "WO IST MEIN BUCH?");
    assert_string_not_equal(run_one(plain, "WHERE IS MY BOOK?").texts[0], "WO IST MEIN BUCH?");
    moetext_free(t);
    moetext_free(plain);
}

TEST(blank_texts_are_copied) {
    static const char *const blank[] = { "", " ", "\t \t", "\n\n", " \r\n " };
    moetext *t = translator(FAST ";target=de");
    for (size_t i = 0; i < sizeof blank / sizeof *blank; i++) {
        outcome h = run_one(t, blank[i]);
        assert_int_equal(h.status, MOE_OK);
        assert_true(h.flags & MOETEXT_BLANK);
        assert_int_equal(h.n, 1);
        assert_string_equal(h.texts[0], blank[i]);
    }
    moetext *all = translator(FAST ";target=de;protect=0"); /* protection is off */
    assert_string_equal(run_one(all, "\t\n ").texts[0], "\n");
    moetext_free(all);
    assert_false(run_one(t, " \nWhere is my book?").flags & MOETEXT_BLANK);
    moetext_request none = { 0 }; /* `text` is NULL and `length` is 0 */
    outcome h;
    assert_int_equal(run(t, &none, 1, &h), MOE_OK);
    assert_int_equal(h.n, 1);
    moetext_free(t);
}

TEST(invalid_texts_fail_separately) {
    static char words[4000];
    for (size_t i = 0; i + 5 < sizeof words; i += 5) memcpy(words + i, "word ", 5);
    const moetext_request requests[] = {
        text_of(sentences[0]),
        { .text = "good\0bye", .length = 8 },
        text_of("caf\xe9"),
        text_of(words),
        { .text = "Hello", .length = 5, .target = "xx" },
        { .text = "Hello", .length = 5, .source = "xx" },
        { .text = "Hello", .length = 5, .task = (moetext_task)7 },
        { .text = "Hello", .length = 5, .task = MOETEXT_SCORE, .given = "\xff", .given_length = 1 },
        text_of("Where is my book?\ncaf\xe9\nThank you!"),
        text_of(sentences[0]),
    };
    static const char *const why[] = {
        "",     "NUL byte at byte 5", "invalid UTF-8 at byte 4",    "tokens", "'xx'", "'xx'",
        "task", "not valid UTF-8",    "part 2 of 3: invalid UTF-8", ""
    };
    enum { N = sizeof requests / sizeof *requests };
    outcome h[N];
    moetext *t = translator(FAST ";target=de;max-len=200;split=0");
    assert_int_equal(run(t, requests, N, h), MOE_OK);
    for (size_t i = 0; i < N; i++) {
        assert_int_equal(h[i].times, 1);
        assert_int_equal(h[i].status, i == 0 || i == 9 ? MOE_OK : i == 3 ? MOE_ERROR_LIMIT : MOE_ERROR_ARGUMENT);
        if (!strstr(h[i].message, why[i])) fail_msg("%zu: %s", i, h[i].message);
        assert_int_equal(h[i].n, i == 0 || i >= 8);
    }
    assert_string_equal(h[0].texts[0], h[9].texts[0]);
    assert_int_equal(h[8].flags, MOETEXT_SPLIT | MOETEXT_INCOMPLETE);
    assert_string_equal(h[8].texts[0], "Wo ist mein Buch?\n\nDanke!");
    moetext_free(t);
    t = translator(FAST ";target=de;truncate=1;max-len=50");
    assert_int_equal(run(t, requests, 4, h), MOE_OK);
    for (size_t i = 1; i < 4; i++) {
        assert_int_equal(h[i].status, MOE_OK);
        assert_true(h[i].flags & MOETEXT_TRUNCATED && *h[i].message);
    }
    moetext_free(t);
}

TEST(a_target_language_is_required) {
    moetext_rows rows;
    moe_error e;
    moetext *t = translator(FAST);
    const moetext_request requests[] = { { .text = "Hello", .length = 5 },
                                         { .text = "Hello", .length = 5, .target = "fr" } };
    outcome h[2];
    assert_int_equal(run(t, requests, 2, h), MOE_OK);
    assert_int_equal(h[0].status, MOE_ERROR_ARGUMENT);
    assert_int_equal(h[1].status, MOE_OK);
    assert_int_equal(moetext_translate_strings(t, sentences, 1, NULL, NULL, &rows, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "target");
    assert_int_equal(moetext_translate_strings(t, sentences, 1, NULL, "ES", &rows, &e), MOE_OK);
    moetext_free(t);
}

/* ==== 4. Results ======================================================================================== */

TEST(hypotheses_have_scores_and_tokens) {
    moetext *t = translator("beam=4;nbest=3;rerank=0;threads=2;target=de;split=0");
    for (size_t i = 0; i < SENTENCES; i++) {
        outcome h = run_one(t, sentences[i]);
        assert_int_equal(h.n, 3);
        assert_true(h.score[0] >= h.score[1] && h.score[1] >= h.score[2]);
        assert_true(fabsf(h.sum - h.logprob[0]) < 1e-3f);
        assert_true(h.n_source_ids > 1 && h.n_ids > 1);
        const moetext_request score = { .text = sentences[i],
                                        .length = strlen(sentences[i]),
                                        .task = MOETEXT_SCORE,
                                        .given = h.texts[0],
                                        .given_length = strlen(h.texts[0]) };
        outcome scored;
        assert_int_equal(run(t, &score, 1, &scored), MOE_OK);
        assert_int_equal(scored.n, 1);
        assert_string_equal(scored.texts[0], h.texts[0]);
        if (scored.n_ids == h.n_ids && memcmp(scored.ids, h.ids, h.n_ids * sizeof *h.ids) == 0)
            assert_memory_equal(&scored.logprob[0], &h.logprob[0], sizeof(float));
    }
    moetext_free(t);
}

TEST(a_translation_starts_with_its_prefix) {
    moetext *t = translator(FAST ";target=de");
    const moetext_request request = { .text = "She is reading a book.",
                                      .length = 22,
                                      .task = MOETEXT_PREFIX,
                                      .given = "Ein Buch",
                                      .given_length = 8 };
    outcome h;
    assert_int_equal(run(t, &request, 1, &h), MOE_OK);
    assert_int_equal(strncmp(h.texts[0], "Ein Buch", 8), 0);
    assert_true(strlen(h.texts[0]) > 8);
    moetext_free(t);
}

/* A target prefix that ends within a word is completed in all hypotheses, unless a space follows it. */
TEST(a_begun_word_is_completed) {
    static const struct {
        const char *text, *given, *starts;
        int whole; /* 1 if the translation starts with the tokens of `given` */
    } cases[] = { { "Good morning!", "Guten Mor", "Guten Morgen", 0 },
                  { "Good morning!", "Guten Mor ", "Guten Mor", 1 },
                  { "Good morning!", "Gu", "Guten", 0 },
                  { "She speaks German.", "Sie spri", "Sie spricht", 0 },
                  { "She speaks German.", "Sie spricht", "Sie spricht ", 1 },
                  { "She speaks German.", "Er red", "Er red", 0 },
                  { "Where is my book?", "Wo ist mein Buch?", "Wo ist mein Buch?", 1 },
                  { "Where is my book?", "", "Wo ist", 1 },
                  { "Where is my book?", "Xqzw", "Xqzw", 1 } };
    enum { N = sizeof cases / sizeof *cases };
    moetext *t = translator("beam=4;nbest=4;rerank=0;threads=1;target=de");
    moetext_request requests[N];
    outcome h[N];
    for (size_t i = 0; i < N; i++) {
        requests[i] = text_of(cases[i].text);
        requests[i].task = MOETEXT_PREFIX;
        requests[i].given = cases[i].given, requests[i].given_length = strlen(cases[i].given);
    }
    assert_int_equal(run(t, requests, N, h), MOE_OK);
    for (size_t i = 0; i < N; i++) {
        int32_t ids[64];
        size_t n = 0, given = strlen(cases[i].given);
        assert_int_equal(moetext_model_encode(model, cases[i].given, given, 1, ids, 64, &n, NULL), MOE_OK);
        if (strncmp(h[i].texts[0], cases[i].starts, strlen(cases[i].starts)) != 0)
            fail_msg("%zu: %s", i, h[i].texts[0]);
        if (cases[i].whole) assert_memory_equal(h[i].ids, ids, n * sizeof *ids);
        while (given && cases[i].given[given - 1] == ' ') given--;
        for (size_t k = 0; k < h[i].n; k++)
            if (strncmp(h[i].texts[k], cases[i].given, given) != 0) fail_msg("%zu: %s", i, h[i].texts[k]);
    }
    moetext_free(t);
}

/* Of hypotheses with different tokens but the same text, only the best is returned. */
TEST(alternatives_have_different_texts) {
    static const char *const texts[] = { "book",
                                         "house",
                                         "red",
                                         "Good morning!",
                                         "We drink water.",
                                         "my friend",
                                         "Where is my book? It rains. The old house is near the river.",
                                         "1,000 books",
                                         "OK",
                                         "She reads a book every day." };
    enum { N = sizeof texts / sizeof *texts };
    moetext *t = translator("beam=8;nbest=4;rerank=0;threads=1;target=de"),
            *one = translator("beam=8;nbest=1;rerank=0;threads=1;target=de");
    for (size_t i = 0; i < N; i++) {
        const outcome h = run_one(t, texts[i]), best = run_one(one, texts[i]);
        assert_true(h.n >= 1 && h.n <= 4);
        assert_string_equal(h.texts[0], best.texts[0]);
        assert_true(h.score[0] == best.score[0]);
        for (size_t k = 0; k < h.n; k++)
            for (size_t j = 0; j < k; j++)
                if (strcmp(h.texts[k], h.texts[j]) == 0) fail_msg("%s: %zu and %zu: %s", texts[i], j, k, h.texts[k]);
    }
    moetext_free(t), moetext_free(one);
}

/* Each request uses its own glossary, even in retries and in a batch with other requests. */
TEST(a_request_can_have_a_glossary) {
    static const char *const sources[] = { "book", "#1" }, *const translations[] = { "Schinken", "Nummer eins" };
    static const char text[] = "Where is my book?\nThe book is here. The book is old.", path[] = "build/terms.tsv";
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("book\tSchinken\n", file);
    fclose(file);
    moetext *t = translator(FAST ";target=de"), *with_file = translator(FAST ";target=de;glossary=build/terms.tsv");
    remove(path);
    moetext_glossary *g;
    assert_int_equal(moetext_glossary_new(t, sources, translations, 2, &g, NULL), MOE_OK);
    const outcome plain = run_one(t, text), wanted = run_one(with_file, text);
    assert_string_not_equal(plain.texts[0], wanted.texts[0]);
    assert_non_null(strstr(wanted.texts[0], "Schinken"));
    moetext_request requests[6];
    outcome h[6];
    for (size_t i = 0; i < 6; i++) requests[i] = text_of(text), requests[i].glossary = i % 2 ? g : NULL;
    requests[5] = text_of("It is #1 of all."), requests[5].glossary = g;
    assert_int_equal(run(t, requests, 6, h), MOE_OK);
    for (size_t i = 0; i < 5; i++) assert_string_equal(h[i].texts[0], (i % 2 ? &wanted : &plain)->texts[0]);
    assert_non_null(strstr(h[5].texts[0], "Nummer eins"));
    moetext_glossary_free(g);
    assert_int_equal(moetext_glossary_new(with_file, sources + 1, translations + 1, 1, &g, NULL), MOE_OK);
    requests[0].glossary = g; /* this glossary replaces the translator's */
    assert_int_equal(run(with_file, requests, 1, h), MOE_OK);
    assert_string_equal(h[0].texts[0], plain.texts[0]);
    moetext_glossary_free(g);
    moetext_free(t);
    moetext_free(with_file);
}

/* A pair counts from the next text on; a request's own memory wins; fuzzy pairs guide the model. */
TEST(texts_are_found_in_memories) {
    FILE *file = fopen("build/memory.tsv", "w");
    assert_non_null(file);
    fputs("Where is my book?\tWo ist das Buch?\nIt costs %d.\tKostet %d.\nWhere is my old car now?\tNein\n", file);
    fclose(file);
    moetext *t = translator(FAST ";target=de;source=en;memory=build/memory.tsv"),
            *plain = translator(FAST ";target=de");
    moetext_memory *of = moetext_memory_of(t), *own = NULL;
    assert_null(moetext_memory_of(plain));
    assert_int_equal(moetext_memory_count(of), 3);
    assert_int_equal(strlen(moetext_memory_hash(of)), 64);
    assert_string_equal(run_one(t, "Where is my book?").texts[0], "Wo ist das Buch?");
    assert_string_equal(run_one(t, " Where is my book?\nIt costs %s. \n").texts[0], " Wo ist das Buch?\nKostet %s. \n");
    const outcome split = run_one(t, "I see a dog. Where is my book? It costs %d.");
    assert_string_equal(split.texts[0] + strlen(split.texts[0]) - 27, "Wo ist das Buch? Kostet %d.");
    assert_int_equal(split.parts, 3);

    static const char line[] = "I see a dog.", wanted[] = "Da ist der Hund.";
    assert_string_not_equal(run_one(t, line).texts[0], wanted);
    assert_int_equal(moetext_memory_add(of, "en", "de", line, strlen(line), wanted, strlen(wanted), NULL), MOE_OK);
    assert_string_equal(run_one(t, line).texts[0], wanted);
    moetext_request q = text_of(line);
    q.target = "fr";
    assert_string_not_equal(run_request(t, q).texts[0], wanted);

    assert_int_equal(moetext_memory_new(NULL, &own, NULL), MOE_OK);
    assert_int_equal(moetext_memory_add(own, NULL, NULL, line, strlen(line), "Hund!", 5, NULL), MOE_OK);
    q = text_of(line), q.memory = own;
    assert_string_equal(run_request(t, q).texts[0], "Hund!");
    assert_string_equal(run_request(plain, q).texts[0], "Hund!");

    const outcome free = run_one(plain, "Where is my old dog now?"), guided = run_one(t, "Where is my old dog now?");
    assert_true(guided.status == MOE_OK && guided.n == 1);
    assert_true(guided.score[0] >= free.score[0]); /* the similarity is added */
    moetext_free(t), moetext_free(plain);
    moetext_memory_free(own);

    moe_error e;
    file = fopen("build/memory.tsv", "w");
    assert_non_null(file);
    fputs("a\tb\nc\n", file);
    fclose(file);
    assert_int_equal(moetext_new(model, "target=de;memory=build/memory.tsv", &t, &e), MOE_ERROR_ARGUMENT);
    assert_non_null(strstr(e.message, "build/memory.tsv: line 2: expected source TAB translation"));
    remove("build/memory.tsv");
    assert_int_equal(moetext_new(model, "target=de;memory=build/memory.tsv", &t, &e), MOE_ERROR_IO);
}

TEST(invalid_terms_are_named) {
    static const char *const bad[][2] = { { "", "x" },     { "x", " " },    { "a\nb", "x" },
                                          { "x", "a\nb" }, { "\xff", "x" }, { "x", "\xff" } };
    moetext *t = translator(FAST ";target=de");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *sources[] = { "dog", bad[i][0] }, *translations[] = { "Hund", bad[i][1] };
        moetext_glossary *g = NULL;
        moe_error e = { .code = MOE_OK };
        assert_int_equal(moetext_glossary_new(t, sources, translations, 2, &g, &e), MOE_ERROR_ARGUMENT);
        assert_string_equal(e.where, "glossary, term 2");
        assert_true(*e.message && !g);
    }
    moetext_free(t);
    t = translator(FAST ";target=de;protect=0");
    moetext_glossary *g = NULL;
    assert_int_equal(moetext_glossary_new(t, bad[0], bad[0], 0, &g, NULL), MOE_ERROR_UNSUPPORTED);
    assert_null(g);
    moetext_free(t);
}

/* Assert that links cover whole words of both texts. */
static void check_links(const char *text, const outcome *h) {
    assert_true(h->n_links > 0 && h->n_links <= 256);
    for (size_t i = 0; i < h->n_links; i++) {
        const moetext_link *l = &h->links[i];
        assert_true(l->source_begin < l->source_end && l->source_end <= strlen(text));
        assert_true(l->target_begin < l->target_end && l->target_end <= strlen(h->texts[0]));
        assert_true(!l->source_begin || strchr(" \n", text[l->source_begin - 1]));
        assert_true(strchr(" \n", text[l->source_end]) != NULL); /* strchr also finds the terminating NUL */
        assert_true(!l->target_begin || strchr(" \n", h->texts[0][l->target_begin - 1]));
        assert_true(strchr(" \n", h->texts[0][l->target_end]) != NULL);
        if (i) assert_true(h->links[i - 1].source_begin <= l->source_begin);
    }
}

static int has_link(const char *text, const outcome *h, const char *source, const char *target) {
    for (size_t i = 0; i < h->n_links; i++) {
        const moetext_link *l = &h->links[i];
        if (l->source_end - l->source_begin == strlen(source) && l->target_end - l->target_begin == strlen(target) &&
            memcmp(text + l->source_begin, source, strlen(source)) == 0 &&
            memcmp(h->texts[0] + l->target_begin, target, strlen(target)) == 0)
            return 1;
    }
    return 0;
}

/* tests/programs/test_keeping.py measures how often moe-translate keeps markup and placeholders. */
TEST(markup_and_placeholders_are_kept) {
    static const char text[] = "  Hello {name}, open <b>the house</b> at 12:30!\n\tWhere is %s?";
    char path[] = "/tmp/moetext-XXXXXX", options[256];
    const int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, "house\tGebaeude\n", 15) == 15);
    close(fd);
    snprintf(options, sizeof options, FAST ";target=de;glossary=%s", path);
    moetext *kept = translator(options), *bare = translator(FAST ";target=de;protect=0");
    outcome h = run_one(kept, text), without = run_one(bare, text);
    static const char *const parts[] = { "{name}", "<b>", "</b>", "12:30", "\n\t", "%s", "Gebaeude" };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!strstr(h.texts[0], parts[i])) fail_msg("%s is not in '%s'", parts[i], h.texts[0]);
    assert_memory_equal(h.texts[0], "  ", 2);
    assert_null(strstr(without.texts[0], "Gebaeude"));
    assert_null(strstr(without.texts[0], "\n\t"));
    moetext_free(kept);
    moetext_free(bare);
    unlink(path);
    moetext *messages = translator(FAST ";target=de");
    static const char message[] = "{n, plural, one {One letter. It is here.} other {# letters. They are here.}}";
    static const char german[] = "{n, plural, one {Ein Brief. Es ist hier.} other {# Briefe. Sie sind hier.}}";
    const outcome branches = run_one(messages, message);
    assert_string_equal(branches.texts[0], german);
    assert_string_equal(branches.message, "");
    assert_non_null(strstr(run_one(messages, "The house {n, plural, one {a}").message, "ICU message"));
    moetext_free(messages);
}

TEST(words_are_linked) {
    static const char text[] = "Where is my book? WHERE IS MY BOOK?\n\n  I have lost my keys.  She is reading a book.";
    moetext *one = translator(FAST ";target=de;source=en;alignment=1;split=20;batch=1"),
            *many = translator(FAST ";target=de;alignment=1;split=20;source=en;nbest=2"),
            *none = translator(FAST ";target=de;split=20");
    outcome h = run_one(one, text), again = run_one(many, text), bare = run_one(none, text);
    assert_int_equal(bare.n_links, 0);
    assert_string_equal(h.texts[0], bare.texts[0]);
    check_links(text, &h);
    assert_true(has_link(text, &h, "book?", "Buch?") && has_link(text, &h, "Where", "Wo"));
    assert_true(has_link(text, &h, "BOOK?", "BUCH?") && has_link(text, &h, "reading", "liest"));
    assert_int_equal(h.n_links, again.n_links);
    assert_memory_equal(h.links, again.links, h.n_links * sizeof *h.links);
    moetext_request requests[40];
    outcome all[40];
    for (size_t i = 0; i < 40; i++) requests[i] = text_of(i % 5 ? sentences[i % SENTENCES] : i % 2 ? "" : "caf\xe9");
    assert_int_equal(run(many, requests, 40, all), MOE_OK);
    for (size_t i = 0; i < 40; i++) {
        assert_int_equal(all[i].times, 1);
        if (i % 5) check_links(requests[i].text, &all[i]);
        else assert_int_equal(all[i].n_links, 0);
    }
    moetext_free(one);
    moetext_free(many);
    moetext_free(none);
}

/* A request with a prefix must not use the protected parts of the previous request. */
TEST(links_do_not_depend_on_the_text_before) {
    moetext *used = translator(FAST ";target=de;alignment=1"), *fresh = translator(FAST ";target=de;alignment=1");
    moetext_request request = text_of("The dog is big.");
    outcome a, b;
    request.task = MOETEXT_PREFIX;
    request.given = "Der";
    request.given_length = 3;
    run_one(used, "The <b>dog</b> is <i>big</i>.");
    assert_int_equal(run(used, &request, 1, &a), MOE_OK);
    assert_int_equal(run(fresh, &request, 1, &b), MOE_OK);
    assert_true(b.n_links > 0);
    assert_int_equal(a.n_links, b.n_links);
    assert_memory_equal(a.links, b.links, a.n_links * sizeof *a.links);
    moetext_free(used);
    moetext_free(fresh);
}

static void report(void *user, const moetext_routing *r) {
    routes *x = &((outcome *)r->user)->routes;
    (void)user;
    assert_int_equal(r->begin, 0);
    assert_true(r->routing->n && r->routing->token >= 0);
    const int decoder = strncmp(r->routing->layer, "decoder.", 8) == 0;
    x->n++;
    if (decoder && r->written >= 0) x->ids[r->routing->position] = r->written, x->written++;
    x->decoder += (size_t)decoder;
    for (size_t i = 0; i < r->routing->n; i++) x->weights += r->routing->weights[i];
}

TEST(routing_is_reported_on_request) {
    moetext_request q = { .text = "Where is my book?", .length = 17, .routing = report };
    moetext *t = translator(FAST ";target=de;split=0;routing=1"), *without = translator(FAST ";target=de");
    moetext *cutting = translator(FAST ";target=de;split=0;routing=1;max-len-factor=0;max-len-offset=4");
    const outcome h = run_request(t, q);
    assert_string_equal(h.texts[0], "Wo ist mein Buch?");
    const routes found = h.routes;
    assert_true(found.decoder == h.n_ids + 1 && found.n > found.decoder); /* one mixture layer; n_ids omits the end */
    assert_int_equal(found.written, h.n_ids);
    assert_memory_equal(found.ids, h.ids, h.n_ids * sizeof *h.ids);
    assert_true(found.weights > (double)found.n * 0.99 && found.weights < (double)found.n * 1.01);
    const outcome cut = run_request(cutting, q);
    assert_true(cut.flags & MOETEXT_CUT && cut.n_ids == 4 && cut.routes.decoder == 4 && cut.routes.written == 4);
    assert_memory_equal(cut.routes.ids, cut.ids, 4 * sizeof *cut.ids);
    q.task = MOETEXT_SCORE, q.given = "Wo ist mein Buch?", q.given_length = 17;
    const outcome again = run_request(t, q);
    assert_memory_equal(&h.routes, &again.routes, sizeof h.routes);
    assert_int_equal(run_request(without, q).status, MOE_ERROR_ARGUMENT);
    moetext_free(t);
    moetext_free(without);
    moetext_free(cutting);
}

TEST(raw_ids_and_forced_tokens_are_accepted) {
    moetext_model *raw;
    moetext *t;
    moe_error e;
    assert_int_equal(moetext_model_open("models/en-de-fr-es.bin", "form=raw-ids", &raw, &e), MOE_OK);
    assert_int_equal(moetext_new(raw, FAST, &t, &e), MOE_OK);
    const outcome h = run_request(t, (moetext_request){ .text = "5 4699 307 3", .length = 12 });
    const size_t length = strlen(h.texts[0]);
    assert_int_equal(h.status, MOE_OK);
    assert_true(length > 2 && strcmp(h.texts[0] + length - 2, " 3") == 0); /* 3 is the id of the end token */
    moetext_free(t);
    moetext_model_close(raw);
    t = translator(FAST ";target=de;split=0;protect=0;force=20");
    const outcome forced = run_one(t, "Where is my book?");
    assert_int_equal(forced.ids[0], 20);
    moetext_free(t);
}

TEST(a_language_model_scores_texts) {
    moetext_model *m;
    moetext *t;
    moe_error e;
    assert_int_equal(moetext_model_open("models/en-de-fr-es.bin", "kind=language", &m, &e), MOE_ERROR_UNSUPPORTED);
    assert_int_equal(moetext_model_open("models/lm-en.bin", "kind=language", &m, &e), MOE_OK);
    assert_int_equal(moetext_new(m, "threads=1", &t, &e), MOE_OK);
    moetext_request q = { .text = "Good morning!", .length = 13, .task = MOETEXT_SCORE };
    const outcome good = run_request(t, q);
    q.text = "morning Good!";
    assert_true(good.status == MOE_OK && good.logprob[0] > run_request(t, q).logprob[0]);
    q.length = 0; /* an empty target, so only the end token is scored */
    assert_true(run_request(t, q).n == 1);
    q.task = MOETEXT_TRANSLATE;
    assert_int_equal(run_request(t, q).status, MOE_ERROR_UNSUPPORTED);
    moetext_free(t);
    moetext_model_close(m);
}

static void keep_notes(void *user, const moetext_result *r) {
    char *out = user;
    for (size_t i = 0; i < r->n_notes; i++)
        out += sprintf(out, "%zu %d %.20s|", r->notes[i].part, r->notes[i].status != MOE_OK, r->notes[i].message);
}

static int pull_bad(void *user, int wait, moetext_request *request) {
    static const char text[] = "caf\xe9\nThank you!\n\xff";
    char *out = user;
    (void)wait;
    if (*out) return MOE_PULL_END;
    *out = ' '; /* remember that the text has been returned */
    *request = (moetext_request){ .text = text, .length = sizeof text - 1 };
    return MOE_PULL_REQUEST;
}

TEST(every_failed_part_has_a_note) {
    char notes[512] = "";
    moetext *t = translator(FAST ";target=de");
    moe_error e;
    assert_int_equal(moetext_translate(t, pull_bad, keep_notes, notes, &e), MOE_OK);
    assert_string_equal(notes, "0 1 invalid UTF-8 at byt|2 1 invalid UTF-8 at byt|");
    moetext_free(t);
}

/* ==== 5. Rows =========================================================================================== */

TEST(rows_are_translated_like_texts) {
    static const char bytes[] = "Where is my book?Thank you!caf\xe9She is reading a book.";
    static const int64_t offsets[] = { 0, 17, 27, 27, 31, 53 };
    static const uint8_t all = 0x1F, some = 0x1D;
    moetext_rows rows;
    moetext *t = translator(FAST ";target=de;batch=2");
    char *expected[5];
    expected[0] = strdup(run_one(t, sentences[0]).texts[0]);
    expected[1] = strdup(run_one(t, sentences[1]).texts[0]);
    expected[2] = strdup("");
    expected[3] = strdup("");
    expected[4] = strdup(run_one(t, sentences[2]).texts[0]);
    for (int round = 0; round < 3; round++) {
        const uint8_t *valid = round == 0 ? NULL : round == 1 ? &all : &some;
        assert_int_equal(moetext_translate_rows(t, bytes, offsets, 5, valid, "en", NULL, &rows, NULL), MOE_OK);
        assert_int_equal(rows.n, 5);
        assert_int_equal(rows.offsets[0], 0);
        assert_null(rows.strings);
        for (size_t i = 0; i < 5; i++) {
            const size_t length = (size_t)(rows.offsets[i + 1] - rows.offsets[i]);
            const char *want = round == 2 && i == 1 ? "" : expected[i];
            assert_int_equal(rows.statuses[i], i == 3 ? MOE_ERROR_ARGUMENT : MOE_OK);
            assert_int_equal(length, strlen(want));
            assert_memory_equal(rows.bytes + rows.offsets[i], want, length);
            assert_int_equal(*rows.messages[i] != 0, i == 3);
            assert_int_equal(rows.scores[i] != 0, *want != 0);
        }
    }
    for (size_t i = 0; i < 5; i++) free(expected[i]);
    static const int64_t falling[] = { 0, 5, 3 };
    moe_error e;
    assert_int_equal(moetext_translate_rows(t, bytes, falling, 2, NULL, NULL, NULL, &rows, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "offsets");
    assert_int_equal(moetext_translate_rows(t, NULL, offsets, 0, NULL, NULL, NULL, &rows, NULL), MOE_OK);
    assert_int_equal(rows.n, 0);
    assert_int_equal(moetext_translate_strings(t, NULL, 0, NULL, NULL, &rows, NULL), MOE_OK);
    moetext_free(t);
}

typedef struct counter {
    moetext *t;
    size_t given, done, most;
} counter;

static int count_pull(void *user, int wait, moetext_request *request) {
    counter *c = user;
    (void)wait;
    const size_t n = moetext_under_way(c->t);
    if (n > c->most) c->most = n;
    assert_true(n <= c->given - c->done);
    if (c->given == 20) return MOE_PULL_END;
    request->text = c->given++ % 4 == 3 ? "\n" : "Where is my book?"; /* blank texts finish without a batch */
    request->length = strlen(request->text);
    return MOE_PULL_REQUEST;
}

static void count_done(void *user, const moetext_result *result) {
    counter *c = user;
    assert_int_equal(result->status, MOE_OK);
    c->done++;
}

TEST(requests_in_progress_are_counted) {
    counter c = { .t = translator("target=de;beam=2;batch=8") };
    for (int i = 0; i < 2; i++) {
        c.given = c.done = c.most = 0;
        assert_int_equal(moetext_translate(c.t, count_pull, count_done, &c, NULL), MOE_OK);
        assert_int_equal(c.done, 20);
        assert_in_range(c.most, 4, 16); /* one batch is decoded while another is reranked */
        assert_int_equal(moetext_under_way(c.t), 0);
    }
    moetext_free(c.t);
}

TEST(rows_do_not_depend_on_batch_or_threads) {
    const char *texts[64];
    moetext_rows a, b;
    moetext *s = translator("target=fr;beam=3;batch=32;threads=2"),
            *t = translator("target=fr;beam=3;batch=3;threads=1");
    for (size_t i = 0; i < 64; i++) texts[i] = sentences[i * i % SENTENCES];
    assert_int_equal(moetext_translate_strings(s, texts, 64, NULL, NULL, &a, NULL), MOE_OK);
    assert_int_equal(moetext_translate_strings(t, texts, 64, NULL, NULL, &b, NULL), MOE_OK);
    for (size_t i = 0; i < 64; i++) {
        assert_string_equal(a.strings[i], b.strings[i]);
        assert_memory_equal(&a.scores[i], &b.scores[i], sizeof(float));
    }
    assert_memory_equal(a.offsets, b.offsets, 65 * sizeof *a.offsets);
    assert_int_equal(moetext_stats(s).sentences, 64);
    moetext_free(s);
    moetext_free(t);
}

TEST(expert_memory_limits_loaded_experts) {
    static const char *const sizes[] = { "600K", "8M", "auto" };
    moetext_rows wanted, rows;
    moe_error e = { .code = MOE_OK };
    moetext *mapped = translator(FAST ";target=de");
    assert_int_equal(moetext_translate_strings(mapped, sentences, SENTENCES, NULL, NULL, &wanted, NULL), MOE_OK);
    assert_int_equal(moetext_stats(mapped).experts, 0);
    for (size_t i = 0; i < 3; i++) {
        char options[80];
        moetext_model *streamed = NULL;
        moetext *t = NULL;
        snprintf(options, sizeof options, FAST ";target=de;expert-memory=%s", sizes[i]);
        assert_int_equal(moetext_model_open("models/en-de-fr-es.bin", options, &streamed, &e), MOE_OK);
        assert_int_equal(moetext_new(streamed, FAST ";target=de;expert-memory=1K", &t, &e), MOE_ERROR_MEMORY);
        assert_non_null(strstr(e.message, "is too small: 2 experts need"));
        assert_int_equal(moetext_new(streamed, options, &t, &e), MOE_OK);
        moetext_model_close(streamed);
        assert_int_equal(moetext_translate_strings(t, sentences, SENTENCES, NULL, NULL, &rows, &e), MOE_OK);
        for (size_t k = 0; k < SENTENCES; k++) {
            assert_string_equal(rows.strings[k], wanted.strings[k]);
            assert_memory_equal(&rows.scores[k], &wanted.scores[k], sizeof(float));
        }
        const moe_stats stats = moetext_stats(t);
        assert_int_equal(stats.experts, 64);
        assert_true(i == 2 ? stats.experts_held == 64 : stats.experts_held > 1 && stats.experts_held < 64);
        assert_true(stats.expert_fetches > 0 && stats.expert_fetch_bytes / stats.expert_fetches > 1024);
        moetext_free(t);
    }
    moetext_free(mapped);
}

/* ==== 6. Stopping ======================================================================================= */

static void *cancel_soon(void *user) {
    const struct timespec t = { 0, 30000000 };
    nanosleep(&t, NULL);
    moetext_cancel(user);
    return NULL;
}

TEST(a_cancelled_translator_can_be_reused) {
    enum { N = 2000 };
    static const char *texts[N];
    moetext_rows rows;
    moe_error e;
    pthread_t thread;
    moetext *t = translator("target=de;source=en;batch=8;threads=2;alignment=1");
    outcome before = run_one(t, sentences[0]);
    for (size_t i = 0; i < N; i++) texts[i] = sentences[i % SENTENCES];
    for (int round = 0; round < 3; round++) {
        assert_int_equal(pthread_create(&thread, NULL, cancel_soon, t), 0);
        assert_int_equal(moetext_translate_strings(t, texts, N, NULL, NULL, &rows, &e), MOE_ERROR_CANCELLED);
        assert_int_equal(pthread_join(thread, NULL), 0);
        size_t left = 0;
        for (size_t i = 0; i < N; i++) {
            assert_true(rows.statuses[i] == MOE_OK || rows.statuses[i] == MOE_ERROR_CANCELLED);
            assert_int_equal(rows.statuses[i] == MOE_OK, *rows.strings[i] != 0);
            if (rows.statuses[i]) left++, assert_string_equal(rows.messages[i], "cancelled");
            else if (i % SENTENCES == 0) assert_string_equal(rows.strings[i], before.texts[0]);
        }
        assert_true(left > 0);
    }
    static char lines[1 << 22]; /* blank lines do not use the decoder */
    memset(lines, '\n', sizeof lines - 1);
    texts[0] = lines;
    assert_int_equal(pthread_create(&thread, NULL, cancel_soon, t), 0);
    assert_int_equal(moetext_translate_strings(t, texts, 1, NULL, NULL, &rows, &e), MOE_ERROR_CANCELLED);
    assert_int_equal(pthread_join(thread, NULL), 0);
    texts[0] = sentences[0];
    moetext_cancel(t); /* cancels the next call */
    assert_int_equal(moetext_translate_strings(t, texts, 1, NULL, NULL, &rows, &e), MOE_ERROR_CANCELLED);
    moetext_cancel(t);
    moetext_uncancel(t);
    outcome h = run_one(t, sentences[0]);
    assert_string_equal(h.texts[0], before.texts[0]);
    assert_int_equal(h.n_links, before.n_links);
    moetext_free(t);
}

static int pull_then_cancel(void *user, int wait, moetext_request *request) {
    feed *f = user;
    return f->next < 3 ? pull(user, wait, request) : MOE_PULL_CANCEL;
}

TEST(callbacks_can_cancel) {
    moetext_request requests[SENTENCES];
    outcome h[SENTENCES];
    static feed f;
    moetext *t = translator(FAST ";target=de;batch=1");
    for (size_t i = 0; i < SENTENCES; i++) requests[i] = text_of(sentences[i]);
    f = (feed){ .requests = requests, .n = SENTENCES, .outcomes = h, .cancel = t };
    memset(h, 0, sizeof h);
    assert_int_equal(moetext_translate(t, pull, done, &f, NULL), MOE_ERROR_CANCELLED);
    assert_int_equal(h[0].times + h[1].times + h[2].times + h[3].times, 1);
    f = (feed){ .requests = requests, .n = SENTENCES, .outcomes = h };
    assert_int_equal(moetext_translate(t, pull_then_cancel, done, &f, NULL), MOE_ERROR_CANCELLED);
    assert_int_equal(run(t, requests, SENTENCES, h), MOE_OK);
    for (size_t i = 0; i < SENTENCES; i++) assert_int_equal(h[i].times, 1);
    moetext_free(t);
}

/* ==== 7. Turns ========================================================================================== */

enum { TURNS = 5 };

/* A client that sends a text and receives the result as bytes. */
typedef struct client {
    const char *text;
    moetext_request request;
    void *place;
    moe_drop drop;
    int begun, times;
    moe_status status;
    size_t order, parts, length, hypotheses; /* order: 1 for the first result, 2 for the second */
    char bytes[1 << 16];
} client;

typedef struct schedule {
    client *clients;
    size_t n, turn, pulled, finished;
    size_t end_after;          /* maximum number of turns; 0 for no limit */
    client *trigger, *dropped; /* drop the text of `dropped` when `trigger` gets its result */
} schedule;

static void put(client *c, const void *bytes, size_t length) {
    assert_true(length <= sizeof c->bytes - c->length);
    if (length) memcpy(c->bytes + c->length, bytes, length);
    c->length += length;
}

static int pull_in_turns(void *user, int wait, moetext_request *request) {
    schedule *p = user;
    (void)wait;
    if (p->end_after && p->pulled == p->end_after) return MOE_PULL_END;
    for (size_t i = 0; i < p->n; i++) {
        client *c = &p->clients[p->turn++ % p->n];
        if (c->begun && !c->place) continue;
        c->begun = 1;
        *request = (moetext_request){ .text = c->text,
                                      .length = strlen(c->text),
                                      .user = c,
                                      .place = &c->place,
                                      .drop = &c->drop };
        p->pulled++;
        return MOE_PULL_REQUEST;
    }
    return MOE_PULL_END;
}

static void keep_all(void *user, const moetext_result *r) {
    schedule *p = user;
    client *c = r->user;
    assert_null(c->place);
    c->times++;
    c->status = r->status;
    c->order = ++p->finished;
    c->parts = r->n_parts;
    c->hypotheses = r->n_hypotheses;
    put(c, &r->flags, sizeof r->flags);
    put(c, r->message, strlen(r->message));
    put(c, r->source_ids, r->n_source_ids * sizeof *r->source_ids);
    put(c, r->part_ends, r->n_parts * sizeof *r->part_ends);
    for (size_t k = 0; k < r->n_hypotheses; k++) {
        const moetext_hypothesis *h = &r->hypotheses[k];
        put(c, h->text, h->length + 1);
        put(c, &h->score, sizeof h->score);
        put(c, &h->reverse, sizeof h->reverse);
        put(c, h->ids, h->n_ids * sizeof *h->ids);
        put(c, h->token_logprobs, h->n_logprobs * sizeof *h->token_logprobs);
        put(c, h->links, h->n_links * sizeof *h->links);
        put(c, h->part_ends, r->n_parts * sizeof *h->part_ends);
    }
    if (p->trigger == c) moe_request_drop(&p->dropped->drop);
}

static client *new_clients(const char *const *texts, size_t n) {
    client *clients = calloc(n, sizeof *clients);
    assert_non_null(clients);
    for (size_t i = 0; i < n; i++) clients[i].text = texts[i];
    return clients;
}

static const char many[] = "It rains. The cat sleeps in the garden. Where is my book? She has read it twice. We "
                           "waited for an hour.\nNobody came, and so we went home. It was late.\n\n\n  Good night! "
                           "The door was open. He closed it. Then he went to bed, and slept until the morning came. "
                           "What a day! It was the last one of the year.\r\nThe snow was deep, and the horses were "
                           "tired. They stood in the stable and ate. Nothing moved.\n";

static const char *const turn_texts[TURNS] = {
    many, "Where is my book?", "A name\tThe <b>old</b> dog\n{n, plural, one {a letter} other {# letters}}\n\nYes.",
    "\n \n\n",
    "The old dog and the young cat, who went to the house, saw the man and the woman and a horse in the "
    "rain, and then they went home, because it was late and the night was cold and dark."
};

TEST(interleaved_texts_are_translated_like_single_ones) {
    static const char *const options[] = { FAST ";target=de;nbest=2;split=20;batch=4",
                                           "beam=3;rerank=1;threads=1;target=fr;nbest=3;alignment=1;split=20;batch=2" };
    for (size_t o = 0; o < 2; o++) {
        moetext *t = translator(options[o]);
        client *alone = new_clients(turn_texts, TURNS), *together = new_clients(turn_texts, TURNS);
        for (size_t i = 0; i < TURNS; i++) {
            schedule p = { .clients = &alone[i], .n = 1 };
            assert_int_equal(moetext_translate(t, pull_in_turns, keep_all, &p, NULL), MOE_OK);
            assert_int_equal(alone[i].times, 1);
        }
        schedule p = { .clients = together, .n = TURNS };
        assert_int_equal(moetext_translate(t, pull_in_turns, keep_all, &p, NULL), MOE_OK);
        for (size_t i = 0; i < TURNS; i++) {
            assert_int_equal(together[i].times, 1);
            assert_int_equal(together[i].status, MOE_OK);
            assert_int_equal(together[i].length, alone[i].length);
            assert_memory_equal(together[i].bytes, alone[i].bytes, alone[i].length);
        }
        if (together[0].parts <= 15 || together[0].order != TURNS)
            fail_msg("%zu parts, %zu", together[0].parts, together[0].order);
        free(alone);
        free(together);
        moetext_free(t);
    }
}

/* Translate all texts of the schedule; return the number of decoder steps. */
static uint64_t steps_of(moetext *t, schedule *p) {
    const uint64_t before = moetext_stats(t).steps;
    assert_int_equal(moetext_translate(t, pull_in_turns, keep_all, p, NULL), MOE_OK);
    return moetext_stats(t).steps - before;
}

/* Drop text 0 when text 1 finishes. Text 0 has many parts in the first language pair and one part in the second. */
TEST(a_dropped_text_stops_at_the_next_step) {
    const char *const pairs[][2] = { { many, "Where is my book?" }, { turn_texts[4], "Yes." } };
    static const char *const options[] = { FAST ";target=de;split=20;batch=4",
                                           "beam=4;rerank=1;threads=1;target=de;nbest=2;split=20;batch=4" };
    for (size_t o = 0; o < 2; o++) {
        moetext *t = translator(options[o]);
        for (size_t i = 0; i < 2; i++) {
            client *c = new_clients(pairs[i], 2), *again = new_clients(pairs[i], 2), *first = new_clients(pairs[i], 2);
            const uint64_t all = steps_of(t, &(schedule){ .clients = c, .n = 2 });
            const uint64_t some =
                steps_of(t, &(schedule){ .clients = again, .n = 2, .trigger = &again[1], .dropped = &again[0] });
            if (some * 4 > all * 3) fail_msg("%zu, %zu: %d of %d steps", o, i, (int)some, (int)all);
            assert_int_equal(again[0].times, 1);
            assert_int_equal(again[0].status, MOE_ERROR_CANCELLED);
            assert_int_equal(again[0].hypotheses, 0);
            assert_int_equal(again[1].length, c[1].length);
            assert_memory_equal(again[1].bytes, c[1].bytes, c[1].length);
            moe_request_drop(&first[0].drop); /* dropped before its first turn */
            assert_true(steps_of(t, &(schedule){ .clients = first, .n = 2 }) <= some);
            assert_int_equal(first[0].status, MOE_ERROR_CANCELLED);
            assert_memory_equal(first[1].bytes, c[1].bytes, c[1].length);
            free(c);
            free(again);
            free(first);
        }
        moetext_free(t);
    }
}

TEST(unfinished_texts_are_dropped_at_the_end) {
    client *c = new_clients(turn_texts, TURNS);
    moetext *t = translator(FAST ";target=de;split=20;batch=4");
    schedule p = { .clients = c, .n = TURNS, .end_after = TURNS + 2 };
    assert_int_equal(moetext_translate(t, pull_in_turns, keep_all, &p, NULL), MOE_OK);
    for (size_t i = 0; i < TURNS; i++) assert_int_equal(c[i].times, 1);
    assert_int_equal(c[0].status, MOE_ERROR_CANCELLED);
    assert_int_equal(c[1].status, MOE_OK);
    free(c);
    moetext_free(t);
}

/* Only a limited number of parts may wait for an earlier part. The limit must not stop a text of many blank lines. */
/* Translate texts with drafts, which must not change the translations of `wanted` (may be NULL). */
static moe_stats translate_drafted(const moetext_model *m, const char *options, moetext_request *requests, size_t n,
                                   const outcome *wanted, outcome *found) {
    moetext *t = NULL;
    moe_error e;
    feed f = { .requests = requests, .n = n, .outcomes = found };
    memset(found, 0, n * sizeof *found);
    if (moetext_new(m, options, &t, &e) || moetext_translate(t, pull, done, &f, &e)) fail_msg("%s", e.message);
    for (size_t i = 0; i < n; i++) {
        if (found[i].status) fail_msg("%s", found[i].message);
        if (wanted) assert_string_equal(found[i].texts[0], wanted[i].texts[0]);
        if (wanted) assert_true(found[i].score[0] == wanted[i].score[0]);
    }
    const moe_stats stats = moetext_stats(t);
    moetext_free(t);
    return stats;
}

/* The shipped decoder is an LSTM, which computes no drafts; tests/convert/test_smollm2.py has a model that does. */
TEST(drafts_change_no_translation) {
    static const char *const texts[] = { "It is late.\nGo to bed.\n", "Who?" };
    static outcome wanted[2], found[2];
    moetext_request requests[2] = { { .text = texts[0], .length = strlen(texts[0]) },
                                    { .text = texts[1], .length = strlen(texts[1]) } };
    moetext *t;
    moe_error e;
    translate_drafted(model, "target=de;beam=1", requests, 2, NULL, wanted);
    requests[0].draft = wanted[0].texts[0], requests[0].draft_length = strlen(wanted[0].texts[0]);
    requests[1].draft = "\xff not UTF-8", requests[1].draft_length = 11;
    assert_int_equal(translate_drafted(model, "target=de;beam=1", requests, 2, wanted, found).draft_rows, 0);
    requests[0].draft_length = 5; /* fewer lines */
    translate_drafted(model, "target=de;beam=1", requests, 2, wanted, found);
    requests[0].draft = requests[1].draft = NULL;
    translate_drafted(model, "target=de;beam=1;draft=models/en-de-fr-es.bin", requests, 2, wanted, found);
    assert_int_equal(moetext_new(model, "target=de;draft=models/en-de-fr-es.bin", &t, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.message, "a draft requires a beam of 1; the beam is 8");
    assert_int_equal(moetext_new(model, "target=de;beam=1;draft=build/nothing.bin", &t, &e), MOE_ERROR_IO);
    assert_non_null(strstr(e.message, "build/nothing.bin"));
}

TEST(many_blank_lines_can_follow_a_sentence) {
    enum { LINES = 20000 };
    char *text = malloc(LINES + 64);
    assert_non_null(text);
    strcpy(text, "Where is my book?");
    memset(text + strlen(text), '\n', LINES);
    strcpy(text + 17 + LINES, "Yes.");
    moetext *t = translator(FAST ";target=de;batch=4");
    const char *const texts[] = { text, "Yes." };
    moetext_rows rows;
    assert_int_equal(moetext_translate_strings(t, texts, 2, NULL, NULL, &rows, NULL), MOE_OK);
    assert_true(strlen(rows.strings[0]) > LINES && strspn(strchr(rows.strings[0], '\n'), "\n") == LINES);
    free(text);
    moetext_free(t);
}

/* ==== 8. Processes ====================================================================================== */

static void *translate_in_thread(void *user) {
    moetext_rows rows;
    moetext *t = NULL;
    (void)user;
    if (moetext_new(model, FAST ";target=de", &t, NULL)) return NULL;
    char *result =
        moetext_translate_strings(t, sentences, SENTENCES, NULL, NULL, &rows, NULL) ? NULL : strdup(rows.bytes);
    moetext_free(t);
    return result;
}

typedef struct within {
    moetext *t;
    moe_status texts, rows;
    moe_error error;
    pthread_t thread;
} within;

static int pull_nothing(void *user, int wait, moetext_request *request) {
    (void)user, (void)wait, (void)request;
    return MOE_PULL_END;
}

static void *translate_too(void *user) {
    static const char *const text = "Good morning!";
    within *w = user;
    moetext_rows rows;
    w->texts = moetext_translate(w->t, pull_nothing, NULL, NULL, &w->error);
    w->rows = moetext_translate_strings(w->t, &text, 1, NULL, NULL, &rows, NULL);
    return NULL;
}

static int pull_once(void *user, int wait, moetext_request *request) {
    within *w = user;
    (void)wait;
    if (w->thread) return MOE_PULL_END;
    assert_int_equal(pthread_create(&w->thread, NULL, translate_too, w), 0);
    pthread_join(w->thread, NULL);
    *request = text_of("Good morning!");
    return MOE_PULL_REQUEST;
}

static void done_within(void *user, const moetext_result *r) {
    within *w = user, again = *w;
    translate_too(&again);
    assert_int_equal(again.texts, MOE_ERROR_ARGUMENT);
    snprintf(w->error.where, sizeof w->error.where, "%s", r->hypotheses[0].text);
}

/* A second call on a translator in use, from another thread or a callback, is an error without side effects. */
TEST(a_translator_in_use_refuses_other_calls) {
    const char *const paths[] = { "models/en-de-fr-es.bin" };
    moetext_model *models;
    assert_int_equal(moetext_models_open(paths, 1, NULL, &models, NULL), MOE_OK);
    for (int several = 0; several < 2; several++) {
        within w = { .texts = MOE_OK };
        assert_int_equal(moetext_new(several ? models : model, "source=en;target=de;" FAST, &w.t, NULL), MOE_OK);
        for (int round = 0; round < 2; round++) {
            w.thread = 0;
            assert_int_equal(moetext_translate(w.t, pull_once, done_within, &w, NULL), MOE_OK);
            assert_true(w.texts == MOE_ERROR_ARGUMENT && w.rows == MOE_ERROR_ARGUMENT);
            assert_non_null(strstr(w.error.message, "in use by another call"));
            assert_string_equal(w.error.where, "Guten Morgen!");
        }
        moetext_free(w.t);
    }
    moetext_model_close(models);
}

TEST(threads_share_a_model) {
    pthread_t threads[4];
    char *alone = translate_in_thread(NULL);
    assert_non_null(alone);
    for (size_t i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, translate_in_thread, NULL), 0);
    for (size_t i = 0; i < 4; i++) {
        void *result;
        assert_int_equal(pthread_join(threads[i], &result), 0);
        assert_non_null(result);
        assert_string_equal(result, alone);
        free(result);
    }
    free(alone);
}

TEST(a_child_process_creates_a_translator) {
    int status;
    moetext *t = translator(FAST ";target=de"); /* its threads do not exist in a child process */
    outcome h = run_one(t, sentences[0]);
    const pid_t child = fork();
    if (!child) {
        moetext_rows rows;
        moetext *own = NULL;
        const int wrong = moetext_new(model, FAST ";target=de", &own, NULL) ||
                          moetext_translate_strings(own, sentences, 1, NULL, NULL, &rows, NULL) ||
                          strcmp(rows.strings[0], h.texts[0]) != 0;
        moetext_free(own);
        _exit(wrong);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    moetext_free(t);
}

int main(void) { return run_all_tests(open_model, close_model); }
