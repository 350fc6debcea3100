/* archive.h - the files of a folder, or of a folder in a zip archive. */
#ifndef CONVERT_ARCHIVE_H
#define CONVERT_ARCHIVE_H

#include "tools/convert/making.h"
#include "tools/convert/packed.h"

typedef struct archive_entry {
    const char *name; /* with its folders */
    const uint8_t *data;
    uint64_t bytes, size; /* stored and unpacked */
    uint32_t sum;
    int deflated;
} archive_entry;

typedef struct archive {
    const char *path, *folder; /* folder: names start after it, such as "translate-en_es/"; empty for a folder */
    packed_file file;          /* not open for a folder */
    archive_entry *entries;
    size_t n, capacity;
} archive;

int archive_is_zip(const char *path); /* 1 if a file starts as zip archives do */
/* Open a folder or an archive. In an archive, names are relative to the folder with a file `root`, the archive's top or
 * the only folder there. All entries are checked. */
int archive_open(making *m, const char *path, const char *root, archive *a);
void archive_close(archive *a);
/* Return the path of the file in `folder` ("" or "model/") whose name is the `which`-th, from 0, of those that match
 * one of the patterns, which are separated by spaces; NULL if there are fewer, or after an error. */
const char *archive_match(making *m, const archive *a, const char *folder, const char *patterns, size_t which);
int archive_has(making *m, const archive *a, const char *name);
/* Open a file of at most `most` bytes; `what` is the name of this limit. Packed files are unpacked as in packed_open,
 * and their checksums verified. */
int archive_read(making *m, const archive *a, const char *name, uint64_t most, const char *what, packed_file *file);

#endif
