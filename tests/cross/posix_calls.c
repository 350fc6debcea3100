/* posix_calls.c - tests tools/windows/posix.c on Windows, in the current folder, for windows.py. */
#include "cmocka.h"
#include "tools/text/system.h"
#include "tools/windows/regex.h"

#include <sys/file.h>
#include <windows.h>

static const char folder[] = "f\xC3\xBC \xF0\x9F\x98\x80",
                  name[] = "f\xC3\xBC \xF0\x9F\x98\x80/\xD0\xB6 \xF0\x9F\x98\x80.txt";

static void put(const char *path, const char *text) {
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (int)strlen(text));
    assert_int_equal(close(fd), 0);
}

static int has(const char *path, const char *wanted) {
    char text[64] = "";
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    return n >= 0 && strcmp(text, wanted) == 0;
}

static void names_are_utf8(void **state) {
    struct stat file;
    int found = 0;
    (void)state;
    assert_int_equal(mkdir(folder, 0777), 0);
    put(name, "a\nb\n");
    assert_true(has(name, "a\nb\n"));
    assert_int_equal(stat(name, &file), 0);
    assert_true(S_ISREG(file.st_mode) && file.st_size == 4);
    assert_int_equal(stat(folder, &file), 0);
    assert_true(S_ISDIR(file.st_mode));
    DIR *all = opendir(folder);
    for (struct dirent *entry; (entry = readdir(all));) found += strcmp(entry->d_name, strchr(name, '/') + 1) == 0;
    closedir(all);
    assert_int_equal(found, 1);
    char *real = realpath(name, NULL);
    assert_true(real && strlen(real) > strlen(name) && strcmp(real + strlen(real) - strlen(name), name) == 0);
    free(real);
    SetEnvironmentVariableW(L"MOE_TEST", L"\x436 \xD83D\xDE00");
    assert_string_equal(getenv("MOE_TEST"), "\xD0\xB6 \xF0\x9F\x98\x80");
    assert_null(getenv("MOE_TEST_NONE"));
}

static void rename_replaces_files(void **state) {
    char other[256];
    (void)state;
    snprintf(other, sizeof other, "%s.new", name);
    put(other, "new\n");
    assert_int_equal(rename(other, name), 0);
    assert_true(has(name, "new\n"));
    const int fd = open(name, O_RDONLY);
    assert_int_equal(unlink(name), 0);
    close(fd); /* the name of an open file remains until then */
    assert_int_equal(rmdir(folder), 0);
    assert_true(unlink(name) == -1 && errno == ENOENT);
}

static void errors_have_posix_numbers(void **state) {
    (void)state;
    assert_true(open("none/none", O_RDONLY) == -1 && errno == ENOENT);
    assert_true(open(".", O_WRONLY) == -1 && errno == EISDIR);
    put("there", "");
    assert_true(open("there", O_WRONLY | O_CREAT | O_EXCL, 0666) == -1 && errno == EEXIST);
    assert_true(open("\xFF", O_RDONLY) == -1 && errno == EILSEQ);
    assert_true(open("", O_RDONLY) == -1 && errno == ENOENT);
    assert_true(fcntl(77, F_GETFD) == -1 && errno == EBADF);
    unlink("there");
}

static void offsets_have_64_bits(void **state) {
    enum { GIGABYTE = 1 << 30 };
    const int64_t far_away = 5 * (int64_t)GIGABYTE + 7;
    struct stat file;
    char text[8] = "";
    DWORD done;
    (void)state;
    const int fd = open("sparse", O_RDWR | O_CREAT | O_TRUNC, 0666);
    DeviceIoControl((HANDLE)_get_osfhandle(fd), 0x900C4 /* FSCTL_SET_SPARSE */, NULL, 0, NULL, 0, &done, NULL);
    assert_int_equal(ftruncate(fd, far_away), 0);
    assert_int_equal(_lseeki64(fd, far_away, SEEK_SET), far_away);
    assert_int_equal(write(fd, "end", 3), 3);
    assert_int_equal(fstat(fd, &file), 0);
    assert_int_equal(file.st_size, far_away + 3);
    assert_int_equal(_lseeki64(fd, 1, SEEK_SET), 1);
    assert_int_equal(pread(fd, text, sizeof text, far_away), 3);
    assert_string_equal(text, "end");
    assert_int_equal(_lseeki64(fd, 0, SEEK_CUR), 1); /* pread does not move the offset */
    const int64_t page = far_away / sysconf(_SC_PAGESIZE) * sysconf(_SC_PAGESIZE);
    const char *mapped = mmap(NULL, (size_t)(far_away + 3 - page), PROT_READ, MAP_PRIVATE, fd, page);
    assert_true(mapped != MAP_FAILED && memcmp(mapped + (far_away - page), "end", 3) == 0);
    munmap((void *)(uintptr_t)mapped, 1);
    close(fd);
    unlink("sparse");
}

static void locks_exclude_others(void **state) {
    struct flock whole = { .l_type = F_WRLCK };
    (void)state;
    const int a = open("lock", O_RDWR | O_CREAT, 0666), b = open("lock", O_RDWR, 0666);
    assert_int_equal(fcntl(a, F_SETLK, &whole), 0);
    assert_true(fcntl(b, F_SETLK, &whole) == -1 && errno == EAGAIN);
    close(a);
    assert_int_equal(flock(b, LOCK_EX | LOCK_NB), 0);
    close(b);
    unlink("lock");
}

static void poll_waits_for_pipes(void **state) {
    int ends[2];
    char byte;
    (void)state;
    assert_int_equal(pipe(ends), 0);
    struct pollfd wait = { .fd = ends[0], .events = POLLIN };
    assert_int_equal(poll(&wait, 1, 0), 0);
    assert_int_equal(poll(&wait, 1, 30), 0);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    assert_true(read(ends[0], &byte, 1) == -1 && errno == EAGAIN);
    assert_int_equal(write(ends[1], "x", 1), 1);
    assert_int_equal(poll(&wait, 1, -1), 1);
    assert_int_equal(read(ends[0], &byte, 1), 1);
    close(ends[1]);
    assert_int_equal(poll(&wait, 1, -1), 1);
    assert_int_equal(read(ends[0], &byte, 1), 0);
    close(ends[0]);
}

static int caught;
static void catch_it(int number) { caught = number; }

static void blocked_signals_wait(void **state) {
    sigset_t stops, before, waiting;
    (void)state;
    posix_begin();
    sigemptyset(&stops);
    sigaddset(&stops, SIGINT);
    signal(SIGINT, catch_it);
    pthread_sigmask(SIG_BLOCK, &stops, &before);
    raise(SIGINT);
    sigpending(&waiting);
    assert_true(!caught && sigismember(&waiting, SIGINT));
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    assert_int_equal(caught, SIGINT);
}

static void text_files_may_have_crlf(void **state) {
    char *line = NULL;
    size_t capacity = 0;
    (void)state;
    put("crlf", "a\r\nb");
    FILE *file = fopen("crlf", "r");
    assert_int_equal(getline(&line, &capacity, file), 2);
    assert_string_equal(line, "a\n");
    assert_int_equal(getline(&line, &capacity, file), 1);
    assert_int_equal(getline(&line, &capacity, file), -1);
    fclose(file);
    file = fopen("crlf", "w");
    fprintf(file, "%s\n", "x");
    fclose(file);
    assert_true(has("crlf", "x\n"));
    free(line);
    unlink("crlf");
}

static void patterns_match(void **state) {
    static const struct {
        const char *pattern, *name;
        int flags, matches;
    } rows[] = { { "*.bin", "a.bin", 0, 1 },
                 { "*.bin", "a.bin.gz", 0, 0 },
                 { "*", ".a", FNM_PERIOD, 0 },
                 { "*", ".a", 0, 1 },
                 { "*-of-?????.gguf", "x-00001-of-00002.gguf", 0, 1 },
                 { "*-[0-9][0-9]-of-*", "x-1a-of-2", 0, 0 },
                 { "*-[0-9][0-9]-of-*", "x-12-of-2", 0, 1 },
                 { "[!a]*", "b", 0, 1 },
                 { "*.json", "a/b.json", FNM_PATHNAME, 0 },
                 { "*/*.json", "a/b.json", FNM_PATHNAME, 1 },
                 { "a*b*c", "aXbYbc", 0, 1 },
                 { "a*b*c", "aXbYb", 0, 0 } };
    regex_t regex;
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if ((fnmatch(rows[i].pattern, rows[i].name, rows[i].flags) == 0) != rows[i].matches)
            fail_msg("%s %s", rows[i].pattern, rows[i].name);
    assert_int_equal(regcomp(&regex, "^(a|b.*c)$", REG_EXTENDED | REG_NOSUB), 0);
    assert_int_equal(regexec(&regex, "bxc", 0, NULL, 0), 0);
    assert_true(regexec(&regex, "bx", 0, NULL, 0) != 0);
    regfree(&regex);
    assert_true(system_is_absolute("C:\\x") && system_is_absolute("/x") && !system_is_absolute("C:x"));
    assert_string_equal(system_name("a/b\\c"), "c");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_utf8),
        cmocka_unit_test(rename_replaces_files),
        cmocka_unit_test(errors_have_posix_numbers),
        cmocka_unit_test(offsets_have_64_bits),
        cmocka_unit_test(locks_exclude_others),
        cmocka_unit_test(poll_waits_for_pipes),
        cmocka_unit_test(blocked_signals_wait),
        cmocka_unit_test(text_files_may_have_crlf),
        cmocka_unit_test(patterns_match),
    };
    return _cmocka_run_group_tests("posix", tests, sizeof tests / sizeof *tests, NULL, NULL);
}
