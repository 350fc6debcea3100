/* lines.h - lines through a translator of libmoetext, in order: the loop of moe-translate and moe-score.
 *
 * moetext_translate pulls a text whenever it has a free slot. Each pull reads a line and queues it; a finished line
 * waits in the queue for the lines before it, and is written at once after them. A line that cannot be used is finished
 * from the start and keeps its place. No more lines are read than the translator pulls.
 */
#ifndef LINES_H
#define LINES_H

#include "tools/programs/program.h"

typedef struct program_line {
    struct program_line *next;
    uint64_t number;
    text_bytes source, given; /* as read, cut if so; only with program_lines.keeps */
    int cut;                  /* only the part before the first unusable byte was used */
    char said[192];           /* the program's own remark */
    int finished, failed;
    text_bytes output;         /* without line break */
    text_bytes notes;          /* messages for standard error, each with a NUL */
    text_bytes partial;        /* final part of the translation in progress */
    routing_sentence *routing; /* or NULL */
} program_line;

/* What --stats reports. */
typedef struct program_totals {
    moe_stats stats;
    uint64_t pieces, unknown_pieces;
    double seconds, resident; /* MiB */
} program_totals;

typedef struct program_lines program_lines;
struct program_lines {
    /* Set by the program */
    const program_common *options;
    moetext *translator;
    const char *done_word; /* "translated" */
    moetext_task task;
    const char *pairs;     /* the option by which lines are source TAB target, or NULL */
    int keeps;             /* `write` needs source and given */
    int messages, splits;  /* an ICU message over several lines is one text; it is copied if splits is 0 */
    int paragraphs;        /* lines up to the next blank line are one text */
    size_t context;        /* earlier lines for each text */
    int grows;             /* on a terminal a line is shown while it grows */
    routing_file *routing; /* closed by the program; or NULL */
    /* Append the output for a line. A line that never was a request has a result, too. */
    void (*write)(program_lines *lines, program_line *line, const moetext_result *result);
    void (*stats)(const program_lines *lines, const program_totals *totals); /* at the end; or NULL */

    program_progress progress;
    program_output out;
    text_bytes block; /* lines on their way to one write */

    /* Private */
    const char *packed; /* [packed_length] texts to translate into `block`; NULL to read them */
    size_t packed_length;
    program_totals totals;
    text_reader reader;
    text_bytes paragraph; /* its lines so far; those that were handed over, if `over` */
    uint64_t number;      /* of its first line; of the next line in `ahead` */
    int too_long, over;
    int blank;        /* a blank line follows the paragraph */
    text_bytes ahead; /* lines that were read in search of the end of a message; those from `begin` on are next */
    size_t begin, lines_ahead, kept_ahead; /* kept_ahead: lines of a message to copy */
    int closed;                            /* `ahead` gets no more lines: at the end, or the last one is too long */
    text_bytes earlier, shown;             /* lines for the contexts of later texts; of the text at hand */
    program_line *first, *last, *spare;
    text_bytes growing; /* the line that is shown */
    double shown_at;
    moe_error trouble; /* code set: what ends the run */
    int read_error;    /* errno */
};

/* The remark for a line's JSON: the first one. */
const char *program_line_note(const program_line *line, const moetext_result *result);

/* The settings for libmoetext that the options are. */
text_settings program_settings(const program_common *o);
/* Make a translator of a model that text_model_begin has opened: -1, or a message and the exit status. --max-memory may
 * refuse it; --dry-run prints the memory it needs, and the exit status is EXIT_DONE. `unit` is what depends on its
 * batch under batchwise gating. */
int program_translator(const program_common *o, text_settings *settings, const moetext_model *model, const char *unit,
                       moetext **out);

/* Do everything from opening input and output to the last message; return the exit status. */
int program_lines_run(program_lines *lines);

/* ---- The same in steps, for several processes that share the work (ranks.c) ---- */

int program_lines_open(program_lines *lines); /* -1, or a message and the exit status */
/* Read up to `n` texts, and append a record of each to *packed. */
void program_lines_pack(program_lines *lines, size_t n, text_bytes *packed);
size_t program_record_bytes(const char *record);
/* Translate such records; `block` keeps the output, `progress` the numbers of lines. Return the exit status, which only
 * counts what failed here. */
int program_lines_translate(program_lines *lines, const char *packed, size_t length);
/* Print what ended the run, or the sums; return the exit status. */
int program_lines_outcome(const program_lines *lines, moe_status status, const moe_error *error);
int program_lines_close(program_lines *lines, int opened, int status);

#endif
