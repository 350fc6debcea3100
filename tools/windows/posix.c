/* posix.c - see posix.h. This file alone calls Windows for tools/.
 *
 * Contents
 *   1. Errors and names
 *   2. Files
 *   3. Folders
 *   4. Reading and writing, consoles
 *   5. Locks, mapped files
 *   6. Signals
 *   7. Processes
 *   8. Sockets
 *   9. The C library
 */
#include "tools/windows/posix.h"
#include "tools/windows/regex.h"
#include "tools/windows/socket.h"

#include <psapi.h>
#include <shellapi.h>
#include <stdarg.h>
#include <wchar.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

/* The functions of the C library and of Windows, not those of posix.h. */
#undef close
#undef read
#undef write
#undef fopen
#undef fdopen
#undef getenv
#undef strerror
#undef printf
#undef fprintf
#undef signal
#undef raise
#undef socket
#undef bind
#undef listen
#undef accept
#undef connect
#undef shutdown
#undef recv
#undef sendto
#undef getsockname
#undef getsockopt
#undef setsockopt
#undef getaddrinfo

/* ==== 1. Errors and names =============================================================================== */

static const struct {
    DWORD error;
    int number;
} errors[] = { { ERROR_FILE_NOT_FOUND, ENOENT },
               { ERROR_PATH_NOT_FOUND, ENOENT },
               { ERROR_INVALID_NAME, ENOENT },
               { ERROR_BAD_NETPATH, ENOENT },
               { ERROR_BAD_PATHNAME, ENOENT },
               { ERROR_ACCESS_DENIED, EACCES },
               { ERROR_SHARING_VIOLATION, EACCES },
               { ERROR_LOCK_VIOLATION, EACCES },
               { ERROR_USER_MAPPED_FILE, EACCES },
               { ERROR_WRITE_PROTECT, EROFS },
               { ERROR_FILE_EXISTS, EEXIST },
               { ERROR_ALREADY_EXISTS, EEXIST },
               { ERROR_DISK_FULL, ENOSPC },
               { ERROR_HANDLE_DISK_FULL, ENOSPC },
               { ERROR_NOT_ENOUGH_MEMORY, ENOMEM },
               { ERROR_OUTOFMEMORY, ENOMEM },
               { ERROR_COMMITMENT_LIMIT, ENOMEM },
               { ERROR_DIR_NOT_EMPTY, ENOTEMPTY },
               { ERROR_DIRECTORY, ENOTDIR },
               { ERROR_FILENAME_EXCED_RANGE, ENAMETOOLONG },
               { ERROR_BROKEN_PIPE, EPIPE },
               { ERROR_NO_DATA, EPIPE },
               { ERROR_PIPE_NOT_CONNECTED, EPIPE },
               { ERROR_INVALID_HANDLE, EBADF },
               { ERROR_TOO_MANY_OPEN_FILES, EMFILE },
               { ERROR_NOT_SAME_DEVICE, EXDEV },
               { ERROR_FILE_TOO_LARGE, EFBIG },
               { WSAEADDRINUSE, EADDRINUSE },
               { WSAEADDRNOTAVAIL, EADDRNOTAVAIL },
               { WSAEACCES, EACCES },
               { WSAEWOULDBLOCK, EWOULDBLOCK },
               { WSAECONNREFUSED, ECONNREFUSED },
               { WSAECONNRESET, ECONNRESET },
               { WSAECONNABORTED, ECONNABORTED },
               { WSAEINTR, EINTR },
               { WSAEMFILE, EMFILE },
               { WSAEAFNOSUPPORT, EAFNOSUPPORT },
               { WSAENOPROTOOPT, ENOPROTOOPT },
               { WSAENOTSOCK, ENOTSOCK },
               { WSAEINVAL, EINVAL } };

/* Set errno to the equivalent of an error of Windows. Returns -1. */
static int failed(DWORD error) {
    errno = EIO;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) errno = errors[i].number;
    return -1;
}

static int failed_last(void) { return failed(GetLastError()); }

static int refused(int number) {
    errno = number;
    return -1;
}

/* Return the text of an error that Microsoft's strerror does not know. */
char *posix_strerror(int number) {
    static const struct {
        int number;
        const char *text;
    } rows[] = { { EADDRINUSE, "Address already in use" },
                 { EADDRNOTAVAIL, "Cannot assign requested address" },
                 { EAFNOSUPPORT, "Address family not supported" },
                 { ECONNABORTED, "Connection aborted" },
                 { ECONNREFUSED, "Connection refused" },
                 { ECONNRESET, "Connection reset by peer" },
                 { ELOOP, "Too many levels of symbolic links" },
                 { ENOPROTOOPT, "Protocol not available" },
                 { ENOTSOCK, "Not a socket" },
                 { ENOTSUP, "Operation not supported" },
                 { EOVERFLOW, "Value too large" },
                 { ETIMEDOUT, "Connection timed out" },
                 { EWOULDBLOCK, "Resource temporarily unavailable" } };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].number == number) return (char *)(uintptr_t)rows[i].text;
    return strerror(number);
}

enum { WIDE = 4096 };
typedef wchar_t wide_path[WIDE];

/* Convert a path to UTF-16. A long path gets the prefix that lifts the limit of 260 characters. On failure return 0 and
 * set errno. */
static int widen(const char *path, wide_path wide) {
    static const wchar_t prefix[] = L"\\\\?\\";
    wide_path full;
    if (!*path) return errno = ENOENT, 0;
    if (strcmp(path, "/dev/null") == 0) path = "NUL";
    if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, WIDE))
        return errno = GetLastError() == ERROR_INSUFFICIENT_BUFFER ? ENAMETOOLONG : EILSEQ, 0;
    if (wcslen(wide) < 240 || wide[0] == L'\\') return 1;
    const DWORD n = GetFullPathNameW(wide, WIDE - 4, full, NULL);
    if (!n || n >= WIDE - 4 || full[0] == L'\\') return n && n < WIDE - 4 ? 1 : (errno = ENAMETOOLONG, 0);
    wcscpy(wide, prefix);
    wcscat(wide, full);
    return 1;
}

/* Convert to UTF-8, with "/" between the components of a path. Return 0 if it does not fit. */
static int narrow(const wchar_t *wide, char *out, size_t size) {
    if (wcsncmp(wide, L"\\\\?\\", 4) == 0 && wide[5] == L':') wide += 4;
    if (!WideCharToMultiByte(CP_UTF8, 0, wide, -1, out, (int)size, NULL, NULL)) return errno = ENAMETOOLONG, 0;
    for (char *at = out; *at; at++)
        if (*at == '\\') *at = '/';
    return 1;
}

/* ==== 2. Files ========================================================================================== */

static HANDLE handle_of(int fd) { return fd >= 0 ? (HANDLE)_get_osfhandle(fd) : INVALID_HANDLE_VALUE; }

static struct timespec time_of(FILETIME at) {
    const uint64_t ticks = ((uint64_t)at.dwHighDateTime << 32 | at.dwLowDateTime) - UINT64_C(116444736000000000);
    return (struct timespec){ (time_t)(ticks / 10000000), (long)(ticks % 10000000) * 100 };
}

static int state_of(HANDLE file, struct stat *out) {
    BY_HANDLE_FILE_INFORMATION info;
    FILE_ATTRIBUTE_TAG_INFO tag = { 0 };
    const DWORD type = GetFileType(file);
    memset(out, 0, sizeof *out);
    if (type != FILE_TYPE_DISK) {
        if (file == INVALID_HANDLE_VALUE || (type == FILE_TYPE_UNKNOWN && GetLastError())) return refused(EBADF);
        out->st_mode = type == FILE_TYPE_PIPE ? S_IFIFO : S_IFCHR;
        return 0;
    }
    if (!GetFileInformationByHandle(file, &info)) return failed_last();
    if (info.dwFileAttributes & FILE_ATTRIBUTE_REPARSE_POINT)
        GetFileInformationByHandleEx(file, FileAttributeTagInfo, &tag, sizeof tag);
    out->st_dev = info.dwVolumeSerialNumber;
    out->st_ino = (uint64_t)info.nFileIndexHigh << 32 | info.nFileIndexLow;
    out->st_size = (int64_t)((uint64_t)info.nFileSizeHigh << 32 | info.nFileSizeLow);
    out->st_mtim = time_of(info.ftLastWriteTime);
    out->st_mode = tag.ReparseTag == IO_REPARSE_TAG_SYMLINK           ? S_IFLNK
                   : info.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY ? S_IFDIR | 0777
                   : info.dwFileAttributes & FILE_ATTRIBUTE_READONLY  ? S_IFREG | 0444
                                                                      : S_IFREG | 0666;
    return 0;
}

int posix_fstat(int fd, struct stat *out) { return state_of(handle_of(fd), out); }

static int state_at(const char *path, DWORD flags, struct stat *out) {
    wide_path wide;
    if (!widen(path, wide)) return -1;
    const HANDLE file = CreateFileW(wide, FILE_READ_ATTRIBUTES, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE,
                                    NULL, OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS | flags, NULL);
    if (file == INVALID_HANDLE_VALUE) return failed_last();
    const int status = state_of(file, out);
    CloseHandle(file);
    return status;
}

int posix_stat(const char *path, struct stat *out) { return state_at(path, 0, out); }
int posix_lstat(const char *path, struct stat *out) { return state_at(path, FILE_FLAG_OPEN_REPARSE_POINT, out); }

/* Return a descriptor for a handle, which it takes over; -1 on failure. */
static int descriptor_of(HANDLE handle, int flags) {
    if (handle == INVALID_HANDLE_VALUE) return failed_last();
    const int fd = _open_osfhandle((intptr_t)handle, flags | _O_BINARY);
    if (fd < 0) CloseHandle(handle);
    return fd;
}

int posix_open(const char *path, int flags, ...) {
    enum { WRITES = _O_WRONLY | _O_RDWR };
    wide_path wide;
    struct stat found;
    DWORD rights = flags & _O_RDWR     ? GENERIC_READ | GENERIC_WRITE
                   : flags & _O_WRONLY ? GENERIC_WRITE
                                       : GENERIC_READ,
          create = flags & _O_EXCL                            ? CREATE_NEW
                   : (flags & _O_CREAT) && (flags & _O_TRUNC) ? CREATE_ALWAYS
                   : flags & _O_CREAT                         ? OPEN_ALWAYS
                   : flags & _O_TRUNC                         ? TRUNCATE_EXISTING
                                                              : OPEN_EXISTING;
    if (flags & _O_APPEND) rights = FILE_APPEND_DATA | SYNCHRONIZE;
    if (!widen(path, wide)) return -1;
    if ((flags & O_NOFOLLOW) && !lstat(path, &found) && S_ISLNK(found.st_mode)) return refused(ELOOP);
    const int fd = descriptor_of(
        CreateFileW(wide, rights, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL, create,
                    FILE_ATTRIBUTE_NORMAL | (flags & (WRITES | _O_CREAT) ? 0u : FILE_FLAG_BACKUP_SEMANTICS), NULL),
        flags & (WRITES | _O_APPEND | _O_NOINHERIT));
    if (fd < 0 && errno == EACCES && (flags & WRITES) && !stat(path, &found) && S_ISDIR(found.st_mode)) errno = EISDIR;
    return fd;
}

int posix_access(const char *path, int mode) {
    wide_path wide;
    if (!widen(path, wide)) return -1;
    const DWORD found = GetFileAttributesW(wide);
    if (found == INVALID_FILE_ATTRIBUTES) return failed_last();
    if ((mode & W_OK) && (found & FILE_ATTRIBUTE_READONLY) && !(found & FILE_ATTRIBUTE_DIRECTORY))
        return refused(EACCES);
    return 0;
}

int posix_faccessat(int folder, const char *path, int mode, int flags) {
    return (void)folder, (void)flags, posix_access(path, mode);
}

int posix_unlink(const char *path) {
    wide_path wide;
    return widen(path, wide) && (DeleteFileW(wide) || failed_last() == 0) ? 0 : -1;
}

int posix_rename(const char *from, const char *to) {
    wide_path a, b;
    if (!widen(from, a) || !widen(to, b)) return -1;
    return MoveFileExW(a, b, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH) ? 0 : failed_last();
}

int posix_mkdir(const char *path, int mode) {
    wide_path wide;
    (void)mode;
    return !widen(path, wide) ? -1 : CreateDirectoryW(wide, NULL) ? 0 : failed_last();
}

int posix_rmdir(const char *path) {
    wide_path wide;
    return !widen(path, wide) ? -1 : RemoveDirectoryW(wide) ? 0 : failed_last();
}

int posix_umask(int mode) { return (void)mode, 0; }

int posix_mkstemp(char *path) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz234567";
    char *const end = path + strlen(path) - 6;
    for (int tries = 0; tries < 100; tries++) {
        unsigned char random[6];
        if (getentropy(random, sizeof random)) return -1;
        for (int i = 0; i < 6; i++) end[i] = letters[random[i] % 32];
        const int fd = open(path, _O_RDWR | _O_CREAT | _O_EXCL | _O_NOINHERIT, 0600);
        if (fd >= 0 || errno != EEXIST) return fd;
    }
    return -1;
}

/* Mode "r" reads lines that end with "\r\n" like those that end with "\n". */
FILE *posix_fdopen(int fd, const char *mode) {
    const int is_text = strcmp(mode, "r") == 0;
    _setmode(fd, is_text ? _O_TEXT : _O_BINARY);
    return _fdopen(fd, is_text ? "rt" : *mode == 'r' ? "rb" : *mode == 'a' ? "ab" : "wb");
}

FILE *posix_fopen(const char *path, const char *mode) {
    const int flags = *mode == 'r' ? _O_RDONLY : _O_WRONLY | _O_CREAT | (*mode == 'a' ? _O_APPEND : _O_TRUNC);
    const int fd = open(path, flags | _O_NOINHERIT, 0666);
    FILE *file = fd < 0 ? NULL : posix_fdopen(fd, mode);
    if (fd >= 0 && !file) _close(fd);
    return file;
}

char *posix_realpath(const char *path, char *none) {
    wide_path wide, full;
    char *out = malloc(3 * WIDE);
    (void)none;
    if (!out || !widen(path, wide)) return free(out), NULL;
    const HANDLE file = CreateFileW(wide, FILE_READ_ATTRIBUTES, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE,
                                    NULL, OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, NULL);
    if (file == INVALID_HANDLE_VALUE) return failed_last(), free(out), NULL;
    const DWORD n = GetFinalPathNameByHandleW(file, full, WIDE, 0);
    CloseHandle(file);
    if (n && n < WIDE && narrow(full, out, 3 * WIDE)) return out;
    return free(out), errno = ENAMETOOLONG, NULL;
}

ssize_t posix_readlink(const char *path, char *out, size_t size) {
    (void)out, (void)size;
    return posix_access(path, F_OK) ? -1 : refused(EINVAL);
}

char *posix_getcwd(char *out, size_t size) {
    wide_path wide;
    const DWORD n = GetCurrentDirectoryW(WIDE, wide);
    return n && n < WIDE && narrow(wide, out, size) ? out : NULL;
}

int posix_dladdr(const void *address, Dl_info *out) {
    static _Thread_local char path[3 * WIDE];
    HMODULE module;
    wide_path wide;
    const DWORD flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    if (!GetModuleHandleExW(flags, (const wchar_t *)address, &module)) return 0;
    const DWORD n = GetModuleFileNameW(module, wide, WIDE);
    if (!n || n >= WIDE || !narrow(wide, path, sizeof path)) return 0;
    out->dli_fname = path;
    return 1;
}

int posix_statvfs(const char *path, struct statvfs *out) {
    wide_path wide;
    ULARGE_INTEGER left;
    if (!widen(path, wide)) return -1;
    if (!GetDiskFreeSpaceExW(wide, &left, NULL, NULL)) return failed_last();
    *out = (struct statvfs){ left.QuadPart, 1 };
    return 0;
}

/* ==== 3. Folders ======================================================================================== */

struct posix_folder {
    HANDLE find;
    WIN32_FIND_DATAW data;
    int first;
    struct dirent entry;
};

DIR *posix_opendir(const char *path) {
    wide_path wide;
    DIR *folder = calloc(1, sizeof *folder);
    char *all = malloc(strlen(path) + 3);
    if (!folder || !all) return free(folder), free(all), errno = ENOMEM, NULL;
    sprintf(all, "%s/*", path);
    folder->find = widen(all, wide) ? FindFirstFileW(wide, &folder->data) : INVALID_HANDLE_VALUE;
    free(all);
    if (folder->find != INVALID_HANDLE_VALUE) return folder->first = 1, folder;
    if (GetLastError() != ERROR_FILE_NOT_FOUND) failed_last();
    return free(folder), NULL;
}

struct dirent *posix_readdir(DIR *folder) {
    do {
        if (!folder->first && !FindNextFileW(folder->find, &folder->data)) {
            if (GetLastError() != ERROR_NO_MORE_FILES) failed_last();
            return NULL;
        }
        folder->first = 0;
    } while (!WideCharToMultiByte(CP_UTF8, 0, folder->data.cFileName, -1, folder->entry.d_name,
                                  sizeof folder->entry.d_name, NULL, NULL));
    return &folder->entry;
}

int posix_closedir(DIR *folder) {
    FindClose(folder->find);
    free(folder);
    return 0;
}

int posix_scandir(const char *path, struct dirent ***out, int (*wanted)(const struct dirent *),
                  int (*compare)(const struct dirent **, const struct dirent **)) {
    DIR *folder = opendir(path);
    struct dirent **all = NULL, *entry;
    int n = 0, no_memory = 0;
    if (!folder) return -1;
    while (!no_memory && (entry = readdir(folder))) {
        if (!wanted(entry)) continue;
        struct dirent **more = realloc(all, ((size_t)n + 1) * sizeof *all), *copy = malloc(sizeof *copy);
        if (more) all = more;
        if (more && copy) *copy = *entry, all[n++] = copy;
        else free(copy), no_memory = 1;
    }
    closedir(folder);
    if (no_memory) {
        while (n) free(all[--n]);
        return free(all), refused(ENOMEM);
    }
    if (n) qsort(all, (size_t)n, sizeof *all, (int (*)(const void *, const void *))(void (*)(void))compare);
    *out = all;
    return n;
}

/* Return the length of a bracket expression; set *matches. */
static size_t match_bracket(const char *p, char c, int *matches) {
    size_t at = 1;
    const int negated = p[at] == '!' || p[at] == '^';
    *matches = 0;
    for (at += (size_t)negated; p[at] && (p[at] != ']' || at == 1u + (size_t)negated);) {
        const int range = p[at + 1] == '-' && p[at + 2] && p[at + 2] != ']';
        *matches |= range ? c >= p[at] && c <= p[at + 2] : c == p[at];
        at += range ? 3 : 1;
    }
    *matches ^= negated;
    return p[at] ? at + 1 : 0;
}

int posix_fnmatch(const char *pattern, const char *name, int flags) {
    if ((flags & FNM_PERIOD) && *name == '.' && *pattern != '.') return 1;
    flags &= ~FNM_PERIOD;
    for (; *pattern; name++) {
        if (*pattern == '*') {
            for (pattern++;; name++) {
                if (!posix_fnmatch(pattern, name, flags)) return 0;
                if (!*name || ((flags & FNM_PATHNAME) && *name == '/')) return 1;
            }
        }
        int matches;
        size_t n = 1;
        if (!*name) return 1;
        if (*pattern == '?') matches = !((flags & FNM_PATHNAME) && *name == '/');
        else if (*pattern == '[' && (n = match_bracket(pattern, *name, &matches))) matches &= *name != '/' || !flags;
        else {
            n = 1;
            if (*pattern == '\\' && pattern[1]) pattern++;
            matches = *pattern == *name;
        }
        if (!matches) return 1;
        pattern += n;
    }
    return *name != 0;
}

/* ==== 4. Reading and writing, consoles =================================================================== */

int posix_close(int fd) {
    if (fd >= SOCKET_MARK) return closesocket(posix_raw(fd)) ? failed((DWORD)WSAGetLastError()) : 0;
    return _close(fd);
}

static int is_console(HANDLE file) {
    DWORD mode;
    return GetConsoleMode(file, &mode) != 0;
}

int posix_isatty(int fd) { return is_console(handle_of(fd)); }

/* Read from the console, whose own conversion to UTF-8 loses characters. ^Z at the start of a line ends the input. */
static ssize_t read_console(HANDLE console, char *data, size_t bytes) {
    static char waiting[4 * 1024];
    static int n_waiting, at;
    wchar_t line[1024];
    DWORD n = 0;
    if (at == n_waiting) {
        if (!ReadConsoleW(console, line, 1023, &n, NULL)) return failed_last();
        if (!n && GetLastError() == ERROR_OPERATION_ABORTED) return Sleep(20), refused(EINTR); /* ^C */
        if (n && line[n - 1] >= 0xD800 && line[n - 1] < 0xDC00) { /* the other half of a character */
            DWORD more = 0;
            ReadConsoleW(console, line + n, 1, &more, NULL);
            n += more;
        }
        if (!n || line[0] == 26) return 0;
        at = 0;
        n_waiting = WideCharToMultiByte(CP_UTF8, 0, line, (int)n, waiting, sizeof waiting, NULL, NULL);
    }
    const size_t have = (size_t)(n_waiting - at), take = have < bytes ? have : bytes;
    memcpy(data, waiting + at, take);
    at += (int)take;
    return (ssize_t)take;
}

ssize_t posix_read(int fd, void *data, size_t bytes) {
    const HANDLE file = handle_of(fd);
    DWORD n = 0;
    if (file == INVALID_HANDLE_VALUE) return refused(EBADF);
    if (is_console(file)) return read_console(file, data, bytes);
    if (ReadFile(file, data, (DWORD)(bytes < 1u << 30 ? bytes : 1u << 30), &n, NULL)) return (ssize_t)n;
    const DWORD error = GetLastError();
    if (error == ERROR_BROKEN_PIPE || error == ERROR_HANDLE_EOF) return 0;
    if (error == ERROR_NO_DATA) return refused(EAGAIN); /* a non-blocking pipe */
    if (error == ERROR_INVALID_FUNCTION) return refused(EISDIR);
    return failed(error);
}

ssize_t posix_write(int fd, const void *data, size_t bytes) {
    const HANDLE file = handle_of(fd);
    DWORD n = 0;
    if (file == INVALID_HANDLE_VALUE) return refused(EBADF);
    if (!WriteFile(file, data, (DWORD)(bytes < 1u << 24 ? bytes : 1u << 24), &n, NULL)) return failed_last();
    return !n && bytes ? refused(EAGAIN) : (ssize_t)n;
}

ssize_t posix_pread(int fd, void *data, size_t bytes, int64_t from) {
    const HANDLE file = handle_of(fd);
    const LARGE_INTEGER none = { .QuadPart = 0 };
    OVERLAPPED at = { .Offset = (DWORD)from, .OffsetHigh = (DWORD)((uint64_t)from >> 32) };
    LARGE_INTEGER before;
    DWORD n = 0;
    if (!SetFilePointerEx(file, none, &before, FILE_CURRENT)) return failed_last();
    const int good = ReadFile(file, data, (DWORD)(bytes < 1u << 30 ? bytes : 1u << 30), &n, &at);
    const DWORD error = good ? 0 : GetLastError();
    SetFilePointerEx(file, before, NULL, FILE_BEGIN);
    return good ? (ssize_t)n : error == ERROR_HANDLE_EOF ? 0 : failed(error);
}

int posix_ftruncate(int fd, int64_t bytes) { return _chsize_s(fd, bytes) ? -1 : 0; }

int posix_fsync(int fd) {
    if (GetFileType(handle_of(fd)) != FILE_TYPE_DISK) return refused(EINVAL);
    return FlushFileBuffers(handle_of(fd)) ? 0 : failed_last();
}

int posix_pipe(int ends[2]) { return _pipe(ends, 1 << 16, _O_BINARY | _O_NOINHERIT); }

/* Return the events of a file that does not block, of a pipe or of a console. */
static short events_of(int fd, short wanted) {
    const HANDLE file = handle_of(fd);
    DWORD n = 0;
    if (file == INVALID_HANDLE_VALUE) return POLLNVAL;
    if (wanted & POLLOUT) return POLLOUT; /* writing waits */
    if (is_console(file)) return WaitForSingleObject(file, 0) == WAIT_OBJECT_0 ? POLLIN : 0;
    if (GetFileType(file) != FILE_TYPE_PIPE) return POLLIN;
    if (!PeekNamedPipe(file, NULL, 0, NULL, &n, NULL)) return POLLIN | POLLHUP; /* closed, or wine's pipe from Linux */
    return n ? POLLIN : 0;
}

/* Windows has no function that waits for pipes and sockets together. Wait for sockets if there are any, and look at the
 * others every 10 ms. */
int posix_poll(struct pollfd *files, size_t n, int milliseconds) {
    const uint64_t begin = GetTickCount64();
    for (DWORD pause = 0;; pause += pause < 10) {
        WSAPOLLFD sockets[8];
        ULONG n_sockets = 0;
        int ready = 0;
        const int spent = (int)(GetTickCount64() - begin);
        for (size_t i = 0; i < n; i++) {
            files[i].revents = 0;
            if (files[i].fd >= SOCKET_MARK && n_sockets < 8)
                sockets[n_sockets++] = (WSAPOLLFD){ posix_raw(files[i].fd), files[i].events, 0 };
            else if (files[i].fd >= 0) files[i].revents = events_of(files[i].fd, files[i].events);
            ready += files[i].revents != 0;
        }
        const int wait = ready || (milliseconds >= 0 && spent >= milliseconds) ? 0 : (int)pause;
        if (n_sockets && WSAPoll(sockets, n_sockets, wait) > 0)
            for (size_t i = 0, k = 0; i < n; i++)
                if (files[i].fd >= SOCKET_MARK && k < n_sockets)
                    ready += (files[i].revents = sockets[k++].revents) != 0;
        if (ready || (milliseconds >= 0 && spent >= milliseconds)) return ready;
        if (!n_sockets) Sleep(pause);
    }
}

int posix_ioctl(int fd, int request, struct winsize *out) {
    CONSOLE_SCREEN_BUFFER_INFO info;
    (void)request;
    if (!GetConsoleScreenBufferInfo(handle_of(fd), &info)) return failed_last();
    out->ws_col = (unsigned short)(info.srWindow.Right - info.srWindow.Left + 1);
    return 0;
}

/* ==== 5. Locks, mapped files ============================================================================ */

/* A lock on a file prevents others from reading the locked bytes, so it covers one byte that no file has. */
static int lock(int fd, int is_shared) {
    OVERLAPPED at = { .Offset = 0xFFFFFFFE, .OffsetHigh = 0x7FFFFFFF };
    const DWORD flags = LOCKFILE_FAIL_IMMEDIATELY | (is_shared ? 0u : LOCKFILE_EXCLUSIVE_LOCK);
    if (LockFileEx(handle_of(fd), flags, 0, 1, 0, &at)) return 0;
    return GetLastError() == ERROR_LOCK_VIOLATION || GetLastError() == ERROR_IO_PENDING ? refused(EWOULDBLOCK)
                                                                                        : failed_last();
}

int posix_flock(int fd, int operation) { return (void)operation, lock(fd, 0); }

int posix_fcntl(int fd, int command, ...) {
    va_list arguments;
    if (fd < SOCKET_MARK && handle_of(fd) == INVALID_HANDLE_VALUE) return refused(EBADF);
    if (command == F_GETLK) return refused(ENOSYS); /* Windows does not name the process that holds a lock */
    if (command == F_SETLK) return lock(fd, 0) ? refused(errno == EWOULDBLOCK ? EAGAIN : errno) : 0;
    if (command != F_SETFL) return 0;
    va_start(arguments, command);
    const int flags = va_arg(arguments, int);
    va_end(arguments);
    u_long on = (flags & O_NONBLOCK) != 0;
    if (fd >= SOCKET_MARK) return ioctlsocket(posix_raw(fd), (long)FIONBIO, &on) ? failed((DWORD)WSAGetLastError()) : 0;
    DWORD mode = on ? PIPE_NOWAIT : PIPE_WAIT;
    return SetNamedPipeHandleState(handle_of(fd), &mode, NULL, NULL) ? 0 : failed_last();
}

void *posix_mmap(void *at, size_t bytes, int rights, int flags, int fd, int64_t from) {
    (void)at, (void)rights;
    if (flags & MAP_FIXED || fd < 0) return refused(ENOSYS), MAP_FAILED;
    const HANDLE mapping = CreateFileMappingW(handle_of(fd), NULL, PAGE_READONLY, 0, 0, NULL);
    void *data =
        mapping ? MapViewOfFile(mapping, FILE_MAP_READ, (DWORD)((uint64_t)from >> 32), (DWORD)from, bytes) : NULL;
    if (!data) failed_last();
    if (mapping) CloseHandle(mapping);
    return data ? data : MAP_FAILED;
}

int posix_munmap(void *data, size_t bytes) { return (void)bytes, UnmapViewOfFile(data) ? 0 : failed_last(); }

/* ==== 6. Signals ======================================================================================== */

enum { SIGNALS = 32 };
static struct {
    pthread_mutex_t lock; /* held while a handler runs, recursive */
    pthread_once_t once;
    struct sigaction actions[SIGNALS];
    sigset_t blocked, pending; /* of the main thread */
    DWORD main;
    UINT output_page; /* the console's code page at the start; 0: unchanged */
} signals = { .once = PTHREAD_ONCE_INIT };

static void begin_signals(void) {
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&signals.lock, &recursive);
    pthread_mutexattr_destroy(&recursive);
}

static void lock_signals(void) {
    pthread_once(&signals.once, begin_signals);
    pthread_mutex_lock(&signals.lock);
}

static void unlock_signals(void) { pthread_mutex_unlock(&signals.lock); }

static void restore_console(void) {
    if (signals.output_page) SetConsoleOutputCP(signals.output_page);
}

/* Call the handler of a signal, or end the process. */
static void deliver(int number) {
    const posix_handler handler = signals.actions[number].sa_handler;
    if (handler == SIG_IGN) return;
    if (handler != SIG_DFL) {
        handler(number);
        return;
    }
    restore_console();
    TerminateProcess(GetCurrentProcess(), (UINT)(128 + number));
}

int posix_raise(int number) {
    lock_signals();
    if (signals.blocked >> number & 1) sigaddset(&signals.pending, number);
    else deliver(number);
    unlock_signals();
    return 0;
}

/* Windows ends the process when this function returns for these events, or after a few seconds. */
static BOOL WINAPI on_event(DWORD event) {
    const int ends = event != CTRL_C_EVENT && event != CTRL_BREAK_EVENT;
    posix_raise(ends ? SIGTERM : SIGINT);
    if (ends) Sleep(INFINITE);
    return TRUE;
}

int posix_sigaction(int number, const struct sigaction *wanted, struct sigaction *before) {
    if (number < 1 || number >= SIGNALS) return refused(EINVAL);
    lock_signals();
    if (before) *before = signals.actions[number];
    if (wanted) signals.actions[number] = *wanted;
    unlock_signals();
    return 0;
}

posix_handler posix_signal(int number, posix_handler handler) {
    const struct sigaction wanted = { .sa_handler = handler };
    struct sigaction before = { .sa_handler = SIG_ERR };
    sigaction(number, &wanted, &before);
    return before.sa_handler;
}

/* The threads of a process share one mask, which only the main thread changes: Windows interrupts no thread. */
int posix_sigmask(int how, const sigset_t *set, sigset_t *before) {
    lock_signals();
    if (before) *before = signals.blocked;
    if (set && GetCurrentThreadId() == signals.main) {
        if (how == SIG_BLOCK) signals.blocked |= *set;
        else if (how == SIG_UNBLOCK) signals.blocked &= ~*set;
        else signals.blocked = *set;
        for (int i = 1; i < SIGNALS; i++) {
            if (!((signals.pending & ~signals.blocked) >> i & 1)) continue;
            sigdelset(&signals.pending, i);
            deliver(i);
        }
    }
    unlock_signals();
    return 0;
}

int posix_sigpending(sigset_t *out) {
    lock_signals();
    *out = signals.pending;
    unlock_signals();
    return 0;
}

static void *alarm_after(void *seconds) {
    Sleep((DWORD)(uintptr_t)seconds * 1000);
    posix_raise(SIGALRM);
    return NULL;
}

unsigned posix_alarm(unsigned seconds) {
    pthread_t thread;
    if (!pthread_create(&thread, NULL, alarm_after, (void *)(uintptr_t)seconds)) pthread_detach(thread);
    return 0;
}

static void begin_console(DWORD stream) {
    const HANDLE console = GetStdHandle(stream);
    DWORD mode;
    if (!GetConsoleMode(console, &mode)) return;
    if (!signals.output_page) signals.output_page = GetConsoleOutputCP();
    SetConsoleOutputCP(CP_UTF8);
    SetConsoleMode(console, mode | ENABLE_VIRTUAL_TERMINAL_PROCESSING);
}

void posix_begin(void) {
    signals.main = GetCurrentThreadId();
    for (int fd = 0; fd < 3; fd++) {
        if (_get_osfhandle(fd) == -2) _close(fd); /* the stream does not exist */
        else _setmode(fd, _O_BINARY);
    }
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    begin_console(STD_OUTPUT_HANDLE), begin_console(STD_ERROR_HANDLE);
    atexit(restore_console);
    SetConsoleCtrlHandler(on_event, TRUE);
}

/* ==== 7. Processes ====================================================================================== */

/* Append an argument in the form that Windows' programs parse. */
static int quote(wchar_t *line, size_t *at, size_t size, const char *word) {
    wide_path wide;
    size_t slashes = 0;
    if (!MultiByteToWideChar(CP_UTF8, 0, word, -1, wide, WIDE)) return 0;
    if (*at + 2 * wcslen(wide) + 4 > size) return 0;
    if (*at) line[(*at)++] = L' ';
    line[(*at)++] = L'"';
    for (const wchar_t *c = wide; *c; c++) {
        if (*c == L'"')
            for (slashes++; slashes; slashes--) line[(*at)++] = L'\\';
        slashes = *c == L'\\' ? slashes + 1 : 0;
        line[(*at)++] = *c;
    }
    for (; slashes; slashes--) line[(*at)++] = L'\\';
    line[(*at)++] = L'"';
    line[*at] = 0;
    return 1;
}

/* Return an inheritable handle. */
static HANDLE inheritable(HANDLE handle) {
    HANDLE copy = INVALID_HANDLE_VALUE;
    DuplicateHandle(GetCurrentProcess(), handle, GetCurrentProcess(), &copy, 0, TRUE, DUPLICATE_SAME_ACCESS);
    return copy;
}

pid_t posix_start(const char *path, char *const *words, int out, int err) {
    enum { LINE = 32768 };
    wide_path program;
    wchar_t *line = malloc(LINE * sizeof *line);
    size_t at = 0;
    int good = line && widen(path, program);
    for (; good && *words; words++) good = quote(line, &at, LINE, *words);
    const int null = open("NUL", O_RDONLY);
    HANDLE handles[3] = { inheritable(handle_of(null)), inheritable(handle_of(out)), inheritable(handle_of(err)) };
    SIZE_T bytes = 0;
    InitializeProcThreadAttributeList(NULL, 1, 0, &bytes);
    LPPROC_THREAD_ATTRIBUTE_LIST only = malloc(bytes);
    STARTUPINFOEXW start = { .StartupInfo = { .cb = sizeof start,
                                              .dwFlags = STARTF_USESTDHANDLES,
                                              .hStdInput = handles[0],
                                              .hStdOutput = handles[1],
                                              .hStdError = handles[2] },
                             .lpAttributeList = only };
    PROCESS_INFORMATION made = { 0 };
    good = good && only && InitializeProcThreadAttributeList(only, 1, 0, &bytes) &&
           UpdateProcThreadAttribute(only, 0, PROC_THREAD_ATTRIBUTE_HANDLE_LIST, handles, sizeof handles, NULL, NULL) &&
           CreateProcessW(program, line, NULL, NULL, TRUE, EXTENDED_STARTUPINFO_PRESENT | CREATE_NO_WINDOW, NULL, NULL,
                          &start.StartupInfo, &made);
    if (only && bytes) DeleteProcThreadAttributeList(only);
    for (int i = 0; i < 3; i++) CloseHandle(handles[i]);
    if (null >= 0) _close(null);
    if (made.hThread) CloseHandle(made.hThread);
    free(only), free(line);
    return good ? (pid_t)(intptr_t)made.hProcess : -1;
}

int posix_kill(pid_t process, int number) {
    return TerminateProcess((HANDLE)(intptr_t)process, (UINT)(128 + number)) ? 0 : failed_last();
}

pid_t posix_waitpid(pid_t process, int *status, int flags) {
    const HANDLE child = (HANDLE)(intptr_t)process;
    DWORD code = 0;
    if (WaitForSingleObject(child, flags & WNOHANG ? 0 : INFINITE) != WAIT_OBJECT_0) return 0;
    GetExitCodeProcess(child, &code);
    CloseHandle(child);
    if (status) *status = (int)code;
    return process;
}

int posix_getrlimit(int resource, struct rlimit *out) { return (void)resource, out->rlim_cur = RLIM_INFINITY, 0; }

int posix_getrusage(int who, struct rusage *out) {
    PROCESS_MEMORY_COUNTERS memory = { .cb = sizeof memory };
    FILETIME created, ended, kernel, user;
    (void)who;
    memset(out, 0, sizeof *out);
    if (!K32GetProcessMemoryInfo(GetCurrentProcess(), &memory, sizeof memory)) return failed_last();
    out->ru_maxrss = (long)(memory.PeakWorkingSetSize >> 10);
    if (!GetProcessTimes(GetCurrentProcess(), &created, &ended, &kernel, &user)) return failed_last();
    const uint64_t spent[] = { (uint64_t)user.dwHighDateTime << 32 | user.dwLowDateTime,
                               (uint64_t)kernel.dwHighDateTime << 32 | kernel.dwLowDateTime };
    out->ru_utime = (struct timeval){ (long)(spent[0] / 10000000), (long)(spent[0] / 10 % 1000000) };
    out->ru_stime = (struct timeval){ (long)(spent[1] / 10000000), (long)(spent[1] / 10 % 1000000) };
    return 0;
}

long posix_sysconf(int name) {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return name == _SC_PAGESIZE ? (long)info.dwAllocationGranularity : (long)info.dwNumberOfProcessors;
}

/* A variable at a fixed address: callers keep pointers. */
typedef struct variable {
    struct variable *next;
    char *value;
    char name[];
} variable;

char *posix_getenv(const char *name) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static variable *all;
    wchar_t key[256], *wide = NULL;
    char *value = NULL;
    if (!MultiByteToWideChar(CP_UTF8, 0, name, -1, key, 256)) return NULL;
    const DWORD n = GetEnvironmentVariableW(key, NULL, 0);
    if (!n || !(wide = malloc(n * sizeof *wide)) || GetEnvironmentVariableW(key, wide, n) >= n ||
        !(value = malloc(3u * n + 1)))
        return free(wide), NULL;
    WideCharToMultiByte(CP_UTF8, 0, wide, -1, value, (int)(3 * n + 1), NULL, NULL);
    free(wide);
    pthread_mutex_lock(&mutex);
    variable *v = all;
    while (v && (strcmp(v->name, name) != 0 || strcmp(v->value, value) != 0)) v = v->next;
    if (v) free(value);
    else if ((v = malloc(sizeof *v + strlen(name) + 1))) {
        strcpy(v->name, name);
        v->value = value, v->next = all, all = v;
    } else free(value);
    pthread_mutex_unlock(&mutex);
    return v ? v->value : NULL;
}

int posix_setenv(const char *name, const char *value, int replace) {
    const size_t n = strlen(value) + 1;
    wchar_t key[256], *wide = malloc(n * sizeof *wide);
    (void)replace;
    if (!wide) return -1;
    const int good = MultiByteToWideChar(CP_UTF8, 0, name, -1, key, 256) &&
                     MultiByteToWideChar(CP_UTF8, 0, value, -1, wide, (int)n) && SetEnvironmentVariableW(key, wide);
    free(wide);
    return good ? 0 : failed_last();
}

BOOLEAN NTAPI SystemFunction036(PVOID data, ULONG bytes); /* RtlGenRandom */

int posix_getentropy(void *data, size_t bytes) { return SystemFunction036(data, (ULONG)bytes) ? 0 : refused(EIO); }

/* ==== 8. Sockets ======================================================================================== */

static void begin_sockets(void) {
    WSADATA data;
    WSAStartup(MAKEWORD(2, 2), &data);
}

SOCKET posix_raw(int fd) { return (SOCKET)(unsigned)(fd & ~SOCKET_MARK); }

static int marked(SOCKET socket) {
    return socket == INVALID_SOCKET ? failed((DWORD)WSAGetLastError()) : (int)socket | SOCKET_MARK;
}

static int checked(int result) { return result == SOCKET_ERROR ? failed((DWORD)WSAGetLastError()) : result; }

int posix_socket(int family, int type, int protocol) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, begin_sockets);
    return marked(WSASocketW(family, type, protocol, NULL, 0, WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT));
}

int posix_bind(int fd, const struct sockaddr *a, size_t n) { return checked(bind(posix_raw(fd), a, (int)n)); }
int posix_listen(int fd, int backlog) { return checked(listen(posix_raw(fd), backlog)); }
int posix_accept(int fd, struct sockaddr *a, socklen_t *n) { return marked(accept(posix_raw(fd), a, n)); }
int posix_connect(int fd, const struct sockaddr *a, size_t n) { return checked(connect(posix_raw(fd), a, (int)n)); }

int posix_shutdown(uint64_t fd, int how) { return checked(shutdown(posix_raw((int)fd), how)); }

ssize_t posix_recv(int fd, void *data, size_t bytes, int flags) {
    WSAPOLLFD ready = { posix_raw(fd), POLLIN, 0 };
    if ((flags & MSG_DONTWAIT) && WSAPoll(&ready, 1, 0) <= 0) return refused(EAGAIN);
    return checked(recv(posix_raw(fd), data, (int)bytes, flags & ~MSG_DONTWAIT));
}

ssize_t posix_sendto(int fd, const void *data, size_t bytes, int flags, const struct sockaddr *to, socklen_t size) {
    return checked(sendto(posix_raw(fd), data, (int)bytes, flags, to, size));
}

int posix_getsockname(int fd, struct sockaddr *a, socklen_t *n) { return checked(getsockname(posix_raw(fd), a, n)); }

int posix_getsockopt(int fd, int level, int name, void *value, socklen_t *size) {
    return checked(getsockopt(posix_raw(fd), level, name, value, size));
}

/* On Windows SO_REUSEADDR lets others take over the port, and closed connections do not block it. */
int posix_setsockopt(int fd, int level, int name, const void *value, socklen_t size) {
    if (level == SOL_SOCKET && name == SO_REUSEADDR) name = SO_EXCLUSIVEADDRUSE;
    return checked(setsockopt(posix_raw(fd), level, name, value, size));
}

int posix_getaddrinfo(const char *host, const char *port, const struct addrinfo *wanted, struct addrinfo **out) {
    const int any = posix_socket(AF_INET, SOCK_STREAM, 0); /* starts Winsock */
    if (any >= 0) posix_close(any);
    return getaddrinfo(host, port, wanted, out);
}

const char *posix_gai_strerror(int code) {
    return code == EAI_NONAME ? "Name or service not known" : "Name not resolved";
}

/* ==== 9. The C library ================================================================================== */

/* Write formatted text in one piece: MinGW writes single bytes, which a console cannot decode. */
static int print(FILE *out, const char *format, va_list arguments) {
    char part[1024], *text = part;
    va_list again;
    va_copy(again, arguments);
    const int n = vsnprintf(part, sizeof part, format, arguments);
    if (n >= (int)sizeof part && (text = malloc((size_t)n + 1))) vsnprintf(text, (size_t)n + 1, format, again);
    va_end(again);
    const int good = n >= 0 && text && fwrite(text, 1, (size_t)n, out) == (size_t)n;
    if (text != part) free(text);
    return good ? n : -1;
}

int gnu_printf(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int n = print(stdout, format, arguments);
    va_end(arguments);
    return n;
}

int posix_fprintf(FILE *out, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int n = print(out, format, arguments);
    va_end(arguments);
    return n;
}

void *posix_memmem(const void *data, size_t length, const void *part, size_t size) {
    const char *at = data, *const end = at + length;
    if (!size) return (void *)(uintptr_t)at;
    for (; at && (size_t)(end - at) >= size; at++) {
        at = memchr(at, *(const unsigned char *)part, (size_t)(end - at) - size + 1);
        if (!at) break;
        if (memcmp(at, part, size) == 0) return (void *)(uintptr_t)at;
    }
    return NULL;
}

char *posix_strndup(const char *text, size_t length) {
    const char *end = memchr(text, 0, length);
    const size_t n = end ? (size_t)(end - text) : length;
    char *copy = malloc(n + 1);
    if (copy) memcpy(copy, text, n), copy[n] = 0;
    return copy;
}

ssize_t posix_getline(char **line, size_t *capacity, FILE *file) {
    size_t n = 0;
    for (int c = 0; c != '\n' && (c = getc(file)) != EOF;) {
        if (n + 2 > *capacity) {
            const size_t wanted = *capacity ? 2 * *capacity : 128;
            char *more = realloc(*line, wanted);
            if (!more) return -1;
            *line = more, *capacity = wanted;
        }
        (*line)[n++] = (char)c;
    }
    if (n) (*line)[n] = 0;
    return n ? (ssize_t)n : -1;
}

int posix_regcomp(regex_t *out, const char *pattern, int flags) {
    int error;
    size_t at;
    (void)flags;
    out->code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_DOLLAR_ENDONLY, &error, &at, NULL);
    return out->code == NULL;
}

int posix_regexec(const regex_t *regex, const char *text, size_t n, void *none, int flags) {
    pcre2_match_data *data = pcre2_match_data_create_from_pattern(regex->code, NULL);
    (void)n, (void)none, (void)flags;
    const int result = data ? pcre2_match(regex->code, (PCRE2_SPTR)text, strlen(text), 0, 0, data, NULL) : -1;
    pcre2_match_data_free(data);
    return result < 0;
}

void posix_regfree(regex_t *regex) { pcre2_code_free(regex->code); }
