/* convert.c - see convert.h */
#define _GNU_SOURCE      /* flock, st_mtim on Linux */
#define _DARWIN_C_SOURCE /* the same on macOS */

#include "tools/convert/convert.h"
#include "tools/convert/archive.h"
#include "tools/convert/ct2.h"
#include "tools/convert/gguf.h"
#include "tools/convert/hub.h"
#include "tools/convert/marian.h"
#include "tools/convert/packed.h"
#include "tools/get/sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __APPLE__
#define st_mtim st_mtimespec
#endif

enum { PATH_BYTES = 4096, SMALL = 1 << 20 };

/* Names of files in a folder, in order of precedence; MARIAN in layouts.py. */
static const struct {
    const char *pattern;
    convert_layout layout;
} folder_rows[] = { { "config.json", CONVERT_HUB },       { "*.gguf", CONVERT_GGUF },
                    { "*.npz", CONVERT_MARIAN },          { "*.npz.gz", CONVERT_MARIAN },
                    { "*.intgemm*.bin", CONVERT_MARIAN }, { "*.intgemm*.bin.gz", CONVERT_MARIAN },
                    { "*vocab*.spm", CONVERT_MARIAN },    { "*vocab*.spm.gz", CONVERT_MARIAN },
                    { "*vocab*.yml", CONVERT_MARIAN },    { "decoder.yml", CONVERT_MARIAN },
                    { "lex.*", CONVERT_MARIAN } };
enum { FOLDER_ROWS = sizeof folder_rows / sizeof *folder_rows };

static size_t row_of(const char *name) {
    size_t row = 0;
    while (row < FOLDER_ROWS && fnmatch(folder_rows[row].pattern, name, 0) != 0) row++;
    return row;
}

/* Return 1 for a folder with a model of CTranslate2, or with one in `model` and metadata.json, as Argos's packages;
 * also if only the names of the vocabularies tell, so that the message is about model.bin. */
static int is_ct2(const char *folder) {
    static const char *const names[] = { "shared_vocabulary.json", "shared_vocabulary.txt", "source_vocabulary.json",
                                         "source_vocabulary.txt" };
    char path[PATH_BYTES];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (snprintf(path, sizeof path, "%s/%s", folder, names[i]) < (int)sizeof path && packed_exists(path)) return 1;
    if (snprintf(path, sizeof path, "%s/model.bin", folder) >= (int)sizeof path) return 0;
    if (ct2_is_model(path)) return 1;
    if (snprintf(path, sizeof path, "%s/metadata.json", folder) >= (int)sizeof path || !packed_exists(path)) return 0;
    return snprintf(path, sizeof path, "%s/model/model.bin", folder) < (int)sizeof path && ct2_is_model(path);
}

static convert_layout guess_folder(const char *path) {
    packed_names names = { 0 };
    size_t best = FOLDER_ROWS;
    if (is_ct2(path)) return CONVERT_CT2;
    if (packed_list(path, &names, NULL)) return CONVERT_NONE;
    for (size_t i = 0; i < names.n; i++) best = row_of(names.data[i]) < best ? row_of(names.data[i]) : best;
    packed_names_free(&names);
    return best < FOLDER_ROWS ? folder_rows[best].layout : CONVERT_NONE;
}

convert_layout convert_guess(const char *path) {
    static const char marian[] = "\1\0\0\0\0\0\0";
    const char *name = packed_base(path);
    struct stat about;
    char begin[8] = { 0 };
    if (stat(path, &about) != 0) return CONVERT_NONE;
    if (S_ISDIR(about.st_mode)) return guess_folder(path);
    const size_t n = packed_begin(path, begin, sizeof begin);
    if (!n) return CONVERT_NONE;
    if (n >= 4 && memcmp(begin, "GGUF", 4) == 0) return CONVERT_GGUF;
    if (fnmatch("*.argosmodel", name, 0) == 0 && archive_is_zip(path)) return CONVERT_CT2;
    if (strcmp(name, "model.bin") == 0 && ct2_is_model(path)) return CONVERT_CT2;
    if (fnmatch("*.npz", name, 0) == 0 || fnmatch("*.npz.gz", name, 0) == 0 || fnmatch("*.bin.gz", name, 0) == 0 ||
        (n == sizeof begin && memcmp(begin, marian, sizeof marian) == 0))
        return CONVERT_MARIAN;
    return CONVERT_NONE;
}

/* Return the only GGUF model of a folder, which may be split: its first part. */
static const char *gguf_in(making *m, const char *folder) {
    packed_names names = { 0 };
    const char *found = NULL;
    making_failed(m, packed_list(folder, &names, m->error));
    for (size_t i = 0; i < names.n && m->status == MOE_OK; i++) {
        const char *name = names.data[i];
        if (fnmatch("*.gguf", name, 0) != 0 || strstr(name, "mmproj")) continue; /* an encoder of pictures */
        if (fnmatch("*-[0-9][0-9][0-9][0-9][0-9]-of-*.gguf", name, 0) == 0 && !strstr(name, "-00001-of-")) continue;
        if (found) making_refuse(m, packed_base(folder), "contains several GGUF files: name one");
        found = making_join(m, folder, name);
    }
    if (!found && m->status == MOE_OK)
        making_refuse(m, packed_base(folder), "contains no GGUF file of a model, or not its first part");
    packed_names_free(&names);
    return found;
}

int convert_explain(const char *folder, char *out, size_t size) {
    packed_names names = { 0 };
    int found = 0;
    if (packed_list(folder, &names, NULL)) return 0;
    for (size_t i = 0; i < names.n; i++)
        found |= packed_matches("*.safetensors *.safetensors.index.json pytorch_model* tokenizer* *config.json",
                                names.data[i]);
    if (found) snprintf(out, size, "config.json is missing: copy the model's whole folder");
    for (size_t i = 0; i < names.n && !found; i++)
        if ((found = packed_matches(packed_unfinished, names.data[i])))
            snprintf(out, size, "%.80s is an unfinished download", names.data[i]);
    packed_names_free(&names);
    return found;
}

/* ---- Identity of a source ---- */

/* Files of a folder that a conversion may read. */
static const char *const patterns[] = { "*.json",   "*.jinja",  "*.safetensors",   "*.tiktoken", "*.model",
                                        "*.gguf",   "*.bin",    "*.bin.gz",        "*.npz*",     "*.spm",
                                        "*.spm.gz", "*.yml",    "*.yml.gz",        "*.yaml",     "lex.*",
                                        "LICENSE*", "LICENCE*", "*vocabulary.txt", "README.md" };

static int is_source(const char *name) {
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (fnmatch(patterns[i], name, FNM_PERIOD) == 0) return 1;
    return 0;
}

/* Add a file to the hash of a source. */
static moe_status add_file(sha256 *s, const char *folder, const char *name, moe_error *error) {
    char path[PATH_BYTES], line[PATH_BYTES], digest[SHA256_TEXT] = "";
    struct stat about;
    if (snprintf(path, sizeof path, "%s%s%s", folder, *folder ? "/" : "", name) >= (int)sizeof path) return MOE_OK;
    if (stat(path, &about) != 0 || !S_ISREG(about.st_mode)) return MOE_OK;
    if (about.st_size <= SMALL) {
        const moe_status status = packed_digest(path, digest, error);
        if (status) return status;
    }
    const int n = snprintf(line, sizeof line, "%s\n%lld %lld.%09ld %llu %s\n", name, (long long)about.st_size,
                           (long long)about.st_mtim.tv_sec, (long)about.st_mtim.tv_nsec,
                           (unsigned long long)about.st_ino, digest);
    sha256_add(s, line, n < (int)sizeof line ? (size_t)n : sizeof line - 1);
    return MOE_OK;
}

/* Add the files of a folder that a conversion may read. */
static moe_status add_folder(sha256 *s, const char *folder, moe_error *error) {
    packed_names names = { 0 };
    moe_status status = packed_list(folder, &names, error);
    for (size_t i = 0; i < names.n && !status; i++)
        if (is_source(names.data[i])) status = add_file(s, folder, names.data[i], error);
    packed_names_free(&names);
    return status;
}

/* The files: those of a folder, those next to a Marian model or a part of a split file, or the file. */
moe_status convert_identify(const char *path, char hex[SHA256_TEXT], moe_error *error) {
    const char *name = packed_base(path);
    struct stat about;
    char folder[PATH_BYTES];
    sha256 s;
    sha256_begin(&s);
    sha256_add(&s, MOE_VERSION, sizeof MOE_VERSION);
    const int is_folder = stat(path, &about) == 0 && S_ISDIR(about.st_mode);
    const convert_layout layout = convert_guess(path);
    const int alone = !is_folder && ((layout == CONVERT_GGUF && fnmatch("*-of-?????.gguf", name, 0) != 0) ||
                                     (layout == CONVERT_CT2 && strcmp(name, "model.bin") != 0));
    const int length = is_folder ? (int)strlen(path) : (int)(name - path);
    if (snprintf(folder, sizeof folder, "%.*s", length, path) >= (int)sizeof folder)
        return text_fail(error, MOE_ERROR_IO, "", "the path %.160s... is too long", path);
    moe_status status = alone ? add_file(&s, "", path, error) : add_folder(&s, *folder ? folder : ".", error);
    if (!status && is_folder && layout == CONVERT_CT2 && /* a package of Argos */
        snprintf(folder, sizeof folder, "%s/model", path) < (int)sizeof folder && stat(folder, &about) == 0 &&
        S_ISDIR(about.st_mode))
        status = add_folder(&s, folder, error);
    sha256_end(&s, hex);
    return status;
}

/* ---- Conversion ---- */

static int convert_into(making *m, const convert_options *options) {
    convert_options o = *options;
    struct stat about;
    const char *name = packed_base(o.path);
    if (stat(o.path, &about) != 0)
        return making_failed(m, text_fail(m->error, MOE_ERROR_IO, name, "cannot open %.160s: %s", o.path,
                                          strerror(errno)));
    const size_t row = S_ISDIR(about.st_mode) ? FOLDER_ROWS : row_of(name);
    convert_layout layout = convert_guess(o.path);
    if (!layout && row < FOLDER_ROWS && folder_rows[row].layout == CONVERT_MARIAN) layout = CONVERT_MARIAN;
    if (layout == CONVERT_GGUF && S_ISDIR(about.st_mode)) o.path = gguf_in(m, o.path);
    if (layout == CONVERT_CT2 && strcmp(name, "model.bin") == 0)
        o.path = name > o.path ? making_keep(m, o.path, (size_t)(name - o.path)) : ".";
    if (!o.path) return 0;
    if (!layout && S_ISDIR(about.st_mode)) {
        char why[160];
        return making_refuse(
            m, name, "%s",
            convert_explain(o.path, why, sizeof why)
                ? why
                : "contains no published model: expected config.json, a GGUF file, or files of Marian or CTranslate2");
    }
    if (!layout) {
        char begin[64] = { 0 };
        const char *what = packed_begin(o.path, begin, sizeof begin - 1) ? packed_impostor(begin) : NULL;
        return making_refuse(m, name, "%s",
                             what                              ? what
                             : fnmatch("*.gguf", name, 0) == 0 ? "not a GGUF file, or damaged"
                                                               : "not a published model");
    }
    return layout == CONVERT_MARIAN ? marian_convert(m, &o)
           : layout == CONVERT_GGUF ? gguf_convert(m, &o)
           : layout == CONVERT_HUB  ? hub_convert(m, &o)
                                    : ct2_convert(m, &o);
}

/* Return 1 if `fd` is the file at `path`, which another process may have renamed or removed. */
static int is_there(int fd, const char *path) {
    struct stat a, b;
    return fstat(fd, &a) == 0 && lstat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Open and lock the partial file, after any other process that writes it. Returns its descriptor; -1 after an error. */
static int lock_partial(making *m, const char *partial) {
    const struct timespec pause = { 0, 100000000 };
    moe_status status = MOE_OK;
    for (int waited = 0; !status;) {
        const int fd = open(partial, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
        const int locked = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0;
        if (locked && is_there(fd, partial)) return fd;
        if (fd < 0 || (!locked && errno != EWOULDBLOCK))
            status = text_fail(m->error, MOE_ERROR_IO, "", "cannot %s %.160s: %s", fd < 0 ? "write" : "lock", partial,
                               strerror(errno));
        if (fd >= 0) close(fd);
        if (locked || status) continue;
        if (!waited++) making_note(m, "waiting for another process, which writes %.300s", m->out);
        if (nanosleep(&pause, NULL) != 0) /* a signal */
            status = text_fail(m->error, MOE_ERROR_CANCELLED, "", "interrupted while waiting for %.160s", m->out);
    }
    making_failed(m, status);
    return -1;
}

static int convert_resumed(making *m, const convert_options *options) {
    char partial[PATH_BYTES], *identity = making_keep(m, NULL, SHA256_TEXT);
    if (snprintf(partial, sizeof partial, "%s.partial", m->out) >= (int)sizeof partial)
        return making_failed(m, text_fail(m->error, MOE_ERROR_IO, "", "the path %.160s... is too long", m->out));
    if (!identity || !making_failed(m, convert_identify(options->path, identity, m->error))) return 0;
    const int fd = lock_partial(m, partial);
    if (fd < 0) return 0;
    m->resume = identity;
    const int good = access(m->out, F_OK) == 0 || convert_into(m, options);
    if (m->status != MOE_ERROR_CANCELLED && is_there(fd, partial)) unlink(partial);
    close(fd);
    return good;
}

/* Append what fits in a message. */
static void say_more(moe_error *error, const char *more, const char *name) {
    const size_t said = strlen(error->message), room = sizeof error->message - said;
    if (snprintf(error->message + said, room, more, name) >= (int)room) error->message[said] = 0;
}

/* Add advice to the message about a damaged file, or a folder with an unfinished download. */
static void advise(const char *path, moe_error *error) {
    packed_names names = { 0 };
    const size_t said = strlen(error->message);
    if (text_ends_with(error->message, said, "damaged") || text_ends_with(error->message, said, "truncated"))
        say_more(error, "; download it again", "");
    if (packed_matches(packed_unfinished, path)) say_more(error, "; an unfinished download", "");
    if (packed_list(path, &names, NULL)) return;
    for (size_t i = 0; i < names.n; i++)
        if (packed_matches(packed_unfinished, names.data[i]) && !strstr(error->message, "unfinished"))
            say_more(error, "; %.80s is an unfinished download", names.data[i]);
    packed_names_free(&names);
}

moe_status convert_model(const convert_options *options, const char *out, moe_error *error) {
    making m = { .out = out, .error = error, .note = options->note, .begin = options->begin, .user = options->user };
    const int good = options->resume ? convert_resumed(&m, options) : convert_into(&m, options);
    if (!good && m.status == MOE_OK) making_no_memory(&m);
    if (error && (m.status == MOE_ERROR_FORMAT || m.status == MOE_ERROR_IO)) advise(options->path, error);
    making_free(&m);
    return m.status;
}

moe_status convert_check(const char *folder, moe_error *error) {
    const convert_options options = { .path = folder, .type = MOE_TYPE_KEEP, .experts = MOE_TYPE_KEEP };
    making m = { .out = folder, .error = error };
    if (!hub_check(&m, &options) && m.status == MOE_OK) making_no_memory(&m);
    making_free(&m);
    return m.status;
}
