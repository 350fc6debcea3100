/* routing.h - the routing of tokens as JSON lines. moe-translate, moe-score and moe-classify write them, moe-routing
 * reads them.
 *
 *   {"model":"en-de-fr-es","source":"en","target":"de",
 *    "layers":[{"layer":"encoder.2","experts":32,"groups":0,"k":2,"gate":"threshold"}]}
 *   {"line":12,"layer":"encoder.2","position":3,"id":123,"token":"Haus",
 *    "experts":[3,17],"weights":[0.61,0.39],"empty":false}
 *
 * Each object is one line. The header comes first. It says the languages of all sentences, where they are known, as the
 * model spells them. k is the number of experts per token: with two levels, the product of both; with a softmax, which
 * names no number, all experts. Then sentences follow in order. Each has all tokens of its first layer by position,
 * then those of the next layer.
 *
 *   line       counts from 1
 *   position   counts from 0. In an encoder tag and end count; position t of a decoder predicts token t
 *   id, token  what the position reads (at position 0 of a decoder, the begin token), and its text, if there is any
 *   experts    ascending
 *   empty      the mask selected nothing; `experts` has the choice of the model's policy, perhaps nothing
 *
 * A classifier's row is a line with one position and no id.
 *
 * The file appears under its name when all is done, or not at all; a pipe is written as lines come: see output.h.
 * Nothing here prints or exits.
 */
#ifndef ROUTING_H
#define ROUTING_H

#include "tools/programs/output.h"
#include "tools/text/text.h"

#include <stdint.h>
#include <stdio.h>

typedef struct routing_entry {
    uint32_t layer;
    int32_t token;
    size_t position, at, n; /* experts and weights [at .. at + n) */
    int empty;
} routing_entry;

/* The routing of a line on its way. The caller sets `line`, and `steps` to limit the decoder steps. */
typedef struct routing_sentence {
    struct routing_sentence *next, *next_made;
    const struct routing_file *file;
    uint64_t line;
    size_t steps;
    routing_entry *entries;
    uint32_t *experts;
    float *weights;
    size_t n_entries, entries_capacity, n, capacity;
    int failed; /* memory ran out */
} routing_sentence;

typedef struct routing_file {
    const text_front *front;
    output_file *out;
    const char **layers; /* [n_layers] their names, encoder first */
    size_t n_layers;
    routing_sentence *spare, *made;
    text_bytes text;
} routing_file;

/* `gating` as in moe_session_params; `languages` of the sentences, source and target: NULL is not known. All zero on
 * failure. Errors of all: those of output.h. */
moe_status routing_open(routing_file *file, const text_front *front, const char *path, const char *gating,
                        const char *const languages[2], moe_error *error);
/* A new empty sentence; routing_put or routing_close takes it back. NULL: out of memory. */
routing_sentence *routing_begin(routing_file *file, uint64_t line);
void routing_keep(routing_sentence *sentence, const moe_routing *routing);
/* A moe_routing_fn for requests whose `user` is a text_job with a sentence as `extra`. */
void routing_keep_of_job(void *ignored, const moe_routing *routing);
/* Write a sentence and take it back. */
moe_status routing_put(routing_file *file, routing_sentence *sentence, moe_error *error);
/* keep 0: the file goes. `file` may be all zero. Frees everything in any case. */
moe_status routing_close(routing_file *file, int keep, moe_error *error);

#endif /* ROUTING_H */
