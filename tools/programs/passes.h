/* passes.h - run a text through a model repeatedly, for the measurements of moe-calibrate and moe-prune.
 *
 * The text has the format of text_sample_read. The model first translates the lines without a target; in each pass, the
 * decoder then reads the targets. These functions never exit, and print nothing except progress on a terminal.
 */
#ifndef PASSES_H
#define PASSES_H

#include "tools/programs/program.h"
#include "tools/text/jobs.h"

/* The caller sets `common`, the callbacks and `alone`, and zeroes the rest. moe_routing.user is the text_pair. */
typedef struct passes {
    const program_common *common; /* ids, pretokenized, quiet; threads, batch and kernels of the sessions */
    moe_routing_fn routing;       /* may be NULL */
    moe_trace_fn trace;           /* may be NULL */
    void *user;                   /* argument of both callbacks */
    int alone;                    /* 1 to run one line at a time; the current line is sample.pairs[next - 1] */

    text_sample sample;
    char *left_out; /* [sample.count] 1 if a model could not score the line */
    const char *verb;
    int translating;
    size_t next;
    moe_error trouble; /* an error set by a callback, which ends the pass */
} passes;

/* Read a text and translate lines without a target. Errors: those of text_sample_read and of sessions. */
moe_status passes_read(passes *p, const text_front *front, const char *path, moe_error *error);
moe_status passes_run(passes *p, const moe_model *model, const char *verb, moe_error *error);
size_t passes_left_out(const passes *p);
void passes_free(passes *p);

#endif
