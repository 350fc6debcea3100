/* main.c - moe, one program whose first argument or own name selects a command: translate, serve, get and others.
 *
 * tools/dist/dist.mk links it with the programs and appends a model. */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include "tools/programs/console.h"
#include "tools/programs/options.h"
#include "tools/text/places.h"
#include "tools/text/system.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int program_main(int argc, char **argv);
program_main moe_translate_main, moe_server_main, moe_get_main, moe_info_main, moe_score_main, moe_classify_main,
    moe_align_main, moe_quantize_main, moe_prune_main, moe_calibrate_main, moe_routing_main;

#ifdef _WIN32
#define WHEEL "win_amd64"
#elif defined(__aarch64__)
#define WHEEL "manylinux_2_28_aarch64"
#else
#define WHEEL "manylinux_2_28_x86_64"
#endif

typedef struct program {
    const char *command, *name; /* "serve", "moe-server" */
    program_main *run;          /* NULL for a program of the Python package */
    const char *about;
} program;

static const program programs[] = {
    { "translate", "moe-translate", moe_translate_main, "translate lines of text" },
    { "serve", "moe-server", moe_server_main, "translate over HTTP, with a web page" },
    { "get", "moe-get", moe_get_main, "fetch published models by name" },
    { "documents", "moe-documents", NULL, "translate office files, books, web pages (Python)" },
    { "info", "moe-info", moe_info_main, "print the contents of a model file" },
    { "score", "moe-score", moe_score_main, "score lines with a language model" },
    { "classify", "moe-classify", moe_classify_main, "classify rows of numbers" },
    { "align", "moe-align", moe_align_main, "align the words of translations" },
    { "evaluate", "moe-evaluate", NULL, "compute BLEU and chrF (Python)" },
    { "quantize", "moe-quantize", moe_quantize_main, "write a model in another number format" },
    { "prune", "moe-prune", moe_prune_main, "remove experts from a model" },
    { "calibrate", "moe-calibrate", moe_calibrate_main, "balance the experts of a model" },
    { "routing", "moe-routing", moe_routing_main, "write a page that shows the routing of tokens" },
};
enum { PROGRAMS = sizeof programs / sizeof *programs };

static void print_help(FILE *out) {
    fputs("Usage: moe TEXT... -t LANG [OPTION]...\n"
          "       moe COMMAND [ARGUMENT]...\n"
          "Translate TEXT, or run a command if the first argument names one. After --, all\n"
          "arguments are text.\n"
          "\n"
          "Commands:\n",
          out);
    for (int i = 0; i < PROGRAMS; i++) fprintf(out, "  %-11s %s\n", programs[i].command, programs[i].about);
    fputs("\n"
          "  -h, --help      print this text; moe COMMAND --help describes a command\n"
          "  -V, --version   print the version\n"
          "\n"
          "A link to this file named moe-translate, moe-server and so on runs that command.\n"
          "The file contains a model. Option -m, the variable MOE_MODEL and models fetched\n"
          "with moe get take precedence over it.\n"
          "\n"
          "Examples:\n"
          "  moe 'Where is my book?' -t fr\n"
          "  moe -t de < letter.txt\n"
          "  moe serve\n"
          "  moe get en-pt\n",
          out);
}

static const program *find_program(const char *name, int by_command) {
    for (const program *p = programs; p < programs + PROGRAMS; p++)
        if (strcmp(name, by_command ? p->command : p->name) == 0) return p;
    return NULL;
}

/* Return the command that `word` misspells by one letter (or a swap) or names in full, or NULL. */
static const char *similar_command(const char *word) {
    if (strcmp(word, "help") == 0) return "--help";
    if (strcmp(word, "version") == 0) return "--version";
    for (int i = 0; i < PROGRAMS; i++) {
        const char *a = programs[i].command, *b = word;
        const size_t from = strlen(a), to = strlen(word);
        while (*a && *a == *b) a++, b++;
        const int swapped = a[0] && a[1] && a[0] == b[1] && a[1] == b[0] && strcmp(a + 2, b + 2) == 0;
        if ((from == to && (swapped || (*a && strcmp(a + 1, b + 1) == 0))) || (from == to + 1 && !strcmp(a + 1, b)) ||
            (to == from + 1 && !strcmp(a, b + 1)) || strcmp(programs[i].name, word) == 0 ||
            strcmp(programs[i].name + 4, word) == 0)
            return programs[i].command;
    }
    return NULL;
}

/* Return 1 if the arguments include -t or --target. */
static int has_target(int argc, char **argv) {
    for (int i = 2; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strncmp(argv[i], "-t", 2) == 0 || strncmp(argv[i], "--t", 3) == 0) return 1;
    return 0;
}

/* Append this program's folder to PATH, where the Python package looks for programs with a model inside. */
static void append_own_folder(void) {
    char own[4096], path[16384];
    const char *folders = getenv("PATH");
    if (!text_place_of_self(own, sizeof own)) return;
    const char *slash = system_slash(own);
    const int n = snprintf(path, sizeof path, "%s%s%.*s", folders ? folders : "",
                           folders && *folders ? SYSTEM_LIST : "", slash ? (int)(slash - own) : 0, own);
    if (slash && n > 0 && (size_t)n < sizeof path) setenv("PATH", path, 1);
}

/* Run a program of the Python package: the installed program, or the package with the python3 on PATH. */
static int run_python(const program *p, int is_link, int argc, char **argv) {
    static char python[] = "python3", option[] = "-c";
    const char *module = strcmp(p->command, "evaluate") == 0 ? "evaluate" : "program";
    const char *extra = strcmp(p->command, "evaluate") == 0 ? "evaluate" : "documents";
    char advice[512], code[2048];
    char **words = calloc((size_t)argc + 3, sizeof *words);
    if (!words) return program_error("out of memory"), EXIT_MODEL;
    snprintf(advice, sizeof advice,
             "Python 3.9 or newer with the package moe-translate is required: pip install "
             "\"moe_translate-" MOE_VERSION "-py3-none-" WHEEL ".whl[%s]\"",
             extra);
    snprintf(code, sizeof code,
             "import sys\n"
             "sys.path[:] = [p for p in sys.path if p]\n" /* not the current folder */
             "try:\n"
             "    from moe_translate.%s import main\n"
             "except ImportError as error:\n"
             "    if error.name != 'moe_translate': raise\n"
             "    print('%s: %s', file=sys.stderr)\n"
             "    sys.exit(%d)\n"
             "sys.argv[0] = '%s'\n"
             "sys.exit(main())\n",
             module, p->name, advice, EXIT_MODEL, p->name);
    append_own_folder();
    memcpy(words, argv, (size_t)argc * sizeof *words);
    if (!is_link && !SYSTEM_IS_WINDOWS) execvp(p->name, words);
    if (argc > 1) memcpy(words + 3, argv + 1, ((size_t)argc - 1) * sizeof *words);
    words[0] = python, words[1] = option, words[2] = code;
    if (!SYSTEM_IS_WINDOWS) execvp(python, words); /* Windows would not wait for it */
    free(words);
    program_error("%s", advice);
    return EXIT_MODEL;
}

static const char *command_of(const char *name, size_t length) {
    for (const program *p = programs; p < programs + PROGRAMS; p++)
        if (strlen(p->name) == length && memcmp(name, p->name, length) == 0) return p->command;
    return NULL;
}

/* Say why the model inside is not used if there is no other one, because what follows is that none is installed. A
 * package's program has no model inside and only names of links. */
static void check_own_model(void) {
    char own[4096], shipped[4096];
    if (!text_place_of_shipped(shipped, sizeof shipped) && text_place_of_self(own, sizeof own))
        program_error("%s: the model inside is missing or cannot be read; if the file is incomplete or was changed, "
                      "download it again",
                      own);
}

static int run(const program *p, int is_link, int argc, char **argv) {
    static char name[32];
    snprintf(name, sizeof name, "%s", p->name);
    argv[0] = name;
    if (!is_link) option_use_commands(command_of), check_own_model();
    if (p->run) return p->run(argc, argv);
    program_begin(name);
    return run_python(p, is_link, argc, argv);
}

/* Find the program that a link to this file names: moe-translate, without ".exe". */
static const program *find_link(const char *path) {
    char name[32];
    const size_t n = path ? strcspn(system_name(path), ".") : 0;
    if (!n || n >= sizeof name) return NULL;
    memcpy(name, system_name(path), n), name[n] = '\0';
    return find_program(name, 0);
}

int main(int argc, char **argv) {
    const program *p = argc ? find_link(argv[0]) : NULL;
    const char *first = argc > 1 ? argv[1] : NULL;
    if (p) return run(p, 1, argc, argv);
    if (first && (p = find_program(first, 1)) != NULL) return run(p, 0, argc - 1, argv + 1);
    int status = program_begin("moe");
    if (status >= 0) return status;
    if (first && (strcmp(first, "--help") == 0 || strcmp(first, "-h") == 0))
        return print_help(stdout), program_printed();
    if (first && (strcmp(first, "--version") == 0 || strcmp(first, "-V") == 0))
        return puts("moe " MOE_VERSION), program_printed();
    if (!first) return print_help(stderr), EXIT_USAGE;
    const char *similar = has_target(argc, argv) ? NULL : similar_command(first);
    if (similar)
        return program_usage_error("unknown command '%s': did you mean '%s'? To translate it, use moe -t LANG -- %s",
                                   first, similar, first);
    return run(programs, 0, argc, argv);
}
