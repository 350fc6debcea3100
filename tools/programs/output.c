/* output.c - output.h says what this is and has the contracts. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/output.h"
#include "tools/text/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PATH_BYTES = 4096, WRITE_BYTES = 1 << 24 };

struct output_file {
    int fd;                     /* -1 if not open */
    int regular, failed;        /* failed: errno of the first failed write */
    uint64_t at;                /* bytes written */
    sigset_t held;              /* signals blocked for this file in its thread */
    char path[PATH_BYTES];      /* as the caller gave it */
    char target[PATH_BYTES];    /* with symbolic links resolved */
    char temporary[PATH_BYTES]; /* "" if the target itself is written */
};

/* Resolve `path` if its last component is a symbolic link; the target need not exist. Returns 0 on failure, with
 * errno. */
static int follow_links(const char *path, char *out) {
    char link[PATH_BYTES];
    snprintf(out, PATH_BYTES, "%s", path);
    for (int links = 0; links < 40; links++) {
        const ssize_t length = readlink(out, link, sizeof link);
        const char *slash = strrchr(out, '/');
        size_t folder = slash ? (size_t)(slash + 1 - out) : 0;
        if (length < 0) return errno == EINVAL || errno == ENOENT; /* not a link, or it does not exist */
        if (length && link[0] == '/') folder = 0;
        if (folder + (size_t)length >= PATH_BYTES) {
            errno = ENAMETOOLONG;
            return 0;
        }
        memcpy(out + folder, link, (size_t)length);
        out[folder + (size_t)length] = 0;
    }
    errno = ELOOP;
    return 0;
}

static const int ending_signals[] = { SIGHUP, SIGINT, SIGTERM };
enum { N_SIGNALS = sizeof ending_signals / sizeof *ending_signals };

/* Number of open files of this thread that block each signal. */
static _Thread_local int holders[N_SIGNALS];

/* Block signals that would end the process and leave the temporary file, in this thread until all its files are closed.
 * Signals that the program handles, ignores or blocks are unchanged. */
static void hold_signals(sigset_t *held) {
    sigset_t blocked;
    sigemptyset(held);
    if (pthread_sigmask(SIG_SETMASK, NULL, &blocked) != 0) return;
    for (size_t i = 0; i < N_SIGNALS; i++) {
        const int number = ending_signals[i];
        struct sigaction action;
        if (!holders[i] &&
            (sigismember(&blocked, number) || sigaction(number, NULL, &action) != 0 || action.sa_handler != SIG_DFL))
            continue;
        holders[i]++;
        sigaddset(held, number);
    }
    pthread_sigmask(SIG_BLOCK, held, NULL);
}

static void release_signals(sigset_t *held) {
    for (size_t i = 0; i < N_SIGNALS; i++)
        if (sigismember(held, ending_signals[i]) && holders[i] && --holders[i]) sigdelset(held, ending_signals[i]);
    pthread_sigmask(SIG_UNBLOCK, held, NULL);
}

/* Return 1 if a blocked signal is pending. */
static int signal_waits(const sigset_t *held) {
    sigset_t waiting;
    sigemptyset(&waiting);
    sigpending(&waiting);
    for (size_t i = 0; i < N_SIGNALS; i++)
        if (sigismember(held, ending_signals[i]) && sigismember(&waiting, ending_signals[i])) return 1;
    return 0;
}

/* Create the temporary file in the target's folder, with the permissions of the replaced file (`old`), if any. Returns
 * 0 on failure, with errno. */
static int create_temporary(output_file *f, const struct stat *old) {
    const char *slash = strrchr(f->target, '/');
    const int folder = slash ? (int)(slash + 1 - f->target) : 0;
    for (int tries = 0; tries < 1000 && f->fd < 0; tries++) {
        struct timespec now = { 0, 0 };
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (snprintf(f->temporary, sizeof f->temporary, "%.*s.moe-%ld-%09ld", folder, f->target, (long)getpid(),
                     (long)now.tv_nsec) >= (int)sizeof f->temporary)
            errno = ENAMETOOLONG;
        else f->fd = open(f->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, old ? 0600 : 0666);
        if (f->fd < 0 && errno != EEXIST) break;
    }
    if (f->fd < 0) f->temporary[0] = 0;
    if (f->fd < 0 || !old) return f->fd >= 0;
    /* If the owner cannot be changed, the new file must not keep bits that grant its owner's rights. */
    return fchmod(f->fd, old->st_mode & (fchown(f->fd, old->st_uid, old->st_gid) == 0 ? 07777 : 0777)) == 0;
}

static moe_status fail(const output_file *f, moe_error *error, int number) {
    if (number == EINTR)
        return text_fail(error, MOE_ERROR_CANCELLED, "write", "writing %.160s was stopped by a signal", f->path);
    return text_fail(error, MOE_ERROR_IO, "write", "cannot write %.160s: %s", f->path, strerror(number));
}

/* Open the file. Returns 0 on failure, with errno. */
static int start(output_file *f) {
    struct stat there, target;
    const int exists = stat(f->path, &there) == 0;
    if (!exists && (errno != ENOENT || !f->path[0])) return 0;
    f->regular = !exists || S_ISREG(there.st_mode);
    if (f->regular && !follow_links(f->path, f->target)) return 0;
    /* /dev/stdout may refer to a deleted file. */
    if (exists && (!f->regular || lstat(f->target, &target) != 0 || target.st_dev != there.st_dev ||
                   target.st_ino != there.st_ino)) {
        f->fd = open(f->path, O_WRONLY | O_TRUNC | O_NOCTTY | O_CLOEXEC);
        return f->fd >= 0;
    }
    if (exists && faccessat(AT_FDCWD, f->target, W_OK, AT_EACCESS) != 0) return 0;
    hold_signals(&f->held);
    return create_temporary(f, exists ? &there : NULL);
}

moe_status output_open(const char *path, output_file **out, moe_error *error) {
    output_file *f = calloc(1, sizeof *f);
    if (!f) return text_fail(error, MOE_ERROR_MEMORY, "write", "out of memory");
    f->fd = -1;
    sigemptyset(&f->held);
    errno = ENAMETOOLONG;
    if ((size_t)snprintf(f->path, sizeof f->path, "%s", path) < sizeof f->path && start(f)) return *out = f, MOE_OK;
    const moe_status status = fail(f, error, errno);
    output_close(f, 0, NULL);
    return status;
}

moe_status output_write(output_file *f, const void *data, size_t bytes, moe_error *error) {
    const char *p = data;
    struct rlimit limit;
    /* Beyond this limit the system would send SIGXFSZ, which ends the process. */
    if (f->regular && getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        (f->at > limit.rlim_cur || bytes > limit.rlim_cur - f->at))
        f->failed = EFBIG;
    while (bytes && !f->failed) {
        const ssize_t n = write(f->fd, p, bytes < WRITE_BYTES ? bytes : WRITE_BYTES);
        if (n > 0) {
            p += n, bytes -= (size_t)n, f->at += (uint64_t)n;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) { /* a non-blocking pipe */
            struct pollfd writable = { .fd = f->fd, .events = POLLOUT };
            poll(&writable, 1, -1);
        } else if (n == 0 || errno != EINTR) {
            f->failed = n ? errno : ENOSPC;
        }
        if (signal_waits(&f->held)) f->failed = EINTR;
    }
    return f->failed ? fail(f, error, f->failed) : MOE_OK;
}

const char *output_temporary(const output_file *f) { return f->temporary[0] ? f->temporary : NULL; }

/* Sync the folder, so that the name is on disk. Some file systems cannot; the file exists in any case. */
static void sync_folder(char *path) {
    char *slash = strrchr(path, '/');
    int fd;
    if (slash) slash[slash == path] = 0; /* keep "/" */
    fd = open(slash ? path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    fsync(fd);
    close(fd);
}

/* Fatal signals are blocked here; no other signal stops the write. */
static int sync_file(int fd) {
    int result;
    do result = fsync(fd);
    while (result != 0 && errno == EINTR);
    return result;
}

moe_status output_close(output_file *f, int keep, moe_error *error) {
    moe_status status = MOE_OK;
    if (!f) return MOE_OK;
    if (keep && !f->failed && sync_file(f->fd) != 0 && errno != EINVAL && errno != ENOTSUP && errno != EROFS)
        f->failed = errno; /* pipes cannot be synced */
    if (f->fd >= 0 && close(f->fd) != 0 && errno != EINTR && !f->failed) f->failed = errno;
    if (keep && !f->failed && f->temporary[0] && rename(f->temporary, f->target) != 0) f->failed = errno;
    if (keep && f->failed) status = fail(f, error, f->failed);
    if (f->temporary[0] && (!keep || f->failed)) unlink(f->temporary);
    else if (f->temporary[0]) sync_folder(f->temporary);
    release_signals(&f->held);
    free(f);
    return status;
}
