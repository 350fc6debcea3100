/* packed.c - see packed.h */
#define _POSIX_C_SOURCE 200809L

#include "tools/convert/packed.h"
#include "tools/get/sha256.h"
#include "tools/text/system.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

enum { EXPANSION = 16, ALWAYS = 1 << 20, BLOCK = 1 << 16 };

const char *packed_base(const char *path) { return system_name(path); }

static moe_status cannot(const char *verb, const char *path, moe_error *error) {
    return text_fail(error, MOE_ERROR_IO, packed_base(path), "cannot %s %.160s: %s", verb, path, strerror(errno));
}

int packed_exists(const char *path) {
    struct stat about;
    return lstat(path, &about) == 0;
}

/* Open a regular file. A FIFO might block. */
static int open_regular(const char *path, struct stat *about, moe_error *error) {
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT && packed_exists(path)) {
        text_fail(error, MOE_ERROR_IO, packed_base(path),
                  "%.160s is a link to a missing file: copy the model with cp -rL", path);
    } else if (fd < 0 || fstat(fd, about) != 0) {
        cannot("open", path, error);
    } else if (!S_ISREG(about->st_mode)) {
        text_fail(error, MOE_ERROR_IO, packed_base(path), "%.160s is not a regular file", path);
    } else {
        return fd;
    }
    if (fd >= 0) close(fd);
    return -1;
}

/* ---- Compressed files ---- */

/* Create a file without a name in the folder of `beside`. */
static int open_unnamed(const char *beside, moe_error *error) {
    const int folder = (int)(packed_base(beside) - beside);
    char path[4096];
    int fd = -1;
    errno = ENAMETOOLONG;
    if (snprintf(path, sizeof path, "%.*s.moe-XXXXXX", folder, beside) < (int)sizeof path) fd = mkstemp(path);
    if (fd < 0) cannot("write", beside, error);
    else unlink(path);
    return fd;
}

static ssize_t read_block(int fd, void *data, size_t bytes) {
    ssize_t n;
    do n = read(fd, data, bytes);
    while (n < 0 && errno == EINTR);
    return n;
}

size_t packed_begin(const char *path, void *data, size_t bytes) {
    struct stat about;
    const int fd = open_regular(path, &about, NULL);
    const ssize_t n = fd >= 0 ? read_block(fd, data, bytes) : 0;
    if (fd >= 0) close(fd);
    return n > 0 ? (size_t)n : 0;
}

static int write_block(int fd, const unsigned char *data, size_t bytes) {
    while (bytes) {
        const ssize_t n = write(fd, data, bytes);
        if (n == 0 || (n < 0 && errno != EINTR)) return 0;
        if (n > 0) data += n, bytes -= (size_t)n;
    }
    return 1;
}

typedef struct unpacking {
    const char *path, *what;
    int from, to;
    uint64_t most, done;
    z_stream z;
    unsigned char in[BLOCK], out[BLOCK];
} unpacking;

/* Unpack the members of a gzip file; zeros may follow each. */
static moe_status inflate_all(unpacking *u, moe_error *error) {
    int between = 0, full = 0; /* 1 after a member; 1 if there may be more output without more input */
    for (;;) {
        if (!u->z.avail_in && !full) {
            const ssize_t n = read_block(u->from, u->in, BLOCK);
            if (n < 0) return cannot("read", u->path, error);
            if (n == 0 && between) return MOE_OK;
            if (n == 0) break;
            u->z.next_in = u->in;
            u->z.avail_in = (uInt)n;
        }
        if (between && !*u->z.next_in) {
            u->z.next_in++;
            u->z.avail_in--;
            continue;
        }
        if (between && inflateReset(&u->z) != Z_OK) break;
        u->z.next_out = u->out;
        u->z.avail_out = BLOCK;
        const int result = inflate(&u->z, Z_NO_FLUSH);
        const size_t bytes = BLOCK - u->z.avail_out;
        if (result == Z_MEM_ERROR) return text_out_of_memory(error);
        if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR) break;
        if (bytes > u->most - u->done)
            return text_fail(error, MOE_ERROR_FORMAT, packed_base(u->path),
                             "%.100s: decompresses to more than %llu bytes, the limit for %s", packed_base(u->path),
                             (unsigned long long)u->most, u->what);
        if (!write_block(u->to, u->out, bytes)) return cannot("unpack", u->path, error);
        u->done += bytes;
        between = result == Z_STREAM_END;
        full = !between && !u->z.avail_out;
    }
    return text_fail(error, MOE_ERROR_FORMAT, packed_base(u->path),
                     "%.160s: not a gzip file, truncated or damaged; fetch it again", packed_base(u->path));
}

/* Unpack the file `from`; set *fd to the unnamed file. */
static moe_status unpack(const char *path, int from, uint64_t most, const char *what, const char *beside, int *fd,
                         moe_error *error) {
    struct rlimit limit;
    unpacking *u = calloc(1, sizeof *u);
    if (!u) return text_out_of_memory(error);
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < most)
        most = limit.rlim_cur; /* a larger file would end the process (SIGXFSZ) */
    u->path = path;
    u->what = what;
    u->from = from;
    u->most = most;
    moe_status status = MOE_ERROR_IO;
    if ((u->to = open_unnamed(beside, error)) >= 0) {
        status = inflateInit2(&u->z, 15 + 16) == Z_OK ? inflate_all(u, error) : text_out_of_memory(error);
        inflateEnd(&u->z);
        if (status) close(u->to);
        else *fd = u->to;
    }
    free(u);
    return status;
}

/* ---- Files ---- */

static moe_status map(const char *path, int fd, uint64_t size, packed_file *file, moe_error *error) {
    void *data = NULL;
    if (size > SIZE_MAX || (size && (data = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED))
        return cannot("map", path, error);
    *file = (packed_file){ data, (size_t)size };
    return MOE_OK;
}

const char packed_unfinished[] = "*.part *.incomplete *.crdownload *.aria2 *.download";

const char *packed_impostor(const char *begin) {
    static const char page[] = "a web page, not the file itself: download it again";
    static const struct {
        const char *begin, *what;
    } rows[] = { { "version https://git-lfs.github.com/spec/",
                   "a Git LFS pointer, not the file itself: run git lfs pull, or download the file" },
                 { "<!doctype html", page },
                 { "<html", page },
                 { "<?xml", page } };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strncasecmp(begin, rows[i].begin, strlen(rows[i].begin)) == 0) return rows[i].what;
    return NULL;
}

moe_status packed_open(const char *path, uint64_t most, const char *what, const char *beside, packed_file *file,
                       moe_error *error) {
    static const unsigned char gzip[] = { 0x1f, 0x8b }, zstd[] = { 0x28, 0xb5, 0x2f, 0xfd };
    const char *name = packed_base(path), *what_it_is;
    char magic[64] = { 0 };
    struct stat about;
    moe_status status = MOE_OK;
    int fd = open_regular(path, &about, error);
    if (fd < 0) return MOE_ERROR_IO;
    const uint64_t size = (uint64_t)about.st_size;
    const ssize_t n = pread(fd, magic, sizeof magic - 1, 0);
    if (n < 0) {
        status = cannot("read", path, error);
    } else if ((what_it_is = packed_impostor(magic))) {
        status = text_fail(error, MOE_ERROR_FORMAT, name, "%.80s: %s", name, what_it_is);
    } else if (memcmp(magic, gzip, sizeof gzip) == 0 || text_ends_with(name, strlen(name), ".gz")) {
        const uint64_t usual = size > UINT64_MAX / EXPANSION - ALWAYS ? UINT64_MAX : EXPANSION * size + ALWAYS;
        int unpacked = -1;
        status = unpack(path, fd, most < usual ? most : usual, what, beside, &unpacked, error);
        close(fd);
        fd = unpacked;
        if (status == MOE_OK && fstat(fd, &about) != 0) status = cannot("read", path, error);
    } else if (memcmp(magic, zstd, sizeof zstd) == 0 || text_ends_with(name, strlen(name), ".zst")) {
        status = text_fail(error, MOE_ERROR_UNSUPPORTED, name,
                           "%.120s is compressed by zstd: unpack it with zstd -d --rm", name);
    } else if (size > most) {
        status = text_fail(error, MOE_ERROR_FORMAT, name, "%.120s: more than %llu bytes, the limit for %s", name,
                           (unsigned long long)most, what);
    }
    if (status == MOE_OK) status = map(path, fd, (uint64_t)about.st_size, file, error);
    if (fd >= 0) close(fd);
    return status;
}

/* Unpack to the file `to`. Returns 1 if the data becomes exactly `size` bytes. */
static int inflate_to(int to, const uint8_t *data, size_t bytes, uint64_t size, unsigned char *block) {
    z_stream z = { .next_in = (unsigned char *)(uintptr_t)data };
    const uint8_t *end = data + bytes;
    uint64_t done = 0;
    int result = Z_OK;
    if (inflateInit2(&z, -15) != Z_OK) return 0;
    while (result == Z_OK) {
        z.avail_in = (uInt)((size_t)(end - z.next_in) < BLOCK ? (size_t)(end - z.next_in) : BLOCK);
        z.next_out = block;
        z.avail_out = BLOCK;
        result = inflate(&z, Z_NO_FLUSH);
        const size_t n = BLOCK - z.avail_out;
        done += n;
        if (done > size || !write_block(to, block, n)) result = Z_DATA_ERROR;
    }
    inflateEnd(&z);
    return result == Z_STREAM_END && done == size && z.next_in == end;
}

moe_status packed_unpack(const uint8_t *data, size_t bytes, uint64_t size, int deflated, const char *name,
                         const char *beside, packed_file *file, moe_error *error) {
    unsigned char *block = malloc(BLOCK);
    if (!block) return text_out_of_memory(error);
    const int fd = open_unnamed(beside, error);
    moe_status status = MOE_ERROR_IO;
    if (fd >= 0) {
        if (deflated ? inflate_to(fd, data, bytes, size, block) : bytes == size && write_block(fd, data, bytes))
            status = map(name, fd, size, file, error);
        else
            status = text_fail(error, MOE_ERROR_FORMAT, name, "%.100s: damaged, or no room for %llu bytes on the disk",
                               name, (unsigned long long)size);
        close(fd);
    }
    free(block);
    return status;
}

void packed_close(packed_file *file) {
    if (file->data) munmap((void *)(uintptr_t)file->data, file->size);
    *file = (packed_file){ NULL, 0 };
}

moe_status packed_digest(const char *path, char hex[65], moe_error *error) {
    struct stat about;
    sha256 hash;
    const int fd = open_regular(path, &about, error);
    ssize_t n = -1;
    if (fd < 0) return MOE_ERROR_IO;
    char *block = malloc(BLOCK);
    sha256_begin(&hash);
    while (block && (n = read_block(fd, block, BLOCK)) > 0) sha256_add(&hash, block, (size_t)n);
    const moe_status status = !block ? text_out_of_memory(error) : n < 0 ? cannot("read", path, error) : MOE_OK;
    free(block);
    close(fd);
    sha256_end(&hash, hex);
    return status;
}

/* ---- Folders ---- */

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

moe_status packed_list(const char *folder, packed_names *names, moe_error *error) {
    DIR *d = opendir(folder);
    moe_status status = MOE_OK;
    if (!d) return cannot("open", folder, error);
    for (const struct dirent *entry; status == MOE_OK && (errno = 0, entry = readdir(d));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        char *name = text_copy(entry->d_name, strlen(entry->d_name));
        status = name ? text_add(&names->data, &names->n, &names->capacity, &name, 1, sizeof name, error)
                      : text_out_of_memory(error);
        if (status) free(name);
    }
    if (status == MOE_OK && errno) status = cannot("read", folder, error);
    closedir(d);
    if (names->n) qsort(names->data, names->n, sizeof *names->data, by_name);
    return status;
}

void packed_names_free(packed_names *names) {
    for (size_t i = 0; i < names->n; i++) free(names->data[i]);
    free(names->data);
    *names = (packed_names){ NULL, 0, 0 };
}

int packed_matches(const char *patterns, const char *name) {
    char pattern[64];
    for (const char *p = patterns; *p; p += strspn(p, " ")) {
        const size_t n = strcspn(p, " ");
        snprintf(pattern, sizeof pattern, "%.*s", (int)n, p);
        if (fnmatch(pattern, name, 0) == 0) return 1;
        p += n;
    }
    return 0;
}
