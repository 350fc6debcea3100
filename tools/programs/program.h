/* program.h - the parts of all programs that a user sees: options, messages, whole lines out, signals, exit statuses.
 *
 * Unlike text.c this prints: to standard error, under the name that program_begin was given. Functions that return int
 * return -1 to continue, or an exit status after a message, unless stated otherwise. Lines through a translator:
 * lines.h.
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

extern volatile sig_atomic_t program_signal; /* number of a signal that asked to stop, or 0 */
extern int program_wake;                     /* a descriptor that is readable after a signal, or -1 */

/* From here on the first SIGHUP, SIGINT or SIGTERM sets program_signal and stops the sessions below; the second ends
 * the program. */
void program_handle_signals(void);
double program_resident(void);                     /* MiB, the largest so far */
void program_expert_stats(const moe_stats *stats); /* statistics of experts, if any, to standard error */

/* ---- 2. Options ---------------------------------------------------------------------------------------- */

typedef struct program_common {
    const char *model; /* the first of several */
    const char *input, *output, *routing;
    char *text;             /* input from the command line, or NULL */
    text_settings settings; /* threads, batch, max-len, gating, noise and others, as far as the program has them */
    int ids, pretokenized, json, stats, quiet, verbose, no_mmap, no_verify, dry_run, stream;
    int silent; /* one of several processes, but not the first: it prints no reports */
} program_common;

/* The rows of program_common, which is the first member of the program's options, and of its settings. */
extern const option_row program_rows[];
#define PROGRAM_ROWS(names) { program_rows, 0, names }
#define PROGRAM_SETTINGS(names) { NULL, offsetof(program_common, settings), names }
#define PROGRAM_SPEED_ROWS PROGRAM_SETTINGS("threads batch isa"), PROGRAM_ROWS("no-mmap no-verify")
#define PROGRAM_GATE_ROWS PROGRAM_SETTINGS("gating noise"), PROGRAM_ROWS("routing")
#define PROGRAM_MEMORY_ROWS PROGRAM_ROWS("dry-run"), PROGRAM_SETTINGS("max-memory")

program_common program_common_none(void);
const char *program_version(void);
int program_check_copy(const char *in, const char *out); /* the files must differ */
/* The words of the command line, joined by spaces, become the input. */
int program_words(program_common *o, int count, char *const *words);
/* Open the model as the options say, and begin its tokeniser. */
int program_open(const program_common *o, moe_kind kind, text_level level, text_front *front);
/* Check the kind of a model. The message names the program for it. */
int program_check_kind(const char *path, const moe_model *model, moe_kind kind);
/* "missing WHAT; languages of this model: de en"; returns EXIT_USAGE. */
int program_ask_language(const text_front *front, const char *what);
int program_gate_is_dense(moe_gate gate);          /* 1 if it selects all experts */
text_level program_level(const program_common *o); /* the kind of tokeniser that the lines need */
/* Copy the options for threads, batch, kernels, gates, noise, log and longest line into the parameters. */
void program_apply(const program_common *o, moe_session_params *params);
/* Make a session that a signal stops, and wait for the tokeniser that program_open has begun. --max-memory may refuse
 * it; --dry-run prints the memory it needs and ends with EXIT_DONE. `unit` is what depends on its batch under batchwise
 * gating: "a translation". */
int program_session(const program_common *o, text_front *front, const moe_session_params *params, const char *unit,
                    moe_session **session);
void program_session_free(moe_session *session); /* may be NULL */
void program_stoppable(moetext *translator);     /* set the translator that a signal stops; NULL for none */
int program_session_status(moe_status status);   /* the exit status after a session could not be made */
void program_warn_of_gating(const program_common *o, const char *unit);
/* Bytes of this process that count for --max-memory next to its sessions: not the mapped pages of the model. */
size_t program_memory(const program_common *o, const moe_model *model);
/* Print the report of --dry-run; return the exit status. */
int program_report_memory(const program_common *o, const moe_model *model, size_t sessions);
/* Threads that start between the two calls never take the signals that stop a program. */
void program_hold_signals(sigset_t *before);
void program_release_signals(const sigset_t *before);

/* ---- 3. Input and output ------------------------------------------------------------------------------- */

typedef struct program_output {
    int fd;
    const char *name;
    output_file *whole; /* the file of program_open_whole, or NULL */
    int ours;           /* opened for -o, a regular file: a partial line can be removed */
    off_t good;         /* bytes up to the end of the last whole line */
    uint64_t lines;     /* whole lines written */
    int error;          /* errno of the failure that ended output */
} program_output;

/* Write all of `data`, which is whole lines, or set the error. */
void program_write(program_output *out, const char *data, size_t length);
/* Open both. Input, model and routing file are refused as output. */
int program_open_streams(const program_common *o, int *in, program_output *out);
/* The same with a file for -o that appears when it is complete (output.h), and that the caller writes. */
int program_open_whole(const program_common *o, int *in, program_output *out);
int program_close_streams(const program_common *o, int in, program_output *out, int status); /* the exit status */
/* Report the signal and, unless --quiet, the number of lines written; return the exit status. */
int program_stopped(const program_common *o, const program_output *out);
int program_same_file(const char *a, const char *b); /* 1 if both are the same regular file */
int program_is_open_file(int fd, const char *path);  /* the same for a file that is open */
/* Write a file with this content, whole or not at all (output.h); return the exit status. */
int program_save(const char *path, const char *data, size_t length);

/* Open the file of --routing, if given. `languages` as in routing_open. */
int program_routing_open(const program_common *o, const text_front *front, const char *const languages[2],
                         routing_file *file);
/* Close it, or remove it if the exit status `status` is a failure; return the exit status. */
int program_routing_close(routing_file *file, int status);

#endif /* PROGRAM_H */
