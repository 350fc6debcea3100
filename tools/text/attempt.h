/* attempt.h - decides after each result how to retry the translation of a text.
 *
 * The decision uses no model and allocates no memory. A strategy (strategy.h) judges a result; text_attempt_next looks
 * up the next step in a table of reasons.
 */
#ifndef TEXT_ATTEMPT_H
#define TEXT_ATTEMPT_H

#include "tools/text/protect.h"

enum {
    TEXT_RESUMES = 2,                         /* maximum number of times a repetitive translation is resumed */
    TEXT_MAX_PHRASES = 32,                    /* maximum number of phrases translated separately per text */
    TEXT_MAX_LOOKUPS = 8,                     /* maximum number of missing terms translated separately per text */
    TEXT_MAX_PLACED = 16,                     /* maximum number of terms added to an answer */
    TEXT_MAX_STAGES = 4 * TEXT_MAX_PLACED + 1 /* maximum number of TEXT_PLACE_TERMS steps */
};

typedef enum text_step {
    TEXT_FIRST,         /* before the first attempt */
    TEXT_PHRASE,        /* translate the next phrase between a pair of tags, or the whole text after the last phrase */
    TEXT_RESUME,        /* continue before the repetition, with a repetition penalty */
    TEXT_GIVE_MORE,     /* give the model one more token of the target prefix */
    TEXT_LOOK_UP_TERM,  /* translate the next missing term by itself, to find the model's word for it */
    TEXT_BIND_TERMS,    /* constrain the search to the terms of the glossary */
    TEXT_REPLACE_TERMS, /* replace the terms by placeholders */
    TEXT_REBIND_TERMS,  /* use constraints again, because placeholders were worse or did not fit */
    TEXT_EDIT_TERMS,    /* put the terms in place of the model's words */
    TEXT_PLACEHOLDERS,  /* use the other kind of placeholders */
    TEXT_HIDE_NUMBERS,  /* use placeholders for numbers too */
    TEXT_VARY,          /* try the next variant of a short text */
    TEXT_BEST,          /* return to the variant with the best score */
    TEXT_AS_SENTENCE,   /* write an indivisible text as a sentence, because its answer is then more likely to end */
    TEXT_BIND_SIGNS,    /* (prompted models) constrain the answer to the missing spans, and use the strict wording */
    TEXT_BIND_NUMBERS,  /* (prompted models) constrain the answer to the missing numbers */
    TEXT_PLACE_TERMS,   /* (prompted models) make the next request that adds missing terms */
    TEXT_HALVE,         /* translate both halves of the text instead */
    TEXT_ACCEPT,        /* accept the translation; this and the following steps are final */
    TEXT_KEEP_SOURCE,
    TEXT_FAIL
} text_step;

/* Reasons why a translation may not be final, as bits of text_verdict.reasons. */
enum {
    TEXT_UNFIT = 1,                 /* the model cannot read the text that the last step produced */
    TEXT_LOOPED = 1 << 1,           /* the translation was stopped because it repeats itself */
    TEXT_PHRASE_DONE = 1 << 2,      /* the result is the translation of a phrase */
    TEXT_TERM_MISSING = 1 << 3,     /* a glossary term is not in the translation */
    TEXT_TERM_DOUBLED = 1 << 4,     /* the translation may contain the model's own word next to the term */
    TEXT_TERM_WORSE = 1 << 5,       /* the translation with placeholders is not better */
    TEXT_PLACEHOLDER_LOST = 1 << 6, /* a placeholder is missing, doubled or incomplete */
    TEXT_SIGN_LOST = 1 << 7,        /* a protected span is damaged, and no other step can restore it */
    TEXT_PART_LOST = 1 << 8,        /* the translation was truncated, repeats itself, or lacks names or signs */
    TEXT_WORD_LOST = 1 << 9,        /* like TEXT_PART_LOST, for a text that cannot be halved */
    TEXT_SIGN_MISSING = 1 << 10,    /* an answer lacks a protected span */
    TEXT_NUMBER_MISSING = 1 << 11,  /* an answer lacks a number */
    TEXT_EMPTY = 1 << 12,           /* an answer is blank */
    TEXT_SHORT = 1 << 13,           /* the text has variants, one of which may be better */
    TEXT_FIGURE_LOST = 1 << 14,     /* a number is missing, doubled or extended */
    TEXT_BRACKET_LOST = 1 << 15,    /* a bracket, quotation mark or other sign is missing or added */
    TEXT_TERM_BESIDE = 1 << 16,     /* the model's own word is still next to a term */
    TEXT_BEGINNING_LOST = 1 << 17,  /* the translation does not start with the target prefix */
    TEXT_TERM_LACKING = 1 << 18,    /* an answer lacks a glossary term */
    TEXT_REASONS = 19,              /* number of reasons */
    TEXT_LOST = TEXT_PLACEHOLDER_LOST | TEXT_PART_LOST | TEXT_WORD_LOST | TEXT_FIGURE_LOST |
                TEXT_BRACKET_LOST /* reasons of text_job_lost */
};

typedef struct text_verdict {
    unsigned reasons;
    int fits;    /* for TEXT_SHORT, 1 if the translation covers the whole text */
    float score; /* for TEXT_SHORT, the score */
    size_t half; /* bytes of the first half, or 0 if a text that lost a part cannot be halved */
} text_verdict;

/* Must be all zero before the first attempt. */
typedef struct text_attempt {
    text_step step;                       /* the last step */
    int phrases;                          /* number of phrases translated so far */
    int looked;                           /* number of missing terms translated so far */
    int placed;                           /* number of TEXT_PLACE_TERMS steps */
    int resumed;                          /* number of consecutive TEXT_RESUME steps */
    size_t held;                          /* number of last tokens of the target prefix withheld from the model */
    text_terms terms;                     /* treatment of glossary terms */
    int placeholders;                     /* kind of placeholders (text_guard_begin) */
    int other_kind;                       /* 1 after TEXT_PLACEHOLDERS */
    text_variant variant, variants, best; /* current variant, last variant to try, best variant so far */
    float best_score;
    int sentences;    /* number of TEXT_AS_SENTENCE steps left: TEXT_CLOSED, then TEXT_SENTENCE */
    int is_sentence;  /* 1 after TEXT_AS_SENTENCE */
    int bound;        /* 1 to constrain the answer to spans, with the strict wording; 2 to constrain it to numbers */
    size_t half;      /* for TEXT_HALVE, bytes of the first half */
    const char *note; /* a remark for the user; may be NULL */
} text_attempt;

/* Return the attempt that follows a verdict; its `step` is the next step. */
text_attempt text_attempt_next(text_attempt attempt, const text_verdict *verdict);

#endif
