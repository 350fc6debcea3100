/* routing.h - the routing of tokens as JSON lines, written by moe-translate, moe-score and moe-classify and read by
 * moe-routing.
 *
 *   {"model":"en-de-fr-es","source":"en","target":"de",
 *    "layers":[{"layer":"encoder.2","experts":32,"groups":0,"k":2,"gate":"threshold"}]}
 *   {"line":12,"layer":"encoder.2","position":3,"id":123,"token":"Haus",
 *    "experts":[3,17],"weights":[0.61,0.39],"empty":false}
 *
 * Each object is one line. The header contains the languages of all sentences, if known, as the model spells them. k is
 * the number of experts per token: the product of both levels in a mixture with groups, or all experts with a softmax
 * gate. An object for each token and layer follows, ordered by sentence, layer and position.
 *
 *   line       from 1
 *   position   from 0. An encoder has positions for the tag and the end token; decoder position t predicts token t
 *   id, token  the input of the position (the begin token at position 0 of a decoder) and its text, if any
 *   experts    in ascending order
 *   empty      true if no expert passed the mask; `experts` then lists the best expert or none, depending on the model
 *
 * A classifier's row is a line with one position and no id.
 *
 * A file appears only when complete; a pipe is written line by line (output.h). These functions never print or exit.
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
    size_t position, at, n; /* n experts and weights, starting at index `at` */
    int empty;
} routing_entry;

/* The routing of a line in progress. The caller sets `line`, and `steps` to limit the decoder steps. */
typedef struct routing_sentence {
    struct routing_sentence *next, *next_made;
    const struct routing_file *file;
    uint64_t line;
    size_t steps;
    routing_entry *entries;
    uint32_t *experts;
    float *weights;
    size_t n_entries, entries_capacity, n, capacity;
    int failed; /* 1 if out of memory */
} routing_sentence;

typedef struct routing_file {
    const text_front *front;
    output_file *out;
    const char **layers; /* [n_layers] names, encoder first */
    size_t n_layers;
    routing_sentence *spare, *made;
    text_bytes text;
} routing_file;

/* Open a routing file and write its header. See moe_session_params for `gating`; `languages` are the source and target
 * languages, NULL if unknown. If `path` is NULL, store sentences in file->text, for routing_add in another process.
 * *file is zeroed on failure. All functions return the errors of output.h. */
moe_status routing_open(routing_file *file, const text_front *front, const char *path, const char *gating,
                        const char *const languages[2], moe_error *error);
/* Return an empty sentence, to be released by routing_put or routing_close; NULL if out of memory. */
routing_sentence *routing_begin(routing_file *file, uint64_t line);
void routing_keep(routing_sentence *sentence, const moe_routing *routing);
/* Write a sentence and release it. */
moe_status routing_put(routing_file *file, routing_sentence *sentence, moe_error *error);
/* Write sentences that another process has stored in routing_file.text. */
moe_status routing_add(routing_file *file, const char *text, size_t length, moe_error *error);
/* Finish the file (keep 1) or remove it (keep 0), and free everything. `file` may be zeroed. */
moe_status routing_close(routing_file *file, int keep, moe_error *error);

#endif /* ROUTING_H */
