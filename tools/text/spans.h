/* spans.h - finds text that is not language: markup, placeholders, addresses, paths, formulas, numbers, emoji. */
#ifndef TEXT_SPANS_H
#define TEXT_SPANS_H

#include <stddef.h>

typedef enum text_span_kind {
    TEXT_SPAN_NONE,
    TEXT_SPAN_OPEN, /* markup in pairs around words: <b>, </b>, %(link)ssign in%(end)s */
    TEXT_SPAN_CLOSE,
    TEXT_SPAN_LONE,   /* unpaired, between words: <br>, comments, \n, emoji, TABs */
    TEXT_SPAN_WORD,   /* in place of a word: {name}, %s, ${x}, &amp;, addresses, paths, code */
    TEXT_SPAN_NUMBER, /* shown to the model and copied: 3.50, 85 kg, $5, A320, 12:30 */
    TEXT_SPAN_HYPHEN  /* a soft hyphen, which the translation does not need */
} text_span_kind;

/* The kind of text in an ICU message. */
typedef enum text_message_text {
    TEXT_MESSAGE_NONE, /* not in a message */
    TEXT_MESSAGE_PLAIN,
    TEXT_MESSAGE_PLURAL /* text in a branch of a plural */
} text_message_text;

/* A scan of valid UTF-8 from its beginning to its end. */
typedef struct text_scan {
    const char *data;
    size_t length;
    size_t closer; /* offset of the placeholder that closes the last opening placeholder, or SIZE_MAX */
    int options;   /* 1 if the text has options or mentions them, -1 if not, 0 if unknown */
    int quoted;    /* 1 after an odd number of " outside spans */
    size_t quiet;  /* no path or word glued to a placeholder starts before this offset */
    text_message_text message;
} text_scan;

text_scan text_scan_begin(const char *data, size_t length);
/* Return the kind and length of the span at byte `at`, or TEXT_SPAN_NONE and the length of the character. A scan from
 * `at` to `at + *bytes` finds every span. Text glued to a WORD span belongs to it: {first}{last}, {n}px, AT&amp;T.
 * Takes linear time. */
text_span_kind text_span_next(text_scan *scan, size_t at, size_t *bytes);

/* Find the name in a tag, "a" in <a href="x"> and </a>, and return its length; 0 if the text is not a tag. */
size_t text_tag_name(const char *tag, size_t length, const char **name);

/* Match the apostrophe at s[0]: return 1 if it is plain, 2 for '', or the length of a quotation (0 if unclosed). */
size_t text_message_quote(const char *s, size_t n, text_message_text kind);
/* Return the length of {n, plural, or {g, select, or {n, selectordinal, at the beginning of a text, otherwise 0. */
size_t text_message_begin(const char *data, size_t length, int *plural);
/* Return 1 if a text contains an ICU message: {n, plural, ..., {g, select, ... or {n, selectordinal, ... A scan treats
 * the message as one span, unless it is too long or not closed; *open is then 1. */
int text_has_message(const char *data, size_t length, int *open);
/* Return the length of the lines up to the end of the messages that start in the first line, which has `line` bytes;
 * `line` if these messages end in the first line. If a message is too long or not closed, *open is 1 and the result
 * ends at a blank line. */
size_t text_message_lines(const char *data, size_t length, size_t line, int *open);

/* Return 1 for ASCII letters and digits, and for non-ASCII characters that are not punctuation. */
int text_is_wordlike(const char *data, size_t length, size_t at);
size_t text_word_end(const char *data, size_t length, size_t at); /* end of the wordlike characters starting at `at` */
int text_is_wordlike_before(const char *data, size_t length, size_t at); /* 1 if wordlike text ends before `at` */

#endif
