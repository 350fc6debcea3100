/* test_live.c - tests live texts (tools/text/live.c) without a model: the test is the translator. */
#include "tools/text/live.h"

#include <stdio.h>
#include <string.h>

#include "tests/test.h"

TEST(words_are_counted_and_compared) {
    static const struct {
        const char *a, *b;
        size_t a_words, common, bytes;
    } cases[] = {
        { "", "", 0, 0, 0 },
        { "one", "one", 1, 1, 3 },
        { " one two ", " one two three", 2, 2, 8 },
        { "one two", "one twofold", 2, 1, 3 },
        { "one\ttwo", "one two", 2, 1, 3 },
        { "\xE6\x88\x91\xE5\x8E\xBB", "\xE6\x88\x91\xE5\x9C\xA8", 2, 1, 3 }, /* a word per character */
        { "PC\xE6\x88\x91", "PC\xE6\x88\x91", 2, 2, 5 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t words;
        const size_t a = strlen(cases[i].a), b = strlen(cases[i].b);
        assert_int_equal(text_live_words(cases[i].a, a), cases[i].a_words);
        assert_int_equal(text_live_common(cases[i].a, a, cases[i].b, b, &words), cases[i].bytes);
        assert_int_equal(words, cases[i].common);
    }
}

/* A text given, and what must happen. */
typedef struct step {
    const char *text;
    moetext_live_state state;
    const char *asked[4];  /* requests in order; "~..." for a quick one */
    const char *answer[4]; /* their translations; NULL for a failure */
    const char *shown;     /* with | after the stable part; "=..." if final */
} step;

static void run(moetext_live *live, const step *steps, size_t n) {
    moe_error e = { 0 };
    char text[256];
    for (size_t i = 0; i < n; i++) {
        const step *s = &steps[i];
        moetext_request q = { 0 };
        assert_int_equal(moetext_live_give(live, s->text, strlen(s->text), s->state, &e), MOE_OK);
        size_t k = 0;
        for (; moetext_live_next(live, &q); k++) {
            assert_true(k < 4);
            snprintf(text, sizeof text, "%s%.*s", q.quick ? "~" : "", (int)q.length, q.text);
            assert_string_equal(text, s->asked[k] ? s->asked[k] : "(no request)");
            const char *answer = s->answer[k];
            assert_int_equal(moetext_live_take(live, answer, answer ? strlen(answer) : 0, &e), MOE_OK);
        }
        assert_true(k == 4 || !s->asked[k]);
        const moetext_live_view v = moetext_live_shown(live);
        assert_int_equal(strlen(v.text), v.length);
        if (v.final) snprintf(text, sizeof text, "=%s", v.text);
        else snprintf(text, sizeof text, "%.*s|%s", (int)v.stable, v.text, v.text + v.stable);
        assert_string_equal(text, s->shown);
    }
}

static void run_new(const step *steps, size_t n) {
    moetext_live *live;
    assert_int_equal(moetext_live_new(&live, NULL), MOE_OK);
    run(live, steps, n);
    moetext_live_free(live);
}

#define RUN(...) run_new((step[]){ __VA_ARGS__ }, sizeof(step[]){ __VA_ARGS__ } / sizeof(step))

TEST(an_unfinished_sentence_waits_for_new_words) {
    RUN({ "a", 0, { 0 }, { 0 }, "|" }, { "a b", 0, { 0 }, { 0 }, "|" },
        { "a b c", 0, { "~a b c" }, { "A B C" }, "|A B" }, /* the last word is not shown */
        { "a b c", 0, { 0 }, { 0 }, "|A B" },              /* the same text: nothing to do */
        { "a b c d e", 0, { 0 }, { 0 }, "|A B" },
        { "a b c d e f", 0, { "~a b c d e f" }, { "A B C D E F" }, "|A B C D E" },
        { "a b c d e f", MOETEXT_FINAL, { "a b c d e f" }, { "A B C." }, "=A B C." },
        { "a b c d e f", MOETEXT_FINAL, { 0 }, { 0 }, "=A B C." });
}

TEST(shown_words_change_after_two_translations) {
    RUN({ "a b c", 0, { "~a b c" }, { "A B C" }, "|A B" },
        { "a b c d e f", 0, { "~a b c d e f" }, { "X B C D E F" }, "|A B" },
        { "a b c d e f g h i", 0, { "~a b c d e f g h i" }, { "A B C D E" }, "|A B C D" }, /* the doubt is over */
        { "a b c d e f g h i j k l", 0, { "~a b c d e f g h i j k l" }, { "X B Q" }, "|A B C D" },
        { "a b c d e f g h i j k l m n o", 0, { "~a b c d e f g h i j k l m n o" }, { "Y B C D" }, "|Y B C" });
}

TEST(a_shorter_translation_takes_no_word_away) {
    RUN({ "a b c", 0, { "~a b c" }, { "A B C" }, "|A B" }, { "a b c d e f", 0, { "~a b c d e f" }, { "A B" }, "|A B" });
}

TEST(a_pause_shows_all_words) {
    RUN({ "a b c", 0, { "~a b c" }, { "A B C" }, "|A B" }, { "a b c d", 0, { 0 }, { 0 }, "|A B" },
        { "a b c d", MOETEXT_PAUSED, { "~a b c d" }, { "X B C D" }, "|X B C D" },
        { "a b c d", MOETEXT_PAUSED, { 0 }, { 0 }, "|X B C D" });
}

TEST(finished_sentences_are_translated_once) {
    RUN({ "It rains. So", 0, { "It rains." }, { "Es regnet." }, "Es regnet.| " },
        { "It rains. So I stay", 0, { "~So I stay" }, { "Also bleibe ich" }, "Es regnet.| Also bleibe" },
        { "It rains. So I stay. ", 0, { "So I stay." }, { "Also bleibe ich." }, "Es regnet. Also bleibe ich.|" },
        { "It rains. So I stay. ", MOETEXT_FINAL, { "It rains. So I stay. " }, { "E. A. " }, "=E. A. " });
    RUN({ "It rains.", 0, { "It rains." }, { "Es regnet." }, "Es regnet.|" }, /* its translation is that of the text */
        { "It rains.", MOETEXT_FINAL, { 0 }, { 0 }, "=Es regnet." });
    RUN({ "See moe.", 0, { "See moe." }, { "Siehe moe." }, "Siehe moe.|" }, /* the sentence continues */
        { "See moe.c", 0, { 0 }, { 0 }, "|Siehe moe." },
        { "See moe.c or so", 0, { "~See moe.c or so" }, { "Siehe moe.c oder so" }, "|Siehe moe." },
        { "See moe.c or so with Mr. ", 0, { 0 }, { 0 }, "|Siehe moe." },
        { "See moe.c or so with Mr. Xu",
          0,
          { "~See moe.c or so with Mr. Xu" },
          { "Siehe moe.c oder so" },
          "|Siehe moe.c oder" });
}

TEST(lines_and_blanks_remain) {
    RUN({ " One.\n\n  Two.", 0, { "One.", "Two." }, { "Eins.", "Zwei." }, " Eins.\n\n  Zwei.|" },
        { " One.\n\n  Two.\nAnd three",
          MOETEXT_PAUSED,
          { "~And three" },
          { "Und drei" },
          " Eins.\n\n  Zwei.|\nUnd drei" },
        { " One.\n\n  Six.\nAnd three", MOETEXT_PAUSED, { "Six." }, { "Sechs." }, " Eins.\n\n  Sechs.|\nUnd drei" },
        { " One.\nFive.\n  Six.\nAnd three",
          MOETEXT_PAUSED,
          { "Five." },
          { "F\xC3\xBCnf." },
          " Eins.\nF\xC3\xBCnf.\n  Sechs.|\nUnd drei" },
        { " One.\nAnd three", MOETEXT_PAUSED, { 0 }, { 0 }, " Eins.|\nUnd drei" }, { "", 0, { 0 }, { 0 }, "|" },
        { "One.", 0, { "One." }, { "Eins." }, "Eins.|" });
}

/* Return how many of `n` numbers differ from those before, without equal ones at both ends. */
static size_t changes(const unsigned *now, size_t n, const unsigned *before, size_t n_before) {
    size_t first = 0, last = 0;
    while (first < n && first < n_before && now[first] == before[first]) first++;
    while (last < n - first && last < n_before - (first < n_before ? first : n_before) &&
           now[n - 1 - last] == before[n_before - 1 - last])
        last++;
    return n - first - last;
}

TEST(sentences_around_a_change_are_not_translated_again) {
    char text[300], wanted[300], answer[8];
    unsigned numbers[2][8] = { { 0 } };
    size_t lengths[2] = { 0, 0 };
    moetext_live *live;
    moetext_request q = { 0 };
    uint32_t random = 1;
    assert_int_equal(moetext_live_new(&live, NULL), MOE_OK);
    for (int round = 0; round < 2000; round++) {
        unsigned *now = numbers[round % 2];
        size_t n = 1 + ((random = random * 1664525u + 1013904223u) >> 24) % 8, asks = 0, at = 0;
        const size_t same = (random >> 16) % 8, from = (random >> 8) % 3;
        for (size_t i = 0; i < n; i++) {
            now[i] = (unsigned)(i < same ? i : i + from);
            at += (size_t)snprintf(text + at, sizeof text - at, "%sW%u.", i ? " " : "", now[i]);
        }
        lengths[round % 2] = n;
        snprintf(wanted, sizeof wanted, "%s", text);
        for (size_t i = 0; i < at; i++)
            if (wanted[i] == 'W') wanted[i] = 'T';
        assert_int_equal(moetext_live_give(live, text, at, 0, NULL), MOE_OK);
        for (; moetext_live_next(live, &q); asks++) {
            assert_int_equal(q.quick, 0);
            snprintf(answer, sizeof answer, "T%.*s", (int)q.length - 1, q.text + 1);
            assert_int_equal(moetext_live_take(live, answer, strlen(answer), NULL), MOE_OK);
        }
        const moetext_live_view v = moetext_live_shown(live);
        assert_string_equal(v.text, wanted);
        assert_int_equal(v.stable, v.length);
        assert_true(asks <= changes(now, n, numbers[(round + 1) % 2], lengths[(round + 1) % 2]));
    }
    moetext_live_free(live);
}

TEST(incomplete_words_are_not_translated_while_someone_types) {
    RUN({ "a b", 0, { 0 }, { 0 }, "|" }, { "a b ", 0, { 0 }, { 0 }, "|" }, { "a b c", 0, { 0 }, { 0 }, "|" },
        { "a b co", 0, { 0 }, { 0 }, "|" }, { "a b co ", 0, { "~a b co" }, { "A B CO" }, "|A B" },
        { "a b co d", MOETEXT_PAUSED, { "~a b co d" }, { "A B CO D" }, "|A B CO D" });
}

TEST(long_sentences_need_more_new_words) {
    char text[200] = "", more[220];
    for (int i = 0; i < 40; i++) strcat(text, "a ");
    snprintf(more, sizeof more, "~%s", text);
    more[strlen(more) - 1] = 0;
    RUN({ text, 0, { more }, { "A A" }, "|A" });
    moetext_live *live;
    moetext_request q = { 0 };
    assert_int_equal(moetext_live_new(&live, NULL), MOE_OK);
    for (int words = 36; words <= 40; words++) { /* 5 of 40 words must be new */
        assert_int_equal(moetext_live_give(live, text, (size_t)words * 2, 0, NULL), MOE_OK);
        const int asks = moetext_live_next(live, &q);
        assert_int_equal(asks, words == 36);
        if (asks) moetext_live_take(live, "A A", 3, NULL);
    }
    snprintf(more, sizeof more, "%sb ", text);
    assert_int_equal(moetext_live_give(live, more, strlen(more), 0, NULL), MOE_OK);
    assert_int_equal(moetext_live_next(live, &q), 1);
    moetext_live_free(live);
}

TEST(a_newer_text_may_come_before_a_translation) {
    moetext_live *live;
    moetext_request q = { 0 };
    assert_int_equal(moetext_live_new(&live, NULL), MOE_OK);
    moetext_live_give(live, "a b c", 5, 0, NULL);
    assert_int_equal(moetext_live_next(live, &q), 1);
    moetext_live_give(live, "a b c d", 7, 0, NULL); /* the same sentence */
    moetext_live_take(live, "A B C", 5, NULL);
    assert_string_equal(moetext_live_shown(live).text, "A B");
    moetext_live_give(live, "a b c d e f g", 13, 0, NULL);
    assert_int_equal(moetext_live_next(live, &q), 1);
    assert_string_equal(q.draft, "A B C");
    moetext_live_give(live, "z", 1, 0, NULL); /* another sentence */
    moetext_live_take(live, "A B C D E F", 11, NULL);
    moetext_live_give(live, "It rains.", 9, MOETEXT_FINAL, NULL);
    assert_int_equal(moetext_live_next(live, &q), 1);
    moetext_live_give(live, "It rains today.", 15, MOETEXT_FINAL, NULL);
    moetext_live_take(live, "Es regnet.", 10, NULL);
    assert_int_equal(moetext_live_shown(live).final, 0);
    assert_int_equal(moetext_live_next(live, &q), 1);
    assert_int_equal(q.quick, 0);
    moetext_live_take(live, "Es regnet heute.", 16, NULL);
    assert_string_equal(moetext_live_shown(live).text, "Es regnet heute.");
    assert_int_equal(moetext_live_shown(live).final, 1);
    moetext_live_free(live);
}

TEST(failures_and_unusable_texts) {
    moetext_live *live;
    moe_error e = { 0 };
    static char large[(1 << 20) + 1];
    assert_int_equal(moetext_live_new(&live, NULL), MOE_OK);
    assert_int_equal(moetext_live_give(live, "a\xff", 2, 0, &e), MOE_ERROR_ARGUMENT);
    assert_int_equal(moetext_live_give(live, "a\0b", 3, 0, &e), MOE_ERROR_ARGUMENT);
    memset(large, 'a', sizeof large);
    assert_int_equal(moetext_live_give(live, large, sizeof large, 0, &e), MOE_ERROR_LIMIT);
    moetext_live_free(live);
    moetext_live_free(NULL);
    RUN({ "a b c", 0, { "~a b c" }, { NULL }, "|" }, { "A b. C", 0, { "A b." }, { NULL }, "|" },
        { "A b. C", MOETEXT_FINAL, { "A b. C" }, { NULL }, "=" });
}

int main(void) { return run_all_tests(NULL, NULL); }
