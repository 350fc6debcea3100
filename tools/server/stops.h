/* stops.h - stop sequences: find them while an answer grows. */
#ifndef SERVER_STOPS_H
#define SERVER_STOPS_H

#include "tools/text/bytes.h"

#include <stddef.h>

enum { STOPS_MOST = 16, STOPS_LONGEST = 256 }; /* number of texts; bytes of each */

typedef struct stops {
    char *texts[STOPS_MOST]; /* [n] not empty; freed by the owner */
    size_t n, longest;
} stops;

/* Append to an answer. Return 1 if it contained one of the texts: it now ends before the first of them. */
int stops_add(const stops *s, text_bytes *answer, const char *more, size_t length);
/* The length of the end of an answer that may be the start of one of the texts. */
size_t stops_held(const stops *s, const text_bytes *answer);

#endif
