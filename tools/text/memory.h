/* memory.h - how much memory sessions take, and what to ask for where that is too much. */
#ifndef TEXT_MEMORY_H
#define TEXT_MEMORY_H

#include "moe.h"

#include <stddef.h>

/* "64K", "512M", "1.5G": 1 and *bytes set, or 0. */
int text_parse_size(const char *text, size_t *bytes);

typedef struct text_memory {
    size_t limit;     /* 0: there is none */
    size_t beside;    /* bytes that count but are none of the sessions' */
    size_t sessions;  /* set by text_memory_check */
    int as_arguments; /* how messages write options. 1: --batch 4, 0: batch=4 */
} text_memory;

/* Finds what the sessions with these parameters [n] take together. MOE_ERROR_MEMORY: it is more than the limit; the
 * message says how much is needed, and with which smaller batch or beam it would fit. Nothing large is allocated. */
moe_status text_memory_check(const moe_model *model, const moe_session_params *params, size_t n, text_memory *memory,
                             moe_error *error);

/* For models of which a limit is wanted: large blocks are there from the beginning, every page of them, not only as
 * work comes to them. So a machine that has less ends the program before its work and not in the middle. */
moe_allocator text_memory_allocator(void);

#endif
