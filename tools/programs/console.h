/* console.h - what every program and the server share: start, exit statuses, time, messages on standard error.
 *
 * Functions that return int return an exit status, or -1 to continue, unless stated otherwise.
 */
#ifndef CONSOLE_H
#define CONSOLE_H

#include "moe.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __GNUC__
#define PROGRAM_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define PROGRAM_PRINTF(string, first)
#endif

enum { EXIT_DONE = 0, EXIT_SOME_LINES = 1, EXIT_USAGE = 2, EXIT_MODEL = 3, EXIT_INPUT_OUTPUT = 4 };

/* Call this first in main. A closed standard stream would lend its number to the next open file, and output would go
 * there. So open /dev/null instead, such that reading from input and writing to output fail. */
int program_begin(const char *name);
int program_closed(int stream); /* 1: the standard stream 0, 1 or 2 was closed at the start */
double program_seconds(void);   /* monotonic */

/* Print "NAME: MESSAGE" on one line, fit for a terminal. */
PROGRAM_PRINTF(1, 2) void program_error(const char *format, ...);
/* The same with "; see NAME --help". Return EXIT_USAGE. */
PROGRAM_PRINTF(1, 2) int program_usage_error(const char *format, ...);
void program_log(void *user, const char *message); /* print a message of the engine */
/* Print the message of an error. Return EXIT_INPUT_OUTPUT if it is MOE_ERROR_IO, else EXIT_MODEL. */
int program_failed(const moe_error *error);
/* Report a file that cannot be used. Return EXIT_INPUT_OUTPUT if the system refused it, else EXIT_MODEL. */
int program_file_error(const char *file, const moe_error *error);
/* Flush standard output. Return EXIT_DONE, or EXIT_INPUT_OUTPUT after a message. */
int program_printed(void);
/* Set *model to the default model if it is NULL. Return -1, or EXIT_USAGE after a message. */
int program_default_model(const char **model);

typedef struct program_progress {
    int on;
    double begin, last;
    uint64_t lines, failed, tokens;
} program_progress;

void program_progress_show(program_progress *p);
void program_progress_hide(void);
/* Show the end of an unfinished line, cut to the width of the terminal. */
void program_show_line(const char *text, size_t length);

#endif
