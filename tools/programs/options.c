/* options.c - options.h says what this is and has the contract. */
#define _GNU_SOURCE      /* getopt_long on Linux */
#define _DARWIN_C_SOURCE /* and on macOS         */
#include "tools/programs/options.h"

#include <stdio.h>
#include <string.h>

int program_next_option(int argc, char **argv, const char *letters, const struct option *known, const int *repeated,
                        uint64_t *given) {
    const int c = getopt_long(argc, argv, letters, known, NULL);
    for (; repeated && *repeated; repeated++)
        if (c == *repeated) return c;
    for (size_t i = 0; c != -1 && i < 64 && known[i].name; i++) {
        const uint64_t bit = (uint64_t)1 << i;
        if (known[i].val != c || known[i].has_arg == no_argument) continue;
        if (*given & bit) {
            const char *slash = strrchr(argv[0], '/');
            fprintf(stderr, "%s: --%s is given twice: it takes one value\n", slash ? slash + 1 : argv[0],
                    known[i].name);
            return '?';
        }
        *given |= bit;
    }
    return c;
}
