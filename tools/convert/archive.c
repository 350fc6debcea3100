/* archive.c - see archive.h. All integers of zip archives are little-endian. */
#define _POSIX_C_SOURCE 200809L

#include "tools/convert/archive.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

enum { END = 22, CENTRAL = 46, LOCAL = 30, MAX_COMMENT = 65535, MAX_ENTRIES = 1 << 16 };
static const uint32_t end_mark = 0x06054b50, central_mark = 0x02014b50, local_mark = 0x04034b50, large = 0xffffffff;
static const uint64_t largest_archive = (uint64_t)1 << 36;

static uint32_t number(const uint8_t *p, size_t bytes) {
    uint32_t v = 0;
    for (size_t i = bytes; i-- > 0;) v = v << 8 | p[i];
    return v;
}

int archive_is_zip(const char *path) {
    uint8_t begin[4] = { 0 };
    return packed_begin(path, begin, sizeof begin) == sizeof begin && number(begin, 4) == local_mark;
}

/* ---- Zip ---- */

static int damaged(making *m, const archive *a, const char *problem) {
    return making_refuse(m, packed_base(a->path), "%s: not a zip archive, truncated or damaged; fetch it again",
                         problem);
}

/* Find the data of an entry, whose local header is at `at`. */
static int find_data(making *m, archive *a, archive_entry *e, uint64_t at) {
    const uint8_t *p = a->file.data + at;
    if (at > a->file.size || a->file.size - at < LOCAL || number(p, 4) != local_mark)
        return damaged(m, a, "an entry has no header");
    const uint64_t begin = at + LOCAL + number(p + 26, 2) + number(p + 28, 2);
    if (begin > a->file.size || e->bytes > a->file.size - begin) return damaged(m, a, "an entry is too long");
    e->data = a->file.data + begin;
    return 1;
}

/* Read the entry of the central directory at *at, and advance *at to the next one. */
static int read_entry(making *m, archive *a, uint64_t *at, uint64_t end) {
    const uint8_t *p = a->file.data + *at;
    if (end - *at < CENTRAL || number(p, 4) != central_mark) return damaged(m, a, "the directory is incomplete");
    const uint32_t flags = number(p + 8, 2), method = number(p + 10, 2), length = number(p + 28, 2);
    const uint64_t next = *at + CENTRAL + length + number(p + 30, 2) + number(p + 32, 2);
    archive_entry e = { .bytes = number(p + 20, 4),
                        .size = number(p + 24, 4),
                        .sum = number(p + 16, 4),
                        .deflated = method != 0 };
    const uint32_t offset = number(p + 42, 4);
    if (next > end) return damaged(m, a, "the directory is incomplete");
    e.name = making_keep(m, p + CENTRAL, length);
    if (!e.name) return 0;
    if (e.bytes == large || e.size == large || offset == large)
        return making_refuse(m, packed_base(a->path), "zip archives of 4 GB or more are not supported: unpack it");
    if (strlen(e.name) != length || text_utf8_valid(e.name, length) != length)
        return damaged(m, a, "invalid name of an entry");
    *at = next;
    if (length && e.name[length - 1] == '/') return 1; /* a folder */
    if (flags & 1 || (method != 0 && method != 8))
        return making_refuse(m, packed_base(a->path), "%.80s is encrypted or packed by an unsupported method", e.name);
    if (!e.deflated && e.bytes != e.size) return damaged(m, a, "an entry has two sizes");
    return find_data(m, a, &e, offset) &&
           making_failed(m, text_add(&a->entries, &a->n, &a->capacity, &e, 1, sizeof e, m->error));
}

/* Return the position of the end record, which a comment may follow; UINT64_MAX if there is none. */
static uint64_t find_end(const packed_file *f) {
    for (uint64_t i = 0; i <= MAX_COMMENT && i + END <= f->size; i++) {
        const uint8_t *p = f->data + (f->size - END - i);
        if (number(p, 4) == end_mark && number(p + 20, 2) == i) return f->size - END - i;
    }
    return UINT64_MAX;
}

/* Set the folder that contains `root`. */
static int find_root(making *m, archive *a, const char *root) {
    for (size_t i = 0; i < a->n; i++) {
        const char *name = a->entries[i].name, *slash = strchr(name, '/');
        const size_t skipped = slash ? (size_t)(slash - name) + 1 : 0;
        if (strcmp(name + skipped, root) != 0) continue;
        a->folder = making_keep(m, name, skipped);
        return a->folder != NULL;
    }
    return making_refuse(m, packed_base(a->path), "contains no %s: not a package of Argos Translate", root);
}

int archive_open(making *m, const char *path, const char *root, archive *a) {
    struct stat about;
    *a = (archive){ .path = path, .folder = "" };
    if (m->status || (stat(path, &about) == 0 && S_ISDIR(about.st_mode))) return m->status == MOE_OK;
    if (!making_failed(m, packed_open(path, largest_archive, "an archive", m->out, &a->file, m->error))) return 0;
    const uint64_t end = find_end(&a->file);
    if (end == UINT64_MAX) return damaged(m, a, "no end record");
    const uint8_t *p = a->file.data + end;
    const uint32_t n = number(p + 10, 2);
    uint64_t at = number(p + 16, 4);
    if (number(p + 4, 4) || number(p + 8, 2) != n || at > end) return damaged(m, a, "invalid end record");
    for (uint32_t i = 0; i < n; i++)
        if (!read_entry(m, a, &at, end)) return 0;
    return find_root(m, a, root);
}

void archive_close(archive *a) {
    packed_close(&a->file);
    free(a->entries);
    *a = (archive){ .folder = "" };
}

/* ---- Files ---- */

static const archive_entry *find(const archive *a, const char *name) {
    const size_t n = strlen(a->folder);
    for (size_t i = 0; i < a->n; i++)
        if (strncmp(a->entries[i].name, a->folder, n) == 0 && strcmp(a->entries[i].name + n, name) == 0)
            return &a->entries[i];
    return NULL;
}

/* Add the names in a folder of an archive. */
static moe_status list(const archive *a, const char *folder, packed_names *names, moe_error *error) {
    const size_t n = strlen(a->folder), m = strlen(folder);
    moe_status status = MOE_OK;
    for (size_t i = 0; i < a->n && !status; i++) {
        const char *name = a->entries[i].name;
        if (strncmp(name, a->folder, n) != 0 || strncmp(name + n, folder, m) != 0 || strchr(name + n + m, '/'))
            continue;
        char *copy = text_copy(name + n + m, strlen(name + n + m));
        status = copy ? text_add(&names->data, &names->n, &names->capacity, &copy, 1, sizeof copy, error)
                      : text_out_of_memory(error);
        if (status) free(copy);
    }
    return status;
}

const char *archive_match(making *m, const archive *a, const char *folder, const char *patterns, size_t which) {
    packed_names names = { 0 };
    const char *found = NULL;
    const char *path = making_join(m, a->path, folder);
    if (!path) return NULL;
    making_failed(m, a->file.data ? list(a, folder, &names, m->error) : packed_list(path, &names, m->error));
    for (size_t i = 0; i < names.n && !found; i++)
        if (packed_matches(patterns, names.data[i]) && !which--)
            found =
                *folder ? making_join(m, folder, names.data[i]) : making_keep(m, names.data[i], strlen(names.data[i]));
    packed_names_free(&names);
    return found;
}

int archive_has(making *m, const archive *a, const char *name) {
    const char *path = a->file.data ? NULL : making_join(m, a->path, name);
    return a->file.data ? find(a, name) != NULL : path && packed_exists(path);
}

static uint32_t sum_of(const uint8_t *data, uint64_t bytes) {
    uLong sum = crc32(0, NULL, 0);
    while (bytes) {
        const uInt n = (uInt)(bytes < 1 << 30 ? bytes : 1 << 30);
        sum = crc32(sum, data, n);
        data += n;
        bytes -= n;
    }
    return (uint32_t)sum;
}

int archive_read(making *m, const archive *a, const char *name, uint64_t most, const char *what, packed_file *file) {
    *file = (packed_file){ NULL, 0 };
    if (m->status) return 0;
    if (!a->file.data) {
        const char *path = making_join(m, a->path, name);
        return path && making_failed(m, packed_open(path, most, what, m->out, file, m->error));
    }
    const archive_entry *e = find(a, name);
    if (!e) return making_refuse(m, packed_base(a->path), "%.80s is missing", name);
    if (e->size > most)
        return making_refuse(m, name, "more than %llu bytes, the limit for %s", (unsigned long long)most, what);
    if (e->size &&
        !making_failed(m, packed_unpack(e->data, (size_t)e->bytes, e->size, e->deflated, name, m->out, file, m->error)))
        return 0;
    if (sum_of(file->data, e->size) == e->sum) return 1;
    packed_close(file);
    return making_refuse(m, name, "checksum mismatch in %.80s: damaged", packed_base(a->path));
}
