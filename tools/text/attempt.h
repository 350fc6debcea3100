/* attempt.h - the attempts at translating one text, and the step after each result.
 *
 * Pure: no model, no memory. A strategy (strategy.h) judges a result; text_attempt_next looks the verdict up in one
 * table of reasons.
 */
#ifndef TEXT_ATTEMPT_H
#define TEXT_ATTEMPT_H

#include "tools/text/protect.h"

enum {
    TEXT_RESUMES = 2,     /* times that a translation which repeats itself is resumed */
    TEXT_MAX_PHRASES = 32 /* phrases of a text that are translated separately */
};

typedef enum text_step {
    TEXT_FIRST,         /* nothing was tried before */
    TEXT_PHRASE,        /* translate the next phrase between a pair of tags, or the text after the last one */
    TEXT_RESUME,        /* continue before the repetition, with a repetition penalty */
    TEXT_BIND_TERMS,    /* constrain the search to the terms of the glossary */
    TEXT_REPLACE_TERMS, /* replace the terms by placeholders */
    TEXT_REBIND_TERMS,  /* constraints again: they were better than placeholders, which may not fit */
    TEXT_PLACEHOLDERS,  /* use the other placeholders */
    TEXT_VARY,          /* try the next variant of a short text */
    TEXT_BEST,          /* return to the variant with the best score */
    TEXT_BIND_SIGNS,    /* prompted: constrain the answer to the signs it lacked, and ask with the strict wording */
    TEXT_BIND_NUMBERS,  /* prompted: constrain the answer to the numbers it lacked */
    TEXT_HALVE,         /* translate both halves instead */
    TEXT_ACCEPT,        /* final, as are those that follow */
    TEXT_KEEP_SOURCE,
    TEXT_FAIL
} text_step;

/* Why a translation may not be final: bits of text_verdict.reasons. */
enum {
    TEXT_UNFIT = 1,                 /* the model cannot read the text as the last step changed it */
    TEXT_LOOPED = 1 << 1,           /* the translation was stopped because it repeats itself */
    TEXT_PHRASE_DONE = 1 << 2,      /* the result is that of a phrase */
    TEXT_TERM_MISSING = 1 << 3,     /* a glossary term is not in the translation */
    TEXT_TERM_DOUBLED = 1 << 4,     /* the model's own word may be there next to the term */
    TEXT_TERM_WORSE = 1 << 5,       /* with placeholders the translation is not better */
    TEXT_PLACEHOLDER_LOST = 1 << 6, /* a placeholder is missing, doubled or incomplete */
    TEXT_SIGN_LOST = 1 << 7,        /* so is a protected span for which nothing else can be tried */
    TEXT_PART_LOST = 1 << 8,        /* the translation was cut, repeats itself, or lacks names or signs */
    TEXT_WORD_LOST = 1 << 9,        /* the same of a text that cannot be halved */
    TEXT_SIGN_MISSING = 1 << 10,    /* an answer lacks a protected span */
    TEXT_NUMBER_MISSING = 1 << 11,  /* an answer lacks a number */
    TEXT_EMPTY = 1 << 12,           /* an answer is blank */
    TEXT_SHORT = 1 << 13,           /* the text has variants, one of which may be better */
    TEXT_REASONS = 14               /* how many there are */
};

typedef struct text_verdict {
    unsigned reasons;
    int fits;    /* TEXT_SHORT: the translation is one of the whole text */
    float score; /* TEXT_SHORT */
    size_t half; /* TEXT_PART_LOST: bytes of the first half */
} text_verdict;

/* All zero before the first attempt. */
typedef struct text_attempt {
    text_step step;                       /* taken last */
    int phrases;                          /* translated so far */
    int resumed;                          /* times, since the last other step */
    text_terms terms;                     /* treatment of glossary terms */
    int placeholders;                     /* 0: X1, 1: [1] */
    text_variant variant, variants, best; /* in use; the last one that may be tried; the best so far */
    float best_score;
    int bound;        /* constraints of an answer: 1 for signs, with the strict wording, 2 for numbers alone */
    size_t half;      /* TEXT_HALVE: bytes of the first half */
    const char *note; /* for the user; may be NULL */
} text_attempt;

/* The next step after a verdict, as part of the attempt that it leads to. */
text_attempt text_attempt_next(text_attempt attempt, const text_verdict *verdict);

#endif
