/* process.c - supervisor, pid file and moe-server --reload.
 *
 * The server locks its pid file. The kernel reports which process holds the lock, so the file of a killed server does
 * no harm. Each reload appends a line break, after a TAB if it failed.
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "tools/server/server.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* ---- Supervisors --------------------------------------------------------------------------------------- */

void process_notify(const char *state) {
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    const size_t length = path ? strlen(path) : 0;
    if (!length || length >= sizeof to.sun_path) return;
    memcpy(to.sun_path, path, length);
    if (path[0] == '@') to.sun_path[0] = 0; /* abstract socket */
    const int out = socket(AF_UNIX, SOCK_DGRAM, 0);
    const socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    if (out < 0 || sendto(out, state, strlen(state), 0, (const struct sockaddr *)(const void *)&to, size) < 0)
        program_error("NOTIFY_SOCKET %s: %s", path, strerror(errno));
    if (out >= 0) close(out);
}

/* ---- The pid file -------------------------------------------------------------------------------------- */

/* Write the path of the pid file to `out`: --pid-file, a file in the runtime folder, or "". */
static void find_path(const options *o, int port, char *out, size_t size) {
    const char *folder = getenv("RUNTIME_DIRECTORY");
    if (!folder) folder = getenv("XDG_RUNTIME_DIR");
    if (!folder && !geteuid()) folder = "/run";
    out[0] = 0;
    if (o->pid_file) snprintf(out, size, "%s", o->pid_file);
    else if (folder && !o->path && port > 0) snprintf(out, size, "%s/moe-server-%d.pid", folder, port);
}

int process_write_pid(server *s, int port) {
    const options *o = &s->setup->options;
    char made[sizeof s->pid_path + 24], text[24];
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
    find_path(o, port, s->pid_path, sizeof s->pid_path);
    if (!s->pid_path[0]) return -1;
    snprintf(made, sizeof made, "%s.%ld", s->pid_path, (long)getpid());
    snprintf(text, sizeof text, "%ld\n", (long)getpid());
    unlink(made);
    const int file = open(made, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    const int failed = file < 0 || fcntl(file, F_SETLK, &lock) ||
                       write(file, text, strlen(text)) != (ssize_t)strlen(text) || rename(made, s->pid_path);
    const int why = errno;
    if (!failed) return s->pid_file = file, -1;
    if (file >= 0) close(file), unlink(made);
    s->pid_path[0] = 0;
    if (!o->pid_file) return -1;
    return program_error("--pid-file %s: %s", o->pid_file, strerror(why)), EXIT_INPUT_OUTPUT;
}

void process_drop_pid(server *s) {
    struct stat named, own;
    if (!s->pid_file) return;
    if (!stat(s->pid_path, &named) && !fstat(s->pid_file, &own) && named.st_ino == own.st_ino) unlink(s->pid_path);
    close(s->pid_file);
}

void process_reloaded(const server *s, int failed) {
    if (s->pid_file && write(s->pid_file, failed ? "\t\n" : "\n", failed ? 2 : 1) < 0)
        program_error("%s: %s", s->pid_path, strerror(errno));
}

/* ---- moe-server --reload ------------------------------------------------------------------------------- */

/* Wait until the server appends the result of a reload to its pid file, which had `size` bytes. */
static int wait_for(int file, off_t size) {
    const struct timespec pause = { .tv_nsec = 50000000 };
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
    struct stat now;
    char last = 0;
    while (!fstat(file, &now) && now.st_size == size) {
        if (fcntl(file, F_GETLK, &lock) || lock.l_type == F_UNLCK) break;
        nanosleep(&pause, NULL);
    }
    if (now.st_size > size && pread(file, &last, 1, size) == 1 && last == '\n') return EXIT_DONE;
    return program_error("the reload failed, so the previous settings remain; see the server's messages"), EXIT_MODEL;
}

int process_reload(const options *o) {
    char path[1024];
    const char *main_pid = getenv("MAINPID"); /* set by systemd for ExecReload */
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
    struct stat before;
    find_path(o, o->port, path, sizeof path);
    const int file = path[0] ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    const long named = main_pid && !o->pid_file ? strtol(main_pid, NULL, 10) : 0;
    const int found = file >= 0 && !fstat(file, &before) && !fcntl(file, F_GETLK, &lock) && lock.l_type != F_UNLCK &&
                      (!named || named == (long)lock.l_pid);
    const long pid = found ? (long)lock.l_pid : named;
    int status = EXIT_INPUT_OUTPUT;
    if (pid <= 1) program_error("no server found%s%s; give its --port or --pid-file", path[0] ? " with " : "", path);
    else if (kill((pid_t)pid, SIGHUP)) program_error("cannot signal process %ld: %s", pid, strerror(errno));
    else status = found ? wait_for(file, before.st_size) : EXIT_DONE;
    if (file >= 0) close(file);
    return status;
}
