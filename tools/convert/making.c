/* making.c - see making.h */
#define _POSIX_C_SOURCE 200809L

#include "tools/convert/making.h"
#include "tools/text/system.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

typedef struct making_block {
    struct making_block *next;
    char data[];
} making_block;

void making_free(making *m) {
    for (making_block *b = m->blocks, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    free(m->entries);
    m->blocks = NULL;
    m->entries = NULL;
}

int making_failed(making *m, moe_status status) {
    if (m->status == MOE_OK) m->status = status;
    return m->status == MOE_OK;
}

static int fail(making *m, moe_status status, const char *file, const char *format, va_list arguments) {
    char message[256];
    vsnprintf(message, sizeof message, format, arguments);
    if (m->status == MOE_OK) text_fail(m->error, status, file, "%.80s: %.240s", file, message);
    return making_failed(m, status);
}

int making_refuse(making *m, const char *file, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fail(m, MOE_ERROR_FORMAT, file, format, arguments);
    va_end(arguments);
    return 0;
}

int making_unsupported(making *m, const char *file, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fail(m, MOE_ERROR_UNSUPPORTED, file, format, arguments);
    va_end(arguments);
    return 0;
}

int making_no_memory(making *m) {
    if (m->status == MOE_OK) text_out_of_memory(m->error);
    return making_failed(m, MOE_ERROR_MEMORY);
}

void making_note(making *m, const char *format, ...) {
    char message[512];
    va_list arguments;
    if (!m->note || m->status) return;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    text_clean(message);
    m->note(m->user, message);
}

/* ---- Memory ---- */

void *making_keep(making *m, const void *data, size_t bytes) {
    if (m->status) return NULL;
    making_block *b = bytes < SIZE_MAX - sizeof *b - 1 ? malloc(sizeof *b + bytes + 1) : NULL;
    if (!b) return making_no_memory(m), NULL;
    if (data && bytes) memcpy(b->data, data, bytes);
    b->data[bytes] = 0;
    b->next = m->blocks;
    m->blocks = b;
    return b->data;
}

char *making_join(making *m, const char *folder, const char *name) {
    const size_t length = strlen(folder), bytes = length + 1 + strlen(name);
    char *path = making_keep(m, NULL, bytes);
    const int ends = length && strchr(SYSTEM_SEPARATORS, folder[length - 1]);
    if (path) snprintf(path, bytes + 1, "%s%s%s", folder, ends ? "" : "/", name);
    return path;
}

/* Return the last component of a path without `.` and `..`, as in Python's os.path.abspath. */
static char *last_component(making *m, const char *path) {
    char here[4096];
    text_bytes whole = { 0 };
    size_t skipped = 0;
    if (!system_is_absolute(path) && getcwd(here, sizeof here)) text_append_string(&whole, here);
    text_append_string(&whole, "/");
    text_append_string(&whole, path);
    if (!whole.failed) system_use_slashes(whole.data);
    char *found = NULL;
    for (size_t end = whole.failed ? 0 : whole.length; end && !found && !m->status;) {
        size_t begin = end;
        while (begin && whole.data[begin - 1] != '/') begin--;
        const char *name = whole.data + begin;
        const size_t n = end - begin;
        if (text_is(name, n, "..")) skipped++;
        else if (n && !text_is(name, n, ".") && !(skipped && skipped--)) found = making_keep(m, name, n);
        end = begin ? begin - 1 : 0;
    }
    if (whole.failed) making_no_memory(m);
    text_bytes_free(&whole);
    return found ? found : making_keep(m, "", 0);
}

const char *making_default_name(making *m, const char *path, int is_folder) {
    char *name = last_component(m, path), *dot = name && !is_folder ? strrchr(name, '.') : NULL;
    if (dot && strspn(name, ".") < (size_t)(dot - name)) *dot = 0;
    return name;
}

/* ---- Metadata ---- */

static void put_entry(making *m, const char *key, moe_meta_entry e) {
    if (m->status || !(e.key = making_keep(m, key, strlen(key)))) return;
    making_failed(m, text_add(&m->entries, &m->n_entries, &m->entry_capacity, &e, 1, sizeof e, m->error));
}

void making_put_int(making *m, const char *key, int64_t value) {
    put_entry(m, key, (moe_meta_entry){ .kind = MOE_META_INT, .integer = value });
}

void making_put_real(making *m, const char *key, double value) {
    put_entry(m, key, (moe_meta_entry){ .kind = MOE_META_REAL, .real = value });
}

void making_put_span(making *m, const char *key, moe_meta_kind kind, const void *data, size_t length) {
    put_entry(m, key, (moe_meta_entry){ .kind = kind, .text = { data, length } });
}

void making_put_text(making *m, const char *key, const char *text) {
    making_put_span(m, key, MOE_META_TEXT, text ? text : "", text ? strlen(text) : 0);
}

/* Texts are UTF-8, which lacks the byte 0xff. */
void making_put_texts(making *m, const char *key, const moe_span *all, size_t n, size_t more) {
    size_t bytes = 0, at = 0;
    for (size_t i = 0; i < n; i++) bytes += all[i].length + 1;
    char *data = n + more ? making_keep(m, NULL, bytes + more) : NULL;
    if (!data) return;
    for (size_t i = 0; i < n + more; i++) {
        if (i) data[at++] = (char)0xff;
        if (i < n && all[i].length) memcpy(data + at, all[i].data, all[i].length), at += all[i].length;
    }
    put_entry(m, key, (moe_meta_entry){ .kind = MOE_META_TEXTS, .integer = 0xff, .text = { data, at } });
}

void making_put_ints(making *m, const char *key, const int64_t *all, size_t n) {
    const void *data = making_keep(m, all, n * sizeof *all);
    if (data) making_put_span(m, key, MOE_META_INTS, data, n * sizeof *all);
}

moe_meta_entry *making_find(making *m, const char *key) {
    for (size_t i = 0; i < m->n_entries; i++)
        if (strcmp(m->entries[i].key, key) == 0) return &m->entries[i];
    return NULL;
}

/* ---- Writing ---- */

static uint64_t round_up(uint64_t n, uint64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* Return the size of a matrix in a model file. */
static uint64_t matrix_bytes(moe_type type, uint64_t rows, uint64_t cols) {
    static const uint64_t bytes[] = { [MOE_TYPE_Q8] = 64,      [MOE_TYPE_Q4] = 32 + 2, [MOE_TYPE_Q4M] = 32 + 6,
                                      [MOE_TYPE_Q8B] = 64 + 2, [MOE_TYPE_Q3] = 24 + 2, [MOE_TYPE_Q2] = 16 + 2 };
    if (type == MOE_TYPE_F32) return 4 * rows * cols;
    if (type == MOE_TYPE_F16 || type == MOE_TYPE_BF16) return 2 * rows * cols;
    const uint64_t n = round_up(rows, 16), k = round_up(cols, 64);
    return n * k / 64 * bytes[type] + 8 * n; /* codes and sides of 64 columns; scales and sums of rows */
}

static uint64_t tensor_bytes(const moe_tensor_spec *t, int gated) {
    if (t->n_dims == 1) return 4 * t->dims[0];
    if (t->n_dims == 2) return matrix_bytes(t->type, t->dims[0], t->dims[1]);
    const uint64_t up = matrix_bytes(t->type, (1 + (uint64_t)gated) * t->dims[1], t->dims[2]);
    return t->dims[0] * round_up(round_up(up, 64) + matrix_bytes(t->type, t->dims[2], t->dims[1]), 4096);
}

/* Return the size of the partial file. */
static uint64_t partial_bytes(const making *m) {
    char path[4096];
    struct stat about;
    return m->resume && snprintf(path, sizeof path, "%s.partial", m->out) < (int)sizeof path && stat(path, &about) == 0
               ? (uint64_t)about.st_size
               : 0;
}

/* Check that the folder of the file has room for it. */
static int check_disk(making *m, uint64_t bytes) {
    const char *slash = system_slash(m->out);
    char *folder = slash ? making_keep(m, m->out, (size_t)(slash - m->out) + 1) : making_keep(m, ".", 1);
    struct statvfs disk;
    if (!folder || statvfs(folder, &disk) != 0) return folder != NULL;
    const uint64_t free_bytes = (uint64_t)disk.f_bavail * disk.f_frsize + partial_bytes(m);
    if (bytes <= free_bytes) return 1;
    text_fail(m->error, MOE_ERROR_IO, "", "%.160s needs %llu MB, but only %llu MB are free on the disk", m->out,
              (unsigned long long)(bytes / 1000000), (unsigned long long)(free_bytes / 1000000));
    return making_failed(m, MOE_ERROR_IO);
}

int making_write(making *m, const moe_write_params *params, uint64_t source) {
    moe_error e;
    uint64_t bytes = 0;
    if (m->status) return 0;
    for (size_t i = 0; i < params->n_tensors; i++) bytes += tensor_bytes(&params->tensors[i], params->gated != 0);
    for (size_t i = 0; i < m->n_entries; i++) bytes += m->entries[i].text.length;
    if (!check_disk(m, bytes)) return 0;
    if (m->begin) m->begin(m->user, bytes, source);
    moe_write_params all = *params;
    all.resume = m->resume;
    const moe_status status = moe_model_write(m->out, &all, &e);
    if (m->status || !status) return m->status == MOE_OK;
    if (m->error) *m->error = e;
    return making_failed(m, status);
}
