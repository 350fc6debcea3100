/* test_attempt.c - tests which step tools/text/attempt.h chooses after each verdict. No model is needed. */
#include "tools/text/attempt.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "tests/test.h"

static text_attempt next(text_attempt a, unsigned reasons) {
    return text_attempt_next(a, &(text_verdict){ .reasons = reasons, .half = (reasons & TEXT_PART_LOST) != 0 });
}

static int is_final(text_step step) { return step >= TEXT_ACCEPT; }

TEST(each_reason_leads_to_its_steps) {
    static const struct {
        unsigned reason;
        text_attempt first;
        text_step steps[4];
        const char *note;
    } cases[] = {
        { 0, { 0 }, { TEXT_ACCEPT }, NULL },
        { TEXT_UNFIT, { 0 }, { TEXT_ACCEPT }, NULL },
        { TEXT_UNFIT,
          { .step = TEXT_BIND_TERMS, .terms = TEXT_TERMS_BOUND },
          { TEXT_REBIND_TERMS, TEXT_ACCEPT },
          NULL },
        { TEXT_UNFIT,
          { .step = TEXT_REPLACE_TERMS, .terms = TEXT_TERMS_REPLACED },
          { TEXT_REBIND_TERMS, TEXT_ACCEPT },
          NULL },
        { TEXT_UNFIT, { .step = TEXT_PLACEHOLDERS, .placeholders = 1 }, { TEXT_KEEP_SOURCE }, "left untranslated" },
        { TEXT_UNFIT, { .step = TEXT_VARY, .variant = 1, .variants = 2 }, { TEXT_VARY, TEXT_BEST, TEXT_ACCEPT }, NULL },
        { TEXT_LOOPED, { 0 }, { TEXT_RESUME, TEXT_RESUME, TEXT_ACCEPT }, "repeat itself" },
        { TEXT_LOOPED, { .resumed = TEXT_RESUMES }, { TEXT_ACCEPT }, "repeat itself" },
        { TEXT_PHRASE_DONE, { .phrases = TEXT_MAX_PHRASES - 2 }, { TEXT_PHRASE, TEXT_PHRASE, TEXT_ACCEPT }, NULL },
        { TEXT_TERM_MISSING,
          { .looked = TEXT_MAX_LOOKUPS - 2 },
          { TEXT_LOOK_UP_TERM, TEXT_LOOK_UP_TERM, TEXT_BIND_TERMS, TEXT_ACCEPT },
          NULL },
        { TEXT_UNFIT,
          { .step = TEXT_LOOK_UP_TERM, .looked = 1 },
          { TEXT_BIND_TERMS, TEXT_REBIND_TERMS, TEXT_ACCEPT },
          NULL },
        { TEXT_TERM_BESIDE, { .terms = TEXT_TERMS_BOUND }, { TEXT_EDIT_TERMS, TEXT_ACCEPT }, NULL },
        { TEXT_TERM_DOUBLED, { .terms = TEXT_TERMS_BOUND }, { TEXT_REPLACE_TERMS, TEXT_ACCEPT }, NULL },
        { TEXT_TERM_WORSE, { .terms = TEXT_TERMS_REPLACED }, { TEXT_REBIND_TERMS, TEXT_ACCEPT }, NULL },
        { TEXT_PLACEHOLDER_LOST, { 0 }, { TEXT_PLACEHOLDERS, TEXT_KEEP_SOURCE }, "left untranslated" },
        { TEXT_SIGN_LOST, { 0 }, { TEXT_KEEP_SOURCE }, "left untranslated" },
        { TEXT_PART_LOST, { 0 }, { TEXT_HALVE }, NULL },
        { TEXT_WORD_LOST, { 0 }, { TEXT_KEEP_SOURCE }, "cannot translate" },
        { TEXT_WORD_LOST,
          { .sentences = 2 },
          { TEXT_AS_SENTENCE, TEXT_AS_SENTENCE, TEXT_KEEP_SOURCE },
          "cannot translate" },
        { TEXT_UNFIT, { .step = TEXT_AS_SENTENCE, .sentences = 1 }, { TEXT_KEEP_SOURCE }, "cannot translate" },
        { TEXT_FIGURE_LOST, { 0 }, { TEXT_HIDE_NUMBERS, TEXT_KEEP_SOURCE }, "a number was lost" },
        { TEXT_PLACEHOLDER_LOST,
          { .step = TEXT_HIDE_NUMBERS, .placeholders = TEXT_FOR_NUMBERS | TEXT_IN_BRACKETS },
          { TEXT_PLACEHOLDERS, TEXT_KEEP_SOURCE },
          "left untranslated" },
        { TEXT_UNFIT,
          { .step = TEXT_HIDE_NUMBERS, .placeholders = TEXT_FOR_NUMBERS },
          { TEXT_KEEP_SOURCE },
          "left untranslated" },
        { TEXT_BRACKET_LOST, { 0 }, { TEXT_KEEP_SOURCE }, "a bracket" },
        { TEXT_BEGINNING_LOST, { .held = 2 }, { TEXT_GIVE_MORE, TEXT_GIVE_MORE, TEXT_ACCEPT }, NULL },
        { TEXT_SIGN_MISSING, { 0 }, { TEXT_BIND_SIGNS, TEXT_ACCEPT }, NULL },
        { TEXT_NUMBER_MISSING, { 0 }, { TEXT_BIND_NUMBERS, TEXT_ACCEPT }, NULL },
        { TEXT_TERM_LACKING,
          { .placed = TEXT_MAX_STAGES - 2 },
          { TEXT_PLACE_TERMS, TEXT_PLACE_TERMS, TEXT_ACCEPT },
          NULL },
        { TEXT_EMPTY, { 0 }, { TEXT_FAIL }, "answer is empty" },
        { TEXT_SHORT, { 0 }, { TEXT_ACCEPT }, NULL },
        { TEXT_SHORT, { .variants = TEXT_CLOSED }, { TEXT_VARY, TEXT_BEST, TEXT_ACCEPT }, NULL },
        { TEXT_SHORT, { .variants = TEXT_LOWERED }, { TEXT_VARY, TEXT_VARY, TEXT_BEST, TEXT_ACCEPT }, NULL },
    };
    unsigned seen = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        text_attempt a = cases[i].first;
        seen |= cases[i].reason;
        for (size_t k = 0; !k || (a.step != TEXT_HALVE && !is_final(a.step)); k++) {
            a = next(a, cases[i].reason);
            if (a.step != cases[i].steps[k]) fail_msg("case %zu: step %zu is %d", i, k, (int)a.step);
        }
        if (cases[i].note ? !a.note || !strstr(a.note, cases[i].note) : a.note != NULL)
            fail_msg("case %zu: note %s", i, a.note ? a.note : "none");
    }
    assert_int_equal(seen, (1u << TEXT_REASONS) - 1);
}

TEST(the_first_of_several_reasons_decides) {
    static const struct {
        unsigned reasons;
        text_step step;
    } cases[] = { { TEXT_LOOPED | TEXT_SHORT | TEXT_PART_LOST, TEXT_RESUME },
                  { TEXT_LOOPED | TEXT_BEGINNING_LOST, TEXT_RESUME }, /* no tokens are withheld */
                  { TEXT_TERM_MISSING | TEXT_PLACEHOLDER_LOST, TEXT_LOOK_UP_TERM },
                  { TEXT_TERM_WORSE | TEXT_PLACEHOLDER_LOST, TEXT_REBIND_TERMS },
                  { TEXT_PLACEHOLDER_LOST | TEXT_PART_LOST, TEXT_PLACEHOLDERS },
                  { TEXT_PART_LOST | TEXT_SIGN_MISSING, TEXT_HALVE },
                  { TEXT_EMPTY | TEXT_SHORT, TEXT_FAIL } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(next((text_attempt){ .variants = TEXT_LOWERED }, cases[i].reasons).step, cases[i].step);
}

TEST(sequences_of_verdicts_lead_to_their_steps) {
    static const struct {
        unsigned reasons[8];
        text_step steps[8];
        text_terms terms;
        int placeholders, bound;
    } cases[] = {
        { { TEXT_TERM_MISSING, TEXT_UNFIT, TEXT_TERM_DOUBLED, TEXT_TERM_WORSE, TEXT_TERM_BESIDE, TEXT_TERM_BESIDE },
          { TEXT_LOOK_UP_TERM, TEXT_BIND_TERMS, TEXT_REPLACE_TERMS, TEXT_REBIND_TERMS, TEXT_EDIT_TERMS, TEXT_ACCEPT },
          TEXT_TERMS_EDITED,
          0,
          0 },
        { { TEXT_TERM_MISSING, TEXT_UNFIT, TEXT_TERM_DOUBLED, TEXT_UNFIT, 0 },
          { TEXT_LOOK_UP_TERM, TEXT_BIND_TERMS, TEXT_REPLACE_TERMS, TEXT_REBIND_TERMS, TEXT_ACCEPT },
          TEXT_TERMS_REBOUND,
          0,
          0 },
        { { TEXT_PLACEHOLDER_LOST, TEXT_TERM_MISSING, TEXT_UNFIT, TEXT_PLACEHOLDER_LOST },
          { TEXT_PLACEHOLDERS, TEXT_LOOK_UP_TERM, TEXT_BIND_TERMS, TEXT_KEEP_SOURCE },
          TEXT_TERMS_BOUND,
          1,
          0 },
        { { TEXT_TERM_MISSING, TEXT_UNFIT, TEXT_PLACEHOLDER_LOST, TEXT_UNFIT },
          { TEXT_LOOK_UP_TERM, TEXT_BIND_TERMS, TEXT_PLACEHOLDERS, TEXT_KEEP_SOURCE },
          TEXT_TERMS_BOUND,
          1,
          0 },
        { { TEXT_LOOPED, TEXT_LOOPED, TEXT_LOOPED | TEXT_PART_LOST },
          { TEXT_RESUME, TEXT_RESUME, TEXT_HALVE },
          TEXT_TERMS_FREE,
          0,
          0 },
        { { TEXT_LOOPED, TEXT_LOOPED, TEXT_LOOPED | TEXT_SIGN_MISSING, TEXT_LOOPED, TEXT_LOOPED, TEXT_SIGN_LOST },
          { TEXT_RESUME, TEXT_RESUME, TEXT_BIND_SIGNS, TEXT_RESUME, TEXT_RESUME, TEXT_KEEP_SOURCE },
          TEXT_TERMS_FREE,
          0,
          1 },
        { { TEXT_NUMBER_MISSING, 0 }, { TEXT_BIND_NUMBERS, TEXT_ACCEPT }, TEXT_TERMS_FREE, 0, 2 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        text_attempt a = { 0 };
        for (size_t k = 0; a.step != TEXT_HALVE && !is_final(a.step); k++) {
            a = next(a, cases[i].reasons[k]);
            if (a.step != cases[i].steps[k]) fail_msg("case %zu: step %zu is %d", i, k, (int)a.step);
        }
        assert_int_equal(a.terms, cases[i].terms);
        assert_int_equal(a.placeholders, cases[i].placeholders);
        assert_int_equal(a.bound, cases[i].bound);
    }
}

/* The unchanged text counts as fitting even if its verdict does not. */
TEST(the_best_fitting_variant_wins) {
    static const struct {
        text_verdict verdicts[3];
        text_variant best;
    } cases[] = {
        { { { TEXT_SHORT, 0, -3, 0 }, { TEXT_SHORT, 1, -2, 0 }, { TEXT_SHORT, 1, -1, 0 } }, TEXT_LOWERED },
        { { { TEXT_SHORT, 0, -3, 0 }, { TEXT_SHORT, 1, -2, 0 }, { TEXT_SHORT, 0, -1, 0 } }, TEXT_CLOSED },
        { { { TEXT_SHORT, 0, -3, 0 }, { TEXT_SHORT, 0, -2, 0 }, { TEXT_SHORT, 1, -4, 0 } }, TEXT_UNCHANGED },
        { { { TEXT_SHORT, 0, -3, 0 }, { TEXT_UNFIT, 0, 0, 0 }, { TEXT_SHORT, 1, -2, 0 } }, TEXT_LOWERED },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        text_attempt a = { .variants = TEXT_LOWERED };
        for (size_t k = 0; k < 3; k++) a = text_attempt_next(a, &cases[i].verdicts[k]);
        assert_int_equal(a.step, cases[i].best == TEXT_LOWERED ? TEXT_ACCEPT : TEXT_BEST);
        assert_int_equal(a.variant, cases[i].best);
    }
    /* No variant is tried after terms have been bound. */
    const text_attempt bound = next((text_attempt){ .variants = TEXT_LOWERED }, TEXT_TERM_MISSING);
    assert_int_equal(next(bound, TEXT_SHORT).step, TEXT_ACCEPT);
}

TEST(halves_start_with_a_new_attempt) {
    const text_attempt before = { .terms = TEXT_TERMS_REBOUND,
                                  .placeholders = 1,
                                  .bound = 1,
                                  .resumed = 2,
                                  .variant = 2 };
    const text_attempt a = text_attempt_next(before, &(text_verdict){ .reasons = TEXT_PART_LOST, .half = 7 });
    assert_int_equal(a.step, TEXT_HALVE);
    assert_int_equal(a.half, 7);
    assert_int_equal((int)a.terms + a.placeholders + a.bound + a.resumed + (int)a.variant, 0);
}

/* Return an upper bound on the number of steps left. Each step except the last must reduce the bound. */
static int left_to_try(const text_attempt *a) {
    const int other = TEXT_MAX_PHRASES - a->phrases + TEXT_MAX_LOOKUPS - a->looked +
                      (int)(TEXT_TERMS_EDITED - a->terms) + !a->other_kind + !(a->placeholders & TEXT_FOR_NUMBERS) +
                      !a->bound + TEXT_MAX_STAGES - a->placed + a->sentences +
                      (a->variants ? 1 + (int)(a->variants - a->variant) : 0);
    return (TEXT_RESUMES + 1) * other + TEXT_RESUMES - a->resumed;
}

static void makes_progress(text_attempt a) {
    const int before = left_to_try(&a);
    for (unsigned i = 0; i < TEXT_REASONS; i++)
        for (unsigned k = i; k < TEXT_REASONS; k++) {
            const text_verdict v = { .reasons = 1u << i | 1u << k, .fits = (int)(k & 1), .score = 1 };
            const text_attempt b = text_attempt_next(a, &v);
            if (b.step == TEXT_HALVE || is_final(b.step)) continue;
            if (left_to_try(&b) >= before || left_to_try(&b) < 0)
                fail_msg("step %d after %d makes no progress", (int)b.step, (int)a.step);
        }
}

/* Retries terminate for any sequence of verdicts, because each step makes progress and splitting shortens the text. */
TEST(every_attempt_ends) {
    static const int most[] = {
        TEXT_HALVE, 2, TEXT_RESUMES, TEXT_TERMS_EDITED, 3, TEXT_LOWERED, TEXT_LOWERED, TEXT_LOWERED, 2, 2
    };
    enum { MEMBERS = sizeof most / sizeof *most };
    int m[MEMBERS] = { 0 };
    for (size_t i = 0; i < MEMBERS;) {
        if (m[6] <= m[5] && m[7] <= m[5])
            makes_progress((text_attempt){ .step = (text_step)m[0],
                                           .phrases = m[1] ? TEXT_MAX_PHRASES - 2 + m[1] : 0,
                                           .resumed = m[2],
                                           .terms = (text_terms)m[3],
                                           .placeholders = m[4],
                                           .variants = (text_variant)m[5],
                                           .variant = (text_variant)m[6],
                                           .best = (text_variant)m[7],
                                           .bound = m[8],
                                           .sentences = m[9] });
        for (i = 0; i < MEMBERS && m[i] == most[i]; i++) m[i] = 0;
        if (i < MEMBERS) m[i]++;
    }
}

int main(void) { return run_all_tests(NULL, NULL); }
