/* lines.h - translate or score lines in order with libmoetext: the main loop of moe-translate and moe-score.
 *
 * moetext_translate pulls a text whenever it has a free slot. Each pull reads a line and queues it. A finished line is
 * written as soon as all preceding lines have been written. An unusable line is queued as finished, so that its output
 * appears in order. Lines are read only when the translator pulls them.
 */
#ifndef LINES_H
#define LINES_H

#include "tools/programs/program.h"

typedef struct program_line {
    struct program_line *next;
    uint64_t number;
    text_bytes source, given; /* texts as read, or their usable parts; empty unless program_lines.keeps is 1 */
    int cut;                  /* 1 if only the part before the first unusable byte was used */
    char said[192];           /* the program's own message about the line */
    int finished, failed;
    int kept;                  /* 1 if a part was left untranslated */
    text_bytes output;         /* output without its line break */
    text_bytes notes;          /* messages for standard error, each ended by NUL */
    text_bytes partial;        /* final part of the translation in progress */
    routing_sentence *routing; /* NULL without --routing */
} program_line;

/* Totals for --stats. */
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
    const char *pairs;     /* option for lines of the form source TAB target, or NULL */
    int keeps;             /* 1 if `write` needs program_line.source and given */
    int messages, splits;  /* messages: 1 to read an ICU message as one text; splits: 0 to copy the message */
    int paragraphs;        /* 1 if all lines up to the next blank line are one text */
    size_t context;        /* number of preceding lines that form the context of a text */
    int grows;             /* 1 to show unfinished lines on a terminal */
    routing_file *routing; /* closed by the program; may be NULL */
    /* Append the output for a line. `result` is valid even if the line was not sent to the translator. */
    void (*write)(program_lines *lines, program_line *line, const moetext_result *result);
    void (*stats)(const program_lines *lines, const program_totals *totals); /* called at the end; may be NULL */

    program_progress progress;
    program_output out;
    text_bytes block; /* finished lines to write with one call */

    /* Private */
    const char *packed; /* [packed_length] records to translate into `block`; NULL to read the input */
    size_t packed_length;
    program_totals totals;
    text_reader reader;
    text_bytes paragraph; /* lines of the current paragraph or, if `over` is 1, of the paragraph just returned */
    uint64_t number;      /* line number of the first line of the paragraph, or of the next line in `ahead` */
    int too_long, over;
    int blank;        /* a blank line follows the paragraph */
    text_bytes ahead; /* lines read in search of the end of a message; the next line is at `begin` */
    size_t begin, lines_ahead, kept_ahead; /* kept_ahead: number of lines to copy from an untranslated message */
    int closed;                            /* 1 if `ahead` is complete: the input has ended, or a line is too long */
    text_bytes earlier, shown;             /* lines for the context of the next text; context of the current text */
    size_t n_earlier;                      /* lines in `earlier` */
    program_line *first, *last, *spare;
    text_bytes growing; /* the unfinished line shown on the terminal */
    double shown_at;
    moe_error trouble; /* error that ends the run, if its code is set */
    int read_error;    /* errno of a failed read, or 0 */
};

/* Return the first message about a line, for the line's JSON object. */
const char *program_line_note(const program_line *line, const moetext_result *result);

/* Convert the options to settings for libmoetext. */
text_settings program_settings(const program_common *o);
/* Create the translator for a model opened by text_model_begin. Return -1 to continue, an exit status after an error
 * message (such as for exceeding --max-memory), or EXIT_DONE after --dry-run printed the memory. With batchwise gating,
 * print a warning that `unit`, such as "a translation", depends on the batch. */
int program_translator(const program_common *o, text_settings *settings, const moetext_model *model, const char *unit,
                       moetext **out);

/* Do everything from opening input and output to the last message; return the exit status. */
int program_lines_run(program_lines *lines);

/* ---- The steps of program_lines_run, for several processes that share the work (ranks.c) ---- */

int program_lines_open(program_lines *lines); /* return -1, or the exit status after an error message */
/* Read up to `n` texts and append a record of each to *packed. */
void program_lines_pack(program_lines *lines, size_t n, text_bytes *packed);
size_t program_record_bytes(const char *record);
/* Translate records of program_lines_pack into lines->block, and count the lines in lines->progress. Return the exit
 * status of this process. */
int program_lines_translate(program_lines *lines, const char *packed, size_t length);
/* Print the error that ended the run, or the totals; return the exit status. */
int program_lines_outcome(const program_lines *lines, moe_status status, const moe_error *error);
int program_lines_close(program_lines *lines, int opened, int status);

#endif
