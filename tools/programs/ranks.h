/* ranks.h - run moe-translate in several processes (ranks) that mpirun starts and that share the experts of a model.
 * Contains a moe_wire over MPI, and rounds in which rank 0 distributes lines and writes their translations in order.
 * Builds without MPI=1 run as a single process. All ranks must call all functions, in the same order. */
#ifndef RANKS_H
#define RANKS_H

#include "tools/programs/lines.h"

#ifdef MOE_MPI
/* Return the number of ranks: 1 without mpirun, 0 after an error message if their builds differ. */
int ranks_begin(void);
void ranks_end(void);
const moe_wire *ranks_wire(void);
int ranks_status(int status); /* return the largest status of all ranks */
enum { RANKS_VALUES = 8 };
int ranks_agree(const int64_t *values, size_t n); /* return 1 if the n <= RANKS_VALUES values are equal on all ranks */
/* Do the work of program_lines_run: rank 0 reads and writes, and each rank translates about `texts` texts in a round.
 * Return the same exit status on all ranks. */
int ranks_translate(program_lines *lines, size_t texts);
#else
static inline int ranks_begin(void) { return 1; }
static inline void ranks_end(void) {}
static inline const moe_wire *ranks_wire(void) { return NULL; }
static inline int ranks_status(int status) { return status; }
static inline int ranks_agree(const int64_t *values, size_t n) { return (void)values, (void)n, 1; }
static inline int ranks_translate(program_lines *lines, size_t texts) { return (void)lines, (void)texts, EXIT_USAGE; }
#endif

#endif /* RANKS_H */
