/* drafts.c - see drafts.h. */
#include "tools/text/drafts.h"

#include <string.h>

static size_t lines_of(moe_span text) {
    size_t n = 0;
    for (const char *at = text.data, *end = at + text.length;
         text.length && (at = memchr(at, '\n', (size_t)(end - at))); at++)
        n++;
    return n;
}

text_draft text_draft_begin(moe_span draft, moe_span text) {
    return (text_draft){ draft.data, draft.length, 0, draft.length && lines_of(draft) == lines_of(text) };
}

enum { LONG_DRAFT = 4096 /* bytes of a draft that is shown to every line of its text */ };

moe_span text_draft_next(text_draft *d) {
    if (!d->by_line) return (moe_span){ d->text, d->length > LONG_DRAFT ? 0 : d->length };
    const char *begin = d->text + d->at, *end = memchr(begin, '\n', d->length - d->at);
    const size_t n = end ? (size_t)(end - begin) : d->length - d->at;
    d->at += n + (end != NULL);
    return (moe_span){ begin, n };
}
