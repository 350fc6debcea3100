/* options.h - parse the command lines of all programs and print --help, from rows of options (tools/text/rows.h). */
#ifndef OPTIONS_H
#define OPTIONS_H

#include "tools/text/rows.h"

#include <getopt.h> /* optind */
#include <stdio.h>

/* Option rows of a program. `rows` ends with a row without a name; NULL means the rows of libmoetext. `base` is the
 * offset of the struct with the rows' members. `names` selects rows ("model input"); NULL selects all rows that have a
 * group. If several rows have the same name, the first one is used. */
typedef struct option_list {
    const option_row *rows;
    size_t base;
    const char *names;
} option_list;

/* Texts are wrapped to the width of a terminal, except lines that begin with a space. */
typedef struct option_program {
    const char *name;
    const char *usage;        /* arguments after the name, one line for each form */
    const char *about;        /* description below the usage lines */
    const option_list *lists; /* [n_lists] */
    size_t n_lists;
    const char *notes;             /* text after the options; may be NULL */
    const char *examples;          /* may be NULL */
    const char *required;          /* names of required options, such as "model output" */
    const char *const *exclusions; /* "ids json stats": the first option excludes the others; NULL-terminated */
    int least, most;               /* minimum and maximum number of arguments that are not options */
    size_t config;                 /* offset of an option_file for the option `config`, plus 1; 0 if absent */
    const char *(*version)(void);  /* text that --version prints after the name; NULL for the engine's version */
} option_program;

/* An option file: lines NAME = VALUE, empty lines, and lines of comments (#). Options on the command line replace those
 * in the file, or add to them if repeatable. */
typedef struct option_file {
    const char *path;
    char *text; /* owned by the caller; other options may point into it */
    int done;   /* 1 after the file has been read */
} option_file;

/* Initialise the row lists and exclusions of an option_program. The program's own rows are named `own_rows`. */
#define OPTION_LISTS(...)                                                   \
    .lists = (const option_list[]){ __VA_ARGS__ },                          \
    .n_lists = sizeof((option_list[]){ __VA_ARGS__ }) / sizeof(option_list)
#define OPTION_OWN { own_rows, 0, NULL }
#define OPTION_EXCLUSIONS(...)                                \
    .exclusions = (const char *const[]) { __VA_ARGS__, NULL }

/* Initialise the members of a row that sets a field of a struct named `options`. */
#define OPTION_MEMBER(kind_, field) .kind = (kind_), .at = offsetof(options, field)
#define OPTION_FLAG(field) OPTION_MEMBER(ROW_FLAG, field), .low = 1
#define OPTION_INT(field, least, most_) OPTION_MEMBER(ROW_INT, field), .low = (least), .high = (most_)

/* Initialise the row of an option that all programs with models have. */
#define OPTION_NO_CACHE(...)                                                                                         \
    { "no-cache",                                                                                                    \
      NULL,                                                                                                          \
      "do not keep the conversion of a published model",                                                             \
      .group = GROUP_MODEL,                                                                                          \
      __VA_ARGS__,                                                                                                   \
      .more = ". Firefox's folders, folders in Hugging Face's layout and GGUF files are converted when first used" }

/* Set the fields of `options` from the command line, and optind to the index of the first argument that is not an
 * option. Return -1, or an exit status after --help, --version or an error message. */
int option_parse(const option_program *program, int argc, char **argv, void *options);
/* Let messages and help name commands of one program, such as `moe get`, in place of programs, such as moe-get.
 * `command_of` returns "get" for the `length` bytes "moe-get", and NULL if they name no program. */
void option_use_commands(const char *(*command_of)(const char *name, size_t length));
/* Write a text with the names that option_use_commands selects. Return the number of bytes written. */
size_t option_put(FILE *to, const char *text, size_t length);
/* Print "NAME: MESSAGE; see NAME --help" to standard error and return EXIT_USAGE. */
#ifdef __GNUC__
__attribute__((format(printf, 2, 3)))
#endif
int option_refuse(const option_program *program, const char *format, ...);

#endif
