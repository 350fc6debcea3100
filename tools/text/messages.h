/* messages.h - ICU messages: {n, plural, one {a letter} other {# letters}}, select and selectordinal.
 *
 * A line with messages, or several such lines (text_message_lines in spans.h), is cut into texts, which are translated,
 * and the frame (the syntax around them), which is copied. An apostrophe before a brace (or before the # of a plural)
 * quotes up to the next apostrophe; '' is an apostrophe.
 */
#ifndef TEXT_MESSAGES_H
#define TEXT_MESSAGES_H

#include "tools/text/bytes.h"
#include "tools/text/spans.h"

/* A position in a line of messages, all zero at the beginning of the line. */
typedef struct text_message {
    int depth;       /* number of enclosing messages */
    unsigned plural; /* a bit per enclosing message (lowest for the innermost), set if # stands for a number */
    int between;     /* 1 if a branch or the end of a message follows, 2 after the first branch */
} text_message;

typedef enum text_message_kind {
    TEXT_MESSAGE_FRAME,
    TEXT_MESSAGE_TEXT,  /* without white space at its ends */
    TEXT_MESSAGE_BROKEN /* an unbalanced brace or apostrophe, a message without branches, or nesting that is too deep */
} text_message_kind;

/* Find the piece at the start of data[length], which is the rest of a line and not empty. */
text_message_kind text_message_next(text_message *message, const char *data, size_t length, size_t *bytes);
/* Return 1 if a whole line contains a message and can be cut into pieces. */
int text_message_is(const char *data, size_t length);

text_message_text text_message_of(const text_message *message); /* kind of the current text */
/* Append a text for the model, with '' replaced by an apostrophe. */
void text_message_show(text_message_text kind, const char *data, size_t length, text_bytes *out);
/* In the translation out[begin .. length), double all apostrophes if the source does, otherwise only those that would
 * start a quotation by mistake. Return 1 if braces and numbers match the source. */
int text_message_repair(text_message_text kind, const char *source, size_t length, size_t begin, text_bytes *out);

#endif
