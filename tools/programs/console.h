/* console.h - startup, exit statuses, time and messages on standard error, for all programs and the server.
 *
 * Functions that return int return an exit status, or -1 to continue, unless stated otherwise.
 */
#ifndef CONSOLE_H
#define CONSOLE_H

#include "moe.h"
#include "tools/text/moetext.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __GNUC__
#define PROGRAM_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define PROGRAM_PRINTF(string, first)
#endif

enum {
    EXIT_DONE = 0,
    EXIT_SOME_LINES = 1,
    EXIT_USAGE = 2,
    EXIT_MODEL = 3,       /* a model cannot be opened: missing, damaged, not supported; or memory ran out */
    EXIT_INPUT_OUTPUT = 4 /* another file, or a model file that changed after it was opened */
};

/* Prepare the standard streams; call this first in main. Replace each closed stream with /dev/null, opened so that
 * reading input and writing output fail. Otherwise the next file opened would get its descriptor and the output. */
int program_begin(const char *name);
int program_closed(int stream); /* return 1 if standard stream 0, 1 or 2 was closed at startup */
double program_seconds(void);   /* monotonic */

/* Print "NAME: MESSAGE" on one line, without control characters. */
PROGRAM_PRINTF(1, 2) void program_error(const char *format, ...);
/* Print "NAME: MESSAGE; see NAME --help" and return EXIT_USAGE. */
PROGRAM_PRINTF(1, 2) int program_usage_error(const char *format, ...);
void program_log(void *user, const char *message); /* print a message from the engine */
/* Print the message of an error. Return EXIT_INPUT_OUTPUT for MOE_ERROR_IO, else EXIT_MODEL. */
int program_failed(const moe_error *error);
/* Report a file that cannot be used. Return EXIT_INPUT_OUTPUT for an I/O error, else EXIT_MODEL. */
int program_file_error(const char *file, const moe_error *error);
/* Report a model that cannot be opened; NULL if the message names it. Return EXIT_MODEL. */
int program_model_error(const char *file, const moe_error *error);
/* Flush standard output. Return EXIT_DONE, or EXIT_INPUT_OUTPUT after an error message. */
int program_printed(void);
/* Set *model to the default model if it is NULL. Return -1, or EXIT_USAGE after an error message. */
int program_default_model(const char **model);
/* Choose models for two languages, which may be "", with moetext_choose. If *model or MOE_MODEL names one, use it and
 * leave *out at NULL. Otherwise set *model to the first one, which remains valid until *out is freed. */
int program_choose(const char **model, const char *source, const char *target, moetext_choice **out);

typedef struct program_progress {
    int on;
    double begin, last;
    uint64_t lines, failed, tokens;
} program_progress;

void program_progress_show(program_progress *p);
void program_progress_hide(void);
/* Show as much of the end of an unfinished line as fits the width of the terminal. */
void program_show_line(const char *text, size_t length);

#endif
