/* store.c - see store.h. */
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE

#include "tools/get/store.h"
#include "tools/text/bytes.h"
#include "tools/text/json.h"
#include "tools/text/places.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

static const char record_name[] = "moe-get.json", lock_name[] = ".lock", plan_name[] = ".plan";
enum { RECORD_BYTES = 1 << 20, MOST_MODELS = 4096 };

/* ---- 1. Folders ---------------------------------------------------------------------------------------- */

static moe_status path_too_long(moe_error *error) {
    return text_fail(error, MOE_ERROR_IO, "store", "the path of the folder for models is too long");
}

moe_status store_data(char out[STORE_PATH], moe_error *error) {
    return text_place_of_models(0, out, STORE_PATH, error);
}

moe_status store_cache(char out[STORE_PATH], moe_error *error) {
    return text_place_of_models(1, out, STORE_PATH, error);
}

static moe_status append_path(char path[STORE_PATH], const char *name, const char *end, moe_error *error) {
    const size_t n = strlen(path);
    return (size_t)snprintf(path + n, STORE_PATH - n, "/%s%s", name, end) >= STORE_PATH - n ? path_too_long(error)
                                                                                            : MOE_OK;
}

moe_status store_folder(const char *id, char out[STORE_PATH], moe_error *error) {
    const moe_status status = store_data(out, error);
    return status ? status : append_path(out, id, "", error);
}

moe_status store_converted(const char *id, char out[STORE_PATH], moe_error *error) {
    const moe_status status = store_cache(out, error);
    return status ? status : append_path(out, id, ".bin", error);
}

moe_status store_make_folder(const char *path, moe_error *error) {
    char part[STORE_PATH];
    struct stat there;
    if ((size_t)snprintf(part, sizeof part, "%s", path) >= sizeof part) return path_too_long(error);
    for (char *at = part; *at;) {
        at += strspn(at, "/");
        at += strcspn(at, "/");
        const char next = *at;
        *at = 0;
        const int reason = mkdir(part, 0777) == 0 ? 0 : errno;
        if (reason && (stat(part, &there) != 0 || !S_ISDIR(there.st_mode)))
            return text_fail(error, MOE_ERROR_IO, "store",
                             "cannot create the folder %.140s: %s; XDG_DATA_HOME and XDG_CACHE_HOME name others", part,
                             strerror(reason));
        *at = next;
    }
    return MOE_OK;
}

moe_status store_make_parent(const char *path, moe_error *error) {
    char part[STORE_PATH];
    if ((size_t)snprintf(part, sizeof part, "%s", path) >= sizeof part) return path_too_long(error);
    char *slash = strrchr(part, '/');
    if (!slash) return MOE_OK;
    *slash = 0;
    return store_make_folder(part, error);
}

/* ---- 2. Files of a model ------------------------------------------------------------------------------------------
 */

static uint64_t file_size(const char *folder, const char *name) {
    char path[STORE_PATH + SOURCE_NAME];
    struct stat there;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return lstat(path, &there) == 0 && S_ISREG(there.st_mode) ? (uint64_t)there.st_size : SOURCE_UNKNOWN;
}

static moe_status cannot_remove(const char *path, moe_error *error) {
    return text_fail(error, MOE_ERROR_IO, "store", "cannot remove %.190s: %s", path, strerror(errno));
}

/* Remove the conversion of a model, if it exists. */
static moe_status remove_converted(const char *id, moe_error *error) {
    char path[STORE_PATH], partial[STORE_PATH + 16];
    const moe_status status = store_converted(id, path, error);
    if (status) return status;
    snprintf(partial, sizeof partial, "%s.partial", path);
    unlink(partial); /* of an interrupted conversion */
    if (unlink(path) != 0 && errno != ENOENT && errno != ENOTDIR) return cannot_remove(path, error);
    *strrchr(path, '/') = 0;
    rmdir(path); /* the owner's folder, if it is empty */
    return MOE_OK;
}

/* Read a record or a plan, or return NULL. */
static cJSON *read_record(const char *folder, const char *name) {
    char path[STORE_PATH + SOURCE_NAME];
    struct stat there;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* does not wait for the writer of a pipe */
    char *data = fd >= 0 && fstat(fd, &there) == 0 && S_ISREG(there.st_mode) ? malloc(RECORD_BYTES) : NULL;
    ssize_t n = 0;
    size_t length = 0;
    while (data && length < RECORD_BYTES && (n = read(fd, data + length, RECORD_BYTES - length)) > 0)
        length += (size_t)n;
    cJSON *record = length && length < RECORD_BYTES ? source_json(data, length) : NULL;
    free(data);
    if (fd >= 0) close(fd);
    return record;
}

static const char *word_of(const cJSON *object, const char *key) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsString(value) ? value->valuestring : "";
}

/* Return 1 if a record or a plan names a file, or the file of which this is a part or the unpacked content. */
static int is_named(const cJSON *record, const char *name) {
    size_t n = strlen(name);
    const cJSON *file;
    n -= text_ends_with(name, n, ".partial") ? 8 : text_ends_with(name, n, ".etag") ? 5 : 0;
    cJSON_ArrayForEach(file, cJSON_GetObjectItemCaseSensitive(record, "files")) {
        const char *named = word_of(file, "name");
        if (strncmp(named, name, n) == 0 && (!named[n] || strcmp(named + n, ".gz") == 0)) return 1;
    }
    return 0;
}

/* Remove the files of a model, except those that `kept` names, which may be NULL. */
static moe_status remove_files(const char *folder, const cJSON *kept, moe_error *error) {
    static const char *const own[] = { record_name, "moe-get.json.partial", ".plan.partial", plan_name };
    char path[STORE_PATH + SOURCE_NAME];
    moe_status status = MOE_OK;
    cJSON *record = read_record(folder, record_name), *plan = read_record(folder, plan_name);
    snprintf(path, sizeof path, "%s/%s", folder, record_name);
    if (unlink(path) != 0 && errno != ENOENT) status = cannot_remove(path, error); /* now it is incomplete */
    DIR *list = status ? NULL : opendir(folder);
    for (struct dirent *entry; !status && list && (entry = readdir(list));) {
        if (!(is_named(record, entry->d_name) || is_named(plan, entry->d_name)) || is_named(kept, entry->d_name) ||
            file_size(folder, entry->d_name) == SOURCE_UNKNOWN)
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (unlink(path) != 0) status = cannot_remove(path, error);
    }
    if (list) closedir(list);
    for (size_t i = 0; i < sizeof own / sizeof *own && !status && !kept; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, own[i]);
        unlink(path);
    }
    cJSON_Delete(record), cJSON_Delete(plan);
    return status;
}

/* Remove the plan if the record replaces it, or if the folder has none of its files. */
static void drop_plan(const char *folder) {
    char path[STORE_PATH + SOURCE_NAME];
    cJSON *plan = read_record(folder, plan_name);
    int used = 0;
    DIR *list = plan ? opendir(folder) : NULL;
    for (struct dirent *entry; list && (entry = readdir(list));) used |= is_named(plan, entry->d_name);
    if (list) closedir(list);
    snprintf(path, sizeof path, "%s/%s", folder, plan_name);
    if (!used || file_size(folder, record_name) != SOURCE_UNKNOWN) unlink(path);
    cJSON_Delete(plan);
}

/* ---- 3. Locks ------------------------------------------------------------------------------------------ */

/* Return 1 if `fd` is still the file at `path`, which its last user may have removed. */
static int is_same_file(int fd, const char *path) {
    struct stat a, b;
    return fstat(fd, &a) == 0 && lstat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

moe_status store_lock(const char *folder, const volatile sig_atomic_t *stop, void (*waiting)(long process), int *lock,
                      moe_error *error) {
    char path[STORE_PATH];
    const struct timespec pause = { 0, 200000000 };
    if (snprintf(path, sizeof path, "%s/%s", folder, lock_name) >= (int)sizeof path) return path_too_long(error);
    for (;;) {
        struct flock whole = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
        moe_status status = store_make_folder(folder, error); /* rm may have removed it */
        if (status) return status;
        *lock = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (*lock < 0 && errno == ENOENT) continue;
        if (*lock < 0)
            return text_fail(error, MOE_ERROR_IO, "store",
                             "cannot write in %.150s: %s; set XDG_DATA_HOME to another folder", folder,
                             strerror(errno));
        const int locked = fcntl(*lock, F_SETLK, &whole) == 0;
        if (locked && is_same_file(*lock, path)) return MOE_OK;
        if (!locked && errno != EACCES && errno != EAGAIN && errno != EINTR) {
            status = text_fail(error, MOE_ERROR_IO, "store", "cannot lock %.150s: %s", path, strerror(errno));
            return close(*lock), status;
        }
        if (!locked && waiting && fcntl(*lock, F_GETLK, &whole) == 0 && whole.l_type != F_UNLCK)
            waiting((long)whole.l_pid), waiting = NULL;
        close(*lock);
        if (stop && *stop) return text_fail(error, MOE_ERROR_CANCELLED, "store", "stopped while waiting");
        if (!locked) nanosleep(&pause, NULL);
    }
}

void store_unlock(const char *folder, int lock) {
    char path[STORE_PATH];
    drop_plan(folder);
    if (snprintf(path, sizeof path, "%s/%s", folder, lock_name) < (int)sizeof path) unlink(path);
    close(lock);
    snprintf(path, sizeof path, "%s", folder);
    if (rmdir(path) == 0) *strrchr(path, '/') = 0, rmdir(path); /* if they are empty */
}

/* ---- 4. Records ---------------------------------------------------------------------------------------- */

/* Write a small file completely or not at all. */
static moe_status save(const char *folder, const char *name, const char *data, size_t length, moe_error *error) {
    char path[STORE_PATH + SOURCE_NAME], partial[STORE_PATH + SOURCE_NAME];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(partial, sizeof partial, "%s/%s.partial", folder, name);
    const int fd = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0666);
    int done = fd >= 0;
    while (done && length) {
        const ssize_t n = write(fd, data, length);
        if (n > 0) data += n, length -= (size_t)n;
        else done = n < 0 && errno == EINTR;
    }
    done = done && (fsync(fd) == 0 || errno == EINVAL || errno == ENOTSUP) && rename(partial, path) == 0;
    const int reason = errno;
    if (fd >= 0) close(fd);
    return done ? MOE_OK : text_fail(error, MOE_ERROR_IO, "store", "cannot write %.170s: %s", path, strerror(reason));
}

moe_status store_plan(const char *folder, const source_model *m, moe_error *error) {
    text_bytes out = { 0 };
    json j = { .out = &out };
    json_open(&j, NULL, '{');
    json_open(&j, "files", '[');
    for (size_t i = 0; i < m->n; i++) {
        json_open(&j, NULL, '{');
        json_text(&j, "name", m->files[i].name);
        json_close(&j, '}');
    }
    json_close(&j, ']');
    json_close(&j, '}');
    cJSON *plan = out.failed ? NULL : cJSON_ParseWithLength(out.data, out.length);
    moe_status status = plan ? remove_files(folder, plan, error) : text_out_of_memory(error);
    if (!status) status = save(folder, plan_name, out.data, out.length, error);
    cJSON_Delete(plan);
    text_bytes_free(&out);
    return status;
}

moe_status store_record(const char *folder, const source_model *m, const char *origin, char (*names)[SOURCE_NAME],
                        char (*hashes)[SHA256_TEXT], moe_error *error) {
    text_bytes out = { 0 };
    json j = { .out = &out, .pretty = 1 };
    json_open(&j, NULL, '{');
    json_text(&j, "model", m->name.id);
    json_clean(&j, "source", origin, strlen(origin));
    json_text(&j, "version", m->version);
    json_text(&j, "licence", m->licence);
    json_text(&j, "variant", m->variant);
    if (m->comet >= 0) json_digits(&j, "comet", m->comet, 6);
    if (m->bleu >= 0) json_digits(&j, "bleu", m->bleu, 6);
    json_open(&j, "files", '[');
    for (size_t i = 0; i < m->n; i++) {
        json_open(&j, NULL, '{');
        json_text(&j, "name", names[i]);
        json_whole(&j, "bytes", (int64_t)file_size(folder, names[i]));
        json_text(&j, "sha256", hashes[i]);
        json_close(&j, '}');
    }
    json_close(&j, ']');
    json_close(&j, '}');
    text_append(&out, "\n", 1);
    moe_status status = out.failed ? text_out_of_memory(error) : remove_converted(m->name.id, error);
    if (!status) status = save(folder, record_name, out.data, out.length, error);
    text_bytes_free(&out);
    return status;
}

static double metric_of(const cJSON *object, const char *key) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNumber(value) ? value->valuedouble : -1;
}

/* Return the bytes of all files in a folder. */
static uint64_t folder_bytes(const char *folder) {
    uint64_t sum = 0;
    DIR *list = opendir(folder);
    for (struct dirent *entry; list && (entry = readdir(list));) {
        const uint64_t bytes = file_size(folder, entry->d_name);
        if (bytes != SOURCE_UNKNOWN) sum += bytes;
    }
    if (list) closedir(list);
    return sum;
}

void store_read(const char *folder, const char *id, store_model *out) {
    cJSON *record = read_record(folder, record_name);
    const cJSON *files = cJSON_GetObjectItemCaseSensitive(record, "files"), *file;
    memset(out, 0, sizeof *out);
    snprintf(out->id, sizeof out->id, "%s", id);
    snprintf(out->licence, sizeof out->licence, "%s", record ? word_of(record, "licence") : "");
    snprintf(out->variant, sizeof out->variant, "%s", record ? word_of(record, "variant") : "");
    out->comet = record ? metric_of(record, "comet") : -1, out->bleu = record ? metric_of(record, "bleu") : -1;
    out->bytes = folder_bytes(folder);
    out->complete = cJSON_IsArray(files) && cJSON_GetArraySize(files) > 0;
    cJSON_ArrayForEach(file, files) {
        const char *name = word_of(file, "name");
        const cJSON *bytes = cJSON_GetObjectItemCaseSensitive(file, "bytes");
        out->complete &= source_safe_name(name) && cJSON_IsNumber(bytes) && bytes->valuedouble >= 0 &&
                         file_size(folder, name) == (uint64_t)bytes->valuedouble;
    }
    cJSON_Delete(record);
}

/* ---- 5. Lists ------------------------------------------------------------------------------------------ */

static int is_folder(const char *path) {
    struct stat there;
    return stat(path, &there) == 0 && S_ISDIR(there.st_mode);
}

static int by_id(const void *a, const void *b) {
    return strcmp(((const store_model *)a)->id, ((const store_model *)b)->id);
}

typedef struct listing {
    store_model *models;
    size_t n, capacity;
} listing;

/* Add the models of an owner. */
static moe_status list_owner(const char *data, const char *owner, listing *all, moe_error *error) {
    char folder[STORE_PATH + SOURCE_NAME + 2], path[STORE_PATH + 2 * SOURCE_NAME + 4], id[2 * SOURCE_NAME];
    moe_status status = MOE_OK;
    store_model model;
    snprintf(folder, sizeof folder, "%s/%s", data, owner);
    DIR *list = opendir(folder);
    for (struct dirent *entry; !status && list && (entry = readdir(list));) {
        if (!source_safe_name(entry->d_name)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (snprintf(id, sizeof id, "%s/%s", owner, entry->d_name) >= SOURCE_NAME || !is_folder(path) ||
            all->n == MOST_MODELS || strlen(path) >= STORE_PATH)
            continue;
        store_read(path, id, &model);
        status = text_add(&all->models, &all->n, &all->capacity, &model, 1, sizeof model, error);
    }
    if (list) closedir(list);
    return status;
}

moe_status store_list(store_model **out, size_t *n, moe_error *error) {
    char data[STORE_PATH];
    listing all = { 0 };
    moe_status status = store_data(data, error);
    DIR *list = status ? NULL : opendir(data);
    if (!status && !list && errno != ENOENT)
        status = text_fail(error, MOE_ERROR_IO, "store", "cannot read %.160s: %s; XDG_DATA_HOME names another folder",
                           data, strerror(errno));
    for (struct dirent *entry; !status && list && (entry = readdir(list));)
        if (source_safe_name(entry->d_name)) status = list_owner(data, entry->d_name, &all, error);
    if (list) closedir(list);
    if (all.n) qsort(all.models, all.n, sizeof *all.models, by_id);
    if (status) free(all.models), all.models = NULL, all.n = 0;
    *out = all.models, *n = all.n;
    return status;
}

/* ---- 6. Removal and room ------------------------------------------------------------------------------- */

moe_status store_remove(const char *id, const volatile sig_atomic_t *stop, void (*waiting)(long process), int *left,
                        moe_error *error) {
    char folder[STORE_PATH] = "";
    int lock = -1;
    moe_status status = store_folder(id, folder, error);
    if (status || (status = store_lock(folder, stop, waiting, &lock, error))) return status;
    status = remove_files(folder, NULL, error);
    if (!status) status = remove_converted(id, error);
    store_unlock(folder, lock);
    *left = is_folder(folder);
    return status;
}

moe_status store_check_room(const char *folder, uint64_t bytes, moe_error *error) {
    struct statvfs disk;
    const uint64_t there = folder_bytes(folder);
    if (statvfs(folder, &disk) != 0) return MOE_OK;
    const double room = (double)disk.f_bavail * (double)disk.f_frsize;
    if (bytes <= there || room >= (double)(bytes - there)) return MOE_OK;
    return text_fail(error, MOE_ERROR_IO, "store",
                     "%.120s needs %.1f MB, but its disk has %.1f MB left; free some, or set XDG_DATA_HOME", folder,
                     (double)(bytes - there) * 1e-6, room * 1e-6);
}
