/* passes.h - a text that goes through a model as often as one likes: moe-calibrate and moe-prune measure with it.
 *
 * Its form is that of text_sample_read. Targets that are missing are what the model translates. In a pass the decoder
 * reads the given targets. Nothing here exits, and what it prints is progress on a terminal.
 */
#ifndef PASSES_H
#define PASSES_H

#include "tools/programs/program.h"
#include "tools/text/jobs.h"

/* All zero but for `common` and what is done with what comes. `user` of a moe_routing is the text_pair. */
typedef struct passes {
    const program_common *common; /* ids, pretokenized, quiet; threads, batch and kernels of its sessions */
    moe_routing_fn routing;       /* NULL: none */
    moe_trace_fn trace;           /* NULL: none */
    void *user;                   /* of both */
    int alone;                    /* 1: one line at a time, which is sample.pairs[next - 1] */

    text_sample sample;
    char *left_out; /* [sample.count] lines that a model could not score */
    const char *verb;
    int translating;
    size_t next;
    moe_error trouble; /* the callbacks may set it: the pass then ends with it */
} passes;

/* Read a text and translate what has no target. Errors of both: those of text_sample_read and of sessions. */
moe_status passes_read(passes *p, const text_front *front, const char *path, moe_error *error);
moe_status passes_run(passes *p, const moe_model *model, const char *verb, moe_error *error);
size_t passes_left_out(const passes *p);
void passes_free(passes *p);

#endif
