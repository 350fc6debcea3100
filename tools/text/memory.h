/* memory.h - computes the memory use of sessions, and finds settings that fit into a limit. */
#ifndef TEXT_MEMORY_H
#define TEXT_MEMORY_H

#include "moe.h"

#include <stddef.h>

/* Parse "64K", "512M", "1.5G"; return 1 and set *bytes, or return 0. */
int text_parse_size(const char *text, size_t *bytes);

typedef struct text_memory {
    size_t limit;     /* 0 if unlimited */
    size_t beside;    /* other bytes that count towards the limit */
    size_t sessions;  /* bytes of the sessions, set by text_memory_check */
    int nbest;        /* minimum beam to suggest; 0 means nbest of the parameters */
    int as_arguments; /* spelling of options in messages, 1 for --batch 4, 0 for batch=4 */
} text_memory;

/* Compute the memory use of sessions with parameters `params` [n]. Return MOE_ERROR_MEMORY if it exceeds the limit; the
 * message states how much is needed, and which smaller batch or beam would fit. Makes no large allocations. */
moe_status text_memory_check(const moe_model *model, const moe_session_params *params, size_t n, text_memory *memory,
                             moe_error *error);

/* Return an allocator for models with a memory limit. It backs large blocks with memory immediately, so that a machine
 * with too little memory fails at the start instead of during translation. */
moe_allocator text_memory_allocator(void);

#endif
