/* options.h - the next option of a command line; also for programs without all that program.h has. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <getopt.h>
#include <stdint.h>

/* The next option, from getopt_long. One that takes a value may be given once, but for those in `repeated` (which 0
 * ends; NULL: none): else '?', after a complaint. *given, which begins with 0, knows those that were there, the first
 * 64 of `known`. */
int program_next_option(int argc, char **argv, const char *letters, const struct option *known, const int *repeated,
                        uint64_t *given);

#endif
