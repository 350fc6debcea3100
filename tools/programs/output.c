/* output.c - write files safely; documented in output.h. */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/programs/output.h"
#include "tools/text/bytes.h"
#include "tools/text/system.h"

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
    int regular, failed;        /* regular: 1 for a regular file; failed: errno of the first failed write, or 0 */
    uint64_t at;                /* number of bytes written */
    sigset_t held;              /* signals blocked for this file in the thread that opened it */
    char path[PATH_BYTES];      /* path given by the caller */
    char target[PATH_BYTES];    /* path with symbolic links resolved */
    char temporary[PATH_BYTES]; /* "" if the target itself is written */
};

/* Resolve `path` if its last component is a symbolic link; the target need not exist. On failure return 0 and set
 * errno. */
static int follow_links(const char *path, char *out) {
    char link[PATH_BYTES];
    snprintf(out, PATH_BYTES, "%s", path);
    for (int links = 0; links < 40; links++) {
        const ssize_t length = readlink(out, link, sizeof link);
        const char *slash = strrchr(out, '/');
        size_t folder = slash ? (size_t)(slash + 1 - out) : 0;
        if (length < 0) return errno == EINVAL || errno == ENOENT; /* EINVAL: not a link; ENOENT: missing */
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

/* For each signal, the number of this thread's open files that block it. */
static _Thread_local int holders[N_SIGNALS];

/* Block the signals that would end the process before it can remove the temporary file, until this thread has closed
 * all its files. Do not change signals that the program handles, ignores or blocks. */
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

/* Create the temporary file in the target's folder, with the permissions of the replaced file (`old`), if any. On
 * failure return 0 and set errno. */
static int create_temporary(output_file *f, const struct stat *old) {
    const char *slash = system_slash(f->target);
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
    /* If the owner cannot be set, clear the set-user-ID and set-group-ID bits, which grant the owner's rights. */
    return fchmod(f->fd, old->st_mode & (fchown(f->fd, old->st_uid, old->st_gid) == 0 ? 07777 : 0777)) == 0;
}

void output_reason(const char *path, int number, char out[OUTPUT_REASON]) {
    const char *slash = system_slash(path);
    char folder[OUTPUT_REASON] = "";
    if (slash) snprintf(folder, sizeof folder, "%.*s", (int)(slash - path), path);
    if (number == ENOENT && *folder && access(folder, F_OK) != 0)
        snprintf(out, OUTPUT_REASON, "missing folder (create it: mkdir -p '%.200s')", folder);
    else snprintf(out, OUTPUT_REASON, "%s", strerror(number));
}

static moe_status fail(const output_file *f, moe_error *error, int number) {
    char reason[OUTPUT_REASON];
    if (number == EINTR)
        return text_fail(error, MOE_ERROR_CANCELLED, "write", "writing %.160s was stopped by a signal", f->path);
    output_reason(f->path, number, reason);
    return text_fail(error, MOE_ERROR_IO, "write", "cannot write %.160s: %s", f->path, reason);
}

/* Open the file. On failure return 0 and set errno. */
static int start(output_file *f) {
    struct stat there, target;
    const int exists = stat(f->path, &there) == 0;
    if (!exists && (errno != ENOENT || !f->path[0])) return 0;
    f->regular = !exists || S_ISREG(there.st_mode);
    if (f->regular && !follow_links(f->path, f->target)) return 0;
    /* Write directly if the target is a file other than `path`: for example, /dev/stdout may be a deleted file. */
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
    /* A write beyond this limit would raise SIGXFSZ, which ends the process. */
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

/* Sync the folder to store the name on disk. Ignore errors: some file systems do not support this. */
static void sync_folder(char *path) {
    char *slash = strrchr(path, '/');
    int fd;
    if (slash) slash[slash == path] = 0; /* keep a leading "/" */
    fd = open(slash ? path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    fsync(fd);
    close(fd);
}

/* Sync a file, and retry after interruptions: the signals that end the process are blocked. */
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
