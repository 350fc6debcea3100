/* marian.h - converts Marian's own model files (Firefox's and Bergamot's students, OPUS-MT) to model files.
 *
 * Writes the same bytes as tools/convert/convert.py --from marian, which also reads .npz archives, vocabularies in
 * JSON, shortlists in text and files compressed by zstd.
 */
#ifndef CONVERT_MARIAN_H
#define CONVERT_MARIAN_H

#include "moe.h"

typedef struct marian_files {
    const char *path; /* a folder with one model, or the model in it; the vocabularies are next to the model */
    const char *name; /* general.name; NULL: name of the folder, or of the model without its extension */
    const char *description, *attribution; /* general.*; may be NULL */
    const char *licence;                   /* general.licence; NULL: the text of the folder's LICENSE, if it has one */
    moe_type type; /* number format of matrices; intgemm8 becomes MOE_TYPE_Q8 without rounding */
    void (*note)(void *user, const char *message); /* receives what was missing and its consequence; may be NULL */
    void (*begin)(void *user, uint64_t bytes, uint64_t source); /* as in convert_options; may be NULL */
    void *user;
} marian_files;

/* Convert to the file `out`, which appears only when complete. Uses memory for the largest matrix; compressed files are
 * unpacked to unnamed files in the folder of `out`. Messages name the file and, if any, the tensor or option. Errors:
 * MOE_ERROR_IO, MOE_ERROR_FORMAT (damaged, incomplete or inconsistent files, options that the engine lacks),
 * MOE_ERROR_UNSUPPORTED (files for convert.py), MOE_ERROR_MEMORY, MOE_ERROR_CANCELLED (by a signal). */
moe_status marian_convert(const marian_files *files, const char *out, moe_error *error);

#endif
