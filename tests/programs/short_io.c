/* short_io.c - LD_PRELOAD library that simulates short and interrupted calls: every fourth call to read, pread, write,
 * pwrite, fsync and poll fails with EINTR, and the other calls transfer only some of the bytes. A timer signal,
 * whose handler does not restart calls, interrupts all other waiting calls, including those of stdio.
 *
 * POSIX permits short and interrupted calls at any time, so the output of a program must not change. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

static atomic_uint_fast64_t calls;

static uint64_t next_random(void) {
    uint64_t z = (atomic_fetch_add(&calls, 1) + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    return z ^ (z >> 31);
}

static int interrupted(void) {
    if (next_random() % 4) return 0;
    errno = EINTR;
    return 1;
}

/* Return a random number of bytes from 1 to n; half of the numbers are at most 16. */
static size_t some(size_t n) {
    const uint64_t r = next_random();
    const size_t most = r & 1 && n > 16 ? 16 : n;
    return most ? 1 + (size_t)((r >> 1) % most) : 0;
}

/* Set *function to the next definition of `name`; POSIX permits converting the data pointer of dlsym. */
static void real(void *function, const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    memcpy(function, &found, sizeof found);
}

ssize_t read(int fd, void *to, size_t n) {
    ssize_t (*next)(int, void *, size_t);
    real(&next, "read");
    return interrupted() ? -1 : next(fd, to, some(n));
}

ssize_t pread(int fd, void *to, size_t n, off_t at) {
    ssize_t (*next)(int, void *, size_t, off_t);
    real(&next, "pread");
    return interrupted() ? -1 : next(fd, to, some(n), at);
}

ssize_t write(int fd, const void *from, size_t n) {
    ssize_t (*next)(int, const void *, size_t);
    real(&next, "write");
    return interrupted() ? -1 : next(fd, from, some(n));
}

ssize_t pwrite(int fd, const void *from, size_t n, off_t at) {
    ssize_t (*next)(int, const void *, size_t, off_t);
    real(&next, "pwrite");
    return interrupted() ? -1 : next(fd, from, some(n), at);
}

int fsync(int fd) {
    int (*next)(int);
    real(&next, "fsync");
    return interrupted() ? -1 : next(fd);
}

int poll(struct pollfd *fds, nfds_t n, int timeout) {
    int (*next)(struct pollfd *, nfds_t, int);
    real(&next, "poll");
    return interrupted() ? -1 : next(fds, n, timeout);
}

/* Functions that glibc's fortified headers call. */
ssize_t __read_chk(int fd, void *to, size_t n, size_t room);
ssize_t __pread_chk(int fd, void *to, size_t n, off_t at, size_t room);
int __poll_chk(struct pollfd *fds, nfds_t n, int timeout, size_t room);

ssize_t __read_chk(int fd, void *to, size_t n, size_t room) { return n > room ? (abort(), -1) : read(fd, to, n); }
ssize_t __pread_chk(int fd, void *to, size_t n, off_t at, size_t room) {
    return n > room ? (abort(), -1) : pread(fd, to, n, at);
}
int __poll_chk(struct pollfd *fds, nfds_t n, int timeout, size_t room) {
    return n > room / sizeof *fds ? (abort(), -1) : poll(fds, n, timeout);
}

static void nothing(int signal) { (void)signal; }

__attribute__((constructor)) static void begin(void) {
    const struct itimerval every = { { 0, 2000 }, { 0, 2000 } };
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = nothing;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &every, NULL);
}

/* Write the number of calls to MOE_SHORT_IO_COUNT, to verify that the library was active. */
__attribute__((destructor)) static void end(void) {
    const char *path = getenv("MOE_SHORT_IO_COUNT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%llu\n", (unsigned long long)atomic_load(&calls));
    fclose(file);
}
