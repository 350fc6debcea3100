/* messages.h - messages of ICU: {n, plural, one {a letter} other {# letters}}, select and selectordinal.
 *
 * A line that has some, or several lines (text_message_lines of spans.h), go in pieces: texts, which are translated,
 * and the frame between them, which is copied. An apostrophe before a brace (or before the # of a plural) quotes what
 * comes up to the next one; '' stands for one.
 */
#ifndef TEXT_MESSAGES_H
#define TEXT_MESSAGES_H

#include "tools/text/bytes.h"
#include "tools/text/spans.h"

/* Where a walk over a line is; all zero at its beginning. */
typedef struct text_message {
    int depth;       /* messages around what comes next */
    unsigned plural; /* a bit for each, that of the innermost is the lowest: # is its number */
    int between;     /* a branch or the end of a message comes next; 2: not the first */
} text_message;

typedef enum text_message_kind {
    TEXT_MESSAGE_FRAME,
    TEXT_MESSAGE_TEXT,  /* no white space at its ends */
    TEXT_MESSAGE_BROKEN /* a brace or an apostrophe without its partner, no branch, or too many in one another */
} text_message_kind;

/* The next piece of a line, which goes on at data[length], length not 0. */
text_message_kind text_message_next(text_message *message, const char *data, size_t length, size_t *bytes);
/* Whether a whole line has a message, and pieces up to its end. */
int text_message_is(const char *data, size_t length);

text_message_text text_message_of(const text_message *message); /* the text at hand */
/* A text as the model is to read it: with one apostrophe for two. */
void text_message_show(text_message_text kind, const char *data, size_t length, text_bytes *out);
/* Double the apostrophes that would quote in a translation, which is out[begin .. length), what its source does not, or
 * all where the source has them so. Returns whether its braces and numbers are those of the source then. */
int text_message_repair(text_message_text kind, const char *source, size_t length, size_t begin, text_bytes *out);

#endif
