/* attempt.c - see attempt.h. */
#include "tools/text/attempt.h"

#define LOST "left untranslated: markup or placeholders were lost in translation"
#define BEYOND "a part was left untranslated: the model cannot translate it"

/* The first row whose reason is in the verdict and whose step is still allowed decides. If no row matches, the
 * translation is accepted. `after` contains a bit for each last step to which the row applies; 0 means any step. */
static const struct {
    unsigned reasons, after;
    text_step step;
    const char *note;
} rules[] = {
    { TEXT_BEGINNING_LOST, 0, TEXT_GIVE_MORE, NULL },
    { TEXT_PHRASE_DONE, 0, TEXT_PHRASE, NULL },
    { TEXT_LOOPED, 0, TEXT_RESUME, NULL },
    { TEXT_TERM_MISSING, 0, TEXT_LOOK_UP_TERM, NULL },
    { TEXT_TERM_MISSING, 0, TEXT_BIND_TERMS, NULL },
    { TEXT_UNFIT, 1u << TEXT_LOOK_UP_TERM, TEXT_BIND_TERMS, NULL },
    { TEXT_TERM_DOUBLED, 0, TEXT_REPLACE_TERMS, NULL },
    { TEXT_TERM_WORSE, 0, TEXT_REBIND_TERMS, NULL },
    { TEXT_UNFIT, 1u << TEXT_BIND_TERMS | 1u << TEXT_REPLACE_TERMS, TEXT_REBIND_TERMS, NULL },
    { TEXT_TERM_BESIDE, 0, TEXT_EDIT_TERMS, NULL },
    { TEXT_PLACEHOLDER_LOST, 0, TEXT_PLACEHOLDERS, NULL },
    { TEXT_FIGURE_LOST, 0, TEXT_HIDE_NUMBERS, NULL },
    { TEXT_PART_LOST | TEXT_PLACEHOLDER_LOST | TEXT_FIGURE_LOST | TEXT_BRACKET_LOST, 0, TEXT_HALVE, NULL },
    { TEXT_UNFIT, 1u << TEXT_PLACEHOLDERS | 1u << TEXT_HIDE_NUMBERS, TEXT_KEEP_SOURCE, LOST },
    { TEXT_PLACEHOLDER_LOST | TEXT_SIGN_LOST, 0, TEXT_KEEP_SOURCE, LOST },
    { TEXT_FIGURE_LOST, 0, TEXT_KEEP_SOURCE, "left untranslated: a number was lost or added in translation" },
    { TEXT_BRACKET_LOST, 0, TEXT_KEEP_SOURCE,
      "left untranslated: a bracket, quotation mark or other sign was lost or added in translation" },
    { TEXT_WORD_LOST, 0, TEXT_AS_SENTENCE, NULL },
    { TEXT_WORD_LOST, 0, TEXT_KEEP_SOURCE, BEYOND },
    { TEXT_UNFIT, 1u << TEXT_AS_SENTENCE, TEXT_KEEP_SOURCE, BEYOND },
    { TEXT_SIGN_MISSING, 0, TEXT_BIND_SIGNS, NULL },
    { TEXT_NUMBER_MISSING, 0, TEXT_BIND_NUMBERS, NULL },
    { TEXT_TERM_LACKING, 0, TEXT_PLACE_TERMS, NULL },
    { TEXT_EMPTY, 0, TEXT_FAIL, "the model's answer is empty" },
    { TEXT_SHORT | TEXT_UNFIT, 0, TEXT_VARY, NULL },
    { TEXT_SHORT | TEXT_UNFIT, 0, TEXT_BEST, NULL },
    { TEXT_LOOPED, 0, TEXT_ACCEPT, "the translation was cut where it begins to repeat itself" },
};

/* Return 1 if a step is still allowed. The number of non-final steps is limited, so every attempt ends. */
static int may_take(const text_attempt *a, const text_verdict *v, text_step step) {
    switch (step) {
    case TEXT_PHRASE: return a->phrases < TEXT_MAX_PHRASES;
    case TEXT_RESUME: return a->resumed < TEXT_RESUMES;
    case TEXT_GIVE_MORE: return a->held > 0;
    case TEXT_LOOK_UP_TERM: return a->terms < TEXT_TERMS_BOUND && a->looked < TEXT_MAX_LOOKUPS;
    case TEXT_BIND_TERMS: return a->terms < TEXT_TERMS_BOUND;
    case TEXT_REPLACE_TERMS: return a->terms < TEXT_TERMS_REPLACED;
    case TEXT_REBIND_TERMS: return a->terms < TEXT_TERMS_REBOUND;
    case TEXT_EDIT_TERMS: return a->terms < TEXT_TERMS_EDITED;
    case TEXT_PLACEHOLDERS: return !a->other_kind;
    case TEXT_HIDE_NUMBERS: return !(a->placeholders & TEXT_FOR_NUMBERS);
    case TEXT_HALVE: return v->half > 0;
    case TEXT_VARY: return a->variant < a->variants;
    case TEXT_BEST: return a->variants && a->variant != a->best;
    case TEXT_AS_SENTENCE: return a->sentences > 0;
    case TEXT_BIND_SIGNS:
    case TEXT_BIND_NUMBERS: return !a->bound;
    case TEXT_PLACE_TERMS: return a->placed < TEXT_MAX_STAGES;
    default: return 1;
    }
}

static text_attempt take(text_attempt a, text_step step) {
    a.step = step;
    a.note = NULL;
    a.resumed = step == TEXT_RESUME ? a.resumed + 1 : 0;
    if (step >= TEXT_LOOK_UP_TERM && step <= TEXT_HIDE_NUMBERS) a.variants = TEXT_UNCHANGED;
    switch (step) {
    case TEXT_PHRASE: a.phrases++; break;
    case TEXT_GIVE_MORE: a.held--; break;
    case TEXT_LOOK_UP_TERM: a.looked++; break;
    case TEXT_BIND_TERMS: a.terms = TEXT_TERMS_BOUND; break;
    case TEXT_REPLACE_TERMS: a.terms = TEXT_TERMS_REPLACED; break;
    case TEXT_REBIND_TERMS: a.terms = TEXT_TERMS_REBOUND; break;
    case TEXT_EDIT_TERMS: a.terms = TEXT_TERMS_EDITED; break;
    case TEXT_PLACEHOLDERS: a.placeholders ^= TEXT_IN_BRACKETS, a.other_kind = 1; break;
    case TEXT_HIDE_NUMBERS: a.placeholders |= TEXT_FOR_NUMBERS | TEXT_IN_BRACKETS; break; /* most models keep these */
    case TEXT_VARY: a.variant++; break;
    case TEXT_BEST: a.variant = a.best, a.variants = TEXT_UNCHANGED; break;
    case TEXT_AS_SENTENCE:
        a.variant = a.is_sentence ? TEXT_SENTENCE : TEXT_CLOSED;
        a.variants = TEXT_UNCHANGED, a.is_sentence = 1, a.sentences--;
        break;
    case TEXT_BIND_SIGNS: a.bound = 1; break;
    case TEXT_BIND_NUMBERS: a.bound = 2; break;
    case TEXT_PLACE_TERMS: a.placed++; break;
    case TEXT_HALVE: a = (text_attempt){ .step = step }; break;
    default: break;
    }
    return a;
}

text_attempt text_attempt_next(text_attempt a, const text_verdict *v) {
    if (v->reasons & TEXT_SHORT && (!a.variant || (v->fits && v->score > a.best_score)))
        a.best = a.variant, a.best_score = v->score;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        if (!(v->reasons & rules[i].reasons) || (rules[i].after && !(rules[i].after >> a.step & 1))) continue;
        if (!may_take(&a, v, rules[i].step)) continue;
        a = take(a, rules[i].step);
        a.note = rules[i].note, a.half = v->half;
        return a;
    }
    return take(a, TEXT_ACCEPT);
}
