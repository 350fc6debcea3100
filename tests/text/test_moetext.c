/* test_moetext.c - libmoetext through its public header, with the shipped model.
 *
 *   1. Options      names, values, errors
 *   2. Models       what can be asked of one, what is refused
 *   3. Texts        lines, sentences, capitals, bad bytes
 *   4. Results      hypotheses, scores, prefixes, links
 *   5. Rows         many texts at once
 *   6. Stopping     from anywhere
 *   7. Processes    threads and forks
 */
#define _POSIX_C_SOURCE 200809L

#include "tools/text/moetext.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define FAST "beam=2;rerank=0;threads=2"

static moetext_model *model;

static int open_model(void **state) {
    moe_error e;
    (void)state;
    if (!moetext_model_open("models/en-de-fr-es.bin", NULL, &model, &e)) return 0;
    fprintf(stderr, "%s\n", e.message);
    return -1;
}

static int close_model(void **state) {
    (void)state;
    moetext_model_close(model);
    return 0;
}

static moetext *translator(const char *options) {
    moetext *t = NULL;
    moe_error e = { .code = MOE_OK };
    if (moetext_new(model, options, &t, &e)) fail_msg("%s: %s", options, e.message);
    return t;
}

/* What became of a text. */
typedef struct heard {
    size_t times, n, parts, n_ids, n_links, n_source_ids;
    moe_status status;
    unsigned flags;
    char message[256], texts[4][512];
    float score[4], logprob[4];
    float sum; /* of the logarithms of the best */
    int32_t ids[256];
    moetext_link links[256];
} heard;

typedef struct feed {
    const moetext_request *requests;
    size_t n, next;
    heard *heard;
    moetext *cancel;    /* when the first result has come; NULL: never */
    char copy[1 << 16]; /* of a text, gone when the next one is pulled */
} feed;

static int pull(void *user, int wait, moetext_request *request) {
    feed *f = user;
    (void)wait;
    memset(f->copy, 0xff, sizeof f->copy);
    if (f->next == f->n) return MOE_PULL_END;
    *request = f->requests[f->next];
    if (request->length && request->length <= sizeof f->copy)
        request->text = memcpy(f->copy, request->text, request->length);
    request->user = &f->heard[f->next++];
    return MOE_PULL_REQUEST;
}

static void done(void *user, const moetext_result *r) {
    feed *f = user;
    heard *h = r->user;
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

static moe_status run(moetext *t, const moetext_request *requests, size_t n, heard *out) {
    static feed f;
    f = (feed){ .requests = requests, .n = n, .heard = out };
    memset(out, 0, n * sizeof *out);
    return moetext_translate(t, pull, done, &f, NULL);
}

static moetext_request text_of(const char *text) { return (moetext_request){ .text = text, .length = strlen(text) }; }

/* One text, alone. */
static heard say(moetext *t, const char *text) {
    const moetext_request request = text_of(text);
    heard h;
    assert_int_equal(run(t, &request, 1, &h), MOE_OK);
    assert_int_equal(h.times, 1);
    return h;
}

/* ==== 1. Options ======================================================================================== */

static void options_list_themselves(void **state) {
    size_t n = 0;
    (void)state;
    for (moetext_option_info o; (o = moetext_option(n)).name; n++) {
        assert_true(*o.values && *o.help && strlen(o.help) < 100 && !strchr(o.help, '\n'));
        for (size_t i = 0; i < n; i++) assert_string_not_equal(moetext_option(i).name, o.name);
    }
    assert_true(n > 20);
    assert_null(moetext_option(SIZE_MAX).name);
}

static void a_bad_option_is_named(void **state) {
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
    (void)state;
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

static void options_may_be_written_loosely(void **state) {
    (void)state;
    moetext *a = translator(" target = de ;; beam=2 ; rerank=0;threads=1;copy=1;max_len=40; "),
            *b = translator("threads=1;target=de;beam=2;rerank=0;max-len=40");
    assert_string_equal(say(a, "Good morning!").texts[0], say(b, "Good morning!").texts[0]);
    moetext_free(a);
    moetext_free(b);
}

/* ==== 2. Models ========================================================================================= */

static void a_model_tells_what_it_knows(void **state) {
    size_t length;
    (void)state;
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
    assert_string_equal(moetext_model_meta(model, "decode.beam"), ""); /* a number */
    assert_int_equal(moe_model_get_kind(moetext_model_engine(model)), MOE_MODEL_TRANSLATION);
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

static void other_models_are_refused(void **state) {
    moetext_model *m = NULL;
    moe_error e;
    (void)state;
    assert_int_equal(moetext_model_open("models/lm-en.bin", NULL, &m, &e), MOE_ERROR_UNSUPPORTED);
    assert_int_equal(moetext_model_open("models/digits.bin", NULL, &m, &e), MOE_ERROR_UNSUPPORTED);
    assert_int_equal(moetext_model_open("no/such/file", NULL, &m, &e), MOE_ERROR_IO);
    assert_int_equal(moetext_model_open("Makefile", NULL, &m, &e), MOE_ERROR_FORMAT);
    assert_int_equal(moetext_model_open("models/en-de-fr-es.bin", "beam=x", &m, &e), MOE_ERROR_ARGUMENT);
    assert_int_equal(moetext_model_open("tests/golden/model-base.bin", NULL, &m, &e), MOE_ERROR_UNSUPPORTED);
    assert_non_null(strstr(e.message, "form=ids"));
    assert_null(m);
    moetext_model_close(NULL);
    moetext_free(NULL);
}

static void a_model_without_a_tokeniser_takes_ids(void **state) {
    moetext_model *m;
    moetext *t;
    moetext_rows rows;
    static const char *const texts[] = { "5 6 7", "5 six" };
    (void)state;
    assert_int_equal(moetext_model_open("tests/golden/model-base.bin", "form=ids", &m, NULL), MOE_OK);
    assert_int_equal(moetext_new(m, "form=ids;threads=1", &t, NULL), MOE_OK);
    assert_int_equal(moetext_translate_strings(t, texts, 2, NULL, moetext_model_language(m, 0), &rows, NULL), MOE_OK);
    assert_int_equal(rows.statuses[0], MOE_OK);
    assert_true(strspn(rows.strings[0], "0123456789 ") == strlen(rows.strings[0]) && *rows.strings[0]);
    assert_int_equal(rows.statuses[1], MOE_ERROR_ARGUMENT);
    moetext_free(t);
    moetext_model_close(m);
}

/* ==== 3. Texts ========================================================================================== */

static const char *const sentences[] = { "Where is my book?", "Thank you!", "She is reading a book.",
                                         "I have lost my keys." };
enum { SENTENCES = sizeof sentences / sizeof *sentences };

static void lines_of_a_text_stay_lines(void **state) {
    char text[512], expected[2048];
    (void)state;
    moetext *t = translator(FAST ";target=de");
    heard alone[SENTENCES];
    for (size_t i = 0; i < SENTENCES; i++) alone[i] = say(t, sentences[i]);
    snprintf(text, sizeof text, "\n%s\r\n\n  \n%s\n", sentences[0], sentences[1]);
    snprintf(expected, sizeof expected, "\n%s\r\n\n  \n%s\n", alone[0].texts[0], alone[1].texts[0]);
    heard h = say(t, text);
    assert_string_equal(h.texts[0], expected);
    assert_int_equal(h.flags, MOETEXT_SPLIT);
    assert_int_equal(h.parts, 6);
    assert_int_equal(h.n_ids, alone[0].n_ids + alone[1].n_ids);
    assert_true(fabsf(h.score[0] - alone[0].score[0] - alone[1].score[0]) < 1e-4f);
    moetext_free(t);
}

static void long_lines_go_sentence_by_sentence(void **state) {
    char text[512] = "", expected[2048] = "";
    (void)state;
    moetext *t = translator(FAST ";target=de;split=30"), *whole = translator(FAST ";target=de;split=0");
    for (size_t i = 0; i < SENTENCES; i++) {
        snprintf(text + strlen(text), sizeof text - strlen(text), i ? "  %s" : "%s", sentences[i]);
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), i ? "  %s" : "%s",
                 say(t, sentences[i]).texts[0]);
    }
    heard h = say(t, text);
    assert_string_equal(h.texts[0], expected);
    assert_int_equal(h.parts, SENTENCES);
    assert_int_equal(h.flags, MOETEXT_SPLIT);
    h = say(whole, text);
    assert_int_equal(h.parts, 1);
    assert_int_equal(h.flags, 0);
    moetext_free(t);
    moetext_free(whole);
}

static void what_is_longer_than_the_model_reads_goes_in_parts(void **state) {
    enum { RUN = 20000 };
    static char text[RUN + 3000];
    (void)state;
    moetext *t = translator(FAST ";target=de;max-len=60");
    memset(text, 'Q', RUN);
    for (int i = 0; i < 20; i++) strcat(text, i ? ", and the house is very old" : " The house is red");
    const moetext_request requests[] = { text_of(text), text_of(sentences[0]) };
    heard h[2];
    assert_int_equal(run(t, requests, 2, h), MOE_OK);
    assert_int_equal(h[0].status, MOE_OK);
    assert_true(h[0].parts > 3 && !(h[0].flags & (MOETEXT_TRUNCATED | MOETEXT_INCOMPLETE)));
    assert_non_null(strstr(h[0].message, "longer than the 58 tokens"));
    assert_memory_equal(h[0].texts[0], text, sizeof h[0].texts[0] - 1); /* `heard` keeps no more */
    assert_string_equal(h[1].message, "");
    moetext_free(t);
}

static void capitals_come_out_in_capitals(void **state) {
    (void)state;
    moetext *t = translator(FAST ";target=de"), *plain = translator(FAST ";target=de;capitals=0");
    assert_string_equal(say(t, "WHERE IS MY BOOK?").texts[0], "WO IST MEIN BUCH?");
    assert_string_not_equal(say(plain, "WHERE IS MY BOOK?").texts[0], "WO IST MEIN BUCH?");
    moetext_free(t);
    moetext_free(plain);
}

static void nothing_is_translated_into_nothing(void **state) {
    static const char *const blank[] = { "", " ", "\t \t", "\n\n", " \r\n " };
    (void)state;
    moetext *t = translator(FAST ";target=de");
    for (size_t i = 0; i < sizeof blank / sizeof *blank; i++) {
        heard h = say(t, blank[i]);
        assert_int_equal(h.status, MOE_OK);
        assert_true(h.flags & MOETEXT_BLANK);
        assert_int_equal(h.n, 1);
        assert_string_equal(h.texts[0], blank[i]);
    }
    moetext *all = translator(FAST ";target=de;protect=0"); /* the model writes all: there is none */
    assert_string_equal(say(all, "\t\n ").texts[0], "\n");
    moetext_free(all);
    assert_false(say(t, " \nWhere is my book?").flags & MOETEXT_BLANK);
    moetext_request none = { 0 }; /* a NULL text of length 0 */
    heard h;
    assert_int_equal(run(t, &none, 1, &h), MOE_OK);
    assert_int_equal(h.n, 1);
    moetext_free(t);
}

static void what_cannot_be_used_has_a_status_of_its_own(void **state) {
    static char words[4000];
    (void)state;
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
        "task", "not UTF-8",          "part 2 of 3: invalid UTF-8", ""
    };
    enum { N = sizeof requests / sizeof *requests };
    heard h[N];
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

static void a_language_must_be_said(void **state) {
    moetext_rows rows;
    moe_error e;
    (void)state;
    moetext *t = translator(FAST);
    const moetext_request requests[] = { { .text = "Hello", .length = 5 },
                                         { .text = "Hello", .length = 5, .target = "fr" } };
    heard h[2];
    assert_int_equal(run(t, requests, 2, h), MOE_OK);
    assert_int_equal(h[0].status, MOE_ERROR_ARGUMENT);
    assert_int_equal(h[1].status, MOE_OK);
    assert_int_equal(moetext_translate_strings(t, sentences, 1, NULL, NULL, &rows, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "target");
    assert_int_equal(moetext_translate_strings(t, sentences, 1, NULL, "ES", &rows, &e), MOE_OK);
    moetext_free(t);
}

/* ==== 4. Results ======================================================================================== */

static void hypotheses_have_scores_and_tokens(void **state) {
    (void)state;
    moetext *t = translator("beam=4;nbest=3;rerank=0;threads=2;target=de;split=0");
    for (size_t i = 0; i < SENTENCES; i++) {
        heard h = say(t, sentences[i]);
        assert_int_equal(h.n, 3);
        assert_true(h.score[0] >= h.score[1] && h.score[1] >= h.score[2]);
        assert_true(fabsf(h.sum - h.logprob[0]) < 1e-3f);
        assert_true(h.n_source_ids > 1 && h.n_ids > 1);
        const moetext_request score = { .text = sentences[i],
                                        .length = strlen(sentences[i]),
                                        .task = MOETEXT_SCORE,
                                        .given = h.texts[0],
                                        .given_length = strlen(h.texts[0]) };
        heard scored;
        assert_int_equal(run(t, &score, 1, &scored), MOE_OK);
        assert_int_equal(scored.n, 1);
        assert_string_equal(scored.texts[0], h.texts[0]);
        if (scored.n_ids == h.n_ids && memcmp(scored.ids, h.ids, h.n_ids * sizeof *h.ids) == 0)
            assert_memory_equal(&scored.logprob[0], &h.logprob[0], sizeof(float));
    }
    moetext_free(t);
}

static void a_translation_begins_as_it_was_told(void **state) {
    (void)state;
    moetext *t = translator(FAST ";target=de");
    const moetext_request request = { .text = "She is reading a book.",
                                      .length = 22,
                                      .task = MOETEXT_PREFIX,
                                      .given = "Ein Buch",
                                      .given_length = 8 };
    heard h;
    assert_int_equal(run(t, &request, 1, &h), MOE_OK);
    assert_int_equal(strncmp(h.texts[0], "Ein Buch", 8), 0);
    assert_true(strlen(h.texts[0]) > 8);
    moetext_free(t);
}

/* The bytes that a link names are words of both texts. */
static void check_links(const char *text, const heard *h) {
    assert_true(h->n_links > 0 && h->n_links <= 256);
    for (size_t i = 0; i < h->n_links; i++) {
        const moetext_link *l = &h->links[i];
        assert_true(l->source_begin < l->source_end && l->source_end <= strlen(text));
        assert_true(l->target_begin < l->target_end && l->target_end <= strlen(h->texts[0]));
        assert_true(!l->source_begin || strchr(" \n", text[l->source_begin - 1]));
        assert_true(strchr(" \n", text[l->source_end]) != NULL); /* or the NUL */
        assert_true(!l->target_begin || strchr(" \n", h->texts[0][l->target_begin - 1]));
        assert_true(strchr(" \n", h->texts[0][l->target_end]) != NULL);
        if (i) assert_true(h->links[i - 1].source_begin <= l->source_begin);
    }
}

static int has_link(const char *text, const heard *h, const char *source, const char *target) {
    for (size_t i = 0; i < h->n_links; i++) {
        const moetext_link *l = &h->links[i];
        if (l->source_end - l->source_begin == strlen(source) && l->target_end - l->target_begin == strlen(target) &&
            memcmp(text + l->source_begin, source, strlen(source)) == 0 &&
            memcmp(h->texts[0] + l->target_begin, target, strlen(target)) == 0)
            return 1;
    }
    return 0;
}

/* The same mechanism as moe-translate's, which tests/programs/test_keeping.py measures. */
static void what_is_not_language_is_kept(void **state) {
    static const char text[] = "  Hello {name}, open <b>the house</b> at 12:30!\n\tWhere is %s?";
    char path[] = "/tmp/moetext-XXXXXX", options[256];
    const int fd = mkstemp(path);
    (void)state;
    assert_true(fd >= 0 && write(fd, "house\tGebaeude\n", 15) == 15);
    close(fd);
    snprintf(options, sizeof options, FAST ";target=de;glossary=%s", path);
    moetext *kept = translator(options), *bare = translator(FAST ";target=de;protect=0");
    heard h = say(kept, text), without = say(bare, text);
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
    assert_string_equal(say(messages, message).texts[0], message);
    assert_non_null(strstr(say(messages, message).message, "ICU message"));
    moetext_free(messages);
}

static void words_are_linked(void **state) {
    static const char text[] = "Where is my book? WHERE IS MY BOOK?\n\n  I have lost my keys.  She is reading a book.";
    (void)state;
    moetext *one = translator(FAST ";target=de;source=en;alignment=1;split=20;batch=1"),
            *many = translator(FAST ";target=de;alignment=1;split=20;source=en;nbest=2"),
            *none = translator(FAST ";target=de;split=20");
    heard h = say(one, text), again = say(many, text), bare = say(none, text);
    assert_int_equal(bare.n_links, 0);
    assert_string_equal(h.texts[0], bare.texts[0]);
    check_links(text, &h);
    assert_true(has_link(text, &h, "book?", "Buch?") && has_link(text, &h, "Where", "Wo"));
    assert_true(has_link(text, &h, "BOOK?", "BUCH?") && has_link(text, &h, "reading", "liest"));
    assert_int_equal(h.n_links, again.n_links);
    assert_memory_equal(h.links, again.links, h.n_links * sizeof *h.links);
    moetext_request requests[40];
    heard all[40];
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

/* ==== 5. Rows =========================================================================================== */

static void rows_are_what_texts_are(void **state) {
    static const char bytes[] = "Where is my book?Thank you!caf\xe9She is reading a book.";
    static const int64_t offsets[] = { 0, 17, 27, 27, 31, 53 };
    static const uint8_t all = 0x1F, some = 0x1D;
    moetext_rows rows;
    (void)state;
    moetext *t = translator(FAST ";target=de;batch=2");
    char *expected[5];
    expected[0] = strdup(say(t, sentences[0]).texts[0]);
    expected[1] = strdup(say(t, sentences[1]).texts[0]);
    expected[2] = strdup("");
    expected[3] = strdup("");
    expected[4] = strdup(say(t, sentences[2]).texts[0]);
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

static void rows_do_not_depend_on_batch_or_threads(void **state) {
    const char *texts[64];
    moetext_rows a, b;
    (void)state;
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

/* ==== 6. Stopping ======================================================================================= */

static void *cancel_soon(void *user) {
    const struct timespec t = { 0, 30000000 };
    nanosleep(&t, NULL);
    moetext_cancel(user);
    return NULL;
}

static void a_translator_can_be_cancelled_and_used_again(void **state) {
    enum { N = 2000 };
    static const char *texts[N];
    moetext_rows rows;
    moe_error e;
    pthread_t thread;
    (void)state;
    moetext *t = translator("target=de;source=en;batch=8;threads=2;alignment=1");
    heard before = say(t, sentences[0]);
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
    moetext_cancel(t); /* none is running */
    assert_int_equal(moetext_translate_strings(t, texts, 1, NULL, NULL, &rows, &e), MOE_ERROR_CANCELLED);
    moetext_cancel(t);
    moetext_forgive(t);
    heard h = say(t, sentences[0]);
    assert_string_equal(h.texts[0], before.texts[0]);
    assert_int_equal(h.n_links, before.n_links);
    moetext_free(t);
}

static int pull_then_cancel(void *user, int wait, moetext_request *request) {
    feed *f = user;
    return f->next < 3 ? pull(user, wait, request) : MOE_PULL_CANCEL;
}

static void callbacks_can_cancel(void **state) {
    moetext_request requests[SENTENCES];
    heard h[SENTENCES];
    static feed f;
    (void)state;
    moetext *t = translator(FAST ";target=de;batch=1");
    for (size_t i = 0; i < SENTENCES; i++) requests[i] = text_of(sentences[i]);
    f = (feed){ .requests = requests, .n = SENTENCES, .heard = h, .cancel = t };
    memset(h, 0, sizeof h);
    assert_int_equal(moetext_translate(t, pull, done, &f, NULL), MOE_ERROR_CANCELLED);
    assert_int_equal(h[0].times + h[1].times + h[2].times + h[3].times, 1);
    f = (feed){ .requests = requests, .n = SENTENCES, .heard = h };
    assert_int_equal(moetext_translate(t, pull_then_cancel, done, &f, NULL), MOE_ERROR_CANCELLED);
    assert_int_equal(run(t, requests, SENTENCES, h), MOE_OK);
    for (size_t i = 0; i < SENTENCES; i++) assert_int_equal(h[i].times, 1);
    moetext_free(t);
}

/* ==== 7. Processes ====================================================================================== */

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

static void threads_share_a_model(void **state) {
    pthread_t threads[4];
    char *alone = translate_in_thread(NULL);
    (void)state;
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

static void a_child_makes_its_own_translator(void **state) {
    int status;
    (void)state;
    moetext *t = translator(FAST ";target=de"); /* its threads are not the child's */
    heard h = say(t, sentences[0]);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_list_themselves),
        cmocka_unit_test(a_bad_option_is_named),
        cmocka_unit_test(options_may_be_written_loosely),
        cmocka_unit_test(a_model_tells_what_it_knows),
        cmocka_unit_test(other_models_are_refused),
        cmocka_unit_test(a_model_without_a_tokeniser_takes_ids),
        cmocka_unit_test(lines_of_a_text_stay_lines),
        cmocka_unit_test(long_lines_go_sentence_by_sentence),
        cmocka_unit_test(what_is_longer_than_the_model_reads_goes_in_parts),
        cmocka_unit_test(capitals_come_out_in_capitals),
        cmocka_unit_test(nothing_is_translated_into_nothing),
        cmocka_unit_test(what_cannot_be_used_has_a_status_of_its_own),
        cmocka_unit_test(a_language_must_be_said),
        cmocka_unit_test(hypotheses_have_scores_and_tokens),
        cmocka_unit_test(a_translation_begins_as_it_was_told),
        cmocka_unit_test(what_is_not_language_is_kept),
        cmocka_unit_test(words_are_linked),
        cmocka_unit_test(rows_are_what_texts_are),
        cmocka_unit_test(rows_do_not_depend_on_batch_or_threads),
        cmocka_unit_test(a_translator_can_be_cancelled_and_used_again),
        cmocka_unit_test(callbacks_can_cancel),
        cmocka_unit_test(threads_share_a_model),
        cmocka_unit_test(a_child_makes_its_own_translator),
    };
    return cmocka_run_group_tests_name("moetext", tests, open_model, close_model);
}
