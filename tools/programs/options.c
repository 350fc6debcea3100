/* options.c - parse command lines and print --help; documented in options.h. */
#define _GNU_SOURCE      /* getopt_long on Linux */
#define _DARWIN_C_SOURCE /* getopt_long on macOS */
#include "tools/programs/options.h"
#include "moe.h"
#include "tools/text/bytes.h"
#include "tools/text/settings.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MOST_ROWS = 128, WIDTH = 79, COLUMN = 28, USAGE = 2, OUTPUT = 4, FIRST = 256 };

typedef struct table {
    const option_program *program;
    option_row rows[MOST_ROWS];
    size_t bases[MOST_ROWS];
    int given[MOST_ROWS];
    size_t n;
} table;

static const option_row always[] = {
    { "help", NULL, "print this help", .letter = 'h', .group = GROUP_OTHER },
    { "version", NULL, "print the version", .letter = 'V', .group = GROUP_OTHER },
    { 0 },
};

/* ---- 1. The table -------------------------------------------------------------------------------------- */

/* Return the next word of a list, or NULL at the end. */
static const char *next_word(const char **list, size_t *length) {
    const char *word = *list + strspn(*list, " ");
    *length = strcspn(word, " ");
    *list = word + *length;
    return *length ? word : NULL;
}

static size_t find(const table *t, const char *name, size_t length) {
    size_t i = 0;
    while (i < t->n && (strncmp(t->rows[i].name, name, length) != 0 || t->rows[i].name[length])) i++;
    return i;
}

static void add_row(table *t, const option_list *list, const option_row *row) {
    const char *names = list->names;
    size_t length = 0;
    int wanted = !names && row->group;
    for (const char *word; names && !wanted && (word = next_word(&names, &length));)
        wanted = strlen(row->name) == length && strncmp(row->name, word, length) == 0;
    if (!wanted || t->n == MOST_ROWS || find(t, row->name, strlen(row->name)) < t->n) return;
    t->bases[t->n] = list->base;
    t->rows[t->n++] = *row;
}

static void add_list(table *t, const option_list *list) {
    option_row row;
    for (size_t i = 0; !list->rows && text_settings_row(i, &row); i++) add_row(t, list, &row);
    for (const option_row *at = list->rows; at && at->name; at++) add_row(t, list, at);
}

/* ---- 2. Help ------------------------------------------------------------------------------------------- */

static const char *(*command_of_program)(const char *name, size_t length);

void option_use_commands(const char *(*command_of)(const char *name, size_t length)) {
    command_of_program = command_of;
}

/* Return the length of the word at `at` if it may be the name of a program, not part of a path or file name. */
static size_t name_length(const char *text, size_t length, size_t at) {
    size_t n = 4;
    if (length - at < 5 || memcmp(text + at, "moe-", 4) != 0 || (at && !strchr(" ('`\n", text[at - 1]))) return 0;
    while (at + n < length && islower((unsigned char)text[at + n])) n++;
    const char next = at + n < length ? text[at + n] : ' ', after = at + n + 1 < length ? text[at + n + 1] : ' ';
    return strchr("-_/", next) || isalnum((unsigned char)next) || (next == '.' && isalnum((unsigned char)after)) ? 0
                                                                                                                 : n;
}

size_t option_put(FILE *to, const char *text, size_t length) {
    size_t from = 0, written = 0;
    for (size_t i = 0, n; command_of_program && i < length; i += n ? n : 1) {
        n = name_length(text, length, i);
        const char *command = n ? command_of_program(text + i, n) : NULL;
        if (!command) continue;
        written += fwrite(text + from, 1, i - from, to);
        written += fwrite("moe ", 1, 4, to);
        written += fwrite(command, 1, strlen(command), to);
        from = i + n;
    }
    return written + fwrite(text + from, 1, length - from, to);
}

/* Print words, wrapped at WIDTH and indented by `indent`. `column` is the current column; return the new one. */
static int put_words(FILE *to, const char *text, size_t length, int column, int indent) {
    for (const char *word = text, *end; word < text + length; word = end) {
        end = word + 1;
        while (end < text + length && *end != ' ') end++;
        if (*word == ' ' && column + (int)(end - word) > WIDTH) {
            column = fprintf(to, "\n%*s", indent, "") - 1;
            word++;
        }
        column += (int)option_put(to, word, (size_t)(end - word));
    }
    return column;
}

static void put_text(FILE *to, const char *text) {
    for (size_t length; *text; text += length + (text[length] == '\n')) {
        length = strcspn(text, "\n");
        if (*text == ' ') option_put(to, text, length);
        else put_words(to, text, length, 0, 0);
        fputc('\n', to);
    }
}

static void put_row(FILE *to, const option_row *row) {
    int column =
        row->letter ? fprintf(to, "  -%c, --%s", row->letter, row->name) : fprintf(to, "      --%s", row->name);
    if (row->optional) column += fprintf(to, "[=0]");
    else if (row->argument) column += fprintf(to, " %s", row->argument);
    if (column >= COLUMN - 1) column = 0, fputc('\n', to);
    fprintf(to, "%*s", COLUMN - column, "");
    column = put_words(to, row->help, strlen(row->help), COLUMN, COLUMN);
    if (row->more) put_words(to, row->more, strlen(row->more), column, COLUMN);
    fputc('\n', to);
}

/* Shared groups of options in the order in which every program prints them. A program's own groups replace NULL. */
static const char *const groups[] = { GROUP_MODEL,  GROUP_LANGUAGES, GROUP_FILES, NULL,
                                      GROUP_SEARCH, GROUP_SAMPLING,  GROUP_TEXT,  GROUP_PROMPT,
                                      GROUP_GATES,  GROUP_MEMORY,    GROUP_SPEED, GROUP_OTHER };

static int is_shared(const char *group) {
    int found = 0;
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) found |= groups[i] && strcmp(groups[i], group) == 0;
    return found;
}

static void put_group(FILE *to, const table *t, const char *group) {
    int any = 0;
    for (size_t i = 0; i < t->n; i++) {
        if (strcmp(t->rows[i].group, group) != 0) continue;
        if (!any++) fprintf(to, "\n%s:\n", group);
        put_row(to, &t->rows[i]);
    }
}

static void put_own_groups(FILE *to, const table *t) {
    for (size_t i = 0; i < t->n; i++) {
        size_t first = 0;
        while (strcmp(t->rows[first].group, t->rows[i].group) != 0) first++;
        if (first == i && !is_shared(t->rows[i].group)) put_group(to, t, t->rows[i].group);
    }
}

static void put_help(FILE *to, const table *t) {
    const option_program *p = t->program;
    for (const char *at = p->usage; *at;) {
        const size_t length = strcspn(at, "\n");
        fputs(at == p->usage ? "Usage: " : "       ", to);
        option_put(to, p->name, strlen(p->name));
        fprintf(to, " %.*s\n", (int)length, at);
        at += length + (at[length] == '\n');
    }
    put_text(to, p->about);
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
        if (groups[i]) put_group(to, t, groups[i]);
        else put_own_groups(to, t);
    if (p->notes) fputc('\n', to), put_text(to, p->notes);
    if (p->examples) fputs("\nExamples:\n", to), put_text(to, p->examples);
}

static int printed(const option_program *p) {
    if (!fflush(stdout) && !ferror(stdout)) return 0;
    fprintf(stderr, "%s: standard output: %s\n", p->name, strerror(errno ? errno : EIO));
    return OUTPUT;
}

/* ---- 3. Messages --------------------------------------------------------------------------------------- */

int option_refuse(const option_program *p, const char *format, ...) {
    char message[1024];
    text_bytes line = { 0 };
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    text_append_clean(&line, message, strlen(message)); /* remove control characters from quoted arguments */
    fprintf(stderr, "%s: %s; see ", p->name, line.failed ? "out of memory" : line.data);
    option_put(stderr, p->name, strlen(p->name));
    fputs(" --help\n", stderr);
    text_bytes_free(&line);
    return USAGE;
}

/* Return the edit distance of two names; a[length] need not end with NUL. */
static size_t distance(const char *a, size_t length, const char *b) {
    size_t row[64], m = strlen(b);
    if (m >= sizeof row / sizeof *row) return SIZE_MAX;
    for (size_t j = 0; j <= m; j++) row[j] = j;
    for (size_t i = 1; i <= length; i++) {
        size_t corner = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            const size_t swap = corner + (a[i - 1] != b[j - 1]);
            corner = row[j];
            row[j] = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            if (swap < row[j]) row[j] = swap;
        }
    }
    return row[m];
}

/* Report an unknown option, or an ambiguous abbreviation; return the exit status. */
static int unknown_option(const table *t, const char *word) {
    const size_t length = strcspn(word, "=");
    const char *fits[2] = { NULL, NULL }, *nearest = NULL;
    size_t least = length / 3 + 1, n = 0;
    for (size_t i = 0; i < t->n; i++) {
        const size_t edits = distance(word, length, t->rows[i].name);
        if (strncmp(t->rows[i].name, word, length) == 0 && n++ < 2) fits[n - 1] = t->rows[i].name;
        if (edits <= least) least = edits - (edits > 0), nearest = t->rows[i].name;
    }
    if (n > 1) return option_refuse(t->program, "option '--%s' is ambiguous: --%s or --%s", word, fits[0], fits[1]);
    if (!nearest) return option_refuse(t->program, "unrecognized option '--%s'", word);
    return option_refuse(t->program, "unrecognized option '--%s': did you mean --%s?", word, nearest);
}

/* Report an option that getopt_long refused; return the exit status. */
static int bad_option(const table *t, int c, const char *word) {
    const option_row *row = NULL;
    for (size_t i = 0; i < t->n && !row; i++)
        if (optopt && (optopt == FIRST + (int)i || optopt == t->rows[i].letter)) row = &t->rows[i];
    if (row && c == ':') return option_refuse(t->program, "option '--%s' requires an argument", row->name);
    if (row) return option_refuse(t->program, "option '--%s' doesn't allow an argument", row->name);
    if (!optopt && strncmp(word, "--", 2) == 0) return unknown_option(t, word + 2);
    return option_refuse(t->program, "unrecognized option '-%c'", optopt);
}

/* ---- 4. Parsing ---------------------------------------------------------------------------------------- */

static int set_row(table *t, size_t i, const char *value, void *options) {
    const option_row *row = &t->rows[i];
    void *fields = (char *)options + t->bases[i];
    char message[512];
    if (row->kind != ROW_FLAG && !row->repeated && t->given[i])
        return option_refuse(t->program, "--%s is given twice", row->name);
    t->given[i] = 1;
    if (row->kind == ROW_CALL) return row->take(options, row, value);
    const row_result result = option_row_set(row, fields, value ? value : "1");
    if (result == ROW_OK) return -1;
    option_row_error(row, result, "--", value, message, sizeof message);
    return option_refuse(t->program, "%s", message);
}

/* Check required options and exclusions. Return -1, or an exit status after an error message. */
static int check(const table *t) {
    const option_program *p = t->program;
    const char *names = p->required ? p->required : "", *name;
    size_t length;
    while ((name = next_word(&names, &length))) {
        const size_t i = find(t, name, length);
        if (i < t->n && !t->given[i]) return option_refuse(p, "missing --%s %s", t->rows[i].name, t->rows[i].argument);
    }
    for (const char *const *at = p->exclusions; at && *at; at++) {
        names = *at;
        name = next_word(&names, &length);
        const size_t first = find(t, name, length);
        while (first < t->n && t->given[first] && (name = next_word(&names, &length))) {
            const size_t i = find(t, name, length);
            if (i < t->n && t->given[i])
                return option_refuse(p, "--%s cannot be combined with --%s", t->rows[first].name, t->rows[i].name);
        }
    }
    return -1;
}

/* Fill the tables for getopt_long: row i is a long option with value FIRST + i and a letter, if any. */
static void describe(const table *t, struct option *known, char *letters) {
    *letters++ = ':';
    for (size_t i = 0; i < t->n; i++) {
        const option_row *row = &t->rows[i];
        const int has_arg = row->optional ? optional_argument : row->argument ? required_argument : no_argument;
        known[i] = (struct option){ row->name, has_arg, NULL, FIRST + (int)i };
        if (!row->letter) continue;
        *letters++ = row->letter;
        if (row->argument) *letters++ = ':';
    }
    known[t->n] = (struct option){ NULL, 0, NULL, 0 };
    *letters = '\0';
}

static int take_option(table *t, int c, void *options) {
    size_t i = c >= FIRST ? (size_t)(c - FIRST) : 0;
    while (c < FIRST && t->rows[i].letter != c) i++;
    if (i < t->n - 2) return set_row(t, i, optarg, options);
    if (i == t->n - 2) put_help(stdout, t);
    else printf("%s %s\n", t->program->name, t->program->version ? t->program->version() : moe_version());
    return printed(t->program);
}

/* ---- 5. Files ------------------------------------------------------------------------------------------ */

static char *trimmed(char *text) {
    text += strspn(text, " \t");
    size_t length = strlen(text);
    while (length && strchr(" \t\r", text[length - 1])) length--;
    text[length] = '\0';
    return text;
}

/* Set the option named on a line. */
static int take_line(table *t, char *line, void *options) {
    char *equals = strchr(line, '='), *name, *value;
    line = trimmed(line);
    if (!*line || *line == '#') return -1;
    if (equals) *equals = '\0';
    name = trimmed(line), value = equals ? trimmed(equals + 1) : NULL;
    const size_t i = find(t, name, strlen(name));
    if (!*name) return option_refuse(t->program, "missing name: expected NAME = VALUE");
    if (strcmp(name, "config") == 0) return option_refuse(t->program, "an option file cannot include another");
    if (i >= t->n - 2) return unknown_option(t, name);
    const int flag = !t->rows[i].argument, off = value && strcmp(value, "0") == 0;
    if (flag && value && !off && strcmp(value, "1") != 0)
        return option_refuse(t->program, "invalid value '%s' for %s: expected 0 or 1", value, name);
    if (!flag && !(value && *value)) return option_refuse(t->program, "%s requires a value: %s = VALUE", name, name);
    return flag && off ? -1 : set_row(t, i, flag ? NULL : value, options);
}

/* Read a file into memory. Return NULL after an error message. */
static char *read_file(const option_program *p, const char *path) {
    FILE *file = fopen(path, "r");
    text_bytes all = { 0 };
    char part[4096];
    for (size_t n; file && (n = fread(part, 1, sizeof part, file));) text_append(&all, part, n);
    text_append(&all, "", 0);
    const int failed = !file || ferror(file);
    if (failed) fprintf(stderr, "%s: --config %s: %s\n", p->name, path, strerror(errno));
    else if (all.failed) fprintf(stderr, "%s: out of memory\n", p->name);
    else if (memchr(all.data, 0, all.length)) fprintf(stderr, "%s: --config %s: contains a NUL byte\n", p->name, path);
    else return fclose(file), all.data;
    if (file) fclose(file);
    text_bytes_free(&all);
    return NULL;
}

static int take_file(table *t, option_file *file, void *options) {
    char *text = file->text = read_file(t->program, file->path);
    if (!text) return OUTPUT;
    if (strncmp(text, "\xEF\xBB\xBF", 3) == 0) text += 3; /* byte order mark */
    for (size_t number = 1; text; number++) {
        char *line = text, *end = strchr(text, '\n');
        if (end) *end = '\0';
        text = end ? end + 1 : NULL;
        const int status = take_line(t, line, options);
        if (status < 0) continue;
        fprintf(stderr, "%s: see line %zu of %s\n", t->program->name, number, file->path);
        return status;
    }
    const int status = check(t);
    memset(t->given, 0, sizeof t->given);
    return status;
}

/* Find the --config file on the command line and read it before the other options. */
static int take_config(table *t, int argc, char **argv, const char *letters, const struct option *known,
                       void *options) {
    option_file *file = (void *)((char *)options + t->program->config - 1);
    const size_t row = find(t, "config", strlen("config"));
    for (int c; (c = getopt_long(argc, argv, letters, known, NULL)) != -1;)
        if (c == FIRST + (int)row) file->path = optarg;
    const int status = file->path ? take_file(t, file, options) : -1;
    return file->done = 1, status;
}

static void restart(void) {
#ifdef __APPLE__
    optreset = 1, optind = 1;
#else
    optind = 0; /* reset getopt_long, which may have been called before */
#endif
    opterr = 0;
}

int option_parse(const option_program *program, int argc, char **argv, void *options) {
    struct option known[MOST_ROWS + 1];
    char letters[2 * MOST_ROWS + 2];
    table t = { .program = program };
    int status = -1;
    for (size_t i = 0; i < program->n_lists; i++) add_list(&t, &program->lists[i]);
    add_list(&t, &(option_list){ .rows = always });
    describe(&t, known, letters);
    restart();
    if (program->config) status = take_config(&t, argc, argv, letters, known, options), restart();
    for (int c; status < 0 && (c = getopt_long(argc, argv, letters, known, NULL)) != -1;)
        status = c == '?' || c == ':' ? bad_option(&t, c, argv[optind - 1]) : take_option(&t, c, options);
    if (status < 0) status = check(&t);
    if (status >= 0) return status;
    if (argc - optind > program->most)
        return option_refuse(program, "unexpected argument '%s'", argv[optind + program->most]);
    if (argc - optind < program->least) return option_refuse(program, "missing argument: %s", program->usage);
    return -1;
}
