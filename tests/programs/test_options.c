/* test_options.c - the command-line parser and the --help printer (tools/programs/options.h), with options of
 * every kind. */
#define _GNU_SOURCE
#include "tools/programs/options.h"
#include "tools/text/settings.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/test.h"

typedef struct options {
    text_settings settings;
    const char *word, *path;
    size_t size;
    float share;
    int flag, n, colour, calls;
} options;

static int take(void *user, const option_row *row, const char *value) {
    (void)row;
    ((options *)user)->calls++;
    return strcmp(value, "stop") == 0 ? 7 : -1;
}

static const char *const colours[] = { "red", "blue", NULL };

static const option_row own_rows[] = {
    { "word", "WORD", "a word", .letter = 'w', .group = "Own", OPTION_MEMBER(ROW_WORD, word) },
    { "path", "FILE", "a path", .more = ": with more words than fit into one line of the help text", .letter = 'p',
      .group = GROUP_FILES, OPTION_MEMBER(ROW_PATH, path) },
    { "flag", NULL, "a flag", .letter = 'f', .group = GROUP_FILES, OPTION_FLAG(flag) },
    { "size", "SIZE", "a size", .group = "Own", OPTION_MEMBER(ROW_SIZE, size), .values = "a size such as 512M" },
    { "share", "X", "a share", .group = "Own", OPTION_MEMBER(ROW_FLOAT, share), .high = 1 },
    { "number", "N", "a number", .group = "Own", OPTION_INT(n, 1, 9) },
    { "colour", "NAME", "a name", .group = "Own", OPTION_INT(colour, 0, 1), .names = colours, .values = "red or blue" },
    { "call-with-a-long-name", "X", "a call", .group = "Own", .kind = ROW_CALL, .take = take, .repeated = 1 },
    { 0 },
};
#define SETTINGS { NULL, offsetof(options, settings), "beam early-stopping noise truncate expert-memory" }
static const option_program program = { .name = "test",
                                        .usage = "[OPTION]... A [B]\n--help",
                                        .about = "About.",
                                        OPTION_LISTS(OPTION_OWN, SETTINGS),
                                        .notes = "Notes.",
                                        .examples = "  test  a\n",
                                        .required = "word",
                                        OPTION_EXCLUSIONS("flag size share"),
                                        .least = 1,
                                        .most = 2 };

static char printed[1 << 14];

/* Parse the words of a command line, and set `printed` to the output on a standard stream. */
static int run(const char *line, int stream, options *o) {
    char words[256], *argv[sizeof words / 2] = { (char *)(uintptr_t)"test" };
    int argc = 1, kept = dup(stream);
    FILE *file = tmpfile();
    *o = (options){ .settings = text_settings_none() };
    snprintf(words, sizeof words, "%s", line);
    for (char *word = strtok(words, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    assert_true(file && kept >= 0 && dup2(fileno(file), stream) == stream);
    const int status = option_parse(&program, argc, argv, o);
    fflush(NULL);
    assert_true(dup2(kept, stream) == stream);
    rewind(file);
    printed[fread(printed, 1, sizeof printed - 1, file)] = '\0';
    fclose(file);
    close(kept);
    return status;
}

TEST(rows_set_members_of_every_kind) {
    options o;
    assert_int_equal(run("-w x --path=- --size 2K --number 9 --colour blue --call-w=1 --call-w=2 a --beam 4 --noise "
                         "9223372036854775807 --early-stopping --truncate=0 --expert-memory auto b",
                         2, &o),
                     -1);
    assert_string_equal(o.word, "x");
    assert_null(o.path);
    assert_int_equal(o.size, 2048);
    assert_int_equal(o.n, 9);
    assert_int_equal(o.colour, 1);
    assert_int_equal(o.calls, 2);
    assert_true(o.settings.noise == INT64_MAX && o.settings.truncate == 0);
    assert_true(text_settings_param(&o.settings, "beam") == 4 &&
                text_settings_param(&o.settings, "early-stopping") == 1);
    assert_true(text_settings_param(&o.settings, "expert-memory") > 1e18 &&
                isnan(text_settings_param(&o.settings, "seed")));
    assert_int_equal(run("-ffw x -- --number", 2, &o), -1);
    assert_true(o.flag == 1 && optind == 4);
    assert_int_equal(run("-w x --call-with-a-long-name stop a", 2, &o), 7);
}

TEST(invalid_command_lines_are_refused) {
    static const char *const cases[][2] = {
        { "a", "missing --word WORD" },
        { "-w x", "missing argument: [OPTION]... A [B]" },
        { "-w x a b c", "unexpected argument 'c'" },
        { "-w x --word y a", "--word is given twice" },
        { "-w x --number 0 a", "value '0' of --number is out of range: expected 1 to 9" },
        { "-w x --number 99999999999999999999 a", "value '99999999999999999999' of --number is out of range" },
        { "-w x --number 1x a", "invalid value '1x' for --number: expected 1 to 9" },
        { "-w x --share 2 a", "value '2' of --share is out of range: expected 0 to 1" },
        { "-w x --share=nan a", "invalid value 'nan' for --share" },
        { "-w x --size 2X a", "invalid value '2X' for --size: expected a size such as 512M" },
        { "-w x --colour green a", "invalid value 'green' for --colour: expected red or blue" },
        { "-w x --beam 0 a", "value '0' of --beam is out of range: expected 1 to 64" },
        { "-w x --noise -1 a", "value '-1' of --noise is out of range: expected a seed, 0 or more" },
        { "-w x --truncate=2 a", "value '2' of --truncate is out of range: expected 0 or 1" },
        { "-w x --expert-memory much a", "invalid value 'much' for --expert-memory" },
        { "-w x -f --share 1 a", "--flag cannot be combined with --share" },
        { "-w x --numbre 1 a", "unrecognized option '--numbre': did you mean --number?" },
        { "-w x --zzzzzz a", "unrecognized option '--zzzzzz'" },
        { "-w x -z a", "unrecognized option '-z'" },
        { "-w x --number 1 -zw a", "unrecognized option '-z'" },
        { "-w x --s 1 a", "option '--s' is ambiguous: --size or --share" },
        { "-w x a --number", "option '--number' requires an argument" },
        { "a -w", "option '--word' requires an argument" },
        { "-w x --flag=1 a", "option '--flag' doesn't allow an argument" },
        { "-w x --number \033 a", "invalid value '\xEF\xBF\xBD'" },
    };
    options o;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(run(cases[i][0], 2, &o), 2);
        if (!strstr(printed, cases[i][1]) || strncmp(printed, "test: ", 6) != 0)
            fail_msg("%s: %s", cases[i][0], printed);
        assert_non_null(strstr(printed, "; see test --help\n"));
    }
}

TEST(help_is_printed_in_groups) {
    static const char *const parts[] = {
        "Usage: test [OPTION]... A [B]\n       test --help\nAbout.\n\nInput and output:\n",
        "  -p, --path FILE           a path: with more words than fit into one line of\n"
        "                            the help text\n  -f, --flag                a flag\n\nOwn:\n",
        "      --call-with-a-long-name X\n                            a call\n\nSearch:\n      --beam N  ",
        "\n      --early-stopping[=0]  ",
        "\n      --truncate[=0]        cut ",
        "\nOther:\n  -h, --help                print this help\n"
        "  -V, --version             print the version\n\nNotes.\n"
        "\nExamples:\n  test  a\n",
    };
    options o;
    const char *at = printed;
    assert_int_equal(run("--help", 1, &o), 0);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const char *found = strstr(at, parts[i]);
        if (!found) fail_msg("part %zu is not in: %s", i, at);
        at = found + 1;
    }
    for (const char *line = printed; *line; line += strcspn(line, "\n") + 1) assert_true(strcspn(line, "\n") < 80);
    assert_int_equal(run("-V", 1, &o), 0);
    assert_string_equal(printed, "test " MOE_VERSION "\n");
}

int main(void) { return run_all_tests(NULL, NULL); }
