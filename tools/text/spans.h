/* spans.h - what in a text is not language: markup, placeholders, addresses, paths, formulas, numbers, emoji. */
#ifndef TEXT_SPANS_H
#define TEXT_SPANS_H

#include <stddef.h>

typedef enum text_span_kind {
    TEXT_SPAN_NONE,
    TEXT_SPAN_OPEN, /* <b>, </b>, %(link)ssign in%(end)s: markup that belongs together in pairs, around words */
    TEXT_SPAN_CLOSE,
    TEXT_SPAN_LONE,   /* <br>, comments, \n, emoji, TABs: what stands beside words */
    TEXT_SPAN_WORD,   /* {name}, %s, ${x}, &amp;, addresses, paths, code: what stands in the place of a word */
    TEXT_SPAN_NUMBER, /* 3.50, 85 kg, $5, A320, 12:30: what a model reads, and should write as it is */
    TEXT_SPAN_HYPHEN  /* a soft one: a translated word is hyphenated elsewhere */
} text_span_kind;

/* How a text of a message is to be taken. */
typedef enum text_message_text {
    TEXT_MESSAGE_NONE, /* it is of no message */
    TEXT_MESSAGE_PLAIN,
    TEXT_MESSAGE_PLURAL /* of a branch of a plural */
} text_message_text;

/* A walk over valid UTF-8, from its beginning to its end. */
typedef struct text_scan {
    const char *data;
    size_t length;
    size_t closer; /* where a placeholder closes the one that was met as an opening; SIZE_MAX: nowhere */
    size_t quiet;  /* no path and no word with something glued to it begins before */
    text_message_text message;
} text_scan;

text_scan text_scan_begin(const char *data, size_t length);
/* The kind of the span that begins at byte `at`, and the bytes that it has; TEXT_SPAN_NONE, and those of the character
 * there. So a walk from `at` to `at + *bytes` meets every span, and what is glued to a span that stands for a word
 * belongs to it: {first}{last}, {n}px, AT&amp;T. It takes time in proportion to the text. */
text_span_kind text_span_next(text_scan *scan, size_t at, size_t *bytes);

/* The name in a tag: "a" of <a href="x"> and of </a>; empty for what is no tag. */
size_t text_tag_name(const char *tag, size_t length, const char **name);

/* The bytes of what the apostrophe at s[0] begins: itself, two, or a quotation; 0: that is not closed. */
size_t text_message_quote(const char *s, size_t n, text_message_text kind);
/* The bytes of {n, plural, or {g, select, or {n, selectordinal, if they begin a text; else 0. */
size_t text_message_begin(const char *data, size_t length, int *plural);
/* Whether a text has an ICU message in it: {n, plural, ..., {g, select, ... or {n, selectordinal, ... The walk above
 * has it as a whole; `*open`: not this one, which is too long or not closed. */
int text_has_message(const char *data, size_t length, int *open);
/* The bytes of the lines of a text up to the end of the messages that begin in its first `line` bytes, which are a
 * line: `line` if none goes on behind it. *open: one does not close (or is too long), and these are the lines up to a
 * blank one, which may be of it. */
size_t text_message_lines(const char *data, size_t length, size_t line, int *open);

/* Letters and digits of ASCII, and all that is not ASCII but for the signs that stand between words. */
int text_is_wordlike(const char *data, size_t length, size_t at);

#endif
