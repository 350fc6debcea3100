/* posix.h - the functions of POSIX that tools/ uses, for Windows (MinGW-w64). The Makefile includes it before each C
 * file of tools/; the other headers in this folder only include it.
 *
 *   - Paths, arguments, environment variables and the console are UTF-8. Files are binary: lines end with "\n".
 *   - A descriptor of a socket is SOCKET_MARK + its handle, so that close() and poll() can tell them apart.
 *   - ^C, ^Break and a closed console or session call the handlers of SIGINT and SIGTERM in a thread of their own.
 * After pthread_sigmask has blocked a signal in the main thread, its handler is not running.
 *   - What Windows lacks fails with ENOSYS: fork, Unix sockets, owners and permissions of files. */
#ifndef MOE_POSIX_H
#define MOE_POSIX_H

#define __USE_MINGW_ANSI_STDIO 1
#define _FILE_OFFSET_BITS 64
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#ifndef _WIN32_WINNT
#define _WIN32_WINNT 0x0A00
#endif

#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <process.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>

/* Prepare the standard streams, the console and ^C. start.c calls it in programs. */
void posix_begin(void);

/* ---- Files ---- */

#define O_CLOEXEC _O_NOINHERIT
#define O_NOCTTY 0
#define O_NONBLOCK 0x1000000
#define O_NOFOLLOW 0x2000000
#define O_DIRECTORY 0x4000000
#define AT_FDCWD (-100)
#define AT_EACCESS 1
#define STDIN_FILENO 0
#define STDOUT_FILENO 1
#define STDERR_FILENO 2
#ifndef F_OK
#define F_OK 0
#endif
#define W_OK 2
#define R_OK 4
#ifndef S_IFLNK
#define S_IFLNK 0xA000
#endif
#define S_IFSOCK 0xC000
#define S_ISLNK(mode) (((mode) & S_IFMT) == S_IFLNK)
#define S_ISSOCK(mode) (((mode) & S_IFMT) == S_IFSOCK)

typedef uint64_t posix_number; /* of a device or file */
#define mode_t int
#define ino_t posix_number
#define dev_t posix_number

struct posix_stat {
    dev_t st_dev;
    ino_t st_ino;
    unsigned short st_mode;
    int st_uid, st_gid;
    int64_t st_size;
    struct timespec st_mtim;
};
#undef stat
#undef fstat
#define stat posix_stat
#define lstat posix_lstat
#define fstat posix_fstat
#define st_mtime st_mtim.tv_sec
int stat(const char *path, struct stat *out);
int lstat(const char *path, struct stat *out);
int fstat(int fd, struct stat *out);

#define open posix_open
#define close posix_close
#define read posix_read
#define write posix_write
#define pread posix_pread
#undef ftruncate
#define ftruncate posix_ftruncate
#define fsync posix_fsync
#define access posix_access
#define faccessat posix_faccessat
#define unlink posix_unlink
#define rename posix_rename
#define rmdir posix_rmdir
#define mkdir posix_mkdir
#define mkstemp posix_mkstemp
#define fopen posix_fopen
#define fdopen posix_fdopen
#define realpath posix_realpath
#define readlink posix_readlink
#define getcwd posix_getcwd
#define isatty posix_isatty
#define fchmod(fd, mode) ((void)(fd), (void)(mode), 0)
#define fchown(fd, owner, group) ((void)(fd), (void)(owner), (void)(group), 0)
#define umask posix_umask
#define geteuid() 1
#define getpid _getpid
int open(const char *path, int flags, ...);
int close(int fd);
ssize_t read(int fd, void *data, size_t bytes);
ssize_t write(int fd, const void *data, size_t bytes);
ssize_t pread(int fd, void *data, size_t bytes, int64_t from);
int ftruncate(int fd, int64_t bytes);
int fsync(int fd);
int access(const char *path, int mode);
int faccessat(int folder, const char *path, int mode, int flags);
int unlink(const char *path);
int rename(const char *from, const char *to); /* replaces a file in one step */
int rmdir(const char *path);
int mkdir(const char *path, int mode);
int mkstemp(char *path);
FILE *fopen(const char *path, const char *mode);
FILE *fdopen(int fd, const char *mode);
char *realpath(const char *path, char *none);
ssize_t readlink(const char *path, char *out, size_t size); /* Windows follows links: EINVAL, or ENOENT */
char *getcwd(char *out, size_t size);
int isatty(int fd);
int umask(int mode);

#define flock posix_flock /* the function and the structure for fcntl */
enum { LOCK_EX = 2, LOCK_NB = 4 };
enum { F_RDLCK, F_WRLCK, F_UNLCK };
enum { F_GETFD = 1, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_SETLK, FD_CLOEXEC = 1 };
struct flock {
    int l_type, l_whence;
    int64_t l_start, l_len;
    int l_pid; /* always 0: unknown */
};
#define fcntl posix_fcntl
int flock(int fd, int operation);
int fcntl(int fd, int command, ...);
#define pipe posix_pipe
int pipe(int ends[2]);

struct posix_dirent {
    char d_name[1024];
};
#define dirent posix_dirent
#define DIR posix_folder
#define opendir posix_opendir
#define readdir posix_readdir
#define closedir posix_closedir
typedef struct posix_folder DIR;
DIR *opendir(const char *path);
struct dirent *readdir(DIR *folder);
int closedir(DIR *folder);
#define scandir posix_scandir
int scandir(const char *path, struct dirent ***out, int (*wanted)(const struct dirent *),
            int (*compare)(const struct dirent **, const struct dirent **));

struct posix_statvfs {
    uint64_t f_bavail, f_frsize;
};
#define statvfs posix_statvfs
int statvfs(const char *path, struct statvfs *out);

enum { FNM_PERIOD = 4, FNM_PATHNAME = 1 };
#define fnmatch posix_fnmatch
int fnmatch(const char *pattern, const char *name, int flags); /* * and ? */

enum { PROT_READ = 1, MAP_PRIVATE = 2, MAP_ANONYMOUS = 0x20, MAP_FIXED = 0x10 };
#define MAP_FAILED ((void *)-1)
#define mmap posix_mmap
#define munmap posix_munmap
void *mmap(void *at, size_t bytes, int rights, int flags, int fd, int64_t from);
int munmap(void *data, size_t bytes);

#define POLLIN 0x0100 /* winsock2.h's values */
#define POLLOUT 0x0010
#define POLLERR 0x0001
#define POLLHUP 0x0002
#define POLLNVAL 0x0004
struct posix_pollfd {
    int fd;
    short events, revents;
};
#define pollfd posix_pollfd
#define poll posix_poll
int poll(struct pollfd *files, size_t n, int milliseconds);

/* ---- Processes, signals, limits ---- */

#define getenv posix_getenv
char *getenv(const char *name); /* valid until the end of the process */
#define setenv posix_setenv
int setenv(const char *name, const char *value, int replace); /* always replaces */
#define strerror posix_strerror
char *strerror(int number);
#define getentropy posix_getentropy
int getentropy(void *data, size_t bytes);

enum { SIGHUP = 1, SIGBUS = 7, SIGKILL = 9, SIGPIPE = 13, SIGALRM = 14, SIGXFSZ = 25 };
typedef unsigned posix_signals; /* bit N: signal N */
#undef sigset_t
#define sigset_t posix_signals
#define sigemptyset(set) ((void)(*(set) = 0))
#define sigaddset(set, number) ((void)(*(set) |= 1u << (number)))
#define sigdelset(set, number) ((void)(*(set) &= ~(1u << (number))))
#define sigismember(set, number) ((int)(*(set) >> (number) & 1u))
#undef SIG_BLOCK
#undef SIG_UNBLOCK
#undef SIG_SETMASK
enum { SIG_BLOCK, SIG_UNBLOCK, SIG_SETMASK };
enum { SA_RESTART = 1, SA_SIGINFO = 2, BUS_ADRERR = 2 };
typedef struct posix_siginfo {
    void *si_addr;
    int si_code;
} siginfo_t;
#define sigaction posix_sigaction
struct sigaction {
    union {
        void (*sa_handler)(int number);
        void (*sa_sigaction)(int number, siginfo_t *info, void *context);
    };
    sigset_t sa_mask;
    int sa_flags;
};
#define signal posix_signal
#define raise posix_raise
#undef pthread_sigmask
#define pthread_sigmask posix_sigmask
#define sigpending posix_sigpending
#define alarm posix_alarm
typedef void (*posix_handler)(int number);
int sigaction(int number, const struct sigaction *wanted, struct sigaction *before);
posix_handler signal(int number, posix_handler handler);
int raise(int number);
int pthread_sigmask(int how, const sigset_t *set, sigset_t *before);
int sigpending(sigset_t *out);
unsigned alarm(unsigned seconds);

#define kill posix_kill
#define waitpid posix_waitpid
#define WNOHANG 1
#define WIFEXITED(status) ((void)(status), 1)
#define WEXITSTATUS(status) (status)
#define SYSTEM_START posix_start
pid_t posix_start(const char *path, char *const *words, int out, int err); /* start a program without input, or -1 */
int kill(pid_t process, int number);                                       /* a process is the handle of a child */
pid_t waitpid(pid_t process, int *status, int flags);

enum { RLIMIT_FSIZE, RUSAGE_SELF };
#define RLIM_INFINITY UINT64_MAX
struct rlimit {
    uint64_t rlim_cur;
};
struct rusage {
    struct timeval ru_utime, ru_stime;
    long ru_maxrss; /* KiB */
};
#define getrlimit posix_getrlimit
#define getrusage posix_getrusage
int getrlimit(int resource, struct rlimit *out);
int getrusage(int who, struct rusage *out);
enum { _SC_PAGESIZE, _SC_NPROCESSORS_ONLN };
#define sysconf posix_sysconf
long sysconf(int name);

struct winsize {
    unsigned short ws_col;
};
#define TIOCGWINSZ 1
#define ioctl posix_ioctl
int ioctl(int fd, int request, struct winsize *out);

typedef struct posix_dl_info {
    const char *dli_fname; /* valid until the next call in this thread */
} Dl_info;
#define dladdr posix_dladdr
int dladdr(const void *address, Dl_info *out);

/* ---- The C library ---- */

#define tell posix_tell   /* io.h's function has the name of others in tools/ */
#define printf gnu_printf /* also in attributes, where "printf" means Microsoft's */
#define fprintf posix_fprintf
int printf(const char *format, ...) __attribute__((format(printf, 1, 2)));
int fprintf(FILE *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define strndup posix_strndup
#define getline posix_getline
ssize_t getline(char **line, size_t *capacity, FILE *file);
char *strndup(const char *text, size_t length);
#define memmem posix_memmem
void *memmem(const void *data, size_t length, const void *part, size_t size);
#define strcasecmp _stricmp
#define strncasecmp _strnicmp
#define gmtime_r(time, out) (gmtime_s(out, time) ? NULL : (out))
#define localtime_r(time, out) (localtime_s(out, time) ? NULL : (out))

#endif
