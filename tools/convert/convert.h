/* convert.h - converts published checkpoints to model files without Python: Marian's folders, decoder-only models in
 * Hugging Face's layout, GGUF files, models of CTranslate2 and packages of Argos Translate.
 *
 * The files are the same, byte for byte, as those of convert.py, which supports more families and options, but no
 * models of CTranslate2.
 */
#ifndef CONVERT_CONVERT_H
#define CONVERT_CONVERT_H

#include "moe.h"

typedef struct convert_options {
    const char *path;                                       /* a folder, or a file of a model */
    const char *name, *description, *licence, *attribution; /* general.*; NULL: as the files state */
    moe_type type, experts;                                 /* number formats; MOE_TYPE_KEEP: the layout's default */
    void (*note)(void *user, const char *message);          /* receives consequences of missing parts; may be NULL */
    /* Called before the file is written, with its size and that of the tensors' files; may be NULL. */
    void (*begin)(void *user, uint64_t bytes, uint64_t source);
    void *user;
    /* 1: an interrupted call leaves OUT.partial, which the next one continues if the source and the options are equal.
     * Waits for another process that writes OUT. If OUT exists, does nothing. */
    int resume;
    int ids_only; /* 1: store no tokeniser; the model accepts token ids only */
} convert_options;

typedef enum convert_layout { CONVERT_NONE, CONVERT_MARIAN, CONVERT_HUB, CONVERT_GGUF, CONVERT_CT2 } convert_layout;

/* Explain why a folder is not a published model. Returns 0 if it has no files of one. */
int convert_explain(const char *folder, char *out, size_t size);

/* Guess the layout of a folder or a file by the names of its files; CONVERT_NONE if it is not a published model. */
convert_layout convert_guess(const char *path);

/* Convert to the file `out`, which appears only when complete. Uses memory for the largest matrix or expert and for the
 * tokeniser. Errors: MOE_ERROR_IO, MOE_ERROR_FORMAT (damaged, incomplete or inconsistent files, options that the engine
 * lacks), MOE_ERROR_UNSUPPORTED (convert.py may support the files), MOE_ERROR_MEMORY, MOE_ERROR_CANCELLED. */
moe_status convert_model(const convert_options *options, const char *out, moe_error *error);

/* Write a hash of the names, sizes, times and inodes of the files of a source, and of the contents of small ones. */
moe_status convert_identify(const char *path, char hex[65], moe_error *error);

/* Check whether convert_model supports a folder in Hugging Face's layout, of which the weights may be missing: read the
 * configuration, the tokeniser and the chat template. Returns MOE_ERROR_UNSUPPORTED if the Python converter is needed.
 * Before any file is fetched, moe-get looks at config.json and the chat template. */
moe_status convert_check(const char *folder, moe_error *error);

#endif
