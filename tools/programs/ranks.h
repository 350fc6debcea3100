/* ranks.h - moe-translate as several processes, the ranks that mpirun started, which share the experts of a model: the
 * wire of moe.h over MPI, and rounds in which rank 0 hands out lines and writes what comes back, in order. In a build
 * without MPI=1 each process is alone. All functions are called by all ranks, in the same order. */
#ifndef RANKS_H
#define RANKS_H

#include "moe.h"
#include "tools/programs/program.h"

/* Lines that one rank translates: those of its standard input, to its standard output. */
typedef struct ranks_part {
    uint64_t before;                                       /* lines of the text before the first one */
    uint64_t lines, failed;                                /* set by: */
    int (*translate)(void *user, struct ranks_part *part); /* gives the exit status */
    void *user;
} ranks_part;

#ifdef MOE_MPI
/* How many ranks there are; 1: this process is alone; 0: they do not go together, which was said. */
int ranks_begin(void);
void ranks_end(void);
const moe_wire *ranks_wire(void);
int ranks_status(int status); /* the largest of all ranks */
/* Translate the text that `o` names, about `lines` lines of a rank in a round; gives the exit status of all. */
int ranks_translate(const program_common *o, size_t lines, ranks_part *part);
#else
static inline int ranks_begin(void) { return 1; }
static inline void ranks_end(void) {}
static inline const moe_wire *ranks_wire(void) { return NULL; }
static inline int ranks_status(int status) { return status; }
static inline int ranks_translate(const program_common *o, size_t lines, ranks_part *part) {
    (void)o, (void)lines, (void)part;
    return EXIT_USAGE;
}
#endif

#endif /* RANKS_H */
