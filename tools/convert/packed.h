/* packed.h - the files of a checkpoint, which are untrusted and may be compressed by gzip. */
#ifndef CONVERT_PACKED_H
#define CONVERT_PACKED_H

#include "tools/text/bytes.h"

/* A mapped file. If another program truncates it, reading ends the process (SIGBUS). */
typedef struct packed_file {
    const uint8_t *data; /* NULL if the file is empty or not open */
    size_t size;
} packed_file;

/* Map a regular file of at most `most` bytes. A compressed file is unpacked to an unnamed file in the folder of
 * `beside`, to at most `most` bytes and 16 times its size. `what`: the limit's name in messages. Errors: MOE_ERROR_IO,
 * MOE_ERROR_FORMAT, MOE_ERROR_UNSUPPORTED (zstd), MOE_ERROR_MEMORY. */
moe_status packed_open(const char *path, uint64_t most, const char *what, const char *beside, packed_file *file,
                       moe_error *error);
void packed_close(packed_file *file);

/* Copy `bytes` bytes, or unpack them if they are raw deflate, to an unnamed file in the folder of `beside`, whose size
 * must become `size`. `name`: for messages. */
moe_status packed_unpack(const uint8_t *data, size_t bytes, uint64_t size, int deflated, const char *name,
                         const char *beside, packed_file *file, moe_error *error);

/* Read the first bytes of a regular file, at most `bytes`. Returns their number; 0 if the file cannot be read. */
size_t packed_begin(const char *path, void *data, size_t bytes);

/* Write the SHA-256 of a file as stored, in hexadecimal. */
moe_status packed_digest(const char *path, char hex[65], moe_error *error);

/* The names in a folder, sorted; all zero if empty. */
typedef struct packed_names {
    char **data;
    size_t n, capacity;
} packed_names;

moe_status packed_list(const char *folder, packed_names *names, moe_error *error);
void packed_names_free(packed_names *names);

/* Return what a file is instead of a model's file, such as a web page, given its first bytes, a text; or NULL. */
const char *packed_impostor(const char *begin);
extern const char packed_unfinished[]; /* patterns of the names of unfinished downloads, for packed_matches */
/* Return 1 if a file exists, or a link, whose target may be missing. */
int packed_exists(const char *path);
const char *packed_base(const char *path); /* the part after the last slash */

/* Return 1 if one of the patterns, separated by spaces, matches the name. */
int packed_matches(const char *patterns, const char *name);

#endif
