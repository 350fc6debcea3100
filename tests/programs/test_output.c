/* test_output.c - output files, which are complete or absent, devices and pipes (tools/programs/output.c). */
#if !defined(_POSIX_C_SOURCE) && !defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE /* mknod */
#endif
#include "tools/programs/output.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.h"

static char directory[64];

static const char *in_directory(const char *name) {
    static char path[4][192];
    static int next;
    snprintf(path[next % 4], 192, "%s/%s", directory, name);
    return path[next++ % 4];
}

FIXTURE(make_directory) {
    snprintf(directory, sizeof directory, "/tmp/moe-test-output-XXXXXX");
    return mkdtemp(directory) ? 0 : -1;
}

FIXTURE(remove_directory) { return rmdir(directory); /* rmdir fails if a test left files */ }

static size_t files_in_directory(void) {
    DIR *dir = opendir(directory);
    size_t n = 0;
    assert_non_null(dir);
    while (readdir(dir)) n++;
    closedir(dir);
    return n - 2; /* without . and .. */
}

/* Assert the contents of the file at `path`, or that it does not exist if `text` is NULL. */
static void assert_contents(const char *path, const char *text) {
    char found[64] = "";
    FILE *file = fopen(path, "rb");
    assert_int_equal(file != NULL, text != NULL);
    if (!file) return;
    assert_int_equal(fread(found, 1, sizeof found - 1, file), strlen(text));
    fclose(file);
    assert_string_equal(found, text);
}

static output_file *begin(const char *path, const char *text) {
    output_file *out = NULL;
    moe_error e = { MOE_OK, "", "" };
    if (output_open(path, &out, &e)) fail_msg("%s", e.message);
    assert_int_equal(output_write(out, text, strlen(text), &e), MOE_OK);
    return out;
}

/* A new file, a replaced file and the target of a symbolic link change only when the output is closed with `keep` 1. */
TEST(a_file_is_complete_or_absent) {
    struct stat info;
    for (int link = 0; link < 2; link++) {
        const char *path = in_directory(link ? "link" : "file");
        if (link) assert_int_equal(symlink("target", path), 0);
        for (int keep = 0; keep < 4; keep++) {
            const size_t before = files_in_directory();
            const char *old = keep < 2 ? NULL : "first";
            output_file *out = begin(path, keep > 1 ? "second" : "first");
            assert_contents(path, old);
            assert_int_equal(access(output_temporary(out), F_OK), 0);
            if (old) assert_int_equal(chmod(path, 0606), 0);
            assert_int_equal(output_close(out, keep % 2, NULL), MOE_OK);
            assert_contents(path, keep % 2 ? keep > 1 ? "second" : "first" : old);
            assert_int_equal(files_in_directory(), before + (keep == 1));
        }
        assert_int_equal(lstat(path, &info), 0);
        assert_int_equal(S_ISLNK(info.st_mode), link);
    }
    remove(in_directory("file")), remove(in_directory("link")), remove(in_directory("target"));
}

TEST(permissions_of_an_old_file_are_preserved) {
    struct stat info;
    const char *path = in_directory("file");
    assert_int_equal(output_close(begin(path, "first"), 1, NULL), MOE_OK);
    assert_int_equal(chmod(path, 0604), 0);
    assert_int_equal(output_close(begin(path, "second"), 1, NULL), MOE_OK);
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0604);
    remove(path);
}

TEST(errors_name_the_file) {
    const char *const paths[] = { in_directory("no/such/place"), directory, "" };
    struct rlimit old, limit;
    output_file *out;
    moe_error e;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        assert_int_equal(output_open(paths[i], &out, &e), MOE_ERROR_IO);
        assert_non_null(strstr(e.message, paths[i]));
        assert_int_equal(strstr(e.message, in_directory("no/such')")) != NULL, i == 0);
    }
    out = begin(in_directory("file"), "1234");
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    limit = old;
    limit.rlim_cur = 6;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    assert_int_equal(output_write(out, "567", 3, &e), MOE_ERROR_IO);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_non_null(strstr(e.message, strerror(EFBIG)));
    assert_int_equal(output_close(out, 1, &e), MOE_ERROR_IO);
    assert_int_equal(files_in_directory(), 0);
}

/* /dev/stdout can be a deleted file, which has only a descriptor. */
TEST(a_file_without_a_name_is_written) {
    char path[64];
    const int fd = open(in_directory("gone"), O_RDWR | O_CREAT, 0666);
    assert_true(fd >= 0);
    assert_int_equal(remove(in_directory("gone")), 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (access(path, F_OK) == 0) {
        assert_int_equal(output_close(begin(path, "text"), 1, NULL), MOE_OK);
        assert_contents(path, "text");
    }
    assert_int_equal(files_in_directory(), 0);
    close(fd);
}

static mode_t mode_of(const char *path) {
    struct stat info;
    assert_int_equal(lstat(path, &info), 0);
    return info.st_mode;
}

/* Return a new device in the test's folder like /dev/NAME, or /dev/NAME itself without root. */
static const char *device(const char *name) {
    static char path[192];
    struct stat info;
    snprintf(path, sizeof path, "/dev/%s", name);
    if (stat(path, &info) != 0) skip();
    snprintf(path, sizeof path, "%s/%s", directory, name);
    if (mknod(path, S_IFCHR | 0666, info.st_rdev) != 0) snprintf(path, sizeof path, "/dev/%s", name);
    return path;
}

TEST(devices_are_written_but_not_replaced) {
    const char *full = device("full");
    output_file *out = NULL;
    moe_error e;
    assert_int_equal(output_open(full, &out, &e), MOE_OK);
    assert_null(output_temporary(out));
    assert_int_equal(output_write(out, "text", 4, &e), MOE_ERROR_IO);
    assert_non_null(strstr(e.message, full));
    assert_non_null(strstr(e.message, strerror(ENOSPC)));
    assert_int_equal(output_write(out, "", 0, &e), MOE_ERROR_IO); /* later writes fail too */
    assert_int_equal(output_close(out, 1, &e), MOE_ERROR_IO);
    assert_true(S_ISCHR(mode_of(full)));
    remove(in_directory("full"));
    assert_int_equal(output_close(NULL, 1, &e), MOE_OK);
}

static void on_alarm(int number) { (void)number; }

/* The pipe reader reads small pieces, and a timer interrupts the writer. */
TEST(a_pipe_receives_all_bytes_of_interrupted_writes) {
    const struct itimerval soon = { { 0, 500 }, { 0, 500 } }, never = { { 0, 0 }, { 0, 0 } };
    struct sigaction action = { .sa_handler = on_alarm }, old; /* without SA_RESTART */
    const size_t bytes = 1 << 20;
    unsigned char *sent = malloc(bytes);
    output_file *out = NULL;
    moe_error e;
    int child, result = 0;
    assert_non_null(sent);
    for (size_t i = 0; i < bytes; i++) sent[i] = (unsigned char)(i * 31 >> 3);
    assert_int_equal(mkfifo(in_directory("pipe"), 0666), 0);
    if ((child = fork()) == 0) {
        unsigned char piece[997];
        size_t at = 0;
        int in = open(in_directory("pipe"), O_RDONLY);
        for (ssize_t n; (n = read(in, piece, sizeof piece)) != 0;) {
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 || at + (size_t)n > bytes || memcmp(piece, sent + at, (size_t)n) != 0) _exit(2);
            at += (size_t)n;
        }
        _exit(at != bytes);
    }
    do result = (int)output_open(in_directory("pipe"), &out, &e);
    while (result == MOE_ERROR_CANCELLED); /* short_io.c interrupts the wait for the child to open the pipe */
    assert_int_equal(result, MOE_OK);
    sigaction(SIGALRM, &action, &old);
    setitimer(ITIMER_REAL, &soon, NULL);
    assert_int_equal(output_write(out, sent, bytes, &e), MOE_OK);
    setitimer(ITIMER_REAL, &never, NULL);
    sigaction(SIGALRM, &old, NULL);
    assert_int_equal(output_close(out, 1, &e), MOE_OK);
    while (waitpid(child, &result, 0) < 0) assert_int_equal(errno, EINTR);
    assert_int_equal(result, 0);
    assert_true(S_ISFIFO(mode_of(in_directory("pipe"))));
    remove(in_directory("pipe"));
    free(sent);
}

TEST(two_outputs_of_a_thread_delay_signals_until_both_are_closed) {
    const size_t before = files_in_directory();
    for (int first = 0; first < 2; first++) {
        int result = 0, child = fork();
        if (child == 0) {
            output_file *out[2];
            sigset_t left;
            signal(SIGTERM, SIG_DFL);
            if (output_open(in_directory("a"), &out[0], NULL) || output_open(in_directory("b"), &out[1], NULL))
                _exit(1);
            output_close(out[first], 0, NULL);
            kill(getpid(), SIGTERM);
            if (output_write(out[!first], "more", 4, NULL) != MOE_ERROR_CANCELLED) _exit(2);
            output_close(out[!first], 0, NULL); /* the pending SIGTERM ends the process */
            pthread_sigmask(SIG_SETMASK, NULL, &left);
            _exit(3 + sigismember(&left, SIGTERM));
        }
        while (waitpid(child, &result, 0) < 0) assert_int_equal(errno, EINTR);
        assert_true(WIFSIGNALED(result) && WTERMSIG(result) == SIGTERM);
        assert_int_equal(files_in_directory(), before);
    }
}

int main(void) { return run_all_tests(make_directory, remove_directory); }
