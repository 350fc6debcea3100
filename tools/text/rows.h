/* rows.h - options as rows of a table. settings.c has the rows of libmoetext; tools/programs/options.h reads command
 * lines and prints --help from such rows. */
#ifndef TEXT_ROWS_H
#define TEXT_ROWS_H

#include <stddef.h>

typedef enum row_kind {
    ROW_FLAG,  /* int, set to `low`; the option takes no value */
    ROW_INT,   /* int; an index if the row has names */
    ROW_SEED,  /* int64_t, not negative */
    ROW_FLOAT, /* float */
    ROW_PARAM, /* double, a parameter of the engine */
    ROW_WHOLE, /* double, a parameter that is a whole number */
    ROW_BYTES, /* double, a parameter in bytes, or "auto" */
    ROW_SIZE,  /* size_t, such as "512M" */
    ROW_TEXT,  /* char[size] */
    ROW_WORD,  /* const char * */
    ROW_PATH,  /* const char *; NULL for the value "-" */
    ROW_CALL   /* handled by `take` */
} row_kind;

/* Groups of options in --help that several programs share. */
#define GROUP_MODEL "Model"
#define GROUP_LANGUAGES "Languages"
#define GROUP_FILES "Input and output"
#define GROUP_SEARCH "Search"
#define GROUP_SAMPLING "Sampling"
#define GROUP_TEXT "Text"
#define GROUP_PROMPT "Prompted models"
#define GROUP_GATES "Gates"
#define GROUP_MEMORY "Memory"
#define GROUP_SPEED "Speed (same output)"
#define GROUP_OTHER "Other"

typedef struct option_row option_row;
struct option_row {
    const char *name, *argument; /* such as "threads", "N" */
    const char *help;
    const char *more;  /* further help, for --help only; may be NULL */
    const char *group; /* title in --help; NULL if programs lack this option */
    char letter;
    row_kind kind;
    int optional; /* 1 for an optional value, which is 1 if omitted */
    int repeated; /* 1 if the option may be given more than once */
    int of_model; /* moetext_option_info.of_model */
    size_t at;    /* offset of the member */
    size_t size;
    double low, high;
    const char *values;       /* allowed values for messages, "1 to 64"; NULL for the bounds */
    const char *const *names; /* names of the values 0, 1, ...; NULL-terminated */
    int (*valid)(const char *value);
    int (*take)(void *options, const option_row *row, const char *value); /* -1, or the exit status */
};

typedef enum row_result { ROW_OK, ROW_INVALID, ROW_OUT_OF_RANGE } row_result;

/* Set the member of the struct at `fields`. Not applicable to ROW_CALL. */
row_result option_row_set(const option_row *row, void *fields, const char *value);
/* Format a message such as "invalid value 'x' for --threads: expected 1 to 256". `before` precedes the name. */
void option_row_error(const option_row *row, row_result result, const char *before, const char *value, char *message,
                      size_t size);

#endif
