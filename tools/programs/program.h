/* program.h - the user interface of all programs: options, messages, line output, signals, exit statuses.
 *
 * Unlike text.c, these functions print messages to standard error, prefixed by the name passed to program_begin.
 * Functions that return int return -1 to continue, or an exit status after a message, unless stated otherwise. See
 * lines.h for translating lines.
 */
#ifndef PROGRAM_H
#define PROGRAM_H

#include "moe.h"
#include "tools/programs/console.h"
#include "tools/programs/options.h"
#include "tools/programs/output.h"
#include "tools/programs/routing.h"
#include "tools/text/moetext.h"
#include "tools/text/open.h"
#include "tools/text/settings.h"
#include "tools/text/text.h"

#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

/* ---- 1. Begin and end ---------------------------------------------------------------------------------- */

#define PROGRAM_HELP_EXIT(done, some)                                               \
    "Exit status: 0 " done ", 1 " some ", 2 usage error, 3 model or memory error, " \
    "4 input or output error, 128 + N stopped by signal N.\n"

extern volatile sig_atomic_t program_signal; /* number of the signal that requested a stop, or 0 */
extern int program_wake;                     /* a descriptor that is readable after a signal, or -1 */

/* Handle SIGHUP, SIGINT and SIGTERM: the first one sets program_signal and stops the session or translator; the second
 * ends the program. */
void program_handle_signals(void);
double program_resident(void);                     /* return the peak resident memory in MiB */
void program_expert_stats(const moe_stats *stats); /* print statistics of experts, if any, to standard error */

/* ---- 2. Options ---------------------------------------------------------------------------------------- */

typedef struct program_common {
    const char *model; /* the first model if several are given */
    const char *input, *output, *routing;
    char *text;             /* input from the command line, or NULL */
    text_settings settings; /* threads, batch, gating, noise and the program's other options */
    int ids, pretokenized, json, stats, quiet, verbose, no_mmap, no_verify, no_cache, dry_run, stream;
    int as_text; /* 1 to read documents and binary files as lines */
    int silent;  /* 1 in all ranks except the first, which alone prints reports */
} program_common;

/* Option rows of program_common and its settings. program_common is the first member of a program's options. */
extern const option_row program_rows[];
#define PROGRAM_ROWS(names) { program_rows, 0, names }
#define PROGRAM_SETTINGS(names) { NULL, offsetof(program_common, settings), names }
#define PROGRAM_SPEED_ROWS PROGRAM_SETTINGS("threads batch isa"), PROGRAM_ROWS("no-mmap no-verify no-cache")
#define PROGRAM_GATE_ROWS PROGRAM_SETTINGS("gating noise"), PROGRAM_ROWS("routing")
#define PROGRAM_MEMORY_ROWS PROGRAM_ROWS("dry-run"), PROGRAM_SETTINGS("max-memory")

program_common program_common_none(void);
const char *program_version(void);
int program_check_copy(const char *in, const char *out); /* check that the files differ */
/* Use the words of the command line, joined by spaces, as input. */
int program_words(program_common *o, int count, char *const *words);
/* Open the model according to the options, and start loading its tokeniser. */
int program_open(const program_common *o, moe_kind kind, text_level level, text_front *front);
/* Check the kind of a model. The error message names the program for the model. */
int program_check_kind(const char *path, const moe_model *model, moe_kind kind);
/* Report a missing language, naming the option that sets it and the model's languages; return EXIT_USAGE. */
int program_ask_language(const text_front *front, const char *what);
int program_gate_is_dense(moe_gate gate);          /* return 1 if a gate selects all experts */
text_level program_level(const program_common *o); /* return the kind of tokeniser that the lines need */
/* Copy the options for threads, batch, kernels, gates, noise, log and maximum line length to the parameters. */
void program_apply(const program_common *o, moe_session_params *params);
/* Create a session that a signal stops, and wait for the tokeniser loaded by program_open. Fail if the session would
 * exceed --max-memory; with --dry-run, print its memory and return EXIT_DONE. With batchwise gating, print a warning
 * that `unit`, such as "a translation", depends on the batch. */
int program_session(const program_common *o, text_front *front, const moe_session_params *params, const char *unit,
                    moe_session **session);
void program_session_free(moe_session *session); /* may be NULL */
void program_stoppable(moetext *translator);     /* set the translator that a signal stops; NULL for none */
int program_session_status(moe_status status);   /* return the exit status for a session that cannot be created */
void program_warn_of_gating(const program_common *o, const char *unit);
/* Return the bytes that this process uses in addition to sessions and the mapped model, for --max-memory. */
size_t program_memory(const program_common *o, const moe_model *model);
/* Print the report of --dry-run; return the exit status. */
int program_report_memory(const program_common *o, const moe_model *model, size_t sessions);
/* Block the signals that stop a program, for threads started before program_release_signals. */
void program_hold_signals(sigset_t *before);
void program_release_signals(const sigset_t *before);

/* ---- 3. Input and output ------------------------------------------------------------------------------- */

typedef struct program_output {
    int fd;
    const char *name;
    output_file *whole; /* the file of program_open_whole, or NULL */
    int ours;           /* 1 if the output is a regular -o file, where a partial line can be removed */
    off_t good;         /* bytes up to the end of the last whole line */
    uint64_t lines;     /* whole lines written */
    int error;          /* errno of the failure that ended output */
} program_output;

/* Write whole lines. On failure set out->error. */
void program_write(program_output *out, const char *data, size_t length);
/* Open the input, then the output. Refuse the input, the model or the routing file as output. */
int program_open_input(const program_common *o, int *in, program_output *out);
int program_open_output(const program_common *o, int in, program_output *out);
int program_open_streams(const program_common *o, int *in, program_output *out); /* both */
/* Like program_open_streams, but the -o file appears only when complete (output.h); the caller writes it. */
int program_open_whole(const program_common *o, int *in, program_output *out);
int program_close_streams(const program_common *o, int in, program_output *out, int status); /* the exit status */
/* Report the signal and, unless --quiet, the number of lines written; return the exit status. */
int program_stopped(const program_common *o, const program_output *out);
int program_same_file(const char *a, const char *b); /* return 1 if both paths are the same regular file */
int program_is_open_file(int fd, const char *path);  /* return 1 if `fd` and `path` are the same regular file */
/* Write a file completely or not at all (output.h); return the exit status. */
int program_save(const char *path, const char *data, size_t length);

/* Open the --routing file, if given. See routing_open for `languages`. */
int program_routing_open(const program_common *o, const text_front *front, const char *const languages[2],
                         routing_file *file);
/* Close the routing file, or remove it if `status` is a failure; return the exit status. */
int program_routing_close(routing_file *file, int status);

#endif /* PROGRAM_H */
