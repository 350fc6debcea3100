/* convert.c - see convert.h */
#define _POSIX_C_SOURCE 200809L

#include "tools/convert/convert.h"
#include "tools/convert/gguf.h"
#include "tools/convert/hub.h"
#include "tools/convert/marian.h"
#include "tools/convert/packed.h"

#include <fnmatch.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

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

static convert_layout guess_folder(const char *path) {
    packed_names names = { 0 };
    size_t best = FOLDER_ROWS;
    if (packed_list(path, &names, NULL)) return CONVERT_NONE;
    for (size_t i = 0; i < names.n; i++)
        for (size_t row = 0; row < best; row++)
            if (fnmatch(folder_rows[row].pattern, names.data[i], 0) == 0) best = row;
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
    FILE *file = S_ISREG(about.st_mode) ? fopen(path, "rb") : NULL;
    if (!file) return CONVERT_NONE;
    const size_t n = fread(begin, 1, sizeof begin, file);
    fclose(file);
    if (n >= 4 && memcmp(begin, "GGUF", 4) == 0) return CONVERT_GGUF;
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
        if (fnmatch("*.gguf", name, 0) != 0) continue;
        if (fnmatch("*-[0-9][0-9][0-9][0-9][0-9]-of-*.gguf", name, 0) == 0 && !strstr(name, "-00001-of-")) continue;
        if (found) making_refuse(m, packed_base(folder), "contains several GGUF files: name one");
        found = making_join(m, folder, name);
    }
    if (!found && m->status == MOE_OK) making_refuse(m, packed_base(folder), "contains no first part of a GGUF file");
    packed_names_free(&names);
    return found;
}

static moe_status convert_marian(const convert_options *o, const char *out, moe_error *error) {
    const moe_type type = o->type == MOE_TYPE_KEEP ? MOE_TYPE_Q8 : o->type;
    const marian_files files = { .path = o->path,
                                 .name = o->name,
                                 .description = o->description,
                                 .attribution = o->attribution,
                                 .licence = o->licence,
                                 .type = type,
                                 .note = o->note,
                                 .begin = o->begin,
                                 .user = o->user };
    return marian_convert(&files, out, error);
}

moe_status convert_model(const convert_options *options, const char *out, moe_error *error) {
    making m = { .out = out, .error = error, .note = options->note, .begin = options->begin, .user = options->user };
    convert_options o = *options;
    struct stat about;
    const int is_folder = stat(o.path, &about) == 0 && S_ISDIR(about.st_mode);
    const convert_layout layout = convert_guess(o.path);
    if (layout == CONVERT_MARIAN) return convert_marian(&o, out, error);
    if (layout == CONVERT_GGUF && is_folder) o.path = gguf_in(&m, o.path);
    const int good = !o.path                  ? 0
                     : layout == CONVERT_GGUF ? gguf_convert(&m, &o)
                     : layout == CONVERT_HUB  ? hub_convert(&m, &o)
                                              : making_refuse(&m, packed_base(o.path), "not a published model");
    if (!good && m.status == MOE_OK) making_no_memory(&m);
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
