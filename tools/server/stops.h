/* stops.h - texts at which an answer stops, looked for while it grows. */
#ifndef SERVER_STOPS_H
#define SERVER_STOPS_H

#include "tools/text/bytes.h"

#include <stddef.h>

enum { STOPS_MOST = 16, STOPS_LONGEST = 256 }; /* texts; bytes of one */

typedef struct stops {
    char *texts[STOPS_MOST]; /* [n] none is empty; the owner frees them */
    size_t n, longest;
} stops;

/* Append more of an answer. 1: it has one of the texts now, and ends before the first of them. */
int stops_add(const stops *s, text_bytes *answer, const char *more, size_t length);
/* The bytes at the end of an answer that may begin one of the texts. */
size_t stops_held(const stops *s, const text_bytes *answer);

#endif
