/* stops.c - find stop sequences. stops_add searches only the new bytes and the last STOPS_LONGEST previous ones. */
#define _GNU_SOURCE /* memmem */

#include "tools/server/stops.h"

#include <string.h>

/* Return the position of the first stop sequence at or after byte `from`, or the answer's length if none occurs. */
static size_t find(const stops *s, const text_bytes *answer, size_t from) {
    size_t first = answer->length;
    for (size_t i = 0; i < s->n; i++) {
        const char *at = memmem(answer->data + from, answer->length - from, s->texts[i], strlen(s->texts[i]));
        if (at && (size_t)(at - answer->data) < first) first = (size_t)(at - answer->data);
    }
    return first;
}

int stops_add(const stops *s, text_bytes *answer, const char *more, size_t length) {
    const size_t from = answer->length < s->longest ? 0 : answer->length - s->longest;
    text_append(answer, more, length);
    if (answer->failed || !s->n || !answer->length) return 0;
    const size_t stop = find(s, answer, from);
    if (stop == answer->length) return 0;
    answer->data[answer->length = stop] = '\0';
    return 1;
}

size_t stops_held(const stops *s, const text_bytes *answer) {
    const char *const end = answer->length ? answer->data + answer->length : "";
    size_t most = 0;
    for (size_t i = 0; i < s->n; i++) {
        const size_t length = strlen(s->texts[i]), room = length - 1 < answer->length ? length - 1 : answer->length;
        for (const char *at = end - room; at < end - most; at++) {
            if (!(at = memchr(at, s->texts[i][0], (size_t)(end - at) - most))) break;
            if (memcmp(at, s->texts[i], (size_t)(end - at)) == 0) most = (size_t)(end - at);
        }
    }
    return most;
}
