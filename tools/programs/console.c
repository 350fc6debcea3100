/* console.c - startup, time and messages; documented in console.h. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/console.h"
#include "tools/programs/options.h"
#include "tools/text/bytes.h"
#include "tools/text/moetext.h"
#include "tools/text/open.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <utf8proc.h>

static const char *program_name = "moe";
static int closed[3]; /* 1 for standard streams that were closed at startup */

/* If a mapped model file was truncated, map zeros in place of the missing page. The engine reports the change after the
 * step. */
static void on_missing_page(int number, siginfo_t *info, void *context) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)info->si_addr / page * page;
    (void)context;
    if (info->si_code != BUS_ADRERR ||
        mmap((void *)at, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        signal(number, SIG_DFL); /* the repeated access ends the program */
}

int program_begin(const char *name) {
    const struct sigaction missing = { .sa_sigaction = on_missing_page, .sa_flags = SA_SIGINFO | SA_RESTART };
    program_name = name;
    sigaction(SIGBUS, &missing, NULL);
    signal(SIGXFSZ, SIG_IGN); /* makes write() fail if a file exceeds the size limit */
    for (int fd = 0; fd < 3; fd++) {
        closed[fd] = fcntl(fd, F_GETFD) < 0 && errno == EBADF;
        if (closed[fd] && open("/dev/null", fd ? O_RDONLY : O_WRONLY) != fd) return EXIT_INPUT_OUTPUT;
    }
    return -1;
}

int program_closed(int stream) { return closed[stream]; }

double program_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int progress_shown;

void program_progress_hide(void) {
    if (progress_shown) fputs("\r\033[K", stderr);
    progress_shown = 0;
}

void program_progress_show(program_progress *p) {
    if (!p->on) return;
    double now = program_seconds();
    if (now - p->last < 0.2) return;
    p->last = now;
    fprintf(stderr, "\r%llu lines, %.0f tokens/s\033[K", (unsigned long long)p->lines,
            (double)p->tokens / (now - p->begin > 1e-3 ? now - p->begin : 1e-3));
    fflush(stderr);
    progress_shown = 1;
}

void program_show_line(const char *text, size_t length) {
    struct winsize size;
    size_t columns = !ioctl(STDERR_FILENO, TIOCGWINSZ, &size) && size.ws_col > 1 ? size.ws_col - 1u : 79,
           begin = length;
    text_bytes line = { 0 };
    while (begin) { /* move back by one character */
        const size_t at = text_utf8_cut(text, length, begin - 1);
        utf8proc_int32_t c = 0;
        utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)(begin - at), &c);
        const size_t width = (size_t)utf8proc_charwidth(c);
        if (width > columns) break;
        columns -= width, begin = at;
    }
    text_append_clean(&line, text + begin, length - begin);
    if (!line.failed) fprintf(stderr, "\r%s\033[K", line.data);
    text_bytes_free(&line);
    fflush(stderr);
    progress_shown = 1;
}

/* Print a message without control characters, which a quoted model file, text or file name may contain. Allocate
 * nothing, because memory may have run out. */
static void say(const char *format, va_list arguments, const char *end) {
    char line[4096];
    const char *instead;
    const int n = vsnprintf(line, sizeof line, format, arguments);
    const size_t length = n < 0 ? 0 : (size_t)n < sizeof line ? (size_t)n : sizeof line - 1;
    program_progress_hide();
    fprintf(stderr, "%s: ", program_name);
    for (size_t i = 0, skip; i < length; i += skip) {
        const size_t run = text_fit(line + i, length - i, &skip, &instead);
        option_put(stderr, line + i, run);
        if (skip) fputs(instead, stderr);
        i += run;
    }
    fputs(end, stderr);
}

void program_error(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments, "\n");
    va_end(arguments);
}

int program_usage_error(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments, "; see ");
    va_end(arguments);
    option_put(stderr, program_name, strlen(program_name));
    fputs(" --help\n", stderr);
    return EXIT_USAGE;
}

void program_log(void *user, const char *message) {
    (void)user;
    program_error("%s", message);
}

int program_failed(const moe_error *error) {
    program_error("%s", error->message);
    return error->code == MOE_ERROR_IO ? EXIT_INPUT_OUTPUT : EXIT_MODEL;
}

int program_file_error(const char *file, const moe_error *error) {
    char line[512];
    program_error("%s", text_file_error(file, error, line, sizeof line));
    return error->code == MOE_ERROR_IO ? EXIT_INPUT_OUTPUT : EXIT_MODEL;
}

int program_model_error(const char *file, const moe_error *error) {
    return program_file_error(file, error), EXIT_MODEL;
}

int program_printed(void) {
    if (!ferror(stdout)) errno = 0; /* after a failed write, keep its errno */
    if (!fflush(stdout) && !ferror(stdout)) return EXIT_DONE;
    program_error("standard output: %s", strerror(errno ? errno : EIO));
    return EXIT_INPUT_OUTPUT;
}

static int no_model(void) {
    return program_usage_error(
        "no model is installed: specify one with -m FILE, set MOE_MODEL, or fetch one with moe-get");
}

int program_default_model(const char **model) {
    static char path[4096];
    moe_error e;
    if (*model) return -1;
    const moe_status status = moetext_default_model(path, sizeof path, &e);
    if (status == MOE_ERROR_IO) return no_model();
    if (status) return program_usage_error("%s", e.message);
    *model = path;
    return -1;
}

int program_choose(const char **model, const char *source, const char *target, moetext_choice **out) {
    const char *named = getenv("MOE_MODEL");
    moe_error e;
    if (*model || (named && *named)) return program_default_model(model);
    const moe_status status = moetext_choose(source, target, out, &e);
    if (status == MOE_ERROR_IO) return no_model();
    if (status) return program_error("%s", e.message), status == MOE_ERROR_ARGUMENT ? EXIT_USAGE : EXIT_MODEL;
    *model = (*out)->paths[0];
    return -1;
}
