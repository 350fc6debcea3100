/* drafts.h - drafts of translations (moe_request.draft): texts that a translation may resemble. */
#ifndef TEXT_DRAFTS_H
#define TEXT_DRAFTS_H

#include "tools/text/text.h"

/* The lines of a draft, in step with the lines of its text. */
typedef struct text_draft {
    const char *text; /* [length] */
    size_t length, at;
    int by_line; /* 1 if draft and text have the same number of lines */
} text_draft;

text_draft text_draft_begin(moe_span draft, moe_span text);
/* Return the draft of the text's next line: its line or, if the numbers of lines differ, the whole draft unless it is
 * long. */
moe_span text_draft_next(text_draft *draft);

#endif
