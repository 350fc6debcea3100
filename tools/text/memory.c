/* memory.c - see memory.h. */
#include "tools/text/memory.h"
#include "tools/text/bytes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int text_parse_size(const char *text, size_t *bytes) {
    char *unit;
    const double number = strtod(text, &unit);
    const double factor = *unit == 'K' ? 0x1p10 : *unit == 'M' ? 0x1p20 : *unit == 'G' ? 0x1p30 : 0;
    if (unit == text || factor == 0 || unit[1] || !(number > 0) || number * factor > 0x1p62) return 0;
    *bytes = (size_t)(number * factor);
    return 1;
}

/* Halve the batch, or if it is 1, the beam. Return 0 if neither can shrink. */
static int shrink(moe_session_params *params, size_t n, int least_beam) {
    const int batch_too = params->batch > 1;
    if (!batch_too && params->beam <= least_beam) return 0;
    for (moe_session_params *p = params; p < params + n; p++) {
        if (batch_too) {
            p->batch = p->batch > 1 ? p->batch / 2 : 1;
            if (p->batch_tokens > 1) p->batch_tokens /= 2;
        } else if (p->beam > least_beam) {
            p->beam = p->beam / 2 > least_beam ? p->beam / 2 : least_beam;
            if (p->nbest > p->beam) p->nbest = p->beam;
        }
    }
    return 1;
}

static moe_status sum(const moe_model *model, const moe_session_params *params, size_t n, size_t *bytes,
                      moe_error *error) {
    *bytes = 0;
    for (size_t i = 0; i < n; i++) {
        size_t one;
        const moe_status status = moe_session_bytes(model, &params[i], &one, error);
        if (status) return status;
        *bytes = one > SIZE_MAX - *bytes ? SIZE_MAX : *bytes + one;
    }
    return MOE_OK;
}

static double mib(size_t bytes) { return (double)bytes / 0x1p20; }

/* Append the changed parameters, as "--batch 4 --beam 2". */
static void name_options(const moe_session_params *asked, const moe_session_params *fits, int as_arguments, char *out,
                         size_t size) {
    const char *const names[] = { "batch-tokens", "batch", "beam" };
    const int before[] = { asked->batch_tokens, asked->batch, asked->beam };
    const int after[] = { fits->batch_tokens, fits->batch, fits->beam };
    for (size_t i = 0, used = 0; i < 3 && used < size; i++) {
        if (before[i] == after[i]) continue;
        used += (size_t)snprintf(out + used, size - used, "%s%s%s%s%d", used ? as_arguments ? " " : ";" : "",
                                 as_arguments ? "--" : "", names[i], as_arguments ? " " : "=", after[i]);
    }
}

moe_status text_memory_check(const moe_model *model, const moe_session_params *params, size_t n, text_memory *memory,
                             moe_error *error) {
    enum { MOST = 2 };
    moe_session_params less[MOST];
    char options[80] = "";
    moe_status status = sum(model, params, n, &memory->sessions, error);
    if (status || !memory->limit) return status;
    const size_t beside = memory->beside, room = beside < memory->limit ? memory->limit - beside : 0;
    size_t bytes = memory->sessions;
    if (bytes <= room) return MOE_OK;
    memcpy(less, params, n * sizeof *params);
    while (bytes > room && shrink(less, n, memory->nbest ? memory->nbest : params[0].nbest))
        if ((status = sum(model, less, n, &bytes, error))) return status;
    name_options(params, less, memory->as_arguments, options, sizeof options);
    return text_fail(error, MOE_ERROR_MEMORY, "max-memory",
                     "this needs %.1f MiB, more than %smax-memory allows (%.1f MiB); %s%s%s%s %.1f MiB",
                     mib(memory->sessions + beside), memory->as_arguments ? "--" : "", mib(memory->limit),
                     bytes <= room ? "with "
                     : *options    ? "even with "
                                   : "",
                     options, *options ? " " : "", bytes <= room ? "it would need" : "the minimum is",
                     mib(bytes + beside));
}

/* ---- Memory that is backed at once ---- */

enum { LARGE = 1 << 20 };

static void *allocate(void *user, size_t bytes) {
    (void)user;
    void *memory = malloc(bytes);
    if (bytes >= LARGE) /* touch every page; compilers would turn memset into calloc, which touches none */
        for (size_t i = 0; memory && i < bytes; i += 4096) ((volatile char *)memory)[i] = 0;
    return memory;
}

static void *reallocate(void *user, void *old, size_t old_bytes, size_t new_bytes) {
    (void)user, (void)old_bytes;
    return realloc(old, new_bytes);
}

static void release(void *user, void *old, size_t old_bytes) {
    (void)user, (void)old_bytes;
    free(old);
}

moe_allocator text_memory_allocator(void) { return (moe_allocator){ allocate, reallocate, release, NULL }; }
