/* shape.h - a chat message whose lines are translated one by one: its languages, its lines, and the form of the answer.
 *
 * The answer is the message with every line replaced by its translation, in the same form, so it has as many lines as
 * the message and no line gets another one's translation, whatever the model:
 *
 *   {"history": [{"source", "translation"}], "lines": [{"n", "text"}]}   SubtitleEdit; the answer is {"n": "..."}
 *   ["...", "..."]    {"1": "...", "2": "..."}    [{"id": 1, "src": "..."}] (with "dst" in the answer), and other JSON
 *   paragraphs between lines `%%`, `%% Paragraph 2` or `==PART==`; lines numbered "1. ..."; texts joined by " ||| " or
 *   <br>; elements <p id=1>...</p>; plain text
 */
#ifndef SERVER_SHAPE_H
#define SERVER_SHAPE_H

#include "tools/server/server.h"

typedef struct shape {
    text_bytes frame; /* the answer without the translations */
    size_t *cuts;     /* [n] offset in `frame` of the translation of each item of the request */
    size_t n, capacity;
    size_t begin;   /* offset of the text in the message, after the instruction and a glossary */
    size_t end;     /* offset of the end of the text, before a glossary */
    int json;       /* 1 if the answer is JSON, and the translations are in strings */
    int structured; /* 1 if the message is JSON, or has several lines or separators */
    int translates; /* 1 if the instruction asks for a translation */
    char source[36], target[36];
} shape;

/* Read an instruction, such as a system message, and a message that may begin with another instruction. Find the
 * languages and the terms of a glossary ("term = translation", or a list of "- term → translation"): in the
 * instruction, and in the first or last paragraph of the message if its first line announces terms. */
void shape_languages(request *req, const char *system, size_t system_length, const char *message, size_t length,
                     shape *out);
/* Take the earlier turns of a conversation as the request's translation memory. Return 1 if all of them are examples of
 * Weblate: messages in its form, answered with their translations. */
int shape_examples(request *req, const moetext_message *messages, size_t n);
/* Replace the items of the request with the lines of the message. */
void shape_read(request *req, const char *message, size_t length, shape *out);
/* Put the answer in an object {"key": answer} */
void shape_wrap(shape *l, const char *key);
/* Append the part of the answer from translation `first` to before translation `last`, or to its end if `last` is n. */
void shape_write(const shape *l, const request *req, size_t first, size_t last, text_bytes *out);
void shape_free(shape *l);

#endif
