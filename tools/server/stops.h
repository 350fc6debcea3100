/* stops.h - find stop sequences in an answer while it is generated. */
#ifndef SERVER_STOPS_H
#define SERVER_STOPS_H

#include "tools/text/bytes.h"

#include <stddef.h>

enum { STOPS_MOST = 16, STOPS_LONGEST = 256 }; /* maximum number of stop sequences; maximum bytes of each */

typedef struct stops {
    char *texts[STOPS_MOST]; /* [n] stop sequences, not empty; freed by the owner */
    size_t n, longest;
} stops;

/* Append to an answer. If the answer then contains a stop sequence, truncate it before the sequence and return 1. */
int stops_add(const stops *s, text_bytes *answer, const char *more, size_t length);
/* Return the number of bytes at the end of an answer that may begin a stop sequence. */
size_t stops_held(const stops *s, const text_bytes *answer);

#endif
